//! What operators see of a controller besides what every daemon shows.
//!
//! | file | subject |
//! |---|---|
//! | [`metrics`], `pool_metrics` | figures of the loops and of pools |

pub mod metrics;
mod pool_metrics;

pub use metrics::ControllerMetrics;
