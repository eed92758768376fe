//! A TCP proxy between clients and several API servers, which loses, delays and breaks what passes.
//!
//! The proxy forwards bytes, which stay encrypted from end to end. Each new connection goes to one of the servers that
//! are in use, chosen at random, as a load balancer in front of a control plane does.
//!
//! # Caveats
//! - Clients of Cadastre speak HTTP/1.1, so at any time a connection has one request or one watch. Errors of requests
//!   are errors of whole connections.
//! - The first two pieces that a client sends on a connection are its TLS handshake. They are delayed like all others,
//!   but they are not lost.

use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::FutureExt as _;
use futures::future::FusedFuture as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

/// The maximum number of pieces that wait for delivery per direction of a connection.
const PIECES: usize = 64;

/// What happens to connections and to the bytes that pass.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    /// The servers to which new connections go. If the list is empty, connections are refused.
    pub servers: Vec<SocketAddr>,
    /// The delay of everything that passes, in each direction.
    pub latency: Duration,
    /// The share of requests in percent that do not arrive, because the connection breaks before.
    pub lost_requests: u8,
    /// The share of requests in percent that arrive, but whose connection breaks when the answer comes.
    pub lost_answers: u8,
}

/// Something that happens to all existing connections at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incident {
    /// Connections break with a reset.
    Reset,
    /// Clients see an orderly end of what the server sends, but can still send.
    HalfClose,
    /// Connections stay open, but nothing is delivered any more, as if a firewall had forgotten them.
    Silence,
}

