//! Whether a process is ready, as reported by `/readyz` and by metrics.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Error, GaugeVec, IntGauge, Opts, Registry};

use crate::watch::LastHeard;

/// If the API server has sent nothing about a kind for this time, the kind does not count as watched. A watch that was
/// silent for two minutes has been restarted by then, and an API server that works has answered the new request.
const SILENT: Duration = Duration::from_secs(180);

/// The readiness of a process. Clones share their state, so each part of the process can report it.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<Option<Said>>>, LastHeard);

/// The last report of readiness.
#[derive(Debug)]
struct Said {
    ready: bool,
    text: String,
    /// Whether the report also holds while the API server is silent
    without_api: bool,
}

/// The readiness as a metric, evaluated when it is collected.
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

/// A metric of how long the API server has sent nothing about each kind.
struct Silence {
    heard: LastHeard,
    gauge: GaugeVec,
}

impl Silence {
    fn new(heard: LastHeard) -> Result<Self, Error> {
        let about = Opts::new(
            "cadastre_watch_silent_seconds",
            "Seconds since the API server last sent anything about a watched kind; without changes it sends a bookmark about once a minute",
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
    /// Registers the metrics of readiness and silence.
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

    /// Returns where watches record that the API server sent something.
    pub fn last_heard(&self) -> LastHeard {
        self.1.clone()
    }

    /// Reports whether this process is ready, and why or why not. While the API server is silent, the process is not
    /// ready.
    pub fn set(&self, ready: bool, text: &str) {
        self.put(ready, text, false);
    }

    /// Like [`Self::set`], for a process that also works while the API server is silent.
    pub fn set_without_api(&self, ready: bool, text: &str) {
        self.put(ready, text, true);
    }

    fn put(&self, ready: bool, text: &str, without_api: bool) {
        let text = format!("{text}\n");
        let said = Said {
            ready,
            text,
            without_api,
        };
        *self.lock() = Some(said);
    }

    /// Returns whether the process is ready, and the text of `/readyz`.
    pub fn page(&self) -> (bool, String) {
        let said = self.lock();
        let (ready, text, without_api) = match &*said {
            None => (false, "starting\n", false),
            Some(said) => (said.ready, said.text.as_str(), said.without_api),
        };
        let Some(silent) = self.1.too_long(SILENT) else {
            return (ready, text.to_owned());
        };
        let text = text.trim_end();
        (
            ready && without_api,
            format!("{text}, but the API server has said nothing of {silent}\n"),
        )
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Said>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_gauge_says_what_the_page_says() {
        let readiness = Readiness::default();
        let registry = Registry::new();
        readiness.register(&registry).unwrap();
        let gauge = || registry.gather()[0].get_metric()[0].get_gauge().get_value();
        assert_eq!(readiness.page(), (false, "starting\n".into()));
        assert!(gauge() < 0.5);
        readiness.set_without_api(true, "gives addresses");
        assert!(gauge() > 0.5);
        assert_eq!(readiness.page(), (true, "gives addresses\n".into()));
    }

    #[test]
    fn who_needs_the_api_is_not_ready_in_silence_and_says_of_what() {
        let readiness = Readiness::default();
        let registry = Registry::new();
        readiness.register(&registry).unwrap();
        let standby = "standby (no leader seen yet)";
        readiness.set(true, standby);
        let (heard, long) = (readiness.last_heard(), SILENT + Duration::from_secs(2));
        heard.heard("pods");
        heard.heard_before("nodes", SILENT / 2);
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
        readiness.set_without_api(true, "gives addresses");
        let (ready, text) = readiness.page();
        assert!(ready, "an agent serves from its store");
        assert_eq!(text, format!("gives addresses, {silent}"));
        heard.heard("nodes");
        assert_eq!(readiness.page(), (true, "gives addresses\n".into()));
    }
}
