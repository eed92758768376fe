//! Tests of announcements by BGP: a real BIRD on one node and a real FRR on the other read the ranges from files that
//! the agents write. Each node is in a rack of its own, and only the racks' routers connect the racks. The recipe of FRR
//! is read from docs/bgp.md. On a third node, a real frr-k8s configures FRR by the FRRConfiguration that the controller
//! writes.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use cadastre_api::{ASN_ANNOTATION, CLAIM_ANNOTATION, IPClaim, RANGES_ANNOUNCED};
use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::node::{Fabric, Guest, Machine, NodeSide, Router};
use cadastre_e2e::{ControlPlane, Fixtures};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::masquerade::{SERVER, assert_sees};
use crate::pods::{self, Running};
use crate::{AGENT, Stage, eventually};

const BIRD: &[&str] = &[
    "--masquerade=true",
    "--announce-file=/run/cadastre-routes/bird.conf",
    "--announce-reload=bird=/run/bird.ctl",
];

const FRR: &[&str] = &[
    "--masquerade=true",
    "--announce-file=/run/cadastre-routes/frr.conf",
    "--announce-template=/etc/cni/announce",
    "--announce-reload=none",
];

/// The agent of the node with frr-k8s takes no part in announcements.
const FRR_K8S: &[&str] = &["--masquerade=true"];

/// The namespace of the FRRConfigurations.
const NAMESPACE: &str = "frr-k8s-system";

/// The number of the router next to the node with frr-k8s.
const K8S_ROUTER: u8 = 203;

/// The page with the recipe of FRR.
const PAGE: &str = include_str!("../../../docs/bgp.md");

/// A node, whose routing daemon is BIRD or FRR, and the router of its rack, which runs BIRD.
struct Rack {
    node: Machine,
    /// The processes of the node's routing daemon
    daemon: Vec<Guest>,
    router: Router,
    _router_daemon: Guest,
}

/// The configuration that docs/bgp.md recommends for nodes.
const NODE: &str = r#"
log stderr all;
router id NODE4;
include "/run/cadastre-routes/bird*.conf";
protocol device {}
protocol kernel { ipv4 { export where source = RTS_BGP; }; }
protocol kernel { ipv6 { export where source = RTS_BGP; }; }
protocol bgp rack4 {
  local NODE4 as NODE_AS;
  neighbor ROUTER4 as ROUTER_AS;
  ipv4 { import all; export where proto = "cadastre4"; };
}
protocol bgp rack6 {
  local NODE6 as NODE_AS;
  neighbor ROUTER6 as ROUTER_AS;
  ipv6 { import all; export where proto = "cadastre6"; };
}
"#;

/// The router's configuration. All nodes and routers share one link, so each router must set itself as the next hop.
/// With graceful restart, the router would keep the routes of a node for two minutes after FRR has ended the session.
const ROUTER: &str = r"
log stderr all;
router id ROUTER4;
protocol device {}
protocol kernel { ipv4 { export all; }; }
protocol kernel { ipv6 { export all; }; }
protocol bgp node4 {
  local ROUTER4 as ROUTER_AS;
  graceful restart off;
  neighbor NODE4 as NODE_AS;
  ipv4 { import all; export all; next hop self; };
}
protocol bgp node6 {
  local ROUTER6 as ROUTER_AS;
  graceful restart off;
  neighbor NODE6 as NODE_AS;
  ipv6 { import all; export all; next hop self; };
}
";

/// The part of a router's configuration about the router of another rack.
const SPINE: &str = r"
protocol bgp spine4 {
  local ROUTER4 as ROUTER_AS;
  neighbor OTHER4 as OTHER_AS;
  ipv4 { import all; export all; next hop self; };
}
protocol bgp spine6 {
  local ROUTER6 as ROUTER_AS;
  neighbor OTHER6 as OTHER_AS;
  ipv6 { import all; export all; next hop self; };
}
";

/// Returns the text of the first code block of the page that contains `part`.
fn of_page(part: &str) -> String {
    let mut blocks = PAGE.split("```").skip(1).step_by(2);
    let block = blocks.find(|it| it.contains(part)).unwrap();
    let (_, text) = block.split_once('\n').unwrap();
    text.to_owned()
}

/// Returns the template of the recipe of FRR.
fn frr_template() -> String {
    let values = of_page("custom: |");
    let (_, template) = values.split_once("custom: |\n").unwrap();
    let lines = template.lines().map(|it| it.trim_start_matches("      "));
    let lines: Vec<&str> = lines.collect();
    lines.join("\n")
}

