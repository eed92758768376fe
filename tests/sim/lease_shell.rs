//! The Lease in a controller process: elections, renewals, and the leadership that is passed to the controller.

use std::time::Duration;

use cadastre_controller::ControllerEvent;
use cadastre_controller::cluster::lease::{
    Leadership, LeadershipTerm, LeaseAnswer, LeaseCall, LeaseRecord,
};
use jiff::Timestamp;

use super::checks::Verdict;
use super::clock::{MS, SECOND, Time};
use super::process::Run;
use super::run::{Due, Reply, RunId, Sim};

/// A process ends if it could not read the Lease for this long, because its cache may be outdated.
const AWAY: Duration = Duration::from_secs(60);

impl Sim {
    pub fn poll_lease(&mut self, run_id: RunId) {
        let clocks = self.processes[run_id.process].clocks;
        let mono = clocks.mono(self.now);
        let run = self.processes[run_id.process].run();
        run.lease_at = run.lease_at.filter(|at| *at > self.now);
        if let Some(wanted) = run.wanted.take() {
            let leadership = run.elector.leadership();
            let is_ours = |it: &LeadershipTerm| it.id == wanted.term;
            let leads = matches!(&leadership, Leadership::Leading(it) if is_ours(it));
            run.agents_heard |= leads && wanted.agents_heard;
            run.elector.want(wanted, mono);
        }
        if !run.lease_in_flight {
            if let Some(ask) = run.elector.poll(mono) {
                run.lease_in_flight = true;
                let leads = matches!(run.elector.leadership(), Leadership::Leading(_));
                run.agents_heard &= leads;
                if !leads && !matches!(ask, LeaseCall::Get) {
                    // The time since the last renewal of the Lease is the difference between two wall clocks: the
                    // present time of this process, minus the renewal time that the last holder wrote.
                    let since = run.lease.map(|(_, renewed)| renewed);
                    let vacant = since.map(|time| clocks.wall(self.now).duration_since(time));
                    let vacant = vacant.and_then(|time| Duration::try_from(time).ok());
                    run.vacant = vacant.unwrap_or_default();
                }
                self.send_lease(run_id, ask);
            } else if let Some(at) = run.elector.wake_at().map(|at| clocks.when(at)) {
                let at = at.max(self.now + 1);
                if run.lease_at.is_none_or(|due| due > at) {
                    run.lease_at = Some(at);
                    self.after(at - self.now, Due::CallElector(run_id));
                }
            }
        }
        self.leadership_changed(run_id);
    }

    fn send_lease(&mut self, run_id: RunId, ask: LeaseCall) {
        let process = &self.processes[run_id.process];
        let cut = process.cut_until.saturating_sub(self.now);
        let wall = self.renewal(run_id);
        let patience = self.processes[run_id.process].run().elector.patience();
        let most = Time::try_from(patience.as_micros()).unwrap();
        if self.is_down() {
            let patience = self.rng.stretch(10 * MS, most);
            let answer = Box::new(LeaseAnswer::Unclear);
            self.after(patience, Due::LeaseAnswer(run_id, answer));
            return;
        }
        let call = Box::new((ask, wall));
        let lost = cut > 0 || (self.has_faults && self.rng.chance(self.plan.network.lease_lost));
        let (there, back) = self.travel_times(4 * SECOND, 10 * MS);
        if !lost && there + back > most {
            let answer = Box::new(LeaseAnswer::Unclear);
            self.after(most, Due::LeaseAnswer(run_id, answer));
            self.after(there, Due::LeaseArrive(run_id, call, Reply::Never));
            return;
        }
        if !lost {
            self.after(there, Due::LeaseArrive(run_id, call, Reply::After(back)));
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
        let patience = self.rng.stretch(10 * MS, most);
        self.after(patience, Due::LeaseAnswer(run_id, Box::new(answer)));
        if let Some(there) = arrives {
            self.after(there, Due::LeaseArrive(run_id, call, Reply::Never));
        }
    }

    /// Returns the renewal time that a process writes into the Lease. Usually this is the present time. After a gap (a
    /// time without a leader), the process repeats the last renewal time before the gap until agents have published, so
    /// that the Lease still shows the gap.
    fn renewal(&self, run_id: RunId) -> Timestamp {
        let process = &self.processes[run_id.process];
        let wall = process.clocks.wall(self.now);
        let Some(run) = &process.run else { return wall };
        let shows_gap = run.vacant > Duration::from_secs(60) && !run.agents_heard;
        let renewed = run.lease.filter(|_| shows_gap).map(|(_, renewed)| renewed);
        renewed.unwrap_or(wall)
    }

    pub fn arrive_lease(
        &mut self,
        run_id: RunId,
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
            self.after(back, Due::LeaseAnswer(run_id, Box::new(answer)));
        }
        Ok(())
    }

