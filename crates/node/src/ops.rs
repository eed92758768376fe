//! Operations on the addresses of a node, and their results.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::limits::NetworkLimits;
use cadastre_core::node_allocation::{Dns, Route};
use cadastre_core::{Addr, Cidr};

/// A moment, given by the time since boot and by the time of day. Decisions use only `boot` and `since_boot`, which do
/// not change when the time of day is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Now {
    /// Id of the running boot: `/proc/sys/kernel/random/boot_id`
    pub boot: String,
    /// Time since boot, including the time that the host was suspended
    pub since_boot: Duration,
    /// Time of day in milliseconds of Unix time; only for display, never for decisions
    pub wall_ms: i64,
}

/// An interface of a container on a network, to which addresses are assigned. CNI spec 1.1.0 defines these three fields
/// as the identity of an attachment. So an ADD with the same three fields is a repeated ADD, and a DEL names an
/// attachment by the same fields.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// Name of the CNI network
    pub network: String,
    /// Id of the container (sandbox)
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// Name of the interface in the container
    pub ifname: String,
}

/// The pod of an attachment, as the container runtime reported it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRef {
    /// Namespace of the pod; empty if the container runtime did not report it
    pub namespace: String,
    /// Name of the pod; empty if the container runtime did not report it
    pub name: String,
    /// UID of the pod; empty if the container runtime did not report it
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

/// An operation on the ledger. It takes effect as a whole or not at all.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Assigns addresses; a repeated `Add` returns the same addresses
    Add(Add),
    /// Releases the addresses of an attachment; succeeds if the attachment has none
    Del(Attachment),
    /// Compares the addresses that the container runtime remembers with those that are assigned
    Check(Check),
    /// Releases the addresses of all attachments of a network except the valid ones
    Gc(Gc),
    /// Succeeds if the node has blocks from which an ADD can be served
    Status,
}

/// A request for addresses. By default, it requests one address of each family, all from the first pool that has free
/// addresses.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Add {
    /// The attachment to which the addresses are assigned
    pub attachment: Attachment,
    /// Path of the network namespace; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub netns: String,
    /// The pod, if the container runtime named one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    /// Names of the pools to try, in this order; if empty, the node's automatic pools are tried in their order
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<String>,
    /// If not empty, exactly these addresses are assigned, at most one of each family, whichever pools they belong to.
    /// If `pools` names an IPClaim, the requested addresses must belong to the claim
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Addr>,
    /// What the network's configuration allows, if it has a range of its own as configurations of whereabouts have
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Box<NetworkLimits>>,
    /// Name of the interface that connects the network to the link, such as the `master` of macvlan. For pools that
    /// require probes, addresses are probed on this interface. If empty, they are probed on the interface of the node's
    /// default route
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub parent: String,
    /// Whether `pools` and `addresses` already reflect the pod's labels and annotations. If not, they reflect only
    /// the network's configuration, and the store's note on the pod can replace them.
    #[serde(skip)]
    pub decided: bool,
    /// Names of the pools with a namespace selector that serve the pod, and of the pod's IPClaim: see
    /// [`PodChoice::bound`](crate::PodChoice::bound)
    #[serde(skip)]
    pub bound: Vec<String>,
}

/// A request to check that an attachment has the addresses that the container runtime remembers.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The attachment to check. The check fails if the attachment has no address
    pub attachment: Attachment,
    /// All addresses that the container runtime remembers. Addresses outside the node's blocks are ignored
    pub addresses: Vec<Addr>,
}

/// A request to release the addresses of all attachments of a network except the valid ones.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Gc {
    /// Name of the CNI network; attachments of other networks are kept
    pub network: String,
    /// Container ID and interface of each valid attachment
    pub valid: Vec<(String, String)>,
}

/// The result of a successful [`Op`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum OpOutcome {
    /// The result of an ADD, or of a repeated ADD
    #[serde(rename = "given")]
    Assigned(AddressAssignment),
    /// The result of a successful operation that returns no addresses: a DEL, CHECK, GC or STATUS
    Done,
}

/// The result of an ADD: the addresses of an attachment, with routes and DNS settings.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressAssignment {
    /// The addresses of the attachment, IPv4 first
    pub addresses: Vec<AssignedAddress>,
    /// Routes of the pools to which the addresses belong
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// DNS settings of the first pool in `addresses` that has DNS settings
    #[serde(default, skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
}

impl AddressAssignment {
    /// Returns only the addresses, without their other data, IPv4 first.
    pub fn addrs(&self) -> impl Iterator<Item = Addr> + Clone {
        self.addresses.iter().map(|it| it.address)
    }
}

/// An assigned address, with the data that the main CNI plugin needs to configure it.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct AssignedAddress {
    /// The address without its prefix length, which is in `prefix`
    pub address: Addr,
    /// Prefix length with which the interface is configured
    pub prefix: u8,
    /// Gateway for the address, if the pool has one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Addr>,
    /// Name of the pool to which the address belongs; empty if the address is from a podCIDR that lies in no pool
    pub pool: String,
    /// CIDR of the block from which the address was assigned
    pub block: Cidr,
}

/// Why an operation was rejected. A rejected operation changes nothing.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct OpError {
    /// The kind of error, which determines the CNI error code
    pub why: OpErrorKind,
    /// Says what is wrong, which object is concerned, and what to do
    pub text: String,
}

/// Kinds of [`OpError`]. The kind determines the CNI error code and the status code of the gRPC API.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum OpErrorKind {
    /// Every address that could be assigned is in use or cooling
    Exhausted,
    /// The node has no block from which it could assign an address, or no block of the requested pools, or no pool
    /// serves the pod
    #[serde(rename = "nothingHeld")]
    NoBlock,
    /// The requested pools are unknown on this node or not open to the pod's namespace. Or a requested address belongs
    /// to a pool that is not open to that namespace
    UnknownPool,
    /// A requested address is in none of the blocks from which the node may assign
    #[serde(rename = "notHeld")]
    NotInBlocks,
    /// Addresses are free, but none of them was probed, and the pool requires a probe before an address is used
    Unprobed,
    /// A requested address is in use or cooling, or another host uses it
    #[serde(rename = "taken")]
    NotFree,
    /// A requested address is reserved, or is the gateway, network or broadcast address; or several addresses of a
    /// family were requested
    NotUsable,
    /// It is not known which pools and addresses the pod may have; a later retry can succeed
    PodUnknown,
    /// The attachment does not have the addresses that were requested or checked
    Mismatch,
    /// Another attempt can succeed later. The reason is one of these: the deadline has passed; a DEL of this attachment
    /// was requested after the ADD; the store is locked or missing; the agent is starting
    Busy,
    /// The store cannot be read or written
    Store,
}
