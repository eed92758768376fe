//! Rules that must hold at every revision of etcd.
//!
//! 1. The podCIDRs of two Nodes never overlap.
//! 2. Two pods that are not being deleted never report the same address.
//! 3. Two IPAMBlocks overlap only if one of them names the other as its parent.
//! 4. While a pod is not being deleted and its Node exists, its addresses are in podCIDRs or IPAMBlocks of this node.
//! 5. Two NodeSubnets never list the same block.
//! 6. An IPAMBlock is not deleted while a NodeSubnet lists it for a Node that exists.
//!
//! # Caveats
//! Rules 2 and 4 hold for pods that report an address only after the address was assigned, and release it only when
//! the pod has a deletion timestamp or is gone, as [`Kubelets`](crate::Kubelets) do. A pod on a machine that is gone
//! counts until the Pod or the Node is deleted.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use cadastre_api::block::OwnerKind;
use cadastre_api::{IPAMBlock, NodeSubnet};
use cadastre_core::{Addr, Cidr};
use serde_json::Value;

use super::Change;

const NODES: &str = "/registry/minions/";
const PODS: &str = "/registry/pods/";
const BLOCKS: &str = "/registry/cadastre.dev/ipamblocks/";
const SUBNETS: &str = "/registry/cadastre.dev/nodesubnets/";

/// Returns whether a rule is about the object with this key.
pub(super) fn concerns(key: &str) -> bool {
    [NODES, PODS, BLOCKS, SUBNETS]
        .iter()
        .any(|it| key.starts_with(it))
}

#[derive(Debug, PartialEq)]
struct NodeState {
    uid: String,
    pod_cidrs: Vec<Cidr>,
}

/// The blocks that a NodeSubnet lists, and the UID of the Node for which it lists them.
#[derive(Debug)]
struct Listed {
    uid: Option<String>,
    blocks: Vec<Cidr>,
}

#[derive(Debug, PartialEq)]
struct Pod {
    node: String,
    addresses: Vec<Addr>,
}

#[derive(Debug, PartialEq)]
struct Block {
    cidr: Cidr,
    parent: Option<String>,
    /// The nodes that may use the block; empty while it is in quarantine
    nodes: Vec<String>,
}

/// The state of the cluster at one revision, as far as the rules need it. The maps have keys of etcd.
#[derive(Debug, Default)]
pub(super) struct Rules {
    nodes: BTreeMap<String, NodeState>,
    pods: BTreeMap<String, Pod>,
    blocks: BTreeMap<String, Block>,
    listed: BTreeMap<String, Listed>,
}

impl Rules {
    /// Applies a change, and returns a text for each rule that it breaks.
    pub(super) fn apply(&mut self, change: &Change) -> Vec<String> {
        let (key, object) = (&change.key, change.object.as_ref());
        let broken = if key.starts_with(NODES) {
            self.node(key, object)
        } else if key.starts_with(PODS) {
            self.pod(key, object)
        } else if key.starts_with(BLOCKS) {
            self.block(key, object)
        } else if key.starts_with(SUBNETS) {
            self.subnet(key, object)
        } else {
            return Vec::new();
        };
        broken.unwrap_or_else(|error| vec![format!("{key} cannot be parsed: {error:#}")])
    }

    fn node(&mut self, key: &str, object: Option<&Value>) -> Result<Vec<String>> {
        let Some(object) = object else {
            self.nodes.remove(key);
            return Ok(Vec::new());
        };
        let cidrs = strings(object.pointer("/spec/podCIDRs"));
        let node = NodeState {
            uid: text(object.pointer("/metadata/uid")),
            pod_cidrs: cidrs.map(cidr).collect::<Result<_>>()?,
        };
        let is_new = self.nodes.get(key) != Some(&node);
        let mut broken = Vec::new();
        for (other, theirs) in self.nodes.iter().filter(|(it, _)| is_new && *it != key) {
            for (a, b) in pairs(&node.pod_cidrs, &theirs.pod_cidrs).filter(|(a, b)| a.overlaps(b)) {
                broken.push(format!("{key} has {a}, and {other} has {b}"));
            }
        }
        self.nodes.insert(key.to_owned(), node);
        Ok(broken)
    }

