//! The NodeSubnet loop. It writes to the NodeSubnet which ranges a node has, and which ranges of earlier nodes of that
//! name are in quarantine. The node's agent and the next leader read these records.
//!
//! The loop is level-triggered: it computes the spec from the Node and the ledger. Whenever the present spec differs
//! from the computed one, for whatever reason, the loop writes the computed spec. No allocation of a podCIDR waits for
//! this loop.

mod conditions;
mod pace;
mod spec;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use self::pace::AgentPace;
use self::spec::wanted;
use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{EventRecord, POOLS_LEFT_OUT, Regarding};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::agent_report::MOST_CONDITIONS;
use crate::cluster::names::{NodeName, ObjectUid};
use crate::cluster::objects::{Node, Subnet};
use crate::cluster::request::{ApiRequest, KnownObject, ObjectKind, ObjectSpec};
use crate::withdrawals::holds_back;
use cadastre_api::{MOST_POOLS, NodeSubnetSpec};

/// The maximum size of the list of pools in a NodeSubnet, in bytes of JSON. etcd limits the size of an object, and the
/// rest of the NodeSubnet needs room, too.
const MOST_BYTES_OF_POOLS: usize = 256 << 10;

/// When a node gets podCIDRs, its NodeSubnet has to record them. The write of this record waits while other nodes get
/// podCIDRs. After this time it is overdue, and takes its turn among them. The wait is a risk: if the Node is deleted
/// before the record is written, only processes that saw the deletion know that the node's podCIDRs must be quarantined.
const RECORD_WAITS: Duration = Duration::from_secs(5);

/// An overdue record is sent after at most this many requests for nodes that wait for podCIDRs. If overdue records came
/// first, many nodes that join at once would wait twice as long for their podCIDRs.
const PODCIDRS_PER_RECORD: u32 = 3;

/// The queues of the NodeSubnet loop, its requests in flight, and what it has to record or report.
#[derive(Clone, Debug, Default)]
pub struct Subnets {
    /// Names of NodeSubnets to process first, because nodes wait for the blocks in them
    pub urgent: Queue<NodeName>,
    /// Names of NodeSubnets to process after those in `urgent`
    pub queue: Queue<NodeName>,
    /// Names of nodes that got podCIDRs, each with the monotonic time at which it got them, oldest first
    unrecorded: VecDeque<(Duration, NodeName)>,
    /// Number of requests for nodes that wait for podCIDRs since an overdue record was last sent
    since_record: u32,
    /// Names of NodeSubnets with a write of conditions in flight
    conditions_in_flight: BTreeSet<NodeName>,
    /// Names of NodeSubnets with a request in flight that reads or writes the spec
    requests: InFlight<NodeName>,
    /// Nodes (by UID) whose NodeSubnets have no room for all pools that select them. The value is the text for the
    /// event and the condition that report this
    left_out: BTreeMap<ObjectUid, String>,
    /// Names of nodes for which the API server has shown in this term whether it accepts writes. Either a write has
    /// succeeded, or a write has failed so often that it counts as one that keeps failing
    with_outcome: BTreeSet<NodeName>,
    /// Names of nodes with podCIDRs that their agents must not use, because other nodes use addresses in them
    withheld: BTreeSet<NodeName>,
    /// The limit of status writes, from which the interval of each agent is computed
    pace: AgentPace,
    /// Names of NodeSubnets that were written to remove their managed fields. Each is written once for this, because
    /// other programs might add managed fields again
    stripped: BTreeSet<NodeName>,
}

impl Loop for Subnets {
    fn load(&self) -> Load {
        self.urgent.load() + self.queue.load()
    }

    /// Returns the next request for a NodeSubnet whose spec or conditions have to change.
    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        let look = |it: &mut Self, name: &NodeName, cx: &mut Context| match it.look(name, false, cx)
        {
            KeyDecision::Done => it.update_conditions(name, cx),
            // The write of the spec has to wait, perhaps because the API server keeps rejecting it. The conditions
            // report such rejections, so the write of the conditions must not wait for the write of the spec.
            KeyDecision::Later(at) => {
                it.queue.add_at(name.clone(), at);
                it.update_conditions(name, cx)
            }
            found @ KeyDecision::Send(..) => found,
        };
        work_off(self, |it| &mut it.queue, look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        let mut affected = AffectedLoops::default();
        if let Purpose::Subnet { name, .. } | Purpose::Answer { name } = answer.purpose {
            if matches!(answer.purpose, Purpose::Subnet { .. }) {
                self.requests.answered(name, answer);
            } else {
                self.conditions_in_flight.remove(name);
                self.requests.note(name, answer);
            }
            // The node may have changed since the request was sent, so its NodeSubnet is processed again, even if the
            // request succeeded.
            affected.subnets.push(name.clone());
        }
        affected
    }
}

