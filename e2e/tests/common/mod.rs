//! Code that several tests of the controller share: a control plane with Cadastre's CRDs, a recording of its nodes, and
//! controllers .

#![allow(clippy::unwrap_used, dead_code)] // allowed in helpers as in tests; no test uses all of them

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use cadastre_api::NodeSubnet;
use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::daemon::DaemonOptions;
use cadastre_e2e::{ControlPlane, Daemon, Fixtures, History, Options, install, nodes, wait};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};

const LIMIT: Duration = Duration::from_secs(180);

/// Waits until no other test holds the permit, and returns the permit. So tests whose timing depends on free processors
/// run one at a time.
pub async fn turn() -> SemaphorePermit<'static> {
    static TURN: Semaphore = Semaphore::const_new(1);
    TURN.acquire().await.unwrap()
}

/// A control plane whose nodes are recorded from its start on.
pub struct Lab {
    pub client: Client,
    pub history: History,
    pub cluster: ControlPlane,
}

impl Lab {
    /// Starts a control plane without controllers, pools or nodes.
    pub async fn start() -> Self {
        let (cluster, Fixtures { client, .. }) = with_crds(Options::default()).await.unwrap();
        let history = History::start(client.clone()).await.unwrap();
        Self {
            client,
            history,
            cluster,
        }
    }

    /// Starts a controller with this name. The controller has the administrator's rights. Does not
    /// wait until the controller is ready.
    pub fn controller(&self, name: &str, more: &[&str]) -> Daemon {
        let kubeconfig = self.cluster.kubeconfig(ADMIN).unwrap();
        self.controller_by(&kubeconfig, name, more)
    }

    /// Starts a controller with this name and this kubeconfig. Does not wait until the controller is
    /// ready.
    pub fn controller_by(&self, kubeconfig: &Path, name: &str, more: &[&str]) -> Daemon {
        let args = ["controller", "--identity", name];
        let options = DaemonOptions {
            name: name.to_owned(),
            args: args.iter().chain(more).map(ToString::to_string).collect(),
            env: Vec::new(),
        };
        Daemon::start(self.cluster.folder(), kubeconfig, &options).unwrap()
    }

    /// Starts two controllers: `a`, which becomes the leader, and `b`, which becomes the standby. Returns when both are
    /// ready.
    pub async fn pair(&self) -> (Daemon, Daemon) {
        self.pair_of(self.controller("a", &[])).await
    }

    /// Waits until `a` leads, then starts a standby `b`.
    pub async fn pair_of(&self, mut a: Daemon) -> (Daemon, Daemon) {
        a.wait_ready(LIMIT).await.unwrap();
        wait_leads(&a).await;
        let mut b = self.controller("b", &[]);
        b.wait_ready(LIMIT).await.unwrap();
        wait_ready(&b, "standby (leader: a_").await;
        (a, b)
    }

    /// Creates a pool of podCIDRs with both families. Each node gets a /24 and a /64.
    pub async fn pool(&self, name: &str, v4: &str, v6: &str, quarantine: u32) {
        let spec = json!({
            "ipv4": {"cidrs": [v4]}, "ipv6": {"cidrs": [v6]}, "quarantineSeconds": quarantine,
        });
        install::pool(&self.client, name, spec).await.unwrap();
    }

    /// Waits until `count` nodes have podCIDRs, and until the NodeSubnets list the same podCIDRs. Asserts that there
    /// are no other nodes, and that no podCIDRs of live nodes ever overlapped.
    pub async fn all_served(&self, count: usize) {
        let served = self.history.wait_until_all_assigned(count, LIMIT).await;
        self.history.assert_no_duplicates();
        served.unwrap();
        let nodes: BTreeMap<String, Vec<String>> = nodes::list(&self.client)
            .await
            .unwrap()
            .iter()
            .map(|node| (node.name_any(), nodes::pod_cidrs(node).to_vec()))
            .collect();
        assert_eq!(nodes.len(), count);
        assert!(nodes.values().all(|cidrs| cidrs.len() == 2), "{nodes:?}");
        let recorded = wait::until(
            "every NodeSubnet lists the podCIDRs of its node",
            LIMIT,
            async || Ok((self.recorded().await? == nodes).then_some(())),
        );
        recorded.await.unwrap();
    }

    /// Returns the podCIDRs of live nodes according to the NodeSubnets.
    pub async fn recorded(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let subnets = Api::<NodeSubnet>::all(self.client.clone());
        let list = subnets.list(&ListParams::default()).await?;
        let held = list.items.into_iter().filter_map(|subnet| {
            let ranges = subnet.spec.pod_cidrs.iter().map(|it| it.cidr.clone());
            let ranges: Vec<String> = ranges.collect();
            (!ranges.is_empty()).then(|| (subnet.name_any(), ranges))
        });
        Ok(held.collect())
    }
}

/// Returns whether the controller reports that it leads and allocates.
pub async fn leads(daemon: &Daemon) -> Result<bool> {
    Ok(daemon.ready().await? == "leader\n")
}

/// Waits until the controller leads and allocates.
pub async fn wait_leads(daemon: &Daemon) {
    wait_ready(daemon, "leader\n").await;
}

/// Waits until the controller is ready and reports a state that begins with this text.
pub async fn wait_ready(daemon: &Daemon, state: &str) {
    wait::until(&format!("state {state:?}"), LIMIT, async || {
        let now = daemon.ready().await?;
        anyhow::ensure!(now.starts_with(state), now);
        Ok(Some(()))
    })
    .await
    .unwrap();
}

pub fn log_says(daemon: &mut Daemon, text: &str) -> bool {
    let log = std::fs::read_to_string(daemon.process().log()).unwrap();
    log.contains(text)
}
