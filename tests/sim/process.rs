//! One controller process: the shipped state machines, their watches, and the machine they run on.

use std::collections::BTreeMap;
use std::time::Duration;

use cadastre_controller::cluster::lease::{Elector, Leadership, Settings as LeaseSettings, Wanted};
use cadastre_controller::cluster::request::RequestId;
use cadastre_controller::cluster::seen::{Block, Node, Pod, Pool, ServiceRange, Subnet};
use cadastre_controller::{Controller, Event, Now, Outgoing, Settings};
use cadastre_daemon::watch::Change;

use jiff::Timestamp;

use super::api::Api;
use super::clock::{Clocks, Time};
use super::kind::{Feed, Versioned};
use super::known::Known;

/// The kinds a controller watches.
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

/// A place where a controller runs, again and again.
pub struct Process {
    pub clocks: Clocks,
    /// Counts the runs: what belongs to an earlier one goes nowhere.
    pub incarnation: u32,
    pub paused_until: Time,
    /// Until then nothing it sends arrives, and nothing reaches it.
    pub cut_until: Time,
    pub run: Option<Run>,
}

/// One run, from start to crash or stop.
pub struct Run {
    pub controller: Controller,
    pub elector: Elector,
    /// Leadership as last told to the controller.
    pub told: Option<Leadership>,
    /// Whether news of leadership is on its way to the controller.
    pub telling: bool,
    /// Whether a request about the Lease is out.
    pub asked: bool,
    /// Whether it has heard of the Lease: before that nothing is listed.
    pub heard: bool,
    /// When it was last told anything certain of the Lease.
    pub read_at: Option<Duration>,
    /// The Lease as last seen: its version, and when it was renewed.
    pub lease: Option<(u64, Timestamp)>,
    /// Whether agents have had their say since it leads.
    pub agents_heard: bool,
    /// For how long nobody had led when it last sought the Lease.
    pub vacant: Duration,
    pub feeds: Feeds,
    pub known: Known,
    /// Requests out or about to be sent.
    pub in_flight: BTreeMap<RequestId, Outgoing>,
    /// When each of them was decided.
    pub decided: BTreeMap<RequestId, Time>,
    /// Those that wait for the Lease to be written.
    pub held: Vec<RequestId>,
    /// What the controller wants the Lease to say, on its way to the elector.
    pub wanted: Option<Wanted>,
    /// The times at which the next look at controller and elector is due.
    pub look_at: Option<Time>,
    pub lease_at: Option<Time>,
    /// When the controller wants to be woken, if nothing happens before.
    pub wake_at: Option<Time>,
    /// When a graceful stop gives up waiting.
    pub stopping: Option<Time>,
    pub released: bool,
    /// Requests at one moment of virtual time: too many is a spin.
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

/// When a watch may deliver.
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
            controller: Controller::new(Settings {
                critical_in_flight: limit,
                background_in_flight: limit.min(16),
                // What is asked of agents comes to rest before the run ends.
                leak_grace: Duration::from_secs(30),
                ..Settings::default()
            }),
            elector: Elector::new(lease),
            told: None,
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

    /// What its controller is told of who leads.
    pub fn leadership(&self) -> Leadership {
        let mut leadership = self.elector.leadership();
        if let Leadership::Leading(tenure) = &mut leadership {
            tenure.vacant = self.vacant;
        }
        leadership
    }

    /// Whether a write of that term may be sent now: the rule of the shell. `None`: it has to wait
    /// until the Lease was written.
    pub fn gate(&self, outgoing: &Outgoing, mono: Duration) -> Option<bool> {
        match self.leadership() {
            Leadership::Leading(tenure)
                if outgoing.term.as_ref() == Some(&tenure.term) && mono < tenure.valid_until =>
            {
                (tenure.named >= outgoing.number).then_some(true)
            }
            _ => Some(false),
        }
    }

    /// The next step of a watch, told to the controller; returns what it is about, for the trace.
    pub fn deliver(&mut self, kind: Watched, api: &Api, now: Now, at: Time) -> Option<Event> {
        let event = match kind {
            Watched::Nodes => {
                let change = self.feeds.nodes.next(&api.nodes, now.mono)?;
                self.known.nodes(&change, api);
                Event::Nodes(change)
            }
            Watched::Pools => {
                let change = self.feeds.pools.next(&api.pools, now.mono)?;
                self.known.pools(&change, at);
                Event::Pools(change)
            }
            Watched::Subnets => {
                let change = self.feeds.subnets.next(&api.subnets, now.mono)?;
                self.known.subnets(&change);
                Event::Subnets(change)
            }
            Watched::Blocks => {
                let change = self.feeds.blocks.next(&api.blocks, now.mono)?;
                self.known.blocks(&change);
                Event::Blocks(change)
            }
            Watched::Services => {
                let change = self.feeds.services.next(&api.services, now.mono)?;
                if let Change::Applied(it) = &change {
                    self.known.note(&it.uid, it.version.cast_signed(), at);
                }
                self.known.services.take(&change);
                Event::ServiceRanges(change)
            }
            Watched::Pods => {
                let change = self.feeds.pods.next(&api.pods, now.mono)?;
                if let Change::Applied(it) = &change {
                    self.known.note(&it.uid, it.version.cast_signed(), at);
                }
                self.known.pods.take(&change);
                Event::Pods(change)
            }
        };
        self.controller.on(event.clone(), now);
        Some(event)
    }

    pub fn line<'a>(&'a mut self, kind: Watched, api: &Api) -> Line<'a> {
        fn of<'a, T: Versioned>(feed: &'a mut Feed<T>, kind: &super::kind::Kind<T>) -> Line<'a> {
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
    /// The server was put back to an older state.
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
