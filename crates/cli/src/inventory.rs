//! The cluster as the subcommands see it. The controller's own code parses the objects and finds out which node has
//! each range.
//!
//! An object that cannot be parsed affects only itself: it is missing in the inventory, and `check` reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::Deserialize;
use serde_json::Value;

use super::claims::ClaimFact;
use super::lists::{ClusterLists, full_name};
use super::running::RunningComponents;
use cadastre_api::choice::Label;
use cadastre_api::pod_claim;
use cadastre_api::{
    AddressConflict, AddressEntry, AgentInfo, BlockStatus, FamilyStatus, IPPoolStatus,
    LeakCandidate, MIRROR_ANNOTATION, MOST_COUNT, NodeAddressesLite, NodeAddressesSpec,
    NodeSubnetLite, NodeSubnetSpec, PodLite, Requests, SERVED_BY_OTHERS,
};
use cadastre_controller::Now;
use cadastre_controller::allocations::AllocationState;
use cadastre_controller::allocations::blocks::BlockEntry;
use cadastre_controller::cluster::cache::ClusterCache;
use cadastre_controller::cluster::convert;
use cadastre_controller::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName};
use cadastre_controller::cluster::objects::{ClaimSource, Node, PodClaim, PodUid};
use cadastre_controller::pools::PoolState;
use cadastre_core::{Addr, Cidr, Family};
use cadastre_daemon::watch::ObjectEvent;

