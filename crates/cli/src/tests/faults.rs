//! Tests of what `check` finds, and of what `release` and `drain` allow.

use std::collections::BTreeSet;

use serde_json::json;

use super::{Cluster, SINCE, addr, assert_contains, cidr, time};
use crate::check::{CheckReport, LEAKED, Severity};
use crate::release::intersection;
use crate::{drain, release};
use cadastre_api::MIRROR_ANNOTATION;

/// The beginning of the list entry for the address of pod shop/cart.
const CART: &str = "10.0.0.1 cbr0/0123456789-shop/cart eth0";

/// Returns a small cluster whose pod is gone although its address is still assigned.
fn leaked() -> Cluster {
    let mut cluster = Cluster::new();
    cluster.lists.pods.clear();
    cluster.orphan("a", "10.0.0.1", "pod-shop/cart");
    cluster
}

#[test]
fn a_cluster_that_is_well_has_no_findings() {
    assert_eq!(Cluster::new().codes(), Vec::<String>::new());
}

/// A description of a fault, a function that causes the fault, and the code and object of the expected finding.
type Fault = (&'static str, fn(&mut Cluster), &'static str);

#[test]
fn each_fault_is_found_by_its_code() {
    let faults: [Fault; 14] = [
        (
            "two pods report one address",
            |it| it.pod("shop/twin", "b", &["10.0.0.1"]),
            "DuplicateAddress address 10.0.0.1",
        ),
        (
            "two agents hold one address",
            |it| {
                it.lists.subnets.pop();
                let blocks = ["10.0.0.0/28", "10.0.0.16/28"];
                it.subnet("b", &blocks, &[("10.0.0.1", "shop/other")]);
            },
            "DuplicateAddress address 10.0.0.1",
        ),
        (
            "a pod is gone",
            |it| *it = leaked(),
            "LeakedAddress address 10.0.0.1",
        ),
        (
            "two blocks overlap",
            |it| {
                it.block("10.0.0.0/27", "p", "b");
            },
            "OverlappingRanges range 10.0.0.0/28",
        ),
        (
            "two podCIDRs overlap",
            |it| {
                it.node("c", &["10.9.0.0/24"]);
                it.node("d", &["10.9.0.0/25"]);
            },
            "OverlappingRanges range 10.9.0.0/25",
        ),
        (
            "the owner is gone",
            |it| {
                it.lists.nodes.pop();
            },
            "OwnerlessBlock block 10.0.0.16/28",
        ),
        (
            "a block is not listed",
            |it| it.block("10.0.0.48/28", "p", "a"),
            "BlockNotListed block 10.0.0.48/28",
        ),
        (
            "a listed block has no object",
            |it| {
                it.lists.blocks.pop();
            },
            "ListedWithoutObject block 10.0.0.16/28",
        ),
        (
            "a NodeSubnet is of an earlier node",
            |it| {
                it.lists.nodes[1].metadata.uid = Some("new".to_owned());
            },
            "StaleNodeSubnet nodesubnet b",
        ),
        (
            "somebody else wrote a podCIDR",
            |it| {
                let spec =
                    json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.8.0.0/16"]}});
                it.pool("n", &spec);
                it.node("c", &["172.16.0.0/24"]);
            },
            "ForeignPodCIDR node c",
        ),
        (
            "a kubelet gave its node everything",
            |it| it.node("c", &["0.0.0.0/0"]),
            "PodCIDRTooWide node c",
        ),
        (
            "a kubelet says that a static pod has another node's address",
            |it| {
                it.pod("shop/image", "b", &["10.0.0.1"]);
                let mirror = [(MIRROR_ANNOTATION.to_owned(), "hash".to_owned())];
                it.last_pod().metadata.annotations = Some(mirror.into());
            },
            "ForeignAddress address 10.0.0.1",
        ),
        (
            "a pool is full",
            |it| {
                it.lists.pools[0].spec["ipv4"]["cidrs"] = json!(["10.0.0.0/27"]);
            },
            "PoolFull pool p",
        ),
        (
            "a quarantine does not end",
            |it| it.quarantined("10.0.0.32/28", "p", "dead", "2026-11-21T11:00:00Z"),
            "QuarantineOver block 10.0.0.32/28",
        ),
    ];
    for (what, plant, finding) in faults {
        let mut cluster = Cluster::new();
        plant(&mut cluster);
        let codes = cluster.codes();
        assert!(codes.iter().any(|it| it == finding), "{what}: {codes:?}");
    }
}

