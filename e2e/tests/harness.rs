//! Tests of the harness itself: control planes restart with their data and leave nothing behind, requests are counted,
//! and the recording of nodes finds duplicates.

#![allow(clippy::unwrap_used)] // allowed in helpers as in tests

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cadastre_e2e::cluster::with_crds;
use cadastre_e2e::control_plane::{ADMIN, ControlPlane, Options};
use cadastre_e2e::daemon::DaemonOptions;
use cadastre_e2e::metrics::{self, Request};
use cadastre_e2e::stand_in::{Recorded, Size, StandIn};
use cadastre_e2e::{Daemon, History, KcmOptions, nodes};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(180);

async fn start() -> ControlPlane {
    ControlPlane::start(Options::default()).await.unwrap()
}

fn pids(cluster: &ControlPlane) -> Vec<u32> {
    vec![
        cluster.etcd().unwrap().pid(),
        cluster.apiserver().unwrap().pid(),
    ]
}

/// Returns whether the process has ended. A zombie, which the init process has not reaped, counts as ended.
fn is_gone(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return true;
    };
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "after {LIMIT:?} still not: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

async fn assign(nodes: &Api<Node>, name: &str, cidrs: &[&str]) -> kube::Result<Node> {
    let patch = json!({"spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs}});
    nodes
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
}

#[tokio::test]
async fn a_killed_api_server_comes_back_with_its_data_and_the_history_goes_on() {
    let mut cluster = start().await;
    let history = History::start(cluster.client().await.unwrap())
        .await
        .unwrap();
    nodes::create(&cluster, 3, nodes::numbered).await.unwrap();
    history.wait_until_live(3, LIMIT).await.unwrap();
    let names = cluster.kubectl_line("get nodes -o name").await.unwrap();
    assert_eq!(names.lines().count(), 3);

    cluster.kill_apiserver().unwrap();
    assert!(nodes::list(&cluster.client().await.unwrap()).await.is_err());
    cluster.start_apiserver().await.unwrap();
    let client = cluster.client().await.unwrap();
    assert_eq!(
        nodes::names(&client).await.unwrap(),
        ["node-00000", "node-00001", "node-00002"]
    );

    let api = Api::<Node>::all(client);
    assign(&api, "node-00000", &["10.244.0.0/24", "fd00:244::/64"])
        .await
        .unwrap();
    history.wait_until_all_assigned(1, LIMIT).await.unwrap();
    history.assert_no_duplicates();
}

#[tokio::test]
async fn the_history_finds_a_duplicate_that_is_gone_again() {
    let cluster = start().await;
    nodes::create(&cluster, 3, nodes::numbered).await.unwrap();
    let client = cluster.client().await.unwrap();
    let history = History::start(client.clone()).await.unwrap();
    let api = Api::<Node>::all(client);
    assign(&api, "node-00000", &["10.244.0.0/24"])
        .await
        .unwrap();
    let second = assign(&api, "node-00001", &["10.244.0.128/25"])
        .await
        .unwrap();
    nodes::delete(&cluster, ["node-00001".to_owned()])
        .await
        .unwrap();
    history.wait_until_live(2, LIMIT).await.unwrap();

    let found = history.duplicates().unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].first.0, "node-00000");
    assert_eq!(found[0].second.1, second.uid().unwrap());
    assert_eq!(history.gaps(), 0);
}