/// The objects of the cluster at the time when they were listed.
pub(crate) struct Inventory {
    /// The objects, parsed by the code with which the controller parses watched objects
    pub cache: ClusterCache,
    /// Which node has each range, and the states of pools, computed as by a controller that has just become leader
    pub registry: AllocationState,
    /// Pods of all namespaces; empty if they were not listed
    pub pods: Vec<PodFact>,
    /// The NodeSubnets, each with the NodeAddresses of the same name
    pub subnets: BTreeMap<NodeName, SubnetFact>,
    /// The IPClaims, by `namespace/name`
    pub claims: BTreeMap<ClaimName, ClaimFact>,
    /// Namespaces by name; empty if they were not listed
    pub namespaces: BTreeMap<String, Labelled>,
    /// The controllers, agents and leases of Cadastre itself
    pub running: RunningComponents,
    /// When the objects were listed
    pub now: Timestamp,
    /// Indices of `pods`, by the addresses that the pods report
    pods_by_address: BTreeMap<Addr, Vec<usize>>,
    /// Indices of `pods`, by the UIDs of the pods
    pods_by_uid: BTreeMap<PodUid, usize>,
    /// For each address, the claims that have it in their status or ask for it in their spec
    claims_by_address: BTreeMap<Addr, BTreeSet<ClaimName>>,
    in_use: BTreeMap<Addr, Vec<AddressInUse>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Labelled {
    /// The labels, sorted by key
    pub labels: Box<[Label]>,
    pub annotations: BTreeMap<String, String>,
}

/// The parts of a pod that the subcommands need.
#[derive(Clone, Debug)]
pub(crate) struct PodFact {
    /// `namespace/name`
    pub name: String,
    /// `metadata.uid`, which tells the pod from earlier pods of the same name
    pub uid: String,
    /// The node to which the pod is bound; `None` if it is not scheduled
    pub node: Option<String>,
    /// `status.phase`
    pub phase: String,
    /// Whether the pod has ended, so that it no longer uses its addresses
    pub finished: bool,
    /// Whether the pod uses the host network, so that its addresses are those of the node
    pub host_network: bool,
    /// Whether the pod has a deletion timestamp
    pub deleting: bool,
    /// `metadata.creationTimestamp`
    pub created: Option<Timestamp>,
    /// The addresses in the pod's status, even after the pod has ended
    pub addresses: Vec<Addr>,
    /// The claim that the pod uses, by the same rules as in the controller
    pub claim: Option<ClaimName>,
    /// The claims of the IPAMClaims that the pod names for its interfaces
    pub interface_claims: Vec<ClaimName>,
    /// UID of the VirtualMachineInstance that controls the pod, if the pod names a claim or an IPAMClaim
    pub vmi: Option<String>,
    /// The addresses that the pod asks for. If the ranges of the pod's node do not contain them, the controller creates
    /// the claim `claim` for these addresses
    pub asked: Vec<Addr>,
    /// The pod's labels and annotations
    pub meta: Labelled,
}

/// The parts that the subcommands need of a NodeSubnet, and of the NodeAddresses with the same name.
#[derive(Clone, Debug)]
pub(crate) struct SubnetFact {
    /// The name of the NodeSubnet, which is also the name of the node
    pub name: NodeName,
    /// `metadata.resourceVersion`; a write of the NodeSubnet succeeds only if the NodeSubnet still has this version
    pub version: String,
    /// The spec, or why it cannot be parsed
    pub spec: Result<NodeSubnetSpec, String>,
    /// The requests of users in the annotations of the NodeSubnet: to release addresses, drain blocks or withdraw
    /// ranges
    pub requests: Requests,
    /// The UID of the Node on which the agent runs, as the agent reports it
    pub agent_node: Option<String>,
    /// The version and the boot id that the agent reports
    pub agent: Option<AgentInfo>,
    /// The numbers of used, cooling and free addresses that the agent reports for each block
    pub blocks: Vec<BlockStatus>,
    /// Ranges that the agent reports as withdrawn from the node
    pub withdrawn: Vec<Cidr>,
    /// Ranges that are to be withdrawn from the node. The agent reports that they are not withdrawn yet, because some
    /// of their addresses are in use or cooling
    pub withdrawing: Vec<Cidr>,
    /// Addresses that the agent has set aside because another host answers for them
    pub conflicts: Vec<AddressConflict>,
    /// Addresses that the agent reports as orphans, each with the UID of its pod
    pub orphans: BTreeSet<(Addr, PodUid)>,
    /// Addresses in use, from the list in the NodeAddresses. The agent writes its status more often than this list. So
    /// if the status reports that no address of a block is in use, the addresses of that block are left out
    pub allocations: Vec<(Addr, AddressEntry)>,
    /// When the agent made the list `allocations`; `None` if the agent has written no list
    pub listed_at: Option<Timestamp>,
    /// The message of the agent's condition `ServedByOthers`, if the condition is True
    pub served_by_others: Option<String>,
}

/// An address in use, as an agent reports it.
#[derive(Clone, Debug)]
pub(crate) struct AddressInUse {
    /// The node whose agent reports the address
    pub node: NodeName,
    /// The entry for the address in the agent's list
    pub allocation: AddressEntry,
    /// Whether the agent's report is about the Node that exists now, and not about an earlier Node of the same name
    pub current: bool,
}

/// A range that contains an address.
pub(crate) enum Cover<'a> {
    /// A block, which is allocated to a node or in quarantine
    Block(&'a BlockEntry),
    /// The podCIDR of a live node, with the node's name
    PodCidr(Cidr, NodeName),
    /// The podCIDR of a deleted node, with the node's name and the time at which the quarantine ends
    QuarantinedPodCidr(Cidr, NodeName, Timestamp),
}

impl Cover<'_> {
    /// The node that has the range, or had it before the quarantine.
    pub(crate) fn node(&self) -> &NodeName {
        match self {
            Cover::Block(entry) => &entry.owner.name,
            Cover::PodCidr(_, node) | Cover::QuarantinedPodCidr(_, node, _) => node,
        }
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        match self {
            Cover::Block(entry) => entry.owner.quarantined,
            Cover::PodCidr(..) => false,
            Cover::QuarantinedPodCidr(..) => true,
        }
    }
}

