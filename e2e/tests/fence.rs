//! The writer's guards against a real API server: what a decision rested on must still hold when its
//! write arrives.

#![allow(clippy::panic, clippy::unwrap_used)] // helpers of tests are tests

use std::sync::Arc;
use std::time::Duration;

use cadastre::api::{HeldRange, IPPool, IPPoolStatus, NodeSubnet, NodeSubnetSpec, TERM_ANNOTATION};
use cadastre::cluster::clock::Clock;
use cadastre::cluster::lease::{Leadership, Takeover, Tenure};
use cadastre::cluster::lease_task::Gate;
use cadastre::cluster::request::{Assignment, Outcome, Refusal, Request, RequestId, Touch};
use cadastre::cluster::seen;
use cadastre::cluster::writer::Writer;
use cadastre::controller::Outgoing;
use cadastre::ipam::Cidr;
use cadastre_e2e::{ControlPlane, Options, install};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::{OnceCell, watch};

const TERM: &str = "1-test";
const CIDRS: [&str; 2] = ["10.64.1.0/24", "fd00:64:0:1::/64"];

/// One control plane for all: every test has objects of its own names.
struct Lab {
    cluster: ControlPlane,
}

/// A leader's writer, and an administrator beside it.
struct Bench {
    writer: Writer,
    client: Client,
    nodes: Api<Node>,
    leadership: watch::Sender<Leadership>,
}

async fn bench() -> Bench {
    static LAB: OnceCell<Lab> = OnceCell::const_new();
    let lab = LAB.get_or_init(async || {
        let cluster = ControlPlane::start(Options::default()).await.unwrap();
        install::crds(&cluster.client().await.unwrap())
            .await
            .unwrap();
        Lab { cluster }
    });
    let client = lab.await.cluster.client().await.unwrap();
    let (leadership, receiver) = watch::channel(leading(Duration::MAX));
    Bench {
        writer: Writer::new(client.clone(), Gate::new(receiver, Clock)),
        nodes: Api::all(client.clone()),
        client,
        leadership,
    }
}

fn leading(valid_until: Duration) -> Leadership {
    Leadership::Leading(Tenure {
        term: TERM.into(),
        takeover: Takeover::First,
        valid_until,
    })
}

impl Bench {
    async fn send(&self, request: Request) -> Outcome {
        let outgoing = Outgoing {
            id: RequestId(0),
            term: request.is_write().then(|| TERM.into()),
            request,
            loop_name: "test",
        };
        self.writer.send(outgoing).await
    }

    async fn create(&self, name: &str, metadata: Value) -> seen::Node {
        let mut node: Node = serde_json::from_value(json!({"metadata": metadata})).unwrap();
        node.metadata.name = Some(name.to_owned());
        self.nodes
            .create(&PostParams::default(), &node)
            .await
            .unwrap();
        self.read(name).await
    }

    async fn read(&self, name: &str) -> seen::Node {
        match self.send(Request::ReadNode { name: name.into() }).await {
            Outcome::Node(node) => node,
            other => panic!("{other:?}"),
        }
    }

    /// What the leader would write for a node that it saw like this.
    async fn assign(&self, node: &seen::Node) -> Outcome {
        self.send(Request::AssignPodCidrs(Assignment {
            name: node.name.clone(),
            uid: node.uid.clone(),
            term: node.term.clone(),
            annotated: node.annotated,
            cidrs: CIDRS.map(|it| Cidr::parse_strict(it).unwrap()).to_vec(),
        }))
        .await
    }

    async fn touch(&self, node: &seen::Node, term: &str) -> Outcome {
        self.send(Request::TouchNode(Touch {
            name: node.name.clone(),
            uid: node.uid.clone(),
            from: node.term.clone(),
            annotated: node.annotated,
            term: term.into(),
        }))
        .await
    }

    async fn patch(&self, name: &str, patch: Value) {
        self.nodes
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    }

    async fn spec(&self, name: &str) -> (Option<String>, Vec<String>) {
        let spec = self.nodes.get(name).await.unwrap().spec.unwrap_or_default();
        (spec.pod_cidr, spec.pod_cidrs.unwrap_or_default())
    }
}

