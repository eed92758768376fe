//! One controller process: the shipped state machines, their watches, and the machine they run on.

use std::collections::BTreeMap;
use std::time::Duration;

use cadastre_controller::cluster::lease::{Elector, Leadership, LeaseContent, LeaseSettings};
use cadastre_controller::cluster::objects::{Block, Node, Pod, Pool, ServiceRange, Subnet};
use cadastre_controller::cluster::request::RequestId;
use cadastre_controller::{Controller, ControllerEvent, ControllerSettings, Now, OutgoingRequest};
use cadastre_daemon::watch::ObjectEvent;

use jiff::Timestamp;

use super::api::Api;
use super::clock::{Clocks, Time};
use super::known::Known;
use super::object_log::{Feed, Versioned};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watched {
    Nodes,
    Pools,
    Subnets,
    Blocks,
    Services,
    Pods,
}

impl Watched {
    pub const ALL: [Self; 6] = [
        Self::Nodes,
        Self::Pools,
        Self::Subnets,
        Self::Blocks,
        Self::Services,
        Self::Pods,
    ];
}

/// A place in which controllers run, one after the other.
pub struct Process {
    pub clocks: Clocks,
    /// The number of the current run; events for earlier runs are dropped.
    pub incarnation: u32,
    pub paused_until: Time,
    /// Until then nothing that it sends arrives, and it receives nothing.
    pub cut_until: Time,
    pub run: Option<Run>,
}

/// One run, from the start to a crash or stop.
pub struct Run {
    pub controller: Controller,
    pub elector: Elector,
    /// The leadership that the controller was last told.
    pub observed: Option<Leadership>,
    /// Whether a change of leadership is on its way to the controller.
    pub telling: bool,
    /// Whether a request about the Lease is under way.
    pub asked: bool,
    /// Whether it has read the Lease: nothing is listed before.
    pub heard: bool,
    /// When it last learned the state of the Lease for certain.
    pub read_at: Option<Duration>,
    /// The version and renewal time of the Lease that it last read.
    pub lease: Option<(u64, Timestamp)>,
    /// Whether agents have had time to publish since it began to lead.
    pub agents_heard: bool,
    /// How long nobody had led when it last tried to acquire the Lease.
    pub vacant: Duration,
    pub feeds: Feeds,
    pub known: Known,
    /// Requests under way or about to be sent.
    pub in_flight: BTreeMap<RequestId, OutgoingRequest>,
    /// When each of them was decided.
    pub decided: BTreeMap<RequestId, Time>,
    /// Requests that wait until the Lease is written.
    pub held: Vec<RequestId>,
    /// The intents that the controller wants in the Lease, on their way to the elector.
    pub wanted: Option<LeaseContent>,
    /// When controller and elector are called next.
    pub look_at: Option<Time>,
    pub lease_at: Option<Time>,
    /// When the controller wants to be called if nothing happens before.
    pub wake_at: Option<Time>,
    /// When a graceful stop ends without having settled everything.
    pub stopping: Option<Time>,
    pub released: bool,
    /// The number of requests at one moment of virtual time: too many mean that a loop spins.
    pub burst: (Time, u32),
}

#[derive(Default)]
pub struct Feeds {
    pub nodes: Feed<Node>,
    pub pools: Feed<Pool>,
    pub subnets: Feed<Subnet>,
    pub blocks: Feed<Block>,
    pub services: Feed<ServiceRange>,
    pub pods: Feed<Pod>,
}

/// Controls when a watch may deliver.
pub struct Line<'a> {
    pub scheduled: &'a mut bool,
    pub held_until: &'a mut Time,
    pub has_next: bool,
}

impl Run {
    pub fn new(process: usize, incarnation: u32, limit: usize) -> Self {
        let lease = LeaseSettings {
            identity: format!("p{process}"),
            nonce: format!("{process}n{incarnation}"),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        };
        Run {
            controller: Controller::new(ControllerSettings {
                critical_in_flight: limit,
                background_in_flight: limit.min(16),
                // Short enough that released leaks settle before the run ends.
                leak_grace: Duration::from_secs(30),
                ..ControllerSettings::default()
            }),
            elector: Elector::new(lease),
            observed: None,
            telling: false,
            asked: false,
            heard: false,
            read_at: None,
            lease: None,
            agents_heard: false,
            vacant: Duration::ZERO,
            feeds: Feeds::default(),
            known: Known::default(),
            in_flight: BTreeMap::new(),
            decided: BTreeMap::new(),
            held: Vec::new(),
            wanted: None,
            look_at: None,
            lease_at: None,
            wake_at: None,
            stopping: None,
            released: false,
            burst: (0, 0),
        }
    }