impl Subnets {
    /// Returns the loop of a new leader. `agent_writes` is the number of statuses that all agents together may write in
    /// a minute.
    pub(crate) fn new(agent_writes: u32) -> Self {
        Self {
            pace: AgentPace::new(agent_writes),
            ..Self::default()
        }
    }

    /// Returns the next request for a NodeSubnet in the urgent queue. For each NodeSubnet in this queue, a node waits.
    pub(crate) fn next_urgent(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        let look = |it: &mut Self, name: &NodeName, cx: &mut Context| it.look(name, true, cx);
        work_off(self, |it| &mut it.urgent, look, cx)
    }

    /// Queues the NodeSubnets with withheld podCIDRs. The caller has seen that a range became free, so perhaps these
    /// podCIDRs no longer have to be withheld from the agents.
    pub fn requeue(&mut self) {
        for name in &self.withheld {
            self.queue.add(name.clone());
        }
    }

    /// Queues the NodeSubnet of a node that got podCIDRs. After [`RECORD_WAITS`] its record is overdue.
    pub(crate) fn has_podcidrs(&mut self, name: &NodeName, now: Duration) {
        self.unrecorded.push_back((now, name.clone()));
        self.queue.add(name.clone());
    }

    /// Returns whether the next overdue record comes before nodes that wait for podCIDRs.
    pub(crate) fn is_turn_of_records(&self) -> bool {
        self.since_record >= PODCIDRS_PER_RECORD
    }

    /// Notes that a request for a node that waits for podCIDRs is sent.
    pub(crate) fn podcidrs_sent(&mut self) {
        self.since_record = self.since_record.saturating_add(1);
    }

    /// Returns the next overdue request. A request is overdue if a NodeSubnet has to record podCIDRs, and the record
    /// has waited for [`RECORD_WAITS`].
    pub(crate) fn next_overdue(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        while let Some((at, name)) = self.unrecorded.front().cloned()
            && at + RECORD_WAITS <= cx.now.mono
        {
            self.unrecorded.pop_front();
            match self.look(&name, true, cx) {
                KeyDecision::Done => {}
                KeyDecision::Later(at) => self.urgent.add_at(name, at),
                KeyDecision::Send(request, purpose) => {
                    self.since_record = 0;
                    return Some((request, purpose));
                }
            }
        }
        None
    }

    fn look(&mut self, name: &NodeName, urgent: bool, cx: &mut Context) -> KeyDecision {
        if self.requests.is_sent(name) {
            return KeyDecision::Done;
        }
        let name = name.clone();
        let read = self.requests.is_to_read(&name);
        let call = if read {
            ObjectCall::ReadSubnet(name.clone())
        } else {
            ObjectCall::WriteSubnet(name.clone())
        };
        if let Some(at) = cx.paused(&call) {
            return KeyDecision::Later(at);
        }
        if read {
            self.requests.send(name.clone());
            let request = ApiRequest::Read(ObjectKind::Subnet, name.clone().into());
            let urgent = false;
            return KeyDecision::Send(request, Purpose::Subnet { name, urgent });
        }
        let is = cx.cache.subnets.get(&name).map(AsRef::as_ref);
        let wanted = wanted(&name, is, cx.cache, cx.allocations, self.pace);
        if let Some(node) = cx.cache.nodes.get(&name) {
            self.report_left_out(node, wanted.as_ref(), cx.allocations, cx.reports);
        }
        let mut listed = wanted.iter().flat_map(|it| &it.pod_cidrs);
        if listed.any(|it| it.withheld) {
            self.withheld.insert(name.clone());
        } else {
            self.withheld.remove(&name);
        }
        // A withdrawn range can be returned when nobody uses it any more. Perhaps only an event of another object, such
        // as a pod, announces this. So this NodeSubnet is checked again later.
        let withdrawn = is
            .and_then(|is| is.report.as_ref())
            .map_or(&[][..], |it| &it.withdrawn);
        if wanted
            .as_ref()
            .is_some_and(|spec| holds_back(spec, withdrawn))
        {
            self.queue.add_at(name.clone(), cx.now.next_check());
        }
        let mut difference = difference(&name, wanted.as_ref(), is);
        if let (None, false, Some(spec), Some(is)) = (&difference, urgent, wanted, is) {
            difference = self.strip(spec, is);
        }
        let Some(request) = difference else {
            return KeyDecision::Done;
        };
        self.requests.send(name.clone());
        KeyDecision::Send(request, Purpose::Subnet { name, urgent })
    }

