//! Watches of what concerns this node: selected by name, which the API server indexes.
//!
//! As [`crate::cluster::watch`], but for one object or few: errors are retried with pauses that
//! differ from node to node, so that thousands of agents do not come back at one moment.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use kube::Api;
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt as _, watcher};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::cluster::seen::Change;
use crate::cluster::watch::describe;
use crate::node::clock;

/// First and longest pause after an error, without jitter.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(20));
/// Objects a page: a full page is in memory at once.
const PAGE: u32 = 50;

/// A step of a watch.
#[derive(Debug)]
pub enum Step<T> {
    /// Something is other than it was
    Change(Change<T>),
    /// It does not get through; what was seen may be old
    Trouble,
}

/// Follows what `fields` selects until the receiver is gone. `seed` sets the pauses apart from those
/// of other nodes.
pub async fn follow<K, T, E>(
    kind: &'static str,
    api: Api<K>,
    fields: String,
    seed: u64,
    out: mpsc::Sender<E>,
    read: impl Fn(K) -> T,
    wrap: impl Fn(Step<T>) -> E,
) where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let config = watcher::Config::default().fields(&fields).page_size(PAGE);
    let pauses = Pauses::new(seed);
    let mut stream = watcher(api, config).backoff(pauses).boxed();
    let mut trouble: Option<String> = None;
    while let Some(step) = stream.next().await {
        let step = match step {
            Ok(event) => Step::Change(match event {
                watcher::Event::Init => Change::Restarted {
                    asked: clock::since_boot(),
                },
                watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
                    Change::Applied(read(object))
                }
                watcher::Event::InitDone => Change::Listed,
                watcher::Event::Delete(object) => Change::Deleted(read(object)),
            }),
            Err(error) => {
                let text = describe(kind, &error);
                if trouble.as_ref() != Some(&text) {
                    warn!(watch.kind = kind, "{text}");
                    trouble = Some(text);
                }
                Step::Trouble
            }
        };
        // A list that begins may still fail: trouble is over when something came.
        let came = matches!(&step, Step::Change(it) if !matches!(it, Change::Restarted { .. }));
        if came && trouble.take().is_some() {
            info!(watch.kind = kind, "watch works again");
        }
        if out.send(wrap(step)).await.is_err() {
            return;
        }
    }
}

/// Doubling pauses with jitter, back to the first one after a quiet time: a stream that fails again
/// and again says now and then that it begins anew, which is no success.
struct Pauses {
    next: Duration,
    last: Option<Instant>,
    random: u64,
}

impl Pauses {
    fn new(seed: u64) -> Self {
        Self {
            next: PAUSE.0,
            last: None,
            random: seed | 1,
        }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        if self.last.is_some_and(|last| last.elapsed() > 3 * PAUSE.1) {
            self.next = PAUSE.0;
        }
        self.last = Some(Instant::now());
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let thousandths = u32::try_from(self.random % 1000).unwrap_or(0);
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE.1);
        Some(pause / 2 + pause * thousandths / 1000)
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_limit_and_differ_between_nodes() {
        let pauses = |seed| Pauses::new(seed).take(12).collect::<Vec<_>>();
        let (one, other) = (pauses(3), pauses(5));
        assert!(one[0] <= Duration::from_millis(300));
        assert!(one.iter().all(|it| *it <= PAUSE.1 * 3 / 2));
        assert!(one[10] >= PAUSE.1 / 2 && one != other, "{one:?}");
    }
}
