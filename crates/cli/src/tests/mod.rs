//! Tests of the subcommands. The tests build the listed objects themselves and need no API server.

mod claims;
mod faults;
mod health;
mod large_blocks;
mod reports;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use super::check::{CheckReport, check};
use super::inventory::Inventory;
use super::lists::ClusterLists;
use super::render::Style;
use cadastre_api::{FINALIZER, NodeSubnetLite, PodLite};
use cadastre_core::{Addr, Cidr};

const SINCE: &str = "2026-11-21T11:30:00Z";

fn now() -> Timestamp {
    "2026-11-21T12:00:00Z".parse().unwrap()
}

pub(crate) fn style() -> Style {
    Style {
        wide: true,
        colour: false,
        width: 100,
        now: now(),
    }
}

pub(crate) fn addr(text: &str) -> Addr {
    Addr::parse_strict(text).unwrap()
}

pub(crate) fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

/// Returns a time as the value of a metadata field.
#[expect(clippy::unnecessary_wraps, reason = "the fields are optional")]
fn time(text: &str) -> Option<Time> {
    Some(Time(text.parse().unwrap()))
}

#[track_caller]
pub(crate) fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

/// The objects of a test cluster. `new` creates pool `p` of 10.0.0.0/24 in /28 blocks, nodes `a` and `b` with an agent
/// and one block each, and pod `shop/cart` on `a` with 10.0.0.1.
pub(crate) struct Cluster {
    pub(crate) lists: ClusterLists,
    version: u64,
}

impl Cluster {
    pub(crate) fn empty() -> Self {
        let lists = ClusterLists {
            nodes: Vec::new(),
            pools: Vec::new(),
            subnets: Vec::new(),
            addresses: Vec::new(),
            blocks: Vec::new(),
            claims: Vec::new(),
            services: Vec::new(),
            pods: Vec::new(),
            namespaces: Vec::new(),
            leases: Ok(Vec::new()),
            parts: Ok(Vec::new()),
        };
        Self { lists, version: 0 }
    }

    pub(crate) fn new() -> Self {
        let mut cluster = Self::empty();
        let spec = json!({"ipv4": {"cidrs": ["10.0.0.0/24"], "blockSize": 28}});
        cluster.pool("p", &spec);
        cluster.node("a", &[]);
        cluster.node("b", &[]);
        cluster.block("10.0.0.0/28", "p", "a");
        cluster.block("10.0.0.16/28", "p", "b");
        cluster.pod("shop/cart", "a", &["10.0.0.1"]);
        cluster.subnet("a", &["10.0.0.0/28"], &[("10.0.0.1", "shop/cart")]);
        cluster.subnet("b", &["10.0.0.16/28"], &[]);
        cluster.leader("controller-1", "2026-11-21T11:59:58Z");
        cluster
    }

    /// Sets the holder of the controllers' Lease and the time of its last renewal.
    pub(crate) fn leader(&mut self, holder: &str, renewed: &str) {
        let lease = json!({
            "metadata": {"namespace": "kube-system", "name": "cadastre-controller"},
            "spec": {"holderIdentity": holder, "renewTime": renewed.replace('Z', ".000000Z")},
        });
        self.lists.leases = Ok(vec![serde_json::from_value(lease).unwrap()]);
    }

