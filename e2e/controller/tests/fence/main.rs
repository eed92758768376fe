//! Tests of guards, with the controller's writer and a real API server. A guard is a precondition of a write, such as
//! an object's resourceVersion or UID. The controller decides on a write when the object is in a certain state. If this
//! state has changed before the write arrives, the guards make the write fail.

#![allow(clippy::panic, clippy::unwrap_used)] // allowed in helpers as in tests

mod nodes;
mod objects;

use std::time::Duration;

use cadastre_controller::OutgoingRequest;
use cadastre_controller::cluster::lease::{Leadership, LeadershipTerm, Takeover};
use cadastre_controller::cluster::lease_task::WriteGate;
use cadastre_controller::cluster::objects::Node as CachedNode;
use cadastre_controller::cluster::request::{
    ApiRequest, NodeTouch, ObjectKind, PodCidrAllocation, Rejection, RequestId, RequestOutcome,
};
use cadastre_controller::cluster::writer::Writer;
use cadastre_core::Cidr;
use cadastre_daemon::clock::Clock;
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::{ControlPlane, Options};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{OnceCell, watch};

const TERM: &str = "1-test";
const CIDRS: [&str; 2] = ["10.64.1.0/24", "fd00:64:0:1::/64"];

/// The writer of a leading controller, and the client of an administrator.
struct Bench {
    writer: Writer,
    client: Client,
    nodes: Api<Node>,
    leadership: watch::Sender<Leadership>,
}

async fn bench() -> Bench {
    // All tests share one control plane, so each test uses objects with names of its own.
    static CLUSTER: OnceCell<ControlPlane> = OnceCell::const_new();
    let start = async || with_crds(Options::default()).await.unwrap().0;
    let client = CLUSTER.get_or_init(start).await.client().await.unwrap();
    let (leadership, receiver) = watch::channel(leading_in(TERM, Duration::MAX));
    Bench {
        writer: Writer::new(client.clone(), WriteGate::new(receiver, Clock)),
        nodes: Api::all(client.clone()),
        client,
        leadership,
    }
}

fn leading_in(term: &str, valid_until: Duration) -> Leadership {
    Leadership::Leading(LeadershipTerm {
        id: term.into(),
        takeover: Takeover::First,
        valid_until,
        vacant: Duration::ZERO,
        inherited: None,
        answered_since: Duration::ZERO,
        named: 0,
    })
}

impl Bench {
    async fn send(&self, request: ApiRequest) -> RequestOutcome {
        let outgoing = OutgoingRequest {
            id: RequestId(0),
            term: request.is_write().then(|| TERM.into()),
            request,
            loop_name: "test",
            number: 0,
        };
        self.writer.send(outgoing).await
    }

    async fn create(&self, name: &str, metadata: Value) -> CachedNode {
        let mut node: Node = serde_json::from_value(json!({"metadata": metadata})).unwrap();
        node.metadata.name = Some(name.to_owned());
        self.nodes
            .create(&PostParams::default(), &node)
            .await
            .unwrap();
        self.read(name).await
    }

    async fn read(&self, name: &str) -> CachedNode {
        let read = ApiRequest::Read(ObjectKind::Node, name.into());
        node_of(self.send(read).await)
    }

    /// Writes podCIDRs to a node, as a leader would whose cache contains `node`.
    async fn assign(&self, node: &CachedNode) -> RequestOutcome {
        self.send(ApiRequest::AssignPodCidrs(PodCidrAllocation {
            name: node.name.clone(),
            uid: node.uid.clone(),
            term: node.term.clone(),
            annotated: node.annotated,
            cidrs: CIDRS.map(|it| Cidr::parse_strict(it).unwrap()).to_vec(),
        }))
        .await
    }

    async fn touch(&self, node: &CachedNode, term: &str) -> RequestOutcome {
        self.send(ApiRequest::TouchNode(NodeTouch {
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
fn node_of(outcome: RequestOutcome) -> CachedNode {
    match outcome {
        RequestOutcome::Node(node) => node,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_guarded(outcome: &RequestOutcome) {
    assert!(
        matches!(outcome, RequestOutcome::Rejected(Rejection::Guard(_))),
        "{outcome:?}"
    );
}

#[track_caller]
fn assert_assigned(outcome: &RequestOutcome) {
    let RequestOutcome::Node(node) = outcome else {
        panic!("{outcome:?}");
    };
    let cidrs: Vec<String> = node.pod_cidrs.iter().map(ToString::to_string).collect();
    assert_eq!(cidrs, CIDRS);
}
