//! Requests about objects that one answer at a time is awaited for.
//!
//! After an answer that was lost, and after a guard that failed, nobody knows what is there: it is read before
//! the next write.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::request::{Outcome, Refusal};
use crate::reconcile::Answer;

/// Which objects have a request in flight, and which have to be read.
#[derive(Debug)]
pub(crate) struct InFlight<K, W = ()> {
    /// With what is written
    sent: BTreeMap<K, W>,
    to_read: BTreeSet<K>,
}

impl<K, W> Default for InFlight<K, W> {
    fn default() -> Self {
        InFlight {
            sent: BTreeMap::new(),
            to_read: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Clone, W> InFlight<K, W> {
    /// A read of the object, or a write of that, is sent.
    pub(crate) fn send(&mut self, key: K, what: W) {
        self.to_read.remove(&key);
        self.sent.insert(key, what);
    }

    /// Takes in what became of it.
    pub(crate) fn answered(&mut self, key: &K, answer: &Answer) {
        self.sent.remove(key);
        self.note(key, answer);
    }

    /// The same of a request about another part of the object.
    pub(crate) fn note(&mut self, key: &K, answer: &Answer) {
        let is_known = match answer.outcome {
            Outcome::Refused(Refusal::Guard(_)) | Outcome::Unclear(_) => false,
            // Without an effect; and a read has shown nothing.
            Outcome::Refused(Refusal::Busy(_) | Refusal::Rejected(_) | Refusal::NotSent) => {
                answer.wrote
            }
            _ => true,
        };
        if !is_known {
            self.to_read.insert(key.clone());
        }
    }

    /// The object is gone.
    pub(crate) fn forget(&mut self, key: &K) {
        self.sent.remove(key);
        self.to_read.remove(key);
    }

    /// What is there has become known in another way.
    pub(crate) fn forget_unclear(&mut self, key: &K) {
        self.to_read.remove(key);
    }

    /// Whether an answer is awaited.
    pub(crate) fn is_sent(&self, key: &K) -> bool {
        self.sent.contains_key(key)
    }

    /// Whether the next request has to be a read.
    pub(crate) fn is_to_read(&self, key: &K) -> bool {
        self.to_read.contains(key)
    }

    /// Whether a write may still be on its way.
    pub(crate) fn is_open(&self, key: &K) -> bool {
        self.is_sent(key) || self.is_to_read(key)
    }

    /// Whether any answer is awaited.
    pub(crate) fn is_any_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    /// What is written, where an answer to a write is awaited.
    pub(crate) fn written(&self, key: &K) -> Option<&W> {
        self.sent.get(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Purpose;

    #[test]
    fn what_nobody_knows_is_read_before_it_is_written_again() {
        let refused = Outcome::Refused;
        let table = [
            (Outcome::Unclear(String::new()), [true, true]),
            (refused(Refusal::Guard(String::new())), [true, true]),
            // Without an effect; but a read that was refused has shown nothing.
            (refused(Refusal::Busy(None)), [false, true]),
            (refused(Refusal::Missing), [false, false]),
            (Outcome::Gone, [false, false]),
        ];
        for (outcome, to_read) in table {
            let after = [true, false].map(|wrote| {
                let mut requests = InFlight::default();
                requests.send("a", ());
                assert!(requests.is_sent(&"a"));
                let answer = Answer {
                    wrote,
                    ..Answer::to_write(&Purpose::DefaultPool, &outcome)
                };
                requests.answered(&"a", &answer);
                assert!(!requests.is_sent(&"a"));
                requests.is_to_read(&"a")
            });
            assert_eq!(after, to_read, "{outcome:?}");
        }
    }
}
