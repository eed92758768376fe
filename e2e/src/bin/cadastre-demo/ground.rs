//! Sets up the demo: a control plane, and real nodes if this host can run them.

use std::time::Duration;

use anyhow::{Result, ensure};
use cadastre_e2e::Fixtures;
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::kcm::KcmOptions;
use cadastre_e2e::node::{self, IMAGE, Machine, MachineOptions, NodeSide, Site, SiteOptions};
use cadastre_e2e::wait::until;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use kube::ResourceExt as _;
use kube::api::{ListParams, PostParams};
use serde_json::json;

/// The number of real nodes. `PODS` is the number of pods on each.
const MACHINES: usize = 2;
const PODS: usize = 4;
const LIMIT: Duration = Duration::from_secs(120);
/// The name of the pool for the real nodes, which is also the label value by which the pool selects them.
const POOL: &str = "machines";

/// A control plane with or without real nodes.
pub enum Ground {
    /// A control plane without real nodes. The text says why this host cannot run real nodes
    Plain(Box<ControlPlane>, String),
    Site(Box<Site>),
}

impl Ground {
    /// Starts the control plane. kube-controller-manager runs without the controllers that evict pods from nodes that
    /// are not ready, because most nodes have no kubelet.
    pub async fn start() -> Result<Self> {
        if let Err(reason) = node::available() {
            let cluster = ControlPlane::start(Options::default()).await?;
            return Ok(Self::Plain(Box::new(cluster), reason));
        }
        let kcm = KcmOptions {
            controllers: ["serviceaccount", "root-ca-certificate-publisher"]
                .map(|it| format!("{it}-controller"))
                .into(),
            ..KcmOptions::default()
        };
        let options = SiteOptions {
            kcm,
            ..SiteOptions::default()
        };
        Ok(Self::Site(Box::new(Site::start(options).await?)))
    }

    pub fn cluster(&self) -> &ControlPlane {
        match self {
            Self::Plain(cluster, _) => cluster,
            Self::Site(site) => site.cluster(),
        }
    }
}

/// Starts real nodes with the agent and the CNI plugin, and pods on these nodes. Returns when all pods have their
/// addresses.
pub async fn machines(site: &Site) -> Result<(Vec<Machine>, Table)> {
    let hand = Fixtures::new(site.cluster().client().await?);
    let pool = json!({
        "ipv4": {"cidrs": ["10.242.0.0/16"]}, "ipv6": {"cidrs": ["fd00:10:242::/64"]},
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}], "priority": 200,
    });
    hand.block_pool(POOL, pool).await?;
    let side = NodeSide::cadastre(&json!({"type": "ptp"}), &[], ADMIN)?;
    let mut machines = Vec::new();
    for _ in 0..MACHINES {
        let labels = vec![("group".to_owned(), POOL.to_owned())];
        let options = MachineOptions {
            labels,
            side: side.clone(),
            second_link: false,
        };
        machines.push(site.machine(options).await?);
    }
    for machine in &machines {
        for n in 0..PODS {
            let name = format!("{}-pod-{n}", machine.name());
            let pod = serde_json::from_value(json!({
                "metadata": {"name": name, "labels": {"group": POOL}},
                "spec": {
                    "nodeName": machine.name(),
                    "containers": [{"name": "c", "image": IMAGE, "imagePullPolicy": "Never"}],
                    "tolerations": [{"operator": "Exists"}],
                    "terminationGracePeriodSeconds": 1,
                    "automountServiceAccountToken": false,
                },
            }))?;
            hand.pods.create(&PostParams::default(), &pod).await?;
        }
    }
    let of_group = ListParams::default().labels(&format!("group={POOL}"));
    let table = until("every pod has its addresses", LIMIT, async || {
        let mut table = Table::new();
        table
            .load_preset(NOTHING)
            .set_header(["POD", "NODE", "ADDRESSES"]);
        let pods = hand.pods.list(&of_group).await?.items;
        for pod in &pods {
            let status = pod.status.clone().unwrap_or_default();
            let addresses = status.pod_ips.unwrap_or_default();
            let addresses: Vec<String> = addresses.into_iter().map(|it| it.ip).collect();
            ensure!(addresses.len() == 2, "{} has none", pod.name_any());
            let node = pod.spec.as_ref().and_then(|it| it.node_name.clone());
            let addresses = addresses.join(", ");
            table.add_row([pod.name_any(), node.unwrap_or_default(), addresses]);
        }
        ensure!(pods.len() == MACHINES * PODS, "{} pods", pods.len());
        Ok(Some(table))
    })
    .await?;
    Ok((machines, table))
}
