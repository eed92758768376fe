//! The NodeSubnet loop. It writes which ranges a node has, and which ranges of earlier nodes of that name are in
//! quarantine. The node's agent and the next leader read that.
//!
//! The loop is level-triggered: it computes the spec from the Node and the ledger, and writes it whenever the present
//! one differs, for whatever reason. No podCIDR waits for this loop.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::allocations::AllocationState;
use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::pools::{PoolPhase, PoolState};
use super::queue::{Load, Queue};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::report::{EventRecord, POOLS_LEFT_OUT, Regarding};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::agent_report::{ACCEPTED, MOST_CONDITIONS};
use crate::cluster::cache::ClusterCache;
use crate::cluster::cache::report_of;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::objects::{Node, Subnet, SubnetCondition, Text};
use crate::cluster::request::{ApiRequest, KnownObject, ObjectKind, ObjectSpec};
use cadastre_api::{
    AllocatedBlock, AllocationMode, AssignmentMode, MOST_POOLS, NodePool, NodeSubnetSpec,
    QuarantinedNode,
};
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;

/// The pools in a NodeSubnet may take at most this many bytes of JSON, because the rest of the object needs room in
/// etcd, too.
const MOST_BYTES_OF_POOLS: usize = 256 << 10;

/// How long the record of a node's new podCIDRs may wait while podCIDRs for other nodes are written. A node may be
/// deleted before its record is written. Then only processes that saw the deletion know that its ranges must be
/// quarantined.
const RECORD_WAITS: Duration = Duration::from_secs(5);

/// The condition that reports writes for the node that the API server keeps rejecting.
const WRITES_REJECTED: &str = "WritesRejected";

/// State of the NodeSubnet loop.
#[derive(Debug, Default)]
pub struct Subnets {
    /// Names of NodeSubnets to process first, because nodes wait for the blocks in them
    pub urgent: Queue<NodeName>,
    /// Names of all other NodeSubnets to process
    pub queue: Queue<NodeName>,
    /// Names of nodes that got podCIDRs, with the monotonic time, oldest first
    unrecorded: VecDeque<(Duration, NodeName)>,
    /// Conditions whose write is in flight, by the name of the NodeSubnet
    answering: BTreeMap<NodeName, Vec<SubnetCondition>>,
    /// Requests for specs by the name of the NodeSubnet, each with the spec if it writes one
    requests: InFlight<NodeName, Option<NodeSubnetSpec>>,
    /// Nodes (by UID) whose NodeSubnet has no room for all pools that select them, with the reported text
    cut: BTreeMap<ObjectUid, String>,
    /// Names of nodes for which, in this term, a write has succeeded or has failed often enough to count as lasting
    heard: BTreeSet<NodeName>,
    /// Names of nodes with podCIDRs that their agents must not use, because other nodes use addresses in them
    withheld: BTreeSet<NodeName>,
}

impl Loop for Subnets {
    fn load(&self) -> Load {
        self.urgent.load() + self.queue.load()
    }

    /// Returns the next request for a NodeSubnet whose spec or conditions have to change.
    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        let look = |it: &mut Self, name: &NodeName, cx: &mut Context| match it.look(name, false, cx)
        {
            KeyDecision::Done => it.answer(name, cx),
            // The write of the spec has to wait, perhaps because the API server keeps rejecting it. The conditions
            // report that, so they must not wait for it.
            KeyDecision::Later(at) => {
                it.queue.add_at(name.clone(), at);
                it.answer(name, cx)
            }
            found @ KeyDecision::Send(..) => found,
        };
        work_off(self, |it| &mut it.queue, look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        let mut noted = AffectedLoops::default();
        if let Purpose::Subnet { name, .. } | Purpose::Answer { name } = answer.purpose {
            if matches!(answer.purpose, Purpose::Subnet { .. }) {
                self.requests.answered(name, answer);
            } else {
                self.answering.remove(name);
                self.requests.note(name, answer);
            }
            // The node may have changed since the request was sent, so its NodeSubnet is processed again even after
            // success.
            noted.subnets.push(name.clone());
        }
        noted
    }
}

impl Subnets {
    /// Returns the next request for a NodeSubnet whose node waits for it.
    pub(crate) fn next_urgent(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        let look = |it: &mut Self, name: &NodeName, cx: &mut Context| it.look(name, true, cx);
        work_off(self, |it| &mut it.urgent, look, cx)
    }

    /// Queues the NodeSubnets with withheld podCIDRs, because a range became free and they may no longer have to be
    /// withheld.
    pub fn requeue(&mut self) {
        for name in &self.withheld {
            self.queue.add(name.clone());
        }
    }

    /// Queues the NodeSubnet of a node that got podCIDRs, which have to be recorded in time.
    pub(crate) fn has_podcidrs(&mut self, name: &NodeName, now: Duration) {
        self.unrecorded.push_back((now, name.clone()));
        self.queue.add(name.clone());
    }

