//! Results of an ADD, in the form that each version of the CNI protocol has.
//!
//! | version | form |
//! |---|---|
//! | 0.1.0, 0.2.0 | `ip4` and `ip6`: the first address of each family, with the routes of the family |
//! | 0.3.0 to 0.4.0 | `ips`, each with the family in `version`; `dns` even if it is empty |
//! | 1.0.0, 1.1.0 | `ips` without the family; `dns` only if it is not empty |
//!
//! The results list no interfaces, because the main CNI plugin adds them to the result of an IPAM plugin.

use cadastre_core::node_allocation::Dns;
use cadastre_core::{Addr, Family};
use serde::{Deserialize, Serialize};

use super::address::{self, IpNet};
use super::version;
use crate::AddressAssignment;

/// The result of an ADD.
#[derive(Clone, Debug, Default)]
pub(super) struct CniResult {
    pub(super) ips: Vec<Ip>,
    pub(super) routes: Vec<Route>,
    pub(super) dns: Dns,
}

/// An address of a result, with its gateway.
#[derive(Serialize, Clone, Copy, Debug)]
pub(super) struct Ip {
    pub(super) address: IpNet,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gateway: Option<Addr>,
}

/// A route of a config or a pool. Numbers that are 0 are not written.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Route {
    pub(super) dst: IpNet,
    #[serde(
        default,
        deserialize_with = "address::optional",
        skip_serializing_if = "Option::is_none"
    )]
    gw: Option<Addr>,
    #[serde(default, skip_serializing_if = "is_zero")]
    mtu: i64,
    #[serde(default, skip_serializing_if = "is_zero")]
    advmss: i64,
    #[serde(default, skip_serializing_if = "is_zero")]
    priority: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    table: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scope: Option<i64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &i64) -> bool {
    *number == 0
}

impl Route {
    fn new(dst: IpNet, gw: Option<Addr>) -> Self {
        Self {
            dst,
            gw,
            mtu: 0,
            advmss: 0,
            priority: 0,
            table: None,
            scope: None,
        }
    }
}

impl From<AddressAssignment> for CniResult {
    fn from(given: AddressAssignment) -> Self {
        let ips = given.addresses.iter().map(|given| Ip {
            address: IpNet {
                ip: given.address,
                ones: given.prefix,
            },
            gateway: given.gateway,
        });
        let routes = given.routes.iter().map(|route| {
            let dst = IpNet {
                ip: route.dst.first(),
                ones: route.dst.len(),
            };
            Route::new(dst, route.gw.map(Addr::from))
        });
        Self {
            ips: ips.collect(),
            routes: routes.collect(),
            dns: given.dns,
        }
    }
}

/// A result in the form of versions up to 0.2.0.
#[derive(Serialize)]
struct ByFamily<'a> {
    #[serde(rename = "cniVersion")]
    version: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip4: Option<OfFamily>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip6: Option<OfFamily>,
    dns: &'a Dns,
}

#[derive(Serialize)]
struct OfFamily {
    ip: IpNet,
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<Addr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
}

/// A result in the form of versions from 0.3.0 on.
#[derive(Serialize)]
struct ByList<'a> {
    #[serde(rename = "cniVersion")]
    version: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ips: Vec<InList<'a>>,
    #[serde(skip_serializing_if = "<[Route]>::is_empty")]
    routes: &'a [Route],
    #[serde(skip_serializing_if = "Option::is_none")]
    dns: Option<&'a Dns>,
}

#[derive(Serialize)]
struct InList<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<&'static str>,
    #[serde(flatten)]
    ip: &'a Ip,
}

impl CniResult {
    /// Adds routes of the config. A route is skipped if the interface has no address of the route's family. It is
    /// also skipped if the pool has a route to the same destination, because the kernel accepts only one.
    pub(super) fn add_routes(&mut self, routes: Vec<Route>) {
        for route in routes {
            let family = route.dst.ip.family;
            let is_of_use = self.ips.iter().any(|ip| ip.address.ip.family == family);
            if is_of_use && !self.routes.iter().any(|it| it.dst == route.dst) {
                self.routes.push(route);
            }
        }
    }

    /// Returns the result as JSON, in the form of the given version, which must be a supported one.
    pub(super) fn render(&self, version: &str) -> String {
        let dns = &self.dns;
        if !version::is_since(version, "0.3.0") {
            return json(&ByFamily {
                version,
                ip4: self.of_family(Family::V4),
                ip6: self.of_family(Family::V6),
                dns,
            });
        }
        let old = !version::is_since(version, "1.0.0");
        let ips = self.ips.iter().map(|ip| InList {
            version: old.then_some(match ip.address.ip.family {
                Family::V4 => "4",
                Family::V6 => "6",
            }),
            ip,
        });
        json(&ByList {
            version,
            ips: ips.collect(),
            routes: &self.routes,
            dns: (old || !dns.is_empty()).then_some(dns),
        })
    }

    fn of_family(&self, family: Family) -> Option<OfFamily> {
        let mut ips = self.ips.iter();
        let ip = ips.find(|ip| ip.address.ip.family == family)?;
        let routes = self.routes.iter().filter(|it| it.dst.ip.family == family);
        Some(OfFamily {
            ip: ip.address,
            gateway: ip.gateway,
            routes: routes.map(|it| Route::new(it.dst, it.gw)).collect(),
        })
    }
}

/// Converts a value to JSON. The callers pass only structs and maps with text keys, whose conversion cannot fail.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dual() -> CniResult {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
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
            routes: vec![Route {
                mtu: 1400,
                table: Some(0),
                ..Route::new(net("0.0.0.0/0"), None)
            }],
            dns: Dns::default(),
        }
    }

    #[test]
    fn each_version_has_its_shape() {
        assert_eq!(
            dual().render("0.2.0"),
            r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.2/24","gateway":"10.0.0.1","routes":[{"dst":"0.0.0.0/0"}]},"ip6":{"ip":"fd00::2/64"},"dns":{}}"#
        );
        assert_eq!(
            dual().render("0.4.0"),
            r#"{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.0.0.2/24","gateway":"10.0.0.1"},{"version":"6","address":"fd00::2/64"}],"routes":[{"dst":"0.0.0.0/0","mtu":1400,"table":0}],"dns":{}}"#
        );
        assert_eq!(
            dual().render("1.1.0"),
            r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"},{"address":"fd00::2/64"}],"routes":[{"dst":"0.0.0.0/0","mtu":1400,"table":0}]}"#
        );
        let mut named = dual();
        named.dns.domain = "d".to_owned();
        assert!(named.render("1.0.0").ends_with(r#""dns":{"domain":"d"}}"#));
    }
}
