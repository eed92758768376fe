//! Cache of pods and the addresses that they report.
//!
//! The cache answers two questions: does any pod report an address in a given range, and does the pod with a given UID
//! still exist? Each pod takes a few dozen bytes.
//!
//! If a pod's annotations name or require a claim, the pod uses this claim. A pod without such annotations uses a claim
//! if CNI requests addresses for the pod. The agent of the pod's node reports such a request, and the claim that is
//! created for the request records it, too ([`address_requests`](super::address_requests)).
//!
//! A kubelet can create any number of mirror pods of static pods, with any addresses. An address that counts for a
//! range keeps the range from being freed or allocated. So the addresses of a node's mirror pods do not count for
//! ranges of other nodes. All these addresses count for ranges that this node has or had. For ranges that no node has,
//! at most `MOST_OF_MIRRORS` addresses of each node's mirror pods count.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::address_requests::{AddressRequests, RequestSource, RequestedPod};
use super::addresses::Addresses;
use super::names::{ClaimName, NodeName};
use super::objects::{AddressRequest, Evictable, Pod, PodClaim, PodUid};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};
use cadastre_daemon::watch::ObjectEvent;

/// At most this many addresses of each node's mirror pods count for ranges that no node has. Few are enough, because
/// static pods nearly always use the host's network and have no address of their own.
const MOST_OF_MIRRORS: usize = 16;

