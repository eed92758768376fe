//! Pools that a namespace's annotation names, and pools that select namespaces by label.

use cadastre_e2e::Fixtures;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::{Machine, add_of, annotated_pod, eventually, merge, pool, shared};

async fn namespace(api: &Fixtures, name: &str, meta: Value) {
    let mut namespace = json!({"metadata": meta});
    namespace["metadata"]["name"] = json!(name);
    let namespace: Namespace = serde_json::from_value(namespace).unwrap();
    let all = Api::all(api.client.clone());
    all.create(&PostParams::default(), &namespace)
        .await
        .unwrap();
}

/// Repeats DEL and ADD until the agent has seen the pod's namespace and the pools, and assigns an address from `range`.
async fn given_from(machine: &Machine, pod: &Pod, range: &str) {
    let name = pod.name_any();
    let what = format!("{name} has an address of {range}");
    eventually(&what, async || {
        machine.del(&name).await;
        let given = machine.add_with(add_of(pod, &name)).await?;
        anyhow::ensure!(given.starts_with(range), "{given}");
        Ok(Some(()))
    })
    .await;
}

#[tokio::test]
async fn namespaces_name_pools_and_are_selected_by_pools() {
    let (cluster, api) = shared().await;
    let terms = |more: Value| {
        let mut terms = json!({"cooldownSeconds": 0});
        merge(&mut terms, more);
        terms
    };
    let manual = terms(json!({"assignment": "Manual"}));
    let team = json!({"matchLabels": {"team": "x"}});
    let of_team = terms(json!({"namespaceSelector": team, "priority": 9}));
    pool(&api, "spot-a", "10.5.0.0/28", terms(json!({}))).await;
    pool(&api, "spot-b", "10.5.1.0/28", manual).await;
    pool(&api, "spot-c", "10.5.2.0/28", of_team).await;
    let machine = Machine::of_group(&cluster.control_plane, &api, "spot", &[]).await;
    let naming = |pools: &str| json!({"annotations": {"cadastre.dev/pools": pools}});
    namespace(&api, "spot-named", naming("spot-b")).await;
    namespace(&api, "spot-wrong", naming("No Pool")).await;
    namespace(&api, "spot-team", json!({"labels": {"team": "x"}})).await;

    let node = "spot-1";
    let plain = api.pod("spot-plain", node, &[]).await.unwrap();
    given_from(&machine, &plain, "10.5.0.").await;
    let named = annotated_pod(&api, "spot-named", "named", node, json!({})).await;
    given_from(&machine, &named, "10.5.1.").await;
    let own = json!({"cadastre.dev/pools": "spot-a"});
    let own = annotated_pod(&api, "spot-named", "own", node, own).await;
    given_from(&machine, &own, "10.5.0.").await;
    let team = annotated_pod(&api, "spot-team", "team", node, json!({})).await;
    given_from(&machine, &team, "10.5.2.").await;

    let wrong = annotated_pod(&api, "spot-wrong", "wrong", node, json!({})).await;
    let events: Api<Event> = Api::namespaced(api.client.clone(), "spot-wrong");
    let of_pod = format!("involvedObject.uid={}", wrong.uid().unwrap());
    let text = eventually("the pod is told of it", async || {
        machine.del("wrong").await;
        let given = machine.add_with(add_of(&wrong, "wrong")).await?;
        anyhow::ensure!(given.starts_with("10.5.0."), "{given}");
        let params = ListParams::default().fields(&of_pod);
        let mut all = events.list(&params).await?.items.into_iter();
        let told = all.find(|it| it.reason.as_deref() == Some("InvalidAnnotation"));
        Ok(told.and_then(|it| it.message))
    })
    .await;
    assert!(text.contains("the namespace's annotation"), "{text}");
    assert!(text.contains("No Pool"), "{text}");
}
