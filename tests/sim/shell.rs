//! Simulates the shell of a controller process: the code that connects the state machines to the network.
//!
//! The simulated shell has the same rule as the real one. A write is sent only under the tenure in which it was
//! decided, only while that tenure is valid by the process's own clock, and only after the Lease was written following
//! the decision.

use std::time::Duration;

use cadastre_controller::cluster::lease::{
    Leadership, LeaseAnswer, LeaseCall, LeaseRecord, Tenure,
};
use cadastre_controller::cluster::names::LeaderTerm;
use cadastre_controller::cluster::request::{
    ApiRequest, ObjectSpec, Rejection, RequestId, RequestOutcome,
};
use cadastre_controller::{ControllerEvent, OutgoingRequest};
use cadastre_core::mutation::Mutation;
use jiff::Timestamp;

use super::api::Author;
use super::checks::{Verdict, wrong};
use super::clock::{MS, SECOND, Time};
use super::describe::{describe, name_of, of_outcome, of_report, of_request, verb};
use super::process::{Run, Watched};
use super::run::{Due, Reply, Sim, Where};

/// If a process has more requests than this at one moment, a loop spins.
const SPIN: u32 = 2_000;

/// The maximum number of watch events that one delivery contains.
const BATCH: u64 = 24;

/// A process that could not read the Lease for longer than this ends, because what it knows may be outdated.
const AWAY: Duration = Duration::from_secs(60);
/// How long a shell waits for the response to a request.
const PATIENCE: Time = 10 * SECOND;

/// Every watch has caught up when this time has passed since the last fault.
const CATCH_UP: Time = 30 * SECOND;

impl Sim {
    pub fn start(&mut self, process: usize) {
        if self.processes[process].run.is_some() {
            return;
        }
        let place = self.boot(process);
        self.log(None, || format!("{place} starts"));
        self.after(0, Due::CallElector(place));
        self.after(0, Due::CallController(place));
    }

    /// Delivers some events of a watch.
    pub fn deliver(&mut self, place: Where, kind: Watched) -> Verdict {
        self.processes[place.process]
            .run()
            .deliveries(kind)
            .scheduled = false;
        if self.is_down() {
            self.schedule_delivery(place, kind);
            return Ok(());
        }
        for _ in 0..self.rng.between(1, BATCH) {
            let process = &mut self.processes[place.process];
            let now = process.now(self.now);
            let Some(event) = process.run().deliver(kind, &self.api, now, self.now) else {
                break;
            };
            self.step += 1;
            if self.trace.is_on() {
                let (about, text) = describe(&event);
                self.log(about.as_deref(), || format!("{place} sees {text}"));
            }
        }
        self.schedule_delivery(place, kind);
        self.look_soon(place)
    }

    /// Calls the controller, in most cases at once.
    fn look_soon(&mut self, place: Where) -> Verdict {
        if self.rng.chance(7_000) {
            return self.look(place);
        }
        let delay = self.rng.stretch(MS, 20 * MS);
        self.look_by(place, self.now + delay);
        Ok(())
    }

    fn look_by(&mut self, place: Where, at: Time) {
        let run = self.processes[place.process].run();
        if run.look_at.is_none_or(|due| due > at) {
            run.look_at = Some(at);
            self.after(at - self.now, Due::CallController(place));
        }
    }

