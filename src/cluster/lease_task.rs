//! Who leads: the calls.
//!
//! Runs the [`Elector`] against one Lease object and publishes what it says. Runs apart from
//! everything else, so that no other work can delay a renewal.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error};
use tokio::sync::watch;
use tracing::{info, warn};

use super::clock::Clock;
use super::lease::{Answer, Ask, Elector, Leadership, Record, Settings};
use crate::api::{FIELD_MANAGER, UNSETTLED_ANNOTATION};
use crate::telemetry::{LeaderMetrics, Readiness};

/// Duration assumed of a record that names none.
const DEFAULT_DURATION: Duration = Duration::from_secs(15);

/// Tells writers, at the moment of use, whether they may write.
#[derive(Clone)]
pub struct Gate {
    leadership: watch::Receiver<Leadership>,
    clock: Clock,
}

impl Gate {
    /// A gate on what an elector publishes.
    pub fn new(leadership: watch::Receiver<Leadership>, clock: Clock) -> Self {
        Gate { leadership, clock }
    }

    /// How much longer may be written under that term; nothing if not at all.
    pub fn remaining(&self, term: &str) -> Option<Duration> {
        match &*self.leadership.borrow() {
            Leadership::Leading(tenure) if &*tenure.term == term => tenure
                .valid_until
                .checked_sub(self.clock.now())
                .filter(|left| !left.is_zero()),
            _ => None,
        }
    }
}

/// Where the Lease is and who is told.
pub struct Election {
    /// Must not retry by itself
    pub client: Client,
    /// Of the Lease
    pub namespace: String,
    /// Of the Lease
    pub name: String,
    /// Of this candidate
    pub settings: Settings,
    /// Where the word goes
    pub publish: watch::Sender<Leadership>,
    /// For `/readyz`
    pub readiness: Readiness,
    /// For `/metrics`
    pub metrics: LeaderMetrics,
}

impl Election {
    /// Runs until released: `release` gives whether everything was settled.
    pub async fn run(self, clock: Clock, mut release: watch::Receiver<Option<bool>>) {
        let limit = self.settings.retry_period * 2;
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut elector = Elector::new(self.settings.clone());
        let mut last = elector.leadership();
        self.readiness.leadership(last.clone());
        let mut trouble = None;
        loop {
            while let Some(ask) = elector.poll(clock.now()) {
                let call = self.call(&leases, ask.clone());
                let (answer, problem) = match tokio::time::timeout(limit, call).await {
                    Ok(Ok(answer)) => (answer, None),
                    Ok(Err(error)) => judge(&error, &ask),
                    Err(_) => (Answer::Unclear, Some(format!("no answer within {limit:?}"))),
                };
                match problem {
                    Some(problem) => self.warn(&problem, &mut trouble),
                    None => trouble = None,
                }
                elector.answer(answer, clock.now());
                self.tell(&mut last, elector.leadership());
            }
            if elector.leadership() == Leadership::Released && elector.wake_at().is_none() {
                return;
            }
            let pause = elector
                .wake_at()
                .map_or(limit, |at| at.saturating_sub(clock.now()));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                changed = release.changed() => {
                    let settled = *release.borrow_and_update();
                    if changed.is_err() {
                        return;
                    }
                    if let Some(settled) = settled {
                        elector.release(settled);
                        self.tell(&mut last, elector.leadership());
                    }
                }
            }
        }
    }

    fn tell(&self, last: &mut Leadership, now: Leadership) {
        if *last == now {
            return;
        }
        let (was, is) = (
            matches!(last, Leadership::Leading(_)),
            matches!(now, Leadership::Leading(_)),
        );
        let term = |leadership: &Leadership| match leadership {
            Leadership::Leading(tenure) => Some(tenure.term.clone()),
            _ => None,
        };
        if term(last) != term(&now) {
            self.metrics.transitions.inc();
            self.metrics.leading.set(is.into());
            match &now {
                Leadership::Leading(tenure) => {
                    info!(term = %tenure.term, how = tenure.takeover.word(), "leading");
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

    /// Says once what is wrong, not with each try.
    fn warn(&self, problem: &str, last: &mut Option<String>) {
        self.metrics.errors.inc();
        if last.as_deref() != Some(problem) {
            warn!(lease.name = %self.name, lease.namespace = %self.namespace, "{problem}");
            *last = Some(problem.to_owned());
        }
    }

    async fn call(&self, leases: &Api<Lease>, ask: Ask) -> Result<Answer, Error> {
        let post = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        Ok(match ask {
            Ask::Get => Answer::Found(record(leases.get(&self.name).await?)),
            Ask::Create(wanted) => {
                Answer::Written(record(leases.create(&post, &self.lease(wanted)).await?))
            }
            Ask::Replace(wanted) => Answer::Written(record(
                leases
                    .replace(&self.name, &post, &self.lease(wanted))
                    .await?,
            )),
        })
    }

    fn lease(&self, wanted: Record) -> Lease {
        let now = MicroTime(jiff::Timestamp::now());
        let annotations = wanted
            .unsettled
            .then(|| [(UNSETTLED_ANNOTATION.to_owned(), "true".to_owned())].into());
        let version = Some(wanted.resource_version).filter(|version| !version.is_empty());
        Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(self.namespace.clone()),
                resource_version: version,
                annotations,
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                // The empty text, not an absent field: what other tools expect of a free Lease.
                holder_identity: Some(wanted.holder.unwrap_or_default()),
                lease_duration_seconds: i32::try_from(wanted.lease_duration.as_secs()).ok(),
                lease_transitions: i32::try_from(wanted.transitions).ok(),
                renew_time: Some(now.clone()),
                acquire_time: Some(now),
                ..LeaseSpec::default()
            }),
        }
    }
}

