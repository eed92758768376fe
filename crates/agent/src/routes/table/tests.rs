use proptest::prelude::*;

use super::*;
use cadastre_api::NodeRoutesSpec;

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

fn via(text: &str) -> RouteTarget {
    RouteTarget::Via(Addr::parse_strict(text).unwrap())
}

fn node(version: u64, via: &[&str], destinations: &[&str]) -> NodeRoutesSeen {
    let texts = |all: &[&str]| all.iter().map(|it| (*it).to_owned()).collect();
    let spec = NodeRoutesSpec {
        via: texts(via),
        destinations: texts(destinations),
    };
    NodeRoutesSeen::new(version, &spec)
}

fn all_wanted(nodes: &[(&str, NodeRoutesSeen)]) -> WantedRoutes {
    let nodes = nodes.iter().cloned();
    let nodes = nodes.map(|(name, it)| (name.to_owned(), it)).collect();
    WantedRoutes::new(&nodes, "own")
}

/// Returns the routes that node `own` should have.
fn wanted(nodes: &[(&str, NodeRoutesSeen)]) -> BTreeMap<Cidr, RouteTarget> {
    all_wanted(nodes).routes
}

fn routes(all: &[(&str, RouteTarget)]) -> BTreeMap<Cidr, RouteTarget> {
    all.iter().map(|(it, target)| (cidr(it), *target)).collect()
}

#[test]
fn other_nodes_are_reached_through_their_address_of_the_family() {
    let own = node(
        1,
        &["192.0.2.1", "2001:db8::1"],
        &["10.0.0.0/26", "fd00::/64"],
    );
    let both = node(
        2,
        &["192.0.2.2", "2001:db8::2"],
        &["10.0.1.0/26", "fd00:0:0:1::/64"],
    );
    let one = node(
        3,
        &["192.0.2.3"],
        &["10.0.2.0/26", "10.9.9.9/32", "fd00:0:0:2::/64"],
    );
    let nodes = [("own", own), ("both", both), ("one", one)];
    let without_address = all_wanted(&nodes).without_address;
    assert_eq!(without_address, ["one".to_owned()].into());
    assert_eq!(
        wanted(&nodes),
        routes(&[
            ("10.0.0.0/26", RouteTarget::Unreachable),
            ("10.0.1.0/26", via("192.0.2.2")),
            ("10.0.2.0/26", via("192.0.2.3")),
            ("10.9.9.9/32", via("192.0.2.3")),
            ("fd00::/64", RouteTarget::Unreachable),
            ("fd00:0:0:1::/64", via("2001:db8::2")),
        ]),
        "the node without an IPv6 address gets no IPv6 route"
    );
}

#[test]
fn of_two_objects_with_the_same_range_the_newer_wins() {
    for (a, b, winner) in [(2, 11, "192.0.2.3"), (11, 2, "192.0.2.2")] {
        let nodes = [
            ("a", node(a, &["192.0.2.2"], &["10.0.1.0/26"])),
            ("b", node(b, &["192.0.2.3"], &["10.0.1.0/26"])),
        ];
        assert_eq!(wanted(&nodes), routes(&[("10.0.1.0/26", via(winner))]));
    }
    let lost = node(1, &["192.0.2.1"], &["10.0.1.0/26"]);
    let new = node(2, &["192.0.2.2"], &["10.0.1.0/26"]);
    let both = [("own", lost), ("a", new)];
    assert_eq!(wanted(&both), routes(&[("10.0.1.0/26", via("192.0.2.2"))]));
}

#[test]
fn no_route_covers_a_node_or_a_reserved_range() {
    let destinations = [
        "0.0.0.0/0",
        "::/0",
        "127.0.0.0/8",
        "128.0.0.0/1",
        "192.0.2.0/24",
        "192.0.2.9/32",
        "224.0.0.0/4",
        "169.254.1.0/24",
        "fe80::/64",
        "ff02::1/128",
        "::1/128",
        "10.0.0.0/24",
    ];
    let nodes = [
        ("own", node(1, &["192.0.2.1"], &["192.0.2.0/28"])),
        ("a", node(2, &["192.0.2.9", "2001:db8::9"], &destinations)),
        ("b", node(3, &["192.0.2.1"], &["10.1.0.0/24"])),
    ];
    let left = routes(&[("10.0.0.0/24", via("192.0.2.9"))]);
    assert_eq!(wanted(&nodes), left);
}

