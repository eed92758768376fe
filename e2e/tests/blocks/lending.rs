//! Lending: nodes that wait for addresses of an exhausted pool borrow parts of other nodes' blocks.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;
use cadastre_api::NodeSubnet;
use serde_json::json;

use crate::{node, shared};

const NODES: usize = 20;
/// The number of addresses in a /26 that pods can use.
const OF_BLOCK: usize = 61;
/// The number of addresses that each lending node uses for its own pods.
const OF_LENDER: usize = 2;
/// The number of containers that are added concurrently.
const AT_ONCE: usize = 64;

#[tokio::test]
async fn a_node_borrows_nearly_all_that_other_nodes_have_free_and_gives_it_back() -> Result<()> {
    let (_, fixtures, agents) = shared().await?;
    // The pool has exactly one block for each node. So the pool is exhausted when each node has its block.
    let cidrs = ["10.77.0.0/22", "10.77.4.0/24"];
    let spec = json!({
        "ipv4": {"cidrs": cidrs, "blockSize": 26},
        "borrowing": "WhenExhausted", "maxBlocksPerNode": 1000,
        "cooldownSeconds": 0, "idleSeconds": 1,
    });
    fixtures.block_pool("lend", spec).await?;
    let names: Vec<String> = (0..NODES).map(|i| format!("lend-{i}")).collect();
    let mut used = BTreeSet::new();
    let mut count = 0;
    let mut dry = None;
    for name in &names {
        let created = node(&fixtures, &agents, "lend", name).await?;
        dry = Some(created);
        let pods = (0..OF_LENDER).map(|pod| format!("{name}-{pod}"));
        let addresses = agents.allocate_all(name, "lend", pods).await?;
        count += OF_LENDER;
        used.extend(addresses.concat());
        fixtures.listed(name, 1).await?;
    }
    let (borrower, lenders) = names.split_last().unwrap();
    let free = lenders.len() * (OF_BLOCK - OF_LENDER);
    let wanted = OF_BLOCK - OF_LENDER + (free * 9).div_ceil(10);
    let begin = Instant::now();
    let mut pods: Vec<String> = Vec::new();
    while pods.len() < wanted {
        let more = pods.len()..wanted.min(pods.len() + AT_ONCE);
        let more: Vec<String> = more.map(|pod| format!("{borrower}-more-{pod}")).collect();
        let addresses = agents.allocate_all(borrower, "lend", more.clone()).await?;
        println!(
            "{} addresses after {:?}",
            pods.len() + more.len(),
            begin.elapsed()
        );
        count += more.len();
        pods.extend(more);
        used.extend(addresses.concat());
    }
    assert_eq!(used.len(), count, "an address was assigned twice");
    let uid = dry.and_then(|node| node.metadata.uid).unwrap();
    fixtures.event(&uid, "BlockBorrowed").await?;
    let is_shown = |it: &NodeSubnet| it.spec.blocks.iter().any(|block| block.parent.is_some());
    let what = "the NodeSubnet says from whom the node borrows";
    let subnet = fixtures.subnet_until(borrower, what, is_shown).await?;
    let parent = subnet.spec.blocks.iter().find_map(|it| it.parent.clone());
    let lender = parent.unwrap().node;
    let what = "the NodeSubnet says to whom the node lends";
    fixtures
        .subnet_until(&lender, what, |it| {
            it.spec.lent.iter().any(|part| part.node == *borrower)
        })
        .await?;

    agents.free_all(borrower, pods).await?;
    let begin = Instant::now();
    for name in lenders {
        let what = format!("{name} has its whole block again");
        fixtures
            .subnet_until(name, &what, |it| {
                let status = it.status.as_ref();
                let is_returned = status.is_some_and(|it| it.withdrawn.is_empty());
                is_returned && it.spec.withdraw.is_empty() && it.spec.lent.is_empty()
            })
            .await?;
    }
    println!("all is given back after {:?}", begin.elapsed());
    fixtures.listed(borrower, 1).await?;
    // The lender can assign the addresses that it had lent.
    let pods = (0..OF_BLOCK - OF_LENDER).map(|pod| format!("{lender}-more-{pod}"));
    let all = agents.allocate_all(&lender, "lend", pods).await?;
    assert_eq!(all.len(), OF_BLOCK - OF_LENDER);
    Ok(())
}
