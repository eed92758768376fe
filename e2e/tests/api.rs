//! The CRDs as a real API server reads them: each rule with what it lets through and what it
//! refuses, word for word; defaults, limits, what kubectl prints.
//!
//! One test and one control plane, in steps: rules need an API server, and one is enough. All
//! judging is by dry run, which validates like the real thing and leaves nothing behind.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests

use std::time::{Duration, Instant};

use cadastre::api::{IPPool, NodeSubnet, crd};
use cadastre_e2e::control_plane::{ControlPlane, Options};
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, Resource};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

#[path = "api/cases.rs"]
mod cases;
#[path = "api/columns.rs"]
mod columns;
#[path = "api/limits.rs"]
mod limits;

const LIMIT: Duration = Duration::from_secs(30);

/// What the server adds where a limit is broken, and no rule was looked at.
const NOT_CHECKED: &str = "some validation rules were not checked";

/// A field and how its message ends.
type Cause = (&'static str, &'static str);

pub(crate) struct Lab {
    cluster: ControlPlane,
    pools: Api<DynamicObject>,
    subnets: Api<DynamicObject>,
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_takes_and_refuses_what_the_rules_say() {
    let lab = Lab::start().await;
    lab.judge_all().await;
    lab.transitions().await;
    lab.defaults_are_filled_in_and_unknown_fields_pruned().await;
    lab.limits().await;
    lab.samples_can_be_applied().await;
    lab.columns().await;
    lab.allocate_cannot_change().await;
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

fn object<K: Resource<DynamicType = ()>>(name: &str, spec: &Value) -> DynamicObject {
    DynamicObject::new(name, &ApiResource::erase::<K>(&())).data(json!({ "spec": spec }))
}

/// The field and message of each complaint.
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

/// Nothing where the answer is as expected, else both.
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
            subnets: Api::all_with(client, &ApiResource::erase::<NodeSubnet>(&())),
            cluster,
        };
        lab.apply("crds.yaml", &crd::yaml().unwrap()).await;
        lab.cluster
            .kubectl(&[
                "wait",
                "--for=condition=Established",
                "--timeout=30s",
                "crd/ippools.cadastre.dev",
                "crd/nodesubnets.cadastre.dev",
            ])
            .await
            .unwrap();
        lab
    }

    /// A warning of the API server is an error here.
    pub(crate) async fn apply(&self, name: &str, yaml: &str) {
        let path = self.cluster.folder().join(name);
        std::fs::write(&path, yaml).unwrap();
        let path = path.display().to_string();
        self.cluster
            .kubectl(&[
                "apply",
                "--server-side",
                "--warnings-as-errors",
                "-f",
                &path,
            ])
            .await
            .unwrap();
    }

    /// What the server made of it.
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
        assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
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
            "allocate": "NodeCIDR",
            "ipv4": {"cidrs": ["10.1.0.0/16"], "surprise": 1},
            "ipv6": {"cidrs": ["fd01::/48"]},
            "surprise": true,
        });
        let stored = self.create(&pool("defaults", &spec)).await;
        let expected = json!({
            "allocate": "NodeCIDR",
            "disabled": false,
            "ipv4": {"cidrs": ["10.1.0.0/16"], "blockSize": 24},
            "ipv6": {"cidrs": ["fd01::/48"], "blockSize": 64},
            "priority": 0,
            "quarantineSeconds": 60,
        });
        assert_eq!(stored.data["spec"], expected);
    }

    async fn samples_can_be_applied(&self) {
        let samples = include_str!("../../config/samples/ippools.yaml");
        self.apply("samples.yaml", samples).await;
        for name in ["default", "edge", "gateways"] {
            let stored = self.pools.get(name).await.unwrap();
            assert_eq!(stored.data["spec"]["allocate"], "NodeCIDR", "{name}");
        }
    }

    /// There is one value so far: the rule is tried on a CRD that knows a second one.
    async fn allocate_cannot_change(&self) {
        let with_two = crd::yaml().unwrap().replacen(
            "- NodeCIDR\n",
            "- NodeCIDR\n                - Blocks\n",
            1,
        );
        self.apply("crds-with-two.yaml", &with_two).await;
        let spec =
            |allocate: &str| json!({"allocate": allocate, "ipv4": {"cidrs": ["10.2.0.0/16"]}});
        let start = Instant::now();
        while let Err(error) = self
            .pools
            .create(&dry_run(), &pool("two", &spec("Blocks")))
            .await
        {
            assert!(
                start.elapsed() < LIMIT,
                "the CRD with two values never served: {error}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.create(&pool("two", &spec("NodeCIDR"))).await;
        let change = Patch::Merge(json!({"spec": {"allocate": "Blocks"}}));
        let answer = self
            .pools
            .patch("two", &PatchParams::default(), &change)
            .await;
        let expected = (
            "spec.allocate",
            "is immutable: add a new pool that allocates the other way, and set disabled on this one",
        );
        assert_eq!(
            complaint("NodeCIDR to Blocks", Some(expected), answer),
            None
        );
    }
}
