//! Finds the programs that run the control plane and the nodes, and builds missing ones.
//!
//! The programs of Kubernetes, and etcd, are looked up in the folder named by `KUBEBUILDER_ASSETS` first. If such a
//! program is not there, and for all other programs, the cache is used: `$CADASTRE_CACHE`, else
//! `$XDG_CACHE_HOME/cadastre`, else `~/.cache/cadastre`. The cache has a sub-folder for each Go module and release, for
//! example `control-plane/v1.36.3`. If a program of Kubernetes is missing from the cache, too, it is downloaded into the
//! cache ([`download`](crate::download)). If that fails, and for all other programs, `go build` builds it once into the
//! cache, as a static binary. The Go modules are in `e2e/calico`, `e2e/control-plane`, `e2e/containerd`,
//! `e2e/cni-plugins`, `e2e/coredns`, `e2e/frr-k8s`, `e2e/grpc-go`, `e2e/helm`, `e2e/helm3`, `e2e/multus`,
//! `e2e/node-ipam-controller`, `e2e/porcupine`, `e2e/prometheus` and `e2e/whereabouts`; their `go.sum` files pin every
//! source. On two cores, the build takes about eight minutes for the five programs of [`CONTROL_PLANE`], seven minutes
//! for [`NODES`], three for [`SERVICES`], six for [`TOOLS`], and three for [`MONITORING`].
//!
//! A lock file keeps two processes from building at the same time. While a program is being built, its file has another
//! name. So an interrupted build leaves no file under the program's name.

use std::env;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::download::ReleaseServer;
use crate::process::{self, Process};

/// The Kubernetes release of the programs of the control plane, of kubelets and of kube-proxy.
pub const KUBERNETES: &str = "v1.36.3";
/// The containerd release of the nodes.
pub const CONTAINERD: &str = "v2.3.7";
/// The release of the reference CNI plugins.
pub const CNI_PLUGINS: &str = "v1.9.1";
/// The release of Multus, which attaches pods to second networks.
pub const MULTUS: &str = "v4.3.0";
/// The release of CoreDNS, the DNS server of Kubernetes.
pub const COREDNS: &str = "v1.15.0";
/// The Prometheus release 3.15.0, written as the version of its Go module.
pub const PROMETHEUS: &str = "v0.315.0";
/// The release of helm 4, which tests use unless they ask for helm 3.
pub const HELM: &str = "v4.3.1";
/// The release of helm 3, which is tested too, because most clusters still use helm 3.
pub const HELM3: &str = "v3.22.0";
/// The release of the module that defines the kind IPAMClaim.
pub const IPAM_CLAIMS: &str = "v0.5.1-alpha";
/// The release of frr-k8s, which announces the ranges of nodes by BGP.
pub const FRR_K8S: &str = "v0.0.26";
/// The grpc-go release whose clients are tested.
pub const GRPC_GO: &str = "v1.83.2";
/// The release of whereabouts, with which Cadastre is compared.
pub const WHEREABOUTS: &str = "v0.9.2";
/// The release of Calico, with whose IPAM Cadastre is compared.
pub const CALICO: &str = "v3.31.0";
/// The version of node-ipam-controller, with which Cadastre is compared. The newest release is of an earlier path of
/// the Go module, so this is a commit.
pub const NODE_IPAM_CONTROLLER: &str = "v0.2.1-0.20260722110352-aa9996c92490";
/// The release of porcupine, with which histories are checked.
pub const PORCUPINE: &str = "v1.3.1";

/// The path of frr-k8s' Go module, which contains the source, the CRDs and the script that reloads FRR.
const FRR_K8S_MODULE: &str = "github.com/metallb/frr-k8s";
/// The path of Multus' Go module, which contains the source and the manifest.
const MULTUS_MODULE: &str = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4";

