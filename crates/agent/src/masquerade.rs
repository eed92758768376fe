//! Masquerades traffic of pods: packets that pods send out of the cluster leave with the node's address. Packets
//! between pods keep the pod's address.
//!
//! A main CNI plugin such as `ptp` exempts only destinations in the prefix of the pod's own address from masquerading.
//! Only the agent knows the ranges of all pools, including pools that serve other nodes, and learns of their changes.
//! So the agent writes the rule, into the nftables tables `ip cadastre` and `ip6 cadastre`. Each table is replaced as a
//! whole. The agent neither reads nor writes other tables.
//!
//! ```text
//! table ip cadastre {
//!     set pod-ranges { type ipv4_addr; flags interval; }
//!     chain postrouting {
//!         type nat hook postrouting priority srcnat;
//!         ip saddr @pod-ranges ip daddr != @pod-ranges masquerade fully-random
//!     }
//! }
//! ```
//!
//! # Guarantees
//! - The tables stay when the agent ends. If they are deleted, the agent restores them within a minute.
//! - Existing tables stay unchanged until the agent has read the ranges of the pools from the API.

mod netlink;
mod nftables;

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use tracing::{info, warn};

use super::snapshot::pool_cidrs;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_core::{Addr, Cidr, Family};

/// A table that was deleted is restored within this time.
const CHECK_PAUSE: Duration = Duration::from_secs(60);

/// The first and last address of a run of adjacent ranges.
type Run = (Addr, Addr);

/// The nftables tables as the agent last wrote them.
#[derive(Debug, Default)]
pub(crate) struct Masquerade {
    written: BTreeMap<Family, Vec<Run>>,
    next_check: Duration,
    trouble: Option<String>,
}

impl Masquerade {
    /// Writes the tables that are out of date. Returns an error if packets are not masqueraded as they should be.
    /// `pod_ranges` are the ranges of all pools, as in the NodeSubnet; `None` until the NodeSubnet has been read.
    pub(crate) fn refresh(
        &mut self,
        pod_ranges: Option<&[String]>,
        holding: &NodeAllocation,
        now: Duration,
    ) -> Option<String> {
        let wanted = exempt(pod_ranges.unwrap_or_default(), holding);
        let is_current = pod_ranges.is_none() || wanted == self.written;
        if self.trouble.is_none() && is_current && now < self.next_check {
            return None;
        }
        self.next_check = now + CHECK_PAUSE;
        let mut trouble = None;
        for (family, runs) in wanted {
            let is_written = self.written.get(&family) == Some(&runs);
            let only_if_absent = is_written || pod_ranges.is_none();
            match nftables::put(family, &runs, only_if_absent) {
                Ok(changed) => {
                    if changed {
                        info!(%family, ranges = runs.len(), "masquerades what pods send elsewhere");
                    }
                    if pod_ranges.is_some() {
                        self.written.insert(family, runs);
                    }
                }
                Err(error) => trouble = Some(explain(family, &error)),
            }
        }
        if let Some(text) = &trouble
            && self.trouble != trouble
        {
            warn!("{text}");
        }
        self.trouble.clone_from(&trouble);
        trouble
    }
}

fn explain(family: Family, error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied => ": give the agent the capability NET_ADMIN",
        io::ErrorKind::NotFound | io::ErrorKind::Unsupported => {
            ": the kernel needs nf_tables with nat and masquerade (Linux 5.2)"
        }
        _ => "",
    };
    format!(
        "--masquerade: cannot write the nftables table of {family}: {error}{advice}; or masquerade by other means, without --masquerade"
    )
}

/// Returns, for each family, the ranges between which packets are not masqueraded. The ranges are merged and sorted,
/// and families without ranges are left out. These are the ranges of all pools, the node's own pools and blocks, and
/// multicast. Multicast addresses matter only as destinations.
fn exempt(pod_ranges: &[String], holding: &NodeAllocation) -> BTreeMap<Family, Vec<Run>> {
    let parse = |it: &str| Cidr::parse_strict(it).ok();
    let of_cluster = pod_ranges.iter().filter_map(|it| parse(it));
    let of_node = holding.blocks.iter().map(|it| it.cidr);
    let mut all: Vec<Cidr> = of_cluster
        .chain(of_node)
        .chain(pool_cidrs(holding))
        .collect();
    let families = Family::ALL.into_iter();
    let families: Vec<Family> = families
        .filter(|family| all.iter().any(|it| it.family() == *family))
        .collect();
    all.extend(["224.0.0.0/4", "ff00::/8"].into_iter().filter_map(parse));
    all.sort();
    let runs = |family| {
        let mut runs: Vec<Run> = Vec::new();
        for cidr in all.iter().filter(|it| it.family() == family) {
            let (first, last) = (cidr.first(), cidr.last());
            match runs.last_mut() {
                // Adjacent ranges are merged. Otherwise the end of one range and the start of the next range would have
                // the same key in the set.
                Some(run) if first.value <= run.1.value.saturating_add(1) => {
                    run.1.value = run.1.value.max(last.value);
                }
                _ => runs.push((first, last)),
            }
        }
        (family, runs)
    };
    families.into_iter().map(runs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::testing::range;

    #[test]
    fn ranges_of_pools_and_blocks_and_multicast_are_exempt_and_adjacent_ranges_are_merged() {
        let holding = NodeAllocation {
            blocks: ["10.1.2.0/26", "10.9.0.0/26"]
                .map(|it| range(it, "u"))
                .to_vec(),
            ..NodeAllocation::default()
        };
        let of_cluster = ["10.0.0.0/16", "10.1.0.0/16", "what?"].map(str::to_owned);
        let all = exempt(&of_cluster, &holding);
        let texts: Vec<String> = all[&Family::V4]
            .iter()
            .map(|(first, last)| format!("{first}-{last}"))
            .collect();
        assert_eq!(
            texts,
            [
                "10.0.0.0-10.1.255.255",
                "10.9.0.0-10.9.0.63",
                "224.0.0.0-239.255.255.255"
            ]
        );
        assert!(!all.contains_key(&Family::V6), "the node has no IPv6 pods");
        let both = exempt(&["fd00::/64".to_owned()], &holding);
        assert_eq!(both[&Family::V6].len(), 2);
    }
}
