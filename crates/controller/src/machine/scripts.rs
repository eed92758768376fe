//! Tests of blocks: which requests a leader sends after a sequence of events.

use super::script::{Cluster, Script};
use super::*;
use crate::cluster::lease::{LeadershipTerm, Takeover};
use crate::cluster::objects::{AgentReport, BlockReport, MachineIdentity};
use crate::cluster::request::{ObjectSpec, Rejection};
use crate::demand::tests::{NOW, node, objects, subnet};
use cadastre_api::AllocationMode;
use cadastre_api::{AllocatedBlock, FirstBlock, NodeRoutesSpec, NodeSubnetSpec};
use cadastre_core::Cidr;

/// A time that is slightly longer than the agent grace of 45 s.
const GRACE: Duration = Duration::from_secs(46);

impl Script {
    /// Waits for the length of the agent grace, and then answers the list of NodeSubnets that ends the grace. In this
    /// list, the agent of the node `name` reports that it uses `blocks`.
    fn agents_report(&mut self, name: &str, blocks: &[&str]) {
        self.pass(GRACE);
        let id = self
            .poll_for(|it| *it == ApiRequest::List(ObjectKind::Subnet))
            .id;
        if let Some(known) = self.subnets.get_mut(name) {
            known.version += 1;
            known.report = using(name, blocks).report;
        }
        let subnets = self.subnets.values().cloned().collect();
        self.answer(id, RequestOutcome::Subnets(subnets));
    }
}

fn is_creation(request: &ApiRequest) -> bool {
    matches!(request, ApiRequest::Create(_, ObjectSpec::Block(_)))
}

/// Returns a NodeSubnet whose agent uses `blocks`, although the NodeSubnet lists none.
fn using(name: &str, blocks: &[&str]) -> Subnet {
    let mut subnet = subnet(name, &[], 0);
    let block = |text: &&str| BlockReport {
        cidr: Cidr::parse_strict(text).unwrap(),
        uid: (*text).into(),
        used: 1,
        cooling: 0,
        free: 0,
        withdrawn: 0,
        released: false,
    };
    let report = subnet.report.as_mut().unwrap();
    report.blocks = blocks.iter().map(block).collect();
    subnet
}

/// Returns a block in quarantine. The block belonged to an earlier Node of this name. [`machine`] identifies the
/// machine of that earlier Node.
fn quarantined(name: &str, range: &str) -> Block {
    let mut block = objects(&subnet(name, &[range], 0)).remove(0);
    let spec = block.spec.as_mut().unwrap();
    spec.owner.uid = "earlier".into();
    spec.owner.quarantined = true;
    spec.owner.machine = machine();
    spec.until = Some(NOW.wall.saturating_add(Duration::from_secs(600)).unwrap());
    block
}

/// Returns a cluster in which the machine of node `a` has registered again, while the block of the earlier Node `a` is
/// still in quarantine. The agent of node `b` reports that it uses the blocks `uses`.
fn returning(uses: &[&str]) -> Cluster {
    let mut cluster = Cluster::new("10.0.0.0/26", vec![subnet("a", &[], 0)]);
    cluster.nodes[0].machine = machine();
    cluster.blocks.push(quarantined("a", ONE));
    cluster.nodes.push(node("b"));
    cluster.subnets.push(using("b", uses));
    cluster
}

fn machine() -> MachineIdentity {
    MachineIdentity {
        provider_id: None,
        machine_id: Some("m".into()),
    }
}

const ONE: &str = "10.0.0.0/28";

/// Back-off of a call after its first failure.
const PAUSE: Duration = Duration::from_millis(100);

#[test]
fn a_block_of_a_node_deleted_before_its_creation_goes_to_a_waiting_node() {
    let wants = || vec![subnet("a", &[], 1), subnet("b", &[], 1)];
    // First the API server rejects the creation of the block because it is busy. Then the node is deleted.
    let mut script = Script::leading(Cluster::new(ONE, wants()), Duration::ZERO);
    let OutgoingRequest { id, request, .. } = script.poll_for(is_creation);
    assert!(
        matches!(&request, ApiRequest::Create(_, ObjectSpec::Block(spec)) if &*spec.owner.name == "a")
    );
    let busy = || RequestOutcome::Rejected(Rejection::Busy(None));
    script.answer(id, busy());
    assert!(script.creations().is_empty());
    script.delete_node("a");
    script.pass(PAUSE);
    assert_eq!(script.creations(), ["b"]);
    // First the node is deleted. Then the API server rejects the creation of the block because it is busy.
    let mut script = Script::leading(Cluster::new(ONE, wants()), Duration::ZERO);
    let id = script.poll_for(is_creation).id;
    script.delete_node("a");
    assert!(script.creations().is_empty());
    script.answer(id, busy());
    script.pass(PAUSE);
    assert_eq!(script.creations(), ["b"]);
}

