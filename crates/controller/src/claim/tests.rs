mod asked;
mod bad_input;
mod migration;

use std::slice;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::*;
use crate::Now;
use crate::allocations::AllocationState;
use crate::cluster::cache::ClusterCache;
use crate::cluster::objects::{
    AgentReport, Block, BlockReport, ClaimFinalizers, ClaimStatus, Node, Owner, Pod, Pool,
};
use crate::cluster::request::RequestOutcome;
use crate::demand::Demand;
use crate::fixtures::{
    addr, at, block, block_report, cidr, claim, claiming_pod, cluster, in_step, ipv6_ranges, list,
    node, objects, pod, pool, pool_with, rebuilt, subnet,
};
use crate::purpose::Step;
use cadastre_api::{ClaimedAddress, IPClaimStatus, Recall};
use cadastre_core::Cidr;
use cadastre_daemon::watch::ObjectEvent;

pub(super) const CLAIM: &str = "default/web-0";

/// The address that the first claim of the pool 10.0.0.0/24 gets. Claims get the highest free addresses of a pool.
pub(super) const ADDRESS: &str = "10.0.0.254/32";

/// A cluster with the claim loop. Writes take effect at once.
pub(super) struct Fixture {
    pub(super) cache: ClusterCache,
    pub(super) allocations: AllocationState,
    pub(super) claims: ClaimLoop,
    pub(super) now: Now,
    /// The last written status of each claim
    written: BTreeMap<ClaimName, IPClaimStatus>,
}

impl Fixture {
    pub(super) fn new(pools: Vec<Pool>, claims: Vec<Claim>, pods: Vec<Pod>) -> Self {
        let mut cache = cluster(pools, vec![node("a"), node("b")]);
        let mut queue = ClaimLoop::default();
        for it in &claims {
            queue.queue.add(it.name.clone());
        }
        list(&mut cache.claims, claims);
        let mut fixture = Fixture {
            allocations: rebuilt(&cache),
            cache,
            claims: queue,
            now: at(0),
            written: BTreeMap::new(),
        };
        fixture.cache.pods.change(ObjectEvent::Restarted {
            asked: Duration::ZERO,
        });
        for pod in pods {
            fixture.applied(pod);
        }
        fixture.cache.pods.change(ObjectEvent::Listed);
        fixture
    }

    pub(super) fn of(claim: Claim) -> Self {
        Fixture::new(vec![pool("p", "10.0.0.0/24")], vec![claim], Vec::new())
    }

    pub(super) fn applied(&mut self, pod: Pod) {
        self.cache.pods.change(ObjectEvent::Applied(pod));
        self.look_at_changed();
    }

    pub(super) fn gone(&mut self, pod: Pod) {
        self.cache.pods.change(ObjectEvent::Deleted(pod));
        self.look_at_changed();
    }

    fn look_at_changed(&mut self) {
        for name in self.cache.pods.take_claims() {
            self.claims.queue.add(name);
        }
    }

    fn step<T>(&mut self, step: impl FnOnce(&mut ClaimLoop, &mut Context) -> T) -> T {
        let Fixture {
            cache,
            allocations,
            claims,
            now,
            ..
        } = self;
        in_step(cache, allocations, *now, |cx| step(claims, cx))
    }

    pub(super) fn requests(&mut self) -> Vec<ApiRequest> {
        self.step(|claims, cx| {
            claims.work(cx);
            let requests = std::iter::from_fn(|| claims.next(cx));
            requests.map(|it| it.0).collect()
        })
    }

    /// Lets the loop decide and write until nothing is left to write. Returns the addresses in the claim's status, and
    /// the reason and message of its condition.
    pub(super) fn settle(&mut self, name: &str) -> (Vec<String>, String, String) {
        for _ in 0..10 {
            let requests = self.requests();
            if requests.is_empty() {
                break;
            }
            for request in requests {
                self.write(request);
            }
        }
        let written = self.written.get(name).cloned().unwrap_or_default();
        let ready = written.conditions.first();
        let text = |of: fn(&Condition) -> &String| ready.map(of).cloned().unwrap_or_default();
        (
            written.addresses.clone(),
            text(|it| &it.reason),
            text(|it| &it.message),
        )
    }

    pub(super) fn write(&mut self, request: ApiRequest) {
        let known = match &request {
            ApiRequest::SetClaimStatus(known, _)
            | ApiRequest::SetFinalizers(_, known, _)
            | ApiRequest::Delete(_, known) => known,
            other => panic!("{other:?}"),
        };
        let mut claim = Claim::clone(self.cache.claims.get(&*known.name).unwrap());
        match request {
            ApiRequest::SetClaimStatus(_, status) => {
                claim.status = ClaimStatus::from(&status);
                self.written.insert(claim.name.clone(), status);
            }
            ApiRequest::SetFinalizers(_, _, finalizers) => claim.finalizers = finalizers.into(),
            ApiRequest::Delete(..) => claim.deleting = true,
            _ => {}
        }
        claim.version += 1;
        self.shown(&claim);
        let purpose = Purpose::Claim {
            name: claim.name.clone(),
        };
        let outcome = RequestOutcome::Claim(claim);
        let answer = RequestAnswer::to_write(&purpose, &outcome);
        self.step(|claims, cx| _ = claims.answered(&answer, cx));
    }

