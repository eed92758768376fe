//! `kubectl cadastre drain` and `undrain`: ask nodes to release blocks, and cancel such requests.
//!
//! `drain` writes the request to the annotation `cadastre.dev/drain` of the node's NodeSubnet. From then on, no new
//! address is assigned from the block, and the block returns to its pool once it is empty. Running pods keep their
//! addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jiff::Timestamp;
use serde::Serialize;

use super::inventory::{Inventory, SubnetFact};
use super::lists::WantedKinds;
use super::plan::whatif::simulate_now;
use super::reach::ApiReach;
use super::render::{self, Columns, Style, VerbReport};
use super::update::{POLL, update};
use super::{ExitVerdict, Flags};
use cadastre_api::DRAIN_ANNOTATION;
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::cluster::names::{ObjectUid, PoolName};
use cadastre_core::{Cidr, Family};

/// Drain blocks: assign no new address from them, and return them to their pool once they are empty
///
/// Running pods keep their addresses. A node that needs more addresses gets other blocks.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre drain 10.244.1.64/26
  kubectl cadastre drain 10.244.1.64/26 --wait --timeout 600
  kubectl cadastre drain --node worker-1        # the empty blocks that it does not need")]
pub(crate) struct DrainArgs {
    /// CIDRs of the blocks to drain
    #[arg(required_unless_present = "node", value_parser = block)]
    blocks: Vec<Cidr>,

    /// Drain the empty blocks that this node does not need. The node keeps one block of each pool, unless pods on other
    /// nodes wait for that pool, or the pool allocates blocks only on demand
    #[arg(long, value_name = "NAME", conflicts_with = "blocks")]
    node: Option<String>,

    /// Only show what would be drained
    #[arg(long)]
    dry_run: bool,

    /// Wait until the blocks are back in their pool
    #[arg(long)]
    wait: bool,

    /// Seconds to wait with --wait
    #[arg(long, default_value_t = 300, requires = "wait")]
    timeout: u32,
}

/// Cancel requests to drain blocks
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre undrain 10.244.1.64/26
  kubectl cadastre undrain --node worker-1")]
pub(crate) struct UndrainArgs {
    /// CIDRs of the blocks whose drain requests are cancelled
    #[arg(required_unless_present = "node", value_parser = block)]
    blocks: Vec<Cidr>,

    /// Cancel the requests for all blocks of this node
    #[arg(long, value_name = "NAME", conflicts_with = "blocks")]
    node: Option<String>,
}

fn block(text: &str) -> Result<Cidr, String> {
    Cidr::parse_lenient(text).map_err(|error| error.to_string())
}

/// The report of `drain` and `undrain`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct DrainReport {
    pub blocks: Vec<Drained>,
}

/// The result of `drain` or `undrain` for one block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Drained {
    pub block: Cidr,
    /// The node to which the block is allocated; empty if the node is unknown
    pub node: String,
    pub state: DrainState,
    /// Why the block is in this state; empty if the state needs no explanation
    pub why: String,
}

/// The state of a request to drain a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum DrainState {
    /// The request is written.
    Draining,
    /// The request would be written without `--dry-run`.
    WouldDrain,
    /// The block is back in its pool.
    Returned,
    /// The request is cancelled.
    TakenBack,
    /// Nothing is written, because the block cannot be drained, or because there is no request to cancel.
    Refused,
}

impl Drained {
    fn refused(block: Cidr, node: &str, why: &str) -> Self {
        Drained {
            block,
            node: node.to_owned(),
            state: DrainState::Refused,
            why: why.to_owned(),
        }
    }
}

