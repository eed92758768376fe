//! The storage interface that the ledger requires: ordered tables whose keys and values are bytes.

use std::ops::Bound;

use super::super::storage_fault::StorageFault;

/// The tables. The comment of each table says what its keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KvTable {
    /// Maps the name of a single value, such as the UID of the Node, to the value
    Meta,
    /// Maps the rank of a pool to the settings of the pool. Rank 0 is the best
    Pools,
    /// Maps the name of a pool to the rank of the pool
    Ranks,
    /// Maps the CIDR of a block to the record of the block
    Blocks,
    /// An index of the blocks from which addresses can be assigned. The keys are the pool and the CIDR of a block; the
    /// values are empty
    Assigning,
    /// An index of the blocks in `Assigning` that may have a free address. The keys are the pool and the CIDR of a
    /// block; the values are empty
    Open,
    /// Maps the CIDR of a block to the place where the search for a never-assigned address continues
    Cursors,
    /// Maps an address to the attachment that uses the address, or to the record of its release
    Addresses,
    /// Maps the CIDR of a block and a sequence number to a released address
    Freed,
    /// Maps an attachment (network, container, interface) to the record of its addresses
    Attachments,
    /// Maps an attachment (network, container, interface) to the time at which its latest DEL was requested
    Deletions,
    /// The blocks that were released recently. Maps the CIDR and UID of a block to a sequence number
    ReleasedBlocks,
    /// Maps the `namespace/name` of a pod to the note on which pools and addresses the pod may have
    Pods,
    /// Maps a CIDR to the state of its withdrawal
    Withdrawals,
    /// Maps an address to what its last probe has shown
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
    /// Returns the entry with the lowest key that satisfies the lower bound `from`.
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
