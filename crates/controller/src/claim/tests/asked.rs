//! Tests of addresses that a claim or a pod asks for.

use super::*;
use crate::cluster::objects::{AskedAddresses, ClaimSource, OnlyPod, Subnet};
use cadastre_api::{ExplicitAddresses, Requests, WITHDRAW_ANNOTATION};
use cadastre_core::Addr;

#[test]
fn a_claim_gets_no_certain_address_of_a_pool_that_denies_it() {
    let denies = |explicit| {
        pool_with("p", "10.0.0.0/24", |spec| {
            spec.terms.explicit_addresses = explicit;
        })
    };
    let all = |explicit| {
        let asks = claim(CLAIM, "", &["10.0.0.7"]);
        let any = claim("default/any", "p", &[]);
        let mut fixture = Fixture::new(vec![denies(explicit)], vec![asks, any], Vec::new());
        let (_, reason, text) = fixture.settle(CLAIM);
        (reason, text, fixture.settle("default/any").1)
    };
    let (reason, text, of_any) = all(ExplicitAddresses::Deny);
    assert_eq!(
        (&*reason, &*of_any),
        ("ExplicitAddressesDenied", "Available")
    );
    assert!(text.contains("explicitAddresses: Deny"), "{text}");
    assert_eq!(all(ExplicitAddresses::Allow).0, "Available");
    // A claim that has its address keeps it.
    let mut has = claim(CLAIM, "", &["10.0.0.7"]);
    has.status.addresses = [addr("10.0.0.7")].into();
    let pools = vec![denies(ExplicitAddresses::Deny)];
    assert_eq!(
        Fixture::new(pools, vec![has], Vec::new()).settle(CLAIM).1,
        "Available"
    );
}

#[test]
fn an_address_that_users_have_taken_out_of_its_node_goes_to_no_claim() {
    let mut fixture = in_block_of_node(&[]);
    let taken_out = Subnet {
        version: 2,
        requests: Requests::read(|name| (name == WITHDRAW_ANNOTATION).then_some("10.0.0.16/30")),
        ..subnet("a", &["10.0.0.16/28"], 0)
    };
    fixture
        .cache
        .subnets
        .change(ObjectEvent::Applied(taken_out));
    let (addresses, reason, text) = fixture.settle(CLAIM);
    assert_eq!((addresses.len(), &*reason), (0, "AddressReserved"));
    assert!(text.contains("was taken out of node a"), "{text}");
}

/// Returns the pod web-0, and the claim that the controller has created for the address that the pod asks for.
/// `is_served` says whether the pod has its addresses.
fn of_one_pod(address: &str, is_served: bool) -> (Claim, Pod) {
    let claim = Claim {
        only_pod: Some(Box::new(OnlyPod {
            name: "web-0".into(),
            uid: "web-0".into(),
        })),
        ..claim(CLAIM, "", &[address])
    };
    let mut pod = claiming_pod("web-0", CLAIM, Some("b"));
    pod.claim.as_mut().unwrap().source = ClaimSource::Addresses(Box::new(AskedAddresses {
        addresses: [Addr::parse_strict(address).unwrap()].into(),
        is_served,
        is_by_cni: false,
    }));
    (claim, pod)
}

#[test]
fn a_pod_hears_once_why_it_does_not_get_the_address_that_it_asks_for() {
    let told = |address: &str, is_of_one_pod: bool, is_served: bool| {
        let (claim, pod) = of_one_pod(address, is_served);
        let only_pod = claim.only_pod.clone().filter(|_| is_of_one_pod);
        let claim = Claim { only_pod, ..claim };
        let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/24")], vec![claim], vec![pod]);
        let mut reports = Vec::new();
        for second in [0, 5, 10] {
            fixture.now = at(second);
            let Fixture {
                cache,
                allocations,
                claims,
                now,
                ..
            } = &mut fixture;
            claims.work(&mut Context::new(cache, allocations, &mut reports, *now));
        }
        reports
    };
    let [report] = &told("10.9.0.1", true, false)[..] else {
        panic!("one report");
    };
    assert_eq!(report.reason, ADDRESS_UNAVAILABLE);
    assert_eq!((&*report.about.name, &*report.about.uid), (CLAIM, "web-0"));
    let part = "it asks for certain addresses (cadastre.dev/addresses): the addresses are not of";
    assert!(report.note.contains(part), "{}", report.note);
    for reports in [
        told("10.0.0.7", true, false),
        told("10.9.0.1", false, false),
        told("10.9.0.1", true, true),
    ] {
        assert!(reports.is_empty(), "{reports:?}");
    }
}

#[test]
fn the_claim_of_a_pod_s_addresses_ends_with_the_pod() {
    let deleted = |fixture: &mut Fixture| {
        fixture.claims.queue.add(CLAIM.into());
        fixture.settle(CLAIM);
        fixture.cache.claims.get(CLAIM).unwrap().deleting
    };
    let new = |is_served: bool, pods: usize| {
        let (claim, pod) = of_one_pod("10.0.0.7", is_served);
        let pods = vec![pod; pods];
        Fixture::new(vec![pool("p", "10.0.0.0/24")], vec![claim], pods)
    };
    assert!(deleted(&mut new(false, 0)), "no pod uses it");
    let mut incomplete = new(false, 0);
    let restarted = ObjectEvent::Restarted {
        asked: Duration::ZERO,
    };
    incomplete.cache.pods.change(restarted);
    assert!(!deleted(&mut incomplete), "not all pods are known");
    incomplete.cache.pods.change(ObjectEvent::Listed);
    assert!(deleted(&mut incomplete));
    let mut fixture = new(true, 1);
    fixture.claims.queue.add(CLAIM.into());
    let requests = fixture.requests();
    let is_gone = requests
        .iter()
        .any(|it| matches!(it, ApiRequest::Delete(..)));
    assert!(
        !is_gone,
        "the node has the address of the claim: {requests:?}"
    );

    // The pod uses the claim and ends, and its node releases the address.
    let mut fixture = new(false, 1);
    assert!(!deleted(&mut fixture));
    assert_eq!(fixture.node_of("10.0.0.7/32"), Some("b"));
    fixture.allocations.confirm(&cidr("10.0.0.7/32"));
    assert!(!deleted(&mut fixture));
    let finished = Pod {
        finished: true,
        ..of_one_pod("10.0.0.7", false).1
    };
    fixture.applied(finished);
    assert!(!deleted(&mut fixture), "the node has not released it");
    fixture.release("10.0.0.7/32");
    assert!(deleted(&mut fixture));
}

#[test]
fn the_claim_of_a_pod_that_has_its_address_without_it_ends() {
    let (asks, pod) = of_one_pod("10.0.0.17", true);
    let mut fixture = in_block_of_node(&["10.0.0.17"]);
    let asks = Claim { version: 2, ..asks };
    list(&mut fixture.cache.claims, vec![asks]);
    let mut pod = pod;
    pod.claim.as_mut().unwrap().node = Some("a".into());
    fixture.applied(pod);
    fixture.settle(CLAIM);
    fixture.cache.pods.change(ObjectEvent::Listed);
    fixture.claims.queue.add(CLAIM.into());
    fixture.now = at(5);
    fixture.settle(CLAIM);
    assert!(fixture.cache.claims.get(CLAIM).unwrap().deleting);
}
