//! Faults of simulated hosts: of their agents, watches, sandboxes, stores and disks, and losses of power.

use super::DiskTrouble;
use crate::clock::{MS, SECOND, Time};
use crate::machines::Act;
use crate::rng::Rng;
use crate::run::{Due, Sim};

impl Sim {
    /// Causes a fault of the host. `what` is a number below 100 that selects the kind of fault.
    pub fn inject_fault(&mut self, id: usize, what: u64) {
        let name = self.machines.hosts[id].name.clone();
        let length = self.rng.stretch(100 * MS, 120 * SECOND);
        match what {
            0..20 => {
                self.kill_process(id);
                self.start_process_later(id, length);
            }
            20..35 => self.reboot_host(id, length),
            35..55 => {
                let (now, until) = (self.now, self.now + length);
                self.host_mut(id).paused_until = until;
                if self.plan.clocks_stop && self.rng.chance(7_000) {
                    self.host_mut(id).clocks.stop(now, until);
                }
                self.log_host(id, || format!("agent {id} hangs"));
            }
            55..75 => {
                self.machines.hosts[id].held_until = self.now + length;
                self.log_host(id, || format!("agent {id} loses its watches"));
                self.relist_host(id, true);
            }
            75..85 => self.renew_sandbox(id),
            85..90 => self.lose_store(id),
            90..93 => self.break_disk(id, length, what),
            _ => {
                self.end_host(id);
                self.log_host(id, || format!("machine {id} is off for good"));
                if self.rng.chance(5_000) {
                    self.delete_node_named(&name);
                }
            }
        }
    }

    /// Powers off earlier hosts of the same name, because nothing is guaranteed while two hosts have one name.
    pub fn end_earlier_hosts(&mut self, id: usize) {
        let name = self.machines.hosts[id].name.clone();
        for other in (0..self.machines.hosts.len()).filter(|other| *other != id) {
            let host = self.host(other);
            if host.name == name && !host.is_gone {
                self.end_host(other);
            }
        }
    }

    /// Schedules a restart of the agent by the kubelet after `delay`.
    pub(super) fn start_process_later(&mut self, id: usize, delay: Time) {
        self.after(delay, Due::StartAgent(id, self.host(id).boot));
    }

    /// Starts the agent's process, unless the host was rebooted or powered off since this start was scheduled.
    pub fn revive_process(&mut self, id: usize, boot: u32) {
        if !self.host(id).is_off && self.host(id).boot == boot {
            self.start_process(id);
        }
    }

    /// Powers the host off. It boots again after `length`.
    pub fn reboot_host(&mut self, id: usize, length: Time) {
        self.log_host(id, || format!("machine {id} loses its power"));
        self.machines.hosts[id].is_off = true;
        let silence = self.silence_after_reboot();
        if silence > 0 {
            self.machines.hosts[id].held_until = self.now + length + silence;
        }
        self.power_off_host(id);
        self.after(length, Due::Machine(id, Act::Start));
    }

    /// Powers the host off for good.
    pub fn end_host(&mut self, id: usize) {
        let host = self.host_mut(id);
        (host.is_off, host.is_gone) = (true, true);
        self.power_off_host(id);
    }

    fn power_off_host(&mut self, id: usize) {
        self.kill_process(id);
        let mut rng = Rng::new(self.rng.next());
        let now = self.now;
        let host = self.host_mut(id);
        host.calls.clear();
        host.kubelet.power_off();
        host.announced.clear();
        // The store is in memory.
        *host.slot.lock().unwrap() = None;
        host.file.lose_power(&mut rng);
        host.off_since.get_or_insert(now);
    }

    pub fn start_host(&mut self, id: usize) {
        let now = self.now;
        let host = self.host_mut(id);
        (host.is_off, host.is_gone) = (false, false);
        host.clocks.boot(now);
        host.paused_until = now;
        host.boot += 1;
        self.start_process(id);
        self.start_kubelet(id);
    }

    /// Removes the host's store as soon as no process uses it. Then only the runtime knows the addresses that were
    /// assigned last. In half of the cases the agent is restarted, too, so its watches start again with a list.
    pub fn lose_store_soon(&mut self, id: usize) {
        self.machines.hosts[id].store_loss_pending = true;
        self.lose_pending_store(id);
    }

    pub(super) fn lose_pending_store(&mut self, id: usize) {
        let host = self.host(id);
        if !self.has_faults || !host.store_loss_pending || host.is_in_use() {
            return;
        }
        self.machines.hosts[id].store_loss_pending = false;
        self.lose_store(id);
        if self.rng.chance(5_000) {
            self.kill_process(id);
            self.start_process(id);
        }
    }

    /// Makes the disk full or broken for the time `length`, or the memory-backed file system full.
    fn break_disk(&mut self, id: usize, length: Time, what: u64) {
        let trouble = DiskTrouble {
            until: self.now + length,
            is_full: what != 91,
            is_of_store: what == 92,
        };
        self.machines.hosts[id].disk_trouble = trouble;
        self.log_host(id, || format!("machine {id} has {trouble:?}"));
    }

    /// Deletes the store's file, unless the store is in use.
    fn lose_store(&mut self, id: usize) {
        let host = self.host_mut(id);
        if host.is_in_use() {
            return;
        }
        *host.slot.lock().unwrap() = None;
        if let Some(process) = &mut host.process
            && let Ok(worker) = &mut process.worker
        {
            worker.close();
        }
        // The store was the only record of the cooldown of addresses, so the checks no longer demand that cooldown. A
        // new store also does not know which addresses were released while there was no store.
        self.machines.hosts[id].is_store_lost = true;
        self.checks.cooling.retain(|_, (of, ..)| *of != id);
        if self.was_restored() {
            let name = self.machines.hosts[id].name.clone();
            self.withdrawn.forget(&name);
        }
        self.log_host(id, || format!("machine {id} loses its store"));
    }

    /// Ends the faults of the host. Afterwards the agent runs, and its watches start again with a list.
    pub fn calm_host(&mut self, id: usize) {
        self.machines.hosts[id].disk_trouble = DiskTrouble::default();
        if !self.host(id).is_off {
            self.start_process(id);
        }
        self.relist_host(id, false);
    }
}
