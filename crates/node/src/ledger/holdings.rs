//! The holdings of a node: the part of the ledger that has to survive a reboot.
//!
//! No container survives a reboot, so the assignments need not survive a reboot either. The state of the node's ranges
//! must survive. Otherwise the node could assign an address of a block that the node released before the reboot. The
//! notes on pods are kept as well, so that pods get addresses after a reboot while the API server is unavailable.

use serde::{Deserialize, Serialize};

use super::super::ops::Now;
use super::super::pods::PodNote;
use super::super::storage_fault::StorageFault;
use super::kv::{Kv, KvMut, KvTable};
use super::record::{
    BlockRecord, BlockState, BootTime, cidr_key, full_name, released_key, released_of,
};
use super::set_allocation::put_pools;
use super::tables::{NODE, Read, Write};
use super::withdrawals::WithdrawalState;
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::PoolTerms;

/// Version of the format of the file.
const FORMAT: u32 = 1;

/// A part of [`Holdings`]. The parts differ in how soon a change has to be on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldingsPart {
    /// Everything but the notes on pods. A change is on the disk before the store commits the change
    Ranges,
    /// The notes on pods. A change is written to the disk after the commit, within seconds if the disk works
    Notes,
}

/// Returns the part of the holdings that an entry of the tables belongs to; `None` if it belongs to no part.
pub(crate) fn part_of(table: KvTable, key: &[u8]) -> Option<HoldingsPart> {
    match table {
        KvTable::Pools
        | KvTable::Ranks
        | KvTable::Blocks
        | KvTable::ReleasedBlocks
        | KvTable::Withdrawals => Some(HoldingsPart::Ranges),
        KvTable::Meta if key == NODE => Some(HoldingsPart::Ranges),
        KvTable::Pods => Some(HoldingsPart::Notes),
        KvTable::Meta
        | KvTable::Assigning
        | KvTable::Open
        | KvTable::Cursors
        | KvTable::Addresses
        | KvTable::Freed
        | KvTable::Attachments
        | KvTable::Deletions
        | KvTable::Probes => None,
    }
}

/// The content of the holdings file: the ranges of a node and the notes on its pods, stored as JSON.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Holdings {
    format: u32,
    /// Name of the node whose agent wrote the file; empty in files of earlier releases and outside of files
    #[serde(default, skip_serializing_if = "String::is_empty")]
    node_name: String,
    #[serde(flatten)]
    ranges: Ranges,
    /// The notes on which pools and addresses the node's pods may have
    #[serde(default)]
    pods: Vec<PodNote>,
}

/// The part of [`Holdings`] of which each change is on the disk before the store commits the change.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
struct Ranges {
    /// ID of the boot in which the file was written
    boot: String,
    /// UID of the Node to which the ranges are allocated; `None` if no allocation was recorded yet
    node: Option<String>,
    /// The settings of the pools, in order of preference
    pools: Vec<PoolTerms>,
    blocks: Vec<(Cidr, BlockRecord)>,
    /// CIDR and UID of each block that was released lately, the oldest release first
    released: Vec<(Cidr, String)>,
    withdrawals: Vec<(Cidr, WithdrawalState)>,
}

impl Holdings {
    /// Parses the content of a file. The text of an error is a clause that says what is wrong with the file.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let holdings: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if holdings.format == FORMAT {
            return Ok(holdings);
        }
        Err(format!("its format is {}, not {FORMAT}", holdings.format))
    }

    /// Returns the content of the file of a node with this name.
    pub fn into_bytes(mut self, node_name: &str) -> Result<Vec<u8>, StorageFault> {
        node_name.clone_into(&mut self.node_name);
        let bytes = serde_json::to_vec_pretty(&self);
        bytes.map_err(|error| StorageFault::Damaged(format!("the holdings: {error}")))
    }

    /// Returns the name of the node whose agent wrote the file, if the file contains it.
    pub fn node_name(&self) -> Option<&str> {
        Some(self.node_name.as_str()).filter(|it| !it.is_empty())
    }

    /// Returns the ID of the boot in which the file was written.
    pub fn boot(&self) -> &str {
        &self.ranges.boot
    }

    /// Returns whether `self` and `other` have the same ranges and the same boot ID. The notes on pods may differ.
    pub fn has_ranges_of(&self, other: &Self) -> bool {
        self.ranges == other.ranges
    }
}

