//! A client of the container runtime (CRI), which lists the sandboxes of the node and their addresses.

#[cfg(test)]
pub(super) mod fake;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use cadastre_core::Addr;
use cadastre_node::PodRef;

#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "generated"
)]
mod v1 {
    tonic::include_proto!("runtime.v1");
}

use v1::runtime_service_client::RuntimeServiceClient;

/// The time limit of each call to the runtime.
const LIMIT: Duration = Duration::from_secs(10);
/// The maximum size of an answer in bytes. A node has a few hundred sandboxes of a few kilobytes each.
const MESSAGE: usize = 16 << 20;

/// A pod sandbox in the runtime's list. The list includes sandboxes that have ended but are not removed yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Sandbox {
    /// The sandbox id, which is the container id of CNI
    pub id: String,
    /// The sandbox's pod; a static pod has the UID that the kubelet has generated
    pub pod: PodRef,
    /// The addresses on the pod's first network; the CRI reports no addresses on other networks
    pub addresses: Vec<Addr>,
}

/// A client of this node's container runtime.
#[derive(Clone, Debug)]
pub(crate) struct Runtime {
    socket: PathBuf,
    limit: Duration,
}

/// Why a call to the container runtime failed: the runtime cannot be reached, or answered with an error.
#[derive(Debug, thiserror::Error)]
#[error(
    "the container runtime does not answer on {}: {source}: check --cri-socket, and that the runtime runs",
    socket.display()
)]
pub(crate) struct CriError {
    socket: PathBuf,
    source: tonic::Status,
}

impl Runtime {
    /// Returns a client of the runtime that listens on `socket`. The client opens a new connection for each call.
    pub(crate) fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            limit: LIMIT,
        }
    }

    /// Returns the ids of all sandboxes, including sandboxes that have ended but are not removed yet.
    pub(crate) async fn sandboxes(&self) -> Result<BTreeSet<String>, CriError> {
        let all = self.list(&mut self.client()).await?;
        Ok(all.into_iter().map(|it| it.id).collect())
    }

    /// Returns all sandboxes with their addresses. This takes one call for the list and one for each sandbox.
    pub(crate) async fn addresses(&self) -> Result<Vec<Sandbox>, CriError> {
        let mut client = self.client();
        let mut all = Vec::new();
        for sandbox in self.list(&mut client).await? {
            let meta = sandbox.metadata.unwrap_or_default();
            all.push(Sandbox {
                addresses: self.addresses_of(&mut client, &sandbox.id).await?,
                id: sandbox.id,
                pod: PodRef {
                    namespace: meta.namespace,
                    name: meta.name,
                    uid: meta.uid,
                },
            });
        }
        Ok(all)
    }

    fn client(&self) -> RuntimeServiceClient<Channel> {
        // Calls are rare, so no connection is kept open between them.
        RuntimeServiceClient::new(channel(&self.socket)).max_decoding_message_size(MESSAGE)
    }

    async fn list(
        &self,
        client: &mut RuntimeServiceClient<Channel>,
    ) -> Result<Vec<v1::PodSandbox>, CriError> {
        let asked = client.list_pod_sandbox(v1::ListPodSandboxRequest {});
        let answer = timed(self.limit, asked).await;
        Ok(answer.map_err(|it| self.error(it))?.items)
    }

    async fn addresses_of(
        &self,
        client: &mut RuntimeServiceClient<Channel>,
        id: &str,
    ) -> Result<Vec<Addr>, CriError> {
        let request = v1::PodSandboxStatusRequest {
            pod_sandbox_id: id.to_owned(),
        };
        let asked = client.pod_sandbox_status(request);
        let answer = match timed(self.limit, asked).await {
            Ok(answer) => answer,
            // The sandbox was removed after it was listed, so it has no addresses any more.
            Err(status) if status.code() == tonic::Code::NotFound => return Ok(Vec::new()),
            Err(status) => return Err(self.error(status)),
        };
        let network = answer.status.and_then(|it| it.network).unwrap_or_default();
        let more = network.additional_ips.into_iter().map(|it| it.ip);
        let all = std::iter::once(network.ip).chain(more);
        Ok(all.filter_map(|it| Addr::parse_lenient(&it)).collect())
    }

    fn error(&self, source: tonic::Status) -> CriError {
        CriError {
            socket: self.socket.clone(),
            source,
        }
    }
}

