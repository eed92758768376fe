//! Pools with `conflictProbe: BeforeUse`: the agent probes an address before it assigns the address. The probes use a
//! real interface. The other end of this interface is in a network namespace, which plays another host that uses an
//! address of the pool.

use std::process::{self, Command};

use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::kubectl_plugin;
use cadastre_e2e::node_agent::add;
use cadastre_node::{Add, OpErrorKind};
use rustix::process::geteuid;
use serde_json::json;

use crate::{Machine, eventually, shared, start, uid};

const MAC: &str = "02:00:00:00:00:07";

/// A link between this host and another host.
struct Link {
    /// The end of the link on this host
    name: String,
    /// The network namespace of the other host
    other: String,
}

impl Link {
    /// Creates the link. If this host does not allow links, prints that and returns `None`. `nth` distinguishes the
    /// links of this process.
    fn new(nth: u32) -> Option<Self> {
        if !geteuid().is_root() || !Self::ip(&["link"]) {
            println!("left out: making interfaces needs root and iproute2");
            return None;
        }
        let id = format!("{}-{nth}", process::id());
        let link = Self {
            name: format!("cad{id}"),
            other: format!("cadastre-{id}"),
        };
        let Self { name, other } = &link;
        let end = format!("cae{id}");
        for args in [
            &["netns", "add", other][..],
            &["link", "add", name, "type", "veth", "peer", "name", &end],
            &["link", "set", &end, "netns", other],
            &[
                "-n", other, "link", "set", &end, "address", MAC, "name", "eth0", "up",
            ],
            &["link", "set", name, "up"],
        ] {
            assert!(Self::ip(args), "ip {args:?}");
        }
        Some(link)
    }

    fn ip(args: &[&str]) -> bool {
        let done = Command::new("ip").args(args).output();
        done.is_ok_and(|it| it.status.success())
    }

    /// Adds `address` to the other host's interface if `verb` is `add`, or deletes it from the interface if `verb` is
    /// `del`.
    fn address(&self, verb: &str, address: &str) {
        let args = ["-n", &self.other, "addr", verb, address, "dev", "eth0"];
        assert!(Self::ip(&args), "ip {args:?}");
    }

