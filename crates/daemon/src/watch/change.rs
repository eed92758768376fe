//! What a watch tells, step by step.

use std::time::Duration;

/// One step of a watch of one kind.
///
/// Between [`Change::Restarted`] and [`Change::Listed`] every object that exists is sent as
/// [`Change::Applied`]; what was known before and is not among them is gone. A relist says nothing
/// else about deletions.
#[derive(Clone, Debug)]
pub enum Change<T> {
    /// A list begins, asked for not before `asked` (monotonic); what is known stays valid until
    /// [`Change::Listed`].
    Restarted {
        /// By the clock of this process
        asked: Duration,
    },
    /// An object as it is now, from the list or as news.
    Applied(T),
    /// The list is complete.
    Listed,
    /// All that happened up to that version has been told.
    Reached(u64),
    /// The object is gone, with the version of its removal where the watch tells it.
    Deleted(T),
}
