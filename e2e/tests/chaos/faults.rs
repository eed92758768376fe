//! The faults: how each begins and ends.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadastre_e2e::Kubelets;
use cadastre_e2e::balancer::{Conditions, Incident};
use cadastre_e2e::etcd::Gateway;
use cadastre_e2e::wait::until;
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use rustix::process::Signal;
use serde_json::json;

use crate::cluster::{AGENT, CONTROLLER, Cluster, SERVERS, has_clocks, set_clock};
use crate::rng::Rng;

/// The maximum time until all servers run again and answer.
const HEALED: Duration = Duration::from_secs(180);
/// The maximum number of faults that act at the same time.
const AT_ONCE: u64 = 3;
/// How long a load balancer takes to notice that a server does not answer.
const HEALTH_CHECK: Duration = Duration::from_secs(5);
/// Incidents are repeated with this interval.
const AGAIN: Duration = Duration::from_millis(1500);
/// How long a member of etcd may take to answer.
const MEMBER: Duration = Duration::from_secs(2);
const THROTTLE: &str = "chaos";

macro_rules! faults {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// A fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Fault {
            $($(#[doc = $doc])* $name,)*
        }

        const ALL: &[(Fault, &str)] = &[$((Fault::$name, stringify!($name)),)*];
    };
}

faults! {
    /// An API server stands still. Its clients are sent to the others after a while, and come back at the end, when
    /// its cache is still behind.
    ServerPaused,
    /// An API server is killed, and started again at the end.
    ServerKilled,
    /// New connections go to one API server after the other, and existing connections break.
    FailOver,
    /// The leader of etcd is killed.
    StoreLeaderKilled,
    /// A member of etcd stands still.
    StorePaused,
    /// A member of etcd is cut off from the others. Clients of its API server are not sent elsewhere.
    StoreIsolated,
    /// Two of three members of etcd are killed, so nothing can be written, and reads fail.
    StoreWithoutQuorum,
    /// Existing connections deliver nothing any more, and etcd forgets all earlier revisions. API servers that start
    /// later cannot resume any watch.
    SilentAndCompacted,
    /// etcd has no space and refuses all writes.
    NoSpace,
    /// No API server can be reached.
    Unreachable,
    /// Everything arrives up to 10 s later, in both directions.
    Slow,
    /// 30 % of the requests do not arrive.
    RequestsLost,
    /// 30 % of the requests arrive, but their answers do not.
    AnswersLost,
    /// Connections break again and again.
    Resets,
    /// What servers send ends again and again, while clients can still send.
    HalfClosed,
    /// Connections fall silent again and again, without an end.
    Silences,
    /// The API servers refuse all requests of controllers and agents with the status 429.
    Throttled,
    /// The wall clocks of some controllers and agents are wrong by up to five minutes.
    ClocksStepped,
    /// The API servers have a new certificate, and connections break.
    CertificateRenewed,
    /// The leading controller is killed.
    LeaderKilled,
    /// The leading controller stands still.
    LeaderPaused,
    /// All controllers are killed.
    ControllersKilled,
    /// An agent is killed.
    AgentKilled,
    /// An agent stands still.
    AgentPaused,
}

impl Fault {
    pub fn name(self) -> &'static str {
        ALL.iter().find(|(it, _)| *it == self).map_or("", |it| it.1)
    }

    /// Whether connections stay open after the fault although nothing arrives over them any more.
    pub fn leaves_silent_connections(self) -> bool {
        matches!(self, Fault::SilentAndCompacted | Fault::Silences)
    }

    /// Chooses the faults of a round: those in `only` if any are named, which are separated by commas.
    pub fn choose(random: &mut Rng, only: Option<&str>) -> Result<Vec<Self>> {
        if let Some(only) = only {
            let named = |name: &str| ALL.iter().find(|it| it.1 == name).map(|it| it.0);
            let unknown = |name: &str| format!("there is no fault {name:?}, only {ALL:?}");
            let chosen = only
                .split(',')
                .map(|it| named(it).with_context(|| unknown(it)));
            return chosen.collect();
        }
        let is_possible = |it: &Fault| *it != Fault::ClocksStepped || has_clocks();
        let possible: Vec<Fault> = ALL.iter().map(|it| it.0).filter(is_possible).collect();
        let count = random.between(1, AT_ONCE);
        let mut chosen: Vec<_> = (0..count).map(|_| *random.pick(&possible)).collect();
        chosen.sort_unstable();
        chosen.dedup();
        Ok(chosen)
    }
}

/// What has to be undone at the end of a round.
#[derive(Default)]
struct Open {
    paused_servers: Vec<usize>,
    paused_members: Vec<usize>,
    paused_controllers: Vec<usize>,
    paused_agents: Vec<String>,
    alarms: Vec<u64>,
    is_throttled: bool,
    clocks: Vec<String>,
    /// Incidents that are repeated while the faults act
    repeated: Vec<Incident>,
    fails_over: bool,
}

