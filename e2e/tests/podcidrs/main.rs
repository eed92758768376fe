//! The controller's guarantees about podCIDRs, on a real API server.
//!
//! Most tests share one control plane and one controller. Each test has its own group (a label of its nodes, which its
//! pools select) and its own ranges, so that tests do not affect each other. The few tests that restart a controller or
//! need a cluster for themselves have their own cluster. At most two such clusters run at a time.
//!
//! | file | subject |
//! |---|---|
//! | `allocation` | which nodes get which ranges from which pool |
//! | `assignments` | ranges that a pool assigns to certain nodes, ranges whose size follows from the node |
//! | `changes` | pools that are created, changed and deleted while nodes wait |
//! | `exclusions` | ranges that are never allocated: service ranges, reserved addresses, node addresses, older pools |
//! | `existing` | existing podCIDRs |
//! | `quarantine` | ranges of deleted nodes |
//! | `reporting` | events, conditions and metrics |
//! | `manual_edits` | edits by hand, and the limits of names |
//! | `invalid_objects` | objects that violate today's rules |
//! | `many_pools` | a thousand pools |

#![allow(clippy::expect_used, clippy::unwrap_used)] // allowed in helpers as in tests

mod allocation;
mod assignments;
mod changes;
mod exclusions;
mod existing;
mod invalid_objects;
mod manual_edits;
mod many_pools;
mod quarantine;
mod reporting;

use anyhow::Result;
use cadastre_e2e::{Fixtures, Options, TestCluster};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

/// The value of the flag `--service-cidr` of the shared controller.
const FLAG_SERVICE_RANGE: &str = "10.199.0.0/25";

/// Returns the cluster that most tests share, and a new [`Fixtures`] for this test.
async fn shared() -> Result<(&'static TestCluster, Fixtures)> {
    static CLUSTER: OnceCell<TestCluster> = OnceCell::const_new();
    let flags = ["--service-cidr", FLAG_SERVICE_RANGE, "--log-level", "debug"];
    let start = || TestCluster::start(Options::default(), &flags);
    let cluster = CLUSTER.get_or_try_init(start).await?;
    Ok((cluster, cluster.fixtures().await?))
}

/// Starts a cluster for a single test. The test must keep the permit until its cluster has ended.
async fn alone(flags: &[&str]) -> Result<(TestCluster, Fixtures, SemaphorePermit<'static>)> {
    let permit = permit().await?;
    let cluster = TestCluster::start(Options::default(), flags).await?;
    let fixtures = cluster.fixtures().await?;
    Ok((cluster, fixtures, permit))
}

/// Returns one of two permits, so that at most two control planes run beside the shared one.
async fn permit() -> Result<SemaphorePermit<'static>> {
    static PERMITS: Semaphore = Semaphore::const_new(2);
    Ok(PERMITS.acquire().await?)
}
