//! Tests how the CNI plugin reaches the ledger: through the agent if the agent answers, and otherwise directly
//! through the store.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use cadastre_node::store_thread::{CallTimes, StoreHandle, StoreSettings, StoreThread};
use cadastre_node::wire;
use cadastre_node::wire::{Request, Response};
use cadastre_node::{Gc, Op, OpError, OpErrorKind, OpOutcome, Store, client, clock};

use crate::world::{add, attachment, holding};

const LONG: Duration = Duration::from_secs(20);

/// The directory of a node, with or without a store and an agent's socket.
struct Node(PathBuf);

impl Node {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("cadastre-{name}-{}", process::id()));
        _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn with_store(name: &str) -> Self {
        let node = Self::new(name);
        let mut store = Store::open(&node.store(), LONG).unwrap();
        let holding = holding(&["10.0.0.0/25", "fd00::/112"]);
        store.set_allocation(&holding, &clock::now()).unwrap();
        node
    }

    fn socket(&self) -> PathBuf {
        self.0.join("cni.sock")
    }

    fn store(&self) -> PathBuf {
        self.0.join("node.redb")
    }

    fn ask(&self, op: &Op, timeout: Duration) -> Result<OpOutcome, OpError> {
        client::ask(&self.socket(), &self.store(), op, timeout)
    }

    fn keeper(&self) -> (StoreThread, StoreHandle) {
        StoreThread::start(&self.store(), StoreSettings::default()).unwrap()
    }

    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.socket()).unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// Handles one connection as an agent does, with the store thread behind `handle`.
fn serve(mut stream: UnixStream, handle: &StoreHandle) {
    wire::send(
        &mut stream,
        &wire::Greeting {
            version: wire::VERSION,
        },
    )
    .unwrap();
    let request: Request = wire::receive(&mut stream).unwrap();
    let response = Response::from(keep(handle, request));
    wire::send(&mut stream, &response).unwrap();
}

fn addresses(answer: &Result<OpOutcome, OpError>) -> Vec<String> {
    let Ok(OpOutcome::Given(given)) = answer else {
        panic!("{answer:?}")
    };
    given
        .addresses
        .iter()
        .map(|it| it.address.to_string())
        .collect()
}

#[test]
fn agent_and_store_give_from_one_ledger() {
    let node = Node::with_store("turns");
    let (keeper, handle) = node.keeper();
    let listener = node.listen();
    let server = thread::spawn(move || {
        for _ in 0..4 {
            let (stream, _) = listener.accept().unwrap();
            serve(stream, &handle);
        }
    });
    let add = |n| Op::Add(add(n));
    assert_eq!(addresses(&node.ask(&add(1), LONG)), ["10.0.0.2", "fd00::2"]);
    assert_eq!(addresses(&node.ask(&add(1), LONG)), ["10.0.0.2", "fd00::2"]);
    assert_eq!(addresses(&node.ask(&add(2), LONG)), ["10.0.0.3", "fd00::3"]);
    let gc = Op::Gc(Gc {
        network: "net".to_owned(),
        valid: (0..9000)
            .map(|n| (format!("container-{n:0>64}"), "eth0".to_owned()))
            .collect(),
    });
    assert_eq!(
        node.ask(&gc, LONG),
        Ok(OpOutcome::Done),
        "close to the longest frame"
    );
    server.join().unwrap();
    keeper.join();
    // The agent has exited, but the file of its socket still exists. So the store is used directly.
    assert_eq!(addresses(&node.ask(&add(3), LONG)), ["10.0.0.4", "fd00::4"]);
    fs::remove_file(node.socket()).unwrap();
    assert_eq!(addresses(&node.ask(&add(4), LONG)), ["10.0.0.5", "fd00::5"]);
    assert_eq!(node.ask(&Op::Del(attachment(4)), LONG), Ok(OpOutcome::Done));
    assert_eq!(node.ask(&Op::Status, LONG), Ok(OpOutcome::Done));
}

