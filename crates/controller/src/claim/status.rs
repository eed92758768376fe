//! Builds the status of a claim: its addresses, node and pod, and the condition `Ready`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::place::first_on;
use super::{ClaimProblem, WITHDRAWING};
use crate::Context;
use crate::allocations::blocks::BlockEntry;
use crate::allocations::claims::ClaimEntry;
use crate::allocations::whole_seconds;
use crate::cluster::objects::{Claim, PodClaim};
use cadastre_api::IPClaimStatus;

/// Returns the status that the claim should have, according to the ledger and the cached pods.
pub(super) fn status(claim: &Claim, problem: Option<&ClaimProblem>, cx: &Context) -> IPClaimStatus {
    let entry = cx.allocations.claims.get(&claim.name);
    let blocks = entry.into_iter().flat_map(ClaimEntry::cidrs);
    let mut blocks = blocks.filter_map(|cidr| cx.allocations.blocks.get(&cidr));
    let block = blocks.find(|it| it.confirmed);
    let vmi = block.and_then(|it| it.vmi.as_ref());
    let node = block.map(|it| it.owner.name.to_string());
    let pods = cx.cache.pods.of_claim(&claim.name);
    let here = |node: &str| first_on(node, vmi, &pods);
    let pod = node.as_deref().and_then(here);
    let is_same_node = claim.status.node.as_deref() == node.as_deref();
    let now = Time(whole_seconds(cx.now.wall));
    let since = claim.status.since.map(Time).filter(|_| is_same_node);
    let since = node.is_some().then(|| since.unwrap_or_else(|| now.clone()));
    let is_released = claim.status.node.is_some() && node.is_none();
    let released_at = claim.status.released_at.map(Time);
    let released_at = is_released.then_some(now).or(released_at);
    let mut status = IPClaimStatus {
        addresses: match entry {
            Some(entry) => entry.cidrs().map(|it| it.first().to_string()).collect(),
            None if claim.is_unused() => Vec::new(),
            None => claim.addresses().map(|it| it.to_string()).collect(),
        },
        pool: entry.map(|it| it.pool.to_string()),
        pod: pod.map(|pod| pod.pod.to_string()),
        node,
        since,
        released_at,
        conditions: Vec::new(),
    };
    let standbys = block.into_iter().flat_map(BlockEntry::live_standbys);
    let stored = standbys.clone().filter(|it| it.is_stored);
    let migration = stored.filter_map(|it| {
        let node = &it.owner.name;
        Some(format!(
            "; pod {} on node {node} has them, too, because its virtual machine migrates",
            here(node)?.pod
        ))
    });
    let migration: String = migration.collect();
    let elsewhere = |it: &&&PodClaim| {
        let node = it.node.as_deref();
        let mut standbys = standbys.clone();
        let is_standby = standbys.any(|it| Some(&*it.owner.name) == node);
        node.is_some() && node != status.node.as_deref() && !(is_standby && it.vmi() == vmi)
    };
    let waiting = pods.iter().find(elsewhere);
    let waiting = waiting.map_or(String::new(), |it| {
        let on = it.node.as_deref().unwrap_or_default();
        format!(
            "; pod {} on node {on} waits until no pod there names the claim",
            it.pod
        )
    });
    let (is_ready, reason, message) = match (problem, entry, &status.pod, &status.node) {
        (Some(problem), entry, ..) => {
            let is_ready = entry.is_some() && problem.reason != WITHDRAWING;
            (is_ready, problem.reason, problem.text.clone())
        }
        (None, None, ..) => (
            false,
            "Pending",
            "the claim has no addresses yet".to_owned(),
        ),
        (None, Some(_), Some(pod), Some(node)) => (
            true,
            "InUse",
            format!("pod {pod} on node {node} uses the addresses{migration}{waiting}"),
        ),
        (None, Some(_), None, Some(node)) => (
            true,
            "Releasing",
            format!("node {node} releases the addresses, because no pod there names the claim"),
        ),
        (None, Some(_), ..) => (true, "Available", "no pod uses the addresses".to_owned()),
    };
    let message = if claim.deleting && status.node.is_some() {
        format!("the claim is deleted when no node has its addresses any more: {message}")
    } else {
        message
    };
    status.conditions = vec![ready(claim, is_ready, reason, message, cx)];
    status
}

fn ready(
    claim: &Claim,
    is_ready: bool,
    reason: &'static str,
    message: String,
    cx: &Context,
) -> Condition {
    let before = claim.status.ready.as_ref();
    let since = before
        .filter(|it| it.is_true == is_ready)
        .map(|it| it.since);
    Condition {
        type_: "Ready".to_owned(),
        status: if is_ready { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(since.unwrap_or_else(|| whole_seconds(cx.now.wall))),
        observed_generation: Some(claim.generation),
    }
}
