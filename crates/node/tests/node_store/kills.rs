//! Kills real processes that use a real file at random times. Some open the file for each operation, as the CNI
//! plugin does. Others keep the file open and group concurrent requests, as an agent does.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{env, thread};

use cadastre_core::Addr;
use cadastre_node::store_thread::{CallTimes, StoreSettings, StoreThread};
use cadastre_node::{Attachment, Op, OpError, OpOutcome, Store, clock};

use crate::file::{Scratch, WAIT, filled};
use crate::rng::{Rng, seed};
use crate::world::{add, attachment};

/// Number of rounds. In each round, two processes that act as CNI plugins or one that acts as an agent are killed.
const ROUNDS: u64 = 120;

/// Not a test: the work that a child process does until it is killed. Without the environment variables of a child it
/// does nothing.
#[test]
fn child() {
    let Ok(path) = env::var("CADASTRE_TEST_STORE") else {
        return;
    };
    let path = Path::new(&path);
    let own: u64 = env::var("CADASTRE_TEST_CHILD").unwrap().parse().unwrap();
    if env::var_os("CADASTRE_TEST_AGENT").is_some() {
        agent(path, own);
    }
    let mut rng = Rng::new(own);
    loop {
        let mut store = Store::open_existing(path, WAIT).unwrap();
        for _ in 0..=rng.below(3) {
            step(&mut rng, own % 10 * 1000, |op| {
                store.run(&[op], &clock::now()).remove(0)
            });
        }
    }
}

/// Acts as an agent: six threads send requests to a store thread that closes the file as soon as it has no work.
fn agent(path: &Path, own: u64) {
    let settings = StoreSettings {
        idle: Duration::ZERO,
        wait: WAIT,
        ..StoreSettings::default()
    };
    let (keeper, handle) = StoreThread::start(path, settings).unwrap();
    for n in 1..=6 {
        let handle = handle.clone();
        thread::spawn(move || {
            let mut rng = Rng::new(own * 10 + n);
            loop {
                step(&mut rng, n * 1000, |op| {
                    let (sender, receiver) = channel();
                    let reply = Box::new(move |result| sender.send(result).unwrap());
                    handle.ask(op, CallTimes::until(clock::since_boot() + WAIT), reply);
                    receiver.recv().unwrap()
                });
            }
        });
    }
    keeper.join();
}

/// Prints a random request, sends it, and prints the answer.
fn step(rng: &mut Rng, base: u64, ask: impl FnOnce(Op) -> Result<OpOutcome, OpError>) {
    let n = base + rng.below(8);
    if rng.one_in(2) {
        say(&format!("?add {n}"));
        let answer = ask(Op::Add(add(n)));
        let Ok(OpOutcome::Given(given)) = answer else {
            panic!("{answer:?}");
        };
        let addresses = given.addresses.iter().map(|it| it.address.to_string());
        let addresses: Vec<String> = addresses.collect();
        say(&format!("=add {n} {}", addresses.join(" ")));
    } else {
        say(&format!("?del {n}"));
        assert_eq!(ask(Op::Del(attachment(n))), Ok(OpOutcome::Done));
        say(&format!("=del {n}"));
    }
}

/// Prints a line on standard output in a single write.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("\n{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

fn spawn(path: &Path, own: u64, is_agent: bool) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    let child = ["--exact", "kills::child", "--nocapture", "--test-threads=1"];
    command
        .args(child)
        .env("CADASTRE_TEST_STORE", path)
        .env("CADASTRE_TEST_CHILD", own.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if is_agent {
        command.env("CADASTRE_TEST_AGENT", "1");
    }
    command.spawn().unwrap()
}

/// Waits until a child begins to work. Returns the rest of its output, and the first line of its work.
fn at_work(child: &mut Child) -> (BufReader<ChildStdout>, String) {
    let mut out = BufReader::new(child.stdout.take().unwrap());
    loop {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0, "a child ended");
        if line.starts_with('?') {
            return (out, line.trim_end().to_owned());
        }
    }
}

