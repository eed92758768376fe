//! Creates and changes objects in the cluster, and waits for the state that must follow.
//!
//! # Guarantees
//! Nothing here sleeps for a fixed time, because every wait ends as soon as its condition holds. If a wait reaches its
//! limit, the error contains the condition and what was observed last (see [`crate::wait`]).

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use cadastre_api::{
    IPAMBlock, IPPool, NodeAddresses, NodeAddressesSpec, NodeSubnet, NodeSubnetStatus,
};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::nodes;
use crate::wait::until;

/// The maximum duration of a wait. The limit is generous, because a wait usually takes about a second.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The label that [`Fixtures::node`] sets and that the selector of [`Fixtures::pool`] requires.
pub const GROUP: &str = "group";

/// Clients with which a test changes and reads a cluster.
#[derive(Clone)]
pub struct Fixtures {
    /// General client, for kinds that have no client of their own in this struct, and for requests that do not concern
    /// a single kind
    pub client: Client,
    /// Client for Nodes, which tests create themselves because no kubelet runs
    pub nodes: Api<Node>,
    /// Client for pods of the namespace `default`
    pub pods: Api<Pod>,
    /// Client for pools (IPPool)
    pub pools: Api<IPPool>,
    /// Client for NodeSubnets, which the controller creates for Nodes
    pub subnets: Api<NodeSubnet>,
    /// Client for NodeAddresses, which agents write
    pub addresses: Api<NodeAddresses>,
    /// Client for blocks (IPAMBlock)
    pub blocks: Api<IPAMBlock>,
}

impl Fixtures {
    /// Returns fixtures that send their requests with `client`.
    pub fn new(client: Client) -> Self {
        Self {
            nodes: Api::all(client.clone()),
            pods: Api::default_namespaced(client.clone()),
            pools: Api::all(client.clone()),
            subnets: Api::all(client.clone()),
            addresses: Api::all(client.clone()),
            blocks: Api::all(client.clone()),
            client,
        }
    }

    /// Writes a NodeAddresses object by server-side apply, as an agent does.
    pub async fn list_addresses(&self, node: &str, mut list: NodeAddressesSpec) -> Result<()> {
        // Empty fields are not serialized. If both the list and the UID were empty, the object would be applied without
        // a spec. So an empty UID is replaced.
        if list.node_uid.is_empty() {
            "test".clone_into(&mut list.node_uid);
        }
        let object = NodeAddresses::new(node, list);
        let params = PatchParams::apply("test").force();
        let patch = Patch::Apply(&object);
        self.addresses.patch(node, &params, &patch).await?;
        Ok(())
    }

