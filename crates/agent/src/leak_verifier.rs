//! Asks the API, the runtime and the kernel about leak candidates. The API is asked first, because the evidence from
//! the node must be newer than the list of pods.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use kube::api::ListParams;
use kube::{Api, Client};
use tracing::{debug, warn};

use super::cri::{CriError, Runtime, Sandbox};
use super::leaks::{LeakReason, LeakedAttachment, NodeEvidence};
use super::netns;
use super::pods::{Pods, read};
use cadastre_api::PodLite;
use cadastre_daemon::watch::ObjectEvent;
use cadastre_node::Attachment;

/// The time limit of a request for a page of pods.
const LIMIT: Duration = Duration::from_secs(10);
/// The maximum number of pods in a page.
const PAGE: u32 = 50;

/// Asks the sources of proof: the API server, the runtime and the node's network namespaces.
#[derive(Clone)]
pub(crate) struct LeakVerifier {
    pub client: Client,
    /// The name of the Node, whose pods are listed
    pub node: String,
    /// The container runtime; `None` if the agent must not ask it
    pub runtime: Option<Runtime>,
}

impl LeakVerifier {
    /// Returns the candidates that are proven to be leaked. A source that does not answer proves nothing.
    pub(crate) async fn prove(
        &self,
        candidates: Vec<LeakedAttachment>,
        boot: String,
        roots: BTreeSet<PathBuf>,
    ) -> Vec<(Attachment, LeakReason)> {
        let of_pods = candidates.iter().any(|it| it.reason.is_of_pod());
        let pods = if of_pods { self.pods().await } else { None };
        let mut evidence = NodeEvidence {
            boot,
            ..NodeEvidence::default()
        };
        let needs_runtime = |it: &LeakedAttachment| {
            it.reason.asks_runtime() && (!it.reason.is_of_pod() || pods.is_some())
        };
        let is_needed = candidates.iter().any(needs_runtime);
        if let Some(runtime) = self.runtime.as_ref().filter(|_| is_needed) {
            match runtime.sandboxes().await {
                Ok(sandboxes) => evidence.sandboxes = Some(sandboxes),
                Err(error) => warn!("leaked addresses cannot be proven: {error}"),
            }
        }
        let paths = || candidates.iter().map(LeakedAttachment::netns);
        evidence.gone = netns::gone(paths(), &roots);
        evidence.present = netns::present(paths());
        let proven = candidates.into_iter();
        let proven = proven.filter(|it| it.is_proven(pods.as_ref(), &evidence));
        proven.map(|it| (it.record.attachment, it.reason)).collect()
    }

    /// Returns all sandboxes of this node with their addresses. If the agent must not ask the runtime, returns an empty
    /// list.
    pub(crate) async fn sandboxes(&self) -> Result<Vec<Sandbox>, CriError> {
        match &self.runtime {
            Some(runtime) => runtime.addresses().await,
            None => Ok(Vec::new()),
        }
    }

