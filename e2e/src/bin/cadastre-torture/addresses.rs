//! CNI IPAM plugins on one node: callers start and delete containers, and one in eight plugins is killed at work. The
//! moment is chosen from the time that an ADD takes alone, so that slow plugins, too, are killed at work. Meanwhile the
//! API server loses answers, for programs that use it, and the node's daemon is killed and stopped, for programs that
//! have one.
//!
//! At the end all containers are deleted. Then as many are started as get addresses: those that are missing, compared
//! with the beginning, show how many addresses are lost. No time passes before, in which a program could look for
//! addresses that are not in use.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cadastre_e2e::assets::Program;
use cadastre_e2e::balancer::Incident;
use cadastre_e2e::cni_callers::{Callers, Kills, Network};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::linearizability::{Call, Outcome, Verb};
use cadastre_e2e::{Balancer, ControlPlane, Daemon, NodeAgent, Options, assets, cluster, daemon};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{create, install, is_available, progress, say};

/// The node's range.
const RANGE: &str = "10.70.0.0/28";
const CALLERS: usize = 8;
const DURATION: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    /// With the agent, as `helm install` installs it
    Cadastre,
    /// `cadastre-ipam` without an agent, with host-local's configuration
    CadastreAlone,
    HostLocal,
    Whereabouts,
    Calico,
}

pub async fn run(seed: u64) -> Result<()> {
    let mut peers = vec![Peer::Cadastre, Peer::CadastreAlone];
    let others = [
        (Peer::HostLocal, Program::HostLocal),
        (Peer::Whereabouts, Program::Whereabouts),
        (Peer::Calico, Program::CalicoIpam),
    ];
    for (peer, program) in others {
        if is_available(program).await? {
            peers.push(peer);
        }
    }
    say(&format!(
        "| addresses: {CALLERS} callers, {} s | version | ADDs that succeeded | addresses with two containers | addresses lost at the end | ADD, median | ADD, p99 |",
        DURATION.as_secs()
    ))?;
    say("|---|---|---|---|---|---|---|")?;
    for peer in peers {
        let (name, version) = peer.name();
        let result = Torture::start(peer).await?.run(seed).await?;
        let ms = |it: Duration| format!("{:.0} ms", it.as_secs_f64() * 1e3);
        say(&format!(
            "| {name} | {version} | {} | {} | {} of {} | {} | {} |",
            result.adds,
            result.duplicates,
            result.lost,
            result.capacity,
            ms(result.median),
            ms(result.slow),
        ))?;
    }
    Ok(())
}

impl Peer {
    fn name(self) -> (&'static str, &'static str) {
        match self {
            Self::Cadastre => ("Cadastre", env!("CARGO_PKG_VERSION")),
            Self::CadastreAlone => (
                "`cadastre-ipam` with host-local's configuration",
                env!("CARGO_PKG_VERSION"),
            ),
            Self::HostLocal => ("host-local", assets::CNI_PLUGINS),
            Self::Whereabouts => ("whereabouts", assets::WHEREABOUTS),
            Self::Calico => ("Calico IPAM", assets::CALICO),
        }
    }
}

struct Report {
    adds: usize,
    duplicates: usize,
    lost: usize,
    capacity: usize,
    median: Duration,
    slow: Duration,
}

/// A node, and what a program needs besides its plugin.
struct Torture {
    peer: Peer,
    network: Network,
    agent: Option<NodeAgent>,
    balancer: Option<Balancer>,
    controller: Option<Daemon>,
    cluster: Option<ControlPlane>,
    folder: TempDir,
}

