//! The process around the state machine. It passes watch events, answers and the time to the [`Controller`], and sends
//! the requests that the [`Controller`] returns. It makes no decisions.
//!
//! One task owns the [`Controller`]. Watches, answers and the elector reach that task through channels, so no locks are
//! needed. Each request runs in its own task with a timeout. The controller bounds the number of requests in flight.

use std::fmt::Debug;
use std::time::Duration;

use kube::{Api, Client};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use super::{Controller, ControllerEvent, ControllerSettings, Now};
use crate::cluster::convert;
use crate::cluster::lease::{Leadership, LeaseContent};
use crate::cluster::objects::FrrConfiguration;
use crate::cluster::readiness::{ControllerProgress, LeaderReadiness};
use crate::cluster::request::{OutgoingRequest, Rejection, RequestId, RequestOutcome};
use crate::cluster::writer::Writer;
use crate::telemetry::ControllerMetrics;
use cadastre_api::frr::MANAGED_BY;
use cadastre_api::watched::protobuf;
use cadastre_api::{FIELD_MANAGER, FRRConfigurationLite};
use cadastre_daemon::clock::Clock;
use cadastre_daemon::encoding::Encoding;
use cadastre_daemon::events::{self, EventNote};
use cadastre_daemon::watch::{
    FRR_CONFIGURATIONS, ObjectEvent, Pauses, SilenceTimeouts, WatchSource, WatchStep, follow,
};

/// Maximum number of watch events that wait for the controller. If so many events wait, the watches wait, too.
const BACKLOG: usize = 4096;

/// Log message about a list that shows an older state than this process has already seen in a list or watch event.
const PUT_BACK: &str = "a list shows an older state than was known: the API server was put back to an older state (a restore of etcd?); what this process knows is no longer there, so it ends and must be started anew (docs/backup.md)";

/// First and longest delay of a watch after an error, before jitter is added.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Maximum number of Kubernetes events that wait to be emitted. Further events are dropped.
const REPORT_BACKLOG: usize = 1024;

/// Interval at which metrics and readiness are updated. They are also updated when this process begins or stops to lead
/// or to allocate. A Lease write is no reason to update them: there can be fifty in a second, and the figures are
/// computed from the whole cluster.
const FIGURES_PAUSE: Duration = Duration::from_secs(2);

/// The parts of the process that [`run`] uses.
pub struct ControllerParts {
    /// Client for watches and for emitting events
    pub client: Client,
    /// Sends the controller's requests to the API server
    pub writer: Writer,
    /// Monotonic and wall clock
    pub clock: Clock,
    /// Whether this process leads, as the elector publishes it
    pub leadership: watch::Receiver<Leadership>,
    /// Passes the wanted content of the Lease to the elector
    pub want: watch::Sender<Option<LeaseContent>>,
    /// Metrics of the loops, of their requests, and of pools
    pub metrics: ControllerMetrics,
    /// Receives the controller's progress, from which `/readyz` is computed
    pub readiness: LeaderReadiness,
    /// How many objects the API server returns per page of a list. If `None`, it returns all objects at once
    pub page: Option<u32>,
}

/// Runs the controller until `stop` is true. After that, waits until no request is in flight and no write is
/// indeterminate, but not longer than `grace`. Returns whether the Lease may be handed over as clean. If a list shows
/// that the API server was restored to an older state, returns false at once.
pub async fn run(
    parts: ControllerParts,
    settings: ControllerSettings,
    stop: watch::Receiver<bool>,
    grace: Duration,
) -> bool {
    let (watched, events) = mpsc::channel(BACKLOG);
    let metrics = parts.metrics.clone();
    let notes = events::spawn(
        parts.client.clone(),
        FIELD_MANAGER,
        REPORT_BACKLOG,
        move || metrics.event_dropped(),
    );
    let frr_namespace = settings.frr.as_ref().map(|it| it.namespace.clone());
    let mut shell = Shell {
        controller: Controller::new(settings),
        parts,
        requests: JoinSet::new(),
        notes,
        stop,
        stop_by: None,
        figures_at: Instant::now(),
        shown: (false, false),
        trouble: None,
    };
    // The watches begin only after the first result of the election. This has two reasons. First, if this process leads
    // when the watches begin, their lists can replace those of the fence. Second, the Lease is read before these lists.
    // If the API server is restored later, the Lease goes back to an older version, and the election notices this.
    let mut stop = shell.stop.clone();
    tokio::select! {
        _ = shell.parts.leadership.changed() => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
    shell.leadership();
    let mut watches = watch_all(&shell.parts, frr_namespace.as_deref(), watched);
    let settled = Box::pin(shell.run(events, grace)).await;
    watches.abort_all();
    settled
}

/// Starts a watch of each kind of object. The watches end when the returned set is dropped. FRRConfigurations are
/// watched only in `frr_namespace`; if it is `None`, not at all.
fn watch_all(
    parts: &ControllerParts,
    frr_namespace: Option<&str>,
    out: mpsc::Sender<ControllerEvent>,
) -> JoinSet<()> {
    let tasks = JoinSet::new();
    let mut watches = Watches { parts, out, tasks };
    let nodes = Encoding::Protobuf(protobuf::node);
    watches.start("nodes", nodes, convert::node, ControllerEvent::Nodes);
    let pods = Encoding::Protobuf(protobuf::pod);
    watches.start("pods", pods, convert::pod, ControllerEvent::Pods);
    let service_ranges = ControllerEvent::ServiceRanges;
    watches.start(
        "servicecidrs",
        Encoding::Json,
        convert::service_range,
        service_ranges,
    );
    watches.start(
        "ippools",
        Encoding::Json,
        convert::pool,
        ControllerEvent::Pools,
    );
    watches.start(
        "nodesubnets",
        Encoding::Json,
        convert::subnet,
        ControllerEvent::Subnets,
    );
    watches.start(
        "noderoutes",
        Encoding::Json,
        convert::routes,
        ControllerEvent::Routes,
    );
    watches.start(
        "ipamblocks",
        Encoding::Json,
        convert::block,
        ControllerEvent::Blocks,
    );
    watches.start(
        "ipclaims",
        Encoding::Json,
        convert::claim,
        ControllerEvent::Claims,
    );
    if let Some(namespace) = frr_namespace {
        watches.start_frr_configurations(namespace);
    }
    watches.tasks
}

struct Watches<'a> {
    parts: &'a ControllerParts,
    out: mpsc::Sender<ControllerEvent>,
    tasks: JoinSet<()>,
}

