//! The phases of a cycle, and which phase or question follows each answer.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::allocation::PendingAllocation;
use super::opening::{AfterClose, StoreSources};
use super::{
    AgentEffect, AgentMachine, CountedEvent, LeakScan, STARTING, STORE_PAUSE, StoreAnswer,
    StoreQuestion, StoreTrouble, Transaction,
};
use crate::conflicts;
use crate::demand::to_release;
use crate::leaks::{LeakClaims, LeakReason, NodeEvidence};
use crate::notes::UnsavedNotes;
use crate::snapshot::allocation;
use cadastre_api::Recall;
use cadastre_core::Cidr;
use cadastre_node::{Attachment, Conflict, Now, Snapshot};

/// The shortest and the longest pause between looks at the store. The CNI plugin may change the store without the
/// agent, so the agent looks even if there is no event.
pub(super) const LOOK_PAUSE: (Duration, Duration) =
    (Duration::from_millis(200), Duration::from_secs(60));
/// The pause after probes that failed.
const PROBE_PAUSE: Duration = Duration::from_secs(10);
/// The longest pause between looks while addresses are in cooldown. No event shows the agent that a cooldown is over.
const COOLING_PAUSE: Duration = Duration::from_secs(15);

/// A phase of a cycle. A cycle goes through its phases in this order. If the store is open, the cycle begins with
/// `Free`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Open the store, or create it
    Open,
    /// Release attachments that are proven to be leaked
    Free,
    /// Write the node's ranges to the store
    WriteRanges,
    /// Look at the store if a look is due, and release blocks that are not needed
    Look,
    /// Write to the store which pools the pods may use
    Notes,
    /// Publish to the API, the files and `/readyz`
    Publish,
}

/// The question in flight, with the data that the cycle needs after the answer.
#[derive(Debug)]
pub(super) enum InFlight {
    Open,
    Close(AfterClose),
    /// List the sandboxes, to fill a new store
    SandboxesForStore(Box<StoreSources>),
    /// Create a new store with this many attachments
    Make(usize),
    Free(Attachment, LeakReason),
    /// List the sandboxes, to find which addresses of new ranges are in use
    SandboxesForRanges(Box<PendingAllocation>),
    /// Stop assigning from blocks that are lost, then write the ranges
    Restrict(Box<PendingAllocation>),
    Hold(Box<PendingAllocation>),
    /// Look at the store, then release blocks, then continue with this phase
    Look(Phase),
    /// End conflicts, then withdraw ranges and release blocks according to this look
    EndConflicts(Box<Releasing>),
    /// Withdraw ranges, then release blocks according to this look
    Withdraw(Box<Releasing>),
    Release(Cidr, Box<Releasing>),
    /// Look at the store after blocks were released, then continue with this phase
    LookAgain(Phase),
    ReadNotes,
    Note(Box<UnsavedNotes>),
}

/// The blocks that a look at the store has shown to be unneeded. They are released one after the other.
#[derive(Debug)]
pub(super) struct Releasing {
    /// The ranges and UIDs of the blocks that are still to be released
    remaining: VecDeque<(Cidr, String)>,
    /// Whether the store has changed since the look that found these blocks
    any: bool,
    looked: LeakScan,
    /// The phase that follows after the last release
    then: Phase,
}

/// The next step of the cycle.
#[derive(Debug)]
pub(super) enum Next {
    Go(Phase),
    Ask(InFlight, StoreQuestion),
    /// Wait for the answer to this question
    Wait(InFlight),
    Idle,
}

impl AgentMachine {
    /// Goes through the phases until the cycle must ask a question or ends.
    pub(super) fn go(&mut self, now: &Now, effects: &mut Vec<AgentEffect>) {
        let at = now.since_boot;
        let mut next = match (self.in_flight.take(), self.answer.take()) {
            (None, _) => self.begin(),
            (Some(asked), Some(answer)) => self.answered(asked, answer, now, effects),
            (Some(asked), None) => Next::Wait(asked),
        };
        loop {
            next = match next {
                Next::Go(Phase::Open) => self.open(now, effects),
                Next::Go(Phase::Free) => self.free(),
                Next::Go(Phase::WriteRanges) => self.write_ranges(at),
                Next::Go(Phase::Look) if self.look_at <= at => self.look(Phase::Notes, at),
                Next::Go(Phase::Look) => Next::Go(Phase::Notes),
                Next::Go(Phase::Notes) => self.note_pods(at),
                Next::Go(Phase::Publish) => {
                    self.publish_all(now, effects);
                    Next::Idle
                }
                Next::Ask(asked, question) => {
                    self.in_flight = Some(asked);
                    effects.push(AgentEffect::Ask(question));
                    return;
                }
                Next::Idle => {
                    self.publish_readiness(effects);
                    if !self.is_news {
                        return;
                    }
                    self.begin()
                }
                Next::Wait(asked) => {
                    self.in_flight = Some(asked);
                    return;
                }
            }
        }
    }

