//! Tests of the machine's guarantees about the store, named by their numbers.

mod bench;
mod told;

use std::collections::BTreeSet;

use serde_json::json;

use super::*;
use crate::cri::Sandbox;
use crate::pods::testing::pod;
use crate::snapshot::testing::record;
use bench::{Bench, asked, blocks, pod_cidrs, written_onto};
use cadastre_api::NodeAddressesSpec;
use cadastre_core::Addr;
use cadastre_daemon::watch::ObjectEvent::{Applied, Deleted, Listed, Restarted};
use cadastre_daemon::watch::WatchStep::{self, Change};
use cadastre_node::PodRef;

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

fn block_back(cidrs: &[&str]) -> serde_json::Value {
    let mut spec = blocks(cidrs);
    for block in spec["blocks"].as_array_mut().unwrap() {
        block["recall"] = json!("IfEmpty");
    }
    spec
}

#[test]
fn o1_while_a_question_is_in_flight_others_are_told_nothing_and_events_are_taken_in() {
    for kind in ["look", "hold", "read notes", "note", "sandboxes"] {
        let mut bench = Bench::resting(blocks(&[A]));
        bench.pod("u1");
        bench.subnet(2, pod_cidrs(&["10.9.0.0/24"]));
        bench.pass(60 * SECOND);
        bench.machine.notes.forget();
        bench.answer_namespace();
        bench.run_to(kind);
        bench.told();
        bench.pass(60 * SECOND);
        bench.subnet(3, blocks(&[B]));
        bench.pod("u2");
        bench.on(AgentEvent::Changed);
        let effects = bench.turn();
        assert_eq!(asked(&effects), [""; 0], "during {kind}");
        assert_eq!(bench.told(), [""; 0], "during {kind}");
        let offered = |it: &AgentEffect| matches!(it, AgentEffect::Offer { watched, .. } if watched.pods.by_uid("u2").is_some());
        assert!(effects.iter().any(offered), "during {kind}: {effects:#?}");
    }
}

#[test]
fn o2_nothing_is_held_before_the_store_was_looked_at() {
    let mut bench = Bench::seen(blocks(&[A]));
    let effects = bench.run_to("hold");
    assert_eq!(asked(&effects), ["open", "look", "hold"]);
    bench.run();
    // The file is replaced by another one. The machine does not know its content, so it must look again.
    bench.pass(6 * SECOND);
    bench.serving.is_missing = true;
    bench.run_to("look");
    bench.serving.is_missing = false;
    bench.answer(StoreAnswer::Looked(Err(lost())));
    let effects = bench.run_to("hold");
    assert_eq!(asked(&effects), ["open", "look", "hold"]);
}

#[test]
fn o3_what_is_in_use_of_a_new_pod_cidr_is_asked_before_and_taken_over_with_it() {
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
    assert!(bench.machine.store_trouble.contains("no answer"));
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
    assert_eq!(asked(&effects), ["hold"], "it is not new any more");
}

#[test]
fn o4_what_was_asked_about_is_held_whatever_came_meanwhile() {
    let mut bench = Bench::seen(pod_cidrs(&["10.9.0.0/24"]));
    bench.run_to("sandboxes");
    bench.subnet(2, pod_cidrs(&["10.9.0.0/24", "10.9.1.0/24"]));
    bench.run_to("hold");
    let Some(StoreQuestion::Transact(Transaction::Hold { holding, .. })) = &bench.open else {
        panic!("no hold")
    };
    assert_eq!(holding.blocks.len(), 1, "nobody was asked about the other");
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
fn o4_what_comes_meanwhile_is_taken_over_right_after() {
    let mut bench = Bench::resting(blocks(&[A]));
    bench.pass(SECOND);
    bench.on(AgentEvent::Changed);
    bench.run_to("look");
    bench.subnet(2, blocks(&[A, B]));
    assert_eq!(asked(&bench.turn()), [""; 0]);
    // No other event comes that could wake the agent, so it must do the rest on its own.
    let effects = bench.run();
    assert_eq!(asked(&effects)[..2], ["hold", "look"]);
}

#[test]
fn o5_after_a_taking_over_the_store_is_looked_at_before_anything_is_told() {
    let mut bench = Bench::seen(blocks(&[A]));
    bench.run_to("hold");
    bench.pass(40 * SECOND);
    let answer = bench.answer_to(bench.open.clone().unwrap());
    let effects = bench.answer(answer);
    assert_eq!(asked(&effects), ["look"]);
    assert_eq!(bench.told(), [""; 0]);
    bench.run();
    let told = bench.told();
    assert!(
        told.contains(&"status") && told.contains(&"ready"),
        "{told:?}"
    );
}

#[test]
fn o6_a_block_goes_by_a_look_and_the_wishes_of_after_it_and_while_the_watch_gets_through() {
    let back = || {
        let mut bench = Bench::resting(blocks(&[A, B]));
        bench.subnet(2, block_back(&[A, B]));
        bench.run_to("look");
        bench.told();
        bench
    };
    let wish = |bench: &mut Bench| {
        bench.serving.pending_adds = [("p".to_owned(), 100)].into();
    };
    let mut bench = back();
    wish(&mut bench);
    let effects = bench.run();
    assert!(!asked(&effects).contains(&"release"), "somebody wants it");
    let mut bench = back();
    bench.on(AgentEvent::Subnet(WatchStep::Trouble));
    let effects = bench.run();
    assert!(!asked(&effects).contains(&"release"), "it may be old news");
    let mut bench = back();
    bench.pass(40 * SECOND);
    bench.run_to("release");
    bench.on(AgentEvent::Subnet(WatchStep::Trouble));
    let answer = bench.answer_to(bench.open.clone().unwrap());
    let effects = bench.answer(answer);
    assert_eq!(asked(&effects), ["look"], "the other stays");
    assert_eq!(bench.told(), [""; 0], "not before it is looked at again");
    bench.run();
    assert_eq!(bench.snapshot.blocks.len(), 1);
    assert!(bench.told().contains(&"status"));
    let mut bench = back();
    let effects = bench.run();
    let is = asked(&effects);
    assert_eq!(is[..3], ["release", "release", "look"], "{is:?}");
}

#[test]
fn o7_a_leak_is_freed_after_its_proof_and_one_proof_is_sought_at_a_time() {
    let mut bench = Bench::resting(blocks(&[A]));
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
fn o8_notes_are_read_before_they_are_compared_and_again_when_something_came_meanwhile() {
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
    assert_eq!(notes.len(), 1, "the other is noted");
}

#[test]
fn o9_a_lost_store_is_closed_and_forgotten_before_another_is_looked_for() {
    let mut bench = Bench::resting(blocks(&[A]));
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
    assert_eq!(bench.told(), [""; 0]);
    let effects = bench.run();
    let is = asked(&effects);
    assert_eq!(
        is[..3],
        ["open", "look", "hold"],
        "nothing is freed: {is:?}"
    );
}

#[test]
fn o10_a_new_store_is_made_once_everybody_was_heard() {
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
fn o10_a_new_store_is_made_of_what_was_known_when_the_runtime_was_asked() {
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
    // The objects still count if they are deleted meanwhile, because they existed when the runtime was asked.
    bench.on(AgentEvent::Addresses(Change(Deleted(seen))));
    bench.on(AgentEvent::Pod(Change(Deleted(reports))));
    bench.subnet(2, blocks(&[A, B]));
    bench.sandboxes = Ok(vec![sandbox("c3", "10.0.0.7")]);
    bench.run_to("make");
    let Some(StoreQuestion::Make { holding, known }) = &bench.open else {
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
