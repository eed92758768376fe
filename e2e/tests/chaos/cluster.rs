//! The control plane, the controllers, and the way of each client to the API servers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use cadastre_api::IPPool;
use cadastre_e2e::balancer::{Conditions, Incident};
use cadastre_e2e::daemon::DaemonOptions;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::wait::until;
use cadastre_e2e::{
    Balancer, Daemon, Fixtures, Options, ReplicatedControlPlane, Revisions, crds, fixtures, lease,
};
use kube::api::PostParams;
use serde_json::{Value, json};

pub const CONTROLLER: &str = "system:serviceaccount:kube-system:cadastre-controller";
pub const AGENT: &str = "system:serviceaccount:kube-system:cadastre-agent";
pub const SERVERS: usize = 3;
/// The pool of blocks, and the pool of podCIDRs.
pub const BLOCKS: &str = "blocks";
pub const CIDRS: &str = "cidrs";
const CONTROLLERS: [&str; 3] = ["a", "b", "c"];
/// How long the API servers may take to say who leads.
const ANSWER: Duration = Duration::from_secs(5);
/// Where Debian's package `libfaketime` installs its library.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

pub struct Cluster {
    pub controllers: Vec<Seat>,
    pub wires: Arc<Wires>,
    /// The test's own way to the API servers, which avoids servers that are known to be down
    pub calm: Balancer,
    pub fixtures: Fixtures,
    pub revisions: Revisions,
    holders: lease::Holders,
    pub plane: ReplicatedControlPlane,
}

/// A controller with its kubeconfig.
pub struct Seat {
    pub name: &'static str,
    pub daemon: Daemon,
    folder: PathBuf,
    kubeconfig: PathBuf,
    env: Vec<(String, String)>,
}

impl Seat {
    fn start(folder: &Path, kubeconfig: PathBuf, name: &'static str) -> Result<Self> {
        let env = clock(folder, name)?;
        let daemon = start(folder, &kubeconfig, name, &env)?;
        let folder = folder.to_owned();
        Ok(Self {
            name,
            daemon,
            folder,
            kubeconfig,
            env,
        })
    }

    /// Kills the controller and starts another one in its place.
    pub fn restart(&mut self) -> Result<()> {
        self.daemon.process().kill()?;
        self.daemon = start(&self.folder, &self.kubeconfig, self.name, &self.env)?;
        Ok(())
    }
}

fn start(folder: &Path, kubeconfig: &Path, name: &str, env: &[(String, String)]) -> Result<Daemon> {
    let options = DaemonOptions {
        name: name.to_owned(),
        args: ["controller", "--identity", name].map(str::to_owned).into(),
        env: env.to_vec(),
    };
    Daemon::start(folder, kubeconfig, &options)
}

/// Returns the environment with which a process takes its wall clock from a file, if libfaketime is installed.
pub fn clock(folder: &Path, name: &str) -> Result<Vec<(String, String)>> {
    if !has_clocks() {
        return Ok(Vec::new());
    }
    set_clock(folder, name, 0)?;
    let file = clock_file(folder, name).display().to_string();
    let env = [
        ("LD_PRELOAD", FAKETIME),
        ("FAKETIME_TIMESTAMP_FILE", &file),
        ("FAKETIME_CACHE_DURATION", "1"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("DONT_FAKE_MONOTONIC", "1"),
    ];
    Ok(env
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into())
}

pub fn has_clocks() -> bool {
    Path::new(FAKETIME).exists()
}

/// Sets by how many seconds the wall clock of a process differs from the true time.
pub fn set_clock(folder: &Path, name: &str, seconds: i64) -> Result<()> {
    let file = clock_file(folder, name);
    let text = format!("{seconds:+}\n");
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
}

fn clock_file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("clock-{name}"))
}

/// The balancers of all controllers and agents. They have the same conditions.
pub struct Wires {
    conditions: Mutex<Conditions>,
    balancers: Mutex<BTreeMap<String, Arc<Balancer>>>,
}

impl Wires {
    fn new(servers: Vec<SocketAddr>) -> Self {
        Self {
            conditions: Mutex::new(Conditions {
                servers,
                ..Conditions::default()
            }),
            balancers: Mutex::default(),
        }
    }

