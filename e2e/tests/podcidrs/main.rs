//! The controller's guarantees about podCIDRs, on a real API server.
//!
//! Most tests share one control plane and one controller; each has its own group (a label of its nodes, which its
//! pools select) and its own ranges, so that tests do not affect each other. The few that restart a controller,
//! or need a cluster for themselves, have a cluster of their own and run one at a time.
//!
//! | file | subject |
//! |---|---|
//! | `dealing` | which nodes get which ranges from which pool |
//! | `changes` | pools that are created, changed and deleted while nodes wait |
//! | `left_out` | ranges that are never allocated: service ranges, reserved space, node addresses, older pools |
//! | `existing` | existing podCIDRs |
//! | `resting` | ranges of deleted nodes |
//! | `telling` | events, conditions and metrics |
//! | `mending` | edits by fixtures, and the limits of names |
//! | `misfits` | objects that violate today's rules |
//! | `crowd` | a thousand pools |

#![allow(clippy::expect_used, clippy::unwrap_used)] // allowed in helpers as in tests

mod changes;
mod crowd;
mod dealing;
mod existing;
mod left_out;
mod mending;
mod misfits;
mod resting;
mod telling;

use cadastre_e2e::{Fixtures, Options, TestCluster};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

/// The range of the shared controller's flag `--service-cidr`.
const FLAG_SERVICE_RANGE: &str = "10.199.0.0/25";

/// The cluster that most tests share, and a new [`Fixtures`] for this one.
async fn shared() -> (&'static TestCluster, Fixtures) {
    static CLUSTER: OnceCell<TestCluster> = OnceCell::const_new();
    let start = || async {
        TestCluster::start(
            Options::default(),
            &["--service-cidr", FLAG_SERVICE_RANGE, "--log-level", "debug"],
        )
        .await
        .unwrap()
    };
    let cluster = CLUSTER.get_or_init(start).await;
    (cluster, cluster.fixtures().await.unwrap())
}

/// A cluster for a single test.
async fn alone(flags: &[&str]) -> (TestCluster, Fixtures, SemaphorePermit<'static>) {
    let permit = one_at_a_time().await;
    let cluster = TestCluster::start(Options::default(), flags).await.unwrap();
    let fixtures = cluster.fixtures().await.unwrap();
    (cluster, fixtures, permit)
}

/// Waits until no other test holds the permit, so that at most one control plane runs beside the shared one.
async fn one_at_a_time() -> SemaphorePermit<'static> {
    static ONE: Semaphore = Semaphore::const_new(1);
    ONE.acquire().await.unwrap()
}
