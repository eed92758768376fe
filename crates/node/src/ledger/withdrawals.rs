//! Withdrawals: the controller takes ranges or single addresses back from the node.
//!
//! | state | begins when | means |
//! |---|---|---|
//! | [`Requested`] | the NodeSubnet lists the range in `withdraw` | no new address of the range is assigned |
//! | [`Withdrawn`] | `withdraw_empty` finds no address in use or cooling | the range may be allocated elsewhere |
//! | none | `returned` lists the range, or the request ends before the withdrawal | addresses are assigned normally |
//!
//! [`Requested`]: WithdrawalState::Requested
//! [`Withdrawn`]: WithdrawalState::Withdrawn
//!
//! # Guarantees
//! - A withdrawn range stays withdrawn until the NodeSubnet lists the range in `returned`. If the range only disappears
//!   from `withdraw`, it stays withdrawn, because after a restore of the API server the NodeSubnet may be older than
//!   the withdrawal.
//! - A withdrawal does not depend on the block that contains the range: the range stays withdrawn if the block
//!   disappears and is listed again.
//! - A withdrawal does not affect the block of a claim. So an address can be withdrawn from a wide block, and at the
//!   same time be the block of a claim that a pod of this node uses.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::super::storage_fault::StorageFault;
use super::choose::{cooldown_ms, terms};
use super::holdings::rest_left;
use super::kv::{Kv, KvMut, KvTable};
use super::record::{AddressRecord, BootTime, cidr_key};
use super::tables::{Read, Write};
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{NodeAllocation, is_claim};
use cadastre_core::usable::{above, union};
use cadastre_core::{Addr, Cidr, IpRange};

/// The store records at most this many withdrawals. While this maximum is reached, further requests are ignored.
const MOST_WITHDRAWALS: usize = 1_024;

/// How far a withdrawal has proceeded.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WithdrawalState {
    Requested,
    Withdrawn,
}

/// Records the requests of the NodeSubnet. Begins withdrawals of the ranges in `withdraw`, cancels withdrawals that are
/// no longer requested, and ends withdrawals of the ranges in `returned`.
pub(crate) fn put_requests(
    kv: &mut dyn KvMut,
    allocation: &NodeAllocation,
) -> Result<(), StorageFault> {
    let known: BTreeMap<Cidr, WithdrawalState> = kv.withdrawals()?.into_iter().collect();
    let wanted: BTreeSet<Cidr> = allocation.withdraw.iter().copied().collect();
    let returned: BTreeSet<Cidr> = allocation.returned.iter().copied().collect();
    let mut count = known.len();
    for (range, state) in &known {
        let is_over = match state {
            WithdrawalState::Requested => true,
            WithdrawalState::Withdrawn => {
                returned.contains(range) || Mutation::UnlistedWithdrawalEnds.is_on()
            }
        };
        if is_over && !wanted.contains(range) {
            kv.drop_key(KvTable::Withdrawals, &cidr_key(*range))?;
            count -= 1;
        }
    }
    for range in wanted.iter().filter(|it| !known.contains_key(it)) {
        if count < MOST_WITHDRAWALS {
            put(kv, *range, WithdrawalState::Requested)?;
            count += 1;
        }
    }
    Ok(())
}

/// Withdraws each requested range of which no address is in use or cooling. Returns whether any range was withdrawn.
pub(crate) fn withdraw_empty(kv: &mut dyn KvMut, now: BootTime) -> Result<bool, StorageFault> {
    let mut any = false;
    for (range, state) in kv.withdrawals()? {
        let is_requested = state == WithdrawalState::Requested;
        if is_requested && (is_empty(kv, range, now)? || Mutation::WithdrawnInUse.is_on()) {
            put(kv, range, WithdrawalState::Withdrawn)?;
            any = true;
        }
    }
    Ok(any)
}

/// Returns the ranges in which a block of this pool assigns no new address because of a withdrawal.
pub(crate) fn withheld(kv: &dyn Kv, block: Cidr, pool: &str) -> Result<Vec<IpRange>, StorageFault> {
    if is_claim(pool) || Mutation::WithdrawnAssigned.is_on() {
        return Ok(Vec::new());
    }
    let ranges = kv.cidrs_over(KvTable::Withdrawals, block)?;
    Ok(ranges.into_iter().map(IpRange::from).collect())
}

/// Returns how many addresses of a block of this pool are withdrawn.
pub(crate) fn withdrawn_in(kv: &dyn Kv, block: Cidr, pool: &str) -> Result<u128, StorageFault> {
    let mut ranges = Vec::new();
    if is_claim(pool) {
        return Ok(0);
    }
    for range in kv.cidrs_over(KvTable::Withdrawals, block)? {
        let state = kv.json(KvTable::Withdrawals, &cidr_key(range))?;
        if state == Some(WithdrawalState::Withdrawn) {
            ranges.push(IpRange::from(range));
        }
    }
    Ok(union(block, &ranges).iter().map(IpRange::size).sum())
}

/// Returns the range that contains the address and that is withdrawn or to be withdrawn; `None` if no such range
/// contains it.
pub(crate) fn covering(kv: &dyn Kv, addr: Addr) -> Result<Option<Cidr>, StorageFault> {
    let ranges = kv.cidrs_over(KvTable::Withdrawals, Cidr::host(addr))?;
    Ok(ranges.into_iter().next())
}

fn put(kv: &mut dyn KvMut, range: Cidr, state: WithdrawalState) -> Result<(), StorageFault> {
    kv.put_json(KvTable::Withdrawals, &cidr_key(range), &state)
}

/// Returns whether no address of a range is in use or cooling. The addresses may belong to any block.
fn is_empty(kv: &dyn Kv, range: Cidr, now: BootTime) -> Result<bool, StorageFault> {
    let pools = kv.pools()?;
    let longest = pools.iter().map(cooldown_ms).max().unwrap_or(0);
    if rest_left(kv, now, longest)?.is_some() {
        return Ok(false);
    }
    let mut at = kv.address_from(range.first())?;
    while let Some(addr) = at.filter(|addr| range.contains_addr(*addr)) {
        match kv.address(addr)? {
            Some(AddressRecord::Used { .. }) => return Ok(false),
            Some(AddressRecord::Freed(freed)) => {
                let pool = kv.block(freed.block)?.map_or(String::new(), |it| it.pool);
                let cooldown = cooldown_ms(&terms(kv, &pool)?);
                if freed.at.cooldown_left(now, cooldown).is_some() {
                    return Ok(false);
                }
            }
            None => {}
        }
        at = match above(addr, range.last()) {
            Some(next) => kv.address_from(next)?,
            None => None,
        };
    }
    Ok(true)
}