    fn pod(&mut self, key: &str, object: Option<&Value>) -> Result<Vec<String>> {
        let is_live = |pod: &&Value| {
            let phase = pod.pointer("/status/phase").and_then(Value::as_str);
            pod.pointer("/metadata/deletionTimestamp").is_none()
                && !matches!(phase, Some("Succeeded" | "Failed"))
        };
        let Some(object) = object.filter(is_live) else {
            self.pods.remove(key);
            return Ok(Vec::new());
        };
        let ips = object.pointer("/status/podIPs").and_then(Value::as_array);
        let ips = ips.into_iter().flatten().filter_map(|it| it["ip"].as_str());
        let pod = Pod {
            node: text(object.pointer("/spec/nodeName")),
            addresses: ips.map(address).collect::<Result<_>>()?,
        };
        if self.pods.get(key) == Some(&pod) {
            return Ok(Vec::new());
        }
        let mut broken = Vec::new();
        for (other, theirs) in self.pods.iter().filter(|(it, _)| *it != key) {
            for (a, _) in pairs(&pod.addresses, &theirs.addresses).filter(|(a, b)| a == b) {
                broken.push(format!(
                    "{key} on {} and {other} on {} have {a}",
                    pod.node, theirs.node
                ));
            }
        }
        self.pods.insert(key.to_owned(), pod);
        broken.extend(self.uncovered(key));
        Ok(broken)
    }

    /// Returns a text for each address of a pod that is in no block of the pod's node.
    fn uncovered(&self, pod: &str) -> Vec<String> {
        let Some(Pod { node, addresses }) = self.pods.get(pod) else {
            return Vec::new();
        };
        let Some(NodeState { pod_cidrs, .. }) = self.nodes.get(&format!("{NODES}{node}")) else {
            return Vec::new();
        };
        let is_covered = |address: &&Addr| {
            let blocks = self.blocks.values().filter(|it| it.nodes.contains(node));
            let mut ranges = blocks.map(|it| &it.cidr).chain(pod_cidrs);
            ranges.any(|it| it.contains_addr(**address))
        };
        let uncovered = addresses.iter().filter(|it| !is_covered(it));
        uncovered
            .map(|it| format!("{pod} has {it}, which is in no range of {node}"))
            .collect()
    }

    fn block(&mut self, key: &str, object: Option<&Value>) -> Result<Vec<String>> {
        let mut broken = Vec::new();
        if let Some(object) = object {
            let IPAMBlock { spec, .. } = serde_json::from_value(object.clone())?;
            let owners = std::iter::once(&spec.owner).chain(&spec.standby);
            let owners = owners.filter(|it| it.kind == OwnerKind::Node);
            let block = Block {
                cidr: cidr(&spec.cidr)?,
                parent: spec.parent.map(|it| it.cidr),
                nodes: owners.map(|it| it.name.clone()).collect(),
            };
            let is_within = |a: &Block, b: &Block| a.parent == Some(b.cidr.to_string());
            for (other, theirs) in self.blocks.iter().filter(|(it, _)| *it != key) {
                let is_part = is_within(&block, theirs) || is_within(theirs, &block);
                if block.cidr.overlaps(&theirs.cidr) && !is_part {
                    broken.push(format!("{key} overlaps {other}"));
                }
            }
            self.blocks.insert(key.to_owned(), block);
        } else if let Some(gone) = self.blocks.remove(key) {
            let mut nodes = self.nodes.values();
            let mut exists = |uid: &Option<String>| nodes.any(|it| Some(&it.uid) == uid.as_ref());
            let mut listed = self.listed.iter();
            let mut lists = |it: &Listed| it.blocks.contains(&gone.cidr) && exists(&it.uid);
            if let Some((subnet, _)) = listed.find(|(_, it)| lists(it)) {
                broken.push(format!("{key} is deleted, but {subnet} lists it"));
            }
        }
        for pod in self.pods.keys() {
            broken.extend(self.uncovered(pod));
        }
        Ok(broken)
    }

    fn subnet(&mut self, key: &str, object: Option<&Value>) -> Result<Vec<String>> {
        let Some(object) = object else {
            self.listed.remove(key);
            return Ok(Vec::new());
        };
        let subnet: NodeSubnet = serde_json::from_value(object.clone())?;
        let blocks = subnet.spec.blocks.iter();
        let blocks: Vec<Cidr> = blocks.map(|it| cidr(&it.cidr)).collect::<Result<_>>()?;
        let mut broken = Vec::new();
        for (other, theirs) in self.listed.iter().filter(|(it, _)| *it != key) {
            for (a, _) in pairs(&blocks, &theirs.blocks).filter(|(a, b)| a == b) {
                broken.push(format!("{key} and {other} list {a}"));
            }
        }
        let uid = subnet.spec.node_uid;
        self.listed.insert(key.to_owned(), Listed { uid, blocks });
        Ok(broken)
    }
}

fn pairs<'a, T>(a: &'a [T], b: &'a [T]) -> impl Iterator<Item = (&'a T, &'a T)> {
    a.iter().flat_map(|a| b.iter().map(move |b| (a, b)))
}

fn cidr(text: &str) -> Result<Cidr> {
    Ok(Cidr::parse_strict(text)?)
}

fn address(text: &str) -> Result<Addr> {
    Addr::parse_lenient(text).with_context(|| format!("{text:?} is no address"))
}

fn strings(list: Option<&Value>) -> impl Iterator<Item = &str> {
    let list = list.and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str)
}

fn text(value: Option<&Value>) -> String {
    value.and_then(Value::as_str).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
