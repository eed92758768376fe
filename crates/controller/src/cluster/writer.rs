//! Sends requests as HTTP and turns answers into outcomes.
//!
//! # Guarantees
//! - A write is sent only in the term in which it was decided, and only after a Lease write with the write's number or
//!   a higher one has succeeded. So every later leader took over after the write was decided. The timeout of a write
//!   ends no later than the term's validity.
//! - An outcome is `Rejected` only if the API server's answer rules out any effect, or the request was never sent. All
//!   other failures of a request are `Indeterminate`.
//! - Every request has a timeout. Nothing is retried here.

use std::fmt::Debug;
use std::time::Duration;

use http::Method;
use http::header::{ACCEPT, CONTENT_TYPE};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, VersionMatch};
use kube::{Client, Error, Resource};
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};

use super::convert;
use super::lease_task::WriteGate;
use super::node_patch::{assign_patch, exhausted_patch, taints_patch, touch_patch};
use super::objects::SubnetCondition;
use super::request::{
    ApiRequest, KnownObject, ObjectKind, ObjectSpec, OutgoingRequest, Rejection, RequestOutcome,
};
use crate::bootstrap::KUBEADM;
use cadastre_api::frr::{FRR_API_VERSION, FRR_PREFIX};
use cadastre_api::ipam_claim::IPAM_CLAIM_API_VERSION;
use cadastre_api::watched::protobuf;
use cadastre_api::{
    FIELD_MANAGER, GROUP, IPClaimLite, IPPool, NodeRoutes, NodeSubnet, PodLite, VERSION,
};
use cadastre_core::mutation::Mutation;
use cadastre_daemon::encoding::Encoding;
use cadastre_daemon::lists;
use cadastre_daemon::retry_after::heard;
use cadastre_daemon::watch::FRR_CONFIGURATIONS;

/// Timeout of every request that does not list all objects of one kind.
const ONE: Duration = Duration::from_secs(10);
/// Timeout of a request that lists all objects of one kind.
const MANY: Duration = Duration::from_secs(60);
/// Maximum time without data while a list is read.
const SILENCE: Duration = Duration::from_secs(30);
/// Objects per page of a list.
const PAGE: u32 = 500;

/// Sends requests to the API server. A write is sent only after [`WriteGate::pass`] has permitted it.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    gate: WriteGate,
    /// The namespace of FRRConfigurations; empty if the controller writes none
    frr_namespace: String,
}

impl Writer {
    /// Creates a writer that asks `gate` before each write. The client must not retry by itself.
    pub fn new(client: Client, gate: WriteGate) -> Self {
        Writer {
            client,
            gate,
            frr_namespace: String::new(),
        }
    }

    /// Sets the namespace in which FRRConfigurations are created, read and changed.
    #[must_use]
    pub fn with_frr_namespace(self, frr_namespace: String) -> Self {
        Writer {
            frr_namespace,
            ..self
        }
    }

    /// Sends one request and returns its outcome. A write waits first until the gate lets it pass.
    pub async fn send(&self, outgoing: OutgoingRequest) -> RequestOutcome {
        let limit = match outgoing.request {
            ApiRequest::List(_) => MANY,
            _ => ONE,
        };
        let limit = match &outgoing.term {
            None => limit,
            Some(term) => match self.gate.pass(term, outgoing.number).await {
                Some(left) => limit.min(left),
                None if Mutation::GateNotAsked.is_on() => limit,
                None => return RequestOutcome::Rejected(Rejection::NotSent),
            },
        };
        let is_write = outgoing.request.is_write();
        match tokio::time::timeout(limit, heard(Box::pin(self.call(outgoing.request)))).await {
            Ok((Ok(outcome), _)) => outcome,
            Ok((Err(error), pause)) => classify(error, pause, is_write),
            Err(_) if Mutation::TimeoutCountsAsRejection.is_on() => {
                RequestOutcome::Rejected(Rejection::Missing)
            }
            Err(_) => RequestOutcome::Indeterminate(format!(
                "no answer within {:.1} s",
                limit.as_secs_f64()
            )),
        }
    }

