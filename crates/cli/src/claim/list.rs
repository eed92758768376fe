//! `claim list`: claims, their addresses, who uses them, and why they wait.

use jiff::Timestamp;
use serde::Serialize;

use crate::claims::ClaimFact;
use crate::reach::ApiReach;
use crate::render::{self, Columns, Style, VerbReport, age, joined};
use crate::{ExitVerdict, Flags};
use cadastre_core::Addr;

/// List claims, their addresses, who uses them, and why they wait
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre claim list
  kubectl cadastre claim list -A -o wide")]
pub(super) struct ListArgs {
    /// List the claims of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
}

/// The report of `claim list`, sorted by namespace and name.
#[derive(Debug, Serialize)]
pub(crate) struct ClaimsReport {
    pub claims: Vec<ClaimRow>,
}

/// A claim, and the state that its status reports.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimRow {
    pub namespace: String,
    pub name: String,
    /// The addresses that the claim has
    pub addresses: Vec<Addr>,
    /// The addresses that the claim asks for
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub asked: Vec<Addr>,
    /// The pool of the addresses; if there are none yet, the pool that the spec names
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The node that has the addresses for a pod; `None` if no node has them
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The pod that uses the claim on the node in `node`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The status of the condition Ready: `True`, `False`; empty if no controller has looked at the claim yet
    pub ready: String,
    /// The reason of the condition Ready
    pub reason: String,
    /// The message of the condition Ready
    pub message: String,
    pub deleting: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<Timestamp>,
}

impl ClaimsReport {
    pub(crate) fn of(claims: &[ClaimFact]) -> Self {
        let mut claims: Vec<ClaimRow> = claims.iter().map(ClaimRow::of).collect();
        claims.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        ClaimsReport { claims }
    }
}

impl ClaimRow {
    fn of(claim: &ClaimFact) -> Self {
        let (namespace, name) = claim.split();
        let ready = claim.ready();
        ClaimRow {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            addresses: claim.addresses.clone(),
            asked: claim.asked.clone(),
            pool: claim.pool.clone(),
            node: claim.status.node.clone(),
            pod: claim.status.pod.clone(),
            ready: ready.map(|it| it.status.clone()).unwrap_or_default(),
            reason: claim.reason().to_owned(),
            message: ready.map(|it| it.message.clone()).unwrap_or_default(),
            deleting: claim.deleted_at.is_some(),
            created: claim.created,
        }
    }

    /// Whether the message of the condition Ready says no more than the other columns.
    fn is_plain(&self) -> bool {
        !self.deleting && ["Available", "InUse"].contains(&&*self.reason)
    }
}

impl VerbReport for ClaimsReport {
    fn text(&self, style: &Style) -> String {
        let heads = [
            "NAMESPACE",
            "NAME",
            "ADDRESSES",
            "POOL",
            "NODE",
            "POD",
            "READY",
            "REASON",
            "AGE",
            "+ASKS FOR",
            "MESSAGE",
        ];
        let mut table = Columns::new(&heads);
        for row in &self.claims {
            let is_shown = style.wide || !row.is_plain();
            table.row([
                row.namespace.clone(),
                row.name.clone(),
                joined(&row.addresses),
                row.pool.clone().unwrap_or_default(),
                row.node.clone().unwrap_or_default(),
                row.pod.clone().unwrap_or_default(),
                row.ready.clone(),
                row.reason.clone(),
                age(row.created, style.now),
                joined(&row.asked),
                Some(row.message.clone())
                    .filter(|_| is_shown)
                    .unwrap_or_default(),
            ]);
        }
        table.text(
            style,
            "There is no claim here (-A lists those of all namespaces).",
        )
    }
}

pub(super) async fn exec(
    args: &ListArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let namespace = Some(&*reach.namespace).filter(|_| !args.all_namespaces);
    let claims = reach.claims(namespace).await?;
    let claims: Vec<ClaimFact> = claims.iter().map(ClaimFact::read).collect();
    render::print(&ClaimsReport::of(&claims), flags.output, Timestamp::now())?;
    Ok(ExitVerdict::Clean)
}