impl Inventory {
    /// Parses the objects, and indexes pods and addresses in use.
    pub(crate) fn new(lists: &ClusterLists, now: Timestamp) -> Self {
        let mut cache = ClusterCache::default();
        fill(&lists.nodes, convert::node, |it| cache.nodes.change(it));
        fill(&lists.pools, convert::pool, |it| cache.pools.change(it));
        fill(&lists.subnets, convert::subnet, |it| {
            let changes = cache.subnets.change(it);
            for change in &changes {
                cache.note_subnet(change);
            }
        });
        fill(&lists.blocks, convert::block, |it| cache.blocks.change(it));
        fill(&lists.claims, convert::claim, |it| {
            let changes = cache.claims.change(it);
            for change in &changes {
                cache.note_claim(change);
            }
        });
        fill(&lists.services, convert::service_range, |it| {
            cache.services.change(it)
        });
        fill(&lists.pods, convert::pod, |it| cache.pods.change(it));
        for node in cache.nodes.iter() {
            cache.node_addresses.add(&node.addresses);
        }
        let (mut registry, _) = AllocationState::rebuild(&cache, &[], moment(now));
        registry.judge_blocks(&cache);

        let addresses = lists.addresses.iter();
        let addresses: BTreeMap<_, _> = addresses.map(|it| (&it.metadata.name, it)).collect();
        let subnets = lists.subnets.iter().map(|it| {
            let addresses = addresses.get(&it.metadata.name).copied();
            let subnet = SubnetFact::read(it, addresses);
            (subnet.name.clone(), subnet)
        });
        let claims = lists.claims.iter().map(ClaimFact::read);
        let namespaces = lists.namespaces.iter().map(|it| {
            let name = it.metadata.name.clone().unwrap_or_default();
            (name, Labelled::of(&it.metadata))
        });
        let pods = lists.pods.iter().map(|it| PodFact::read(it, &cache));
        let mut inventory = Inventory {
            pods: pods.collect(),
            cache,
            registry,
            subnets: subnets.collect(),
            claims: claims.map(|it| (it.name.as_str().into(), it)).collect(),
            namespaces: namespaces.collect(),
            running: RunningComponents::read(lists),
            now,
            pods_by_address: BTreeMap::new(),
            pods_by_uid: BTreeMap::new(),
            claims_by_address: BTreeMap::new(),
            in_use: BTreeMap::new(),
        };
        inventory.index();
        inventory
    }

    fn index(&mut self) {
        for (at, pod) in self.pods.iter().enumerate() {
            self.pods_by_uid.insert(PodUid::read(&pod.uid), at);
            for addr in pod.addresses.iter().filter(|_| pod.uses_addresses()) {
                self.pods_by_address.entry(*addr).or_default().push(at);
            }
        }
        for (name, claim) in &self.claims {
            for addr in claim.addresses.iter().chain(&claim.asked) {
                let claims = self.claims_by_address.entry(*addr).or_default();
                claims.insert(name.clone());
            }
        }
        for subnet in self.subnets.values() {
            let node = self.cache.nodes.get(&subnet.name);
            let current = node.is_some_and(|node| subnet.is_of(&node.uid));
            for (addr, allocation) in &subnet.allocations {
                self.in_use.entry(*addr).or_default().push(AddressInUse {
                    node: subnet.name.clone(),
                    allocation: allocation.clone(),
                    current,
                });
            }
        }
    }

    /// Returns the claims that have the address in their status, or that ask for it.
    pub(crate) fn claims_at(&self, addr: Addr) -> impl Iterator<Item = &ClaimFact> {
        let names = self.claims_by_address.get(&addr).into_iter().flatten();
        names.filter_map(|name| self.claims.get(name))
    }

    /// Returns the addresses in the range that claims have or ask for.
    pub(crate) fn claimed_in(&self, range: &Cidr) -> impl Iterator<Item = Addr> {
        let within = self.claims_by_address.range(range.first()..=range.last());
        within.map(|(addr, _)| *addr)
    }

    /// Returns the claim that has the address. If several claims record the address, only the claim that the controller
    /// has chosen has it.
    pub(crate) fn claim_of(&self, addr: Addr) -> Option<&ClaimFact> {
        let name = self.registry.claims.of(&Cidr::host(addr))?;
        self.claims.get(name)
    }

    /// Returns whether a claim's address has been withdrawn from the node whose block contains the address. The report
    /// of that node's agent decides.
    pub(crate) fn is_handed_over(&self, addr: Addr) -> bool {
        let host = Cidr::host(addr);
        let is_claimed = self.registry.claims.of(&host).is_some();
        is_claimed && self.subnets.values().any(|it| it.withdrawn.contains(&host))
    }

