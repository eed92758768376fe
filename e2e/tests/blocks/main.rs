//! What the controller promises about affinity blocks, on a real API server with test agents.
//!
//! Most tests share one control plane and one controller: each works in a group of its own (a label
//! of its nodes, which its pools select) and with ranges of its own, so none sees another.
//!
//! | file | subject |
//! |---|---|
//! | `first` | who gets a first block, and when |
//! | `demand` | many blocks, limits, both families or neither, reserved addresses |
//! | `giving_back` | surplus and deselected nodes |
//! | `short` | what happens when a pool has none left, and who gives |
//! | `pools` | pools that change and go while nodes have blocks of them |
//! | `dead` | what becomes of a dead node's blocks |
//! | `leaks` | addresses whose pods are gone |
//! | `requests` | what people ask of a node by annotations |
//! | `mending` | objects edited and deleted by hand |
//! | `trust` | statuses that make no sense |
//! | `crash` | a controller that is killed at work |

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod crash;
mod dead;
mod demand;
mod first;
mod giving_back;
mod leaks;
mod mending;
mod pools;
mod requests;
mod short;
mod trust;

use cadastre_api::Recall;
use cadastre_e2e::hand::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Hand, Options, Stage};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

/// The stage that most tests share, a hand and agents for this one.
async fn shared() -> (&'static Stage, Hand, Agents) {
    static STAGE: OnceCell<Stage> = OnceCell::const_new();
    let start = || async {
        Stage::start(
            Options::default(),
            &["--log-level", "debug", "--leak-grace", "2"],
        )
        .await
        .unwrap()
    };
    let stage = STAGE.get_or_init(start).await;
    let hand = stage.hand().await.unwrap();
    let agents = Agents::start(hand.client.clone());
    (stage, hand, agents)
}

/// A node with an agent.
async fn node(hand: &Hand, agents: &Agents, group: &str, name: &str) -> Node {
    let node = hand.node(group, name).await.unwrap();
    agents.join(&node);
    node
}

/// Waits until that many blocks of the pool exist, and returns their CIDRs.
async fn blocks(hand: &Hand, pool: &str, count: usize) -> Vec<String> {
    let what = format!("pool {pool} has {count} blocks");
    until(&what, LIMIT, async || {
        let blocks = hand.blocks_of(pool).await?;
        anyhow::ensure!(blocks.len() == count, "{blocks:?}");
        Ok(Some(blocks))
    })
    .await
    .unwrap()
}

/// Speaks for a node's agent.
async fn say(hand: &Hand, node: &str, status: Value) {
    let patch = Patch::Merge(json!({ "status": status }));
    hand.subnets
        .patch_status(node, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// How a block that the node has is asked back.
async fn recall(hand: &Hand, node: &str, cidr: &str) -> Option<Recall> {
    let subnet = hand.subnets.get(node).await.unwrap();
    let block = subnet.spec.blocks.iter().find(|it| it.cidr == cidr);
    block.unwrap().recall
}
