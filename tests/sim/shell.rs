//! Simulates the shell of a controller process: the code that connects the state machines to the network.
//!
//! The simulated shell has the same rule as the real one. A write is sent only in the term in which it was decided,
//! only while that term is valid by the process's own clock, and only after a write of the Lease that followed the
//! decision.

use std::time::Duration;

use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::names::TermId;
use cadastre_controller::cluster::request::{
    ApiRequest, ObjectSpec, Rejection, RequestId, RequestOutcome,
};
use cadastre_controller::{ControllerEvent, OutgoingRequest};
use cadastre_core::mutation::Mutation;

use super::api::Author;
use super::checks::{Verdict, wrong};
use super::clock::{MS, SECOND, Time};
use super::describe::{describe, name_of, of_outcome, of_report, of_request, verb};
use super::process::Watched;
use super::run::{Due, Reply, RunId, Sim};

/// If a process sends more requests than this at one moment of virtual time, a loop spins.
const SPIN: u32 = 2_000;

/// The maximum number of watch events that one delivery contains.
const BATCH: u64 = 24;

/// How long a shell waits for the response to a request.
const PATIENCE: Time = 10 * SECOND;

/// When this time has passed since the last fault, every watch has delivered all events.
const CATCH_UP: Time = 30 * SECOND;

impl Sim {
    pub fn start(&mut self, process: usize) {
        if self.processes[process].run.is_some() {
            return;
        }
        let run_id = self.boot(process);
        self.log(None, || format!("{run_id} starts"));
        self.after(0, Due::CallElector(run_id));
        self.after(0, Due::CallController(run_id));
    }

    /// Delivers some events of a watch.
    pub fn deliver(&mut self, run_id: RunId, kind: Watched) -> Verdict {
        self.processes[run_id.process]
            .run()
            .deliveries(kind)
            .scheduled = false;
        if self.is_down() {
            self.schedule_delivery(run_id, kind);
            return Ok(());
        }
        for _ in 0..self.rng.between(1, BATCH) {
            let process = &mut self.processes[run_id.process];
            let now = process.now(self.now);
            let Some(event) = process.run().deliver(kind, &self.api, now, self.now) else {
                break;
            };
            self.step += 1;
            if self.trace.is_on() {
                let (about, text) = describe(&event);
                self.log(about.as_deref(), || format!("{run_id} sees {text}"));
            }
        }
        self.schedule_delivery(run_id, kind);
        self.look_soon(run_id)
    }

    /// Calls the controller, usually at once and otherwise a little later.
    fn look_soon(&mut self, run_id: RunId) -> Verdict {
        if self.rng.chance(7_000) {
            return self.look(run_id);
        }
        let delay = self.rng.stretch(MS, 20 * MS);
        self.look_by(run_id, self.now + delay);
        Ok(())
    }

    fn look_by(&mut self, run_id: RunId, at: Time) {
        let run = self.processes[run_id.process].run();
        if run.look_at.is_none_or(|due| due > at) {
            run.look_at = Some(at);
            self.after(at - self.now, Due::CallController(run_id));
        }
    }

    /// Takes requests from the controller and sends them, until the controller returns none.
    pub fn look(&mut self, run_id: RunId) -> Verdict {
        let clocks = self.processes[run_id.process].clocks;
        let now = self.processes[run_id.process].now(self.now);
        let run = self.processes[run_id.process].run();
        run.look_at = run.look_at.filter(|at| *at > self.now);
        if run.wake_at.take_if(|at| *at == self.now).is_some() {
            let verdict = self.budget.woke(run_id, self.now);
            self.judge(verdict)?;
        }
        loop {
            let run = self.processes[run_id.process].run();
            let Some(outgoing) = run.controller.poll(now) else {
                break;
            };
            run.burst = match run.burst {
                (at, requests) if at == self.now => (at, requests + 1),
                _ => (self.now, 0),
            };
            if run.burst.1 > SPIN {
                let text = format!("{run_id} asks without end: {outgoing:?}");
                return wrong("spin", text, None::<&str>);
            }
            let id = outgoing.id;
            let verdict =
                self.checks
                    .asked(run_id, &outgoing, &mut run.received, &self.api, self.now);
            self.judge_decision(outgoing.term.as_ref(), verdict)?;
            let run = self.processes[run_id.process].run();
            let before = run.in_flight.insert(id, (outgoing, self.now));
            if before.is_some() {
                let text = format!("{run_id} uses {id:?} twice");
                return wrong("identity", text, None::<&str>);
            }
            if self.has_faults && self.rng.chance(self.plan.network.gap) {
                let gap = self.rng.stretch(MS, 20 * SECOND);
                self.after(gap, Due::Send(run_id, id));
            } else {
                self.send(run_id, id)?;
            }
        }
        let run = self.processes[run_id.process].run();
        if let Some(wanted) = run.controller.take_wanted() {
            let inherited = match run.leadership() {
                Leadership::Leading(term) => term.inherited,
                _ => None,
            };
            let inherited = inherited.as_deref();
            let received = &mut run.received;
            let verdict = self
                .checks
                .wants(run_id, &wanted, inherited, received, &self.api, self.now);
            let term = wanted.term.clone();
            run.wanted = Some(wanted);
            self.judge_decision(Some(&term), verdict)?;
            let delay = self.rng.stretch(MS / 10, 2 * MS);
            self.after(delay, Due::CallElector(run_id));
        }
        let run = self.processes[run_id.process].run();
        let reports = run.controller.take_reports();
        let wake = run.controller.wake_at().map(|at| clocks.when(at));
        let is_after_faults = self.now > self.plan.faults_for + CATCH_UP;
        for report in reports {
            let verdict = self.checks.reported(run_id, &report, is_after_faults);
            self.judge(verdict)?;
            let (about, text) = of_report(&report);
            self.log(Some(&about), || format!("{run_id} reports {text}"));
        }
        // If the wake-up time is in the past, the controller is called again only after a new event.
        if let Some(at) = wake.filter(|at| *at > self.now) {
            self.look_by(run_id, at);
            self.processes[run_id.process].run().wake_at = Some(at);
        }
        self.wind_down(run_id)
    }