    /// Starts a cycle, which handles all events that have been recorded until now.
    fn begin(&mut self) -> Next {
        self.is_news = false;
        Next::Go(if self.is_open {
            Phase::Free
        } else {
            Phase::Open
        })
    }

    fn answered(
        &mut self,
        asked: InFlight,
        answer: StoreAnswer,
        now: &Now,
        effects: &mut Vec<AgentEffect>,
    ) -> Next {
        let at = now.since_boot;
        match (asked, answer) {
            (InFlight::Open, StoreAnswer::Opened(found)) => self.found(found, at, effects),
            (InFlight::Close(then), StoreAnswer::Closed) => self.closed(then, now, effects),
            (InFlight::SandboxesForStore(sources), StoreAnswer::Sandboxes(all)) => {
                self.store_sources_known(*sources, all)
            }
            (InFlight::Make(count), StoreAnswer::Made(made)) => self.made(count, made, at),
            (InFlight::Free(attachment, reason), StoreAnswer::Freed(freed)) => {
                self.freed(&attachment, reason, freed, at, effects)
            }
            (InFlight::SandboxesForRanges(pending), StoreAnswer::Sandboxes(all)) => {
                self.sandboxes_listed(pending, all, at)
            }
            (InFlight::Restrict(pending), StoreAnswer::Restricted) => {
                self.ask_about_new_ranges(pending, at)
            }
            (InFlight::Hold(pending), StoreAnswer::Held) => {
                self.ranges_written(*pending, at, effects)
            }
            (InFlight::Look(then), StoreAnswer::Looked(Ok(looked))) => {
                self.looked(looked, then, now, effects)
            }
            (InFlight::LookAgain(then), StoreAnswer::Looked(Ok(looked))) => {
                self.apply_snapshot(looked, now, effects);
                Next::Go(then)
            }
            (InFlight::Release(cidr, mut releasing), StoreAnswer::Released(is_gone)) => {
                if is_gone {
                    self.has_released = true;
                    info!(block = %cidr, "released an empty block");
                }
                releasing.any |= is_gone;
                self.release(*releasing, now, effects)
            }
            (InFlight::EndConflicts(mut releasing), StoreAnswer::ConflictsEnded(any)) => {
                releasing.any |= any;
                self.withdraw(*releasing, now, effects)
            }
            (InFlight::Withdraw(mut releasing), StoreAnswer::Withdrawn(any)) => {
                releasing.any |= any;
                self.release(*releasing, now, effects)
            }
            (InFlight::ReadNotes, StoreAnswer::Notes(notes)) => {
                self.notes.read(notes);
                self.compare_notes(at)
            }
            (InFlight::Note(unsaved), StoreAnswer::Noted) => {
                self.notes.written(*unsaved);
                Next::Go(Phase::Publish)
            }
            (asked, StoreAnswer::Failed(trouble) | StoreAnswer::Looked(Err(trouble))) => {
                let then = match asked {
                    InFlight::Restrict(pending) | InFlight::Hold(pending) => {
                        self.write_ranges_again(&pending.target);
                        Phase::Look
                    }
                    InFlight::ReadNotes | InFlight::Note(_) => {
                        self.notes.failed(at);
                        Phase::Publish
                    }
                    _ => Phase::Notes,
                };
                self.store_failed(&trouble, then, at)
            }
            // The answer belongs to another question, so the cycle still waits.
            (asked, _) => Next::Wait(asked),
        }
    }

    /// Handles an error of the store. A lost store is closed. After any other error the cycle continues with the phase
    /// `then`.
    pub(super) fn store_failed(
        &mut self,
        trouble: &StoreTrouble,
        then: Phase,
        now: Duration,
    ) -> Next {
        warn!("{}", trouble.text);
        if trouble.is_lost {
            self.is_open = false;
            self.snapshot = None;
            self.proven.clear();
            return Next::Ask(
                InFlight::Close(AfterClose::Open),
                StoreQuestion::Close(STARTING),
            );
        }
        self.look_at = now + STORE_PAUSE;
        Next::Go(then)
    }

    fn free(&mut self) -> Next {
        match self.proven.pop_front() {
            Some((attachment, reason)) => {
                let question = StoreQuestion::Free(attachment.clone());
                Next::Ask(InFlight::Free(attachment, reason), question)
            }
            None => Next::Go(Phase::WriteRanges),
        }
    }

