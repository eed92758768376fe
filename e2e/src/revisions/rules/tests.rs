use serde_json::json;

use super::*;

/// Applies the changes in order, and returns the violations of the last change. Earlier changes must break no rule.
fn last(changes: Vec<(&str, &str, Option<Value>)>) -> Vec<String> {
    let mut rules = Rules::default();
    let mut broken = Vec::new();
    for (kind, name, object) in changes {
        assert_eq!(broken, [""; 0]);
        broken = rules.apply(&Change {
            revision: 1,
            key: format!("{kind}{name}"),
            object,
        });
    }
    broken
}

fn node<'a>(name: &'a str, cidrs: &[&str]) -> (&'static str, &'a str, Option<Value>) {
    let node = json!({"metadata": {"uid": format!("{name}-uid")}, "spec": {"podCIDRs": cidrs}});
    (NODES, name, Some(node))
}

fn pod<'a>(name: &'a str, node: &str, address: &str) -> (&'static str, &'a str, Option<Value>) {
    let pod = json!({"spec": {"nodeName": node}, "status": {"podIPs": [{"ip": address}]}});
    (PODS, name, Some(pod))
}

fn block<'a>(
    name: &'a str,
    node: &str,
    cidr: &str,
    parent: Option<&str>,
) -> (&'static str, &'a str, Option<Value>) {
    let block = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "IPAMBlock", "metadata": {"name": name},
        "spec": {
            "cidr": cidr, "pool": "p", "owner": {"kind": "Node", "name": node, "uid": "u"},
            "since": "2026-01-01T00:00:00Z",
            "parent": parent.map(|it| json!({"cidr": it, "node": "other"})),
        },
    });
    (BLOCKS, name, Some(block))
}

fn subnet<'a>(name: &'a str, cidrs: &[&str]) -> (&'static str, &'a str, Option<Value>) {
    let blocks: Vec<Value> = cidrs
        .iter()
        .map(|it| json!({"cidr": it, "pool": "p", "uid": "u"}))
        .collect();
    let subnet = json!({
        "apiVersion": "cadastre.dev/v1alpha1", "kind": "NodeSubnet", "metadata": {"name": name},
        "spec": {"nodeUID": format!("{name}-uid"), "blocks": blocks},
    });
    (SUBNETS, name, Some(subnet))
}

#[test]
fn overlapping_pod_cidrs_of_two_nodes_are_found_and_those_of_a_deleted_node_are_free() {
    let a = || node("a", &["10.0.0.0/24"]);
    let b = || node("b", &["10.0.0.128/25"]);
    assert_eq!(last(vec![a(), b()]).len(), 1);
    assert_eq!(last(vec![a(), a()]).len(), 0);
    assert_eq!(last(vec![a(), (NODES, "a", None), b()]).len(), 0);
}

#[test]
fn one_address_of_two_pods_is_found_unless_a_pod_is_being_deleted() {
    let a = || pod("a", "n", "10.0.0.1");
    let b = || pod("b", "n", "10.0.0.1");
    assert_eq!(last(vec![a(), b()]).len(), 1);
    let mut deleted = a();
    deleted.2.as_mut().unwrap()["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert_eq!(last(vec![a(), deleted, b()]).len(), 0);
    assert_eq!(last(vec![a(), (PODS, "a", None), b()]).len(), 0);
}

#[test]
fn a_pod_whose_node_lives_keeps_its_block() {
    let begin = || {
        vec![
            node("n", &[]),
            block("x", "n", "10.0.0.0/28", None),
            pod("a", "n", "10.0.0.1"),
        ]
    };
    let then = |change| last(begin().into_iter().chain([change]).collect());
    assert_eq!(then((BLOCKS, "x", None)).len(), 1);
    assert_eq!(then(block("x", "m", "10.0.0.0/28", None)).len(), 1);
    assert_eq!(then(block("y", "m", "10.0.0.16/28", None)).len(), 0);
    assert_eq!(then(pod("b", "n", "10.0.0.16")).len(), 1, "not its block");
    let of_pod_cidr = vec![node("n", &["10.1.0.0/24"]), pod("a", "n", "10.1.0.2")];
    assert_eq!(last(of_pod_cidr).len(), 0);
    let gone = begin()
        .into_iter()
        .chain([(NODES, "n", None), (BLOCKS, "x", None)]);
    assert_eq!(last(gone.collect()).len(), 0);
}

#[test]
fn blocks_overlap_only_their_parents() {
    let outer = || block("x", "n", "10.0.0.0/28", None);
    let inner = |parent| block("y", "m", "10.0.0.4/30", parent);
    assert_eq!(last(vec![outer(), inner(None)]).len(), 1);
    assert_eq!(last(vec![outer(), inner(Some("10.0.0.0/28"))]).len(), 0);
    let two = vec![
        outer(),
        inner(Some("10.0.0.0/28")),
        block("z", "k", "10.0.0.4/31", Some("10.0.0.0/28")),
    ];
    assert_eq!(last(two).len(), 1);
}

#[test]
fn a_listed_block_is_listed_once_and_exists() {
    let begin = || {
        vec![
            node("n", &[]),
            block("x", "n", "10.0.0.0/28", None),
            subnet("n", &["10.0.0.0/28"]),
        ]
    };
    let then = |change| last(begin().into_iter().chain([change]).collect());
    assert_eq!(then(subnet("m", &["10.0.0.0/28"])).len(), 1);
    assert_eq!(then((BLOCKS, "x", None)).len(), 1);
    let unlisted = begin()
        .into_iter()
        .chain([subnet("n", &[]), (BLOCKS, "x", None)]);
    assert_eq!(last(unlisted.collect()).len(), 0);
    let gone = begin()
        .into_iter()
        .chain([(NODES, "n", None), (BLOCKS, "x", None)]);
    assert_eq!(last(gone.collect()).len(), 0);
}

#[test]
fn an_object_that_cannot_be_read_is_reported() {
    let broken = last(vec![(BLOCKS, "x", Some(json!({"spec": {}})))]);
    assert!(
        broken[0].contains("ipamblocks/x cannot be parsed"),
        "{broken:?}"
    );
}
