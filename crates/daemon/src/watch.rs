//! Watches: one task a kind, each step handed on in order.
//!
//! All is listed, then watched from there on. A list is a consistent read (`resourceVersion` unset), so
//! nothing goes back in time while the server itself does not; for when it does see
//! [`Source::doubtful`]. Errors are logged once per change and retried with a growing pause; a missing
//! CRD is such an error, told in words that say what to do.
//!
//! # Guarantees
//! No silence lasts: every wait for the API server ends by [`Patience`]. A watch is asked for with
//! bookmarks, which API servers send about once a minute where nothing changes, so one that brings
//! nothing for longer is dead, whatever its connection looks like. It is begun again where it was, and
//! where the next one brings nothing either, all is listed anew.

mod change;
mod heard;
mod pauses;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use futures::StreamExt as _;
use kube::Api;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::lists::{self, List};
use cadastre_clock::since_boot;

pub use change::Change;
pub use heard::LastHeard;
pub use pauses::Pauses;

/// A kind that older API servers do not have: its absence is an answer.
const OPTIONAL: &str = "servicecidrs";

/// A kind whose watch only spares requests: the candidates' Lease.
pub const LEASES: &str = "leases";

/// A watch that ends sooner is begun again after a pause.
const SHORT: Duration = Duration::from_secs(1);

/// What is watched.
pub struct Source<K> {
    /// The plural of the kind, for people
    pub kind: &'static str,
    /// Where the objects are
    pub api: Api<K>,
    /// Which of them, as a field selector; none: all
    pub fields: Option<String>,
    /// Objects a page of a list; none: all at once
    pub page: Option<u32>,
    /// After errors
    pub pauses: Pauses,
    /// Whether all is listed again after the server could not be reached at all: it may have been put
    /// back to an older state, and a watch that goes on where the last one ended would never say so
    pub doubtful: bool,
    /// How long the API server may say nothing
    pub patience: Patience,
    /// Where it is noted when it said something
    pub heard: LastHeard,
}

/// For how long an API server may say nothing until it is asked again, on another connection.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// When a list or a watch was asked for, and in the middle of a list
    pub answer: Duration,
    /// In a watch
    pub bookmark: Duration,
}

impl Default for Patience {
    /// Two bookmarks may be missed.
    fn default() -> Self {
        Patience {
            answer: Duration::from_secs(30),
            bookmark: Duration::from_secs(130),
        }
    }
}

/// A step of a watch.
#[derive(Debug)]
pub enum Step<T> {
    /// Something is other than it was
    Change(Change<T>),
    /// It does not get through; what was seen may be old
    Trouble,
    /// It gets through again
    Recovered,
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
    source.heard.heard(source.kind);
    let mut pauses = source.pauses.clone();
    let mut follower = Follower {
        source,
        out,
        read,
        wrap,
        trouble: None,
        was_silent: false,
    };
    let mut next = Next::List;
    loop {
        let ended = match next {
            Next::List => follower.list().await,
            Next::Watch(version) => follower.watch(version).await,
        };
        let Ok(ended) = ended else {
            return;
        };
        next = ended.next;
        if let Some(failure) = &ended.failure
            && follower.trouble(failure).await.is_err()
        {
            return;
        }
        if ended.failure.is_some() || ended.was_short {
            tokio::time::sleep(pauses.next().unwrap_or_default()).await;
        }
    }
}

/// What is to be done after a list or a watch.
enum Next {
    List,
    /// From that version on
    Watch(String),
}

/// How a list or a watch ended.
struct Ended {
    next: Next,
    failure: Option<Failure>,
    was_short: bool,
}

impl Ended {
    fn well(next: Next) -> Self {
        Ended {
            next,
            failure: None,
            was_short: false,
        }
    }

    fn failed(next: Next, failure: Failure) -> Self {
        Ended {
            next,
            failure: Some(failure),
            was_short: false,
        }
    }
}

