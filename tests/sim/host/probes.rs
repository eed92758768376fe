//! Probes of addresses. For each probe, the simulation draws anew which addresses other hosts use.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use cadastre_core::Addr;
use cadastre_node::store_thread::StoreRequest;
use cadastre_node::{AddressLedger, ProbeRound, ProbeTargets, Snapshot, StoreError};

use super::process::{Out, ProcessAct};
use crate::checks::{Verdict, wrong};
use crate::clock::{MS, Time};
use crate::run::Sim;

/// How long the agent waits for answers.
const LIMIT: Time = 200 * MS;
/// An attachment whose `order` is at most this number was adopted by the agent, so its addresses were not probed.
const ADOPTED: u64 = 1;

impl Sim {
    /// Probes addresses, for an ADD or for the agent itself.
    pub(super) fn probe_host(&mut self, id: usize, number: Option<u64>, targets: &ProbeTargets) {
        let begun: Duration = self.host_now(id).since_boot;
        let mut answers = Vec::new();
        for addr in &targets.addresses {
            let by = self
                .rng
                .chance(1_000)
                .then(|| "02:00:00:00:00:01".to_owned());
            answers.push((*addr, by));
        }
        let round = ProbeRound {
            interface: targets.interface.clone(),
            begun,
            answers,
        };
        self.process_due(id, LIMIT, ProcessAct::Probed(number, round));
    }

    /// Records the answers to probes in the store.
    pub(super) fn record_probes(&mut self, id: usize, number: Option<u64>, round: ProbeRound) {
        let Some(process) = self.process(id) else {
            return;
        };
        let out = Arc::clone(&process.out);
        let host = self.host_mut(id);
        let mut in_conflict = Vec::new();
        for (addr, by) in &round.answers {
            if by.is_some() {
                in_conflict.push(*addr);
            } else if !host.given.contains_key(addr) {
                host.clean.insert(*addr);
            }
        }
        let work = move |it: &mut AddressLedger<'_>| it.record_probes(&round);
        let request = StoreRequest::work(None, work, move |recorded: Result<_, _>| {
            let recorded = recorded.map(|()| in_conflict);
            let recorded = recorded.map_err(|error: Arc<StoreError>| error.to_string());
            out.lock().unwrap().push(Out::Probed(number, recorded));
        });
        self.queue_store(id, request);
    }

    /// Records that other hosts use these addresses, once the store has recorded the answers to the probes. Addresses
    /// that the store has assigned since the probe are left out, because their ADDs relied on an earlier probe.
    pub(super) fn found_in_conflict(&mut self, id: usize, addresses: &[Addr]) {
        let host = self.host_mut(id);
        for addr in addresses.iter().filter(|it| !host.given.contains_key(it)) {
            host.clean.remove(addr);
        }
    }

    /// Checks each address that was assigned since the last check. It must have been probed since it was last free, and
    /// nobody may have answered. `before` has the addresses that were assigned at the last check.
    pub(super) fn check_probed(
        &mut self,
        id: usize,
        snapshot: &Snapshot,
        before: &BTreeSet<Addr>,
    ) -> Verdict {
        let host = self.host_mut(id);
        let probing = snapshot.pools.iter().map(|it| &it.terms);
        let probing = probing.filter(|it| it.probes_conflicts);
        let probing: BTreeSet<String> = probing.map(|it| it.name.clone()).collect();
        // Perhaps the pool began to require probes only after the assignment. So an address counts only if its pool
        // required probes at the last check, too.
        let since = std::mem::replace(&mut host.probing, probing.clone());
        let mut wrongly = Vec::new();
        for attachment in &snapshot.attachments {
            for given in &attachment.given.addresses {
                let is_new = !before.contains(&given.address) && attachment.order > ADOPTED;
                let was_clean = host.clean.remove(&given.address);
                let has_to = probing.contains(&given.pool) && since.contains(&given.pool);
                if is_new && has_to && !was_clean {
                    wrongly.push(given.address);
                }
            }
        }
        let Some(addr) = wrongly.first() else {
            return Ok(());
        };
        let text = format!("agent {id} assigns {addr}, whose last probe was not clean");
        wrong("probed before use", text, [addr.to_string()])
    }
}
