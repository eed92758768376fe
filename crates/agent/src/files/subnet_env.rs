//! Renders flannel's `/run/flannel/subnet.env`, for flannel's CNI plugin on nodes where no flanneld runs.
//!
//! flannel's CNI plugin reads one range per family from this file. So the file suits nodes with a podCIDR (pools with
//! `allocationMode: NodeCIDR`), but not nodes whose blocks change.
//!
//! # Caveats
//! - If a pool has several ranges of a family, the file contains all of them, separated by commas. flannel's CNI plugin
//!   before 1.2 reads only one range.

use std::fmt::Write as _;

use cadastre_core::node_allocation::{Block, NodeAllocation};
use cadastre_core::{Addr, Cidr, Family};

/// The values in the file, apart from ranges.
#[derive(Clone, Copy, Debug)]
pub struct Links {
    /// The MTU of pods' interfaces, in bytes
    pub mtu: u32,
    /// The value of `FLANNEL_IPMASQ`. If true, flannel's CNI plugin does not masquerade, because another program
    /// masquerades
    pub ip_masq: bool,
}

/// Renders the file; `None` while the node has no podCIDR.
pub(crate) fn render(holding: &NodeAllocation, links: Links) -> Option<String> {
    let mut text = String::new();
    for family in Family::ALL {
        let Some((network, range)) = of_family(holding, family) else {
            continue;
        };
        let infix = match family {
            Family::V4 => "",
            Family::V6 => "IPV6_",
        };
        let subnet = first_usable(&range);
        let _ = writeln!(text, "FLANNEL_{infix}NETWORK={network}");
        let _ = writeln!(text, "FLANNEL_{infix}SUBNET={subnet}/{}", range.len());
    }
    if text.is_empty() {
        return None;
    }
    let _ = writeln!(text, "FLANNEL_MTU={}", links.mtu);
    let _ = writeln!(text, "FLANNEL_IPMASQ={}", links.ip_masq);
    Some(text)
}

/// Returns the ranges of the podCIDR's pool, joined by commas, and the podCIDR itself. Returns `None` if the node has
/// no podCIDR of this family.
fn of_family(holding: &NodeAllocation, family: Family) -> Option<(String, Cidr)> {
    let is_pod_cidr = |it: &&Block| it.uid == holding.node_uid && it.cidr.family() == family;
    let block = holding.blocks.iter().find(is_pod_cidr)?;
    let pool = holding.pools.iter().find(|it| it.name == block.pool);
    let ranges = pool.and_then(|pool| pool.family(family));
    let ranges = ranges.map_or(&[][..], |terms| &terms.cidrs);
    // If a podCIDR is not in the ranges of its pool, the podCIDR itself is written as the network.
    let is_outside = !ranges.iter().any(|it| it.contains(&block.cidr));
    let network = if is_outside { &[block.cidr] } else { ranges };
    let network: Vec<String> = network.iter().map(ToString::to_string).collect();
    Some((network.join(","), block.cidr))
}

fn first_usable(range: &Cidr) -> Addr {
    let first = range.first();
    if range.size() < 2 {
        return first;
    }
    Addr {
        value: first.value + 1,
        ..first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::testing::{allocation, range};
    use cadastre_core::node_allocation::FamilyTerms;

    const LINKS: Links = Links {
        mtu: 1450,
        ip_masq: true,
    };

    fn cidr(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    fn terms(cidrs: &[&str]) -> FamilyTerms {
        FamilyTerms {
            cidrs: cidrs.iter().map(|it| cidr(it)).collect(),
            ..FamilyTerms::default()
        }
    }

    #[test]
    fn both_families_are_written_in_flannel_s_order() {
        let mut it = allocation(&["10.9.0.0/26"]);
        it.blocks.push(range("10.244.3.0/24", "node"));
        it.blocks.push(range("fd00:244:0:3::/64", "node"));
        it.pools[0].ipv4 = Some(terms(&["10.244.0.0/16"]));
        it.pools[0].ipv6 = Some(terms(&["fd00:244::/48"]));
        assert_eq!(
            render(&it, LINKS).unwrap(),
            "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\n\
             FLANNEL_IPV6_NETWORK=fd00:244::/48\nFLANNEL_IPV6_SUBNET=fd00:244:0:3::1/64\n\
             FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
        );
    }

    #[test]
    fn every_line_has_a_key_and_a_value() {
        let mut it = allocation(&[]);
        it.blocks.push(range("10.244.3.0/24", "node"));
        it.pools[0].ipv4 = Some(terms(&["10.244.0.0/16", "10.250.0.0/16"]));
        let text = render(&it, LINKS).unwrap();
        assert!(text.starts_with("FLANNEL_NETWORK=10.244.0.0/16,10.250.0.0/16\n"));
        assert!(!text.contains("IPV6"));
        assert!(text.lines().all(|line| {
            line.split_once('=')
                .is_some_and(|(key, value)| key.starts_with("FLANNEL_") && !value.is_empty())
        }));
        it.blocks[0].pool = String::new();
        let alone = render(&it, LINKS).unwrap();
        assert!(alone.starts_with("FLANNEL_NETWORK=10.244.3.0/24\n"));
    }

    #[test]
    fn nothing_is_rendered_without_a_pod_cidr() {
        assert_eq!(render(&allocation(&["10.0.0.0/26"]), LINKS), None);
    }
}
