//! Results, in the shape of each version.
//!
//! | version | shape |
//! |---|---|
//! | 0.1.0, 0.2.0 | `ip4` and `ip6`: the first address of each family, its routes with it |
//! | 0.3.0 to 0.4.0 | `ips` with the family in `version`; `dns` also when it says nothing |
//! | 1.0.0, 1.1.0 | `ips`; no empty `dns`; keys in the order of the alphabet |
//!
//! An IPAM plugin names no interfaces: the main plugin adds them.

use std::fmt::Display;

use super::golang::IpNet;
use super::json::Value;
use crate::Given;
use cadastre_core::holding::Dns;
use cadastre_core::{Addr, Family};

/// What an ADD gave.
#[derive(Clone, Debug, Default)]
pub(super) struct CniResult {
    pub(super) ips: Vec<Ip>,
    /// `None` for a null in the config
    pub(super) routes: Vec<Option<Route>>,
    pub(super) dns: Dns,
}

/// An address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ip {
    pub(super) address: IpNet,
    pub(super) gateway: Option<Addr>,
}

/// A route; numbers that are 0 are left out.
#[derive(Clone, Debug, Default)]
pub(super) struct Route {
    /// `None` where the config has none
    pub(super) dst: Option<IpNet>,
    pub(super) gw: Option<Addr>,
    pub(super) mtu: i64,
    pub(super) advmss: i64,
    pub(super) priority: i64,
    pub(super) table: Option<i64>,
    pub(super) scope: Option<i64>,
}

impl From<Given> for CniResult {
    fn from(given: Given) -> Self {
        let net = |ip: Addr, ones| IpNet {
            ip,
            ones,
            bits: ip.family.bits(),
        };
        let ips = given.addresses.iter().map(|given| Ip {
            address: net(given.address, given.prefix),
            gateway: given.gateway,
        });
        let routes = given.routes.iter().map(|route| {
            Some(Route {
                dst: Some(net(route.dst.first(), route.dst.len())),
                gw: route.gw.map(Addr::from),
                ..Route::default()
            })
        });
        Self {
            ips: ips.collect(),
            routes: routes.collect(),
            dns: given.dns,
        }
    }
}

impl CniResult {
    /// Adds routes of the config, of families that the interface has an address of; the pool's go before others
    /// to the same place, of which the kernel takes one only.
    pub(super) fn add_routes(&mut self, routes: Vec<Route>) {
        for route in routes {
            let family = route.dst.as_ref().map(|dst| dst.ip.family);
            let mut ips = self.ips.iter();
            let is_of_use = family.is_none() || ips.any(|ip| Some(ip.address.ip.family) == family);
            let mut there = self.routes.iter().flatten();
            if is_of_use && !there.any(|it| it.dst == route.dst) {
                self.routes.push(Some(route));
            }
        }
    }

    /// The result by `version`, one of those supported; empty means the first.
    pub(super) fn render(&self, version: &str) -> String {
        match version {
            "" => self.by_family("0.1.0"),
            "0.1.0" | "0.2.0" => self.by_family(version),
            "0.3.0" | "0.3.1" | "0.4.0" => self.by_list(version, true).pretty(),
            _ => self.by_list(version, false).sorted().pretty(),
        }
    }

    fn by_family(&self, version: &str) -> String {
        let mut members = vec![("cniVersion", text(version))];
        for (key, family) in [("ip4", Family::V4), ("ip6", Family::V6)] {
            let mut ips = self.ips.iter();
            let Some(ip) = ips.find(|ip| ip.address.ip.family == family) else {
                continue;
            };
            let mut config = vec![("ip", text(ip.address))];
            config.extend(ip.gateway.map(|gateway| ("gateway", text(gateway))));
            let routes = self.routes.iter().flatten();
            let routes: Vec<Value> = routes
                .filter(|route| route.family() == family)
                .map(|route| Value::object(route.way()))
                .collect();
            if !routes.is_empty() {
                config.push(("routes", Value::Array(routes)));
            }
            members.push((key, Value::object(config)));
        }
        members.push(("dns", dns(&self.dns)));
        Value::object(members).pretty()
    }

    fn by_list(&self, version: &str, old: bool) -> Value {
        let mut members = vec![("cniVersion", text(version))];
        let ips = self.ips.iter().map(|ip| {
            let mut config = Vec::new();
            if old {
                config.push((
                    "version",
                    text(match ip.address.ip.family {
                        Family::V4 => "4",
                        Family::V6 => "6",
                    }),
                ));
            }
            config.push(("address", text(ip.address)));
            config.extend(ip.gateway.map(|gateway| ("gateway", text(gateway))));
            Value::object(config)
        });
        let ips: Vec<Value> = ips.collect();
        if !ips.is_empty() {
            members.push(("ips", Value::Array(ips)));
        }
        if !self.routes.is_empty() {
            let routes = self.routes.iter().map(|route| match route {
                Some(route) => route.full(old),
                None => Value::Null,
            });
            members.push(("routes", Value::Array(routes.collect())));
        }
        if old || !self.dns.is_empty() {
            members.push(("dns", dns(&self.dns)));
        }
        Value::object(members)
    }
}

