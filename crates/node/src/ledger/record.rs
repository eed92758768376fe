//! What the tables hold, and by what keys.

use serde::{Deserialize, Serialize};

use super::super::ops::{Attachment, Given, PodRef};
use cadastre_core::usable::union;
use cadastre_core::{Addr, Cidr, Family, Span};

/// What an attachment has.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// As it was answered, so that it can be answered again
    pub given: Given,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub netns: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    pub since_ms: i64,
    pub boot: String,
    /// Its place in the order of all attachments; see [`Tenant`](super::Tenant)
    #[serde(default = "adopted")]
    pub order: u64,
}

/// The place in the order of an attachment that was adopted: how old it is among the adopted ones is
/// not known.
pub(crate) const ADOPTED: u64 = 1;

/// The place in the order of an attachment that was superseded when it was adopted.
pub(crate) const ADOPTED_OLD: u64 = 0;

/// What a store holds that was written before there was an order.
fn adopted() -> u64 {
    ADOPTED
}

/// What is known of an address that somebody has or had.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Address {
    Used { by: Attachment, block: Cidr },
    Freed(Freed),
}

/// A release.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    pub block: Cidr,
    /// Its place in the order of all releases
    pub sequence: u64,
    pub at: Stamp,
    /// UID of the pod that had it; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// Its namespace and name, as `namespace/name`; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

impl Freed {
    /// Whether a pod is the one that had it, or was made anew under its name, as those of a StatefulSet are.
    pub(crate) fn was_of(&self, pod: &PodRef) -> bool {
        let same = |one: &str, other: &str| !one.is_empty() && one == other;
        same(&self.pod, &pod.uid) || same(&self.name, &full_name(pod))
    }
}

/// `namespace/name`; empty if one of them is unknown.
pub(crate) fn full_name(pod: &PodRef) -> String {
    let PodRef {
        namespace, name, ..
    } = pod;
    if namespace.is_empty() || name.is_empty() {
        return String::new();
    }
    format!("{namespace}/{name}")
}

/// A moment: the number of the boot, and milliseconds since it.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub boot: u64,
    pub ms: u64,
}

impl Stamp {
    /// How many milliseconds something that was released then rests from now on; `None` if it has
    /// rested. What was released in an earlier boot rests no longer than as if it had been released
    /// when this one began: how long the machine was off nobody knows.
    pub(super) fn rests(self, now: Self, cooldown_ms: u64) -> Option<u64> {
        let from = if self.boot == now.boot { self.ms } else { 0 };
        let until = from.saturating_add(cooldown_ms);
        until.checked_sub(now.ms).filter(|left| *left > 0)
    }
}

/// When a DEL was asked for: the number of the boot, and microseconds since it.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deletion {
    pub boot: u64,
    pub asked_us: u64,
}

/// A range to give from.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockRecord {
    pub uid: String,
    pub pool: String,
    pub state: BlockState,
    /// Never given
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<Span>,
    /// Given only to who asks for that address
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<Span>,
}

impl BlockRecord {
    /// What of the block is not given automatically, in order, disjoint; `never`: what its pool's terms leave out.
    pub(super) fn left_out(&self, block: Cidr, never: &[Span]) -> Vec<Span> {
        union(block, &[never, &self.reserved, &self.on_request].concat())
    }
}

/// Whether a block is given from.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "lowercase")]
pub enum BlockState {
    /// Addresses are given from it
    Held,
    /// Listed, to be emptied: nothing new is given
    Draining,
    /// Not listed any more, and some of it is in use or cooling: nothing new is given
    Withdrawn,
    /// Given back, and still listed or listed again: nothing is given from it
    Released,
}

impl BlockState {
    /// Whether the node's list has it.
    pub fn is_listed(self) -> bool {
        matches!(self, Self::Held | Self::Draining)
    }
}

/// Where the search for an address that nobody had goes on.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// `None`: the end is reached
    pub next: Option<Addr>,
    /// Something before it was forgotten since: once the end is reached, begin again
    pub again: bool,
}

pub(crate) fn address_key(addr: Addr) -> [u8; 17] {
    let mut key = [0; 17];
    key[0] = match addr.family {
        Family::V4 => 4,
        Family::V6 => 6,
    };
    key[1..].copy_from_slice(&addr.value.to_be_bytes());
    key
}

pub(crate) fn address_of(key: &[u8]) -> Option<Addr> {
    let family = match key.first()? {
        4 => Family::V4,
        6 => Family::V6,
        _ => return None,
    };
    let value = u128::from_be_bytes(key.get(1..17)?.try_into().ok()?);
    Some(Addr { family, value })
}

pub(crate) fn cidr_key(cidr: Cidr) -> [u8; 18] {
    let mut key = [0; 18];
    key[..17].copy_from_slice(&address_key(cidr.first()));
    key[17] = cidr.len();
    key
}

/// A block of that CIDR and UID.
pub(crate) fn given_back_key(cidr: Cidr, uid: &str) -> Vec<u8> {
    [&cidr_key(cidr), uid.as_bytes()].concat()
}

pub(crate) fn cidr_of(key: &[u8]) -> Option<Cidr> {
    Cidr::new(address_of(key)?, *key.get(17)?)
}

/// All keys that begin with it are of that pool and family, in the order of their CIDRs.
pub(crate) fn pool_prefix(pool: &str, family: Option<Family>) -> Vec<u8> {
    let mut key = text(pool);
    key.extend(family.map(|family| match family {
        Family::V4 => 4,
        Family::V6 => 6,
    }));
    key
}

pub(crate) fn pool_key(pool: &str, block: Cidr) -> Vec<u8> {
    let mut key = text(pool);
    key.extend(cidr_key(block));
    key
}

pub(crate) fn freed_key(block: Cidr, sequence: u64) -> [u8; 26] {
    let mut key = [0; 26];
    key[..18].copy_from_slice(&cidr_key(block));
    key[18..].copy_from_slice(&sequence.to_be_bytes());
    key
}

pub(crate) fn network_prefix(network: &str) -> Vec<u8> {
    text(network)
}

pub(crate) fn attachment_key(attachment: &Attachment) -> Vec<u8> {
    let mut key = text(&attachment.network);
    key.extend(text(&attachment.container_id));
    key.extend(attachment.ifname.as_bytes());
    key
}

pub(crate) fn attachment_of(key: &[u8]) -> Option<Attachment> {
    let (network, rest) = split(key)?;
    let (container_id, ifname) = split(rest)?;
    Some(Attachment {
        network,
        container_id,
        ifname: String::from_utf8(ifname.to_vec()).ok()?,
    })
}

/// The length goes first, so that no text is a prefix of another's key, whatever it contains.
fn text(text: &str) -> Vec<u8> {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    [&len.to_be_bytes(), text.as_bytes()].concat()
}

fn split(key: &[u8]) -> Option<(String, &[u8])> {
    let (len, rest) = key.split_at_checked(4)?;
    let len = u32::from_be_bytes(len.try_into().ok()?);
    let (text, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}
