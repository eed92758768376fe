//! The addresses of one node: its ranges, and which attachment each address is assigned to.
//!
//! The node's agent and the CNI plugin work on the same durable store with the same code; the CNI plugin uses the
//! store only if no agent answers. No code here depends on Kubernetes or on an async runtime. The ledger reads no
//! clock: callers pass [`Now`].
//!
//! | file | subject |
//! |---|---|
//! | `ops` | operations and their results: [`Op`], [`OpOutcome`], [`OpError`] |
//! | `limits` | which addresses the configuration of a network allows, and whether a pool keeps to them |
//! | `pods` | which pools and addresses a pod may have, by its labels and annotations |
//! | `ledger` | the assignments, read and written in the tables of a transaction: [`AddressLedger`] |
//! | `store` | the file that contains the ledger: [`Store`] |
//! | `store_thread` | the thread of the agent that owns the store: [`store_thread::StoreThread`] |
//! | `wire`, `client` | how the CNI plugin reaches the agent, or uses the store directly: [`client::ask`] |
//! | `clock` | reads the clocks for [`Now`] |
//! | [`cni`] | the CNI protocol, the CNI plugin, and its host-local mode |

#![warn(unreachable_pub)]

pub mod client;
pub mod clock;
pub mod cni;
mod ledger;
mod limits;
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
    AddressCounts, AddressLedger, AttachmentRecord, BlockCount, BlockState, Conflict, Holdings,
    MOST_PROBES, PendingWithdrawal, PoolCount, PoolProbes, ProbeRound, ProbeTargets,
    RememberedAttachment, Snapshot,
};
pub use limits::{AllowedRange, NetworkLimits};
pub use ops::{
    Add, AddressAssignment, AssignedAddress, Attachment, Check, Gc, Now, Op, OpError, OpErrorKind,
    OpOutcome, PodRef,
};
pub use pods::{OWN_INTERFACE, PodChoice, PodNote, PoolOrder};
pub use storage_fault::{StorageFault, advice};
pub use store::{
    Disk, Find, HoldingsDisk, HoldingsDraft, HoldingsFile, Store, StoreError, set_aside,
};
