//! `cadastre controller` as a process: its start, its output, its permissions, and how it ends.
//!
//! | file | subject |
//! |---|---|
//! | `default_pool` | the pool that a flag creates |
//! | `flags` | wrong flags, and the output of `--help` |
//! | `guarded` | the admin port with TLS and tokens |
//! | `many_pools` | a node that more pools select than a NodeSubnet has room for |
//! | `refused` | writes that admission policies reject permanently |
//! | `running` | log lines, log level, metrics, SIGTERM |
//! | `setup` | a cluster where the CRDs or the permissions are installed later |

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout
)] // allowed in helpers as in tests

mod default_pool;
mod flags;
mod guarded;
mod many_pools;
mod refused;
mod running;
mod setup;

use std::time::Duration;

use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::{Daemon, DaemonOptions};
use cadastre_e2e::{History, Options, metrics, nodes};
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(180);

#[tokio::test]
async fn the_controller_gives_every_node_a_range_of_each_family_and_ends_on_sigterm() {
    let (cluster, fixtures) = with_crds(Options::default()).await.unwrap();
    let pool = json!({
        "ipv4": {"cidrs": ["10.244.0.0/16"], "blockSize": 24}, "nodeSelector": {},
        "ipv6": {"cidrs": ["fd00:244::/48"], "blockSize": 64},
    });
    fixtures.pool("default", pool).await.unwrap();
    nodes::create(&cluster, 50, nodes::numbered).await.unwrap();
    let history = History::start(fixtures.client.clone()).await.unwrap();

    let mut daemon = start_controller(&cluster, ADMIN, &[]).unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    let assigned = history.wait_until_all_assigned(50, LIMIT).await;
    assert!(
        assigned.is_ok(),
        "{assigned:?}; {}",
        daemon.process().log_tail(30)
    );
    history.assert_no_duplicates();
    for node in nodes::list(&fixtures.client).await.unwrap() {
        let cidrs = nodes::pod_cidrs(&node);
        let [four, six] = cidrs else {
            panic!("{cidrs:?}")
        };
        assert!(
            four.starts_with("10.244.") && six.starts_with("fd00:244:"),
            "{cidrs:?}"
        );
    }
    let figures = daemon.metrics().await.unwrap();
    assert!(metrics::sum(&figures, "process_resident_memory_bytes", &[]) > 0.0);

    let status = daemon
        .process()
        .stop(Duration::from_secs(20))
        .await
        .unwrap();
    assert!(
        status.success(),
        "{status}; {}",
        daemon.process().log_tail(30)
    );
}

#[tokio::test]
async fn a_daemon_that_ends_at_start_is_an_error_that_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let options = DaemonOptions {
        args: vec!["controller".to_owned(), "--no-such-flag".to_owned()],
        ..DaemonOptions::default()
    };
    let mut daemon = Daemon::start(folder.path(), &folder.path().join("none"), &options).unwrap();
    let error = daemon.wait_ready(LIMIT).await.unwrap_err().to_string();
    assert!(error.contains("--no-such-flag"), "{error}");
}
