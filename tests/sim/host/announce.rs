//! The routing daemon of a host. The daemon must announce no range that the node has released. At the end, it must
//! announce exactly the ranges of the node.

use std::collections::BTreeSet;

use cadastre_agent::announce::AnnounceError;
use cadastre_agent::machine::AgentEvent;
use cadastre_api::NodeSubnetStatus;
use cadastre_core::Cidr;
use cadastre_core::node_allocation::NodeAllocation;

use super::process::ProcessAct;
use crate::checks::{Verdict, wrong};
use crate::clock::Time;
use crate::run::Sim;

impl Sim {
    /// Passes the ranges to the daemon. The daemon reads them at once, when it answers, or not at all. So an agent that
    /// is killed meanwhile, or gets an error, does not know what the daemon announces.
    pub(super) fn announce(&mut self, id: usize, allocation: &NodeAllocation, lag: Time) {
        let ranges: BTreeSet<Cidr> = allocation.blocks.iter().map(|it| it.cidr).collect();
        let fails = self.has_faults && self.rng.chance(2_000);
        if self.rng.chance(5_000) {
            self.host_mut(id).announced.clone_from(&ranges);
        }
        self.process_due(id, lag, ProcessAct::Announce(ranges, fails));
    }

    /// Returns the daemon's answer: an error if `fails` is set. Otherwise the daemon now announces `ranges`.
    pub(super) fn daemon_answers(
        &mut self,
        id: usize,
        ranges: BTreeSet<Cidr>,
        fails: bool,
    ) -> AgentEvent {
        if fails {
            return AgentEvent::Announced(Err(AnnounceError::new("no answer")));
        }
        self.host_mut(id).announced = ranges;
        AgentEvent::Announced(Ok(()))
    }

    /// Checks that a host announces no block that its agent reports as released.
    pub(super) fn check_released(&self, id: usize, status: &NodeSubnetStatus) -> Verdict {
        let host = self.host(id);
        let released = status.blocks.iter().filter(|it| it.released);
        let mut released = released.filter_map(|it| Cidr::parse_strict(&it.cidr).ok());
        match released.find(|it| host.announced.contains(it)) {
            None => Ok(()),
            Some(cidr) => {
                let text = format!("{} reports {cidr} as released, but announces it", host.name);
                wrong("announced", text, [host.name.clone()])
            }
        }
    }

    /// Checks that each host with an agent announces exactly the ranges of its Node.
    pub fn check_announced_end(&self) -> Verdict {
        if !self.plan.announces() {
            return Ok(());
        }
        for host in self.machines.hosts.iter().filter(|it| it.has_agent()) {
            let wanted = self.listed_ranges(&host.name);
            let found: Vec<String> = host.announced.iter().map(ToString::to_string).collect();
            let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
            if wanted != found {
                let text = format!("{} has {wanted:?}, but announces {found:?}", host.name);
                return wrong("announced", text, [host.name.clone()]);
            }
        }
        Ok(())
    }
}
