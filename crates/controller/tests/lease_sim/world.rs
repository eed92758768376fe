//! The simulated world: the processes, the network between the processes and the server, and the faults.

use std::collections::BTreeMap;
use std::time::Duration;

use cadastre_controller::cluster::lease::{
    Elector, Leadership, LeaseAnswer, LeaseCall, LeaseSettings, Mono, Takeover,
};

use crate::check::{Checks, LeaderFacts};
use crate::rng::Rng;
use crate::server::{LeaseEvent, Server, Time};

const MS: Time = 1_000;
const SECOND: Time = 1_000 * MS;
/// From this time on there are no new faults. A request that was delayed before this time can still arrive later.
const FAULTY: Time = 240 * SECOND;
/// At this time one process must lead, and the checks of the quiet time begin.
const QUIET: Time = FAULTY + 90 * SECOND;
const STEADY: Time = QUIET + 30 * SECOND;
/// This long after the former leader stopped gracefully at [`STEADY`], another process must lead.
const HAND_OVER: Time = SECOND;
const SLOW_HAND_OVER: Time = 20 * SECOND;
/// In some worlds each call takes up to twice this long from [`FAULTY`] on.
const SLOW: Time = 2_200 * MS;

/// Counts of events, by name. The test fails if faults or takeovers were too rare in all runs together.
#[derive(Clone, Debug, Default)]
pub struct Counts(BTreeMap<&'static str, u64>);

/// Events that must each happen often enough in all seeds together.
const COUNTED: [&str; 15] = [
    "first starts",
    "clean hand-overs",
    "unclean takeovers",
    "expired terms that were continued",
    "conflicts",
    "lost calls",
    "late calls",
    "deletions",
    "cleared holders",
    "watch events accepted",
    "watch events ignored",
    "standbys with a watch in quiet times",
    "standbys without a watch in quiet times",
    "slow worlds",
    "shorter leases",
];

impl Counts {
    fn add(&mut self, what: &'static str, count: u64) {
        *self.0.entry(what).or_default() += count;
    }

    pub fn add_all(&mut self, other: &Counts) {
        for (what, count) in &other.0 {
            self.add(what, *count);
        }
    }

    pub fn assert_every_rule_was_tried(&self) {
        assert!(self.0["steps"] >= 200_000, "too few steps: {self:?}");
        for what in COUNTED {
            let count = self.0.get(what).copied().unwrap_or(0);
            assert!(count >= 50, "only {count} {what}: {self:?}");
        }
    }
}

/// A call of a process to the server.
#[derive(Clone, Copy, Debug)]
struct Call {
    process: usize,
    number: u64,
}

#[derive(Debug)]
enum Event {
    Wake(usize),
    /// A call reaches the server. If the flag is false, the answer to the call is lost.
    Arrive(Call, LeaseCall, bool),
    Return(Call, LeaseAnswer),
    /// A watch event reaches a process. The numbers are the index of the process and its `birth`.
    Shown(usize, u64, LeaseEvent),
    Fault,
    Steady,
    HandOver,
    End,
}

struct Process {
    elector: Elector,
    holder: String,
    /// The process's own time is `offset + true time * rate / 1000`.
    offset: Time,
    rate: Time,
    paused_until: Time,
    cut_off_until: Time,
    /// The number that the process got when it was started. A restarted process gets a new number.
    birth: u64,
    /// Whether the server allows the process to watch the Lease.
    may_watch: bool,
    /// Until this true time the process's watch delivers nothing.
    silent_until: Time,
    /// Number of calls since the quiet time began.
    calls: u64,
    call: Option<u64>,
    wake: Option<Time>,
    /// Times of the calls in the last second.
    recent: Vec<Time>,
    /// Whether any answer has told the process that a Lease exists.
    has_seen: bool,
    /// The last write that took effect while this process held the Lease.
    last_write: Sent,
}

impl Process {
    fn own(&self, now: Time) -> Mono {
        Duration::from_micros(self.offset + now * self.rate / 1000)
    }

    /// Returns the true time at which the process's clock has the time `own`.
    fn when(&self, own: Mono) -> Time {
        let own = Time::try_from(own.as_micros()).unwrap();
        (own.saturating_sub(self.offset) * 1000).div_ceil(self.rate)
    }
}

/// When a call was sent, by the process's own clock and in true time, and whether the process had already seen a Lease.
#[derive(Clone, Copy, Default)]
struct Sent {
    own: Mono,
    at: Time,
    had_seen: bool,
    /// Until when a leader may write after this write, by the process's own clock.
    valid_until: Mono,
}

pub struct World {
    rng: Rng,
    now: Time,
    events: BTreeMap<(Time, u64), Event>,
    server: Server,
    processes: Vec<Process>,
    sent: BTreeMap<u64, Sent>,
    checks: Checks,
    calls: u64,
    births: u64,
    may_delete: bool,
    counts: Counts,
    handed_over: Option<(usize, bool)>,
    steady: Option<String>,
    /// Until this true time every write fails at once.
    failing_until: Time,
    /// Until this true time every call takes long.
    slow_until: Time,
    /// Whether each call takes long from [`FAULTY`] on.
    stays_slow: bool,
}

fn settings(nonce: String) -> LeaseSettings {
    LeaseSettings {
        identity: "controller".into(),
        nonce,
        lease_duration: Duration::from_secs(4),
        renew_deadline: Duration::from_secs(3),
        retry_period: Duration::from_secs(1),
    }
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let count = rng.between(2, 4);
        let may_delete = rng.percent(40);
        let stays_slow = rng.percent(25);
        let mut world = World {
            rng,
            now: 0,
            events: BTreeMap::new(),
            server: Server::default(),
            processes: Vec::new(),
            sent: BTreeMap::new(),
            checks: Checks::default(),
            calls: 0,
            births: 0,
            may_delete,
            counts: Counts::default(),
            handed_over: None,
            steady: None,
            failing_until: 0,
            slow_until: 0,
            stays_slow,
        };
        world.counts.add("slow worlds", stays_slow.into());
        for index in 0..count {
            let process = world.born();
            world.processes.push(process);
            world.at(0, Event::Wake(usize::try_from(index).unwrap()));
        }
        world.at(SECOND, Event::Fault);
        for (at, event) in [
            (QUIET, Event::Steady),
            (STEADY, Event::HandOver),
            (
                STEADY
                    + if stays_slow {
                        SLOW_HAND_OVER
                    } else {
                        HAND_OVER
                    },
                Event::End,
            ),
        ] {
            world.at(at, event);
        }
        world
    }

    fn born(&mut self) -> Process {
        self.births += 1;
        let nonce = format!("n{}", self.births);
        Process {
            holder: format!("controller_{nonce}"),
            elector: Elector::new(settings(nonce)),
            offset: self.rng.between(0, 1000) * SECOND,
            rate: self.rng.between(900, 1100),
            paused_until: 0,
            cut_off_until: 0,
            birth: self.births,
            may_watch: self.rng.percent(85),
            silent_until: 0,
            calls: 0,
            call: None,
            wake: None,
            recent: Vec::new(),
            has_seen: false,
            last_write: Sent::default(),
        }
    }

    fn at(&mut self, time: Time, event: Event) {
        self.calls += 1;
        self.events.insert((time.max(self.now), self.calls), event);
    }

    pub fn run(mut self) -> Counts {
        while let Some(((time, _), event)) = self.events.pop_first() {
            self.now = time;
            self.counts.add("steps", 1);
            if self.step(event) {
                break;
            }
        }
        let [first, clean, unclean] = self.checks.takeovers;
        for (what, count) in [
            ("first starts", first),
            ("clean hand-overs", clean),
            ("unclean takeovers", unclean),
            ("expired terms that were continued", self.checks.resumed),
            ("undetectable starts", self.checks.undetectable),
            ("conflicts", self.server.conflicts),
            ("cleared holders", self.server.cleared),
            ("deletions", self.server.deleted.is_some().into()),
        ] {
            self.counts.add(what, count);
        }
        self.counts
    }

    /// Handles one event. Returns whether the run is over.
    fn step(&mut self, event: Event) -> bool {
        match event {
            Event::Wake(process) => {
                if self.processes[process].wake.is_none_or(|at| at <= self.now) {
                    self.processes[process].wake = None;
                    self.drive(process);
                }
            }
            Event::Arrive(call, ask, answered) => self.arrive(call, ask, answered),
            Event::Return(call, answer) => self.answer(call, answer),
            Event::Shown(process, birth, event) => self.show(process, birth, event),
            Event::Fault if self.now < FAULTY => {
                self.fault();
                let pause = self.rng.between(SECOND, 15 * SECOND);
                self.at(self.now + pause, Event::Fault);
            }
            Event::Fault => {}
            Event::Steady => {
                let (_, term) = self.leader();
                self.steady = Some(term);
                for process in &mut self.processes {
                    process.calls = 0;
                }
            }
            Event::HandOver => {
                let (process, term) = self.leader();
                assert_eq!(
                    self.steady.as_ref(),
                    Some(&term),
                    "leaders change though nothing happens"
                );
                self.check_standbys(process);
                let settled = self.rng.percent(50);
                self.handed_over = Some((process, settled));
                self.release(process, settled);
            }
            Event::End => {
                let (process, term) = self.leader();
                let (before, settled) = self.handed_over.unwrap();
                assert!(process != before, "{term} was released and leads");
                let expected = if settled {
                    Takeover::Clean
                } else {
                    Takeover::Unclean
                };
                let Leadership::Leading(leading) = self.processes[process].elector.leadership()
                else {
                    unreachable!()
                };
                assert_eq!(leading.takeover, expected);
                return true;
            }
        }
        false
    }

    /// Checks that standbys with a watch hardly call the server in the quiet time.
    fn check_standbys(&mut self, leader: usize) {
        // Without a watch, a standby reads more often than a slow server answers.
        let (most, least) = if self.stays_slow { (10, 4) } else { (4, 40) };
        let standbys = self.processes.iter().enumerate();
        for (_, process) in standbys.filter(|(index, _)| *index != leader) {
            let calls = process.calls;
            if process.may_watch {
                self.counts.add("standbys with a watch in quiet times", 1);
                assert!(calls <= most, "{calls} calls in spite of a watch");
            } else {
                self.counts
                    .add("standbys without a watch in quiet times", 1);
                assert!(calls >= least, "{calls} calls without a watch");
            }
        }
    }

    /// Delivers changes of the Lease to the watches of candidates.
    fn deliver_watch_events(&mut self) {
        for event in std::mem::take(&mut self.server.events) {
            for index in 0..self.processes.len() {
                self.deliver(index, event.clone());
            }
        }
    }

    fn deliver(&mut self, index: usize, event: LeaseEvent) {
        let now = self.now;
        let process = &self.processes[index];
        let is_cut = process.cut_off_until.max(process.silent_until) > now;
        let leads = matches!(process.elector.leadership(), Leadership::Leading(_));
        if is_cut || leads || !process.may_watch {
            return;
        }
        let birth = process.birth;
        let delay = match self.rng.below(100) {
            _ if now >= FAULTY => self.rng.between(MS, 20 * MS),
            0..15 => return,
            15..30 => self.rng.between(500 * MS, 40 * SECOND),
            _ => self.rng.between(MS, 100 * MS),
        };
        self.at(now + delay, Event::Shown(index, birth, event));
    }

    fn show(&mut self, index: usize, birth: u64, event: LeaseEvent) {
        let now = self.now;
        let process = &mut self.processes[index];
        if process.birth != birth {
            return;
        }
        // The process handles watch events only after its present call is over.
        let busy = process.call.map_or(0, |_| now + 50 * MS);
        let later = process.paused_until.max(busy);
        if later > now {
            return self.at(later, Event::Shown(index, birth, event));
        }
        let own = process.own(now);
        let is_accepted = match event {
            LeaseEvent::Written(record) => process.elector.watch_applied(&record, own),
            LeaseEvent::Deleted(record) => {
                process.elector.watch_deleted(&record, own);
                false
            }
        };
        self.counts.add(
            if is_accepted {
                "watch events accepted"
            } else {
                "watch events ignored"
            },
            1,
        );
        self.check(index);
        self.drive(index);
    }

    fn leader(&self) -> (usize, String) {
        let leaders = self.checks.leaders(self.now);
        assert!(
            leaders.len() == 1,
            "at {} s of quiet: {leaders:?}",
            (self.now - FAULTY) / SECOND
        );
        (leaders[0].0, leaders[0].1.to_owned())
    }

    fn drive(&mut self, index: usize) {
        let now = self.now;
        let process = &mut self.processes[index];
        if process.paused_until > now {
            let until = process.paused_until;
            process.wake = Some(until);
            return self.at(until, Event::Wake(index));
        }
        if let Some(ask) = process.elector.poll(process.own(now)) {
            assert!(
                process.call.is_none(),
                "a second call while one is outstanding"
            );
            self.check(index);
            return self.send(index, ask);
        }
        if let Some(due) = process.elector.wake_at() {
            // A timer that is due at once must cause a call. Otherwise the process would wake itself up without end.
            assert!(
                due > process.own(now),
                "nothing to ask at the time it named"
            );
            let at = process.when(due);
            process.wake = Some(at);
            self.at(at, Event::Wake(index));
        } else if process.call.is_none() {
            assert_eq!(
                process.elector.leadership(),
                Leadership::Released,
                "asleep for ever"
            );
            if self.handed_over.is_none() {
                self.restart(index);
            }
        }
    }

    fn send(&mut self, index: usize, ask: LeaseCall) {
        self.calls += 1;
        let now = self.now;
        let call = Call {
            process: index,
            number: self.calls,
        };
        let process = &mut self.processes[index];
        process.call = Some(call.number);
        process.calls += 1;
        process.recent.retain(|at| *at + SECOND > now);
        process.recent.push(now);
        assert!(
            process.recent.len() <= 10,
            "more than ten calls in a second"
        );
        let own = process.own(now);
        let duration = match &ask {
            LeaseCall::Get => Mono::ZERO,
            LeaseCall::Create(record) | LeaseCall::Replace(record) => record.lease_duration,
        };
        let before = self.server.lease.as_ref().map(|it| it.lease_duration);
        let is_shorter = duration > Duration::from_secs(1) && before > Some(duration);
        self.counts.add("shorter leases", is_shorter.into());
        let process = &mut self.processes[index];
        let sent = Sent {
            own,
            at: now,
            had_seen: process.has_seen,
            valid_until: own + duration * 3 / 4,
        };
        let patience = process.when(own + process.elector.patience());
        self.sent.insert(call.number, sent);
        self.at(patience, Event::Return(call, LeaseAnswer::Unclear));
        let there = self.travel_time();
        if now >= FAULTY {
            return self.at(now + there, Event::Arrive(call, ask, true));
        }
        let unclear = Event::Return(call, LeaseAnswer::Unclear);
        let cut_off = self.processes[index].cut_off_until > now;
        match self.rng.below(100) {
            _ if cut_off => self.counts.add("lost calls", 1),
            _ if self.failing_until > now && !matches!(ask, LeaseCall::Get) => {
                self.at(now + MS, unclear);
            }
            0..7 => {
                self.counts.add("lost calls", 1);
                self.at(now + there, unclear);
            }
            7..10 => self.at(now + there, Event::Return(call, LeaseAnswer::Failed)),
            10..17 => {
                self.counts.add("lost calls", 1);
                self.at(now + there, Event::Arrive(call, ask, false));
                self.at(now + 2 * there, unclear);
            }
            17..24 => {
                self.counts.add("late calls", 1);
                let late = self.rng.between(500 * MS, 40 * SECOND);
                self.at(now + late, Event::Arrive(call, ask, true));
            }
            _ => self.at(now + there, Event::Arrive(call, ask, true)),
        }
    }

    /// Returns how long a message takes in one direction.
    fn travel_time(&mut self) -> Time {
        let most = match self.now {
            now if now >= FAULTY && self.stays_slow => SLOW,
            now if now >= FAULTY => 20 * MS,
            now if now < self.slow_until => SLOW,
            _ => 100 * MS,
        };
        self.rng.between(MS, most)
    }

    fn arrive(&mut self, call: Call, ask: LeaseCall, answered: bool) {
        let answer = self.server.execute(ask, self.now);
        self.deliver_watch_events();
        let sent = self.sent[&call.number];
        let process = &mut self.processes[call.process];
        if let LeaseAnswer::Written(record) = &answer
            && record.holder.as_ref() == Some(&process.holder)
            && sent.own >= process.last_write.own
        {
            process.last_write = sent;
        }
        if answered {
            let back = self.travel_time();
            self.at(self.now + back, Event::Return(call, answer));
        }
    }

    fn answer(&mut self, call: Call, answer: LeaseAnswer) {
        let now = self.now;
        let process = &mut self.processes[call.process];
        if process.call != Some(call.number) {
            return;
        }
        if process.paused_until > now {
            let until = process.paused_until;
            return self.at(until, Event::Return(call, answer));
        }
        process.call = None;
        process.has_seen |= matches!(
            answer,
            LeaseAnswer::Found(_) | LeaseAnswer::Written(_) | LeaseAnswer::Conflict
        );
        process.elector.answer(answer, process.own(now));
        self.check(call.process);
        self.drive(call.process);
    }

    fn check(&mut self, index: usize) {
        let process = &self.processes[index];
        let Leadership::Leading(leading) = process.elector.leadership() else {
            return self.checks.leads_no_more(index);
        };
        let facts = LeaderFacts {
            process: index,
            holder: &process.holder,
            has_seen: process.last_write.had_seen,
            allowed_until: process.last_write.valid_until,
            last_write_sent: process.last_write.at,
        };
        let until = process.when(leading.valid_until);
        self.checks
            .leads(&facts, &leading, until, &self.server, self.now);
    }

    fn fault(&mut self) {
        let count = Time::try_from(self.processes.len()).unwrap();
        let index = usize::try_from(self.rng.below(count)).unwrap();
        let now = self.now;
        match self.rng.below(100) {
            0..30 => {
                let limit = if self.rng.percent(10) { 150 } else { 25 };
                let pause = self.rng.between(50 * MS, limit * SECOND);
                self.processes[index].paused_until = (now + pause).min(FAULTY);
            }
            30..50 => {
                let cut = self.rng.between(SECOND, 30 * SECOND);
                self.processes[index].cut_off_until = (now + cut).min(FAULTY);
            }
            50..62 => self.restart(index),
            62..82 => {
                let settled = self.rng.percent(60);
                self.release(index, settled);
            }
            82..88 => self.server.edit(),
            88..92 => self.server.clear(),
            92..96 => self.failing_until = now + self.rng.between(SECOND, 20 * SECOND),
            _ if self.may_delete => {
                self.may_delete = false;
                self.server.delete(now);
            }
            _ => {}
        }
        if self.rng.percent(10) {
            self.slow_until = now + self.rng.between(SECOND, 60 * SECOND);
        }
        if self.rng.percent(20) {
            let silent = self.rng.between(SECOND, 60 * SECOND);
            self.processes[index].silent_until = (now + silent).min(FAULTY);
        }
        self.deliver_watch_events();
    }

    fn release(&mut self, index: usize, settled: bool) {
        let process = &mut self.processes[index];
        if process.paused_until > self.now {
            return;
        }
        process.elector.release(settled);
        self.check(index);
        self.drive(index);
    }

    /// Ends the process and starts another process of the same name with a new nonce. Requests of the ended process
    /// stay in flight.
    fn restart(&mut self, index: usize) {
        self.checks.leads_no_more(index);
        self.processes[index] = self.born();
        self.at(self.now + 500 * MS, Event::Wake(index));
    }
}