    /// Returns the write of the next record that has waited for [`RECORD_WAITS`].
    pub(crate) fn next_overdue(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        while let Some((at, name)) = self.unrecorded.front().cloned()
            && at + RECORD_WAITS <= cx.now.mono
        {
            self.unrecorded.pop_front();
            match self.look(&name, true, cx) {
                KeyDecision::Done => {}
                KeyDecision::Later(at) => self.urgent.add_at(name, at),
                KeyDecision::Send(request, purpose) => return Some((request, purpose)),
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
            self.requests.send(name.clone(), None);
            let request = ApiRequest::Read(ObjectKind::Subnet, name.clone().into());
            let urgent = false;
            return KeyDecision::Send(request, Purpose::Subnet { name, urgent });
        }
        let is = cx.cache.subnets.get(&name).map(AsRef::as_ref);
        let wanted = wanted(&name, is, cx.cache, cx.allocations);
        if let Some(node) = cx.cache.nodes.get(&name) {
            self.report_left_out(node, wanted.as_ref(), cx.allocations, cx.reports);
        }
        let mut listed = wanted.iter().flat_map(|it| &it.pod_cidrs);
        if listed.any(|it| it.withheld) {
            self.withheld.insert(name.clone());
        } else {
            self.withheld.remove(&name);
        }
        let Some(request) = difference(&name, wanted, is) else {
            return KeyDecision::Done;
        };
        let spec = match &request {
            ApiRequest::Create(_, ObjectSpec::Subnet(spec))
            | ApiRequest::Replace(_, ObjectSpec::Subnet(spec)) => Some(spec.clone()),
            _ => None,
        };
        self.requests.send(name.clone(), spec);
        KeyDecision::Send(request, Purpose::Subnet { name, urgent })
    }

    /// Reports by an event, once, that a NodeSubnet has no room for all pools that select the node.
    fn report_left_out(
        &mut self,
        node: &Node,
        spec: Option<&NodeSubnetSpec>,
        allocations: &AllocationState,
        reports: &mut Vec<EventRecord>,
    ) {
        let Some(spec) = spec else { return };
        let told = spec.pools.iter().filter(|pool| pool.is_askable()).count();
        let serve = allocations.pools.block_pools(node).len();
        if serve <= told {
            self.cut.remove(&node.uid);
        } else {
            let note = format!(
                "{serve} pools select this node, and its NodeSubnet has room for {told} of them (at most {MOST_POOLS}, and {MOST_BYTES_OF_POOLS} bytes): pods on it get nothing of the others, which come last by priority: narrow the nodeSelectors of pools"
            );
            if self.cut.insert(node.uid.clone(), note.clone()).is_none() {
                reports.push(EventRecord::warning(
                    Regarding::node(node),
                    POOLS_LEFT_OUT,
                    note,
                ));
            }
        }
    }

    /// Removes all records of a Node whose UID is gone.
    pub fn gone(&mut self, node: &Node) {
        self.cut.remove(&node.uid);
        self.heard.remove(&node.name);
    }

    /// Records that a write for the node has succeeded, or has failed often enough to count as lasting. So the
    /// NodeSubnet's condition about rejected writes can be set.
    pub(crate) fn heard_of(&mut self, name: NodeName) {
        if self.heard.insert(name.clone()) {
            self.queue.add(name);
        }
    }

    /// Returns the write of the conditions, if they have to change: whether entries of the agent's status are invalid,
    /// whether pools are left out, and whether the API server keeps rejecting writes.
    fn answer(&mut self, name: &NodeName, cx: &Context) -> KeyDecision {
        // The write of the conditions needs the object's present version, which a write in flight would change. So the
        // conditions have to wait for the answer.
        let is_open = self.is_open(name) || self.answering.contains_key(name);
        let Some(subnet) = cx.cache.subnets.get(name).filter(|_| !is_open) else {
            return KeyDecision::Done;
        };
        let conditions = self.conditions(subnet, cx);
        let is = subnet.report.as_ref().map(|it| &*it.conditions);
        if is.unwrap_or_default() == conditions || conditions.len() > MOST_CONDITIONS {
            return KeyDecision::Done;
        }
        if let Some(at) = cx.paused(&ObjectCall::SetSubnetConditions(name.clone())) {
            return KeyDecision::Later(at);
        }
        self.answering.insert(name.clone(), conditions.clone());
        let request = ApiRequest::SetSubnetConditions(KnownObject::of(&**subnet), conditions);
        KeyDecision::Send(request, Purpose::Answer { name: name.clone() })
    }

    /// Returns the conditions that a NodeSubnet should have. These are the conditions about present problems, those
    /// about earlier problems that are over by now, and the conditions of other writers, unchanged.
    fn conditions(&self, subnet: &Subnet, cx: &Context) -> Vec<SubnetCondition> {
        let is = subnet.report.as_ref().map(|it| it.conditions.to_vec());
        let is = is.filter(|_| !Mutation::OthersConditionsWiped.is_on());
        let mut all = is.unwrap_or_default();
        let accepted = acceptance(subnet, cx);
        let node = cx.cache.nodes.get(&subnet.name);
        let cut = node.and_then(|node| self.cut.get(&node.uid).cloned());
        let pools = (
            cut.is_some(),
            cut.unwrap_or("all pools that serve the node are listed".to_owned()),
        );
        let writes = node.and_then(|node| self.writes(node, cx));
        set_condition(
            &mut all,
            ACCEPTED,
            accepted,
            false,
            ("PartlyRefused", "Understood"),
        );
        set_condition(
            &mut all,
            POOLS_LEFT_OUT,
            Some(pools),
            true,
            ("TooMany", "AllListed"),
        );
        set_condition(
            &mut all,
            WRITES_REJECTED,
            writes,
            true,
            ("Refused", "Taken"),
        );
        all
    }

    /// Returns whether the API server keeps rejecting writes for a node, with a text. Returns `None` while that is
    /// unknown: before the first answer to this leader, and while a write has failed only a few times.
    fn writes(&self, node: &Node, cx: &Context) -> Option<(bool, String)> {
        if let Some(why) = refused(node, cx.allocations) {
            return Some((true, why));
        }
        let refusals = &cx.allocations.refusals;
        let has_heard =
            self.heard.contains(&node.name) || Mutation::RejectionsOfPredecessorForgotten.is_on();
        let is_failing =
            writes_for(node, cx.allocations).any(|(_, call)| refusals.is_failing(&call));
        let taken = || (false, "the API server takes what is written".to_owned());
        (has_heard && !is_failing).then(taken)
    }

    /// Returns whether a write of the NodeSubnet of that name may still take effect.
    pub fn is_open(&self, name: &NodeName) -> bool {
        self.requests.is_open(name)
    }

    /// Returns whether the API server has stored the whole spec that was just written, as `is` shows.
    pub fn is_kept(&self, is: &Subnet) -> bool {
        let written = self.requests.written(&is.name).and_then(Option::as_ref);
        written.is_none_or(|written| is.spec.as_ref() == Ok(written))
    }

    /// Returns whether the API server has stored all conditions that were just written, as `is` shows.
    pub(crate) fn are_conditions_kept(&self, is: &Subnet) -> bool {
        let Some(written) = self.answering.get(&is.name) else {
            return true;
        };
        let kept = is.report.as_ref().map(|it| &*it.conditions);
        let kept = kept.unwrap_or_default();
        kept.len() == written.len() && kept.iter().zip(written).all(|(a, b)| a.is_same_as(b))
    }
}

/// Returns the spec that the NodeSubnet should have, or `None` if the NodeSubnet should not exist.
fn wanted(
    name: &NodeName,
    is: Option<&Subnet>,
    cache: &ClusterCache,
    allocations: &AllocationState,
) -> Option<NodeSubnetSpec> {
    let node = cache.nodes.get(name);
    let report = node.and_then(|node| report_of(node, cache));
    let blocks = node
        .map(|node| allocations.listed_blocks(&node.uid, report))
        .unwrap_or_default();
    let suspects = node
        .map(|node| allocations.leak_candidates_of(&node.uid, report))
        .unwrap_or_default();
    // A NodeSubnet is needed even if the pool allocates nothing now: the agent may have blocks of the pool, and a
    // block's creation by an earlier leader may still be in flight.
    let gives_blocks = |pool: &PoolState| {
        let is_valid = !matches!(pool.phase, PoolPhase::Invalid(_));
        is_valid && pool.allocation_mode == AllocationMode::Blocks
    };
    let may_ask = node.is_some_and(|node| {
        let begun = |pool: &&PoolState| gives_blocks(pool) && pool.phase != PoolPhase::Starting;
        let mut pools = allocations.pools.iter().filter(begun);
        pools.any(|pool| pool.selects(node))
    });
    let may_speak = allocations.in_agent_grace && allocations.pools.iter().any(gives_blocks);
    let pools = node
        .map(|node| pools(node, &blocks, is, allocations))
        .unwrap_or_default();
    // A node without any pool runs no agent of Cadastre, so nobody needs the ranges.
    let pod_ranges = if pools.is_empty() {
        Vec::new()
    } else {
        allocations.pools.pod_ranges().to_vec()
    };
    let previous: Vec<QuarantinedNode> = allocations
        .quarantined_of(name)
        .filter(|(_, rest)| !rest.released)
        .map(|((_, uid), rest)| QuarantinedNode {
            node_uid: uid.to_string(),
            provider_id: rest.machine.provider_id.as_deref().map(str::to_owned),
            machine_id: rest.machine.machine_id.as_deref().map(str::to_owned),
            pod_cidrs: allocations.allocated_ranges(&rest.ranges),
            until: Time(rest.until_wall),
        })
        .collect();
    let pod_cidrs = node
        .map(|node| allocations.listed_pod_cidrs(node, is))
        .unwrap_or_default();
    let nothing = pod_cidrs.is_empty() && previous.is_empty() && blocks.is_empty();
    // The NodeSubnet of a live node is never deleted. So a block that takes effect late, by a write of an earlier
    // leader, can be listed there.
    let stays = node.is_some()
        && (is.is_some() || may_ask || may_speak)
        && !Mutation::EmptySubnetDeleted.is_on();
    if nothing && !stays {
        return None;
    }
    // While the node's first blocks are being created, the NodeSubnet is not created yet, so that one write with the
    // blocks suffices. It is needed at once in two cases: the agent has to report after a gap, or the API server
    // rejects the blocks, which a condition must report.
    let coming = node.is_some_and(|node| {
        allocations.blocks.has(&node.uid) && refused(node, allocations).is_none()
    });
    if nothing && is.is_none() && coming && !allocations.in_agent_grace {
        return None;
    }
    let text = |text: &Text| text.to_string();
    Some(NodeSubnetSpec {
        node_uid: node.map(|node| node.uid.to_string()),
        provider_id: node.and_then(|node| node.machine.provider_id.as_ref().map(text)),
        machine_id: node.and_then(|node| node.machine.machine_id.as_ref().map(text)),
        pod_cidrs,
        blocks,
        pod_ranges,
        pools,
        leak_candidates: suspects,
        quarantined: previous,
    })
}

/// Returns the pools that a NodeSubnet lists: first the pools that allocate to the node, best first, then other pools
/// of which the node has ranges. If one object has no room for all, the last pools of which the node has no ranges are
/// left out.
fn pools(
    node: &Node,
    blocks: &[AllocatedBlock],
    is: Option<&Subnet>,
    allocations: &AllocationState,
) -> Vec<NodePool> {
    let mut pools: Vec<NodePool> = Vec::new();
    let mut add = |told: Option<&NodePool>, closed| {
        let new = told.filter(|told| !pools.iter().any(|it| it.name == told.name));
        pools.extend(new.map(|told| NodePool {
            retained: closed,
            ..told.clone()
        }));
    };
    for (pool, by_name) in allocations.pools.block_pools(node) {
        let mut told = pool.node_view.clone();
        if by_name {
            told.assignment = AssignmentMode::Manual;
        }
        add(Some(&told), false);
    }
    for range in allocations.pod_cidrs(node) {
        add(
            allocations.pools.of(range).map(|pool| &pool.node_view),
            false,
        );
    }
    for held in blocks {
        let pool = allocations.pools.get(&*held.pool);
        let readable = pool.filter(|pool| !matches!(pool.phase, PoolPhase::Invalid(_)));
        // If the pool is gone or invalid, the settings in the present NodeSubnet stay valid for the node's blocks.
        let told = readable.map(|pool| &pool.node_view).or_else(|| {
            let spec = is?.spec.as_ref().ok()?;
            spec.pools.iter().find(|it| it.name == held.pool)
        });
        add(told, true);
    }
    let of_blocks = blocks.iter().map(|held| held.pool.as_str());
    let ranges = allocations.pod_cidrs(node);
    let of_ranges = ranges.filter_map(|range| allocations.pools.of(range).map(|it| &*it.name));
    let held: BTreeSet<&str> = of_blocks.chain(of_ranges).collect();
    bound(&mut pools, &held);
    pools
}

/// Shortens the list to what one object may contain. The pools in `held`, of which the node has ranges, stay before
/// others do.
fn bound(pools: &mut Vec<NodePool>, held: &BTreeSet<&str>) {
    let is_held = |pool: &NodePool| held.contains(pool.name.as_str());
    let size = |pool: &NodePool| serde_json::to_vec(pool).map_or(0, |it| it.len());
    let of_held = pools.iter().filter(|it| is_held(it));
    let (mut count, mut bytes) = of_held.fold((0, 0), |(n, b), it| (n + 1, b + size(it)));
    let mut is_full = false;
    pools.retain(|pool| {
        if is_held(pool) {
            return true;
        }
        (count, bytes) = (count + 1, bytes + size(pool));
        is_full |= count > MOST_POOLS || bytes > MOST_BYTES_OF_POOLS;
        !is_full
    });
    pools.truncate(MOST_POOLS);
}

/// Checks the agent's status. Returns whether all its entries are valid and about this node, with a text that names
/// those that are not. Returns `None` if the agent has written no status, or if the Node is gone.
fn acceptance(subnet: &Subnet, cx: &Context) -> Option<(bool, String)> {
    let report = subnet.report.as_ref()?;
    let node = cx.cache.nodes.get(&subnet.name)?;
    if report.node_uid.is_empty() && report.refusals == 0 {
        return None;
    }
    let mut wrong = report.refused.clone();
    let mut count = report.refusals;
    if report.node_uid != node.uid && !report.node_uid.is_empty() {
        let text = format!(
            "it is of node UID {}, this node is {}: none of it is read",
            report.node_uid, node.uid
        );
        return Some((false, text));
    }
    let blocks = &cx.allocations.blocks;
    let own = |addr: &Addr| {
        let mut of_node = blocks.of(&node.uid).map(|entry| entry.cidr);
        of_node.any(|cidr| cidr.contains_addr(*addr))
            || cx
                .allocations
                .pod_cidrs(node)
                .any(|cidr| cidr.contains_addr(*addr))
    };
    let strange: Vec<&Addr> = report
        .orphans
        .iter()
        .map(|(addr, _)| addr)
        .filter(|a| !own(a))
        .collect();
    if let Some(addr) = strange.first() {
        count += strange.len() as u64;
        wrong.push(format!(
            "orphans: {addr} is in no block and no podCIDR of this node ({} such)",
            strange.len()
        ));
    }
    let unknown = |pool: &&PoolName| {
        !cx.allocations
            .pools
            .get(*pool)
            .is_some_and(|it| it.selects(node))
    };
    let pools: Vec<&PoolName> = report
        .demand
        .iter()
        .map(|(pool, _)| pool)
        .filter(unknown)
        .collect();
    if let Some(pool) = pools.first() {
        count += pools.len() as u64;
        wrong.push(format!(
            "pools: \"{pool}\" does not exist or does not select this node ({} such)",
            pools.len()
        ));
    }
    if count == 0 {
        return Some((true, "all of the status is understood".to_owned()));
    }
    Some((
        false,
        format!(
            "{count} entries of the status are left out, all others are used: {}",
            wrong.join("; ")
        ),
    ))
}

/// Sets the condition `kind` in the list to `said`: whether it is true, and its message. If `said` is `None`, the
/// condition stays as it is. A condition that reports no problem is written only if the list has that condition
/// already. `is_bad` is the value that reports a problem; `reasons` has the reason for a problem, then the reason for
/// none.
fn set_condition(
    all: &mut Vec<SubnetCondition>,
    kind: &str,
    said: Option<(bool, String)>,
    is_bad: bool,
    reasons: (&str, &str),
) {
    let before = all.iter().position(|it| &*it.kind == kind);
    let Some((is_true, message)) = said else {
        return;
    };
    if is_true != is_bad && before.is_none() {
        return;
    }
    let reason = if is_true == is_bad {
        reasons.0
    } else {
        reasons.1
    };
    let mut condition = SubnetCondition {
        kind: kind.into(),
        status: if is_true { "True" } else { "False" }.into(),
        reason: reason.into(),
        message,
        since: Text::default(),
        generation: None,
    };
    match before.and_then(|at| all.get_mut(at)) {
        Some(before) => {
            if before.status == condition.status {
                condition.since = before.since.clone();
            }
            *before = condition;
        }
        None => all.push(condition),
    }
}

/// Returns the writes that the controller may need for a node, each with a description.
fn writes_for<'a>(
    node: &'a Node,
    allocations: &'a AllocationState,
) -> impl Iterator<Item = (String, ObjectCall)> + use<'a> {
    let of_blocks = allocations.blocks.of(&node.uid).map(|entry| {
        let what = format!("IPAMBlock {}", entry.cidr);
        (what, ObjectCall::WriteBlock(entry.cidr))
    });
    let of_node = [
        (
            "podCIDRs for the node".to_owned(),
            ObjectCall::AssignPodCidrs(node.uid.clone()),
        ),
        (
            "the spec of the NodeSubnet".to_owned(),
            ObjectCall::WriteSubnet(node.name.clone()),
        ),
    ];
    of_node.into_iter().chain(of_blocks)
}

