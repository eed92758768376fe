//! Tests of the agent's state machine. The comment of [`super`] numbers the guarantees of the machine. For example, a
//! test `o7_...` tests guarantee 7.

mod announced;
mod bench;
mod published;

use std::collections::BTreeSet;

use serde_json::json;

use super::*;
use crate::attached::SecondNetworks;
use crate::conflicts::tests::conflict;
use crate::cri::Sandbox;
use crate::pods::Pod;
use crate::pods::testing::pod;
use crate::snapshot::testing::record;
use bench::{Bench, asked, blocks, pod_cidrs, target_versions};
use cadastre_api::{AgentInfo, NodeAddressesSpec};
use cadastre_core::Addr;
use cadastre_daemon::watch::ObjectEvent::{Applied, Deleted, Listed, Restarted};
use cadastre_daemon::watch::WatchStep::{self, Change};
use cadastre_node::{BlockState, PodRef, PoolProbes};

const SECOND: Duration = Duration::from_secs(1);
const A: &str = "10.0.0.0/26";
const B: &str = "10.0.0.64/26";

fn lost() -> StoreTrouble {
    StoreTrouble {
        text: "the file is missing".to_owned(),
        is_lost: true,
    }
}

fn sandbox(id: &str, addr: &str) -> Sandbox {
    Sandbox {
        id: id.to_owned(),
        pod: PodRef::default(),
        addresses: vec![Addr::parse_strict(addr).unwrap()],
    }
}

fn recalled(cidrs: &[&str]) -> serde_json::Value {
    let mut spec = blocks(cidrs);
    for block in spec["blocks"].as_array_mut().unwrap() {
        block["recall"] = json!("IfEmpty");
    }
    spec
}

#[test]
fn o1_while_a_question_is_in_flight_nothing_is_published_and_events_are_recorded() {
    for kind in ["look", "hold", "read notes", "note", "sandboxes"] {
        let mut bench = Bench::idle(blocks(&[A]));
        bench.pod("u1");
        bench.subnet(2, pod_cidrs(&["10.9.0.0/24"]));
        bench.pass(60 * SECOND);
        bench.machine.notes.forget();
        bench.answer_namespace();
        bench.run_to(kind);
        bench.published();
        bench.pass(60 * SECOND);
        bench.subnet(3, blocks(&[B]));
        bench.pod("u2");
        bench.on(AgentEvent::Changed);
        let effects = bench.turn();
        assert_eq!(asked(&effects), [""; 0], "during {kind}");
        assert_eq!(bench.published(), [""; 0], "during {kind}");
        let offered = |it: &AgentEffect| matches!(it, AgentEffect::Offer { watched, .. } if watched.pods.by_uid("u2").is_some());
        assert!(effects.iter().any(offered), "during {kind}: {effects:#?}");
    }
}

#[test]
fn o2_no_range_is_written_before_a_look() {
    let mut bench = Bench::seen(blocks(&[A]));
    let effects = bench.run_to("hold");
    assert_eq!(asked(&effects), ["open", "look", "hold"]);
    bench.run();
    // The file is replaced by another one. The machine does not know the new file's content, so it must look at the
    // store again.
    bench.pass(6 * SECOND);
    bench.serving.is_missing = true;
    bench.run_to("look");
    bench.serving.is_missing = false;
    bench.answer(StoreAnswer::Looked(Err(lost())));
    let effects = bench.run_to("hold");
    assert_eq!(asked(&effects), ["open", "look", "hold"]);
}

#[test]
fn a_disk_that_records_no_ranges_is_reported_once_and_leaves_the_node_ready() {
    let mut bench = Bench::seen(blocks(&[A]));
    let reports = |bench: &mut Bench, problem: Option<&str>| {
        bench.serving.unrecorded = problem.map(str::to_owned);
        let effects = bench.run();
        let is = |it: &&AgentEffect| matches!(it, AgentEffect::Emit(note) if note.reason == "RangesNotRecorded");
        effects.iter().filter(is).count()
    };
    assert_eq!(reports(&mut bench, None), 0);
    assert_eq!(reports(&mut bench, Some("no space")), 1);
    bench.pass(60 * SECOND);
    assert_eq!(reports(&mut bench, Some("no space")), 0);
    assert!(matches!(&bench.machine.ready, Some((true, _))));
    assert_eq!(reports(&mut bench, None), 0);
    assert_eq!(reports(&mut bench, Some("no space")), 1);
}

