//! Handles the connections of a port. Each connection is limited in time and memory.
//!
//! The admin port can be reached from the whole cluster network. A client that sends nothing, sends or reads slowly, or
//! opens many connections costs only a bounded amount of memory for a bounded time. Such a client cannot lock out other
//! clients ([`OpenConnections`]).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::http::StatusCode;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower_http::timeout::TimeoutLayer;

use super::connections::OpenConnections;
use super::tls::TlsFiles;

/// The pause after an error of `accept`, for example because there are no free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Limits for the clients of a port.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of concurrent connections
    pub connections: usize,
    /// Maximum number of concurrent connections from one peer
    pub share: usize,
    /// Maximum time from the start of the connection, or from the previous answer, until the head of a request has
    /// arrived. It also limits the TLS handshake
    pub head: Duration,
    /// Maximum time from the head of a request until its answer begins. This time includes the arrival of the request's
    /// body
    pub answer: Duration,
    /// Maximum age of a connection. A request in progress may take up to [`Limits::head`] longer
    pub life: Duration,
}

impl Limits {
    /// The limits of the admin port. The limits leave time for requests that wait for the API server, and for large
    /// answers over a slow network.
    pub(super) const ADMIN: Self = Self {
        connections: 128,
        share: 16,
        head: Duration::from_secs(5),
        answer: Duration::from_secs(15),
        life: Duration::from_secs(60),
    };

    /// The limits of the port for probes. The limits can be tight, because all requests come from this host, and each
    /// answer is one line.
    pub(super) const PROBES: Self = Self {
        connections: 64,
        share: 64,
        head: Duration::from_secs(2),
        answer: Duration::from_secs(2),
        life: Duration::from_secs(5),
    };
}

