//! Requests as HTTP, answers as outcomes.
//!
//! # Guarantees
//! - A write is sent only under the tenure it was decided in, and only once the Lease was written for its number:
//!   whoever leads later took the Lease over after the decision. Its time-out ends with the tenure's validity at the
//!   latest.
//! - An outcome is `Refused` only where the API server said so in a way that rules out any effect.
//!   Whatever else goes wrong is `Unclear`.
//! - Every request has a time-out. Nothing is retried here.

use std::time::Duration;

use http::Method;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::{Client, Error};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::agent_report::ACCEPTED;
use super::convert;
use super::lease_task::Gate;
use super::node_patch::{assign_patch, touch_patch};
use super::request::{Outcome, Refusal, Request};
use crate::api::{
    FIELD_MANAGER, GROUP, IPAMBlockLite, IPPool, IPPoolLite, NodeLite, NodeSubnet, NodeSubnetLite,
    PodLite, VERSION,
};
use crate::controller::Outgoing;
use crate::controller::bootstrap::KUBEADM;
use crate::mutation::Mutation;

const NODE_SUBNETS: &str = "nodesubnets";
const IPAM_BLOCKS: &str = "ipamblocks";
const IP_POOLS: &str = "ippools";

/// Longest wait for one object.
const ONE: Duration = Duration::from_secs(10);
/// Longest wait for a list.
const MANY: Duration = Duration::from_secs(60);

/// Sends requests.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    gate: Gate,
}

impl Writer {
    /// A writer that asks `gate` before each write. The client must not retry by itself.
    pub fn new(client: Client, gate: Gate) -> Self {
        Writer { client, gate }
    }

    /// Sends one request and says what became of it.
    pub async fn send(&self, outgoing: Outgoing) -> Outcome {
        let limit = if matches!(
            outgoing.request,
            Request::ListNodes | Request::ListSubnets | Request::ListBlocks
        ) {
            MANY
        } else {
            ONE
        };
        let limit = match &outgoing.term {
            None => limit,
            Some(term) => match self.gate.pass(term, outgoing.number).await {
                Some(left) => limit.min(left),
                None if Mutation::GateNotAsked.is_on() => limit,
                None => return Outcome::Refused(Refusal::NotSent),
            },
        };
        match tokio::time::timeout(limit, self.call(outgoing.request)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => classify(error),
            Err(_) if Mutation::TimeoutCountsAsRefusal.is_on() => {
                Outcome::Refused(Refusal::Missing)
            }
            Err(_) => Outcome::Unclear(format!("no answer within {:.1} s", limit.as_secs_f64())),
        }
    }

