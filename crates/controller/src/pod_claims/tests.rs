use super::*;
use crate::cluster::address_requests::RequestSource;
use crate::cluster::objects::{AddressRequest, Pod, Pool, Subnet};
use crate::cluster::request::{Rejection, RequestOutcome};
use crate::fixtures::{
    LoopFixture, addr, at, claim, claiming_pod, list, node, objects, pool, pool_with, rebuilt,
    subnet,
};
use cadastre_api::pod_claim::claim_of_addresses;
use cadastre_api::{Requests, WITHDRAW_ANNOTATION};
use cadastre_daemon::watch::ObjectEvent;

const CLAIM: &str = "default/web-0";

/// A cluster with the loop of pods' claims.
type Fixture = LoopFixture<PodClaimLoop>;

/// Returns the pod web-0 of the StatefulSet web. The StatefulSet names these pools.
fn sticky_pod(uid: &str, node: Option<&str>, pools: &[&str]) -> Pod {
    let mut pod = claiming_pod("web-0", CLAIM, node);
    pod.uid = uid.into();
    let sticky = Sticky {
        owner: "web".into(),
        owner_uid: "of-web".into(),
        pools: pools.iter().map(|it| (*it).into()).collect(),
        ttl: Some(60),
    };
    let claim = pod.claim.as_mut().unwrap();
    claim.uid = uid.into();
    claim.source = ClaimSource::Sticky(Box::new(sticky));
    pod
}

impl Fixture {
    fn applied(&mut self, pod: Pod) {
        self.cache.pods.change(ObjectEvent::Applied(pod));
        for name in self.cache.pods.take_claims() {
            self.tested.queue.add(name);
        }
    }

    fn answered(&mut self, wrote: bool, outcome: &RequestOutcome) {
        let purpose = Purpose::PodClaim { name: CLAIM.into() };
        let answer = RequestAnswer {
            wrote,
            ..RequestAnswer::to_write(&purpose, outcome)
        };
        let call = ObjectCall::of(&purpose, wrote).unwrap();
        let now = self.now.mono;
        self.allocations.refusals.note(&call, outcome, true, now);
        self.step(|pod_claims, cx| _ = pod_claims.answered(&answer, cx));
    }

    /// Returns the pool of the claim that the loop creates now.
    fn pool_of_created(&mut self) -> Option<String> {
        match self.request()? {
            ApiRequest::Create(name, ObjectSpec::Claim(claim)) if *name == *CLAIM => {
                claim.spec.pool
            }
            other => panic!("{other:?}"),
        }
    }
}

fn one_pool() -> Vec<Pool> {
    vec![pool("p", "10.0.0.0/24")]
}

#[test]
fn a_bound_pod_gets_a_claim_of_its_name_that_its_stateful_set_owns() {
    let mut fixture = Fixture::new(one_pool());
    fixture.applied(sticky_pod("u1", None, &[]));
    assert_eq!(fixture.request(), None, "it is bound to no node");
    fixture.applied(sticky_pod("u1", Some("a"), &[]));
    let expected = NewClaim {
        spec: IPClaimSpec {
            pool: Some("p".to_owned()),
            addresses: Vec::new(),
            ttl_seconds_after_use: Some(60),
        },
        owner: Some(ClaimOwner {
            kind: ClaimOwnerKind::StatefulSet,
            name: "web".into(),
            uid: "of-web".into(),
        }),
    };
    let expected = ApiRequest::Create(CLAIM.into(), ObjectSpec::Claim(Box::new(expected)));
    assert_eq!(fixture.request(), Some(expected));
    fixture.tested.queue.add(CLAIM.into());
    assert_eq!(fixture.request(), None, "one request at a time");
}

#[test]
fn a_claim_that_exists_stays_as_it_is_and_one_that_is_gone_is_created_again() {
    let mut fixture = Fixture::new(one_pool());
    let of_user = claim(CLAIM, "", &["10.0.0.7"]);
    list(&mut fixture.cache.claims, vec![of_user.clone()]);
    fixture.applied(sticky_pod("u1", Some("a"), &[]));
    assert_eq!(fixture.request(), None);
    fixture.cache.claims.change(ObjectEvent::Deleted(of_user));
    fixture.tested.queue.add(CLAIM.into());
    assert_eq!(fixture.pool_of_created().as_deref(), Some("p"));
}