    fn freed(
        &mut self,
        attachment: &Attachment,
        reason: LeakReason,
        freed: Result<(), String>,
        now: Duration,
        effects: &mut Vec<AgentEffect>,
    ) -> Next {
        let name = format!(
            "{}/{}/{}",
            attachment.network, attachment.container_id, attachment.ifname
        );
        match freed {
            Ok(()) => {
                info!(
                    attachment = name,
                    reason = reason.as_str(),
                    "released a leaked attachment"
                );
                effects.push(AgentEffect::Count(CountedEvent::Freed(reason)));
                self.look_at = now;
            }
            Err(refusal) => warn!(
                attachment = name,
                "a leaked attachment cannot be released: {refusal}"
            ),
        }
        Next::Go(Phase::Free)
    }

    /// Asks for a look at the store. After the answer, the cycle continues with the phase `then`.
    pub(super) fn look(&mut self, then: Phase, now: Duration) -> Next {
        self.looked_at = now;
        self.look_at = now + LOOK_PAUSE.1;
        Next::Ask(InFlight::Look(then), StoreQuestion::Look)
    }

    fn looked(
        &mut self,
        looked: LeakScan,
        then: Phase,
        now: &Now,
        effects: &mut Vec<AgentEffect>,
    ) -> Next {
        let pending_adds = &self.serving.pending_adds;
        let remaining = to_release(&looked.snapshot, pending_adds, &self.recalled());
        let releasing = Releasing {
            remaining: remaining.into(),
            any: false,
            looked,
            then,
        };
        let ended = self.subnet().map_or(Vec::new(), |subnet| {
            conflicts::ended(&releasing.looked.snapshot, &subnet.conflict_over)
        });
        if !ended.is_empty() {
            let question = StoreQuestion::Transact(Transaction::EndConflicts(ended));
            return Next::Ask(InFlight::EndConflicts(Box::new(releasing)), question);
        }
        self.withdraw(releasing, now, effects)
    }

    /// Withdraws the ranges that the controller has requested and that are empty, and then releases blocks. If the
    /// watch of the NodeSubnet is not established, withdraws nothing.
    fn withdraw(
        &mut self,
        releasing: Releasing,
        now: &Now,
        effects: &mut Vec<AgentEffect>,
    ) -> Next {
        let snapshot = &releasing.looked.snapshot;
        let can_withdraw = snapshot.pending_withdrawals.iter().any(|it| it.is_empty);
        if can_withdraw && self.subnet_followed {
            let question = StoreQuestion::Transact(Transaction::Withdraw);
            return Next::Ask(InFlight::Withdraw(Box::new(releasing)), question);
        }
        self.release(releasing, now, effects)
    }

    /// Releases the next block. After the last block, looks at the store again if it has changed since the last look.
    fn release(&mut self, mut it: Releasing, now: &Now, effects: &mut Vec<AgentEffect>) -> Next {
        if let Some((cidr, uid)) = it.remaining.pop_front().filter(|_| self.subnet_followed) {
            let question = StoreQuestion::Transact(Transaction::Release(cidr, uid));
            return Next::Ask(InFlight::Release(cidr, Box::new(it)), question);
        }
        if it.any {
            return Next::Ask(InFlight::LookAgain(it.then), StoreQuestion::Look);
        }
        self.apply_snapshot(it.looked, now, effects);
        Next::Go(it.then)
    }

    /// Records the result of a look at the store, and sets the time of the next look.
    fn apply_snapshot(&mut self, looked: LeakScan, now: &Now, effects: &mut Vec<AgentEffect>) {
        self.look_for_leaks(&looked, now, effects);
        let snapshot = Arc::new(looked.snapshot);
        effects.push(AgentEffect::Count(CountedEvent::Snapshot(Arc::clone(
            &snapshot,
        ))));
        let held = allocation(&snapshot);
        if held != *self.held {
            self.held = Arc::new(held);
            effects.push(AgentEffect::Holding(Arc::clone(&self.held)));
        }
        let at = now.since_boot;
        if snapshot.blocks.iter().any(|it| it.counts.cooling > 0) {
            self.look_at = self.look_at.min(at + COOLING_PAUSE);
        }
        if let Some(end) = self.serving.wishes_end {
            self.look_at = self.look_at.min(end);
        }
        self.report_conflicts(&snapshot, effects);
        self.probe_ahead(&snapshot, at, effects);
        self.snapshot = Some(snapshot);
    }

