//! A running cluster: two pools, a few pods.

use cadastre_e2e::{Agents, Options, TestCluster};
use serde_json::json;

use crate::page::Page;

pub(crate) async fn a_small_cluster_is_shown_searched_and_walked_through() {
    let stage = TestCluster::start(Options::default(), &[]).await.unwrap();
    let hand = stage.fixtures().await.unwrap();
    let agents = Agents::start(hand.client.clone());
    let blocks = json!({
        "ipv4": {"cidrs": ["10.60.0.0/24"], "blockSize": 28}, "ipv6": {"cidrs": ["fd00:60::/48"]},
        "reserved": ["10.60.0.0/28"],
    });
    hand.block_pool("blocks", blocks).await.unwrap();
    hand.pool("cidrs", json!({"ipv4": {"cidrs": ["10.61.0.0/16"]}}))
        .await
        .unwrap();
    let mut given = Vec::new();
    for i in 1..=3 {
        let name = format!("blocks-{i}");
        let node = hand.node("blocks", &name).await.unwrap();
        agents.join(&node);
        for pod in 0..i {
            let pod = format!("web-{i}-{pod}");
            let addresses = agents.allocate(&name, "blocks", &pod).await.unwrap();
            let texts: Vec<&str> = addresses.iter().map(String::as_str).collect();
            hand.pod(&pod, &name, &texts).await.unwrap();
            given.push((pod, addresses[0].clone()));
        }
    }
    hand.node("cidrs", "cidrs-1").await.unwrap();
    let cidr = hand.served("cidrs-1").await.unwrap()[0].clone();
    let (pod, address) = given.last().unwrap().clone();
    let block = hand.listed("blocks-3", 2).await.unwrap()[0].clone();
    let told = |it: &cadastre_api::NodeSubnet| {
        let mut blocks = it.status.iter().flat_map(|status| &status.blocks);
        blocks.any(|it| it.cidr == block && it.used == 3)
    };
    hand.subnet_until("blocks-3", "tells of its pods", told)
        .await
        .unwrap();
    let mut page = Page::open(&stage.control_plane).await;
    page.says("#pool", "cidrs").await;
    page.says("#figures", "blocks allocated").await;
    page.says("#legend", "Reserved").await;
    assert_eq!(
        (page.view().await.as_str(), page.cells().await),
        ("10.60.0.0/24", 4)
    );
    assert!(page.colours().await > 5);
    // With the mouse: select a block, then zoom into it.
    page.click(&address, 1).await;
    page.says("#about h2", &block).await;
    page.says("#about", "blocks-3").await;
    page.says("#about", "3 used").await;
    page.says("#about", &format!("default/{pod}")).await;
    page.keep("map-small.png").await;
    page.click(&address, 2).await;
    page.browser
        .wait(&format!(
            "document.documentElement.dataset.view === '{block}'"
        ))
        .await
        .unwrap();
    // With keys: zoom out, move, zoom in again.
    page.browser
        .eval("document.getElementById('map').focus()")
        .await
        .unwrap();
    page.browser.press(&["Escape"]).await.unwrap();
    page.ready().await;
    page.browser.press(&["ArrowLeft"]).await.unwrap();
    page.ready().await;
    let before = page.text("#about h2").await;
    assert_ne!(before, block);
    page.browser.press(&["ArrowRight", "Enter"]).await.unwrap();
    page.browser
        .wait("document.documentElement.dataset.view !== '10.60.0.0/24'")
        .await
        .unwrap();
    // The search leads to another pool.
    page.browser.press(&["/"]).await.unwrap();
    page.browser.type_text("cidrs-1").await.unwrap();
    page.says("#hits", "node").await;
    page.browser.press(&["Enter"]).await.unwrap();
    page.says("#about h2", &cidr).await;
    page.browser.press(&["/"]).await.unwrap();
    page.browser.type_text(&address).await.unwrap();
    page.says("#hits", "address").await;
    page.browser.press(&["Enter"]).await.unwrap();
    page.says("#about h2", &block).await;
    // IPv6, where a picture of the whole pool would be empty.
    page.browser
        .eval("[...document.querySelectorAll('#families button')].at(-1).click()")
        .await
        .unwrap();
    page.browser
        .wait("document.documentElement.dataset.view.includes(':')")
        .await
        .unwrap();
    assert!(page.colours().await > 3);
    page.assert_quiet().await;

    // New objects are shown after a refresh.
    hand.node("cidrs", "cidrs-2").await.unwrap();
    hand.served("cidrs-2").await.unwrap();
    page.browser.press(&["/"]).await.unwrap();
    page.browser.type_text("cidrs-2").await.unwrap();
    page.browser.press(&["Enter"]).await.unwrap();
    page.says("#trouble", "Nothing found with this name").await;
    page.browser.press(&["Escape", "r"]).await.unwrap();
    page.ready().await;
    page.browser.press(&["/"]).await.unwrap();
    page.browser.type_text("cidrs-2").await.unwrap();
    page.says("#hits", "node").await;

    // The page reports that the plugin has ended.
    page.interrupt().await;
    page.browser
        .eval("document.getElementById('refresh').click()")
        .await
        .unwrap();
    page.says("#trouble", "Failed to fetch").await;
}
