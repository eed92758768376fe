//! Reads the whole content of a ledger, for the agent's reports and for lists of addresses.

use std::collections::BTreeMap;

use super::super::ops::Now;
use super::super::storage_fault::StorageFault;
use super::choose::{cooldown_ms, terms};
use super::kv::Kv;
use super::probes::{self, Conflict, PoolProbes};
use super::record::{AttachmentRecord, BlockRecord, BlockState};
use super::tables::Read;
use super::withdrawals::{self, WithdrawalState};
use cadastre_core::node_allocation::{Block, PoolTerms};
use cadastre_core::usable::{covering, room};
use cadastre_core::{Addr, Cidr, Dual};

/// The content of a ledger at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// UID of the Node to which the blocks are allocated; `None` before the first call of
    /// [`set_allocation`](super::AddressLedger::set_allocation)
    pub node_uid: Option<String>,
    /// All attachments; each has at least one address
    pub attachments: Vec<AttachmentRecord>,
    /// The blocks, in the order of their CIDRs
    pub blocks: Vec<BlockCount>,
    /// The pools of the node. Pools whose settings are known come first, in order of preference. Pools of which only
    /// blocks are known come last
    pub pools: Vec<PoolCount>,
    /// The withdrawn ranges, which the controller may allocate to other nodes or to claims
    pub withdrawn: Vec<Cidr>,
    /// The ranges that the controller wants to withdraw and that are not withdrawn yet
    pub pending_withdrawals: Vec<PendingWithdrawal>,
    /// Whether the ledger was created in this boot while pods used addresses outside of the node's ranges. If so, a new
    /// block may contain addresses in use that the ledger does not know
    pub has_addresses_outside: bool,
    /// The addresses that are not assigned because another host uses them
    pub conflicts: Vec<Conflict>,
    /// The probed addresses of each pool that requires probes: one entry for each family of each pool
    pub probes: Vec<PoolProbes>,
}

/// A range that the controller wants to withdraw from the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingWithdrawal {
    /// The range to withdraw: a part of a block, or a single address
    pub range: Cidr,
    /// Whether no address of the range is in use or cooling, so that the range can be withdrawn now
    pub is_empty: bool,
}

/// How many addresses are in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressCounts {
    /// Number of addresses in use
    pub used: u64,
    /// Number of addresses that were released and are still cooling
    pub cooling: u64,
    /// Number of addresses that can be assigned now to an ADD that requests no specific address
    pub free: u64,
    /// Number of withdrawn addresses, which are neither free nor in use
    pub withdrawn: u64,
    /// Number of addresses that would be free if no other host used them
    pub conflicts: u64,
}

/// A block or podCIDR of the node, with its usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCount {
    /// The CIDR of the block. No other block of the node has the same CIDR
    pub cidr: Cidr,
    /// UID of the block's IPAMBlock; for a podCIDR, UID of the Node
    pub uid: String,
    /// Name of the block's pool; empty for a podCIDR that lies in no pool
    pub pool: String,
    /// Whether the block is a part of another node's block
    pub borrowed: bool,
    /// Whether addresses are assigned from the block, and if not, why
    pub state: BlockState,
    /// How many of the block's addresses are in each state
    pub counts: AddressCounts,
    /// How many of the block's addresses can be assigned to ADDs that request no specific address. Addresses that are
    /// in use already are included
    pub room: u64,
}

/// A pool with its usage on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCount {
    /// The settings of the pool; the default settings if the store has none
    pub terms: PoolTerms,
    /// Sums over the pool's blocks on this node, by family
    pub counts: Dual<AddressCounts>,
}

