use super::*;
use crate::cluster::objects::Pool;
use crate::fixtures::{LoopFixture, addr, claim, claiming_pod, list, pool, pool_with};
use cadastre_daemon::watch::ObjectEvent;

const CLAIM: &str = "default/vm.vlan7";

/// A cluster with the loop of IPAMClaims.
type Fixture = LoopFixture<IpamClaimLoop>;

impl Fixture {
    /// Makes the watch deliver a pod that names the IPAMClaim.
    fn applied(&mut self, uid: &str, node: Option<&str>) {
        let mut pod = claiming_pod("vm-1", CLAIM, node);
        pod.uid = uid.into();
        let mut claim = *pod.claim.take().unwrap();
        (claim.uid, claim.source) = (uid.into(), ClaimSource::IpamClaim);
        pod.interface_claims = [claim].into();
        self.cache.pods.change(ObjectEvent::Applied(pod));
        for name in self.cache.pods.take_claims() {
            self.tested.queue.add(name);
        }
    }

    /// Makes the watch deliver the IPClaim that the IPAMClaim of this UID owns.
    fn shown(&mut self, uid: Option<&str>, addresses: &[&str]) {
        let mut claim = claim(CLAIM, "p", &[]);
        let before = self.cache.claims.get(CLAIM);
        claim.version += before.map_or(0, |it| it.version);
        claim.ipam_claim = uid.map(Into::into);
        claim.status.addresses = addresses.iter().map(|it| addr(it)).collect();
        claim.status.pool = (!addresses.is_empty()).then(|| "p".into());
        self.allocations.drop_claim(&claim.name);
        self.allocations.claim_seen(&claim);
        list(&mut self.cache.claims, vec![claim]);
        self.tested.queue.add(CLAIM.into());
    }

    fn answered(&mut self, step: IpamClaimStep, outcome: &RequestOutcome) {
        let name = CLAIM.into();
        let purpose = Purpose::IpamClaim { name, step };
        let answer = RequestAnswer {
            wrote: step != IpamClaimStep::Read,
            ..RequestAnswer::to_write(&purpose, outcome)
        };
        self.step(|it, cx| _ = it.answered(&answer, cx));
    }

    fn read(&mut self, network: &str) {
        self.read_as(&IpamClaim {
            network: network.to_owned(),
            ..ipam_claim(1, &[])
        });
    }

    /// Lets the loop read the IPAMClaim, and answers with this one.
    fn read_as(&mut self, found: &IpamClaim) {
        let read = self.request();
        assert_eq!(read, Some(ApiRequest::ReadIpamClaim(CLAIM.into())));
        let found = RequestOutcome::IpamClaim(found.clone());
        self.answered(IpamClaimStep::Read, &found);
    }

    /// Returns the pool of the IPClaim that the loop creates now.
    fn pool_of_created(&mut self) -> Option<String> {
        match self.request()? {
            ApiRequest::Create(name, ObjectSpec::Claim(new)) if *name == *CLAIM => {
                let owner = new.owner.as_ref().unwrap();
                assert_eq!(owner.kind, ClaimOwnerKind::IpamClaim);
                assert_eq!((&*owner.name, &*owner.uid), ("vm.vlan7", "of-vm"));
                new.spec.pool
            }
            other => panic!("{other:?}"),
        }
    }
}

fn serving(name: &str, priority: i32) -> Pool {
    let range = format!("10.0.{priority}.0/24");
    pool_with(name, &range, |spec| {
        spec.networks = vec!["vlan7".to_owned()];
        spec.priority = priority;
    })
}

fn ipam_claim(version: u64, ips: &[&str]) -> IpamClaim {
    IpamClaim {
        uid: "of-vm".into(),
        version,
        network: "vlan7".to_owned(),
        ips: ips.iter().map(|it| (*it).to_owned()).collect(),
    }
}

/// Returns the write of one address to the IPAMClaim that was read in this version.
fn fill(version: u64, address: &str) -> ApiRequest {
    let known = KnownObject {
        name: CLAIM.into(),
        uid: "of-vm".into(),
        version,
    };
    let ips = vec![address.to_owned()];
    ApiRequest::FillIpamClaim(known, IPAMClaimIps { ips })
}

fn missing() -> RequestOutcome {
    RequestOutcome::Rejected(Rejection::Missing)
}

#[test]
fn the_best_pool_of_the_network_gives_the_addresses_once_the_pod_is_bound() {
    let pools = vec![
        pool("p", "10.9.0.0/24"),
        serving("low", 1),
        serving("high", 2),
    ];
    let mut fixture = Fixture::new(pools);
    fixture.applied("u1", None);
    assert_eq!(fixture.request(), None, "the pod is bound to no node");
    fixture.applied("u1", Some("a"));
    fixture.read("vlan7");
    assert_eq!(fixture.pool_of_created().as_deref(), Some("high"));
    assert_eq!(fixture.request(), None, "the creation is in flight");
}

