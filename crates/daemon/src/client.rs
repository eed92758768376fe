//! The client of the API server: how it is configured, and which versions of Kubernetes are too old.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::version::Info;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use thiserror::Error;
use tower::util::MapFutureLayer;

use crate::retry_after;
use crate::telemetry::HttpMetrics;

/// Why no client could be created.
#[derive(Debug, Error)]
pub enum ClientError {
    /// There is neither a kubeconfig nor a service account.
    #[error(
        "no way to reach a cluster: {0}: set KUBECONFIG or --kubeconfig, or run in a pod with a service account"
    )]
    Config(String),
    /// There is a configuration, but it cannot be used.
    #[error("the cluster's configuration cannot be used: {0}")]
    Build(#[from] kube::Error),
}

/// How to reach the cluster.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Path of a kubeconfig. If absent, the first of these is used: `KUBECONFIG`, `~/.kube/config`, the pod's service
    /// account
    pub kubeconfig: Option<std::path::PathBuf>,
    /// Name of a context in the kubeconfig; if absent, the current context
    pub context: Option<String>,
}

/// Returns a client that never repeats a request itself, because only the control loops know what to do about a lost
/// response.
pub async fn connect(options: &Options, metrics: HttpMetrics) -> Result<Client, ClientError> {
    let config = configure(options).await?;
    let host = config.cluster_url.authority().map(ToString::to_string);
    let layer = metrics.layer(host.as_deref().unwrap_or_default());
    let builder = ClientBuilder::try_from(config)?
        .with_layer(&layer)
        .with_layer(&MapFutureLayer::new(retry_after::record));
    Ok(builder.build())
}

/// The oldest supported version of Kubernetes. The chart requires the same version (`kubeVersion`).
pub(crate) const OLDEST: (u32, u32) = (1, 31);

/// Returns a message if an API server of this version is too old; otherwise `None`.
pub fn too_old(version: &Info) -> Option<String> {
    // Some vendors append a sign, as in `31+`. So only the leading digits count.
    let number = |text: &str| {
        let digits = text.split(|it: char| !it.is_ascii_digit()).next();
        digits.and_then(|it| it.parse::<u32>().ok())
    };
    let is = (number(&version.major)?, number(&version.minor)?);
    (is < OLDEST).then(|| {
        format!(
            "this API server is Kubernetes {}, and {}.{} or newer is needed: its CRDs have no selectable fields and its tokens do not name their node, so writes of agents are refused or cannot be told apart: upgrade it",
            version.git_version, OLDEST.0, OLDEST.1
        )
    })
}

/// Reads the configuration for a client, disables retries in the client, and limits the time to connect.
pub async fn configure(options: &Options) -> Result<Config, ClientError> {
    let chosen = KubeConfigOptions {
        context: options.context.clone(),
        ..KubeConfigOptions::default()
    };
    let mut config = match &options.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(|error| unusable(&error))?;
            let config = Config::from_custom_kubeconfig(file, &chosen).await;
            config.map_err(|error| unusable(&error))?
        }
        None if options.context.is_some() => {
            let config = Config::from_kubeconfig(&chosen).await;
            config.map_err(|error| unusable(&error))?
        }
        None => Config::infer().await.map_err(|error| unusable(&error))?,
    };
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    Ok(config)
}

fn unusable(error: &dyn ToString) -> ClientError {
    ClientError::Config(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_about_an_old_server_names_the_oldest_version() {
        let says = |major: &str, minor: &str| {
            too_old(&Info {
                major: major.to_owned(),
                minor: minor.to_owned(),
                git_version: format!("v{major}.{minor}.4"),
                ..Info::default()
            })
        };
        let text = says("1", "30").unwrap();
        assert!(text.contains("v1.30.4") && text.contains("1.31"), "{text}");
        assert!(says("1", "30+").is_some());
        for (major, minor) in [("1", "31"), ("1", "36+"), ("2", "0"), ("", ""), ("1", "x")] {
            assert_eq!(says(major, minor), None, "{major}.{minor}");
        }
        let chart = include_str!("../../../charts/cadastre/Chart.yaml");
        let minimum = format!("kubeVersion: \">={}.{}.0-0\"", OLDEST.0, OLDEST.1);
        assert!(chart.contains(&minimum), "{chart}");
    }
}
