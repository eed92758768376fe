//! `kubectl cadastre drain` and `undrain`: ask nodes to release blocks, and cancel such requests.
//!
//! `drain` writes the request to the annotation `cadastre.dev/drain` of the node's NodeSubnet. From then on, no new
//! address is assigned from the block, and the block returns to its pool once it is empty. Running pods keep their
//! addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use serde::Serialize;

use super::inventory::{Inventory, SubnetFact};
use super::lists::WantedKinds;
use super::plan::whatif::simulate_now;
use super::reach::{ApiReach, WriteOutcome};
use super::render::{self, Columns, Style, VerbReport};
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

    /// Drain the empty blocks that this node does not need. It keeps one block of each pool, unless pods on other nodes
    /// wait for that pool, or the pool allocates blocks only on demand
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
    let cidr = Cidr::parse_lenient(text).map_err(|error| error.to_string())?;
    Ok(cidr)
}

/// At most this many attempts at a write, which fails if the NodeSubnet has changed since it was read.
const TRIES: usize = 8;
/// The time between two reads of the NodeSubnets with `--wait`.
const LOOK: Duration = Duration::from_millis(500);

/// The report of `drain` and `undrain`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct DrainReport {
    /// One entry for each block
    pub blocks: Vec<Drained>,
}

/// The result of `drain` or `undrain` for one block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Drained {
    /// The CIDR of the block
    pub block: Cidr,
    /// The node to which the block is allocated; empty if unknown
    pub node: String,
    /// The state of the request
    pub state: DrainState,
    /// An explanation for users; may be empty
    pub why: String,
}

/// The state of a request to drain a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum DrainState {
    /// The request is written.
    Draining,
    /// The request would be written without `--dry-run`.
    WouldDrain,
    /// The block is back in its pool.
    Returned,
    /// The request is cancelled.
    TakenBack,
    /// Nothing is written: the block cannot be drained, or there is no request to cancel.
    Refused,
}

