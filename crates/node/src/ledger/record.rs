//! Values and keys of the tables.

use serde::{Deserialize, Serialize};

use super::super::ops::{AddressAssignment, Attachment, PodRef};
use cadastre_core::usable::union;
use cadastre_core::{Addr, Cidr, Family, IpRange};

/// The assignment of an attachment.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredAttachment {
    /// The result of the ADD, returned again when the ADD is repeated
    pub given: AddressAssignment,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub netns: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    pub since_ms: i64,
    pub boot: String,
    /// Place in the order of all attachments; see [`Tenant`](super::Tenant)
    #[serde(default = "adopted")]
    pub order: u64,
}

/// The order of adopted attachments: which of them is older is not known.
pub(crate) const ADOPTED: u64 = 1;

/// The order of an attachment that was superseded when it was adopted.
pub(crate) const ADOPTED_OLD: u64 = 0;

/// The default for stores written before there was an order.
fn adopted() -> u64 {
    ADOPTED
}

/// The record of an address that is or was in use.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AddressRecord {
    Used { by: Attachment, block: Cidr },
    Freed(ReleaseRecord),
}

/// The release of an address.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReleaseRecord {
    pub block: Cidr,
    /// Place in the order of all releases
    pub sequence: u64,
    pub at: BootTime,
    /// UID of the pod that had the address; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// `namespace/name` of that pod; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

impl ReleaseRecord {
    /// Whether the pod had the address itself, or replaces a pod of the same name, as in a StatefulSet.
    pub(crate) fn was_of(&self, pod: &PodRef) -> bool {
        let same = |one: &str, other: &str| !one.is_empty() && one == other;
        same(&self.pod, &pod.uid) || same(&self.name, &full_name(pod))
    }
}

/// `namespace/name`; empty if either is unknown.
pub(crate) fn full_name(pod: &PodRef) -> String {
    let PodRef {
        namespace, name, ..
    } = pod;
    if namespace.is_empty() || name.is_empty() {
        return String::new();
    }
    format!("{namespace}/{name}")
}

/// A moment: number of the boot, and milliseconds since then.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BootTime {
    pub boot: u64,
    pub ms: u64,
}

impl BootTime {
    /// The milliseconds of cooldown left at `now` for something released at this moment; `None` if it has
    /// cooled. A release in an earlier boot counts as if it had happened at the beginning of this one, because
    /// nobody knows how long the machine was off.
    pub(super) fn cooldown_left(self, now: Self, cooldown_ms: u64) -> Option<u64> {
        let from = if self.boot == now.boot { self.ms } else { 0 };
        let until = from.saturating_add(cooldown_ms);
        until.checked_sub(now.ms).filter(|left| *left > 0)
    }
}

/// When a DEL was asked for: number of the boot, and microseconds since then.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deletion {
    pub boot: u64,
    pub asked_us: u64,
}

/// A range to assign addresses from.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockRecord {
    pub uid: String,
    pub pool: String,
    pub state: BlockState,
    /// Addresses that are never assigned
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<IpRange>,
    /// Addresses that are assigned only to pods that ask for them
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<IpRange>,
}

impl BlockRecord {
    /// The addresses of the block that are not assigned automatically, sorted and disjoint. `never` are those
    /// that the terms of its pool exclude.
    pub(super) fn left_out(&self, block: Cidr, never: &[IpRange]) -> Vec<IpRange> {
        union(block, &[never, &self.reserved, &self.on_request].concat())
    }
}

/// Whether addresses are assigned from a block.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "lowercase")]
pub enum BlockState {
    /// Listed; addresses are assigned from it
    Held,
    /// Listed and draining: nothing new is assigned
    Draining,
    /// Not listed any more, but some addresses are in use or cooling: nothing new is assigned
    Withdrawn,
    /// Released, but still listed or listed again: nothing is assigned
    Released,
}

impl BlockState {
    /// Whether the node's list has the block and the node has not released it.
    pub fn is_listed(self) -> bool {
        matches!(self, Self::Held | Self::Draining)
    }
}

/// Where the search for a never-assigned address continues.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// `None` if the end of the block is reached
    pub next: Option<Addr>,
    /// Addresses before it were forgotten since: start again once the end is reached
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

/// Identifies a block that was released.
pub(crate) fn released_key(cidr: Cidr, uid: &str) -> Vec<u8> {
    [&cidr_key(cidr), uid.as_bytes()].concat()
}

pub(crate) fn cidr_of(key: &[u8]) -> Option<Cidr> {
    Cidr::new(address_of(key)?, *key.get(17)?)
}

/// The prefix of all keys of a pool, or of one family of it; these keys are in the order of the CIDRs.
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

/// The length comes first, so that no text can be a prefix of another one's key.
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
