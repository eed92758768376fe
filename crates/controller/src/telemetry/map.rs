//! `/map`: the address space as a picture, for people.
//!
//! | path | what |
//! |---|---|
//! | `/map`, `/map/map.js`, `/map/map.css` | the page: plain files, nothing from anywhere else |
//! | `/map.json` | all pools in short |
//! | `/map.json?pool=NAME` | who holds what of a pool |
//! | `/map.json?range=CIDR` | who has which address of a range |
//! | `/map.json?find=TEXT` | where an address, a node, a pod or a pool is |
//!
//! # Guarantees
//! - Nothing is done or kept while nobody asks. A question goes through a channel to the loop that owns
//!   the state, which gives a tenth of its time at most; what does not fit is refused at once with 503.
//! - At most [`AT_ONCE`] answers are in memory, and each is sent in pieces.
//! - From this machine it is shown under a name of loopback only.
//! - The page may load and do nothing that is not in these files, by its Content-Security-Policy.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, RETRY_AFTER,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderName, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::stream;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::map::{Answer, Ask, Row, Sheet};
use cadastre_core::Cidr;

/// Answers that may be in memory at a time.
pub const AT_ONCE: usize = 4;
/// How long a question may wait for its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Rows that are sent together.
const ROWS: usize = 512;
/// The longest text that is searched for.
const MOST_TEXT: usize = 320;

const PAGE: &str = include_str!("map/index.html");
const SCRIPT: &str = include_str!("map/map.js");
const STYLE: &str = include_str!("map/map.css");
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A question on its way to the loop.
#[derive(Debug)]
pub struct Question {
    /// What is asked
    pub ask: Ask,
    /// Where the answer goes
    pub answer: oneshot::Sender<Answer>,
}

/// The page's end of the channel.
#[derive(Clone, Debug)]
pub struct Map {
    questions: mpsc::Sender<Question>,
    slots: Arc<Semaphore>,
}

/// Both ends: for the page, and for the loop that answers.
pub fn channel() -> (Map, mpsc::Receiver<Question>) {
    let (questions, asked) = mpsc::channel(AT_ONCE);
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    (Map { questions, slots }, asked)
}

/// Its pages.
pub fn routes(map: Map) -> Router {
    let file = |kind, text: &'static str| get(async move || fixed(kind, text));
    Router::new()
        .route("/map", file("text/html; charset=utf-8", PAGE))
        .route(
            "/map/map.js",
            file("text/javascript; charset=utf-8", SCRIPT),
        )
        .route("/map/map.css", file("text/css; charset=utf-8", STYLE))
        .route("/map.json", get(json))
        .with_state(map)
}

fn fixed(kind: &'static str, text: &'static str) -> Response {
    (safe(kind), text).into_response()
}

/// What every answer says to the browser.
fn safe(kind: &'static str) -> [(HeaderName, &'static str); 5] {
    [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
    ]
}

async fn json(State(map): State<Map>, uri: Uri) -> Response {
    let ask = match read(uri.query().unwrap_or_default()) {
        Ok(ask) => ask,
        Err(why) => return error(StatusCode::BAD_REQUEST, &why),
    };
    let Ok(slot) = Arc::clone(&map.slots).try_acquire_owned() else {
        return busy();
    };
    let (answer, answered) = oneshot::channel();
    if map.questions.try_send(Question { ask, answer }).is_err() {
        return busy();
    }
    match tokio::time::timeout(PATIENCE, answered).await {
        Ok(Ok(answer)) => respond(answer, slot),
        _ => busy(),
    }
}

