use super::*;
use crate::pods::Pod;
use crate::pods::testing::pod;
use crate::snapshot::testing::{record, snapshot};
use cadastre_daemon::watch::ObjectEvent;

const NONE: LeakClaims<'static> = LeakClaims::NONE;
const GRACE: Duration = Duration::from_secs(60);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn pods(all: &[Pod]) -> Pods {
    let mut pods = Pods::default();
    for pod in all {
        pods.change(ObjectEvent::Applied(pod.clone()));
    }
    pods.change(ObjectEvent::Listed);
    pods
}

fn finished(uid: &str) -> Pod {
    Pod {
        finished: true,
        ..pod(uid, &[], &[])
    }
}

fn with(records: &[AttachmentRecord]) -> Snapshot {
    Snapshot {
        attachments: records.to_vec(),
        ..snapshot(&[], &[])
    }
}

/// Returns the evidence of a node whose boot has the id `boot`. The runtime has these sandboxes, and these network
/// namespaces are gone.
fn evidence(sandboxes: Option<&[&str]>, gone: &[&str]) -> NodeEvidence {
    NodeEvidence {
        boot: "boot".to_owned(),
        sandboxes: sandboxes.map(|all| all.iter().map(ToString::to_string).collect()),
        gone: gone.iter().map(ToString::to_string).collect(),
        present: BTreeSet::new(),
    }
}

/// Looks for leaks twice, with a grace period in between. Returns the attachments whose leaks are proven afterwards.
fn freed(
    snapshot: &Snapshot,
    pods: &Pods,
    candidates: &[LeakCandidate],
    evidence: &NodeEvidence,
) -> Vec<(String, LeakReason)> {
    let mut leaks = LeakDetector::new(GRACE);
    let claims = LeakClaims {
        leak_candidates: candidates,
        ..NONE
    };
    leaks.look(snapshot, pods, claims, evidence, secs(100));
    let look = leaks.look(snapshot, pods, claims, evidence, secs(160));
    look.due
        .iter()
        .filter(|it| it.is_proven(Some(pods), evidence))
        .map(|it| (it.record.attachment.container_id.clone(), it.reason))
        .collect()
}

#[test]
fn both_proofs_are_needed() {
    let it = with(&[record("c1", "u1", &["10.0.0.1"])]);
    let path = "/var/run/netns/c1";
    let live = pods(&[pod("u1", &[], &[])]);
    let gone = pods(&[pod("u2", &[], &[])]);
    let over = pods(&[finished("u1")]);
    for (pods, evidence, expected) in [
        (&gone, evidence(Some(&[]), &[]), Some(LeakReason::PodGone)),
        (&gone, evidence(None, &[path]), Some(LeakReason::PodGone)),
        (
            &over,
            evidence(Some(&["c2"]), &[]),
            Some(LeakReason::PodFinished),
        ),
        // The node still has the sandbox, or has no evidence, so no leak is proven.
        (&gone, evidence(Some(&["c1"]), &[]), None),
        (&gone, evidence(None, &[]), None),
        (&gone, evidence(None, &["/var/run/netns/other"]), None),
        // The API still has the pod, so no leak is proven.
        (&live, evidence(Some(&[]), &[path]), None),
    ] {
        let freed = freed(&it, pods, &[], &evidence);
        let reasons: Vec<LeakReason> = freed.iter().map(|(_, reason)| *reason).collect();
        assert_eq!(reasons, Vec::from_iter(expected), "{evidence:?}");
    }
}

#[test]
fn a_list_that_is_not_complete_proves_nothing() {
    let it = with(&[record("c1", "u1", &["10.0.0.1"])]);
    let mut running = pods(&[]);
    running.change(ObjectEvent::Restarted {
        asked: Duration::ZERO,
    });
    let evidence = evidence(Some(&[]), &[]);
    assert!(freed(&it, &running, &[], &evidence).is_empty());
    let mut leaks = LeakDetector::new(GRACE);
    leaks.look(&it, &pods(&[]), NONE, &evidence, secs(0));
    let look = leaks.look(&it, &pods(&[]), NONE, &evidence, secs(60));
    assert!(!look.due[0].is_proven(Some(&running), &evidence));
    assert!(!look.due[0].is_proven(None, &evidence), "no list at all");
}

