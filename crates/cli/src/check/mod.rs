//! `kubectl cadastre check`: finds contradictions between objects.
//!
//! Objects of different kinds are listed one after the other, so one pass can find a contradiction that never existed.
//! For this reason, if the first pass finds anything, all objects are listed and checked again after a pause. Only
//! findings of both passes are reported.

mod addresses;
mod alive;
mod claims;
mod outside;
mod pools;
mod ranges;

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::inventory::{Inventory, PodFact};
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::render::{self, Columns, Style, VerbReport, count};
use super::{ExitVerdict, Flags};

/// Check pools, blocks, claims, NodeSubnets, nodes and pods against each other
///
/// Exit codes: 0 if there are no warnings and no critical findings, 2 if there are some, 1 if the check failed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre check
  kubectl cadastre check -o json > report.json
  kubectl cadastre check --ignore PoolNearlyFull --severity critical")]
pub(crate) struct CheckArgs {
    /// Ignore findings with this code; may be repeated
    #[arg(long, value_name = "CODE")]
    ignore: Vec<String>,

    /// Show only findings of at least this severity
    #[arg(long, value_enum, default_value_t = Severity::Info)]
    severity: Severity,

    /// Seconds to wait before the second check, which is made if anything looks wrong
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=600))]
    settle: u16,
}

/// How urgent a finding is. Later variants are more urgent.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// Good to know; nothing has to be done
    Info,
    /// Something is lost or will go wrong: act in time
    Warning,
    /// Traffic may be misrouted, or pods cannot start: act now
    Critical,
}

/// A fault, or something that users should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Finding {
    pub severity: Severity,
    /// The kind of finding. It is never renamed, so that programs can rely on it
    pub code: String,
    /// The object concerned: `pool NAME`, `node NAME`, `block CIDR`, `claim NAMESPACE/NAME`, `address A`
    pub object: String,
    /// The fault, as text for users
    pub message: String,
    /// What the user should do next
    pub advice: String,
    /// The leaked address; `None` for findings with another code than [`LEAKED`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leak: Option<Leak>,
}

/// An address in use whose pod is gone or has ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Leak {
    pub address: String,
    /// The node whose agent reports the address in use
    pub node: String,
    /// The pod that had the address, as `namespace/name`
    #[serde(default)]
    pub pod: String,
    /// The UID of the pod that had the address
    #[serde(rename = "podUID")]
    pub pod_uid: String,
}

/// The code of findings about leaked addresses. Only these findings have a [`Leak`], which `release --report` reads.
pub(crate) const LEAKED: &str = "LeakedAddress";

/// The report of `check`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CheckReport {
    /// When the objects were listed
    pub time: Timestamp,
    /// The version of kubectl-cadastre
    pub version: String,
    pub checked: Checked,
    /// The findings, most severe first
    pub findings: Vec<Finding>,
}

/// The numbers of objects that were checked.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Checked {
    pub pools: usize,
    pub nodes: usize,
    pub node_subnets: usize,
    pub blocks: usize,
    #[serde(default)]
    pub claims: usize,
    /// Number of addresses in use that agents report
    pub allocations: usize,
    pub pods: usize,
}

/// Collects the findings of one pass.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(
        &mut self,
        severity: Severity,
        code: &str,
        object: impl Into<String>,
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.0.push(Finding {
            severity,
            code: code.to_owned(),
            object: object.into(),
            message: message.into(),
            advice: advice.into(),
            leak: None,
        });
    }
}

/// Returns the kubectl command that deletes a pod, for advice to the user.
fn delete_pod(pod: &PodFact) -> String {
    format!("kubectl delete pod -n {}", pod.name.replace('/', " "))
}

impl Finding {
    /// Returns the fields that identify a fault. A finding of the first pass and one of the second pass are about the
    /// same fault if these fields are equal.
    fn key(&self) -> (&str, &str, Option<&Leak>) {
        (&self.code, &self.object, self.leak.as_ref())
    }
}

