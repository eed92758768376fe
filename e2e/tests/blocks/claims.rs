//! IPClaims: addresses that stay with a workload.

use anyhow::{Context as _, Result};
use cadastre_api::{CLAIM_ANNOTATION, IPClaim, IPClaimStatus};
use cadastre_core::Addr;
use cadastre_e2e::fixtures::{LIMIT, gone};
use cadastre_e2e::node_agent::{add, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures};
use cadastre_node::{Add, OpErrorKind};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::{node, shared};

pub(crate) fn claims(fixtures: &Fixtures) -> Api<IPClaim> {
    Api::default_namespaced(fixtures.client.clone())
}

pub(crate) async fn create(fixtures: &Fixtures, name: &str, spec: Value) -> Result<IPClaim> {
    let claim = serde_json::from_value(json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPClaim",
        "metadata": {"name": name}, "spec": spec,
    }))?;
    let claims = claims(fixtures);
    Ok(claims.create(&PostParams::default(), &claim).await?)
}

/// Waits until the condition Ready of a claim has this reason. Returns the claim's status.
pub(crate) async fn ready(fixtures: &Fixtures, name: &str, reason: &str) -> Result<IPClaimStatus> {
    let what = format!("claim {name} is {reason}");
    until(&what, LIMIT, async || {
        let claim = claims(fixtures).get(name).await?;
        let status = claim.status.unwrap_or_default();
        let is = status.conditions.iter().any(|it| it.reason == reason);
        anyhow::ensure!(is, "{status:?}");
        Ok(Some(status))
    })
    .await
}

/// Creates a pod that names the claim, and adds a container of the same name. Returns the container's addresses.
async fn run(
    fixtures: &Fixtures,
    agents: &Agents,
    node: &str,
    pod: &str,
    claim: &str,
) -> Result<Vec<String>> {
    let object = serde_json::from_value(json!({
        "metadata": {"name": pod, "annotations": {CLAIM_ANNOTATION: claim}},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
    }))?;
    let created = fixtures
        .pods
        .create(&PostParams::default(), &object)
        .await?;
    agents.run(fixtures, node, &created).await
}

#[tokio::test]
async fn the_address_of_a_claim_follows_its_pod_from_node_to_node() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.23.10.0/26"], "blockSize": 28},
        "ipv6": {"cidrs": ["fd00:23:10::/118"], "blockSize": 124},
    });
    fixtures.block_pool("move", spec).await?;
    let nodes = ["move-1", "move-2"];
    for name in nodes {
        node(&fixtures, &agents, "move", name).await?;
    }
    create(&fixtures, "web", json!({"pool": "move"})).await?;
    let has = ready(&fixtures, "web", "Available").await?.addresses;
    assert_eq!(has.len(), 2, "one of each family: {has:?}");

    for round in 0..6 {
        let (pod, on) = (format!("web-{round}"), nodes[round % 2]);
        assert_eq!(run(&fixtures, &agents, on, &pod, "web").await?, has);
        let status = ready(&fixtures, "web", "InUse").await?;
        assert_eq!(
            (status.node.as_deref(), status.pod.as_deref()),
            (Some(on), Some(&*pod))
        );
        // A pod that does not name the claim gets no address of the claim, even if the pod asks for this address.
        let other = format!("other-{round}");
        let request = Add {
            pod: Some(pod_ref(&fixtures.pod(&other, on, &[]).await?)),
            addresses: vec![has[0].parse::<std::net::IpAddr>()?.into()],
            ..add(&other)
        };
        let refusal = agents.add(on, request).await?.unwrap_err();
        assert_eq!(refusal.why, OpErrorKind::UnknownPool, "{refusal}");
        fixtures.delete_pod(&other).await?;
        fixtures.delete_pod(&pod).await?;
        agents.free(on, &pod).await?;
    }
    ready(&fixtures, "web", "Available").await?;
    Ok(())
}

#[tokio::test]
async fn a_claim_that_is_deleted_in_use_stays_until_its_pod_is_gone() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.23.11.0/27"], "blockSize": 28},
        "cooldownSeconds": 0,
    });
    fixtures.block_pool("stay", spec).await?;
    node(&fixtures, &agents, "stay", "stay-1").await?;
    let in_block = fixtures.listed("stay-1", 1).await?[0] == "10.23.11.0/28";
    let free = if in_block {
        "10.23.11.20"
    } else {
        "10.23.11.9"
    };
    create(&fixtures, "fixed", json!({"addresses": [free]})).await?;
    assert_eq!(
        run(&fixtures, &agents, "stay-1", "fixed-0", "fixed").await?,
        [free]
    );
    ready(&fixtures, "fixed", "InUse").await?;
    claims(&fixtures)
        .delete("fixed", &DeleteParams::default())
        .await?;
    let what = "the condition says that the claim waits";
    until(what, LIMIT, async || {
        let claim = claims(&fixtures).get("fixed").await?;
        let status = claim.status.context("no status")?;
        let text = &status.conditions[0].message;
        anyhow::ensure!(text.contains("is deleted when no node has"), "{text}");
        Ok(Some(()))
    })
    .await?;
    fixtures.delete_pod("fixed-0").await?;
    agents.free("stay-1", "fixed-0").await?;
    gone(&claims(&fixtures), "fixed").await?;
    Ok(())
}

