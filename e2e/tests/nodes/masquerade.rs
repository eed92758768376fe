//! Tests of the source address that the peer of a pod's connection observes. If the peer is a pod, it observes the
//! address of the connecting pod. Any other peer observes the address of that pod's node.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::{Context as _, ensure};
use cadastre_core::Cidr;
use cadastre_e2e::node::{Machine, NodeSide};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::pods::{self, Running};
use crate::{AGENT, Stage, eventually, machines};

const PORT: u16 = 8080;
const FLAGS: &[&str] = &["--masquerade=true"];

/// A command that starts a server in the background. The server answers each connection with the kernel's table of TCP
/// connections.
pub(crate) const SERVER: &str =
    "busybox nc -ll -p 8080 -e /bin/cat /proc/net/tcp /proc/net/tcp6 >/dev/null 2>&1 </dev/null &";

pub(crate) async fn pods_see_each_others_own_addresses_and_all_else_the_nodes(stage: &Stage) {
    // The blocks are small, so that the pods of one node have addresses in several blocks of one pool.
    let (east, east_pods) = node_with_pods(stage, "east", "10.61", 4).await;
    let (west, west_pods) = node_with_pods(stage, "west", "10.62", 1).await;
    let to = &west_pods[0];
    west.run_in_pod(&to.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    for from in &east_pods {
        assert_sees(&east, from, &to.addresses, &from.addresses).await;
    }
    // Both pods are on one node, in different blocks of one pool.
    let to = &east_pods[3];
    east.run_in_pod(&to.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    assert_sees(&east, &east_pods[0], &to.addresses, &east_pods[0].addresses).await;
    // These addresses lie outside all pools, so connections to them are masqueraded. The machines' own addresses cannot
    // be used here, because other tests' pools may contain them.
    let fabric = stage.site.fabric();
    let outside = ["192.0.2.9/32", "2001:db8:9::9/128"];
    for address in outside {
        let on_lo = ["ip", "address", "add", address, "dev", "lo"];
        west.run(&on_lo).await.unwrap();
        fabric.route(address, west.number()).await.unwrap();
    }
    let outside = outside.map(|it| it.split('/').next().unwrap().parse::<IpAddr>().unwrap());
    let server = SERVER.trim_end_matches('&');
    let _server = west.spawn("server", &["sh", "-c", server]).await.unwrap();
    assert_sees(&east, &east_pods[0], &outside, &machine(&east)).await;

    // The pool is extended by a CIDR that contains the address `grown`. Then connections to this address are no longer
    // masqueraded, not even the connections of running pods.
    let grown: IpAddr = "10.64.0.1".parse().unwrap();
    let on_lo = ["ip", "address", "add", "10.64.0.1/32", "dev", "lo"];
    west.run(&on_lo).await.unwrap();
    fabric.route("10.64.0.0/20", west.number()).await.unwrap();
    assert_sees(&east, &east_pods[0], &[grown], &machine(&east)).await;
    let cidrs = json!({"spec": {"ipv4": {"cidrs": ["10.62.0.0/20", "10.64.0.0/20"]}}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(cidrs));
    stage
        .api
        .pools
        .patch("west", &params, &patch)
        .await
        .unwrap();
    assert_sees(&east, &east_pods[0], &[grown], &east_pods[0].addresses).await;

    // A new pool selects only the other node. But all nodes must learn of its CIDRs.
    block_pool(stage, "west-late", "10.63").await;
    pods::create_in(
        &stage.api,
        "west",
        "late",
        Some(west.name()),
        Some("west-late"),
    )
    .await;
    let west_pods = pods::running(&stage.api, "west", 2).await;
    machines::route(stage, &west).await;
    let to = west_pods.iter().find(|it| it.name == "late").unwrap();
    let late = Cidr::parse_strict("10.63.0.0/20").unwrap();
    assert!(
        to.addresses
            .iter()
            .any(|it| late.contains_addr((*it).into())),
        "{to:?}"
    );
    west.run_in_pod(&to.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    assert_sees(&east, &east_pods[0], &to.addresses, &east_pods[0].addresses).await;
}

/// Creates a pool with small blocks of both families.
pub(crate) async fn block_pool(stage: &Stage, name: &str, net: &str) {
    let v6 = format!("fd00:{}::", net.replace('.', ":"));
    let spec = json!({
        "ipv4": {"cidrs": [format!("{net}.0.0/20")], "blockSize": 30},
        "ipv6": {"cidrs": [format!("{v6}/64")], "blockSize": 126},
    });
    stage.api.block_pool(name, spec).await.unwrap();
}

/// Creates a group's pool, starts a machine with a masquerading agent, creates `count` pods on the machine, and routes
/// packets for them in the fabric.
async fn node_with_pods(
    stage: &Stage,
    group: &str,
    net: &str,
    count: usize,
) -> (Machine, Vec<Running>) {
    let (machine, all) = unrouted_node_with_pods(stage, group, net, count, FLAGS).await;
    machines::route(stage, &machine).await;
    (machine, all)
}

/// Creates a group's pool, starts a machine whose agent has these flags, and creates `count` pods on the machine.
pub(crate) async fn unrouted_node_with_pods(
    stage: &Stage,
    group: &str,
    net: &str,
    count: usize,
    flags: &[&str],
) -> (Machine, Vec<Running>) {
    let api = &stage.api;
    block_pool(stage, group, net).await;
    let side = NodeSide::shipped("ptp", flags, AGENT).unwrap();
    let machine = stage.machine(group, side).await;
    pods::ready(api, machine.name(), true).await;
    pods::create_many(api, group, group, 0..count, Some(machine.name())).await;
    let all = pods::running(api, group, count).await;
    (machine, all)
}

fn machine(of: &Machine) -> Vec<IpAddr> {
    let both = cadastre_e2e::node::Fabric::addresses(of.number());
    both.map(|it| it.parse().unwrap()).into()
}

/// Asserts that the servers at the addresses `to` see connections from the pod `from` as coming from an address of
/// `as_whom`. `machine` is the pod's machine.
pub(crate) async fn assert_sees(
    machine: &Machine,
    from: &Running,
    to: &[IpAddr],
    as_whom: &[IpAddr],
) {
    for to in to {
        let family = |it: &&IpAddr| it.is_ipv4() == to.is_ipv4();
        let wanted = *as_whom.iter().find(family).unwrap();
        let what = format!("{to} sees {from:?} as {wanted}");
        eventually(&what, async || {
            let line = format!("sleep 1 | busybox nc -w 2 {to} {PORT}");
            let said = machine
                .run_in_pod(&from.container, &["sh", "-c", &line])
                .await?;
            let seen = peer(&said).with_context(|| format!("not connected: {said}"))?;
            ensure!(seen == wanted, "{to} sees {seen}");
            Ok(Some(()))
        })
        .await;
    }
}

/// Returns the remote address of the established connection to [`PORT`]. `text` has the format of `/proc/net/tcp` or
/// `tcp6`.
fn peer(text: &str) -> Option<IpAddr> {
    text.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, "01", ..] = words[..] else {
            return None;
        };
        let port = format!(":{PORT:04X}");
        let address = remote
            .split(':')
            .next()
            .filter(|_| local.ends_with(&port))?;
        // The kernel prints addresses as words of four bytes in the host's byte order.
        let word = |at: usize| u32::from_str_radix(address.get(at..at + 8)?, 16).ok();
        if address.len() == 8 {
            return Some(IpAddr::from(word(0)?.to_ne_bytes()));
        }
        let mut bytes = [0; 16];
        for (at, four) in bytes.chunks_mut(4).enumerate() {
            four.copy_from_slice(&word(at * 8)?.to_ne_bytes());
        }
        Some(Ipv6Addr::from(bytes).to_canonical())
    })
}