#[test]
fn a_candidate_is_due_after_the_grace_period() {
    let it = with(&[record("c1", "u1", &["10.0.0.1"])]);
    let (gone, live) = (pods(&[]), pods(&[pod("u1", &[], &[])]));
    let evidence = evidence(Some(&[]), &[]);
    let mut leaks = LeakDetector::new(GRACE);
    let look = leaks.look(&it, &gone, NONE, &evidence, secs(0));
    assert_eq!((look.due.len(), look.next), (0, Some(secs(60))));
    assert_eq!(
        leaks.reasons().get(&it.attachments[0].attachment).copied(),
        Some(LeakReason::PodGone)
    );
    leaks.look(&it, &live, NONE, &evidence, secs(30));
    assert_eq!(leaks.reasons().len(), 0);
    let look = leaks.look(&it, &gone, NONE, &evidence, secs(70));
    assert_eq!((look.due.len(), look.next), (0, Some(secs(130))));
    let look = leaks.look(&it, &gone, NONE, &evidence, secs(130));
    assert_eq!((look.due.len(), look.next), (1, Some(secs(160))));
    // The address was released meanwhile, so there is no candidate any more.
    leaks.look(&with(&[]), &gone, NONE, &evidence, secs(131));
    assert_eq!(leaks.reasons().len(), 0);
}

#[test]
fn a_named_candidate_has_no_grace_period_and_a_live_pod_stays() {
    let it = with(&[record("c1", "u1", &["10.0.0.1"])]);
    let candidate = |address: &str, uid: &str| LeakCandidate {
        address: address.to_owned(),
        pod_uid: uid.to_owned(),
    };
    let named = [candidate("10.0.0.1", "u1")];
    let gone = evidence(Some(&[]), &[]);
    let there = evidence(Some(&["c1"]), &[]);
    let mut leaks = LeakDetector::new(GRACE);
    let claims = LeakClaims {
        leak_candidates: &named,
        ..NONE
    };
    let look = leaks.look(&it, &pods(&[]), claims, &gone, secs(0));
    assert!(look.due[0].is_proven(Some(&pods(&[])), &gone));
    assert!(!look.due[0].is_proven(Some(&pods(&[])), &there));
    assert_eq!(look.due[0].reason, LeakReason::LeakCandidate);
    // Meanwhile another pod may have got the address. So the controller's statement counts only if it names both the
    // address and the pod of the attachment.
    for other in [candidate("10.0.0.1", "u9"), candidate("10.0.0.2", "u1")] {
        let mut leaks = LeakDetector::new(GRACE);
        let claims = LeakClaims {
            leak_candidates: &[other],
            ..NONE
        };
        let look = leaks.look(&it, &pods(&[]), claims, &gone, secs(0));
        assert!(look.due.is_empty());
    }
    let live = pods(&[pod("u1", &[], &[])]);
    assert!(freed(&it, &live, &named, &gone).is_empty());
}

#[test]
fn after_a_reboot_the_old_sandbox_is_released_when_the_pod_has_a_new_one() {
    let mut old = record("c1", "u1", &["10.0.0.1"]);
    old.boot = "earlier".to_owned();
    let live = pods(&[pod("u1", &[], &[])]);
    let nothing = evidence(None, &[]);
    let alone = with(std::slice::from_ref(&old));
    assert!(freed(&alone, &live, &[], &nothing).is_empty());
    let new = record("c2", "u1", &["10.0.0.2"]);
    let both = with(&[old.clone(), new.clone()]);
    assert_eq!(
        freed(&both, &live, &[], &nothing),
        [("c1".to_owned(), LeakReason::Reboot)]
    );
    let mut second = new;
    second.attachment.ifname = "net1".to_owned();
    assert!(freed(&with(&[old.clone(), second]), &live, &[], &nothing).is_empty());
    // If the pod is gone, the reboot serves as the proof from the node.
    let freed = freed(&alone, &pods(&[]), &[], &nothing);
    assert_eq!(freed, [("c1".to_owned(), LeakReason::PodGone)]);
}

