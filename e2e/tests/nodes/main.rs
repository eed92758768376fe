//! The guarantees about nodes with the agent and the CNI plugin, with real kubelets, containerd and runc.
//!
//! Tests that leave the site intact share one site with one controller. Each test starts its own machines, and uses
//! pools and pods of its own group. The start of a kubelet or of a pod takes seconds of processor time. So if one
//! subject can use the machines and pods of another, the same test covers both subjects, one after the other. If nodes
//! cannot run on this host, every test is ignored and the reason is printed. The test of macvlan is also ignored if the
//! kernel does not have macvlan, and the tests of BGP if BIRD or FRR is not installed. The test of Multus uses the
//! plugin bridge in place of a plugin that the kernel does not support, and prints this.
//!
//! | file | subject |
//! |---|---|
//! | `harness` | the harness itself: it leaves nothing behind |
//! | `bridge` | podCIDRs with host-local, or with cadastre-ipam in its place; an agent adopts the podCIDRs |
//! | `addresses` | many pods: unique addresses in the right ranges, no leaks |
//! | `deletions` | DELs that never come, or come three times; a chain that lacks a plugin |
//! | `crashes` | power cuts, killed and hung processes, an API server that cannot be reached |
//! | `masquerade` | the source address that a pod's peers see |
//! | `bgp` | ranges that BIRD, FRR and frr-k8s announce |
//! | `shortage` | exhaustion; blocks of nodes that are gone |
//! | `many` | many nodes while the controller is away; runs on request |
//! | `multus` | second networks, with the real Multus |
//! | `machines`, `pods` | helpers: nodes that boot; pods that start, get addresses, and end |
//! | `pages` | helpers: objects that the documentation shows |

#![allow(clippy::unwrap_used)] // allowed in helpers as in tests

mod addresses;
mod bgp;
mod bridge;
mod crashes;
mod deletions;
mod harness;
mod machines;
mod many;
mod masquerade;
mod multus;
mod pages;
mod pods;
mod routes;
mod shortage;

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Result;
use cadastre_e2e::cluster::start_controller;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::kubeconfig::User;
use cadastre_e2e::node::{self, Machine, MachineOptions, NodeSide, Site, SiteOptions};
use cadastre_e2e::wait::until;
use cadastre_e2e::{Daemon, Fixtures, daemon};
use libtest_mimic::{Arguments, Trial};
use tokio::runtime::Runtime;

/// The maximum duration of a wait. On a busy host, dozens of concurrent sandboxes wait for a slow disk.
const LIMIT: Duration = Duration::from_secs(400);

/// The user of the agents' ServiceAccount, with the permissions in config/rbac and no others.
const AGENT: &str = "system:serviceaccount:kube-system:cadastre-agent";

/// The only test that cannot run at all if the kernel does not have macvlan.
const MACVLAN: &str = "addresses::macvlan_puts_pods_on_the_network_of_the_nodes";

/// The only test that runs on request, because it stops the controller of all tests.
const MANY: &str = "many::pods_of_many_nodes_reach_each_other_while_the_controller_is_away";

/// The only tests for which the routing daemons BIRD and FRR must be installed.
const BGP: &str = "bgp::";

/// Waits until `look` returns a value; panics after [`LIMIT`].
async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Result<Option<T>>) -> T {
    until(what, LIMIT, look).await.unwrap()
}

type Test = fn(&Runtime, &Stage);

macro_rules! tests {
    ($($module:ident::$name:ident),+ $(,)?) => {
        [$((
            concat!(stringify!($module), "::", stringify!($name)),
            (|runtime, stage| runtime.block_on($module::$name(stage))) as Test,
        )),+]
    };
}

