//! Runs etcd and kube-apiserver on loopback, with data and logs in a folder of their own.
//!
//! # Guarantees
//! - Any number of control planes may run at the same time, because each has its own ports, folder and keys.
//! - Nothing is left behind. When the [`ControlPlane`] is dropped or this process ends, the processes of the control
//!   plane end and its folder is removed ([`crate::scratch`] says when the folder is kept).
//! - A killed API server can be restarted on the same port with the same data, or with older data
//!   ([`ControlPlane::with_data`]).
//!
//! # Caveats
//! - etcd does not fsync. A crash of the host loses data, but a crash of etcd alone does not.
//! - No controllers run unless [`ControlPlane::start_kcm`] is called. Without them, nothing collects garbage, creates
//!   ServiceAccounts or taints nodes. So by default, admission does not require that pods have a ServiceAccount.
//! - A `ControlPlane` in a `static` is never dropped, so its processes run until this process ends.

use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;

use crate::apiserver::ApiServer;
use crate::assets::{self, Program};
use crate::etcd::Member;
use crate::kcm::{self, KcmOptions};
use crate::kubeconfig::{self, User, write_private};
use crate::metrics::{self, Sample};
use crate::pki::{self, Pki};
use crate::process::Process;
use crate::scheduler;
use crate::scratch::Scratch;

/// The user of [`ControlPlane::client`]. The user is in the group `system:masters`, and so is exempt from flow control.
pub const ADMIN: &str = "admin";

/// The maximum time for kube-apiserver to become ready. It takes about 4 s on an idle host, longer on a busy one.
const START_LIMIT: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(25);

/// Settings for [`ControlPlane::start`].
#[derive(Clone, Debug)]
pub struct Options {
    /// `--service-cluster-ip-range`: one CIDR, or two of different families, comma-separated.
    pub service_cidrs: String,
    /// Users that can authenticate in addition to [`ADMIN`], kube-controller-manager and kube-scheduler.
    pub users: Vec<User>,
    /// Additional flags for kube-apiserver, as `--name=value`.
    pub apiserver_args: Vec<String>,
    /// Whether admission mounts ServiceAccount tokens into pods. If so, a pod's ServiceAccount must exist before the
    /// pod, and kube-controller-manager must run to create ServiceAccounts.
    pub service_accounts: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            service_cidrs: "10.96.0.0/16,fd00:96::/112".to_owned(),
            users: Vec::new(),
            apiserver_args: Vec::new(),
            service_accounts: false,
        }
    }
}

/// A running control plane. Fields are dropped in the order in which they are declared: first kube-apiserver, which is
/// a client of etcd, then etcd, and the folder last.
#[derive(Debug)]
pub struct ControlPlane {
    apiserver: ApiServer,
    etcd: Member,
    options: Options,
    pki: Pki,
    users: Vec<User>,
    scratch: Scratch,
}

