//! Requests in flight, of which each object has at most one at a time.
//!
//! If an answer is lost or a precondition fails, the state of the object is unknown. In that case the object must be
//! read before the next write.

use std::collections::BTreeSet;

use crate::cluster::request::{Rejection, RequestOutcome};
use crate::reconcile::RequestAnswer;

/// Objects with a request in flight, and objects that must be read before they are written.
#[derive(Clone, Debug)]
pub(crate) struct InFlight<K> {
    /// Objects with a request in flight
    sent: BTreeSet<K>,
    to_read: BTreeSet<K>,
}

impl<K> Default for InFlight<K> {
    fn default() -> Self {
        InFlight {
            sent: BTreeSet::new(),
            to_read: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Clone> InFlight<K> {
    /// Records that a request for the object is sent.
    pub(crate) fn send(&mut self, key: K) {
        self.to_read.remove(&key);
        self.sent.insert(key);
    }

    /// Records the answer to the request in flight. If the answer leaves the object's state unknown, the object must be
    /// read next.
    pub(crate) fn answered(&mut self, key: &K, answer: &RequestAnswer) {
        self.sent.remove(key);
        self.note(key, answer);
    }

    /// Records the answer to a request about another part of the object, such as the status. Such a request is not
    /// among the requests in flight, but its answer also decides whether the object must be read next.
    pub(crate) fn note(&mut self, key: &K, answer: &RequestAnswer) {
        let is_known = match answer.outcome {
            RequestOutcome::Rejected(Rejection::Guard(_)) | RequestOutcome::Indeterminate(_) => {
                false
            }
            // A rejected write has no effect, so the object's state is still known. A rejected read returns no state,
            // so the read is repeated.
            RequestOutcome::Rejected(
                Rejection::Busy(_) | Rejection::Rejected(_) | Rejection::NotSent,
            ) => answer.wrote,
            _ => true,
        };
        if !is_known {
            self.to_read.insert(key.clone());
        }
    }

    /// Removes all records of an object that is gone.
    pub(crate) fn forget(&mut self, key: &K) {
        self.sent.remove(key);
        self.to_read.remove(key);
    }

    /// Drops the pending read, because the state of the object became known without a read.
    pub(crate) fn forget_indeterminate(&mut self, key: &K) {
        self.to_read.remove(key);
    }

    pub(crate) fn is_sent(&self, key: &K) -> bool {
        self.sent.contains(key)
    }

    pub(crate) fn is_to_read(&self, key: &K) -> bool {
        self.to_read.contains(key)
    }

    /// Returns whether a write may still take effect, because a request is in flight or the object must be read next.
    pub(crate) fn is_open(&self, key: &K) -> bool {
        self.is_sent(key) || self.is_to_read(key)
    }

    pub(crate) fn is_any_sent(&self) -> bool {
        !self.sent.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Purpose;

    #[test]
    fn an_object_of_unknown_state_is_read_before_the_next_write() {
        let refused = RequestOutcome::Rejected;
        let table = [
            (RequestOutcome::Indeterminate(String::new()), [true, true]),
            (refused(Rejection::Guard(String::new())), [true, true]),
            // A rejected write has no effect, so no read is needed. A rejected read returns no state, so the read is
            // repeated.
            (refused(Rejection::Busy(None)), [false, true]),
            (refused(Rejection::Missing), [false, false]),
            (RequestOutcome::Gone, [false, false]),
        ];
        for (outcome, to_read) in table {
            let after = [true, false].map(|wrote| {
                let mut requests = InFlight::default();
                requests.send("a");
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
