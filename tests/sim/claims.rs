//! Claims: the addresses of a claim go to pods that name the claim, and to no other pods.
//!
//! Users create and delete claims. Some of these claims are for addresses that the user chooses. Users also create and
//! delete pods that name claims. Several pods may name one claim, on one node or on several.
//!
//! The pods of a StatefulSet come and go on all nodes under the same few names. The controller creates their claims,
//! unless users have done so. It deletes some of these claims some time after their use.
//!
//! Other pods ask for certain addresses, which are in blocks of their own node, of other nodes, or of none. Some of
//! these pods ask by an annotation. For the others, the runtime asks in the ADD, so only the agent of the node knows
//! what they ask for.
//!
//! # Left out
//! - A pool may serve pods that the node does not know yet (`unknownPods: Serve`). Such a pool may serve a pod that
//!   names a claim. The same holds for podCIDRs outside every pool.
//! - A node may get an address of a claim by a podCIDR of a foreign allocator. A node or another claim may also have an
//!   address of a claim because the claim got the address by a late write of a deposed leader. In these cases, the
//!   controller gives the claim another address if no pod has used the claim.
//! - A machine whose Node is deleted may assign an address that a claim has got since, as long as no agent runs on it.
//! - After a restore of the API server, a claim may have addresses that nodes got later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadastre_api::{AllocationMode, IPPoolSpec};
use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::names::{ClaimName, ObjectUid, PoolName, TermId};
use cadastre_controller::cluster::objects::{
    Claim, ClaimSource, ClaimSpec, ClaimStatus, Pod, Pool,
};
use cadastre_controller::cluster::request::{ApiRequest, ObjectSpec};
use cadastre_core::node_allocation::is_claim;
use cadastre_core::{Addr, Cidr};
use cadastre_node::AssignedAddress;

use super::api::Author;
use super::checks::{Verdict, wrong};
use super::clock::Time;
use super::pool_model::counted;
use super::run::Sim;

/// The number of names from which users choose the names of their claims.
const NAMES: u64 = 6;
/// The number of pods of the StatefulSet with sticky addresses.
const ORDINALS: u64 = 4;

/// Records about claims and their pods, for the checks.
#[derive(Default)]
pub struct ClaimRecords {
    /// For each claim name, all addresses that any claims with this name ever had
    of: BTreeMap<ClaimName, BTreeSet<Addr>>,
    /// The claim that each pod uses
    of_pod: BTreeMap<ObjectUid, ClaimName>,
    /// The address that each pod asks for
    asked: BTreeMap<ObjectUid, Addr>,
    /// The pod that last got each address
    last: BTreeMap<Addr, ObjectUid>,
    /// The pods for which the runtime asks for an address in the ADD
    by_cni: BTreeSet<ObjectUid>,
    /// Addresses that a claim got although a node or another claim had them
    contested: BTreeSet<Addr>,
    /// UIDs of claims whose addresses an earlier leader has recorded late
    late: BTreeSet<ObjectUid>,
    /// For each claim, by UID, who wrote its addresses, and when
    got: BTreeMap<ObjectUid, (Author, Time)>,
    /// For each claim, by UID, the addresses that pods got while the claim existed
    given: BTreeMap<ObjectUid, BTreeSet<Addr>>,
}

impl ClaimRecords {
    pub fn note_pod(&mut self, uid: &ObjectUid, claim: &ClaimName) {
        self.of_pod.insert(uid.clone(), claim.clone());
    }

    /// Records that the pod asks for the address.
    pub fn note_asked(&mut self, uid: &ObjectUid, addr: Addr) {
        self.asked.insert(uid.clone(), addr);
    }

    /// Records that the pod got the address.
    pub fn note_given(&mut self, uid: &ObjectUid, addr: Addr) {
        self.last.insert(addr, uid.clone());
    }

    /// Returns whether the pod asks for this address, and was the last one that got it.
    pub fn asks_again(&self, uid: &ObjectUid, addr: Addr) -> bool {
        self.asked.get(uid) == Some(&addr) && self.last.get(&addr) == Some(uid)
    }

    /// Records that the runtime, and no annotation, asks for the pod's address.
    pub fn note_by_cni(&mut self, uid: &ObjectUid) {
        self.by_cni.insert(uid.clone());
    }

    /// Returns the addresses that the runtime requests for the pod.
    pub fn requested_by_cni(&self, uid: &ObjectUid) -> Vec<Addr> {
        let is_by_cni = self.by_cni.contains(uid);
        let asked = self.asked.get(uid).filter(|_| is_by_cni);
        asked.into_iter().copied().collect()
    }

