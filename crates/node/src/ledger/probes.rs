//! Probes, which find out whether another host uses a free address. They are for pools that require a probe before an
//! address is used (`PoolTerms::probes_conflicts`).
//!
//! | record | begins when | means |
//! |---|---|---|
//! | none | the address is assigned, or a probe is too old | the address must be probed before it is assigned |
//! | [`Clean`] | nobody answered a probe | for [`CLEAN_FOR`], the address can be assigned in the probed network |
//! | [`Conflict`] | another host answered a probe | the address is not assigned |
//!
//! [`Clean`]: ProbeRecord::Clean
//! [`Conflict`]: ProbeRecord::Conflict
//!
//! # Guarantees
//! - A conflict ends in three cases: a probe that began at least [`CONFLICT_FOR`] after the last answer gets no answer;
//!   an operator ends the conflict; or the block is removed.
//! - The assignment of an address deletes the record of its probe. So each assignment needs a probe that began after
//!   the address was last released.
//! - The answer to a probe of an address in use changes nothing, because the pod itself may have answered.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::ops::{Add, OpErrorKind};
use super::super::storage_fault::StorageFault;
use super::Stop;
use super::choose::{Search, refuse, terms};
use super::decide;
use super::kv::{Kv, KvMut, KvTable};
use super::record::{AddressRecord, BlockState, BootTime, address_key};
use super::tables::{Read, Write};
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{PoolTerms, is_claim};
use cadastre_core::{Addr, Cidr, Family};

/// At most this many addresses of each family are probed at once.
pub const MOST_PROBES: usize = 16;
/// If nobody answers a probe of an address, the address can be assigned for this time after the probe. A host that
/// begins to use the address after the probe is not noticed.
pub(crate) const CLEAN_FOR: Duration = Duration::from_secs(300);
/// An address that was probed in advance, before an ADD needs it, is probed again after this time. So the address stays
/// assignable.
const RENEWED_AFTER: Duration = Duration::from_secs(150);
/// An address in conflict is probed again when this time has passed since the last answer.
const CONFLICT_FOR: Duration = Duration::from_secs(600);
/// The maximum number of conflicts that the ledger remembers. Further conflicts replace those with the oldest answers.
/// The addresses of the replaced conflicts have to be probed again.
const MOST_CONFLICTS: usize = 1_024;

/// Addresses to probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProbeTargets {
    /// Name of the interface on which to probe; empty for the interface of the node's default route
    pub interface: String,
    /// The addresses to probe, none of which is in use
    pub addresses: Vec<Addr>,
}

/// The answers to the probes of some addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeRound {
    /// The interface on which the probes were sent, as named in the [`ProbeTargets`]
    pub interface: String,
    /// Time since boot at which the probes began
    pub begun: Duration,
    /// The addresses, each with the link-layer address of the host that answered, if any
    pub answers: Vec<(Addr, Option<String>)>,
}

/// An address that is not assigned because another host uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The address that another host uses
    pub address: Addr,
    /// Name of the pool from which the node could assign the address
    pub pool: String,
    /// Link-layer address of the host that sent the latest answer
    pub by: String,
    /// The interface on which the host answered; empty for the interface of the node's default route
    pub interface: String,
    /// Time of the first answer from the host with the link-layer address `by`, in milliseconds of Unix time
    pub since_ms: i64,
    /// Whether the address is due to be probed again
    pub is_due: bool,
}

/// Which addresses of one family of a pool were probed, and which ones have to be probed next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolProbes {
    /// Name of the IPPool
    pub pool: String,
    /// The interface on which addresses of the pool were probed last; empty for the interface of the node's default
    /// route
    pub interface: String,
    /// How many free addresses can be assigned without a further probe
    pub ready: u64,
    /// The addresses to probe next, in the order in which they are assigned; at most [`MOST_PROBES`]
    pub next: Vec<Addr>,
}

/// What is known from the last probe of an address.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ProbeRecord {
    Clean {
        at: BootTime,
        interface: String,
    },
    Conflict {
        at: BootTime,
        interface: String,
        by: String,
        since_ms: i64,
    },
}

/// Whether a free address of a pool that requires probes may be assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProbeState {
    Clean,
    /// The address has to be probed before it can be assigned
    Unprobed,
    /// Another host, with this link-layer address, uses the address
    Conflict(String),
}

impl ProbeRecord {
    fn at(&self) -> BootTime {
        match self {
            Self::Clean { at, .. } | Self::Conflict { at, .. } => *at,
        }
    }

    fn interface(&self) -> &str {
        match self {
            Self::Clean { interface, .. } | Self::Conflict { interface, .. } => interface,
        }
    }

