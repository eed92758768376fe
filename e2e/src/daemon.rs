//! The `cadastre` binary under test, run as a process.

use std::env;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use http::header::HOST;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::metrics::{self, Sample};
use crate::ports;
use crate::process::{self, Process};

const LOOK: Duration = Duration::from_millis(10);

/// How to start a [`Daemon`].
#[derive(Clone, Debug, Default)]
pub struct DaemonOptions {
    /// Part of the log's name: `cadastre-NAME.log`. Two daemons with the same folder need different names.
    pub name: String,
    /// The subcommand and its flags; `--admin-address` is added.
    pub args: Vec<String>,
    /// Additional environment variables; `KUBECONFIG` is set already.
    pub env: Vec<(String, String)>,
}

/// A running `cadastre`, killed by SIGKILL when dropped.
pub struct Daemon {
    process: Process,
    address: String,
}

impl Daemon {
    /// Starts `cadastre ARGS --admin-address 127.0.0.1:PORT` with the kubeconfig, logging to `folder`. Does
    /// not wait until it is ready.
    pub fn start(folder: &Path, kubeconfig: &Path, options: &DaemonOptions) -> Result<Self> {
        let address = format!("127.0.0.1:{}", ports::free()?);
        let mut command = process::command(&binary()?);
        command
            .current_dir(folder)
            .args(&options.args)
            .args(["--admin-address", &address])
            .env("KUBECONFIG", kubeconfig)
            .envs(options.env.iter().map(|(key, value)| (key, value)));
        let log = folder.join(format!("cadastre-{}.log", options.name));
        let process = Process::spawn("cadastre", command, &log)?;
        Ok(Self { process, address })
    }

    /// The address of its admin server, `127.0.0.1:PORT`.
    pub fn admin_address(&self) -> &str {
        &self.address
    }

    /// The process, for signals, usage, log and end.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Returns the body of a GET of `path` on its admin server; an error if the status is no success.
    pub async fn get(&self, path: &str) -> Result<String> {
        let (status, body) = self.ask(Method::GET, path, "").await?;
        if !status.is_success() {
            bail!("GET {path}: {status}: {}", body.trim());
        }
        Ok(body)
    }

    /// Sends a request to its admin server over a new connection, with a timeout of 5 s.
    pub async fn ask(
        &self,
        method: Method,
        path: &str,
        body: &str,
    ) -> Result<(StatusCode, String)> {
        let what = format!("no answer to {method} {path} within 5 s");
        let answer = request(&self.address, method, path, body);
        tokio::time::timeout(Duration::from_secs(5), answer)
            .await
            .context(what)?
    }

    /// The metrics that it serves; see [`metrics::sum`].
    pub async fn metrics(&self) -> Result<Vec<Sample>> {
        Ok(metrics::parse(&self.get("/metrics").await?))
    }

    /// The body of `/readyz` when it is ready; otherwise the error says why it is not.
    pub async fn ready(&self) -> Result<String> {
        self.get("/readyz").await
    }

    /// Waits at most `limit` until it is ready; fails at once if the process ends before.
    pub async fn wait_ready(&mut self, limit: Duration) -> Result<String> {
        let start = Instant::now();
        loop {
            let error = match self.ready().await {
                Ok(body) => return Ok(body),
                Err(error) => error,
            };
            self.process.check_running()?;
            if start.elapsed() > limit {
                bail!(
                    "cadastre is not ready after {limit:?}: {error:#}; {}",
                    self.process.log_tail(30)
                );
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// One plain HTTP request over a new connection.
pub(crate) async fn request(
    address: &str,
    method: Method,
    path: &str,
    body: &str,
) -> Result<(StatusCode, String)> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, address)
        .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    connection.abort();
    Ok((status, String::from_utf8(body.to_vec())?))
}

/// The path of `cadastre`: `CADASTRE_BIN`, else the binary of the same build as the running executable.
pub fn binary() -> Result<PathBuf> {
    match env::var_os("CADASTRE_BIN") {
        Some(path) => Ok(PathBuf::from(path)),
        None => sibling("cadastre", "CADASTRE_BIN"),
    }
}

/// The path of the CNI plugin: `CADASTRE_IPAM`, else `cadastre-ipam` of the same build.
pub fn plugin() -> Result<PathBuf> {
    match env::var_os("CADASTRE_IPAM") {
        Some(path) => Ok(PathBuf::from(path)),
        None => sibling("cadastre-ipam", "CADASTRE_IPAM"),
    }
}

/// The path of the kubectl plugin: `CADASTRE_KUBECTL`, else `kubectl-cadastre` of the same build.
pub fn kubectl_plugin() -> Result<PathBuf> {
    match env::var_os("CADASTRE_KUBECTL") {
        Some(path) => Ok(PathBuf::from(path)),
        None => sibling("kubectl-cadastre", "CADASTRE_KUBECTL"),
    }
}

fn sibling(name: &str, variable: &str) -> Result<PathBuf> {
    let this = env::current_exe()?;
    // Binaries are in target/debug, tests in target/debug/deps.
    let found = this
        .ancestors()
        .skip(1)
        .take(2)
        .map(|it| it.join(name))
        .find(|it| it.is_file());
    found.with_context(|| {
        format!(
            "no {name} beside {}: run `cargo build --workspace` (with --release if this is a release \
             build), or set {variable} to the binary",
            this.display()
        )
    })
}

/// Counts the flags in the output of `--help`; an error if a flag is not followed by its explanation.
pub fn explained_flags(help: &str) -> Result<usize> {
    let lines: Vec<&str> = help.lines().map(str::trim).collect();
    let mut count = 0;
    for pair in lines.windows(2).filter(|pair| pair[0].starts_with("--")) {
        let is_text = pair[1].len() > 10 && !pair[1].starts_with('-');
        anyhow::ensure!(is_text, "not explained: {}", pair[0]);
        count += 1;
    }
    Ok(count)
}
