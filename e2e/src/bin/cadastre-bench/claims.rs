//! Measures claims and, for comparison, the bare API requests that claims need. First, many claims are created. Then a
//! pod of each claim is bound to a node.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadastre_api::{CLAIM_ANNOTATION, CLAIM_FINALIZER, IPClaim};
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::raw::{Call, JSON, MERGE_PATCH};
use cadastre_e2e::{Fixtures, nodes};
use futures::StreamExt as _;
use http::Method;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::{
    LIMIT, ROUNDS, beside_raw, beside_raw_header, grown, mib, progress, say, until_subnets,
    until_writable,
};

const POOL: &str = r"
apiVersion: cadastre.dev/v1alpha1
kind: IPPool
metadata: {name: bench}
spec: {allocationMode: Blocks, assignment: Manual, ipv4: {cidrs: [10.0.0.0/8], blockSize: 26}}
";
const CLAIMS: &str = "/apis/cadastre.dev/v1alpha1/namespaces/default/ipclaims";
const BLOCKS: &str = "/apis/cadastre.dev/v1alpha1/ipamblocks";
const PODS: &str = "/api/v1/namespaces/default/pods";
/// The number of pods on each node. Each pod uses one claim.
const PODS_A_NODE: u32 = 100;
/// How long the controller is left without work before its memory is read.
const REST: Duration = Duration::from_secs(5);

/// How long each phase of one round took.
struct Phases {
    created: Duration,
    bound: Duration,
}

type Pick = fn(&Phases) -> Duration;

/// The controller's memory in bytes (before the claims, with the claims, and with their pods), its processor time, and
/// the API requests of each phase.
struct Details {
    empty: u64,
    created: u64,
    bound: u64,
    cpu: Duration,
    requests: [String; 2],
}

pub async fn run(count: u32) -> Result<()> {
    let (mut raws, mut ours, mut last) = (vec![], vec![], None);
    for round in 1..=ROUNDS {
        progress(&format!("claims, round {round} of {ROUNDS}: raw requests"))?;
        raws.push(raw(count).await?);
        progress("cadastre")?;
        let (phases, details) = cadastre(count).await?;
        ours.push(phases);
        last = Some(details);
    }
    let details = last.context("no round ran")?;
    beside_raw_header(&format!("{count} claims"))?;
    let phases: [(&str, Pick); 2] = [
        ("created, and an address each", |it| it.created),
        ("a pod each, and the address at its node", |it| it.bound),
    ];
    for ((name, pick), requests) in phases.into_iter().zip(&details.requests) {
        let [raws, ours] = [&raws, &ours].map(|it| it.iter().map(pick).collect::<Vec<_>>());
        beside_raw(name, &raws, &ours, requests)?;
    }
    say("")?;
    let each = |bytes: u64| {
        let more = bytes.saturating_sub(details.empty);
        format!("{:.2} KiB", mib(more) * 1024.0 / f64::from(count))
    };
    say(&format!(
        "Controller: {:.1} MiB before the claims, {:.1} MiB with them ({} a claim), {:.1} MiB with their pods and \
         blocks ({} a claim); {:.2} s CPU.",
        mib(details.empty),
        mib(details.created),
        each(details.created),
        mib(details.bound),
        each(details.bound),
        details.cpu.as_secs_f64(),
    ))
}

fn name(i: u32) -> String {
    format!("claim-{i:05}")
}

fn node_of(i: u32) -> String {
    format!("node-{:05}", i / PODS_A_NODE)
}

fn address(i: u32) -> String {
    std::net::Ipv4Addr::from(0x0A00_0002 + i).to_string()
}

fn all(count: u32, make: fn(u32) -> Call) -> Vec<Call> {
    (0..count).map(make).collect()
}

fn create_claim(i: u32) -> Call {
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPClaim",
        "metadata": {"name": name(i)}, "spec": {"pool": "bench"},
    });
    Call::new(Method::POST, CLAIMS.to_owned(), JSON, &body)
}

fn create_pod(i: u32) -> Call {
    let body = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name(i), "annotations": {CLAIM_ANNOTATION: name(i)}},
        "spec": {
            "nodeName": node_of(i),
            "containers": [{"name": "c", "image": "example.com/app:1"}],
        },
    });
    Call::new(Method::POST, PODS.to_owned(), JSON, &body)
}

/// Returns a call that writes a claim's status as the controller does.
fn write_status(i: u32, is_used: bool) -> Call {
    let mut status = json!({
        "addresses": [address(i)], "pool": "bench",
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "Available", "message": "no pod uses the addresses",
            "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z",
        }],
    });
    if is_used {
        status["node"] = node_of(i).into();
        status["pod"] = name(i).into();
        status["since"] = "2026-01-01T00:00:00Z".into();
    }
    let path = format!("{CLAIMS}/{}/status", name(i));
    Call::new(Method::PATCH, path, MERGE_PATCH, &json!({"status": status}))
}

fn write_finalizer(i: u32) -> Call {
    let path = format!("{CLAIMS}/{}", name(i));
    let body = json!({"metadata": {"finalizers": [CLAIM_FINALIZER]}});
    Call::new(Method::PATCH, path, MERGE_PATCH, &body)
}

fn create_block(i: u32) -> Call {
    let cidr = format!("{}/32", address(i));
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock",
        "metadata": {"name": cidr.replace(['.', '/'], "-")},
        "spec": {
            "cidr": cidr, "pool": "bench", "since": "2026-01-01T00:00:00Z",
            "owner": {"kind": "Node", "name": node_of(i), "uid": format!("{i:036}")},
        },
    });
    Call::new(Method::POST, BLOCKS.to_owned(), JSON, &body)
}

