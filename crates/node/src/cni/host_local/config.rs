//! host-local's own configuration, read and checked in host-local's order.

use super::ranges::{Range, RangeSet};
use crate::cni::args::{self, Args};
use crate::cni::golang::{self, IpNet};
use crate::cni::json::{self, Fault, Value};
use crate::cni::result::Route;
use crate::cni::routes::route;
use crate::cni::version;
use cadastre_core::{Addr, Family};

/// The error of a config without any range.
pub(super) const NO_RANGES: &str = "no IP ranges specified";

/// What host-local needs to know.
#[derive(Debug, Default)]
pub(super) struct HostLocal {
    /// One address is given of each
    pub(super) sets: Vec<RangeSet>,
    /// Addresses asked for, each once
    pub(super) requested: Vec<Addr>,
    /// Routes of the result; `None` for a null
    pub(super) routes: Vec<Option<Route>>,
    /// Where the networks' directories are; empty for the usual place
    pub(super) data_dir: String,
    /// The file that the result's DNS is read from, or empty
    pub(super) resolv_conf: String,
}

/// An address asked for; an empty text is none.
#[derive(Clone, Copy)]
struct Wish(Option<Addr>);

/// The parts of a config as they are written.
#[derive(Default)]
struct Net {
    version: String,
    /// Whether there is an `ipam` section
    ipam: bool,
    inline: Range,
    ranges: Vec<Vec<Range>>,
    runtime_ranges: Vec<Vec<Range>>,
    runtime_ips: Vec<Option<Wish>>,
    args_ips: Vec<Option<Wish>>,
    host_local: HostLocal,
}

impl HostLocal {
    /// Reads a config whose name and version are known to be good; the error is host-local's text, but for
    /// values of a wrong type.
    pub(super) fn load(root: &Value, env_args: &[u8]) -> Result<Self, String> {
        let mut net = Net::default();
        net.read(root).map_err(|fault| fault.to_string())?;
        if !net.ipam {
            return Err("IPAM config missing 'ipam' key".to_owned());
        }
        let by_env = requested_by_env(env_args)?.map(|ip| Some(Wish(Some(ip))));
        let mut host_local = net.host_local;
        for wish in by_env
            .into_iter()
            .chain(net.args_ips)
            .chain(net.runtime_ips)
        {
            let Wish(ip) = wish.ok_or("cannot understand ip: null")?;
            let ip = ip.ok_or("cannot understand ip: IP <nil> not v4 nor v6")?;
            if !host_local.requested.contains(&ip) {
                host_local.requested.push(ip);
            }
        }
        let inline = net.inline.subnet.is_some().then(|| vec![net.inline]);
        let written = net
            .runtime_ranges
            .into_iter()
            .chain(inline)
            .chain(net.ranges);
        let written: Vec<Vec<Range>> = written.collect();
        host_local.sets = check(written, &net.version)?;
        Ok(host_local)
    }
}

/// Normalises range sets and compares them with each other.
fn check(written: Vec<Vec<Range>>, version: &str) -> Result<Vec<RangeSet>, String> {
    if written.is_empty() {
        return Err(NO_RANGES.to_owned());
    }
    let mut sets = Vec::new();
    for (i, ranges) in written.into_iter().enumerate() {
        let set = RangeSet::new(ranges).map_err(|text| format!("invalid range set {i}: {text}"))?;
        sets.push(set);
    }
    let several = Family::ALL
        .iter()
        .any(|&family| sets.iter().filter(|set| set.family() == family).count() > 1);
    if several && !version::at_least(version, (0, 3, 0)).unwrap_or(false) {
        return Err(format!(
            "CNI version {version} does not support more than 1 address per family"
        ));
    }
    for (i, set) in sets.iter().enumerate() {
        if let Some(j) = (i + 1..sets.len()).find(|&j| set.overlaps(&sets[j])) {
            return Err(format!("range set {i} overlaps with {j}"));
        }
    }
    Ok(sets)
}

/// The address of `CNI_ARGS`, in which any other key is an error unless it is said that it is none.
fn requested_by_env(text: &[u8]) -> Result<Option<Addr>, String> {
    let (mut ip, mut ignore, mut unknown) = (None, false, Vec::new());
    // Each pair is looked at before the next is split.
    for pair in text
        .split(|&byte| byte == b';')
        .filter(|_| !text.is_empty())
    {
        let args = Args::parse(pair)?;
        if args.pairs().next().is_none() {
            return Err(format!("ARGS: invalid pair {}", golang::quote(pair)));
        }
        for (key, value) in args.pairs() {
            let fault = |text: String| {
                let pair = args::quote_pair(key, value);
                format!("ARGS: error parsing value of pair {pair}: {text}")
            };
            match key {
                b"IP" => ip = maybe_ip(&golang::text(value)).map_err(fault)?,
                b"IgnoreUnknown" => ignore = args::parse_bool(value).map_err(fault)?,
                b"CommonArgs" => {
                    return Err("ARGS: cannot unmarshal into field 'CommonArgs' - type '*types.CommonArgs' does not implement encoding.TextUnmarshaler".to_owned());
                }
                _ => unknown.push(pair),
            }
        }
    }
    if unknown.is_empty() || ignore {
        return Ok(ip);
    }
    Err(format!("ARGS: unknown args {}", golang::quote_all(unknown)))
}