    /// If the block is the address of a claim, returns this claim as `namespace/name`. If the claim is gone, returns
    /// the claim that the NodeSubnet still names for the block.
    pub(crate) fn claim_of_block(&self, block: &BlockEntry) -> Option<String> {
        if let Some(name) = self.registry.claims.of(&block.cidr) {
            return Some(name.to_string());
        }
        let is_address = block.cidr.len() == block.cidr.family().bits();
        let subnet = self.subnets.get(&block.owner.name);
        let spec = subnet.filter(|_| is_address)?.spec.as_ref().ok()?;
        let text = block.cidr.to_string();
        let listed = spec.blocks.iter().find(|it| it.cidr == text)?;
        listed.claim.clone()
    }

    /// Returns the blocks that contain the claim's addresses. Each of these blocks has one address, and is allocated to
    /// a node.
    pub(crate) fn blocks_of_claim(&self, claim: &ClaimFact) -> Vec<&BlockEntry> {
        let claims = &self.registry.claims;
        let hosts = claim.addresses.iter().map(|it| Cidr::host(*it));
        let own = hosts.filter(|it| claims.of(it).is_some_and(|name| **name == *claim.name));
        let blocks = own.filter_map(|it| self.registry.blocks.get(&it));
        blocks.collect()
    }

    /// Returns the blocks of a Node, except those that are addresses of claims.
    pub(crate) fn plain_blocks(&self, uid: &ObjectUid) -> impl Iterator<Item = &BlockEntry> {
        let blocks = self.registry.blocks.of(uid);
        blocks.filter(|it| self.registry.claims.of(&it.cidr).is_none())
    }

    /// Returns the pods that name the claim and have not finished, the oldest first.
    pub(crate) fn pods_of_claim(&self, claim: &str) -> Vec<&PodClaim> {
        self.cache.pods.of_claim(&claim.into())
    }

    /// Returns the pods that report an address and may still use it.
    pub(crate) fn pods_at(&self, addr: Addr) -> impl Iterator<Item = &PodFact> {
        let at = self.pods_by_address.get(&addr).into_iter().flatten();
        at.map(|at| &self.pods[*at])
    }

    /// Returns the addresses that pods report and may still use, in ascending order.
    pub(crate) fn reported_addresses(&self) -> impl Iterator<Item = Addr> {
        self.pods_by_address.keys().copied()
    }

    /// Returns the pods that report an address in the range, each with the address.
    pub(crate) fn pods_in(&self, range: &Cidr) -> impl Iterator<Item = (Addr, &PodFact)> {
        let within = self.pods_by_address.range(range.first()..=range.last());
        within.flat_map(|(addr, all)| all.iter().map(|at| (*addr, &self.pods[*at])))
    }

    /// Returns the ranges that nodes of this name have or had, sorted: blocks, podCIDRs, and podCIDRs in quarantine.
    pub(crate) fn ranges_of(&self, node: &str) -> Vec<Cidr> {
        let registry = &self.registry;
        let blocks = registry.blocks.iter().filter(|it| *it.owner.name == *node);
        let live = self.cache.nodes.get(node).into_iter();
        let live = live.flat_map(|it| it.pod_cidrs.iter().copied());
        let name = node.into();
        let quarantined = registry.quarantined_of(&name);
        let quarantined = quarantined.flat_map(|(_, it)| it.ranges.iter().copied());
        let ranges: BTreeSet<Cidr> = blocks
            .map(|it| it.cidr)
            .chain(live)
            .chain(quarantined)
            .collect();
        ranges.into_iter().collect()
    }

    /// Finds a pod by its UID, which may be written with or without dashes.
    pub(crate) fn pod_by_uid(&self, uid: &str) -> Option<&PodFact> {
        Some(&self.pods[*self.pods_by_uid.get(&PodUid::read(uid))?])
    }

    /// Finds a pod by `namespace/name`.
    pub(crate) fn pod(&self, name: &str) -> Option<&PodFact> {
        self.pods.iter().find(|pod| pod.name == name)
    }