    /// Takes requests from the controller and sends them, until the controller has none or enough are in flight.
    pub fn look(&mut self, place: Where) -> Verdict {
        let clocks = self.processes[place.process].clocks;
        let now = self.processes[place.process].now(self.now);
        let run = self.processes[place.process].run();
        run.look_at = run.look_at.filter(|at| *at > self.now);
        if run.wake_at.take_if(|at| *at == self.now).is_some() {
            let verdict = self.budget.woke(place, self.now);
            self.judge(verdict)?;
        }
        loop {
            let run = self.processes[place.process].run();
            let Some(outgoing) = run.controller.poll(now) else {
                break;
            };
            run.burst = match run.burst {
                (at, requests) if at == self.now => (at, requests + 1),
                _ => (self.now, 0),
            };
            if run.burst.1 > SPIN {
                let text = format!("{place} asks without end: {outgoing:?}");
                return wrong("rest", text, None::<&str>);
            }
            let id = outgoing.id;
            let verdict =
                self.checks
                    .asked(place, &outgoing, &mut run.received, &self.api, self.now);
            self.judge_decision(outgoing.term.as_ref(), verdict)?;
            let run = self.processes[place.process].run();
            let before = run.in_flight.insert(id, (outgoing, self.now));
            if before.is_some() {
                let text = format!("{place} uses {id:?} twice");
                return wrong("identity", text, None::<&str>);
            }
            if self.has_faults && self.rng.chance(self.plan.network.gap) {
                let gap = self.rng.stretch(MS, 20 * SECOND);
                self.after(gap, Due::Send(place, id));
            } else {
                self.send(place, id)?;
            }
        }
        let run = self.processes[place.process].run();
        if let Some(wanted) = run.controller.take_wanted() {
            let inherited = match run.leadership() {
                Leadership::Leading(tenure) => tenure.inherited,
                _ => None,
            };
            let inherited = inherited.as_deref();
            let received = &mut run.received;
            let verdict = self
                .checks
                .wants(place, &wanted, inherited, received, &self.api, self.now);
            let term = wanted.term.clone();
            run.wanted = Some(wanted);
            self.judge_decision(Some(&term), verdict)?;
            let delay = self.rng.stretch(MS / 10, 2 * MS);
            self.after(delay, Due::CallElector(place));
        }
        let run = self.processes[place.process].run();
        let reports = run.controller.take_reports();
        let wake = run.controller.wake_at().map(|at| clocks.when(at));
        let is_after_faults = self.now > self.plan.faults_for + CATCH_UP;
        for report in reports {
            let verdict = self.checks.reported(place, &report, is_after_faults);
            self.judge(verdict)?;
            let (about, text) = of_report(&report);
            self.log(Some(&about), || format!("{place} reports {text}"));
        }
        // If the wake-up time is over already, only a new event is a reason to call the controller again.
        if let Some(at) = wake.filter(|at| *at > self.now) {
            self.look_by(place, at);
            self.processes[place.process].run().wake_at = Some(at);
        }
        self.wind_down(place)
    }

    /// Judges a decision of a controller. A decision during a restore is based on a state that no longer exists, and
    /// a decision after another process acquired the Lease is too late. Neither is sent, so a violation in it does not
    /// count.
    fn judge_decision(&self, term: Option<&LeaderTerm>, verdict: Verdict) -> Verdict {
        if self.is_down() || !self.checks.is_leading(term) {
            return Ok(());
        }
        self.judge(verdict)
    }

    /// Draws how long a request and its answer take: up to `slow` each if the network is slow, else up to `fast`.
    fn travel_times(&mut self, slow: Time, fast: Time) -> (Time, Time) {
        let is_slow = self.has_faults && self.rng.chance(self.plan.network.slow);
        let (low, high) = if is_slow { (50 * MS, slow) } else { (MS, fast) };
        (self.rng.stretch(low, high), self.rng.stretch(low, high))
    }

