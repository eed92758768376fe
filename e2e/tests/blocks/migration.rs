//! A virtual machine that migrates: two pods of one VirtualMachineInstance have the address of a claim.
//!
//! KubeVirt itself does not run here. The pods have the owner and the annotation that KubeVirt gives them.

use anyhow::{Context as _, Result};
use cadastre_api::{CLAIM_ANNOTATION, IPAMBlock, MIGRATION_READY_ANNOTATION};
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::node_agent::{add, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures};
use cadastre_node::{Add, OpErrorKind};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::claims::{create, ready};
use crate::{node, shared};

/// Creates a pod that belongs to the VirtualMachineInstance with the UID `vmi`. The pod names the claim `vm`.
async fn pod(fixtures: &Fixtures, node: &str, name: &str, vmi: &str) -> Result<Pod> {
    let object = serde_json::from_value(json!({
        "metadata": {
            "name": name,
            "annotations": {CLAIM_ANNOTATION: "vm"},
            "ownerReferences": [{
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vm",
                "uid": vmi, "controller": true,
            }],
        },
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
    }))?;
    Ok(fixtures
        .pods
        .create(&PostParams::default(), &object)
        .await?)
}

/// Waits until the IPAMBlock of the address has this owner and these standbys.
async fn held_by(fixtures: &Fixtures, address: &str, owner: &str, standby: &[&str]) -> Result<()> {
    let cidr = format!("{address}/32");
    let what = format!("{owner} owns {address}, and the standbys are {standby:?}");
    until(&what, LIMIT, async || {
        let all: Vec<IPAMBlock> = fixtures.blocks.list(&ListParams::default()).await?.items;
        let block = all.into_iter().find(|it| it.spec.cidr == cidr);
        let spec = block.context("no IPAMBlock")?.spec;
        let names: Vec<&str> = spec.standby.iter().map(|it| it.name.as_str()).collect();
        anyhow::ensure!(spec.owner.name == owner && names == standby, "{spec:?}");
        Ok(Some(()))
    })
    .await
}

/// Asserts that an ADD for the pod fails, because the pod's node must not assign the claim's address to this pod.
async fn waits(agents: &Agents, node: &str, pod: &Pod) -> Result<()> {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let request = Add {
        pod: Some(pod_ref(pod)),
        ..add(&name)
    };
    let refusal = agents.add(node, request).await?.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NoBlock, "{refusal}");
    assert!(refusal.text.contains("IPClaim `default/vm`"), "{refusal}");
    Ok(())
}

#[tokio::test]
async fn two_pods_of_a_virtual_machine_have_the_address_while_it_migrates() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.23.17.0/26"], "blockSize": 28}});
    fixtures.block_pool("migrate", spec).await?;
    let (a, b, c) = ("migrate-1", "migrate-2", "migrate-3");
    for name in [a, b, c] {
        node(&fixtures, &agents, "migrate", name).await?;
    }
    create(&fixtures, "vm", json!({"pool": "migrate"})).await?;
    let has = ready(&fixtures, "vm", "Available").await?.addresses;
    let address = has[0].as_str();

    let source = pod(&fixtures, a, "vm-source", "vmi-1").await?;
    assert_eq!(agents.run(&fixtures, a, &source).await?, has);
    held_by(&fixtures, address, a, &[]).await?;
    let target = pod(&fixtures, b, "vm-target", "vmi-1").await?;
    assert_eq!(agents.run(&fixtures, b, &target).await?, has);
    held_by(&fixtures, address, a, &[b]).await?;

    // Two further pods do not get the address: a pod of a different virtual machine on the standby's node, and a third
    // pod of this virtual machine.
    let other = pod(&fixtures, b, "vm-other", "vmi-2").await?;
    waits(&agents, b, &other).await?;
    let third = pod(&fixtures, c, "vm-third", "vmi-1").await?;
    waits(&agents, c, &third).await?;
    for name in ["vm-other", "vm-third"] {
        fixtures.delete_pod(name).await?;
    }

    let ready_now = json!({"metadata": {"annotations": {MIGRATION_READY_ANNOTATION: "now"}}});
    let (change, params) = (Patch::Merge(ready_now), PatchParams::default());
    fixtures.pods.patch("vm-target", &params, &change).await?;
    held_by(&fixtures, address, b, &[a]).await?;
    // The status is written after the block.
    until(
        "the claim's status names the new owner",
        LIMIT,
        async || {
            let status = ready(&fixtures, "vm", "InUse").await?;
            Ok((status.node.as_deref() == Some(b)).then_some(()))
        },
    )
    .await?;

    fixtures.delete_pod("vm-source").await?;
    agents.free(a, "vm-source").await?;
    held_by(&fixtures, address, b, &[]).await?;

    // The virtual machine starts to migrate back to its first node: a target pod is created there. Then this migration
    // is aborted.
    let back = pod(&fixtures, a, "vm-back", "vmi-1").await?;
    assert_eq!(agents.run(&fixtures, a, &back).await?, has);
    held_by(&fixtures, address, b, &[a]).await?;
    fixtures.delete_pod("vm-back").await?;
    agents.free(a, "vm-back").await?;
    held_by(&fixtures, address, b, &[]).await?;

    fixtures.delete_pod("vm-target").await?;
    agents.free(b, "vm-target").await?;
    ready(&fixtures, "vm", "Available").await?;
    Ok(())
}
