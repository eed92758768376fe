//! The controller: a state machine that allocates ranges to nodes, with one file per reconcile loop.
//!
//! ```text
//! watches ──► cache ──┐                      ┌──► podcidr     node.spec.podCIDRs, one guarded PATCH per node
//! answers ──► cache ──┼─► Controller ─ Leader ┼──► demand      how many blocks a node has, needs and can spare
//!                     │        │             ├──► block       IPAMBlocks
//!                     │        │             ├──► subnet      NodeSubnet.spec
//! lease ──────────────┘        │             ├──► quarantine  podCIDRs of deleted nodes wait, then become free
//!                              │             └──► pool        finalizers, conditions and counts of IPPools
//!                              └─ fence (after a takeover, before anything else)
//! ```
//!
//! | file | subject |
//! |---|---|
//! | [`cluster`] | the boundary to the API server: cached objects, requests, the lease |
//! | [`machine`] | the state machine: it applies events, and returns the requests that may be sent now |
//! | `leader` | the state that exists only while this process leads: the allocations and the loops |
//! | [`reconcile`], `in_flight` | the trait of a reconcile loop; which objects have a request in flight |
//! | [`fence`], `intents` | the steps of a new leader before it allocates; the writes that the Lease must name |
//! | `agent_grace`, [`allocations::adopt`] | blocks that the API server has lost and only agents still report |
//! | [`allocations`] | the leader's ledger: which node has which range, and which ranges are quarantined |
//! | [`pools`] | which ranges each pool may allocate now, and to which nodes |
//! | `node_balance`, `carve` | the blocks that a node has, needs and can spare; ranges for new blocks |
//! | `lending` | the parts of blocks that nodes lend |
//! | [`claim`], [`pod_claims`] | IPClaims: their addresses, and the nodes that get them; the claims that pods need |
//! | [`ipam_claims`] | the IPClaims of IPAMClaims, which the network plumbing group defines for virtual machines |
//! | `exhaustion` | the taint and the condition of nodes without a free address |
//! | [`podcidr`], [`demand`], [`block`], [`subnet`], [`quarantine`], [`leaks`], `routes`, [`pool`] | the loops |
//! | [`figures`], [`totals`], `conditions`, [`forecast`] | the parts of a pool's status |
//! | [`bootstrap`], [`default_pool`] | the default pool of a cluster that has none |
//! | [`queue`], [`report`] | a work queue of keys with back-off; reports to be emitted as Kubernetes events |
//! | [`failing_calls`] | calls to the API server that failed: when they may be repeated, how they are reported |
//! | [`telemetry`] | metrics of the loops and of pools |
//! | [`run`], [`events`] | the process around the state machine: watches, tasks, logs and Kubernetes events |
//!
//! # Guarantees
//! The state machine does no IO, reads no clock and spawns no task, because each step is a function of the state, an
//! event and the time. All IO is in [`run`], in [`events`], and in two parts of [`cluster`]: the writer and the calls
//! of the election. So the simulation runs the same state machine as the process.

#![warn(unreachable_pub)]

mod agent_grace;
pub mod allocations;
pub mod block;
pub(crate) mod bootstrap;
mod carve;
pub mod claim;
pub mod cluster;
mod conditions;
mod context;
pub mod default_pool;
mod deleted_nodes;
pub mod demand;
pub mod events;
mod exhaustion;
pub mod failing_calls;
pub mod fence;
pub mod figures;
#[cfg(test)]
mod fixtures;
pub mod forecast;
mod handover;
mod in_flight;
mod intents;
pub mod ipam_claims;
mod leader;
pub mod leaks;
mod lending;
pub mod machine;
pub mod node_balance;
mod now;
pub mod pod_claims;
pub mod podcidr;
pub mod pool;
pub mod pools;
mod purpose;
pub mod quarantine;
pub mod queue;
pub mod reconcile;
pub mod report;
mod routes;
pub mod run;
mod settings;
pub mod subnet;
pub mod telemetry;
pub mod totals;
pub mod view;
mod withdrawals;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;

pub use cluster::request::OutgoingRequest;
pub use context::Context;
pub use machine::{Controller, ControllerEvent};
pub use now::Now;
pub use purpose::Purpose;
pub use report::{EventRecord, Regarding};
pub use settings::{ControllerSettings, FrrSettings};