#[test]
fn o3_addresses_in_use_of_a_new_pod_cidr_are_adopted_with_it() {
    let mut bench = Bench::blank();
    bench.show_all(pod_cidrs(&["10.9.0.0/24"]));
    let asked_at = SECOND;
    let restarted = Restarted { asked: asked_at };
    bench.on(AgentEvent::Pod(Change(restarted)));
    bench.sandboxes = Err("no answer".to_owned());
    let effects = bench.run();
    let pods_unknown = asked(&effects);
    assert!(!pods_unknown.contains(&"sandboxes") && !pods_unknown.contains(&"hold"));
    bench.on(AgentEvent::Pod(Change(Listed)));
    let effects = bench.run();
    assert!(asked(&effects).contains(&"sandboxes"), "{effects:#?}");
    assert!(!asked(&effects).contains(&"hold"), "{effects:#?}");
    assert!(bench.machine.store_problem.contains("no answer"));
    bench.sandboxes = Ok(vec![sandbox("c1", "10.9.0.7")]);
    bench.pass(3 * SECOND);
    bench.run_to("hold");
    let Some(StoreQuestion::Transact(Transaction::Hold { holding, known })) = &bench.open else {
        panic!("no hold")
    };
    assert_eq!(holding.blocks.len(), 1);
    let ids: Vec<&str> = known
        .iter()
        .map(|it| it.attachment.container_id.as_str())
        .collect();
    assert_eq!(ids, ["c1"]);
    bench.run();
    bench.subnet(2, pod_cidrs(&["10.9.0.0/24"]));
    let effects = bench.run_to("hold");
    assert_eq!(asked(&effects), ["hold"], "the podCIDR is not new any more");
}

#[test]
fn nothing_is_assigned_from_lost_blocks_while_new_ranges_wait_for_the_runtime() {
    let mut bench = Bench::idle(blocks(&[A]));
    bench.sandboxes = Err("no answer".to_owned());
    bench.subnet(2, pod_cidrs(&["10.9.0.0/24"]));
    let effects = bench.run();
    let order = asked(&effects);
    let place = |kind| order.iter().position(|it| *it == kind);
    assert!(place("restrict") < place("sandboxes"), "{order:?}");
    assert!(
        place("restrict").is_some() && place("hold").is_none(),
        "{order:?}"
    );
}

#[test]
fn o4_the_ranges_that_the_runtime_was_asked_about_are_written() {
    let mut bench = Bench::seen(pod_cidrs(&["10.9.0.0/24"]));
    bench.run_to("sandboxes");
    bench.subnet(2, pod_cidrs(&["10.9.0.0/24", "10.9.1.0/24"]));
    bench.run_to("hold");
    let Some(StoreQuestion::Transact(Transaction::Hold { holding, .. })) = &bench.open else {
        panic!("no hold")
    };
    assert_eq!(
        holding.blocks.len(),
        1,
        "the runtime was not asked about the other"
    );
    let answer = bench.answer_to(bench.open.clone().unwrap());
    let mut effects = bench.answer(answer);
    effects.extend(bench.run());
    effects.extend(bench.run());
    let rest = asked(&effects);
    let place = |kind| rest.iter().position(|it| *it == kind);
    assert!(
        place("sandboxes").unwrap() < place("hold").unwrap(),
        "{rest:?}"
    );
    assert_eq!(bench.snapshot.blocks.len(), 2);
}

#[test]
fn o4_ranges_that_come_during_a_look_are_written_after_it() {
    let mut bench = Bench::idle(blocks(&[A]));
    bench.pass(SECOND);
    bench.on(AgentEvent::Changed);
    bench.run_to("look");
    bench.subnet(2, blocks(&[A, B]));
    assert_eq!(asked(&bench.turn()), [""; 0]);
    // No further event wakes the agent, but the machine continues.
    let effects = bench.run();
    assert_eq!(asked(&effects)[..2], ["hold", "look"]);
}

#[test]
fn o5_after_a_write_of_ranges_a_look_comes_before_anything_is_published() {
    let mut bench = Bench::seen(blocks(&[A]));
    bench.run_to("hold");
    bench.pass(40 * SECOND);
    let answer = bench.answer_to(bench.open.clone().unwrap());
    let effects = bench.answer(answer);
    assert_eq!(asked(&effects), ["look"]);
    assert_eq!(bench.published(), [""; 0]);
    bench.run();
    let published = bench.published();
    assert!(
        published.contains(&"status") && published.contains(&"ready"),
        "{published:?}"
    );
}

