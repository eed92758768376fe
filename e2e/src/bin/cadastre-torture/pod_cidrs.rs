//! Programs that allocate podCIDRs: two replicas of each, with leader election, on one API server.
//!
//! A run is a sequence of rounds. In each round nodes join and die while a fault acts. Then everything is healed, and
//! all nodes should get podCIDRs. At the end all nodes die, and as many join as the range has podCIDRs: those that get
//! none show how many podCIDRs are lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadastre_api::LEASE_NAME;
use cadastre_e2e::assets::Program;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::DaemonOptions;
use cadastre_e2e::history::Revision;
use cadastre_e2e::process::{self, Process};
use cadastre_e2e::wait::until;
use cadastre_e2e::{
    Balancer, ControlPlane, Daemon, Fixtures, History, KcmOptions, Options, assets, crds, kcm,
    lease, nodes, ports,
};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::json;

use crate::{create, install, is_available, progress, say};

/// The range, which has 64 podCIDRs of size /24.
const RANGE: &str = "10.64.0.0/18";
const CAPACITY: u32 = 64;
/// The number of nodes that live at any time. The rest of the range leaves space for podCIDRs in quarantine.
const LIVE: usize = 40;
/// The number of nodes that die each second, and the number of those that join.
const CHURN: usize = 4;
/// For how long a fault acts, and how long it takes until nodes may be without podCIDRs after it. A lease lasts 15 s.
const ACTIVE: Duration = Duration::from_secs(20);
const REST: Duration = Duration::from_secs(120);
/// How many times each fault acts.
const TIMES: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    Cadastre,
    KubeControllerManager,
    NodeIpamController,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Half of all answers to requests of the program are lost.
    AnswersLost,
    /// Half of all requests are lost.
    RequestsLost,
    /// The leader stands still for longer than its lease lasts, and then goes on.
    LeaderPaused,
    /// The leader is killed, and later started again.
    LeaderKilled,
    /// All connections break, again and again.
    Resets,
}

const FAULTS: [Fault; 5] = [
    Fault::AnswersLost,
    Fault::RequestsLost,
    Fault::LeaderPaused,
    Fault::LeaderKilled,
    Fault::Resets,
];

pub async fn run(seed: u64) -> Result<()> {
    let mut peers = vec![Peer::Cadastre, Peer::KubeControllerManager];
    if is_available(Program::NodeIpamController).await? {
        peers.push(Peer::NodeIpamController);
    }
    say(&format!(
        "| podCIDRs: {} rounds | version | nodes that joined | overlapping podCIDRs | nodes without podCIDRs after {} s | podCIDRs lost at the end | slowest round | a podCIDR went to another node at the earliest |",
        FAULTS.len() * TIMES,
        REST.as_secs(),
    ))?;
    say("|---|---|---|---|---|---|---|---|")?;
    for peer in peers {
        let (name, version) = peer.name();
        let result = Torture::start(peer, seed).await?.run().await?;
        say(&format!(
            "| {name} | {version} | {} | {} | {} | {} | {:.0} s | {} |",
            result.joined,
            result.duplicates,
            result.unserved,
            result.lost,
            result.slowest.as_secs_f64(),
            result.soonest.map_or_else(
                || "never".to_owned(),
                |it| format!("{:.1} s after its node", it.as_secs_f64())
            ),
        ))?;
    }
    Ok(())
}

impl Peer {
    fn name(self) -> (&'static str, &'static str) {
        match self {
            Self::Cadastre => ("Cadastre", env!("CARGO_PKG_VERSION")),
            Self::KubeControllerManager => ("kube-controller-manager", assets::KUBERNETES),
            Self::NodeIpamController => ("node-ipam-controller", assets::NODE_IPAM_CONTROLLER),
        }
    }
}

enum Running {
    Cadastre(Daemon),
    Other(Process),
}

