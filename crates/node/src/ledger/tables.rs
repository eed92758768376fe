//! Typed access to the tables.
//!
//! Values are JSON: small, and readable if something goes wrong.

use std::ops::Bound::{Excluded, Included};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::fault::Fault;
use super::super::ops::{Attachment, Now, PodRef};
use super::super::pods::PodNote;
use super::kv::{Entry, Kv, KvMut, Table};
use super::record::{
    ADOPTED, Address, BlockRecord, BlockState, Cursor, Deletion, Freed, Record, Stamp, address_key,
    address_of, attachment_key, attachment_of, cidr_key, cidr_of, freed_key, full_name,
    given_back_key, network_prefix, pool_key, pool_prefix,
};
use cadastre_core::node_allocation::PoolTerms;
use cadastre_core::{Addr, Cidr, Family};

const NODE: &[u8] = b"node";
const BOOT: &[u8] = b"boot";
const SEQUENCE: &[u8] = b"sequence";

/// The boot that was recorded last.
#[derive(serde::Serialize, serde::Deserialize)]
struct Boot {
    id: String,
    number: u64,
}

/// Typed reading.
pub(crate) trait Read: Kv {
    fn json<T: DeserializeOwned>(&self, table: Table, key: &[u8]) -> Result<Option<T>, Fault> {
        self.get(table, key)?
            .map(|value| decode(table, &value))
            .transpose()
    }

    /// The entry after the key `after`, or the first one, among the keys that begin with `prefix`.
    fn next(
        &self,
        table: Table,
        prefix: &[u8],
        after: Option<&[u8]>,
    ) -> Result<Option<Entry>, Fault> {
        let from = after.map_or(Included(prefix), Excluded);
        let entry = self.seek(table, from)?;
        Ok(entry.filter(|(key, _)| key.starts_with(prefix)))
    }

    /// UID of the Node that the ranges are allocated to.
    fn node(&self) -> Result<Option<String>, Fault> {
        self.json(Table::Meta, NODE)
    }

    /// Converts `now` to the store's numbering of boots.
    fn stamp(&self, now: &Now) -> Result<Stamp, Fault> {
        let boot = match self.json::<Boot>(Table::Meta, BOOT)? {
            Some(boot) if boot.id == now.boot => boot.number,
            Some(boot) => boot.number + 1,
            None => 0,
        };
        let ms = u64::try_from(now.since_boot.as_millis()).unwrap_or(u64::MAX);
        Ok(Stamp { boot, ms })
    }

    fn record(&self, attachment: &Attachment) -> Result<Option<Record>, Fault> {
        self.json(Table::Attachments, &attachment_key(attachment))
    }

    /// When the latest DEL of an attachment was asked for, if it is remembered.
    fn deletion(&self, attachment: &Attachment) -> Result<Option<Deletion>, Fault> {
        self.json(Table::Deletions, &attachment_key(attachment))
    }

    /// The attachments of a network, or of all networks.
    fn attachments(&self, network: Option<&str>) -> Result<Vec<(Attachment, Record)>, Fault> {
        let prefix = network.map_or(Vec::new(), network_prefix);
        let mut all = Vec::new();
        self.scan(Table::Attachments, &prefix, &mut |key, value| {
            let attachment = attachment_of(key).ok_or_else(|| bad_key(Table::Attachments))?;
            all.push((attachment, decode(Table::Attachments, value)?));
            Ok(())
        })?;
        Ok(all)
    }

    fn address(&self, addr: Addr) -> Result<Option<Address>, Fault> {
        self.json(Table::Addresses, &address_key(addr))
    }

    /// The first address from `addr` on that is or was in use.
    fn address_from(&self, addr: Addr) -> Result<Option<Addr>, Fault> {
        let key = address_key(addr);
        let entry = self.seek(Table::Addresses, Included(&key))?;
        entry
            .map(|(key, _)| address_of(&key).ok_or_else(|| bad_key(Table::Addresses)))
            .transpose()
    }

    fn block(&self, cidr: Cidr) -> Result<Option<BlockRecord>, Fault> {
        self.json(Table::Blocks, &cidr_key(cidr))
    }

    /// Whether the block is remembered as released.
    fn was_given_back(&self, cidr: Cidr, uid: &str) -> Result<bool, Fault> {
        let key = given_back_key(cidr, uid);
        Ok(self.get(Table::GivenBack, &key)?.is_some())
    }

    /// The keys of all blocks remembered as released, each with its sequence number.
    fn given_back(&self) -> Result<Vec<(u64, Vec<u8>)>, Fault> {
        let mut all = Vec::new();
        self.scan(Table::GivenBack, &[], &mut |key, value| {
            all.push((decode(Table::GivenBack, value)?, key.to_vec()));
            Ok(())
        })?;
        Ok(all)
    }