    /// Makes the watch deliver the claim.
    pub(super) fn shown(&mut self, claim: &Claim) {
        let claims = &mut self.cache.claims;
        claims.change(ObjectEvent::Applied(claim.clone()));
        self.allocations.claim_seen(claim);
        self.claims.queue.add(claim.name.clone());
    }

    /// Returns the node that has this address as a block.
    fn node_of(&self, address: &str) -> Option<&str> {
        let entry = self.allocations.blocks.get(&cidr(address))?;
        Some(&entry.owner.name)
    }

    /// Confirms the block, as the loop of blocks does when the watch has delivered its object.
    fn confirm(&mut self, address: &str) {
        self.allocations.confirm(&cidr(address));
        let entry = self.allocations.blocks.get_mut(&cidr(address));
        entry.unwrap().uid = Some(address.into());
        self.claims.queue.add(CLAIM.into());
    }

    /// Deletes the block, as the loop of blocks does when the agent has released it.
    pub(super) fn release(&mut self, address: &str) {
        self.allocations.drop_block(&cidr(address));
        self.claims.queue.add(CLAIM.into());
    }
}

#[test]
fn a_claim_gets_an_address_of_each_family_of_its_pool() {
    let both = pool_with("p", "10.0.0.0/24", |spec| {
        spec.ipv6 = Some(ipv6_ranges("fd00::/64", 122));
    });
    let mut fixture = Fixture::new(vec![both], vec![claim(CLAIM, "p", &[])], Vec::new());
    let (addresses, reason, _) = fixture.settle(CLAIM);
    assert_eq!(reason, "Available");
    assert_eq!(addresses, ["10.0.0.254", "fd00::ffff:ffff:ffff:ffff"]);
}

#[test]
fn a_claim_has_its_finalizer_before_a_node_has_its_address() {
    let mut bare = claim(CLAIM, "p", &[]);
    bare.finalizers = ClaimFinalizers::default();
    let mut fixture = Fixture::of(bare);
    assert_eq!(fixture.settle(CLAIM).1, "Available");
    let has_finalizer =
        |fixture: &Fixture| fixture.cache.claims.get(CLAIM).unwrap().has_finalizer();
    assert!(
        !has_finalizer(&fixture),
        "nobody uses it, so it can go at once"
    );
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    let requests = fixture.requests();
    let is_finalizer = |it: &ApiRequest| matches!(it, ApiRequest::SetFinalizers(_, _, all) if *all == [CLAIM_FINALIZER]);
    assert!(
        requests.len() == 1 && is_finalizer(&requests[0]),
        "{requests:?}"
    );
    assert!(fixture.node_of(ADDRESS).is_none());
    for request in requests {
        fixture.write(request);
    }
    fixture.settle(CLAIM);
    assert_eq!(fixture.node_of(ADDRESS), Some("a"));
}

#[test]
fn nodes_get_no_block_over_an_address_of_a_claim() {
    let mut fixture = Fixture::new(
        vec![pool("p", "10.0.0.0/27")],
        vec![claim(CLAIM, "p", &[])],
        Vec::new(),
    );
    list(&mut fixture.cache.subnets, vec![subnet("a", &[], 40)]);
    fixture.settle(CLAIM);
    let mut demand = Demand::default();
    let a = fixture.cache.nodes.get("a").unwrap().clone();
    demand.add(&a, &fixture.allocations);
    fixture.step(|_, cx| _ = demand.work(cx));
    let allocations = &fixture.allocations;
    let blocks = allocations.blocks.iter().map(|it| it.cidr);
    let over: Vec<Cidr> = blocks
        .filter(|it| it.overlaps(&cidr("10.0.0.30/32")))
        .collect();
    assert!(over.is_empty(), "{over:?}");
    assert!(
        allocations.blocks.has(&a.uid),
        "the rest of the pool is used"
    );
}

#[test]
fn the_node_of_the_pod_gets_the_address_once_the_status_records_it() {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    let requests = fixture.requests();
    fixture.claims.queue.add(CLAIM.into());
    assert!(fixture.requests().is_empty());
    assert!(fixture.node_of(ADDRESS).is_none(), "nothing is stored");
    for request in requests {
        fixture.write(request);
    }
    fixture.settle(CLAIM);
    assert_eq!(fixture.node_of(ADDRESS), Some("a"));
    let entry = fixture.allocations.blocks.get(&cidr(ADDRESS));
    assert_eq!(entry.unwrap().step, Step::Create);
    // A pod that is bound to no node yet changes nothing.
    fixture.applied(claiming_pod("other", CLAIM, None));
    assert_eq!(fixture.settle(CLAIM).1, "Available");
}

