//! What the watches say, in the few fields the controller decides by.
//!
//! Full Kubernetes objects are dropped at the edge: a node is a few hundred bytes here and a pod a
//! few dozen. Everything is plain data, so the loops that read it run the same under the real
//! shell and under simulation.

use std::sync::Arc;

use jiff::Timestamp;

use cadastre_api::{IPPoolSpec, IPPoolStatus, NodeSubnetSpec, Requests};
use cadastre_core::{Addr, Cidr};

/// A shared, immutable string: names, UIDs, terms.
pub type Text = Arc<str>;

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
object!(Node, Pool, Subnet, Block, ServiceRange, Pod);

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
    /// Whether parts of the spec could not be read and are left out of it
    pub lacks_parts: bool,
    /// What people ask of the node
    pub requests: Requests,
    /// What the node's agent says, as far as it can be read
    pub report: Option<Box<AgentReport>>,
}

/// What an agent says of its node: the status of a NodeSubnet, read with care.
///
/// Whatever of it makes no sense by itself is left out and named in `refused`; whether the rest fits
/// what the node holds is for the reader to judge.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentReport {
    /// The UID of the Node it runs on
    pub node_uid: Text,
    /// Pools and how many addresses of each family the node wants to hold of them in all
    pub demand: Box<[(Text, u64)]>,
    /// Blocks, sorted by CIDR
    pub blocks: Box<[BlockWord]>,
    /// Addresses in use whose pods the agent does not see, sorted, each once
    pub orphans: Box<[(Addr, PodUid)]>,
    /// What of it makes no sense, a few at most
    pub refused: Vec<String>,
    /// How many entries make no sense
    pub refusals: u64,
    /// What is said of the NodeSubnet: the controller's conditions, and those of whoever else
    pub conditions: Box<[SubnetCondition]>,
}

impl AgentReport {
    /// The condition of that type.
    pub fn condition(&self, kind: &str) -> Option<&SubnetCondition> {
        self.conditions.iter().find(|it| &*it.kind == kind)
    }
}

/// A condition of a NodeSubnet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubnetCondition {
    /// Its type
    pub kind: Text,
    /// Its status: `True`, `False` or `Unknown`
    pub status: Text,
    /// The reason, one word
    pub reason: Text,
    /// What there is to say
    pub message: String,
    /// Since when the status is that, as it is written; empty where it is new
    pub since: Text,
    /// The generation of the object that it speaks of, where it says so
    pub generation: Option<i64>,
}

impl SubnetCondition {
    /// Whether it says the same as `other`, since whenever.
    pub fn says(&self, other: &Self) -> bool {
        (&self.kind, &self.status) == (&other.kind, &other.status)
            && (&self.reason, &self.message) == (&other.reason, &other.message)
    }

    /// Whether it holds.
    pub fn is_true(&self) -> bool {
        &*self.status == "True"
    }
}

/// What an agent says of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockWord {
    /// The block
    pub cidr: Cidr,
    /// The UID of its IPAMBlock
    pub uid: Text,
    /// Addresses in use
    pub used: u64,
    /// Addresses that rest after use
    pub cooling: u64,
    /// Addresses that can be given now
    pub free: u64,
    /// Whether the agent has let go of it for good
    pub released: bool,
}

impl BlockWord {
    /// Addresses that are not free. What an agent counts may be anything: as many as can be counted at most.
    pub fn busy(&self) -> u64 {
        self.used.saturating_add(self.cooling)
    }

    /// Whether addresses of it are in use, or rest after use.
    pub fn is_in_use(&self) -> bool {
        !self.released && self.busy() > 0
    }
}

impl AgentReport {
    /// What it says of the block with that UID.
    pub fn of_block(&self, cidr: &Cidr, uid: &str) -> Option<&BlockWord> {
        let first = self.blocks.partition_point(|word| word.cidr < *cidr);
        let same = self.blocks[first..]
            .iter()
            .take_while(|word| word.cidr == *cidr);
        let mut same = same.filter(|word| &*word.uid == uid);
        same.next()
    }
}

/// A pod's UID in 16 bytes: there are very many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(pub u128);

impl PodUid {
    /// Reads a UUID; any other text gets a number of its own with near certainty.
    pub fn read(text: &str) -> Self {
        let mut digits = 0u128;
        let mut count = 0u32;
        for byte in text.bytes().filter(|byte| *byte != b'-') {
            let Some(digit) = (byte as char).to_digit(16) else {
                return PodUid(fnv(text));
            };
            digits = digits << 4 | u128::from(digit);
            count += 1;
        }
        if count == 32 {
            PodUid(digits)
        } else {
            PodUid(fnv(text))
        }
    }
}

impl std::fmt::Display for PodUid {
    /// As a UUID; [`PodUid::read`] reads the same from it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hex = format!("{:032x}", self.0);
        let parts = [
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..],
        ];
        f.write_str(&parts.join("-"))
    }
}

/// FNV-1a, 128 bits.
fn fnv(text: &str) -> u128 {
    text.bytes()
        .fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        })
}

/// An IPAMBlock.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// `metadata.name`: its CIDR with hyphens
    pub name: Text,
    /// `metadata.uid`
    pub uid: Text,
    /// `metadata.resourceVersion`
    pub version: u64,
    /// Whether the spec has been changed since it was created; else `version` is that of its creation
    pub touched: bool,
    /// The spec, or why it could not be read
    pub spec: Result<BlockSpec, String>,
}

/// The spec of an IPAMBlock, read.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    /// The range
    pub cidr: Cidr,
    /// The pool it was carved from
    pub pool: Text,
    /// Who has it
    pub owner: Owner,
    /// Since when
    pub since: Timestamp,
    /// When its quarantine is over at the earliest
    pub until: Option<Timestamp>,
}

/// Who has a block: a node by name and UID, alive or gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Whether the node is gone and the block rests
    pub resting: bool,
    /// The node's name
    pub name: Text,
    /// The node's UID
    pub uid: Text,
    /// In quarantine, the machine that had it
    pub machine: Machine,
}

impl Owner {
    /// A node that lives.
    pub fn node(name: &Text, uid: &Text) -> Self {
        Owner {
            resting: false,
            name: name.clone(),
            uid: uid.clone(),
            machine: Machine::default(),
        }
    }
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
    /// Whether its phase is Succeeded or Failed: it no longer uses its addresses
    pub finished: bool,
    /// `status.podIPs` of a pod that may still use them: none for hostNetwork pods (those addresses
    /// are the node's) and for finished ones
    pub addresses: Box<[Addr]>,
    /// The node of a mirror pod, which its kubelet alone makes, as many as it likes
    pub mirror_of: Option<Text>,
}