/// Accepts and handles connections forever. Handlers get the peer's address as [`ConnectInfo`].
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    limits: Limits,
    mut tls: Option<TlsFiles>,
) -> Infallible {
    let late = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, limits.answer);
    let routes = routes.layer(late);
    let mut open = OpenConnections::new(limits.connections, limits.share);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let acceptor = tls.as_mut().map(|tls| TlsAcceptor::from(tls.config()));
                let task = tokio::spawn(receive(stream, peer, routes.clone(), limits, acceptor));
                open.admit(peer.ip(), task.abort_handle());
            }
            Err(error) => {
                tracing::warn!(address = ?listener.local_addr(), "cannot take a connection: {error}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Handles one connection, with TLS if `acceptor` is set.
async fn receive(
    stream: TcpStream,
    peer: SocketAddr,
    routes: Router,
    limits: Limits,
    acceptor: Option<TlsAcceptor>,
) {
    let routes = routes.layer(Extension(ConnectInfo(peer)));
    let Some(acceptor) = acceptor else {
        return answer_requests(stream, routes, limits).await;
    };
    if let Ok(Ok(stream)) = timeout(limits.head, acceptor.accept(stream)).await {
        answer_requests(stream, routes, limits).await;
    }
}

/// Answers the requests of one connection. Errors of the connection are ignored, because they affect only the client of
/// this connection.
async fn answer_requests<S>(stream: S, routes: Router, limits: Limits)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    tokio::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => {}
        () = sleep(limits.life) => {
            connection.as_mut().graceful_shutdown();
            let _ = timeout(limits.head, connection).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::routing::{get, put};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpSocket;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(50);
    const NONE: Limits = Limits {
        connections: 8,
        share: 8,
        head: LONG,
        answer: LONG,
        life: LONG,
    };
    const SHORT_HEAD: Limits = Limits {
        head: SHORT,
        ..NONE
    };
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    async fn served(limits: Limits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let endless = || futures::stream::repeat(Ok::<_, Infallible>(vec![0; 65_536]));
        let routes = Router::new()
            .route("/", get(async || "here"))
            .route("/body", put(async |body: String| body))
            .route("/endless", get(async move || Body::from_stream(endless())));
        tokio::spawn(serve(listener, routes, limits, None));
        address
    }

    /// Connects to a server with these limits.
    async fn connect(limits: Limits) -> TcpStream {
        TcpStream::connect(served(limits).await).await.unwrap()
    }

    async fn connect_as(peer: &str, to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{peer}:0").parse().unwrap()).unwrap();
        socket.connect(to).await.unwrap()
    }

    /// Reads until the server closes the connection, however long it takes.
    async fn read_to_close(stream: &mut TcpStream) -> String {
        let mut bytes = Vec::new();
        // If the server aborts the connection, reading can end with an error.
        let _ = stream.read_to_end(&mut bytes).await;
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sends a request on a connection that stays open, and returns the answer.
    async fn answer(stream: &mut TcpStream) -> String {
        stream.write_all(REQUEST).await.unwrap();
        let mut text = String::new();
        while !text.ends_with("here") {
            let mut bytes = [0; 512];
            let count = stream.read(&mut bytes).await.unwrap();
            assert_ne!(count, 0, "cut off after {text:?}");
            text += std::str::from_utf8(&bytes[..count]).unwrap();
        }
        text
    }

    #[tokio::test]
    async fn a_connection_with_an_incomplete_head_is_closed() {
        for sent in [&b"GET / HTTP/1.1\r\nhost: x\r\n"[..], b""] {
            let mut stream = connect(SHORT_HEAD).await;
            stream.write_all(sent).await.unwrap();
            assert!(!read_to_close(&mut stream).await.contains("here"));
        }
    }

    #[tokio::test]
    async fn an_idle_connection_is_closed() {
        let mut stream = connect(SHORT_HEAD).await;
        answer(&mut stream).await;
        assert_eq!(read_to_close(&mut stream).await, "");
    }

    #[tokio::test]
    async fn a_request_with_an_incomplete_body_is_rejected() {
        let limits = Limits {
            answer: SHORT,
            ..NONE
        };
        let mut stream = connect(limits).await;
        let part = b"PUT /body HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nin";
        stream.write_all(part).await.unwrap();
        let said = read_to_close(&mut stream).await;
        assert!(said.starts_with("HTTP/1.1 408"), "{said}");
    }

    #[tokio::test]
    async fn a_busy_connection_is_closed_too() {
        let limits = Limits {
            life: SHORT,
            ..SHORT_HEAD
        };
        // The first connection sends one request after the other. The second connection does not read its answer.
        let mut stream = connect(limits).await;
        while stream.write_all(REQUEST).await.is_ok()
            && stream.read(&mut [0; 4096]).await.is_ok_and(|it| it > 0)
        {}
        let mut stream = connect(limits).await;
        let endless = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n";
        stream.write_all(endless).await.unwrap();
        read_to_close(&mut stream).await;
    }

    /// No time limit is reached in this test. So only [`OpenConnections`] closes connections.
    #[tokio::test]
    async fn hundreds_of_slow_connections_of_one_peer_lock_nobody_out() {
        let limits = Limits {
            connections: 64,
            share: 16,
            ..NONE
        };
        let to = served(limits).await;
        let mut before = connect_as("127.0.0.3", to).await;
        answer(&mut before).await;
        let mut slow = Vec::new();
        for _ in 0..400 {
            let mut stream = connect_as("127.0.0.2", to).await;
            let _ = stream.write_all(b"GET / HTTP/1.1\r\n").await;
            slow.push(stream);
        }
        for peer in ["127.0.0.2", "127.0.0.4"] {
            answer(&mut connect_as(peer, to).await).await;
        }
        answer(&mut before).await;
        // All connections of the slow peer beyond its share are closed.
        for stream in &mut slow[..384] {
            assert_eq!(read_to_close(stream).await, "");
        }
    }

    #[tokio::test]
    async fn slow_connections_of_many_peers_lock_nobody_out() {
        let limits = Limits {
            connections: 16,
            share: 8,
            ..NONE
        };
        let to = served(limits).await;
        let mut slow = Vec::new();
        for round in 0..400 {
            slow.push(connect_as(&format!("127.0.1.{}", round % 50), to).await);
        }
        answer(&mut connect_as("127.0.0.4", to).await).await;
    }
}
