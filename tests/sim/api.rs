//! The API server in memory, with the rules by which a real one accepts and rejects writes.
//!
//! All kinds share one revision counter. Reads and lists are consistent. A write that changes nothing keeps the
//! version, as in etcd. The history of each kind (`object_log`) contains every change with its time.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadastre_agent::seen::AddressesSeen;
use cadastre_api::{
    CLAIM_FINALIZER, IPPoolSpec, NodeAddressesSpec, NodeSubnetStatus, Requests, block_name,
};
use cadastre_controller::cluster::agent_report;
use cadastre_controller::cluster::lease::{LeaseAnswer, LeaseCall, LeaseRecord};
use cadastre_controller::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName, TermId};
use cadastre_controller::cluster::objects::{
    AgentReport, Block, Claim, ClaimSpec, ClaimStatus, FrrConfiguration, Node, NodeTaint, OnlyPod,
    Pod, Pool, Routes, ServiceRange, Subnet, SubnetCondition,
};
use cadastre_controller::cluster::request::{
    ApiRequest, ClaimOwnerKind, ExhaustedChange, KnownObject, NewClaim, NodeTouch,
    ObjectKind as Of, ObjectSpec, PodCidrAllocation, Rejection, RequestOutcome, TaintsChange,
};

use jiff::Timestamp;

use super::clock::{Time, seconds};
use super::ipam_claims::IpamClaims;
use super::object_log::{Kind, Stored};
use super::pool_model::counted;
use super::run::RunId;
use cadastre_core::mutation::Mutation;
use cadastre_core::{Addr, Cidr};

/// The type of a NodeSubnet condition that neither the controller nor the agent writes. The simulation updates this
/// condition whenever an agent writes a status.
const OF_ANOTHER: &str = "OfAnother";

/// The operation of a JSON Patch that fails if the node has another term.
const TERM_TEST: &str = "test /metadata/annotations/cadastre.dev~1term";

/// A kind of objects that can have finalizers, which delay the deletion of an object.
pub trait Finalized: Stored {
    fn finalizers(&self) -> Vec<String>;
    fn set_finalizers(&mut self, all: &[String]);
    fn is_deleted(&self) -> bool;
    /// Marks the object as deleted. Returns false if the object was already marked.
    fn mark_deleted(&mut self) -> bool;
}

macro_rules! finalized {
    ($($kind:ident, |$it:ident| $all:expr;)*) => {$(
        impl Finalized for $kind {
            fn finalizers(&self) -> Vec<String> {
                let $it = self;
                $all
            }
            fn set_finalizers(&mut self, all: &[String]) {
                self.finalizers = all.to_vec().into();
            }
            fn is_deleted(&self) -> bool { self.deleting }
            fn mark_deleted(&mut self) -> bool {
                let is_first = !std::mem::replace(&mut self.deleting, true);
                self.generation += i64::from(is_first);
                is_first
            }
        }
    )*};
}
finalized! {
    Pool, |it| it.finalizers.clone();
    Claim, |it| it.finalizers.all();
}

/// Who wrote a change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Author {
    /// A kubelet, a user or a foreign allocator.
    World,
    /// A node's agent, which writes its own NodeSubnet.
    Agent,
    Controller(RunId),
}

/// A changed object, before and after the change.
#[derive(Clone)]
pub enum Commit {
    Node(Option<Arc<Node>>, Option<Arc<Node>>),
    Pool(Option<Arc<Pool>>, Option<Arc<Pool>>),
    Subnet(Option<Arc<Subnet>>, Option<Arc<Subnet>>),
    Routes(Option<Arc<Routes>>, Option<Arc<Routes>>),
    FrrConfiguration(Option<Arc<FrrConfiguration>>, Option<Arc<FrrConfiguration>>),
    Block(Option<Arc<Block>>, Option<Arc<Block>>),
    Claim(Option<Arc<Claim>>, Option<Arc<Claim>>),
    ServiceRange(Option<Arc<ServiceRange>>, Option<Arc<ServiceRange>>),
    Pod(Option<Arc<Pod>>, Option<Arc<Pod>>),
    /// The name of the node, and its NodeAddresses if they exist.
    Addresses(NodeName, Option<AddressesSeen>),
}

