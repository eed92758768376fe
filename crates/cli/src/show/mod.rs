//! `kubectl cadastre show`: who holds what.

mod blocks;
mod nodes;
mod pods;
mod pools;
mod watch;

pub use blocks::{BlockRow, BlockState, BlocksReport, blocks};
pub use nodes::{NodeReport, NodeRow, NodesReport, agent_of, node, nodes};
pub use pods::{AllocationRow, PodReport, handle, pod};
pub use pools::{PoolReport, PoolRow, PoolsReport, pool, pools};

use anyhow::Context as _;
use clap::Subcommand;

use super::inventory::Inventory;
use super::lists::Wanted;
use super::reach::Reach;
use super::{Flags, Verdict, address, render};
use cadastre_core::Addr;

/// Show who holds what: pools, nodes, blocks, and any address
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre show pools
  kubectl cadastre show pool default -o wide
  kubectl cadastre show node worker-1
  kubectl cadastre show ip 10.244.3.7
  kubectl cadastre show pod kube-system/coredns-abc -o json
  kubectl cadastre show blocks --pool default --watch")]
pub struct Args {
    #[command(subcommand)]
    what: What,

    /// Show it again whenever something changes
    #[arg(short, long, global = true)]
    watch: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// All pools: ranges, and how much of them is left
    Pools,
    /// One pool: its standing, figures, and who holds most of it
    Pool {
        /// Its name
        name: String,
    },
    /// All nodes: what they hold, and how much of it is in use
    Nodes,
    /// One node: its ranges, blocks and addresses in use
    Node {
        /// Its name
        name: String,
    },
    /// Blocks and who has them
    Blocks {
        /// Of this pool only
        #[arg(long)]
        pool: Option<String>,
        /// Of this node only
        #[arg(long)]
        node: Option<String>,
    },
    /// Any address, in or out of any pool: who has it, since when, in which state
    #[command(visible_alias = "address")]
    Ip {
        /// The address
        address: String,
    },
    /// The addresses of a pod
    Pod {
        /// namespace/name, or name in the namespace of --namespace
        name: String,
    },
    /// The addresses that were given under a handle (network name and container id)
    Handle {
        /// The handle, or the beginning of it or of the container id
        handle: String,
    },
}

/// Runs the verb.
pub async fn exec(args: &Args, flags: &Flags, reach: &Reach) -> anyhow::Result<Verdict> {
    let mut watch = args.watch.then(|| watch::Watch::start(reach));
    loop {
        let inventory = reach.inventory(Wanted::PODS).await?;
        if watch.is_some() {
            watch::Watch::clear(flags.output);
        }
        print(&args.what, &inventory, flags, reach)?;
        match &mut watch {
            Some(watch) => watch.changed().await?,
            None => return Ok(Verdict::Clean),
        }
    }
}

fn print(what: &What, inventory: &Inventory, flags: &Flags, reach: &Reach) -> anyhow::Result<()> {
    let (output, now) = (flags.output, inventory.now);
    match what {
        What::Pools => render::print(&pools(inventory), output, now),
        What::Pool { name } => render::print(&pool(name, inventory)?, output, now),
        What::Nodes => render::print(&nodes(inventory), output, now),
        What::Node { name } => render::print(&node(name, inventory)?, output, now),
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

/// An address as people write it; a prefix length is passed over.
pub(crate) fn read_address(text: &str) -> anyhow::Result<Addr> {
    let bare = text.split('/').next().unwrap_or_default();
    Addr::parse_lenient(bare).with_context(|| {
        format!("\"{text}\" is no address: write one such as 10.244.3.7 or fd00:10:244::7")
    })
}

/// `namespace/name`, with the namespace of the flags where none is given.
pub fn pod_name(text: &str, namespace: &str) -> String {
    if text.contains('/') {
        text.to_owned()
    } else {
        format!("{namespace}/{text}")
    }
}
