//! The addresses of one node: what it holds, and who has which address.
//!
//! The node's agent and, where no agent answers, the CNI plugin itself work on the same durable store
//! with the same code. Nothing here knows Kubernetes or an async runtime. The ledger reads no clock:
//! callers pass [`Now`].
//!
//! | file | subject |
//! |---|---|
//! | `holding` | what the node may give addresses from, as its NodeSubnet says: [`Holding`] |
//! | `ops` | what is asked and answered: [`Op`], [`Answer`], [`Refusal`] |
//! | `usable` | what of a block may be given, and with which gateway: [`usable()`] |
//! | `ledger` | who has which address, in the tables of a transaction: [`Ledger`] |
//! | `store` | the ledger in a file: [`Store`] |
//! | `keeper` | the agent's thread that has the store: [`keeper::Keeper`] |
//! | `wire`, `client` | the plugin asks the agent, or helps itself: [`client::ask`] |
//! | `clock` | reading [`Now`] |

pub mod client;
pub mod clock;
mod fault;
mod holding;
pub mod keeper;
mod ledger;
mod ops;
mod pods;
mod store;
mod usable;
pub mod wire;

pub use fault::{Fault, advice};
pub use holding::{Block, Dns, FamilyTerms, Gateway, Holding, PoolTerms, Prefix, Route};
pub use ledger::{BlockCount, BlockState, Counts, Known, Ledger, PoolCount, Snapshot, Tenant};
pub use ops::{
    Add, Answer, Attachment, Check, Gc, Given, GivenAddress, Now, Op, PodRef, Refusal, Why,
};
pub use pods::{OWN_INTERFACE, PodChoice, PodNote, Pools};
pub use store::{Disk, Find, Store, StoreError, set_aside};
pub use usable::{Usable, room, usable};