#[test]
fn o6_a_block_is_released_after_a_look_by_newer_adds_and_while_the_watch_is_established() {
    let after_recall = || {
        let mut bench = Bench::idle(blocks(&[A, B]));
        bench.subnet(2, recalled(&[A, B]));
        bench.run_to("look");
        bench.published();
        bench
    };
    let wait_for_address = |bench: &mut Bench| {
        bench.serving.pending_adds = [("p".to_owned(), 100)].into();
    };
    let mut bench = after_recall();
    wait_for_address(&mut bench);
    let effects = bench.run();
    assert!(!asked(&effects).contains(&"release"), "an ADD wants it");
    let mut bench = after_recall();
    bench.on(AgentEvent::Subnet(WatchStep::Trouble));
    let effects = bench.run();
    assert!(
        !asked(&effects).contains(&"release"),
        "the recall may be outdated"
    );
    let mut bench = after_recall();
    bench.pass(40 * SECOND);
    bench.run_to("release");
    bench.on(AgentEvent::Subnet(WatchStep::Trouble));
    let answer = bench.answer_to(bench.open.clone().unwrap());
    let effects = bench.answer(answer);
    assert_eq!(asked(&effects), ["look"], "the other block stays");
    assert_eq!(bench.published(), [""; 0], "another look comes first");
    bench.run();
    assert_eq!(bench.snapshot.blocks.len(), 1);
    assert!(bench.published().contains(&"status"));
    let mut bench = after_recall();
    let effects = bench.run();
    let is = asked(&effects);
    assert_eq!(is[..3], ["release", "release", "look"], "{is:?}");
}

/// Returns a spec with a block of the pool `p` and the block of the claim `shop/db`. If `drains` is true, the claim's
/// block is recalled.
fn with_claim(drains: bool) -> serde_json::Value {
    let mut spec = blocks(&[A, "10.0.0.77/32"]);
    spec["blocks"][1]["claim"] = json!("shop/db");
    if drains {
        spec["blocks"][1]["recall"] = json!("Drain");
    }
    spec["pools"][0]["maxBlocksPerNode"] = json!(2);
    spec
}

#[test]
fn a_claim_is_no_pool_to_the_servers() {
    let bench = Bench::idle(with_claim(false));
    let watched = &bench.machine.watched;
    assert_eq!(watched.others, [""; 0]);
    assert_eq!(watched.askable, ["p"]);
    assert_eq!(watched.automatic, BTreeSet::from(["p".to_owned()]));
    assert_eq!(watched.allocating_pools, BTreeSet::from(["p".to_owned()]));
    assert!(watched.at_limit.is_empty(), "it is none of the two blocks");
    let serving = watched.serving.iter().map(|it| it.name.as_str());
    assert_eq!(serving.collect::<Vec<_>>(), ["p"]);
}

#[test]
fn a_claim_s_address_is_released_and_reported_without_a_pause() {
    let mut bench = Bench::idle(with_claim(false));
    bench.snapshot.blocks[1].counts.used = 1;
    bench.pass(200 * SECOND);
    bench.subnet(2, with_claim(true));
    bench.run_to("hold");
    let answer = bench.answer_to(bench.open.clone().unwrap());
    bench.snapshot.blocks[1].counts.used = 1;
    bench.snapshot.blocks[1].state = BlockState::Draining;
    bench.answer(answer);
    let effects = bench.run();
    assert!(!asked(&effects).contains(&"release"), "it is in use");
    bench.on(AgentEvent::Written(crate::publish::WriteOutcome::Failed));
    bench.pass(200 * SECOND);
    bench.run();
    bench.on(AgentEvent::Written(crate::publish::WriteOutcome::Failed));
    // The container is deleted.
    bench.snapshot.blocks[1].counts.used = 0;
    bench.pass(20 * SECOND);
    bench.on(AgentEvent::Changed);
    let effects = bench.run();
    assert_eq!(asked(&effects)[..3], ["look", "release", "look"]);
    assert!(bench.published().contains(&"status"));
}

