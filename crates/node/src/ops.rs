//! Operations on the addresses of a node, and their results.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use cadastre_core::node_allocation::{Dns, Route};
use cadastre_core::{Addr, Cidr};

/// A moment, by clocks that are not affected when the time of day is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Now {
    /// Id of the running boot: `/proc/sys/kernel/random/boot_id`
    pub boot: String,
    /// Time since boot, including suspend
    pub since_boot: Duration,
    /// Wall clock in milliseconds of Unix time; only for display, never for decisions
    pub wall_ms: i64,
}

/// An interface of a container on a network: what addresses are assigned to. CNI spec 1.1.0 defines this as the
/// identity of an attachment, so an ADD that repeats it is a repeated ADD, and a DEL names it.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

/// The pod of an attachment, as the runtime reported it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRef {
    /// Namespace of the pod
    pub namespace: String,
    /// Name of the pod
    pub name: String,
    /// UID of the pod; empty if the runtime did not report it
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

/// An operation. It takes effect as a whole or not at all.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Assigns addresses; repeating it returns the same addresses
    Add(Add),
    /// Releases the addresses of an attachment; succeeds if there are none
    Del(Attachment),
    /// Compares what the runtime remembers with what is assigned
    Check(Check),
    /// Releases all attachments of a network except the valid ones
    Gc(Gc),
    /// Tells whether an ADD could be served
    Status,
}

/// A request for one address of each family, from the first pool that can serve them all.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Add {
    /// What to assign the addresses to
    pub attachment: Attachment,
    /// Path of the network namespace; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub netns: String,
    /// The pod, if the runtime named one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    /// Names of pools to try in this order; if empty, the automatic pools of the holding in theirs
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<String>,
    /// Exactly these addresses, at most one per family, from whatever pools
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Addr>,
    /// Whether `pools` and `addresses` already reflect the pod's labels and annotations. If not, they only
    /// reflect the network's configuration, and the store's note of the pod decides the rest.
    #[serde(skip)]
    pub decided: bool,
    /// Pools restricted to some namespaces that are open to the pod's namespace, if known
    #[serde(skip)]
    pub bound: Vec<String>,
}

/// A question whether an attachment has the addresses that the runtime remembers.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The attachment to check
    pub attachment: Attachment,
    /// All addresses of the previous result; those outside the node's blocks are ignored
    pub addresses: Vec<Addr>,
}

/// A request to release all attachments of a network except the valid ones.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Gc {
    /// Name of the network
    pub network: String,
    /// Container id and interface of the valid attachments
    pub valid: Vec<(String, String)>,
}

/// The result of a successful [`Op`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum OpOutcome {
    /// The result of an ADD, also of a repeated one
    Given(AddressAssignment),
    /// The other operations: done, or no problem found
    Done,
}

/// The addresses of an attachment, with routes and DNS settings.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressAssignment {
    /// Its addresses, IPv4 first
    pub addresses: Vec<AssignedAddress>,
    /// Routes of the pools that the addresses belong to
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// DNS settings of the first of these pools that has any
    #[serde(default, skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
}

/// An assigned address with what a main plugin needs to configure it.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct AssignedAddress {
    /// The assigned address
    pub address: Addr,
    /// Prefix length to configure the address with
    pub prefix: u8,
    /// Gateway for the address, if the pool has one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Addr>,
    /// Name of the pool; empty for a podCIDR outside every pool
    pub pool: String,
    /// The block that the address belongs to
    pub block: Cidr,
}

/// Why an operation was refused; nothing has changed then.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct OpError {
    /// The kind of refusal, which determines the CNI error code
    pub why: OpErrorKind,
    /// What is wrong, with what, and what to do
    pub text: String,
}

/// Kinds of [`OpError`].
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum OpErrorKind {
    /// Every address is in use or cooling
    Exhausted,
    /// The node has no block to assign from, none of the requested pools, or no pool serves the pod
    NothingHeld,
    /// A requested pool is unknown on this node, or not for the pod's namespace
    UnknownPool,
    /// A requested address is in no block that the node may assign from
    NotHeld,
    /// A requested address is in use or cooling
    Taken,
    /// A requested address is reserved, or is the gateway, network or broadcast address
    NotUsable,
    /// It is not known which pools and addresses the pod is entitled to: try again
    PodUnknown,
    /// The attachment has other addresses than those asked for or checked, or none
    Mismatch,
    /// The deadline has passed, the store is locked, or the agent is starting: try again
    Busy,
    /// The store cannot be read or written
    Store,
}
