//! `kubectl cadastre show`: who has which ranges and addresses.

mod addresses;
mod blocks;
mod nodes;
mod pods;
mod pools;
mod watch;

pub(crate) use blocks::{BlockRow, BlockState, blocks};
pub(crate) use nodes::{node, nodes};
pub(crate) use pods::{handle, pod};
pub(crate) use pools::{PoolRow, pool, pools};

use anyhow::Context as _;
use clap::Subcommand;

use super::inventory::Inventory;
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::{ExitVerdict, Flags, address, render};
use cadastre_core::Addr;

/// Show pools, nodes, blocks and addresses, and who uses them
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre show pools
  kubectl cadastre show pool default -o wide
  kubectl cadastre show node worker-1
  kubectl cadastre show node worker-1 --addresses
  kubectl cadastre show ip 10.244.3.7
  kubectl cadastre show pod kube-system/coredns-abc -o json
  kubectl cadastre show blocks --pool default --watch")]
pub(crate) struct ShowArgs {
    #[command(subcommand)]
    what: What,

    /// Show the result again after each change, until Ctrl-C
    #[arg(short, long, global = true)]
    watch: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List all pools: their ranges and how much of them is free
    Pools,
    /// Show one pool: its state, its counts, and the nodes with most of its ranges
    Pool {
        /// Name of the pool
        name: String,
    },
    /// List all nodes: their ranges and how many addresses are in use
    Nodes,
    /// Show one node: its ranges, blocks and addresses in use
    Node {
        /// Name of the node
        name: String,
        /// List every address of the node with its state; adjacent addresses with the same state are one row
        #[arg(long)]
        addresses: bool,
    },
    /// List blocks and their nodes
    Blocks {
        /// Only blocks of this pool
        #[arg(long)]
        pool: Option<String>,
        /// Only blocks of this node
        #[arg(long)]
        node: Option<String>,
    },
    /// Show any address, in a pool or not: who uses it, since when, and its state
    #[command(visible_alias = "address")]
    Ip {
        /// The IPv4 or IPv6 address
        address: String,
    },
    /// Show the addresses of a pod
    Pod {
        /// Name of the pod, or NAMESPACE/NAME; a name alone is looked up in the namespace of --namespace
        name: String,
    },
    /// Show the addresses with a handle (network name and container id)
    Handle {
        /// The handle, its beginning, or the beginning of the container id
        handle: String,
    },
}

/// Runs `show`. With `--watch`, this function returns only when a watch fails.
pub(crate) async fn exec(
    args: &ShowArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let mut watch = args.watch.then(|| watch::Watch::start(reach));
    loop {
        let inventory = reach.inventory(WantedKinds::Pods).await?;
        if watch.is_some() {
            watch::Watch::clear(flags.output);
        }
        print(&args.what, &inventory, flags, reach)?;
        match &mut watch {
            Some(watch) => watch.changed().await?,
            None => return Ok(ExitVerdict::Clean),
        }
    }
}

fn print(
    what: &What,
    inventory: &Inventory,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<()> {
    let (output, now) = (flags.output, inventory.now);
    match what {
        What::Pools => render::print(&pools(inventory), output, now),
        What::Pool { name } => render::print(&pool(name, inventory)?, output, now),
        What::Nodes => render::print(&nodes(inventory), output, now),
        What::Node { name, addresses } => {
            render::print(&node(name, *addresses, inventory)?, output, now)
        }
        What::Blocks { pool, node } => {
            let report = blocks(pool.as_deref(), node.as_deref(), inventory)?;
            render::print(&report, output, now)
        }
        What::Ip { address } => {
            let addr = read_address(address)?;
            render::print(&address::describe(addr, inventory), output, now)
        }
        What::Pod { name } => {
            let name = pod_name(name, &reach.namespace);
            render::print(&pod(&name, inventory)?, output, now)
        }
        What::Handle { handle: text } => render::print(&handle(text, inventory)?, output, now),
    }
}

/// Parses an address as users write it. A prefix length after the address is ignored.
pub(crate) fn read_address(text: &str) -> anyhow::Result<Addr> {
    let bare = text.split('/').next().unwrap_or_default();
    Addr::parse_lenient(bare).with_context(|| {
        format!("\"{text}\" is no address: write one such as 10.244.3.7 or fd00:10:244::7")
    })
}

/// Returns a pod as `namespace/name`. A name without a namespace gets `namespace`.
pub(crate) fn pod_name(text: &str, namespace: &str) -> String {
    if text.contains('/') {
        text.to_owned()
    } else {
        format!("{namespace}/{text}")
    }
}
