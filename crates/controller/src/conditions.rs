//! Builds the status of a pool: its counts, its forecast and its conditions.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::Now;
use super::allocations::AllocationState;
use super::failing_calls::{ObjectCall, WRITE_ADVICE};
use super::figures::{FamilyCounts, figures, holders};
use super::forecast::Trend;
use super::pools::{PoolPhase, PoolState};
use super::totals::Totals;
use crate::allocations::foreign::{ADVICE, too_wide_text};
use crate::cluster::objects::Pool;
use crate::purpose::Step;
use cadastre_api::{AllocationMode, FamilyStatus, IPPoolStatus};
use cadastre_core::{Dual, Family, Holder};

/// Reason and message of a condition that is True, or `None` if the condition is False.
type Problem = Option<(&'static str, String)>;

/// A type of condition that is True while the pool has a problem. `Ready` is not one of these types, because it is True
/// while there is no problem. No event reports changes of `Ready`, because it repeats other conditions.
pub(crate) struct ProblemType {
    /// `type` of the condition
    pub name: &'static str,
    /// Reasons of the events that report changes of the condition: the first for a change to True, the second for a
    /// change to False
    pub events: [&'static str; 2],
    find: fn(&PoolFacts) -> Problem,
    /// Reason and message of the condition while it is False
    otherwise: [&'static str; 2],
}

const TERMINATING: &str = "Terminating";

/// All types of problems, in the order in which a status lists them.
static PROBLEMS: [ProblemType; 11] = [
    ProblemType {
        name: "Invalid",
        events: ["InvalidSpec", "SpecIsValid"],
        find: invalid,
        otherwise: ["SpecIsValid", "the spec can be used"],
    },
    ProblemType {
        name: "Overlapping",
        events: ["Overlapping", "NoLongerOverlapping"],
        find: overlapping,
        otherwise: [
            "NoOverlap",
            "no other pool, service range or node address lies in it",
        ],
    },
    ProblemType {
        name: "Exhausted",
        events: ["PoolExhausted", "PoolHasRoom"],
        find: exhausted,
        otherwise: ["HasRoom", "there is a free block of every family"],
    },
    ProblemType {
        name: "NearlyExhausted",
        events: ["PoolNearlyExhausted", "PoolHasRoomAgain"],
        find: nearly_exhausted,
        otherwise: ["HasRoom", "less is used than spec.nearlyExhaustedPercent"],
    },
    ProblemType {
        name: "Shrinking",
        events: ["Shrinking", "Shrunk"],
        find: shrinking,
        otherwise: [
            "NothingOutside",
            "no block lies outside of what the spec names",
        ],
    },
    ProblemType {
        name: "ForeignAllocator",
        events: ["ForeignAllocator", "ForeignAllocatorQuiet"],
        find: foreign_allocator,
        otherwise: ["OnlyWriter", "nobody else writes podCIDRs in its range"],
    },
    ProblemType {
        name: "PodCIDRTooWide",
        events: ["PodCIDRTooWide", "NoPodCIDRTooWide"],
        find: podcidr_too_wide,
        otherwise: [
            "NoPodCIDRTooWide",
            "no node has a podCIDR over it that no node could have been given",
        ],
    },
    ProblemType {
        name: "BesideOtherFamily",
        events: ["BesideOtherFamily", "NotBesideOtherFamily"],
        find: beside_other_family,
        otherwise: [
            "NotBesideOtherFamily",
            "no older pool for the same nodes and pods gives a family that it lacks",
        ],
    },
    ProblemType {
        name: "WritesRejected",
        events: ["WritesRejected", "WritesAccepted"],
        find: |facts| facts.rejected.clone(),
        otherwise: ["Accepted", "the API server takes what is written for it"],
    },
    ProblemType {
        name: "AssignmentsUnusable",
        events: ["AssignmentsUnusable", "AssignmentsUsable"],
        find: assignments_unusable,
        otherwise: [
            "AssignmentsUsable",
            "each assignment can be given to its node once its ranges are free",
        ],
    },
    ProblemType {
        name: TERMINATING,
        events: ["Terminating", "NotTerminating"],
        find: |facts| Some(terminating(facts)),
        otherwise: ["", ""],
    },
];

/// Returns all types of problems in the order in which events report their changes. In this order, for example, the
/// event that a pool is nearly exhausted comes before the event that the pool is exhausted.
pub(crate) fn problem_types() -> impl Iterator<Item = &'static ProblemType> {
    [0, 1, 3, 2, 4, 5, 6, 7, 9, 10, 8]
        .map(|at| &PROBLEMS[at])
        .into_iter()
}

/// Counts of one pool that the pool loop maintains for the pool's status.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolCounts {
    /// Number of nodes that wait for ranges of the pool
    pub waiting: i64,
    /// Whether nodes exist but the pool selects none
    pub selects_none: bool,
    /// Counts of addresses and blocks of the pool, per family
    pub totals: Dual<Totals>,
}

/// The facts that decide the conditions of a pool.
struct PoolFacts<'a> {
    pool: &'a Pool,
    state: &'a PoolState,
    allocations: &'a AllocationState,
    counts: PoolCounts,
    families: Vec<(Family, FamilyCounts)>,
    holders: BTreeMap<Holder, bool>,
    rejected: Problem,
}

