//! Tests of a takeover, in particular of writes that earlier leaders may have in flight.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use super::script::{Cluster, Script};
use super::*;
use crate::allocations::open_routes::OpenRoutes;
use crate::cluster::intents::{SeenVersions, WriteIntent, WriteIntents};
use crate::cluster::lease::{LeadershipTerm, Takeover};
use crate::cluster::names::NodeName;
use crate::cluster::request::{ObjectSpec, PodCidrAllocation, Rejection};
use crate::demand::tests::{NOW, node, pool, subnet};
use crate::routes::is_routed;
use crate::settings::FrrSettings;
use crate::telemetry::ControllerMetrics;
use cadastre_api::AllocationMode;
use cadastre_core::Cidr;

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

/// Returns a new leader whose predecessor did not release the Lease. The Lease names the writes in `inherited`; with
/// `None`, it is unknown which writes are in flight. The cluster has two nodes without podCIDRs, a pool `podcidrs` in
/// mode NodeCIDR, and a pool `p` in mode Blocks. Node `n2` demands addresses of pool `p`.
fn after_takeover(inherited: Option<WriteIntents>) -> Script {
    let mut script = before_takeover(inherited);
    script.leads();
    script
}

/// Returns the controller of [`after_takeover`] in the state before it leads.
fn before_takeover(inherited: Option<WriteIntents>) -> Script {
    let mut script = Script::new(LeadershipTerm {
        inherited: inherited.map(Arc::new),
        ..LeadershipTerm::of("2-b", Takeover::Unclean)
    });
    script.list(Vec::new(), ControllerEvent::Routes);
    script.list_all(Cluster {
        claims: Vec::new(),
        pods: Vec::new(),
        nodes: vec![node("n1"), node("n2")],
        pools: vec![pod_cidr_pool("10.0.0.0/24"), pool("p", "10.9.0.0/24")],
        subnets: vec![subnet("n2", &[], 4)],
        blocks: Vec::new(),
    });
    script
}

fn pod_cidr_pool(range: &str) -> Pool {
    let mut pool = pool("podcidrs", range);
    pool.spec.as_mut().unwrap().allocation_mode = AllocationMode::NodeCIDR;
    pool
}

impl Script {
    /// Returns the requests that the controller sends before the wanted Lease write succeeds, and those that it sends
    /// afterwards.
    fn poll_around_lease_write(&mut self) -> (Vec<OutgoingRequest>, Vec<OutgoingRequest>) {
        let before = self.poll();
        self.write_lease();
        (before, self.poll())
    }

    fn reject(&mut self, id: RequestId) {
        let why = Rejection::Rejected("policy".to_owned());
        self.answer(id, RequestOutcome::Rejected(why));
    }

    /// Answers a touch with the Node as the touch has changed it. The Node now has the resourceVersion `version`.
    fn accept_touch(&mut self, id: RequestId, name: &str, version: u64) {
        let node = Node {
            term: Some("2-b".into()),
            annotated: true,
            version,
            ..node(name)
        };
        self.answer(id, RequestOutcome::Node(node));
    }
}

