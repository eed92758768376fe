//! `claim`, and how claims are shown, with a controller that leads.

use cadastre_api::CLAIM_ANNOTATION;
use cadastre_e2e::fixtures::LIMIT;
use cadastre_e2e::wait::until;
use cadastre_e2e::{Agents, TestCluster};
use kube::api::PostParams;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::{end, ok, run, start};

pub(crate) async fn a_claim_is_created_shown_and_released(test_cluster: &TestCluster) {
    let fixtures = test_cluster.fixtures().await.unwrap();
    let cluster = &test_cluster.control_plane;
    let agents = Agents::new(cluster).unwrap();
    let spec = json!({"ipv4": {"cidrs": ["10.93.0.0/24"], "blockSize": 28}, "cooldownSeconds": 0});
    fixtures.block_pool("claimed", spec).await.unwrap();
    let node = fixtures.node("claimed", "claimed-1").await.unwrap();
    agents.join(&node).unwrap();
    fixtures.listed("claimed-1", 1).await.unwrap();

    // The API server checks a claim even in a dry run.
    let dry = run(cluster, "claim create web --pool claimed --dry-run").await;
    dry.assert_out(0, "WouldCreate");
    let two = "claim create web --address 10.93.0.7 --address 10.93.0.8";
    run(cluster, two)
        .await
        .assert_err(1, "two addresses of one family");
    run(cluster, "claim create web --pool claimed -n nowhere")
        .await
        .assert_err(1, "there is no namespace nowhere");
    let name = run(cluster, "claim create Web --pool claimed").await;
    name.assert_err(1, "claim default/Web is not created");
    let none = ok(cluster, "claim list").await;
    assert!(none.contains("There is no claim"), "{none}");

    let create = "claim create web --pool claimed --timeout 100 -o json";
    let created = run(cluster, create).await.json();
    assert_eq!(created["state"], "Ready", "{created}");
    let address = created["addresses"][0].as_str().unwrap().to_owned();
    run(cluster, create).await.assert_err(1, "exists already");
    let list = ok(cluster, "claim list -A").await;
    for part in ["default", "web", &address, "claimed", "True", "Available"] {
        assert!(list.contains(part), "{part}: {list}");
    }
    let show = format!("show ip {address}");
    let shown = ok(cluster, &show).await;
    for part in [
        "of a claim, and not in use",
        "default/web",
        "Available: no pod",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }

    let pod = serde_json::from_value(json!({
        "metadata": {"name": "web-1", "annotations": {CLAIM_ANNOTATION: "web"}},
        "spec": {"nodeName": "claimed-1", "containers": [{"name": "c", "image": "none"}]},
    }));
    let (pod, params) = (pod.unwrap(), PostParams::default());
    let pod = fixtures.pods.create(&params, &pod).await.unwrap();
    let has = agents.run(&fixtures, "claimed-1", &pod).await.unwrap();
    assert_eq!(has, [address.as_str()]);
    until("the claim is in use", LIMIT, async || {
        let list = ok(cluster, "claim list").await;
        Ok(list.contains("InUse").then_some(()))
    })
    .await
    .unwrap();
    let shown = ok(cluster, &show).await;
    let parts = [
        "of claim default/web",
        "InUse: pod web-1 on node claimed-1 uses the addresses",
    ];
    for part in parts {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    until(
        "the node's agent has reported the block",
        LIMIT,
        async || {
            let node = ok(cluster, "show node claimed-1 --addresses").await;
            Ok(node.contains("Active, of claim default/web").then_some(()))
        },
    )
    .await
    .unwrap();
    let explained = ok(cluster, "explain pod web-1").await;
    assert!(explained.contains("Claim default/web:"), "{explained}");

    let dry = run(cluster, "claim release web --dry-run").await;
    dry.assert_out(0, "pod web-1 on node claimed-1 uses");
    let kept = run(cluster, "claim release web --wait --timeout 1").await;
    kept.assert_out(2, "Releasing");
    let mut waiting = start(cluster, "claim release web --wait --timeout 100");
    let mut lines = BufReader::new(waiting.stderr.take().unwrap()).lines();
    let says = lines.next_line().await.unwrap().unwrap_or_default();
    assert!(says.contains("it is being deleted already"), "{says}");
    fixtures.delete_pod("web-1").await.unwrap();
    agents.free("claimed-1", "web-1").await.unwrap();
    end(waiting).await.assert_out(0, "Released");
    let again = run(cluster, "claim release web").await;
    again.assert_out(2, "there is no such claim");
}
