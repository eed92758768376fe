//! NodeAddresses: which addresses are in use on a node, and by what.
//!
//! It bears the node's name, and the agent of the node writes all of it. It is for people, and for an agent
//! whose store was lost. It is written seldom, as it is large: whoever needs to know at once whether an
//! address is free asks the agent, and what the controller decides by is in the status of the NodeSubnet.
//! It goes with the NodeSubnet that owns it.

use std::fmt;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use cadastre_core::Addr;

/// The most interfaces of containers that a list may have. With [`LONGEST_ENTRY`] bytes each they would not
/// fit into an object of etcd (1.5 MiB): see [`MOST_BYTES`].
pub const MOST_ENTRIES: usize = 4_096;
/// The most bytes that all entries of a list may have together.
pub const MOST_BYTES: usize = 1 << 20;
/// The longest entry.
pub(crate) const LONGEST_ENTRY: usize = 1_280;

/// What is in use on a node.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "cadastre.dev",
    version = "v1alpha1",
    kind = "NodeAddresses",
    plural = "nodeaddresses",
    singular = "nodeaddresses",
    shortname = "naddr",
    category = "cadastre",
    derive = "PartialEq",
    doc = "The addresses in use on a node, as of a few minutes ago. Written by the node's agent; read-only for everybody else."
)]
#[serde(rename_all = "camelCase")]
pub struct NodeAddressesSpec {
    /// The UID of the Node that the agent runs on.
    #[schemars(length(max = 128))]
    #[serde(default, rename = "nodeUID", skip_serializing_if = "String::is_empty")]
    pub node_uid: String,

    /// The boot of the machine in which this was so.
    #[schemars(length(max = 64))]
    #[serde(default, rename = "bootID", skip_serializing_if = "String::is_empty")]
    pub boot_id: String,

    /// When this was so. It is written again only when something has changed, and not at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_of: Option<Time>,

    /// An entry for each interface of a container, its fields separated by spaces: its addresses, separated by
    /// a comma; network name and container id, under which they are released; the interface; the pod's UID;
    /// namespace/name of the pod; since when; "superseded" where the pod has a newer sandbox with this
    /// interface on this network. A field that is not known is "-".
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    #[schemars(length(max = MOST_ENTRIES), inner(length(max = LONGEST_ENTRY)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
}

impl NodeAddressesSpec {
    /// The entries that can be read.
    pub fn entries(&self) -> impl Iterator<Item = AddressEntry> {
        self.addresses
            .iter()
            .filter_map(|text| AddressEntry::read(text))
    }

    /// Whether both say the same, whenever that was so.
    pub fn is_same(&self, other: &Self) -> bool {
        let at_that_time = Self {
            as_of: other.as_of.clone(),
            ..self.clone()
        };
        at_that_time == *other
    }
}

/// The addresses of one interface of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressEntry {
    /// At least one, sorted
    pub addresses: Vec<Addr>,
    /// Under what they are released: network name and container id. A network's name has no slash.
    pub handle: String,
    /// The interface in the pod
    pub interface: String,
    /// The pod's UID; empty where the runtime told none
    pub pod_uid: String,
    /// `namespace/name` of the pod
    pub pod: String,
    /// Since when, to the second
    pub since: Option<Timestamp>,
    /// Whether the pod has a newer sandbox with this interface on this network
    pub superseded: bool,
}

/// Stands for a field that is not known.
const NOTHING: &str = "-";
const SUPERSEDED: &str = "superseded";

impl AddressEntry {
    /// Reads an entry; `None` where it names no address. Fields that a newer agent has added are passed over.
    pub fn read(text: &str) -> Option<Self> {
        let mut fields = text.split(' ');
        let addresses = fields.next()?.split(',');
        let addresses: Vec<Addr> = addresses.filter_map(Addr::parse_lenient).collect();
        if addresses.is_empty() {
            return None;
        }
        let mut next = || {
            let field = fields.next().filter(|field| *field != NOTHING);
            field.unwrap_or_default().to_owned()
        };
        Some(Self {
            addresses,
            handle: next(),
            interface: next(),
            pod_uid: next(),
            pod: next(),
            since: next().parse().ok(),
            superseded: next() == SUPERSEDED,
        })
    }
}

impl fmt::Display for AddressEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, addr) in self.addresses.iter().enumerate() {
            let comma = if n == 0 { "" } else { "," };
            write!(f, "{comma}{addr}")?;
        }
        let since = self.since.map(|it| it.to_string());
        let fields = [
            (self.handle.as_str(), 512),
            (&self.interface, 15),
            (&self.pod_uid, 128),
            (&self.pod, 317),
            (since.as_deref().unwrap_or_default(), 32),
        ];
        for (text, longest) in fields {
            write!(f, " {}", field(text, longest))?;
        }
        if self.superseded {
            write!(f, " {SUPERSEDED}")?;
        }
        Ok(())
    }
}

/// The text of a field: cut to that many bytes, with nothing in it that separates.
fn field(text: &str, longest: usize) -> String {
    let mut field = String::new();
    for sign in text.chars() {
        let separates = sign.is_whitespace() || sign.is_control();
        let sign = if separates { '_' } else { sign };
        if field.len() + sign.len_utf8() > longest {
            break;
        }
        field.push(sign);
    }
    if field.is_empty() {
        NOTHING.to_owned()
    } else {
        field
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> AddressEntry {
        AddressEntry {
            addresses: ["10.0.0.1", "fd00::1"]
                .map(|it| Addr::parse_strict(it).unwrap())
                .to_vec(),
            handle: "net/c1".to_owned(),
            interface: "eth0".to_owned(),
            pod_uid: "u1".to_owned(),
            pod: "shop/cart".to_owned(),
            since: Some("2026-11-21T10:00:00Z".parse().unwrap()),
            superseded: true,
        }
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let text = "10.0.0.1,fd00::1 net/c1 eth0 u1 shop/cart 2026-11-21T10:00:00Z superseded";
        assert_eq!(entry().to_string(), text);
        assert_eq!(AddressEntry::read(text), Some(entry()));
        let bare = AddressEntry {
            addresses: entry().addresses,
            ..AddressEntry::default()
        };
        assert_eq!(bare.to_string(), "10.0.0.1,fd00::1 - - - - -");
        assert_eq!(AddressEntry::read(&bare.to_string()), Some(bare.clone()));
        assert_eq!(AddressEntry::read("10.0.0.1,fd00::1"), Some(bare));
        assert!(AddressEntry::read(&format!("{text} later")).is_some());
        assert_eq!(AddressEntry::read("nonsense net/c1"), None);
    }

    #[test]
    fn an_entry_fits_and_has_no_separator_in_it_whatever_a_runtime_says() {
        let long = "ä \n".repeat(1_000);
        let entry = AddressEntry {
            handle: long.clone(),
            interface: long.clone(),
            pod_uid: long.clone(),
            pod: long,
            ..entry()
        };
        let text = entry.to_string();
        assert!(text.len() <= LONGEST_ENTRY, "{}", text.len());
        assert_eq!(text.split(' ').count(), 7);
        assert!(AddressEntry::read(&text).unwrap().superseded);
    }
}