    /// Returns the agents' entries for an address in use. Normally there is at most one.
    pub(crate) fn in_use_at(&self, addr: Addr) -> &[AddressInUse] {
        self.in_use.get(&addr).map_or(&[], Vec::as_slice)
    }

    /// Returns all addresses that agents report as in use, in ascending order.
    pub(crate) fn addresses_in_use(&self) -> impl Iterator<Item = (Addr, &AddressInUse)> {
        let all = self.in_use.iter();
        all.flat_map(|(addr, entries)| entries.iter().map(|it| (*addr, it)))
    }

    /// Returns the addresses in the range that agents report as in use.
    pub(crate) fn in_use_within(
        &self,
        range: &Cidr,
    ) -> impl Iterator<Item = (Addr, &AddressInUse)> {
        let within = self.in_use.range(range.first()..=range.last());
        within.flat_map(|(addr, entries)| entries.iter().map(|it| (*addr, it)))
    }

    /// Returns the ranges that contain an address, the widest first.
    pub(crate) fn covers(&self, addr: Addr) -> Vec<Cover<'_>> {
        self.covers_in(&Cidr::host(addr)).collect()
    }

    /// Returns the blocks and podCIDRs that overlap the range, sorted by CIDR.
    pub(crate) fn covers_in(&self, range: &Cidr) -> impl Iterator<Item = Cover<'_>> {
        let holdings = self.registry.ledger.overlapping(range);
        holdings.filter_map(|(id, holding)| {
            let block = self.registry.blocks.get(&holding.cidr);
            if let Some(entry) = block.filter(|entry| entry.holding == id) {
                return Some(Cover::Block(entry));
            }
            let (name, uid) = self.registry.node_of(holding.holder)?.clone();
            let quarantine = self.registry.quarantined.get(&(name.clone(), uid));
            Some(match quarantine {
                Some(it) => Cover::QuarantinedPodCidr(holding.cidr, name, it.until_wall),
                None => Cover::PodCidr(holding.cidr, name),
            })
        })
    }

    /// Returns the addresses in the range that agents or pods report as in use, each with the name of its pod. If the
    /// agent does not know the pod, the handle replaces the name.
    pub(crate) fn in_use(&self, range: &Cidr) -> BTreeMap<Addr, &str> {
        let by_agents = self.in_use_within(range).map(|(addr, it)| {
            let AddressEntry { pod, handle, .. } = &it.allocation;
            (addr, if pod.is_empty() { handle } else { pod }.as_str())
        });
        let by_pods = self.pods_in(range);
        let by_pods = by_pods.map(|(addr, pod)| (addr, pod.name.as_str()));
        by_agents.chain(by_pods).collect()
    }

    /// Returns the NodeSubnet of a Node, if the agent of this Node has written the status of the NodeSubnet. Returns
    /// `None` if only the agent of an earlier Node with the same name has written the status.
    pub(crate) fn subnet_of(&self, node: &Node) -> Option<&SubnetFact> {
        let subnet = self.subnets.get(&node.name)?;
        subnet.is_of(&node.uid).then_some(subnet)
    }

    /// Returns the counts that the agent of the block's node reports for the block. Returns `None` if the agent has not
    /// reported the block yet.
    pub(crate) fn block_status(&self, entry: &BlockEntry) -> Option<&BlockStatus> {
        let subnet = self.subnets.get(&entry.owner.name)?;
        let uid = entry.listed_uid()?;
        let cidr = entry.cidr.to_string();
        let mut blocks = subnet.blocks.iter();
        let status = blocks.find(|it| it.cidr == cidr && it.uid == uid);
        status.filter(|_| subnet.is_of(&entry.owner.uid))
    }

    /// Returns whether the agent's list has as many addresses of the block as the agent's status counts. If not, the
    /// list is out of date, because the agent writes the list less often than the counts.
    pub(crate) fn is_list_current(&self, entry: &BlockEntry) -> bool {
        let listed = self.in_use_within(&entry.cidr);
        let listed = listed.filter(|(_, it)| it.node == entry.owner.name).count();
        let status = self.block_status(entry);
        status.is_some_and(|it| usize::try_from(it.used).is_ok_and(|used| used == listed))
    }

    /// Returns how many addresses of a block are in use. If the agent reports no count, counts the addresses that pods
    /// report.
    pub(crate) fn used_in(&self, entry: &BlockEntry) -> u64 {
        match self.block_status(entry) {
            Some(status) => u64::try_from(status.used).unwrap_or(0),
            None => self.cache.pods.count_in(&entry.cidr) as u64,
        }
    }

    /// Finds a pool by name. If no pool has this name, the error lists the pools that exist.
    pub(crate) fn pool(&self, name: &str) -> anyhow::Result<&PoolState> {
        self.registry.pools.get(name).ok_or_else(|| {
            let names: Vec<&PoolName> = self.registry.pools.iter().map(|pool| &pool.name).collect();
            if names.is_empty() {
                anyhow::anyhow!("there is no pool \"{name}\", and no other one: create an IPPool")
            } else {
                let names = super::render::some(&names, 8);
                anyhow::anyhow!("there is no pool \"{name}\": there are {names}")
            }
        })
    }

    /// Returns the status of a pool, or `None` if the controller has not written it yet.
    pub(crate) fn pool_status(&self, pool: &str) -> Option<&IPPoolStatus> {
        self.cache.pools.get(pool)?.status.as_ref()
    }

    /// Returns the part of a pool's status about one family.
    pub(crate) fn family_status(&self, pool: &str, family: Family) -> Option<&FamilyStatus> {
        let status = self.pool_status(pool)?;
        match family {
            Family::V4 => status.ipv4.as_ref(),
            Family::V6 => status.ipv6.as_ref(),
        }
    }

    /// Returns how many nodes wait for the pool according to its status, or `None` if no node waits.
    pub(crate) fn waiting(&self, pool: &str) -> Option<i64> {
        self.pool_status(pool)?.waiting.filter(|it| *it > 0)
    }

    /// Finds a node by name. If no node has this name, the error tells the user how to list nodes.
    pub(crate) fn node(&self, name: &str) -> anyhow::Result<&Arc<Node>> {
        let node = self.cache.nodes.get(name);
        node.ok_or_else(|| anyhow::anyhow!("there is no node \"{name}\" (kubectl get nodes)"))
    }

    /// Returns the nodes on which another network, and not Cadastre, assigns the addresses of new pods. Each node has
    /// the message in which its agent reports this.
    pub(crate) fn served_by_others(&self) -> Vec<(&str, &str)> {
        let message = |node: &'_ Arc<Node>| self.subnet_of(node)?.served_by_others.as_deref();
        let nodes = self.cache.nodes.iter();
        nodes
            .filter_map(|node| Some((&*node.name, message(node)?)))
            .collect()
    }

    /// Returns the ranges of all pools, merged and sorted.
    pub(crate) fn pool_ranges(&self) -> Vec<Cidr> {
        let pools = self.registry.pools.iter().map(|state| &state.node_view);
        let families = pools.flat_map(|pool| pool.ipv4.iter().chain(&pool.ipv6));
        let cidrs = families.flat_map(|family| &family.cidrs);
        Cidr::merged(cidrs.filter_map(|text| Cidr::parse_strict(text).ok()))
    }

    /// Returns the time at which the objects were listed, in the form in which the controller's functions take it.
    pub(crate) fn moment(&self) -> Now {
        moment(self.now)
    }
}

