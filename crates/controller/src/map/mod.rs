//! The address space as a picture needs it: who holds what, how full it is, what rests.
//!
//! Read from the world when somebody asks, so a standby knows it, too, and nothing is kept beside the
//! truth. It shows what the API says, not what a leader is about to do.
//!
//! # Guarantees
//! - An answer is bounded by [`MOST_ROWS`], [`MOST_POOLS`], [`MOST_ADDRESSES`] and [`MOST_HITS`], and
//!   says so where something was cut off.
//! - A question costs one pass over blocks, nodes and NodeSubnets, and one over pods where their names
//!   are asked for.

mod find;
mod range;
mod sheet;

use jiff::Timestamp;
use serde::Serialize;

use crate::cluster::seen::Pool;
use crate::cluster::world::World;
use cadastre_api::{Allocate, FamilyStatus};
use cadastre_core::{Addr, Cidr, Family};

/// Pools of an overview.
pub const MOST_POOLS: usize = 1_000;
/// Rows of a pool.
pub(crate) const MOST_ROWS: usize = 65_536;
/// Addresses of a range.
pub const MOST_ADDRESSES: usize = 4_096;
/// What a search finds.
pub(crate) const MOST_HITS: usize = 20;

/// A question.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Which pools there are
    Pools,
    /// Who holds what of a pool
    Pool(String),
    /// Who has which address of a range that somebody holds
    Range(Cidr),
    /// Where an address, a pod, a node or a pool is
    Find(String),
}

/// An answer.
#[derive(Clone, Debug)]
pub enum Answer {
    /// To [`Ask::Pools`]
    Pools(Overview),
    /// To [`Ask::Pool`]
    Pool(Sheet),
    /// To [`Ask::Range`]
    Range(Detail),
    /// To [`Ask::Find`]
    Find(Found),
    /// There is nothing of that name, or not yet: the text says what to do
    Nothing(String),
}

/// All pools.
#[derive(Clone, Debug, Serialize)]
pub struct Overview {
    /// By name
    pub pools: Vec<Head>,
    /// Whether some are left out
    pub cut: bool,
}

/// A pool in short.
#[derive(Clone, Debug, Serialize)]
pub struct Head {
    /// Its name
    pub name: String,
    /// `Blocks` or `NodeCIDR`
    pub allocate: Allocate,
    /// Each family that it has
    pub sides: Vec<Side>,
    /// Nodes that hold ranges
    pub nodes: Option<i64>,
    /// Nodes that wait
    pub waiting: Option<i64>,
    /// What is wrong with it, by its conditions
    pub complaints: Vec<String>,
}

/// One family of a pool.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Side {
    /// `IPv4` or `IPv6`
    pub family: String,
    /// Its ranges, sorted
    pub cidrs: Vec<Cidr>,
    /// Prefix length of new blocks
    pub block_size: u32,
    /// As in the pool's status
    pub status: Option<FamilyStatus>,
}

/// A pool with all that lies in it.
#[derive(Clone, Debug)]
pub struct Sheet {
    /// The pool
    pub head: Head,
    /// Names of nodes, for the rows
    pub owners: Vec<String>,
    /// What is never given out, as text of spans
    pub reserved: Vec<String>,
    /// Whether rows are left out
    pub cut: bool,
    /// By address
    pub rows: Vec<Row>,
}

/// What a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A block that its node uses
    Block,
    /// A block that its node's list does not have (yet)
    Unlisted,
    /// A block that is asked back if it is empty
    Recall,
    /// A block that gives nothing new
    Drain,
    /// A block of a node that is gone
    Quarantine,
    /// A node's podCIDR
    PodCidr,
    /// The podCIDR of a node that is gone
    Rest,
}

/// One range that somebody holds. As JSON a list, because there are many: CIDR, index of the owner, kind,
/// used, cooling, free (null where nobody counts).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row(
    pub Cidr,
    pub usize,
    pub Kind,
    pub u64,
    pub u64,
    pub Option<u64>,
);

/// One range and its addresses.
#[derive(Clone, Debug, Serialize)]
pub struct Detail {
    /// The range
    pub cidr: Cidr,
    /// What it is
    pub kind: Kind,
    /// The pool it counts to
    pub pool: Option<String>,
    /// The node
    pub node: String,
    /// The node's UID
    pub uid: String,
    /// Since when
    pub since: Option<Timestamp>,
    /// When its quarantine is over at the earliest
    pub until: Option<Timestamp>,
    /// What of it is never given out
    pub reserved: Vec<String>,
    /// Those in use, by address
    pub addresses: Vec<Used>,
    /// Whether some are left out
    pub cut: bool,
}

