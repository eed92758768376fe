//! The gRPC API for other programs on the node: `proto/cadastre/agent/v1/agent.proto`.
//!
//! # Guarantees
//! - The size of messages and the numbers of streams, concurrent calls and connections are bounded.
//! - Every call ends, even if its message never arrives. A `Watch` ends when the peer disconnects or the agent stops.
//! - A peer that sends nothing and answers no pings is disconnected. Then another peer can connect in its place.
//! - Requests are handled with any `:authority`, even with an invalid one.
//!
//! | file | subject |
//! |---|---|
//! | `authority` | replaces invalid `:authority` fields before the server reads them |
//! | `connection` | a peer's connection, and when it is closed |
//! | `messages` | translation to and from the types of the store |

mod authority;
mod connection;
mod messages;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::leaks::Reasons;
use super::service::Service;
use super::unix::Socket;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::store_thread::CallTimes;
use cadastre_node::{Add, Check, Gc, Op, OpOutcome, PodRef, Snapshot, clock};
use connection::Connection;
use messages::{attachment, read_addresses, refused, write_assignment, write_holding, write_list};

/// Messages and service, generated from the proto file.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "generated"
)]
pub mod v1 {
    tonic::include_proto!("cadastre.agent.v1");
}

use v1::agent_server::{Agent, AgentServer};

/// At most this many connections are open; further ones wait until one is closed.
pub const CONNECTIONS: usize = 64;
/// The maximum number of concurrent calls of one connection.
const CALLS: u32 = 64;
/// The maximum size in bytes of a message that is received, and of a message that is sent.
const MESSAGE: (usize, usize) = (1 << 20, 16 << 20);
/// The time limit of every call except `Watch`.
const LIMIT: Duration = Duration::from_secs(30);
/// How long the agent may work on a call if the caller sets no deadline.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interval between pings to a peer, also while the connection is idle.
const PING: Duration = Duration::from_secs(5);
/// A peer that sends nothing for this time, not even answers to pings, is disconnected.
const SILENCE: Duration = Duration::from_secs(12);

/// The parts of the agent that the gRPC API uses.
pub struct Api {
    /// Handles the operations of clients
    pub service: Arc<Service>,
    /// The name of the Node, which `Ping` returns
    pub node: String,
    /// The node's ranges, updated at each change
    pub holding: watch::Receiver<Arc<NodeAllocation>>,
    /// The leak candidates, each with its reason
    pub leaks: watch::Receiver<Arc<Reasons>>,
    /// This token is cancelled when the agent stops. Then every `Watch` ends
    pub stop: CancellationToken,
}

/// Handles calls until `api.stop` is cancelled. Returns once all calls under way are answered.
pub async fn run(socket: Socket, api: Api) -> Result<(), tonic::transport::Error> {
    let stop = api.stop.clone();
    let service = AgentServer::new(api)
        .max_decoding_message_size(MESSAGE.0)
        .max_encoding_message_size(MESSAGE.1);
    let incoming = futures::stream::unfold(socket, async |socket| {
        let peer = socket.accept().await;
        let connection = Connection::new(peer, SILENCE);
        Some((Ok::<_, io::Error>(connection), socket))
    });
    Server::builder()
        .concurrency_limit_per_connection(CALLS as usize)
        .max_concurrent_streams(CALLS)
        .http2_max_header_list_size(16 * 1024)
        .http2_keepalive_interval(Some(PING))
        .timeout(LIMIT)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await
}

impl Api {
    async fn serve(&self, op: Op, patience: Duration) -> Result<OpOutcome, Status> {
        let call = CallTimes::until(clock::since_boot() + patience);
        self.service.serve(op, call).await.map_err(refused)
    }

    async fn snapshot(&self) -> Result<Snapshot, Status> {
        let snapshot = self.service.ledger.with(|ledger| ledger.snapshot()).await;
        snapshot.map_err(|error| Status::unavailable(error.to_string()))
    }
}

#[tonic::async_trait]
impl Agent for Api {
    async fn ping(
        &self,
        _: Request<v1::PingRequest>,
    ) -> Result<Response<v1::PingResponse>, Status> {
        let node_uid = self.holding.borrow().node_uid.clone();
        Ok(Response::new(v1::PingResponse {
            version: cadastre_core::VERSION.to_owned(),
            node: self.node.clone(),
            node_uid,
            boot_id: clock::now().boot,
        }))
    }

    async fn add(
        &self,
        request: Request<v1::AddRequest>,
    ) -> Result<Response<v1::AddResponse>, Status> {
        let patience = patience(&request);
        let request = request.into_inner();
        let pod = request.pod.map(|pod| PodRef {
            namespace: pod.namespace,
            name: pod.name,
            uid: pod.uid,
        });
        let op = Op::Add(Add {
            attachment: attachment(request.attachment)?,
            netns: request.netns,
            pod,
            pools: request.pools,
            addresses: read_addresses(&request.addresses)?,
            ..Add::default()
        });
        match self.serve(op, patience).await? {
            OpOutcome::Assigned(given) => Ok(Response::new(write_assignment(given))),
            OpOutcome::Done => Err(Status::internal("the store answered nothing")),
        }
    }

    async fn del(
        &self,
        request: Request<v1::DelRequest>,
    ) -> Result<Response<v1::DelResponse>, Status> {
        let patience = patience(&request);
        let op = Op::Del(attachment(request.into_inner().attachment)?);
        self.serve(op, patience).await?;
        Ok(Response::new(v1::DelResponse {}))
    }

