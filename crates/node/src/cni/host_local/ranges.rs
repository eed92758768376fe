//! Ranges, sets of them, and the walk through a set.

use std::fmt;

use serde::Deserialize;

use crate::cni::address::{self, IpNet};
use crate::cni::result::Ip;
use cadastre_core::{Addr, Cidr, Family};

/// A range as it is written.
#[derive(Deserialize, Clone, Debug)]
pub(super) struct RangeConfig {
    subnet: IpNet,
    #[serde(rename = "rangestart", default, deserialize_with = "address::optional")]
    start: Option<Addr>,
    #[serde(rename = "rangeend", default, deserialize_with = "address::optional")]
    end: Option<Addr>,
    #[serde(default, deserialize_with = "address::optional")]
    gateway: Option<Addr>,
}

/// A range with all defaults set; both ends are inclusive.
#[derive(Clone, Copy, Debug)]
pub(super) struct FilledRange {
    subnet: Cidr,
    start: Addr,
    end: Addr,
    /// May lie outside of the subnet
    pub(super) gateway: Addr,
}

/// Ranges of one family, of which one address is assigned.
#[derive(Debug)]
pub(super) struct RangeSet(Vec<FilledRange>);

impl RangeConfig {
    /// Sets the defaults, and refuses what is not possible.
    fn complete(self) -> Result<FilledRange, String> {
        let IpNet { ip, ones } = self.subnet;
        let subnet = Cidr::new(ip, ones).filter(|_| ones <= ip.family.bits() - 2);
        let subnet = subnet
            .ok_or_else(|| format!("the subnet {ip}/{ones} is too small: it needs 4 addresses"))?;
        if subnet.first() != ip {
            return Err(format!(
                "the subnet {ip}/{ones} has host bits set: write `{subnet}`"
            ));
        }
        let first = step(subnet.first());
        let mut last = subnet.last();
        last.value -= u128::from(subnet.family() == Family::V4);
        for (what, ip) in [("rangeStart", self.start), ("rangeEnd", self.end)] {
            if let Some(ip) = ip.filter(|&ip| !subnet.contains_addr(ip)) {
                return Err(format!("{what} {ip} is not in the subnet {subnet}"));
            }
        }
        let start = self.start.unwrap_or(first);
        if let Some(end) = self.end.filter(|&end| end < start) {
            return Err(format!("rangeEnd {end} is before the start {start}"));
        }
        Ok(FilledRange {
            subnet,
            start,
            end: self.end.unwrap_or(last),
            gateway: self.gateway.unwrap_or(first),
        })
    }
}

impl FilledRange {
    /// Describes an address of the range as a result has it.
    pub(super) fn assign(&self, ip: Addr) -> Ip {
        let ones = self.subnet.len();
        Ip {
            address: IpNet { ip, ones },
            gateway: Some(self.gateway),
        }
    }

    fn contains(&self, ip: Addr) -> bool {
        self.start <= ip && ip <= self.end
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.start)
            || self.contains(other.end)
            || other.contains(self.start)
            || other.contains(self.end)
    }
}

impl fmt::Display for FilledRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

impl RangeSet {
    /// Completes the ranges of a set.
    pub(super) fn new(ranges: Vec<RangeConfig>) -> Result<Self, String> {
        let spans = ranges.into_iter().map(RangeConfig::complete);
        let set = Self(spans.collect::<Result<_, _>>()?);
        if set.0.is_empty() {
            return Err("it is empty: write a range, or leave it out".to_owned());
        }
        if set
            .0
            .iter()
            .any(|span| span.subnet.family() != set.family())
        {
            return Err("it has ranges of both families: write a set for each".to_owned());
        }
        for (i, one) in set.0.iter().enumerate() {
            if let Some(other) = set.0[i + 1..].iter().find(|other| one.overlaps(other)) {
                return Err(format!("{one} and {other} overlap: separate them"));
            }
        }
        Ok(set)
    }

    pub(super) fn family(&self) -> Family {
        self.0[0].subnet.family()
    }

    /// Returns the range that an address is in.
    pub(super) fn range_of(&self, ip: Addr) -> Option<&FilledRange> {
        self.0.iter().find(|span| span.contains(ip))
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.0
            .iter()
            .any(|one| other.0.iter().any(|two| one.overlaps(two)))
    }

    /// Walks once through all addresses but the gateways: from the one after `last`, if that is in the set,
    /// else from the start. So `last` itself comes at the end. A gateway is left out of its own range only.
    pub(super) fn from(&self, last: Option<Addr>) -> impl Iterator<Item = (Addr, &FilledRange)> {
        let at = last.and_then(|last| {
            let at = self.0.iter().position(|span| span.contains(last))?;
            Some(self.after(at, last))
        });
        let first = at.unwrap_or((0, self.0[0].start));
        let mut next = Some(first);
        let walk = std::iter::from_fn(move || {
            let (at, ip) = next?;
            let after = self.after(at, ip);
            next = (after.1 != first.1).then_some(after);
            Some((ip, &self.0[at]))
        });
        walk.filter(|(ip, span)| *ip != span.gateway)
    }

    /// Returns the address after `ip` of range `at`, which is in the next range at the end of this one. A
    /// range whose start was set to the broadcast address ends there.
    fn after(&self, at: usize, ip: Addr) -> (usize, Addr) {
        if ip < self.0[at].end {
            return (at, step(ip));
        }
        let at = (at + 1) % self.0.len();
        (at, self.0[at].start)
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&spans.join(","))
    }
}

/// Returns the next address. Callers are inside of a subnet and below its last address.
fn step(ip: Addr) -> Addr {
    Addr {
        value: ip.value.wrapping_add(1),
        ..ip
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::address::parse_ip;

    fn range(subnet: &str, start: &str, end: &str) -> RangeConfig {
        RangeConfig {
            subnet: subnet.parse().unwrap(),
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
    fn a_set_of_one_gateway_has_no_address_and_of_one_address_that_one() {
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
