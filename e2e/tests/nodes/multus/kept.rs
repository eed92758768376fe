//! What pods keep, and what frees their addresses.

use std::path::Path;

use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::attached::{self, Attached};
use super::{GROUP, Lab, NETWORKS, addresses, container, create, delete, multus, named};
use crate::pods::{self, Running};
use crate::{eventually, machines};

/// During this many heartbeats of a node, the runtime sends several STATUS requests for the network.
const HEARTBEATS: usize = 8;

impl Lab<'_> {
    pub(super) async fn pods_reach_each_other(&self, all: &[Attached]) {
        let [one, other] = &self.machines;
        let (from, to) = (named(all, one, 0), named(all, other, 0));
        pods::assert_reaches(one, &from.pod, &to.pod).await;
        for interface in ["net1", "net2"] {
            pods::assert_reaches(one, &from.pod, &to.only(interface)).await;
            pods::assert_reaches(other, &to.pod, &from.only(interface)).await;
        }
    }

    pub(super) async fn commands_know_second_networks(&self, all: &[Attached]) {
        for interface in ["net1", "net2"] {
            let it = named(all, &self.machines[0], 2);
            let address = it.only(interface).addresses[0].to_string();
            let shown = self.stage.kubectl_cadastre(&["show", "ip", &address]).await;
            for text in ["in use", &it.pod.name, interface, "backup"] {
                assert!(shown.contains(text), "no {text:?}: {shown}");
            }
            let show_pod = ["show", "pod", &it.pod.name];
            let shown = self.stage.kubectl_cadastre(&show_pod).await;
            assert!(shown.contains(&address), "no {address}: {shown}");
        }
    }

    /// Restarts the first machine's agent with its store, then without it. Each time, a pod comes and goes.
    pub(super) async fn an_agent_keeps_addresses_when_it_restarts_and_when_its_store_is_lost(
        &mut self,
        all: &[Attached],
    ) {
        for is_lost in [false, true] {
            let one = &mut self.machines[0];
            // `/run` of the machine is visible only in its own mount namespace.
            let pid = one.containerd().unwrap().pid();
            let store = format!("/proc/{pid}/root/run/cadastre/node.redb");
            let store = Path::new(&store);
            one.agent().unwrap().kill().await.unwrap();
            if is_lost {
                create(self.stage, one, "stuck", "missing").await;
                attached::failure(&self.stage.api, "stuck", "missing").await;
                std::fs::remove_file(store).unwrap();
            }
            one.start_agent().await.unwrap();
            if is_lost {
                self.the_node_stays_ready_without(store).await;
            }
            create(self.stage, &self.machines[0], "passes", "backup,metering").await;
            self.running(all.len() + 1).await;
            delete(self.stage, "passes").await;
            let left = self.running(all.len()).await;
            assert_eq!(addresses(&left), addresses(all));
        }
    }

    /// The agent cannot know whether the pod `stuck` has addresses on second networks. So the agent waits for minutes
    /// before it creates a new store, unless the pod is deleted.
    async fn the_node_stays_ready_without(&self, store: &Path) {
        let (api, node) = (&self.stage.api, self.machines[0].name());
        let waits = || assert!(!store.exists(), "the agent does not wait");
        pods::heartbeats(api, node, HEARTBEATS, waits).await;
        // While there is no store, the DEL of the sandbox fails, so the kubelet does not end the pod.
        let at_once = DeleteParams::default().grace_period(0);
        api.pods.delete("stuck", &at_once).await.unwrap();
        eventually("there is a store", async || {
            Ok(store.exists().then_some(()))
        })
        .await;
    }

    /// A runtime's GC lists only the first interface of each pod. The other interfaces keep their addresses.
    pub(super) async fn garbage_collection_keeps_what_is_in_use(&self, all: &[Attached]) {
        for machine in &self.machines {
            let entries = self.entries(machine).await;
            let first = entries.iter().filter(|it| it.interface == "eth0");
            let valid: Vec<Value> = first
                .map(|it| json!({"containerID": container(&it.handle), "ifname": "eth0"}))
                .collect();
            let mut config = multus(machine);
            config["cni.dev/valid-attachments"] = json!(valid);
            let collected = attached::call(machine, "multus", "GC", ["", ""], &config).await;
            collected.unwrap();
        }
        create(self.stage, &self.machines[0], "passes", "backup,metering").await;
        self.running(all.len() + 1).await;
        delete(self.stage, "passes").await;
        assert_eq!(addresses(&self.running(all.len()).await), addresses(all));
    }

    /// Releases one of two interfaces that a pod has on the same network, then deletes the pod, then repeats its DEL.
    pub(super) async fn releases_are_by_interface_and_can_come_twice(&self, all: &[Attached]) {
        let (api, machine) = (&self.stage.api, &self.machines[0]);
        let twice = named(all, machine, 2);
        let entries = self.entries(machine).await;
        let mut own = entries.iter().filter(|it| it.pod_uid == twice.pod.uid);
        let id = container(&own.next().unwrap().handle);
        let ipam = |name: &str| {
            let result = twice.only(name).addresses.into_iter().map(|it| {
                let length = if it.is_ipv4() { 24 } else { 112 };
                json!({"address": format!("{it}/{length}")})
            });
            json!({
                "cniVersion": "1.0.0", "name": "backup", "type": "macvlan",
                "ipam": {"type": "cadastre-ipam"},
                "prevResult": {"cniVersion": "1.0.0", "ips": result.collect::<Vec<_>>()},
            })
        };
        let call = async |verb: &str, name: &str| {
            attached::call(machine, "cadastre-ipam", verb, [id, name], &ipam(name)).await
        };
        for name in ["net1", "net2"] {
            call("CHECK", name).await.unwrap();
        }
        call("DEL", "net2").await.unwrap();
        call("CHECK", "net1").await.unwrap();
        call("CHECK", "net2").await.unwrap_err();
        let mut whole: Vec<Running> = all.iter().map(Attached::whole).collect();
        let gone = twice.only("net2").addresses;
        for pod in &mut whole {
            pod.addresses.retain(|it| !gone.contains(it));
        }
        machines::reports(api, machine.name(), &whole).await;

        delete(self.stage, &twice.pod.name).await;
        let left = self.running(all.len() - 1).await;
        let again = attached::call(machine, "multus", "DEL", [id, "eth0"], &multus(machine)).await;
        again.unwrap();
        // Creates the pod again. The other pods must keep their addresses.
        create(self.stage, machine, &twice.pod.name, NETWORKS[2]).await;
        let anew = self.running(all.len()).await;
        for it in &left {
            let after = anew
                .iter()
                .find(|after| after.pod.uid == it.pod.uid)
                .unwrap();
            assert_eq!(after.whole(), it.whole());
        }
    }

    /// Multus has lost its record of the networks, so it sends no DEL. The agent notices that the pod is gone.
    pub(super) async fn addresses_are_freed_although_multus_forgets_the_networks_of_a_pod(&self) {
        let machine = &self.machines[0];
        create(self.stage, machine, "passes", "backup,storage").await;
        let all = self.running(2 * NETWORKS.len() + 1).await;
        let first = all.iter().find(|it| it.pod.name == "passes").unwrap();
        let entries = self.entries(machine).await;
        let mut own = entries.iter().filter(|it| it.pod_uid == first.pod.uid);
        let id = container(&own.next().unwrap().handle);
        let records = machine.var().join("lib/cni/multus");
        std::fs::remove_file(records.join(id)).unwrap();
        delete(self.stage, "passes").await;
        self.running(2 * NETWORKS.len()).await;
    }

    pub(super) async fn a_power_cut_frees_the_addresses_of_old_sandboxes(&mut self) {
        let api = &self.stage.api;
        let before: Vec<Running> = pods::running(api, GROUP, 2 * NETWORKS.len()).await;
        let machine = &mut self.machines[1];
        let node = machine.name().to_owned();
        let boot = machines::boot_id(&pods::ready(api, &node, true).await);
        machine.power_off().await.unwrap();
        machine.boot().await.unwrap();
        attached::join_bridge(machine).await;
        machines::booted_since(api, &node, &boot).await;
        machines::same_pods_anew(api, GROUP, &before, &node).await;
        let all = self.running(before.len()).await;
        self.pods_reach_each_other(&all).await;
    }
}
