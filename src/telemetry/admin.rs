//! The admin port: metrics, health, readiness, log level.
//!
//! Nothing secret is served. The one thing that can be changed, the log level, is taken from this
//! machine only. Metrics and the map can be kept for those who may read them; probes never are.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::{get, put};
use prometheus::{Registry, TextEncoder};
use tokio::net::TcpListener;

use super::Readiness;
use super::logs::Level;
use super::map::Map;
use super::review::{Gate, Review, guard};
use super::serve::{Limits, serve};
use super::tls::Tls;

/// What the pages tell.
#[derive(Clone)]
pub struct Admin {
    /// For `/metrics`
    pub registry: Registry,
    /// For `/readyz`
    pub readiness: Readiness,
    /// For `/loglevel`; absent in tests
    pub level: Option<Level>,
    /// For `/map`, where it is wanted
    pub map: Option<Map>,
    /// Who may read metrics and map; without it everybody
    pub review: Option<Review>,
}

/// Serves for ever, in plain HTTP or behind TLS.
pub async fn run(listener: TcpListener, admin: Admin, tls: Option<Tls>) -> Infallible {
    serve(listener, routes(admin), Limits::default(), tls).await
}

fn routes(admin: Admin) -> Router {
    let guarded = |pages: Router, free_from_here| match admin.review.clone() {
        Some(review) => {
            let gate = Gate {
                review,
                free_from_here,
            };
            pages.route_layer(from_fn_with_state(gate, guard))
        }
        None => pages,
    };
    let map = admin.map.clone().map(super::map::routes);
    let map = map.map(|map| guarded(map, true));
    let figures = Router::new().route("/metrics", get(metrics));
    let figures = guarded(figures.with_state(admin.clone()), false);
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/loglevel", put(loglevel))
        .layer(DefaultBodyLimit::max(1024))
        .with_state(admin)
        .merge(figures)
        .merge(map.unwrap_or_default())
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    match TextEncoder::new().encode_to_string(&admin.registry.gather()) {
        Ok(text) => (
            StatusCode::OK,
            [(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)],
            text,
        )
            .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn readyz(State(admin): State<Admin>) -> impl IntoResponse {
    let (ready, text) = admin.readiness.page();
    (
        if ready {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        },
        text,
    )
}

async fn loglevel(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    body: String,
) -> (StatusCode, String) {
    if !peer.ip().to_canonical().is_loopback() {
        return (
            StatusCode::FORBIDDEN,
            "the log level is set from the machine itself: kubectl exec or port-forward\n".into(),
        );
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let head = format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn started(level: Option<Level>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let registry = Registry::new();
        super::super::build_info(&registry).unwrap();
        let admin = Admin {
            registry,
            readiness: Readiness::default(),
            level,
            map: None,
            review: None,
        };
        tokio::spawn(run(listener, admin, None));
        address
    }

    async fn put(address: SocketAddr, body: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let length = body.len();
        let head = format!(
            "PUT /loglevel HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn the_log_level_is_set_or_the_answer_says_how() {
        let (level, _kept) = Level::detached();
        let address = started(Some(level)).await;
        let good = put(address, "info,cadastre::controller=debug\n").await;
        assert!(good.starts_with("HTTP/1.1 200"), "{good}");
        let bad = put(address, "loud").await;
        assert!(
            bad.starts_with("HTTP/1.1 400") && bad.contains("module=level"),
            "{bad}"
        );
        let long = put(address, &"debug,".repeat(500)).await;
        assert!(long.starts_with("HTTP/1.1 413"), "{long}");
    }

    #[tokio::test]
    async fn the_log_level_is_taken_from_this_machine_only() {
        let (level, _kept) = Level::detached();
        let admin = Admin {
            registry: Registry::new(),
            readiness: Readiness::default(),
            level: Some(level),
            map: None,
            review: None,
        };
        for (peer, expected) in [
            ("10.0.0.9:1", StatusCode::FORBIDDEN),
            ("[::ffff:127.0.0.1]:1", StatusCode::OK),
            ("[::1]:1", StatusCode::OK),
        ] {
            let peer = ConnectInfo(peer.parse().unwrap());
            let (code, _) = loglevel(State(admin.clone()), peer, "info".into()).await;
            assert_eq!(code, expected, "{peer:?}");
        }
    }

    #[tokio::test]
    async fn the_pages_answer_on_a_real_port() {
        let address = started(None).await;
        assert!(ask(address, "GET /healthz").await.ends_with("ok\n"));
        let ready = ask(address, "GET /readyz").await;
        assert!(
            ready.starts_with("HTTP/1.1 503") && ready.ends_with("starting\n"),
            "{ready}"
        );
        assert!(
            ask(address, "GET /metrics")
                .await
                .contains("cadastre_build_info")
        );
        assert!(
            ask(address, "PUT /loglevel")
                .await
                .starts_with("HTTP/1.1 404")
        );
    }
}
