//! A wire to the API server that can be held: what a client sends then arrives late.
//!
//! Forwards bytes, which stay encrypted from end to end. While it is held, what comes from the client
//! waits in here, and is delivered on release even where the client has died meanwhile: the far end
//! hears of that only [`LINGER`] after the last byte. So the requests of a dead client are executed
//! long after it, as networks and proxies may have it. And it can fall silent: connections stay open, and
//! nothing comes of them any more.
//!
//! # Caveats
//! A client that gives up in an orderly way says so within TLS. That is delivered like the rest, and
//! an API server then drops the request: kill the client before it loses patience.

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

/// How long a connection outlives its client: an API server drops the requests of a closed one.
pub const LINGER: Duration = Duration::from_secs(10);

/// A wire, cut when dropped.
#[derive(Debug)]
pub struct Wire {
    held: watch::Sender<bool>,
    silences: watch::Sender<u32>,
    waiting: Arc<AtomicUsize>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Wire {
    /// A wire to that control plane's API server.
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
                    // A connection that fails is the client's to notice.
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

    /// A kubeconfig for `user` that goes by this wire.
    pub fn kubeconfig(&self, cluster: &ControlPlane, user: &str) -> Result<PathBuf> {
        let direct = std::fs::read_to_string(cluster.kubeconfig(user)?)?;
        let url = format!("https://{}", self.address);
        let name = format!("by-wire-{}.kubeconfig", self.address.port());
        let path = cluster.folder().join(name);
        write_private(&path, &direct.replace(&cluster.server(), &url))?;
        Ok(path)
    }

    /// From now on nothing reaches the API server.
    pub fn hold(&self) {
        self.held.send_replace(true);
    }

    /// On how many connections something is held back now.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Nothing comes any more, in either direction, of the connections that there are. They stay open.
    pub fn fall_silent(&self) {
        self.silences.send_modify(|count| *count += 1);
    }

    /// Delivers what was held, and goes on as before.
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
    // A client that died ends its half with an error, others with nothing more to read.
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
