//! Which addresses of a block may be assigned, and with which gateway and prefix length.
//!
//! | gateway of the pool | never assigned | gateway in the result |
//! |---|---|---|
//! | first of block | network address, gateway, and (IPv4) broadcast address | the address after the network address |
//! | none | nothing; with prefix `Pool` the network and the broadcast address of the pool's range | none |
//! | an address | that address; unless the prefix is `Host`, also network and broadcast address | that address |
//!
//! IPv6 has no broadcast address; its network address is the subnet-router anycast address (RFC 4291). A range of one
//! or two addresses has neither a network address nor a broadcast address (RFC 3021, RFC 6164). If the gateway is the
//! first of the block, a block of two addresses has its first address as gateway, and the second can be assigned; a
//! block of one address has no gateway, and its address can be assigned. With prefix `Pool` the network and broadcast
//! addresses of the pool's range are excluded, whichever gateway the pool has.
//!
//! A range can be a part of a block: a borrowed block, or the address of an IPClaim. If the first address of each block
//! is the gateway, the gateway of a part is the first usable address of the pool's range ([`PoolTerms::of_part`]).
//!
//! Reserved addresses ([`Block::reserved`], [`Block::on_request`]) are not considered by [`usable`].

use super::node_allocation::{Block, FamilyTerms, Gateway, PoolTerms, Prefix};
use crate::{Addr, Cidr, Family, IpRange};

/// The addresses of a block that can be assigned, and the gateway and prefix length of CNI results for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usable {
    /// Addresses of the block that are never assigned: sorted, disjoint
    pub excluded: Vec<IpRange>,
    /// The gateway that CNI results name; `None` if the pods of the block have no gateway
    pub gateway: Option<Addr>,
    /// The prefix length of the block's addresses in CNI results
    pub prefix: u8,
}

/// Returns which addresses of `block` can be assigned. If `pool` is `None`, the default gateway and prefix apply.
pub fn usable(block: Cidr, pool: Option<&PoolTerms>) -> Usable {
    let family = pool.and_then(|pool| pool.family(block.family()));
    let gateway = family.map_or(Gateway::default(), |family| family.gateway);
    let prefix = pool.map_or(Prefix::default(), |pool| pool.prefix);
    let around = family.and_then(|family| {
        let mut ranges = family.cidrs.iter();
        ranges.find(|range| range.contains(&block)).copied()
    });
    let range = match prefix {
        Prefix::Pool => around.unwrap_or(block),
        Prefix::Block | Prefix::Host => block,
    };
    let mut never = Vec::new();
    if prefix == Prefix::Pool {
        never.extend(ends(range));
    }
    let gateway = match gateway {
        Gateway::FirstOfBlock => {
            never.extend(ends(block));
            first_usable(block)
        }
        Gateway::None => None,
        Gateway::Address(addr) => {
            if prefix != Prefix::Host {
                never.extend(ends(range));
            }
            Some(addr).filter(|addr| addr.family == block.family())
        }
    };
    never.extend(gateway.map(IpRange::from));
    Usable {
        excluded: union(block, &never),
        gateway,
        prefix: match prefix {
            Prefix::Host => block.family().bits(),
            Prefix::Block | Prefix::Pool => range.len(),
        },
    }
}

impl FamilyTerms {
    /// Returns the terms for addresses that are only a part of a block. With [`Gateway::FirstOfBlock`], a part of one
    /// address would have no gateway, and a larger part would use up one of its few addresses for a gateway. But main
    /// plugins such as ptp need a gateway. So the gateway of a part is the first usable address of the pool's range.
    #[must_use]
    pub fn of_part(&self, part: Cidr) -> Self {
        let mut terms = self.clone();
        if terms.gateway == Gateway::FirstOfBlock {
            let range = terms.cidrs.iter().find(|it| it.contains(&part));
            let gateway = range.and_then(|it| usable(*it, None).gateway);
            terms.gateway = gateway.map_or(Gateway::FirstOfBlock, Gateway::Address);
        }
        terms
    }
}

impl Prefix {
    /// Returns the prefix for addresses that are only a part of a block. [`Prefix::Block`] becomes [`Prefix::Pool`],
    /// because if pods had the prefix length of the part, the gateway would lie outside of their subnet.
    #[must_use]
    pub fn of_part(self) -> Self {
        match self {
            Prefix::Block => Prefix::Pool,
            other => other,
        }
    }
}

impl PoolTerms {
    /// Returns the terms for addresses that are only a part of a block, such as the address of an IPClaim or a borrowed
    /// block.
    #[must_use]
    pub fn of_part(&self, part: Cidr) -> Self {
        let of_part = |it: &FamilyTerms| it.of_part(part);
        Self {
            prefix: self.prefix.of_part(),
            ipv4: self.ipv4.as_ref().map(of_part),
            ipv6: self.ipv6.as_ref().map(of_part),
            ..self.clone()
        }
    }
}

