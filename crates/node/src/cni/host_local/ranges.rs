//! Ranges, sets of them, and the walk through a set.

use std::fmt;

use crate::cni::golang::IpNet;
use crate::cni::result::Ip;
use cadastre_core::{Addr, Family};

/// A range as it is written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Range {
    pub(super) subnet: Option<IpNet>,
    pub(super) start: Option<Addr>,
    pub(super) end: Option<Addr>,
    pub(super) gateway: Option<Addr>,
}

/// A range with everything filled in; both ends are inclusive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) subnet: IpNet,
    start: Addr,
    end: Addr,
    /// May lie anywhere
    pub(super) gateway: Addr,
}

/// Ranges of one family, of which one address is given.
#[derive(Debug)]
pub(super) struct RangeSet(Vec<Span>);

impl Range {
    /// Fills in what is missing and refuses what cannot be.
    fn normal(self) -> Result<Span, String> {
        let subnet = self.subnet.ok_or("IP <nil> not v4 nor v6")?;
        if subnet.ones > subnet.bits - 2 {
            return Err(format!("Network {subnet} too small to allocate from"));
        }
        if subnet.ip.family.bits() != subnet.bits {
            return Err("IPNet IP and Mask version mismatch".to_owned());
        }
        let network = Addr {
            value: subnet.ip.value & !hosts(subnet),
            ..subnet.ip
        };
        if subnet.ip != network {
            let ones = subnet.ones;
            return Err(format!(
                "Network has host bits set. For a subnet mask of length {ones} the network address is {network}"
            ));
        }
        let first = step(network);
        let inside = |ip: Addr, what: &str, start: Option<Addr>| {
            let in_subnet =
                ip.family == network.family && ip.value & !hosts(subnet) == network.value;
            let above = start.is_none_or(|start| start.family == ip.family && start <= ip);
            let below = self
                .end
                .is_none_or(|end| end.family != ip.family || ip <= end);
            if in_subnet && above && below {
                return Ok(ip);
            }
            Err(format!("{what} {ip} not in network {subnet}"))
        };
        let start = match self.start {
            Some(start) => inside(start, "RangeStart", Some(start))?,
            None => first,
        };
        let end = match self.end {
            Some(end) => inside(end, "RangeEnd", Some(start))?,
            None => Addr {
                value: (network.value | hosts(subnet)) - u128::from(network.family == Family::V4),
                ..network
            },
        };
        Ok(Span {
            subnet,
            start,
            end,
            gateway: self.gateway.unwrap_or(first),
        })
    }
}

impl Span {
    /// An address of it, as a result names it.
    pub(super) fn give(&self, ip: Addr) -> Ip {
        Ip {
            address: IpNet { ip, ..self.subnet },
            gateway: Some(self.gateway),
        }
    }

    fn contains(&self, ip: Addr) -> bool {
        let subnet = self.subnet;
        ip.family == subnet.ip.family
            && ip.value & !hosts(subnet) == subnet.ip.value
            && self.start <= ip
            && ip <= self.end
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.start)
            || self.contains(other.end)
            || other.contains(self.start)
            || other.contains(self.end)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

impl RangeSet {
    /// Normalises a set; the error is host-local's text.
    pub(super) fn new(ranges: Vec<Range>) -> Result<Self, String> {
        let mut spans: Vec<Span> = Vec::new();
        for range in ranges {
            let span = range.normal()?;
            if spans
                .first()
                .is_some_and(|first| first.start.family != span.start.family)
            {
                return Err("mixed address families".to_owned());
            }
            spans.push(span);
        }
        for (i, one) in spans.iter().enumerate() {
            if let Some(other) = spans[i + 1..].iter().find(|other| one.overlaps(other)) {
                return Err(format!("subnets {one} and {other} overlap"));
            }
        }
        if spans.is_empty() {
            return Err("empty range set".to_owned());
        }
        Ok(Self(spans))
    }

    pub(super) fn family(&self) -> Family {
        self.0
            .first()
            .map_or(Family::V4, |span| span.subnet.ip.family)
    }

    /// The range that an address is of.
    pub(super) fn range_of(&self, ip: Addr) -> Option<&Span> {
        self.0.iter().find(|span| span.contains(ip))
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.0
            .iter()
            .any(|one| other.0.iter().any(|two| one.overlaps(two)))
    }

