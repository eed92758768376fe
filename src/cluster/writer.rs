//! Requests as HTTP, answers as outcomes.
//!
//! # Guarantees
//! - A write is sent only while the tenure it was decided under is valid, judged at the moment of
//!   sending; its time-out ends with the tenure's validity at the latest.
//! - An outcome is `Refused` only where the API server said so in a way that rules out any effect.
//!   Whatever else goes wrong is `Unclear`.
//! - Every request has a time-out. Nothing is retried here.

use std::time::Duration;

use http::Method;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::DeserializeGuard;
use kube::{Client, Error};
use serde_json::{Value, json};

use super::convert;
use super::lease_task::Gate;
use super::request::{Assignment, Outcome, Refusal, Request, Touch};
use crate::api::{
    FIELD_MANAGER, IPPool, NodeLite, NodeSubnet, NodeSubnetLite, NodeSubnetSpec, PodLite,
    TERM_ANNOTATION,
};
use crate::controller::Outgoing;

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
        let limit = if matches!(outgoing.request, Request::ListNodes | Request::ListSubnets) {
            MANY
        } else {
            ONE
        };
        let limit = match &outgoing.term {
            None => limit,
            Some(term) => match self.gate.remaining(term) {
                Some(left) => limit.min(left),
                None => return Outcome::Refused(Refusal::NotSent),
            },
        };
        match tokio::time::timeout(limit, self.call(outgoing.request)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => classify(error),
            Err(_) => Outcome::Unclear(format!("no answer within {:.1} s", limit.as_secs_f64())),
        }
    }

    async fn call(&self, request: Request) -> Result<Outcome, Error> {
        let nodes: Api<NodeLite> = Api::all(self.client.clone());
        let subnets: Api<NodeSubnetLite> = Api::all(self.client.clone());
        let pools: Api<DeserializeGuard<IPPool>> = Api::all(self.client.clone());
        let post = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
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
                let path = format!(
                    "/api/v1/nodes/{}?fieldManager={FIELD_MANAGER}",
                    assignment.name
                );
                Outcome::Node(convert::node(self.json_patch(&path, &body).await?))
            }
            Request::TouchNode(touch) => {
                let body = touch_patch(&touch);
                let path = format!("/api/v1/nodes/{}?fieldManager={FIELD_MANAGER}", touch.name);
                Outcome::Node(convert::node(self.json_patch(&path, &body).await?))
            }
            Request::CreateSubnet { name, spec } => {
                let subnets: Api<NodeSubnet> = Api::all(self.client.clone());
                let object = NodeSubnet::new(&name, spec);
                Outcome::Subnet(convert::written_subnet(
                    subnets.create(&post, &object).await?,
                ))
            }
            Request::ReplaceSubnet {
                name,
                uid,
                version,
                spec,
            } => Outcome::Subnet(
                self.replace_subnet(&name, &uid, version, spec, &post)
                    .await?,
            ),
            Request::DeleteSubnet { name, uid, version } => {
                let preconditions = Preconditions {
                    uid: Some(uid.to_string()),
                    resource_version: Some(version.to_string()),
                };
                let how = DeleteParams {
                    preconditions: Some(preconditions),
                    ..DeleteParams::default()
                };
                // An object in the answer is kept by somebody's finalizer: look again later.
                let kept = subnets.delete(&name, &how).await?.left();
                kept.map_or(Outcome::Gone, |_| Outcome::Refused(Refusal::Busy(None)))
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

    async fn replace_subnet(
        &self,
        name: &str,
        uid: &str,
        version: u64,
        spec: NodeSubnetSpec,
        post: &PostParams,
    ) -> Result<super::seen::Subnet, Error> {
        let subnets: Api<NodeSubnet> = Api::all(self.client.clone());
        let mut object = NodeSubnet::new(name, spec);
        object.metadata.uid = Some(uid.to_owned());
        object.metadata.resource_version = Some(version.to_string());
        Ok(convert::written_subnet(
            subnets.replace(name, post, &object).await?,
        ))
    }

    async fn json_patch(&self, path: &str, body: &Value) -> Result<NodeLite, Error> {
        let body = serde_json::to_vec(body).map_err(Error::SerdeError)?;
        let request = http::Request::builder()
            .method(Method::PATCH)
            .uri(path)
            .header(http::header::ACCEPT, "application/json")
            .header(http::header::CONTENT_TYPE, "application/json-patch+json")
            .body(body)
            .map_err(Error::HttpError)?;
        self.client.request(request).await
    }
}