/// What went wrong.
enum Failure {
    List(lists::Error),
    /// A watch could not begin, or broke off
    Watch(kube::Error),
    /// The API server ended the watch with an error
    Status(Box<Status>),
    /// The beginning of a watch was not answered
    NoAnswer(Duration),
    /// A watch brought nothing, not even a bookmark
    Silent(Duration),
    /// A change came without a version
    NoVersion,
}

/// The receiver is gone.
struct Over;

struct Follower<K, E, R, W> {
    source: Source<K>,
    out: mpsc::Sender<E>,
    read: R,
    wrap: W,
    trouble: Option<String>,
    /// Whether the last watch fell silent, and nothing came since
    was_silent: bool,
}

impl<K, T, E, R, W> Follower<K, E, R, W>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    R: Fn(K) -> T,
    W: Fn(Step<T>) -> Option<E>,
{
    async fn list(&mut self) -> Result<Ended, Over> {
        self.was_silent = false;
        let asked = since_boot();
        self.change(Change::Restarted { asked }).await?;
        let params = ListParams {
            field_selector: self.source.fields.clone(),
            limit: self.source.page,
            ..ListParams::default()
        };
        let (api, patience) = (self.source.api.clone(), self.source.patience.answer);
        let mut list = List::new(api, params, patience);
        loop {
            match list.next().await {
                Ok(Some(object)) => {
                    // A list that begins may still fail: trouble is over when something came.
                    self.came().await?;
                    let object = (self.read)(object);
                    self.change(Change::Applied(object)).await?;
                }
                Ok(None) => break,
                Err(error) => return Ok(Ended::failed(Next::List, self.list_failed(error))),
            }
        }
        self.came().await?;
        self.change(Change::Listed).await?;
        let version = list.version().unwrap_or_default();
        self.reached(&version).await?;
        Ok(Ended::well(Next::Watch(version)))
    }

    fn list_failed(&self, error: lists::Error) -> Failure {
        let is_missing =
            matches!(&error, lists::Error::Api(kube::Error::Api(status)) if status.code == 404);
        if is_missing && self.source.kind == OPTIONAL {
            self.source.heard.heard(self.source.kind);
        }
        Failure::List(error)
    }

    async fn watch(&mut self, mut version: String) -> Result<Ended, Over> {
        let Patience { answer, bookmark } = self.source.patience;
        let params = WatchParams {
            field_selector: self.source.fields.clone(),
            bookmarks: true,
            ..WatchParams::default()
        };
        let api = self.source.api.clone();
        let stream = match timeout(answer, api.watch(&params, &version)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                let is_unreachable = !matches!(error, kube::Error::Api(_));
                let anew = is_expired(&error) || is_unreachable && self.source.doubtful;
                return Ok(Ended::failed(then(anew, version), Failure::Watch(error)));
            }
            Err(_) => {
                let next = then(self.source.doubtful, version);
                return Ok(Ended::failed(next, Failure::NoAnswer(answer)));
            }
        };
        let mut stream = pin!(stream);
        let begun = Instant::now();
        self.came().await?;
        loop {
            let Ok(event) = timeout(bookmark, stream.next()).await else {
                // What was missed is told from where it was, unless watches bring nothing at all.
                let anew = std::mem::replace(&mut self.was_silent, true) || self.source.doubtful;
                let next = then(anew, version);
                return Ok(Ended::failed(next, Failure::Silent(bookmark)));
            };
            let Some(event) = event else {
                return Ok(Ended {
                    was_short: begun.elapsed() < SHORT,
                    ..Ended::well(Next::Watch(version))
                });
            };
            let (object, is_deleted) = match event {
                Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => (object, false),
                Ok(WatchEvent::Deleted(object)) => (object, true),
                Ok(WatchEvent::Bookmark(at)) => {
                    self.was_silent = false;
                    version = at.metadata.resource_version;
                    self.came().await?;
                    self.reached(&version).await?;
                    continue;
                }
                Ok(WatchEvent::Error(status)) => {
                    let next = then(status.code == 410, version);
                    return Ok(Ended::failed(next, Failure::Status(Box::new(*status))));
                }
                // One object that cannot be read; the next ones may be.
                Err(error @ kube::Error::SerdeError(_)) => {
                    self.trouble(&Failure::Watch(error)).await?;
                    continue;
                }
                Err(error) => {
                    let next = then(is_expired(&error), version);
                    return Ok(Ended::failed(next, Failure::Watch(error)));
                }
            };
            let Some(now) = object.meta().resource_version.clone() else {
                return Ok(Ended::failed(Next::List, Failure::NoVersion));
            };
            self.was_silent = false;
            self.came().await?;
            let object = (self.read)(object);
            self.change(if is_deleted {
                Change::Deleted(object)
            } else {
                Change::Applied(object)
            })
            .await?;
            version = now;
        }
    }

    /// The API server has said something.
    async fn came(&mut self) -> Result<(), Over> {
        self.source.heard.heard(self.source.kind);
        if self.trouble.take().is_some() {
            info!(watch.kind = self.source.kind, "watch works again");
            return self.step(Step::Recovered).await;
        }
        Ok(())
    }

    async fn trouble(&mut self, failure: &Failure) -> Result<(), Over> {
        let text = describe(self.source.kind, failure);
        if self.trouble.as_ref() != Some(&text) {
            warn!(watch.kind = self.source.kind, "{text}");
            self.trouble = Some(text);
        }
        self.step(Step::Trouble).await
    }

    /// A version that is no number tells nothing.
    async fn reached(&mut self, version: &str) -> Result<(), Over> {
        match version.parse() {
            Ok(version) => self.change(Change::Reached(version)).await,
            Err(_) => Ok(()),
        }
    }

    async fn change(&mut self, change: Change<T>) -> Result<(), Over> {
        self.step(Step::Change(change)).await
    }

    async fn step(&mut self, step: Step<T>) -> Result<(), Over> {
        match (self.wrap)(step) {
            Some(event) => self.out.send(event).await.map_err(|_| Over),
            None => Ok(()),
        }
    }
}

