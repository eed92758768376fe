//! Which addresses pods report, by address.
//!
//! Only pods that may still use an address are kept (see [`Pod::addresses`]), so that the index is
//! small and answers the one question asked of it: does any pod have an address in this range?

use std::collections::{BTreeMap, BTreeSet};

use super::addresses::Addresses;
use super::seen::{Change, Pod, Text};
use crate::ipam::{Addr, Cidr};

/// Addresses of pods.
#[derive(Debug, Default)]
pub struct PodIndex {
    by_uid: BTreeMap<Text, Box<[Addr]>>,
    reported: Addresses,
    unseen: Option<BTreeSet<Text>>,
    listed: bool,
}

impl PodIndex {
    /// Whether a list has been completed since the start.
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// Takes in one step of the watch; returns whether any address is no longer reported.
    pub fn change(&mut self, change: Change<Pod>) -> bool {
        match change {
            Change::Restarted { .. } => {
                self.unseen = Some(self.by_uid.keys().cloned().collect());
                false
            }
            Change::Applied(pod) => {
                if let Some(unseen) = &mut self.unseen {
                    unseen.remove(&pod.uid);
                }
                self.put(pod)
            }
            Change::Listed => {
                self.listed = true;
                let gone = self.unseen.take().unwrap_or_default();
                gone.iter().filter(|uid| self.remove(uid)).count() > 0
            }
            Change::Deleted(pod) => self.remove(&pod.uid),
        }
    }

    /// The lowest address in the range that a pod reports.
    pub fn any_in(&self, range: &Cidr) -> Option<Addr> {
        self.reported.within(range).next()
    }

    /// How many pods with addresses are known.
    pub fn len(&self) -> usize {
        self.by_uid.len()
    }

    /// Whether no pod has an address.
    pub fn is_empty(&self) -> bool {
        self.by_uid.is_empty()
    }

    fn put(&mut self, pod: Pod) -> bool {
        if self
            .by_uid
            .get(&pod.uid)
            .is_some_and(|known| *known == pod.addresses)
        {
            return false;
        }
        let freed = self.remove(&pod.uid);
        if !pod.addresses.is_empty() {
            self.reported.add(&pod.addresses);
            self.by_uid.insert(pod.uid, pod.addresses);
        }
        freed
    }

    fn remove(&mut self, uid: &str) -> bool {
        let Some(addresses) = self.by_uid.remove(uid) else {
            return false;
        };
        self.reported.remove(&addresses);
        !addresses.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, addresses: &[&str]) -> Pod {
        let addr = |text: &&str| Addr::from(text.parse::<std::net::IpAddr>().unwrap());
        Pod {
            name: uid.into(),
            uid: uid.into(),
            version: 1,
            addresses: addresses.iter().map(addr).collect(),
        }
    }

    fn range(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    #[test]
    fn an_address_counts_until_its_last_pod_is_gone() {
        let mut pods = PodIndex::default();
        pods.change(Change::Applied(pod("a", &["10.0.1.7"])));
        pods.change(Change::Applied(pod("b", &["10.0.1.7", "fd00::7"])));
        assert!(pods.any_in(&range("10.0.1.0/24")).is_some());
        assert!(pods.any_in(&range("10.0.2.0/24")).is_none());
        pods.change(Change::Deleted(pod("a", &[])));
        assert!(pods.any_in(&range("10.0.1.0/24")).is_some());
        assert!(pods.change(Change::Applied(pod("b", &["fd00::7"]))));
        assert!(pods.any_in(&range("10.0.1.0/24")).is_none());
        assert!(pods.any_in(&range("fd00::/64")).is_some());
    }

    #[test]
    fn a_relist_drops_what_it_does_not_name() {
        let mut pods = PodIndex::default();
        pods.change(Change::Applied(pod("a", &["10.0.1.7"])));
        pods.change(Change::Restarted {
            asked: std::time::Duration::ZERO,
        });
        assert!(
            pods.any_in(&range("10.0.1.0/24")).is_some(),
            "known until the list is complete"
        );
        assert!(pods.change(Change::Listed));
        assert!(pods.is_listed() && pods.is_empty());
    }
}
