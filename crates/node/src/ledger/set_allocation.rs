//! Records the ranges of the node, and releases blocks.

use std::collections::{BTreeMap, BTreeSet};

use super::super::ops::Now;
use super::super::storage_fault::StorageFault;
use super::apply::forget;
use super::choose::{cooldown_ms, terms};
use super::holdings::rest_left;
use super::kv::{Kv, KvMut, KvTable};
use super::probes;
use super::record::{AddressRecord, BlockRecord, BlockState, BootTime, cidr_key, released_key};
use super::tables::{Read, Write};
use super::withdrawals;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{Block, NodeAllocation, PoolTerms};
use cadastre_core::usable::above;
use cadastre_core::{Cidr, IpRange};

/// At most this many released blocks are remembered; the oldest records are deleted.
const MOST_RELEASED: usize = 1_024;

/// Records the node's ranges and the settings of its pools. Writes only what differs from the stored values.
pub(crate) fn set_allocation(
    kv: &mut dyn KvMut,
    allocation: &NodeAllocation,
    now: &Now,
) -> Result<(), StorageFault> {
    let stamp = kv.stamp(now)?;
    let before = kv.blocks()?;
    // For each block, the addresses that the search for a free address excludes. If these addresses change, the search
    // has to restart at the beginning of the block.
    let mut searched = BTreeMap::new();
    for (cidr, block) in &before {
        searched.insert(*cidr, left_out(kv, *cidr, block)?);
    }
    withdrawals::put_requests(kv, allocation)?;
    put_pools(kv, &allocation.pools)?;
    kv.put_node(&allocation.node_uid)?;
    let listed: BTreeSet<Cidr> = allocation.blocks.iter().map(|block| block.cidr).collect();
    let known: BTreeMap<Cidr, BlockRecord> = before.into_iter().collect();
    for block in &allocation.blocks {
        let mut old = known.get(&block.cidr);
        let new = BlockRecord {
            uid: block.uid.clone(),
            pool: block.pool.clone(),
            state: state(kv, block, old, stamp)?,
            borrowed: block.borrowed,
            reserved: block.reserved.clone(),
            on_request: block.on_request.clone(),
        };
        let is_over = |it: &mut &BlockRecord| it.state != new.state;
        if new.state == BlockState::Released
            && let Some(old) = old.take_if(is_over)
        {
            remove(kv, block.cidr, old)?;
        }
        put_block(kv, block.cidr, old, &new, searched.get(&block.cidr))?;
    }
    for (cidr, old) in known.iter().filter(|(cidr, _)| !listed.contains(cidr)) {
        let gone = old.state == BlockState::Released || is_empty(kv, *cidr, &old.pool, stamp)?;
        if gone {
            remove(kv, *cidr, old)?;
        } else {
            let mut new = old.clone();
            if !Mutation::UnlistedBlocksAssign.is_on() {
                new.state = BlockState::Unlisted;
            }
            put_block(kv, *cidr, Some(old), &new, searched.get(cidr))?;
        }
    }
    Ok(())
}

/// Stops assigning addresses from blocks that are not listed, or that are listed as draining. Changes nothing else.
pub(crate) fn restrict(
    kv: &mut dyn KvMut,
    allocation: &NodeAllocation,
) -> Result<(), StorageFault> {
    for (cidr, old) in kv.blocks()? {
        let listed = allocation.blocks.iter().find(|it| it.cidr == cidr);
        let state = match listed {
            _ if old.state != BlockState::Active || Mutation::UnlistedBlocksAssign.is_on() => {
                continue;
            }
            None => BlockState::Unlisted,
            Some(listed) if listed.draining => BlockState::Draining,
            Some(_) => continue,
        };
        let new = BlockRecord {
            state,
            ..old.clone()
        };
        put_block(kv, cidr, Some(&old), &new, None)?;
    }
    Ok(())
}