/// A running proxy. When it is dropped, all its connections break.
#[derive(Debug)]
pub struct Balancer {
    conditions: watch::Sender<Conditions>,
    incidents: watch::Sender<(u64, Incident)>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Balancer {
    /// Starts a proxy to these servers. Must be called in a runtime.
    pub fn start(servers: Vec<SocketAddr>) -> Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let (conditions, present) = watch::channel(Conditions {
            servers,
            ..Conditions::default()
        });
        let (incidents, happening) = watch::channel((0, Incident::Reset));
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let (present, mut happening) = (present.clone(), happening.clone());
                happening.mark_unchanged();
                // The error is ignored, because the client notices that its connection has failed.
                connections.spawn(async move { _ = serve(client, present, happening).await });
            }
        });
        Ok(Self {
            conditions,
            incidents,
            address,
            task,
        })
    }

    /// The address on which the proxy listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL under which clients reach the API servers.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Changes the conditions. They apply to existing connections too, except for the choice of the server.
    pub fn change(&self, change: impl FnOnce(&mut Conditions)) {
        self.conditions.send_modify(change);
    }

    /// Does something to all existing connections.
    pub fn cause(&self, incident: Incident) {
        self.incidents
            .send_modify(|(count, last)| (*count, *last) = (*count + 1, incident));
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Forwards one connection until an end closes it or it breaks.
async fn serve(
    client: TcpStream,
    present: watch::Receiver<Conditions>,
    mut happening: watch::Receiver<(u64, Incident)>,
) -> Result<()> {
    client.set_nodelay(true)?;
    // Without time to linger, closing the socket sends a reset. An orderly end is sent only by `shutdown`.
    client.set_zero_linger()?;
    let client = client.into_std()?;
    let handle = client.try_clone()?;
    let client = TcpStream::from_std(client)?;
    let server = {
        let servers = &present.borrow().servers;
        let one = fastrand::usize(..servers.len().max(1));
        *servers.get(one).context("no server is in use")?
    };
    let server = TcpStream::connect(server).await?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let up = Direction {
        present,
        is_answer_lost: Arc::default(),
        is_up: true,
    };
    let down = Direction {
        is_up: false,
        ..up.clone()
    };
    let mut up = Box::pin(up.forward(from_client, to_server).fuse());
    let mut down = Box::pin(down.forward(from_server, to_client).fuse());
    let incident = tokio::select! {
        // When either end has closed in an orderly way, what is under way to the other end is still delivered.
        done = async { tokio::try_join!(&mut up, &mut down) } => return done.map(drop),
        changed = happening.changed() => {
            changed?;
            happening.borrow().1
        }
    };
    match incident {
        Incident::Reset => Ok(()),
        Incident::HalfClose => {
            drop(down);
            handle.shutdown(Shutdown::Write)?;
            if up.is_terminated() {
                return Ok(());
            }
            up.await
        }
        // Nothing is forwarded any more, but the connections are still open.
        Incident::Silence => std::future::pending().await,
    }
}

/// The writing half of a connection. Unlike [`OwnedWriteHalf`], it sends no orderly end when it is dropped.
struct Writer(Option<OwnedWriteHalf>);

impl Writer {
    fn half(&mut self) -> Result<&mut OwnedWriteHalf> {
        self.0.as_mut().context("the half is gone")
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(half) = self.0.take() {
            half.forget();
        }
    }
}

#[derive(Clone)]
struct Direction {
    present: watch::Receiver<Conditions>,
    /// Whether the connection breaks as soon as the server sends anything
    is_answer_lost: Arc<AtomicBool>,
    /// Whether this is the direction from the client to the server
    is_up: bool,
}

impl Direction {
    async fn forward(self, mut from: OwnedReadHalf, to: OwnedWriteHalf) -> Result<()> {
        let mut to = Writer(Some(to));
        let (send, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES);
        let latency = self.present.clone();
        let read = async move {
            let mut bytes = vec![0; 16 << 10];
            loop {
                let count = from.read(&mut bytes).await?;
                if count == 0 {
                    return anyhow::Ok(());
                }
                let due = Instant::now() + latency.borrow().latency;
                send.send((due, bytes[..count].to_vec())).await?;
            }
        };
        let write = async {
            let mut passed = 0_u32;
            while let Some((due, piece)) = pieces.recv().await {
                tokio::time::sleep_until(due).await;
                self.pass(passed)?;
                passed = passed.saturating_add(1);
                to.half()?.write_all(&piece).await?;
            }
            to.half()?.shutdown().await?;
            anyhow::Ok(())
        };
        tokio::try_join!(read, write)?;
        Ok(())
    }

    /// Decides the fate of the next piece. An error breaks the connection. `passed` pieces have been delivered so far.
    fn pass(&self, passed: u32) -> Result<()> {
        if !self.is_up {
            if self.is_answer_lost.load(Ordering::Relaxed) {
                bail!("the answer is lost");
            }
            return Ok(());
        }
        let conditions = self.present.borrow();
        let is_lost = |percent| passed >= 2 && fastrand::u8(..100) < percent;
        if is_lost(conditions.lost_requests) {
            bail!("the request is lost");
        }
        if is_lost(conditions.lost_answers) {
            self.is_answer_lost.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers each piece with the same piece, and counts the pieces.
    async fn echo() -> (SocketAddr, Arc<std::sync::atomic::AtomicUsize>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let counted = Arc::clone(&counted);
                tokio::spawn(async move {
                    let mut bytes = [0; 64];
                    while let Ok(count @ 1..) = client.read(&mut bytes).await {
                        counted.fetch_add(1, Ordering::Relaxed);
                        client.write_all(&bytes[..count]).await.unwrap();
                    }
                });
            }
        });
        (address, count)
    }

    /// Sends a piece, and returns the answer; an error if the connection breaks.
    async fn ask(client: &mut TcpStream, piece: &str) -> std::io::Result<String> {
        client.write_all(piece.as_bytes()).await?;
        let mut bytes = [0; 64];
        let count = client.read(&mut bytes).await?;
        Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
    }

    /// Connects, and sends what would be the TLS handshake.
    async fn connect(balancer: &Balancer) -> TcpStream {
        let mut client = TcpStream::connect(balancer.address()).await.unwrap();
        for piece in ["hello", "finished"] {
            assert_eq!(ask(&mut client, piece).await.unwrap(), piece);
        }
        client
    }

    #[tokio::test]
    async fn requests_and_answers_are_lost_and_the_connection_breaks() {
        let (server, count) = echo().await;
        let balancer = Balancer::start(vec![server]).unwrap();
        let mut client = connect(&balancer).await;
        assert_eq!(ask(&mut client, "a").await.unwrap(), "a");
        balancer.change(|it| it.lost_requests = 100);
        ask(&mut client, "b").await.unwrap_err();
        assert_eq!(count.load(Ordering::Relaxed), 3, "b has not arrived");
        let mut client = connect(&balancer).await;
        balancer.change(|it| (it.lost_requests, it.lost_answers) = (0, 100));
        ask(&mut client, "c").await.unwrap_err();
        assert_eq!(count.load(Ordering::Relaxed), 6, "c has arrived");
        balancer.change(|it| it.servers.clear());
        let mut client = TcpStream::connect(balancer.address()).await.unwrap();
        ask(&mut client, "d").await.unwrap_err();
    }

    #[tokio::test]
    async fn an_incident_concerns_the_connections_that_exist() {
        let (server, _) = echo().await;
        let balancer = Balancer::start(vec![server]).unwrap();
        let mut reset = connect(&balancer).await;
        balancer.cause(Incident::Reset);
        let mut bytes = [0; 1];
        reset.read(&mut bytes).await.unwrap_err();
        let mut half = connect(&balancer).await;
        balancer.cause(Incident::HalfClose);
        assert_eq!(half.read(&mut bytes).await.unwrap(), 0);
        half.write_all(b"still").await.unwrap();
        let mut silent = connect(&balancer).await;
        balancer.cause(Incident::Silence);
        let answer = tokio::time::timeout(Duration::from_millis(200), ask(&mut silent, "x")).await;
        assert!(answer.is_err(), "{answer:?}");
        assert_eq!(ask(&mut connect(&balancer).await, "y").await.unwrap(), "y");
    }

    #[tokio::test]
    async fn all_pieces_arrive_late_and_in_order() {
        let (server, _) = echo().await;
        let balancer = Balancer::start(vec![server]).unwrap();
        let mut client = connect(&balancer).await;
        let latency = Duration::from_millis(50);
        balancer.change(|it| it.latency = latency);
        let begun = Instant::now();
        assert_eq!(ask(&mut client, "a").await.unwrap(), "a");
        assert!(begun.elapsed() >= 2 * latency);
    }
}
