//! Simulates the shell of a controller process: the code that connects the state machines to the network.
//!
//! The simulated shell has the same rule as the real one. A write is sent only under the term in which it was
//! decided, only while that term is valid by the process's own clock, and only after the Lease was written following
//! the decision.

use std::time::Duration;

use cadastre_controller::cluster::lease::{
    Leadership, LeadershipTerm, LeaseAnswer, LeaseCall, LeaseRecord,
};
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
use super::process::{Process, Watched};
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
        self.after(0, Due::Lease(place));
        self.after(0, Due::Look(place));
    }

    /// Delivers some events of a watch.
    pub fn deliver(&mut self, place: Where, kind: Watched) -> Verdict {
        if self.is_down() {
            if let Some(run) = &mut self.processes[place.process].run {
                *run.line(kind, &self.api).scheduled = false;
            }
            self.schedule_delivery(place, kind);
            return Ok(());
        }
        let many = self.rng.between(1, BATCH);
        for _ in 0..many {
            let now = self.processes[place.process].now(self.now);
            let Some(run) = &mut self.processes[place.process].run else {
                break;
            };
            let Some(event) = run.deliver(kind, &self.api, now, self.now) else {
                break;
            };
            self.step += 1;
            if self.trace.is_on() {
                let (about, text) = describe(&event);
                self.log(about.as_deref(), || format!("{place} sees {text}"));
            }
        }
        if let Some(run) = &mut self.processes[place.process].run {
            *run.line(kind, &self.api).scheduled = false;
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
        let Some(run) = &mut self.processes[place.process].run else {
            return;
        };
        let at = at.max(self.now);
        if run.look_at.is_none_or(|due| due > at) {
            run.look_at = Some(at);
            self.after(at - self.now, Due::Look(place));
        }
    }

    /// Takes requests from the controller and sends them, until the controller has none or enough are in flight.
    pub fn look(&mut self, place: Where) -> Verdict {
        let now = self.processes[place.process].now(self.now);
        loop {
            let Some(run) = &mut self.processes[place.process].run else {
                return Ok(());
            };
            if run.look_at.is_some_and(|at| at <= self.now) {
                run.look_at = None;
            }
            if run.wake_at.take_if(|at| *at == self.now).is_some() {
                let verdict = self.budget.woke(place, self.now);
                self.judge(verdict)?;
            }
            let Some(run) = &mut self.processes[place.process].run else {
                return Ok(());
            };
            let Some(outgoing) = run.controller.poll(now) else {
                break;
            };
            let id = outgoing.id;
            run.burst = if run.burst.0 == self.now {
                (self.now, run.burst.1 + 1)
            } else {
                (self.now, 0)
            };
            if run.burst.1 > SPIN {
                return wrong(
                    "rest",
                    format!("{place} asks without end: {outgoing:?}"),
                    None::<&str>,
                );
            }
            let verdict = self
                .checks
                .asked(place, &outgoing, &mut run.known, &self.api, self.now);
            // A decision during a restore is based on a state that no longer exists, and a decision after another
            // process acquired the Lease is too late. Neither is sent, so a violation in it does not count.
            let is_late = self.is_down() || !self.checks.is_leading(outgoing.term.as_ref());
            let verdict = verdict.or_else(|it| if is_late { Ok(()) } else { Err(it) });
            self.judge(verdict)?;
            let Some(run) = &mut self.processes[place.process].run else {
                return Ok(());
            };
            run.decided.insert(id, self.now);
            if run.in_flight.insert(id, outgoing).is_some() {
                return wrong(
                    "identity",
                    format!("{place} uses {id:?} twice"),
                    None::<&str>,
                );
            }
            if self.rough && self.rng.chance(self.plan.network.gap) {
                let gap = self.rng.stretch(MS, 20 * SECOND);
                self.after(gap, Due::Send(place, id));
            } else {
                self.send(place, id)?;
            }
        }
        let clocks = self.processes[place.process].clocks;
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        if let Some(wanted) = run.controller.take_wanted() {
            let inherited = match run.leadership() {
                Leadership::Leading(term) => term.inherited,
                _ => None,
            };
            let inherited = inherited.as_deref();
            let known = &mut run.known;
            let verdict = self
                .checks
                .wants(place, &wanted, inherited, known, &self.api, self.now);
            let is_late = !self.checks.is_leading(Some(&wanted.term));
            run.wanted = Some(wanted);
            let is_late = is_late || self.is_down();
            let verdict = verdict.or_else(|it| if is_late { Ok(()) } else { Err(it) });
            self.judge(verdict)?;
            let delay = self.rng.stretch(MS / 10, 2 * MS);
            self.after(delay, Due::Lease(place));
        }
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        let reports = run.controller.take_reports();
        let wake = run.controller.wake_at().map(|at| clocks.when(at));
        for report in reports {
            let verdict =
                self.checks
                    .reported(place, &report, self.now > self.plan.rough_for + CATCH_UP);
            self.judge(verdict)?;
            let (about, text) = of_report(&report);
            self.log(Some(&about), || format!("{place} reports {text}"));
        }
        // If the wake-up time is over already, only a new event is a reason to call the controller again.
        if let Some(at) = wake.filter(|at| *at > self.now) {
            self.look_by(place, at);
            if let Some(run) = &mut self.processes[place.process].run {
                run.wake_at = Some(at);
            }
        }
        self.wind_down(place)
    }

    /// Checks whether a request may be sent, and draws what the network does with it.
    pub fn send(&mut self, place: Where, id: RequestId) -> Verdict {
        let mono = self.processes[place.process].clocks.mono(self.now);
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        let Some(outgoing) = run.in_flight.get(&id).cloned() else {
            return Ok(());
        };
        let write = outgoing.request.is_write();
        let passes = if write {
            run.gate(&outgoing, mono)
        } else {
            Some(true)
        };
        let Some(passes) = passes else {
            run.held.push(id);
            return Ok(());
        };
        if !passes {
            self.log(name_of(&outgoing.request), || {
                format!("{place} does not send {}", of_request(&outgoing.request))
            });
            self.after(
                0,
                Due::Answer(
                    place,
                    id,
                    Box::new(RequestOutcome::Rejected(Rejection::NotSent)),
                ),
            );
            return Ok(());
        }
        let decided = run.decided.get(&id).copied().unwrap_or(0);
        if write && !self.is_down() {
            let verdict = self.checks.sent(place, &outgoing, decided, &self.api);
            self.judge(verdict)?;
        }
        self.checks.last_request = (self.now, verb(&outgoing.request));
        if write {
            self.on_wire.insert((place, id), outgoing.clone());
        }
        let slow = self.rough && self.rng.chance(self.plan.network.slow);
        let there = if slow {
            self.rng.stretch(50 * MS, 9 * SECOND)
        } else {
            self.rng.stretch(MS, 8 * MS)
        };
        let back = if slow {
            self.rng.stretch(50 * MS, 9 * SECOND)
        } else {
            self.rng.stretch(MS, 8 * MS)
        };
        let last = matches!(
            outgoing.request,
            ApiRequest::AssignPodCidrs(_) | ApiRequest::Create(_, ObjectSpec::Block(_))
        ) && self.rough
            && self.rng.chance(self.plan.network.last_words);
        if let (true, Some(name)) = (last, name_of(&outgoing.request)) {
            self.fall_silent(place);
            let soon = self.rng.stretch(MS, 20 * SECOND);
            self.after(soon, Due::Disturb(name.into()));
            let rush = self.rng.between(17 * SECOND, 35 * SECOND);
            self.after(rush, Due::Rush);
        }
        let cut = self.processes[place.process]
            .cut_until
            .saturating_sub(self.now);
        let objection = self.objection(&outgoing.request);
        let fate = match cut {
            _ if self.is_down() => Fate::LostBefore,
            0 if objection.is_some() => match objection.and_then(|it| it.refusal()) {
                Some(refusal) => Fate::Refused(refusal),
                None => Fate::Unanswered,
            },
            0 if self.rough => self.fate(&outgoing.request),
            0 => Fate::Arrives,
            _ if write && self.rng.chance(8_000) => {
                Fate::Late(cut + self.rng.stretch(MS, 2 * SECOND))
            }
            _ => Fate::LostBefore,
        };
        let back = back
            + if cut > 0 {
                self.rng.stretch(50 * MS, 9 * SECOND)
            } else {
                0
            };
        self.log(name_of(&outgoing.request), || {
            format!("{place} sends {} [{fate:?}]", of_request(&outgoing.request))
        });
        match fate {
            Fate::Arrives => self.after(
                there,
                Due::Arrive(place, Box::new(outgoing), Reply::After(back)),
            ),
            Fate::Refused(refusal) => {
                self.on_wire.remove(&(place, id));
                self.after(
                    there + back,
                    Due::Answer(place, id, Box::new(RequestOutcome::Rejected(refusal))),
                );
            }
            Fate::Unanswered => {
                self.on_wire.remove(&(place, id));
                self.unclear(place, id, &outgoing.request, PATIENCE);
            }
            Fate::LostBefore => {
                self.on_wire.remove(&(place, id));
                self.unclear(place, id, &outgoing.request, there + back);
            }
            Fate::LostAfter => {
                self.unclear(place, id, &outgoing.request, there + back);
                self.after(there, Due::Arrive(place, Box::new(outgoing), Reply::Never));
            }
            Fate::Late(late) => {
                self.unclear(place, id, &outgoing.request, there + back);
                self.after(late, Due::Arrive(place, Box::new(outgoing), Reply::Never));
            }
        }
        Ok(())
    }

    /// Schedules an indeterminate outcome for a request whose response is lost.
    fn unclear(&mut self, place: Where, id: RequestId, request: &ApiRequest, delay: Time) {
        let lie = Mutation::TimeoutCountsAsRejection.is_on()
            && matches!(request, ApiRequest::AssignPodCidrs(_));
        let outcome = if lie {
            RequestOutcome::Rejected(Rejection::Missing)
        } else {
            RequestOutcome::Indeterminate("the answer was lost".to_owned())
        };
        self.after(delay, Due::Answer(place, id, Box::new(outcome)));
    }

    fn fate(&mut self, request: &ApiRequest) -> Fate {
        let network = self.plan.network.clone();
        let rng = &mut self.rng;
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
            let after = rng
                .chance(5_000)
                .then(|| Duration::from_millis(rng.between(1, 3_000)));
            Fate::Refused(Rejection::Busy(after))
        } else if rng.chance(network.rejected) {
            Fate::Refused(Rejection::Rejected("forbidden".to_owned()))
        } else {
            Fate::Arrives
        }
    }

    /// Executes the request at the API server, even if its sender has ended meanwhile.
    #[expect(clippy::needless_pass_by_value, reason = "it is used up")]
    pub fn arrive(&mut self, place: Where, outgoing: OutgoingRequest, reply: Reply) -> Verdict {
        self.on_wire.remove(&(place, outgoing.id));
        let outcome = self.api.execute(&outgoing.request, self.now);
        self.log(name_of(&outgoing.request), || {
            format!(
                "{place}'s {} -> {}",
                verb(&outgoing.request),
                of_outcome(&outcome)
            )
        });
        self.checks.executed(&outgoing.request, &outcome, self.now);
        if let Some(term) = outgoing.term.clone() {
            let author = Author::Controller {
                process: place.process,
                incarnation: place.incarnation,
                term,
            };
            let decided = self.processes[place.process]
                .run
                .as_ref()
                .filter(|_| self.is_alive(place));
            let decided = match (&outgoing.request, decided) {
                (ApiRequest::AssignPodCidrs(a), Some(run)) => {
                    run.known.decided.get(&(a.uid.clone(), a.cidrs.clone()))
                }
                _ => None,
            };
            let decided = decided.copied().unwrap_or(self.now);
            self.settle_commits(&author, decided)?;
        }
        if let Reply::After(back) = reply {
            self.after(back, Due::Answer(place, outgoing.id, Box::new(outcome)));
        }
        Ok(())
    }

    pub fn answer(&mut self, place: Where, id: RequestId, outcome: RequestOutcome) -> Verdict {
        let now = self.processes[place.process].now(self.now);
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        let Some(outgoing) = run.in_flight.remove(&id) else {
            return Ok(());
        };
        run.decided.remove(&id);
        run.held.retain(|held| *held != id);
        run.known.answer(&outcome);
        let verdict = self
            .budget
            .answered(place, &outgoing.request, &outcome, self.now);
        self.judge(verdict)?;
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        let text = self.trace.is_on().then(|| of_outcome(&outcome));
        run.controller.on(ControllerEvent::Answer(id, outcome), now);
        let is_put_back = run.controller.is_put_back();
        if let Some(text) = text {
            self.log(name_of(&outgoing.request), || {
                format!("{place} is answered {}: {text}", verb(&outgoing.request))
            });
        }
        if is_put_back {
            self.end(place, "ends: a list shows an older state than it knew");
            return Ok(());
        }
        self.look_soon(place)
    }

    /// Ends a run that was asked to stop, once it can hand over or has waited long enough.
    pub fn wind_down(&mut self, place: Where) -> Verdict {
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        let Some(limit) = run.stopping else {
            return Ok(());
        };
        if run.released {
            return Ok(());
        }
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
        self.after(0, Due::Lease(place));
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

    #[expect(
        clippy::unnecessary_wraps,
        reason = "a step like the others, which may fail"
    )]
    pub fn poll_lease(&mut self, place: Where) -> Verdict {
        let clocks = self.processes[place.process].clocks;
        let mono = clocks.mono(self.now);
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        if run.lease_at.is_some_and(|at| at <= self.now) {
            run.lease_at = None;
        }
        if let Some(wanted) = run.wanted.take() {
            let leadership = run.elector.leadership();
            let is_ours = |it: &LeadershipTerm| it.id == wanted.term;
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
                    let renewed = run.lease.map(|(_, renewed)| renewed);
                    run.vacant = vacant_since(renewed, clocks.wall(self.now));
                }
                self.send_lease(place, ask);
            } else if let Some(at) = run.elector.wake_at().map(|at| clocks.when(at)) {
                let at = at.max(self.now + 1);
                if run.lease_at.is_none_or(|due| due > at) {
                    run.lease_at = Some(at);
                    self.after(at - self.now, Due::Lease(place));
                }
            }
        }
        self.leadership_changed(place);
        Ok(())
    }

    fn send_lease(&mut self, place: Where, ask: LeaseCall) {
        let cut = self.processes[place.process]
            .cut_until
            .saturating_sub(self.now);
        let wall = self.renewal(place);
        if self.is_down() {
            let patience = self.rng.stretch(10 * MS, 4 * SECOND);
            self.after(
                patience,
                Due::LeaseAnswer(place, Box::new(LeaseAnswer::Unclear)),
            );
            return;
        }
        let lost = cut > 0 || (self.rough && self.rng.chance(self.plan.network.lease_lost));
        let slow = self.rough && self.rng.chance(self.plan.network.slow);
        let there = if slow {
            self.rng.stretch(50 * MS, 4 * SECOND)
        } else {
            self.rng.stretch(MS, 10 * MS)
        };
        let back = if slow {
            self.rng.stretch(50 * MS, 4 * SECOND)
        } else {
            self.rng.stretch(MS, 10 * MS)
        };
        if !lost {
            self.after(
                there,
                Due::LeaseArrive(place, Box::new((ask, wall)), Reply::After(back)),
            );
            return;
        }
        let (answer, arrives) = match self.rng.below(4) {
            _ if cut > 0 => (
                LeaseAnswer::Unclear,
                Some(cut + self.rng.stretch(MS, 2 * SECOND)),
            ),
            0 => (LeaseAnswer::Failed, None),
            1 => (LeaseAnswer::Unclear, None),
            2 => (LeaseAnswer::Unclear, Some(there)),
            _ => (
                LeaseAnswer::Unclear,
                Some(self.rng.stretch(SECOND, 60 * SECOND)),
            ),
        };
        let patience = self.rng.stretch(10 * MS, 4 * SECOND);
        self.after(patience, Due::LeaseAnswer(place, Box::new(answer)));
        if let Some(there) = arrives {
            self.after(
                there,
                Due::LeaseArrive(place, Box::new((ask, wall)), Reply::Never),
            );
        }
    }

    /// Returns the renewal time that a process writes into the Lease: usually the present time. After a time without
    /// leader it stays the last renewal time before, until agents have published, so the Lease still shows the gap.
    fn renewal(&self, place: Where) -> Timestamp {
        let process = &self.processes[place.process];
        let wall = process.clocks.wall(self.now);
        let Some(run) = &process.run else { return wall };
        let tells_gap = run.vacant > Duration::from_secs(60) && !run.agents_heard;
        let renewed = run.lease.filter(|_| tells_gap).map(|(_, renewed)| renewed);
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
            let Process {
                run: Some(run),
                cut_until,
                incarnation,
                ..
            } = &self.processes[process]
            else {
                continue;
            };
            let is_cut = *cut_until > self.now;
            let place = Where {
                process,
                incarnation: *incarnation,
            };
            if is_cut || !run.heard || matches!(run.elector.leadership(), Leadership::Leading(_)) {
                continue;
            }
            let delay = match self.rng.below(10) {
                0 if self.rough => continue,
                1 if self.rough => self.rng.stretch(50 * MS, 60 * SECOND),
                _ => self.rng.stretch(MS, 20 * MS),
            };
            self.after(delay, Due::LeaseShown(place, Box::new(record.clone())));
        }
    }

    pub fn show_lease(&mut self, place: Where, record: &LeaseRecord) -> Verdict {
        let mono = self.processes[place.process].clocks.mono(self.now);
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        if run.elector.watch_applied(record, mono) {
            let renewed = self.api.renewals.get(&record.resource_version);
            let version = record.resource_version.parse().unwrap();
            run.lease = renewed.map(|renewed| (version, *renewed));
            self.checks.tally.shown += 1;
        }
        self.poll_lease(place)
    }

    pub fn answer_lease(&mut self, place: Where, answer: LeaseAnswer) -> Verdict {
        let mono = self.processes[place.process].clocks.mono(self.now);
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        run.asked = false;
        if let LeaseAnswer::Found(record) | LeaseAnswer::Written(record) = &answer {
            let renewed = self.api.renewals.get(&record.resource_version);
            let version: u64 = record.resource_version.parse().unwrap();
            let is_older = run.lease.is_some_and(|(known, _)| version < known);
            run.lease = renewed.map(|renewed| (version, *renewed));
            if is_older {
                self.end(place, "ends: its Lease is older than it was");
                return Ok(());
            }
        }
        let is_clear = !matches!(answer, LeaseAnswer::Unclear | LeaseAnswer::Failed);
        let away = run.read_at.is_some_and(|at| mono > at + AWAY);
        if is_clear && away {
            self.end(place, "ends: it was away for too long");
            return Ok(());
        }
        if is_clear {
            run.read_at = Some(mono);
        }
        let is_first = is_clear && !run.heard;
        run.heard |= is_clear;
        run.elector.answer(answer, mono);
        for kind in Watched::ALL.into_iter().filter(|_| is_first) {
            self.schedule_delivery(place, kind);
        }
        self.poll_lease(place)
    }

    /// Schedules passing a changed leadership to the controller, and retries requests that wait for the Lease.
    fn leadership_changed(&mut self, place: Where) {
        let Some(run) = &mut self.processes[place.process].run else {
            return;
        };
        let held = std::mem::take(&mut run.held);
        for id in held {
            self.after(0, Due::Send(place, id));
        }
        let Some(run) = &mut self.processes[place.process].run else {
            return;
        };
        let leadership = run.leadership();
        if run.released && !run.asked && !matches!(leadership, Leadership::Leading(_)) {
            self.end(place, "has stopped");
            return;
        }
        if run.observed.as_ref() != Some(&leadership) && !run.telling {
            run.telling = true;
            let delay = self.rng.stretch(MS, 10 * MS);
            self.after(delay, Due::Tell(place));
        }
    }

    pub fn tell(&mut self, place: Where) -> Verdict {
        let now = self.processes[place.process].now(self.now);
        let Some(run) = &mut self.processes[place.process].run else {
            return Ok(());
        };
        run.telling = false;
        let leadership = run.leadership();
        if run.observed.as_ref() == Some(&leadership) {
            return Ok(());
        }
        if let Leadership::Leading(term) = &leadership {
            let new = run.known.term.as_ref() != Some(&term.id);
            self.checks.tally.takeovers += u64::from(new);
            if new {
                let gap = if term.follows_a_gap() {
                    ", after a gap"
                } else {
                    ""
                };
                let text = format!("{place} leads under {} ({:?}{gap})", term.id, term.takeover);
                self.trace.push((self.step, self.now), None, || text);
            }
        } else if run.known.term.is_some() {
            self.trace.push((self.step, self.now), None, || {
                format!("{place} leads no more")
            });
        }
        run.known.observe_leadership(&leadership);
        run.observed = Some(leadership.clone());
        run.controller
            .on(ControllerEvent::Leadership(leadership), now);
        self.look(place)
    }
}

/// Returns how long nobody has renewed the Lease. The two times come from the wall clocks of two hosts.
fn vacant_since(renewed: Option<Timestamp>, now: Timestamp) -> Duration {
    let since = renewed.and_then(|time| Duration::try_from(now.duration_since(time)).ok());
    since.unwrap_or_default()
}

#[derive(Debug)]
enum Fate {
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
