//! Random ranges and operations for a node. Their values come from small sets, so that operations often conflict.

use std::time::Duration;

use cadastre_core::node_allocation::{
    Block, FamilyTerms, Gateway, NodeAllocation, PoolTerms, Prefix, Route,
};
use cadastre_core::{Addr, Cidr, IpRange};
use cadastre_node::{Add, Attachment, Check, Gc, Now, Op, PodRef};

use crate::rng::Rng;

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

/// Returns the moment `ms` milliseconds after the beginning of a boot.
pub fn at(boot: u64, ms: u64) -> Now {
    Now {
        boot: format!("boot-{boot}"),
        since_boot: Duration::from_millis(ms),
        wall_ms: 1_800_000_000_000,
    }
}

pub fn attachment(n: u64) -> Attachment {
    Attachment {
        network: if n.is_multiple_of(5) { "other" } else { "net" }.to_owned(),
        container_id: format!("c{n}"),
        ifname: if n.is_multiple_of(7) { "net1" } else { "eth0" }.to_owned(),
    }
}

fn pod(n: u64) -> PodRef {
    PodRef {
        namespace: "default".to_owned(),
        name: format!("pod-{n}"),
        uid: format!("uid-{n}"),
    }
}

/// Returns an ADD that requests no specific pool or address.
pub fn add(n: u64) -> Add {
    Add {
        attachment: attachment(n),
        netns: format!("/run/netns/{n}"),
        pod: Some(pod(n)),
        decided: true,
        ..Add::default()
    }
}

/// Returns the ranges of a node with these blocks, all of one pool with both families.
pub fn allocation(blocks: &[&str]) -> NodeAllocation {
    let family = |range| FamilyTerms {
        cidrs: vec![cidr(range)],
        gateway: Gateway::FirstOfBlock,
    };
    NodeAllocation {
        node_uid: "node-1".to_owned(),
        blocks: blocks
            .iter()
            .map(|it| Block {
                cidr: cidr(it),
                uid: format!("uid-of-{it}"),
                pool: "a".to_owned(),
                draining: false,
                borrowed: false,
                reserved: Vec::new(),
                on_request: Vec::new(),
            })
            .collect(),
        pools: vec![PoolTerms {
            ipv4: Some(family("10.0.0.0/8")),
            ipv6: Some(family("fd00::/16")),
            serves_unknown: true,
            ..PoolTerms::named("a")
        }],
        ..NodeAllocation::default()
    }
}

/// Lists of blocks. The blocks of one list are disjoint; blocks of different lists may overlap.
const LISTS: [&[&str]; 3] = [
    &[
        "10.0.0.0/28",
        "10.0.0.16/29",
        "10.0.0.24/30",
        "10.0.0.28/31",
        "10.0.0.30/32",
        "10.0.0.32/27",
        "fd00::/124",
        "fd00::10/126",
        "fd00::14/127",
        "fd00::20/123",
    ],
    &[
        "10.0.0.0/27",
        "10.0.0.32/28",
        "10.0.0.48/28",
        "fd00::/123",
        "fd00::20/124",
    ],
    &[
        "10.0.0.0/28",
        "10.0.0.32/27",
        "10.0.0.64/26",
        "fd00::/124",
        "fd00::40/122",
    ],
];
const POOLS: [&str; 5] = ["a", "b", "c", "d", ""];

fn family(rng: &mut Rng, range: &str, gateway: &str) -> FamilyTerms {
    FamilyTerms {
        cidrs: vec![cidr(range)],
        gateway: match rng.below(4) {
            0 => Gateway::None,
            1 => Gateway::Address(Addr::parse_strict(gateway).unwrap()),
            _ => Gateway::FirstOfBlock,
        },
    }
}

fn pool(rng: &mut Rng, name: &str) -> PoolTerms {
    let (v4, v6) = match name {
        "a" => (true, true),
        "b" => (true, false),
        "c" => (false, true),
        _ => (rng.one_in(2), rng.one_in(2)),
    };
    PoolTerms {
        automatic: !rng.one_in(5),
        serves_unknown: false,
        denies_explicit: false,
        cooldown_seconds: *rng.pick(&[0, 5, 30]),
        warm: (1, 10),
        ipv4: v4.then(|| family(rng, "10.0.0.0/26", "10.0.0.9")),
        ipv6: v6.then(|| family(rng, "fd00::/121", "fd00::9")),
        routes: vec![Route {
            dst: cidr("0.0.0.0/0"),
            gw: None,
        }],
        prefix: *rng.pick(&[Prefix::Host, Prefix::Block, Prefix::Pool]),
        ..PoolTerms::named(name)
    }
}

