//! Tests of direct routes: the pods of different nodes reach each other by their own addresses, although nothing else
//! routes packets between the machines.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use cadastre_api::NodeRoutes;
use cadastre_e2e::Fixtures;
use cadastre_e2e::node::{Fabric, Machine};
use kube::Api;

use crate::masquerade::{SERVER, assert_sees, unrouted_node_with_pods};
use crate::pods::{self, Running};
use crate::{Stage, eventually};

pub(crate) const FLAGS: &[&str] = &["--masquerade=true", "--routes=direct"];

/// The protocol number of the routes that agents install.
const PROTOCOL: &str = "202";

pub(crate) async fn pods_of_two_nodes_reach_each_other_while_blocks_agents_and_nodes_come_and_go(
    stage: &Stage,
) {
    let api = &stage.api;
    let (mut east, east_pods) = unrouted_node_with_pods(stage, "reast", "10.71", 4, FLAGS).await;
    let (mut west, west_pods) = unrouted_node_with_pods(stage, "rwest", "10.72", 4, FLAGS).await;
    for to in [&west_pods[0], &west_pods[3]] {
        serve(&west, to).await;
        assert_sees(&east, &east_pods[0], &to.addresses, &east_pods[0].addresses).await;
    }
    serve(&east, &east_pods[1]).await;
    let (from, to) = (&west_pods[1], &east_pods[1].addresses);
    assert_sees(&west, from, to, &from.addresses).await;

    // Routes of other protocols stay, even if they lead to ranges of pods.
    let foreign = [
        ("-4", "10.72.15.0/24", "172.31.0.254"),
        ("-6", "fd00:10:72:ff::/80", "fd00:31::254"),
    ];
    for (family, to, via) in foreign {
        let add = [
            "ip", family, "route", "add", to, "via", via, "proto", "static",
        ];
        east.run(&add).await.unwrap();
    }

    // No packet is lost while the agent is killed, starts again, and blocks of the other node come and go.
    let peer = west_pods[0].addresses.clone();
    ping(&east, &east_pods[0], &peer, 300, "0.1").await;
    east.agent().unwrap().kill().await.unwrap();
    pods::create_many(api, "rwest", "rmore", 0..4, Some(west.name())).await;
    let more = pods::running_of(api, "rwest", "rmore", 4).await;
    east.start_agent().await.unwrap();
    let to = more.last().unwrap();
    serve(&west, to).await;
    assert_sees(&east, &east_pods[0], &to.addresses, &east_pods[0].addresses).await;
    pods::delete_many(api, "rmore", 0..4).await;
    nothing_lost(&east, &east_pods[0], &peer, 300).await;
    routes_follow(api, &east, west.name()).await;

    let late = lateness(&east, "rwest", api, async {
        pods::create_many(api, "rwest", "rlate", 0..4, Some(west.name())).await;
        pods::running_of(api, "rwest", "rlate", 4).await;
    })
    .await;
    eprintln!("routes: there at most {late:.1?} after their blocks were listed");
    pods::delete_many(api, "rlate", 0..4).await;

    // The agent restores its routes after somebody has deleted them.
    for family in ["-4", "-6"] {
        let flush = ["ip", family, "route", "flush", "proto", PROTOCOL];
        east.run(&flush).await.unwrap();
    }
    routes_follow(api, &east, west.name()).await;

    // The agent reports the name of a node that is not on the link. The routes to the other nodes stay.
    api.node("reast", "r-far").await.unwrap();
    api.subnet_until(
        east.name(),
        "it names the node that is not on the link",
        |it| {
            let mut conditions = it.status.iter().flat_map(|it| &it.conditions);
            conditions.any(|it| {
                it.type_ == "RoutesReady"
                    && it.reason == "NotOnLink"
                    && it.message.contains("r-far")
            })
        },
    )
    .await
    .unwrap();
    routes_follow(api, &east, west.name()).await;
    api.delete_node("r-far").await.unwrap();
    api.subnet_until(east.name(), "all routes are installed", |it| {
        let mut conditions = it.status.iter().flat_map(|it| &it.conditions);
        conditions.any(|it| it.type_ == "RoutesReady" && it.status == "True")
    })
    .await
    .unwrap();

    // When a node is deleted, the agent removes the routes to this node.
    let gone = Fabric::addresses(west.number()).map(|it| format!(" via {it} "));
    west.power_off().await.unwrap();
    api.delete_node(west.name()).await.unwrap();
    eventually("no route leads to a node that is gone", async || {
        let routes = installed(&east).await?;
        let leads_there = |it: &&String| gone.iter().any(|via| it.contains(via));
        ensure!(!routes.iter().any(|it| leads_there(&it)), "{routes:?}");
        Ok(Some(()))
    })
    .await;
    for (family, to, _) in foreign {
        let left = east
            .run(&["ip", family, "route", "show", to])
            .await
            .unwrap();
        assert!(left.contains("proto static"), "{to}: {left:?}");
    }
}