/// The API server with its content. A clone is a backup.
#[derive(Clone, Default)]
pub struct Api {
    revision: u64,
    uids: u64,
    pub nodes: Kind<Node>,
    pub pools: Kind<Pool>,
    pub subnets: Kind<Subnet>,
    pub routes: Kind<Routes>,
    pub frr_configurations: Kind<FrrConfiguration>,
    pub blocks: Kind<Block>,
    pub claims: Kind<Claim>,
    pub ipam_claims: IpamClaims,
    pub services: Kind<ServiceRange>,
    pub pods: Kind<Pod>,
    pub lease: Option<LeaseRecord>,
    /// For each version of the Lease, the time at which it was written, as the writer's wall clock showed it.
    renewals: BTreeMap<String, Timestamp>,
    /// UIDs of nodes that have a finalizer of another component.
    pub finalized: BTreeSet<ObjectUid>,
    /// For each NodeSubnet (UID), the status that the node's agent has written.
    pub statuses: BTreeMap<ObjectUid, NodeSubnetStatus>,
    /// For each node name, the NodeAddresses that the node's agent has written.
    pub addresses: BTreeMap<NodeName, AddressesSeen>,
    /// The node of each pod, by the pod's UID. Deleted pods are kept.
    pub placed: BTreeMap<ObjectUid, NodeName>,
    /// Whether the Lease loses the intents (allocations that may be in flight) that are written to it.
    pub forgets_intents: bool,
    /// For each node (UID), its terms before the touches that had no effect because of the mutation
    /// `TouchWithoutEffect`.
    overlooked: BTreeMap<ObjectUid, BTreeSet<Option<TermId>>>,
    /// The first number counts how often only the test of the node's UID prevented that two nodes got one range. The
    /// second number counts this for the test of the term.
    pub averted: (u64, u64),
    /// Changes that the watches and checks have not received yet.
    pub commits: Vec<Commit>,
    /// Whether changes of objects are accepted but dropped, as by a mutating webhook that undoes them.
    pub drops_changes: bool,
}

impl Api {
    pub fn uid(&mut self) -> ObjectUid {
        self.uids += 1;
        format!("u{}", self.uids).into()
    }

    /// The present revision, and the number of UIDs that were assigned.
    pub fn counters(&self) -> (u64, u64) {
        (self.revision, self.uids)
    }

    fn revision(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }

    /// Restores a backup, including the revision counter. The counter of UIDs is not restored, because UIDs never
    /// repeat in a real cluster, either.
    pub fn restore(&mut self, backup: Api) {
        let before = std::mem::replace(self, backup);
        self.uids = before.uids;
        self.renewals = before.renewals;
        self.overlooked = before.overlooked;
        self.averted = before.averted;
        let version = self.revision;
        self.nodes.version = version;
        self.pools.version = version;
        self.subnets.version = version;
        self.routes.version = version;
        self.frr_configurations.version = version;
        self.blocks.version = version;
        self.claims.version = version;
        self.services.version = version;
        self.pods.version = version;
    }

    // Writes of kubelets, users and agents. The server's rules apply to these writes, but the writes have no
    // preconditions.

    /// Creates or replaces an object, with a new version.
    pub fn put<T: Stored>(&mut self, object: T) -> Arc<T> {
        let version = self.revision();
        let kind = T::kind_mut(self);
        let before = kind.get(object.name()).cloned();
        let after = kind.put(object, version);
        self.commits.push(T::commit(before, Some(after.clone())));
        after
    }

    /// Deletes an object at once, even if it has finalizers.
    pub fn remove<T: Stored>(&mut self, name: &T::Name) {
        let version = self.revision();
        let before = T::kind_mut(self).remove(name, version);
        if before.is_some() {
            self.commits.push(T::commit(before, None));
        }
    }

