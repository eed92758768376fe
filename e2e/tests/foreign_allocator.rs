//! kube-controller-manager as a foreign allocator. In one test, it allocates at the same time as Cadastre. In other
//! tests, it has allocated all podCIDRs before Cadastre starts.

#![allow(clippy::print_stdout, clippy::unwrap_used)] // allowed in helpers as in tests

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use cadastre_api::FIELD_MANAGER;
use cadastre_e2e::{KcmOptions, install, metrics, nodes, wait};
use common::{Lab, leads, wait_leads};
use k8s_openapi::api::core::v1::{Event, Node};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use rustix::process::Signal;

const LIMIT: Duration = Duration::from_secs(180);
/// How long Cadastre pauses in these tests after the last podCIDR of a foreign allocator.
const HOLD: Duration = Duration::from_secs(8);
/// For how long Cadastre is stopped at a time. This is less than its lease duration, so Cadastre continues to lead.
const PAUSE: Duration = Duration::from_secs(2);

/// Selects the events with this reason about objects of this kind. Returns a map from the object's name to the event's
/// message.
async fn messages(client: &Client, kind: &str, reason: &str) -> Result<BTreeMap<String, String>> {
    let events = Api::<Event>::namespaced(client.clone(), "default");
    let all = events.list(&ListParams::default()).await?.items;
    Ok(all
        .into_iter()
        .filter(|it| it.reason.as_deref() == Some(reason))
        .filter(|it| it.involved_object.kind.as_deref() == Some(kind))
        .map(|it| {
            let name = it.involved_object.name.unwrap_or_default();
            (name, it.message.unwrap_or_default())
        })
        .collect())
}

/// Waits until the pool's condition `kind` has this status, and returns the condition's message.
async fn condition(lab: &Lab, kind: &str, status: &str, limit: Duration) -> String {
    wait::until(&format!("{kind}={status} on the pool"), limit, async || {
        let found = install::condition(&lab.client, "default", kind).await?;
        Ok(found.filter(|it| it.status == status).map(|it| it.message))
    })
    .await
    .unwrap()
}

fn numbered_from(first: u32) -> impl Fn(u32) -> Node {
    move |i| nodes::numbered(first + i)
}

