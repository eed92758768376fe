//! Hollow kubelets run pods without containers. So tests can have many pods, which a real scheduler binds to nodes.
//!
//! As far as addresses are concerned, a hollow kubelet does the work of a kubelet and a runtime for the pods of its
//! node. It renews the node's Lease, sends ADD and DEL to the node's agent, and writes the pods' statuses. A container
//! is only a name.
//!
//! # Guarantees
//! [`Kubelets`] know the addresses of all containers of all machines that run. If an agent assigns an address that a
//! container already has, [`Kubelets::duplicates`] names the address and the two containers. A container has its
//! addresses from the answer to its ADD until its DEL is sent, or until its machine is switched off.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use cadastre_node::Add;
use futures::TryStreamExt as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, Preconditions};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::fixtures::Fixtures;
use crate::node_agent::{Agents, add, pod_ref};

/// How long a kubelet waits before it repeats a failed call.
const RETRY: Duration = Duration::from_millis(200);
/// The interval between two renewals of a node's Lease.
const HEARTBEAT: Duration = Duration::from_secs(2);
const LEASES: &str = "kube-node-lease";

/// The state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Power {
    On,
    /// The kubelet and the agent do nothing. The containers keep their addresses.
    Paused,
    Off,
}

/// The state of a pod according to the kubelet's watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Running,
    /// The pod has a deletion timestamp.
    Deleted,
    Gone,
}

/// The kubelets of several nodes, for pods of the namespace `default`. They stop when this value is dropped.
pub struct Kubelets {
    core: Arc<Core>,
    tasks: Mutex<JoinSet<()>>,
}

struct Core {
    client: Client,
    pods: Api<Pod>,
    agents: Agents,
    machines: Mutex<BTreeMap<String, watch::Sender<Power>>>,
    containers: Mutex<Containers>,
}

#[derive(Default)]
struct Containers {
    /// Maps each address of a running container to the container's name and node
    by_address: HashMap<String, (String, String)>,
    by_pod: BTreeMap<String, Vec<Vec<String>>>,
    /// Maps each pod to the error of its last ADD that failed
    refusals: BTreeMap<String, String>,
    duplicates: Vec<String>,
}

impl Kubelets {
    /// Starts to watch pods. No node has a kubelet yet.
    pub fn start(fixtures: &Fixtures, agents: Agents) -> Self {
        let core = Arc::new(Core {
            client: fixtures.client.clone(),
            pods: fixtures.pods.clone(),
            agents,
            machines: Mutex::default(),
            containers: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&core).follow());
        Self {
            core,
            tasks: Mutex::new(tasks),
        }
    }

    /// Starts the agent and the kubelet of a node. The node becomes ready, with room for `pods` pods. If the API server
    /// refuses that, nothing is started.
    pub async fn join(&self, node: &Node, pods: u32) -> Result<()> {
        let name = node.name_any();
        let resources = json!({"cpu": "64", "memory": "256Gi", "pods": pods.to_string()});
        let ready = json!({
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
            "lastHeartbeatTime": Timestamp::now(), "lastTransitionTime": Timestamp::now(),
        });
        let status = json!({"status": {
            "capacity": resources, "allocatable": resources, "conditions": [ready],
        }});
        let nodes: Api<Node> = Api::all(self.core.client.clone());
        let params = PatchParams::default();
        nodes
            .patch_status(&name, &params, &Patch::Strategic(status))
            .await?;
        self.core.agents.join(node)?;
        lock(&self.core.machines).insert(name.clone(), watch::Sender::new(Power::On));
        let heartbeats = Arc::clone(&self.core).renew_lease(name);
        lock(&self.tasks).spawn(heartbeats);
        Ok(())
    }

    /// Pauses the machine of a node: until [`Kubelets::resume`], the kubelet and the agent do nothing. The containers
    /// keep their addresses.
    pub fn pause(&self, node: &str) -> Result<()> {
        self.core.switch(node, Power::Paused)?;
        self.core.agents.signal(node, Signal::STOP)
    }

    /// Resumes a machine that [`Kubelets::pause`] paused.
    pub fn resume(&self, node: &str) -> Result<()> {
        self.core.agents.signal(node, Signal::CONT)?;
        self.core.switch(node, Power::On)
    }