    /// Returns the claim that the pod uses.
    pub fn claim_of(&self, uid: &ObjectUid) -> Option<&ClaimName> {
        self.of_pod.get(uid)
    }

    /// Whether any claim ever had the address.
    pub fn ever_had(&self, addr: Addr) -> bool {
        self.of.values().any(|addresses| addresses.contains(&addr))
    }
}

fn text(claim: &Claim) -> String {
    format!("{} ({})", claim.name, claim.uid)
}

impl Sim {
    /// Returns the name of the claim that a new pod names, if it names one.
    pub fn draw_claim(&mut self) -> Option<ClaimName> {
        let names = self.plan.claims > 0 && self.rng.chance(self.plan.claims);
        names.then(|| self.some_claim_name())
    }

    /// Returns the address that a new pod asks for, if it asks for one.
    pub fn draw_asked(&mut self) -> Option<Addr> {
        if self.plan.asking == 0 || !self.rng.chance(self.plan.asking) {
            return None;
        }
        let drawn = match self.rng.below(10) {
            0..2 => None,
            2..5 => self.some_address_of_claim(),
            _ => self.some_address_of_node(),
        };
        Some(drawn.unwrap_or_else(|| self.some_address()))
    }

    fn some_address_of_claim(&mut self) -> Option<Addr> {
        let claims = self.api.claims.live.values();
        let addresses: Vec<Addr> = claims.flat_map(|it| it.addresses()).collect();
        let nth = self.rng.index(addresses.len().max(1));
        addresses.get(nth).copied()
    }

    /// Returns an address of the range in which all IPv4 pools of podCIDRs are.
    fn some_address(&mut self) -> Addr {
        let text = format!("10.244.{}.{}", self.rng.below(64), self.rng.below(256));
        Addr::parse_strict(&text).unwrap()
    }

    /// Returns the name of the pod that the StatefulSet creates now, or `None` if it creates none. The StatefulSet
    /// creates no pod while the earlier pod of that name exists.
    pub fn draw_ordinal(&mut self) -> Option<String> {
        if self.plan.sticky == 0 || !self.rng.chance(self.plan.sticky) {
            return None;
        }
        let name = format!("web-{}", self.rng.below(ORDINALS));
        let earlier = self.api.pods.get(&*format!("default/{name}"));
        earlier.is_none().then_some(name)
    }

    fn some_claim_name(&mut self) -> ClaimName {
        let ordinals = if self.plan.sticky > 0 { ORDINALS } else { 0 };
        let nth = self.rng.below(NAMES + ordinals);
        let name = match nth.checked_sub(NAMES) {
            Some(ordinal) => format!("default/web-{ordinal}"),
            None => format!("default/c{nth}"),
        };
        name.into()
    }

    /// Creates or deletes a claim, as users do.
    pub fn change_claims(&mut self) {
        if !self.api.ipam_claims.live.is_empty() {
            self.drop_ipam_claims();
        }
        let name = self.some_claim_name();
        if let Some(claim) = self.api.claims.get(&*name) {
            let is_useless = claim.status.addresses.is_empty();
            if self.rng.chance(if is_useless { 7_000 } else { 1_000 }) {
                self.log(Some(&name), || "claim is deleted".to_owned());
                self.api.delete::<Claim>(&name);
            }
            return;
        }
        // Most users choose a pool that serves claims.
        let any = self.rng.chance(1_000);
        let serves = |pool: &&Arc<Pool>| {
            let of_blocks = |it: &IPPoolSpec| it.allocation_mode == AllocationMode::Blocks;
            any || !pool.deleting && pool.spec.as_ref().is_ok_and(of_blocks)
        };
        let pools = self.api.pools.live.values().filter(serves);
        let pools: Vec<PoolName> = pools.map(|pool| pool.name.clone()).collect();
        if pools.is_empty() {
            return;
        }
        let pool = self.rng.pick(&pools).clone();
        let addresses = match self.rng.below(20) {
            0 => vec![self.some_address()],
            1..12 => self.some_address_of_node().into_iter().collect(),
            _ => Vec::new(),
        };
        let ttl = if self.plan.sticky > 0 {
            *self.rng.pick(&[None, None, Some(0), Some(30)])
        } else {
            None
        };
        self.put_claim(name, pool, addresses, ttl);
    }