/// Builds the status that a pool should have. A condition whose status is unchanged keeps its `lastTransitionTime`.
pub(crate) fn status(
    pool: &Pool,
    state: &PoolState,
    counts: PoolCounts,
    allocations: &AllocationState,
    now: Now,
) -> IPPoolStatus {
    let families = state.space.families();
    let facts = PoolFacts {
        pool,
        state,
        allocations,
        counts,
        families: families
            .map(|family| (family, figures(state, family, allocations)))
            .collect(),
        holders: holders(state, allocations),
        rejected: rejected(state, allocations),
    };
    let of_family = |wanted: Family| {
        let (_, counted) = facts.families.iter().find(|(it, _)| *it == wanted)?;
        Some(family_status(&facts, wanted, *counted, now))
    };
    let is_due = |it: &&ProblemType| it.name != TERMINATING || pool.deleting;
    let problems = PROBLEMS.iter().filter(is_due);
    let problems = problems.map(|it| match (it.find)(&facts) {
        Some((reason, message)) => condition(it.name, true, reason, message),
        None => condition(it.name, false, it.otherwise[0], it.otherwise[1].to_owned()),
    });
    let mut conditions: Vec<Condition> = [ready(&facts)].into_iter().chain(problems).collect();
    let before = pool.status.iter().flat_map(|status| &status.conditions);
    let whole = Timestamp::from_second(now.wall.as_second()).unwrap_or(now.wall);
    for condition in &mut conditions {
        let mut before = before.clone();
        let same = before.find(|it| it.type_ == condition.type_ && it.status == condition.status);
        condition.last_transition_time =
            same.map_or(Time(whole), |it| it.last_transition_time.clone());
        condition.observed_generation = Some(pool.generation);
    }
    IPPoolStatus {
        observed_generation: Some(pool.generation),
        ipv4: of_family(Family::V4),
        ipv6: of_family(Family::V6),
        nodes: i64::try_from(facts.live_nodes()).ok(),
        waiting: Some(counts.waiting),
        conditions,
    }
}

impl PoolFacts<'_> {
    fn live_nodes(&self) -> usize {
        self.holders.values().filter(|live| **live).count()
    }
}

