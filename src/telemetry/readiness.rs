//! What `/readyz` says.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Error, IntGauge, Registry};

use crate::cluster::lease::Leadership;
use crate::controller::machine::View;

/// Shared by those who know and the page that tells.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    leadership: Option<Leadership>,
    /// Whether the lease of a leader has run out without a renewal
    lapsed: bool,
    /// Nothing before the first word of the controller
    view: Option<Known>,
    /// The word of a process that has no leader
    said: Option<(bool, String)>,
}

#[derive(Debug)]
struct Known {
    missing: Vec<&'static str>,
    fencing: Option<String>,
    dealing: bool,
}

/// The same word as a metric, found out when it is asked for.
struct Gauge {
    readiness: Readiness,
    gauge: IntGauge,
}

impl Collector for Gauge {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauge.set(self.readiness.page().0.into());
        self.gauge.collect()
    }
}

impl Readiness {
    /// Tells it as a metric, too.
    pub fn register(&self, registry: &Registry) -> Result<(), Error> {
        let gauge = IntGauge::new(
            "cadastre_ready",
            "Whether this process is ready, as /readyz says: 1 yes, 0 no",
        )?;
        let readiness = self.clone();
        let collector = Gauge { readiness, gauge };
        super::catalog::note(&collector);
        registry.register(Box::new(collector))
    }

    /// The elector's word.
    pub fn leadership(&self, leadership: Leadership) {
        self.lock().leadership = Some(leadership);
    }

    /// Whether a leader's lease has run out, so that it writes nothing until it is renewed.
    pub fn lapsed(&self, lapsed: bool) {
        self.lock().lapsed = lapsed;
    }

    /// The controller's word.
    pub fn update(&self, view: &View) {
        let known = Known {
            missing: view.missing.clone(),
            fencing: view.fencing.clone(),
            dealing: view.dealing,
        };
        self.lock().view = Some(known);
    }

    /// The word of a process that has no leader: whether it is ready, and why (not).
    pub fn say(&self, ready: bool, text: &str) {
        self.lock().said = Some((ready, format!("{text}\n")));
    }

    /// Whether it is ready, and the text for people: a leader is ready when it deals, a standby when
    /// it has seen everything.
    pub fn page(&self) -> (bool, String) {
        let state = self.lock();
        if let Some(said) = &state.said {
            return said.clone();
        }
        let Some(view) = &state.view else {
            return (false, "starting\n".to_owned());
        };
        match &state.leadership {
            Some(Leadership::Leading(_)) if state.lapsed => (
                false,
                "leader, but the lease could not be renewed in time: nothing is written until it is\n"
                    .to_owned(),
            ),
            Some(Leadership::Leading(_)) if view.dealing => (true, "leader\n".to_owned()),
            Some(Leadership::Leading(_)) => {
                let what = view.fencing.as_deref().unwrap_or("taking over");
                (false, format!("leader, not dealing yet: {what}\n"))
            }
            Some(Leadership::Released) => (false, "stopping\n".to_owned()),
            _ if !view.missing.is_empty() => (
                false,
                format!(
                    "waiting for the first lists of {}\n",
                    view.missing.join(", ")
                ),
            ),
            Some(Leadership::Standby {
                leader: Some(leader),
            }) => (true, format!("standby (leader: {leader})\n")),
            _ => (true, "standby (no leader seen yet)\n".to_owned()),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cluster::lease::{Takeover, Tenure};

    #[test]
    fn readiness_tells_the_truth_about_each_state() {
        let readiness = Readiness::default();
        assert_eq!(readiness.page(), (false, "starting\n".into()));
        readiness.update(&View {
            missing: vec!["pods"],
            ..View::default()
        });
        assert_eq!(
            readiness.page(),
            (false, "waiting for the first lists of pods\n".into())
        );
        readiness.update(&View::default());
        readiness.leadership(Leadership::Standby {
            leader: Some("a".into()),
        });
        assert_eq!(readiness.page(), (true, "standby (leader: a)\n".into()));
        let tenure = Tenure {
            term: "1-a".into(),
            takeover: Takeover::First,
            valid_until: Duration::ZERO,
            vacant: Duration::ZERO,
        };
        readiness.leadership(Leadership::Leading(tenure));
        readiness.update(&View {
            fencing: Some("3 nodes to touch".into()),
            ..View::default()
        });
        assert_eq!(
            readiness.page(),
            (false, "leader, not dealing yet: 3 nodes to touch\n".into())
        );
        readiness.update(&View {
            dealing: true,
            ..View::default()
        });
        assert_eq!(readiness.page(), (true, "leader\n".into()));
        readiness.lapsed(true);
        let (ready, text) = readiness.page();
        assert!(!ready && text.contains("could not be renewed"), "{text}");
        readiness.lapsed(false);
        assert!(readiness.page().0);
        readiness.leadership(Leadership::Released);
        assert!(!readiness.page().0);
        let registry = Registry::new();
        readiness.register(&registry).unwrap();
        let gauge = || registry.gather()[0].get_metric()[0].get_gauge().get_value();
        assert!(gauge() < 0.5);
        readiness.say(true, "gives addresses");
        assert!(gauge() > 0.5);
        assert_eq!(readiness.page(), (true, "gives addresses\n".into()));
    }
}
