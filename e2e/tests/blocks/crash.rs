//! A controller is killed while it works, and the next one takes over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;
use cadastre_api::NodeSubnet;
use cadastre_core::{Addr, Cidr};
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, Fixtures, Options, TestCluster};
use futures::future::try_join_all;
use kube::api::ListParams;
use serde_json::json;

use crate::node;

const LIMIT: Duration = Duration::from_secs(180);
const NODES: usize = 12;

/// Returns the CIDRs of all IPAMBlocks.
async fn objects(fixtures: &Fixtures) -> Result<BTreeSet<String>> {
    let blocks = fixtures.blocks.list(&ListParams::default()).await?;
    Ok(blocks.into_iter().map(|it| it.spec.cidr).collect())
}

/// Returns, for each node, the blocks that its NodeSubnet lists. Asserts that no two of all these blocks overlap.
async fn lists(fixtures: &Fixtures) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let subnets = fixtures.subnets.list(&ListParams::default()).await?;
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

/// Changes the demand of all nodes in one half. Each of these nodes then demands 16 * `blocks` addresses more than it
/// uses.
async fn demand(fixtures: &Fixtures, half: usize, blocks: u32) -> Result<()> {
    let name = format!("half{half}-1");
    let warm = json!({"warm": {"low": blocks * 16, "high": blocks * 16}});
    fixtures.change_pool(&name, warm).await?;
    Ok(())
}

#[tokio::test]
async fn if_the_controller_is_killed_at_any_moment_no_block_is_lost_or_allocated_twice()
-> Result<()> {
    let mut cluster = TestCluster::start(Options::default(), &[]).await?;
    let fixtures = cluster.fixtures().await?;
    let agents = Agents::new(&cluster.control_plane)?;
    // Each half of the nodes has a pool of its own, so that one half can demand more while the other half demands less.
    for (half, range) in ["10.80.0.0/19", "10.80.32.0/19"].into_iter().enumerate() {
        let spec = json!({
            "ipv4": {"cidrs": [range], "blockSize": 28, "gateway": "None"}, "idleSeconds": 0,
            "warm": {"low": 30 * 16, "high": 30 * 16},
        });
        let name = format!("half{half}-1");
        fixtures.block_pool(&name, spec).await?;
    }
    let names: Vec<String> = (0..NODES).map(|i| format!("crash-{i}")).collect();
    for (i, name) in names.iter().enumerate() {
        node(&fixtures, &agents, &format!("half{}", i % 2), name).await?;
    }
    // While no controller runs, a node cannot serve pods if its NodeSubnet lists no pool yet. So the test first waits
    // until each NodeSubnet lists a pool and each agent has reported.
    for name in &names {
        let has_reported = |it: &NodeSubnet| {
            let status = it.status.as_ref();
            status.is_some_and(|it| it.node_uid.is_some()) && !it.spec.pools.is_empty()
        };
        let what = "its agent knows its pool";
        fixtures.subnet_until(name, what, has_reported).await?;
    }
    let mut pods = BTreeMap::new();
    for round in 1..=4 {
        let before = objects(&fixtures).await?;
        for half in 0..2 {
            let blocks = if (half + round) % 2 == 0 { 30 } else { 5 };
            demand(&fixtures, half, blocks).await?;
        }
        let adds = names.iter().enumerate().map(async |(i, name)| {
            let (pool, pod) = (format!("half{}-1", i % 2), format!("{name}-{round}"));
            agents.try_allocate(name, &pool, &pod).await
        });
        // The controller is killed while blocks are created, listed and released.
        let killed = async {
            until("work is under way", LIMIT, async || {
                let now = objects(&fixtures).await?;
                Ok((now.symmetric_difference(&before).count() >= 5).then_some(()))
            })
            .await?;
            cluster.controller.process().kill()
        };
        let (added, _) = tokio::try_join!(try_join_all(adds), killed).unwrap();
        for (name, addresses) in names.iter().zip(added) {
            let all = pods.entry(name.clone()).or_insert_with(Vec::new);
            all.extend(addresses.into_iter().flatten());
        }
        lists(&fixtures).await?;
        cluster.controller = start_controller(&cluster.control_plane, ADMIN, &[])?;
        cluster.controller.wait_ready(LIMIT).await?;
    }
    for half in 0..2 {
        demand(&fixtures, half, 7).await?;
    }
    // In the end, every node has enough blocks for its demand, and every IPAMBlock is listed in a NodeSubnet.
    until("all is settled", LIMIT, async || {
        let lists = lists(&fixtures).await?;
        let listed: BTreeSet<String> = lists.values().flatten().cloned().collect();
        let objects = objects(&fixtures).await?;
        let counts: Vec<usize> = lists.values().map(BTreeSet::len).collect();
        anyhow::ensure!(
            listed == objects,
            "{:?}",
            listed.symmetric_difference(&objects)
        );
        anyhow::ensure!(counts.iter().all(|it| *it == 8), "{counts:?}");
        Ok(Some(()))
    })
    .await?;
    // No node has lost a block with a pod in it, and no address was assigned twice.
    let lists = lists(&fixtures).await?;
    let mut all = BTreeSet::new();
    for name in &names {
        let addresses = &pods[name];
        assert!(!addresses.is_empty(), "{name} has no pod");
        for address in addresses {
            assert!(all.insert(address), "{address} is assigned twice");
            let addr = Addr::parse_strict(address).unwrap();
            let contains = |it: &String| Cidr::parse_strict(it).unwrap().contains_addr(addr);
            assert!(lists[name].iter().any(contains), "{address} of {name}");
        }
        let count = i64::try_from(addresses.len()).unwrap();
        fixtures.in_use(name, count).await?;
    }
    Ok(())
}
