//! The shell around the state machine: watches in, requests out; it decides nothing.
//!
//! One task owns the [`Controller`]; watches, answers and the elector reach it through channels, so no locks are
//! needed. Each request runs in its own task with a timeout; the controller limits their number.

use std::time::Duration;

use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use super::events as told;
use super::{Controller, ControllerEvent, ControllerSettings, Now};
use crate::cluster::convert;
use crate::cluster::lease::{Leadership, LeaseContent};
use crate::cluster::readiness::{ControllerProgress, LeaderReadiness};
use crate::cluster::request::OutgoingRequest;
use crate::cluster::request::{Rejection, RequestId, RequestOutcome};
use crate::cluster::writer::Writer;
use crate::telemetry::ControllerMetrics;
use cadastre_api::FIELD_MANAGER;
use cadastre_daemon::clock::Clock;
use cadastre_daemon::events;
use cadastre_daemon::events::EventNote;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_daemon::watch::{Pauses, SilenceTimeouts, WatchSource, WatchStep, follow};

/// Limit of watch events that wait for the controller.
const BACKLOG: usize = 4096;

/// Log message when a list shows an older state than was known.
const PUT_BACK: &str = "a list shows an older state than was known: the API server was put back to an older state (a restore of etcd?); what this process knows is no longer there, so it ends and must be started anew (docs/backup.md)";

/// First and longest pause of a watch after an error, without jitter.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Limit of Kubernetes events that wait to be emitted.
const REPORT_BACKLOG: usize = 1024;

/// Interval at which metrics are updated.
const FIGURES_PAUSE: Duration = Duration::from_secs(2);

/// What the shell works with.
pub struct ControllerParts {
    /// Client for watches and events
    pub client: Client,
    /// Sends requests
    pub writer: Writer,
    /// Monotonic and wall clock
    pub clock: Clock,
    /// The election's result
    pub leadership: watch::Receiver<Leadership>,
    /// The content that the Lease should get, for the elector
    pub want: watch::Sender<Option<LeaseContent>>,
    /// Metrics of the loops and pools
    pub metrics: ControllerMetrics,
    /// State of `/readyz`
    pub readiness: LeaderReadiness,
    /// Objects per page of a list
    pub page: Option<u32>,
}