/// An address with or without a prefix length, which does not count; an empty text is none.
fn maybe_ip(text: &str) -> Result<Option<Addr>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let ip = if text.contains('/') {
        IpNet::parse(text).map(|net| net.ip)
    } else {
        golang::parse_ip(text)
    };
    ip.map(Some)
        .ok_or_else(|| format!("invalid IP address {text}"))
}

impl Net {
    fn read(&mut self, root: &Value) -> Result<(), Fault> {
        json::fields(root, |key, value| match key {
            "cniversion" => json::string(value, &mut self.version),
            "ipam" => self.read_ipam(value),
            "runtimeconfig" => json::fields(value, |key, value| match key {
                "ipranges" => sets(value, &mut self.runtime_ranges),
                "ips" => ips(value, &mut self.runtime_ips),
                _ => Ok(()),
            }),
            "args" => {
                if *value == Value::Null {
                    self.args_ips.clear();
                }
                json::fields(value, |key, value| match key {
                    "cni" => self.read_args(value),
                    _ => Ok(()),
                })
            }
            _ => Ok(()),
        })
    }

    fn read_args(&mut self, cni: &Value) -> Result<(), Fault> {
        if *cni == Value::Null {
            self.args_ips.clear();
        }
        json::fields(cni, |key, value| match key {
            "ips" => ips(value, &mut self.args_ips),
            _ => Ok(()),
        })
    }

    fn read_ipam(&mut self, ipam: &Value) -> Result<(), Fault> {
        self.ipam = *ipam != Value::Null;
        if !self.ipam {
            self.inline = Range::default();
            self.ranges.clear();
            self.host_local = HostLocal::default();
        }
        let out = &mut self.host_local;
        json::fields(ipam, |key, value| match key {
            "name" | "type" => json::string(value, &mut String::new()),
            "datadir" => json::string(value, &mut out.data_dir),
            "resolvconf" => json::string(value, &mut out.resolv_conf),
            "ranges" => sets(value, &mut self.ranges),
            "routes" => json::list(value, &mut out.routes, route),
            _ => range_field(key, value, &mut self.inline),
        })
    }
}

fn sets(value: &Value, into: &mut Vec<Vec<Range>>) -> Result<(), Fault> {
    json::list(value, into, |value, set| {
        json::list(value, set, |value, range| {
            json::fields(value, |key, value| range_field(key, value, range))
        })
    })
}

fn range_field(key: &str, value: &Value, range: &mut Range) -> Result<(), Fault> {
    match key {
        "rangestart" => json::ip(value, &mut range.start),
        "rangeend" => json::ip(value, &mut range.end),
        "subnet" => json::cidr(value, &mut range.subnet),
        "gateway" => json::ip(value, &mut range.gateway),
        _ => Ok(()),
    }
}

