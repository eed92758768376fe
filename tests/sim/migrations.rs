//! Live migration: two pods of a virtual machine have the address of one claim, each on its node.
//!
//! A few virtual machines name the first few claims. While a machine has pods, it gets further pods on any nodes.
//! KubeVirt marks some of these pods as ready. Each pod may end at any moment, so migrations succeed, are aborted
//! before and after the machine has moved, and overlap. Sometimes a machine is started anew, with another UID, while
//! its earlier pods still run. Other pods name the same claims. The pods of one machine name an IPAMClaim
//! ([`ipam_claims`](super::ipam_claims)).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadastre_api::listed_uid;
use cadastre_controller::cluster::names::{ClaimName, NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{
    Block, BlockSpec, ClaimSource, Node, Owner, Pod, Text, VirtualMachine,
};

use super::api::Author;
use super::block_checks::BlockChecks;
use super::checks::{Verdict, wrong};
use super::clock::SECOND;
use super::host::Key;
use super::ipam_claims::used_claim;
use super::run::{Due, Sim};

/// The number of virtual machines.
const MACHINES: u64 = 3;

/// Records about the pods of virtual machines, for the checks.
#[derive(Default)]
pub struct MigrationRecords {
    /// The VirtualMachineInstance of each pod that has one
    of_pod: BTreeMap<ObjectUid, ObjectUid>,
    /// The pods that name an IPAMClaim
    of_interface: BTreeSet<ObjectUid>,
}

impl MigrationRecords {
    /// Records the virtual machine of a pod.
    pub fn note_vmi(&mut self, pod: &ObjectUid, vmi: &ObjectUid) {
        self.of_pod.insert(pod.clone(), vmi.clone());
    }

    /// Whether the two pods belong to the same virtual machine, so that they may have the same address.
    pub fn are_one(&self, pod: &ObjectUid, other: &ObjectUid) -> bool {
        let vmi = self.of_pod.get(pod);
        vmi.is_some() && vmi == self.of_pod.get(other)
    }

    /// Whether the pod names an IPAMClaim for its interface.
    pub fn is_of_interface(&self, pod: &ObjectUid) -> bool {
        self.of_interface.contains(pod)
    }

    /// Returns the virtual machine of a pod.
    pub fn vmi_of(&self, pod: &ObjectUid) -> Option<&ObjectUid> {
        self.of_pod.get(pod)
    }
}

/// Returns the owner and the standbys of a block, each with its number. The node's NodeSubnet lists the block under a
/// UID that contains this number.
fn holders(spec: &BlockSpec) -> impl Iterator<Item = (&Owner, u32)> {
    let standby = spec.standby.iter();
    let standby = standby.map(|(owner, number)| (owner, *number));
    [(&spec.owner, spec.number)].into_iter().chain(standby)
}

/// Returns the key under which the NodeSubnet of the block's owner lists the block.
pub fn key_of_owner(spec: &BlockSpec, object: &ObjectUid) -> Key {
    key_of(spec, object, spec.number)
}

/// Returns the key under which the NodeSubnet of the node with this number lists the block.
fn key_of(spec: &BlockSpec, object: &ObjectUid, number: u32) -> Key {
    (spec.cidr, listed_uid(object, number).into())
}

impl BlockChecks {
    /// Records which nodes are named in the object of a block, if the block is for a virtual machine.
    pub fn note_holders(&mut self, block: Option<&Block>) {
        let Some((block, Ok(spec))) = block.map(|it| (it, &it.spec)) else {
            return;
        };
        if let Some(vmi) = &spec.vmi {
            let keys = holders(spec).map(|(_, number)| key_of(spec, &block.uid, number));
            self.named.extend(keys.map(|key| (key, vmi.clone())));
        }
    }

    /// Whether two nodes may have a block at the same time, because the block's object has named both of them for one
    /// virtual machine. If a user has deleted the object, the object that replaces it counts, too.
    pub fn are_shared(&self, block: &Key, other: &Key) -> bool {
        let vmi = self.named.get(block);
        let is_one = vmi.is_some() && vmi == self.named.get(other);
        is_one && block.0 == other.0 && block.1 != other.1
    }
}

impl Sim {
    /// Creates a pod of a virtual machine, with a chance from the plan. Returns the UID and the name of the pod, or
    /// `None` if no pod is created.
    pub fn put_migrating_pod(&mut self, node: &Node) -> Option<(ObjectUid, Text)> {
        if self.plan.migrating == 0 || !self.rng.chance(self.plan.migrating) {
            return None;
        }
        let nth = self.rng.below(MACHINES);
        let claim: ClaimName = format!("default/c{nth}").as_str().into();
        let pods = self.api.pods.live.values().filter(|pod| !pod.finished);
        let of_claim = pods.filter_map(|pod| used_claim(pod));
        let of_claim = of_claim.filter(|it| it.claim == claim);
        let running = of_claim.filter_map(|it| it.vmi()).max().cloned();
        let running = running.filter(|_| !self.rng.chance(1_500));
        let vmi = running.unwrap_or_else(|| self.api.uid());
        let uid = self.api.uid();
        self.migrations.note_vmi(&uid, &vmi);
        let machine = VirtualMachine {
            vmi,
            is_migrated_to: false,
        };
        let source = if nth + 1 == MACHINES {
            self.want_ipam_claim_for(&uid, &claim);
            ClaimSource::IpamClaim
        } else {
            ClaimSource::User
        };
        let claim = (claim, source);
        let name = format!("vm-{nth}-{uid}");
        let put = self.put_pod(node, uid, &name, [].into(), Some(claim), Some(machine));
        if self.rng.chance(7_000) {
            let lag = self.rng.stretch(SECOND, 60 * SECOND);
            self.after(lag, Due::Migrated(put.1.clone()));
        }
        Some(put)
    }

    /// Makes KubeVirt create the IPAMClaim that a new pod names for its interface.
    pub fn want_ipam_claim_for(&mut self, pod: &ObjectUid, claim: &ClaimName) {
        self.want_ipam_claim(claim);
        self.migrations.of_interface.insert(pod.clone());
    }

    /// Makes KubeVirt mark the pod as the one in which the virtual machine runs.
    pub fn pod_is_migrated_to(&mut self, name: &Text) {
        let Some(pod) = self.api.pods.get(name).filter(|it| !it.finished) else {
            return;
        };
        let Some(placed) = self.api.placed.get(&pod.uid).cloned() else {
            return;
        };
        let mut pod = Pod::clone(pod);
        let own = pod.claim.as_deref_mut().into_iter();
        for claim in own.chain(&mut pod.interface_claims) {
            if let Some(machine) = &mut claim.machine {
                machine.is_migrated_to = true;
            }
        }
        self.log(Some(&placed), || format!("{name} runs the machine"));
        self.api.put_pod(pod, placed);
        self.publish();
    }

    /// Counts what happens to a block's standbys. Checks that a controller removes no node from the block's object
    /// while that node may have the block.
    pub fn check_holders(
        &mut self,
        author: Author,
        before: Option<&Block>,
        after: Option<&Block>,
    ) -> Verdict {
        let spec = |it: Option<&Block>| it.and_then(|it| it.spec.as_ref().ok()).cloned();
        let Some((block, was)) = before.zip(spec(before)) else {
            return Ok(());
        };
        let after = after.filter(|it| it.uid == block.uid);
        let is = spec(after);
        if !matches!(author, Author::Controller(_)) || after.is_some() && is.is_none() {
            return Ok(());
        }
        if let Some(is) = &is {
            let tally = &mut self.checks.tally;
            tally.standbys += u64::from(is.standby.len() > was.standby.len());
            let is_moved = is.owner.uid != was.owner.uid && !was.standby.is_empty();
            tally.migrated += u64::from(is_moved);
        }
        let stays = |uid: &ObjectUid| {
            is.as_ref()
                .is_some_and(|it| holders(it).any(|(owner, _)| owner.uid == *uid))
        };
        for (owner, number) in holders(&was).filter(|_| was.vmi.is_some()) {
            let key = key_of(&was, &block.uid, number);
            // Blocks without standbys are left out, because other checks judge how such blocks end.
            let is_sole = is.is_none() && was.standby.is_empty();
            let is_live = self.api.nodes.live.values().any(|it| it.uid == owner.uid);
            if stays(&owner.uid) || is_sole || !is_live {
                continue;
            }
            if self.checks.blocks.may_have(&key, &owner.uid) {
                let text = format!(
                    "{} {} is no longer {}'s, whose agent has not released it",
                    key.0, key.1, owner.name
                );
                return wrong("release", text, [owner.name.clone()]);
            }
        }
        Ok(())
    }

    /// Checks at the end that a pod of a virtual machine does not wait on a node while the virtual machine's block has
    /// room for a standby.
    pub fn check_migration_comes(&self, pod: &ObjectUid, node: &str) -> Verdict {
        let Some(vmi) = self.migrations.vmi_of(pod) else {
            return Ok(());
        };
        let nodes: BTreeSet<NodeName> = self.api.nodes.live.keys().cloned().collect();
        let blocks = self.api.blocks.live.values();
        let mut own = blocks.filter_map(|it: &Arc<Block>| it.spec.as_ref().ok());
        let is_open = |it: &&BlockSpec| {
            let is_known = holders(it).any(|(owner, _)| *owner.name == *node);
            it.vmi.as_ref() == Some(vmi) && it.standby.is_empty() && !is_known
        };
        let Some(spec) = own
            .find(is_open)
            .filter(|it| nodes.contains(&it.owner.name))
        else {
            return Ok(());
        };
        let claims = self.api.claims.live.values();
        let mut claims =
            claims.filter(|it| it.addresses().any(|addr| spec.cidr.contains_addr(addr)));
        let is_explained = claims.any(|it| {
            let ready = it.status.ready.as_ref();
            ready.is_some_and(|it| matches!(&*it.reason, "NodeNotSelected" | "OutsidePool"))
        });
        if is_explained {
            return Ok(());
        }
        let text = format!(
            "pod {pod} waits on {node}, and {} is only on {}",
            spec.cidr, spec.owner.name
        );
        wrong("claim", text, [spec.owner.name.clone()])
    }
}
