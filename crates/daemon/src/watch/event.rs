//! The steps of a watch.

use std::time::Duration;

/// One step of a watch of one kind.
///
/// Between [`ObjectEvent::Restarted`] and [`ObjectEvent::Listed`] every existing object is sent as [`ObjectEvent::Applied`]; objects
/// that were known before and are not among them no longer exist. A relist reports deletions in no other way.
#[derive(Clone, Debug)]
pub enum ObjectEvent<T> {
    /// A list begins, requested not before `asked` (monotonic). What is known stays valid until [`ObjectEvent::Listed`].
    Restarted {
        /// Time since boot
        asked: Duration,
    },
    /// The current state of an object, from the list or a watch event.
    Applied(T),
    /// The list is complete.
    Listed,
    /// Everything up to this version has been sent.
    Reached(u64),
    /// The object was deleted. It has the version of its deletion, if the watch reports that.
    Deleted(T),
}
