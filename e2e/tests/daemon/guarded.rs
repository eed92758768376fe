//! The admin port with TLS, and metrics that only authorized clients may read.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use cadastre_e2e::cluster::{start_controller, with_crds};
use cadastre_e2e::helm::template;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::wait::until;
use cadastre_e2e::{ControlPlane, Daemon, Options, ports};
use http::Request;
use http::header::{AUTHORIZATION, HOST};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::LIMIT;
use crate::setup::ACCOUNT;

/// Writes a self-signed certificate for localhost and its key to `folder`. Returns the certificate.
fn certificate(folder: &Path) -> String {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(folder.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
    std::fs::write(folder.join("tls.crt"), made.cert.pem()).unwrap();
    made.cert.pem()
}

/// Sends a request over TLS, as a client that trusts only the certificate `cert`. Returns the status and the body.
async fn ask(daemon: &Daemon, cert: &str, path: &str, token: &str) -> Result<(u16, String)> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(cert.as_bytes())?)?;
    let tls = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(daemon.admin_address()).await?;
    let name = ServerName::try_from("localhost")?;
    let tls = TlsConnector::from(Arc::new(tls)).connect(name, stream);
    exchange(tls.await?, path, token).await
}

async fn exchange<S>(stream: S, path: &str, token: &str) -> Result<(u16, String)>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = Request::get(path).header(HOST, "localhost");
    if !token.is_empty() {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    let answer = sender.send_request(request.body(Empty::<Bytes>::new())?);
    let answer = answer.await?;
    let code = answer.status().as_u16();
    let body = answer.into_body().collect().await?.to_bytes();
    connection.abort();
    Ok((code, String::from_utf8(body.to_vec())?))
}

fn token(cluster: &ControlPlane, user: &str) -> String {
    let text = std::fs::read_to_string(cluster.kubeconfig(user).unwrap()).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let token = config["users"][0]["user"]["token"].as_str();
    token.unwrap().to_owned()
}

/// Returns the roles that the chart renders for protected metrics.
async fn roles() -> String {
    let flags = [
        "--set=metrics.tlsSecret=any,metrics.auth=true",
        "--show-only=templates/rbac/metrics.yaml",
        "--show-only=templates/rbac/controller.yaml",
    ];
    template(&flags).await.unwrap()
}

#[tokio::test]
async fn metrics_are_for_those_who_may_and_a_replaced_certificate_is_served() {
    let options = Options {
        users: vec![
            User::new(ACCOUNT, &["system:serviceaccounts"]),
            User::new("scraper", &[]),
            User::new("stranger", &[]),
        ],
        ..Options::default()
    };
    let (cluster, _) = with_crds(options).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let first = certificate(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (cert, key) = (at("tls.crt"), at("tls.key"));
    let probes = format!("127.0.0.1:{}", ports::free().unwrap());
    let flags = [
        "--admin-tls-cert",
        &cert,
        "--admin-tls-key",
        &key,
        "--metrics-auth",
        "--probe-address",
        &probes,
    ];
    let mut daemon = start_controller(&cluster, ACCOUNT, &flags).unwrap();
    let [scraper, stranger] = ["scraper", "stranger"].map(|it| token(&cluster, it));
    let answers = async |daemon: &Daemon, cert: &str, path: &str, token: &str, code, says: &str| {
        let what = format!("GET {path}: {code}, {says:?}");
        until(&what, LIMIT, async || {
            let is = ask(daemon, cert, path, token).await?;
            anyhow::ensure!(is.0 == code && is.1.contains(says), "{is:?}");
            Ok(Some(()))
        })
        .await
    };
    // The roles are not applied yet, so the controller has no permission to review tokens.
    let says = "ClusterRole cadastre-metrics-auth";
    answers(&daemon, &first, "/metrics", &scraper, 503, says)
        .await
        .unwrap();
    let apply = ["apply", "-f", "-"];
    cluster.kubectl_stdin(&apply, &roles().await).await.unwrap();
    for (path, token, code, says) in [
        ("/metrics", "", 401, "a bearer token is asked for"),
        ("/metrics", "nobody's", 401, "knows nobody"),
        (
            "/metrics",
            stranger.as_str(),
            403,
            "stranger may not read /metrics",
        ),
        ("/metrics", scraper.as_str(), 403, "cadastre-metrics"),
        ("/healthz", "", 200, "ok"),
        ("/readyz", "", 200, ""),
        ("/nothing", "", 404, ""),
    ] {
        answers(&daemon, &first, path, token, code, says)
            .await
            .unwrap();
    }
    let bind = "create clusterrolebinding scraper --clusterrole=cadastre-metrics --user=scraper";
    cluster.kubectl_line(bind).await.unwrap();
    answers(
        &daemon,
        &first,
        "/metrics",
        &scraper,
        200,
        "cadastre_build_info",
    )
    .await
    .unwrap();

    // Hundreds of connections are open, before or during the TLS handshake. They must not block other clients.
    let mut slow = Vec::new();
    for begun in [&b""[..], b"\x16\x03\x01"].repeat(200) {
        let mut stream = TcpStream::connect(daemon.admin_address()).await.unwrap();
        let _ = stream.write_all(begun).await;
        slow.push(stream);
    }
    for path in ["/healthz", "/readyz"] {
        let stream = TcpStream::connect(&probes).await.unwrap();
        let is = exchange(stream, path, "").await.unwrap();
        assert_eq!(is.0, 200, "{is:?}");
        let is = ask(&daemon, &first, path, "").await.unwrap();
        assert_eq!(is.0, 200, "{is:?}");
    }
    let is = ask(&daemon, &first, "/metrics", &scraper).await.unwrap();
    assert_eq!(is.0, 200, "{is:?}");
    drop(slow);

    // If the new certificate cannot be read, the controller reports that and keeps using the old certificate and key. A
    // valid new pair of certificate and key replaces them.
    std::fs::write(&cert, "garbage").unwrap();
    until(
        "the unreadable certificate is reported",
        LIMIT,
        async || {
            let is = ask(&daemon, &first, "/healthz", "").await?;
            anyhow::ensure!(is.0 == 200, "{is:?}");
            let log = std::fs::read_to_string(daemon.process().log())?;
            Ok(log.contains("keeps its certificate").then_some(()))
        },
    )
    .await
    .unwrap();
    let second = certificate(folder.path());
    answers(&daemon, &second, "/healthz", "", 200, "ok")
        .await
        .unwrap();
    let old = ask(&daemon, &first, "/healthz", "").await;
    assert!(old.is_err(), "the old one is still served");
    daemon.process().check_running().unwrap();
}
