//! The task of the election. It makes the calls to the API server that the [`Elector`] requests, and publishes the
//! result of the election. The election has a task of its own, so that no other work delays a renewal.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, PostParams};
use kube::{Client, Error};
use tokio::sync::watch;
use tracing::{info, warn};

use super::lease::{
    Elector, LONG_VACANT, Leadership, LeadershipTerm, LeaseAnswer, LeaseCall, LeaseContent,
    LeaseSettings, Mono,
};
use super::lease_object::{lease, record, record_gap, renewed_at};
use super::names::TermId;
use super::readiness::LeaderReadiness;
use crate::cluster::leader_metrics::LeaderMetrics;
use cadastre_api::FIELD_MANAGER;
use cadastre_daemon::clock::Clock;
use watching::{Watching, take_in};

mod watching;

/// Decides immediately before each write whether the write may be sent.
#[derive(Clone)]
pub struct WriteGate {
    leadership: watch::Receiver<Leadership>,
    clock: Clock,
}

impl WriteGate {
    /// Creates a gate that follows the published result of an election.
    pub fn new(leadership: watch::Receiver<Leadership>, clock: Clock) -> Self {
        WriteGate { leadership, clock }
    }

    /// Waits until a Lease write with this number or a higher one has succeeded in this term (see
    /// [`super::lease::LeaseContent`]). Returns for how much longer writes may be sent. Returns `None` if this process
    /// does not lead in this term, or the term's time runs out.
    ///
    /// The Lease write with this number began after this leader had decided the waiting write. Its success proves that
    /// no other process had taken over before the decision. So safety does not depend on the time limit, which only
    /// avoids needless conflicts.
    pub async fn pass(&self, term: &TermId, number: u64) -> Option<Duration> {
        let mut leadership = self.leadership.clone();
        loop {
            let (left, named) = match &*leadership.borrow_and_update() {
                Leadership::Leading(now) if now.id == *term => {
                    (now.valid_until.checked_sub(self.clock.now()), now.named)
                }
                _ => return None,
            };
            let left = left.filter(|left| !left.is_zero())?;
            if named >= number {
                return Some(left);
            }
            if let Ok(Err(_)) = tokio::time::timeout(left, leadership.changed()).await {
                return None;
            }
        }
    }
}

/// The task of the election, with its client, settings and channels.
pub struct Election {
    /// Client for the Lease; must not retry by itself
    pub client: Client,
    /// Namespace of the Lease
    pub namespace: String,
    /// Name of the Lease, also for logs
    pub name: String,
    /// The identity of this process, and the durations of the election
    pub settings: LeaseSettings,
    /// Channel on which the result is published
    pub publish: watch::Sender<Leadership>,
    /// The content that the controller wants the Lease to get
    pub wanted: watch::Receiver<Option<LeaseContent>>,
    /// Receives the result of the election, and reports it in `/readyz`
    pub readiness: LeaderReadiness,
    /// Metrics of the election, which the task updates
    pub metrics: LeaderMetrics,
}