#[test]
fn older_sandboxes_of_a_live_pod_are_released_on_proof_from_the_node() {
    let given = |id: &str, order| AttachmentRecord {
        order,
        ..record(id, "u1", &["10.0.0.1"])
    };
    let ids: Vec<String> = (0..16).map(|n| format!("c{n:02}")).collect();
    let all: Vec<AttachmentRecord> = (2..).zip(&ids).map(|(n, id)| given(id, n)).collect();
    let all = with(&all);
    let live = pods(&[pod("u1", &[], &[])]);
    let ids_of = |evidence: &NodeEvidence| -> Vec<String> {
        let freed = freed(&all, &live, &[], evidence);
        assert!(
            freed
                .iter()
                .all(|(_, reason)| *reason == LeakReason::Superseded)
        );
        freed.into_iter().map(|(id, _)| id).collect()
    };
    assert_eq!(ids_of(&evidence(Some(&[]), &[])), ids[..15]);
    // While the runtime lists a sandbox, ready or not, the sandbox does not count as gone. But once the sandbox's
    // network namespace is gone, the sandbox counts as gone even while the runtime lists it.
    assert_eq!(ids_of(&evidence(Some(&["c00"]), &[])), ids[1..15]);
    let netns: Vec<String> = ids
        .iter()
        .map(|id| format!("/var/run/netns/{id}"))
        .collect();
    let netns: Vec<&str> = netns.iter().map(String::as_str).collect();
    assert_eq!(ids_of(&evidence(Some(&["c00"]), &netns)), ids[..15]);
    // The node has no evidence that a sandbox is gone.
    assert!(ids_of(&evidence(None, &[])).is_empty());
    // The leak of a superseded sandbox is proven without a list of pods, after a short grace period.
    let mut leaks = LeakDetector::new(Duration::from_secs(3600));
    let proof = evidence(Some(&[]), &[]);
    let look = leaks.look(&all, &Pods::default(), NONE, &proof, secs(0));
    assert_eq!((look.due.len(), look.next), (0, Some(secs(5))));
    let look = leaks.look(&all, &Pods::default(), NONE, &proof, secs(5));
    assert_eq!(look.due.len(), 15);
    assert!(look.due.iter().all(|it| it.is_proven(None, &proof)));
}

#[test]
fn without_a_pod_proof_from_the_node_suffices() {
    let it = with(&[record("c1", "", &["10.0.0.1"])]);
    let path = "/var/run/netns/c1";
    assert_eq!(netns_of_others(&it).collect::<Vec<_>>(), [path]);
    let no_pods = Pods::default();
    let is_freed = |it: &Snapshot, evidence: &NodeEvidence| {
        let freed = freed(it, &no_pods, &[], evidence);
        freed.first().map(|(_, reason)| *reason)
    };
    assert_eq!(
        is_freed(&it, &evidence(None, &[path])),
        Some(LeakReason::NoNetns)
    );
    // The runtime need not know the container of another program. So the runtime's list proves nothing.
    assert_eq!(is_freed(&it, &evidence(Some(&[]), &[])), None);
    let mut unknown = it.clone();
    unknown.attachments[0].netns.clear();
    assert_eq!(is_freed(&unknown, &evidence(None, &[""])), None);
    unknown.attachments[0].boot = "earlier".to_owned();
    assert_eq!(
        is_freed(&unknown, &evidence(None, &[])),
        Some(LeakReason::Reboot)
    );
}

#[test]
fn a_static_pod_is_live_while_its_mirror_exists() {
    let it = with(&[record("c1", "static", &["10.0.0.1"])]);
    let mirror = Pod {
        mirrors: Some("static".to_owned()),
        ..pod("api", &[], &[])
    };
    assert!(freed(&it, &pods(&[mirror]), &[], &evidence(Some(&[]), &[])).is_empty());
    assert_eq!(
        freed(&it, &pods(&[]), &[], &evidence(Some(&[]), &[])).len(),
        1
    );
}

