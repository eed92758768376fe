//! What the ValidatingAdmissionPolicies of config/default allow and reject, on a real API server. The requests use
//! tokens like those that kubelets request for pods. Such a token is bound to a pod, and so to the pod's node.
//!
//! Agents and the controller have all RBAC permissions here, so every rejection comes from a policy.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

mod setup;

use cadastre_api::{
    EXHAUSTED_CONDITION, EXHAUSTED_TAINT, IPAMBlock, IPPool, NodeAddresses, NodeAddressesSpec,
    NodeSubnet,
};
use cadastre_e2e::fixtures::block_name;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use setup::{Bound, Lab, refused};

#[tokio::test]
async fn an_agent_writes_the_status_of_its_own_node_and_nothing_else() {
    let lab = Lab::start().await;
    for node in ["n1", "n2"] {
        lab.subnet(node).await;
    }
    lab.block("10.9.0.0/26", "n1").await;
    let bound = lab.client_of("cadastre-agent", Bound::Pod("n1")).await;
    let own: Api<NodeSubnet> = Api::all(bound.clone());
    let status = json!({"status": {"agent": {"version": "test"}}});
    patch_status(&own, "n1", &status).await.unwrap();
    let written = lab.hand.subnets.get("n1").await.unwrap().status.unwrap();
    assert_eq!(written.agent.unwrap().version, "test");

    let error = patch_status(&own, "n2", &status).await;
    refused(
        error,
        "the agent of node n1 may write its own NodeSubnet and NodeAddresses only, not those of n2",
    );
    let only = "an agent may write its node's NodeAddresses, the status of its NodeSubnet, and nothing else";
    let spec = json!({"spec": {"blocks": []}, "metadata": {"annotations": {"a": "b"}}});
    refused(patch(&own, "n1", &spec).await, only);
    let gone = own.delete("n1", &DeleteParams::default()).await;
    refused(gone, only);
    let other = setup::subnet_of("n3");
    refused(own.create(&PostParams::default(), &other).await, only);
    let blocks: Api<IPAMBlock> = Api::all(bound.clone());
    let name = block_name("10.9.0.0/26");
    refused(
        patch(&blocks, &name, &json!({"spec": {"pool": "x"}})).await,
        only,
    );
    refused(blocks.delete(&name, &DeleteParams::default()).await, only);
    let pools: Api<IPPool> = Api::all(bound.clone());
    let pool = setup::pool("mine");
    refused(pools.create(&PostParams::default(), &pool).await, only);

    let lists: Api<NodeAddresses> = Api::all(bound.clone());
    let list_of = |node| NodeAddresses::new(node, NodeAddressesSpec::default());
    let create = PostParams::default();
    lists.create(&create, &list_of("n1")).await.unwrap();
    let change = json!({"spec": {"bootID": "b"}});
    patch(&lists, "n1", &change).await.unwrap();
    let foreign = "its own NodeSubnet and NodeAddresses only, not those of n2";
    refused(lists.create(&create, &list_of("n2")).await, foreign);
    refused(lists.delete("n1", &DeleteParams::default()).await, only);
    let by_hand = patch(&lab.hand.addresses, "n1", &change).await;
    assert!(by_hand.is_ok(), "nothing is changed");
    let change = json!({"spec": {"bootID": "other"}});
    refused(
        patch(&lab.hand.addresses, "n1", &change).await,
        "the agent of its node alone writes the spec of NodeAddresses n1",
    );
    refused(
        lab.hand.addresses.create(&create, &list_of("n3")).await,
        "the agent of its node alone makes NodeAddresses n3",
    );
    let params = DeleteParams::default();
    lab.hand.addresses.delete("n1", &params).await.unwrap();

    let unbound = lab.client_of("cadastre-agent", Bound::Nothing).await;
    let error = patch_status(&Api::all(unbound), "n1", &status).await;
    refused(error, "this token names no node");
    // A token of another account does not count as the agent's, even if it is bound to the same node.
    let other = lab.client_of("default", Bound::Pod("n1")).await;
    let error = patch_status(&Api::all(other), "n1", &status).await;
    refused(
        error,
        "Cadastre alone writes the status of NodeSubnet n1: change the IPPool instead",
    );
}

