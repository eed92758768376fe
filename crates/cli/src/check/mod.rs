//! `kubectl cadastre check`: what contradicts itself.
//!
//! Lists are taken one after the other, so one look can show what never was at one moment. What looks
//! wrong is therefore read again after a pause, and only what both looks show is told.

mod addresses;
mod alive;
mod outside;
mod pools;
mod ranges;

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::inventory::Inventory;
use super::lists::Wanted;
use super::reach::Reach;
use super::render::{self, Columns, Report, Style, count};
use super::{Flags, Verdict};

/// Cross-check pools, blocks, NodeSubnets, nodes and pods
///
/// Exit code 0: nothing above info; 2: something; 1: it could not be checked.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre check
  kubectl cadastre check -o json > report.json
  kubectl cadastre check --ignore PoolNearlyFull --severity critical")]
pub struct Args {
    /// Leave findings of this code out; may be repeated
    #[arg(long, value_name = "CODE")]
    ignore: Vec<String>,

    /// Tell only what is at least that severe
    #[arg(long, value_enum, default_value_t = Severity::Info)]
    severity: Severity,

    /// Seconds until what looks wrong is looked at again
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=600))]
    settle: u16,
}

/// How bad it is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know; no reason to act.
    Info,
    /// Something is lost or will go wrong: act in time.
    Warning,
    /// Traffic may go astray, or pods cannot start: act now.
    Critical,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// How bad it is
    pub severity: Severity,
    /// What kind of thing; stable, for programs
    pub code: String,
    /// What it is about: `pool NAME`, `node NAME`, `block CIDR`, `address A`
    pub object: String,
    /// What is wrong, with what
    pub message: String,
    /// What to do
    pub advice: String,
    /// The leaked address, of [`LEAKED`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leak: Option<Leak>,
}

/// An address whose pod is gone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Leak {
    /// The address
    pub address: String,
    /// The node whose agent holds it
    pub node: String,
    /// `namespace/name` of the pod that had it
    #[serde(default)]
    pub pod: String,
    /// The UID of that pod
    #[serde(rename = "podUID")]
    pub pod_uid: String,
}

/// The code of leaked addresses: what `release --report` goes by.
pub(crate) const LEAKED: &str = "LeakedAddress";

/// All that is wrong.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckReport {
    /// When it was looked at
    pub time: Timestamp,
    /// The version of this command
    pub version: String,
    /// What was looked at
    pub checked: Checked,
    /// The worst first
    pub findings: Vec<Finding>,
}

/// How much was looked at.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checked {
    /// `IPPools`
    pub pools: usize,
    /// Nodes
    pub nodes: usize,
    /// `NodeSubnets`
    pub node_subnets: usize,
    /// `IPAMBlocks`
    pub blocks: usize,
    /// Addresses in use by agents' words
    pub allocations: usize,
    /// Pods
    pub pods: usize,
}

impl Finding {
    fn new(
        severity: Severity,
        code: &str,
        object: String,
        message: String,
        advice: String,
    ) -> Self {
        Finding {
            severity,
            code: code.to_owned(),
            object,
            message,
            advice,
            leak: None,
        }
    }

    /// What makes two findings of two looks the same.
    fn key(&self) -> (&str, &str, Option<&Leak>) {
        (&self.code, &self.object, self.leak.as_ref())
    }
}

/// Looks for everything that is wrong, the worst first.
pub fn check(inventory: &Inventory) -> CheckReport {
    let mut findings = Vec::new();
    ranges::check(inventory, &mut findings);
    addresses::check(inventory, &mut findings);
    pools::check(inventory, &mut findings);
    alive::check(inventory, &mut findings);
    outside::check(inventory, &mut findings);
    findings.sort_by(|a: &Finding, b: &Finding| {
        (b.severity, &a.code, &a.object).cmp(&(a.severity, &b.code, &b.object))
    });
    CheckReport {
        time: inventory.now,
        version: cadastre_core::VERSION.to_owned(),
        checked: Checked {
            pools: inventory.world.pools.len(),
            nodes: inventory.world.nodes.len(),
            node_subnets: inventory.subnets.len(),
            blocks: inventory.world.blocks.len(),
            allocations: inventory.held().count(),
            pods: inventory.pods.len(),
        },
        findings,
    }
}

impl CheckReport {
    /// What an earlier look has shown as well.
    #[must_use]
    pub(crate) fn confirmed_by(mut self, earlier: &CheckReport) -> Self {
        let before: BTreeSet<_> = earlier.findings.iter().map(Finding::key).collect();
        self.findings
            .retain(|finding| before.contains(&finding.key()));
        self
    }

    /// Whether anything is worse than good to know.
    pub fn is_bad(&self) -> bool {
        self.findings.iter().any(|it| it.severity > Severity::Info)
    }
}

/// Looks, and looks again at what looks wrong.
pub async fn look(reach: &Reach, settle: Duration) -> anyhow::Result<CheckReport> {
    let first = check(&reach.inventory(Wanted::PODS).await?);
    if first.findings.is_empty() {
        return Ok(first);
    }
    tokio::time::sleep(settle).await;
    let second = check(&reach.inventory(Wanted::PODS).await?);
    Ok(second.confirmed_by(&first))
}

/// Runs the verb.
pub async fn exec(args: &Args, flags: &Flags, reach: &Reach) -> anyhow::Result<Verdict> {
    let mut report = look(reach, Duration::from_secs(args.settle.into())).await?;
    report.findings.retain(|finding| {
        finding.severity >= args.severity && !args.ignore.contains(&finding.code)
    });
    render::print(&report, flags.output, report.time)?;
    Ok(if report.is_bad() {
        Verdict::Findings
    } else {
        Verdict::Clean
    })
}

impl Report for CheckReport {
    fn text(&self, style: &Style) -> String {
        let Checked {
            pools,
            nodes,
            blocks,
            allocations,
            pods,
            ..
        } = self.checked;
        let looked = format!(
            "Looked at {}, {}, {}, {} in use and {}.\n",
            count(pools, "pool"),
            count(nodes, "node"),
            count(blocks, "block"),
            if allocations == 1 {
                "1 address".to_owned()
            } else {
                format!("{allocations} addresses")
            },
            count(pods, "pod"),
        );
        if self.findings.is_empty() {
            return format!("{looked}Nothing is wrong.\n");
        }
        let mut table = Columns::new(&[
            "SEVERITY",
            "CODE",
            "OBJECT",
            "WHAT IS WRONG, AND WHAT TO DO",
        ]);
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
            self.findings
                .iter()
                .filter(|it| it.severity == severity)
                .count()
        };
        let found = format!(
            "{} critical, {} warning, {} info.\n",
            of(Severity::Critical),
            of(Severity::Warning),
            of(Severity::Info)
        );
        table.text(style, "") + "\n" + &looked + &found
    }
}
