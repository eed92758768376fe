//! Real processes on a real file: killed at random, taking turns, and through a keeper.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use cadastre::ipam::Addr;
use cadastre::node::keeper::{Keeper, Settings};
use cadastre::node::{Answer, Attachment, Known, Op, Store, StoreError, Why, clock, set_aside};

use crate::rng::{Rng, seed};
use crate::world::{add, attachment, holding};

const KILLS: u64 = 300;
const WAIT: Duration = Duration::from_secs(20);

/// A directory that goes with its value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("cadastre-{name}-{}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn store(&self) -> PathBuf {
        self.0.join("state/node.redb")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

fn filled(path: &Path) {
    let mut store = Store::open(path, WAIT).unwrap();
    let blocks = ["10.0.0.0/25", "fd00::/112"];
    store.hold(&holding(&blocks), &clock::now()).unwrap();
}

/// The work of one process: opens the file for each operation, as plugins do, or keeps it for a while, as
/// an agent does. Says what it is about to do, and what was answered.
#[test]
fn child() {
    let Ok(path) = env::var("CADASTRE_TEST_STORE") else {
        return;
    };
    let own: u64 = env::var("CADASTRE_TEST_CHILD").unwrap().parse().unwrap();
    let mut rng = Rng::new(own);
    let mut out = std::io::stdout();
    let mut say = |text: String| {
        out.write_all(text.as_bytes()).unwrap();
        out.flush().unwrap();
    };
    loop {
        let mut store = Store::open_existing(Path::new(&path), WAIT).unwrap();
        for _ in 0..=rng.below(3) {
            let n = own % 10 * 1000 + rng.below(12);
            if rng.one_in(2) {
                say(format!("\n?add {n}\n"));
                let answer = store.run(&[Op::Add(add(n))], &clock::now()).remove(0);
                let Ok(Answer::Given(given)) = answer else {
                    panic!("{answer:?}");
                };
                let addresses = given.addresses.iter().map(|it| it.address.to_string());
                say(format!(
                    "\n=add {n} {}\n",
                    addresses.collect::<Vec<_>>().join(" ")
                ));
            } else {
                say(format!("\n?del {n}\n"));
                let answer = store
                    .run(&[Op::Del(attachment(n))], &clock::now())
                    .remove(0);
                assert_eq!(answer, Ok(Answer::Done));
                say(format!("\n=del {n}\n"));
            }
        }
    }
}

