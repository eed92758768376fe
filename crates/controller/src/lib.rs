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
//! | [`fence`], `intents` | what a new leader does before it deals; what the Lease names before it is sent |
//! | `listening`, `take_up` | what agents tell that the API has lost |
//! | [`registry`], `holders` | the leader's ledger: who holds what, what rests |
//! | [`pools`], `survey` | what every pool may do right now, and which nodes it serves |
//! | [`blocks`] | the leader's blocks: which node has which, and how far each is |
//! | `account`, `carve` | what a node has, wants and can spare; new blocks for it |
//! | [`podcidr`], [`demand`], [`block`], [`subnet`], [`quarantine`], [`leaks`], [`pool`] | the loops |
//! | [`figures`], [`totals`], [`conditions`], [`forecast`] | what a pool's status says |
//! | [`map`] | the address space for people to look at |
//! | [`bootstrap`], [`default_pool`] | the default pool of a cluster that has none |
//! | [`queue`], [`report`] | keyed work with back-off; Kubernetes events to be |
//! | [`refusals`] | calls that come to nothing: when they may be made again, what is told of them |
//! | [`telemetry`] | figures and the page of the map |
//! | [`run`], [`events`] | the shell: the only place with IO |
//!
//! # Guarantees
//! Apart from the shell no file here does IO, reads a clock or spawns: a step is a function of
//! (state, event, now). The
//! code that runs under simulation is the code that ships.

pub mod account;
pub mod block;
pub mod blocks;
pub mod bootstrap;
mod carve;
pub mod cluster;
pub mod conditions;
pub mod default_pool;
pub mod demand;
mod departed;
pub mod events;
pub mod fence;
pub mod figures;
pub mod forecast;
pub mod foreign;
mod holders;
mod intents;
mod leader;
pub mod leaks;
mod listening;
pub mod machine;
pub mod map;
pub mod podcidr;
pub mod pool;
pub mod pools;
pub mod quarantine;
pub mod queue;
pub mod refusals;
pub mod registry;
pub mod report;
pub mod run;
pub mod subnet;
mod survey;
mod take_up;
pub mod telemetry;
pub mod totals;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;

pub use machine::{Controller, Event, Outgoing, Settings};
pub use report::{About, Report};

use std::time::Duration;

use crate::cluster::seen::Text;
use crate::cluster::world::World;
use blocks::Step;
use cadastre_core::{Cidr, ClaimId};
use registry::Registry;

/// How often it is looked again whether addresses that keep a range from being free or given are gone:
/// nothing tells.
const IN_USE_PAUSE: Duration = Duration::from_secs(5);

/// The moment of a step.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic time since an arbitrary start; deadlines are kept in it, so that a wall clock that
    /// jumps moves none.
    pub mono: Duration,
    /// Wall time, for what people and other processes read.
    pub wall: jiff::Timestamp,
}

/// What a loop works on.
pub struct Context<'a> {
    /// What the watches say
    pub world: &'a World,
    /// What is held
    pub registry: &'a mut Registry,
    /// Where events for people go
    pub reports: &'a mut Vec<Report>,
    /// The moment
    pub now: Now,
}

/// What a request in flight is for; comes back with the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum Purpose {
    /// The fence's consistent list of nodes
    FenceNodes,
    /// The fence's consistent list of NodeSubnets, or that after agents were listened to
    FenceSubnets,
    /// The fence's touch of one node
    Touch { name: Text, uid: Text },
    /// The fence reads a node whose touch was refused
    TouchRead { name: Text, uid: Text },
    /// podCIDRs for a node
    Assign { name: Text, uid: Text },
    /// What became of them
    AssignRead { name: Text, uid: Text },
    /// A write of a NodeSubnet, and whether a node waits for it
    Subnet { name: Text, urgent: bool },
    /// What became of it
    SubnetRead { name: Text },
    /// The last look at a dead node's pods
    Quarantine { name: Text, uid: Text },
    /// A write of a block's object, or a read of it, for whom has that claim: an answer to what an
    /// earlier block of the CIDR asked for is not for the next one
    Block {
        cidr: Cidr,
        claim: ClaimId,
        step: Option<Step>,
    },
    /// The last look at the pods of a dead node that had blocks
    BlockPods { name: Text, uid: Text },
    /// The last look at a node's pods before its agent is asked about addresses
    LeakPods { name: Text, uid: Text },
    /// The fence's consistent list of IPAMBlocks
    FenceBlocks,
    /// What kubeadm has left, or the creation of the default pool
    DefaultPool,
    /// The answer to an agent's status
    Answer { name: Text },
    /// A write of a pool's finalizers
    PoolFinalizers { name: Text },
    /// A write of a pool's status
    PoolStatus { name: Text },
    /// What became of it
    PoolRead { name: Text },
}

impl Purpose {
    /// The loop that asked: the label of its metrics.
    pub fn loop_name(&self) -> &'static str {
        match self {
            Purpose::FenceNodes
            | Purpose::FenceSubnets
            | Purpose::FenceBlocks
            | Purpose::Touch { .. }
            | Purpose::TouchRead { .. } => "fence",
            Purpose::Assign { .. } | Purpose::AssignRead { .. } => "podcidr",
            Purpose::Subnet { .. } | Purpose::SubnetRead { .. } | Purpose::Answer { .. } => {
                "subnet"
            }
            Purpose::LeakPods { .. } => "leaks",
            Purpose::Block { .. } | Purpose::BlockPods { .. } => "block",
            Purpose::Quarantine { .. } => "quarantine",
            Purpose::PoolFinalizers { .. }
            | Purpose::PoolStatus { .. }
            | Purpose::PoolRead { .. }
            | Purpose::DefaultPool => "pool",
        }
    }
}
