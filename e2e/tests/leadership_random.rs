//! Three controllers under random faults while nodes are created and deleted. Two live nodes never have overlapping
//! podCIDRs. Once the faults stop, every node gets podCIDRs and no range is lost.
//!
//! With the value of `CADASTRE_SEED` that an earlier run printed, a run repeats the random choices of the earlier run,
//! but not its timing. `CADASTRE_SECONDS` sets for how long faults are caused.

#![allow(clippy::print_stdout, clippy::unwrap_used)] // allowed in helpers as in tests

mod common;
#[path = "../../tests/common/rng.rs"]
mod rng;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher as _;
use std::time::{Duration, Instant};

use cadastre_api::{IPPool, NodeSubnet};
use cadastre_e2e::{Daemon, lease, nodes, wait};
use common::Lab;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use rng::Rng;
use rustix::process::Signal;

const LIMIT: Duration = Duration::from_secs(180);
const NAMES: [&str; 3] = ["a", "b", "c"];
const SHORT_LEASE: [&str; 2] = ["--lease-duration=3", "--renew-deadline=2"];
/// The maximum number of live nodes. The pool has ranges for 128 nodes.
const LIVE: usize = 80;

fn millis(random: &mut Rng, from: u64, to: u64) -> Duration {
    Duration::from_millis(random.between(from, to))
}

struct Seat {
    name: &'static str,
    daemon: Daemon,
    wake_at: Option<Instant>,
}

impl Seat {
    fn new(lab: &Lab, name: &'static str) -> Self {
        Self {
            name,
            daemon: lab.controller(name, &SHORT_LEASE),
            wake_at: None,
        }
    }

    fn wake(&mut self) {
        if self.wake_at.take().is_some() {
            self.daemon.process().signal(Signal::CONT).unwrap();
        }
    }
}

/// Causes random faults until the given time. Then lets all paused processes continue, and returns how often each fault
/// happened.
async fn faults(
    lab: &Lab,
    seats: &mut [Seat],
    random: &mut Rng,
    until: Instant,
) -> BTreeMap<&'static str, u32> {
    let mut counts = BTreeMap::new();
    while Instant::now() < until {
        tokio::time::sleep(millis(random, 100, 1600)).await;
        for seat in seats.iter_mut() {
            seat.daemon.process().check_running().unwrap();
            if seat.wake_at.is_some_and(|at| at <= Instant::now()) {
                seat.wake();
            }
        }
        let leader = lease::holder(&lab.client)
            .await
            .unwrap()
            .unwrap_or_default();
        let leader = seats
            .iter()
            .position(|it| it.name == lease::identity(&leader));
        let anybody = usize::try_from(random.below(3)).unwrap();
        let chosen = if random.below(3) < 2 { leader } else { None };
        let seat = &mut seats[chosen.unwrap_or(anybody)];
        let fault = match random.below(10) {
            0..=2 => {
                seat.daemon.process().kill().unwrap();
                *seat = Seat::new(lab, seat.name);
                "killed"
            }
            3..=5 => {
                seat.daemon.process().signal(Signal::STOP).unwrap();
                seat.wake_at = Some(Instant::now() + millis(random, 300, 7000));
                "paused"
            }
            6..=7 => {
                seat.wake();
                let status = seat.daemon.process().stop(LIMIT).await.unwrap();
                assert_eq!(status.code(), Some(0), "{} ended badly", seat.name);
                *seat = Seat::new(lab, seat.name);
                "ended"
            }
            _ => {
                let apiserver = lab.cluster.apiserver().unwrap();
                apiserver.signal(Signal::STOP).unwrap();
                tokio::time::sleep(millis(random, 100, 3500)).await;
                apiserver.signal(Signal::CONT).unwrap();
                "API server paused"
            }
        };
        *counts.entry(fault).or_default() += 1;
    }
    for seat in seats {
        seat.wake();
    }
    counts
}

