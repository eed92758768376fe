//! `kubectl cadastre pop` and `push`: take addresses out of a node, and put them back.
//!
//! `pop` writes the ranges to the annotation `cadastre.dev/withdraw` of the node's NodeSubnet. From then on the node
//! assigns no new address of these ranges. A range is withdrawn once none of its addresses is in use or cooling. `push`
//! removes ranges from the annotation.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jiff::Timestamp;
use serde::Serialize;

use super::inventory::{Inventory, SubnetFact};
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::render::{self, Columns, Style, VerbReport};
use super::update::{POLL, update};
use super::{ExitVerdict, Flags};
use cadastre_api::WITHDRAW_ANNOTATION;
use cadastre_controller::cluster::objects::Node;
use cadastre_core::{Addr, Cidr};

/// Take addresses out of a node, so that no pod gets them until you push them back
///
/// Running pods keep their addresses: an address in use is taken out once its pod is gone and its cooldown is over.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre pop worker-1 10.244.1.70
  kubectl cadastre pop worker-1 10.244.1.72/29 --wait")]
pub(crate) struct PopArgs {
    /// Name of the node
    node: String,

    /// Addresses, or CIDRs inside of the node's blocks
    #[arg(required = true, value_parser = range)]
    ranges: Vec<Cidr>,

    /// Only show what would be taken out
    #[arg(long)]
    dry_run: bool,

    /// Wait until the ranges are taken out, that is, until no address in them is in use or cooling
    #[arg(long)]
    wait: bool,

    /// Seconds to wait with --wait
    #[arg(long, default_value_t = 300, requires = "wait")]
    timeout: u32,
}

/// Put addresses back that were taken out of a node
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre push worker-1 10.244.1.70
  kubectl cadastre push worker-1 --all")]
pub(crate) struct PushArgs {
    /// Name of the node
    node: String,

    /// Addresses or CIDRs to put back, in the form that pop accepts
    #[arg(required_unless_present = "all", value_parser = range)]
    ranges: Vec<Cidr>,

    /// Put back all ranges that were taken out of the node
    #[arg(long, conflicts_with = "ranges")]
    all: bool,
}

fn range(text: &str) -> Result<Cidr, String> {
    let address = Addr::parse_lenient(text).map(Cidr::host);
    address.map_or_else(
        || Cidr::parse_lenient(text).map_err(|error| error.to_string()),
        Ok,
    )
}

/// The report of `pop` and `push`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PopReport {
    pub ranges: Vec<PoppedRange>,
}

/// The result of `pop` or `push` for one range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PoppedRange {
    pub range: Cidr,
    pub state: PopState,
    /// The reason of the state; may be empty
    pub why: String,
}

/// The state of a request to take a range out of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum PopState {
    /// The request is written.
    Popping,
    /// The request would be written without `--dry-run`.
    WouldPop,
    /// The node's agent reports the range as withdrawn.
    Popped,
    /// The range belongs to the node again.
    Pushed,
    /// Nothing is written, because the request is not possible.
    Refused,
}

/// Returns the reason why the range cannot be taken out of the node, or `None` if it can be taken out.
pub(crate) fn obstacle(range: &Cidr, node: &Node, inventory: &Inventory) -> Option<String> {
    let mut blocks = inventory.registry.blocks.of(&node.uid);
    let block = blocks.find(|it| it.cidr.overlaps(range));
    let Some(block) = block else {
        let mut own = node.pod_cidrs.iter();
        return Some(match own.find(|it| it.overlaps(range)) {
            Some(cidr) => format!(
                "it is in the podCIDR {cidr}: only parts of blocks can be taken out; reserve it in the pool (spec.reserved)"
            ),
            None => format!(
                "it is in no block of the node (kubectl cadastre show node {})",
                node.name
            ),
        });
    };
    if let Some(claim) = inventory.claim_of_block(block) {
        return Some(format!(
            "it is the address of claim {claim}, which no other pod gets anyway: kubectl cadastre claim release {claim}"
        ));
    }
    let mut lent = inventory.registry.borrowed_from(&block.cidr);
    if let Some(part) = lent.find(|it| it.cidr.overlaps(range)) {
        return Some(format!(
            "node {} has borrowed {} of it: kubectl cadastre drain {1}",
            part.owner.name, part.cidr
        ));
    }
    if range.contains(&block.cidr) {
        return Some(format!(
            "it is not a part of a block, {0} is: kubectl cadastre drain {0}",
            block.cidr
        ));
    }
    None
}

