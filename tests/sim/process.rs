//! One controller process: the shipped state machines, what they have received and sent, and the clocks of their host.

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

/// A controller process. After a crash or stop the next run begins in it.
pub struct Process {
    pub clocks: Clocks,
    /// The number of the current run; events for earlier runs are dropped.
    pub incarnation: u32,
    pub paused_until: Time,
    /// Until when the process is cut off: nothing that it sends arrives, and it receives nothing.
    pub cut_until: Time,
    pub run: Option<Run>,
}

/// One run of a process, from its start to a crash or stop.
pub struct Run {
    pub controller: Controller,
    pub elector: Elector,
    /// The leadership that was last passed to the controller.
    pub observed: Option<Leadership>,
    /// Whether passing a changed leadership to the controller is scheduled.
    pub telling: bool,
    /// Whether a request about the Lease is in flight.
    pub asked: bool,
    /// Whether the process has read the Lease. It starts no watch before.
    pub heard: bool,
    /// When a request about the Lease last had a certain outcome, by the monotonic clock.
    pub read_at: Option<Duration>,
    /// The version and renewal time of the Lease that the process last received.
    pub lease: Option<(u64, Timestamp)>,
    /// Whether agents have had time to publish since this process began to lead.
    pub agents_heard: bool,
    /// How long nobody had led when this process last tried to acquire the Lease.
    pub vacant: Duration,
    pub feeds: Feeds,
    pub known: Known,
    /// Requests in flight or about to be sent.
    pub in_flight: BTreeMap<RequestId, OutgoingRequest>,
    /// When the controller decided on each of these requests.
    pub decided: BTreeMap<RequestId, Time>,
    /// Requests that wait because the Lease has not been written since their decision.
    pub held: Vec<RequestId>,
    /// The intents that the controller wants in the Lease, until they are passed to the elector.
    pub wanted: Option<LeaseContent>,
    /// When the controller (`look_at`) and the elector (`lease_at`) are called next.
    pub look_at: Option<Time>,
    pub lease_at: Option<Time>,
    /// When the controller wants to be called if nothing happens before.
    pub wake_at: Option<Time>,
    /// When a graceful stop ends even if requests are still in flight.
    pub stopping: Option<Time>,
    pub released: bool,
    /// A moment of virtual time, and the number of requests sent at it: too many mean that a loop spins.
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

/// How deliveries of one watch are scheduled, whatever kind of objects it watches.
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
                // Short enough that the addresses of leaks are released before the run ends.
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

    /// Whether all watches of the process may deliver now.
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

    /// The leadership to pass to the controller.
    pub fn leadership(&self) -> Leadership {
        let mut leadership = self.elector.leadership();
        if let Leadership::Leading(term) = &mut leadership {
            term.vacant = self.vacant;
        }
        leadership
    }

    /// Returns whether the write may be sent now, by the rule of the real shell. `None` means that the write has to
    /// wait until the Lease is written.
    pub fn gate(&self, outgoing: &OutgoingRequest, mono: Duration) -> Option<bool> {
        match self.leadership() {
            Leadership::Leading(term)
                if outgoing.term.as_ref() == Some(&term.id) && mono < term.valid_until =>
            {
                (term.named >= outgoing.number).then_some(true)
            }
            _ => Some(false),
        }
    }

    /// Passes the next event of a watch to the controller; returns the event for the trace.
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
    /// Handles a restore of the API server to an older state.
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