/// Creates and deletes nodes until `done` is set. A new node can have the name of a deleted node. Returns the numbers
/// of the live nodes.
async fn churn(lab: &Lab, random: &mut Rng, done: &Cell<bool>) -> BTreeSet<u32> {
    let api = Api::<Node>::all(lab.client.clone());
    let mut live = BTreeSet::new();
    while !done.get() {
        let goes: Vec<u32> = live
            .iter()
            .copied()
            .filter(|_| random.below(8) == 0)
            .collect();
        let name = |i: &u32| format!("node-{i:05}");
        let deletions = goes.iter().map(|i| {
            let (api, name) = (&api, name(i));
            async move { api.delete(&name, &DeleteParams::default()).await }
        });
        for deleted in join_all(deletions).await {
            deleted.unwrap();
        }
        live.retain(|i| !goes.contains(i));
        let room = LIVE - live.len();
        let mut comes: Vec<u32> = (0..random.below(24))
            .map(|_| u32::try_from(random.below(200)).unwrap())
            .filter(|i| !live.contains(i))
            .collect();
        comes.sort_unstable();
        comes.dedup();
        comes.truncate(room);
        let creations = comes.iter().map(|i| {
            let (api, node) = (&api, nodes::numbered(*i));
            async move { api.create(&PostParams::default(), &node).await }
        });
        for created in join_all(creations).await {
            created.unwrap();
        }
        live.extend(comes);
        tokio::time::sleep(millis(random, 20, 200)).await;
    }
    live
}

#[tokio::test(flavor = "multi_thread")]
async fn invariant_1_random_faults_never_make_a_duplicate_and_lose_nothing() {
    let from_environment = |name: &str| std::env::var(name).ok()?.parse().ok();
    let seed: u64 = from_environment("CADASTRE_SEED")
        .unwrap_or_else(|| std::hash::RandomState::new().hash_one(0) % 1_000_000);
    let seconds = from_environment("CADASTRE_SECONDS").unwrap_or(30);
    println!("CADASTRE_SEED={seed} CADASTRE_SECONDS={seconds}");
    let (mut random, mut other) = (Rng::new(seed), Rng::new(!seed));

    let lab = Lab::start().await;
    lab.pool("default", "10.64.0.0/17", "fd00:64::/57", 1).await;
    let holders = lease::Holders::watch(lab.client.clone());
    let mut seats: Vec<Seat> = NAMES.map(|name| Seat::new(&lab, name)).into();
    // The process that creates the Lease writes its longest duration, and the usual one with the next write. If the
    // process were killed in between, no other one would lead for most of the run.
    wait::until("the Lease lasts 3 s", LIMIT, async || {
        let duration = lease::duration(&lab.client).await?;
        Ok(duration.filter(|it| *it == 3))
    })
    .await
    .unwrap();
    let until = Instant::now() + Duration::from_secs(seconds);
    let done = Cell::new(false);
    let turmoil = async {
        let counts = faults(&lab, &mut seats, &mut random, until).await;
        done.set(true);
        counts
    };
    let (counts, live) = tokio::join!(turmoil, churn(&lab, &mut other, &done));

    lab.all_served(live.len()).await;
    assert_eq!(lab.history.gaps(), 0, "the history is complete");
    let terms = holders.seen().iter().filter(|it| it.1.is_some()).count();
    let revisions = lab.history.revisions();
    let assigned = revisions.iter().filter(|it| !it.pod_cidrs.is_empty());
    let assigned: BTreeSet<&str> = assigned.map(|it| it.uid.as_str()).collect();
    println!(
        "{counts:?}; {terms} terms of leadership, {} podCIDRs given, {} nodes live",
        assigned.len(),
        live.len()
    );
    assert!(terms > 3, "leadership hardly moved");
    for seat in &mut seats {
        seat.daemon.process().check_running().unwrap();
        assert!(
            !common::log_says(&mut seat.daemon, "panicked"),
            "{}",
            seat.name
        );
    }

    // The ranges of live nodes are allocated. All other ranges of the pool must become free: none may stay quarantined
    // or be lost.
    wait::until("no range is quarantined or lost", LIMIT, async || {
        let subnets = Api::<NodeSubnet>::all(lab.client.clone());
        let subnets = subnets.list(&ListParams::default()).await?.items;
        let pool = Api::<IPPool>::all(lab.client.clone())
            .get("default")
            .await?;
        let status = pool.status.unwrap_or_default();
        let free = (128 - live.len()).to_string();
        let all_free = [status.ipv4, status.ipv6]
            .into_iter()
            .all(|it| it.is_some_and(|it| it.free == free && it.quarantined == "0"));
        let quarantined = subnets.iter().any(|it| !it.spec.quarantined.is_empty());
        Ok((all_free && !quarantined && subnets.len() == live.len()).then_some(()))
    })
    .await
    .unwrap();
}
