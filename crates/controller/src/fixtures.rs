//! Builders for unit tests: single objects, and caches with the objects of a small cluster.

use std::time::Duration;

use serde_json::json;

use crate::allocations::AllocationState;
use crate::allocations::holders::HolderUse;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::NodeName;
use crate::cluster::object_cache::ObjectCache;
use crate::cluster::objects::{
    AgentReport, Block, BlockReport, BlockSpec, Claim, ClaimSource, ClaimSpec, ClaimStatus,
    MachineIdentity, Node, Object, Owner, Pod, PodClaim, Pool, Subnet,
};
use crate::cluster::request::ApiRequest;
use crate::reconcile::Loop;
use crate::report::EventRecord;
use crate::{Context, Now};
use cadastre_api::{
    AllocatedBlock, CLAIM_FINALIZER, FINALIZER, IPPoolSpec, IPv6Ranges, NodeSubnetSpec, Requests,
    block_name,
};
use cadastre_core::{Addr, Cidr, HoldingState};
use cadastre_daemon::watch::ObjectEvent;

pub(crate) const NOW: Now = Now {
    mono: Duration::ZERO,
    wall: jiff::Timestamp::UNIX_EPOCH,
};

pub(crate) fn addr(text: &str) -> Addr {
    Addr::parse_strict(text).unwrap()
}

/// Returns [`NOW`], but with a monotonic time of `second` seconds.
pub(crate) fn at(second: u64) -> Now {
    Now {
        mono: Duration::from_secs(second),
        ..NOW
    }
}

pub(crate) fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

/// Returns a node without podCIDRs. Its UID equals its name.
pub(crate) fn node(name: &str) -> Node {
    Node {
        name: name.into(),
        uid: name.into(),
        version: 1,
        labels: [].into(),
        term: None,
        asn: None,
        annotated: false,
        deleting: false,
        pod_cidrs: [].into(),
        unreadable: [].into(),
        addresses: [].into(),
        machine: MachineIdentity::default(),
        taints: Box::default(),
        exhausted: None,
        max_pods: 0,
    }
}

/// Returns a node with these podCIDRs. Its UID equals its name.
pub(crate) fn node_with(name: &str, pod_cidrs: &[&str]) -> Node {
    Node {
        pod_cidrs: pod_cidrs.iter().map(|text| cidr(text)).collect(),
        ..node(name)
    }
}

/// Returns a pod that reports these addresses. Its name and UID are always the same, so calls with different versions
/// return versions of one pod.
pub(crate) fn pod(version: u64, addresses: &[&str]) -> Pod {
    let addresses = addresses.iter().map(|text| text.parse().unwrap());
    Pod {
        name: "default/pod".into(),
        uid: "pod".into(),
        version,
        finished: false,
        mirror_of: None,
        node: None,
        needs_default: true,
        replaceable: None,
        claim: None,
        interface_claims: Box::default(),
        addresses: addresses.map(|it: std::net::IpAddr| it.into()).collect(),
    }
}

/// Returns a pool that allocates /28 blocks.
pub(crate) fn pool(name: &str, cidr: &str) -> Pool {
    let spec = json!({"ipv4": {"cidrs": [cidr], "blockSize": 28}});
    Pool {
        name: name.into(),
        uid: name.into(),
        version: 1,
        generation: 1,
        created: 0,
        deleting: false,
        finalizers: vec![FINALIZER.to_owned()],
        spec: Ok(serde_json::from_value(spec).unwrap()),
        status: None,
    }
}

/// Returns a pool that allocates /28 blocks. Its spec is edited by the function `change`.
pub(crate) fn pool_with(name: &str, cidr: &str, change: impl FnOnce(&mut IPPoolSpec)) -> Pool {
    let mut pool = pool(name, cidr);
    change(pool.spec.as_mut().unwrap());
    pool
}

pub(crate) fn ipv6_ranges(cidr: &str, block_size: u32) -> IPv6Ranges {
    IPv6Ranges {
        cidrs: vec![cidr.to_owned()],
        block_size: Some(block_size),
        gateway: None,
    }
}

