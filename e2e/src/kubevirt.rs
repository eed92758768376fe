//! A stand-in for KubeVirt and its IPAM extension. The stand-in creates and deletes the same objects as KubeVirt, with
//! the same owners and annotations, but no machine runs.
//!
//! Each of these functions does what happens in a cluster with KubeVirt:
//! - [`KubeVirt::start`]: A user creates a VirtualMachine, and virt-controller creates its VirtualMachineInstance. The
//!   IPAM extension creates an IPAMClaim for each interface on a network with persistent addresses. The IPAMClaim has
//!   the name `MACHINE.NETWORK`, and the VirtualMachine owns it.
//! - [`KubeVirt::pod`]: virt-controller creates the machine's pod, and for a migration a second pod. The
//!   VirtualMachineInstance controls both pods. A webhook of the extension adds `ipam-claim-reference` to the pod's
//!   annotation about networks.
//! - [`KubeVirt::migrated`]: virt-controller marks the target pod once the machine runs there.
//! - [`KubeVirt::stop`]: The VirtualMachineInstance is deleted. The VirtualMachine and the IPAMClaim stay.
//! - [`KubeVirt::delete`]: A user deletes the VirtualMachine, and the garbage collector deletes the IPAMClaim.

use std::ffi::OsStr;

use anyhow::{Context as _, Result};
use cadastre_api::MIGRATION_READY_ANNOTATION;
use cadastre_api::ipam_claim::NETWORKS_ANNOTATION;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::assets;
use crate::control_plane::ControlPlane;
use crate::fixtures::{Fixtures, LIMIT};
use crate::wait::until;

/// The stand-in for KubeVirt and its IPAM extension. All its objects are in the namespace `default`.
pub struct KubeVirt {
    machines: Api<DynamicObject>,
    instances: Api<DynamicObject>,
    /// Client for IPAMClaims of the namespace `default`
    pub ipam_claims: Api<DynamicObject>,
    pods: Api<Pod>,
}

/// Returns the description of a kind that the crate `kube` needs for requests about objects of this kind.
fn resource(group: &str, version: &str, kind: &str) -> ApiResource {
    ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: format!("{group}/{version}"),
        kind: kind.to_owned(),
        plural: format!("{}s", kind.to_lowercase()),
    }
}

impl KubeVirt {
    /// Installs the CRD of IPAMClaims and CRDs of KubeVirt's kinds, which accept any content.
    pub async fn install(cluster: &ControlPlane, fixtures: &Fixtures) -> Result<Self> {
        let client = &fixtures.client;
        let file = assets::ipam_claim_crd()?;
        let apply = [OsStr::new("apply"), OsStr::new("-f"), file.as_os_str()];
        cluster.kubectl(&apply).await?;
        let crds = Api::<CustomResourceDefinition>::all(client.clone());
        let params = PostParams::default();
        for kind in ["VirtualMachine", "VirtualMachineInstance"] {
            let crd: CustomResourceDefinition = serde_json::from_value(crd(kind))?;
            crds.create(&params, &crd).await?;
        }
        let own = Self::new(client, fixtures);
        until("the kinds of KubeVirt are served", LIMIT, async || {
            for api in [&own.machines, &own.instances, &own.ipam_claims] {
                api.list(&kube::api::ListParams::default()).await?;
            }
            Ok(Some(()))
        })
        .await?;
        Ok(own)
    }

    fn new(client: &Client, fixtures: &Fixtures) -> Self {
        let api = |group, version, kind| {
            let resource = resource(group, version, kind);
            Api::namespaced_with(client.clone(), "default", &resource)
        };
        KubeVirt {
            machines: api("kubevirt.io", "v1", "VirtualMachine"),
            instances: api("kubevirt.io", "v1", "VirtualMachineInstance"),
            ipam_claims: api("k8s.cni.cncf.io", "v1alpha1", "IPAMClaim"),
            pods: fixtures.pods.clone(),
        }
    }

