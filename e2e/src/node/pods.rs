//! Pods on the nodes of a site.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use cadastre_core::Cidr;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams};

use super::Machine;
use crate::fixtures::Fixtures;
use crate::wait::until;

/// A running pod, with the parts of its Pod object that tests need.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Running {
    /// The name of the pod's Node
    pub node: String,
    /// The pod's name in the namespace `default`
    pub name: String,
    /// The pod's UID, which distinguishes the pod from other pods of the same name
    pub uid: String,
    /// The id of the pod's container, in the form `containerd://ID`
    pub container: String,
    /// The pod's addresses; at least one
    pub addresses: Vec<IpAddr>,
}

impl Running {
    /// Returns the running pod. Returns `None` if the pod has no ready container or no addresses, or is being deleted.
    pub fn of(pod: &Pod) -> Option<Self> {
        let status = pod.status.as_ref()?;
        let container = status.container_statuses.as_ref()?.first()?;
        if !container.ready || pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let addresses = status.pod_ips.iter().flatten();
        let addresses: Option<Vec<IpAddr>> = addresses.map(|it| it.ip.parse().ok()).collect();
        Some(Self {
            node: pod.spec.as_ref()?.node_name.clone()?,
            name: pod.name_any(),
            uid: pod.uid()?,
            container: container.container_id.clone()?,
            addresses: addresses.filter(|it| !it.is_empty())?,
        })
    }

    /// Returns whether each address of the pod lies in one of the ranges.
    pub fn is_in(&self, ranges: &[Cidr]) -> bool {
        let inside = |it: &IpAddr| ranges.iter().any(|range| range.contains_addr((*it).into()));
        self.addresses.iter().all(inside)
    }
}

/// Waits at most `limit` until every address of `to` answers a ping from the pod `from`, which runs on `machine`.
pub async fn reaches(
    machine: &Machine,
    from: &Running,
    to: &Running,
    limit: Duration,
) -> Result<()> {
    for address in &to.addresses {
        let text = address.to_string();
        let ping = ["ping", "-c", "1", "-W", "2", &text];
        // The first packet may be lost while the neighbour's address is being resolved. So the ping is repeated.
        until(&format!("{from:?} reaches {to:?}"), limit, async || {
            Ok(Some(machine.run_in_pod(&from.container, &ping).await?))
        })
        .await?;
    }
    Ok(())
}

/// Lists the pods whose label `group` has this value.
pub async fn list(api: &Fixtures, group: &str) -> Result<Vec<Pod>> {
    let params = ListParams::default().labels(&format!("group={group}"));
    Ok(api.pods.list(&params).await?.items)
}

/// Deletes the pods of a group, and waits until the API does not have them any more. A pod is gone from the API only
/// after the kubelet has stopped its sandbox.
pub async fn delete_all(api: &Fixtures, group: &str, limit: Duration) -> Result<()> {
    let params = ListParams::default().labels(&format!("group={group}"));
    let delete = DeleteParams::default();
    api.pods.delete_collection(&delete, &params).await?;
    until(
        &format!("the pods of {group} are gone"),
        limit,
        async || {
            let left = list(api, group).await?.len();
            ensure!(left == 0, "{left} are left");
            Ok(Some(()))
        },
    )
    .await
}

/// Asserts that no two pods have the same address.
pub fn assert_unique<'a>(pods: impl IntoIterator<Item = &'a Running>) {
    let mut all = BTreeSet::new();
    for pod in pods {
        for address in &pod.addresses {
            assert!(all.insert(address), "{address} of {pod:?} is in use twice");
        }
    }
}
