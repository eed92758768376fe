//! Which nodes get which ranges from which pool.

use anyhow::Result;
use serde_json::json;

use crate::shared;

#[tokio::test]
async fn a_node_gets_one_range_of_a_single_stack_pool() -> Result<()> {
    let (_, hand) = shared().await?;
    let v4 = json!({"ipv4": {"cidrs": ["10.1.0.0/24"], "blockSize": 25}});
    let v6 = json!({"ipv6": {"cidrs": ["fd00:1::/65"], "blockSize": 66}});
    hand.pool("four", v4).await?;
    hand.pool("six", v6).await?;
    for (group, ranges) in [
        ("four", ["10.1.0.0/25", "10.1.0.128/25"]),
        ("six", ["fd00:1:0:0:4000::/66", "fd00:1::/66"]),
    ] {
        let mut got = Vec::new();
        for i in 1..=2 {
            let name = format!("{group}-{i}");
            let cidrs = hand.served_node(group, &name).await?;
            assert_eq!(cidrs.len(), 1);
            got.extend(cidrs);
            let node = hand.nodes.get(&name).await?;
            let spec = node.spec.unwrap();
            assert_eq!(spec.pod_cidr.as_ref(), spec.pod_cidrs.unwrap().first());
        }
        got.sort();
        assert_eq!(got, ranges);
    }
    Ok(())
}

#[tokio::test]
async fn a_dual_stack_pool_gives_a_range_of_each_family_ipv4_first() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.2.0.0/24"], "blockSize": 24},
        "ipv6": {"cidrs": ["fd00:2::/64"], "blockSize": 64},
    });
    hand.pool("dual", spec).await?;
    let cidrs = hand.served_node("dual", "dual-1").await?;
    assert_eq!(cidrs, ["10.2.0.0/24", "fd00:2::/64"]);
    let subnet = hand
        .subnet_until("dual-1", "lists the podCIDRs of the node", |it| {
            it.spec.pod_cidrs.len() == 2
        })
        .await?;
    let held: Vec<_> = subnet.spec.pod_cidrs.iter().map(|it| &it.cidr).collect();
    assert_eq!(held, ["10.2.0.0/24", "fd00:2::/64"]);
    assert!(
        subnet
            .spec
            .pod_cidrs
            .iter()
            .all(|it| it.pool.as_deref() == Some("dual"))
    );
    Ok(())
}

