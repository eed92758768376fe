//! Objects that violate the current rules. A cluster may contain such an object if it is older than a rule, or was
//! written while the rules were off. The object must affect only itself.

use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::fixtures::{GROUP, condition, node_of_group, with_pod_cidrs};
use cadastre_e2e::metrics::sum;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, ControlPlane, Fixtures, Options, crds};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps,
};
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::permit;

/// This is longer than the interval between two writes of a status. So repeated writes would be noticed.
const QUIET: Duration = Duration::from_secs(6);

/// Installs the CRDs with a schema that accepts everything, as in an early version.
async fn install_lax_crds(fixtures: &Fixtures) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(fixtures.client.clone());
    for mut crd in cadastre_api::crd::all() {
        for version in &mut crd.spec.versions {
            let schema = JSONSchemaProps {
                type_: Some("object".to_owned()),
                x_kubernetes_preserve_unknown_fields: Some(true),
                ..JSONSchemaProps::default()
            };
            version.schema.get_or_insert_default().open_api_v3_schema = Some(schema);
            version.additional_printer_columns = None;
            version.selectable_fields = None;
        }
        let params = PatchParams::apply("cadastre-e2e");
        let patch = Patch::Apply(&crd);
        api.patch(&crd.name_any(), &params, &patch).await?;
    }
    until(
        "the kinds are served",
        cadastre_e2e::fixtures::LIMIT,
        async || {
            fixtures.pools.list(&ListParams::default()).await?;
            fixtures.subnets.list(&ListParams::default()).await?;
            fixtures.blocks.list(&ListParams::default()).await?;
            Ok(Some(()))
        },
    )
    .await?;
    Ok(())
}

async fn create(fixtures: &Fixtures, kind: &str, name: &str, spec: Value) -> Result<String> {
    let plural = format!("{}s", kind.to_lowercase());
    let resource = ApiResource {
        group: "cadastre.dev".to_owned(),
        version: "v1alpha1".to_owned(),
        api_version: "cadastre.dev/v1alpha1".to_owned(),
        kind: kind.to_owned(),
        plural,
    };
    let mut object = DynamicObject::new(name, &resource);
    object.data = json!({"spec": spec});
    let api = Api::<DynamicObject>::all_with(fixtures.client.clone(), &resource);
    let made = api.create(&PostParams::default(), &object).await?;
    Ok(made.uid().unwrap())
}

/// Unusable pools: a name, a spec, and a part of the message that the controller must report.
fn bad_pools() -> Vec<(&'static str, Value, &'static str)> {
    let v4 = |cidrs: Value, size: u32| json!({"cidrs": cidrs, "blockSize": size});
    let expression = |operator: &str, values: Value| json!({"matchExpressions": [{"key": "zone", "operator": operator, "values": values}]});
    let with = |selector: Value| {
        json!({
            "allocationMode": "NodeCIDR", "nodeSelector": selector,
            "ipv4": {"cidrs": ["10.90.0.0/24"], "blockSize": 24},
        })
    };
    let plain = |ipv4: Value| json!({"allocationMode": "NodeCIDR", "ipv4": ipv4});
    vec![
        (
            "cidr",
            plain(v4(json!(["10.300.0.0/16"]), 24)),
            "10.300.0.0/16",
        ),
        (
            "host-bits",
            plain(v4(json!(["10.91.0.1/16"]), 24)),
            "10.91.0.0/16",
        ),
        (
            "family",
            plain(v4(json!(["fd00:91::/48"]), 64)),
            "fd00:91::/48",
        ),
        (
            "too-big",
            plain(v4(json!(["10.92.0.0/16"]), 8)),
            "does not fit",
        ),
        ("too-small", plain(v4(json!(["10.93.0.0/16"]), 99)), "99"),
        (
            "overlap",
            plain(v4(json!(["10.94.0.0/16", "10.94.1.0/24"]), 24)),
            "overlaps",
        ),
        ("empty", plain(v4(json!([]), 24)), "at least one CIDR"),
        (
            "nothing",
            json!({"allocationMode": "NodeCIDR"}),
            "neither ipv4 nor ipv6",
        ),
        (
            "in",
            with(expression("In", json!([]))),
            "needs at least one value",
        ),
        (
            "exists",
            with(expression("Exists", json!(["a"]))),
            "takes no values",
        ),
        ("operator", with(expression("Gt", json!(["1"]))), "unknown"),
        (
            "type",
            json!({"allocationMode": "NodeCIDR", "ipv4": "10.95.0.0/16"}),
            "10.95.0.0/16",
        ),
        (
            "mode",
            json!({"allocationMode": "Addresses", "ipv4": v4(json!(["10.96.0.0/24"]), 24)}),
            "Addresses",
        ),
        (
            "number",
            json!({"allocationMode": "NodeCIDR", "priority": "high"}),
            "high",
        ),
        ("null", Value::Null, "spec"),
    ]
}