fn moment(now: Timestamp) -> Now {
    Now {
        mono: Duration::ZERO,
        wall: now,
    }
}

/// Passes the objects to `change` in the form in which a watch delivers a complete list.
fn fill<K: Clone, T, R>(
    objects: &[K],
    convert: impl Fn(K) -> T,
    mut change: impl FnMut(ObjectEvent<T>) -> R,
) {
    change(ObjectEvent::Restarted {
        asked: Duration::ZERO,
    });
    for object in objects {
        change(ObjectEvent::Applied(convert(object.clone())));
    }
    change(ObjectEvent::Listed);
}

impl Labelled {
    fn of(meta: &ObjectMeta) -> Self {
        // A BTreeMap iterates in the order of keys, so the labels are sorted.
        let labels = meta.labels.iter().flatten();
        let labels = labels.map(|(key, value)| (key.as_str().into(), value.as_str().into()));
        Labelled {
            labels: labels.collect(),
            annotations: meta.annotations.clone().unwrap_or_default(),
        }
    }
}

impl PodFact {
    fn read(pod: &PodLite, cache: &ClusterCache) -> Self {
        let meta = &pod.metadata;
        let spec = pod.spec.clone().unwrap_or_default();
        let status = pod.status.clone().unwrap_or_default();
        let phase = status.phase.unwrap_or_default();
        let ips = status.pod_ips.into_iter().flatten().map(|it| it.ip);
        let ips = ips.chain(status.pod_ip);
        let addresses: BTreeSet<Addr> = ips.filter_map(|it| Addr::parse_lenient(&it)).collect();
        let uid = meta.uid.clone().unwrap_or_default();
        let claim = cache.pods.claim_of(PodUid::read(&uid));
        let asked = match claim.map(|it| &it.source) {
            Some(ClaimSource::Addresses(asked)) => asked.addresses.to_vec(),
            _ => Vec::new(),
        };
        let interfaces = cache.pods.interface_claims_of(PodUid::read(&uid));
        let mut all = claim.into_iter().chain(interfaces);
        PodFact {
            name: full_name(meta),
            uid,
            node: spec.node_name,
            finished: phase == "Succeeded" || phase == "Failed",
            phase,
            host_network: spec.host_network.unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            created: meta.creation_timestamp.as_ref().map(|it| it.0),
            addresses: addresses.into_iter().collect(),
            claim: claim.map(|it| it.claim.clone()),
            vmi: all.find_map(|it| it.vmi()).map(ToString::to_string),
            interface_claims: interfaces.iter().map(|it| it.claim.clone()).collect(),
            asked,
            meta: Labelled::of(meta),
        }
    }

