use super::*;
use crate::claim::tests::{ADDRESS, CLAIM, Fixture};
use crate::cluster::objects::Pod;
use crate::fixtures::{at, claim, claiming_pod, pool};
use cadastre_daemon::watch::ObjectEvent;

/// Returns a claim with this `ttlSecondsAfterUse`.
fn with_ttl(ttl: Option<u32>) -> Claim {
    let mut claim = claim(CLAIM, "p", &[]);
    claim.spec.as_mut().unwrap().ttl = ttl;
    claim
}

fn user() -> Pod {
    claiming_pod("web-0", CLAIM, Some("a"))
}

impl Fixture {
    /// Sets the monotonic clock and the wall clock to this second.
    fn clock(&mut self, second: u64) {
        self.now = at(second);
        self.now.wall = Timestamp::from_second(i64::try_from(second).unwrap()).unwrap();
    }

    /// Lets the loop work until nothing is left to write. Returns whether the loop then deletes the claim.
    fn deletes(&mut self) -> bool {
        self.settle(CLAIM);
        self.cache.claims.get(CLAIM).unwrap().deleting
    }

    /// Makes a pod use the claim until this second, and then releases the address.
    fn use_until(&mut self, second: u64) {
        self.applied(user());
        self.settle(CLAIM);
        self.allocations.confirm(&crate::fixtures::cidr(ADDRESS));
        self.claims.queue.add(CLAIM.into());
        assert_eq!(self.settle(CLAIM).1, "InUse");
        self.clock(second);
        self.gone(user());
        self.settle(CLAIM);
        self.release(ADDRESS);
    }

    /// Drops the loop's state, as after a change of leaders.
    fn change_leader(&mut self) {
        self.claims = ClaimLoop::default();
        self.claims.queue.add(CLAIM.into());
    }
}

#[test]
fn a_claim_is_deleted_when_its_time_after_use_is_over() {
    let mut fixture = Fixture::of(with_ttl(Some(100)));
    assert!(!fixture.deletes());
    fixture.use_until(1_000);
    for (second, is_due) in [(1_000, false), (1_099, false), (1_100, true)] {
        fixture.clock(second);
        assert_eq!(fixture.deletes(), is_due, "at {second} s");
    }
}

#[test]
fn a_claim_that_no_pod_has_used_or_that_has_no_time_after_use_stays() {
    for (ttl, used) in [(Some(0), false), (None, true)] {
        let mut fixture = Fixture::of(with_ttl(ttl));
        assert!(!fixture.deletes());
        if used {
            fixture.use_until(10);
        }
        fixture.clock(1_000_000);
        fixture.claims.queue.add(CLAIM.into());
        assert!(!fixture.deletes(), "{ttl:?}");
    }
}

#[test]
fn a_claim_in_use_stays_however_old_its_last_release_is() {
    let mut fixture = Fixture::of(with_ttl(Some(10)));
    fixture.use_until(1_000);
    assert!(!fixture.deletes());
    // A pod names the claim, but is not bound to a node.
    let unbound = claiming_pod("web-0", CLAIM, None);
    fixture.applied(unbound.clone());
    fixture.clock(2_000);
    assert!(!fixture.deletes(), "a pod names it");
    fixture.gone(unbound);
    fixture.applied(user());
    fixture.clock(3_000);
    assert!(!fixture.deletes(), "a pod on a node names it");
    fixture.gone(user());
    fixture.clock(4_000);
    assert!(!fixture.deletes(), "its node has not released the address");
    fixture.release(ADDRESS);
    assert!(!fixture.deletes());
    fixture.clock(4_010);
    assert!(fixture.deletes());
}

#[test]
fn the_time_goes_on_when_another_controller_leads() {
    let mut fixture = Fixture::of(with_ttl(Some(1_000)));
    fixture.use_until(1_000);
    assert!(!fixture.deletes());
    fixture.clock(1_900);
    fixture.change_leader();
    assert!(!fixture.deletes());
    fixture.clock(1_999);
    assert!(!fixture.deletes());
    fixture.clock(2_000);
    assert!(fixture.deletes());
}

#[test]
fn a_claim_without_pods_stays_a_minute_when_another_controller_leads() {
    let mut fixture = Fixture::of(with_ttl(Some(1_000)));
    fixture.use_until(1_000);
    assert!(!fixture.deletes());
    fixture.clock(9_000);
    fixture.change_leader();
    for (second, is_due) in [(9_000, false), (9_059, false), (9_060, true)] {
        fixture.clock(second);
        assert_eq!(fixture.deletes(), is_due, "at {second} s");
    }
}

#[test]
fn a_release_in_the_future_delays_the_deletion_by_no_more_than_the_time_after_use() {
    let mut fixture = Fixture::of(with_ttl(Some(100)));
    fixture.use_until(50_000);
    fixture.settle(CLAIM);
    fixture.clock(1_000);
    fixture.change_leader();
    for (second, is_due) in [(1_000, false), (1_099, false), (1_100, true)] {
        fixture.clock(second);
        assert_eq!(fixture.deletes(), is_due, "at {second} s");
    }
}

#[test]
fn another_time_after_use_counts_from_the_same_release() {
    let mut fixture = Fixture::of(with_ttl(Some(10_000)));
    fixture.use_until(1_000);
    assert!(!fixture.deletes());
    fixture.clock(2_000);
    let mut changed = Claim::clone(fixture.cache.claims.get(CLAIM).unwrap());
    changed.spec.as_mut().unwrap().ttl = Some(1_200);
    changed.version += 1;
    fixture.cache.claims.change(ObjectEvent::Applied(changed));
    fixture.claims.queue.add(CLAIM.into());
    assert!(!fixture.deletes());
    fixture.clock(2_199);
    assert!(!fixture.deletes());
    fixture.clock(2_200);
    assert!(fixture.deletes());
}

#[test]
fn nothing_is_deleted_while_pods_are_listed_anew() {
    let mut fixture = Fixture::new(
        vec![pool("p", "10.0.0.0/24")],
        vec![with_ttl(Some(0))],
        Vec::new(),
    );
    fixture.use_until(1_000);
    let asked = Duration::ZERO;
    fixture.cache.pods.change(ObjectEvent::Restarted { asked });
    assert!(!fixture.deletes());
    fixture.cache.pods.change(ObjectEvent::Listed);
    fixture.clock(1_004);
    assert!(!fixture.deletes());
    fixture.clock(1_005);
    assert!(fixture.deletes());
}

#[test]
fn the_deletion_names_the_version_that_was_read() {
    let mut fixture = Fixture::of(with_ttl(Some(0)));
    fixture.use_until(1_000);
    let requests = fixture.requests();
    let is_status = |it: &ApiRequest| matches!(it, ApiRequest::SetClaimStatus(..));
    assert!(
        requests.len() == 1 && is_status(&requests[0]),
        "{requests:?}"
    );
    for request in requests {
        fixture.write(request);
    }
    let known = KnownObject::of(&**fixture.cache.claims.get(CLAIM).unwrap());
    let expected = ApiRequest::Delete(ObjectKind::Claim, known);
    assert_eq!(fixture.requests(), [expected]);
}
