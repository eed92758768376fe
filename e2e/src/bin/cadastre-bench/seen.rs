//! Counts blocks and NodeSubnets by watches, and records when the counts last changed.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cadastre_api::{IPAMBlockLite, NodeSubnetLite};
use futures::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Running totals, because counting everything again at each watch event would cost more than what is measured.
#[derive(Default)]
struct Counts {
    blocks: BTreeMap<String, bool>,
    quarantined: usize,
    entered: usize,
    until: Option<Timestamp>,
    subnets: BTreeMap<String, usize>,
    listed: usize,
}

/// The numbers of blocks and NodeSubnets at the time `at`, according to the watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Blocks that exist and are not in quarantine
    pub allocated: usize,
    /// Blocks that are in quarantine at the time `at`
    pub quarantined: usize,
    /// Blocks that have entered quarantine so far, including those that have left quarantine
    pub entered: usize,
    /// The latest time at which the quarantine of a block ends
    pub until: Option<Timestamp>,
    /// Entries in the block lists of all NodeSubnets
    pub listed: usize,
    pub subnets: usize,
    pub at: Instant,
}

/// Running watches that keep the counts current. They stop when this value is dropped.
pub struct Watching {
    seen: watch::Receiver<Seen>,
    _tasks: JoinSet<()>,
}

impl Watching {
    pub fn start(client: &Client) -> Self {
        let counts = Arc::new(Mutex::new(Counts::default()));
        let (publish, seen) = watch::channel(Counts::default().seen());
        let publish = Arc::new(publish);
        let mut tasks = JoinSet::new();
        let blocks = Api::<IPAMBlockLite>::all(client.clone());
        tasks.spawn(count(
            blocks,
            Arc::clone(&counts),
            Arc::clone(&publish),
            |counts, name, block| {
                let until = block.and_then(|it| it.spec["until"].as_str()?.parse().ok());
                counts.until = counts.until.max(until);
                let quarantined = block.map(|it| it.spec["owner"]["kind"] == "Quarantine");
                counts.block(name, quarantined);
            },
        ));
        let subnets = Api::<NodeSubnetLite>::all(client.clone());
        tasks.spawn(count(subnets, counts, publish, |counts, name, subnet| {
            let blocks = subnet.map(|it| it.spec["blocks"].as_array().map_or(0, Vec::len));
            counts.subnet(name, blocks);
        }));
        Watching {
            seen,
            _tasks: tasks,
        }
    }

    /// Waits at most `limit` until the function `wanted` returns true for the counts. If the wait fails, the error
    /// contains `what`, which describes the condition.
    pub async fn until(
        &mut self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Seen) -> bool,
    ) -> Result<Seen> {
        let reached = tokio::time::timeout(limit, self.seen.wait_for(wanted)).await;
        let reached = reached.map(|seen| seen.map(|seen| *seen));
        if let Ok(seen) = reached {
            return Ok(seen?);
        }
        bail!(
            "{what}: not within {limit:?}; now {:?}",
            *self.seen.borrow()
        )
    }
}

/// Watches all objects of a kind. `update` gets the name of each changed object, and the object, or `None` if the
/// object was deleted.
async fn count<K>(
    objects: Api<K>,
    counts: Arc<Mutex<Counts>>,
    publish: Arc<watch::Sender<Seen>>,
    update: fn(&mut Counts, String, Option<&K>),
) where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = watcher(objects, Config::default())
        .default_backoff()
        .boxed();
    while let Some(event) = events.next().await {
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                update(&mut counts, object.name_any(), Some(&object));
            }
            Ok(Event::Delete(object)) => update(&mut counts, object.name_any(), None),
            _ => {}
        }
        publish.send_replace(counts.seen());
    }
}

impl Counts {
    fn block(&mut self, name: String, quarantined: Option<bool>) {
        let before = match quarantined {
            Some(quarantined) => self.blocks.insert(name, quarantined),
            None => self.blocks.remove(&name),
        };
        self.quarantined += usize::from(quarantined == Some(true));
        self.entered += usize::from(quarantined == Some(true) && before != Some(true));
        self.quarantined -= usize::from(before == Some(true));
    }

    fn subnet(&mut self, name: String, listed: Option<usize>) {
        let before = match listed {
            Some(listed) => self.subnets.insert(name, listed),
            None => self.subnets.remove(&name),
        };
        self.listed += listed.unwrap_or(0);
        self.listed -= before.unwrap_or(0);
    }

    fn seen(&self) -> Seen {
        Seen {
            allocated: self.blocks.len() - self.quarantined,
            quarantined: self.quarantined,
            entered: self.entered,
            until: self.until,
            listed: self.listed,
            subnets: self.subnets.len(),
            at: Instant::now(),
        }
    }
}
