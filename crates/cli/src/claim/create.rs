//! `claim create`: creates a claim, and waits for its addresses.

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use jiff::Timestamp;
use serde::Serialize;

use crate::claims::ClaimFact;
use crate::reach::{ApiReach, CallError};
use crate::render::{self, Columns, Style, VerbReport, joined};
use crate::show::pod_name;
use crate::update::POLL;
use crate::{ExitVerdict, Flags};
use cadastre_api::{CLAIM_ANNOTATION, IPClaim, IPClaimSpec};
use cadastre_core::Addr;

/// Create a claim: any free address of a pool, or certain addresses
///
/// With --pool alone, the claim gets one address of each family of the pool. With --address, it gets exactly these
/// addresses. A claim cannot be changed later. Exit code 2 if the claim has no addresses within --timeout.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre claim create db --pool default
  kubectl cadastre claim create dns -n shop --address 10.244.7.7
  kubectl cadastre claim create web --address 10.244.7.8 --address fd00:10:244::8 --dry-run")]
pub(super) struct CreateArgs {
    /// Name of the claim, or NAMESPACE/NAME; a name alone creates the claim in the namespace of --namespace
    name: String,

    /// The pool from which the claim gets addresses
    #[arg(long, required_unless_present = "addresses")]
    pool: Option<String>,

    /// An address that the claim is to have: at most one of each family, all of one pool; may be repeated
    #[arg(long = "address", id = "addresses", value_name = "ADDRESS", value_parser = address)]
    addresses: Vec<Addr>,

    /// Only let the API server check the claim, without creating it
    #[arg(long)]
    dry_run: bool,

    /// Seconds to wait until the claim has its addresses; 0 does not wait
    #[arg(long, default_value_t = 10)]
    timeout: u32,
}

fn address(text: &str) -> Result<Addr, String> {
    Addr::parse_lenient(text)
        .ok_or_else(|| "write an address such as 10.244.3.7 or fd00:10:244::7".to_owned())
}

/// The report of `claim create`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CreatedClaim {
    /// `namespace/name`
    pub claim: String,
    pub state: CreateState,
    /// The addresses that the claim has; empty as long as it has none
    pub addresses: Vec<Addr>,
    /// The pool of the addresses; if there are none yet, the pool that the user named
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// How pods use the claim, or why it has no addresses
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum CreateState {
    /// The API server would accept the claim.
    WouldCreate,
    /// The claim is created. The command did not wait for its addresses.
    Created,
    /// The claim has its addresses.
    Ready,
    /// The claim is created, and has no addresses yet.
    Waiting,
}

/// Returns the IPClaim that `claim create` sends to the API server.
pub(crate) fn new_claim(name: &str, pool: Option<&str>, addresses: &[Addr]) -> IPClaim {
    let mut claim = IPClaim::new(name, IPClaimSpec::default());
    claim.spec.pool = pool.map(str::to_owned);
    claim.spec.addresses = addresses.iter().map(ToString::to_string).collect();
    claim
}

/// Returns why a claim was not created, and what to do.
pub(crate) fn rejection(error: CallError, namespace: &str, name: &str) -> anyhow::Error {
    let claim = format!("claim {namespace}/{name}");
    match error {
        CallError::Api(409, _) => anyhow!(
            "{claim} exists already, and claims cannot be changed: choose another name, or delete it first (kubectl cadastre claim release {namespace}/{name})"
        ),
        CallError::Api(404, why) if why.contains("namespaces") => anyhow!(
            "{claim} is not created: there is no namespace {namespace} (kubectl get namespaces)"
        ),
        CallError::Api(403, why) if why.contains("exceeded quota") => anyhow!(
            "{claim} is not created: the namespace's quota allows no further claim ({why}): release another claim, or ask for a larger quota"
        ),
        CallError::Api(403, why) if why.contains("cannot create") => anyhow!(
            "{claim} is not created: no right to create ipclaims.cadastre.dev ({why}): ask for the verb \"create\" on it, which the ClusterRoles edit and cadastre-operator have"
        ),
        CallError::Api(code @ (400 | 403 | 422), why) => {
            anyhow!("{claim} is not created: the API server rejects it with {code}: {why}")
        }
        error => error.into_error("ipclaims.cadastre.dev"),
    }
}

/// Returns the report about a created claim, or `None` while no controller has decided about the claim.
pub(crate) fn outcome(claim: &ClaimFact) -> Option<CreatedClaim> {
    let ready = claim.ready().filter(|it| it.reason != "Pending")?;
    let (_, name) = claim.split();
    let is_ready = ready.status == "True";
    Some(CreatedClaim {
        claim: claim.name.clone(),
        state: if is_ready {
            CreateState::Ready
        } else {
            CreateState::Waiting
        },
        addresses: claim.addresses.clone(),
        pool: claim.pool.clone(),
        why: if is_ready {
            format!(
                "a pod of this namespace gets them by the annotation {CLAIM_ANNOTATION}: {name}"
            )
        } else {
            claim.words()
        },
    })
}

pub(super) async fn exec(
    args: &CreateArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let full = pod_name(&args.name, &reach.namespace);
    let (namespace, name) = full.split_once('/').unwrap_or_default();
    let claim = new_claim(name, args.pool.as_deref(), &args.addresses);
    let created = reach.create_claim(namespace, &claim, args.dry_run).await;
    created.map_err(|error| rejection(error, namespace, name))?;
    let at_once = |state, why: &str| CreatedClaim {
        claim: full.clone(),
        state,
        addresses: Vec::new(),
        pool: args.pool.clone(),
        why: why.to_owned(),
    };
    let report = if args.dry_run {
        at_once(CreateState::WouldCreate, "the API server accepts it")
    } else if args.timeout == 0 {
        at_once(CreateState::Created, "the controller chooses its addresses")
    } else {
        let limit = Duration::from_secs(args.timeout.into());
        let decided = wait(namespace, name, limit, reach).await?;
        decided.unwrap_or_else(|| {
            at_once(
                CreateState::Waiting,
                "no controller has decided about it yet: check that one leads (kubectl cadastre status)",
            )
        })
    };
    render::print(&report, flags.output, Timestamp::now())?;
    Ok(ExitVerdict::of(report.state == CreateState::Waiting))
}

/// Waits until a controller has decided about the claim, for at most the time `limit`.
async fn wait(
    namespace: &str,
    name: &str,
    limit: Duration,
    reach: &ApiReach,
) -> anyhow::Result<Option<CreatedClaim>> {
    let start = Instant::now();
    loop {
        let claim = reach.claim(namespace, name).await?;
        let claim =
            claim.with_context(|| format!("claim {namespace}/{name} was deleted meanwhile"))?;
        let decided = outcome(&ClaimFact::read(&claim));
        if decided.is_some() || start.elapsed() >= limit {
            return Ok(decided);
        }
        tokio::time::sleep(POLL).await;
    }
}

impl VerbReport for CreatedClaim {
    fn text(&self, style: &Style) -> String {
        let mut table = Columns::new(&["CLAIM", "STATE", "ADDRESSES", "POOL", "WHY"]);
        table.row([
            self.claim.clone(),
            format!("{:?}", self.state),
            joined(&self.addresses),
            self.pool.clone().unwrap_or_default(),
            self.why.clone(),
        ]);
        table.text(style, "")
    }
}