/// Changes the ranges that are to be withdrawn from a node. Also removes requests for ranges that lie in no block of
/// the node any more.
async fn request(
    node: &str,
    change: impl Fn(&mut BTreeSet<Cidr>),
    reach: &ApiReach,
) -> anyhow::Result<()> {
    update(node, WITHDRAW_ANNOTATION, reach, |subnet| {
        let mut requests = subnet.requests.clone();
        change(&mut requests.withdraw);
        if let Ok(spec) = &subnet.spec {
            let blocks = spec.blocks.iter();
            let blocks: Vec<Cidr> = blocks
                .filter_map(|block| Cidr::parse_strict(&block.cidr).ok())
                .collect();
            let is_inside = |range: &Cidr| blocks.iter().any(|block| block.contains(range));
            requests.withdraw.retain(is_inside);
        }
        requests
    })
    .await
}

pub(crate) async fn exec_pop(
    args: &PopArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let inventory = reach.inventory(WantedKinds::NoPods).await?;
    let node = inventory.node(&args.node)?;
    let mut report = PopReport::default();
    let mut wanted = BTreeSet::new();
    for range in &args.ranges {
        let (state, why) = match obstacle(range, node, &inventory) {
            Some(why) => (PopState::Refused, why),
            None if args.dry_run => (PopState::WouldPop, String::new()),
            None => {
                wanted.insert(*range);
                (PopState::Popping, String::new())
            }
        };
        let range = *range;
        report.ranges.push(PoppedRange { range, state, why });
    }
    if !wanted.is_empty() {
        request(&args.node, |ranges| ranges.extend(&wanted), reach).await?;
    }
    if args.wait {
        let limit = Duration::from_secs(args.timeout.into());
        wait(&mut report, &args.node, limit, reach).await?;
    }
    render::print(&report, flags.output, Timestamp::now())?;
    let is_undone = |it: &PoppedRange| {
        it.state == PopState::Refused || (args.wait && it.state == PopState::Popping)
    };
    Ok(ExitVerdict::of(report.ranges.iter().any(is_undone)))
}

/// Waits until the node's agent reports the ranges as withdrawn, for at most the time `limit`.
async fn wait(
    report: &mut PopReport,
    node: &str,
    limit: Duration,
    reach: &ApiReach,
) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let subnet = reach.subnet(node).await?;
        let subnet = subnet.with_context(|| format!("NodeSubnet {node} is gone"))?;
        let subnet = SubnetFact::read(&subnet, None);
        let open = report.ranges.iter_mut();
        let mut is_done = true;
        for it in open.filter(|it| it.state == PopState::Popping) {
            if subnet.withdrawn.contains(&it.range) {
                (it.state, it.why) = (PopState::Popped, String::new());
            } else if subnet.withdrawing.contains(&it.range) {
                "it has addresses in use or cooling".clone_into(&mut it.why);
                is_done = false;
            } else {
                "the node's agent has not answered yet".clone_into(&mut it.why);
                is_done = false;
            }
        }
        if is_done || start.elapsed() >= limit {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
}

pub(crate) async fn exec_push(
    args: &PushArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let subnet = reach.subnet(&args.node).await?;
    let subnet = subnet.with_context(|| {
        format!(
            "node {} has no NodeSubnet, so it has no blocks (kubectl get nodes)",
            args.node
        )
    })?;
    let requested = SubnetFact::read(&subnet, None).requests.withdraw;
    let ranges = if args.all {
        requested.iter().copied().collect()
    } else {
        args.ranges.clone()
    };
    let mut report = PopReport::default();
    for range in &ranges {
        let (state, why) = if requested.contains(range) {
            (PopState::Pushed, String::new())
        } else {
            let why = "it was not taken out as this range (kubectl cadastre show node)";
            (PopState::Refused, why.to_owned())
        };
        let range = *range;
        report.ranges.push(PoppedRange { range, state, why });
    }
    request(
        &args.node,
        |requested| requested.retain(|it| !ranges.contains(it)),
        reach,
    )
    .await?;
    render::print(&report, flags.output, Timestamp::now())?;
    let is_refused = |it: &PoppedRange| it.state == PopState::Refused;
    Ok(ExitVerdict::of(report.ranges.iter().any(is_refused)))
}

impl VerbReport for PopReport {
    fn text(&self, style: &Style) -> String {
        let mut table = Columns::new(&["RANGE", "STATE", "WHY"]);
        for it in &self.ranges {
            table.row([
                it.range.to_string(),
                format!("{:?}", it.state),
                it.why.clone(),
            ]);
        }
        table.text(style, "Nothing was taken out of this node.")
    }
}
