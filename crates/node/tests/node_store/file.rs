//! Tests the store's file on a real disk: which process has it open, what happens if it is replaced, and the store
//! thread.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use cadastre_core::Addr;
use cadastre_node::store_thread::{CallTimes, StoreSettings, StoreThread};
use cadastre_node::{
    Op, OpErrorKind, OpOutcome, RememberedAttachment, Store, StoreError, clock, set_aside,
};

use crate::world::{add, attachment, holding};

pub const WAIT: Duration = Duration::from_secs(20);

/// A temporary directory, which is removed when the value is dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("cadastre-{name}-{}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn store(&self) -> PathBuf {
        self.0.join("state/node.redb")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

pub fn filled(path: &Path) {
    let mut store = Store::open(path, WAIT).unwrap();
    let blocks = ["10.0.0.0/25", "fd00::/112"];
    store
        .set_allocation(&holding(&blocks), &clock::now())
        .unwrap();
}

#[test]
fn a_file_is_private_complete_and_of_one_process() {
    let scratch = Scratch::new("file");
    let path = scratch.store();
    assert!(matches!(
        Store::open_existing(&path, WAIT),
        Err(StoreError::Missing { .. })
    ));
    filled(&path);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(
        fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777,
        0o700
    );
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
    let scratch = Scratch::new("rebuild");
    let path = scratch.store();
    filled(&path);
    let mut expected = Vec::new();
    {
        let mut store = Store::open(&path, WAIT).unwrap();
        for n in 0..5 {
            store
                .run(&[Op::Add(add(n))], &clock::now())
                .remove(0)
                .unwrap();
        }
        for tenant in store.snapshot(&clock::now()).unwrap().attachments {
            expected.push(RememberedAttachment {
                attachment: tenant.attachment,
                addresses: tenant.given.addresses.iter().map(|it| it.address).collect(),
                pod: tenant.pod,
                netns: tenant.netns,
                since_ms: tenant.since_ms,
                boot: tenant.boot,
                superseded: false,
            });
        }
    }
    for number in 1..=2 {
        fs::write(&path, b"garbage").unwrap();
        let error = Store::open(&path, WAIT).err().unwrap();
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
        let aside = set_aside(&path).unwrap();
        assert_eq!(
            aside,
            path.with_file_name(format!("node.redb.damaged-{number}"))
        );
        let holding = holding(&["10.0.0.0/25", "fd00::/112"]);
        let mut known = expected.clone();
        known.push(RememberedAttachment {
            attachment: attachment(77),
            addresses: vec![
                expected[0].addresses[0],
                Addr::parse_strict("10.99.0.1").unwrap(),
            ],
            ..expected[0].clone()
        });
        let (mut store, lost) = Store::rebuild(&path, &holding, &known, &clock::now()).unwrap();
        assert_eq!(lost.len(), 1);
        assert_eq!(lost[0].addresses, expected[0].addresses[..1]);
        for known in &expected {
            let add = cadastre_node::Add {
                attachment: known.attachment.clone(),
                ..add(0)
            };
            let answer = store.run(&[Op::Add(add)], &clock::now()).remove(0);
            let Ok(OpOutcome::Given(given)) = answer else {
                panic!("{answer:?}")
            };
            let has: Vec<Addr> = given.addresses.iter().map(|it| it.address).collect();
            assert_eq!(has, known.addresses);
        }
        let answer = store.run(&[Op::Add(add(88))], &clock::now()).remove(0);
        let Ok(OpOutcome::Given(given)) = answer else {
            panic!("{answer:?}")
        };
        let new = given.addresses[0].address;
        assert!(
            expected.iter().all(|it| !it.addresses.contains(&new)),
            "{new} is live"
        );
        drop(store);
        let again = Store::rebuild(&path, &holding, &known, &clock::now())
            .err()
            .unwrap();
        assert!(matches!(again, StoreError::Exists { .. }), "{again}");
    }
}

/// Many threads send requests to a store thread, while other threads open the file directly, as CNI plugins do.
#[test]
fn a_hundred_threads_get_a_hundred_addresses_each_once() {
    let scratch = Scratch::new("keeper");
    let path = scratch.store();
    filled(&path);
    let settings = StoreSettings {
        idle: Duration::from_millis(1),
        wait: WAIT,
        ..StoreSettings::default()
    };
    let (keeper, handle) = StoreThread::start(&path, settings).unwrap();
    let given: Arc<Mutex<BTreeMap<Addr, u64>>> = Arc::default();
    let took = |given: &Mutex<BTreeMap<Addr, u64>>, n: u64, answer: OpOutcome| {
        let OpOutcome::Given(got) = answer else {
            panic!("{answer:?}")
        };
        for it in got.addresses {
            let other = given.lock().unwrap().insert(it.address, n);
            assert!(other.is_none_or(|other| other == n), "{} twice", it.address);
        }
    };
    thread::scope(|scope| {
        for n in 0..100 {
            let (handle, given) = (handle.clone(), Arc::clone(&given));
            scope.spawn(move || {
                let (sender, receiver) = channel();
                let deadline = clock::since_boot() + WAIT;
                let reply = Box::new(move |result| sender.send(result).unwrap());
                handle.ask(Op::Add(add(n)), CallTimes::until(deadline), reply);
                took(&given, n, receiver.recv().unwrap().unwrap());
            });
        }
        for n in 100..120 {
            let (path, given) = (path.clone(), Arc::clone(&given));
            scope.spawn(move || {
                let mut store = Store::open_existing(&path, WAIT).unwrap();
                let answer = store.run(&[Op::Add(add(n))], &clock::now()).remove(0);
                took(&given, n, answer.unwrap());
            });
        }
    });
    drop(handle);
    keeper.join();
    assert_eq!(given.lock().unwrap().len(), 240);
    let mut store = Store::open_existing(&path, Duration::ZERO).unwrap();
    assert_eq!(
        store.snapshot(&clock::now()).unwrap().attachments.len(),
        120
    );
}

