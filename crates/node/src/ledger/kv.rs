//! What the ledger asks of its storage: ordered tables of bytes.

use std::ops::Bound;

use super::super::fault::Fault;

/// The tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Table {
    /// A name -> one of the few single values
    Meta,
    /// Rank -> terms of a pool, best first
    Pools,
    /// Name of a pool -> its rank
    Ranks,
    /// CIDR -> a block
    Blocks,
    /// Pool, CIDR -> nothing: the blocks that may be given from
    Giving,
    /// Pool, CIDR -> nothing: those of them that may have something left
    Open,
    /// CIDR -> where the search for an address that nobody had goes on
    Cursors,
    /// Address -> who has it, or when it was freed
    Addresses,
    /// CIDR, sequence -> an address that was freed
    Freed,
    /// Network, container, interface -> what it was given
    Attachments,
    /// Network, container, interface -> when a DEL of it was asked for, lately
    Deletions,
    /// CIDR, UID -> sequence: the blocks that were given back last
    GivenBack,
    /// Namespace/name -> what a pod may have
    Pods,
}

impl Table {
    /// All of them.
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
pub(crate) type Entry = (Vec<u8>, Vec<u8>);

/// Reading.
pub(crate) trait Kv {
    /// The value of a key.
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, Fault>;
    /// The entry with the lowest key from there on.
    fn seek(&self, table: Table, from: Bound<&[u8]>) -> Result<Option<Entry>, Fault>;
    /// Shows all entries whose keys begin so, in the order of their keys.
    fn scan(&self, table: Table, prefix: &[u8], show: Show<'_>) -> Result<(), Fault>;
}

/// Takes a key and its value.
pub(crate) type Show<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> Result<(), Fault>;

/// Writing. What was written is read at once; it lasts when the transaction does.
pub(crate) trait KvMut: Kv {
    fn put(&mut self, table: Table, key: &[u8], value: &[u8]) -> Result<(), Fault>;
    fn remove(&mut self, table: Table, key: &[u8]) -> Result<(), Fault>;
}
