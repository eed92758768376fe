//! `claim release`: deletes claims, and says first what the deletion means for the pods that use the claims.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::{Deserialize as _, Serialize};

use crate::claims::ClaimFact;
use crate::reach::{ApiReach, CallError};
use crate::render::{self, Columns, Style, VerbReport, joined, some};
use crate::show::pod_name;
use crate::update::POLL;
use crate::{ExitVerdict, Flags};
use cadastre_api::{IPPoolSpec, PodLite};
use cadastre_controller::cluster::convert;

/// Delete claims, so that others can get their addresses
///
/// A claim in use stays until its pod is gone. Then the claim's addresses stay unused for the cooldown of their pool.
/// Use --dry-run to see who uses a claim. Exit code 2 if there is no such claim, or with --wait if the claim is still
/// there.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre claim release db --dry-run
  kubectl cadastre claim release db
  kubectl cadastre claim release shop/db shop/dns --wait --timeout 600")]
pub(super) struct ReleaseArgs {
    /// Names of the claims, or NAMESPACE/NAME; a name alone is looked up in the namespace of --namespace
    #[arg(required = true)]
    names: Vec<String>,

    /// Only show what would happen
    #[arg(long)]
    dry_run: bool,

    /// Wait until the claims are gone
    #[arg(long)]
    wait: bool,

    /// Seconds to wait with --wait
    #[arg(long, default_value_t = 300, requires = "wait")]
    timeout: u32,
}

/// The report of `claim release`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ReleasedClaims {
    pub claims: Vec<ReleasedClaim>,
}

/// The result for one claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ReleasedClaim {
    /// `namespace/name`
    pub claim: String,
    pub state: ClaimReleaseState,
    pub addresses: Vec<String>,
    /// What happens to the claim, or why nothing happens
    pub why: String,
}

/// The state of a claim that is to be released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum ClaimReleaseState {
    /// The claim would be deleted without `--dry-run`.
    WouldRelease,
    /// The deletion is requested. The claim is still there.
    Releasing,
    /// The claim is gone.
    Released,
    /// The claim does not exist, or another claim of the same name has replaced it. Nothing was done.
    Refused,
}

/// A pod that names a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    /// Name of the pod, without its namespace
    pub pod: String,
    /// The node to which the pod is bound
    pub node: Option<String>,
}

/// Returns what the deletion of a claim leads to. `users` are the pods that name the claim; `None` if the caller may
/// not list pods. `cooldown` is the cooldown of the claim's pool in seconds; `None` if the caller may not read the
/// pool.
pub(crate) fn consequence(
    claim: &ClaimFact,
    users: Option<&[User]>,
    cooldown: Option<u32>,
    now: Timestamp,
) -> String {
    let status = &claim.status;
    let addresses = claim.addresses.iter().map(ToString::to_string);
    let addresses = addresses.collect::<Vec<_>>().join(" and ");
    let cools = cooldown.map_or("the cooldown of its pool".to_owned(), |it| {
        format!("a cooldown of {it} s")
    });
    let mut text = match (&status.node, &status.pod) {
        _ if addresses.is_empty() => "it has no addresses, and goes at once".to_owned(),
        (Some(node), Some(pod)) => format!(
            "pod {pod} on node {node} uses {addresses}: the claim stays until that pod is gone and the node has released the addresses, and then for {cools}. Until then, pods that name the claim get its addresses"
        ),
        (Some(node), None) => format!(
            "node {node} has {addresses} until no container uses them: the claim stays until then, and after that for {cools}"
        ),
        (None, _) => match (&status.released_at, cooldown) {
            (None, _) => format!("no node has had {addresses}: it goes at once"),
            (Some(_), None) => format!("no node has {addresses}: it goes when {cools} is over"),
            (Some(at), Some(cooldown)) => {
                // The clock by which the controller wrote the time may be ahead of this machine's clock.
                let since = now.duration_since(at.0).as_secs().max(0);
                let left = i64::from(cooldown) - since;
                if left > 0 {
                    format!("no node has {addresses}: it goes in {left} s, when {cools} is over")
                } else {
                    format!("no node has {addresses}: it goes at once")
                }
            }
        },
    };
    if claim.deleted_at.is_some() {
        text = format!("it is being deleted already: {text}");
    }
    let is_other = |user: &&User| {
        status.pod.as_deref() != Some(&*user.pod) || status.node.as_deref() != user.node.as_deref()
    };
    match users {
        None => text += ". Pods that name it are unknown, because you may not list pods",
        Some(users) => {
            let others: Vec<&str> = users.iter().filter(is_other).map(|it| &*it.pod).collect();
            if !others.is_empty() {
                let others = some(&others, 4);
                let _ = write!(
                    text,
                    ". Pods that name it, and get no address once it is gone: {others}"
                );
            }
        }
    }
    if claim.asked.is_empty() && !addresses.is_empty() {
        text += ". A later claim gets the same addresses only if it asks for them (--address)";
    }
    text
}

/// Returns the pods that name the claim. Which claim a pod names is decided by the controller's own code.
fn users(pods: &[PodLite], claim: &str) -> Vec<User> {
    let pods = pods.iter().map(|pod| convert::pod(pod.clone()));
    let live = pods.filter(|pod| !pod.finished);
    let named = live.filter_map(|pod| pod.claim);
    let named = named.filter(|it| *it.claim == *claim);
    let user = named.map(|it| User {
        pod: it.pod.to_string(),
        node: it.node.as_ref().map(ToString::to_string),
    });
    user.collect()
}

