//! Tests of watches. The API server in these tests gives prepared answers, or stays silent.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use futures::{StreamExt as _, stream};
use http::{Request, Response};
use kube::Client;
use serde_json::{Value, json};

use super::*;
use crate::encoding::tests::{framed, framed_error, framed_event, sealed_list, sealed_status};
use cadastre_api::NodeLite;
use cadastre_api::watched::protobuf;

/// Limits that are longer than the test server takes to answer. So these limits are reached only if the server stays
/// silent.
const SHORT_PATIENCE: SilenceTimeouts = SilenceTimeouts {
    answer: Duration::from_millis(300),
    bookmark: Duration::from_millis(300),
    expected: Duration::from_millis(100),
};
/// A time limit that is longer than any of these tests takes.
const LIMIT: Duration = Duration::from_secs(30);

/// What the test server does with a request.
enum Answer {
    /// No response
    Nothing,
    /// A complete response
    Text(String),
    /// The beginning of a response, but never the rest
    Begins(String),
    /// An error with this status code
    Code(u16),
    /// A complete response in protobuf
    Protobuf(Vec<u8>),
    /// The beginning of a response in protobuf, but never the rest
    ProtobufBegins(Vec<u8>),
    /// An error in protobuf
    ProtobufCode(u16),
}

fn node(name: &str, version: u32) -> Value {
    let version = version.to_string();
    json!({"metadata": {"name": name, "uid": name, "resourceVersion": version}})
}

fn list(names: &[&str], version: u32, next: &str) -> String {
    let items: Vec<Value> = names.iter().map(|name| node(name, 1)).collect();
    let metadata = json!({"resourceVersion": version.to_string(), "continue": next});
    json!({"kind": "NodeList", "metadata": metadata, "items": items}).to_string()
}

/// Returns the response to a watch request: these events, and nothing after them.
fn watch(events: &[(&str, Value)]) -> Answer {
    let lines = events
        .iter()
        .map(|(kind, object)| json!({"type": kind, "object": object}).to_string() + "\n");
    Answer::Begins(lines.collect())
}

fn bookmark(version: u32) -> (&'static str, Value) {
    let metadata = json!({"resourceVersion": version.to_string()});
    let bookmark = json!({"kind": "Node", "apiVersion": "v1", "metadata": metadata});
    ("BOOKMARK", bookmark)
}

fn answer(answer: Answer) -> Response<Body> {
    match answer {
        Answer::Text(text) => Response::new(Body::from(text)),
        Answer::Begins(text) => {
            let begin = stream::iter([Ok::<_, Infallible>(text)]);
            Response::new(Body::from_stream(begin.chain(stream::pending())))
        }
        Answer::Code(code) => {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "no"});
            let mut response = Response::new(Body::from(status.to_string()));
            *response.status_mut() = code.try_into().unwrap();
            response
        }
        Answer::Protobuf(bytes) => in_protobuf(Body::from(bytes), 200),
        Answer::ProtobufBegins(bytes) => {
            let begin = stream::iter([Ok::<_, Infallible>(bytes)]);
            in_protobuf(Body::from_stream(begin.chain(stream::pending())), 200)
        }
        Answer::ProtobufCode(code) => in_protobuf(Body::from(sealed_status(code)), code),
        Answer::Nothing => unreachable!("never answered"),
    }
}

fn in_protobuf(body: Body, code: u16) -> Response<Body> {
    let answer = Response::builder().status(code).header(
        "content-type",
        "application/vnd.kubernetes.protobuf;stream=watch",
    );
    answer.body(body).unwrap()
}

/// A watch of Nodes. Its server gives prepared answers, one after the other, and then stays silent.
struct TestWatch {
    steps: mpsc::Receiver<String>,
    requests: Arc<Mutex<Vec<String>>>,
    heard: LastHeard,
    /// The encodings that the requests asked for
    wanted: Arc<Mutex<Vec<String>>>,
}

fn expired() -> Value {
    json!({"kind": "Status", "status": "Failure", "code": 410, "message": "too old"})
}

fn start(answers: Vec<Answer>, doubtful: bool) -> TestWatch {
    start_with(answers, doubtful, SHORT_PATIENCE)
}

fn start_with(answers: Vec<Answer>, doubtful: bool, patience: SilenceTimeouts) -> TestWatch {
    let pauses = Pauses::new(Duration::from_millis(1), Duration::from_millis(2), 1);
    start_by(answers, doubtful, patience, pauses)
}