    /// Creates a pool that allocates podCIDRs (`NodeCIDR`) to the nodes of one group. The group is the part of the
    /// pool's name before the first `-`: the pools `a-1` and `a-2` select the nodes of group `a`. The fields of `spec`
    /// replace the defaults.
    pub async fn pool(&self, name: &str, spec: Value) -> Result<IPPool> {
        let group = name.split('-').next().unwrap_or(name);
        let mut whole = json!({
            "allocationMode": "NodeCIDR",
            "nodeSelector": {"matchLabels": {GROUP: group}},
        });
        if let (Some(whole), Value::Object(spec)) = (whole.as_object_mut(), spec) {
            whole.extend(spec);
        }
        let pool = serde_json::from_value(json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool",
            "metadata": {"name": name}, "spec": whole,
        }))?;
        let created = self.pools.create(&PostParams::default(), &pool).await;
        created.with_context(|| format!("cannot create pool {name}"))
    }

    /// Creates a pool that allocates blocks. Its group and defaults are those of [`Fixtures::pool`].
    pub async fn block_pool(&self, name: &str, mut spec: Value) -> Result<IPPool> {
        spec["allocationMode"] = json!("Blocks");
        self.pool(name, spec).await
    }

    /// Changes the spec of a pool by a merge patch with `spec`.
    pub async fn change_pool(&self, name: &str, spec: Value) -> Result<IPPool> {
        merge(&self.pools, name, json!({ "spec": spec })).await
    }

    /// Changes the spec of a pool by a merge patch with `spec`, and waits until the controller has read the change.
    /// Then `observedGeneration` in the pool's status is the pool's new generation.
    pub async fn change_pool_observed(&self, name: &str, spec: Value) -> Result<IPPool> {
        let generation = self.change_pool(name, spec).await?.metadata.generation;
        self.pool_until(name, "the change is observed", |it| {
            it.status.as_ref().and_then(|it| it.observed_generation) == generation
        })
        .await
    }

    /// Deletes a pool. The controller's finalizer keeps the object while ranges of the pool are in use.
    pub async fn delete_pool(&self, name: &str) -> Result<()> {
        let deleted = self.pools.delete(name, &DeleteParams::default()).await;
        deleted.with_context(|| format!("cannot delete pool {name}"))?;
        Ok(())
    }

    /// Creates a node whose label [`GROUP`] is `group`, so that the pools of this group select the node.
    pub async fn node(&self, group: &str, name: &str) -> Result<Node> {
        self.create_node(node_of_group(group, name)).await
    }

    /// Creates a node whose label [`GROUP`] is `group`. Waits until the node has podCIDRs, and returns them.
    pub async fn served_node(&self, group: &str, name: &str) -> Result<Vec<String>> {
        self.node(group, name).await?;
        self.served(name).await
    }

    /// Creates a node for which no podCIDR is free, and returns the message of the event that reports this.
    pub async fn waiting_node(&self, group: &str, name: &str) -> Result<String> {
        let node = self.node(group, name).await?;
        self.event_about(&node, "WaitingForPodCIDR").await
    }

    /// Creates a node with the metadata, spec and status of `node`.
    pub async fn create_node(&self, node: Node) -> Result<Node> {
        let name = node.name_any();
        let created = self.nodes.create(&PostParams::default(), &node).await;
        created.with_context(|| format!("cannot create node {name}"))
    }

    /// Deletes a node. The object remains until all its finalizers are removed.
    pub async fn delete_node(&self, name: &str) -> Result<()> {
        let deleted = self.nodes.delete(name, &DeleteParams::default()).await;
        deleted.with_context(|| format!("cannot delete node {name}"))?;
        Ok(())
    }

    /// Changes a node by the merge patch `change`.
    pub async fn change_node(&self, name: &str, change: Value) -> Result<Node> {
        merge(&self.nodes, name, change).await
    }

    /// Changes a NodeSubnet by the merge patch `change`.
    pub async fn change_subnet(&self, name: &str, change: Value) -> Result<NodeSubnet> {
        merge(&self.subnets, name, change).await
    }

    /// Creates a pod on a node and writes `addresses` to the pod's status, as a kubelet does.
    pub async fn pod(&self, name: &str, node: &str, addresses: &[&str]) -> Result<Pod> {
        let pod = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
        }))?;
        self.pods.create(&PostParams::default(), &pod).await?;
        self.report_addresses(name, addresses).await
    }

    /// Writes the addresses of a pod to its status, as a kubelet does.
    pub async fn report_addresses(&self, pod: &str, addresses: &[&str]) -> Result<Pod> {
        let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let status = json!({"status": {
            "phase": "Running", "podIP": addresses.first(), "podIPs": ips,
        }});
        let patch = Patch::Merge(status);
        let params = PatchParams::default();
        Ok(self.pods.patch_status(pod, &params, &patch).await?)
    }

    /// Deletes a pod without a grace period, as a kubelet does once the containers have ended.
    pub async fn delete_pod(&self, name: &str) -> Result<()> {
        let at_once = DeleteParams::default().grace_period(0);
        self.pods.delete(name, &at_once).await?;
        Ok(())
    }

    /// Waits until a node has podCIDRs and returns them.
    pub async fn served(&self, name: &str) -> Result<Vec<String>> {
        let what = format!("node {name} has podCIDRs");
        until(&what, LIMIT, async || {
            let node = self.nodes.get(name).await?;
            let cidrs = nodes::pod_cidrs(&node).to_vec();
            ensure!(!cidrs.is_empty(), self.explain(&node).await?);
            Ok(Some(cidrs))
        })
        .await
    }

    async fn explain(&self, node: &Node) -> Result<String> {
        let uid = node.uid().unwrap_or_default();
        let events = self.events_of(&uid).await?;
        let notes: Vec<String> = events.iter().filter_map(|it| it.message.clone()).collect();
        Ok(format!("it has none; its events: {notes:?}"))
    }

    /// Returns the podCIDRs that a node has now, without waiting. The result is empty if the node has none.
    pub async fn pod_cidrs(&self, name: &str) -> Result<Vec<String>> {
        Ok(nodes::pod_cidrs(&self.nodes.get(name).await?).to_vec())
    }

    /// Waits until the function `is` returns true for a pool. If the wait fails, the error contains `what`, which
    /// describes the condition.
    pub async fn pool_until(
        &self,
        name: &str,
        what: &str,
        is: impl Fn(&IPPool) -> bool,
    ) -> Result<IPPool> {
        object_until(&self.pools, name, &format!("pool {name}: {what}"), is).await
    }

    /// Waits until the condition `kind` of a pool has this status (`True`, `False`), and returns the condition.
    pub async fn condition(&self, pool: &str, kind: &str, status: &str) -> Result<Condition> {
        let what = format!("condition {kind} is {status}");
        let is = |pool: &IPPool| condition(pool, kind).is_some_and(|it| it.status == status);
        let pool = self.pool_until(pool, &what, is).await?;
        condition(&pool, kind)
            .cloned()
            .context("the condition is gone")
    }

    /// Waits until the function `is` returns true for a NodeSubnet. If the wait fails, the error contains `what`, which
    /// describes the condition.
    pub async fn subnet_until(
        &self,
        name: &str,
        what: &str,
        is: impl Fn(&NodeSubnet) -> bool,
    ) -> Result<NodeSubnet> {
        let what = format!("NodeSubnet {name}: {what}");
        object_until(&self.subnets, name, &what, is).await
    }

    /// Waits until the NodeSubnet lists the node's podCIDRs.
    pub async fn recorded(&self, node: &str) -> Result<NodeSubnet> {
        let is_recorded = |it: &NodeSubnet| !it.spec.pod_cidrs.is_empty();
        self.subnet_until(node, "lists podCIDRs", is_recorded).await
    }

    /// Writes the status of a NodeSubnet, as an agent does.
    pub async fn write_status(&self, node: &str, status: Value) -> Result<()> {
        let patch = Patch::Merge(json!({"status": status}));
        let params = PatchParams::default();
        self.subnets.patch_status(node, &params, &patch).await?;
        Ok(())
    }

    /// Waits until the status of a NodeSubnet reports `count` addresses in use.
    pub async fn in_use(&self, node: &str, count: i64) -> Result<NodeSubnet> {
        let what = format!("reports {count} addresses in use");
        self.status_until(node, &what, |status| {
            let used = status.blocks.iter().map(|it| it.used);
            used.sum::<i64>() == count
        })
        .await
    }

    /// Waits until the function `is` returns true for the status of a NodeSubnet. If the wait fails, the error contains
    /// `what`, which describes the condition.
    pub async fn status_until(
        &self,
        node: &str,
        what: &str,
        is: impl Fn(&NodeSubnetStatus) -> bool,
    ) -> Result<NodeSubnet> {
        self.subnet_until(node, what, |it| it.status.as_ref().is_some_and(&is))
            .await
    }

    /// Makes the agents of a pool's nodes demand `low` free addresses. The pool's `high` becomes so large that agents
    /// release only blocks that are recalled.
    pub async fn keep_free(&self, pool: &str, low: u32) -> Result<IPPool> {
        self.change_pool(pool, json!({"warm": {"low": low, "high": 65_536}}))
            .await
    }

    /// Waits until a NodeSubnet lists `count` blocks, and returns their CIDRs sorted as text.
    pub async fn listed(&self, node: &str, count: usize) -> Result<Vec<String>> {
        let what = format!("lists {count} blocks");
        let subnet = self
            .subnet_until(node, &what, |it| it.spec.blocks.len() == count)
            .await?;
        let mut cidrs: Vec<String> = subnet.spec.blocks.into_iter().map(|it| it.cidr).collect();
        cidrs.sort();
        Ok(cidrs)
    }

    /// Waits until the function `is` returns true for the IPAMBlock of a CIDR. If the wait fails, the error contains
    /// `what`, which describes the condition.
    pub async fn block_until(
        &self,
        cidr: &str,
        what: &str,
        is: impl Fn(&IPAMBlock) -> bool,
    ) -> Result<IPAMBlock> {
        let what = format!("block {cidr}: {what}");
        object_until(&self.blocks, &block_name(cidr), &what, is).await
    }

    /// Waits until no IPAMBlock exists for a CIDR.
    pub async fn block_gone(&self, cidr: &str) -> Result<()> {
        gone(&self.blocks, &block_name(cidr)).await
    }

    /// Returns the CIDRs of all blocks of a pool, sorted as text.
    pub async fn blocks_of(&self, pool: &str) -> Result<Vec<String>> {
        let params = ListParams::default().fields(&format!("spec.pool={pool}"));
        let blocks = self.blocks.list(&params).await?;
        let mut cidrs: Vec<String> = blocks.items.into_iter().map(|it| it.spec.cidr).collect();
        cidrs.sort();
        Ok(cidrs)
    }

    /// Waits until no NodeSubnet with this name exists.
    pub async fn subnet_gone(&self, name: &str) -> Result<()> {
        gone(&self.subnets, name).await
    }

    /// Returns all events about the object with this UID.
    pub async fn events_of(&self, uid: &str) -> Result<Vec<Event>> {
        let params = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
        let events = Api::<Event>::default_namespaced(self.client.clone());
        Ok(events.list(&params).await?.items)
    }

    /// Returns how many events with this reason were emitted for the object. A series of n events counts as n.
    pub async fn event_count(&self, uid: &str, reason: &str) -> Result<i32> {
        let events = self.events_of(uid).await?;
        let of_reason = events
            .iter()
            .filter(|it| it.reason.as_deref() == Some(reason));
        Ok(of_reason
            .map(|it| it.series.as_ref().and_then(|it| it.count).unwrap_or(1))
            .sum())
    }

    /// Waits for an event with this reason about the object, and returns the event's message.
    pub async fn event_about(&self, object: &impl kube::Resource, reason: &str) -> Result<String> {
        let uid = object.meta().uid.as_deref().context("it has no UID")?;
        self.event(uid, reason).await
    }

    /// Waits for an event with this reason about the object with this UID, and returns the event's message.
    pub async fn event(&self, uid: &str, reason: &str) -> Result<String> {
        until(&format!("event {reason} about {uid}"), LIMIT, async || {
            let events = self.events_of(uid).await?;
            let found = events
                .iter()
                .find(|it| it.reason.as_deref() == Some(reason));
            let found = found.ok_or_else(|| anyhow!("{events:?}"))?;
            Ok(Some(found.message.clone().unwrap_or_default()))
        })
        .await
    }
}