/// The path of Calico's Go module, which contains the source and the CRDs.
const CALICO_MODULE: &str = "github.com/projectcalico/calico";
/// The path of node-ipam-controller's Go module, which contains the source and the CRD.
const NODE_IPAM_CONTROLLER_MODULE: &str = "sigs.k8s.io/node-ipam-controller";
/// The path of whereabouts' Go module, which contains the source and the CRDs.
const WHEREABOUTS_MODULE: &str = "github.com/k8snetworkplumbingwg/whereabouts";

/// Programs that a [`ControlPlane`](crate::ControlPlane) runs.
pub const CONTROL_PLANE: [Program; 5] = [
    Program::Etcd,
    Program::KubeApiserver,
    Program::KubeControllerManager,
    Program::KubeScheduler,
    Program::Kubectl,
];

/// Programs that nodes with real kubelets need in addition to [`CONTROL_PLANE`].
pub const NODES: [Program; 14] = [
    Program::Kubelet,
    Program::Containerd,
    Program::ContainerdShim,
    Program::Ctr,
    Program::Bridge,
    Program::Ipvlan,
    Program::Loopback,
    Program::Macvlan,
    Program::Portmap,
    Program::Ptp,
    Program::HostLocal,
    Program::Cnitool,
    Program::Multus,
    Program::FrrK8s,
];

/// Programs that make Services work on nodes: addresses and DNS names.
pub const SERVICES: [Program; 2] = [Program::KubeProxy, Program::CoreDns];
/// Programs for the tests of alerts and dashboards: Prometheus and its tool `promtool`.
pub const MONITORING: [Program; 2] = [Program::Prometheus, Program::Promtool];
/// Programs that install charts.
pub const TOOLS: [Program; 2] = [Program::Helm, Program::Helm3];
/// Plugins of protoc that generate Go code from a proto file.
pub const GENERATORS: [Program; 2] = [Program::ProtocGenGo, Program::ProtocGenGoGrpc];
/// The program that checks histories.
pub const HISTORY_CHECKERS: [Program; 1] = [Program::HistoryChecker];

/// A program that the harness can find or build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `etcd`, the API server's database
    Etcd,
    /// `kube-apiserver`, which serves the Kubernetes API
    KubeApiserver,
    /// `kube-controller-manager`, which runs the controllers of Kubernetes
    KubeControllerManager,
    /// `kube-scheduler`, which binds pods to nodes
    KubeScheduler,
    /// `kubelet`, which runs the pods of a node
    Kubelet,
    /// `kube-proxy`, which forwards connections to Services on each node
    KubeProxy,
    /// `kubectl`, the command line client of the API
    Kubectl,
    /// `containerd`, the container runtime of the nodes
    Containerd,
    /// `containerd-shim-runc-v2`, which containerd finds by name in `PATH`
    ContainerdShim,
    /// `ctr`, containerd's command line
    Ctr,
    /// `bridge`, a CNI plugin that connects pods to a bridge of the node
    Bridge,
    /// `ipvlan`, a CNI plugin that connects pods to the network of the node's interface, by its MAC address
    Ipvlan,
    /// `loopback`, a CNI plugin that sets up a pod's interface `lo`
    Loopback,
    /// `macvlan`, a CNI plugin that connects pods to the network of the node's interface
    Macvlan,
    /// `portmap`, a CNI plugin that forwards ports of the node to pods
    Portmap,
    /// `ptp`, a CNI plugin that connects each pod to the node by a veth pair
    Ptp,
    /// `host-local`, the reference CNI IPAM plugin
    HostLocal,
    /// `cnitool`, which calls plugins as a runtime does
    Cnitool,
    /// `multus`, a CNI plugin that calls the plugins of several networks for one pod
    Multus,
    /// `frr-k8s-controller`, which configures FRR on a node by FRRConfigurations
    FrrK8s,
    /// `coredns`, the DNS server of the cluster, with only a few of CoreDNS's plugins
    CoreDns,
    /// `prometheus`, which scrapes metrics and evaluates alert rules
    Prometheus,
    /// `promtool`, which checks metrics and tests rules
    Promtool,
    /// `helm`, which installs charts
    Helm,
    /// `helm` 3, the major release before the current one
    Helm3,
    /// `protoc-gen-go`, which generates Go code for messages
    ProtocGenGo,
    /// `protoc-gen-go-grpc`, which generates Go code for services
    ProtocGenGoGrpc,
    /// `whereabouts`, a CNI IPAM plugin that keeps its addresses in the API
    Whereabouts,
    /// `calico-ipam`, Calico's CNI IPAM plugin, which keeps its addresses in the API
    CalicoIpam,
    /// `node-ipam-controller`, which allocates podCIDRs from several ranges
    NodeIpamController,
    /// `history-checker`, which says whether a history is linearizable
    HistoryChecker,
}

