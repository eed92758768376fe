//! The watch of a candidate on the Lease. It runs in a task of its own so that a watch that hangs does not delay reads.
//!
//! If the watch is silent, the candidate reads the Lease, and no administrator has to act. Therefore this watch does
//! not count in `cadastre_watch_silent_seconds`.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::cluster::lease::{Elector, Leadership, Mono};
use crate::cluster::lease_object::record;
use cadastre_daemon::encoding::Encoding;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_daemon::watch::{
    LEASES, LastHeard, Pauses, SilenceTimeouts, WatchSource, WatchStep, follow,
};

/// First and longest delay before a watch is started again after an error, without jitter. During the delay, the
/// candidate reads the Lease.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Maximum number of watch events that wait until the election task handles them.
const BACKLOG: usize = 16;

/// A running watch of the Lease. Dropping this value ends the watch.
pub(super) struct Watching {
    changes: mpsc::Receiver<ObjectEvent<Lease>>,
    _task: JoinSet<()>,
}

impl Watching {
    fn begin(leases: &Api<Lease>, name: &str) -> Self {
        let source = WatchSource {
            kind: LEASES,
            api: leases.clone(),
            encoding: Encoding::Json,
            fields: Some(format!("metadata.name={name}")),
            labels: None,
            page: None,
            pauses: Pauses::new(PAUSE.0, PAUSE.1, std::process::id().into()),
            doubtful: false,
            patience: SilenceTimeouts::default(),
            heard: LastHeard::default(),
        };
        let (out, changes) = mpsc::channel(BACKLOG);
        let change = |step| match step {
            WatchStep::Change(change) => Some(change),
            WatchStep::Trouble | WatchStep::Recovered | WatchStep::Absent => None,
        };
        let mut task = JoinSet::new();
        task.spawn(follow(source, out, |lease| lease, change));
        Self {
            changes,
            _task: task,
        }
    }

    /// Starts or stops the watch. A candidate needs a watch once it knows who leads. A leader needs none, because the
    /// watch would only show the leader's own renewals.
    pub(super) fn attend(
        watching: &mut Option<Self>,
        leadership: &Leadership,
        leases: &Api<Lease>,
        name: &str,
    ) {
        match leadership {
            Leadership::Standby { leader: Some(_) } => {
                watching.get_or_insert_with(|| Self::begin(leases, name));
            }
            Leadership::Standby { leader: None } => {}
            Leadership::Leading(_) | Leadership::Released => *watching = None,
        }
    }

    /// Returns the next watch event. If there is no watch, the future never completes.
    pub(super) async fn next(watching: &mut Option<Self>) -> ObjectEvent<Lease> {
        if let Some(watching) = watching
            && let Some(change) = watching.changes.recv().await
        {
            return change;
        }
        std::future::pending().await
    }
}

/// Passes a watch event to the elector. Returns the Lease of the event if the elector accepted the event.
pub(super) fn take_in(
    elector: &mut Elector,
    change: ObjectEvent<Lease>,
    now: Mono,
) -> Option<Lease> {
    match change {
        ObjectEvent::Applied(lease) => elector.watch_applied(&record(&lease), now).then_some(lease),
        ObjectEvent::Deleted(lease) => {
            elector.watch_deleted(&record(&lease), now);
            None
        }
        ObjectEvent::Restarted { .. } | ObjectEvent::Listed | ObjectEvent::Reached(_) => None,
    }
}
