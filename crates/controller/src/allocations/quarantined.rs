//! podCIDRs of deleted nodes in quarantine: when a quarantine begins and ends, where it is recorded, and which node
//! gets the ranges back.

use std::time::Duration;

use jiff::Timestamp;

use super::AllocationState;
use super::holders::HolderUse;
use crate::Now;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{MachineIdentity, Node, Subnet, Text};
use crate::deleted_nodes::DeletedNodes;
use crate::pools::{DEFAULT_QUARANTINE, is_wide};
use cadastre_api::AllocatedRange;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, HoldingState};

/// Key of a quarantine: the name and the UID of the deleted Node.
pub(crate) type QuarantineKey = (NodeName, ObjectUid);

/// The podCIDRs of one deleted Node that are in quarantine.
#[derive(Clone, Debug)]
pub struct QuarantinedRanges {
    /// The machine that had the ranges. If the machine registers again under the same name, its new Node gets the
    /// ranges back.
    pub machine: MachineIdentity,
    /// podCIDRs that the deleted Node had.
    pub ranges: Vec<Cidr>,
    /// Earliest end of the quarantine, by the monotonic clock.
    pub until: Duration,
    /// Earliest end of the quarantine as wall time, which NodeSubnets record for users and for the next leader.
    pub until_wall: Timestamp,
    /// Whether the quarantine has ended: its time is over and no pod uses the ranges, or a live node has the ranges
    /// again. The entry is removed once no NodeSubnet records the quarantine any more.
    pub released: bool,
}

impl QuarantinedRanges {
    fn new(machine: MachineIdentity, ranges: Vec<Cidr>, quarantine: Duration, now: Now) -> Self {
        QuarantinedRanges {
            machine,
            ranges,
            until: now.mono + quarantine,
            until_wall: whole_seconds(now.wall.saturating_add(quarantine).unwrap_or(now.wall)),
            released: false,
        }
    }
}

impl AllocationState {
    /// Ends the quarantine of an earlier Node of this name if the live node has all ranges of the quarantine. Without
    /// this, the quarantine would last until no pod of the live node uses the ranges. When the live node is deleted, a
    /// new quarantine starts.
    pub(super) fn end_superseded_quarantine(&mut self, node: &Node) {
        let first = (node.name.clone(), "".into());
        let quarantines = self.quarantined.range_mut(first..);
        for (_, it) in quarantines.take_while(|((name, _), _)| *name == node.name) {
            let has_all = it.ranges.iter().all(|it| node.pod_cidrs.contains(it));
            it.released |= has_all && !Mutation::ReturnedRangeStillQuarantined.is_on();
        }
    }

    /// Quarantines the podCIDRs of a node whose UID is gone. Returns whether the node had any podCIDRs.
    pub(crate) fn quarantine(&mut self, node: &Node, now: Now) -> bool {
        self.too_wide.remove(&node.uid);
        let holdings = self.holdings_of(&node.uid);
        let mut ranges: Vec<Cidr> = holdings.iter().map(|(_, cidr, _)| *cidr).collect();
        ranges.sort_unstable();
        if ranges.is_empty() {
            self.holders.drop_uid(HolderUse::PodCidrs, &node.uid);
            return false;
        }
        for (id, _, _) in holdings {
            self.ledger.set_state(id, HoldingState::Quarantined);
        }
        let quarantine = self.quarantine_of(&ranges);
        let key = (node.name.clone(), node.uid.clone());
        if Mutation::NoQuarantine.is_on() {
            self.release(&key);
            return false;
        }
        let machine = node.machine.clone();
        let quarantined = QuarantinedRanges::new(machine, ranges, quarantine, now);
        self.quarantined.insert(key, quarantined);
        true
    }

    /// Ends a quarantine and releases its holdings. The ranges become free, unless another node has them, too.
    pub fn release(&mut self, key: &QuarantineKey) {
        self.quarantined.remove(key);
        for (id, _, _) in self.holdings_of(&key.1) {
            self.ledger.release(id);
        }
        self.holders.drop_uid(HolderUse::PodCidrs, &key.1);
    }

    /// Returns the quarantined ranges that the node may get back: those of an earlier Node of the same name and
    /// machine.
    pub(crate) fn quarantined_for(&self, node: &Node) -> Option<&QuarantinedRanges> {
        let mut all = self.quarantined_of(&node.name).map(|(_, it)| it);
        all.find(|it| !it.released && it.machine.same(&node.machine))
    }

    /// Returns the quarantines of all deleted Nodes of this name.
    pub fn quarantined_of(
        &self,
        name: &NodeName,
    ) -> impl Iterator<Item = (&QuarantineKey, &QuarantinedRanges)> {
        let from = self.quarantined.range((name.clone(), "".into())..);
        from.take_while(move |((it, _), _)| it == name)
    }

