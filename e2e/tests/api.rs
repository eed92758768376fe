//! The CRDs in a real API server. The test checks which objects each rule accepts, which objects it rejects and with
//! which message, the defaults, the limits, and the columns of kubectl.
//!
//! All checks are steps of one test, so that they share one control plane. Most objects are validated by dry run, which
//! stores nothing.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

use cadastre_api::{IPAMBlock, IPPool, NodeSubnet};
use cadastre_e2e::control_plane::{ControlPlane, Options};
use kube::api::{DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, Resource};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

#[path = "api/cases.rs"]
mod cases;
#[path = "api/columns.rs"]
mod columns;
#[path = "api/limits.rs"]
mod limits;
#[path = "api/older.rs"]
mod older;

const WAIT: &str = "wait --for=condition=Established --timeout=30s crd/ippools.cadastre.dev crd/nodesubnets.cadastre.dev crd/ipamblocks.cadastre.dev";

/// A part of a message of the API server. If a value violates the CRD's schema, for example by its length, the API
/// server does not evaluate the CEL rules and adds this message.
const NOT_CHECKED: &str = "some validation rules were not checked";

/// The cause of a rejection: the rejected field, and the end of the server's message.
type Cause = (&'static str, &'static str);

pub(crate) struct Lab {
    cluster: ControlPlane,
    pools: Api<DynamicObject>,
    subnets: Api<DynamicObject>,
    blocks: Api<DynamicObject>,
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_takes_and_refuses_what_the_rules_say() {
    let lab = Lab::start().await;
    lab.what_older_rules_let_in_stays_usable().await;
    lab.judge_all().await;
    lab.transitions().await;
    lab.blocks_stay_what_they_are_and_are_found_by_pool_and_owner()
        .await;
    lab.defaults_are_filled_in_and_unknown_fields_pruned().await;
    lab.limits().await;
    lab.samples_can_be_applied().await;
    lab.columns().await;
}

pub(crate) fn dry_run() -> PostParams {
    PostParams {
        dry_run: true,
        ..PostParams::default()
    }
}

pub(crate) fn pool(name: &str, spec: &Value) -> DynamicObject {
    object::<IPPool>(name, spec)
}

pub(crate) fn subnet(name: &str, spec: &Value) -> DynamicObject {
    object::<NodeSubnet>(name, spec)
}

pub(crate) fn block(name: &str, spec: &Value) -> DynamicObject {
    object::<IPAMBlock>(name, spec)
}

fn object<K: Resource<DynamicType = ()>>(name: &str, spec: &Value) -> DynamicObject {
    DynamicObject::new(name, &ApiResource::erase::<K>(&())).data(json!({ "spec": spec }))
}

/// Returns field and message of each cause in the server's answer.
pub(crate) fn causes(error: &kube::Error) -> Vec<(String, String)> {
    let kube::Error::Api(status) = error else {
        panic!("not an answer of the API server: {error}");
    };
    let details = status.details.as_ref().unwrap();
    let causes = details.causes.iter();
    causes
        .map(|cause| (cause.field.clone(), cause.message.clone()))
        .filter(|(_, message)| !message.contains(NOT_CHECKED))
        .collect()
}

/// Returns a text that describes the difference between the expected and the actual answer, or `None` if they agree.
fn complaint<T>(what: &str, expected: Option<Cause>, answer: kube::Result<T>) -> Option<String> {
    match (expected, answer) {
        (None, Ok(_)) => None,
        (None, Err(error)) => Some(format!("{what}\n  refused: {error}")),
        (Some(cause), Ok(_)) => Some(format!("{what}\n  taken, though: {cause:?}")),
        (Some((field, message)), Err(error)) => {
            let found = causes(&error);
            let same = matches!(&found[..], [(f, m)] if f == field && m.ends_with(message));
            (!same).then(|| format!("{what}\n  expected {field}: {message}\n  but got  {found:?}"))
        }
    }
}

impl Lab {
    async fn start() -> Self {
        let cluster = ControlPlane::start(Options::default()).await.unwrap();
        let client = cluster.client().await.unwrap();
        let lab = Self {
            pools: Api::all_with(client.clone(), &ApiResource::erase::<IPPool>(&())),
            blocks: Api::all_with(client.clone(), &ApiResource::erase::<IPAMBlock>(&())),
            subnets: Api::all_with(client, &ApiResource::erase::<NodeSubnet>(&())),
            cluster,
        };
        lab.apply("older.yaml", &older::without_rules()).await;
        lab.cluster.kubectl_line(WAIT).await.unwrap();
        lab
    }

    /// Applies objects. A warning of the API server counts as an error.
    pub(crate) async fn apply(&self, name: &str, yaml: &str) {
        let path = self.cluster.folder().join(name);
        std::fs::write(&path, yaml).unwrap();
        let path = path.display().to_string();
        self.cluster
            .kubectl_line(&format!(
                "apply --server-side --warnings-as-errors -f {path}"
            ))
            .await
            .unwrap();
    }

    /// Creates a pool and returns it as the server stored it.
    pub(crate) async fn create(&self, pool: &DynamicObject) -> DynamicObject {
        self.pools
            .create(&PostParams::default(), pool)
            .await
            .unwrap()
    }

