//! Whose address the other side sees: pods see each other's own, all else sees the node's.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::{Context as _, ensure};
use cadastre_e2e::node::{Machine, NodeSide};
use cadastre_e2e::wait::until;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::pods::{self, Running};
use crate::{AGENT, LIMIT, Stage, machines};

const PORT: u16 = 8080;
const FLAGS: &[&str] = &["--masquerade=true"];

/// Answers each connection with what the kernel says of it, and goes on in the background.
const SERVER: &str =
    "busybox nc -ll -p 8080 -e /bin/cat /proc/net/tcp /proc/net/tcp6 >/dev/null 2>&1 </dev/null &";

pub(crate) async fn pods_see_each_others_own_addresses_and_all_else_the_nodes(stage: &Stage) {
    // Blocks of few pods, so that pods of one node and one pool are of several.
    let (east, east_pods) = node_with_pods(stage, "east", "10.61", 4).await;
    let (west, west_pods) = node_with_pods(stage, "west", "10.62", 1).await;
    let to = &west_pods[0];
    west.run_in_pod(&to.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    for from in &east_pods {
        assert_sees(&east, from, &to.addresses, &from.addresses).await;
    }
    // Blocks of one pool, on one node.
    let to = &east_pods[3];
    east.run_in_pod(&to.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    assert_sees(&east, &east_pods[0], &to.addresses, &east_pods[0].addresses).await;
    // Not a pod: the machine's own address, as anything outside of the pools.
    let server = SERVER.trim_end_matches('&');
    let _server = west.spawn("server", &["sh", "-c", server]).await.unwrap();
    assert_sees(&east, &east_pods[0], &machine(&west), &machine(&east)).await;

    // A pool that grows: what was outside of it is inside, for pods that run.
    let grown: IpAddr = "10.64.0.1".parse().unwrap();
    let on_lo = ["ip", "address", "add", "10.64.0.1/32", "dev", "lo"];
    west.run(&on_lo).await.unwrap();
    let fabric = stage.site.fabric();
    fabric.route("10.64.0.0/20", west.number()).await.unwrap();
    assert_sees(&east, &east_pods[0], &[grown], &machine(&east)).await;
    let cidrs = json!({"spec": {"ipv4": {"cidrs": ["10.62.0.0/20", "10.64.0.0/20"]}}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(cidrs));
    stage
        .hand
        .pools
        .patch("west", &params, &patch)
        .await
        .unwrap();
    assert_sees(&east, &east_pods[0], &[grown], &east_pods[0].addresses).await;

    // Of a pool that comes later all nodes hear, also those that it does not serve.
    let (late, late_pods) = node_with_pods(stage, "late", "10.63", 1).await;
    let to = &late_pods[0];
    late.run_in_pod(&to.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    assert_sees(&east, &east_pods[0], &to.addresses, &east_pods[0].addresses).await;
}

/// A pool of a group's own with a machine that it serves, which masquerades, and `count` pods there.
async fn node_with_pods(
    stage: &Stage,
    group: &str,
    net: &str,
    count: usize,
) -> (Machine, Vec<Running>) {
    let hand = &stage.hand;
    let v6 = format!("fd00:{}::", net.replace('.', ":"));
    let spec = json!({
        "ipv4": {"cidrs": [format!("{net}.0.0/20")], "blockSize": 30},
        "ipv6": {"cidrs": [format!("{v6}/64")], "blockSize": 126},
    });
    hand.block_pool(group, spec).await.unwrap();
    let side = NodeSide::shipped("ptp", FLAGS, AGENT).unwrap();
    let machine = stage.machine(group, side).await;
    pods::ready(hand, machine.name(), true).await;
    pods::create_many(hand, group, group, 0..count, Some(machine.name())).await;
    let all = pods::running(hand, group, count).await;
    machines::route(stage, &machine).await;
    (machine, all)
}

fn machine(of: &Machine) -> Vec<IpAddr> {
    let both = cadastre_e2e::node::Fabric::addresses(of.number());
    both.map(|it| it.parse().unwrap()).into()
}

/// Who listens on `to` sees connections out of the pod `from`, on `machine`, as coming from `as_whom`.
async fn assert_sees(machine: &Machine, from: &Running, to: &[IpAddr], as_whom: &[IpAddr]) {
    for to in to {
        let family = |it: &&IpAddr| it.is_ipv4() == to.is_ipv4();
        let wanted = *as_whom.iter().find(family).unwrap();
        let what = format!("{to} sees {from:?} as {wanted}");
        until(&what, LIMIT, async || {
            let line = format!("sleep 1 | busybox nc -w 2 {to} {PORT}");
            let said = machine
                .run_in_pod(&from.container, &["sh", "-c", &line])
                .await?;
            let seen = peer(&said).with_context(|| format!("not connected: {said}"))?;
            ensure!(seen == wanted, "{to} sees {seen}");
            Ok(Some(()))
        })
        .await
        .unwrap();
    }
}

/// The other end of the connection to the port, in a text as of `/proc/net/tcp` and `tcp6`.
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
        // Words of four bytes, each as this machine has numbers.
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
