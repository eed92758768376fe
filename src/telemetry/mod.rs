//! What operators see: metrics, health and readiness, logs.
//!
//! | file | subject |
//! |---|---|
//! | [`metrics`], `pool_metrics`, `leader_metrics` | figures of the controller, of its pools, of the election |
//! | [`agent_metrics`] | the same of a node's agent |
//! | [`http_metrics`] | requests to the API server, counted where they leave |
//! | [`catalog`] | the list of all figures |
//! | [`admin`] | `/metrics`, `/healthz`, `/readyz`, `/loglevel` |
//! | [`map`] | `/map`: the address space as a picture |
//! | `serve`, `crowd` | connections of the admin port and the probes', their limits, and who makes room |
//! | `origin` | whether a request comes from this machine, and for it |
//! | [`tls`] | its certificate, where it has one |
//! | [`review`] | who may read metrics and map, where not everybody may |
//! | [`readiness`] | what is still missing, and who leads |
//! | [`logs`] | text or JSON, level changeable at run time |

pub mod admin;
pub mod agent_metrics;
pub mod catalog;
mod crowd;
pub mod http_metrics;
mod leader_metrics;
pub mod logs;
pub mod map;
pub mod metrics;
mod origin;
mod pool_metrics;
pub mod readiness;
pub mod review;
mod serve;
pub mod tls;

pub use agent_metrics::AgentMetrics;
pub use http_metrics::HttpMetrics;
pub use leader_metrics::LeaderMetrics;
pub use metrics::{ControllerMetrics, build_info};
pub use readiness::Readiness;