impl Watches<'_> {
    /// Starts a watch of all objects of a kind. Errors are not passed to the controller, because the watch itself
    /// reports them.
    fn start<K, T: Send + 'static>(
        &mut self,
        kind: &'static str,
        encoding: Encoding<K>,
        read: fn(K) -> T,
        event: fn(ObjectEvent<T>) -> ControllerEvent,
    ) where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + Sync
            + 'static,
    {
        let source = WatchSource {
            encoding,
            ..self.source(kind, Api::<K>::all(self.parts.client.clone()))
        };
        let wrap = move |step| match step {
            WatchStep::Change(change) => Some(event(change)),
            WatchStep::Trouble | WatchStep::Recovered | WatchStep::Absent => None,
        };
        self.tasks
            .spawn(follow(source, self.out.clone(), read, wrap));
    }

    /// Starts the watch of the FRRConfigurations that the controller has written.
    fn start_frr_configurations(&mut self, namespace: &str) {
        let api = Api::<FRRConfigurationLite>::namespaced(self.parts.client.clone(), namespace);
        let (label, value) = MANAGED_BY;
        let source = WatchSource {
            labels: Some(format!("{label}={value}")),
            ..self.source(FRR_CONFIGURATIONS, api)
        };
        let wrap = |step: WatchStep<FrrConfiguration>| match step {
            // Somebody has given the label to an object of their own.
            WatchStep::Change(ObjectEvent::Applied(it)) if !it.is_ours => None,
            WatchStep::Change(change) => Some(ControllerEvent::FrrConfigurations(change)),
            WatchStep::Absent => Some(ControllerEvent::NoFrrConfigurations),
            WatchStep::Trouble | WatchStep::Recovered => None,
        };
        let read = convert::frr_configuration;
        self.tasks
            .spawn(follow(source, self.out.clone(), read, wrap));
    }

    fn source<K>(&self, kind: &'static str, api: Api<K>) -> WatchSource<K> {
        // The seed depends on the kind and the process ID, so that watches do not retry at the same time.
        let seed = kind
            .bytes()
            .fold(u64::from(std::process::id()), |seed, byte| {
                seed.rotate_left(8) ^ u64::from(byte)
            });
        WatchSource {
            kind,
            api,
            encoding: Encoding::Json,
            fields: None,
            labels: None,
            page: self.parts.page,
            pauses: Pauses::new(PAUSE.0, PAUSE.1, seed),
            doubtful: false,
            patience: SilenceTimeouts::default(),
            heard: self.parts.readiness.last_heard(),
        }
    }
}

