//! The controller: one state machine, a file a reconcile loop.
//!
//! ```text
//!  watches ──► World ──┐                      ┌──► podcidr     node.spec.podCIDRs, one guarded PATCH a node
//!  answers ──► World ──┼─► Controller ─ Leader ┼──► demand      how many blocks a node has, needs, can spare
//!                      │        │             ├──► block       IPAMBlocks
//!                      │        │             ├──► subnet      NodeSubnet.spec
//!  lease ──────────────┘        │             ├──► quarantine  ranges of dead nodes rest, then are free
//!                               │             └──► pool        finalizer, conditions, counts
//!                               └─ fence (after a take-over, before anything else)
//! ```
//!
//! | file | subject |
//! |---|---|
//! | [`cluster`] | the edge to the API server: the cluster as last seen, requests, the lease |
//! | [`machine`] | events in, requests out; who may act when |
//! | `leader` | what exists only while leading: the loops |
//! | [`reconcile`], `in_flight` | what every loop is made of; which objects have a request in flight |
//! | [`fence`], `intents` | what a new leader does before it deals; what the Lease names before it is sent |
//! | `listening`, [`registry::take_up`] | what agents tell that the API has lost |
//! | [`registry`] | the leader's ledger: who holds what, what rests; which node has which block, and how far each is |
//! | [`pools`] | what every pool may do right now, and which nodes it serves |
//! | `account`, `carve` | what a node has, wants and can spare; new blocks for it |
//! | [`podcidr`], [`demand`], [`block`], [`subnet`], [`quarantine`], [`leaks`], [`pool`] | the loops |
//! | [`figures`], [`totals`], [`conditions`], [`forecast`] | what a pool's status says |
//! | [`bootstrap`], [`default_pool`] | the default pool of a cluster that has none |
//! | [`queue`], [`report`] | keyed work with back-off; Kubernetes events to be |
//! | [`refusals`] | calls that come to nothing: when they may be made again, what is told of them |
//! | [`telemetry`] | figures of the loops and of pools |
//! | [`run`], [`events`] | the shell: the only place with IO |
//!
//! # Guarantees
//! Apart from the shell no file here does IO, reads a clock or spawns: a step is a function of
//! (state, event, now). The
//! code that runs under simulation is the code that ships.

#![warn(unreachable_pub)]

pub mod account;
pub mod block;
pub(crate) mod bootstrap;
mod carve;
pub mod cluster;
pub mod conditions;
mod context;
pub mod default_pool;
pub mod demand;
mod departed;
pub mod events;
pub mod fence;
pub mod figures;
pub mod forecast;
mod in_flight;
mod intents;
mod leader;
pub mod leaks;
mod listening;
pub mod machine;
mod now;
pub mod podcidr;
pub mod pool;
pub mod pools;
mod purpose;
pub mod quarantine;
pub mod queue;
pub mod reconcile;
pub mod refusals;
pub mod registry;
pub mod report;
pub mod run;
mod settings;
pub mod subnet;
pub mod telemetry;
pub mod totals;
pub mod view;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;

pub use cluster::request::Outgoing;
pub use context::Context;
pub use machine::{Controller, Event};
pub use now::Now;
pub use purpose::Purpose;
pub use report::{About, Report};
pub use settings::Settings;
