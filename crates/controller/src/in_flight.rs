//! Objects of which only one request at a time may be in flight.
//!
//! After a lost answer or a failed guard the state of the object is unknown: it must be read before the next write.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::request::{Rejection, RequestOutcome};
use crate::reconcile::RequestAnswer;

/// Objects with a request in flight, and objects that must be read first.
#[derive(Debug)]
pub(crate) struct InFlight<K, W = ()> {
    /// Objects with a request in flight, with the content if it is a write
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
    /// Records that a read, or a write of `what`, is sent.
    pub(crate) fn send(&mut self, key: K, what: W) {
        self.to_read.remove(&key);
        self.sent.insert(key, what);
    }

    /// Takes in the answer to the request in flight.
    pub(crate) fn answered(&mut self, key: &K, answer: &RequestAnswer) {
        self.sent.remove(key);
        self.note(key, answer);
    }

    /// Takes in the answer to a request about another part of the object, such as its status.
    pub(crate) fn note(&mut self, key: &K, answer: &RequestAnswer) {
        let is_known = match answer.outcome {
            RequestOutcome::Rejected(Rejection::Guard(_)) | RequestOutcome::Indeterminate(_) => {
                false
            }
            // A rejected write has no effect; a rejected read has shown nothing.
            RequestOutcome::Rejected(
                Rejection::Busy(_) | Rejection::Rejected(_) | Rejection::NotSent,
            ) => answer.wrote,
            _ => true,
        };
        if !is_known {
            self.to_read.insert(key.clone());
        }
    }

    /// Forgets an object that is gone.
    pub(crate) fn forget(&mut self, key: &K) {
        self.sent.remove(key);
        self.to_read.remove(key);
    }

    /// Drops the pending read: the state of the object became known in another way.
    pub(crate) fn forget_indeterminate(&mut self, key: &K) {
        self.to_read.remove(key);
    }

    /// Returns whether a request is in flight.
    pub(crate) fn is_sent(&self, key: &K) -> bool {
        self.sent.contains_key(key)
    }

    /// Returns whether the next request has to be a read.
    pub(crate) fn is_to_read(&self, key: &K) -> bool {
        self.to_read.contains(key)
    }

    /// Returns whether a write may still take effect.
    pub(crate) fn is_open(&self, key: &K) -> bool {
        self.is_sent(key) || self.is_to_read(key)
    }

    /// Returns whether any request is in flight.
    pub(crate) fn is_any_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Returns the content of the request in flight.
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
        let refused = RequestOutcome::Rejected;
        let table = [
            (RequestOutcome::Indeterminate(String::new()), [true, true]),
            (refused(Rejection::Guard(String::new())), [true, true]),
            // A rejected write had no effect, but a rejected read has shown nothing.
            (refused(Rejection::Busy(None)), [false, true]),
            (refused(Rejection::Missing), [false, false]),
            (RequestOutcome::Gone, [false, false]),
        ];
        for (outcome, to_read) in table {
            let after = [true, false].map(|wrote| {
                let mut requests = InFlight::default();
                requests.send("a", ());
                assert!(requests.is_sent(&"a"));
                let answer = RequestAnswer {
                    wrote,
                    ..RequestAnswer::to_write(&Purpose::DefaultPool, &outcome)
                };
                requests.answered(&"a", &answer);
                assert!(!requests.is_sent(&"a"));
                requests.is_to_read(&"a")
            });
            assert_eq!(after, to_read, "{outcome:?}");
        }
    }
}
