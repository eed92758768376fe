//! The client of the API server, with every limit a setting.

use std::num::NonZeroU32;
use std::time::Duration;

use kube::Client;
use kube::client::ClientBuilder;
use kube::config::KubeConfigOptions;
use thiserror::Error;
use tower::limit::RateLimitLayer;

use crate::telemetry::HttpMetrics;

/// Why there is no client.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Neither a kubeconfig nor a service account.
    #[error(
        "no way to reach a cluster: {0}: set KUBECONFIG or --kubeconfig, or run in a pod with a service account"
    )]
    Config(String),
    /// The configuration is there but cannot be used.
    #[error("the cluster's configuration cannot be used: {0}")]
    Build(#[from] kube::Error),
}

/// Where the cluster is and how hard it may be pushed.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A kubeconfig; else `KUBECONFIG`, `~/.kube/config`, the pod's service account
    pub kubeconfig: Option<std::path::PathBuf>,
    /// A context of it
    pub context: Option<String>,
    /// Requests a second at most; none: no limit
    pub rate: Option<NonZeroU32>,
}

/// A client that never retries by itself: retries are the loops' business, who know what a lost
/// answer means.
pub async fn connect(options: &Options, metrics: HttpMetrics) -> Result<Client, ClientError> {
    let config = configure(options).await?;
    let host = config.cluster_url.authority().map(ToString::to_string);
    let layer = metrics.layer(host.as_deref().unwrap_or_default());
    let builder = ClientBuilder::try_from(config)?.with_layer(&layer);
    Ok(match options.rate {
        Some(rate) => {
            let layer = RateLimitLayer::new(rate.get().into(), Duration::from_secs(1));
            builder.with_layer(&layer).build()
        }
        None => builder.build(),
    })
}

/// The configuration of a client, without retries of its own.
pub async fn configure(options: &Options) -> Result<kube::Config, ClientError> {
    let chosen = KubeConfigOptions {
        context: options.context.clone(),
        ..KubeConfigOptions::default()
    };
    let mut config = match &options.kubeconfig {
        Some(path) => {
            let file = kube::config::Kubeconfig::read_from(path)
                .map_err(|e| ClientError::Config(e.to_string()))?;
            kube::Config::from_custom_kubeconfig(file, &chosen)
                .await
                .map_err(|e| ClientError::Config(e.to_string()))?
        }
        None if options.context.is_some() => kube::Config::from_kubeconfig(&chosen)
            .await
            .map_err(|e| ClientError::Config(e.to_string()))?,
        None => kube::Config::infer()
            .await
            .map_err(|e| ClientError::Config(e.to_string()))?,
    };
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    Ok(config)
}
