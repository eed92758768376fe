//! Lists and watches of a real API server: through a connection that falls silent, and in both encodings.

#![allow(clippy::unwrap_used)] // allowed in helpers as in tests

use std::fmt::Debug;
use std::time::Duration;

use cadastre_api::watched::protobuf;
use cadastre_api::{NodeLite, PodLite};
use cadastre_controller::cluster::convert;
use cadastre_daemon::client;
use cadastre_daemon::encoding::Encoding;
use cadastre_daemon::lists::{self, ListError};
use cadastre_daemon::telemetry::HttpMetrics;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_daemon::watch::{LastHeard, Pauses, SilenceTimeouts, WatchSource, WatchStep, follow};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::wire::Wire;
use cadastre_e2e::{ControlPlane, Fixtures, Options};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::mpsc;

const LIMIT: Duration = Duration::from_secs(180);

/// Starts a watch of all Nodes through `wire`. Returns a channel with the steps of the watch, as text.
async fn watch(cluster: &ControlPlane, wire: &Wire) -> mpsc::Receiver<String> {
    let reach = client::Options {
        kubeconfig: Some(wire.kubeconfig(cluster, ADMIN).unwrap()),
        ..client::Options::default()
    };
    let metrics = HttpMetrics::register(&prometheus::Registry::new()).unwrap();
    let source = WatchSource::<NodeLite> {
        kind: "nodes",
        api: Api::all(client::connect(&reach, metrics).await.unwrap()),
        encoding: Encoding::Protobuf(protobuf::node),
        fields: None,
        labels: None,
        page: Some(2),
        pauses: Pauses::new(Duration::from_millis(10), Duration::from_millis(100), 1),
        doubtful: false,
        patience: SilenceTimeouts {
            answer: Duration::from_secs(2),
            bookmark: Duration::from_secs(5),
            ..SilenceTimeouts::default()
        },
        heard: LastHeard::default(),
    };
    let (out, steps) = mpsc::channel(64);
    let text = |step| match step {
        WatchStep::Change(ObjectEvent::Applied(name)) => Some(name),
        WatchStep::Change(ObjectEvent::Listed) => Some("listed".to_owned()),
        WatchStep::Trouble => Some("trouble".to_owned()),
        _ => None,
    };
    let read = |node| convert::node(node).name.to_string();
    tokio::spawn(follow(source, out, read, text));
    steps
}

async fn wait_for(steps: &mut mpsc::Receiver<String>, wanted: &str) -> Vec<String> {
    let mut came = Vec::new();
    while came.last().is_none_or(|step| step != wanted) {
        let next = tokio::time::timeout(LIMIT, steps.recv()).await;
        came.push(next.unwrap().unwrap());
    }
    came
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_arrive_after_an_unanswered_list_and_a_silent_watch() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let hand = Fixtures::new(cluster.client().await.unwrap());
    for name in ["w-1", "w-2", "w-3"] {
        hand.node("w", name).await.unwrap();
    }
    let wire = Wire::to(&cluster).await.unwrap();
    wire.hold();
    let mut steps = watch(&cluster, &wire).await;
    wait_for(&mut steps, "trouble").await;
    wire.release();
    let came = wait_for(&mut steps, "listed").await;
    assert!(came.contains(&"w-3".to_owned()), "{came:?}");

    hand.node("w", "w-4").await.unwrap();
    wait_for(&mut steps, "w-4").await;
    wire.fall_silent();
    hand.node("w", "w-5").await.unwrap();
    let came = wait_for(&mut steps, "w-5").await;
    assert!(came.contains(&"trouble".to_owned()), "{came:?}");
    assert!(
        !came.contains(&"w-1".to_owned()),
        "it goes on where it was: {came:?}"
    );
}

