//! The main loop around the state machine. The main loop passes events to the state machine and carries out the effects
//! that the state machine returns. The main loop makes no decisions itself.
//!
//! One task owns the [`AgentMachine`]. Slow work (the store, the runtime, the API server) runs in other tasks, whose
//! results come back as events.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use kube::Api;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::carry::Carrier;
use super::machine::{AgentEvent, AgentMachine, MachineSettings};
use super::pods;
use super::routes::{self, RoutesReport};
use super::seen;
use super::service::{PODS, SUBNETS};
use cadastre_api::watched::protobuf;
use cadastre_api::{NodeAddressesLite, NodeLite, NodeRoutesLite, NodeSubnetLite, PodLite};
use cadastre_daemon::encoding::Encoding;
use cadastre_daemon::watch::{Pauses, SilenceTimeouts, WatchSource, follow};
use cadastre_node::clock;

pub use super::carry::AgentParts;

/// The capacity of the queue of watch events. While the queue is full, the watches pause.
const BACKLOG: usize = 256;
/// The first and the longest pause before a watch retries after an error. Jitter is added.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(20));
/// The maximum number of objects in a page of a list. Pages are small because a whole page is in memory at once.
const PAGE: u32 = 50;
/// The maximum number of NodeRoutes in a page of a list. The objects are small, and there is one for each node.
const ROUTES_PAGE: u32 = 500;

/// Runs the loop until the stop token is cancelled. Then waits until all questions and writes under way are answered.
/// Returns an error only if an administrator must resolve the problem.
pub async fn run(settings: MachineSettings, parts: AgentParts) -> anyhow::Result<()> {
    let (sender, mut events) = mpsc::channel(BACKLOG);
    let mut watches = follow_all(&settings.node, &parts, sender);
    let (serves, served) = watch::channel(None);
    let mut reports = start_routes(&settings.node, &parts, served, &mut watches);
    let (service, stop) = (Arc::clone(&parts.service), parts.stop.clone());
    let mut carrier = Carrier::new(settings.node.clone(), parts);
    let mut machine = AgentMachine::new(settings, random(), &clock::now());
    let report = reports.borrow_and_update().clone();
    machine.on(AgentEvent::Routes(report), &clock::now());
    loop {
        let wake = turn(&mut machine, &mut carrier)?;
        serves.send_if_modified(|is| std::mem::replace(is, machine.serves_pods()) != *is);
        let pause = wake.saturating_sub(clock::since_boot());
        tokio::select! {
            Some(event) = events.recv() => {
                machine.on(event, &clock::now());
                // All events that have arrived are recorded before the next turn, so that the turn takes all of them
                // into account.
                while let Ok(event) = events.try_recv() {
                    machine.on(event, &clock::now());
                }
            }
            Some(answer) = carrier.answer() => machine.on(answer?, &clock::now()),
            report = routes::next_report(&mut reports) => {
                machine.on(AgentEvent::Routes(report), &clock::now());
            }
            () = service.changed.notified() => machine.on(AgentEvent::Changed, &clock::now()),
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => break,
        }
    }
    while machine.is_busy() {
        match carrier.answer().await {
            Some(answer) => machine.on(answer?, &clock::now()),
            None => break,
        }
    }
    Ok(())
}

/// Returns a random seed for jitter.
fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// Runs turns of the machine until no effect has an immediate answer. Returns the time since boot at which the next
/// turn is due.
fn turn(machine: &mut AgentMachine, carrier: &mut Carrier) -> anyhow::Result<Duration> {
    loop {
        let now = clock::now();
        let mut effects = Vec::new();
        let wake = machine.turn(carrier.service_view(now.since_boot), &now, &mut effects);
        let mut is_answered = false;
        for effect in effects {
            if let Some(answer) = carrier.begin(effect)? {
                machine.on(answer, &clock::now());
                is_answered = true;
            }
        }
        if !is_answered {
            return Ok(wake);
        }
    }
}

/// Starts the watches of the objects of this node.
fn follow_all(node: &str, parts: &AgentParts, out: mpsc::Sender<AgentEvent>) -> JoinSet<()> {
    let by_name = format!("metadata.name={node}");
    let of_node = format!("spec.nodeName={node}");
    let mut watches = JoinSet::new();
    let nodes = WatchSource {
        encoding: Encoding::Protobuf(protobuf::node),
        ..source::<NodeLite>("nodes", &by_name, parts)
    };
    let pods = WatchSource {
        encoding: Encoding::Protobuf(protobuf::pod),
        ..source::<PodLite>(PODS, &of_node, parts)
    };
    watches.spawn(follow(nodes, out.clone(), seen::node_uid, |step| {
        Some(AgentEvent::Node(step))
    }));
    watches.spawn(follow(
        source::<NodeSubnetLite>(SUBNETS, &by_name, parts),
        out.clone(),
        seen::subnet,
        |step| Some(AgentEvent::Subnet(step)),
    ));
    watches.spawn(follow(
        source::<NodeAddressesLite>("nodeaddresses", &by_name, parts),
        out.clone(),
        seen::addresses,
        |step| Some(AgentEvent::Addresses(step)),
    ));
    watches.spawn(follow(pods, out, pods::read, |step| {
        Some(AgentEvent::Pod(step))
    }));
    watches
}

/// Starts the task that adds or removes the routes to the pods of other nodes. Returns what the task reports.
fn start_routes(
    node: &str,
    parts: &AgentParts,
    serves: watch::Receiver<Option<bool>>,
    tasks: &mut JoinSet<()>,
) -> watch::Receiver<RoutesReport> {
    if !parts.direct_routes {
        tasks.spawn(routes::remove());
        return watch::Sender::new(RoutesReport::Off).subscribe();
    }
    let (report, reports) = watch::channel(RoutesReport::Pending);
    let source = WatchSource {
        fields: None,
        page: Some(ROUTES_PAGE),
        ..source::<NodeRoutesLite>("noderoutes", "", parts)
    };
    let metrics = parts.metrics.clone();
    let node = node.to_owned();
    tasks.spawn(routes::run(node, source, serves, metrics, report));
    reports
}

/// Returns the source of a watch of the objects that the field selector `fields` selects. The API server has an index
/// for the fields that agents use.
fn source<K>(kind: &'static str, fields: &str, parts: &AgentParts) -> WatchSource<K>
where
    K: kube::Resource<DynamicType = ()>,
{
    WatchSource {
        kind,
        api: Api::all(parts.client.clone()),
        encoding: Encoding::Json,
        fields: Some(fields.to_owned()),
        labels: None,
        page: Some(PAGE),
        pauses: Pauses::new(PAUSE.0, PAUSE.1, random()),
        doubtful: true,
        patience: SilenceTimeouts::default(),
        heard: parts.readiness.last_heard(),
    }
}
