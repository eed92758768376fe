//! Computes whether a node has, or can get, a free address for another pod.

use crate::allocations::AllocationState;
use crate::allocations::blocks::BlockEntry;
use crate::cluster::cache::{ClusterCache, report_of};
use crate::cluster::objects::{AgentReport, Node};
use crate::node_balance::{node_balance, usable_addresses};
use crate::pools::PoolState;
use cadastre_api::{AllocationMode, Recall};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Family};

/// Number of addresses of a podCIDR that host-local assigns to no pod: network, gateway and broadcast address.
const UNASSIGNED: u64 = 3;

/// Whether a further pod on a node would get an address.
pub(super) enum Outlook<'a> {
    /// The node has free addresses, or no pool serves it.
    Free,
    /// The node has no free address, but a pool can allocate a further range to it.
    CanGrow {
        /// Whether pods that are bound to the node wait for an address
        has_waiting: bool,
    },
    /// The node has no free address and cannot get any.
    Exhausted {
        /// The pools from which every pod on the node gets addresses
        pools: Vec<&'a PoolState>,
        /// Number of pods bound to the node that get no address, even after the cooldown of all addresses
        surplus: u64,
    },
}

/// Numbers of addresses of one family that a node has, in blocks of one pool or in podCIDRs.
#[derive(Clone, Copy, Default)]
struct Counts {
    /// Addresses that are free, or that pods have
    assignable: u64,
    /// Addresses that the statuses of pods contain
    reported: u64,
    /// Addresses that the agent reports as assigned to pods
    assigned: u64,
    /// Addresses that will be free after their cooldown
    cooling: u64,
}

impl Counts {
    fn plus(self, other: Counts) -> Counts {
        Counts {
            assignable: self.assignable.saturating_add(other.assignable),
            reported: self.reported.saturating_add(other.reported),
            assigned: self.assigned.saturating_add(other.assigned),
            cooling: self.cooling.saturating_add(other.cooling),
        }
    }

    /// Returns the counts of the family with the fewest free addresses, because a pod gets an address of each family.
    fn least(families: impl Iterator<Item = Counts>) -> Option<Counts> {
        families.min_by_key(|it| it.free())
    }

    fn free(self) -> u64 {
        self.assignable
            .saturating_sub(self.reported.max(self.assigned))
    }
}

/// Returns the outlook of a node. Pools that serve only some pods, or only pods that name them, do not count.
pub(super) fn outlook<'a>(
    node: &'a Node,
    cache: &ClusterCache,
    allocations: &'a AllocationState,
) -> Outlook<'a> {
    let pools = allocations.pools.default_pools(node);
    if pools.is_empty() {
        return Outlook::Free;
    }
    let report = report_of(node, cache);
    let is_of_blocks = |it: &&&PoolState| it.allocation_mode == AllocationMode::Blocks;
    let of_blocks = pools.iter().filter(is_of_blocks).map(|pool| {
        let families = pool.space.families();
        let counts =
            families.map(|family| of_blocks(pool, family, node, report, cache, allocations));
        Counts::least(counts)
    });
    let has_podcidrs = pools.iter().any(|it| !is_of_blocks(&it));
    let of_podcidrs = has_podcidrs.then(|| of_podcidrs(node, cache));
    let counts = of_blocks.chain(of_podcidrs).flatten();
    // The agent may have assigned an address to a pod whose status does not have it yet. Such a pod counts only once.
    let (mut free, mut unreported, mut cooling) = (0u64, 0u64, 0u64);
    for it in counts {
        free = free.saturating_add(it.free());
        unreported = unreported.saturating_add(it.assigned.saturating_sub(it.reported));
        cooling = cooling.saturating_add(it.cooling);
    }
    let unserved = cache.pods.unserved(&node.name);
    let unserved = if Mutation::BoundPodsNotCounted.is_on() {
        0
    } else {
        unserved
    };
    let unserved = u64::try_from(unserved).unwrap_or(u64::MAX);
    let waiting = unserved.saturating_sub(unreported);
    if free > waiting {
        return Outlook::Free;
    }
    if pools
        .iter()
        .any(|pool| can_grow(pool, node, report, allocations))
    {
        let has_waiting = waiting > 0;
        return Outlook::CanGrow { has_waiting };
    }
    let surplus = waiting.saturating_sub(free.saturating_add(cooling));
    Outlook::Exhausted { pools, surplus }
}

/// Returns whether the pool can allocate a further range to the node, or has allocated podCIDRs to it that the cached
/// Node does not have yet.
fn can_grow(
    pool: &PoolState,
    node: &Node,
    report: Option<&AgentReport>,
    allocations: &AllocationState,
) -> bool {
    let may_get = match pool.allocation_mode {
        AllocationMode::Blocks => {
            !node_balance(&pool.name, 0, node, report, allocations).is_at_limit(pool)
        }
        AllocationMode::NodeCIDR if !node.is_empty() => false,
        AllocationMode::NodeCIDR if !allocations.holdings_of(&node.uid).is_empty() => return true,
        AllocationMode::NodeCIDR => {
            let assigning = allocations.pools.assigning(node);
            assigning.is_none_or(|it| it.name == pool.name)
        }
    };
    may_get && !Mutation::GrowthIgnored.is_on() && pool.has_room(node, &allocations.ledger)
}

/// Counts the addresses of one family that a node has in blocks of a pool.
fn of_blocks(
    pool: &PoolState,
    family: Family,
    node: &Node,
    report: Option<&AgentReport>,
    cache: &ClusterCache,
    allocations: &AllocationState,
) -> Counts {
    let is_counted = |it: &&BlockEntry| {
        it.pool == pool.name
            && it.cidr.family() == family
            && !it.is_leaving()
            && it.recall != Some(Recall::Drain)
    };
    let own = allocations.plain_blocks(&node.uid).filter(is_counted);
    let own = own.map(|entry| match entry.report_for(report) {
        Some(it) if it.released => Counts::default(),
        Some(it) => Counts {
            assignable: it.used.saturating_add(it.free),
            reported: reported(&entry.cidr, cache),
            assigned: it.used,
            cooling: it.cooling,
        },
        None => Counts {
            assignable: usable_addresses(entry, report, allocations),
            reported: reported(&entry.cidr, cache),
            ..Counts::default()
        },
    });
    own.fold(Counts::default(), Counts::plus)
}

/// Counts the addresses that a node has in its podCIDRs, including those of other allocators. Returns `None` if the
/// node has no podCIDR.
fn of_podcidrs(node: &Node, cache: &ClusterCache) -> Option<Counts> {
    let of_family = |family: Family| {
        let own = node.pod_cidrs.iter().filter(|it| it.family() == family);
        let counts = own.map(|range| {
            let size = u64::try_from(range.size()).unwrap_or(u64::MAX);
            Counts {
                assignable: size.saturating_sub(UNASSIGNED),
                reported: reported(range, cache),
                ..Counts::default()
            }
        });
        counts.reduce(Counts::plus)
    };
    Counts::least(Family::ALL.into_iter().filter_map(of_family))
}

/// Returns how many addresses of `range` the statuses of pods contain.
fn reported(range: &Cidr, cache: &ClusterCache) -> u64 {
    u64::try_from(cache.pods.count_in(range)).unwrap_or(u64::MAX)
}