async fn timed<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, tonic::Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(tonic::Status::deadline_exceeded(format!(
            "no answer within {limit:?}"
        ))),
    }
}

/// Returns a channel to a unix socket. The channel connects when it is first used.
pub(super) fn channel(path: &Path) -> Channel {
    let path = path.to_owned();
    // The host name is never resolved, because the connector always connects to the socket.
    Endpoint::from_static("http://localhost")
        .connect_timeout(Duration::from_secs(5))
        .connect_with_connector_lazy(service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::fake::{Behavior, Fake, State};
    use super::*;
    use crate::files::temp_folder;

    const SOON: Duration = Duration::from_millis(300);

    fn runtime(path: &Path) -> Runtime {
        Runtime {
            limit: SOON,
            ..Runtime::new(path)
        }
    }

    #[tokio::test]
    async fn sandboxes_come_with_their_pods_and_addresses() {
        let folder = temp_folder();
        let path = folder.join("cri.sock");
        let fake = Fake::start(&path, State::default());
        fake.state.add("one", "u1");
        fake.state.add("gone-since", "u2");
        let runtime = runtime(&path);
        let ids: Vec<String> = runtime.sandboxes().await.unwrap().into_iter().collect();
        assert_eq!(ids, ["gone-since", "one"]);
        let all = runtime.addresses().await.unwrap();
        let addresses: Vec<String> = all[0].addresses.iter().map(ToString::to_string).collect();
        assert_eq!((all[0].id.as_str(), all[0].pod.uid.as_str()), ("one", "u1"));
        assert_eq!(addresses, ["10.0.0.3", "fd00::3"]);
        assert!(all[1].addresses.is_empty(), "removed since it was listed");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn a_runtime_without_an_answer_is_an_error_in_time_and_can_be_asked_again() {
        let folder = temp_folder();
        let path = folder.join("cri.sock");
        let fake = Fake::start(&path, State::default());
        fake.state.add("one", "u1");
        let runtime = runtime(&path);
        for (behavior, says) in [
            // A runtime that answers, but only after the time limit.
            (Behavior::Slow(20 * SOON), "no answer within 300ms"),
            (Behavior::Failing(tonic::Code::Internal), "is not well"),
            (Behavior::Failing(tonic::Code::Unimplemented), "is not well"),
            (Behavior::Failing(tonic::Code::NotFound), "is not well"),
        ] {
            fake.state.set(behavior.clone());
            for error in [
                runtime.sandboxes().await.unwrap_err(),
                runtime.addresses().await.unwrap_err(),
            ] {
                let text = error.to_string();
                assert!(text.contains(says), "{behavior:?}: {text}");
                assert!(text.contains("check --cri-socket") && text.contains("cri.sock"));
            }
        }
        fake.state.set(Behavior::Healthy);
        assert_eq!(runtime.sandboxes().await.unwrap().len(), 1);
        let fake = fake.restart().await;
        assert_eq!(runtime.sandboxes().await.unwrap().len(), 1);
        fake.kill().await;
        let error = runtime.sandboxes().await.unwrap_err().to_string();
        assert!(error.contains("does not answer"), "{error}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn another_server_on_the_socket_is_an_error() {
        let folder = temp_folder();
        let path = folder.join("cri.sock");
        let runtime = runtime(&path);
        assert!(runtime.sandboxes().await.is_err(), "no socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n").unwrap();
            listener
        });
        let error = runtime.sandboxes().await.unwrap_err().to_string();
        assert!(error.contains("does not answer"), "{error}");
        // From here on the runtime accepts connections but never answers, so each call ends at its time limit.
        let _silent = server.join().unwrap();
        let error = runtime.sandboxes().await.unwrap_err().to_string();
        assert!(error.contains("no answer within"), "{error}");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
