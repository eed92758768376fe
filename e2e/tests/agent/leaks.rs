//! Addresses whose DEL never comes. Files take the place of network namespaces.

use std::fs;

use cadastre_node::{Add, OpError};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::{Machine, add, add_of, annotated_pod, eventually, patch, publishes, start};

/// Creates the file of a container's network namespace and returns its path.
fn netns(machine: &Machine, id: &str) -> String {
    let path = machine.path("netns").join(id);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "").unwrap();
    path.display().to_string()
}

/// Returns why the agent considers a container's address a leak candidate, according to its gRPC list. `None` means
/// that the container has no address. An empty text means that the address is no leak candidate.
async fn suspicion(machine: &Machine, id: &str) -> Option<String> {
    let all = machine.list().await.allocations.into_iter();
    let mut of = all.filter(|it| it.attachment.as_ref().unwrap().container_id == id);
    of.next().map(|it| it.leak)
}

async fn gone(machine: &Machine, id: &str) {
    eventually(&format!("{id} is freed"), async || {
        let found = suspicion(machine, id).await;
        anyhow::ensure!(found.is_none(), "{found:?}");
        Ok(Some(()))
    })
    .await;
}

async fn suspected(machine: &Machine, id: &str, reasons: &[&str]) {
    eventually(&format!("{id} is suspected"), async || {
        let leak = suspicion(machine, id).await.unwrap_or_default();
        anyhow::ensure!(reasons.contains(&leak.as_str()), "{leak:?}");
        Ok(Some(()))
    })
    .await;
}

#[tokio::test]
async fn an_address_is_freed_only_when_both_its_pod_and_its_sandbox_are_gone() {
    let flags = ["--leak-grace", "1"];
    let (api, machine) = start("leak", "10.50.0.0/24", json!({}), &flags).await;
    let mut pods = Vec::new();
    for name in ["leak-both", "leak-pod", "leak-sandbox"] {
        let pod = api.pod(name, "leak-1", &[]).await.unwrap();
        let add = Add {
            netns: netns(&machine, name),
            ..add_of(&pod, name)
        };
        machine.add_with(add).await.unwrap();
        pods.push(pod);
    }
    api.delete_pod("leak-both").await.unwrap();
    api.delete_pod("leak-pod").await.unwrap();
    fs::remove_file(machine.path("netns/leak-sandbox")).unwrap();
    suspected(&machine, "leak-pod", &["podGone", "leakCandidate"]).await;
    suspected(&machine, "leak-both", &["podGone", "leakCandidate"]).await;
    // The controller now lists two addresses as leak candidates. The agent must free neither of them while its network
    // namespace exists.
    api.subnet_until("leak-1", "names two suspects", |it| {
        it.spec.leak_candidates.len() == 2
    })
    .await
    .unwrap();
    suspected(&machine, "leak-pod", &["leakCandidate"]).await;
    fs::remove_file(machine.path("netns/leak-both")).unwrap();
    gone(&machine, "leak-both").await;
    let held: Vec<String> = machine.in_use().await.into_iter().map(|it| it.0).collect();
    assert_eq!(held, ["leak-pod", "leak-sandbox"]);
    assert_eq!(suspicion(&machine, "leak-sandbox").await.unwrap(), "");
    let name = "cadastre_agent_leaks_freed_total";
    assert!((machine.metric(name, &[]).await - 1.0).abs() < 0.1);
    // A pod that has finished counts as gone, so the agent frees the pod's address.
    let patch = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    let params = PatchParams::default();
    api.pods
        .patch_status("leak-sandbox", &params, &patch)
        .await
        .unwrap();
    gone(&machine, "leak-sandbox").await;
    fs::remove_file(machine.path("netns/leak-pod")).unwrap();
    gone(&machine, "leak-pod").await;
    publishes(&api, "leak-1", Vec::new()).await;
    assert_eq!(pods.len(), 3);
}

#[tokio::test]
async fn what_is_no_pod_s_is_freed_by_its_namespace_alone() {
    let flags = ["--leak-grace", "1"];
    let (_, machine) = start("nopod", "10.51.0.0/24", json!({}), &flags).await;
    for id in ["stays", "goes"] {
        let add = Add {
            netns: netns(&machine, id),
            ..add(id)
        };
        machine.add_with(add).await.unwrap();
    }
    machine.add("unknown").await.unwrap();
    fs::remove_file(machine.path("netns/goes")).unwrap();
    // While the agent looks for leaks, the node also has ADDs and DELs of another container. They must not delay or
    // prevent the release of the leaked address.
    eventually("it is freed", async || {
        machine.add("other").await?;
        machine.del("other").await;
        Ok(suspicion(&machine, "goes").await.is_none().then_some(()))
    })
    .await;
    let held: Vec<String> = machine.in_use().await.into_iter().map(|it| it.0).collect();
    assert_eq!(held, ["stays", "unknown"]);
    let reason = [("reason", "noNetns")];
    let name = "cadastre_agent_leaks_freed_total";
    assert!((machine.metric(name, &reason).await - 1.0).abs() < 0.1);
}

