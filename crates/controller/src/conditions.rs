//! Builds the status of a pool: its counts, its forecast and its conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::Now;
use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::figures::{FamilyCounts, figures, holders};
use super::forecast::Trend;
use super::pools::{PoolPhase, PoolState};
use super::totals::Totals;
use crate::allocations::foreign::{ADVICE, too_wide_text};
use crate::cluster::objects::Pool;
use crate::purpose::Step;
use cadastre_api::{AllocationMode, FamilyStatus, IPPoolStatus};
use cadastre_core::{Dual, Family};

const READY: &str = "Ready";
const OVERLAPPING: &str = "Overlapping";
const EXHAUSTED: &str = "Exhausted";
const NEARLY_EXHAUSTED: &str = "NearlyExhausted";
const SHRINKING: &str = "Shrinking";
const FOREIGN_ALLOCATOR: &str = "ForeignAllocator";
const PODCIDR_TOO_WIDE: &str = "PodCIDRTooWide";
const BESIDE_OTHER_FAMILY: &str = "BesideOtherFamily";
const TERMINATING: &str = "Terminating";
const WRITES_REJECTED: &str = "WritesRejected";

/// Conditions whose changes are reported as events. `Ready` is left out, because it repeats other conditions.
pub(crate) const REPORTED: &[&str] = &[
    INVALID,
    OVERLAPPING,
    NEARLY_EXHAUSTED,
    EXHAUSTED,
    SHRINKING,
    FOREIGN_ALLOCATOR,
    PODCIDR_TOO_WIDE,
    BESIDE_OTHER_FAMILY,
    TERMINATING,
    WRITES_REJECTED,
];
const INVALID: &str = "Invalid";

/// Returns the reason of the event that reports that this condition became True (`bad`) or False.
pub(crate) fn event_reason(kind: &'static str, bad: bool) -> &'static str {
    match (kind, bad) {
        (INVALID, true) => "InvalidSpec",
        (INVALID, false) => "SpecIsValid",
        (OVERLAPPING, true) => "Overlapping",
        (OVERLAPPING, false) => "NoLongerOverlapping",
        (EXHAUSTED, true) => "PoolExhausted",
        (EXHAUSTED, false) => "PoolHasRoom",
        (NEARLY_EXHAUSTED, true) => "PoolNearlyExhausted",
        (NEARLY_EXHAUSTED, false) => "PoolHasRoomAgain",
        (SHRINKING, true) => "Shrinking",
        (SHRINKING, false) => "Shrunk",
        (FOREIGN_ALLOCATOR, true) => "ForeignAllocator",
        (FOREIGN_ALLOCATOR, false) => "ForeignAllocatorQuiet",
        (PODCIDR_TOO_WIDE, true) => "PodCIDRTooWide",
        (PODCIDR_TOO_WIDE, false) => "NoPodCIDRTooWide",
        (BESIDE_OTHER_FAMILY, true) => "BesideOtherFamily",
        (BESIDE_OTHER_FAMILY, false) => "NotBesideOtherFamily",
        (WRITES_REJECTED, true) => "WritesRejected",
        (WRITES_REJECTED, false) => "WritesAccepted",
        (_, true) => "Terminating",
        (_, false) => "NotTerminating",
    }
}

/// Counts for the status of one pool, made from all nodes and blocks before the status is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolCounts {
    /// Number of nodes that wait for blocks of the pool
    pub waiting: i64,
    /// Whether nodes exist but the pool selects none
    pub selects_none: bool,
    /// Addresses per family, for a pool in mode Blocks
    pub totals: Dual<Totals>,
}