/// Runs until `stop` is true, and then until requests in flight are settled, for at most `grace`. Returns whether the
/// lease may be handed over cleanly.
pub async fn run(
    parts: ControllerParts,
    settings: ControllerSettings,
    stop: watch::Receiver<bool>,
    grace: Duration,
) -> bool {
    let (seen, events) = mpsc::channel(BACKLOG);
    let metrics = parts.metrics.clone();
    let notices = events::spawn(
        parts.client.clone(),
        FIELD_MANAGER,
        REPORT_BACKLOG,
        move || metrics.event_dropped(),
    );
    let mut shell = Shell {
        controller: Controller::new(settings),
        parts,
        requests: JoinSet::new(),
        notices,
        stop,
        stop_by: None,
        figures_at: Instant::now(),
        allocating: false,
        trouble: None,
    };
    // The fence can use lists that begin after the lease is won. And if the API server is restored after they begin,
    // the Lease, which was read before, shows it.
    let mut stop = shell.stop.clone();
    tokio::select! {
        _ = shell.parts.leadership.changed() => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
    shell.leadership();
    let mut watches = follow_all(&shell.parts, &seen);
    let settled = shell.run(events, grace).await;
    watches.abort_all();
    settled
}

fn follow_all(parts: &ControllerParts, seen: &mpsc::Sender<ControllerEvent>) -> JoinSet<()> {
    let mut watches = JoinSet::new();
    let out = || seen.clone();
    watches.spawn(follow(
        source("nodes", parts),
        out(),
        convert::node,
        changes(ControllerEvent::Nodes),
    ));
    watches.spawn(follow(
        source("pods", parts),
        out(),
        convert::pod,
        changes(ControllerEvent::Pods),
    ));
    watches.spawn(follow(
        source("servicecidrs", parts),
        out(),
        convert::service_range,
        changes(ControllerEvent::ServiceRanges),
    ));
    watches.spawn(follow(
        source("ippools", parts),
        out(),
        convert::pool,
        changes(ControllerEvent::Pools),
    ));
    watches.spawn(follow(
        source("nodesubnets", parts),
        out(),
        convert::subnet,
        changes(ControllerEvent::Subnets),
    ));
    watches.spawn(follow(
        source("ipamblocks", parts),
        out(),
        convert::block,
        changes(ControllerEvent::Blocks),
    ));
    watches
}

/// Returns the source of all objects of a kind.
fn source<K>(kind: &'static str, parts: &ControllerParts) -> WatchSource<K>
where
    K: kube::Resource<DynamicType = ()>,
{
    // Kinds and processes get different jitter.
    let seed = kind
        .bytes()
        .fold(u64::from(std::process::id()), |seed, byte| {
            seed.rotate_left(8) ^ u64::from(byte)
        });
    WatchSource {
        kind,
        api: Api::all(parts.client.clone()),
        fields: None,
        page: parts.page,
        pauses: Pauses::new(PAUSE.0, PAUSE.1, seed),
        doubtful: false,
        patience: SilenceTimeouts::default(),
        heard: parts.readiness.last_heard(),
    }
}

/// Passes changes to the controller; the watch itself reports its errors.
fn changes<T>(
    event: impl Fn(ObjectEvent<T>) -> ControllerEvent,
) -> impl Fn(WatchStep<T>) -> Option<ControllerEvent> {
    move |step| match step {
        WatchStep::Change(change) => Some(event(change)),
        WatchStep::Trouble | WatchStep::Recovered => None,
    }
}

struct Shell {
    controller: Controller,
    parts: ControllerParts,
    requests: JoinSet<(RequestId, &'static str, Duration, RequestOutcome)>,
    notices: mpsc::Sender<EventNote>,
    stop: watch::Receiver<bool>,
    stop_by: Option<Instant>,
    figures_at: Instant,
    allocating: bool,
    /// The last logged reason for a missing default pool
    trouble: Option<String>,
}

impl Shell {
    async fn run(mut self, mut events: mpsc::Receiver<ControllerEvent>, grace: Duration) -> bool {
        loop {
            self.send_all();
            self.publish_view();
            if self.controller.is_put_back() {
                error!("{PUT_BACK}");
                return false;
            }
            if Instant::now() >= self.figures_at
                || self.allocating != self.controller.is_allocating()
            {
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
                    // All waiting events are taken in before anything is decided.
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
        self.figures();
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

    fn publish_view(&mut self) {
        for report in self.controller.take_reports() {
            told::log(&report);
            if self.notices.try_send(told::notice(report)).is_err() {
                self.parts.metrics.event_dropped();
            }
        }
    }

    fn wake_at(&self) -> Instant {
        let now = self.parts.clock.now();
        // Work that is due already waits for an answer or for the lease, not for time.
        let due = self.controller.wake_at().and_then(|at| at.checked_sub(now));
        let due = due
            .filter(|left| !left.is_zero())
            .map(|left| Instant::now() + left);
        let wake = due.map_or(self.figures_at, |due| due.min(self.figures_at));
        self.stop_by.map_or(wake, |by| wake.min(by))
    }

    fn figures(&mut self) {
        self.figures_at = Instant::now() + FIGURES_PAUSE;
        let view = self.controller.view(self.now());
        if self.allocating != view.allocating {
            self.allocating = view.allocating;
            info!(
                allocating = view.allocating,
                "{}",
                if view.allocating {
                    "allocating"
                } else {
                    "no longer allocating"
                }
            );
        }
        if view.trouble.is_some() && view.trouble != self.trouble {
            warn!("{}", view.trouble.as_deref().unwrap_or_default());
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
