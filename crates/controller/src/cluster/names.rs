//! Names, UIDs and terms: each is a type of its own, so that the compiler rejects one in place of another.
//!
//! None of these types converts to another. Text is converted to them where objects are read, and they are converted
//! to text in requests, events and labels of metrics.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Defines a shared, immutable text of one meaning. It is ordered and formatted as its `str`, by which maps can be
/// searched.
macro_rules! name {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                $name(text.into())
            }
        }

        impl From<$name> for Arc<str> {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&*self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    )*};
}

name! {
    /// The name of a Node, and of its NodeSubnet. A later Node can have the same name: only the [`ObjectUid`] tells
    /// the two apart.
    NodeName;
    /// The name of an IPPool.
    PoolName;
    /// The namespace and name of an IPClaim, as `namespace/name`.
    ClaimName;
    /// The `metadata.uid` of an object of any kind; no name, and never used twice.
    ObjectUid;
    /// The id of a term of leadership, which the fence writes to nodes; not the name of the leader's process.
    TermId;
}