    async fn call(&self, request: ApiRequest) -> Result<RequestOutcome, Error> {
        match request {
            ApiRequest::List(kind) => self.list(kind).await,
            ApiRequest::Read(kind, name) => {
                self.object(kind, RequestMethod::Get, &self.path(kind, &name))
                    .await
            }
            ApiRequest::ListPodsOf {
                node,
                not_older_than,
            } => {
                let pods: Api<PodLite> = Api::all(self.client.clone());
                let bound = ListParams::default().fields(&format!("spec.nodeName={node}"));
                let bound = match not_older_than {
                    None => bound,
                    Some(revision) => bound
                        .at(&revision.to_string())
                        .matching(VersionMatch::NotOlderThan),
                };
                let list = pods.list(&bound).await?;
                let shown = list.metadata.resource_version;
                let shown = shown.filter(|_| not_older_than.is_none());
                let revision = shown.and_then(|it| it.parse().ok());
                let pods = list.items.into_iter().map(convert::pod).collect();
                Ok(RequestOutcome::Pods(pods, revision))
            }
            ApiRequest::ReadIpamClaim(name) => {
                let request = RequestMethod::Get.request(&ipam_claim_path(&name))?;
                let claim = self.client.request(request).await?;
                Ok(RequestOutcome::IpamClaim(convert::ipam_claim(claim)))
            }
            ApiRequest::FillIpamClaim(known, ips) => {
                // Other programs may write other fields of the status.
                let (uid, version) = (&*known.uid, known.version.to_string());
                let expected = json!({"uid": uid, "resourceVersion": version});
                let patch = json!({"metadata": expected, "status": ips});
                let patch = RequestMethod::MergePatch(patch);
                let request = patch.request(&(ipam_claim_path(&known.name) + "/status"))?;
                let claim = self.client.request(request).await?;
                Ok(RequestOutcome::IpamClaim(convert::ipam_claim(claim)))
            }
            ApiRequest::ReadKubeadm => {
                let (namespace, name, key) = KUBEADM;
                let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
                let data = maps.get(name).await?.data;
                Ok(RequestOutcome::Kubeadm(
                    data.and_then(|mut it| it.remove(key)),
                ))
            }
            ApiRequest::Create(name, spec) => {
                let kind = spec.kind();
                let object = object(&name, spec).map_err(Error::SerdeError)?;
                let path = self.collection_of(kind, &name);
                self.object(kind, RequestMethod::Post(object), &path).await
            }
            ApiRequest::Replace(known, spec) => {
                let kind = spec.kind();
                let mut object = object(&known.name, spec).map_err(Error::SerdeError)?;
                let mut patch = spec_patch(&known, &object["spec"].take());
                let strips = matches!(
                    kind,
                    ObjectKind::Routes | ObjectKind::Subnet | ObjectKind::Block
                );
                if let (true, Some(patch)) = (strips, patch.as_array_mut()) {
                    // From this write on, the API server keeps no managed fields, which would be half of the object.
                    // Every node receives every NodeRoutes, each write of a status stores the whole NodeSubnet, and the
                    // API server decodes a block several times to delete it.
                    let none =
                        json!({"op": "add", "path": "/metadata/managedFields", "value": [{}]});
                    patch.push(none);
                }
                self.patch(kind, &known.name, patch).await
            }
            ApiRequest::Delete(kind, known) => {
                let precondition = json!({"preconditions": {
                    "uid": &*known.uid, "resourceVersion": known.version.to_string(),
                }});
                let request =
                    RequestMethod::Delete(precondition).request(&self.path(kind, &known.name))?;
                if kind == ObjectKind::Claim {
                    // A claim with a finalizer still exists after the deletion was requested. In this case, the answer
                    // contains the claim, with its deletion time.
                    let answer = self.client.request_status::<IPClaimLite>(request).await?;
                    let kept = answer.left().map(convert::claim);
                    return Ok(kept.map_or(RequestOutcome::Gone, RequestOutcome::Claim));
                }
                let answer = self.client.request_status::<IgnoredAny>(request).await?;
                Ok(deleted(answer.left()))
            }
            ApiRequest::AssignPodCidrs(it) => {
                self.patch(ObjectKind::Node, &it.name, assign_patch(&it))
                    .await
            }
            ApiRequest::TouchNode(it) => {
                self.patch(ObjectKind::Node, &it.name, touch_patch(&it))
                    .await
            }
            ApiRequest::Evict(pod) => {
                let (namespace, name) = pod.name.split_once('/').unwrap_or_default();
                let eviction = json!({
                    "apiVersion": "policy/v1", "kind": "Eviction",
                    "metadata": {"namespace": namespace, "name": name},
                    "deleteOptions": {"preconditions": {
                        "uid": &*pod.uid, "resourceVersion": pod.version.to_string(),
                    }},
                });
                let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction");
                let request = RequestMethod::Post(eviction).request(&path)?;
                self.client.request_status::<IgnoredAny>(request).await?;
                Ok(RequestOutcome::Gone)
            }
            ApiRequest::SetTaints(change) => {
                self.patch(ObjectKind::Node, &change.name, taints_patch(&change))
                    .await
            }
            ApiRequest::SetExhausted(change) => {
                let now = jiff::Timestamp::now().to_string();
                let patch = RequestMethod::StrategicMergePatch(exhausted_patch(&change, &now));
                let path = self.path(ObjectKind::Node, &change.name) + "/status";
                self.object(ObjectKind::Node, patch, &path).await
            }
            ApiRequest::SetSubnetConditions(known, conditions) => {
                let now = jiff::Timestamp::now().to_string();
                let patch = conditions_patch(&conditions, &now);
                self.merge(ObjectKind::Subnet, &known, "/status", patch)
                    .await
            }
            ApiRequest::SetFinalizers(kind, known, finalizers) => {
                let patch = json!({"metadata": {"finalizers": finalizers}});
                self.merge(kind, &known, "", patch).await
            }
            ApiRequest::SetClaimStatus(known, status) => {
                let patch = replaced_status(&known, &status);
                let path = self.path(ObjectKind::Claim, &known.name) + "/status";
                self.object(ObjectKind::Claim, RequestMethod::JsonPatch(patch), &path)
                    .await
            }
            ApiRequest::SetPoolStatus(known, status) => {
                let patch = json!({"status": status});
                self.merge(ObjectKind::Pool, &known, "/status", patch).await
            }
        }
    }