/// Starts a watch whose pauses after errors are about as long as `pause`.
fn start_pausing(answers: Vec<Answer>, pause: Duration) -> TestWatch {
    let patience = SilenceTimeouts {
        bookmark: LIMIT,
        ..SHORT_PATIENCE
    };
    start_by(answers, false, patience, Pauses::new(pause, pause, 1))
}

fn start_by(
    answers: Vec<Answer>,
    doubtful: bool,
    patience: SilenceTimeouts,
    pauses: Pauses,
) -> TestWatch {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let wanted = Arc::new(Mutex::new(Vec::new()));
    let script = Mutex::new(VecDeque::from(answers));
    let server = tower::service_fn({
        let requests = Arc::clone(&requests);
        let wanted = Arc::clone(&wanted);
        move |request: Request<kube::client::Body>| {
            let uri = request.uri().to_string();
            requests.lock().unwrap().push(uri);
            let accept = request.headers().get("accept");
            let accept = accept.map_or("", |it| it.to_str().unwrap());
            wanted.lock().unwrap().push(accept.to_owned());
            let next = script.lock().unwrap().pop_front();
            async move {
                match next.unwrap_or(Answer::Nothing) {
                    Answer::Nothing => std::future::pending().await,
                    some => Ok::<_, Infallible>(answer(some)),
                }
            }
        }
    });
    let heard = LastHeard::default();
    let source = WatchSource::<NodeLite> {
        kind: "nodes",
        api: Api::all(Client::new(server, "default")),
        encoding: Encoding::Protobuf(protobuf::node),
        fields: None,
        labels: None,
        page: Some(2),
        pauses,
        doubtful,
        patience,
        heard: heard.clone(),
    };
    let (out, steps) = mpsc::channel(64);
    let text = |step| {
        Some(match step {
            WatchStep::Change(ObjectEvent::Restarted { .. }) => "begins".to_owned(),
            WatchStep::Change(ObjectEvent::Applied(name)) => name,
            WatchStep::Change(ObjectEvent::Deleted(name)) => format!("-{name}"),
            WatchStep::Change(ObjectEvent::Listed) => "listed".to_owned(),
            WatchStep::Change(ObjectEvent::Reached(version)) => format!("to {version}"),
            WatchStep::Trouble => "trouble".to_owned(),
            WatchStep::Recovered => "recovered".to_owned(),
            WatchStep::Absent => "absent".to_owned(),
        })
    };
    tokio::spawn(follow(
        source,
        out,
        |node| node.metadata.name.unwrap_or_default(),
        text,
    ));
    TestWatch {
        steps,
        requests,
        heard,
        wanted,
    }
}

impl TestWatch {
    /// Returns the next steps until `last` comes, including `last`.
    async fn steps_to(&mut self, last: &str) -> Vec<String> {
        let mut steps = Vec::new();
        while steps.last().is_none_or(|step| step != last) {
            let next = timeout(LIMIT, self.steps.recv()).await;
            let next = next.unwrap_or_else(|_| panic!("no \"{last}\" came after {steps:?}"));
            steps.push(next.unwrap());
        }
        steps
    }

    /// Returns a text for each request: for a watch, the version from which it begins; for a list, `list` or `next
    /// page`.
    fn requests(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        let short = |uri: &String| match uri.split_once("resourceVersion=") {
            Some((_, version)) => version.to_owned(),
            None if uri.contains("continue=") => "next page".to_owned(),
            None => "list".to_owned(),
        };
        requests.iter().map(short).collect()
    }
}

