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

use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::daemon::{Daemon, DaemonOptions};
use cadastre_e2e::{History, crds, metrics, nodes};

const LIMIT: Duration = Duration::from_secs(180);

const POOL: &str = r#"{
  "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": "default"},
  "spec": {
    "allocationMode": "NodeCIDR",
    "ipv4": {"cidrs": ["10.244.0.0/16"], "blockSize": 24},
    "ipv6": {"cidrs": ["fd00:244::/48"], "blockSize": 64}
  }
}"#;

fn controller() -> DaemonOptions {
    DaemonOptions {
        name: "controller".to_owned(),
        args: vec!["controller".to_owned()],
        env: Vec::new(),
    }
}

#[tokio::test]
async fn the_controller_gives_every_node_a_range_of_each_family_and_ends_on_sigterm() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let client = cluster.client().await.unwrap();
    crds::install(&client).await.unwrap();
    cluster
        .kubectl_stdin(&["apply", "-f", "-"], POOL)
        .await
        .unwrap();
    nodes::create(&cluster, 50, nodes::numbered).await.unwrap();
    let history = History::start(client.clone()).await.unwrap();

    let kubeconfig = cluster.kubeconfig(ADMIN).unwrap();
    let mut daemon = Daemon::start(cluster.folder(), &kubeconfig, &controller()).unwrap();
    daemon.wait_ready(LIMIT).await.unwrap();
    let assigned = history.wait_until_all_assigned(50, LIMIT).await;
    assert!(
        assigned.is_ok(),
        "{assigned:?}; {}",
        daemon.process().log_tail(30)
    );
    history.assert_no_duplicates();
    for node in nodes::list(&client).await.unwrap() {
        let cidrs = nodes::pod_cidrs(&node);
        assert!(
            cidrs.len() == 2
                && cidrs[0].starts_with("10.244.")
                && cidrs[1].starts_with("fd00:244:"),
            "{cidrs:?}"
        );
    }
    let rss = metrics::sum(
        &daemon.metrics().await.unwrap(),
        "process_resident_memory_bytes",
        &[],
    );
    assert!(rss > 0.0);

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
        ..controller()
    };
    let mut daemon = Daemon::start(folder.path(), &folder.path().join("none"), &options).unwrap();
    let error = daemon.wait_ready(LIMIT).await.unwrap_err().to_string();
    assert!(error.contains("--no-such-flag"), "{error}");
}
