//! Watches of the API server. For each kind, one task lists the objects, watches them, and sends each step in order.
//!
//! First all objects are listed. Then they are watched, beginning with the version of the list. The list is a
//! consistent read (`resourceVersion` unset). So the list is never older than what was seen before, unless the server
//! itself was restored to an older state ([`WatchSource::doubtful`] is for that case). After an error the task retries
//! with growing pauses. An error is logged unless it is the same as the last one. If a CRD is missing, the message says
//! what to do.
//!
//! # Guarantees
//! Silence of the API server is always detected, because [`SilenceTimeouts`] limits every wait for the API server. A
//! watch requests bookmarks, which API servers send about once a minute even if nothing changes. So a watch that
//! delivers nothing for much longer than a minute does not work, even if its connection looks intact. The task then
//! starts a new watch at the same version. If the new watch delivers nothing either, or if the source is
//! [`WatchSource::doubtful`], the task lists everything again. If it is known otherwise that an object has changed, for
//! example from the answer to a write, and the watch does not deliver the change soon, the task starts a new watch
//! without waiting for that long ([`LastHeard::expect`]).

mod event;
mod heard;
mod pauses;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use kube::Api;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::{Request, Status};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use super::encoding::{self, Encoding};
use super::lists::{ListError, PagedList};
use cadastre_clock::since_boot;

pub use event::ObjectEvent;
pub use heard::LastHeard;
pub use pauses::Pauses;

/// Kinds that an API server may lack: older API servers have no ServiceCIDRs, and a cluster may lack frr-k8s. If the API
/// server answers 404 for one of them, the answer is normal, and shows that the API server responds.
const OPTIONAL: [&str; 2] = ["servicecidrs", FRR_CONFIGURATIONS];

/// The plural of the kind FRRConfiguration, which frr-k8s defines.
pub const FRR_CONFIGURATIONS: &str = "frrconfigurations";

/// The kind of the Lease of leader election. The watch of the Lease only saves requests, so a process also works
/// without the watch.
pub const LEASES: &str = "leases";

/// If a watch ends sooner than this, there is a pause before the next watch.
const SHORT: Duration = Duration::from_secs(1);

/// The objects of a watch, and how the watch reacts to errors and silence.
pub struct WatchSource<K> {
    /// The plural of the kind, for messages and metrics
    pub kind: &'static str,
    /// The client for the kind, in one namespace or in all
    pub api: Api<K>,
    /// How the API server is to encode the objects
    pub encoding: Encoding<K>,
    /// Field selector; if absent, objects with any fields are watched
    pub fields: Option<String>,
    /// Label selector; if absent, objects with any labels are watched
    pub labels: Option<String>,
    /// Maximum number of objects in a page of a list; if absent, a list is one page
    pub page: Option<u32>,
    /// How long to pause after an error
    pub pauses: Pauses,
    /// Whether to list everything again after the server could not be reached at all. In that time, the server may have
    /// been restored to an older state, which a watch that continues at the last version would never report
    pub doubtful: bool,
    /// How long the API server may send nothing before a request is repeated
    pub patience: SilenceTimeouts,
    /// Where to record that the API server sent something
    pub heard: LastHeard,
}

/// How long an API server may be silent. After this time, the request is repeated on another connection.
#[derive(Clone, Copy, Debug)]
pub struct SilenceTimeouts {
    /// Maximum silence after a request for a list or a watch, and between the parts of a list
    pub answer: Duration,
    /// Maximum silence between the events of a watch, bookmarks included
    pub bookmark: Duration,
    /// Maximum time until a watch delivers a change of which something else has told (see [`LastHeard::expect`])
    pub expected: Duration,
}

impl Default for SilenceTimeouts {
    /// Bookmarks come once a minute, and up to a few seconds later. If one is missing, a new watch costs one request.
    fn default() -> Self {
        SilenceTimeouts {
            answer: Duration::from_secs(30),
            bookmark: Duration::from_secs(80),
            expected: Duration::from_secs(10),
        }
    }
}

