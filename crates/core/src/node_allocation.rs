//! The ranges that a node may assign addresses from, and the terms, as last read from its NodeSubnet.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{Addr, Cidr, Family, IpRange};

/// All ranges and pool terms of one node. The node's store keeps them, so they survive a restart.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeAllocation {
    /// UID of the Node object that the ranges are allocated to
    #[serde(rename = "nodeUID")]
    pub node_uid: String,
    /// The ranges to assign from, disjoint: affinity blocks and podCIDRs
    pub blocks: Vec<Block>,
    /// The terms of the pools, best first. A pool may have no block here. A block whose pool is missing here
    /// has the default terms.
    pub pools: Vec<PoolTerms>,
}

/// A range to assign addresses from: an affinity block or a podCIDR.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Block {
    /// The addresses of the block
    pub cidr: Cidr,
    /// UID of the IPAMBlock; for a podCIDR, the UID of the Node. The same CIDR under another UID is the same
    /// block, whose object was recreated.
    pub uid: String,
    /// Name of the pool; empty for a podCIDR that lies in no pool
    pub pool: String,
    /// Assign no new address from this block
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// Addresses that are never assigned
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<IpRange>,
    /// Addresses that are assigned only to a pod that asks for them
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<IpRange>,
}

/// The terms on which addresses of a pool are assigned.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PoolTerms {
    /// Name of the pool
    pub name: String,
    /// Whether it serves every pod that does not ask for a pool by name, whatever the pod's labels
    pub automatic: bool,
    /// Whether it serves pods of some namespaces only, even if they ask for the pool or its addresses by name
    #[serde(default)]
    pub bound: bool,
    /// Whether it serves pods that the agent knows nothing about
    #[serde(default)]
    pub serves_unknown: bool,
    /// How long a released address cools before it is assigned again
    pub cooldown_seconds: u32,
    /// The low and the high mark of free addresses: below the first a block is asked for, above the second an
    /// empty block is released
    pub warm: (u32, u32),
    /// Its IPv4 ranges; `None` if it has none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<FamilyTerms>,
    /// Its IPv6 ranges; `None` if it has none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<FamilyTerms>,
    /// Routes for CNI results
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// DNS settings for CNI results
    #[serde(default, skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
    /// The prefix length that CNI results give an address
    #[serde(default)]
    pub prefix: Prefix,
}

/// One address family of a pool.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FamilyTerms {
    /// All ranges of the pool, also those that this node has no block of
    pub cidrs: Vec<Cidr>,
    /// The gateway for this family
    #[serde(default)]
    pub gateway: Gateway,
}

/// The gateway that CNI results name.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gateway {
    /// The first usable address of each block; it is not assigned to pods
    #[default]
    FirstOfBlock,
    /// No gateway; every address of a block may be assigned
    None,
    /// This address; it is not assigned to pods
    Address(Addr),
}

/// The prefix length that CNI results give an address.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefix {
    /// A single address: 32 or 128
    Host,
    /// The prefix length of the block
    #[default]
    Block,
    /// The prefix length of the pool's range that contains the block
    Pool,
}

/// A route of a CNI result.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination
    pub dst: Cidr,
    /// The next hop; if absent, the main plugin uses the gateway of the address
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
}

/// DNS settings of a CNI result.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    /// Addresses of name servers
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// The local domain
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Search domains
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Resolver options
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl Dns {
    /// Whether no setting is present
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl PoolTerms {
    /// The default terms of a pool about which only the name is known.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            automatic: true,
            bound: false,
            // An empty name is a podCIDR outside every pool: no pool says whether to wait.
            serves_unknown: name.is_empty(),
            cooldown_seconds: 30,
            warm: (3, 50),
            ipv4: None,
            ipv6: None,
            routes: Vec::new(),
            dns: Dns::default(),
            prefix: Prefix::default(),
        }
    }

    /// Selects the terms by family.
    pub fn family(&self, family: Family) -> Option<&FamilyTerms> {
        match family {
            Family::V4 => self.ipv4.as_ref(),
            Family::V6 => self.ipv6.as_ref(),
        }
    }
}
