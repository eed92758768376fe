//! Addresses of pods on second networks. The agent reads these addresses from Multus' annotations, because the
//! container runtime does not know them.
//!
//! The annotation `networks` asks for second networks. Multus writes the annotation `network-status` to a pod once all
//! networks of the pod are set up, before the sandbox is ready. Users who may edit a pod can write both annotations, so
//! the agent trusts neither.
//!
//! # Guarantees
//! - The length of an annotation that is read, and the number of addresses read from it, are bounded.
//! - The annotations can keep addresses from being assigned, but they never cause the release of an address. They
//!   matter only for addresses that are in ranges of the pod's node and that no other attachment has.

use serde::Deserialize;

use cadastre_api::ipam_claim::NETWORKS_ANNOTATION as WANTED;
use cadastre_core::Addr;

/// The annotation in which Multus reports the networks that a pod is attached to.
const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

/// Annotations of more bytes than this are ignored.
const MOST_TEXT: usize = 64 << 10;
/// At most this many addresses are read from the annotation of a pod.
const MOST_ADDRESSES: usize = 32;
/// The maximum length of an interface's name (as in Linux), and of a network's name.
const LONGEST: (usize, usize) = (15, 253);

/// An interface of a pod on a second network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The name of the network without its namespace; empty if the annotation does not name the network
    pub network: String,
    /// The name of the interface in the pod, such as `net1`
    pub interface: String,
    /// The addresses of the interface. All interfaces of a pod together have at most `MOST_ADDRESSES`
    pub addresses: Vec<Addr>,
}

/// Which interfaces on second networks a pod has, as far as the pod's annotations show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SecondNetworks {
    /// The pod asks for no second network.
    #[default]
    None,
    /// The pod has these interfaces on second networks.
    Known(Vec<Attached>),
    /// The pod asks for second networks, but no readable annotation lists the pod's addresses on them.
    Unknown,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    name: String,
    #[serde(default)]
    interface: String,
    #[serde(default)]
    ips: Vec<String>,
    #[serde(default)]
    default: bool,
}

/// Reads Multus' annotations of a pod; `annotation` returns the value of the annotation with a given name.
pub(crate) fn read<'a>(annotation: impl Fn(&str) -> Option<&'a str>) -> SecondNetworks {
    let wanted = annotation(WANTED).is_some_and(|it| !matches!(it.trim(), "" | "[]"));
    let unknown = if wanted {
        SecondNetworks::Unknown
    } else {
        SecondNetworks::None
    };
    let Some(text) = annotation(STATUS).filter(|it| it.len() <= MOST_TEXT) else {
        return unknown;
    };
    let Ok(entries) = serde_json::from_str::<Vec<Entry>>(text) else {
        return unknown;
    };
    let mut remaining = MOST_ADDRESSES;
    let mut all = Vec::new();
    // The entry marked as default is the pod's own interface. The entry is skipped, because the runtime knows the
    // addresses of that interface.
    for entry in entries.into_iter().filter(|it| !it.default) {
        let addresses = entry.ips.iter().filter_map(|it| Addr::parse_lenient(it));
        let addresses: Vec<Addr> = addresses.take(remaining).collect();
        let network = entry.name.rsplit('/').next().unwrap_or_default();
        if entry.interface.len() > LONGEST.0 || network.len() > LONGEST.1 {
            continue;
        }
        remaining -= addresses.len();
        all.push(Attached {
            network: network.to_owned(),
            interface: entry.interface,
            addresses,
        });
    }
    if all.is_empty() {
        return unknown;
    }
    SecondNetworks::Known(all)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(wanted: Option<&str>, status: Option<&str>) -> SecondNetworks {
        read(|name| match name {
            WANTED => wanted,
            STATUS => status,
            _ => None,
        })
    }

    #[test]
    fn second_networks_are_read_and_the_first_network_is_left_out() {
        let status = json!([
            {"name": "cbr0", "interface": "eth0", "ips": ["10.0.0.2"], "default": true, "dns": {}},
            {"name": "default/storage", "interface": "net1", "ips": ["10.1.0.2", "fd00::2", "x"], "mac": "0"},
            {"name": "default/plain", "interface": "net2", "dns": {}},
        ])
        .to_string();
        let SecondNetworks::Known(all) = of(Some("storage,plain"), Some(&status)) else {
            panic!("not read");
        };
        let read: Vec<(&str, &str, usize)> = all
            .iter()
            .map(|it| (&*it.network, &*it.interface, it.addresses.len()))
            .collect();
        assert_eq!(read, [("storage", "net1", 2), ("plain", "net2", 0)]);
    }

    #[test]
    fn a_pod_that_asks_for_second_networks_without_a_status_has_unknown_ones() {
        let first =
            r#"[{"name": "cbr0", "interface": "eth0", "ips": ["10.0.0.2"], "default": true}]"#;
        let long = " ".repeat(MOST_TEXT + 1);
        for status in [
            None,
            Some("nonsense"),
            Some("[]"),
            Some(first),
            Some(&*long),
        ] {
            assert_eq!(of(Some("storage"), status), SecondNetworks::Unknown);
            assert_eq!(of(Some(" [] "), status), SecondNetworks::None);
            assert_eq!(of(None, status), SecondNetworks::None);
        }
    }

    #[test]
    fn the_number_of_addresses_of_a_pod_is_bounded() {
        let ips: Vec<String> = (0..200).map(|n| format!("10.1.0.{n}")).collect();
        let entry = |interface: &str| json!({"name": "a", "interface": interface, "ips": ips});
        let status = json!([entry(&"x".repeat(16)), entry("net1"), entry("net2")]).to_string();
        let SecondNetworks::Known(all) = of(None, Some(&status)) else {
            panic!("not read");
        };
        let count: usize = all.iter().map(|it| it.addresses.len()).sum();
        assert_eq!((all.len(), count), (2, MOST_ADDRESSES));
    }
}