/// Returns the counts of one family with a forecast. The forecast continues the trend in the last written status, so
/// the trend survives a restart of the controller.
fn family_status(
    facts: &PoolFacts,
    family: Family,
    counted: FamilyCounts,
    now: Now,
) -> FamilyStatus {
    let has_addresses = facts.state.allocation_mode == AllocationMode::Blocks;
    let addresses = has_addresses.then(|| facts.counts.totals.get(family).status());
    let before = facts.pool.status.as_ref();
    let before = before.and_then(|status| match family {
        Family::V4 => status.ipv4.as_ref(),
        Family::V6 => status.ipv6.as_ref(),
    });
    let used = counted.capacity.saturating_sub(counted.free);
    let trend = match before.and_then(|before| Trend::read(before.trend.as_ref()?)) {
        Some(trend) => trend.observe(used, now.wall),
        None => Trend::start(used, now.wall),
    };
    let forecast = before.and_then(|before| before.exhausts_at.as_ref());
    let forecast = trend.exhausts_at(counted.free, now.wall, forecast.map(|at| at.0));
    FamilyStatus {
        trend: Some(trend.status()),
        exhausts_at: forecast.map(Time),
        ..counted.status(facts.state.space.block_len(family), addresses)
    }
}

fn condition(kind: &str, status: bool, reason: &str, message: String) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

fn ready(facts: &PoolFacts) -> Condition {
    let phase = &facts.state.phase;
    let allocates_nothing = || format!("allocates nothing: {phase}");
    let (is_ready, reason, message) = match (phase, &facts.rejected) {
        (PoolPhase::Serving | PoolPhase::Starting, Some((reason, why))) => {
            (false, *reason, why.clone())
        }
        // A pool that selects no node is no error, but perhaps a mistake of the user.
        (PoolPhase::Serving, None) if facts.counts.selects_none => {
            let message = "would serve the nodes it selects, and its nodeSelector matches none";
            (true, "SelectsNoNode", message.to_owned())
        }
        (PoolPhase::Serving, None) => (true, "Serving", "serves the nodes it selects".to_owned()),
        (PoolPhase::Invalid(_), _) => (false, "InvalidSpec", allocates_nothing()),
        (PoolPhase::Terminating, _) => (false, TERMINATING, allocates_nothing()),
        (PoolPhase::Disabled, _) => (false, "Disabled", allocates_nothing()),
        (PoolPhase::Starting, None) => (false, "Starting", allocates_nothing()),
        (PoolPhase::Overlaps { .. }, _) => (false, "OverlapsOlderPool", allocates_nothing()),
        (PoolPhase::ForeignAllocator, _) => (false, "ForeignAllocator", allocates_nothing()),
    };
    condition("Ready", is_ready, reason, message)
}

/// Returns the reason and message of the condition `WritesRejected` if the API server keeps rejecting the pool's
/// finalizers or the creation of its blocks. Returns `None` if not.
fn rejected(state: &PoolState, allocations: &AllocationState) -> Problem {
    let refusals = &allocations.refusals;
    if let Some(why) = refusals.why(&ObjectCall::SetPoolFinalizers(state.name.clone())) {
        let text = format!(
            "the API server does not take its finalizers, without which it neither serves nor goes: {why}: {WRITE_ADVICE}"
        );
        return Some(("FinalizerRefused", text));
    }
    let mut blocks = refusals.persistent().filter_map(|(call, why, _)| {
        let ObjectCall::WriteBlock(cidr) = call else {
            return None;
        };
        let entry = allocations.blocks.get(cidr)?;
        let ours = entry.pool == state.name && entry.step == Step::Create;
        ours.then_some((cidr, why))
    });
    let (cidr, why) = blocks.next()?;
    let more = and_more(blocks.count());
    let text =
        format!("the API server does not take its block {cidr}{more}: {why}: {WRITE_ADVICE}");
    Some(("BlocksRefused", text))
}

fn invalid(facts: &PoolFacts) -> Problem {
    match &facts.state.phase {
        PoolPhase::Invalid(why) => Some(("InvalidSpec", why.clone())),
        _ => None,
    }
}

/// At most this many ranges or nodes are named in a message.
const NAMED: usize = 5;

fn assignments_unusable(facts: &PoolFacts) -> Problem {
    let problems = facts.state.assignments.problems();
    let texts = problems.map(|(node, why)| format!("node \"{node}\" waits, as {why}"));
    let texts: Vec<String> = texts.collect();
    let named = &texts[..texts.len().min(NAMED)];
    let text = format!(
        "{}{}",
        named.join("; "),
        and_more(texts.len() - named.len())
    );
    (!texts.is_empty()).then_some(("CorrectAssignments", text))
}

