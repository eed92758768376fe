//! What a node may give addresses from, as its NodeSubnet said last.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{Addr, Cidr, Family, Span};

/// What the node holds, and on what terms.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Holding {
    /// UID of the Node object that it is held for
    #[serde(rename = "nodeUID")]
    pub node_uid: String,
    /// The ranges to give from, disjoint: affinity blocks and podCIDRs
    pub blocks: Vec<Block>,
    /// The terms of the pools, best first. Not every pool has a block here, and a block's pool may
    /// be missing: its terms are the defaults then.
    pub pools: Vec<PoolTerms>,
}

/// A range to give addresses from.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Block {
    /// The range
    pub cidr: Cidr,
    /// UID of its IPAMBlock; of a podCIDR the UID of the Node. The same CIDR under another UID is the
    /// same block, whose object was made anew.
    pub uid: String,
    /// Its pool; empty for a podCIDR that lies in none
    pub pool: String,
    /// Give nothing new from it
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// What of it is never given
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<Span>,
    /// What of it is given only to who asks for that address
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<Span>,
}

/// On what terms addresses of a pool are given.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PoolTerms {
    /// The pool
    pub name: String,
    /// Whether it serves pods that do not ask for it by name, whatever their labels
    pub automatic: bool,
    /// Whether it is for pods of some namespaces only, also for those that ask for it or for its addresses
    #[serde(default)]
    pub bound: bool,
    /// Whether it serves pods of which nothing is known
    #[serde(default)]
    pub serves_unknown: bool,
    /// Seconds that a released address rests
    pub cooldown_seconds: u32,
    /// Free addresses below which a block is asked for, and above which an empty one is let go
    pub warm: (u32, u32),
    /// Its IPv4 side; `None` if it has none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<FamilyTerms>,
    /// Its IPv6 side
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<FamilyTerms>,
    /// Routes of the result
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// DNS of the result
    #[serde(default, skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
    /// The prefix length that addresses are given with
    #[serde(default)]
    pub prefix: Prefix,
}

/// One family of a pool.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FamilyTerms {
    /// The ranges of the pool
    pub cidrs: Vec<Cidr>,
    /// Its gateway
    #[serde(default)]
    pub gateway: Gateway,
}

/// The gateway that results name.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gateway {
    /// The first usable address of each block, which is then given to nobody
    #[default]
    FirstOfBlock,
    /// None; every address of a block may be given
    None,
    /// This one, which is then given to nobody
    Address(Addr),
}

/// The prefix length that addresses are given with.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefix {
    /// That of one address: 32 or 128
    Host,
    /// That of the block
    #[default]
    Block,
    /// That of the pool's range in which the block lies
    Pool,
}

/// A route of a CNI result.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to
    pub dst: Cidr,
    /// By way of; the main plugin takes the address's gateway where it is missing
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
}

/// DNS of a CNI result.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    /// Name servers
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
    /// Whether it says nothing
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl PoolTerms {
    /// The terms of a pool of which nothing else is known.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            automatic: true,
            bound: false,
            // Of a podCIDR that is in no pool there is no owner to ask.
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

    /// One of its families.
    pub fn family(&self, family: Family) -> Option<&FamilyTerms> {
        match family {
            Family::V4 => self.ipv4.as_ref(),
            Family::V6 => self.ipv6.as_ref(),
        }
    }
}
