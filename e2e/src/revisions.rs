//! Reads every revision of every object from etcd, and checks rules that must hold at every moment.
//!
//! The reader is independent of kube-apiserver and its caches, and of Cadastre's own code for watches: it uses a watch
//! of etcd itself, from the first revision on. So it sees even states that last for a millisecond, in the order in
//! which they were stored.
//!
//! # Guarantees
//! If a revision cannot be read, because it was compacted before, [`Revisions::violations`] says so.
//!
//! # Caveats
//! - The API servers must store all kinds as JSON (`--storage-media-type=application/json`).
//! - Revisions are not kept, so the memory does not grow with the length of a run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::etcd::Gateway;

mod rules;

use rules::Rules;

/// The prefix of all keys of kube-apiserver.
const PREFIX: &str = "/registry/";
/// Members report every 2 s that nothing has changed. After this time without any message, another member is asked.
const SILENCE: Duration = Duration::from_secs(8);
const RETRY: Duration = Duration::from_millis(200);

/// One change of one object, as etcd stored it.
#[derive(Clone, Debug)]
pub struct Change {
    /// The revision of etcd that this change created.
    pub revision: i64,
    /// The key, for example `/registry/minions/NAME`.
    pub key: String,
    /// The object; `None` if it was deleted.
    pub object: Option<Value>,
}

/// A running reader; it stops when this value is dropped.
#[derive(Debug)]
pub struct Revisions {
    log: Arc<Mutex<Log>>,
    reached: watch::Receiver<i64>,
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Log {
    rules: Rules,
    violations: Vec<String>,
    counts: BTreeMap<String, u64>,
}

impl Revisions {
    /// Starts to read from the first revision on. `members` are clients for all members of etcd.
    pub fn start(members: Vec<Gateway>) -> Self {
        let log = Arc::default();
        let (send, reached) = watch::channel(0);
        let task = tokio::spawn(read(members, Arc::clone(&log), send));
        Self { log, reached, task }
    }

    /// Returns the revision up to which everything has been read.
    pub fn reached(&self) -> i64 {
        *self.reached.borrow()
    }

    /// Waits at most `limit` until everything up to a revision has been read.
    pub async fn wait_for(&self, revision: i64, limit: Duration) -> Result<()> {
        let mut reached = self.reached.clone();
        let waited = tokio::time::timeout(limit, reached.wait_for(|it| *it >= revision)).await;
        waited.with_context(|| {
            let reached = self.reached();
            format!("revision {revision} was not read within {limit:?}, only {reached}")
        })??;
        Ok(())
    }

    /// Returns a text for each violation of a rule so far.
    pub fn violations(&self) -> Vec<String> {
        lock(&self.log).violations.clone()
    }

    /// Returns the number of changes read so far, by kind of object.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        lock(&self.log).counts.clone()
    }
}

impl Drop for Revisions {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Asks one member after another. A member may not answer, or may be cut off from the others.
async fn read(members: Vec<Gateway>, log: Arc<Mutex<Log>>, reached: watch::Sender<i64>) {
    for member in members.iter().cycle() {
        // An error is ignored, because the next member is asked for what is missing.
        let _ = follow(member, &log, &reached).await;
        tokio::time::sleep(RETRY).await;
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Message {
    result: Answer,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    header: Header,
    created: bool,
    compact_revision: Option<String>,
    events: Vec<WatchEvent>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Header {
    revision: String,
}

#[derive(Deserialize)]
struct WatchEvent {
    /// `DELETE`; empty for a PUT
    #[serde(default)]
    r#type: String,
    kv: KeyValue,
}

#[derive(Deserialize)]
struct KeyValue {
    key: ByteString,
    /// The object; absent if it was deleted
    value: Option<ByteString>,
    mod_revision: String,
}

async fn follow(member: &Gateway, log: &Mutex<Log>, reached: &watch::Sender<i64>) -> Result<()> {
    let from = *reached.borrow() + 1;
    let stream = tokio::time::timeout(SILENCE, member.watch(PREFIX, from)).await??;
    let mut lines = stream.lines();
    loop {
        let line = tokio::time::timeout(SILENCE, lines.try_next()).await??;
        let line = line.context("the member has ended the watch")?;
        let Message { result } = serde_json::from_str(&line)?;
        if let Some(compacted) = result.compact_revision.filter(|it| it != "0") {
            let text =
                format!("revisions {from} to {compacted} were compacted before they were read");
            lock(log).violations.push(text);
            reached.send_replace(compacted.parse::<i64>()? - 1);
            return Ok(());
        }
        // The first message has the present revision of the member, although older events follow.
        if result.created {
            continue;
        }
        for event in result.events {
            let change = change(event)?;
            ensure!(change.revision >= from, "an old revision");
            let mut log = lock(log);
            let Log {
                rules,
                violations,
                counts,
            } = &mut *log;
            *counts.entry(kind(&change.key).to_owned()).or_default() += 1;
            let broken = rules.apply(&change);
            violations.extend(
                broken
                    .into_iter()
                    .map(|it| format!("revision {}: {it}", change.revision)),
            );
        }
        let revision = result.header.revision.parse::<i64>()?;
        reached.send_if_modified(|it| revision > std::mem::replace(it, revision.max(*it)));
    }
}

fn change(event: WatchEvent) -> Result<Change> {
    let key = String::from_utf8(event.kv.key.0)?;
    let is_read = rules::concerns(&key) && event.r#type != "DELETE";
    let value = event.kv.value.filter(|_| is_read);
    let object = value
        .map(|it| serde_json::from_slice(&it.0).with_context(|| key.clone()))
        .transpose()?;
    Ok(Change {
        revision: event.kv.mod_revision.parse()?,
        key,
        object,
    })
}

/// Returns the part of a key that names the kind: `minions` for Nodes, `GROUP/PLURAL` for custom resources.
fn kind(key: &str) -> &str {
    let rest = key.strip_prefix(PREFIX).unwrap_or(key);
    let parts = if rest.contains('.') { 2 } else { 1 };
    rest.match_indices('/')
        .nth(parts - 1)
        .map_or(rest, |(at, _)| &rest[..at])
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}