#[tokio::test]
async fn kube_controller_manager_gives_podcidrs_and_the_requests_are_counted() {
    let cluster = start().await;
    let history = History::start(cluster.client().await.unwrap())
        .await
        .unwrap();
    nodes::create(&cluster, 20, nodes::numbered).await.unwrap();
    let options = KcmOptions::node_ipam(&["10.244.0.0/16", "fd00:244::/48"]);
    let mut kcm = cluster.start_kcm(&options).unwrap();
    let assigned = history.wait_until_all_assigned(20, LIMIT).await;
    kcm.check_running().unwrap();
    assigned.unwrap();
    history.assert_no_duplicates();
    assert!(kcm.usage().unwrap().peak_rss > 10 << 20);

    let counts = metrics::requests(&cluster.apiserver_metrics().await.unwrap());
    let count = |verb: &str| {
        let (verb, resource) = (verb.to_owned(), "nodes".to_owned());
        counts
            .get(&Request {
                verb,
                resource,
                subresource: String::new(),
            })
            .copied()
    };
    assert_eq!((count("POST"), count("PATCH")), (Some(20), Some(20)));
    let etcd = cluster.etcd_metrics().await.unwrap();
    assert!(metrics::sum(&etcd, "etcd_mvcc_put_total", &[]) >= 40.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stand_in_serves_a_controller_as_an_api_server_does() {
    let (cluster, hand) = with_crds(Options::default()).await.unwrap();
    hand.create_node(nodes::numbered(0)).await.unwrap();
    hand.pod("one", "node-00000", &[]).await.unwrap();
    let recorded = Recorded::read(&hand.client, "node-00000", "one").await;
    let size = Size {
        nodes: 3,
        pods_a_node: 2,
    };
    let stand_in = StandIn::start(recorded.unwrap(), size).await.unwrap();
    let group = "/apis/cadastre.dev/v1alpha1";
    let spec =
        json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.0.0.0/20"], "blockSize": 26}});
    let pool = json!({"apiVersion": "cadastre.dev/v1alpha1", "kind": "IPPool", "metadata": {"name": "p"}, "spec": spec});
    stand_in.put(&format!("{group}/ippools"), pool);
    let options = DaemonOptions {
        name: "stand-in".to_owned(),
        args: vec!["controller".to_owned()],
        ..DaemonOptions::default()
    };
    let kubeconfig = stand_in.kubeconfig(cluster.folder()).unwrap();
    let mut controller = Daemon::start(cluster.folder(), &kubeconfig, &options).unwrap();
    controller.wait_ready(LIMIT).await.unwrap();
    assert_eq!(stand_in.assigned(), 3);
    stand_in.join(1);
    wait_until("all have NodeSubnets", || {
        stand_in.assigned() == 4 && stand_in.count(&format!("{group}/nodesubnets")) == 4
    });
    let requests = stand_in.take_requests();
    assert!(
        requests.contains("1 LIST nodes,") && requests.contains("1 PATCH nodes,"),
        "{requests}"
    );
    controller.process().stop(LIMIT).await.unwrap();
}

#[tokio::test]
async fn nothing_is_left_after_a_drop() {
    let cluster = start().await;
    let (pids, folder) = (pids(&cluster), cluster.folder().to_owned());
    let kcm = cluster.start_kcm(&KcmOptions::default()).unwrap();
    let kcm_pid = kcm.pid();
    assert!(pids.iter().all(|pid| !is_gone(*pid)) && folder.is_dir());
    drop((kcm, cluster));
    assert!(pids.into_iter().chain([kcm_pid]).all(is_gone));
    assert!(!folder.exists());
}

#[tokio::test]
async fn after_a_failed_test_the_processes_are_gone_and_the_folder_is_kept() {
    let failing = tokio::spawn(async {
        let cluster = start().await;
        let seen = (pids(&cluster), cluster.folder().to_owned());
        std::panic::panic_any(seen);
        #[allow(unreachable_code)]
        drop(cluster);
    });
    let panic = failing.await.unwrap_err().into_panic();
    let (pids, folder) = *panic.downcast::<(Vec<u32>, PathBuf)>().unwrap();
    assert!(pids.into_iter().all(is_gone));
    assert!(folder.join("kube-apiserver.log").is_file());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn nothing_is_left_after_sigkill_of_the_process_that_holds_it() {
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "holder", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let line = lines
        .map_while(Result::ok)
        .find_map(|it| Some(it.split_once("held: ")?.1.to_owned()));
    let line = line.expect("the holder says what it holds");
    let (folder, pids) = line.split_once(' ').unwrap();
    let pids: Vec<u32> = pids.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert!(pids.iter().all(|pid| !is_gone(*pid)) && Path::new(folder).is_dir());

    holder.kill().unwrap();
    holder.wait().unwrap();
    wait_until("the processes are gone", || {
        pids.iter().all(|pid| is_gone(*pid))
    });
    wait_until("the folder is gone", || !Path::new(folder).exists());
}

#[tokio::test]
#[ignore = "holds a cluster until it is killed; started by the test above"]
async fn holder() {
    let cluster = start().await;
    let pids = pids(&cluster);
    println!(
        "\nheld: {} {} {}",
        cluster.folder().display(),
        pids[0],
        pids[1]
    );
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_kubeconfig_is_private_and_names_only_known_users() {
    use std::os::unix::fs::PermissionsExt as _;
    let cluster = start().await;
    let path = cluster.kubeconfig(ADMIN).unwrap();
    assert_eq!(
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert!(
        cluster
            .kubeconfig("nobody")
            .unwrap_err()
            .to_string()
            .contains("Options::users")
    );
    let scheduler = cluster.client_of("system:kube-scheduler").await.unwrap();
    let nodes = Api::<Node>::all(scheduler);
    assert!(nodes.list(&kube::api::ListParams::default()).await.is_ok());
    let denied = nodes
        .create(&kube::api::PostParams::default(), &nodes::numbered(0))
        .await;
    assert!(matches!(denied, Err(kube::Error::Api(status)) if status.is_forbidden()));
}
