//! Faults of controller processes and their watches.

use super::clock::{MS, SECOND};
use super::plan::Faults;
use super::run::{Due, RunId, Sim};

impl Sim {
    pub fn fault(&mut self) {
        if !self.has_faults {
            return;
        }
        if self.plan.faults != Faults::default() {
            self.inject();
        }
        let gap = self.rng.stretch(
            (self.plan.fault_every / 64).max(10 * MS),
            self.plan.fault_every,
        );
        self.after(gap, Due::Fault);
    }

    fn inject(&mut self) {
        let process = self.rng.index(self.processes.len());
        let run_id = self.run_id(process);
        if !self.is_alive(run_id) || self.is_paused(run_id) {
            return;
        }
        let faults = &self.plan.faults;
        let kinds: [(u32, fn(&mut Sim, RunId)); 8] = [
            (faults.pause, Sim::pause),
            (faults.crash, |sim, run_id| sim.end(run_id, "crashes")),
            (faults.stop, Sim::stop),
            (faults.relist, Sim::relist),
            (faults.stall, Sim::stall),
            (faults.cut, Sim::cut),
            (faults.wall, Sim::jump),
            (faults.clock, Sim::change_pace),
        ];
        let total = kinds.iter().map(|(weight, _)| u64::from(*weight)).sum();
        let mut left = self.rng.below(total);
        for (weight, fault) in kinds {
            if left < weight.into() {
                return fault(self, run_id);
            }
            left -= u64::from(weight);
        }
    }

    fn pause(&mut self, run_id: RunId) {
        let length = self.rng.stretch(10 * MS, 120 * SECOND);
        self.processes[run_id.process].paused_until = self.now + length;
        self.log(None, || format!("{run_id} pauses for {} ms", length / MS));
        self.stop_clock(run_id);
    }

    /// Sometimes stops the monotonic clock of a process that is paused.
    fn stop_clock(&mut self, run_id: RunId) {
        if !self.plan.clocks_stop || self.rng.chance(3_000) {
            return;
        }
        let process = &mut self.processes[run_id.process];
        process.clocks.stop(self.now, process.paused_until);
        self.log(None, || format!("{run_id}'s clock stands still as long"));
    }

    /// Changes the rate of a process's or an agent's monotonic clock, or lets it jump ahead.
    fn change_pace(&mut self, run_id: RunId) {
        let now = self.now;
        let process = &mut self.processes[run_id.process];
        if self.rng.chance(3_000) {
            let id = self.rng.index(self.machines.hosts.len().max(1));
            let rate = self.rng.stretch(100_000, 10_000_000);
            if let Some(host) = self.machines.hosts.get_mut(id) {
                host.clocks.set_pace(now, rate, now);
                self.turn_later(id, MS);
            }
            return;
        }
        if self.rng.chance(4_000) {
            let by = self.rng.stretch(SECOND, 600 * SECOND);
            process.clocks.jump(by);
            self.log(None, || format!("{run_id}'s clock jumps {by} us ahead"));
        } else {
            let rate = self.rng.stretch(100_000, 10_000_000);
            process.clocks.set_pace(now, rate, now);
            self.log(None, || format!("{run_id}'s clock runs at {rate} ppm"));
        }
        // The timers of the process follow its clock, which has just changed. So the elector and the controller are
        // called again to set new timers.
        self.after(0, Due::CallElector(run_id));
        self.after(0, Due::CallController(run_id));
    }

    pub fn stop(&mut self, run_id: RunId) {
        let patience = self.rng.stretch(500 * MS, 30 * SECOND);
        let run = self.processes[run_id.process].run();
        if run.stopping.is_none() {
            run.controller.stop();
            run.stopping = Some(self.now + patience);
            self.log(None, || format!("{run_id} is asked to stop"));
            self.after(patience, Due::StopTimeout(run_id));
        }
    }

    /// Makes one watch, or all watches, start again with a list.
    fn relist(&mut self, run_id: RunId) {
        let all = self.rng.chance(2_000);
        let one = *self.rng.pick(&self.plan.watched());
        for kind in self
            .plan
            .watched()
            .into_iter()
            .filter(|kind| all || *kind == one)
        {
            self.processes[run_id.process]
                .run()
                .feeds
                .of_mut(kind)
                .relist();
            self.log(None, || format!("{run_id} lists {kind:?} again"));
            self.schedule_delivery(run_id, kind);
        }
    }

    /// Cuts a watch for a time. Then the watch resumes where it stopped.
    fn stall(&mut self, run_id: RunId) {
        let kind = *self.rng.pick(&self.plan.watched());
        let until = self.now + self.rng.stretch(500 * MS, 200 * SECOND);
        let run = self.processes[run_id.process].run();
        run.deliveries(kind).held_until = until;
        self.log(None, || {
            format!("{run_id} hears nothing of {kind:?} until {until}")
        });
    }

    /// Cuts the process off from the API server for longer than its lease, and in two of three cases also crashes or
    /// pauses it.
    pub fn fall_silent(&mut self, run_id: RunId) {
        let length = self.rng.between(20 * SECOND, 80 * SECOND);
        match self.rng.below(3) {
            0 => self.after(0, Due::Crash(run_id)),
            1 => {
                self.processes[run_id.process].paused_until = self.now + length;
                self.stop_clock(run_id);
            }
            _ => {}
        }
        self.processes[run_id.process].cut_until = self.now + length;
        self.log(None, || {
            format!("{run_id} falls silent for {} ms", length / MS)
        });
    }

    /// Cuts the process off from the API server. Its writes arrive when the network is back, or never.
    fn cut(&mut self, run_id: RunId) {
        let length = self.rng.stretch(SECOND, 90 * SECOND);
        self.processes[run_id.process].cut_until = self.now + length;
        self.log(None, || {
            format!("{run_id} is cut off for {} ms", length / MS)
        });
    }

    fn jump(&mut self, run_id: RunId) {
        let size = i64::try_from(self.rng.stretch(SECOND, 3600 * SECOND)).unwrap();
        let off = if self.rng.chance(5_000) { size } else { -size };
        self.processes[run_id.process].clocks.wall_off = off;
        self.log(None, || format!("{run_id}'s wall clock is off by {off} us"));
    }
}
