//! `kubectl cadastre map --web`: serves the map as a page for the user's browser.
//!
//! | path, after the token | content |
//! |---|---|
//! | nothing, `map.js`, `map.css` | the page: static files that load nothing from elsewhere |
//! | `view?PLACE` | a part of a pool; if the place asks for it, objects are listed again |
//! | `cell?SPOT` | the description of a cell |
//! | `find?TEXT` | a search for an address, a node, a pod or a pool |
//!
//! # Guarantees
//! - The server listens only on 127.0.0.1, answers only to loopback host names, and requires a token that is random at
//!   each start. So neither another site in the browser nor another user of the host can read the page.
//! - Nothing can be changed through the page. Objects are listed with the user's rights, one listing at a time.
//! - By its Content-Security-Policy the page can only load and run its own files.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::middleware::from_fn;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use super::about::Spot;
use super::find::find;
use super::page::view;
use super::place::Place;
use crate::ExitVerdict;
use crate::inventory::Inventory;
use crate::lists::WantedKinds;
use crate::reach::ApiReach;
use cadastre_daemon::telemetry::origin::by_our_name;
use cadastre_daemon::telemetry::serve::{Limits, serve};

const PAGE: &str = include_str!("page/index.html");
const SCRIPT: &str = include_str!("page/map.js");
const STYLE: &str = include_str!("page/map.css");
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Limits of the page's server. They suffice for one or two browsers. A refresh may take long, because it lists all
/// pods of the cluster.
const LIMITS: Limits = Limits {
    connections: 32,
    share: 32,
    head: Duration::from_secs(30),
    answer: Duration::from_secs(600),
    life: Duration::from_secs(600),
};

/// Serves the page until Ctrl-C, and prints its URL. If `pool` is given, the page opens with that pool.
pub(super) async fn exec(
    pool: Option<&str>,
    port: u16,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let page = Page::open(reach).await?;
    if let Some(pool) = pool {
        page.inventory.lock().await.pool(pool)?;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
    let listener = listener
        .with_context(|| format!("cannot listen on 127.0.0.1:{port}: choose another --port"))?;
    let token = token()?;
    let mut url = format!("http://{}/{token}/", listener.local_addr()?);
    if let Some(pool) = pool {
        let _ = write!(url, "#pool={pool}");
    }
    let mut out = std::io::stdout();
    writeln!(out, "{url}\nCtrl-C ends it.")?;
    out.flush()?;
    tokio::select! {
        never = serve(listener, routes(page, &token), LIMITS, None) => match never {},
        ended = tokio::signal::ctrl_c() => ended?,
    }
    Ok(ExitVerdict::Clean)
}

/// Returns 128 random bits in hexadecimal, the secret part of the URL.
fn token() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    let random = rustls::crypto::ring::default_provider().secure_random;
    let filled = random.fill(&mut bytes);
    filled.map_err(|_| anyhow!("the system has no random numbers"))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// The inventory that the page shows, and the client with which the objects are listed again.
struct Page {
    reach: ApiReach,
    inventory: Mutex<Arc<Inventory>>,
}

impl Page {
    async fn open(reach: &ApiReach) -> anyhow::Result<Arc<Self>> {
        let inventory = Arc::new(reach.inventory(WantedKinds::Pods).await?);
        Ok(Arc::new(Self {
            reach: reach.clone(),
            inventory: Mutex::new(inventory),
        }))
    }

    async fn inventory(&self, fresh: bool) -> anyhow::Result<Arc<Inventory>> {
        let mut inventory = self.inventory.lock().await;
        if fresh {
            *inventory = Arc::new(self.reach.inventory(WantedKinds::Pods).await?);
        }
        Ok(Arc::clone(&inventory))
    }
}

fn routes(page: Arc<Page>, token: &str) -> Router {
    let file = |kind, text: &'static str| get(async move || answer(StatusCode::OK, kind, text));
    let at = |name: &str| format!("/{token}/{name}");
    Router::new()
        .route(&at(""), file("text/html; charset=utf-8", PAGE))
        .route(
            &at("map.js"),
            file("text/javascript; charset=utf-8", SCRIPT),
        )
        .route(&at("map.css"), file("text/css; charset=utf-8", STYLE))
        .route(&at("view"), get(on_view))
        .route(&at("cell"), get(on_cell))
        .route(&at("find"), get(on_find))
        .with_state(page)
        .layer(from_fn(by_our_name))
}

/// Builds a response with the security headers that all responses have.
fn answer(code: StatusCode, kind: &'static str, text: impl Into<String>) -> Response {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
    ];
    (code, headers, text.into()).into_response()
}

fn json(found: anyhow::Result<impl Serialize>) -> Response {
    let text = found.and_then(|it| Ok(serde_json::to_string(&it)?));
    match text {
        Ok(text) => answer(StatusCode::OK, "application/json", text),
        Err(why) => {
            let text = serde_json::json!({ "error": format!("{why:#}") }).to_string();
            answer(StatusCode::BAD_REQUEST, "application/json", text)
        }
    }
}

async fn on_view(State(page): State<Arc<Page>>, RawQuery(query): RawQuery) -> Response {
    let work = async {
        let place: Place = read(query)?;
        view(&place, &*page.inventory(place.fresh).await?)
    };
    json(work.await)
}

async fn on_cell(State(page): State<Arc<Page>>, RawQuery(query): RawQuery) -> Response {
    let work = async {
        let spot: Spot = read(query)?;
        spot.about(&*page.inventory(false).await?)
    };
    json(work.await)
}

async fn on_find(State(page): State<Arc<Page>>, RawQuery(query): RawQuery) -> Response {
    let work = async {
        let text: String = read(query)?;
        Ok(find(&text, &*page.inventory(false).await?))
    };
    json(work.await)
}