fn spawn(path: &Path, own: u64) -> Child {
    Command::new(env::current_exe().unwrap())
        .args([
            "--exact",
            "processes::child",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("CADASTRE_TEST_STORE", path)
        .env("CADASTRE_TEST_CHILD", own.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until a child begins to work; with the line that said so.
fn at_work(child: &mut Child) -> (BufReader<ChildStdout>, String) {
    let mut out = BufReader::new(child.stdout.take().unwrap());
    loop {
        let mut line = String::new();
        assert!(
            out.read_line(&mut line).unwrap() > 0,
            "a child ended by itself"
        );
        if line.starts_with('?') {
            return (out, line.trim_end().to_owned());
        }
    }
}

/// What a child said until it was killed: `known` is brought up to date. Returns how many answers there
/// were, and what was not answered.
fn heard(
    lines: impl Iterator<Item = String>,
    known: &mut BTreeMap<u64, Vec<Addr>>,
) -> (u64, Option<(bool, u64)>) {
    let mut open = None;
    let mut answers = 0;
    for line in lines {
        answers += u64::from(line.starts_with('='));
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        let Some(n) = words.next().and_then(|n| n.parse::<u64>().ok()) else {
            continue;
        };
        match what {
            "?add" => open = Some((true, n)),
            "?del" => open = Some((false, n)),
            "=add" => {
                let addresses = words.map(|it| Addr::parse_strict(it).unwrap()).collect();
                if let Some(before) = known.insert(n, addresses) {
                    assert_eq!(before, known[&n], "a repeated ADD got something else");
                }
                open = None;
            }
            "=del" => {
                known.remove(&n);
                open = None;
            }
            _ => {}
        }
    }
    (answers, open)
}

#[test]
fn processes_are_killed_at_random_and_nothing_answered_is_lost() {
    let seed = seed();
    println!("SEED={seed}");
    let mut rng = Rng::new(seed);
    let scratch = Scratch::new("kills");
    let path = scratch.store();
    filled(&path);
    let mut known: BTreeMap<u64, Vec<Addr>> = BTreeMap::new();
    let mut answered = 0;
    let mut slowest = Duration::ZERO;
    for kill in 0..KILLS / 2 {
        let mut children: Vec<Child> = (1..=2).map(|n| spawn(&path, kill * 10 + n)).collect();
        let mut outs: Vec<_> = children.iter_mut().map(at_work).collect();
        thread::sleep(Duration::from_micros(rng.below(12_000)));
        for child in &mut children {
            child.kill().unwrap();
        }
        let mut open = Vec::new();
        for (child, (out, first)) in children.iter_mut().zip(outs.drain(..)) {
            let lines = std::iter::once(first).chain(out.lines().map(Result::unwrap));
            let (count, rest) = heard(lines, &mut known);
            answered += count;
            open.extend(rest);
            child.wait().unwrap();
        }
        let start = Instant::now();
        let mut store = Store::open_existing(&path, WAIT).unwrap();
        slowest = slowest.max(start.elapsed());
        let snapshot = store.snapshot(&clock::now()).unwrap();
        let mut holders: BTreeMap<Addr, Attachment> = BTreeMap::new();
        let mut seen: BTreeMap<u64, Vec<Addr>> = BTreeMap::new();
        for tenant in snapshot.tenants {
            let n = tenant.attachment.container_id[1..].parse().unwrap();
            let addresses: Vec<Addr> = tenant.given.addresses.iter().map(|it| it.address).collect();
            for addr in &addresses {
                let other = holders.insert(*addr, tenant.attachment.clone());
                assert!(other.is_none(), "SEED={seed}: {addr} has two holders");
            }
            seen.insert(n, addresses);
        }
        for (is_add, n) in open {
            match (is_add, seen.get(&n)) {
                // The unanswered operation was done, or was not.
                (true, Some(has)) => _ = known.entry(n).or_insert_with(|| has.clone()),
                (false, None) => _ = known.remove(&n),
                _ => {}
            }
        }
        assert_eq!(seen, known, "SEED={seed} kill {kill}");
    }
    println!("{KILLS} kills, {answered} answers; opening took {slowest:?} at most");
    assert!(
        answered > KILLS,
        "the processes were killed too early: {answered} answers"
    );
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
        for tenant in store.snapshot(&clock::now()).unwrap().tenants {
            expected.push(Known {
                attachment: tenant.attachment,
                addresses: tenant.given.addresses.iter().map(|it| it.address).collect(),
                pod: tenant.pod,
                netns: tenant.netns,
                since_ms: tenant.since_ms,
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
        known.push(Known {
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
            let add = cadastre::node::Add {
                attachment: known.attachment.clone(),
                ..add(0)
            };
            let answer = store.run(&[Op::Add(add)], &clock::now()).remove(0);
            let Ok(Answer::Given(given)) = answer else {
                panic!("{answer:?}")
            };
            let has: Vec<Addr> = given.addresses.iter().map(|it| it.address).collect();
            assert_eq!(has, known.addresses);
        }
        let answer = store.run(&[Op::Add(add(88))], &clock::now()).remove(0);
        let Ok(Answer::Given(given)) = answer else {
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

/// Asks a keeper from many threads at once, while plugins take turns with it on the file.
#[test]
fn a_hundred_threads_get_a_hundred_addresses_each_once() {
    let scratch = Scratch::new("keeper");
    let path = scratch.store();
    filled(&path);
    let settings = Settings {
        idle: Duration::from_millis(1),
        wait: WAIT,
        ..Settings::default()
    };
    let (keeper, handle) = Keeper::start(&path, settings).unwrap();
    let given: Arc<Mutex<BTreeMap<Addr, u64>>> = Arc::default();
    let took = |given: &Mutex<BTreeMap<Addr, u64>>, n: u64, answer: Answer| {
        let Answer::Given(got) = answer else {
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
                handle.ask(Op::Add(add(n)), deadline, reply);
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
    assert_eq!(store.snapshot(&clock::now()).unwrap().tenants.len(), 120);
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
    // It may wait for the old one by now, or come later.
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
    let settings = Settings {
        idle: Duration::from_millis(30),
        wait: Duration::from_millis(50),
        ..Settings::default()
    };
    let (keeper, handle) = Keeper::start(&path, settings).unwrap();
    let ask = |op: Op| {
        let (sender, receiver) = channel();
        let reply = Box::new(move |result| sender.send(result).unwrap());
        handle.ask(op, clock::since_boot() + WAIT, reply);
        receiver.recv().unwrap()
    };
    let first = ask(Op::Add(add(1))).unwrap();
    let mut plugin = Store::open_existing(&path, WAIT).unwrap();
    let now = clock::now();
    assert_eq!(plugin.run(&[Op::Add(add(1))], &now), [Ok(first)]);
    plugin.run(&[Op::Del(attachment(1))], &now);
    let refusal = ask(Op::Status).unwrap_err();
    assert_eq!(refusal.why, Why::Busy, "{refusal}");
    drop(plugin);
    assert_eq!(ask(Op::Status), Ok(Answer::Done));
    // The file is damaged while nobody has it: that is told as such.
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
    assert_eq!(ask(Op::Status).unwrap_err().why, Why::Store);
    drop(handle);
    keeper.join();
}

#[test]
fn more_than_may_wait_is_refused() {
    let scratch = Scratch::new("queue");
    let path = scratch.store();
    filled(&path);
    let settings = Settings {
        waiting: 4,
        wait: WAIT,
        ..Settings::default()
    };
    let lock = Store::open_existing(&path, WAIT).unwrap();
    let (keeper, handle) = Keeper::start(&path, settings).unwrap();
    let (sender, receiver) = channel();
    for n in 0..40 {
        let sender = sender.clone();
        let reply = Box::new(move |result| sender.send((n, result)).unwrap());
        handle.ask(Op::Add(add(n)), clock::since_boot() + WAIT, reply);
    }
    drop((lock, handle, sender));
    keeper.join();
    let answers: Vec<_> = receiver.iter().collect();
    assert_eq!(answers.len(), 40, "each is answered");
    let refused = answers.iter().filter(|(_, it)| it.is_err());
    assert!((34..40).contains(&refused.count()));
    let mut store = Store::open_existing(&path, WAIT).unwrap();
    let given = answers.iter().filter(|(_, it)| it.is_ok()).count();
    assert_eq!(store.snapshot(&clock::now()).unwrap().tenants.len(), given);
}
