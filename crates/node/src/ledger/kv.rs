//! The storage that the ledger requires: ordered tables of bytes.

use std::ops::Bound;

use super::super::storage_fault::StorageFault;

/// The tables, each with its key -> value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KvTable {
    /// Name -> a single value
    Meta,
    /// Rank -> terms of a pool, best first
    Pools,
    /// Name of a pool -> its rank
    Ranks,
    /// CIDR -> a block
    Blocks,
    /// Pool, CIDR -> nothing: blocks to assign from
    Giving,
    /// Pool, CIDR -> nothing: the blocks of `Giving` that may have a free address
    Open,
    /// CIDR -> where the search for a never-assigned address continues
    Cursors,
    /// Address -> the attachment that uses it, or its release
    Addresses,
    /// CIDR, sequence -> a released address
    Freed,
    /// Network, container, interface -> the record of the assignment
    Attachments,
    /// Network, container, interface -> when its latest DEL was asked for
    Deletions,
    /// CIDR, UID -> sequence: recently released blocks
    GivenBack,
    /// Namespace/name -> what a pod may have
    Pods,
}

impl KvTable {
    /// All tables, in the order of their numbers.
    pub(crate) const ALL: [Self; 13] = [
        Self::Meta,
        Self::Pools,
        Self::Ranks,
        Self::Blocks,
        Self::Giving,
        Self::Open,
        Self::Cursors,
        Self::Addresses,
        Self::Freed,
        Self::Attachments,
        Self::Deletions,
        Self::GivenBack,
        Self::Pods,
    ];
}

/// A key and its value.
pub(crate) type KvEntry = (Vec<u8>, Vec<u8>);

/// Read access to the tables.
pub(crate) trait Kv {
    fn get(&self, table: KvTable, key: &[u8]) -> Result<Option<Vec<u8>>, StorageFault>;
    /// The entry with the lowest key from `from` on.
    fn seek(&self, table: KvTable, from: Bound<&[u8]>) -> Result<Option<KvEntry>, StorageFault>;
    /// Calls `show` for all entries whose keys begin with `prefix`, in the order of their keys.
    fn scan(&self, table: KvTable, prefix: &[u8], show: Show<'_>) -> Result<(), StorageFault>;
}

/// Receives a key and its value.
pub(crate) type Show<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> Result<(), StorageFault>;

/// Write access. Writes are visible to reads at once, and durable once the transaction is committed.
pub(crate) trait KvMut: Kv {
    fn put(&mut self, table: KvTable, key: &[u8], value: &[u8]) -> Result<(), StorageFault>;
    fn remove(&mut self, table: KvTable, key: &[u8]) -> Result<(), StorageFault>;
}
