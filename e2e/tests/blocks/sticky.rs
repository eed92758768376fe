//! Sticky addresses: the pods of a StatefulSet keep their addresses, one claim for each ordinal.
//!
//! No StatefulSet controller runs here. So the tests create the pods, with the names, annotations and owner that a
//! StatefulSet controller would give them. No garbage collector runs either.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use cadastre_api::{CLAIM_FINALIZER, IPClaim, STICKY_ANNOTATION, STICKY_TTL_ANNOTATION};
use cadastre_e2e::fixtures::{LIMIT, gone};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, ResourceQuota};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Resource as _, ResourceExt as _};
use serde_json::{Value, json};

use crate::claims::{claims, create, ready};
use crate::{node, shared};

/// Creates a StatefulSet whose pod template has the annotations.
async fn stateful_set(
    api: &Api<StatefulSet>,
    name: &str,
    annotations: Value,
) -> Result<StatefulSet> {
    let set = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "serviceName": name, "replicas": 3, "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}, "annotations": annotations},
                "spec": {"containers": [{"name": "c", "image": "none"}]},
            },
        },
    }))?;
    Ok(api.create(&PostParams::default(), &set).await?)
}

/// Returns the pod with this ordinal, bound to a node. Does not create the pod.
fn pod_of(set: &StatefulSet, ordinal: usize, node: &str) -> Result<Pod> {
    let spec = set.spec.as_ref().context("no spec")?;
    let template = spec.template.metadata.as_ref();
    Ok(serde_json::from_value(json!({
        "metadata": {
            "name": format!("{}-{ordinal}", set.name_any()),
            "annotations": template.and_then(|it| it.annotations.clone()),
            "ownerReferences": [set.controller_owner_ref(&())],
        },
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "none"}]},
    }))?)
}

/// Creates the pod with this ordinal on a node, adds its container, and returns the container's addresses.
async fn run(
    fixtures: &Fixtures,
    agents: &Agents,
    set: &StatefulSet,
    (ordinal, node): (usize, &str),
) -> Result<Vec<String>> {
    let pod = pod_of(set, ordinal, node)?;
    let created = fixtures.pods.create(&PostParams::default(), &pod).await?;
    agents.run(fixtures, node, &created).await
}

/// Deletes the pod of an ordinal, and its container on the node.
async fn end(
    fixtures: &Fixtures,
    agents: &Agents,
    set: &StatefulSet,
    (ordinal, node): (usize, &str),
) -> Result<()> {
    let name = format!("{}-{ordinal}", set.name_any());
    fixtures.delete_pod(&name).await?;
    agents.free(node, &name).await
}

fn sets(fixtures: &Fixtures) -> Api<StatefulSet> {
    Api::default_namespaced(fixtures.client.clone())
}

#[tokio::test]
async fn ordinals_keep_their_addresses_from_node_to_node() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.23.12.0/26"], "blockSize": 28},
        "ipv6": {"cidrs": ["fd00:23:12::/118"], "blockSize": 124},
    });
    fixtures.block_pool("sticky", spec).await?;
    let nodes = ["sticky-1", "sticky-2"];
    for name in nodes {
        node(&fixtures, &agents, "sticky", name).await?;
    }
    let set = stateful_set(
        &sets(&fixtures),
        "ledger",
        json!({STICKY_ANNOTATION: "true"}),
    )
    .await?;
    // A user creates the claim of the last ordinal, with an address of the lowest of the pool's four blocks. Nodes get
    // the highest blocks first, so the address is free.
    let certain = "10.23.12.2";
    create(&fixtures, "ledger-3", json!({"addresses": [certain]})).await?;
    let mut has: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for round in 0..4 {
        for ordinal in 0..4 {
            let on = nodes[(ordinal + round) % 2];
            let addresses = run(&fixtures, &agents, &set, (ordinal, on)).await?;
            let first = has.entry(ordinal).or_insert_with(|| addresses.clone());
            assert_eq!(*first, addresses, "ordinal {ordinal} in round {round}");
        }
        for ordinal in 0..4 {
            let on = nodes[(ordinal + round) % 2];
            end(&fixtures, &agents, &set, (ordinal, on)).await?;
        }
    }
    assert_eq!(has[&3], [certain], "the claim of the user");
    assert!(has[&0].len() == 2 && has[&0] != has[&1], "{has:?}");
    let claim = claims(&fixtures).get("ledger-0").await?;
    assert_eq!(claim.spec.pool.as_deref(), Some("sticky"));
    assert_eq!(claim.spec.ttl_seconds_after_use, None);
    assert_eq!(claim.finalizers(), [CLAIM_FINALIZER]);
    let [owner] = claim.owner_references() else {
        panic!("{:?}", claim.metadata);
    };
    assert_eq!((&*owner.kind, &*owner.name), ("StatefulSet", "ledger"));
    assert_eq!(Some(&owner.uid), set.metadata.uid.as_ref());
    assert_eq!((owner.controller, owner.block_owner_deletion), (None, None));
    let of_user = claims(&fixtures).get("ledger-3").await?;
    assert!(of_user.owner_references().is_empty(), "it stays as it was");
    Ok(())
}

