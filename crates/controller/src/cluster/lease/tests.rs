//! Tests of single rules; `tests/lease_sim` tests all rules together.

use super::*;
use crate::cluster::intents::WriteIntent;

const fn s(seconds: u64) -> Mono {
    Duration::from_secs(seconds)
}

const fn ms(milliseconds: u64) -> Mono {
    Duration::from_millis(milliseconds)
}

/// Returns settings whose lease duration is so long that it never grows. `pace/tests.rs` tests how others grow.
fn settings(nonce: &str) -> LeaseSettings {
    LeaseSettings {
        identity: "c".into(),
        nonce: nonce.into(),
        lease_duration: s(16),
        renew_deadline: s(10),
        retry_period: s(2),
    }
}

/// An API server that stores at most one Lease, with a counter of versions.
#[derive(Default)]
struct Server(Option<LeaseRecord>, u64);

impl Server {
    fn answer(&mut self, call: LeaseCall) -> LeaseAnswer {
        match (call, &self.0) {
            (LeaseCall::Get, None) => LeaseAnswer::Missing,
            (LeaseCall::Get, Some(record)) => LeaseAnswer::Found(record.clone()),
            (LeaseCall::Create(record), None) => self.write(record),
            (LeaseCall::Replace(record), Some(is))
                if is.resource_version == record.resource_version =>
            {
                self.write(record)
            }
            _ => LeaseAnswer::Conflict,
        }
    }

    fn write(&mut self, record: LeaseRecord) -> LeaseAnswer {
        self.1 += 1;
        let record = LeaseRecord {
            resource_version: self.1.to_string(),
            ..record
        };
        self.0 = Some(record.clone());
        LeaseAnswer::Written(record)
    }
}

/// Makes and answers all calls of the elector that are due.
fn settle(elector: &mut Elector, server: &mut Server, now: Mono) {
    while let Some(call) = elector.poll(now) {
        let answer = server.answer(call);
        elector.answer(answer, now);
    }
}

/// Returns a candidate and a server without a Lease.
fn candidate() -> (Elector, Server) {
    (Elector::new(settings("a")), Server::default())
}

/// Returns a process that has led since 0 s.
fn leader() -> (Elector, Server) {
    let (mut a, mut server) = candidate();
    settle(&mut a, &mut server, s(0));
    (a, server)
}

/// Returns a leader `a` and a standby `b` that has read the Lease, at 0 s.
fn leader_and_standby() -> (Elector, Elector, Server) {
    let (a, mut server) = leader();
    let mut b = Elector::new(settings("b"));
    settle(&mut b, &mut server, s(0));
    (a, b, server)
}

