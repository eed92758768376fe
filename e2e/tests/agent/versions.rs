//! CRDs, objects and clients whose version differs from the version of the tested program. Each program ignores fields
//! that it does not know, and keeps these fields when it writes an object.

use std::time::Duration;

use cadastre_api::{IPPool, NodeSubnet};
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::Daemon;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::metrics::sum;
use cadastre_e2e::{ControlPlane, Fixtures, Options};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Map, Value, json};

use crate::{FLAGS, Machine, eventually, publishes};

/// The places where a newer version has an additional field: the resource, and the path of the object in the schema.
const ADDED: [(&str, &str); 10] = [
    ("ippools", "/spec"),
    ("ippools", "/status"),
    ("ipamblocks", "/spec"),
    ("ipamblocks", "/spec/properties/owner"),
    ("nodesubnets", "/spec"),
    ("nodesubnets", "/spec/properties/pools/items"),
    ("nodesubnets", "/spec/properties/blocks/items"),
    ("nodesubnets", "/status"),
    ("nodesubnets", "/status/properties/blocks/items"),
    ("nodeaddresses", "/spec"),
];

/// Fields that an older version lacks: the resource, the path of the object in the schema, and the field.
const LACKING: [(&str, &str, &str); 6] = [
    ("ippools", "/status/properties/ipv4", "trend"),
    ("ippools", "/status/properties/ipv4", "exhaustsAt"),
    ("nodesubnets", "/spec", "leakCandidates"),
    ("nodesubnets", "/spec/properties/blocks/items", "reserved"),
    ("nodesubnets", "/status", "agent"),
    ("nodeaddresses", "/spec", "bootID"),
];

/// Starts a cluster with CRDs that `change` has modified, and a controller. Creates a pool of blocks of 16 addresses
/// for the group `g`.
async fn with_crds(change: impl Fn(&str, &mut Value)) -> (Daemon, ControlPlane, Fixtures) {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let api = Fixtures::new(cluster.client().await.unwrap());
    let crds: Api<CustomResourceDefinition> = Api::all(api.client.clone());
    for crd in cadastre_api::crd::all() {
        let kind = crd.spec.names.plural.clone();
        let mut crd = serde_json::to_value(crd).unwrap();
        change(&kind, &mut crd);
        let crd = serde_json::from_value(crd).unwrap();
        crds.create(&PostParams::default(), &crd).await.unwrap();
    }
    let mut controller = start_controller(&cluster, ADMIN, &FLAGS).unwrap();
    controller.wait_ready(LIMIT).await.unwrap();
    eventually("the pool is there", async || {
        let spec = json!({"ipv4": {"cidrs": ["10.90.0.0/24"], "blockSize": 28}});
        Ok(Some(api.block_pool("g", spec).await?))
    })
    .await;
    (controller, cluster, api)
}

/// Returns the schema of an object's fields in a CRD.
fn fields<'a>(crd: &'a mut Value, object: &str) -> &'a mut Map<String, Value> {
    let path = format!("/spec/versions/0/schema/openAPIV3Schema/properties{object}/properties");
    crd.pointer_mut(&path).unwrap().as_object_mut().unwrap()
}

/// Returns access to the objects of a kind with all their fields, even those that this version does not know.
fn raw<K: kube::Resource<DynamicType = ()>>(api: &Fixtures) -> Api<DynamicObject> {
    Api::all_with(api.client.clone(), &ApiResource::erase::<K>(&()))
}

async fn written(daemon: &Daemon) -> f64 {
    let samples = daemon.metrics().await.unwrap();
    sum(
        &samples,
        "rest_client_requests_total",
        &[("method", "PATCH")],
    )
}