/// The Go module that a program is built from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    ControlPlane,
    Containerd,
    CniPlugins,
    Multus,
    FrrK8s,
    CoreDns,
    Prometheus,
    Helm,
    Helm3,
    GrpcGo,
    Porcupine,
    Whereabouts,
    Calico,
    NodeIpamController,
}

impl Source {
    /// Returns the name of the module's folder, which is the same in `e2e` and in the cache.
    fn folder(self) -> &'static str {
        match self {
            Self::ControlPlane => "control-plane",
            Self::Containerd => "containerd",
            Self::CniPlugins => "cni-plugins",
            Self::Multus => "multus",
            Self::FrrK8s => "frr-k8s",
            Self::CoreDns => "coredns",
            Self::Prometheus => "prometheus",
            Self::Helm => "helm",
            Self::Helm3 => "helm3",
            Self::GrpcGo => "grpc-go",
            Self::Porcupine => "porcupine",
            Self::Whereabouts => "whereabouts",
            Self::Calico => "calico",
            Self::NodeIpamController => "node-ipam-controller",
        }
    }

    fn release(self) -> &'static str {
        match self {
            Self::ControlPlane => KUBERNETES,
            Self::Containerd => CONTAINERD,
            Self::CniPlugins => CNI_PLUGINS,
            Self::Multus => MULTUS,
            Self::FrrK8s => FRR_K8S,
            Self::CoreDns => COREDNS,
            Self::Prometheus => PROMETHEUS,
            Self::Helm => HELM,
            Self::Helm3 => HELM3,
            Self::GrpcGo => GRPC_GO,
            Self::Porcupine => PORCUPINE,
            Self::Whereabouts => WHEREABOUTS,
            Self::Calico => CALICO,
            Self::NodeIpamController => NODE_IPAM_CONTROLLER,
        }
    }
}

impl Source {
    /// Returns roughly how many seconds `go build` takes on two cores for one program of this module.
    fn seconds(self) -> u64 {
        match self {
            Self::Calico | Self::ControlPlane | Self::FrrK8s | Self::Prometheus => 90,
            Self::Containerd => 45,
            Self::CoreDns | Self::Multus | Self::NodeIpamController | Self::Whereabouts => 60,
            Self::CniPlugins | Self::GrpcGo | Self::Porcupine => 5,
            Self::Helm | Self::Helm3 => 150,
        }
    }
}

