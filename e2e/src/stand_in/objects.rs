//! The objects of a [`super::StandIn`], and what changes them.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hyper::body::Bytes;
use prost::Message;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::recorded::{Envelope, MAGIC, ObjectMessage, Recorded};
use super::{Size, node_name, pod_cidr};

pub(super) const NODES: &str = "/api/v1/nodes";
pub(super) const PODS: &str = "/api/v1/pods";

pub(super) struct Objects {
    recorded: Recorded,
    size: Size,
    inner: Mutex<Inner>,
    /// Wakes watches after a change
    pub(super) changed: Notify,
}

#[derive(Default)]
struct Inner {
    version: u64,
    nodes: Vec<NodeState>,
    /// By the path of the collection, then by name
    others: HashMap<String, BTreeMap<String, Value>>,
    /// By the path of the collection: the changes as frames of a watch, each with its version
    changes: HashMap<String, Vec<(u64, Bytes)>>,
    requests: BTreeMap<String, u32>,
}

#[derive(Clone)]
struct NodeState {
    version: u64,
    pod_cidr: Option<String>,
    /// The annotation with the term
    term: Option<String>,
}

/// Which page of a list is asked for.
pub(super) struct PageRequest {
    /// The version of the first page; `None` if this is the first page
    pub(super) version: Option<u64>,
    /// The number of objects on the pages before
    pub(super) from: usize,
    /// The maximum number of objects on the page
    pub(super) limit: usize,
}

impl PageRequest {
    /// Returns the number of objects on the pages up to this one, if there are `count` in all.
    fn end(&self, count: usize) -> usize {
        count.min(self.from.saturating_add(self.limit))
    }
}

/// A page of a list.
pub(super) struct Page {
    pub(super) version: u64,
    /// The token of the next page; empty on the last page
    pub(super) next: String,
    pub(super) items: Vec<Bytes>,
}

#[derive(Message)]
struct Meta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "5")]
    uid: String,
    #[prost(string, tag = "6")]
    resource_version: String,
    #[prost(message, repeated, tag = "12")]
    annotations: Vec<Entry>,
}

#[derive(Message)]
struct Entry {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Message)]
struct NodeSpec {
    #[prost(string, optional, tag = "1")]
    pod_cidr: Option<String>,
    #[prost(string, tag = "3")]
    provider_id: String,
    #[prost(string, repeated, tag = "7")]
    pod_cidrs: Vec<String>,
}

#[derive(Message)]
struct PodSpec {
    #[prost(string, tag = "10")]
    node_name: String,
}

#[derive(Message)]
struct PodStatus {
    #[prost(string, tag = "6")]
    pod_ip: String,
    #[prost(message, repeated, tag = "12")]
    pod_ips: Vec<PodIp>,
}

#[derive(Message)]
struct PodIp {
    #[prost(string, tag = "1")]
    ip: String,
}

#[derive(Message)]
struct Event {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(message, optional, tag = "2")]
    object: Option<Raw>,
}

#[derive(Message)]
struct Raw {
    #[prost(bytes = "vec", tag = "1")]
    raw: Vec<u8>,
}

const TERM: &str = cadastre_api::TERM_ANNOTATION;

fn name_of(i: usize) -> String {
    node_name(u32::try_from(i).unwrap_or(u32::MAX))
}

/// Returns a UID for the `i`-th object of a kind.
fn uid(kind: u16, i: usize) -> String {
    format!("00000000-0000-4000-{kind:04x}-{i:012x}")
}

/// Returns a UID for the `i`-th Pod. UIDs of real Pods have no order either.
fn random_uid(i: usize) -> String {
    let mut random = fastrand::Rng::with_seed(i as u64);
    let (high, low) = (random.u64(..), random.u64(..));
    let (first, second, third) = (high >> 32, high >> 16 & 0xffff, high & 0x0fff);
    let (fourth, last) = (low >> 48 & 0x3fff | 0x8000, low & 0xffff_ffff_ffff);
    format!("{first:08x}-{second:04x}-4{third:03x}-{fourth:04x}-{last:012x}")
}

