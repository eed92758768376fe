//! One kube-apiserver as a process.

use std::path::Path;

use anyhow::Result;

use crate::assets::{self, Program};
use crate::control_plane::Options;
use crate::etcd::gogc;
use crate::pki::Pki;
use crate::ports;
use crate::process::{self, Process, Restartable};

/// A kube-apiserver. It is killed when this value is dropped. It keeps its port when it is killed and started again.
#[derive(Debug)]
pub struct ApiServer {
    port: u16,
    process: Restartable,
}

impl ApiServer {
    /// Returns a server that does not run yet. Its log is `NAME.log`.
    pub(crate) fn new(name: &str) -> Result<Self> {
        Ok(Self {
            port: ports::free()?,
            process: Restartable::new(name),
        })
    }

    /// The port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL, `https://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Starts the server unless it runs. Does not wait until it is ready. `folder` contains the file with the users'
    /// tokens, and gets the log.
    pub(crate) fn start(
        &mut self,
        folder: &Path,
        etcd_urls: &[String],
        pki: &Pki,
        options: &Options,
    ) -> Result<()> {
        let path = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
        let mut command = process::command(&assets::find(Program::KubeApiserver)?);
        command
            .current_dir(folder)
            .env("GOGC", gogc())
            .arg(format!("--etcd-servers={}", etcd_urls.join(",")))
            .args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"])
            // By default, kube-apiserver publishes its address as endpoint of the Service `kubernetes`. A published
            // address must not be a loopback address. So nothing is published. A test that needs the endpoint
            // publishes one of its own.
            .arg("--endpoint-reconciler-type=none")
            .arg(format!("--secure-port={}", self.port))
            .arg(path("cert-dir", folder))
            .arg(path("tls-cert-file", &pki.serving_cert))
            .arg(path("tls-private-key-file", &pki.serving_key))
            .arg(path("token-auth-file", &folder.join("tokens.csv")))
            .arg("--service-account-issuer=https://kubernetes.default.svc")
            .arg(path("service-account-key-file", &pki.service_account_pub))
            .arg(path(
                "service-account-signing-key-file",
                &pki.service_account_key,
            ))
            .arg(format!(
                "--service-cluster-ip-range={}",
                options.service_cidrs
            ))
            .args(["--authorization-mode=Node,RBAC", "--allow-privileged=true"])
            .args(&options.apiserver_args);
        if !options.service_accounts {
            command.arg("--disable-admission-plugins=ServiceAccount");
        }
        self.process.start(command, folder)
    }

    /// Kills the server with SIGKILL, and waits until the process has ended. All its connections break.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// Returns the process, to send signals and to measure memory and processor time.
    pub fn process(&self) -> Result<&Process> {
        self.process.process()
    }

    /// Returns an error with the end of the log if the process has ended by itself.
    pub(crate) fn check_running(&mut self) -> Result<()> {
        self.process.check_running()
    }
}
