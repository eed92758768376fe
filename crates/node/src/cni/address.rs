//! Parses and formats addresses as they are written in configs and results.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use cadastre_core::{Addr, Family};
use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};

/// Parses an address. An IPv4-mapped IPv6 address is converted to IPv4.
pub(super) fn parse_ip(text: &str) -> Option<Addr> {
    let ip: IpAddr = text.parse().ok()?;
    Some(Addr::from(ip.to_canonical()))
}

/// Parses an address with or without a prefix length. The prefix length is ignored.
pub(super) fn parse_host(text: &str) -> Result<Addr, String> {
    let net = text.parse::<IpNet>().map(|net| net.ip);
    net.or_else(|_| parse_ip(text).ok_or_else(|| format!("{text:?} is not an IP address")))
}

/// Deserializes an address. An empty text is treated as absent.
pub(super) fn optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Addr>, D::Error> {
    let text = String::deserialize(from)?;
    if text.is_empty() {
        return Ok(None);
    }
    let wrong = || D::Error::custom(format!("{text:?} is not an IP address"));
    parse_ip(&text).map(Some).ok_or_else(wrong)
}

/// An address with a prefix length. Unlike a `Cidr`, an `IpNet` keeps the host bits of the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IpNet {
    pub(super) ip: Addr,
    pub(super) ones: u8,
}

impl FromStr for IpNet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?} is not an address with a prefix length: write one such as 10.0.0.0/8")
        };
        let (ip, ones) = text.split_once('/').ok_or_else(wrong)?;
        let written: IpAddr = ip.parse().map_err(|_| wrong())?;
        let ip = Addr::from(written.to_canonical());
        let mapped = written.is_ipv6() && ip.family == Family::V4;
        let ones = ones.parse::<u8>().ok();
        let ones = ones.and_then(|it| it.checked_sub(if mapped { 96 } else { 0 }));
        let ones = ones
            .filter(|&it| it <= ip.family.bits())
            .ok_or_else(wrong)?;
        Ok(Self { ip, ones })
    }
}

impl fmt::Display for IpNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.ones)
    }
}

impl Serialize for IpNet {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IpNet {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_addresses_are_ipv4_and_host_bits_stay() {
        let host = |text| parse_host(text).map(|ip| ip.to_string()).ok();
        assert_eq!(host("::ffff:10.0.0.1").as_deref(), Some("10.0.0.1"));
        assert_eq!(host("FD00::0:1/64").as_deref(), Some("fd00::1"));
        let net = |text: &str| text.parse::<IpNet>().map(|net| net.to_string()).ok();
        assert_eq!(net("10.1.2.3/16").as_deref(), Some("10.1.2.3/16"));
        assert_eq!(net("::ffff:10.0.0.0/104").as_deref(), Some("10.0.0.0/8"));
        for bad in ["", "10.0.0.01", "fe80::1%eth0", " 10.0.0.1", "10.0.0.1/33"] {
            assert_eq!(host(bad), None, "{bad}");
        }
        for bad in ["10.0.0.0", "10.0.0.0/", "::ffff:10.0.0.0/8", "10.0.0.0/8/8"] {
            assert_eq!(net(bad), None, "{bad}");
        }
    }
}
