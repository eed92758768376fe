//! Pods that ask for certain addresses (`cadastre.dev/addresses`), on any node.
//!
//! No garbage collector runs here, so only the controller itself deletes the claims of these pods.

use anyhow::{Context as _, Result, ensure};
use cadastre_api::pod_claim::claim_of_addresses;
use cadastre_api::{ADDRESSES_ANNOTATION, IPClaim};
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::fixtures::{LIMIT, gone};
use cadastre_e2e::node_agent::{add, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures};
use cadastre_node::{Add, OpErrorKind};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::claims::{claims, ready};
use crate::{node, shared};

/// Creates a pod that asks for these addresses.
async fn asking_pod(fixtures: &Fixtures, name: &str, node: &str, addresses: &str) -> Result<Pod> {
    let pod = serde_json::from_value(json!({
        "metadata": {"name": name, "annotations": {ADDRESSES_ANNOTATION: addresses}},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
    }))?;
    Ok(fixtures.pods.create(&PostParams::default(), &pod).await?)
}

/// Returns the name of the claim for the addresses that the pod asks for.
pub(crate) fn claim_of(pod: &Pod) -> String {
    claim_of_addresses(&pod.name_any(), &pod.uid().unwrap_or_default())
}

pub(crate) async fn has_claim(fixtures: &Fixtures, pod: &Pod) -> Result<bool> {
    Ok(claims(fixtures).get_opt(&claim_of(pod)).await?.is_some())
}

/// Creates a pod that asks for addresses, and adds a container of the same name. Fails unless the container gets these
/// addresses.
async fn run(
    fixtures: &Fixtures,
    agents: &Agents,
    (name, node): (&str, &str),
    addresses: &str,
) -> Result<Pod> {
    let pod = asking_pod(fixtures, name, node, addresses).await?;
    let has = agents.run(fixtures, node, &pod).await?;
    ensure!(has.join(",") == addresses, "{name}: {has:?}");
    Ok(pod)
}

/// Sends the ADD of a pod once, and returns the agent's error. Fails if the ADD succeeds.
async fn try_add(agents: &Agents, node: &str, pod: &Pod) -> Result<cadastre_node::OpError> {
    let request = Add {
        pod: Some(pod_ref(pod)),
        ..add(&pod.name_any())
    };
    agents
        .add(node, request)
        .await?
        .err()
        .context("the pod has an address")
}

/// Returns the address of a range that is `n` addresses after the first one.
pub(crate) fn nth(cidr: &str, n: u128) -> Result<String> {
    let first = Cidr::parse_strict(cidr)?.first();
    let value = first.value + n;
    Ok(Addr { value, ..first }.to_string())
}

#[tokio::test]
async fn a_pod_gets_the_address_that_it_asks_for_on_any_node() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.78.1.0/26"], "blockSize": 28},
        "cooldownSeconds": 0, "maxBlocksPerNode": 1,
    });
    fixtures.block_pool("ask", spec).await?;
    for name in ["ask-1", "ask-2"] {
        node(&fixtures, &agents, "ask", name).await?;
    }
    let own = fixtures.listed("ask-1", 1).await?[0].clone();
    let others = fixtures.listed("ask-2", 1).await?[0].clone();
    let blocks = ["10.78.1.0/28", "10.78.1.16/28", "10.78.1.32/28"].into_iter();
    let mut unlisted = blocks.filter(|it| ![&*own, &*others].contains(it));
    let unlisted = unlisted.next().context("no free block")?;

    // The address is in the node's own block, so no claim is needed.
    let at_home = run(&fixtures, &agents, ("home", "ask-1"), &nth(&own, 9)?).await?;
    // The address is in a block of another node (`away`), or in no node's block (`new`).
    for (name, address) in [("away", nth(&others, 9)?), ("new", nth(unlisted, 5)?)] {
        let pod = run(&fixtures, &agents, (name, "ask-1"), &address).await?;
        let status = ready(&fixtures, &claim_of(&pod), "InUse").await?;
        assert_eq!(status.node.as_deref(), Some("ask-1"));
        let claim = claims(&fixtures).get(&claim_of(&pod)).await?;
        let [owner] = claim.owner_references() else {
            panic!("{:?}", claim.metadata);
        };
        assert_eq!((&*owner.kind, &*owner.name), ("Pod", name));
        assert_eq!(Some(&owner.uid), pod.metadata.uid.as_ref());

        // The pod is deleted. A new pod on another node asks for the same address, and waits until the deleted pod's
        // container is gone.
        fixtures.delete_pod(name).await?;
        let next = format!("{name}-next");
        let moved = asking_pod(&fixtures, &next, "ask-2", &address).await?;
        let text = fixtures.event_about(&moved, "AddressUnavailable").await?;
        assert!(text.contains(&claim_of(&pod)), "{text}");
        let refusal = try_add(&agents, "ask-2", &moved).await?;
        assert_eq!(refusal.why, OpErrorKind::NotInBlocks, "{refusal}");
        assert!(refusal.text.contains(&claim_of(&moved)), "{refusal}");
        agents.free("ask-1", name).await?;
        assert_eq!(agents.run(&fixtures, "ask-2", &moved).await?, [address]);
        gone(&claims(&fixtures), &claim_of(&pod)).await?;
        fixtures.delete_pod(&next).await?;
        agents.free("ask-2", &next).await?;
        gone(&claims(&fixtures), &claim_of(&moved)).await?;
    }
    assert!(!has_claim(&fixtures, &at_home).await?);
    Ok(())
}

