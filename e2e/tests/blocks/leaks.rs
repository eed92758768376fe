//! Addresses that agents report as orphans. Only orphans whose pods are gone become leak candidates.

use anyhow::Result;
use cadastre_api::LeakCandidate;
use cadastre_e2e::Fixtures;
use serde_json::json;

use crate::shared;

async fn candidates(
    fixtures: &Fixtures,
    node: &str,
    what: &str,
    addresses: &[String],
) -> Result<Vec<LeakCandidate>> {
    let is = |candidates: &[LeakCandidate]| {
        let named: Vec<&String> = candidates.iter().map(|it| &it.address).collect();
        named == addresses.iter().collect::<Vec<_>>()
    };
    let subnet = fixtures.subnet_until(node, what, |it| is(&it.spec.leak_candidates));
    Ok(subnet.await?.spec.leak_candidates)
}

#[tokio::test]
async fn only_addresses_without_a_pod_are_leak_candidates() -> Result<()> {
    let (_, fixtures, _) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.74.0.0/24"], "blockSize": 28}});
    fixtures.block_pool("leaky", spec).await?;
    let node = fixtures.node("leaky", "leaky-1").await?;
    let cidr = fixtures.listed("leaky-1", 1).await?[0].clone();
    let block = fixtures.subnets.get("leaky-1").await?.spec.blocks[0].clone();
    let first: std::net::Ipv4Addr = cidr.split('/').next().unwrap().parse().unwrap();
    let address = |n: u32| std::net::Ipv4Addr::from(u32::from(first) + n).to_string();

    let lives = fixtures.pod("leaky-a", "leaky-1", &[]).await?;
    let goes = fixtures.pod("leaky-b", "leaky-1", &[]).await?;
    // Another pod reports the third address. Therefore the address is no leak candidate, whatever pod UID the agent
    // reports.
    fixtures.pod("leaky-c", "leaky-1", &[&address(3)]).await?;
    let stranger = "00000000-0000-4000-8000-000000000001";
    let entry = |n: u32, uid: &str| json!({"address": address(n), "podUID": uid});
    let status = json!({
        "nodeUID": node.metadata.uid,
        "blocks": [{"cidr": cidr, "uid": block.uid, "used": 6, "free": 10}],
        "orphans": [
            entry(1, lives.metadata.uid.as_deref().unwrap()),
            entry(2, goes.metadata.uid.as_deref().unwrap()),
            entry(3, stranger),
            entry(4, stranger),
            // This address is in none of the node's blocks.
            {"address": "192.0.2.55", "podUID": stranger},
        ],
    });
    fixtures.write_status("leaky-1", status.clone()).await?;
    let named = candidates(
        &fixtures,
        "leaky-1",
        "names the address without a pod",
        &[address(4)],
    )
    .await?;
    assert_eq!(named[0].pod_uid, stranger);
    fixtures.delete_pod("leaky-b").await?;
    let both = [address(2), address(4)];
    candidates(
        &fixtures,
        "leaky-1",
        "names the address of the deleted pod, too",
        &both,
    )
    .await?;

    // The agent releases one address and keeps the other, which remains a leak candidate.
    let mut less = status.clone();
    less["orphans"].as_array_mut().unwrap().remove(3);
    fixtures.write_status("leaky-1", less).await?;
    candidates(
        &fixtures,
        "leaky-1",
        "names the address that is left",
        &[address(2)],
    )
    .await?;
    Ok(())
}
