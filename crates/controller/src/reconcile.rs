//! The trait of a reconcile loop, and the four steps that each loop is made of.
//!
//! | step | where |
//! |---|---|
//! | gather | a key that is due is popped from a queue, and its objects are looked up |
//! | decide | nothing, nothing yet, or one request |
//! | write | the request is returned with its [`Purpose`]; nothing else has an effect outside |
//! | report | the answer comes back: the loop updates its state and tells other loops ([`AffectedLoops`]) |

use std::time::Duration;

use super::queue::{Load, Queue};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::request::{ApiRequest, RequestOutcome};

/// A reconcile loop, as the leader runs, wakes and measures it.
pub trait Loop {
    /// Returns how many keys wait, and when the loop may have work again without an event.
    fn load(&self) -> Load;

    /// Gathers, decides and returns the next request that is not critical, if any.
    fn next(&mut self, _: &mut Context) -> Option<(ApiRequest, Purpose)> {
        None
    }

    /// Takes in the answer to one of the loop's requests. The objects in it are in the cache already.
    fn answered(&mut self, _: &RequestAnswer, _: &mut Context) -> AffectedLoops {
        AffectedLoops::default()
    }
}

/// The answer to a request, as its loop receives it.
#[derive(Clone, Copy, Debug)]
pub struct RequestAnswer<'a> {
    /// What the request was for
    pub purpose: &'a Purpose,
    /// Whether the request was a write
    pub wrote: bool,
    /// The outcome
    pub outcome: &'a RequestOutcome,
    /// Whether the list in the answer was applied to the cache
    pub taken: bool,
}

#[cfg(test)]
impl<'a> RequestAnswer<'a> {
    /// Builds the answer to a write.
    pub(crate) fn to_write(purpose: &'a Purpose, outcome: &'a RequestOutcome) -> Self {
        RequestAnswer {
            purpose,
            wrote: true,
            outcome,
            taken: false,
        }
    }
}

/// What a loop decides about a key that is due.
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
pub(crate) enum KeyDecision {
    /// Nothing to do, or something else will add the key again.
    Done,
    /// Look at the key again at this monotonic time.
    Later(Duration),
    /// Send this request.
    Send(ApiRequest, Purpose),
}

/// Pops keys off a queue until one needs a request.
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
