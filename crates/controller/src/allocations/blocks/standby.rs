//! Standbys: nodes that may have a block besides its owner, because a virtual machine migrates.
//!
//! During a live migration of KubeVirt, two pods of one virtual machine run on two nodes, and both pods need the
//! address of the virtual machine's claim. The block stays with one owner, to which traffic is routed. The other node
//! is a standby: its NodeSubnet lists the block, too. When the virtual machine runs on the other node, owner and
//! standby change places, by one write of the block's object.
//!
//! # Guarantees
//! - Only nodes with a pod of the same VirtualMachineInstance become standbys. The VirtualMachineInstance of a block
//!   never changes, and agents assign the address only to pods of this VirtualMachineInstance. So two virtual machines
//!   never have an address at the same time, whatever the order in which agents and API server see the writes.
//! - A NodeSubnet lists the block for a standby only after the API server has stored the standby in the block's object.
//! - A node stops being a standby or the owner only when its agent has released the block and its NodeSubnet no longer
//!   lists the block. A deleted node stops being a standby or the owner after a quarantine.
//! - A block ends only when it has no standby.

use super::{BlockEntry, BlockTable};
use crate::Now;
use crate::allocations::AllocationState;
use crate::cluster::names::ObjectUid;
use crate::cluster::objects::{AgentReport, BlockReport, MachineIdentity, Node, Owner};
use crate::purpose::Step;
use cadastre_api::{MOST_STANDBY, Recall, listed_uid};
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// A node that may have a block in addition to the block's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standby {
    /// The node that is the standby; it is live or deleted
    pub owner: Owner,
    /// The number that the node's NodeSubnet appends to the object's UID when it lists the block
    pub number: u32,
    /// Whether the API server has stored the node in the block's object
    pub is_stored: bool,
    /// How the controller recalls the block from this node; `None` if the block is not recalled from it
    pub recall: Option<Recall>,
}

impl Standby {
    /// Returns a standby that the block's object names.
    pub(super) fn stored(owner: Owner, number: u32) -> Self {
        Standby {
            owner,
            number,
            is_stored: true,
            recall: None,
        }
    }
}

/// The state of a block with regard to one node, which is the block's owner or a standby.
pub(super) struct Share {
    /// The number that the node's NodeSubnet appends to the object's UID when it lists the block
    pub number: u32,
    /// How the controller recalls the block from the node; `None` if the block is not recalled from it
    pub recall: Option<Recall>,
    /// Whether the API server has stored the node in the block's object
    pub is_stored: bool,
}

impl BlockEntry {
    /// Returns the standby whose node has this UID. The owner is no standby.
    pub(crate) fn standby_of(&self, uid: &ObjectUid) -> Option<&Standby> {
        self.standby.iter().find(|it| it.owner.uid == *uid)
    }

    /// Returns the standbys that are live nodes.
    pub(crate) fn live_standbys(&self) -> impl Iterator<Item = &Standby> + Clone {
        self.standby.iter().filter(|it| !it.owner.quarantined)
    }

    /// Returns the UID under which the NodeSubnet of the owner lists the block. Returns `None` if the block has no
    /// known object.
    pub fn listed_uid(&self) -> Option<String> {
        Some(listed_uid(self.uid.as_ref()?, self.number))
    }

    /// Returns whether the node with this UID is the owner or a standby of the block.
    pub(crate) fn is_at(&self, uid: &ObjectUid) -> bool {
        self.owner.uid == *uid || self.standby_of(uid).is_some()
    }

    /// Returns whether the node with the UID `uid` is neither owner nor standby of this virtual machine's block.
    /// Returns false if the block is not for a virtual machine, or if `object` is not the UID of the block's object.
    pub(super) fn lacks(&self, uid: &ObjectUid, object: &str) -> bool {
        self.vmi.is_some() && self.uid.as_deref() == Some(object) && !self.is_at(uid)
    }

    /// Returns the state of the block with regard to the live node with this UID. Returns `None` if this node is
    /// neither the owner nor a standby.
    pub(super) fn share_of(&self, uid: &ObjectUid) -> Option<Share> {
        if self.owner.uid == *uid {
            return Some(Share {
                number: self.number,
                recall: self.recall,
                is_stored: true,
            });
        }
        let mut live = self.live_standbys();
        let standby = live.find(|it| it.owner.uid == *uid)?;
        Some(Share {
            number: standby.number,
            recall: standby.recall,
            is_stored: standby.is_stored || Mutation::StandbyListedBeforeStored.is_on(),
        })
    }