/// Returns which addresses of a range can be assigned. `is_part` is true if the range is only a part of a block, such
/// as a borrowed block or the address of an IPClaim.
pub fn usable_in(range: Cidr, is_part: bool, pool: Option<&PoolTerms>) -> Usable {
    let of_part = pool.filter(|_| is_part).map(|it| it.of_part(range));
    usable(range, of_part.as_ref().or(pool))
}

impl Block {
    /// Returns which addresses of the block can be assigned. `pool` has the terms of the block's pool; if `pool` is
    /// `None`, the default gateway and prefix apply.
    pub fn usable(&self, pool: Option<&PoolTerms>) -> Usable {
        usable_in(self.cidr, self.borrowed, pool)
    }
}

/// Returns how many addresses of an empty block can be assigned to pods that request no specific address.
pub fn room(block: &Block, pool: Option<&PoolTerms>) -> u128 {
    let never = block.usable(pool).excluded;
    let out = [never.as_slice(), &block.reserved, &block.on_request].concat();
    let out = union(block.cidr, &out);
    block.cidr.size() - out.iter().map(IpRange::size).sum::<u128>()
}

/// Returns the parts of `spans` that lie in the block: sorted and disjoint, with adjacent spans joined.
pub fn union(block: Cidr, spans: &[IpRange]) -> Vec<IpRange> {
    IpRange::merged(spans.iter().filter_map(|it| it.within(&block)).collect())
}

/// Finds the span that contains the address. The spans must be sorted and disjoint.
pub fn covering(spans: &[IpRange], addr: Addr) -> Option<&IpRange> {
    let at = spans.partition_point(|span| span.last() < addr);
    spans.get(at).filter(|span| span.first() <= addr)
}

/// Returns the address after `addr`; `None` if that address would be above `last`.
pub fn above(addr: Addr, last: Addr) -> Option<Addr> {
    addr.next().filter(|above| *above <= last)
}

/// Returns the network address and, for IPv4, the broadcast address of a range. A range of one or two addresses has
/// neither.
fn ends(range: Cidr) -> impl Iterator<Item = IpRange> {
    let has = range.size() > 2;
    let first = has.then(|| range.first());
    let last = (has && range.family() == Family::V4).then(|| range.last());
    first.into_iter().chain(last).map(IpRange::from)
}

