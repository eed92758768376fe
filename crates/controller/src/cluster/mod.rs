//! The edge to the API server.
//!
//! | file | what it holds |
//! |---|---|
//! | [`convert`], [`agent_report`] | objects as what decisions need |
//! | [`seen`], [`table`], [`pods`], [`addresses`], [`world`] | the cluster as last seen |
//! | [`request`], [`writer`], `node_patch` | requests and outcomes as values, and the HTTP behind them |
//! | [`readiness`] | what `/readyz` of a controller says |
//! | [`lease`], `lease_object`, [`lease_task`] | who leads: the decision, the object, the calls |
//! | [`intents`] | what a leader may have in flight, as the Lease names it |

pub mod addresses;
pub mod agent_report;
pub mod convert;
pub mod intents;
pub mod leader_metrics;
pub mod lease;
mod lease_object;
pub mod lease_task;
mod node_patch;
pub mod pods;
pub mod readiness;
pub mod request;
pub mod seen;
pub mod table;
pub mod world;
pub mod writer;