/// Each is `None` for null.
fn ips(value: &Value, into: &mut Vec<Option<Wish>>) -> Result<(), Fault> {
    json::list(value, into, |value, ip| {
        json::text(value, ip, |text| Ok(Some(Wish(maybe_ip(text)?))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, args: &str) -> Result<HostLocal, String> {
        let root = Value::parse(text.as_bytes()).unwrap();
        HostLocal::load(&root, args.as_bytes())
    }

    fn ranges(ranges: &str) -> String {
        let text = format!(r#"{{"cniVersion":"1.0.0","ipam":{{"ranges":{ranges}}}}}"#);
        match load(&text, "") {
            Ok(config) => {
                let sets: Vec<String> = config.sets.iter().map(ToString::to_string).collect();
                sets.join(" ")
            }
            Err(error) => error,
        }
    }

    #[test]
    fn the_three_places_of_ranges_come_in_their_order() {
        let text = r#"{"cniVersion":"1.0.0","ipam":{"SUBNET":"10.2.0.0/24","ranges":[[{"subnet":"10.3.0.0/24"}]]},
            "runtimeConfig":{"ipRanges":[[{"subnet":"10.1.0.0/24"}]]}}"#;
        let sets = load(text, "").unwrap().sets;
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        assert_eq!(
            sets,
            [
                "10.1.0.1-10.1.0.254",
                "10.2.0.1-10.2.0.254",
                "10.3.0.1-10.3.0.254"
            ]
        );
    }

    #[test]
    fn ranges_that_cannot_be_are_refused_with_host_locals_texts() {
        for (text, answer) in [
            ("[]", "no IP ranges specified"),
            ("[[]]", "invalid range set 0: empty range set"),
            ("[[{}]]", "invalid range set 0: IP <nil> not v4 nor v6"),
            (
                r#"[[{"subnet":"10.0.0.0/31"}]]"#,
                "invalid range set 0: Network 10.0.0.0/31 too small to allocate from",
            ),
            (
                r#"[[{"subnet":"::ffff:10.0.0.0/120"}]]"#,
                "invalid range set 0: IPNet IP and Mask version mismatch",
            ),
            (
                r#"[[{"subnet":"10.0.0.1/24"}]]"#,
                "invalid range set 0: Network has host bits set. For a subnet mask of length 24 the network address is 10.0.0.0",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24","rangeStart":"10.0.1.1"}]]"#,
                "invalid range set 0: RangeStart 10.0.1.1 not in network 10.0.0.0/24",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24","rangeEnd":"10.0.0.0"}]]"#,
                "invalid range set 0: RangeEnd 10.0.0.0 not in network 10.0.0.0/24",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.9","rangeEnd":"10.0.0.8"}]]"#,
                "invalid range set 0: RangeStart 10.0.0.9 not in network 10.0.0.0/24",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24"},{"subnet":"fd00::/64"}]]"#,
                "invalid range set 0: mixed address families",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24"},{"subnet":"10.0.0.0/16"}]]"#,
                "invalid range set 0: subnets 10.0.0.1-10.0.0.254 and 10.0.0.1-10.0.255.254 overlap",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24"}],[{"subnet":"10.0.0.0/24"}]]"#,
                "range set 0 overlaps with 1",
            ),
            (r#"[[{"subnet":"x"}]]"#, "invalid CIDR address: x"),
            (
                r#"[[{"subnet":"10.0.0.0/24","gateway":"x"}]]"#,
                "invalid IP address: x",
            ),
            (
                r#"[[{"subnet":"fd00::/64"}]]"#,
                "fd00::1-fd00::ffff:ffff:ffff:ffff",
            ),
            (
                r#"{"a":1}"#,
                "ipam.ranges of the network config is no list: write one, or leave it out",
            ),
            (
                r#"[[{"subnet":1}]]"#,
                "ipam.ranges[0][0].subnet of the network config is no string: write one, or leave it out",
            ),
        ] {
            assert_eq!(ranges(text), answer, "{text}");
        }
    }

    #[test]
    fn addresses_are_asked_for_in_three_ways_and_merged() {
        let text = r#"{"ipam":{"subnet":"10.0.0.0/24"},"args":{"cni":{"ips":["10.0.0.4/24","10.0.0.2"]}},"runtimeConfig":{"ips":["::ffff:10.0.0.9"]}}"#;
        let config = load(text, "IgnoreUnknown=1;X=y;IP=10.0.0.2").unwrap();
        let requested: Vec<String> = config.requested.iter().map(ToString::to_string).collect();
        assert_eq!(requested, ["10.0.0.2", "10.0.0.4", "10.0.0.9"]);
        assert_eq!(
            load(text, "X=y").unwrap_err(),
            r#"ARGS: unknown args ["X=y"]"#
        );
        assert_eq!(
            load(text, "X=y;IP=z;").unwrap_err(),
            r#"ARGS: error parsing value of pair "IP=z": invalid IP address z"#
        );
        assert_eq!(load(text, "X=y;;").unwrap_err(), r#"ARGS: invalid pair """#);
    }

    #[test]
    fn a_route_that_cannot_be_read_is_named_by_its_path() {
        let routes = |routes: &str| {
            let text = format!(r#"{{"ipam":{{"subnet":"10.0.0.0/24","routes":{routes}}}}}"#);
            load(&text, "").map(|config| config.routes.len())
        };
        assert_eq!(
            routes(r#"[{"dst":7}]"#).unwrap_err(),
            "ipam.routes[0].dst of the network config is no string: write one, or leave it out"
        );
        assert_eq!(
            routes(r#"[{"mtu":1.5}]"#).unwrap_err(),
            "ipam.routes[0].mtu of the network config is no whole number of 64 bits: write one, or leave it out"
        );
        assert_eq!(
            routes(r#"["x"]"#).unwrap_err(),
            "ipam.routes[0] of the network config is no object: write one, or leave it out"
        );
        assert_eq!(routes(r#"[null, {"dst":"0.0.0.0/0","table":254}]"#), Ok(2));
    }
}