#[tokio::test]
async fn after_scaling_down_a_claim_stays_for_its_time_after_use() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.23.13.0/27"], "blockSize": 28},
        "cooldownSeconds": 0,
    });
    fixtures.block_pool("scaled", spec).await?;
    node(&fixtures, &agents, "scaled", "scaled-1").await?;
    let annotations = json!({
        STICKY_ANNOTATION: "true", STICKY_TTL_ANNOTATION: "3600", "cadastre.dev/pools": "scaled",
    });
    let set = stateful_set(&sets(&fixtures), "scaled", annotations).await?;
    let of = |ordinal| (ordinal, "scaled-1");
    for ordinal in 0..2 {
        run(&fixtures, &agents, &set, of(ordinal)).await?;
    }
    end(&fixtures, &agents, &set, of(1)).await?;
    ready(&fixtures, "scaled-1", "Available").await?;
    let ttl = |seconds: u32| {
        let change = json!({"spec": {"ttlSecondsAfterUse": seconds}});
        Patch::Merge(change)
    };
    let claims = claims(&fixtures);
    let params = PatchParams::default();
    // `ttlSecondsAfterUse` can be changed. While a pod uses a claim, the change does not delete the claim.
    for name in ["scaled-0", "scaled-1"] {
        assert_eq!(
            claims.get(name).await?.spec.ttl_seconds_after_use,
            Some(3600)
        );
        claims.patch(name, &params, &ttl(0)).await?;
    }
    gone(&claims, "scaled-1").await?;
    ready(&fixtures, "scaled-0", "InUse").await?;
    // When the set is scaled up, the ordinal whose claim was deleted gets a new claim.
    run(&fixtures, &agents, &set, of(1)).await?;
    let again = claims.get("scaled-1").await?;
    assert_eq!(again.spec.ttl_seconds_after_use, Some(3600));
    // If a claim is deleted while a pod uses it, the claim remains until the pod has ended.
    claims.delete("scaled-1", &DeleteParams::default()).await?;
    end(&fixtures, &agents, &set, of(1)).await?;
    gone(&claims, "scaled-1").await?;
    Ok(())
}

#[tokio::test]
async fn a_pod_that_cannot_have_a_claim_hears_why() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    let sticky = json!({STICKY_ANNOTATION: "true"});
    let set = stateful_set(&sets(&fixtures), "refused", sticky.clone()).await?;
    node(&fixtures, &agents, "poolless", "poolless-1").await?;
    let pod = pod_of(&set, 0, "poolless-1")?;
    let pod = fixtures.pods.create(&PostParams::default(), &pod).await?;
    let text = fixtures.event_about(&pod, "NoPoolForClaim").await?;
    assert!(
        text.contains("serves all pods of node poolless-1"),
        "{text}"
    );

    let spec = json!({"ipv4": {"cidrs": ["10.23.14.0/27"], "blockSize": 28}});
    fixtures.block_pool("bare", spec).await?;
    node(&fixtures, &agents, "bare", "bare-1").await?;
    // A pod without an owner gets an address of the pool as usual.
    let mut bare = pod_of(&set, 1, "bare-1")?;
    bare.metadata.owner_references = None;
    let bare = fixtures.pods.create(&PostParams::default(), &bare).await?;
    let addresses = agents.run(&fixtures, "bare-1", &bare).await?;
    assert_eq!(addresses.len(), 1);
    let text = fixtures.event_about(&bare, "InvalidAnnotation").await?;
    assert!(text.contains("belongs to no StatefulSet"), "{text}");
    assert!(claims(&fixtures).get_opt("refused-1").await?.is_none());
    quota_forbids_claims(&fixtures, sticky).await
}

/// Binds a pod to bare-1 in a namespace whose quota allows no claims. Waits for the event that says why there is no
/// claim.
async fn quota_forbids_claims(fixtures: &Fixtures, annotations: Value) -> Result<()> {
    const TIGHT: &str = "tight";
    let client = &fixtures.client;
    let namespace = serde_json::from_value(json!({"metadata": {"name": TIGHT}}))?;
    let post = PostParams::default();
    Api::<Namespace>::all(client.clone())
        .create(&post, &namespace)
        .await?;
    let none = json!({"count/ipclaims.cadastre.dev": "0"});
    let quota = json!({"metadata": {"name": "claims"}, "spec": {"hard": none}});
    let quotas: Api<ResourceQuota> = Api::namespaced(client.clone(), TIGHT);
    quotas
        .create(&post, &serde_json::from_value(quota)?)
        .await?;
    // No quota controller runs here, so the test writes the quota's status.
    let counted = Patch::Merge(json!({"status": {"hard": none, "used": none}}));
    let params = PatchParams::default();
    quotas.patch_status("claims", &params, &counted).await?;
    let claims: Api<IPClaim> = Api::namespaced(client.clone(), TIGHT);
    let probe = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPClaim",
        "metadata": {"name": "probe"}, "spec": {"pool": "bare"},
    });
    let probe: IPClaim = serde_json::from_value(probe)?;
    let dry = PostParams {
        dry_run: true,
        ..post.clone()
    };
    until("the quota counts", LIMIT, async || {
        let refused = claims.create(&dry, &probe).await.err();
        Ok(refused.filter(|it| it.to_string().contains("exceeded quota")))
    })
    .await?;
    let sets: Api<StatefulSet> = Api::namespaced(client.clone(), TIGHT);
    let set = stateful_set(&sets, "tight", annotations).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), TIGHT);
    pods.create(&post, &pod_of(&set, 0, "bare-1")?).await?;
    let events: Api<Event> = Api::namespaced(client.clone(), TIGHT);
    let text = until("the pod hears of the quota", LIMIT, async || {
        let of_pod = ListParams::default().fields("involvedObject.name=tight-0");
        let all = events.list(&of_pod).await?.items;
        let is_it = |it: &&Event| it.reason.as_deref() == Some("WriteRejected");
        Ok(all.iter().find(is_it).and_then(|it| it.message.clone()))
    })
    .await?;
    ensure!(text.contains("IPClaim tight/tight-0"), "{text}");
    ensure!(text.contains("exceeded quota"), "{text}");
    Ok(())
}
