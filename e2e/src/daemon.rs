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
use rustix::process::Signal;
use tokio::net::TcpStream;

use crate::metrics::{self, Sample};
use crate::ports;
use crate::process::{self, Process};

const LOOK: Duration = Duration::from_millis(10);

/// Settings for [`Daemon::start`].
#[derive(Clone, Debug, Default)]
pub struct DaemonOptions {
    /// Part of the log file's name: `cadastre-NAME.log`. Two daemons with the same folder need different names.
    pub name: String,
    /// The subcommand and its flags, without `--admin-address`, which [`Daemon::start`] adds.
    pub args: Vec<String>,
    /// Additional environment variables. `KUBECONFIG` is set in any case.
    pub env: Vec<(String, String)>,
}

/// A running `cadastre` process. The process is killed by SIGKILL when this value is dropped.
pub struct Daemon {
    process: Process,
    address: String,
}

impl Daemon {
    /// Starts `cadastre ARGS --admin-address 127.0.0.1:PORT` with this kubeconfig and a log in `folder`. Does not wait
    /// until the daemon is ready.
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

    /// Returns the address of the daemon's admin server, `127.0.0.1:PORT`.
    pub fn admin_address(&self) -> &str {
        &self.address
    }

    /// Returns the process, for example to send signals, to measure its usage, to read its log, or to wait for its end.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Sends a signal to the process, as [`Process::signal`] does.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Returns the body of a GET of `path` on the daemon's admin server. A status other than 2xx is an error.
    pub async fn get(&self, path: &str) -> Result<String> {
        get(&self.address, path).await
    }

    /// Sends a request to the daemon's admin server over a new connection, with a timeout of 5 s.
    pub async fn ask(
        &self,
        method: Method,
        path: &str,
        body: &str,
    ) -> Result<(StatusCode, String)> {
        ask(&self.address, method, path, body).await
    }

    /// Returns the daemon's metrics; see [`metrics::sum`].
    pub async fn metrics(&self) -> Result<Vec<Sample>> {
        Ok(metrics::parse(&self.get("/metrics").await?))
    }

    /// Returns the body of `/readyz` if the daemon is ready. Otherwise the error says why it is not.
    pub async fn ready(&self) -> Result<String> {
        self.get("/readyz").await
    }

    /// Waits at most `limit` until the daemon is ready. Fails at once if the process ends.
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

/// Does what [`Daemon::get`] does, for the daemon whose admin server has this address.
pub async fn get(address: &str, path: &str) -> Result<String> {
    let (status, body) = ask(address, Method::GET, path, "").await?;
    if !status.is_success() {
        bail!("GET {path}: {status}: {}", body.trim());
    }
    Ok(body)
}

async fn ask(
    address: &str,
    method: Method,
    path: &str,
    body: &str,
) -> Result<(StatusCode, String)> {
    let what = format!("no answer to {method} {path} within 5 s");
    let answer = request(address, method, path, body);
    tokio::time::timeout(Duration::from_secs(5), answer)
        .await
        .context(what)?
}

/// Sends one HTTP request without TLS over a new connection. Returns the status and the body.
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

/// Returns the path of `cadastre`: the value of the environment variable `CADASTRE_BIN` if set, else the path of the
/// binary built with the tests.
pub fn binary() -> Result<PathBuf> {
    built("cadastre", "CADASTRE_BIN")
}

/// Returns the path of the CNI plugin: the value of the environment variable `CADASTRE_IPAM` if set, else the path of
/// the binary built with the tests.
pub fn plugin() -> Result<PathBuf> {
    built("cadastre-ipam", "CADASTRE_IPAM")
}

/// Returns the path of the kubectl plugin: the value of the environment variable `CADASTRE_KUBECTL` if set, else the
/// path of the binary built with the tests.
pub fn kubectl_plugin() -> Result<PathBuf> {
    built("kubectl-cadastre", "CADASTRE_KUBECTL")
}

/// Returns the path in the environment variable `variable`. If it is not set, returns the path of the binary `name`
/// that was built together with the running executable.
fn built(name: &str, variable: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        return Ok(PathBuf::from(path));
    }
    let this = env::current_exe()?;
    // Binaries are in target/debug, and tests in target/debug/deps. So the folder of this executable and its parent are
    // searched.
    let mut paths = this.ancestors().skip(1).take(2).map(|it| it.join(name));
    paths.find(|it| it.is_file()).with_context(|| {
        format!(
            "no {name} beside {}: run `cargo build --workspace` (with --release if this is a release \
             build), or set {variable} to the binary",
            this.display()
        )
    })
}

/// Counts the flags in the output of `--help`. A flag that is not followed by a line of explanation is an error.
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
