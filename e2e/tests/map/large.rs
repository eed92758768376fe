//! A pool with 20,000 blocks on 200 nodes, without a controller.

use std::collections::BTreeMap;

use cadastre_api::{FINALIZER, IPAMBlock, IPPool};
use cadastre_e2e::raw::{Call, JSON, MERGE_PATCH};
use cadastre_e2e::{ControlPlane, Options, crds, nodes};
use http::Method;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::eventually;
use crate::page::Page;

const NODES: u32 = 200;
const BLOCKS: u32 = 20_000;
const GROUP: &str = "/apis/cadastre.dev/v1alpha1";

fn cidr(i: u32) -> String {
    let base = std::net::Ipv4Addr::from(0x0A00_0000 + (i << 6));
    format!("{base}/26")
}

/// A map from the name of a node or block to its UID.
type Uids = BTreeMap<String, String>;

/// Returns the node of block `i`. Blocks are distributed as in a cluster that has grown: there are runs of blocks of
/// one node, and single blocks.
fn node_of(i: u32) -> u32 {
    (i / 7 * 31 + i % 7 / 5) % NODES
}

/// Returns how many addresses of block `i` are in use. Nodes differ in their load, and so do the blocks of a node.
fn used(i: u32) -> u32 {
    let busy = node_of(i) * 37 % 56;
    let noise = (i.wrapping_mul(2_654_435_761) >> 8) % 9;
    (busy + noise).min(61)
}

fn is_resting(i: u32) -> bool {
    i / 160 % 41 == 7
}

fn call(method: Method, path: &str, kind: &'static str, body: &Value) -> Call {
    Call::new(method, format!("{GROUP}{path}"), kind, body)
}

fn node_name(node: u32) -> String {
    nodes::numbered(node).name_any()
}

fn block_name(i: u32) -> String {
    cidr(i).replace(['.', '/'], "-")
}

fn block(i: u32, uids: &Uids) -> Call {
    let cidr = cidr(i);
    let node = node_name(node_of(i));
    let kind = if is_resting(i) { "Quarantine" } else { "Node" };
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock",
        "metadata": {"name": block_name(i)},
        "spec": {
            "cidr": cidr, "pool": "large", "since": "2026-01-01T00:00:00Z",
            "owner": {"kind": kind, "name": node, "uid": uids[&node]},
        },
    });
    call(Method::POST, "/ipamblocks", JSON, &body)
}

/// Returns the calls that create a node's NodeSubnet and write its status.
fn subnet(node: u32, uids: &Uids) -> (Call, Call) {
    let mine = || (0..BLOCKS).filter(move |i| node_of(*i) == node && !is_resting(*i));
    let listed: Vec<Value> = mine()
        .map(|i| {
            let mut held = json!({"cidr": cidr(i), "uid": uids[&block_name(i)], "pool": "large"});
            if i % 53 == 0 {
                held["recall"] = json!("Drain");
            }
            held
        })
        .collect();
    let told: Vec<Value> = mine()
        .map(|i| {
            let cooling = used(i + 1) % 4;
            let free = 61 - used(i).min(57) - cooling;
            json!({"cidr": cidr(i), "uid": uids[&block_name(i)], "used": used(i).min(57), "cooling": cooling, "free": free})
        })
        .collect();
    let name = node_name(node);
    let uid = &uids[&name];
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet", "metadata": {"name": name},
        "spec": {"nodeUID": uid, "blocks": listed},
    });
    let status = json!({"status": {"nodeUID": uid, "blocks": told}});
    (
        call(Method::POST, "/nodesubnets", JSON, &body),
        call(
            Method::PATCH,
            &format!("/nodesubnets/{name}/status"),
            MERGE_PATCH,
            &status,
        ),
    )
}

async fn uids<K>(client: &Client) -> Uids
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let all = Api::<K>::all(client.clone());
    let all = all.list(&ListParams::default()).await.unwrap();
    let named = |it: K| (it.name_any(), it.uid().unwrap());
    all.items.into_iter().map(named).collect()
}

