//! Tests of networks whose configuration has a range of its own.

use super::*;
use crate::limits::{AllowedRange, NetworkLimits};

/// A node with a block of each of two pools. The network's range lies in the second pool, which no pod gets unless it
/// asks for it.
fn node() -> Node {
    let mut node = Node::new(&[("10.0.0.0/28", "pods"), ("192.168.2.0/28", "storage")]);
    let storage = PoolTerms {
        automatic: false,
        reserved: vec![
            IpRange::parse("192.168.2.0-192.168.2.3").unwrap(),
            IpRange::parse("192.168.2.15").unwrap(),
        ],
        ..pool("storage", &["192.168.2.0/28"], &[])
    };
    node.allocation.pools = vec![pool("pods", &["10.0.0.0/24"], &[]), storage];
    node.allocation.blocks[1]
        .reserved
        .clone_from(&node.allocation.pools[1].reserved);
    node.update();
    node
}

/// Returns an ADD of a network whose range allows the addresses from `first` to 192.168.2.14.
fn limited(add: Add, first: &str) -> Add {
    let allowed = IpRange::parse(&format!("{first}-192.168.2.14")).unwrap();
    let range = AllowedRange {
        cidr: cidr("192.168.2.0/28"),
        allowed: vec![allowed],
    };
    Add {
        limits: Some(Box::new(NetworkLimits {
            network_name: String::new(),
            ranges: vec![range],
        })),
        ..add
    }
}

#[test]
fn a_network_gets_addresses_of_the_pool_in_its_range() {
    let mut node = node();
    let add = |n| limited(ask(n), "192.168.2.4");
    assert_eq!(node.add(&add(1)), "192.168.2.4");
    assert_eq!(node.add(&add(1)), "192.168.2.4", "the same ADD once more");
    assert_eq!(node.add(&add(2)), "192.168.2.5");
    assert_eq!(node.add_one(3), "10.0.0.0", "a network without a range");
    let asking = |text| limited(ask_for(4, &[text]), "192.168.2.4");
    node.assert_refused(
        &asking("10.0.0.7"),
        OpErrorKind::NotUsable,
        "network `net` allows only 192.168.2.4-192.168.2.14, and not 10.0.0.7",
    );
    assert_eq!(node.add(&asking("192.168.2.9")), "192.168.2.9");
}

#[test]
fn a_pool_that_does_not_keep_to_the_range_gives_nothing() {
    let mut node = node();
    let add = |first| limited(ask(1), first);
    node.assert_refused(
        &add("192.168.2.6"),
        OpErrorKind::UnknownPool,
        "pool `storage` would also give 192.168.2.4-192.168.2.5: add these to `reserved`",
    );
    // A pool that the configuration or an annotation of the pod names has to fit the network's range, too.
    let of = |pool: &str, add| Add {
        pools: vec![pool.to_owned()],
        ..add
    };
    let by_name = of("pods", add("192.168.2.4"));
    node.assert_refused(
        &by_name,
        OpErrorKind::UnknownPool,
        "pool `pods` has other addresses",
    );
    assert_eq!(node.add(&of("storage", add("192.168.2.4"))), "192.168.2.4");
    node.allocation.pools.pop();
    node.update();
    let next = limited(ask(2), "192.168.2.4");
    node.assert_refused(
        &next,
        OpErrorKind::UnknownPool,
        "no pool of this node has any of these addresses: create a pool",
    );
}
