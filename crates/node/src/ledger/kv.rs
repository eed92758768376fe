//! The storage interface that the ledger requires: ordered tables whose keys and values are bytes.

use std::ops::Bound;

use super::super::storage_fault::StorageFault;

/// The tables. Each comment has the form: key -> value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KvTable {
    /// Name of a value -> the value
    Meta,
    /// Rank of a pool -> settings of the pool; rank 0 is the best
    Pools,
    /// Name of a pool -> rank of the pool
    Ranks,
    /// CIDR of a block -> record of the block
    Blocks,
    /// Pool, CIDR of a block -> empty: an index of the blocks from which addresses can be assigned
    Assigning,
    /// Pool, CIDR of a block -> empty: an index of the blocks in `Assigning` that may have a free address
    Open,
    /// CIDR of a block -> where the search for a never-assigned address continues
    Cursors,
    /// Address -> the attachment that uses it, or the record of its release
    Addresses,
    /// CIDR of a block, sequence number -> a released address
    Freed,
    /// Network, container, interface -> record of the assignment
    Attachments,
    /// Network, container, interface -> when the latest DEL of this attachment was requested
    Deletions,
    /// CIDR and UID of a block -> sequence number: the blocks that were released recently
    ReleasedBlocks,
    /// Namespace/name of a pod -> note on which pools and addresses the pod may have
    Pods,
    /// CIDR -> state of its withdrawal
    Withdrawals,
    /// Address -> what its last probe has shown
    Probes,
}

/// The names of the tables in the store's file, in the order of [`KvTable`]. Changing a name makes files of earlier
/// versions unreadable.
pub(crate) const TABLE_NAMES: [&str; 15] = [
    "meta",
    "pools",
    "ranks",
    "blocks",
    "giving",
    "open",
    "cursors",
    "addresses",
    "freed",
    "attachments",
    "deletions",
    "given_back",
    "pods",
    "withdrawals",
    "probes",
];

pub(crate) type KvEntry = (Vec<u8>, Vec<u8>);

/// Read access to the tables.
pub(crate) trait Kv {
    fn get(&self, table: KvTable, key: &[u8]) -> Result<Option<Vec<u8>>, StorageFault>;
    /// Returns the entry with the lowest key that is not below `from`.
    fn seek(&self, table: KvTable, from: Bound<&[u8]>) -> Result<Option<KvEntry>, StorageFault>;
    /// Calls `show` for each entry whose key begins with `prefix`, in the order of the keys.
    fn scan(&self, table: KvTable, prefix: &[u8], show: Show<'_>) -> Result<(), StorageFault>;
}

/// A function that is called with the key and the value of an entry.
pub(crate) type Show<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> Result<(), StorageFault>;

/// Write access to the tables. Writes are visible to reads at once, and durable once the transaction is committed.
pub(crate) trait KvMut: Kv {
    fn put(&mut self, table: KvTable, key: &[u8], value: &[u8]) -> Result<(), StorageFault>;
    fn remove(&mut self, table: KvTable, key: &[u8]) -> Result<(), StorageFault>;
}