#[track_caller]
fn touched(outcome: Outcome) -> seen::Node {
    match outcome {
        Outcome::Node(node) => node,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_guarded(outcome: &Outcome) {
    assert!(
        matches!(outcome, Outcome::Refused(Refusal::Guard(_))),
        "{outcome:?}"
    );
}

#[track_caller]
fn assert_assigned(outcome: &Outcome) {
    match outcome {
        Outcome::Node(node) => assert_eq!(
            node.pod_cidrs
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            CIDRS
        ),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_node_without_annotations_and_labels_gets_both_families() {
    let bench = bench().await;
    let node = bench.create("bare", json!({})).await;
    assert!(!node.annotated && node.labels.is_empty());
    assert_assigned(&bench.assign(&node).await);
    let (first, all) = bench.spec("bare").await;
    assert_eq!(
        (first.as_deref(), all),
        (Some(CIDRS[0]), CIDRS.map(str::to_owned).to_vec())
    );
}

#[tokio::test]
async fn a_node_with_annotations_and_labels_gets_both_families_and_keeps_them() {
    let bench = bench().await;
    let metadata = json!({"annotations": {"a/b": "c"}, "labels": {"d": "e"}});
    let node = bench.create("dressed", metadata).await;
    assert!(node.annotated);
    assert_assigned(&bench.assign(&node).await);
    let (first, all) = bench.spec("dressed").await;
    assert_eq!(
        (first.as_deref(), all),
        (Some(CIDRS[0]), CIDRS.map(str::to_owned).to_vec())
    );
    let now = bench.nodes.get("dressed").await.unwrap();
    assert_eq!(
        (&*now.annotations()["a/b"], &*now.labels()["d"]),
        ("c", "e")
    );
}

#[tokio::test]
async fn a_touch_refuses_what_was_decided_before_it() {
    let bench = bench().await;
    for (name, metadata) in [
        ("touched-bare", json!({})),
        ("touched-dressed", json!({"annotations": {"a": "b"}})),
        (
            "touched-before",
            json!({"annotations": {TERM_ANNOTATION: "0-older"}}),
        ),
    ] {
        let before = bench.create(name, metadata).await;
        let touched = touched(bench.touch(&before, "2-newer").await);
        assert_eq!(touched.term.as_deref(), Some("2-newer"));
        assert_guarded(&bench.assign(&before).await);
        assert_eq!(bench.spec(name).await, (None, vec![]), "{name}");
        assert_assigned(&bench.assign(&touched).await);
    }
}

#[tokio::test]
async fn a_late_touch_does_not_open_the_fence_again() {
    let bench = bench().await;
    for (name, metadata) in [
        ("late-bare", json!({})),
        ("late-dressed", json!({"annotations": {"a": "b"}})),
        (
            "late-before",
            json!({"annotations": {TERM_ANNOTATION: "0-older"}}),
        ),
    ] {
        let seen = bench.create(name, metadata).await;
        let touched = touched(bench.touch(&seen, "3-newest").await);
        assert_guarded(&bench.touch(&seen, "2-late").await);
        assert_eq!(bench.read(name).await, touched, "{name}");
    }
}

#[tokio::test]
async fn a_touch_keeps_other_annotations_and_comes_through_beside_them() {
    let bench = bench().await;
    let seen = bench
        .create("kept", json!({"annotations": {"a": "b"}}))
        .await;
    bench
        .patch("kept", json!({"metadata": {"annotations": {"c": "d"}}}))
        .await;
    touched(bench.touch(&seen, "2-x").await);
    let now = bench.nodes.get("kept").await.unwrap();
    let annotations: Vec<(&str, &str)> = now
        .annotations()
        .iter()
        .map(|(key, value)| (&**key, &**value))
        .collect();
    assert_eq!(
        annotations,
        [("a", "b"), ("c", "d"), (TERM_ANNOTATION, "2-x")]
    );
}

#[tokio::test]
async fn a_node_created_again_under_its_name_is_another_node() {
    let bench = bench().await;
    let before = bench
        .create("again", json!({"annotations": {"a": "b"}}))
        .await;
    bench
        .nodes
        .delete("again", &DeleteParams::default())
        .await
        .unwrap();
    for outcome in [
        bench.assign(&before).await,
        bench.touch(&before, "2-x").await,
    ] {
        assert!(
            matches!(outcome, Outcome::Refused(Refusal::Missing)),
            "{outcome:?}"
        );
    }
    let after = bench
        .create("again", json!({"annotations": {"a": "b"}}))
        .await;
    assert_ne!(before.uid, after.uid);
    assert_guarded(&bench.assign(&before).await);
    assert_guarded(&bench.touch(&before, "2-x").await);
    assert_eq!(bench.spec("again").await, (None, vec![]));
    assert_assigned(&bench.assign(&after).await);
}

#[tokio::test]
async fn what_another_writer_gave_stays() {
    let bench = bench().await;
    let theirs = ["10.200.0.0/24", "fd00:200::/64"];
    let node = bench.create("taken", json!({})).await;
    bench
        .patch(
            "taken",
            json!({"spec": {"podCIDR": theirs[0], "podCIDRs": theirs}}),
        )
        .await;
    assert_guarded(&bench.assign(&node).await);
    let (first, all) = bench.spec("taken").await;
    assert_eq!(
        (first.as_deref(), all),
        (Some(theirs[0]), theirs.map(str::to_owned).to_vec())
    );
    // And what we gave does not move to a second decision of our own.
    let node = bench.create("given", json!({})).await;
    assert_assigned(&bench.assign(&node).await);
    assert_guarded(&bench.assign(&node).await);
}

#[tokio::test]
async fn unrelated_updates_do_not_disturb_an_assignment() {
    let bench = bench().await;
    let seen = bench
        .create("busy", json!({"annotations": {"a": "b"}}))
        .await;
    bench
        .patch("busy", json!({"metadata": {"labels": {"l": "m"}}}))
        .await;
    bench
        .patch(
            "busy",
            json!({"metadata": {"annotations": {"c": "d", "a": null}}}),
        )
        .await;
    bench
        .patch("busy", json!({"spec": {"unschedulable": true}}))
        .await;
    let status =
        json!({"status": {"addresses": [{"type": "InternalIP", "address": "172.16.0.1"}]}});
    bench
        .nodes
        .patch_status("busy", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    let now = bench.read("busy").await;
    assert!(now.version > seen.version && now.addresses.len() == 1);
    assert_assigned(&bench.assign(&seen).await);
}

#[tokio::test]
async fn the_first_annotation_of_all_refuses_and_a_second_look_mends_it() {
    // A JSON Patch cannot test below a parent that does not exist, so the parent itself is tested.
    let bench = bench().await;
    let seen = bench.create("first-annotation", json!({})).await;
    bench
        .patch(
            "first-annotation",
            json!({"metadata": {"annotations": {"a": "b"}}}),
        )
        .await;
    assert_guarded(&bench.assign(&seen).await);
    let again = bench.read("first-annotation").await;
    assert_assigned(&bench.assign(&again).await);
}

#[tokio::test]
async fn invariant_11_nothing_is_sent_past_the_tenure_or_under_another_term() {
    let bench = bench().await;
    let node = bench.create("late", json!({})).await;
    let refused = [
        leading(Clock.now()),
        Leadership::Standby { leader: None },
        Leadership::Released,
        Leadership::Leading(Tenure {
            term: "2-other".into(),
            takeover: Takeover::Clean,
            valid_until: Duration::MAX,
        }),
    ];
    for leadership in refused {
        bench.leadership.send_replace(leadership.clone());
        for outcome in [bench.assign(&node).await, bench.touch(&node, "t").await] {
            assert!(
                matches!(outcome, Outcome::Refused(Refusal::NotSent)),
                "{leadership:?}: {outcome:?}"
            );
        }
    }
    assert_eq!(bench.read("late").await, node, "nothing was written");
    bench
        .leadership
        .send_replace(leading(Clock.now() + Duration::from_secs(60)));
    assert_assigned(&bench.assign(&node).await);
}

fn spec(cidr: &str) -> NodeSubnetSpec {
    NodeSubnetSpec {
        node_uid: Some("u".to_owned()),
        pod_cidrs: vec![HeldRange {
            cidr: cidr.to_owned(),
            pool: None,
        }],
        ..NodeSubnetSpec::default()
    }
}

#[track_caller]
fn subnet(outcome: Outcome) -> seen::Subnet {
    match outcome {
        Outcome::Subnet(subnet) => subnet,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_node_subnet_is_created_once_and_replaced_or_deleted_only_as_it_was_read() {
    let bench = bench().await;
    let name: Arc<str> = "subnet".into();
    let create = |cidr| Request::CreateSubnet {
        name: name.clone(),
        spec: spec(cidr),
    };
    let replace = |was: &seen::Subnet, cidr| Request::ReplaceSubnet {
        name: name.clone(),
        uid: was.uid.clone(),
        version: was.version,
        spec: spec(cidr),
    };
    let delete = |was: &seen::Subnet| Request::DeleteSubnet {
        name: name.clone(),
        uid: was.uid.clone(),
        version: was.version,
    };

    let first = subnet(bench.send(create("10.1.0.0/24")).await);
    assert_eq!(first.spec, Ok(spec("10.1.0.0/24")));
    assert_guarded(&bench.send(create("10.2.0.0/24")).await);
    let second = subnet(bench.send(replace(&first, "10.3.0.0/24")).await);
    assert!(second.uid == first.uid && second.version > first.version);
    assert_guarded(&bench.send(replace(&first, "10.4.0.0/24")).await);
    assert_guarded(&bench.send(delete(&first)).await);
    let stranger = seen::Subnet {
        uid: "somebody-else".into(),
        ..second.clone()
    };
    assert_guarded(&bench.send(replace(&stranger, "10.5.0.0/24")).await);
    assert_guarded(&bench.send(delete(&stranger)).await);
    let read = subnet(bench.send(Request::ReadSubnet { name: name.clone() }).await);
    assert_eq!(read, second, "what was refused left no trace");

    assert!(matches!(bench.send(delete(&second)).await, Outcome::Gone));
    for request in [delete(&second), replace(&second, "10.6.0.0/24")] {
        let outcome = bench.send(request).await;
        assert!(
            matches!(
                outcome,
                Outcome::Refused(Refusal::Missing | Refusal::Guard(_))
            ),
            "{outcome:?}"
        );
    }
    let subnets = Api::<NodeSubnet>::all(bench.client.clone());
    assert!(subnets.get_opt("subnet").await.unwrap().is_none());
}

#[tokio::test]
async fn a_pool_is_written_only_as_it_was_read_and_each_half_leaves_the_other_alone() {
    let bench = bench().await;
    let name: Arc<str> = "pool".into();
    install::pool(
        &bench.client,
        "pool",
        json!({"ipv4": {"cidrs": ["10.64.0.0/16"]}}),
    )
    .await
    .unwrap();
    let pool = |outcome: Outcome| match outcome {
        Outcome::Pool(pool) => pool,
        other => panic!("{other:?}"),
    };
    let finalize = |was: &seen::Pool, finalizers: &[&str]| Request::SetPoolFinalizers {
        name: name.clone(),
        uid: was.uid.clone(),
        version: was.version,
        finalizers: finalizers.iter().map(ToString::to_string).collect(),
    };
    let report = |was: &seen::Pool, nodes| Request::SetPoolStatus {
        name: name.clone(),
        uid: was.uid.clone(),
        version: was.version,
        status: IPPoolStatus {
            nodes: Some(nodes),
            ..IPPoolStatus::default()
        },
    };

    let first = pool(bench.send(Request::ReadPool { name: name.clone() }).await);
    let second = pool(bench.send(finalize(&first, &["cadastre.dev/a"])).await);
    assert_eq!(second.finalizers, ["cadastre.dev/a"]);
    let third = pool(bench.send(report(&second, 3)).await);
    assert_eq!(third.status.as_ref().unwrap().nodes, Some(3));
    assert_eq!(
        (&third.spec, &third.finalizers, third.generation),
        (&first.spec, &second.finalizers, first.generation)
    );
    let stranger = seen::Pool {
        uid: "somebody-else".into(),
        ..third.clone()
    };
    for was in [&first, &second] {
        assert_guarded(&bench.send(finalize(was, &[])).await);
        assert_guarded(&bench.send(report(was, 9)).await);
    }
    // A write of the status ignores a UID. Its version suffices: no two objects ever share one.
    assert_guarded(&bench.send(finalize(&stranger, &[])).await);
    let fourth = pool(bench.send(finalize(&third, &[])).await);
    assert_eq!((&fourth.status, &fourth.spec), (&third.status, &first.spec));
    assert!(fourth.finalizers.is_empty());

    let pools = Api::<IPPool>::all(bench.client.clone());
    pools
        .delete("pool", &DeleteParams::default())
        .await
        .unwrap();
    let outcome = bench.send(finalize(&fourth, &[])).await;
    assert!(
        matches!(outcome, Outcome::Refused(Refusal::Missing)),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn the_last_look_at_a_node_sees_its_pods_and_no_others() {
    let bench = bench().await;
    let pods = Api::<Pod>::namespaced(bench.client.clone(), "default");
    for (name, node, addresses) in [
        (
            "here",
            Some("looked-at"),
            &["10.64.1.5", "fd00:64:0:1::5"][..],
        ),
        ("here-too", Some("looked-at"), &[]),
        ("there", Some("looked-at-2"), &["10.64.2.5"]),
        ("nowhere", None, &[]),
    ] {
        let mut pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        if let Some(node) = node {
            pod["spec"]["nodeName"] = json!(node);
        }
        let pod: Pod = serde_json::from_value(pod).unwrap();
        pods.create(&PostParams::default(), &pod).await.unwrap();
        let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let status = json!({"status": {"podIP": addresses.first(), "podIPs": ips}});
        pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }
    assert_eq!(
        pods.list(&ListParams::default()).await.unwrap().items.len(),
        4
    );
    let outcome = bench
        .send(Request::ListPodsOf {
            node: "looked-at".into(),
        })
        .await;
    let Outcome::Pods(mut found) = outcome else {
        panic!("{outcome:?}");
    };
    found.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<&str> = found.iter().map(|pod| &*pod.name).collect();
    assert_eq!(names, ["default/here", "default/here-too"]);
    let addresses: Vec<String> = found[0].addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.64.1.5", "fd00:64:0:1::5"]);
}
