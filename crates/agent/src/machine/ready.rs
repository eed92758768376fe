//! Decides whether the node is ready for pods, and reports pods that were refused.

use std::time::Duration;

use tracing::{info, warn};

use super::{AgentEffect, AgentMachine, Observed, STARTING};
use crate::files::others::PodNetworkOwner;
use crate::snapshot::assigns;
use cadastre_api::SERVED_BY_OTHERS;

/// The shortest pause between events about refused pods.
const TURNED_AWAY_PAUSE: Duration = Duration::from_secs(60);
/// The reason of the events that report refused pods.
const PODS_UNKNOWN: &str = "PodsUnknown";
/// The reason of the event about a disk to which the node's ranges cannot be written.
const RANGES_NOT_RECORDED: &str = "RangesNotRecorded";

impl AgentMachine {
    /// Reports readiness if it has changed. While files or masquerade rules are being written, the last report stays.
    pub(super) fn publish_readiness(&mut self, effects: &mut Vec<AgentEffect>) {
        let ready = self.readiness();
        if ready.is_some() && ready != self.ready {
            self.ready.clone_from(&ready);
            effects.extend(ready.map(|(is_ready, why)| AgentEffect::Ready(is_ready, why)));
        }
    }

    /// Returns whether the node is ready, and why; `None` while the readiness cannot be decided.
    fn readiness(&self) -> Option<(bool, String)> {
        let not = |why: &str| Some((false, why.to_owned()));
        if !self.is_open {
            let why = self.store_problem.as_str();
            return not(if why.is_empty() { STARTING } else { why });
        }
        if let Some(trouble) = &self.serving.trouble {
            return not(trouble);
        }
        let Some(snapshot) = &self.snapshot else {
            return not("starting");
        };
        let files = self.files.settled()?;
        let masquerade_error = match &self.masquerade {
            Some(masquerade) if masquerade.is_writing() => return None,
            Some(masquerade) => masquerade.settled().and_then(Option::as_ref),
            None => None,
        };
        let can_assign = snapshot.blocks.iter().any(assigns);
        // A node without a range must be ready if it gets a block only when a pod comes, because pods come only to a
        // ready node. This is the case if no pool allocates a block before a pod comes. It is also the case if the node
        // has had a range earlier.
        let had_range = files.is_configured || self.has_released;
        let may_ask = self.watched.waits_for_pods() || self.watched.may_ask() && had_range;
        let can_ask = self.subnet_followed && may_ask;
        if !can_assign && !can_ask {
            return not(match (&self.node, &self.subnet) {
                (Observed::Absent, _) => "there is no Node object of this name: see --node-name",
                (_, Observed::Absent) => {
                    "there is no NodeSubnet of this node: see that the controller runs and that a pool serves the node"
                }
                _ if !self.store_problem.is_empty() => &self.store_problem,
                _ if !snapshot.blocks.is_empty() => {
                    "no address can be assigned from this node's blocks: they are recalled, withdrawn or released; see that a pool serves the node"
                }
                _ => "the node has no range to assign addresses from yet",
            });
        }
        // The runtime waits for the CNI configuration, and flannel's CNI plugin needs `subnet.env`. So pods cannot
        // start before both files are written.
        if let Some(why) = &files.unwritten {
            return not(why);
        }
        if let Some(why) = masquerade_error {
            return not(why);
        }
        // If another network serves the node's pods, the agent still counts as ready. Otherwise `helm --wait` would
        // fail on this node.
        if let Some(PodNetworkOwner::Left(names)) = &files.network_owner {
            let says = format!("leaves new pods to {names}: see the condition {SERVED_BY_OTHERS}");
            return Some((true, says));
        }
        let says = if !can_assign {
            "asks for a block when a pod comes"
        } else if self.subnet_followed {
            "gives addresses"
        } else {
            "gives addresses from what was held last: the API server does not answer"
        };
        Some((true, says.to_owned()))
    }

    /// Returns the earliest time for the next event about refused pods. Returns `None` if no pod was refused, or if no
    /// earlier event delays the next one.
    pub(super) fn report_turned_away_at(&self) -> Option<Duration> {
        self.serving.turned_away.as_ref()?;
        Some(self.turned_away_at? + TURNED_AWAY_PAUSE)
    }

    /// Emits an event when changes of the node's ranges can no longer be recorded on the disk, and logs the end of this
    /// problem.
    pub(super) fn report_unrecorded(&mut self, effects: &mut Vec<AgentEffect>) {
        let is_reported = self.is_unrecorded_reported;
        match &self.serving.unrecorded {
            Some(problem) if !is_reported && self.node_uid().is_some() => {
                let text = format!(
                    "what this node holds cannot be recorded: {problem}. Until it can, the node gets no further range and releases none; addresses of its ranges are assigned as usual. Check the disk"
                );
                warn!("{text}");
                self.is_unrecorded_reported = true;
                self.emit_node_event(RANGES_NOT_RECORDED, text, effects);
            }
            None if is_reported => {
                self.is_unrecorded_reported = false;
                info!("what this node holds is recorded again");
            }
            _ => {}
        }
    }

    /// Emits an event which reports that pods are refused because the agent does not know them. There is at most one
    /// such event per [`TURNED_AWAY_PAUSE`].
    pub(super) fn report_turned_away(&mut self, now: Duration, effects: &mut Vec<AgentEffect>) {
        if self.report_turned_away_at().is_some_and(|at| at > now) {
            return;
        }
        let Some(pod) = self.serving.turned_away.take() else {
            return;
        };
        self.turned_away_at = Some(now);
        let text = format!(
            "pods are refused an address, and tried again, as nothing is known of them, {pod} the last: an annotation or a label might give them another pool or address. See that the API server can be reached from this node, and that the agent may read pods and namespaces. Pools with unknownPods: Serve give to such pods at once"
        );
        self.emit_node_event(PODS_UNKNOWN, text, effects);
        effects.push(AgentEffect::TurnedAwayReported);
    }
}