/// What a watch reports to its receiver.
#[derive(Debug)]
pub enum WatchStep<T> {
    /// A watch event, or progress of a list
    Change(ObjectEvent<T>),
    /// The watch does not work. The objects that the watch has reported so far may be outdated
    Trouble,
    /// The watch works again
    Recovered,
    /// The API server does not have the kind (any more), so there are no objects of it. The list is tried again
    Absent,
}

/// Lists and watches a source until the receiver of `out` is dropped. `read` extracts from an object the fields that
/// matter. `wrap` converts a step to an event, or returns `None` if the step does not matter.
pub async fn follow<K, T, E>(
    source: WatchSource<K>,
    out: mpsc::Sender<E>,
    read: impl Fn(K) -> T,
    wrap: impl Fn(WatchStep<T>) -> Option<E>,
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
        listed: None,
        encoding: Encoding::Json,
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
        if let Some(failure) = ended.failure
            && follower.trouble(failure).await.is_err()
        {
            return;
        }
        if ended.is_pause_due {
            tokio::time::sleep(pauses.next().unwrap_or_default()).await;
        }
    }
}

/// The next request after a list or a watch has ended.
enum Next {
    List,
    /// Watch from this version on
    Watch(String),
}

/// How a list or a watch ended.
struct Ended {
    next: Next,
    /// The error and what to do about it, for the log
    failure: Option<String>,
    /// Whether to pause before the next request
    is_pause_due: bool,
}

impl Ended {
    fn failed(next: Next, failure: String) -> Self {
        Ended {
            next,
            failure: Some(failure),
            is_pause_due: true,
        }
    }

    /// A watch has lasted, but its connection does not work. The next request follows at once, on another connection.
    fn stuck(next: Next, failure: String) -> Self {
        Ended {
            is_pause_due: false,
            ..Self::failed(next, failure)
        }
    }
}

/// The receiver was dropped, so the task ends.
struct Over;

struct Follower<K, E, R, W> {
    source: WatchSource<K>,
    out: mpsc::Sender<E>,
    read: R,
    wrap: W,
    trouble: Option<String>,
    /// Whether the last watch fell silent and nothing has arrived since
    was_silent: bool,
    /// The version of the last complete list
    listed: Option<String>,
    /// How the objects of the last complete list were encoded
    encoding: Encoding<K>,
}