impl Route {
    /// Anything that is not an IPv4 destination counts as IPv6.
    fn family(&self) -> Family {
        self.dst.map_or(Family::V6, |dst| dst.ip.family)
    }

    fn way(&self) -> Vec<(&'static str, Value)> {
        let dst = self.dst.map_or_else(|| text("<nil>"), text);
        let mut members = vec![("dst", dst)];
        members.extend(self.gw.map(|gw| ("gw", text(gw))));
        members
    }

    fn full(&self, exact: bool) -> Value {
        let mut members = self.way();
        let some = |value: i64| (value != 0).then_some(value);
        for (key, value) in [
            ("mtu", some(self.mtu)),
            ("advmss", some(self.advmss)),
            ("priority", some(self.priority)),
            ("table", self.table),
            ("scope", self.scope),
        ] {
            members.extend(value.map(|value| (key, Value::Int(number(value, exact)))));
        }
        Value::object(members)
    }
}

/// The library takes the newer results through floating point on their way out.
fn number(value: i64, exact: bool) -> i128 {
    if exact {
        return value.into();
    }
    #[expect(
        clippy::cast_precision_loss,
        reason = "what the published library does"
    )]
    let rounded = value as f64;
    // The shortest digits that mean the same number, which are others than those of its value.
    rounded.to_string().parse().unwrap_or_else(|_| value.into())
}

fn dns(dns: &Dns) -> Value {
    let list = |key, texts: &[String]| {
        let all = Value::strings(texts.iter().map(String::as_str));
        (!texts.is_empty()).then_some((key, all))
    };
    let domain = (!dns.domain.is_empty()).then(|| ("domain", text(&dns.domain)));
    let members = [
        list("nameservers", &dns.nameservers),
        domain,
        list("search", &dns.search),
        list("options", &dns.options),
    ];
    Value::object(members.into_iter().flatten())
}

fn text(value: impl Display) -> Value {
    Value::String(value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        IpNet::parse(text).unwrap()
    }

    fn dual() -> CniResult {
        CniResult {
            ips: vec![
                Ip {
                    address: net("10.0.0.2/24"),
                    gateway: Some(net("10.0.0.1/24").ip),
                },
                Ip {
                    address: net("fd00::2/64"),
                    gateway: None,
                },
            ],
            routes: vec![Some(Route {
                dst: Some(net("0.0.0.0/0")),
                mtu: 1400,
                table: Some(0),
                ..Route::default()
            })],
            dns: Dns::default(),
        }
    }

    fn squeezed(version: &str, result: &CniResult) -> String {
        result.render(version).split_whitespace().collect()
    }

    #[test]
    fn each_version_has_its_shape() {
        assert_eq!(
            squeezed("0.2.0", &dual()),
            r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.2/24","gateway":"10.0.0.1","routes":[{"dst":"0.0.0.0/0"}]},"ip6":{"ip":"fd00::2/64"},"dns":{}}"#
        );
        assert_eq!(
            squeezed("0.4.0", &dual()),
            r#"{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.0.0.2/24","gateway":"10.0.0.1"},{"version":"6","address":"fd00::2/64"}],"routes":[{"dst":"0.0.0.0/0","mtu":1400,"table":0}],"dns":{}}"#
        );
        assert_eq!(
            squeezed("1.1.0", &dual()),
            r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"},{"address":"fd00::2/64"}],"routes":[{"dst":"0.0.0.0/0","mtu":1400,"table":0}]}"#
        );
        assert!(dual().render("").contains("\"cniVersion\": \"0.1.0\""));
    }

    #[test]
    fn newer_versions_sort_their_keys() {
        let mut result = dual();
        result.ips.truncate(1);
        result.routes = vec![None];
        result.dns = Dns {
            nameservers: vec!["10.0.0.10".to_owned()],
            domain: "d".to_owned(),
            search: vec!["s".to_owned()],
            options: vec!["o".to_owned()],
        };
        assert_eq!(
            squeezed("1.0.0", &result),
            r#"{"cniVersion":"1.0.0","dns":{"domain":"d","nameservers":["10.0.0.10"],"options":["o"],"search":["s"]},"ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"}],"routes":[null]}"#
        );
        assert!(squeezed("0.3.1", &result).ends_with(
            r#""dns":{"nameservers":["10.0.0.10"],"domain":"d","search":["s"],"options":["o"]}}"#
        ));
    }

    #[test]
    fn large_numbers_lose_digits_where_the_library_loses_them() {
        assert_eq!(number(i64::MAX, true), i64::MAX.into());
        assert_eq!(number(i64::MAX, false), 9_223_372_036_854_776_000);
        assert_eq!(number(254, false), 254);
    }
}
