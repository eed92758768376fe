//! The fields of the CNI plugin whereabouts in the `ipam` section.
//!
//! whereabouts takes the addresses from the range in the config. Here the addresses come from a pool, and the range
//! selects the pool and restricts it ([`NetworkLimits`]). The result is the one that the config describes: the prefix
//! length of the range, and the config's own gateway, routes and DNS settings instead of the pool's.
//!
//! | field | effect |
//! |---|---|
//! | `range`, `range_start`, `range_end`, `exclude` | one range; `range` can also be `FIRST-LAST/LENGTH` |
//! | `ipRanges` | further ranges, with the same four fields |
//! | `network_name` | the pool of this name, if the node has one |
//! | `gateway`, `routes`, `dns` | in the result; the gateway is assigned to no pod |
//! | [`REFUSED`], two ranges of one family | an error: pods would get other addresses than with whereabouts |
//! | all others | ignored: they concern the way in which whereabouts stores its records, or its log |

use cadastre_core::node_allocation::Dns;
use cadastre_core::{Addr, Cidr, Family, IpRange};
use serde::Deserialize;

use super::config::wrong;
use crate::cni::address::{self, IpNet, parse_ip};
use crate::cni::config::Config;
use crate::cni::error::CniError;
use crate::cni::result::{CniResult, Ip, Route};
use crate::{AddressAssignment, AllowedRange, NetworkLimits};

/// The fields that only whereabouts has. One of them shows that the config was written for whereabouts.
const FIELDS: [&str; 8] = [
    "range",
    "ipRanges",
    "range_start",
    "range_end",
    "exclude",
    "network_name",
    "node_slice_size",
    "configuration_path",
];

/// Fields that are rejected, because pods would get other addresses than with whereabouts; each with advice for users.
const REFUSED: [(&str, &str); 3] = [
    (
        "node_slice_size",
        "remove it, and set the size of nodes' blocks in the IPPool (`blockSize`)",
    ),
    (
        "configuration_path",
        "no such file is read: remove it, and write the fields about addresses from that file (`range`, `exclude`, ...) into the network's ipam",
    ),
    (
        "addresses",
        "no address is given in addition to the one from the range: remove it; for a certain address, use an IPClaim",
    ),
];

/// What a config of whereabouts says about addresses.
#[derive(Debug)]
pub(super) struct RangedNetwork {
    /// Which addresses of the pool the network may get
    pub(super) limits: NetworkLimits,
    gateway: Option<Addr>,
    routes: Vec<Route>,
    dns: Dns,
}

/// The four fields of a range, in `ipam` itself or in an element of `ipam.ipRanges`.
#[derive(Deserialize, Default)]
#[serde(default)]
struct WrittenRange {
    range: String,
    #[serde(deserialize_with = "address::optional")]
    range_start: Option<Addr>,
    #[serde(deserialize_with = "address::optional")]
    range_end: Option<Addr>,
    exclude: Vec<String>,
}

/// Returns whether the config was written for whereabouts.
pub(super) fn is_meant(config: &Config) -> bool {
    FIELDS.iter().any(|key| config.has(&["ipam", key]))
}

