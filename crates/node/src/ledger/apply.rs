//! Writes the decisions of the module `decide` to the tables.

use super::super::ops::{Now, PodRef};
use super::super::storage_fault::StorageFault;
use super::choose::{AddressSource, cooldown_ms, terms};
use super::decide::AddDecision;
use super::kv::{KvMut, KvTable};
use super::probes;
use super::record::{
    AddressRecord, AttachmentRecord, BlockState, BootTime, Cursor, ReleaseRecord, address_key,
    freed_key, full_name,
};
use super::tables::{Read, Write};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// In a block with more addresses than this, the record of a released address is deleted once the address has cooled.
/// Otherwise the table would grow with every pod that ever existed. Without the records it is not known which address
/// was released first. So the search in such a block moves upward (`Cursor`) and restarts at the lowest address.
const REMEMBERED: u128 = 4096;

/// Writes the record and the new addresses of an ADD. Removes the blocks in `spent`, which have no unused address left,
/// from the index of blocks to search.
pub(crate) fn assign(kv: &mut dyn KvMut, decision: &AddDecision) -> Result<(), StorageFault> {
    for (pool, block) in &decision.spent {
        kv.index(KvTable::Open, pool, *block, false)?;
    }
    for choice in &decision.choices {
        let (addr, block) = (choice.given.address, choice.given.block);
        match choice.source {
            AddressSource::New(cursor) => kv.put_cursor(block, cursor)?,
            AddressSource::Freed { block, sequence } => {
                kv.drop_key(KvTable::Freed, &freed_key(block, sequence))?;
            }
            AddressSource::Requested => {}
        }
        let by = decision.record.attachment.clone();
        kv.put_address(addr, &AddressRecord::Used { by, block })?;
        if !Mutation::ProbeOutlivesUse.is_on() {
            probes::end(kv, addr)?;
        }
    }
    kv.put_record(&decision.record)
}

/// Releases all addresses of an attachment, and deletes its record.
pub(crate) fn release(
    kv: &mut dyn KvMut,
    record: &AttachmentRecord,
    now: &Now,
    stamp: BootTime,
) -> Result<(), StorageFault> {
    kv.put_boot(now, stamp)?;
    let unknown = PodRef::default();
    let pod = record.pod.as_ref().unwrap_or(&unknown);
    for addr in record.given.addrs() {
        // An address is released only if its own record names this attachment.
        if let Some(AddressRecord::Used { by, block }) = kv.address(addr)?
            && by == record.attachment
        {
            free(kv, addr, block, pod, stamp)?;
        }
    }
    kv.drop_record(&record.attachment)
}

fn free(
    kv: &mut dyn KvMut,
    addr: Addr,
    cidr: Cidr,
    pod: &PodRef,
    stamp: BootTime,
) -> Result<(), StorageFault> {
    let Some(block) = kv.block(cidr)? else {
        return kv.drop_address(addr);
    };
    let sequence = kv.take_sequence()?;
    let freed = ReleaseRecord {
        block: cidr,
        sequence,
        at: stamp,
        pod: pod.uid.clone(),
        name: full_name(pod),
    };
    kv.put_address(addr, &AddressRecord::Freed(freed))?;
    let key = freed_key(cidr, sequence);
    kv.put(KvTable::Freed, &key, &address_key(addr))?;
    if block.state == BlockState::Active {
        kv.index(KvTable::Open, &block.pool, cidr, true)?;
    }
    if cidr.size() > REMEMBERED {
        let cooldown = cooldown_ms(&terms(kv, &block.pool)?);
        // Each release adds one record and deletes up to two records. So over time, only the records of cooling
        // addresses remain.
        forget(kv, cidr, stamp, cooldown, 2)?;
    }
    Ok(())
}

/// Deletes the records of at most `most` released addresses of a block, the oldest releases first. A record is deleted
/// only if the address has cooled.
pub(crate) fn forget(
    kv: &mut dyn KvMut,
    block: Cidr,
    now: BootTime,
    cooldown_ms: u64,
    most: usize,
) -> Result<(), StorageFault> {
    let mut any = false;
    for _ in 0..most {
        let Some((sequence, addr)) = kv.freed(block, None)? else {
            break;
        };
        let freed = kv.release_of(addr)?;
        if freed.at.cooldown_left(now, cooldown_ms).is_some() {
            break;
        }
        kv.drop_key(KvTable::Freed, &freed_key(block, sequence))?;
        kv.drop_address(addr)?;
        any = true;
    }
    if any {
        let next = kv.cursor(block)?.next;
        kv.put_cursor(block, Cursor { next, again: true })?;
    }
    Ok(())
}
