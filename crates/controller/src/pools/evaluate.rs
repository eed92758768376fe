//! Evaluates one pool: validates its spec, and decides whether it may allocate beside older pools.
//!
//! No spec may stop the controller: an invalid spec makes its pool `Invalid` and affects no other pool. The ranges of a
//! pool are compared only with those of older pools, so every controller comes to the same result.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cluster::cache::ClusterCache;
use crate::cluster::names::PoolName;
use crate::cluster::objects::Pool;
use crate::pools::{Assignments, BlockTerms, DEFAULT_QUARANTINE, PoolPhase, PoolState};
use cadastre_api::choice::Selector;
use cadastre_api::{
    AllocationMode, AssignmentMode, BlockSizing, Borrowing, ExhaustedNodeTaint, FINALIZER,
    FirstBlock, IPPoolSpec, NodePool, NodePoolRanges,
};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Dual, Family, FamilyRanges, IpRange, ReservedEffect};

/// Ranges of the pools that have been evaluated already, with the pools' names. Pools are evaluated from the oldest to
/// the newest.
#[derive(Default)]
pub(super) struct Older(BTreeMap<Cidr, PoolName>);

impl Older {
    fn overlap(&self, range: &Cidr) -> Option<(Cidr, PoolName)> {
        // CIDRs are ordered by their first address. So if a range overlaps `range`, it either starts inside `range`, or
        // contains `range` and has a shorter prefix.
        let next = self.0.range(*range..).next();
        if let Some((theirs, name)) = next.filter(|(theirs, _)| theirs.overlaps(range)) {
            return Some((*theirs, name.clone()));
        }
        let wider = std::iter::successors(range.parent(), Cidr::parent);
        let mut wider = wider.filter(|_| !Mutation::WiderOlderPoolIgnored.is_on());
        wider.find_map(|wider| Some((wider, self.0.get(&wider)?.clone())))
    }
}

/// Returns the new state of a pool. The caller must have evaluated all older pools before. `kept` is the pool's
/// previous state, whose cursors and pause are kept.
pub(super) fn evaluate_pool(
    pool: &Pool,
    kept: Option<PoolState>,
    services: &[Cidr],
    cache: &ClusterCache,
    older: &mut Older,
    now: Duration,
) -> PoolState {
    let spec = pool.spec.as_ref();
    let (parsed, invalid) = match spec.map_err(Clone::clone).and_then(Parsed::new) {
        Ok(parsed) => (parsed, None),
        Err(why) => (Parsed::default(), Some(why)),
    };
    let ranges = parsed.ranges.iter().filter_map(|(_, it)| it.as_ref());
    let ranges: Vec<Cidr> = ranges.flat_map(|it| it.cidrs.clone()).collect();
    let overlap = ranges.iter().find_map(|range| {
        let (theirs, name) = older.overlap(range)?;
        Some((*range, theirs, name))
    });
    for range in &ranges {
        older.0.entry(*range).or_insert_with(|| pool.name.clone());
    }

    let mut reserved = Vec::new();
    let mut left_out = Vec::new();
    for range in &ranges {
        for service in services.iter().filter(|service| service.overlaps(range)) {
            reserved.push(IpRange::from(*service));
            left_out.push(format!("service range {service}"));
        }
        for address in cache.node_addresses.within(range) {
            reserved.push(IpRange::from(Cidr::host(address)));
            left_out.push(format!("node address {address}"));
        }
    }
    left_out.sort();
    left_out.dedup();

    let paused_until = kept.as_ref().and_then(|state| state.paused_until);
    let paused_until = paused_until.filter(|until| *until > now);
    let mut space = match kept {
        Some(state) => state.space,
        None => cadastre_core::Pool::new(Dual::default()),
    };
    space.set_reserved_effect(match parsed.allocation_mode {
        AllocationMode::Blocks => ReservedEffect::Covered,
        AllocationMode::NodeCIDR => ReservedEffect::Touched,
    });
    let mut on_request = parsed.reserved;
    if !parsed.reserved_on_request {
        reserved.append(&mut on_request);
    }
    if Mutation::ReservedNotLeftOut.is_on() {
        reserved.clear();
        on_request.clear();
    }
    let blocked = [reserved.as_slice(), &on_request].concat();
    let assignments = match (spec, parsed.allocation_mode) {
        (Ok(spec), AllocationMode::NodeCIDR) => {
            Assignments::new(&spec.assignments, &parsed.ranges, &blocked)
        }
        _ => Assignments::default(),
    };
    space.set_ranges(parsed.ranges);
    space.set_blocked(blocked);
    let are_kept = !Mutation::AssignedRangesNotKept.is_on();
    space.set_kept(assignments.ranges().filter(|_| are_kept).collect());

    let guarded = pool.finalizers.iter().any(|it| it == FINALIZER);
    let phase = if let Some(why) = invalid {
        PoolPhase::Invalid(why)
    } else if pool.deleting {
        PoolPhase::Terminating
    } else if let Some((range, theirs, name)) = overlap {
        PoolPhase::Overlaps {
            older: name,
            range,
            theirs,
        }
    } else if parsed.disabled {
        PoolPhase::Disabled
    } else if !guarded {
        PoolPhase::Starting
    } else if paused_until.is_some() {
        PoolPhase::ForeignAllocator
    } else {
        PoolPhase::Serving
    };
    PoolState {
        name: pool.name.clone(),
        uid: pool.uid.clone(),
        created: pool.created,
        allocation_mode: parsed.allocation_mode,
        space,
        assignments,
        sizing: parsed.sizing,
        terms: parsed.terms,
        node_view: node_view(&pool.name, pool.spec.as_ref().ok()),
        reserved,
        on_request,
        nearly_exhausted: parsed.nearly_exhausted,
        selector: parsed.selector,
        priority: parsed.priority,
        taints_nodes: spec
            .is_ok_and(|it| it.exhausted_node_taint == ExhaustedNodeTaint::NoSchedule),
        quarantine: parsed.quarantine,
        guarded,
        phase,
        left_out,
        paused_until,
    }
}