#[test]
fn a_pod_that_names_a_claim_by_annotation_gets_none_created() {
    let mut fixture = Fixture::new(one_pool());
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    assert_eq!(fixture.request(), None);
}

#[test]
fn the_claim_is_of_the_best_pool_that_serves_every_pod_of_the_node() {
    let selector = |key: &str| {
        let selector = serde_json::json!({"matchLabels": {key: "x"}});
        serde_json::from_value(selector).unwrap()
    };
    let pools = vec![
        pool_with("namespaced", "10.1.0.0/24", |it| {
            it.namespace_selector = selector("team");
            it.priority = 9;
        }),
        pool_with("pods", "10.2.0.0/24", |it| {
            it.pod_selector = selector("app");
            it.priority = 8;
        }),
        pool_with("nodes", "10.3.0.0/24", |it| {
            it.node_selector = selector("rack");
            it.priority = 7;
        }),
        pool_with("manual", "10.4.0.0/24", |it| {
            it.assignment = AssignmentMode::Manual;
            it.priority = 6;
        }),
        pool_with("cidrs", "10.5.0.0/16", |it| {
            it.allocation_mode = AllocationMode::NodeCIDR;
            it.priority = 5;
        }),
        pool_with("second", "10.6.0.0/24", |it| it.priority = 3),
        pool_with("first", "10.7.0.0/24", |it| it.priority = 4),
    ];
    let created = |named: &[&str]| {
        let mut fixture = Fixture::new(pools.clone());
        fixture.applied(sticky_pod("u1", Some("a"), named));
        fixture.pool_of_created()
    };
    assert_eq!(created(&[]).as_deref(), Some("first"));
    assert_eq!(created(&["second", "first"]).as_deref(), Some("second"));
    assert_eq!(created(&["manual"]).as_deref(), Some("manual"));
    assert_eq!(created(&["pods"]).as_deref(), Some("pods"));
    let unfit = ["gone", "cidrs", "namespaced", "second"];
    assert_eq!(created(&unfit).as_deref(), Some("second"));
    assert_eq!(created(&unfit[..3]), None);
}

#[test]
fn a_pod_without_pool_hears_of_it_once_and_gets_a_claim_when_there_is_one() {
    let mut fixture = Fixture::new(Vec::new());
    fixture.applied(sticky_pod("u1", Some("a"), &[]));
    for second in [0, 1, 100, 500] {
        fixture.now = at(second);
        fixture.tested.requeue();
        assert_eq!(fixture.request(), None);
    }
    let [report] = &fixture.reports[..] else {
        panic!("{:?}", fixture.reports);
    };
    assert_eq!(report.reason, NO_POOL_FOR_CLAIM);
    assert_eq!((&*report.about.name, &*report.about.uid), (CLAIM, "u1"));
    let part = "serves all pods of node a. Create such a pool";
    assert!(report.note.contains(part), "{}", report.note);
    assert!(fixture.tested.load().next_at.is_some());
    // For a later pod of the same name, the event is emitted again.
    fixture.cache.pods = crate::cluster::pods::PodIndex::default();
    fixture.applied(sticky_pod("u2", Some("a"), &["nowhere"]));
    assert_eq!(fixture.request(), None);
    let note = &fixture.reports[1].note;
    assert!(note.contains("(nowhere) names no pool"), "{note}");
    fixture.applied(sticky_pod("u2", Some("a"), &[]));
    list(&mut fixture.cache.pools, one_pool());
    let (cache, pools) = (&fixture.cache, &mut fixture.allocations.pools);
    pools.evaluate(cache, &[], Duration::ZERO);
    assert_eq!(fixture.pool_of_created().as_deref(), Some("p"));
    assert!(fixture.tested.without_pool.is_empty());
}

#[test]
fn a_pod_on_an_unknown_node_waits_without_a_report() {
    let mut fixture = Fixture::new(one_pool());
    fixture.applied(sticky_pod("u1", Some("new"), &[]));
    assert_eq!(fixture.request(), None);
    assert!(fixture.reports.is_empty());
    fixture
        .cache
        .nodes
        .change(ObjectEvent::Applied(node("new")));
    fixture.now = at(5);
    assert_eq!(fixture.pool_of_created().as_deref(), Some("p"));
}