#[test]
fn a_hung_agent_is_passed_by_in_time() {
    let node = Node::with_store("hung");
    // The test never calls `accept` on this listener. The kernel still accepts connections until the listener's queue
    // is full.
    let listener = node.listen();
    let start = Instant::now();
    let answer = node.ask(&Op::Add(add(1)), LONG);
    assert_eq!(addresses(&answer), ["10.0.0.2", "fd00::2"]);
    assert!(
        start.elapsed() < Duration::from_secs(3),
        "{:?}",
        start.elapsed()
    );
    let mut waiting = Vec::new();
    let full = loop {
        let stream = UnixStream::connect(node.socket());
        match stream {
            Ok(stream) if waiting.len() < 128 => waiting.push(stream),
            _ => break waiting.len(),
        }
    };
    assert!(full >= 100);
    let start = Instant::now();
    let answer = node.ask(&Op::Del(attachment(1)), LONG);
    assert_eq!(answer, Ok(OpOutcome::Done));
    assert!(
        start.elapsed() < Duration::from_secs(3),
        "{:?}",
        start.elapsed()
    );
    drop(listener);
}

#[test]
fn a_store_that_stays_locked_is_told_in_time() {
    let node = Node::with_store("locked");
    let _listener = node.listen();
    let store = Store::open(&node.store(), LONG).unwrap();
    let start = Instant::now();
    let refusal = node.ask(&Op::Status, Duration::from_secs(2)).unwrap_err();
    let took = start.elapsed();
    assert_eq!(refusal.why, OpErrorKind::Busy);
    assert!(
        refusal.text.contains("restart the agent"),
        "{}",
        refusal.text
    );
    assert!(
        took >= Duration::from_secs(1) && took < Duration::from_secs(4),
        "{took:?}"
    );
    drop(store);
}

#[test]
fn an_agent_that_speaks_otherwise_is_passed_by_and_named_where_that_cannot_be() {
    let node = Node::with_store("stranger");
    let listener = node.listen();
    // This thread runs until the process exits.
    thread::spawn(move || {
        for stream in listener.incoming() {
            // The CNI plugin may have closed the connection already, so errors are ignored.
            _ = wire::send(&mut stream.unwrap(), &wire::Greeting { version: 99 });
        }
    });
    let answer = node.ask(&Op::Add(add(1)), LONG);
    assert_eq!(addresses(&answer), ["10.0.0.2", "fd00::2"]);
    let _store = Store::open(&node.store(), LONG).unwrap();
    let refusal = node.ask(&Op::Status, Duration::from_secs(2)).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy);
    for says in ["version 99", "cadastre install-cni"] {
        assert!(refusal.text.contains(says), "{refusal}");
    }
}

#[test]
fn fields_of_a_newer_version_are_passed_over() {
    // A message of this version, to which an additional field is added at each level.
    let known = Request::new(
        Op::Del(attachment(1)),
        Duration::ZERO,
        Duration::from_secs(7),
    );
    let mut request = serde_json::to_value(&known).unwrap();
    request["future"] = 7.into();
    for (_, inner) in request["op"].as_object_mut().unwrap() {
        inner["future"] = "x".into();
    }
    let read: Request = serde_json::from_value(request).unwrap();
    assert_eq!(read, known);
    let answer = r#"{"refusal":{"why":"busy","text":"later","future":[]}}"#;
    let answer: Response = serde_json::from_str(answer).unwrap();
    let refusal = Result::<OpOutcome, OpError>::from(answer).unwrap_err();
    assert_eq!(
        (refusal.why, refusal.text.as_str()),
        (OpErrorKind::Busy, "later")
    );
}

#[test]
fn a_request_is_not_done_after_its_deadline() {
    let node = Node::with_store("late");
    let (keeper, handle) = node.keeper();
    let listener = node.listen();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        wire::send(
            &mut stream,
            &wire::Greeting {
                version: wire::VERSION,
            },
        )
        .unwrap();
        let request: Request = wire::receive(&mut stream).unwrap();
        // The agent hangs until the CNI plugin has used the store directly and closed the connection.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        request
    });
    let timeout = Duration::from_secs(2);
    assert_eq!(
        addresses(&node.ask(&Op::Add(add(1)), timeout)),
        ["10.0.0.2", "fd00::2"]
    );
    let late = server.join().unwrap();
    assert_eq!(node.ask(&Op::Del(attachment(1)), LONG), Ok(OpOutcome::Done));
    let refusal = keep(&handle, late).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy, "{refusal}");
    assert!(refusal.text.contains("after its deadline"), "{refusal}");
    drop(handle);
    keeper.join();
    let mut store = Store::open_existing(&node.store(), LONG).unwrap();
    assert_eq!(store.snapshot(&clock::now()).unwrap().attachments, []);
}

/// Passes a request that an agent has read to the store thread. Returns the store thread's answer.
fn keep(handle: &StoreHandle, request: Request) -> Result<OpOutcome, OpError> {
    let (sender, receiver) = channel();
    let call = CallTimes::until(request.deadline()).asked(request.asked());
    handle.ask(
        request.op,
        call,
        Box::new(move |it| sender.send(it).unwrap()),
    );
    receiver.recv().unwrap()
}