#[tokio::test]
async fn what_a_newer_version_wrote_is_passed_over_and_kept() {
    let (controller, cluster, api) = with_crds(|kind, crd| {
        for (_, object) in ADDED.iter().filter(|(of, _)| *of == kind) {
            // Because of the default, the API server adds the field to every object that is read.
            let future = json!({"type": "string", "default": "new"});
            fields(crd, object).insert("future".to_owned(), future);
        }
    })
    .await;
    let mut machine = Machine::of_group(&cluster, &api, "g", &[]).await;
    let mut given = vec![machine.add("c1").await.unwrap()];
    publishes(&api, "g-1", given.clone()).await;
    let (pools, subnets) = (raw::<IPPool>(&api), raw::<NodeSubnet>(&api));
    let object = subnets.get("g-1").await.unwrap().data;
    assert_eq!(object["spec"]["blocks"][0]["future"], "new", "{object}");
    assert_eq!(object["status"]["blocks"][0]["future"], "new", "{object}");

    let params = PatchParams::default();
    let kept = |part: &str| Patch::Merge(json!({part: {"future": "kept"}}));
    pools.patch("g", &params, &kept("spec")).await.unwrap();
    for (all, name) in [(&pools, "g"), (&subnets, "g-1")] {
        let patched = all.patch_status(name, &params, &kept("status")).await;
        patched.unwrap();
    }
    // A second block is needed, so the NodeSubnet's spec and the statuses are written again.
    for n in 2..=14 {
        given.push(machine.add(&format!("c{n}")).await.unwrap());
    }
    api.listed("g-1", 2).await.unwrap();
    publishes(&api, "g-1", given).await;
    api.pool_until("g", "tells of the second block", |pool| {
        let status = pool.status.as_ref().and_then(|it| it.ipv4.as_ref());
        status.is_some_and(|it| it.allocated == "2")
    })
    .await
    .unwrap();
    let pool = pools.get("g").await.unwrap().data;
    for part in ["spec", "status"] {
        assert_eq!(pool[part]["future"], "kept", "{pool}");
    }
    let subnet = subnets.get("g-1").await.unwrap().data;
    assert_eq!(subnet["status"]["future"], "kept", "{subnet}");
    assert!(
        !machine.log().contains("cannot be read"),
        "{}",
        machine.log()
    );
    drop(controller);
}

#[tokio::test]
async fn what_older_crds_cut_off_is_told_once_and_not_written_without_end() {
    let (controller, cluster, api) = with_crds(|kind, crd| {
        for (_, object, field) in LACKING.iter().filter(|(of, ..)| *of == kind) {
            fields(crd, object).remove(*field).unwrap();
        }
    })
    .await;
    let flags = ["--publish-interval", "0.2"];
    let mut machine = Machine::of_group(&cluster, &api, "g", &flags).await;
    let address = machine.add("c1").await.unwrap();
    publishes(&api, "g-1", vec![address]).await;
    for kind in ["NodeSubnet", "NodeAddresses"] {
        let text = format!("{kind} g-1 was stored without a part");
        machine.log_says(&text).await;
    }
    // Several intervals must pass without any change, so this test has to sleep.
    let agent = machine.daemon.as_ref().unwrap();
    let before = (written(agent).await, written(&controller).await);
    let list = api.addresses.get("g-1").await.unwrap();
    assert!(list.spec.boot_id.is_empty(), "it is cut off");
    tokio::time::sleep(Duration::from_secs(4)).await;
    let after = (written(agent).await, written(&controller).await);
    assert!(after.0 - before.0 < 1.5, "the agent: {before:?} {after:?}");
    assert!(
        after.1 - before.1 < 2.5,
        "the controller: {before:?} {after:?}"
    );
    let list_after = api.addresses.get("g-1").await.unwrap();
    assert_eq!(
        list_after.metadata, list.metadata,
        "the list is not rewritten"
    );
    assert_eq!(
        machine.log().matches("the CRDs are older").count(),
        2,
        "once a kind"
    );
    // The agent assigns addresses although the API server drops fields of its objects.
    machine.add("c2").await.unwrap();
}
