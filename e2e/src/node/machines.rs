//! A site consists of a control plane with its controllers, and the fabric to which machines are connected.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Result, ensure};

use super::cgroups::Cgroups;
use super::fabric::Fabric;
use super::image;
use super::machine::{self, Machine, MachineOptions};
use super::router::Router;
use crate::assets;
use crate::control_plane::{ControlPlane, Options};
use crate::fixtures::Fixtures;
use crate::kcm::KcmOptions;
use crate::kubeconfig::{User, write_private};
use crate::process::Process;
use crate::{crds, scheduler};

/// The maximum number of machines of a site. The number is fixed, because the API server reads the machines' tokens
/// only when it starts.
pub const MACHINES: u8 = 60;

/// Settings for [`Site::start`].
#[derive(Clone, Debug, Default)]
pub struct SiteOptions {
    /// Settings of the site's control plane. [`Site::start`] adds users for the machines
    pub control_plane: Options,
    /// Settings of kube-controller-manager. [`Site::start`] adds flags for the detection of dead nodes within 10 s
    pub kcm: KcmOptions,
    /// If true, [`Site::start`] does not install Cadastre's CRDs, so that a test can install them
    pub bare: bool,
    /// Archives of additional images that machines import, in the format of `docker save`
    pub images: Vec<PathBuf>,
    /// Whether machines have the host's boot id instead of one of their own. Agents that run in pods need this setting,
    /// because containers see the host's boot id. With this setting, an agent does not notice that its machine
    /// rebooted.
    pub host_boot_id: bool,
}

/// A running site. A site that is dropped stops its control plane, so drop its machines first.
#[derive(Debug)]
pub struct Site {
    next: AtomicU8,
    core: Arc<Core>,
    _kcm: Process,
    _scheduler: Process,
    cluster: ControlPlane,
}

/// The part of a site that exists until the site and all its machines are dropped.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) fabric: Fabric,
    pub(super) cgroups: Cgroups,
    pub(super) images: Vec<PathBuf>,
    pub(super) host_boot_id: bool,
    folder: PathBuf,
    kubeconfigs: Vec<(String, serde_json::Value)>,
}

impl Site {
    /// Starts a control plane, a scheduler, and controllers that do not allocate podCIDRs. Installs Cadastre's CRDs,
    /// unless the site is `bare`. Builds missing programs first, which takes minutes. Call [`super::available()`]
    /// before, to check that machines can run on this host.
    pub async fn start(options: SiteOptions) -> Result<Self> {
        tokio::task::spawn_blocking(|| assets::ensure(&assets::NODES)).await??;
        let mut control_plane = options.control_plane;
        let users = (1..=MACHINES).map(|it| User::new(&machine::user(it), &["system:nodes"]));
        control_plane.users.extend(users);
        control_plane.users.push(User::new(machine::PROXY, &[]));
        let cluster = ControlPlane::start(control_plane).await?;
        let mut kcm = options.kcm;
        kcm.args.extend(
            [
                "--node-monitor-period=1s",
                "--node-monitor-grace-period=10s",
                "--concurrent-deployment-syncs=2",
            ]
            .map(str::to_owned),
        );
        let kcm = cluster.start_kcm(&kcm)?;
        let scheduler = scheduler::start(&cluster)?;
        if !options.bare {
            crds::install(&cluster.client().await?).await?;
        }
        let mut images = options.images;
        images.push(image::write(cluster.folder())?);
        let core = Core {
            fabric: Fabric::start(cluster.folder(), cluster.address()).await?,
            cgroups: Cgroups::new()?,
            images,
            host_boot_id: options.host_boot_id,
            folder: cluster.folder().to_owned(),
            kubeconfigs: cluster.kubeconfigs(&machine::server())?,
        };
        Ok(Self {
            next: AtomicU8::new(1),
            core: Arc::new(core),
            _kcm: kcm,
            _scheduler: scheduler,
            cluster,
        })
    }

    /// Starts a machine with the next number; its Node is named `nNUMBER`. Returns when the kubelet has been started.
    pub async fn machine(&self, options: MachineOptions) -> Result<Machine> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        ensure!(number <= MACHINES, "a site has {MACHINES} machines at most");
        Machine::start(Arc::clone(&self.core), number, options).await
    }

    /// Starts a router. `number` determines its addresses and must be higher than [`MACHINES`].
    pub async fn router(&self, number: u8) -> Result<Router> {
        ensure!(number > MACHINES, "machine {number} may start later");
        let folder = self.core.folder().join(format!("r{number}"));
        Router::start(&self.core.fabric, number, &folder).await
    }

    /// Returns the path of a kubeconfig for programs that run inside machines as `user`.
    pub fn kubeconfig(&self, user: &str) -> Result<PathBuf> {
        self.core.kubeconfig(user)
    }

    /// The network between machines, to set routes and to disconnect machines.
    pub fn fabric(&self) -> &Fabric {
        &self.core.fabric
    }

    /// The control plane, which machines reach through the fabric.
    pub fn cluster(&self) -> &ControlPlane {
        &self.cluster
    }

    /// The control plane, for stopping and restarting its processes.
    pub fn cluster_mut(&mut self) -> &mut ControlPlane {
        &mut self.cluster
    }

    /// Returns a new [`Fixtures`] with the administrator's rights, for the current tokio runtime.
    pub async fn fixtures(&self) -> Result<Fixtures> {
        Ok(Fixtures::new(self.cluster.client().await?))
    }
}

impl Core {
    /// The folder with the control plane's logs, and with a sub-folder for each machine.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of a kubeconfig for use inside machines. The first call writes the file.
    pub(super) fn kubeconfig(&self, user: &str) -> Result<PathBuf> {
        let found = self.kubeconfigs.iter().find(|(name, _)| name == user);
        let Some((_, config)) = found else {
            anyhow::bail!(
                "no user {user:?}: tokens are read at start, so add it to Options::users"
            );
        };
        let name = user.replace([':', '/'], "-");
        let path = self.folder.join(format!("{name}.inside.kubeconfig"));
        if !path.exists() {
            write_private(&path, &format!("{config:#}\n"))?;
        }
        Ok(path)
    }
}
