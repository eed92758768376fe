//! Many nodes on one link, while the controller is away for a long time. Runs only on request (`make many`), because
//! each node needs seconds of processor time, and the controller is away for minutes.

use std::time::{Duration, Instant};

use cadastre_e2e::node::{Machine, NodeSide};
use rustix::process::Signal;

use crate::pods::{self, Running};
use crate::routes::{FLAGS, nothing_lost, ping};
use crate::{AGENT, Stage, masquerade};

/// The environment variable with the number of nodes.
pub const NODES: &str = "NODES";
/// The environment variable with the minutes for which the controller is away.
const MINUTES: &str = "MINUTES";

const GROUP: &str = "many";

pub(crate) async fn pods_of_many_nodes_reach_each_other_while_the_controller_is_away(
    stage: &Stage,
) {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|it| it.parse::<u32>().ok())
    };
    let count = number(NODES).unwrap_or(2) as usize;
    let away = Duration::from_secs(60) * number(MINUTES).unwrap_or(1);
    masquerade::block_pool(stage, GROUP, "10.73").await;
    let mut machines = Vec::new();
    for n in 1..=count {
        let side = NodeSide::shipped("ptp", FLAGS, AGENT).unwrap();
        let machine = stage.machine(GROUP, side).await;
        pods::ready(&stage.api, machine.name(), true).await;
        eprintln!("many: {n} of {count} nodes are ready");
        machines.push(machine);
    }
    let begin = Instant::now();
    for (n, machine) in machines.iter().enumerate() {
        let name = format!("{GROUP}-{n}");
        pods::create(&stage.api, GROUP, &name, Some(machine.name())).await;
    }
    let pods = pods::running(&stage.api, GROUP, count).await;
    let of = |machine: &Machine| pods.iter().find(|it| it.node == machine.name()).unwrap();
    for machine in &machines {
        for to in pods.iter().filter(|it| it.node != machine.name()) {
            pods::assert_reaches(machine, of(machine), to).await;
        }
    }
    eprintln!(
        "many: pods of {count} nodes reach each other in both families, {:.0?} after they were created",
        begin.elapsed()
    );
    let seconds = usize::try_from(away.as_secs()).unwrap() + 60;
    let all: Vec<_> = machines.iter().map(|it| of(it).addresses.clone()).collect();
    let next = |n: usize| &all[(n + 1) % count];
    for (n, machine) in machines.iter().enumerate() {
        ping(machine, of(machine), next(n), seconds, "1").await;
    }
    stage.controller.signal(Signal::STOP).unwrap();
    tokio::time::sleep(away / 2).await;
    for machine in &mut machines {
        machine.agent().unwrap().kill().await.unwrap();
        machine.start_agent().await.unwrap();
    }
    tokio::time::sleep(away / 2).await;
    let after: Vec<Running> = pods::running(&stage.api, GROUP, count).await;
    assert_eq!(after.len(), count);
    stage.controller.signal(Signal::CONT).unwrap();
    for (n, machine) in machines.iter().enumerate() {
        nothing_lost(machine, of(machine), next(n), seconds).await;
    }
    eprintln!(
        "many: of {seconds} packets each way, none was lost while the controller was away for {away:?} and all agents were killed"
    );
}
