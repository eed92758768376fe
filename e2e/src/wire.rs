//! A TCP proxy to the API server that can delay what a client sends.
//!
//! The proxy forwards bytes, which stay encrypted from end to end. After [`Wire::hold`], bytes from the client wait in
//! the proxy until [`Wire::release`]. The waiting bytes are delivered even if the client has died meanwhile, because
//! the proxy closes the connection to the server only [`LINGER`] after the last byte. So the API server can execute
//! requests of a client long after the client's death, as with real networks and proxies. After [`Wire::fall_silent`],
//! connections stay open, but nothing is delivered over them.
//!
//! # Caveats
//! A client that cancels a request in an orderly way announces the cancellation within TLS. The proxy delivers this
//! announcement like all other bytes, and the API server then drops the request. So kill the client before its requests
//! time out.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::control_plane::ControlPlane;

/// How long the connection to the server stays open after its client has closed. An API server drops the requests of
/// closed connections.
pub const LINGER: Duration = Duration::from_secs(10);

/// A running proxy. Once dropped, it accepts no new connections.
#[derive(Debug)]
pub struct Wire {
    held: watch::Sender<bool>,
    silences: watch::Sender<u32>,
    waiting: Arc<AtomicUsize>,
    left: Arc<AtomicUsize>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Wire {
    /// Starts a proxy to the control plane's API server.
    pub async fn to(cluster: &ControlPlane) -> Result<Self> {
        let server = cluster.address();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (held, watched) = watch::channel(false);
        let (silences, silenced) = watch::channel(0);
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let gate = Gate {
            held: watched,
            hold: held.clone(),
            left: Arc::clone(&left),
            passed: 0,
            waiting: Arc::clone(&waiting),
        };
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let gate = gate.clone();
                let mut silenced = silenced.clone();
                silenced.mark_unchanged();
                tokio::spawn(async move {
                    // The error is ignored, because the client notices that its connection has failed.
                    let _ = forward(client, server, gate, silenced).await;
                });
            }
        });
        Ok(Self {
            held,
            silences,
            waiting,
            left,
            address,
            task,
        })
    }

    /// Returns a kubeconfig for `user` with the proxy as its server.
    pub fn kubeconfig(&self, cluster: &ControlPlane, user: &str) -> Result<PathBuf> {
        cluster.kubeconfig_through(user, self.address)
    }

    /// Stops delivering what clients send. Bytes from the server still pass.
    pub fn hold(&self) {
        self.held.send_replace(true);
    }

    /// Delivers `count` more requests of clients, and then stops delivering what clients send. Bytes from the server
    /// still pass.
    pub fn hold_after(&self, count: usize) {
        self.left.store(count, Ordering::Relaxed);
    }

    /// Returns the number of connections on which requests of clients are waiting. Connections on which the TLS
    /// handshake is not complete do not count, because their requests are not sent yet.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Stops delivering in both directions on the existing connections, which stay open. New connections work.
    pub fn fall_silent(&self) {
        self.silences.send_modify(|count| *count += 1);
    }

    /// Delivers the waiting bytes, and forwards without delay from now on.
    pub fn release(&self) {
        self.left.store(usize::MAX, Ordering::Relaxed);
        self.held.send_replace(false);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone)]
struct Gate {
    held: watch::Receiver<bool>,
    hold: watch::Sender<bool>,
    /// The number of requests that are delivered before all further requests wait
    left: Arc<AtomicUsize>,
    /// The number of pieces of client data that have passed the gate so far
    passed: u32,
    waiting: Arc<AtomicUsize>,
}

impl Gate {
    async fn pass(&mut self) -> Result<()> {
        // The client's first two messages are the TLS handshake, so they do not count as requests.
        let is_request = usize::from(self.passed >= 2);
        let next = |left: usize| (left != usize::MAX).then(|| left.saturating_sub(is_request));
        let left = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        if left == Ok(0) {
            self.hold
                .send_if_modified(|held| !std::mem::replace(held, true));
        }
        self.waiting.fetch_add(is_request, Ordering::Relaxed);
        let open = self.held.wait_for(|held| !held).await.map(drop);
        self.waiting.fetch_sub(is_request, Ordering::Relaxed);
        self.passed = self.passed.saturating_add(1);
        open.context("the wire is cut")
    }
}

async fn forward(
    client: TcpStream,
    server: SocketAddr,
    mut gate: Gate,
    silenced: watch::Receiver<u32>,
) -> Result<()> {
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let ((mut asks, mut hears), (mut answers, mut executes)) =
        (client.into_split(), server.into_split());
    let mut silent = silenced.clone();
    let back = tokio::spawn(async move {
        tokio::select! {
            biased;
            _ = silent.changed() => std::future::pending().await,
            _ = tokio::io::copy(&mut answers, &mut hears) => {}
        }
    });
    let mut bytes = vec![0; 16 << 10];
    // If the client has died, a read returns an error. If the client has closed the connection, a read returns 0. In
    // both cases the loop ends.
    while let Ok(count @ 1..) = asks.read(&mut bytes).await {
        gate.pass().await?;
        if silenced.has_changed()? {
            continue;
        }
        executes.write_all(&bytes[..count]).await?;
    }
    gate.pass().await?;
    tokio::time::sleep(LINGER).await;
    back.abort();
    Ok(())
}