    /// Emits an event for each conflict that the last look did not show. The first look after a start causes no event,
    /// because an earlier agent process has already reported the conflicts in the store.
    fn report_conflicts(&mut self, snapshot: &Snapshot, effects: &mut Vec<AgentEffect>) {
        let all = snapshot.conflicts.iter();
        let all: BTreeSet<_> = all.map(|it| (it.address, it.since_ms)).collect();
        if let Some(before) = &self.conflicts {
            let is_new = |it: &&Conflict| !before.contains(&(it.address, it.since_ms));
            for conflict in snapshot.conflicts.iter().filter(is_new) {
                self.emit_node_event(conflicts::REASON, conflicts::text(conflict), effects);
            }
        }
        self.conflicts = Some(all);
    }

    /// Starts a round of probes if probes are needed, no round is under way, and the pause after a failed round is
    /// over.
    fn probe_ahead(&mut self, snapshot: &Snapshot, now: Duration, effects: &mut Vec<AgentEffect>) {
        let Some(targets) = conflicts::to_probe(snapshot).filter(|_| !self.is_probing) else {
            return;
        };
        if now < self.probe_at {
            self.look_at = self.look_at.min(self.probe_at);
            return;
        }
        self.is_probing = true;
        effects.push(AgentEffect::Probe(targets));
    }

    /// Records the outcome of a round of probes.
    pub(super) fn probed(&mut self, probed: Result<(), String>, now: Duration) {
        self.is_probing = false;
        match probed {
            Ok(()) => {
                self.probe_problem.clear();
                self.look_at = self.look_at.min(now);
            }
            Err(problem) => {
                self.probe_at = now + PROBE_PAUSE;
                self.look_at = self.look_at.min(self.probe_at);
                if self.probe_problem != problem {
                    warn!("{problem}");
                    self.probe_problem = problem;
                }
            }
        }
    }

    fn look_for_leaks(&mut self, looked: &LeakScan, now: &Now, effects: &mut Vec<AgentEffect>) {
        let at = now.since_boot;
        let evidence = NodeEvidence {
            boot: now.boot.clone(),
            gone: looked.gone.clone(),
            ..NodeEvidence::default()
        };
        let subnet = self.subnet().cloned();
        let spec = subnet.as_deref().and_then(|it| it.spec_of(self.node_uid()));
        let none = LeakClaims::NONE;
        let subnet = subnet.as_deref();
        let claims = LeakClaims {
            leak_candidates: spec.map_or(none.leak_candidates, |it| &it.leak_candidates),
            container_gone: subnet.map_or(none.container_gone, |it| &it.container_gone),
        };
        let look = self
            .leaks
            .look(&looked.snapshot, &self.watched.pods, claims, &evidence, at);
        let reasons = self.leaks.reasons();
        if reasons != *self.reasons {
            self.reasons = Arc::new(reasons);
            effects.push(AgentEffect::LeakCandidates(Arc::clone(&self.reasons)));
        }
        if let Some(next) = look.next {
            self.look_at = self.look_at.min(next.max(at + LOOK_PAUSE.0));
        }
        if !look.due.is_empty() && !self.is_proving {
            self.is_proving = true;
            effects.push(AgentEffect::Prove(look.due, now.boot.clone()));
        }
    }

    /// Writes to the store which pools the pods on this node may use.
    fn note_pods(&mut self, now: Duration) -> Next {
        if self.notes.due_at().is_none_or(|at| at > now) {
            return Next::Go(Phase::Publish);
        }
        if self.notes.is_unread() {
            return Next::Ask(
                InFlight::ReadNotes,
                StoreQuestion::Transact(Transaction::ReadNotes),
            );
        }
        self.compare_notes(now)
    }

    fn compare_notes(&mut self, now: Duration) -> Next {
        let unsaved = self.notes.look(&self.watched, now);
        if unsaved.is_empty() {
            return Next::Go(Phase::Publish);
        }
        let question = StoreQuestion::Transact(Transaction::Note(
            unsaved.notes.clone(),
            unsaved.gone.clone(),
        ));
        Next::Ask(InFlight::Note(Box::new(unsaved)), question)
    }

    /// Returns the blocks that the agent should release once they are empty, because the controller recalls them.
    fn recalled(&self) -> BTreeSet<Cidr> {
        let spec = self.subnet().and_then(|it| it.spec_of(self.node_uid()));
        let blocks = spec.into_iter().flat_map(|spec| &spec.blocks);
        blocks
            .filter(|it| it.recall == Some(Recall::IfEmpty))
            .filter_map(|it| Cidr::parse_strict(&it.cidr).ok())
            .collect()
    }
}