fn then(anew: bool, version: String) -> Next {
    if anew {
        Next::List
    } else {
        Next::Watch(version)
    }
}

/// Whether the version to go on from is too old.
fn is_expired(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 410)
}

/// An error of a watch in words that say what to do.
fn describe(kind: &str, failure: &Failure) -> String {
    let status = match failure {
        Failure::List(lists::Error::Api(kube::Error::Api(status)))
        | Failure::Watch(kube::Error::Api(status))
        | Failure::Status(status) => status,
        Failure::List(error) => return format!("list of {kind} failed: {error}; trying again"),
        Failure::Watch(error) => return format!("watch of {kind} failed: {error}; trying again"),
        Failure::NoAnswer(limit) => {
            let limit = limit.as_secs_f32();
            return format!(
                "watch of {kind} failed: the API server said nothing for {limit} s; trying again on another connection"
            );
        }
        Failure::Silent(limit) => {
            let limit = limit.as_secs_f32();
            return format!(
                "watch of {kind} brought nothing for {limit} s, not even a bookmark: beginning it again on another connection"
            );
        }
        Failure::NoVersion => {
            return format!(
                "watch of {kind} brought an object without a resourceVersion; listing anew"
            );
        }
    };
    match status.code {
        404 if kind != OPTIONAL => format!(
            "{kind} are not known to the API server: apply the CRDs (cadastre crd | kubectl apply --server-side -f -); waiting for them"
        ),
        403 if kind == LEASES => format!(
            "not allowed to list and watch the Lease: {}: apply the Role of this version; until then it is asked for several times a second",
            status.message
        ),
        403 => format!(
            "not allowed to list and watch {kind}: {}: check the ClusterRole; waiting",
            status.message
        ),
        code => format!(
            "watch of {kind} failed: {} ({code}); trying again",
            status.message
        ),
    }
}