    /// Returns an ADD on a network whose parent interface is this link.
    fn add(&self, id: &str) -> Add {
        Add {
            parent: self.name.clone(),
            ..add(id)
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        Self::ip(&["link", "del", &self.name]);
        Self::ip(&["netns", "del", &self.other]);
    }
}

/// Returns how many addresses of the pool are in conflict, according to the metric.
async fn conflicts(machine: &Machine, pool: &str) -> String {
    let name = "cadastre_agent_address_conflicts";
    machine.metric(name, &[("pool", pool)]).await.to_string()
}

#[tokio::test]
async fn an_address_that_another_host_uses_is_set_aside_until_an_operator_frees_it() {
    let Some(link) = Link::new(1) else {
        return;
    };
    link.address("add", "10.97.0.2/24");
    let spec = json!({"conflictProbe": "BeforeUse", "cooldownSeconds": 0});
    let (api, machine) = start("probed", "10.97.0.0/28", spec, &[]).await;
    let given = machine.add_with(link.add("c1")).await.unwrap();
    assert_eq!(given, "10.97.0.3");

    let node = uid(&api, "probed-1").await;
    eventually("the conflict is reported", async || {
        let subnet = api.subnets.get("probed-1").await?;
        let status = subnet.status.unwrap_or_default();
        let mut conditions = status.conditions.iter();
        let is_true = conditions.any(|it| {
            it.type_ == "AddressConflict" && it.status == "True" && it.message.contains(MAC)
        });
        let listed: Vec<(&str, &str)> = status
            .conflicts
            .iter()
            .map(|it| (&*it.address, &*it.by))
            .collect();
        let events = api.events_of(&node).await?;
        let is_told = events.iter().any(|it| {
            let text = it.message.as_deref().unwrap_or_default();
            it.reason.as_deref() == Some("AddressConflict")
                && text.contains("10.97.0.2 of pool probed")
                && text.contains(MAC)
        });
        anyhow::ensure!(is_true && is_told, "{:?} {events:?}", status.conditions);
        anyhow::ensure!(listed == [("10.97.0.2", MAC)], "{listed:?}");
        Ok(Some(()))
    })
    .await;
    assert_eq!(conflicts(&machine, "probed").await, "1");
    let clean = [("result", "clean")];
    let clean = machine.metric("cadastre_agent_probes_total", &clean).await;
    assert!(clean >= 1.0, "{clean}");

    let (cluster, _) = shared().await;
    let kubeconfig = cluster.control_plane.kubeconfig(ADMIN).unwrap();
    let kubectl = async |args: &str| {
        let mut command = tokio::process::Command::new(kubectl_plugin().unwrap());
        command.args(args.split(' ')).env("KUBECONFIG", &kubeconfig);
        let done = command.output().await.unwrap();
        String::from_utf8([done.stdout, done.stderr].concat()).unwrap()
    };
    let shown = kubectl("show ip 10.97.0.2").await;
    assert!(
        shown.contains("in conflict") && shown.contains(MAC),
        "{shown}"
    );
    let shown = kubectl("show node probed-1").await;
    assert!(
        shown.contains("10.97.0.2 (02:00:00:00:00:07 answers"),
        "{shown}"
    );

    // As long as the other host has the address, no container gets the address.
    let refused = Add {
        addresses: vec![crate::addr("10.97.0.2")],
        ..link.add("c2")
    };
    let refusal = machine.add_with(refused.clone()).await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NotFree, "{refusal}");
    link.address("del", "10.97.0.2/24");
    let freed = kubectl("release 10.97.0.2").await;
    assert!(freed.contains("Freed"), "{freed}");
    let given = machine.add_with(refused).await.unwrap();
    assert_eq!(given, "10.97.0.2");
    eventually("no conflict is left", async || {
        let left = conflicts(&machine, "probed").await;
        Ok((left == "0").then_some(()))
    })
    .await;
}

#[tokio::test]
async fn an_ipv6_address_that_another_host_uses_is_set_aside() {
    let Some(link) = Link::new(2) else {
        return;
    };
    let args = ["addr", "add", "fd00:97::2/64", "dev", "eth0", "nodad"];
    let args: Vec<&str> = ["-n", &link.other].into_iter().chain(args).collect();
    assert!(Link::ip(&args), "ip {args:?}");
    let (cluster, api) = shared().await;
    let ipv6 = json!({"cidrs": ["fd00:97::/124"], "blockSize": 124});
    let spec = json!({"ipv6": ipv6, "conflictProbe": "BeforeUse"});
    api.block_pool("probed6", spec).await.unwrap();
    let machine = Machine::of_group(&cluster.control_plane, &api, "probed6", &[]).await;
    // The probe needs the interface's link-local address. The kernel enables this address only after duplicate address
    // detection, so the ADD is repeated.
    let given = eventually("an address is assigned", async || {
        match machine.add_with(link.add("c1")).await {
            Ok(given) => Ok(Some(given)),
            Err(refusal) if refusal.text.contains("no link-local IPv6 address") => Ok(None),
            Err(refusal) => Err(refusal.into()),
        }
    })
    .await;
    assert_eq!(given, "fd00:97::3");
    eventually("the conflict is counted", async || {
        let found = conflicts(&machine, "probed6").await;
        Ok((found == "1").then_some(()))
    })
    .await;
}

#[tokio::test]
async fn without_a_probe_no_address_is_assigned() {
    let spec = json!({"conflictProbe": "BeforeUse"});
    let (_, machine) = start("unprobed", "10.97.1.0/28", spec, &[]).await;
    let on_no_interface = Add {
        parent: "absent0".to_owned(),
        ..add("c1")
    };
    let refusal = machine.add_with(on_no_interface).await.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Unprobed, "{refusal}");
    let says = "the node has no interface `absent0`";
    assert!(refusal.text.contains(says), "{refusal}");
    let failed = [("result", "failed")];
    let failed = machine.metric("cadastre_agent_probes_total", &failed).await;
    assert!(failed >= 1.0, "{failed}");
}