impl Running {
    fn process(&mut self) -> &mut Process {
        match self {
            Self::Cadastre(daemon) => daemon.process(),
            Self::Other(process) => process,
        }
    }
}

/// A replica of the program, with its own way to the API server.
struct Replica {
    balancer: Balancer,
    running: Running,
    /// The name of its current log
    name: String,
}

struct Outcome {
    joined: usize,
    duplicates: usize,
    unserved: usize,
    lost: usize,
    slowest: Duration,
    soonest: Option<Duration>,
}

struct Torture {
    peer: Peer,
    random: Rng,
    replicas: Vec<Replica>,
    history: History,
    fixtures: Fixtures,
    live: BTreeSet<String>,
    joined: usize,
    starts: usize,
    cluster: ControlPlane,
}

impl Torture {
    async fn start(peer: Peer, seed: u64) -> Result<Self> {
        let cluster = ControlPlane::start(Options::default()).await?;
        let client = cluster.client().await?;
        crds::install(&client).await?;
        let fixtures = Fixtures::new(client.clone());
        match peer {
            Peer::Cadastre => {
                let spec = json!({
                    "nodeSelector": {}, "quarantineSeconds": 5,
                    "ipv4": {"cidrs": [RANGE], "blockSize": 24},
                });
                fixtures.pool("all", spec).await?;
            }
            Peer::KubeControllerManager => {}
            Peer::NodeIpamController => {
                install(&cluster, &[assets::cluster_cidr_crd()?]).await?;
                let ranges = json!({
                    "apiVersion": "networking.x-k8s.io/v1", "kind": "ClusterCIDR",
                    "metadata": {"name": "all"}, "spec": {"perNodeHostBits": 8, "ipv4": RANGE},
                });
                create(&cluster, &ranges).await?;
            }
        }
        let mut this = Self {
            peer,
            random: Rng::with_seed(seed),
            replicas: Vec::new(),
            history: History::start(client).await?,
            fixtures,
            live: BTreeSet::new(),
            joined: 0,
            starts: 0,
            cluster,
        };
        for _ in 0..2 {
            let balancer = Balancer::start(vec![this.cluster.address()])?;
            let (running, name) = this.spawn(&balancer)?;
            this.replicas.push(Replica {
                balancer,
                running,
                name,
            });
        }
        Ok(this)
    }

    fn spawn(&mut self, balancer: &Balancer) -> Result<(Running, String)> {
        self.starts += 1;
        let name = format!("replica-{}", self.starts);
        let proxy = balancer.address();
        let running = match self.peer {
            Peer::Cadastre => {
                let kubeconfig = self.cluster.kubeconfig_through(ADMIN, proxy)?;
                let options = DaemonOptions {
                    name: name.clone(),
                    args: ["controller", "--identity", &name]
                        .map(str::to_owned)
                        .into(),
                    env: Vec::new(),
                };
                let daemon = Daemon::start(self.cluster.folder(), &kubeconfig, &options)?;
                Running::Cadastre(daemon)
            }
            Peer::KubeControllerManager => {
                let certificates = self.cluster.folder().join(&name);
                let options = KcmOptions {
                    args: vec![
                        "--leader-elect=true".to_owned(),
                        format!("--cert-dir={}", certificates.display()),
                        "--node-cidr-mask-size=24".to_owned(),
                    ],
                    kubeconfig: Some(self.cluster.kubeconfig_through(kcm::USER, proxy)?),
                    log: name.clone(),
                    qps: 1000,
                    burst: 1000,
                    ..KcmOptions::node_ipam(&[RANGE])
                };
                Running::Other(self.cluster.start_kcm(&options)?)
            }
            Peer::NodeIpamController => {
                let kubeconfig = self.cluster.kubeconfig_through(ADMIN, proxy)?;
                let mut command = process::command(&assets::find(Program::NodeIpamController)?);
                command
                    .arg(format!("--kubeconfig={}", kubeconfig.display()))
                    .arg(format!(
                        "--webserver-bind-address=127.0.0.1:{}",
                        ports::free()?
                    ))
                    .arg(format!("--leader-elect-id={name}"))
                    .arg("--leader-elect-namespace=kube-system");
                let log = self.cluster.folder().join(format!("{name}.log"));
                Running::Other(Process::spawn("node-ipam-controller", command, &log)?)
            }
        };
        Ok((running, name))
    }

