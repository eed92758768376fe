//! podCIDRs that another program wrote. For example, a kubelet may set the podCIDRs of its own Node as long as the Node
//! has none.
//!
//! A podCIDR of a usual size counts against pools as if Cadastre had allocated it. A wider podCIDR that overlaps a pool
//! does not count, because it would exhaust every pool inside it. The NodeSubnet does not list such a podCIDR either,
//! until a pool has blocks of that size. A wide podCIDR that overlaps no pool does no harm. It does not count either,
//! but the NodeSubnet lists it.
//!
//! # Guarantees
//! - A podCIDR keeps counting if the NodeSubnet of the same Node lists it with a pool, even if the pool's block size
//!   has changed since.
//! - A podCIDR that is too wide is reported by an event, by conditions of the pools that it covers, and by a metric.
//! - A podCIDR that overlaps another node's range is listed with `withheld`: the NodeSubnet records it, but the agent
//!   assigns none of its addresses.

use std::collections::BTreeMap;

use crate::allocations::AllocationState;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{Node, Subnet};
use crate::cluster::request::ObjectKind;
use crate::pools::{PoolState, is_wide};
use crate::report::{EventRecord, PODCIDR_TOO_WIDE, Regarding};
use cadastre_api::{AllocatedRange, NodeSubnetSpec};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Holding, HoldingState};

/// The podCIDRs of a Node that are too wide to count against pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TooWide {
    pub name: NodeName,
    pub cidrs: Vec<Cidr>,
    /// Whether an event has reported these podCIDRs
    reported: bool,
}

/// All podCIDRs that are too wide to count against pools. The key is the UID of their Node.
pub(crate) type AllTooWide = BTreeMap<ObjectUid, TooWide>;

impl AllocationState {
    /// Returns whether a pool or another allocator can allocate a podCIDR of this size to a node.
    pub(crate) fn could_be_allocated(&self, range: &Cidr) -> bool {
        let len_of = |pool: &PoolState| pool.space.block_len(range.family());
        let mut ours = self.pools.touching(range).filter_map(len_of);
        let counts_all = Mutation::WidePodCidrCounts.is_on();
        counts_all || !is_wide(range) || ours.any(|len| len <= range.len())
    }

    /// Returns whether a Node's podCIDR counts against pools. `listed` is the NodeSubnet of the Node's name.
    pub(crate) fn counts(&self, cidr: &Cidr, node: &Node, listed: Option<&Subnet>) -> bool {
        let has_pool = |range: &AllocatedRange| range.pool.is_some();
        self.could_be_allocated(cidr) || listed_as(listed, node, cidr).is_some_and(has_pool)
    }

    /// Records which podCIDRs of a Node are too wide to count against pools.
    pub(crate) fn note_too_wide(&mut self, node: &Node, cidrs: Vec<Cidr>) {
        if cidrs.is_empty() {
            self.too_wide.remove(&node.uid);
            return;
        }
        let before = self.too_wide.get(&node.uid);
        let entry = TooWide {
            name: node.name.clone(),
            reported: before.is_some_and(|it| it.reported && it.cidrs == cidrs),
            cidrs,
        };
        self.too_wide.insert(node.uid.clone(), entry);
    }

    /// Decides again, after a change of pools, which wide podCIDRs count against pools. Returns the names of all Nodes
    /// that had such podCIDRs, because their NodeSubnets may have to list them differently.
    pub(crate) fn recount_pod_cidrs(&mut self, cache: &ClusterCache) -> Vec<NodeName> {
        let names: Vec<NodeName> = self.too_wide.values().map(|it| it.name.clone()).collect();
        for name in &names {
            if let Some(node) = cache.nodes.get(name) {
                self.sync(node, cache.subnets.get(name).map(AsRef::as_ref));
            }
        }
        names
    }

    /// Returns the podCIDRs that overlap a pool but are too wide to count against pools, each with the name of its
    /// Node.
    pub(crate) fn too_wide(&self) -> impl Iterator<Item = (&NodeName, &Cidr)> {
        let all = self.too_wide.values();
        let all = all.flat_map(|it| it.cidrs.iter().map(move |cidr| (&it.name, cidr)));
        all.filter(|(_, cidr)| self.pools.is_any_over(cidr))
    }