#[test]
fn a_block_of_indeterminate_creation_stays_allocated_when_its_node_is_deleted() {
    let wants = vec![subnet("a", &[], 1), subnet("b", &[], 1)];
    let mut script = Script::leading(Cluster::new(ONE, wants), Duration::ZERO);
    let id = script.poll_for(is_creation).id;
    script.answer(id, RequestOutcome::Indeterminate("lost".to_owned()));
    script.delete_node("a");
    let out = script.poll();
    let mut requests = out.iter().map(|it| &it.request);
    assert!(!requests.any(is_creation), "it may exist");
    let is_read =
        |it: &&OutgoingRequest| matches!(it.request, ApiRequest::Read(ObjectKind::Block, _));
    let id = out.iter().find(is_read).unwrap().id;
    script.answer(id, RequestOutcome::Rejected(Rejection::Missing));
    script.pass(PAUSE);
    assert_eq!(script.creations(), ["b"]);
}

#[test]
fn a_node_created_while_nobody_led_gets_a_nodesubnet_for_its_demand() {
    let mut cluster = Cluster::new(ONE, Vec::new());
    cluster.nodes.push(node("a"));
    let spec = cluster.pools[0].spec.as_mut().unwrap();
    spec.first_block = FirstBlock::OnDemand;
    let mut script = Script::leading(cluster, Duration::ZERO);
    assert_eq!(script.write_subnets(), [("a".to_owned(), Vec::new())]);
}

#[test]
fn a_node_of_a_disabled_pool_gets_a_nodesubnet() {
    let mut cluster = Cluster::new(ONE, Vec::new());
    cluster.nodes.push(node("a"));
    cluster.pools[0].spec.as_mut().unwrap().disabled = true;
    let mut script = Script::leading(cluster, Duration::ZERO);
    assert_eq!(script.write_subnets(), [("a".to_owned(), Vec::new())]);
}

