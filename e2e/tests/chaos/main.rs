//! Real controllers and agents on three kube-apiservers and three etcd members, under faults of every layer.
//!
//! A run is a sequence of rounds. In a round, one to three faults act for some seconds, while pods and nodes come and
//! go. Then everything is healed, and all must be at rest within [`REST`]. Meanwhile a reader of etcd's own history
//! checks every revision ([`Revisions`]), and the kubelets check every answer of the agents ([`Kubelets`]).
//!
//! The test does nothing unless `MINUTES` is set, as `make chaos` does. With the value of `CADASTRE_SEED` that an
//! earlier run printed, a run repeats the random choices of the earlier run, but not its timing. `FAULT=name,name` makes
//! every round cause these faults.

#![allow(clippy::print_stdout, clippy::unwrap_used)] // allowed in helpers as in tests

mod cluster;
mod faults;
mod rest;
#[path = "../../../tests/common/rng.rs"]
mod rng;
mod workload;

use std::collections::BTreeMap;
use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use cluster::Cluster;
use faults::Fault;
use rng::Rng;
use workload::Workload;

/// The maximum time from the end of the faults until everything is at rest.
const REST: Duration = Duration::from_secs(60);
/// If it takes longer than this until everything is at rest, a run shows what was at rest last.
const SLOW: Duration = Duration::from_secs(10);
/// How long a client may take to notice that a connection is silent for good: API servers send a bookmark about once a
/// minute.
const SILENT: Duration = Duration::from_secs(80);
/// For how long the faults of a round act, in seconds.
const ACTIVE: (u64, u64) = (4, 25);

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_fault_makes_a_duplicate_or_frees_a_live_address_and_all_come_to_rest() {
    let Some(minutes) = variable::<u64>("MINUTES") else {
        println!("left out: it takes minutes; run `make chaos MINUTES=10`");
        return;
    };
    let random = std::hash::RandomState::new().hash_one(0) % 1_000_000;
    let seed = variable("CADASTRE_SEED").unwrap_or(random);
    let only: Option<String> = variable("FAULT");
    println!("CADASTRE_SEED={seed}");
    let mut random = Rng::new(seed);
    let mut cluster = Cluster::start().await.unwrap();
    let mut workload = Workload::start(&cluster, Rng::new(!seed)).await.unwrap();
    let begun = Instant::now();
    let limit = Duration::from_secs(60 * minutes);
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    rest::wait(&mut cluster, &mut workload, REST).await.unwrap();
    while begun.elapsed() < limit {
        rounds += 1;
        let chosen = Fault::choose(&mut random, only.as_deref()).unwrap();
        let names: Vec<&str> = chosen.iter().map(|it| it.name()).collect();
        let (stop, stopped) = watch::channel(false);
        let active = Duration::from_secs(random.between(ACTIVE.0, ACTIVE.1));
        let kubelets = Arc::clone(&workload.kubelets);
        let turmoil = async {
            let caused = faults::cause(&mut cluster, &kubelets, &chosen, active, &mut random).await;
            stop.send_replace(true);
            caused
        };
        let (caused, ()) = tokio::join!(turmoil, workload.churn(stopped));
        caused.unwrap();
        let is_silent = chosen.iter().any(|it| it.leaves_silent_connections());
        let limit = if is_silent { REST + SILENT } else { REST };
        let rested = rest::wait(&mut cluster, &mut workload, limit).await;
        let (took, last) = rested.unwrap_or_else(|error| {
            cluster.plane.keep();
            panic!("after {}: {error:?}", names.join(", "))
        });
        longest = longest.max(took);
        for name in &names {
            *counts.entry(*name).or_default() += 1;
        }
        println!(
            "{:5.0} s  {} for {} s; at rest after {:.1} s with {} nodes and {} pods{}",
            begun.elapsed().as_secs_f64(),
            names.join(", "),
            active.as_secs(),
            took.as_secs_f64(),
            workload.nodes().len(),
            workload.pods(),
            if took > SLOW {
                format!(", last: {last}")
            } else {
                String::new()
            },
        );
    }
    println!("{rounds} rounds; faults: {counts:?}");
    println!("revisions of etcd: {:?}", cluster.revisions.counts());
    println!(
        "{} containers had addresses, {} leaders; at rest after {:.1} s at the latest",
        workload.assigned(),
        cluster.terms(),
        longest.as_secs_f64()
    );
}
