//! Tests of the address of a virtual machine that migrates, with an owner and a standby.

use super::*;
use crate::allocations::blocks::BlockEntry;
use crate::cluster::objects::{BlockReport, BlockSpec, VirtualMachine};
use crate::fixtures::block_report;
use cadastre_api::AllocatedBlock;

/// Returns a pod of a virtual machine on this node. `ready` says whether KubeVirt has marked the pod as a ready target
/// of the migration.
fn pod_of(vmi: &str, name: &str, node: &str, ready: bool) -> Pod {
    let mut pod = claiming_pod(name, CLAIM, Some(node));
    if let Some(claim) = &mut pod.claim {
        claim.machine = Some(Box::new(VirtualMachine {
            vmi: vmi.into(),
            is_migrated_to: ready,
        }));
    }
    pod
}

/// Returns the fixture in which node `a` has the address for the pod `source` of machine `v`.
fn running() -> Fixture {
    let mut fixture = Fixture::of(claim(CLAIM, "p", &[]));
    fixture.applied(pod_of("v", "source", "a", false));
    fixture.settle(CLAIM);
    fixture.store();
    fixture.allocations.confirm(&cidr(ADDRESS));
    fixture
}

/// Returns the fixture in which node `a` has the address, and node `b` is a standby for the pod `target`.
fn migrating() -> Fixture {
    let mut fixture = running();
    fixture.applied(pod_of("v", "target", "b", false));
    fixture.settle(CLAIM);
    fixture
}

impl Fixture {
    fn entry(&self) -> &BlockEntry {
        self.allocations.blocks.get(&cidr(ADDRESS)).unwrap()
    }

    fn standbys(&self) -> Vec<&str> {
        let standby = self.entry().standby.iter();
        standby.map(|it| &*it.owner.name).collect()
    }

    /// Updates the ledger as after a successful write of the block's object.
    fn store(&mut self) {
        let spec = self.entry().spec();
        let object = Block {
            spec: Ok(spec),
            ..block(ADDRESS, Owner::node(&"a".into(), &"a".into()))
        };
        self.allocations.block_seen(&object, self.now);
    }

    /// Returns the entry of the block in the NodeSubnet of the node.
    fn listed(&self, node: &str) -> Option<AllocatedBlock> {
        let listed = self.allocations.listed_blocks(&node.into(), None);
        listed.into_iter().next()
    }

    /// Updates the cache and the ledger: the node's NodeSubnet lists nothing, and its agent has released the block with
    /// the UID `uid`.
    fn released(&mut self, node: &str, uid: &str) {
        let mut released = subnet(node, &[], 0);
        let before = self.cache.subnets.get(node);
        released.version += before.map_or(0, |it| it.version);
        let report = released.report.as_mut().unwrap();
        report.blocks = [BlockReport {
            uid: uid.into(),
            released: true,
            ..block_report(ADDRESS)
        }]
        .into();
        self.cache.subnets.change(ObjectEvent::Applied(released));
        let (name, now) = (node.into(), self.now);
        self.allocations.released_blocks(&name, &self.cache, now);
        self.claims.queue.add(CLAIM.into());
    }
}

#[test]
fn a_second_node_lists_the_address_once_the_object_names_it() {
    let mut fixture = migrating();
    assert_eq!(
        (fixture.node_of(ADDRESS), fixture.standbys()),
        (Some("a"), vec!["b"])
    );
    assert_eq!(fixture.listed("b"), None, "the object does not name it yet");
    fixture.store();
    let (a, b) = (fixture.listed("a").unwrap(), fixture.listed("b").unwrap());
    assert_eq!((a.standby, a.uid.as_str()), (false, ADDRESS));
    assert_eq!((b.standby, b.uid), (true, format!("{ADDRESS}+1")));
    assert_eq!(a.vmi_uid.as_deref(), Some("v"));
    assert_eq!(b.vmi_uid, a.vmi_uid);
}

#[test]
fn a_pod_of_another_virtual_machine_makes_no_node_a_standby() {
    let mut fixture = running();
    fixture.applied(pod_of("w", "other", "b", true));
    fixture.applied(claiming_pod("plain", CLAIM, Some("b")));
    fixture.settle(CLAIM);
    assert!(fixture.standbys().is_empty());
    assert_eq!(fixture.node_of(ADDRESS), Some("a"));
}

#[test]
fn the_node_where_the_machine_runs_becomes_the_owner_and_can_lose_it_again() {
    let mut fixture = migrating();
    fixture.store();
    fixture.applied(pod_of("v", "target", "b", true));
    fixture.settle(CLAIM);
    assert_eq!(
        (fixture.node_of(ADDRESS), fixture.standbys()),
        (Some("b"), vec!["a"])
    );
    assert_eq!(
        fixture.entry().number,
        1,
        "the agent of b knows the block by its number"
    );
    assert!(!fixture.listed("b").unwrap().standby && fixture.listed("a").unwrap().standby);
    let (_, reason, text) = fixture.settle(CLAIM);
    assert_eq!(reason, "InUse");
    assert!(text.contains("pod target on node b") && text.contains("pod source on node a"));
    fixture.gone(pod_of("v", "target", "b", true));
    fixture.settle(CLAIM);
    assert_eq!(
        (fixture.node_of(ADDRESS), fixture.standbys()),
        (Some("a"), vec!["b"])
    );
    assert_eq!(fixture.listed("b").unwrap().recall, Some(Recall::Drain));
}