impl RangedNetwork {
    /// Reads the fields of whereabouts. Returns `None` if the config was not written for whereabouts.
    pub(super) fn read(config: &Config) -> Result<Option<Self>, String> {
        if !is_meant(config) {
            return Ok(None);
        }
        for (key, advice) in REFUSED {
            // Empty values count as absent, as in Go.
            let value: Option<serde_json::Value> = config.get(&["ipam", key])?;
            let is_empty = |it: &serde_json::Value| *it == "" || *it == serde_json::json!([]);
            if value.is_some_and(|it| !is_empty(&it)) {
                return Err(format!("ipam.{key} of the network config: {advice}"));
            }
        }
        let gateway: String = config.get_or_default(&["ipam", "gateway"])?;
        let gateway = match gateway.as_str() {
            "" => None,
            text => Some(parse_ip(text).ok_or_else(|| {
                format!("ipam.gateway of the network config: {text:?} is not an IP address; correct it, or leave it out")
            })?),
        };
        let own: WrittenRange = config.get_or_default(&["ipam"])?;
        let mut ranges = Vec::new();
        let at = |place: &str, error| format!("{place} of the network config: {error}");
        let excluded = read_excluded(&own.exclude).map_err(|error| at("ipam", error))?;
        let never: Vec<IpRange> = excluded
            .into_iter()
            .chain(gateway.map(IpRange::from))
            .collect();
        if !own.range.is_empty() {
            ranges.push(own.read(&never).map_err(|error| at("ipam", error))?);
        } else if own.range_start.or(own.range_end).is_some() {
            let error = "range_start and range_end need `range`: add it".to_owned();
            return Err(at("ipam", error));
        }
        let more: Vec<WrittenRange> = config.get_or_default(&["ipam", "ipRanges"])?;
        for (i, written) in more.into_iter().enumerate() {
            let place = format!("ipam.ipRanges[{i}]");
            ranges.push(written.read(&never).map_err(|error| at(&place, error))?);
        }
        if ranges.is_empty() {
            let error = "it has fields of whereabouts, but no range: write `range`".to_owned();
            return Err(at("ipam", error));
        }
        for family in Family::ALL {
            let count = ranges.iter().filter(|it| it.cidr.family() == family);
            if count.count() > 1 {
                let error = format!(
                    "it has several {family} ranges, and an interface gets at most one {family} address: leave one of them, and attach the pod to a second network for a second address"
                );
                return Err(at("ipam", error));
            }
        }
        Ok(Some(Self {
            limits: NetworkLimits {
                network_name: config.get_or_default(&["ipam", "network_name"])?,
                ranges,
            },
            gateway,
            routes: config.get_or_default(&["ipam", "routes"])?,
            dns: config.get_or_default(&["ipam", "dns"])?,
        }))
    }

    /// Returns the result of an ADD. The addresses are in the order of the config's ranges. Fails if the network does
    /// not allow one of the addresses, which an agent of an earlier version may assign.
    pub(super) fn result(self, assignment: &AddressAssignment) -> Result<CniResult, CniError> {
        let mut ips = Vec::new();
        for given in assignment.addrs() {
            let Some(range) = self.limits.range_of(given) else {
                return Err(wrong(format!(
                    "the node assigned {given}, which the network's range does not allow: update this node's agent, which does not know fields of whereabouts"
                )));
            };
            ips.push((range, given));
        }
        let at = |range: &AllowedRange| self.limits.ranges.iter().position(|it| it == range);
        ips.sort_by_key(|(range, _)| at(range));
        let ips = ips.into_iter().map(|(range, ip)| Ip {
            address: IpNet {
                ip,
                ones: range.cidr.len(),
            },
            gateway: self.gateway.filter(|it| it.family == ip.family),
        });
        let mut result = CniResult {
            ips: ips.collect(),
            dns: self.dns,
            ..CniResult::default()
        };
        result.add_routes(self.routes);
        Ok(result)
    }
}