async fn serve(machine: &Machine, pod: &Running) {
    let command = ["sh", "-c", SERVER];
    machine.run_in_pod(&pod.container, &command).await.unwrap();
}

/// Starts to send `count` packets from a pod to each of these addresses, one every `interval` seconds.
pub(crate) async fn ping(
    machine: &Machine,
    from: &Running,
    to: &[IpAddr],
    count: usize,
    interval: &str,
) {
    for to in to {
        let line =
            format!("busybox ping -i {interval} -c {count} -q {to} >/ping-{to} 2>&1 </dev/null &");
        let command = ["sh", "-c", &line];
        machine.run_in_pod(&from.container, &command).await.unwrap();
    }
}

/// Waits until the packets are sent, and asserts that each was answered.
pub(crate) async fn nothing_lost(machine: &Machine, from: &Running, to: &[IpAddr], count: usize) {
    for to in to {
        let file = format!("/ping-{to}");
        let said = eventually("all packets are sent", async || {
            let said = machine.run_in_pod(&from.container, &["cat", &file]).await?;
            ensure!(said.contains("packets transmitted"), "{said}");
            Ok(Some(said))
        })
        .await;
        assert!(
            said.contains(&format!("{count} packets received, 0% packet loss")),
            "{said}"
        );
    }
}

/// Compares a pool's blocks with the machine's routes until `change` has ended and every block has a route. Returns the
/// longest time for which an existing block had no route.
async fn lateness(
    machine: &Machine,
    pool: &str,
    api: &Fixtures,
    change: impl Future<Output = ()>,
) -> Duration {
    let mut change = pin!(change);
    let mut unrouted: BTreeMap<String, Instant> = BTreeMap::new();
    let (mut late, mut is_over) = (Duration::ZERO, false);
    while !is_over || !unrouted.is_empty() {
        let look = async {
            let blocks = api.blocks_of(pool).await.unwrap();
            let seen = Instant::now();
            (blocks, seen, installed(machine).await.unwrap())
        };
        let (blocks, seen, routes) = if is_over {
            look.await
        } else {
            tokio::select! {
                looked = look => looked,
                () = &mut change => {
                    is_over = true;
                    continue;
                }
            }
        };
        let is_routed = |block: &str| {
            let mut to = routes.iter().filter_map(|it| it.split(' ').next());
            to.any(|it| with_length(it) == block)
        };
        unrouted.retain(|block, _| blocks.contains(block));
        for block in blocks {
            if !is_routed(&block) {
                unrouted.entry(block).or_insert(seen);
            } else if let Some(since) = unrouted.remove(&block) {
                late = late.max(since.elapsed());
            }
        }
    }
    late
}

/// Waits until the routes to the other node are exactly those that its NodeRoutes lists.
async fn routes_follow(api: &Fixtures, machine: &Machine, other: &str) {
    let all: Api<NodeRoutes> = Api::all(api.client.clone());
    eventually("the routes are those of the other node", async || {
        let spec = all.get(other).await?.spec;
        let wanted: BTreeSet<String> = spec.destinations.iter().cloned().collect();
        let installed = installed(machine).await?;
        let via = |it: &String| {
            let mut words = it.split(' ');
            let to = words.next()?;
            let via = words.skip_while(|it| *it != "via").nth(1)?;
            spec.via.iter().any(|it| it == via).then(|| with_length(to))
        };
        let found: BTreeSet<String> = installed.iter().filter_map(via).collect();
        ensure!(!wanted.is_empty(), "{other} has no routes");
        ensure!(found == wanted, "{found:?} instead of {wanted:?}");
        Ok(Some(()))
    })
    .await;
}

/// Adds the prefix length that `ip` does not print for a route to a single address.
fn with_length(to: &str) -> String {
    match to.contains('/') {
        true => to.to_owned(),
        false if to.contains(':') => format!("{to}/128"),
        false => format!("{to}/32"),
    }
}

/// Returns the routes of both families that the agent has installed, one line each.
async fn installed(machine: &Machine) -> anyhow::Result<Vec<String>> {
    let mut all = Vec::new();
    for family in ["-4", "-6"] {
        let show = ["ip", family, "route", "show", "proto", PROTOCOL];
        let lines = machine.run(&show).await.context("ip route")?;
        all.extend(lines.lines().map(str::to_owned));
    }
    Ok(all)
}
