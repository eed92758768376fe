//! `kubectl cadastre plan`: shows the effect of changes without making them.

mod change;
mod judge;
pub(crate) mod whatif;

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};

use super::inventory::Inventory;
use super::lists::{ClusterLists, WantedKinds};
use super::reach::{ApiReach, CallError};
use super::{ExitVerdict, Flags, render};
use cadastre_api::{AllocationMode, GROUP, VERSION};
use cadastre_controller::node_balance::must_leave;
use cadastre_core::Cidr;

pub use judge::{AffectedObject, PlanReport, PoolPlan};

/// Show what would happen if nodes were added, a pool changed or deleted, or a range drained
///
/// Nothing is changed: the controller's own code runs on a copy of the objects in memory, with the changes applied.
/// Exit code 2 if the changes do not fit.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre plan --add-nodes 200 --label class=gpu --pods-per-node 60
  kubectl cadastre plan --pool-change pool.yaml
  kubectl cadastre plan --delete-pool old --add-nodes 10
  kubectl cadastre plan --drain-cidr 10.250.0.0/16")]
pub struct PlanArgs {
    /// Number of nodes to add
    #[arg(long, value_name = "N", default_value_t = 0)]
    add_nodes: usize,

    /// Label of the added nodes; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(String, String)>,

    /// Number of addresses that each added node needs; by default each gets its first block
    #[arg(long, value_name = "N", requires = "add_nodes")]
    pods_per_node: Option<u64>,

    /// File with IPPools to apply, or - for standard input; may be repeated
    #[arg(long, value_name = "FILE")]
    pool_change: Vec<PathBuf>,

    /// Name of a pool to delete; may be repeated
    #[arg(long, value_name = "NAME")]
    delete_pool: Vec<String>,

    /// Range to take out of its pools, so that everything in it must move; may be repeated
    #[arg(long, value_name = "CIDR", value_parser = cidr)]
    drain_cidr: Vec<Cidr>,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn cidr(text: &str) -> Result<Cidr, String> {
    Cidr::parse_strict(text).map_err(|error| error.to_string())
}

/// The changes whose effect `plan` shows.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// The number of nodes to add
    pub add_nodes: usize,
    /// The labels of the added nodes
    pub labels: Vec<(String, String)>,
    /// The number of addresses that each added node needs; `None`: only the first block
    pub pods_per_node: Option<u64>,
    /// IPPools to apply
    pub pools: Vec<serde_json::Value>,
    /// Names of pools to delete
    pub delete_pools: Vec<String>,
    /// Ranges to take out of their pools
    pub drain: Vec<Cidr>,
}

/// Applies the changes to a copy of the lists, simulates the controller before and after, and compares the results.
/// Fails if a change is not possible, for example if no pool contains a range to drain.
pub fn plan(
    lists: &ClusterLists,
    changes: &Changes,
    now: jiff::Timestamp,
) -> anyhow::Result<PlanReport> {
    let before = Inventory::new(lists, now);
    let mut then = lists.clone();
    let mut said = Vec::new();
    for pool in &changes.pools {
        said.push(change::put_pool(&mut then, pool, now)?);
    }
    for name in &changes.delete_pools {
        change::delete_pool(&mut then, name, now)?;
        said.push(format!("pool \"{name}\" is deleted"));
    }
    for range in &changes.drain {
        let pools = change::drain(&mut then, range, &before);
        if pools.is_empty() {
            bail!("no pool has addresses of {range}: nothing there can be drained");
        }
        said.push(format!("{range} is taken out of pool {}", pools.join(", ")));
    }
    if changes.add_nodes > 0 {
        change::add_nodes(&mut then, changes.add_nodes, &changes.labels)?;
        let labels = changes
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"));
        let labels: Vec<String> = labels.collect();
        let with = if labels.is_empty() {
            String::new()
        } else {
            format!(" with {}", labels.join(", "))
        };
        said.push(format!(
            "{}{with} added",
            render::count(changes.add_nodes, "node")
        ));
    }
    settle_demand(&mut then, changes, now)?;
    let after = Inventory::new(&then, now);
    Ok(judge::judge(&before, &after, changes, said))
}

