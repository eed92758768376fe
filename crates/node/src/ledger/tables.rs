//! Typed access to the ledger's tables.
//!
//! Values are stored as JSON, because JSON is small, and because administrators who examine a store can read JSON.

use std::ops::Bound::{Excluded, Included};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::ops::{Attachment, Now, PodRef};
use super::super::pods::PodNote;
use super::super::storage_fault::StorageFault;
use super::kv::{Kv, KvEntry, KvMut, KvTable};
use super::probes::ProbeRecord;
use super::record::{
    ADOPTED, AddressRecord, AttachmentRecord, BlockRecord, BlockState, BootTime, Cursor, Deletion,
    ReleaseRecord, address_key, address_of, attachment_key, attachment_of, cidr_key, cidr_of,
    freed_key, full_name, pool_key, pool_prefix, released_key, text,
};
use super::withdrawals::WithdrawalState;
use cadastre_core::node_allocation::PoolTerms;
use cadastre_core::{Addr, Cidr, Family};

pub(super) const NODE: &[u8] = b"node";
const BOOT: &[u8] = b"boot";
const SEQUENCE: &[u8] = b"sequence";
const OUTSIDE: &[u8] = b"outside";
const RESTS: &[u8] = b"rests";

/// The latest boot that was recorded, with the number that the store has given to the boot.
#[derive(serde::Serialize, serde::Deserialize)]
struct Boot {
    id: String,
    number: u64,
}

/// Reads typed values from the tables.
pub(crate) trait Read: Kv {
    fn json<T: DeserializeOwned>(
        &self,
        table: KvTable,
        key: &[u8],
    ) -> Result<Option<T>, StorageFault> {
        self.get(table, key)?
            .map(|value| decode(table, &value))
            .transpose()
    }

    /// Among the keys that begin with `prefix`, returns the first entry after the key `after`. If `after` is `None`,
    /// returns the first of all these entries.
    fn next(
        &self,
        table: KvTable,
        prefix: &[u8],
        after: Option<&[u8]>,
    ) -> Result<Option<KvEntry>, StorageFault> {
        let from = after.map_or(Included(prefix), Excluded);
        let entry = self.seek(table, from)?;
        Ok(entry.filter(|(key, _)| key.starts_with(prefix)))
    }

    /// Decodes all entries whose keys begin with `prefix`.
    fn list<T>(
        &self,
        table: KvTable,
        prefix: &[u8],
        read: impl Fn(&[u8], &[u8]) -> Result<T, StorageFault>,
    ) -> Result<Vec<T>, StorageFault> {
        let mut all = Vec::new();
        self.scan(table, prefix, &mut |key, value| {
            all.push(read(key, value)?);
            Ok(())
        })?;
        Ok(all)
    }

    /// Returns the UID of the Node to which the ranges are allocated.
    fn node(&self) -> Result<Option<String>, StorageFault> {
        self.json(KvTable::Meta, NODE)
    }

    /// Returns whether, in the boot of `now`, pods use addresses outside of the ranges with which this ledger was
    /// created.
    fn has_addresses_outside(&self, now: &Now) -> Result<bool, StorageFault> {
        let boot: Option<String> = self.json(KvTable::Meta, OUTSIDE)?;
        Ok(boot.is_some_and(|boot| boot == now.boot))
    }

    /// Returns the number of the boot in which the ledger was made from the holdings of an earlier boot.
    fn rests(&self) -> Result<Option<u64>, StorageFault> {
        self.json(KvTable::Meta, RESTS)
    }

    /// Converts `now` to a [`BootTime`], which has the store's number of the boot instead of the kernel's boot ID.
    fn stamp(&self, now: &Now) -> Result<BootTime, StorageFault> {
        let boot = match self.json::<Boot>(KvTable::Meta, BOOT)? {
            Some(boot) if boot.id == now.boot => boot.number,
            Some(boot) => boot.number + 1,
            None => 0,
        };
        let ms = u64::try_from(now.since_boot.as_millis()).unwrap_or(u64::MAX);
        Ok(BootTime { boot, ms })
    }

