//! FRRConfigurations, with the CRD that frr-k8s publishes. frr-k8s itself does not run.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cadastre_api::frr::{HOSTNAME_LABEL, MANAGED_BY};
use cadastre_api::{ASN_ANNOTATION, FRRConfiguration, IPAMBlock};
use cadastre_e2e::audit::{Audit, compare};
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, ControlPlane, Daemon, Fixtures, Options, assets};
use futures::{StreamExt as _, TryStreamExt as _};
use kube::api::{
    DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::node;

const ACCOUNT: &str = "system:serviceaccount:kube-system:cadastre-controller";
const NAMESPACE: &str = "frr-k8s-system";
/// API group, resource and verbs of the permissions that the Role for FRRConfigurations grants.
const MAY: (&str, &str, &[&str]) = (
    "frrk8s.metallb.io",
    "frrconfigurations",
    &["get", "list", "watch", "create", "patch", "delete"],
);
const GRACE: Duration = Duration::from_secs(20);

struct Lab {
    cluster: ControlPlane,
    fixtures: Fixtures,
    agents: Agents,
    daemon: Daemon,
    frr: Api<FRRConfiguration>,
    audit: Audit,
}

impl Lab {
    /// Starts a control plane without frr-k8s, and a controller with the permissions of the chart and these flags.
    async fn start(flags: &[&str]) -> Result<Self> {
        let audit = Audit::of(&[ACCOUNT])?;
        let options = Options {
            users: vec![User::new(ACCOUNT, &["system:serviceaccounts"])],
            apiserver_args: audit.args(),
            ..Options::default()
        };
        let (cluster, fixtures) = with_crds(options).await?;
        cluster
            .kubectl_line(&format!("create namespace {NAMESPACE}"))
            .await?;
        for file in ["controller", "frr"] {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/rbac");
            let path = format!("{folder}/{file}.yaml");
            cluster.kubectl(&["apply", "-f", &path]).await?;
        }
        let mut daemon = start_controller(&cluster, ACCOUNT, flags)?;
        daemon.wait_ready(LIMIT).await?;
        Ok(Lab {
            agents: Agents::new(&cluster)?,
            frr: Api::namespaced(fixtures.client.clone(), NAMESPACE),
            cluster,
            fixtures,
            daemon,
            audit,
        })
    }

    async fn install_crd(&self) -> Result<()> {
        let file = assets::frr_crd()?;
        let file = file.to_str().context("the path is no text")?;
        self.cluster.kubectl(&["apply", "-f", file]).await?;
        until("FRRConfigurations are served", LIMIT, async || {
            self.frr.list_metadata(&ListParams::default()).await?;
            Ok(Some(()))
        })
        .await
    }

    /// Waits until `is` returns true for the FRRConfiguration of the node. `what` describes the condition.
    async fn until(
        &self,
        node: &str,
        what: &str,
        is: impl Fn(&FRRConfiguration) -> bool,
    ) -> Result<FRRConfiguration> {
        let name = format!("cadastre-{node}");
        until(&format!("{name} {what}"), LIMIT, async || {
            let found = self.frr.get(&name).await?;
            ensure!(is(&found), "{:?}", found.spec);
            Ok(Some(found))
        })
        .await
    }

    async fn patch(&self, node: &str, patch: Value) -> Result<()> {
        let (name, params) = (format!("cadastre-{node}"), PatchParams::default());
        self.frr.patch(&name, &params, &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn log_says(&mut self, text: &str) -> Result<()> {
        until(&format!("the log says {text:?}"), LIMIT, async || {
            let log = std::fs::read_to_string(self.daemon.process().log())?;
            ensure!(log.contains(text), log);
            Ok(Some(()))
        })
        .await
    }

    async fn annotate(&self, node: &str, asn: Value) -> Result<()> {
        let change = json!({"metadata": {"annotations": {ASN_ANNOTATION: asn}}});
        self.fixtures.change_node(node, change).await?;
        Ok(())
    }
}

fn asn_is(asn: u32) -> impl Fn(&FRRConfiguration) -> bool {
    move |it| it.spec.bgp.routers.iter().all(|it| it.asn == asn)
}

fn lists(it: &FRRConfiguration, ranges: &[String]) -> bool {
    let mut routers = it.spec.bgp.routers.iter();
    let mut ranges = ranges.to_vec();
    ranges.sort();
    let sorted = |prefixes: &[String]| {
        let mut prefixes = prefixes.to_vec();
        prefixes.sort();
        prefixes
    };
    routers.all(|it| sorted(&it.prefixes) == ranges)
}

const FLAGS: [&str; 8] = [
    "--frr-namespace",
    NAMESPACE,
    "--frr-asn",
    "4200000001",
    "--frr-neighbor",
    r#"{"address": "192.0.2.1", "asn": 64512, "passwordSecret": {"name": "bgp", "namespace": "frr-k8s-system"}}"#,
    "--frr-neighbor",
    r#"{"interface": "rack-b", "dynamicASN": "external", "nodeLabels": {"rack": "b"}}"#,
];

#[tokio::test]
async fn frr_configurations_list_the_ranges_of_nodes_once_frr_k8s_is_installed() -> Result<()> {
    let mut lab = Lab::start(&FLAGS).await?;
    let says = "frrconfigurations are not known to the API server: install frr-k8s";
    lab.log_says(says).await?;
    let spec = json!({"ipv4": {"cidrs": ["10.90.0.0/24"], "blockSize": 28}});
    lab.fixtures.block_pool("frr", spec).await?;
    let first = node(&lab.fixtures, &lab.agents, "frr", "frr-1").await?;
    let blocks = lab.fixtures.listed("frr-1", 1).await?;
    // Blocks of deleted nodes become free even without frr-k8s.
    node(&lab.fixtures, &lab.agents, "frr", "gone-1").await?;
    let early = lab.fixtures.listed("gone-1", 1).await?;
    lab.agents.leave("gone-1");
    lab.fixtures
        .change_pool("frr", json!({"quarantineSeconds": 0}))
        .await?;
    lab.fixtures.delete_node("gone-1").await?;
    lab.fixtures.block_gone(&early[0]).await?;

    lab.install_crd().await?;
    let found = lab
        .until("frr-1", "lists the block", |it| lists(it, &blocks))
        .await?;
    assert_eq!(found.labels()[MANAGED_BY.0], MANAGED_BY.1);
    // The API server has stored everything that the controller wrote, and has added only defaults of the CRD.
    let get =
        format!("get frrconfigurations.frrk8s.metallb.io -n {NAMESPACE} cadastre-frr-1 -o json");
    let raw: Value = serde_json::from_str(&lab.cluster.kubectl_line(&get).await?)?;
    let all = json!({"allowed": {"mode": "all"}});
    assert_eq!(
        raw["spec"],
        json!({
            "nodeSelector": {"matchLabels": {HOSTNAME_LABEL: "frr-1"}},
            "bgp": {"routers": [{
                "asn": 4_200_000_001_u32, "prefixes": blocks,
                "neighbors": [{
                    "address": "192.0.2.1", "asn": 64512, "toAdvertise": all,
                    "passwordSecret": {"name": "bgp", "namespace": NAMESPACE},
                    "addressFamilies": ["unicast"], "disableMP": false, "dualStackAddressFamily": false,
                }],
            }]},
        })
    );

    // An annotation of the node sets its AS number, and a label of the node adds a neighbor.
    lab.annotate("frr-1", "64999".into()).await?;
    lab.until("frr-1", "has the number of the annotation", asn_is(64_999))
        .await?;
    lab.annotate("frr-1", "AS7".into()).await?;
    let event = lab
        .fixtures
        .event_about(&first, "FRRConfigurationNotWritten")
        .await?;
    assert!(event.contains("\"AS7\""), "{event}");
    let rack = json!({"metadata": {"labels": {"rack": "b"}}});
    lab.fixtures.change_node("frr-1", rack).await?;
    let is_in_b = |it: &FRRConfiguration| it.spec.bgp.routers[0].neighbors.len() == 2;
    let found = lab
        .until("frr-1", "has the neighbor of its rack", is_in_b)
        .await?;
    assert!(asn_is(64_999)(&found), "the number stays: {:?}", found.spec);
    lab.annotate("frr-1", Value::Null).await?;
    lab.until("frr-1", "has the number of the flag", asn_is(4_200_000_001))
        .await?;

    // The controller restores FRRConfigurations that somebody else changes or deletes.
    lab.patch(
        "frr-1",
        json!({"spec": {"nodeSelector": null, "raw": {"rawConfig": "!"}}}),
    )
    .await?;
    let selects = |it: &FRRConfiguration| !it.spec.node_selector.match_labels.is_empty();
    lab.until("frr-1", "selects its node again", selects)
        .await?;
    lab.frr
        .delete("cadastre-frr-1", &DeleteParams::default())
        .await?;
    lab.until("frr-1", "is there again", |it| lists(it, &blocks))
        .await?;

    // When another node joins, the FRRConfiguration of `frr-1` is not written again.
    let before = lab.frr.get("cadastre-frr-1").await?;
    node(&lab.fixtures, &lab.agents, "frr", "frr-2").await?;
    let blocks = lab.fixtures.listed("frr-2", 1).await?;
    lab.until("frr-2", "lists the block", |it| lists(it, &blocks))
        .await?;
    let after = lab.frr.get("cadastre-frr-1").await?;
    assert_eq!(before.resource_version(), after.resource_version());

    lab.fixtures.delete_node("frr-2").await?;
    lab.agents.leave("frr-2");
    cadastre_e2e::fixtures::gone(&lab.frr, "cadastre-frr-2").await?;

    // A controller without an AS number deletes the FRRConfigurations of an earlier controller.
    lab.daemon.process().stop(GRACE).await?;
    let flags = ["--frr-namespace", NAMESPACE];
    lab.daemon = start_controller(&lab.cluster, ACCOUNT, &flags)?;
    cadastre_e2e::fixtures::gone(&lab.frr, "cadastre-frr-1").await?;

    let used = lab.audit.used(ACCOUNT)?;
    let of_frr = used.into_iter().filter(|it| it.0 == MAY.0).collect();
    let (beyond, idle) = compare(&[MAY], &of_frr);
    assert_eq!(beyond, [], "used, but not listed");
    // A read follows only a write with an indeterminate outcome or a conflict, which may not happen here.
    assert!(
        idle.iter().all(|it| it == "get frrconfigurations"),
        "{idle:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_prefix_is_withdrawn_before_its_block_is_deleted_and_foreign_objects_stay() -> Result<()>
{
    let lab = Lab::start(&FLAGS).await?;
    lab.install_crd().await?;
    let foreign = json!({
        "metadata": {"name": "cadastre-foreign-1", "namespace": NAMESPACE},
        "spec": {"bgp": {"routers": [{"asn": 7}]}},
    });
    let foreign: FRRConfiguration = serde_json::from_value(foreign)?;
    let foreign = lab.frr.create(&PostParams::default(), &foreign).await?;

    let spec = json!({
        "ipv4": {"cidrs": ["10.91.0.0/24"], "blockSize": 28, "gateway": "None"}, "idleSeconds": 1,
        "cooldownSeconds": 0, "quarantineSeconds": 0,
    });
    lab.fixtures.block_pool("order", spec).await?;
    let other = node(&lab.fixtures, &lab.agents, "order", "foreign-1").await?;
    let event = lab
        .fixtures
        .event_about(&other, "FRRConfigurationNotWritten")
        .await?;
    assert!(event.contains("somebody else"), "{event}");

    // A live node releases two blocks, and then the Node is deleted.
    node(&lab.fixtures, &lab.agents, "order", "order-1").await?;
    lab.fixtures.keep_free("order", 40).await?;
    let blocks = lab.fixtures.listed("order-1", 3).await?;
    lab.until("order-1", "lists all blocks", |it| lists(it, &blocks))
        .await?;
    let begun = lab.frr.list_metadata(&ListParams::default()).await?;
    let version = begun.metadata.resource_version.unwrap_or_default();
    lab.fixtures.keep_free("order", 0).await?;
    lab.fixtures.listed("order-1", 1).await?;
    lab.agents.leave("order-1");
    lab.fixtures.delete_node("order-1").await?;
    for block in &blocks {
        lab.fixtures.block_gone(block).await?;
        let (withdrawn, deleted) = ends(&lab, block, &version).await?;
        assert!(withdrawn < deleted, "{block}: {withdrawn}, {deleted}");
    }

    let left = lab.frr.get("cadastre-foreign-1").await?;
    assert_eq!(left.resource_version(), foreign.resource_version());
    // Once the foreign object is deleted, the node gets an FRRConfiguration of its own.
    lab.frr
        .delete("cadastre-foreign-1", &DeleteParams::default())
        .await?;
    let ranges = lab.fixtures.listed("foreign-1", 1).await?;
    lab.until("foreign-1", "lists the block", |it| lists(it, &ranges))
        .await?;
    Ok(())
}

/// Returns two resourceVersions: of the change with which the FRRConfiguration of node order-1 stopped listing `block`,
/// and of the deletion of the IPAMBlock. Watches all changes since `version`.
async fn ends(lab: &Lab, block: &str, version: &str) -> Result<(u64, u64)> {
    let frr = lab
        .frr
        .watch(&WatchParams::default(), version)
        .await?
        .boxed();
    let withdrawn = frr.try_filter_map(async |event| {
        Ok(match event {
            WatchEvent::Deleted(it) if it.name_any() == "cadastre-order-1" => Some(it),
            WatchEvent::Modified(it) if it.name_any() == "cadastre-order-1" => {
                let mut routers = it.spec.bgp.routers.iter();
                let is_listed = routers.any(|it| it.prefixes.iter().any(|it| it == block));
                (!is_listed).then_some(it)
            }
            _ => None,
        })
    });
    let blocks: Api<IPAMBlock> = Api::all(lab.fixtures.client.clone());
    let blocks = blocks
        .watch(&WatchParams::default(), version)
        .await?
        .boxed();
    let deleted = blocks.try_filter_map(async |event| {
        Ok(match event {
            WatchEvent::Deleted(it) if it.spec.cidr == block => Some(it),
            _ => None,
        })
    });
    let withdrawn = std::pin::pin!(withdrawn).try_next().await?;
    let withdrawn = withdrawn.context("the prefix is not withdrawn")?;
    let deleted = std::pin::pin!(deleted).try_next().await?;
    let deleted = deleted.context("the block is not deleted")?;
    let number = |version: Option<String>| version.unwrap_or_default().parse::<u64>();
    Ok((
        number(withdrawn.resource_version())?,
        number(deleted.resource_version())?,
    ))
}
