//! Programs of a node die or cannot reach the API server, while the node's pods continue to work.

use cadastre_api::UnknownPods;
use cadastre_e2e::node::Machine;
use rustix::process::Signal;
use serde_json::json;

use crate::pods::{self, Running};
use crate::{Stage, eventually, machines};

/// Runs several tests one after the other on one machine with the same pods.
pub(crate) async fn a_power_cut_killed_programs_and_a_hung_agent(stage: &Stage) {
    let (api, group) = (&stage.api, "crash");
    let spec = machines::both("10.33.0.0/24", "fd00:33::/120");
    api.block_pool(group, spec).await.unwrap();
    let mut machine = stage.machine(group, machines::ptp()).await;
    let node = machine.name().to_owned();
    let boot = machines::boot_id(&pods::ready(api, &node, true).await);
    pods::create_many(api, group, group, 0..4, Some(&node)).await;
    let before = pods::running(api, group, 4).await;
    machines::reports(api, &node, &before).await;
    machine.power_off().await.unwrap();
    machine.boot().await.unwrap();
    machines::booted_since(api, &node, &boot).await;
    let after = machines::same_pods_anew(api, group, &before, &node).await;
    assert_good(stage, &after, &node).await;
    // The addresses of the sandboxes that the power cut has killed must be released, even if the runtime sends no DEL.
    machines::reports(api, &node, &after).await;

    // From here on pods are created while no agent runs, so no agent has seen them. With `Serve`, the CNI plugin serves
    // unknown pods.
    let serve = json!({"unknownPods": "Serve"});
    api.change_pool(group, serve).await.unwrap();
    let served = api.subnet_until(&node, "pods that nobody knows are served", |it| {
        let mut pools = it.spec.pools.iter();
        pools.any(|it| it.terms.unknown_pods == UnknownPods::Serve)
    });
    served.await.unwrap();
    containerd_kubelet_and_agent_are_killed(stage, &mut machine, group, after).await;
    the_agent_hangs(stage, &mut machine, group).await;
    pods::delete_all(api, group).await;
    machines::reports(api, &node, &[]).await;
}

async fn containerd_kubelet_and_agent_are_killed(
    stage: &Stage,
    machine: &mut Machine,
    group: &str,
    before: Vec<Running>,
) {
    let (api, node) = (&stage.api, machine.name().to_owned());
    machine.containerd().unwrap().kill().await.unwrap();
    machine.kubelet().unwrap().kill().await.unwrap();
    machine.start_containerd().await.unwrap();
    machine.start_kubelet().await.unwrap();
    let name = format!("{group}-new");
    pods::create(api, group, &name, Some(&node)).await;
    let all = pods::running(api, group, 5).await;
    assert_good(stage, &all, &node).await;
    let kept = |it: &Running| all.iter().any(|after| same_sandbox(it, after));
    assert!(before.iter().all(kept), "{before:?} {all:?}");

    // Now no agent runs, so the CNI plugin uses the store itself.
    machine.agent().unwrap().kill().await.unwrap();
    pods::delete_many(api, group, 0..3).await;
    pods::create_many(api, group, &format!("{group}-alone"), 0..3, Some(&node)).await;
    let all = pods::running(api, group, 5).await;
    assert_good(stage, &all, &node).await;
    pods::ready(api, &node, true).await;

    machine.start_agent().await.unwrap();
    machines::reports(api, &node, &all).await;
}

/// A machine cannot reach the API server. Later the API server is stopped, which affects all machines of a stage. So
/// this test has a stage of its own.
pub(crate) async fn the_api_server_is_out_of_reach_then_stopped(_: &Stage) {
    let mut stage = Stage::start().await;
    let ranges = ["10.35.0.0/24", "fd00:35::/120"];
    let mut alone = Alone::begin(&stage, "alone", ranges).await;
    let number = alone.machine.number();
    stage.site.fabric().link(number, false).await.unwrap();
    alone.make_anew().await;
    stage.site.fabric().link(number, true).await.unwrap();
    alone.all_is_well(&stage).await;
    stage.site.cluster_mut().kill_apiserver().unwrap();
    alone.make_anew().await;
    stage.site.cluster_mut().start_apiserver().await.unwrap();
    alone.all_is_well(&stage).await;
    alone.end(&stage).await;
}

/// A machine whose sandboxes are killed while the API server cannot be reached. The kubelet creates new sandboxes,
/// which need addresses.
struct Alone {
    machine: Machine,
    group: &'static str,
    before: Vec<Running>,
}

impl Alone {
    async fn begin(stage: &Stage, group: &'static str, [v4, v6]: [&str; 2]) -> Self {
        let api = &stage.api;
        let spec = machines::both(v4, v6);
        api.block_pool(group, spec).await.unwrap();
        let machine = stage.machine(group, machines::ptp()).await;
        let node = machine.name();
        pods::ready(api, node, true).await;
        pods::create_many(api, group, group, 0..2, Some(node)).await;
        let before = pods::running(api, group, 2).await;
        machines::reports(api, node, &before).await;
        Self {
            machine,
            group,
            before,
        }
    }

