//! All scripts.

use cadastre_api::{
    AllocationMode, BlockSizing, Borrowing, ConflictProbe, FirstBlock, IPPoolSpec, IPv6Ranges,
    NodeAssignment,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::{Act, Announces, CLASS, SELECTED, Script, Wants};
use crate::clock::{MS, SECOND, Time};
use crate::ipam_claims::NETWORK;
use crate::pool_workload::small_pool;

/// A podCIDR has just arrived, unless it is late.
const SOON: Time = 20 * MS;

/// What most scripts have: a pool with one block of two addresses.
const USUAL: Script = Script {
    name: "",
    pool: || pool(AllocationMode::Blocks, "10.245.0.0/31", 31),
    silence_after_reboot: 0,
    announces: Announces::Nothing,
    forgets_intents: false,
    acts: &[],
};

pub static SCRIPTS: [Script; 47] = [
    Script {
        name: "podCIDRs: a node is replaced",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "addresses: pods follow each other",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::Pod("a", "x"),
        ],
        ..USUAL
    },
    Script {
        name: "blocks: from one node to another",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "forced: a pod is deleted that runs on",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::PodForced("w"),
            Act::Pod("a", "x"),
        ],
        ..USUAL
    },
    Script {
        name: "return: a node that gave its block away wants one again",
        silence_after_reboot: 20 * SECOND,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::Pod("a", "x"),
            Act::PodGone("w"),
        ],
        ..USUAL
    },
    Script {
        name: "dead: a node with a block and a pod is deleted",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Finalizer("a"),
            Act::NodeGone("a"),
            Act::Pod("b", "w"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "again: a node's machine registers again",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeAgain("a"),
            Act::Finalizer("b"),
            Act::NodeGone("b"),
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "hand-over: the leader stops",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::HandOver,
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::HandOver,
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "assigned: a pool assigns a range to a node",
        pool: || IPPoolSpec {
            assignments: vec![NodeAssignment {
                node: "b".to_owned(),
                cidrs: vec!["10.244.0.0/24".to_owned()],
            }],
            ..two_pod_cidrs()
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Stranger("a", "10.244.0.7"),
            Act::NodeAgain("b"),
            Act::Edit(|spec| "a".clone_into(&mut spec.assignments[0].node)),
            Act::NodeAgain("b"),
            Act::NodeAgain("a"),
        ],
        ..USUAL
    },
    Script {
        name: "edits: a pool of blocks changes and is deleted",
        pool: two_blocks,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Edit(|spec| spec.ipv4.as_mut().unwrap().cidrs = vec!["10.245.1.0/30".to_owned()]),
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::PoolGone,
            Act::PodGone("w"),
            Act::NodeGone("a"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "drain: a block is drained while a pod uses it",
        pool: two_blocks,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Drain("a", "10.245.0.0/31"),
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "claim: the pods of a claim run on one node and then on another",
        pool: two_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Claim("c", &[]),
            Act::PodWith("a", "v", Wants::Claim("c")),
            Act::Pod("a", "x"),
            Act::PodGone("v"),
            Act::PodWith("b", "w", Wants::Claim("c")),
            Act::ClaimGone("c"),
            Act::PodGone("w"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "withdrawn: a claim is for an address in a node's block",
        pool: two_immediate_blocks,
        acts: &a_claim_in_the_block_of_a_node(&["10.245.0.5"]),
        ..USUAL
    },
    Script {
        name: "announced: a block goes to another node, and its route, too",
        announces: Announces::Routes,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::NodeGone("a"),
        ],
        ..USUAL
    },
    Script {
        name: "migration: a virtual machine moves to another node",
        pool: two_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Claim("c", &[]),
            Act::PodWith("a", "v", Wants::Machine("c", "vmi")),
            Act::PodWith("b", "w", Wants::Machine("c", "vmi")),
            Act::Migrated("w"),
            Act::PodGone("v"),
            Act::PodWith("a", "x", Wants::Machine("c", "vmi")),
            Act::PodGone("x"),
            Act::PodGone("w"),
        ],
        ..USUAL
    },
    Script {
        name: "asks: pods ask for addresses in another node's block",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::PodWith("b", "v", Wants::Address("10.245.0.5")),
            Act::PodWith("b", "w", Wants::AddressByCni("10.245.0.6")),
            Act::PodGone("v"),
            Act::PodGone("w"),
            Act::Cooldown,
            Act::PodWith("a", "x", Wants::AddressByCni("10.245.0.5")),
            Act::PodGone("x"),
        ],
        ..USUAL
    },
    Script {
        name: "sticky: a pod of a StatefulSet comes back on another node",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::PodWith("a", "web-0", Wants::Sticky),
            Act::PodGone("web-0"),
            Act::PodWith("b", "web-0", Wants::Sticky),
            Act::PodGone("web-0"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "lent: a node borrows part of a block and gives it back",
        pool: two_lending_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Pod("b", "v"),
            Act::Pod("b", "w"),
            Act::Pod("b", "x"),
            Act::Pod("b", "y"),
            Act::Pod("b", "z"),
            Act::PodGone("v"),
            Act::PodGone("z"),
            Act::Cooldown,
            Act::NodeAgain("a"),
        ],
        ..USUAL
    },
    Script {
        name: "unselected: a node is no longer selected, and others are created",
        pool: unselecting,
        acts: UNSELECTED,
        ..USUAL
    },
    Script {
        name: "earlier: the same, and leaders of an earlier version",
        pool: unselecting,
        forgets_intents: true,
        acts: UNSELECTED,
        ..USUAL
    },
    Script {
        name: "finalized: a node is deleted that has no podCIDR yet",
        pool: two_pod_cidrs,
        forgets_intents: true,
        acts: &[
            Act::Node("a"),
            Act::After(SOON),
            Act::NodeHeld("a"),
            Act::Node("b"),
            Act::Node("c"),
            Act::NodeGone("b"),
        ],
        ..USUAL
    },
    Script {
        name: "strangers: pods have addresses in free ranges and in those of a dead node",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::Stranger("a", "10.244.0.9"),
            Act::Node("b"),
            Act::PodGone("stranger"),
            Act::Stranger("a", "10.244.1.7"),
            Act::NodeGone("a"),
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "families: one family of a pool is exhausted first",
        pool: || {
            let mut spec = pool(AllocationMode::NodeCIDR, "10.244.0.0/22", 24);
            spec.reserved = vec!["10.244.0.5".to_owned()];
            spec.ipv6 = Some(IPv6Ranges {
                cidrs: vec!["fd00::/64".to_owned()],
                block_size: Some(64),
                gateway: None,
            });
            spec
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::Node("c"),
            Act::NodeGone("b"),
        ],
        ..USUAL
    },
    Script {
        name: "sizes: podCIDRs fit the number of pods",
        pool: || {
            let mut spec = pool(AllocationMode::NodeCIDR, "10.244.0.0/23", 26);
            spec.ipv4.as_mut().unwrap().block_sizing = BlockSizing::FitMaxPods;
            spec
        },
        acts: &[
            Act::BareNode("a"),
            Act::MaxPods("a", 110),
            Act::BareNode("b"),
            Act::MaxPods("b", 200),
            Act::NodeAgain("a"),
        ],
        ..USUAL
    },
    Script {
        name: "better: a pool with a higher priority is created",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::SecondPool(|| IPPoolSpec {
                priority: 1,
                ..pool(AllocationMode::NodeCIDR, "10.244.4.0/23", 24)
            }),
            Act::After(0),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::PoolGone,
            Act::Node("c"),
        ],
        ..USUAL
    },
    Script {
        name: "probes: addresses are probed before their use",
        pool: || {
            let mut spec = pool(AllocationMode::Blocks, "10.245.0.0/30", 30);
            spec.terms.conflict_probe = ConflictProbe::BeforeUse;
            spec
        },
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::Pod("a", "x"),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::Pod("a", "y"),
            Act::PodGone("w"),
            Act::Cooldown,
            Act::Pod("a", "z"),
            Act::Pod("a", "u"),
        ],
        ..USUAL
    },
    Script {
        name: "sandboxes: a pod gets a new sandbox",
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::NewSandbox("a"),
            Act::Cooldown,
            Act::Pod("a", "w"),
            Act::PodGone("v"),
            Act::NewSandbox("a"),
        ],
        ..USUAL
    },
    Script {
        name: "reborn: a node with pods registers again",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Pod("a", "w"),
            Act::NodeAgain("a"),
            Act::Pod("a", "x"),
            Act::PodGone("v"),
            Act::Cooldown,
            Act::Pod("a", "y"),
        ],
        ..USUAL
    },
    Script {
        name: "daemon: a routing daemon announces a block that goes to another node",
        announces: Announces::ToDaemon,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Node("b"),
            Act::Pod("b", "w"),
            Act::PodGone("v"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "interface: pods of a virtual machine name an IPAMClaim",
        pool: || IPPoolSpec {
            networks: vec![NETWORK.to_owned()],
            ..two_blocks()
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::PodWith("a", "v", Wants::Interface("c")),
            Act::PodWith("b", "w", Wants::Interface("c")),
            Act::Migrated("w"),
            Act::PodGone("v"),
            Act::PodGone("w"),
        ],
        ..USUAL
    },
    Script {
        name: "restored: the API server forgets a block and a withdrawn address",
        pool: || IPPoolSpec {
            first_block: FirstBlock::Immediate,
            ..pool(AllocationMode::Blocks, "10.245.0.0/28", 29)
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Backup,
            Act::Cooldown,
            Act::Claim("c", &["10.245.0.9"]),
            Act::PodWith("b", "v", Wants::Claim("c")),
            Act::Cooldown,
            Act::Restore,
            Act::Pod("a", "w"),
            Act::Pod("a", "x"),
            Act::Pod("a", "y"),
            Act::Pod("a", "z"),
        ],
        ..USUAL
    },
    Script {
        name: "forgotten: the API server forgets a node's only block, and another node wants one",
        pool: || IPPoolSpec {
            idle_seconds: 20,
            ..(USUAL.pool)()
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Backup,
            Act::Cooldown,
            Act::Pod("a", "v"),
            Act::Cooldown,
            Act::Restore,
            Act::After(0),
            Act::Pod("b", "w"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "taken: a pod asks for the address of a claim",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Claim("c", &["10.245.0.5"]),
            Act::PodWith("b", "v", Wants::Claim("c")),
            Act::PodWith("b", "w", Wants::AddressByCni("10.245.0.5")),
            Act::PodGone("v"),
            Act::After(4 * MS),
            Act::PodWith("b", "x", Wants::AddressByCni("10.245.0.5")),
            Act::PodGone("x"),
            Act::PodGone("w"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "machines: pods of two virtual machines name one claim",
        pool: two_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Claim("c", &[]),
            Act::PodWith("a", "v", Wants::Machine("c", "vmi")),
            Act::PodWith("b", "w", Wants::Machine("c", "vmi")),
            Act::PodGone("w"),
            Act::After(4 * MS),
            Act::PodWith("b", "x", Wants::Machine("c", "other")),
            Act::PodGone("v"),
            Act::PodGone("x"),
        ],
        ..USUAL
    },
    Script {
        name: "lender: a node is deleted that has lent a part of its block",
        pool: two_lending_blocks,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Pod("b", "v"),
            Act::Pod("b", "w"),
            Act::Pod("b", "x"),
            Act::Pod("b", "y"),
            Act::Pod("b", "z"),
            Act::NodeGone("a"),
            Act::Node("c"),
            Act::Pod("c", "u"),
            Act::PodGone("z"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "busy: a claim is for an address that a pod uses",
        pool: two_immediate_blocks,
        acts: &a_claim_in_the_block_of_a_node(&["10.245.0.4"]),
        ..USUAL
    },
    Script {
        name: "parts: a user withdraws parts of a block and returns them",
        pool: two_immediate_blocks,
        acts: &[
            Act::Node("a"),
            Act::Pod("a", "v"),
            Act::Withdraw("a", &["10.245.0.4/31", "10.245.0.7/32"]),
            Act::Pod("a", "w"),
            Act::Withdraw("a", &[]),
            Act::Pod("a", "x"),
            Act::PodGone("v"),
            Act::Withdraw("a", &["10.245.0.5/32"]),
            Act::Pod("a", "y"),
            Act::Withdraw("a", &[]),
            Act::After(3 * MS),
            Act::Withdraw("a", &["10.245.0.5/32"]),
            Act::Pod("a", "z"),
        ],
        ..USUAL
    },
    Script {
        name: "handed: the leader stops while a podCIDR may be under way",
        pool: unselecting,
        acts: &[
            Act::Node("a"),
            Act::After(6 * MS),
            Act::HandOver,
            Act::After(SOON),
            Act::Unselected("a"),
            Act::Node("b"),
            Act::Node("c"),
            Act::NodeGone("b"),
        ],
        ..USUAL
    },
    Script {
        name: "pair: two podCIDRs are under way at once",
        pool: unselecting,
        acts: &[
            Act::Node("a"),
            Act::After(0),
            Act::Node("b"),
            Act::After(SOON),
            Act::Unselected("a"),
            Act::After(0),
            Act::Unselected("b"),
            Act::Node("c"),
            Act::Node("d"),
        ],
        ..USUAL
    },
    Script {
        name: "renamed: a name without a podCIDR is used again",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("b"),
            Act::Node("a"),
            Act::NodeGone("a"),
            Act::Node("c"),
            Act::Node("a"),
            Act::Cooldown,
            Act::NodeGone("b"),
        ],
        ..USUAL
    },
    Script {
        name: "quarantined: the leader stops while a dead node's block is quarantined",
        pool: || IPPoolSpec {
            quarantine_seconds: 20,
            ..pool(AllocationMode::Blocks, "10.245.0.0/31", 31)
        },
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Pod("a", "v"),
            Act::NodeGone("a"),
            Act::HandOver,
            Act::Pod("b", "w"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "unled: a node is deleted while nobody leads",
        pool: two_pod_cidrs_long_quarantined,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::Stranger("a", "10.244.1.7"),
            Act::LeaderKilled,
            Act::After(SOON),
            Act::NodeGone("a"),
            Act::Node("c"),
            Act::Cooldown,
        ],
        ..USUAL
    },
    Script {
        name: "scarce: two nodes want the only podCIDR",
        pool: one_pod_cidr,
        acts: &[
            Act::Node("a"),
            Act::After(0),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::Node("c"),
            Act::NodeGone("b"),
        ],
        ..USUAL
    },
    Script {
        name: "stale: the leader stops just after a podCIDR went to another node",
        pool: one_pod_cidr,
        acts: &just_after_an_allocation(Act::HandOver),
        ..USUAL
    },
    Script {
        name: "killed: the leader is killed just after a podCIDR went to another node",
        pool: one_pod_cidr,
        acts: &just_after_an_allocation(Act::LeaderKilled),
        ..USUAL
    },
    Script {
        name: "dying: two nodes are deleted one after the other",
        pool: two_pod_cidrs,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::After(SECOND / 2),
            Act::NodeGone("b"),
            Act::Node("c"),
            Act::Node("d"),
        ],
        ..USUAL
    },
    Script {
        name: "clocks: wall clocks are set back during a quarantine",
        pool: two_pod_cidrs_long_quarantined,
        acts: &[
            Act::Node("a"),
            Act::Node("b"),
            Act::NodeGone("a"),
            Act::ClocksBack,
            Act::HandOver,
            Act::Node("c"),
        ],
        ..USUAL
    },
];

/// A node without a podCIDR can be unselected before its podCIDR arrives.
const UNSELECTED: &[Act] = &[
    Act::Node("a"),
    Act::After(SOON),
    Act::Unselected("a"),
    Act::Node("b"),
    Act::Node("c"),
    Act::NodeGone("b"),
];

/// A pool of two podCIDRs, which selects all nodes that are not unselected.
fn unselecting() -> IPPoolSpec {
    IPPoolSpec {
        node_selector: Some(LabelSelector {
            match_labels: Some([(CLASS.to_owned(), SELECTED.to_owned())].into()),
            ..LabelSelector::default()
        }),
        ..two_pod_cidrs()
    }
}

/// A podCIDR goes to node "c". Its NodeSubnet is not written yet when `end` happens to the leader.
const fn just_after_an_allocation(end: Act) -> [Act; 9] {
    [
        Act::Node("z"),
        Act::Node("d"),
        Act::Node("c"),
        Act::NodeGone("z"),
        Act::After(SECOND + 50 * MS),
        end,
        Act::After(SOON),
        Act::NodeGone("c"),
        Act::Cooldown,
    ]
}

/// A claim is for these addresses of the block of node "a", whose pod has 10.245.0.4. A pod on node "b" wants them.
const fn a_claim_in_the_block_of_a_node(addresses: &'static [&'static str]) -> [Act; 9] {
    [
        Act::Node("a"),
        Act::Node("b"),
        Act::Pod("a", "v"),
        Act::Claim("c", addresses),
        Act::PodWith("b", "w", Wants::Claim("c")),
        Act::PodGone("v"),
        Act::Cooldown,
        Act::PodGone("w"),
        Act::ClaimGone("c"),
    ]
}

