//! A running cluster with two pools and a few pods.

use cadastre_e2e::{Agents, Options, TestCluster};
use serde_json::json;

use crate::page::Page;

pub(crate) async fn a_small_cluster_is_shown_searched_and_walked_through() {
    let cluster = TestCluster::start(Options::default(), &[]).await.unwrap();
    let fixtures = cluster.fixtures().await.unwrap();
    let agents = Agents::new(&cluster.control_plane).unwrap();
    let blocks = json!({
        "ipv4": {"cidrs": ["10.60.0.0/24"], "blockSize": 28}, "ipv6": {"cidrs": ["fd00:60::/48"]},
        "reserved": ["10.60.0.0/28"],
    });
    fixtures.block_pool("blocks", blocks).await.unwrap();
    fixtures
        .pool("cidrs", json!({"ipv4": {"cidrs": ["10.61.0.0/16"]}}))
        .await
        .unwrap();
    let mut pods = Vec::new();
    for i in 1..=3 {
        let name = format!("blocks-{i}");
        let node = fixtures.node("blocks", &name).await.unwrap();
        agents.join(&node).unwrap();
        for pod in 0..i {
            let pod = format!("web-{i}-{pod}");
            let addresses = agents.run_pod(&fixtures, &name, &pod).await.unwrap();
            pods.push((pod, addresses[0].clone()));
        }
    }
    fixtures.node("cidrs", "cidrs-1").await.unwrap();
    let cidr = fixtures.served("cidrs-1").await.unwrap()[0].clone();
    let (pod, address) = pods.last().unwrap().clone();
    let block = fixtures.listed("blocks-3", 2).await.unwrap()[0].clone();
    let reports_all = |it: &cadastre_api::NodeSubnetStatus| {
        let mut blocks = it.blocks.iter();
        blocks.any(|it| it.cidr == block && it.used == 3)
    };
    let what = "reports its pods";
    fixtures
        .status_until("blocks-3", what, reports_all)
        .await
        .unwrap();
    let mut page = Page::open(&cluster.control_plane).await;
    page.says("#pool", "cidrs").await;
    page.says("#figures", "blocks allocated").await;
    page.says("#legend", "Reserved").await;
    assert_eq!(
        (page.view().await.as_str(), page.cells().await),
        ("10.60.0.0/24", 4)
    );
    assert!(page.colours().await > 5);
    // Uses the mouse: selects a block, and zooms into this block.
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
    // Uses the keyboard: zooms out, moves to two other blocks, and zooms in.
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
    // Uses the search field to find a node of one pool, and then an address of a different pool.
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
    // Switches to IPv6, where blocks would be too small to see in a picture of the whole pool.
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

    // The page finds new objects only after a refresh.
    fixtures.node("cidrs", "cidrs-2").await.unwrap();
    fixtures.served("cidrs-2").await.unwrap();
    page.browser.press(&["/"]).await.unwrap();
    page.browser.type_text("cidrs-2").await.unwrap();
    page.browser.press(&["Enter"]).await.unwrap();
    page.says("#trouble", "Nothing found with this name").await;
    page.browser.press(&["Escape", "r"]).await.unwrap();
    page.ready().await;
    page.browser.press(&["/"]).await.unwrap();
    page.browser.type_text("cidrs-2").await.unwrap();
    page.says("#hits", "node").await;

    // Once the kubectl plugin has ended, a refresh shows an error.
    page.interrupt().await;
    page.browser
        .eval("document.getElementById('refresh').click()")
        .await
        .unwrap();
    page.says("#trouble", "Failed to fetch").await;
}