#[test]
fn only_findings_of_both_passes_are_reported() {
    let with = leaked().check();
    let without = Cluster::new().check();
    assert!(with.is_bad());
    assert!(!with.clone().confirmed_by(&without).is_bad());
    assert!(with.clone().confirmed_by(&with).is_bad());
    let again: CheckReport = serde_json::from_str(&serde_json::to_string(&with).unwrap()).unwrap();
    assert_eq!(again.findings, with.findings);
    assert_eq!(with.findings[0].code, LEAKED);
    assert_eq!(with.findings[0].severity, Severity::Warning);
}

/// Returns what `release` decides about the address of pod shop/cart.
fn judge(cluster: &Cluster, force: bool) -> Result<release::Target, release::Released> {
    release::judge(addr("10.0.0.1"), None, force, &cluster.inventory())
}

#[track_caller]
fn assert_refused(cluster: &Cluster, force: bool, parts: &[&str]) {
    assert_contains(&judge(cluster, force).unwrap_err().why, parts);
}

#[test]
fn only_leaked_addresses_are_released() {
    let mut cluster = Cluster::new();
    assert_refused(&cluster, true, &["lives on a"]);
    let unused = release::judge(addr("10.0.0.2"), None, true, &cluster.inventory());
    assert_contains(&unused.unwrap_err().why, &["no node lists it as in use"]);
    let leak = leaked().check().findings[0].leak.clone().unwrap();
    cluster.lists.pods[0].status.as_mut().unwrap().phase = Some("Failed".to_owned());
    let target = judge(&cluster, false).unwrap();
    assert_eq!((&*target.node, &*target.uid), ("a", "pod-shop/cart"));
    // Another pod reports the address by now, so the address is refused even with --force.
    cluster.pod("shop/new", "b", &["10.0.0.1"]);
    assert_refused(&cluster, true, &["shop/new reports it"]);
    cluster.lists.pods.pop();
    cluster.listed(&format!("{CART} another shop/cart {SINCE}"));
    let other = release::judge(addr("10.0.0.1"), Some(&leak), true, &cluster.inventory());
    assert_contains(&other.unwrap_err().why, &["not what the report says"]);
    // An address that was assigned just now, or that belongs to no pod, is released only with --force.
    cluster.listed(&format!("{CART} another shop/cart 2026-11-21T11:59:30Z"));
    assert_refused(&cluster, false, &["--force"]);
    assert!(judge(&cluster, true).is_ok());
    cluster.listed(&format!("{CART} - shop/cart {SINCE}"));
    let checks = [
        "no pod",
        "container 0123456789-shop/cart",
        "10.0.0.1 (ping",
        "--force",
    ];
    assert_refused(&cluster, false, &checks);
    let target = judge(&cluster, true).unwrap();
    let handle = "cbr0/0123456789-shop/cart";
    assert_eq!(target.container_gone.as_deref(), Some(handle));
    let request = |cluster: &Cluster| {
        let subnet = &cluster.inventory().subnets["a"];
        release::wanted(subnet, std::slice::from_ref(&target)).release_text()
    };
    let text = "10.0.0.1=container:cbr0/0123456789-shop/cart";
    assert_eq!(request(&cluster).as_deref(), Some(text));
    // Another container has the address by now, so the request for the earlier container is not written.
    cluster.listed(&format!("10.0.0.1 cbr0/other eth0 - shop/cart {SINCE}"));
    assert_eq!(request(&cluster), None);
}

#[test]
fn an_address_of_an_earlier_sandbox_of_a_living_pod_needs_no_request() {
    let mut cluster = Cluster::new();
    cluster.lists.pods[0].status.as_mut().unwrap().pod_ips = None;
    assert!(cluster.codes().is_empty());
    cluster.listed(&format!(
        "{CART} pod-shop/cart shop/cart {SINCE} superseded"
    ));
    assert_eq!(cluster.codes(), ["SupersededAddress address 10.0.0.1"]);
    assert!(judge(&cluster, false).unwrap().superseded);
    // The pod is gone, so its address is an ordinary leak and no longer superseded.
    cluster.lists.pods.clear();
    let codes = cluster.codes();
    assert!(codes.is_empty(), "the list may be older than its DEL");
    cluster.orphan("a", "10.0.0.1", "pod-shop/cart");
    assert_eq!(cluster.codes(), ["LeakedAddress address 10.0.0.1"]);
    assert!(!judge(&cluster, false).unwrap().superseded);
}

