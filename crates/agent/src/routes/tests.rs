//! Tests with a real kernel. Each test runs in a network namespace of its own. Without root, the tests check nothing.

use std::collections::BTreeMap;
use std::env;
use std::process::Command;

use prometheus::Registry;
use tokio::time::timeout;

use super::ObjectEvent::{Applied, Deleted, Listed, Restarted};
use super::*;
use cadastre_api::NodeRoutesSpec;

const INSIDE: &str = "CADASTRE_TEST_IN_NETNS";

/// Returns whether the test named `test` runs in a network namespace of its own. If not, runs it in one.
fn is_inside(test: &str) -> bool {
    is_inside_with(test, &[])
}

/// As [`is_inside`], but the command `prefix` starts the test.
fn is_inside_with(test: &str, prefix: &[&str]) -> bool {
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let mut can = Command::new("unshare");
    can.args(["-n", "ip", "link", "add", "br0", "type", "bridge"]);
    if !can.status().is_ok_and(|it| it.success()) {
        eprintln!("skipped: needs root, unshare and ip");
        return false;
    }
    let name = format!("routes::tests::{test}");
    let mut inside = Command::new("unshare");
    inside
        .arg("-n")
        .args(prefix)
        .arg(env::current_exe().unwrap());
    inside
        .args([&name, "--exact", "--nocapture"])
        .env(INSIDE, "1");
    let output = inside.output().unwrap();
    let [out, error] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    let text = out + &error;
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
    false
}

/// Runs `ip` once for each line of `commands`.
fn ip(commands: &str) {
    for line in commands.lines().map(str::trim).filter(|it| !it.is_empty()) {
        let status = Command::new("ip").args(line.split(' ')).status().unwrap();
        assert!(status.success(), "ip {line}");
    }
}

/// Returns the lines of the output of a command of `ip`.
fn shown(command: &str) -> Vec<String> {
    let output = Command::new("ip")
        .args(command.split(' '))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| line.trim_end().to_owned());
    lines.filter(|line| !line.is_empty()).collect()
}

/// Returns the agent's routes of both families.
fn ours() -> Vec<String> {
    let mut all = shown("route show proto 202");
    all.extend(shown("-6 route show proto 202"));
    all
}