    async fn judge_all(&self) {
        let mut complaints = Vec::new();
        for (name, spec, expected) in cases::pools() {
            let answer = self.pools.create(&dry_run(), &pool(&name, &spec)).await;
            complaints.extend(complaint(&format!("pool {name} {spec}"), expected, answer));
        }
        for (name, spec, expected) in cases::subnets() {
            let answer = self.subnets.create(&dry_run(), &subnet(&name, &spec)).await;
            complaints.extend(complaint(
                &format!("subnet {name} {spec}"),
                expected,
                answer,
            ));
        }
        for (name, spec, expected) in cases::ipam_blocks() {
            let answer = self.blocks.create(&dry_run(), &block(&name, &spec)).await;
            complaints.extend(complaint(&format!("block {name} {spec}"), expected, answer));
        }
        let any = subnet("reported", &json!({}));
        self.subnets
            .create(&PostParams::default(), &any)
            .await
            .unwrap();
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        for (status, expected) in cases::statuses() {
            let patch = Patch::Merge(json!({ "status": status }));
            let answer = self.subnets.patch_status("reported", &params, &patch).await;
            complaints.extend(complaint(&format!("status {status}"), expected, answer));
        }
        assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    }

    async fn blocks_stay_what_they_are_and_are_found_by_pool_and_owner(&self) {
        for (cidr, pool, node) in [
            ("10.244.1.64/26", "a", "n1"),
            ("10.244.1.128/26", "a", "n2"),
            ("fd00::40/122", "b", "n1"),
        ] {
            let mut spec = cases::block(cidr);
            spec["pool"] = json!(pool);
            spec["owner"]["name"] = json!(node);
            let name = cidr.replace(['.', ':', '/'], "-");
            self.blocks
                .create(&PostParams::default(), &block(&name, &spec))
                .await
                .unwrap();
        }
        let to = |spec: Value| Patch::Merge(json!({ "spec": spec }));
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let moved = to(json!({"cidr": "10.244.1.0/26"}));
        let answer = self.blocks.patch("10-244-1-64-26", &params, &moved).await;
        let found = causes(&answer.unwrap_err());
        let immutable = "is immutable: another range is another block";
        assert!(
            found
                .iter()
                .any(|(field, message)| field == "spec.cidr" && message.ends_with(immutable)),
            "{found:?}"
        );
        let resting = to(json!({"owner": {"kind": "Quarantine"}, "until": "2026-11-21T11:00:00Z"}));
        let params = PatchParams::default();
        self.blocks
            .patch("fd00--40-122", &params, &resting)
            .await
            .unwrap();
        for (selector, names) in [
            ("spec.pool=a", vec!["10-244-1-128-26", "10-244-1-64-26"]),
            ("spec.pool=a,spec.owner.name=n1", vec!["10-244-1-64-26"]),
            ("spec.owner.name=n1", vec!["10-244-1-64-26", "fd00--40-122"]),
            ("spec.owner.kind=Quarantine", vec!["fd00--40-122"]),
            ("spec.pool!=a,spec.owner.kind=Node", vec![]),
        ] {
            let list = ListParams::default().fields(selector);
            let found = self.blocks.list(&list).await.unwrap();
            let found: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
            assert_eq!(found, names, "{selector}");
        }
    }

    async fn transitions(&self) {
        let mut complaints = Vec::new();
        for (number, (before, after, expected)) in cases::transitions().into_iter().enumerate() {
            let name = format!("transition-{number}");
            let created = self.create(&pool(&name, &before)).await;
            let mut changed = pool(&name, &after);
            changed.metadata.resource_version = created.resource_version();
            let answer = self.pools.replace(&name, &dry_run(), &changed).await;
            let what = format!("from {before} to {after}");
            complaints.extend(complaint(&what, expected, answer));
        }
        assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    }

    async fn defaults_are_filled_in_and_unknown_fields_pruned(&self) {
        let spec = json!({
            "allocationMode": "NodeCIDR",
            "ipv4": {"cidrs": ["10.1.0.0/16"], "surprise": 1},
            "ipv6": {"cidrs": ["fd01::/48"]},
            "surprise": true,
        });
        let stored = self.create(&pool("defaults", &spec)).await;
        let expected = json!({
            "allocationMode": "NodeCIDR",
            "disabled": false,
            "idleSeconds": 300,
            "ipv4": {"cidrs": ["10.1.0.0/16"]},
            "ipv6": {"cidrs": ["fd01::/48"]},
            "nearlyExhaustedPercent": 90,
            "priority": 0,
            "quarantineSeconds": 60,
        });
        assert_eq!(stored.data["spec"], expected);
        let plain = json!({"ipv4": {"cidrs": ["10.1.0.0/16"]}});
        let stored = self.create(&pool("plain", &plain)).await;
        assert_eq!(stored.data["spec"]["allocationMode"], "Blocks");
    }

    async fn samples_can_be_applied(&self) {
        let samples = include_str!("../../config/samples/ippools.yaml");
        self.apply("samples.yaml", samples).await;
        for name in ["default", "edge", "gateways"] {
            let stored = self.pools.get(name).await.unwrap();
            assert_eq!(stored.data["spec"]["allocationMode"], "NodeCIDR", "{name}");
        }
    }
}