#[test]
fn another_node_waits_until_the_first_has_released_the_address() {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    let first = claiming_pod("web-0", CLAIM, Some("a"));
    fixture.applied(first.clone());
    fixture.settle(CLAIM);
    fixture.allocations.confirm(&cidr(ADDRESS));
    fixture.claims.queue.add(CLAIM.into());
    let (_, reason, text) = fixture.settle(CLAIM);
    assert_eq!(
        (&*reason, &*text),
        ("InUse", "pod web-0 on node a uses the addresses")
    );
    fixture.gone(first);
    let mut second = claiming_pod("web-0", CLAIM, Some("b"));
    second.uid = "later".into();
    fixture.applied(second);
    let (_, reason, text) = fixture.settle(CLAIM);
    assert_eq!(reason, "WaitingForNode");
    assert!(
        text.contains("pod web-0 on node b waits: node a has 10.0.0.254"),
        "{text}"
    );
    assert_eq!(fixture.node_of(ADDRESS), Some("a"));
    let entry = fixture.allocations.blocks.get(&cidr(ADDRESS));
    assert_eq!(entry.unwrap().recall, Some(Recall::Drain));
    fixture.release(ADDRESS);
    fixture.settle(CLAIM);
    assert_eq!(fixture.node_of(ADDRESS), Some("b"));
}

#[test]
fn a_block_that_drains_without_the_other_one_drains_until_that_is_back() {
    let both = pool_with("p", "10.0.0.0/24", |spec| {
        spec.ipv6 = Some(ipv6_ranges("fd00::/64", 122));
    });
    let mut fixture = Fixture::new(vec![both], vec![claim(CLAIM, "p", &[])], Vec::new());
    let pod = claiming_pod("web-0", CLAIM, Some("a"));
    fixture.applied(pod.clone());
    fixture.settle(CLAIM);
    let of_v6 = "fd00::ffff:ffff:ffff:ffff/128";
    fixture.confirm(ADDRESS);
    fixture.confirm(of_v6);
    fixture.gone(pod.clone());
    fixture.settle(CLAIM);
    fixture.release(ADDRESS);
    let recalls = |fixture: &Fixture| {
        let blocks = fixture.allocations.listed_blocks(&"a".into(), None);
        let blocks = blocks.into_iter();
        blocks.map(|it| (it.cidr, it.recall)).collect::<Vec<_>>()
    };
    let drains = [(of_v6.to_owned(), Some(Recall::Drain))];
    assert_eq!(recalls(&fixture), drains);
    fixture.applied(pod);
    fixture.settle(CLAIM);
    assert_eq!(fixture.node_of(ADDRESS), Some("a"));
    assert_eq!(recalls(&fixture), drains, "its agent has not released it");
    fixture.confirm(ADDRESS);
    fixture.settle(CLAIM);
    let assigned = [ADDRESS, of_v6].map(|it| (it.to_owned(), None));
    assert_eq!(recalls(&fixture), assigned);
}

#[test]
fn a_block_that_an_agent_has_drains_if_the_agent_released_the_claims_other_block() {
    let both = pool_with("p", "10.0.0.0/24", |spec| {
        spec.ipv6 = Some(ipv6_ranges("fd00::/64", 122));
    });
    let mut fixture = Fixture::new(vec![both], vec![claim(CLAIM, "p", &[])], Vec::new());
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    fixture.settle(CLAIM);
    let of_v6 = "fd00::ffff:ffff:ffff:ffff/128";
    fixture.confirm(ADDRESS);
    fixture.confirm(of_v6);
    let released = |address: &str, released| BlockReport {
        uid: address.into(),
        released,
        ..block_report(address)
    };
    let listed = |blocks: Vec<BlockReport>| {
        let report = AgentReport {
            node_uid: "a".into(),
            blocks: blocks.into(),
            ..AgentReport::default()
        };
        let blocks = fixture
            .allocations
            .listed_blocks(&"a".into(), Some(&report));
        let blocks = blocks.into_iter();
        blocks.map(|it| (it.cidr, it.recall)).collect::<Vec<_>>()
    };
    // The block of IPv6 was listed alone and draining before, and the agent has released it.
    let gone = released(of_v6, true);
    let drains = (ADDRESS.to_owned(), Some(Recall::Drain));
    assert_eq!(
        listed(vec![released(ADDRESS, false), gone.clone()]),
        [drains]
    );
    assert_eq!(listed(vec![gone]), [], "a pod gets both addresses or none");
}

