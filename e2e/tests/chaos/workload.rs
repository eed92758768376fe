//! Pods and nodes that come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use cadastre_api::{IPClaim, IPClaimSpec};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures, Kubelets, nodes};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::sync::watch;

use crate::cluster::{AGENT, BLOCKS, CIDRS, Cluster, clock};
use crate::rng::Rng;

/// The number of machines at the beginning, and the bounds between which it changes.
const MACHINES: usize = 4;
const BOUNDS: (usize, usize) = (3, 6);
/// The highest number of pods per machine.
const PODS: u64 = 12;
/// The number of IPClaims. A pod that asks for a claim gets its addresses, on whatever node it runs.
const CLAIMS: usize = 4;
/// The number of names for machines. A machine may have the name of one that is gone.
const NAMES: u32 = 8;
/// The interval between two arrivals or departures of machines.
const TURNOVER: Duration = Duration::from_secs(15);
/// While the faults act, one request waits at most this long.
const PATIENCE: Duration = Duration::from_secs(20);
/// The longest time until a machine has joined or left, however long the faults act.
const PERSISTENCE: Duration = Duration::from_secs(300);

pub struct Workload {
    random: Rng,
    pub fixtures: Fixtures,
    pub kubelets: Arc<Kubelets>,
    claims: Api<IPClaim>,
    machines: BTreeSet<String>,
    /// The pods whose creation may have succeeded, with their nodes and claims
    pods: BTreeMap<String, (String, Option<String>)>,
    next: u64,
    turnover: Instant,
}

impl Workload {
    pub async fn start(cluster: &Cluster, random: Rng) -> Result<Self> {
        let fixtures = cluster.fixtures.clone();
        let (wires, access) = (Arc::clone(&cluster.wires), cluster.plane.access(AGENT)?);
        let folder = cluster.plane.folder().to_owned();
        let agents = Agents::connecting(cluster.plane.folder(), move |node| {
            let balancer = wires.add(node)?;
            Ok((access.through(&balancer)?, clock(&folder, node)?))
        });
        let claims = Api::default_namespaced(fixtures.client.clone());
        for i in 0..CLAIMS {
            let spec = IPClaimSpec {
                pool: Some(BLOCKS.to_owned()),
                ..IPClaimSpec::default()
            };
            let claim = IPClaim::new(&format!("claim-{i}"), spec);
            claims.create(&PostParams::default(), &claim).await?;
        }
        let mut this = Self {
            random,
            kubelets: Arc::new(Kubelets::start(&fixtures, agents)),
            fixtures,
            claims,
            machines: BTreeSet::new(),
            pods: BTreeMap::new(),
            next: 0,
            turnover: Instant::now(),
        };
        while this.machines.len() < MACHINES {
            this.join().await?;
        }
        Ok(this)
    }

    /// The names of all nodes whose machines run.
    pub fn nodes(&self) -> Vec<String> {
        self.machines.iter().cloned().collect()
    }

    pub fn pods(&self) -> usize {
        self.pods.len()
    }

    /// How many containers have had addresses so far.
    pub fn assigned(&self) -> usize {
        self.kubelets.assigned().values().map(Vec::len).sum()
    }

    pub async fn claims(&self) -> Result<Vec<IPClaim>> {
        Ok(self.claims.list(&ListParams::default()).await?.items)
    }

    /// Lets pods and machines come and go until `stopped` is set. Failed requests are ignored, because the API servers
    /// may be down.
    pub async fn churn(&mut self, stopped: watch::Receiver<bool>) {
        while !*stopped.borrow() {
            let pause = Duration::from_millis(self.random.between(100, 900));
            tokio::time::sleep(pause).await;
            if self.turnover.elapsed() > TURNOVER && self.random.one_in(8) {
                self.turn_over().await;
                self.turnover = Instant::now();
                continue;
            }
            let room = self.machines.len() as u64 * PODS;
            let is_create = self.random.below(room) >= self.pods.len() as u64;
            if is_create || self.pods.is_empty() {
                self.create().await;
            } else {
                self.delete().await;
            }
        }
    }

