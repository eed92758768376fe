//! Measures ADDs on two nodes with real agents, in three cases:
//! - The pod uses no claim, for comparison.
//! - The pod uses a claim whose address is at the node already.
//! - The pod uses a claim whose address is free in a block of the other node. The ADD has to wait until that node has
//!   released the address.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cadastre_api::{CLAIM_ANNOTATION, IPClaim};
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::node_agent::{add, pod_ref};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Fixtures, NodeAgent};
use cadastre_node::Add;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::node::percentile;
use super::{LIMIT, progress, say};

const POOL: &str = r"
apiVersion: cadastre.dev/v1alpha1
kind: IPPool
metadata: {name: bench}
spec: {allocationMode: Blocks, ipv4: {cidrs: [10.0.0.0/16], blockSize: 24}, warm: {low: 200, high: 600}}
";
/// How many ADDs of each kind are measured.
const ADDS: usize = 100;

struct Bench {
    fixtures: Fixtures,
    claims: Api<IPClaim>,
    /// The agent of the node whose blocks contain the addresses that the claims request
    _home: NodeAgent,
    /// The agent of the node on which the pods run
    away: NodeAgent,
}

pub async fn run() -> Result<()> {
    progress("ADDs with claims")?;
    let (cluster, fixtures) = with_crds(Options::default()).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    let mut controller = start_controller(&cluster, ADMIN, &[])?;
    controller.wait_ready(LIMIT).await?;
    let bench = Bench {
        claims: Api::default_namespaced(fixtures.client.clone()),
        _home: node(&cluster, &fixtures, "home").await?,
        away: node(&cluster, &fixtures, "away").await?,
        fixtures,
    };
    let mut pods = vec![];
    for i in 0..ADDS {
        let without = bench.pod(&format!("without-{i}"), None).await?;
        let name = format!("at-node-{i}");
        bench.claim(&name, json!({"pool": "bench"})).await?;
        pods.push((without, bench.pod(&name, Some(&name)).await?));
    }
    let (mut without, mut at_node, mut waiting) = (vec![], vec![], vec![]);
    for (_, with_claim) in &pods {
        bench.address_at_node(&with_claim.name_any()).await?;
    }
    for (plain, with_claim) in &pods {
        without.push(bench.add(plain).await?.1);
        at_node.push(bench.add(with_claim).await?.1);
    }
    let addresses = bench.free_at_home().await?;
    for (i, address) in addresses.iter().enumerate() {
        let took = bench.handed_over(&format!("waiting-{i}"), address).await;
        waiting.push(took.with_context(|| format!("address {address}"))?);
    }
    say(&format!("| {ADDS} ADDs one after another | p50 | p99 |"))?;
    say("|---|---|---|")?;
    for (name, mut times) in [
        ("without a claim", without),
        ("with a claim whose address is at the node", at_node),
        (
            "claim, pod and ADD at once; the address is free in the block of another node",
            waiting,
        ),
    ] {
        let [p50, p99] = [50, 99].map(|it| percentile(&mut times, it).as_secs_f64() * 1e3);
        say(&format!("| {name} | {p50:.2} ms | {p99:.2} ms |"))?;
    }
    Ok(())
}

/// Starts the agent of a new node, and waits until the node has addresses.
async fn node(cluster: &ControlPlane, fixtures: &Fixtures, name: &str) -> Result<NodeAgent> {
    fixtures.node("bench", name).await?;
    let mut agent = NodeAgent::new(cluster, ADMIN, name, &[])?;
    agent.start()?;
    agent.running()?.wait_ready(LIMIT).await?;
    Ok(agent)
}

impl Bench {
    async fn claim(&self, name: &str, spec: serde_json::Value) -> Result<()> {
        let claim = serde_json::from_value(json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPClaim",
            "metadata": {"name": name}, "spec": spec,
        }))?;
        self.claims.create(&PostParams::default(), &claim).await?;
        Ok(())
    }

    async fn pod(&self, name: &str, claim: Option<&str>) -> Result<Pod> {
        let annotations = claim.map(|it| json!({CLAIM_ANNOTATION: it}));
        let pod = serde_json::from_value(json!({
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"nodeName": "away", "containers": [{"name": "c", "image": "none"}]},
        }))?;
        Ok(self
            .fixtures
            .pods
            .create(&PostParams::default(), &pod)
            .await?)
    }

    /// Sends ADDs, as a runtime does, until one succeeds. Returns the pod's addresses, and the total time of these
    /// ADDs.
    async fn add(&self, pod: &Pod) -> Result<(Vec<Addr>, Duration)> {
        let pod = pod_ref(pod);
        let request = Add {
            pod: Some(pod.clone()),
            ..add(&pod.name)
        };
        let begun = Instant::now();
        let what = format!("pod {} has an address", pod.name);
        let addresses = until(&what, LIMIT, async || {
            Ok(Some(self.away.add(request.clone()).await?))
        })
        .await?;
        Ok((addresses, begun.elapsed()))
    }

    async fn handed_over(&self, name: &str, address: &str) -> Result<Duration> {
        self.claim(name, json!({"addresses": [address]})).await?;
        let pod = self.pod(name, Some(name)).await?;
        let (got, took) = self.add(&pod).await?;
        let got: Vec<String> = got.iter().map(ToString::to_string).collect();
        ensure!(got == [address], "the pod has {got:?}");
        Ok(took)
    }

    /// Waits until the status of the NodeSubnet `away` has a block that consists of the claim's address.
    async fn address_at_node(&self, claim: &str) -> Result<()> {
        let what = format!("the agent has the address of claim {claim}");
        until(&what, LIMIT, async || {
            let status = self.claims.get(claim).await?.status.unwrap_or_default();
            let address = status.addresses.first().context("no address")?;
            let block = format!("{address}/32");
            let subnet = self.fixtures.subnets.get("away").await?;
            let reported = subnet.status.unwrap_or_default().blocks;
            Ok(reported.iter().any(|it| it.cidr == block).then_some(()))
        })
        .await
    }

    /// Returns addresses in the first block of the node `home`. All are free, because no pod runs on `home`.
    async fn free_at_home(&self) -> Result<Vec<String>> {
        let subnet = self.fixtures.subnets.get("home").await?;
        let block = subnet.spec.blocks.first().context("home has no block")?;
        let first = Cidr::parse_lenient(&block.cidr)?.first();
        let count = u128::try_from(ADDS)?;
        // The first eight addresses of the block are skipped, because a claim cannot have the gateway, nor the first or
        // the last address of a pool.
        let inner = (8..8 + count).map(|i| Addr {
            value: first.value + i,
            ..first
        });
        Ok(inner.map(|it| it.to_string()).collect())
    }
}