#[test]
fn a_node_that_cannot_get_all_addresses_of_a_claim_releases_those_it_has() {
    let both = |ipv4: &str, version: u64| {
        let spec = |spec: &mut cadastre_api::IPPoolSpec| {
            spec.ipv6 = Some(ipv6_ranges("fd00::/64", 122));
        };
        Pool {
            version,
            ..pool_with("p", ipv4, spec)
        }
    };
    let pools = vec![both("10.0.0.0/24", 1)];
    let mut fixture = Fixture::new(pools, vec![claim(CLAIM, "p", &[])], Vec::new());
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    fixture.settle(CLAIM);
    let of_v6 = "fd00::ffff:ffff:ffff:ffff/128";
    fixture.confirm(ADDRESS);
    fixture.confirm(of_v6);
    let listed = |fixture: &Fixture| {
        let blocks = fixture.allocations.listed_blocks(&"a".into(), None);
        let blocks = blocks.into_iter();
        blocks.map(|it| (it.cidr, it.recall)).collect::<Vec<_>>()
    };
    assert_eq!(listed(&fixture).len(), 2);
    fixture.release(ADDRESS);
    assert_eq!(listed(&fixture), [], "a pod gets both addresses or none");
    let moved = both("10.9.0.0/24", 2);
    fixture.cache.pools.change(ObjectEvent::Applied(moved));
    let Fixture {
        cache, allocations, ..
    } = &mut fixture;
    allocations.pools.evaluate(cache, &[], Duration::ZERO);
    assert_eq!(fixture.settle(CLAIM).1, "OutsidePool");
    let drains = (of_v6.to_owned(), Some(Recall::Drain));
    assert_eq!(
        listed(&fixture),
        [drains],
        "else the agent cannot release it"
    );
    fixture.release(of_v6);
    assert_eq!(fixture.settle(CLAIM).1, "OutsidePool");
    assert!(!fixture.allocations.blocks.has(&"a".into()));
}

#[test]
fn a_pod_that_comes_back_to_the_node_keeps_the_address_there() {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    let first = claiming_pod("web-0", CLAIM, Some("a"));
    fixture.applied(first.clone());
    fixture.settle(CLAIM);
    let recall = |fixture: &Fixture| {
        let entry = fixture.allocations.blocks.get(&cidr(ADDRESS));
        entry.unwrap().recall
    };
    fixture.gone(first.clone());
    fixture.settle(CLAIM);
    assert_eq!(recall(&fixture), Some(Recall::Drain));
    fixture.applied(first);
    fixture.settle(CLAIM);
    assert_eq!(recall(&fixture), None);
}

#[test]
fn a_quarantined_address_stays_with_its_deleted_node() {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    fixture.settle(CLAIM);
    fixture.allocations.confirm(&cidr(ADDRESS));
    let gone = fixture.cache.nodes.get("a").unwrap().clone();
    let deletion = Node::clone(&gone);
    fixture.cache.nodes.change(ObjectEvent::Deleted(deletion));
    let machine = gone.machine.clone();
    let now = fixture.now;
    fixture
        .allocations
        .quarantine_blocks(&gone.name, &gone.uid, &machine, now);
    fixture.gone(claiming_pod("web-0", CLAIM, Some("a")));
    let mut second = claiming_pod("web-0", CLAIM, Some("b"));
    second.uid = "later".into();
    fixture.applied(second);
    let (_, reason, text) = fixture.settle(CLAIM);
    assert_eq!(reason, "WaitingForNode");
    assert!(text.contains("node a is deleted"), "{text}");
}

#[test]
fn an_address_that_a_claim_asks_for_is_refused_with_the_reason() {
    let mut used = pool_with("p", "10.0.0.0/24", |spec| {
        spec.reserved = vec!["10.0.0.9".to_owned()];
    });
    used.created = 1;
    let text = |address: &str| {
        let claims = vec![
            claim("default/old", "p", &["10.0.0.7"]),
            claim(CLAIM, "", &[address]),
        ];
        let mut fixture = Fixture::new(vec![used.clone()], claims, Vec::new());
        let of_node = Owner::node(&"a".into(), &"a".into());
        let object = block("10.0.0.16/28", of_node.clone());
        let single = block("10.0.0.40/32", of_node);
        list(&mut fixture.cache.blocks, vec![object, single]);
        fixture.allocations = rebuilt(&fixture.cache);
        fixture
            .cache
            .pods
            .change(ObjectEvent::Applied(pod(1, &["10.0.0.99"])));
        fixture.settle("default/old");
        fixture.claims.queue.add(CLAIM.into());
        let (addresses, reason, text) = fixture.settle(CLAIM);
        if reason == "Available" {
            assert_eq!(addresses, [address]);
        }
        format!("{reason}: {text}")
    };
    assert_eq!(text("10.0.0.5"), "Available: no pod uses the addresses");
    assert_eq!(
        text("10.0.0.7"),
        "AddressInUse: 10.0.0.7 is the address of claim default/old"
    );
    assert_eq!(
        text("10.0.0.9"),
        "AddressReserved: 10.0.0.9 is reserved in the pool, an address of a node, or in a service range, so nobody gets it: claim another address"
    );
    assert_eq!(
        text("10.0.0.17"),
        "AddressInUse: 10.0.0.17 is in block 10.0.0.16/28 of node a: the claim gets it when the block is free again",
        "the block is provisional"
    );
    assert_eq!(
        text("10.0.0.40"),
        "AddressInUse: 10.0.0.40 is in block 10.0.0.40/32 of node a: the claim gets it when the block is free again"
    );
    assert_eq!(
        text("10.0.0.99"),
        "AddressInUse: 10.0.0.99 is in use, although no node has it: kubectl cadastre show ip 10.0.0.99"
    );
    assert_eq!(
        text("10.9.0.1"),
        "PoolNotFound: the addresses are not of one pool: kubectl get ippools.cadastre.dev lists the ranges of each"
    );
}

