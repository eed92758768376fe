//! Typed access to the ledger's tables.
//!
//! Values are stored as JSON, which is small and can be read when a store has to be examined.

use std::ops::Bound::{Excluded, Included};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::ops::{Attachment, Now, PodRef};
use super::super::pods::PodNote;
use super::super::storage_fault::StorageFault;
use super::kv::{Kv, KvEntry, KvMut, KvTable};
use super::record::{
    ADOPTED, AddressRecord, BlockRecord, BlockState, BootTime, Cursor, Deletion, ReleaseRecord,
    StoredAttachment, address_key, address_of, attachment_key, attachment_of, cidr_key, cidr_of,
    freed_key, full_name, network_prefix, pool_key, pool_prefix, released_key,
};
use cadastre_core::node_allocation::PoolTerms;
use cadastre_core::{Addr, Cidr, Family};

const NODE: &[u8] = b"node";
const BOOT: &[u8] = b"boot";
const SEQUENCE: &[u8] = b"sequence";

/// The latest boot that was recorded.
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

    /// Returns the first entry after the key `after` among the keys that begin with `prefix`. Without `after`,
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

    /// Returns the UID of the Node to which the ranges are allocated.
    fn node(&self) -> Result<Option<String>, StorageFault> {
        self.json(KvTable::Meta, NODE)
    }

    /// Converts `now` to a time that contains the store's number of the boot instead of the boot's ID.
    fn stamp(&self, now: &Now) -> Result<BootTime, StorageFault> {
        let boot = match self.json::<Boot>(KvTable::Meta, BOOT)? {
            Some(boot) if boot.id == now.boot => boot.number,
            Some(boot) => boot.number + 1,
            None => 0,
        };
        let ms = u64::try_from(now.since_boot.as_millis()).unwrap_or(u64::MAX);
        Ok(BootTime { boot, ms })
    }

    fn record(&self, attachment: &Attachment) -> Result<Option<StoredAttachment>, StorageFault> {
        self.json(KvTable::Attachments, &attachment_key(attachment))
    }

    /// Returns when the latest DEL of an attachment was requested, if the DEL is remembered.
    fn deletion(&self, attachment: &Attachment) -> Result<Option<Deletion>, StorageFault> {
        self.json(KvTable::Deletions, &attachment_key(attachment))
    }

    /// Returns the attachments of a network; for `None`, of all networks.
    fn attachments(
        &self,
        network: Option<&str>,
    ) -> Result<Vec<(Attachment, StoredAttachment)>, StorageFault> {
        let prefix = network.map_or(Vec::new(), network_prefix);
        let mut all = Vec::new();
        self.scan(KvTable::Attachments, &prefix, &mut |key, value| {
            let attachment = attachment_of(key).ok_or_else(|| bad_key(KvTable::Attachments))?;
            all.push((attachment, decode(KvTable::Attachments, value)?));
            Ok(())
        })?;
        Ok(all)
    }

    fn address(&self, addr: Addr) -> Result<Option<AddressRecord>, StorageFault> {
        self.json(KvTable::Addresses, &address_key(addr))
    }

    /// Returns the first address from `addr` on that has a record, that is, an address that is or was in use.
    fn address_from(&self, addr: Addr) -> Result<Option<Addr>, StorageFault> {
        let key = address_key(addr);
        let entry = self.seek(KvTable::Addresses, Included(&key))?;
        entry
            .map(|(key, _)| address_of(&key).ok_or_else(|| bad_key(KvTable::Addresses)))
            .transpose()
    }

    fn block(&self, cidr: Cidr) -> Result<Option<BlockRecord>, StorageFault> {
        self.json(KvTable::Blocks, &cidr_key(cidr))
    }

    /// Returns whether the block is remembered as released.
    fn was_released(&self, cidr: Cidr, uid: &str) -> Result<bool, StorageFault> {
        let key = released_key(cidr, uid);
        Ok(self.get(KvTable::GivenBack, &key)?.is_some())
    }

    /// Returns the keys of all blocks that are remembered as released, each with its sequence number.
    fn released_blocks(&self) -> Result<Vec<(u64, Vec<u8>)>, StorageFault> {
        let mut all = Vec::new();
        self.scan(KvTable::GivenBack, &[], &mut |key, value| {
            all.push((decode(KvTable::GivenBack, value)?, key.to_vec()));
            Ok(())
        })?;
        Ok(all)
    }

    /// Returns the note on what a pod may have.
    fn pod_note(&self, pod: &PodRef) -> Result<Option<PodNote>, StorageFault> {
        let note: Option<PodNote> = self.json(KvTable::Pods, full_name(pod).as_bytes())?;
        Ok(note.filter(|note| note.is_of(pod)))
    }

    /// Returns the notes on all pods.
    fn pod_notes(&self) -> Result<Vec<PodNote>, StorageFault> {
        let mut all = Vec::new();
        self.scan(KvTable::Pods, &[], &mut |_, value| {
            all.push(decode(KvTable::Pods, value)?);
            Ok(())
        })?;
        Ok(all)
    }

    fn blocks(&self) -> Result<Vec<(Cidr, BlockRecord)>, StorageFault> {
        let mut all = Vec::new();
        self.scan(KvTable::Blocks, &[], &mut |key, value| {
            let cidr = cidr_of(key).ok_or_else(|| bad_key(KvTable::Blocks))?;
            all.push((cidr, decode(KvTable::Blocks, value)?));
            Ok(())
        })?;
        Ok(all)
    }

    /// Returns all addresses that have the record of a release, with the records.
    fn releases(&self) -> Result<Vec<(Addr, ReleaseRecord)>, StorageFault> {
        let mut addresses = Vec::new();
        self.scan(KvTable::Freed, &[], &mut |_, value| {
            addresses.push(address_of(value).ok_or_else(|| bad_key(KvTable::Freed))?);
            Ok(())
        })?;
        let mut all = Vec::with_capacity(addresses.len());
        for addr in addresses {
            all.push((addr, self.release_of(addr)?));
        }
        Ok(all)
    }

    /// Returns the record of the release of an address that is known to be released.
    fn release_of(&self, addr: Addr) -> Result<ReleaseRecord, StorageFault> {
        match self.address(addr)? {
            Some(AddressRecord::Freed(freed)) => Ok(freed),
            _ => Err(StorageFault::Damaged(format!(
                "{addr} is free and in use at once"
            ))),
        }
    }

    /// Returns the CIDRs of the blocks that overlap a range.
    fn blocks_over(&self, range: Cidr) -> Result<Vec<Cidr>, StorageFault> {
        let mut over = Vec::new();
        for len in 0..range.len() {
            if let Some(wider) = Cidr::new(range.first(), len)
                && self.get(KvTable::Blocks, &cidr_key(wider))?.is_some()
            {
                over.push(wider);
            }
        }
        // The keys of blocks inside the range begin here.
        let mut from = Included(cidr_key(range));
        while let Some((key, _)) =
            self.seek(KvTable::Blocks, from.as_ref().map(<[u8; 18]>::as_slice))?
        {
            let cidr = cidr_of(&key).ok_or_else(|| bad_key(KvTable::Blocks))?;
            if !range.contains(&cidr) {
                break;
            }
            over.push(cidr);
            from = Excluded(cidr_key(cidr));
        }
        Ok(over)
    }

    /// Returns the block that contains the address. If several blocks do, returns the narrowest one from which
    /// addresses are assigned; if there is none, the narrowest one.
    fn block_around(&self, addr: Addr) -> Result<Option<(Cidr, BlockRecord)>, StorageFault> {
        let mut found = None;
        for len in (0..=addr.family.bits()).rev() {
            let Some(cidr) = Cidr::new(addr, len) else {
                continue;
            };
            let Some(block) = self.block(cidr)? else {
                continue;
            };
            if block.state == BlockState::Held {
                return Ok(Some((cidr, block)));
            }
            found.get_or_insert((cidr, block));
        }
        Ok(found)
    }

    fn cursor(&self, block: Cidr) -> Result<Cursor, StorageFault> {
        let cursor = self.json(KvTable::Cursors, &cidr_key(block))?;
        Ok(cursor.unwrap_or(Cursor {
            next: Some(block.first()),
            again: false,
        }))
    }

    /// Returns the released address of a block that has the lowest sequence number after `after`, that is, the oldest
    /// release. Without `after`, all releases are considered.
    fn freed(&self, block: Cidr, after: Option<u64>) -> Result<Option<(u64, Addr)>, StorageFault> {
        let after = after.map(|sequence| freed_key(block, sequence));
        let after = after.as_ref().map(<[u8; 26]>::as_slice);
        let entry = self.next(KvTable::Freed, &cidr_key(block), after)?;
        let read = |(key, value): KvEntry| {
            let sequence = key.get(18..)?.try_into().ok()?;
            Some((u64::from_be_bytes(sequence), address_of(&value)?))
        };
        entry
            .map(|entry| read(entry).ok_or_else(|| bad_key(KvTable::Freed)))
            .transpose()
    }

    fn pool(&self, name: &str) -> Result<Option<PoolTerms>, StorageFault> {
        match self.get(KvTable::Ranks, name.as_bytes())? {
            Some(rank) => self.json(KvTable::Pools, &rank),
            None => Ok(None),
        }
    }

    /// Returns the pool of this rank. The best pool has rank 0.
    fn pool_at(&self, rank: u32) -> Result<Option<PoolTerms>, StorageFault> {
        self.json(KvTable::Pools, &rank.to_be_bytes())
    }

    /// Returns the first block of a pool and family in an index, or the first one after the block `after`.
    fn block_of(
        &self,
        index: KvTable,
        pool: &str,
        family: Family,
        after: Option<Cidr>,
    ) -> Result<Option<Cidr>, StorageFault> {
        let after = after.map(|block| pool_key(pool, block));
        let entry = self.next(index, &pool_prefix(pool, Some(family)), after.as_deref())?;
        let read = |key: &[u8]| cidr_of(key.get(4 + pool.len()..)?);
        entry
            .map(|(key, _)| read(&key).ok_or_else(|| bad_key(index)))
            .transpose()
    }

    /// Returns the names of the pools that have blocks from which addresses are assigned, but whose terms are
    /// unknown.
    fn pools_without_terms(&self) -> Result<Vec<String>, StorageFault> {
        let mut pools = Vec::new();
        let mut entry = self.seek(KvTable::Giving, Included(&[]))?;
        while let Some((key, _)) = entry {
            let end = key.len().saturating_sub(18);
            let name = key
                .get(4..end)
                .and_then(|name| std::str::from_utf8(name).ok());
            let name = name.ok_or_else(|| bad_key(KvTable::Giving))?;
            if self.get(KvTable::Ranks, name.as_bytes())?.is_none() {
                pools.push(name.to_owned());
            }
            // This key is higher than all keys of the pool, so the search continues with the next pool.
            let mut last = pool_prefix(name, None);
            last.push(u8::MAX);
            entry = self.seek(KvTable::Giving, Included(&last))?;
        }
        Ok(pools)
    }
}

impl<K: Kv + ?Sized> Read for K {}

/// Writes typed values to the tables.
pub(crate) trait Write: KvMut {
    /// Writes the value only if it has changed.
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

    /// Removes the key if it exists.
    fn drop_key(&mut self, table: KvTable, key: &[u8]) -> Result<(), StorageFault> {
        if self.get(table, key)?.is_some() {
            self.remove(table, key)?;
        }
        Ok(())
    }

    fn put_node(&mut self, uid: &str) -> Result<(), StorageFault> {
        self.put_json(KvTable::Meta, NODE, &uid)
    }

    /// Records the current boot, so that the boot number in `stamp` stays assigned to it.
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

    fn put_record(
        &mut self,
        attachment: &Attachment,
        record: &StoredAttachment,
    ) -> Result<(), StorageFault> {
        self.put_json(KvTable::Attachments, &attachment_key(attachment), record)
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

    /// Adds a block to an index of its pool if `is_in` is true, and otherwise removes it.
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

fn bad_key(table: KvTable) -> StorageFault {
    StorageFault::Damaged(format!("a key of {table:?} cannot be read"))
}
