//! The boundary to the API server.
//!
//! | file | contents |
//! |---|---|
//! | [`convert`], [`agent_report`] | conversion of objects to the fields that decisions need |
//! | [`names`] | the types of names, UIDs and terms |
//! | [`objects`], [`object_cache`], [`pods`], `address_requests`, [`addresses`], [`cache`] | the cached objects |
//! | [`request`], `kept`, [`writer`], `node_patch` | requests and their outcomes, and the HTTP calls |
//! | [`readiness`] | the content of a controller's `/readyz` |
//! | [`lease`], `lease_object`, [`lease_task`], [`leader_metrics`] | the election: decision, object, calls, metrics |
//! | [`intents`] | the writes that a leader may have in flight, as the Lease names them |

pub(crate) mod address_requests;
pub mod addresses;
pub mod agent_report;
pub mod cache;
pub mod convert;
pub mod intents;
mod kept;
pub mod leader_metrics;
pub mod lease;
mod lease_object;
pub mod lease_task;
pub mod names;
mod node_patch;
pub mod object_cache;
pub mod objects;
pub mod pods;
pub mod readiness;
pub mod request;
pub mod writer;