    /// Creates a claim for these addresses, or for any address of the pool if there are none.
    pub fn put_claim(
        &mut self,
        name: ClaimName,
        pool: PoolName,
        addresses: Vec<Addr>,
        ttl: Option<u32>,
    ) {
        let claim = Claim {
            uid: self.api.uid(),
            version: 0,
            generation: 1,
            created: 0,
            deleting: false,
            finalizers: Vec::new().into(),
            spec: Ok(ClaimSpec {
                pool: addresses.is_empty().then_some(pool),
                addresses,
                ttl,
            }),
            status: ClaimStatus::default(),
            only_pod: None,
            ipam_claim: None,
            name,
        };
        self.log(Some(&claim.name), || format!("claim {:?}", claim.spec));
        self.api.put(claim);
    }

    /// Returns an address in a block of a node.
    fn some_address_of_node(&mut self) -> Option<Addr> {
        let subnets = self.api.subnets.live.values();
        let blocks = subnets.flat_map(|it| it.spec.iter().flat_map(|spec| &spec.blocks));
        let blocks = blocks.filter(|block| block.claim.is_none());
        let blocks = blocks.filter_map(|block| Cidr::parse_strict(&block.cidr).ok());
        let blocks: Vec<Cidr> = blocks.collect();
        let block = blocks.get(self.rng.index(blocks.len().max(1)))?;
        let first = block.first();
        let size = u64::try_from(block.size()).unwrap_or(16).min(16);
        let value = first.value + u128::from(self.rng.below(size));
        Some(Addr { value, ..first })
    }

    /// Whether a node, live or deleted, has a range with the address, or its agent reports a block with the address. The
    /// block of a claim does not count.
    fn is_of_node(&self, addr: Addr) -> bool {
        let blocks = self.api.blocks.live.values();
        let blocks = blocks.filter_map(|block| Some(block.spec.as_ref().ok()?.cidr));
        let nodes = self.api.nodes.live.values();
        let podcidrs = nodes.flat_map(|node| counted(node)).copied();
        let dead = self.checks.dead_nodes.iter();
        let quarantined = dead.flat_map(|it| it.ranges.iter().copied());
        let reports = self.api.subnets.live.values();
        let reports = reports.filter_map(|subnet| subnet.report.as_ref());
        let reported = reports.flat_map(|report| report.blocks.iter().map(|it| it.cidr));
        let mut ranges = blocks.chain(podcidrs).chain(quarantined).chain(reported);
        ranges.any(|it| it.contains_addr(addr) && it != Cidr::host(addr))
    }

    /// Records a late write of an earlier leader. The present leader may have given the addresses away before it saw the
    /// write. So a claim may lose its addresses if they are in a block that is created late, or if they are recorded
    /// late and no node has had them.
    pub fn note_late_write(&mut self, term: &TermId, request: &ApiRequest) {
        // A term begins with the number of changes of leadership.
        let number = |it: &TermId| it.split('-').next().and_then(|it| it.parse::<u64>().ok());
        let runs = self.processes.iter().filter_map(|it| it.run.as_ref());
        let mut terms = runs.filter_map(|run| match run.elector.leadership() {
            Leadership::Leading(leading) => number(&leading.id),
            _ => None,
        });
        if !terms.any(|it| Some(it) > number(term)) {
            return;
        }
        match request {
            ApiRequest::Create(_, ObjectSpec::Block(spec)) => {
                let claims = self.api.claims.live.values();
                let all = claims.flat_map(|it| it.addresses().collect::<Vec<_>>());
                let host = Cidr::host;
                let is_in = |it: &Addr| spec.cidr.contains_addr(*it) && spec.cidr != host(*it);
                let inside: Vec<Addr> = all.filter(is_in).collect();
                self.claims.contested.extend(inside);
            }
            ApiRequest::SetClaimStatus(claim, _) => {
                self.claims.late.insert(claim.uid.clone());
            }
            _ => {}
        }
    }

