//! The assignments of a node: which address is assigned to which attachment.
//!
//! All data is in the tables of a transaction; nothing is kept in memory. An operation reads and writes only the few
//! entries that it concerns. An operation makes all decisions before its first write, so it takes effect as a whole or
//! not at all.
//!
//! | file | subject |
//! |---|---|
//! | `kv` | the storage interface that the ledger requires |
//! | `record`, `tables` | the content of the tables |
//! | `claims` | finds the addresses of the IPClaim that a pod names |
//! | `choose` | selects the next address of a pool, or the addresses that an ADD asks for |
//! | `decide` | decides what an operation does; only reads |
//! | `apply` | writes the decisions of `decide` |
//! | `deletions` | whether an ADD or a DEL of the same attachment was requested first |
//! | `probes` | whether another host uses an address, for pools that require probes |
//! | `set_allocation` | records the node's ranges, and releases blocks |
//! | `adopt` | records assignments that another component knows |
//! | `withdrawals` | ranges that the controller takes back from the node |
//! | `holdings` | the ranges and pod notes, which have to survive reboots |
//! | `snapshot` | reads the whole content, for reports |
//!
//! # Order
//! Pools are tried in their order of preference, and the blocks of a pool in the order of their CIDRs, so that later
//! blocks become empty and can be released. A block first assigns addresses that were never assigned, in ascending
//! order. Then it assigns released addresses, the oldest release first, but never an address that is still cooling. A
//! block of more than 4,096 addresses deletes the records of addresses that have cooled. When the search in such a
//! block reaches the end of the block, it restarts at the lowest address.

mod adopt;
mod apply;
mod choose;
mod claims;
mod decide;
mod deletions;
mod holdings;
pub(super) mod kv;
mod probes;
mod record;
mod set_allocation;
mod snapshot;
mod tables;
#[cfg(test)]
mod tests;
mod withdrawals;

use std::time::Duration;

use super::ops::{Add, Now, Op, OpError, OpOutcome, PodRef};
use super::pods::PodNote;
use super::storage_fault::StorageFault;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_core::{Addr, Cidr};
use kv::{KvMut, KvTable};
use record::full_name;
use tables::{Read, Write};

pub use adopt::RememberedAttachment;
pub use holdings::Holdings;
pub(crate) use holdings::{HoldingsPart, part_of};
pub use probes::{Conflict, MOST_PROBES, PoolProbes, ProbeRound, ProbeTargets};
pub use record::{AttachmentRecord, BlockState};
pub use snapshot::{AddressCounts, BlockCount, PendingWithdrawal, PoolCount, Snapshot};

/// The ledger within one transaction: its tables, and the time of the transaction.
pub struct AddressLedger<'a> {
    kv: &'a mut dyn KvMut,
    now: &'a Now,
}

/// Why an operation is rejected or fails.
#[derive(Debug)]
enum Stop {
    Refused(OpError),
    Fault(StorageFault),
}