    /// Returns whether the last recorded boot is not the running boot. False if no boot was recorded.
    fn is_of_earlier_boot(&self, now: &Now) -> Result<bool, StorageFault> {
        let boot: Option<Boot> = self.json(KvTable::Meta, BOOT)?;
        Ok(boot.is_some_and(|boot| boot.id != now.boot))
    }

    fn record(&self, attachment: &Attachment) -> Result<Option<AttachmentRecord>, StorageFault> {
        let record = self.json(KvTable::Attachments, &attachment_key(attachment))?;
        Ok(record.map(|record| AttachmentRecord {
            attachment: attachment.clone(),
            ..record
        }))
    }

    /// Returns the time at which the latest DEL of an attachment was requested, or `None` if no DEL is remembered.
    fn deletion(&self, attachment: &Attachment) -> Result<Option<Deletion>, StorageFault> {
        self.json(KvTable::Deletions, &attachment_key(attachment))
    }

    /// Returns the attachments of a network; if `network` is `None`, those of all networks.
    fn attachments(&self, network: Option<&str>) -> Result<Vec<AttachmentRecord>, StorageFault> {
        let table = KvTable::Attachments;
        self.list(table, &network.map_or(Vec::new(), text), |key, value| {
            Ok(AttachmentRecord {
                attachment: readable(table, attachment_of(key))?,
                ..decode(table, value)?
            })
        })
    }

    fn address(&self, addr: Addr) -> Result<Option<AddressRecord>, StorageFault> {
        self.json(KvTable::Addresses, &address_key(addr))
    }

    /// Returns the first address, from `addr` on, that has a record because it is or was in use.
    fn address_from(&self, addr: Addr) -> Result<Option<Addr>, StorageFault> {
        let key = address_key(addr);
        let entry = self.seek(KvTable::Addresses, Included(&key))?;
        let read = |(key, _): KvEntry| readable(KvTable::Addresses, address_of(&key));
        entry.map(read).transpose()
    }

    fn block(&self, cidr: Cidr) -> Result<Option<BlockRecord>, StorageFault> {
        self.json(KvTable::Blocks, &cidr_key(cidr))
    }

    /// Returns whether the store remembers that the block was released.
    fn was_released(&self, cidr: Cidr, uid: &str) -> Result<bool, StorageFault> {
        let key = released_key(cidr, uid);
        Ok(self.get(KvTable::ReleasedBlocks, &key)?.is_some())
    }

    /// Returns the keys of all blocks that the store remembers as released, each with its sequence number.
    fn released_blocks(&self) -> Result<Vec<(u64, Vec<u8>)>, StorageFault> {
        let table = KvTable::ReleasedBlocks;
        self.list(table, &[], |key, value| {
            Ok((decode(table, value)?, key.to_vec()))
        })
    }

    /// Returns the note that says which pools and addresses a pod may have.
    fn pod_note(&self, pod: &PodRef) -> Result<Option<PodNote>, StorageFault> {
        let note: Option<PodNote> = self.json(KvTable::Pods, full_name(pod).as_bytes())?;
        Ok(note.filter(|note| note.is_of(pod)))
    }

    fn pod_notes(&self) -> Result<Vec<PodNote>, StorageFault> {
        self.list(KvTable::Pods, &[], |_, value| decode(KvTable::Pods, value))
    }

    fn blocks(&self) -> Result<Vec<(Cidr, BlockRecord)>, StorageFault> {
        let table = KvTable::Blocks;
        self.list(table, &[], |key, value| {
            Ok((readable(table, cidr_of(key))?, decode(table, value)?))
        })
    }

