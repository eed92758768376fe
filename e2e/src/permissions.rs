//! Asks the API server's SubjectAccessReview which permissions an account has.

use anyhow::{Context as _, Result};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;

/// The verbs that [`allowed`] checks.
pub const VERBS: [&str; 8] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
];

/// The resource for which permissions are checked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Target<'a> {
    /// API group; empty for the core group
    pub group: &'a str,
    /// Plural name of the resource; for a subresource, followed by `/SUBRESOURCE`
    pub resource: &'a str,
    /// Namespace; empty for all namespaces and for cluster-scoped resources
    pub namespace: &'a str,
    /// Name of one object; empty for all objects
    pub name: &'a str,
}

/// Returns those of [`VERBS`] that RBAC grants to the ServiceAccount user `account` of `kube-system` on a target.
pub async fn allowed(
    client: &Client,
    account: &str,
    target: Target<'_>,
) -> Result<Vec<&'static str>> {
    let reviews: Api<SubjectAccessReview> = Api::all(client.clone());
    let (resource, subresource) = target
        .resource
        .split_once('/')
        .unwrap_or((target.resource, ""));
    let mut allowed = Vec::new();
    for verb in VERBS {
        let review = serde_json::from_value(json!({"spec": {
            "user": account,
            "groups": ["system:serviceaccounts", "system:serviceaccounts:kube-system"],
            "resourceAttributes": {
                "verb": verb, "group": target.group, "resource": resource,
                "subresource": subresource, "namespace": target.namespace, "name": target.name,
            },
        }}))?;
        let answer = reviews.create(&PostParams::default(), &review).await;
        let answer = answer.context("cannot review an access")?;
        if answer.status.context("a review without an answer")?.allowed {
            allowed.push(verb);
        }
    }
    Ok(allowed)
}