/// Returns the name of the IPAMBlock for a CIDR.
pub fn block_name(cidr: &str) -> String {
    cidr.replace(['.', ':', '/'], "-")
}

async fn merge<K>(api: &Api<K>, name: &str, change: Value) -> Result<K>
where
    K: Clone + DeserializeOwned + Debug,
{
    let (params, patch) = (PatchParams::default(), Patch::Merge(change));
    let changed = api.patch(name, &params, &patch).await;
    changed.with_context(|| format!("cannot change {name}"))
}

async fn object_until<K>(api: &Api<K>, name: &str, what: &str, is: impl Fn(&K) -> bool) -> Result<K>
where
    K: Clone + DeserializeOwned + Debug,
{
    until(what, LIMIT, async || {
        let object = api.get(name).await?;
        ensure!(is(&object), "{object:?}");
        Ok(Some(object))
    })
    .await
}

/// Waits until no object with this name exists.
pub async fn gone<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Clone + DeserializeOwned + Debug,
{
    until(&format!("{name} is gone"), LIMIT, async || {
        let found = api.get_opt(name).await?;
        ensure!(found.is_none(), "{found:?}");
        Ok(Some(()))
    })
    .await
}

/// Returns the condition of type `kind` in the status of a pool.
pub fn condition<'a>(pool: &'a IPPool, kind: &str) -> Option<&'a Condition> {
    let conditions = &pool.status.as_ref()?.conditions;
    conditions.iter().find(|it| it.type_ == kind)
}

/// Returns a minimal Node whose label [`GROUP`] is `group`, so that the pools of this group select the node.
pub fn node_of_group(group: &str, name: &str) -> Node {
    labelled(nodes::node(name, "192.0.2.1"), &[(GROUP, group)])
}

/// Adds labels to a node, and replaces labels with the same keys.
pub fn labelled(mut node: Node, labels: &[(&str, &str)]) -> Node {
    let all = node.metadata.labels.get_or_insert_default();
    all.extend(
        labels
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned())),
    );
    node
}

/// Sets the podCIDRs of a node, as a kubelet or a foreign allocator may do before Cadastre observes the node.
pub fn with_pod_cidrs(mut node: Node, cidrs: &[&str]) -> Node {
    let spec = node.spec.get_or_insert_default();
    spec.pod_cidr = cidrs.first().map(ToString::to_string);
    spec.pod_cidrs = Some(cidrs.iter().map(ToString::to_string).collect());
    node
}