    /// Returns whether the age of the probe is at least `than`. A probe in an earlier boot counts as older in any case.
    fn is_older(&self, than: Duration, now: BootTime) -> bool {
        let at = self.at();
        at.boot != now.boot || u128::from(now.ms) >= u128::from(at.ms) + than.as_millis()
    }
}

/// Returns whether an address may be assigned to an interface of a network whose parent interface is `parent`. A probe
/// without an answer is valid for at most `clean_for`.
pub(crate) fn state(
    kv: &dyn Kv,
    addr: Addr,
    parent: &str,
    now: BootTime,
    clean_for: Duration,
) -> Result<ProbeState, StorageFault> {
    Ok(match kv.probe(addr)? {
        Some(it @ ProbeRecord::Clean { .. })
            if it.interface() == parent && !it.is_older(clean_for, now) =>
        {
            ProbeState::Clean
        }
        Some(ProbeRecord::Conflict { .. }) if Mutation::ConflictAssigned.is_on() => {
            ProbeState::Clean
        }
        Some(ref it @ ProbeRecord::Conflict { ref by, .. }) if !it.is_older(CONFLICT_FOR, now) => {
            ProbeState::Conflict(by.clone())
        }
        _ if Mutation::ProbeSkipped.is_on() => ProbeState::Clean,
        _ => ProbeState::Unprobed,
    })
}

/// Returns the addresses that have to be probed before the ADD can be served. The result is empty if no probe would
/// help.
pub(crate) fn targets(kv: &dyn Kv, add: &Add, now: BootTime) -> Result<ProbeTargets, StorageFault> {
    let mut search = Search::new(&add.parent, now);
    let decided = match kv.record(&add.attachment)? {
        Some(_) => return Ok(ProbeTargets::default()),
        None => decide::choices(kv, &mut add.clone(), &mut search),
    };
    let addresses = match decided {
        Err(Stop::Refused(refusal)) if refusal.why == OpErrorKind::Unprobed => search.to_probe,
        Err(Stop::Fault(fault)) => return Err(fault),
        _ => Vec::new(),
    };
    Ok(ProbeTargets {
        interface: add.parent.clone(),
        addresses,
    })
}

/// Records the answers to probes.
pub(crate) fn record(
    kv: &mut dyn KvMut,
    round: &ProbeRound,
    now: BootTime,
    wall_ms: i64,
) -> Result<(), StorageFault> {
    let begun = BootTime {
        ms: u64::try_from(round.begun.as_millis()).unwrap_or(u64::MAX),
        ..now
    };
    for (addr, answer) in &round.answers {
        let is_stale = match kv.address(*addr)? {
            Some(AddressRecord::Used { .. }) => true,
            Some(AddressRecord::Freed(freed)) => {
                freed.at.boot == begun.boot && freed.at.ms >= begun.ms
            }
            None => false,
        };
        if is_stale || probing_pool(kv, *addr)?.is_none() {
            continue;
        }
        let (at, interface) = (begun, round.interface.clone());
        let new = match (answer, kv.probe(*addr)?) {
            (None, Some(it @ ProbeRecord::Conflict { .. }))
                if !it.is_older(CONFLICT_FOR, begun) =>
            {
                continue;
            }
            (None, _) => ProbeRecord::Clean { at, interface },
            (Some(by), before) => ProbeRecord::Conflict {
                at,
                interface,
                by: by.clone(),
                since_ms: match before {
                    Some(ProbeRecord::Conflict {
                        by: same, since_ms, ..
                    }) if same == *by => since_ms,
                    _ => wall_ms,
                },
            },
        };
        kv.put_json(KvTable::Probes, &address_key(*addr), &new)?;
    }
    forget_old(kv, now)
}

/// Returns the pool from which this node could assign the address, if that pool requires probes.
fn probing_pool(kv: &dyn Kv, addr: Addr) -> Result<Option<String>, StorageFault> {
    let Some((_, block)) = kv.block_around(addr)? else {
        return Ok(None);
    };
    let is_probing = block.state == BlockState::Active && terms(kv, &block.pool)?.probes_conflicts;
    Ok(is_probing.then_some(block.pool))
}

/// Deletes the records of unanswered probes that are no longer valid. If there are more than [`MOST_CONFLICTS`]
/// conflicts, also deletes those with the oldest answers.
fn forget_old(kv: &mut dyn KvMut, now: BootTime) -> Result<(), StorageFault> {
    let mut conflicts = Vec::new();
    for (addr, record) in kv.probes()? {
        match record {
            ProbeRecord::Clean { .. } if record.is_older(CLEAN_FOR, now) => end(kv, addr)?,
            ProbeRecord::Clean { .. } => {}
            ProbeRecord::Conflict { at, .. } => conflicts.push(((at.boot, at.ms), addr)),
        }
    }
    conflicts.sort_unstable();
    let surplus = conflicts.len().saturating_sub(MOST_CONFLICTS);
    for (_, addr) in &conflicts[..surplus] {
        end(kv, *addr)?;
    }
    Ok(())
}

