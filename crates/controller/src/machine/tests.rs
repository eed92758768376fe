//! Tests of a takeover: what a new leader does about writes that earlier leaders may have in flight.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::*;
use crate::cluster::intents::{SeenVersions, WriteIntent, WriteIntents};
use crate::cluster::lease::{Takeover, Tenure};
use crate::cluster::names::NodeName;
use crate::cluster::request::{ObjectSpec, PodCidrAllocation, Rejection};
use crate::demand::tests::{NOW, node, pool, subnet};
use crate::telemetry::ControllerMetrics;
use cadastre_api::AllocationMode;
use cadastre_core::Cidr;

/// A controller with the term in which it leads.
struct Bench {
    controller: Controller,
    tenure: Tenure,
    now: Now,
}

fn list<T>(objects: Vec<T>) -> Vec<ObjectEvent<T>> {
    let asked = Duration::ZERO;
    let all = objects.into_iter().map(ObjectEvent::Applied);
    std::iter::once(ObjectEvent::Restarted { asked })
        .chain(all)
        .chain([ObjectEvent::Listed])
        .collect()
}

fn assigned(out: &[OutgoingRequest]) -> Vec<PodCidrAllocation> {
    let all = out.iter().filter_map(|out| match &out.request {
        ApiRequest::AssignPodCidrs(assignment) => Some(assignment.clone()),
        _ => None,
    });
    all.collect()
}

fn touched(out: &[OutgoingRequest]) -> Vec<(RequestId, NodeName)> {
    let all = out.iter().filter_map(|out| match &out.request {
        ApiRequest::TouchNode(touch) => Some((out.id, touch.name.clone())),
        _ => None,
    });
    all.collect()
}

impl Bench {
    /// Builds a leader that has taken over from one that did not release the Lease. There are two nodes without
    /// podCIDRs, a pool `podcidrs` in mode NodeCIDR, and a pool `p` in mode Blocks, of which `n2` demands addresses.
    fn after(inherited: Option<WriteIntents>) -> Self {
        let mut bench = Bench::before(inherited);
        bench.named(0);
        bench
    }

    /// Builds the same cluster as [`Bench::after`], but the controller does not lead yet.
    fn before(inherited: Option<WriteIntents>) -> Self {
        let tenure = Tenure {
            term: "2-b".into(),
            takeover: Takeover::Unclean,
            valid_until: Duration::MAX,
            vacant: Duration::ZERO,
            inherited: inherited.map(Arc::new),
            answered_since: Duration::ZERO,
            named: 0,
        };
        let mut bench = Bench {
            controller: Controller::new(ControllerSettings::default()),
            now: NOW,
            tenure,
        };
        let mut p = pool("podcidrs", "10.0.0.0/24");
        p.spec.as_mut().unwrap().allocation_mode = AllocationMode::NodeCIDR;
        let mut told = subnet("n2", &[], 4);
        if let Ok(spec) = &mut told.spec {
            spec.node_uid = Some("n2".to_owned());
        }
        let mut events = Vec::new();
        let nodes = list(vec![node("n1"), node("n2")]);
        events.extend(nodes.into_iter().map(ControllerEvent::Nodes));
        let pools = list(vec![p, pool("p", "10.9.0.0/24")]);
        events.extend(pools.into_iter().map(ControllerEvent::Pools));
        events.extend(list(vec![told]).into_iter().map(ControllerEvent::Subnets));
        events.extend(list(Vec::new()).into_iter().map(ControllerEvent::Blocks));
        events.extend(list(Vec::new()).into_iter().map(ControllerEvent::Pods));
        events.extend(
            list(Vec::new())
                .into_iter()
                .map(ControllerEvent::ServiceRanges),
        );
        for event in events {
            bench.controller.on(event, NOW);
        }
        bench
    }

    fn named(&mut self, number: u64) {
        self.tenure.named = number;
        let word = Leadership::Leading(self.tenure.clone());
        self.controller
            .on(ControllerEvent::Leadership(word), self.now);
    }

    fn poll(&mut self) -> Vec<OutgoingRequest> {
        std::iter::from_fn(|| self.controller.poll(self.now)).collect()
    }

    /// Returns the requests before and after the wanted Lease write has succeeded.
    fn poll_and_name(&mut self) -> (Vec<OutgoingRequest>, Vec<OutgoingRequest>) {
        let before = self.poll();
        let wanted = self.controller.take_wanted().unwrap();
        self.named(wanted.number);
        (before, self.poll())
    }

