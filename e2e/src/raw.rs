//! A minimal HTTP client, to measure how fast the API server can be at best.
//!
//! Each of N connections (HTTP/1.1 over TLS) sends one request at a time, and fetches the next request from a common
//! list as soon as the answer has arrived. The client has no connection pool and no middleware, and it does not decode
//! answers. Benches compare controllers with this client, because even the best controller is limited by the API
//! server's own processor time.
//!
//! With 5,000 PATCHes of podCIDRs on two cores, none of these made a difference: HTTP/2 with 1, 2 or 4 connections;
//! strategic or JSON patches; answers reduced to metadata or in protobuf. In every case each request costs the server
//! 0.8 ms of processor time, etcd 0.1-0.15 ms and this client 0.04 ms.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::future::try_join_all;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// `application/merge-patch+json`: the patch is short, and lists are replaced as a whole.
pub const MERGE_PATCH: &str = "application/merge-patch+json";
/// `application/json`: for a POST.
pub const JSON: &str = "application/json";
/// The media type of protobuf, in which the API server can answer requests for its own kinds.
pub const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// If the server answers a PATCH with status 500 or above, the PATCH is repeated at most this many times.
const AGAIN: usize = 5;

/// The error for an answer with status 500 or above.
#[derive(Debug)]
struct Overloaded(String);

impl fmt::Display for Overloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Overloaded {}

/// The API server's port, the credentials, and the TLS settings.
#[derive(Clone)]
pub struct Endpoint {
    port: u16,
    authorization: HeaderValue,
    /// `None` for HTTP without TLS
    tls: Option<Arc<rustls::ClientConfig>>,
}

/// One HTTP request to the API server.
#[derive(Clone, Debug)]
pub struct Call {
    /// The method: POST, PATCH, DELETE, …
    pub method: Method,
    /// Path and query, with a leading slash.
    pub path: String,
    /// The header `Content-Type`: [`MERGE_PATCH`] or [`JSON`].
    pub content_type: &'static str,
    /// The body, usually JSON text; empty for a call without a body.
    pub body: Bytes,
    /// The header `Accept`: [`JSON`] or [`PROTOBUF`].
    pub accept: &'static str,
}

impl Call {
    /// Returns a call whose body is `body` as JSON text.
    pub fn new(method: Method, path: String, content_type: &'static str, body: &Value) -> Self {
        Call {
            method,
            path,
            content_type,
            body: body.to_string().into(),
            accept: JSON,
        }
    }

    /// Returns a call without a body.
    pub fn without_body(method: Method, path: String) -> Self {
        Call {
            method,
            path,
            content_type: JSON,
            body: Bytes::new(),
            accept: JSON,
        }
    }
}

/// The times of a list of calls, all of which succeeded.
#[derive(Clone, Debug)]
pub struct Report {
    /// Time from the first request to the last answer. Opening the connections is not included.
    pub elapsed: Duration,
    /// Latency of each call, sorted.
    pub latencies: Vec<Duration>,
}

impl Report {
    /// Returns how many calls a second were answered, over the whole of `elapsed`.
    #[allow(clippy::cast_precision_loss)]
    pub fn rate(&self) -> f64 {
        self.latencies.len() as f64 / self.elapsed.as_secs_f64()
    }

    /// Returns the latency that `percent` % of the calls did not exceed; zero if there were no calls.
    pub fn percentile(&self, percent: usize) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        self.latencies
            .get(last * percent.min(100) / 100)
            .copied()
            .unwrap_or_default()
    }
}

impl Endpoint {
    pub(crate) fn new(port: u16, token: &str, ca: &Path) -> Result<Self> {
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(ca).context("cannot read the CA's certificate")?)?;
        let tls = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut authorization = HeaderValue::from_str(&format!("Bearer {token}"))?;
        authorization.set_sensitive(true);
        Ok(Self {
            port,
            authorization,
            tls: Some(Arc::new(tls)),
        })
    }

    /// Returns the endpoint of a [`StandIn`](crate::stand_in::StandIn), which has neither TLS nor authentication.
    pub fn without_tls(port: u16) -> Self {
        Endpoint {
            port,
            authorization: HeaderValue::from_static("Bearer none"),
            tls: None,
        }
    }

    /// Sends all `calls` over `connections` connections, and returns when all have succeeded. A failed call or a broken
    /// connection is an error. But if the server answers a PATCH with 500 or above, the PATCH is repeated, and only the
    /// last failure is an error.
    pub async fn send_all(&self, connections: usize, calls: Vec<Call>) -> Result<Report> {
        let senders = try_join_all((0..connections).map(|_| self.connect())).await?;
        let (calls, next) = (Arc::new(calls), Arc::new(AtomicUsize::new(0)));
        let start = Instant::now();
        let workers = senders.into_iter().map(|sender| {
            let (this, calls, next) = (self.clone(), Arc::clone(&calls), Arc::clone(&next));
            tokio::spawn(async move { this.work(sender, &calls, &next).await })
        });
        let mut latencies = Vec::with_capacity(calls.len());
        for worker in workers.collect::<Vec<_>>() {
            latencies.extend(worker.await??);
        }
        let elapsed = start.elapsed();
        latencies.sort_unstable();
        Ok(Report { elapsed, latencies })
    }

    async fn work(
        &self,
        mut sender: SendRequest<Full<Bytes>>,
        calls: &[Call],
        next: &AtomicUsize,
    ) -> Result<Vec<Duration>> {
        let mut latencies = Vec::new();
        while let Some(call) = calls.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let mut sent = self.send(&mut sender, call).await;
            // An overloaded server sometimes answers a PATCH with 500. The PATCH is then sent again, which does no
            // harm, because a second PATCH changes nothing.
            let mut left = if call.method == Method::PATCH {
                AGAIN
            } else {
                0
            };
            while left > 0 && sent.as_ref().is_err_and(anyhow::Error::is::<Overloaded>) {
                left -= 1;
                sent = self.send(&mut sender, call).await;
            }
            sent.with_context(|| format!("{} {} failed", call.method, call.path))?;
            latencies.push(start.elapsed());
        }
        Ok(latencies)
    }

    async fn send(&self, sender: &mut SendRequest<Full<Bytes>>, call: &Call) -> Result<()> {
        let request = Request::builder()
            .method(call.method.clone())
            .uri(&call.path)
            .header(HOST, "localhost")
            .header(AUTHORIZATION, &self.authorization)
            .header(ACCEPT, call.accept)
            .header(CONTENT_TYPE, call.content_type)
            .body(Full::new(call.body.clone()))?;
        sender.ready().await?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        let text = || {
            format!(
                "the API server answered {status}: {}",
                String::from_utf8_lossy(&body)
            )
        };
        if status.is_server_error() {
            return Err(Overloaded(text()).into());
        }
        if !status.is_success() {
            bail!(text());
        }
        Ok(())
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else {
            let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            return Ok(sender);
        };
        let name = ServerName::try_from("localhost")?;
        let tls = TlsConnector::from(Arc::clone(tls))
            .connect(name, stream)
            .await?;
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await?;
        tokio::spawn(connection);
        Ok(sender)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}