    /// Returns all released addresses that have a record, with the records.
    fn releases(&self) -> Result<Vec<(Addr, ReleaseRecord)>, StorageFault> {
        let table = KvTable::Freed;
        let addresses = self.list(table, &[], |_, value| readable(table, address_of(value)))?;
        let record = |addr| Ok((addr, self.release_of(addr)?));
        addresses.into_iter().map(record).collect()
    }

    /// Returns the record of an address's release. Fails if the address has no such record.
    fn release_of(&self, addr: Addr) -> Result<ReleaseRecord, StorageFault> {
        match self.address(addr)? {
            Some(AddressRecord::Freed(freed)) => Ok(freed),
            _ => Err(StorageFault::Damaged(format!(
                "{addr} is free and in use at once"
            ))),
        }
    }

    /// Returns all ranges that are withdrawn or to be withdrawn, each with the state of its withdrawal.
    fn withdrawals(&self) -> Result<Vec<(Cidr, WithdrawalState)>, StorageFault> {
        self.list(KvTable::Withdrawals, &[], |key, value| {
            let cidr = readable(KvTable::Withdrawals, cidr_of(key))?;
            Ok((cidr, decode(KvTable::Withdrawals, value)?))
        })
    }

    /// Returns what the last probe of an address has shown.
    fn probe(&self, addr: Addr) -> Result<Option<ProbeRecord>, StorageFault> {
        self.json(KvTable::Probes, &address_key(addr))
    }

    /// Returns what the last probes of all addresses have shown, in the order of the addresses.
    fn probes(&self) -> Result<Vec<(Addr, ProbeRecord)>, StorageFault> {
        self.list(KvTable::Probes, &[], |key, value| {
            let addr = readable(KvTable::Probes, address_of(key))?;
            Ok((addr, decode(KvTable::Probes, value)?))
        })
    }

    /// Returns the CIDRs that overlap a range, from a table whose keys are CIDRs.
    fn cidrs_over(&self, table: KvTable, range: Cidr) -> Result<Vec<Cidr>, StorageFault> {
        let mut over = Vec::new();
        if self.seek(table, Included(&[]))?.is_none() {
            return Ok(over);
        }
        for len in 0..range.len() {
            if let Some(wider) = Cidr::new(range.first(), len)
                && self.get(table, &cidr_key(wider))?.is_some()
            {
                over.push(wider);
            }
        }
        // The keys of the CIDRs inside the range begin at this key.
        let mut from = Included(cidr_key(range));
        while let Some((key, _)) = self.seek(table, from.as_ref().map(<[u8; 18]>::as_slice))? {
            let cidr = readable(table, cidr_of(&key))?;
            if !range.contains(&cidr) {
                break;
            }
            over.push(cidr);
            from = Excluded(cidr_key(cidr));
        }
        Ok(over)
    }

    /// Returns the block that contains the address. If several blocks contain the address, returns the narrowest block
    /// that assigns addresses. If none of the blocks assigns addresses, returns the narrowest block.
    fn block_around(&self, addr: Addr) -> Result<Option<(Cidr, BlockRecord)>, StorageFault> {
        let mut found = None;
        for len in (0..=addr.family.bits()).rev() {
            let Some(cidr) = Cidr::new(addr, len) else {
                continue;
            };
            let Some(block) = self.block(cidr)? else {
                continue;
            };
            if block.state == BlockState::Active {
                return Ok(Some((cidr, block)));
            }
            found.get_or_insert((cidr, block));
        }
        Ok(found)
    }

    fn cursor(&self, block: Cidr) -> Result<Cursor, StorageFault> {
        let cursor = self.json(KvTable::Cursors, &cidr_key(block))?;
        Ok(cursor.unwrap_or(Cursor::first_of(block)))
    }

