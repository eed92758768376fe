//! Tests of claims in unusual circumstances: other users of their addresses, changed pools, edited claims, and very
//! many claims.

use super::*;
use crate::cluster::address_requests::RequestSource;
use crate::cluster::objects::{AddressRequest, OnlyPod};
use cadastre_api::pod_claim::claim_of_addresses;
use cadastre_core::Addr;

#[test]
fn a_pod_that_reports_the_address_of_a_claim_delays_the_claim_s_pod() {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    fixture.settle(CLAIM);
    let stranger = pod(1, &["10.0.0.254"]);
    fixture.applied(stranger.clone());
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    let (addresses, reason, text) = fixture.settle(CLAIM);
    assert_eq!((&*addresses[0], &*reason), ("10.0.0.254", "AddressInUse"));
    let says = "a pod reports 10.0.0.254: the claim waits until that pod is gone";
    assert!(text.starts_with(says), "{text}");
    assert_eq!(fixture.node_of(ADDRESS), None);
    fixture.gone(stranger);
    fixture.claims.requeue_in_use();
    fixture.settle(CLAIM);
    assert_eq!(fixture.node_of(ADDRESS), Some("a"));
}

#[test]
fn of_two_pods_for_which_one_address_is_requested_one_gets_it_and_the_other_waits() {
    let of = |name: &str| {
        let only_pod = OnlyPod {
            name: name.into(),
            uid: name.into(),
        };
        let full = format!("default/{}", claim_of_addresses(name, name));
        let claim = Claim {
            only_pod: Some(Box::new(only_pod)),
            ..claim(&full, "", &["10.0.0.7"])
        };
        let pod = Pod {
            claim: None,
            ..claiming_pod(name, &full, Some(if name == "one" { "a" } else { "b" }))
        };
        (claim, pod)
    };
    let ((first, one), (second, two)) = (of("one"), of("two"));
    let (name, other) = (first.name.clone(), second.name.clone());
    let claims = vec![first.clone(), second.clone()];
    let pools = vec![pool("p", "10.0.0.0/24")];
    let mut fixture = Fixture::new(pools, claims, vec![one.clone(), two]);
    for claim in [&first, &second] {
        let request = AddressRequest {
            pod: format!("default/{}", claim.only_pod.as_ref().unwrap().name).into(),
            uid: claim.only_pod.as_ref().unwrap().uid.clone(),
            addresses: [Addr::parse_strict("10.0.0.7").unwrap()].into(),
        };
        let source = RequestSource::Claim(claim.name.clone());
        fixture.cache.pods.change_requests(&source, &[], &[request]);
    }
    fixture.look_at_changed();
    assert_eq!(fixture.settle(&name).0, ["10.0.0.7"]);
    fixture.settle(&name);
    assert_eq!(fixture.node_of("10.0.0.7/32"), Some("a"));
    let (addresses, reason, text) = fixture.settle(&other);
    assert_eq!((addresses.len(), &*reason), (0, "AddressInUse"));
    assert_eq!(text, format!("10.0.0.7 is the address of claim {name}"));
    // The first pod ends, its node releases the address, and the pod's claim ends.
    fixture.gone(one);
    fixture.allocations.drop_block(&cidr("10.0.0.7/32"));
    fixture.allocations.drop_claim(&name);
    let gone = Claim::clone(fixture.cache.claims.get(&name).unwrap());
    fixture.cache.claims.change(ObjectEvent::Deleted(gone));
    fixture.claims.requeue();
    assert_eq!(fixture.settle(&other).0, ["10.0.0.7"]);
    fixture.settle(&other);
    assert_eq!(fixture.node_of("10.0.0.7/32"), Some("b"));
}

