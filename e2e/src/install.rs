//! Installs Cadastre's CRDs and pools in a control plane.

use std::time::Duration;

use anyhow::{Context as _, Result};
use cadastre_api::{FINALIZER, IPAMBlock, IPPool, NodeSubnet, crd};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::wait;

const LIMIT: Duration = Duration::from_secs(120);

/// Creates the CRDs, and returns when IPPools, NodeSubnets and IPAMBlocks can be listed.
pub async fn crds(client: &Client) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in crd::all() {
        api.create(&PostParams::default(), &crd)
            .await
            .context("cannot create a CRD")?;
    }
    wait::until("the kinds are served", LIMIT, async || {
        Api::<IPPool>::all(client.clone())
            .list(&ListParams::default())
            .await?;
        Api::<NodeSubnet>::all(client.clone())
            .list(&ListParams::default())
            .await?;
        Api::<IPAMBlock>::all(client.clone())
            .list(&ListParams::default())
            .await?;
        Ok(Some(()))
    })
    .await
}

/// Creates a pool of podCIDRs from `spec`, to which `allocationMode` is added.
pub async fn pool(client: &Client, name: &str, mut spec: Value) -> Result<IPPool> {
    spec["allocationMode"] = json!("NodeCIDR");
    let pool = IPPool::new(name, serde_json::from_value(spec)?);
    // Right after a CRD is created, the API server may still reject objects of that kind, so the creation is retried.
    wait::until("the pool can be created", LIMIT, async || {
        let api = Api::<IPPool>::all(client.clone());
        Ok(Some(api.create(&PostParams::default(), &pool).await?))
    })
    .await
}

/// Returns a condition of a pool, or `None` if the pool has no condition of that type.
pub async fn condition(client: &Client, pool: &str, kind: &str) -> Result<Option<Condition>> {
    let pool = Api::<IPPool>::all(client.clone()).get(pool).await?;
    let conditions = pool.status.unwrap_or_default().conditions;
    Ok(conditions.into_iter().find(|it| it.type_ == kind))
}

/// Returns whether the pool has the finalizer that a leading controller sets.
pub fn is_kept(pool: &IPPool) -> bool {
    pool.finalizers().iter().any(|it| it == FINALIZER)
}