/// Builds the status that a pool should have.
pub fn status(
    pool: &Pool,
    state: &PoolState,
    counted: PoolCounts,
    allocations: &AllocationState,
    now: Now,
) -> IPPoolStatus {
    let addresses = |family: Family| {
        (state.allocation_mode == AllocationMode::Blocks)
            .then(|| counted.totals.get(family).status())
    };
    let families: Vec<(Family, FamilyCounts)> = state
        .space
        .families()
        .map(|family| (family, figures(state, family, allocations)))
        .collect();
    let of = |wanted: Family| {
        families
            .iter()
            .find(|(f, _)| *f == wanted)
            .map(|(_, figures)| {
                let mut status = figures.status(state.space.block_len(wanted), addresses(wanted));
                foretell(&mut status, pool, wanted, *figures, now);
                status
            })
    };
    let holders = holders(state, allocations);
    let nodes = holders.values().filter(|live| **live).count();
    let refused = refused(state, allocations);
    let mut conditions = vec![
        ready(state, counted.selects_none, refused.as_ref()),
        flag(
            INVALID,
            invalid(state),
            "SpecIsValid",
            "the spec can be used",
        ),
        flag(
            OVERLAPPING,
            overlapping(state),
            "NoOverlap",
            "no other pool, service range or node address lies in it",
        ),
        flag(
            EXHAUSTED,
            exhausted(state, &families, counted.waiting),
            "HasRoom",
            "there is a free block of every family",
        ),
        flag(
            NEARLY_EXHAUSTED,
            nearly_exhausted(state, &families),
            "HasRoom",
            "less is used than spec.nearlyExhaustedPercent",
        ),
        flag(
            SHRINKING,
            shrinking(state, counted),
            "NothingOutside",
            "no block lies outside of what the spec names",
        ),
        flag(
            FOREIGN_ALLOCATOR,
            foreign_allocator(state),
            "OnlyWriter",
            "nobody else writes podCIDRs in its range",
        ),
        flag(
            PODCIDR_TOO_WIDE,
            podcidr_too_wide(state, allocations),
            "NoPodCIDRTooWide",
            "no node has a podCIDR over it that no node could have been given",
        ),
        flag(
            BESIDE_OTHER_FAMILY,
            beside_other_family(state, allocations),
            "NotBesideOtherFamily",
            "no older pool for the same nodes and pods gives a family that it lacks",
        ),
        flag(
            WRITES_REJECTED,
            refused,
            "Accepted",
            "the API server takes what is written for it",
        ),
    ];
    if pool.deleting {
        let resting = holders.len() - nodes;
        let message = format!(
            "{nodes} nodes still hold ranges of it, those of {resting} dead nodes rest: it goes with the last one"
        );
        conditions.push(flag(TERMINATING, Some(("InUse", message)), "", ""));
    }
    let before = pool
        .status
        .as_ref()
        .map(|status| status.conditions.as_slice())
        .unwrap_or_default();
    for condition in &mut conditions {
        let same = before
            .iter()
            .find(|b| b.type_ == condition.type_ && b.status == condition.status);
        let whole = jiff::Timestamp::from_second(now.wall.as_second()).unwrap_or(now.wall);
        condition.last_transition_time =
            same.map_or(Time(whole), |b| b.last_transition_time.clone());
        condition.observed_generation = Some(pool.generation);
    }
    IPPoolStatus {
        observed_generation: Some(pool.generation),
        ipv4: of(Family::V4),
        ipv6: of(Family::V6),
        nodes: i64::try_from(nodes).ok(),
        waiting: Some(counted.waiting),
        conditions,
    }
}

/// Adds the forecast to the status. The trend is continued from the last written status, so it survives restarts.
fn foretell(
    status: &mut FamilyStatus,
    pool: &Pool,
    family: Family,
    figures: FamilyCounts,
    now: Now,
) {
    let before = pool.status.as_ref().and_then(|status| match family {
        Family::V4 => status.ipv4.as_ref(),
        Family::V6 => status.ipv6.as_ref(),
    });
    let taken = figures.capacity.saturating_sub(figures.free);
    let known = before.and_then(|before| Trend::read(before.trend.as_ref()?));
    let trend = match known {
        Some(trend) => trend.observe(taken, now.wall),
        None => Trend::start(taken, now.wall),
    };
    let told = before.and_then(|before| before.exhausts_at.as_ref());
    let at = trend.exhausts_at(figures.free, now.wall, told.map(|at| at.0));
    status.trend = Some(trend.status());
    status.exhausts_at = at.map(Time);
}

fn condition(kind: &str, status: bool, reason: &str, message: String) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

/// Returns a condition. If `told` has a reason and a message, the condition is True with them. Otherwise it is False
/// with the other texts.
fn flag(kind: &str, told: Option<(&str, String)>, otherwise: &str, message: &str) -> Condition {
    match told {
        Some((reason, message)) => condition(kind, true, reason, message),
        None => condition(kind, false, otherwise, message.to_owned()),
    }
}

fn ready(state: &PoolState, selects_none: bool, refused: Option<&(&str, String)>) -> Condition {
    let reason = match (&state.phase, refused) {
        (PoolPhase::Serving | PoolPhase::Starting, Some((reason, why))) => {
            return condition(READY, false, reason, why.clone());
        }
        (verdict, _) => verdict,
    };
    let reason = match reason {
        // This is no error, but perhaps a mistake of the user.
        PoolPhase::Serving if selects_none => {
            let message = "would serve the nodes it selects, and its nodeSelector matches none";
            return condition(READY, true, "SelectsNoNode", message.to_owned());
        }
        PoolPhase::Serving => {
            return condition(
                READY,
                true,
                "Serving",
                "serves the nodes it selects".to_owned(),
            );
        }
        PoolPhase::Invalid(_) => "InvalidSpec",
        PoolPhase::Terminating => "Terminating",
        PoolPhase::Disabled => "Disabled",
        PoolPhase::Starting => "Starting",
        PoolPhase::Overlaps { .. } => "OverlapsOlderPool",
        PoolPhase::ForeignAllocator => "ForeignAllocator",
    };
    condition(
        READY,
        false,
        reason,
        format!("carves nothing: {}", state.phase),
    )
}

