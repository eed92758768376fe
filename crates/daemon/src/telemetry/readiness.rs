//! Whether a process is ready, as reported by `/readyz` and by metrics.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Error, GaugeVec, Opts, PullingGauge, Registry};

use super::catalog::register;
use crate::watch::LastHeard;

/// If the API server has sent nothing about a kind for this time, the kind does not count as watched. The time is long
/// enough to restart a watch twice that was silent, and for a working API server to answer the new request.
const SILENT: Duration = Duration::from_secs(180);

/// The readiness of a process. Clones share their state, so each part of the process can report readiness.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<Report>>, LastHeard);

/// The last report of readiness.
#[derive(Debug)]
struct Report {
    ready: bool,
    text: String,
    /// Whether the report stays valid while the API server is silent
    without_api: bool,
}

impl Default for Report {
    fn default() -> Self {
        Report {
            ready: false,
            text: "starting".to_owned(),
            without_api: false,
        }
    }
}

/// A metric that says for how long the API server has sent nothing about each kind.
#[derive(Clone)]
struct Silence {
    heard: LastHeard,
    gauge: GaugeVec,
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
        let readiness = self.clone();
        let ready = PullingGauge::new(
            "cadastre_ready",
            "Whether this process is ready, as /readyz says: 1 yes, 0 no",
            Box::new(move || u8::from(readiness.page().0).into()),
        )?;
        register(registry, ready)?;
        let silence = Opts::new(
            "cadastre_watch_silent_seconds",
            "Seconds since the API server last sent anything about a watched kind; without changes it sends a bookmark about once a minute",
        );
        let silence = Silence {
            heard: self.1.clone(),
            gauge: GaugeVec::new(silence, &["kind"])?,
        };
        register(registry, silence)?;
        Ok(())
    }

    /// Returns the object in which watches record that the API server has sent something.
    pub fn last_heard(&self) -> LastHeard {
        self.1.clone()
    }

    /// Reports whether this process is ready, and why. While the API server is silent, the process counts as not ready.
    pub fn set(&self, ready: bool, text: &str) {
        self.report(ready, text, false);
    }

    /// Reports whether this process is ready, and why. Unlike a report by [`Self::set`], the report stays valid while
    /// the API server is silent.
    pub fn set_without_api(&self, ready: bool, text: &str) {
        self.report(ready, text, true);
    }

    fn report(&self, ready: bool, text: &str, without_api: bool) {
        *self.lock() = Report {
            ready,
            text: text.to_owned(),
            without_api,
        };
    }

    /// Returns whether the process is ready, and the text of `/readyz`.
    pub fn page(&self) -> (bool, String) {
        let report = self.lock();
        let Report {
            ready,
            text,
            without_api,
        } = &*report;
        match self.1.too_long(SILENT) {
            None => (*ready, format!("{text}\n")),
            Some(silent) => (
                *ready && *without_api,
                format!("{text}, but the API server has said nothing of {silent}\n"),
            ),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Report> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauge_and_page_agree() {
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
    fn a_process_that_needs_the_api_is_not_ready_while_a_kind_is_silent() {
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
        let mut families = registry.gather().into_iter();
        let family = families.find(|it| it.name() == "cadastre_watch_silent_seconds");
        let family = family.unwrap();
        let metrics = family.get_metric();
        assert_eq!(metrics.len(), 2);
        assert!(metrics[0].get_gauge().get_value() >= 182.0, "{metrics:?}");
        readiness.set_without_api(true, "gives addresses");
        let (ready, text) = readiness.page();
        assert!(ready, "an agent serves from its store");
        assert_eq!(text, format!("gives addresses, {silent}"));
        heard.heard("nodes");
        assert_eq!(readiness.page(), (true, "gives addresses\n".into()));
    }
}
