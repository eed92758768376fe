//! Requests to the API server: reading namespaces, and writing NodeSubnet.status and NodeAddresses.
//!
//! Writes of NodeAddresses remove the managed fields, which nobody needs, because only the agent writes the object. In
//! writes of a status the API server ignores managed fields.

use std::time::Duration;

use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{GetParams, Patch, PatchParams, PostParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Resource as _, ResourceExt as _};
use serde_json::json;
use tracing::{debug, warn};

use super::addresses::{ListOutcome, PartialList};
use super::namespaces::Namespace;
use super::publish::{WriteOutcome, is_same};
use super::seen;
use cadastre_api::{
    AGENT_MANAGER, NodeAddresses, NodeAddressesSpec, NodeSubnet, NodeSubnetLite, NodeSubnetStatus,
    POOLS_ANNOTATION,
};

/// The time limit of a request to the API server.
const API_LIMIT: Duration = Duration::from_secs(10);

/// Sends a request, and waits for the answer for at most [`API_LIMIT`].
async fn send<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    let answer = tokio::time::timeout(API_LIMIT, request).await;
    let timeout = || kube::Error::Service(format!("no answer within {API_LIMIT:?}").into());
    answer.unwrap_or_else(|_| Err(timeout()))
}

/// Reads a namespace from the API server's cache. If the cache does not contain the namespace, the namespace may be
/// new. In this case, a consistent read follows. Returns `None` if a request fails.
pub(super) async fn namespace(client: Client, name: &str) -> Option<Namespace> {
    let api: Api<PartialObjectMeta<v1::Namespace>> = Api::all(client);
    let read = send(async {
        match api.get_metadata_opt_with(name, &GetParams::any()).await? {
            Some(found) => Ok(found),
            None => api.get_metadata(name).await,
        }
    });
    match read.await {
        Ok(found) => {
            let labels = found.labels().iter();
            let labels = labels.map(|(key, value)| (key.as_str().into(), value.as_str().into()));
            Some(Namespace {
                labels: labels.collect(),
                pools: found.annotations().get(POOLS_ANNOTATION).cloned(),
            })
        }
        Err(why) => {
            warn!(
                namespace = name,
                "its labels and pools are not known, and its pods wait where these might matter: {why}"
            );
            None
        }
    }
}

/// Logs why a write failed. Errors that an administrator should resolve are logged as warnings.
fn log_failure(what: &str, error: &kube::Error) {
    match error {
        kube::Error::Api(answer) if matches!(answer.code, 403 | 413 | 422) => warn!(
            "{what} is refused: {} ({}): check the agent's ClusterRole, and that CRDs and agent are of one version",
            answer.message, answer.code
        ),
        error => debug!("{what} not written: {error}"),
    }
}

/// Writes the list of addresses. The NodeSubnet becomes the owner of the NodeAddresses, so that Kubernetes deletes both
/// together.
pub(super) async fn write_list(
    client: Client,
    name: &str,
    owner: &str,
    is_new: bool,
    list: NodeAddressesSpec,
) -> ListOutcome {
    let api: Api<NodeAddresses> = Api::all(client);
    let mut object = NodeAddresses::new(name, list);
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: NodeSubnet::api_version(&()).into_owned(),
        kind: NodeSubnet::kind(&()).into_owned(),
        name: name.to_owned(),
        uid: owner.to_owned(),
        ..OwnerReference::default()
    }]);
    let written = send(async {
        if is_new {
            let params = PostParams {
                field_manager: Some(AGENT_MANAGER.to_owned()),
                ..PostParams::default()
            };
            return api.create(&params, &object).await;
        }
        let patch = Patch::Merge(json!({
            "metadata": {
                "ownerReferences": object.metadata.owner_references, "managedFields": [{}],
            },
            "spec": {
                "nodeUID": object.spec.node_uid, "bootID": object.spec.boot_id,
                "asOf": object.spec.as_of, "addresses": object.spec.addresses,
            },
        }));
        api.patch(name, &PatchParams::apply(AGENT_MANAGER), &patch)
            .await
    });
    match written.await {
        Ok(stored) => {
            let (written, stored) = (object.spec, stored.spec);
            let is_whole = stored.is_same(&written);
            ListOutcome::Done((!is_whole).then(|| Box::new(PartialList { written, stored })))
        }
        Err(error) => {
            log_failure(&format!("NodeAddresses {name}"), &error);
            ListOutcome::Failed
        }
    }
}

/// Writes the status if the NodeSubnet still has the resourceVersion `version`.
pub(super) async fn write_status(
    client: Client,
    name: &str,
    version: &str,
    status: &NodeSubnetStatus,
) -> WriteOutcome {
    let api: Api<NodeSubnetLite> = Api::all(client);
    // In a merge patch, null removes the field. Most nodes have no withdrawals and no requests, so these fields are
    // removed if their lists are empty.
    let some = |ranges: &[String]| (!ranges.is_empty()).then(|| ranges.to_vec());
    let requests = Some(&status.requested_addresses).filter(|it| !it.is_empty());
    let conflicts = Some(&status.conflicts).filter(|it| !it.is_empty());
    let conditions = Some(&status.conditions).filter(|it| !it.is_empty());
    let body = json!({
        "metadata": {"resourceVersion": version},
        "status": {
            "nodeUID": status.node_uid, "pools": status.pools, "blocks": status.blocks,
            "agent": status.agent, "orphans": status.orphans,
            "withdrawn": some(&status.withdrawn), "withdrawing": some(&status.withdrawing),
            "requestedAddresses": requests, "conflicts": conflicts,
            "conditions": conditions,
        },
    });
    match send(api.patch_status(
        name,
        &PatchParams::apply(AGENT_MANAGER),
        &Patch::Merge(body),
    ))
    .await
    {
        Ok(object) => {
            let seen = seen::subnet(object);
            debug!(version = seen.version, "status written");
            let is_whole = is_same(&seen.status, status);
            WriteOutcome::Done {
                version: seen.version,
                status: Box::new(seen.status),
                cut: (!is_whole).then(|| Box::new(status.clone())),
            }
        }
        Err(kube::Error::Api(answer)) if answer.code == 409 => WriteOutcome::Outdated,
        Err(error) => {
            log_failure(&format!("the status of NodeSubnet {name}"), &error);
            WriteOutcome::Failed
        }
    }
}