/// One parameter, or none.
fn read(query: &str) -> Result<Ask, String> {
    if query.is_empty() {
        return Ok(Ask::Pools);
    }
    let (key, value) = query.split_once('=').unwrap_or((query, ""));
    let text = decoded(value)
        .filter(|text| text.len() <= MOST_TEXT)
        .ok_or("the value is too long or badly encoded")?;
    match key {
        "pool" => Ok(Ask::Pool(text)),
        "find" => Ok(Ask::Find(text)),
        "range" => Cidr::parse_strict(&text)
            .map(Ask::Range)
            .map_err(|error| error.to_string()),
        _ => Err("ask with one of pool=NAME, range=CIDR, find=TEXT, or nothing".to_owned()),
    }
}

/// As `encodeURIComponent` encodes.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || (rest.next()? as char).to_digit(16);
            let value = digit()? * 16 + digit()?;
            bytes.push(u8::try_from(value).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

fn busy() -> Response {
    let text = "others are asking at the moment, or the controller is busy: ask again in a second";
    let mut response = error(StatusCode::SERVICE_UNAVAILABLE, text);
    let headers = response.headers_mut();
    headers.insert(RETRY_AFTER, http::HeaderValue::from_static("1"));
    response
}

fn error(code: StatusCode, text: &str) -> Response {
    let body = serde_json::json!({ "error": text }).to_string();
    (code, safe(JSON), body).into_response()
}

const JSON: &str = "application/json";

fn respond(answer: Answer, slot: OwnedSemaphorePermit) -> Response {
    match answer {
        Answer::Pools(overview) => whole(&overview),
        Answer::Range(detail) => whole(&detail),
        Answer::Find(found) => whole(&found),
        Answer::Pool(sheet) => in_pieces(sheet, slot),
        Answer::Nothing(why) => error(StatusCode::NOT_FOUND, &why),
    }
}

fn whole(value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => (safe(JSON), text).into_response(),
        Err(why) => error(StatusCode::INTERNAL_SERVER_ERROR, &why.to_string()),
    }
}

/// The slot is given back when the last piece was taken, or the client has gone.
fn in_pieces(sheet: Sheet, slot: OwnedSemaphorePermit) -> Response {
    let Sheet {
        head,
        owners,
        reserved,
        cut,
        rows,
    } = sheet;
    let head = serde_json::json!({
        "pool": head, "owners": owners, "reserved": reserved, "cut": cut,
    });
    // The object is left open for the rows.
    let mut head = head.to_string();
    head.pop();
    head.push_str(",\"rows\":[");
    let pieces = stream::unfold((Some(head), rows, 0, slot), async |state| {
        let (mut head, rows, from, slot) = state;
        if let Some(head) = head.take() {
            return Some((Ok(Bytes::from(head)), (None, rows, from, slot)));
        }
        if from > rows.len() {
            return None;
        }
        let to = (from + ROWS).min(rows.len());
        let mut text = written(&rows[from..to], from > 0);
        let mut next = to;
        if to == rows.len() {
            text.as_mut().map(|text| text.push_str("]}")).ok();
            next = to + 1;
        }
        Some((text.map(Bytes::from), (None, rows, next, slot)))
    });
    (safe(JSON), Body::from_stream(pieces)).into_response()
}

