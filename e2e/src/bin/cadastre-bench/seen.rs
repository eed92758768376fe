//! Counts blocks and NodeSubnets by watches, and records when the counts last changed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cadastre_api::{IPAMBlockLite, NodeSubnetLite};
use futures::StreamExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Running totals. Counting everything again at each watch event would cost more than what is measured.
#[derive(Default)]
struct Counts {
    blocks: BTreeMap<String, bool>,
    resting: usize,
    subnets: BTreeMap<String, usize>,
    listed: usize,
}

/// Counts at the moment `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Blocks that are allocated to nodes
    pub held: usize,
    /// Blocks in quarantine
    pub resting: usize,
    /// Entries in the block lists of all NodeSubnets
    pub listed: usize,
    pub subnets: usize,
    pub at: Instant,
}

/// Running watches that keep the counts current; they stop when this value is dropped.
pub struct Watching {
    seen: watch::Receiver<Seen>,
    _tasks: JoinSet<()>,
}

impl Watching {
    pub fn start(client: &Client) -> Self {
        let counts = Arc::new(Mutex::new(Counts::default()));
        let none = Seen {
            held: 0,
            resting: 0,
            listed: 0,
            subnets: 0,
            at: Instant::now(),
        };
        let (publish, seen) = watch::channel(none);
        let publish = Arc::new(publish);
        let mut tasks = JoinSet::new();
        let (shared, out) = (Arc::clone(&counts), Arc::clone(&publish));
        let blocks = watcher(Api::<IPAMBlockLite>::all(client.clone()), Config::default());
        tasks.spawn(blocks.default_backoff().for_each(move |event| {
            let mut counts = shared.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                Ok(Event::Apply(block) | Event::InitApply(block)) => {
                    let resting = block.spec["owner"]["kind"] == "Quarantine";
                    counts.block(block.name_any(), Some(resting));
                }
                Ok(Event::Delete(block)) => {
                    counts.block(block.name_any(), None);
                }
                _ => {}
            }
            out.send_replace(counts.seen());
            async {}
        }));
        let subnets = watcher(
            Api::<NodeSubnetLite>::all(client.clone()),
            Config::default(),
        );
        tasks.spawn(subnets.default_backoff().for_each(move |event| {
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                Ok(Event::Apply(subnet) | Event::InitApply(subnet)) => {
                    let blocks = subnet.spec["blocks"].as_array().map_or(0, Vec::len);
                    counts.subnet(subnet.name_any(), Some(blocks));
                }
                Ok(Event::Delete(subnet)) => {
                    counts.subnet(subnet.name_any(), None);
                }
                _ => {}
            }
            publish.send_replace(counts.seen());
            async {}
        }));
        Watching {
            seen,
            _tasks: tasks,
        }
    }

    /// Waits at most `limit` until the counts satisfy `wanted`; `what` describes the condition in the error.
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

impl Counts {
    fn block(&mut self, name: String, resting: Option<bool>) {
        let before = match resting {
            Some(resting) => self.blocks.insert(name, resting),
            None => self.blocks.remove(&name),
        };
        self.resting += usize::from(resting == Some(true));
        self.resting -= usize::from(before == Some(true));
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
            held: self.blocks.len() - self.resting,
            resting: self.resting,
            listed: self.listed,
            subnets: self.subnets.len(),
            at: Instant::now(),
        }
    }
}
