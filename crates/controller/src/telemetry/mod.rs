//! What operators see of a controller besides what every daemon shows.
//!
//! | file | subject |
//! |---|---|
//! | [`metrics`], `pool_metrics`, `leader_metrics` | figures of the loops, of pools, of the election |
//! | [`map`] | `/map`: the address space as a picture |

mod leader_metrics;
pub mod map;
pub mod metrics;
mod pool_metrics;

pub use leader_metrics::LeaderMetrics;
pub use metrics::ControllerMetrics;
