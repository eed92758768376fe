//! Direct routes to the pods of the other nodes (`--routes=direct`), in the kernel's main routing table.
//!
//! Each NodeRoutes object lists the ranges and the addresses of one node. Each agent watches all NodeRoutes, and adds a
//! route for each range of another node. Direct routes need no tunnel and no other dataplane, but all nodes must be on
//! one link. A separate task maintains the routes, because nothing else in the agent depends on them.
//!
//! | file | subject |
//! |---|---|
//! | `known` | the objects as the watch has shown them |
//! | `table` | which routes are wanted, and which changes lead there |
//! | `kernel` | reads and changes the kernel's routes |
//! | `apply` | carries the changes out, and collects errors |
//! | `report` | the condition `RoutesReady` |
//!
//! # Guarantees
//! - The routes stay while the API server cannot be reached, and when the agent ends. Until the first list is complete,
//!   no route is changed.
//! - A route that was deleted, for example because its interface was down, comes back within [`CHECK_PAUSE`].
//! - Routes that other programs have added are neither changed nor deleted.
//! - While another network serves the node's pods, the agent has no routes, as that network may use the same ranges.

mod apply;
mod kernel;
mod known;
mod report;
mod table;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::metrics::{AgentMetrics, figure};
use apply::AppliedRoutes;
use cadastre_api::NodeRoutesLite;
use cadastre_daemon::watch::{ObjectEvent, WatchSource, WatchStep, follow};
use known::{KnownRoutes, NodeRoutesSeen};
use table::WantedRoutes;

pub use report::RoutesReport;

/// The pause between checks that the kernel still has all routes.
const CHECK_PAUSE: Duration = Duration::from_secs(10);
/// The shortest pause between changes of the kernel's routes.
const APPLY_PAUSE: Duration = Duration::from_millis(100);
/// After a change of the kernel's routes, the next change waits this many times as long as the change took, but at most
/// [`CHECK_PAUSE`]. In large clusters a change takes long, because it begins with a read of the kernel's routes.
const APPLY_SHARE: u32 = 10;
/// How long the agent waits for the first list of NodeRoutes before it reports that there is none.
const LIST_LIMIT: Duration = Duration::from_secs(15);
/// The capacity of the queue of watch events. While the queue is full, the watch pauses.
const BACKLOG: usize = 256;

type RoutesEvent = ObjectEvent<(String, NodeRoutesSeen)>;

/// Keeps the kernel's routes equal to those that the objects of `source` list, until the future is dropped. `own` is
/// the name of this node. `serves` says whether Cadastre's network serves the pods of the node; `None` until that is
/// known.
pub(crate) async fn run(
    own: String,
    source: WatchSource<NodeRoutesLite>,
    serves: watch::Receiver<Option<bool>>,
    metrics: AgentMetrics,
    report: watch::Sender<RoutesReport>,
) {
    let (out, events) = mpsc::channel(BACKLOG);
    let watch = follow(source, out, known::read, |step| match step {
        WatchStep::Change(change) => Some(change),
        WatchStep::Trouble | WatchStep::Recovered | WatchStep::Absent => None,
    });
    let keeper = RouteKeeper {
        own,
        known: KnownRoutes::default(),
        serves,
        wanted: Arc::default(),
        metrics,
        report,
    };
    tokio::join!(watch, keeper.run(events));
}

/// Removes the routes of an earlier run with `--routes=direct`.
pub(crate) async fn remove() {
    match spawn_blocking(apply::remove_all).await {
        Ok(Ok(0)) | Err(_) => {}
        Ok(Ok(count)) => info!(count, "removed the routes to the pods of other nodes"),
        Ok(Err(error)) => apply::log_left(&error),
    }
}

/// Waits until the report changes, and returns the new one. Waits forever if there are no further reports.
pub(crate) async fn next_report(reports: &mut watch::Receiver<RoutesReport>) -> RoutesReport {
    match reports.changed().await {
        Ok(()) => reports.borrow_and_update().clone(),
        Err(_) => std::future::pending().await,
    }
}

struct RouteKeeper {
    own: String,
    known: KnownRoutes,
    serves: watch::Receiver<Option<bool>>,
    wanted: Arc<WantedRoutes>,
    metrics: AgentMetrics,
    report: watch::Sender<RoutesReport>,
}

impl RouteKeeper {
    async fn run(mut self, mut events: mpsc::Receiver<RoutesEvent>) {
        let mut is_changed = false;
        let mut due = Instant::now() + LIST_LIMIT;
        // When the next change may be applied
        let mut free_at = Instant::now();
        loop {
            tokio::select! {
                Some(event) = events.recv() => {
                    is_changed |= self.known.on(event);
                    while let Ok(event) = events.try_recv() {
                        is_changed |= self.known.on(event);
                    }
                    if is_changed && self.known.complete().is_some() {
                        due = due.min(free_at);
                    }
                    if due > Instant::now() {
                        continue;
                    }
                }
                Ok(()) = self.serves.changed() => is_changed = true,
                () = sleep_until(due) => {}
            }
            due = Instant::now() + CHECK_PAUSE;
            let serves = *self.serves.borrow_and_update();
            let objects = self.known.complete();
            self.wanted = match (serves, objects) {
                (None, _) => continue,
                (Some(false), _) => Arc::default(),
                (Some(true), None) => {
                    self.tell(RoutesReport::NotListed);
                    continue;
                }
                (Some(true), Some(objects)) if std::mem::take(&mut is_changed) => {
                    Arc::new(WantedRoutes::new(objects, &self.own))
                }
                (Some(true), Some(_)) => Arc::clone(&self.wanted),
            };
            let begun = Instant::now();
            let report = self.apply().await;
            self.tell(match serves {
                Some(false) => RoutesReport::LeftToOthers,
                _ => report,
            });
            let pause = begun.elapsed() * APPLY_SHARE;
            free_at = Instant::now() + pause.clamp(APPLY_PAUSE, CHECK_PAUSE);
        }
    }

    /// Applies the wanted routes in a thread of its own, so that the requests of pods do not wait. Returns what to
    /// report.
    async fn apply(&self) -> RoutesReport {
        let wanted = Arc::clone(&self.wanted);
        let applied = spawn_blocking(move || apply::apply(&wanted)).await;
        let applied = applied.unwrap_or_else(|error| AppliedRoutes {
            missing: self.wanted.routes.len(),
            errors: vec![error.to_string()],
            ..AppliedRoutes::default()
        });
        self.metrics.routes.set(figure(applied.installed));
        let without_address = self.wanted.without_address.len();
        self.metrics
            .route_errors
            .set(figure(applied.missing + without_address));
        applied.report()
    }

    /// Logs and publishes a report if it differs from the last one.
    fn tell(&self, report: RoutesReport) {
        self.report.send_if_modified(|last| {
            let is_new = *last != report;
            if is_new {
                match report.condition() {
                    Some(it) if it.status != "True" => warn!("{}", it.message),
                    Some(it) => info!(routes = self.wanted.routes.len(), "{}", it.message),
                    None => {}
                }
                *last = report;
            }
            is_new
        });
    }
}

#[cfg(test)]
mod tests;