    fn refuse(&mut self, id: RequestId) {
        let why = Rejection::Rejected("policy".to_owned());
        let answer = ControllerEvent::Answer(id, RequestOutcome::Rejected(why));
        self.controller.on(answer, self.now);
    }
}

fn range(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

#[test]
fn what_the_lease_names_is_finished_and_no_node_is_touched() {
    let intent = WriteIntent {
        name: "n1".into(),
        uid: "n1".into(),
        cidrs: vec![range("10.0.0.128/28")],
    };
    let mut bench = Bench::after(Some(WriteIntents {
        assignments: [intent.clone()].into(),
        known: None,
    }));
    let (before, after) = bench.poll_and_name();
    assert!(touched(&before).is_empty() && touched(&after).is_empty());
    assert!(assigned(&before).is_empty(), "the Lease names nothing yet");
    let given = assigned(&after);
    assert_eq!(given.len(), 2);
    for one in &given {
        assert_eq!(one.name == intent.name, one.cidrs == intent.cidrs);
    }
    // Only this write is rejected. So its node still waits, and its range stays reserved because the earlier leader may
    // have written it.
    let id = after.iter().find(|out| {
        assigned(std::slice::from_ref(*out))
            .iter()
            .any(|a| a.name == intent.name)
    });
    bench.refuse(id.unwrap().id);
    let mut third = node("n3");
    third.version = 9;
    let event = ControllerEvent::Nodes(ObjectEvent::Applied(third));
    bench.controller.on(event, bench.now);
    let (_, after) = bench.poll_and_name();
    let all: BTreeSet<Cidr> = given.iter().flat_map(|a| a.cidrs.clone()).collect();
    let third = assigned(&after);
    assert_eq!(third.len(), 1);
    assert!(!all.contains(&third[0].cidrs[0]));
    assert!(!bench.controller.is_settled());
}

#[test]
fn a_node_that_is_gone_or_has_podcidrs_needs_nothing() {
    let intent = |uid: &str| WriteIntent {
        name: "n1".into(),
        uid: uid.into(),
        cidrs: vec![range("10.0.0.128/28")],
    };
    let mut bench = Bench::after(Some(WriteIntents {
        assignments: [intent("earlier")].into(),
        known: None,
    }));
    let (_, after) = bench.poll_and_name();
    let first = assigned(&after).into_iter().find(|a| &*a.name == "n1");
    assert_ne!(first.unwrap().cidrs, intent("n1").cidrs, "a new one");
}

#[test]
fn where_the_lease_tells_nothing_a_node_that_cannot_be_touched_keeps_blocks_from_nobody() {
    let mut bench = Bench::after(None);
    let (out, _) = bench.poll_and_name();
    let touches = touched(&out);
    assert_eq!(touches.len(), 2);
    for (id, name) in &touches {
        if &**name == "n1" {
            bench.refuse(*id);
        } else {
            let mut node = node("n2");
            (node.term, node.annotated, node.version) = (Some("2-b".into()), true, 5);
            let answer = ControllerEvent::Answer(*id, RequestOutcome::Node(node));
            bench.controller.on(answer, bench.now);
        }
    }
    let (before, after) = bench.poll_and_name();
    let creates = |out: &[OutgoingRequest]| {
        out.iter()
            .filter(|out| {
                matches!(out.request, ApiRequest::Create(_, ObjectSpec::Block(_))) && out.number > 0
            })
            .count()
    };
    assert!(creates(&out) + creates(&before) + creates(&after) >= 1);
    assert!(assigned(&before).is_empty() && assigned(&after).is_empty());
    let reports = bench.controller.take_reports();
    let told = reports.iter().filter(|it| it.note.contains("policy"));
    assert_eq!(told.count(), 1);
    let view = bench.controller.view(bench.now);
    assert_eq!(view.waiting.get("fence"), Some(&1));
    assert!(view.allocating && view.fencing.is_some_and(|what| what.contains("n1")));
    // The touch of the other node succeeds in the end, so podCIDRs are allocated.
    bench.now.mono = Duration::from_secs(20);
    let again = touched(&bench.poll());
    assert_eq!(again.len(), 1);
    let mut node = node("n1");
    (node.term, node.annotated, node.version) = (Some("2-b".into()), true, 6);
    let answer = ControllerEvent::Answer(again[0].0, RequestOutcome::Node(node));
    bench.controller.on(answer, bench.now);
    let (_, after) = bench.poll_and_name();
    assert_eq!(assigned(&after).len(), 2);
}

/// Returns a leader in a cluster with one node and one pool, without any allocation.
fn leader() -> Controller {
    let asked = Duration::ZERO;
    let mut controller = Controller::new(ControllerSettings::default());
    let mut tell = |event| controller.on(event, NOW);
    tell(ControllerEvent::Nodes(ObjectEvent::Restarted { asked }));
    tell(ControllerEvent::Nodes(ObjectEvent::Applied(node("n"))));
    tell(ControllerEvent::Nodes(ObjectEvent::Listed));
    tell(ControllerEvent::Pools(ObjectEvent::Restarted { asked }));
    tell(ControllerEvent::Pools(ObjectEvent::Applied(pool(
        "p",
        "10.0.0.0/24",
    ))));
    tell(ControllerEvent::Pools(ObjectEvent::Listed));
    tell(ControllerEvent::Subnets(ObjectEvent::Restarted { asked }));
    tell(ControllerEvent::Subnets(ObjectEvent::Listed));
    tell(ControllerEvent::Blocks(ObjectEvent::Restarted { asked }));
    tell(ControllerEvent::Blocks(ObjectEvent::Listed));
    tell(ControllerEvent::ServiceRanges(ObjectEvent::Restarted {
        asked,
    }));
    tell(ControllerEvent::ServiceRanges(ObjectEvent::Listed));
    tell(ControllerEvent::Pods(ObjectEvent::Restarted { asked }));
    tell(ControllerEvent::Pods(ObjectEvent::Listed));
    tell(ControllerEvent::Leadership(Leadership::Leading(Tenure {
        term: "1-a".into(),
        takeover: Takeover::First,
        valid_until: Duration::from_secs(600),
        vacant: Duration::ZERO,
        inherited: None,
        answered_since: Duration::ZERO,
        named: 0,
    })));
    controller
}

fn all(controller: &mut Controller) -> Vec<OutgoingRequest> {
    std::iter::from_fn(|| controller.poll(NOW)).collect()
}

#[test]
fn every_loop_is_measured_and_gets_its_answers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
    let files = std::fs::read_dir(&folder).unwrap();
    let files = files.map(|it| it.unwrap().path()).filter(|it| it.is_file());
    let loops: usize = files
        .map(|it| read(it).matches("\nimpl Loop for ").count())
        .sum();
    let mut controller = leader();
    all(&mut controller);
    let registry = prometheus::Registry::new();
    let metrics = ControllerMetrics::register(&registry).unwrap();
    metrics.set(&controller.view(NOW));
    let text = prometheus::TextEncoder::new();
    let text = text.encode_to_string(&registry.gather()).unwrap();
    for series in [
        "workqueue_depth{",
        "workqueue_adds_total{",
        "cadastre_loop_keys_later{",
    ] {
        assert_eq!(text.matches(series).count(), loops, "{series}");
    }
    let purposes = read(folder.join("purpose.rs"));
    let (_, names) = purposes.split_once("fn loop_name").unwrap();
    for name in names.split('"').skip(1).step_by(2) {
        let series = format!("workqueue_depth{{name=\"{name}\"}}");
        assert!(text.contains(&series), "{name}: no loop gets its answers");
    }
}

