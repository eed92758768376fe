//! `plan` of the kubectl plugin predicts what will happen. The test compares the predicted numbers with what then
//! happens.

use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Options, TestCluster};
use serde_json::json;

use crate::run;

const NO_BLOCK: &str = "no free IPv4 block";

#[tokio::test]
async fn what_plan_says_of_new_nodes_is_what_then_happens() {
    let test_cluster = TestCluster::start(Options::default(), &[]).await.unwrap();
    let fixtures = test_cluster.fixtures().await.unwrap();
    let cluster = &test_cluster.control_plane;
    let spec = json!({"ipv4": {"cidrs": ["10.80.0.0/25"], "blockSize": 28}, "reserved": ["10.80.0.16-10.80.0.20"]});
    fixtures.block_pool("grow", spec.clone()).await.unwrap();
    let cidrs = json!({"ipv4": {"cidrs": ["10.81.0.0/25"], "blockSize": 28}, "reserved": ["10.81.0.16-10.81.0.20"]});
    fixtures.pool("cidr", cidrs).await.unwrap();
    for pool in ["grow", "cidr"] {
        fixtures.condition(pool, "Ready", "True").await.unwrap();
    }
    fixtures.node("grow", "grow-0").await.unwrap();
    fixtures.listed("grow-0", 1).await.unwrap();
    fixtures.node("cidr", "cidr-0").await.unwrap();
    fixtures.served("cidr-0").await.unwrap();

    // Each pool has 8 ranges, one of which is allocated already. The pool of podCIDRs has one range less, because it
    // cannot allocate a range with a reserved address.
    for (group, served) in [("grow", 7), ("cidr", 6)] {
        let plan = |nodes: u8| format!("plan --add-nodes {nodes} --label group={group} -o json");
        let planned = run(cluster, &plan(10)).await;
        assert_eq!(planned.code, 2, "{planned:?}");
        let planned = planned.json();
        assert_eq!(planned["newNodes"]["served"], served, "{planned:#}");
        assert_eq!(planned["newNodes"]["waiting"], 10 - served, "{planned:#}");
        let why = planned["willWait"][0]["why"].as_str().unwrap().to_owned();
        assert_eq!(run(cluster, &plan(6)).await.code, 0);
        for nth in 1..=10 {
            fixtures
                .node(group, &format!("{group}-{nth}"))
                .await
                .unwrap();
        }
        let pool = fixtures.pool_until(group, "the others wait", |it| {
            it.status.as_ref().and_then(|status| status.waiting) == Some(10 - served)
        });
        let pool = pool.await.unwrap();
        assert_eq!(pool.status.unwrap().nodes, Some(served + 1));
        let reported = until(
            "a waiting node has an event with the same reason",
            LIMIT,
            async || {
                for nth in 1..=10 {
                    let node = fixtures.nodes.get(&format!("{group}-{nth}")).await?;
                    let events = fixtures.events_of(&node.metadata.uid.unwrap()).await?;
                    let same = |note: &str| note.contains(NO_BLOCK) && why.contains(NO_BLOCK);
                    if events
                        .iter()
                        .any(|it| it.message.as_deref().is_some_and(same))
                    {
                        return Ok(Some(()));
                    }
                }
                Ok(None)
            },
        );
        reported.await.unwrap();
    }

    // `plan` predicts that no node would wait if the pool were larger. `plan` changes nothing.
    let file = cluster.folder().join("pool.json");
    let mut larger = spec.clone();
    larger["allocationMode"] = json!("Blocks");
    larger["nodeSelector"] = json!({"matchLabels": {"group": "grow"}});
    larger["ipv4"]["cidrs"] = json!(["10.80.0.0/25", "10.82.0.0/25"]);
    let object = json!({"apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": "grow"}, "spec": larger});
    std::fs::write(&file, object.to_string()).unwrap();
    let planned = run(
        cluster,
        &format!("plan --pool-change {} -o json", file.to_str().unwrap()),
    )
    .await;
    assert_eq!(planned.code, 0, "{planned:?}");
    assert_eq!(
        planned.json()["relieved"].as_array().unwrap().len(),
        3,
        "{planned:?}"
    );
    let grow = fixtures.pools.get("grow").await.unwrap();
    assert_eq!(grow.spec.ipv4.unwrap().cidrs.len(), 1);
    let mut wrong = object.clone();
    wrong["spec"]["ipv4"]["cidrs"] = json!(["10.80.0.0/25", "10.80.0.0/26"]);
    std::fs::write(&file, wrong.to_string()).unwrap();
    let refused = run(
        cluster,
        &format!("plan --pool-change {}", file.to_str().unwrap()),
    )
    .await;
    refused.assert_out(2, "The API server would reject it");
    // The pool is exhausted, so a node that loses its block would get no other.
    let drained = run(cluster, "plan --drain-cidr 10.80.0.0/26").await;
    drained.assert_out(2, "10.80.0.48/28");
    let deleted = run(cluster, "plan --delete-pool cidr -o json").await;
    assert_eq!(
        deleted.json()["hits"].as_array().unwrap().len(),
        7,
        "{deleted:?}"
    );
}
