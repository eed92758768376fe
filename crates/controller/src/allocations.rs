//! The leader's ledger: which node has which range, and which ranges of deleted nodes are in quarantine.
//!
//! The leader builds the ledger from the cache when its term begins and drops the ledger when the term ends. In
//! between, [`AllocationState::sync`] records every change of a Node, and [`AllocationState::quarantine`] every
//! deletion.
//!
//! # Guarantees
//! - A podCIDR leaves the ledger in two ways only. `sync` removes it if the node provably has other podCIDRs. `release`
//!   removes it when its quarantine is over and no NodeSubnet records it any more.
//! - A range that two nodes have is recorded twice: releasing one record never frees the other node's addresses.

pub mod adopt;
pub mod blocks;
pub mod foreign;
pub mod holders;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

use super::Now;
use super::deleted_nodes::DeletedNodes;
use super::failing_calls::FailingCalls;
use super::intents::IntentBook;
use super::pools::{DEFAULT_QUARANTINE, PoolStates};
use crate::allocations::adopt::UnadoptedBlocks;
use crate::allocations::blocks::BlockTable;
use crate::allocations::foreign::{AllTooWide, is_wide};
use crate::allocations::holders::{HolderIds, HolderUse};
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{MachineIdentity, Node, PodUid, Subnet, Text};
use cadastre_api::{AllocatedRange, QuarantinedNode};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr, Holder, HoldingId, HoldingState, RangeLedger};

/// Key of a quarantine: the name and the UID of the deleted Node.
pub(crate) type QuarantineKey = (NodeName, ObjectUid);

/// The podCIDRs of one deleted Node that are in quarantine.
#[derive(Clone, Debug)]
pub struct QuarantinedRanges {
    /// The machine that had the ranges. If it registers again under the same name, it gets them back.
    pub machine: MachineIdentity,
    /// The ranges in quarantine.
    pub ranges: Vec<Cidr>,
    /// Earliest end of the quarantine, by the monotonic clock.
    pub until: Duration,
    /// The same end as wall time, which NodeSubnets record for users and for the next leader.
    pub until_wall: Timestamp,
    /// Whether the ranges are to be freed: the quarantine is over and no pod uses them, or a live node has them again.
    /// The entry itself is removed once no NodeSubnet records it.
    pub released: bool,
}

/// Result of [`AllocationState::sync`].
#[derive(Debug, Default)]
pub struct SyncOutcome {
    /// podCIDRs that this leader did not allocate and that were unknown before.
    pub foreign: Vec<Cidr>,
    /// Whether the Node shows a podCIDR whose write was not confirmed before.
    pub confirmed: bool,
    /// Whether a range became free.
    pub freed: bool,
    /// Other nodes that have some of the same addresses: name, UID and range of each.
    pub overlaps: Vec<(NodeName, ObjectUid, Cidr)>,
}

/// The ledger of ranges, and the state on which decisions about ranges depend.
#[derive(Debug, Default)]
pub struct AllocationState {
    /// Holdings of nodes on ranges
    pub ledger: RangeLedger,
    /// The pools and their state
    pub pools: PoolStates,
    /// podCIDRs in quarantine
    pub quarantined: BTreeMap<QuarantineKey, QuarantinedRanges>,
    /// Affinity blocks
    pub blocks: BlockTable,
    /// Leak candidates that agents are to check, by the UID of the agent's node
    pub leak_candidates: BTreeMap<ObjectUid, BTreeSet<(Addr, PodUid)>>,
    /// Blocks that agents report in use but that cannot be adopted now
    pub unadopted: UnadoptedBlocks,
    /// Whether decisions about blocks wait because agents have not had time to report yet.
    pub in_agent_grace: bool,
    /// Whether there was no leader for so long before this term that the API server may have been restored from a
    /// backup.
    pub after_gap: bool,
    /// Failed calls, each with the end of its back-off
    pub refusals: FailingCalls,
    /// podCIDR writes that may be in flight; the Lease must name each of them before it is sent
    pub(super) intents: IntentBook,
    pub(super) holders: HolderIds,
    /// podCIDRs that are too wide to count against pools
    pub(super) too_wide: AllTooWide,
    conflicts: BTreeSet<(HoldingId, HoldingId)>,
}

