//! drain and undrain, with a controller that leads.

use cadastre_e2e::{Agents, Options, Stage};
use serde_json::json;

use crate::run;

#[tokio::test]
async fn a_drain_is_asked_for_and_taken_back() {
    let stage = Stage::start(Options::default(), &[]).await.unwrap();
    let hand = stage.hand().await.unwrap();
    let agents = Agents::start(hand.client.clone());
    let cluster = &stage.cluster;
    let spec = json!({"ipv4": {"cidrs": ["10.90.0.0/24"], "blockSize": 28}, "idleSeconds": 3600});
    hand.block_pool("roomy", spec).await.unwrap();
    let node = hand.node("roomy", "roomy-1").await.unwrap();
    agents.join(&node);
    hand.listed("roomy-1", 1).await.unwrap();
    agents.ask("roomy-1", "roomy", 40).unwrap();
    let blocks = hand.listed("roomy-1", 3).await.unwrap();
    let told = |it: &cadastre::api::NodeSubnet| {
        it.status
            .as_ref()
            .is_some_and(|status| status.blocks.len() == 3)
    };
    hand.subnet_until("roomy-1", "tells of its blocks", told)
        .await
        .unwrap();

    let dry = run(
        cluster,
        &["drain", "--node", "roomy-1", "--dry-run", "-o", "json"],
    )
    .await;
    assert_eq!(dry.json()["blocks"].as_array().unwrap().len(), 2, "{dry:?}");
    let wrong = run(cluster, &["drain", "10.90.0.0/24"]).await;
    assert!(
        wrong.code == 2 && wrong.out.contains("did you mean"),
        "{wrong:?}"
    );
    let annotation = async || {
        let annotations = hand
            .subnets
            .get("roomy-1")
            .await
            .unwrap()
            .metadata
            .annotations;
        annotations.and_then(|it| it.get("cadastre.dev/drain").cloned())
    };
    // The node wants all three, so it is left with what it has while it is asked.
    let asked = run(cluster, &["drain", &blocks[0]]).await;
    assert!(
        asked.code == 0 && asked.out.contains("Draining"),
        "{asked:?}"
    );
    assert_eq!(annotation().await.as_ref(), Some(&blocks[0]));
    let back = run(cluster, &["undrain", &blocks[0]]).await;
    assert!(back.code == 0 && back.out.contains("TakenBack"), "{back:?}");
    assert_eq!(annotation().await, None);
    let again = run(cluster, &["undrain", &blocks[0]]).await;
    assert!(
        again.code == 2 && again.out.contains("nobody asked"),
        "{again:?}"
    );
}