    async fn list(&self, kind: ObjectKind) -> Result<RequestOutcome, Error> {
        match kind {
            ObjectKind::Node => {
                let encoding = Encoding::Protobuf(protobuf::node);
                let all = self.all_in(encoding, convert::node).await;
                listed(all, RequestOutcome::Nodes)
            }
            ObjectKind::Subnet => listed(self.all(convert::subnet).await, RequestOutcome::Subnets),
            ObjectKind::Block => listed(self.all(convert::block).await, RequestOutcome::Blocks),
            ObjectKind::Pool => listed(self.all(convert::pool).await, RequestOutcome::Pools),
            ObjectKind::Claim => listed(self.all(convert::claim).await, RequestOutcome::Claims),
            ObjectKind::Routes => {
                listed(self.all(convert::routes).await, RequestOutcome::RoutesList)
            }
            ObjectKind::FrrConfiguration => {
                let all = self.all(convert::frr_configuration).await;
                listed(all, |mut all| {
                    all.retain(|it| it.is_ours);
                    RequestOutcome::FrrConfigurations(all)
                })
            }
            ObjectKind::Pod => {
                let encoding = Encoding::Protobuf(protobuf::pod);
                let all = self.all_in(encoding, convert::pod).await;
                listed(all, |pods| RequestOutcome::Pods(pods, None))
            }
        }
    }