    /// Checks whether a request may be sent, and draws what the network does with it.
    pub fn send(&mut self, place: Where, id: RequestId) -> Verdict {
        let process = &mut self.processes[place.process];
        let mono = process.clocks.mono(self.now);
        let run = process.run();
        let Some((outgoing, decided)) = run.in_flight.get(&id).cloned() else {
            return Ok(());
        };
        let write = outgoing.request.is_write();
        match run.gate(&outgoing, mono) {
            Some(false) if write => {
                self.log(name_of(&outgoing.request), || {
                    format!("{place} does not send {}", of_request(&outgoing.request))
                });
                let outcome = RequestOutcome::Rejected(Rejection::NotSent);
                self.after(0, Due::Answer(place, id, Box::new(outcome)));
                return Ok(());
            }
            None if write => {
                run.held.push(id);
                return Ok(());
            }
            _ => {}
        }
        if write && !self.is_down() {
            let verdict = self.checks.sent(place, &outgoing, decided, &self.api);
            self.judge(verdict)?;
        }
        self.checks.last_request = (self.now, verb(&outgoing.request));
        let (there, back) = self.travel_times(9 * SECOND, 8 * MS);
        let allocates = matches!(
            outgoing.request,
            ApiRequest::AssignPodCidrs(_) | ApiRequest::Create(_, ObjectSpec::Block(_))
        );
        let last = allocates && self.has_faults && self.rng.chance(self.plan.network.last_words);
        if let (true, Some(name)) = (last, name_of(&outgoing.request)) {
            self.fall_silent(place);
            let soon = self.rng.stretch(MS, 20 * SECOND);
            self.after(soon, Due::Disturb(name.into()));
            let rush = self.rng.between(17 * SECOND, 35 * SECOND);
            self.after(rush, Due::CreateNodes);
        }
        let process = &self.processes[place.process];
        let cut = process.cut_until.saturating_sub(self.now);
        let persistent = self.persistent_fate(&outgoing.request);
        let fate = match cut {
            _ if self.is_down() => Fate::LostBefore,
            0 => persistent.unwrap_or_else(|| self.fate(&outgoing.request)),
            _ if write && self.rng.chance(8_000) => {
                Fate::Late(cut + self.rng.stretch(MS, 2 * SECOND))
            }
            _ => Fate::LostBefore,
        };
        let back = match cut {
            0 => back,
            _ => back + self.rng.stretch(50 * MS, 9 * SECOND),
        };
        self.log(name_of(&outgoing.request), || {
            format!("{place} sends {} [{fate:?}]", of_request(&outgoing.request))
        });
        let request = &outgoing.request;
        // When the request arrives, and the outcome that its sender sees if the server's answer does not reach it.
        let (arrives, outcome) = match fate {
            Fate::Arrives => (Some(there), None),
            Fate::Refused(refusal) => {
                let outcome = RequestOutcome::Rejected(refusal);
                (None, Some((there + back, outcome)))
            }
            Fate::Unanswered => (None, Some((PATIENCE, lost(request)))),
            Fate::LostBefore => (None, Some((there + back, lost(request)))),
            Fate::LostAfter => (Some(there), Some((there + back, lost(request)))),
            Fate::Late(late) => (Some(late), Some((there + back, lost(request)))),
        };
        let reply = match outcome {
            None => Reply::After(back),
            Some((delay, outcome)) => {
                self.after(delay, Due::Answer(place, id, Box::new(outcome)));
                Reply::Never
            }
        };
        if let Some(delay) = arrives {
            if write {
                self.on_wire.insert((place, id), outgoing.clone());
            }
            self.after(delay, Due::Arrive(place, Box::new(outgoing), reply));
        }
        Ok(())
    }

    fn fate(&mut self, request: &ApiRequest) -> Fate {
        if !self.has_faults {
            return Fate::Arrives;
        }
        let (network, rng) = (&self.plan.network, &mut self.rng);
        let patch = matches!(
            request,
            ApiRequest::AssignPodCidrs(_)
                | ApiRequest::TouchNode(_)
                | ApiRequest::SetPoolFinalizers(..)
                | ApiRequest::SetPoolStatus(..)
        );
        if rng.chance(network.lost_before) {
            Fate::LostBefore
        } else if request.is_write() && rng.chance(network.late) {
            Fate::Late(rng.stretch(SECOND, 240 * SECOND))
        } else if rng.chance(network.lost_after) {
            Fate::LostAfter
        } else if patch && rng.chance(network.refused) {
            // A server answers a patch with 409 if the object changes several times while the patch is applied.
            Fate::Refused(Rejection::Guard("the object has been modified".to_owned()))
        } else if rng.chance(network.busy) {
            let names_time = rng.chance(5_000);
            let after = names_time.then(|| Duration::from_millis(rng.between(1, 3_000)));
            Fate::Refused(Rejection::Busy(after))
        } else if rng.chance(network.rejected) {
            Fate::Refused(Rejection::Rejected("forbidden".to_owned()))
        } else {
            Fate::Arrives
        }
    }

    /// Executes the request at the API server, even if its sender has ended meanwhile.
    pub fn arrive(&mut self, place: Where, outgoing: &OutgoingRequest, reply: Reply) -> Verdict {
        let request = &outgoing.request;
        self.on_wire.remove(&(place, outgoing.id));
        let outcome = self.api.execute(request, self.now);
        self.log(name_of(request), || {
            let outcome = of_outcome(&outcome);
            format!("{place}'s {} -> {outcome}", verb(request))
        });
        self.checks.executed(request, &outcome, self.now);
        if outgoing.term.is_some() {
            let decided = match (request, self.run_of(place)) {
                (ApiRequest::AssignPodCidrs(a), Some(run)) => {
                    run.received.decided.get(&(a.uid.clone(), a.cidrs.clone()))
                }
                _ => None,
            };
            let decided = decided.copied().unwrap_or(self.now);
            self.settle_commits(Author::Controller(place), decided)?;
        }
        if let Reply::After(back) = reply {
            self.after(back, Due::Answer(place, outgoing.id, Box::new(outcome)));
        }
        Ok(())
    }