/// Reads the holdings from the tables.
pub(crate) fn read(kv: &dyn Kv, now: &Now) -> Result<Holdings, StorageFault> {
    let ranges = Ranges {
        boot: now.boot.clone(),
        node: kv.node()?,
        pools: kv.pools()?,
        blocks: kv.blocks()?,
        released: released(kv)?,
        withdrawals: kv.withdrawals()?,
    };
    Ok(Holdings {
        format: FORMAT,
        node_name: String::new(),
        ranges,
        pods: kv.pod_notes()?,
    })
}

fn released(kv: &dyn Kv) -> Result<Vec<(Cidr, String)>, StorageFault> {
    let mut all = kv.released_blocks()?;
    all.sort_unstable();
    let unreadable = || StorageFault::Damaged("the key of a released block".to_owned());
    let read = |(_, key): (u64, Vec<u8>)| released_of(&key).ok_or_else(unreadable);
    all.into_iter().map(read).collect()
}

/// Fills an empty ledger with holdings from before a reboot. Because the ledger does not contain which addresses were
/// in use until the reboot, each address counts as released at the time of the boot ([`rest_left`]).
pub(crate) fn restore(
    kv: &mut dyn KvMut,
    holdings: &Holdings,
    now: &Now,
) -> Result<(), StorageFault> {
    let Holdings { ranges, pods, .. } = holdings;
    let stamp = kv.stamp(now)?;
    kv.put_boot(now, stamp)?;
    kv.put_rests(stamp.boot)?;
    if let Some(uid) = &ranges.node {
        kv.put_node(uid)?;
    }
    put_pools(kv, &ranges.pools)?;
    for (cidr, block) in &ranges.blocks {
        kv.put_block(*cidr, block)?;
        let assigns = block.state == BlockState::Active;
        kv.index(KvTable::Assigning, &block.pool, *cidr, assigns)?;
        kv.index(KvTable::Open, &block.pool, *cidr, assigns)?;
    }
    restore_released(kv, holdings)?;
    for (range, state) in &ranges.withdrawals {
        kv.put_json(KvTable::Withdrawals, &cidr_key(*range), state)?;
    }
    for note in pods {
        let key = full_name(&note.pod);
        kv.put_json(KvTable::Pods, key.as_bytes(), note)?;
    }
    Ok(())
}

/// Records in an empty ledger which blocks were released according to `holdings`.
pub(crate) fn restore_released(
    kv: &mut dyn KvMut,
    holdings: &Holdings,
) -> Result<(), StorageFault> {
    for (cidr, uid) in &holdings.ranges.released {
        let sequence = kv.take_sequence()?;
        let key = released_key(*cidr, uid);
        kv.put_json(KvTable::ReleasedBlocks, &key, &sequence)?;
    }
    Ok(())
}

/// After a restore in this boot, returns the milliseconds of cooldown left for addresses without a record, which may
/// have been in use until the reboot. Returns `None` if the cooldown is over, or if nothing was restored in this boot.
pub(crate) fn rest_left(
    kv: &dyn Kv,
    now: BootTime,
    cooldown_ms: u64,
) -> Result<Option<u64>, StorageFault> {
    let left = cooldown_ms.checked_sub(now.ms).filter(|left| *left > 0);
    if left.is_none() || kv.rests()? != Some(now.boot) || Mutation::RebootEndsCooldown.is_on() {
        return Ok(None);
    }
    Ok(left)
}
