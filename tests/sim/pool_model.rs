//! Pools as the checks understand them. The checks derive them from the specs with code of their own. Only to parse
//! CIDRs, they use the product's code.

use std::collections::BTreeSet;

use cadastre_api::{
    AllocationMode, AssignmentMode, BlockSizing, Borrowing, ExhaustedNodeTaint, FINALIZER,
    FirstBlock, IPPoolSpec, WarmMinimum,
};
use cadastre_controller::cluster::names::{NodeName, ObjectUid, PoolName};
use cadastre_controller::cluster::objects::{Node, Pool, Text};
use cadastre_core::{Addr, Cidr, Family, IpRange};

/// Returns the podCIDRs of a node that can have been allocated from a pool. These are IPv4 podCIDRs of /20 or longer,
/// and IPv6 podCIDRs of /64 or longer.
pub fn counted(node: &Node) -> impl Iterator<Item = &Cidr> {
    node.pod_cidrs.iter().filter(|cidr| is_counted(cidr))
}

pub fn is_counted(cidr: &Cidr) -> bool {
    let widest = match cidr.family() {
        Family::V4 => 20,
        Family::V6 => 64,
    };
    cidr.len() >= widest
}

/// One version of a pool, with the fields of its spec that the checks use.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolModel {
    pub name: PoolName,
    pub uid: ObjectUid,
    pub created: i64,
    pub allocation_mode: AllocationMode,
    /// For each family, the CIDRs and the prefix length of blocks.
    pub families: Vec<(Family, Vec<Cidr>, u8)>,
    pub selector: Vec<(String, String)>,
    pub reserved: Vec<IpRange>,
    /// Whether reserved addresses may be assigned to pods that request them.
    pub on_request: bool,
    pub quarantine: u64,
    pub priority: i32,
    /// Whether nodes get a first block without demand.
    pub is_immediate: bool,
    /// Whether pods get addresses without naming the pool.
    pub is_automatic: bool,
    pub taints_nodes: bool,
    /// `warm.minimum: MaxPods`: whether a node keeps an address for each pod that it may run.
    pub keeps_max_pods: bool,
    /// `warm.low`: the number of free addresses that a node keeps ready.
    pub low: u64,
    pub max_blocks: usize,
    /// Whether nodes borrow when the pool is exhausted.
    pub borrows: bool,
    /// The ranges that the pool assigns to certain nodes, each with the name of the node.
    pub assignments: Vec<(String, Vec<Cidr>)>,
    /// `FitMaxPods`: whether the size of an IPv4 range follows from the number of pods that its node may run.
    pub fits_max_pods: bool,
    pub disabled: bool,
    pub deleting: bool,
    pub has_finalizer: bool,
}

impl PoolModel {
    /// Returns the model of a pool, or `None` if the pool's spec cannot be parsed.
    pub fn new(pool: &Pool) -> Option<Self> {
        let spec: &IPPoolSpec = pool.spec.as_ref().ok()?;
        let read = |cidrs: &[String]| -> Vec<Cidr> {
            let all = cidrs.iter().map(|c| Cidr::parse_strict(c).unwrap());
            all.collect()
        };
        let (v4, v6) = (spec.ipv4.as_ref(), spec.ipv6.as_ref());
        let v4 = v4.map(|it| (Family::V4, read(&it.cidrs), spec.ipv4_block_size()));
        let v6 = v6.map(|it| (Family::V6, read(&it.cidrs), spec.ipv6_block_size()));
        let families = v4.into_iter().chain(v6);
        let families = families
            .map(|(family, cidrs, len)| Some((family, cidrs, u8::try_from(len?).ok()?)))
            .collect::<Option<Vec<_>>>()?;
        let selectors = spec.node_selector.iter();
        let selector = selectors.flat_map(|s| s.match_labels.iter().flatten());
        let reserved = spec.reserved.iter().map(|r| IpRange::parse(r).unwrap());
        let max_blocks = spec.max_blocks_per_node.map(|most| most as usize);
        Some(PoolModel {
            name: pool.name.clone(),
            uid: pool.uid.clone(),
            created: pool.created,
            allocation_mode: spec.allocation_mode,
            families,
            selector: selector.map(|(k, v)| (k.clone(), v.clone())).collect(),
            reserved: reserved.collect(),
            on_request: spec.reserved_on_request,
            quarantine: u64::from(spec.quarantine_seconds),
            priority: spec.priority,
            is_immediate: spec.first_block == FirstBlock::Immediate
                && spec.assignment == AssignmentMode::Automatic,
            is_automatic: spec.assignment == AssignmentMode::Automatic,
            taints_nodes: spec.exhausted_node_taint == ExhaustedNodeTaint::NoSchedule,
            keeps_max_pods: spec.terms.warm.minimum == WarmMinimum::MaxPods,
            low: u64::from(spec.terms.warm.low),
            max_blocks: max_blocks.unwrap_or(usize::MAX),
            borrows: spec.borrowing == Borrowing::WhenExhausted,
            assignments: spec
                .assignments
                .iter()
                .map(|it| (it.node.clone(), read(&it.cidrs)))
                .collect(),
            fits_max_pods: spec
                .ipv4
                .as_ref()
                .is_some_and(|it| it.block_sizing == BlockSizing::FitMaxPods),
            disabled: spec.disabled,
            deleting: pool.deleting,
            has_finalizer: pool.finalizers.iter().any(|f| f == FINALIZER),
        })
    }