impl<K, T, E, R, W> Follower<K, E, R, W>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    R: Fn(K) -> T,
    W: Fn(WatchStep<T>) -> Option<E>,
{
    async fn list(&mut self) -> Result<Ended, Over> {
        self.was_silent = false;
        let asked = since_boot();
        self.change(ObjectEvent::Restarted { asked }).await?;
        let params = ListParams {
            field_selector: self.source.fields.clone(),
            label_selector: self.source.labels.clone(),
            limit: self.source.page,
            ..ListParams::default()
        };
        let (api, patience) = (self.source.api.clone(), self.source.patience.answer);
        let mut list = PagedList::new(api, self.source.encoding, params, patience);
        loop {
            match list.next().await {
                Ok(Some(object)) => {
                    // A list can fail even after it has begun. So the watch counts as working again only once an object
                    // has arrived.
                    self.came().await?;
                    let object = (self.read)(object);
                    self.change(ObjectEvent::Applied(object)).await?;
                }
                Ok(None) => break,
                Err(error) => {
                    if is_missing(&error) {
                        self.step(WatchStep::Absent).await?;
                    }
                    return Ok(Ended::failed(Next::List, self.list_failure(&error)));
                }
            }
        }
        self.came().await?;
        self.change(ObjectEvent::Listed).await?;
        let version = list.version().unwrap_or_default().to_owned();
        self.encoding = list.encoding();
        self.reached(&version).await?;
        self.listed = Some(version.clone());
        Ok(Ended {
            next: Next::Watch(version),
            failure: None,
            is_pause_due: false,
        })
    }

    fn list_failure(&self, error: &ListError) -> String {
        let kind = self.source.kind;
        let ListError::Api(kube::Error::Api(status)) = error else {
            return format!("list of {kind} failed: {error}; trying again");
        };
        if status.code == 404 && OPTIONAL.contains(&kind) {
            self.source.heard.heard(kind);
        }
        rejection(kind, status)
    }

    async fn watch(&mut self, mut version: String) -> Result<Ended, Over> {
        let SilenceTimeouts {
            answer,
            bookmark,
            expected,
        } = self.source.patience;
        let kind = self.source.kind;
        let params = WatchParams {
            field_selector: self.source.fields.clone(),
            label_selector: self.source.labels.clone(),
            bookmarks: true,
            ..WatchParams::default()
        };
        let stream = match timeout(answer, self.begin_watch(&params, &version)).await {
            Ok(Ok(Some(stream))) => stream,
            Ok(Ok(None)) => {
                let failure =
                    format!("watch of {kind} failed: it is not in protobuf; listing again");
                return Ok(Ended::failed(Next::List, failure));
            }
            Ok(Err(error)) => {
                let is_unreachable = !matches!(error, kube::Error::Api(_));
                if is_unreachable && self.source.doubtful {
                    return Ok(Ended::failed(Next::List, watch_failure(kind, &error)));
                }
                return Ok(self.interrupted(&error, version));
            }
            Err(_) => {
                let next = list_or_watch(self.source.doubtful, version);
                let limit = answer.as_secs_f32();
                let failure = format!(
                    "watch of {kind} failed: the API server said nothing for {limit} s; trying again on another connection"
                );
                return Ok(Ended::failed(next, failure));
            }
        };
        let mut stream = pin!(stream);
        let begun = Instant::now();
        self.came().await?;
        let mut expectations = self.source.heard.expectations();
        let mut last = begun;
        loop {
            let silent_at = last + bookmark;
            let late_at = self.source.heard.late_at(kind, expected);
            let wake_at = late_at.map_or(silent_at, |at| at.min(silent_at));
            let event = tokio::select! {
                event = stream.next() => Some(event),
                () = sleep_until(wake_at) => None,
                Ok(()) = expectations.changed() => continue,
            };
            let Some(event) = event else {
                if Instant::now() < silent_at {
                    // A new watch that begins at the last seen version delivers what this watch should have delivered.
                    self.source.heard.restarted(kind);
                    let limit = expected.as_secs_f32();
                    let failure = format!(
                        "watch of {kind} is late: for {limit} s it has not brought a change that the API server has: beginning it again on another connection"
                    );
                    return Ok(Ended::stuck(Next::Watch(version), failure));
                }
                // A new watch that begins at the last seen version delivers what this watch has missed. But if the
                // previous watch was silent, too, or if the server may have been restored, everything is listed again.
                let relist = std::mem::replace(&mut self.was_silent, true) || self.source.doubtful;
                let limit = bookmark.as_secs_f32();
                let failure = format!(
                    "watch of {kind} brought nothing for {limit} s, not even a bookmark: beginning it again on another connection"
                );
                return Ok(Ended::stuck(list_or_watch(relist, version), failure));
            };
            last = Instant::now();
            let Some(event) = event else {
                return Ok(Ended {
                    next: Next::Watch(version),
                    failure: None,
                    is_pause_due: begun.elapsed() < SHORT,
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
                    return Ok(self.interrupted(&kube::Error::Api(status), version));
                }
                // Only this object cannot be parsed. So the watch continues with the next event.
                Err(error @ kube::Error::SerdeError(_)) => {
                    self.trouble(watch_failure(kind, &error)).await?;
                    continue;
                }
                Err(error) => return Ok(self.interrupted(&error, version)),
            };
            let Some(now) = object.meta().resource_version.clone() else {
                let failure = format!(
                    "watch of {kind} brought an object without a resourceVersion; listing again"
                );
                return Ok(Ended::failed(Next::List, failure));
            };
            self.was_silent = false;
            self.came().await?;
            self.delivered(&now);
            let object = (self.read)(object);
            self.change(if is_deleted {
                ObjectEvent::Deleted(object)
            } else {
                ObjectEvent::Applied(object)
            })
            .await?;
            version = now;
        }
    }

    /// Starts a watch. The API server is to encode its objects as it encoded those of the last list; returns `None` if
    /// it does not.
    async fn begin_watch(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> kube::Result<Option<impl Stream<Item = kube::Result<WatchEvent<K>>> + use<K, T, E, R, W>>>
    {
        let api = &self.source.api;
        let Encoding::Protobuf(decode) = self.encoding else {
            return Ok(Some(api.watch(params, version).await?.left_stream()));
        };
        let request = Request::new(api.resource_url()).watch(params, version);
        let mut request = request.map_err(kube::Error::BuildRequest)?;
        request.extensions_mut().insert("watch");
        let client = api.clone().into_client();
        let events = encoding::watch(&client, request, decode).await?;
        Ok(events.map(futures::StreamExt::right_stream))
    }

    /// Returns how a watch ended that an error has interrupted at `version`. If the API server no longer has this
    /// version, everything is listed at once, because API servers that have just started reject all older versions. But
    /// if `version` comes from a list and is rejected all the same, there is a pause.
    fn interrupted(&self, error: &kube::Error, version: String) -> Ended {
        let failure = watch_failure(self.source.kind, error);
        if !is_expired(error) {
            return Ended::failed(Next::Watch(version), failure);
        }
        Ended {
            is_pause_due: self.listed.as_ref() == Some(&version),
            ..Ended::failed(Next::List, failure)
        }
    }

    /// Records that the API server has sent something. If the watch did not work before, reports that it works again.
    async fn came(&mut self) -> Result<(), Over> {
        self.source.heard.heard(self.source.kind);
        if self.trouble.take().is_some() {
            info!(watch.kind = self.source.kind, "watch works again");
            return self.step(WatchStep::Recovered).await;
        }
        Ok(())
    }

    /// Reports that the watch does not work. Logs `failure` if it differs from the last logged failure, or if the watch
    /// has worked in between.
    async fn trouble(&mut self, failure: String) -> Result<(), Over> {
        if self.trouble.as_ref() != Some(&failure) {
            warn!(watch.kind = self.source.kind, "{failure}");
            self.trouble = Some(failure);
        }
        self.step(WatchStep::Trouble).await
    }

    /// Reports that all changes up to `version` have been seen. Does nothing if `version` is not a number.
    async fn reached(&mut self, version: &str) -> Result<(), Over> {
        match self.delivered(version) {
            Some(version) => self.change(ObjectEvent::Reached(version)).await,
            None => Ok(()),
        }
    }

    /// Records that the watch has delivered this version. Returns the version, or `None` if it is not a number.
    fn delivered(&self, version: &str) -> Option<u64> {
        let version = version.parse().ok()?;
        self.source.heard.delivered(self.source.kind, version);
        Some(version)
    }

    async fn change(&mut self, change: ObjectEvent<T>) -> Result<(), Over> {
        self.step(WatchStep::Change(change)).await
    }

    async fn step(&mut self, step: WatchStep<T>) -> Result<(), Over> {
        match (self.wrap)(step) {
            Some(event) => self.out.send(event).await.map_err(|_| Over),
            None => Ok(()),
        }
    }
}

fn list_or_watch(relist: bool, version: String) -> Next {
    if relist {
        Next::List
    } else {
        Next::Watch(version)
    }
}

/// Whether the API server does not have the kind.
fn is_missing(error: &ListError) -> bool {
    matches!(error, ListError::Api(kube::Error::Api(status)) if status.code == 404)
}

/// Whether the API server no longer has the version at which the list or watch should continue.
fn is_expired(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 410)
}

/// Describes why a watch could not be started, or was interrupted.
fn watch_failure(kind: &str, error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => rejection(kind, status),
        error => format!("watch of {kind} failed: {error}; trying again"),
    }
}

/// Describes why the API server rejected a list or a watch, and what to do about it.
fn rejection(kind: &str, status: &Status) -> String {
    match status.code {
        404 if kind == FRR_CONFIGURATIONS => format!(
            "{kind} are not known to the API server: install frr-k8s; nothing else is affected, and they are written once it is there"
        ),
        404 if !OPTIONAL.contains(&kind) => format!(
            "{kind} are not known to the API server: apply the CRDs (cadastre crd | kubectl apply --server-side -f -); waiting for them"
        ),
        403 if kind == LEASES => format!(
            "not allowed to list and watch the Lease: {}: apply the Role of this version; until then it is asked for several times a second",
            status.message
        ),
        403 if kind == FRR_CONFIGURATIONS => format!(
            "not allowed to list and watch {kind}: {}: check the Role in their namespace; until then no block is freed, because they may announce it",
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
