//! The changes that a watch reports.

use std::time::Duration;

/// A change of the objects of one kind, or progress of their list.
///
/// Between [`ObjectEvent::Restarted`] and [`ObjectEvent::Listed`] every existing object is sent as
/// [`ObjectEvent::Applied`]. If an object was known before and is not sent in between, the object no longer exists. A
/// new list reports deletions in no other way.
#[derive(Clone, Debug)]
pub enum ObjectEvent<T> {
    /// A list begins. The list was requested at the time `asked` or later. The known objects stay valid until
    /// [`ObjectEvent::Listed`].
    Restarted {
        /// The earliest time at which the list was requested, since boot
        asked: Duration,
    },
    /// The current state of an object, from the list or a watch event.
    Applied(T),
    /// The list is complete.
    Listed,
    /// All changes up to this resource version have been sent.
    Reached(u64),
    /// The object was deleted. If the watch reports the version of the deletion, the object has that version.
    Deleted(T),
}