impl Election {
    /// Runs until leadership is released. A value in `release` starts the release, and says whether the outcome of
    /// every write is known. The first result is published once the Lease was read, or is known to be missing. Returns
    /// an error if the API server may have been restored to an older state. After such an error, this process must be
    /// restarted, because its caches may contain objects that the restore has removed.
    pub async fn run(
        mut self,
        clock: Clock,
        mut release: watch::Receiver<Option<bool>>,
    ) -> Result<(), String> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut elector = Elector::new(self.settings.clone());
        let mut last = elector.leadership();
        self.readiness.leadership(last.clone());
        let (mut trouble, mut known) = (None, None);
        let (mut was_read, mut is_published) = (false, false);
        let (mut vacant, mut agents_heard) = (Duration::ZERO, false);
        let mut read_at: Option<Mono> = None;
        let mut is_wanted = true;
        let mut watching = None;
        loop {
            while let Some(ask) = elector.poll(clock.now()) {
                // A shorter lease than before ends sooner from now on, not from the answer on.
                self.publish(&mut last, elector.leadership(), vacant);
                let leads = matches!(last, Leadership::Leading(_));
                agents_heard &= leads;
                if !leads && !matches!(ask, LeaseCall::Get) {
                    vacant = vacant_for(known.as_ref(), clock.wall());
                }
                let before = version(known.as_ref());
                let records_gap = vacant > LONG_VACANT && !agents_heard;
                let call = self.call(&leases, &ask, &mut known, records_gap);
                let limit = elector.patience();
                let (answer, problem) = match tokio::time::timeout(limit, call).await {
                    Ok(Ok(answer)) => (answer, None),
                    Ok(Err(error)) => classify(&error, &ask),
                    Err(_) => (
                        LeaseAnswer::Unclear,
                        Some(format!("no answer within {limit:?}")),
                    ),
                };
                was_read |= problem.is_none();
                if problem.is_none() {
                    let now = clock.now();
                    if read_at.is_some_and(|at| now > at + LONG_VACANT) {
                        self.publish
                            .send_replace(Leadership::Standby { leader: None });
                        return Err(AWAY.to_owned());
                    }
                    read_at = Some(now);
                }
                match problem {
                    Some(problem) => self.warn(&problem, &mut trouble),
                    None => trouble = None,
                }
                if version(known.as_ref()) < before {
                    self.publish
                        .send_replace(Leadership::Standby { leader: None });
                    return Err(PUT_BACK.to_owned());
                }
                let duration = elector.lease_duration();
                elector.answer(answer, clock.now());
                log_pace(duration, elector.lease_duration());
                self.publish(&mut last, elector.leadership(), vacant);
            }
            Watching::attend(&mut watching, &last, &leases, &self.name);
            if was_read && !is_published {
                is_published = true;
                self.publish.send_replace(last.clone());
            }
            if elector.leadership() == Leadership::Released && elector.wake_at().is_none() {
                return Ok(());
            }
            let valid = self.publish_validity(&elector.leadership(), clock.now());
            let due = elector
                .wake_at()
                .map_or(IDLE, |at| at.saturating_sub(clock.now()));
            let pause = valid.map_or_else(|| jittered(due), |left| due.min(left));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                change = Watching::next(&mut watching) => {
                    if let Some(lease) = take_in(&mut elector, change, clock.now()) {
                        known = Some(lease);
                        self.publish(&mut last, elector.leadership(), vacant);
                    }
                }
                changed = self.wanted.changed(), if is_wanted => {
                    is_wanted = changed.is_ok();
                    let wanted = self.wanted.borrow_and_update().clone();
                    if let Some(wanted) = wanted {
                        let is_ours = |it: &LeadershipTerm| it.id == wanted.term;
                        let leads = matches!(&last, Leadership::Leading(it) if is_ours(it));
                        agents_heard |= leads && wanted.agents_heard;
                        elector.want(wanted, clock.now());
                    }
                }
                changed = release.changed() => {
                    let settled = *release.borrow_and_update();
                    if changed.is_err() {
                        return Ok(());
                    }
                    if let Some(settled) = settled {
                        elector.release(settled);
                        self.publish(&mut last, elector.leadership(), vacant);
                    }
                }
            }
        }
    }

    /// Updates metrics and readiness. Returns for how much longer this process may write, or `None` if it must not
    /// write.
    fn publish_validity(&self, leadership: &Leadership, now: Mono) -> Option<Duration> {
        let Leadership::Leading(term) = leadership else {
            self.metrics.leading.set(0);
            return None;
        };
        let left = term
            .valid_until
            .checked_sub(now)
            .filter(|left| !left.is_zero());
        self.metrics.leading.set(left.is_some().into());
        self.readiness.lapsed(left.is_none());
        left
    }

    fn publish(&self, last: &mut Leadership, mut now: Leadership, vacant: Duration) {
        if let Leadership::Leading(term) = &mut now {
            term.vacant = vacant;
        }
        if *last == now {
            return;
        }
        let was = matches!(last, Leadership::Leading(_));
        let term = |leadership: &Leadership| match leadership {
            Leadership::Leading(term) => Some(term.id.clone()),
            _ => None,
        };
        if term(last) != term(&now) {
            self.metrics.transitions.inc();
            match &now {
                Leadership::Leading(term) => {
                    info!(term = %term.id, how = term.takeover.as_str(), "leading");
                    if term.follows_a_gap() {
                        warn!(
                            "by the Lease nobody led for {} s: nobody was there, or the API server was put back to an older state; agents have their say before new blocks are given (docs/backup.md)",
                            vacant.as_secs()
                        );
                    }
                }
                Leadership::Standby { leader } if was => {
                    warn!(
                        leader = leader.as_deref().unwrap_or("nobody"),
                        "no longer leading"
                    );
                }
                Leadership::Released => info!("lease handed over"),
                Leadership::Standby { .. } => {}
            }
        } else if let Leadership::Standby {
            leader: Some(leader),
        } = &now
        {
            info!(%leader, "standing by");
        }
        *last = now.clone();
        self.readiness.leadership(now.clone());
        self.publish.send_replace(now);
    }

    /// Counts a problem, and logs it unless it equals the last problem.
    fn warn(&self, problem: &str, last: &mut Option<String>) {
        self.metrics.errors.inc();
        if last.as_deref() != Some(problem) {
            warn!(lease.name = %self.name, lease.namespace = %self.namespace, "{problem}");
            *last = Some(problem.to_owned());
        }
    }

    /// Makes a call. If `records_gap` is true, the written Lease records the gap before this leader's term. So if this
    /// leader stops before agents had time to report, the next leader gives agents that time.
    async fn call(
        &self,
        leases: &Api<Lease>,
        ask: &LeaseCall,
        known: &mut Option<Lease>,
        records_gap: bool,
    ) -> Result<LeaseAnswer, Error> {
        let post = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        let object = |wanted| {
            let mut lease = lease(known.as_ref(), wanted, Clock.wall());
            lease.metadata.name = Some(self.name.clone());
            if let Some(known) = known.as_ref().filter(|_| records_gap) {
                record_gap(known, &mut lease);
            }
            lease
        };
        let (answer, now): (fn(_) -> _, _) = match ask {
            LeaseCall::Get => (LeaseAnswer::Found, leases.get(&self.name).await?),
            LeaseCall::Create(wanted) => (
                LeaseAnswer::Written,
                leases.create(&post, &object(wanted)).await?,
            ),
            LeaseCall::Replace(wanted) => (
                LeaseAnswer::Written,
                leases.replace(&self.name, &post, &object(wanted)).await?,
            ),
        };
        Ok(answer(record(known.insert(now))))
    }
}