impl ControlPlane {
    /// Starts etcd and kube-apiserver, and returns when kube-apiserver is ready. Missing programs are built first,
    /// which takes minutes (see [`crate::assets`]).
    pub async fn start(options: Options) -> Result<Self> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        tokio::task::spawn_blocking(|| assets::ensure(&assets::CONTROL_PLANE)).await??;
        let scratch = Scratch::new()?;
        let folder = scratch.path();
        let pki = pki::create(folder)?;
        let mut users = vec![
            User::new(ADMIN, &["system:masters"]),
            User::new(kcm::USER, &[]),
            User::new(scheduler::USER, &[]),
        ];
        users.extend(options.users.iter().cloned());
        write_private(&folder.join("tokens.csv"), &kubeconfig::token_file(&users))?;
        let mut etcd = Member::alone(folder)?;
        etcd.start()?;
        let mut this = Self {
            apiserver: ApiServer::new("kube-apiserver")?,
            etcd,
            options,
            pki,
            users,
            scratch,
        };
        this.start_apiserver().await?;
        this.kubeconfig(ADMIN)?;
        Ok(this)
    }

    /// Starts kube-apiserver unless it already runs. kube-apiserver keeps the port and the data of its earlier runs.
    /// Returns when kube-apiserver is ready and the namespace `default` exists.
    pub async fn start_apiserver(&mut self) -> Result<()> {
        let etcd_urls = [self.etcd.url()];
        self.apiserver
            .start(self.scratch.path(), &etcd_urls, &self.pki, &self.options)?;
        let client = self.client().await?;
        let start = Instant::now();
        loop {
            let answer = tokio::time::timeout(Duration::from_secs(5), is_ready(&client)).await;
            if matches!(answer, Ok(Ok(()))) {
                return Ok(());
            }
            self.etcd.check_running()?;
            self.apiserver.check_running()?;
            if start.elapsed() > START_LIMIT {
                bail!(
                    "kube-apiserver is not ready after {START_LIMIT:?}: {answer:?}; {}",
                    self.apiserver()?.log_tail(30)
                );
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Kills kube-apiserver with SIGKILL and waits until the process has ended. All connections break. etcd keeps
    /// running with its data.
    pub fn kill_apiserver(&mut self) -> Result<()> {
        self.apiserver.kill()
    }

    /// Stops kube-apiserver and etcd, calls `work` with etcd's data folder, and restarts both on the same ports. `work`
    /// can back the data up or restore a backup.
    pub async fn with_data(&mut self, work: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        self.kill_apiserver()?;
        self.etcd.kill()?;
        work(&self.etcd.data())?;
        self.etcd.start()?;
        self.start_apiserver().await
    }

    /// Returns the process of kube-apiserver, to send signals (`STOP` makes it hang, `CONT` resumes it) and to measure
    /// memory and processor time.
    pub fn apiserver(&self) -> Result<&Process> {
        self.apiserver.process()
    }

    /// Returns the process of etcd, to send signals and to measure memory and processor time.
    pub fn etcd(&self) -> Result<&Process> {
        self.etcd.process()
    }

    /// Returns the folder with data, keys and logs.
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the address on which kube-apiserver listens. The address does not change when kube-apiserver restarts.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.apiserver.port()).into()
    }

    /// Returns the URL of kube-apiserver, `https://127.0.0.1:PORT`.
    pub fn server(&self) -> String {
        self.apiserver.url()
    }

    /// Returns a new client of [`ADMIN`]. The client verifies the server's certificate and has no retries, no rate
    /// limit and no timeout.
    pub async fn client(&self) -> Result<Client> {
        self.client_of(ADMIN).await
    }

    /// Returns a new client that authenticates as `user`. Its other settings are those of [`ControlPlane::client`].
    pub async fn client_of(&self, user: &str) -> Result<Client> {
        kubeconfig::client(self.kubeconfig_value(user)?).await
    }

    /// Returns a new client that authenticates with a bearer token, for example with a ServiceAccount's token.
    pub async fn client_by(&self, token: &str) -> Result<Client> {
        let mut config = self.kubeconfig_value(ADMIN)?;
        let user = config.pointer_mut("/users/0/user/token");
        *user.context("a kubeconfig has a user")? = Value::from(token);
        kubeconfig::client(config).await
    }

    /// Writes a kubeconfig (mode 0600) with which `user` reaches kube-apiserver through a proxy, and returns its path.
    pub fn kubeconfig_through(&self, user: &str, proxy: SocketAddr) -> Result<PathBuf> {
        let direct = std::fs::read_to_string(self.kubeconfig(user)?)?;
        let path = self
            .folder()
            .join(format!("through-{}.kubeconfig", proxy.port()));
        let url = format!("https://{proxy}");
        write_private(&path, &direct.replace(&self.server(), &url))?;
        Ok(path)
    }

    /// Returns the path of a kubeconfig (mode 0600) for `user`. The first call writes the file.
    pub fn kubeconfig(&self, user: &str) -> Result<PathBuf> {
        let path = self
            .folder()
            .join(format!("{}.kubeconfig", user.replace([':', '/'], "-")));
        if !path.exists() {
            write_private(&path, &format!("{:#}\n", self.kubeconfig_value(user)?))?;
        }
        Ok(path)
    }

    /// Returns a kubeconfig for every user. The fields of `cluster` replace fields of the same name in the cluster
    /// entry.
    pub(crate) fn kubeconfigs(&self, cluster: &Value) -> Result<Vec<(String, Value)>> {
        let own = |(key, value): (&String, &Value)| (key.clone(), value.clone());
        let one = |user: &User| -> Result<(String, Value)> {
            let mut config = self.kubeconfig_value(&user.name)?;
            let reached = config.pointer_mut("/clusters/0/cluster");
            let reached = reached.and_then(Value::as_object_mut);
            let reached = reached.context("a kubeconfig has a cluster")?;
            reached.extend(cluster.as_object().into_iter().flatten().map(own));
            Ok((user.name.clone(), config))
        };
        self.users.iter().map(one).collect()
    }

    /// Keeps the folder when this value is dropped, for debugging.
    pub fn keep(&self) {
        self.scratch.keep();
    }

    /// Runs kubectl as [`ADMIN`] and returns its standard output. If kubectl fails, its standard error is the error.
    pub async fn kubectl<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<String> {
        self.kubectl_stdin(args, "").await
    }

    /// Runs kubectl like [`ControlPlane::kubectl`], with arguments that are separated by spaces.
    pub async fn kubectl_line(&self, arguments: &str) -> Result<String> {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        self.kubectl(&arguments).await
    }

    /// Runs kubectl like [`ControlPlane::kubectl`], with `input` as standard input, as `apply -f -` needs.
    pub async fn kubectl_stdin<S: AsRef<OsStr>>(&self, args: &[S], input: &str) -> Result<String> {
        kubectl(self.folder(), &self.kubeconfig(ADMIN)?, args, input).await
    }

    /// Starts kube-controller-manager, which is killed when the returned value is dropped.
    pub fn start_kcm(&self, options: &KcmOptions) -> Result<Process> {
        kcm::start(self, options)
    }

    /// Returns kube-apiserver's own metrics. [`metrics::requests`] extracts the counts of requests from these metrics.
    pub async fn apiserver_metrics(&self) -> Result<Vec<Sample>> {
        let client = self.client().await?;
        Ok(metrics::parse(&get(&client, "/metrics").await?))
    }

    /// Returns etcd's own metrics, for example the size of its database.
    pub async fn etcd_metrics(&self) -> Result<Vec<Sample>> {
        self.etcd.gateway()?.metrics().await
    }

    /// Returns the port, token and CA of [`ADMIN`], for clients that do not use the crate `kube`.
    pub fn endpoint(&self) -> Result<crate::raw::Endpoint> {
        crate::raw::Endpoint::new(
            self.apiserver.port(),
            &self.user(ADMIN)?.token,
            &self.pki.ca,
        )
    }

    pub(crate) fn pki(&self) -> &Pki {
        &self.pki
    }

    pub(crate) fn service_cidrs(&self) -> &str {
        &self.options.service_cidrs
    }

    fn user(&self, name: &str) -> Result<&User> {
        self.users
            .iter()
            .find(|user| user.name == name)
            .with_context(|| {
                format!("no user {name:?}: tokens are read at start, so add it to Options::users")
            })
    }

    fn kubeconfig_value(&self, user: &str) -> Result<Value> {
        Ok(kubeconfig::kubeconfig(
            &self.server(),
            &self.pki.ca,
            self.user(user)?,
        ))
    }
}

/// Runs kubectl with a kubeconfig and `input` as standard input. Returns its standard output. If kubectl fails, its
/// standard error is the error.
pub(crate) async fn kubectl<S: AsRef<OsStr>>(
    folder: &Path,
    kubeconfig: &Path,
    args: &[S],
    input: &str,
) -> Result<String> {
    let mut child = tokio::process::Command::new(assets::find(Program::Kubectl)?)
        .args(args)
        .env("KUBECONFIG", kubeconfig)
        .env("HOME", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot run kubectl")?;
    if let Some(mut stdin) = child.stdin.take() {
        // An error is ignored, because kubectl may end before it has read its input. Its exit status is checked
        // anyway.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    let output = child.wait_with_output().await?;
    if !output.status.success() {
        bail!(
            "kubectl failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8(output.stdout)?)
}

pub(crate) async fn is_ready(client: &Client) -> Result<()> {
    get(client, "/readyz").await?;
    Api::<Namespace>::all(client.clone()).get("default").await?;
    Ok(())
}

async fn get(client: &Client, path: &str) -> Result<String> {
    Ok(client
        .request_text(http::Request::get(path).body(Vec::new())?)
        .await?)
}
