//! Implements the ledger's tables by tables of a redb transaction.

use std::ops::Bound;

use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::super::ledger::kv::{Kv, KvEntry, KvMut, KvTable, Show, TABLE_NAMES};
use super::super::ledger::{HoldingsPart, part_of};
use super::super::storage_fault::StorageFault;

/// All tables of the ledger in one transaction, open for writing.
pub(super) struct Tables<'t> {
    all: Vec<redb::Table<'t, &'static [u8], &'static [u8]>>,
    /// Whether a key was written or removed
    pub is_changed: bool,
    /// Whether an entry of the node's ranges was written or removed
    pub has_new_ranges: bool,
    /// Whether a note on a pod was written or removed
    pub has_new_notes: bool,
}

impl<'t> Tables<'t> {
    /// Opens all tables. Creates tables that do not exist.
    pub(super) fn open(transaction: &'t WriteTransaction) -> Result<Self, StorageFault> {
        let open = |name| transaction.open_table(TableDefinition::new(name));
        let tables: Result<_, _> = TABLE_NAMES.into_iter().map(open).collect();
        Ok(Self {
            all: tables?,
            is_changed: false,
            has_new_ranges: false,
            has_new_notes: false,
        })
    }

    fn changed(&mut self, table: KvTable, key: &[u8]) {
        self.is_changed = true;
        let part = part_of(table, key);
        self.has_new_ranges |= part == Some(HoldingsPart::Ranges);
        self.has_new_notes |= part == Some(HoldingsPart::Notes);
    }
}

impl Kv for Tables<'_> {
    fn get(&self, table: KvTable, key: &[u8]) -> Result<Option<Vec<u8>>, StorageFault> {
        let value = self.all[table as usize].get(key)?;
        Ok(value.map(|value| value.value().to_vec()))
    }

    fn seek(&self, table: KvTable, from: Bound<&[u8]>) -> Result<Option<KvEntry>, StorageFault> {
        let mut entries = self.all[table as usize].range::<&[u8]>((from, Bound::Unbounded))?;
        let Some(entry) = entries.next() else {
            return Ok(None);
        };
        let (key, value) = entry?;
        Ok(Some((key.value().to_vec(), value.value().to_vec())))
    }

    fn scan(&self, table: KvTable, prefix: &[u8], show: Show<'_>) -> Result<(), StorageFault> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        for entry in self.all[table as usize].range::<&[u8]>(from)? {
            let (key, value) = entry?;
            if !key.value().starts_with(prefix) {
                break;
            }
            show(key.value(), value.value())?;
        }
        Ok(())
    }
}

impl KvMut for Tables<'_> {
    fn put(&mut self, table: KvTable, key: &[u8], value: &[u8]) -> Result<(), StorageFault> {
        self.changed(table, key);
        self.all[table as usize].insert(key, value)?;
        Ok(())
    }

    fn remove(&mut self, table: KvTable, key: &[u8]) -> Result<(), StorageFault> {
        self.changed(table, key);
        self.all[table as usize].remove(key)?;
        Ok(())
    }
}