pub(crate) fn take(kv: &dyn Kv, now: &Now) -> Result<Snapshot, StorageFault> {
    let stamp = kv.stamp(now)?;
    let records = kv.blocks()?;
    let mut cooldowns: BTreeMap<Cidr, u64> = BTreeMap::new();
    for (cidr, block) in &records {
        cooldowns.insert(*cidr, cooldown_ms(&terms(kv, &block.pool)?));
    }
    // Maps each address that is in use or cooling to its block and to whether the address is in use.
    let mut busy: BTreeMap<Addr, (Cidr, bool)> = BTreeMap::new();
    for (addr, freed) in kv.releases()? {
        let cooldown = cooldowns.get(&freed.block).copied().unwrap_or(0);
        if freed.at.cooldown_left(stamp, cooldown).is_some() {
            busy.insert(addr, (freed.block, false));
        }
    }
    let attachments = kv.attachments(None)?;
    for given in attachments.iter().flat_map(|it| &it.given.addresses) {
        busy.insert(given.address, (given.block, true));
    }
    let conflicts = probes::conflicts(kv, stamp)?;
    let mut blocks = Vec::new();
    for (cidr, record) in records {
        let block = count(kv, cidr, record, &busy, &conflicts)?;
        let AddressCounts { used, cooling, .. } = block.counts;
        if block.state != BlockState::Unlisted || used + cooling > 0 {
            blocks.push(block);
        }
    }
    let mut withdrawn = Vec::new();
    let mut pending_withdrawals = Vec::new();
    for (range, state) in kv.withdrawals()? {
        match state {
            WithdrawalState::Withdrawn => withdrawn.push(range),
            WithdrawalState::Requested => pending_withdrawals.push(PendingWithdrawal {
                range,
                is_empty: busy.range(range.first()..=range.last()).next().is_none(),
            }),
        }
    }
    let terms = kv.pools()?;
    Ok(Snapshot {
        node_uid: kv.node()?,
        has_addresses_outside: kv.has_addresses_outside(now)?,
        withdrawn,
        pending_withdrawals,
        conflicts,
        probes: probes::of_pools(kv, &terms, stamp)?,
        attachments,
        pools: pools(terms, &blocks),
        blocks,
    })
}

fn count(
    kv: &dyn Kv,
    cidr: Cidr,
    record: BlockRecord,
    busy: &BTreeMap<Addr, (Cidr, bool)>,
    conflicts: &[Conflict],
) -> Result<BlockCount, StorageFault> {
    let pool = kv.pool(&record.pool)?;
    let never = record.usable(cidr, pool.as_ref()).excluded;
    let withheld = withdrawals::withheld(kv, cidr, &record.pool)?;
    let out = record.left_out(cidr, &[&never[..], &withheld].concat());
    let block = Block {
        cidr,
        uid: record.uid,
        pool: record.pool,
        draining: false,
        borrowed: record.borrowed,
        reserved: [record.reserved, withheld].concat(),
        on_request: record.on_request,
    };
    let room = room(&block, pool.as_ref());
    let mut counts = AddressCounts::default();
    let mut less = 0;
    for (addr, (of, in_use)) in busy.range(cidr.first()..=cidr.last()) {
        counts.used += u64::from(*of == cidr && *in_use);
        counts.cooling += u64::from(*of == cidr && !*in_use);
        less += u128::from(covering(&out, *addr).is_none());
    }
    let withdrawn = withdrawals::withdrawn_in(kv, cidr, &block.pool)?;
    counts.withdrawn = u64::try_from(withdrawn).unwrap_or(u64::MAX);
    let of_block = conflicts.iter().map(|it| it.address);
    let of_block = of_block.filter(|it| cidr.contains_addr(*it) && !busy.contains_key(it));
    let is_free = |it: &Addr| covering(&out, *it).is_none();
    let in_conflict = of_block.filter(is_free).count();
    if record.state == BlockState::Active {
        counts.conflicts = u64::try_from(in_conflict).unwrap_or(u64::MAX);
        less += u128::from(counts.conflicts);
        counts.free = u64::try_from(room - less).unwrap_or(u64::MAX);
    }
    Ok(BlockCount {
        cidr,
        uid: block.uid,
        pool: block.pool,
        borrowed: record.borrowed,
        state: record.state,
        counts,
        room: u64::try_from(room).unwrap_or(u64::MAX),
    })
}

fn pools(known: Vec<PoolTerms>, blocks: &[BlockCount]) -> Vec<PoolCount> {
    let unused = |terms| PoolCount {
        terms,
        counts: Dual::default(),
    };
    let mut pools: Vec<PoolCount> = known.into_iter().map(unused).collect();
    for block in blocks {
        let at = pools.iter().position(|pool| pool.terms.name == block.pool);
        let at = at.unwrap_or_else(|| {
            pools.push(unused(PoolTerms::named(&block.pool)));
            pools.len() - 1
        });
        let sum = pools[at].counts.get_mut(block.cidr.family());
        sum.used += block.counts.used;
        sum.cooling += block.counts.cooling;
        sum.free = sum.free.saturating_add(block.counts.free);
        sum.withdrawn = sum.withdrawn.saturating_add(block.counts.withdrawn);
        sum.conflicts += block.counts.conflicts;
    }
    pools
}
