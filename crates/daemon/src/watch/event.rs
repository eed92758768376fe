//! The changes that a watch reports.

use std::time::Duration;

/// A change of the objects of one kind, or progress of their list.
///
/// Between [`ObjectEvent::Restarted`] and [`ObjectEvent::Listed`] every existing object is sent as
/// [`ObjectEvent::Applied`]. An object that was known before and is not sent in between no longer exists. A relist
/// reports deletions in no other way.
#[derive(Clone, Debug)]
pub enum ObjectEvent<T> {
    /// A list begins, requested not before `asked`. What is known stays valid until [`ObjectEvent::Listed`].
    Restarted {
        /// Time since boot
        asked: Duration,
    },
    /// The current state of an object, from the list or a watch event.
    Applied(T),
    /// The list is complete.
    Listed,
    /// All changes up to this resource version have been sent.
    Reached(u64),
    /// The object was deleted. It has the version of its deletion, if the watch reports that.
    Deleted(T),
}