/// Returns FRR's configuration of the recipe for a node with this router.
fn frr_config(router: u8) -> String {
    let [v4, v6] = Fabric::addresses(router);
    let text = of_page("frr defaults");
    let text = text.replace("remote-as 64512", &format!("remote-as {}", system(router)));
    text.replace("192.0.2.1", &v4).replace("2001:db8::1", &v6)
}

/// Returns the AS number of a router.
fn system(router: u8) -> u32 {
    64_900 + u32::from(router)
}

/// Returns the AS number of the node of the rack with this router. The recipe of FRR has the number of the second rack.
fn node_system(router: u8) -> u32 {
    64_715 - u32::from(router)
}

fn config(template: &str, node: u8, router: u8, other: u8) -> String {
    let text = template.replace("NODE_AS", &node_system(router).to_string());
    let text = text.replace("ROUTER_AS", &system(router).to_string());
    let mut text = text.replace("OTHER_AS", &system(other).to_string());
    for (name, number) in [("NODE", node), ("ROUTER", router), ("OTHER", other)] {
        let [v4, v6] = Fabric::addresses(number);
        text = text.replace(&format!("{name}4"), &v4);
        text = text.replace(&format!("{name}6"), &v6);
    }
    text
}

impl Rack {
    /// Starts a node and its router. `other` is the number of the router of another rack, if there is one.
    async fn start(
        stage: &Stage,
        group: &str,
        flags: &[&str],
        router: u8,
        other: Option<u8>,
    ) -> Self {
        let mut side = NodeSide::shipped("ptp", flags, AGENT).unwrap();
        side.configs.push(("announce".to_owned(), frr_template()));
        let node = stage.machine(group, side).await;
        let of_node = config(NODE, node.number(), router, other.unwrap_or_default());
        fs::write(node.var().join("lib/bird.conf"), of_node).unwrap();
        fs::write(node.var().join("lib/frr.conf"), frr_config(router)).unwrap();
        fs::write(node.var().join("lib/cadastre-frr"), of_page("#!/bin/sh")).unwrap();
        let number = router;
        let router = stage.site.router(number).await.unwrap();
        let folder = stage.site.cluster().folder().join(format!("r{number}"));
        let path = folder.join("bird.conf");
        let mut of_router = config(ROUTER, node.number(), number, 0);
        if let Some(other) = other {
            of_router += &config(SPINE, node.number(), number, other);
        }
        fs::write(&path, of_router).unwrap();
        let path = path.to_str().unwrap();
        let socket = folder.join("bird.ctl");
        let socket = socket.to_str().unwrap();
        let args = ["bird", "-f", "-c", path, "-s", socket];
        let daemon = router.spawn("bird", &args).await.unwrap();
        // BIRD does not start if the folder of an include is missing.
        let folder = ["mkdir", "-p", "/run/cadastre-routes"];
        node.run(&folder).await.unwrap();
        let mut rack = Self {
            node,
            daemon: Vec::new(),
            _router_daemon: daemon,
            router,
        };
        match flags {
            FRR => rack.start_frr().await,
            FRR_K8S => rack.start_frr_k8s(stage).await,
            _ => rack.start_bird().await,
        }
        rack
    }

    /// Starts BIRD as the user of Debian's package, who cannot read the agent's own folders.
    async fn start_bird(&mut self) {
        let files = ["-c", "/var/lib/bird.conf", "-s", "/run/bird.ctl"];
        let user = ["-u", "bird", "-g", "bird"];
        let args = [&["bird", "-f"], &files[..], &user[..]].concat();
        self.daemon = vec![self.node.spawn("bird", &args).await.unwrap()];
    }

    /// Starts FRR, and a loop that runs the script of the recipe whenever the agent has written its file.
    async fn start_frr(&mut self) {
        let own = fs::read_to_string(self.node.var().join("lib/frr.conf")).unwrap();
        self.start_frr_daemons(&own).await;
        let watch = "
            while sleep 0.2; do
                cmp -s /run/cadastre-routes/frr.conf /run/frr/seen && continue
                cp /run/cadastre-routes/frr.conf /run/frr/seen && sh -e /var/lib/cadastre-frr
            done";
        self.spawn("cadastre-frr", &["sh", "-c", watch]).await;
    }