    /// Lists the pods of this node with a consistent list, not from a cache that may be outdated. Returns `None` if a
    /// request fails.
    async fn pods(&self) -> Option<Pods> {
        let api: Api<PodLite> = Api::all(self.client.clone());
        let mut pods = Pods::default();
        let mut params = ListParams::default()
            .fields(&format!("spec.nodeName={}", self.node))
            .limit(PAGE);
        loop {
            let page = match tokio::time::timeout(LIMIT, api.list(&params)).await {
                Ok(Ok(page)) => page,
                Ok(Err(error)) => {
                    debug!("leaked addresses wait: pods cannot be listed: {error}");
                    return None;
                }
                Err(_) => return None,
            };
            for pod in page.items {
                pods.change(ObjectEvent::Applied(read(pod)));
            }
            match page.metadata.continue_.filter(|it| !it.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => break,
            }
        }
        pods.change(ObjectEvent::Listed);
        Some(pods)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::cri::fake::{Behavior, Fake, State};
    use crate::leaks::{LeakClaims, LeakDetector};
    use crate::pods::testing::pod;
    use crate::snapshot::testing::{record, snapshot};
    use cadastre_node::Snapshot;

    /// Returns a client whose API server gives this answer to every request.
    fn api(status: StatusCode, body: &Value) -> Client {
        let body = body.to_string();
        let answer = move |_: Request<Body>| {
            let mut response = Response::new(Body::from(body.clone().into_bytes()));
            *response.status_mut() = status;
            std::future::ready(Ok::<_, Infallible>(response))
        };
        Client::new(tower::service_fn(answer), "default")
    }

    fn listing(uids: &[&str]) -> Value {
        let pod =
            |uid: &&str| json!({"metadata": {"name": uid, "namespace": "default", "uid": uid}});
        let items: Vec<Value> = uids.iter().map(pod).collect();
        json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
    }

    /// Returns leak candidates with these container ids. Their pods are not among the pods that the watch has shown.
    fn candidates(records: &[&str]) -> Vec<LeakedAttachment> {
        let of = |id: &&str| record(id, &format!("uid-{id}"), &["10.0.0.9"]);
        let snapshot = Snapshot {
            attachments: records.iter().map(of).collect(),
            ..snapshot(&[], &[])
        };
        let mut pods = Pods::default();
        pods.change(ObjectEvent::Applied(pod("other", &[], &[])));
        pods.change(ObjectEvent::Listed);
        let evidence = NodeEvidence {
            boot: "boot".to_owned(),
            ..NodeEvidence::default()
        };
        let mut leaks = LeakDetector::new(Duration::ZERO);
        leaks
            .look(
                &snapshot,
                &pods,
                LeakClaims::NONE,
                &evidence,
                Duration::ZERO,
            )
            .due
    }

    /// Returns the container ids of the leaks that these sources prove.
    async fn proven(client: Client, runtime: Option<Runtime>) -> Vec<String> {
        let verifier = LeakVerifier {
            client,
            node: "n1".to_owned(),
            runtime,
        };
        let candidates = candidates(&["c1", "c2"]);
        assert_eq!(candidates.len(), 2);
        let proven = verifier.prove(candidates, "boot".to_owned(), BTreeSet::new());
        let proven = proven.await.into_iter();
        proven.map(|(it, _)| it.container_id).collect()
    }

    #[tokio::test]
    async fn a_leak_is_proven_if_neither_the_runtime_nor_the_api_lists_it() {
        let folder = crate::files::temp_folder();
        let path = folder.join("cri.sock");
        let fake = Fake::start(&path, State::default());
        fake.state.add("c1", "uid-c1");
        let runtime = || Some(Runtime::new(&path));
        let good = StatusCode::OK;
        let without_pods = api(good, &listing(&["other"]));
        assert_eq!(proven(without_pods.clone(), runtime()).await, ["c2"]);
        let live = api(good, &listing(&["other", "uid-c2"]));
        assert!(proven(live, runtime()).await.is_empty(), "the API has it");
        fake.state.remove("c1");
        assert_eq!(proven(without_pods.clone(), runtime()).await, ["c1", "c2"]);
        let fake = fake.restart().await;
        assert_eq!(proven(without_pods, runtime()).await, ["c1", "c2"]);
        fake.kill().await;
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn a_runtime_without_an_answer_proves_nothing() {
        let folder = crate::files::temp_folder();
        let path = folder.join("cri.sock");
        let fake = Fake::start(&path, State::default());
        let without_pods = api(StatusCode::OK, &listing(&["other"]));
        for code in [tonic::Code::Internal, tonic::Code::Unimplemented] {
            fake.state.set(Behavior::Failing(code));
            let proven = proven(without_pods.clone(), Some(Runtime::new(&path))).await;
            assert!(proven.is_empty(), "{code:?}: {proven:?}");
        }
        fake.kill().await;
        for runtime in [Some(Runtime::new(&path)), None] {
            assert!(
                proven(without_pods.clone(), runtime).await.is_empty(),
                "not there"
            );
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[tokio::test]
    async fn an_incomplete_answer_of_the_api_server_proves_nothing() {
        let folder = crate::files::temp_folder();
        let path = folder.join("cri.sock");
        let fake = Fake::start(&path, State::default());
        let refusal = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": 500,
        });
        for client in [
            api(StatusCode::INTERNAL_SERVER_ERROR, &refusal),
            api(StatusCode::FORBIDDEN, &refusal),
            api(StatusCode::OK, &json!({"kind": "PodList", "items": 7})),
            api(StatusCode::OK, &json!("not a list")),
        ] {
            let proven = proven(client, Some(Runtime::new(&path))).await;
            assert!(proven.is_empty(), "{proven:?}");
        }
        assert_eq!(
            fake.state.asked(),
            0,
            "the runtime is not asked without a list of pods"
        );
        fake.kill().await;
        std::fs::remove_dir_all(folder).unwrap();
    }
}
