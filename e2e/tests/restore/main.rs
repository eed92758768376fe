//! etcd is restored to an older state while nodes keep running. Real agents then use addresses that the API no longer
//! knows.
//!
//! ```text
//!            state A, restored      state B, lost by the restore
//!  back-1    block 1                blocks 1 and 4
//!  back-2    blocks 2 and 3         block 2; block 3 is released
//!  back-3    does not exist         block 3
//!  back-4    does not exist         joins after the restore, and must get no block
//! ```
//!
//! The data are restored with their old revisions, so watches continue and deliver nothing. A real cluster should not
//! be restored in this way: `etcdutl snapshot restore --bump-revision` avoids the problem.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

mod node;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use cadastre_api::{IPAMBlockSpec, LEASE_NAME};
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Fixtures, Options, TestCluster, daemon};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use node::{Node, register};
use serde_json::{Value, json};

/// The maximum duration of a wait, long enough for a busy host.
const LIMIT: Duration = Duration::from_secs(120);
const GROUP: &str = "back";
/// A CIDR for four blocks with 13 usable addresses each.
const RANGE: &str = "10.70.0.0/26";
const FLAGS: [&str; 2] = ["--leak-grace=3600", "--lease-namespace=default"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restore_a_new_controller_gives_nothing_that_a_node_uses() {
    story(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restore_a_controller_that_lived_through_it_starts_anew_and_does_the_same() {
    story(true).await;
}

/// Waits until `look` returns a value; panics after [`LIMIT`].
async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Result<Option<T>>) -> T {
    until(what, LIMIT, look).await.unwrap()
}

async fn story(lives: bool) {
    let mut stage = TestCluster::start(Options::default(), &FLAGS)
        .await
        .unwrap();
    let api = stage.fixtures().await.unwrap();
    let spec = json!({
        "ipv4": {"cidrs": [RANGE], "blockSize": 28}, "warm": {"low": 1, "high": 1},
        "cooldownSeconds": 1, "idleSeconds": 1, "quarantineSeconds": 3,
    });
    api.block_pool(GROUP, spec).await.unwrap();
    let mut one = Node::join(&stage.control_plane, &api, "back-1").await;
    let mut two = Node::join(&stage.control_plane, &api, "back-2").await;
    one.add_many(5).await;
    two.add_many(20).await;
    api.listed("back-1", 1).await.unwrap();
    api.listed("back-2", 2).await.unwrap();

    let kept = tempfile::tempdir().unwrap();
    let copy = kept.path().join("etcd");
    let done = stage
        .control_plane
        .with_data(|data| copy_all(data, &copy))
        .await;
    done.unwrap();

    two.delete_all().await;
    api.listed("back-2", 1).await.unwrap();
    two.add_many(6).await;
    one.add_many(13).await;
    let mut three = Node::join(&stage.control_plane, &api, "back-3").await;
    three.add_many(13).await;
    let before = eventually("the blocks can be listed", async || {
        Ok(Some(blocks(&api).await?))
    })
    .await;
    let owners: Vec<&str> = before.values().map(String::as_str).collect();
    let count = |node: &str| owners.iter().filter(|it| **it == node).count();
    assert_eq!(
        (count("back-1"), count("back-2"), count("back-3")),
        (2, 1, 1),
        "{before:?}"
    );
    unique(&[&one, &two, &three]);

    if !lives {
        stage.controller.process().kill().unwrap();
    }
    let put_back = |data: &Path| {
        std::fs::remove_dir_all(data)?;
        copy_all(&copy, data)
    };
    stage.control_plane.with_data(put_back).await.unwrap();
    if lives {
        let ended = stage.controller.process().wait(LIMIT).await.unwrap();
        assert_eq!(ended.unwrap().code(), Some(1));
        let log = stage.controller.process().log_tail(5);
        assert!(log.contains("put back to an older state"), "{log}");
    }
    // Registers the Node again, as a restarted kubelet does.
    register(&api, "back-3").await;
    let four = Node::join(&stage.control_plane, &api, "back-4").await;
    age_lease(&api).await;
    stage.controller = start_controller(&stage.control_plane, ADMIN, &FLAGS).unwrap();

    // The new node must get nothing, because every block belongs to another node.
    let given = four.try_add().await;
    assert!(given.is_err(), "{given:?}");
    eventually("everybody has what it had", async || {
        let now = blocks(&api).await?;
        ensure!(now == before, "{now:?} instead of {before:?}");
        Ok(Some(()))
    })
    .await;
    for (name, count) in [("back-1", 2), ("back-2", 1), ("back-3", 1)] {
        api.listed(name, count).await.unwrap();
    }
    let given = four.try_add().await;
    assert!(given.is_err(), "{given:?}");
    one.add_many(8).await;
    two.add_many(7).await;
    unique(&[&one, &two, &three]);
    let uid = api.nodes.get("back-1").await.unwrap().metadata.uid.unwrap();
    let told = api.event(&uid, "BlockAdopted").await.unwrap();
    assert!(told.contains("docs/backup.md"), "{told}");
    check(&stage.control_plane).await;

    three.delete_all().await;
    let mut four = four;
    // `back-3` would keep the last block of its pool. So its Node is deleted, to free the block for `back-4`.
    api.delete_node("back-3").await.unwrap();
    four.add_many(1).await;
    unique(&[&one, &two, &four]);
}

/// Waits until `kubectl cadastre check` reports only one fault: a pool is full.
async fn check(cluster: &ControlPlane) {
    eventually("check finds the full pool alone", async || {
        let output = tokio::process::Command::new(daemon::kubectl_plugin()?)
            .args(["check", "-o", "json", "--settle", "0"])
            .env("KUBECONFIG", cluster.kubeconfig(ADMIN)?)
            .output()
            .await?;
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let findings = report["findings"].as_array().into_iter().flatten();
        let told = findings.filter(|it| it["severity"] != "info");
        let codes: Vec<&str> = told.filter_map(|it| it["code"].as_str()).collect();
        ensure!(codes == ["PoolFull"], "{report:#}");
        Ok(Some(()))
    })
    .await;
}

/// Returns all blocks with the names of their owners.
async fn blocks(api: &Fixtures) -> Result<BTreeMap<Cidr, String>> {
    let all = api.blocks.list(&ListParams::default()).await?;
    let all = all.items.into_iter().map(|it| it.spec);
    let pair = |it: IPAMBlockSpec| Ok((Cidr::parse_strict(&it.cidr)?, it.owner.name));
    all.map(pair).collect()
}

/// Asserts that no address is in use on two nodes.
fn unique(nodes: &[&Node]) {
    let mut seen: BTreeMap<Addr, &str> = BTreeMap::new();
    for node in nodes {
        for addr in node.held.values() {
            let other = seen.insert(*addr, &node.name);
            assert_eq!(other, None, "{addr} is on {} as well", node.name);
        }
    }
}

/// Sets the Lease's renewTime ten minutes back, as if the backup were ten minutes older.
async fn age_lease(api: &Fixtures) {
    let leases: Api<Lease> = Api::default_namespaced(api.client.clone());
    let time = Timestamp::now() - SignedDuration::from_mins(10);
    let patch = json!({"spec": {"renewTime": format!("{time:.6}")}});
    let params = PatchParams::default();
    let patch = Patch::Merge(patch);
    eventually("the Lease can be written", async || {
        Ok(Some(leases.patch(LEASE_NAME, &params, &patch).await?))
    })
    .await;
}

fn copy_all(from: &Path, to: &Path) -> Result<()> {
    let done = Command::new("cp").arg("-a").args([from, to]).status()?;
    ensure!(done.success(), "cp: {done}");
    Ok(())
}
