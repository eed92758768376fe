//! Faults of machines with the shipped agent.

use crate::agents::Act;
use crate::clock::{MS, SECOND, Time};
use crate::rng::Rng;
use crate::run::{Due, Sim};

impl Sim {
    /// Causes a fault of the machine; `what`, a number below 100, selects which.
    pub fn befall_host(&mut self, id: usize, what: u64) {
        let name = self.machines.agents[id].name.clone();
        let length = self.rng.stretch(100 * MS, 120 * SECOND);
        match what {
            0..20 => {
                self.kill_process(id);
                self.start_process_later(id, length);
            }
            20..35 => self.reboot_host(id, length),
            35..55 => {
                self.machines.agents[id].paused_until = self.now + length;
                self.log(Some(&name), || format!("agent {id} hangs"));
            }
            55..75 => {
                self.machines.agents[id].held_until = self.now + length;
                self.log(Some(&name), || format!("agent {id} loses its watches"));
                self.relist_host(id, true);
            }
            75..85 => self.renew_sandbox(id),
            85..93 => self.lose_store(id),
            _ => {
                let agent = &mut self.machines.agents[id];
                (agent.is_off, agent.is_gone) = (true, true);
                self.power_off_host(id);
                self.log(Some(&name), || format!("machine {id} is off for good"));
                if self.rng.chance(5_000) {
                    self.delete_node_named(&name);
                }
            }
        }
    }

    /// Powers off earlier machines of the same name: nothing is guaranteed while two machines have one name.
    pub fn end_earlier_hosts(&mut self, id: usize) {
        let name = self.machines.agents[id].name.clone();
        for other in 0..self.machines.agents.len() {
            let agent = &mut self.machines.agents[other];
            if other != id && agent.name == name && agent.host.is_some() && !agent.is_gone {
                (agent.is_off, agent.is_gone) = (true, true);
                self.power_off_host(other);
            }
        }
    }

    /// The kubelet restarts the agent after `delay`.
    pub(super) fn start_process_later(&mut self, id: usize, delay: Time) {
        if let Some(host) = self.host(id) {
            let boot = host.boot;
            self.after(delay, Due::Revive(id, boot));
        }
    }

    /// Starts the agent's process, unless the machine was rebooted or powered off meanwhile.
    pub fn revive_process(&mut self, id: usize, boot: u32) {
        let is_off = self.machines.agents[id].is_off;
        if !is_off && self.host(id).is_some_and(|host| host.boot == boot) {
            self.start_process(id);
        }
    }

    /// The machine loses its power and boots after `length`.
    fn reboot_host(&mut self, id: usize, length: Time) {
        let name = self.machines.agents[id].name.clone();
        self.log(Some(&name), || format!("machine {id} loses its power"));
        self.machines.agents[id].is_off = true;
        self.power_off_host(id);
        self.after(length, Due::Agent(id, Act::Start));
    }

    fn power_off_host(&mut self, id: usize) {
        self.kill_process(id);
        let mut rng = Rng::new(self.rng.next());
        let Some(host) = self.host_mut(id) else {
            return;
        };
        host.calls.clear();
        host.kubelet.power_off();
        let disk = host.disk().map(|disk| disk.after_power_loss(&mut rng));
        *host.slot.lock().unwrap() = disk;
    }

    pub fn start_host(&mut self, id: usize) {
        let now = self.now;
        let agent = &mut self.machines.agents[id];
        (agent.is_off, agent.is_gone) = (false, false);
        agent.clocks.boot(now);
        agent.paused_until = now;
        if let Some(host) = &mut agent.host {
            host.boot += 1;
        }
        self.start_process(id);
        self.start_kubelet(id);
    }

    /// Deletes the store's file.
    fn lose_store(&mut self, id: usize) {
        let name = self.machines.agents[id].name.clone();
        let Some(host) = self.host_mut(id) else {
            return;
        };
        if host.kubelet.is_setting_up() || !host.calls.is_empty() {
            return;
        }
        *host.slot.lock().unwrap() = None;
        if let Some(process) = &mut host.process
            && let Ok(keeper) = &mut process.keeper
        {
            keeper.close();
        }
        // Only the store records the cooldown of addresses.
        self.checks.cooling.retain(|_, (of, ..)| *of != id);
        self.log(Some(&name), || format!("machine {id} loses its store"));
    }

    /// Ends the faults of the machine.
    pub fn calm_host(&mut self, id: usize) {
        let is_off = self.machines.agents[id].is_off;
        let is_dead = self.host(id).is_some_and(|host| host.process.is_none());
        if !is_off && is_dead {
            self.start_process(id);
        }
        self.relist_host(id, false);
    }
}