    /// Returns whether the NodeSubnet of the node with this UID should list the block. `report` is the report of the
    /// node's agent.
    pub(super) fn is_to_list(&self, uid: &ObjectUid, report: Option<&AgentReport>) -> bool {
        let is_stored = self.share_of(uid).is_some_and(|it| it.is_stored);
        is_stored && self.is_held() && !self.is_released_at(uid, report)
    }

    /// Returns whether the agent of the node `uid` has released the block. The node is the owner or a standby of the
    /// block.
    pub(crate) fn is_released_at(&self, uid: &ObjectUid, report: Option<&AgentReport>) -> bool {
        let report = report.filter(|it| it.node_uid == *uid);
        let share = self.share_of(uid).zip(report);
        let reported = share.and_then(|(share, report)| self.reported(report, share.number));
        reported.is_some_and(|it| it.released)
    }

    /// Returns whether the NodeSubnet of a node must still list this block of a claim, although the node lacks other
    /// addresses of the claim. Such a block is listed as draining, so that the node assigns the address to no pod and
    /// can release it.
    pub(super) fn is_listed_alone<'a>(
        &self,
        uid: &ObjectUid,
        others: impl IntoIterator<Item = Option<&'a BlockEntry>>,
    ) -> bool {
        // If no node was ever a standby, the NodeSubnet listed none of the claim's blocks before it could list all of
        // them, except for draining blocks, which drain until then.
        if self.last_number == 0 {
            return false;
        }
        // A node becomes a standby for all blocks of the claim at the same time. Its NodeSubnet lists none of the
        // blocks before all of these standbys are stored.
        let is_new = |it: &BlockEntry| it.standby_of(uid).is_some_and(|it| !it.is_stored);
        let is_standby = self.standby_of(uid).is_some();
        let mut others = others.into_iter().flatten();
        !(is_standby && others.any(is_new))
    }

    /// Returns what an agent reports about this block. `number` is the standby number in the agent's NodeSubnet, or 0.
    pub(super) fn reported<'a>(
        &self,
        report: &'a AgentReport,
        number: u32,
    ) -> Option<&'a BlockReport> {
        let uid = self.uid.as_ref()?;
        match number {
            0 => report.of_block(&self.cidr, uid),
            _ => report.of_block(&self.cidr, &listed_uid(uid, number).into()),
        }
    }

    /// Schedules a write of the object, because the owner or the standbys have changed.
    pub(super) fn must_be_stored(&mut self) {
        if self.confirmed && self.step == Step::Settled {
            self.step = Step::Replace;
        }
    }
}

impl BlockTable {
    /// Returns the blocks for which the node with this UID is a standby, in address order.
    pub(crate) fn on_standby<'a>(
        &'a self,
        uid: &ObjectUid,
    ) -> impl Iterator<Item = &'a BlockEntry> + use<'a> {
        let cidrs = self.by_standby.get(uid).into_iter().flatten();
        cidrs.filter_map(|cidr| self.entries.get(cidr))
    }

    /// Lets `change` change the standbys of a block. Also schedules a write of the block's object.
    fn change_standbys(&mut self, cidr: &Cidr, change: impl FnOnce(&mut BlockEntry)) {
        let to_judge = self.to_judge.contains(cidr);
        if let Some(mut entry) = self.remove(cidr) {
            change(&mut entry);
            entry.must_be_stored();
            self.insert(entry);
        }
        if to_judge {
            self.to_judge.insert(*cidr);
        }
    }
}

impl AllocationState {
    /// Adds a node to the standbys of a block. Does nothing if the block has [`MOST_STANDBY`] standbys already. The
    /// node's NodeSubnet lists the block once the API server has stored the standby.
    pub(crate) fn add_standby(&mut self, cidr: &Cidr, node: &Node) {
        let has_room = |it: &BlockEntry| it.standby.len() < MOST_STANDBY;
        if !self.blocks.get(cidr).is_some_and(has_room) {
            return;
        }
        self.blocks.change_standbys(cidr, |entry| {
            if !Mutation::StandbyNumberReused.is_on() || entry.last_number == 0 {
                entry.last_number += 1;
            }
            entry.standby.push(Standby {
                owner: Owner::node(&node.name, &node.uid),
                number: entry.last_number,
                is_stored: false,
                recall: None,
            });
        });
    }

    /// Records that `owner` is a standby of the block. The block's object does not name this standby, but an earlier
    /// leader has listed the block in the NodeSubnet of the standby.
    pub(super) fn restore_standby(&mut self, cidr: &Cidr, owner: Owner, number: u32) {
        self.blocks.change_standbys(cidr, |entry| {
            entry.last_number = entry.last_number.max(number);
            entry.standby.push(Standby::stored(owner, number));
        });
    }

