//! Connections of the admin port, none of which may last or grow without end.
//!
//! The port is reachable from the whole cluster network. A client that sends nothing, sends slowly or
//! opens many connections costs a bounded amount of memory for a bounded time.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::tls::Tls;

/// Pause after a connection could not be taken, as when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// How much a client may ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Connections at a time; more wait
    pub connections: usize,
    /// From the first byte of a request to the end of its head; for a handshake of TLS
    pub head: Duration,
    /// Of a connection; what is under way then may take as long again as [`Limits::head`]
    pub life: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 256,
            head: Duration::from_secs(10),
            life: Duration::from_secs(60),
        }
    }
}

/// Serves for ever. The peer's address is in each request as [`ConnectInfo`].
pub(super) async fn serve(
    listener: TcpListener,
    routes: Router,
    limits: Limits,
    tls: Option<Tls>,
) -> Infallible {
    let slots = Arc::new(Semaphore::new(limits.connections));
    loop {
        let slot = Arc::clone(&slots).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, peer)) => {
                let routes = routes.clone();
                let acceptor = tls.as_ref().map(|tls| TlsAcceptor::from(tls.config()));
                tokio::spawn(async move {
                    match acceptor {
                        None => converse(stream, peer, routes, limits).await,
                        Some(acceptor) => {
                            let shaken = timeout(limits.head, acceptor.accept(stream)).await;
                            if let Ok(Ok(stream)) = shaken {
                                converse(stream, peer, routes, limits).await;
                            }
                        }
                    }
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!("the admin port cannot take a connection: {error}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers the requests of one connection. Its errors are the client's business.
async fn converse<S>(stream: S, peer: SocketAddr, routes: Router, limits: Limits)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = TowerToHyperService::new(routes.layer(Extension(ConnectInfo(peer))));
    let conversation = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(conversation);
    tokio::select! {
        _ = conversation.as_mut() => {}
        () = sleep(limits.life) => {
            conversation.as_mut().graceful_shutdown();
            let _ = timeout(limits.head, conversation).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(50);

    async fn connect(limits: Limits) -> (SocketAddr, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/", get(async || "here"));
        tokio::spawn(serve(listener, routes, limits, None));
        (address, TcpStream::connect(address).await.unwrap())
    }

    /// What still comes until the server closes; it waits as long as that takes.
    async fn rest(stream: &mut TcpStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn a_head_that_does_not_end_ends_the_connection() {
        let limits = Limits {
            connections: 1,
            head: SHORT,
            life: LONG,
        };
        let (_, mut stream) = connect(limits).await;
        stream
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n")
            .await
            .unwrap();
        assert!(!rest(&mut stream).await.contains("here"));
    }

    #[tokio::test]
    async fn a_connection_kept_open_ends_and_makes_room() {
        let limits = Limits {
            connections: 1,
            head: LONG,
            life: SHORT,
        };
        let (address, mut first) = connect(limits).await;
        let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        first.write_all(request).await.unwrap();
        assert!(rest(&mut first).await.ends_with("here"));
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(request).await.unwrap();
        assert!(rest(&mut second).await.ends_with("here"));
    }
}