    /// Reports the podCIDRs that overlap a pool but are too wide to count against pools. Reports one event for each
    /// Node.
    pub(crate) fn report_too_wide(&mut self, reports: &mut Vec<EventRecord>) {
        let AllocationState {
            too_wide, pools, ..
        } = self;
        for (uid, entry) in too_wide.iter_mut().filter(|(_, it)| !it.reported) {
            let Some(cidr) = entry.cidrs.iter().find(|it| pools.is_any_over(it)) else {
                continue;
            };
            entry.reported = true;
            let about = Regarding::new(ObjectKind::Node, entry.name.clone(), uid);
            let note = format!("{}: {ADVICE}", too_wide_text(cidr));
            reports.push(EventRecord::warning(about, PODCIDR_TOO_WIDE, note));
        }
    }

    /// Returns the podCIDRs of a Node that count against pools.
    pub fn pod_cidrs<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Cidr> {
        let all = node.pod_cidrs.iter();
        all.filter(|cidr| !self.is_too_wide(cidr, node))
    }

    fn is_too_wide(&self, cidr: &Cidr, node: &Node) -> bool {
        let of_node = self.too_wide.get(&node.uid);
        of_node.is_some_and(|it| it.cidrs.contains(cidr))
    }

    /// Returns the podCIDRs of a Node in the form in which its NodeSubnet should list them. `is` is the present
    /// NodeSubnet, if there is one.
    pub fn listed_pod_cidrs(&self, node: &Node, is: Option<&Subnet>) -> Vec<AllocatedRange> {
        let mut cidrs = node.pod_cidrs.to_vec();
        cidrs.retain(|it| !self.is_too_wide(it, node) || !self.pools.is_any_over(it));
        let mut listed = self.allocated_ranges(&cidrs);
        for (range, cidr) in listed.iter_mut().zip(&cidrs) {
            let is_usable = listed_as(is, node, cidr).is_some_and(|it| !it.withheld);
            range.withheld = !is_usable && self.is_of_another(cidr, node);
        }
        listed
    }

    /// Returns whether another node, live or deleted, has addresses of the range. A quarantined range of an earlier
    /// Node with this Node's name does not count.
    fn is_of_another(&self, range: &Cidr, node: &Node) -> bool {
        let is_own = |holding: &Holding| {
            self.node_of(holding.holder).is_some_and(|(name, uid)| {
                *uid == node.uid
                    || (*name == node.name && holding.state == HoldingState::Quarantined)
            })
        };
        let mut holdings = self.ledger.overlapping(range);
        let of_another = holdings.any(|(_, holding)| !is_own(&holding));
        of_another && !Mutation::ContestedPodCidrAllocated.is_on()
    }
}

/// Returns the entry of a range in the NodeSubnet. Returns `None` if the NodeSubnet is not for this Node's UID or does
/// not list the range.
fn listed_as<'a>(is: Option<&'a Subnet>, node: &Node, cidr: &Cidr) -> Option<&'a AllocatedRange> {
    let is_its = |spec: &&NodeSubnetSpec| spec.node_uid.as_deref() == Some(&*node.uid);
    let spec = is?.spec.as_ref().ok().filter(is_its)?;
    let is_it = |it: &&AllocatedRange| Cidr::parse_lenient(&it.cidr).as_ref() == Ok(cidr);
    spec.pod_cidrs.iter().find(is_it)
}

/// Advice to the administrator about a podCIDR that is too wide, for events and conditions.
pub const ADVICE: &str =
    "find out who wrote it, as a kubelet can; delete the Node object and restart its kubelet";

