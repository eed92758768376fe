//! Interfaces of virtual machines with IPAMClaims. Each interface keeps its addresses through restarts and live
//! migrations of its machine. KubeVirt is played by a stand-in ([`KubeVirt`]). The garbage collector and the CRD of
//! IPAMClaims are real.

#![allow(clippy::unwrap_used)] // allowed in helpers as in tests

use anyhow::{Context as _, Result, ensure};
use cadastre_api::{IPAMBlock, IPClaim};
use cadastre_e2e::fixtures::{LIMIT, gone};
use cadastre_e2e::kubevirt::{INTERFACE, KubeVirt};
use cadastre_e2e::node_agent::{add, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures, KcmOptions, Options, TestCluster};
use cadastre_node::{Add, Attachment, OpErrorKind};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

/// The name of the network to which the virtual machines' interfaces belong. The pool of this network has the same
/// name.
const NETWORK: &str = "vlan7";

struct Lab {
    fixtures: Fixtures,
    agents: Agents,
    kubevirt: KubeVirt,
    ip_claims: Api<IPClaim>,
}

impl Lab {
    /// Returns the ADD for the pod's interface on the network. The network's configuration names the pool.
    fn add(pod: &Pod) -> Add {
        let request = add(&pod.name_any());
        Add {
            attachment: Attachment {
                network: NETWORK.to_owned(),
                ifname: INTERFACE.to_owned(),
                ..request.attachment
            },
            pod: Some(pod_ref(pod)),
            pools: vec![NETWORK.to_owned()],
            ..request
        }
    }

    /// Adds the pod's interface, and returns its addresses.
    async fn run(&self, node: &str, pod: &Pod) -> Result<Vec<String>> {
        let what = format!("interface {INTERFACE} of {} has addresses", pod.name_any());
        until(&what, LIMIT, async || {
            Ok(Some(self.agents.add(node, Self::add(pod)).await??))
        })
        .await
    }

    /// Deletes the pod, and then its interface, as the kubelet does.
    async fn end(&self, node: &str, pod: &Pod) -> Result<()> {
        self.fixtures.delete_pod(&pod.name_any()).await?;
        self.agents.delete(node, Self::add(pod).attachment).await
    }

    /// Waits until the IPAMBlock of the address has this owner and these standbys.
    async fn held_by(&self, address: &str, owner: &str, standby: &[&str]) -> Result<()> {
        let what = format!("{owner} owns {address}, and the standbys are {standby:?}");
        until(&what, LIMIT, async || {
            let all: Vec<IPAMBlock> = self
                .fixtures
                .blocks
                .list(&ListParams::default())
                .await?
                .items;
            let prefix = format!("{address}/");
            let block = all.into_iter().find(|it| it.spec.cidr.starts_with(&prefix));
            let spec = block.context("no IPAMBlock")?.spec;
            let names: Vec<&str> = spec.standby.iter().map(|it| it.name.as_str()).collect();
            ensure!(spec.owner.name == owner && names == standby, "{spec:?}");
            Ok(Some(()))
        })
        .await
    }
}

/// Returns the addresses without their prefix lengths.
fn bare(ips: &[String]) -> Vec<&str> {
    let bare = |ip: &'_ String| ip.split_once('/').map_or(0, |(address, _)| address.len());
    ips.iter().map(|ip| &ip[..bare(ip)]).collect()
}

#[tokio::test]
async fn the_addresses_of_an_interface_stay_with_the_machine_as_long_as_its_ipam_claim()
-> Result<()> {
    let flags = ["--log-level", "debug", "--leak-grace", "2"];
    let cluster = TestCluster::start(Options::default(), &flags).await?;
    let plane = &cluster.control_plane;
    let fixtures = cluster.fixtures().await?;
    let kubevirt = KubeVirt::install(plane, &fixtures).await?;
    // The garbage collector looks for new kinds only every 30 seconds.
    let _kcm = plane.start_kcm(&KcmOptions {
        controllers: vec!["garbage-collector-controller".to_owned()],
        ..KcmOptions::default()
    })?;
    let lab = Lab {
        agents: Agents::new(plane)?,
        ip_claims: Api::namespaced(fixtures.client.clone(), "default"),
        kubevirt,
        fixtures,
    };
    let spec = json!({
        "ipv4": {"cidrs": ["10.79.8.0/24"], "blockSize": 28, "gateway": "None"},
        "ipv6": {"cidrs": ["fd00:79:8::/112"], "blockSize": 124, "gateway": "None"},
        "networks": [NETWORK], "assignment": "Manual", "addressPrefix": "Pool", "cooldownSeconds": 1,
    });
    lab.fixtures.block_pool(NETWORK, spec).await?;
    let (a, b) = ("vm-node-1", "vm-node-2");
    for name in [a, b] {
        let node = lab.fixtures.node(NETWORK, name).await?;
        lab.agents.join(&node)?;
    }
    start_and_migrate(&lab, a, b).await?;
    stop_and_delete(&lab, a, b).await?;
    what_waits_is_told(&lab, a).await
}