impl AllocationState {
    /// Builds the ledger from the cache: podCIDRs of Nodes, quarantined ranges that NodeSubnets record, and blocks.
    /// Also returns each node whose podCIDRs overlap another node's, with the overlaps in [`SyncOutcome::overlaps`].
    pub fn rebuild(
        cache: &ClusterCache,
        flag_services: &[Cidr],
        now: Now,
    ) -> (Self, Vec<(NodeName, SyncOutcome)>) {
        let mut allocations = AllocationState::default();
        let mut overlapping = Vec::new();
        allocations.pools.evaluate(cache, flag_services, now.mono);
        for node in cache.nodes.iter() {
            let synced = allocations.sync(node, cache.subnets.get(&node.name).map(AsRef::as_ref));
            if !synced.overlaps.is_empty() {
                overlapping.push((node.name.clone(), synced));
            }
        }
        for subnet in cache.subnets.iter() {
            allocations.restore_subnet(subnet, cache, now);
        }
        for node in cache.nodes.iter() {
            allocations.end_superseded_quarantine(node);
        }
        allocations.rebuild_blocks(cache, now);
        (allocations, overlapping)
    }

    /// Returns the ledger's holder for the podCIDRs of a node's UID. Creates the holder if there is none.
    pub fn holder(&mut self, name: &NodeName, uid: &ObjectUid) -> Holder {
        self.holders.intern(HolderUse::PodCidrs, name, uid)
    }

    /// Returns the podCIDRs that a node UID holds.
    pub(crate) fn holdings_of(&self, uid: &ObjectUid) -> Vec<(HoldingId, Cidr, HoldingState)> {
        let Some(holder) = self.holders.get(HolderUse::PodCidrs, uid) else {
            return Vec::new();
        };
        self.ledger
            .of(holder)
            .map(|(id, holding)| (id, holding.cidr, holding.state))
            .collect()
    }

    /// Returns whether any write is indeterminate.
    pub(crate) fn has_indeterminate(&self) -> bool {
        self.indeterminate() > 0
    }

    /// Returns how many ranges count as allocated although it is unknown whether their write succeeded.
    pub fn indeterminate(&self) -> usize {
        self.holders
            .all()
            .flat_map(|holder| self.ledger.of(holder))
            .filter(|(_, c)| c.state == HoldingState::Indeterminate)
            .count()
    }

    /// Returns how many pairs of nodes have some of the same addresses.
    pub fn overlaps(&mut self) -> usize {
        let AllocationState {
            ledger, conflicts, ..
        } = self;
        let held = |id: &HoldingId| {
            ledger
                .get(*id)
                .is_some_and(|holding| holding.state == HoldingState::Allocated)
        };
        conflicts.retain(|(a, b)| held(a) && held(b));
        conflicts.len()
    }

    /// Returns name and UID of the node behind a holder.
    pub fn node_of(&self, holder: Holder) -> Option<&(NodeName, ObjectUid)> {
        self.holders.node_of(holder)
    }