/// The guarded write of podCIDRs. `podCIDR` and `podCIDRs` go together: where they differ the API
/// server drops the second family without a word.
fn term_path() -> String {
    format!(
        "/metadata/annotations/{}",
        TERM_ANNOTATION.replace('/', "~1")
    )
}

/// That the term is what was read. A test can only look below a parent that exists.
fn test_term(term: Option<&str>, annotated: bool) -> Value {
    if annotated {
        json!({"op": "test", "path": term_path(), "value": term})
    } else {
        json!({"op": "test", "path": "/metadata/annotations", "value": null})
    }
}

fn touch_patch(touch: &Touch) -> Value {
    let set = if touch.annotated {
        json!({"op": "add", "path": term_path(), "value": &*touch.term})
    } else {
        json!({"op": "add", "path": "/metadata/annotations", "value": {TERM_ANNOTATION: &*touch.term}})
    };
    json!([
        {"op": "test", "path": "/metadata/uid", "value": &*touch.uid},
        test_term(touch.from.as_deref(), touch.annotated),
        set,
    ])
}

fn assign_patch(assignment: &Assignment) -> Value {
    let fence = test_term(assignment.term.as_deref(), assignment.annotated);
    let cidrs: Vec<String> = assignment.cidrs.iter().map(ToString::to_string).collect();
    json!([
        {"op": "test", "path": "/metadata/uid", "value": &*assignment.uid},
        {"op": "test", "path": "/spec/podCIDRs", "value": null},
        fence,
        {"op": "add", "path": "/spec/podCIDR", "value": cidrs.first()},
        {"op": "add", "path": "/spec/podCIDRs", "value": cidrs},
    ])
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
        _ => Outcome::Unclear(format!("{} {}", status.code, status.message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipam::Cidr;

    fn assignment(annotated: bool, term: Option<&str>) -> Assignment {
        Assignment {
            name: "n1".into(),
            uid: "u1".into(),
            term: term.map(Into::into),
            annotated,
            cidrs: ["10.0.1.0/24", "fd00:1::/64"]
                .iter()
                .map(|text| Cidr::parse_strict(text).unwrap())
                .collect(),
        }
    }

    #[test]
    fn the_patch_tests_before_it_writes() {
        let patch = assign_patch(&assignment(true, Some("7-x")));
        assert_eq!(
            patch,
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u1"},
                {"op": "test", "path": "/spec/podCIDRs", "value": null},
                {"op": "test", "path": "/metadata/annotations/cadastre.dev~1term", "value": "7-x"},
                {"op": "add", "path": "/spec/podCIDR", "value": "10.0.1.0/24"},
                {"op": "add", "path": "/spec/podCIDRs", "value": ["10.0.1.0/24", "fd00:1::/64"]},
            ])
        );
        assert_eq!(
            assign_patch(&assignment(true, None))[2]["value"],
            Value::Null
        );
        assert_eq!(
            assign_patch(&assignment(false, None))[2]["path"],
            "/metadata/annotations"
        );
    }

    #[test]
    fn a_touch_tests_the_term_it_replaces() {
        let touch = |annotated, from: Option<&str>| Touch {
            name: "n1".into(),
            uid: "u1".into(),
            from: from.map(Into::into),
            annotated,
            term: "8-y".into(),
        };
        assert_eq!(
            touch_patch(&touch(true, Some("7-x"))),
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u1"},
                {"op": "test", "path": "/metadata/annotations/cadastre.dev~1term", "value": "7-x"},
                {"op": "add", "path": "/metadata/annotations/cadastre.dev~1term", "value": "8-y"},
            ])
        );
        assert_eq!(
            touch_patch(&touch(false, None)),
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u1"},
                {"op": "test", "path": "/metadata/annotations", "value": null},
                {"op": "add", "path": "/metadata/annotations", "value": {"cadastre.dev/term": "8-y"}},
            ])
        );
    }

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