/// What the callers in all processes know, according to the lines that the processes printed.
#[derive(Default)]
struct Callers {
    known: BTreeMap<u64, Vec<Addr>>,
    /// Requests without an answer, each with whether it is an ADD
    open: BTreeMap<u64, bool>,
    answers: u64,
}

impl Callers {
    fn hear(&mut self, line: &str) {
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        let Some(n) = words.next().and_then(|n| n.parse::<u64>().ok()) else {
            return;
        };
        match what {
            "?add" => _ = self.open.insert(n, true),
            "?del" => _ = self.open.insert(n, false),
            "=add" => {
                let addresses: Option<Vec<Addr>> = words.map(Addr::parse_strict).collect();
                let addresses = addresses.unwrap();
                assert_eq!(addresses.len(), 2);
                if let Some(before) = self.known.insert(n, addresses) {
                    assert_eq!(before, self.known[&n], "a repeated ADD got something else");
                }
                self.open.remove(&n);
                self.answers += 1;
            }
            "=del" => {
                self.known.remove(&n);
                self.open.remove(&n);
                self.answers += 1;
            }
            _ => {}
        }
    }

    /// Assumes for each request without an answer that it was done, if the store shows that.
    fn settle(&mut self, seen: &BTreeMap<u64, Vec<Addr>>) {
        for (n, is_add) in std::mem::take(&mut self.open) {
            match (is_add, seen.get(&n)) {
                (true, Some(has)) => _ = self.known.entry(n).or_insert_with(|| has.clone()),
                (false, None) => _ = self.known.remove(&n),
                _ => {}
            }
        }
    }
}

/// Returns all assignments in the store. Panics if an address has two holders.
fn seen(store: &mut Store) -> BTreeMap<u64, Vec<Addr>> {
    let mut holders: BTreeMap<Addr, Attachment> = BTreeMap::new();
    let mut seen = BTreeMap::new();
    for tenant in store.snapshot(&clock::now()).unwrap().attachments {
        let n = tenant.attachment.container_id[1..].parse().unwrap();
        let addresses = tenant.given.addresses.iter().map(|it| it.address);
        let addresses: Vec<Addr> = addresses.collect();
        for addr in &addresses {
            let other = holders.insert(*addr, tenant.attachment.clone());
            assert!(other.is_none(), "{addr} has two holders");
        }
        seen.insert(n, addresses);
    }
    seen
}

#[test]
fn processes_are_killed_at_random_and_nothing_answered_is_lost() {
    let seed = seed();
    println!("SEED={seed}");
    let mut rng = Rng::new(seed);
    let scratch = Scratch::new("kills");
    let path = scratch.store();
    filled(&path);
    let mut callers = Callers::default();
    let mut slowest = Duration::ZERO;
    for round in 0..ROUNDS {
        let mut children = if round % 2 == 0 {
            vec![spawn(&path, round, true)]
        } else {
            let plugin = |n| spawn(&path, round * 10 + n, false);
            (1..=2).map(plugin).collect()
        };
        let outs: Vec<_> = children.iter_mut().map(at_work).collect();
        thread::sleep(Duration::from_micros(rng.below(12_000)));
        for child in &mut children {
            child.kill().unwrap();
        }
        for (child, (out, first)) in children.iter_mut().zip(outs) {
            callers.hear(&first);
            out.lines().for_each(|line| callers.hear(&line.unwrap()));
            child.wait().unwrap();
        }
        let start = Instant::now();
        let mut store = Store::open_existing(&path, WAIT).unwrap();
        slowest = slowest.max(start.elapsed());
        let seen = seen(&mut store);
        callers.settle(&seen);
        assert_eq!(seen, callers.known, "SEED={seed} round {round}");
    }
    let answers = callers.answers;
    println!("{ROUNDS} rounds, {answers} answers; opening took {slowest:?} at most");
    assert!(answers > ROUNDS, "killed too early: {answers} answers");
}