fn written(rows: &[Row], go_on: bool) -> Result<String, serde_json::Error> {
    let mut text = String::new();
    for (at, row) in rows.iter().enumerate() {
        if go_on || at > 0 {
            text.push(',');
        }
        text.push_str(&serde_json::to_string(row)?);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use axum::http::Request;
    use serde_json::Value;
    use tower::ServiceExt as _;

    use super::*;
    use crate::map::{Head, Kind};
    use cadastre_api::Allocate;

    async fn get(map: &Map, path: &str) -> (StatusCode, http::HeaderMap, String) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = routes(map.clone()).oneshot(request).await.unwrap();
        let (head, body) = response.into_parts();
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        (head.status, head.headers, text)
    }

    fn sheet(count: u32) -> Sheet {
        let cidr = |i: u32| {
            let text = format!("{}/26", std::net::Ipv4Addr::from(0x0A00_0000 + (i << 6)));
            Cidr::parse_strict(&text).unwrap()
        };
        Sheet {
            head: Head {
                name: "a".to_owned(),
                allocate: Allocate::Blocks,
                sides: Vec::new(),
                nodes: None,
                waiting: None,
                complaints: Vec::new(),
            },
            owners: vec!["n1".to_owned()],
            reserved: Vec::new(),
            cut: false,
            rows: (0..count)
                .map(|i| Row(cidr(i), 0, Kind::Block, 1, 0, Some(60)))
                .collect(),
        }
    }

    /// A loop that answers with pools of so many rows.
    fn answering(mut asked: mpsc::Receiver<Question>, count: u32) {
        tokio::spawn(async move {
            while let Some(question) = asked.recv().await {
                let answer = match question.ask {
                    Ask::Pool(_) => Answer::Pool(sheet(count)),
                    ask => Answer::Nothing(format!("{ask:?}")),
                };
                question.answer.send(answer).unwrap();
            }
        });
    }

    #[tokio::test]
    async fn a_pool_is_whole_json_however_many_pieces_it_is_sent_in() {
        let rows = u32::try_from(ROWS).unwrap();
        for count in [0, 1, rows - 1, rows, rows + 1, 3 * rows + 7] {
            let (map, asked) = channel();
            answering(asked, count);
            let (status, _, text) = get(&map, "/map.json?pool=a").await;
            assert_eq!(status, StatusCode::OK);
            let body: Value = serde_json::from_str(&text).unwrap();
            let all = body["rows"].as_array().unwrap();
            assert_eq!(all.len(), count as usize);
            assert!(count == 0 || all[0][0] == "10.0.0.0/26");
            assert_eq!(map.slots.available_permits(), AT_ONCE, "given back");
        }
    }

    #[tokio::test]
    async fn what_does_not_fit_is_refused_at_once() {
        // Nobody answers, and everybody waits.
        let (map, asked) = channel();
        let waiting: Vec<_> = (0..AT_ONCE)
            .map(|_| Arc::clone(&map.slots).try_acquire_owned().unwrap())
            .collect();
        let (status, headers, text) = get(&map, "/map.json").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(headers.contains_key(RETRY_AFTER) && text.contains("again"));
        drop((waiting, asked));
        let (status, ..) = get(&map, "/map.json").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "the loop is gone");
        assert_eq!(map.slots.available_permits(), AT_ONCE);
    }

    #[tokio::test]
    async fn the_page_may_load_nothing_from_elsewhere() {
        let (map, _asked) = channel();
        for path in ["/map", "/map/map.js", "/map/map.css"] {
            let (status, headers, text) = get(&map, path).await;
            assert_eq!(status, StatusCode::OK);
            let policy = headers[CONTENT_SECURITY_POLICY].to_str().unwrap();
            assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"));
            assert!(
                !text.contains("http://") && !text.contains("https://"),
                "{path}"
            );
            assert!(
                !text.contains("style=\"") && !text.contains("onclick=\""),
                "{path}"
            );
        }
    }

    #[test]
    fn a_question_is_read_or_refused_with_what_can_be_asked() {
        assert_eq!(read(""), Ok(Ask::Pools));
        assert_eq!(read("pool=a%2Db"), Ok(Ask::Pool("a-b".to_owned())));
        assert_eq!(
            read("find=ns%2Fweb%20"),
            Ok(Ask::Find("ns/web ".to_owned()))
        );
        let range = Cidr::parse_strict("fd00::/64").unwrap();
        assert_eq!(read("range=fd00%3A%3A%2F64"), Ok(Ask::Range(range)));
        assert!(
            read("range=10.0.0.1/24")
                .unwrap_err()
                .contains("10.0.0.0/24")
        );
        assert!(read("what=1").unwrap_err().contains("range=CIDR"));
        for bad in ["find=%", "find=%4", "find=%zz", "find=%ff", "find=%C3%28"] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(read(&format!("find={}", "a".repeat(MOST_TEXT + 1))).is_err());
    }
}
