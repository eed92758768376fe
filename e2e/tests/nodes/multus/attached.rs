//! Helpers of the test of Multus: the networks' objects, and the interfaces of a pod as Multus reports them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context as _, ensure};
use cadastre_e2e::node::{self, Machine};
use cadastre_e2e::{Fixtures, assets};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::pods::{self, Running};
use crate::{LIMIT, Stage, eventually, pages};

/// The annotation in which Multus reports a pod's interfaces.
const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

/// A running pod with several interfaces.
#[derive(Clone, Debug)]
pub struct Attached {
    /// The pod, with the addresses of its first network
    pub pod: Running,
    /// The interfaces on second networks
    pub interfaces: Vec<Interface>,
}

/// An entry of Multus' annotation: one interface of a pod.
#[derive(Clone, Debug, Deserialize)]
pub struct Interface {
    /// The network, as `NAMESPACE/NAME`
    pub name: String,
    /// The name of the interface in the pod; empty for networks that report none
    #[serde(default, rename = "interface")]
    pub device: String,
    /// The addresses of the interface, without prefix lengths
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    #[serde(default)]
    default: bool,
}

impl Attached {
    fn of(pod: &Pod) -> anyhow::Result<Self> {
        let running = Running::of(pod).context("it does not run")?;
        let status = pod.annotations().get(STATUS).context("no network-status")?;
        let all: Vec<Interface> = serde_json::from_str(status)?;
        let (first, interfaces): (Vec<_>, Vec<_>) = all.into_iter().partition(|it| it.default);
        let ips: Vec<IpAddr> = first.into_iter().flat_map(|it| it.ips).collect();
        ensure!(ips == running.addresses, "{ips:?} in {status}");
        Ok(Self {
            pod: running,
            interfaces,
        })
    }

    /// Returns the pod with the addresses of all its interfaces.
    pub fn whole(&self) -> Running {
        let mut pod = self.pod.clone();
        let second = self.interfaces.iter().flat_map(|it| &it.ips);
        pod.addresses.extend(second);
        pod
    }

    /// Returns the pod with the addresses of one interface only.
    pub fn only(&self, interface: &str) -> Running {
        let mut pod = self.pod.clone();
        let of_interface = self.interfaces.iter().filter(|it| it.device == interface);
        pod.addresses = of_interface.flat_map(|it| it.ips.clone()).collect();
        pod
    }

    /// Asserts that the pod has exactly the interfaces of `networks` (names, comma-separated), each with addresses in
    /// `ranges` (by network). The kernel must have the addresses that Multus reports.
    pub async fn check(
        &self,
        machine: &Machine,
        networks: &str,
        ranges: &BTreeMap<String, Vec<String>>,
    ) {
        let reported: Vec<&str> = self.interfaces.iter().map(|it| &*it.name).collect();
        let wanted: Vec<String> = networks
            .split(',')
            .map(|it| format!("default/{it}"))
            .collect();
        assert_eq!(reported, wanted, "{self:?}");
        for (n, interface) in self.interfaces.iter().enumerate() {
            let name = format!("net{}", n + 1);
            assert_eq!(interface.device, name, "{self:?}");
            let ranges = &ranges[interface.name.trim_start_matches("default/")];
            assert_eq!(interface.ips.len(), ranges.len(), "{self:?}");
            pods::assert_within([&self.only(&name)], ranges);
            let show = ["ip", "address", "show", "dev", &name];
            // `ctr` can lose the output of a program that ends at once.
            let shown = eventually("ip prints the interface", async || {
                let shown = machine.run_in_pod(&self.pod.container, &show).await?;
                Ok((!shown.is_empty()).then_some(shown))
            })
            .await;
            for ip in &interface.ips {
                assert!(shown.contains(&format!(" {ip}/")), "no {ip}: {shown}");
            }
        }
    }
}

/// Waits until a group has exactly `count` pods, and all of them run with the addresses that Multus reports.
pub async fn running(api: &Fixtures, group: &str, count: usize) -> Vec<Attached> {
    let what = format!("{count} pods of {group} run with second networks");
    eventually(&what, async || {
        let mut all = Vec::new();
        for pod in pods::list(api, group).await? {
            all.push(Attached::of(&pod).with_context(|| pod.name_any())?);
        }
        ensure!(all.len() == count, "{} pods", all.len());
        Ok(Some(all))
    })
    .await
}

