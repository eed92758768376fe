//! Tests that play a sequence of events to a leader and check which requests it sends.

use super::*;
use crate::cluster::lease::{Takeover, Tenure};
use crate::cluster::names::NodeName;
use crate::cluster::objects::{AgentReport, BlockReport, MachineIdentity};
use crate::cluster::request::{ObjectSpec, Rejection};
use crate::demand::tests::{NOW, node, objects, pool, subnet};
use cadastre_api::AllocationMode;
use cadastre_api::{AllocatedBlock, FirstBlock, NodeSubnetSpec};
use cadastre_core::Cidr;

/// Longer than the time in which a leader lets agents report after a gap.
const LISTENED: Duration = Duration::from_secs(46);

struct Script {
    controller: Controller,
    now: Now,
    /// NodeSubnets as last written or reported.
    subnets: BTreeMap<NodeName, Subnet>,
}

struct Cluster {
    nodes: Vec<Node>,
    pools: Vec<Pool>,
    subnets: Vec<Subnet>,
    blocks: Vec<Block>,
}

impl Cluster {
    /// Builds one node per NodeSubnet, the blocks that the NodeSubnets list, and pool `p` with this range.
    fn new(range: &str, subnets: Vec<Subnet>) -> Self {
        Cluster {
            nodes: subnets.iter().map(|it| node(&it.name)).collect(),
            pools: vec![pool("p", range)],
            blocks: subnets.iter().flat_map(objects).collect(),
            subnets,
        }
    }
}

impl Script {
    /// Returns a leader that has received all lists. Nobody led for the time `vacant` before it.
    fn leading(cluster: Cluster, vacant: Duration) -> Self {
        let mut script = Script {
            controller: Controller::new(ControllerSettings::default()),
            now: NOW,
            subnets: BTreeMap::new(),
        };
        for it in &cluster.subnets {
            script.subnets.insert(it.name.clone(), it.clone());
        }
        script.leads(vacant, 0);
        script.list(cluster.nodes, ControllerEvent::Nodes);
        script.list(cluster.pools, ControllerEvent::Pools);
        script.list(cluster.subnets, ControllerEvent::Subnets);
        script.list(cluster.blocks, ControllerEvent::Blocks);
        script.list(Vec::new(), ControllerEvent::ServiceRanges);
        script.list(Vec::new(), ControllerEvent::Pods);
        script
    }

    /// Makes the controller lead. Nobody led for the time `vacant` before; the Lease is written up to the number
    /// `named`.
    fn leads(&mut self, vacant: Duration, named: u64) {
        self.on(ControllerEvent::Leadership(Leadership::Leading(Tenure {
            term: "1".into(),
            takeover: Takeover::Clean,
            valid_until: Duration::MAX,
            vacant,
            inherited: None,
            answered_since: Duration::ZERO,
            named,
        })));
    }

    fn on(&mut self, event: ControllerEvent) {
        self.controller.on(event, self.now);
    }

    fn list<T>(&mut self, objects: Vec<T>, event: impl Fn(ObjectEvent<T>) -> ControllerEvent) {
        let asked = self.now.mono;
        self.on(event(ObjectEvent::Restarted { asked }));
        for object in objects {
            self.on(event(ObjectEvent::Applied(object)));
        }
        self.on(event(ObjectEvent::Listed));
    }

    fn pass(&mut self, time: Duration) {
        self.now.mono += time;
    }

    /// Returns all requests that the controller wants to send now.
    fn asked(&mut self) -> Vec<(RequestId, ApiRequest)> {
        let asked = std::iter::from_fn(|| self.controller.poll(self.now));
        asked.map(|it| (it.id, it.request)).collect()
    }

    /// Answers the wanted write of the Lease with success.
    fn named(&mut self) {
        let wanted = self.controller.take_wanted().unwrap();
        self.leads(Duration::ZERO, wanted.number);
    }

