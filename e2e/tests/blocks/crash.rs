//! A controller that is killed while it works, and the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cadastre_core::Cidr;
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures, Options, TestCluster};
use kube::api::ListParams;
use serde_json::json;

use crate::node;

const LIMIT: Duration = Duration::from_secs(180);
const NODES: usize = 12;
/// A Lease that expires within seconds.
const FLAGS: [&str; 6] = [
    "--lease-duration",
    "4",
    "--renew-deadline",
    "3",
    "--retry-period",
    "1",
];

/// The listed blocks by node, which must not overlap.
async fn lists(hand: &Fixtures) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
    let subnets = hand.subnets.list(&ListParams::default()).await?;
    let mut all: Vec<Cidr> = Vec::new();
    let mut lists = BTreeMap::new();
    for subnet in subnets {
        let cidrs = subnet.spec.blocks.iter().map(|it| it.cidr.clone());
        let cidrs: BTreeSet<String> = cidrs.collect();
        for cidr in &cidrs {
            let cidr = Cidr::parse_strict(cidr).unwrap();
            let other = all.iter().find(|it| it.overlaps(&cidr));
            assert!(other.is_none(), "{cidr} and {other:?} are both listed");
            all.push(cidr);
        }
        lists.insert(subnet.metadata.name.unwrap_or_default(), cidrs);
    }
    Ok(lists)
}

#[tokio::test]
async fn killed_at_any_moment_no_block_is_lost_or_given_twice() {
    let mut stage = TestCluster::start(Options::default(), &FLAGS)
        .await
        .unwrap();
    let hand = stage.fixtures().await.unwrap();
    let agents = Agents::start(hand.client.clone());
    let spec = json!({"ipv4": {"cidrs": ["10.80.0.0/18"], "blockSize": 28}, "idleSeconds": 0});
    hand.block_pool("crash", spec).await.unwrap();
    let names: Vec<String> = (0..NODES).map(|i| format!("crash-{i}")).collect();
    for name in &names {
        node(&hand, &agents, "crash", name).await;
        agents.ask(name, "crash", 30 * 16).unwrap();
    }
    for round in 1..=4 {
        // The controller is killed while blocks are created, listed and released.
        until("work is under way", LIMIT, async || {
            let made = hand.blocks_of("crash").await?.len();
            Ok((made >= 15 * round).then_some(()))
        })
        .await
        .unwrap();
        for (i, name) in names.iter().enumerate() {
            let some = if (i + round) % 2 == 0 { 30 } else { 5 };
            agents.ask(name, "crash", some * 16).unwrap();
            agents
                .try_allocate(name, "crash", &format!("{name}-{round}"))
                .unwrap();
        }
        stage.controller.process().kill().unwrap();
        lists(&hand).await.unwrap();
        stage.controller = start_controller(&stage.control_plane, ADMIN, &FLAGS).unwrap();
        stage.controller.wait_ready(LIMIT).await.unwrap();
    }
    for name in &names {
        agents.ask(name, "crash", 8 * 16).unwrap();
    }
    // In the end every node has the blocks it demands, and every IPAMBlock is listed.
    until("all is settled", LIMIT, async || {
        let lists = lists(&hand).await?;
        let listed: BTreeSet<String> = lists.values().flatten().cloned().collect();
        let objects: BTreeSet<String> = hand.blocks_of("crash").await?.into_iter().collect();
        let counts: Vec<usize> = lists.values().map(BTreeSet::len).collect();
        anyhow::ensure!(
            listed == objects,
            "{:?}",
            listed.symmetric_difference(&objects)
        );
        anyhow::ensure!(counts.iter().all(|it| *it == 8), "{counts:?}");
        Ok(Some(()))
    })
    .await
    .unwrap();
    for name in &names {
        for report in agents.blocks(name).unwrap() {
            let listed = hand.listed(name, 8).await.unwrap();
            assert!(
                report.used == 0 || listed.contains(&report.cidr),
                "{report:?}"
            );
        }
    }
}