    async fn create(&mut self) {
        let nodes = self.nodes();
        let node = self.random.pick(&nodes).clone();
        let taken: BTreeSet<_> = self.pods.values().filter_map(|it| it.1.clone()).collect();
        let claim = format!("claim-{}", self.random.index(CLAIMS));
        let claim = (self.random.one_in(3) && !taken.contains(&claim)).then_some(claim);
        let name = format!("pod-{}", self.next);
        self.next += 1;
        let annotations = match &claim {
            Some(claim) => json!({"cadastre.dev/claim": claim}),
            None => json!({"cadastre.dev/pools": self.random.pick(&[BLOCKS, CIDRS])}),
        };
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name, "annotations": annotations},
            "spec": {
                "nodeName": node, "containers": [{"name": "c", "image": "none"}],
                // Without a controller manager, nobody else would end a pod of a node that is gone.
                "terminationGracePeriodSeconds": 1,
            },
        }))
        .unwrap();
        self.pods.insert(name, (node, claim));
        let params = PostParams::default();
        let created = self.fixtures.pods.create(&params, &pod);
        let _ = tokio::time::timeout(PATIENCE, created).await;
    }

    async fn delete(&mut self) {
        let names: Vec<String> = self.pods.keys().cloned().collect();
        let name = self.random.pick(&names).clone();
        let params = DeleteParams::default();
        let deleted = self.fixtures.pods.delete(&name, &params);
        let _ = tokio::time::timeout(PATIENCE, deleted).await;
        // A pod that has a claim counts until it is gone, so that no two pods name one claim.
        let got = self.fixtures.pods.get_opt(&name);
        if let Ok(Ok(None)) = tokio::time::timeout(PATIENCE, got).await {
            self.pods.remove(&name);
        }
    }

    /// Lets a machine join or leave.
    async fn turn_over(&mut self) {
        let count = self.machines.len();
        let is_joining = match count {
            _ if count <= BOUNDS.0 => true,
            _ if count >= BOUNDS.1 => false,
            _ => self.random.one_in(2),
        };
        let done = if is_joining {
            self.join().await
        } else {
            self.leave().await
        };
        done.unwrap();
    }

    async fn join(&mut self) -> Result<()> {
        let free = (0..NAMES).map(nodes::numbered);
        let free: Vec<Node> = free
            .filter(|it| !self.machines.contains(&it.name_any()))
            .collect();
        let mut node = self.random.pick(&free).clone();
        let name = node.name_any();
        // Another machine, not one that is back: it has none of the addresses of an earlier machine of this name.
        node.spec.get_or_insert_default().provider_id = Some(format!("e2e://{name}/{}", self.next));
        self.next += 1;
        until(&format!("{name} joins"), PERSISTENCE, async || {
            tokio::time::timeout(PATIENCE, self.collect_garbage(&name)).await??;
            let created = tokio::time::timeout(PATIENCE, self.register(&node)).await??;
            let room = u32::try_from(PODS)? + 10;
            tokio::time::timeout(PATIENCE, self.kubelets.join(&created, room)).await??;
            Ok(Some(()))
        })
        .await?;
        self.machines.insert(name);
        Ok(())
    }

    /// Deletes the list of addresses of an earlier machine of this name, because no garbage collector runs. All machines
    /// have the boot id of this host, so the new machine's agent would take the list for one of this boot.
    async fn collect_garbage(&self, name: &str) -> Result<()> {
        let params = DeleteParams::default();
        match self.fixtures.addresses.delete(name, &params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            done => Ok(done.map(drop)?),
        }
    }

    /// Creates a Node, unless an earlier attempt did.
    async fn register(&self, node: &Node) -> Result<Node> {
        let name = node.name_any();
        let found = self.fixtures.nodes.get_opt(&name).await?;
        match found {
            Some(found) => Ok(found),
            None => Ok(self
                .fixtures
                .nodes
                .create(&PostParams::default(), node)
                .await?),
        }
    }

    /// Switches a machine off, deletes its pods and then its Node.
    async fn leave(&mut self) -> Result<()> {
        let nodes = self.nodes();
        let name = self.random.pick(&nodes).clone();
        self.kubelets.switch_off(&name)?;
        self.machines.remove(&name);
        let on_node = ListParams::default().fields(&format!("spec.nodeName={name}"));
        let at_once = DeleteParams::default().grace_period(0);
        until(&format!("{name} leaves"), PERSISTENCE, async || {
            let attempt = async {
                let pods = self.fixtures.pods.list(&on_node).await?.items;
                for pod in &pods {
                    self.fixtures.pods.delete(&pod.name_any(), &at_once).await?;
                }
                let is_empty = pods.is_empty();
                if is_empty && self.fixtures.nodes.get_opt(&name).await?.is_some() {
                    self.fixtures
                        .nodes
                        .delete(&name, &DeleteParams::default())
                        .await?;
                }
                // Without a garbage collector, nobody else deletes the list of the machine's addresses. All machines have
                // the boot id of this host, so the next machine of this name would take the list for its own.
                if is_empty && self.fixtures.addresses.get_opt(&name).await?.is_some() {
                    let params = DeleteParams::default();
                    self.fixtures.addresses.delete(&name, &params).await?;
                }
                anyhow::Ok(is_empty.then_some(()))
            };
            tokio::time::timeout(PATIENCE, attempt).await?
        })
        .await?;
        self.pods.retain(|_, (node, _)| *node != name);
        Ok(())
    }

    /// Forgets pods that do not exist, and returns those that do.
    pub async fn list(&mut self) -> Result<Vec<Pod>> {
        let all = self.fixtures.pods.list(&ListParams::default()).await?.items;
        let names: BTreeSet<String> = all.iter().map(ResourceExt::name_any).collect();
        self.pods.retain(|name, _| names.contains(name));
        Ok(all)
    }
}