    /// Checks a change of a claim. A claim keeps the addresses that it has, and no two claims get the same address. A
    /// controller deletes no claim whose addresses a node has.
    pub fn check_claim(
        &mut self,
        (author, decided): (Author, Time),
        before: Option<&Claim>,
        after: Option<&Claim>,
    ) -> Verdict {
        let Some(after) = after else {
            let gone = before.filter(|_| matches!(author, Author::Controller(_)));
            let used = gone.and_then(|it| Some((it, it.status.node.as_ref()?)));
            return used.map_or(Ok(()), |(claim, node)| {
                let text = format!("{} is gone, and {node} has its addresses", text(claim));
                wrong("claim", text, [&*claim.name])
            });
        };
        let is_deleted = after.deleting && before.is_some_and(|it| !it.deleting);
        if is_deleted && matches!(author, Author::Controller(_)) {
            if let Some(node) = &after.status.node {
                let text = format!("{} is deleted, and {node} has its addresses", text(after));
                return wrong("claim", text, [&*after.name]);
            }
            self.checks.tally.expired += 1;
        }
        let has: Vec<Addr> = after.addresses().collect();
        let had: Vec<Addr> = before.into_iter().flat_map(Claim::addresses).collect();
        let all = had.iter().chain(&has);
        let of_nodes: Vec<Addr> = all.filter(|it| self.is_of_node(**it)).copied().collect();
        self.claims.contested.extend(of_nodes);
        let all = self.claims.of.entry(after.name.clone()).or_default();
        all.extend(&has);
        self.checks.tally.claims += u64::from(had.is_empty() && !has.is_empty());
        if had == has || self.was_restored() {
            return Ok(());
        }
        let is_contested = had.iter().any(|it| self.claims.contested.contains(it));
        let is_late = |it: &Claim| it.is_unused() && self.claims.late.contains(&it.uid);
        let is_spared = is_contested || before.is_some_and(is_late);
        if !had.is_empty() && !is_spared {
            let text = format!("{} had {had:?} and has {has:?}", text(after));
            return wrong("claim", text, [&*after.name]);
        }
        if !had.is_empty() {
            self.claims.late.remove(&after.uid);
        }
        let got = (author, self.now);
        self.claims.got.insert(after.uid.clone(), got);
        let Some(other) = self.other_claim_of(after) else {
            return Ok(());
        };
        // An earlier leader may have decided on the write before another leader gave the addresses to the other claim.
        let before = self.claims.got.get(&other.uid);
        if before.is_some_and(|(writer, at)| *writer != author && decided < *at) {
            self.claims.contested.extend(has);
            return Ok(());
        }
        let text = format!("{} gets {has:?}, which {} has", text(after), text(other));
        wrong("claim", text, [&*after.name, &*other.name])
    }

    /// Returns another claim whose status records an address of this claim. Addresses that a late write has recorded do
    /// not count.
    fn other_claim_of(&self, claim: &Claim) -> Option<&Arc<Claim>> {
        let others = self.api.claims.live.values();
        let mut others = others.filter(|it| it.uid != claim.uid);
        let contested = &self.claims.contested;
        let counts = |addr: &Addr| {
            claim
                .addresses()
                .any(|it| it == *addr && !contested.contains(addr))
        };
        others.find(|it| it.addresses().any(|addr| counts(&addr)))
    }

    /// Checks that the pod may have the address. The pod may have it if the pod's claim has or had it, or if no claim
    /// has it.
    pub fn check_claimed(
        &mut self,
        id: usize,
        pod: &ObjectUid,
        given: &AssignedAddress,
    ) -> Verdict {
        let addr = given.address;
        let name = self.machines.hosts[id].name.clone();
        let is_without_node = self.is_without_node(id);
        if let Some(asked) = self.claims.asked.get(pod).copied() {
            if asked != addr && !self.serves_unknown(id, &given.pool) {
                let text = format!("pod {pod} on {name} asks for {asked} and gets {addr}");
                return wrong("claim", text, [&*name]);
            }
            self.checks.tally.asked += 1;
            let is_by_claim = is_claim(&given.pool);
            self.checks.tally.asked_by_claim += u64::from(is_by_claim);
            let is_by_cni = self.claims.by_cni.contains(pod);
            self.checks.tally.asked_by_cni += u64::from(is_by_claim && is_by_cni);
        }
        let own = self.claims.claim_of(pod).cloned();
        let has_own_block = self.claims.asked.contains_key(pod) && !is_claim(&given.pool);
        if let Some(claim) = own.clone().filter(|_| !has_own_block) {
            let has = self
                .claims
                .of
                .get(&claim)
                .is_some_and(|it| it.contains(&addr));
            if has {
                self.checks.tally.claimed += 1;
                if is_without_node {
                    return Ok(());
                }
                return self.check_same(&claim, pod, addr);
            }
            if self.serves_unknown(id, &given.pool) {
                return Ok(());
            }
            let text = format!("pod {pod} on {name} names claim {claim} and gets {addr}");
            return wrong("claim", text, [&*name, &*claim]);
        }
        let claims = self.api.claims.live.values();
        // If a claim was created because a pod asks for an address, the pod can get the address from a block of its
        // node while the claim still waits for it. So the pod's own claim does not count.
        let others = claims.filter(|it| Some(&it.name) != own.as_ref());
        let mut claims = others.filter(|it| it.addresses().any(|it| it == addr));
        let is_spared =
            is_without_node || self.was_restored() || self.claims.contested.contains(&addr);
        if let Some(claim) = claims.next().filter(|_| !is_spared) {
            let text = format!("pod {pod} on {name} gets {addr} of {}", text(claim));
            return wrong("claim", text, [&*name, &*claim.name]);
        }
        Ok(())
    }

