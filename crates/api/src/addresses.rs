//! NodeAddresses: which addresses are in use on a node, and to which pods they are assigned.
//!
//! A NodeAddresses has the name of its node. Only the node's agent writes the object. The object is for users, and for
//! an agent whose store was lost. Because the object is large, it is written rarely. To learn whether an address is
//! free right now, ask the agent. The controller does not use the NodeAddresses; it uses the status of the NodeSubnet.
//! The NodeSubnet owns the NodeAddresses, so the two are deleted together.

use std::fmt;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use cadastre_core::Addr;

/// The maximum number of entries of a NodeAddresses, one for each container interface. This many entries of
/// [`LONGEST_ENTRY`] bytes each would not fit into an object of etcd (1.5 MiB). Therefore [`MOST_BYTES`] is a second
/// limit.
pub const MOST_ENTRIES: usize = 4_096;
/// The maximum size of all entries of a NodeAddresses together, in bytes.
pub const MOST_BYTES: usize = 1 << 20;
/// The maximum size of one entry, in bytes.
pub(crate) const LONGEST_ENTRY: usize = 1_280;

/// The addresses that were in use on a node at the time in asOf.
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
    /// UID of the Node on which the agent runs.
    #[schemars(length(max = 128))]
    #[serde(default, rename = "nodeUID", skip_serializing_if = "String::is_empty")]
    pub node_uid: String,

    /// Boot ID of the host at the time in asOf. It changes at each boot.
    #[schemars(length(max = 64))]
    #[serde(default, rename = "bootID", skip_serializing_if = "String::is_empty")]
    pub boot_id: String,

    /// The time at which the addresses in this list were in use. The agent writes the list only if it has changed, and
    /// with a delay of up to a few minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_of: Option<Time>,

    /// One entry for each container interface. The fields of an entry are separated by spaces, in this order: the
    /// addresses, separated by a comma; the handle, which is network name/container ID; the interface; the pod's UID;
    /// namespace/name of the pod; the time when the addresses were assigned; and "superseded" if the pod has a newer
    /// sandbox with this interface on this network. Users can release the addresses by their handle. An unknown field
    /// is "-".
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    #[schemars(length(max = MOST_ENTRIES), inner(length(max = LONGEST_ENTRY)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
}

impl NodeAddressesSpec {
    /// Parses the entries. An entry that cannot be parsed is skipped.
    pub fn entries(&self) -> impl Iterator<Item = AddressEntry> {
        self.addresses
            .iter()
            .filter_map(|text| AddressEntry::read(text))
    }

    /// Returns whether both lists have the same content, apart from `as_of`.
    pub fn is_same(&self, other: &Self) -> bool {
        let at_that_time = Self {
            as_of: other.as_of.clone(),
            ..self.clone()
        };
        at_that_time == *other
    }
}

/// One entry of a NodeAddresses: the addresses of one container interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressEntry {
    /// At least one address, in ascending order
    pub addresses: Vec<Addr>,
    /// The handle by which users can release the addresses: `network name/container id`. A network name has no slash,
    /// so the first slash ends the network name.
    pub handle: String,
    /// Name of the interface in the pod
    pub interface: String,
    /// The pod's UID; empty if the container runtime did not report it
    pub pod_uid: String,
    /// `namespace/name` of the pod; empty if unknown
    pub pod: String,
    /// When the addresses were assigned, rounded to a second; `None` if unknown
    pub since: Option<Timestamp>,
    /// Whether the pod has a newer sandbox with this interface on this network
    pub superseded: bool,
}

/// Stands for a field whose value is unknown.
const NOTHING: &str = "-";
const SUPERSEDED: &str = "superseded";

impl AddressEntry {
    /// Parses an entry. Returns `None` if the text contains no address. Ignores additional fields at the end, because a
    /// newer agent may have added them.
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

/// Truncates `text` to `longest` bytes. Replaces white space and control characters by `_`, and an empty text by `-`.
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
    fn a_written_entry_is_read_back() {
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
    fn long_or_odd_names_are_cut_and_have_no_separators() {
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
