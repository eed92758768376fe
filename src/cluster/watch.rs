//! Watches: one task a kind, each step handed on in order.
//!
//! A list is a consistent read (`resourceVersion` unset), so nothing goes back in time while the server
//! itself does not; for when it does see [`Source::doubtful`]. Errors are logged once per change and retried
//! with a growing pause; a missing CRD is such an error, told in words that say what to do.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::Api;
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::seen::Change;
use crate::node::clock;

/// What is watched.
pub struct Source<K> {
    /// The plural of the kind, for people
    pub kind: &'static str,
    /// Where the objects are
    pub api: Api<K>,
    /// Which of them, and how many a page of a list
    pub config: watcher::Config,
    /// After errors
    pub pauses: Pauses,
    /// Whether all is listed again after the server could not be reached at all: it may have been put
    /// back to an older state, and a watch that goes on where the last one ended would never say so
    pub doubtful: bool,
}

/// A step of a watch.
#[derive(Debug)]
pub enum Step<T> {
    /// Something is other than it was
    Change(Change<T>),
    /// It does not get through; what was seen may be old
    Trouble,
}

/// Follows a source until the receiver is gone: `read` takes the few fields that count out of an
/// object, `wrap` says what kind of event a step is, if it is one.
pub async fn follow<K, T, E>(
    source: Source<K>,
    out: mpsc::Sender<E>,
    read: impl Fn(K) -> T,
    wrap: impl Fn(Step<T>) -> Option<E>,
) where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let kind = source.kind;
    let open = || {
        let stream = watcher(source.api.clone(), source.config.clone());
        stream.backoff(source.pauses.clone()).boxed()
    };
    let (mut stream, mut reopened) = (open(), source.pauses.clone());
    let mut trouble: Option<String> = None;
    while let Some(step) = stream.next().await {
        let anew = source.doubtful && matches!(&step, Err(error) if is_unreachable(error));
        let step = match step {
            Ok(event) => Step::Change(match event {
                // The list is asked for by the next step of the stream.
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
        if let Some(event) = wrap(step)
            && out.send(event).await.is_err()
        {
            return;
        }
        if anew {
            tokio::time::sleep(reopened.next().unwrap_or_default()).await;
            stream = open();
        }
    }
}

/// Whether a watch could not go on because nobody answered.
fn is_unreachable(error: &watcher::Error) -> bool {
    let watcher::Error::WatchStartFailed(source) = error else {
        return false;
    };
    !matches!(source, kube::Error::Api(_))
}

/// An error of a watch in words that say what to do.
fn describe(kind: &str, error: &watcher::Error) -> String {
    let source = match error {
        watcher::Error::InitialListFailed(source)
        | watcher::Error::WatchStartFailed(source)
        | watcher::Error::WatchFailed(source) => Some(source),
        _ => None,
    };
    match source {
        Some(kube::Error::Api(status)) if status.code == 404 && kind != "servicecidrs" => format!(
            "{kind} are not known to the API server: apply the CRDs (cadastre crd | kubectl apply --server-side -f -); waiting for them"
        ),
        Some(kube::Error::Api(status)) if status.code == 403 => {
            format!(
                "not allowed to list and watch {kind}: {}: check the ClusterRole; waiting",
                status.message
            )
        }
        Some(kube::Error::Api(status)) => {
            format!(
                "watch of {kind} failed: {} ({}); trying again",
                status.message, status.code
            )
        }
        _ => format!("watch of {kind} failed: {error}; trying again"),
    }
}

/// Doubling pauses with jitter, so that those who lost the API server together do not come back at one
/// moment. Back to the first one after a quiet time: a stream that fails again and again says now and
/// then that it begins anew, which is no success.
#[derive(Clone, Debug)]
pub struct Pauses {
    first: Duration,
    longest: Duration,
    next: Duration,
    last: Option<Instant>,
    random: u64,
}

impl Pauses {
    /// From `first` to `longest`, each between half of that and one and a half; `seed` sets them apart
    /// from those of others.
    pub fn new(first: Duration, longest: Duration, seed: u64) -> Self {
        Self {
            first,
            longest,
            next: first,
            last: None,
            random: seed | 1,
        }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        // The longest pause and as much again of quiet.
        if self
            .last
            .is_some_and(|last| last.elapsed() > 3 * self.longest)
        {
            self.next = self.first;
        }
        self.last = Some(Instant::now());
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let thousandths = u32::try_from(self.random % 1000).unwrap_or(0);
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
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
    fn pauses_grow_to_their_limit_and_differ_by_seed() {
        let (first, longest) = (Duration::from_millis(200), Duration::from_secs(20));
        let pauses = |seed| {
            Pauses::new(first, longest, seed)
                .take(12)
                .collect::<Vec<_>>()
        };
        let (one, other) = (pauses(3), pauses(5));
        assert!(one[0] <= Duration::from_millis(300));
        assert!(one.iter().all(|it| *it <= longest * 3 / 2));
        assert!(one[10] >= longest / 2 && one != other, "{one:?}");
    }
}