    /// Returns the one request that fulfils `kind` among all requests that the controller wants to send now.
    fn asked_for(&mut self, kind: impl Fn(&ApiRequest) -> bool) -> (RequestId, ApiRequest) {
        let asked = self.asked();
        let texts = format!("{asked:?}");
        let mut found = asked.into_iter().filter(|(_, it)| kind(it));
        let one = found.next().unwrap_or_else(|| panic!("not in {texts}"));
        assert!(found.next().is_none(), "more than one in {texts}");
        one
    }

    /// Returns the names of the nodes for which blocks are to be created now.
    fn creations(&mut self) -> Vec<String> {
        let asked = self.asked();
        let creations = asked.iter().filter_map(|(_, it)| match it {
            ApiRequest::Create(_, ObjectSpec::Block(spec)) => Some(spec.owner.name.to_string()),
            _ => None,
        });
        creations.collect()
    }

    /// Answers all writes of NodeSubnets with success. Returns the names of their nodes and the blocks that they list.
    fn lists(&mut self) -> Vec<(String, Vec<String>)> {
        let mut lists = Vec::new();
        for (id, request) in self.asked() {
            let (name, spec) = match request {
                ApiRequest::Create(name, ObjectSpec::Subnet(spec)) => (name, spec),
                ApiRequest::Replace(known, ObjectSpec::Subnet(spec)) => (known.name, spec),
                _ => continue,
            };
            let blocks = spec.blocks.iter().map(|it| it.cidr.clone());
            lists.push((name.to_string(), blocks.collect()));
            let new = subnet(&name, &[], 0);
            let known = self.subnets.entry((*name).into()).or_insert(new);
            (known.spec, known.version) = (Ok(spec), known.version + 1);
            let answer = RequestOutcome::Subnet(known.clone());
            self.on(ControllerEvent::Answer(id, answer));
        }
        lists
    }

    fn gone(&mut self, name: &str) {
        let mut gone = node(name);
        gone.version = 9;
        self.on(ControllerEvent::Nodes(ObjectEvent::Deleted(gone)));
    }

    /// Answers the list of NodeSubnets that ends the time for agents' reports. In it, the agent of `name` uses these
    /// blocks.
    fn hear(&mut self, name: &str, blocks: &[&str]) {
        self.pass(LISTENED);
        let (id, _) = self.asked_for(|it| matches!(it, ApiRequest::List(ObjectKind::Subnet)));
        if let Some(known) = self.subnets.get_mut(name) {
            known.version += 1;
            known.report = using(name, blocks).report;
        }
        let subnets = self.subnets.values().cloned().collect();
        self.on(ControllerEvent::Answer(
            id,
            RequestOutcome::Subnets(subnets),
        ));
    }
}

fn is_creation(request: &ApiRequest) -> bool {
    matches!(request, ApiRequest::Create(_, ObjectSpec::Block(_)))
}

/// Returns a NodeSubnet that lists no blocks, although the node's agent reports that it uses these.
fn using(name: &str, blocks: &[&str]) -> Subnet {
    let mut subnet = subnet(name, &[], 0);
    let word = |text: &&str| BlockReport {
        cidr: Cidr::parse_strict(text).unwrap(),
        uid: (*text).into(),
        used: 1,
        cooling: 0,
        free: 0,
        released: false,
    };
    let report = subnet.report.as_mut().unwrap();
    report.blocks = blocks.iter().map(word).collect();
    subnet
}

/// Returns a quarantined block of an earlier node with that name, which ran on the machine of [`machine`].
fn resting(name: &str, range: &str) -> Block {
    let mut block = objects(&subnet(name, &[range], 0)).remove(0);
    let spec = block.spec.as_mut().unwrap();
    spec.owner.uid = "earlier".into();
    spec.owner.quarantined = true;
    spec.owner.machine = machine();
    spec.until = Some(NOW.wall.saturating_add(Duration::from_secs(600)).unwrap());
    block
}

