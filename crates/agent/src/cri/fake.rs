//! A container runtime for tests, which answers with the sandboxes and errors that a test sets.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};

use super::v1;
use super::v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};

/// How the runtime answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Behavior {
    /// Answers with the sandboxes that were added
    #[default]
    Healthy,
    /// Waits for this time, then answers with the sandboxes that were added
    Slow(Duration),
    /// Answers with this error
    Failing(tonic::Code),
}

/// The answers of the runtime, which the fake runtime and the test share.
#[derive(Clone, Default)]
pub(crate) struct State(Arc<Mutex<(Behavior, Vec<v1::PodSandbox>, u32)>>);

/// A running fake runtime. Dropping this value ends the server but leaves the socket file behind, as a killed process
/// does.
pub(crate) struct Fake {
    /// The answers, which are kept over a restart
    pub state: State,
    path: PathBuf,
    server: JoinHandle<()>,
}

impl Fake {
    /// Listens on the socket at `path`, and answers according to `state`.
    pub(crate) fn start(path: &Path, state: State) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let incoming = futures::stream::unfold(listener, async |listener| {
            let peer = listener.accept().await;
            Some((peer.map(|(stream, _)| stream), listener))
        });
        let service = RuntimeServiceServer::new(state.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        let server = tokio::spawn(async move {
            server.serve_with_incoming(incoming).await.unwrap();
        });
        Self {
            state,
            path: path.to_owned(),
            server,
        }
    }

    /// Ends the server without cleaning up, as SIGKILL does, and starts it again on the same socket.
    pub(crate) async fn restart(self) -> Self {
        let (path, state) = (self.path.clone(), self.state.clone());
        self.kill().await;
        Self::start(&path, state)
    }

    /// Ends the server without cleaning up, as SIGKILL does.
    pub(crate) async fn kill(self) {
        self.server.abort();
        let _ = self.server.await;
    }
}

impl State {
    pub(crate) fn set(&self, behavior: Behavior) {
        self.0.lock().unwrap().0 = behavior;
    }

    /// Adds a sandbox of a pod in the namespace `default`.
    pub(crate) fn add(&self, id: &str, pod_uid: &str) {
        let sandbox = v1::PodSandbox {
            id: id.to_owned(),
            metadata: Some(v1::PodSandboxMetadata {
                name: format!("pod-{pod_uid}"),
                uid: pod_uid.to_owned(),
                namespace: "default".to_owned(),
            }),
            state: 0,
        };
        self.0.lock().unwrap().1.push(sandbox);
    }

    pub(crate) fn remove(&self, id: &str) {
        self.0.lock().unwrap().1.retain(|it| it.id != id);
    }

    /// Returns how many times the list of sandboxes was requested.
    pub(crate) fn asked(&self) -> u32 {
        self.0.lock().unwrap().2
    }

    async fn answer(&self) -> Result<Vec<v1::PodSandbox>, Status> {
        let (behavior, sandboxes, _) = self.0.lock().unwrap().clone();
        match behavior {
            Behavior::Healthy => {}
            Behavior::Slow(pause) => tokio::time::sleep(pause).await,
            Behavior::Failing(code) => return Err(Status::new(code, "the runtime is not well")),
        }
        Ok(sandboxes)
    }
}

#[tonic::async_trait]
impl RuntimeService for State {
    async fn list_pod_sandbox(
        &self,
        _: Request<v1::ListPodSandboxRequest>,
    ) -> Result<Response<v1::ListPodSandboxResponse>, Status> {
        self.0.lock().unwrap().2 += 1;
        let items = self.answer().await?;
        Ok(Response::new(v1::ListPodSandboxResponse { items }))
    }

    /// Computes the addresses from the length of the id. A sandbox whose id begins with `gone` counts as removed after
    /// it was listed.
    async fn pod_sandbox_status(
        &self,
        request: Request<v1::PodSandboxStatusRequest>,
    ) -> Result<Response<v1::PodSandboxStatusResponse>, Status> {
        let id = request.into_inner().pod_sandbox_id;
        self.answer().await?;
        if id.starts_with("gone") {
            return Err(Status::not_found("no such sandbox"));
        }
        let network = v1::PodSandboxNetworkStatus {
            ip: format!("10.0.0.{}", id.len()),
            additional_ips: vec![v1::PodIp {
                ip: format!("fd00::{}", id.len()),
            }],
        };
        let status = v1::PodSandboxStatus {
            id,
            network: Some(network),
            ..v1::PodSandboxStatus::default()
        };
        Ok(Response::new(v1::PodSandboxStatusResponse {
            status: Some(status),
        }))
    }
}
