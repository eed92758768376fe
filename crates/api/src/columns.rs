//! The columns of `kubectl get`. The most important ones are always shown, the others with `-o wide`.
//!
//! If the path of a column matches several values, the API server prints the first one. So a column for a list shows
//! the list's first entry.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceColumnDefinition as Column;

/// Returns the columns of IPPools: ranges, usage, nodes, waiting nodes and health. Lists are left out because they
/// would be printed as JSON, and counts of free IPv6 blocks because they can have 20 digits. `-o yaml` and `kubectl
/// cadastre show pools` show both.
pub(super) fn pool() -> Vec<Column> {
    vec![
        text("IPv4", ".spec.ipv4.cidrs[0]", "The first IPv4 range"),
        text(
            "Used4",
            ".status.ipv4.utilization",
            "Share of the IPv4 blocks that is not free",
        ),
        text("IPv6", ".spec.ipv6.cidrs[0]", "The first IPv6 range"),
        text(
            "Used6",
            ".status.ipv6.utilization",
            "Share of the IPv6 blocks that is not free",
        ),
        number(
            "Nodes",
            ".status.nodes",
            "Nodes that have a range of the pool",
        ),
        number(
            "Waiting",
            ".status.waiting",
            "Nodes that wait for a range of the pool",
        ),
        text(
            "Exhausted",
            r#".status.conditions[?(@.type=="Exhausted")].status"#,
            "Whether a family has no free block",
        ),
        number(
            "Priority",
            ".spec.priority",
            "Higher first where several pools select a node",
        ),
        text(
            "Ready",
            r#".status.conditions[?(@.type=="Ready")].status"#,
            "Whether the pool serves the nodes it selects",
        ),
        text(
            "Reason",
            r#".status.conditions[?(@.type=="Ready")].reason"#,
            "The reason for Ready",
        ),
        age(),
        wide(number(
            "Block4",
            ".status.ipv4.blockSize",
            "Prefix length of a node's ranges",
        )),
        wide(text(
            "Free4",
            ".status.ipv4.free",
            "IPv4 blocks that are free",
        )),
        wide(text(
            "Allocated4",
            ".status.ipv4.allocated",
            "IPv4 blocks allocated to nodes",
        )),
        wide(text(
            "Quarantined4",
            ".status.ipv4.quarantined",
            "IPv4 blocks in quarantine",
        )),
        wide(text(
            "ExhaustsAt4",
            ".status.ipv4.exhaustsAt",
            "When the IPv4 range will be exhausted at its recent growth",
        )),
        wide(number(
            "Block6",
            ".status.ipv6.blockSize",
            "Prefix length of a node's ranges",
        )),
        wide(text(
            "Allocated6",
            ".status.ipv6.allocated",
            "IPv6 blocks allocated to nodes",
        )),
        wide(text(
            "Quarantined6",
            ".status.ipv6.quarantined",
            "IPv6 blocks in quarantine",
        )),
        wide(column(
            "boolean",
            "Disabled",
            ".spec.disabled",
            "Nothing new is allocated from it",
        )),
        wide(text(
            "Selector",
            ".spec.nodeSelector",
            "The nodes it serves; empty is every node",
        )),
        wide(text(
            "Message",
            r#".status.conditions[?(@.type=="Ready")].message"#,
            "The reason for Ready, as a sentence",
        )),
    ]
}

/// Returns the columns of IPAMBlocks: the owner, since when it has the block, and the end of a quarantine.
pub(super) fn block() -> Vec<Column> {
    vec![
        text("CIDR", ".spec.cidr", "The block"),
        text("Pool", ".spec.pool", "The pool it belongs to"),
        text(
            "Owner",
            ".spec.owner.kind",
            "Node, or Quarantine once that node is gone",
        ),
        text(
            "Node",
            ".spec.owner.name",
            "The node that has it; in quarantine, the one that had it",
        ),
        column(
            "date",
            "Since",
            ".spec.since",
            "Since when the owner has it",
        ),
        text("Until", ".spec.until", "The earliest end of its quarantine"),
        age(),
        wide(text("NodeUID", ".spec.owner.uid", "The node's UID")),
    ]
}

/// Returns the columns of NodeSubnets: the ranges of the node, and the quarantined ranges of earlier nodes with its
/// name.
pub(super) fn subnet() -> Vec<Column> {
    vec![
        text("CIDR", ".spec.podCIDRs[0].cidr", "The node's podCIDR"),
        text(
            "Pool",
            ".spec.podCIDRs[0].pool",
            "The pool of that podCIDR; empty if no pool contains it",
        ),
        text(
            "CIDR2",
            ".spec.podCIDRs[1].cidr",
            "The node's podCIDR of the second family",
        ),
        text("Block", ".spec.blocks[0].cidr", "The first of its blocks"),
        text(
            "BlockPool",
            ".spec.blocks[0].pool",
            "The pool of that block",
        ),
        text(
            "Quarantined",
            ".spec.quarantined[0].podCIDRs[0].cidr",
            "A podCIDR of an earlier node of that name, in quarantine",
        ),
        text(
            "Until",
            ".spec.quarantined[0].until",
            "The earliest end of its quarantine",
        ),
        age(),
        wide(text(
            "Pool2",
            ".spec.podCIDRs[1].pool",
            "The pool of the second family",
        )),
        wide(text(
            "Quarantined2",
            ".spec.quarantined[0].podCIDRs[1].cidr",
            "The second podCIDR of an earlier node of that name",
        )),
        wide(text(
            "NodeUID",
            ".spec.nodeUID",
            "The node that holds; empty: no such node exists",
        )),
        wide(text(
            "ProviderID",
            ".spec.providerID",
            "The machine behind the node",
        )),
    ]
}

/// Returns the columns of NodeAddresses, which show how old the list is.
pub(super) fn addresses() -> Vec<Column> {
    vec![
        column("date", "AsOf", ".spec.asOf", "How long ago this was so"),
        age(),
        wide(text("NodeUID", ".spec.nodeUID", "The node's UID")),
        wide(text(
            "BootID",
            ".spec.bootID",
            "The boot of the machine in which this was so",
        )),
    ]
}

fn text(name: &str, path: &str, description: &str) -> Column {
    column("string", name, path, description)
}

fn number(name: &str, path: &str, description: &str) -> Column {
    column("integer", name, path, description)
}

fn age() -> Column {
    column(
        "date",
        "Age",
        ".metadata.creationTimestamp",
        "How long it exists",
    )
}

fn wide(column: Column) -> Column {
    Column {
        priority: Some(1),
        ..column
    }
}

fn column(kind: &str, name: &str, path: &str, description: &str) -> Column {
    Column {
        name: name.to_owned(),
        type_: kind.to_owned(),
        json_path: path.to_owned(),
        description: Some(description.to_owned()),
        format: None,
        priority: None,
    }
}