    /// Records the podCIDRs of a live node. podCIDRs are immutable once set. So if the node has any, holdings of this UID
    /// to other ranges are released, because those writes can no longer succeed. `listed` is the NodeSubnet of the
    /// node's name.
    pub fn sync(&mut self, node: &Node, listed: Option<&Subnet>) -> SyncOutcome {
        let mut synced = SyncOutcome::default();
        // An earlier read had found that the Node was gone, so its ranges were quarantined. But the watch shows the
        // Node.
        let revived = self
            .quarantined
            .remove(&(node.name.clone(), node.uid.clone()))
            .is_some();
        if node.is_empty() {
            for (id, _, _) in self.holdings_of(&node.uid).into_iter().filter(|_| revived) {
                self.ledger.set_state(id, HoldingState::Indeterminate);
                if Mutation::RevivedNodeLosesHolding.is_on() {
                    self.ledger.release(id);
                }
            }
            return synced;
        }
        let holder = self.holder(&node.name, &node.uid);
        let mut missing: Vec<Cidr> = node.pod_cidrs.to_vec();
        let holdings: Vec<(HoldingId, Cidr, HoldingState)> = self.holdings_of(&node.uid);
        for (id, cidr, state) in holdings {
            if let Some(at) = missing.iter().position(|m| *m == cidr) {
                missing.swap_remove(at);
                synced.confirmed |= state != HoldingState::Allocated;
                self.ledger.set_state(id, HoldingState::Allocated);
            } else if !Mutation::ImpossibleHoldingKept.is_on() {
                self.ledger.release(id);
                synced.freed = true;
            }
        }
        let counts = |cidr: &Cidr| self.counts(cidr, node, listed);
        let too_wide = missing.extract_if(.., |it| !counts(it)).collect();
        self.note_too_wide(node, too_wide);
        for cidr in &missing {
            self.ledger.record(holder, *cidr, HoldingState::Allocated);
        }
        if synced.confirmed || !missing.is_empty() {
            synced.overlaps = self.conflicts_of(holder);
        }
        synced.foreign = missing;
        self.end_superseded_quarantine(node);
        synced
    }

    /// Ends the quarantine of an earlier Node of this name if the live node has all its ranges. Otherwise the
    /// quarantine would last as long as pods of the live node use the ranges. The deletion of the live node starts a
    /// new quarantine.
    fn end_superseded_quarantine(&mut self, node: &Node) {
        let first = (node.name.clone(), "".into());
        let rests = self.quarantined.range_mut(first..);
        for (_, rest) in rests.take_while(|((name, _), _)| *name == node.name) {
            let has_all = rest.ranges.iter().all(|it| node.pod_cidrs.contains(it));
            rest.released |= has_all && !Mutation::ReturnedRangeStillQuarantined.is_on();
        }
    }