/// Runs all checks. The most severe findings come first.
pub(crate) fn check(inventory: &Inventory) -> CheckReport {
    let mut findings = Findings::default();
    ranges::check(inventory, &mut findings);
    addresses::check(inventory, &mut findings);
    claims::check(inventory, &mut findings);
    pools::check(inventory, &mut findings);
    alive::check(inventory, &mut findings);
    outside::check(inventory, &mut findings);
    let mut findings = findings.0;
    findings
        .sort_by(|a, b| (b.severity, &a.code, &a.object).cmp(&(a.severity, &b.code, &b.object)));
    CheckReport {
        time: inventory.now,
        version: cadastre_core::VERSION.to_owned(),
        checked: Checked {
            pools: inventory.cache.pools.len(),
            nodes: inventory.cache.nodes.len(),
            node_subnets: inventory.subnets.len(),
            blocks: inventory.cache.blocks.len(),
            claims: inventory.claims.len(),
            allocations: inventory.addresses_in_use().count(),
            pods: inventory.pods.len(),
        },
        findings,
    }
}

impl CheckReport {
    /// Removes each finding that is not in `earlier`, the report of an earlier pass.
    #[must_use]
    pub(crate) fn confirmed_by(mut self, earlier: &CheckReport) -> Self {
        let before: BTreeSet<_> = earlier.findings.iter().map(Finding::key).collect();
        self.findings.retain(|it| before.contains(&it.key()));
        self
    }

    /// Whether any finding is more severe than [`Severity::Info`].
    pub(crate) fn is_bad(&self) -> bool {
        self.findings.iter().any(|it| it.severity > Severity::Info)
    }
}

/// Lists and checks the cluster. If anything looks wrong, lists and checks again after `settle`, and keeps only the
/// findings of both passes.
pub(crate) async fn check_twice(reach: &ApiReach, settle: Duration) -> anyhow::Result<CheckReport> {
    let first = check(&reach.inventory(WantedKinds::Pods).await?);
    if first.findings.is_empty() {
        return Ok(first);
    }
    tokio::time::sleep(settle).await;
    let second = check(&reach.inventory(WantedKinds::Pods).await?);
    Ok(second.confirmed_by(&first))
}

/// Runs `check`. Returns [`ExitVerdict::Findings`] if a shown finding is a warning or critical.
pub(crate) async fn exec(
    args: &CheckArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let mut report = check_twice(reach, Duration::from_secs(args.settle.into())).await?;
    report.findings.retain(|finding| {
        finding.severity >= args.severity && !args.ignore.contains(&finding.code)
    });
    render::print(&report, flags.output, report.time)?;
    Ok(ExitVerdict::of(report.is_bad()))
}

impl VerbReport for CheckReport {
    fn text(&self, style: &Style) -> String {
        let Checked {
            pools,
            nodes,
            blocks,
            claims,
            allocations,
            pods,
            ..
        } = self.checked;
        let checked = format!(
            "Checked {}, {}, {}, {}, {} in use and {}.\n",
            count(pools, "pool"),
            count(nodes, "node"),
            count(blocks, "block"),
            count(claims, "claim"),
            if allocations == 1 {
                "1 address".to_owned()
            } else {
                format!("{allocations} addresses")
            },
            count(pods, "pod"),
        );
        if self.findings.is_empty() {
            return format!("{checked}Nothing is wrong.\n");
        }
        let heads = [
            "SEVERITY",
            "CODE",
            "OBJECT",
            "WHAT IS WRONG, AND WHAT TO DO",
        ];
        let mut table = Columns::new(&heads);
        for finding in &self.findings {
            let severity = format!("{:?}", finding.severity).to_lowercase();
            table.row([
                severity,
                finding.code.clone(),
                finding.object.clone(),
                format!("{}: {}", finding.message, finding.advice),
            ]);
        }
        let of = |severity| {
            let all = self.findings.iter();
            all.filter(|it| it.severity == severity).count()
        };
        let counts = format!(
            "{} critical, {} warning, {} info.\n",
            of(Severity::Critical),
            of(Severity::Warning),
            of(Severity::Info)
        );
        table.text(style, "") + "\n" + &checked + &counts
    }
}