impl Torture {
    async fn start(peer: Peer) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let netns = folder.path().join("netns");
        File::create(&netns)?;
        let mut this = Self {
            peer,
            network: Network {
                plugin: PathBuf::new(),
                ipam: Value::Null,
                netns,
                with_pods: matches!(peer, Peer::Whereabouts | Peer::Calico),
                with_checks: false,
                kills: Kills::default(),
            },
            agent: None,
            balancer: None,
            controller: None,
            cluster: None,
            folder,
        };
        let local = json!({
            "dataDir": this.folder.path().join("networks"), "ranges": [[{"subnet": RANGE}]],
        });
        match peer {
            Peer::Cadastre => this.start_agent().await?,
            Peer::CadastreAlone => this.plugin(&daemon::plugin()?, "cadastre-ipam", local),
            Peer::HostLocal => this.plugin(&assets::find(Program::HostLocal)?, "host-local", local),
            Peer::Whereabouts => this.prepare_whereabouts().await?,
            Peer::Calico => this.prepare_calico().await?,
        }
        Ok(this)
    }

    fn plugin(&mut self, path: &Path, name: &str, mut ipam: Value) {
        ipam["type"] = Value::from(name);
        path.clone_into(&mut self.network.plugin);
        self.network.ipam = ipam;
    }

    async fn start_agent(&mut self) -> Result<()> {
        let (control_plane, fixtures) = cluster::with_crds(Options::default()).await?;
        let mut controller = cluster::start_controller(&control_plane, ADMIN, &[])?;
        controller.wait_ready(LIMIT).await?;
        let pool = json!({"ipv4": {"cidrs": [RANGE], "blockSize": 28}, "cooldownSeconds": 0});
        fixtures.block_pool("node", pool).await?;
        fixtures.node("node", "node-1").await?;
        let balancer = Balancer::start(vec![control_plane.address()])?;
        let kubeconfig = control_plane.kubeconfig_through(ADMIN, balancer.address())?;
        let mut agent = NodeAgent::new(&control_plane, ADMIN, "node-1", &["--add-wait", "1"])?;
        agent.env = vec![("KUBECONFIG".to_owned(), kubeconfig.display().to_string())];
        agent.start()?;
        agent.running()?.wait_ready(LIMIT).await?;
        let ipam = json!({"socket": agent.plugin_socket(), "store": agent.store()});
        self.plugin(&daemon::plugin()?, "cadastre-ipam", ipam);
        self.agent = Some(agent);
        self.balancer = Some(balancer);
        self.controller = Some(controller);
        self.cluster = Some(control_plane);
        Ok(())
    }

    async fn prepare_whereabouts(&mut self) -> Result<()> {
        let control_plane = ControlPlane::start(Options::default()).await?;
        install(&control_plane, &assets::whereabouts_crds()?).await?;
        let balancer = Balancer::start(vec![control_plane.address()])?;
        let kubeconfig = control_plane.kubeconfig_through(ADMIN, balancer.address())?;
        // As whereabouts' own installation does, the kubeconfig is named in a file of its own.
        let (file, log) = (
            self.folder.path().join("conf"),
            self.folder.path().join("log"),
        );
        let settings = json!({
            "datastore": "kubernetes", "kubernetes": {"kubeconfig": kubeconfig},
            "log_file": log, "log_level": "error",
        });
        std::fs::write(&file, settings.to_string())?;
        let ipam = json!({"range": RANGE, "configuration_path": file});
        self.plugin(&assets::find(Program::Whereabouts)?, "whereabouts", ipam);
        self.balancer = Some(balancer);
        self.cluster = Some(control_plane);
        Ok(())
    }

    async fn prepare_calico(&mut self) -> Result<()> {
        let control_plane = ControlPlane::start(Options::default()).await?;
        install(&control_plane, &assets::calico_ipam_crds()?).await?;
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}});
        let pool = json!({
            "apiVersion": "crd.projectcalico.org/v1", "kind": "IPPool", "metadata": {"name": "node"},
            "spec": {"cidr": RANGE, "blockSize": 28, "nodeSelector": "all()"},
        });
        let both = json!({"apiVersion": "v1", "kind": "List", "items": [node, pool]});
        create(&control_plane, &both).await?;
        let balancer = Balancer::start(vec![control_plane.address()])?;
        let kubeconfig = control_plane.kubeconfig_through(ADMIN, balancer.address())?;
        // As the configuration that Calico installs, but the lock is in a folder of this run.
        self.network.plugin = assets::find(Program::CalicoIpam)?;
        self.network.ipam = json!({
            "type": "calico", "nodename": "node-1", "datastore_type": "kubernetes",
            "log_level": "error", "ipam_lock_file": self.folder.path().join("lock"),
            "kubernetes": {"kubeconfig": kubeconfig}, "ipam": {"type": "calico-ipam"},
        });
        self.balancer = Some(balancer);
        self.cluster = Some(control_plane);
        Ok(())
    }

    async fn run(mut self, seed: u64) -> Result<Report> {
        let (capacity, alone) = self.fill("before").await?;
        ensure!(capacity > 0, "{:?} assigns no address at all", self.peer);
        let within = &mut self.network.kills.within;
        *within = alone.max(*within);
        let callers = Callers::start(&self.network, CALLERS, seed, DURATION);
        let end = Instant::now() + DURATION;
        let mut random = Rng::with_seed(seed);
        while Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(random.u64(..1000))).await;
            self.disturb(&mut random).await?;
        }
        let record = tokio::task::spawn_blocking(|| callers.join()).await??;
        // Callers have deleted all other containers.
        let containers = record.in_use.iter().map(|(container, _)| container.clone());
        self.delete_all(containers).await?;
        let (after, _) = self.fill("after").await?;
        let succeeded = |it: &&Call| (it.verb, it.outcome) == (Verb::Add, Outcome::Ok);
        let mut times: Vec<u64> = record
            .calls
            .iter()
            .filter(succeeded)
            .map(|it| it.end - it.start)
            .collect();
        times.sort_unstable();
        let percentile = |percent: usize| {
            let at = times.len() * percent / 100;
            Duration::from_nanos(times.get(at).copied().unwrap_or_default())
        };
        Ok(Report {
            adds: times.len(),
            duplicates: shared_addresses(&record.calls),
            lost: capacity.saturating_sub(after),
            capacity,
            median: percentile(50),
            slow: percentile(99),
        })
    }

    /// Starts containers until two of them get no address, and deletes them all. Returns how many got addresses, and
    /// the average time of the ADDs that succeeded.
    async fn fill(&self, when: &'static str) -> Result<(usize, Duration)> {
        let network = self.network.clone();
        let filling = tokio::task::spawn_blocking(move || -> Result<_> {
            let (mut containers, mut failed, mut time) = (Vec::new(), 0, Duration::ZERO);
            while failed < 2 {
                let container = format!("{when}-{}", containers.len());
                let start = Instant::now();
                match network.call(Verb::Add, &container, "")?.0 {
                    Outcome::Ok => time += start.elapsed(),
                    _ => failed += 1,
                }
                containers.push(container);
            }
            Ok((containers.len() - failed, time, containers))
        });
        let (count, time, containers) = filling.await??;
        let alone = time / u32::try_from(count)?.max(1);
        self.delete_all(containers).await?;
        progress(&format!(
            "{:?}: {count} addresses free, {} ms for an ADD",
            self.peer,
            alone.as_millis()
        ))?;
        Ok((count, alone))
    }

    async fn delete_all(&self, containers: impl IntoIterator<Item = String>) -> Result<()> {
        let network = self.network.clone();
        let containers: Vec<String> = containers.into_iter().collect();
        tokio::task::spawn_blocking(move || {
            for container in containers {
                let end = Instant::now() + LIMIT;
                while network.call(Verb::Del, &container, "")?.0 != Outcome::Ok {
                    ensure!(Instant::now() < end, "{container} cannot be deleted");
                }
            }
            Ok(())
        })
        .await?
    }

    /// Causes a fault, waits, and ends the fault.
    async fn disturb(&mut self, random: &mut Rng) -> Result<()> {
        let time = Duration::from_millis(random.u64(..2000));
        if let Some(balancer) = &self.balancer
            && random.bool()
        {
            let (answers, requests) = if random.bool() { (30, 0) } else { (0, 30) };
            balancer.change(|it| (it.lost_answers, it.lost_requests) = (answers, requests));
            tokio::time::sleep(time).await;
            balancer.change(|it| (it.lost_answers, it.lost_requests) = (0, 0));
            balancer.cause(Incident::Reset);
        } else if let Some(agent) = &mut self.agent {
            if random.bool() {
                agent.running()?.signal(Signal::STOP)?;
                tokio::time::sleep(time).await;
                agent.running()?.signal(Signal::CONT)?;
            } else {
                agent.running()?.process().kill()?;
                tokio::time::sleep(time).await;
                agent.start()?;
            }
        }
        Ok(())
    }
}

