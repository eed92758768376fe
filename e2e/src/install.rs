//! Creates pools of podCIDRs and reads their conditions.

use std::time::Duration;

use anyhow::Result;
use cadastre_api::IPPool;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::wait;

const LIMIT: Duration = Duration::from_secs(120);

/// Creates a pool of podCIDRs from `spec`, to which `allocationMode` is added.
pub async fn pool(client: &Client, name: &str, mut spec: Value) -> Result<IPPool> {
    spec["allocationMode"] = json!("NodeCIDR");
    let pool = IPPool::new(name, serde_json::from_value(spec)?);
    // Right after a CRD is created, the API server may still reject objects of its kind. So the creation is retried.
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