    /// Delivers a write of the Lease to the candidates' watches, which may lag or deliver nothing.
    fn tell_watches(&mut self, record: &LeaseRecord) {
        for process in 0..self.processes.len() {
            let run_id = self.run_id(process);
            let is_cut = self.processes[process].cut_until > self.now;
            let waits = |run: &Run| {
                run.has_read_lease && !matches!(run.elector.leadership(), Leadership::Leading(_))
            };
            if is_cut || !self.run_of(run_id).is_some_and(waits) {
                continue;
            }
            let delay = match self.rng.below(10) {
                0 if self.has_faults => continue,
                1 if self.has_faults => self.rng.stretch(50 * MS, 60 * SECOND),
                _ => self.rng.stretch(MS, 20 * MS),
            };
            self.after(delay, Due::LeaseWatched(run_id, Box::new(record.clone())));
        }
    }

    pub fn show_lease(&mut self, run_id: RunId, record: &LeaseRecord) {
        let mono = self.processes[run_id.process].clocks.mono(self.now);
        let run = self.processes[run_id.process].run();
        if run.elector.watch_applied(record, mono) {
            run.lease = self.api.renewal(record);
            self.checks.tally.shown += 1;
        }
        self.poll_lease(run_id);
    }

    pub fn answer_lease(&mut self, run_id: RunId, answer: LeaseAnswer) {
        let mono = self.processes[run_id.process].clocks.mono(self.now);
        let run = self.processes[run_id.process].run();
        run.lease_in_flight = false;
        if let LeaseAnswer::Found(record) | LeaseAnswer::Written(record) = &answer {
            let before = std::mem::replace(&mut run.lease, self.api.renewal(record));
            let version: u64 = record.resource_version.parse().unwrap();
            if before.is_some_and(|(received, _)| version < received) {
                self.end(run_id, "ends: its Lease is older than it was");
                return;
            }
        }
        let is_clear = !matches!(answer, LeaseAnswer::Unclear | LeaseAnswer::Failed);
        if is_clear {
            if run.read_at.is_some_and(|at| mono > at + AWAY) {
                self.end(run_id, "ends: it was away for too long");
                return;
            }
            run.read_at = Some(mono);
        }
        let is_first = is_clear && !run.has_read_lease;
        run.has_read_lease |= is_clear;
        run.elector.answer(answer, mono);
        for kind in self.plan.watched().into_iter().filter(|_| is_first) {
            self.schedule_delivery(run_id, kind);
        }
        self.poll_lease(run_id);
    }

    /// Schedules that the changed leadership is passed to the controller. Also retries requests that wait for the
    /// Lease.
    fn leadership_changed(&mut self, run_id: RunId) {
        let held = std::mem::take(&mut self.processes[run_id.process].run().awaiting_lease);
        for id in held {
            self.after(0, Due::Send(run_id, id));
        }
        let run = self.processes[run_id.process].run();
        let leadership = run.leadership();
        if run.released && !run.lease_in_flight && !matches!(leadership, Leadership::Leading(_)) {
            self.end(run_id, "has stopped");
            return;
        }
        if run.observed.as_ref() != Some(&leadership) && !run.leadership_scheduled {
            run.leadership_scheduled = true;
            let delay = self.rng.stretch(MS, 10 * MS);
            self.after(delay, Due::PassLeadership(run_id));
        }
    }

    pub fn tell(&mut self, run_id: RunId) -> Verdict {
        let now = self.processes[run_id.process].now(self.now);
        let run = self.processes[run_id.process].run();
        run.leadership_scheduled = false;
        let leadership = run.leadership();
        if run.observed.as_ref() == Some(&leadership) {
            return Ok(());
        }
        let before = run.received.term.clone();
        run.received.observe_leadership(&leadership);
        run.observed = Some(leadership.clone());
        match &leadership {
            Leadership::Leading(term) if before.as_ref() != Some(&term.id) => {
                self.checks.tally.takeovers += 1;
                self.log(None, || {
                    let is_gap = term.follows_a_gap();
                    let gap = if is_gap { ", after a gap" } else { "" };
                    let (term, takeover) = (&term.id, term.takeover);
                    format!("{run_id} leads under {term} ({takeover:?}{gap})")
                });
            }
            Leadership::Leading(_) => {}
            _ if before.is_some() => self.log(None, || format!("{run_id} leads no more")),
            _ => {}
        }
        let run = self.processes[run_id.process].run();
        run.controller
            .on(ControllerEvent::Leadership(leadership), now);
        self.look(run_id)
    }
}