    /// The note of what a pod may have.
    fn pod_note(&self, pod: &PodRef) -> Result<Option<PodNote>, Fault> {
        let note: Option<PodNote> = self.json(Table::Pods, full_name(pod).as_bytes())?;
        Ok(note.filter(|note| note.is_of(pod)))
    }

    /// The notes of all pods.
    fn pod_notes(&self) -> Result<Vec<PodNote>, Fault> {
        let mut all = Vec::new();
        self.scan(Table::Pods, &[], &mut |_, value| {
            all.push(decode(Table::Pods, value)?);
            Ok(())
        })?;
        Ok(all)
    }

    fn blocks(&self) -> Result<Vec<(Cidr, BlockRecord)>, Fault> {
        let mut all = Vec::new();
        self.scan(Table::Blocks, &[], &mut |key, value| {
            let cidr = cidr_of(key).ok_or_else(|| bad_key(Table::Blocks))?;
            all.push((cidr, decode(Table::Blocks, value)?));
            Ok(())
        })?;
        Ok(all)
    }

    /// All releases that are remembered.
    fn releases(&self) -> Result<Vec<(Addr, Freed)>, Fault> {
        let mut addresses = Vec::new();
        self.scan(Table::Freed, &[], &mut |_, value| {
            addresses.push(address_of(value).ok_or_else(|| bad_key(Table::Freed))?);
            Ok(())
        })?;
        let mut all = Vec::with_capacity(addresses.len());
        for addr in addresses {
            all.push((addr, self.release_of(addr)?));
        }
        Ok(all)
    }

    /// The release of an address that is known to be released.
    fn release_of(&self, addr: Addr) -> Result<Freed, Fault> {
        match self.address(addr)? {
            Some(Address::Freed(freed)) => Ok(freed),
            _ => Err(Fault::Damaged(format!("{addr} is free and in use at once"))),
        }
    }

    /// The blocks that overlap a range.
    fn blocks_over(&self, range: Cidr) -> Result<Vec<Cidr>, Fault> {
        let mut over = Vec::new();
        for len in 0..range.len() {
            if let Some(wider) = Cidr::new(range.first(), len)
                && self.get(Table::Blocks, &cidr_key(wider))?.is_some()
            {
                over.push(wider);
            }
        }
        // Blocks inside the range have keys from here on.
        let mut from = Included(cidr_key(range));
        while let Some((key, _)) =
            self.seek(Table::Blocks, from.as_ref().map(<[u8; 18]>::as_slice))?
        {
            let cidr = cidr_of(&key).ok_or_else(|| bad_key(Table::Blocks))?;
            if !range.contains(&cidr) {
                break;
            }
            over.push(cidr);
            from = Excluded(cidr_key(cidr));
        }
        Ok(over)
    }

