//! The controller's guarantees about blocks, on a real API server with real agents.
//!
//! Most tests share one control plane and one controller. Each test has its own group (a label of its nodes, which its
//! pools select) and its own ranges, so that tests do not affect each other.
//!
//! | file | subject |
//! |---|---|
//! | `first` | which nodes get a first block, and when |
//! | `demand` | many blocks, limits, both families or neither, reserved addresses |
//! | `releasing` | surplus blocks and deselected nodes |
//! | `exhaustion` | exhausted pools, and from which nodes blocks are recalled |
//! | `pools` | pools that change or are deleted while nodes have blocks of them |
//! | `deleted_nodes` | blocks of deleted nodes |
//! | `leaks` | addresses whose pods are gone |
//! | `lending` | parts of blocks that other nodes borrow |
//! | `claims` | addresses that stay with a workload |
//! | `sticky` | addresses that stay with the ordinals of a StatefulSet |
//! | `addresses` | pods that ask for certain addresses |
//! | `cni_requests` | pods for which the runtime asks for certain addresses |
//! | `requests` | requests that people make by annotations |
//! | `manual_edits` | objects that users edit or delete by hand |
//! | `agent_statuses` | statuses that make no sense |
//! | `frr` | FRRConfigurations, which announce the ranges of nodes |
//! | `crash` | a controller that is killed while it works |

#![allow(clippy::unwrap_used)] // allowed in helpers as in tests

mod addresses;
mod agent_statuses;
mod claims;
mod cni_requests;
mod crash;
mod deleted_nodes;
mod demand;
mod exhaustion;
mod first;
mod frr;
mod leaks;
mod lending;
mod manual_edits;
mod migration;
mod pools;
mod releasing;
mod requests;
mod sticky;

use anyhow::Result;
use cadastre_api::{NodeSubnet, Recall};
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures, Options, TestCluster};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::OnceCell;

/// Returns the cluster that most tests share, a new [`Fixtures`], and new agents for this test.
async fn shared() -> Result<(&'static TestCluster, Fixtures, Agents)> {
    static CLUSTER: OnceCell<TestCluster> = OnceCell::const_new();
    let flags = ["--log-level", "debug", "--leak-grace", "2"];
    let start = || TestCluster::start(Options::default(), &flags);
    let cluster = CLUSTER.get_or_try_init(start).await?;
    let fixtures = cluster.fixtures().await?;
    let agents = Agents::new(&cluster.control_plane)?;
    Ok((cluster, fixtures, agents))
}

/// Creates a node and starts its agent.
async fn node(fixtures: &Fixtures, agents: &Agents, group: &str, name: &str) -> Result<Node> {
    let node = fixtures.node(group, name).await?;
    agents.join(&node)?;
    Ok(node)
}

/// Waits until the pool has `count` blocks, and returns their CIDRs.
async fn blocks(fixtures: &Fixtures, pool: &str, count: usize) -> Result<Vec<String>> {
    let what = format!("pool {pool} has {count} blocks");
    until(&what, LIMIT, async || {
        let blocks = fixtures.blocks_of(pool).await?;
        anyhow::ensure!(blocks.len() == count, "{blocks:?}");
        Ok(Some(blocks))
    })
    .await
}

/// Waits until all blocks of a node have the recall `Drain`.
async fn drains(fixtures: &Fixtures, node: &str) -> Result<()> {
    let is_draining = |it: &NodeSubnet| {
        let mut blocks = it.spec.blocks.iter();
        blocks.all(|it| it.recall == Some(Recall::Drain))
    };
    let subnet = fixtures.subnet_until(node, "drains", is_draining);
    subnet.await?;
    Ok(())
}

/// Returns the field `recall` of a block in the node's NodeSubnet. Panics if the block is not listed.
async fn recall(fixtures: &Fixtures, node: &str, cidr: &str) -> Result<Option<Recall>> {
    let subnet = fixtures.subnets.get(node).await?;
    let block = subnet.spec.blocks.iter().find(|it| it.cidr == cidr);
    Ok(block.unwrap().recall)
}