/// Returns the empty blocks that the node with this UID does not need. The node needs one block of each pool and
/// family, with one exception. It needs no block of a pool if it has no address of the pool in use, and if at least one
/// of these conditions holds:
/// - Pods on other nodes wait for the pool (`wanted`).
/// - The pool allocates blocks only on demand.
pub(crate) fn surplus(
    uid: &ObjectUid,
    inventory: &Inventory,
    wanted: &BTreeSet<PoolName>,
) -> Vec<Cidr> {
    let is_empty = |entry: &&BlockEntry| {
        let status = inventory.block_status(entry);
        status.is_some_and(|it| it.used + it.cooling == 0 && !it.released)
    };
    let entries = inventory.plain_blocks(uid);
    let (empty, used): (Vec<&BlockEntry>, Vec<&BlockEntry>) =
        entries.filter(|it| it.is_held()).partition(is_empty);
    let is_wanted = |pool: &PoolName| {
        let state = inventory.registry.pools.get(pool);
        let state = state.filter(|it| it.is_serving());
        state.is_some_and(|it| !it.terms.first_immediate || wanted.contains(pool))
    };
    // A block in use is never surplus. So a node with such a block needs no empty block of the same pool and family.
    let key = |entry: &BlockEntry| (entry.pool.clone(), entry.cidr.family());
    let mut kept: BTreeSet<(PoolName, Family)> = used.iter().map(|it| key(it)).collect();
    let mut surplus = Vec::new();
    for entry in empty {
        let is_unused = !used.iter().any(|it| it.pool == entry.pool);
        if !kept.insert(key(entry)) || (is_unused && is_wanted(&entry.pool)) {
            surplus.push(entry.cidr);
        }
    }
    surplus
}

/// Returns the empty blocks of a pool that their nodes do not need ([`surplus`]), for all nodes.
pub(crate) fn surplus_of_pool(
    pool: &PoolName,
    inventory: &Inventory,
    wanted: &BTreeSet<PoolName>,
) -> Vec<Cidr> {
    let nodes = inventory.cache.nodes.iter();
    let all = nodes.flat_map(|node| surplus(&node.uid, inventory, wanted));
    let of_pool = |cidr: &Cidr| {
        let entry = inventory.registry.blocks.get(cidr);
        entry.is_some_and(|entry| entry.pool == *pool)
    };
    all.filter(of_pool).collect()
}

/// Returns the node whose NodeSubnet gets the request to drain the block. `Err` has the reason why the block cannot be
/// drained.
pub(crate) fn judge(cidr: Cidr, inventory: &Inventory) -> Result<String, Drained> {
    let blocks = &inventory.registry.blocks;
    let Some(entry) = blocks.get(&cidr) else {
        let why = match blocks.iter().find(|it| it.cidr.overlaps(&cidr)) {
            Some(it) => &format!("there is no such block: did you mean {}?", it.cidr),
            None => "there is no such block (kubectl cadastre show blocks)",
        };
        return Err(Drained::refused(cidr, "", why));
    };
    let node = &entry.owner.name;
    let subnet = inventory.subnets.get(node);
    if entry.owner.quarantined {
        let why = "its node is gone: it is free once its quarantine is over";
        Err(Drained::refused(cidr, node, why))
    } else if let Some(claim) = inventory.claim_of_block(entry) {
        let why = format!(
            "it is the address of claim {claim}, and the node releases it when no pod there uses the claim (kubectl cadastre show ip {})",
            cidr.first()
        );
        Err(Drained::refused(cidr, node, &why))
    } else if !subnet.is_some_and(|it| it.lists(&cidr)) {
        let why =
            format!("node {node} does not list it (yet): see kubectl cadastre show node {node}");
        Err(Drained::refused(cidr, node, &why))
    } else {
        Ok(node.to_string())
    }
}

/// Changes the drain requests of a node with `change`. Also removes requests for blocks that the node no longer has.
async fn request(
    node: &str,
    change: impl Fn(&mut BTreeSet<Cidr>),
    reach: &ApiReach,
) -> anyhow::Result<()> {
    update(node, DRAIN_ANNOTATION, reach, |subnet| {
        let mut requests = subnet.requests.clone();
        change(&mut requests.drain);
        requests
            .drain
            .retain(|cidr| subnet.spec.is_err() || subnet.lists(cidr));
        requests
    })
    .await
}