/// Returns the words for the entries of a list that a message does not name.
fn and_more(number: usize) -> String {
    match number {
        0 => String::new(),
        more => format!(" and {more} more"),
    }
}

fn overlapping(facts: &PoolFacts) -> Problem {
    let state = facts.state;
    if let PoolPhase::Overlaps { .. } = state.phase {
        let text = format!("allocates nothing: {}", state.phase);
        return Some(("OverlapsOlderPool", text));
    }
    if state.left_out.is_empty() {
        return None;
    }
    let named = &state.left_out[..state.left_out.len().min(NAMED)];
    let more = and_more(state.left_out.len() - named.len());
    let text = format!(
        "leaves out what is not free to give: {}{more}: choose CIDRs apart from these",
        named.join(", ")
    );
    Some(("LeavesOut", text))
}

fn nearly_exhausted(facts: &PoolFacts) -> Problem {
    let percent = facts.state.nearly_exhausted;
    let limit = f64::from(percent) / 100.0;
    let is_near = |it: &FamilyCounts| it.capacity > 0 && it.utilization() >= limit;
    let (family, counted) = facts.families.iter().find(|(_, it)| is_near(it))?;
    let FamilyCounts { capacity, free, .. } = counted;
    let field = field(*family);
    let text = format!(
        "{free} of {capacity} {family} blocks are free, spec.nearlyExhaustedPercent is {percent}: add a CIDR to spec.{field}.cidrs in time, or a pool"
    );
    Some(("LittleRoom", text))
}

fn shrinking(facts: &PoolFacts) -> Problem {
    let totals = facts.counts.totals.iter();
    let outside: usize = totals.map(|(_, it)| it.outside).sum();
    // If the spec is invalid, its ranges are unknown. So it is also unknown which blocks lie outside the ranges.
    if outside == 0 || matches!(facts.state.phase, PoolPhase::Invalid(_)) {
        return None;
    }
    let text = format!(
        "{outside} blocks lie outside of what the spec names: they give no new address and go when they are empty; to be faster, move their pods (kubectl get ipamblocks.cadastre.dev --field-selector spec.pool=...)"
    );
    Some(("BlocksOutside", text))
}