    /// Whether the pod is the mirror of a static pod. The kubelet alone decides the content of such a pod's status.
    pub(crate) fn is_mirror(&self) -> bool {
        self.meta.annotations.contains_key(MIRROR_ANNOTATION)
    }

    /// Whether the addresses in `asked` come from the CNI configuration or the runtime, and not from an annotation of
    /// the pod.
    pub(crate) fn is_by_cni(&self) -> bool {
        let by_annotation = pod_claim::addresses(&self.meta.annotations);
        !self.asked.is_empty() && !matches!(by_annotation, Some(Ok(_)))
    }

    /// Whether the pod may use the addresses in its status. This is false if the pod has ended, or if the addresses are
    /// the node's.
    pub(crate) fn uses_addresses(&self) -> bool {
        !self.finished && !self.host_network
    }
}

impl SubnetFact {
    /// Parses a NodeSubnet, and the NodeAddresses with the same name (`list`) if there is one. Parts that cannot be
    /// parsed are left out.
    pub(crate) fn read(subnet: &NodeSubnetLite, list: Option<&NodeAddressesLite>) -> Self {
        let meta = &subnet.metadata;
        let annotations = meta.annotations.as_ref();
        let annotation = |name: &str| annotations?.get(name).map(String::as_str);
        let spec = NodeSubnetSpec::deserialize(&subnet.spec);
        let status = &subnet.status;
        let list = list.and_then(|it| NodeAddressesSpec::deserialize(&it.spec).ok());
        let list = list.unwrap_or_default();
        let blocks = entries(&status["blocks"]).into_iter();
        let blocks: Vec<BlockStatus> = blocks.map(clamped).collect();
        let orphans: Vec<LeakCandidate> = entries(&status["orphans"]);
        let orphan = |it: &LeakCandidate| {
            let addr = Addr::parse_lenient(&it.address)?;
            Some((addr, PodUid::read(&it.pod_uid)))
        };
        // The status and the list may come from different agents, for example after the Node was replaced. In that
        // case, the status says nothing about the list, so all entries of the list are kept.
        let is_counted = status["nodeUID"].as_str() == Some(list.node_uid.as_str());
        let pod_cidrs = spec.iter().flat_map(|spec| &spec.pod_cidrs);
        let used = blocks.iter().filter(|it| it.used > 0);
        let own = pod_cidrs.map(|it| &it.cidr).chain(used.map(|it| &it.cidr));
        let own: Vec<Cidr> = own
            .filter_map(|text| Cidr::parse_lenient(text).ok())
            .collect();
        let is_in_use = |addr: &Addr| own.iter().any(|cidr| cidr.contains_addr(*addr));
        let each = |it: AddressEntry| {
            let addresses = it.addresses.clone().into_iter();
            addresses.map(move |addr| (addr, it.clone()))
        };
        let allocations = list.entries().flat_map(each);
        let allocations = allocations.filter(|(addr, _)| !is_counted || is_in_use(addr));
        let mut conditions = entries::<Condition>(&status["conditions"]).into_iter();
        let others = conditions.find(|it| it.type_ == SERVED_BY_OTHERS && it.status == "True");
        SubnetFact {
            name: meta.name.as_deref().unwrap_or_default().into(),
            version: meta.resource_version.clone().unwrap_or_default(),
            spec: spec.map_err(|error| error.to_string()),
            requests: Requests::read(annotation),
            agent_node: status["nodeUID"].as_str().map(str::to_owned),
            agent: AgentInfo::deserialize(&status["agent"]).ok(),
            orphans: orphans.iter().filter_map(orphan).collect(),
            allocations: allocations.collect(),
            listed_at: list.as_of.as_ref().map(|it| it.0),
            served_by_others: others.map(|it| it.message),
            withdrawn: ranges(&status["withdrawn"]),
            withdrawing: ranges(&status["withdrawing"]),
            conflicts: entries(&status["conflicts"]),
            blocks,
        }
    }

