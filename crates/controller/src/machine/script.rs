//! A controller for tests. The test passes events to the controller, and checks the requests that the controller
//! returns.

use super::*;
use crate::cluster::lease::{LeadershipTerm, Takeover};
use crate::cluster::names::NodeName;
use crate::cluster::request::ObjectSpec;
use crate::demand::tests::{NOW, node, objects, pool, subnet};

/// The objects that the API server lists to the controller.
#[derive(Clone)]
pub(super) struct Cluster {
    pub nodes: Vec<Node>,
    pub pools: Vec<Pool>,
    pub subnets: Vec<Subnet>,
    pub blocks: Vec<Block>,
    pub claims: Vec<Claim>,
    pub pods: Vec<Pod>,
}

impl Cluster {
    /// Builds a cluster with these NodeSubnets, one node for each of them, the blocks that the NodeSubnets list, and
    /// the pool `p`, which has this range.
    pub(super) fn new(range: &str, subnets: Vec<Subnet>) -> Self {
        Cluster {
            nodes: subnets.iter().map(|it| node(&it.name)).collect(),
            pools: vec![pool("p", range)],
            blocks: subnets.iter().flat_map(objects).collect(),
            subnets,
            claims: Vec::new(),
            pods: Vec::new(),
        }
    }
}

pub(super) struct Script {
    pub controller: Controller,
    pub now: Now,
    /// The term in which [`Script::leads`] makes the controller lead.
    pub term: LeadershipTerm,
    /// The NodeSubnets as the API server has them after all lists and writes so far.
    pub subnets: BTreeMap<NodeName, Subnet>,
}

impl Script {
    /// Returns a controller that does not lead and has received no list.
    pub(super) fn new(term: LeadershipTerm) -> Self {
        Script {
            controller: Controller::new(ControllerSettings::default()),
            now: NOW,
            term,
            subnets: BTreeMap::new(),
        }
    }

    /// Returns a leader that has received all lists. Before its term, nobody led for the time `vacant`.
    pub(super) fn leading(cluster: Cluster, vacant: Duration) -> Self {
        let mut script = Script::new(LeadershipTerm {
            vacant,
            ..LeadershipTerm::of("1", Takeover::Clean)
        });
        script.leads();
        script.list(Vec::new(), ControllerEvent::Routes);
        script.list_all(cluster);
        script
    }

    /// Makes the controller lead in [`Script::term`]. If the controller leads already, renews its Lease.
    pub(super) fn leads(&mut self) {
        let term = self.term.clone();
        self.on(ControllerEvent::Leadership(Leadership::Leading(term)));
    }

    pub(super) fn on(&mut self, event: ControllerEvent) {
        self.controller.on(event, self.now);
    }

    pub(super) fn answer(&mut self, id: RequestId, outcome: RequestOutcome) {
        self.on(ControllerEvent::Answer(id, outcome));
    }

    /// Delivers the lists of all watches except that of the NodeRoutes.
    pub(super) fn list_all(&mut self, cluster: Cluster) {
        for it in &cluster.subnets {
            self.subnets.insert(it.name.clone(), it.clone());
        }
        self.list(cluster.nodes, ControllerEvent::Nodes);
        self.list(cluster.pools, ControllerEvent::Pools);
        self.list(cluster.subnets, ControllerEvent::Subnets);
        self.list(cluster.blocks, ControllerEvent::Blocks);
        self.list(Vec::new(), ControllerEvent::ServiceRanges);
        self.list(cluster.claims, ControllerEvent::Claims);
        self.list(cluster.pods, ControllerEvent::Pods);
    }

    pub(super) fn list<T>(
        &mut self,
        objects: Vec<T>,
        event: impl Fn(ObjectEvent<T>) -> ControllerEvent,
    ) {
        let asked = self.now.mono;
        self.on(event(ObjectEvent::Restarted { asked }));
        for object in objects {
            self.on(event(ObjectEvent::Applied(object)));
        }
        self.on(event(ObjectEvent::Listed));
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now.mono += time;
    }

    /// Returns all requests that the controller wants to send now.
    pub(super) fn poll(&mut self) -> Vec<OutgoingRequest> {
        std::iter::from_fn(|| self.controller.poll(self.now)).collect()
    }

    /// Returns the request for which `kind` returns true. Panics if the controller wants to send no such request now,
    /// or several.
    pub(super) fn poll_for(&mut self, kind: impl Fn(&ApiRequest) -> bool) -> OutgoingRequest {
        let out = self.poll();
        let texts = format!("{out:?}");
        let mut found = out.into_iter().filter(|it| kind(&it.request));
        let one = found.next().unwrap_or_else(|| panic!("not in {texts}"));
        assert!(found.next().is_none(), "more than one in {texts}");
        one
    }

    /// Lets the wanted Lease write succeed. Panics if the controller wants no Lease write.
    pub(super) fn write_lease(&mut self) {
        self.term.named = self.controller.take_wanted().unwrap().number;
        self.leads();
    }

    /// Returns the names of the nodes for which the controller wants to create blocks now.
    pub(super) fn creations(&mut self) -> Vec<String> {
        let out = self.poll();
        let creations = out.iter().filter_map(|it| match &it.request {
            ApiRequest::Create(_, ObjectSpec::Block(spec)) => Some(spec.owner.name.to_string()),
            _ => None,
        });
        creations.collect()
    }

    /// Answers all writes of NodeSubnets with success. Returns the name of each written NodeSubnet, with the blocks
    /// that it lists.
    pub(super) fn write_subnets(&mut self) -> Vec<(String, Vec<String>)> {
        self.write_subnets_and(|_| {})
    }

    /// Does what [`Script::write_subnets`] does, and also passes each request of the controller to `look`.
    pub(super) fn write_subnets_and(
        &mut self,
        mut look: impl FnMut(&OutgoingRequest),
    ) -> Vec<(String, Vec<String>)> {
        let mut written = Vec::new();
        for out in self.poll() {
            look(&out);
            let OutgoingRequest { id, request, .. } = out;
            let (name, spec) = match request {
                ApiRequest::Create(name, ObjectSpec::Subnet(spec)) => (name, spec),
                ApiRequest::Replace(known, ObjectSpec::Subnet(spec)) => (known.name, spec),
                _ => continue,
            };
            let blocks = spec.blocks.iter().map(|it| it.cidr.clone());
            written.push((name.to_string(), blocks.collect()));
            let new = subnet(&name, &[], 0);
            let known = self.subnets.entry((*name).into()).or_insert(new);
            (known.spec, known.version) = (Ok(spec), known.version + 1);
            let outcome = RequestOutcome::Subnet(known.clone());
            self.answer(id, outcome);
        }
        written
    }

    pub(super) fn delete_node(&mut self, name: &str) {
        let mut gone = node(name);
        gone.version = 9;
        self.on(ControllerEvent::Nodes(ObjectEvent::Deleted(gone)));
    }
}
