//! Finds pods whose addresses another network has assigned, on nodes where Cadastre should assign the addresses of
//! pods.
//!
//! Cadastre should assign the addresses on each node whose agent writes the runtime's CNI configuration (mode
//! `blocks`). On other nodes, pods belong to another network by design.

use super::{Findings, Severity};
use crate::inventory::{Cover, Inventory, PodFact};
use crate::render::{count, some};
use cadastre_core::{Addr, Cidr};

/// At most this many nodes or pods are named in a finding.
const NAMED: usize = 4;

pub(super) fn check(inventory: &Inventory, findings: &mut Findings) {
    nodes(inventory, findings);
    pods(inventory, findings);
}

/// Reports nodes on which another network, and not Cadastre, assigns the addresses of new pods. The agents report this.
fn nodes(inventory: &Inventory, findings: &mut Findings) {
    let all = inventory.served_by_others();
    let Some((first, says)) = all.first() else {
        return;
    };
    let names: Vec<&str> = all.iter().map(|(node, _)| *node).collect();
    let (number, names) = (count(all.len(), "node"), some(&names, NAMED));
    findings.add(
        Severity::Warning,
        "ServedByOthers",
        "agents",
        format!("new pods use another network's CNI configuration on {number}: {names}. The agent of {first} reports: {says}"),
        "see the condition ServedByOthers of the NodeSubnet of each of these nodes",
    );
}

/// Reports pods with an address in no pool and no block, on nodes whose agent writes the runtime's CNI configuration.
fn pods(inventory: &Inventory, findings: &mut Findings) {
    let ranges = inventory.pool_ranges();
    let configured = inventory.running.configured();
    let is_outside = |addr: &&Addr| {
        let in_block = |it: &Cover| matches!(it, Cover::Block(_));
        !is_within(&ranges, **addr) && !inventory.covers(**addr).iter().any(in_block)
    };
    let outside = |pod: &PodFact| -> Option<String> {
        let node = pod.node.as_deref()?;
        let counts = configured.contains(node) && pod.uses_addresses() && !pod.deleting;
        let addr = pod.addresses.iter().filter(|_| counts).find(is_outside)?;
        Some(format!("{} on {node} ({addr})", pod.name))
    };
    let all: Vec<String> = inventory.pods.iter().filter_map(outside).collect();
    if all.is_empty() {
        return;
    }
    let (number, names) = (count(all.len(), "pod"), some(&all, NAMED));
    findings.add(
        Severity::Warning,
        "PodsOutside",
        "pods",
        format!("{number} on nodes whose agent writes the CNI configuration, with an address that is in no pool: {names}"),
        "if ServedByOthers is reported, too, another network assigns the addresses of new pods: fix that first. Otherwise these pods are older than Cadastre, or their range was removed from its pool: delete them, a few at a time, so that they are created again with an address of a pool",
    );
}

/// Whether an address is in one of the ranges, which must be disjoint and sorted.
fn is_within(ranges: &[Cidr], addr: Addr) -> bool {
    let after = ranges.partition_point(|it| it.first() <= addr);
    after > 0 && ranges[after - 1].contains_addr(addr)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{addr, cidr};

    #[test]
    fn an_address_is_found_in_the_last_range_that_begins_before_it() {
        let ranges = ["10.0.0.0/24", "10.0.2.0/24", "fd00::/64"];
        let ranges = ranges.map(cidr);
        let is = |text| is_within(&ranges, addr(text));
        assert!(is("10.0.0.0") && is("10.0.2.255") && is("fd00::1"));
        assert!(!is("9.9.9.9") && !is("10.0.1.0") && !is("10.0.3.0") && !is("fd00:1::1"));
        assert!(!is_within(&[], ranges[0].first()));
    }
}