#[tokio::test]
async fn records_are_the_controllers_and_annotations_everybodys_whom_rbac_lets() {
    let lab = Lab::start().await;
    lab.subnet("n1").await;
    lab.block("10.9.0.0/26", "n1").await;
    let name = block_name("10.9.0.0/26");
    // The policies apply to the administrator, too.
    let hand = &lab.hand;
    let error = patch(&hand.subnets, "n1", &json!({"spec": {"nodeUID": "other"}})).await;
    refused(
        error,
        "the controller of Cadastre alone writes the spec of NodeSubnet n1",
    );
    let error = hand.subnets.delete("n1", &DeleteParams::default()).await;
    refused(
        error,
        "the controller of Cadastre alone deletes NodeSubnet n1",
    );
    let made = setup::subnet_of("n2");
    let error = hand.subnets.create(&PostParams::default(), &made).await;
    refused(
        error,
        "the controller of Cadastre alone makes NodeSubnet n2: change the IPPool instead",
    );
    let error = hand.blocks.delete(&name, &DeleteParams::default()).await;
    refused(error, &format!("alone deletes IPAMBlock {name}"));
    let error = patch(
        &hand.blocks,
        &name,
        &json!({"spec": {"owner": {"name": "n2"}}}),
    )
    .await;
    refused(error, &format!("alone writes the spec of IPAMBlock {name}"));

    let ask = json!({"metadata": {"annotations": {
        "cadastre.dev/release": "10.9.0.1=uid", "cadastre.dev/drain": "10.9.0.0/26",
    }}});
    patch(&hand.subnets, "n1", &ask).await.unwrap();
    let annotations = hand.subnets.get("n1").await.unwrap().metadata.annotations;
    assert_eq!(annotations.unwrap()["cadastre.dev/drain"], "10.9.0.0/26");

    // The message of the policy tells administrators to delete the policy's binding before they repair objects by hand.
    let unbind = "delete validatingadmissionpolicybinding cadastre-records";
    lab.cluster.kubectl_line(unbind).await.unwrap();
    cadastre_e2e::wait::until("the policy is gone", setup::LIMIT, async || {
        hand.blocks.delete(&name, &DeleteParams::default()).await?;
        Ok(Some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn of_nodes_the_controller_writes_podcidrs_one_annotation_and_its_marks() {
    let lab = Lab::start().await;
    lab.hand.node("any", "n1").await.unwrap();
    let client = lab.client_of("cadastre-controller", Bound::Nothing).await;
    let nodes: Api<Node> = Api::all(client);
    let term = |value: &str| json!({"metadata": {"annotations": {"cadastre.dev/term": value}}});
    patch(&nodes, "n1", &term("1")).await.unwrap();
    let cidrs = json!({"spec": {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24"]}});
    patch(&nodes, "n1", &cidrs).await.unwrap();
    patch(&nodes, "n1", &term("2")).await.unwrap();
    let spec = nodes.get("n1").await.unwrap().spec.unwrap();
    let others = json!(spec.taints.unwrap_or_default());
    let taint = |key: &str| {
        let mut taints = others.as_array().unwrap().clone();
        taints.push(json!({"key": key, "effect": "NoSchedule"}));
        json!({"spec": {"taints": taints}})
    };
    patch(&nodes, "n1", &taint(EXHAUSTED_TAINT)).await.unwrap();
    let without = json!({"spec": {"taints": others}});
    patch(&nodes, "n1", &without).await.unwrap();
    let only = "of a Node the controller may change the podCIDRs, the annotation";
    for change in [
        json!({"metadata": {"labels": {"a": "b"}}}),
        json!({"spec": {"unschedulable": true}}),
        taint("a"),
    ] {
        refused(patch(&nodes, "n1", &change).await, only);
    }
    let status = async |change: Value| {
        let params = PatchParams::default();
        nodes
            .patch_status("n1", &params, &Patch::Strategic(change))
            .await
    };
    let condition =
        |kind: &str| json!({"status": {"conditions": [{"type": kind, "status": "True"}]}});
    status(condition(EXHAUSTED_CONDITION)).await.unwrap();
    let of_status =
        "of a Node's status the controller may change the condition AddressesExhausted alone";
    for change in [
        condition("Ready"),
        json!({"status": {"capacity": {"pods": "1000"}}}),
        json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}),
    ] {
        refused(status(change).await, of_status);
    }
    let without = json!({"type": EXHAUSTED_CONDITION, "$patch": "delete"});
    status(json!({"status": {"conditions": [without]}}))
        .await
        .unwrap();
    let note = json!({"metadata": {"annotations": {"a": "b"}}});
    let of_annotations =
        "of a Node's annotations the controller may change cadastre.dev/term alone";
    refused(patch(&nodes, "n1", &note).await, of_annotations);
    // The controller cannot remove other clients' annotations. Other clients can still write annotations.
    patch(&lab.hand.nodes, "n1", &note).await.unwrap();
    let without = json!({"metadata": {"annotations": {"a": null}}});
    refused(patch(&nodes, "n1", &without).await, of_annotations);
    patch(&nodes, "n1", &term("3")).await.unwrap();
}

#[tokio::test]
async fn a_kubelet_says_no_more_of_its_node_than_a_node_has() {
    let lab = Lab::start().await;
    let kubelet = lab.kubelet().await;
    let nodes: Api<Node> = Api::all(kubelet);
    let node = |spec: Value, status: Value| -> Node {
        let node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"},
            "spec": spec, "status": status,
        });
        serde_json::from_value(node).unwrap()
    };
    let create = PostParams::default();
    let everything = node(
        json!({"podCIDRs": ["0.0.0.0/0"], "podCIDR": "0.0.0.0/0"}),
        json!({}),
    );
    let dealt = "may not write the podCIDRs of its Node";
    refused(nodes.create(&create, &everything).await, dealt);
    nodes
        .create(&create, &node(json!({}), json!({})))
        .await
        .unwrap();
    let change = json!({"spec": {"podCIDRs": ["0.0.0.0/0"], "podCIDR": "0.0.0.0/0"}});
    refused(patch(&nodes, "n1", &change).await, dealt);

    let status = |change: Value| {
        let nodes = nodes.clone();
        async move {
            let params = PatchParams::default();
            nodes
                .patch_status("n1", &params, &Patch::Merge(change))
                .await
        }
    };
    let addresses = |count: u32| {
        let address = |n| json!({"type": "InternalIP", "address": format!("192.0.2.{n}")});
        json!({"status": {"addresses": (1..=count).map(address).collect::<Vec<_>>()}})
    };
    status(addresses(16)).await.unwrap();
    refused(status(addresses(17)).await, "at most 16 addresses");
    let info = |id: String| {
        let text = "machineID bootID systemUUID kernelVersion osImage containerRuntimeVersion kubeletVersion kubeProxyVersion operatingSystem architecture";
        let fields = text.split(' ').map(|key| (key.to_owned(), json!("x")));
        let mut info: serde_json::Map<String, Value> = fields.collect();
        info.insert("machineID".to_owned(), json!(id));
        json!({"status": {"nodeInfo": info}})
    };
    status(info("m".repeat(128))).await.unwrap();
    refused(
        status(info("m".repeat(129))).await,
        "at most 128 characters",
    );
    // After a controller has written podCIDRs, the kubelet's writes still succeed.
    let dealt = json!({"spec": {"podCIDRs": ["10.1.0.0/24"], "podCIDR": "10.1.0.0/24"}});
    patch(&lab.hand.nodes, "n1", &dealt).await.unwrap();
    status(addresses(2)).await.unwrap();
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    patch(&nodes, "n1", &labels).await.unwrap();
}

async fn patch<K>(api: &Api<K>, name: &str, change: &Value) -> kube::Result<K>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let params = PatchParams::default();
    api.patch(name, &params, &Patch::Merge(change)).await
}

async fn patch_status(
    api: &Api<NodeSubnet>,
    name: &str,
    change: &Value,
) -> kube::Result<NodeSubnet> {
    let params = PatchParams::default();
    api.patch_status(name, &params, &Patch::Merge(change)).await
}