impl WrittenRange {
    /// Returns the addresses that the range allows. `never` are addresses that no range of the config allows.
    fn read(&self, never: &[IpRange]) -> Result<AllowedRange, String> {
        let (start, whole) = match self.range.split_once('-') {
            None => (None, self.range.as_str()),
            Some((start, rest)) => {
                let start = parse_ip(start.trim()).ok_or_else(|| {
                    format!("range is {:?}: {start:?} is not an IP address", self.range)
                })?;
                (Some(start), rest.trim())
            }
        };
        let end: IpNet = whole.parse().map_err(|error| format!("range: {error}"))?;
        let cidr = Cidr::new(end.ip, end.ones).ok_or("range: the prefix length is too long")?;
        if cidr.size() < 4 {
            return Err(format!(
                "range is {cidr}, which has no address between the first and the last: write a wider one"
            ));
        }
        // The network address and, for IPv4, the broadcast address are no addresses for pods.
        let mut ends = vec![IpRange::from(cidr.first())];
        if cidr.family() == Family::V4 {
            ends.push(IpRange::from(cidr.last()));
        }
        let (first, last) = match start {
            // A range of this form has precedence over range_start and range_end.
            Some(start) => (Some(start), Some(end.ip)),
            None => (self.range_start, self.range_end),
        };
        let inside =
            |key: &str, addr: Option<Addr>| match addr.filter(|it| !cidr.contains_addr(*it)) {
                None => Ok(()),
                Some(addr) => Err(format!(
                    "{key} is {addr}, which is not in the range {cidr}: correct it"
                )),
            };
        inside("the first address", first)?;
        inside("the last address", last)?;
        let (first, last) = (first.unwrap_or(cidr.first()), last.unwrap_or(cidr.last()));
        let window = IpRange::new(first, last).ok_or_else(|| {
            format!("the range ends at {last}, before its first address {first}: correct it")
        })?;
        let excluded = read_excluded(&self.exclude)?;
        let never = [&ends[..], never, &excluded].concat();
        let allowed = window.without(&never);
        if allowed.is_empty() {
            return Err(format!(
                "`exclude` and `gateway` leave no address of {cidr}: exclude fewer"
            ));
        }
        Ok(AllowedRange { cidr, allowed })
    }
}