/// The longest wait of the task if the elector has no call to make. All that can happen then wakes the task.
const IDLE: Duration = Duration::from_secs(10);

/// A wait is prolonged at random by up to a fifth of its length, but by no more than a fifth of this constant, so that
/// an expired Lease is acquired soon.
const LONGEST_JITTERED: Duration = Duration::from_millis(400);

/// The error of [`Election::run`] if the API server returns an older version of the Lease than before.
const PUT_BACK: &str = "the Lease has gone back to an older version: the API server was put back to an older state (a restore of etcd?); what this process knows is no longer there, so it ends and must be started anew (docs/backup.md)";

/// The error of [`Election::run`] if the Lease could not be read for longer than `LONG_VACANT`.
const AWAY: &str = "the Lease could not be read for over a minute: the API server may have been put back to an older state meanwhile and be past the old versions by now; this process ends and must be started anew, so that it knows what is there";

/// Logs a change of the lease duration that this process writes as a leader.
fn log_pace(before: Duration, now: Duration) {
    let seconds = now.as_secs();
    if now > before {
        warn!(
            "the API server answers slowly: leases of this process last {seconds} s now, so a takeover takes that long"
        );
    } else if now < before {
        info!("the API server answers fast again: leases of this process last {seconds} s now");
    }
}

