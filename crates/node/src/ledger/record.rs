//! The values of the ledger's tables, and the functions that encode and decode their keys.

use serde::{Deserialize, Serialize};

use super::super::ops::{AddressAssignment, Attachment, PodRef};
use cadastre_core::node_allocation::PoolTerms;
use cadastre_core::usable::{Usable, union, usable_in};
use cadastre_core::{Addr, Cidr, Family, IpRange};

/// An attachment that has addresses. The values in the table of attachments have the same form, but without
/// `attachment`, which is the key.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct AttachmentRecord {
    /// Network, container and interface
    #[serde(skip)]
    pub attachment: Attachment,
    /// The addresses of the attachment, with routes and DNS settings. A repeated ADD returns them again
    pub given: AddressAssignment,
    /// Path of the attachment's network namespace; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub netns: String,
    /// The pod of the attachment, if the container runtime reported one
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    /// When the addresses were assigned, in milliseconds of Unix time
    pub since_ms: i64,
    /// ID of the boot in which the attachment was set up
    pub boot: String,
    /// Place in the order of assignments; a higher number is newer. Adopted attachments come before all others. The
    /// order among adopted attachments is unknown, except that superseded ones come first
    #[serde(default = "adopted")]
    pub order: u64,
}

/// The value of `order` for adopted attachments. All adopted attachments have the same value, because it is not known
/// which of them is older.
pub(crate) const ADOPTED: u64 = 1;

/// The value of `order` for an attachment that was adopted although a newer attachment had already replaced it
/// (superseded).
pub(crate) const ADOPTED_OLD: u64 = 0;

/// Returns the `order` of records that were written by versions of Cadastre without the field `order`.
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

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReleaseRecord {
    pub block: Cidr,
    /// Place in the order of all releases; a higher number is later
    pub sequence: u64,
    pub at: BootTime,
    /// UID of the pod that had the address; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// `namespace/name` of the pod that had the address; empty if unknown
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

impl ReleaseRecord {
    /// Returns whether `pod` had the address, or has the same name as the pod that had the address. A pod of a
    /// StatefulSet has the name of the pod that it replaces.
    pub(crate) fn was_of(&self, pod: &PodRef) -> bool {
        let same = |one: &str, other: &str| !one.is_empty() && one == other;
        same(&self.pod, &pod.uid) || same(&self.name, &full_name(pod))
    }
}

/// Returns the pod's name in the form `namespace/name`, or an empty text if the namespace or the name is unknown.
pub(crate) fn full_name(pod: &PodRef) -> String {
    let PodRef {
        namespace, name, ..
    } = pod;
    if namespace.is_empty() || name.is_empty() {
        return String::new();
    }
    format!("{namespace}/{name}")
}

/// A moment, given by the number of the boot and the milliseconds since the boot began.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BootTime {
    pub boot: u64,
    pub ms: u64,
}

impl BootTime {
    /// Returns how many milliseconds of cooldown are left at the time `now` for an address that was released at the
    /// time `self`; `None` if the cooldown is over. For a release in an earlier boot, the cooldown starts at the
    /// beginning of the running boot, because it is not known how long the host was off.
    pub(super) fn cooldown_left(self, now: Self, cooldown_ms: u64) -> Option<u64> {
        let from = if self.boot == now.boot { self.ms } else { 0 };
        let until = from.saturating_add(cooldown_ms);
        until.checked_sub(now.ms).filter(|left| *left > 0)
    }
}

/// The time at which a DEL was requested, given by the number of the boot and the microseconds since the boot began.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deletion {
    pub boot: u64,
    pub asked_us: u64,
}

/// What the store records about a block or podCIDR. The key of the record is the CIDR.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockRecord {
    pub uid: String,
    pub pool: String,
    pub state: BlockState,
    /// Whether the block is a part of another node's block
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub borrowed: bool,
    /// Addresses that are never assigned
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<IpRange>,
    /// Addresses that are assigned only to pods that ask for them
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub on_request: Vec<IpRange>,
}

impl BlockRecord {
    /// Returns which addresses of the block can be assigned according to the settings of its pool.
    pub(super) fn usable(&self, block: Cidr, pool: Option<&PoolTerms>) -> Usable {
        usable_in(block, self.borrowed, pool)
    }

