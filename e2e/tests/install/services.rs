//! Services in front of pods with addresses of Cadastre: kube-proxy on each node, CoreDNS in a pod, and servers on both
//! nodes. Everything except kube-proxy is in `services.yaml`.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use anyhow::{Context as _, ensure};
use cadastre_e2e::assets::{self, Program};
use cadastre_e2e::node::{API, DNS, Guest, IMAGE};
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use serde_json::json;

use crate::cluster::Cluster;
use crate::eventually;
use crate::say;
use crate::workload::{self, Running};

/// A command that sends a request to the Service `web` by the Service's name. It uses `nc`, because `wget` of Debian's
/// static busybox crashes if it has a time limit.
const GET: &str = r"printf 'GET /cgi-bin/who HTTP/1.0\r\n\r\n' | nc -w 5 web 80";

/// Starts kube-proxy on each machine, before any pod has a network, as installers of clusters do. Each runs until its
/// value is dropped.
pub async fn start_proxies(cluster: &Cluster) -> Vec<Guest> {
    tokio::task::spawn_blocking(|| assets::ensure(&assets::SERVICES))
        .await
        .unwrap()
        .unwrap();
    // The API server publishes no address for the Service `kubernetes`, because it listens on loopback. Without an
    // address, kube-proxy would reject connections to this Service.
    let api = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [API.ip()]}],
        "ports": [{"name": "https", "port": API.port()}],
    });
    kubectl(cluster, "apply", &api.to_string()).await;
    let mut proxies = Vec::new();
    for machine in &cluster.machines {
        proxies.push(machine.start_kube_proxy().await.unwrap());
    }
    proxies
}

/// Asserts that pods of both nodes resolve a Service's name, and reach the servers of both nodes by this name. The
/// servers see the addresses of the pods themselves. `clients` are running pods on both nodes.
pub async fn have_names(cluster: &Cluster, proxies: &mut [Guest], clients: &[Running]) {
    say("a Service's name resolves, and its servers on both nodes are reached");
    let coredns = assets::find(Program::CoreDns).unwrap();
    let manifest = include_str!("services.yaml")
        .replace("IMAGE", IMAGE)
        .replace("DNS_ADDRESS", DNS)
        .replace("COREDNS", &coredns.display().to_string());
    kubectl(cluster, "apply", &manifest).await;
    let nodes = cluster.machines.len();
    let servers = workload::running(&cluster.api, "web", nodes).await;
    let services: Api<Service> = Api::default_namespaced(cluster.api.client.clone());
    let addresses = services.get("web").await.unwrap().spec.unwrap();
    let addresses = addresses.cluster_ips.unwrap();
    assert_eq!(addresses.len(), 2, "IPv4 and IPv6: {addresses:?}");

    for machine in &cluster.machines {
        let client = clients.iter().find(|it| it.node == machine.name()).unwrap();
        let run = async |args: &[&str]| machine.run_in_pod(&client.container, args).await;
        for (kind, address) in ["-type=a", "-type=aaaa"].iter().zip(&addresses) {
            let ask = ["busybox", "nslookup", kind, "web.default.svc.cluster.local"];
            eventually(&format!("{client:?} resolves {address}"), async || {
                let said = run(&ask).await?;
                let found = said.split_whitespace().any(|it| it == address);
                ensure!(found, "{said}");
                Ok(Some(()))
            })
            .await;
        }
        let mut heard = BTreeSet::new();
        eventually(&format!("{client:?} reaches {servers:?}"), async || {
            let said = run(&["sh", "-c", GET]).await?;
            let told = said.lines().last().and_then(|it| it.split_once(' '));
            let (server, seen) = told.context("two words")?;
            // The server listens for both families, so it sees an IPv4 address as `[::ffff:ADDRESS]`.
            let seen = seen.trim_matches(['[', ']']).parse::<Ipv6Addr>()?;
            let seen = seen.to_canonical();
            assert!(client.addresses.contains(&seen), "{server} sees {seen}");
            heard.insert(server.to_owned());
            let all = servers.iter().all(|it| heard.contains(&it.name));
            ensure!(all, "only {heard:?}");
            Ok(Some(()))
        })
        .await;
    }

    for proxy in proxies {
        proxy.check_running().unwrap();
    }
    kubectl(cluster, "delete", &manifest).await;
    // The garbage collector deletes the pods of a DaemonSet, which kubectl does not wait for.
    workload::delete(&cluster.api, "web").await;
}

async fn kubectl(cluster: &Cluster, verb: &str, manifest: &str) {
    let control_plane = cluster.site.cluster();
    let args = [verb, "-f", "-"];
    control_plane.kubectl_stdin(&args, manifest).await.unwrap();
}
