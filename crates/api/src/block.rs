//! IPAMBlock: a block, that is, a part of a pool that is allocated to one node. The node assigns the addresses of the
//! block.
//!
//! The object's name is derived from the block's CIDR, so the API server rejects a second object for the same CIDR.
//! Only the controller writes IPAMBlocks. A node uses a block only once the node's NodeSubnet lists it. Nodes do not
//! read IPAMBlocks, because the objects are for other controllers, the next leader and administrators.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;
use cadastre_core::Cidr;

/// The maximum number of nodes in `standby`.
pub const MOST_STANDBY: usize = 8;

/// A block of a pool, and the node to which it is allocated.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "cadastre.dev",
    version = "v1alpha1",
    kind = "IPAMBlock",
    plural = "ipamblocks",
    singular = "ipamblock",
    shortname = "block",
    category = "cadastre",
    derive = "PartialEq",
    doc = "A block of a pool, and the node that it is allocated to. Written by the controller; read-only for everybody else.",
    validation = rules::block_name()
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = rules::vmi_stays())]
pub struct IPAMBlockSpec {
    /// CIDR of the block, in canonical form. Immutable. The name of the object is derived from the CIDR.
    #[schemars(schema_with = "rules::block_cidr")]
    pub cidr: String,

    /// Name of the pool from which the block was allocated.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// The node to which the block is allocated. In quarantine, the deleted node to which the block was allocated.
    pub owner: BlockOwner,

    /// The block of a different node that this block is a part of. Present only if the owner has borrowed this block.
    /// Immutable. The parent may no longer exist. If both blocks are routed, traffic for this block goes to its owner,
    /// because the longer prefix wins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentBlock>,

    /// UID of the VirtualMachineInstance for which an IPClaim's address was allocated. Only pods that this
    /// VirtualMachineInstance controls get the address. Immutable. Absent: the block is not for a virtual machine.
    #[schemars(length(max = 128))]
    #[serde(default, rename = "vmiUID", skip_serializing_if = "Option::is_none")]
    pub vmi_uid: Option<String>,

    /// Nodes that may have the address in addition to the owner, because a virtual machine migrates or has migrated.
    /// Route the address to the owner only. A node leaves this list when its agent has released the address.
    #[schemars(length(max = MOST_STANDBY))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub standby: Vec<BlockOwner>,

    /// The highest number that a node in spec.standby of this block has ever had (see number of spec.standby).
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub last_number: u32,

    /// When the block was allocated to this owner. In quarantine, when the quarantine began.
    pub since: Time,

    /// Earliest end of the quarantine. The quarantine continues after this time while a pod uses an address of the
    /// block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
}

/// The node to which a block is allocated. In quarantine, the deleted node to which the block was allocated.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BlockOwner {
    /// Node: the block is allocated to the node. Quarantine: the node was deleted, and the block cannot be allocated
    /// again yet.
    pub kind: OwnerKind,

    /// Name of the node.
    #[schemars(length(max = 253))]
    pub name: String,

    /// UID of the node.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// In quarantine, spec.providerID of the deleted node. If a node with the same name and the same providerID
    /// registers, that node gets the block back.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// In quarantine, status.nodeInfo.machineID of the deleted node. If the node had no providerID, the machineID is
    /// compared instead.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,

    /// A number that the node got when it was added to spec.standby, higher than all earlier numbers of the block.
    /// Absent for the node to which the block was allocated. The node's NodeSubnet lists the block with this number, so
    /// a node that has released the block can get the block again with a new number.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub number: u32,
}

/// A block of which its node has lent a part to another node.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ParentBlock {
    /// CIDR of the block, in canonical form.
    #[schemars(length(max = 43))]
    pub cidr: String,

    /// Name of the node that has lent the part.
    #[schemars(length(max = 253))]
    pub node: String,
}

/// Whether the node that owns a block still exists.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKind {
    /// The node exists
    Node,
    /// The node was deleted, and the block waits before reuse
    Quarantine,
}

/// Returns the UID under which a NodeSubnet lists a block. For the node to which the block was allocated, this is the
/// UID of the IPAMBlock. For a node that was added to `spec.standby`, a plus sign and the node's number follow the UID.
/// If a node gets the block again after it has released the block, the node has a new number, so the UID differs, too.
pub fn listed_uid(uid: &str, number: u32) -> String {
    match number {
        0 => uid.to_owned(),
        _ => format!("{uid}+{number}"),
    }
}

/// Splits a UID from [`listed_uid`] into the UID of the IPAMBlock and the node's number, which is 0 if there is none.
pub fn object_uid(listed: &str) -> (&str, u32) {
    let numbered = listed.split_once('+');
    let parsed = numbered.and_then(|(uid, number)| Some((uid, number.parse().ok()?)));
    parsed.unwrap_or((listed, 0))
}

/// Returns the object name for a block with this CIDR, for example `10-244-1-64-26` or `fd00-10-244--40-122`.
pub fn block_name(cidr: &Cidr) -> String {
    cidr.to_string().replace(['.', ':', '/'], "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_derived_from_the_cidr() {
        for (cidr, name) in [
            ("10.244.1.64/26", "10-244-1-64-26"),
            ("fd00:10:244::40/122", "fd00-10-244--40-122"),
            ("fd00::/64", "fd00---64"),
        ] {
            assert_eq!(block_name(&Cidr::parse_strict(cidr).unwrap()), name);
        }
    }
}
