//! The writes that this leader intends, and which of these writes its Lease already names.
//!
//! # Guarantees
//! - An allocation of podCIDRs to a node is sent only after a Lease write that names the allocation has succeeded. This
//!   Lease write began after the node was read. The Lease names the allocation until the outcome of the allocation is
//!   known.
//! - Every other allocating write gets a number when it is decided. The write is sent only after a Lease write has
//!   succeeded that began after the decision (see [`crate::cluster::lease_task::WriteGate`]). So a write that a leader
//!   decides after it lost its Lease is never sent.
//! - The size of the names in the Lease is bounded.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::queue::Queue;
use crate::cluster::intents::{SeenVersions, WriteIntent, WriteIntents};
use crate::cluster::lease::LeaseContent;
use crate::cluster::names::{NodeName, ObjectUid, TermId};
use crate::cluster::objects::Node;
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// A further allocation is named only while the Lease names fewer than `LIMIT` allocations, in fewer than `BYTES`
/// bytes. Allocations that are set aside do not count.
const LIMIT: usize = 512;
const BYTES: usize = 40 * 1024;

/// Allocations that keep failing are set aside. The Lease names them in addition to the others, in at most this many
/// bytes. The API server allows 256 KiB for all annotations of an object together.
const ASIDE: usize = 128 * 1024;

/// The allocations and other writes that a leader intends during one term.
#[derive(Clone, Debug, Default)]
pub(crate) struct IntentBook {
    past: InheritedIntents,
    named: BTreeMap<(ObjectUid, Vec<Cidr>), IntentEntry>,
    /// How many of the named allocations are not set aside, and how many bytes these take in the Lease
    open: (usize, usize),
    /// How many bytes the allocations that are set aside take in the Lease
    aside: usize,
    /// Nodes whose allocations could not be named because the Lease named too many others
    waiting: Queue<NodeName>,
    /// The highest number of all Lease writes that this leader has requested from the elector
    requested: u64,
    /// The highest number of all Lease writes that have succeeded
    confirmed: u64,
    /// Whether a decided write waits for a Lease write that has not been requested from the elector. The number of this
    /// Lease write will be `requested` + 1
    is_wanted: bool,
    /// Whether the Lease may still name allocations whose outcome is known already
    names_settled: bool,
}

/// Whether this leader knows the writes that earlier leaders have in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum InheritedIntents {
    /// This process does not lead. It computes what a leader would do, but sends no writes. So the Lease need not name
    /// any write.
    #[default]
    Irrelevant,
    /// Earlier leaders may have writes in flight that this leader does not know.
    Unknown,
    /// This leader names every write that earlier leaders may have in flight.
    Known,
}

#[derive(Clone, Debug)]
struct IntentEntry {
    name: NodeName,
    /// The term annotation that the write tests. If the node's annotation changes, the Lease must name the allocation
    /// again
    guard: (Option<TermId>, bool),
    since: u64,
    is_aside: bool,
}

impl IntentBook {
    /// Creates the book of a new leader, which names no allocations yet. `known` says whether the leader knows which
    /// writes earlier leaders have in flight.
    pub(crate) fn of_leader(known: bool) -> Self {
        IntentBook {
            past: if known {
                InheritedIntents::Known
            } else {
                InheritedIntents::Unknown
            },
            // This requests a Lease write. Once it has succeeded, the next leader learns from the Lease that the Lease
            // names all allocations in flight.
            is_wanted: known,
            ..IntentBook::default()
        }
    }

    /// Returns whether this leader knows which writes earlier leaders have in flight.
    pub(crate) fn is_known(&self) -> bool {
        self.past != InheritedIntents::Unknown
    }

    /// Records that this leader names every write that earlier leaders have in flight.
    pub(crate) fn mark_written(&mut self) {
        (self.past, self.is_wanted) = (InheritedIntents::Known, true);
    }

    /// Requests a write of the Lease, even if the names in it have not changed.
    pub(crate) fn want_write(&mut self) {
        self.is_wanted = true;
    }

    /// Returns the number for a write that is decided now, and requests the Lease write with that number. The decided
    /// write must wait for that Lease write.
    pub(crate) fn number(&mut self) -> u64 {
        self.is_wanted = true;
        self.requested + 1
    }

    /// Returns whether this allocation of podCIDRs may be sent to the node. If not, a Lease write will name the
    /// allocation as soon as the Lease has room. The caller has to try again when [`IntentBook::confirmed`] or
    /// [`IntentBook::room`] returns the node.
    pub(crate) fn may_assign(&mut self, node: &Node, cidrs: &[Cidr]) -> bool {
        if self.past == InheritedIntents::Irrelevant {
            return true;
        }
        let key = (node.uid.clone(), cidrs.to_vec());
        let guard = (node.term.clone(), node.annotated);
        let (next, confirmed) = (self.requested + 1, self.confirmed);
        if let Some(named) = self.named.get_mut(&key) {
            if named.guard != guard {
                (named.guard, named.since) = (guard, next);
                self.is_wanted = true;
            }
            return named.since <= confirmed || Mutation::AllocatedBeforeNamed.is_on();
        }
        if self.open.0 >= LIMIT || self.open.1 >= BYTES {
            self.waiting.add(node.name.clone());
            return false;
        }
        self.add(node, key, guard, next);
        Mutation::AllocatedBeforeNamed.is_on()
    }

