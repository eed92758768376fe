//! Who has which address of the node.
//!
//! All of it is in the tables of a transaction; nothing is kept in memory. An operation reads and
//! writes the few entries that it is about, and decides before it writes: it is done as a whole or not
//! at all.
//!
//! | file | subject |
//! |---|---|
//! | `kv` | what is asked of the storage |
//! | `record`, `tables` | what the tables hold |
//! | `choose` | the next address of a pool, or one that was asked for |
//! | `decide` | what an operation comes to: reads only |
//! | `apply` | carrying it out |
//! | `deletions` | which of an ADD and a DEL was asked for first |
//! | `hold` | taking over a holding, letting go of a block |
//! | `snapshot` | what there is, for those who tell |
//!
//! # Order
//! Pools are tried in theirs, blocks by CIDR, so that the later ones empty. In a block, addresses come
//! first that nobody had, from low to high, then those that were freed, the oldest release first, never
//! one that still rests. A block of more than 4,096 addresses forgets what has rested, and begins again
//! from below when it has come to its end.

mod adopt;
mod apply;
mod choose;
mod decide;
mod deletions;
mod hold;
pub(super) mod kv;
mod record;
mod snapshot;
mod tables;
#[cfg(test)]
mod tests;

use std::time::Duration;

use super::fault::Fault;
use super::ops::{Answer, Now, Op, PodRef, Refusal};
use super::pods::PodNote;
use cadastre_core::Cidr;
use cadastre_core::holding::Holding;
use cadastre_core::mutation::Mutation;
use kv::{KvMut, Table};
use record::full_name;
use tables::{Read, Write};

pub use adopt::Known;
pub use record::BlockState;
pub use snapshot::{BlockCount, Counts, PoolCount, Snapshot, Tenant};

/// The tables of one transaction, at one moment.
pub struct Ledger<'a> {
    kv: &'a mut dyn KvMut,
    now: &'a Now,
}

/// Why an operation ends early.
#[derive(Debug)]
enum Stop {
    Refused(Refusal),
    Fault(Fault),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl<'a> Ledger<'a> {
    pub(super) fn new(kv: &'a mut dyn KvMut, now: &'a Now) -> Self {
        Self { kv, now }
    }

    /// When this happens.
    pub fn now(&self) -> &Now {
        self.now
    }

    /// Does something that is asked for now, or says why not. After a fault the transaction is worth
    /// nothing.
    pub fn run(&mut self, op: &Op) -> Result<Result<Answer, Refusal>, Fault> {
        self.run_asked(op, self.now.since_boot)
    }

    /// The same for something that was asked for at that time since boot. An ADD that was asked for before
    /// a DEL of the same attachment gives nothing, whichever of them comes first here.
    pub fn run_asked(
        &mut self,
        op: &Op,
        asked: Duration,
    ) -> Result<Result<Answer, Refusal>, Fault> {
        match self.decide_and_apply(op, asked) {
            Ok(answer) => Ok(Ok(answer)),
            Err(Stop::Refused(refusal)) => Ok(Err(refusal)),
            Err(Stop::Fault(fault)) => Err(fault),
        }
    }

    /// Takes over what the node holds. Nothing is written where nothing is new.
    ///
    /// A block that is listed under another UID is the same block: what was given from it stays given.
    /// One that is no longer listed gives nothing new, and is gone once nothing of it is in use or
    /// cooling. So it is with all blocks of another Node UID that are not listed for the new one. A
    /// block that was released stays so, also if it vanishes and is listed again, for the last 1,024 of them.
    pub fn hold(&mut self, holding: &Holding) -> Result<(), Fault> {
        hold::hold(self.kv, holding, self.now)
    }

    /// Lets go of a block if nothing of it is in use or cooling; whether it is let go of now. `uid` says
    /// which block is meant: the CIDR may be another's by now. From then on nothing is given from it;
    /// the range may come back as another block, of another UID.
    pub fn release(&mut self, cidr: Cidr, uid: &str) -> Result<bool, Fault> {
        hold::release(self.kv, cidr, uid, self.now)
    }

    /// Records what is known from elsewhere to be in use; for a ledger that was lost. Returns the
    /// attachments, with addresses, that lost one of them to an earlier one.
    pub fn adopt(&mut self, known: &[Known]) -> Result<Vec<Known>, Fault> {
        adopt::adopt(self.kv, known, self.now)
    }

    /// Takes over a holding with what is known to be in use of it: see [`Self::hold`] and [`Self::adopt`].
    pub fn take_over(&mut self, holding: &Holding, known: &[Known]) -> Result<Vec<Known>, Fault> {
        self.hold(holding)?;
        self.adopt(known)
    }

    /// What the pods may have, as far as it is known.
    pub fn pod_notes(&self) -> Result<Vec<PodNote>, Fault> {
        self.kv.pod_notes()
    }

    /// Takes note of what pods may have, and forgets others.
    pub fn note_pods(&mut self, news: &[PodNote], gone: &[PodRef]) -> Result<(), Fault> {
        for pod in gone {
            self.kv.drop_key(Table::Pods, full_name(pod).as_bytes())?;
        }
        for note in news {
            let key = full_name(&note.pod);
            self.kv.put_json(Table::Pods, key.as_bytes(), note)?;
        }
        Ok(())
    }

    /// Writes something that means nothing, to see whether that can be.
    pub fn try_to_write(&mut self) -> Result<(), Fault> {
        self.kv.take_sequence()?;
        Ok(())
    }

    /// All there is.
    pub fn snapshot(&self) -> Result<Snapshot, Fault> {
        snapshot::take(self.kv, self.now)
    }

    fn decide_and_apply(&mut self, op: &Op, asked: Duration) -> Result<Answer, Stop> {
        let stamp = self.kv.stamp(self.now)?;
        match op {
            Op::Add(add) => {
                deletions::check_add(self.kv, &add.attachment, asked, self.now, stamp)?;
                match decide::add(self.kv, add, self.now, stamp)? {
                    decide::Adding::Again(given, renewed) => {
                        if let Some(mut record) = renewed {
                            record.order = self.kv.take_order()?;
                            self.kv.put_record(&add.attachment, &record)?;
                        }
                        Ok(Answer::Given(given))
                    }
                    decide::Adding::New {
                        mut record,
                        choices,
                        spent,
                    } => {
                        record.order = self.kv.take_order()?;
                        apply::give(self.kv, &add.attachment, &record, &choices, &spent)?;
                        Ok(Answer::Given(record.given))
                    }
                }
            }
            Op::Del(attachment) => {
                deletions::remember_del(self.kv, attachment, asked, self.now, stamp)?;
                if let Some(record) = self.kv.record(attachment)? {
                    apply::take_back(self.kv, attachment, &record, self.now, stamp)?;
                    if Mutation::DeleteFreesWholePod.is_on() {
                        for (other, of) in self.kv.attachments(None)? {
                            if of.pod == record.pod {
                                apply::take_back(self.kv, &other, &of, self.now, stamp)?;
                            }
                        }
                    }
                }
                Ok(Answer::Done)
            }
            Op::Check(check) => {
                decide::check(self.kv, check)?;
                Ok(Answer::Done)
            }
            Op::Gc(gc) => {
                for (attachment, record) in decide::garbage(self.kv, gc)? {
                    apply::take_back(self.kv, &attachment, &record, self.now, stamp)?;
                }
                Ok(Answer::Done)
            }
            Op::Status => {
                decide::status(self.kv)?;
                Ok(Answer::Done)
            }
        }
    }
}
