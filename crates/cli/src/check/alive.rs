//! Checks of Cadastre itself: its leader, controllers and agents.

use std::sync::Arc;

use super::{Findings, Severity};
use crate::inventory::Inventory;
use crate::render::age;
use crate::running::{AgentPod, ComponentPod, LeaseFact};
use cadastre_controller::cluster::objects::Node;

pub(super) fn check(inventory: &Inventory, findings: &mut Findings) {
    leader(inventory, findings);
    controllers(inventory, findings);
    agents(inventory, findings);
}

fn leader(inventory: &Inventory, findings: &mut Findings) {
    let wrong = match &inventory.running.lease {
        Err(why) => {
            return findings.add(
                Severity::Info,
                "NotReadable",
                "controller",
                format!("cannot find out whether a controller leads: {why}"),
                "ask for the ClusterRole cadastre-viewer, which may read everything that check needs",
            );
        }
        Ok(None) => "no controller has led in this cluster: there is no Lease".to_owned(),
        Ok(Some(lease)) if lease.holder.is_empty() && is_handed_over(lease, inventory) => return,
        Ok(Some(lease)) if lease.holder.is_empty() => {
            format!("no controller leads: nobody holds the Lease {}", lease.name)
        }
        Ok(Some(lease)) if lease.is_stale(inventory.now) => format!(
            "no controller leads: {} has the Lease {}, and last renewed it {} ago, by this machine's clock",
            lease.holder,
            lease.name,
            age(lease.renewed, inventory.now)
        ),
        Ok(Some(_)) => return,
    };
    findings.add(
        Severity::Critical,
        "NoLeader",
        "controller",
        wrong,
        "nodes get no ranges until one does: see its pods and their log (kubectl get pods -A -l app.kubernetes.io/component=controller)",
    );
}

/// Whether the Lease was renewed within the last minute and a young controller is about to acquire it. With a single
/// replica this is normal, because one controller stops before the next one starts.
fn is_handed_over(lease: &LeaseFact, inventory: &Inventory) -> bool {
    let now = inventory.now;
    let mut controllers = inventory.running.pods(false);
    !lease.is_stale(now) && controllers.any(|it| it.is_young(now))
}

fn controllers(inventory: &Inventory, findings: &mut Findings) {
    let all: Vec<_> = inventory.running.pods(false).collect();
    let is_down = |it: &&&ComponentPod| !it.ready && !it.is_young(inventory.now);
    let down = all.iter().filter(is_down).count();
    if down > 0 {
        findings.add(
            Severity::Warning,
            "ControllerNotReady",
            "controller",
            format!(
                "{down} of {} pods of the controller are not ready",
                all.len()
            ),
            "see why: kubectl describe pod -A -l app.kubernetes.io/component=controller",
        );
    }
}

/// Reports nodes with blocks but without a ready agent. Reports nothing if no agent runs as a pod.
fn agents(inventory: &Inventory, findings: &mut Findings) {
    if inventory.running.pods(true).next().is_none() {
        return;
    }
    let has_blocks = |it: &&Arc<Node>| inventory.registry.blocks.has(&it.uid);
    for node in inventory.cache.nodes.iter().filter(has_blocks) {
        let what = match inventory.running.agent(&node.name, inventory.now) {
            Some(AgentPod::NotReady) => "its agent is not ready",
            Some(AgentPod::None) => "no agent runs on it",
            _ => continue,
        };
        findings.add(
            Severity::Warning,
            "AgentDown",
            format!("node {}", node.name),
            format!("{what}: new pods there wait, except those of pools with unknownPods: Serve, and the node gets no more blocks"),
            format!("see the pod (kubectl get pods -A -l app.kubernetes.io/component=agent --field-selector spec.nodeName={})", node.name),
        );
    }
}
