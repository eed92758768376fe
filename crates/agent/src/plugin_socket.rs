//! The server for the CNI plugin. Each connection has one request and one answer, as [`cadastre_node::wire`] defines.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::ledger::busy;
use super::service::Service;
use super::unix::{Peer, Socket};
use cadastre_node::store_thread::CallTimes;
use cadastre_node::wire;
use cadastre_node::wire::{Request, Response};

/// At most this many connections are open. Further connections wait until an open one is closed.
pub const CONNECTIONS: usize = 256;
/// The time limit for a peer to send its request, and for a peer to receive its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// At most this many bytes are allocated before the message arrives. So a peer that only announces a large message
/// costs little memory.
const AT_ONCE: usize = 64 * 1024;

/// Handles connections until `stop` is cancelled. Returns once all requests under way are answered.
pub async fn run(socket: Socket, service: Arc<Service>, stop: CancellationToken) {
    let mut conversations = JoinSet::new();
    loop {
        tokio::select! {
            peer = socket.accept() => {
                let service = Arc::clone(&service);
                conversations.spawn(async move {
                    let Peer { stream, slot } = peer;
                    if let Err(error) = converse(stream, &service).await {
                        debug!("a plugin was not served: {error}");
                    }
                    drop(slot);
                });
            }
            Some(_) = conversations.join_next() => {}
            () = stop.cancelled() => break,
        }
    }
    // Dropping the socket removes its file, so no new peer can connect. Peers that are already connected get their
    // answers.
    drop(socket);
    while conversations.join_next().await.is_some() {}
}

async fn converse(mut stream: UnixStream, service: &Service) -> io::Result<()> {
    let greeting = wire::greeting()?;
    timeout(PATIENCE, stream.write_all(&greeting)).await??;
    let body = timeout(PATIENCE, receive(&mut stream)).await??;
    let response = match wire::decode::<Request>(&body) {
        Ok(request) if request.version == wire::VERSION => {
            drop(body);
            let call = CallTimes::until(request.deadline())
                .asked(request.asked())
                .while_waited_for(is_there(&stream)?);
            let mut ignored = tokio::io::sink();
            tokio::select! {
                result = service.serve(request.op, call) => Response::from(result),
                // The peer has closed the connection, so it no longer waits for the answer.
                _ = tokio::io::copy(&mut stream, &mut ignored) => return Ok(()),
            }
        }
        Ok(request) => Response::Refusal(busy(format!(
            "this agent speaks version {} of the protocol, the plugin version {}: install the plugin that came with the agent",
            wire::VERSION,
            request.version
        ))),
        Err(error) => Response::Refusal(busy(format!(
            "the agent cannot read this request: {error}: install the plugin that came with the agent"
        ))),
    };
    let frame = wire::encode(&response)?;
    timeout(PATIENCE, stream.write_all(&frame)).await?
}

async fn receive(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    let len = wire::body_len(head)?;
    let mut body = Vec::with_capacity(len.min(AT_ONCE));
    let mut rest = stream.take(len as u64);
    rest.read_to_end(&mut body).await?;
    if body.len() < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(body)
}

/// Returns a function that tells whether the peer still has the connection open. The function asks the kernel, so its
/// result is right even if the connection's task has not run for a while.
fn is_there(stream: &UnixStream) -> io::Result<impl Fn() -> bool + Send + Sync + use<>> {
    let socket = stream.as_fd().try_clone_to_owned()?;
    Ok(move || {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(&socket, &mut [0u8; 1], flags) {
            Ok((count, _)) => count > 0,
            Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
        }
    })
}