    async fn all<K, T>(&self, read: impl Fn(K) -> T) -> Result<Vec<T>, lists::ListError>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
    {
        self.all_in(Encoding::Json, read).await
    }

    async fn all_in<K, T>(
        &self,
        encoding: Encoding<K>,
        read: impl Fn(K) -> T,
    ) -> Result<Vec<T>, lists::ListError>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
    {
        let api = Api::all(self.client.clone());
        lists::all(&api, encoding, PAGE, SILENCE, read).await
    }

    /// Returns the path of the collection in which an object is created. The name of a claim contains its namespace.
    fn collection_of(&self, kind: ObjectKind, name: &str) -> String {
        match (kind, name.split_once('/')) {
            (ObjectKind::Claim, Some((namespace, _))) => {
                format!("/apis/{GROUP}/{VERSION}/namespaces/{namespace}/ipclaims")
            }
            (ObjectKind::FrrConfiguration, _) => format!(
                "/apis/{FRR_API_VERSION}/namespaces/{}/{FRR_CONFIGURATIONS}",
                self.frr_namespace
            ),
            _ => collection(kind),
        }
    }

    /// Returns the path of an object. The name of a claim contains its namespace. `name` of an FRRConfiguration is the
    /// name of its node.
    fn path(&self, kind: ObjectKind, name: &str) -> String {
        let collection = self.collection_of(kind, name);
        let own_name = name.split_once('/').map_or(name, |(_, name)| name);
        match kind {
            ObjectKind::FrrConfiguration => format!("{collection}/{FRR_PREFIX}{own_name}"),
            _ => format!("{collection}/{own_name}"),
        }
    }

    /// Sends a JSON Patch, whose operations include the guards.
    async fn patch(
        &self,
        kind: ObjectKind,
        name: &str,
        patch: Value,
    ) -> Result<RequestOutcome, Error> {
        self.object(
            kind,
            RequestMethod::JsonPatch(patch),
            &self.path(kind, name),
        )
        .await
    }

    /// Sends a merge patch that takes effect only on the version in `known`. `part` is `/status` or empty.
    async fn merge(
        &self,
        kind: ObjectKind,
        known: &KnownObject,
        part: &str,
        patch: Value,
    ) -> Result<RequestOutcome, Error> {
        let path = self.path(kind, &known.name) + part;
        self.object(kind, RequestMethod::MergePatch(onto(known, patch)), &path)
            .await
    }

    /// Sends a request for one object. Extracts from the object in the answer only the fields that decisions need.
    async fn object(
        &self,
        kind: ObjectKind,
        verb: RequestMethod,
        path: &str,
    ) -> Result<RequestOutcome, Error> {
        let (client, request) = (&self.client, verb.request(path)?);
        Ok(match kind {
            ObjectKind::Node => RequestOutcome::Node(convert::node(client.request(request).await?)),
            ObjectKind::Subnet => {
                RequestOutcome::Subnet(convert::subnet(client.request(request).await?))
            }
            ObjectKind::Routes => {
                RequestOutcome::Routes(convert::routes(client.request(request).await?))
            }
            ObjectKind::FrrConfiguration => {
                let object = client.request(request).await?;
                RequestOutcome::FrrConfiguration(convert::frr_configuration(object))
            }
            ObjectKind::Block => {
                RequestOutcome::Block(convert::block(client.request(request).await?))
            }
            ObjectKind::Pool => RequestOutcome::Pool(convert::pool(client.request(request).await?)),
            ObjectKind::Claim => {
                RequestOutcome::Claim(convert::claim(client.request(request).await?))
            }
            ObjectKind::Pod => {
                let pod = convert::pod(client.request(request).await?);
                RequestOutcome::Pods(vec![pod], None)
            }
        })
    }
}