/// Lists all objects of a kind in this encoding. Returns each as text.
async fn listed<K>(api: &Api<K>, encoding: Encoding<K>) -> Vec<String>
where
    K: kube::Resource + serde::de::DeserializeOwned + Clone + Debug + Send + 'static,
{
    let text = |object| format!("{object:#?}");
    lists::all(api, encoding, 2, LIMIT, text).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_and_pods_are_the_same_in_json_and_protobuf() {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let client = cluster.client().await.unwrap();
    let hand = Fixtures::new(client.clone());
    let node = json!({
        "metadata": {
            "name": "full", "labels": {"zone": "a", "empty": ""}, "finalizers": ["example.com/held"],
            "annotations": {"note": "Grüße ✓"},
        },
        "spec": {
            "podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24", "fd09::/64"], "providerID": "lab://7",
            "unschedulable": true,
            "taints": [
                {"key": "example.com/a", "value": "v", "effect": "NoSchedule"},
                {"key": "example.com/b", "effect": "NoExecute", "timeAdded": "2026-01-02T03:04:05Z"},
            ],
        },
    });
    let node = hand
        .create_node(serde_json::from_value(node).unwrap())
        .await
        .unwrap();
    let status = json!({"status": {
        "addresses": [
            {"type": "InternalIP", "address": "192.0.2.7"}, {"type": "Hostname", "address": "full"},
        ],
        "capacity": {"cpu": "4", "memory": "16Gi", "pods": "110"},
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "it runs"},
            {"type": "AddressesExhausted", "status": "True", "reason": "Full"},
        ],
        "nodeInfo": {
            "machineID": "m7", "bootID": "b7", "systemUUID": "u7", "kernelVersion": "6.1", "osImage": "x",
            "containerRuntimeVersion": "c", "kubeletVersion": "v1.36.3", "kubeProxyVersion": "",
            "operatingSystem": "linux", "architecture": "amd64",
        },
        "images": [{"names": ["example.com/i:1"], "sizeBytes": 1_000_000}],
    }});
    let nodes: Api<Node> = Api::all(client.clone());
    let (none, patch) = (PatchParams::default(), Patch::Merge(&status));
    nodes.patch_status("full", &none, &patch).await.unwrap();
    for name in ["bare", "bound"] {
        hand.node("g", name).await.unwrap();
    }
    let pod = json!({
        "metadata": {
            "name": "full", "namespace": "default", "labels": {"app": "a"},
            "annotations": {"cadastre.dev/claim": "c"},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Node", "name": "full", "uid": node.metadata.uid,
                "controller": true, "blockOwnerDeletion": false,
            }],
        },
        "spec": {
            "nodeName": "full", "hostNetwork": true,
            "containers": [{"name": "c", "image": "example.com/i:1"}],
            "tolerations": [{"operator": "Exists"}, {"key": "k", "effect": "NoSchedule", "operator": "Exists"}],
        },
    });
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let pod: Pod = serde_json::from_value(pod).unwrap();
    pods.create(&PostParams::default(), &pod).await.unwrap();
    hand.pod("bound", "bound", &["10.9.0.7", "fd09::7"])
        .await
        .unwrap();
    hand.pod("waits", "bare", &[]).await.unwrap();
    // It stays, because no kubelet confirms that it has ended.
    pods.delete("full", &DeleteParams::default()).await.unwrap();
    nodes
        .delete("full", &DeleteParams::default())
        .await
        .unwrap();

    let all: Api<NodeLite> = Api::all(client.clone());
    let plain = listed(&all, Encoding::Json).await;
    assert_eq!(plain.len(), 3);
    assert!(
        plain
            .iter()
            .any(|it| it.contains("2026-01-02T03:04:05Z") && it.contains("110"))
    );
    assert_eq!(
        listed(&all, Encoding::Protobuf(protobuf::node)).await,
        plain
    );
    let all: Api<PodLite> = Api::all(client);
    let plain = listed(&all, Encoding::Json).await;
    assert_eq!(plain.len(), 3);
    assert!(plain.iter().any(|it| it.contains("fd09::7")));
    assert_eq!(listed(&all, Encoding::Protobuf(protobuf::pod)).await, plain);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_list_says_why_in_protobuf() {
    let options = Options {
        users: vec![User::new("nobody", &[])],
        ..Options::default()
    };
    let cluster = ControlPlane::start(options).await.unwrap();
    let client = cluster.client_of("nobody").await.unwrap();
    let pods: Api<PodLite> = Api::all(client);
    let encoding = Encoding::Protobuf(protobuf::pod);
    let error = lists::all(&pods, encoding, 2, LIMIT, |_| ())
        .await
        .unwrap_err();
    let ListError::Api(kube::Error::Api(status)) = error else {
        panic!("{error:?}");
    };
    assert_eq!(status.code, 403);
    assert!(
        status.message.contains("cannot list resource \"pods\""),
        "{}",
        status.message
    );
}