#[test]
fn o7_a_leak_is_released_after_its_proof_and_one_request_for_proofs_is_under_way() {
    let mut bench = Bench::idle(blocks(&[A]));
    bench.snapshot.attachments = vec![record("c1", "gone", &["10.0.0.9"])];
    let proofs = |effects: &[AgentEffect]| {
        let proofs = effects.iter();
        proofs
            .filter(|it| matches!(it, AgentEffect::Prove(..)))
            .count()
    };
    bench.pass(61 * SECOND);
    let mut effects = bench.run();
    for _ in 0..3 {
        bench.pass(61 * SECOND);
        effects.extend(bench.run());
    }
    assert_eq!(proofs(&effects), 1);
    assert!(!asked(&effects).contains(&"free"), "it is not proven yet");
    let attachment = bench.snapshot.attachments[0].attachment.clone();
    bench.on(AgentEvent::Proven(vec![(attachment, LeakReason::PodGone)]));
    let effects = bench.run();
    assert_eq!(asked(&effects)[..2], ["free", "look"]);
    assert!(bench.machine.reasons.is_empty());
}

#[test]
fn o8_notes_are_read_before_they_are_compared_and_compared_again_after_a_change() {
    let mut bench = Bench::seen(blocks(&[A]));
    bench.pod("u1");
    bench.turn();
    bench.answer_namespace();
    let effects = bench.run_to("note");
    let is = asked(&effects);
    assert_eq!(is[is.len() - 2..], ["read notes", "note"]);
    bench.pod("u2");
    bench.run();
    bench.pass(2 * SECOND);
    let effects = bench.run_to("note");
    assert!(!asked(&effects).contains(&"read notes"));
    let Some(StoreQuestion::Transact(Transaction::Note(notes, gone))) = &bench.open else {
        panic!("no notes")
    };
    assert_eq!((notes[0].pod.uid.as_str(), gone.len()), ("u2", 0));
    assert_eq!(notes.len(), 1, "the other pod has a note");
}

#[test]
fn o9_a_lost_store_is_closed_and_forgotten_before_another_is_opened() {
    let mut bench = Bench::idle(blocks(&[A]));
    let attachment = record("c1", "gone", &["10.0.0.9"]).attachment;
    bench.pass(61 * SECOND);
    bench.run_to("look");
    bench.on(AgentEvent::Proven(vec![(attachment, LeakReason::PodGone)]));
    let effects = bench.answer(StoreAnswer::Looked(Err(lost())));
    assert_eq!(asked(&effects), ["close"]);
    bench.pass(60 * SECOND);
    bench.subnet(2, blocks(&[A, B]));
    assert_eq!(asked(&bench.turn()), [""; 0], "it is being closed");
    assert!(bench.machine.snapshot.is_none());
    assert_eq!(bench.published(), [""; 0]);
    let effects = bench.run();
    let is = asked(&effects);
    assert_eq!(
        is[..3],
        ["open", "look", "hold"],
        "no attachment is released: {is:?}"
    );
}

#[test]
fn o10_a_new_store_is_created_once_all_objects_are_known() {
    let node = |bench: &mut Bench| bench.node();
    let subnet = |bench: &mut Bench| bench.subnet(1, blocks(&[A]));
    let addresses = |bench: &mut Bench| bench.on(AgentEvent::Addresses(Change(Listed)));
    let pods = |bench: &mut Bench| bench.on(AgentEvent::Pod(Change(Listed)));
    let all: [&dyn Fn(&mut Bench); 4] = [&node, &subnet, &addresses, &pods];
    for last in 0..all.len() {
        let mut bench = Bench::blank();
        bench.run_to("open");
        bench.answer(StoreAnswer::Opened(StoreFound::Nothing));
        assert!(matches!(bench.open, Some(StoreQuestion::Close(_))));
        for (at, show) in all.iter().enumerate() {
            if at != last {
                show(&mut bench);
            }
        }
        bench.pass(3 * SECOND);
        let effects = bench.run();
        assert!(!asked(&effects).contains(&"sandboxes"), "without {last}");
        assert!(!asked(&effects).contains(&"make"), "without {last}");
        all[last](&mut bench);
        bench.pass(3 * SECOND);
        let effects = bench.run();
        assert_eq!(asked(&effects)[..3], ["sandboxes", "make", "look"]);
    }
}