/// Returns a description of a podCIDR that is too wide, for events and conditions.
pub fn too_wide_text(cidr: &Cidr) -> String {
    format!(
        "its podCIDR {cidr} is wider than any that a node could have been given, so it counts against no pool and is not listed to the node's agent: what pods there have of it may be given to others, too"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::Pool;
    use crate::deleted_nodes::DeletedNodes;
    use cadastre_core::Family;

    use crate::fixtures::{
        NOW, at, cidr, cluster, list, node, node_with, objects, pool, pool_with, rebuilt, subnet,
    };

    const POOL: &str = "10.0.0.0/24";

    /// Returns the cluster's node `wide`.
    fn wide(cache: &ClusterCache) -> &Node {
        cache.nodes.get("wide").unwrap()
    }

    /// Returns how many addresses of the pool are free.
    fn free(allocations: &AllocationState) -> u128 {
        let pool = allocations.pools.get("p").unwrap();
        crate::figures::figures(pool, Family::V4, allocations).free
    }

    /// Returns a NodeSubnet of the node `wide` that lists these podCIDRs.
    fn listing(pod_cidrs: Vec<AllocatedRange>) -> Subnet {
        let mut subnet = subnet("wide", &[], 0);
        subnet.spec.as_mut().unwrap().pod_cidrs = pod_cidrs;
        subnet
    }

    #[test]
    fn a_podcidr_that_no_node_could_have_got_takes_nothing_from_pools() {
        for range in ["0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/19"] {
            let cache = cluster(vec![pool("p", POOL)], vec![node_with("wide", &[range])]);
            let mut allocations = rebuilt(&cache);
            assert_eq!(free(&allocations), 16, "{range}");
            let too_wide: Vec<_> = allocations.too_wide().collect();
            assert_eq!(too_wide, [(&"wide".into(), &cidr(range))]);
            let mut reports = Vec::new();
            allocations.report_too_wide(&mut reports);
            allocations.report_too_wide(&mut reports);
            let reasons: Vec<_> = reports.iter().map(|it| it.reason).collect();
            assert_eq!(reasons, [PODCIDR_TOO_WIDE], "once");
            assert_eq!(allocations.listed_pod_cidrs(wide(&cache), None), []);
            assert!(!allocations.quarantine(wide(&cache), NOW));
            assert_eq!(free(&allocations), 16);
        }
    }

    #[test]
    fn a_podcidr_of_another_allocator_counts() {
        let nodes = vec![node_with("n", &["10.0.0.0/20"])];
        let allocations = rebuilt(&cluster(vec![pool("p", POOL)], nodes));
        assert_eq!(free(&allocations), 0);
        assert_eq!(allocations.too_wide().count(), 0);
    }

    /// Returns a pool that allocates /18 blocks.
    fn of_wide_blocks() -> Pool {
        pool_with("p", "10.0.0.0/16", |spec| {
            spec.ipv4.as_mut().unwrap().block_size = Some(18);
        })
    }

    #[test]
    fn a_podcidr_that_is_listed_with_a_pool_still_counts_when_blocks_become_smaller() {
        let nodes = vec![node_with("wide", &["10.0.64.0/18"])];
        let mut cache = cluster(vec![of_wide_blocks()], nodes);
        let allocations = rebuilt(&cache);
        assert_eq!(free(&allocations), 3);
        let listed = allocations.listed_pod_cidrs(wide(&cache), None);
        let smaller = Pool {
            version: 2,
            ..pool("p", "10.0.0.0/16")
        };
        list(&mut cache.pools, vec![smaller]);
        let unlisted = rebuilt(&cache);
        assert_eq!((free(&unlisted), unlisted.too_wide().count()), (4096, 1));
        list(&mut cache.subnets, vec![listing(listed)]);
        assert_eq!(free(&rebuilt(&cache)), 3072);
    }

    #[test]
    fn a_wide_podcidr_counts_once_a_pool_has_blocks_of_its_size() {
        let nodes = vec![node_with("wide", &["10.0.0.0/18"])];
        let mut cache = cluster(vec![pool("p", POOL)], nodes);
        let mut allocations = rebuilt(&cache);
        allocations.recount_pod_cidrs(&cache);
        assert_eq!(allocations.too_wide().count(), 1);
        let larger = Pool {
            version: 2,
            ..of_wide_blocks()
        };
        list(&mut cache.pools, vec![larger]);
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        assert_eq!(allocations.recount_pod_cidrs(&cache), ["wide".into()]);
        assert_eq!((free(&allocations), allocations.too_wide().count()), (3, 0));
    }

    #[test]
    fn a_wide_podcidr_from_before_the_first_pool_does_no_harm() {
        let mut cache = cluster(Vec::new(), vec![node_with("wide", &["0.0.0.0/0"])]);
        let mut allocations = rebuilt(&cache);
        let mut reports = Vec::new();
        allocations.report_too_wide(&mut reports);
        assert_eq!((reports.len(), allocations.too_wide().count()), (0, 0));
        let listed = allocations.listed_pod_cidrs(wide(&cache), None);
        assert_eq!(listed.len(), 1, "no pool is there that it could exhaust");
        list(&mut cache.subnets, vec![listing(listed)]);
        list(&mut cache.pools, vec![pool("p", POOL)]);
        assert_eq!(free(&rebuilt(&cache)), 16, "for the next leader");
        let node = wide(&cache).clone();
        list(&mut cache.nodes, Vec::new());
        assert_eq!(free(&rebuilt(&cache)), 16, "not quarantined either");
        list(&mut cache.nodes, vec![Node { version: 2, ..node }]);
        allocations.pools.evaluate(&cache, &[], NOW.mono);
        assert_eq!(allocations.recount_pod_cidrs(&cache), ["wide".into()]);
        allocations.report_too_wide(&mut reports);
        assert_eq!((reports.len(), free(&allocations)), (1, 16));
        let is = cache.subnets.get("wide").map(AsRef::as_ref);
        assert_eq!(allocations.listed_pod_cidrs(wide(&cache), is), []);
    }

    #[test]
    fn a_wide_podcidr_of_a_node_that_a_standby_saw_go_is_not_quarantined() {
        let cache = cluster(vec![pool("p", POOL)], Vec::new());
        let mut deleted = DeletedNodes::default();
        let update = crate::cluster::object_cache::ObjectUpdate {
            before: Some(node_with("wide", &["0.0.0.0/0"]).into()),
            after: None,
        };
        deleted.node_changed(&update, NOW.mono);
        let mut allocations = rebuilt(&cache);
        allocations.quarantine_deleted(&deleted, &cache, NOW);
        assert_eq!((free(&allocations), allocations.quarantined.len()), (16, 0));
    }

    #[test]
    fn a_podcidr_that_contains_another_nodes_block_is_withheld() {
        let other = subnet("other", &["10.0.0.16/28"], 0);
        let nodes = vec![node("other"), node_with("wide", &["10.0.0.0/26"])];
        let mut cache = cluster(vec![pool("p", POOL)], nodes);
        list(&mut cache.blocks, objects(&other));
        list(&mut cache.subnets, vec![other]);
        let mut allocations = rebuilt(&cache);
        let withheld = |allocations: &AllocationState, is: Option<&Subnet>| {
            let listed = allocations.listed_pod_cidrs(wide(&cache), is);
            listed.iter().map(|it| it.withheld).collect::<Vec<_>>()
        };
        assert_eq!(withheld(&allocations, None), [true]);
        // A range that was listed before the overlap arose stays usable, because pods have addresses of it.
        for before in [true, false] {
            let mut listed = allocations.listed_pod_cidrs(wide(&cache), None);
            listed[0].withheld = before;
            assert_eq!(withheld(&allocations, Some(&listing(listed))), [before]);
        }
        let other = cache.nodes.get("other").unwrap();
        allocations.quarantine_blocks(&other.name, &other.uid, &other.machine, at(1));
        assert_eq!(withheld(&allocations, None), [true], "in quarantine");
        allocations.drop_block(&cidr("10.0.0.16/28"));
        assert_eq!(withheld(&allocations, None), [false]);
    }

    #[test]
    fn a_quarantined_range_of_an_earlier_node_of_the_name_is_not_another_nodes() {
        let mut allocations = AllocationState::default();
        let earlier = node_with("n", &["10.0.0.0/28"]);
        allocations.sync(&earlier, None);
        allocations.quarantine(&earlier, NOW);
        let later = Node {
            uid: "later".into(),
            ..earlier
        };
        allocations.sync(&later, None);
        assert!(!allocations.listed_pod_cidrs(&later, None)[0].withheld);
    }
}
