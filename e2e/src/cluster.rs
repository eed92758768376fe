//! The usual setup of the controller's tests: a control plane with the CRDs, and one running controller. Tests create
//! objects with a [`Fixtures`].

use std::time::Duration;

use anyhow::Result;

use crate::control_plane::{ADMIN, ControlPlane, Options};
use crate::crds;
use crate::daemon::{Daemon, DaemonOptions};
use crate::fixtures::Fixtures;

/// The maximum time for a controller to become ready, which is long enough for a host under load.
const START_LIMIT: Duration = Duration::from_secs(180);

/// A control plane with a running controller. On drop the controller is stopped before the control plane.
pub struct TestCluster {
    /// The controller under test, which [`Self::restart`] replaces
    pub controller: Daemon,
    /// The control plane that the controller is connected to
    pub control_plane: ControlPlane,
}

impl TestCluster {
    /// Starts a control plane, installs the CRDs, starts `cadastre controller FLAGS`, and returns when the controller
    /// is ready.
    pub async fn start(options: Options, flags: &[&str]) -> Result<Self> {
        let (control_plane, _) = with_crds(options).await?;
        let mut controller = start_controller(&control_plane, ADMIN, flags)?;
        controller.wait_ready(START_LIMIT).await?;
        Ok(Self {
            controller,
            control_plane,
        })
    }

    /// Returns a new [`Fixtures`] of the administrator. Each test that shares a cluster needs a [`Fixtures`] of its
    /// own, because a client belongs to the tokio runtime that created it.
    pub async fn fixtures(&self) -> Result<Fixtures> {
        Ok(Fixtures::new(self.control_plane.client().await?))
    }

    /// Stops the controller by SIGTERM, runs `meanwhile`, and starts a new controller with `flags`. The new controller
    /// appends to the log of the old one. Returns when the new controller is ready.
    pub async fn restart(
        &mut self,
        flags: &[&str],
        meanwhile: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let grace = Duration::from_secs(20);
        self.controller.process().stop(grace).await?;
        meanwhile.await?;
        self.controller = start_controller(&self.control_plane, ADMIN, flags)?;
        self.controller.wait_ready(START_LIMIT).await?;
        Ok(())
    }
}

/// Starts a control plane and installs the CRDs. No controller runs.
pub async fn with_crds(options: Options) -> Result<(ControlPlane, Fixtures)> {
    let control_plane = ControlPlane::start(options).await?;
    let fixtures = Fixtures::new(control_plane.client().await?);
    crds::install(&fixtures.client).await?;
    Ok((control_plane, fixtures))
}

/// Starts `cadastre controller FLAGS` as `user`, with the log `cadastre-USER.log`. Does not wait until the controller
/// is ready.
pub fn start_controller(cluster: &ControlPlane, user: &str, flags: &[&str]) -> Result<Daemon> {
    let args = ["controller"].iter().chain(flags);
    let options = DaemonOptions {
        name: user.replace([':', '/'], "-"),
        args: args.map(ToString::to_string).collect(),
        env: Vec::new(),
    };
    Daemon::start(cluster.folder(), &cluster.kubeconfig(user)?, &options)
}
