//! What most tests of the controller begin with: a control plane with the CRDs, one running
//! controller, and a [`Hand`] to move things with.

use std::time::Duration;

use anyhow::Result;

use crate::control_plane::{ADMIN, ControlPlane, Options};
use crate::crds;
use crate::daemon::{Daemon, DaemonOptions};
use crate::hand::Hand;

/// Long enough for a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A control plane with a controller that deals. The controller ends first when dropped.
pub struct Stage {
    /// The controller under test
    pub controller: Daemon,
    /// What it works on
    pub cluster: ControlPlane,
}

impl Stage {
    /// Starts a control plane, installs the CRDs, starts `cadastre controller FLAGS`, and returns
    /// when it is ready.
    pub async fn start(options: Options, flags: &[&str]) -> Result<Self> {
        let cluster = ControlPlane::start(options).await?;
        crds::install(&cluster.client().await?).await?;
        let mut controller = start_controller(&cluster, ADMIN, flags)?;
        controller.wait_ready(START_LIMIT).await?;
        Ok(Self {
            controller,
            cluster,
        })
    }

    /// A hand of the administrator. Clients belong to the runtime they are made in, so a stage that
    /// several tests share gives a new one to each.
    pub async fn hand(&self) -> Result<Hand> {
        Ok(Hand::new(self.cluster.client().await?))
    }

    /// Ends the controller by SIGTERM, does `meanwhile`, and starts another one, which goes on in the
    /// same log.
    pub async fn restart(
        &mut self,
        flags: &[&str],
        meanwhile: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let grace = Duration::from_secs(20);
        self.controller.process().stop(grace).await?;
        meanwhile.await?;
        self.controller = start_controller(&self.cluster, ADMIN, flags)?;
        self.controller.wait_ready(START_LIMIT).await?;
        Ok(())
    }
}

/// Starts `cadastre controller FLAGS` as `user`; the log is `cadastre-USER.log`. Does not wait.
pub fn start_controller(cluster: &ControlPlane, user: &str, flags: &[&str]) -> Result<Daemon> {
    let args = ["controller"].iter().chain(flags);
    let options = DaemonOptions {
        name: user.replace([':', '/'], "-"),
        args: args.map(ToString::to_string).collect(),
        env: Vec::new(),
    };
    Daemon::start(cluster.folder(), &cluster.kubeconfig(user)?, &options)
}
