//! What every reconcile loop is made of.
//!
//! | step | where |
//! |---|---|
//! | gather | a key whose turn has come is taken off a queue, and what it needs is looked up |
//! | decide | what is to be done about it now: nothing, nothing yet, or one request |
//! | write | the request is given out with its [`Purpose`]; nothing else has an effect outside |
//! | report | the answer comes back: what it means to the loop, and ([`Noted`]) to others |

use std::time::Duration;

use super::queue::{Load, Queue};
use super::{Context, Purpose};
use crate::cluster::request::{Outcome, Request};
use crate::registry::blocks::Noted;

/// A reconcile loop: what the leader has to know of each.
pub trait Loop {
    /// What waits in its queues, and when it may have something to do again without an event.
    fn load(&self) -> Load;

    /// Gather, decide, write: the next request of those that no node waits for.
    fn next(&mut self, _: &mut Context) -> Option<(Request, Purpose)> {
        None
    }

    /// Report: takes in the answer to a request of its own. What it shows is in the world already.
    fn answered(&mut self, _: &Answer, _: &mut Context) -> Noted {
        Noted::default()
    }
}

/// The answer to a request.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// What it was for
    pub purpose: &'a Purpose,
    /// Whether it was a write
    pub wrote: bool,
    /// What became of it
    pub outcome: &'a Outcome,
    /// Whether the list that it brings could be taken in
    pub taken: bool,
}

#[cfg(test)]
impl<'a> Answer<'a> {
    /// The answer to a write.
    pub(crate) fn to_write(purpose: &'a Purpose, outcome: &'a Outcome) -> Self {
        Answer {
            purpose,
            wrote: true,
            outcome,
            taken: false,
        }
    }
}

/// What a loop makes of a key whose turn has come.
#[expect(
    clippy::large_enum_variant,
    reason = "short-lived, and most are the large ones"
)]
pub(crate) enum Look {
    /// Nothing is to be done, or somebody will put the key back.
    Done,
    /// It is looked at again at that time.
    Later(Duration),
    /// That request is sent.
    Send(Request, Purpose),
}

/// Takes keys off a queue until one needs a request.
pub(crate) fn work_off<L, K: Ord + Clone>(
    it: &mut L,
    queue: fn(&mut L) -> &mut Queue<K>,
    mut look: impl FnMut(&mut L, &K, &mut Context) -> Look,
    cx: &mut Context,
) -> Option<(Request, Purpose)> {
    while let Some(key) = queue(it).pop(cx.now.mono) {
        match look(it, &key, cx) {
            Look::Done => {}
            Look::Later(at) => queue(it).add_at(key, at),
            Look::Send(request, purpose) => return Some((request, purpose)),
        }
    }
    None
}
