//! The API server in memory, with the rules by which a real one accepts and rejects writes.
//!
//! All kinds share one revision counter. Reads and lists are consistent. A write that changes nothing keeps the
//! version, as in etcd. The history of each kind (`object_log`) contains every change with its time.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadastre_agent::seen::AddressesSeen;
use cadastre_api::{NodeAddressesSpec, NodeSubnetStatus, Requests, block_name};
use cadastre_controller::cluster::agent_report;
use cadastre_controller::cluster::lease::{LeaseAnswer, LeaseCall, LeaseRecord};
use cadastre_controller::cluster::names::{NodeName, ObjectUid, PoolName, TermId};
use cadastre_controller::cluster::objects::{
    AgentReport, Block, Node, Pod, Pool, ServiceRange, Subnet, SubnetCondition, Text,
};
use cadastre_controller::cluster::request::{
    ApiRequest, KnownObject, NodeTouch, ObjectKind as Of, ObjectSpec, PodCidrAllocation, Rejection,
    RequestOutcome,
};

use jiff::Timestamp;

use super::clock::{Time, seconds};
use super::object_log::{Kind, Versioned};
use super::shape::counted;
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// A condition of NodeSubnets that another writer owns. The simulation updates it whenever an agent writes its status.
const OF_ANOTHER: &str = "OfAnother";

/// Who wrote a change.
#[derive(Clone, Debug, PartialEq)]
pub enum Author {
    /// Everyone else: kubelets, users, a foreign allocator.
    World,
    /// A node's agent, which writes its own NodeSubnet.
    Agent,
    /// A controller process during one term.
    Controller {
        process: usize,
        incarnation: u32,
        term: TermId,
    },
}

/// A changed object, before and after the change.
pub enum Commit {
    Node(Option<Arc<Node>>, Option<Arc<Node>>),
    Pool(Option<Arc<Pool>>, Option<Arc<Pool>>),
    Subnet(Option<Arc<Subnet>>, Option<Arc<Subnet>>),
    Block(Option<Arc<Block>>, Option<Arc<Block>>),
    Service,
    /// The pod's node, the pod, and whether it still exists.
    Pod(NodeName, Arc<Pod>, bool),
    /// The name of the node, and its NodeAddresses if they exist.
    Addresses(NodeName, Option<AddressesSeen>),
}

/// The content of etcd at one moment.
pub struct State {
    revision: u64,
    pub nodes: BTreeMap<NodeName, Arc<Node>>,
    pools: BTreeMap<PoolName, Arc<Pool>>,
    subnets: BTreeMap<NodeName, Arc<Subnet>>,
    pub blocks: BTreeMap<Text, Arc<Block>>,
    services: BTreeMap<Text, Arc<ServiceRange>>,
    pub pods: BTreeMap<Text, Arc<Pod>>,
    pub lease: Option<LeaseRecord>,
    finalized: BTreeSet<ObjectUid>,
    placed: BTreeMap<ObjectUid, NodeName>,
    statuses: BTreeMap<ObjectUid, NodeSubnetStatus>,
    addresses: BTreeMap<NodeName, AddressesSeen>,
}

#[derive(Default)]
pub struct Api {
    revision: u64,
    uids: u64,
    pub nodes: Kind<Node>,
    pub pools: Kind<Pool>,
    pub subnets: Kind<Subnet>,
    pub blocks: Kind<Block>,
    pub services: Kind<ServiceRange>,
    pub pods: Kind<Pod>,
    pub lease: Option<LeaseRecord>,
    /// When each version of the Lease was written, by the wall clock of the writer.
    pub renewals: BTreeMap<String, Timestamp>,
    /// UIDs of nodes that have a finalizer of another component.
    pub finalized: BTreeSet<ObjectUid>,
    /// What agents have written: statuses of NodeSubnets by UID, and NodeAddresses by name.
    pub statuses: BTreeMap<ObjectUid, NodeSubnetStatus>,
    pub addresses: BTreeMap<NodeName, AddressesSeen>,
    /// Each pod's node, by the pod's UID.
    pub placed: BTreeMap<ObjectUid, NodeName>,
    /// Whether the Lease loses the intents that are written to it.
    pub forgets_intents: bool,
    /// By UID of a node: its terms before each touch that the mutation `TouchWithoutEffect` made ineffective.
    overlooked: BTreeMap<ObjectUid, BTreeSet<Option<TermId>>>,
    /// Duplicates that only the test of the node's UID has prevented, and those that only the test of the term has.
    pub averted: (u64, u64),
    /// Changes that the watches and checks have not received yet.
    pub commits: Vec<Commit>,
}