fn first_usable(block: Cidr) -> Option<Addr> {
    match block.size() {
        2 => Some(block.first()),
        _ => above(block.first(), block.last()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::node_allocation::FamilyTerms;
    use super::super::testing::{cidr, spans};
    use super::*;

    fn addr(text: &str) -> Addr {
        Addr::parse_strict(text).unwrap()
    }

    fn pool(gateway: Gateway, prefix: Prefix) -> PoolTerms {
        let family = |range| FamilyTerms {
            cidrs: vec![cidr(range)],
            gateway,
        };
        PoolTerms {
            ipv4: Some(family("10.0.0.0/24")),
            ipv6: Some(family("fd00::/112")),
            prefix,
            ..PoolTerms::named("p")
        }
    }

    /// Formats the addresses that are never assigned, the gateway and the prefix length.
    fn of(block: &str, gateway: Gateway, prefix: Prefix) -> String {
        let usable = usable(cidr(block), Some(&pool(gateway, prefix)));
        let never: Vec<String> = usable.excluded.iter().map(IpRange::to_string).collect();
        let gateway = usable.gateway.map_or("-".to_owned(), |it| it.to_string());
        format!("{} via {gateway} /{}", never.join(","), usable.prefix)
    }

    #[test]
    fn the_first_usable_address_is_the_gateway() {
        let of = |block| of(block, Gateway::FirstOfBlock, Prefix::Block);
        assert_eq!(
            of("10.0.0.64/26"),
            "10.0.0.64-10.0.0.65,10.0.0.127 via 10.0.0.65 /26"
        );
        assert_eq!(
            of("10.0.0.4/30"),
            "10.0.0.4-10.0.0.5,10.0.0.7 via 10.0.0.5 /30"
        );
        assert_eq!(of("10.0.0.4/31"), "10.0.0.4 via 10.0.0.4 /31");
        assert_eq!(of("10.0.0.4/32"), " via - /32");
        assert_eq!(of("fd00::40/122"), "fd00::40-fd00::41 via fd00::41 /122");
        assert_eq!(of("fd00::/64"), "fd00::-fd00::1 via fd00::1 /64");
        assert_eq!(of("fd00::4/127"), "fd00::4 via fd00::4 /127");
        assert_eq!(of("fd00::4/128"), " via - /128");
    }

    #[test]
    fn without_a_gateway_every_address_can_be_assigned() {
        assert_eq!(
            of("10.0.0.0/26", Gateway::None, Prefix::Block),
            " via - /26"
        );
        assert_eq!(of("10.0.0.0/26", Gateway::None, Prefix::Host), " via - /32");
        let pool = |block| of(block, Gateway::None, Prefix::Pool);
        assert_eq!(pool("10.0.0.0/26"), "10.0.0.0 via - /24");
        assert_eq!(pool("10.0.0.64/26"), " via - /24");
        assert_eq!(pool("10.0.0.192/26"), "10.0.0.255 via - /24");
        assert_eq!(pool("10.0.0.255/32"), "10.0.0.255 via - /24");
        assert_eq!(pool("fd00::/122"), "fd00:: via - /112");
        assert_eq!(pool("10.9.0.0/26"), "10.9.0.0,10.9.0.63 via - /26");
    }

    #[test]
    fn a_configured_gateway_is_excluded_and_the_ends_depend_on_the_prefix() {
        let gateway = Gateway::Address(addr("10.0.0.254"));
        let last = "10.0.0.192/26";
        assert_eq!(
            of(last, gateway, Prefix::Block),
            "10.0.0.192,10.0.0.254-10.0.0.255 via 10.0.0.254 /26"
        );
        assert_eq!(
            of(last, gateway, Prefix::Pool),
            "10.0.0.254-10.0.0.255 via 10.0.0.254 /24"
        );
        assert_eq!(
            of(last, gateway, Prefix::Host),
            "10.0.0.254 via 10.0.0.254 /32"
        );
        assert_eq!(of("fd00::/122", gateway, Prefix::Pool), "fd00:: via - /112");
    }

    #[test]
    fn a_part_of_a_block_has_the_gateway_and_the_prefix_of_the_range_of_its_pool() {
        let terms = |gateway, prefix| PoolTerms {
            prefix,
            ipv4: Some(FamilyTerms {
                cidrs: vec![cidr("10.9.0.0/24"), cidr("10.0.0.0/24")],
                gateway,
            }),
            ipv6: Some(FamilyTerms {
                cidrs: vec![cidr("fd00::/112")],
                gateway,
            }),
            ..PoolTerms::named("p")
        };
        let of = |part, terms: &PoolTerms| {
            let usable = usable_in(cidr(part), true, Some(terms));
            let gateway = usable.gateway.map_or("-".to_owned(), |it| it.to_string());
            format!("via {gateway} /{}", usable.prefix)
        };
        let first = terms(Gateway::FirstOfBlock, Prefix::Block);
        assert_eq!(of("10.0.0.77/32", &first), "via 10.0.0.1 /24");
        assert_eq!(of("fd00::77/128", &first), "via fd00::1 /112");
        assert_eq!(of("10.1.0.77/32", &first), "via - /32");
        let none = terms(Gateway::None, Prefix::Block);
        assert_eq!(of("10.0.0.77/32", &none), "via - /24");
        let given = terms(Gateway::Address(addr("10.0.0.254")), Prefix::Host);
        assert_eq!(of("10.0.0.77/32", &given), "via 10.0.0.254 /32");
    }

    #[test]
    fn room_is_the_number_of_assignable_addresses() {
        let block = |text, reserved: &[&str]| Block {
            cidr: cidr(text),
            uid: String::new(),
            pool: "p".to_owned(),
            draining: false,
            borrowed: false,
            reserved: spans(reserved),
            on_request: Vec::new(),
        };
        assert_eq!(room(&block("10.0.0.64/26", &[]), None), 61);
        let reserved = ["10.0.0.0/26", "10.0.0.64-10.0.0.70", "10.0.0.69-10.0.0.80"];
        assert_eq!(room(&block("10.0.0.64/26", &reserved), None), 64 - 17 - 1);
        assert_eq!(room(&block("fd00::/64", &[]), None), (1 << 64) - 2);
        assert_eq!(room(&block("10.0.0.4/31", &[]), None), 1);
        assert_eq!(room(&block("10.0.0.4/32", &["10.0.0.4"]), None), 0);
    }

    #[test]
    fn a_union_finds_the_span_of_an_address() {
        let union = union(
            cidr("10.0.0.0/24"),
            &spans(&["10.0.0.7", "10.0.0.2-10.0.0.6", "10.0.0.9", "10.0.1.1"]),
        );
        assert_eq!(union, spans(&["10.0.0.2-10.0.0.7", "10.0.0.9"]));
        let covered = |text| covering(&union, addr(text)).is_some();
        assert!(covered("10.0.0.2") && covered("10.0.0.7") && covered("10.0.0.9"));
        assert!(!covered("10.0.0.1") && !covered("10.0.0.8") && !covered("10.0.0.10"));
    }
}