    pub fn answer(&mut self, place: Where, id: RequestId, outcome: RequestOutcome) -> Verdict {
        let now = self.processes[place.process].now(self.now);
        let run = self.processes[place.process].run();
        let Some((OutgoingRequest { request, .. }, _)) = run.in_flight.remove(&id) else {
            return Ok(());
        };
        run.held.retain(|held| *held != id);
        run.received.answer(&outcome);
        let verdict = self.budget.answered(place, &request, &outcome, self.now);
        self.judge(verdict)?;
        self.log(name_of(&request), || {
            let outcome = of_outcome(&outcome);
            format!("{place} is answered {}: {outcome}", verb(&request))
        });
        let run = self.processes[place.process].run();
        run.controller.on(ControllerEvent::Answer(id, outcome), now);
        if run.controller.is_put_back() {
            self.end(place, "ends: a list shows an older state than it knew");
            return Ok(());
        }
        self.look_soon(place)
    }

    /// Ends a run that was asked to stop, once it can hand over or has waited long enough.
    pub fn wind_down(&mut self, place: Where) -> Verdict {
        let run = self.processes[place.process].run();
        let Some(limit) = run.stopping.filter(|_| !run.released) else {
            return Ok(());
        };
        if !matches!(run.elector.leadership(), Leadership::Leading(_)) {
            self.end(place, "stopped");
            return Ok(());
        }
        let settled = run.controller.is_settled();
        if !settled && self.now < limit {
            return Ok(());
        }
        run.released = true;
        run.elector.release(settled);
        self.log(None, || format!("{place} hands over, settled: {settled}"));
        if settled {
            self.judge(self.check_hand_over(place))?;
        }
        self.after(0, Due::CallElector(place));
        Ok(())
    }

    /// Checks at a clean hand-over that no podCIDR allocation of the process is under way that can still take effect.
    fn check_hand_over(&self, place: Where) -> Verdict {
        for ((sender, _), outgoing) in &self.on_wire {
            let ApiRequest::AssignPodCidrs(a) = &outgoing.request else {
                continue;
            };
            let open = self.api.nodes.get(&a.name).is_some_and(|node| {
                node.uid == a.uid
                    && node.is_empty()
                    && node.annotated == a.annotated
                    && node.term == a.term
            });
            if open && *sender == place {
                let text =
                    format!("{place} hands over cleanly with an assignment under way: {a:?}");
                return wrong("clean hand-over", text, [a.name.clone()]);
            }
        }
        Ok(())
    }

    pub fn end(&mut self, place: Where, how: &str) {
        self.processes[place.process].run = None;
        self.log(None, || format!("{place} {how}"));
        let rest = self.rng.stretch(100 * MS, 40 * SECOND);
        self.after(rest, Due::Start(place.process));
    }

    // The Lease.

    pub fn poll_lease(&mut self, place: Where) {
        let clocks = self.processes[place.process].clocks;
        let mono = clocks.mono(self.now);
        let run = self.processes[place.process].run();
        run.lease_at = run.lease_at.filter(|at| *at > self.now);
        if let Some(wanted) = run.wanted.take() {
            let leadership = run.elector.leadership();
            let is_ours = |it: &Tenure| it.term == wanted.term;
            let leads = matches!(&leadership, Leadership::Leading(it) if is_ours(it));
            run.agents_heard |= leads && wanted.agents_heard;
            run.elector.want(wanted, mono);
        }
        if !run.asked {
            if let Some(ask) = run.elector.poll(mono) {
                run.asked = true;
                let leads = matches!(run.elector.leadership(), Leadership::Leading(_));
                run.agents_heard &= leads;
                if !leads && !matches!(ask, LeaseCall::Get) {
                    // How long nobody has renewed the Lease, by the wall clocks of two hosts.
                    let since = run.lease.map(|(_, renewed)| renewed);
                    let vacant = since.map(|time| clocks.wall(self.now).duration_since(time));
                    let vacant = vacant.and_then(|time| Duration::try_from(time).ok());
                    run.vacant = vacant.unwrap_or_default();
                }
                self.send_lease(place, ask);
            } else if let Some(at) = run.elector.wake_at().map(|at| clocks.when(at)) {
                let at = at.max(self.now + 1);
                if run.lease_at.is_none_or(|due| due > at) {
                    run.lease_at = Some(at);
                    self.after(at - self.now, Due::CallElector(place));
                }
            }
        }
        self.leadership_changed(place);
    }