    /// The block that contains the address; of several, the narrowest that addresses are assigned from, if any.
    fn block_around(&self, addr: Addr) -> Result<Option<(Cidr, BlockRecord)>, Fault> {
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

    fn cursor(&self, block: Cidr) -> Result<Cursor, Fault> {
        let cursor = self.json(Table::Cursors, &cidr_key(block))?;
        Ok(cursor.unwrap_or(Cursor {
            next: Some(block.first()),
            again: false,
        }))
    }

    /// The first released address of a block after the sequence number `after`, oldest release first.
    fn freed(&self, block: Cidr, after: Option<u64>) -> Result<Option<(u64, Addr)>, Fault> {
        let after = after.map(|sequence| freed_key(block, sequence));
        let after = after.as_ref().map(<[u8; 26]>::as_slice);
        let entry = self.next(Table::Freed, &cidr_key(block), after)?;
        let read = |(key, value): Entry| {
            let sequence = key.get(18..)?.try_into().ok()?;
            Some((u64::from_be_bytes(sequence), address_of(&value)?))
        };
        entry
            .map(|entry| read(entry).ok_or_else(|| bad_key(Table::Freed)))
            .transpose()
    }

    fn pool(&self, name: &str) -> Result<Option<PoolTerms>, Fault> {
        match self.get(Table::Ranks, name.as_bytes())? {
            Some(rank) => self.json(Table::Pools, &rank),
            None => Ok(None),
        }
    }

    /// The pool of this rank; ranks start at 0, the best.
    fn pool_at(&self, rank: u32) -> Result<Option<PoolTerms>, Fault> {
        self.json(Table::Pools, &rank.to_be_bytes())
    }

    /// The first block of a pool and family in an index, after the block `after`.
    fn block_of(
        &self,
        index: Table,
        pool: &str,
        family: Family,
        after: Option<Cidr>,
    ) -> Result<Option<Cidr>, Fault> {
        let after = after.map(|block| pool_key(pool, block));
        let entry = self.next(index, &pool_prefix(pool, Some(family)), after.as_deref())?;
        let read = |key: &[u8]| cidr_of(key.get(4 + pool.len()..)?);
        entry
            .map(|(key, _)| read(&key).ok_or_else(|| bad_key(index)))
            .transpose()
    }

    /// The pools that have blocks to assign from, but no known terms.
    fn pools_without_terms(&self) -> Result<Vec<String>, Fault> {
        let mut pools = Vec::new();
        let mut entry = self.seek(Table::Giving, Included(&[]))?;
        while let Some((key, _)) = entry {
            let end = key.len().saturating_sub(18);
            let name = key
                .get(4..end)
                .and_then(|name| std::str::from_utf8(name).ok());
            let name = name.ok_or_else(|| bad_key(Table::Giving))?;
            if self.get(Table::Ranks, name.as_bytes())?.is_none() {
                pools.push(name.to_owned());
            }
            // Higher than every family: skips the rest of the pool.
            let mut last = pool_prefix(name, None);
            last.push(u8::MAX);
            entry = self.seek(Table::Giving, Included(&last))?;
        }
        Ok(pools)
    }
}

impl<K: Kv + ?Sized> Read for K {}

/// Typed writing.
pub(crate) trait Write: KvMut {
    /// Writes the value only if it has changed.
    fn put_json<T: Serialize>(&mut self, table: Table, key: &[u8], value: &T) -> Result<(), Fault> {
        let value = serde_json::to_vec(value)
            .map_err(|error| Fault::Damaged(format!("a value cannot be written: {error}")))?;
        if self.get(table, key)?.as_ref() == Some(&value) {
            return Ok(());
        }
        self.put(table, key, &value)
    }

    /// Removes the key if it exists.
    fn drop_key(&mut self, table: Table, key: &[u8]) -> Result<(), Fault> {
        if self.get(table, key)?.is_some() {
            self.remove(table, key)?;
        }
        Ok(())
    }

    fn put_node(&mut self, uid: &str) -> Result<(), Fault> {
        self.put_json(Table::Meta, NODE, &uid)
    }

    /// Records the current boot, which makes its number valid.
    fn put_boot(&mut self, now: &Now, stamp: Stamp) -> Result<(), Fault> {
        let boot = Boot {
            id: now.boot.clone(),
            number: stamp.boot,
        };
        self.put_json(Table::Meta, BOOT, &boot)
    }

    fn take_sequence(&mut self) -> Result<u64, Fault> {
        let next: u64 = self.json(Table::Meta, SEQUENCE)?.unwrap_or(0);
        self.put_json(Table::Meta, SEQUENCE, &(next + 1))?;
        Ok(next)
    }

    /// The order of a new assignment: after all existing ones.
    fn take_order(&mut self) -> Result<u64, Fault> {
        Ok(self.take_sequence()? + ADOPTED + 1)
    }

    fn put_record(&mut self, attachment: &Attachment, record: &Record) -> Result<(), Fault> {
        self.put_json(Table::Attachments, &attachment_key(attachment), record)
    }

    fn drop_record(&mut self, attachment: &Attachment) -> Result<(), Fault> {
        self.drop_key(Table::Attachments, &attachment_key(attachment))
    }

    fn put_address(&mut self, addr: Addr, address: &Address) -> Result<(), Fault> {
        self.put_json(Table::Addresses, &address_key(addr), address)
    }

    fn drop_address(&mut self, addr: Addr) -> Result<(), Fault> {
        self.drop_key(Table::Addresses, &address_key(addr))
    }

    fn put_block(&mut self, cidr: Cidr, block: &BlockRecord) -> Result<(), Fault> {
        self.put_json(Table::Blocks, &cidr_key(cidr), block)
    }

    fn put_cursor(&mut self, block: Cidr, cursor: Cursor) -> Result<(), Fault> {
        self.put_json(Table::Cursors, &cidr_key(block), &cursor)
    }

    /// Adds a block to an index of its pool, or removes it.
    fn index(&mut self, index: Table, pool: &str, block: Cidr, is_in: bool) -> Result<(), Fault> {
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

fn decode<T: DeserializeOwned>(table: Table, value: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(value)
        .map_err(|error| Fault::Damaged(format!("a value of {table:?} cannot be read: {error}")))
}

fn bad_key(table: Table) -> Fault {
    Fault::Damaged(format!("a key of {table:?} cannot be read"))
}
