//! The API server is restored to an older state, as if its etcd were restored from a backup.
//!
//! All objects go back to their state in the backup, and so does the revision counter. Administrators should not set
//! the counter back, but for watches this is the worst case. Before the restore the server is down for a while, so that
//! every connection ends and no request is in flight. Controllers, agents and pods keep running with what they know.
//!
//! | who | does |
//! |---|---|
//! | watches of controllers | deliver nothing until the server has passed the last version that they delivered |
//! | agents | list again within half a minute |
//! | hosts whose Node is lost | register again within 20 s |
//! | kubelets | end pods that the server does not know; start pods that are back; report the others |
//! | users | delete Nodes that the restore has brought back and whose host is gone |
//!
//! # Left out
//! docs/backup.md says what is not repaired, and the simulation leaves it out:
//! - podCIDRs that are lost, because no component here remembers them;
//! - hosts that register again after their Node was deleted since the backup;
//! - agents that do not run or cannot reach the server during the agent grace, or whose Node is deleted before they have
//!   published;
//! - pools and labels of nodes that had other values after the backup.

use std::collections::BTreeSet;
use std::sync::Arc;

use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{Node, Pod};
use cadastre_core::Cidr;

use super::api::Api;
use super::block_checks::BlockChecks;
use super::checks::DeadNode;
use super::clock::{MS, SECOND, Time};
use super::machines::Act;
use super::run::{Due, Sim};

/// The time within which agents notice that the server answers again.
const NOTICE: Time = 30 * SECOND;

/// For this long after the restore, agents are spared, so that all agents can publish within the agent grace: no random
/// fault hits an agent, and an agent that fails by itself is away for a short time only.
const SPARED: Time = 120 * SECOND;

/// The API server and the records of the checks, as they were when the backup was made.
pub struct Backup {
    api: Api,
    dead_nodes: Vec<DeadNode>,
    blocks: BlockChecks,
}

impl Sim {
    /// Whether a backup was made. The server will be restored to that backup, or has been restored to it already.
    pub fn is_backed_up(&self) -> bool {
        let restore = self.plan.restore;
        restore.is_some_and(|(backup, _)| self.now >= backup)
    }

    pub fn was_restored(&self) -> bool {
        let restore = self.plan.restore;
        restore.is_some_and(|(_, at)| self.now >= at)
    }

    /// Whether agents are still publishing after a restore. No live host's Node is deleted in this time.
    pub fn agents_are_publishing(&self) -> bool {
        self.was_restored() && self.now < self.down_until + SPARED
    }

    /// Draws how long an agent that was killed is away. While agents are publishing, this is far shorter than the agent
    /// grace.
    pub fn absence(&mut self) -> Time {
        let most = if self.agents_are_publishing() { 10 } else { 60 };
        self.rng.stretch(SECOND, most * SECOND)
    }

    pub fn back_up(&mut self) {
        self.log(None, || "a backup is made".to_owned());
        self.backup = Some(Backup {
            api: self.api.clone(),
            dead_nodes: self.checks.dead_nodes.clone(),
            blocks: self.checks.blocks.clone(),
        });
    }

    pub fn restore(&mut self) {
        let Some(backup) = self.backup.take() else {
            return;
        };
        // The server is down for so long that every term ends.
        self.down_until = self.now + self.rng.between(12, 60) * SECOND;
        let back = self.down_until;
        self.log(None, || {
            format!("the API server is put back to its backup, and back at {back}")
        });
        self.checks.tally.restores += 1;
        self.hang_up();
        let nodes: Vec<Arc<Node>> = self.api.nodes.live.values().cloned().collect();
        let pods: Vec<Arc<Pod>> = self.api.pods.live.values().cloned().collect();
        self.put_back(backup);
        for process in &mut self.processes {
            if let Some(run) = &mut process.run {
                for kind in self.plan.watched() {
                    run.feeds.of_mut(kind).cut(&self.api);
                }
            }
        }
        self.bring_nodes_in_line(&nodes);
        self.bring_agents_in_line();
        self.bring_pods_in_line(&pods);
    }

    fn put_back(&mut self, backup: Backup) {
        let in_backup = backup.api.blocks.live.values();
        let in_backup: BTreeSet<&ObjectUid> = in_backup.map(|it| &it.uid).collect();
        self.checks.dead_nodes = backup.dead_nodes;
        self.checks.blocks = backup.blocks;
        for block in self.api.blocks.live.values() {
            if let Ok(spec) = &block.spec
                && !in_backup.contains(&block.uid)
            {
                let key = (spec.cidr, block.uid.clone());
                self.checks.blocks.lost(key);
            }
        }
        self.api.restore(backup.api);
        let holder = self.api.lease.as_ref().and_then(|it| it.holder.clone());
        self.checks.leased(holder.as_deref(), self.now);
        self.checks.intents = self.api.lease.as_ref().and_then(|it| it.intents.clone());
    }

    /// Returns a random delay from now, which ends at most `most` after the server answers again.
    fn once_back(&mut self, most: Time) -> Time {
        let lag = self.rng.stretch(MS, most);
        self.down_until.saturating_sub(self.now) + lag
    }

