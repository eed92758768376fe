//! The caches of all kinds of objects in one place.
//!
//! Every controller keeps the caches current, and the leader bases its decisions on them. This module makes no
//! decisions.

use std::borrow::Borrow;
use std::sync::Arc;

use super::address_requests::RequestSource;
use super::addresses::Addresses;
use super::intents::SeenVersions;
use super::names::{NodeName, ObjectUid};
use super::object_cache::{CacheMark, ObjectCache, ObjectUpdate};
use super::objects::{
    AddressRequest, AgentReport, Block, Claim, FrrConfiguration, Node, Object, Pool, Routes,
    ServiceRange, Subnet,
};
use super::pods::PodIndex;
use super::request::{KnownObject, ObjectKind};
use cadastre_api::NodeSubnetSpec;

/// The controller's copies of the API objects that it watches, with one cache per kind.
#[derive(Clone, Debug, Default)]
pub struct ClusterCache {
    /// Nodes: podCIDRs, labels, addresses, and the identity of the machine
    pub nodes: ObjectCache<Node>,
    /// IPPools: spec, and status as last written
    pub pools: ObjectCache<Pool>,
    /// NodeSubnets: the ranges of each node, and the report of its agent
    pub subnets: ObjectCache<Subnet>,
    /// NodeRoutes: the routes of each node. Allocations do not depend on them, so their first list is not awaited
    pub routes: ObjectCache<Routes>,
    /// FRRConfigurations: what frr-k8s announces for each node. Only those of the controller are watched
    pub frr_configurations: ObjectCache<FrrConfiguration>,
    /// Whether `routes` may lack objects that earlier leaders have written
    pub awaits_routes: bool,
    /// The same for `frr_configurations`, if the controller writes any
    pub awaits_frr_configurations: bool,
    /// IPAMBlocks: range, pool and owner of each block
    pub blocks: ObjectCache<Block>,
    /// IPClaims: spec, and the addresses in the status
    pub claims: ObjectCache<Claim>,
    /// ServiceCIDRs, whose addresses pods must not get
    pub services: ObjectCache<ServiceRange>,
    /// Pods: the addresses that they report, and the claims that they name
    pub pods: PodIndex,
    /// Addresses of all nodes, which pods must not get
    pub node_addresses: Addresses,
}

impl ClusterCache {
    /// Returns the kinds whose first list is not complete. Nothing is allocated before all first lists are complete.
    pub fn missing(&self) -> Vec<&'static str> {
        [
            ("nodes", self.nodes.is_listed()),
            ("ippools", self.pools.is_listed()),
            ("nodesubnets", self.subnets.is_listed()),
            ("ipamblocks", self.blocks.is_listed()),
            ("ipclaims", self.claims.is_listed()),
            ("servicecidrs", self.services.is_listed()),
            ("pods", self.pods.is_listed()),
        ]
        .into_iter()
        .filter(|(_, listed)| !listed)
        .map(|(kind, _)| kind)
        .collect()
    }

    /// Returns, for each kind that records allocations, the highest `resourceVersion` that this process has seen.
    pub fn versions(&self) -> SeenVersions {
        SeenVersions {
            nodes: self.nodes.newest(),
            subnets: self.subnets.newest(),
            blocks: self.blocks.newest(),
            claims: self.claims.newest(),
            routes: seen(&self.routes, self.awaits_routes),
            frr_configurations: seen(&self.frr_configurations, self.awaits_frr_configurations),
        }
    }

    /// Returns the state of a kind's cache. Also returns the identity and version of the object with this name, if the
    /// cache contains it.
    pub(crate) fn about(
        &self,
        (kind, name): (ObjectKind, Option<&str>),
    ) -> (CacheMark, Option<KnownObject>) {
        match kind {
            ObjectKind::Node => about(&self.nodes, name),
            ObjectKind::Subnet => about(&self.subnets, name),
            ObjectKind::Routes => about(&self.routes, name),
            ObjectKind::FrrConfiguration => about(&self.frr_configurations, name),
            ObjectKind::Block => about(&self.blocks, name),
            ObjectKind::Pool => about(&self.pools, name),
            ObjectKind::Claim => about(&self.claims, name),
            ObjectKind::Pod => (CacheMark::default(), None),
        }
    }

    /// Updates [`ClusterCache::node_addresses`] after one Node has changed.
    pub(crate) fn note_node(&mut self, delta: &ObjectUpdate<Node>) {
        if let Some(before) = &delta.before {
            self.node_addresses.remove(&before.addresses);
        }
        if let Some(after) = &delta.after {
            self.node_addresses.add(&after.addresses);
        }
    }

    /// Updates the cached address requests of pods after one NodeSubnet has changed. In the NodeSubnet, the agent
    /// reports the addresses that CNI requests for pods.
    pub fn note_subnet(&mut self, delta: &ObjectUpdate<Subnet>) {
        fn requests(subnet: Option<&Arc<Subnet>>) -> &[AddressRequest] {
            let report = subnet.and_then(|it| it.report.as_deref());
            report.map_or(&[], |it| &it.requests)
        }
        let (before, after) = (delta.before.as_ref(), delta.after.as_ref());
        if let Some(subnet) = after.or(before) {
            let source = RequestSource::Agent(subnet.name.clone());
            let (before, after) = (requests(before), requests(after));
            self.pods.change_requests(&source, before, after);
        }
    }

    /// Updates the cached address requests of pods after one claim has changed. A claim can record the addresses that
    /// CNI requests for its pod.
    pub fn note_claim(&mut self, delta: &ObjectUpdate<Claim>) {
        let request = |claim: Option<&Arc<Claim>>| claim.and_then(|it| it.request());
        let (before, after) = (delta.before.as_ref(), delta.after.as_ref());
        if let Some(claim) = after.or(before) {
            let source = RequestSource::Claim(claim.name.clone());
            let (before, after) = (request(before), request(after));
            self.pods
                .change_requests(&source, before.as_slice(), after.as_slice());
        }
    }
}

/// Returns the highest version that was seen of a kind; `None` if the cache lacks objects.
fn seen<T: Object>(table: &ObjectCache<T>, is_awaited: bool) -> Option<u64> {
    (table.is_listed() && !is_awaited).then(|| table.newest())
}

fn about<T: Object>(table: &ObjectCache<T>, name: Option<&str>) -> (CacheMark, Option<KnownObject>)
where
    T::Name: Borrow<str>,
{
    let object = name.and_then(|name| table.get(name));
    (table.sent(), object.map(|it| KnownObject::of(&**it)))
}

/// Returns the spec of the NodeSubnet of that name, if the spec is for the node with this UID.
pub(crate) fn spec_for<'a>(
    cache: &'a ClusterCache,
    name: &NodeName,
    uid: &ObjectUid,
) -> Option<&'a NodeSubnetSpec> {
    let spec = cache.subnets.get(name)?.spec.as_ref().ok()?;
    (spec.node_uid.as_deref() == Some(&**uid)).then_some(spec)
}

/// Returns the report of a node's agent, if the report is for the UID of this node.
pub(crate) fn report_of<'a>(node: &Node, cache: &'a ClusterCache) -> Option<&'a AgentReport> {
    let report = cache.subnets.get(&node.name)?.report.as_deref()?;
    (report.node_uid == node.uid).then_some(report)
}