    fn send_lease(&mut self, place: Where, ask: LeaseCall) {
        let process = &self.processes[place.process];
        let cut = process.cut_until.saturating_sub(self.now);
        let wall = self.renewal(place);
        if self.is_down() {
            let patience = self.rng.stretch(10 * MS, 4 * SECOND);
            let answer = Box::new(LeaseAnswer::Unclear);
            self.after(patience, Due::LeaseAnswer(place, answer));
            return;
        }
        let call = Box::new((ask, wall));
        let lost = cut > 0 || (self.has_faults && self.rng.chance(self.plan.network.lease_lost));
        let (there, back) = self.travel_times(4 * SECOND, 10 * MS);
        if !lost {
            self.after(there, Due::LeaseArrive(place, call, Reply::After(back)));
            return;
        }
        let (answer, arrives) = match self.rng.below(4) {
            _ if cut > 0 => {
                let late = cut + self.rng.stretch(MS, 2 * SECOND);
                (LeaseAnswer::Unclear, Some(late))
            }
            0 => (LeaseAnswer::Failed, None),
            1 => (LeaseAnswer::Unclear, None),
            2 => (LeaseAnswer::Unclear, Some(there)),
            _ => {
                let late = self.rng.stretch(SECOND, 60 * SECOND);
                (LeaseAnswer::Unclear, Some(late))
            }
        };
        let patience = self.rng.stretch(10 * MS, 4 * SECOND);
        self.after(patience, Due::LeaseAnswer(place, Box::new(answer)));
        if let Some(there) = arrives {
            self.after(there, Due::LeaseArrive(place, call, Reply::Never));
        }
    }

    /// Returns the renewal time that a process writes into the Lease: usually the present time. After a time without
    /// leader it stays the last renewal time before, until agents have published, so the Lease still shows the gap.
    fn renewal(&self, place: Where) -> Timestamp {
        let process = &self.processes[place.process];
        let wall = process.clocks.wall(self.now);
        let Some(run) = &process.run else { return wall };
        let shows_gap = run.vacant > Duration::from_secs(60) && !run.agents_heard;
        let renewed = run.lease.filter(|_| shows_gap).map(|(_, renewed)| renewed);
        renewed.unwrap_or(wall)
    }

    pub fn arrive_lease(
        &mut self,
        place: Where,
        (ask, wall): (LeaseCall, Timestamp),
        reply: Reply,
    ) -> Verdict {
        let answer = self.api.lease(ask, wall);
        if let LeaseAnswer::Written(record) = &answer {
            self.tell_watches(record);
            let holder = record.holder.clone();
            if self.checks.leased(holder.as_deref(), self.now) {
                self.log(None, || format!("the Lease goes to {holder:?}"));
            }
            let verdict = self
                .checks
                .named(record, &self.on_wire, &self.api, self.now);
            self.judge(verdict)?;
        }
        if let Reply::After(back) = reply {
            self.after(back, Due::LeaseAnswer(place, Box::new(answer)));
        }
        Ok(())
    }

    /// Delivers a write of the Lease to the candidates' watches, which may be late or silent.
    fn tell_watches(&mut self, record: &LeaseRecord) {
        for process in 0..self.processes.len() {
            let place = self.place(process);
            let is_cut = self.processes[process].cut_until > self.now;
            let waits = |run: &Run| {
                run.heard && !matches!(run.elector.leadership(), Leadership::Leading(_))
            };
            if is_cut || !self.run_of(place).is_some_and(waits) {
                continue;
            }
            let delay = match self.rng.below(10) {
                0 if self.has_faults => continue,
                1 if self.has_faults => self.rng.stretch(50 * MS, 60 * SECOND),
                _ => self.rng.stretch(MS, 20 * MS),
            };
            self.after(delay, Due::LeaseWatched(place, Box::new(record.clone())));
        }
    }

