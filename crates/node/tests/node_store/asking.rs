//! Tests how the CNI plugin reaches the ledger. The plugin sends its operation to the agent if the agent answers, and
//! otherwise uses the store directly.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{fs, thread};

use cadastre_node::store_thread::{CallTimes, StoreHandle, StoreSettings, StoreThread};
use cadastre_node::wire::{self, Request, Response};
use cadastre_node::{
    AddressAssignment, BlockState, Gc, Op, OpError, OpErrorKind, OpOutcome, Store, client, clock,
};

use crate::disk::MemoryFile;
use crate::helpers::{NodeDir, WAIT, assigned, call, send};
use crate::world::{add, attachment};

impl NodeDir {
    fn socket(&self) -> PathBuf {
        self.path().join("cni.sock")
    }

    fn ask(&self, op: &Op, timeout: Duration) -> Result<OpOutcome, OpError> {
        client::ask(&self.socket(), &self.store(), op, timeout)
    }

    /// Performs an ADD as the CNI plugin does. Returns the addresses as text.
    fn add(&self, n: u64) -> String {
        addresses(&self.ask(&Op::Add(add(n)), WAIT))
    }

    fn del(&self, n: u64) {
        let answer = self.ask(&Op::Del(attachment(n)), WAIT);
        assert_eq!(answer, Ok(OpOutcome::Done));
    }

    fn store_thread(&self) -> (StoreThread, StoreHandle) {
        StoreThread::start(
            &self.store(),
            MemoryFile::default().holdings(),
            StoreSettings::default(),
        )
        .unwrap()
    }

    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.socket()).unwrap()
    }
}

fn addresses(answer: &Result<OpOutcome, OpError>) -> String {
    let addresses = assigned(answer).into_iter().map(|it| it.to_string());
    addresses.collect::<Vec<_>>().join(" ")
}

/// Greets the CNI plugin as an agent does, and returns the plugin's request.
fn greet(stream: &mut UnixStream) -> Request {
    let version = wire::VERSION;
    wire::send(stream, &wire::Greeting { version }).unwrap();
    wire::receive(stream).unwrap()
}

/// Passes to the store thread a request that an agent has read. Returns the store thread's answer.
fn pass(handle: &StoreHandle, request: Request) -> Result<OpOutcome, OpError> {
    let call = CallTimes::until(request.deadline()).asked(request.asked());
    send(handle, request.op, call)
}

#[test]
fn agent_and_plugin_assign_from_one_ledger() {
    let node = NodeDir::with_store();
    let (store_thread, handle) = node.store_thread();
    let listener = node.listen();
    let server = thread::spawn(move || {
        for _ in 0..4 {
            let (mut stream, _) = listener.accept().unwrap();
            let request = greet(&mut stream);
            let response = Response::from(pass(&handle, request));
            wire::send(&mut stream, &response).unwrap();
        }
    });
    assert_eq!(node.add(1), "10.0.0.2 fd00::2");
    assert_eq!(node.add(1), "10.0.0.2 fd00::2");
    assert_eq!(node.add(2), "10.0.0.3 fd00::3");
    let gc = Op::Gc(Gc {
        network: "net".to_owned(),
        valid: (0..9000)
            .map(|n| (format!("container-{n:0>64}"), "eth0".to_owned()))
            .collect(),
    });
    assert_eq!(
        node.ask(&gc, WAIT),
        Ok(OpOutcome::Done),
        "close to the longest frame"
    );
    server.join().unwrap();
    store_thread.join();
    // The agent has exited, but its socket's file still exists. So the CNI plugin uses the store directly.
    assert_eq!(node.add(3), "10.0.0.4 fd00::4");
    fs::remove_file(node.socket()).unwrap();
    assert_eq!(node.add(4), "10.0.0.5 fd00::5");
    node.del(4);
    assert_eq!(node.ask(&Op::Status, WAIT), Ok(OpOutcome::Done));
}

#[test]
fn the_plugin_bypasses_a_hung_agent_in_time() {
    let node = NodeDir::with_store();
    // The test never calls `accept` on this listener, like an agent that hangs. The kernel still accepts connections
    // until the listener's queue is full.
    let listener = node.listen();
    let start = Instant::now();
    assert_eq!(node.add(1), "10.0.0.2 fd00::2");
    let took = start.elapsed();
    assert!(took < WAIT, "{took:?}");
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
    node.del(1);
    let took = start.elapsed();
    assert!(took < WAIT, "{took:?}");
    drop(listener);
}

#[test]
fn a_store_that_stays_locked_is_reported_in_time() {
    let node = NodeDir::with_store();
    let _listener = node.listen();
    let store = Store::open(&node.store(), WAIT).unwrap();
    let start = Instant::now();
    let refusal = node.ask(&Op::Status, Duration::from_secs(2)).unwrap_err();
    let took = start.elapsed();
    assert_eq!(refusal.why, OpErrorKind::Busy);
    assert!(refusal.text.contains("restart the agent"), "{refusal}");
    assert!(took >= Duration::from_secs(1), "{took:?}");
    drop(store);
}

