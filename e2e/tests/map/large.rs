//! 20,000 blocks of 200 nodes, on a controller that stands by: another one has the Lease.

use std::fmt::Write as _;
use std::time::Instant;

use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::raw::{Call, JSON, MERGE_PATCH};
use cadastre_e2e::stage::start_controller;
use cadastre_e2e::{ControlPlane, Options, crds, install, nodes};
use http::Method;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::LIMIT;
use crate::page::Page;

const NODES: u32 = 200;
const BLOCKS: u32 = 20_000;
const GROUP: &str = "/apis/cadastre.dev/v1alpha1";

fn cidr(i: u32) -> String {
    let base = std::net::Ipv4Addr::from(0x0A00_0000 + (i << 6));
    format!("{base}/26")
}

/// Spread like in a cluster that has grown: runs of blocks of one node, and some alone.
fn node_of(i: u32) -> u32 {
    (i / 7 * 31 + i % 7 / 5) % NODES
}

/// Busy nodes and quiet ones, and no two blocks alike.
fn used(i: u32) -> u32 {
    let busy = node_of(i) * 37 % 56;
    let noise = (i.wrapping_mul(2_654_435_761) >> 8) % 9;
    (busy + noise).min(61)
}

fn is_resting(i: u32) -> bool {
    i / 160 % 41 == 7
}

fn call(method: Method, path: &str, kind: &'static str, body: &Value) -> Call {
    Call {
        method,
        path: format!("{GROUP}{path}"),
        content_type: kind,
        body: body.to_string().into(),
    }
}

fn block(i: u32) -> Call {
    let cidr = cidr(i);
    let node = node_of(i);
    let kind = if is_resting(i) { "Quarantine" } else { "Node" };
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock",
        "metadata": {"name": cidr.replace(['.', '/'], "-")},
        "spec": {
            "cidr": cidr, "pool": "large", "since": "2026-01-01T00:00:00Z",
            "owner": {"kind": kind, "name": format!("node-{node:03}"), "uid": format!("uid-{node}")},
        },
    });
    call(Method::POST, "/ipamblocks", JSON, &body)
}

/// The NodeSubnet of a node, and its status.
fn subnet(node: u32) -> (Call, Call) {
    let mine = || (0..BLOCKS).filter(move |i| node_of(*i) == node && !is_resting(*i));
    let listed: Vec<Value> = mine()
        .map(|i| {
            let mut held = json!({"cidr": cidr(i), "uid": format!("b{i}"), "pool": "large"});
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
            json!({"cidr": cidr(i), "uid": format!("b{i}"), "used": used(i).min(57), "cooling": cooling, "free": free})
        })
        .collect();
    let name = format!("node-{node:03}");
    let body = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet", "metadata": {"name": name},
        "spec": {"nodeUID": format!("uid-{node}"), "blocks": listed},
    });
    let status = json!({"status": {"nodeUID": format!("uid-{node}"), "blocks": told}});
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

async fn filled() -> ControlPlane {
    let cluster = ControlPlane::start(Options::default()).await.unwrap();
    let client = cluster.client().await.unwrap();
    crds::install(&client).await.unwrap();
    let held: Lease = serde_json::from_value(json!({
        "metadata": {"name": cadastre_api::LEASE_NAME},
        "spec": {
            "holderIdentity": "elsewhere_00000000", "leaseDurationSeconds": 3600,
            "renewTime": "2026-01-01T00:00:00.000000Z", "acquireTime": "2026-01-01T00:00:00.000000Z",
        },
    }))
    .unwrap();
    let leases = Api::<Lease>::namespaced(client.clone(), cadastre_e2e::lease::NAMESPACE);
    leases.create(&PostParams::default(), &held).await.unwrap();
    let spec = json!({
        "allocate": "Blocks", "ipv4": {"cidrs": ["10.0.0.0/11"]},
        "reserved": ["10.2.0.0/18", "10.25.128.0-10.25.255.255"],
    });
    install::pool(&client, "large", spec).await.unwrap();
    let endpoint = cluster.endpoint().unwrap();
    let (subnets, statuses): (Vec<Call>, Vec<Call>) = (0..NODES).map(subnet).unzip();
    for calls in [(0..BLOCKS).map(block).collect(), subnets, statuses] {
        endpoint.send_all(nodes::CONNECTIONS, calls).await.unwrap();
    }
    cluster
}

pub(crate) async fn twenty_thousand_blocks_are_one_picture() {
    let cluster = filled().await;
    let mut daemon = start_controller(&cluster, ADMIN, &["--map"]).unwrap();
    let ready = daemon.wait_ready(LIMIT).await.unwrap();
    assert!(ready.starts_with("standby"), "{ready}");
    let before = daemon.process().usage().unwrap();
    let begun = Instant::now();
    let text = daemon.get("/map.json?pool=large").await.unwrap();
    let took = begun.elapsed();
    let body: Value = serde_json::from_str(&text).unwrap();
    let rows = body["rows"].as_array().unwrap().len();
    let after = daemon.process().usage().unwrap();
    let mut said = String::new();
    let _ = write!(
        said,
        "{rows} rows, {} bytes in {took:?}, {:?} of CPU, {} KiB more at the peak",
        text.len(),
        after.cpu.saturating_sub(before.cpu),
        after.peak_rss.saturating_sub(before.peak_rss) / 1024,
    );
    eprintln!("{said}");
    assert!(rows == BLOCKS as usize && text.len() < 2_000_000, "{said}");
    assert!(body["cut"] == false && body["owners"].as_array().unwrap().len() == NODES as usize);

    let mut page = Page::open(&daemon, "").await;
    assert_eq!(
        (page.view().await.as_str(), page.count("rows").await),
        ("10.0.0.0/11", 20_000)
    );
    assert!(page.count("drawn").await >= 20_000);
    assert!(page.colours().await > 30);
    page.says("#legend", "19 520").await;
    // Nobody leads, and so nobody has counted.
    let figures = page.text("#figures").await;
    assert_eq!(
        figures.split_whitespace().collect::<Vec<_>>(),
        [&*NODES.to_string(), "nodes"]
    );
    // A redraw is quick enough to follow the keys.
    let took = page.browser.eval("(() => { const from = performance.now(); for (let i = 0; i < 5; i++) draw(); return (performance.now() - from) / 5; })()");
    let took = took.await.unwrap().as_f64().unwrap();
    eprintln!("a picture takes {took:.0} ms");
    assert!(took < 2_000.0, "{took} ms");
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
    // Down to the block in as many steps as it takes.
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