#[tokio::test]
async fn a_claim_gets_an_address_in_the_block_of_a_node_that_no_pod_uses() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.23.16.0/27"], "blockSize": 28},
        "cooldownSeconds": 0, "maxBlocksPerNode": 1,
    });
    fixtures.block_pool("wide", spec).await?;
    for name in ["wide-1", "wide-2"] {
        node(&fixtures, &agents, "wide", name).await?;
    }
    let block = fixtures.listed("wide-1", 1).await?[0].clone();
    let plain = fixtures.pod("plain", "wide-1", &[]).await?;
    let used = agents.run(&fixtures, "wide-1", &plain).await?[0].clone();
    create(&fixtures, "taken", json!({"addresses": [used]})).await?;
    let text = ready(&fixtures, "taken", "AddressInUse").await?.conditions[0]
        .message
        .clone();
    assert!(
        text.contains(&format!("in block {block} of node wide-1")),
        "{text}"
    );

    let free = Addr::parse_strict(&used).context("no address")?;
    let free = Addr {
        value: free.value + 1,
        ..free
    }
    .to_string();
    create(&fixtures, "within", json!({"addresses": [free]})).await?;
    ready(&fixtures, "within", "Available").await?;
    let ask = async |pod: &str| {
        let request = Add {
            pod: Some(pod_ref(&fixtures.pod(pod, "wide-1", &[]).await?)),
            addresses: vec![free.parse::<std::net::IpAddr>()?.into()],
            ..add(pod)
        };
        agents.add("wide-1", request).await
    };
    let refusal = ask("asks").await?.unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NotInBlocks, "{refusal}");
    // The test deletes the pod. Otherwise, the controller would create a claim for the address that the pod asks for.
    fixtures.delete_pod("asks").await?;
    // In the second round, the claim's pod runs on the node whose own block contains the claim's address.
    for (round, on) in ["wide-2", "wide-1", "wide-2"].into_iter().enumerate() {
        let pod = format!("within-{round}");
        let has = run(&fixtures, &agents, on, &pod, "within").await?;
        assert_eq!(has, [free.as_str()]);
        let status = ready(&fixtures, "within", "InUse").await?;
        assert_eq!(status.node.as_deref(), Some(on));
        fixtures.delete_pod(&pod).await?;
        agents.free(on, &pod).await?;
    }
    claims(&fixtures)
        .delete("within", &DeleteParams::default())
        .await?;
    gone(&claims(&fixtures), "within").await?;
    let what = "the node has the address again";
    fixtures
        .subnet_until("wide-1", what, |it| {
            let status = it.status.as_ref();
            let is_returned = status.is_some_and(|it| it.withdrawn.is_empty());
            is_returned && it.spec.withdraw.is_empty() && it.spec.claimed.is_empty()
        })
        .await?;
    assert_eq!(ask("asks-again").await??, [free.as_str()]);
    fixtures.delete_pod("plain").await?;
    agents.free("wide-1", "plain").await?;
    ready(&fixtures, "taken", "Available").await?;
    Ok(())
}

#[tokio::test]
async fn the_api_server_rejects_claims_that_cannot_be_served() -> Result<()> {
    let (_, fixtures, _) = shared().await?;
    let refusal = async |name: &str, spec: Value| {
        let error = create(&fixtures, name, spec).await.unwrap_err();
        error.to_string()
    };
    let text = refusal("none", json!({})).await;
    assert!(
        text.contains("name a pool, or give the addresses"),
        "{text}"
    );
    let text = refusal("two", json!({"addresses": ["10.0.0.1", "10.0.0.2"]})).await;
    assert!(text.contains("at most one IPv4 and one IPv6"), "{text}");
    let text = refusal("bad", json!({"addresses": ["10.0.0.300"]})).await;
    assert!(text.contains("is not an address"), "{text}");
    let text = refusal(
        "late",
        json!({"pool": "a", "ttlSecondsAfterUse": 2_147_483_648_u32}),
    )
    .await;
    assert!(text.contains("ttlSecondsAfterUse"), "{text}");
    create(&fixtures, "kept", json!({"pool": "a"})).await?;
    // The patch has no resourceVersion, because the controller may write the claim meanwhile.
    let change = Patch::Merge(json!({"spec": {"pool": "b"}}));
    let error = claims(&fixtures)
        .patch("kept", &PatchParams::default(), &change)
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cannot be changed"), "{text}");
    Ok(())
}