/// Adds a link to which the node is connected with the addresses 192.0.2.1 and 2001:db8::1.
fn link() {
    ip("link set lo up
        link add br0 type bridge
        link add veth0 type veth peer name veth1
        link set veth1 master br0 up
        link set veth0 up
        link set br0 up
        address add 192.0.2.1/24 dev br0
        -6 address add 2001:db8::1/64 dev br0 nodad
        route add default via 192.0.2.254
        -6 route add default via 2001:db8::ff");
}

fn node(name: &str, version: u64, via: &[&str], to: &[&str]) -> (String, NodeRoutesSeen) {
    let texts = |all: &[&str]| all.iter().map(|it| (*it).to_owned()).collect();
    let spec = NodeRoutesSpec {
        via: texts(via),
        destinations: texts(to),
    };
    (name.to_owned(), NodeRoutesSeen::new(version, &spec))
}

fn own() -> (String, NodeRoutesSeen) {
    let via = ["192.0.2.1", "2001:db8::1"];
    node("own", 1, &via, &["10.0.0.0/26", "fd00::/64"])
}

fn apply_all(nodes: &[(String, NodeRoutesSeen)]) -> AppliedRoutes {
    let nodes: BTreeMap<_, _> = nodes.iter().cloned().collect();
    apply::apply(&WantedRoutes::new(&nodes, "own"))
}

#[test]
fn routes_are_added_replaced_and_deleted() {
    if !is_inside("routes_are_added_replaced_and_deleted") {
        return;
    }
    link();
    let a = |v4: &str, v6: &str| {
        node(
            "a",
            2,
            &[v4, v6],
            &["10.0.1.0/26", "10.9.0.1/32", "fd00:0:0:1::/64"],
        )
    };
    let b = node("b", 3, &["192.0.2.3"], &["10.0.2.0/26"]);
    let first = [own(), a("192.0.2.2", "2001:db8::2"), b.clone()];
    let applied = apply_all(&first);
    assert_eq!((applied.installed, applied.missing), (6, 0), "{applied:?}");
    assert_eq!(applied.report(), RoutesReport::Installed);
    let all = [
        "unreachable 10.0.0.0/26 metric 4278198272",
        "10.0.1.0/26 via 192.0.2.2 dev br0 metric 202",
        "10.0.2.0/26 via 192.0.2.3 dev br0 metric 202",
        "10.9.0.1 via 192.0.2.2 dev br0 metric 202",
        "fd00:0:0:1::/64 via 2001:db8::2 dev br0 metric 202 pref medium",
        "unreachable fd00::/64 dev lo metric 4278198272 pref medium",
    ];
    let mut are = ours();
    are.sort();
    let mut sorted = all.map(str::to_owned);
    sorted.sort();
    assert_eq!(are, sorted);

    // Node a gets other addresses, and b loses its range to this node.
    let moved = node("own", 9, &["192.0.2.1"], &["10.0.2.0/26"]);
    apply_all(&[moved, a("192.0.2.4", "2001:db8::4"), b]);
    assert_eq!(
        ours(),
        [
            "10.0.1.0/26 via 192.0.2.4 dev br0 metric 202",
            "unreachable 10.0.2.0/26 metric 4278198272",
            "10.9.0.1 via 192.0.2.4 dev br0 metric 202",
            "fd00:0:0:1::/64 via 2001:db8::4 dev br0 metric 202 pref medium",
        ]
    );
    // When an interface goes down, the kernel deletes its routes. The agent adds them again.
    ip("link set br0 down
        link set br0 up
        -6 address add 2001:db8::1/64 dev br0 nodad");
    assert_eq!(ours(), ["unreachable 10.0.2.0/26 metric 4278198272"]);
    let applied = apply_all(&[own(), a("192.0.2.2", "2001:db8::2")]);
    assert_eq!(applied.report(), RoutesReport::Installed);
    assert_eq!(apply::remove_all().unwrap(), 5);
    assert_eq!(ours(), [""; 0]);
    assert_eq!(apply::remove_all().unwrap(), 0);
}

#[test]
fn routes_of_other_programs_stay() {
    if !is_inside("routes_of_other_programs_stay") {
        return;
    }
    link();
    ip("route add 10.0.1.0/26 via 192.0.2.7 proto static
        route add 10.0.2.0/26 via 192.0.2.7 proto static metric 202
        -6 route add fd00:0:0:1::/64 via 2001:db8::7 proto static metric 202
        route add 10.0.3.0/26 via 192.0.2.7 proto static metric 202
        route add 10.0.9.0/26 via 192.0.2.7 proto 202 metric 202 table 99
        route add unreachable 10.8.0.0/16 proto 202 metric 5");
    let others = || {
        [
            shown("route show proto static"),
            shown("-6 route show proto static"),
        ]
        .concat()
    };
    let before = others();
    assert_eq!(before.len(), 4);
    let to = ["10.0.1.0/26", "10.0.2.0/26", "fd00:0:0:1::/64"];
    let a = node("a", 2, &["192.0.2.2", "2001:db8::2"], &to);
    let applied = apply_all(&[own(), a]);
    assert_eq!((applied.installed, applied.missing), (3, 2));
    let RoutesReport::Failed(text) = applied.report() else {
        panic!("{applied:?}");
    };
    for part in [
        "route to 10.0.2.0/26 with metric 202 (protocol 4)",
        "fd00:0:0:1::/64",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(others(), before);
    assert!(ours().contains(&"10.0.1.0/26 via 192.0.2.2 dev br0 metric 202".to_owned()));
    assert!(
        !ours().iter().any(|it| it.contains("10.8.0.0/16")),
        "an earlier version's"
    );
    apply_all(&[]);
    assert_eq!((others(), ours()), (before, Vec::new()));
    assert_eq!(shown("route show table 99").len(), 1);
}

#[test]
fn a_node_that_is_not_on_the_link_is_named() {
    if !is_inside("a_node_that_is_not_on_the_link_is_named") {
        return;
    }
    link();
    let a = |v4: &str, v6: &str| node("a", 2, &[v4, v6], &["10.0.1.0/26", "fd00:0:0:1::/64"]);
    let b = node("b", 3, &["198.51.100.3"], &["10.0.2.0/26"]);
    let c = node("c", 4, &["192.0.2.4"], &["10.0.3.0/26"]);
    apply_all(&[own(), a("192.0.2.2", "2001:db8::2")]);
    let applied = apply_all(&[own(), a("198.51.100.2", "2001:db9::2"), b, c]);
    assert_eq!((applied.installed, applied.missing), (3, 3), "{applied:?}");
    let RoutesReport::NotOnLink(text) = applied.report() else {
        panic!("{applied:?}");
    };
    assert!(
        text.starts_with("2 nodes are not") && text.contains(": a, b. "),
        "{text}"
    );
    let all = ours();
    assert!(all.iter().any(|it| it.starts_with("10.0.3.0/26")));
    let stale = |it: &String| it.starts_with("10.0.1.0/26") || it.starts_with("fd00:0:0:1::");
    assert!(!all.iter().any(stale), "{all:?}");

    // An outdated route of the agent covers the address of a new node. The node still counts as on the link.
    ip("route add 192.0.2.64/26 via 192.0.2.9 proto 202 metric 202");
    let applied = apply_all(&[own(), a("192.0.2.70", "2001:db8::2")]);
    assert_eq!(applied.report(), RoutesReport::Installed, "{applied:?}");
}

#[test]
fn without_the_capability_the_report_names_it() {
    let without = ["setpriv", "--bounding-set=-net_admin"];
    if !is_inside_with("without_the_capability_the_report_names_it", &without) {
        return;
    }
    assert_eq!(apply::remove_all().unwrap(), 0);
    let applied = apply_all(&[own()]);
    assert_eq!((applied.installed, applied.missing), (0, 2), "{applied:?}");
    let RoutesReport::Failed(text) = applied.report() else {
        panic!("{applied:?}");
    };
    assert!(text.contains("NET_ADMIN"), "{text}");
}

#[test]
fn many_routes_take_little_time() {
    if !is_inside("many_routes_take_little_time") {
        return;
    }
    link();
    let nodes: BTreeMap<_, _> = (0..5_000_u32)
        .map(|n| {
            let (a, b) = (n / 250, n % 250);
            let to = [
                format!("10.{a}.{b}.0/24"),
                format!("fd00:0:{:x}:{:x}::/64", a + 1, b + 1),
            ];
            let via = [
                format!("192.0.2.{}", 2 + b),
                format!("2001:db8::{:x}", n + 0x100),
            ];
            let [via, to] = [&via, &to].map(|all| all.each_ref().map(String::as_str));
            node(&format!("n{n}"), u64::from(n), &via, &to)
        })
        .collect();
    let timed = |what: &str| {
        let begun = std::time::Instant::now();
        let wanted = WantedRoutes::new(&nodes, "own");
        let decided = begun.elapsed();
        let applied = apply::apply(&wanted);
        eprintln!(
            "{what}: decided in {decided:?}, applied in {:?}",
            begun.elapsed()
        );
        assert!(
            applied.missing == 0 && begun.elapsed() < Duration::from_secs(10),
            "{applied:?}"
        );
    };
    timed("first");
    timed("again");
    assert_eq!(ours().len(), 10_000);
}

#[tokio::test]
async fn routes_follow_the_objects_once_they_are_listed() {
    if !is_inside("routes_follow_the_objects_once_they_are_listed") {
        return;
    }
    link();
    ip("route add 10.7.0.0/26 via 192.0.2.7 proto 202 metric 202");
    let (report, mut reports) = watch::channel(RoutesReport::Pending);
    let metrics = AgentMetrics::register(&Registry::new()).unwrap();
    let (serves, served) = watch::channel(None);
    let keeper = RouteKeeper {
        own: "own".to_owned(),
        known: KnownRoutes::default(),
        serves: served,
        wanted: Arc::default(),
        metrics: metrics.clone(),
        report,
    };
    let (send, events) = mpsc::channel(BACKLOG);
    tokio::spawn(keeper.run(events));
    let next = async |reports: &mut watch::Receiver<RoutesReport>| {
        timeout(Duration::from_secs(5), next_report(reports))
            .await
            .unwrap()
    };
    let wait = async |count: usize| {
        for _ in 0..100 {
            if ours().len() == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{:?}", ours());
    };
    let asked = Duration::ZERO;
    send.send(Restarted { asked }).await.unwrap();
    send.send(Applied(own())).await.unwrap();
    let a = node("a", 2, &["192.0.2.2"], &["10.0.1.0/26", "10.0.2.0/26"]);
    send.send(Applied(a.clone())).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(ours().len(), 1, "the list has not ended");
    send.send(Listed).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(ours().len(), 1, "the node's network is not known");
    serves.send(Some(true)).unwrap();
    assert_eq!(next(&mut reports).await, RoutesReport::Installed);
    assert_eq!((ours().len(), metrics.routes.get()), (4, 4));
    send.send(Deleted(a)).await.unwrap();
    wait(2).await;
    let b = node("b", 3, &["198.51.100.2"], &["10.0.1.0/26"]);
    send.send(Applied(b)).await.unwrap();
    assert!(matches!(
        next(&mut reports).await,
        RoutesReport::NotOnLink(_)
    ));
    assert_eq!((metrics.routes.get(), metrics.route_errors.get()), (2, 1));
    serves.send(Some(false)).unwrap();
    assert_eq!(next(&mut reports).await, RoutesReport::LeftToOthers);
    assert_eq!(ours(), [""; 0]);
    serves.send(Some(true)).unwrap();
    wait(2).await;
}