/// Returns the state of a listed block. A block that was released stays released, even if it was not listed for a
/// while. If a released block is listed again, the API server was restored to an older state, and another node may have
/// the range.
fn state(
    kv: &dyn Kv,
    block: &Block,
    old: Option<&BlockRecord>,
    now: BootTime,
) -> Result<BlockState, StorageFault> {
    let Block { cidr, uid, .. } = block;
    if old.is_some_and(|it| it.state == BlockState::Released && it.uid == *uid) {
        return Ok(BlockState::Released);
    }
    if !kv.was_released(*cidr, uid)? || Mutation::ReleasedBlocksForgotten.is_on() {
        let drains = block.draining && !Mutation::DrainingBlocksAssign.is_on();
        return Ok(if drains {
            BlockState::Draining
        } else {
            BlockState::Active
        });
    }
    // The agent has released the block `uid`, but now the block is listed again. Since the release, this node may have
    // got the same range again as a block with another UID. So if an address of the range is in use or cooling, the
    // block `uid` drains. Otherwise the block stays released.
    let pool = old.map_or(&block.pool, |it| &it.pool);
    if is_free(kv, *cidr, pool, now)? {
        return Ok(BlockState::Released);
    }
    Ok(BlockState::Draining)
}

/// Releases a block if its UID is `uid` and none of its addresses is in use, cooling or withdrawn. Returns whether the
/// block is released, by this call or an earlier one.
pub(crate) fn release(
    kv: &mut dyn KvMut,
    cidr: Cidr,
    uid: &str,
    now: &Now,
) -> Result<bool, StorageFault> {
    let stamp = kv.stamp(now)?;
    let Some(old) = kv.block(cidr)?.filter(|block| block.uid == uid) else {
        return Ok(false);
    };
    if old.state == BlockState::Released {
        return Ok(true);
    }
    if !is_free(kv, cidr, &old.pool, stamp)? && !Mutation::BlocksReleasedInUse.is_on() {
        return Ok(false);
    }
    // A part of the block may have been withdrawn since the caller found the block empty.
    if withdrawals::withdrawn_in(kv, cidr, &old.pool)? > 0 {
        return Ok(false);
    }
    remove(kv, cidr, &old)?;
    let new = BlockRecord {
        state: BlockState::Released,
        ..old
    };
    put_block(kv, cidr, None, &new, None)?;
    remember(kv, cidr, uid)?;
    Ok(true)
}

/// Records that a block was released. If there are too many of these records, deletes the oldest.
fn remember(kv: &mut dyn KvMut, cidr: Cidr, uid: &str) -> Result<(), StorageFault> {
    let sequence = kv.take_sequence()?;
    kv.put_json(KvTable::ReleasedBlocks, &released_key(cidr, uid), &sequence)?;
    let mut notes = kv.released_blocks()?;
    notes.sort_unstable();
    let surplus = notes.len().saturating_sub(MOST_RELEASED);
    for (_, key) in &notes[..surplus] {
        kv.drop_key(KvTable::ReleasedBlocks, key)?;
    }
    Ok(())
}

fn left_out(kv: &dyn Kv, cidr: Cidr, block: &BlockRecord) -> Result<Vec<IpRange>, StorageFault> {
    let mut never = block.usable(cidr, kv.pool(&block.pool)?.as_ref()).excluded;
    never.extend(withdrawals::withheld(kv, cidr, &block.pool)?);
    Ok(block.left_out(cidr, &never))
}

pub(super) fn put_pools(kv: &mut dyn KvMut, pools: &[PoolTerms]) -> Result<(), StorageFault> {
    let mut rank = 0u32;
    let mut names = BTreeSet::new();
    for pool in pools {
        if names.insert(pool.name.as_str()) {
            kv.put_json(KvTable::Pools, &rank.to_be_bytes(), pool)?;
            let key = pool.name.as_bytes();
            if kv.get(KvTable::Ranks, key)?.as_deref() != Some(&rank.to_be_bytes()) {
                kv.put(KvTable::Ranks, key, &rank.to_be_bytes())?;
            }
            rank += 1;
        }
    }
    while kv.get(KvTable::Pools, &rank.to_be_bytes())?.is_some() {
        kv.remove(KvTable::Pools, &rank.to_be_bytes())?;
        rank += 1;
    }
    for key in kv.list(KvTable::Ranks, &[], |key, _| Ok(key.to_vec()))? {
        if !std::str::from_utf8(&key).is_ok_and(|name| names.contains(name)) {
            kv.remove(KvTable::Ranks, &key)?;
        }
    }
    Ok(())
}