    /// Deletes a node that has no finalizer. If the node has a finalizer, only marks it as deleted.
    pub fn delete_node(&mut self, name: &NodeName) {
        let Some(node) = self.nodes.get(name).cloned() else {
            return;
        };
        if !self.finalized.contains(&node.uid) {
            self.remove::<Node>(name);
        } else if !node.deleting {
            self.put(Node {
                deleting: true,
                ..Node::clone(&node)
            });
        }
    }

    /// Deletes an object that has no finalizers. If the object has finalizers, only marks it as deleted.
    pub fn delete<T: Finalized>(&mut self, name: &T::Name) {
        let Some(object) = T::kind(self).get(name).cloned() else {
            return;
        };
        let mut object = T::clone(&object);
        if object.finalizers().is_empty() {
            self.remove::<T>(name);
        } else if object.mark_deleted() {
            self.put(object);
        }
    }

    pub fn delete_subnet(&mut self, name: &NodeName) {
        if let Some(subnet) = self.subnets.get(name) {
            self.statuses.remove(&subnet.uid);
            // Objects that the NodeSubnet owns are deleted together with the NodeSubnet.
            let is_owned = |it: &AddressesSeen| *it.owner == *subnet.uid;
            if self.addresses.get(name).is_some_and(is_owned) {
                self.addresses.remove(name);
                self.commits.push(Commit::Addresses(name.clone(), None));
            }
        }
        self.remove::<Subnet>(name);
    }

    pub fn put_pod(&mut self, pod: Pod, node: NodeName) {
        self.placed.insert(pod.uid.clone(), node);
        self.put(pod);
    }