    /// A sort key for pools. If two pools overlap, the pool with the lower key allocates. That is the older pool,
    /// unless it allocates podCIDRs and is being deleted.
    pub fn age(&self) -> (bool, i64, &PoolName) {
        let leaves = self.deleting && self.allocation_mode == AllocationMode::NodeCIDR;
        (leaves, self.created, &self.name)
    }

    /// Whether the node gets nothing from this pool because the pool lacks a family. The oldest of the node's best
    /// pools decides which families the node gets. A pool that lacks one of these families is not used if another pool
    /// of the same rank has all of them.
    pub fn is_passed_over(&self, serving: &[PoolModel], labels: &[(Text, Text)]) -> bool {
        let rank = |it: &PoolModel| (it.priority, it.selector.len());
        let alike =
            |it: &&PoolModel| it.allocation_mode == self.allocation_mode && it.matches(labels);
        let alike: Vec<&PoolModel> = serving.iter().filter(alike).collect();
        let best = alike.iter().map(|it| rank(it)).max();
        let best = alike.iter().filter(|it| Some(rank(it)) == best);
        let Some(oldest) = best.min_by_key(|it| (it.created, it.name.clone())) else {
            return false;
        };
        let has_all = |it: &PoolModel| {
            let mut given = oldest.each_family();
            given.all(|family| it.each_family().any(|f| f == family))
        };
        let mut equal = alike.iter().filter(|it| rank(it) == rank(self));
        !has_all(self) && equal.any(|it| has_all(it))
    }

    pub fn each_family(&self) -> impl Iterator<Item = Family> {
        self.families.iter().map(|(family, _, _)| *family)
    }

    pub fn matches(&self, labels: &[(Text, Text)]) -> bool {
        self.selector
            .iter()
            .all(|(k, v)| labels.iter().any(|(lk, lv)| **lk == **k && **lv == **v))
    }

    pub fn cidrs(&self) -> impl Iterator<Item = &Cidr> {
        self.families.iter().flat_map(|(_, cidrs, _)| cidrs)
    }

    pub fn contains(&self, range: &Cidr) -> bool {
        self.cidrs().any(|cidr| cidr.contains(range))
    }

    pub fn overlaps(&self, range: &Cidr) -> bool {
        self.cidrs().any(|cidr| cidr.overlaps(range))
    }

    /// Whether this pool could have allocated exactly these ranges to the node of this name with these labels.
    /// `max_pods` has all limits on the number of pods that the node has reported.
    pub fn could_allocate(
        &self,
        ranges: &[Cidr],
        name: &NodeName,
        max_pods: &BTreeSet<u16>,
        labels: &[(Text, Text)],
    ) -> bool {
        let mut pairs = self.families.iter().zip(ranges);
        let has_length = |family: Family, range: &Cidr| {
            let mut lens = max_pods.iter().map(|pods| self.len_for(family, *pods));
            range.family() == family && lens.any(|len| len == Some(range.len()))
        };
        self.allocation_mode == AllocationMode::NodeCIDR
            && self.families.len() == ranges.len()
            && (self.assigned(name).is_some()
                || pairs.all(|((family, _, _), it)| has_length(*family, it)))
            && self.could_return(ranges, name, labels)
    }

