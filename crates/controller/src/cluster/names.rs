//! Names, UIDs and terms. Each has a type of its own, so that the compiler rejects one in place of another.
//!
//! None of these types converts to another one. Where objects are read, text is converted to these types. For requests,
//! events and labels of metrics, the types are converted to text.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Defines a type for an immutable text. Clones share the text. Values are ordered and formatted like `str`, so maps
/// can be searched by `str`.
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
    /// The name of a Node and of its NodeSubnet. A later Node can have the same name: only the [`ObjectUid`] differs.
    NodeName;
    /// The name of an IPPool. A later IPPool can have the same name.
    PoolName;
    /// The namespace and name of an IPClaim, as `namespace/name`.
    ClaimName;
    /// The `metadata.uid` of an object of any kind. The API server never uses a UID twice.
    ObjectUid;
    /// The id of a term of leadership, which the fence writes to Nodes. It is not the name of the leader's process.
    TermId;
}