#[test]
fn an_ipam_claim_that_is_absent_is_read_again_and_the_pod_is_told_once() {
    let mut fixture = Fixture::new(vec![serving("p", 1)]);
    fixture.applied("u1", Some("a"));
    let mut reads = 0;
    for tenth in 0..1_200 {
        fixture.now.mono = Duration::from_millis(tenth * 100);
        if fixture.request().is_some() {
            reads += 1;
            fixture.answered(IpamClaimStep::Read, &missing());
        }
    }
    assert!((8..16).contains(&reads), "{reads} reads in two minutes");
    assert_eq!(fixture.reports.len(), 1);
    assert!(
        fixture.reports[0].note.contains("does not exist"),
        "{:?}",
        fixture.reports
    );
    fixture.now.mono += LONGEST_PAUSE;
    fixture.read("vlan7");
    assert!(fixture.pool_of_created().is_some());
}

#[test]
fn a_network_without_a_pool_is_told_and_a_new_pool_ends_the_wait() {
    let mut fixture = Fixture::new(vec![serving("p", 1)]);
    fixture.applied("u1", Some("a"));
    fixture.read("vlan8");
    assert_eq!(fixture.request(), None);
    assert!(
        fixture.reports[0]
            .note
            .contains("no pool serves network \"vlan8\"")
    );
    fixture.tested.requeue();
    fixture.read("vlan7");
    assert_eq!(fixture.pool_of_created().as_deref(), Some("p"));
}

#[test]
fn the_ipam_claim_gets_the_addresses_that_the_status_records_once() {
    let mut fixture = Fixture::new(vec![serving("p", 1)]);
    fixture.shown(Some("of-vm"), &[]);
    assert_eq!(fixture.request(), None, "the IPClaim has no addresses yet");
    fixture.shown(Some("of-vm"), &["10.0.1.7"]);
    fixture.read("vlan7");
    assert_eq!(fixture.request(), Some(fill(1, "10.0.1.7/24")));
    let unclear = RequestOutcome::Indeterminate("no answer".to_owned());
    fixture.answered(IpamClaimStep::Fill, &unclear);
    fixture.read_as(&ipam_claim(2, &[]));
    assert_eq!(fixture.request(), Some(fill(2, "10.0.1.7/24")), "again");
    let stored = RequestOutcome::IpamClaim(ipam_claim(3, &["10.0.1.7/24"]));
    fixture.answered(IpamClaimStep::Fill, &stored);
    assert_eq!(fixture.request(), None);
}

#[test]
fn an_ipam_claim_that_has_the_addresses_is_read_once_and_not_written() {
    let mut fixture = Fixture::new(vec![serving("p", 1)]);
    fixture.shown(Some("of-vm"), &["10.0.1.7"]);
    fixture.read_as(&ipam_claim(1, &["10.0.1.7/32"]));
    for _ in 0..2 {
        fixture.tested.queue.add(CLAIM.into());
        assert_eq!(fixture.request(), None);
    }
}

#[test]
fn other_addresses_of_the_ip_claim_replace_those_of_the_ipam_claim() {
    let mut fixture = Fixture::new(vec![serving("p", 1)]);
    fixture.shown(Some("of-vm"), &["10.0.1.7"]);
    fixture.read_as(&ipam_claim(1, &["10.0.1.7/24"]));
    assert_eq!(fixture.request(), None);
    fixture.shown(Some("of-vm"), &["10.0.1.8"]);
    fixture.read_as(&ipam_claim(1, &["10.0.1.7/24"]));
    assert_eq!(fixture.request(), Some(fill(1, "10.0.1.8/24")));
}

#[test]
fn an_ipam_claim_that_is_gone_or_replaced_is_read_once_and_not_written() {
    for is_gone in [true, false] {
        let mut fixture = Fixture::new(vec![serving("p", 1)]);
        fixture.shown(Some("of-vm"), &["10.0.1.7"]);
        fixture.applied("u1", Some("a"));
        if is_gone {
            fixture.request();
            fixture.answered(IpamClaimStep::Read, &missing());
        } else {
            let mut another = ipam_claim(7, &[]);
            another.uid = "of-another".into();
            fixture.read_as(&another);
        }
        fixture.tested.queue.add(CLAIM.into());
        assert_eq!(fixture.request(), None, "gone: {is_gone}");
        assert_eq!(fixture.reports.len(), 0, "the pod has its addresses");
    }
}

#[test]
fn an_ip_claim_of_a_user_is_used_and_no_ipam_claim_is_written() {
    let mut fixture = Fixture::new(vec![serving("p", 1)]);
    fixture.shown(None, &["10.0.1.7"]);
    fixture.applied("u1", Some("a"));
    assert_eq!(fixture.request(), None);
}
