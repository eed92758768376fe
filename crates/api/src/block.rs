//! IPAMBlock: an affinity block, a piece of a pool that one node gives addresses from.
//!
//! Its name is its CIDR, so creating it is the lock for that CIDR. Written by the controller alone.
//! A node uses a block only once its NodeSubnet lists it; the object is what other controllers, the
//! next leader and people see of it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;
use cadastre_core::Cidr;

/// A block and who has it.
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
    doc = "A block of a pool and the node that has it. Written by the controller; read-only for everybody else.",
    validation = rules::block_name()
)]
#[serde(rename_all = "camelCase")]
pub struct IPAMBlockSpec {
    /// The block, in canonical form. Immutable; the object's name is made of it.
    #[schemars(schema_with = "rules::block_cidr")]
    pub cidr: String,

    /// The pool that it was carved from.
    #[schemars(length(max = 63))]
    pub pool: String,

    /// Who has it.
    pub owner: BlockOwner,

    /// Since when that owner has it.
    pub since: Time,

    /// When its quarantine is over at the earliest; not before no pod uses an address of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
}

/// Who has a block.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BlockOwner {
    /// Node, or Quarantine once that node is gone.
    #[schemars(schema_with = "rules::owner_kind")]
    pub kind: OwnerKind,

    /// The node's name.
    #[schemars(length(max = 253))]
    pub name: String,

    /// The node's UID.
    #[schemars(length(max = 128))]
    pub uid: String,

    /// In quarantine, the node's spec.providerID: a node of the same machine gets the block back.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,

    /// In quarantine, the node's status.nodeInfo.machineID, likewise.
    #[serde(default, rename = "machineID", skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
}

/// What kind of owner.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKind {
    /// A node that exists
    Node,
    /// A node that is gone
    Quarantine,
}

/// The name of the block of that CIDR: `10-244-1-64-26`, `fd00-10-244--40-122`.
pub fn block_name(cidr: &Cidr) -> String {
    cidr.to_string().replace(['.', ':', '/'], "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_of_the_cidr() {
        for (cidr, name) in [
            ("10.244.1.64/26", "10-244-1-64-26"),
            ("fd00:10:244::40/122", "fd00-10-244--40-122"),
            ("fd00::/64", "fd00---64"),
        ] {
            assert_eq!(block_name(&Cidr::parse_strict(cidr).unwrap()), name);
        }
    }
}