#[test]
fn a_standby_leaves_when_its_agent_has_released_the_block_and_can_come_again() {
    let mut fixture = migrating();
    fixture.store();
    fixture.gone(pod_of("v", "target", "b", false));
    fixture.settle(CLAIM);
    assert_eq!(
        fixture.standbys(),
        ["b"],
        "its agent may still have the sandbox"
    );
    fixture.released("b", ADDRESS);
    assert_eq!(fixture.standbys(), ["b"], "that is another number");
    fixture.released("b", &format!("{ADDRESS}+1"));
    assert!(fixture.standbys().is_empty());
    fixture.applied(pod_of("v", "again", "b", false));
    fixture.settle(CLAIM);
    fixture.store();
    assert_eq!(fixture.listed("b").unwrap().uid, format!("{ADDRESS}+2"));
}

#[test]
fn the_block_goes_on_with_the_standby_when_its_owner_has_released_it() {
    let mut fixture = migrating();
    fixture.store();
    fixture.gone(pod_of("v", "source", "a", false));
    fixture.released("a", ADDRESS);
    assert_eq!(
        (fixture.node_of(ADDRESS), fixture.standbys()),
        (Some("b"), vec![])
    );
    assert_ne!(fixture.entry().step, Step::Delete);
}

#[test]
fn a_deleted_owner_becomes_a_quarantined_standby() {
    let mut fixture = migrating();
    fixture.store();
    let gone = node("a");
    let allocations = &mut fixture.allocations;
    let all = allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, at(0));
    assert_eq!(all, [cidr(ADDRESS)]);
    assert_eq!(
        (fixture.node_of(ADDRESS), fixture.standbys()),
        (Some("b"), vec!["a"])
    );
    assert!(fixture.entry().standby[0].owner.quarantined);
    // The block is free only after a quarantine, although the last live node has released the block.
    fixture.gone(pod_of("v", "target", "b", false));
    fixture.released("b", &format!("{ADDRESS}+1"));
    let entry = fixture.entry();
    assert!(entry.owner.quarantined && entry.quarantined_until.is_some());
    assert_eq!(fixture.node_of(ADDRESS), Some("a"));
}

#[test]
fn a_quarantine_counts_for_all_deleted_nodes_that_had_the_block() {
    let mut fixture = migrating();
    fixture.store();
    for (name, second) in [("a", 0), ("b", 7)] {
        let gone = node(name);
        let allocations = &mut fixture.allocations;
        allocations.quarantine_blocks(&gone.name, &gone.uid, &gone.machine, at(second));
    }
    let entry = fixture.entry();
    let until = entry.quarantined_until;
    assert!(entry.owner.quarantined && until > Some(at(7).mono));
    fixture.allocations.owner_left(&cidr(ADDRESS), at(1_000));
    let entry = fixture.entry();
    assert!(entry.owner.quarantined && entry.standby.is_empty());
    assert_eq!(
        entry.quarantined_until, until,
        "it is over for the other node, too"
    );
    fixture.allocations.owner_left(&cidr(ADDRESS), at(1_000));
    assert_eq!(fixture.entry().step, Step::Delete);
}

/// The finalizer of the claim was removed by hand.
#[test]
fn nobody_gets_the_address_of_a_claim_that_is_gone_while_two_nodes_may_have_it() {
    let mut fixture = migrating();
    fixture.store();
    fixture.allocations.drop_claim(&CLAIM.into());
    for (node, uid) in [("a", ADDRESS.to_owned()), ("b", format!("{ADDRESS}+1"))] {
        let listed = fixture.listed(node).unwrap();
        assert_eq!((listed.recall, listed.uid), (Some(Recall::Drain), uid));
    }
}

#[test]
fn the_next_leader_reads_owner_and_standby_from_the_object() {
    let mut fixture = migrating();
    fixture.store();
    let spec = fixture.entry().spec();
    let object = Block {
        spec: Ok(spec.clone()),
        ..block(ADDRESS, Owner::node(&"a".into(), &"a".into()))
    };
    list(&mut fixture.cache.blocks, vec![object]);
    let mut subnets = Vec::new();
    for name in ["a", "b"] {
        let mut listing = subnet(name, &[], 0);
        listing.spec.as_mut().unwrap().blocks = fixture.listed(name).into_iter().collect();
        subnets.push(listing);
    }
    list(&mut fixture.cache.subnets, subnets);
    let next = rebuilt(&fixture.cache);
    let entry = next.blocks.get(&cidr(ADDRESS)).unwrap();
    assert_eq!(
        entry.spec(),
        BlockSpec {
            since: entry.since,
            ..spec
        }
    );
    assert!(entry.confirmed && entry.standby[0].is_stored);
}

#[test]
fn a_listing_by_an_earlier_leader_makes_a_standby() {
    let mut fixture = running();
    let mut listing = subnet("b", &[], 0);
    let listed = AllocatedBlock {
        uid: format!("{ADDRESS}+1"),
        standby: true,
        ..fixture.listed("a").unwrap_or_else(|| panic!("not listed"))
    };
    listing.spec.as_mut().unwrap().blocks = vec![listed];
    fixture.cache.subnets.change(ObjectEvent::Applied(listing));
    let now = fixture.now;
    let restored = fixture
        .allocations
        .listed_blocks_changed(&"b".into(), &fixture.cache, now);
    assert_eq!(restored, [cidr(ADDRESS)]);
    assert_eq!(
        (fixture.node_of(ADDRESS), fixture.standbys()),
        (Some("a"), vec!["b"])
    );
}