fn one_pod_cidr() -> IPPoolSpec {
    pool(AllocationMode::NodeCIDR, "10.244.0.0/24", 24)
}

fn two_pod_cidrs() -> IPPoolSpec {
    pool(AllocationMode::NodeCIDR, "10.244.0.0/23", 24)
}

fn two_pod_cidrs_long_quarantined() -> IPPoolSpec {
    IPPoolSpec {
        quarantine_seconds: 20,
        ..two_pod_cidrs()
    }
}

/// A pool of two blocks of two addresses, which nodes get on demand.
fn two_blocks() -> IPPoolSpec {
    pool(AllocationMode::Blocks, "10.245.0.0/30", 31)
}

fn two_lending_blocks() -> IPPoolSpec {
    IPPoolSpec {
        borrowing: Borrowing::WhenExhausted,
        ..two_immediate_blocks()
    }
}

/// A pool of two blocks of four addresses. Each of the first two nodes gets one at once, the first node the upper one.
fn two_immediate_blocks() -> IPPoolSpec {
    IPPoolSpec {
        first_block: FirstBlock::Immediate,
        ..pool(AllocationMode::Blocks, "10.245.0.0/29", 30)
    }
}

/// A pool without a gateway: pods can have all of its addresses.
fn pool(mode: AllocationMode, cidr: &str, block_size: u32) -> IPPoolSpec {
    let mut spec = small_pool(mode, cidr, block_size);
    spec.ipv4.as_mut().unwrap().gateway = Some("None".to_owned());
    spec
}
