//! Metrics of the controller. The metrics that every daemon has are in `cadastre_daemon`.
//!
//! | file | subject |
//! |---|---|
//! | [`metrics`] | loops, requests, waiting nodes, blocks, leaks |
//! | `pool_metrics` | capacity, use and forecast of each pool |

pub mod metrics;
mod pool_metrics;

pub use metrics::ControllerMetrics;