/// Causes the faults, waits until `active` has passed, and heals everything.
pub async fn cause(
    cluster: &mut Cluster,
    kubelets: &Kubelets,
    chosen: &[Fault],
    active: Duration,
    random: &mut Rng,
) -> Result<()> {
    let mut open = Open::default();
    for fault in chosen {
        begin(cluster, kubelets, *fault, &mut open, random)
            .await
            .with_context(|| format!("cannot cause {fault:?}"))?;
    }
    let begun = Instant::now();
    while begun.elapsed() < active {
        tokio::time::sleep(AGAIN.min(active)).await;
        for incident in &open.repeated {
            let share = random.between(20, 100);
            let mut lot = random.clone();
            random.next();
            cluster.wires.cause(*incident, |_| lot.below(100) < share);
        }
        if open.fails_over {
            let one = *random.pick(&cluster.plane.addresses());
            cluster.serve_by(&[one]);
            cluster.wires.cause(Incident::Reset, |_| true);
        }
        if begun.elapsed() > HEALTH_CHECK && !open.paused_servers.is_empty() {
            let all = cluster.plane.addresses().into_iter().enumerate();
            let healthy = all.filter(|(i, _)| !open.paused_servers.contains(i));
            let healthy: Vec<_> = healthy.map(|it| it.1).collect();
            if !chosen.contains(&Fault::Unreachable) && !healthy.is_empty() {
                cluster.serve_by(&healthy);
            }
        }
    }
    heal(cluster, kubelets, open).await.context("cannot heal")
}

async fn begin(
    cluster: &mut Cluster,
    kubelets: &Kubelets,
    fault: Fault,
    open: &mut Open,
    random: &mut Rng,
) -> Result<()> {
    let one = random.index(SERVERS);
    let nodes = kubelets.nodes();
    let node = random.pick(&nodes).as_str();
    match fault {
        Fault::ServerPaused => {
            cluster.plane.server(one)?.process()?.signal(Signal::STOP)?;
            open.paused_servers.push(one);
        }
        Fault::ServerKilled => cluster.plane.kill_server(one)?,
        Fault::FailOver => open.fails_over = true,
        Fault::StoreLeaderKilled => {
            // A fault that began before may leave etcd without a leader.
            if let Ok(leader) = cluster.plane.leader().await {
                cluster.plane.kill_member(leader)?;
            }
        }
        Fault::StorePaused => {
            if let Ok(process) = cluster.plane.member(one)?.process() {
                process.signal(Signal::STOP)?;
                open.paused_members.push(one);
            }
        }
        Fault::StoreIsolated => cluster.plane.isolate(Some(one)),
        Fault::StoreWithoutQuorum => {
            cluster.plane.kill_member(one)?;
            cluster.plane.kill_member((one + 1) % SERVERS)?;
        }
        Fault::SilentAndCompacted => {
            cluster.wires.cause(Incident::Silence, |_| true);
            let revision = cluster.revisions.reached();
            any_member(cluster, async |it| it.compact(revision).await).await?;
        }
        Fault::NoSpace => {
            any_member(cluster, async |it| {
                let member = it.status().await?.member;
                // The alarm has to be ended even if the answer does not come in time.
                open.alarms.push(member);
                it.no_space("ACTIVATE", member).await
            })
            .await?;
        }
        Fault::Unreachable => {
            cluster.wires.change(|it| it.servers.clear());
            cluster.wires.cause(Incident::Reset, |_| true);
        }
        Fault::Slow => {
            let latency = Duration::from_millis(*random.pick(&[200, 1_000, 3_000, 10_000]));
            cluster.wires.change(|it| it.latency = latency);
        }
        Fault::RequestsLost => cluster.wires.change(|it| it.lost_requests = 30),
        Fault::AnswersLost => cluster.wires.change(|it| it.lost_answers = 30),
        Fault::Resets => open.repeated.push(Incident::Reset),
        Fault::HalfClosed => open.repeated.push(Incident::HalfClose),
        Fault::Silences => open.repeated.push(Incident::Silence),
        Fault::Throttled => {
            // Without an API that works, nobody needs to be throttled.
            open.is_throttled = true;
            let _ = tokio::time::timeout(Duration::from_secs(10), throttle(cluster)).await;
        }
        Fault::ClocksStepped => {
            let folder = cluster.plane.folder();
            let controllers = cluster.controllers.iter().map(|it| it.name.to_owned());
            for name in controllers.chain(nodes.iter().cloned()) {
                if random.one_in(2) {
                    let off = i64::try_from(random.between(1, 300))?;
                    let off = if random.one_in(2) { off } else { -off };
                    set_clock(folder, &name, off)?;
                    open.clocks.push(name);
                }
            }
        }
        Fault::CertificateRenewed => {
            cluster.plane.renew_certificate()?;
            cluster.wires.cause(Incident::Reset, |_| true);
        }
        Fault::LeaderKilled => {
            let leader = cluster.leader().await.unwrap_or(one);
            cluster.controllers[leader].restart()?;
        }
        Fault::LeaderPaused => {
            let leader = cluster.leader().await.unwrap_or(one);
            cluster.controllers[leader].daemon.signal(Signal::STOP)?;
            open.paused_controllers.push(leader);
        }
        Fault::ControllersKilled => {
            for controller in &mut cluster.controllers {
                controller.restart()?;
            }
        }
        // The machine may have left meanwhile, so errors are ignored.
        Fault::AgentKilled => drop(kubelets.agents().restart(node)),
        Fault::AgentPaused => {
            if kubelets.agents().signal(node, Signal::STOP).is_ok() {
                open.paused_agents.push(node.to_owned());
            }
        }
    }
    Ok(())
}