    /// Switches the machine of a node off, for good: its kubelet, its agent and all its containers end.
    pub fn switch_off(&self, node: &str) -> Result<()> {
        self.core.switch(node, Power::Off)?;
        self.core.agents.leave(node);
        let mut containers = lock(&self.core.containers);
        containers.by_address.retain(|_, (_, on)| on != node);
        Ok(())
    }

    /// Returns the names of the nodes whose machines run.
    pub fn nodes(&self) -> Vec<String> {
        let machines = lock(&self.core.machines);
        let on = machines.iter().filter(|(_, it)| *it.borrow() != Power::Off);
        on.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the agents of the nodes.
    pub fn agents(&self) -> &Agents {
        &self.core.agents
    }

    /// Returns a text for each assignment of an address that another container had at that time.
    pub fn duplicates(&self) -> Vec<String> {
        lock(&self.core.containers).duplicates.clone()
    }

    /// Returns the error of the last ADD of a pod that failed; empty if none failed.
    pub fn refusal(&self, pod: &str) -> String {
        let containers = lock(&self.core.containers);
        containers.refusals.get(pod).cloned().unwrap_or_default()
    }

    /// Returns a map from the name of each pod to a list with the addresses of each container that the pod has had so
    /// far.
    pub fn assigned(&self) -> BTreeMap<String, Vec<Vec<String>>> {
        lock(&self.core.containers).by_pod.clone()
    }
}

impl Core {
    fn switch(&self, node: &str, power: Power) -> Result<()> {
        let machines = lock(&self.machines);
        let machine = machines.get(node);
        machine
            .with_context(|| format!("node {node} has no kubelet: join it first"))?
            .send_replace(power);
        Ok(())
    }

    /// Waits until the node's machine is not paused. Returns whether the machine runs: false if it is switched off or
    /// does not exist.
    async fn works(&self, node: &str) -> bool {
        let Some(mut power) = lock(&self.machines).get(node).map(watch::Sender::subscribe) else {
            return false;
        };
        let on = power.wait_for(|it| *it != Power::Paused).await;
        on.is_ok_and(|it| *it == Power::On)
    }

