//! Checks of leadership: the term of each write, the fence, and the intents. Intents are the allocations of podCIDRs
//! that a leader may have in flight, as the Lease names them.

use std::collections::BTreeMap;

use cadastre_controller::OutgoingRequest;
use cadastre_controller::cluster::intents::WriteIntents;
use cadastre_controller::cluster::lease::{LeaseContent, LeaseRecord, Takeover};
use cadastre_controller::cluster::names::TermId;
use cadastre_controller::cluster::request::{ApiRequest, PodCidrAllocation, RequestId};

use super::api::Api;
use super::checks::{Checks, Verdict, wrong};
use super::clock::Time;
use super::received::Received;
use super::run::RunId;

impl Checks {
    /// Records a write of the Lease. Returns whether the write changes the holder of the Lease.
    pub fn leased(&mut self, holder: Option<&str>, now: Time) -> bool {
        let new = self.lease.0.as_deref() != holder;
        if new {
            self.lease = (holder.map(str::to_owned), now);
        }
        new
    }

    /// Checks and records the intents that a controller wants in the Lease. Each of them is an intent of this
    /// controller, or one that it inherited from an earlier leader.
    pub fn wants(
        &mut self,
        run_id: RunId,
        wanted: &LeaseContent,
        inherited: Option<&WriteIntents>,
        received: &mut Received,
        api: &Api,
        now: Time,
    ) -> Verdict {
        for intent in wanted.intents.iter().flat_map(|all| &all.assignments) {
            if inherited.is_some_and(|all| all.assignments.contains(intent)) {
                let key = (intent.uid.clone(), intent.cidrs.clone());
                let considered_dead = self.considered_dead.get(&key).cloned().unwrap_or_default();
                received
                    .considered_dead
                    .entry(key.clone())
                    .or_insert(considered_dead);
                received.decided.entry(key).or_insert(now);
                let chosen = (intent.name.clone(), intent.cidrs.clone());
                received.chosen.insert(chosen);
                continue;
            }
            let a = PodCidrAllocation {
                name: intent.name.clone(),
                uid: intent.uid.clone(),
                term: None,
                annotated: false,
                cidrs: intent.cidrs.clone(),
            };
            self.chose(run_id, &a, received, api, now)?;
        }
        Ok(())
    }

    /// Checks the intents in a Lease that was written.
    pub fn named(
        &mut self,
        record: &LeaseRecord,
        on_wire: &BTreeMap<(RunId, RequestId), (OutgoingRequest, Time)>,
        api: &Api,
        now: Time,
    ) -> Verdict {
        if let Some(nonce) = record.holder.as_ref().and_then(|it| it.rsplit('_').next()) {
            let term: TermId = format!("{}-{nonce}", record.transitions).into();
            self.last_term = Some(term.clone());
            self.leases.insert(term, (now, record.intents.clone()));
        }
        let before = std::mem::replace(&mut self.intents, record.intents.clone());
        let (Some(before), Some(after)) = (before, &record.intents) else {
            return Ok(());
        };
        for intent in before.assignments.difference(&after.assignments) {
            let same = |out: &&OutgoingRequest| {
                matches!(&out.request, ApiRequest::AssignPodCidrs(a)
                    if (&a.uid, &a.cidrs) == (&intent.uid, &intent.cidrs))
            };
            let node = api.nodes.get(&intent.name);
            let open = node.is_some_and(|node| node.uid == intent.uid && node.is_empty());
            if open && on_wire.values().any(|(out, _)| same(&out)) {
                let text = format!("{intent:?} is on its way and not named any more");
                return wrong("named", text, [intent.name.clone()]);
            }
        }
        Ok(())
    }

    /// Whether the Lease was last written in this term. Returns true if `term` is `None`.
    pub fn is_leading(&self, term: Option<&TermId>) -> bool {
        term.is_none() || term == self.last_term.as_ref()
    }

    /// Checks a write at the moment when it is sent.
    pub fn sent(
        &self,
        run_id: RunId,
        outgoing: &OutgoingRequest,
        decided: Time,
        api: &Api,
    ) -> Verdict {
        let Some((at, intents)) = outgoing.term.as_ref().and_then(|it| self.leases.get(it)) else {
            return Ok(());
        };
        if outgoing.request.is_numbered() && *at < decided {
            let text = format!("{run_id} sends what it decided after the Lease was written last");
            return wrong("leader writes", text, None::<&str>);
        }
        if let (ApiRequest::AssignPodCidrs(a), false) = (&outgoing.request, api.forgets_intents) {
            let mut named = intents.iter().flat_map(|all| &all.assignments);
            // A node that is deleted or has podCIDRs cannot get any podCIDRs. So the Lease need not name the
            // allocation.
            let node = api.nodes.get(&a.name);
            let open = node.is_some_and(|node| node.uid == a.uid && node.is_empty());
            if open && !named.any(|it| (&it.uid, &it.cidrs) == (&a.uid, &a.cidrs)) {
                let text = format!("{run_id} sends what its Lease does not name: {a:?}");
                return wrong("named", text, [a.name.clone()]);
            }
        }
        Ok(())
    }

    pub fn fenced(&self, run_id: RunId, received: &Received, api: &Api) -> Verdict {
        if received.takeover != Some(Takeover::Unclean) || received.has_inherited_intents {
            return Ok(());
        }
        for node in api.nodes.live.values().filter(|node| node.is_empty()) {
            let born = self.born.get(&node.uid).copied().unwrap_or(Time::MAX);
            if born < self.lease.1 && node.term != received.term {
                let (term, name, older) = (&received.term, &node.name, &node.term);
                let text = format!("{run_id} allocates under {term:?}, {name} has {older:?}");
                return wrong("fence", text, [name.clone()]);
            }
        }
        Ok(())
    }
}
