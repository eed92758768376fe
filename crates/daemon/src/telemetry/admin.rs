//! The admin port (metrics, health, readiness, log level), and a second port for probes only.
//!
//! No page contains secrets. The only setting that can be changed is the log level. It can be changed only from this
//! host, and not by web pages in a browser. Access to metrics can be restricted. Probes are always allowed. Probes have
//! a second port, so that other clients cannot keep probes waiting.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::{get, put};
use prometheus::{Registry, TextEncoder};
use tokio::net::TcpListener;

use super::Readiness;
use super::logs::Level;
use super::origin::{ANOTHER_NAME, is_for_here, is_here, is_of_a_page};
use super::review::{AccessReview, guard};
use super::serve::{Limits, serve};
use super::tls::TlsFiles;

/// The sources of the admin port's pages.
#[derive(Clone)]
pub struct AdminPages {
    /// The registry whose metrics `/metrics` returns
    pub registry: Registry,
    /// The state that `/readyz` reports
    pub readiness: Readiness,
    /// The level that `/loglevel` sets; `None` in tests
    pub level: Option<Level>,
    /// Decides who may read metrics; if absent, everybody may read them
    pub review: Option<AccessReview>,
}

/// Serves the admin port forever, in plain HTTP or with TLS.
pub async fn run(listener: TcpListener, admin: AdminPages, tls: Option<TlsFiles>) -> Infallible {
    serve(listener, routes(admin), Limits::ADMIN, tls).await
}

/// Serves the port for probes forever, in plain HTTP.
pub async fn run_probes(listener: TcpListener, readiness: Readiness) -> Infallible {
    serve(listener, probes(readiness), Limits::PROBES, None).await
}

fn probes(readiness: Readiness) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .with_state(readiness)
}

fn routes(admin: AdminPages) -> Router {
    let mut metrics = Router::new()
        .route("/metrics", get(on_metrics))
        .with_state(admin.clone());
    if let Some(review) = admin.review.clone() {
        metrics = metrics.route_layer(from_fn_with_state(review, guard));
    }
    Router::new()
        .route("/loglevel", put(loglevel))
        .layer(DefaultBodyLimit::max(1024))
        .with_state(admin.clone())
        .merge(probes(admin.readiness))
        .merge(metrics)
}

