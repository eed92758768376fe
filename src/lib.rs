//! Cluster-wide IP address management for Kubernetes.
//!
//! ```text
//!  bin ─┬► controller ──► cluster ──► api
//!       │       ├───────────┴──────► ipam     (no Kubernetes, no IO, no clock)
//!       │       └──────────────────► choice   (no IO, no clock)
//!       ├► agent ──► api, choice, node
//!       └► cni ────► node ─────────► ipam     (no Kubernetes, no async)
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`ipam`] | addresses, ranges, pools, the ledger of claims |
//! | `node` | the addresses of one node: who has which, durable |
//! | `cni` | the CNI protocol, the plugin, its host-local mode |
//! | `choice` | which pool serves a node or a pod, and why |
//! | `agent` | what a node's agent decides and does |
//! | `api` | IPPool and NodeSubnet, their rules and CRDs |
//! | `cluster` | watches, the cluster as last seen, requests, the lease |
//! | `controller` | the state machine and its loops |
//! | `inert` | text of others, before people see it |
//! | `mutation` | bugs made on purpose, in builds for tests alone |
//! | `telemetry` | metrics, health, logs |
//! | `cli` | the command, a file a verb |

#[cfg(feature = "controller")]
pub mod agent;
#[cfg(feature = "controller")]
pub mod api;
#[cfg(feature = "controller")]
pub mod choice;
#[cfg(feature = "controller")]
pub mod cli;
#[cfg(feature = "controller")]
pub mod cluster;
#[cfg(feature = "node")]
pub mod cni;
#[cfg(feature = "controller")]
pub mod controller;
#[cfg(feature = "controller")]
pub mod inert;
pub mod ipam;
pub mod mutation;
#[cfg(feature = "node")]
pub mod node;
#[cfg(feature = "controller")]
pub mod telemetry;

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of this build, where the build was told (`CADASTRE_COMMIT`).
pub const COMMIT: &str = match option_env!("CADASTRE_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
