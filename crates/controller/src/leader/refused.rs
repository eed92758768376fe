//! Uses events and conditions to report calls that the API server keeps rejecting.

use super::Leader;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::NodeName;
use crate::cluster::request::{ObjectKind, RequestOutcome};
use crate::failing_calls::{CallReport, ObjectCall, WRITE_ADVICE};
use crate::reconcile::RequestAnswer;
use crate::report::{EventRecord, Regarding, WRITE_ACCEPTED, WRITE_REJECTED};
use crate::{Now, Purpose, ipam_claims, pod_claims};
use cadastre_api::EXHAUSTED_CONDITION;

impl Leader {
    /// Records the outcome of a call. Adds an event if the call keeps failing, or if it has succeeded after it had kept
    /// failing.
    pub(super) fn note(
        &mut self,
        answer: &RequestAnswer,
        cache: &ClusterCache,
        reports: &mut Vec<EventRecord>,
        now: Now,
    ) {
        let Some(call) = ObjectCall::of(answer.purpose, answer.wrote) else {
            return;
        };
        let (purpose, outcome) = (answer.purpose, answer.outcome);
        // If the Node in the answer has another UID, the watch is behind. The Node is read again until the cache has the
        // new UID, too.
        let is_of_another = match (purpose, outcome) {
            (Purpose::Assign { uid, .. }, RequestOutcome::Node(node)) => node.uid != *uid,
            _ => false,
        };
        let kept = answer.kept && !is_of_another;
        let refusals = &mut self.allocations.refusals;
        let before = refusals.why(&call).is_some();
        let report = refusals.note(&call, outcome, kept, now.mono);
        let is_refused = refusals.why(&call).is_some();
        let is_settled = is_refused || !refusals.is_failing(&call);
        // Conditions of pools and NodeSubnets report calls that keep failing, so these conditions have to be computed
        // again.
        if before != is_refused {
            self.loops.pools.mark();
        }
        if let Some(name) = self.node_of(&call, purpose) {
            if before != is_refused {
                self.loops.subnets.queue.add(name.clone());
            }
            if is_settled {
                self.loops.subnets.note_outcome(name);
            }
        }
        let report = report.zip(self.subject(&call, purpose, cache));
        let Some((report, (about, what))) = report else {
            return;
        };
        reports.push(match report {
            CallReport::Refused(why) => {
                let note = format!(
                    "the API server does not take {what}: {why}: {WRITE_ADVICE}; it is tried again every half minute"
                );
                EventRecord::warning(about, WRITE_REJECTED, note)
            }
            CallReport::Accepted => {
                let note = format!("the API server has taken {what}");
                EventRecord::info(about, WRITE_ACCEPTED, note)
            }
        });
    }

    /// Returns the name of the node whose NodeSubnet reports that the call keeps failing. Returns `None` if no
    /// NodeSubnet reports this.
    fn node_of(&self, call: &ObjectCall, purpose: &Purpose) -> Option<NodeName> {
        match (call, purpose) {
            (ObjectCall::AssignPodCidrs(_), Purpose::Assign { name, .. })
            | (ObjectCall::WriteSubnet(name), _) => Some(name.clone()),
            (ObjectCall::WriteBlock(cidr), _) => {
                let entry = self.allocations.blocks.get(cidr)?;
                Some(entry.owner.name.clone())
            }
            _ => None,
        }
    }

    /// Returns the object to which the event about a failing call is attached, and a description of the written object.
    /// Returns `None` for calls whose failures no event reports. For example, if a pool's finalizers cannot be written,
    /// a condition reports this.
    fn subject(
        &self,
        call: &ObjectCall,
        purpose: &Purpose,
        cache: &ClusterCache,
    ) -> Option<(Regarding, String)> {
        let node = |name: &NodeName| cache.nodes.get(name).map(|node| Regarding::node(node));
        Some(match (call, purpose) {
            (ObjectCall::AssignPodCidrs(_), Purpose::Assign { name, uid }) => {
                let about = Regarding::new(ObjectKind::Node, name.clone(), uid);
                (about, "podCIDRs for this node".to_owned())
            }
            (ObjectCall::WriteSubnet(name), _) => {
                (node(name)?, "the spec of its NodeSubnet".to_owned())
            }
            (ObjectCall::SetSubnetConditions(name), _) => {
                (node(name)?, "the conditions of its NodeSubnet".to_owned())
            }
            (ObjectCall::WriteRoutes(kind, name), _) => {
                (node(name)?, format!("its {}", kind.name()))
            }
            (ObjectCall::SetTaints(name), _) => (node(name)?, "the taints of this node".to_owned()),
            (ObjectCall::EvictPod(_), Purpose::Evict { name, .. }) => {
                let what = "the eviction of a pod for which this node has no address".to_owned();
                (node(name)?, what)
            }
            (ObjectCall::SetExhausted(name), _) => {
                let what = format!("the condition {EXHAUSTED_CONDITION} of this node");
                (node(name)?, what)
            }
            (ObjectCall::WriteBlock(cidr), _) => {
                let owner = &self.allocations.blocks.get(cidr)?.owner;
                let whose = if owner.quarantined {
                    " (the node is gone)"
                } else {
                    ""
                };
                let what = format!("IPAMBlock {cidr} of this node{whose}");
                (
                    Regarding::new(ObjectKind::Node, owner.name.clone(), &owner.uid),
                    what,
                )
            }
            (ObjectCall::SetPoolStatus(name), _) => {
                let about =
                    Regarding::new(ObjectKind::Pool, name.clone(), &cache.pools.get(name)?.uid);
                (about, "the status of this pool".to_owned())
            }
            (ObjectCall::CreateClaim(name), _) => {
                let pod =
                    pod_claims::pod_of(name, cache).or_else(|| ipam_claims::pod_of(name, cache))?;
                let what = format!("IPClaim {name}, which this pod needs for its address");
                (pod_claims::regarding(pod), what)
            }
            (ObjectCall::FillIpamClaim(name), _) => {
                let claim = cache.claims.get(name)?;
                let about = Regarding::new(ObjectKind::Claim, name.clone(), &claim.uid);
                (about, format!("the status of IPAMClaim {name}"))
            }
            _ => return None,
        })
    }
}
