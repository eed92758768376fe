//! What is asked of the node's addresses, and what is answered.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use cadastre_core::holding::{Dns, Route};
use cadastre_core::{Addr, Cidr};

/// When something happens, by clocks that no setting of the time moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Now {
    /// The running boot: `/proc/sys/kernel/random/boot_id`
    pub boot: String,
    /// Time since boot, with the time that the machine slept
    pub since_boot: Duration,
    /// The wall clock, in milliseconds of Unix time: told to people, never decided by
    pub wall_ms: i64,
}

/// What addresses are given to: an interface in a container, on a network. By spec 1.1.0 this names
/// an attachment, so it is what an ADD is repeated by and a DEL names.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// Name of the CNI network
    pub network: String,
    /// Container id
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// Interface in the container
    pub ifname: String,
}

/// The pod of an attachment, as the runtime told it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRef {
    /// Its namespace
    pub namespace: String,
    /// Its name
    pub name: String,
    /// Its UID; empty if the runtime did not tell
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

/// Something to do. Each takes effect as a whole or not at all.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Give addresses
    Add(Add),
    /// Take them back; a success for what is unknown
    Del(Attachment),
    /// Is what the runtime remembers what was given?
    Check(Check),
    /// Take back all of a network but what is valid
    Gc(Gc),
    /// Could an ADD be served?
    Status,
}

/// Asks for addresses: one of each family of the first pool that can serve.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Add {
    /// For what
    pub attachment: Attachment,
    /// The path of its network namespace; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub netns: String,
    /// For which pod
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    /// Pools by name, to be tried in this order; empty: the automatic ones of the holding in theirs
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<String>,
    /// These addresses and no others, at most one a family, of whatever pools
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Addr>,
    /// Whether pools and addresses are what the pod may have, by its labels and annotations. Else they are what
    /// the network's configuration asks for, and the store's note of the pod says the rest.
    #[serde(skip)]
    pub decided: bool,
    /// The pools for some namespaces only that are for the pod's, if that is known
    #[serde(skip)]
    pub bound: Vec<String>,
}

/// Asks whether an attachment has what the runtime remembers.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Which one
    pub attachment: Attachment,
    /// The addresses of the previous result that are its IPAM's
    pub addresses: Vec<Addr>,
}

/// Takes back everything of a network that is not valid.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Gc {
    /// The network
    pub network: String,
    /// Container id and interface of what is
    pub valid: Vec<(String, String)>,
}

/// What became of an [`Op`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// Of an ADD, also of a repeated one
    Given(Given),
    /// Done, or all is well
    Done,
}

/// What an attachment has.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// Its addresses, IPv4 first
    pub addresses: Vec<GivenAddress>,
    /// Routes of their pool
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// DNS of their pool
    #[serde(default, skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
}

/// An address with what a main plugin needs to know.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct GivenAddress {
    /// The address
    pub address: Addr,
    /// The prefix length to set it with
    pub prefix: u8,
    /// Its gateway
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Addr>,
    /// Its pool
    pub pool: String,
    /// The block that it is of
    pub block: Cidr,
}

/// Why something was not done; nothing has changed then.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// The kind, from which the CNI code follows
    pub why: Why,
    /// What is wrong, with what, and what to do
    pub text: String,
}

/// Kinds of [`Refusal`].
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Why {
    /// Every address is in use or cooling
    Exhausted,
    /// The node holds nothing yet, or nothing of the pools asked for
    NothingHeld,
    /// A pool that was asked for is unknown here, or not for the pod's namespace
    UnknownPool,
    /// An address that was asked for is not one of the node's
    NotHeld,
    /// An address that was asked for is another attachment's
    Taken,
    /// An address that was asked for is the gateway, or the network or broadcast address
    NotUsable,
    /// It is not known which pools and addresses the pod may have: try again
    PodUnknown,
    /// CHECK: the attachment has other addresses, or none
    Mismatch,
    /// The deadline has passed, the store is locked, the agent starts: try again
    Busy,
    /// The store cannot be read or written
    Store,
}