    /// Records the quarantines of podCIDRs that the NodeSubnet lists. If the node of the NodeSubnet is gone, also
    /// quarantines the podCIDRs of that node.
    pub(super) fn restore_subnet(&mut self, subnet: &Subnet, cache: &ClusterCache, now: Now) {
        let Ok(spec) = &subnet.spec else { return };
        let live = cache.nodes.get(&subnet.name).map(|node| node.uid.clone());
        for previous in &spec.quarantined {
            let ranges = read_ranges(&previous.pod_cidrs);
            let uid = previous.node_uid.as_str();
            if ranges.is_empty() || live.as_deref() == Some(uid) {
                continue;
            }
            let (provider_id, machine_id) = (&previous.provider_id, &previous.machine_id);
            let machine = machine(provider_id.as_deref(), machine_id.as_deref());
            let until_wall = previous.until.0;
            let left = left_of(until_wall, self.quarantine_of(&ranges), now);
            let quarantined = QuarantinedRanges {
                until_wall,
                ..QuarantinedRanges::new(machine, ranges, left, now)
            };
            self.restore_quarantine(&subnet.name, &uid.into(), quarantined);
        }
        let Some(uid) = spec.node_uid.as_deref() else {
            return;
        };
        let key = (subnet.name.clone(), uid.into());
        let is_recorded = self.quarantined.contains_key(&key);
        // A wide range that the NodeSubnet lists without a pool did not count against pools while the node lived, so it
        // is not quarantined now.
        let counted = read_ranges(spec.pod_cidrs.iter().filter(|it| it.pool.is_some()));
        let mut ranges = read_ranges(&spec.pod_cidrs);
        ranges.retain(|cidr| !is_wide(cidr) || counted.contains(cidr));
        let unseen = Mutation::UnseenDeletionNotQuarantined.is_on();
        if live.as_deref() == Some(uid) || is_recorded || ranges.is_empty() || unseen {
            return;
        }
        // The node was deleted while there was no leader, so the quarantine begins only now.
        let machine = machine(spec.provider_id.as_deref(), spec.machine_id.as_deref());
        let quarantine = self.quarantine_of(&ranges);
        let quarantined = QuarantinedRanges::new(machine, ranges, quarantine, now);
        self.restore_quarantine(&key.0, &key.1, quarantined);
    }

    /// Quarantines the podCIDRs of nodes that this process saw deleted while it was a standby. Skips a node whose
    /// quarantine is recorded already, and a range that another node has now.
    pub(crate) fn quarantine_deleted(
        &mut self,
        deleted: &DeletedNodes,
        cache: &ClusterCache,
        now: Now,
    ) {
        for gone in deleted.iter() {
            let live = cache.nodes.get(&gone.name);
            let lives = live.is_some_and(|node| node.uid == gone.uid);
            let key = (gone.name.clone(), gone.uid.clone());
            let is_known = lives || self.quarantined.contains_key(&key);
            if is_known || Mutation::UnrecordedDeathForgotten.is_on() {
                continue;
            }
            // A quarantine is recorded even if it is over by now, because perhaps nobody has checked yet whether pods
            // use the ranges.
            let until = gone.at + self.quarantine_of(&gone.ranges);
            let left = until.saturating_sub(now.mono);
            let is_held = |range: &Cidr| {
                let mut holdings = self.ledger.overlapping(range);
                holdings.any(|(_, it)| {
                    it.state == HoldingState::Allocated && it.cidr.len() <= range.len()
                })
            };
            let mut ranges = gone.ranges.clone();
            ranges.retain(|it| !is_held(it) && self.could_be_allocated(it));
            if !ranges.is_empty() {
                let quarantined = QuarantinedRanges::new(gone.machine.clone(), ranges, left, now);
                self.restore_quarantine(&gone.name, &gone.uid, quarantined);
            }
        }
    }

    fn restore_quarantine(
        &mut self,
        name: &NodeName,
        uid: &ObjectUid,
        quarantined: QuarantinedRanges,
    ) {
        let holder = self.holder(name, uid);
        for cidr in &quarantined.ranges {
            self.ledger.record(holder, *cidr, HoldingState::Quarantined);
        }
        let key = (name.clone(), uid.clone());
        self.quarantined.insert(key, quarantined);
    }

    /// Returns how long these ranges of one node are quarantined. If their pools differ, the longest quarantine
    /// applies.
    fn quarantine_of(&self, ranges: &[Cidr]) -> Duration {
        let of_pool = |cidr| {
            let pool = self.pools.of(cidr);
            pool.map_or(DEFAULT_QUARANTINE, |pool| pool.quarantine)
        };
        let all = ranges.iter().map(of_pool);
        let counts = if Mutation::ShortestQuarantineCounts.is_on() {
            all.min()
        } else {
            all.max()
        };
        counts.unwrap_or(DEFAULT_QUARANTINE)
    }
}