fn put_block(
    kv: &mut dyn KvMut,
    cidr: Cidr,
    old: Option<&BlockRecord>,
    new: &BlockRecord,
    searched: Option<&Vec<IpRange>>,
) -> Result<(), StorageFault> {
    if let Some(old) = old.filter(|old| old.pool != new.pool) {
        kv.index(KvTable::Assigning, &old.pool, cidr, false)?;
        kv.index(KvTable::Open, &old.pool, cidr, false)?;
    }
    kv.put_block(cidr, new)?;
    let assigns = new.state == BlockState::Active;
    let assigned = old.is_some_and(|old| old.state == BlockState::Active && old.pool == new.pool);
    kv.index(KvTable::Assigning, &new.pool, cidr, assigns)?;
    let is_restarted = !assigned || searched != Some(&left_out(kv, cidr, new)?);
    if is_restarted {
        kv.drop_key(KvTable::Cursors, &cidr_key(cidr))?;
    }
    if !assigns {
        kv.index(KvTable::Open, &new.pool, cidr, false)?;
    } else if is_restarted {
        kv.index(KvTable::Open, &new.pool, cidr, true)?;
    }
    Ok(())
}

/// Makes the next search in a block start at the block's lowest address.
fn restart_search(kv: &mut dyn KvMut, cidr: Cidr) -> Result<(), StorageFault> {
    if let Some(block) = kv.block(cidr)? {
        kv.drop_key(KvTable::Cursors, &cidr_key(cidr))?;
        let assigns = block.state == BlockState::Active;
        kv.index(KvTable::Open, &block.pool, cidr, assigns)?;
    }
    Ok(())
}

/// Returns whether a listed block can be released: no address in its range is in use or cooling. Addresses of listed
/// blocks inside the range do not count. Addresses of unlisted blocks do: they can be adopted addresses of this block.
fn is_free(kv: &dyn Kv, cidr: Cidr, pool: &str, now: BootTime) -> Result<bool, StorageFault> {
    if !is_empty(kv, cidr, pool, now)? {
        return Ok(false);
    }
    let over = kv.cidrs_over(KvTable::Blocks, cidr)?;
    for inner in over.into_iter().filter(|it| cidr.contains(it)) {
        if let Some(block) = kv.block(inner)?
            && block.state == BlockState::Unlisted
            && !is_empty(kv, inner, &block.pool, now)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether no address that was assigned from a block is in use or cooling.
fn is_empty(kv: &dyn Kv, cidr: Cidr, pool: &str, now: BootTime) -> Result<bool, StorageFault> {
    let cooldown = cooldown_ms(&terms(kv, pool)?);
    if rest_left(kv, now, cooldown)?.is_some() {
        return Ok(false);
    }
    let mut at = kv.address_from(cidr.first())?;
    while let Some(addr) = at.filter(|addr| cidr.contains_addr(*addr)) {
        match kv.address(addr)? {
            Some(AddressRecord::Used { block, .. }) if block == cidr => return Ok(false),
            Some(AddressRecord::Freed(freed))
                if freed.block == cidr && freed.at.cooldown_left(now, cooldown).is_some() =>
            {
                return Ok(Mutation::CoolingBlocksReleased.is_on());
            }
            _ => {}
        }
        at = match above(addr, cidr.last()) {
            Some(next) => kv.address_from(next)?,
            None => None,
        };
    }
    Ok(true)
}

/// Removes all records of an empty block.
fn remove(kv: &mut dyn KvMut, cidr: Cidr, block: &BlockRecord) -> Result<(), StorageFault> {
    let end_of_time = BootTime {
        boot: u64::MAX,
        ms: u64::MAX,
    };
    forget(kv, cidr, end_of_time, 0, usize::MAX)?;
    probes::end_block(kv, cidr)?;
    kv.index(KvTable::Assigning, &block.pool, cidr, false)?;
    kv.index(KvTable::Open, &block.pool, cidr, false)?;
    kv.drop_key(KvTable::Cursors, &cidr_key(cidr))?;
    kv.drop_key(KvTable::Blocks, &cidr_key(cidr))?;
    // Another block can overlap the removed block. Some records of addresses of that other block were just removed.
    // These addresses now count as never assigned, so the search in the other block has to restart.
    for other in kv.cidrs_over(KvTable::Blocks, cidr)? {
        restart_search(kv, other)?;
    }
    Ok(())
}