/// Returns a request that is made now, with a long deadline.
fn request(op: &Op) -> Request {
    let now = clock::since_boot();
    Request::new(op.clone(), now, now + LONG)
}

#[test]
fn an_agent_that_stalled_gives_nothing_to_what_was_deleted_meanwhile() {
    let node = Node::with_store("stalled");
    let (keeper, handle) = node.keeper();
    let _listener = node.listen();
    // The agent has read the ADD and stalls. The CNI plugin of the ADD is killed, and the CNI plugin of the DEL uses
    // the store directly. So the agent must reject the ADD.
    let asked = request(&Op::Add(add(1)));
    assert_eq!(node.ask(&Op::Del(attachment(1)), LONG), Ok(OpOutcome::Done));
    let refusal = keep(&handle, asked.clone()).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy);
    assert!(refusal.text.contains("was deleted after"), "{refusal}");
    // An ADD that is requested after the DEL succeeds. An ADD that was requested before the DEL is still rejected.
    let given = keep(&handle, request(&Op::Add(add(1))));
    assert_eq!(addresses(&given), ["10.0.0.2", "fd00::2"]);
    assert_eq!(node.ask(&Op::Del(attachment(1)), LONG), Ok(OpOutcome::Done));
    assert!(keep(&handle, asked).is_err());
    drop(handle);
    keeper.join();
    let mut store = Store::open_existing(&node.store(), LONG).unwrap();
    assert_eq!(store.snapshot(&clock::now()).unwrap().attachments, []);
}

#[test]
fn what_nobody_waits_for_any_more_is_not_done() {
    let node = Node::with_store("gone");
    let (keeper, handle) = node.keeper();
    // Another process has the file, so the request waits. Meanwhile its caller goes away, so the request must not be
    // done.
    let store = Store::open_existing(&node.store(), LONG).unwrap();
    let caller = Arc::new(());
    let alive = Arc::downgrade(&caller);
    let call = CallTimes::until(clock::since_boot() + LONG)
        .while_waited_for(move || alive.strong_count() > 0);
    let (sender, receiver) = channel();
    handle.ask(
        Op::Add(add(1)),
        call,
        Box::new(move |it| sender.send(it).unwrap()),
    );
    drop(caller);
    drop(store);
    let refusal = receiver.recv().unwrap().unwrap_err();
    assert!(refusal.text.contains("caller was gone"), "{refusal}");
    drop(handle);
    keeper.join();
    let mut store = Store::open_existing(&node.store(), LONG).unwrap();
    assert_eq!(store.snapshot(&clock::now()).unwrap().attachments, []);
}

#[test]
fn where_no_agent_ever_ran_it_is_said() {
    let node = Node::new("nothing");
    let refusal = node.ask(&Op::Add(add(1)), LONG).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NothingHeld);
    for says in [
        "no agent has run on this node yet",
        "See that `cadastre agent` runs",
        node.socket().to_str().unwrap(),
        node.store().to_str().unwrap(),
    ] {
        assert!(refusal.text.contains(says), "{refusal}");
    }
    assert_eq!(node.ask(&Op::Del(attachment(1)), LONG), Ok(OpOutcome::Done));
    assert_eq!(
        fs::read_dir(&node.0).unwrap().count(),
        0,
        "nothing was made"
    );
}

#[test]
fn frames_are_bounded_and_garbage_is_no_message() {
    let mut frame = wire::encode(&Request::new(
        Op::Status,
        Duration::ZERO,
        Duration::from_secs(7),
    ))
    .unwrap();
    let back: Request = wire::receive(&mut frame.as_slice()).unwrap();
    assert_eq!((back.op, back.deadline_ms), (Op::Status, 7000));
    frame[0] = 0x7f;
    assert!(wire::receive::<Request>(&mut frame.as_slice()).is_err());
    assert!(wire::receive::<Request>(&mut &frame[..3]).is_err());
    let long = Op::Gc(Gc {
        network: "x".repeat(wire::MOST_BYTES),
        valid: Vec::new(),
    });
    assert!(wire::encode(&Request::new(long, Duration::ZERO, Duration::ZERO)).is_err());
    let mut bad = 4u32.to_be_bytes().to_vec();
    bad.extend(b"null");
    assert!(wire::receive::<Request>(&mut bad.as_slice()).is_err());
}