    /// Names an allocation that an earlier leader named in the Lease, because the write of the allocation may still be
    /// in flight.
    pub(crate) fn inherit(&mut self, node: &Node, cidrs: &[Cidr]) {
        let guard = (node.term.clone(), node.annotated);
        let next = self.requested + 1;
        self.add(node, (node.uid.clone(), cidrs.to_vec()), guard, next);
    }

    fn add(
        &mut self,
        node: &Node,
        key: (ObjectUid, Vec<Cidr>),
        guard: (Option<TermId>, bool),
        since: u64,
    ) {
        let bytes = size(&node.name, &key);
        self.open = (self.open.0 + 1, self.open.1 + bytes);
        self.is_wanted = true;
        let named = IntentEntry {
            name: node.name.clone(),
            guard,
            since,
            is_aside: false,
        };
        self.named.insert(key, named);
    }

    /// Stops naming the allocations to the node with this UID, because the outcome of all writes to the node is known.
    pub(crate) fn settled(&mut self, uid: &ObjectUid) {
        for key in self.of_uid(uid) {
            if let Some(named) = self.named.remove(&key) {
                let bytes = size(&named.name, &key);
                if named.is_aside {
                    self.aside -= bytes;
                } else {
                    self.open = (self.open.0 - 1, self.open.1 - bytes);
                }
                self.names_settled = true;
            }
        }
    }

    /// Sets aside the allocations to the node with this UID, because they keep failing. The Lease still names them, but
    /// they take no room from other allocations any more. If too many are set aside already, nothing changes.
    pub(crate) fn set_aside(&mut self, uid: &ObjectUid) {
        if Mutation::FailingNamesTakeRoom.is_on() {
            return;
        }
        for key in self.of_uid(uid) {
            let Some(named) = self.named.get_mut(&key).filter(|it| !it.is_aside) else {
                continue;
            };
            let bytes = size(&named.name, &key);
            if self.aside + bytes <= ASIDE {
                named.is_aside = true;
                self.aside += bytes;
                self.open = (self.open.0 - 1, self.open.1 - bytes);
            }
        }
    }

    fn of_uid(&self, uid: &ObjectUid) -> Vec<(ObjectUid, Vec<Cidr>)> {
        let from = self.named.range((uid.clone(), Vec::new())..);
        let of_uid = from.take_while(|((it, _), _)| it == uid);
        of_uid.map(|(key, _)| key.clone()).collect()
    }

    /// Records that the Lease write with this number has succeeded. Returns the nodes whose allocations waited for that
    /// write or an earlier one.
    pub(crate) fn confirmed(&mut self, number: u64) -> Vec<NodeName> {
        let (from, to) = (self.confirmed, number.max(self.confirmed));
        self.confirmed = to;
        if from == to {
            return Vec::new();
        }
        let new = self.named.values();
        let new = new.filter(|named| from < named.since && named.since <= to);
        new.map(|named| named.name.clone()).collect()
    }

    /// Returns nodes that waited for room in the Lease. Returns nothing while more than half of the room is in use, so
    /// that the nodes come in batches. As a result, many nodes cost few Lease writes.
    pub(crate) fn room(&mut self) -> Vec<NodeName> {
        if self.open.0 > LIMIT / 2 || self.open.1 > BYTES / 2 {
            return Vec::new();
        }
        let next = std::iter::from_fn(|| self.waiting.pop(Duration::ZERO));
        let next: Vec<NodeName> = next.take(LIMIT - self.open.0).collect();
        // The Lease write that names these nodes also leaves out settled allocations. So no extra write is needed to
        // leave them out.
        self.names_settled &= next.is_empty();
        next
    }

    /// Returns the content that the Lease should get, or `None` if no Lease write is needed. The content names only
    /// allocations whose outcome is not known yet. It is harmless if the Lease still names others, so they are removed
    /// together with a later write, or when no allocation is left to name. `known` has the versions that the cache has
    /// reached.
    pub(crate) fn take(&mut self, term: &TermId, known: SeenVersions) -> Option<LeaseContent> {
        let is_wanted = std::mem::take(&mut self.is_wanted);
        let empty = self.names_settled && self.named.is_empty();
        if !is_wanted && !empty {
            return None;
        }
        self.names_settled = false;
        self.requested += u64::from(is_wanted);
        let named = self.named.iter().map(|((uid, cidrs), named)| WriteIntent {
            name: named.name.clone(),
            uid: uid.clone(),
            cidrs: cidrs.clone(),
        });
        let intents = (self.past == InheritedIntents::Known).then(|| {
            Arc::new(WriteIntents {
                assignments: named.collect(),
                known: Some(known),
            })
        });
        Some(LeaseContent {
            term: term.clone(),
            number: self.requested,
            intents,
            agents_heard: false,
        })
    }
}

