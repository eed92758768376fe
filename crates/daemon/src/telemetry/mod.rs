//! What operators see of any daemon: metrics, health and readiness, logs.
//!
//! | file | subject |
//! |---|---|
//! | [`http_metrics`] | requests to the API server, counted where they leave |
//! | [`catalog`] | the list of all figures |
//! | [`admin`] | `/metrics`, `/healthz`, `/readyz`, `/loglevel` |
//! | [`serve`], `crowd` | connections of a port, their limits, and who makes room |
//! | [`origin`] | whether a request comes from this machine, and for it |
//! | [`tls`] | its certificate, where it has one |
//! | [`review`] | who may read metrics, where not everybody may |
//! | [`readiness`] | what `/readyz` says |
//! | [`logs`] | text or JSON, level changeable at run time |

pub mod admin;
pub mod catalog;
mod crowd;
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
