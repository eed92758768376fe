//! The tables of the ledger in a redb transaction.

use std::ops::Bound;

use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::super::fault::Fault;
use super::super::ledger::kv::{Entry, Kv, KvMut, Show, Table};

type Definition = TableDefinition<'static, &'static [u8], &'static [u8]>;

fn definition(table: Table) -> Definition {
    TableDefinition::new(match table {
        Table::Meta => "meta",
        Table::Pools => "pools",
        Table::Ranks => "ranks",
        Table::Blocks => "blocks",
        Table::Giving => "giving",
        Table::Open => "open",
        Table::Cursors => "cursors",
        Table::Addresses => "addresses",
        Table::Freed => "freed",
        Table::Attachments => "attachments",
        Table::Deletions => "deletions",
        Table::GivenBack => "given_back",
        Table::Pods => "pods",
    })
}

/// The tables of a transaction, open for writing.
pub(super) struct Tables<'t> {
    tables: Vec<redb::Table<'t, &'static [u8], &'static [u8]>>,
    /// Whether something was written
    pub is_changed: bool,
}

impl<'t> Tables<'t> {
    /// Opens all tables; creates those that do not exist.
    pub(super) fn open(transaction: &'t WriteTransaction) -> Result<Self, Fault> {
        let open = |table: Table| transaction.open_table(definition(table));
        let tables: Result<_, _> = Table::ALL.into_iter().map(open).collect();
        Ok(Self {
            tables: tables?,
            is_changed: false,
        })
    }
}

impl Kv for Tables<'_> {
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        let value = self.tables[table as usize].get(key)?;
        Ok(value.map(|value| value.value().to_vec()))
    }

    fn seek(&self, table: Table, from: Bound<&[u8]>) -> Result<Option<Entry>, Fault> {
        let mut entries = self.tables[table as usize].range::<&[u8]>((from, Bound::Unbounded))?;
        let Some(entry) = entries.next() else {
            return Ok(None);
        };
        let (key, value) = entry?;
        Ok(Some((key.value().to_vec(), value.value().to_vec())))
    }

    fn scan(&self, table: Table, prefix: &[u8], show: Show<'_>) -> Result<(), Fault> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        for entry in self.tables[table as usize].range::<&[u8]>(from)? {
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
    fn put(&mut self, table: Table, key: &[u8], value: &[u8]) -> Result<(), Fault> {
        self.is_changed = true;
        self.tables[table as usize].insert(key, value)?;
        Ok(())
    }

    fn remove(&mut self, table: Table, key: &[u8]) -> Result<(), Fault> {
        self.is_changed = true;
        self.tables[table as usize].remove(key)?;
        Ok(())
    }
}