/// Method and body of a request for one object.
enum RequestMethod {
    Get,
    Post(Value),
    JsonPatch(Value),
    MergePatch(Value),
    StrategicMergePatch(Value),
    Delete(Value),
}

impl RequestMethod {
    fn request(self, path: &str) -> Result<http::Request<Vec<u8>>, Error> {
        let (method, form, body) = match self {
            RequestMethod::Get => (Method::GET, "json", None),
            RequestMethod::Post(body) => (Method::POST, "json", Some(body)),
            RequestMethod::JsonPatch(body) => (Method::PATCH, "json-patch+json", Some(body)),
            RequestMethod::MergePatch(body) => (Method::PATCH, "merge-patch+json", Some(body)),
            RequestMethod::StrategicMergePatch(body) => {
                (Method::PATCH, "strategic-merge-patch+json", Some(body))
            }
            RequestMethod::Delete(body) => (Method::DELETE, "json", Some(body)),
        };
        let names_manager = matches!(method, Method::POST | Method::PATCH);
        let query = names_manager.then(|| format!("?fieldManager={FIELD_MANAGER}"));
        let body = body.map(|body| serde_json::to_vec(&body)).transpose();
        http::Request::builder()
            .method(method)
            .uri(path.to_owned() + &query.unwrap_or_default())
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, format!("application/{form}"))
            .body(body.map_err(Error::SerdeError)?.unwrap_or_default())
            .map_err(Error::HttpError)
    }
}

/// Returns the path of the collection of all objects of a kind of Cadastre or of Kubernetes.
fn collection(kind: ObjectKind) -> String {
    let plural = kind.plural();
    match kind {
        ObjectKind::Node | ObjectKind::Pod => format!("/api/v1/{plural}"),
        ObjectKind::FrrConfiguration => format!("/apis/{FRR_API_VERSION}/{plural}"),
        _ => format!("/apis/{GROUP}/{VERSION}/{plural}"),
    }
}

/// Returns the path of an IPAMClaim. `name` is `namespace/name`.
fn ipam_claim_path(name: &str) -> String {
    let (namespace, name) = name.split_once('/').unwrap_or_default();
    format!("/apis/{IPAM_CLAIM_API_VERSION}/namespaces/{namespace}/ipamclaims/{name}")
}

/// Returns a new object with this name and spec as JSON.
fn object(name: &str, spec: ObjectSpec) -> serde_json::Result<Value> {
    match spec {
        ObjectSpec::Subnet(spec) => serde_json::to_value(NodeSubnet::new(name, spec)),
        ObjectSpec::Routes(spec) => serde_json::to_value(NodeRoutes::new(name, spec)),
        ObjectSpec::FrrConfiguration(spec) => Ok(convert::frr_object(name, &spec)),
        ObjectSpec::Block(spec) => serde_json::to_value(convert::block_object(name, &spec)),
        ObjectSpec::Pool(spec) => serde_json::to_value(IPPool::new(name, *spec)),
        ObjectSpec::Claim(new) => serde_json::to_value(convert::claim_object(name, *new)),
    }
}

/// Returns the JSON Patch that replaces the spec if the object still has the version in `known`. Labels, annotations
/// and other fields are not changed, because they belong to users, or to a later version of Cadastre.
fn spec_patch(known: &KnownObject, spec: &Value) -> Value {
    json!([
        {"op": "replace", "path": "/metadata/uid", "value": &*known.uid},
        {"op": "replace", "path": "/metadata/resourceVersion", "value": known.version.to_string()},
        {"op": "add", "path": "/spec", "value": spec},
    ])
}

/// Returns the JSON Patch that replaces the status if the object still has the version in `known`. Fields that are
/// absent from `status` are removed.
fn replaced_status(known: &KnownObject, status: &impl Serialize) -> Value {
    json!([
        {"op": "replace", "path": "/metadata/uid", "value": &*known.uid},
        {"op": "replace", "path": "/metadata/resourceVersion", "value": known.version.to_string()},
        {"op": "add", "path": "/status", "value": status},
    ])
}