#[test]
fn a_pod_keeps_the_address_of_its_claim_whatever_happens_to_the_pool() {
    let changed = |pools: Vec<Pool>| {
        let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
        let first = claiming_pod("web-0", CLAIM, Some("a"));
        fixture.applied(first.clone());
        fixture.settle(CLAIM);
        fixture.allocations.confirm(&cidr(ADDRESS));
        list(&mut fixture.cache.pools, pools);
        let (cache, allocations) = (&fixture.cache, &mut fixture.allocations);
        allocations.pools.evaluate(cache, &[], Duration::ZERO);
        fixture.claims.queue.add(CLAIM.into());
        let (addresses, reason, _) = fixture.settle(CLAIM);
        assert_eq!((&*addresses[0], &*reason), ("10.0.0.254", "InUse"));
        let entry = fixture.allocations.blocks.get(&cidr(ADDRESS)).unwrap();
        assert_eq!((&*entry.owner.name, entry.recall), ("a", None));
        // The pod moves to another node.
        fixture.gone(first);
        let mut second = claiming_pod("web-0", CLAIM, Some("b"));
        second.uid = "later".into();
        fixture.applied(second);
        fixture.settle(CLAIM);
        fixture.release(ADDRESS);
        let (addresses, reason, text) = fixture.settle(CLAIM);
        assert_eq!(addresses, ["10.0.0.254"], "the claim keeps it");
        let on = fixture.node_of(ADDRESS).map(str::to_owned);
        (on, reason, text)
    };
    let with = |change: fn(&mut cadastre_api::IPPoolSpec)| Pool {
        version: 2,
        generation: 2,
        ..pool_with("p", "10.0.0.0/24", change)
    };
    let (on, reason, _) = changed(vec![with(|spec| spec.disabled = true)]);
    assert_eq!((on.as_deref(), &*reason), (Some("b"), "Available"));
    let shrunk = with(|spec| spec.ipv4.as_mut().unwrap().cidrs = vec!["10.0.0.0/25".to_owned()]);
    let deleting = Pool {
        deleting: true,
        ..with(|_| ())
    };
    for pools in [vec![shrunk], vec![deleting], Vec::new()] {
        let (on, reason, text) = changed(pools);
        assert_eq!((on, &*reason), (None, "OutsidePool"));
        let advice = "Add the range to the pool again, or delete the claim";
        assert!(text.ends_with(advice), "{text}");
    }
}

#[test]
fn a_claim_that_is_edited_in_use_keeps_its_addresses() {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    fixture.applied(claiming_pod("web-0", CLAIM, Some("a")));
    fixture.settle(CLAIM);
    fixture.allocations.confirm(&cidr(ADDRESS));
    // The API server rejects edits of a claim's pool and addresses, unless the CustomResourceDefinition of claims is
    // too old to have these rules.
    for edited in [claim(CLAIM, "other", &[]), claim(CLAIM, "", &["10.0.0.9"])] {
        let is = fixture.cache.claims.get(CLAIM).unwrap();
        let edited = Claim {
            version: is.version + 1,
            generation: is.generation + 1,
            status: is.status.clone(),
            finalizers: Vec::new().into(),
            ..edited
        };
        fixture.shown(&edited);
        let (addresses, reason, _) = fixture.settle(CLAIM);
        assert_eq!((&*addresses[0], &*reason), ("10.0.0.254", "InUse"));
        assert!(fixture.cache.claims.get(CLAIM).unwrap().has_finalizer());
        let entry = fixture.allocations.blocks.get(&cidr(ADDRESS)).unwrap();
        assert_eq!((&*entry.owner.name, entry.recall), ("a", None));
    }
}

/// Ten thousand waiting claims cost one write each when they begin to wait, and no further request.
#[test]
fn ten_thousand_claims_that_wait_for_a_full_pool_are_written_once() {
    const MANY: usize = 10_000;
    let name = |n: usize| format!("default/c{n:05}");
    let claims = (0..MANY).map(|n| claim(&name(n), "p", &[])).collect();
    let mut fixture = Fixture::new(vec![pool("p", "10.0.0.0/28")], claims, Vec::new());
    let round = |fixture: &mut Fixture| {
        let before = fixture.claims.queue.load().added;
        let mut requests = 0;
        while fixture.claims.queue.has_ready(fixture.now.mono) {
            for request in fixture.requests() {
                requests += 1;
                fixture.write(request);
            }
        }
        (fixture.claims.queue.load().added - before, requests)
    };
    let (_, requests) = round(&mut fixture);
    assert_eq!(requests, MANY, "each gets its addresses or its condition");
    assert_eq!(fixture.claims.waiting(), MANY - 13);
    for second in [6, 12, 18] {
        fixture.now = at(second);
        let (looks, requests) = round(&mut fixture);
        assert_eq!(requests, 0);
        assert!(looks <= MANY as u64, "{looks} looks");
        assert_eq!(fixture.claims.full.len(), 1, "the pool is searched once");
    }
}