    async fn check(
        &self,
        request: Request<v1::CheckRequest>,
    ) -> Result<Response<v1::CheckResponse>, Status> {
        let patience = patience(&request);
        let request = request.into_inner();
        let op = Op::Check(Check {
            attachment: attachment(request.attachment)?,
            addresses: read_addresses(&request.addresses)?,
        });
        self.serve(op, patience).await?;
        Ok(Response::new(v1::CheckResponse {}))
    }

    async fn gc(
        &self,
        request: Request<v1::GcRequest>,
    ) -> Result<Response<v1::GcResponse>, Status> {
        let patience = patience(&request);
        let request = request.into_inner();
        if request.network.is_empty() {
            return Err(Status::invalid_argument("network is missing"));
        }
        let valid = request.valid.into_iter();
        let op = Op::Gc(Gc {
            network: request.network,
            valid: valid.map(|it| (it.container_id, it.ifname)).collect(),
        });
        self.serve(op, patience).await?;
        Ok(Response::new(v1::GcResponse {}))
    }

    async fn status(
        &self,
        request: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        self.serve(Op::Status, patience(&request)).await?;
        Ok(Response::new(v1::StatusResponse {}))
    }

    async fn list(
        &self,
        _: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let snapshot = self.snapshot().await?;
        let leaks = Arc::clone(&self.leaks.borrow());
        Ok(Response::new(write_list(snapshot, &leaks)))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchResponse, Status>> + Send>>;

    async fn watch(
        &self,
        _: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let mut holding = self.holding.clone();
        holding.mark_changed();
        let stop = self.stop.clone();
        let states = futures::stream::unfold((holding, stop), async |(mut holding, stop)| {
            tokio::select! {
                changed = holding.changed() => changed.ok()?,
                () = stop.cancelled() => return None,
            }
            let state = write_holding(&holding.borrow_and_update().clone());
            Some((Ok(state), (holding, stop)))
        });
        Ok(Response::new(Box::pin(states)))
    }
}

/// Returns how long the caller waits for the answer. This is the timeout in the request, or [`PATIENCE`] if the request
/// has no timeout, but at most [`LIMIT`].
fn patience<T>(request: &Request<T>) -> Duration {
    let timeout = request.metadata().get("grpc-timeout");
    let timeout = timeout.and_then(|it| it.to_str().ok());
    timeout
        .and_then(read_timeout)
        .unwrap_or(PATIENCE)
        .min(LIMIT)
}

/// Parses `grpc-timeout`, such as `10S` or `500m`: at most eight digits and a unit.
fn read_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

/// Returns a client of the agent that listens on the socket at `path`. The client connects with its first call.
pub fn client(path: &std::path::Path) -> v1::agent_client::AgentClient<tonic::transport::Channel> {
    v1::agent_client::AgentClient::new(super::cri::channel(path))
        .max_decoding_message_size(MESSAGE.1)
}

#[cfg(test)]
mod tests {
    use tonic::Code;
    use tonic::metadata::MetadataValue;

    use super::*;
    use crate::service::label;
    use cadastre_node::{OpError, OpErrorKind};

    #[test]
    fn the_timeout_of_a_caller_is_read_and_bounded() {
        for (text, expected) in [
            ("10S", Some(Duration::from_secs(10))),
            ("500m", Some(Duration::from_millis(500))),
            ("1H", Some(Duration::from_secs(3600))),
            ("123456789S", None),
            ("S", None),
            ("", None),
            ("-1S", None),
            ("5é", None),
        ] {
            assert_eq!(read_timeout(text), expected, "{text}");
        }
        let mut request = Request::new(());
        assert_eq!(patience(&request), PATIENCE);
        let value = MetadataValue::from_static("2H");
        request.metadata_mut().insert("grpc-timeout", value);
        assert_eq!(patience(&request), LIMIT);
    }

    #[test]
    fn an_error_keeps_its_kind_and_its_text() {
        for why in [
            OpErrorKind::Exhausted,
            OpErrorKind::Busy,
            OpErrorKind::NotInBlocks,
            OpErrorKind::Store,
        ] {
            let status = refused(OpError {
                why,
                text: "what to do".to_owned(),
            });
            assert_eq!(status.message(), "what to do");
            assert_eq!(status.metadata().get("cadastre-why").unwrap(), label(why));
            assert_ne!(status.code(), Code::Unknown);
        }
    }

    #[test]
    fn a_field_of_a_newer_caller_is_ignored() {
        use prost::Message as _;
        let known = v1::DelRequest {
            attachment: Some(v1::Attachment {
                network: "n".to_owned(),
                container_id: "c".to_owned(),
                ifname: "eth0".to_owned(),
            }),
        };
        // The message has a string in field 99, which this version does not know.
        let newer = [known.encode_to_vec(), b"\x9a\x06\x03new".to_vec()].concat();
        assert_eq!(v1::DelRequest::decode(newer.as_slice()), Ok(known));
    }

    #[test]
    fn an_attachment_with_an_empty_or_long_name_is_rejected() {
        let status = attachment(None).unwrap_err();
        assert!(status.message().contains("network"), "{status}");
        let long = v1::Attachment {
            network: "n".to_owned(),
            container_id: "c".repeat(2000),
            ifname: "eth0".to_owned(),
        };
        assert!(attachment(Some(long)).is_err());
    }
}
