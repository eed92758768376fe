use super::*;
use crate::allocations::adopt::UnadoptedBlocks;
use crate::cluster::objects::{Claim, ClaimStatus};
use crate::fixtures::{claim, cluster_of, list, pod, pool, rebuilt, subnet};
use crate::handover::is_handed_over;
use cadastre_api::{IPClaimStatus, NodeSubnetSpec};
use cadastre_daemon::watch::ObjectEvent;

const CLAIM: &str = "default/db";

/// An address in a block of node `n`.
const ADDRESS: &str = "10.0.0.5/32";

/// A node with two blocks, and perhaps a claim of [`ADDRESS`].
struct Fixture {
    cache: ClusterCache,
    allocations: AllocationState,
}

impl Fixture {
    fn new(claims: Vec<Claim>) -> Self {
        let of_node = subnet("n", &["10.0.0.0/28", "10.0.0.32/28"], 0);
        let mut cache = cluster_of(vec![pool("p", "10.0.0.0/24")], vec![of_node]);
        list(&mut cache.claims, claims);
        Fixture {
            allocations: rebuilt(&cache),
            cache,
        }
    }

    fn with_claim() -> Self {
        Fixture::new(vec![stored_claim()])
    }

    fn change(&mut self, change: impl FnOnce(&mut Subnet)) {
        let mut is = Subnet::clone(self.cache.subnets.get("n").unwrap());
        is.version += 1;
        change(&mut is);
        self.cache.subnets.change(ObjectEvent::Applied(is));
    }

    fn request(&mut self, ranges: &[&str]) {
        let ranges = ranges.iter().map(|it| cidr(it)).collect();
        self.change(|is| is.requests.withdraw = ranges);
    }

    fn report(&mut self, withdrawn: &[&str]) {
        let withdrawn = withdrawn.iter().map(|it| cidr(it)).collect();
        self.change(|is| is.report.as_mut().unwrap().withdrawn = withdrawn);
    }

    /// Returns the withdrawals that the NodeSubnet should list.
    fn wanted(&self) -> Withdrawals {
        let node = self.cache.nodes.get("n").unwrap();
        let is = self.cache.subnets.get("n").unwrap();
        let blocks = &is.spec.as_ref().unwrap().blocks;
        Withdrawals::of(node, Some(is), blocks, &self.cache, &self.allocations)
    }

    /// Writes to the NodeSubnet the withdrawals that it should list, and returns them.
    fn write(&mut self) -> Withdrawals {
        let wanted = self.wanted();
        self.change(|is| {
            let spec: &mut NodeSubnetSpec = is.spec.as_mut().unwrap();
            spec.withdraw = wanted.withdraw.clone();
            spec.claimed = wanted.claimed.clone();
            spec.returned = wanted.returned.clone();
        });
        wanted
    }

    fn is_handed_over(&self) -> bool {
        let node = self.cache.nodes.get("n").unwrap();
        is_handed_over(node, &cidr(ADDRESS), &CLAIM.into(), &self.cache)
    }

    /// Checks that a range stays listed as returned until the agent no longer reports it as withdrawn, although a user
    /// requests it. After that, the range must be listed as one to withdraw.
    fn assert_returned_until_reported(&mut self) {
        let is = self.write();
        assert_eq!((is.withdraw.len(), is.returned.len()), (0, 1), "{is:?}");
        self.report(&[]);
        let is = self.write();
        assert_eq!((is.withdraw.len(), is.returned.len()), (1, 0), "{is:?}");
    }
}

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

fn stored_claim() -> Claim {
    Claim {
        status: ClaimStatus::from(&IPClaimStatus {
            addresses: vec!["10.0.0.5".to_owned()],
            pool: Some("p".to_owned()),
            ..IPClaimStatus::default()
        }),
        ..claim(CLAIM, "", &["10.0.0.5"])
    }
}

#[test]
fn parts_of_blocks_are_wanted_back_and_nothing_else() {
    let mut fixture = Fixture::new(Vec::new());
    fixture.request(&[
        "10.0.0.4/30",  // a part of the first block
        "10.0.0.5/32",  // inside the previous request
        "10.0.0.16/32", // in no block of the node
        "10.0.0.32/28", // a complete block
        "10.0.0.32/32", // a part of the second block
        "10.0.0.0/27",  // larger than a block
    ]);
    let is = fixture.wanted();
    assert_eq!(is.withdraw, ["10.0.0.4/30", "10.0.0.32/32"]);
    assert!(is.returned.is_empty() && is.claimed.is_empty());
}

#[test]
fn what_is_withdrawn_and_no_longer_wanted_is_returned() {
    let mut fixture = Fixture::new(Vec::new());
    fixture.request(&["10.0.0.4/30"]);
    fixture.report(&["10.0.0.4/30", "10.0.0.8/32", "10.9.9.9/32"]);
    let is = fixture.wanted();
    assert_eq!(is.withdraw, ["10.0.0.4/30"]);
    assert_eq!(is.returned, ["10.0.0.8/32", "10.9.9.9/32"]);
}

