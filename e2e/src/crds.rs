//! Installs Cadastre's CRDs by server-side apply, as users do.

use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, ResourceExt as _};

const LIMIT: Duration = Duration::from_secs(120);

/// Applies the CRDs generated from the code, and waits until each has the condition `Established`.
pub async fn install(client: &Client) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in cadastre_api::crd::all() {
        let name = crd.name_any();
        api.patch(
            &name,
            &PatchParams::apply("cadastre-e2e"),
            &Patch::Apply(&crd),
        )
        .await
        .with_context(|| format!("the API server refuses the CRD {name}"))?;
        let established = await_condition(api.clone(), &name, conditions::is_crd_established());
        tokio::time::timeout(LIMIT, established)
            .await
            .with_context(|| format!("the CRD {name} is not established after {LIMIT:?}"))??;
    }
    Ok(())
}