impl From<StorageFault> for Stop {
    fn from(fault: StorageFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<OpError> for Stop {
    fn from(refusal: OpError) -> Self {
        Self::Refused(refusal)
    }
}

impl<'a> AddressLedger<'a> {
    pub(super) fn new(kv: &'a mut dyn KvMut, now: &'a Now) -> Self {
        Self { kv, now }
    }

    /// Returns the time of this transaction.
    pub fn now(&self) -> &Now {
        self.now
    }

    /// Performs an operation that is requested now. An inner error is a rejection, after which nothing has changed.
    /// After an outer error the transaction must be discarded.
    pub fn run(&mut self, op: &Op) -> Result<Result<OpOutcome, OpError>, StorageFault> {
        self.run_asked(op, self.now.since_boot)
    }

    /// Performs an operation that was requested at `asked`, a time since boot, and returns what [`Self::run`] returns.
    /// An ADD is rejected if a DEL of the same attachment was requested after the ADD and has already been performed.
    pub fn run_asked(
        &mut self,
        op: &Op,
        asked: Duration,
    ) -> Result<Result<OpOutcome, OpError>, StorageFault> {
        match self.decide_and_apply(op, asked) {
            Ok(answer) => Ok(Ok(answer)),
            Err(Stop::Refused(refusal)) => Ok(Err(refusal)),
            Err(Stop::Fault(fault)) => Err(fault),
        }
    }

    /// Records the ranges of the node. Writes only what differs from the stored values.
    ///
    /// If a block is listed with a new UID, it counts as the same block, so its assignments stay valid. A block that is
    /// no longer listed assigns no new addresses, and is removed once none of its addresses is in use or cooling. If
    /// the UID of the Node changes, all blocks that are not listed for the new UID count as no longer listed. A
    /// released block stays released, even if it disappears and is listed again. For this purpose, the last 1,024
    /// released blocks are remembered.
    pub fn set_allocation(&mut self, allocation: &NodeAllocation) -> Result<(), StorageFault> {
        set_allocation::set_allocation(self.kv, allocation, self.now)
    }

    /// Stops assigning addresses from blocks that `allocation` does not list, or lists as draining. Changes nothing
    /// else. Unlike [`Self::set_allocation`], this may take effect before it is on the disk: nobody is told of it, and
    /// if a reboot undoes it, the ledger is as before.
    pub fn restrict(&mut self, allocation: &NodeAllocation) -> Result<(), StorageFault> {
        set_allocation::restrict(self.kv, allocation)
    }

    /// Releases a block if none of its addresses is in use, cooling or withdrawn. Returns whether the block is
    /// released. The block is released only if its UID is `uid`, because a newer block can have the same CIDR. A
    /// released block assigns no address. The node can get the same range again as another block, with another UID.
    pub fn release(&mut self, cidr: Cidr, uid: &str) -> Result<bool, StorageFault> {
        set_allocation::release(self.kv, cidr, uid, self.now)
    }

    /// Withdraws each range that the NodeSubnet lists in `withdraw` if no address of the range is in use or cooling.
    /// Returns whether any range was withdrawn. Once the transaction is durable, the agent may report these ranges as
    /// withdrawn.
    pub fn withdraw_empty(&mut self) -> Result<bool, StorageFault> {
        let stamp = self.kv.stamp(self.now)?;
        withdrawals::withdraw_empty(self.kv, stamp)
    }

    /// Returns the pool that serves the network of the ADD, if the network has a range of its own ([`Add::limits`]) and
    /// the ADD names no pools. The inner error says that no pool, or more than one pool, has addresses that the network
    /// allows.
    pub fn pool_of_network(
        &self,
        add: &Add,
    ) -> Result<Result<Option<String>, OpError>, StorageFault> {
        match decide::pool_of_network(self.kv, add) {
            Ok(pool) => Ok(Ok(pool)),
            Err(Stop::Refused(refusal)) => Ok(Err(refusal)),
            Err(Stop::Fault(fault)) => Err(fault),
        }
    }

    /// Returns the addresses that have to be probed before the ADD can be served. The result is empty if no probe would
    /// help.
    pub fn to_probe(&self, add: &Add) -> Result<ProbeTargets, StorageFault> {
        let stamp = self.kv.stamp(self.now)?;
        probes::targets(self.kv, add, stamp)
    }

    /// Records the answers to probes. Ignores the answer about an address that was in use at any time since the probe
    /// began.
    pub fn record_probes(&mut self, round: &ProbeRound) -> Result<(), StorageFault> {
        let stamp = self.kv.stamp(self.now)?;
        self.kv.put_boot(self.now, stamp)?;
        probes::record(self.kv, round, stamp, self.now.wall_ms)
    }

    /// Ends conflicts. Each conflict is given by its address and the time at which it began (`Conflict::since_ms`). The
    /// addresses are probed again before they are assigned. Returns whether any conflict has ended.
    pub fn end_conflicts(&mut self, ended: &[(Addr, i64)]) -> Result<bool, StorageFault> {
        probes::end_conflicts(self.kv, ended)
    }

    /// Records assignments that another component remembers and this ledger lacks, for example after the store was lost
    /// and created anew. An address is skipped if this ledger says that another attachment uses it, or that it was
    /// released. Returns the skipped addresses with their attachments.
    pub fn adopt(
        &mut self,
        remembered: &[RememberedAttachment],
    ) -> Result<Vec<RememberedAttachment>, StorageFault> {
        adopt::adopt(self.kv, remembered, self.now)
    }

    /// Records the node's ranges and then the remembered assignments. See [`Self::set_allocation`] and [`Self::adopt`].
    pub fn take_over(
        &mut self,
        allocation: &NodeAllocation,
        remembered: &[RememberedAttachment],
    ) -> Result<Vec<RememberedAttachment>, StorageFault> {
        self.set_allocation(allocation)?;
        self.adopt(remembered)
    }

    /// Does what [`Self::take_over`] does, for a new ledger that replaces a lost one. `has_addresses_outside` says
    /// whether pods use addresses outside of the node's ranges (see [`Snapshot::has_addresses_outside`]). The node may
    /// get such addresses in a block later. `before` has the ranges of the lost ledger, if they are known: a block that
    /// was released stays released, because the report of the release may be on its way to the API server.
    pub fn rebuild(
        &mut self,
        allocation: &NodeAllocation,
        remembered: &[RememberedAttachment],
        has_addresses_outside: bool,
        before: Option<&Holdings>,
    ) -> Result<Vec<RememberedAttachment>, StorageFault> {
        self.record_boot()?;
        if let Some(before) = before.filter(|_| !Mutation::LostReleaseForgotten.is_on()) {
            holdings::restore_released(self.kv, before)?;
        }
        if has_addresses_outside {
            self.kv.put_addresses_outside(self.now)?;
        }
        self.take_over(allocation, remembered)
    }

    /// Returns the ranges and pod notes that have to survive a reboot.
    pub fn holdings(&self) -> Result<Holdings, StorageFault> {
        holdings::read(self.kv, self.now)
    }

    /// Records the running boot. An agent does this before it assigns addresses.
    pub fn record_boot(&mut self) -> Result<(), StorageFault> {
        let stamp = self.kv.stamp(self.now)?;
        self.kv.put_boot(self.now, stamp)
    }

    /// Returns whether the host has rebooted since [`Self::record_boot`]. False if no boot was recorded.
    pub fn is_of_earlier_boot(&self) -> Result<bool, StorageFault> {
        self.kv.is_of_earlier_boot(self.now)
    }

    /// Fills an empty ledger with `holdings` from before a reboot. No address is assigned before the cooldown of its
    /// pool has passed since the boot, because the address may have been in use until the reboot.
    pub fn restore(&mut self, holdings: &Holdings) -> Result<(), StorageFault> {
        holdings::restore(self.kv, holdings, self.now)
    }

    /// Returns the notes on which pools and addresses the node's pods may have.
    pub fn pod_notes(&self) -> Result<Vec<PodNote>, StorageFault> {
        self.kv.pod_notes()
    }

    /// Stores each note that `news` contains, and removes the note on each pod that `gone` contains.
    pub fn note_pods(&mut self, news: &[PodNote], gone: &[PodRef]) -> Result<(), StorageFault> {
        for pod in gone {
            self.kv.drop_key(KvTable::Pods, full_name(pod).as_bytes())?;
        }
        for note in news {
            let key = full_name(&note.pod);
            self.kv.put_json(KvTable::Pods, key.as_bytes(), note)?;
        }
        Ok(())
    }

    /// Writes a value that has no effect, to find out whether the store can be written.
    pub fn try_to_write(&mut self) -> Result<(), StorageFault> {
        self.kv.take_sequence()?;
        Ok(())
    }

    /// Reads the whole content of the ledger.
    pub fn snapshot(&self) -> Result<Snapshot, StorageFault> {
        snapshot::take(self.kv, self.now)
    }

    fn decide_and_apply(&mut self, op: &Op, asked: Duration) -> Result<OpOutcome, Stop> {
        let stamp = self.kv.stamp(self.now)?;
        match op {
            Op::Add(add) => {
                deletions::check_add(self.kv, &add.attachment, asked, self.now, stamp)?;
                let mut decision = decide::add(self.kv, add, self.now, stamp)?;
                if decision.is_changed {
                    decision.record.order = self.kv.take_order()?;
                    apply::assign(self.kv, &decision)?;
                }
                return Ok(OpOutcome::Assigned(decision.record.given));
            }
            Op::Del(attachment) => {
                deletions::remember_del(self.kv, attachment, asked, self.now, stamp)?;
                if let Some(record) = self.kv.record(attachment)? {
                    apply::release(self.kv, &record, self.now, stamp)?;
                    if Mutation::DeleteFreesWholePod.is_on() {
                        for other in self.kv.attachments(None)? {
                            if other.pod == record.pod {
                                apply::release(self.kv, &other, self.now, stamp)?;
                            }
                        }
                    }
                }
            }
            Op::Check(check) => decide::check(self.kv, check)?,
            Op::Gc(gc) => {
                for record in decide::garbage(self.kv, gc)? {
                    apply::release(self.kv, &record, self.now, stamp)?;
                }
            }
            Op::Status => decide::status(self.kv)?,
        }
        Ok(OpOutcome::Done)
    }
}
