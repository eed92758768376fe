//! Watches: one task a kind, each step handed on in order.
//!
//! A list is a consistent read (`resourceVersion` unset), so nothing ever goes back in time. Errors
//! are logged once per change and retried with a growing pause; a missing CRD is such an error, told
//! in words that say what to do.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::clock::Clock;
use super::seen::Change;
use crate::controller::Event;

/// First and longest pause after an error.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// What all watches have in common.
#[derive(Clone)]
pub struct Follower {
    /// Where the objects are
    pub client: Client,
    /// Objects a page of a list
    pub page: Option<u32>,
    /// Tells when a list was asked for
    pub clock: Clock,
    /// Where steps go
    pub out: mpsc::Sender<Event>,
}

/// Follows a kind until the receiver is gone: `read` takes the few fields that count out of an
/// object, `wrap` says what kind of event it is.
pub async fn follow<K, T>(
    kind: &'static str,
    follower: Follower,
    read: impl Fn(K) -> T,
    wrap: impl Fn(Change<T>) -> Event,
) where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let Follower {
        client,
        page,
        clock,
        out,
    } = follower;
    let config = watcher::Config {
        page_size: page,
        ..watcher::Config::default()
    };
    let api: Api<K> = Api::all(client);
    let mut stream = watcher(api, config).backoff(Pauses::default()).boxed();
    let mut trouble: Option<String> = None;
    while let Some(step) = stream.next().await {
        let change = match step {
            // The list is asked for by the next step of the stream.
            Ok(watcher::Event::Init) => Change::Restarted { asked: clock.now() },
            Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object)) => {
                Change::Applied(read(object))
            }
            Ok(watcher::Event::InitDone) => Change::Listed,
            Ok(watcher::Event::Delete(object)) => Change::Deleted(read(object)),
            Err(error) => {
                let text = describe(kind, &error);
                if trouble.as_ref() != Some(&text) {
                    warn!(watch.kind = kind, "{text}");
                    trouble = Some(text);
                }
                continue;
            }
        };
        // A list that begins may still fail: trouble is over when something came.
        if !matches!(change, Change::Restarted { .. }) && trouble.take().is_some() {
            info!(watch.kind = kind, "watch works again");
        }
        if out.send(wrap(change)).await.is_err() {
            return;
        }
    }
}

/// An error of a watch in words that say what to do.
pub(crate) fn describe(kind: &str, error: &watcher::Error) -> String {
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

/// Doubling pauses, back to the first one after a quiet time: a stream that fails again and again
/// says now and then that it begins anew, which is no success.
struct Pauses {
    next: Duration,
    last: Option<Instant>,
}

impl Default for Pauses {
    fn default() -> Self {
        Pauses {
            next: PAUSE.0,
            last: None,
        }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        if self.last.is_some_and(|last| last.elapsed() > 2 * PAUSE.1) {
            self.next = PAUSE.0;
        }
        self.last = Some(Instant::now());
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE.1);
        Some(pause)
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {}
}
