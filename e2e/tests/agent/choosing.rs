//! Pools that a namespace's annotation names, and pools that select namespaces by label.

use cadastre_e2e::Fixtures;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::{Machine, add_of, pool, shared};

async fn namespace(hand: &Fixtures, name: &str, meta: Value) {
    let mut namespace = json!({"metadata": meta});
    namespace["metadata"]["name"] = json!(name);
    let namespace: Namespace = serde_json::from_value(namespace).unwrap();
    let all = Api::all(hand.client.clone());
    all.create(&PostParams::default(), &namespace)
        .await
        .unwrap();
}

async fn pod_in(hand: &Fixtures, namespace: &str, name: &str, node: &str, notes: Value) -> Pod {
    let pod = json!({
        "metadata": {"name": name, "annotations": notes},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
    });
    let pod = serde_json::from_value(pod).unwrap();
    let all: Api<Pod> = Api::namespaced(hand.client.clone(), namespace);
    all.create(&PostParams::default(), &pod).await.unwrap()
}

/// Repeats DEL and ADD until the agent has seen the pod's namespace and the pools, and assigns an address from `range`.
async fn given_from(machine: &Machine, pod: &Pod, range: &str) {
    let name = pod.name_any();
    let what = format!("{name} has an address of {range}");
    until(&what, LIMIT, async || {
        machine.del(&name).await;
        let given = machine.add_with(add_of(pod, &name)).await?;
        anyhow::ensure!(given.starts_with(range), "{given}");
        Ok(Some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn namespaces_name_pools_and_are_selected_by_pools() {
    let (stage, hand) = shared().await;
    let terms = |more: Value| {
        let mut terms = json!({"cooldownSeconds": 0});
        crate::merge(&mut terms, more);
        terms
    };
    let manual = terms(json!({"assignment": "Manual"}));
    let team = json!({"matchLabels": {"team": "x"}});
    let of_team = terms(json!({"namespaceSelector": team, "priority": 9}));
    pool(&hand, "spot-a", "10.5.0.0/28", terms(json!({}))).await;
    pool(&hand, "spot-b", "10.5.1.0/28", manual).await;
    pool(&hand, "spot-c", "10.5.2.0/28", of_team).await;
    let (machine, _) = Machine::of_group(&stage.control_plane, &hand, "spot", &[]).await;
    let naming = |pools: &str| json!({"annotations": {"cadastre.dev/pools": pools}});
    namespace(&hand, "spot-named", naming("spot-b")).await;
    namespace(&hand, "spot-wrong", naming("No Pool")).await;
    namespace(&hand, "spot-team", json!({"labels": {"team": "x"}})).await;

    let node = "spot-1";
    let plain = hand.pod("spot-plain", node, &[]).await.unwrap();
    given_from(&machine, &plain, "10.5.0.").await;
    let named = pod_in(&hand, "spot-named", "named", node, json!({})).await;
    given_from(&machine, &named, "10.5.1.").await;
    let own = json!({"cadastre.dev/pools": "spot-a"});
    let own = pod_in(&hand, "spot-named", "own", node, own).await;
    given_from(&machine, &own, "10.5.0.").await;
    let team = pod_in(&hand, "spot-team", "team", node, json!({})).await;
    given_from(&machine, &team, "10.5.2.").await;

    let wrong = pod_in(&hand, "spot-wrong", "wrong", node, json!({})).await;
    let events: Api<Event> = Api::namespaced(hand.client.clone(), "spot-wrong");
    let of_pod = format!("involvedObject.uid={}", wrong.uid().unwrap());
    let text = until("the pod is told of it", LIMIT, async || {
        machine.del("wrong").await;
        let given = machine.add_with(add_of(&wrong, "wrong")).await?;
        anyhow::ensure!(given.starts_with("10.5.0."), "{given}");
        let params = ListParams::default().fields(&of_pod);
        let mut all = events.list(&params).await?.items.into_iter();
        let told = all.find(|it| it.reason.as_deref() == Some("InvalidAnnotation"));
        Ok(told.and_then(|it| it.message))
    })
    .await
    .unwrap();
    assert!(text.contains("the namespace's annotation"), "{text}");
    assert!(text.contains("No Pool"), "{text}");
}
