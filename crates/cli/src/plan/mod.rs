//! `kubectl cadastre plan`: shows the effect of changes without making them.

mod change;
mod judge;
pub(crate) mod whatif;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};

use super::inventory::Inventory;
use super::lists::{ClusterLists, WantedKinds};
use super::reach::{ApiReach, CallError};
use super::{ExitVerdict, Flags, render};
use cadastre_api::{AllocationMode, GROUP, VERSION};
use cadastre_controller::cluster::names::PoolName;
use cadastre_controller::node_balance::must_leave;
use cadastre_core::{Cidr, Family};

pub(crate) use judge::PlanReport;

/// Show what would happen if nodes were added, a pool changed or deleted, or a range drained
///
/// Nothing is changed: the controller's own code runs on a copy of the objects in memory, with the changes applied.
/// Exit code 2 if the changes do not fit.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre plan --add-nodes 200 --label class=gpu --pods-per-node 60
  kubectl cadastre plan --pool-change pool.yaml
  kubectl cadastre plan --delete-pool old --add-nodes 10
  kubectl cadastre plan --drain-cidr 10.250.0.0/16")]
pub(crate) struct PlanArgs {
    /// Number of nodes to add
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub add_nodes: usize,

    /// Label of the added nodes; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    pub label: Vec<(String, String)>,

    /// Number of addresses that each added node needs; by default, each node gets its first block only
    #[arg(long, value_name = "N", requires = "add_nodes")]
    pub pods_per_node: Option<u64>,

    /// File with IPPools to apply, or - for standard input; may be repeated
    #[arg(long, value_name = "FILE")]
    pub pool_change: Vec<PathBuf>,

    /// The IPPools in the files of `pool_change`
    #[arg(skip)]
    pub pools: Vec<serde_json::Value>,

    /// Name of a pool to delete; may be repeated
    #[arg(long, value_name = "NAME")]
    pub delete_pool: Vec<String>,