async fn pod_cidrs(client: &Client) -> BTreeMap<String, Vec<String>> {
    let nodes = nodes::list(client).await.unwrap();
    nodes
        .iter()
        .map(|node| (node.name_any(), nodes::pod_cidrs(node).to_vec()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_allocator_is_noticed_reported_and_waited_for() {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let hold = format!("--foreign-allocator-pause={}", HOLD.as_secs());
    let mut cadastre = lab.controller("a", &[&hold]);
    wait_leads(&cadastre).await;
    lab.pool("default", "10.244.0.0/16", "fd00:244::/48", 1)
        .await;
    condition(&lab, "Ready", "True", LIMIT).await;
    let options = KcmOptions::node_ipam(&["10.244.0.0/16", "fd00:244::/48"]);
    let mut kcm = lab.cluster.start_kcm(&options).unwrap();

    // Both allocators race for these nodes.
    nodes::create(&lab.cluster, 60, numbered_from(0))
        .await
        .unwrap();
    let mut created = 60;
    // It is possible that Cadastre has won every race. So more nodes are created one by one, and Cadastre is paused
    // during each creation and for a while after it. The loop ends when Cadastre has counted a podCIDR of
    // kube-controller-manager.
    wait::until("the other one has written", LIMIT, async || {
        cadastre.process().signal(Signal::STOP)?;
        let node = nodes::numbered(created).name_any();
        nodes::create(&lab.cluster, 1, numbered_from(created)).await?;
        created += 1;
        let written = wait::until("a podCIDR", PAUSE, async || {
            let served = pod_cidrs(&lab.client).await;
            Ok((!served[&node].is_empty()).then_some(()))
        });
        let written = written.await.is_ok();
        cadastre.process().signal(Signal::CONT)?;
        let figures = cadastre.metrics().await?;
        let seen = metrics::sum(&figures, "cadastre_foreign_allocations_total", &[]);
        Ok((written && seen > 0.0).then_some(()))
    })
    .await
    .unwrap();
    lab.history
        .wait_until_all_assigned(created as usize, LIMIT)
        .await
        .unwrap();
    lab.history.assert_no_duplicates();
    kcm.check_running().unwrap();
    cadastre.process().check_running().unwrap();

    let message = condition(&lab, "ForeignAllocator", "True", LIMIT).await;
    assert!(message.contains("--allocate-node-cidrs=false"), "{message}");
    let notes = wait::until("an event on a node", LIMIT, async || {
        let notes = messages(&lab.client, "Node", "ForeignAllocator").await?;
        Ok((!notes.is_empty()).then_some(notes))
    })
    .await
    .unwrap();
    assert!(
        notes
            .values()
            .all(|it| it.contains("--allocate-node-cidrs=false")),
        "{notes:?}"
    );
    let by = |nodes: &[Node], who: &str| {
        let wrote = |node: &&Node| {
            let fields = node.managed_fields();
            fields.iter().any(|it| it.manager.as_deref() == Some(who))
        };
        nodes.iter().filter(wrote).count()
    };
    let nodes = nodes::list(&lab.client).await.unwrap();
    println!(
        "of {created} nodes {} were served by Cadastre, {} by kube-controller-manager; {} events",
        by(&nodes, FIELD_MANAGER),
        by(&nodes, "kube-controller-manager"),
        notes.len(),
    );

    kcm.kill().unwrap();
    let last = lab.history.last_assignment().unwrap();
    nodes::create(&lab.cluster, 20, numbered_from(created))
        .await
        .unwrap();
    let total = created as usize + 20;
    lab.history
        .wait_until_all_assigned(created as usize + 1, LIMIT)
        .await
        .unwrap();
    let waited = last.elapsed();
    assert!(
        waited + Duration::from_secs(1) > HOLD,
        "held back for {waited:?} only"
    );
    condition(&lab, "ForeignAllocator", "False", LIMIT).await;
    lab.all_served(total).await;
    // Events are written after the status, one after the other.
    wait::until("the recovery is reported as well", LIMIT, async || {
        let quiet = messages(&lab.client, "IPPool", "ForeignAllocatorQuiet").await?;
        Ok(quiet.contains_key("default").then_some(()))
    })
    .await
    .unwrap();
}

/// Creates 200 nodes with podCIDRs from kube-controller-manager. Then starts Cadastre, and restarts
/// kube-controller-manager without allocation. All podCIDRs must stay.
async fn move_over(ranges: &[&str], pool: serde_json::Value) {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let options = KcmOptions {
        qps: 1000,
        burst: 1000,
        ..KcmOptions::node_ipam(ranges)
    };
    let mut kcm = lab.cluster.start_kcm(&options).unwrap();
    nodes::create(&lab.cluster, 200, nodes::numbered)
        .await
        .unwrap();
    lab.history
        .wait_until_all_assigned(200, LIMIT)
        .await
        .unwrap();
    let before = pod_cidrs(&lab.client).await;

    let cadastre = lab.controller("a", &[]);
    install::pool(&lab.client, "default", pool).await.unwrap();
    wait::until("every podCIDR is taken over", LIMIT, async || {
        Ok((leads(&cadastre).await? && lab.recorded().await? == before).then_some(()))
    })
    .await
    .unwrap();
    condition(&lab, "ForeignAllocator", "False", LIMIT).await;
    kcm.kill().unwrap();
    let mut kcm = lab
        .cluster
        .start_kcm(&KcmOptions {
            allocate: false,
            ..options
        })
        .unwrap();

    nodes::create(&lab.cluster, 50, numbered_from(200))
        .await
        .unwrap();
    lab.history
        .wait_until_all_assigned(250, LIMIT)
        .await
        .unwrap();
    lab.history.assert_no_duplicates();
    kcm.check_running().unwrap();
    let after = pod_cidrs(&lab.client).await;
    assert!(
        after.values().all(|cidrs| cidrs.len() == ranges.len()),
        "{after:?}"
    );
    for (name, cidrs) in &before {
        assert_eq!(after[name], *cidrs, "{name}");
    }
    wait::until("every new podCIDR is recorded", LIMIT, async || {
        Ok((lab.recorded().await? == after).then_some(()))
    })
    .await
    .unwrap();
    wait::until("the pool counts all of them", LIMIT, async || {
        let pool = Api::<cadastre_api::IPPool>::all(lab.client.clone())
            .get("default")
            .await?;
        Ok((pool.status.unwrap_or_default().nodes == Some(250)).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_moves_over_without_renumbering() {
    let pool = serde_json::json!({"ipv4": {"cidrs": ["10.244.0.0/16"]}});
    move_over(&["10.244.0.0/16"], pool).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dual_stack_cluster_moves_over_without_renumbering() {
    let pool = serde_json::json!({
        "ipv4": {"cidrs": ["10.244.0.0/16"]}, "ipv6": {"cidrs": ["fd00:244::/48"]},
    });
    move_over(&["10.244.0.0/16", "fd00:244::/48"], pool).await;
}
