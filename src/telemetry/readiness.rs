//! What `/readyz` says.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Error, GaugeVec, IntGauge, Opts, Registry};

use crate::cluster::lease::Leadership;
use crate::cluster::watch::LastHeard;
use crate::controller::machine::View;

/// A kind that nothing has been heard of for longer is not being watched: a watch that is silent for
/// two minutes has been begun again by then, and answered.
const SILENT: Duration = Duration::from_secs(180);

/// Shared by those who know and the page that tells.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<State>>, LastHeard);

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

/// For how long nothing has been heard of each kind.
struct Silence {
    heard: LastHeard,
    gauge: GaugeVec,
}

impl Silence {
    fn new(heard: LastHeard) -> Result<Self, Error> {
        let about = Opts::new(
            "cadastre_watch_silent_seconds",
            "Seconds since the API server last said anything of a kind that is watched; bookmarks come about once a minute where nothing changes",
        );
        let gauge = GaugeVec::new(about, &["kind"])?;
        Ok(Silence { heard, gauge })
    }
}

impl Collector for Silence {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (kind, silent) in self.heard.silent() {
            let gauge = self.gauge.with_label_values(&[kind]);
            gauge.set(silent.as_secs_f64());
        }
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
        registry.register(Box::new(collector))?;
        let silence = Silence::new(self.1.clone())?;
        super::catalog::note(&silence);
        registry.register(Box::new(silence))
    }

    /// Where watches note that they heard something.
    pub fn last_heard(&self) -> LastHeard {
        self.1.clone()
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
    /// it has seen everything, both while the watches bring something. An agent gives addresses also
    /// without the API server.
    pub fn page(&self) -> (bool, String) {
        let state = self.lock();
        let (ready, text) = page_of(&state);
        let Some(silent) = self.1.too_long(SILENT) else {
            return (ready, text);
        };
        let text = text.trim_end();
        (
            ready && state.said.is_some(),
            format!("{text}, but the API server has said nothing of {silent}\n"),
        )
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn page_of(state: &State) -> (bool, String) {
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
        Some(Leadership::Leading(_)) if view.dealing => {
            let but = view.fencing.as_ref().map(|what| format!(", but {what}"));
            (true, format!("leader{}\n", but.unwrap_or_default()))
        }
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
            inherited: None,
            answered_since: Duration::ZERO,
            named: 0,
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

    #[test]
    fn a_controller_that_hears_nothing_is_not_ready_and_says_of_what() {
        let readiness = Readiness::default();
        let registry = Registry::new();
        readiness.register(&registry).unwrap();
        readiness.update(&View::default());
        let (heard, long) = (readiness.last_heard(), SILENT + Duration::from_secs(2));
        heard.heard("pods");
        heard.heard_before("nodes", SILENT / 2);
        let standby = "standby (no leader seen yet)";
        assert_eq!(readiness.page(), (true, format!("{standby}\n")));
        heard.heard_before("nodes", long);
        let silent = "but the API server has said nothing of nodes for 182 s\n";
        assert_eq!(readiness.page(), (false, format!("{standby}, {silent}")));
        let families = registry.gather();
        let family = families
            .iter()
            .find(|it| it.name() == "cadastre_watch_silent_seconds");
        let told = family.unwrap().get_metric();
        assert_eq!(told.len(), 2);
        assert!(told[0].get_gauge().get_value() >= 182.0, "{told:?}");
        readiness.say(true, "gives addresses");
        let (ready, text) = readiness.page();
        assert!(ready, "an agent serves from its store");
        assert_eq!(text, format!("gives addresses, {silent}"));
        heard.heard("nodes");
        assert_eq!(readiness.page(), (true, "gives addresses\n".into()));
    }
}