impl Api {
    pub fn uid(&mut self) -> ObjectUid {
        self.uids += 1;
        format!("u{}", self.uids).into()
    }

    fn revision(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }

    /// Returns the content of a backup. The counter of UIDs is not part of it, because real UIDs never repeat.
    pub fn backup(&self) -> State {
        State {
            revision: self.revision,
            nodes: self.nodes.live.clone(),
            pools: self.pools.live.clone(),
            subnets: self.subnets.live.clone(),
            blocks: self.blocks.live.clone(),
            services: self.services.live.clone(),
            pods: self.pods.live.clone(),
            lease: self.lease.clone(),
            finalized: self.finalized.clone(),
            placed: self.placed.clone(),
            statuses: self.statuses.clone(),
            addresses: self.addresses.clone(),
        }
    }

    /// Restores the content of a backup, including the revision counter.
    pub fn put_back(&mut self, state: State) {
        let version = state.revision;
        self.revision = version;
        self.nodes.put_back(state.nodes, version);
        self.pools.put_back(state.pools, version);
        self.subnets.put_back(state.subnets, version);
        self.blocks.put_back(state.blocks, version);
        self.services.put_back(state.services, version);
        self.pods.put_back(state.pods, version);
        self.lease = state.lease;
        self.finalized = state.finalized;
        self.placed = state.placed;
        self.statuses = state.statuses;
        self.addresses = state.addresses;
    }

    // Writes of everyone except controllers. They follow the server's rules, but have no preconditions.

    pub fn put_node(&mut self, node: Node, at: Time) -> Arc<Node> {
        let before = self.nodes.get(&node.name).cloned();
        let version = self.revision();
        let after = self.nodes.put(node, version, at);
        self.commits.push(Commit::Node(before, Some(after.clone())));
        after
    }

    /// Deletes a node at once, or only marks it if it has a finalizer.
    pub fn delete_node(&mut self, name: &NodeName, at: Time) {
        let Some(node) = self.nodes.get(name).cloned() else {
            return;
        };
        if !self.finalized.contains(&node.uid) {
            let version = self.revision();
            let before = self.nodes.remove(name, version, at);
            self.commits.push(Commit::Node(before, None));
        } else if !node.deleting {
            self.put_node(
                Node {
                    deleting: true,
                    ..Node::clone(&node)
                },
                at,
            );
        }
    }

    pub fn put_pool(&mut self, pool: Pool, at: Time) -> Arc<Pool> {
        let before = self.pools.get(&pool.name).cloned();
        let version = self.revision();
        let after = self.pools.put(pool, version, at);
        self.commits.push(Commit::Pool(before, Some(after.clone())));
        after
    }

    pub fn delete_pool(&mut self, name: &PoolName, at: Time) {
        let Some(pool) = self.pools.get(name).cloned() else {
            return;
        };
        if pool.finalizers.is_empty() {
            self.remove_pool(name, at);
        } else if !pool.deleting {
            let generation = pool.generation + 1;
            self.put_pool(
                Pool {
                    deleting: true,
                    generation,
                    ..Pool::clone(&pool)
                },
                at,
            );
        }
    }

    fn remove_pool(&mut self, name: &PoolName, at: Time) {
        let version = self.revision();
        let before = self.pools.remove(name, version, at);
        self.commits.push(Commit::Pool(before, None));
    }