    /// Returns the oldest release of a block: the released address with the lowest sequence number. If `after` is
    /// given, only higher sequence numbers are considered.
    fn freed(&self, block: Cidr, after: Option<u64>) -> Result<Option<(u64, Addr)>, StorageFault> {
        let after = after.map(|sequence| freed_key(block, sequence));
        let after = after.as_ref().map(<[u8; 26]>::as_slice);
        let entry = self.next(KvTable::Freed, &cidr_key(block), after)?;
        let read = |(key, value): KvEntry| {
            let sequence = key.get(18..)?.try_into().ok()?;
            Some((u64::from_be_bytes(sequence), address_of(&value)?))
        };
        let read = |entry| readable(KvTable::Freed, read(entry));
        entry.map(read).transpose()
    }

    fn pool(&self, name: &str) -> Result<Option<PoolTerms>, StorageFault> {
        match self.get(KvTable::Ranks, name.as_bytes())? {
            Some(rank) => self.json(KvTable::Pools, &rank),
            None => Ok(None),
        }
    }

    /// Returns the pools whose settings are known, in order of preference.
    fn pools(&self) -> Result<Vec<PoolTerms>, StorageFault> {
        self.list(KvTable::Pools, &[], |_, value| {
            decode(KvTable::Pools, value)
        })
    }

    /// Returns the first block of a pool and family in `index` (`Assigning` or `Open`). If `after` is given, returns
    /// the block that follows `after`.
    fn block_of(
        &self,
        index: KvTable,
        pool: &str,
        family: Family,
        after: Option<Cidr>,
    ) -> Result<Option<Cidr>, StorageFault> {
        let after = after.map(|block| pool_key(pool, block));
        let entry = self.next(index, &pool_prefix(pool, Some(family)), after.as_deref())?;
        let block = |(key, _): KvEntry| cidr_of(key.get(4 + pool.len()..)?);
        let read = |entry| readable(index, block(entry));
        entry.map(read).transpose()
    }

    /// Returns the families in which the pool has blocks from which addresses are assigned.
    fn block_families(&self, pool: &str) -> Result<Vec<Family>, StorageFault> {
        let mut families = Vec::new();
        for family in Family::ALL {
            if self
                .block_of(KvTable::Assigning, pool, family, None)?
                .is_some()
            {
                families.push(family);
            }
        }
        Ok(families)
    }

    /// Returns the names of the pools that have blocks from which addresses are assigned, but whose settings are
    /// unknown.
    fn pools_without_terms(&self) -> Result<Vec<String>, StorageFault> {
        let mut pools = Vec::new();
        let mut entry = self.seek(KvTable::Assigning, Included(&[]))?;
        while let Some((key, _)) = entry {
            let end = key.len().saturating_sub(18);
            let name = key
                .get(4..end)
                .and_then(|name| std::str::from_utf8(name).ok());
            let name = readable(KvTable::Assigning, name)?;
            if self.get(KvTable::Ranks, name.as_bytes())?.is_none() {
                pools.push(name.to_owned());
            }
            // This key is higher than all keys of the pool. So the search continues with the next pool.
            let mut last = pool_prefix(name, None);
            last.push(u8::MAX);
            entry = self.seek(KvTable::Assigning, Included(&last))?;
        }
        Ok(pools)
    }
}

impl<K: Kv + ?Sized> Read for K {}

/// Writes typed values to the tables.
pub(crate) trait Write: KvMut {
    /// Writes the value only if it differs from the stored one, so that a transaction without changes need not be
    /// committed.
    fn put_json<T: Serialize>(
        &mut self,
        table: KvTable,
        key: &[u8],
        value: &T,
    ) -> Result<(), StorageFault> {
        let value = serde_json::to_vec(value).map_err(|error| {
            StorageFault::Damaged(format!("a value cannot be written: {error}"))
        })?;
        if self.get(table, key)?.as_ref() == Some(&value) {
            return Ok(());
        }
        self.put(table, key, &value)
    }

