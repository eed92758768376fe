//! Requests to the API server: reads namespaces, writes NodeSubnet.status and NodeAddresses.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
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
use cadastre_api::choice::Label;
use cadastre_api::{
    AGENT_MANAGER, NodeAddresses, NodeAddressesSpec, NodeSubnet, NodeSubnetLite, NodeSubnetStatus,
    POOLS_ANNOTATION,
};

/// The time limit of a request to the API server.
const API_LIMIT: Duration = Duration::from_secs(10);

/// Reads a namespace from the API server's cache. If it is not there, reads it consistently, because a namespace
/// created a moment ago may not be in the cache yet. `None` if the request fails.
pub(super) async fn namespace(client: Client, name: &str) -> Option<Namespace> {
    let api: Api<PartialObjectMeta<v1::Namespace>> = Api::all(client);
    let asked = async {
        match api.get_metadata_opt_with(name, &GetParams::any()).await {
            Ok(Some(found)) => Ok(found),
            Ok(None) => api.get_metadata(name).await,
            Err(error) => Err(error),
        }
    };
    let why = match tokio::time::timeout(API_LIMIT, asked).await {
        Ok(Ok(found)) => {
            return Some(Namespace {
                labels: labels(found.labels()),
                pools: found.annotations().get(POOLS_ANNOTATION).cloned(),
            });
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {API_LIMIT:?}"),
    };
    warn!(
        namespace = name,
        "its labels and pools are not known, and its pods wait where these might matter: {why}"
    );
    None
}

fn labels(labels: &BTreeMap<String, String>) -> Vec<Label> {
    let labels = labels.iter();
    labels
        .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
        .collect()
}

/// Writes the list of addresses. The NodeSubnet becomes the owner of the NodeAddresses, so that both are deleted
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
    let manager = Some(AGENT_MANAGER.to_owned());
    let asked = async {
        if is_new {
            let params = PostParams {
                field_manager: manager,
                ..PostParams::default()
            };
            return api.create(&params, &object).await;
        }
        let patch = Patch::Merge(json!({
            "metadata": {"ownerReferences": object.metadata.owner_references},
            "spec": {
                "nodeUID": object.spec.node_uid, "bootID": object.spec.boot_id,
                "asOf": object.spec.as_of, "addresses": object.spec.addresses,
            },
        }));
        let params = PatchParams {
            field_manager: manager,
            ..PatchParams::default()
        };
        api.patch(name, &params, &patch).await
    };
    match tokio::time::timeout(API_LIMIT, asked).await {
        Ok(Ok(stored)) => {
            let (written, stored) = (object.spec, stored.spec);
            let is_whole = stored.is_same(&written);
            ListOutcome::Done((!is_whole).then(|| Box::new(PartialList { written, stored })))
        }
        // After a conflict the watch will show the current version, so there is nothing to report.
        Ok(Err(kube::Error::Api(answer))) if answer.code == 409 => ListOutcome::Failed,
        Ok(Err(kube::Error::Api(answer))) => {
            warn!(
                "NodeAddresses {name} is refused: {} ({}): check the agent's ClusterRole, and that the CRDs are those of the agent's version",
                answer.message, answer.code
            );
            ListOutcome::Failed
        }
        Ok(Err(error)) => {
            debug!("NodeAddresses {name} not written: {error}");
            ListOutcome::Failed
        }
        Err(_) => ListOutcome::Failed,
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
    let mut body = json!({
        "metadata": {"resourceVersion": version},
        "status": {
            "nodeUID": status.node_uid, "pools": status.pools, "blocks": status.blocks,
            "agent": status.agent, "orphans": status.orphans,
        },
    });
    if !status.conditions.is_empty() {
        body["status"]["conditions"] = json!(status.conditions);
    }
    let patch = Patch::Merge(body);
    let params = PatchParams {
        field_manager: Some(AGENT_MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let begun = Timestamp::now();
    let answer = tokio::time::timeout(API_LIMIT, api.patch_status(name, &params, &patch)).await;
    match answer {
        Ok(Ok(object)) => {
            let seen = seen::subnet(object);
            debug!(version = seen.version, "status written");
            let is_whole = is_same(&seen.status, status);
            WriteOutcome::Done {
                version: seen.version,
                status: Box::new(seen.status),
                cut: (!is_whole).then(|| Box::new(status.clone())),
            }
        }
        Ok(Err(kube::Error::Api(answer))) if answer.code == 409 => WriteOutcome::Outdated,
        Ok(Err(kube::Error::Api(answer))) if answer.code == 404 => {
            debug!("there is no NodeSubnet to write to");
            WriteOutcome::Failed
        }
        Ok(Err(kube::Error::Api(answer))) if matches!(answer.code, 403 | 413 | 422) => {
            warn!(
                "the status of NodeSubnet {name} is refused: {} ({}): check the agent's ClusterRole, and that CRDs and agent are of one version",
                answer.message, answer.code
            );
            WriteOutcome::Failed
        }
        Ok(Err(error)) => {
            debug!(%begun, "status not written: {error}");
            WriteOutcome::Failed
        }
        Err(_) => WriteOutcome::Failed,
    }
}