/// Counts the addresses that two containers had at the same time: from the end of an ADD to the start of the next DEL.
fn shared_addresses(calls: &[Call]) -> usize {
    let mut dels: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for it in calls.iter().filter(|it| it.verb == Verb::Del) {
        dels.entry(&it.container).or_default().push(it.start);
    }
    let mut held: BTreeMap<&str, Vec<(u64, u64, &str)>> = BTreeMap::new();
    for it in calls {
        if (it.verb, it.outcome) == (Verb::Add, Outcome::Ok) {
            let later = dels.get(it.container.as_str()).into_iter().flatten();
            let until = later.copied().filter(|at| *at > it.end).min();
            let until = until.unwrap_or(u64::MAX);
            let periods = held.entry(&it.address).or_default();
            periods.push((it.end, until, &it.container));
        }
    }
    let is_shared = |periods: &mut Vec<(u64, u64, &str)>| {
        periods.sort_unstable();
        let mut until = BTreeMap::new();
        periods.iter().any(|(from, end, container)| {
            let others = until.iter().filter(|(it, _)| *it != container);
            let shared = others.map(|(_, end)| *end).any(|it: u64| it > *from);
            let mine = until.entry(*container).or_insert(0);
            *mine = (*mine).max(*end);
            shared
        })
    };
    held.values_mut()
        .filter_map(|it| is_shared(it).then_some(()))
        .count()
}