async fn on_metrics(State(admin): State<AdminPages>) -> impl IntoResponse {
    match TextEncoder::new().encode_to_string(&admin.registry.gather()) {
        Ok(text) => {
            let format = [(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)];
            (format, text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn readyz(State(readiness): State<Readiness>) -> impl IntoResponse {
    match readiness.page() {
        (true, text) => (StatusCode::OK, text),
        (false, text) => (StatusCode::SERVICE_UNAVAILABLE, text),
    }
}

async fn loglevel(
    State(admin): State<AdminPages>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: String,
) -> (StatusCode, String) {
    let refusal = if !is_here(peer) {
        Some("the log level is set from the machine itself, or by kubectl port-forward\n")
    } else if is_of_a_page(&headers) {
        Some("the log level is set by no page in a browser: take curl\n")
    } else if !is_for_here(&headers) {
        Some(ANOTHER_NAME)
    } else {
        None
    };
    if let Some(why) = refusal {
        return (StatusCode::FORBIDDEN, why.to_owned());
    }
    let Some(level) = &admin.level else {
        return (StatusCode::NOT_FOUND, "no logs are kept\n".into());
    };
    match level.set(&body) {
        Ok(()) => {
            tracing::info!(level = body.trim(), "log level changed");
            (StatusCode::OK, "ok\n".into())
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tower::ServiceExt as _;

    use super::*;

    /// Sends a request with this method and path, and returns the whole response.
    async fn ask_with(address: SocketAddr, request: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let length = body.len();
        let text = format!(
            "{request} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn ask(address: SocketAddr, request: &str) -> String {
        ask_with(address, request, "").await
    }

    async fn started(level: Option<Level>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let admin = pages(level);
        super::super::build_info(&admin.registry).unwrap();
        tokio::spawn(run(listener, admin, None));
        address
    }

    #[tokio::test]
    async fn the_log_level_is_set_or_the_answer_says_how() {
        let (level, _kept) = Level::detached();
        let address = started(Some(level)).await;
        for (level, code, part) in [
            ("info,cadastre_controller=debug\n", 200, ""),
            ("loud", 400, "module=level"),
            (&"debug,".repeat(500), 413, ""),
        ] {
            let answer = ask_with(address, "PUT /loglevel", level).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{answer}");
            assert!(answer.contains(part), "{answer}");
        }
    }

    fn pages(level: Option<Level>) -> AdminPages {
        AdminPages {
            registry: Registry::new(),
            readiness: Readiness::default(),
            level,
            review: None,
        }
    }

    async fn status(admin: &AdminPages, request: http::request::Builder, peer: &str) -> StatusCode {
        let peer: SocketAddr = peer.parse().unwrap();
        let request = request.extension(ConnectInfo(peer));
        let request = request.body(Body::from("info")).unwrap();
        let answer = routes(admin.clone()).oneshot(request).await.unwrap();
        answer.status()
    }

    #[tokio::test]
    async fn only_requests_from_this_host_set_the_log_level() {
        let (level, _kept) = Level::detached();
        let admin = pages(Some(level));
        for (peer, host, expected) in [
            ("10.0.0.9:1", "10.0.0.1:9817", StatusCode::FORBIDDEN),
            ("10.0.0.9:1", "127.0.0.1:9817", StatusCode::FORBIDDEN),
            ("[::ffff:127.0.0.1]:1", "127.0.0.1:9817", StatusCode::OK),
            ("[::1]:1", "[::1]:9817", StatusCode::OK),
            ("127.0.0.1:1", "localhost:9817", StatusCode::OK),
            ("127.0.0.1:1", "rebound.example:9817", StatusCode::FORBIDDEN),
        ] {
            let request = http::Request::put("/loglevel").header(header::HOST, host);
            let is = status(&admin, request, peer).await;
            assert_eq!(is, expected, "{peer} {host}");
        }
    }

    #[tokio::test]
    async fn a_page_in_a_browser_changes_nothing() {
        let (level, _kept) = Level::detached();
        let admin = pages(Some(level));
        for (name, value) in [
            ("origin", "http://127.0.0.1:9817"),
            ("origin", "null"),
            ("sec-fetch-site", "same-origin"),
            ("sec-fetch-site", "none"),
        ] {
            let request = http::Request::put("/loglevel").header(header::HOST, "127.0.0.1:9817");
            let request = request.header(name, value);
            let is = status(&admin, request, "127.0.0.1:1").await;
            assert_eq!(is, StatusCode::FORBIDDEN, "{name}: {value}");
        }
    }

    #[tokio::test]
    async fn probes_are_answered_while_other_clients_keep_a_port_busy() {
        let mut open = Vec::new();
        let probes = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = probes.local_addr().unwrap();
        tokio::spawn(run_probes(probes, Readiness::default()));
        for port in [started(None).await, at] {
            for _ in 0..400 {
                let mut stream = TcpStream::connect(port).await.unwrap();
                let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\n").await;
                open.push(stream);
            }
            assert!(ask(at, "GET /healthz").await.ends_with("ok\n"));
            assert!(ask(port, "GET /healthz").await.ends_with("ok\n"));
            let ready = ask(at, "GET /readyz").await;
            assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
        }
        let none = ask(at, "GET /metrics").await;
        assert!(none.starts_with("HTTP/1.1 404"), "{none}");
    }

    #[tokio::test]
    async fn the_pages_answer_on_a_real_port() {
        let address = started(None).await;
        assert!(ask(address, "GET /healthz").await.ends_with("ok\n"));
        let ready = ask(address, "GET /readyz").await;
        assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
        assert!(ready.ends_with("starting\n"), "{ready}");
        let metrics = ask(address, "GET /metrics").await;
        assert!(metrics.contains("cadastre_build_info"), "{metrics}");
        let level = ask(address, "PUT /loglevel").await;
        assert!(level.starts_with("HTTP/1.1 404"), "{level}");
    }
}
