//! Pods on second networks, with the real Multus: what each interface gets, who frees it, and which errors users see.
//!
//! | file | subject |
//! |---|---|
//! | `kept` | what pods keep, and what frees their addresses |
//! | `refusals` | networks that cannot serve a pod |
//! | `attached` | helpers: networks, and the interfaces of pods |

mod attached;
mod kept;
mod refusals;

use std::collections::BTreeMap;

use anyhow::ensure;
use cadastre_api::AddressEntry;
use cadastre_e2e::assets;
use cadastre_e2e::node::{Machine, MachineOptions, NodeSide};
use kube::api::DeleteParams;
use serde_json::{Value, json};

use crate::pods::{self, Running};
use crate::{Stage, eventually, machines, pages};
use attached::Attached;

/// The user of Multus on the nodes.
pub const USER: &str = "system:serviceaccount:kube-system:multus";

const GROUP: &str = "multus";

/// The annotation by which a pod requests second networks.
const WANTED: &str = "k8s.v1.cni.cncf.io/networks";

/// The file that the agent writes.
const FIRST_NETWORK: &str = "/etc/cni/net.d/10-pods.conflist";

/// The file that the runtime uses, because its name comes before the name of the agent's file.
const MULTUS: &str = "net.d/00-multus.conflist";

/// The second networks of each pod on a node. Two of the networks share a pool, and one pod is on a network twice.
const NETWORKS: [&str; 4] = [
    "backup,storage",
    "storage,metering",
    "backup,backup",
    "mirror,backup",
];

/// Two machines, and the ranges of the pool of each second network.
struct Lab<'a> {
    stage: &'a Stage,
    machines: [Machine; 2],
    ranges: BTreeMap<String, Vec<String>>,
}

pub(crate) async fn pods_on_second_networks_have_addresses_of_the_pools_that_the_networks_name(
    stage: &Stage,
) {
    let mut lab = Lab::start(stage).await;
    for machine in &lab.machines {
        for (n, networks) in NETWORKS.iter().enumerate() {
            create(stage, machine, &name(machine, n), networks).await;
        }
    }
    let all = lab.running(2 * NETWORKS.len()).await;
    lab.pods_reach_each_other(&all).await;
    lab.commands_know_second_networks(&all).await;
    lab.an_agent_keeps_addresses_when_it_restarts_and_when_its_store_is_lost(&all)
        .await;
    lab.garbage_collection_keeps_what_is_in_use(&all).await;
    lab.releases_are_by_interface_and_can_come_twice(&all).await;
    lab.addresses_are_freed_although_multus_forgets_the_networks_of_a_pod()
        .await;
    lab.a_power_cut_frees_the_addresses_of_old_sandboxes().await;
    lab.a_network_without_a_pool_leaves_nothing_behind().await;
    lab.a_full_pool_leaves_nothing_behind().await;
    lab.fields_that_no_pool_can_keep_to_are_refused().await;
    lab.end().await;
}

impl<'a> Lab<'a> {
    /// Starts two machines whose runtime calls Multus, and applies the networks of the documentation.
    async fn start(stage: &'a Stage) -> Self {
        attached::install(stage).await;
        let spec = machines::both("10.44.0.0/16", "fd00:44::/48");
        stage.api.block_pool(GROUP, spec).await.unwrap();
        let mut objects = pages::objects("cni.md", "Second networks with Multus");
        objects.extend(pages::objects("cni.md", "Networks of whereabouts"));
        let mut ranges: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for object in &mut objects {
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            if object["kind"] == "IPPool" {
                attached::serve(object, GROUP);
                let families = ["ipv4", "ipv6"].map(|it| &object["spec"][it]["cidrs"][0]);
                let cidrs = families.into_iter().filter_map(Value::as_str);
                ranges.insert(name, cidrs.map(str::to_owned).collect());
            } else {
                attached::fit_to_kernel(object);
            }
        }
        assert_eq!(objects.len(), 2 * ranges.len(), "a pool for each network");
        let mirrored = network_of(&objects, "backup");
        let mut mirror = attached::config(&mirrored);
        mirror["name"] = json!("mirror");
        objects.push(attached::network("mirror", &mirror));
        ranges.insert("mirror".to_owned(), ranges["backup"].clone());
        attached::apply(stage, &objects).await;

        let ours = machines::ptp();
        let list: Value = serde_json::from_str(&ours.configs[0].1).unwrap();
        // Multus' own installer copies the configuration of the first network. Users may name its file instead.
        let machines = [
            machine(stage, &ours, json!({"delegates": [list]})).await,
            machine(stage, &ours, json!({"clusterNetwork": FIRST_NETWORK})).await,
        ];
        for machine in &machines {
            pods::ready(&stage.api, machine.name(), true).await;
            machines::route(stage, machine).await;
        }
        Self {
            stage,
            machines,
            ranges,
        }
    }