    /// Adds the balancer of a client.
    pub fn add(&self, name: &str) -> Result<Arc<Balancer>> {
        let balancer = Arc::new(Balancer::start(Vec::new())?);
        let mut balancers = lock(&self.balancers);
        let present = lock(&self.conditions).clone();
        balancer.change(|it| *it = present);
        balancers.insert(name.to_owned(), Arc::clone(&balancer));
        Ok(balancer)
    }

    /// Changes the conditions of all balancers.
    pub fn change(&self, change: impl FnOnce(&mut Conditions)) {
        let balancers = lock(&self.balancers);
        let mut conditions = lock(&self.conditions);
        change(&mut conditions);
        for balancer in balancers.values() {
            balancer.change(|it| it.clone_from(&conditions));
        }
    }

    /// Does something to all connections of some clients.
    pub fn cause(&self, incident: Incident, mut is_chosen: impl FnMut(&str) -> bool) {
        let balancers = lock(&self.balancers);
        let chosen = balancers.iter().filter(|(name, _)| is_chosen(name));
        chosen.for_each(|(_, it)| it.cause(incident));
    }
}

impl Cluster {
    pub async fn start() -> Result<Self> {
        let options = Options {
            users: [CONTROLLER, AGENT]
                .map(|it| User::new(it, &["system:serviceaccounts"]))
                .into(),
            ..Options::default()
        };
        let plane = ReplicatedControlPlane::start(SERVERS, options).await?;
        let revisions = Revisions::start(plane.gateways()?);
        let calm = Balancer::start(plane.addresses())?;
        let client = plane.client(&calm).await?;
        crds::install(&client).await?;
        for file in ["controller", "agent"] {
            let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/rbac");
            plane.apply(&calm, &format!("{root}/{file}.yaml")).await?;
        }
        let fixtures = Fixtures::new(client.clone());
        let range = |cidr: &str, size: u8| json!({"cidrs": [cidr], "blockSize": size});
        let blocks = json!({
            "allocationMode": "Blocks", "quarantineSeconds": 5, "cooldownSeconds": 3,
            "ipv4": range("10.64.0.0/20", 28), "ipv6": range("fd00:64::/112", 124),
        });
        let cidrs = json!({
            "allocationMode": "NodeCIDR", "quarantineSeconds": 5,
            "ipv4": range("10.65.0.0/20", 24), "ipv6": range("fd00:65::/60", 64),
        });
        pool(&fixtures, BLOCKS, blocks).await?;
        pool(&fixtures, CIDRS, cidrs).await?;
        let wires = Arc::new(Wires::new(plane.addresses()));
        let mut controllers = Vec::new();
        for name in CONTROLLERS {
            let balancer = wires.add(name)?;
            let kubeconfig = plane.access(CONTROLLER)?.through(&balancer)?;
            controllers.push(Seat::start(plane.folder(), kubeconfig, name)?);
        }
        Ok(Self {
            controllers,
            wires,
            calm,
            fixtures,
            revisions,
            holders: lease::Holders::watch(client),
            plane,
        })
    }

    /// Chooses the servers to which new connections go.
    pub fn serve_by(&self, servers: &[SocketAddr]) {
        self.wires.change(|it| it.servers = servers.to_vec());
        if !servers.is_empty() {
            self.calm.change(|it| it.servers = servers.to_vec());
        }
    }

    /// The controller that leads.
    pub async fn leader(&self) -> Option<usize> {
        let holder = tokio::time::timeout(ANSWER, lease::holder(&self.fixtures.client));
        let holder = holder.await.ok()?.ok()??;
        let identity = lease::identity(&holder);
        self.controllers.iter().position(|it| it.name == identity)
    }

    /// How many leaders there were so far.
    pub fn terms(&self) -> usize {
        let seen = self.holders.seen();
        seen.iter().filter(|(_, holder)| holder.is_some()).count()
    }
}

/// Whether an address is of the pool [`BLOCKS`].
pub fn is_of_blocks(address: &str) -> bool {
    address.starts_with("10.64.") || address.starts_with("fd00:64::")
}

async fn pool(fixtures: &Fixtures, name: &str, spec: Value) -> Result<()> {
    let pool = IPPool::new(name, serde_json::from_value(spec)?);
    until("the pool can be created", fixtures::LIMIT, async || {
        let params = PostParams::default();
        Ok(Some(fixtures.pools.create(&params, &pool).await?))
    })
    .await?;
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