fn main() -> ExitCode {
    if let Some(code) = harness::child() {
        return code;
    }
    let tests = tests![
        bridge::two_nodes_with_host_local_then_with_ours_then_with_agents,
        addresses::waves_of_pods_come_and_go_on_two_nodes,
        crashes::a_power_cut_killed_programs_and_a_hung_agent,
        crashes::the_api_server_is_out_of_reach_then_stopped,
        deletions::a_chain_that_lacks_a_plugin_then_never_or_three_times,
        shortage::exhaustion_passes_and_blocks_of_a_node_that_is_gone_serve_another_one,
        masquerade::pods_see_each_others_own_addresses_and_all_else_the_nodes,
        multus::pods_on_second_networks_have_addresses_of_the_pools_that_the_networks_name,
        bgp::two_racks_learn_ranges_before_pods_use_them_and_forget_them_before_reuse,
        bgp::frr_k8s_announces_ranges_that_the_controller_lists_and_withdraws_them,
        routes::pods_of_two_nodes_reach_each_other_while_blocks_agents_and_nodes_come_and_go,
        addresses::macvlan_puts_pods_on_the_network_of_the_nodes,
        many::pods_of_many_nodes_reach_each_other_while_the_controller_is_away,
        harness::a_killed_harness_leaves_nothing,
    ];
    let reason = node::available().err();
    if let Some(reason) = &reason {
        eprintln!(
            "nodes cannot run here, so {} tests are skipped: {reason}",
            tests.len()
        );
    }
    let lacking = [(MACVLAN, node::macvlan()), (BGP, node::routing_daemons())];
    let lacking = lacking.map(|(name, there)| (name, there.err().filter(|_| reason.is_none())));
    for (name, lack) in &lacking {
        if let Some(lack) = lack {
            eprintln!("{name} is skipped: {lack}");
        }
    }
    let runtime = Arc::new(Runtime::new().unwrap());
    let stage = Arc::new(OnceLock::new());
    let trials = tests.map(|(name, test)| {
        let (runtime, stage) = (Arc::clone(&runtime), Arc::clone(&stage));
        let run = move || {
            test(
                &runtime,
                stage.get_or_init(|| runtime.block_on(Stage::start())),
            );
            Ok(())
        };
        let lacks = |(of, lack): &(&str, Option<String>)| lack.is_some() && name.starts_with(of);
        let is_unasked = name == MANY && std::env::var_os(many::NODES).is_none();
        let is_ignored = reason.is_some() || is_unasked || lacking.iter().any(lacks);
        Trial::test(name, run).with_ignored_flag(is_ignored)
    });
    let mut arguments = Arguments::from_args();
    // There are twice as many threads as usual, because the tests wait for kubelets most of the time.
    arguments.test_threads = arguments.test_threads.map(|it| 2 * it);
    let conclusion = libtest_mimic::run(&arguments, trials.into());
    if let Some(stage) = stage.get()
        && conclusion.has_failed()
    {
        stage.site.cluster().keep();
    }
    // The stage is dropped here, so that it ends before the runtime and before the process.
    drop(stage);
    conclusion.exit_code()
}

/// The site, the controller and the clients that most tests share. Fields are dropped in the order in which they are
/// declared, because the controller must be dropped before the site.
struct Stage {
    controller: Daemon,
    site: Site,
    api: Fixtures,
}

impl Stage {
    async fn start() -> Self {
        let mut options = SiteOptions::default();
        for user in [AGENT, multus::USER] {
            options.control_plane.users.push(User::new(user, &[]));
        }
        let site = Site::start(options).await.unwrap();
        let roles = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/rbac/agent.yaml");
        let apply = site.cluster().kubectl(&["apply", "-f", roles]).await;
        apply.unwrap();
        bgp::install_frr_k8s(site.cluster()).await.unwrap();
        let flags = ["--leak-grace", "2", "--publish-routes"].map(str::to_owned);
        let flags = [&flags[..], &bgp::frr_flags()].concat();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut controller = start_controller(site.cluster(), ADMIN, &flags).unwrap();
        controller.wait_ready(LIMIT).await.unwrap();
        let api = site.fixtures().await.unwrap();
        Self {
            controller,
            site,
            api,
        }
    }

    /// Starts a machine whose Node has the label of the group.
    async fn machine(&self, group: &str, side: NodeSide) -> Machine {
        let labels = vec![("group".to_owned(), group.to_owned())];
        let options = MachineOptions {
            labels,
            side,
            second_link: false,
        };
        self.site.machine(options).await.unwrap()
    }

    /// Runs `kubectl cadastre` as the administrator, and returns its standard output.
    async fn kubectl_cadastre(&self, args: &[&str]) -> String {
        let kubeconfig = self.site.cluster().kubeconfig(ADMIN).unwrap();
        let mut command = tokio::process::Command::new(daemon::kubectl_plugin().unwrap());
        let output = command.args(args).env("KUBECONFIG", kubeconfig).output();
        let output = output.await.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}
