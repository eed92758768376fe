//! NodeRoutes: which addresses are reached through a node.
//!
//! A NodeRoutes has the name of its node. Only the controller writes the object, and only if it publishes routes
//! (`--publish-routes`). Agents with `--routes=direct`, or any other router, install its routes on the other nodes. The
//! object is separate from the NodeSubnet, which agents write often: all agents watch all NodeRoutes, so a NodeRoutes
//! is small, and is written only if a route changes.
//!
//! # Guarantees
//! - A NodeRoutes lists a block only as long as the block's IPAMBlock exists. So a listed block is allocated to no
//!   other node. There is one exception: a late write of an earlier leader can list a released block for a moment.
//! - If two NodeRoutes list the same range, the one with the higher `resourceVersion` is right.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// The maximum number of addresses in `via`: one per family.
pub const MOST_VIA: usize = 2;
/// The maximum number of destinations. It is above the sum of the maximum numbers of podCIDRs, blocks and claimed
/// addresses that a NodeSubnet lists.
pub const MOST_DESTINATIONS: usize = 4_096;

/// The ranges of a node's pods, and the addresses of the node through which they are reached.
#[derive(
    CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq,
)]
#[kube(
    group = "cadastre.dev",
    version = "v1alpha1",
    kind = "NodeRoutes",
    plural = "noderoutes",
    singular = "noderoutes",
    shortname = "nroutes",
    category = "cadastre",
    derive = "PartialEq",
    doc = "The ranges that are reached through a node, and the node's addresses. Written by the controller; read-only for everybody else."
)]
#[serde(rename_all = "camelCase")]
pub struct NodeRoutesSpec {
    /// Addresses of the node itself, at most one per family. Packets to a destination are sent to the address of the
    /// same family.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    #[schemars(length(max = MOST_VIA), inner(length(max = 45)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub via: Vec<String>,

    /// The ranges and addresses that the node has, in CIDR notation: podCIDRs, blocks, ranges that it has borrowed, and
    /// claimed addresses. Of several ranges that contain an address, the longest prefix wins.
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    #[schemars(length(max = MOST_DESTINATIONS), inner(length(max = 49)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub destinations: Vec<String>,
}