    /// Range to remove from its pools; nodes then get other blocks for the pods in it; may be repeated
    #[arg(long, value_name = "CIDR", value_parser = cidr)]
    pub drain_cidr: Vec<Cidr>,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn cidr(text: &str) -> Result<Cidr, String> {
    Cidr::parse_strict(text).map_err(|error| error.to_string())
}

/// Applies the changes to a copy of the lists, simulates the controller without and with the changes, and compares the
/// results. Fails if a change is not possible, for example if no pool contains a range to drain.
pub(crate) fn plan(
    lists: &ClusterLists,
    changes: &PlanArgs,
    now: Timestamp,
) -> anyhow::Result<PlanReport> {
    let before = Inventory::new(lists, now);
    let mut then = lists.clone();
    let mut supposed = Vec::new();
    for pool in &changes.pools {
        supposed.push(change::put_pool(&mut then, pool, now)?);
    }
    for name in &changes.delete_pool {
        change::delete_pool(&mut then, name, now)?;
        supposed.push(format!("pool \"{name}\" is deleted"));
    }
    for range in &changes.drain_cidr {
        let pools = change::drain(&mut then, range, &before);
        if pools.is_empty() {
            bail!("no pool has addresses of {range}: nothing there can be drained");
        }
        let pools = pools.join(", ");
        supposed.push(format!("{range} is taken out of pool {pools}"));
    }
    if changes.add_nodes > 0 {
        change::add_nodes(&mut then, changes.add_nodes, &changes.label)?;
        let labels = changes.label.iter();
        let labels: Vec<String> = labels
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let with = if labels.is_empty() { "" } else { " with " };
        let nodes = render::count(changes.add_nodes, "node");
        supposed.push(format!("{nodes}{with}{} added", labels.join(", ")));
    }
    raise_demand(&mut then, changes, now)?;
    let after = Inventory::new(&then, now);
    Ok(judge::judge(&before, &after, changes, supposed))
}

/// Raises demands. The demand of each added node becomes the planned number of addresses plus `warm.low`. If the
/// changes take blocks of a pool from a node, its demand for the pool becomes the number of addresses that its pods
/// use. So the node gets other blocks for the pods that have to move.
fn raise_demand(
    lists: &mut ClusterLists,
    changes: &PlanArgs,
    now: Timestamp,
) -> anyhow::Result<()> {
    let inventory = Inventory::new(lists, now);
    let registry = &inventory.registry;
    for node in inventory.cache.nodes.iter() {
        let best = || {
            let mode = AllocationMode::Blocks;
            let pools = registry
                .pools
                .choices(mode, node, &registry.ledger, |_| false);
            pools.into_iter().next().map(|(name, _)| name)
        };
        if change::is_new(&node.name) {
            if let (Some(pods), Some(pool)) = (changes.pods_per_node, best()) {
                let state = registry.pools.get(&pool);
                let low = state.map_or(0, |it| it.node_view.terms.warm.low);
                change::demand(lists, node, &pool, pods + u64::from(low))?;
            }
            continue;
        }
        // For each pool and family: how many addresses are in use, and whether the node loses a block.
        let mut sums: BTreeMap<(PoolName, Family), (u64, bool)> = BTreeMap::new();
        for entry in inventory.plain_blocks(&node.uid) {
            let pool = registry.pools.get(&entry.pool);
            let leaves = must_leave(entry, node, pool);
            let target = match pool {
                Some(pool) if pool.is_serving() && pool.selects(node) => Some(pool.name.clone()),
                _ if leaves => best(),
                _ => None,
            };
            let Some(target) = target else { continue };
            let sum = sums.entry((target, entry.cidr.family())).or_default();
            sum.0 = sum.0.saturating_add(inventory.used_in(entry));
            sum.1 |= leaves;
        }
        for ((pool, _), (used, leaves)) in sums {
            if leaves && used > 0 {
                change::demand(lists, node, &pool, used)?;
            }
        }
    }
    Ok(())
}

/// Runs `plan`. Returns [`ExitVerdict::Findings`] if the changes do not fit.
pub(crate) async fn exec(
    args: &PlanArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let mut changes = args.clone();
    for path in &args.pool_change {
        let text = if path.as_os_str() == "-" {
            std::io::read_to_string(std::io::stdin())
        } else {
            std::fs::read_to_string(path)
        };
        let shown = path.display();
        let text = text.with_context(|| format!("{shown} cannot be read"))?;
        let pools = change::read_pools(&text).with_context(|| format!("{shown}"))?;
        changes.pools.extend(pools);
    }
    let is_empty = changes.add_nodes == 0
        && changes.pools.is_empty()
        && changes.delete_pool.is_empty()
        && changes.drain_cidr.is_empty();
    if is_empty {
        bail!("nothing to plan: give --add-nodes, --pool-change, --delete-pool or --drain-cidr");
    }
    let lists = reach.lists(WantedKinds::Pods).await?;
    let now = Timestamp::now();
    let mut report = plan(&lists, &changes, now)?;
    for pool in &changes.pools {
        if let Some(refusal) = refusal(pool, reach).await? {
            report.fits = false;
            report.refused.push(refusal);
        }
    }
    render::print(&report, flags.output, now)?;
    Ok(ExitVerdict::of(!report.fits))
}

/// Asks the API server, by a dry run, why it would reject a pool. Returns `None` if the API server would accept the
/// pool. Also returns `None` if the user may not write pools, because the answer is unknown then.
async fn refusal(pool: &serde_json::Value, reach: &ApiReach) -> anyhow::Result<Option<String>> {
    let name = pool["metadata"]["name"].as_str().unwrap_or_default();
    let kind = GroupVersionKind::gvk(GROUP, VERSION, "IPPool");
    let resource = ApiResource::from_gvk(&kind);
    let api: Api<DynamicObject> = Api::all_with(reach.client.clone(), &resource);
    let mut params = PatchParams::apply("kubectl-cadastre").force();
    params.dry_run = true;
    let mut whole = pool.clone();
    whole["apiVersion"] = serde_json::json!(format!("{GROUP}/{VERSION}"));
    let patch = Patch::Apply(&whole);
    match reach.call(api.patch(name, &params, &patch)).await {
        Ok(_) | Err(CallError::Api(403, _)) => Ok(None),
        Err(CallError::Api(400 | 422, why)) => Ok(Some(why)),
        Err(error) => Err(error.into_error("ippools.cadastre.dev")),
    }
}
