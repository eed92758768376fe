//! The conditions that must hold in every state, and the conditions that must hold at rest.

use cadastre_api::AllocationMode;
use cadastre_core::Cidr;

use super::super::api::Api;
use super::super::checks::{Verdict, wrong};
use super::agent::Agent;

/// A range, and the node that has it: the node's name and the UID of its Node.
type Holding<'a> = (Cidr, &'a str, &'a str);

/// Checks that no two nodes have ranges that overlap, and that no block is free while an agent may use it.
pub fn check(api: &Api, agents: &[Agent]) -> Verdict {
    let holdings = holdings(api, agents);
    for (n, (range, name, uid)) in holdings.iter().enumerate() {
        for (other, other_name, other_uid) in &holdings[n + 1..] {
            if range.overlaps(other) && (name, uid) != (other_name, other_uid) {
                let text =
                    format!("{name} ({uid}) has {range}, {other_name} ({other_uid}) {other}");
                return wrong("one holder", text, [*name]);
            }
        }
    }
    for agent in agents {
        for block in agent.held() {
            let mut owned = api
                .blocks
                .live
                .values()
                .filter_map(|it| it.spec.as_ref().ok());
            if !owned.any(|it| it.cidr == block && it.owner.uid == agent.uid) {
                let text = format!("{block} is free, and {} may use it", agent.node);
                return wrong("freed while in use", text, [&*agent.node]);
            }
        }
    }
    Ok(())
}

/// All ranges of nodes, according to the Nodes (podCIDRs), the IPAMBlocks, the NodeSubnets and the agents.
fn holdings<'a>(api: &'a Api, agents: &'a [Agent]) -> Vec<Holding<'a>> {
    let mut all: Vec<Holding> = Vec::new();
    for node in api.nodes.live.values() {
        all.extend(
            node.pod_cidrs
                .iter()
                .map(|it| (*it, &*node.name, &*node.uid)),
        );
    }
    for block in api.blocks.live.values() {
        if let Ok(spec) = &block.spec {
            all.push((spec.cidr, &spec.owner.name, &spec.owner.uid));
        }
    }
    for subnet in api.subnets.live.values() {
        let Ok(spec) = &subnet.spec else { continue };
        let uid = spec.node_uid.as_deref().unwrap_or_default();
        // If the Node is deleted, the ranges in its NodeSubnet are in quarantine.
        let is_live = api
            .nodes
            .get(&subnet.name)
            .is_some_and(|it| &*it.uid == uid);
        for block in spec.blocks.iter().filter(|_| is_live) {
            all.push((Cidr::parse_strict(&block.cidr).unwrap(), &subnet.name, uid));
        }
    }
    for agent in agents {
        all.extend(agent.held().map(|it| (it, &*agent.node, &*agent.uid)));
    }
    all
}

/// Whether every node has enough blocks for its pods or, without blocks, podCIDRs that its NodeSubnet lists.
pub fn served(api: &Api, agents: &[Agent]) -> bool {
    let has_blocks = has_blocks(api);
    agents.iter().all(|agent| {
        if has_blocks {
            agent.capacity() >= agent.need
        } else {
            has_pod_cidrs(api, agent)
        }
    })
}

/// Whether the pool allocates blocks rather than podCIDRs.
pub fn has_blocks(api: &Api) -> bool {
    let mut pools = api.pools.live.values();
    pools.any(|it| {
        it.spec
            .as_ref()
            .is_ok_and(|it| it.allocation_mode == AllocationMode::Blocks)
    })
}

fn has_pod_cidrs(api: &Api, agent: &Agent) -> bool {
    let node = api.nodes.get(&agent.node);
    let subnet = api.subnets.get(&agent.node);
    let spec = subnet.and_then(|it| it.spec.as_ref().ok());
    node.zip(spec).is_some_and(|(node, spec)| {
        let is_listed = |range: &Cidr| {
            let text = range.to_string();
            spec.pod_cidrs.iter().any(|it| it.cidr == text)
        };
        let is_own = spec.node_uid.as_deref() == Some(&*node.uid);
        is_own && !node.pod_cidrs.is_empty() && node.pod_cidrs.iter().all(is_listed)
    })
}