#[tokio::test]
async fn a_pod_that_cannot_have_its_address_hears_why() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.78.2.0/26"], "blockSize": 28}, "reserved": ["10.78.2.3"],
        "cooldownSeconds": 0, "maxBlocksPerNode": 1,
    });
    fixtures.block_pool("refuse", spec).await?;
    for name in ["refuse-1", "refuse-2"] {
        node(&fixtures, &agents, "refuse", name).await?;
    }
    let block = fixtures.listed("refuse-1", 1).await?[0].clone();
    fixtures.listed("refuse-2", 1).await?;
    let used = nth(&block, 6)?;
    run(&fixtures, &agents, ("user", "refuse-1"), &used).await?;

    // On the node where another pod has the address, the agent's error names that other pod.
    let here = asking_pod(&fixtures, "here", "refuse-1", &used).await?;
    let what = "the agent says who has the address";
    until(what, LIMIT, async || {
        let refusal = try_add(&agents, "refuse-1", &here).await?;
        let is = refusal.why == OpErrorKind::NotFree && refusal.text.contains("default/user");
        ensure!(is, "{refusal}");
        Ok(Some(()))
    })
    .await?;
    assert!(!has_claim(&fixtures, &here).await?);

    let told = async |name: &str, address: &str, part: &str| {
        let pod = asking_pod(&fixtures, name, "refuse-2", address).await?;
        let text = fixtures.event_about(&pod, "AddressUnavailable").await?;
        ensure!(text.contains(part), "{text}");
        Ok(pod)
    };
    let in_use = format!("in block {block} of node refuse-1");
    let waits = told("elsewhere", &used, &in_use).await?;
    told("outside", "10.99.99.99", "not of one pool").await?;
    told("reserved", "10.78.2.3", "is reserved in the pool").await?;
    let theirs = nth("10.78.2.0/28", 8)?;
    claim_in_another_namespace(&fixtures, &theirs).await?;
    told("theirs", &theirs, "is the address of claim elsewhere/fixed").await?;

    // An annotation that is no address is ignored, and the pod gets any address.
    let garbage = asking_pod(&fixtures, "garbage", "refuse-2", "10.78.2.300").await?;
    let has = agents.run(&fixtures, "refuse-2", &garbage).await?;
    assert!(has[0].starts_with("10.78.2."), "{has:?}");
    let text = fixtures.event_about(&garbage, "InvalidAnnotation").await?;
    assert!(text.contains("10.78.2.300"), "{text}");

    // When the address is free, the pod that has waited for the address gets it.
    for name in ["here", "user"] {
        fixtures.delete_pod(name).await?;
    }
    agents.free("refuse-1", "user").await?;
    assert_eq!(agents.run(&fixtures, "refuse-2", &waits).await?, [used]);
    Ok(())
}

async fn claim_in_another_namespace(fixtures: &Fixtures, address: &str) -> Result<()> {
    let post = PostParams::default();
    let namespace = serde_json::from_value(json!({"metadata": {"name": "elsewhere"}}))?;
    let namespaces: Api<Namespace> = Api::all(fixtures.client.clone());
    namespaces.create(&post, &namespace).await?;
    let claims: Api<IPClaim> = Api::namespaced(fixtures.client.clone(), "elsewhere");
    let claim = serde_json::from_value(json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPClaim",
        "metadata": {"name": "fixed"}, "spec": {"addresses": [address]},
    }))?;
    claims.create(&post, &claim).await?;
    until("the claim has its address", LIMIT, async || {
        let status = claims.get("fixed").await?.status.unwrap_or_default();
        Ok((status.addresses == [address]).then_some(()))
    })
    .await
}

#[tokio::test]
async fn a_pool_says_whether_addresses_can_be_asked_for() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.78.3.0/27"], "blockSize": 28},
        "cooldownSeconds": 0, "maxBlocksPerNode": 1, "explicitAddresses": "Deny",
    });
    fixtures.block_pool("deny", spec).await?;
    node(&fixtures, &agents, "deny", "deny-1").await?;
    let block = fixtures.listed("deny-1", 1).await?[0].clone();
    let is_low = block == "10.78.3.0/28";
    let free = if is_low { "10.78.3.20" } else { "10.78.3.5" };

    let inside = asking_pod(&fixtures, "inside", "deny-1", &nth(&block, 5)?).await?;
    let outside = asking_pod(&fixtures, "beyond", "deny-1", free).await?;
    let what = "the agent refuses the address";
    until(what, LIMIT, async || {
        let refusal = try_add(&agents, "deny-1", &inside).await?;
        let is = refusal.why == OpErrorKind::NotUsable;
        ensure!(
            is && refusal.text.contains("explicitAddresses: Deny"),
            "{refusal}"
        );
        Ok(Some(()))
    })
    .await?;
    let text = fixtures.event_about(&outside, "AddressUnavailable").await?;
    assert!(text.contains("ask whoever may change the pool"), "{text}");

    let allow: Patch<Value> = Patch::Merge(json!({"spec": {"explicitAddresses": "Allow"}}));
    let params = PatchParams::default();
    fixtures.pools.patch("deny", &params, &allow).await?;
    assert_eq!(agents.run(&fixtures, "deny-1", &outside).await?, [free]);
    let has = agents.run(&fixtures, "deny-1", &inside).await?;
    assert_eq!(has, [nth(&block, 5)?]);
    Ok(())
}