    /// Judges a decision of a controller. A violation does not count if the decision will not be sent. There are two
    /// such cases: the decision is based on a state that a running restore has removed, or another process has acquired
    /// the Lease.
    fn judge_decision(&self, term: Option<&TermId>, verdict: Verdict) -> Verdict {
        if self.is_down() || !self.checks.is_leading(term) {
            return Ok(());
        }
        self.judge(verdict)
    }

    /// Draws how long a request and its answer take. Each takes up to `slow` on a slow network, otherwise up to `fast`.
    pub fn travel_times(&mut self, slow: Time, fast: Time) -> (Time, Time) {
        let is_slow = self.has_faults && self.rng.chance(self.plan.network.slow);
        let (low, high) = if is_slow { (50 * MS, slow) } else { (MS, fast) };
        (self.rng.stretch(low, high), self.rng.stretch(low, high))
    }

    /// Checks whether a request may be sent, and draws what the network does with the request.
    pub fn send(&mut self, run_id: RunId, id: RequestId) -> Verdict {
        let process = &mut self.processes[run_id.process];
        let mono = process.clocks.mono(self.now);
        let run = process.run();
        let Some((outgoing, decided)) = run.in_flight.get(&id).cloned() else {
            return Ok(());
        };
        let write = outgoing.request.is_write();
        match run.gate(&outgoing, mono) {
            Some(false) if write => {
                self.log(name_of(&outgoing.request), || {
                    format!("{run_id} does not send {}", of_request(&outgoing.request))
                });
                let outcome = RequestOutcome::Rejected(Rejection::NotSent);
                self.after(0, Due::Answer(run_id, id, Box::new(outcome)));
                return Ok(());
            }
            None if write => {
                run.awaiting_lease.push(id);
                return Ok(());
            }
            _ => {}
        }
        if write && !self.is_down() {
            let verdict = self.checks.sent(run_id, &outgoing, decided, &self.api);
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
            self.fall_silent(run_id);
            let soon = self.rng.stretch(MS, 20 * SECOND);
            self.after(soon, Due::Disturb(name.into()));
            let rush = self.rng.between(17 * SECOND, 35 * SECOND);
            self.after(rush, Due::CreateNodes);
        }
        let last_words = allocates.then(|| self.last_words(run_id)).flatten();
        let process = &self.processes[run_id.process];
        let cut = process.cut_until.saturating_sub(self.now);
        let persistent = self.persistent_fate(&outgoing.request);
        let fate = match cut {
            _ if self.is_down() => Fate::LostBefore,
            0 => {
                let certain = last_words.map(Fate::Late).or(persistent);
                certain.unwrap_or_else(|| self.fate(&outgoing.request))
            }
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
            format!(
                "{run_id} sends {} [{fate:?}]",
                of_request(&outgoing.request)
            )
        });
        let request = &outgoing.request;
        // `arrives` is when the request arrives. `outcome` is what its sender gets if the server's answer does not
        // reach the sender.
        let (arrives, outcome) = match fate {
            Fate::Arrives | Fate::Dropped => (Some(there), None),
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
                self.after(delay, Due::Answer(run_id, id, Box::new(outcome)));
                Reply::Never
            }
        };
        if let Some(delay) = arrives {
            if write {
                let sent = (outgoing.clone(), decided);
                self.on_wire.insert((run_id, id), sent);
            }
            self.after(delay, Due::Arrive(run_id, Box::new(outgoing), reply));
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
                | ApiRequest::SetTaints(_)
                | ApiRequest::SetExhausted(_)
                | ApiRequest::SetFinalizers(..)
                | ApiRequest::SetPoolStatus(..)
                | ApiRequest::SetClaimStatus(..)
        );
        if rng.chance(network.lost_before) {
            Fate::LostBefore
        } else if request.is_write() && rng.chance(network.late) {
            Fate::Late(rng.stretch(SECOND, 240 * SECOND))
        } else if rng.chance(network.lost_after) {
            Fate::LostAfter
        } else if patch && rng.chance(network.refused) {
            // If the object changes several times while a patch is applied, a real server answers 409.
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

    /// Executes the request at the API server, even if its sender has ended.
    pub fn arrive(&mut self, run_id: RunId, outgoing: &OutgoingRequest, reply: Reply) -> Verdict {
        let request = &outgoing.request;
        let sent = self.on_wire.remove(&(run_id, outgoing.id));
        self.api.drops_changes = self.persistent_fate(request) == Some(Fate::Dropped);
        let outcome = self.api.execute(request, self.now);
        self.api.drops_changes = false;
        self.log(name_of(request), || {
            let outcome = of_outcome(&outcome);
            format!("{run_id}'s {} -> {outcome}", verb(request))
        });
        self.checks.executed(request, &outcome, self.now);
        if let (ApiRequest::Evict(pod), RequestOutcome::Gone) = (request, &outcome) {
            self.pod_ended(&pod.uid);
        }
        if let Some(term) = &outgoing.term {
            self.note_late_write(term, request);
            let decided = match (request, self.run_of(run_id)) {
                (ApiRequest::AssignPodCidrs(a), Some(run)) => {
                    run.received.decided.get(&(a.uid.clone(), a.cidrs.clone()))
                }
                _ => sent.as_ref().map(|(_, decided)| decided),
            };
            let decided = decided.copied().unwrap_or(self.now);
            self.settle_commits(Author::Controller(run_id), decided)?;
        }
        self.check_filled()?;
        if let Reply::After(back) = reply {
            self.after(back, Due::Answer(run_id, outgoing.id, Box::new(outcome)));
        }
        Ok(())
    }

    pub fn answer(&mut self, run_id: RunId, id: RequestId, outcome: RequestOutcome) -> Verdict {
        let now = self.processes[run_id.process].now(self.now);
        let run = self.processes[run_id.process].run();
        let Some((OutgoingRequest { request, .. }, _)) = run.in_flight.remove(&id) else {
            return Ok(());
        };
        run.awaiting_lease.retain(|held| *held != id);
        run.received.answer(&outcome);
        let is_dropped = self.persistent_fate(&request) == Some(Fate::Dropped);
        let answer = (&outcome, is_dropped);
        let verdict = self.budget.answered(run_id, &request, answer, self.now);
        self.judge(verdict)?;
        self.log(name_of(&request), || {
            let outcome = of_outcome(&outcome);
            format!("{run_id} is answered {}: {outcome}", verb(&request))
        });
        let run = self.processes[run_id.process].run();
        run.controller.on(ControllerEvent::Answer(id, outcome), now);
        if run.controller.is_put_back() {
            self.end(run_id, "ends: a list shows an older state than it knew");
            return Ok(());
        }
        self.look_soon(run_id)
    }

    /// Lets a run that was asked to stop hand over the Lease. This happens once the controller is settled, or when the
    /// time to stop is over. A run that does not lead ends at once.
    pub fn wind_down(&mut self, run_id: RunId) -> Verdict {
        let run = self.processes[run_id.process].run();
        let Some(limit) = run.stopping.filter(|_| !run.released) else {
            return Ok(());
        };
        if !matches!(run.elector.leadership(), Leadership::Leading(_)) {
            self.end(run_id, "stopped");
            return Ok(());
        }
        let settled = run.controller.is_settled();
        if !settled && self.now < limit {
            return Ok(());
        }
        run.released = true;
        run.elector.release(settled);
        self.log(None, || format!("{run_id} hands over, settled: {settled}"));
        if settled {
            self.judge(self.check_hand_over(run_id))?;
        }
        self.after(0, Due::CallElector(run_id));
        Ok(())
    }

    /// Checks at a clean hand-over that no podCIDR allocation that the process has in flight can still take effect.
    fn check_hand_over(&self, run_id: RunId) -> Verdict {
        for ((sender, _), (outgoing, _)) in &self.on_wire {
            let ApiRequest::AssignPodCidrs(a) = &outgoing.request else {
                continue;
            };
            let open = self.api.nodes.get(&a.name).is_some_and(|node| {
                node.uid == a.uid
                    && node.is_empty()
                    && node.annotated == a.annotated
                    && node.term == a.term
            });
            if open && *sender == run_id {
                let text =
                    format!("{run_id} hands over cleanly with an assignment under way: {a:?}");
                return wrong("clean hand-over", text, [a.name.clone()]);
            }
        }
        Ok(())
    }

    pub fn end(&mut self, run_id: RunId, how: &str) {
        self.processes[run_id.process].run = None;
        self.log(None, || format!("{run_id} {how}"));
        let rest = self.rng.stretch(100 * MS, 40 * SECOND);
        self.after(rest, Due::Start(run_id.process));
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
    /// The request is executed, but the change of the object is dropped. The answer contains the unchanged object.
    Dropped,
    Refused(Rejection),
    /// The request is not executed, and there is no answer.
    Unanswered,
    LostBefore,
    LostAfter,
    Late(Time),
}

impl std::fmt::Display for RunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "p{}.{}", self.process, self.incarnation)
    }
}