    async fn renew_lease(self: Arc<Self>, node: String) {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), LEASES);
        while self.works(&node).await {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(node.clone()),
                    ..ObjectMeta::default()
                },
                spec: Some(LeaseSpec {
                    holder_identity: Some(node.clone()),
                    lease_duration_seconds: Some(40),
                    renew_time: Some(MicroTime(Timestamp::now())),
                    ..LeaseSpec::default()
                }),
            };
            let params = PatchParams::apply("kubelet").force();
            // An error is ignored, because the next renewal follows in a moment.
            let _ = leases.patch(&node, &params, &Patch::Apply(&lease)).await;
            tokio::time::sleep(HEARTBEAT).await;
        }
    }

    /// Runs every bound pod in a task of its own. Notifies the task when the pod gets a deletion timestamp, and when
    /// the Pod object is gone.
    async fn follow(self: Arc<Self>) {
        let mut running: HashMap<String, watch::Sender<Wanted>> = HashMap::new();
        let mut listed = BTreeSet::new();
        let mut tasks = JoinSet::new();
        let mut events = std::pin::pin!(watcher(self.pods.clone(), watcher::Config::default()));
        loop {
            let pod = match events.try_next().await {
                Ok(Some(Event::Init)) => {
                    listed.clear();
                    continue;
                }
                Ok(Some(Event::InitDone)) => {
                    let gone = running.extract_if(|uid, _| !listed.contains(uid));
                    gone.for_each(|(_, pod)| _ = pod.send_replace(Wanted::Gone));
                    continue;
                }
                Ok(Some(Event::Delete(pod))) => {
                    if let Some(pod) = running.remove(&pod.uid().unwrap_or_default()) {
                        pod.send_replace(Wanted::Gone);
                    }
                    continue;
                }
                Ok(Some(Event::InitApply(pod))) => {
                    listed.insert(pod.uid().unwrap_or_default());
                    pod
                }
                Ok(Some(Event::Apply(pod))) => pod,
                Ok(None) => return,
                // The watcher reports an error, and resumes by itself.
                Err(_) => {
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            let Some(node) = pod.spec.as_ref().and_then(|it| it.node_name.clone()) else {
                continue;
            };
            let wanted = match pod.metadata.deletion_timestamp {
                Some(_) => Wanted::Deleted,
                None => Wanted::Running,
            };
            let state = running.entry(pod.uid().unwrap_or_default());
            let state = state.or_insert_with(|| {
                let (state, wanted) = watch::channel(wanted);
                tasks.spawn(Arc::clone(&self).run(pod, node, wanted));
                state
            });
            state.send_replace(wanted);
        }
    }

    /// Runs a pod: sends its ADD and writes its status. When the pod is deleted, sends the DEL and removes the Pod
    /// object.
    async fn run(self: Arc<Self>, pod: Pod, node: String, mut wanted: watch::Receiver<Wanted>) {
        let uid = pod.uid().unwrap_or_default();
        let container = format!("{}-{uid}", pod.name_any());
        let request = Add {
            pod: Some(pod_ref(&pod)),
            ..add(&container)
        };
        while *wanted.borrow() == Wanted::Running {
            if !self.works(&node).await {
                return;
            }
            let answer = self.agents.add(&node, request.clone()).await;
            match answer.and_then(|it| Ok(it?)) {
                Ok(addresses) => {
                    self.started((&node, &container), &pod.name_any(), &addresses);
                    self.report(&pod, &addresses, &mut wanted).await;
                    break;
                }
                Err(error) => {
                    let mut containers = lock(&self.containers);
                    let text = format!("{error:#}");
                    containers.refusals.insert(pod.name_any(), text);
                }
            }
            tokio::time::sleep(RETRY).await;
        }
        // `wait_for` fails only if the sender is gone, which means that the kubelets are being dropped.
        if wanted.wait_for(|it| *it != Wanted::Running).await.is_err() {
            return;
        }
        while self.works(&node).await {
            self.ended(&container);
            if self.agents.free(&node, &container).await.is_ok() && self.remove(&pod).await.is_ok()
            {
                return;
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Writes to the pod's status that the pod is running and ready. Repeats the write until it succeeds or the pod is
    /// being deleted.
    async fn report(&self, pod: &Pod, addresses: &[String], wanted: &mut watch::Receiver<Wanted>) {
        let ips: Vec<_> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let ready = |type_| json!({"type": type_, "status": "True", "lastTransitionTime": Timestamp::now()});
        let status = Patch::Strategic(json!({
            "metadata": {"uid": pod.uid()},
            "status": {
                "phase": "Running", "podIP": addresses.first(), "podIPs": ips,
                "startTime": Timestamp::now(),
                "conditions": [ready("Ready"), ready("ContainersReady"), ready("Initialized")],
            },
        }));
        let params = PatchParams::default();
        while *wanted.borrow() == Wanted::Running {
            let written = self
                .pods
                .patch_status(&pod.name_any(), &params, &status)
                .await;
            if written.is_ok() {
                return;
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Deletes the Pod object, as a kubelet does once the containers have ended.
    async fn remove(&self, pod: &Pod) -> Result<()> {
        let params = DeleteParams::default()
            .grace_period(0)
            .preconditions(Preconditions {
                uid: pod.uid(),
                resource_version: None,
            });
        match self.pods.delete(&pod.name_any(), &params).await {
            Err(kube::Error::Api(error)) if matches!(error.code, 404 | 409) => Ok(()),
            done => Ok(done.map(drop)?),
        }
    }

    fn started(&self, (node, container): (&str, &str), pod: &str, addresses: &[String]) {
        let mut containers = lock(&self.containers);
        let machines = lock(&self.machines);
        if machines
            .get(node)
            .is_none_or(|it| *it.borrow() == Power::Off)
        {
            return; // the machine was switched off while the agent answered
        }
        let of_pod = containers.by_pod.entry(pod.to_owned()).or_default();
        of_pod.push(addresses.to_vec());
        for address in addresses {
            let new = (container.to_owned(), node.to_owned());
            if let Some((other, on)) = containers.by_address.insert(address.clone(), new) {
                let text = format!("{address}: {container} on {node}, and {other} on {on}");
                containers.duplicates.push(text);
            }
        }
    }

    fn ended(&self, container: &str) {
        let mut containers = lock(&self.containers);
        containers.by_address.retain(|_, (it, _)| it != container);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