/// Returns whether any of the requests lists a block in a NodeSubnet.
fn lists(requests: &[OutgoingRequest]) -> bool {
    requests.iter().any(|it| match &it.request {
        ApiRequest::Create(_, ObjectSpec::Subnet(spec))
        | ApiRequest::Replace(_, ObjectSpec::Subnet(spec)) => !spec.blocks.is_empty(),
        _ => false,
    })
}

#[test]
fn a_block_is_listed_once_the_watch_has_shown_it_not_by_the_answer_to_its_creation() {
    let mut controller = leader();
    let requests = all(&mut controller);
    let mut creations = requests.iter().filter_map(|it| match &it.request {
        ApiRequest::Create(name, ObjectSpec::Block(spec)) => {
            Some((it.id, name.clone(), spec.clone()))
        }
        _ => None,
    });
    let (id, name, spec) = creations.next().unwrap();
    let block = Block {
        name,
        uid: "b".into(),
        version: 7,
        touched: false,
        spec: Ok(spec),
    };
    let answer = RequestOutcome::Block(block.clone());
    controller.on(ControllerEvent::Answer(id, answer), NOW);
    assert!(!lists(&all(&mut controller)), "another may have been first");
    controller.on(ControllerEvent::Blocks(ObjectEvent::Applied(block)), NOW);
    assert!(lists(&all(&mut controller)));
}