    /// Quarantines the podCIDRs of a node whose UID is gone. Returns whether the node had any.
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
        self.quarantined.insert(
            key,
            QuarantinedRanges::new(node.machine.clone(), ranges, quarantine, now),
        );
        true
    }

    /// Ends a quarantine and releases its holdings. The ranges are free then, unless another node has them too.
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
        self.quarantined
            .range((node.name.clone(), "".into())..)
            .take_while(|((name, _), _)| *name == node.name)
            .map(|(_, rest)| rest)
            .find(|rest| !rest.released && rest.machine.same(&node.machine))
    }

    /// Returns the quarantines of all deleted Nodes of this name.
    pub fn quarantined_of<'a>(
        &'a self,
        name: &'a NodeName,
    ) -> impl Iterator<Item = (&'a QuarantineKey, &'a QuarantinedRanges)> {
        self.quarantined
            .range((name.clone(), "".into())..)
            .take_while(move |((n, _), _)| n == name)
    }

    /// Returns the ranges in the form in which a NodeSubnet lists them, each with the pool against which it counts.
    pub(crate) fn allocated_ranges(&self, ranges: &[Cidr]) -> Vec<AllocatedRange> {
        ranges
            .iter()
            .map(|cidr| AllocatedRange {
                cidr: cidr.to_string(),
                pool: self.pools.of(cidr).map(|pool| pool.name.to_string()),
                withheld: false,
            })
            .collect()
    }

    /// Quarantines the podCIDRs of deleted nodes that the NodeSubnet records.
    fn restore_subnet(&mut self, subnet: &Subnet, cache: &ClusterCache, now: Now) {
        let Ok(spec) = &subnet.spec else { return };
        let live = cache.nodes.get(&subnet.name).map(|node| node.uid.clone());
        for previous in &spec.quarantined {
            self.restore_quarantined(&subnet.name, previous, live.as_deref(), now);
        }
        let Some(uid) = spec.node_uid.as_deref() else {
            return;
        };
        let known = self
            .quarantined
            .contains_key(&(subnet.name.clone(), uid.into()));
        // A wide range that is listed without a pool did not count while the node lived, so it is not quarantined.
        let mut ranges = read_ranges(&spec.pod_cidrs);
        ranges.retain(|cidr| {
            let mut listed = spec.pod_cidrs.iter().filter(|it| it.pool.is_some());
            let is_it = |it: &AllocatedRange| Cidr::parse_lenient(&it.cidr).as_ref() == Ok(cidr);
            !is_wide(cidr) || listed.any(is_it)
        });
        let unseen = Mutation::UnseenDeletionNotQuarantined.is_on();
        if live.as_deref() == Some(uid) || known || ranges.is_empty() || unseen {
            return;
        }
        // The node was deleted while there was no leader, so the quarantine begins only now.
        let machine = machine(spec.provider_id.as_deref(), spec.machine_id.as_deref());
        let quarantine = self.quarantine_of(&ranges);
        self.restore_to_quarantine(
            &subnet.name,
            &uid.into(),
            QuarantinedRanges::new(machine, ranges, quarantine, now),
        );
    }

    fn restore_quarantined(
        &mut self,
        name: &NodeName,
        previous: &QuarantinedNode,
        live: Option<&str>,
        now: Now,
    ) {
        let ranges = read_ranges(&previous.pod_cidrs);
        if ranges.is_empty() || live == Some(previous.node_uid.as_str()) {
            return;
        }
        let machine = machine(
            previous.provider_id.as_deref(),
            previous.machine_id.as_deref(),
        );
        let mut rest = QuarantinedRanges::new(machine, ranges, Duration::ZERO, now);
        rest.until_wall = previous.until.0;
        rest.until = now.mono + left_of(rest.until_wall, self.quarantine_of(&rest.ranges), now);
        self.restore_to_quarantine(name, &previous.node_uid.as_str().into(), rest);
    }

    /// Quarantines the podCIDRs of nodes that this process saw deleted while it was a standby, unless a NodeSubnet
    /// records them. A range that another node has as a whole by now needs no quarantine.
    pub(crate) fn quarantine_deleted(
        &mut self,
        departed: &DeletedNodes,
        cache: &ClusterCache,
        now: Now,
    ) {
        for gone in departed.iter() {
            let live = cache.nodes.get(&gone.name);
            let lives = live.is_some_and(|node| node.uid == gone.uid);
            let key = (gone.name.clone(), gone.uid.clone());
            let is_known = lives || self.quarantined.contains_key(&key);
            if is_known || Mutation::UnrecordedDeathForgotten.is_on() {
                continue;
            }
            // A quarantine that is over by now is recorded nevertheless, because the node's pods may not have been
            // checked yet.
            let until = gone.at + self.quarantine_of(&gone.ranges);
            let left = until.saturating_sub(now.mono);
            let is_held = |range: &&Cidr| {
                let mut holdings = self.ledger.overlapping(range);
                holdings.any(|(_, it)| {
                    it.state == HoldingState::Allocated && it.cidr.len() <= range.len()
                })
            };
            let ranges: Vec<Cidr> = gone
                .ranges
                .iter()
                .filter(|it| !is_held(it) && self.could_be_allocated(it))
                .copied()
                .collect();
            if !ranges.is_empty() {
                let rest = QuarantinedRanges::new(gone.machine.clone(), ranges, left, now);
                self.restore_to_quarantine(&gone.name, &gone.uid, rest);
            }
        }
    }

    fn restore_to_quarantine(&mut self, name: &NodeName, uid: &ObjectUid, rest: QuarantinedRanges) {
        let holder = self.holder(name, uid);
        for cidr in &rest.ranges {
            self.ledger.record(holder, *cidr, HoldingState::Quarantined);
        }
        self.quarantined.insert((name.clone(), uid.clone()), rest);
    }

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

    fn conflicts_of(&mut self, holder: Holder) -> Vec<(NodeName, ObjectUid, Cidr)> {
        let mut found = Vec::new();
        let mine: Vec<(HoldingId, Cidr)> = self
            .ledger
            .of(holder)
            .map(|(id, holding)| (id, holding.cidr))
            .collect();
        for (id, cidr) in mine {
            for (other, holding) in self.ledger.overlapping(&cidr) {
                let unreported = Mutation::OverlapsNotReported.is_on();
                if holding.holder == holder
                    || holding.state != HoldingState::Allocated
                    || unreported
                {
                    continue;
                }
                self.conflicts.insert((id.min(other), id.max(other)));
                if let Some((name, uid)) = self.holders.node_of(holding.holder) {
                    found.push((name.clone(), uid.clone(), holding.cidr));
                }
            }
        }
        found
    }
}