#[test]
fn o10_a_new_store_has_the_objects_as_they_were_when_the_runtime_was_asked() {
    let mut bench = Bench::seen(blocks(&[A]));
    let list = NodeAddressesSpec {
        addresses: vec!["10.0.0.9 net/c1 eth0 u1 default/a 2027-01-15T08:00:00Z".to_owned()],
        ..NodeAddressesSpec::default()
    };
    let owner = "subnet".to_owned();
    let seen = AddressesSeen { owner, list };
    let watched = Applied(seen.clone());
    bench.on(AgentEvent::Addresses(Change(watched)));
    let mut reports = pod("u2", &[], &[]);
    reports.addresses = vec![Addr::parse_strict("10.0.0.8").unwrap()];
    bench.on(AgentEvent::Pod(Change(Applied(reports.clone()))));
    bench.run_to("open");
    bench.answer(StoreAnswer::Opened(StoreFound::Nothing));
    bench.run_to("sandboxes");
    // The objects are deleted now, but they existed when the runtime was asked, so they still count.
    bench.on(AgentEvent::Addresses(Change(Deleted(seen))));
    bench.on(AgentEvent::Pod(Change(Deleted(reports))));
    bench.subnet(2, blocks(&[A, B]));
    bench.sandboxes = Ok(vec![sandbox("c3", "10.0.0.7")]);
    bench.run_to("make");
    let Some(StoreQuestion::Make { holding, known, .. }) = &bench.open else {
        panic!("not made")
    };
    assert_eq!(holding.blocks.len(), 1);
    let in_use: BTreeSet<String> = known
        .iter()
        .flat_map(|it| &it.addresses)
        .map(ToString::to_string)
        .collect();
    let all = ["10.0.0.7", "10.0.0.8", "10.0.0.9"].map(str::to_owned);
    assert_eq!(in_use, all.into());
    let effects = bench.run_to("hold");
    assert_eq!(asked(&effects), ["look", "hold"]);
}

/// A machine whose store is lost in a boot in which an agent has published a status. The pod `u1` asks for second
/// networks, and reports none.
fn lost_with_second_networks() -> Bench {
    let mut bench = Bench::blank();
    bench.show_all(blocks(&[A]));
    let mut seen = bench::subnet(2, blocks(&[A]));
    seen.status.agent = Some(AgentInfo {
        boot_id: "boot".to_owned(),
        ..AgentInfo::default()
    });
    bench.on(AgentEvent::Subnet(Change(Applied(seen))));
    bench.on(AgentEvent::Pod(Change(Applied(attaching("u1")))));
    bench.run_to("open");
    bench.answer(StoreAnswer::Opened(StoreFound::Nothing));
    bench
}

fn attaching(uid: &str) -> Pod {
    Pod {
        second_networks: SecondNetworks::Unknown,
        ..pod(uid, &[], &[])
    }
}

#[test]
fn o10_a_new_store_waits_for_the_second_networks_of_pods_that_were_there_when_it_was_lost() {
    let offered = |effects: &[AgentEffect]| {
        let mut waits = effects.iter().filter_map(|it| match it {
            AgentEffect::Offer { watched, .. } => Some(watched.waits_for_second_networks),
            _ => None,
        });
        waits.next_back()
    };
    let mut bench = lost_with_second_networks();
    let effects = bench.run();
    assert!(!asked(&effects).contains(&"make"), "{effects:#?}");
    assert_eq!(offered(&effects), Some(true), "{effects:#?}");
    // No ADD is handled, so this pod cannot report its addresses before there is a store.
    bench.on(AgentEvent::Pod(Change(Applied(attaching("u2")))));
    bench.pass(3 * SECOND);
    assert!(!asked(&bench.run()).contains(&"make"));
    let mut reports = attaching("u1");
    reports.second_networks = SecondNetworks::Known(Vec::new());
    bench.on(AgentEvent::Pod(Change(Applied(reports))));
    bench.pass(3 * SECOND);
    let effects = bench.run();
    assert_eq!(asked(&effects)[..2], ["sandboxes", "make"]);
    assert_eq!(offered(&effects), Some(false), "{effects:#?}");
}

#[test]
fn o10_a_new_store_waits_for_pods_that_come_later_only_if_unknown_pods_are_served() {
    for (terms, waits) in [("Wait", false), ("Serve", true)] {
        let mut bench = lost_with_second_networks();
        let mut spec = blocks(&[A]);
        spec["pools"] = json!([{"name": "p", "unknownPods": terms}]);
        let mut seen = bench::subnet(3, spec);
        seen.status.agent = Some(AgentInfo {
            boot_id: "boot".to_owned(),
            ..AgentInfo::default()
        });
        bench.on(AgentEvent::Subnet(Change(Applied(seen))));
        bench.run();
        bench.on(AgentEvent::Pod(Change(Applied(attaching("u2")))));
        bench.on(AgentEvent::Pod(Change(Deleted(attaching("u1")))));
        bench.pass(3 * SECOND);
        let made = asked(&bench.run()).contains(&"make");
        assert_eq!(made, !waits, "{terms}");
        bench.pass(300 * SECOND);
        bench.run();
        assert!(
            bench.machine.is_open,
            "{terms}: not longer than a setup lasts"
        );
    }
}