/// Returns random ranges of a node, which are either the ranges `last` with one change, or completely new blocks.
pub fn any_allocation(rng: &mut Rng, last: &NodeAllocation) -> NodeAllocation {
    let mut new = last.clone();
    match rng.below(8) {
        0 => new.node_uid = format!("node-{}", rng.below(3)),
        1 => new.pools = pools(rng),
        2 | 3 => {
            for block in &mut new.blocks {
                if rng.one_in(4) {
                    block.draining = !block.draining;
                }
                if rng.one_in(4) {
                    block.reserved = some_of(rng, block.cidr);
                    block.on_request = some_of(rng, block.cidr);
                }
                if rng.one_in(8) {
                    block.uid = format!("u{}", rng.below(3));
                }
                if rng.one_in(8) {
                    (*rng.pick(&POOLS)).clone_into(&mut block.pool);
                }
            }
        }
        4 | 5 => new.blocks.retain(|_| !rng.one_in(3)),
        _ => {
            new.blocks.clear();
            let list = *rng.pick(&LISTS);
            for it in list {
                if !rng.one_in(3) {
                    new.blocks.push(Block {
                        cidr: cidr(it),
                        uid: format!("u{}", rng.below(2)),
                        pool: (*rng.pick(&POOLS)).to_owned(),
                        draining: rng.one_in(8),
                        borrowed: false,
                        reserved: some_of(rng, cidr(it)),
                        on_request: some_of(rng, cidr(it)),
                    });
                }
            }
        }
    }
    new
}

pub fn first_allocation(rng: &mut Rng) -> NodeAllocation {
    NodeAllocation {
        node_uid: "node-0".to_owned(),
        pools: pools(rng),
        ..NodeAllocation::default()
    }
}

fn pools(rng: &mut Rng) -> Vec<PoolTerms> {
    let mut names = vec!["a", "b", "c", "d"];
    let mut pools = Vec::new();
    while !names.is_empty() {
        let name = names.swap_remove(rng.index(names.len()));
        if !rng.one_in(4) {
            pools.push(pool(rng, name));
        }
    }
    pools
}

fn some_of(rng: &mut Rng, block: Cidr) -> Vec<IpRange> {
    if !rng.one_in(3) {
        return Vec::new();
    }
    let (one, other) = (inside(rng, block), inside(rng, block));
    IpRange::new(one.min(other), one.max(other))
        .into_iter()
        .collect()
}

fn inside(rng: &mut Rng, block: Cidr) -> Addr {
    let size = block.last().value - block.first().value + 1;
    let value = block.first().value + u128::from(rng.next()) % size;
    Addr {
        value,
        ..block.first()
    }
}

/// Returns a random operation. `has` returns the addresses of an attachment.
pub fn any_op(rng: &mut Rng, has: impl Fn(&Attachment) -> Vec<Addr>) -> Op {
    let n = rng.below(60);
    let attachment = attachment(n);
    match rng.below(20) {
        0..9 => {
            let mut add = add(n);
            if rng.one_in(6) {
                add.netns = format!("/run/netns/{}", rng.below(60));
            }
            if rng.one_in(6) {
                add.pod = None;
            } else if rng.one_in(4) {
                // The ADD is for another pod with the same name, as if the pod had been deleted and created again.
                let uid = format!("uid-{n}-{}", rng.below(3));
                add.pod = add.pod.map(|pod| PodRef { uid, ..pod });
            }
            match rng.below(6) {
                0 => add.addresses = wishes(rng),
                1 => {
                    let count = 1 + rng.index(2);
                    let pool = |rng: &mut Rng| (*rng.pick(&["a", "b", "c", "d", "x"])).to_owned();
                    add.pools = (0..count).map(|_| pool(rng)).collect();
                }
                2 => add.addresses = has(&attachment),
                _ => {}
            }
            Op::Add(add)
        }
        9..16 => Op::Del(attachment),
        16 | 17 => {
            let mut addresses = has(&attachment);
            if rng.one_in(3) {
                addresses.extend(wishes(rng));
            }
            if rng.one_in(4) {
                addresses.pop();
            }
            Op::Check(Check {
                attachment,
                addresses,
            })
        }
        18 => Op::Status,
        _ => {
            let valid = (0..60).filter(|_| !rng.one_in(3)).collect::<Vec<u64>>();
            let valid = valid.into_iter().map(self::attachment);
            Op::Gc(Gc {
                network: attachment.network,
                valid: valid.map(|it| (it.container_id, it.ifname)).collect(),
            })
        }
    }
}

fn wishes(rng: &mut Rng) -> Vec<Addr> {
    let count = 1 + rng.below(2);
    let mut wishes = Vec::new();
    for _ in 0..count {
        let list = *rng.pick(&LISTS);
        let block = cidr(list[rng.index(list.len())]);
        wishes.push(inside(rng, block));
    }
    wishes
}