/// Raises the demand of each added node to the planned number of addresses plus `warm.low`. Raises the demand of a node
/// whose blocks must leave to the number of addresses in use, so that there is room for those that have to move.
fn settle_demand(
    lists: &mut ClusterLists,
    changes: &Changes,
    now: jiff::Timestamp,
) -> anyhow::Result<()> {
    let inventory = Inventory::new(lists, now);
    let registry = &inventory.registry;
    let mut wants: Vec<(String, String, String, u64)> = Vec::new();
    for node in inventory.cache.nodes.iter() {
        let full = std::collections::BTreeMap::<_, String>::new();
        let best = || {
            let choices =
                registry
                    .pools
                    .choices(AllocationMode::Blocks, node, &registry.ledger, &full);
            choices.into_iter().next().map(|(name, _)| name)
        };
        if change::is_new(&node.name) {
            if let (Some(pods), Some(pool)) = (changes.pods_per_node, best()) {
                let low = registry
                    .pools
                    .get(&pool)
                    .map_or(0, |it| it.node_view.terms.warm.low);
                let wanted = pods + u64::from(low);
                wants.push((
                    node.name.to_string(),
                    node.uid.to_string(),
                    pool.to_string(),
                    wanted,
                ));
            }
            continue;
        }
        let mut sums = std::collections::BTreeMap::new();
        for entry in registry.blocks.of(&node.uid) {
            let pool = registry.pools.get(&entry.pool);
            let leaves = must_leave(entry, node, pool);
            let place = match pool {
                Some(pool) if pool.is_serving() && pool.selects(node) => Some(pool.name.clone()),
                _ if leaves => best(),
                _ => None,
            };
            let Some(place) = place else { continue };
            let sum: &mut (u64, bool) = sums.entry((place, entry.cidr.family())).or_default();
            sum.0 = sum.0.saturating_add(inventory.used_in(entry));
            sum.1 |= leaves;
        }
        for ((pool, _), (used, leaves)) in sums {
            if leaves && used > 0 {
                wants.push((
                    node.name.to_string(),
                    node.uid.to_string(),
                    pool.to_string(),
                    used,
                ));
            }
        }
    }
    for (node, uid, pool, addresses) in wants {
        change::demand(lists, &node, &uid, &pool, addresses)?;
    }
    Ok(())
}

/// Runs `plan`; [`ExitVerdict::Findings`] if the changes do not fit.
pub async fn exec(args: &PlanArgs, flags: &Flags, reach: &ApiReach) -> anyhow::Result<ExitVerdict> {
    let mut changes = Changes {
        add_nodes: args.add_nodes,
        labels: args.label.clone(),
        pods_per_node: args.pods_per_node,
        pools: Vec::new(),
        delete_pools: args.delete_pool.clone(),
        drain: args.drain_cidr.clone(),
    };
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
    let nothing = changes.add_nodes == 0
        && changes.pools.is_empty()
        && changes.delete_pools.is_empty()
        && changes.drain.is_empty();
    if nothing {
        bail!("nothing to plan: give --add-nodes, --pool-change, --delete-pool or --drain-cidr");
    }
    let lists = reach.lists(WantedKinds::PODS).await?;
    let now = jiff::Timestamp::now();
    let mut report = plan(&lists, &changes, now)?;
    for pool in &changes.pools {
        if let Some(refusal) = refusal(pool, reach).await? {
            report.fits = false;
            report.refused.push(refusal);
        }
    }
    render::print(&report, flags.output, now)?;
    Ok(if report.fits {
        ExitVerdict::Clean
    } else {
        ExitVerdict::Findings
    })
}

/// Returns why the API server would reject a pool, by a dry run. `None` if it would accept the pool, or if the user may
/// not write pools, so that nobody knows.
async fn refusal(pool: &serde_json::Value, reach: &ApiReach) -> anyhow::Result<Option<String>> {
    let name = pool["metadata"]["name"].as_str().unwrap_or_default();
    let kind = GroupVersionKind::gvk(GROUP, VERSION, "IPPool");
    let api: Api<DynamicObject> =
        Api::all_with(reach.client.clone(), &ApiResource::from_gvk(&kind));
    let mut params = PatchParams::apply("kubectl-cadastre").force();
    params.dry_run = true;
    let mut whole = pool.clone();
    whole["apiVersion"] = serde_json::json!(format!("{GROUP}/{VERSION}"));
    let answer = reach
        .call(api.patch(name, &params, &Patch::Apply(&whole)))
        .await;
    match answer {
        Ok(_) | Err(CallError::Api(403, _)) => Ok(None),
        Err(CallError::Api(400 | 422, why)) => Ok(Some(why)),
        Err(trouble) => Err(trouble.into_error("ippools.cadastre.dev")),
    }
}
