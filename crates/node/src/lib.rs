//! The addresses of one node: its ranges, and which attachment each address is assigned to.
//!
//! The node's agent and, if no agent answers, the CNI plugin itself work on the same durable store with the same code.
//! Nothing here knows Kubernetes or an async runtime. The ledger reads no clock: callers pass [`Now`].
//!
//! | file | subject |
//! |---|---|
//! | `ops` | operations and their results: [`Op`], [`Answer`], [`Refusal`] |
//! | `pods` | what the labels and annotations of pods entitle them to |
//! | `ledger` | the assignments, in the tables of a transaction: [`Ledger`] |
//! | `store` | the ledger in a file: [`Store`] |
//! | `keeper` | the agent's thread that owns the store: [`keeper::Keeper`] |
//! | `wire`, `client` | the plugin's calls to the agent, or directly to the store: [`client::ask`] |
//! | `clock` | reading [`Now`] |
//! | [`cni`] | the CNI protocol, the plugin, its host-local mode |

#![warn(unreachable_pub)]

pub mod client;
pub mod clock;
pub mod cni;
mod fault;
pub mod keeper;
mod ledger;
mod ops;
mod pods;
mod store;
pub mod wire;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;

pub use fault::{Fault, advice};
pub use ledger::{BlockCount, BlockState, Counts, Known, Ledger, PoolCount, Snapshot, Tenant};
pub use ops::{
    Add, Answer, Attachment, Check, Gc, Given, GivenAddress, Now, Op, PodRef, Refusal, Why,
};
pub use pods::{OWN_INTERFACE, PodChoice, PodNote, Pools};
pub use store::{Disk, Find, Store, StoreError, set_aside};
