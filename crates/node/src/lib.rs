//! The addresses of one node: its ranges, and which attachment each address is assigned to.
//!
//! The node's agent and, if no agent answers, the CNI plugin itself work on the same durable store with the same code.
//! Nothing here knows Kubernetes or an async runtime. The ledger reads no clock: callers pass [`Now`].
//!
//! | file | subject |
//! |---|---|
//! | `ops` | operations and their results: [`Op`], [`OpOutcome`], [`OpError`] |
//! | `pods` | what the labels and annotations of pods entitle them to |
//! | `ledger` | the assignments, in the tables of a transaction: [`AddressLedger`] |
//! | `store` | the ledger in a file: [`Store`] |
//! | `store_thread` | the agent's thread that owns the store: [`store_thread::StoreThread`] |
//! | `wire`, `client` | the plugin's calls to the agent, or directly to the store: [`client::ask`] |
//! | `clock` | reading [`Now`] |
//! | [`cni`] | the CNI protocol, the plugin, its host-local mode |

#![warn(unreachable_pub)]

pub mod client;
pub mod clock;
pub mod cni;
mod ledger;
mod ops;
mod pods;
mod storage_fault;
mod store;
pub mod store_thread;
pub mod wire;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;

pub use ledger::{
    AddressCounts, AddressLedger, AttachmentRecord, BlockCount, BlockState, PoolCount,
    RememberedAttachment, Snapshot,
};
pub use ops::{
    Add, AddressAssignment, AssignedAddress, Attachment, Check, Gc, Now, Op, OpError, OpErrorKind,
    OpOutcome, PodRef,
};
pub use pods::{OWN_INTERFACE, PodChoice, PodNote, PoolOrder};
pub use storage_fault::{StorageFault, advice};
pub use store::{Disk, Find, Store, StoreError, set_aside};
