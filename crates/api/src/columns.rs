//! The columns of `kubectl get`. The most important ones are always shown, the others with `-o wide`.
//!
//! If the path of a column matches several values, the API server prints the first one. So a column for a list shows
//! the list's first entry.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceColumnDefinition as Column;

/// A column: when it is shown (always, or only with `-o wide`), its type, name, JSON path and description.
pub(super) type ColumnRow = (
    Shown,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
);

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Shown {
    Always,
    Wide,
}
use Shown::{Always, Wide};

/// The columns of IPPools: ranges, usage, nodes, waiting nodes and health. Lists are left out, because they would be
/// printed as JSON. Counts of free IPv6 blocks are left out, because they can have 20 digits. `-o yaml` and `kubectl
/// cadastre show pools` show lists and these counts.
#[rustfmt::skip]
pub(super) const POOL: &[ColumnRow] = &[
    (Always, "string", "IPv4", ".spec.ipv4.cidrs[0]", "The first IPv4 range"),
    (Always, "string", "Used4", ".status.ipv4.utilization", "Share of the IPv4 blocks that is not free"),
    (Always, "string", "IPv6", ".spec.ipv6.cidrs[0]", "The first IPv6 range"),
    (Always, "string", "Used6", ".status.ipv6.utilization", "Share of the IPv6 blocks that is not free"),
    (Always, "integer", "Nodes", ".status.nodes", "Nodes that have a range of the pool"),
    (Always, "integer", "Waiting", ".status.waiting", "Nodes that wait for a range of the pool"),
    (Always, "string", "Exhausted", r#".status.conditions[?(@.type=="Exhausted")].status"#, "Whether a family has no free block"),
    (Always, "integer", "Priority", ".spec.priority", "If several pools select a node, the highest priority is used first"),
    (Always, "string", "Ready", r#".status.conditions[?(@.type=="Ready")].status"#, "Whether the pool serves the nodes that it selects"),
    (Always, "string", "Reason", r#".status.conditions[?(@.type=="Ready")].reason"#, "The reason for Ready"),
    (Always, "date", "Age", ".metadata.creationTimestamp", "Time since the creation"),
    (Wide, "integer", "Block4", ".status.ipv4.blockSize", "Prefix length of a node's ranges"),
    (Wide, "string", "Free4", ".status.ipv4.free", "IPv4 blocks that are free"),
    (Wide, "string", "Allocated4", ".status.ipv4.allocated", "IPv4 blocks allocated to nodes"),
    (Wide, "string", "Quarantined4", ".status.ipv4.quarantined", "IPv4 blocks in quarantine"),
    (Wide, "string", "ExhaustsAt4", ".status.ipv4.exhaustsAt", "When the IPv4 ranges are exhausted, if usage grows as before"),
    (Wide, "integer", "Block6", ".status.ipv6.blockSize", "Prefix length of a node's ranges"),
    (Wide, "string", "Allocated6", ".status.ipv6.allocated", "IPv6 blocks allocated to nodes"),
    (Wide, "string", "Quarantined6", ".status.ipv6.quarantined", "IPv6 blocks in quarantine"),
    (Wide, "boolean", "Disabled", ".spec.disabled", "Whether nothing new is allocated"),
    (Wide, "string", "Selector", ".spec.nodeSelector", "The nodes that the pool serves; empty means every node"),
    (Wide, "string", "Message", r#".status.conditions[?(@.type=="Ready")].message"#, "The reason for Ready, as a sentence"),
];

/// The columns of NodeRoutes: the addresses of the node, and the ranges that are reached through them.
#[rustfmt::skip]
pub(super) const ROUTES: &[ColumnRow] = &[
    (Always, "string", "Via", ".spec.via", "The node's addresses"),
    (Always, "string", "Destinations", ".spec.destinations", "The ranges that are reached through the node"),
    (Always, "date", "Age", ".metadata.creationTimestamp", "Time since the creation"),
];

/// The columns of IPAMBlocks: the owner, since when the owner has the block, and the end of a quarantine.
#[rustfmt::skip]
pub(super) const BLOCK: &[ColumnRow] = &[
    (Always, "string", "CIDR", ".spec.cidr", "The block"),
    (Always, "string", "Pool", ".spec.pool", "The pool of the block"),
    (Always, "string", "Owner", ".spec.owner.kind", "Node, or Quarantine if the node was deleted"),
    (Always, "string", "Node", ".spec.owner.name", "The node of the block; in quarantine, the deleted node"),
    (Always, "date", "Since", ".spec.since", "Since when the owner has the block"),
    (Always, "string", "Until", ".spec.until", "The earliest end of the quarantine"),
    (Always, "date", "Age", ".metadata.creationTimestamp", "Time since the creation"),
    (Wide, "string", "NodeUID", ".spec.owner.uid", "The node's UID"),
];

/// The columns of NodeSubnets: the ranges of the node, and the quarantined ranges of earlier nodes with the same name.
#[rustfmt::skip]
pub(super) const SUBNET: &[ColumnRow] = &[
    (Always, "string", "CIDR", ".spec.podCIDRs[0].cidr", "The node's podCIDR"),
    (Always, "string", "Pool", ".spec.podCIDRs[0].pool", "The pool of that podCIDR; empty if no pool contains it"),
    (Always, "string", "CIDR2", ".spec.podCIDRs[1].cidr", "The node's podCIDR of the second family"),
    (Always, "string", "Block", ".spec.blocks[0].cidr", "The first block of the node"),
    (Always, "string", "BlockPool", ".spec.blocks[0].pool", "The pool of that block"),
    (Always, "string", "Quarantined", ".spec.quarantined[0].podCIDRs[0].cidr", "A quarantined podCIDR of an earlier node of that name"),
    (Always, "string", "Until", ".spec.quarantined[0].until", "The earliest end of the quarantine"),
    (Always, "date", "Age", ".metadata.creationTimestamp", "Time since the creation"),
    (Wide, "string", "Pool2", ".spec.podCIDRs[1].pool", "The pool of the second family"),
    (Wide, "string", "Quarantined2", ".spec.quarantined[0].podCIDRs[1].cidr", "The second podCIDR of an earlier node of that name"),
    (Wide, "string", "NodeUID", ".spec.nodeUID", "UID of the node; empty if no such node exists"),
    (Wide, "string", "ProviderID", ".spec.providerID", "The machine behind the node"),
];

/// The columns of IPClaims: the addresses, the pod and node that use them, and whether the claim has its addresses.
#[rustfmt::skip]
pub(super) const CLAIM: &[ColumnRow] = &[
    (Always, "string", "Address", ".status.addresses[0]", "The first address of the claim"),
    (Always, "string", "Pool", ".status.pool", "The pool of the addresses"),
    (Always, "string", "Node", ".status.node", "The node that has the addresses"),
    (Always, "string", "Pod", ".status.pod", "The pod that uses the claim"),
    (Always, "string", "Ready", r#".status.conditions[?(@.type=="Ready")].status"#, "Whether the claim has its addresses"),
    (Always, "string", "Reason", r#".status.conditions[?(@.type=="Ready")].reason"#, "The reason for Ready"),
    (Always, "date", "Age", ".metadata.creationTimestamp", "Time since the creation"),
    (Wide, "string", "Address2", ".status.addresses[1]", "The address of the second family"),
    (Wide, "date", "Since", ".status.since", "Since when the node has the addresses"),
    (Wide, "string", "Message", r#".status.conditions[?(@.type=="Ready")].message"#, "The reason for Ready, as a sentence"),
];

/// The columns of NodeAddresses. The lists of addresses are left out, because they would be printed as JSON.
#[rustfmt::skip]
pub(super) const ADDRESSES: &[ColumnRow] = &[
    (Always, "date", "AsOf", ".spec.asOf", "When the addresses were in use"),
    (Always, "date", "Age", ".metadata.creationTimestamp", "Time since the creation"),
    (Wide, "string", "NodeUID", ".spec.nodeUID", "The node's UID"),
    (Wide, "string", "BootID", ".spec.bootID", "The boot of the machine at that time"),
];

pub(super) fn column((shown, kind, name, path, description): ColumnRow) -> Column {
    Column {
        name: name.to_owned(),
        type_: kind.to_owned(),
        json_path: path.to_owned(),
        description: Some(description.to_owned()),
        format: None,
        priority: (shown == Wide).then_some(1),
    }
}