/// Reads `exclude`, whose entries are CIDRs or addresses. A CIDR can be written with any of its addresses.
fn read_excluded(texts: &[String]) -> Result<Vec<IpRange>, String> {
    let read = |text: &String| {
        let net: Option<IpNet> = text.parse().ok();
        let cidr = net.and_then(|net| Cidr::new(net.ip, net.ones));
        let range = cidr.map(IpRange::from);
        range
            .or_else(|| parse_ip(text).map(IpRange::from))
            .ok_or_else(|| format!("exclude: {text:?} is no CIDR and no address: correct it"))
    };
    texts.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AssignedAddress;

    fn config(ipam: &str) -> Config {
        let text =
            format!(r#"{{"name":"whereaboutsexample","ipam":{{"type":"cadastre-ipam",{ipam}}}}}"#);
        Config::parse(text.as_bytes()).unwrap()
    }

    fn read(ipam: &str) -> Result<RangedNetwork, String> {
        RangedNetwork::read(&config(ipam)).map(Option::unwrap)
    }

    /// Returns each range as `CIDR: ADDRESSES`.
    fn ranges(ipam: &str) -> Vec<String> {
        let ranges = read(ipam).unwrap().limits.ranges.into_iter();
        let text = |it: AllowedRange| {
            let allowed: Vec<String> = it.allowed.iter().map(IpRange::to_string).collect();
            format!("{}: {}", it.cidr, allowed.join(" "))
        };
        ranges.map(text).collect()
    }

    /// Returns the JSON result for these addresses of a pool whose own gateway and prefix lengths differ.
    fn result(ipam: &str, addresses: &[&str], version: &str) -> String {
        let given = addresses.iter().map(|text| {
            let address = Addr::parse_strict(text).unwrap();
            AssignedAddress {
                address,
                prefix: address.family.bits(),
                gateway: Some(address),
                pool: "a".to_owned(),
                block: Cidr::host(address),
            }
        });
        let assignment = AddressAssignment {
            addresses: given.collect(),
            ..AddressAssignment::default()
        };
        read(ipam)
            .unwrap()
            .result(&assignment)
            .unwrap()
            .render(version)
    }

    #[test]
    fn other_configs_are_not_meant() {
        for ipam in [
            r#""pools":["a"]"#,
            r#""routes":[],"gateway":"10.0.0.1""#,
            r#""range":null"#,
        ] {
            assert!(
                RangedNetwork::read(&config(ipam)).unwrap().is_none(),
                "{ipam}"
            );
        }
        assert!(is_meant(&config(r#""Range":"10.0.0.0/24""#)));
    }

    #[test]
    fn the_examples_of_its_documentation_are_read() {
        let excluded =
            r#""range":"192.168.2.225/28","exclude":["192.168.2.229/30","192.168.2.236/32"]"#;
        assert_eq!(
            ranges(excluded),
            [
                "192.168.2.224/28: 192.168.2.225-192.168.2.227 192.168.2.232-192.168.2.235 192.168.2.237-192.168.2.238"
            ]
        );
        assert_eq!(
            ranges(r#""range":"192.168.2.225-192.168.2.230/28""#),
            ["192.168.2.224/28: 192.168.2.225-192.168.2.230"]
        );
        assert_eq!(
            ranges(r#""range":"2001::0/116","gateway":"2001::f:1""#),
            ["2001::/116: 2001::1-2001::fff"]
        );
        let two = r#""ipRanges":[{"range":"192.168.10.1/24"},{"range":"abcd::1/64"}]"#;
        let v6 = "abcd::/64: abcd::1-abcd::ffff:ffff:ffff:ffff";
        let v4 = "192.168.10.0/24: 192.168.10.1-192.168.10.254";
        assert_eq!(ranges(two), [v4, v6]);
        let mixed = r#""ipRanges":[{"range":"192.168.10.1/24"}],"range":"abcd::1/64""#;
        assert_eq!(ranges(mixed), [v6, v4]);
        let flat = r#""datastore":"kubernetes","kubernetes":{"kubeconfig":"/x"},"log_file":"/tmp/whereabouts.log",
            "log_level":"debug","range":"10.0.0.0/29","etcd_host":"x:2379","enable_overlapping_ranges":false,
            "sleep_for_race":1,"leader_lease_duration":1500,"reconciler_cron_expression":"30 4 * * *",
            "node_slice_size":"","addresses":[],"network_name":"tenant""#;
        assert_eq!(ranges(flat), ["10.0.0.0/29: 10.0.0.1-10.0.0.6"]);
        assert_eq!(read(flat).unwrap().limits.network_name, "tenant");
    }

    #[test]
    fn first_last_and_excluded_addresses_bound_each_range() {
        let bounds = r#""range":"10.0.0.0/24","range_start":"10.0.0.10","range_end":"10.0.0.20","exclude":["10.0.0.15"],"gateway":"10.0.0.12""#;
        assert_eq!(
            ranges(bounds),
            ["10.0.0.0/24: 10.0.0.10-10.0.0.11 10.0.0.13-10.0.0.14 10.0.0.16-10.0.0.20"]
        );
        // The first and the last address of the network are never assigned.
        let whole = r#""range":"10.0.0.0/24","range_start":"10.0.0.0","range_end":"10.0.0.255""#;
        assert_eq!(ranges(whole), ["10.0.0.0/24: 10.0.0.1-10.0.0.254"]);
        let each = r#""exclude":["10.0.0.1"],"ipRanges":[{"range":"10.0.0.0/29","exclude":["10.0.0.2/32"],"range_end":"10.0.0.4"}]"#;
        assert_eq!(ranges(each), ["10.0.0.0/29: 10.0.0.3-10.0.0.4"]);
        let precedence =
            r#""range":"10.0.0.2-10.0.0.3/29","range_start":"10.0.0.5","range_end":"""#;
        assert_eq!(ranges(precedence), ["10.0.0.0/29: 10.0.0.2-10.0.0.3"]);
    }

    #[test]
    fn what_a_pool_cannot_do_is_refused() {
        for (ipam, says) in [
            (
                r#""range":"192.168.2.0/24","node_slice_size":"/22""#,
                "set the size of nodes' blocks in the IPPool",
            ),
            (
                r#""range":"10.0.0.0/24","configuration_path":"/x""#,
                "no such file is read",
            ),
            (
                r#""range":"10.0.0.0/24","addresses":[{"address":"10.0.0.9/24"}]"#,
                "use an IPClaim",
            ),
            (
                r#""ipRanges":[{"range":"192.168.10.1/24"},{"range":"176.168.10.1/16"}]"#,
                "several IPv4 ranges",
            ),
            (r#""exclude":["10.0.0.1"]"#, "no range: write `range`"),
            (r#""range_start":"10.0.0.1""#, "need `range`"),
            (
                r#""range":"10.0.0.0""#,
                "ipam of the network config: range: \"10.0.0.0\" is not an address with",
            ),
            (r#""range":"x-10.0.0.9/24""#, "\"x\" is not an IP address"),
            (
                r#""range":"10.0.0.0/31""#,
                "10.0.0.0/31, which has no address",
            ),
            (
                r#""range":"10.0.1.1-10.0.0.9/24""#,
                "10.0.1.1, which is not in the range 10.0.0.0/24",
            ),
            (
                r#""range":"10.0.0.0/24","range_end":"10.0.1.1""#,
                "the last address is 10.0.1.1",
            ),
            (
                r#""range":"10.0.0.0/24","range_start":"fd00::1""#,
                "the first address is fd00::1",
            ),
            (
                r#""range":"10.0.0.9-10.0.0.8/24""#,
                "ends at 10.0.0.8, before its first address 10.0.0.9",
            ),
            (
                r#""range":"10.0.0.0/24","range_start":"x""#,
                "\"x\" is not an IP address",
            ),
            (
                r#""range":"10.0.0.0/24","exclude":["10.0.0.0/24"]"#,
                "leave no address of 10.0.0.0/24",
            ),
            (
                r#""range":"10.0.0.0/24","exclude":["ten"]"#,
                "\"ten\" is no CIDR and no address",
            ),
            (
                r#""range":"10.0.0.0/24","gateway":"ten""#,
                "ipam.gateway of the network config: \"ten\"",
            ),
            (
                r#""ipRanges":[{"range":"10.0.0.0/24"},{}]"#,
                "ipam.ipRanges[1] of the network config: range",
            ),
        ] {
            let error = read(ipam).unwrap_err();
            assert!(error.contains(says), "{ipam}: {error}");
        }
    }

    #[test]
    fn the_result_is_what_the_config_describes() {
        let ipam = r#""ipRanges":[{"range":"abcd::1/64"},{"range":"192.168.10.1/24"}],"gateway":"192.168.10.254",
            "routes":[{"dst":"0.0.0.0/0"},{"dst":"10.0.0.0/8","gw":"192.168.10.1"}],"dns":{"nameservers":["192.168.10.2"]}"#;
        assert_eq!(
            result(ipam, &["192.168.10.7", "abcd::7"], "1.0.0"),
            r#"{"cniVersion":"1.0.0","dns":{"nameservers":["192.168.10.2"]},"ips":[{"address":"abcd::7/64"},{"address":"192.168.10.7/24","gateway":"192.168.10.254"}],"routes":[{"dst":"0.0.0.0/0"},{"dst":"10.0.0.0/8","gw":"192.168.10.1"}]}"#
        );
        assert_eq!(
            result(r#""range":"10.0.0.0/24""#, &["10.0.0.7"], "0.3.0"),
            r#"{"cniVersion":"0.3.0","dns":{},"ips":[{"address":"10.0.0.7/24","version":"4"}]}"#
        );
    }

    #[test]
    fn an_address_that_the_network_does_not_allow_is_no_result() {
        let network = read(r#""range":"10.0.0.0/24","exclude":["10.0.0.7"]"#).unwrap();
        let address = Addr::parse_strict("10.0.0.7").unwrap();
        let given = AssignedAddress {
            address,
            prefix: 24,
            gateway: None,
            pool: "a".to_owned(),
            block: Cidr::host(address),
        };
        let assignment = AddressAssignment {
            addresses: vec![given],
            ..AddressAssignment::default()
        };
        let error = network.result(&assignment).unwrap_err();
        assert!(
            error.msg.contains("update this node's agent"),
            "{}",
            error.msg
        );
    }
}