    /// Removes the key if it exists. Otherwise nothing is written, so that a transaction without other changes need not
    /// be committed.
    fn drop_key(&mut self, table: KvTable, key: &[u8]) -> Result<(), StorageFault> {
        if self.get(table, key)?.is_some() {
            self.remove(table, key)?;
        }
        Ok(())
    }

    fn put_node(&mut self, uid: &str) -> Result<(), StorageFault> {
        self.put_json(KvTable::Meta, NODE, &uid)
    }

    fn put_rests(&mut self, boot: u64) -> Result<(), StorageFault> {
        self.put_json(KvTable::Meta, RESTS, &boot)
    }

    /// Makes [`Read::has_addresses_outside`] return true until the next reboot, which ends all pods.
    fn put_addresses_outside(&mut self, now: &Now) -> Result<(), StorageFault> {
        self.put_json(KvTable::Meta, OUTSIDE, &now.boot)
    }

    /// Records the current boot, so that the boot keeps the number that `stamp` contains.
    fn put_boot(&mut self, now: &Now, stamp: BootTime) -> Result<(), StorageFault> {
        let boot = Boot {
            id: now.boot.clone(),
            number: stamp.boot,
        };
        self.put_json(KvTable::Meta, BOOT, &boot)
    }

    fn take_sequence(&mut self) -> Result<u64, StorageFault> {
        let next: u64 = self.json(KvTable::Meta, SEQUENCE)?.unwrap_or(0);
        self.put_json(KvTable::Meta, SEQUENCE, &(next + 1))?;
        Ok(next)
    }

    /// Returns the `order` of a new assignment, which is higher than that of all existing assignments.
    fn take_order(&mut self) -> Result<u64, StorageFault> {
        Ok(self.take_sequence()? + ADOPTED + 1)
    }

    fn put_record(&mut self, record: &AttachmentRecord) -> Result<(), StorageFault> {
        let key = attachment_key(&record.attachment);
        self.put_json(KvTable::Attachments, &key, record)
    }

    fn drop_record(&mut self, attachment: &Attachment) -> Result<(), StorageFault> {
        self.drop_key(KvTable::Attachments, &attachment_key(attachment))
    }

    fn put_address(&mut self, addr: Addr, address: &AddressRecord) -> Result<(), StorageFault> {
        self.put_json(KvTable::Addresses, &address_key(addr), address)
    }

    fn drop_address(&mut self, addr: Addr) -> Result<(), StorageFault> {
        self.drop_key(KvTable::Addresses, &address_key(addr))
    }

    fn put_block(&mut self, cidr: Cidr, block: &BlockRecord) -> Result<(), StorageFault> {
        self.put_json(KvTable::Blocks, &cidr_key(cidr), block)
    }

    fn put_cursor(&mut self, block: Cidr, cursor: Cursor) -> Result<(), StorageFault> {
        self.put_json(KvTable::Cursors, &cidr_key(block), &cursor)
    }

    /// Adds a block to an index of the block's pool if `is_in` is true. Otherwise removes the block from the index.
    fn index(
        &mut self,
        index: KvTable,
        pool: &str,
        block: Cidr,
        is_in: bool,
    ) -> Result<(), StorageFault> {
        let key = pool_key(pool, block);
        if !is_in {
            return self.drop_key(index, &key);
        }
        if self.get(index, &key)?.is_none() {
            self.put(index, &key, &[])?;
        }
        Ok(())
    }
}

impl<K: KvMut + ?Sized> Write for K {}

fn decode<T: DeserializeOwned>(table: KvTable, value: &[u8]) -> Result<T, StorageFault> {
    serde_json::from_slice(value).map_err(|error| {
        StorageFault::Damaged(format!("a value of {table:?} cannot be read: {error}"))
    })
}

/// Fails if a key or value could not be parsed.
fn readable<T>(table: KvTable, parsed: Option<T>) -> Result<T, StorageFault> {
    let text = || format!("an entry of {table:?} cannot be read");
    parsed.ok_or_else(|| StorageFault::Damaged(text()))
}
