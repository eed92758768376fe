//! What the watches say, in the few fields the controller decides by.
//!
//! Full Kubernetes objects are dropped at the edge: a node is a few hundred bytes here and a pod a
//! few dozen. Everything is plain data, so the loops that read it run the same under the real
//! shell and under simulation.

use std::sync::Arc;
use std::time::Duration;

use crate::api::{IPPoolSpec, IPPoolStatus, NodeSubnetSpec};
use crate::ipam::{Addr, Cidr};

/// A shared, immutable string: names, UIDs, terms.
pub type Text = Arc<str>;

/// One step of a watch of one kind.
///
/// Between [`Change::Restarted`] and [`Change::Listed`] every object that exists is sent as
/// [`Change::Applied`]; what was known before and is not among them is gone. A relist says nothing
/// else about deletions.
#[derive(Clone, Debug)]
pub enum Change<T> {
    /// A list begins, asked for not before `asked` (monotonic); what is known stays valid until
    /// [`Change::Listed`].
    Restarted {
        /// By the clock of this process
        asked: Duration,
    },
    /// An object as it is now, from the list or as news.
    Applied(T),
    /// The list is complete.
    Listed,
    /// The object is gone, with the version of its removal where the watch tells it.
    Deleted(T),
}

/// An object that a [`super::table::Table`] can hold.
pub trait Object {
    /// The name: the key of the table.
    fn name(&self) -> &Text;
    /// The identity: two objects of one name and different UIDs are strangers.
    fn uid(&self) -> &Text;
    /// `metadata.resourceVersion` as a number; comparable within one kind only.
    fn version(&self) -> u64;
}

macro_rules! object {
    ($($kind:ty),*) => {$(
        impl Object for $kind {
            fn name(&self) -> &Text { &self.name }
            fn uid(&self) -> &Text { &self.uid }
            fn version(&self) -> u64 { self.version }
        }
    )*};
}
object!(Node, Pool, Subnet, ServiceRange, Pod);

/// A Node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// `metadata.name`
    pub name: Text,
    /// `metadata.uid`
    pub uid: Text,
    /// `metadata.resourceVersion`
    pub version: u64,
    /// `metadata.labels`, sorted by key
    pub labels: Box<[(Text, Text)]>,
    /// The annotation `cadastre.dev/term`, the fence between leaders
    pub term: Option<Text>,
    /// Whether the node has any annotation at all (a JSON Patch can only test below a parent that exists)
    pub annotated: bool,
    /// Whether `metadata.deletionTimestamp` is set
    pub deleting: bool,
    /// `spec.podCIDRs` (or `spec.podCIDR` alone), as far as it can be read
    pub pod_cidrs: Box<[Cidr]>,
    /// Entries of `spec.podCIDRs` that are no CIDR
    pub unreadable: Box<[Text]>,
    /// `status.addresses` of the node itself (InternalIP and ExternalIP)
    pub addresses: Box<[Addr]>,
    /// What makes this machine this machine, across Node objects
    pub machine: Machine,
}

impl Node {
    /// Whether nobody has given the node a podCIDR yet, readable or not.
    pub fn is_empty(&self) -> bool {
        self.pod_cidrs.is_empty() && self.unreadable.is_empty()
    }
}

/// What identifies the machine behind a Node object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// `spec.providerID`
    pub provider_id: Option<Text>,
    /// `status.nodeInfo.machineID`
    pub machine_id: Option<Text>,
}

impl Machine {
    /// Whether both are known to be the same machine: by provider id where both have one, else by
    /// machine id. Unknown is not the same.
    pub fn same(&self, other: &Machine) -> bool {
        match (&self.provider_id, &other.provider_id) {
            (Some(a), Some(b)) => a == b,
            _ => matches!((&self.machine_id, &other.machine_id), (Some(a), Some(b)) if a == b),
        }
    }
}

/// An IPPool.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// `metadata.name`
    pub name: Text,
    /// `metadata.uid`
    pub uid: Text,
    /// `metadata.resourceVersion`
    pub version: u64,
    /// `metadata.generation`
    pub generation: i64,
    /// `metadata.creationTimestamp`, seconds since 1970
    pub created: i64,
    /// Whether `metadata.deletionTimestamp` is set
    pub deleting: bool,
    /// `metadata.finalizers`
    pub finalizers: Vec<String>,
    /// The spec, or why it could not be read
    pub spec: Result<IPPoolSpec, String>,
    /// The status as last written
    pub status: Option<IPPoolStatus>,
}

/// A NodeSubnet.
#[derive(Clone, Debug, PartialEq)]
pub struct Subnet {
    /// `metadata.name`: the node's name
    pub name: Text,
    /// `metadata.uid`
    pub uid: Text,
    /// `metadata.resourceVersion`
    pub version: u64,
    /// The spec, or why it could not be read
    pub spec: Result<NodeSubnetSpec, String>,
}

/// A ServiceCIDR.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceRange {
    /// `metadata.name`
    pub name: Text,
    /// `metadata.uid`
    pub uid: Text,
    /// `metadata.resourceVersion`
    pub version: u64,
    /// `spec.cidrs`
    pub cidrs: Vec<Cidr>,
}

/// A Pod, as far as addresses go.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// `namespace/name`
    pub name: Text,
    /// `metadata.uid`
    pub uid: Text,
    /// `metadata.resourceVersion`
    pub version: u64,
    /// `status.podIPs` of a pod that may still use them: none for hostNetwork pods (those addresses
    /// are the node's) and for pods whose phase is Succeeded or Failed
    pub addresses: Box<[Addr]>,
}
