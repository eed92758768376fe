//! Creates, lists and deletes Node objects in large numbers, without kubelets.

use anyhow::{Context as _, Result};
use http::Method;
use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeSpec, NodeStatus};
use kube::api::{ListParams, ObjectMeta};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use crate::control_plane::ControlPlane;
use crate::raw::{Call, JSON, MERGE_PATCH, Report};

/// The number of connections for bulk requests. On two cores, 8 connections saturate the API server. Up to 128
/// connections make etcd slightly faster, because more writes share a commit.
pub const CONNECTIONS: usize = 64;

const PATH: &str = "/api/v1/nodes";

/// Returns a minimal Node with this name and InternalIP.
pub fn node(name: &str, internal_ip: &str) -> Node {
    let address = |type_: &str, address: &str| NodeAddress {
        type_: type_.to_owned(),
        address: address.to_owned(),
    };
    Node {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: Some(format!("e2e://{name}")),
            ..NodeSpec::default()
        }),
        status: Some(NodeStatus {
            addresses: Some(vec![
                address("InternalIP", internal_ip),
                address("Hostname", name),
            ]),
            ..NodeStatus::default()
        }),
    }
}

/// Returns the `i`-th of many nodes: for example `node-00042`, with the InternalIP 172.16.0.0 + 42.
pub fn numbered(i: u32) -> Node {
    let ip = std::net::Ipv4Addr::from(0xAC10_0000 + i);
    node(&format!("node-{i:05}"), &ip.to_string())
}

/// Creates `count` nodes in parallel. `make` returns the Node for an index from 0 to `count` - 1.
pub async fn create(
    cluster: &ControlPlane,
    count: u32,
    make: impl Fn(u32) -> Node,
) -> Result<Report> {
    let call = |i| -> Result<Call> {
        let node = serde_json::to_value(make(i))?;
        Ok(Call::new(Method::POST, PATH.to_owned(), JSON, &node))
    };
    let calls = (0..count).map(call).collect::<Result<_>>()?;
    cluster
        .endpoint()?
        .send_all(CONNECTIONS, calls)
        .await
        .context("cannot create the nodes")
}

/// Deletes the nodes with these names in parallel.
pub async fn delete(
    cluster: &ControlPlane,
    names: impl IntoIterator<Item = String>,
) -> Result<Report> {
    let call = |name: String| Call::without_body(Method::DELETE, format!("{PATH}/{name}"));
    let calls = names.into_iter().map(call).collect();
    cluster
        .endpoint()?
        .send_all(CONNECTIONS, calls)
        .await
        .context("cannot delete the nodes")
}

/// Lists all nodes in one request.
pub async fn list(client: &Client) -> Result<Vec<Node>> {
    Ok(Api::<Node>::all(client.clone())
        .list(&ListParams::default())
        .await?
        .items)
}

/// Returns the names of all nodes. Requests only metadata, which costs less than [`list`].
pub async fn names(client: &Client) -> Result<Vec<String>> {
    let nodes = Api::<Node>::all(client.clone())
        .list_metadata(&ListParams::default())
        .await?;
    Ok(nodes.items.iter().map(ResourceExt::name_any).collect())
}

/// Returns the podCIDRs of a node. The list is empty if the node has no podCIDR.
pub fn pod_cidrs(node: &Node) -> &[String] {
    node.spec
        .as_ref()
        .and_then(|spec| spec.pod_cidrs.as_deref())
        .unwrap_or_default()
}

/// Returns a call that sets the podCIDRs of node `name` by a merge patch without resourceVersion. So the API server
/// applies the patch whatever the node's version is. `pod_cidrs` must not be empty.
pub fn assign(name: &str, pod_cidrs: &[String]) -> Result<Call> {
    let first = pod_cidrs
        .first()
        .with_context(|| format!("no podCIDR to give to {name}"))?;
    let patch = json!({"spec": {"podCIDR": first, "podCIDRs": pod_cidrs}});
    let path = format!("{PATH}/{name}");
    Ok(Call::new(Method::PATCH, path, MERGE_PATCH, &patch))
}
