use super::*;
use crate::cluster::lease::{Elector, Leadership, LeaseAnswer, LeaseCall, LeaseRecord};

const fn s(seconds: u64) -> Mono {
    Duration::from_secs(seconds)
}

const fn ms(milliseconds: u64) -> Mono {
    Duration::from_millis(milliseconds)
}

fn settings() -> LeaseSettings {
    LeaseSettings {
        identity: "c".into(),
        nonce: "a".into(),
        lease_duration: s(4),
        renew_deadline: s(3),
        retry_period: s(1),
    }
}

/// A candidate, and the version of the Lease that its API server stores.
struct Lab(Elector, u64);

impl Lab {
    /// Returns a process that created the Lease at 0 s.
    fn leader() -> Self {
        let mut lab = Lab(Elector::new(settings()), 0);
        assert_eq!(lab.0.poll(s(0)), Some(LeaseCall::Get));
        lab.0.answer(LeaseAnswer::Missing, s(0));
        lab.write(s(0), s(0));
        lab
    }

    /// Makes the call that is due, which must be a write. The write succeeds, and its answer takes this long. Returns
    /// the written record.
    fn write(&mut self, now: Mono, took: Duration) -> LeaseRecord {
        let Some(LeaseCall::Create(record) | LeaseCall::Replace(record)) = self.0.poll(now) else {
            panic!("no write at {now:?}");
        };
        self.1 += 1;
        let record = LeaseRecord {
            resource_version: self.1.to_string(),
            ..record
        };
        self.0
            .answer(LeaseAnswer::Written(record.clone()), now + took);
        record
    }

    fn valid_until(&self) -> Mono {
        match self.0.leadership() {
            Leadership::Leading(term) => term.valid_until,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_lease_grows_with_slow_calls_and_shrinks_after_a_time_without_them() {
    let mut lab = Lab::leader();
    let mut now = s(1);
    let mut next = |took: Duration| {
        let duration = lab.write(now, took).lease_duration;
        now = lab.0.wake_at().unwrap().max(now + took);
        (duration, now)
    };
    assert_eq!(next(ms(900)), (s(4), s(2)));
    assert_eq!(
        next(ms(1_100)),
        (s(4), s(4)),
        "the next interval is longer, too"
    );
    assert_eq!(next(ms(2_100)), (s(8), s(8)));
    assert_eq!(next(ms(3_900)), (s(16), s(12)));
    assert_eq!(next(ms(4_100)).0, s(16), "the longest lease");
    for _ in 0..14 {
        assert_eq!(next(ms(400)).0, s(16));
    }
    let mut durations: Vec<_> = (0..60).map(|_| next(ms(400)).0).collect();
    durations.dedup();
    assert_eq!(durations, [s(16), s(8), s(4)]);
}

#[test]
fn the_lease_stays_long_while_calls_would_be_slow_again() {
    let (settings, mut pace) = (settings(), Pace::FASTEST);
    pace.note_call(ms(1_001), &settings, s(10));
    assert_eq!(pace.factor(), 2);
    pace.note_call(ms(501), &settings, s(60));
    pace.note_call(ms(500), &settings, s(119));
    assert_eq!(pace.factor(), 2);
    pace.note_call(ms(500), &settings, s(120));
    assert_eq!(pace.factor(), 1);
    pace.note_call(ms(0), &settings, s(500));
    assert_eq!(pace.factor(), 1);
}

#[test]
fn a_shorter_lease_ends_sooner_before_its_write_is_answered() {
    let mut lab = Lab::leader();
    assert_eq!(lab.valid_until(), s(12), "a created Lease is the longest");
    let Some(LeaseCall::Replace(record)) = lab.0.poll(s(1)) else {
        panic!("a renewal was due");
    };
    assert_eq!((record.lease_duration, lab.valid_until()), (s(4), s(4)));
    lab.0.answer(LeaseAnswer::Unclear, s(2));
    assert_eq!(lab.valid_until(), s(4), "the write may have succeeded");
}

#[test]
fn a_longer_lease_counts_only_after_its_write() {
    let mut lab = Lab::leader();
    lab.write(s(1), ms(1_100));
    assert_eq!(lab.valid_until(), s(4));
    assert!(matches!(lab.0.poll(s(3)), Some(LeaseCall::Replace(_))));
    lab.0.answer(LeaseAnswer::Failed, s(3));
    assert_eq!(lab.valid_until(), s(4));
    assert_eq!(lab.write(s(5), s(0)).lease_duration, s(8));
    assert_eq!(lab.valid_until(), s(11));
}

#[test]
fn a_call_waits_half_of_the_renew_deadline_for_its_answer() {
    let mut lab = Lab::leader();
    let mut now = s(1);
    for (took, patience) in [(s(0), ms(1_500)), (ms(1_001), s(3)), (s(3), s(6))] {
        lab.write(now, took);
        assert_eq!(lab.0.patience(), patience);
        now = lab.0.wake_at().unwrap().max(now + took);
    }
}

#[test]
fn the_longest_lease_is_no_gap() {
    for (lease, longest) in [(1, 16), (4, 16), (5, 20), (15, 30), (20, 20), (40, 40)] {
        let settings = LeaseSettings {
            lease_duration: s(lease),
            ..settings()
        };
        assert_eq!(settings.longest_duration(), s(longest));
    }
}
