//! Tests the store's file on a real disk: which process has it open, what happens if it is replaced, and the store
//! thread.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{fs, thread};

use cadastre_core::Addr;
use cadastre_node::store_thread::{StoreRequest, StoreSettings, StoreThread};
use cadastre_node::{
    Add, Now, Op, OpErrorKind, OpOutcome, RememberedAttachment, Store, StoreError, clock, set_aside,
};

use crate::disk::MemoryFile;
use crate::helpers::{NodeDir, WAIT, assigned, call, run, send};
use crate::world::{add, allocation, attachment};

#[test]
fn a_file_is_private_complete_and_of_one_process() {
    let missing = Store::open_existing(&NodeDir::empty().store(), WAIT);
    assert!(matches!(missing, Err(StoreError::Missing { .. })));
    let node = NodeDir::with_store();
    let path = node.store();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    let names = fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(names, 1, "nothing else is left there");
    let store = Store::open(&path, WAIT).unwrap();
    let start = Instant::now();
    let wait = Duration::from_millis(50);
    let error = Store::open(&path, wait).err().unwrap();
    assert!(
        matches!(error, StoreError::Locked { .. }) && start.elapsed() >= wait,
        "{error}"
    );
    drop(store);
    Store::open(&path, Duration::ZERO).unwrap();
}

#[test]
fn a_damaged_file_is_set_aside_and_rebuilt() {
    let node = NodeDir::with_store();
    let path = node.store();
    let mut store = node.open();
    for n in 0..5 {
        run(&mut store, &Op::Add(add(n)), &clock::now()).unwrap();
    }
    let attachments = store.snapshot(&clock::now()).unwrap().attachments;
    drop(store);
    let remembered = attachments.into_iter().map(|it| RememberedAttachment {
        addresses: it.given.addrs().collect(),
        attachment: it.attachment,
        pod: it.pod,
        netns: it.netns,
        since_ms: it.since_ms,
        boot: it.boot,
        superseded: false,
    });
    let expected: Vec<RememberedAttachment> = remembered.collect();
    for number in 1..=2 {
        fs::write(&path, b"garbage").unwrap();
        let error = Store::open(&path, WAIT).err().unwrap();
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
        let aside = set_aside(&path).unwrap();
        assert_eq!(
            aside,
            path.with_file_name(format!("node.redb.damaged-{number}"))
        );
        let allocation = allocation(&["10.0.0.0/25", "fd00::/112"]);
        let mut remembered = expected.clone();
        remembered.push(RememberedAttachment {
            attachment: attachment(77),
            addresses: vec![
                expected[0].addresses[0],
                Addr::parse_strict("10.99.0.1").unwrap(),
            ],
            ..expected[0].clone()
        });
        let now = clock::now();
        let (mut store, lost) = Store::rebuild(
            &path,
            MemoryFile::default().holdings(),
            &allocation,
            &remembered,
            false,
            None,
            &now,
        )
        .unwrap();
        assert_eq!(lost.len(), 1);
        assert_eq!(lost[0].addresses, expected[0].addresses[..1]);
        for it in &expected {
            let add = Add {
                attachment: it.attachment.clone(),
                ..add(0)
            };
            let answer = run(&mut store, &Op::Add(add), &now);
            assert_eq!(assigned(&answer), it.addresses);
        }
        let new = assigned(&run(&mut store, &Op::Add(add(88)), &now))[0];
        assert!(
            expected.iter().all(|it| !it.addresses.contains(&new)),
            "{new} is in use"
        );
        drop(store);
        let again = Store::rebuild(
            &path,
            MemoryFile::default().holdings(),
            &allocation,
            &remembered,
            false,
            None,
            &now,
        );
        assert!(matches!(again.err(), Some(StoreError::Exists { .. })));
    }
}

#[test]
fn addresses_outside_of_the_ranges_of_a_new_store_count_until_the_next_boot() {
    for has_addresses_outside in [false, true] {
        let node = NodeDir::empty();
        let ranges = allocation(&["10.0.0.0/25"]);
        let now = clock::now();
        let made = Store::rebuild(
            &node.store(),
            MemoryFile::default().holdings(),
            &ranges,
            &[],
            has_addresses_outside,
            None,
            &now,
        );
        drop(made.unwrap());
        let mut store = Store::open_existing(&node.store(), WAIT).unwrap();
        let next_boot = Now {
            boot: "next".to_owned(),
            ..now.clone()
        };
        for (at, expected) in [(&now, has_addresses_outside), (&next_boot, false)] {
            let read = store.transact(at, |ledger| ledger.snapshot()).unwrap();
            assert_eq!(read.has_addresses_outside, expected);
        }
    }
}

