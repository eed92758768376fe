//! Addresses whose pods are gone: the controller lists only those as leak candidates.

use cadastre_api::LeakCandidate;
use cadastre_e2e::Fixtures;
use serde_json::json;

use crate::{shared, write_status};

async fn suspects(
    hand: &Fixtures,
    node: &str,
    what: &str,
    addresses: &[String],
) -> Vec<LeakCandidate> {
    let is = |suspects: &[LeakCandidate]| {
        let named: Vec<&String> = suspects.iter().map(|it| &it.address).collect();
        named == addresses.iter().collect::<Vec<_>>()
    };
    let subnet = hand.subnet_until(node, what, |it| is(&it.spec.leak_candidates));
    subnet.await.unwrap().spec.leak_candidates
}

#[tokio::test]
async fn an_address_without_a_pod_is_asked_about_and_no_other() {
    let (_, hand, _) = shared().await;
    let spec = json!({"ipv4": {"cidrs": ["10.74.0.0/24"], "blockSize": 28}});
    hand.block_pool("leaky", spec).await.unwrap();
    let node = hand.node("leaky", "leaky-1").await.unwrap();
    let cidr = hand.listed("leaky-1", 1).await.unwrap()[0].clone();
    let block = hand.subnets.get("leaky-1").await.unwrap().spec.blocks[0].clone();
    let first: std::net::Ipv4Addr = cidr.split('/').next().unwrap().parse().unwrap();
    let address = |n: u32| std::net::Ipv4Addr::from(u32::from(first) + n).to_string();

    let lives = hand.pod("leaky-a", "leaky-1", &[]).await.unwrap();
    let goes = hand.pod("leaky-b", "leaky-1", &[]).await.unwrap();
    // The address is now reported by another pod, whatever UID the agent publishes for it.
    hand.pod("leaky-c", "leaky-1", &[&address(3)])
        .await
        .unwrap();
    let stranger = "00000000-0000-4000-8000-000000000001";
    let held = |n: u32, uid: &str| json!({"address": address(n), "podUID": uid});
    let status = json!({
        "nodeUID": node.metadata.uid,
        "blocks": [{"cidr": cidr, "uid": block.uid, "used": 6, "free": 10}],
        "orphans": [
            held(1, lives.metadata.uid.as_deref().unwrap()),
            held(2, goes.metadata.uid.as_deref().unwrap()),
            held(3, stranger),
            held(4, stranger),
            // Not an address of this node.
            {"address": "192.0.2.55", "podUID": stranger},
        ],
    });
    write_status(&hand, "leaky-1", status.clone()).await;
    let asked = suspects(&hand, "leaky-1", "is asked about a stranger", &[address(4)]).await;
    assert_eq!(asked[0].pod_uid, stranger);
    hand.delete_pod("leaky-b").await.unwrap();
    let both = [address(2), address(4)];
    suspects(
        &hand,
        "leaky-1",
        "is asked about a pod that has gone",
        &both,
    )
    .await;

    // The agent releases one address and keeps the other, which remains a leak candidate.
    let mut less = status.clone();
    less["orphans"].as_array_mut().unwrap().remove(3);
    write_status(&hand, "leaky-1", less).await;
    suspects(
        &hand,
        "leaky-1",
        "is asked about what it still has",
        &[address(2)],
    )
    .await;
}