#[test]
fn who_waits_for_a_file_gets_the_one_that_took_its_place() {
    let scratch = Scratch::new("place");
    let path = scratch.store();
    filled(&path);
    let old = Store::open_existing(&path, WAIT).unwrap();
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
    // By now the other thread usually waits for the old file. If it is slow, it opens the file later; the test must
    // succeed in both cases.
    thread::sleep(Duration::from_millis(30));
    set_aside(&path).unwrap();
    let other = holding(&["10.7.0.0/25", "fd07::/112"]);
    let (new, _) = Store::rebuild(&path, &other, &[], &clock::now()).unwrap();
    drop(old);
    thread::sleep(Duration::from_millis(30));
    drop(new);
    let mut store = waiter.join().unwrap().unwrap();
    let blocks = store.snapshot(&clock::now()).unwrap().blocks;
    assert_eq!(blocks[0].cidr.to_string(), "10.7.0.0/25");
}

#[test]
fn an_idle_keeper_lets_others_have_the_file_and_goes_on_after_them() {
    let scratch = Scratch::new("idle");
    let path = scratch.store();
    filled(&path);
    let settings = StoreSettings {
        idle: Duration::from_millis(30),
        wait: Duration::from_millis(50),
        ..StoreSettings::default()
    };
    let (keeper, handle) = StoreThread::start(&path, settings).unwrap();
    let ask = |op: Op| {
        let (sender, receiver) = channel();
        let reply = Box::new(move |result| sender.send(result).unwrap());
        handle.ask(op, CallTimes::until(clock::since_boot() + WAIT), reply);
        receiver.recv().unwrap()
    };
    let first = ask(Op::Add(add(1))).unwrap();
    let mut plugin = Store::open_existing(&path, WAIT).unwrap();
    let now = clock::now();
    assert_eq!(plugin.run(&[Op::Add(add(1))], &now), [Ok(first)]);
    plugin.run(&[Op::Del(attachment(1))], &now);
    let refusal = ask(Op::Status).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy, "{refusal}");
    drop(plugin);
    assert_eq!(ask(Op::Status), Ok(OpOutcome::Done));
    // The file is damaged while no process has it open, so the next request reports the damage.
    while Store::open_existing(&path, Duration::ZERO).is_err() {
        thread::yield_now();
    }
    fs::write(&path, b"garbage").unwrap();
    let (sender, receiver) = channel();
    handle.with(
        |ledger| ledger.snapshot(),
        move |it| sender.send(it).unwrap(),
    );
    let error = receiver.recv().unwrap().unwrap_err();
    assert!(matches!(*error, StoreError::Damaged { .. }), "{error}");
    assert_eq!(ask(Op::Status).unwrap_err().why, OpErrorKind::Store);
    drop(handle);
    keeper.join();
}

#[test]
fn more_than_may_wait_is_refused() {
    let scratch = Scratch::new("queue");
    let path = scratch.store();
    filled(&path);
    let settings = StoreSettings {
        waiting: 4,
        wait: WAIT,
        ..StoreSettings::default()
    };
    let lock = Store::open_existing(&path, WAIT).unwrap();
    let (keeper, handle) = StoreThread::start(&path, settings).unwrap();
    let (sender, receiver) = channel();
    for n in 0..40 {
        let sender = sender.clone();
        let reply = Box::new(move |result| sender.send((n, result)).unwrap());
        handle.ask(
            Op::Add(add(n)),
            CallTimes::until(clock::since_boot() + WAIT),
            reply,
        );
    }
    drop((lock, handle, sender));
    keeper.join();
    let answers: Vec<_> = receiver.iter().collect();
    assert_eq!(answers.len(), 40, "each is answered");
    let refused = answers.iter().filter(|(_, it)| it.is_err());
    assert!((34..40).contains(&refused.count()));
    let mut store = Store::open_existing(&path, WAIT).unwrap();
    let given = answers.iter().filter(|(_, it)| it.is_ok()).count();
    assert_eq!(
        store.snapshot(&clock::now()).unwrap().attachments.len(),
        given
    );
}