/// What an error means for the elector, and what is wrong where somebody should know.
fn judge(error: &Error, ask: &Ask) -> (Answer, Option<String>) {
    let Error::Api(status) = error else {
        return (Answer::Unclear, Some(format!("no clear answer: {error}")));
    };
    match (status.code, ask) {
        (404, Ask::Get) => (Answer::Missing, None),
        (404, Ask::Replace(_)) | (409, _) => (Answer::Conflict, None),
        // Nothing that could be created is missing: it is the namespace that is.
        (400..500, _) => (
            Answer::Failed,
            Some(format!(
                "Lease refused: {}: check the Role and that the namespace exists",
                status.message
            )),
        ),
        _ => (Answer::Unclear, Some(format!("no clear answer: {error}"))),
    }
}

/// A Lease as far as it can be read; what is missing counts as held, for the usual time.
fn record(lease: Lease) -> Record {
    let spec = lease.spec.unwrap_or_default();
    let annotations = lease.metadata.annotations.unwrap_or_default();
    let seconds = spec
        .lease_duration_seconds
        .and_then(|seconds| u64::try_from(seconds).ok())
        .filter(|s| *s > 0);
    let holder = spec.holder_identity.unwrap_or_else(|| "unknown".to_owned());
    Record {
        holder: Some(holder).filter(|holder| !holder.is_empty()),
        lease_duration: seconds.map_or(DEFAULT_DURATION, Duration::from_secs),
        transitions: spec.lease_transitions.unwrap_or_default().into(),
        unsettled: annotations.contains_key(UNSETTLED_ANNOTATION),
        resource_version: lease.metadata.resource_version.unwrap_or_default(),
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

    fn wanted() -> Record {
        record(Lease::default())
    }

    #[test]
    fn a_missing_namespace_is_told_and_not_taken_for_a_race() {
        let (answer, problem) = judge(&refused(404), &Ask::Create(wanted()));
        assert_eq!(answer, Answer::Failed);
        assert!(problem.is_some_and(|text| text.contains("namespace exists")));
    }

    #[test]
    fn what_others_did_to_the_lease_is_no_trouble() {
        let cases = [
            (404, Ask::Get, Answer::Missing),
            (404, Ask::Replace(wanted()), Answer::Conflict),
            (409, Ask::Replace(wanted()), Answer::Conflict),
            (409, Ask::Create(wanted()), Answer::Conflict),
        ];
        for (code, ask, expected) in cases {
            assert_eq!(
                judge(&refused(code), &ask),
                (expected, None),
                "{code} {ask:?}"
            );
        }
    }

    #[test]
    fn a_server_error_says_nothing_about_the_outcome() {
        let (answer, problem) = judge(&refused(500), &Ask::Replace(wanted()));
        assert!(answer == Answer::Unclear && problem.is_some());
    }
}
