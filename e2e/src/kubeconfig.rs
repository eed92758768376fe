//! Users of a control plane, with static tokens, and their kubeconfigs.
//!
//! Users authenticate by tokens and not by client certificates. With client certificates, the API server would verify a
//! signature on every request, which would distort benchmarks. The API server reads the token file only when it starts,
//! so all users have to be in [`Options`](crate::Options).

use std::error::Error;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::hash::{BuildHasher as _, RandomState};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use http::Request;
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tower::BoxError;
use tower::buffer::BufferLayer;
use tower::retry::{Policy, RetryLayer};

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

/// Returns a client that does not retry after an answer of the server, even if the answer is an error. It repeats a
/// request only if the connection was closed before any answer (see [`IdleConnection`]).
pub(crate) async fn client(kubeconfig: Value) -> Result<kube::Client> {
    let kubeconfig: Kubeconfig = serde_json::from_value(kubeconfig)?;
    let options = KubeConfigOptions::default();
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    config.default_retry = false;
    let client = ClientBuilder::try_from(config)?
        // Retries need a service that can be cloned.
        .with_layer(&BufferLayer::new(1024))
        .with_layer(&RetryLayer::new(IdleConnection::default()));
    Ok(client.build())
}

/// Repeats a request once if the server closed the connection without any answer. The server closes a connection after
/// 90 s without requests. The client may send a request at that moment.
#[derive(Clone, Default)]
struct IdleConnection {
    again: bool,
}

impl<A> Policy<Request<Body>, A, BoxError> for IdleConnection {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        result: &mut Result<A, BoxError>,
    ) -> Option<Self::Future> {
        let error = result.as_ref().err()?;
        let mut cause: Option<&(dyn Error + 'static)> = Some(&**error);
        let mut closed = false;
        while let Some(it) = cause {
            closed |= it
                .downcast_ref()
                .is_some_and(hyper::Error::is_incomplete_message);
            cause = it.source();
        }
        (closed && !std::mem::replace(&mut self.again, true)).then(|| std::future::ready(()))
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        let mut copy = Request::new(request.body().try_clone()?);
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        *copy.extensions_mut() = request.extensions().clone();
        Some(copy)
    }
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
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_request_whose_connection_was_closed_is_sent_again_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let config = json!({
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "contexts": [{"name": "c", "context": {"cluster": "c"}}],
            "current-context": "c",
        });
        let requests = tokio::spawn(async move {
            let mut requests = Vec::new();
            for answers in [true, false, true, false, false] {
                let (mut connection, _) = listener.accept().await.unwrap();
                let mut buffer = [0; 4096];
                let n = connection.read(&mut buffer).await.unwrap();
                requests.push(String::from_utf8_lossy(&buffer[..n]).into_owned());
                if answers {
                    let answer =
                        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
                    connection.write_all(answer.as_bytes()).await.unwrap();
                }
            }
            requests
        });
        let client = client(config).await.unwrap();
        let ask = || client.request_text(Request::post("/x").body(b"body".to_vec()).unwrap());
        assert_eq!(ask().await.unwrap(), "{}");
        assert_eq!(ask().await.unwrap(), "{}");
        ask().await.unwrap_err();
        let requests = requests.await.unwrap();
        assert!(
            requests
                .iter()
                .all(|it| it.starts_with("POST /x") && it.ends_with("body")),
            "{requests:?}"
        );
    }

    #[test]
    fn a_token_file_has_a_line_for_each_user() {
        let mut user = User::new("someone", &["a", "b"]);
        user.token = "t".to_owned();
        assert_eq!(token_file(&[user]), "t,someone,0,\"a,b\"\n");
    }
}