    /// Returns a write of the present spec if the NodeSubnet has managed fields and an agent writes its status. The API
    /// server adds managed fields to each new object, and stores them again with each status. The write removes them
    /// for good (see [`crate::cluster::writer`]).
    fn strip(&mut self, spec: NodeSubnetSpec, is: &Subnet) -> Option<ApiRequest> {
        let is_written_often = is.report.is_some() && is.has_managed_fields;
        if !is_written_often || !self.stripped.insert(is.name.clone()) {
            return None;
        }
        let spec = ObjectSpec::Subnet(spec);
        Some(ApiRequest::Replace(KnownObject::of(is), spec))
    }

    /// Emits an event, once, if a NodeSubnet has no room for all pools that select the node.
    fn report_left_out(
        &mut self,
        node: &Node,
        spec: Option<&NodeSubnetSpec>,
        allocations: &AllocationState,
        reports: &mut Vec<EventRecord>,
    ) {
        let Some(spec) = spec else { return };
        let listed = spec.pools.iter().filter(|pool| pool.is_askable()).count();
        let serve = allocations.pools.block_pools(node).len();
        if serve <= listed {
            self.left_out.remove(&node.uid);
        } else {
            let note = format!(
                "{serve} pools select this node, and its NodeSubnet has room for {listed} of them (at most {MOST_POOLS}, and {MOST_BYTES_OF_POOLS} bytes): pods on it get nothing of the others, which come last by priority: narrow the nodeSelectors of pools"
            );
            let before = self.left_out.insert(node.uid.clone(), note.clone());
            if before.is_none() {
                let about = Regarding::node(node);
                reports.push(EventRecord::warning(about, POOLS_LEFT_OUT, note));
            }
        }
    }

    /// Removes all records of a Node whose UID is gone.
    pub fn gone(&mut self, node: &Node) {
        self.left_out.remove(&node.uid);
        self.with_outcome.remove(&node.name);
        self.stripped.remove(&node.name);
    }

    /// Records that a write for the node has succeeded, or has failed so often that it counts as one that keeps
    /// failing. From then on, the NodeSubnet's condition about rejected writes can be set.
    pub(crate) fn note_outcome(&mut self, name: NodeName) {
        if self.with_outcome.insert(name.clone()) {
            self.queue.add(name);
        }
    }

    /// Returns the write of the conditions, if the conditions have to change.
    fn update_conditions(&mut self, name: &NodeName, cx: &Context) -> KeyDecision {
        // The write of the conditions names the object's present version, which a write in flight would change. So the
        // conditions have to wait for the answer to that write.
        let is_open = self.is_open(name) || self.conditions_in_flight.contains(name);
        let Some(subnet) = cx.cache.subnets.get(name).filter(|_| !is_open) else {
            return KeyDecision::Done;
        };
        let conditions = self.conditions(subnet, cx);
        if subnet.conditions() == conditions || conditions.len() > MOST_CONDITIONS {
            return KeyDecision::Done;
        }
        if let Some(at) = cx.paused(&ObjectCall::SetSubnetConditions(name.clone())) {
            return KeyDecision::Later(at);
        }
        self.conditions_in_flight.insert(name.clone());
        let request = ApiRequest::SetSubnetConditions(KnownObject::of(&**subnet), conditions);
        KeyDecision::Send(request, Purpose::Answer { name: name.clone() })
    }

    /// Returns whether a write of the NodeSubnet `name` can still take effect.
    pub fn is_open(&self, name: &NodeName) -> bool {
        self.requests.is_open(name)
    }
}

/// Returns the request after which the NodeSubnet has the spec `wanted`, or `None` if no request is needed.
fn difference(
    name: &NodeName,
    wanted: Option<&NodeSubnetSpec>,
    is: Option<&Subnet>,
) -> Option<ApiRequest> {
    match (wanted, is) {
        (None, None) => None,
        (Some(spec), None) => {
            let spec = ObjectSpec::Subnet(spec.clone());
            Some(ApiRequest::Create(name.clone().into(), spec))
        }
        (Some(spec), Some(is)) if !is.is_partial && is.spec.as_ref() == Ok(spec) => None,
        (Some(spec), Some(is)) => {
            let spec = ObjectSpec::Subnet(spec.clone());
            Some(ApiRequest::Replace(KnownObject::of(is), spec))
        }
        (None, Some(is)) => Some(ApiRequest::Delete(ObjectKind::Subnet, KnownObject::of(is))),
    }
}
