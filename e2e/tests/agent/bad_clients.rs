//! Clients that send garbage or too much to the agent's sockets, that send nothing, or that run as another user.

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cadastre_agent::grpc::{CONNECTIONS, client, v1};
use cadastre_agent::plugin_socket;
use rustix::process::geteuid;
use rustix::thread::set_thread_res_uid;
use serde_json::json;

use crate::start;

/// Longer than the time after which the agent closes a connection on which the client sends nothing.
const LONG: Duration = Duration::from_secs(25);

/// Sends bytes and shuts down the sending side. Returns what is received until the agent closes the connection.
fn send(path: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // Errors are ignored, because the agent may close the connection while the bytes are being sent.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn frame(body: &str) -> Vec<u8> {
    let head = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&head, body.as_bytes()].concat()
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

#[tokio::test]
async fn garbage_is_refused_in_words_or_cut_and_nobody_else_notices() {
    let (_, machine) = start("junk", "10.84.0.0/27", json!({}), &[]).await;
    let first = machine.add("c1").await.unwrap();
    let zeros = vec![0; 3 << 20];
    let nines = vec![0xff; 3 << 20];
    let web = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff".to_vec();
    let cut = frame("{\"version\":1")[..9].to_vec();
    for bytes in [zeros, nines, web, preface, cut, Vec::new()] {
        for path in [machine.plugin_socket(), machine.socket()] {
            let bytes = bytes.clone();
            blocking(move || send(&path, &bytes)).await;
        }
        assert_eq!(machine.add("c1").await.unwrap(), first);
    }
    for (body, says) in [
        ("{}", "install the plugin that came with the agent"),
        ("[[[[", "cannot read this request"),
        (
            r#"{"version":99,"deadlineMs":1,"op":"status"}"#,
            "version 99",
        ),
        (
            r#"{"version":1,"deadlineMs":1,"op":"explode"}"#,
            "cannot read this request",
        ),
    ] {
        let path = machine.plugin_socket();
        let answer = blocking(move || send(&path, &frame(body))).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.contains(says), "{body}: {answer}");
    }
    assert_eq!(machine.in_use().await, [("c1".to_owned(), first)]);
}

#[tokio::test]
async fn too_much_is_refused_and_many_calls_are_served_in_their_turn() {
    let (_, machine) = start("much", "10.85.0.0/27", json!({}), &[]).await;
    let mut client = client(&machine.socket());
    let long = v1::AddRequest {
        addresses: vec!["x".repeat(2 << 20)],
        ..v1::AddRequest::default()
    };
    let refusal = client.add(long).await.unwrap_err();
    assert_eq!(format!("{:?}", refusal.code()), "OutOfRange", "{refusal}");
    assert!(refusal.message().contains("too large"), "{refusal}");
    let long = v1::Attachment {
        network: "n".repeat(1025),
        ..v1::Attachment::default()
    };
    let long = v1::DelRequest {
        attachment: Some(long),
    };
    let refusal = client.del(long).await.unwrap_err();
    let code = format!("{:?}", refusal.code());
    assert_eq!(code, "InvalidArgument", "{refusal}");
    assert!(refusal.message().contains("1 to 1024 bytes"), "{refusal}");
    // The agent processes fewer calls at the same time on one connection than are sent here. All calls must succeed
    // nevertheless.
    let calls = (0..500).map(|_| {
        let mut client = client.clone();
        async move { client.list(v1::ListRequest {}).await }
    });
    let answers = futures::future::join_all(calls).await;
    assert!(answers.iter().all(Result::is_ok));
    machine.add("c1").await.unwrap();
}

/// Opens `count` connections that send nothing.
fn silent(path: &Path, count: usize) -> Vec<UnixStream> {
    let connect = |_| UnixStream::connect(path).unwrap();
    (0..count).map(connect).collect()
}

#[tokio::test]
async fn who_takes_all_places_and_says_nothing_loses_them() {
    let (_, machine) = start("idle", "10.86.0.0/27", json!({}), &[]).await;
    // A client that watches and answers HTTP/2 pings must keep its connection, while silent connections are closed.
    let mut states = client(&machine.socket())
        .watch(v1::WatchRequest {})
        .await
        .unwrap()
        .into_inner();
    states.message().await.unwrap().unwrap();
    let begun = Instant::now();
    let plugins = silent(&machine.plugin_socket(), plugin_socket::CONNECTIONS + 8);
    let others = silent(&machine.socket(), CONNECTIONS + 8);
    // All connections are occupied. So the CNI plugin cannot reach the agent, and uses the store itself.
    let first = machine.add("c1").await.unwrap();
    assert_eq!(machine.in_use().await, [("c1".to_owned(), first.clone())]);
    let waited = begun.elapsed();
    assert!(waited < LONG, "{waited:?}");
    assert_eq!(machine.add("c1").await.unwrap(), first);
    drop((plugins, others));
    let more = tokio::time::timeout(Duration::from_millis(10), states.message());
    assert!(more.await.is_err(), "the watch was cut");
}

#[tokio::test]
async fn another_user_is_not_served_even_where_the_files_let_him() {
    if !geteuid().is_root() {
        println!("skipped: another user cannot be played without being root");
        return;
    }
    let (_, mut machine) = start("user", "10.87.0.0/27", json!({}), &[]).await;
    let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let (plugins, others) = (machine.plugin_socket(), machine.socket());
    assert_eq!((mode(&plugins), mode(&others)), (0o600, 0o600));
    assert_eq!(mode(&machine.path("run")), 0o700);
    for path in [machine.path(""), machine.path("run")] {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    for path in [plugins, others] {
        let closed = path.clone();
        let refused = std::thread::spawn(move || {
            become_nobody();
            UnixStream::connect(closed).unwrap_err().kind()
        });
        let refused = blocking(move || refused.join().unwrap()).await;
        assert_eq!(refused, std::io::ErrorKind::PermissionDenied);
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        let asked = std::thread::spawn(move || {
            become_nobody();
            send(&path, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        });
        let answer = blocking(move || asked.join().unwrap()).await;
        assert!(answer.is_empty(), "{answer:?}");
    }
    machine
        .log_says("only root and the agent's own user are served")
        .await;
    machine.add("c1").await.unwrap();
}

/// Changes the user of this thread, not of the whole process.
fn become_nobody() {
    let nobody = rustix::process::Uid::from_raw(65534);
    set_thread_res_uid(None, nobody, None).unwrap();
}
