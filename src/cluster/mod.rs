//! The edge to the API server.
//!
//! | file | what it holds |
//! |---|---|
//! | [`client`] | the client of the API server, with its limits |
//! | [`watch`], [`lists`], [`convert`], [`agent_report`] | watches and lists, and objects as what decisions need |
//! | [`seen`], [`table`], [`pods`], [`addresses`], [`world`] | the cluster as last seen |
//! | [`request`], [`writer`], [`retry_after`], `node_patch` | requests and outcomes as values, and the HTTP behind them |
//! | [`events`] | Kubernetes events |
//! | [`lease`], `lease_object`, [`lease_task`] | who leads: the decision, the object, the calls |
//! | [`intents`] | what a leader may have in flight, as the Lease names it |
//! | [`clock`] | monotonic and wall time |

pub mod addresses;
pub mod agent_report;
pub mod client;
pub mod clock;
pub mod convert;
pub mod events;
pub mod intents;
pub mod lease;
mod lease_object;
pub mod lease_task;
pub mod lists;
mod node_patch;
pub mod pods;
pub mod request;
pub mod retry_after;
pub mod seen;
pub mod table;
pub mod watch;
pub mod world;
pub mod writer;