async fn start_and_migrate(lab: &Lab, a: &str, b: &str) -> Result<()> {
    let kubevirt = &lab.kubevirt;
    kubevirt.start("db", NETWORK).await?;
    let source = kubevirt.pod("db", NETWORK, "db-source", a).await?;
    let has = lab.run(a, &source).await?;
    assert_eq!(has.len(), 2);
    let ips = kubevirt.ips("db", NETWORK).await?;
    assert_eq!(bare(&ips), has);
    assert!(
        ips[0].ends_with("/24") && ips[1].ends_with("/112"),
        "{ips:?}"
    );
    // The pod's `eth0` gets no address, because no pool here serves every pod.
    let own = Add {
        pod: Some(pod_ref(&source)),
        ..add("db-source")
    };
    let refusal = lab.agents.add(a, own).await?.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NoBlock, "{refusal}");

    // A second virtual machine does not get the addresses of the first one, not even on the node to which the first one
    // migrates.
    kubevirt.start("web", NETWORK).await?;
    let other = kubevirt.pod("web", NETWORK, "web-1", b).await?;
    let others = lab.run(b, &other).await?;
    assert!(others.iter().all(|it| !has.contains(it)), "{others:?}");
    let target = kubevirt.pod("db", NETWORK, "db-target", b).await?;
    assert_eq!(lab.run(b, &target).await?, has);
    for address in &has {
        lab.held_by(address, a, &[b]).await?;
    }
    kubevirt.migrated("db-target").await?;
    for address in &has {
        lab.held_by(address, b, &[a]).await?;
    }
    lab.end(a, &source).await?;
    // The virtual machine starts to migrate back to its first node, but this migration is aborted.
    let back = kubevirt.pod("db", NETWORK, "db-back", a).await?;
    assert_eq!(lab.run(a, &back).await?, has);
    lab.end(a, &back).await?;
    for address in &has {
        lab.held_by(address, b, &[]).await?;
    }
    assert_eq!(
        kubevirt.ips("db", NETWORK).await?,
        ips,
        "they were written once"
    );
    lab.end(b, &target).await?;
    lab.end(b, &other).await
}

async fn stop_and_delete(lab: &Lab, a: &str, b: &str) -> Result<()> {
    let kubevirt = &lab.kubevirt;
    let ips = kubevirt.ips("db", NETWORK).await?;
    kubevirt.stop("db").await?;
    kubevirt.start("db", NETWORK).await?;
    let again = kubevirt.pod("db", NETWORK, "db-again", a).await?;
    assert_eq!(
        lab.run(a, &again).await?,
        bare(&ips),
        "the addresses of before"
    );

    // The virtual machine is deleted while its pod runs. No other pod gets the addresses before this pod is gone.
    let name = format!("db.{NETWORK}");
    kubevirt.delete("db").await?;
    gone(&kubevirt.ipam_claims, &name).await?;
    until("the IPClaim is deleted, and waits", LIMIT, async || {
        let claim = lab.ip_claims.get(&name).await?;
        ensure!(
            claim.metadata.deletion_timestamp.is_some(),
            "it is not deleted"
        );
        Ok(Some(()))
    })
    .await?;
    for address in bare(&ips) {
        lab.held_by(address, a, &[]).await?;
    }
    lab.end(a, &again).await?;
    gone(&lab.ip_claims, &name).await?;

    // A new virtual machine with the name of the deleted one gets a new IPAMClaim.
    kubevirt.start("db", NETWORK).await?;
    let anew = kubevirt.pod("db", NETWORK, "db-anew", b).await?;
    let has = lab.run(b, &anew).await?;
    assert_eq!(bare(&kubevirt.ips("db", NETWORK).await?), has);
    lab.end(b, &anew).await
}

async fn what_waits_is_told(lab: &Lab, a: &str) -> Result<()> {
    let kubevirt = &lab.kubevirt;
    kubevirt.start("lost", NETWORK).await?;
    let params = DeleteParams::default();
    kubevirt
        .ipam_claims
        .delete(&format!("lost.{NETWORK}"), &params)
        .await?;
    let pod = kubevirt.pod("lost", NETWORK, "lost-1", a).await?;
    let text = lab.fixtures.event_about(&pod, "NoPoolForClaim").await?;
    assert!(
        text.contains("IPAMClaim default/lost.vlan7 does not exist"),
        "{text}"
    );
    let refusal = lab.agents.add(a, Lab::add(&pod)).await?.unwrap_err();
    assert!(
        refusal.text.contains("IPClaim `default/lost.vlan7`"),
        "{refusal}"
    );

    kubevirt.start("alone", "vlan8").await?;
    let pod = kubevirt.pod("alone", "vlan8", "alone-1", a).await?;
    let text = lab.fixtures.event_about(&pod, "NoPoolForClaim").await?;
    assert!(text.contains("no pool serves network \"vlan8\""), "{text}");
    lab.fixtures
        .change_pool(NETWORK, json!({"networks": [NETWORK, "vlan8"]}))
        .await?;
    assert_eq!(
        lab.run(a, &pod).await?,
        bare(&kubevirt.ips("alone", "vlan8").await?)
    );
    Ok(())
}
