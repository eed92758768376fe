//! Converts the spec of a NodeSubnet to the form in which the node's store keeps it.
//!
//! The controller writes valid specs, but an API server may return anything. So a value that cannot be parsed affects
//! only its own block or field. A block whose CIDR cannot be parsed is left out. An entry of `reserved` that cannot be
//! parsed might mean any address of its block, so the whole block counts as reserved. An entry of `onRequest` that
//! cannot be parsed has the effect that the whole block is assigned only on request.
//!
//! The blocks of an IPClaim form a pool of their own, so that no other pod gets their addresses. This pool has the
//! terms of the IPPool, as far as they concern CNI results. `reserved` and `onRequest` of such a block are ignored,
//! because their only purpose is to keep older agents, which do not know claims, from assigning the address.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use crate::{
    AddressPrefix, AddressTerms, AllocatedBlock, AllocatedRange, AssignmentMode, ConflictProbe,
    ExplicitAddresses, NodePool, NodePoolRanges, NodeSubnetSpec, Recall, UnknownPods,
};
use cadastre_core::node_allocation::{
    Block, Dns, FamilyTerms, Gateway, NodeAllocation, PoolTerms, Prefix, Route, is_claim,
    pool_of_claim,
};
use cadastre_core::usable::{covering, usable, usable_in};
use cadastre_core::{Addr, Cidr, Family, IpRange};

/// Returns the ranges from which the Node with this UID may assign addresses. Also returns a message for each value
/// that could not be parsed. If the NodeSubnet is for another Node object, the result has no ranges and no messages.
pub fn read(spec: &NodeSubnetSpec, node_uid: &str) -> (NodeAllocation, Vec<String>) {
    let mut messages = Vec::new();
    let mut allocation = NodeAllocation {
        node_uid: node_uid.to_owned(),
        ..NodeAllocation::default()
    };
    if spec.node_uid.as_deref() != Some(node_uid) {
        return (allocation, messages);
    }
    allocation.pools = spec
        .pools
        .iter()
        .map(|it| terms(it, &mut messages))
        .collect();
    let pod_cidrs = spec.pod_cidrs.iter().filter(|it| !it.withheld);
    let pod_cidrs = pod_cidrs.filter_map(|it| pod_cidr(it, node_uid, &mut messages));
    allocation.blocks = pod_cidrs.collect();
    let mut claims: BTreeMap<String, PoolTerms> = BTreeMap::new();
    for listed in &spec.blocks {
        let Some(block) = block(listed, &mut messages) else {
            continue;
        };
        if listed.claim.is_some() {
            let unknown = PoolTerms::named(&listed.pool);
            let mut pools = allocation.pools.iter();
            let real = pools.find(|it| it.name == listed.pool);
            let real = real.unwrap_or(&unknown);
            let claim = claims.entry(block.pool.clone());
            let claim = claim.or_insert_with_key(|name| claim_terms(name, real));
            let family = block.cidr.family();
            let ranges = Some(claim_ranges(real, block.cidr));
            match family {
                Family::V4 => claim.ipv4 = ranges,
                Family::V6 => claim.ipv6 = ranges,
            }
        }
        allocation.blocks.push(block);
    }
    allocation.pools.extend(claims.into_values());
    let mut ranges = |field: &str, texts: &[String]| -> Vec<Cidr> {
        let texts = texts.iter();
        texts
            .filter_map(|text| cidr(field, text, &mut messages))
            .collect()
    };
    allocation.withdraw = ranges("withdraw", &spec.withdraw);
    allocation.returned = ranges("returned", &spec.returned);
    leave_out_nested(&mut allocation, &mut messages);
    (allocation, messages)
}

/// Leaves out the narrower of two overlapping blocks, because both blocks could assign the same address. There is one
/// exception: the block of a claim stays if `withdraw` lists it, because in this case the wider block does not assign
/// the address.
fn leave_out_nested(allocation: &mut NodeAllocation, messages: &mut Vec<String>) {
    allocation.blocks.sort_by_key(|block| block.cidr);
    let withdraw = &allocation.withdraw;
    let mut outer: Option<Cidr> = None;
    allocation.blocks.retain(|block| {
        let Some(wide) = outer.filter(|it| it.overlaps(&block.cidr)) else {
            outer = Some(block.cidr);
            return true;
        };
        let is_withdrawn = is_claim(&block.pool) && withdraw.contains(&block.cidr);
        if !is_withdrawn {
            messages.push(format!(
                "{} lies in {wide}: no address of it is assigned",
                block.cidr
            ));
        }
        is_withdrawn
    });
}