/// Parses the query of a URL. The query is JSON, encoded as by `encodeURIComponent`.
fn read<T: DeserializeOwned>(query: Option<String>) -> anyhow::Result<T> {
    let query = query.unwrap_or_default();
    let text = form_urlencoded::parse(query.as_bytes()).next();
    let text = text.map_or_else(Default::default, |(text, _)| text);
    serde_json::from_str(&text).context("the query is not as the page asks")
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::header::{HOST, HeaderName};
    use axum::http::{HeaderMap, Method, Request};
    use serde_json::{Value, json};
    use tower::ServiceExt as _;

    use super::*;
    use crate::Flags;
    use crate::tests::{Cluster, assert_contains};

    const HERE: &str = "127.0.0.1:4711";

    /// Returns the server of the page for a small cluster, whose API server cannot be reached.
    fn page() -> Router {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let flags = Flags {
            request_timeout: 60,
            ..Flags::default()
        };
        let reach = ApiReach::of(nowhere, &flags).unwrap();
        let inventory = Mutex::new(Arc::new(Cluster::new().inventory()));
        routes(Arc::new(Page { reach, inventory }), "token")
    }

    async fn ask(
        page: &Router,
        method: Method,
        host: &str,
        path: &str,
    ) -> (StatusCode, HeaderMap, String) {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(HOST, host).body(Body::empty()).unwrap();
        let (head, body) = page.clone().oneshot(request).await.unwrap().into_parts();
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        (head.status, head.headers, text)
    }

    async fn json_of(page: &Router, what: &str, query: &Value) -> (StatusCode, Value) {
        let query: String = form_urlencoded::byte_serialize(query.to_string().as_bytes()).collect();
        let path = format!("/token/{what}?{query}");
        let (status, headers, text) = ask(page, Method::GET, HERE, &path).await;
        assert!(headers.contains_key(CONTENT_SECURITY_POLICY));
        (status, serde_json::from_str(&text).unwrap())
    }

    #[tokio::test]
    async fn only_get_requests_with_the_token_and_a_loopback_host_are_answered() {
        let page = page();
        let query = "%7B%7D";
        let view = format!("/token/view?{query}");
        let guess = view.replace("token", "guess");
        let elsewhere = "rebound.example:4711";
        for (method, host, path, expected) in [
            (Method::GET, HERE, &*view, StatusCode::OK),
            (Method::GET, "localhost:4711", "/token/", StatusCode::OK),
            (Method::GET, elsewhere, "/token/", StatusCode::FORBIDDEN),
            (Method::GET, elsewhere, &view, StatusCode::FORBIDDEN),
            (Method::GET, HERE, "/", StatusCode::NOT_FOUND),
            (Method::GET, HERE, &guess, StatusCode::NOT_FOUND),
            (Method::POST, HERE, &view, StatusCode::METHOD_NOT_ALLOWED),
            (Method::OPTIONS, HERE, &view, StatusCode::METHOD_NOT_ALLOWED),
        ] {
            let (status, headers, text) = ask(&page, method.clone(), host, path).await;
            assert_eq!(status, expected, "{method} {host} {path}: {text}");
            let is_cors = |it: &HeaderName| it.as_str().starts_with("access-control");
            assert!(!headers.keys().any(is_cors));
        }
        let (one, other) = (token().unwrap(), token().unwrap());
        assert!(one.len() == 32 && one != other, "{one}");
    }

    #[tokio::test]
    async fn the_page_may_load_nothing_from_elsewhere() {
        let page = page();
        for path in ["", "map.js", "map.css"] {
            let path = format!("/token/{path}");
            let (status, headers, text) = ask(&page, Method::GET, HERE, &path).await;
            assert_eq!(status, StatusCode::OK);
            let policy = headers[CONTENT_SECURITY_POLICY].to_str().unwrap();
            assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"));
            for elsewhere in ["http://", "https://", "style=\"", "onclick=\""] {
                assert!(!text.contains(elsewhere), "{path}: {elsewhere}");
            }
        }
    }

    #[tokio::test]
    async fn an_invalid_query_is_rejected_with_the_reason() {
        let page = page();
        let (status, view) = json_of(&page, "view", &json!({"pool": "p"})).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(view["picture"]["view"], "10.0.0.0/24");
        let spot = json!({"pool": "p", "view": "10.0.0.0/24", "cellSize": 28, "cell": 0});
        let (_, cell) = json_of(&page, "cell", &spot).await;
        assert_eq!(cell["cidr"], "10.0.0.0/28");
        let (_, found) = json_of(&page, "find", &json!("cart & more + more")).await;
        assert_eq!(found, json!([]));
        for (what, query, says) in [
            ("view", json!({"pool": "x"}), "there are p"),
            ("view", json!({"view": "10.0.0.1/24"}), "10.0.0.0/24"),
            ("cell", json!({"pool": "p"}), "view"),
            ("find", json!(7), "as the page asks"),
        ] {
            let (status, body) = json_of(&page, what, &query).await;
            assert_eq!(status, StatusCode::BAD_REQUEST);
            assert_contains(body["error"].as_str().unwrap(), &[says]);
        }
    }

    #[tokio::test]
    async fn the_page_keeps_its_inventory_if_a_list_fails() {
        let page = page();
        let (_, body) = json_of(&page, "view", &json!({"fresh": true})).await;
        assert_contains(body["error"].as_str().unwrap(), &["was not reached"]);
        let (status, _) = json_of(&page, "view", &json!({})).await;
        assert_eq!(status, StatusCode::OK);
    }
}