/// Waits for an event that contains `text` and says that the sandbox of a pod failed. Returns its message.
pub async fn failure(api: &Fixtures, pod: &str, text: &str) -> String {
    let uid = api.pods.get(pod).await.unwrap().uid().unwrap();
    eventually(
        &format!("an event of {pod} contains {text:?}"),
        async || {
            let events = api.events_of(&uid).await?;
            let failed = events
                .into_iter()
                .filter(|it| it.reason.as_deref() == Some("FailedCreatePodSandBox"));
            let mut messages: Vec<String> = failed.filter_map(|it| it.message).collect();
            let found = messages.iter().position(|it| it.contains(text));
            let found = found.with_context(|| format!("{messages:?}"))?;
            Ok(Some(messages.swap_remove(found)))
        },
    )
    .await
}

/// Installs the CRD and the permissions of Multus from its own manifest, without the DaemonSet that runs Multus' image.
pub async fn install(stage: &Stage) {
    let manifest = tokio::task::spawn_blocking(assets::multus_manifest).await;
    let manifest = std::fs::read_to_string(manifest.unwrap().unwrap()).unwrap();
    let mut objects = pages::parse(&manifest);
    objects.retain(|it| it["kind"] != "DaemonSet" && it["kind"] != "ConfigMap");
    assert_eq!(objects.len(), 4, "{objects:?}");
    apply(stage, &objects).await;
    let limit = format!("--timeout={}s", LIMIT.as_secs());
    let crd = "crd/network-attachment-definitions.k8s.cni.cncf.io";
    let wait = ["wait", "--for=condition=Established", &limit, crd];
    stage.site.cluster().kubectl(&wait).await.unwrap();
}

/// Applies all objects by one call of kubectl.
pub async fn apply(stage: &Stage, objects: &[Value]) {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
    let apply = ["apply", "-f", "-"];
    let applied = stage.site.cluster().kubectl_stdin(&apply, &list).await;
    applied.unwrap();
}

/// Makes a pool serve only the nodes of a group, and sets its cooldown to one second.
pub fn serve(pool: &mut Value, group: &str) {
    pool["spec"]["nodeSelector"] = json!({"matchLabels": {"group": group}});
    pool["spec"]["cooldownSeconds"] = json!(1);
}

/// Returns a NetworkAttachmentDefinition in the namespace `default` with this CNI configuration.
pub fn network(name: &str, config: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": name, "namespace": "default"}, "spec": {"config": config.to_string()},
    })
}

/// Returns the CNI configuration in a NetworkAttachmentDefinition.
pub fn config(network: &Value) -> Value {
    serde_json::from_str(network["spec"]["config"].as_str().unwrap()).unwrap()
}

/// Replaces the main plugin of a network by the plugin bridge if the kernel does not support the main plugin. Each
/// interface of the node then has its own bridge. [`join_bridge`] connects the bridge of `eth1` to the other node.
pub fn fit_to_kernel(network: &mut Value) {
    let mut config = config(network);
    let lack = match config["type"].as_str() {
        Some("macvlan") => node::macvlan().err(),
        Some("ipvlan") => node::ipvlan().err(),
        _ => None,
    };
    let Some(lack) = lack else {
        return;
    };
    eprintln!("{} uses a bridge: {lack}", network["metadata"]["name"]);
    let master = config["master"].as_str().unwrap();
    config["bridge"] = json!(format!("br-{master}"));
    config["type"] = json!("bridge");
    network["spec"]["config"] = json!(config.to_string());
}

/// Adds `eth1` to its bridge, which connects the bridge to the other node. Does nothing if the kernel has macvlan.
pub async fn join_bridge(machine: &Machine) {
    if node::macvlan().is_ok() {
        return;
    }
    // The plugin bridge may already have created the bridge.
    let script = "ip link add br-eth1 type bridge 2>/dev/null
        ip link set br-eth1 up && ip link set eth1 master br-eth1";
    machine.run(&["sh", "-c", script]).await.unwrap();
}

/// Calls a CNI plugin as a runtime does, and returns its result.
pub async fn call(
    machine: &Machine,
    plugin: &str,
    verb: &str,
    [id, interface]: [&str; 2],
    config: &Value,
) -> anyhow::Result<String> {
    let script = r#"printf %s "$0" | "/opt/cni/bin/$1""#;
    let environment = [
        format!("CNI_COMMAND={verb}"),
        format!("CNI_CONTAINERID={id}"),
        format!("CNI_IFNAME={interface}"),
        "CNI_NETNS=/run/netns/none".to_owned(),
        "CNI_PATH=/opt/cni/bin".to_owned(),
    ];
    let config = config.to_string();
    let mut words = vec!["env"];
    words.extend(environment.iter().map(String::as_str));
    words.extend(["sh", "-c", script, &config, plugin]);
    machine.run(&words).await
}
