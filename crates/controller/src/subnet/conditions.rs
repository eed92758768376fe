//! The conditions that the controller writes in the status of a NodeSubnet. They report whether entries of the agent's
//! status are invalid, whether pools are left out, and whether the API server keeps rejecting writes for the node.

use super::Subnets;
use crate::Context;
use crate::allocations::AllocationState;
use crate::cluster::agent_report::ACCEPTED;
use crate::cluster::objects::{Node, Subnet, SubnetCondition, Text};
use crate::failing_calls::{ObjectCall, WRITE_ADVICE};
use crate::report::POOLS_LEFT_OUT;
use cadastre_core::mutation::Mutation;

/// The condition that reports writes for the node that the API server keeps rejecting.
pub(super) const WRITES_REJECTED: &str = "WritesRejected";

/// Whether there is a problem, and the message of the condition. If `None`, this is unknown, and the condition stays as
/// it is.
type Finding = Option<(bool, String)>;

impl Subnets {
    /// Returns the conditions that a NodeSubnet should have: conditions about present problems, conditions about
    /// problems that are over, and the unchanged conditions of other writers.
    pub(super) fn conditions(&self, subnet: &Subnet, cx: &Context) -> Vec<SubnetCondition> {
        let is = subnet.report.as_ref().map(|it| it.conditions.to_vec());
        let is = is.filter(|_| !Mutation::OthersConditionsWiped.is_on());
        let mut all = is.unwrap_or_default();
        let node = cx.cache.nodes.get(&subnet.name);
        let left_out = node.and_then(|node| self.left_out.get(&node.uid).cloned());
        let pools = (
            left_out.is_some(),
            left_out.unwrap_or("all pools that serve the node are listed".to_owned()),
        );
        let writes = node.and_then(|node| self.rejections(node, cx));
        let invalid = invalid_entries(subnet, cx);
        // `Accepted` is the only condition whose status is False if there is a problem.
        let reasons = ["PartlyRefused", "Understood"];
        set_condition(&mut all, ACCEPTED, invalid, "False", reasons);
        let reasons = ["TooMany", "AllListed"];
        set_condition(&mut all, POOLS_LEFT_OUT, Some(pools), "True", reasons);
        set_condition(
            &mut all,
            WRITES_REJECTED,
            writes,
            "True",
            ["Refused", "Taken"],
        );
        all
    }

    /// Returns whether the API server keeps rejecting writes for a node. Returns `None` until this leader has got its
    /// first answer about a write for the node, and while a write has failed only a few times.
    fn rejections(&self, node: &Node, cx: &Context) -> Finding {
        if let Some(why) = rejected_write(node, cx.allocations) {
            return Some((true, why));
        }
        let has_outcome = self.with_outcome.contains(&node.name)
            || Mutation::RejectionsOfPredecessorForgotten.is_on();
        let refusals = &cx.allocations.refusals;
        let mut writes = writes_for(node, cx.allocations);
        let is_failing = writes.any(|(_, call)| refusals.is_failing(&call));
        let accepted = || (false, "the API server takes what is written".to_owned());
        (has_outcome && !is_failing).then(accepted)
    }
}

/// Returns whether the agent's status has invalid entries or entries about other nodes, with a text that names these
/// entries. Returns `None` if the agent has written no status, or if the Node is gone.
fn invalid_entries(subnet: &Subnet, cx: &Context) -> Finding {
    let report = subnet.report.as_ref()?;
    let node = cx.cache.nodes.get(&subnet.name)?;
    if report.node_uid.is_empty() && report.refusals == 0 {
        return None;
    }
    if report.node_uid != node.uid && !report.node_uid.is_empty() {
        let text = format!(
            "it is of node UID {}, this node is {}: none of it is read",
            report.node_uid, node.uid
        );
        return Some((true, text));
    }
    let mut wrong = report.refused.clone();
    let mut count = report.refusals;
    let orphans = report.orphans.iter().map(|(addr, _)| addr);
    let mut strange = orphans.filter(|addr| !cx.allocations.is_in_range_of(node, **addr));
    if let Some(addr) = strange.next() {
        let all = 1 + strange.count() as u64;
        count += all;
        wrong.push(format!(
            "orphans: {addr} is in no block and no podCIDR of this node ({all} such)"
        ));
    }
    let pools = report.demand.iter().map(|(name, _)| name);
    let mut unknown = pools.filter(|name| {
        let pool = cx.allocations.pools.get(*name);
        pool.is_none_or(|pool| !pool.selects(node))
    });
    if let Some(pool) = unknown.next() {
        let all = 1 + unknown.count() as u64;
        count += all;
        wrong.push(format!(
            "pools: \"{pool}\" does not exist or does not select this node ({all} such)"
        ));
    }
    if count == 0 {
        return Some((false, "all of the status is understood".to_owned()));
    }
    let wrong = wrong.join("; ");
    let text = format!("{count} entries of the status are left out, all others are used: {wrong}");
    Some((true, text))
}

/// Sets the condition `kind` in the list. A condition that reports no problem is set only if the list already has a
/// condition of this kind. `reasons` has two elements: the reason for a condition that reports a problem, and the
/// reason for one that reports no problem.
fn set_condition(
    all: &mut Vec<SubnetCondition>,
    kind: &str,
    finding: Finding,
    status_of_problem: &str,
    reasons: [&str; 2],
) {
    let before = all.iter_mut().find(|it| &*it.kind == kind);
    let Some((is_problem, message)) = finding else {
        return;
    };
    if !is_problem && before.is_none() {
        return;
    }
    let is_true = is_problem == (status_of_problem == "True");
    let status: Text = if is_true { "True" } else { "False" }.into();
    let same = before.as_ref().filter(|it| it.status == status);
    let condition = SubnetCondition {
        kind: kind.into(),
        reason: reasons[usize::from(!is_problem)].into(),
        message,
        since: same.map(|it| it.since.clone()).unwrap_or_default(),
        generation: None,
        status,
    };
    match before {
        Some(before) => *before = condition,
        None => all.push(condition),
    }
}

/// Returns all writes that the controller could make for a node, each with a description.
fn writes_for<'a>(
    node: &'a Node,
    allocations: &'a AllocationState,
) -> impl Iterator<Item = (String, ObjectCall)> + use<'a> {
    let of_blocks = allocations.blocks.of(&node.uid).map(|entry| {
        let what = format!("IPAMBlock {}", entry.cidr);
        (what, ObjectCall::WriteBlock(entry.cidr))
    });
    let pod_cidrs = ObjectCall::AssignPodCidrs(node.uid.clone());
    let spec = ObjectCall::WriteSubnet(node.name.clone());
    let of_node = [
        ("podCIDRs for the node".to_owned(), pod_cidrs),
        ("the spec of the NodeSubnet".to_owned(), spec),
    ];
    of_node.into_iter().chain(of_blocks)
}

/// Returns a text about a write for the node that the API server keeps rejecting. Returns `None` if there is no such
/// write.
pub(super) fn rejected_write(node: &Node, allocations: &AllocationState) -> Option<String> {
    let refusals = &allocations.refusals;
    let writes = writes_for(node, allocations);
    let mut rejected = writes.filter_map(|(what, call)| Some((what, refusals.why(&call)?)));
    let (what, why) = rejected.next()?;
    let more = match rejected.count() {
        0 => String::new(),
        count => format!(" ({count} more are refused)"),
    };
    Some(format!(
        "the API server does not take {what}: {why}{more}: {WRITE_ADVICE}"
    ))
}
