//! `kubectl cadastre support-bundle`: writes everything that a problem report needs to one folder.
//!
//! # Guarantees
//! - No Secret and no ConfigMap is read. Of pods, nodes and workloads, only fields that this source file names are
//!   kept: no environment variables, commands or volumes, and of the annotations only `cadastre.dev/*`.
//! - Managed fields and last-applied configurations are dropped.
//! - `README.txt` names the files in the bundle, and the objects and metrics that could not be read.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use http::Request;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::inventory::Inventory;
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::{ExitVerdict, Flags, check};
use cadastre_api::frr::{FRR_API_VERSION, MANAGED_BY};
use cadastre_api::{AGENT_MANAGER, FIELD_MANAGER, GROUP, VERSION};
use cadastre_core::inert;

/// Collect objects, events, versions and metrics for a problem report in a folder
///
/// No secrets, environment variables or pod specs are collected. Review the folder before you send it: it contains
/// names of nodes and pods, and addresses.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre support-bundle
  kubectl cadastre support-bundle --dir bundle && tar czf bundle.tar.gz bundle")]
pub(crate) struct BundleArgs {
    /// Folder to create, which must not exist yet; by default cadastre-support-TIME
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// The query parameter of a list request that selects Cadastre's own Deployments, DaemonSets and pods.
const OWN_WORKLOADS: &str = "labelSelector=app.kubernetes.io/name%3Dcadastre";

/// A list to collect: the file's name, the request's path, a function that returns the parts of an object to keep, and
/// a function that says whether to keep an object.
type ListFile = (
    &'static str,
    String,
    fn(&Value) -> Value,
    fn(&Value) -> bool,
);

struct Bundle<'a> {
    dir: &'a Path,
    reach: &'a ApiReach,
    readme: String,
}

/// Runs `support-bundle`: creates the folder, and prints its `README.txt`.
pub(crate) async fn exec(
    args: &BundleArgs,
    _: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let now = Timestamp::now();
    let stamp = now.strftime("%Y%m%dT%H%M%SZ");
    let dir = args.dir.clone();
    let dir = dir.unwrap_or_else(|| format!("cadastre-support-{stamp}").into());
    let shown = dir.display();
    fs::create_dir(&dir).with_context(|| {
        format!("cannot create {shown}: choose another --dir, which must not exist yet")
    })?;
    let mut bundle = Bundle {
        dir: &dir,
        reach,
        readme: format!(
            "Collected at {now} by kubectl-cadastre {} ({}).\n\n",
            cadastre_core::VERSION,
            cadastre_core::COMMIT
        ),
    };
    bundle.collect().await?;
    let readme = std::mem::take(&mut bundle.readme);
    fs::write(dir.join("README.txt"), &readme)?;
    let mut out = std::io::stdout().lock();
    write!(out, "{}", inert::lines(&readme))?;
    writeln!(
        out,
        "\nIt is in {shown}. Review it before you send it: it contains names of nodes and pods, and addresses."
    )?;
    Ok(ExitVerdict::Clean)
}

