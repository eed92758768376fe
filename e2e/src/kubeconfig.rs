//! Users of a control plane, with static tokens, and their kubeconfigs.
//!
//! Users authenticate by tokens and not by client certificates. With client certificates, the API server would verify a
//! signature on every request, which would distort benchmarks. The API server reads the token file only when it starts,
//! so all users have to be in [`Options`](crate::Options).

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::hash::{BuildHasher as _, RandomState};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};

/// A user that can authenticate by a static token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The name, for example `system:kube-controller-manager`.
    pub name: String,
    /// The groups of the user, for example `system:masters`.
    pub groups: Vec<String>,
    pub(crate) token: String,
}

impl User {
    /// Returns a user with a new random token.
    pub fn new(name: &str, groups: &[&str]) -> Self {
        // The token consists of two hashes with independent random seeds. They are not cryptographically strong, which
        // is enough for a server on loopback.
        let half = || RandomState::new().hash_one(name);
        Self {
            name: name.to_owned(),
            groups: groups.iter().map(ToString::to_string).collect(),
            token: format!("{:016x}{:016x}", half(), half()),
        }
    }
}

/// Returns the content of the API server's token file.
pub(crate) fn token_file(users: &[User]) -> String {
    let mut text = String::new();
    for (
        uid,
        User {
            name,
            groups,
            token,
        },
    ) in users.iter().enumerate()
    {
        let _ = writeln!(text, "{token},{name},{uid},\"{}\"", groups.join(","));
    }
    text
}

/// Returns a kubeconfig for `user` that verifies the server by the CA in the file `ca`. The text is JSON, which is
/// valid YAML.
pub(crate) fn kubeconfig(server: &str, ca: &Path, user: &User) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority": ca}}],
        "users": [{"name": user.name, "user": {"token": user.token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user.name}}],
        "current-context": "e2e",
    })
}

/// Returns a client without retries, so that a test gets the server's first answer.
pub(crate) async fn client(kubeconfig: Value) -> Result<kube::Client> {
    let kubeconfig: Kubeconfig = serde_json::from_value(kubeconfig)?;
    let options = KubeConfigOptions::default();
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    config.default_retry = false;
    Ok(kube::Client::try_from(config)?)
}

/// Writes a file with mode 0600.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_file_has_a_line_for_each_user() {
        let mut user = User::new("someone", &["a", "b"]);
        user.token = "t".to_owned();
        assert_eq!(token_file(&[user]), "t,someone,0,\"a,b\"\n");
    }
}