/// Returns how long a recorded quarantine still lasts. The result is at most `most`, because a wall clock that was set
/// back must not prolong the quarantine.
pub(super) fn left_of(until: Timestamp, most: Duration, now: Now) -> Duration {
    let left = Duration::try_from(until.duration_since(now.wall)).unwrap_or_default();
    if Mutation::RecordedQuarantineNotBounded.is_on() {
        return left;
    }
    left.min(most)
}

/// Rounds up to seconds, the precision of times in the API. So a time that is read back equals the time that was
/// written.
pub(crate) fn whole_seconds(time: Timestamp) -> Timestamp {
    let seconds = time.as_second() + i64::from(time.subsec_nanosecond() > 0);
    Timestamp::from_second(seconds).unwrap_or(time)
}

fn read_ranges<'a>(ranges: impl IntoIterator<Item = &'a AllocatedRange>) -> Vec<Cidr> {
    let ranges = ranges.into_iter();
    ranges
        .filter_map(|range| Cidr::parse_lenient(&range.cidr).ok())
        .collect()
}

pub(super) fn machine(provider_id: Option<&str>, machine_id: Option<&str>) -> MachineIdentity {
    MachineIdentity {
        provider_id: provider_id.map(Text::from),
        machine_id: machine_id.map(Text::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{NOW, at, cluster, node_with, pool_with};
    use cadastre_daemon::watch::ObjectEvent;

    /// Returns a Node of name `n1`.
    fn node(uid: &str, pod_cidrs: &[&str]) -> Node {
        Node {
            uid: uid.into(),
            ..node_with("n1", pod_cidrs)
        }
    }

    fn unreleased(allocations: &AllocationState) -> usize {
        let all = allocations.quarantined.values();
        all.filter(|it| !it.released).count()
    }

    #[test]
    fn a_quarantine_ends_if_a_live_node_of_the_name_has_all_the_ranges() {
        let mut allocations = AllocationState::default();
        for (uid, next) in [("u1", "u2"), ("u2", "u3")] {
            let gone = node(uid, &["10.0.0.0/24"]);
            allocations.sync(&gone, None);
            assert!(allocations.quarantine(&gone, NOW));
            assert_eq!(unreleased(&allocations), 1);
            allocations.sync(&node(next, &["10.0.0.0/24"]), None);
            assert_eq!(unreleased(&allocations), 0);
        }
        let gone = node("u3", &["10.0.0.0/24"]);
        allocations.quarantine(&gone, NOW);
        allocations.sync(&node("u4", &["10.0.1.0/24"]), None);
        assert_eq!(unreleased(&allocations), 1, "it has another range");
    }

    #[test]
    fn a_range_that_a_standby_saw_go_is_quarantined_unless_another_node_has_all_of_it() {
        let mut cache = ClusterCache::default();
        let mut deleted = DeletedNodes::default();
        for (uid, range) in [("u1", "10.0.0.0/27"), ("u2", "10.0.0.32/28")] {
            let gone = node(uid, &[range]);
            cache.nodes.change(ObjectEvent::Applied(gone.clone()));
            for update in cache.nodes.change(ObjectEvent::Deleted(gone)) {
                deleted.node_changed(&update, Duration::from_secs(100));
            }
        }
        // Other nodes have part of the first range and all of the second.
        for (name, range) in [("u8", "10.0.0.16/28"), ("u9", "10.0.0.32/28")] {
            let has = node_with(name, &[range]);
            cache.nodes.change(ObjectEvent::Applied(has));
        }
        // A quarantine whose time is over stays until somebody has checked that no pods use the ranges.
        for (now, until) in [(110, 160), (200, 200)] {
            let now = at(now);
            let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now);
            allocations.quarantine_deleted(&deleted, &cache, now);
            let all = allocations.quarantined.into_iter();
            let all: Vec<_> = all.map(|((_, uid), it)| (uid, it.until)).collect();
            assert_eq!(all, [("u1".into(), Duration::from_secs(until))]);
        }
    }

    #[test]
    fn the_longest_quarantine_of_the_pools_counts() {
        let pools = [("p", "10.0.0.0/24", 5), ("q", "10.0.1.0/24", 90)];
        let pools = pools.map(|(name, range, seconds)| {
            pool_with(name, range, |spec| spec.quarantine_seconds = seconds)
        });
        let mut allocations = AllocationState::default();
        let cache = cluster(pools.into(), Vec::new());
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        let gone = node("u1", &["10.0.0.0/28", "10.0.1.0/28"]);
        allocations.sync(&gone, None);
        allocations.quarantine(&gone, NOW);
        let quarantined = allocations.quarantined.values().next().unwrap();
        assert_eq!(quarantined.until, Duration::from_secs(90));
    }
}