    /// All addresses but the gateways, with their ranges: from behind `last` on, if it is of the set,
    /// else from its start, once round. So `last` itself comes at the end.
    ///
    /// A gateway is passed over in its own range alone.
    pub(super) fn from(&self, last: Option<Addr>) -> impl Iterator<Item = (Addr, &Span)> {
        let at = last.and_then(|last| {
            let at = self.0.iter().position(|span| span.contains(last))?;
            Some(self.behind(at, last))
        });
        let first = at.unwrap_or((0, self.0[0].start));
        let mut next = Some(first);
        let walk = std::iter::from_fn(move || {
            let (at, ip) = next?;
            let after = self.behind(at, ip);
            next = (after.1 != first.1).then_some(after);
            Some((ip, &self.0[at]))
        });
        walk.filter(|(ip, span)| *ip != span.gateway)
    }

    /// The address behind `ip` of range `at`, in the next range at the end of this one. A range whose
    /// start was set to the broadcast address ends there.
    fn behind(&self, at: usize, ip: Addr) -> (usize, Addr) {
        if ip < self.0[at].end {
            return (at, step(ip));
        }
        let at = (at + 1) % self.0.len();
        (at, self.0[at].start)
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, span) in self.0.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            write!(f, "{comma}{span}")?;
        }
        Ok(())
    }
}

/// The bits of a subnet that vary.
fn hosts(subnet: IpNet) -> u128 {
    let order = subnet.ip.family.bits().saturating_sub(subnet.ones);
    u128::MAX.checked_shr(128 - u32::from(order)).unwrap_or(0)
}

/// The address above. Callers are inside of a subnet and below its last address.
fn step(ip: Addr) -> Addr {
    Addr {
        value: ip.value.wrapping_add(1),
        ..ip
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::golang::parse_ip;

    fn range(subnet: &str, start: &str, end: &str) -> Range {
        Range {
            subnet: IpNet::parse(subnet),
            start: parse_ip(start),
            end: parse_ip(end),
            gateway: None,
        }
    }

    fn walk(set: &RangeSet, last: &str) -> String {
        let ips = set.from(parse_ip(last)).map(|(ip, _)| ip.to_string());
        ips.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_walk_goes_once_round_and_ends_with_the_last_one() {
        let set = RangeSet::new(vec![
            range("10.0.0.0/29", "", ""),
            range("10.0.1.0/30", "", ""),
        ]);
        let set = set.unwrap();
        let all = "10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5 10.0.0.6 10.0.1.2";
        assert_eq!(walk(&set, ""), all);
        assert_eq!(walk(&set, "10.0.9.9"), all, "not of the set");
        assert_eq!(
            walk(&set, "10.0.0.5"),
            "10.0.0.6 10.0.1.2 10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5"
        );
        assert_eq!(walk(&set, "10.0.1.2"), all);
        assert_eq!(set.to_string(), "10.0.0.1-10.0.0.6,10.0.1.1-10.0.1.2");
    }

    #[test]
    fn a_set_of_one_gateway_gives_nothing_and_of_one_address_that_one() {
        let gateway = RangeSet::new(vec![range("10.0.0.0/24", "10.0.0.1", "10.0.0.1")]).unwrap();
        assert_eq!(walk(&gateway, ""), "");
        assert_eq!(walk(&gateway, "10.0.0.1"), "");
        let one = RangeSet::new(vec![range("10.0.0.0/24", "10.0.0.7", "10.0.0.7")]).unwrap();
        assert_eq!(walk(&one, "10.0.0.7"), "10.0.0.7");
        let broadcast = RangeSet::new(vec![range("10.0.0.0/24", "10.0.0.255", "")]).unwrap();
        assert_eq!(walk(&broadcast, ""), "10.0.0.255");
    }

    #[test]
    fn a_range_of_all_of_ipv6_does_not_overflow() {
        let set = RangeSet::new(vec![range("::/0", "", "")]).unwrap();
        let last = parse_ip("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
        assert_eq!(set.from(last).next().unwrap().0.to_string(), "::2");
        let v4 = RangeSet::new(vec![range("0.0.0.0/0", "", "")]).unwrap();
        assert_eq!(v4.to_string(), "0.0.0.1-255.255.255.254");
    }
}