/// Deletes the probe record of an address, so that the address has to be probed again.
pub(crate) fn end(kv: &mut dyn KvMut, addr: Addr) -> Result<(), StorageFault> {
    kv.drop_key(KvTable::Probes, &address_key(addr))
}

/// Ends conflicts. Each conflict is given by its address and the time at which it began. Returns whether any conflict
/// has ended.
pub(crate) fn end_conflicts(
    kv: &mut dyn KvMut,
    ended: &[(Addr, i64)],
) -> Result<bool, StorageFault> {
    let mut any = false;
    for (addr, since) in ended {
        if let Some(ProbeRecord::Conflict { since_ms, .. }) = kv.probe(*addr)?
            && since_ms == *since
        {
            end(kv, *addr)?;
            any = true;
        }
    }
    Ok(any)
}

/// Deletes the probe records of all addresses of a block.
pub(crate) fn end_block(kv: &mut dyn KvMut, block: Cidr) -> Result<(), StorageFault> {
    for (addr, _) in kv.probes()? {
        if block.contains_addr(addr) {
            end(kv, addr)?;
        }
    }
    Ok(())
}

/// Returns all conflicts of addresses that this node could otherwise assign, in the order of the addresses.
pub(crate) fn conflicts(kv: &dyn Kv, now: BootTime) -> Result<Vec<Conflict>, StorageFault> {
    let mut conflicts = Vec::new();
    for (address, record) in kv.probes()? {
        let is_due = record.is_older(CONFLICT_FOR, now);
        if let ProbeRecord::Conflict {
            by,
            interface,
            since_ms,
            ..
        } = record
            && let Some(pool) = probing_pool(kv, address)?
        {
            conflicts.push(Conflict {
                address,
                pool,
                by,
                interface,
                since_ms,
                is_due,
            });
        }
    }
    Ok(conflicts)
}

/// Returns the probed addresses of each pool that requires probes and has blocks. Leaves out the pools of claims,
/// because the address of a claim is probed only for an ADD.
pub(crate) fn of_pools(
    kv: &dyn Kv,
    pools: &[PoolTerms],
    now: BootTime,
) -> Result<Vec<PoolProbes>, StorageFault> {
    let mut all = Vec::new();
    let probing = |it: &&PoolTerms| it.probes_conflicts && !is_claim(&it.name);
    let probing: Vec<&PoolTerms> = pools.iter().filter(probing).collect();
    if probing.is_empty() {
        return Ok(all);
    }
    let records = kv.probes()?;
    for pool in probing {
        for family in kv.block_families(&pool.name)? {
            all.push(of_pool(kv, pool, family, &records, now)?);
        }
    }
    Ok(all)
}

fn of_pool(
    kv: &dyn Kv,
    pool: &PoolTerms,
    family: Family,
    records: &[(Addr, ProbeRecord)],
    now: BootTime,
) -> Result<PoolProbes, StorageFault> {
    let mut own = Vec::new();
    for (addr, record) in records.iter().filter(|(addr, _)| addr.family == family) {
        let block = kv.block_around(*addr)?;
        if block.is_some_and(|(_, it)| it.pool == pool.name) {
            own.push(record);
        }
    }
    let newest = own.iter().max_by_key(|it| (it.at().boot, it.at().ms));
    let interface = newest.map_or(String::new(), |it| it.interface().to_owned());
    let is_ready = |it: &&&ProbeRecord| {
        let is_clean = matches!(it, ProbeRecord::Clean { .. }) && it.interface() == interface;
        is_clean && !it.is_older(RENEWED_AFTER, now)
    };
    let ready = own.iter().filter(is_ready).count();
    let mut search = Search {
        clean_for: RENEWED_AFTER,
        is_probing_ahead: true,
        ..Search::new(&interface, now)
    };
    match super::choose::next(kv, pool, family, &mut search) {
        Err(Stop::Fault(fault)) => return Err(fault),
        Ok(_) | Err(Stop::Refused(_)) => {}
    }
    Ok(PoolProbes {
        pool: pool.name.clone(),
        ready: u64::try_from(ready).unwrap_or(u64::MAX),
        next: search.to_probe,
        interface,
    })
}

/// Returns the rejection of an ADD whose address has to be probed before it can be assigned.
pub(crate) fn unprobed(text: &str) -> Stop {
    refuse(
        OpErrorKind::Unprobed,
        format!(
            "{text}, by the pool's conflictProbe. This node's agent probes it: see that the agent runs, and its log."
        ),
    )
}