#[tokio::test]
async fn invalid_objects_affect_only_themselves_and_are_reported_once() -> Result<()> {
    let _permit = permit().await?;
    let options = Options {
        // This gate makes the API server accept podCIDRs that are not in canonical form, as older API servers did.
        apiserver_args: vec!["--feature-gates=StrictIPCIDRValidation=false".to_owned()],
        ..Options::default()
    };
    let cluster = ControlPlane::start(options).await?;
    let fixtures = Fixtures::new(cluster.client().await?);
    install_lax_crds(&fixtures).await?;
    let mut bad = Vec::new();
    for (name, spec, says) in bad_pools() {
        let uid = create(&fixtures, "IPPool", name, spec).await?;
        bad.push((name, uid, says));
    }
    for name in ["odd", "ghost"] {
        create(
            &fixtures,
            "NodeSubnet",
            name,
            json!({"podCIDRs": "none", "quarantined": 7}),
        )
        .await?;
    }
    // These are two blocks that cannot be parsed, two whose name does not follow from their CIDR, and one of an unknown
    // pool.
    let of_nobody = |cidr: &str| {
        json!({
            "cidr": cidr, "pool": "nowhere", "since": "2026-11-21T10:00:00Z",
            "owner": {"kind": "Node", "name": "nobody", "uid": "no-uid"},
        })
    };
    for (name, spec) in [
        ("10-99-0-0-26", Value::Null),
        ("10-99-0-64-26", json!({"cidr": "10.99.0.300/26"})),
        ("some-block", of_nobody("10.99.0.128/26")),
        ("10-99-0-128-26", of_nobody("10.99.0.192/26")),
        ("10-99-1-0-26", of_nobody("10.99.1.0/26")),
    ] {
        create(&fixtures, "IPAMBlock", name, spec).await?;
    }
    for (name, cidr) in [("lax-1", "10.97.0.7/25"), ("lax-2", "010.97.000.128/26")] {
        let node = node_of_group("lax", name);
        fixtures.create_node(with_pod_cidrs(node, &[cidr])).await?;
    }
    fixtures.node("lax", "odd").await?;
    crds::install(&fixtures.client).await?;
    fixtures
        .pool(
            "lax",
            json!({"ipv4": {"cidrs": ["10.97.0.0/24"], "blockSize": 26}}),
        )
        .await?;

    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    daemon.wait_ready(cadastre_e2e::fixtures::LIMIT).await?;
    // The two existing nodes have all of the pool's ranges except one, which this node gets.
    assert_eq!(fixtures.served("odd").await?, ["10.97.0.192/26"]);
    fixtures
        .subnet_until("odd", "lists podCIDRs", |it| !it.spec.pod_cidrs.is_empty())
        .await?;
    fixtures.subnet_gone("ghost").await?;
    let subnet = fixtures
        .subnet_until("lax-1", "is canonical", |it| !it.spec.pod_cidrs.is_empty())
        .await;
    assert_eq!(subnet.unwrap().spec.pod_cidrs[0].cidr, "10.97.0.0/25");

    let raw =
        Api::<kube::core::PartialObjectMeta<cadastre_api::IPPool>>::all(fixtures.client.clone());
    for (name, uid, says) in &bad {
        let note = fixtures.event(uid, "InvalidSpec").await?;
        assert!(
            note.contains(says),
            "{name}: {note:?} does not say {says:?}"
        );
    }
    let first = fixtures.pools.get("cidr").await?;
    assert_eq!(condition(&first, "Ready").unwrap().reason, "InvalidSpec");
    let versions = raw.list_metadata(&ListParams::default()).await?;
    let start = Instant::now();
    until("some time has passed", QUIET * 2, async || {
        Ok((start.elapsed() >= QUIET).then_some(()))
    })
    .await?;
    let later = raw.list_metadata(&ListParams::default()).await?;
    let again: Vec<String> = versions
        .iter()
        .zip(&later)
        .filter(|(before, after)| before.resource_version() != after.resource_version())
        .map(|(before, _)| before.name_any())
        .filter(|name| name != "lax")
        .collect();
    assert_eq!(
        again,
        Vec::<String>::new(),
        "these are written again and again"
    );

    let metrics = daemon.metrics().await?;
    let refused = sum(&metrics, "rest_client_requests_total", &[("code", "422")]);
    assert!(
        refused < 30.0,
        "what is refused for good is tried ever less: {refused} times by now"
    );

    // After a restart, the controller must not report the same objects again.
    daemon.process().stop(Duration::from_secs(20)).await?;
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    daemon.wait_ready(cadastre_e2e::fixtures::LIMIT).await?;
    fixtures.node("lax", "lax-3").await?;
    fixtures.condition("lax", "Exhausted", "True").await?;
    for (name, uid, _) in &bad {
        // If the spec of a pool violates the types of the schema, the API server rejects every status for this pool. So
        // the status cannot record that the pool was reported, and a restarted controller may report the pool again.
        let most = if *name == "type" { 2 } else { 1 };
        let count = fixtures.event_count(uid, "InvalidSpec").await?;
        assert!((1..=most).contains(&count), "{name}: {count}");
    }

    // Blocks that cannot be parsed reserve nothing. So every range of the pool is allocated.
    let spec = json!({
        "ipv4": {"cidrs": ["10.99.0.0/24"], "gateway": "None"}, "quarantineSeconds": 0,
        "warm": {"low": 256, "high": 256},
    });
    fixtures.block_pool("blocks", spec).await?;
    let agents = Agents::new(&cluster)?;
    let node = fixtures.node("blocks", "blocks-1").await?;
    agents.join(&node)?;
    fixtures.listed("blocks-1", 4).await?;

    // Once the spec of the pool with the name `cidr` is corrected, the controller allocates from this pool.
    let spec = json!({"ipv4": {"cidrs": ["10.98.0.0/24"]}, "nodeSelector": {"matchLabels": {GROUP: "lax"}}});
    fixtures.change_pool("cidr", spec).await?;
    assert_eq!(fixtures.served("lax-3").await?, ["10.98.0.0/24"]);
    fixtures.event(&bad[0].1, "SpecIsValid").await?;
    Ok(())
}
