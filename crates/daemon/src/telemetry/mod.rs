//! Telemetry of every daemon: metrics, health and readiness, logs.
//!
//! | file | subject |
//! |---|---|
//! | [`http_metrics`] | metrics of requests to the API server |
//! | [`catalog`] | the list of all metrics |
//! | [`admin`] | `/metrics`, `/healthz`, `/readyz`, `/loglevel` |
//! | [`serve`], `connections` | connections of a port, their limits, and which one is closed for a new one |
//! | [`origin`] | whether a request comes from this host and is addressed to it |
//! | [`tls`] | the certificate of the admin port, if it has one |
//! | [`review`] | who may read metrics, if access is restricted |
//! | [`readiness`] | the content of `/readyz` |
//! | [`logs`] | text or JSON, with a level that can be changed at run time |

pub mod admin;
pub mod catalog;
mod connections;
pub(crate) mod http_metrics;
pub mod logs;
pub mod origin;
pub mod readiness;
pub mod review;
pub mod serve;
pub mod tls;

pub use catalog::build_info;
pub use http_metrics::HttpMetrics;
pub use readiness::Readiness;
