//! Reads the whole content of a ledger, for the agent's reports and for lists of addresses.

use std::collections::BTreeMap;

use super::super::ops::{AddressAssignment, Attachment, Now, PodRef};
use super::super::storage_fault::StorageFault;
use super::choose::{cooldown_ms, terms};
use super::kv::Kv;
use super::record::{BlockRecord, BlockState};
use super::tables::Read;
use cadastre_core::node_allocation::{Block, PoolTerms};
use cadastre_core::usable::{covering, room, usable};
use cadastre_core::{Addr, Cidr, Dual};

/// The content of a ledger at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// UID of the Node to which the blocks are allocated; `None` before the first call of
    /// [`set_allocation`](super::AddressLedger::set_allocation)
    pub node_uid: Option<String>,
    /// The attachments that have addresses
    pub attachments: Vec<AttachmentRecord>,
    /// The blocks, in the order of their CIDRs
    pub blocks: Vec<BlockCount>,
    /// The pools with known terms, best first; then the pools without known terms that have blocks
    pub pools: Vec<PoolCount>,
}

/// An attachment that has addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentRecord {
    /// Network, container and interface
    pub attachment: Attachment,
    /// The addresses of the attachment, with routes and DNS settings
    pub given: AddressAssignment,
    /// The pod of the attachment, if the container runtime reported one
    pub pod: Option<PodRef>,
    /// Path of the attachment's network namespace; empty if unknown
    pub netns: String,
    /// When the addresses were assigned, in milliseconds of Unix time
    pub since_ms: i64,
    /// ID of the boot in which the attachment was set up
    pub boot: String,
    /// Place in the order of assignments: higher is newer. Adopted attachments come before all others. Their order
    /// among themselves is unknown, except that those known to be superseded come first
    pub order: u64,
}

/// Numbers of addresses by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressCounts {
    /// Number of addresses in use
    pub used: u64,
    /// Number of addresses that were released and are still cooling
    pub cooling: u64,
    /// Number of addresses that can be assigned now to an ADD that does not ask for certain addresses
    pub free: u64,
}

/// A block with its usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCount {
    /// The range of the block
    pub cidr: Cidr,
    /// UID of the block's IPAMBlock; for a podCIDR, UID of the Node
    pub uid: String,
    /// Name of the block's pool; empty for a podCIDR that lies in no pool
    pub pool: String,
    /// Whether addresses are assigned from the block, and if not, why
    pub state: BlockState,
    /// Numbers of the block's addresses by state
    pub counts: AddressCounts,
    /// How many of the block's addresses can be assigned automatically, whether or not they are in use
    pub room: u64,
}

/// A pool with its usage on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCount {
    /// The terms of the pool; the defaults if its terms are unknown
    pub terms: PoolTerms,
    /// Sums over the pool's blocks on this node, by family
    pub counts: Dual<AddressCounts>,
}

pub(crate) fn take(kv: &dyn Kv, now: &Now) -> Result<Snapshot, StorageFault> {
    let stamp = kv.stamp(now)?;
    let mut known = Vec::new();
    while let Some(pool) = kv.pool_at(u32::try_from(known.len()).unwrap_or(u32::MAX))? {
        known.push(pool);
    }
    let records = kv.blocks()?;
    let mut cooldowns: BTreeMap<Cidr, u64> = BTreeMap::new();
    for (cidr, block) in &records {
        cooldowns.insert(*cidr, cooldown_ms(&terms(kv, &block.pool)?));
    }
    // For each address: its block, and whether the address is in use; otherwise it is cooling.
    let mut taken: BTreeMap<Addr, (Cidr, bool)> = BTreeMap::new();
    for (addr, freed) in kv.releases()? {
        let cooldown = cooldowns.get(&freed.block).copied().unwrap_or(0);
        if freed.at.cooldown_left(stamp, cooldown).is_some() {
            taken.insert(addr, (freed.block, false));
        }
    }
    let tenants = kv.attachments(None)?;
    for given in tenants.iter().flat_map(|(_, it)| &it.given.addresses) {
        taken.insert(given.address, (given.block, true));
    }
    let mut blocks = Vec::new();
    for (cidr, record) in records {
        let block = count(kv, cidr, record, &taken)?;
        let AddressCounts { used, cooling, .. } = block.counts;
        if block.state != BlockState::Withdrawn || used + cooling > 0 {
            blocks.push(block);
        }
    }
    Ok(Snapshot {
        node_uid: kv.node()?,
        attachments: tenants
            .into_iter()
            .map(|(attachment, record)| AttachmentRecord {
                attachment,
                given: record.given,
                pod: record.pod,
                netns: record.netns,
                since_ms: record.since_ms,
                boot: record.boot,
                order: record.order,
            })
            .collect(),
        pools: pools(known, &blocks),
        blocks,
    })
}

fn count(
    kv: &dyn Kv,
    cidr: Cidr,
    record: BlockRecord,
    taken: &BTreeMap<Addr, (Cidr, bool)>,
) -> Result<BlockCount, StorageFault> {
    let pool = kv.pool(&record.pool)?;
    let never = usable(cidr, pool.as_ref()).excluded;
    let out = record.left_out(cidr, &never);
    let block = Block {
        cidr,
        uid: record.uid,
        pool: record.pool,
        draining: false,
        reserved: record.reserved,
        on_request: record.on_request,
    };
    let room = room(&block, pool.as_ref());
    let mut counts = AddressCounts::default();
    let mut less = 0;
    for (addr, (of, in_use)) in taken.range(cidr.first()..=cidr.last()) {
        if *of == cidr {
            *(if *in_use {
                &mut counts.used
            } else {
                &mut counts.cooling
            }) += 1;
        }
        less += u128::from(covering(&out, *addr).is_none());
    }
    if record.state == BlockState::Held {
        counts.free = u64::try_from(room - less).unwrap_or(u64::MAX);
    }
    Ok(BlockCount {
        cidr,
        uid: block.uid,
        pool: block.pool,
        state: record.state,
        counts,
        room: u64::try_from(room).unwrap_or(u64::MAX),
    })
}

fn pools(known: Vec<PoolTerms>, blocks: &[BlockCount]) -> Vec<PoolCount> {
    let mut pools: Vec<PoolCount> = known
        .into_iter()
        .map(|terms| PoolCount {
            terms,
            counts: Dual::default(),
        })
        .collect();
    for block in blocks {
        let at = pools.iter().position(|pool| pool.terms.name == block.pool);
        let at = at.unwrap_or_else(|| {
            pools.push(PoolCount {
                terms: PoolTerms::named(&block.pool),
                counts: Dual::default(),
            });
            pools.len() - 1
        });
        let sum = pools[at].counts.get_mut(block.cidr.family());
        sum.used += block.counts.used;
        sum.cooling += block.counts.cooling;
        sum.free = sum.free.saturating_add(block.counts.free);
    }
    pools
}
