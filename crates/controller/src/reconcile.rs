//! The trait of a reconcile loop, and the four steps of which each loop consists.
//!
//! | step | what happens |
//! |---|---|
//! | gather | a ready key is removed from a queue, and its objects are looked up in the cache |
//! | decide | the loop decides that the key needs nothing now, one request now, or another check later |
//! | write | the loop returns the request with its [`Purpose`]; the loop has no other effect outside this process |
//! | report | the loop gets the answer, updates its state, and returns work for other loops ([`AffectedLoops`]) |

use std::time::Duration;

use super::queue::{Load, Queue};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::request::{ApiRequest, RequestOutcome};

/// A reconcile loop. The leader gets requests from the loop, passes answers to it and wakes it.
pub trait Loop {
    /// Returns how many keys wait in the loop's queues, and when the loop may have work even if no event arrives.
    fn load(&self) -> Load;

    /// Returns the loop's next request, or `None` if it has none. Critical requests come from `next_urgent` etc.
    fn next(&mut self, _: &mut Context) -> Option<(ApiRequest, Purpose)> {
        None
    }

    /// Handles the answer to one of the loop's requests. The cache already has the objects in the answer. Returns the
    /// objects that other loops must process because of the answer.
    fn answered(&mut self, _: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        AffectedLoops::default()
    }
}

/// The answer to a request, for the loop that sent the request.
#[derive(Clone, Copy, Debug)]
pub struct RequestAnswer<'a> {
    /// The purpose that the loop returned with the request. It contains the key of the object
    pub purpose: &'a Purpose,
    /// Whether the request was a write; if not, it was a read or a list
    pub wrote: bool,
    /// The answer of the API server, or why the outcome is unknown
    pub outcome: &'a RequestOutcome,
    /// Whether the answer shows everything that was written. If false, the API server has accepted the write, but has
    /// dropped a part of it
    pub kept: bool,
    /// Whether the answer is a list that the cache has applied
    pub applied: bool,
}

#[cfg(test)]
impl<'a> RequestAnswer<'a> {
    /// Builds the answer to a write, which contains no list.
    pub(crate) fn to_write(purpose: &'a Purpose, outcome: &'a RequestOutcome) -> Self {
        RequestAnswer {
            purpose,
            wrote: true,
            outcome,
            kept: true,
            applied: false,
        }
    }

    /// Builds the answer to a read or a list that the cache has not applied.
    pub(crate) fn to_read(purpose: &'a Purpose, outcome: &'a RequestOutcome) -> Self {
        RequestAnswer {
            wrote: false,
            ..Self::to_write(purpose, outcome)
        }
    }
}

/// A loop's decision about a ready key.
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
pub(crate) enum KeyDecision {
    /// The key needs no request now. An event or another loop queues the key when it may need one.
    Done,
    /// The key has to be processed again at this monotonic time.
    Later(Duration),
    /// The key needs this request.
    Send(ApiRequest, Purpose),
}

/// Removes ready keys from the queue and decides about each, until one of them needs a request. Returns that request.
pub(crate) fn work_off<L, K: Ord + Clone>(
    it: &mut L,
    queue: fn(&mut L) -> &mut Queue<K>,
    mut look: impl FnMut(&mut L, &K, &mut Context) -> KeyDecision,
    cx: &mut Context,
) -> Option<(ApiRequest, Purpose)> {
    while let Some(key) = queue(it).pop(cx.now.mono) {
        match look(it, &key, cx) {
            KeyDecision::Done => {}
            KeyDecision::Later(at) => queue(it).add_at(key, at),
            KeyDecision::Send(request, purpose) => return Some((request, purpose)),
        }
    }
    None
}