/// Returns the empty blocks that the node with this UID does not need. The node keeps one block of each pool and
/// family. A node that has no address of a pool in use keeps no block of the pool in two cases: pods on other nodes
/// wait for the pool (`wanted`), or the pool allocates blocks only on demand.
pub fn surplus(uid: &ObjectUid, inventory: &Inventory, wanted: &BTreeSet<PoolName>) -> Vec<Cidr> {
    let mut kept: BTreeMap<(&str, Family), bool> = BTreeMap::new();
    let entries: Vec<&BlockEntry> = inventory
        .registry
        .blocks
        .of(uid)
        .filter(|it| it.is_held())
        .collect();
    let empty = |entry: &BlockEntry| {
        inventory
            .block_status(entry)
            .is_some_and(|word| word.used + word.cooling == 0 && !word.released)
    };
    // A block in use stays in any case, so the node need not keep an empty one of its pool and family.
    let mut used: BTreeSet<&str> = BTreeSet::new();
    for entry in entries.iter().filter(|entry| !empty(entry)) {
        kept.insert((&entry.pool, entry.cidr.family()), true);
        used.insert(&entry.pool);
    }
    let is_wanted = |pool: &PoolName| {
        let state = inventory.registry.pools.get(pool);
        let state = state.filter(|it| it.is_serving());
        state.is_some_and(|it| !it.terms.first_immediate || wanted.contains(pool))
    };
    let mut surplus = Vec::new();
    for entry in entries.iter().filter(|entry| empty(entry)) {
        let has_one = kept.entry((&entry.pool, entry.cidr.family())).or_default();
        let goes = !used.contains(&*entry.pool) && is_wanted(&entry.pool);
        if std::mem::replace(has_one, true) || goes {
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

/// Returns the node whose NodeSubnet gets the request to drain the block. `Err`: the block cannot be drained, with the
/// reason.
pub fn judge(cidr: Cidr, inventory: &Inventory) -> Result<String, Drained> {
    let refused = |node: &str, why: String| Drained {
        block: cidr,
        node: node.to_owned(),
        state: DrainState::Refused,
        why,
    };
    let Some(entry) = inventory.registry.blocks.get(&cidr) else {
        let mut around = inventory
            .registry
            .blocks
            .iter()
            .filter(|it| it.cidr.overlaps(&cidr));
        let why = around.next().map_or(
            "there is no such block (kubectl cadastre show blocks)".to_owned(),
            |it| format!("there is no such block: did you mean {}?", it.cidr),
        );
        return Err(refused("", why));
    };
    let node = &entry.owner.name;
    if entry.owner.quarantined {
        return Err(refused(
            node,
            "its node is gone: it is free once its quarantine is over".to_owned(),
        ));
    }
    let listed = inventory
        .subnets
        .get(node)
        .and_then(|it| it.spec.as_ref().ok());
    let text = cidr.to_string();
    if !listed.is_some_and(|spec| spec.blocks.iter().any(|held| held.cidr == text)) {
        return Err(refused(
            node,
            format!("node {node} does not list it (yet): see kubectl cadastre show node {node}"),
        ));
    }
    Ok(node.to_string())
}

/// Changes the drain requests of a node with `change`, and removes requests for blocks that the node no longer has.
/// Retries if the NodeSubnet was changed at the same time.
async fn ask(
    node: &str,
    change: impl Fn(&mut BTreeSet<Cidr>),
    reach: &ApiReach,
) -> anyhow::Result<()> {
    for _ in 0..TRIES {
        let subnet = reach.subnet(node).await?;
        let subnet =
            subnet.with_context(|| format!("NodeSubnet {node} is gone: its node was deleted"))?;
        let subnet = SubnetFact::read(&subnet, None);
        let mut requests = subnet.requests.clone();
        change(&mut requests.drain);
        if let Ok(spec) = &subnet.spec {
            let listed: BTreeSet<&str> = spec.blocks.iter().map(|it| it.cidr.as_str()).collect();
            requests
                .drain
                .retain(|cidr| listed.contains(cidr.to_string().as_str()));
        }
        if requests == subnet.requests {
            return Ok(());
        }
        let text = requests.drain_text();
        let written = reach
            .annotate(node, &subnet.version, DRAIN_ANNOTATION, text.as_deref())
            .await?;
        if written == WriteOutcome::Done {
            return Ok(());
        }
    }
    bail!("NodeSubnet {node} changes too fast to be written to: try again")
}

pub(crate) async fn exec_drain(
    args: &DrainArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let inventory = reach.inventory(WantedKinds::PODS).await?;
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
    for (node, cidrs) in &by_node {
        if !args.dry_run {
            ask(node, |drain| drain.extend(cidrs.iter().copied()), reach).await?;
        }
        for cidr in cidrs {
            let used = inventory
                .registry
                .blocks
                .get(cidr)
                .map_or(0, |it| inventory.used_in(it));
            report.blocks.push(Drained {
                block: *cidr,
                node: node.clone(),
                state: if args.dry_run {
                    DrainState::WouldDrain
                } else {
                    DrainState::Draining
                },
                why: match used {
                    0 => "it is empty".to_owned(),
                    used => format!("it returns when its {used} addresses in use are released"),
                },
            });
        }
    }
    if args.wait && !args.dry_run {
        wait(&mut report, Duration::from_secs(args.timeout.into()), reach).await?;
        for node in by_node.keys() {
            if reach.subnet(node).await?.is_some() {
                ask(node, |_| {}, reach).await?;
            }
        }
    }
    render::print(&report, flags.output, Timestamp::now())?;
    let undone = |it: &Drained| {
        it.state == DrainState::Refused || (args.wait && it.state == DrainState::Draining)
    };
    Ok(if report.blocks.iter().any(undone) {
        ExitVerdict::Findings
    } else {
        ExitVerdict::Clean
    })
}

/// Waits until no NodeSubnet lists the blocks any more, for at most the time `limit`.
async fn wait(report: &mut DrainReport, limit: Duration, reach: &ApiReach) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let mut open = 0;
        for it in report
            .blocks
            .iter_mut()
            .filter(|it| it.state == DrainState::Draining)
        {
            let subnet = reach
                .subnet(&it.node)
                .await?
                .map(|subnet| SubnetFact::read(&subnet, None));
            let text = it.block.to_string();
            let spec = subnet.as_ref().and_then(|subnet| subnet.spec.as_ref().ok());
            let listed = spec.is_some_and(|spec| spec.blocks.iter().any(|held| held.cidr == text));
            if !listed {
                (it.state, it.why) = (DrainState::Returned, String::new());
                continue;
            }
            open += 1;
            let words = subnet.iter().flat_map(|subnet| &subnet.blocks);
            if let Some(word) = words.into_iter().find(|word| word.cidr == text) {
                it.why = format!(
                    "it still has {} addresses in use and {} in cooldown",
                    word.used, word.cooling
                );
            }
        }
        if open == 0 || start.elapsed() >= limit {
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
}

pub(crate) async fn exec_undrain(
    args: &UndrainArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let inventory = reach.inventory(WantedKinds::default()).await?;
    let mut report = DrainReport::default();
    let asked = |cidr: &Cidr| {
        let subnets = inventory.subnets.values();
        let mut asked = subnets.filter(|subnet| subnet.requests.drain.contains(cidr));
        asked.next().map(|subnet| subnet.name.to_string())
    };
    let mut by_node: BTreeMap<String, BTreeSet<Cidr>> = BTreeMap::new();
    if let Some(name) = &args.node {
        let subnet = inventory.subnets.get(name.as_str());
        let subnet = subnet
            .with_context(|| format!("node {name} has no NodeSubnet, so it has no blocks"))?;
        by_node.insert(name.clone(), subnet.requests.drain.clone());
    }
    for cidr in &args.blocks {
        match asked(cidr) {
            Some(node) => {
                by_node.entry(node).or_default().insert(*cidr);
            }
            None => report.blocks.push(Drained {
                block: *cidr,
                node: String::new(),
                state: DrainState::Refused,
                why: "there is no request to drain it".to_owned(),
            }),
        }
    }
    for (node, cidrs) in by_node {
        ask(
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
    let refused = report
        .blocks
        .iter()
        .any(|it| it.state == DrainState::Refused);
    Ok(if refused {
        ExitVerdict::Findings
    } else {
        ExitVerdict::Clean
    })
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
