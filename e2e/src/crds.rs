//! Installs Cadastre's CRDs by server-side apply, as users do.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context as _, Result};
use cadastre_api::{IPAMBlock, IPClaim, IPPool, NodeAddresses, NodeSubnet};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

use crate::wait::until;

const LIMIT: Duration = Duration::from_secs(120);

/// Applies the CRDs generated from the code, and waits until objects of each kind can be listed.
pub async fn install(client: &Client) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    let params = PatchParams::apply("cadastre-e2e");
    for crd in cadastre_api::crd::all() {
        let name = crd.name_any();
        let applied = api.patch(&name, &params, &Patch::Apply(&crd)).await;
        applied.with_context(|| format!("the API server refuses the CRD {name}"))?;
    }
    until("the CRDs are served", LIMIT, async || {
        list::<IPPool>(client).await?;
        list::<NodeSubnet>(client).await?;
        list::<NodeAddresses>(client).await?;
        list::<IPAMBlock>(client).await?;
        list::<IPClaim>(client).await?;
        Ok(Some(()))
    })
    .await
}

/// Lists the objects of a kind. Requests only their metadata, because tests create objects that cannot be parsed.
async fn list<K>(client: &Client) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let all = Api::<K>::all(client.clone());
    all.list_metadata(&ListParams::default()).await?;
    Ok(())
}