#[tokio::test]
async fn if_one_family_is_exhausted_nothing_of_the_other_is_allocated() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({
        "ipv4": {"cidrs": ["10.3.0.0/16"], "blockSize": 24},
        "ipv6": {"cidrs": ["fd00:3::/63"], "blockSize": 64},
    });
    hand.pool("half", spec).await?;
    for name in ["half-1", "half-2"] {
        assert_eq!(hand.served_node("half", name).await?.len(), 2);
    }
    let note = hand.waiting_node("half", "half-3").await?;
    assert!(
        note.contains("IPv6") && note.contains("add a CIDR"),
        "{note}"
    );
    assert!(hand.pod_cidrs("half-3").await?.is_empty());
    let pool = hand
        .pool_until("half", "counts the one that waits", |it| {
            let status = it.status.as_ref();
            let held = status
                .and_then(|it| it.ipv4.as_ref())
                .map(|it| it.allocated.as_str());
            status.and_then(|it| it.waiting) == Some(1) && held == Some("2")
        })
        .await?;
    let status = pool.status.unwrap();
    let (v4, v6) = (status.ipv4.unwrap(), status.ipv6.unwrap());
    assert_eq!(v4.free, "254");
    assert_eq!((v6.allocated.as_str(), v6.free.as_str()), ("2", "0"));

    let more = json!({"ipv6": {"cidrs": ["fd00:3::/63", "fd00:3:1::/63"]}});
    hand.change_pool("half", more).await?;
    let cidrs = hand.served("half-3").await?;
    assert!(
        cidrs[0].starts_with("10.3.") && cidrs[1].starts_with("fd00:3:1:"),
        "{cidrs:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_node_selector_decides_which_nodes_a_pool_serves() -> Result<()> {
    let (_, hand) = shared().await?;
    let expressions = [
        (
            "sel-in",
            json!([{"key": "zone", "operator": "In", "values": ["a", "b"]}]),
        ),
        (
            "sel-notin",
            json!([
                {"key": "zone", "operator": "NotIn", "values": ["a", "b"]},
                {"key": "zone", "operator": "Exists"},
            ]),
        ),
        (
            "sel-none",
            json!([{"key": "zone", "operator": "DoesNotExist"}]),
        ),
    ];
    for (i, (name, expressions)) in expressions.into_iter().enumerate() {
        let spec = json!({
            "ipv4": {"cidrs": [format!("10.4.{i}.0/24")], "blockSize": 28},
            "nodeSelector": {"matchLabels": {"group": "sel"}, "matchExpressions": expressions},
        });
        hand.pool(name, spec).await?;
    }
    let nodes = [
        ("a", "10.4.0."),
        ("b", "10.4.0."),
        ("c", "10.4.1."),
        ("", "10.4.2."),
    ];
    for (zone, prefix) in nodes {
        let name = format!("sel{zone}");
        let mut node = cadastre_e2e::nodes::node(&name, "192.0.2.1");
        if !zone.is_empty() {
            node = cadastre_e2e::fixtures::labelled(node, &[("zone", zone)]);
        }
        let node = cadastre_e2e::fixtures::labelled(node, &[("group", "sel")]);
        hand.create_node(node).await?;
        let cidrs = hand.served(&name).await?;
        assert!(cidrs[0].starts_with(prefix), "zone {zone:?}: {cidrs:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_node_that_no_pool_selects_is_left_alone_until_a_label_says_otherwise() -> Result<()> {
    let (_, hand) = shared().await?;
    let spec = json!({"ipv4": {"cidrs": ["10.5.0.0/16"]}});
    hand.pool("late", spec).await?;
    let stranger = hand.node("nobody", "late-1").await?;
    // Nodes are handled in the order of their creation. So once the second node has podCIDRs, the controller has
    // handled the first one, too.
    hand.served_node("late", "late-2").await?;
    assert!(hand.pod_cidrs("late-1").await?.is_empty());
    let uid = stranger.metadata.uid.unwrap();
    assert!(hand.events_of(&uid).await?.is_empty());

    let label = json!({"metadata": {"labels": {"group": "late"}}});
    hand.change_node("late-1", label).await?;
    assert!(hand.served("late-1").await?[0].starts_with("10.5."));
    Ok(())
}

#[tokio::test]
async fn the_highest_priority_serves_first_then_the_most_specific_then_the_most_room() -> Result<()>
{
    let (_, hand) = shared().await?;
    let pools = [
        // Each entry: name, CIDR, block size, priority, further requirements of the selector. The best pool comes
        // first.
        ("rank-b", "10.6.0.0/28", 28, 7, json!([])),
        (
            "rank-d",
            "10.6.1.0/28",
            28,
            3,
            json!([{"key": "zone", "operator": "Exists"}]),
        ),
        ("rank-c", "10.6.2.0/27", 28, 3, json!([])),
        ("rank-a", "10.6.3.0/28", 28, 3, json!([])),
    ];
    // Pools are created in reverse order, so that their age does not decide.
    for (name, cidr, size, priority, expressions) in pools.into_iter().rev() {
        let spec = json!({
            "ipv4": {"cidrs": [cidr], "blockSize": size}, "priority": priority,
            "nodeSelector": {"matchLabels": {"group": "rank"}, "matchExpressions": expressions},
        });
        hand.pool(name, spec).await?;
        hand.condition(name, "Ready", "True").await?;
    }
    for (i, prefix) in ["10.6.0.", "10.6.1.", "10.6.2."].into_iter().enumerate() {
        let name = format!("rank{i}");
        let node = cadastre_e2e::nodes::node(&name, "192.0.2.1");
        let labels = [("group", "rank"), ("zone", "a")];
        hand.create_node(cadastre_e2e::fixtures::labelled(node, &labels))
            .await?;
        let cidrs = hand.served(&name).await?;
        assert!(
            cidrs[0].starts_with(prefix),
            "node {i}: {cidrs:?}, expected {prefix}"
        );
    }
    Ok(())
}
