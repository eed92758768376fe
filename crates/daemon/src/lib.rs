//! Code that controller and agent share: access to the API server, and telemetry for operators.
//!
//! | module | content |
//! |---|---|
//! | [`client`], [`retry_after`] | the client of the API server, with its limits |
//! | [`watch`], [`lists`] | watches that detect silence, and lists that are parsed as a stream |
//! | [`events`] | Kubernetes events |
//! | [`clock`] | monotonic and wall time |
//! | [`telemetry`] | metrics, health, logs, the admin port |

#![warn(unreachable_pub)]

pub mod client;
pub mod clock;
pub mod encoding;
pub mod events;
pub mod lists;
pub mod retry_after;
pub mod telemetry;
pub mod watch;
