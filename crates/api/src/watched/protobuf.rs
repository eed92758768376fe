//! Reads Nodes and Pods that the API server has encoded as protobuf.
//!
//! The messages here have only the fields that [`super`] has. The numbers of the fields are those of `generated.proto`
//! in k8s.io/api/core/v1 and k8s.io/apimachinery/pkg/apis/meta/v1, which never change.
//!
//! # Guarantees
//! - An object is the same, whether it came as JSON or as protobuf. An empty text counts as absent, because the API
//!   server leaves it out of JSON and writes it as protobuf.
//! - Texts need not be valid UTF-8: a kubelet can store such texts, and one Node must not make the whole list fail. As in
//!   JSON, U+FFFD replaces what is invalid.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use prost::{DecodeError, Message};

use super::{
    NodeAddressLite, NodeCapacityLite, NodeConditionLite, NodeInfoLite, NodeLite, NodeLiteSpec,
    NodeLiteStatus, PodIpLite, PodLite, PodLiteSpec, PodLiteStatus, TaintLite, TolerationLite,
};

/// A text that may be invalid UTF-8
type RawText = Vec<u8>;

/// Reads a Node (`v1.Node`).
pub fn node(bytes: &[u8]) -> Result<NodeLite, DecodeError> {
    let node = NodeMessage::decode(bytes)?;
    Ok(NodeLite {
        metadata: node.metadata.unwrap_or_default().read(),
        spec: node.spec.map(NodeSpecMessage::read),
        status: node.status.map(NodeStatusMessage::read),
    })
}

/// Reads a Pod (`v1.Pod`).
pub fn pod(bytes: &[u8]) -> Result<PodLite, DecodeError> {
    let pod = PodMessage::decode(bytes)?;
    Ok(PodLite {
        metadata: pod.metadata.unwrap_or_default().read(),
        spec: pod.spec.map(PodSpecMessage::read),
        status: pod.status.map(PodStatusMessage::read),
    })
}

#[derive(Message)]
struct NodeMessage {
    #[prost(message, optional, tag = "1")]
    metadata: Option<MetaMessage>,
    #[prost(message, optional, tag = "2")]
    spec: Option<NodeSpecMessage>,
    #[prost(message, optional, tag = "3")]
    status: Option<NodeStatusMessage>,
}

#[derive(Message)]
struct NodeSpecMessage {
    #[prost(bytes = "vec", tag = "1")]
    pod_cidr: RawText,
    #[prost(bytes = "vec", tag = "3")]
    provider_id: RawText,
    #[prost(message, repeated, tag = "5")]
    taints: Vec<TaintMessage>,
    #[prost(bytes = "vec", repeated, tag = "7")]
    pod_cidrs: Vec<RawText>,
}

impl NodeSpecMessage {
    fn read(self) -> NodeLiteSpec {
        let taints = self.taints.into_iter().map(TaintMessage::read);
        NodeLiteSpec {
            pod_cidr: optional(self.pod_cidr),
            pod_cidrs: some(self.pod_cidrs.into_iter().map(text).collect()),
            provider_id: optional(self.provider_id),
            taints: some(taints.collect()),
        }
    }
}

#[derive(Message)]
struct TaintMessage {
    #[prost(bytes = "vec", tag = "1")]
    key: RawText,
    #[prost(bytes = "vec", tag = "2")]
    value: RawText,
    #[prost(bytes = "vec", tag = "3")]
    effect: RawText,
    #[prost(message, optional, tag = "4")]
    time_added: Option<TimeMessage>,
}

impl TaintMessage {
    fn read(self) -> TaintLite {
        let added = self.time_added.and_then(TimeMessage::read);
        TaintLite {
            key: text(self.key),
            value: optional(self.value),
            effect: text(self.effect),
            time_added: added.map(|at| at.0.to_string()),
        }
    }
}

#[derive(Message)]
struct NodeStatusMessage {
    #[prost(message, repeated, tag = "1")]
    capacity: Vec<Quantity>,
    #[prost(message, repeated, tag = "4")]
    conditions: Vec<ConditionMessage>,
    #[prost(message, repeated, tag = "5")]
    addresses: Vec<AddressMessage>,
    #[prost(message, optional, tag = "7")]
    node_info: Option<NodeInfoMessage>,
}

impl NodeStatusMessage {
    fn read(self) -> NodeLiteStatus {
        let pods = self.capacity.iter().rfind(|it| it.name == b"pods");
        let pods = pods.and_then(|it| it.quantity.as_ref());
        let conditions = self.conditions.into_iter();
        let addresses = self.addresses.into_iter();
        NodeLiteStatus {
            addresses: some(addresses.map(AddressMessage::read).collect()),
            node_info: self.node_info.map(|info| NodeInfoLite {
                machine_id: text(info.machine_id),
            }),
            conditions: some(conditions.map(ConditionMessage::read).collect()),
            capacity: (!self.capacity.is_empty()).then(|| NodeCapacityLite {
                pods: pods.map(|it| text(it.text.clone())),
            }),
        }
    }
}