    pub fn pods_on<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = &'a Arc<Pod>> {
        let pods = self.pods.live.values();
        pods.filter(move |pod| self.placed.get(&pod.uid).is_some_and(|n| n == node))
    }

    /// Lists the pods of a node. The cache of an API server may be as old as the request allows, so a request with a
    /// revision gets the pods of that revision.
    fn list_pods_of(&self, node: &NodeName, not_older_than: Option<u64>) -> RequestOutcome {
        match not_older_than {
            Some(revision) if revision > self.revision => {
                RequestOutcome::Indeterminate("504 Too large resource version".to_owned())
            }
            Some(revision) => {
                let all = self.pods.at(revision).into_iter();
                let bound = all.filter(|pod| self.placed.get(&pod.uid) == Some(node));
                RequestOutcome::Pods(bound.cloned().collect(), None)
            }
            None => {
                let bound = self.pods_on(node).map(|pod| Pod::clone(pod));
                RequestOutcome::Pods(bound.collect(), Some(self.revision))
            }
        }
    }

    // Requests of controllers, with the preconditions that each request names.

    pub fn execute(&mut self, request: &ApiRequest, at: Time) -> RequestOutcome {
        let outcome = self.try_execute(request, at);
        outcome.unwrap_or_else(RequestOutcome::Rejected)
    }

    fn try_execute(&mut self, request: &ApiRequest, at: Time) -> Result<RequestOutcome, Rejection> {
        Ok(match request {
            ApiRequest::List(Of::Node) => RequestOutcome::Nodes(all(&self.nodes)),
            ApiRequest::List(Of::Subnet) => RequestOutcome::Subnets(all(&self.subnets)),
            ApiRequest::List(Of::Block) => RequestOutcome::Blocks(all(&self.blocks)),
            ApiRequest::List(Of::Claim) => RequestOutcome::Claims(all(&self.claims)),
            ApiRequest::List(Of::Routes) => RequestOutcome::RoutesList(all(&self.routes)),
            ApiRequest::List(Of::FrrConfiguration) => {
                RequestOutcome::FrrConfigurations(all(&self.frr_configurations))
            }
            ApiRequest::List(Of::Pool) => RequestOutcome::Pools(all(&self.pools)),
            ApiRequest::ListPodsOf {
                node,
                not_older_than,
            } => self.list_pods_of(node, *not_older_than),
            ApiRequest::Read(Of::Node, name) => RequestOutcome::Node(read(&self.nodes, name)?),
            ApiRequest::Read(Of::Subnet, name) => {
                RequestOutcome::Subnet(read(&self.subnets, name)?)
            }
            ApiRequest::Read(Of::Pool, name) => RequestOutcome::Pool(read(&self.pools, name)?),
            ApiRequest::Read(Of::Claim, name) => RequestOutcome::Claim(read(&self.claims, name)?),
            ApiRequest::Read(Of::Routes, name) => RequestOutcome::Routes(read(&self.routes, name)?),
            ApiRequest::Read(Of::Block, name) => RequestOutcome::Block(read(&self.blocks, name)?),
            ApiRequest::ReadKubeadm => RequestOutcome::Kubeadm(None),
            ApiRequest::ReadIpamClaim(name) => self.read_ipam_claim(name)?,
            ApiRequest::FillIpamClaim(as_read, ips) => self.fill_ipam_claim(as_read, &ips.ips)?,
            ApiRequest::Create(name, ObjectSpec::Pool(spec)) => {
                let spec = IPPoolSpec::clone(spec);
                let pool = |uid| new_pool((**name).into(), uid, spec, at);
                RequestOutcome::Pool(self.create(name, pool)?)
            }
            ApiRequest::Create(name, ObjectSpec::Block(spec)) => {
                assert_eq!(**name, *block_name(&spec.cidr), "the server's own rule");
                RequestOutcome::Block(self.create(name, |uid| Block {
                    name: name.clone(),
                    uid,
                    version: 0,
                    touched: false,
                    spec: Ok(spec.clone()),
                })?)
            }
            ApiRequest::Create(name, ObjectSpec::Routes(spec)) => {
                RequestOutcome::Routes(self.create(name, |uid| Routes {
                    name: (**name).into(),
                    uid,
                    version: 0,
                    spec: spec.clone(),
                })?)
            }
            ApiRequest::Replace(as_read, ObjectSpec::Routes(spec)) => {
                RequestOutcome::Routes(self.update(as_read, |routes: &mut Routes| {
                    routes.spec = spec.clone();
                })?)
            }
            ApiRequest::Delete(Of::Routes, as_read) => {
                if self.routes.get(&*as_read.name).is_some() {
                    let routes = as_it_was_read(&self.routes, as_read)?;
                    self.remove::<Routes>(&routes.name);
                }
                RequestOutcome::Gone
            }
            ApiRequest::Read(Of::FrrConfiguration, name) => {
                RequestOutcome::FrrConfiguration(read(&self.frr_configurations, name)?)
            }
            ApiRequest::Create(name, ObjectSpec::FrrConfiguration(spec)) => {
                RequestOutcome::FrrConfiguration(self.create(name, |uid| FrrConfiguration {
                    name: (**name).into(),
                    uid,
                    version: 0,
                    is_ours: true,
                    spec: spec.clone(),
                })?)
            }
            ApiRequest::Replace(as_read, ObjectSpec::FrrConfiguration(spec)) => {
                let set = |object: &mut FrrConfiguration| object.spec = spec.clone();
                RequestOutcome::FrrConfiguration(self.update(as_read, set)?)
            }
            ApiRequest::Delete(Of::FrrConfiguration, as_read) => {
                if self.frr_configurations.get(&*as_read.name).is_some() {
                    let object = as_it_was_read(&self.frr_configurations, as_read)?;
                    self.remove::<FrrConfiguration>(&object.name);
                }
                RequestOutcome::Gone
            }
            ApiRequest::Create(name, ObjectSpec::Subnet(spec)) => {
                RequestOutcome::Subnet(self.create(name, |uid| Subnet {
                    name: (**name).into(),
                    uid,
                    version: 0,
                    spec: Ok(spec.clone()),
                    is_partial: false,
                    has_managed_fields: false,
                    requests: Requests::default(),
                    report: None,
                })?)
            }
            ApiRequest::Create(name, ObjectSpec::Claim(new)) => {
                let claim = |uid| new_claim((**name).into(), uid, new, at);
                RequestOutcome::Claim(self.create(name, claim)?)
            }
            ApiRequest::Replace(as_read, ObjectSpec::Block(spec)) => {
                RequestOutcome::Block(self.update(as_read, |block: &mut Block| {
                    block.touched |= block.spec.as_ref() != Ok(spec);
                    block.spec = Ok(spec.clone());
                })?)
            }
            ApiRequest::Replace(as_read, ObjectSpec::Subnet(spec)) => {
                RequestOutcome::Subnet(self.update(as_read, |subnet: &mut Subnet| {
                    subnet.spec = Ok(spec.clone());
                    subnet.is_partial = false;
                })?)
            }
            ApiRequest::Delete(Of::Block, as_read) => {
                if self.blocks.get(&as_read.name).is_some() {
                    let block = as_it_was_read(&self.blocks, as_read)?;
                    self.remove::<Block>(&block.name);
                }
                RequestOutcome::Gone
            }
            ApiRequest::Delete(Of::Subnet, as_read) => {
                if self.subnets.get(&*as_read.name).is_some() {
                    let subnet = as_it_was_read(&self.subnets, as_read)?;
                    self.delete_subnet(&subnet.name);
                }
                RequestOutcome::Gone
            }
            ApiRequest::Delete(Of::Claim, as_read) => {
                let claim = as_it_was_read(&self.claims, as_read)?;
                self.delete::<Claim>(&claim.name);
                let kept = self.claims.get(&claim.name).cloned();
                kept.map_or(RequestOutcome::Gone, |it| {
                    RequestOutcome::Claim(Arc::unwrap_or_clone(it))
                })
            }
            ApiRequest::SetSubnetConditions(as_read, conditions) => {
                RequestOutcome::Subnet(self.update(as_read, |subnet: &mut Subnet| {
                    let of_another = |all: &[SubnetCondition]| {
                        all.iter().find(|it| &*it.kind == OF_ANOTHER).cloned()
                    };
                    let report = subnet.report.get_or_insert_default();
                    assert_eq!(
                        of_another(&report.conditions),
                        of_another(conditions),
                        "a condition that somebody else has written stays as it is"
                    );
                    report.conditions = conditions.as_slice().into();
                })?)
            }
            ApiRequest::AssignPodCidrs(assignment) => {
                RequestOutcome::Node(self.assign(assignment)?)
            }
            ApiRequest::TouchNode(touch) => RequestOutcome::Node(self.touch(touch)?),
            ApiRequest::Evict(as_read) => {
                let pod = as_it_was_read(&self.pods, as_read)?;
                assert!(pod.addresses.is_empty(), "a pod with an address stays");
                self.remove::<Pod>(&pod.name);
                RequestOutcome::Gone
            }
            ApiRequest::SetTaints(change) => RequestOutcome::Node(self.set_taints(change)?),
            ApiRequest::SetExhausted(change) => RequestOutcome::Node(self.set_exhausted(change)?),
            ApiRequest::SetFinalizers(Of::Pool, as_read, finalizers) => {
                RequestOutcome::Pool(self.set_finalizers(as_read, finalizers)?)
            }
            ApiRequest::SetFinalizers(Of::Claim, as_read, finalizers) => {
                RequestOutcome::Claim(self.set_finalizers(as_read, finalizers)?)
            }
            ApiRequest::SetClaimStatus(as_read, status) => {
                let set = |claim: &mut Claim| claim.status = ClaimStatus::from(status);
                RequestOutcome::Claim(self.update(as_read, set)?)
            }
            ApiRequest::SetPoolStatus(as_read, status) => {
                let set = |pool: &mut Pool| pool.status = Some(status.clone());
                RequestOutcome::Pool(self.update(as_read, set)?)
            }
            ApiRequest::List(Of::Pod)
            | ApiRequest::Read(Of::Pod, _)
            | ApiRequest::Replace(_, ObjectSpec::Pool(_) | ObjectSpec::Claim(_))
            | ApiRequest::Delete(Of::Node | Of::Pool | Of::Pod, _)
            | ApiRequest::SetFinalizers(..) => {
                panic!("no controller asks for it: {request:?}")
            }
        })
    }

    fn create<T: Stored>(
        &mut self,
        name: &str,
        object: impl FnOnce(ObjectUid) -> T,
    ) -> Result<T, Rejection>
    where
        T::Name: Borrow<str>,
    {
        if T::kind(self).get(name).is_some() {
            return Err(guard("already exists"));
        }
        let object = object(self.uid());
        Ok(Arc::unwrap_or_clone(self.put(object)))
    }

    /// Replaces the finalizers of an object. Deletes an object that is marked as deleted and has no finalizer any more.
    fn set_finalizers<T: Finalized>(
        &mut self,
        as_read: &KnownObject,
        finalizers: &[String],
    ) -> Result<T, Rejection>
    where
        T::Name: Borrow<str>,
    {
        let before = as_it_was_read(T::kind(self), as_read)?;
        let is_new = |it: &String| !before.finalizers().contains(it);
        if finalizers.iter().any(is_new) && before.is_deleted() {
            let text = "no new finalizers can be added if the object is being deleted";
            return Err(guard(text));
        }
        let after = self.update(as_read, |it: &mut T| it.set_finalizers(finalizers))?;
        if after.is_deleted() && after.finalizers().is_empty() {
            self.remove::<T>(after.name());
        }
        Ok(after)
    }

    /// Changes an object if it still has the UID and version that the sender has read.
    fn update<T: Stored>(
        &mut self,
        as_read: &KnownObject,
        change: impl FnOnce(&mut T),
    ) -> Result<T, Rejection>
    where
        T::Name: Borrow<str>,
    {
        let before = as_it_was_read(T::kind(self), as_read)?;
        let mut object = T::clone(&before);
        change(&mut object);
        Ok(self.put_if_changed(&before, object))
    }

    fn put_if_changed<T: Stored>(&mut self, before: &T, object: T) -> T {
        if object == *before || self.drops_changes {
            return before.clone();
        }
        Arc::unwrap_or_clone(self.put(object))
    }

    /// Returns the status that the agent of the node has written last.
    pub fn status_of(&self, node: &NodeName) -> Option<&NodeSubnetStatus> {
        self.statuses.get(&self.subnets.get(node)?.uid)
    }

    /// Writes the status of an agent if the version matches. Returns the new version and the status, or `None`.
    pub fn publish_status(
        &mut self,
        name: &NodeName,
        version: u64,
        status: NodeSubnetStatus,
    ) -> Option<(u64, NodeSubnetStatus)> {
        let before = self.subnets.get(name).cloned()?;
        if before.version != version {
            return None;
        }
        // The agent reads back the conditions that it wrote. The conditions of other writers are added below.
        self.statuses.insert(before.uid.clone(), status.clone());
        let reported = NodeSubnetStatus {
            conditions: Vec::new(),
            ..status.clone()
        };
        let report = agent_report::read(&serde_json::to_value(&reported).unwrap());
        let conditions = before.report.iter().flat_map(|it| &it.conditions);
        let conditions = conditions.filter(|it| &*it.kind != OF_ANOTHER).cloned();
        let report = AgentReport {
            conditions: conditions.chain([of_another(version)]).collect(),
            ..*report.unwrap()
        };
        let subnet = Subnet {
            report: Some(Box::new(report)),
            ..Subnet::clone(&before)
        };
        let after = self.put_if_changed(&*before, subnet);
        Some((after.version, status))
    }

    /// Writes an agent's NodeAddresses. `is_new` must be true if and only if the object does not exist yet. Otherwise
    /// nothing is written, and the result is `false`.
    pub fn write_addresses(
        &mut self,
        name: &NodeName,
        owner: &ObjectUid,
        is_new: bool,
        list: NodeAddressesSpec,
    ) -> bool {
        if is_new == self.addresses.contains_key(name) {
            return false;
        }
        let owner = owner.to_string();
        let written = AddressesSeen { owner, list };
        self.addresses.insert(name.clone(), written.clone());
        let commit = Commit::Addresses(name.clone(), Some(written));
        self.commits.push(commit);
        true
    }

    fn assign(&mut self, a: &PodCidrAllocation) -> Result<Node, Rejection> {
        let before = read(&self.nodes, &a.name)?;
        if !before.is_empty() {
            return Err(guard("test /spec/podCIDRs"));
        }
        let (same_uid, same_term) = (before.uid == a.uid, self.passes_term(&before, a));
        match (same_uid, same_term) {
            (false, true) => self.averted.0 += u64::from(self.is_held(a)),
            (true, false) => self.averted.1 += u64::from(self.is_held(a)),
            _ => {}
        }
        if !same_uid && !Mutation::UidNotTested.is_on() {
            return Err(guard("test /metadata/uid"));
        }
        if !same_term && !Mutation::TermNotTested.is_on() {
            return Err(guard(TERM_TEST));
        }
        let node = Node {
            pod_cidrs: a.cidrs.clone().into(),
            ..before.clone()
        };
        Ok(self.put_if_changed(&before, node))
    }

    fn passes_term(&self, node: &Node, a: &PodCidrAllocation) -> bool {
        let overlooked = self.overlooked.get(&node.uid);
        same_term(node, a.term.as_ref(), a.annotated)
            || overlooked.is_some_and(|terms| terms.contains(&a.term))
    }

    /// Whether another node has a podCIDR that overlaps the ranges of this allocation.
    fn is_held(&self, a: &PodCidrAllocation) -> bool {
        let hits = |held: &Cidr| a.cidrs.iter().any(|cidr| cidr.overlaps(held));
        let nodes = &mut self.nodes.live.values();
        nodes.any(|node| node.name != a.name && counted(node).any(hits))
    }

    /// Returns the Node of that name, if it has this UID.
    fn node_of_uid(&self, name: &NodeName, uid: &ObjectUid) -> Result<Node, Rejection> {
        let node = read(&self.nodes, name)?;
        if node.uid != *uid {
            return Err(guard("test /metadata/uid"));
        }
        Ok(node)
    }

    fn touch(&mut self, touch: &NodeTouch) -> Result<Node, Rejection> {
        let before = self.node_of_uid(&touch.name, &touch.uid)?;
        if !same_term(&before, touch.from.as_ref(), touch.annotated) {
            return Err(guard(TERM_TEST));
        }
        if Mutation::TouchWithoutEffect.is_on() {
            let terms = self.overlooked.entry(before.uid.clone()).or_default();
            terms.insert(before.term.clone());
        }
        let node = Node {
            term: Some(touch.term.clone()),
            annotated: true,
            ..before.clone()
        };
        Ok(self.put_if_changed(&before, node))
    }

    fn set_taints(&mut self, change: &TaintsChange) -> Result<Node, Rejection> {
        let before = self.node_of_uid(&change.name, &change.uid)?;
        if before.taints != change.before {
            return Err(guard("test /spec/taints"));
        }
        let of_others = |taints: &[NodeTaint]| -> Vec<NodeTaint> {
            let others = taints.iter().filter(|it| !it.is_of_exhaustion());
            others.cloned().collect()
        };
        assert_eq!(
            of_others(&before.taints),
            of_others(&change.after),
            "a taint that somebody else has set stays as it is"
        );
        let node = Node {
            taints: change.after.clone(),
            ..before.clone()
        };
        Ok(self.put_if_changed(&before, node))
    }

    fn set_exhausted(&mut self, change: &ExhaustedChange) -> Result<Node, Rejection> {
        let before = self.node_of_uid(&change.name, &change.uid)?;
        let node = Node {
            exhausted: change.message.clone(),
            ..before.clone()
        };
        Ok(self.put_if_changed(&before, node))
    }

    pub fn lease(&mut self, call: LeaseCall, wall: Timestamp) -> LeaseAnswer {
        let version = self.lease.as_ref().map(|it| it.resource_version.clone());
        match call {
            LeaseCall::Get => {
                let record = self.lease.clone();
                record.map_or(LeaseAnswer::Missing, LeaseAnswer::Found)
            }
            LeaseCall::Create(record) if version.is_none() => self.write_lease(record, wall),
            LeaseCall::Replace(record) if version.as_ref() == Some(&record.resource_version) => {
                self.write_lease(record, wall)
            }
            LeaseCall::Create(_) | LeaseCall::Replace(_) => LeaseAnswer::Conflict,
        }
    }

    /// Returns the version of the Lease, and the time at which it was written, as the writer's wall clock showed it.
    pub fn renewal(&self, record: &LeaseRecord) -> Option<(u64, Timestamp)> {
        let renewed = self.renewals.get(&record.resource_version)?;
        Some((record.resource_version.parse().ok()?, *renewed))
    }

    fn write_lease(&mut self, mut record: LeaseRecord, wall: Timestamp) -> LeaseAnswer {
        record.resource_version = self.revision().to_string();
        if self.forgets_intents {
            record.intents = None;
        }
        self.renewals.insert(record.resource_version.clone(), wall);
        self.lease = Some(record.clone());
        LeaseAnswer::Written(record)
    }
}

