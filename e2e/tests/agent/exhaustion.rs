//! ADDs on nodes that have no free address.

use std::time::{Duration, Instant};

use cadastre_e2e::fixtures::node_of_group;
use cadastre_node::{Add, OpErrorKind};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;

use crate::{Machine, add, eventually, pool, shared, start};

#[tokio::test]
async fn an_add_on_a_dry_node_waits_for_its_block_and_gets_it() {
    let (cluster, api) = shared().await;
    pool(
        &api,
        "dry",
        "10.10.0.0/24",
        json!({"firstBlock": "OnDemand"}),
    )
    .await;
    api.node("dry", "dry-1").await.unwrap();
    let mut machine = Machine::new(&cluster.control_plane, "dry-1", &["--add-wait", "7"]);
    machine.start();
    api.subnet_until("dry-1", "names the pool", |it| it.spec.pools.len() == 1)
        .await
        .unwrap();
    machine.log_says("holds").await;
    // Twenty concurrent ADDs need two blocks, because a block has 13 usable addresses.
    let adds = (0..20).map(|n| {
        let machine = &machine;
        async move { machine.add(&format!("c{n}")).await }
    });
    let begun = Instant::now();
    let given = futures::future::join_all(adds).await;
    let mut addresses: Vec<String> = given.into_iter().map(Result::unwrap).collect();
    assert!(
        begun.elapsed() < Duration::from_secs(9),
        "{:?}",
        begun.elapsed()
    );
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 20);
    let waiting = machine.metric("cadastre_agent_adds_waiting", &[]).await;
    assert!(waiting.abs() < 0.5);
}

#[tokio::test]
async fn an_add_that_waits_in_vain_is_refused_in_time_and_told_for_which_pool() {
    let flags = ["--add-wait", "1.5"];
    let (_, machine) = start(
        "full",
        "10.11.0.0/28",
        json!({"cooldownSeconds": 0}),
        &flags,
    )
    .await;
    for n in 0..13 {
        machine.add(&format!("c{n}")).await.unwrap();
    }
    let begun = Instant::now();
    let refusal = machine.add("late").await.unwrap_err();
    let took = begun.elapsed();
    assert!(
        took > Duration::from_millis(1400) && took < Duration::from_secs(4),
        "{took:?}"
    );
    assert_eq!(refusal.why, OpErrorKind::Exhausted, "{refusal}");
    assert!(
        refusal.text.contains("`full`")
            && refusal.text.contains("describe ippools.cadastre.dev full"),
        "{refusal}"
    );
    // STATUS succeeds, because the agent is ready although the node has no free address.
    machine.ask(cadastre_node::Op::Status).await.unwrap();
    // As soon as an address is free, the ADD that was refused succeeds when it is repeated.
    machine.del("c0").await;
    eventually("an address is free again", async || {
        Ok(Some(machine.add("late").await?))
    })
    .await;
}

#[tokio::test]
async fn of_several_pools_the_next_is_asked_when_the_best_gives_nothing() {
    let (cluster, api) = shared().await;
    pool(&api, "next-a", "10.12.0.0/28", json!({"priority": 2})).await;
    pool(&api, "next-b", "10.12.1.0/24", json!({"priority": 1})).await;
    let flags = ["--add-wait", "4"];
    let machine = Machine::of_group(&cluster.control_plane, &api, "next", &flags).await;
    for n in 0..13 {
        machine.add(&format!("c{n}")).await.unwrap();
    }
    let given = machine.add("more").await.unwrap();
    assert!(given.starts_with("10.12.1."), "{given}");
    let by_name = Add {
        pools: vec!["next-a".to_owned()],
        ..add("named")
    };
    let refusal = machine.add_with(by_name).await.unwrap_err();
    assert!(refusal.text.contains("`next-a`"), "{refusal}");
}

