//! Masquerading: packets that pods send out of the cluster leave with the node's address. Packets between pods keep the
//! pod's address.
//!
//! The main CNI plugins exempt only the prefix of one address from masquerading. Only the agent knows the ranges of all
//! pools, including pools that serve other nodes, and follows their changes. So the agent keeps the rule in nftables
//! tables of its own, named `cadastre`, of the families `ip` and `ip6`. A table is replaced as a whole. No other table
//! is read or written.
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
//! - Until the agent has read the ranges of the pools from the API, existing tables stay as they are.

mod netlink;
mod nftables;

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use tracing::{info, warn};

use cadastre_core::node_allocation::NodeAllocation;
use cadastre_core::{Addr, Cidr, Family};

/// A table that was deleted is restored within this time.
const CHECK_PAUSE: Duration = Duration::from_secs(60);
const RETRY_PAUSE: Duration = Duration::from_secs(5);

/// The first and last address of a run of adjacent ranges.
type Run = (Addr, Addr);

/// The tables as they were written last.
#[derive(Debug, Default)]
pub(crate) struct Masquerade {
    written: BTreeMap<Family, Vec<Run>>,
    next_check: Duration,
    trouble: Option<String>,
}

impl Masquerade {
    /// Returns why packets are not masqueraded as they should be.
    pub(crate) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Writes the tables that are out of date. `pod_ranges` are the ranges of all pools as in the NodeSubnet; `None`
    /// until the NodeSubnet has been read.
    pub(crate) fn refresh(
        &mut self,
        pod_ranges: Option<&[String]>,
        holding: &NodeAllocation,
        now: Duration,
    ) {
        let wanted = spared(pod_ranges.unwrap_or_default(), holding);
        let is_overdue = self.next_check <= now;
        if !is_overdue && (self.trouble.is_some() || pod_ranges.is_none() || wanted == self.written)
        {
            return;
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
        if let Some(text) = &trouble {
            self.next_check = now + RETRY_PAUSE;
            if self.trouble != trouble {
                warn!("{text}");
            }
        }
        self.trouble = trouble;
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

/// Returns the ranges between which packets are not masqueraded, merged and sorted, for each family of which there are
/// any. These are the ranges of all pools, of the node's own pools and blocks, and multicast, which is never a source.
fn spared(pod_ranges: &[String], holding: &NodeAllocation) -> BTreeMap<Family, Vec<Run>> {
    let told = pod_ranges
        .iter()
        .filter_map(|it| Cidr::parse_strict(it).ok());
    let own = holding.blocks.iter().map(|it| it.cidr);
    let sides = |family| holding.pools.iter().filter_map(move |it| it.family(family));
    let of_pools = Family::ALL
        .into_iter()
        .flat_map(sides)
        .flat_map(|side| side.cidrs.iter().copied());
    let mut all: Vec<Cidr> = told.chain(own).chain(of_pools).collect();
    let families: Vec<Family> = Family::ALL
        .into_iter()
        .filter(|family| all.iter().any(|it| it.family() == *family))
        .collect();
    all.extend(
        ["224.0.0.0/4", "ff00::/8"]
            .iter()
            .filter_map(|it| Cidr::parse_strict(it).ok()),
    );
    all.sort();
    let runs = |family| {
        let mut runs: Vec<Run> = Vec::new();
        for cidr in all.iter().filter(|it| it.family() == family) {
            let (first, last) = (cidr.first(), cidr.last());
            match runs.last_mut() {
                // Adjacent ranges are merged, because the end of one and the start of the next would have the same key
                // in the set.
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
    use cadastre_core::node_allocation::Block;

    #[test]
    fn all_pools_the_nodes_own_blocks_and_multicast_are_spared_and_neighbours_are_one_range() {
        let block = |cidr: &str| Block {
            cidr: Cidr::parse_strict(cidr).unwrap(),
            uid: "u".to_owned(),
            pool: "p".to_owned(),
            draining: true,
            reserved: Vec::new(),
            on_request: Vec::new(),
        };
        let holding = NodeAllocation {
            blocks: vec![block("10.1.2.0/26"), block("10.9.0.0/26")],
            ..NodeAllocation::default()
        };
        let told = ["10.0.0.0/16", "10.1.0.0/16", "what?"].map(str::to_owned);
        let all = spared(&told, &holding);
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
        assert!(!all.contains_key(&Family::V6), "the node has no such pods");
        let both = spared(&["fd00::/64".to_owned()], &holding);
        assert_eq!(both[&Family::V6].len(), 2);
    }
}