fn pod_cidr(range: &AllocatedRange, node_uid: &str, messages: &mut Vec<String>) -> Option<Block> {
    Some(Block {
        cidr: cidr("podCIDRs", &range.cidr, messages)?,
        uid: node_uid.to_owned(),
        pool: range.pool.clone().unwrap_or_default(),
        draining: false,
        borrowed: false,
        reserved: Vec::new(),
        on_request: Vec::new(),
    })
}

fn block(block: &AllocatedBlock, messages: &mut Vec<String>) -> Option<Block> {
    let cidr = cidr("blocks", &block.cidr, messages)?;
    let draining = block.recall == Some(Recall::Drain);
    if let Some(claim) = &block.claim {
        if !is_claim_name(claim) {
            messages.push(format!(
                "blocks: {cidr}: claim `{claim}` is not NAMESPACE/NAME: no address of this block is assigned"
            ));
            return None;
        }
        return Some(Block {
            cidr,
            uid: block.uid.clone(),
            pool: pool_of_claim(claim, block.vmi_uid.as_deref()),
            draining,
            borrowed: false,
            reserved: Vec::new(),
            on_request: Vec::new(),
        });
    }
    let mut spans = |field: &str, texts: &[String], then: &str| -> Vec<IpRange> {
        let mut read = |text: &String| {
            IpRange::parse(text).unwrap_or_else(|error| {
                messages.push(format!("blocks: {cidr}: {field}: {error}: {then}"));
                IpRange::from(cidr)
            })
        };
        texts.iter().map(&mut read).collect()
    };
    let reserved = spans(
        "reserved",
        &block.reserved,
        "no address of this block is assigned",
    );
    let on_request = spans(
        "onRequest",
        &block.on_request,
        "addresses of this block are assigned only on request",
    );
    Some(Block {
        cidr,
        uid: block.uid.clone(),
        pool: block.pool.clone(),
        draining,
        borrowed: block.parent.is_some(),
        reserved,
        on_request,
    })
}

/// Returns whether a text has the form `namespace/name`, with exactly one slash and no empty part.
fn is_claim_name(text: &str) -> bool {
    let parts = text.split_once('/');
    parts.is_some_and(|(namespace, name)| {
        !namespace.is_empty() && !name.is_empty() && !name.contains('/')
    })
}

/// Returns whether a claim may have `address`. The address must not be a gateway, network or broadcast address of the
/// pool.
pub fn may_be_claimed(address: Addr, pool: &NodePool) -> bool {
    let host = Cidr::host(address);
    let real = terms(pool, &mut Vec::new());
    let ranges = Some(claim_ranges(&real, host));
    let mut claim = claim_terms("", &real);
    match host.family() {
        Family::V4 => claim.ipv4 = ranges,
        Family::V6 => claim.ipv6 = ranges,
    }
    covering(&usable(host, Some(&claim)).excluded, address).is_none()
}

/// Returns the terms of the pool that the blocks of a claim form on the node, without the terms of its address
/// families. `claim` is the name of this pool. `real` are the terms of the IPPool to which the addresses belong.
fn claim_terms(claim: &str, real: &PoolTerms) -> PoolTerms {
    PoolTerms {
        routes: real.routes.clone(),
        dns: real.dns.clone(),
        prefix: real.prefix.of_part(),
        probes_conflicts: real.probes_conflicts,
        ..PoolTerms::named(claim)
    }
}

/// Returns the terms of the pool that the blocks of a claim form on the node, for the family of `address`.
fn claim_ranges(real: &PoolTerms, address: Cidr) -> FamilyTerms {
    let of_family = real.family(address.family());
    of_family.map_or_else(FamilyTerms::default, |it| it.of_part(address))
}