/// Returns a cluster in which the machine of node `a` has registered again while its earlier block is in quarantine.
/// The agent of node `b` uses the blocks `uses`.
fn returning(uses: &[&str]) -> Cluster {
    let mut cluster = Cluster::new("10.0.0.0/26", vec![subnet("a", &[], 0)]);
    cluster.nodes[0].machine = machine();
    cluster.blocks.push(resting("a", ONE));
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

/// How long the controller waits after one failed call before it uses the block's range again.
const PAUSE: Duration = Duration::from_millis(100);

#[test]
fn a_block_of_a_node_that_dies_before_its_creation_goes_to_who_waits() {
    let wants = || vec![subnet("a", &[], 1), subnet("b", &[], 1)];
    // The creation is rejected as busy, and then the node is deleted.
    let mut script = Script::leading(Cluster::new(ONE, wants()), Duration::ZERO);
    let (id, request) = script.asked_for(is_creation);
    assert!(
        matches!(&request, ApiRequest::Create(_, ObjectSpec::Block(spec)) if &*spec.owner.name == "a")
    );
    let busy = || RequestOutcome::Rejected(Rejection::Busy(None));
    script.on(ControllerEvent::Answer(id, busy()));
    assert!(script.creations().is_empty());
    script.gone("a");
    script.pass(PAUSE);
    assert_eq!(script.creations(), ["b"]);
    // The node is deleted, and then the creation is rejected as busy.
    let mut script = Script::leading(Cluster::new(ONE, wants()), Duration::ZERO);
    let (id, _) = script.asked_for(is_creation);
    script.gone("a");
    assert!(script.creations().is_empty());
    script.on(ControllerEvent::Answer(id, busy()));
    script.pass(PAUSE);
    assert_eq!(script.creations(), ["b"]);
}

#[test]
fn a_block_of_unclear_creation_stays_taken_when_its_node_dies() {
    let wants = vec![subnet("a", &[], 1), subnet("b", &[], 1)];
    let mut script = Script::leading(Cluster::new(ONE, wants), Duration::ZERO);
    let (id, _) = script.asked_for(is_creation);
    script.on(ControllerEvent::Answer(
        id,
        RequestOutcome::Indeterminate("lost".to_owned()),
    ));
    script.gone("a");
    let asked = script.asked();
    assert!(!asked.iter().any(|(_, it)| is_creation(it)), "it may exist");
    let mut reads = asked.iter();
    let (id, _) = reads
        .find(|(_, it)| matches!(it, ApiRequest::Read(ObjectKind::Block, _)))
        .unwrap();
    let id = *id;
    script.on(ControllerEvent::Answer(
        id,
        RequestOutcome::Rejected(Rejection::Missing),
    ));
    script.pass(PAUSE);
    assert_eq!(script.creations(), ["b"]);
}

#[test]
fn a_node_that_came_while_nobody_led_gets_a_nodesubnet_to_ask_in() {
    let mut cluster = Cluster::new(ONE, Vec::new());
    cluster.nodes.push(node("a"));
    let spec = cluster.pools[0].spec.as_mut().unwrap();
    spec.first_block = FirstBlock::OnDemand;
    let mut script = Script::leading(cluster, Duration::ZERO);
    assert_eq!(script.lists(), [("a".to_owned(), Vec::new())]);
}

#[test]
fn a_node_of_a_pool_that_serves_nobody_has_a_node_subnet_that_late_creations_find() {
    let mut cluster = Cluster::new(ONE, Vec::new());
    cluster.nodes.push(node("a"));
    cluster.pools[0].spec.as_mut().unwrap().disabled = true;
    let mut script = Script::leading(cluster, Duration::ZERO);
    assert_eq!(script.lists(), [("a".to_owned(), Vec::new())]);
}

#[test]
fn after_a_gap_agents_can_speak_of_blocks_of_a_pool_that_serves_them_no_more() {
    for gap in [0, 300] {
        let mut cluster = Cluster::new(ONE, Vec::new());
        cluster.nodes.push(node("a"));
        let spec = cluster.pools[0].spec.as_mut().unwrap();
        spec.node_selector = Some(serde_json::from_str(r#"{"matchLabels":{"its":"no"}}"#).unwrap());
        let mut script = Script::leading(cluster, Duration::from_secs(gap));
        let lists = script.lists();
        let has_one = lists == [("a".to_owned(), Vec::new())];
        assert_eq!(has_one, gap > 0, "{lists:?}");
    }
}

#[test]
fn after_a_gap_agents_have_their_time_from_when_they_can_speak() {
    let mut script = Script {
        controller: Controller::new(ControllerSettings::default()),
        now: NOW,
        subnets: BTreeMap::new(),
    };
    script.leads(Duration::from_secs(300), 0);
    // The API server takes so long to list that the time for agents' reports would be over if it had begun with the
    // term.
    script.pass(LISTENED);
    script.list(vec![node("a")], ControllerEvent::Nodes);
    script.list(vec![pool("p", ONE)], ControllerEvent::Pools);
    script.list(Vec::new(), ControllerEvent::Subnets);
    script.list(Vec::new(), ControllerEvent::Blocks);
    script.list(Vec::new(), ControllerEvent::ServiceRanges);
    script.list(Vec::new(), ControllerEvent::Pods);
    let lists_all = |asked: &[(RequestId, ApiRequest)]| {
        let mut asked = asked.iter();
        asked.any(|(_, it)| matches!(it, ApiRequest::List(ObjectKind::Subnet)))
    };
    let asked = script.asked();
    let creates = |(_, it): &(RequestId, ApiRequest)| {
        matches!(it, ApiRequest::Create(_, ObjectSpec::Subnet(_)))
    };
    assert!(asked.iter().any(creates), "{asked:?}");
    assert!(!lists_all(&asked), "{asked:?}");
    let wanted = script.controller.take_wanted().unwrap();
    assert!(!wanted.agents_heard);
    script.pass(LISTENED);
    let asked = script.asked();
    assert!(lists_all(&asked), "{asked:?}");
    let list = asked
        .into_iter()
        .find(|it| lists_all(std::slice::from_ref(it)));
    script.on(ControllerEvent::Answer(
        list.unwrap().0,
        RequestOutcome::Subnets(Vec::new()),
    ));
    let wanted = script.controller.take_wanted().unwrap();
    assert!(wanted.agents_heard, "the next leader need not listen again");
}

#[test]
fn what_a_crowd_has_got_is_recorded_before_long() {
    for (seconds, records_first) in [(4, false), (6, true)] {
        let mut cluster = Cluster::new("10.0.0.0/16", Vec::new());
        cluster.pools[0].spec.as_mut().unwrap().allocation_mode = AllocationMode::NodeCIDR;
        cluster.nodes = (0..200).map(|at| node(&format!("n{at}"))).collect();
        let mut script = Script::leading(cluster, Duration::ZERO);
        script.asked();
        script.named();
        for (id, request) in script.asked() {
            let ApiRequest::AssignPodCidrs(assignment) = request else {
                continue;
            };
            let node = Node {
                version: 2,
                pod_cidrs: assignment.cidrs.into(),
                ..node(&assignment.name)
            };
            script.on(ControllerEvent::Answer(id, RequestOutcome::Node(node)));
        }
        script.pass(Duration::from_secs(seconds));
        let asked = script.asked();
        let mut asked = asked.iter().map(|(_, it)| it);
        let is_either = |it: &&ApiRequest| {
            matches!(
                it,
                ApiRequest::Create(_, ObjectSpec::Subnet(_)) | ApiRequest::AssignPodCidrs(_)
            )
        };
        let first = asked.find(is_either).unwrap();
        let records = matches!(first, ApiRequest::Create(_, ObjectSpec::Subnet(_)));
        assert_eq!(records, records_first, "after {seconds} s: {first:?}");
    }
}

#[test]
fn after_a_gap_nothing_that_rests_goes_back_before_agents_have_spoken() {
    for uses in [&[][..], &[ONE][..]] {
        let cluster = returning(&[]);
        let mut script = Script::leading(cluster, Duration::from_secs(300));
        let early = script.lists();
        assert!(early.iter().all(|(_, it)| it.is_empty()), "{early:?}");
        script.hear("b", uses);
        let lists = script.lists();
        let is_given = lists.iter().any(|(name, it)| name == "a" && it == &[ONE]);
        assert_eq!(is_given, uses.is_empty(), "{lists:?}");
    }
}

#[test]
fn what_rests_does_not_go_back_while_another_nodes_agent_uses_it() {
    for uses in [&[][..], &[ONE][..]] {
        let cluster = returning(uses);
        let lists = Script::leading(cluster, Duration::ZERO).lists();
        let is_given = lists.iter().any(|(name, it)| name == "a" && it == &[ONE]);
        assert_eq!(is_given, uses.is_empty(), "{lists:?}");
    }
}

#[test]
fn of_blocks_that_lie_in_each_other_a_machine_gets_the_outer_one_back() {
    let mut cluster = Cluster::new("10.0.0.0/26", vec![subnet("a", &[], 0)]);
    cluster.nodes[0].machine = machine();
    // The inner block is from a creation that arrived late.
    cluster.blocks.push(resting("a", "10.0.0.4/30"));
    cluster.blocks.push(resting("a", ONE));
    let mut script = Script::leading(cluster, Duration::ZERO);
    let lists = script.lists();
    let given = lists.iter().find(|(name, _)| name == "a");
    assert_eq!(given.unwrap().1, [ONE], "{lists:?}");
}

#[test]
fn after_a_gap_a_block_that_nobody_is_listed_is_whose_agent_uses_it() {
    let mut cluster = Cluster::new("10.0.0.0/26", vec![subnet("a", &[ONE], 0)]);
    // The block's object exists, but no NodeSubnet lists it yet.
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
    let mut script = Script::leading(cluster, Duration::from_secs(300));
    let early = script.lists();
    assert!(early.iter().all(|(_, it)| it.is_empty()), "{early:?}");
    script.hear("b", &[ONE]);
    let asked = script.asked();
    let ends = asked
        .iter()
        .any(|(_, it)| matches!(it, ApiRequest::Delete(ObjectKind::Block, _)));
    assert!(ends, "{asked:?}");
}

#[test]
fn after_a_gap_what_a_late_write_lists_is_not_taken_back() {
    let late = subnet("a", &[ONE], 0);
    let mut cluster = Cluster::new("10.0.0.0/26", vec![late.clone()]);
    // The block's object exists, but the write that creates the NodeSubnet with it has not arrived yet.
    cluster.subnets.clear();
    let mut script = Script::leading(cluster, Duration::from_secs(300));
    let early = script.lists();
    assert!(early.iter().all(|(_, it)| it.is_empty()), "{early:?}");
    script.on(ControllerEvent::Subnets(ObjectEvent::Applied(Subnet {
        version: 9,
        report: None,
        ..late
    })));
    let lists = script.lists();
    assert!(lists.iter().all(|(_, it)| it == &[ONE]), "{lists:?}");
}

#[test]
fn a_list_that_shows_an_older_state_ends_all_asking() {
    let mut cluster = Cluster::new(ONE, vec![subnet("a", &[], 1)]);
    cluster.nodes[0].version = 495;
    let mut script = Script::leading(cluster, Duration::ZERO);
    script.on(ControllerEvent::Leadership(Leadership::Standby {
        leader: None,
    }));
    script.pass(Duration::from_secs(1));
    script.on(ControllerEvent::Leadership(Leadership::Leading(Tenure {
        term: "2".into(),
        takeover: Takeover::Unclean,
        valid_until: Duration::MAX,
        vacant: Duration::ZERO,
        inherited: None,
        answered_since: Duration::ZERO,
        named: 0,
    })));
    let (id, _) = script.asked_for(|it| matches!(it, ApiRequest::List(ObjectKind::Node)));
    let mut older = node("a");
    (older.uid, older.version) = ("another".into(), 283);
    script.on(ControllerEvent::Answer(
        id,
        RequestOutcome::Nodes(vec![older]),
    ));
    assert!(script.controller.is_put_back());
    assert!(script.asked().is_empty());
}