#[tokio::test]
async fn pools_that_run_dry_in_turn_refuse_nobody() {
    let (cluster, api) = shared().await;
    for n in 0..10 {
        let range = format!("10.15.{n}.0/24");
        let terms = json!({"assignment": "Manual", "warm": {"low": 0, "high": 0}});
        pool(&api, &format!("turn-{n}"), &range, terms).await;
    }
    api.node("turn", "turn-1").await.unwrap();
    let mut machine = Machine::new(&cluster.control_plane, "turn-1", &[]);
    machine.start();
    for n in 0..10 {
        let name = format!("turn-{n}");
        let of_pool = Add {
            pools: vec![name.clone()],
            ..add(&name)
        };
        let answer = eventually("the node knows the pool", async || {
            Ok(match machine.add_with(of_pool.clone()).await {
                Err(refusal) if refusal.why != OpErrorKind::Exhausted => None,
                answer => Some(answer),
            })
        })
        .await;
        let refused = answer.err();
        assert!(refused.is_none(), "{refused:?}");
    }
}

/// The node gets the addresses before pods need them, so pods can start while the API server cannot be reached.
#[tokio::test]
async fn a_node_keeps_an_address_for_each_pod_that_it_may_run() {
    const PODS: usize = 110;
    let (cluster, api) = shared().await;
    let warm = json!({"warm": {"low": 1, "high": 5, "minimum": "MaxPods"}});
    pool(&api, "most", "10.18.0.0/22", warm).await;
    let mut node = node_of_group("most", "most-1");
    let status = node.status.get_or_insert_default();
    status.capacity = Some([("pods".to_owned(), Quantity(PODS.to_string()))].into());
    api.create_node(node).await.unwrap();
    let mut machine = Machine::new(&cluster.control_plane, "most-1", &[]);
    machine.start();
    let subnet = api
        .subnet_until("most-1", "110 addresses are free", |it| {
            let blocks = it.status.iter().flat_map(|it| &it.blocks);
            let free: i64 = blocks.map(|it| it.free).sum();
            usize::try_from(free).is_ok_and(|free| free >= PODS)
        })
        .await
        .unwrap();
    // A block of 16 addresses has 13 for pods.
    assert_eq!(subnet.spec.blocks.len(), PODS.div_ceil(13));
    for n in 0..PODS {
        machine.add(&format!("c{n}")).await.unwrap();
    }
    for n in 0..PODS {
        machine.del(&format!("c{n}")).await;
    }
    assert_eq!(api.listed("most-1", 9).await.unwrap().len(), 9, "they stay");
}

#[tokio::test]
async fn a_crowd_of_pods_on_small_blocks_is_refused_nobody_and_costs_few_requests() {
    const PODS: usize = 110;
    for (n, size) in [28, 30, 32].into_iter().enumerate() {
        let group = format!("crowd{size}");
        let range = format!("10.16.{}.0/20", 16 * n);
        let terms = json!({"ipv4": {"cidrs": [range], "blockSize": size}});
        // 30 s is the agent's default publish interval. Within the interval, the agent writes only urgent changes.
        // The ADDs wait nearly as long as their callers do, because a busy host takes seconds for so many blocks.
        let flags = ["--publish-interval", "30", "--add-wait", "9"];
        let (_, machine) = start(&group, &range, terms, &flags).await;
        let asked = Instant::now();
        let adds = (0..PODS).map(|n| {
            let machine = &machine;
            async move {
                let answer = machine.add(&format!("c{n}")).await;
                (answer, asked.elapsed())
            }
        });
        let answers = futures::future::join_all(adds).await;
        let mut waits: Vec<Duration> = answers.iter().map(|(_, wait)| *wait).collect();
        waits.sort();
        let refused: Vec<_> = answers
            .iter()
            .filter_map(|it| it.0.as_ref().err())
            .collect();
        let writes = machine
            .metric("cadastre_agent_status_writes_total", &[])
            .await;
        println!(
            "/{size}: {} of {PODS} refused, the longest but one waited {:?}, {writes} writes of the status",
            refused.len(),
            waits[PODS - 2],
        );
        assert!(refused.is_empty(), "/{size}: {}", refused[0]);
        assert!(writes < 40.0, "/{size}: {writes} writes of the status");
    }
}