/// Adds guards to a merge patch. The API server rejects the patch if the UID or version of the object differs from the
/// one in `known`.
fn onto(known: &KnownObject, mut patch: Value) -> Value {
    patch["metadata"]["uid"] = (*known.uid).into();
    patch["metadata"]["resourceVersion"] = known.version.to_string().into();
    patch
}

/// Returns the patch that replaces all conditions. A condition without a transition time gets the time `now`.
fn conditions_patch(conditions: &[SubnetCondition], now: &str) -> Value {
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
    json!({"status": {"conditions": conditions.collect::<Vec<_>>()}})
}

fn listed<T>(
    list: Result<Vec<T>, lists::ListError>,
    outcome: impl FnOnce(Vec<T>) -> RequestOutcome,
) -> Result<RequestOutcome, Error> {
    match list {
        Ok(objects) => Ok(outcome(objects)),
        Err(lists::ListError::Api(error)) => Err(error),
        Err(error) => Ok(RequestOutcome::Indeterminate(error.to_string())),
    }
}

/// Returns the outcome of a deletion. If the answer contains the object, a finalizer keeps the object, so the deletion
/// must be tried again later.
fn deleted<T>(kept: Option<T>) -> RequestOutcome {
    kept.map_or(RequestOutcome::Gone, |_| {
        RequestOutcome::Rejected(Rejection::Busy(None))
    })
}

/// Returns the outcome of a request that failed. `pause` is the delay that the answer's header asks for.
fn classify(error: Error, pause: Option<Duration>, is_write: bool) -> RequestOutcome {
    let Error::Api(status) = error else {
        return RequestOutcome::Indeterminate(error.to_string());
    };
    match status.code {
        409 => RequestOutcome::Rejected(Rejection::Guard(status.message.clone())),
        422 if is_of_a_guard(&status) => {
            RequestOutcome::Rejected(Rejection::Guard(status.message.clone()))
        }
        404 => RequestOutcome::Rejected(Rejection::Missing),
        429 => {
            let after = status
                .details
                .as_ref()
                .map(|details| details.retry_after_seconds)
                .filter(|after| *after > 0);
            let after = after.map(|seconds| Duration::from_secs(seconds.into()));
            RequestOutcome::Rejected(Rejection::Busy(after.max(pause)))
        }
        400..=499 => RequestOutcome::Rejected(Rejection::Rejected(status.message.clone())),
        // A read has no effect, so it can be repeated after the delay. A write may have taken effect in spite of the
        // 503, so its outcome is indeterminate.
        503 if pause.is_some() && !is_write => RequestOutcome::Rejected(Rejection::Busy(pause)),
        _ if Mutation::ServerErrorCountsAsRejection.is_on() => {
            RequestOutcome::Rejected(Rejection::Missing)
        }
        _ => RequestOutcome::Indeterminate(format!("{} {}", status.code, status.message)),
    }
}