#[test]
fn own_ranges_are_refused_once() {
    let nodes = [
        (
            "own",
            node(
                1,
                &["192.0.2.1"],
                &["10.0.0.0/24", "10.0.0.7/32", "10.0.0.70/32", "10.1.0.1/32"],
            ),
        ),
        (
            "a",
            node(2, &["192.0.2.2"], &["10.0.0.64/26", "10.0.0.65/32"]),
        ),
    ];
    assert_eq!(
        wanted(&nodes),
        routes(&[
            ("10.0.0.0/24", RouteTarget::Unreachable),
            ("10.0.0.64/26", via("192.0.2.2")),
            ("10.0.0.65/32", via("192.0.2.2")),
            ("10.0.0.70/32", RouteTarget::Unreachable),
            ("10.1.0.1/32", RouteTarget::Unreachable),
        ])
    );
}

#[test]
fn routes_are_added_before_others_are_deleted() {
    let [a, b, c, d] = ["10.0.0.0/26", "10.0.1.0/26", "10.0.2.0/26", "10.0.3.0/26"].map(cidr);
    let wanted = BTreeMap::from([
        (b, via("192.0.2.2")),
        (c, RouteTarget::Unreachable),
        (d, via("192.0.2.2")),
    ]);
    let present = PresentRoutes::from([
        ((a, METRIC), Some(via("192.0.2.2"))),
        ((b, METRIC), Some(via("192.0.2.3"))),
        ((c, METRIC), Some(via("192.0.2.3"))),
        ((d, METRIC), Some(via("192.0.2.2"))),
        ((d, 7), None),
    ]);
    assert_eq!(
        changes(&wanted, &present),
        [
            RouteChange::Replace(b, via("192.0.2.2")),
            RouteChange::Add(c, RouteTarget::Unreachable),
            RouteChange::Delete(a, METRIC),
            RouteChange::Delete(c, METRIC),
            RouteChange::Delete(d, 7),
        ]
    );
}

fn any_target() -> impl Strategy<Value = RouteTarget> {
    (0_u8..4).prop_map(|it| match it {
        0 => RouteTarget::Unreachable,
        n => via(&format!("192.0.2.{n}")),
    })
}

fn any_cidr() -> impl Strategy<Value = Cidr> {
    (0_u128..8, 24_u8..27).prop_map(|(n, len)| {
        let family = Family::V4;
        let value = 0x0a00_0000 + (n << 6);
        Cidr::new(Addr { family, value }, len).unwrap()
    })
}

proptest! {
    #[test]
    fn the_changes_lead_to_the_wanted_routes_without_a_gap(
        wanted in prop::collection::btree_map(any_cidr(), any_target(), 0..12),
        before in prop::collection::vec((any_cidr(), any_target(), 0_u8..5), 0..12),
    ) {
        let mut present = PresentRoutes::new();
        for (cidr, target, odd) in before {
            let metric = if odd == 0 { 7 } else { target.metric() };
            present.insert((cidr, metric), (odd > 1).then_some(target));
        }
        let all = changes(&wanted, &present);
        let had: BTreeSet<Cidr> = present.keys().map(|(cidr, _)| *cidr).collect();
        for change in all {
            match change {
                RouteChange::Add(cidr, target) => {
                    let before = present.insert((cidr, target.metric()), Some(target));
                    prop_assert_eq!(before, None);
                }
                RouteChange::Replace(cidr, target) => {
                    let before = present.insert((cidr, target.metric()), Some(target));
                    prop_assert!(before.is_some_and(|it| it != Some(target)));
                }
                RouteChange::Delete(cidr, metric) => {
                    prop_assert!(present.remove(&(cidr, metric)).is_some());
                }
            }
            let has = |cidr: &Cidr| present.keys().any(|(it, _)| it == cidr);
            prop_assert!(had.iter().filter(|it| wanted.contains_key(it)).all(has));
        }
        let is = present.into_iter().map(|((cidr, _), target)| (cidr, target.unwrap()));
        prop_assert_eq!(is.collect::<BTreeMap<_, _>>(), wanted);
    }
}