/// A cluster with a claim whose address lies in a block of node `a`.
fn in_block_of_node(pods: &[&str]) -> Fixture {
    let mut fixture = Fixture::of(claim(CLAIM, "", &["10.0.0.17"]));
    let of_node = subnet("a", &["10.0.0.16/28"], 0);
    list(&mut fixture.cache.blocks, objects(&of_node));
    list(&mut fixture.cache.subnets, vec![of_node]);
    let pod = pod(1, pods);
    fixture.cache.pods.change(ObjectEvent::Applied(pod));
    fixture.allocations = rebuilt(&fixture.cache);
    fixture
}

/// Makes the NodeSubnet of node `a` list the claim's address in `spec.withdraw`. If `is_answered`, the agent has
/// reported the address as withdrawn.
fn hand_over(fixture: &mut Fixture, is_answered: bool) {
    let address = "10.0.0.17";
    let mut is = subnet("a", &["10.0.0.16/28"], 0);
    is.version = 1 + u64::from(is_answered);
    let spec = is.spec.as_mut().unwrap();
    spec.withdraw = vec![format!("{address}/32")];
    if is_answered {
        spec.claimed = vec![ClaimedAddress {
            address: address.to_owned(),
            claim: CLAIM.to_owned(),
            claim_uid: CLAIM.to_owned(),
        }];
        let report = is.report.as_mut().unwrap();
        report.withdrawn = [cidr("10.0.0.17/32")].into();
    }
    fixture.cache.subnets.change(ObjectEvent::Applied(is));
    fixture.claims.queue.add(CLAIM.into());
}

#[test]
fn an_address_in_the_block_of_a_node_goes_to_a_claim_once_the_node_has_handed_it_over() {
    let mut fixture = in_block_of_node(&[]);
    fixture.applied(claiming_pod("web-0", CLAIM, Some("b")));
    let address = "10.0.0.17/32";
    for is_asked in [false, true] {
        let (addresses, reason, text) = fixture.settle(CLAIM);
        assert_eq!((&*addresses[0], &*reason), ("10.0.0.17", "Withdrawing"));
        assert!(
            text.contains("in block 10.0.0.16/28 of node a, which is asked for it"),
            "{text}"
        );
        let ready = &fixture.cache.claims.get(CLAIM).unwrap().status.ready;
        assert!(!ready.as_ref().unwrap().is_true);
        assert!(fixture.node_of(address).is_none(), "asked: {is_asked}");
        hand_over(&mut fixture, false);
    }
    hand_over(&mut fixture, true);
    fixture.settle(CLAIM);
    assert_eq!(fixture.node_of(address), Some("b"));
    // The claim's block inside of node a's block is confirmed, and node a's block stays.
    let owner = Owner::node(&"b".into(), &"b".into());
    let object = Block {
        version: 100,
        ..block(address, owner)
    };
    fixture
        .cache
        .blocks
        .change(ObjectEvent::Applied(object.clone()));
    fixture.allocations.block_seen(&object, fixture.now);
    fixture.allocations.judge_blocks(&fixture.cache);
    for (block, node) in [(address, "b"), ("10.0.0.16/28", "a")] {
        let entry = fixture.allocations.blocks.get(&cidr(block)).unwrap();
        assert!(entry.is_held() && &*entry.owner.name == node, "{entry:?}");
    }
}

#[test]
fn an_address_in_the_block_of_a_node_that_a_pod_uses_is_refused() {
    let mut fixture = in_block_of_node(&["10.0.0.17"]);
    let (addresses, reason, text) = fixture.settle(CLAIM);
    assert_eq!((addresses.len(), &*reason), (0, "AddressInUse"));
    assert_eq!(
        text,
        "10.0.0.17 is in use, in block 10.0.0.16/28 of node a: kubectl cadastre show ip 10.0.0.17"
    );
}

