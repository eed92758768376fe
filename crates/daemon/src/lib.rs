//! What the controller and the agent have in common: how a daemon speaks to the API server, and what operators see
//! of it.
//!
//! | module | holds |
//! |---|---|
//! | [`client`], [`retry_after`] | the client of the API server, with its limits |
//! | [`watch`], [`lists`] | watches that never fall silent, and lists that are read as they come |
//! | [`events`] | Kubernetes events |
//! | [`clock`] | monotonic and wall time |
//! | [`telemetry`] | metrics, health, logs, the admin port |

#![warn(unreachable_pub)]

pub mod client;
pub mod clock;
pub mod events;
pub mod lists;
pub mod retry_after;
pub mod telemetry;
pub mod watch;