    /// Returns the index of the replica that leads.
    async fn leader(&mut self) -> Result<usize> {
        let client = self.fixtures.client.clone();
        until("somebody leads", REST, async || {
            match self.peer {
                Peer::Cadastre => {
                    let holder = lease::holder(&client).await?;
                    let holder = holder.with_context(|| format!("nobody holds {LEASE_NAME}"))?;
                    let is_holder = |it: &Replica| it.name == lease::identity(&holder);
                    Ok(self.replicas.iter().position(is_holder))
                }
                // The log tells: the identities of kube-controller-manager's replicas on one host are random.
                Peer::KubeControllerManager | Peer::NodeIpamController => {
                    for (i, replica) in self.replicas.iter_mut().enumerate() {
                        let process = replica.running.process();
                        let log = std::fs::read_to_string(process.log())?;
                        if log.contains("Successfully acquired lease")
                            && process.exit_status()?.is_none()
                        {
                            return Ok(Some(i));
                        }
                    }
                    Ok(None)
                }
            }
        })
        .await
    }

    async fn run(mut self) -> Result<Outcome> {
        let mut slowest = Duration::ZERO;
        let mut unserved = 0;
        self.leader().await?;
        self.join(LIVE).await?;
        for time in 0..TIMES {
            for fault in FAULTS {
                self.act(fault).await?;
                self.heal(fault).await?;
                let (took, without) = self.rest().await?;
                slowest = slowest.max(took);
                unserved += without;
                progress(&format!(
                    "{:?}, {fault:?} ({} of {TIMES}): {:.1} s until all have podCIDRs, {without} without; {} overlaps so far",
                    self.peer,
                    time + 1,
                    took.as_secs_f64(),
                    self.history.duplicates()?.len(),
                ))?;
            }
        }
        let lost = self.lost().await?;
        Ok(Outcome {
            joined: self.joined,
            duplicates: self.history.duplicates()?.len(),
            unserved,
            lost,
            slowest,
            soonest: soonest(&self.history.revisions()),
        })
    }

    async fn act(&mut self, fault: Fault) -> Result<()> {
        let leader = self.leader().await?;
        match fault {
            Fault::AnswersLost => self.change(|it| it.balancer.change(|it| it.lost_answers = 50)),
            Fault::RequestsLost => self.change(|it| it.balancer.change(|it| it.lost_requests = 50)),
            Fault::LeaderPaused => {
                // Some writes of the leader are on their way when it stops.
                self.join(CHURN * 2).await?;
                let leader = self.replicas[leader].running.process();
                leader.signal(Signal::STOP)?;
            }
            Fault::LeaderKilled => {
                self.join(CHURN * 2).await?;
                self.replicas[leader].running.process().kill()?;
            }
            Fault::Resets => {}
        }
        let begun = Instant::now();
        let mut second = tokio::time::interval(Duration::from_secs(1));
        while begun.elapsed() < ACTIVE {
            second.tick().await;
            if matches!(fault, Fault::Resets) {
                let incident = cadastre_e2e::balancer::Incident::Reset;
                self.change(|it| it.balancer.cause(incident));
            }
            let dying = CHURN + self.live.len().saturating_sub(LIVE);
            self.die(dying).await?;
            self.join(CHURN).await?;
        }
        Ok(())
    }

    fn change(&self, change: impl Fn(&Replica)) {
        self.replicas.iter().for_each(change);
    }