/// Reads a claim. Also reads the pods that use the claim, if the user may list pods. Returns the claim, and its entry
/// for the report that is printed before anything is deleted. If the claim does not exist, `Err` has the entry for the
/// report.
async fn judge(
    full: &str,
    reach: &ApiReach,
) -> anyhow::Result<Result<(ReleasedClaim, ClaimFact), ReleasedClaim>> {
    let (namespace, name) = full.split_once('/').unwrap_or_default();
    let Some(claim) = reach.claim(namespace, name).await? else {
        return Ok(Err(ReleasedClaim {
            claim: full.to_owned(),
            state: ClaimReleaseState::Refused,
            addresses: Vec::new(),
            why: format!("there is no such claim (kubectl cadastre claim list -n {namespace})"),
        }));
    };
    let claim = ClaimFact::read(&claim);
    let pods = reach.pods_of(namespace).await.ok();
    let users = pods.map(|pods| users(&pods, full));
    let pool = match &claim.pool {
        Some(pool) => reach.pool_if_readable(pool).await,
        None => None,
    };
    let spec = pool.and_then(|it| IPPoolSpec::deserialize(&it.spec).ok());
    let cooldown = spec.map(|it| it.terms.cooldown_seconds);
    let result = ReleasedClaim {
        claim: full.to_owned(),
        state: ClaimReleaseState::WouldRelease,
        addresses: claim.addresses.iter().map(ToString::to_string).collect(),
        why: consequence(&claim, users.as_deref(), cooldown, Timestamp::now()),
    };
    Ok(Ok((result, claim)))
}

/// Deletes a claim. Returns the new state, or why nothing was done.
async fn delete(
    claim: &ClaimFact,
    reach: &ApiReach,
) -> anyhow::Result<Result<ClaimReleaseState, String>> {
    let (namespace, name) = claim.split();
    match reach.delete_claim(namespace, name, &claim.uid).await {
        Ok(()) => Ok(Ok(ClaimReleaseState::Releasing)),
        Err(CallError::Api(404, _)) => Ok(Ok(ClaimReleaseState::Released)),
        Err(CallError::Api(409, _)) => Ok(Err(
            "it was deleted, and another claim of this name was created meanwhile: look at that one first"
                .to_owned(),
        )),
        Err(CallError::Api(403, why)) => anyhow::bail!(
            "no right to delete ipclaims.cadastre.dev ({why}): ask for the verb \"delete\" on it, which the ClusterRoles edit and cadastre-operator have"
        ),
        Err(error) => Err(error.into_error("ipclaims.cadastre.dev")),
    }
}

pub(super) async fn exec(
    args: &ReleaseArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let mut report = ReleasedClaims::default();
    let mut deleted = Vec::new();
    for name in &args.names {
        let full = pod_name(name, &reach.namespace);
        let (mut result, claim) = match judge(&full, reach).await? {
            Ok(found) => found,
            Err(refused) => {
                report.claims.push(refused);
                continue;
            }
        };
        if !args.dry_run {
            if args.wait {
                eprintln!("claim {full}: {}", cadastre_core::inert::lines(&result.why));
            }
            match delete(&claim, reach).await? {
                Ok(state) => {
                    result.state = state;
                    deleted.push((report.claims.len(), claim));
                }
                Err(why) => (result.state, result.why) = (ClaimReleaseState::Refused, why),
            }
        }
        report.claims.push(result);
    }
    let limit = args.timeout.into();
    let limit = Duration::from_secs(if args.wait { limit } else { 0 });
    wait(&mut report, &deleted, limit, reach).await?;
    render::print(&report, flags.output, Timestamp::now())?;
    let is_undone = |it: &ReleasedClaim| match it.state {
        ClaimReleaseState::Refused => true,
        ClaimReleaseState::Releasing => args.wait,
        _ => false,
    };
    Ok(ExitVerdict::of(report.claims.iter().any(is_undone)))
}

/// Waits until the deleted claims are gone, for at most the time `limit`. Checks at least once. `deleted` has each
/// claim with the index of its entry in the report.
async fn wait(
    report: &mut ReleasedClaims,
    deleted: &[(usize, ClaimFact)],
    limit: Duration,
    reach: &ApiReach,
) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let mut is_done = true;
        for (at, claim) in deleted {
            let Some(result) = report.claims.get_mut(*at) else {
                continue;
            };
            let (namespace, name) = claim.split();
            let now = reach.claim(namespace, name).await?;
            let now = now.map(|it| ClaimFact::read(&it));
            match now.filter(|it| it.uid == claim.uid) {
                None => {
                    result.state = ClaimReleaseState::Released;
                    result.why.clear();
                }
                Some(now) => {
                    is_done = false;
                    if !limit.is_zero() {
                        result.why = remains(&now);
                    }
                }
            }
        }
        if is_done || start.elapsed() >= limit {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Explains why a claim that is being deleted is still there.
fn remains(claim: &ClaimFact) -> String {
    if claim.status.node.is_some() {
        claim.words()
    } else {
        "no node has its addresses: it goes when the cooldown of its pool is over. If it stays, check that a controller leads (kubectl cadastre status)".to_owned()
    }
}

impl VerbReport for ReleasedClaims {
    fn text(&self, style: &Style) -> String {
        let mut table = Columns::new(&["CLAIM", "STATE", "ADDRESSES", "WHY"]);
        for it in &self.claims {
            table.row([
                it.claim.clone(),
                format!("{:?}", it.state),
                joined(&it.addresses),
                it.why.clone(),
            ]);
        }
        table.text(style, "There is no claim to release.")
    }
}