/// Returns the resourceVersion of the Lease as a number. The number grows even if the Lease is deleted and created
/// again.
fn version(lease: Option<&Lease>) -> Option<u64> {
    lease?.metadata.resource_version.as_ref()?.parse().ok()
}

/// Returns for how long no leader has renewed the Lease, by the wall clocks of the last leader's host and of this host.
fn vacant_for(lease: Option<&Lease>, now: Timestamp) -> Duration {
    let since = lease.and_then(renewed_at).map(|at| now.duration_since(at));
    since
        .and_then(|it| Duration::try_from(it).ok())
        .unwrap_or_default()
}

/// Prolongs a delay at random, so that candidates do not all try at the same moment.
fn jittered(pause: Duration) -> Duration {
    let part = RandomState::new().hash_one(pause) % 1000;
    let most = pause.min(LONGEST_JITTERED) / 5;
    pause + most.mul_f64(Duration::from_millis(part).as_secs_f64())
}

/// Converts the error of a call to the answer for the elector. Also returns the problem to log, unless the error was to
/// be expected.
fn classify(error: &Error, ask: &LeaseCall) -> (LeaseAnswer, Option<String>) {
    let Error::Api(status) = error else {
        return (
            LeaseAnswer::Unclear,
            Some(format!("no clear answer: {error}")),
        );
    };
    match (status.code, ask) {
        (404, LeaseCall::Get) => (LeaseAnswer::Missing, None),
        (404, LeaseCall::Replace(_)) | (409, _) => (LeaseAnswer::Conflict, None),
        // The answer 404 to a creation is also handled here. It means that the namespace is missing.
        (400..500, _) => (
            LeaseAnswer::Failed,
            Some(format!(
                "Lease refused: {}: check the Role and that the namespace exists",
                status.message
            )),
        ),
        _ => (
            LeaseAnswer::Unclear,
            Some(format!("no clear answer: {error}")),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: u16) -> Error {
        Error::Api(Box::new(kube::core::Status {
            code,
            message: "why".into(),
            ..kube::core::Status::default()
        }))
    }

    fn wanted() -> super::super::lease::LeaseRecord {
        record(&Lease::default())
    }

    #[test]
    fn a_missing_namespace_is_a_failure_and_no_conflict() {
        let (answer, problem) = classify(&refused(404), &LeaseCall::Create(wanted()));
        assert_eq!(answer, LeaseAnswer::Failed);
        assert!(problem.is_some_and(|text| text.contains("namespace exists")));
    }

    #[test]
    fn changes_of_the_lease_by_others_are_no_problem() {
        let cases = [
            (404, LeaseCall::Get, LeaseAnswer::Missing),
            (404, LeaseCall::Replace(wanted()), LeaseAnswer::Conflict),
            (409, LeaseCall::Replace(wanted()), LeaseAnswer::Conflict),
            (409, LeaseCall::Create(wanted()), LeaseAnswer::Conflict),
        ];
        for (code, ask, expected) in cases {
            assert_eq!(
                classify(&refused(code), &ask),
                (expected, None),
                "{code} {ask:?}"
            );
        }
    }

    #[test]
    fn a_pause_gets_longer_by_a_fifth_at_most() {
        let second = Duration::from_secs(1);
        for _ in 0..100 {
            let pause = jittered(second);
            assert!(pause >= second && pause <= second.mul_f64(1.2), "{pause:?}");
        }
        assert_eq!(jittered(Duration::ZERO), Duration::ZERO);
        let (long, most) = (10 * second, Duration::from_millis(80));
        assert!((0..100).all(|_| jittered(long) <= long + most));
    }

    #[test]
    fn a_server_error_says_nothing_about_the_outcome() {
        let (answer, problem) = classify(&refused(500), &LeaseCall::Replace(wanted()));
        assert!(answer == LeaseAnswer::Unclear && problem.is_some());
    }
}
