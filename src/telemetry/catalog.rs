//! Every metric with its type, labels and meaning, for docs/metrics.md.
//!
//! A registry shows a metric only once it has a series, so what is registered is noted on the way in.

use std::cell::RefCell;
use std::fmt::Write as _;

use prometheus::core::Collector;
use prometheus::proto::MetricType;
use prometheus::{Error, Registry};

use super::{AgentMetrics, ControllerMetrics, HttpMetrics, LeaderMetrics, Readiness, build_info};

thread_local! {
    /// What was registered by this thread while somebody wants to know.
    static NOTED: RefCell<Option<Vec<Metric>>> = const { RefCell::new(None) };
}

/// A metric.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Metric {
    /// Its name, without the suffixes of histograms
    pub name: String,
    /// `counter`, `gauge` or `histogram`
    pub kind: &'static str,
    /// Names of its labels
    pub labels: Vec<String>,
    /// What it says
    pub help: String,
}

/// Registers a collector and hands it back.
pub(super) fn register<C: Collector + Clone + 'static>(
    registry: &Registry,
    c: C,
) -> Result<C, Error> {
    note(&c);
    registry.register(Box::new(c.clone()))?;
    Ok(c)
}

/// Takes note of a collector that is registered in another way.
pub(super) fn note(collector: &dyn Collector) {
    NOTED.with_borrow_mut(|noted| {
        let Some(noted) = noted else { return };
        let kinds = collector.collect();
        for (desc, family) in collector.desc().into_iter().zip(kinds) {
            noted.push(Metric {
                name: desc.fq_name.clone(),
                kind: match family.get_field_type() {
                    MetricType::COUNTER => "counter",
                    MetricType::HISTOGRAM => "histogram",
                    _ => "gauge",
                },
                labels: desc.variable_labels.clone(),
                help: desc.help.clone(),
            });
        }
    });
}

fn noted(work: impl FnOnce(&Registry) -> Result<(), Error>) -> Result<Vec<Metric>, Error> {
    NOTED.set(Some(Vec::new()));
    let done = work(&Registry::new());
    let mut noted = NOTED.take().unwrap_or_default();
    done?;
    noted.sort();
    Ok(noted)
}

/// What the controller serves besides the figures of its process.
pub fn of_controller() -> Result<Vec<Metric>, Error> {
    noted(|registry| {
        build_info(registry)?;
        Readiness::default().register(registry)?;
        HttpMetrics::register(registry)?;
        LeaderMetrics::register(registry, "cadastre-controller")?;
        ControllerMetrics::register(registry)?;
        Ok(())
    })
}

/// What an agent serves besides the figures of its process.
pub fn of_agent() -> Result<Vec<Metric>, Error> {
    noted(|registry| {
        build_info(registry)?;
        Readiness::default().register(registry)?;
        HttpMetrics::register(registry)?;
        AgentMetrics::register(registry)?;
        Ok(())
    })
}

/// All of it as a page.
pub fn page() -> Result<String, Error> {
    let (controller, agent) = (of_controller()?, of_agent()?);
    let mut text = String::from(HEAD);
    for (title, all) in [("Controller", controller), ("Agent", agent)] {
        let _ = write!(
            text,
            "\n## {title}\n\n| metric | type | labels | what it says |\n|---|---|---|---|\n"
        );
        for Metric {
            name,
            kind,
            labels,
            help,
        } in all
        {
            let labels: Vec<String> = labels.iter().map(|it| format!("`{it}`")).collect();
            let labels = labels.join(", ");
            let _ = writeln!(text, "| `{name}` | {kind} | {labels} | {help} |");
        }
    }
    Ok(text)
}

const HEAD: &str = "# Metrics

<!-- Written by `make metrics-doc`, from the code. -->

The controller serves them on port 9817, an agent on 9818, under `/metrics`. Both also serve
`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`, `process_start_time_seconds`
and the like. Labels are bounded: no pod, node, address or block is one. What a pool's metrics say is said by the
leader alone; a standby has none of them. [Alerts](alerts.md) say which to look at when.
";
