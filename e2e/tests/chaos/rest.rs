//! Waits until everything is at rest after the faults, and checks what must hold at every moment.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use cadastre_api::IPPool;
use cadastre_e2e::wait::until;
use cadastre_e2e::{daemon, nodes};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::cluster::{BLOCKS, CIDRS, Cluster, is_of_blocks};
use crate::workload::Workload;

/// One look at the cluster takes at most this long.
const LOOK: Duration = Duration::from_secs(15);
/// How many characters are shown of what was at rest last.
const SHOWN: usize = 300;
/// The reader of etcd's history may lag behind by this much at the end of a round.
const LAG: Duration = Duration::from_secs(30);

/// Waits at most `limit` until everything is at rest. Returns how long that took, and what was at rest last.
pub async fn wait(
    cluster: &mut Cluster,
    workload: &mut Workload,
    limit: Duration,
) -> Result<(Duration, String)> {
    let begun = Instant::now();
    let mut last = String::new();
    let rested = until("everything is at rest", limit, async || {
        let looked = tokio::time::timeout(LOOK, look(cluster, workload)).await;
        let looked = looked.map_err(anyhow::Error::from).flatten();
        if let Err(error) = &looked {
            last = format!("{error:#}").chars().take(SHOWN).collect();
        }
        looked.map(Some)
    })
    .await;
    let took = begun.elapsed();
    // A broken rule explains why there is no rest, so it is reported first.
    check(cluster, workload).await?;
    rested?;
    Ok((took, last))
}

/// Returns an error that says what is not at rest.
async fn look(cluster: &mut Cluster, workload: &mut Workload) -> Result<()> {
    let mut leaders = 0;
    for controller in &cluster.controllers {
        let state = controller.daemon.ready().await;
        let state = state.with_context(|| format!("controller {}", controller.name))?;
        leaders += usize::from(state == "leader\n");
    }
    ensure!(leaders == 1, "{leaders} controllers lead");
    for node in workload.nodes() {
        let address = workload.kubelets.agents().admin_address(&node)?;
        let state = daemon::get(&address, "/readyz").await;
        state.with_context(|| format!("agent of {node}"))?;
    }
    let pods = workload.list().await?;
    for pod in &pods {
        ensure!(
            is_running(pod),
            "{} does not run, or is not gone: {:?} {:?}, last ADD: {}",
            pod.name_any(),
            pod.annotations(),
            pod.metadata.deletion_timestamp,
            workload.kubelets.refusal(&pod.name_any()),
        );
    }
    for claim in workload.claims().await? {
        let status = claim.status.clone().unwrap_or_default();
        let is_ready = status
            .conditions
            .iter()
            .any(|it| it.type_ == "Ready" && it.status == "True");
        ensure!(
            is_ready,
            "claim {} is not ready: {status:?}",
            claim.name_any()
        );
    }
    let all = ListParams::default();
    let fixtures = &workload.fixtures;
    let machines: BTreeSet<String> = workload.nodes().into_iter().collect();
    let listed = fixtures.nodes.list(&all).await?.items;
    let listed: BTreeMap<String, Vec<String>> = listed
        .iter()
        .map(|it| (it.name_any(), nodes::pod_cidrs(it).to_vec()))
        .collect();
    ensure!(
        listed.keys().eq(&machines),
        "nodes {listed:?}, machines {machines:?}"
    );
    let subnets = fixtures.subnets.list(&all).await?.items;
    for subnet in &subnets {
        let spec = &subnet.spec;
        let recorded: Vec<String> = spec.pod_cidrs.iter().map(|it| it.cidr.clone()).collect();
        let name = subnet.name_any();
        ensure!(
            recorded.len() == 2 && listed.get(&name) == Some(&recorded),
            "{name} lists {recorded:?}"
        );
        ensure!(
            spec.quarantined.is_empty(),
            "{name} has ranges in quarantine"
        );
    }
    ensure!(
        subnets.len() == machines.len(),
        "{} NodeSubnets",
        subnets.len()
    );
    let used = pods
        .iter()
        .flat_map(ips)
        .filter(|it| is_of_blocks(it))
        .count();
    let (allocated, _) = count(&fixtures.pools.get(CIDRS).await?)?;
    let ranges = 2 * machines.len();
    ensure!(
        allocated == ranges,
        "pool {CIDRS} counts {allocated} ranges, not {ranges}"
    );
    let (_, in_use) = count(&fixtures.pools.get(BLOCKS).await?)?;
    ensure!(
        in_use == used,
        "pool {BLOCKS} counts {in_use} addresses, not {used}"
    );
    Ok(())
}

fn ips(pod: &Pod) -> impl Iterator<Item = &str> {
    let status = pod.status.as_ref();
    let ips = status.and_then(|it| it.pod_ips.as_ref());
    ips.into_iter().flatten().map(|it| it.ip.as_str())
}

fn is_running(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && ips(pod).count() == 2
}

/// Returns what a pool's status counts, both families together: allocated ranges, and addresses in use. A range in
/// quarantine is an error.
fn count(pool: &IPPool) -> Result<(usize, usize)> {
    let name = pool.name_any();
    let status = pool.status.clone().unwrap_or_default();
    let (mut allocated, mut in_use) = (0, 0);
    for family in [&status.ipv4, &status.ipv6] {
        let family = family
            .as_ref()
            .with_context(|| format!("pool {name} counts nothing"))?;
        ensure!(
            family.quarantined == "0",
            "pool {name}: {} in quarantine",
            family.quarantined
        );
        allocated += family.allocated.parse::<usize>()?;
        let addresses = family.addresses.as_ref();
        in_use += addresses.map_or(Ok(0), |it| it.used.parse::<usize>())?;
    }
    Ok((allocated, in_use))
}

/// Checks what must hold at every moment, up to now.
async fn check(cluster: &mut Cluster, workload: &Workload) -> Result<()> {
    let mut newest = 0;
    for gateway in cluster.plane.gateways()? {
        if let Ok(status) = gateway.status().await {
            newest = newest.max(status.revision);
        }
    }
    cluster.revisions.wait_for(newest, LAG).await?;
    let broken = cluster.revisions.violations();
    let duplicates = workload.kubelets.duplicates();
    if !broken.is_empty() || !duplicates.is_empty() {
        cluster.plane.keep();
        bail!("rules are broken: {broken:#?}; addresses with two containers: {duplicates:#?}");
    }
    for controller in &mut cluster.controllers {
        let process = controller.daemon.process();
        process.check_running()?;
        let log = std::fs::read_to_string(process.log())?;
        ensure!(
            !log.contains("panicked"),
            "controller {} panicked",
            controller.name
        );
    }
    for node in workload.nodes() {
        workload.kubelets.agents().check_running(&node)?;
    }
    Ok(())
}
