//! Benchmarks the ledger of a node on the disk of this host. The cases are an ADD and its DEL at different numbers of
//! addresses in use, a hundred operations at once, and a process that opens the file for one operation.
//!
//! Each ADD and each DEL waits for the disk once; a group of a hundred operations waits for the disk once in all. The
//! benchmark `floor` measures only such a wait, by overwriting 4 KiB and syncing them.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "the macros of criterion make public items"
)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use std::{env, process};

use cadastre_core::Cidr;
use cadastre_core::node_allocation::{Block, NodeAllocation, PoolTerms};
use cadastre_node::{Add, Attachment, Op, Store, clock};
use criterion::Criterion;

const WAIT: Duration = Duration::from_secs(5);

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20)
        .configure_from_args();
    let dir = env::current_dir().unwrap().join("target/bench-node");
    let dir = dir.join(process::id().to_string());
    fs::create_dir_all(&dir).unwrap();
    floor(&mut criterion, &dir);
    for used in [0, 110, 330, 4096] {
        node(&mut criterion, &dir, used);
    }
    fs::remove_dir_all(&dir).unwrap();
    criterion.final_summary();
}

fn floor(criterion: &mut Criterion, dir: &Path) {
    let file = File::create(dir.join("floor")).unwrap();
    let page = [1; 4096];
    criterion.bench_function("floor", |bencher| {
        bencher.iter(|| {
            file.write_all_at(&page, 0).unwrap();
            file.sync_data().unwrap();
        });
    });
}

fn node(criterion: &mut Criterion, dir: &Path, used: u64) {
    let path = dir.join(format!("{used}.redb"));
    drop(filled(&path, used));
    let mut group = criterion.benchmark_group(format!("{used} used"));
    let mut n = 1_000_000;
    let mut store = open(&path);
    group.bench_function("ADD and DEL", |bencher| {
        bencher.iter(|| {
            n += 1;
            run(&mut store, &[Op::Add(add(n))]);
            run(&mut store, &[Op::Del(attachment(n))]);
        });
    });
    group.bench_function("100 ADDs at once, and their DELs", |bencher| {
        bencher.iter(|| {
            n += 100;
            let adds: Vec<Op> = (n..n + 100).map(|n| Op::Add(add(n))).collect();
            let dels: Vec<Op> = (n..n + 100).map(|n| Op::Del(attachment(n))).collect();
            run(&mut store, &adds);
            run(&mut store, &dels);
        });
    });
    group.bench_function("snapshot", |bencher| {
        bencher.iter(|| store.snapshot(&clock::now()).unwrap());
    });
    drop(store);
    group.bench_function("open and close", |bencher| {
        bencher.iter(|| drop(open(&path)));
    });
    group.bench_function("open, ADD, close, open, DEL, close", |bencher| {
        bencher.iter(|| {
            n += 1;
            run(&mut open(&path), &[Op::Add(add(n))]);
            run(&mut open(&path), &[Op::Del(attachment(n))]);
        });
    });
    group.finish();
}

fn open(path: &Path) -> Store {
    Store::open(path, WAIT).unwrap()
}

fn filled(path: &Path, used: u64) -> Store {
    let mut store = open(path);
    let allocation = NodeAllocation {
        node_uid: "node".to_owned(),
        blocks: vec![Block {
            cidr: Cidr::parse_strict("10.0.0.0/16").unwrap(),
            uid: "uid".to_owned(),
            pool: String::new(),
            draining: false,
            borrowed: false,
            reserved: Vec::new(),
            on_request: Vec::new(),
        }],
        // There is no cooldown, so that the records of released addresses do not fill the file.
        pools: vec![PoolTerms {
            cooldown_seconds: 0,
            ..PoolTerms::named("")
        }],
        ..NodeAllocation::default()
    };
    store.set_allocation(&allocation, &clock::now()).unwrap();
    let adds: Vec<Op> = (0..used).map(|n| Op::Add(add(n))).collect();
    run(&mut store, &adds);
    store
}

fn run(store: &mut Store, ops: &[Op]) {
    for answer in store.run(ops, &clock::now()) {
        answer.unwrap();
    }
}

fn attachment(n: u64) -> Attachment {
    Attachment {
        network: "net".to_owned(),
        container_id: format!("{n:0>64}"),
        ifname: "eth0".to_owned(),
    }
}

fn add(n: u64) -> Add {
    Add {
        attachment: attachment(n),
        netns: format!("/var/run/netns/cni-{n}"),
        decided: true,
        ..Add::default()
    }
}