    /// Starts a machine with an interface on this network. If the machine was stopped earlier, its IPAMClaim still
    /// exists and is used.
    pub async fn start(&self, machine: &str, network: &str) -> Result<()> {
        let params = PostParams::default();
        let object = |kind: &str, api_version: &str, owner: Option<&DynamicObject>, spec: Value| {
            let owner = owner.map(|it| {
                let types = it.types.clone().unwrap_or_default();
                json!({"apiVersion": types.api_version, "kind": types.kind, "name": it.name_any(), "uid": it.uid()})
            });
            json!({
                "apiVersion": api_version, "kind": kind,
                "metadata": {"name": machine, "ownerReferences": owner.into_iter().collect::<Vec<_>>()},
                "spec": spec,
            })
        };
        let known = self.machines.get_opt(machine).await?;
        let is_new = known.is_none();
        let owner = if let Some(known) = known {
            known
        } else {
            let new = object("VirtualMachine", "kubevirt.io/v1", None, json!({}));
            let new = serde_json::from_value(new)?;
            self.machines.create(&params, &new).await?
        };
        if is_new {
            let spec = json!({"network": network, "interface": INTERFACE});
            let version = "k8s.cni.cncf.io/v1alpha1";
            let mut claim = object("IPAMClaim", version, Some(&owner), spec);
            claim["metadata"]["name"] = json!(format!("{machine}.{network}"));
            let claim = serde_json::from_value(claim)?;
            self.ipam_claims.create(&params, &claim).await?;
        }
        let instance = object(
            "VirtualMachineInstance",
            "kubevirt.io/v1",
            Some(&owner),
            json!({}),
        );
        let instance = serde_json::from_value(instance)?;
        self.instances.create(&params, &instance).await?;
        Ok(())
    }

    /// Creates a pod on a node for a running machine. The pod is the machine's first pod, or the target of a migration.
    pub async fn pod(&self, machine: &str, network: &str, name: &str, node: &str) -> Result<Pod> {
        let instance = self.instances.get(machine).await?;
        let element = json!([{
            "name": network, "namespace": "default", "interface": INTERFACE,
            "ipam-claim-reference": format!("{machine}.{network}"),
        }]);
        let pod = serde_json::from_value(json!({
            "metadata": {
                "name": name,
                "annotations": {NETWORKS_ANNOTATION: element.to_string()},
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": machine,
                    "uid": instance.uid(), "controller": true,
                }],
            },
            "spec": {"nodeName": node, "containers": [{"name": "compute", "image": "none"}]},
        }))?;
        Ok(self.pods.create(&PostParams::default(), &pod).await?)
    }

    /// Marks the target pod of a migration as the pod in which the machine now runs.
    pub async fn migrated(&self, pod: &str) -> Result<()> {
        let now = json!({"metadata": {"annotations": {MIGRATION_READY_ANNOTATION: "2026-01-01T00:00:00Z"}}});
        let (params, change) = (PatchParams::default(), Patch::Merge(now));
        self.pods.patch(pod, &params, &change).await?;
        Ok(())
    }

    /// Stops a machine by deleting its VirtualMachineInstance. The caller has to delete the machine's pods.
    pub async fn stop(&self, machine: &str) -> Result<()> {
        self.instances
            .delete(machine, &DeleteParams::default())
            .await?;
        Ok(())
    }

    /// Deletes a machine. After that, the garbage collector deletes the objects that the machine owns.
    pub async fn delete(&self, machine: &str) -> Result<()> {
        let params = DeleteParams::background();
        self.machines.delete(machine, &params).await?;
        Ok(())
    }

    /// Waits until the IPAMClaim of the machine and network has `status.ips`, and returns them.
    pub async fn ips(&self, machine: &str, network: &str) -> Result<Vec<String>> {
        let name = format!("{machine}.{network}");
        until(
            &format!("IPAMClaim {name} has addresses"),
            LIMIT,
            async || {
                let claim = self.ipam_claims.get(&name).await?;
                let ips = claim.data["status"]["ips"].as_array().context("no ips")?;
                let ips = ips.iter().filter_map(Value::as_str).map(str::to_owned);
                Ok(Some(ips.collect()))
            },
        )
        .await
    }
}

/// The name of the machines' interface on the network. KubeVirt derives such names from a hash of the network's name.
pub const INTERFACE: &str = "pod8e9c4c4eb1b";

fn crd(kind: &str) -> Value {
    let plural = format!("{}s", kind.to_lowercase());
    json!({
        "metadata": {"name": format!("{plural}.kubevirt.io")},
        "spec": {
            "group": "kubevirt.io", "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": true,
                }},
            }],
        },
    })
}