/// All pods by UID, with their addresses.
#[derive(Clone, Debug, Default)]
pub struct PodIndex {
    by_uid: BTreeMap<PodUid, Record>,
    reported: Addresses,
    /// For each node, the addresses of its mirror pods
    mirrors: BTreeMap<NodeName, BTreeMap<PodUid, Box<[Addr]>>>,
    /// The addresses that CNI requests for pods. The annotations of the pods do not contain these requests
    requests: AddressRequests,
    /// For each claim, the pods that use it
    claiming: BTreeMap<ClaimName, BTreeSet<PodUid>>,
    /// Claims whose pods have changed since [`PodIndex::take_claims`] was last called
    changed_claims: BTreeSet<ClaimName>,
    unserved: Unserved,
    unseen: Option<BTreeSet<PodUid>>,
    listed: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Record {
    claim: Option<Box<PodClaim>>,
    /// Data by which the requests of CNI for this pod are found; `None` if the pod cannot use a claim
    requested: Option<RequestedPod>,
    finished: bool,
    needs_default: bool,
    addresses: Box<[Addr]>,
    /// What most pods lack; `None` if the pod has nothing of it. A cluster can have a million pods
    rare: Option<Box<Rare>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Rare {
    /// The claims of the pod's interfaces
    interface_claims: Box<[PodClaim]>,
    evictable: Option<Evictable>,
    mirror_of: Option<NodeName>,
}

impl Record {
    fn interface_claims(&self) -> &[PodClaim] {
        self.rare.as_ref().map_or(&[], |it| &it.interface_claims)
    }

    fn evictable(&self) -> Option<&Evictable> {
        self.rare.as_ref()?.evictable.as_ref()
    }

    fn mirror_of(&self) -> Option<&NodeName> {
        self.rare.as_ref()?.mirror_of.as_ref()
    }

    /// Returns the claim that the pod uses itself, and the claims of its interfaces.
    fn claims(&self) -> impl Iterator<Item = &PodClaim> {
        let own = self.claim.iter().map(AsRef::as_ref);
        own.chain(self.interface_claims())
    }

    /// Returns the node of the pod, if the pod waits for an address of a pool that serves by default. Returns `None` if
    /// the pod has addresses, uses a claim, or names pools.
    fn waits_on(&self) -> Option<&NodeName> {
        let is_waiting = !self.finished && self.addresses.is_empty();
        let is_by_default = self.claim.is_none() && self.needs_default;
        let requested = self.requested.as_ref()?;
        (is_waiting && is_by_default).then(|| requested.node())
    }
}

/// Pods that wait for an address of a pool that serves by default. These pods use no claim and name no pools.
#[derive(Clone, Debug, Default)]
struct Unserved {
    /// The waiting pods, by the node to which they are bound
    by_node: BTreeMap<NodeName, BTreeSet<PodUid>>,
    /// Nodes whose pods have changed since [`PodIndex::take_nodes`] was last called
    changed: BTreeSet<NodeName>,
}

impl Unserved {
    fn add(&mut self, uid: PodUid, record: &Record) {
        if let Some(node) = record.waits_on() {
            let of_node = self.by_node.entry(node.clone()).or_default();
            of_node.insert(uid);
        }
        self.note(record);
    }

    fn remove(&mut self, uid: PodUid, record: &Record) {
        if let Some(node) = record.waits_on()
            && let Some(of_node) = self.by_node.get_mut(node)
        {
            of_node.remove(&uid);
            if of_node.is_empty() {
                self.by_node.remove(node);
            }
        }
        self.note(record);
    }

    fn note(&mut self, record: &Record) {
        if let Some(pod) = &record.requested
            && !self.changed.contains(pod.node())
        {
            self.changed.insert(pod.node().clone());
        }
    }
}

impl PodIndex {
    /// Returns whether a list has been completed since the start.
    pub(crate) fn is_listed(&self) -> bool {
        self.listed
    }

    /// Returns whether all pods are known: a list has been completed, and no list is running.
    pub fn is_complete(&self) -> bool {
        self.listed && self.unseen.is_none()
    }

    /// Applies a watch event. Returns whether a pod that reported addresses has changed or is gone, so that perhaps no
    /// pod reports one of these addresses any more.
    pub fn change(&mut self, change: ObjectEvent<Pod>) -> bool {
        match change {
            ObjectEvent::Restarted { .. } => {
                self.unseen = Some(self.by_uid.keys().copied().collect());
                false
            }
            ObjectEvent::Applied(pod) => {
                let uid = PodUid::read(&pod.uid);
                if let Some(unseen) = &mut self.unseen {
                    unseen.remove(&uid);
                }
                self.put(uid, pod)
            }
            ObjectEvent::Listed => {
                self.listed = true;
                let gone = self.unseen.take().unwrap_or_default();
                gone.iter().filter(|uid| self.forget(**uid)).count() > 0
            }
            ObjectEvent::Deleted(pod) => self.forget(PodUid::read(&pod.uid)),
            ObjectEvent::Reached(_) => false,
        }
    }

    /// Returns the lowest address that a pod reports in the range. Mirror pods do not count.
    pub(crate) fn any_in(&self, range: &Cidr) -> Option<Addr> {
        self.reported.within(range).next()
    }

    /// Returns an address that a pod reports in a range that the node has or had. The node's own mirror pods count, but
    /// mirror pods of other nodes do not.
    pub(crate) fn any_in_range_of(&self, node: &NodeName, range: &Cidr) -> Option<Addr> {
        self.all_in_range_of(node, range).next()
    }

    /// Returns the addresses that pods report in a range that the node has or had. The node's own mirror pods count,
    /// but mirror pods of other nodes do not.
    pub(crate) fn all_in_range_of(
        &self,
        node: &NodeName,
        range: &Cidr,
    ) -> impl Iterator<Item = Addr> {
        let mirrors = self.mirrors.get(node).into_iter();
        let of_mirrors = mirrors.flat_map(BTreeMap::values).flatten().copied();
        let of_mirrors = of_mirrors.filter(|addr| range.contains_addr(*addr));
        self.reported.within(range).chain(of_mirrors)
    }

    /// Returns an address that a pod reports in a range that no node has. At most [`MOST_OF_MIRRORS`] addresses of each
    /// node's mirror pods count.
    pub(crate) fn any_in_free(&self, range: &Cidr) -> Option<Addr> {
        let all = self.mirrors.values();
        let mut few = all.flat_map(|of_node| of_node.values().flatten().take(MOST_OF_MIRRORS));
        let of_mirror = || few.find(|addr| range.contains_addr(**addr)).copied();
        self.any_in(range).or_else(of_mirror)
    }

    /// Returns how many different addresses of the range are reported by pods other than mirror pods.
    pub fn count_in(&self, range: &Cidr) -> usize {
        self.reported.within(range).count()
    }

    /// Returns whether a pod reports this address, which lies in a range of the node. The node's own mirror pods count,
    /// but mirror pods of other nodes do not.
    pub fn reports(&self, node: &NodeName, addr: Addr) -> bool {
        self.any_in_range_of(node, &Cidr::host(addr)).is_some()
    }

    /// Returns whether the pod of that UID exists and has not finished.
    pub fn is_live(&self, uid: PodUid) -> bool {
        self.by_uid.get(&uid).is_some_and(|record| !record.finished)
    }

    /// Returns the pods that use the claim and have not finished, the oldest first.
    pub fn of_claim(&self, claim: &ClaimName) -> Vec<&PodClaim> {
        let uids = self.claiming.get(claim).into_iter().flatten();
        let records = uids.filter_map(|uid| Some((uid, self.by_uid.get(uid)?)));
        let live = records.filter(|(_, record)| !record.finished);
        let mut pods: Vec<(i64, PodUid, &PodClaim)> = live
            .filter_map(|(uid, record)| Some((uid, record.claims().find(|it| it.claim == *claim)?)))
            .map(|(uid, pod)| (pod.created, *uid, pod))
            .collect();
        pods.sort_unstable_by_key(|(created, uid, _)| (*created, *uid));
        pods.into_iter().map(|(_, _, pod)| pod).collect()
    }

    /// Returns the claim that the pod of this UID uses, even if the pod has finished.
    pub fn claim_of(&self, uid: PodUid) -> Option<&PodClaim> {
        self.by_uid.get(&uid)?.claim.as_deref()
    }

    /// Returns the claims that the pod of this UID uses for its interfaces, even if the pod has finished.
    pub fn interface_claims_of(&self, uid: PodUid) -> &[PodClaim] {
        self.by_uid.get(&uid).map_or(&[], Record::interface_claims)
    }

    /// Returns the claims that pods use.
    pub(crate) fn claims(&self) -> impl Iterator<Item = &ClaimName> {
        self.claiming.keys()
    }

    /// Updates the requests from one source, which were `before` and are now `after`. Also updates which claims the
    /// affected pods use.
    pub(crate) fn change_requests(
        &mut self,
        source: &RequestSource,
        before: &[AddressRequest],
        after: &[AddressRequest],
    ) {
        if before == after {
            return;
        }
        for uid in self.requests.change(source, before, after) {
            self.update_claim(uid);
        }
    }

    /// Updates which claim a pod uses, because the requests of CNI for the pod have changed.
    fn update_claim(&mut self, uid: PodUid) {
        let Some(record) = self.by_uid.get_mut(&uid) else {
            return;
        };
        let is_own = |it: &PodClaim| !it.is_by_cni();
        if record.claim.as_deref().is_some_and(is_own) {
            return;
        }
        let has_addresses = !record.addresses.is_empty();
        let requested = record.requested.as_ref();
        let claim = requested.and_then(|pod| self.requests.claim_of(uid, pod, has_addresses));
        if record.claim != claim {
            self.unserved.remove(uid, record);
            let before = std::mem::replace(&mut record.claim, claim.clone());
            self.unserved.add(uid, record);
            if let Some(before) = before {
                self.unlink(uid, &before.claim);
            }
            if let Some(claim) = claim {
                self.link(uid, &claim.claim);
            }
        }
    }

    /// Returns the claims whose pods have changed since this function was last called.
    pub(crate) fn take_claims(&mut self) -> BTreeSet<ClaimName> {
        std::mem::take(&mut self.changed_claims)
    }

    /// Returns the nodes whose pods have changed since this function was last called.
    pub(crate) fn take_nodes(&mut self) -> BTreeSet<NodeName> {
        std::mem::take(&mut self.unserved.changed)
    }

    /// Returns how many pods of the node wait for an address of a pool that serves by default.
    pub fn unserved(&self, node: &NodeName) -> usize {
        self.unserved.by_node.get(node).map_or(0, BTreeSet::len)
    }

    /// Returns the pods of the node that wait for an address and can be evicted, the newest first.
    pub(crate) fn evictable(&self, node: &NodeName) -> Vec<&Evictable> {
        let of_node = self.unserved.by_node.get(node).into_iter().flatten();
        let records = of_node.filter_map(|uid| self.by_uid.get(uid)?.evictable());
        let mut pods: Vec<&Evictable> = records.collect();
        pods.sort_unstable_by_key(|it| Reverse((it.created, &it.name)));
        pods
    }

    /// Returns the addresses that several pods report. Mirror pods do not count.
    pub fn doubled(&self) -> &BTreeSet<Addr> {
        self.reported.doubled()
    }

    /// Returns the number of known pods, including finished ones.
    pub fn len(&self) -> usize {
        self.by_uid.len()
    }

    /// Returns whether no pod is known, not even a finished one.
    pub fn is_empty(&self) -> bool {
        self.by_uid.is_empty()
    }

    fn put(&mut self, uid: PodUid, pod: Pod) -> bool {
        let requested = pod.node.map(|node| self.requests.pod(&pod.name, node));
        let has_addresses = !pod.addresses.is_empty();
        let by_cni = |pod| self.requests.claim_of(uid, pod, has_addresses);
        let claim = pod.claim.or_else(|| by_cni(requested.as_ref()?));
        let is_waiting = !pod.finished && pod.addresses.is_empty() && requested.is_some();
        let replaceable = pod.replaceable.filter(|_| is_waiting);
        let evictable = replaceable.map(|created| Evictable {
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            version: pod.version,
            created,
        });
        let rare = Rare {
            interface_claims: pod.interface_claims,
            evictable,
            mirror_of: pod
                .mirror_of
                .filter(|_| !Mutation::MirrorPodsBelieved.is_on()),
        };
        let record = Record {
            claim,
            requested,
            finished: pod.finished,
            needs_default: pod.needs_default,
            addresses: pod.addresses,
            rare: (rare != Rare::default()).then(|| Box::new(rare)),
        };
        if self.by_uid.get(&uid) == Some(&record) {
            self.forget_requested(record.requested.as_ref());
            return false;
        }
        let freed = self.forget(uid);
        match record.mirror_of() {
            None => self.reported.add(&self.not_shared(&record)),
            Some(_) if record.addresses.is_empty() => {}
            Some(node) => {
                let of_node = self.mirrors.entry(node.clone()).or_default();
                of_node.insert(uid, record.addresses.clone());
            }
        }
        for claim in record.claims() {
            self.link(uid, &claim.claim);
        }
        self.unserved.add(uid, &record);
        self.by_uid.insert(uid, record);
        freed
    }

    /// Returns the addresses of a pod that is not in the index yet. Addresses that another pod of the same virtual
    /// machine reports are left out, so that the address of a migrating virtual machine counts once.
    fn not_shared(&self, record: &Record) -> Box<[Addr]> {
        let claim = record.claim.as_deref();
        let Some((claim, vmi)) = claim.and_then(|it| Some((&it.claim, it.vmi()?))) else {
            return record.addresses.clone();
        };
        let others = self.claiming.get(claim).into_iter().flatten();
        let others = others.filter_map(|uid| self.by_uid.get(uid));
        let is_same = |it: &&Record| it.claim.as_ref().and_then(|it| it.vmi()) == Some(vmi);
        let others: Vec<&Record> = others.filter(is_same).collect();
        let has = |addr: &Addr| others.iter().any(|it| it.addresses.contains(addr));
        let own = record.addresses.iter().filter(|addr| !has(addr));
        own.copied().collect()
    }

    fn link(&mut self, uid: PodUid, claim: &ClaimName) {
        self.changed_claims.insert(claim.clone());
        let of_claim = self.claiming.entry(claim.clone()).or_default();
        of_claim.insert(uid);
    }

    fn unlink(&mut self, uid: PodUid, claim: &ClaimName) {
        self.changed_claims.insert(claim.clone());
        if let Some(of_claim) = self.claiming.get_mut(claim) {
            of_claim.remove(&uid);
            if of_claim.is_empty() {
                self.claiming.remove(claim);
            }
        }
    }

    fn forget_requested(&mut self, pod: Option<&RequestedPod>) {
        if let Some(pod) = pod {
            self.requests.forget(pod);
        }
    }

    fn forget(&mut self, uid: PodUid) -> bool {
        let Some(record) = self.by_uid.remove(&uid) else {
            return false;
        };
        for claim in record.claims() {
            self.unlink(uid, &claim.claim);
        }
        self.unserved.remove(uid, &record);
        self.forget_requested(record.requested.as_ref());
        match record.mirror_of() {
            None => self.reported.remove(&self.not_shared(&record)),
            Some(node) => {
                if let Some(of_node) = self.mirrors.get_mut(node) {
                    of_node.remove(&uid);
                    if of_node.is_empty() {
                        self.mirrors.remove(node);
                    }
                }
            }
        }
        !record.addresses.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::VirtualMachine;
    use crate::fixtures::claiming_pod;

    fn pod(uid: &str, addresses: &[&str]) -> Pod {
        let addr = |text: &&str| Addr::from(text.parse::<std::net::IpAddr>().unwrap());
        Pod {
            name: uid.into(),
            uid: uid.into(),
            version: 1,
            finished: false,
            addresses: addresses.iter().map(addr).collect(),
            mirror_of: None,
            node: None,
            needs_default: true,
            replaceable: None,
            claim: None,
            interface_claims: Box::default(),
        }
    }

    #[test]
    fn mirror_pods_count_against_what_their_node_had_and_a_few_against_free_space() {
        let mirror = |uid: &str, address: &str| Pod {
            mirror_of: Some("liar".into()),
            ..pod(uid, &[address])
        };
        let mut pods = PodIndex::default();
        for last in 0..200 {
            let of_uid = format!("{last:03}");
            pods.change(ObjectEvent::Applied(mirror(
                &of_uid,
                &format!("10.0.1.{last}"),
            )));
        }
        pods.change(ObjectEvent::Applied(pod("honest", &["10.0.1.199"])));
        let all = range("10.0.1.0/24");
        assert_eq!(pods.any_in(&all).unwrap().to_string(), "10.0.1.199");
        assert!(pods.doubled().is_empty());
        assert_eq!(pods.count_in(&all), 1);
        let late = range("10.0.1.16/28");
        let hosts = (0..199).map(|last| range(&format!("10.0.1.{last}/32")));
        let counts = hosts.filter(|host| pods.any_in_free(host).is_some());
        let few = counts.count();
        assert!((15..=16).contains(&few), "{few}");
        assert_eq!(pods.any_in_range_of(&"victim".into(), &late), None);
        assert!(pods.any_in_range_of(&"liar".into(), &late).is_some());
        assert!(
            pods.reports(&"liar".into(), late.first())
                && !pods.reports(&"victim".into(), late.first())
        );
        assert!(pods.is_live(PodUid::read("020")));
        for last in 0..200 {
            let gone = mirror(&format!("{last:03}"), "10.0.1.1");
            assert!(pods.change(ObjectEvent::Deleted(gone)));
        }
        assert_eq!(pods.any_in_range_of(&"liar".into(), &late), None);
        assert!(pods.mirrors.is_empty());
    }

    fn range(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    #[test]
    fn the_address_of_a_virtual_machine_that_migrates_counts_once() {
        let of_machine = |name: &str, vmi: &str| {
            let mut pod = Pod {
                addresses: pod("", &["10.0.1.7"]).addresses,
                ..claiming_pod(name, "default/vm", Some("n"))
            };
            let machine = VirtualMachine {
                vmi: vmi.into(),
                is_migrated_to: false,
            };
            if let Some(claim) = &mut pod.claim {
                claim.machine = Some(Box::new(machine));
            }
            pod
        };
        let mut pods = PodIndex::default();
        let (source, target) = (of_machine("source", "v"), of_machine("target", "v"));
        for pod in [&source, &target] {
            pods.change(ObjectEvent::Applied(pod.clone()));
        }
        assert!(pods.doubled().is_empty());
        let other = of_machine("other", "w");
        pods.change(ObjectEvent::Applied(other.clone()));
        assert_eq!(pods.doubled().len(), 1, "another machine");
        pods.change(ObjectEvent::Deleted(other));
        assert!(pods.doubled().is_empty());
        pods.change(ObjectEvent::Deleted(source));
        assert!(pods.any_in(&range("10.0.1.7/32")).is_some());
        pods.change(ObjectEvent::Deleted(target));
        assert!(pods.any_in(&range("10.0.1.7/32")).is_none());
    }

    #[test]
    fn an_address_counts_until_its_last_pod_is_gone() {
        let mut pods = PodIndex::default();
        pods.change(ObjectEvent::Applied(pod("a", &["10.0.1.7"])));
        pods.change(ObjectEvent::Applied(pod("b", &["10.0.1.7", "fd00::7"])));
        assert!(pods.any_in(&range("10.0.1.0/24")).is_some());
        assert!(pods.any_in(&range("10.0.2.0/24")).is_none());
        assert_eq!(pods.doubled().len(), 1);
        pods.change(ObjectEvent::Deleted(pod("a", &[])));
        assert!(pods.doubled().is_empty());
        assert!(pods.any_in(&range("10.0.1.0/24")).is_some());
        assert!(pods.change(ObjectEvent::Applied(pod("b", &["fd00::7"]))));
        assert!(pods.any_in(&range("10.0.1.0/24")).is_none());
        assert_eq!(pods.count_in(&range("fd00::/64")), 1);
    }

    #[test]
    fn a_relist_drops_what_it_does_not_name() {
        let mut pods = PodIndex::default();
        pods.change(ObjectEvent::Applied(pod("a", &["10.0.1.7"])));
        assert!(!pods.is_complete());
        pods.change(ObjectEvent::Restarted {
            asked: std::time::Duration::ZERO,
        });
        assert!(
            pods.any_in(&range("10.0.1.0/24")).is_some(),
            "known until the list is complete"
        );
        assert!(pods.change(ObjectEvent::Listed));
        assert!(pods.is_complete() && pods.is_empty());
    }

    #[test]
    fn a_pod_lives_until_it_has_finished_or_is_gone() {
        let mut pods = PodIndex::default();
        let uid = PodUid::read("a");
        assert!(!pods.is_live(uid), "never seen");
        pods.change(ObjectEvent::Applied(pod("a", &[])));
        assert!(pods.is_live(uid), "without an address as well");
        let finished = Pod {
            finished: true,
            ..pod("a", &[])
        };
        pods.change(ObjectEvent::Applied(finished));
        assert!(!pods.is_live(uid) && pods.len() == 1);
    }
}