    /// Returns the addresses of the block that are not assigned automatically, sorted and disjoint. `never` contains
    /// the addresses that are excluded by the settings of the block's pool or by withdrawals.
    pub(super) fn left_out(&self, block: Cidr, never: &[IpRange]) -> Vec<IpRange> {
        union(block, &[never, &self.reserved, &self.on_request].concat())
    }
}

/// Whether addresses are assigned from a block.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "lowercase")]
pub enum BlockState {
    /// The NodeSubnet lists the block, and addresses are assigned from the block
    #[serde(rename = "held")]
    Active,
    /// The NodeSubnet lists the block as draining, so no new address is assigned from the block
    Draining,
    /// The NodeSubnet no longer lists the block, but some of the block's addresses are in use or cooling. No new
    /// address is assigned from the block
    Unlisted,
    /// The node has released the block. The NodeSubnet still lists the block, or lists it again. No address is assigned
    /// from the block
    Released,
}

impl BlockState {
    /// Returns whether the NodeSubnet lists the block and the node has not released it.
    pub fn is_listed(self) -> bool {
        matches!(self, Self::Active | Self::Draining)
    }
}

/// Where the search for a never-assigned address of a block continues.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// The address at which the search continues; `None` if the search has reached the end of the block
    pub next: Option<Addr>,
    /// Whether the records of any addresses before `next` were deleted after the search had passed these addresses. If
    /// so, the search restarts at the lowest address once it has reached the end of the block
    pub again: bool,
}

impl Cursor {
    pub(crate) fn first_of(block: Cidr) -> Self {
        Self {
            next: Some(block.first()),
            again: false,
        }
    }
}

fn family_byte(family: Family) -> u8 {
    match family {
        Family::V4 => 4,
        Family::V6 => 6,
    }
}

pub(crate) fn address_key(addr: Addr) -> [u8; 17] {
    let mut key = [0; 17];
    key[0] = family_byte(addr.family);
    key[1..].copy_from_slice(&addr.value.to_be_bytes());
    key
}

pub(crate) fn address_of(key: &[u8]) -> Option<Addr> {
    let mut families = Family::ALL.into_iter();
    let family = families.find(|it| Some(&family_byte(*it)) == key.first())?;
    let value = u128::from_be_bytes(key.get(1..17)?.try_into().ok()?);
    Some(Addr { family, value })
}

pub(crate) fn cidr_key(cidr: Cidr) -> [u8; 18] {
    let mut key = [0; 18];
    key[..17].copy_from_slice(&address_key(cidr.first()));
    key[17] = cidr.len();
    key
}

/// Returns the key that a released block has in the table of released blocks.
pub(crate) fn released_key(cidr: Cidr, uid: &str) -> Vec<u8> {
    [&cidr_key(cidr), uid.as_bytes()].concat()
}

/// Returns the CIDR and the UID of the released block with this key.
pub(crate) fn released_of(key: &[u8]) -> Option<(Cidr, String)> {
    let (cidr, uid) = key.split_at_checked(18)?;
    Some((cidr_of(cidr)?, String::from_utf8(uid.to_vec()).ok()?))
}

pub(crate) fn cidr_of(key: &[u8]) -> Option<Cidr> {
    Cidr::new(address_of(key)?, *key.get(17)?)
}

/// Returns the prefix of all keys of a pool, or of one family of the pool. The keys with this prefix are sorted by
/// CIDR.
pub(crate) fn pool_prefix(pool: &str, family: Option<Family>) -> Vec<u8> {
    let mut key = text(pool);
    key.extend(family.map(family_byte));
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

/// Encodes a text as part of a key, for example the network of an attachment. The length comes first. So the key of one
/// text is never a prefix of the key of another text.
pub(crate) fn text(text: &str) -> Vec<u8> {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    [&len.to_be_bytes(), text.as_bytes()].concat()
}

fn split(key: &[u8]) -> Option<(String, &[u8])> {
    let (len, rest) = key.split_at_checked(4)?;
    let len = u32::from_be_bytes(len.try_into().ok()?);
    let (text, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}