/// Returns the addresses of a block that its node never assigns: network address, gateway and broadcast address.
/// `is_part` says whether the block is only a part of another node's block.
pub fn never_assigned(block: Cidr, is_part: bool, pool: &NodePool) -> Vec<IpRange> {
    let terms = terms(pool, &mut Vec::new());
    usable_in(block, is_part, Some(&terms)).excluded
}

/// Returns the prefix length that the interface of a pod gets for an address of a claim.
pub fn prefix_of_claimed(address: Addr, pool: &NodePool) -> u8 {
    let terms = terms(pool, &mut Vec::new());
    usable_in(Cidr::host(address), true, Some(&terms)).prefix
}

fn cidr(field: &str, text: &str, messages: &mut Vec<String>) -> Option<Cidr> {
    let read = Cidr::parse_strict(text);
    read.map_err(|error| messages.push(format!("{field}: {error}")))
        .ok()
}

/// Converts the settings of a pool. Adds a message for each value that could not be parsed.
fn terms(pool: &NodePool, messages: &mut Vec<String>) -> PoolTerms {
    let AddressTerms {
        warm,
        cooldown_seconds,
        routes,
        dns,
        address_prefix,
        unknown_pods,
        explicit_addresses,
        conflict_probe,
    } = &pool.terms;
    let selects = |selector: &Option<Box<LabelSelector>>| {
        selector
            .as_deref()
            .is_some_and(|it| *it != LabelSelector::default())
    };
    let bound = selects(&pool.namespace_selector);
    let some_pods_only = bound || selects(&pool.pod_selector);
    PoolTerms {
        name: pool.name.clone(),
        automatic: pool.assignment == AssignmentMode::Automatic && !some_pods_only,
        bound,
        serves_unknown: *unknown_pods == UnknownPods::Serve,
        denies_explicit: *explicit_addresses == ExplicitAddresses::Deny,
        probes_conflicts: *conflict_probe == ConflictProbe::BeforeUse,
        cooldown_seconds: *cooldown_seconds,
        warm: (warm.low, warm.high),
        min_addresses: pool.min_addresses,
        ipv4: family(Family::V4, pool.ipv4.as_ref(), &pool.name, messages),
        ipv6: family(Family::V6, pool.ipv6.as_ref(), &pool.name, messages),
        reserved: reserved(pool, messages),
        routes: routes
            .iter()
            .filter_map(|route| {
                let via = route.gw.as_deref().map(str::parse::<IpAddr>).transpose();
                if let (Ok(dst), Ok(gw)) = (Cidr::parse_strict(&route.dst), via) {
                    return Some(Route { dst, gw });
                }
                messages.push(format!(
                    "pools: {}: routes: {} cannot be read and is left out",
                    pool.name, route.dst
                ));
                None
            })
            .collect(),
        dns: dns.as_deref().map(read_dns).unwrap_or_default(),
        prefix: match address_prefix {
            AddressPrefix::Host => Prefix::Host,
            AddressPrefix::Block => Prefix::Block,
            AddressPrefix::Pool => Prefix::Pool,
        },
    }
}

fn reserved(pool: &NodePool, messages: &mut Vec<String>) -> Vec<IpRange> {
    let name = &pool.name;
    let read = |text: &String| {
        let range = IpRange::parse(text);
        range
            .map_err(|error| messages.push(format!("pools: {name}: reserved: {error}")))
            .ok()
    };
    pool.reserved.iter().filter_map(read).collect()
}

fn read_dns(dns: &crate::Dns) -> Dns {
    Dns {
        nameservers: dns.nameservers.clone(),
        domain: dns.domain.clone(),
        search: dns.search.clone(),
        options: dns.options.clone(),
    }
}

