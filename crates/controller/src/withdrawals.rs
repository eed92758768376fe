//! Withdrawals: which ranges a NodeSubnet wants back from its node, and which ranges it returns to the node.
//!
//! The decision follows from the requests and from what the agent reports as withdrawn, and from nothing else. So it is
//! the same after a change of leaders, and after a restore of the API server.
//!
//! # Guarantees
//! - A range is wanted back only if it lies inside of one of the node's blocks and is not the whole block. A whole block
//!   is drained instead.
//! - A range that the agent has withdrawn and that nobody wants any more is returned until the agent no longer reports
//!   it.

use std::collections::BTreeSet;

use crate::cluster::objects::{AgentReport, Subnet};
use cadastre_api::{AllocatedBlock, MOST_WITHDRAWALS};
use cadastre_core::Cidr;

/// The ranges that a NodeSubnet names in `spec.withdraw` and `spec.returned`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Withdrawals {
    pub withdraw: Vec<String>,
    pub returned: Vec<String>,
}

impl Withdrawals {
    /// Returns the withdrawals of a node with these blocks. `is` is its NodeSubnet, whose annotations contain the
    /// requests.
    pub(crate) fn of(
        is: Option<&Subnet>,
        blocks: &[AllocatedBlock],
        report: Option<&AgentReport>,
    ) -> Self {
        let blocks = blocks.iter();
        let blocks: Vec<Cidr> = blocks
            .filter_map(|block| Cidr::parse_strict(&block.cidr).ok())
            .collect();
        let is_part = |range: &&Cidr| {
            let is_inside = |block: &Cidr| block.contains(range) && block != *range;
            blocks.iter().any(is_inside)
        };
        let requested = is.into_iter().flat_map(|is| &is.requests.withdraw);
        let mut wanted: BTreeSet<Cidr> = BTreeSet::new();
        // A CIDR sorts before the CIDRs inside of it, so of nested requests the outermost one comes first.
        for range in requested.filter(is_part).take(MOST_WITHDRAWALS) {
            let is_nested = wanted.last().is_some_and(|last| last.contains(range));
            if !is_nested {
                wanted.insert(*range);
            }
        }
        let withdrawn = report.map_or(&[][..], |report| &report.withdrawn);
        let is_unwanted = |range: &&Cidr| !wanted.contains(*range);
        let returned = withdrawn.iter().filter(is_unwanted);
        Self {
            returned: returned.map(ToString::to_string).collect(),
            withdraw: wanted.iter().map(ToString::to_string).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::subnet;

    fn withdrawals(requested: &[&str], withdrawn: &[&str]) -> Withdrawals {
        let cidr = |it: &&str| Cidr::parse_strict(it).unwrap();
        let mut of_node = subnet("n", &["10.0.0.0/28", "10.0.0.32/28"], 0);
        of_node.requests.withdraw = requested.iter().map(cidr).collect();
        let mut report = *of_node.report.clone().unwrap();
        report.withdrawn = withdrawn.iter().map(cidr).collect();
        let blocks = of_node.spec.clone().unwrap().blocks;
        Withdrawals::of(Some(&of_node), &blocks, Some(&report))
    }

    #[test]
    fn parts_of_blocks_are_wanted_back_and_nothing_else() {
        let requested = [
            "10.0.0.4/30",  // a part of the first block
            "10.0.0.5/32",  // inside of the request before
            "10.0.0.16/32", // in no block of the node
            "10.0.0.32/28", // a whole block
            "10.0.0.32/32", // a part of the second block
            "10.0.0.0/27",  // more than a block
        ];
        let is = withdrawals(&requested, &[]);
        assert_eq!(is.withdraw, ["10.0.0.4/30", "10.0.0.32/32"]);
        assert!(is.returned.is_empty());
    }

    #[test]
    fn what_is_withdrawn_and_no_longer_wanted_is_returned() {
        let is = withdrawals(
            &["10.0.0.4/30"],
            &["10.0.0.4/30", "10.0.0.8/32", "10.9.9.9/32"],
        );
        assert_eq!(is.withdraw, ["10.0.0.4/30"]);
        assert_eq!(is.returned, ["10.0.0.8/32", "10.9.9.9/32"]);
    }
}
