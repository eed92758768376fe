//! A TCP proxy to the API server that can delay what a client sends.
//!
//! It forwards bytes, which stay encrypted from end to end. While it is held, bytes from the client wait in
//! the proxy; they are delivered on release even if the client has died meanwhile, as the proxy closes the
//! connection to the server only [`LINGER`] after the last byte. So requests of a dead client can be executed
//! long after its death, as networks and proxies may cause. The proxy can also fall silent: connections stay
//! open, but nothing is delivered over them.
//!
//! # Caveats
//! A client that ends a request in an orderly way says so within TLS. Those bytes are delivered like all
//! others, and the API server then drops the request: kill the client before it times out.

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
use crate::kubeconfig::write_private;

/// How long the connection to the server outlives its client: an API server drops the requests of closed connections.
pub const LINGER: Duration = Duration::from_secs(10);

/// A running proxy, which accepts no more connections once dropped.
#[derive(Debug)]
pub struct Wire {
    held: watch::Sender<bool>,
    silences: watch::Sender<u32>,
    waiting: Arc<AtomicUsize>,
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
        let counter = Arc::clone(&waiting);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let gate = Gate {
                    held: watched.clone(),
                    waiting: Arc::clone(&counter),
                };
                let mut silenced = silenced.clone();
                silenced.mark_unchanged();
                tokio::spawn(async move {
                    // The client notices a connection that fails.
                    let _ = forward(client, server, gate, silenced).await;
                });
            }
        });
        Ok(Self {
            held,
            silences,
            waiting,
            address,
            task,
        })
    }

    /// A kubeconfig for `user` with the proxy as its server.
    pub fn kubeconfig(&self, cluster: &ControlPlane, user: &str) -> Result<PathBuf> {
        let direct = std::fs::read_to_string(cluster.kubeconfig(user)?)?;
        let url = format!("https://{}", self.address);
        let name = format!("by-wire-{}.kubeconfig", self.address.port());
        let path = cluster.folder().join(name);
        write_private(&path, &direct.replace(&cluster.server(), &url))?;
        Ok(path)
    }

    /// Stops delivering what clients send.
    pub fn hold(&self) {
        self.held.send_replace(true);
    }

    /// On how many connections bytes are waiting.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Stops delivering in either direction on the connections that exist now, which stay open; new ones work.
    pub fn fall_silent(&self) {
        self.silences.send_modify(|count| *count += 1);
    }

    /// Delivers what was held, and forwards without delay again.
    pub fn release(&self) {
        self.held.send_replace(false);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Gate {
    held: watch::Receiver<bool>,
    waiting: Arc<AtomicUsize>,
}

impl Gate {
    async fn pass(&mut self) -> Result<()> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let open = self.held.wait_for(|held| !held).await.map(drop);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
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
    // A client that died ends its half with an error, others with an end of file.
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