#[test]
fn after_a_gap_nodes_that_no_pool_serves_get_nodesubnets_to_report_in() {
    for gap in [0, 300] {
        let mut cluster = Cluster::new(ONE, Vec::new());
        cluster.nodes.push(node("a"));
        let spec = cluster.pools[0].spec.as_mut().unwrap();
        spec.node_selector = Some(serde_json::from_str(r#"{"matchLabels":{"its":"no"}}"#).unwrap());
        let mut script = Script::leading(cluster, Duration::from_secs(gap));
        let lists = script.write_subnets();
        let has_one = lists == [("a".to_owned(), Vec::new())];
        assert_eq!(has_one, gap > 0, "{lists:?}");
    }
}

#[test]
fn the_agent_grace_begins_once_agents_can_report() {
    let mut script = Script::new(LeadershipTerm {
        vacant: Duration::from_secs(300),
        ..LeadershipTerm::of("1", Takeover::Clean)
    });
    script.leads();
    // The lists take longer than the agent grace. So the grace would be over by now if it had begun when the term
    // began.
    script.pass(GRACE);
    let mut cluster = Cluster::new(ONE, Vec::new());
    cluster.nodes.push(node("a"));
    script.list_all(cluster);
    let lists_subnets = |it: &&OutgoingRequest| it.request == ApiRequest::List(ObjectKind::Subnet);
    let out = script.poll();
    let creates =
        |it: &OutgoingRequest| matches!(it.request, ApiRequest::Create(_, ObjectSpec::Subnet(_)));
    assert!(out.iter().any(creates), "{out:?}");
    assert!(!out.iter().any(|it| lists_subnets(&it)), "{out:?}");
    let wanted = script.controller.take_wanted().unwrap();
    assert!(!wanted.agents_heard);
    script.pass(GRACE);
    let out = script.poll();
    let list = out.iter().find(lists_subnets).unwrap();
    script.answer(list.id, RequestOutcome::Subnets(Vec::new()));
    let wanted = script.controller.take_wanted().unwrap();
    assert!(wanted.agents_heard, "the next leader need not listen again");
}

#[test]
fn podcidrs_are_recorded_after_some_seconds_although_nodes_wait() {
    for (seconds, records_first) in [(4, false), (6, true)] {
        let mut cluster = Cluster::new("10.0.0.0/16", Vec::new());
        cluster.pools[0].spec.as_mut().unwrap().allocation_mode = AllocationMode::NodeCIDR;
        cluster.nodes = (0..200).map(|at| node(&format!("n{at}"))).collect();
        let mut script = Script::leading(cluster, Duration::ZERO);
        script.poll();
        script.write_lease();
        for OutgoingRequest { id, request, .. } in script.poll() {
            let ApiRequest::AssignPodCidrs(assignment) = request else {
                continue;
            };
            let node = Node {
                version: 2,
                pod_cidrs: assignment.cidrs.into(),
                ..node(&assignment.name)
            };
            script.answer(id, RequestOutcome::Node(node));
        }
        script.pass(Duration::from_secs(seconds));
        let out = script.poll();
        let mut requests = out.iter().map(|it| &it.request);
        let is_either = |it: &&ApiRequest| {
            matches!(
                it,
                ApiRequest::Create(_, ObjectSpec::Subnet(_)) | ApiRequest::AssignPodCidrs(_)
            )
        };
        let first = requests.find(is_either).unwrap();
        let records = matches!(first, ApiRequest::Create(_, ObjectSpec::Subnet(_)));
        assert_eq!(records, records_first, "after {seconds} s: {first:?}");
    }
}

#[test]
fn after_a_gap_no_quarantined_block_is_returned_before_agents_have_reported() {
    for uses in [&[][..], &[ONE][..]] {
        let cluster = returning(&[]);
        let mut script = Script::leading(cluster, Duration::from_secs(300));
        let early = script.write_subnets();
        assert!(early.iter().all(|(_, it)| it.is_empty()), "{early:?}");
        script.agents_report("b", uses);
        let lists = script.write_subnets();
        let is_returned = lists.iter().any(|(name, it)| name == "a" && it == &[ONE]);
        assert_eq!(is_returned, uses.is_empty(), "{lists:?}");
    }
}

#[test]
fn no_quarantined_block_is_returned_while_another_agent_uses_it() {
    for uses in [&[][..], &[ONE][..]] {
        let cluster = returning(uses);
        let lists = Script::leading(cluster, Duration::ZERO).write_subnets();
        let is_returned = lists.iter().any(|(name, it)| name == "a" && it == &[ONE]);
        assert_eq!(is_returned, uses.is_empty(), "{lists:?}");
    }
}

#[test]
fn of_nested_blocks_a_machine_gets_the_outer_one_back() {
    let mut cluster = Cluster::new("10.0.0.0/26", vec![subnet("a", &[], 0)]);
    cluster.nodes[0].machine = machine();
    // The block 10.0.0.4/30 was created by a write that arrived late.
    cluster.blocks.push(quarantined("a", "10.0.0.4/30"));
    cluster.blocks.push(quarantined("a", ONE));
    let mut script = Script::leading(cluster, Duration::ZERO);
    let lists = script.write_subnets();
    let of_a = lists.iter().find(|(name, _)| name == "a");
    assert_eq!(of_a.unwrap().1, [ONE], "{lists:?}");
}

/// Returns a cluster in which a block belongs to node `a`, whose agent does not use it. No NodeSubnet lists the block,
/// and the agent of node `b` uses it.
fn with_block_of_another_agent() -> Cluster {
    let mut cluster = Cluster::new("10.0.0.0/26", vec![subnet("a", &[ONE], 0)]);
    // The IPAMBlock exists, but no NodeSubnet lists the block yet.
    cluster.subnets[0].spec = Ok(NodeSubnetSpec {
        blocks: Vec::<AllocatedBlock>::new(),
        ..cluster.subnets[0].spec.clone().unwrap()
    });
    cluster.subnets[0].report = Some(Box::new(AgentReport {
        node_uid: "a".into(),
        ..AgentReport::default()
    }));
    cluster.nodes.push(node("b"));
    cluster.subnets.push(using("b", &[]));
    cluster
}

#[test]
fn after_a_gap_a_block_in_no_nodesubnet_belongs_to_the_node_whose_agent_uses_it() {
    let cluster = with_block_of_another_agent();
    let mut script = Script::leading(cluster, Duration::from_secs(300));
    let early = script.write_subnets();
    assert!(early.iter().all(|(_, it)| it.is_empty()), "{early:?}");
    script.agents_report("b", &[ONE]);
    script.poll_for(|it| matches!(it, ApiRequest::Delete(ObjectKind::Block, _)));
}

#[test]
fn the_leader_after_the_one_that_heard_the_agents_ends_blocks_that_others_use() {
    let mut cluster = with_block_of_another_agent();
    cluster.subnets[1] = using("b", &[ONE]);
    let mut script = Script::leading(cluster, Duration::ZERO);
    script.poll_for(|it| matches!(it, ApiRequest::Delete(ObjectKind::Block, _)));
}

#[test]
fn no_block_is_deleted_before_the_noderoutes_of_earlier_leaders_are_listed() {
    let is_deletion = |it: &ApiRequest| matches!(it, ApiRequest::Delete(ObjectKind::Block, _));
    let mut script = Script::new(LeadershipTerm {
        vacant: Duration::from_secs(300),
        ..LeadershipTerm::of("1", Takeover::Clean)
    });
    script.list(Vec::new(), ControllerEvent::Routes);
    script.pass(Duration::from_secs(1));
    script.leads();
    script.list_all(with_block_of_another_agent());
    let mut list = None;
    script.write_subnets_and(|it| {
        if it.request == ApiRequest::List(ObjectKind::Routes) {
            list = Some(it.id);
        }
    });
    script.agents_report("b", &[ONE]);
    let out = script.poll();
    assert!(!out.iter().any(|it| is_deletion(&it.request)), "{out:?}");
    let routes = Routes {
        name: "a".into(),
        uid: "routes".into(),
        version: 8,
        spec: NodeRoutesSpec {
            destinations: vec![ONE.to_owned()],
            ..NodeRoutesSpec::default()
        },
    };
    let outcome = RequestOutcome::RoutesList(vec![routes.clone()]);
    script.answer(list.expect("the list is requested"), outcome);
    script.pass(Duration::from_secs(60));
    script.leads();
    let out = script.poll();
    assert!(!out.iter().any(|it| is_deletion(&it.request)), "{out:?}");
    script.on(ControllerEvent::Routes(ObjectEvent::Deleted(routes)));
    script.pass(Duration::from_secs(60));
    script.leads();
    script.poll_for(is_deletion);
}

#[test]
fn after_a_gap_a_block_that_a_late_write_lists_stays() {
    let late = subnet("a", &[ONE], 0);
    let mut cluster = Cluster::new("10.0.0.0/26", vec![late.clone()]);
    // The IPAMBlock exists. The write that creates the NodeSubnet with this block has not reached the API server yet.
    cluster.subnets.clear();
    let mut script = Script::leading(cluster, Duration::from_secs(300));
    let early = script.write_subnets();
    assert!(early.iter().all(|(_, it)| it.is_empty()), "{early:?}");
    script.on(ControllerEvent::Subnets(ObjectEvent::Applied(Subnet {
        version: 9,
        report: None,
        ..late
    })));
    let lists = script.write_subnets();
    assert!(lists.iter().all(|(_, it)| it == &[ONE]), "{lists:?}");
}

#[test]
fn after_a_list_of_an_older_state_nothing_is_sent() {
    let mut cluster = Cluster::new(ONE, vec![subnet("a", &[], 1)]);
    cluster.nodes[0].version = 495;
    let mut script = Script::leading(cluster, Duration::ZERO);
    script.on(ControllerEvent::Leadership(Leadership::Standby {
        leader: None,
    }));
    script.pass(Duration::from_secs(1));
    script.term = LeadershipTerm::of("2", Takeover::Unclean);
    script.leads();
    let id = script
        .poll_for(|it| *it == ApiRequest::List(ObjectKind::Node))
        .id;
    let mut older = node("a");
    (older.uid, older.version) = ("another".into(), 283);
    script.answer(id, RequestOutcome::Nodes(vec![older]));
    assert!(script.controller.is_put_back());
    assert!(script.poll().is_empty());
}