/// Returns the pool's entry in NodeSubnets. If the spec cannot be read, the entry has only the name.
fn node_view(name: &PoolName, spec: Option<&IPPoolSpec>) -> NodePool {
    let name = name.to_string();
    let Some(spec) = spec else {
        return NodePool {
            name,
            ..NodePool::default()
        };
    };
    NodePool {
        min_addresses: 0,
        name,
        allocation_mode: spec.allocation_mode,
        retained: false,
        assignment: spec.assignment,
        first_block: spec.first_block,
        max_blocks_per_node: spec.max_blocks_per_node,
        namespace_selector: spec.namespace_selector.clone().map(Box::new),
        pod_selector: spec.pod_selector.clone().map(Box::new),
        ipv4: spec.ipv4.as_ref().map(|ranges| NodePoolRanges {
            cidrs: ranges.cidrs.clone(),
            gateway: ranges.gateway.clone(),
        }),
        ipv6: spec.ipv6.as_ref().map(|ranges| NodePoolRanges {
            cidrs: ranges.cidrs.clone(),
            gateway: ranges.gateway.clone(),
        }),
        reserved: spec.reserved.clone(),
        terms: spec.terms.clone(),
    }
}

/// The parsed values of a spec. For an invalid spec, `Parsed::default()` is used instead.
struct Parsed {
    allocation_mode: AllocationMode,
    terms: BlockTerms,
    nearly_exhausted: u32,
    ranges: Dual<Option<FamilyRanges>>,
    sizing: BlockSizing,
    reserved: Vec<IpRange>,
    reserved_on_request: bool,
    selector: Selector,
    priority: i32,
    disabled: bool,
    quarantine: Duration,
}

impl Default for Parsed {
    fn default() -> Self {
        Parsed {
            allocation_mode: AllocationMode::default(),
            terms: BlockTerms {
                first_immediate: false,
                namespaces: Selector::default(),
                pods: Selector::default(),
                most: None,
                borrows: false,
                networks: Vec::new(),
                idle: Duration::ZERO,
            },
            nearly_exhausted: 100,
            ranges: Dual::default(),
            sizing: BlockSizing::default(),
            reserved: Vec::new(),
            reserved_on_request: false,
            selector: Selector::default(),
            priority: 0,
            disabled: true,
            quarantine: DEFAULT_QUARANTINE,
        }
    }
}