/// Many threads send requests to a store thread, while other threads open the file directly, as CNI plugins do.
#[test]
fn concurrent_requests_never_get_the_same_address() {
    let node = NodeDir::with_store();
    let path = node.store();
    let settings = StoreSettings {
        idle: Duration::from_millis(1),
        wait: WAIT,
        ..StoreSettings::default()
    };
    let (store_thread, handle) =
        StoreThread::start(&path, MemoryFile::default().holdings(), settings).unwrap();
    let all = Mutex::new(BTreeSet::new());
    let all = &all;
    let record = |answer| {
        for addr in assigned(&answer) {
            assert!(all.lock().unwrap().insert(addr), "{addr} twice");
        }
    };
    thread::scope(|scope| {
        for n in 0..100 {
            let handle = handle.clone();
            scope.spawn(move || record(send(&handle, Op::Add(add(n)), call())));
        }
        for n in 100..120 {
            let node = &node;
            scope.spawn(move || record(run(&mut node.open(), &Op::Add(add(n)), &clock::now())));
        }
    });
    drop(handle);
    store_thread.join();
    assert_eq!(all.lock().unwrap().len(), 240);
    assert_eq!(node.attachments().len(), 120);
}

#[test]
fn a_process_that_waits_for_a_file_opens_the_file_that_replaced_it() {
    let node = NodeDir::with_store();
    let path = node.store();
    let old = node.open();
    let (sender, receiver) = channel();
    let waiter = thread::spawn({
        let path = path.clone();
        move || {
            sender.send(()).unwrap();
            loop {
                match Store::open_existing(&path, WAIT) {
                    Err(StoreError::Missing { .. }) => thread::yield_now(),
                    result => return result,
                }
            }
        }
    });
    receiver.recv().unwrap();
    // After this pause, the thread `waiter` usually waits for the old file. But a slow thread can open the file after
    // the replacement. The test must succeed in both cases.
    thread::sleep(Duration::from_millis(30));
    set_aside(&path).unwrap();
    let other = allocation(&["10.7.0.0/25", "fd07::/112"]);
    let (new, _) = Store::rebuild(
        &path,
        MemoryFile::default().holdings(),
        &other,
        &[],
        false,
        None,
        &clock::now(),
    )
    .unwrap();
    drop(old);
    thread::sleep(Duration::from_millis(30));
    drop(new);
    let mut store = waiter.join().unwrap().unwrap();
    let blocks = store.snapshot(&clock::now()).unwrap().blocks;
    assert_eq!(blocks[0].cidr.to_string(), "10.7.0.0/25");
}

#[test]
fn an_idle_store_thread_closes_the_file_and_opens_it_again() {
    let node = NodeDir::with_store();
    let path = node.store();
    let settings = StoreSettings {
        idle: Duration::from_millis(30),
        wait: Duration::from_millis(50),
        ..StoreSettings::default()
    };
    let (store_thread, handle) =
        StoreThread::start(&path, MemoryFile::default().holdings(), settings).unwrap();
    let ask = |op| send(&handle, op, call());
    let first = ask(Op::Add(add(1))).unwrap();
    let mut plugin = node.open();
    let now = clock::now();
    assert_eq!(plugin.run(&[Op::Add(add(1))], &now), [Ok(first)]);
    plugin.run(&[Op::Del(attachment(1))], &now);
    let refusal = ask(Op::Status).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy, "{refusal}");
    drop(plugin);
    assert_eq!(ask(Op::Status), Ok(OpOutcome::Done));
    // The file is damaged while no process has it open. So the next request must report the damage.
    while Store::open_existing(&path, Duration::ZERO).is_err() {
        thread::yield_now();
    }
    fs::write(&path, b"garbage").unwrap();
    let (sender, receiver) = channel();
    handle.send(StoreRequest::work(
        None,
        |ledger| ledger.snapshot(),
        move |it| sender.send(it).unwrap(),
    ));
    let error = receiver.recv().unwrap().unwrap_err();
    assert!(matches!(*error, StoreError::Damaged { .. }), "{error}");
    assert_eq!(ask(Op::Status).unwrap_err().why, OpErrorKind::Store);
    drop(handle);
    store_thread.join();
}

#[test]
fn requests_beyond_the_queue_are_rejected() {
    let node = NodeDir::with_store();
    let path = node.store();
    let settings = StoreSettings {
        waiting: 4,
        wait: WAIT,
        ..StoreSettings::default()
    };
    let lock = node.open();
    let (store_thread, handle) =
        StoreThread::start(&path, MemoryFile::default().holdings(), settings).unwrap();
    let (sender, receiver) = channel();
    for n in 0..40 {
        let sender = sender.clone();
        let reply = Box::new(move |result| sender.send((n, result)).unwrap());
        handle.ask(Op::Add(add(n)), call(), reply);
    }
    drop((lock, handle, sender));
    store_thread.join();
    let answers: Vec<_> = receiver.iter().collect();
    assert_eq!(answers.len(), 40, "each is answered");
    let refused = answers.iter().filter(|(_, it)| it.is_err());
    // The thread may take the whole queue once before it waits for the file, so at most twice four are accepted.
    assert!((32..40).contains(&refused.count()));
    let done = answers.iter().filter(|(_, it)| it.is_ok()).count();
    assert_eq!(node.attachments().len(), done);
}