    /// Starts FRR without any configuration, frr-k8s, and the script of frr-k8s that reloads FRR.
    async fn start_frr_k8s(&mut self, stage: &Stage) {
        self.start_frr_daemons("").await;
        self.node
            .run(&["mkdir", "-p", "/etc/frr_reloader"])
            .await
            .unwrap();
        let script = assets::frr_reloader().unwrap();
        // A shell cannot trap SIGHUP if it starts with SIGHUP ignored, for example because the tests run under nohup.
        let args = ["env", "--default-signal=HUP", "bash"];
        let args = [&args[..], &[script.to_str().unwrap()]].concat();
        self.spawn("frr-reloader", &args).await;
        let program = assets::find(Program::FrrK8s).unwrap();
        let kubeconfig = stage.site.kubeconfig(ADMIN).unwrap();
        let env = format!("KUBECONFIG={}", kubeconfig.display());
        let name = self.node.name().to_owned();
        let args = [
            &["env", &env, program.to_str().unwrap(), "--node-name", &name][..],
            &["--namespace", NAMESPACE, "--pod-name", "frr-k8s"],
            &["--bgp-debounce-timeout", "200"],
        ];
        self.spawn("frr-k8s", &args.concat()).await;
    }

    async fn spawn(&mut self, name: &str, args: &[&str]) {
        self.daemon.push(self.node.spawn(name, args).await.unwrap());
    }

    /// Starts the daemons of FRR with this configuration.
    async fn start_frr_daemons(&mut self, config: &str) {
        fs::write(self.node.var().join("lib/frr.conf"), config).unwrap();
        let script = "set -eu
            rm -f /etc/frr # the host's folder
            mkdir -p /etc/frr /run/frr
            [ -e /var/run ] || ln -s /run /var/run
            chown frr:frr /etc/frr /run/frr
            cp /var/lib/frr.conf /etc/frr/frr.conf
            touch /etc/frr/vtysh.conf";
        self.node.run(&["sh", "-c", script]).await.unwrap();
        for name in ["zebra", "bgpd"] {
            self.spawn(name, &[&format!("/usr/lib/frr/{name}")]).await;
        }
    }

    /// Waits until the rack's router has a route to the node for exactly the blocks in the NodeSubnet, and `wanted`
    /// returns true for the destinations of these routes. Returns the destinations as `ip` prints them.
    async fn routes(
        &self,
        api: &Fixtures,
        what: &str,
        wanted: impl Fn(&[String]) -> bool,
    ) -> Vec<String> {
        let via = Fabric::addresses(self.node.number());
        eventually(what, async || {
            let mut found = Vec::new();
            for (family, via) in [("-4", &via[0]), ("-6", &via[1])] {
                let show = ["ip", family, "route", "show", "proto", "bird", "via", via];
                let lines = self.router.run(&show).await.context("ip route")?;
                let first = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
                found.extend(lines.lines().map(first));
            }
            found.sort();
            let blocks = api.subnets.get(self.node.name()).await?.spec.blocks;
            let mut listed: Vec<_> = blocks.iter().map(|it| without_length(&it.cidr)).collect();
            listed.sort();
            ensure!(found == listed, "{found:?} instead of {listed:?}");
            ensure!(wanted(&found), "{found:?}");
            Ok(Some(found))
        })
        .await
    }
}