#[test]
fn the_block_of_a_deleted_node_ends_although_a_pod_uses_the_address_of_a_claim_in_it() {
    let mut fixture = in_block_of_node(&[]);
    fixture.applied(claiming_pod("web-0", CLAIM, Some("b")));
    fixture.settle(CLAIM);
    hand_over(&mut fixture, true);
    fixture.settle(CLAIM);
    fixture.allocations.confirm(&cidr("10.0.0.17/32"));
    let uses = Pod {
        version: 9,
        ..pod(9, &["10.0.0.17"])
    };
    fixture.cache.pods.change(ObjectEvent::Applied(uses));
    let mut gone = Node::clone(fixture.cache.nodes.get("a").unwrap());
    gone.machine.machine_id = Some("m".into());
    fixture
        .cache
        .nodes
        .change(ObjectEvent::Deleted(gone.clone()));
    let now = fixture.now;
    fixture
        .allocations
        .quarantine_blocks(&gone.name, &gone.uid, &gone.machine, now);
    let entry = fixture.allocations.blocks.get_mut(&cidr("10.0.0.16/28"));
    entry.unwrap().step = Step::Settled;
    let mut blocks = crate::block::BlockLoop::default();
    blocks.queue.add(cidr("10.0.0.16/28"));
    fixture.now = at(600);
    let asks = fixture.step(|_, cx| blocks.next(cx));
    assert!(
        matches!(asks, Some((ApiRequest::ListPodsOf { .. }, _))),
        "{asks:?}"
    );
    // The same machine registers again. Its new Node gets its block back, although the block contains the address of a
    // claim.
    let again = Node {
        version: 10,
        uid: "again".into(),
        ..gone
    };
    let returned = fixture.allocations.return_blocks(&again, now);
    assert_eq!(returned, [cidr("10.0.0.16/28")]);
}

#[test]
fn pools_that_cannot_serve_a_claim_say_why() {
    let text = |pools: Vec<Pool>| {
        let mut fixture = Fixture::new(pools, vec![claim(CLAIM, "p", &[])], Vec::new());
        let (_, reason, text) = fixture.settle(CLAIM);
        format!("{reason}: {text}")
    };
    assert_eq!(
        text(Vec::new()),
        r#"PoolNotFound: there is no pool "p": create it, or create a claim of another"#
    );
    let selective = pool_with("p", "10.0.0.0/24", |spec| {
        let selector = serde_json::json!({"matchLabels": {"team": "a"}});
        spec.namespace_selector = serde_json::from_value(selector).unwrap();
    });
    assert_eq!(
        text(vec![selective]),
        r#"PoolNotSuitable: pool "p" is only for some namespaces, by its namespaceSelector, and serves no claims: claim an address of another pool"#
    );
    let per_node = pool_with("p", "10.0.0.0/24", |spec| {
        spec.allocation_mode = cadastre_api::AllocationMode::NodeCIDR;
    });
    assert_eq!(
        text(vec![per_node]),
        r#"PoolNotSuitable: pool "p" has allocationMode NodeCIDR, so its addresses stay with nodes: claim an address of a pool with allocationMode Blocks"#
    );
    let disabled = pool_with("p", "10.0.0.0/24", |spec| spec.disabled = true);
    assert_eq!(
        text(vec![disabled]),
        r#"PoolNotReady: pool "p" allocates nothing now: it is disabled: set spec.disabled to false"#
    );
}

#[test]
fn many_claims_of_a_full_pool_search_it_once() {
    let name = |n: u32| format!("default/c{n}");
    let claims = (0..40).map(|n| claim(&name(n), "p", &[])).collect();
    let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/28")], claims, Vec::new());
    for n in 0..40 {
        fixture.settle(&name(n));
    }
    assert_eq!(fixture.allocations.claims.len(), 13);
    assert_eq!(fixture.claims.waiting(), 27);
    let (addresses, reason, text) = fixture.settle(&name(39));
    assert_eq!((addresses.len(), &*reason), (0, "Exhausted"), "{text}");
    assert_eq!(fixture.claims.full.len(), 1);
    fixture.allocations.drop_claim(&name(3).as_str().into());
    fixture
        .cache
        .claims
        .change(ObjectEvent::Deleted(claim(&name(3), "p", &[])));
    fixture.claims.requeue();
    let waits = |n: u32| {
        fixture
            .cache
            .claims
            .get(&*name(n))
            .unwrap()
            .status
            .addresses
            .is_empty()
    };
    assert!((13..40).all(waits));
    fixture.settle(&name(13));
    assert_eq!(fixture.allocations.claims.len(), 13);
}

#[test]
fn of_many_waiting_claims_few_are_tried_until_one_gets_an_address() {
    let name = |n: usize| format!("default/c{n:04}");
    let many = AT_ONCE + 100;
    let claims = (0..many).map(|n| claim(&name(n), "p", &[])).collect();
    let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/28")], claims, Vec::new());
    while fixture.claims.queue.has_ready(fixture.now.mono) {
        fixture.requests();
    }
    assert_eq!(fixture.claims.waiting(), many - 13);
    let tried = |fixture: &mut Fixture| fixture.claims.queue.take_ready().len();
    fixture.claims.requeue();
    assert_eq!(tried(&mut fixture), AT_ONCE);
    fixture.claims.requeue_in_use();
    assert_eq!(tried(&mut fixture), 0);
    fixture.allocations.drop_claim(&name(0).as_str().into());
    fixture.claims.requeue();
    fixture.requests();
    assert_eq!(fixture.claims.waiting(), many - 14);
    assert!(
        tried(&mut fixture) > 0,
        "one got an address, so others are tried"
    );
}

