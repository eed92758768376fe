//! The addresses of one node: what it holds, and who has which address.
//!
//! The node's agent and, where no agent answers, the CNI plugin itself work on the same durable store
//! with the same code. Nothing here knows Kubernetes or an async runtime. The ledger reads no clock:
//! callers pass [`Now`].
//!
//! | file | subject |
//! |---|---|
//! | `ops` | what is asked and answered: [`Op`], [`Answer`], [`Refusal`] |
//! | `ledger` | who has which address, in the tables of a transaction: [`Ledger`] |
//! | `store` | the ledger in a file: [`Store`] |
//! | `keeper` | the agent's thread that has the store: [`keeper::Keeper`] |
//! | `wire`, `client` | the plugin asks the agent, or helps itself: [`client::ask`] |
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