impl Bundle<'_> {
    async fn collect(&mut self) -> anyhow::Result<()> {
        let own = |kind: &str| format!("/apis/{GROUP}/{VERSION}/{kind}");
        let apps = |kind: &str| format!("/apis/apps/v1/{kind}?{OWN_WORKLOADS}");
        let of = |path: &str| path.to_owned();
        let crds = of("/apis/apiextensions.k8s.io/v1/customresourcedefinitions");
        let all = |_: &Value| true;
        let lists: [ListFile; 14] = [
            ("ippools.json", own("ippools"), cleaned, all),
            ("nodesubnets.json", own("nodesubnets"), cleaned, all),
            ("nodeaddresses.json", own("nodeaddresses"), cleaned, all),
            ("noderoutes.json", own("noderoutes"), cleaned, all),
            ("ipamblocks.json", own("ipamblocks"), cleaned, all),
            ("ipclaims.json", own("ipclaims"), cleaned, all),
            ("nodes.json", of("/api/v1/nodes"), node, all),
            ("pods.json", of("/api/v1/pods"), pod, all),
            (
                "servicecidrs.json",
                of("/apis/networking.k8s.io/v1/servicecidrs"),
                cleaned,
                all,
            ),
            (
                "events.json",
                of("/apis/events.k8s.io/v1/events"),
                cleaned,
                is_own_event,
            ),
            (
                "leases.json",
                of("/apis/coordination.k8s.io/v1/leases"),
                cleaned,
                is_own_lease,
            ),
            ("crds.json", crds, versions, |it| {
                it["spec"]["group"] == GROUP
            }),
            ("deployments.json", apps("deployments"), workload, all),
            ("daemonsets.json", apps("daemonsets"), workload, all),
        ];
        for list in lists {
            self.list(list).await?;
        }
        if self.has_frr().await {
            let (label, value) = MANAGED_BY;
            let path = format!(
                "/apis/{FRR_API_VERSION}/frrconfigurations?labelSelector={label}%3D{value}"
            );
            let list = (
                "frrconfigurations.json",
                path,
                without_neighbors as _,
                all as _,
            );
            self.list(list).await?;
        }
        match self.get("/version").await {
            Ok(version) => self.write("server.json", &version)?,
            Err(why) => self.missing("server.json", &why),
        }
        match self.reach.lists(WantedKinds::Pods).await {
            Ok(lists) => {
                let report = check::check(&Inventory::new(&lists, Timestamp::now()));
                self.write("check.json", &serde_json::to_value(report)?)?;
            }
            Err(error) => self.missing("check.json", &format!("{error:#}")),
        }
        self.metrics().await
    }

    async fn list(&mut self, (file, path, keep, is_kept): ListFile) -> anyhow::Result<()> {
        match self.pages(&path).await {
            Ok(mut items) => {
                items.retain(is_kept);
                self.write(file, &items.iter().map(keep).collect())
            }
            Err(why) => {
                self.missing(file, &why);
                Ok(())
            }
        }
    }

    /// Returns whether the API server has the kinds of frr-k8s, which few clusters have. If the API groups cannot be
    /// read, returns true: listing then fails, and `README.txt` gives the reason.
    async fn has_frr(&self) -> bool {
        let Ok(groups) = self.get("/apis").await else {
            return true;
        };
        let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
        let versions = list(&groups["groups"]).into_iter();
        let mut versions = versions.flat_map(|it| list(&it["versions"]));
        versions.any(|it| it["groupVersion"] == FRR_API_VERSION)
    }

    /// Reads the metrics of Cadastre's pods through the API server's proxy. `README.txt` names the metrics that could
    /// not be read, with the reasons.
    async fn metrics(&mut self) -> anyhow::Result<()> {
        let path = format!("/api/v1/pods?{OWN_WORKLOADS}");
        let pods = self.pages(&path).await;
        if let Err(why) = &pods {
            self.missing("metrics", why);
        }
        for pod in pods.unwrap_or_default() {
            let meta = &pod["metadata"];
            let (Some(namespace), Some(name)) = (meta["namespace"].as_str(), meta["name"].as_str())
            else {
                continue;
            };
            let file = format!("metrics-{name}.txt");
            let Some(port) = admin_port(&pod) else {
                self.missing(&file, "the pod has no port with the name \"admin\"");
                continue;
            };
            let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics");
            match self.text(&path).await {
                Ok(text) => {
                    fs::write(self.dir.join(&file), text)?;
                    let _ = writeln!(self.readme, "{file}");
                }
                Err(why) => self.missing(&file, &why),
            }
        }
        Ok(())
    }

    /// Reads all objects of a list, in pages of 500.
    async fn pages(&self, path: &str) -> Result<Vec<Value>, String> {
        let mut items = Vec::new();
        let mut token = String::new();
        let mark = if path.contains('?') { '&' } else { '?' };
        loop {
            let mut page = self.get(&format!("{path}{mark}limit=500{token}")).await?;
            if let Value::Array(more) = page["items"].take() {
                items.extend(more);
            }
            match page["metadata"]["continue"].as_str() {
                Some(next) if !next.is_empty() => token = format!("&continue={next}"),
                _ => return Ok(items),
            }
        }
    }

    async fn get(&self, path: &str) -> Result<Value, String> {
        let text = self.text(path).await?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    async fn text(&self, path: &str) -> Result<String, String> {
        let request = Request::get(path)
            .body(Vec::new())
            .map_err(|error| error.to_string())?;
        let text = self.reach.client.request_text(request);
        let answer = self.reach.call(text).await;
        answer.map_err(|error| error.into_error(path).to_string())
    }

    fn write(&mut self, file: &str, value: &Value) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(value)?;
        fs::write(self.dir.join(file), text + "\n")
            .with_context(|| format!("{file} cannot be written"))?;
        let items = value.as_array();
        let count = items.map_or(String::new(), |items| format!(": {}", items.len()));
        let _ = writeln!(self.readme, "{file}{count}");
        Ok(())
    }

    fn missing(&mut self, file: &str, why: &str) {
        let _ = writeln!(self.readme, "{file}: MISSING: {why}");
    }
}

fn is_own_event(event: &Value) -> bool {
    let controller = &event["reportingController"];
    controller == FIELD_MANAGER || controller == AGENT_MANAGER
}

fn is_own_lease(lease: &Value) -> bool {
    let name = lease["metadata"]["name"].as_str();
    name.is_some_and(|it| it.contains("cadastre"))
}

/// Returns a copy of an object, without managed fields and the last-applied configuration.
fn cleaned(item: &Value) -> Value {
    let mut item = item.clone();
    if let Some(meta) = item["metadata"].as_object_mut() {
        meta.remove("managedFields");
        if let Some(annotations) = meta.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }
    item
}

/// Returns an FRRConfiguration without the neighbors, which may contain passwords.
fn without_neighbors(item: &Value) -> Value {
    let mut item = cleaned(item);
    let routers = item.pointer_mut("/spec/bgp/routers");
    for router in routers.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(router) = router.as_object_mut() {
            router.remove("neighbors");
        }
    }
    item
}

