//! Starts a control plane with the policies of config/default, and creates tokens for it.

use std::fmt::Debug;
use std::time::Duration;

use cadastre_api::{IPAMBlock, IPPool, NodeSubnet};
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::fixtures::block_name;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Fixtures, Options};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

pub const LIMIT: Duration = Duration::from_secs(120);

/// A ClusterRoleBinding that grants all RBAC permissions to agents, the controller and kubelets.
const EVERYTHING: &str = r#"{
  "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
  "metadata": {"name": "too-much"},
  "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
  "subjects": [
    {"kind": "ServiceAccount", "name": "cadastre-agent", "namespace": "kube-system"},
    {"kind": "ServiceAccount", "name": "cadastre-controller", "namespace": "kube-system"},
    {"kind": "ServiceAccount", "name": "default", "namespace": "kube-system"},
    {"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "system:nodes"}
  ]
}"#;

const KUBELET: &str = "system:node:n1";

/// A cluster in which the policies are in force.
pub struct Lab {
    pub hand: Fixtures,
    controller: Fixtures,
    pub cluster: ControlPlane,
}

/// The object to which a token is bound.
pub enum Bound {
    /// A pod on this node
    Pod(&'static str),
    Nothing,
}

impl Lab {
    pub async fn start() -> Self {
        let options = Options {
            users: vec![User::new(KUBELET, &["system:nodes"])],
            ..Options::default()
        };
        let (cluster, hand) = Box::pin(with_crds(options)).await.unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(hand.client.clone(), "kube-system");
        for name in ["cadastre-agent", "cadastre-controller", "default"] {
            let account = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
            accounts
                .create(&PostParams::default(), &account)
                .await
                .unwrap();
        }
        let apply = ["apply", "-f", "-"];
        cluster.kubectl_stdin(&apply, EVERYTHING).await.unwrap();
        cluster.kubectl_stdin(&apply, &policies()).await.unwrap();
        let controller = hand.clone();
        let mut this = Self {
            hand,
            controller,
            cluster,
        };
        let client = this.client_of("cadastre-controller", Bound::Nothing).await;
        this.controller = Fixtures::new(client);
        // The API server enforces a policy only a moment after it is stored. So each policy is probed by a dry run.
        this.hand.node("any", "probe").await.unwrap();
        until("the policies are in force", LIMIT, async || {
            let probe = json!({"metadata": {"labels": {"probe": "1"}}});
            let params = PatchParams {
                dry_run: true,
                ..PatchParams::default()
            };
            let nodes = &this.controller.nodes;
            let one = nodes.patch("probe", &params, &Patch::Merge(probe)).await;
            let params = PostParams {
                dry_run: true,
                ..PostParams::default()
            };
            let two = this.hand.subnets.create(&params, &subnet_of("probe")).await;
            let agent = this.client_of("cadastre-agent", Bound::Nothing).await;
            let three = Api::all(agent).create(&params, &pool("probe")).await;
            let kubelet: Api<Node> = Api::all(this.kubelet().await);
            let four = kubelet.create(&params, &greedy()).await;
            let all = [one.is_err(), two.is_err(), three.is_err(), four.is_err()];
            Ok(all.iter().all(|is| *is).then_some(()))
        })
        .await
        .unwrap();
        this
    }

    /// Returns a client that authenticates as the kubelet of node `n1`.
    pub async fn kubelet(&self) -> Client {
        self.cluster.client_of(KUBELET).await.unwrap()
    }

    /// Creates a node's NodeSubnet as the controller, because the policies allow only the controller to create it.
    pub async fn subnet(&self, node: &str) {
        let subnet = subnet_of(node);
        let params = PostParams::default();
        let made = self.controller.subnets.create(&params, &subnet);
        made.await.unwrap();
    }

    /// Creates a block as the controller, because the policies allow only the controller to create it.
    pub async fn block(&self, cidr: &str, node: &str) {
        let block: IPAMBlock = serde_json::from_value(json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock",
            "metadata": {"name": block_name(cidr)},
            "spec": {
                "cidr": cidr, "pool": "p",
                "owner": {"kind": "Node", "name": node, "uid": "u"},
                "since": "2026-01-01T00:00:00Z",
            },
        }))
        .unwrap();
        let blocks = &self.controller.blocks;
        blocks.create(&PostParams::default(), &block).await.unwrap();
    }

    /// Returns a client with a token of a ServiceAccount in kube-system.
    pub async fn client_of(&self, account: &str, bound: Bound) -> Client {
        let client = self.hand.client.clone();
        let mut spec = json!({"audiences": [], "expirationSeconds": 600});
        if let Bound::Pod(node) = bound {
            let pod = self.pod(account, node).await;
            spec["boundObjectRef"] = json!({
                "kind": "Pod", "apiVersion": "v1", "name": pod.name_any(), "uid": pod.uid(),
            });
        }
        let request: TokenRequest = serde_json::from_value(json!({"spec": spec})).unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(client, "kube-system");
        let params = PostParams::default();
        let answer = accounts.create_token_request(account, &params, &request);
        let token = answer.await.unwrap().status.unwrap().token.unwrap();
        self.cluster.client_by(&token).await.unwrap()
    }

    async fn pod(&self, account: &str, node: &str) -> Pod {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": format!("{account}-{node}")},
            "spec": {
                "nodeName": node, "serviceAccountName": account,
                "containers": [{"name": "c", "image": "none"}],
            },
        }))
        .unwrap();
        let pods: Api<Pod> = Api::namespaced(self.hand.client.clone(), "kube-system");
        pods.create(&PostParams::default(), &pod).await.unwrap()
    }
}

/// Returns the policies and their bindings, as YAML from config/default.
fn policies() -> String {
    let text = include_str!("../../../config/default/cadastre.yaml");
    let documents = text.split("\n---\n");
    let policies = documents.filter(|it| it.contains("kind: ValidatingAdmissionPolicy"));
    let policies: Vec<&str> = policies.collect();
    assert_eq!(policies.len(), 8, "four policies and a binding of each");
    policies.join("\n---\n")
}

/// Returns a Node with a podCIDR. A kubelet must not create such a Node.
fn greedy() -> Node {
    let whole = json!({
        "metadata": {"name": "greedy"},
        "spec": {"podCIDR": "0.0.0.0/0", "podCIDRs": ["0.0.0.0/0"]},
    });
    serde_json::from_value(whole).unwrap()
}

pub fn subnet_of(node: &str) -> NodeSubnet {
    let whole = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet",
        "metadata": {"name": node}, "spec": {"nodeUID": "u"},
    });
    serde_json::from_value(whole).unwrap()
}

pub fn pool(name: &str) -> IPPool {
    let whole = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool",
        "metadata": {"name": name}, "spec": {"ipv4": {"cidrs": ["10.9.0.0/16"]}},
    });
    serde_json::from_value(whole).unwrap()
}

/// Asserts that a policy rejected the request with a message that contains `text`.
pub fn refused<T: Debug>(answer: kube::Result<T>, text: &str) {
    let error = answer.unwrap_err();
    let kube::Error::Api(status) = error else {
        panic!("no refusal: {error:?}");
    };
    assert_eq!(status.code, 403, "{status:?}");
    let by = status
        .message
        .contains("ValidatingAdmissionPolicy 'cadastre-");
    assert!(by && status.message.contains(text), "{}", status.message);
}