    /// Whether none of its watches is cut.
    pub fn hears(&self, now: Time) -> bool {
        let feeds = &self.feeds;
        let held = [
            feeds.nodes.held_until,
            feeds.pools.held_until,
            feeds.subnets.held_until,
            feeds.blocks.held_until,
            feeds.services.held_until,
            feeds.pods.held_until,
        ];
        held.into_iter().all(|until| until <= now)
    }

    /// The leadership that the controller is to be told.
    pub fn leadership(&self) -> Leadership {
        let mut leadership = self.elector.leadership();
        if let Leadership::Leading(tenure) = &mut leadership {
            tenure.vacant = self.vacant;
        }
        leadership
    }

    /// Whether a write of that term may be sent now, which is the rule of the real shell. `None`: it has to wait
    /// until the Lease is written.
    pub fn gate(&self, outgoing: &OutgoingRequest, mono: Duration) -> Option<bool> {
        match self.leadership() {
            Leadership::Leading(tenure)
                if outgoing.term.as_ref() == Some(&tenure.term) && mono < tenure.valid_until =>
            {
                (tenure.named >= outgoing.number).then_some(true)
            }
            _ => Some(false),
        }
    }

    /// Delivers the next step of a watch to the controller; returns it for the trace.
    pub fn deliver(
        &mut self,
        kind: Watched,
        api: &Api,
        now: Now,
        at: Time,
    ) -> Option<ControllerEvent> {
        let event = match kind {
            Watched::Nodes => {
                let change = self.feeds.nodes.next(&api.nodes, now.mono)?;
                self.known.nodes(&change, api);
                ControllerEvent::Nodes(change)
            }
            Watched::Pools => {
                let change = self.feeds.pools.next(&api.pools, now.mono)?;
                self.known.pools(&change, at);
                ControllerEvent::Pools(change)
            }
            Watched::Subnets => {
                let change = self.feeds.subnets.next(&api.subnets, now.mono)?;
                self.known.subnets(&change);
                ControllerEvent::Subnets(change)
            }
            Watched::Blocks => {
                let change = self.feeds.blocks.next(&api.blocks, now.mono)?;
                self.known.blocks(&change);
                ControllerEvent::Blocks(change)
            }
            Watched::Services => {
                let change = self.feeds.services.next(&api.services, now.mono)?;
                if let ObjectEvent::Applied(it) = &change {
                    self.known.note(&it.uid, it.version.cast_signed(), at);
                }
                self.known.services.take(&change);
                ControllerEvent::ServiceRanges(change)
            }
            Watched::Pods => {
                let change = self.feeds.pods.next(&api.pods, now.mono)?;
                if let ObjectEvent::Applied(it) = &change {
                    self.known.note(&it.uid, it.version.cast_signed(), at);
                }
                self.known.pods.take(&change);
                ControllerEvent::Pods(change)
            }
        };
        self.controller.on(event.clone(), now);
        Some(event)
    }

    pub fn line<'a>(&'a mut self, kind: Watched, api: &Api) -> Line<'a> {
        fn of<'a, T: Versioned>(
            feed: &'a mut Feed<T>,
            kind: &super::object_log::Kind<T>,
        ) -> Line<'a> {
            let has_next = feed.has_next(kind);
            Line {
                scheduled: &mut feed.scheduled,
                held_until: &mut feed.held_until,
                has_next,
            }
        }
        match kind {
            Watched::Nodes => of(&mut self.feeds.nodes, &api.nodes),
            Watched::Pools => of(&mut self.feeds.pools, &api.pools),
            Watched::Subnets => of(&mut self.feeds.subnets, &api.subnets),
            Watched::Blocks => of(&mut self.feeds.blocks, &api.blocks),
            Watched::Services => of(&mut self.feeds.services, &api.services),
            Watched::Pods => of(&mut self.feeds.pods, &api.pods),
        }
    }

    pub fn relist(&mut self, kind: Watched) {
        match kind {
            Watched::Nodes => self.feeds.nodes.relist(),
            Watched::Pools => self.feeds.pools.relist(),
            Watched::Subnets => self.feeds.subnets.relist(),
            Watched::Blocks => self.feeds.blocks.relist(),
            Watched::Services => self.feeds.services.relist(),
            Watched::Pods => self.feeds.pods.relist(),
        }
    }
}

impl Feeds {
    /// Handles a restore of the server to an older state.
    pub fn cut(&mut self, api: &Api) {
        self.nodes.cut(&api.nodes);
        self.pools.cut(&api.pools);
        self.subnets.cut(&api.subnets);
        self.blocks.cut(&api.blocks);
        self.services.cut(&api.services);
        self.pods.cut(&api.pods);
    }
}

impl Process {
    pub fn now(&self, now: Time) -> Now {
        Now {
            mono: self.clocks.mono(now),
            wall: self.clocks.wall(now),
        }
    }
}