/// Returns the metadata to keep of an object whose kind is not one of Cadastre's.
fn meta(item: &Value) -> Value {
    const FIELDS: [&str; 7] = [
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "labels",
        "ownerReferences",
    ];
    let kept = |item: &Value, is_kept: &dyn Fn(&str) -> bool| -> Map<String, Value> {
        let fields = item.as_object().into_iter().flatten();
        let fields = fields.filter(|(key, _)| is_kept(key));
        fields
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    };
    let mut meta = kept(&item["metadata"], &|key| FIELDS.contains(&key));
    let annotations = kept(&item["metadata"]["annotations"], &|key| {
        key.starts_with(GROUP)
    });
    if !annotations.is_empty() {
        meta.insert("annotations".to_owned(), annotations.into());
    }
    meta.into()
}

fn node(item: &Value) -> Value {
    let (spec, status) = (&item["spec"], &item["status"]);
    let info = &status["nodeInfo"];
    json!({
        "metadata": meta(item),
        "spec": {
            "podCIDR": spec["podCIDR"], "podCIDRs": spec["podCIDRs"], "providerID": spec["providerID"],
            "taints": spec["taints"], "unschedulable": spec["unschedulable"],
        },
        "status": {
            "addresses": status["addresses"], "conditions": status["conditions"],
            "nodeInfo": {
                "kubeletVersion": info["kubeletVersion"], "kernelVersion": info["kernelVersion"],
                "containerRuntimeVersion": info["containerRuntimeVersion"], "osImage": info["osImage"],
                "architecture": info["architecture"],
            },
        },
    })
}

fn pod(item: &Value) -> Value {
    let (spec, status) = (&item["spec"], &item["status"]);
    json!({
        "metadata": meta(item),
        "spec": {"nodeName": spec["nodeName"], "hostNetwork": spec["hostNetwork"]},
        "status": {"phase": status["phase"], "podIP": status["podIP"], "podIPs": status["podIPs"]},
    })
}

fn versions(item: &Value) -> Value {
    let versions = item["spec"]["versions"].as_array().into_iter().flatten();
    let versions = versions
        .map(|it| json!({"name": it["name"], "served": it["served"], "storage": it["storage"]}));
    json!({
        "metadata": {"name": item["metadata"]["name"], "generation": item["metadata"]["generation"]},
        "versions": versions.collect::<Vec<_>>(), "conditions": item["status"]["conditions"],
    })
}

/// Returns images, resources and replica counts of a workload, without arguments and environment.
fn workload(item: &Value) -> Value {
    let containers = item["spec"]["template"]["spec"]["containers"].as_array();
    let containers = containers.into_iter().flatten();
    let containers = containers
        .map(|it| json!({"name": it["name"], "image": it["image"], "resources": it["resources"]}));
    json!({
        "metadata": meta(item),
        "spec": {"replicas": item["spec"]["replicas"], "containers": containers.collect::<Vec<_>>()},
        "status": item["status"],
    })
}

/// Returns the number of a pod's port with the name `admin`, which serves metrics. The number must be looked up,
/// because users can set it in the chart, and because controllers and agents have different numbers.
fn admin_port(pod: &Value) -> Option<u64> {
    let containers = pod["spec"]["containers"].as_array()?.iter();
    let mut ports = containers.filter_map(|it| it["ports"].as_array()).flatten();
    let port = ports.find(|port| port["name"] == "admin")?;
    port["containerPort"].as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_from_the_port_that_the_pod_names() {
        let port = |name: &str, port: u16| json!({"name": name, "containerPort": port});
        let ports = [port("probes", 9819), port("admin", 9818)];
        let containers = json!([{"name": "cni"}, {"name": "agent", "ports": ports}]);
        let agent = json!({"spec": {"containers": containers}});
        assert_eq!(admin_port(&agent), Some(9818));
        assert_eq!(admin_port(&json!({"spec": {"containers": [{}]}})), None);
    }

    #[test]
    fn nothing_of_a_pod_but_its_network_is_kept() {
        let secret = "hunter2";
        let whole = json!({
            "metadata": {
                "name": "a", "namespace": "b", "uid": "u",
                "annotations": {"cadastre.dev/pools": "p", "token": secret},
                "managedFields": [{"manager": secret}],
            },
            "spec": {
                "nodeName": "n", "containers": [{"name": "c", "env": [{"name": "X", "value": secret}], "args": [secret]}],
                "volumes": [{"secret": {"secretName": secret}}],
            },
            "status": {"phase": "Running", "podIP": "10.0.0.1"},
        });
        let kept = pod(&whole).to_string();
        assert!(!kept.contains(secret), "{kept}");
        assert!(
            kept.contains("cadastre.dev/pools") && kept.contains("10.0.0.1"),
            "{kept}"
        );
        let template = json!({"template": {"spec": whole["spec"]}});
        let mut daemon_set = json!({"metadata": whole["metadata"], "spec": template});
        assert!(!workload(&daemon_set).to_string().contains(secret));
        let applied = "kubectl.kubernetes.io/last-applied-configuration";
        daemon_set["metadata"]["annotations"] = json!({applied: secret});
        let meta = cleaned(&daemon_set)["metadata"].to_string();
        assert!(!meta.contains(secret), "{meta}");
    }
}