fn family(
    family: Family,
    ranges: Option<&NodePoolRanges>,
    pool: &str,
    messages: &mut Vec<String>,
) -> Option<FamilyTerms> {
    let ranges = ranges?;
    let field = format!("pools: {pool}: cidrs");
    let cidrs = ranges.cidrs.iter();
    let cidrs: Vec<Cidr> = cidrs
        .filter_map(|text| cidr(&field, text, messages))
        .collect();
    let gateway = match ranges.gateway.as_deref() {
        None => Gateway::FirstOfBlock,
        Some("None") => Gateway::None,
        Some(text) => {
            let addr = Addr::parse_strict(text).filter(|addr| addr.family == family);
            addr.map_or_else(|| {
                messages.push(format!(
                    "pools: {pool}: gateway `{text}` is no {family} address: the first of each block is taken"
                ));
                Gateway::FirstOfBlock
            }, Gateway::Address)
        }
    };
    Some(FamilyTerms { cidrs, gateway })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(spec: serde_json::Value) -> (NodeAllocation, Vec<String>) {
        super::read(&serde_json::from_value(spec).unwrap(), "u1")
    }

    #[test]
    fn blocks_podcidrs_and_pools_are_read() {
        let (allocation, messages) = read(json!({
            "nodeUID": "u1",
            "podCIDRs": [{"cidr": "10.1.0.0/24", "pool": "node"}],
            "blocks": [
                {"cidr": "10.0.0.64/26", "uid": "b1", "pool": "a", "reserved": ["10.0.0.70-10.0.0.71"]},
                {"cidr": "fd00::40/122", "uid": "b2", "pool": "a", "recall": "Drain"},
                {"cidr": "10.0.0.128/26", "uid": "b3", "pool": "a", "recall": "IfEmpty"},
            ],
            "pools": [
                {"name": "a", "ipv4": {"cidrs": ["10.0.0.0/16"], "gateway": "None"}, "ipv6": {"cidrs": ["fd00::/64"]},
                 "reserved": ["10.0.9.0/24", "fd00::7-fd00::9"],
                 "warm": {"low": 1, "high": 2}, "cooldownSeconds": 7, "addressPrefix": "Pool", "conflictProbe": "BeforeUse",
                 "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}, {"dst": "fd00::/8"}]},
                {"name": "m", "assignment": "Manual", "explicitAddresses": "Deny"},
                {"name": "s", "podSelector": {"matchLabels": {"app": "x"}}},
                {"name": "e", "podSelector": {}},
                {"name": "node", "allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.1.0.0/16"], "gateway": "10.1.0.9"}},
            ],
        }));
        assert_eq!(messages, Vec::<String>::new());
        let blocks: Vec<(String, &str, bool, usize)> = allocation
            .blocks
            .iter()
            .map(|b| (b.cidr.to_string(), &*b.uid, b.draining, b.reserved.len()))
            .collect();
        assert_eq!(
            blocks,
            [
                ("10.0.0.64/26".to_owned(), "b1", false, 1),
                ("10.0.0.128/26".to_owned(), "b3", false, 0),
                ("10.1.0.0/24".to_owned(), "u1", false, 0),
                ("fd00::40/122".to_owned(), "b2", true, 0),
            ]
        );
        let automatic: Vec<bool> = allocation.pools.iter().map(|it| it.automatic).collect();
        assert_eq!(automatic, [true, false, false, true, true]);
        let denies: Vec<bool> = allocation
            .pools
            .iter()
            .map(|it| it.denies_explicit)
            .collect();
        assert_eq!(denies, [false, true, false, false, false]);
        let probes = allocation.pools.iter().filter(|it| it.probes_conflicts);
        assert!(probes.map(|it| it.name.as_str()).eq(["a"]));
        let a = &allocation.pools[0];
        assert_eq!(
            (a.warm, a.cooldown_seconds, a.prefix),
            ((1, 2), 7, Prefix::Pool)
        );
        assert_eq!(a.ipv4.as_ref().unwrap().gateway, Gateway::None);
        assert_eq!(a.ipv6.as_ref().unwrap().gateway, Gateway::FirstOfBlock);
        assert_eq!((a.routes.len(), a.reserved.len()), (2, 2));
        let gateway = allocation.pools[4].ipv4.as_ref().unwrap().gateway;
        assert_eq!(
            gateway,
            Gateway::Address(Addr::parse_strict("10.1.0.9").unwrap())
        );
        assert_eq!(allocation.pools[1].warm, (3, 50), "the documented defaults");
        assert_eq!(allocation.pools[1].cooldown_seconds, 30);
    }

    #[test]
    fn the_blocks_of_a_claim_are_a_pool_of_their_own() {
        let (allocation, messages) = read(json!({
            "nodeUID": "u1",
            "blocks": [
                {"cidr": "10.0.0.5/32", "uid": "b1", "pool": "a", "claim": "shop/db", "reserved": ["10.0.0.5"]},
                {"cidr": "10.0.0.7/32", "uid": "b2", "pool": "gone", "claim": "shop/old", "onRequest": ["?"], "recall": "Drain"},
                {"cidr": "10.0.0.64/26", "uid": "b3", "pool": "a"},
                {"cidr": "fd00::5/128", "uid": "b4", "pool": "a", "claim": "shop/db"},
            ],
            "pools": [
                {"name": "a", "ipv4": {"cidrs": ["10.0.0.0/16"], "gateway": "10.0.0.1"}, "ipv6": {"cidrs": ["fd00::/64"], "gateway": "None"},
                 "cooldownSeconds": 7, "unknownPods": "Serve", "addressPrefix": "Pool",
                 "conflictProbe": "BeforeUse", "routes": [{"dst": "0.0.0.0/0"}], "dns": {"domain": "example.org"}},
            ],
        }));
        assert_eq!(messages, Vec::<String>::new());
        let blocks: Vec<(&str, &str, bool, usize)> = allocation
            .blocks
            .iter()
            .map(|b| {
                (
                    &*b.uid,
                    &*b.pool,
                    b.draining,
                    b.reserved.len() + b.on_request.len(),
                )
            })
            .collect();
        let claimed = [("b1", "shop/db", false, 0), ("b2", "shop/old", true, 0)];
        assert_eq!(blocks[..2], claimed);
        assert_eq!(
            blocks[2..],
            [("b3", "a", false, 0), ("b4", "shop/db", false, 0)]
        );
        let [a, db, old] = &allocation.pools[..] else {
            panic!("{:?}", allocation.pools);
        };
        let expected = PoolTerms {
            name: "shop/db".to_owned(),
            automatic: false,
            bound: true,
            serves_unknown: false,
            denies_explicit: false,
            cooldown_seconds: 0,
            warm: (0, 0),
            ..a.clone()
        };
        assert_eq!(*db, expected);
        let expected = PoolTerms {
            ipv4: Some(FamilyTerms::default()),
            prefix: Prefix::Pool,
            ..PoolTerms::named("shop/old")
        };
        assert_eq!(*old, expected, "a claim of one family, of an unknown pool");
    }

    #[test]
    fn the_address_of_a_claim_has_a_gateway_and_a_prefix_that_contains_it() {
        for (prefix, gateway, expected) in [
            ("Block", json!(null), "10.0.0.1 /16, fd00::1 /64"),
            ("Host", json!(null), "10.0.0.1 /32, fd00::1 /128"),
            ("Block", json!("10.0.0.9"), "10.0.0.9 /16, fd00::1 /64"),
            ("Block", json!("None"), "- /16, fd00::1 /64"),
        ] {
            let mut ipv4 = json!({"cidrs": ["10.9.0.0/16", "10.0.0.0/16"]});
            if !gateway.is_null() {
                ipv4["gateway"] = gateway;
            }
            let (allocation, _) = read(json!({
                "nodeUID": "u1",
                "blocks": [
                    {"cidr": "10.0.0.77/32", "uid": "b1", "pool": "a", "claim": "shop/db"},
                    {"cidr": "fd00::77/128", "uid": "b2", "pool": "a", "claim": "shop/db"},
                ],
                "pools": [{"name": "a", "ipv4": ipv4, "ipv6": {"cidrs": ["fd00::/64"]}, "addressPrefix": prefix}],
            }));
            let terms = &allocation.pools[1];
            let of = |block: &Block| {
                let usable = usable(block.cidr, Some(terms));
                assert_eq!(usable.excluded, []);
                let gateway = usable.gateway.map_or("-".to_owned(), |it| it.to_string());
                format!("{gateway} /{}", usable.prefix)
            };
            let is: Vec<String> = allocation.blocks.iter().map(of).collect();
            assert_eq!(is.join(", "), expected);
        }
    }

    #[test]
    fn a_block_of_a_claim_without_namespace_or_name_is_left_out() {
        for claim in ["", "db", "/db", "shop/", "shop/db/x", "/"] {
            let (allocation, messages) = read(json!({
                "nodeUID": "u1",
                "blocks": [{"cidr": "10.0.0.5/32", "uid": "b1", "pool": "a", "claim": claim}],
            }));
            assert_eq!(
                (allocation.blocks.len(), allocation.pools.len()),
                (0, 0),
                "{claim}"
            );
            let [message] = &messages[..] else {
                panic!("{messages:?}");
            };
            assert!(
                message.contains("10.0.0.5/32") && message.contains("NAMESPACE/NAME"),
                "{message}"
            );
        }
    }

    #[test]
    fn a_block_inside_of_another_one_must_be_a_claim_s_withdrawn_address() {
        let (allocation, messages) = read(json!({
            "nodeUID": "u1",
            "blocks": [
                {"cidr": "10.0.0.0/26", "uid": "b1", "pool": "a"},
                {"cidr": "10.0.0.5/32", "uid": "b2", "pool": "a", "claim": "shop/db"},
                {"cidr": "10.0.0.6/32", "uid": "b3", "pool": "a", "claim": "shop/late"},
                {"cidr": "10.0.0.7/32", "uid": "b4", "pool": "a"},
                {"cidr": "10.0.0.9/32", "uid": "b5", "pool": "a", "claim": "shop/web"},
            ],
            "withdraw": ["10.0.0.5/32", "10.0.0.7/32", "10.0.0.9/32"],
        }));
        let blocks: Vec<&str> = allocation.blocks.iter().map(|b| &*b.uid).collect();
        assert_eq!(blocks, ["b1", "b2", "b5"]);
        let left_out =
            |n: u8| format!("10.0.0.{n}/32 lies in 10.0.0.0/26: no address of it is assigned");
        assert_eq!(messages, [left_out(6), left_out(7)]);
    }

    #[test]
    fn the_ranges_of_another_node_object_are_ignored() {
        let spec = json!({"nodeUID": "u2", "podCIDRs": [{"cidr": "10.1.0.0/24"}]});
        assert_eq!(read(spec).0.blocks, []);
    }

    #[test]
    fn unknown_fields_of_a_newer_controller_are_ignored() {
        let (allocation, messages) = read(json!({
            "nodeUID": "u1", "later": {"a": 1},
            "blocks": [{"cidr": "10.0.0.0/26", "uid": "b1", "pool": "a", "later": true}],
            "pools": [{"name": "a", "ipv4": {"cidrs": ["10.0.0.0/16"], "later": 1}, "later": [1]}],
        }));
        assert_eq!(messages, Vec::<String>::new());
        assert_eq!((allocation.blocks.len(), allocation.pools.len()), (1, 1));
    }

    #[test]
    fn an_invalid_value_affects_only_its_block_or_field() {
        let (allocation, messages) = read(json!({
            "nodeUID": "u1",
            "blocks": [
                {"cidr": "10.0.0.64/33", "uid": "b1", "pool": "a"},
                {"cidr": "10.0.0.0/26", "uid": "b2", "pool": "a", "reserved": ["10.0.0.7-"]},
                {"cidr": "10.0.1.0/24", "uid": "b3", "pool": "a"},
                {"cidr": "10.0.1.64/26", "uid": "b4", "pool": "a"},
            ],
            "pools": [{"name": "a", "ipv4": {"cidrs": ["10.0.0.0/16", "x"], "gateway": "fd00::1"},
                       "reserved": ["10.0.0.5/24"], "routes": [{"dst": "10.0.0.0"}]}],
        }));
        let uids: Vec<&str> = allocation.blocks.iter().map(|b| &*b.uid).collect();
        assert_eq!(uids, ["b2", "b3"]);
        assert_eq!(
            allocation.blocks[0].reserved,
            [IpRange::from(allocation.blocks[0].cidr)]
        );
        assert_eq!(messages.len(), 7, "{messages:#?}");
    }
}
