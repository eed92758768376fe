//! Reads the configuration of host-local.

use super::ranges::{RangeConfig, RangeSet};
use crate::cni::address::parse_host;
use crate::cni::args::CniArgs;
use crate::cni::config::Config;
use crate::cni::result::Route;
use crate::cni::version;
use cadastre_core::{Addr, Family};

/// The settings of host-local, from the config and `CNI_ARGS`.
#[derive(Debug, Default)]
pub(super) struct HostLocal {
    /// The range sets; an ADD assigns one address of each set
    pub(super) sets: Vec<RangeSet>,
    /// The requested addresses, without duplicates
    pub(super) requested: Vec<Addr>,
    pub(super) routes: Vec<Route>,
    /// Path of the file with the DNS settings for the result; empty if there is none
    pub(super) resolv_conf: String,
}

impl HostLocal {
    /// Reads a config. The order of the range sets is as follows: first the sets of the capability `ipRanges`, then the
    /// range in `ipam` itself, then the sets of `ipam.ranges`.
    pub(super) fn load(config: &Config, version: &str, args: &str) -> Result<Self, String> {
        let args = CniArgs::parse(args, |key| key == "IP")?;
        let ip = args.get("IP").filter(|ip| !ip.is_empty());
        let mut requested = Vec::new();
        for text in ip
            .map(str::to_owned)
            .into_iter()
            .chain(config.get_or_default::<Vec<_>>(&["args", "cni", "ips"])?)
            .chain(config.get_or_default::<Vec<_>>(&["runtimeConfig", "ips"])?)
        {
            let ip = parse_host(&text).map_err(|error| format!("a requested address: {error}"))?;
            if !requested.contains(&ip) {
                requested.push(ip);
            }
        }
        let mut written: Vec<Vec<RangeConfig>> =
            config.get_or_default(&["runtimeConfig", "ipRanges"])?;
        if config.has(&["ipam", "subnet"]) {
            written.push(config.get(&["ipam"])?.into_iter().collect());
        }
        written.extend(config.get_or_default::<Vec<_>>(&["ipam", "ranges"])?);
        Ok(Self {
            sets: check(written, version)?,
            requested,
            routes: config.get_or_default(&["ipam", "routes"])?,
            resolv_conf: config.get_or_default(&["ipam", "resolvConf"])?,
        })
    }
}

/// Fills in the defaults of range sets. Fails if two sets overlap, or if the version does not permit several sets of a
/// family.
fn check(written: Vec<Vec<RangeConfig>>, version: &str) -> Result<Vec<RangeSet>, String> {
    let sets = written.into_iter().enumerate().map(|(i, ranges)| {
        RangeSet::new(ranges).map_err(|text| format!("range set {i} of the network config: {text}"))
    });
    let sets = sets.collect::<Result<Vec<_>, _>>()?;
    let count = |family| sets.iter().filter(|set| set.family() == family).count();
    if Family::ALL.into_iter().any(|family| count(family) > 1)
        && !version::is_since(version, "0.3.0")
    {
        return Err(format!(
            "the network config has several range sets of a family: cniVersion {version} takes one; write 0.3.0 or later"
        ));
    }
    for (i, set) in sets.iter().enumerate() {
        if let Some(j) = (i + 1..sets.len()).find(|&j| set.overlaps(&sets[j])) {
            return Err(format!(
                "range sets {i} and {j} of the network config overlap: separate them"
            ));
        }
    }
    Ok(sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(more: &str, version: &str, args: &str) -> Result<HostLocal, String> {
        let config = Config::parse(format!(r#"{{"name":"net",{more}}}"#).as_bytes()).unwrap();
        HostLocal::load(&config, version, args)
    }

    #[test]
    fn range_sets_of_all_three_places_are_used_in_order() {
        let text = r#""ipam":{"SUBNET":"10.2.0.0/24","ranges":[[{"subnet":"10.3.0.0/24"}]]},
            "runtimeConfig":{"ipRanges":[[{"subnet":"10.1.0.0/24"}]]}"#;
        let sets = load(text, "1.0.0", "").unwrap().sets;
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        assert_eq!(
            sets,
            [
                "10.1.0.1-10.1.0.254",
                "10.2.0.1-10.2.0.254",
                "10.3.0.1-10.3.0.254"
            ]
        );
        assert!(
            load(text, "0.2.0", "")
                .unwrap_err()
                .contains("0.3.0 or later")
        );
    }

    #[test]
    fn invalid_ranges_are_rejected() {
        let ranges = |ranges: &str| load(&format!(r#""ipam":{{"ranges":{ranges}}}"#), "1.0.0", "");
        for (text, says) in [
            ("[[]]", "range set 0 of the network config: it is empty"),
            ("[[{}]]", "missing field `subnet`"),
            (r#"[[{"subnet":"10.0.0.0/31"}]]"#, "too small"),
            (r#"[[{"subnet":"10.0.0.1/24"}]]"#, "write `10.0.0.0/24`"),
            (
                r#"[[{"subnet":"10.0.0.0/24","rangeStart":"10.0.1.1"}]]"#,
                "rangeStart 10.0.1.1",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24","rangeEnd":"10.0.0.0"}]]"#,
                "rangeEnd 10.0.0.0",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24","rangeStart":"10.0.0.9","rangeEnd":"10.0.0.8"}]]"#,
                "rangeEnd 10.0.0.8",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24"},{"subnet":"fd00::/64"}]]"#,
                "both families",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24"},{"subnet":"10.0.0.0/16"}]]"#,
                "10.0.0.1-10.0.0.254 and 10.0.0.1-10.0.255.254 overlap",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24"}],[{"subnet":"10.0.0.0/24"}]]"#,
                "range sets 0 and 1 of the network config overlap",
            ),
            (
                r#"[[{"subnet":"10.0.0.0/24","gateway":"x"}]]"#,
                "\"x\" is not an IP address",
            ),
            (
                r#"{"a":1}"#,
                "ipam.ranges of the network config: invalid type",
            ),
        ] {
            let error = ranges(text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn requested_addresses_of_all_three_places_are_merged() {
        let text = r#""ipam":{"subnet":"10.0.0.0/24"},"args":{"cni":{"ips":["10.0.0.4/24","10.0.0.2"]}},"runtimeConfig":{"ips":["::ffff:10.0.0.9"]}"#;
        let config = load(text, "1.0.0", "IgnoreUnknown=1;X=y;IP=10.0.0.2").unwrap();
        let requested: Vec<String> = config.requested.iter().map(ToString::to_string).collect();
        assert_eq!(requested, ["10.0.0.2", "10.0.0.4", "10.0.0.9"]);
        assert!(load(text, "1.0.0", "X=y").unwrap_err().contains("\"X\""));
        assert!(load(text, "1.0.0", "IP=z").unwrap_err().contains("\"z\""));
    }
}