    /// Returns the conflict of an address with another host, if the agent reports one.
    pub(crate) fn conflict_at(&self, addr: Addr) -> Option<&AddressConflict> {
        let mut conflicts = self.conflicts.iter();
        conflicts.find(|it| Addr::parse_lenient(&it.address) == Some(addr))
    }

    /// Whether the agent's report is about the Node with this UID.
    fn is_of(&self, uid: &ObjectUid) -> bool {
        self.agent_node.as_deref() == Some(&**uid)
    }

    /// Whether the spec lists the block. Returns `false` if the spec cannot be parsed.
    pub(crate) fn lists(&self, block: &Cidr) -> bool {
        let text = block.to_string();
        let spec = self.spec.as_ref();
        spec.is_ok_and(|spec| spec.blocks.iter().any(|it| it.cidr == text))
    }

    /// Whether the agent's list has the address for the pod of this UID.
    pub(crate) fn has_pod(&self, addr: Addr, uid: &str) -> bool {
        let uid = PodUid::read(uid);
        let mut entries = self.allocations.iter();
        entries.any(|(at, it)| *at == addr && PodUid::read(&it.pod_uid) == uid)
    }

    /// Whether the agent's list has the address with this handle.
    pub(crate) fn has_handle(&self, addr: Addr, handle: &str) -> bool {
        let mut entries = self.allocations.iter();
        entries.any(|(at, it)| *at == addr && it.handle == handle)
    }
}

/// Limits the counts to what an agent could report. Otherwise, anybody who may write the status could make sums
/// overflow.
fn clamped(status: BlockStatus) -> BlockStatus {
    let count = |count: i64| count.clamp(0, MOST_COUNT);
    BlockStatus {
        used: count(status.used),
        cooling: count(status.cooling),
        free: count(status.free),
        withdrawn: count(status.withdrawn),
        ..status
    }
}

/// Returns the CIDRs of a JSON list, without those that cannot be parsed.
fn ranges(list: &Value) -> Vec<Cidr> {
    let texts = entries::<String>(list).into_iter();
    let ranges = texts.filter_map(|text| Cidr::parse_strict(&text).ok());
    ranges.collect()
}

/// Returns the entries of a JSON list, without those that cannot be parsed.
fn entries<T: for<'de> Deserialize<'de>>(list: &Value) -> Vec<T> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(|entry| T::deserialize(entry).ok())
        .collect()
}