/// Returns a claim as the API server stores it when a controller creates it.
fn new_claim(name: ClaimName, uid: ObjectUid, new: &NewClaim, at: Time) -> Claim {
    let owner = new.owner.as_ref().expect("its owner would not outlive it");
    let addresses = new.spec.addresses.iter().map(|it| Addr::parse_strict(it));
    Claim {
        name,
        uid,
        version: 0,
        generation: 1,
        created: seconds(at),
        deleting: false,
        finalizers: vec![CLAIM_FINALIZER.to_owned()].into(),
        spec: Ok(ClaimSpec {
            pool: new.spec.pool.as_deref().map(PoolName::from),
            addresses: addresses.map(|it| it.unwrap()).collect(),
            ttl: new.spec.ttl_seconds_after_use,
        }),
        status: ClaimStatus::default(),
        ipam_claim: (owner.kind == ClaimOwnerKind::IpamClaim).then(|| owner.uid.clone()),
        only_pod: (owner.kind == ClaimOwnerKind::Pod).then(|| {
            let (name, uid) = (owner.name.clone(), owner.uid.clone());
            Box::new(OnlyPod { name, uid })
        }),
    }
}

pub fn new_pool(name: PoolName, uid: ObjectUid, spec: IPPoolSpec, at: Time) -> Pool {
    Pool {
        name,
        uid,
        version: 0,
        generation: 1,
        created: seconds(at),
        deleting: false,
        finalizers: Vec::new(),
        spec: Ok(spec),
        status: None,
    }
}