/// Returns whether a 422 means that a guard of the write failed. A rejection by a policy, a webhook or the schema names
/// causes in other fields than the metadata. A failed `test` of a JSON Patch names no cause. For a changed UID or
/// version, the cause is in the metadata.
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
    use crate::cluster::lease::{Leadership, LeadershipTerm, Takeover};
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
    fn a_rejection_by_a_policy_is_no_failed_guard() {
        let outcome_of = |status: Value| {
            let status: kube::core::Status = serde_json::from_value(status).unwrap();
            classify(Error::Api(Box::new(status)), None, true)
        };
        let is_guard = |status| match outcome_of(status) {
            RequestOutcome::Rejected(Rejection::Guard(_)) => true,
            RequestOutcome::Rejected(Rejection::Rejected(_)) => false,
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
    fn the_pause_in_the_header_counts() {
        let pause = Some(Duration::from_secs(7));
        for (code, is_write) in [(429, true), (503, false)] {
            let busy = classify(api_error(code), pause, is_write);
            let RequestOutcome::Rejected(Rejection::Busy(after)) = busy else {
                panic!("{busy:?}");
            };
            assert_eq!(after, pause, "{code}");
        }
        // A write that is answered with 503 may have taken effect, so it is indeterminate.
        let write = classify(api_error(503), pause, true);
        assert!(
            matches!(write, RequestOutcome::Indeterminate(_)),
            "{write:?}"
        );
    }

    #[test]
    fn only_a_clear_rejection_counts_as_no_effect() {
        for code in [409, 422] {
            assert!(
                matches!(
                    classify(api_error(code), None, true),
                    RequestOutcome::Rejected(Rejection::Guard(_))
                ),
                "{code}"
            );
        }
        assert!(matches!(
            classify(api_error(404), None, true),
            RequestOutcome::Rejected(Rejection::Missing)
        ));
        assert!(matches!(
            classify(api_error(403), None, true),
            RequestOutcome::Rejected(Rejection::Rejected(_))
        ));
        assert!(matches!(
            classify(api_error(429), None, true),
            RequestOutcome::Rejected(Rejection::Busy(_))
        ));
        for code in [500, 502, 503, 504] {
            assert!(
                matches!(
                    classify(api_error(code), None, true),
                    RequestOutcome::Indeterminate(_)
                ),
                "{code}"
            );
        }
    }

    /// Sends a creation in term `1-a` to a server that accepts connections but never answers. The term is valid for
    /// `leads_for`; with `None` this process does not lead. Returns the outcome, and whether the writer connected.
    async fn sent(leads_for: Option<Duration>) -> (RequestOutcome, bool) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}", server.local_addr().unwrap());
        let client = Client::try_from(kube::Config::new(uri.parse().unwrap())).unwrap();
        let (publish, leadership) = watch::channel(Leadership::Standby { leader: None });
        let writer = Writer::new(client, WriteGate::new(leadership, Clock));
        let request = ApiRequest::Create("n".into(), ObjectSpec::Subnet(NodeSubnetSpec::default()));
        let outgoing = OutgoingRequest {
            id: RequestId(1),
            request,
            term: Some("1-a".into()),
            loop_name: "subnet",
            number: 0,
        };
        if let Some(leads_for) = leads_for {
            publish.send_replace(Leadership::Leading(LeadershipTerm {
                valid_until: Clock.now() + leads_for,
                ..LeadershipTerm::of("1-a", Takeover::First)
            }));
        }
        let outcome = writer.send(outgoing).await;
        server.set_nonblocking(true).unwrap();
        (outcome, server.accept().is_ok())
    }

    #[test]
    fn conditions_of_others_are_written_as_they_were_read() {
        let conditions = json!([{
            "type": "OfSomebodyElse", "status": "Unknown", "reason": "Why", "message": "", "observedGeneration": 4,
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }]);
        let report = agent_report::read(&json!({"conditions": conditions})).unwrap();
        let known = KnownObject {
            name: "n".into(),
            uid: "u".into(),
            version: 7,
        };
        let patch = onto(&known, conditions_patch(&report.conditions, "now"));
        let metadata = json!({"uid": "u", "resourceVersion": "7"});
        assert_eq!(patch["metadata"], metadata);
        assert_eq!(patch["status"], json!({"conditions": conditions}));
    }

    #[tokio::test]
    async fn nothing_is_written_without_the_lease() {
        for leads_for in [None, Some(Duration::ZERO)] {
            let (outcome, connected) = sent(leads_for).await;
            assert!(matches!(
                outcome,
                RequestOutcome::Rejected(Rejection::NotSent)
            ));
            assert!(!connected);
        }
    }

    #[tokio::test]
    async fn a_write_without_an_answer_is_indeterminate() {
        let (outcome, _) = sent(Some(Duration::from_secs(1))).await;
        assert!(
            matches!(outcome, RequestOutcome::Indeterminate(_)),
            "{outcome:?}"
        );
    }
}
