//! Every metric with its type, labels and meaning, for docs/metrics.md.
//!
//! A registry shows a metric only once it has a series, so what is registered is noted on the way in.

use std::cell::RefCell;
use std::fmt::Write as _;

use prometheus::core::Collector;
use prometheus::proto::MetricType;
use prometheus::{Error, IntGaugeVec, Opts, Registry};

use super::{HttpMetrics, Readiness};

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
pub fn register<C: Collector + Clone + 'static>(registry: &Registry, c: C) -> Result<C, Error> {
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

/// What some work registers.
pub fn noted(work: impl FnOnce(&Registry) -> Result<(), Error>) -> Result<Vec<Metric>, Error> {
    NOTED.set(Some(Vec::new()));
    let done = work(&Registry::new());
    let mut noted = NOTED.take().unwrap_or_default();
    done?;
    noted.sort();
    Ok(noted)
}

/// What every daemon serves.
pub fn of_daemon(registry: &Registry) -> Result<(), Error> {
    build_info(registry)?;
    Readiness::default().register(registry)?;
    HttpMetrics::register(registry)?;
    Ok(())
}

/// The figures of some daemons as a page, each under its title.
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

/// Which build this is.
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

The controller serves them on port 9817, an agent on 9818, under `/metrics`. Both also serve
`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`, `process_start_time_seconds`
and the like. Labels are bounded: no pod, node, address or block is one. What a pool's metrics say is said by the
leader alone; a standby has none of them. [Alerts](alerts.md) say which to look at when.
";