impl Program {
    /// Returns the file name of the executable. helm 3 and helm 4 have the same file name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiserver => "kube-apiserver",
            Self::KubeControllerManager => "kube-controller-manager",
            Self::KubeScheduler => "kube-scheduler",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
            Self::Kubectl => "kubectl",
            Self::Containerd => "containerd",
            Self::ContainerdShim => "containerd-shim-runc-v2",
            Self::Ctr => "ctr",
            Self::Bridge => "bridge",
            Self::Ipvlan => "ipvlan",
            Self::Loopback => "loopback",
            Self::Macvlan => "macvlan",
            Self::Portmap => "portmap",
            Self::Ptp => "ptp",
            Self::HostLocal => "host-local",
            Self::Cnitool => "cnitool",
            Self::Multus => "multus",
            Self::FrrK8s => "frr-k8s-controller",
            Self::CoreDns => "coredns",
            Self::Prometheus => "prometheus",
            Self::Promtool => "promtool",
            Self::Helm | Self::Helm3 => "helm",
            Self::ProtocGenGo => "protoc-gen-go",
            Self::ProtocGenGoGrpc => "protoc-gen-go-grpc",
            Self::Whereabouts => "whereabouts",
            // Calico's plugins are one executable, whose file name determines which plugin it is.
            Self::CalicoIpam => "calico-ipam",
            Self::NodeIpamController => "node-ipam-controller",
            Self::HistoryChecker => "history-checker",
        }
    }

    fn source(self) -> Source {
        match self {
            Self::Etcd
            | Self::KubeApiserver
            | Self::KubeControllerManager
            | Self::KubeScheduler
            | Self::Kubelet
            | Self::KubeProxy
            | Self::Kubectl => Source::ControlPlane,
            Self::Containerd | Self::ContainerdShim | Self::Ctr => Source::Containerd,
            Self::Bridge
            | Self::Ipvlan
            | Self::Loopback
            | Self::Macvlan
            | Self::Portmap
            | Self::Ptp
            | Self::HostLocal
            | Self::Cnitool => Source::CniPlugins,
            Self::Multus => Source::Multus,
            Self::FrrK8s => Source::FrrK8s,
            Self::CoreDns => Source::CoreDns,
            Self::Prometheus | Self::Promtool => Source::Prometheus,
            Self::Helm => Source::Helm,
            Self::Helm3 => Source::Helm3,
            Self::ProtocGenGo | Self::ProtocGenGoGrpc => Source::GrpcGo,
            Self::Whereabouts => Source::Whereabouts,
            Self::CalicoIpam => Source::Calico,
            Self::NodeIpamController => Source::NodeIpamController,
            Self::HistoryChecker => Source::Porcupine,
        }
    }

    fn package(self) -> String {
        const CNI: &str = "github.com/containernetworking";
        let name = self.name();
        match self {
            Self::Etcd => "go.etcd.io/etcd/server/v3".to_owned(),
            Self::Bridge | Self::Ipvlan | Self::Loopback | Self::Macvlan | Self::Ptp => {
                format!("{CNI}/plugins/plugins/main/{name}")
            }
            Self::Portmap => format!("{CNI}/plugins/plugins/meta/{name}"),
            Self::HostLocal => format!("{CNI}/plugins/plugins/ipam/{name}"),
            Self::Cnitool => format!("{CNI}/cni/{name}"),
            Self::Multus => format!("{MULTUS_MODULE}/cmd/{name}"),
            Self::FrrK8s => format!("{FRR_K8S_MODULE}/cmd/{name}"),
            Self::CoreDns => "cadastre.dev/e2e/coredns".to_owned(),
            Self::Whereabouts => format!("{WHEREABOUTS_MODULE}/cmd"),
            Self::CalicoIpam => format!("{CALICO_MODULE}/cni-plugin/cmd/calico"),
            Self::NodeIpamController => NODE_IPAM_CONTROLLER_MODULE.to_owned(),
            Self::HistoryChecker => "cadastre.dev/e2e/porcupine".to_owned(),
            Self::Helm => "helm.sh/helm/v4/cmd/helm".to_owned(),
            Self::Helm3 => "helm.sh/helm/v3/cmd/helm".to_owned(),
            Self::ProtocGenGo => format!("google.golang.org/protobuf/cmd/{name}"),
            Self::ProtocGenGoGrpc => format!("google.golang.org/grpc/cmd/{name}"),
            _ => match self.source() {
                Source::Containerd => format!("github.com/containerd/containerd/v2/cmd/{name}"),
                Source::Prometheus => format!("github.com/prometheus/prometheus/cmd/{name}"),
                _ => format!("k8s.io/kubernetes/cmd/{name}"),
            },
        }
    }

    /// Returns the build tags. The tag for Prometheus leaves out the service discovery of clouds, so that the build
    /// takes only a third of the time.
    fn tags(self) -> &'static str {
        match self.source() {
            Source::Prometheus => "remove_all_sd",
            _ => "",
        }
    }

    /// Returns linker flags that set the version. Without these flags a program reports `v0.0.0-master` or `unknown`.
    fn ldflags(self) -> String {
        const COMPONENT: &str = "k8s.io/component-base/version";
        const CNI: &str = "github.com/containernetworking/plugins/pkg/utils/buildversion";
        let stamp = match self.source() {
            _ if self == Self::Etcd => String::new(),
            Source::ControlPlane => format!(
                " -X {COMPONENT}.gitVersion={KUBERNETES} -X {COMPONENT}.gitMajor=1 -X {COMPONENT}.gitMinor=36"
            ),
            Source::Containerd => {
                format!(" -X github.com/containerd/containerd/v2/version.Version={CONTAINERD}")
            }
            Source::CniPlugins => format!(" -X {CNI}.BuildVersion={CNI_PLUGINS}"),
            Source::Calico => format!(" -X {CALICO_MODULE}/pkg/buildinfo.Version={CALICO}"),
            Source::FrrK8s => {
                format!(" -X {FRR_K8S_MODULE}/internal/version.version={FRR_K8S}")
            }
            Source::Multus => format!(" -X {MULTUS_MODULE}/pkg/multus.version={MULTUS}"),
            Source::Prometheus => {
                format!(" -X github.com/prometheus/common/version.Version={PROMETHEUS}")
            }
            Source::Helm => format!(" -X helm.sh/helm/v4/internal/version.version={HELM}"),
            Source::Helm3 => format!(" -X helm.sh/helm/v3/internal/version.version={HELM3}"),
            Source::CoreDns
            | Source::GrpcGo
            | Source::NodeIpamController
            | Source::Porcupine
            | Source::Whereabouts => String::new(),
        };
        format!("-s -w{stamp}")
    }
}