    /// Checks that pods that name a claim one after the other get the same address, while the claim exists. This holds
    /// for the ordinals of a StatefulSet, too.
    fn check_same(&mut self, name: &ClaimName, pod: &ObjectUid, addr: Addr) -> Verdict {
        let pods = self.api.pods.live.values();
        let mut of_pod = pods.filter(|it| it.uid == *pod);
        let claim = of_pod.next().and_then(|it| it.claim.as_ref());
        if let Some(claim) = claim {
            let is_sticky = matches!(claim.source, ClaimSource::Sticky(_));
            self.checks.tally.sticky += u64::from(is_sticky);
        }
        let Some(claim) = self.api.claims.get(&**name).cloned() else {
            return Ok(());
        };
        let before = self.claims.given.entry(claim.uid.clone()).or_default();
        let other = before
            .iter()
            .find(|it| it.family == addr.family && **it != addr);
        let other = other.copied();
        before.insert(addr);
        match other {
            Some(other) if !self.was_restored() && !self.claims.contested.contains(&other) => {
                let text = format!("pod {pod} gets {addr} of {}, not {other}", text(&claim));
                wrong("claim", text, [&**name])
            }
            _ => Ok(()),
        }
    }

    /// Whether pods that the host's store does not know get addresses of the pool. Such a pod may name a claim.
    fn serves_unknown(&mut self, id: usize, pool: &str) -> bool {
        let snapshot = self.contents(id);
        let pools = snapshot.iter().flat_map(|it| &it.pools);
        let mut terms = pools.map(|it| &it.terms);
        pool.is_empty() || terms.any(|it| it.name == pool && it.serves_unknown)
    }

    /// Checks at the end that a claim whose pod waits on a node does not have the condition reason `Available`. Either
    /// a node has the claim's addresses, or the condition says why no node has them.
    pub fn check_claim_comes(&self, pod: &ObjectUid, node: &str) -> Verdict {
        let mut pods = self.api.pods.live.values();
        let pod = pods.find(|it| it.uid == *pod && !it.finished);
        let here = |it: &&Arc<Pod>| self.api.placed.get(&it.uid).is_some_and(|on| **on == *node);
        let name = pod
            .filter(here)
            .and_then(|it| self.claims.claim_of(&it.uid));
        let claim = name.and_then(|it| self.api.claims.get(it));
        let (Some(pod), Some(claim)) = (pod, claim) else {
            return Ok(());
        };
        let ready = claim.status.ready.as_ref();
        if ready.is_some_and(|it| &*it.reason == "Available") {
            let text = format!(
                "pod {} waits on {node}, and {} is available",
                pod.name,
                text(claim)
            );
            return wrong("claim", text, [&*claim.name]);
        }
        Ok(())
    }

    /// Checks at the end that every claim has conditions, and that a deleted claim is left only if a node has its
    /// addresses.
    pub fn check_claims_end(&self) -> Verdict {
        for claim in self.api.claims.live.values() {
            if claim.status.ready.is_none() {
                let text = format!("{} says nothing", text(claim));
                return wrong("claim", text, [&*claim.name]);
            }
            let mut pods = self.api.pods.live.values();
            let is_of = |uid: &ObjectUid| {
                let of_pod = self.claims.claim_of(uid);
                of_pod == Some(&claim.name)
            };
            let has_pod = pods.any(|pod| !pod.finished && is_of(&pod.uid));
            if claim.only_pod.is_some() && !has_pod && claim.status.node.is_none() {
                let text = format!("{} outlives its pod", text(claim));
                return wrong("claim", text, [&*claim.name]);
            }
            if claim.deleting && claim.status.node.is_none() {
                let text = format!("{} is still there", text(claim));
                return wrong("claim", text, [&*claim.name]);
            }
            let others = self.api.claims.live.values();
            let mut others = others.filter(|it| it.uid != claim.uid && it.is_unused());
            let is_shared = |it: &Claim| {
                it.addresses()
                    .any(|it| claim.addresses().any(|own| own == it))
            };
            if let Some(other) = others
                .find(|it| is_shared(it))
                .filter(|_| claim.is_unused())
            {
                let text = format!("{} and {} have one address", text(claim), text(other));
                return wrong("claim", text, [&*claim.name, &*other.name]);
            }
        }
        Ok(())
    }
}