    /// Ends a fault, and starts replicas that have ended, as a Deployment does. Some programs end when they lose their
    /// lease.
    async fn heal(&mut self, fault: Fault) -> Result<()> {
        self.change(|it| {
            it.balancer
                .change(|it| (it.lost_answers, it.lost_requests) = (0, 0));
        });
        if matches!(fault, Fault::LeaderPaused) {
            // The node that joins now is a reason to write for whoever believes to lead.
            self.join(CHURN).await?;
            for replica in &mut self.replicas {
                if replica.running.process().exit_status()?.is_none() {
                    replica.running.process().signal(Signal::CONT)?;
                }
            }
            self.join(CHURN).await?;
        }
        self.restart_ended()
    }

    fn restart_ended(&mut self) -> Result<()> {
        for i in 0..self.replicas.len() {
            if self.replicas[i].running.process().exit_status()?.is_some() {
                let balancer = Balancer::start(vec![self.cluster.address()])?;
                let (running, name) = self.spawn(&balancer)?;
                self.replicas[i] = Replica {
                    balancer,
                    running,
                    name,
                };
            }
        }
        Ok(())
    }

    /// Waits until all nodes have podCIDRs, at most [`REST`]. Returns how long it took, and the number of nodes without.
    async fn rest(&mut self) -> Result<(Duration, usize)> {
        let begun = Instant::now();
        loop {
            self.restart_ended()?;
            let nodes = nodes::list(&self.fixtures.client).await?;
            let without = nodes.iter().filter(|it| nodes::pod_cidrs(it).is_empty());
            let without = without.count();
            if without == 0 || begun.elapsed() > REST {
                return Ok((begun.elapsed(), without));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Lets all nodes die, and as many join as the range has podCIDRs. Returns how many of them get no podCIDR.
    async fn lost(&mut self) -> Result<usize> {
        self.die(usize::MAX).await?;
        // Before the new nodes join, the podCIDRs' quarantine must end.
        tokio::time::sleep(Duration::from_secs(30)).await;
        nodes::create(&self.cluster, CAPACITY, nodes::numbered).await?;
        self.joined += CAPACITY as usize;
        Ok(self.rest().await?.1)
    }

    /// Creates nodes. Half of them have names of nodes that existed before.
    async fn join(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            let i = self.random.usize(..2 * LIVE.max(self.joined / 2));
            let name = format!("n{i}");
            if self.live.insert(name.clone()) {
                let ip = format!("172.16.{}.{}", i / 256, i % 256);
                self.fixtures.create_node(nodes::node(&name, &ip)).await?;
                self.joined += 1;
            }
        }
        Ok(())
    }

    async fn die(&mut self, count: usize) -> Result<()> {
        let mut names: Vec<String> = self.live.iter().cloned().collect();
        self.random.shuffle(&mut names);
        for name in names.iter().take(count) {
            self.fixtures.delete_node(name).await?;
            self.live.remove(name);
        }
        Ok(())
    }
}

/// Returns the shortest time from the deletion of a node until another node got its podCIDR.
fn soonest(revisions: &[Revision]) -> Option<Duration> {
    let mut freed: HashMap<&str, (&str, Instant)> = HashMap::new();
    let mut assigned: BTreeMap<&str, &[String]> = BTreeMap::new();
    let mut soonest: Option<Duration> = None;
    for it in revisions {
        if it.deleted {
            for cidr in &it.pod_cidrs {
                freed.insert(cidr, (&it.name, it.at));
            }
            continue;
        }
        let before = assigned.insert(&it.uid, &it.pod_cidrs);
        for cidr in &it.pod_cidrs {
            if before.is_some_and(|it| it.contains(cidr)) {
                continue;
            }
            if let Some((name, at)) = freed.remove(cidr.as_str())
                && name != it.name
            {
                let after = it.at.duration_since(at);
                soonest = Some(soonest.map_or(after, |it| it.min(after)));
            }
        }
    }
    soonest
}
