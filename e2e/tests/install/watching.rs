//! What a user observes while a pool is exhausted and then extended: the kubectl plugin, and the alerts of a real
//! Prometheus that scrapes controllers and agents.

use anyhow::ensure;
use cadastre_core::Cidr;
use cadastre_e2e::node::Fabric;
use cadastre_e2e::prometheus::{Prometheus, impatient};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cluster::Cluster;
use crate::docs::POOL;
use crate::eventually;
use crate::say;
use crate::workload::{self, Group, Running};

/// The CIDR of a pool that serves only pods which name it. It has two blocks with five usable addresses each.
const SMALL: &str = "10.249.0.0/28";
/// The CIDR that the runbook's command adds.
const MORE: &str = "10.250.0.0/16";

/// Returns the CIDRs of the small pool after its extension.
pub fn ranges() -> [Cidr; 2] {
    [SMALL, MORE].map(|it| Cidr::parse_strict(it).unwrap())
}

/// Prometheus with the chart's rules, in which every `for` is one second.
pub struct Watch {
    server: Prometheus,
    _folder: TempDir,
}

impl Watch {
    /// Starts a Prometheus that scrapes the controllers of the first two machines and the agents of the first three.
    pub async fn start(cluster: &Cluster) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = |number, port: u16| {
            let [v4, _] = Fabric::addresses(number);
            format!("{v4}:{port}")
        };
        let mut targets = Vec::new();
        for number in 1..=2 {
            targets.push(("cadastre-controller", address(number, 9817), json!({})));
        }
        for number in 1..=3 {
            let labels = json!({"node": format!("n{number}")});
            targets.push(("cadastre-agent", address(number, 9818), labels));
        }
        let targets: Vec<(&str, &str, Value)> = targets
            .iter()
            .map(|(job, address, labels)| (*job, address.as_str(), labels.clone()))
            .collect();
        let rules = impatient(folder.path()).unwrap();
        let fabric = cluster.site.fabric();
        let server = Prometheus::start_among(fabric, folder.path(), &targets, Some(&rules));
        Self {
            server: server.await.unwrap(),
            _folder: folder,
        }
    }

    /// Waits until the alert with this label fires or, if `fires` is false, until it does not fire.
    pub async fn fires(&self, alert: &str, (label, value): (&str, &str), fires: bool) {
        let what = format!("{alert} of {label} {value} fires: {fires}");
        eventually(&what, async || {
            let all = self.server.firing().await?;
            let is = |it: &Value| it["alertname"] == alert && it[label] == value;
            ensure!(all.iter().any(is) == fires, "{all:?}");
            Ok(Some(()))
        })
        .await;
    }
}

/// Asserts that the kubectl plugin finds nothing wrong, and shows the default pool.
pub async fn all_is_well(cluster: &Cluster, running: &[Running]) {
    say("kubectl cadastre show and check");
    // Agents publish changes that are not urgent within half a minute. The test waits for that first.
    cluster.reports(&[running]).await;
    let (code, said) = cluster.plugin("kubectl.md", "kubectl cadastre check").await;
    assert_eq!(code, 0, "{said}");
    let (code, said) = cluster
        .plugin("kubectl.md", "kubectl cadastre show pools")
        .await;
    assert!(
        code == 0 && said.contains("default") && said.contains("10.244.0.0/16"),
        "{said}"
    );
}

/// Exhausts a pool, waits for the alert that names the pool, and resolves the alert by the runbook's command. Returns
/// the pool's pods.
pub async fn runs_out(cluster: &Cluster, watch: &Watch) -> Vec<Running> {
    let api = &cluster.api;
    let page = "runbooks/CadastrePoolExhausted.md";
    let alert = "CadastrePoolExhausted";
    say("a small pool runs out, and an alert fires");
    let pool = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": POOL},
        "spec": {
            "ipv4": {"cidrs": [SMALL], "blockSize": 29}, "assignment": "Manual",
            "warm": {"low": 0, "high": 8}, "quarantineSeconds": 60,
        },
    });
    let apply = cluster.site.cluster();
    apply
        .kubectl_stdin(&["apply", "-f", "-"], &pool.to_string())
        .await
        .unwrap();
    let group = Group {
        name: "small",
        pool: POOL,
        ..Group::default()
    };
    workload::create_in(api, group, 12).await;
    watch.fires(alert, ("pool", POOL), true).await;
    watch
        .fires("CadastrePoolNearlyExhausted", ("pool", POOL), true)
        .await;
    let (code, said) = cluster.plugin("kubectl.md", "kubectl cadastre check").await;
    assert!(code == 2 && said.contains("PoolFull"), "{said}");
    for (start, word) in [
        ("kubectl cadastre show pool", SMALL),
        ("kubectl cadastre explain pool", POOL),
    ] {
        let (code, said) = cluster.plugin(page, start).await;
        assert!(code == 0 && said.contains(word), "{said}");
    }
    let running = workload::count(api, group.name).await.unwrap();
    assert!(running <= 10, "{running} of ten addresses");

    say("it is given more: who waited runs, and the alert ends");
    cluster
        .kubectl(page, "kubectl patch ippools.cadastre.dev POOL")
        .await;
    let all = workload::within(api, group.name, 12, &ranges()).await;
    watch.fires(alert, ("pool", POOL), false).await;
    watch
        .fires("CadastrePoolNearlyExhausted", ("pool", POOL), false)
        .await;
    all
}