    pub fn put_subnet(&mut self, subnet: Subnet, at: Time) -> Arc<Subnet> {
        let before = self.subnets.get(&subnet.name).cloned();
        let version = self.revision();
        let after = self.subnets.put(subnet, version, at);
        self.commits
            .push(Commit::Subnet(before, Some(after.clone())));
        after
    }

    pub fn delete_subnet(&mut self, name: &NodeName, at: Time) {
        let version = self.revision();
        let before = self.subnets.remove(name, version, at);
        if let Some(subnet) = &before {
            self.statuses.remove(&subnet.uid);
            // Objects that the NodeSubnet owns are deleted with it.
            let is_owned = |it: &AddressesSeen| *it.owner == *subnet.uid;
            if self.addresses.get(name).is_some_and(is_owned) {
                self.addresses.remove(name);
                self.commits
                    .push(Commit::Addresses(subnet.name.clone(), None));
            }
            self.commits.push(Commit::Subnet(before, None));
        }
    }

    pub fn put_block(&mut self, block: Block, at: Time) -> Arc<Block> {
        let before = self.blocks.get(&block.name).cloned();
        let version = self.revision();
        let after = self.blocks.put(block, version, at);
        self.commits
            .push(Commit::Block(before, Some(after.clone())));
        after
    }

    pub fn delete_block(&mut self, name: &Text, at: Time) {
        let version = self.revision();
        let before = self.blocks.remove(name, version, at);
        if before.is_some() {
            self.commits.push(Commit::Block(before, None));
        }
    }

    pub fn put_service(&mut self, service: ServiceRange, at: Time) {
        let version = self.revision();
        self.services.put(service, version, at);
        self.commits.push(Commit::Service);
    }

    pub fn delete_service(&mut self, name: &Text, at: Time) {
        let version = self.revision();
        self.services.remove(name, version, at);
        self.commits.push(Commit::Service);
    }

    pub fn put_pod(&mut self, pod: Pod, node: NodeName, at: Time) {
        let version = self.revision();
        self.placed.insert(pod.uid.clone(), node.clone());
        let pod = self.pods.put(pod, version, at);
        self.commits.push(Commit::Pod(node, pod, true));
    }

    pub fn delete_pod(&mut self, name: &Text, at: Time) {
        let version = self.revision();
        if let Some(pod) = self.pods.remove(name, version, at) {
            let node = self.placed.remove(&pod.uid).unwrap_or_else(|| "".into());
            self.commits.push(Commit::Pod(node, pod, false));
        }
    }