struct Shell {
    controller: Controller,
    parts: ControllerParts,
    requests: JoinSet<(RequestId, &'static str, Duration, RequestOutcome)>,
    notes: mpsc::Sender<EventNote>,
    stop: watch::Receiver<bool>,
    stop_by: Option<Instant>,
    figures_at: Instant,
    /// Whether this process leads and whether it allocates, as the metrics last showed
    shown: (bool, bool),
    /// Why there is no default pool, as last logged
    trouble: Option<String>,
}

impl Shell {
    async fn run(mut self, mut events: mpsc::Receiver<ControllerEvent>, grace: Duration) -> bool {
        loop {
            self.send_all();
            self.emit_reports();
            if self.controller.is_put_back() {
                error!("{PUT_BACK}");
                return false;
            }
            if Instant::now() >= self.figures_at || self.shown != self.state() {
                self.figures();
            }
            if let Some(by) = self.stop_by
                && (self.controller.is_quiet() || Instant::now() >= by)
            {
                return self.controller.is_settled();
            }
            let wake = self.wake_at();
            tokio::select! {
                Some(event) = events.recv() => {
                    self.on(event);
                    // All events that have arrived are applied before the next request is decided, so that decisions
                    // use the newest state.
                    while let Ok(event) = events.try_recv() {
                        self.on(event);
                    }
                }
                Some(done) = self.requests.join_next() => match done {
                    Ok((id, name, took, outcome)) => self.answered(id, name, took, outcome),
                    Err(error) => warn!("a request's task ended badly: {error}"),
                },
                changed = self.parts.leadership.changed() => {
                    if changed.is_ok() {
                        self.leadership();
                    }
                }
                changed = self.stop.changed(), if self.stop_by.is_none() => {
                    if changed.is_err() || *self.stop.borrow() {
                        info!("stopping: starting no new writes, waiting for {} requests in flight", self.requests.len());
                        self.controller.stop();
                        self.stop_by = Some(Instant::now() + grace);
                    }
                }
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    fn now(&self) -> Now {
        Now {
            mono: self.parts.clock.now(),
            wall: self.parts.clock.wall(),
        }
    }

    fn on(&mut self, event: ControllerEvent) {
        let now = self.now();
        self.controller.on(event, now);
    }

    fn leadership(&mut self) {
        let leadership = self.parts.leadership.borrow_and_update().clone();
        self.on(ControllerEvent::Leadership(leadership));
    }

    fn send_all(&mut self) {
        let now = self.now();
        while let Some(outgoing) = self.controller.poll(now) {
            let writer = self.parts.writer.clone();
            let OutgoingRequest { id, loop_name, .. } = outgoing;
            debug!(request = ?outgoing.request, "sent");
            self.requests.spawn(async move {
                let begun = Instant::now();
                let outcome = writer.send(outgoing).await;
                (id, loop_name, begun.elapsed(), outcome)
            });
        }
        if let Some(wanted) = self.controller.take_wanted() {
            self.parts.want.send_replace(Some(wanted));
        }
    }

    fn answered(
        &mut self,
        id: RequestId,
        name: &'static str,
        took: Duration,
        outcome: RequestOutcome,
    ) {
        if let Some((kind, version)) = outcome.stored() {
            self.parts
                .readiness
                .last_heard()
                .expect(kind.plural(), version);
        }
        let result = match &outcome {
            RequestOutcome::Rejected(Rejection::Guard(why)) => {
                debug!(controller = name, "refused: {why}");
                "refused"
            }
            RequestOutcome::Rejected(Rejection::Rejected(why)) => {
                warn!(controller = name, "rejected by the API server: {why}");
                "error"
            }
            RequestOutcome::Indeterminate(why) => {
                warn!(
                    controller = name,
                    "outcome indeterminate: {why}; what it names stays taken until a read proves otherwise"
                );
                "error"
            }
            RequestOutcome::Rejected(_) => "refused",
            _ => "success",
        };
        self.parts.metrics.answered(name, result, took);
        self.on(ControllerEvent::Answer(id, outcome));
    }

    fn emit_reports(&mut self) {
        for report in self.controller.take_reports() {
            super::events::log(&report);
            if self.notes.try_send(super::events::note(report)).is_err() {
                self.parts.metrics.event_dropped();
            }
        }
    }

    fn wake_at(&self) -> Instant {
        let now = self.parts.clock.now();
        // If work is due now, it only waits for an answer or for the Lease. So a timer is needed only for work that is
        // due later.
        let due = self.controller.wake_at().and_then(|at| at.checked_sub(now));
        let due = due
            .filter(|left| !left.is_zero())
            .map(|left| Instant::now() + left);
        let wake = due.map_or(self.figures_at, |due| due.min(self.figures_at));
        self.stop_by.map_or(wake, |by| wake.min(by))
    }

    /// Returns whether this process leads, and whether it allocates.
    fn state(&self) -> (bool, bool) {
        (
            self.controller.is_leading(),
            self.controller.is_allocating(),
        )
    }

    fn figures(&mut self) {
        self.figures_at = Instant::now() + FIGURES_PAUSE;
        let view = self.controller.view(self.now());
        let state = self.state();
        let (_, was_allocating) = std::mem::replace(&mut self.shown, state);
        if was_allocating != view.allocating {
            let text = if view.allocating {
                "allocating"
            } else {
                "no longer allocating"
            };
            info!(allocating = view.allocating, "{text}");
        }
        if let Some(trouble) = view
            .trouble
            .as_ref()
            .filter(|_| view.trouble != self.trouble)
        {
            warn!("{trouble}");
        }
        self.trouble.clone_from(&view.trouble);
        self.parts.readiness.update(ControllerProgress {
            missing: view.missing.clone(),
            fencing: view.fencing.clone(),
            allocating: view.allocating,
        });
        self.parts.metrics.set(&view);
    }
}