fn all<T: Stored>(kind: &Kind<T>) -> Vec<T> {
    kind.live.values().map(|object| T::clone(object)).collect()
}

fn read<T: Stored>(kind: &Kind<T>, name: &str) -> Result<T, Rejection>
where
    T::Name: Borrow<str>,
{
    let object = kind.get(name).ok_or(Rejection::Missing)?;
    Ok(T::clone(object))
}

/// Returns an object if it still has the UID and version that the sender of a request has read.
fn as_it_was_read<T: Stored>(kind: &Kind<T>, as_read: &KnownObject) -> Result<Arc<T>, Rejection>
where
    T::Name: Borrow<str>,
{
    let object = kind.get(&*as_read.name).ok_or(Rejection::Missing)?;
    if KnownObject::of(&**object) != *as_read {
        return Err(guard("the object has been modified"));
    }
    Ok(object.clone())
}

/// Whether the node passes the test of the term annotation. JSON Patch can test an annotation only if the node has
/// annotations. If the node has none (`annotated` is false), the request tests that there are none.
fn same_term(node: &Node, term: Option<&TermId>, annotated: bool) -> bool {
    node.annotated == annotated && (!annotated || node.term.as_ref() == term)
}

/// Returns the condition that another writer sets after it has read this version of a NodeSubnet.
fn of_another(version: u64) -> SubnetCondition {
    SubnetCondition {
        kind: OF_ANOTHER.into(),
        status: "Unknown".into(),
        reason: "Somebody".into(),
        message: format!("after {version}"),
        since: "2026-01-02T03:04:05Z".into(),
        generation: i64::try_from(version).ok(),
    }
}

fn guard(text: &str) -> Rejection {
    Rejection::Guard(text.to_owned())
}
