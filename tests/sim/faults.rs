//! Faults of controller processes and their watches.

use super::clock::{MS, SECOND};
use super::process::Watched;
use super::run::{Due, Sim, Where};

impl Sim {
    pub fn fault(&mut self) {
        if !self.rough {
            return;
        }
        let total = self.plan.faults.total();
        if total > 0 {
            self.inject(total);
        }
        let gap = self.rng.stretch(
            (self.plan.fault_every / 64).max(10 * MS),
            self.plan.fault_every,
        );
        self.after(gap, Due::Fault);
    }

    fn inject(&mut self, total: u32) {
        let process = self.rng.index(self.processes.len());
        let place = Where {
            process,
            incarnation: self.processes[process].incarnation,
        };
        if !self.is_alive(place) || self.is_paused(place) {
            return;
        }
        let faults = self.plan.faults.clone();
        let mut left = u32::try_from(self.rng.below(u64::from(total))).unwrap();
        let mut falls = |weight: u32| {
            let hit = left < weight;
            left = left.saturating_sub(weight);
            hit && weight > 0
        };
        if falls(faults.pause) {
            self.pause(place);
        } else if falls(faults.crash) {
            self.end(place, "crashes");
        } else if falls(faults.stop) {
            self.stop(place);
        } else if falls(faults.relist) {
            self.relist(place);
        } else if falls(faults.stall) {
            self.stall(place);
        } else if falls(faults.cut) {
            self.cut(place);
        } else if falls(faults.wall) {
            self.jump(place);
        } else {
            self.change_pace(place);
        }
    }

    fn pause(&mut self, place: Where) {
        let length = self.rng.stretch(10 * MS, 120 * SECOND);
        self.processes[place.process].paused_until = self.now + length;
        self.log(None, || format!("{place} pauses for {} ms", length / MS));
        self.stop_clock(place);
    }

    /// Sometimes stops the monotonic clock of a process that is paused.
    fn stop_clock(&mut self, place: Where) {
        if !self.plan.clocks_stop || self.rng.chance(3_000) {
            return;
        }
        let process = &mut self.processes[place.process];
        let (rate, until) = (process.clocks.rate(), process.paused_until);
        process.clocks.set_pace(self.now, rate, until);
        self.log(None, || format!("{place}'s clock stands still as long"));
    }

    /// Changes the rate of a process's or an agent's monotonic clock, or lets it jump ahead.
    fn change_pace(&mut self, place: Where) {
        let now = self.now;
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
            self.processes[place.process].clocks.jump(by);
            self.log(None, || format!("{place}'s clock jumps {by} us ahead"));
        } else {
            let rate = self.rng.stretch(100_000, 10_000_000);
            self.processes[place.process]
                .clocks
                .set_pace(now, rate, now);
            self.log(None, || format!("{place}'s clock runs at {rate} ppm"));
        }
        // The timers of a process follow its clock, so the elector and the controller are called again.
        self.after(0, Due::Lease(place));
        self.after(0, Due::Look(place));
    }

    fn stop(&mut self, place: Where) {
        let patience = self.rng.stretch(500 * MS, 30 * SECOND);
        let Some(run) = &mut self.processes[place.process].run else {
            return;
        };
        if run.stopping.is_none() {
            run.controller.stop();
            run.stopping = Some(self.now + patience);
            self.log(None, || format!("{place} is asked to stop"));
            self.after(patience, Due::GiveUp(place));
        }
    }

    /// Restarts one watch or all watches with a list.
    fn relist(&mut self, place: Where) {
        let all = self.rng.chance(2_000);
        let one = *self.rng.pick(&Watched::ALL);
        for kind in Watched::ALL.into_iter().filter(|kind| all || *kind == one) {
            if let Some(run) = &mut self.processes[place.process].run {
                run.relist(kind);
            }
            self.log(None, || format!("{place} lists {kind:?} again"));
            self.schedule_delivery(place, kind);
        }
    }

    /// Cuts a watch for a time; later it resumes where it stopped.
    fn stall(&mut self, place: Where) {
        let kind = *self.rng.pick(&Watched::ALL);
        let until = self.now + self.rng.stretch(500 * MS, 200 * SECOND);
        if let Some(run) = &mut self.processes[place.process].run {
            *run.line(kind, &self.api).held_until = until;
        }
        self.log(None, || {
            format!("{place} hears nothing of {kind:?} until {until}")
        });
    }

    /// Cuts the process off for longer than its lease, and in two of three cases also crashes or pauses it.
    pub fn fall_silent(&mut self, place: Where) {
        let length = self.rng.between(20 * SECOND, 80 * SECOND);
        match self.rng.below(3) {
            0 => self.after(0, Due::Crash(place)),
            1 => {
                self.processes[place.process].paused_until = self.now + length;
                self.stop_clock(place);
            }
            _ => {}
        }
        self.processes[place.process].cut_until = self.now + length;
        self.log(None, || {
            format!("{place} falls silent for {} ms", length / MS)
        });
    }

    /// Cuts the process off: its writes arrive when the network is back, or never.
    fn cut(&mut self, place: Where) {
        let length = self.rng.stretch(SECOND, 90 * SECOND);
        self.processes[place.process].cut_until = self.now + length;
        self.log(None, || {
            format!("{place} is cut off for {} ms", length / MS)
        });
    }

    fn jump(&mut self, place: Where) {
        let size = i64::try_from(self.rng.stretch(SECOND, 3600 * SECOND)).unwrap();
        let off = if self.rng.chance(5_000) { size } else { -size };
        self.processes[place.process].clocks.wall_off = off;
        self.log(None, || format!("{place}'s wall clock is off by {off} us"));
    }
}