    /// Does for each Node what follows from the restore. `before` is the list of Nodes just before the restore. If the
    /// restore has brought a Node back, its host has ended. If the restore has removed a Node, its host will register
    /// again.
    fn bring_nodes_in_line(&mut self, before: &[Arc<Node>]) {
        let now: Vec<Arc<Node>> = self.api.nodes.live.values().cloned().collect();
        for node in &now {
            if before.iter().any(|it| it.uid == node.uid) {
                continue;
            }
            self.log(Some(&node.name), || {
                format!("node {} is back, and its machine gone", node.uid)
            });
            for id in 0..self.machines.hosts.len() {
                if self.host(id).name == node.name {
                    self.end_host(id);
                }
            }
            self.world.forget_machine(&node.name);
            let late = self.once_back(60 * SECOND);
            self.after(late, Due::DeleteNode(node.name.clone(), node.uid.clone()));
        }
        for node in before {
            if let Some(restored) = now.iter().find(|it| it.uid == node.uid) {
                self.lose_pod_cidrs(node, restored);
                continue;
            }
            if node.deleting {
                continue;
            }
            self.log(Some(&node.name), || {
                format!("node {} is forgotten", node.uid)
            });
            if let Some(id) = self.machines.of_node.get(&node.uid) {
                let host = &mut self.machines.hosts[*id];
                host.forgotten.insert(node.uid.clone());
            }
            let node = Node {
                term: None,
                annotated: false,
                pod_cidrs: [].into(),
                unreadable: [].into(),
                ..Node::clone(node)
            };
            let late = self.once_back(20 * SECOND);
            self.registering.insert(node.name.clone());
            self.after(late, Due::Register(Box::new(node)));
        }
        self.publish();
    }

    /// Notes the podCIDRs that the restore has taken from a Node. Nothing is guaranteed for their addresses until the Node
    /// gets the same podCIDRs again.
    fn lose_pod_cidrs(&mut self, before: &Node, restored: &Node) {
        let lost = before.pod_cidrs.iter();
        let lost: Vec<Cidr> = lost
            .filter(|it| !restored.pod_cidrs.contains(it))
            .copied()
            .collect();
        if let Some(id) = self.machines.of_node.get(&before.uid).copied() {
            self.checks
                .given_too_late
                .extend(self.machines.hosts[id].lose(&lost));
        }
    }

    /// Registers a new Node for the host of a lost Node, if the host still exists.
    pub fn register_anew(&mut self, node: Node) {
        self.registering.remove(&node.name);
        let id = self.machines.of_node.get(&node.uid).copied();
        let is_there = id.is_some_and(|id| !self.machines.hosts[id].is_gone);
        if self.api.nodes.get(&node.name).is_some() || !is_there {
            return;
        }
        let node = Node {
            uid: self.api.uid(),
            ..node
        };
        self.log(Some(&node.name), || {
            format!("node {} registers anew", node.uid)
        });
        self.settle_in(&node);
        self.api.put(node);
        self.publish();
    }

    /// Deletes a Node whose host is gone, as a user would.
    pub fn delete_orphaned_node(&mut self, name: &NodeName, uid: &ObjectUid) {
        let is_it = |node: &Arc<Node>| node.uid == *uid;
        if self.api.nodes.get(name).is_some_and(is_it) {
            self.delete_node_named(name);
            self.publish();
        }
    }

    fn bring_agents_in_line(&mut self) {
        for id in 0..self.machines.hosts.len() {
            let notice = self.once_back(NOTICE);
            let host = &mut self.machines.hosts[id];
            for (cidr, _) in host.given.values() {
                self.checks.blocks.used(cidr);
            }
            host.paused_until = host.paused_until.min(self.down_until);
            host.held_until = self.now + notice;
            host.has_old_report = true;
            let (is_off, is_gone, boot) = (host.is_off, host.is_gone, host.boot());
            // The agent starts its watches with a list now, even if they were meant to stay cut for longer.
            self.reset_lines(id);
            if !is_off {
                self.relist_host(id, false);
                self.after(notice, Due::StartAgent(id, boot));
            } else if !is_gone {
                self.after(0, Due::Machine(id, Act::Start));
            }
        }
    }

    /// Does for each pod what follows from the restore. `before` is the list of pods just before the restore.
    fn bring_pods_in_line(&mut self, before: &[Arc<Pod>]) {
        let now: Vec<Arc<Pod>> = self.api.pods.live.values().cloned().collect();
        for pod in before {
            if !now.iter().any(|it| it.uid == pod.uid)
                && let Some((id, _)) = self.machines.of_pod.get(&pod.uid)
            {
                let id = *id;
                let late = self.once_back(SECOND) + self.rng.between(1, 240) * SECOND;
                self.after(late, Due::Machine(id, Act::PodEnded(pod.uid.clone())));
            }
        }
        for pod in &now {
            let was = before.iter().find(|it| it.uid == pod.uid);
            let of = self.machines.of_pod.get(&pod.uid).map(|(id, _)| *id);
            match was {
                None => {
                    // The restore has brought the pod back. The pod is started again, and deleted some time later.
                    let lives = self.once_back(20 * SECOND) + self.rng.between(1, 200) * SECOND;
                    self.after(lives, Due::PodGone(pod.name.clone()));
                    self.checks.ghosts.insert(pod.uid.clone());
                    if let Some(id) = of.filter(|_| !pod.finished) {
                        let late = 11 * SECOND + self.once_back(20 * SECOND);
                        self.after(late, Due::Machine(id, Act::PodStarts(pod.uid.clone())));
                    }
                }
                Some(was) if was.finished && !pod.finished => {
                    self.checks.ghosts.insert(pod.uid.clone());
                    let late = self.once_back(NOTICE);
                    self.after(late, Due::PodFinishes(pod.name.clone()));
                }
                Some(was) if was.addresses != pod.addresses => {
                    let late = self.once_back(NOTICE);
                    self.after(late, Due::PodReports(pod.uid.clone()));
                }
                Some(_) => {}
            }
        }
    }
}