/// Returns a claim whose status records 10.0.0.4. `asked` are the addresses that its spec asks for.
fn recorded(name: &str, created: i64, asked: &[&str]) -> Claim {
    Claim {
        created,
        status: status_with(&["10.0.0.4".to_owned()]),
        ..claim(name, "p", asked)
    }
}

/// Returns a status that records these addresses, and nothing else.
fn status_with(addresses: &[String]) -> ClaimStatus {
    ClaimStatus::from(&IPClaimStatus {
        addresses: addresses.to_vec(),
        ..IPClaimStatus::default()
    })
}

#[test]
fn of_two_claims_that_record_one_address_the_older_has_it() {
    let claims = vec![recorded("default/a", 2, &[]), recorded("default/b", 1, &[])];
    let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/24")], claims, Vec::new());
    let of = fixture.allocations.claims.of(&cidr("10.0.0.4/32"));
    assert_eq!(of.map(|it| &**it), Some("default/b"));
    // No node has had the address, so the other claim gets another one.
    let (addresses, reason, text) = fixture.settle("default/a");
    assert_eq!(reason, "Available", "{text}");
    assert_ne!(addresses, ["10.0.0.4"]);
    assert_eq!(addresses.len(), 1);
}

#[test]
fn of_two_claims_that_record_one_address_the_one_in_use_has_it() {
    let mut at_node = recorded("default/b", 2, &[]);
    at_node.status.node = Some("a".into());
    // Without the finalizer, no node can be about to get the claim's addresses.
    let mut unused = recorded("default/a", 1, &[]);
    unused.finalizers = Vec::new().into();
    let with_finalizer = recorded("default/b", 2, &[]);
    let mut released = unused.clone();
    released.status.released_at = Some(Timestamp::UNIX_EPOCH);
    let asking = recorded("default/a", 1, &["10.0.0.4"]);
    for (older, younger, expected) in [
        (unused.clone(), &at_node, "Available"),
        (unused, &with_finalizer, "Available"),
        (asking, &at_node, "AddressInUse"),
        (released, &at_node, "AddressInUse"),
    ] {
        let is_kept = !older.is_unused();
        let claims = vec![older, younger.clone()];
        let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/24")], claims, Vec::new());
        let of = fixture.allocations.claims.of(&cidr("10.0.0.4/32"));
        assert_eq!(of.map(|it| &**it), Some("default/b"));
        let (addresses, reason, text) = fixture.settle("default/a");
        assert_eq!(reason, expected, "{text}");
        assert_eq!(addresses == ["10.0.0.4"], is_kept, "{addresses:?}");
        // No node gets the address through a claim that does not have it.
        fixture.applied(claiming_pod("x", "default/a", Some("a")));
        fixture.settle("default/a");
        assert!(fixture.node_of("10.0.0.4/32").is_none());
    }
}

#[test]
fn a_late_write_of_an_address_that_another_claim_has_got_is_undone() {
    let claims = vec![claim("default/a", "p", &[]), claim("default/b", "p", &[])];
    let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/24")], claims, Vec::new());
    let taken = fixture.settle("default/b").0;
    let before = Claim::clone(fixture.cache.claims.get("default/a").unwrap());
    let late = Claim {
        version: before.version + 1,
        status: status_with(&taken),
        ..before
    };
    fixture.shown(&late);
    let (addresses, reason, text) = fixture.settle("default/a");
    assert_eq!(reason, "Available", "{text}");
    assert_eq!(addresses.len(), 1);
    assert_ne!(addresses, taken);
}

#[test]
fn a_claim_that_finds_no_other_address_keeps_the_one_that_a_node_has_got() {
    let claims = vec![claim("default/a", "p", &[])];
    let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/28")], claims, Vec::new());
    let address = fixture.settle("default/a").0[0].clone();
    // A late write of an earlier leader gives a node a block that fills the pool.
    let object = Block {
        version: 100,
        ..block("10.0.0.0/28", Owner::node(&"a".into(), &"a".into()))
    };
    let blocks = &mut fixture.cache.blocks;
    blocks.change(ObjectEvent::Applied(object.clone()));
    fixture.allocations.block_seen(&object, fixture.now);
    for _ in 0..2 {
        fixture.claims.queue.add("default/a".into());
        fixture.settle("default/a");
    }
    let (addresses, reason, text) = fixture.settle("default/a");
    assert_eq!(addresses, slice::from_ref(&address), "{reason}: {text}");
    // The block goes, and another claim asks for the address first.
    fixture.allocations.drop_block(&cidr("10.0.0.0/28"));
    let blocks = &mut fixture.cache.blocks;
    blocks.change(ObjectEvent::Deleted(object));
    let second = claim("default/b", "", &[&address]);
    let claims = &mut fixture.cache.claims;
    claims.change(ObjectEvent::Applied(second));
    fixture.claims.queue.add("default/b".into());
    let (_, reason, text) = fixture.settle("default/b");
    let text = format!("{reason}: {text}");
    let refusal = format!("AddressInUse: {address} is the address of claim default/a");
    assert_eq!(text, refusal);
}

