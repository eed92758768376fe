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

/// Creates the CRDs and returns when all kinds are served.
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

/// Creates a pool of podCIDRs from a `spec` without `allocate`.
pub async fn pool(client: &Client, name: &str, mut spec: Value) -> Result<IPPool> {
    spec["allocationMode"] = json!("NodeCIDR");
    let pool = IPPool::new(name, serde_json::from_value(spec)?);
    // The API server may reject objects of a kind for a moment after it has begun to serve the kind.
    wait::until("the pool can be created", LIMIT, async || {
        let api = Api::<IPPool>::all(client.clone());
        Ok(Some(api.create(&PostParams::default(), &pool).await?))
    })
    .await
}

/// A condition of a pool; `None` as long as the pool has no such condition.
pub async fn condition(client: &Client, pool: &str, kind: &str) -> Result<Option<Condition>> {
    let pool = Api::<IPPool>::all(client.clone()).get(pool).await?;
    let conditions = pool.status.unwrap_or_default().conditions;
    Ok(conditions.into_iter().find(|it| it.type_ == kind))
}

/// Whether a leader has set its finalizer on the pool.
pub fn is_kept(pool: &IPPool) -> bool {
    pool.finalizers().iter().any(|it| it == FINALIZER)
}