#[test]
fn a_refused_creation_is_tried_again_later_and_delays_no_other() {
    let mut fixture = Fixture::new(one_pool());
    fixture.applied(sticky_pod("u1", Some("a"), &[]));
    assert!(fixture.request().is_some());
    let quota = RequestOutcome::Rejected(Rejection::Rejected("exceeded quota".to_owned()));
    fixture.answered(true, &quota);
    assert_eq!(fixture.request(), None, "its back-off");
    let mut other = sticky_pod("u2", Some("a"), &[]);
    other.claim.as_mut().unwrap().claim = "default/web-1".into();
    fixture.applied(other);
    assert!(fixture.request().is_some());
    fixture.now = at(1);
    assert_eq!(fixture.pool_of_created().as_deref(), Some("p"));
}

#[test]
fn after_a_conflict_the_claim_is_read() {
    let mut fixture = Fixture::new(one_pool());
    fixture.applied(sticky_pod("u1", Some("a"), &[]));
    assert!(fixture.request().is_some());
    let exists = RequestOutcome::Rejected(Rejection::Guard("already exists".to_owned()));
    fixture.answered(true, &exists);
    let read = ApiRequest::Read(ObjectKind::Claim, CLAIM.into());
    assert_eq!(fixture.request(), Some(read));
    let missing = RequestOutcome::Rejected(Rejection::Missing);
    fixture.answered(false, &missing);
    fixture.now = at(1);
    assert!(fixture.pool_of_created().is_some(), "it is gone again");
}

/// Returns a pod on node `a` that asks for these addresses.
fn asking_pod(addresses: &[&str]) -> Pod {
    let mut pod = claiming_pod("web-0", CLAIM, Some("a"));
    let addr = |text: &&str| Addr::parse_strict(text).unwrap();
    pod.claim.as_mut().unwrap().source = ClaimSource::Addresses(Box::new(AskedAddresses {
        addresses: addresses.iter().map(addr).collect(),
        is_served: false,
        is_by_cni: false,
    }));
    pod
}

/// Returns a cluster in which the nodes `a` and `b` have a block each.
fn with_blocks() -> Fixture {
    let mut fixture = Fixture::new(one_pool());
    let subnets = vec![
        subnet("a", &["10.0.0.16/28", "10.0.0.64/32"], 0),
        subnet("b", &["10.0.0.32/28", "10.0.0.65/32"], 0),
    ];
    fixture.cache.nodes.change(ObjectEvent::Applied(node("b")));
    list(
        &mut fixture.cache.blocks,
        subnets.iter().flat_map(objects).collect(),
    );
    list(&mut fixture.cache.subnets, subnets);
    fixture.allocations = rebuilt(&fixture.cache);
    fixture
}

/// Returns whether the loop creates a claim for the pod now.
fn is_created(fixture: &mut Fixture, pod: Pod) -> bool {
    fixture.applied(pod);
    fixture.request().is_some()
}

#[test]
fn a_pod_gets_a_claim_for_addresses_that_its_node_does_not_have() {
    let spec = |addresses: &[&str]| {
        let mut fixture = with_blocks();
        fixture.applied(asking_pod(addresses));
        match fixture.request()? {
            ApiRequest::Create(name, ObjectSpec::Claim(claim)) if *name == *CLAIM => Some(*claim),
            other => panic!("{other:?}"),
        }
    };
    let expected = |addresses: &[&str]| NewClaim {
        spec: IPClaimSpec {
            addresses: addresses.iter().map(ToString::to_string).collect(),
            ..IPClaimSpec::default()
        },
        owner: Some(ClaimOwner {
            kind: ClaimOwnerKind::Pod,
            name: "web-0".into(),
            uid: "web-0".into(),
        }),
    };
    for addresses in [
        &["10.0.0.40"][..],
        &["10.0.0.7"],
        &["10.0.0.65"],
        &["10.9.0.1"],
        &["10.0.0.20", "fd00::7"],
    ] {
        assert_eq!(spec(addresses), Some(expected(addresses)));
    }
    for address in ["10.0.0.20", "10.0.0.64"] {
        assert_eq!(spec(&[address]), None);
    }
}

