//! Lists every metric with its type, labels and meaning, for docs/metrics.md.
//!
//! A registry reports a metric only once the metric has a series. Therefore the catalog is not made from a registry:
//! metrics are recorded when they are registered.

use std::cell::RefCell;
use std::fmt::Write as _;

use prometheus::core::Collector;
use prometheus::proto::MetricType;
use prometheus::{Error, IntGaugeVec, Opts, Registry};

use super::{HttpMetrics, Readiness};

thread_local! {
    /// The metrics that this thread has registered since [`noted`] began to collect them; `None` while `noted` does not
    /// run.
    static NOTED: RefCell<Option<Vec<Metric>>> = const { RefCell::new(None) };
}

/// A metric as docs/metrics.md describes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Metric {
    /// Name, without the suffixes of histograms
    pub name: String,
    /// `counter`, `gauge` or `histogram`
    pub kind: &'static str,
    /// Names of the labels that each series of the metric has
    pub labels: Vec<String>,
    /// The help text, which says what the value means
    pub help: String,
}

/// Registers a collector, records its metrics for [`noted`], and returns it.
pub fn register<C: Collector + Clone + 'static>(registry: &Registry, c: C) -> Result<C, Error> {
    NOTED.with_borrow_mut(|noted| {
        let Some(noted) = noted else { return };
        let families = c.collect();
        for (desc, family) in c.desc().into_iter().zip(families) {
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
    registry.register(Box::new(c.clone()))?;
    Ok(c)
}

/// Returns the metrics that `work` registers, sorted by name.
pub fn noted(work: impl FnOnce(&Registry) -> Result<(), Error>) -> Result<Vec<Metric>, Error> {
    NOTED.set(Some(Vec::new()));
    let done = work(&Registry::new());
    let mut noted = NOTED.take().unwrap_or_default();
    done?;
    noted.sort();
    Ok(noted)
}

/// Registers the metrics that every daemon has.
pub fn of_daemon(registry: &Registry) -> Result<(), Error> {
    build_info(registry)?;
    Readiness::default().register(registry)?;
    HttpMetrics::register(registry)?;
    Ok(())
}

/// Formats the metrics of several daemons as a Markdown page, with a title for each daemon.
pub fn page(daemons: Vec<(&str, Vec<Metric>)>) -> String {
    let mut text = String::from(HEAD);
    for (title, all) in daemons {
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
    text
}

/// Registers and sets the metric that identifies this build.
pub fn build_info(registry: &Registry) -> Result<(), Error> {
    let info = Opts::new(
        "cadastre_build_info",
        "Version and commit of this build; always 1",
    );
    let info = register(registry, IntGaugeVec::new(info, &["version", "commit"])?)?;
    info.with_label_values(&[cadastre_core::VERSION, cadastre_core::COMMIT])
        .set(1);
    Ok(())
}

const HEAD: &str = "# Metrics

<!-- Written by `make metrics-doc`, from the code. -->

The controller serves metrics on port 9817, an agent on 9818, under `/metrics`. Both also serve the usual process metrics:
`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`, `process_start_time_seconds`
and others. No label contains a pod, node, address or block, so the number of series is limited. Only the leader serves
the metrics of pools. The [runbooks of the alerts](alerts.md) say which metrics to look at.
";
