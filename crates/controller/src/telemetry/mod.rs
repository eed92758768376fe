//! What operators see of a controller besides what every daemon shows.
//!
//! | file | subject |
//! |---|---|
//! | [`metrics`], `pool_metrics` | figures of the loops and of pools |
//! | [`map`] | `/map`: the address space as a picture |

pub mod map;
pub mod metrics;
mod pool_metrics;

pub use metrics::ControllerMetrics;
