//! The cluster of a new user. Its nodes have no network, and Cadastre is not installed. The cluster has
//! ServiceAccounts.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::helm::Helm;
use cadastre_e2e::metrics;
use cadastre_e2e::node::pods::{Running, reaches};
use cadastre_e2e::node::{self, Machine, MachineOptions, Site, SiteOptions};
use cadastre_e2e::{Fixtures, Options, daemon};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::Api;
use kube::api::ListParams;

use crate::docs;
use crate::eventually;

/// The maximum duration of a wait, long enough for a busy host.
pub const LIMIT: Duration = Duration::from_secs(240);

/// The cluster and its machines. Fields are dropped in the order in which they are declared, because the machines must
/// be dropped before the site.
pub struct Cluster {
    pub api: Fixtures,
    pub machines: Vec<Machine>,
    pub site: Site,
    /// Selects helm 4 or helm 3 for the installation
    helm: fn(Helm) -> Helm,
}

impl Cluster {
    /// Starts a cluster of `count` machines, without Cadastre.
    pub async fn start(count: usize, helm: fn(Helm) -> Helm) -> Self {
        let options = SiteOptions {
            control_plane: Options {
                service_accounts: true,
                ..Options::default()
            },
            bare: true,
            images: vec![node::shipped().unwrap()],
            host_boot_id: true,
            ..SiteOptions::default()
        };
        let site = Site::start(options).await.unwrap();
        let api = site.fixtures().await.unwrap();
        for namespace in ["default", "kube-system"] {
            let accounts: Api<ServiceAccount> = Api::namespaced(api.client.clone(), namespace);
            eventually("there are ServiceAccounts", async || {
                Ok(accounts.get_opt("default").await?)
            })
            .await;
        }
        let mut this = Self {
            api,
            machines: Vec::new(),
            site,
            helm,
        };
        for _ in 0..count {
            let machine = this.one_more().await;
            this.machines.push(machine);
        }
        this
    }

    pub fn nodes(&self) -> Vec<String> {
        let names = self.machines.iter().map(|it| it.name().to_owned());
        names.collect()
    }

    /// Waits until a pod of each node reaches all pods of the other nodes.
    pub async fn all_reach_each_other(&self, pods: &[Running]) {
        for machine in &self.machines {
            let from = pods.iter().find(|it| it.node == machine.name());
            let Some(from) = from else { continue };
            for to in pods.iter().filter(|it| it.node != from.node) {
                reaches(machine, from, to, LIMIT).await.unwrap();
            }
        }
    }

    /// Runs the page's first helm command that begins with `start`, with the additional flags in `more`. Returns the
    /// output.
    pub async fn helm(&self, page: &str, start: &str, more: &[&str]) -> String {
        let mut args = docs::command(page, start);
        args.extend(
            ["--timeout", "240s"]
                .iter()
                .chain(more)
                .map(ToString::to_string),
        );
        let helm = (self.helm)(Helm::of(self.site.cluster()).unwrap());
        helm.run(&args[1..]).await.unwrap()
    }

    /// Runs the first of the page's kubectl commands that begin with `start`. Returns the output.
    pub async fn kubectl(&self, page: &str, start: &str) -> String {
        let args = docs::command(page, start);
        self.site.cluster().kubectl(&args[1..]).await.unwrap()
    }

    /// Runs the first of the page's `kubectl cadastre` commands that begin with `start`. Returns the exit code and the
    /// output.
    pub async fn plugin(&self, page: &str, start: &str) -> (i32, String) {
        let args = docs::command(page, start);
        let plugin = daemon::kubectl_plugin().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", plugin.parent().unwrap().display());
        let output = tokio::process::Command::new(assets::find(Program::Kubectl).unwrap())
            .args(&args[1..])
            .env("KUBECONFIG", self.site.cluster().kubeconfig(ADMIN).unwrap())
            .env("PATH", path)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        (output.status.code().unwrap(), said)
    }

    /// Starts another machine, and waits until its Node exists, because the chart counts the Nodes during installation.
    pub async fn one_more(&self) -> Machine {
        let machine = self.site.machine(MachineOptions::default()).await;
        let machine = machine.unwrap();
        eventually("the machine is a Node", async || {
            Ok(self.api.nodes.get_opt(machine.name()).await?)
        })
        .await;
        machine
    }

    /// Applies the chart's CRDs by the command on the page docs/upgrade.md.
    pub async fn apply_crds(&self) {
        let line = docs::command("upgrade.md", "helm show crds");
        let (show, apply) = line.split_at(line.iter().position(|it| it == "|").unwrap());
        let cluster = self.site.cluster();
        let crds = Helm::of(cluster).unwrap().run(&show[1..]).await.unwrap();
        cluster.kubectl_stdin(&apply[2..], &crds).await.unwrap();
    }