    /// Adds a pod of the controller or the agent that was created half an hour ago.
    pub(crate) fn part(&mut self, component: &str, node: &str, ready: bool) {
        let pod = json!({
            "metadata": {
                "namespace": "kube-system", "name": format!("{component}-{node}"), "creationTimestamp": SINCE,
                "labels": {"app.kubernetes.io/name": "cadastre", "app.kubernetes.io/component": component},
            },
            "spec": {"nodeName": node, "containers": []},
            "status": {"conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]},
        });
        self.parts().push(serde_json::from_value(pod).unwrap());
    }

    /// Returns the pods of controllers and agents.
    fn parts(&mut self) -> &mut Vec<Pod> {
        self.lists.parts.as_mut().unwrap()
    }

    /// Gives a node's agent pod the flag by which the agent writes the runtime's CNI configuration.
    pub(crate) fn configures(&mut self, node: &str) {
        let name = format!("agent-{node}");
        let named = |it: &&mut Pod| it.metadata.name.as_deref() == Some(&name);
        let pod = self.parts().iter_mut().find(named).unwrap();
        let args = ["agent", "--cni-conf=/host/cni-conf/05-cadastre.conflist"];
        let containers = json!([{"name": "agent", "args": args}]);
        pod.spec.as_mut().unwrap().containers = serde_json::from_value(containers).unwrap();
    }

    fn next(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    pub(crate) fn pool(&mut self, name: &str, spec: &Value) {
        let version = self.next();
        let pool = json!({
            "metadata": {
                "name": name, "uid": format!("pool-{name}"), "resourceVersion": version, "finalizers": [FINALIZER],
                "creationTimestamp": "2026-11-01T00:00:00Z",
            },
            "spec": spec,
        });
        self.lists.pools.push(serde_json::from_value(pool).unwrap());
    }

    pub(crate) fn node(&mut self, name: &str, pod_cidrs: &[&str]) {
        let version = self.next();
        let node = json!({
            "metadata": {"name": name, "uid": format!("node-{name}"), "resourceVersion": version, "labels": {"zone": name}},
            "spec": {"podCIDRs": pod_cidrs},
        });
        self.lists.nodes.push(serde_json::from_value(node).unwrap());
    }

    pub(crate) fn block(&mut self, cidr: &str, pool: &str, node: &str) {
        let version = self.next();
        let name = cidr.replace(['.', ':', '/'], "-");
        let block = json!({
            "metadata": {"name": name, "uid": format!("block-{cidr}"), "resourceVersion": version, "generation": 1},
            "spec": {
                "cidr": cidr, "pool": pool, "since": "2026-11-21T11:00:00Z",
                "owner": {"kind": "Node", "name": node, "uid": format!("node-{node}")},
            },
        });
        let block = serde_json::from_value(block).unwrap();
        self.lists.blocks.push(block);
    }

    /// Adds a block in quarantine.
    pub(crate) fn quarantined(&mut self, cidr: &str, pool: &str, node: &str, until: &str) {
        self.block(cidr, pool, node);
        let block = self.lists.blocks.last_mut().unwrap();
        block.spec["owner"]["kind"] = json!("Quarantine");
        block.spec["until"] = json!(until);
    }

    pub(crate) fn pod(&mut self, name: &str, node: &str, addresses: &[&str]) {
        let (namespace, short) = name.split_once('/').unwrap();
        let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let version = self.next();
        let pod = json!({
            "metadata": {"namespace": namespace, "name": short, "uid": format!("pod-{name}"), "resourceVersion": version},
            "spec": {"nodeName": node}, "status": {"phase": "Running", "podIPs": ips},
        });
        self.lists.pods.push(serde_json::from_value(pod).unwrap());
    }

    /// Returns the pod that was added last.
    pub(crate) fn last_pod(&mut self) -> &mut PodLite {
        self.lists.pods.last_mut().unwrap()
    }

    /// Adds the NodeSubnet and the NodeAddresses of a node. Each entry of `in_use` consists of an address and the pod
    /// that uses it.
    pub(crate) fn subnet(&mut self, node: &str, blocks: &[&str], in_use: &[(&str, &str)]) {
        let version = self.next();
        let listed = blocks.iter();
        let listed =
            listed.map(|cidr| json!({"cidr": cidr, "uid": format!("block-{cidr}"), "pool": "p"}));
        let counted = blocks.iter().map(|text| {
            let range = cidr(text);
            let used = in_use
                .iter()
                .filter(|(at, _)| range.contains_addr(addr(at)));
            let used = used.count();
            json!({"cidr": text, "uid": format!("block-{text}"), "used": used, "free": 16 - used})
        });
        let entries = in_use.iter();
        let entries = entries
            .map(|(at, pod)| format!("{at} cbr0/0123456789-{pod} eth0 pod-{pod} {pod} {SINCE}"));
        let uid = format!("node-{node}");
        let subnet = json!({
            "metadata": {"name": node, "uid": format!("subnet-{node}"), "resourceVersion": version},
            "spec": {"nodeUID": uid, "blocks": listed.collect::<Vec<_>>()},
            "status": {
                "nodeUID": uid, "blocks": counted.collect::<Vec<_>>(), "agent": {"version": "0.1.0"},
            },
        });
        let list = json!({
            "metadata": {"name": node, "uid": format!("addresses-{node}"), "resourceVersion": version},
            "spec": {
                "nodeUID": uid, "bootID": "boot", "asOf": "2026-11-21T11:58:00Z", "addresses": entries.collect::<Vec<_>>(),
            },
        });
        let list = serde_json::from_value(list).unwrap();
        self.lists.addresses.push(list);
        let subnet = serde_json::from_value(subnet).unwrap();
        self.lists.subnets.push(subnet);
    }

    /// Makes the agent of a node report the address as an orphan, with the UID of the pod that is gone.
    pub(crate) fn orphan(&mut self, node: &str, at: &str, uid: &str) {
        let named = |it: &&mut NodeSubnetLite| it.metadata.name.as_deref() == Some(node);
        let subnet = self.lists.subnets.iter_mut().find(named).unwrap();
        subnet.status["orphans"] = json!([{"address": at, "podUID": uid}]);
    }

    /// Replaces the list of node `a` by this single entry.
    pub(crate) fn listed(&mut self, entry: &str) {
        self.lists.addresses[0].spec["addresses"] = json!([entry]);
    }

    pub(crate) fn inventory(&self) -> Inventory {
        Inventory::new(&self.lists, now())
    }

    pub(crate) fn check(&self) -> CheckReport {
        check(&self.inventory())
    }

    /// Returns the code and the object of each finding of `check`.
    pub(crate) fn codes(&self) -> Vec<String> {
        let findings = self.check().findings.into_iter();
        findings
            .map(|it| format!("{} {}", it.code, it.object))
            .collect()
    }
}