#[test]
fn a_confirmation_counts_only_while_the_node_sees_no_sandbox_and_not_against_the_api() {
    let mut of_pod = record("c1", "u1", &["10.0.0.1"]);
    of_pod.order = 2;
    let newer = AttachmentRecord {
        order: 3,
        ..record("c3", "u1", &["10.0.0.3"])
    };
    let without_pod = record("c2", "", &["10.0.0.2"]);
    let it = with(&[of_pod.clone(), without_pod.clone()]);
    let both = with(&[of_pod, without_pod, newer]);
    let claims_of = |all: &[(&str, &str)]| -> BTreeSet<(Addr, String)> {
        let read = |(addr, handle): &(&str, &str)| {
            (Addr::parse_strict(addr).unwrap(), (*handle).to_owned())
        };
        all.iter().map(read).collect()
    };
    let freed =
        |it: &Snapshot, pods: &Pods, claimed: &BTreeSet<(Addr, String)>, proof: &NodeEvidence| {
            let claims = LeakClaims {
                container_gone: claimed,
                ..NONE
            };
            // The user's confirmation ends the grace period at once.
            let look = LeakDetector::new(GRACE).look(it, pods, claims, proof, secs(0));
            let due = look.due.iter().filter(|it| it.is_proven(Some(pods), proof));
            due.map(|it| (it.record.attachment.container_id.clone(), it.reason))
                .collect::<Vec<_>>()
        };
    let (gone, live) = (pods(&[]), pods(&[pod("u1", &[], &[])]));
    let no_evidence = evidence(None, &[]);
    let claimed = claims_of(&[
        ("10.0.0.1", "net/c1"),
        ("10.0.0.2", "net/c2"),
        ("10.0.0.3", "net/c3"),
    ]);
    let of = |id: &str, reason| (id.to_owned(), reason);
    let first = of("c1", LeakReason::PodGone);
    let second = of("c2", LeakReason::Confirmed);
    assert_eq!(
        freed(&it, &gone, &claimed, &no_evidence),
        [first, second.clone()]
    );
    assert!(freed(&it, &gone, &claims_of(&[]), &no_evidence).is_empty());
    // A user's confirmation does not replace the proof from the API, so the live pod keeps its address.
    assert_eq!(
        freed(&it, &live, &claimed, &no_evidence),
        std::slice::from_ref(&second)
    );
    let superseded = of("c1", LeakReason::Superseded);
    let freed_of_live = freed(&both, &live, &claimed, &no_evidence);
    assert_eq!(
        freed_of_live,
        [superseded, second],
        "the newest sandbox stays"
    );
    // While the node lists a sandbox or its network namespace, the sandbox is not gone, even if a user has declared its
    // container gone.
    let seen = evidence(Some(&["c1", "c2"]), &[]);
    assert!(freed(&it, &gone, &claimed, &seen).is_empty());
    let path = |id: &str| format!("/var/run/netns/{id}");
    let seen = NodeEvidence {
        present: BTreeSet::from([path("c1"), path("c2")]),
        ..no_evidence.clone()
    };
    assert!(freed(&it, &gone, &claimed, &seen).is_empty());
    // The user's confirmation names another container, so it does not match.
    let other = claims_of(&[("10.0.0.1", "net/c9"), ("10.0.0.2", "net/c1")]);
    assert!(freed(&it, &gone, &other, &no_evidence).is_empty());
}

#[test]
fn orphans_are_addresses_that_stay_candidates_for_two_grace_periods() {
    let it = with(&[
        record("c1", "u1", &["10.0.0.1", "fd00::1"]),
        record("c2", "u2", &["10.0.0.2"]),
        record("c3", "", &["10.0.0.3"]),
    ]);
    let gone = pods(&[pod("u2", &[], &[])]);
    let mut leaks = LeakDetector::new(GRACE);
    let evidence = evidence(None, &[]);
    leaks.look(&it, &gone, NONE, &evidence, secs(0));
    let orphans = |leaks: &LeakDetector, named: &[&str], at| {
        let named = named.iter().map(|it| Addr::parse_strict(it).unwrap());
        let orphans = leaks.orphans(&it, &named.collect(), secs(at));
        let orphans = orphans.into_iter();
        orphans
            .map(|it| format!("{} {}", it.0, it.1))
            .collect::<Vec<_>>()
    };
    let of_pod = ["10.0.0.1 u1", "fd00::1 u1"];
    assert!(orphans(&leaks, &[], 119).is_empty());
    assert_eq!(orphans(&leaks, &[], 120), of_pod);
    assert_eq!(
        orphans(&leaks, &["10.0.0.1"], 1),
        of_pod,
        "a user has named the address"
    );
    // An address that a user names is no orphan if its pod is alive, or if no pod has the address.
    assert!(orphans(&leaks, &["10.0.0.2", "10.0.0.3"], 1).is_empty());
}
