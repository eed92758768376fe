//! Runs kube-controller-manager. In most clusters it allocates podCIDRs, so benches compare Cadastre with it. Some
//! tests also need it to create ServiceAccounts and to collect garbage.

use std::path::PathBuf;

use anyhow::Result;

use crate::assets::{self, Program};
use crate::control_plane::ControlPlane;
use crate::ports;
use crate::process::{self, Process};

/// The user as which kube-controller-manager authenticates. As in clusters set up by kubeadm, each of its controllers
/// uses a ServiceAccount of its own.
pub const USER: &str = "system:kube-controller-manager";

/// Settings for [`ControlPlane::start_kcm`].
#[derive(Clone, Debug)]
pub struct KcmOptions {
    /// `--allocate-node-cidrs`; needs `cluster_cidrs`.
    pub allocate: bool,
    /// `--cluster-cidr`: none, one, or two CIDRs of different families. Each node gets a /24 (IPv4) and a /64 (IPv6)
    /// from these CIDRs.
    pub cluster_cidrs: Vec<String>,
    /// `--kube-api-qps`, which applies to each controller; kube-controller-manager's default is 20.
    pub qps: u32,
    /// `--kube-api-burst`; kube-controller-manager's default is 30.
    pub burst: u32,
    /// `--controllers`, for example only `node-ipam-controller`; empty means all.
    pub controllers: Vec<String>,
    /// Additional flags, as `--name=value`.
    pub args: Vec<String>,
    /// Another kubeconfig than the user's own, for example one with a proxy
    pub kubeconfig: Option<PathBuf>,
    /// The log file's name without `.log`
    pub log: String,
}

impl Default for KcmOptions {
    /// Returns settings with which all controllers run, but podCIDRs are not allocated. The rate limits are
    /// kube-controller-manager's own defaults.
    fn default() -> Self {
        Self {
            allocate: false,
            cluster_cidrs: Vec::new(),
            qps: 20,
            burst: 30,
            controllers: Vec::new(),
            args: Vec::new(),
            kubeconfig: None,
            log: "kube-controller-manager".to_owned(),
        }
    }
}

impl KcmOptions {
    /// Returns settings with which kube-controller-manager runs only one controller, the one that allocates podCIDRs.
    pub fn node_ipam(cluster_cidrs: &[&str]) -> Self {
        Self {
            allocate: true,
            cluster_cidrs: cluster_cidrs.iter().map(ToString::to_string).collect(),
            controllers: vec!["node-ipam-controller".to_owned()],
            ..Self::default()
        }
    }
}

pub(crate) fn start(cluster: &ControlPlane, options: &KcmOptions) -> Result<Process> {
    let folder = cluster.folder();
    let mut command = process::command(&assets::find(Program::KubeControllerManager)?);
    let kubeconfig = match &options.kubeconfig {
        Some(path) => path.clone(),
        None => cluster.kubeconfig(USER)?,
    };
    command
        .current_dir(folder)
        .arg(format!("--kubeconfig={}", kubeconfig.display()))
        .args([
            "--leader-elect=false",
            "--use-service-account-credentials=true",
        ])
        .args([
            "--bind-address=127.0.0.1",
            "--authorization-always-allow-paths=/healthz,/metrics",
        ])
        .arg(format!("--secure-port={}", ports::free()?))
        .arg(format!("--cert-dir={}", folder.join("kcm").display()))
        .arg(format!(
            "--service-account-private-key-file={}",
            cluster.pki().service_account_key.display()
        ))
        .arg(format!("--root-ca-file={}", cluster.pki().ca.display()))
        .arg(format!(
            "--service-cluster-ip-range={}",
            cluster.service_cidrs()
        ))
        .arg(format!("--allocate-node-cidrs={}", options.allocate))
        .arg(format!("--kube-api-qps={}", options.qps))
        .arg(format!("--kube-api-burst={}", options.burst));
    if !options.cluster_cidrs.is_empty() {
        command.arg(format!(
            "--cluster-cidr={}",
            options.cluster_cidrs.join(",")
        ));
    }
    if !options.controllers.is_empty() {
        command.arg(format!("--controllers={}", options.controllers.join(",")));
    }
    command.args(&options.args);
    Process::spawn(
        "kube-controller-manager",
        command,
        &folder.join(format!("{}.log", options.log)),
    )
}