/// An entry of the map `status.capacity`
#[derive(Message)]
struct Quantity {
    #[prost(bytes = "vec", tag = "1")]
    name: RawText,
    #[prost(message, optional, tag = "2")]
    quantity: Option<QuantityMessage>,
}

#[derive(Message)]
struct QuantityMessage {
    #[prost(bytes = "vec", tag = "1")]
    text: RawText,
}

#[derive(Message)]
struct ConditionMessage {
    #[prost(bytes = "vec", tag = "1")]
    r#type: RawText,
    #[prost(bytes = "vec", tag = "2")]
    status: RawText,
    #[prost(bytes = "vec", tag = "6")]
    message: RawText,
}

impl ConditionMessage {
    fn read(self) -> NodeConditionLite {
        NodeConditionLite {
            type_: text(self.r#type),
            status: text(self.status),
            message: optional(self.message),
        }
    }
}

#[derive(Message)]
struct AddressMessage {
    #[prost(bytes = "vec", tag = "1")]
    r#type: RawText,
    #[prost(bytes = "vec", tag = "2")]
    address: RawText,
}

impl AddressMessage {
    fn read(self) -> NodeAddressLite {
        NodeAddressLite {
            type_: text(self.r#type),
            address: text(self.address),
        }
    }
}

#[derive(Message)]
struct NodeInfoMessage {
    #[prost(bytes = "vec", tag = "1")]
    machine_id: RawText,
}

#[derive(Message)]
struct PodMessage {
    #[prost(message, optional, tag = "1")]
    metadata: Option<MetaMessage>,
    #[prost(message, optional, tag = "2")]
    spec: Option<PodSpecMessage>,
    #[prost(message, optional, tag = "3")]
    status: Option<PodStatusMessage>,
}

#[derive(Message)]
struct PodSpecMessage {
    #[prost(bytes = "vec", tag = "10")]
    node_name: RawText,
    #[prost(bool, optional, tag = "11")]
    host_network: Option<bool>,
    #[prost(message, repeated, tag = "22")]
    tolerations: Vec<TolerationMessage>,
}

impl PodSpecMessage {
    fn read(self) -> PodLiteSpec {
        let tolerations = self.tolerations.into_iter();
        PodLiteSpec {
            node_name: optional(self.node_name),
            host_network: self.host_network.filter(|is| *is),
            tolerations: some(tolerations.map(TolerationMessage::read).collect()),
        }
    }
}

#[derive(Message)]
struct TolerationMessage {
    #[prost(bytes = "vec", tag = "1")]
    key: RawText,
    #[prost(bytes = "vec", tag = "4")]
    effect: RawText,
}

impl TolerationMessage {
    fn read(self) -> TolerationLite {
        TolerationLite {
            key: text(self.key),
            effect: text(self.effect),
        }
    }
}

#[derive(Message)]
struct PodStatusMessage {
    #[prost(bytes = "vec", tag = "1")]
    phase: RawText,
    #[prost(bytes = "vec", tag = "6")]
    pod_ip: RawText,
    #[prost(message, repeated, tag = "12")]
    pod_ips: Vec<PodIpMessage>,
}

impl PodStatusMessage {
    fn read(self) -> PodLiteStatus {
        let ips = self
            .pod_ips
            .into_iter()
            .map(|it| PodIpLite { ip: text(it.ip) });
        PodLiteStatus {
            phase: optional(self.phase),
            pod_ips: some(ips.collect()),
            pod_ip: optional(self.pod_ip),
        }
    }
}

#[derive(Message)]
struct PodIpMessage {
    #[prost(bytes = "vec", tag = "1")]
    ip: RawText,
}

#[derive(Message)]
struct MetaMessage {
    #[prost(bytes = "vec", tag = "1")]
    name: RawText,
    #[prost(bytes = "vec", tag = "3")]
    namespace: RawText,
    #[prost(bytes = "vec", tag = "5")]
    uid: RawText,
    #[prost(bytes = "vec", tag = "6")]
    resource_version: RawText,
    #[prost(int64, tag = "7")]
    generation: i64,
    #[prost(message, optional, tag = "8")]
    creation_timestamp: Option<TimeMessage>,
    #[prost(message, optional, tag = "9")]
    deletion_timestamp: Option<TimeMessage>,
    #[prost(message, repeated, tag = "11")]
    labels: Vec<TextEntry>,
    #[prost(message, repeated, tag = "12")]
    annotations: Vec<TextEntry>,
    #[prost(message, repeated, tag = "13")]
    owner_references: Vec<OwnerMessage>,
    #[prost(bytes = "vec", repeated, tag = "14")]
    finalizers: Vec<RawText>,
    /// Only whether there are any is read
    #[prost(message, repeated, tag = "17")]
    managed_fields: Vec<Unread>,
}

impl MetaMessage {
    fn read(self) -> ObjectMeta {
        let owners = self.owner_references.into_iter();
        ObjectMeta {
            name: optional(self.name),
            namespace: optional(self.namespace),
            uid: optional(self.uid),
            resource_version: optional(self.resource_version),
            generation: Some(self.generation).filter(|number| *number != 0),
            labels: map(self.labels),
            annotations: map(self.annotations),
            finalizers: some(self.finalizers.into_iter().map(text).collect()),
            owner_references: some(owners.map(OwnerMessage::read).collect()),
            creation_timestamp: self.creation_timestamp.and_then(TimeMessage::read),
            deletion_timestamp: self.deletion_timestamp.and_then(TimeMessage::read),
            managed_fields: (!self.managed_fields.is_empty()).then(Vec::new),
            ..ObjectMeta::default()
        }
    }
}

/// An entry of a map of texts
#[derive(Message)]
struct TextEntry {
    #[prost(bytes = "vec", tag = "1")]
    key: RawText,
    #[prost(bytes = "vec", tag = "2")]
    value: RawText,
}

#[derive(Message)]
struct OwnerMessage {
    #[prost(bytes = "vec", tag = "1")]
    kind: RawText,
    #[prost(bytes = "vec", tag = "3")]
    name: RawText,
    #[prost(bytes = "vec", tag = "4")]
    uid: RawText,
    #[prost(bytes = "vec", tag = "5")]
    api_version: RawText,
    #[prost(bool, optional, tag = "6")]
    controller: Option<bool>,
    #[prost(bool, optional, tag = "7")]
    block_owner_deletion: Option<bool>,
}

impl OwnerMessage {
    fn read(self) -> OwnerReference {
        OwnerReference {
            api_version: text(self.api_version),
            block_owner_deletion: self.block_owner_deletion,
            controller: self.controller,
            kind: text(self.kind),
            name: text(self.name),
            uid: text(self.uid),
        }
    }
}

/// A time since 1970 in whole seconds, as the API server keeps it; empty if no time is set
#[derive(Message)]
struct TimeMessage {
    #[prost(int64, optional, tag = "1")]
    seconds: Option<i64>,
}

impl TimeMessage {
    /// Returns the time, or the nearest one that can be represented.
    fn read(self) -> Option<Time> {
        let seconds = self.seconds?;
        let nearest = || {
            if seconds < 0 {
                Timestamp::MIN
            } else {
                Timestamp::MAX
            }
        };
        Some(Time(
            Timestamp::from_second(seconds).unwrap_or_else(|_| nearest()),
        ))
    }
}

/// A message whose fields are skipped
#[derive(Message)]
struct Unread {}

fn text(bytes: RawText) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// Returns a text, or `None` if it is empty.
fn optional(bytes: RawText) -> Option<String> {
    some(bytes).map(text)
}

/// Returns a list, or `None` if it is empty.
fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn map(entries: Vec<TextEntry>) -> Option<BTreeMap<String, String>> {
    let entries = entries.into_iter().map(|it| (text(it.key), text(it.value)));
    some(entries.collect::<Vec<_>>()).map(BTreeMap::from_iter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(message: &[u8]) -> ConditionMessage {
        ConditionMessage {
            r#type: b"Ready".to_vec(),
            status: b"True".to_vec(),
            message: message.to_vec(),
        }
    }

    #[test]
    fn a_text_that_is_not_utf_8_is_read_as_in_json() {
        let status = NodeStatusMessage {
            conditions: vec![condition(b"a\xffb")],
            ..NodeStatusMessage::default()
        };
        let message = NodeMessage {
            status: Some(status),
            ..NodeMessage::default()
        };
        let read = node(&message.encode_to_vec()).unwrap();
        let conditions = read.status.unwrap().conditions.unwrap();
        assert_eq!(conditions[0].message.as_deref(), Some("a\u{fffd}b"));
    }

    #[test]
    fn what_is_empty_is_absent() {
        let message = NodeMessage {
            metadata: Some(MetaMessage::default()),
            spec: Some(NodeSpecMessage {
                taints: vec![TaintMessage::default()],
                ..NodeSpecMessage::default()
            }),
            status: Some(NodeStatusMessage {
                conditions: vec![condition(b"")],
                ..NodeStatusMessage::default()
            }),
        };
        let read = node(&message.encode_to_vec()).unwrap();
        assert_eq!(read.metadata, ObjectMeta::default());
        let (spec, status) = (read.spec.unwrap(), read.status.unwrap());
        assert!(spec.pod_cidr.is_none() && spec.pod_cidrs.is_none() && spec.provider_id.is_none());
        let taint = &spec.taints.unwrap()[0];
        assert!(taint.value.is_none() && taint.time_added.is_none());
        assert!(status.conditions.unwrap()[0].message.is_none());
        assert!(status.addresses.is_none() && status.capacity.is_none());
        let read = pod(&[]).unwrap();
        assert!(read.spec.is_none() && read.status.is_none());
    }

    #[test]
    fn a_time_out_of_range_does_not_hide_an_object() {
        for (seconds, nearest) in [(i64::MAX, Timestamp::MAX), (i64::MIN, Timestamp::MIN)] {
            let time = TimeMessage {
                seconds: Some(seconds),
            };
            assert_eq!(time.read(), Some(Time(nearest)));
        }
    }
}