fn range(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

#[test]
fn assignments_that_the_lease_names_are_repeated_and_no_node_is_touched() {
    let intent = WriteIntent {
        name: "n1".into(),
        uid: "n1".into(),
        cidrs: vec![range("10.0.0.128/28")],
    };
    let mut script = after_takeover(Some(WriteIntents {
        assignments: [intent.clone()].into(),
        known: None,
    }));
    let (before, after) = script.poll_around_lease_write();
    assert!(touched(&before).is_empty() && touched(&after).is_empty());
    assert!(assigned(&before).is_empty(), "the Lease names nothing yet");
    let allocations = assigned(&after);
    assert_eq!(allocations.len(), 2);
    for one in &allocations {
        assert_eq!(one.name == intent.name, one.cidrs == intent.cidrs);
    }
    // Only this leader's repetition of the inherited write is rejected. The node still waits for podCIDRs, and the
    // range stays reserved, because the earlier leader's own request may still be in flight and take effect later.
    let id = after.iter().find(|out| {
        assigned(std::slice::from_ref(*out))
            .iter()
            .any(|a| a.name == intent.name)
    });
    script.reject(id.unwrap().id);
    let mut third = node("n3");
    third.version = 9;
    script.on(ControllerEvent::Nodes(ObjectEvent::Applied(third)));
    let (_, after) = script.poll_around_lease_write();
    let all: BTreeSet<Cidr> = allocations.iter().flat_map(|a| a.cidrs.clone()).collect();
    let third = assigned(&after);
    assert_eq!(third.len(), 1);
    assert!(!all.contains(&third[0].cidrs[0]));
    assert!(!script.controller.is_settled());
}

#[test]
fn an_assignment_to_a_deleted_node_is_not_repeated() {
    let intent = |uid: &str| WriteIntent {
        name: "n1".into(),
        uid: uid.into(),
        cidrs: vec![range("10.0.0.128/28")],
    };
    let mut script = after_takeover(Some(WriteIntents {
        assignments: [intent("earlier")].into(),
        known: None,
    }));
    let (_, after) = script.poll_around_lease_write();
    let first = assigned(&after).into_iter().find(|a| &*a.name == "n1");
    assert_ne!(first.unwrap().cidrs, intent("n1").cidrs, "a new one");
}

#[test]
fn without_intents_in_the_lease_an_untouchable_node_delays_only_podcidrs() {
    let mut script = after_takeover(None);
    let (out, _) = script.poll_around_lease_write();
    let touches = touched(&out);
    assert_eq!(touches.len(), 2);
    for (id, name) in &touches {
        if &**name == "n1" {
            script.reject(*id);
        } else {
            script.accept_touch(*id, "n2", 5);
        }
    }
    let (before, after) = script.poll_around_lease_write();
    let creates = |out: &[OutgoingRequest]| {
        out.iter()
            .filter(|out| {
                matches!(out.request, ApiRequest::Create(_, ObjectSpec::Block(_))) && out.number > 0
            })
            .count()
    };
    assert!(creates(&out) + creates(&before) + creates(&after) >= 1);
    assert!(assigned(&before).is_empty() && assigned(&after).is_empty());
    let reports = script.controller.take_reports();
    let of_policy = reports.iter().filter(|it| it.note.contains("policy"));
    assert_eq!(of_policy.count(), 1);
    let view = script.controller.view(script.now);
    assert_eq!(view.waiting.get("fence"), Some(&1));
    assert!(view.allocating && view.fencing.is_some_and(|what| what.contains("n1")));
    // The touch of `n1` succeeds at the second attempt, so podCIDRs are allocated.
    script.now.mono = Duration::from_secs(20);
    let again = touched(&script.poll());
    assert_eq!(again.len(), 1);
    script.accept_touch(again[0].0, "n1", 6);
    let (_, after) = script.poll_around_lease_write();
    assert_eq!(assigned(&after).len(), 2);
}

/// Returns a leader in a cluster with one node and one pool, without any allocation.
fn leader() -> Script {
    let mut script = Script::new(LeadershipTerm::of("1-a", Takeover::First));
    script.list_all(Cluster {
        nodes: vec![node("n")],
        ..Cluster::new("10.0.0.0/24", Vec::new())
    });
    script.leads();
    script
}

#[test]
fn every_loop_is_measured_and_gets_its_answers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
    // Each `impl RouteKind` is counted as a loop, because there is one loop for each kind of routes.
    let folders = [folder.clone(), folder.join("routes")];
    let files = folders.iter().flat_map(|it| std::fs::read_dir(it).unwrap());
    let files = files.map(|it| it.unwrap().path()).filter(|it| it.is_file());
    let count = |text: &str| {
        text.matches("\nimpl Loop for ").count() + text.matches("\nimpl RouteKind for ").count()
    };
    let loops: usize = files.map(|it| count(&read(it))).sum();
    let mut script = leader();
    script.poll();
    let registry = prometheus::Registry::new();
    let metrics = ControllerMetrics::register(&registry).unwrap();
    metrics.set(&script.controller.view(NOW));
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

#[test]
fn a_leader_that_stops_repeats_an_indeterminate_assignment_and_starts_none() {
    let mut script = Script::new(LeadershipTerm::of("1-a", Takeover::First));
    script.list_all(Cluster {
        nodes: vec![node("n1"), node("n2")],
        pools: vec![pod_cidr_pool("10.0.0.0/24")],
        ..Cluster::new("10.0.0.0/24", Vec::new())
    });
    script.leads();
    let (others, after) = script.poll_around_lease_write();
    for one in others {
        script.reject(one.id);
    }
    let [first, second] = &after[..] else {
        panic!("{after:?}")
    };
    let lost = || RequestOutcome::Indeterminate("no answer".to_owned());
    script.answer(first.id, lost());
    script.controller.stop();
    script.reject(second.id);
    // The API server has not executed the unanswered write so far, but it may still execute the write.
    let read = script.poll_for(|it| matches!(it, ApiRequest::Read(ObjectKind::Node, _)));
    let name = assigned(std::slice::from_ref(first))[0].name.clone();
    script.answer(read.id, RequestOutcome::Node(node(&name)));
    script.pass(Duration::from_secs(60));
    script.leads();
    let again = script.poll();
    assert_eq!(assigned(&again), assigned(std::slice::from_ref(first)));
    assert!(!script.controller.is_quiet());
    let cidrs = assigned(&again)[0].cidrs.clone();
    let served = Node {
        pod_cidrs: cidrs.into(),
        version: 9,
        ..node(&name)
    };
    script.answer(again[0].id, RequestOutcome::Node(served));
    assert!(script.poll().is_empty());
    assert!(script.controller.is_quiet() && script.controller.is_settled());
}

#[test]
fn overdue_records_of_podcidrs_take_turns_with_nodes_that_wait() {
    let mut script = Script::new(LeadershipTerm::of("1-a", Takeover::First));
    script.controller = Controller::new(ControllerSettings {
        critical_in_flight: 8,
        ..ControllerSettings::default()
    });
    script.list_all(Cluster {
        nodes: (0..40).map(|i| node(&format!("n{i}"))).collect(),
        pools: vec![pod_cidr_pool("10.0.0.0/16")],
        ..Cluster::new("10.0.0.0/16", Vec::new())
    });
    script.leads();
    let serve = |script: &mut Script, requests: &[OutgoingRequest]| {
        for out in requests {
            match &out.request {
                ApiRequest::AssignPodCidrs(it) => {
                    let served = Node {
                        pod_cidrs: it.cidrs.clone().into(),
                        version: 9,
                        ..node(&it.name)
                    };
                    script.answer(out.id, RequestOutcome::Node(served));
                }
                _ => script.reject(out.id),
            }
        }
    };
    let (others, first) = script.poll_around_lease_write();
    serve(&mut script, &others);
    serve(&mut script, &first);
    assert_eq!(assigned(&first).len(), 8);
    let counts = |out: &[OutgoingRequest]| {
        let is_record = |it: &&OutgoingRequest| {
            matches!(it.request, ApiRequest::Create(_, ObjectSpec::Subnet(_)))
        };
        (assigned(out).len(), out.iter().filter(is_record).count())
    };
    // While no record is overdue, nodes that wait come first.
    let second = script.poll();
    assert_eq!(counts(&second), (8, 0));
    serve(&mut script, &second);
    script.pass(Duration::from_secs(6));
    script.leads();
    let third = script.poll();
    assert_eq!(counts(&third), (6, 2));
    serve(&mut script, &third);
    // As soon as no node waits, all records are sent.
    let mut all = counts(&third);
    for _ in 0..8 {
        let next = script.poll();
        let (podcidrs, records) = counts(&next);
        all = (all.0 + podcidrs, all.1 + records);
        serve(&mut script, &next);
    }
    assert_eq!(all.0, 24, "each node gets podCIDRs");
    assert!(all.1 >= 16, "{all:?}");
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
    let mut script = leader();
    let requests = script.poll();
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
    script.answer(id, RequestOutcome::Block(block.clone()));
    assert!(!lists(&script.poll()), "another may have been first");
    script.on(ControllerEvent::Blocks(ObjectEvent::Applied(block)));
    assert!(lists(&script.poll()));
}

#[test]
fn a_leader_whose_lease_has_expired_sends_nothing_until_a_renewal() {
    let mut script = after_takeover(Some(WriteIntents::default()));
    script.term.valid_until = Duration::from_secs(100);
    script.leads();
    script.now.mono = Duration::from_secs(100);
    assert!(script.poll().is_empty());
    script.term.valid_until = Duration::from_secs(110);
    script.leads();
    assert!(!script.poll().is_empty());
}

#[test]
fn nodes_that_cannot_be_written_take_no_room_from_others() {
    let mut script = after_takeover(Some(WriteIntents::default()));
    let mut wide = pod_cidr_pool("10.0.0.0/16");
    wide.version = 9;
    script.on(ControllerEvent::Pools(ObjectEvent::Applied(wide)));
    let names = (0..600).map(|i| format!("bad{i}"));
    for name in names.chain(["good".to_owned()]) {
        let mut node = node(&name);
        node.version = 9;
        script.on(ControllerEvent::Nodes(ObjectEvent::Applied(node)));
    }
    for _ in 0..1_000 {
        let out = script.poll();
        for out in &out {
            let answer = match &out.request {
                ApiRequest::AssignPodCidrs(it) if &*it.name == "good" => return,
                ApiRequest::AssignPodCidrs(_) => {
                    RequestOutcome::Indeterminate("no answer".to_owned())
                }
                ApiRequest::Read(ObjectKind::Node, name) => RequestOutcome::Node(node(name)),
                _ => RequestOutcome::Rejected(Rejection::Busy(None)),
            };
            script.answer(out.id, answer);
        }
        if let Some(wanted) = script.controller.take_wanted() {
            script.term.named = wanted.number;
            script.leads();
        }
        if out.is_empty() {
            script.now.mono += Duration::from_millis(500);
        }
    }
    panic!("it was never assigned anything");
}

#[test]
fn a_takeover_lists_only_kinds_whose_watch_may_be_behind() {
    let known = SeenVersions {
        nodes: 7,
        subnets: 8,
        blocks: 9,
        claims: 10,
        routes: Some(11),
        frr_configurations: None,
    };
    let listed =
        |known: Option<SeenVersions>, answered_since: u64, vacant: u64, reached: [u64; 5]| {
            let mut script = before_takeover(Some(WriteIntents {
                known,
                ..WriteIntents::default()
            }));
            let [nodes, subnets, blocks, claims, routes] = reached;
            for event in [
                ControllerEvent::Nodes(ObjectEvent::Reached(nodes)),
                ControllerEvent::Subnets(ObjectEvent::Reached(subnets)),
                ControllerEvent::Blocks(ObjectEvent::Reached(blocks)),
                ControllerEvent::Claims(ObjectEvent::Reached(claims)),
                ControllerEvent::Routes(ObjectEvent::Reached(routes)),
            ] {
                script.on(event);
            }
            script.term.answered_since = Duration::from_secs(answered_since);
            script.term.vacant = Duration::from_secs(vacant);
            script.now.mono += Duration::from_secs(100);
            script.leads();
            let lists = script.poll().into_iter().filter_map(|it| match it.request {
                ApiRequest::List(ObjectKind::Node) => Some("nodes"),
                ApiRequest::List(ObjectKind::Subnet) => Some("subnets"),
                ApiRequest::List(ObjectKind::Block) => Some("blocks"),
                ApiRequest::List(ObjectKind::Claim) => Some("claims"),
                _ => None,
            });
            let mut lists: Vec<_> = lists.collect();
            lists.extend(script.controller.cache.awaits_routes.then_some("routes"));
            lists
        };
    let all = ["nodes", "subnets", "blocks", "claims", "routes"];
    let reached = [7, 8, 9, 10, 11];
    assert_eq!(listed(Some(known), 0, 16, reached), [""; 0]);
    assert_eq!(
        listed(Some(known), 0, 16, [6, 8, 8, 9, 10]),
        ["nodes", "blocks", "claims", "routes"]
    );
    assert_eq!(listed(None, 0, 16, reached), all, "the Lease says nothing");
    assert_eq!(
        listed(Some(known), 50, 16, reached),
        all,
        "the API server was not reached since"
    );
    assert_eq!(listed(Some(known), 0, 61, reached), all, "after a gap");
}

#[test]
fn without_frr_k8s_no_block_waits_and_objects_are_forgotten() {
    let settings = ControllerSettings {
        frr: Some(FrrSettings::default()),
        ..ControllerSettings::default()
    };
    let mut controller = Controller::new(settings);
    let now = NOW;
    let range = Cidr::parse_strict("10.0.0.0/26").unwrap();
    let is_routed =
        |it: &Controller| is_routed(&"n1".into(), &range, &OpenRoutes::default(), &it.cache);
    assert!(is_routed(&controller), "it is not known yet");
    let asked = Duration::ZERO;
    let object = FrrConfiguration {
        name: "n1".into(),
        uid: "u".into(),
        version: 1,
        is_ours: true,
        spec: json!({"bgp": {"routers": [{"prefixes": ["10.0.0.0/26"]}]}}),
    };
    for event in [
        ObjectEvent::Restarted { asked },
        ObjectEvent::Applied(object),
        ObjectEvent::Listed,
        ObjectEvent::Restarted { asked },
    ] {
        controller.on(ControllerEvent::FrrConfigurations(event), now);
        assert!(is_routed(&controller));
    }
    controller.on(ControllerEvent::NoFrrConfigurations, now);
    assert!(!is_routed(&controller), "the CRD is gone");
    assert!(!controller.cache.frr_configurations.is_listed());
    for event in [ObjectEvent::Restarted { asked }, ObjectEvent::Listed] {
        controller.on(ControllerEvent::FrrConfigurations(event), now);
    }
    assert!(controller.cache.frr_configurations.is_listed());
    assert!(!is_routed(&controller));
}

#[test]
fn an_inherited_interval_that_is_much_too_long_is_shortened_after_the_first_deletion_of_a_node() {
    let listed = |name: &str, block: &str| {
        let mut subnet = subnet(name, &[block], 0);
        subnet.spec.as_mut().unwrap().status_interval_seconds = 120;
        subnet
    };
    let subnets = vec![listed("n1", "10.0.0.0/28"), listed("n2", "10.0.0.16/28")];
    let mut script = Script::new(LeadershipTerm::of("1", Takeover::Clean));
    script.controller.settings.agent_writes_per_minute = 3;
    script.leads();
    script.list(Vec::new(), ControllerEvent::Routes);
    script.list_all(Cluster::new("10.0.0.0/24", subnets));
    let interval = |script: &mut Script| {
        script.write_subnets();
        let spec = script.subnets["n1"].spec.as_ref().unwrap();
        spec.status_interval_seconds
    };
    assert_eq!(interval(&mut script), 120, "two nodes need 40 s");
    script.pass(Duration::from_secs(60));
    assert_eq!(interval(&mut script), 120);
    script.delete_node("n2");
    script.pass(Duration::from_secs(1));
    assert_eq!(interval(&mut script), 0, "one node needs 20 s");
}
