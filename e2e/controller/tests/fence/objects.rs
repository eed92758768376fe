//! Tests of the guards of writes to NodeSubnets and pools. Also tests the list of a deleted node's pods, which the
//! controller reads before the node's ranges become free.

use std::sync::Arc;

use cadastre_api::{AllocatedRange, IPPool, IPPoolStatus, NodeSubnet, NodeSubnetSpec};
use cadastre_controller::cluster::objects;
use cadastre_controller::cluster::request::{
    ApiRequest, KnownObject, ObjectKind, ObjectSpec, Rejection, RequestOutcome,
};
use cadastre_e2e::install;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{assert_guarded, bench};

fn spec(cidr: &str) -> NodeSubnetSpec {
    NodeSubnetSpec {
        node_uid: Some("u".to_owned()),
        pod_cidrs: vec![AllocatedRange {
            cidr: cidr.to_owned(),
            pool: None,
            withheld: false,
        }],
        ..NodeSubnetSpec::default()
    }
}

#[track_caller]
fn subnet(outcome: RequestOutcome) -> objects::Subnet {
    match outcome {
        RequestOutcome::Subnet(subnet) => subnet,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_node_subnet_is_created_once_and_replaced_or_deleted_only_as_it_was_read() {
    let bench = bench().await;
    let name: Arc<str> = "subnet".into();
    let create = |cidr| ApiRequest::Create(name.clone(), ObjectSpec::Subnet(spec(cidr)));
    let replace = |was: &objects::Subnet, cidr| {
        ApiRequest::Replace(KnownObject::of(was), ObjectSpec::Subnet(spec(cidr)))
    };
    let delete =
        |was: &objects::Subnet| ApiRequest::Delete(ObjectKind::Subnet, KnownObject::of(was));

    let first = subnet(bench.send(create("10.1.0.0/24")).await);
    assert_eq!(first.spec, Ok(spec("10.1.0.0/24")));
    assert_guarded(&bench.send(create("10.2.0.0/24")).await);
    let second = subnet(bench.send(replace(&first, "10.3.0.0/24")).await);
    assert!(second.uid == first.uid && second.version > first.version);
    assert_guarded(&bench.send(replace(&first, "10.4.0.0/24")).await);
    assert_guarded(&bench.send(delete(&first)).await);
    let stranger = objects::Subnet {
        uid: "somebody-else".into(),
        ..second.clone()
    };
    assert_guarded(&bench.send(replace(&stranger, "10.5.0.0/24")).await);
    assert_guarded(&bench.send(delete(&stranger)).await);
    let read = subnet(
        bench
            .send(ApiRequest::Read(ObjectKind::Subnet, name.clone()))
            .await,
    );
    assert_eq!(read, second, "what was refused left no trace");

    assert!(matches!(
        bench.send(delete(&second)).await,
        RequestOutcome::Gone
    ));
    for request in [delete(&second), replace(&second, "10.6.0.0/24")] {
        let outcome = bench.send(request).await;
        assert!(
            matches!(
                outcome,
                RequestOutcome::Rejected(Rejection::Missing | Rejection::Guard(_))
            ),
            "{outcome:?}"
        );
    }
    let subnets = Api::<NodeSubnet>::all(bench.client.clone());
    assert!(subnets.get_opt("subnet").await.unwrap().is_none());
}

#[tokio::test]
async fn a_pool_is_written_only_as_it_was_read_and_each_half_leaves_the_other_alone() {
    let bench = bench().await;
    let name: Arc<str> = "pool".into();
    install::pool(
        &bench.client,
        "pool",
        json!({"ipv4": {"cidrs": ["10.64.0.0/16"]}}),
    )
    .await
    .unwrap();
    let pool = |outcome: RequestOutcome| match outcome {
        RequestOutcome::Pool(pool) => pool,
        other => panic!("{other:?}"),
    };
    let finalize = |was: &objects::Pool, finalizers: &[&str]| {
        let finalizers = finalizers.iter().map(ToString::to_string).collect();
        ApiRequest::SetFinalizers(ObjectKind::Pool, KnownObject::of(was), finalizers)
    };
    let report = |was: &objects::Pool, nodes| {
        let status = IPPoolStatus {
            nodes: Some(nodes),
            ..IPPoolStatus::default()
        };
        ApiRequest::SetPoolStatus(KnownObject::of(was), status)
    };

    let first = pool(
        bench
            .send(ApiRequest::Read(ObjectKind::Pool, name.clone()))
            .await,
    );
    let second = pool(bench.send(finalize(&first, &["cadastre.dev/a"])).await);
    assert_eq!(second.finalizers, ["cadastre.dev/a"]);
    let third = pool(bench.send(report(&second, 3)).await);
    assert_eq!(third.status.as_ref().unwrap().nodes, Some(3));
    assert_eq!(
        (&third.spec, &third.finalizers, third.generation),
        (&first.spec, &second.finalizers, first.generation)
    );
    let stranger = objects::Pool {
        uid: "somebody-else".into(),
        ..third.clone()
    };
    for was in [&first, &second] {
        assert_guarded(&bench.send(finalize(was, &[])).await);
        assert_guarded(&bench.send(report(was, 9)).await);
    }
    // The API server ignores the UID in a write of the status. So only a write of the finalizers is tested with a wrong
    // UID. For a write of the status, the resourceVersion suffices as guard, because no two objects have the same
    // resourceVersion.
    assert_guarded(&bench.send(finalize(&stranger, &[])).await);
    let fourth = pool(bench.send(finalize(&third, &[])).await);
    assert_eq!((&fourth.status, &fourth.spec), (&third.status, &first.spec));
    assert!(fourth.finalizers.is_empty());

    let pools = Api::<IPPool>::all(bench.client.clone());
    pools
        .delete("pool", &DeleteParams::default())
        .await
        .unwrap();
    let outcome = bench.send(finalize(&fourth, &[])).await;
    assert!(
        matches!(outcome, RequestOutcome::Rejected(Rejection::Missing)),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn the_last_list_of_a_deleted_node_has_its_pods_and_no_others() {
    let bench = bench().await;
    let pods = Api::<Pod>::namespaced(bench.client.clone(), "default");
    for (name, node, addresses) in [
        (
            "here",
            Some("looked-at"),
            &["10.64.1.5", "fd00:64:0:1::5"][..],
        ),
        ("here-too", Some("looked-at"), &[]),
        ("there", Some("looked-at-2"), &["10.64.2.5"]),
        ("nowhere", None, &[]),
    ] {
        let mut pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        if let Some(node) = node {
            pod["spec"]["nodeName"] = json!(node);
        }
        let pod: Pod = serde_json::from_value(pod).unwrap();
        pods.create(&PostParams::default(), &pod).await.unwrap();
        let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let status = json!({"status": {"podIP": addresses.first(), "podIPs": ips}});
        pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }
    assert_eq!(
        pods.list(&ListParams::default()).await.unwrap().items.len(),
        4
    );
    let list = async |not_older_than| {
        let node = "looked-at".into();
        let request = ApiRequest::ListPodsOf {
            node,
            not_older_than,
        };
        bench.send(request).await
    };
    let names = |found: &[objects::Pod]| {
        let mut names: Vec<String> = found.iter().map(|pod| pod.name.to_string()).collect();
        names.sort();
        names
    };
    let outcome = list(None).await;
    let RequestOutcome::Pods(mut found, Some(shown)) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(names(&found), ["default/here", "default/here-too"]);
    found.sort_by(|a, b| a.name.cmp(&b.name));
    let addresses: Vec<String> = found[0].addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.64.1.5", "fd00:64:0:1::5"]);

    let now = DeleteParams::default().grace_period(0);
    pods.delete("here", &now).await.unwrap();
    let outcome = list(None).await;
    let RequestOutcome::Pods(_, Some(later)) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(later > shown, "{later} after {shown}");
    let outcome = list(Some(later)).await;
    let RequestOutcome::Pods(found, None) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(names(&found), ["default/here-too"]);
    let outcome = list(Some(later + 1_000_000)).await;
    assert!(
        matches!(&outcome, RequestOutcome::Indeterminate(why) if why.contains("resource version")),
        "{outcome:?}"
    );
}