    /// The ranges that the pool assigns to the node of this name; `None` if it assigns none.
    pub fn assigned(&self, name: &NodeName) -> Option<&[Cidr]> {
        let mut all = self.assignments.iter();
        let found = all.find(|(node, _)| **node == **name);
        found.map(|(_, cidrs)| &**cidrs)
    }

    /// Whether the pool assigns exactly these ranges to the node of this name.
    pub fn assigns(&self, name: &NodeName, ranges: &[Cidr]) -> bool {
        let assigned = self.assigned(name).unwrap_or_default();
        assigned.len() == ranges.len() && assigned.iter().all(|it| ranges.contains(it))
    }

    /// Whether the pool keeps an address of the range for the nodes of its assignments.
    pub fn keeps(&self, range: &Cidr) -> bool {
        let mut all = self.assignments.iter().flat_map(|(_, cidrs)| cidrs);
        all.any(|it| it.overlaps(range))
    }

    /// The prefix length of a range for a node that may run `max_pods` pods. `None` if that number is unknown (0).
    fn len_for(&self, family: Family, max_pods: u16) -> Option<u8> {
        let mut own = self.families.iter().filter(|(it, _, _)| *it == family);
        let (_, _, len) = own.next()?;
        if !self.fits_max_pods || family == Family::V6 {
            return Some(*len);
        }
        let fits = |len: &u8| 1_u32 << (32 - len) >= 2 * u32::from(max_pods);
        let narrowest = (21..=28).rev().find(fits).unwrap_or(21);
        (max_pods > 0).then_some(narrowest)
    }

    /// The ranges of a family that the pool could allocate to the node if all of them were free.
    pub fn pieces(&self, family: Family, node: &Node) -> Vec<Cidr> {
        if let Some(assigned) = self.assigned(&node.name) {
            let own = assigned.iter().filter(|it| it.family() == family).copied();
            return own.filter(|_| self.is_usable(assigned)).collect();
        }
        let len = self.len_for(family, node.max_pods);
        let pieces = len.map(|len| self.blocks_of_length(family, len));
        let mut pieces = pieces.unwrap_or_default();
        pieces.retain(|it| !self.keeps(it));
        pieces
    }

    /// Whether the node of an assignment can get its ranges. They must be one of each of the pool's families, inside
    /// the pool's CIDRs, and disjoint from all other assignments.
    fn is_usable(&self, assigned: &[Cidr]) -> bool {
        let all = self.assignments.iter().flat_map(|(_, cidrs)| cidrs);
        let is_alone = |range: &Cidr| all.clone().filter(|it| it.overlaps(range)).count() == 1;
        let has_one = |family| assigned.iter().filter(|it| it.family() == family).count() == 1;
        assigned.len() == self.families.len()
            && self.each_family().all(has_one)
            && assigned.iter().all(|it| self.contains(it) && is_alone(it))
    }

    /// Whether a host that had these ranges earlier may get them back from this pool.
    pub fn could_return(&self, ranges: &[Cidr], name: &NodeName, labels: &[(Text, Text)]) -> bool {
        if self.assigned(name).is_some() && !self.assigns(name, ranges) {
            return false;
        }
        if self.assigned(name).is_none() && ranges.iter().any(|it| self.keeps(it)) {
            return false;
        }
        let is_reserved = |range: &Cidr| self.reserved.iter().any(|span| span.overlaps(range));
        !self.disabled
            && !self.deleting
            && self.matches(labels)
            && ranges
                .iter()
                .all(|it| self.contains(it) && !is_reserved(it))
    }

    /// All blocks of a family that the pool could have, in ascending order. Blocks that overlap a range of an
    /// assignment are left out.
    pub fn blocks(&self, family: Family) -> Vec<Cidr> {
        let own = self.families.iter().filter(|(f, _, _)| *f == family);
        own.flat_map(|(_, _, len)| self.blocks_of_length(family, *len))
            .filter(|it| !self.keeps(it))
            .collect()
    }

    /// All ranges of a family with this prefix length, in ascending order.
    pub fn blocks_of_length(&self, family: Family, len: u8) -> Vec<Cidr> {
        let mut blocks = Vec::new();
        for cidr in self.cidrs().filter(|it| it.family() == family) {
            let mut at = cidr.first();
            while let Some(block) = Cidr::new(at, len).filter(|block| cidr.contains(block)) {
                blocks.push(block);
                let Some(value) = block.last().value.checked_add(1) else {
                    break;
                };
                at = Addr { family, value };
            }
        }
        blocks
    }
}