#[test]
fn an_agent_of_another_protocol_version_is_bypassed_or_reported() {
    let node = NodeDir::with_store();
    let listener = node.listen();
    // This thread runs until the process exits.
    thread::spawn(move || {
        for stream in listener.incoming() {
            // The CNI plugin may have closed the connection already, so errors are ignored.
            _ = wire::send(&mut stream.unwrap(), &wire::Greeting { version: 99 });
        }
    });
    assert_eq!(node.add(1), "10.0.0.2 fd00::2");
    let _store = Store::open(&node.store(), WAIT).unwrap();
    let refusal = node.ask(&Op::Status, Duration::from_secs(2)).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy);
    for says in ["version 99", "cadastre install-cni"] {
        assert!(refusal.text.contains(says), "{refusal}");
    }
}

#[test]
fn fields_of_a_newer_version_are_ignored() {
    // The message has the current protocol version, and an additional field at each level.
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
fn names_in_messages_and_files_of_earlier_versions_are_kept() {
    let kinds = [
        OpErrorKind::NoBlock,
        OpErrorKind::NotInBlocks,
        OpErrorKind::NotFree,
    ];
    let names = serde_json::to_string(&(kinds, BlockState::Active)).unwrap();
    assert_eq!(names, r#"[["nothingHeld","notHeld","taken"],"held"]"#);
    let answer = Response::Answer(OpOutcome::Assigned(AddressAssignment::default()));
    let answer = serde_json::to_string(&answer).unwrap();
    assert_eq!(answer, r#"{"answer":{"given":{"addresses":[]}}}"#);
}

#[test]
fn a_request_is_not_done_after_its_deadline() {
    let node = NodeDir::with_store();
    let (store_thread, handle) = node.store_thread();
    let listener = node.listen();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let request = greet(&mut stream);
        // The agent hangs until the CNI plugin has used the store directly and closed the connection.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        request
    });
    let timeout = Duration::from_secs(2);
    let answer = node.ask(&Op::Add(add(1)), timeout);
    assert_eq!(addresses(&answer), "10.0.0.2 fd00::2");
    let late = server.join().unwrap();
    node.del(1);
    let refusal = pass(&handle, late).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy, "{refusal}");
    assert!(refusal.text.contains("after its deadline"), "{refusal}");
    drop(handle);
    store_thread.join();
    assert!(node.attachments().is_empty());
}

/// Returns a request that is made now, with a long deadline.
fn request(op: &Op) -> Request {
    let now = clock::since_boot();
    Request::new(op.clone(), now, now + WAIT)
}

#[test]
fn an_agent_that_stalled_rejects_an_add_that_was_deleted_meanwhile() {
    let node = NodeDir::with_store();
    let (store_thread, handle) = node.store_thread();
    let _listener = node.listen();
    // The agent has read the ADD and stalls. The CNI plugin of the ADD is killed, and the CNI plugin of the DEL uses
    // the store directly. When the agent continues, it must reject the ADD.
    let asked = request(&Op::Add(add(1)));
    node.del(1);
    let refusal = pass(&handle, asked.clone()).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Busy);
    assert!(refusal.text.contains("was deleted after"), "{refusal}");
    // An ADD that is requested after the DEL succeeds. An ADD that was requested before the DEL is still rejected.
    let given = pass(&handle, request(&Op::Add(add(1))));
    assert_eq!(addresses(&given), "10.0.0.2 fd00::2");
    node.del(1);
    assert!(pass(&handle, asked).is_err());
    drop(handle);
    store_thread.join();
    assert!(node.attachments().is_empty());
}

#[test]
fn a_request_whose_caller_is_gone_is_not_done() {
    let node = NodeDir::with_store();
    let (store_thread, handle) = node.store_thread();
    // Another process has the file open, so the request waits. Before the file is closed, the caller of the request
    // ends. So the request must not be performed.
    let store = node.open();
    let caller = Arc::new(());
    let alive = Arc::downgrade(&caller);
    let call = call().while_waited_for(move || alive.strong_count() > 0);
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
    store_thread.join();
    assert!(node.attachments().is_empty());
}

#[test]
fn the_plugin_says_that_no_agent_has_run_yet() {
    let node = NodeDir::empty();
    let refusal = node.ask(&Op::Add(add(1)), WAIT).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NoBlock);
    for says in [
        "no agent has run on this node yet",
        "See that `cadastre agent` runs",
        node.socket().to_str().unwrap(),
        node.store().to_str().unwrap(),
    ] {
        assert!(refusal.text.contains(says), "{refusal}");
    }
    node.del(1);
    let files = fs::read_dir(node.path()).unwrap().count();
    assert_eq!(files, 0, "nothing was created");
}

#[test]
fn frames_are_bounded_and_garbage_is_rejected() {
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