#[test]
fn what_is_returned_is_not_wanted_back_before_the_agent_has_seen_the_return() {
    let mut fixture = Fixture::new(Vec::new());
    fixture.report(&["10.0.0.4/30"]);
    assert_eq!(fixture.write().returned, ["10.0.0.4/30"]);
    fixture.request(&["10.0.0.4/30"]);
    // The agent's report is older than the return, so it is possible that the agent already assigns addresses of the
    // range.
    fixture.assert_returned_until_reported();
}

#[test]
fn what_is_returned_stays_returned_although_the_node_uses_it_by_now() {
    let mut fixture = Fixture::new(Vec::new());
    fixture.report(&["10.0.0.4/30"]);
    assert_eq!(fixture.write().returned, ["10.0.0.4/30"]);
    // The watch delivers the pod's status before the agent's report.
    let user = pod(2, &["10.0.0.5"]);
    fixture.cache.pods.change(ObjectEvent::Applied(user));
    fixture.request(&["10.0.0.4/30"]);
    fixture.assert_returned_until_reported();
}

#[test]
fn an_address_is_handed_over_to_a_claim_by_three_versions_of_the_node_subnet() {
    let mut fixture = Fixture::with_claim();
    let is = fixture.write();
    assert_eq!((is.withdraw, is.claimed.len()), (vec![ADDRESS.into()], 0));
    assert_eq!(fixture.write().claimed, [], "the agent has not answered");
    assert!(!fixture.is_handed_over());
    fixture.report(&[ADDRESS]);
    assert!(!fixture.is_handed_over(), "an earlier write may return it");
    let claimed = ClaimedAddress {
        address: "10.0.0.5".to_owned(),
        claim: CLAIM.to_owned(),
        claim_uid: CLAIM.to_owned(),
    };
    assert_eq!(fixture.write().claimed, [claimed]);
    assert!(fixture.is_handed_over());
    assert_eq!(fixture.write().claimed.len(), 1);
    // A restore of the API server can bring back an older report, in which the address is not withdrawn.
    fixture.report(&[]);
    assert!(!fixture.is_handed_over());
}

#[test]
fn an_address_that_no_status_records_is_not_handed_over() {
    let mut fixture = Fixture::new(Vec::new());
    let claim = claim(CLAIM, "", &["10.0.0.5"]);
    let holder = fixture.allocations.holders.of_claims();
    let state = cadastre_core::HoldingState::Allocated;
    let holding = fixture
        .allocations
        .ledger
        .record(holder, cidr(ADDRESS), state);
    let held = vec![(cidr(ADDRESS), holding)];
    fixture
        .allocations
        .begin_claim(&claim, &"p".into(), held, false);
    fixture.write();
    fixture.report(&[ADDRESS]);
    assert_eq!(fixture.write().claimed, []);
    fixture.allocations.claim_seen(&stored_claim());
    assert_eq!(fixture.write().claimed.len(), 1);
}

#[test]
fn the_answer_for_an_earlier_claim_or_node_does_not_count() {
    let mut fixture = Fixture::with_claim();
    fixture.write();
    fixture.report(&[ADDRESS]);
    fixture.write();
    fixture.change(|is| {
        let spec = is.spec.as_mut().unwrap();
        spec.claimed[0].claim_uid = "an earlier one".to_owned();
    });
    assert!(!fixture.is_handed_over());
    assert_eq!(fixture.write().claimed[0].claim_uid, CLAIM);
    assert!(fixture.is_handed_over());
    fixture.change(|is| is.spec.as_mut().unwrap().node_uid = Some("earlier".to_owned()));
    assert!(!fixture.is_handed_over());
}

#[test]
fn a_withdrawn_range_is_not_returned_while_anybody_may_use_it() {
    let returned = |change: fn(&mut Fixture)| {
        let mut fixture = Fixture::new(Vec::new());
        fixture.report(&[ADDRESS]);
        change(&mut fixture);
        let is = fixture.write();
        let spec = fixture.cache.subnets.get("n").unwrap().spec.clone();
        assert_eq!(
            holds_back(&spec.unwrap(), &[cidr(ADDRESS)]),
            is.returned.is_empty()
        );
        is.returned.len()
    };
    assert_eq!(returned(|_| {}), 1);
    assert_eq!(returned(|it| it.allocations.in_agent_grace = true), 0);
    let pod_reports = |it: &mut Fixture| {
        let pod = pod(2, &["10.0.0.5"]);
        it.cache.pods.change(ObjectEvent::Applied(pod));
    };
    assert_eq!(returned(pod_reports), 0);
    let agent_uses = |it: &mut Fixture| {
        it.allocations.unadopted = UnadoptedBlocks::of("m", cidr(ADDRESS));
    };
    assert_eq!(returned(agent_uses), 0);
    let is_block = |it: &mut Fixture| {
        let holder = it.allocations.holder(&"m".into(), &"m".into());
        let state = cadastre_core::HoldingState::Allocated;
        it.allocations.ledger.record(holder, cidr(ADDRESS), state);
    };
    assert_eq!(returned(is_block), 0);
}
