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
use serde_json::{Map, Value, json};

use super::address::{self, IpNet};
use super::version;
use crate::AddressAssignment;

/// The result of an ADD, independent of the version of the CNI protocol.
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

/// A route of a config or a pool.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Route {
    pub(super) dst: IpNet,
    #[serde(
        default,
        deserialize_with = "address::optional",
        skip_serializing_if = "Option::is_none"
    )]
    gw: Option<Addr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mtu: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    advmss: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    table: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<i64>,
}

impl Route {
    fn new(dst: IpNet, gw: Option<Addr>) -> Self {
        Self {
            dst,
            gw,
            mtu: None,
            advmss: None,
            priority: None,
            table: None,
            scope: None,
        }
    }
}

impl From<AddressAssignment> for CniResult {
    fn from(assignment: AddressAssignment) -> Self {
        let ips = assignment.addresses.iter().map(|given| Ip {
            address: IpNet {
                ip: given.address,
                ones: given.prefix,
            },
            gateway: given.gateway,
        });
        let routes = assignment.routes.iter().map(|route| {
            let dst = IpNet {
                ip: route.dst.first(),
                ones: route.dst.len(),
            };
            Route::new(dst, route.gw.map(Addr::from))
        });
        Self {
            ips: ips.collect(),
            routes: routes.collect(),
            dns: assignment.dns,
        }
    }
}

impl CniResult {
    /// Adds the routes of the config. Skips a route if no address of the interface is of the route's family. Also skips
    /// a route if the pool has a route to the same destination, because the kernel accepts only one route per
    /// destination.
    pub(super) fn add_routes(&mut self, routes: Vec<Route>) {
        for route in routes {
            let family = route.dst.ip.family;
            let is_usable = self.ips.iter().any(|ip| ip.address.ip.family == family);
            if is_usable && !self.routes.iter().any(|it| it.dst == route.dst) {
                self.routes.push(route);
            }
        }
    }

    /// Returns the result as JSON, in the form that `version` has. `version` must be supported.
    pub(super) fn render(&self, version: &str) -> String {
        let mut result = Map::from_iter([("cniVersion".to_owned(), version.into())]);
        if !version::is_since(version, "0.3.0") {
            for (key, family) in [("ip4", Family::V4), ("ip6", Family::V6)] {
                let of_family = self.of_family(family);
                result.extend(of_family.map(|value| (key.to_owned(), value)));
            }
            result.insert("dns".to_owned(), json!(self.dns));
            return json_text(&result);
        }
        let is_old = !version::is_since(version, "1.0.0");
        let ips = self.ips.iter().map(|ip| {
            let mut value = json!(ip);
            if is_old {
                let v4 = ip.address.ip.family == Family::V4;
                value["version"] = if v4 { "4" } else { "6" }.into();
            }
            value
        });
        result.insert("ips".to_owned(), ips.collect());
        result.insert("routes".to_owned(), json!(self.routes));
        result.insert("dns".to_owned(), json!(self.dns));
        let is_empty = |value: &Value| *value == json!([]) || !is_old && *value == json!({});
        result.retain(|_, value| !is_empty(value));
        json_text(&result)
    }

    fn of_family(&self, family: Family) -> Option<Value> {
        let mut ips = self.ips.iter();
        let ip = ips.find(|ip| ip.address.ip.family == family)?;
        let mut value = json!({"ip": ip.address});
        if let Some(gateway) = ip.gateway {
            value["gateway"] = json!(gateway);
        }
        let routes = self.routes.iter().filter(|it| it.dst.ip.family == family);
        let routes: Vec<Route> = routes.map(|it| Route::new(it.dst, it.gw)).collect();
        if !routes.is_empty() {
            value["routes"] = json!(routes);
        }
        Some(value)
    }
}

/// Converts a value to JSON. The callers pass only structs and maps with text keys, whose conversion cannot fail.
pub(super) fn json_text(value: &impl Serialize) -> String {
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
                mtu: Some(1400),
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
            r#"{"cniVersion":"0.2.0","dns":{},"ip4":{"gateway":"10.0.0.1","ip":"10.0.0.2/24","routes":[{"dst":"0.0.0.0/0"}]},"ip6":{"ip":"fd00::2/64"}}"#
        );
        assert_eq!(
            dual().render("0.4.0"),
            r#"{"cniVersion":"0.4.0","dns":{},"ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1","version":"4"},{"address":"fd00::2/64","version":"6"}],"routes":[{"dst":"0.0.0.0/0","mtu":1400,"table":0}]}"#
        );
        assert_eq!(
            dual().render("1.1.0"),
            r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"},{"address":"fd00::2/64"}],"routes":[{"dst":"0.0.0.0/0","mtu":1400,"table":0}]}"#
        );
        let mut named = dual();
        named.dns.domain = "d".to_owned();
        assert!(named.render("1.0.0").contains(r#""dns":{"domain":"d"},"#));
    }
}
