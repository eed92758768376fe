//! The socket of the CNI plugin: one frame each way, see [`crate::node::wire`].

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::service::Service;
use super::unix::{Peer, Socket};
use crate::node::wire::{self, Request, Response};
use crate::node::{Refusal, Why};

/// Connections at a time; more wait to be taken.
pub const CONNECTIONS: usize = 256;
/// How long a peer may take for its request, and for taking its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// What is read of a body before it has come: a length alone takes no memory.
const AT_ONCE: usize = 64 * 1024;

/// Serves until `stop`, and then until all that was begun is answered.
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
    // Nobody finds it any more; those who are connected get their answers.
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
            let deadline = request.deadline();
            tokio::select! {
                result = service.serve(request.op, deadline) => Response::from(result),
                // Whoever asked is gone: nobody waits for a block any more.
                () = hung_up(&mut stream) => return Ok(()),
            }
        }
        Ok(request) => refuse(format!(
            "this agent speaks version {} of the protocol, the plugin version {}: install the plugin that came with the agent",
            wire::VERSION,
            request.version
        )),
        Err(error) => refuse(format!(
            "the agent cannot read this request: {error}: install the plugin that came with the agent"
        )),
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

/// Returns when the peer has closed its end; what it still sends is not read.
async fn hung_up(stream: &mut UnixStream) {
    let mut rest = [0; 64];
    loop {
        match stream.read(&mut rest).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

fn refuse(text: String) -> Response {
    Response::Refusal(Refusal {
        why: Why::Busy,
        text,
    })
}