    pub fn show_lease(&mut self, place: Where, record: &LeaseRecord) {
        let mono = self.processes[place.process].clocks.mono(self.now);
        let run = self.processes[place.process].run();
        if run.elector.shown(record, mono) {
            run.lease = self.api.renewal(record);
            self.checks.tally.shown += 1;
        }
        self.poll_lease(place);
    }

    pub fn answer_lease(&mut self, place: Where, answer: LeaseAnswer) {
        let mono = self.processes[place.process].clocks.mono(self.now);
        let run = self.processes[place.process].run();
        run.asked = false;
        if let LeaseAnswer::Found(record) | LeaseAnswer::Written(record) = &answer {
            let before = std::mem::replace(&mut run.lease, self.api.renewal(record));
            let version: u64 = record.resource_version.parse().unwrap();
            if before.is_some_and(|(received, _)| version < received) {
                self.end(place, "ends: its Lease is older than it was");
                return;
            }
        }
        let is_clear = !matches!(answer, LeaseAnswer::Unclear | LeaseAnswer::Failed);
        if is_clear {
            if run.read_at.is_some_and(|at| mono > at + AWAY) {
                self.end(place, "ends: it was away for too long");
                return;
            }
            run.read_at = Some(mono);
        }
        let is_first = is_clear && !run.heard;
        run.heard |= is_clear;
        run.elector.answer(answer, mono);
        for kind in Watched::ALL.into_iter().filter(|_| is_first) {
            self.schedule_delivery(place, kind);
        }
        self.poll_lease(place);
    }

    /// Schedules passing a changed leadership to the controller, and retries requests that wait for the Lease.
    fn leadership_changed(&mut self, place: Where) {
        let held = std::mem::take(&mut self.processes[place.process].run().held);
        for id in held {
            self.after(0, Due::Send(place, id));
        }
        let run = self.processes[place.process].run();
        let leadership = run.leadership();
        if run.released && !run.asked && !matches!(leadership, Leadership::Leading(_)) {
            self.end(place, "has stopped");
            return;
        }
        if run.observed.as_ref() != Some(&leadership) && !run.telling {
            run.telling = true;
            let delay = self.rng.stretch(MS, 10 * MS);
            self.after(delay, Due::PassLeadership(place));
        }
    }

    pub fn tell(&mut self, place: Where) -> Verdict {
        let now = self.processes[place.process].now(self.now);
        let run = self.processes[place.process].run();
        run.telling = false;
        let leadership = run.leadership();
        if run.observed.as_ref() == Some(&leadership) {
            return Ok(());
        }
        let before = run.received.term.clone();
        run.received.observe_leadership(&leadership);
        run.observed = Some(leadership.clone());
        match &leadership {
            Leadership::Leading(tenure) if before.as_ref() != Some(&tenure.term) => {
                self.checks.tally.takeovers += 1;
                self.log(None, || {
                    let is_gap = tenure.follows_a_gap();
                    let gap = if is_gap { ", after a gap" } else { "" };
                    let (term, takeover) = (&tenure.term, tenure.takeover);
                    format!("{place} leads under {term} ({takeover:?}{gap})")
                });
            }
            Leadership::Leading(_) => {}
            _ if before.is_some() => self.log(None, || format!("{place} leads no more")),
            _ => {}
        }
        let run = self.processes[place.process].run();
        run.controller
            .on(ControllerEvent::Leadership(leadership), now);
        self.look(place)
    }
}

/// Returns the outcome that the sender of a request sees if the answer is lost.
fn lost(request: &ApiRequest) -> RequestOutcome {
    let is_assignment = matches!(request, ApiRequest::AssignPodCidrs(_));
    if is_assignment && Mutation::TimeoutCountsAsRejection.is_on() {
        return RequestOutcome::Rejected(Rejection::Missing);
    }
    RequestOutcome::Indeterminate("the answer was lost".to_owned())
}

/// What the network and the API server do with a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Fate {
    Arrives,
    Refused(Rejection),
    /// The request is not executed, and there is no answer.
    Unanswered,
    LostBefore,
    LostAfter,
    Late(Time),
}

impl std::fmt::Display for Where {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "p{}.{}", self.process, self.incarnation)
    }
}