#[test]
fn a_leader_whose_lease_has_run_out_asks_for_nothing_until_it_was_renewed() {
    let mut bench = Bench::after(Some(WriteIntents::default()));
    bench.tenure.valid_until = Duration::from_secs(100);
    bench.named(0);
    bench.now.mono = Duration::from_secs(100);
    assert!(bench.poll().is_empty());
    bench.tenure.valid_until = Duration::from_secs(110);
    bench.named(0);
    assert!(!bench.poll().is_empty());
}

#[test]
fn nodes_that_cannot_be_written_take_no_room_from_others() {
    let mut bench = Bench::after(Some(WriteIntents::default()));
    let mut wide = pool("podcidrs", "10.0.0.0/16");
    wide.spec.as_mut().unwrap().allocation_mode = AllocationMode::NodeCIDR;
    wide.version = 9;
    let mut events = vec![ControllerEvent::Pools(ObjectEvent::Applied(wide))];
    let names = (0..600).map(|i| format!("bad{i}"));
    for name in names.chain(["good".to_owned()]) {
        let mut node = node(&name);
        node.version = 9;
        events.push(ControllerEvent::Nodes(ObjectEvent::Applied(node)));
    }
    for event in events {
        bench.controller.on(event, bench.now);
    }
    for _ in 0..1_000 {
        let out = bench.poll();
        for out in &out {
            let answer = match &out.request {
                ApiRequest::AssignPodCidrs(it) if &*it.name == "good" => return,
                ApiRequest::AssignPodCidrs(_) => {
                    RequestOutcome::Indeterminate("no answer".to_owned())
                }
                ApiRequest::Read(ObjectKind::Node, name) => RequestOutcome::Node(node(name)),
                _ => RequestOutcome::Rejected(Rejection::Busy(None)),
            };
            bench
                .controller
                .on(ControllerEvent::Answer(out.id, answer), bench.now);
        }
        if let Some(wanted) = bench.controller.take_wanted() {
            bench.named(wanted.number);
        }
        if out.is_empty() {
            bench.now.mono += Duration::from_millis(500);
        }
    }
    panic!("it was never assigned anything");
}

#[test]
fn a_take_over_lists_only_where_the_watch_may_be_behind() {
    let known = SeenVersions {
        nodes: 7,
        subnets: 8,
        blocks: 9,
    };
    let listed =
        |known: Option<SeenVersions>, answered_since: u64, vacant: u64, reached: [u64; 3]| {
            let mut bench = Bench::before(Some(WriteIntents {
                known,
                ..WriteIntents::default()
            }));
            let [nodes, subnets, blocks] = reached;
            for event in [
                ControllerEvent::Nodes(ObjectEvent::Reached(nodes)),
                ControllerEvent::Subnets(ObjectEvent::Reached(subnets)),
                ControllerEvent::Blocks(ObjectEvent::Reached(blocks)),
            ] {
                bench.controller.on(event, NOW);
            }
            bench.tenure.answered_since = Duration::from_secs(answered_since);
            bench.tenure.vacant = Duration::from_secs(vacant);
            bench.now.mono += Duration::from_secs(100);
            bench.named(0);
            let lists = bench.poll().into_iter().filter_map(|it| match it.request {
                ApiRequest::List(ObjectKind::Node) => Some("nodes"),
                ApiRequest::List(ObjectKind::Subnet) => Some("subnets"),
                ApiRequest::List(ObjectKind::Block) => Some("blocks"),
                _ => None,
            });
            lists.collect::<Vec<_>>()
        };
    let all = ["nodes", "subnets", "blocks"];
    let reached = [7, 8, 9];
    assert_eq!(listed(Some(known), 0, 16, reached), [""; 0]);
    assert_eq!(listed(Some(known), 0, 16, [6, 8, 8]), ["nodes", "blocks"]);
    assert_eq!(listed(None, 0, 16, reached), all, "the Lease says nothing");
    assert_eq!(
        listed(Some(known), 50, 16, reached),
        all,
        "the API server was not reached since"
    );
    assert_eq!(listed(Some(known), 0, 61, reached), all, "after a gap");
}