/// Returns the path of a program. If it is missing, the error names the `make` target that builds it.
pub fn find(program: Program) -> Result<PathBuf> {
    present(program, &cache()?).with_context(|| {
        let target = match program.source() {
            _ if CONTROL_PLANE.contains(&program) => "control-plane",
            _ if SERVICES.contains(&program) => "services",
            Source::Prometheus => "monitoring",
            Source::Calico | Source::NodeIpamController | Source::Whereabouts => "torture",
            Source::Helm | Source::Helm3 | Source::GrpcGo | Source::Porcupine => "tools",
            _ => "nodes",
        };
        format!("{} is not built yet: run `make {target}`", program.name())
    })
}

/// Builds those of `programs` that are missing, and shows progress on standard error. Blocks the thread, possibly for
/// minutes.
pub fn ensure(programs: &[Program]) -> Result<()> {
    let cache = cache()?;
    let missing = || {
        programs
            .iter()
            .copied()
            .filter(|it| present(*it, &cache).is_none())
            .collect()
    };
    let all: Vec<Program> = missing();
    if all.is_empty() {
        return Ok(());
    }
    for program in &all {
        let folder = folder_of(*program, &cache);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let _lock = lock(&cache)?;
    let left: Vec<Program> = missing();
    if !left.is_empty() {
        say(&announcement(&left));
    }
    let mut server = ReleaseServer::from_env();
    for (i, program) in left.iter().enumerate() {
        let title = format!("{} ({} of {})", program.name(), i + 1, left.len());
        let folder = folder_of(*program, &cache);
        if !downloaded(*program, &folder, &mut server, &title) {
            build(*program, &folder, &title)?;
        }
    }
    Ok(())
}

/// Downloads a program if it belongs to a release of Kubernetes. Returns whether it is there now; if not, it must be
/// built.
fn downloaded(program: Program, folder: &Path, server: &mut ReleaseServer, title: &str) -> bool {
    if program.source() != Source::ControlPlane || program == Program::Etcd {
        return false;
    }
    match server.fetch(KUBERNETES, program.name(), folder) {
        None => false,
        Some(Ok(())) => {
            say(&format!("downloaded {title}"));
            true
        }
        Some(Err(error)) => {
            say(&format!(
                "{title} cannot be downloaded, so it is built: {error:#}"
            ));
            false
        }
    }
}

/// Returns the line that announces the builds and their expected duration.
fn announcement(programs: &[Program]) -> String {
    let seconds = programs.iter().map(|it| it.source().seconds());
    let minutes = seconds.sum::<u64>().div_ceil(60);
    let what = match programs.len() {
        1 => "a program".to_owned(),
        count => format!("{count} programs"),
    };
    format!(
        "building {what} of Kubernetes and its surroundings, once: about {minutes} min on two cores"
    )
}

/// Acquires the lock that keeps other processes from building. Blocks until the lock is free.
pub(crate) fn lock(cache: &Path) -> Result<File> {
    let lock = File::create(cache.join(".lock"))?;
    if lock.try_lock().is_err() {
        say("waiting for another process that builds …");
        lock.lock()?;
    }
    Ok(lock)
}

/// Returns the cache folder. The first of the variables `CADASTRE_CACHE`, `XDG_CACHE_HOME` and `HOME` that is set
/// determines the folder.
pub(crate) fn cache() -> Result<PathBuf> {
    let folder = |name| {
        env::var_os(name)
            .filter(|it| !it.is_empty())
            .map(PathBuf::from)
    };
    let root = folder("CADASTRE_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("cadastre")))
        .or_else(|| Some(folder("HOME")?.join(".cache/cadastre")))
        .context("neither HOME nor CADASTRE_CACHE is set: set CADASTRE_CACHE to a folder for the binaries")?;
    Ok(root)
}

/// Returns the cache's folder for the Go module and the release of a program.
fn folder_of(program: Program, cache: &Path) -> PathBuf {
    let source = program.source();
    let release = match source {
        // The checker's own code changes without a release.
        Source::Porcupine => {
            let mut hash = DefaultHasher::new();
            include_str!("../porcupine/main.go").hash(&mut hash);
            format!("{PORCUPINE}-{:016x}", hash.finish())
        }
        _ => source.release().to_owned(),
    };
    cache.join(source.folder()).join(release)
}

fn present(program: Program, cache: &Path) -> Option<PathBuf> {
    env::var_os("KUBEBUILDER_ASSETS")
        .filter(|_| program.source() == Source::ControlPlane)
        .map(PathBuf::from)
        .into_iter()
        .chain([folder_of(program, cache)])
        .map(|folder| folder.join(program.name()))
        .find(|path| path.is_file())
}

/// A file that another project publishes in a Go module. The module in `e2e/FOLDER` requires that module, and its
/// `go.sum` pins the content.
struct ModuleFile {
    folder: &'static str,
    release: &'static str,
    module: &'static str,
    file: &'static str,
    /// The file name in the cache
    name: &'static str,
}

/// Returns the path of the CRD of the kind IPAMClaim. Downloads it into the cache if it is missing.
pub fn ipam_claim_crd() -> Result<PathBuf> {
    file_of_module(&ModuleFile {
        folder: "ipamclaims",
        release: IPAM_CLAIMS,
        module: "github.com/k8snetworkplumbingwg/ipamclaims",
        file: "artifacts/k8s.cni.cncf.io_ipamclaims.yaml",
        name: "crd.yaml",
    })
}

/// Returns the path of the CRD of the kind FRRConfiguration. Downloads it into the cache if it is missing.
pub fn frr_crd() -> Result<PathBuf> {
    frr_file(
        "config/crd/bases/frrk8s.metallb.io_frrconfigurations.yaml",
        "crd.yaml",
    )
}

/// Returns the paths of the CRDs of the other kinds that frr-k8s reads or writes. Downloads them into the cache if they
/// are missing.
pub fn frr_state_crds() -> Result<[PathBuf; 2]> {
    Ok([
        frr_file(
            "config/crd/bases/frrk8s.metallb.io_frrk8sconfigurations.yaml",
            "settings.yaml",
        )?,
        frr_file(
            "config/crd/bases/frrk8s.metallb.io_frrnodestates.yaml",
            "states.yaml",
        )?,
    ])
}

/// Returns the path of the script that gives FRR the configuration that frr-k8s has written. Downloads it into the
/// cache if it is missing.
pub fn frr_reloader() -> Result<PathBuf> {
    frr_file("cmd/reloader/frr-reloader.sh", "frr-reloader.sh")
}

fn frr_file(file: &'static str, name: &'static str) -> Result<PathBuf> {
    file_of_module(&ModuleFile {
        folder: "frr-k8s",
        release: FRR_K8S,
        module: FRR_K8S_MODULE,
        file,
        name,
    })
}

/// Returns the path of the manifest with which users install Multus. It contains the CRD of the kind
/// NetworkAttachmentDefinition and the permissions of Multus. Downloads the manifest into the cache if it is missing.
pub fn multus_manifest() -> Result<PathBuf> {
    file_of_module(&ModuleFile {
        folder: "multus",
        release: MULTUS,
        module: MULTUS_MODULE,
        file: "deployments/multus-daemonset.yml",
        name: "install.yaml",
    })
}

/// Returns the paths of the CRDs of whereabouts. Downloads them into the cache if they are missing.
pub fn whereabouts_crds() -> Result<[PathBuf; 2]> {
    let crd = |file, name| {
        file_of_module(&ModuleFile {
            folder: "whereabouts",
            release: WHEREABOUTS,
            module: WHEREABOUTS_MODULE,
            file,
            name,
        })
    };
    Ok([
        crd(
            "doc/crds/whereabouts.cni.cncf.io_ippools.yaml",
            "ippools.yaml",
        )?,
        crd(
            "doc/crds/whereabouts.cni.cncf.io_overlappingrangeipreservations.yaml",
            "reservations.yaml",
        )?,
    ])
}

/// Returns the paths of the CRDs that Calico's IPAM uses. Downloads them into the cache if they are missing.
pub fn calico_ipam_crds() -> Result<[PathBuf; 5]> {
    let crd = |file, name| {
        file_of_module(&ModuleFile {
            folder: "calico",
            release: CALICO,
            module: CALICO_MODULE,
            file,
            name,
        })
    };
    Ok([
        crd(
            "libcalico-go/config/crd/crd.projectcalico.org_ippools.yaml",
            "ippools.yaml",
        )?,
        crd(
            "libcalico-go/config/crd/crd.projectcalico.org_ipamconfigs.yaml",
            "ipamconfigs.yaml",
        )?,
        crd(
            "libcalico-go/config/crd/crd.projectcalico.org_blockaffinities.yaml",
            "blockaffinities.yaml",
        )?,
        crd(
            "libcalico-go/config/crd/crd.projectcalico.org_ipamblocks.yaml",
            "ipamblocks.yaml",
        )?,
        crd(
            "libcalico-go/config/crd/crd.projectcalico.org_ipamhandles.yaml",
            "ipamhandles.yaml",
        )?,
    ])
}

/// Returns the path of the CRD of the kind ClusterCIDR. Downloads it into the cache if it is missing.
pub fn cluster_cidr_crd() -> Result<PathBuf> {
    file_of_module(&ModuleFile {
        folder: "node-ipam-controller",
        release: NODE_IPAM_CONTROLLER,
        module: NODE_IPAM_CONTROLLER_MODULE,
        file: "charts/node-ipam-controller/gen/crds/networking.x-k8s.io_clustercidrs.yaml",
        name: "crd.yaml",
    })
}

/// Returns the path in the cache of a file that a Go module contains.
fn file_of_module(of: &ModuleFile) -> Result<PathBuf> {
    let cache = cache()?;
    let folder = cache.join(of.folder).join(of.release);
    let path = folder.join(of.name);
    if path.is_file() {
        return Ok(path);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let _lock = lock(&cache)?;
    let go = |args: &[&str]| {
        let mut go = process::command(Path::new("go"));
        go.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(of.folder))
            .env("GOFLAGS", "-mod=readonly")
            .args(args);
        let output = go.output().context("go cannot be run")?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        anyhow::ensure!(output.status.success(), "go {}: {error}", args.join(" "));
        Ok(String::from_utf8(output.stdout)?)
    };
    go(&["mod", "download", of.module])?;
    let module = go(&["list", "-m", "-f", "{{.Dir}}", of.module])?;
    let content = fs::read(Path::new(module.trim()).join(of.file))?;
    let partial = folder.join(format!(".{}.partial", of.name));
    fs::write(&partial, content)?;
    fs::rename(&partial, &path)?;
    Ok(path)
}

fn build(program: Program, folder: &Path, title: &str) -> Result<()> {
    if Command::new("go").arg("version").output().is_err() {
        bail!(
            "{} has to be built once and needs Go 1.26 or newer, which is not installed: see \
             https://go.dev/dl (golang-go of Debian 12 is too old). Or set KUBEBUILDER_ASSETS to a \
             folder with the programs of a control plane",
            program.name()
        );
    }
    let partial = folder.join(format!(".{}.partial", program.name()));
    let mut go = process::command(Path::new("go"));
    go.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(program.source().folder()))
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "-mod=readonly -buildvcs=false -trimpath")
        .args(["build", "-tags", program.tags(), "-ldflags"])
        .args([program.ldflags().as_str(), "-o"])
        .arg(&partial)
        .arg(program.package());
    let log = folder.join(format!("{}.log", program.name()));
    let _ = fs::remove_file(&log);
    let start = Instant::now();
    let mut go = Process::spawn("go build", go, &log)?;
    let mut progress = Progress::new(title);
    let status = loop {
        if let Some(status) = go.exit_status()? {
            break status;
        }
        std::thread::sleep(Duration::from_millis(200));
        progress.tick(start.elapsed());
    };
    if !status.success() {
        bail!(
            "go build of {} failed ({status}); {}",
            program.package(),
            go.log_tail(40)
        );
    }
    fs::rename(&partial, folder.join(program.name()))?;
    let _ = fs::remove_file(&log);
    progress.done(start.elapsed());
    Ok(())
}