pub(crate) async fn exec_drain(
    args: &DrainArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let inventory = reach.inventory(WantedKinds::Pods).await?;
    let cidrs = match &args.node {
        Some(name) => {
            let uid = &inventory.node(name)?.uid;
            surplus(uid, &inventory, &simulate_now(&inventory).wanted_by_pods)
        }
        None => args.blocks.clone(),
    };
    let mut report = DrainReport::default();
    let mut by_node: BTreeMap<String, BTreeSet<Cidr>> = BTreeMap::new();
    for cidr in cidrs {
        match judge(cidr, &inventory) {
            Ok(node) => {
                by_node.entry(node).or_default().insert(cidr);
            }
            Err(refused) => report.blocks.push(refused),
        }
    }
    let state = if args.dry_run {
        DrainState::WouldDrain
    } else {
        DrainState::Draining
    };
    for (node, cidrs) in &by_node {
        if !args.dry_run {
            request(node, |drain| drain.extend(cidrs), reach).await?;
        }
        report.blocks.extend(cidrs.iter().map(|cidr| {
            let entry = inventory.registry.blocks.get(cidr);
            Drained {
                block: *cidr,
                node: node.clone(),
                state,
                why: match entry.map_or(0, |it| inventory.used_in(it)) {
                    0 => "it is empty".to_owned(),
                    used => format!("it returns when its {used} addresses in use are released"),
                },
            }
        }));
    }
    if args.wait && !args.dry_run {
        wait(&mut report, Duration::from_secs(args.timeout.into()), reach).await?;
        for node in by_node.keys() {
            if reach.subnet(node).await?.is_some() {
                request(node, |_| {}, reach).await?;
            }
        }
    }
    render::print(&report, flags.output, Timestamp::now())?;
    let is_undone = |it: &Drained| {
        it.state == DrainState::Refused || (args.wait && it.state == DrainState::Draining)
    };
    Ok(ExitVerdict::of(report.blocks.iter().any(is_undone)))
}

/// Waits until no NodeSubnet lists the blocks any more, for at most the time `limit`.
async fn wait(report: &mut DrainReport, limit: Duration, reach: &ApiReach) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let mut is_done = true;
        let blocks = report.blocks.iter_mut();
        for it in blocks.filter(|it| it.state == DrainState::Draining) {
            let subnet = reach.subnet(&it.node).await?;
            let subnet = subnet.map(|subnet| SubnetFact::read(&subnet, None));
            let Some(subnet) = subnet.filter(|subnet| subnet.lists(&it.block)) else {
                (it.state, it.why) = (DrainState::Returned, String::new());
                continue;
            };
            is_done = false;
            let text = it.block.to_string();
            if let Some(status) = subnet.blocks.iter().find(|status| status.cidr == text) {
                it.why = format!(
                    "it still has {} addresses in use and {} in cooldown",
                    status.used, status.cooling
                );
            }
        }
        if is_done || start.elapsed() >= limit {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
}

pub(crate) async fn exec_undrain(
    args: &UndrainArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let inventory = reach.inventory(WantedKinds::NoPods).await?;
    let mut report = DrainReport::default();
    let mut by_node: BTreeMap<String, BTreeSet<Cidr>> = BTreeMap::new();
    if let Some(name) = &args.node {
        let subnet = inventory.subnets.get(name.as_str());
        let subnet = subnet
            .with_context(|| format!("node {name} has no NodeSubnet, so it has no blocks"))?;
        by_node.insert(name.clone(), subnet.requests.drain.clone());
    }
    for cidr in &args.blocks {
        let mut subnets = inventory.subnets.values();
        if let Some(subnet) = subnets.find(|it| it.requests.drain.contains(cidr)) {
            let cidrs = by_node.entry(subnet.name.to_string()).or_default();
            cidrs.insert(*cidr);
        } else {
            let refused = Drained::refused(*cidr, "", "there is no request to drain it");
            report.blocks.push(refused);
        }
    }
    let is_refused = !report.blocks.is_empty();
    for (node, cidrs) in by_node {
        request(
            &node,
            |drain| drain.retain(|cidr| !cidrs.contains(cidr)),
            reach,
        )
        .await?;
        report.blocks.extend(cidrs.iter().map(|cidr| Drained {
            block: *cidr,
            node: node.clone(),
            state: DrainState::TakenBack,
            why: String::new(),
        }));
    }
    render::print(&report, flags.output, Timestamp::now())?;
    Ok(ExitVerdict::of(is_refused))
}

impl VerbReport for DrainReport {
    fn text(&self, style: &Style) -> String {
        let mut table = Columns::new(&["BLOCK", "STATE", "NODE", "WHY"]);
        for it in &self.blocks {
            table.row([
                it.block.to_string(),
                format!("{:?}", it.state),
                it.node.clone(),
                it.why.clone(),
            ]);
        }
        table.text(
            style,
            "There is no block to drain: a node keeps one block of each pool, unless pods on other nodes wait for that pool.",
        )
    }
}