    pub fn pods_on<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = &'a Arc<Pod>> {
        self.pods
            .live
            .values()
            .filter(move |pod| self.placed.get(&pod.uid).is_some_and(|n| n == node))
    }

    // Requests of controllers.

    pub fn execute(&mut self, request: &ApiRequest, at: Time) -> RequestOutcome {
        match request {
            ApiRequest::List(Of::Node) => RequestOutcome::Nodes(all(&self.nodes)),
            ApiRequest::List(Of::Subnet) => RequestOutcome::Subnets(all(&self.subnets)),
            ApiRequest::List(Of::Block) => RequestOutcome::Blocks(all(&self.blocks)),
            ApiRequest::List(Of::Pool) => RequestOutcome::Pools(all(&self.pools)),
            ApiRequest::ListPodsOf { node } => {
                RequestOutcome::Pods(self.pods_on(node).map(|p| Pod::clone(p)).collect())
            }
            ApiRequest::Read(Of::Node, name) => found(&self.nodes, name, RequestOutcome::Node),
            ApiRequest::Read(Of::Subnet, name) => {
                found(&self.subnets, name, RequestOutcome::Subnet)
            }
            ApiRequest::Read(Of::Pool, name) => found(&self.pools, name, RequestOutcome::Pool),
            ApiRequest::ReadKubeadm => RequestOutcome::Kubeadm(None),
            ApiRequest::Create(name, ObjectSpec::Pool(spec)) => {
                if self.pools.get(&**name).is_some() {
                    return guard("already exists");
                }
                let pool = Pool {
                    name: (**name).into(),
                    uid: self.uid(),
                    version: 0,
                    generation: 1,
                    created: seconds(at),
                    deleting: false,
                    finalizers: Vec::new(),
                    spec: Ok((**spec).clone()),
                    status: None,
                };
                RequestOutcome::Pool(Pool::clone(&self.put_pool(pool, at)))
            }
            ApiRequest::Read(Of::Block, name) => found(&self.blocks, name, RequestOutcome::Block),
            ApiRequest::Create(name, ObjectSpec::Block(spec)) => {
                if self.blocks.get(name).is_some() {
                    return guard("already exists");
                }
                assert_eq!(**name, *block_name(&spec.cidr), "the server's own rule");
                let block = Block {
                    name: name.clone(),
                    uid: self.uid(),
                    version: 0,
                    touched: false,
                    spec: Ok(spec.clone()),
                };
                RequestOutcome::Block(Block::clone(&self.put_block(block, at)))
            }
            ApiRequest::Replace(read, ObjectSpec::Block(spec)) => {
                let Some(known) = self.blocks.get(&read.name).cloned() else {
                    return missing();
                };
                if KnownObject::of(&*known) != *read {
                    return guard("the object has been modified");
                }
                if known.spec.as_ref() == Ok(spec) {
                    return RequestOutcome::Block(Block::clone(&known));
                }
                let block = Block {
                    touched: true,
                    spec: Ok(spec.clone()),
                    ..Block::clone(&known)
                };
                RequestOutcome::Block(Block::clone(&self.put_block(block, at)))
            }
            ApiRequest::Delete(Of::Block, read) => {
                let Some(known) = self.blocks.get(&read.name) else {
                    return RequestOutcome::Gone;
                };
                if KnownObject::of(&**known) != *read {
                    return guard("precondition failed");
                }
                self.delete_block(&read.name, at);
                RequestOutcome::Gone
            }
            ApiRequest::SetSubnetConditions(read, conditions) => {
                self.set_conditions(read, conditions, at)
            }
            ApiRequest::AssignPodCidrs(assignment) => self.assign(assignment, at),
            ApiRequest::TouchNode(touch) => self.touch(touch, at),
            ApiRequest::Create(name, ObjectSpec::Subnet(spec)) => {
                if self.subnets.get(&**name).is_some() {
                    return guard("already exists");
                }
                let uid = self.uid();
                let subnet = Subnet {
                    name: (**name).into(),
                    uid,
                    version: 0,
                    spec: Ok(spec.clone()),
                    is_partial: false,
                    requests: Requests::default(),
                    report: None,
                };
                RequestOutcome::Subnet(Subnet::clone(&self.put_subnet(subnet, at)))
            }
            ApiRequest::Replace(read, ObjectSpec::Subnet(spec)) => {
                let Some(known) = self.subnets.get(&*read.name).cloned() else {
                    return missing();
                };
                if KnownObject::of(&*known) != *read {
                    return guard("the object has been modified");
                }
                let subnet = Subnet {
                    spec: Ok(spec.clone()),
                    is_partial: false,
                    ..Subnet::clone(&known)
                };
                if subnet == *known {
                    return RequestOutcome::Subnet(subnet);
                }
                RequestOutcome::Subnet(Subnet::clone(&self.put_subnet(subnet, at)))
            }
            ApiRequest::Delete(Of::Subnet, read) => {
                let Some(known) = self.subnets.get(&*read.name) else {
                    return RequestOutcome::Gone;
                };
                if KnownObject::of(&**known) != *read {
                    return guard("precondition failed");
                }
                let name = known.name.clone();
                self.delete_subnet(&name, at);
                RequestOutcome::Gone
            }
            ApiRequest::Replace(_, ObjectSpec::Pool(_))
            | ApiRequest::Delete(Of::Node | Of::Pool, _) => {
                panic!("no controller asks for it: {request:?}")
            }
            ApiRequest::SetPoolFinalizers(read, finalizers) => {
                let Some(known) = self.pools.get(&*read.name).cloned() else {
                    return missing();
                };
                if KnownObject::of(&*known) != *read {
                    return guard("the object has been modified");
                }
                if known.deleting && finalizers.iter().any(|f| !known.finalizers.contains(f)) {
                    return guard("no new finalizers can be added if the object is being deleted");
                }
                let pool = Pool {
                    finalizers: finalizers.clone(),
                    ..Pool::clone(&known)
                };
                self.update_pool(&known, pool, at)
            }
            ApiRequest::SetPoolStatus(read, status) => {
                let Some(known) = self.pools.get(&*read.name).cloned() else {
                    return missing();
                };
                if KnownObject::of(&*known) != *read {
                    return guard("the object has been modified");
                }
                let pool = Pool {
                    status: Some(status.clone()),
                    ..Pool::clone(&known)
                };
                self.update_pool(&known, pool, at)
            }
        }
    }

    fn set_conditions(
        &mut self,
        read: &KnownObject,
        conditions: &[SubnetCondition],
        at: Time,
    ) -> RequestOutcome {
        let Some(known) = self.subnets.get(&*read.name).cloned() else {
            return missing();
        };
        if KnownObject::of(&*known) != *read {
            return guard("the object has been modified");
        }
        let before = known.report.iter().flat_map(|it| &it.conditions);
        let of_another = |it: &&SubnetCondition| &*it.kind == OF_ANOTHER;
        assert_eq!(
            before.clone().find(of_another),
            conditions.iter().find(of_another),
            "a condition that somebody else has written stays as it is"
        );
        let mut subnet = Subnet::clone(&known);
        subnet.report.get_or_insert_default().conditions = conditions.into();
        if subnet == *known {
            return RequestOutcome::Subnet(subnet);
        }
        RequestOutcome::Subnet(Subnet::clone(&self.put_subnet(subnet, at)))
    }

    /// Writes the status of an agent if the version matches. Returns the new version and the status, or `None`.
    pub fn publish_status(
        &mut self,
        name: &NodeName,
        version: u64,
        status: NodeSubnetStatus,
        at: Time,
    ) -> Option<(u64, NodeSubnetStatus)> {
        let known = self.subnets.get(name).cloned()?;
        if known.version != version {
            return None;
        }
        let status = NodeSubnetStatus {
            conditions: Vec::new(),
            ..status
        };
        let read = agent_report::read(&serde_json::to_value(&status).unwrap());
        self.statuses.insert(known.uid.clone(), status.clone());
        let before = known.report.iter().flat_map(|it| &it.conditions);
        let mut conditions: Vec<SubnetCondition> = before
            .filter(|it| &*it.kind != OF_ANOTHER)
            .cloned()
            .collect();
        conditions.push(of_another(version));
        let report = AgentReport {
            conditions: conditions.into(),
            ..*read.unwrap()
        };
        if known.report.as_deref() != Some(&report) {
            let subnet = Subnet {
                report: Some(Box::new(report)),
                ..Subnet::clone(&known)
            };
            self.put_subnet(subnet, at);
        }
        Some((self.subnets.get(name)?.version, status))
    }

    /// Writes an agent's NodeAddresses. Returns `false` if `is_new` and they exist, or if neither is the case.
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
        let seen = AddressesSeen {
            owner: owner.to_string(),
            list,
        };
        self.addresses.insert(name.clone(), seen.clone());
        self.commits
            .push(Commit::Addresses(name.clone(), Some(seen)));
        true
    }

    fn update_pool(&mut self, known: &Pool, pool: Pool, at: Time) -> RequestOutcome {
        if pool == *known {
            return RequestOutcome::Pool(pool);
        }
        let after = self.put_pool(pool, at);
        if after.deleting && after.finalizers.is_empty() {
            self.remove_pool(&after.name, at);
        }
        RequestOutcome::Pool(Pool::clone(&after))
    }

    fn assign(&mut self, a: &PodCidrAllocation, at: Time) -> RequestOutcome {
        let Some(known) = self.nodes.get(&a.name).cloned() else {
            return missing();
        };
        if !known.is_empty() {
            return guard("test /spec/podCIDRs");
        }
        let (same_uid, same_term) = (known.uid == a.uid, self.passes_term(&known, a));
        if (same_uid, same_term) == (false, true) {
            self.averted.0 += u64::from(self.is_held(a));
        }
        if (same_uid, same_term) == (true, false) {
            self.averted.1 += u64::from(self.is_held(a));
        }
        if !same_uid && !Mutation::UidNotTested.is_on() {
            return guard("test /metadata/uid");
        }
        if !same_term && !Mutation::TermNotTested.is_on() {
            return guard("test /metadata/annotations/cadastre.dev~1term");
        }
        let node = Node {
            pod_cidrs: a.cidrs.clone().into(),
            ..Node::clone(&known)
        };
        RequestOutcome::Node(Node::clone(&self.put_node(node, at)))
    }

    fn passes_term(&self, known: &Node, a: &PodCidrAllocation) -> bool {
        let overlooked = self.overlooked.get(&known.uid);
        same_term(known, a.term.as_ref(), a.annotated)
            || overlooked.is_some_and(|terms| terms.contains(&a.term))
    }

    /// Whether another node has a podCIDR that overlaps these ranges.
    fn is_held(&self, a: &PodCidrAllocation) -> bool {
        let hits = |held: &Cidr| a.cidrs.iter().any(|cidr| cidr.overlaps(held));
        let nodes = &mut self.nodes.live.values();
        nodes.any(|node| node.name != a.name && counted(node).any(hits))
    }

    fn touch(&mut self, touch: &NodeTouch, at: Time) -> RequestOutcome {
        let Some(known) = self.nodes.get(&touch.name).cloned() else {
            return missing();
        };
        if known.uid != touch.uid {
            return guard("test /metadata/uid");
        }
        if !same_term(&known, touch.from.as_ref(), touch.annotated) {
            return guard("test /metadata/annotations/cadastre.dev~1term");
        }
        if Mutation::TouchWithoutEffect.is_on() {
            let terms = self.overlooked.entry(known.uid.clone()).or_default();
            terms.insert(known.term.clone());
        }
        let node = Node {
            term: Some(touch.term.clone()),
            annotated: true,
            ..Node::clone(&known)
        };
        if node == *known {
            return RequestOutcome::Node(node);
        }
        RequestOutcome::Node(Node::clone(&self.put_node(node, at)))
    }

    pub fn lease(&mut self, ask: LeaseCall, wall: Timestamp) -> LeaseAnswer {
        match ask {
            LeaseCall::Get => self
                .lease
                .clone()
                .map_or(LeaseAnswer::Missing, LeaseAnswer::Found),
            LeaseCall::Create(record) if self.lease.is_none() => self.write_lease(record, wall),
            LeaseCall::Replace(record)
                if self
                    .lease
                    .as_ref()
                    .is_some_and(|known| known.resource_version == record.resource_version) =>
            {
                self.write_lease(record, wall)
            }
            LeaseCall::Create(_) | LeaseCall::Replace(_) => LeaseAnswer::Conflict,
        }
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

fn all<T: Versioned>(kind: &Kind<T>) -> Vec<T> {
    kind.live.values().map(|object| T::clone(object)).collect()
}

fn found<T: Versioned>(
    kind: &Kind<T>,
    name: &str,
    outcome: fn(T) -> RequestOutcome,
) -> RequestOutcome
where
    T::Name: Borrow<str>,
{
    kind.get(name)
        .map_or_else(missing, |object| outcome(T::clone(object)))
}

/// Whether the node passes the test of the term annotation. JSON Patch can test an annotation only if the node has
/// annotations; otherwise the request tests that there are none.
fn same_term(node: &Node, term: Option<&TermId>, annotated: bool) -> bool {
    if annotated {
        node.annotated && node.term.as_ref() == term
    } else {
        !node.annotated
    }
}

fn missing() -> RequestOutcome {
    RequestOutcome::Rejected(Rejection::Missing)
}

/// The condition that another writer updates when it has seen this version of a NodeSubnet.
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

fn guard(text: &str) -> RequestOutcome {
    RequestOutcome::Rejected(Rejection::Guard(text.to_owned()))
}