impl Objects {
    pub(super) fn new(recorded: Recorded, size: Size) -> Self {
        let nodes = (0..size.nodes).map(|i| NodeState {
            version: 1,
            pod_cidr: Some(pod_cidr(i)),
            term: None,
        });
        let inner = Inner {
            version: 1,
            nodes: nodes.collect(),
            ..Inner::default()
        };
        Objects {
            recorded,
            size,
            inner: Mutex::new(inner),
            changed: Notify::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count_request(&self, what: String) {
        *self.inner().requests.entry(what).or_default() += 1;
    }

    pub(super) fn take_requests(&self) -> String {
        let requests = std::mem::take(&mut self.inner().requests);
        let texts = requests.into_iter().map(|(what, n)| format!("{n} {what}"));
        texts.collect::<Vec<_>>().join(", ")
    }

    pub(super) fn version(&self) -> u64 {
        self.inner().version
    }

    pub(super) fn count(&self, collection: &str) -> usize {
        self.inner().others.get(collection).map_or(0, BTreeMap::len)
    }

    pub(super) fn assigned(&self) -> usize {
        let inner = self.inner();
        inner
            .nodes
            .iter()
            .filter(|it| it.pod_cidr.is_some())
            .count()
    }

    pub(super) fn join(&self, count: u32) {
        let mut inner = self.inner();
        for _ in 0..count {
            inner.version += 1;
            let node = NodeState {
                version: inner.version,
                pod_cidr: None,
                term: None,
            };
            let i = inner.nodes.len();
            let frame = framed("ADDED", &self.node(i, &node));
            let version = node.version;
            inner.nodes.push(node);
            inner.changed(NODES, version, frame);
        }
        drop(inner);
        self.changed.notify_waiters();
    }

    /// Applies the patch that assigns podCIDRs. Returns the Node as JSON; `None` if there is no such Node.
    pub(super) fn assign(&self, name: &str, patch: &Value) -> Option<Bytes> {
        let i: usize = name.strip_prefix("node-")?.parse().ok()?;
        let mut inner = self.inner();
        let version = inner.version + 1;
        let node = inner.nodes.get_mut(i)?;
        let operations = patch.as_array().into_iter().flatten();
        for it in operations.filter(|it| it["op"] == "add") {
            match it["path"].as_str() {
                Some("/spec/podCIDR") => node.pod_cidr = it["value"].as_str().map(str::to_owned),
                Some("/spec/podCIDRs") => {}
                Some("/metadata/annotations") => {
                    node.term = it["value"][TERM].as_str().map(str::to_owned);
                }
                _ => node.term = it["value"].as_str().map(str::to_owned),
            }
        }
        node.version = version;
        let node = node.clone();
        let frame = framed("MODIFIED", &self.node(i, &node));
        inner.version = version;
        inner.changed(NODES, version, frame);
        drop(inner);
        self.changed.notify_waiters();
        Some(self.node_in_json(i, &node))
    }

    /// Returns a Node in protobuf.
    fn node(&self, i: usize, state: &NodeState) -> Vec<u8> {
        let term = state.term.iter().map(|term| Entry {
            key: TERM.to_owned(),
            value: term.clone(),
        });
        let metadata = Meta {
            name: name_of(i),
            uid: uid(1, i),
            resource_version: state.version.to_string(),
            annotations: term.collect(),
        };
        let spec = NodeSpec {
            pod_cidr: state.pod_cidr.clone(),
            provider_id: format!("stand-in://{i}"),
            pod_cidrs: state.pod_cidr.iter().cloned().collect(),
        };
        let node = &self.recorded.node;
        let node = ObjectMessage {
            metadata: [&node.metadata[..], &metadata.encode_to_vec()].concat(),
            spec: [&node.spec[..], &spec.encode_to_vec()].concat(),
            status: node.status.clone(),
        };
        node.encode_to_vec()
    }

    fn node_in_json(&self, i: usize, state: &NodeState) -> Bytes {
        let mut node = self.recorded.node_in_json.clone();
        let meta = &mut node["metadata"];
        (meta["name"], meta["uid"]) = (name_of(i).into(), uid(1, i).into());
        meta["resourceVersion"] = state.version.to_string().into();
        if let Some(term) = &state.term {
            meta["annotations"][TERM] = term.as_str().into();
        }
        node["spec"]["providerID"] = format!("stand-in://{i}").into();
        if let Some(cidr) = &state.pod_cidr {
            node["spec"]["podCIDR"] = cidr.as_str().into();
            node["spec"]["podCIDRs"] = json!([cidr]);
        }
        node.to_string().into()
    }

    /// Returns the `i`-th Pod in protobuf.
    fn pod(&self, i: u32) -> Vec<u8> {
        let (node, nth) = (i / self.size.pods_a_node, i % self.size.pods_a_node);
        let number = usize::try_from(i).unwrap_or_default();
        let metadata = Meta {
            name: format!("pod-{i:08}"),
            uid: random_uid(number),
            resource_version: "1".to_owned(),
            annotations: Vec::new(),
        };
        let node_name = node_name(node);
        let ip = Ipv4Addr::from(0x0A00_0000 + 64 * node + 1 + nth).to_string();
        let status = PodStatus {
            pod_ip: ip.clone(),
            pod_ips: vec![PodIp { ip }],
        };
        let pod = &self.recorded.pod;
        let spec = PodSpec { node_name };
        let pod = ObjectMessage {
            metadata: [&pod.metadata[..], &metadata.encode_to_vec()].concat(),
            spec: [&pod.spec[..], &spec.encode_to_vec()].concat(),
            status: [&pod.status[..], &status.encode_to_vec()].concat(),
        };
        pod.encode_to_vec()
    }

    /// Returns a page of Nodes or Pods in protobuf.
    pub(super) fn page(&self, collection: &str, asked: &PageRequest) -> Page {
        let inner = self.inner();
        let pods = self.size.nodes * self.size.pods_a_node;
        let is_of_nodes = collection == NODES;
        let count = if is_of_nodes {
            inner.nodes.len()
        } else {
            usize::try_from(pods).unwrap_or_default()
        };
        let end = asked.end(count);
        let nodes = inner
            .nodes
            .get(asked.from..end)
            .unwrap_or_default()
            .to_vec();
        let version = asked.version.unwrap_or(inner.version);
        drop(inner);
        let items = if is_of_nodes {
            let nodes = nodes.iter().enumerate();
            nodes
                .map(|(i, node)| self.node(asked.from + i, node).into())
                .collect()
        } else {
            let all = (asked.from..end).filter_map(|i| u32::try_from(i).ok());
            all.map(|i| self.pod(i).into()).collect()
        };
        page(version, end, count, items)
    }

    /// Returns a page of objects of another kind in JSON.
    pub(super) fn page_of_others(&self, collection: &str, asked: &PageRequest) -> Page {
        let inner = self.inner();
        let all = inner.others.get(collection);
        let count = all.map_or(0, BTreeMap::len);
        let end = asked.end(count);
        let items = all
            .into_iter()
            .flat_map(BTreeMap::values)
            .skip(asked.from)
            .take(asked.limit);
        let items = items.map(|it| it.to_string().into()).collect();
        page(asked.version.unwrap_or(inner.version), end, count, items)
    }

    pub(super) fn get(&self, collection: &str, name: &str) -> Option<Value> {
        self.inner().others.get(collection)?.get(name).cloned()
    }

    /// Stores a new object. Returns it as it is stored.
    pub(super) fn put(&self, collection: &str, mut object: Value) -> Value {
        let mut inner = self.inner();
        inner.version += 1;
        let version = inner.version;
        let meta = &mut object["metadata"];
        meta["uid"] = uid(3, usize::try_from(version).unwrap_or_default()).into();
        meta["resourceVersion"] = version.to_string().into();
        meta["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
        meta["generation"] = 1.into();
        let name = meta["name"].as_str().unwrap_or_default().to_owned();
        let of_kind = inner.others.entry(collection.to_owned()).or_default();
        of_kind.insert(name, object.clone());
        inner.changed(collection, version, line("ADDED", &object));
        drop(inner);
        self.changed.notify_waiters();
        object
    }

    /// Changes an object. Returns it as it is stored, or `None` if there is no such object. `change` returns whether the
    /// change is valid.
    pub(super) fn change(
        &self,
        collection: &str,
        name: &str,
        change: impl FnOnce(&mut Value) -> bool,
    ) -> Option<Result<Value, ()>> {
        let mut inner = self.inner();
        let version = inner.version + 1;
        let object = inner.others.get_mut(collection)?.get_mut(name)?;
        let mut changed = object.clone();
        if !change(&mut changed) {
            return Some(Err(()));
        }
        changed["metadata"]["resourceVersion"] = version.to_string().into();
        *object = changed.clone();
        inner.version = version;
        inner.changed(collection, version, line("MODIFIED", &changed));
        drop(inner);
        self.changed.notify_waiters();
        Some(Ok(changed))
    }

    /// Returns the changes after a version as frames of a watch, and the version of the last of them.
    pub(super) fn changes(&self, collection: &str, after: u64) -> (u64, Vec<Bytes>) {
        let inner = self.inner();
        let all = inner.changes.get(collection).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|(version, _)| *version <= after);
        let last = all.last().map_or(after, |(version, _)| after.max(*version));
        (
            last,
            all[first..]
                .iter()
                .map(|(_, frame)| frame.clone())
                .collect(),
        )
    }

    /// Returns a bookmark of the present version as a frame of a watch.
    pub(super) fn bookmark(&self, collection: &str) -> (u64, Bytes) {
        let version = self.version();
        let frame = if collection == NODES || collection == PODS {
            let metadata = Meta {
                resource_version: version.to_string(),
                ..Meta::default()
            };
            let object = ObjectMessage {
                metadata: metadata.encode_to_vec(),
                ..ObjectMessage::default()
            };
            framed("BOOKMARK", &object.encode_to_vec())
        } else {
            let object = json!({"kind": "", "apiVersion": "", "metadata": {"resourceVersion": version.to_string()}});
            line("BOOKMARK", &object)
        };
        (version, frame)
    }
}

impl Inner {
    fn changed(&mut self, collection: &str, version: u64, frame: Bytes) {
        let changes = self.changes.entry(collection.to_owned()).or_default();
        changes.push((version, frame));
    }
}

fn page(version: u64, end: usize, count: usize, items: Vec<Bytes>) -> Page {
    let next = (end < count).then(|| format!("{version}-{end}"));
    Page {
        version,
        next: next.unwrap_or_default(),
        items,
    }
}

/// Returns an event of a watch in protobuf.
fn framed(kind: &str, object: &[u8]) -> Bytes {
    let envelope = Envelope {
        type_meta: None,
        raw: object.to_vec(),
    };
    let raw = [MAGIC, &envelope.encode_to_vec()].concat();
    let event = Event {
        kind: kind.to_owned(),
        object: Some(Raw { raw }),
    };
    let event = event.encode_to_vec();
    let length = u32::try_from(event.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&length[..], &event].concat().into()
}

/// Returns an event of a watch in JSON.
fn line(kind: &str, object: &Value) -> Bytes {
    let mut text = json!({"type": kind, "object": object}).to_string();
    text.push('\n');
    text.into()
}