pub(crate) async fn two_racks_learn_ranges_before_pods_use_them_and_forget_them_before_reuse(
    stage: &Stage,
) {
    let api = &stage.api;
    for (group, net) in [("beast", "10.73"), ("bwest", "10.74")] {
        pool(api, group, net).await;
    }
    let (mut east, west) = tokio::join!(
        Rack::start(stage, "beast", BIRD, 201, Some(202)),
        Rack::start(stage, "bwest", FRR, 202, Some(201))
    );
    for rack in [&east, &west] {
        pods::ready(api, rack.node.name(), true).await;
        let what = "the first blocks are announced before the first pod";
        rack.routes(api, what, |it| it.len() == 2).await;
        condition(api, rack.node.name(), "True", "Announced").await;
    }
    let from = pod(api, &east, "beast", None).await;
    let to = pod(api, &west, "bwest", None).await;
    west.node
        .run_in_pod(&to.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    assert_sees(&east.node, &from, &to.addresses, &from.addresses).await;

    // The address of a claim has a route of its own. When the claim's pod moves to the other rack, the route follows.
    claim(api, "roams").await;
    let claimed = pod(api, &east, "beast", Some("roams")).await;
    let addresses = claimed.addresses.iter().map(ToString::to_string);
    let addresses: Vec<String> = addresses.collect();
    let has = |routes: &[String]| addresses.iter().all(|it| routes.contains(it));
    east.routes(api, "the claimed addresses are announced", has)
        .await;
    east.node
        .run_in_pod(&claimed.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    assert_sees(&west.node, &to, &claimed.addresses, &to.addresses).await;
    api.delete_pod(&claimed.name).await.unwrap();
    let moved = pod(api, &west, "bwest", Some("roams")).await;
    assert_eq!(moved.addresses, claimed.addresses);
    west.node
        .run_in_pod(&moved.container, &["sh", "-c", SERVER])
        .await
        .unwrap();
    assert_sees(&east.node, &from, &moved.addresses, &from.addresses).await;

    // While BIRD is down, the node keeps its blocks, even blocks whose pods have all ended.
    pods::create_many(api, "beast", "bmore", 0..4, Some(east.node.name())).await;
    pods::running_of(api, "beast", "bmore", 4).await;
    let all = api.blocks_of("beast").await.unwrap();
    assert!(all.len() > 2, "{all:?}");
    let what = "all blocks are announced";
    east.routes(api, what, |it| it.len() == all.len()).await;
    east.daemon.remove(0).kill().await.unwrap();
    pods::delete_many(api, "bmore", 0..4).await;
    api.change_pool("beast", json!({"idleSeconds": 0}))
        .await
        .unwrap();
    let text = condition(api, east.node.name(), "False", "NotAnnounced").await;
    assert!(
        text.contains("cannot connect") && text.contains("docs/bgp.md"),
        "{text}"
    );
    let kept = api
        .subnet_until(east.node.name(), "it still has its blocks", |_| true)
        .await;
    let status = kept.unwrap().status.unwrap_or_default();
    assert!(
        !status.blocks.iter().any(|it| it.released),
        "{:?}",
        status.blocks
    );
    assert_eq!(api.blocks_of("beast").await.unwrap(), all);
    east.start_bird().await;
    condition(api, east.node.name(), "True", "Announced").await;
    let left = eventually("empty blocks are released", async || {
        let left = api.blocks_of("beast").await?;
        Ok((left.len() < all.len()).then_some(left))
    })
    .await;
    // A block is gone from BIRD before it is gone from the API.
    let routes = ["birdc", "-s", "/run/bird.ctl", "show", "route", "protocol"];
    for protocol in ["cadastre4", "cadastre6"] {
        let said = east
            .node
            .run(&[&routes[..], &[protocol]].concat())
            .await
            .unwrap();
        let gone = all.iter().filter(|it| !left.contains(it));
        for block in gone {
            assert!(!said.contains(block.as_str()), "{block} is gone: {said}");
        }
    }
    let what = "only the blocks that are left are announced";
    east.routes(api, what, |it| it.len() < all.len()).await;
}

pub(crate) async fn frr_k8s_announces_ranges_that_the_controller_lists_and_withdraws_them(
    stage: &Stage,
) {
    let api = &stage.api;
    pool(api, "bk8s", "10.76").await;
    let rack = Rack::start(stage, "bk8s", FRR_K8S, K8S_ROUTER, None).await;
    pods::ready(api, rack.node.name(), true).await;
    let asn = node_system(K8S_ROUTER).to_string();
    let change = json!({"metadata": {"annotations": {ASN_ANNOTATION: asn}}});
    api.change_node(rack.node.name(), change).await.unwrap();
    let what = "the first blocks are announced";
    rack.routes(api, what, |it| it.len() == 2).await;

    // Further blocks are announced, too, and traffic of the router reaches a pod in each of them.
    pods::create_many(api, "bk8s", "bk8s", 0..4, Some(rack.node.name())).await;
    let pods = pods::running_of(api, "bk8s", "bk8s", 4).await;
    let all = api.blocks_of("bk8s").await.unwrap();
    assert!(all.len() > 2, "{all:?}");
    rack.routes(api, "all blocks are announced", |it| it.len() == all.len())
        .await;
    for pod in &pods {
        for address in &pod.addresses {
            let ping = [
                "busybox",
                "ping",
                "-c",
                "1",
                "-W",
                "5",
                &address.to_string(),
            ];
            rack.router.run(&ping).await.unwrap();
        }
    }

    // Blocks that the node releases are withdrawn.
    pods::delete_many(api, "bk8s", 0..4).await;
    let change = json!({"idleSeconds": 0});
    api.change_pool("bk8s", change).await.unwrap();
    let what = "only the blocks that are left are announced";
    rack.routes(api, what, |it| it.len() < all.len()).await;

    // frr-k8s also withdraws everything when the controller deletes the object.
    let change = json!({"metadata": {"annotations": {ASN_ANNOTATION: null}}});
    api.change_node(rack.node.name(), change).await.unwrap();
    let via = Fabric::addresses(rack.node.number());
    eventually("nothing is announced", async || {
        let mut found = String::new();
        for (family, via) in [("-4", &via[0]), ("-6", &via[1])] {
            let show = ["ip", family, "route", "show", "proto", "bird", "via", via];
            found += &rack.router.run(&show).await?;
        }
        Ok(found.is_empty().then_some(()))
    })
    .await;
}

/// Installs the CRDs and the namespace of frr-k8s.
pub(crate) async fn install_frr_k8s(cluster: &ControlPlane) -> Result<()> {
    cluster.kubectl(&["create", "namespace", NAMESPACE]).await?;
    let [settings, states] = assets::frr_state_crds()?;
    for file in [assets::frr_crd()?, settings, states] {
        let file = file.to_str().context("the path is no text")?;
        cluster.kubectl(&["apply", "-f", file]).await?;
    }
    Ok(())
}

/// Returns the controller's flags with which only nodes of the group `bk8s` have neighbors.
pub(crate) fn frr_flags() -> Vec<String> {
    let mut flags = vec!["--frr-namespace".to_owned(), NAMESPACE.to_owned()];
    for address in Fabric::addresses(K8S_ROUTER) {
        let neighbor = json!({
            "address": address,
            "asn": system(K8S_ROUTER),
            "nodeLabels": {"group": "bk8s"},
        });
        flags.extend(["--frr-neighbor".to_owned(), neighbor.to_string()]);
    }
    flags
}

/// Creates a pool with small blocks of both families, so that nodes soon need further blocks.
async fn pool(api: &Fixtures, name: &str, net: &str) {
    let v6 = format!("fd00:{}::", net.replace('.', ":"));
    let spec = json!({
        "ipv4": {"cidrs": [format!("{net}.0.0/20")], "blockSize": 30},
        "ipv6": {"cidrs": [format!("{v6}/64")], "blockSize": 126},
        "warm": {"low": 1, "high": 2},
        "idleSeconds": 3600,
        "cooldownSeconds": 0,
    });
    api.block_pool(name, spec).await.unwrap();
}

/// Creates a claim, and a pool of the same name whose addresses nodes of both racks assign on request only.
async fn claim(api: &Fixtures, name: &str) {
    let racks = json!([{"key": "group", "operator": "In", "values": ["beast", "bwest"]}]);
    let spec = json!({
        "ipv4": {"cidrs": ["10.75.0.0/20"], "blockSize": 26},
        "ipv6": {"cidrs": ["fd00:10:75::/64"], "blockSize": 122},
        "nodeSelector": {"matchExpressions": racks},
        "assignment": "Manual",
        "firstBlock": "OnDemand",
    });
    api.block_pool(name, spec).await.unwrap();
    let claim = json!({"metadata": {"name": name}, "spec": {"pool": name}});
    let claim: IPClaim = serde_json::from_value(claim).unwrap();
    let claims: Api<IPClaim> = Api::namespaced(api.client.clone(), "default");
    claims.create(&PostParams::default(), &claim).await.unwrap();
}

/// Creates a pod on the rack's node, with this claim if it is given. Returns the pod when it runs.
async fn pod(api: &Fixtures, rack: &Rack, group: &str, claim: Option<&str>) -> Running {
    let name = match claim {
        Some(claim) => format!("{group}-{claim}"),
        None => format!("{group}-first"),
    };
    let annotations = claim.map(|it| json!({CLAIM_ANNOTATION: it}));
    pods::create_with(api, group, &name, Some(rack.node.name()), annotations).await;
    pods::running_of(api, group, &name, 1).await.remove(0)
}

/// Waits until the condition RangesAnnounced has this status and reason. Returns its message.
async fn condition(api: &Fixtures, node: &str, status: &str, reason: &str) -> String {
    let of = |it: &cadastre_api::NodeSubnet| {
        let mut conditions = it.status.iter().flat_map(|it| &it.conditions);
        conditions.find(|it| it.type_ == RANGES_ANNOUNCED).cloned()
    };
    let what = format!("RangesAnnounced is {status}, {reason}");
    let is = |it: &_| of(it).is_some_and(|it| it.status == status && it.reason == reason);
    let subnet = api.subnet_until(node, &what, is).await.unwrap();
    of(&subnet).unwrap().message
}

/// Removes the length of a single address's prefix, because `ip` does not print it.
fn without_length(cidr: &str) -> String {
    let address = cidr.trim_end_matches("/32");
    address.trim_end_matches("/128").to_owned()
}