/// Returns a pool with a single range, which is an IPv6 range.
pub(crate) fn pool_of_v6(name: &str, range: &str, block_size: u32) -> Pool {
    pool_with(name, "10.0.0.0/24", |spec| {
        spec.ipv4 = None;
        spec.ipv6 = Some(ipv6_ranges(range, block_size));
    })
}

/// Returns the entry of a block of pool `p` in a NodeSubnet. The UID of the block's object equals its CIDR.
pub(crate) fn listed_block(cidr: &str) -> AllocatedBlock {
    AllocatedBlock {
        cidr: cidr.to_owned(),
        uid: cidr.to_owned(),
        pool: "p".to_owned(),
        claim: None,
        vmi_uid: None,
        standby: false,
        parent: None,
        recall: None,
        reserved: Vec::new(),
        on_request: Vec::new(),
    }
}

/// Returns an agent's report about a block without used addresses.
pub(crate) fn block_report(text: &str) -> BlockReport {
    BlockReport {
        cidr: cidr(text),
        uid: text.into(),
        used: 0,
        cooling: 0,
        free: 16,
        withdrawn: 0,
        released: false,
    }
}

/// Returns a NodeSubnet with a demand of `wanted` in pool `p`. Its spec lists the blocks, and its status reports them
/// as empty.
pub(crate) fn subnet(name: &str, blocks: &[&str], wanted: u64) -> Subnet {
    Subnet {
        name: name.into(),
        uid: name.into(),
        version: 1,
        spec: Ok(NodeSubnetSpec {
            node_uid: Some(name.to_owned()),
            blocks: blocks.iter().map(|it| listed_block(it)).collect(),
            ..NodeSubnetSpec::default()
        }),
        is_partial: false,
        has_managed_fields: false,
        requests: Requests::default(),
        report: Some(Box::new(AgentReport {
            node_uid: name.into(),
            demand: [("p".into(), wanted)].into(),
            blocks: blocks.iter().map(|it| block_report(it)).collect(),
            ..AgentReport::default()
        })),
    }
}

/// Returns the object of a block of pool `p`. The object's UID equals the block's CIDR.
pub(crate) fn block(text: &str, owner: Owner) -> Block {
    Block {
        name: block_name(&cidr(text)).into(),
        uid: text.into(),
        version: 1,
        touched: false,
        spec: Ok(BlockSpec {
            cidr: cidr(text),
            pool: "p".into(),
            owner,
            parent: None,
            since: NOW.wall,
            until: None,
            vmi: None,
            number: 0,
            standby: Vec::new(),
            last_number: 0,
        }),
    }
}

/// Returns the objects of the blocks that a NodeSubnet lists.
pub(crate) fn objects(subnet: &Subnet) -> Vec<Block> {
    let spec = subnet.spec.as_ref().unwrap();
    let owner = || Owner::node(&subnet.name, &subnet.uid);
    let object = |it: &AllocatedBlock| Block {
        uid: it.uid.as_str().into(),
        ..block(&it.cidr, owner())
    };
    spec.blocks.iter().map(object).collect()
}

/// Applies a complete list of objects to a cache.
pub(crate) fn list<T: Object>(table: &mut ObjectCache<T>, objects: Vec<T>) {
    let asked = Duration::ZERO;
    table.change(ObjectEvent::Restarted { asked });
    for object in objects {
        table.change(ObjectEvent::Applied(object));
    }
    table.change(ObjectEvent::Listed);
}

/// Returns a claim of this pool, or of these addresses if there are any. The claim has the controller's finalizer.
pub(crate) fn claim(name: &str, pool: &str, addresses: &[&str]) -> Claim {
    Claim {
        name: name.into(),
        uid: name.into(),
        version: 1,
        generation: 1,
        created: 0,
        deleting: false,
        finalizers: vec![CLAIM_FINALIZER.to_owned()].into(),
        spec: Ok(ClaimSpec {
            pool: (!pool.is_empty()).then(|| pool.into()),
            addresses: addresses.iter().map(|it| addr(it)).collect(),
            ttl: None,
        }),
        status: ClaimStatus::default(),
        only_pod: None,
        ipam_claim: None,
    }
}