async fn raw(count: u32) -> Result<Phases> {
    let (cluster, Fixtures { client, .. }) = with_crds(Options::default()).await?;
    let endpoint = cluster.endpoint()?;
    until_writable(&endpoint, vec![create_claim(0), create_block(0)]).await?;
    // The same watch as in the other measurement, because the API server encodes each event for it.
    let mut claims = Watching::start(&client).await?;
    let mut send = async |steps: &[fn(u32) -> Call], bound: bool| -> Result<Duration> {
        let begun = Instant::now();
        for make in steps {
            let calls = all(count, *make);
            endpoint.send_all(nodes::CONNECTIONS, calls).await?;
        }
        claims.until(usize::try_from(count)?, bound).await?;
        Ok(begun.elapsed())
    };
    let created = send(&[create_claim, |i| write_status(i, false)], false).await?;
    let bound = send(
        &[create_pod, write_finalizer, create_block, |i| {
            write_status(i, true)
        }],
        true,
    );
    Ok(Phases {
        created,
        bound: bound.await?,
    })
}

async fn cadastre(count: u32) -> Result<(Phases, Details)> {
    let (cluster, Fixtures { client, .. }) = with_crds(Options::default()).await?;
    cluster.kubectl_stdin(&["apply", "-f", "-"], POOL).await?;
    let of_nodes = count.div_ceil(PODS_A_NODE);
    nodes::create(&cluster, of_nodes, nodes::numbered).await?;
    let mut daemon = start_controller(&cluster, ADMIN, &[])?;
    daemon.wait_ready(LIMIT).await?;
    until_subnets(&cluster, of_nodes).await?;
    let mut claims = Watching::start(&client).await?;
    let count_of_claims = usize::try_from(count)?;
    let usage = daemon.process().usage()?;
    let empty = usage.rss;
    let phase = async |claims: &mut Watching,
                       cluster: &ControlPlane,
                       make: fn(u32) -> Call,
                       bound: bool| {
        let before = cluster.apiserver_metrics().await?;
        let begun = Instant::now();
        let calls = all(count, make);
        let endpoint = cluster.endpoint()?;
        endpoint.send_all(nodes::CONNECTIONS, calls).await?;
        claims.until(count_of_claims, bound).await?;
        let took = begun.elapsed();
        tokio::time::sleep(REST).await;
        let after = cluster.apiserver_metrics().await?;
        anyhow::Ok((took, grown(&before, &after)))
    };
    let (created, of_created) = phase(&mut claims, &cluster, create_claim, false).await?;
    let created_rss = daemon.process().usage()?.rss;
    let (bound, of_bound) = phase(&mut claims, &cluster, create_pod, true).await?;
    let last = daemon.process().usage()?;
    daemon.process().stop(Duration::from_secs(30)).await?;
    let details = Details {
        empty,
        created: created_rss,
        bound: last.rss,
        cpu: last.cpu.saturating_sub(usage.cpu),
        requests: [of_created, of_bound],
    };
    Ok((Phases { created, bound }, details))
}

/// A watch that counts the claims with addresses, and the claims whose addresses are at a node.
struct Watching {
    /// `None` until the watch has begun
    seen: watch::Receiver<Option<(usize, usize)>>,
    _tasks: JoinSet<()>,
}

impl Watching {
    /// Returns when the watch has begun.
    async fn start(client: &Client) -> Result<Self> {
        let claims = Api::<IPClaim>::all(client.clone());
        let (publish, mut seen) = watch::channel(None);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut known: BTreeMap<String, (bool, bool)> = BTreeMap::new();
            let (mut allocated, mut bound) = (0, 0);
            let mut events = watcher(claims, Config::default()).default_backoff().boxed();
            while let Some(event) = events.next().await {
                let is_current = matches!(event, Ok(Event::InitDone | Event::Apply(_)));
                if let Ok(Event::Apply(claim) | Event::InitApply(claim)) = event {
                    let status = claim.status.as_ref();
                    let has_address = status.is_some_and(|it| !it.addresses.is_empty());
                    let is_bound = status.is_some_and(|it| it.node.is_some());
                    let now = (has_address, is_bound);
                    let before = known.insert(claim.name_any(), now).unwrap_or_default();
                    allocated += usize::from(now.0 && !before.0);
                    bound += usize::from(now.1 && !before.1);
                }
                if is_current {
                    publish.send_replace(Some((allocated, bound)));
                }
            }
        });
        tokio::time::timeout(LIMIT, seen.wait_for(Option::is_some)).await??;
        Ok(Watching {
            seen,
            _tasks: tasks,
        })
    }

    /// Waits until `count` claims have addresses or, with `bound`, until the addresses of `count` claims are at a node.
    async fn until(&mut self, count: usize, bound: bool) -> Result<()> {
        let reached = |seen: &Option<(usize, usize)>| {
            let of_phase = seen.map(|seen| if bound { seen.1 } else { seen.0 });
            of_phase >= Some(count)
        };
        let wait = tokio::time::timeout(LIMIT, self.seen.wait_for(reached)).await;
        let what = if bound { "at nodes" } else { "with addresses" };
        let seen = wait.map(|it| it.map(|_| ()));
        let now = *self.seen.borrow();
        seen.with_context(|| format!("claims {what}: not within {LIMIT:?}, now {now:?}"))??;
        Ok(())
    }
}