/// An address in use.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Used {
    /// The address
    pub address: Addr,
    /// `namespace/name`, where it is known
    pub pod: Option<String>,
    /// The pod's UID, where it is known
    pub uid: Option<String>,
    /// Who says so: the node's agent, the pod's status, or both
    pub told: Told,
}

/// Who says that an address is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Told {
    /// The node's agent alone: its pod is gone or has finished
    Agent,
    /// A pod
    Pod,
    /// A pod, and the agent, which does not see the pod that it gave it to
    Both,
}

/// What a search has found.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// Best first
    pub hits: Vec<Hit>,
    /// Whether there may be more
    pub cut: bool,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hit {
    /// `address`, `node`, `pod` or `pool`
    pub what: &'static str,
    /// Its name, or the address
    pub name: String,
    /// The pool to look in
    pub pool: Option<String>,
    /// The range that holds it
    pub cidr: Option<Cidr>,
    /// The address
    pub address: Option<Addr>,
}

/// Answers from what is known now.
pub fn answer(world: &World, ask: &Ask) -> Answer {
    let missing = world.missing();
    if !missing.is_empty() {
        let text = format!("waiting for the first lists of {}", missing.join(", "));
        return Answer::Nothing(text);
    }
    match ask {
        Ask::Pools => Answer::Pools(overview(world)),
        Ask::Pool(name) => match world.pools.get(name) {
            Some(pool) => Answer::Pool(sheet::sheet(pool, world)),
            None => Answer::Nothing(format!(
                "there is no pool \"{name}\": kubectl get ippools.cadastre.dev lists them"
            )),
        },
        Ask::Range(cidr) => match range::detail(cidr, world) {
            Some(detail) => Answer::Range(detail),
            None => Answer::Nothing(format!("nobody holds {cidr}")),
        },
        Ask::Find(text) => Answer::Find(find::find(text, world)),
    }
}

fn overview(world: &World) -> Overview {
    let mut pools: Vec<&Pool> = world.pools.iter().map(AsRef::as_ref).collect();
    pools.sort_by(|a, b| a.name.cmp(&b.name));
    let cut = pools.len() > MOST_POOLS;
    Overview {
        pools: pools.into_iter().take(MOST_POOLS).map(head).collect(),
        cut,
    }
}

/// A pool in short. One whose spec cannot be read has no sides.
fn head(pool: &Pool) -> Head {
    let status = pool.status.as_ref();
    let mut sides = Vec::new();
    if let Ok(spec) = &pool.spec {
        let v4 = spec.ipv4.as_ref().map(|it| &it.cidrs);
        let v6 = spec.ipv6.as_ref().map(|it| &it.cidrs);
        let of = |family, cidrs: Option<&Vec<String>>, size, status: Option<&FamilyStatus>| {
            let (cidrs, block_size) = (cidrs?, size?);
            let read = |text: &String| Cidr::parse_lenient(text).ok();
            let mut cidrs: Vec<Cidr> = cidrs.iter().filter_map(read).collect();
            cidrs.sort_unstable();
            Some(Side {
                family: Family::to_string(&family),
                cidrs,
                block_size,
                status: status.cloned(),
            })
        };
        let (told4, told6) = (
            status.and_then(|it| it.ipv4.as_ref()),
            status.and_then(|it| it.ipv6.as_ref()),
        );
        sides.extend(of(Family::V4, v4, spec.ipv4_block_size(), told4));
        sides.extend(of(Family::V6, v6, spec.ipv6_block_size(), told6));
    }
    let conditions = status.into_iter().flat_map(|it| &it.conditions);
    let bad = conditions.filter(|it| (it.status == "True") != (it.type_ == "Ready"));
    Head {
        name: pool.name.to_string(),
        allocate: pool
            .spec
            .as_ref()
            .map_or_else(|_| Allocate::default(), |it| it.allocate),
        sides,
        nodes: status.and_then(|it| it.nodes),
        waiting: status.and_then(|it| it.waiting),
        complaints: bad
            .map(|it| format!("{}: {}", it.type_, it.message))
            .collect(),
    }
}

#[cfg(test)]
mod tests;