/// Returns a text about a write for the node that the API server keeps rejecting, or `None` if there is none.
fn refused(node: &Node, allocations: &AllocationState) -> Option<String> {
    let refusals = &allocations.refusals;
    let mut refused =
        writes_for(node, allocations).filter_map(|(what, call)| Some((what, refusals.why(&call)?)));
    let (what, why) = refused.next()?;
    let more = match refused.count() {
        0 => String::new(),
        count => format!(" ({count} more are refused)"),
    };
    Some(format!(
        "the API server does not take {what}: {why}{more}. Look for an admission policy, a webhook or a quota that forbids it"
    ))
}

fn difference(
    name: &NodeName,
    wanted: Option<NodeSubnetSpec>,
    is: Option<&Subnet>,
) -> Option<ApiRequest> {
    match (wanted, is) {
        (None, None) => None,
        (Some(spec), None) => Some(ApiRequest::Create(
            name.clone().into(),
            ObjectSpec::Subnet(spec),
        )),
        (Some(spec), Some(is)) if !is.is_partial && is.spec.as_ref() == Ok(&spec) => None,
        (Some(spec), Some(is)) => Some(ApiRequest::Replace(
            KnownObject::of(is),
            ObjectSpec::Subnet(spec),
        )),
        (None, Some(is)) => Some(ApiRequest::Delete(ObjectKind::Subnet, KnownObject::of(is))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::Pool;
    use crate::cluster::request::{Rejection, RequestOutcome};
    use crate::demand::Demand;
    use crate::demand::tests::{NOW, list, node, objects, pool, subnet};
    use cadastre_daemon::watch::ObjectEvent;

    /// Returns the pools that the NodeSubnet of a node should list. The node has blocks of pool `p`, which has a
    /// cooldown of its own, and pool `q` selects it, too. `told` are the pools that the NodeSubnet lists now.
    fn pools_told(change: impl FnOnce(&mut Pool), told: &[(&str, bool, u32)]) -> Vec<NodePool> {
        let mut p = pool("p", "10.0.0.0/24");
        p.spec.as_mut().unwrap().terms.cooldown_seconds = 7;
        change(&mut p);
        let mut cache = ClusterCache::default();
        list(&mut cache.pools, vec![p, pool("q", "10.0.1.0/24")]);
        list(&mut cache.nodes, vec![node("n")]);
        let mut subnet = subnet("n", &["10.0.0.16/28", "10.0.0.32/28"], 0);
        subnet.spec.as_mut().unwrap().pools = told
            .iter()
            .map(|(name, closed, cooldown)| {
                let mut told = NodePool {
                    name: (*name).to_owned(),
                    retained: *closed,
                    ..NodePool::default()
                };
                told.terms.cooldown_seconds = *cooldown;
                told
            })
            .collect();
        list(&mut cache.blocks, objects(&subnet));
        list(&mut cache.subnets, vec![subnet.clone()]);
        let (allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        let name = subnet.name.clone();
        wanted(&name, Some(&subnet), &cache, &allocations)
            .unwrap()
            .pools
    }

    #[test]
    fn what_cannot_be_read_in_part_is_written_anew() {
        let is = subnet("n", &["10.0.0.16/28"], 0);
        let spec = is.spec.clone().unwrap();
        let request = |lacks_parts| {
            let is = Subnet {
                is_partial: lacks_parts,
                ..is.clone()
            };
            difference(&is.name, Some(spec.clone()), Some(&is))
        };
        assert!(request(false).is_none());
        assert!(matches!(request(true), Some(ApiRequest::Replace(..))));
    }

    fn brief(pools: &[NodePool]) -> Vec<(&str, bool, u32)> {
        let brief = |it: &'_ NodePool| (it.retained, it.terms.cooldown_seconds);
        let brief = pools.iter().map(|it| (it.name.as_str(), brief(it)));
        brief
            .map(|(name, (closed, cooldown))| (name, closed, cooldown))
            .collect()
    }

    #[test]
    fn a_pool_that_serves_no_more_is_closed_while_the_node_has_blocks_of_it() {
        let serving = pools_told(|_| {}, &[]);
        assert_eq!(brief(&serving), [("p", false, 7), ("q", false, 30)]);
        let disabled = pools_told(|pool| pool.spec.as_mut().unwrap().disabled = true, &[]);
        assert_eq!(brief(&disabled), [("q", false, 30), ("p", true, 7)]);
        let deleted = pools_told(|pool| pool.deleting = true, &[]);
        assert_eq!(brief(&deleted), [("q", false, 30), ("p", true, 7)]);
    }

    #[test]
    fn pools_beyond_what_one_object_holds_are_left_out_and_that_is_told_once() {
        let mut cache = ClusterCache::default();
        let many = (0..1_100).map(|n| {
            pool(
                &format!("p{n:04}"),
                &format!("10.{}.{}.0/28", n >> 8, n & 255),
            )
        });
        list(&mut cache.pools, many.collect());
        list(&mut cache.nodes, vec![node("n")]);
        let mut told = subnet("n", &["10.4.75.0/28"], 0);
        told.spec.as_mut().unwrap().blocks[0].pool = "p1099".to_owned();
        let mut objects = objects(&told);
        objects[0].spec.as_mut().unwrap().pool = "p1099".into();
        list(&mut cache.blocks, objects);
        list(&mut cache.subnets, vec![told]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        let (mut subnets, mut reports) = (Subnets::default(), Vec::new());
        let gone = RequestAnswer::to_write(&Purpose::DefaultPool, &RequestOutcome::Gone);
        for _ in 0..2 {
            subnets.queue.add("n".into());
            let mut cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
            let (request, _) = subnets.next(&mut cx).unwrap();
            let ApiRequest::Replace(_, ObjectSpec::Subnet(spec)) = request else {
                panic!("{request:?}");
            };
            assert!(spec.pools.len() <= MOST_POOLS);
            assert!(
                spec.pools.iter().any(|it| it.name == "p1099"),
                "it has a block of it"
            );
            let size = serde_json::to_vec(&spec).unwrap().len();
            assert!(size < 2 * MOST_BYTES_OF_POOLS, "{size} bytes");
            subnets.requests.answered(&"n".into(), &gone);
        }
        let reasons: Vec<&str> = reports.iter().map(|it| it.reason).collect();
        assert_eq!(reasons, [POOLS_LEFT_OUT]);
        // The condition reports the problem again each time, unlike the event.
        let mut conditions = || {
            let cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
            let subnet = cache.subnets.get("n").unwrap();
            subnets.conditions(subnet, &cx)
        };
        let all = conditions();
        let told = all.iter().find(|it| &*it.kind == POOLS_LEFT_OUT).unwrap();
        assert!(
            told.is_true() && told.message.contains("1100 pools select"),
            "{told:?}"
        );
    }

    #[test]
    fn a_condition_says_what_is_refused_for_good_and_stays_to_say_that_it_is_over() {
        let mut cache = ClusterCache::default();
        let mut of_node = subnet("n", &["10.0.0.16/28"], 0);
        list(&mut cache.nodes, vec![node("n")]);
        list(&mut cache.pools, vec![pool("p", "10.0.0.0/24")]);
        list(&mut cache.blocks, objects(&of_node));
        list(&mut cache.subnets, vec![of_node.clone()]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        let mut subnets = Subnets::default();
        let call = ObjectCall::WriteSubnet("n".into());
        for _ in 0..3 {
            allocations.refusals.note(&call, &no(), true, NOW.mono);
        }
        let told = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].is_true() && &*told[0].kind == WRITES_REJECTED);
        assert!(told[0].message.contains("a policy forbids it"), "{told:?}");
        of_node.report.get_or_insert_default().conditions = told.clone().into();
        let again = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(again, told, "once");
        allocations
            .refusals
            .note(&call, &RequestOutcome::Gone, true, NOW.mono);
        subnets.heard_of("n".into());
        let over = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert!(over.len() == 1 && &*over[0].status == "False", "{over:?}");
    }

    #[test]
    fn what_an_earlier_leader_said_of_refusals_stays_until_a_write_tells() {
        let (of_node, cache, mut allocations) = with_conditions(&[WRITES_REJECTED]);
        let before = of_node.report.as_ref().unwrap().conditions.to_vec();
        let mut subnets = Subnets::default();
        let told = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(told, before, "nothing was tried");
        let call = ObjectCall::WriteSubnet("n".into());
        allocations.refusals.note(&call, &no(), true, NOW.mono);
        let told = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(told, before, "refused, and not for good yet");
        // An earlier write has succeeded, but this one fails, so it is still unknown whether rejections are over.
        subnets.heard_of("n".into());
        let told = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(told, before, "refused, and not for good yet");
        allocations
            .refusals
            .note(&call, &RequestOutcome::Gone, true, NOW.mono);
        let over = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(&*over[0].status, "False");
        subnets.gone(cache.nodes.get("n").unwrap());
        let told = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(told, before, "it is another node's word");
    }

    #[test]
    fn a_node_whose_first_block_is_refused_has_a_subnet_that_can_say_so() {
        let mut cache = ClusterCache::default();
        list(&mut cache.nodes, vec![node("n")]);
        list(&mut cache.pools, vec![pool("p", "10.0.0.0/24")]);
        let (mut allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        allocations.in_agent_grace = false;
        let mut demand = Demand::default();
        demand.add_name(&"n".into(), &cache, &allocations);
        demand.work(&mut Context {
            cache: &cache,
            allocations: &mut allocations,
            reports: &mut Vec::new(),
            now: NOW,
        });
        let cidr = allocations.blocks.of(&"n".into()).next().unwrap().cidr;
        let wanted = |allocations: &AllocationState| wanted(&"n".into(), None, &cache, allocations);
        assert!(wanted(&allocations).is_none(), "one write will do");
        for _ in 0..3 {
            let call = ObjectCall::WriteBlock(cidr);
            allocations.refusals.note(&call, &no(), true, NOW.mono);
        }
        let spec = wanted(&allocations).unwrap();
        assert!(spec.blocks.is_empty() && spec.pools.len() == 1, "{spec:?}");
    }

    #[test]
    fn conditions_of_others_stay_as_they_are() {
        let (of_node, cache, mut allocations) =
            with_conditions(&["OfSomebodyElse", WRITES_REJECTED, "OfAnother"]);
        let before = of_node.report.as_ref().unwrap().conditions.to_vec();
        let mut subnets = Subnets::default();
        subnets.heard_of("n".into());
        let told = conditions(&subnets, &of_node, &cache, &mut allocations);
        assert_eq!(&*told[1].status, "False");
        assert_eq!(
            [&told[0], &told[2]],
            [&before[0], &before[2]],
            "and in their places"
        );
        // Conditions can only be written on the version that was read, so the pending write of the spec comes first.
        let gone = RequestAnswer::to_write(&Purpose::DefaultPool, &RequestOutcome::Gone);
        subnets.queue.add("n".into());
        let mut reports = Vec::new();
        let mut cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
        let (request, _) = subnets.next(&mut cx).unwrap();
        subnets.requests.answered(&"n".into(), &gone);
        assert!(matches!(request, ApiRequest::Replace(..)), "{request:?}");
        let KeyDecision::Send(request, purpose) = subnets.answer(&"n".into(), &cx) else {
            panic!("nothing is answered");
        };
        let written = ApiRequest::SetSubnetConditions(KnownObject::of(&of_node), told);
        assert_eq!(request, written);
        // After a conflict the cached version may be outdated, so the next request is a read.
        let conflict = RequestOutcome::Rejected(Rejection::Guard("modified".to_owned()));
        let noted = subnets.answered(&RequestAnswer::to_write(&purpose, &conflict), &mut cx);
        subnets.queue.add(noted.subnets[0].clone());
        let (request, _) = subnets.next(&mut cx).unwrap();
        assert!(matches!(request, ApiRequest::Read(..)), "{request:?}");
    }

    #[test]
    fn of_a_subnet_with_more_conditions_than_are_read_none_is_written() {
        let many: Vec<String> = (0..=MOST_CONDITIONS).map(|n| format!("Of{n}")).collect();
        let mut kinds: Vec<&str> = many.iter().map(String::as_str).collect();
        kinds[0] = WRITES_REJECTED;
        let answer = |kinds: &[&str]| {
            let (_, cache, mut allocations) = with_conditions(kinds);
            let mut subnets = Subnets::default();
            subnets.heard_of("n".into());
            let mut reports = Vec::new();
            let cx = Context::new(&cache, &mut allocations, &mut reports, NOW);
            matches!(subnets.answer(&"n".into(), &cx), KeyDecision::Send(..))
        };
        assert!(!answer(&kinds) && answer(&kinds[..MOST_CONDITIONS]));
    }

    fn no() -> RequestOutcome {
        RequestOutcome::Rejected(Rejection::Rejected("a policy forbids it".to_owned()))
    }

    /// Returns node `n`, whose NodeSubnet has conditions of these types with status `True`.
    fn with_conditions(kinds: &[&str]) -> (Subnet, ClusterCache, AllocationState) {
        let one = |kind: &&str| SubnetCondition {
            kind: (*kind).into(),
            status: "True".into(),
            reason: "Why".into(),
            message: "so".to_owned(),
            since: "2026-01-02T03:04:05Z".into(),
            generation: Some(3),
        };
        let mut of_node = subnet("n", &["10.0.0.16/28"], 0);
        of_node.report.get_or_insert_default().conditions = kinds.iter().map(one).collect();
        let mut cache = ClusterCache::default();
        list(&mut cache.nodes, vec![node("n")]);
        list(&mut cache.pools, vec![pool("p", "10.0.0.0/24")]);
        list(&mut cache.blocks, objects(&of_node));
        list(&mut cache.subnets, vec![of_node.clone()]);
        let (allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        (of_node, cache, allocations)
    }

    fn conditions(
        subnets: &Subnets,
        of: &Subnet,
        cache: &ClusterCache,
        allocations: &mut AllocationState,
    ) -> Vec<SubnetCondition> {
        let mut reports = Vec::new();
        let cx = Context::new(cache, allocations, &mut reports, NOW);
        subnets.conditions(of, &cx)
    }

    #[test]
    fn of_a_pool_that_cannot_be_read_the_node_keeps_what_it_was_told_last() {
        let spoil = |pool: &mut Pool| pool.spec = Err("no".to_owned());
        let before = pools_told(spoil, &[("p", false, 7)]);
        assert_eq!(brief(&before), [("q", false, 30), ("p", true, 7)]);
        assert_eq!(brief(&pools_told(spoil, &[])), [("q", false, 30)]);
    }

    #[test]
    fn the_node_subnet_of_a_live_node_stays_when_it_says_nothing() {
        let mut cache = ClusterCache::default();
        let empty = subnet("n", &[], 0);
        list(&mut cache.nodes, vec![node("n")]);
        list(&mut cache.subnets, vec![empty.clone()]);
        let (allocations, _) = AllocationState::rebuild(&cache, &[], NOW);
        assert!(wanted(&empty.name, Some(&empty), &cache, &allocations).is_some());
        cache.nodes.change(ObjectEvent::Deleted(node("n")));
        assert!(wanted(&empty.name, Some(&empty), &cache, &allocations).is_none());
    }
}