/// Returns the approximate number of bytes that an allocation takes in the Lease.
fn size(name: &NodeName, (uid, cidrs): &(ObjectUid, Vec<Cidr>)) -> usize {
    name.len() + uid.len() + 20 * cidrs.len() + 10
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::demand::tests::node;

    fn range(text: &str) -> Vec<Cidr> {
        vec![Cidr::parse_strict(text).unwrap()]
    }

    fn term() -> TermId {
        "1-a".into()
    }

    #[test]
    fn an_assignment_waits_for_a_lease_write_that_was_begun_after_it_was_named() {
        let mut intents = IntentBook::of_leader(true);
        let before = intents.take(&term(), SeenVersions::default()).unwrap();
        let (n, cidrs) = (node("n"), range("10.0.0.0/24"));
        assert!(!intents.may_assign(&n, &cidrs));
        assert!(intents.confirmed(before.number).is_empty());
        assert!(
            !intents.may_assign(&n, &cidrs),
            "an older write came through"
        );
        let named = intents.take(&term(), SeenVersions::default()).unwrap();
        assert_eq!(named.intents.unwrap().assignments.len(), 1);
        assert_eq!(
            intents.confirmed(named.number),
            std::slice::from_ref(&n.name)
        );
        assert!(intents.may_assign(&n, &cidrs));
        assert!(
            !intents.may_assign(&n, &range("10.0.1.0/24")),
            "another range"
        );
        intents.settled(&n.uid);
        assert!(intents.named.is_empty());
    }

    #[test]
    fn an_assignment_is_named_again_after_a_touch_of_its_node() {
        let mut intents = IntentBook::of_leader(true);
        let (n, cidrs) = (node("n"), range("10.0.0.0/24"));
        intents.may_assign(&n, &cidrs);
        let named = intents.take(&term(), SeenVersions::default()).unwrap();
        intents.confirmed(named.number);
        let touched = Node {
            term: Some("2-b".into()),
            ..n.clone()
        };
        assert!(!intents.may_assign(&touched, &cidrs));
        assert!(
            intents
                .take(&term(), SeenVersions::default())
                .is_some_and(|it| it.number > named.number)
        );
    }

    #[test]
    fn an_assignment_that_keeps_failing_stays_named_and_takes_no_room() {
        let mut intents = IntentBook::of_leader(true);
        let cidrs = range("10.0.0.0/24");
        let failing: Vec<Node> = (0..LIMIT).map(|i| node(&format!("n{i}"))).collect();
        for node in &failing {
            intents.may_assign(node, &cidrs);
        }
        let another = node("another");
        intents.may_assign(&another, &cidrs);
        assert_eq!(intents.open.0, LIMIT);
        for node in &failing {
            intents.set_aside(&node.uid);
            intents.set_aside(&node.uid);
        }
        assert_eq!(intents.room(), std::slice::from_ref(&another.name));
        intents.may_assign(&another, &cidrs);
        let named = intents
            .take(&term(), SeenVersions::default())
            .unwrap()
            .intents
            .unwrap();
        assert_eq!(named.assignments.len(), LIMIT + 1);
        for node in failing.iter().chain([&another]) {
            intents.settled(&node.uid);
        }
        assert_eq!((intents.open, intents.aside), ((0, 0), 0));
    }

    #[test]
    fn the_intents_stay_below_the_size_limit_of_annotations() {
        let mut intents = IntentBook::of_leader(true);
        let cidrs = [range("10.0.0.0/24"), range("fd00::/64")].concat();
        for i in 0..10_000 {
            let mut node = node(&format!("{i:0>253}"));
            node.uid = format!("{i:0>36}").into();
            intents.may_assign(&node, &cidrs);
            intents.set_aside(&node.uid);
        }
        let named = intents
            .take(&term(), SeenVersions::default())
            .unwrap()
            .intents
            .unwrap();
        let bytes = named.write(i64::MAX).len();
        assert!(bytes < 220 * 1024, "{bytes}");
    }

    #[test]
    fn thousands_of_assignments_are_named_in_few_writes() {
        let mut intents = IntentBook::of_leader(true);
        let cidrs = range("10.0.0.0/24");
        let mut queue: VecDeque<Node> = (0..5_000).map(|i| node(&format!("n{i}"))).collect();
        let all: BTreeMap<NodeName, Node> =
            queue.iter().map(|n| (n.name.clone(), n.clone())).collect();
        let (mut writes, mut done) = (0, 0);
        while done < 5_000 {
            while let Some(node) = queue.pop_front() {
                if intents.may_assign(&node, &cidrs) {
                    intents.settled(&node.uid);
                    done += 1;
                }
            }
            queue.extend(intents.room().iter().map(|name| all[name].clone()));
            if let Some(wanted) = intents.take(&term(), SeenVersions::default()) {
                writes += 1;
                assert!(wanted.intents.unwrap().write(1).len() < 64 * 1024);
                queue.extend(
                    intents
                        .confirmed(wanted.number)
                        .iter()
                        .map(|n| all[n].clone()),
                );
            }
        }
        assert!(writes <= 5_000 / 300, "{writes} writes of the Lease");
    }
}