    /// Waits until a Node's condition `Ready` is `True` or, if `ready` is false, is not `True`. Returns the condition's
    /// message.
    pub async fn ready(&self, node: &str, ready: bool) -> String {
        let what = format!("node {node} is ready: {ready}");
        eventually(&what, async || {
            let node = self.api.nodes.get(node).await?;
            let conditions = node.status.and_then(|it| it.conditions).unwrap_or_default();
            let condition = conditions.into_iter().find(|it| it.type_ == "Ready");
            let condition = condition.context("no condition")?;
            ensure!((condition.status == "True") == ready, "{condition:?}");
            Ok(Some(condition.message.unwrap_or_default()))
        })
        .await
    }

    /// Returns how many controllers the Deployment wants, how many it has, and how many of these are ready.
    pub async fn controllers(&self) -> [i32; 3] {
        let all: Api<Deployment> = Api::namespaced(self.api.client.clone(), "kube-system");
        let one = all.get("cadastre-controller").await.unwrap();
        let status = one.status.unwrap_or_default();
        let wanted = one.spec.and_then(|it| it.replicas);
        [wanted, status.replicas, status.ready_replicas].map(Option::unwrap_or_default)
    }

    /// Returns the arguments of the agent's container in the DaemonSet, separated by spaces.
    pub async fn agent_args(&self) -> String {
        let sets: Api<DaemonSet> = Api::namespaced(self.api.client.clone(), "kube-system");
        let set = sets.get("cadastre-agent").await.unwrap();
        let spec = set.spec.unwrap().template.spec.unwrap();
        spec.containers[0]
            .args
            .clone()
            .unwrap_or_default()
            .join(" ")
    }

    /// Returns the resident memory of each node's agent in MiB, according to the agent's metrics.
    pub async fn memory(&self) -> Vec<(String, f64)> {
        let mut all = Vec::new();
        for machine in &self.machines {
            let ask = ["busybox", "wget", "-qO-", "http://127.0.0.1:9818/metrics"];
            let metrics = metrics::parse(&machine.run(&ask).await.unwrap());
            let bytes = metrics::sum(&metrics, "process_resident_memory_bytes", &[]);
            all.push((machine.name().to_owned(), bytes / 1_048_576.0));
        }
        all
    }

    /// Waits until no pod of the helm release is left.
    pub async fn no_agents(&self) {
        let pods: Api<Pod> = Api::namespaced(self.api.client.clone(), "kube-system");
        let params = ListParams::default().labels("app.kubernetes.io/name=cadastre");
        eventually("the pods of the release are gone", async || {
            let left = pods.list(&params).await?.items.len();
            ensure!(left == 0, "{left} are left");
            Ok(Some(()))
        })
        .await;
    }

    /// Waits until the NodeSubnets' statuses report as many addresses in use in total as these groups of pods have.
    pub async fn reports(&self, groups: &[&[Running]]) {
        let pods = groups.iter().copied().flatten();
        let count: usize = pods.map(|it| it.addresses.len()).sum();
        let what = format!("the agents report {count} addresses");
        eventually(&what, async || {
            let subnets = self.api.subnets.list(&ListParams::default()).await?;
            let told = subnets.items.into_iter().filter_map(|it| it.status);
            let told: i64 = told.flat_map(|it| it.blocks).map(|it| it.used).sum();
            ensure!(usize::try_from(told)? == count, "{told}");
            Ok(Some(()))
        })
        .await;
    }

    /// Prints the state of the cluster after a failure, and keeps the cluster's files.
    pub async fn explain(&self) {
        for args in [
            &["get", "pods", "-A", "-o", "wide"][..],
            &[
                "get",
                "events",
                "-A",
                "--sort-by=.metadata.creationTimestamp",
            ],
            &[
                "get",
                "ippools.cadastre.dev,nodesubnets.cadastre.dev,ipamblocks.cadastre.dev",
                "-o",
                "wide",
            ],
        ] {
            let said = self.site.cluster().kubectl(args).await;
            eprintln!(
                "kubectl {}: {}",
                args.join(" "),
                said.unwrap_or_else(|it| format!("{it:#}"))
            );
        }
        for machine in &self.machines {
            let logs = ["sh", "-c", "tail -n 30 /var/log/pods/*cadastre*/*/*.log"];
            let said = machine.run(&logs).await;
            eprintln!(
                "{}: {}",
                machine.name(),
                said.unwrap_or_else(|it| format!("{it:#}"))
            );
        }
        self.site.cluster().keep();
    }
}