async fn filled() -> ControlPlane {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let client = cluster.client().await.unwrap();
    crds::install(&client).await.unwrap();
    let spec = json!({
        "allocationMode": "Blocks", "ipv4": {"cidrs": ["10.0.0.0/11"]},
        "reserved": ["10.2.0.0/18", "10.25.128.0-10.25.255.255"],
    });
    let mut pool = IPPool::new("large", serde_json::from_value(spec).unwrap());
    pool.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    // Right after a CRD is created, the API server may still reject objects of its kind. So the creation is retried.
    eventually("the pool is created", async || {
        let pools = Api::<IPPool>::all(client.clone());
        Ok(Some(pools.create(&PostParams::default(), &pool).await?))
    })
    .await;
    let endpoint = cluster.endpoint().unwrap();
    let send = async |calls| endpoint.send_all(nodes::CONNECTIONS, calls).await.unwrap();
    nodes::create(&cluster, NODES, nodes::numbered)
        .await
        .unwrap();
    let mut uids = uids::<Node>(&client).await;
    send((0..BLOCKS).map(|i| block(i, &uids)).collect()).await;
    uids.extend(self::uids::<IPAMBlock>(&client).await);
    let (subnets, statuses) = (0..NODES).map(|node| subnet(node, &uids)).unzip();
    for calls in [subnets, statuses] {
        send(calls).await;
    }
    cluster
}

pub(crate) async fn twenty_thousand_blocks_are_one_picture() {
    let cluster = filled().await;
    let mut page = Page::open(&cluster).await;
    let before = page.plugin.usage().unwrap();
    let took = "(async () => { const from = performance.now(); \
         const text = await (await fetch('view?%7B%7D')).text(); \
         return [performance.now() - from, text.length]; })()";
    let took = page.browser.eval(took).await.unwrap();
    let cpu = page.plugin.usage().unwrap().cpu.saturating_sub(before.cpu);
    let said = format!(
        "{} bytes in {} ms, {cpu:?} of CPU, {} KiB at the peak",
        took[1],
        took[0],
        before.peak_rss / 1024
    );
    eprintln!("{said}");
    assert!(took[1].as_u64().unwrap() < 5_000_000, "{said}");

    // The picture has a cell for each block, and one for the reserved range that contains no block.
    assert_eq!(
        (page.view().await.as_str(), page.cells().await),
        ("10.0.0.0/11", u64::from(BLOCKS) + 1)
    );
    assert!(page.colours().await > 30);
    page.says("#figures", "19 520").await;
    page.says("#figures", &format!("{NODES}\nnodes")).await;
    let took = page.browser.eval("(() => { const from = performance.now(); for (let i = 0; i < 5; i++) draw(); return (performance.now() - from) / 5; })()");
    let took = took.await.unwrap().as_f64().unwrap();
    eprintln!("a picture takes {took:.0} ms");
    page.click("10.9.4.70", 1).await;
    page.says("#about h2", "10.9.4.64/26").await;
    page.says("#about", "Other ranges of node-").await;
    page.keep("map.png").await;
    let bar = "getComputedStyle(document.querySelector('#about .bar i')).backgroundColor";
    let light = page.browser.eval(bar).await.unwrap();
    page.browser.colours("dark").await.unwrap();
    page.browser
        .eval("new Promise((done) => setTimeout(done, 300))")
        .await
        .unwrap();
    assert_ne!(
        page.browser.eval(bar).await.unwrap(),
        light,
        "the old scheme's"
    );
    page.keep("map-dark.png").await;
    page.browser.colours("light").await.unwrap();
    // Zooms in until the selected block fills the view. The number of steps does not matter.
    page.browser
        .eval("document.getElementById('map').focus()")
        .await
        .unwrap();
    let mut views = vec![page.view().await];
    while !views.last().unwrap().ends_with("/26") && views.len() < 9 {
        page.browser.press(&["Enter"]).await.unwrap();
        let last = views.last().unwrap().clone();
        let moved = format!("document.documentElement.dataset.view !== '{last}'");
        page.browser.wait(&moved).await.unwrap();
        page.ready().await;
        views.push(page.view().await);
        if views.len() == 3 {
            page.keep("map-zoomed.png").await;
        }
    }
    assert_eq!(views.last().unwrap(), "10.9.4.64/26", "{views:?}");
    page.browser.press(&["Escape", "Escape"]).await.unwrap();
    page.browser
        .wait("document.documentElement.dataset.view.endsWith('/18')")
        .await
        .unwrap();
    page.assert_quiet().await;
}