impl QuarantinedRanges {
    fn new(machine: MachineIdentity, ranges: Vec<Cidr>, quarantine: Duration, now: Now) -> Self {
        let until_wall = now.wall.saturating_add(quarantine).unwrap_or(now.wall);
        let until_wall = whole_seconds(until_wall);
        QuarantinedRanges {
            machine,
            ranges,
            until: now.mono + quarantine,
            until_wall,
            released: false,
        }
    }
}

/// Returns how long a recorded quarantine still lasts: at most `most`, because a wall clock that was set back must not
/// prolong it.
pub(super) fn left_of(until: Timestamp, most: Duration, now: Now) -> Duration {
    let left = Duration::try_from(until.duration_since(now.wall)).unwrap_or_default();
    if Mutation::RecordedQuarantineNotBounded.is_on() {
        return left;
    }
    left.min(most)
}

/// Rounds up to seconds, the precision of times in the API, so that a time read back equals the one written.
pub(super) fn whole_seconds(time: Timestamp) -> Timestamp {
    let seconds = time.as_second() + i64::from(time.subsec_nanosecond() > 0);
    Timestamp::from_second(seconds).unwrap_or(time)
}

fn read_ranges(ranges: &[AllocatedRange]) -> Vec<Cidr> {
    ranges
        .iter()
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
    use crate::demand::tests::{NOW, list, pool};
    use cadastre_daemon::watch::ObjectEvent;

    fn node(uid: &str, cidr: &str) -> Node {
        Node {
            uid: uid.into(),
            pod_cidrs: [Cidr::parse_strict(cidr).unwrap()].into(),
            ..crate::demand::tests::node("n1")
        }
    }

    fn resting(allocations: &AllocationState) -> usize {
        let name = "n1".into();
        allocations
            .quarantined_of(&name)
            .filter(|(_, rest)| !rest.released)
            .count()
    }

    #[test]
    fn what_a_live_node_of_the_name_holds_again_rests_no_longer() {
        let now = Now {
            mono: Duration::ZERO,
            wall: Timestamp::UNIX_EPOCH,
        };
        let mut allocations = AllocationState::default();
        for (uid, next) in [("u1", "u2"), ("u2", "u3")] {
            let gone = node(uid, "10.0.0.0/24");
            allocations.sync(&gone, None);
            assert!(allocations.quarantine(&gone, now));
            assert_eq!(resting(&allocations), 1);
            allocations.sync(&node(next, "10.0.0.0/24"), None);
            assert_eq!(resting(&allocations), 0);
        }
        let gone = node("u3", "10.0.0.0/24");
        allocations.quarantine(&gone, now);
        allocations.sync(&node("u4", "10.0.1.0/24"), None);
        assert_eq!(resting(&allocations), 1, "it got something else");
    }

    fn cidr(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    #[test]
    fn a_holding_that_can_no_longer_come_true_is_free() {
        let mut allocations = AllocationState::default();
        let has = node("u1", "10.0.1.0/24");
        let holder = allocations.holder(&has.name, &has.uid);
        let wanted = cidr("10.0.0.0/24");
        allocations
            .ledger
            .record(holder, wanted, HoldingState::Indeterminate);
        assert!(allocations.sync(&has, None).freed);
        assert!(allocations.ledger.overlapping(&wanted).next().is_none());
        assert_eq!(allocations.holdings_of(&"u1".into()).len(), 1);
    }

    #[test]
    fn a_node_that_was_taken_for_gone_keeps_the_range_it_may_get() {
        let empty = Node {
            pod_cidrs: [].into(),
            ..node("u1", "10.0.0.0/24")
        };
        let mut allocations = AllocationState::default();
        let holder = allocations.holder(&empty.name, &empty.uid);
        let wanted = cidr("10.0.0.0/24");
        allocations
            .ledger
            .record(holder, wanted, HoldingState::InFlight);
        assert!(allocations.quarantine(&empty, NOW));
        allocations.sync(&empty, None);
        let holdings = allocations.holdings_of(&"u1".into());
        let states: Vec<HoldingState> = holdings.iter().map(|(_, _, state)| *state).collect();
        assert_eq!(states, [HoldingState::Indeterminate]);
        assert!(allocations.quarantined.is_empty());
    }

    #[test]
    fn two_nodes_with_common_addresses_are_a_pair() {
        let mut allocations = AllocationState::default();
        allocations.sync(&node("u1", "10.0.0.0/24"), None);
        let other = Node {
            name: "n2".into(),
            ..node("u2", "10.0.0.128/25")
        };
        let overlaps = allocations.sync(&other, None).overlaps;
        let first = ("n1".into(), "u1".into(), cidr("10.0.0.0/24"));
        assert_eq!(overlaps, [first]);
        assert_eq!(allocations.overlaps(), 1);
    }

    #[test]
    fn what_a_standby_saw_go_rests_once_it_leads_unless_somebody_has_it() {
        let mut cache = ClusterCache::default();
        let mut departed = DeletedNodes::default();
        for (uid, range) in [("u1", "10.0.0.0/27"), ("u2", "10.0.0.32/28")] {
            cache.nodes.change(ObjectEvent::Applied(node(uid, range)));
            for delta in cache.nodes.change(ObjectEvent::Deleted(node(uid, range))) {
                departed.node_changed(&delta, Duration::from_secs(100));
            }
        }
        // Other nodes have part of the first range and all of the second.
        for (uid, range) in [("u8", "10.0.0.16/28"), ("u9", "10.0.0.32/28")] {
            let has = Node {
                name: uid.into(),
                ..node(uid, range)
            };
            cache.nodes.change(ObjectEvent::Applied(has));
        }
        let resting_at = |second: u64| {
            let now = Now {
                mono: Duration::from_secs(second),
                ..NOW
            };
            let (mut allocations, _) = AllocationState::rebuild(&cache, &[], now);
            allocations.quarantine_deleted(&departed, &cache, now);
            let rests = allocations.quarantined.into_iter();
            rests
                .map(|((_, uid), it)| (uid, it.until))
                .collect::<Vec<_>>()
        };
        let until = Duration::from_secs(100) + DEFAULT_QUARANTINE;
        assert_eq!(resting_at(110), [("u1".into(), until)]);
        let now = Duration::from_secs(200);
        assert_eq!(
            resting_at(200),
            [("u1".into(), now)],
            "until it was looked at"
        );
    }

    #[test]
    fn ranges_rest_for_the_longest_quarantine_of_their_pools() {
        let mut cache = ClusterCache::default();
        let pools = [("p", "10.0.0.0/24", 5), ("q", "10.0.1.0/24", 90)];
        let pools = pools.map(|(name, range, seconds)| {
            let mut pool = pool(name, range);
            pool.spec.as_mut().unwrap().quarantine_seconds = seconds;
            pool
        });
        list(&mut cache.pools, pools.into());
        let mut allocations = AllocationState::default();
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        let gone = Node {
            pod_cidrs: [cidr("10.0.0.0/28"), cidr("10.0.1.0/28")].into(),
            ..node("u1", "10.0.0.0/28")
        };
        allocations.sync(&gone, None);
        allocations.quarantine(&gone, NOW);
        let rest = allocations.quarantined.values().next().unwrap();
        assert_eq!(rest.until, Duration::from_secs(90));
    }
}