/// Returns a pod that names this claim. The pod is bound to `node`, if that is not `None`.
pub(crate) fn claiming_pod(name: &str, claim: &str, node: Option<&str>) -> Pod {
    Pod {
        name: format!("default/{name}").into(),
        uid: name.into(),
        node: node.map(NodeName::from),
        claim: Some(Box::new(PodClaim {
            claim: claim.into(),
            pod: name.into(),
            uid: name.into(),
            node: node.map(NodeName::from),
            created: 0,
            source: ClaimSource::User,
            machine: None,
        })),
        ..pod(1, &[])
    }
}

/// Returns a cluster of these pools and nodes.
pub(crate) fn cluster(pools: Vec<Pool>, nodes: Vec<Node>) -> ClusterCache {
    let mut cache = ClusterCache::default();
    list(&mut cache.pools, pools);
    list(&mut cache.nodes, nodes);
    cache
}

/// Returns a cluster of these pools and NodeSubnets, with the nodes and blocks of the NodeSubnets.
pub(crate) fn cluster_of(pools: Vec<Pool>, subnets: Vec<Subnet>) -> ClusterCache {
    let nodes = subnets.iter().map(|it| node(&it.name)).collect();
    let mut cache = cluster(pools, nodes);
    let blocks = subnets.iter().flat_map(objects).collect();
    list(&mut cache.blocks, blocks);
    list(&mut cache.subnets, subnets);
    cache
}

/// Returns allocations with one block of pool `p` that was chosen for the node, but whose creation was not requested
/// yet.
pub(crate) fn with_chosen_block(block: &str, node: &Node, now: Now) -> AllocationState {
    let mut allocations = AllocationState::default();
    let holder = allocations
        .holders
        .intern(HolderUse::Blocks, &node.name, &node.uid);
    let holding = allocations
        .ledger
        .record(holder, cidr(block), HoldingState::InFlight);
    allocations.begin_block(holding, cidr(block), &"p".into(), node, now);
    allocations
}

pub(crate) fn rebuilt(cache: &ClusterCache) -> AllocationState {
    AllocationState::rebuild(cache, &[], NOW).0
}

/// Calls `step` as one step of a loop. Returns its result and the reasons of the events that it reports.
pub(crate) fn reported<T>(
    cache: &ClusterCache,
    allocations: &mut AllocationState,
    now: Now,
    step: impl FnOnce(&mut Context) -> T,
) -> (T, Vec<&'static str>) {
    let mut reports: Vec<EventRecord> = Vec::new();
    let result = step(&mut Context::new(cache, allocations, &mut reports, now));
    (result, reports.iter().map(|it| it.reason).collect())
}

/// Calls `step` as one step of a loop, and returns its result.
pub(crate) fn in_step<T>(
    cache: &ClusterCache,
    allocations: &mut AllocationState,
    now: Now,
    step: impl FnOnce(&mut Context) -> T,
) -> T {
    reported(cache, allocations, now, step).0
}

/// A small cluster, and one loop of a leader under test.
pub(crate) struct LoopFixture<L> {
    pub cache: ClusterCache,
    pub allocations: AllocationState,
    pub tested: L,
    pub reports: Vec<EventRecord>,
    pub now: Now,
}

impl<L: Loop + Default> LoopFixture<L> {
    /// Creates a cluster with these pools, node a and no claims.
    pub(crate) fn new(pools: Vec<Pool>) -> Self {
        let mut cache = cluster(pools, vec![node("a")]);
        list(&mut cache.claims, Vec::new());
        LoopFixture {
            allocations: rebuilt(&cache),
            cache,
            tested: L::default(),
            reports: Vec::new(),
            now: at(0),
        }
    }

    pub(crate) fn step<T>(&mut self, step: impl FnOnce(&mut L, &mut Context) -> T) -> T {
        let (cache, allocations) = (&self.cache, &mut self.allocations);
        let mut cx = Context::new(cache, allocations, &mut self.reports, self.now);
        step(&mut self.tested, &mut cx)
    }

    /// Returns the loop's next request.
    pub(crate) fn request(&mut self) -> Option<ApiRequest> {
        self.step(|tested, cx| Some(tested.next(cx)?.0))
    }
}