/// Sends a request to one member of etcd after the other, until one has answered it. Returns whether one has: with some
/// faults, none answers.
async fn any_member(
    cluster: &Cluster,
    mut request: impl AsyncFnMut(&Gateway) -> Result<()>,
) -> Result<bool> {
    for gateway in cluster.plane.gateways()? {
        if let Ok(Ok(())) = tokio::time::timeout(MEMBER, request(&gateway)).await {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes the API servers refuse all requests of controllers and agents.
async fn throttle(cluster: &Cluster) -> Result<()> {
    let client = &cluster.fixtures.client;
    let level = serde_json::from_value(json!({
        "metadata": {"name": THROTTLE},
        "spec": {"type": "Limited", "limited": {
            "nominalConcurrencyShares": 0, "borrowingLimitPercent": 0,
            "limitResponse": {"type": "Reject"},
        }},
    }))?;
    let users = [CONTROLLER, AGENT].map(|it| json!({"kind": "User", "user": {"name": it}}));
    let resources = json!({
        "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true, "namespaces": ["*"],
    });
    let schema = serde_json::from_value(json!({
        "metadata": {"name": THROTTLE},
        "spec": {
            "priorityLevelConfiguration": {"name": THROTTLE}, "matchingPrecedence": 1,
            "rules": [{"subjects": users, "resourceRules": [resources]}],
        },
    }))?;
    let params = PostParams::default();
    Api::<PriorityLevelConfiguration>::all(client.clone())
        .create(&params, &level)
        .await?;
    Api::<FlowSchema>::all(client.clone())
        .create(&params, &schema)
        .await?;
    Ok(())
}

async fn end_throttle(cluster: &Cluster) -> Result<()> {
    let (client, params) = (&cluster.fixtures.client, DeleteParams::default());
    let schemas = Api::<FlowSchema>::all(client.clone());
    let levels = Api::<PriorityLevelConfiguration>::all(client.clone());
    if schemas.get_opt(THROTTLE).await?.is_some() {
        schemas.delete(THROTTLE, &params).await?;
    }
    if levels.get_opt(THROTTLE).await?.is_some() {
        levels.delete(THROTTLE, &params).await?;
    }
    Ok(())
}

/// Ends all faults, and waits until all servers answer.
async fn heal(cluster: &mut Cluster, kubelets: &Kubelets, open: Open) -> Result<()> {
    for i in open.paused_members {
        if let Ok(process) = cluster.plane.member(i)?.process() {
            process.signal(Signal::CONT)?;
        }
    }
    for i in open.paused_servers {
        if let Ok(server) = cluster.plane.server(i)?.process() {
            server.signal(Signal::CONT)?;
        }
    }
    cluster.plane.isolate(None);
    for i in 0..SERVERS {
        cluster.plane.start_member(i)?;
        cluster.plane.start_server(i)?;
    }
    for member in open.alarms {
        until("the alarm ends", HEALED, async || {
            let end = async |it: &Gateway| it.no_space("DEACTIVATE", member).await;
            Ok(any_member(cluster, end).await?.then_some(()))
        })
        .await?;
    }
    let all = cluster.plane.addresses();
    cluster.wires.change(|it| {
        *it = Conditions {
            servers: all.clone(),
            ..Conditions::default()
        }
    });
    for name in open.clocks {
        set_clock(cluster.plane.folder(), &name, 0)?;
    }
    for i in open.paused_controllers {
        cluster.controllers[i].daemon.signal(Signal::CONT)?;
    }
    for node in open.paused_agents {
        let _ = kubelets.agents().signal(&node, Signal::CONT);
    }
    for i in 0..SERVERS {
        cluster.plane.server_ready(i).await?;
    }
    cluster.calm.change(|it| it.servers.clone_from(&all));
    if open.is_throttled {
        until("throttling ends", HEALED, async || {
            Ok(Some(end_throttle(cluster).await?))
        })
        .await?;
    }
    Ok(())
}