#[test]
fn a_list_that_is_minutes_old_is_no_fault() {
    // The agent's list is minutes old. A younger pod may be missing in the list. An older pod may be missing, too, if
    // the agent's counts differ from the list, because the counts are newer.
    let mut cluster = Cluster::new();
    cluster.pod("shop/young", "a", &["10.0.0.2"]);
    cluster.last_pod().metadata.creation_timestamp = time("2026-11-21T11:59:00Z");
    assert!(cluster.codes().is_empty(), "{:?}", cluster.codes());
    cluster.lists.pods.pop();
    cluster.pod("shop/old", "a", &["10.0.0.2"]);
    assert_eq!(cluster.codes(), ["NotRecorded address 10.0.0.2"]);
    cluster.lists.subnets[0].status["blocks"][0]["used"] = json!(2);
    assert!(cluster.codes().is_empty(), "the counts are newer");
    // The list of node a still has the address, but the block has since been allocated to node b. So there is no
    // finding.
    let mut cluster = Cluster::new();
    cluster.lists.subnets[0].status["blocks"] = json!([]);
    cluster.lists.subnets[0].spec["blocks"] = json!([]);
    cluster.lists.blocks.remove(0);
    cluster.block("10.0.0.0/28", "p", "b");
    cluster.lists.subnets.pop();
    cluster.lists.pods.clear();
    cluster.pod("shop/cart", "b", &["10.0.0.1"]);
    let blocks = ["10.0.0.0/28", "10.0.0.16/28"];
    cluster.subnet("b", &blocks, &[("10.0.0.1", "shop/cart")]);
    assert!(cluster.codes().is_empty(), "{:?}", cluster.codes());
}

#[test]
fn only_leaks_in_all_reports_are_released() {
    let (first, none) = (leaked().check(), Cluster::new().check());
    assert_eq!(intersection(&[first.clone(), first.clone()]).len(), 1);
    assert_eq!(intersection(&[first, none]).len(), 0);
    assert_eq!(intersection(&[]).len(), 0);
}

#[test]
fn requests_that_no_longer_apply_are_removed() {
    let mut cluster = Cluster::new();
    let text = "10.0.0.1=pod-shop/cart,10.0.0.9=gone".to_owned();
    let annotations = [("cadastre.dev/release".to_owned(), text)];
    cluster.lists.subnets[0].metadata.annotations = Some(annotations.into());
    let wanted = release::wanted(&cluster.inventory().subnets["a"], &[]);
    let text = wanted.release_text();
    assert_eq!(text.as_deref(), Some("10.0.0.1=pod-shop/cart"));
    assert_eq!(cluster.codes(), ["OldRequest node a"]);
}

#[test]
fn a_node_keeps_one_empty_block_of_a_pool() {
    let mut cluster = Cluster::new();
    for cidr in ["10.0.0.64/28", "10.0.0.80/28"] {
        cluster.block(cidr, "p", "b");
    }
    cluster.lists.subnets.pop();
    cluster.subnet("b", &["10.0.0.16/28", "10.0.0.64/28", "10.0.0.80/28"], &[]);
    let inventory = cluster.inventory();
    let (none, wanted) = (BTreeSet::new(), ["p".into()].into());
    let surplus = |node: &str, wanted| drain::surplus(&node.into(), &inventory, wanted);
    let all = surplus("node-b", &wanted);
    assert_eq!(all.len(), 3, "pods of another node wait for the pool");
    assert_eq!(surplus("node-a", &wanted), [], "a block in use stays");
    let empty = [cidr("10.0.0.64/28"), cidr("10.0.0.80/28")];
    assert_eq!(surplus("node-b", &none), empty);
    assert_eq!(surplus("node-a", &none), []);
    assert_eq!(drain::judge(empty[0], &inventory).unwrap(), "b");
    let refused = drain::judge(cidr("10.0.0.64/27"), &inventory).unwrap_err();
    assert_contains(&refused.why, &["did you mean 10.0.0.64/28"]);
}

#[test]
fn a_request_ends_the_conflict_that_the_node_reports_and_goes_with_it() {
    let mut cluster = Cluster::new();
    let by = "02:00:00:00:00:07";
    let conflicts = json!([{"address": "10.0.0.2", "pool": "p", "by": by, "sinceMs": 7}]);
    cluster.lists.subnets[0].status["conflicts"] = conflicts;
    let inventory = cluster.inventory();
    let target = release::judge(addr("10.0.0.2"), None, false, &inventory).unwrap();
    assert_eq!((&*target.node, target.conflict), ("a", Some(7)));
    let request = |cluster: &Cluster| {
        let subnet = &cluster.inventory().subnets["a"];
        release::wanted(subnet, std::slice::from_ref(&target)).release_text()
    };
    assert_eq!(request(&cluster).as_deref(), Some("10.0.0.2=conflict:7"));
    cluster.lists.subnets[0].status["conflicts"][0]["sinceMs"] = json!(8);
    assert_eq!(request(&cluster), None, "another conflict");
    let refused = release::judge(addr("10.0.0.1"), None, false, &cluster.inventory());
    assert!(refused.is_err(), "a pod uses it");
}