fn field(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

fn exhausted(facts: &PoolFacts) -> Problem {
    let (family, counted) = facts.families.iter().find(|(_, it)| it.free == 0)?;
    let field = field(*family);
    let len = facts.state.space.block_len(*family).unwrap_or_default();
    let waiting = facts.counts.waiting;
    let FamilyCounts {
        capacity,
        held,
        quarantined,
        ..
    } = counted;
    let borrowed = facts.counts.totals.get(*family).borrowed;
    let borrowed = if facts.state.terms.borrows {
        format!(", {borrowed} addresses are borrowed")
    } else {
        String::new()
    };
    let text = format!(
        "no free {family} block of /{len} ({capacity} in all; {held} ranges of any size allocated, {quarantined} in quarantine, {waiting} nodes wait{borrowed}): add a CIDR to spec.{field}.cidrs, or a pool that selects the nodes that wait"
    );
    Some(("NoFreeBlock", text))
}

fn podcidr_too_wide(facts: &PoolFacts) -> Problem {
    let all = facts.allocations.too_wide();
    let mut over = all.filter(|(_, cidr)| facts.state.space.touches(cidr));
    let (name, cidr) = over.next()?;
    let more = match over.count() {
        0 => String::new(),
        more => format!(" ({more} more such)"),
    };
    let text = too_wide_text(cidr);
    let text = format!("node \"{name}\"{more}: {text}: {ADVICE}");
    Some(("WrittenByOthers", text))
}

fn beside_other_family(facts: &PoolFacts) -> Problem {
    let (older, family) = facts.allocations.pools.older_of_other_family(facts.state)?;
    let (field, name, older) = (field(family), &facts.state.name, &older.name);
    let text = format!(
        "serves only who asks for it by name: it gives no {family}, and the older pool \"{older}\", for the same nodes and pods, does. For both families make one pool of both: delete this one, and add its ranges to \"{older}\" (kubectl edit ippools.cadastre.dev {older}), or add {field} ranges here and delete \"{older}\". To use both as they are, tell them apart by priority or selectors (kubectl edit ippools.cadastre.dev {name})"
    );
    Some(("OlderPoolOfOtherFamily", text))
}

fn foreign_allocator(facts: &PoolFacts) -> Problem {
    facts.state.paused_until?;
    let text = PoolPhase::ForeignAllocator.to_string();
    Some(("PodCIDRsWrittenByOthers", text))
}

fn terminating(facts: &PoolFacts) -> (&'static str, String) {
    let nodes = facts.live_nodes();
    let deleted = facts.holders.len() - nodes;
    let claims = facts.allocations.claims.of_pool(&facts.state.name);
    let text = format!(
        "{nodes} nodes and {claims} claims still hold ranges of it, those of {deleted} dead nodes rest: it goes with the last one"
    );
    ("InUse", text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{NOW, cluster, node_with, pool, pool_with, rebuilt};
    use cadastre_api::NodeAssignment;

    /// Returns the status of the only pool of a cluster.
    fn status_of(pool: Pool) -> IPPoolStatus {
        let cache = cluster(vec![pool], Vec::new());
        let allocations = rebuilt(&cache);
        let state = allocations.pools.get("p").unwrap();
        let pool = cache.pools.get("p").unwrap();
        status(pool, state, PoolCounts::default(), &allocations, NOW)
    }

    #[test]
    fn assigned_ranges_are_not_counted_and_unusable_ones_are_reported() {
        let assigned = |cidrs: &[&str]| {
            let entries = (0..).zip(cidrs).map(|(n, cidr)| NodeAssignment {
                node: format!("n{n}"),
                cidrs: vec![cidr.to_string()],
            });
            status_of(pool_with("p", "10.0.0.0/24", |spec| {
                spec.allocation_mode = AllocationMode::NodeCIDR;
                spec.assignments = entries.collect();
            }))
        };
        let condition = |status: IPPoolStatus| {
            let mut all = status.conditions.into_iter();
            let found = all.find(|it| it.type_ == "AssignmentsUnusable").unwrap();
            (found.status, found.message)
        };
        let usable = assigned(&["10.0.0.0/27", "10.0.0.64/30"]);
        let ipv4 = usable.ipv4.clone().unwrap();
        assert_eq!((&*ipv4.capacity, &*ipv4.free), ("13", "13"));
        assert_eq!(condition(usable).0, "False");
        let (status, message) = condition(assigned(&["10.0.0.0/27", "10.1.0.0/28"]));
        assert_eq!(status, "True");
        let expected = "node \"n1\" waits, as 10.1.0.0/28 does not lie in one of the pool's cidrs";
        assert!(message.starts_with(expected), "{message}");
    }

    #[test]
    fn smaller_ranges_are_not_counted_as_whole_blocks() {
        let halves = [("a", "10.0.0.0/29"), ("b", "10.0.0.8/29")];
        let nodes = halves.map(|(name, range)| node_with(name, &[range]));
        let cache = cluster(vec![pool("p", "10.0.0.0/28")], nodes.into());
        let allocations = rebuilt(&cache);
        let state = allocations.pools.get("p").unwrap();
        let pool = cache.pools.get("p").unwrap();
        let status = status(pool, state, PoolCounts::default(), &allocations, NOW);
        let mut conditions = status.conditions.iter();
        let exhausted = conditions.find(|it| it.type_ == "Exhausted").unwrap();
        let expected = "no free IPv4 block of /28 (1 in all; 2 ranges of any size allocated, 0 in quarantine, 0 nodes wait)";
        assert!(exhausted.message.starts_with(expected), "{exhausted:?}");
    }
}
