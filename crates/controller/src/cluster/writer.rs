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

use super::convert;
use super::lease_task::Gate;
use super::node_patch::{assign_patch, touch_patch};
use super::request::{Outcome, Outgoing, Refusal, Request};
use super::seen::SubnetCondition;
use crate::bootstrap::KUBEADM;
use cadastre_api::{
    FIELD_MANAGER, GROUP, IPAMBlockLite, IPPool, IPPoolLite, NodeLite, NodeSubnet, NodeSubnetLite,
    PodLite, VERSION,
};
use cadastre_core::mutation::Mutation;
use cadastre_daemon::lists;
use cadastre_daemon::retry_after::heard;

const NODE_SUBNETS: &str = "nodesubnets";
const IPAM_BLOCKS: &str = "ipamblocks";
const IP_POOLS: &str = "ippools";

/// Longest wait for one object.
const ONE: Duration = Duration::from_secs(10);
/// Longest wait for a list of all objects of a kind.
const MANY: Duration = Duration::from_secs(60);
/// Longest wait for more of it.
const SILENCE: Duration = Duration::from_secs(30);
/// Objects a page of it.
const PAGE: u32 = 500;

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
        let is_write = outgoing.request.is_write();
        match tokio::time::timeout(limit, heard(Box::pin(self.call(outgoing.request)))).await {
            Ok((Ok(outcome), _)) => outcome,
            Ok((Err(error), pause)) => classify(error, pause, is_write),
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
            Request::ListNodes => {
                let list = lists::all(&nodes, PAGE, SILENCE, convert::node).await;
                listed(list, Outcome::Nodes)?
            }
            Request::ListSubnets => {
                let list = lists::all(&subnets, PAGE, SILENCE, convert::subnet).await;
                listed(list, Outcome::Subnets)?
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
            Request::SetSubnetConditions {
                name,
                uid,
                version,
                conditions,
            } => {
                let now = jiff::Timestamp::now().to_string();
                let body = Patch::Merge(conditions_patch(&uid, version, &conditions, &now));
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
                let list = lists::all(&blocks, PAGE, SILENCE, convert::block).await;
                listed(list, Outcome::Blocks)?
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

/// Replaces the conditions of that version of a NodeSubnet. One that is new is so since `now`.
fn conditions_patch(uid: &str, version: u64, conditions: &[SubnetCondition], now: &str) -> Value {
    let conditions = conditions.iter().map(|it| {
        let mut condition = json!({
            "type": &*it.kind,
            "status": &*it.status,
            "reason": &*it.reason,
            "message": &it.message,
            "lastTransitionTime": if it.since.is_empty() { now } else { &*it.since },
        });
        if let Some(generation) = it.generation {
            condition["observedGeneration"] = generation.into();
        }
        condition
    });
    json!({
        "metadata": {"uid": uid, "resourceVersion": version.to_string()},
        "status": {"conditions": conditions.collect::<Vec<_>>()},
    })
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

fn listed<T>(
    list: Result<Vec<T>, lists::Error>,
    outcome: impl FnOnce(Vec<T>) -> Outcome,
) -> Result<Outcome, Error> {
    match list {
        Ok(objects) => Ok(outcome(objects)),
        Err(lists::Error::Api(error)) => Err(error),
        Err(error) => Ok(Outcome::Unclear(error.to_string())),
    }
}

/// An object in the answer is kept by somebody's finalizer: look again later.
fn deleted<T>(kept: Option<T>) -> Outcome {
    kept.map_or(Outcome::Gone, |_| Outcome::Refused(Refusal::Busy(None)))
}

/// What an error says of the outcome, and `pause` is what the answer's header asked for.
fn classify(error: Error, pause: Option<Duration>, is_write: bool) -> Outcome {
    let Error::Api(status) = error else {
        return Outcome::Unclear(error.to_string());
    };
    match status.code {
        409 => Outcome::Refused(Refusal::Guard(status.message.clone())),
        422 if is_of_a_guard(&status) => Outcome::Refused(Refusal::Guard(status.message.clone())),
        404 => Outcome::Refused(Refusal::Missing),
        429 => {
            let after = status
                .details
                .as_ref()
                .map(|details| details.retry_after_seconds)
                .filter(|after| *after > 0);
            let after = after.map(|seconds| Duration::from_secs(seconds.into()));
            Outcome::Refused(Refusal::Busy(after.max(pause)))
        }
        400..=499 => Outcome::Refused(Refusal::Rejected(status.message.clone())),
        // Of a write nobody knows whether it took effect: the read that follows it hears of the pause, too.
        503 if pause.is_some() && !is_write => Outcome::Refused(Refusal::Busy(pause)),
        _ if Mutation::ServerErrorCountsAsRefusal.is_on() => Outcome::Refused(Refusal::Missing),
        _ => Outcome::Unclear(format!("{} {}", status.code, status.message)),
    }
}

/// Whether it was the guard of a write that failed, and not a policy, a webhook or the schema that refuses it:
/// these name causes, a failed `test` of a JSON Patch names none, and a UID or version that is another one now
/// is a cause in the metadata.
fn is_of_a_guard(status: &kube::core::Status) -> bool {
    let mut causes = status.details.iter().flat_map(|it| &it.causes);
    let of_webhook = status.message.contains("admission webhook");
    !of_webhook && causes.all(|cause| cause.field.starts_with("metadata."))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::sync::watch;

    use super::*;
    use crate::cluster::agent_report;
    use crate::cluster::lease::{Leadership, Takeover, Tenure};
    use crate::cluster::request::RequestId;
    use cadastre_api::NodeSubnetSpec;
    use cadastre_daemon::clock::Clock;

    fn api_error(code: u16) -> Error {
        Error::Api(Box::new(kube::core::Status {
            code,
            message: "why".into(),
            ..kube::core::Status::default()
        }))
    }

    #[test]
    fn a_policy_is_told_from_a_failed_guard() {
        let says = |status: Value| {
            let status: kube::core::Status = serde_json::from_value(status).unwrap();
            classify(Error::Api(Box::new(status)), None, true)
        };
        let is_guard = |status| match says(status) {
            Outcome::Refused(Refusal::Guard(_)) => true,
            Outcome::Refused(Refusal::Rejected(_)) => false,
            other => panic!("{other:?}"),
        };
        let policy = "ippools.cadastre.dev \"p\" is forbidden: ValidatingAdmissionPolicy 'x' with binding 'x' denied request: no";
        let invalid = |message: &str, causes: Value| json!({"code": 422, "reason": "Invalid", "message": message, "details": {"causes": causes}});
        assert!(!is_guard(invalid(policy, json!([{"message": policy}]))));
        let schema =
            json!([{"reason": "FieldValueInvalid", "message": "no", "field": "spec.pool"}]);
        assert!(!is_guard(invalid("is invalid", schema)));
        let webhook = "admission webhook \"x\" denied the request: no";
        assert!(!is_guard(invalid(webhook, json!([]))));
        let test = "the server rejected our request due to an error in our request";
        assert!(is_guard(invalid(test, json!([]))));
        let uid = json!([{"reason": "FieldValueInvalid", "message": "immutable", "field": "metadata.uid"}]);
        assert!(is_guard(invalid("is invalid", uid)));
    }

    #[test]
    fn the_pause_of_the_header_counts() {
        let pause = Some(Duration::from_secs(7));
        for (code, is_write) in [(429, true), (503, false)] {
            let busy = classify(api_error(code), pause, is_write);
            let Outcome::Refused(Refusal::Busy(after)) = busy else {
                panic!("{busy:?}");
            };
            assert_eq!(after, pause, "{code}");
        }
        // It may have taken effect.
        let write = classify(api_error(503), pause, true);
        assert!(matches!(write, Outcome::Unclear(_)), "{write:?}");
    }

    #[test]
    fn only_a_plain_refusal_counts_as_no_effect() {
        for code in [409, 422] {
            assert!(
                matches!(
                    classify(api_error(code), None, true),
                    Outcome::Refused(Refusal::Guard(_))
                ),
                "{code}"
            );
        }
        assert!(matches!(
            classify(api_error(404), None, true),
            Outcome::Refused(Refusal::Missing)
        ));
        assert!(matches!(
            classify(api_error(403), None, true),
            Outcome::Refused(Refusal::Rejected(_))
        ));
        assert!(matches!(
            classify(api_error(429), None, true),
            Outcome::Refused(Refusal::Busy(_))
        ));
        for code in [500, 502, 503, 504] {
            assert!(
                matches!(classify(api_error(code), None, true), Outcome::Unclear(_)),
                "{code}"
            );
        }
    }

    /// Sends a creation under term `1-a`, which lasts for that long if at all, to a server that takes
    /// connections and answers nothing. Says also whether it was connected to.
    async fn sent(leads_for: Option<Duration>) -> (Outcome, bool) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}", server.local_addr().unwrap());
        let client = Client::try_from(kube::Config::new(uri.parse().unwrap())).unwrap();
        let (publish, leadership) = watch::channel(Leadership::Standby { leader: None });
        let writer = Writer::new(client, Gate::new(leadership, Clock));
        let request = Request::CreateSubnet {
            name: "n".into(),
            spec: NodeSubnetSpec::default(),
        };
        let outgoing = Outgoing {
            id: RequestId(1),
            request,
            term: Some("1-a".into()),
            loop_name: "subnet",
            number: 0,
        };
        if let Some(leads_for) = leads_for {
            publish.send_replace(Leadership::Leading(Tenure {
                term: "1-a".into(),
                takeover: Takeover::First,
                valid_until: Clock.now() + leads_for,
                vacant: Duration::ZERO,
                inherited: None,
                answered_since: Duration::ZERO,
                named: 0,
            }));
        }
        let outcome = writer.send(outgoing).await;
        server.set_nonblocking(true).unwrap();
        (outcome, server.accept().is_ok())
    }

    #[test]
    fn conditions_are_written_as_they_were_read_onto_the_version_that_was_read() {
        let conditions = json!([{
            "type": "OfSomebodyElse", "status": "Unknown", "reason": "Why", "message": "", "observedGeneration": 4,
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }]);
        let report = agent_report::read(&json!({"conditions": conditions})).unwrap();
        let patch = conditions_patch("u", 7, &report.conditions, "now");
        let metadata = json!({"uid": "u", "resourceVersion": "7"});
        assert_eq!(patch["metadata"], metadata);
        assert_eq!(patch["status"], json!({"conditions": conditions}));
    }

    #[tokio::test]
    async fn nothing_is_written_without_the_lease() {
        for leads_for in [None, Some(Duration::ZERO)] {
            let (outcome, connected) = sent(leads_for).await;
            assert!(matches!(outcome, Outcome::Refused(Refusal::NotSent)));
            assert!(!connected);
        }
    }

    #[tokio::test]
    async fn a_write_that_is_not_answered_in_time_may_have_come_through() {
        let (outcome, _) = sent(Some(Duration::from_secs(1))).await;
        assert!(matches!(outcome, Outcome::Unclear(_)), "{outcome:?}");
    }
}