    /// Waits until exactly `count` pods run. Asserts that each has the interfaces that it requests, with addresses of
    /// the right pools. All addresses must differ, and the agents must report exactly these addresses.
    async fn running(&self, count: usize) -> Vec<Attached> {
        let api = &self.stage.api;
        let all = attached::running(api, GROUP, count).await;
        let whole: Vec<Running> = all.iter().map(Attached::whole).collect();
        pods::assert_unique(&whole);
        for machine in &self.machines {
            machines::reports(api, machine.name(), &whole).await;
        }
        for it in &all {
            let pod = api.pods.get(&it.pod.name).await.unwrap();
            let wanted = &pod.metadata.annotations.unwrap()[WANTED];
            it.check(self.of(it), wanted, &self.ranges).await;
        }
        all
    }

    /// Returns the entries of the NodeAddresses of a machine.
    async fn entries(&self, machine: &Machine) -> Vec<AddressEntry> {
        let list = self.stage.api.addresses.get(machine.name()).await;
        list.unwrap().spec.entries().collect()
    }

    /// Returns the machine of a pod.
    fn of(&self, it: &Attached) -> &Machine {
        let mut machines = self.machines.iter();
        machines
            .find(|machine| machine.name() == it.pod.node)
            .unwrap()
    }

    /// Deletes all pods and all pools. Then no address is in use, and no node has a block.
    async fn end(self) {
        let api = &self.stage.api;
        pods::delete_all(api, GROUP).await;
        for machine in &self.machines {
            machines::reports(api, machine.name(), &[]).await;
        }
        let pools = ["backup", "later", "metering", "storage"];
        for pool in pools {
            api.delete_pool(pool).await.unwrap();
        }
        for pool in pools {
            eventually(&format!("no block of {pool} is left"), async || {
                let left = api.blocks_of(pool).await?;
                ensure!(left.is_empty(), "{left:?}");
                Ok(Some(()))
            })
            .await;
        }
    }
}

/// Starts a machine with Multus. `fields` are added to Multus' configuration.
async fn machine(stage: &Stage, ours: &NodeSide, fields: Value) -> Machine {
    let mut plugin = fields;
    plugin["type"] = json!("multus");
    plugin["kubeconfig"] = json!(stage.site.kubeconfig(USER).unwrap());
    let list = json!({"cniVersion": "1.1.0", "name": "multus-cni-network", "plugins": [plugin]});
    let mut side = ours.clone();
    let program = assets::find(assets::Program::Multus).unwrap();
    side.plugins.push(("multus".to_owned(), program));
    side.configs.push((MULTUS.to_owned(), list.to_string()));
    let options = MachineOptions {
        labels: vec![("group".to_owned(), GROUP.to_owned())],
        side,
        second_link: true,
    };
    let machine = stage.site.machine(options).await.unwrap();
    attached::join_bridge(&machine).await;
    machine
}

/// Returns the configuration with which the runtime calls Multus.
fn multus(machine: &Machine) -> Value {
    let text = std::fs::read_to_string(machine.folder().join("cni").join(MULTUS)).unwrap();
    let list: Value = serde_json::from_str(&text).unwrap();
    let mut plugin = list["plugins"][0].clone();
    for key in ["cniVersion", "name"] {
        plugin[key] = list[key].clone();
    }
    plugin
}

fn network_of(objects: &[Value], name: &str) -> Value {
    let mut networks = objects.iter().filter(|it| it["kind"] != "IPPool");
    let found = networks.find(|it| it["metadata"]["name"] == name);
    found.unwrap().clone()
}

fn name(machine: &Machine, number: usize) -> String {
    format!("{GROUP}-{}-{number}", machine.name())
}

/// Returns the pod with the networks `NETWORKS[number]` on a machine.
fn named<'a>(all: &'a [Attached], machine: &Machine, number: usize) -> &'a Attached {
    let name = name(machine, number);
    all.iter().find(|it| it.pod.name == name).unwrap()
}

fn addresses(all: &[Attached]) -> Vec<Running> {
    let mut all: Vec<Running> = all.iter().map(Attached::whole).collect();
    all.sort();
    all
}

/// Returns the container id in a handle.
fn container(handle: &str) -> &str {
    handle.split_once('/').unwrap().1
}

async fn create(stage: &Stage, machine: &Machine, name: &str, networks: &str) {
    let annotations = Some(json!({WANTED: networks}));
    pods::create_with(&stage.api, GROUP, name, Some(machine.name()), annotations).await;
}

/// Deletes a pod, and waits until it is gone.
async fn delete(stage: &Stage, name: &str) {
    let pods = &stage.api.pods;
    pods.delete(name, &DeleteParams::default()).await.unwrap();
    eventually(&format!("pod {name} is gone"), async || {
        Ok(pods.get_opt(name).await?.is_none().then_some(()))
    })
    .await;
}
