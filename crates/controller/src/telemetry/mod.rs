//! Metrics of the controller, in addition to those of every daemon.
//!
//! | file | subject |
//! |---|---|
//! | [`metrics`], `pool_metrics` | metrics of the loops and of pools |

pub mod metrics;
mod pool_metrics;

pub use metrics::ControllerMetrics;