impl Parsed {
    /// Validates and parses a spec. The error is a text for users. The CRD's validation rules reject most errors
    /// already, but the API server may have a CRD without these rules, or an object may be older than a rule.
    fn new(spec: &IPPoolSpec) -> Result<Self, String> {
        let v4 = spec.ipv4.as_ref().zip(spec.ipv4_block_size());
        let v4 = v4.map(|(it, size)| ranges(Family::V4, "ipv4", &it.cidrs, size));
        let v4 = v4.transpose()?;
        let v6 = spec.ipv6.as_ref().zip(spec.ipv6_block_size());
        let v6 = v6.map(|(it, size)| ranges(Family::V6, "ipv6", &it.cidrs, size));
        let v6 = v6.transpose()?;
        if v4.is_none() && v6.is_none() {
            return Err("neither ipv4 nor ipv6 is given: give at least one".into());
        }
        let reserved = spec
            .reserved
            .iter()
            .map(|text| IpRange::parse(text).map_err(|error| format!("reserved: {error}")))
            .collect::<Result<_, _>>()?;
        let namespaces = Selector::new(spec.namespace_selector.as_ref())
            .map_err(|error| format!("namespaceSelector: {error}"))?;
        let pods = Selector::new(spec.pod_selector.as_ref())
            .map_err(|error| format!("podSelector: {error}"))?;
        let manual = spec.assignment == AssignmentMode::Manual;
        let for_all = namespaces.specificity() + pods.specificity() == 0;
        Ok(Parsed {
            allocation_mode: spec.allocation_mode,
            terms: BlockTerms {
                first_immediate: spec.first_block == FirstBlock::Immediate && !manual && for_all,
                namespaces,
                pods,
                most: spec
                    .max_blocks_per_node
                    .and_then(|most| most.try_into().ok()),
                borrows: spec.borrowing == Borrowing::WhenExhausted,
                networks: spec.networks.clone(),
                idle: Duration::from_secs(spec.idle_seconds.into()),
            },
            nearly_exhausted: spec.nearly_exhausted_percent,
            ranges: Dual { v4, v6 },
            sizing: sizing(spec),
            reserved,
            reserved_on_request: spec.reserved_on_request,
            selector: Selector::new(spec.node_selector.as_ref())
                .map_err(|error| format!("nodeSelector: {error}"))?,
            priority: spec.priority,
            disabled: spec.disabled,
            quarantine: Duration::from_secs(spec.quarantine_seconds.into()),
        })
    }
}

/// Returns how the sizes of IPv4 ranges are chosen. Blocks always have a fixed size.
fn sizing(spec: &IPPoolSpec) -> BlockSizing {
    let of_node_cidr = spec.allocation_mode == AllocationMode::NodeCIDR;
    let ranges = spec.ipv4.as_ref().filter(|_| of_node_cidr);
    ranges.map_or(BlockSizing::default(), |it| it.block_sizing)
}

fn ranges(
    family: Family,
    field: &str,
    texts: &[String],
    block_size: u32,
) -> Result<FamilyRanges, String> {
    let mut cidrs: Vec<Cidr> = Vec::with_capacity(texts.len());
    for text in texts {
        let cidr = Cidr::parse_strict(text).map_err(|error| format!("{field}.cidrs: {error}"))?;
        if cidr.family() != family {
            return Err(format!("{field}.cidrs: {cidr} is not {family}"));
        }
        if let Some(other) = cidrs.iter().find(|other| other.overlaps(&cidr)) {
            return Err(format!(
                "{field}.cidrs: {cidr} overlaps {other}: leave one out"
            ));
        }
        cidrs.push(cidr);
    }
    let most = family.bits();
    let block_len = u8::try_from(block_size).ok().filter(|len| *len <= most);
    let Some(block_len) = block_len else {
        return Err(format!(
            "{field}.blockSize: {block_size} is more than {most}"
        ));
    };
    if let Some(small) = cidrs.iter().find(|cidr| cidr.len() > block_len) {
        return Err(format!(
            "{field}.blockSize: a /{block_len} does not fit into {small}"
        ));
    }
    if cidrs.is_empty() {
        return Err(format!("{field}.cidrs is empty: give at least one CIDR"));
    }
    Ok(FamilyRanges { cidrs, block_len })
}