    /// Makes a standby the owner. The previous owner becomes a standby.
    pub(crate) fn make_owner(&mut self, cidr: &Cidr, uid: &ObjectUid) {
        let mut found = None;
        self.blocks.change_standbys(cidr, |entry| {
            let at = entry.standby.iter().position(|it| it.owner.uid == *uid);
            let Some(at) = at else { return };
            let before = Standby {
                owner: entry.owner.clone(),
                number: entry.number,
                is_stored: true,
                recall: entry.recall,
            };
            let next = std::mem::replace(&mut entry.standby[at], before);
            (entry.number, entry.recall) = (next.number, next.recall);
            (entry.until, entry.quarantined_until) = (None, None);
            found = Some(next.owner);
        });
        if let Some(owner) = found {
            self.reassign_block(cidr, owner);
        }
    }

    /// Removes a node from the standbys of a block, because the node no longer has the block.
    fn drop_standby(&mut self, cidr: &Cidr, uid: &ObjectUid) {
        let drop = |entry: &mut BlockEntry| entry.standby.retain(|it| it.owner.uid != *uid);
        self.blocks.change_standbys(cidr, drop);
    }

    /// Ends the ownership of a node that no longer has the block. If the block has live standbys, one of them becomes
    /// the owner. If all standbys are deleted nodes, one of them becomes the owner, and the block is quarantined. If
    /// the block has no standby, its object is deleted.
    ///
    /// After a quarantine, a deleted standby causes no further one. The quarantine began when no live node had the
    /// block, so it counts for every deleted node that had the block.
    pub(crate) fn owner_left(&mut self, cidr: &Cidr, now: Now) {
        let Some(entry) = self.blocks.get_mut(cidr) else {
            return;
        };
        let owner = entry.owner.uid.clone();
        let quarantine = (entry.since, entry.until, entry.quarantined_until);
        let was_quarantined = entry.owner.quarantined;
        let next = entry.live_standbys().next().or(entry.standby.first());
        let next = next.map(|it| (it.owner.uid.clone(), it.owner.quarantined));
        let Some((uid, is_gone)) = next.filter(|_| !Mutation::StandbyForgotten.is_on()) else {
            entry.step = Step::Delete;
            return;
        };
        self.make_owner(cidr, &uid);
        self.drop_standby(cidr, &owner);
        if !is_gone {
            return;
        }
        self.set_quarantine(cidr, now);
        if was_quarantined && let Some(entry) = self.blocks.get_mut(cidr) {
            (entry.since, entry.until, entry.quarantined_until) = quarantine;
        }
    }

    /// Removes a node from the standbys of each block that the node's agent has released and that the node's NodeSubnet
    /// no longer lists. Returns these blocks.
    pub(super) fn released_standbys(
        &mut self,
        node: &Node,
        report: Option<&AgentReport>,
        is_unlisted: impl Fn(&Cidr) -> bool,
    ) -> Vec<Cidr> {
        let ended = |entry: &&BlockEntry| {
            let recalled = entry.standby_of(&node.uid).and_then(|it| it.recall);
            let is_forgotten = recalled.is_some() && Mutation::StandbyDroppedUnreleased.is_on();
            let is_released = entry.is_released_at(&node.uid, report) && is_unlisted(&entry.cidr);
            is_released || is_forgotten
        };
        let all = self.blocks.on_standby(&node.uid).filter(ended);
        let cidrs: Vec<Cidr> = all.map(|entry| entry.cidr).collect();
        for cidr in &cidrs {
            self.drop_standby(cidr, &node.uid);
        }
        cidrs
    }

    /// Marks the standbys of a deleted node as quarantined. Returns the blocks of which the node is a standby.
    pub(super) fn quarantine_standbys(
        &mut self,
        uid: &ObjectUid,
        machine: &MachineIdentity,
    ) -> Vec<Cidr> {
        let cidrs: Vec<Cidr> = self.blocks.on_standby(uid).map(|it| it.cidr).collect();
        for cidr in &cidrs {
            self.blocks.change_standbys(cidr, |entry| {
                let of_node = entry.standby.iter_mut().filter(|it| it.owner.uid == *uid);
                for standby in of_node.filter(|it| !it.owner.quarantined) {
                    standby.owner.quarantined = true;
                    standby.owner.machine = machine.clone();
                }
            });
        }
        cidrs
    }
}