    async fn call(&self, request: Request) -> Result<Outcome, Error> {
        let nodes: Api<NodeLite> = Api::all(self.client.clone());
        let subnets: Api<NodeSubnetLite> = Api::all(self.client.clone());
        let pools: Api<IPPoolLite> = Api::all(self.client.clone());
        let blocks: Api<IPAMBlockLite> = Api::all(self.client.clone());
        let patch = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        Ok(match request {
            Request::ListNodes => Outcome::Nodes(
                nodes
                    .list(&ListParams::default())
                    .await?
                    .items
                    .into_iter()
                    .map(convert::node)
                    .collect(),
            ),
            Request::ListSubnets => {
                let list = subnets.list(&ListParams::default()).await?;
                Outcome::Subnets(list.items.into_iter().map(convert::subnet).collect())
            }
            Request::ReadNode { name } => Outcome::Node(convert::node(nodes.get(&name).await?)),
            Request::ReadSubnet { name } => {
                Outcome::Subnet(convert::subnet(subnets.get(&name).await?))
            }
            Request::ReadPool { name } => Outcome::Pool(convert::pool(pools.get(&name).await?)),
            Request::ListPodsOf { node } => {
                let pods: Api<PodLite> = Api::all(self.client.clone());
                let list = pods
                    .list(&ListParams::default().fields(&format!("spec.nodeName={node}")))
                    .await?;
                Outcome::Pods(list.items.into_iter().map(convert::pod).collect())
            }
            Request::AssignPodCidrs(assignment) => {
                let body = assign_patch(&assignment);
                let path = format!("/api/v1/nodes/{}", assignment.name);
                Outcome::Node(convert::node(self.json_patch(&path, &body).await?))
            }
            Request::TouchNode(touch) => {
                let body = touch_patch(&touch);
                let path = format!("/api/v1/nodes/{}", touch.name);
                Outcome::Node(convert::node(self.json_patch(&path, &body).await?))
            }
            Request::CreateSubnet { name, spec } => {
                let object = NodeSubnet::new(&name, spec);
                let made = self.post(NODE_SUBNETS, &object).await?;
                Outcome::Subnet(convert::subnet(made))
            }
            Request::ReplaceSubnet {
                name,
                uid,
                version,
                spec,
            } => {
                let body = spec_patch(&uid, version, &spec);
                let path = format!("/apis/{GROUP}/{VERSION}/{NODE_SUBNETS}/{name}");
                Outcome::Subnet(convert::subnet(self.json_patch(&path, &body).await?))
            }
            Request::DeleteSubnet { name, uid, version } => {
                let how = unchanged(&uid, version);
                deleted(subnets.delete(&name, &how).await?.left())
            }
            Request::SetSubnetCondition {
                name,
                uid,
                accepted,
                message,
            } => {
                let body = json!({
                    "metadata": {"uid": &*uid},
                    "status": {"conditions": [{
                        "type": ACCEPTED,
                        "status": if accepted { "True" } else { "False" },
                        "reason": if accepted { "Understood" } else { "PartlyRefused" },
                        "message": message,
                        "lastTransitionTime": jiff::Timestamp::now(),
                    }]},
                });
                let body = Patch::Merge(body);
                let patched = subnets.patch_status(&name, &patch, &body).await?;
                Outcome::Subnet(convert::subnet(patched))
            }
            Request::ReadKubeadm => {
                let (namespace, name, key) = KUBEADM;
                let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
                let map = maps.get(name).await?;
                Outcome::Kubeadm(map.data.and_then(|mut data| data.remove(key)))
            }
            Request::CreatePool { name, spec } => {
                let object = IPPool::new(&name, *spec);
                Outcome::Pool(convert::pool(self.post(IP_POOLS, &object).await?))
            }
            Request::ListBlocks => {
                let list = blocks.list(&ListParams::default()).await?;
                Outcome::Blocks(list.items.into_iter().map(convert::block).collect())
            }
            Request::ReadBlock { name } => Outcome::Block(convert::block(blocks.get(&name).await?)),
            Request::CreateBlock { name, spec } => {
                let object = convert::block_object(&name, &spec);
                Outcome::Block(convert::block(self.post(IPAM_BLOCKS, &object).await?))
            }
            Request::ReplaceBlock {
                name,
                uid,
                version,
                spec,
            } => {
                let spec = convert::block_object(&name, &spec).spec;
                let body = spec_patch(&uid, version, &spec);
                let path = format!("/apis/{GROUP}/{VERSION}/{IPAM_BLOCKS}/{name}");
                Outcome::Block(convert::block(self.json_patch(&path, &body).await?))
            }
            Request::DeleteBlock { name, uid, version } => {
                let how = unchanged(&uid, version);
                deleted(blocks.delete(&name, &how).await?.left())
            }
            Request::SetPoolFinalizers {
                name,
                uid,
                version,
                finalizers,
            } => {
                let body = json!({"metadata": {
                    "uid": &*uid, "resourceVersion": version.to_string(), "finalizers": finalizers,
                }});
                Outcome::Pool(convert::pool(
                    pools.patch(&name, &patch, &Patch::Merge(body)).await?,
                ))
            }
            Request::SetPoolStatus {
                name,
                uid,
                version,
                status,
            } => {
                let body = json!({
                    "metadata": {"uid": &*uid, "resourceVersion": version.to_string()},
                    "status": status,
                });
                Outcome::Pool(convert::pool(
                    pools
                        .patch_status(&name, &patch, &Patch::Merge(body))
                        .await?,
                ))
            }
        })
    }

