//! At random times, kills real processes that use a real file. Some of the processes open the file for each operation,
//! as the CNI plugin does. The others keep the file open and group concurrent requests, as an agent does.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use cadastre_core::Addr;
use cadastre_node::store_thread::{StoreSettings, StoreThread};
use cadastre_node::{Attachment, Op, OpError, OpOutcome, Store, clock};

use crate::disk::MemoryFile;
use crate::helpers::{NodeDir, WAIT, assigned, attachments, call, run, seeded, send};
use crate::rng::Rng;
use crate::world::{add, attachment};

/// The number of rounds. Each round kills either two processes that act as CNI plugins, or one process that acts as an
/// agent.
const ROUNDS: u64 = 120;

/// Does the work of a child process, until the process is killed. This function is not a test: without the environment
/// variables of a child process, it does nothing.
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
            let base = own % 10 * 1000;
            step(&mut rng, base, |op| run(&mut store, &op, &clock::now()));
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
    let (store_thread, handle) =
        StoreThread::start(path, MemoryFile::default().holdings(), settings).unwrap();
    for n in 1..=6 {
        let handle = handle.clone();
        thread::spawn(move || {
            let mut rng = Rng::new(own * 10 + n);
            loop {
                step(&mut rng, n * 1000, |op| send(&handle, op, call()));
            }
        });
    }
    store_thread.join();
}

/// Prints a random request, sends it, and prints the answer.
fn step(rng: &mut Rng, base: u64, ask: impl FnOnce(Op) -> Result<OpOutcome, OpError>) {
    let n = base + rng.below(8);
    if rng.one_in(2) {
        say(&format!("?add {n}"));
        let addresses = assigned(&ask(Op::Add(add(n))));
        let addresses: Vec<String> = addresses.iter().map(Addr::to_string).collect();
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

/// Waits until a child begins to work. Returns the child's further output, and the first line that the child printed
/// about its work.
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
    answered: BTreeMap<Attachment, Vec<Addr>>,
    /// Requests without an answer. The value is true if the request is an ADD
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
                let before = self.answered.insert(attachment(n), addresses.clone());
                assert_eq!(
                    before.unwrap_or(addresses.clone()),
                    addresses,
                    "repeated ADD"
                );
                self.open.remove(&n);
                self.answers += 1;
            }
            "=del" => {
                self.answered.remove(&attachment(n));
                self.open.remove(&n);
                self.answers += 1;
            }
            _ => {}
        }
    }

    /// Treats an unanswered request as done if the store contains its effect.
    fn settle(&mut self, stored: &BTreeMap<Attachment, Vec<Addr>>) {
        for (n, is_add) in std::mem::take(&mut self.open) {
            let attachment = attachment(n);
            match (is_add, stored.get(&attachment)) {
                (true, Some(has)) => {
                    self.answered.entry(attachment).or_insert(has.clone());
                }
                (false, None) => _ = self.answered.remove(&attachment),
                _ => {}
            }
        }
    }
}

#[test]
fn processes_are_killed_at_random_and_nothing_answered_is_lost() {
    let (seed, mut rng) = seeded();
    let node = NodeDir::with_store();
    let path = node.store();
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
        let mut store = node.open();
        slowest = slowest.max(start.elapsed());
        let stored = attachments(&store.snapshot(&clock::now()).unwrap());
        callers.settle(&stored);
        assert_eq!(stored, callers.answered, "SEED={seed} round {round}");
    }
    let answers = callers.answers;
    println!("{ROUNDS} rounds, {answers} answers; opening took {slowest:?} at most");
    assert!(answers > ROUNDS, "killed too early: {answers} answers");
}
