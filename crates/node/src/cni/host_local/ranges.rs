//! Address ranges of a config, sets of ranges, and the order in which the addresses of a set are tried.

use std::fmt;

use serde::Deserialize;

use crate::cni::address::{self, IpNet};
use crate::cni::result::Ip;
use cadastre_core::{Addr, Cidr, Family};

/// A range as it is written in a config.
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

/// A range with all defaults filled in. The range includes both `start` and `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct FilledRange {
    subnet: Cidr,
    start: Addr,
    end: Addr,
    /// The gateway of the range, which can lie outside of the subnet
    pub(super) gateway: Addr,
}

/// A set of ranges of one family. An attachment gets one address from each set.
#[derive(Debug)]
pub(super) struct RangeSet(Vec<FilledRange>);

impl RangeConfig {
    /// Fills in the defaults of a range. Fails if a value is invalid.
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
            // If the start is set to the broadcast address, the range has only that address.
            end: self.end.unwrap_or(last).max(start),
            gateway: self.gateway.unwrap_or(first),
        })
    }
}

impl FilledRange {
    /// Returns `ip` as an entry of a CNI result: with the prefix length of the subnet, and with the gateway.
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
        self.start <= other.end && other.start <= self.end
    }
}

impl fmt::Display for FilledRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

impl RangeSet {
    /// Fills in the defaults of the ranges of a set. Fails if the set is empty, has ranges of both families, or has
    /// overlapping ranges.
    pub(super) fn new(ranges: Vec<RangeConfig>) -> Result<Self, String> {
        let spans = ranges.into_iter().map(RangeConfig::complete);
        let set = Self(spans.collect::<Result<_, _>>()?);
        if set.0.is_empty() {
            return Err("it is empty: write a range, or leave it out".to_owned());
        }
        let family = |span: &FilledRange| span.subnet.family();
        if set.0.iter().any(|span| family(span) != set.family()) {
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

    /// Returns the range of the set that contains an address; `None` if no range of the set contains it.
    pub(super) fn range_of(&self, ip: Addr) -> Option<&FilledRange> {
        self.0.iter().find(|span| span.contains(ip))
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.0
            .iter()
            .any(|one| other.0.iter().any(|two| one.overlaps(two)))
    }

    /// Iterates once over all addresses except the gateways. If `last` is in the set, the iteration starts after
    /// `last`, so that `last` comes at the end; otherwise it starts at the first address. A gateway is skipped only in
    /// its own range.
    pub(super) fn from(&self, last: Option<Addr>) -> impl Iterator<Item = (Addr, &FilledRange)> {
        let after_last = last.and_then(|last| {
            let at = self.0.iter().position(|span| span.contains(last))?;
            Some(self.after(at, last))
        });
        let first = after_last.unwrap_or((0, self.0[0].start));
        let mut next = Some(first);
        let walk = std::iter::from_fn(move || {
            let (at, ip) = next?;
            let after = self.after(at, ip);
            next = (after.1 != first.1).then_some(after);
            Some((ip, &self.0[at]))
        });
        walk.filter(|(ip, span)| *ip != span.gateway)
    }

    /// Returns the address after `ip` in the range with index `at`. After the end of this range comes the first address
    /// of the next range.
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

/// Returns the address after `ip`. `ip` must be an address of a subnet, but not the subnet's last address.
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
    fn all_addresses_are_tried_once_and_the_last_assigned_one_at_the_end() {
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
    fn the_gateway_is_skipped_and_a_range_can_be_one_address() {
        let gateway = RangeSet::new(vec![range("10.0.0.0/24", "10.0.0.1", "10.0.0.1")]).unwrap();
        assert_eq!(walk(&gateway, ""), "");
        assert_eq!(walk(&gateway, "10.0.0.1"), "");
        let one = RangeSet::new(vec![range("10.0.0.0/24", "10.0.0.7", "10.0.0.7")]).unwrap();
        assert_eq!(walk(&one, "10.0.0.7"), "10.0.0.7");
        let broadcast = RangeSet::new(vec![range("10.0.0.0/24", "10.0.0.255", "")]).unwrap();
        assert_eq!(walk(&broadcast, ""), "10.0.0.255");
        assert!(
            broadcast
                .range_of(parse_ip("10.0.0.255").unwrap())
                .is_some()
        );
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