/// Progress of one build. On a terminal, one line shows the seconds so far. Elsewhere, a new line is written every 15
/// s.
struct Progress<'a> {
    title: &'a str,
    terminal: bool,
    said: Duration,
}

impl<'a> Progress<'a> {
    fn new(title: &'a str) -> Self {
        say(&format!("building {title} …"));
        Self {
            title,
            terminal: std::io::stderr().is_terminal(),
            said: Duration::ZERO,
        }
    }

    fn tick(&mut self, elapsed: Duration) {
        let every = Duration::from_secs(if self.terminal { 1 } else { 15 });
        if elapsed < self.said + every {
            return;
        }
        self.said = elapsed;
        let line = format!("building {} … {} s", self.title, elapsed.as_secs());
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r{line}");
        } else {
            say(&line);
        }
    }

    fn done(&self, elapsed: Duration) {
        let start = if self.terminal { "\r" } else { "" };
        say(&format!(
            "{start}built {} in {} s",
            self.title,
            elapsed.as_secs()
        ));
    }
}

/// Writes directly to standard error, so that the line is shown even while cargo captures a test's output.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_says_how_long_it_takes() {
        let said = announcement(&CONTROL_PLANE);
        assert!(
            said.contains("5 programs") && said.ends_with("about 8 min on two cores"),
            "{said}"
        );
    }
}
