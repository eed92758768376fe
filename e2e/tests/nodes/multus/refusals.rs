//! Networks that cannot serve a pod: what users read, and that no address stays assigned.

use anyhow::ensure;
use serde_json::{Value, json};

use super::attached;
use super::{GROUP, Lab, NETWORKS, create, delete};
use crate::{deletions, eventually};

impl Lab<'_> {
    pub(super) async fn a_network_without_a_pool_leaves_nothing_behind(&mut self) {
        let mut config = self.config("backup").await;
        config["name"] = json!("later");
        config["ipam"]["pools"] = json!(["later"]);
        attached::apply(self.stage, &[attached::network("later", &config)]).await;
        create(self.stage, &self.machines[0], "waits", "backup,later").await;
        let text = attached::failure(&self.stage.api, "waits", "pool `later`").await;
        assert!(text.contains("Name a pool that exists"), "{text}");
        self.nothing_is_held_for("waits").await;

        let pool = json!({
            "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": "later"},
            "spec": {
                "allocationMode": "Blocks", "assignment": "Manual", "addressPrefix": "Pool",
                "ipv4": {"cidrs": ["192.168.5.0/30"], "blockSize": 30, "gateway": "None"},
            },
        });
        self.add_pool("later", pool).await;
        deletions::try_again(&self.stage.api, "waits", 0).await;
        self.running(2 * NETWORKS.len() + 1).await;
        delete(self.stage, "waits").await;
        self.running(2 * NETWORKS.len()).await;
    }

    /// The pool of the network `later` has two addresses for pods.
    pub(super) async fn a_full_pool_leaves_nothing_behind(&self) {
        create(self.stage, &self.machines[0], "fills", "later,later").await;
        self.running(2 * NETWORKS.len() + 1).await;
        create(self.stage, &self.machines[0], "waits", "backup,later").await;
        let text = attached::failure(&self.stage.api, "waits", "pool `later`").await;
        assert!(text.contains("add ranges to it, or delete pods"), "{text}");
        self.nothing_is_held_for("waits").await;
        delete(self.stage, "fills").await;
        deletions::try_again(&self.stage.api, "waits", 0).await;
        self.running(2 * NETWORKS.len() + 1).await;
        delete(self.stage, "waits").await;
    }

    pub(super) async fn fields_that_no_pool_can_keep_to_are_refused(&self) {
        let mut config = self.config("storage").await;
        config["ipam"]["node_slice_size"] = json!("/28");
        attached::apply(self.stage, &[attached::network("sliced", &config)]).await;
        create(self.stage, &self.machines[0], "waits", "backup,sliced").await;
        let text = attached::failure(&self.stage.api, "waits", "node_slice_size").await;
        assert!(text.contains("`blockSize`"), "{text}");
        self.nothing_is_held_for("waits").await;
        delete(self.stage, "waits").await;
        self.running(2 * NETWORKS.len()).await;
    }

    /// Returns the CNI configuration of a network.
    async fn config(&self, network: &str) -> Value {
        let get = [
            "get",
            "network-attachment-definitions",
            network,
            "-o",
            "json",
        ];
        let network = self.stage.site.cluster().kubectl(&get).await.unwrap();
        attached::config(&serde_json::from_str(&network).unwrap())
    }

    /// Creates the pool of a network for the nodes of this test, and records its range.
    async fn add_pool(&mut self, network: &str, mut pool: Value) {
        attached::serve(&mut pool, GROUP);
        attached::apply(self.stage, &[pool.clone()]).await;
        let cidr = pool["spec"]["ipv4"]["cidrs"][0].as_str().unwrap();
        self.ranges
            .insert(network.to_owned(), vec![cidr.to_owned()]);
    }

    /// Waits until the agent of the first machine reports no address for a pod.
    async fn nothing_is_held_for(&self, pod: &str) {
        let api = &self.stage.api;
        let uid = api.pods.get(pod).await.unwrap().metadata.uid.unwrap();
        eventually(&format!("no address is held for {pod}"), async || {
            let list = api.addresses.get(self.machines[0].name()).await?.spec;
            let held = list.entries().find(|it| it.pod_uid == uid);
            ensure!(held.is_none(), "{held:?}");
            Ok(Some(()))
        })
        .await;
    }
}