#[test]
fn a_deleted_claim_keeps_its_addresses_until_they_are_released_and_have_cooled() {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    let user = claiming_pod("web-0", CLAIM, Some("a"));
    fixture.applied(user.clone());
    fixture.settle(CLAIM);
    fixture.allocations.confirm(&cidr(ADDRESS));
    let mut deleted = Claim::clone(fixture.cache.claims.get(CLAIM).unwrap());
    (deleted.deleting, deleted.version) = (true, 100);
    fixture.cache.claims.change(ObjectEvent::Applied(deleted));
    fixture.claims.queue.add(CLAIM.into());
    let (_, _, text) = fixture.settle(CLAIM);
    assert_eq!(
        text,
        "the claim is deleted when no node has its addresses any more: pod web-0 on node a uses the addresses"
    );
    fixture.gone(user);
    fixture.settle(CLAIM);
    fixture.release(ADDRESS);
    let has_finalizer = |fixture: &mut Fixture| {
        fixture.settle(CLAIM);
        fixture.cache.claims.get(CLAIM).unwrap().has_finalizer()
    };
    assert!(has_finalizer(&mut fixture));
    let wall = |second: i64| Now {
        wall: Timestamp::from_second(second).unwrap(),
        ..at(second.unsigned_abs())
    };
    fixture.now = wall(29);
    assert!(has_finalizer(&mut fixture));
    fixture.now = wall(30);
    assert!(!has_finalizer(&mut fixture));
}

/// Returns a deleted claim, whose addresses a node released at this second.
fn deleted_claim(released_at: i64) -> Claim {
    Claim {
        deleting: true,
        status: ClaimStatus::from(&IPClaimStatus {
            addresses: vec!["10.0.0.254".to_owned()],
            released_at: Some(Time(Timestamp::from_second(released_at).unwrap())),
            ..IPClaimStatus::default()
        }),
        ..claim(CLAIM, "p", &[])
    }
}

#[test]
fn a_deleted_claim_that_no_node_has_gets_no_node_any_more() {
    let mut fixture = Fixture::of(deleted_claim(0));
    let user = claiming_pod("web-0", CLAIM, Some("a"));
    fixture.applied(user);
    let (_, reason, text) = fixture.settle(CLAIM);
    assert_eq!(
        format!("{reason}: {text}"),
        "BeingDeleted: the claim is being deleted: pod web-0 waits until it is gone, and then for another claim of this name"
    );
    fixture.now = at(30);
    fixture.settle(CLAIM);
    assert!(!fixture.cache.claims.get(CLAIM).unwrap().has_finalizer());
    fixture.claims.queue.add(CLAIM.into());
    fixture.settle(CLAIM);
    assert!(fixture.node_of(ADDRESS).is_none());
}

#[test]
fn the_old_addresses_of_a_claim_are_not_free_before_its_status_has_the_new_ones() {
    let pools = vec![pool_with("p", "10.0.0.0/24", |spec| {
        spec.ipv6 = Some(ipv6_ranges("fd00::/64", 128));
    })];
    let mut fixture = Fixture::new(pools, vec![claim("default/a", "p", &[])], Vec::new());
    let (old, _, _) = fixture.settle("default/a");
    let hosts: Vec<Cidr> = old.iter().map(|it| Cidr::host(addr(it))).collect();
    let before = Claim::clone(fixture.cache.claims.get("default/a").unwrap());
    // An agent reports a block that contains the IPv4 address, for example after a restore.
    let object = block("10.0.0.240/28", Owner::node(&"b".into(), &"b".into()));
    fixture.allocations.block_seen(&object, fixture.now);
    fixture.claims.queue.add("default/a".into());
    let requests = fixture.requests();
    assert_eq!(requests.len(), 1);
    let is_free = |it: &Fixture| {
        it.allocations
            .ledger
            .overlapping(&hosts[1])
            .next()
            .is_none()
    };
    assert!(!is_free(&fixture), "the status still has {}", old[1]);
    // The status is shown once more, as after a conflict.
    let again = Claim {
        version: before.version + 1,
        ..before
    };
    assert!(!fixture.allocations.claim_seen(&again));
    for request in requests {
        fixture.write(request);
    }
    assert!(is_free(&fixture), "the status has other addresses");
    let (new, _, _) = fixture.settle("default/a");
    assert!(new.iter().all(|it| !old.contains(it)), "{old:?} {new:?}");
}

#[test]
fn a_release_in_the_future_delays_the_end_of_a_claim_by_no_more_than_the_cooldown() {
    let mut fixture = Fixture::of(deleted_claim(9_000));
    for (second, is_there) in [(0, true), (29, true), (30, false)] {
        fixture.now = at(second);
        fixture.settle(CLAIM);
        let claim = fixture.cache.claims.get(CLAIM).unwrap();
        assert_eq!(claim.has_finalizer(), is_there, "after {second} s");
    }
}