#[tokio::test]
async fn a_static_pod_s_address_lives_by_its_mirror() {
    let flags = ["--leak-grace", "0.2"];
    let (api, machine) = start("mirror", "10.52.0.0/24", json!({}), &flags).await;
    let mirror = json!({"kubernetes.io/config.mirror": "static-uid"});
    let pod = annotated_pod(&api, "default", "mirror-pod", "mirror-1", mirror).await;
    let mut of_static = add_of(&pod, "static");
    of_static.pod.as_mut().unwrap().uid = "static-uid".to_owned();
    of_static.netns = netns(&machine, "static");
    machine.add_with(of_static).await.unwrap();
    let gone_pod = api.pod("mirror-gone", "mirror-1", &[]).await.unwrap();
    let leaked = Add {
        netns: netns(&machine, "leaked"),
        ..add_of(&gone_pod, "leaked")
    };
    machine.add_with(leaked).await.unwrap();
    assert!(gone_pod.uid().is_some());
    api.delete_pod("mirror-gone").await.unwrap();
    for id in ["leaked", "static"] {
        fs::remove_file(machine.path("netns").join(id)).unwrap();
    }
    gone(&machine, "leaked").await;
    assert_eq!(suspicion(&machine, "static").await.unwrap(), "");
}

/// Adds a sandbox of a pod and removes its network namespace. A runtime leaves this state behind if a later plugin of
/// the chain fails in both the ADD and the DEL. Returns the address.
async fn failed_sandbox(machine: &Machine, pod: &Pod, id: &str) -> Result<String, OpError> {
    let add = Add {
        netns: netns(machine, id),
        ..add_of(pod, id)
    };
    let address = machine.add_with(add).await;
    fs::remove_file(machine.path("netns").join(id)).unwrap();
    address
}

#[tokio::test]
async fn a_pod_whose_sandboxes_fail_one_after_the_other_keeps_the_address_of_the_last_one_only() {
    // The grace period is only for pods that are gone. The pod here lives, so even a long grace period delays nothing.
    let flags = ["--leak-grace", "3600"];
    let terms = json!({"cooldownSeconds": 1});
    let (api, mut machine) = start("failing", "10.53.0.0/28", terms, &flags).await;
    let other = api.pod("failing-other", "failing-1", &[]).await.unwrap();
    let stays = Add {
        netns: netns(&machine, "other"),
        ..add_of(&other, "other")
    };
    machine.add_with(stays).await.unwrap();
    let pod = api.pod("failing-pod", "failing-1", &[]).await.unwrap();
    let mut last = String::new();
    // Three times eight sandboxes need more than the pool's 13 addresses, so addresses of earlier sandboxes must be
    // freed.
    for round in 0..3 {
        for n in 0..8 {
            // A released address cools for a second, so ADD is repeated until an address is free.
            last = eventually("an address has cooled", async || {
                let id = format!("c{round}-{n}");
                Ok(failed_sandbox(&machine, &pod, &id).await.ok())
            })
            .await;
        }
        if round == 1 {
            machine.kill();
            machine.start();
            machine.ready().await;
        }
        let newest = format!("c{round}-7");
        eventually("the last one is left", async || {
            let held: Vec<String> = machine.in_use().await.into_iter().map(|it| it.0).collect();
            anyhow::ensure!(held == [newest.as_str(), "other"], "{held:?}");
            Ok(Some(()))
        })
        .await;
    }
    assert_eq!(suspicion(&machine, "c2-7").await.unwrap(), "");
    let reason = [("reason", "superseded")];
    let name = "cadastre_agent_leaks_freed_total";
    assert!(machine.metric(name, &reason).await > 6.5);
    let held = machine.in_use().await;
    assert_eq!(held[0].1, last);
    let all = held.into_iter().map(|it| it.1).collect();
    publishes(&api, "failing-1", all).await;
}

#[tokio::test]
async fn people_s_word_frees_what_the_node_cannot_judge_and_nothing_that_it_sees() {
    let (api, machine) = start("word", "10.54.0.0/24", json!({}), &[]).await;
    let unknown = machine.add("unknown").await.unwrap();
    let other = machine.add("other").await.unwrap();
    let seen = Add {
        netns: netns(&machine, "seen"),
        ..add("seen")
    };
    let seen = machine.add_with(seen).await.unwrap();
    let pod = api.pod("word-pod", "word-1", &[]).await.unwrap();
    let of_pod = machine.add_with(add_of(&pod, "of-pod")).await.unwrap();
    let said = [
        format!("{unknown}=container:net/unknown"),
        // The annotation names an earlier container, but another container has the address now. So the agent must not
        // release it.
        format!("{other}=container:net/before"),
        format!("{seen}=container:net/seen"),
        format!("{of_pod}=container:net/of-pod"),
    ];
    let annotations = json!({"cadastre.dev/release": said.join(",")});
    let annotated = json!({"metadata": {"annotations": annotations}});
    patch(&api.subnets, "word-1", annotated).await;
    gone(&machine, "unknown").await;
    let held: Vec<String> = machine.in_use().await.into_iter().map(|it| it.0).collect();
    assert_eq!(held, ["of-pod", "other", "seen"]);
    // The pod is gone from the API. The agent cannot check the pod's sandbox, because the sandbox's network namespace
    // is unknown. So the annotation is enough to release the address.
    api.delete_pod("word-pod").await.unwrap();
    gone(&machine, "of-pod").await;
    let held: Vec<String> = machine.in_use().await.into_iter().map(|it| it.0).collect();
    assert_eq!(held, ["other", "seen"]);
}