/// Returns reason and message if the API server keeps rejecting the pool's finalizers or the creation of its blocks.
fn refused(state: &PoolState, allocations: &AllocationState) -> Option<(&'static str, String)> {
    const ADVICE: &str = "look for an admission policy, a webhook or a quota that forbids it";
    let refusals = &allocations.refusals;
    if let Some(why) = refusals.why(&ObjectCall::SetPoolFinalizers(state.name.clone())) {
        let text = format!(
            "the API server does not take its finalizers, without which it neither serves nor goes: {why}: {ADVICE}"
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
    let text = match blocks.count() {
        0 => format!("the API server does not take its block {cidr}: {why}: {ADVICE}"),
        more => format!(
            "the API server does not take its block {cidr} and {more} more: {why}: {ADVICE}"
        ),
    };
    Some(("BlocksRefused", text))
}

fn invalid(state: &PoolState) -> Option<(&'static str, String)> {
    match &state.phase {
        PoolPhase::Invalid(why) => Some(("InvalidSpec", why.clone())),
        _ => None,
    }
}

fn overlapping(state: &PoolState) -> Option<(&'static str, String)> {
    /// At most this many ranges are named in the message.
    const NAMED: usize = 5;
    if let PoolPhase::Overlaps { .. } = state.phase {
        return Some((
            "OverlapsOlderPool",
            format!("carves nothing: {}", state.phase),
        ));
    }
    if state.left_out.is_empty() {
        return None;
    }
    let more = state.left_out.len().saturating_sub(NAMED);
    let mut list = state
        .left_out
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    if more > 0 {
        list = format!("{list} and {more} more");
    }
    Some((
        "LeavesOut",
        format!("leaves out what is not free to give: {list}: choose CIDRs apart from these"),
    ))
}

fn nearly_exhausted(
    state: &PoolState,
    families: &[(Family, FamilyCounts)],
) -> Option<(&'static str, String)> {
    let limit = f64::from(state.nearly_exhausted) / 100.0;
    let (family, figures) = families
        .iter()
        .find(|(_, figures)| figures.capacity > 0 && figures.utilization() >= limit)?;
    Some((
        "LittleRoom",
        format!(
            "{} of {} {family} blocks are free, spec.nearlyExhaustedPercent is {}: add a CIDR to spec.{}.cidrs in time, or a pool",
            figures.free,
            figures.capacity,
            state.nearly_exhausted,
            field(*family),
        ),
    ))
}

fn shrinking(state: &PoolState, counted: PoolCounts) -> Option<(&'static str, String)> {
    let outside: usize = counted.totals.iter().map(|(_, t)| t.outside).sum();
    // If the spec is invalid, its ranges are unknown, so nothing is said to lie outside of them.
    let readable = !matches!(state.phase, PoolPhase::Invalid(_));
    (outside > 0 && readable).then(|| {
        (
            "BlocksOutside",
            format!(
                "{outside} blocks lie outside of what the spec names: they give no new address and go when they are empty; to be faster, move their pods (kubectl get ipamblocks.cadastre.dev --field-selector spec.pool=...)"
            ),
        )
    })
}

fn field(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

fn exhausted(
    state: &PoolState,
    families: &[(Family, FamilyCounts)],
    waiting: i64,
) -> Option<(&'static str, String)> {
    let (family, figures) = families.iter().find(|(_, figures)| figures.free == 0)?;
    let field = field(*family);
    let len = state.space.block_len(*family).unwrap_or_default();
    let FamilyCounts {
        capacity,
        held,
        quarantined,
        ..
    } = figures;
    Some((
        "NoFreeBlock",
        format!(
            "no free {family} block of /{len} ({held} of {capacity} held, {quarantined} resting, {waiting} nodes wait): add a CIDR to spec.{field}.cidrs, or a pool that selects the nodes that wait"
        ),
    ))
}

fn podcidr_too_wide(
    state: &PoolState,
    allocations: &AllocationState,
) -> Option<(&'static str, String)> {
    let mut over = allocations
        .too_wide()
        .filter(|(_, cidr)| state.space.touches(cidr));
    let (name, cidr) = over.next()?;
    let more = match over.count() {
        0 => String::new(),
        more => format!(" ({more} more such)"),
    };
    let text = too_wide_text(cidr);
    Some((
        "WrittenByOthers",
        format!("node \"{name}\"{more}: {text}: {ADVICE}"),
    ))
}

fn beside_other_family(
    state: &PoolState,
    allocations: &AllocationState,
) -> Option<(&'static str, String)> {
    let (older, family) = allocations.pools.older_of_other_family(state)?;
    let (field, name, older) = (field(family), &state.name, &older.name);
    Some((
        "OlderPoolOfOtherFamily",
        format!(
            "serves only who asks for it by name: it gives no {family}, and the older pool \"{older}\", for the same nodes and pods, does. For both families make one pool of both: delete this one, and add its ranges to \"{older}\" (kubectl edit ippools.cadastre.dev {older}), or add {field} ranges here and delete \"{older}\". To use both as they are, tell them apart by priority or selectors (kubectl edit ippools.cadastre.dev {name})"
        ),
    ))
}

fn foreign_allocator(state: &PoolState) -> Option<(&'static str, String)> {
    (state.paused_until.is_some()).then(|| {
        (
            "PodCIDRsWrittenByOthers",
            PoolPhase::ForeignAllocator.to_string(),
        )
    })
}