    /// Kills one sandbox, restarts the agent, and kills the other sandbox. Waits for a new sandbox after each kill.
    async fn make_anew(&mut self) {
        let machine = &mut self.machine;
        let sandboxes = sandboxes(machine).await;
        assert_eq!(sandboxes.len(), 2);
        let ctr = cadastre_e2e::assets::find(cadastre_e2e::assets::Program::Ctr).unwrap();
        let ctr = ctr.display().to_string();
        for (n, sandbox) in sandboxes.iter().enumerate() {
            if n == 1 {
                machine.agent().unwrap().kill().await.unwrap();
                machine.start_agent().await.unwrap();
            }
            let kill = [
                "-n",
                "k8s.io",
                "task",
                "kill",
                "-s",
                "KILL",
                sandbox.as_str(),
            ];
            let kill = [&[ctr.as_str()], &kill[..]].concat();
            machine.run(&kill).await.unwrap();
            until_new(machine, &sandboxes[..=n], 2).await;
        }
    }

    /// Waits until the pods in `before` run in new sandboxes, according to the API. Checks the addresses of these pods,
    /// and waits until the agent reports the addresses.
    async fn all_is_well(&mut self, stage: &Stage) {
        let (api, node) = (&stage.api, self.machine.name());
        let after = machines::same_pods_anew(api, self.group, &self.before, node).await;
        assert_good(stage, &after, node).await;
        machines::reports(api, node, &after).await;
        self.before = after;
    }

    async fn end(self, stage: &Stage) {
        let (api, group, node) = (&stage.api, self.group, self.machine.name());
        pods::delete_all(api, group).await;
        machines::reports(api, node, &[]).await;
    }
}

/// Returns the container ids of the sandboxes that run on the machine.
async fn sandboxes(machine: &Machine) -> Vec<String> {
    let ctr = cadastre_e2e::assets::find(cadastre_e2e::assets::Program::Ctr).unwrap();
    let ctr = ctr.display().to_string();
    let kind = r#"labels."io.cri-containerd.kind"==sandbox"#;
    let all = [&ctr, "-n", "k8s.io", "containers", "list", "-q", kind];
    let all = machine.run(&all).await.unwrap();
    let running = [&ctr, "-n", "k8s.io", "tasks", "list"];
    let running = machine.run(&running).await.unwrap();
    let runs = |id: &&str| {
        let line = running.lines().find(|it| it.starts_with(id));
        line.is_some_and(|it| it.contains("RUNNING"))
    };
    all.lines().filter(runs).map(str::to_owned).collect()
}

/// Waits until exactly `count` sandboxes run, none of which is in `old`.
async fn until_new(machine: &Machine, old: &[String], count: usize) {
    eventually("sandboxes are made anew", async || {
        let now = sandboxes(machine).await;
        let new = now.iter().all(|it| !old.contains(it));
        Ok((new && now.len() == count).then_some(()))
    })
    .await;
}

fn same_sandbox(a: &Running, b: &Running) -> bool {
    (&a.uid, &a.container, &a.addresses) == (&b.uid, &b.container, &b.addresses)
}

async fn assert_good(stage: &Stage, all: &[Running], node: &str) {
    pods::assert_unique(all);
    assert!(all.iter().all(|it| it.addresses.len() == 2), "{all:?}");
    pods::assert_within(all, &machines::ranges(&stage.api, node).await);
}

/// While an idle agent hangs, the CNI plugin uses the store as if there were no agent.
async fn the_agent_hangs(stage: &Stage, machine: &mut Machine, group: &str) {
    let (api, node) = (&stage.api, machine.name().to_owned());
    let agent = machine.agent().unwrap();
    eventually("the agent lets go of its store", async || {
        if has_store(agent.pid()) {
            return Ok(None);
        }
        agent.signal(Signal::STOP)?;
        // The check is repeated, because the agent may have opened the store between the first check and the stop.
        if has_store(agent.pid()) {
            agent.signal(Signal::CONT)?;
            return Ok(None);
        }
        Ok(Some(()))
    })
    .await;
    pods::create_many(api, group, &format!("{group}-stopped"), 0..2, Some(&node)).await;
    let all = pods::running(api, group, 7).await;
    assert_good(stage, &all, &node).await;
    machine.agent().unwrap().signal(Signal::CONT).unwrap();
    machines::reports(api, &node, &all).await;
}

/// Returns whether a process has a node's store open.
fn has_store(pid: u32) -> bool {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let files = open.flatten().filter_map(|it| it.path().read_link().ok());
    files.into_iter().any(|it| it.ends_with("node.redb"))
}