#[tokio::test]
async fn the_next_page_is_requested_as_soon_as_a_page_names_it() {
    let patience = SilenceTimeouts {
        answer: LIMIT,
        ..SHORT_PATIENCE
    };
    let begin = r#"{"metadata": {"resourceVersion": "5", "continue": "n"}, "items": ["#;
    let first = Answer::Begins(format!("{begin}{},", node("a", 1)));
    let mut watched = start_with(vec![first], false, patience);
    watched.steps_to("a").await;
    let is_requested = async {
        while watched.requests() != ["list", "next page"] {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, is_requested).await.unwrap();
}

/// Returns a page of a list with one node and the token of the next page, which comes first, as from a real API server.
fn page(name: &str, next: &str) -> Answer {
    Answer::Text(format!(
        r#"{{"metadata": {{"resourceVersion": "5", "continue": "{next}"}}, "items": [{}]}}"#,
        node(name, 1)
    ))
}

#[tokio::test]
async fn a_page_that_was_requested_early_is_read_in_its_turn() {
    let answers = vec![page("a", "n"), page("b", "m"), page("c", "")];
    let mut watched = start(answers, false);
    let steps = watched.steps_to("listed").await;
    assert_eq!(steps, ["begins", "a", "b", "c", "listed"]);
    assert_eq!(
        watched.requests()[..3],
        ["list", "next page", "next page"],
        "each page is requested once"
    );
}

#[tokio::test]
async fn a_page_that_was_requested_early_and_never_comes_begins_the_list_again() {
    let answers = vec![page("a", "n"), Answer::Nothing, page("a", "")];
    let mut watched = start(answers, false);
    let steps = watched.steps_to("listed").await;
    let expected = [
        "begins",
        "a",
        "trouble",
        "begins",
        "recovered",
        "a",
        "listed",
    ];
    assert_eq!(steps, expected);
    assert_eq!(watched.requests()[..3], ["list", "next page", "list"]);
}

#[tokio::test]
async fn a_list_without_an_answer_is_requested_again() {
    let all = Answer::Text(list(&["a"], 5, ""));
    let mut watched = start(vec![Answer::Nothing, Answer::Nothing, all], false);
    let steps = watched.steps_to("listed").await;
    assert_eq!(
        steps[..5],
        ["begins", "trouble", "begins", "trouble", "begins"]
    );
    assert_eq!(steps[5..], ["recovered", "a", "listed"]);
    assert!(watched.heard.too_long(LIMIT).is_none());
}

#[tokio::test]
async fn a_silent_page_restarts_the_list() {
    let half = list(&["a", "b"], 5, "");
    let half = half[..half.len() / 2].to_owned();
    let answers = vec![
        Answer::Begins(half),
        Answer::Text(list(&["a", "b"], 6, "more")),
        Answer::Nothing,
        Answer::Text(list(&["a", "b"], 7, "more")),
        Answer::Text(list(&["c"], 7, "")),
    ];
    let mut watched = start(answers, false);
    let steps = watched.steps_to("listed").await;
    let whole = ["begins", "recovered", "a", "b", "c", "listed"].map(str::to_owned);
    assert!(steps.ends_with(&whole), "{steps:?}");
    let requests = ["list", "list", "next page", "list", "next page"];
    assert_eq!(watched.requests()[..5], requests);
}

#[tokio::test]
async fn a_list_whose_state_expires_is_restarted() {
    let answers = vec![
        Answer::Text(list(&["old"], 5, "more")),
        Answer::Code(410),
        Answer::Text(list(&["old"], 6, "more")),
        // Pages that show different states are not one list. So the list must begin again.
        Answer::Text(list(&["b"], 7, "")),
        Answer::Text(list(&["a"], 8, "more")),
        Answer::Text(list(&["b"], 8, "")),
    ];
    let mut watched = start(answers, false);
    let steps = watched.steps_to("listed").await;
    let whole = ["begins", "recovered", "a", "b", "listed"].map(str::to_owned);
    assert!(steps.ends_with(&whole), "{steps:?}");
}

#[tokio::test]
async fn a_watch_without_an_answer_is_requested_again_at_the_same_version() {
    let answers = vec![
        Answer::Text(list(&["a"], 5, "")),
        Answer::Nothing,
        watch(&[("ADDED", node("b", 6)), ("DELETED", node("a", 7))]),
    ];
    let mut watched = start(answers, false);
    watched.steps_to("listed").await;
    let steps = watched.steps_to("-a").await;
    assert_eq!(steps, ["to 5", "trouble", "recovered", "b", "-a"]);
    assert_eq!(watched.requests()[..3], ["list", "5", "5"]);
}

#[tokio::test]
async fn a_silent_watch_is_restarted_and_then_relisted() {
    let answers = vec![
        Answer::Text(list(&["a"], 5, "")),
        watch(&[("ADDED", node("b", 6))]),
        watch(&[]),
        Answer::Text(list(&["a", "c"], 9, "")),
        watch(&[("ADDED", node("d", 10))]),
    ];
    let mut watched = start(answers, false);
    let steps = watched.steps_to("d").await;
    let last = ["a", "c", "listed", "to 9", "d"].map(str::to_owned);
    assert!(steps.ends_with(&last), "{steps:?}");
    assert_eq!(watched.requests()[..5], ["list", "5", "6", "list", "9"]);
}

#[tokio::test]
async fn a_watch_that_lacks_a_stored_version_is_restarted_once_and_without_a_relist() {
    let patience = SilenceTimeouts {
        bookmark: LIMIT,
        ..SHORT_PATIENCE
    };
    let answers = vec![
        Answer::Text(list(&["a"], 5, "")),
        watch(&[("ADDED", node("b", 6))]),
        watch(&[("ADDED", node("c", 8))]),
        watch(&[("ADDED", node("d", 9))]),
    ];
    let mut watched = start_with(answers, false, patience);
    watched.steps_to("b").await;
    let late_at = |heard: &LastHeard| heard.late_at("nodes", patience.expected);
    watched.heard.expect("nodes", 6);
    watched.heard.expect("pods", 99);
    assert!(late_at(&watched.heard).is_none(), "6 is delivered");
    watched.heard.expect("nodes", 8);
    let steps = watched.steps_to("c").await;
    assert_eq!(steps, ["trouble", "recovered", "c"]);
    assert_eq!(watched.requests(), ["list", "5", "6"]);
    // A watch that is late again soon is not restarted, because the API server may only be slow.
    watched.heard.expect("nodes", 9);
    let more = timeout(3 * patience.expected, watched.steps.recv()).await;
    assert!(more.is_err(), "{more:?}");
}

#[tokio::test]
async fn a_missed_object_restarts_a_watch_unless_the_watch_delivers_something() {
    let patience = SilenceTimeouts {
        bookmark: LIMIT,
        ..SHORT_PATIENCE
    };
    let answers = vec![
        Answer::Text(list(&[], 5, "")),
        watch(&[]),
        watch(&[("ADDED", node("b", 6))]),
    ];
    let mut watched = start_with(answers, false, patience);
    watched.steps_to("to 5").await;
    watched.heard.miss("nodes");
    assert_eq!(watched.steps_to("b").await, ["trouble", "recovered", "b"]);
    assert_eq!(watched.requests(), ["list", "5", "5"]);
    let late_at = |heard: &LastHeard| heard.late_at("nodes", patience.expected);
    watched.heard.miss("nodes");
    assert!(late_at(&watched.heard).is_some());
    watched.heard.delivered("nodes", 7);
    assert!(late_at(&watched.heard).is_none());
}

#[tokio::test]
async fn a_bookmark_shows_that_the_watch_works_and_advances_its_version() {
    let answers = vec![
        Answer::Text(list(&[], 5, "")),
        watch(&[bookmark(7)]),
        watch(&[bookmark(8)]),
        watch(&[("ADDED", node("a", 9))]),
    ];
    let mut watched = start(answers, false);
    let steps = watched.steps_to("a").await;
    let steps: Vec<&String> = steps.iter().filter(|it| it.starts_with("to")).collect();
    assert_eq!(steps, ["to 5", "to 7", "to 8"]);
    assert_eq!(watched.requests()[..4], ["list", "5", "7", "8"]);
    let uri = watched.requests.lock().unwrap()[1].clone();
    assert!(uri.contains("allowWatchBookmarks=true"), "{uri}");
}

#[tokio::test]
async fn silence_of_a_server_that_may_have_been_restored_causes_a_relist() {
    let answers = vec![
        Answer::Text(list(&["a"], 5, "")),
        watch(&[]),
        Answer::Text(list(&["a"], 3, "")),
        Answer::Nothing,
        Answer::Text(list(&["b"], 4, "")),
    ];
    let mut watched = start(answers, true);
    watched.steps_to("b").await;
    assert_eq!(watched.requests()[..5], ["list", "5", "list", "3", "list"]);
}

#[tokio::test]
async fn an_expired_version_causes_a_relist() {
    let answers = vec![
        Answer::Text(list(&["a"], 5, "")),
        Answer::Code(410),
        Answer::Text(list(&["a"], 6, "")),
        watch(&[("ERROR", expired())]),
        Answer::Text(list(&["b"], 7, "")),
    ];
    let mut watched = start(answers, false);
    watched.steps_to("b").await;
    assert_eq!(watched.requests()[..5], ["list", "5", "list", "6", "list"]);
}

#[tokio::test]
async fn a_relist_after_an_expired_version_pauses_only_if_the_version_was_listed() {
    let answers = vec![
        Answer::Text(list(&["a"], 5, "")),
        watch(&[("ADDED", node("b", 6)), ("ERROR", expired())]),
        Answer::Text(list(&["a"], 7, "")),
        Answer::Code(410),
    ];
    let mut watched = start_pausing(answers, LIMIT);
    let steps = watched.steps_to("to 7").await;
    let last = ["a", "listed", "to 7"].map(str::to_owned);
    assert!(steps.ends_with(&last), "{steps:?}");
    watched.steps_to("trouble").await;
    let more = timeout(Duration::from_millis(200), watched.steps.recv()).await;
    assert!(more.is_err(), "{more:?}");
    assert_eq!(watched.requests(), ["list", "5", "list", "7"]);
}

#[tokio::test]
async fn only_404_says_that_there_is_no_such_kind_and_the_list_is_tried_again() {
    let all = Answer::Text(list(&["a"], 5, ""));
    let mut watched = start(vec![Answer::Code(403), Answer::Code(404), all], false);
    let steps = watched.steps_to("listed").await;
    let before = ["begins", "trouble", "begins", "absent", "trouble"];
    assert_eq!(steps[..5], before);
    assert_eq!(steps[5..], ["begins", "recovered", "a", "listed"]);
}

#[test]
fn pauses_grow_to_their_limit_and_differ_by_seed() {
    let (first, longest) = (Duration::from_millis(200), Duration::from_secs(20));
    let pauses = |seed| {
        Pauses::new(first, longest, seed)
            .take(12)
            .collect::<Vec<_>>()
    };
    let (one, other) = (pauses(3), pauses(5));
    assert!(one[0] <= Duration::from_millis(300));
    assert!(one.iter().all(|it| *it <= longest * 3 / 2));
    assert!(one[10] >= longest / 2 && one != other, "{one:?}");
}

#[tokio::test]
async fn objects_come_in_protobuf() {
    let patience = SilenceTimeouts {
        bookmark: LIMIT,
        ..SHORT_PATIENCE
    };
    let events = [
        framed_event("ADDED", "c", 6),
        framed("ADDED", b"unreadable".to_vec()),
        framed_event("DELETED", "a", 7),
        framed_event("BOOKMARK", "", 8),
        framed_error(410),
    ];
    let answers = vec![
        Answer::Protobuf(sealed_list(&["a"], 5, "more")),
        Answer::Protobuf(sealed_list(&["b"], 5, "")),
        Answer::ProtobufBegins(events.concat()),
        Answer::ProtobufCode(410),
        Answer::Protobuf(sealed_list(&["d"], 9, "")),
    ];
    let mut watched = start_with(answers, false, patience);
    let steps = watched.steps_to("to 8").await;
    let whole = [
        "begins",
        "a",
        "b",
        "listed",
        "to 5",
        "c",
        "trouble",
        "recovered",
        "-a",
        "to 8",
    ];
    assert_eq!(steps, whole);
    let steps = watched.steps_to("to 9").await;
    let whole = [
        "trouble",
        "begins",
        "trouble",
        "begins",
        "recovered",
        "d",
        "listed",
        "to 9",
    ];
    assert_eq!(steps, whole);
    assert_eq!(
        watched.requests()[..5],
        ["list", "next page", "5", "list", "list"]
    );
    let wanted = watched.wanted.lock().unwrap();
    assert!(
        wanted
            .iter()
            .all(|it| it.starts_with("application/vnd.kubernetes.protobuf"))
    );
}

#[tokio::test]
async fn a_server_without_protobuf_is_watched_in_json() {
    let answers = vec![
        Answer::Text(list(&["a"], 5, "")),
        watch(&[("ADDED", node("b", 6))]),
    ];
    let mut watched = start(answers, false);
    watched.steps_to("b").await;
    let wanted = watched.wanted.lock().unwrap();
    assert!(
        wanted[0].contains("application/json") && !wanted[1].contains("protobuf"),
        "{wanted:?}"
    );
}

#[tokio::test]
async fn a_server_that_no_longer_has_protobuf_is_listed_again() {
    let answers = vec![
        Answer::Protobuf(sealed_list(&["a"], 5, "")),
        watch(&[("ADDED", node("b", 6))]),
        Answer::Text(list(&["c"], 7, "")),
        watch(&[("ADDED", node("d", 8))]),
    ];
    let mut watched = start(answers, false);
    watched.steps_to("d").await;
    assert_eq!(watched.requests()[..4], ["list", "5", "list", "7"]);
}
