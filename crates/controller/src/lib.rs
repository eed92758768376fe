//! The controller: one state machine, with one file per reconcile loop.
//!
//! ```text
//! watches ──► cache ──┐                      ┌──► podcidr     node.spec.podCIDRs, one guarded PATCH per node
//! answers ──► cache ──┼─► Controller ─ Leader ┼──► demand      how many blocks a node has, needs, can spare
//!                     │        │             ├──► block       IPAMBlocks
//!                     │        │             ├──► subnet      NodeSubnet.spec
//! lease ──────────────┘        │             ├──► quarantine  ranges of deleted nodes wait, then are free
//!                              │             └──► pool        finalizer, conditions, counts
//!                              └─ fence (after a takeover, before anything else)
//! ```
//!
//! | file | subject |
//! |---|---|
//! | [`cluster`] | the boundary to the API server: cached objects, requests, the lease |
//! | [`machine`] | events in, requests out; who may act when |
//! | `leader` | the state that exists only while leading: the loops |
//! | [`reconcile`], `in_flight` | the trait of a loop; which objects have a request in flight |
//! | [`fence`], `intents` | what a new leader does before it allocates; the writes that the Lease must name |
//! | `agent_grace`, [`allocations::adopt`] | allocations that only agents still report, after the API lost them |
//! | [`allocations`] | the leader's ledger: which node has which range, and what is quarantined |
//! | [`pools`] | what each pool may do now, and which nodes it serves |
//! | `node_balance`, `carve` | the blocks that a node has, needs and can spare; ranges for new blocks |
//! | [`podcidr`], [`demand`], [`block`], [`subnet`], [`quarantine`], [`leaks`], [`pool`] | the loops |
//! | [`figures`], [`totals`], [`conditions`], [`forecast`] | the parts of a pool's status |
//! | [`bootstrap`], [`default_pool`] | the default pool of a cluster that has none |
//! | [`queue`], [`report`] | keyed work with back-off; Kubernetes events to be emitted |
//! | [`failing_calls`] | failed calls: when they may be repeated, how they are reported |
//! | [`telemetry`] | metrics of the loops and of pools |
//! | [`run`], [`events`] | the shell: the only place with IO |
//!
//! # Guarantees
//! Apart from the shell, no file here does IO, reads a clock or spawns a task: a step is a function of (state, event,
//! now). The code that runs in the simulation is the code that ships.

#![warn(unreachable_pub)]

mod agent_grace;
pub mod allocations;
pub mod block;
pub(crate) mod bootstrap;
mod carve;
pub mod cluster;
pub mod conditions;
mod context;
pub mod default_pool;
mod deleted_nodes;
pub mod demand;
pub mod events;
pub mod failing_calls;
pub mod fence;
pub mod figures;
pub mod forecast;
mod in_flight;
mod intents;
mod leader;
pub mod leaks;
pub mod machine;
pub mod node_balance;
mod now;
pub mod podcidr;
pub mod pool;
pub mod pools;
mod purpose;
pub mod quarantine;
pub mod queue;
pub mod reconcile;
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

pub use cluster::request::OutgoingRequest;
pub use context::Context;
pub use machine::{Controller, ControllerEvent};
pub use now::Now;
pub use purpose::Purpose;
pub use report::{EventRecord, Regarding};
pub use settings::ControllerSettings;