    /// What is sent is written whole, what comes back is read in the few fields that count.
    async fn post<T: DeserializeOwned>(
        &self,
        kind: &str,
        object: &impl Serialize,
    ) -> Result<T, Error> {
        let body = serde_json::to_vec(object).map_err(Error::SerdeError)?;
        let uri = format!("/apis/{GROUP}/{VERSION}/{kind}?fieldManager={FIELD_MANAGER}");
        let request = http::Request::builder()
            .method(Method::POST)
            .uri(uri)
            .header(http::header::ACCEPT, "application/json")
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(Error::HttpError)?;
        self.client.request(request).await
    }

    async fn json_patch<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Error> {
        let body = serde_json::to_vec(body).map_err(Error::SerdeError)?;
        let request = http::Request::builder()
            .method(Method::PATCH)
            .uri(format!("{path}?fieldManager={FIELD_MANAGER}"))
            .header(http::header::ACCEPT, "application/json")
            .header(http::header::CONTENT_TYPE, "application/json-patch+json")
            .body(body)
            .map_err(Error::HttpError)?;
        self.client.request(request).await
    }
}

/// Replaces the spec of that version of the object. Labels, annotations and whatever else it has are
/// people's, or of a version of Cadastre that knows more, and stay.
fn spec_patch(uid: &str, version: u64, spec: &impl Serialize) -> Value {
    json!([
        {"op": "replace", "path": "/metadata/uid", "value": uid},
        {"op": "replace", "path": "/metadata/resourceVersion", "value": version.to_string()},
        {"op": "add", "path": "/spec", "value": spec},
    ])
}

fn unchanged(uid: &str, version: u64) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: Some(version.to_string()),
        }),
        ..DeleteParams::default()
    }
}

/// An object in the answer is kept by somebody's finalizer: look again later.
fn deleted<T>(kept: Option<T>) -> Outcome {
    kept.map_or(Outcome::Gone, |_| Outcome::Refused(Refusal::Busy(None)))
}

fn classify(error: Error) -> Outcome {
    let Error::Api(status) = error else {
        return Outcome::Unclear(error.to_string());
    };
    match status.code {
        409 | 422 => Outcome::Refused(Refusal::Guard(status.message.clone())),
        404 => Outcome::Refused(Refusal::Missing),
        429 => {
            let after = status
                .details
                .as_ref()
                .map(|details| details.retry_after_seconds)
                .filter(|after| *after > 0);
            Outcome::Refused(Refusal::Busy(
                after.map(|seconds| Duration::from_secs(seconds.into())),
            ))
        }
        400..=499 => Outcome::Refused(Refusal::Rejected(status.message.clone())),
        _ if Mutation::ServerErrorCountsAsRefusal.is_on() => Outcome::Refused(Refusal::Missing),
        _ => Outcome::Unclear(format!("{} {}", status.code, status.message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api_error(code: u16) -> Error {
        Error::Api(Box::new(kube::core::Status {
            code,
            message: "why".into(),
            ..kube::core::Status::default()
        }))
    }

    #[test]
    fn only_a_plain_refusal_counts_as_no_effect() {
        for code in [409, 422] {
            assert!(
                matches!(
                    classify(api_error(code)),
                    Outcome::Refused(Refusal::Guard(_))
                ),
                "{code}"
            );
        }
        assert!(matches!(
            classify(api_error(404)),
            Outcome::Refused(Refusal::Missing)
        ));
        assert!(matches!(
            classify(api_error(403)),
            Outcome::Refused(Refusal::Rejected(_))
        ));
        assert!(matches!(
            classify(api_error(429)),
            Outcome::Refused(Refusal::Busy(_))
        ));
        for code in [500, 502, 503, 504] {
            assert!(
                matches!(classify(api_error(code)), Outcome::Unclear(_)),
                "{code}"
            );
        }
    }
}
