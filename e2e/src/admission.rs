//! Makes the API server reject requests, by a ValidatingAdmissionPolicy that a test installs.

use anyhow::Result;
use serde_json::{Value, json};

use crate::ControlPlane;
use crate::fixtures::LIMIT;
use crate::wait::until;

/// Creates a policy that rejects `operation` on objects for which the CEL expression `refuses` is true. The API server
/// enforces a new policy only after a moment, so wait with [`is_refused`].
pub async fn policy(
    cluster: &ControlPlane,
    group: &str,
    resource: &str,
    operation: &str,
    refuses: &str,
) -> Result<()> {
    let version = if group.is_empty() { "v1" } else { "v1alpha1" };
    let name = format!("no-{resource}");
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [group], "apiVersions": [version],
                "operations": [operation], "resources": [resource],
            }]},
            "validations": [{"expression": format!("!({refuses})"), "message": "not in this cluster"}],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    });
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [policy, binding]});
    let args = ["apply", "-f", "-"];
    cluster.kubectl_stdin(&args, &list.to_string()).await?;
    Ok(())
}

/// Waits until the API server rejects `object` because of a policy that [`policy`] created. kubectl sends the object
/// with the arguments `args`.
pub async fn is_refused(cluster: &ControlPlane, args: &[&str], object: &Value) -> Result<()> {
    until("the policy is at work", LIMIT, async || {
        let tried = cluster.kubectl_stdin(args, &object.to_string()).await;
        let refused = tried.err().map(|error| format!("{error:#}"));
        Ok(refused.filter(|text| text.contains("not in this cluster")))
    })
    .await?;
    Ok(())
}