#[test]
fn a_block_that_comes_back_after_a_loss_of_the_store_has_the_addresses_of_its_pods() {
    // In the first case, a pod uses an address of the block B. The Node had this block before it was deleted and
    // registered again. Now the Node has only the block A.
    for (address, is_adopted) in [("10.0.0.70", true), ("10.0.0.7", false)] {
        let mut bench = Bench::seen(blocks(&[A]));
        bench.sandboxes = Ok(vec![sandbox("c1", address)]);
        bench.run_to("open");
        bench.answer(StoreAnswer::Opened(StoreFound::Nothing));
        bench.run();
        bench.subnet(2, blocks(&[A, B]));
        bench.run_to("hold");
        let Some(StoreQuestion::Transact(Transaction::Hold { known, .. })) = &bench.open else {
            panic!("{:?}", bench.open)
        };
        let known: Vec<String> = known.iter().map(|it| it.addresses[0].to_string()).collect();
        assert_eq!(
            known,
            is_adopted
                .then_some(address)
                .into_iter()
                .collect::<Vec<_>>()
        );
    }
}

/// Returns the addresses that the effects probe.
fn probed(effects: &[AgentEffect]) -> Vec<Vec<Addr>> {
    let probed = |it: &AgentEffect| match it {
        AgentEffect::Probe(targets) => Some(targets.addresses.clone()),
        _ => None,
    };
    effects.iter().filter_map(probed).collect()
}

#[test]
fn o16_one_round_of_probes_is_under_way_and_nothing_waits_for_it() {
    let addr = |text| Addr::parse_strict(text).unwrap();
    let mut bench = Bench::idle(blocks(&[A]));
    bench.snapshot.probes = vec![PoolProbes {
        pool: "p".to_owned(),
        interface: String::new(),
        ready: 2,
        next: vec![addr("10.0.0.2"), addr("10.0.0.3")],
    }];
    bench.pass(60 * SECOND);
    assert_eq!(probed(&bench.run()), [[addr("10.0.0.2")]]);
    bench.pod("u1");
    bench.pass(60 * SECOND);
    let effects = bench.run();
    assert!(asked(&effects).contains(&"look"), "{effects:#?}");
    assert_eq!(probed(&effects).len(), 0);
    bench.on(AgentEvent::Probed(Err("no interface".to_owned())));
    assert_eq!(probed(&bench.run()).len(), 0);
    bench.pass(10 * SECOND);
    assert_eq!(probed(&bench.run()).len(), 1);
    bench.snapshot.probes[0].ready = 3;
    bench.on(AgentEvent::Probed(Ok(())));
    let effects = bench.run();
    assert!(asked(&effects).contains(&"look"), "{effects:#?}");
    assert_eq!(probed(&effects).len(), 0);
}

#[test]
fn a_new_conflict_is_told_once_and_ends_when_an_operator_says_so() {
    let told = |effects: &[AgentEffect]| {
        let is = |it: &&AgentEffect| matches!(it, AgentEffect::Emit(note) if note.reason == "AddressConflict");
        effects.iter().filter(is).count()
    };
    let mut bench = Bench::idle(blocks(&[A]));
    bench.snapshot.conflicts = vec![conflict("10.0.0.2", 7)];
    for expected in [1, 0] {
        bench.pass(60 * SECOND);
        assert_eq!(told(&bench.run()), expected);
    }
    let mut seen = bench::subnet(2, blocks(&[A]));
    seen.conflict_over = [(conflict("10.0.0.2", 7).address, 7)].into();
    bench.on(AgentEvent::Subnet(Change(Applied(seen))));
    bench.run();
    bench.snapshot.conflicts = vec![conflict("10.0.0.2", 7), conflict("10.0.0.3", 7)];
    bench.pass(60 * SECOND);
    let effects = bench.run();
    assert!(asked(&effects).contains(&"end conflicts"), "{effects:#?}");
    assert_eq!(bench.snapshot.conflicts, [conflict("10.0.0.3", 7)]);
}