#[test]
fn a_pod_gets_no_claim_while_its_node_has_the_address() {
    let own = || asking_pod(&["10.0.0.20"]);
    let mut fixture = with_blocks();
    assert!(!is_created(&mut fixture, own()));
    // The block is recalled before the pod has the address.
    let block = crate::fixtures::cidr("10.0.0.16/28");
    fixture.allocations.blocks.get_mut(&block).unwrap().recall = Some(Recall::Drain);
    assert_eq!(fixture.request(), None);
    fixture.now = at(5);
    assert!(fixture.request().is_some(), "the loop looks again");

    let mut fixture = with_blocks();
    let taken_out = Subnet {
        version: 2,
        requests: Requests::read(|name| (name == WITHDRAW_ANNOTATION).then_some("10.0.0.20/30")),
        ..subnet("a", &["10.0.0.16/28"], 0)
    };
    fixture
        .cache
        .subnets
        .change(ObjectEvent::Applied(taken_out));
    assert!(
        is_created(&mut fixture, own()),
        "the claim says why it waits"
    );

    let mut fixture = with_blocks();
    let mut other = claim("default/other", "", &["10.0.0.20"]);
    other.status.addresses = [addr("10.0.0.20")].into();
    fixture.allocations.claim_seen(&other);
    assert!(is_created(&mut fixture, own()), "the claim says who has it");
    // If a podCIDR of the node contains the address, the pod needs no claim. The same applies to the node's blocks.
    let mut fixture = Fixture::new(one_pool());
    let of_pod_cidr = Node {
        version: 2,
        ..crate::fixtures::node_with("a", &["10.1.0.0/24"])
    };
    list(&mut fixture.cache.nodes, vec![of_pod_cidr]);
    fixture.allocations = rebuilt(&fixture.cache);
    assert!(!is_created(&mut fixture, asking_pod(&["10.1.0.7"])));
}

#[test]
fn a_pod_that_has_addresses_gets_no_claim() {
    let mut fixture = with_blocks();
    let mut pod = asking_pod(&["10.0.0.40"]);
    if let ClaimSource::Addresses(asked) = &mut pod.claim.as_mut().unwrap().source {
        asked.is_served = true;
    }
    assert!(!is_created(&mut fixture, pod));
    assert!(fixture.tested.load().next_at.is_none(), "no polling");
}

#[test]
fn a_pod_for_which_cni_requests_an_address_gets_the_same_claim_as_by_its_annotation() {
    let mut fixture = with_blocks();
    let pod = |address: &str| Pod {
        claim: None,
        ..asking_pod(&[address])
    };
    let request = |address: &str| AddressRequest {
        pod: "default/web-0".into(),
        uid: "web-0".into(),
        addresses: [Addr::parse_strict(address).unwrap()].into(),
    };
    let agent = RequestSource::Agent("a".into());
    let own = [request("10.0.0.20")];
    fixture.cache.pods.change_requests(&agent, &[], &own);
    fixture.applied(pod("10.0.0.20"));
    assert_eq!(fixture.request(), None, "its node has the address");
    let elsewhere = [request("10.0.0.40")];
    fixture.cache.pods.change_requests(&agent, &own, &elsewhere);
    fixture.applied(pod("10.0.0.40"));
    let name = format!("default/{}", claim_of_addresses("web-0", "web-0"));
    let expected = NewClaim {
        spec: IPClaimSpec {
            addresses: vec!["10.0.0.40".to_owned()],
            ..IPClaimSpec::default()
        },
        owner: Some(ClaimOwner {
            kind: ClaimOwnerKind::Pod,
            name: "web-0".into(),
            uid: "web-0".into(),
        }),
    };
    let spec = ObjectSpec::Claim(Box::new(expected));
    let expected = ApiRequest::Create(name.as_str().into(), spec);
    assert_eq!(fixture.request(), Some(expected));
}

#[test]
fn a_stateful_set_that_is_created_again_under_another_name_gets_claims_of_its_own() {
    let mut fixture = Fixture::new(one_pool());
    let mut of_old = claim(CLAIM, "p", &[]);
    of_old.status.addresses = [addr("10.0.0.7")].into();
    list(&mut fixture.cache.claims, vec![of_old.clone()]);
    fixture.allocations.claim_seen(&of_old);
    let mut renamed = sticky_pod("u2", Some("a"), &[]);
    let claim = renamed.claim.as_mut().unwrap();
    claim.claim = "default/db-0".into();
    claim.pod = "db-0".into();
    fixture.applied(renamed);
    let Some(ApiRequest::Create(name, _)) = fixture.request() else {
        panic!("no claim is created");
    };
    assert_eq!(&*name, "default/db-0");
    let of = fixture.allocations.claims.of(&Cidr::host(
        "10.0.0.7".parse::<std::net::IpAddr>().unwrap().into(),
    ));
    assert_eq!(
        of.map(|it| &**it),
        Some(CLAIM),
        "the old claim keeps its address"
    );
}