fn term(elector: &Elector) -> LeadershipTerm {
    match elector.leadership() {
        Leadership::Leading(term) => term,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_candidate_creates_the_lease_and_may_write_for_the_renew_deadline() {
    let (mut a, mut server) = candidate();
    settle(&mut a, &mut server, s(100));
    let term = term(&a);
    assert_eq!(
        (term.takeover, term.valid_until, &*term.id),
        (Takeover::First, s(110), "1-a")
    );
}

#[test]
fn a_created_lease_names_the_usual_duration_at_once() {
    let usual = s(3);
    let mut a = Elector::new(LeaseSettings {
        lease_duration: usual,
        renew_deadline: s(2),
        retry_period: ms(500),
        ..settings("a")
    });
    let mut server = Server::default();
    settle(&mut a, &mut server, s(0));
    assert_eq!(newest(&server).lease_duration, usual);
}

#[test]
fn a_candidate_waits_a_full_lease_after_the_last_change() {
    let (mut a, mut b, mut server) = leader_and_standby();
    settle(&mut a, &mut server, s(2));
    for t in 2..18 {
        settle(&mut b, &mut server, s(t));
        assert!(
            matches!(b.leadership(), Leadership::Standby { .. }),
            "at {t} s; the record changed at 2 s"
        );
    }
    settle(&mut b, &mut server, s(18));
    assert_eq!(term(&b).takeover, Takeover::Unclean);
    assert_eq!(&*term(&b).id, "2-b");
    assert!(
        term(&a).valid_until <= s(12),
        "the earlier leader stopped writing before"
    );
    settle(&mut a, &mut server, s(19));
    assert_eq!(
        a.leadership(),
        Leadership::Standby {
            leader: Some("c_b".into())
        }
    );
}

#[test]
fn a_released_lease_says_whether_all_writes_were_settled() {
    for (settled, takeover) in [(true, Takeover::Clean), (false, Takeover::Unclean)] {
        let (mut a, mut b, mut server) = leader_and_standby();
        a.release(settled);
        assert_eq!(
            a.leadership(),
            Leadership::Released,
            "nothing is written from now on"
        );
        settle(&mut a, &mut server, s(1));
        settle(&mut b, &mut server, s(1));
        assert_eq!(term(&b).takeover, takeover);
        settle(&mut a, &mut server, s(2));
        assert_eq!(a.leadership(), Leadership::Released, "for good");
    }
}

#[test]
fn an_acquisition_whose_answer_was_lost_counts_from_its_start() {
    let (mut a, mut server) = candidate();
    let missing = server.answer(a.poll(s(0)).unwrap());
    a.answer(missing, s(0));
    let create = a.poll(s(1)).unwrap();
    server.answer(create);
    a.answer(LeaseAnswer::Unclear, s(4));
    settle(&mut a, &mut server, s(5));
    assert_eq!(term(&a).takeover, Takeover::First);
    assert!(
        term(&a).valid_until >= s(11),
        "from the write at 1 s, or from the renewal at 5 s"
    );
}

#[test]
fn a_term_that_ran_out_continues_if_no_other_process_led_in_between() {
    let (mut a, mut server) = leader();
    let id = term(&a).id;
    a.poll(s(2));
    a.answer(LeaseAnswer::Unclear, s(30));
    assert!(term(&a).valid_until < s(30));
    settle(&mut a, &mut server, s(30));
    assert_eq!((term(&a).id, term(&a).valid_until), (id, s(40)));
}

#[test]
fn a_deleted_lease_ends_the_term_and_is_acquired_after_a_lease_duration() {
    let (mut a, mut server) = leader();
    server.0 = None;
    for t in 2..18 {
        settle(&mut a, &mut server, s(t));
        assert_eq!(
            a.leadership(),
            Leadership::Standby { leader: None },
            "at {t} s"
        );
    }
    settle(&mut a, &mut server, s(18));
    assert_eq!(
        (term(&a).takeover, &*term(&a).id),
        (Takeover::Unclean, "2-a")
    );
}

#[test]
fn a_holder_cleared_by_hand_has_not_released_the_lease() {
    let (_, mut server) = leader();
    let mut b = Elector::new(settings("b"));
    let cleared = LeaseRecord {
        holder: None,
        ..server.0.clone().unwrap()
    };
    server.write(cleared);
    settle(&mut b, &mut server, s(1));
    settle(&mut b, &mut server, s(16));
    assert_eq!(b.leadership(), Leadership::Standby { leader: None });
    settle(&mut b, &mut server, s(17));
    assert_eq!(term(&b).takeover, Takeover::Unclean);
}

#[test]
fn a_candidate_that_lost_the_creation_never_reports_a_first_start() {
    let (mut a, mut server) = candidate();
    let mut b = Elector::new(settings("b"));
    let missing = server.answer(a.poll(s(0)).unwrap());
    a.answer(missing, s(0));
    a.poll(s(0)).unwrap();
    settle(&mut b, &mut server, s(0));
    a.answer(LeaseAnswer::Unclear, s(4));
    settle(&mut a, &mut server, s(4));
    server.0 = None;
    for t in 5..=30 {
        settle(&mut a, &mut server, s(t));
    }
    assert_eq!(term(&a).takeover, Takeover::Unclean);
}

#[test]
fn a_lease_that_existed_meanwhile_has_not_been_missing_since_before() {
    let (mut a, mut server) = candidate();
    let mut b = Elector::new(settings("b"));
    let missing = server.answer(a.poll(s(0)).unwrap());
    a.answer(missing, s(0));
    let create = a.poll(s(0)).unwrap();
    settle(&mut b, &mut server, s(0));
    let conflict = server.answer(create);
    a.answer(conflict, s(1));
    assert_eq!(a.poll(s(1)), Some(LeaseCall::Get));
    a.answer(LeaseAnswer::Unclear, s(20));
    server.0 = None;
    settle(&mut a, &mut server, s(21));
    settle(&mut a, &mut server, s(36));
    assert_eq!(a.leadership(), Leadership::Standby { leader: None });
    settle(&mut a, &mut server, s(37));
    assert_eq!(term(&a).takeover, Takeover::Unclean);
}

#[test]
fn writes_are_limited_while_a_server_fails_at_once() {
    let (mut a, mut server) = leader();
    let mut writes = 0;
    for ms in 2000..3000 {
        let now = Duration::from_millis(ms);
        while let Some(call) = a.poll(now) {
            let answer = match call {
                LeaseCall::Get => server.answer(call),
                LeaseCall::Create(_) | LeaseCall::Replace(_) => {
                    writes += 1;
                    LeaseAnswer::Unclear
                }
            };
            a.answer(answer, now);
        }
    }
    assert!((1..=3).contains(&writes), "{writes} writes in a second");
}

#[test]
fn a_release_does_not_wait_for_the_next_renewal() {
    let (mut a, mut server) = leader();
    let renewal = a.poll(s(2)).unwrap();
    a.release(true);
    let renewed = server.answer(renewal);
    a.answer(renewed, s(2));
    settle(&mut a, &mut server, s(2));
    assert_eq!(server.0.unwrap().holder, None);
}

#[test]
fn a_release_without_an_answer_is_read_and_repeated() {
    let (mut a, mut server) = leader();
    a.release(true);
    a.poll(s(1)).unwrap();
    a.answer(LeaseAnswer::Unclear, s(1));
    assert_eq!(a.leadership(), Leadership::Released);
    settle(&mut a, &mut server, s(2));
    assert_eq!((server.0.unwrap().holder, a.wake_at()), (None, None));
}

#[test]
fn a_restarted_process_is_another_holder() {
    let (_, mut server) = leader();
    let mut again = Elector::new(settings("a2"));
    settle(&mut again, &mut server, s(1));
    assert_eq!(
        again.leadership(),
        Leadership::Standby {
            leader: Some("c_a".into())
        }
    );
}

#[test]
fn invalid_settings_are_rejected_with_the_reason() {
    assert_eq!(settings("a").validate(), Ok(()));
    for (lease, renew, reason) in [
        (s(10), s(10), "must stop before others start"),
        (s(15), s(2), "1.2 times"),
        (ms(15_500), s(10), "whole number"),
    ] {
        let settings = LeaseSettings {
            lease_duration: lease,
            renew_deadline: renew,
            ..settings("a")
        };
        let error = settings.validate().unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_late_creation_of_its_own_does_not_prolong_a_term() {
    let (mut a, mut server) = leader();
    let late = LeaseRecord {
        transitions: 7,
        ..server.0.clone().unwrap()
    };
    server.write(late);
    settle(&mut a, &mut server, s(2));
    assert!(matches!(a.leadership(), Leadership::Standby { .. }));
}

#[test]
fn a_renewal_counts_from_its_start() {
    let (mut a, mut server) = leader();
    let answer = server.answer(a.poll(s(2)).unwrap());
    a.answer(answer, s(5));
    assert_eq!(term(&a).valid_until, s(12));
}

#[test]
fn a_term_counts_from_the_first_try_to_acquire_the_lease() {
    let (mut a, mut server) = candidate();
    let missing = server.answer(a.poll(s(0)).unwrap());
    a.answer(missing, s(0));
    assert!(matches!(a.poll(s(1)), Some(LeaseCall::Create(_))));
    a.answer(LeaseAnswer::Unclear, s(4));
    settle(&mut a, &mut server, s(5));
    assert_eq!(
        term(&a).valid_until,
        s(11),
        "the first write may have succeeded"
    );
}

fn wanted(elector: &Elector, number: u64, node: &str) -> LeaseContent {
    let intent = WriteIntent {
        name: node.into(),
        uid: node.into(),
        cidrs: Vec::new(),
    };
    LeaseContent {
        term: term(elector).id,
        number,
        intents: Some(Arc::new(WriteIntents {
            assignments: [intent].into(),
            known: None,
        })),
        agents_heard: true,
    }
}

#[test]
fn wanted_content_is_written_at_once_and_only_by_a_later_write() {
    let (mut a, mut server) = leader();
    // When `want` is called, a renewal without the wanted content is in flight.
    let call = a.poll(s(2)).unwrap();
    a.want(wanted(&a, 1, "n"), s(2));
    let answer = server.answer(call);
    a.answer(answer, s(2));
    assert_eq!(term(&a).named, 0);
    let soon = s(2) + Duration::from_millis(20);
    assert_eq!(a.wake_at(), Some(soon));
    settle(&mut a, &mut server, soon);
    assert_eq!(term(&a).named, 1);
    let named = server.0.clone().unwrap().intents.unwrap();
    assert_eq!(named.assignments.len(), 1);
}

#[test]
fn an_indeterminate_write_does_not_count_as_written() {
    let (mut a, mut server) = leader();
    a.want(wanted(&a, 1, "n"), s(1));
    let call = a.poll(s(1)).unwrap();
    server.answer(call);
    a.answer(LeaseAnswer::Unclear, s(1));
    let read = a.poll(s(1)).unwrap();
    assert_eq!(read, LeaseCall::Get);
    let answer = server.answer(read);
    a.answer(answer, s(1));
    assert_eq!(
        term(&a).named,
        0,
        "the Lease may have been written by another process"
    );
    settle(&mut a, &mut server, s(2));
    assert_eq!(term(&a).named, 1);
}

#[test]
fn a_new_leader_inherits_intents_and_keeps_them_in_the_lease() {
    let (mut a, mut b, mut server) = leader_and_standby();
    assert_eq!(term(&a).inherited, None);
    a.want(wanted(&a, 1, "n"), s(1));
    settle(&mut a, &mut server, s(1));
    let named = server.0.clone().unwrap().intents;
    settle(&mut b, &mut server, s(2));
    settle(&mut b, &mut server, s(18));
    assert_eq!(term(&b).inherited, named);
    assert_eq!(server.0.clone().unwrap().intents, named);
    // The wanted content is for another term. So the elector ignores this content, and the Lease keeps the inherited
    // allocations.
    b.want(wanted(&a, 9, "m"), s(18));
    settle(&mut b, &mut server, s(30));
    assert_eq!(server.0.clone().unwrap().intents, named);
    b.release(false);
    settle(&mut b, &mut server, s(31));
    assert_eq!(
        server.0.clone().unwrap().intents,
        named,
        "an unsettled release keeps the intents"
    );
}

#[test]
fn a_clean_release_writes_empty_intents() {
    let (mut a, mut server) = leader();
    a.want(wanted(&a, 1, "n"), s(1));
    settle(&mut a, &mut server, s(1));
    a.release(true);
    settle(&mut a, &mut server, s(2));
    let free = server.0.clone().unwrap();
    assert_eq!((free.holder, free.intents), (None, Some(Arc::default())));
}

#[test]
fn a_leader_knows_since_when_the_api_server_has_answered_without_a_gap() {
    let since = |calls: &[(u64, bool)]| {
        let (mut a, mut server) = candidate();
        let (mut b, mut at) = (Elector::new(settings("b")), s(0));
        settle(&mut b, &mut server, at);
        for (second, is_answered) in calls {
            at = s(*second);
            let call = a.poll(at).unwrap();
            let answer = server.answer(call);
            a.answer(
                if *is_answered {
                    answer
                } else {
                    LeaseAnswer::Unclear
                },
                at,
            );
        }
        for second in 1..60 {
            let at = at + s(second);
            settle(&mut a, &mut server, at);
            if matches!(a.leadership(), Leadership::Leading(_)) {
                return term(&a).answered_since;
            }
        }
        panic!("it does not lead");
    };
    assert_eq!(since(&[(1, true), (2, true)]), s(0));
    assert_eq!(
        since(&[(20, true)]),
        s(0),
        "the time before the first answer is no gap"
    );
    assert_eq!(since(&[(1, true), (2, false), (3, true)]), s(3));
    assert_eq!(since(&[(1, true), (12, true)]), s(12), "too far apart");
}

/// Returns the record that a working watch delivers now.
fn newest(server: &Server) -> LeaseRecord {
    server.0.clone().unwrap()
}

#[test]
fn a_candidate_with_a_working_watch_reads_rarely() {
    let (mut a, mut b, mut server) = leader_and_standby();
    let mut reads = 0;
    for t in 1..=600 {
        let now = ms(t * 100);
        if a.wake_at().is_some_and(|at| at <= now) {
            settle(&mut a, &mut server, now);
            assert!(b.watch_applied(&newest(&server), now));
        }
        while let Some(call) = b.poll(now) {
            assert_eq!(call, LeaseCall::Get);
            reads += 1;
            let answer = server.answer(call);
            b.answer(answer, now);
        }
    }
    // The watch saves no reads until it has delivered the first event, so there are a few more reads than one in 10 s.
    assert!((7..=11).contains(&reads), "{reads} reads in a minute");
}

#[test]
fn a_candidate_with_a_silent_watch_reads_as_often_as_without() {
    let (mut a, mut b, mut server) = leader_and_standby();
    settle(&mut a, &mut server, s(2));
    assert!(b.watch_applied(&newest(&server), s(2)));
    assert_eq!(b.wake_at(), Some(s(5)));
    settle(&mut b, &mut server, s(5));
    assert_eq!(b.wake_at(), Some(s(5) + CANDIDATE_PAUSE));
}

#[test]
fn a_candidate_acquires_at_once_when_its_watch_shows_a_release() {
    for (settled, takeover) in [(true, Takeover::Clean), (false, Takeover::Unclean)] {
        let (mut a, mut b, mut server) = leader_and_standby();
        a.release(settled);
        settle(&mut a, &mut server, ms(100));
        assert!(b.watch_applied(&newest(&server), ms(110)));
        assert!(matches!(b.poll(ms(110)), Some(LeaseCall::Replace(_))));
        let written = server.answer(LeaseCall::Replace(b.attempt.clone().unwrap().record));
        b.answer(written, ms(120));
        assert_eq!(term(&b).takeover, takeover);
    }
}

#[test]
fn a_late_watch_event_only_delays_a_takeover() {
    let (mut a, mut b, mut server) = leader_and_standby();
    settle(&mut a, &mut server, s(2));
    assert!(b.watch_applied(&newest(&server), s(10)));
    for t in 11..26 {
        settle(&mut b, &mut server, s(t));
        assert!(matches!(b.leadership(), Leadership::Standby { .. }), "{t}");
    }
    settle(&mut b, &mut server, s(26));
    assert_eq!(term(&b).takeover, Takeover::Unclean);
}

#[test]
fn an_outdated_watch_event_changes_nothing() {
    let (mut a, mut b, mut server) = leader_and_standby();
    settle(&mut a, &mut server, s(2));
    let late = newest(&server);
    settle(&mut a, &mut server, s(4));
    settle(&mut b, &mut server, s(4));
    let due = b.wake_at();
    let soon = ms(4_399);
    assert!(!b.watch_applied(&late, soon));
    b.watch_deleted(&late, soon);
    assert_eq!(b.wake_at(), due);
    let latest = newest(&server);
    settle(&mut b, &mut server, ms(4_400));
    let due = b.wake_at();
    assert!(!b.watch_applied(&latest, ms(4_401)));
    assert_eq!(b.wake_at(), due);
}

#[test]
fn a_watch_event_of_a_version_just_read_saves_reads() {
    let (mut a, mut b, mut server) = leader_and_standby();
    settle(&mut a, &mut server, s(2));
    settle(&mut b, &mut server, s(2));
    assert!(!b.watch_applied(&newest(&server), ms(2_100)));
    assert_eq!(b.wake_at(), Some(ms(5_100)));
}

#[test]
fn a_candidate_with_a_silent_watch_reads_before_it_acquires() {
    let (mut a, mut b, mut server) = leader_and_standby();
    settle(&mut a, &mut server, s(2));
    assert!(b.watch_applied(&newest(&server), s(2)));
    settle(&mut a, &mut server, s(17));
    // The candidate `b` was suspended from 2 s to 18 s, so its watch did not deliver the renewal at 17 s.
    assert_eq!(b.poll(s(18)), Some(LeaseCall::Get));
    let answer = server.answer(LeaseCall::Get);
    b.answer(answer, s(18));
    settle(&mut b, &mut server, s(33));
    assert!(matches!(b.leadership(), Leadership::Standby { .. }));
    settle(&mut b, &mut server, s(34));
    assert_eq!(term(&b).takeover, Takeover::Unclean);
}

#[test]
fn a_candidate_acquires_an_expired_lease_at_once() {
    let (mut a, mut b, mut server) = leader_and_standby();
    settle(&mut a, &mut server, ms(2_100));
    assert!(b.watch_applied(&newest(&server), ms(2_100)));
    while !matches!(b.leadership(), Leadership::Leading(_)) {
        let due = b.wake_at().unwrap();
        assert!(due <= ms(18_100), "{due:?}");
        settle(&mut b, &mut server, due);
    }
}

#[test]
fn a_candidate_reads_the_lease_after_a_deletion_and_waits() {
    let (_, mut b, mut server) = leader_and_standby();
    settle(&mut b, &mut server, s(1));
    let gone = LeaseRecord {
        resource_version: "9".into(),
        ..newest(&server)
    };
    server.0 = None;
    b.watch_deleted(&gone, ms(1_300));
    assert_eq!(
        b.wake_at(),
        Some(s(1) + CANDIDATE_PAUSE),
        "the interval between reads is kept"
    );
    settle(&mut b, &mut server, ms(1_400));
    settle(&mut b, &mut server, ms(17_300));
    assert_eq!(b.leadership(), Leadership::Standby { leader: None });
    settle(&mut b, &mut server, ms(17_400));
    assert_eq!(term(&b).takeover, Takeover::Unclean);
}

#[test]
fn watch_events_are_ignored_while_leading_or_in_doubt() {
    let (mut a, mut b, mut server) = leader_and_standby();
    let other = LeaseRecord {
        holder: Some("c_z".into()),
        resource_version: "99".into(),
        ..newest(&server)
    };
    assert!(!a.watch_applied(&other, s(1)), "it leads");
    assert!(
        !Elector::new(settings("c")).watch_applied(&other, s(1)),
        "it has not read the Lease yet"
    );
    assert_eq!(b.poll(s(1)), Some(LeaseCall::Get));
    assert!(!b.watch_applied(&other, s(1)), "a read is in flight");
    let answer = server.answer(LeaseCall::Get);
    b.answer(answer, s(1));
    let mine = LeaseRecord {
        holder: Some("c_b".into()),
        ..other
    };
    assert!(!b.watch_applied(&mine, s(1)));
    assert_eq!(
        b.poll(s(1) + CANDIDATE_PAUSE),
        Some(LeaseCall::Get),
        "a record of its own must be read"
    );
}

#[test]
fn watch_events_count_as_answers_of_the_api_server() {
    let (mut a, mut b, mut server) = leader_and_standby();
    for t in 1..=300 {
        let now = ms(t * 100);
        if a.wake_at().is_some_and(|at| at <= now) {
            settle(&mut a, &mut server, now);
            b.watch_applied(&newest(&server), now);
        }
        settle(&mut b, &mut server, now);
    }
    for t in 301..=600 {
        settle(&mut b, &mut server, ms(t * 100));
    }
    assert_eq!(term(&b).answered_since, s(0));
}
