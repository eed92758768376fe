//! One controller process: the shipped state machines, their watches and requests, and the clocks of their host.

use std::collections::BTreeMap;
use std::time::Duration;

use cadastre_controller::cluster::lease::{Elector, Leadership, LeaseContent, LeaseSettings};
use cadastre_controller::cluster::objects::{
    Block, Claim, FrrConfiguration, Node, Pod, Pool, Routes, ServiceRange, Subnet,
};
use cadastre_controller::cluster::request::RequestId;
use cadastre_controller::{
    Controller, ControllerEvent, ControllerSettings, FrrSettings, Now, OutgoingRequest,
};

use jiff::Timestamp;

use super::api::Api;
use super::clock::{Clocks, Time};
use super::object_log::{AnyFeed, Feed};
use super::plan::Plan;
use super::received::Received;

/// The AS number of all nodes.
const ASN: u32 = 64_512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watched {
    Nodes,
    Pools,
    Subnets,
    Blocks,
    Services,
    Pods,
    Claims,
    Routes,
    FrrConfigurations,
}

impl Watched {
    /// The kinds on which decisions about addresses are based.
    pub const ALL: [Self; 7] = [
        Self::Nodes,
        Self::Pools,
        Self::Subnets,
        Self::Blocks,
        Self::Services,
        Self::Pods,
        Self::Claims,
    ];
}

/// A controller process. After a crash or stop, it starts again as its next run.
pub struct Process {
    pub clocks: Clocks,
    /// The number of the current run. Events for earlier runs are dropped.
    pub incarnation: u32,
    pub paused_until: Time,
    /// The time until which the process is cut off. While it is cut off, nothing that it sends arrives, and it receives
    /// nothing.
    pub cut_until: Time,
    pub run: Option<Run>,
}

/// One run of a process, from its start to a crash or stop.
pub struct Run {
    pub controller: Controller,
    pub elector: Elector,
    /// The leadership that was last passed to the controller.
    pub observed: Option<Leadership>,
    /// Whether it is scheduled that a changed leadership is passed to the controller.
    pub leadership_scheduled: bool,
    /// Whether a request about the Lease is in flight.
    pub lease_in_flight: bool,
    /// Whether the process has read the Lease. Before that, it starts no watch.
    pub has_read_lease: bool,
    /// The reading of the monotonic clock when the process last received the outcome of a request about the Lease.
    pub read_at: Option<Duration>,
    /// The version and renewal time of the Lease that the process last received.
    pub lease: Option<(u64, Timestamp)>,
    /// Whether agents have had time to publish their reports since this process began to lead.
    pub agents_heard: bool,
    /// For how long nobody had led when this process last tried to acquire the Lease.
    pub vacant: Duration,
    pub feeds: Feeds,
    /// How deliveries of each watch are scheduled, in the order of [`Watched::ALL`].
    pub deliveries: [Deliveries; 9],
    pub received: Received,
    /// Requests in flight or about to be sent, and when the controller decided on each.
    pub in_flight: BTreeMap<RequestId, (OutgoingRequest, Time)>,
    /// Requests that wait because no write of the Lease has followed their decision yet.
    pub awaiting_lease: Vec<RequestId>,
    /// The intents (allocations that may be in flight) that the controller wants in the Lease, until the elector has
    /// them.
    pub wanted: Option<LeaseContent>,
    /// When the controller is called next.
    pub look_at: Option<Time>,
    /// When the elector is called next.
    pub lease_at: Option<Time>,
    /// When the controller wants to be called even if nothing happens before.
    pub wake_at: Option<Time>,
    /// When a graceful stop ends, even if requests are still in flight then.
    pub stopping: Option<Time>,
    pub released: bool,
    /// A moment of virtual time, and the number of requests sent at that moment. If the number is too high, a loop
    /// spins.
    pub burst: (Time, u32),
}

macro_rules! feeds {
    ($($kind:ident, $field:ident: $object:ty => $event:ident;)*) => {
        #[derive(Clone, Default)]
        pub struct Feeds {
            $($field: Feed<$object>,)*
        }

        impl Feeds {
            pub fn of(&self, kind: Watched) -> &dyn AnyFeed {
                match kind {
                    $(Watched::$kind => &self.$field,)*
                }
            }

            pub fn of_mut(&mut self, kind: Watched) -> &mut dyn AnyFeed {
                match kind {
                    $(Watched::$kind => &mut self.$field,)*
                }
            }

            /// Returns the next event of a watch. `asked` is the monotonic time at which a list that begins now is
            /// requested.
            pub fn next(&mut self, kind: Watched, api: &Api, asked: Duration) -> Option<ControllerEvent> {
                Some(match kind {
                    $(Watched::$kind => ControllerEvent::$event(self.$field.next(api, asked)?),)*
                })
            }
        }
    };
}

feeds! {
    Nodes, nodes: Node => Nodes;
    Pools, pools: Pool => Pools;
    Subnets, subnets: Subnet => Subnets;
    Blocks, blocks: Block => Blocks;
    Services, services: ServiceRange => ServiceRanges;
    Pods, pods: Pod => Pods;
    Claims, claims: Claim => Claims;
    Routes, routes: Routes => Routes;
    FrrConfigurations, frr_configurations: FrrConfiguration => FrrConfigurations;
}

#[derive(Default)]
pub struct Deliveries {
    pub scheduled: bool,
    /// The time until which the watch delivers nothing, because its connection is cut or slow.
    pub held_until: Time,
}

impl Run {
    pub fn new(process: usize, incarnation: u32, plan: &Plan) -> Self {
        let limit = plan.limit;
        Run {
            controller: Controller::new(ControllerSettings {
                critical_in_flight: limit,
                background_in_flight: limit.min(16),
                // This time is so short that leaked addresses are released before the run ends.
                leak_grace: Duration::from_secs(30),
                evicts_unserved: true,
                publishes_routes: plan.publishes_routes(),
                frr: plan.writes_frr_configurations().then(|| FrrSettings {
                    asn: Some(ASN),
                    ..FrrSettings::default()
                }),
                agent_writes_per_minute: plan.agent_writes_per_minute(),
                ..ControllerSettings::default()
            }),
            elector: Elector::new(lease_settings(process, incarnation)),
            observed: None,
            leadership_scheduled: false,
            lease_in_flight: false,
            has_read_lease: false,
            read_at: None,
            lease: None,
            agents_heard: false,
            vacant: Duration::ZERO,
            feeds: Feeds::default(),
            deliveries: <[Deliveries; 9]>::default(),
            received: Received::default(),
            in_flight: BTreeMap::new(),
            awaiting_lease: Vec::new(),
            wanted: None,
            look_at: None,
            lease_at: None,
            wake_at: None,
            stopping: None,
            released: false,
            burst: (0, 0),
        }
    }

    pub fn deliveries(&mut self, kind: Watched) -> &mut Deliveries {
        &mut self.deliveries[kind as usize]
    }

    /// Whether all watches of the process may deliver now.
    pub fn all_watches_deliver(&self, now: Time) -> bool {
        self.deliveries.iter().all(|it| it.held_until <= now)
    }

    /// The leadership to pass to the controller.
    pub fn leadership(&self) -> Leadership {
        let mut leadership = self.elector.leadership();
        if let Leadership::Leading(term) = &mut leadership {
            term.vacant = self.vacant;
        }
        leadership
    }

    /// Returns whether the write may be sent now, by the rule of the real process. `None` means that the write has to
    /// wait until the Lease is written.
    pub fn gate(&self, outgoing: &OutgoingRequest, mono: Duration) -> Option<bool> {
        may_send(&self.leadership(), outgoing, mono)
    }

    /// Passes the next event of a watch to the controller, and returns the event for the trace.
    pub fn deliver(
        &mut self,
        kind: Watched,
        api: &Api,
        now: Now,
        at: Time,
    ) -> Option<ControllerEvent> {
        let event = self.feeds.next(kind, api, now.mono)?;
        self.received.watched(&event, api, at);
        self.controller.on(event.clone(), now);
        Some(event)
    }
}

impl Process {
    /// The run in progress. There always is one, because events of runs that have ended are dropped.
    pub fn run(&mut self) -> &mut Run {
        self.run.as_mut().unwrap()
    }

    pub fn now(&self, now: Time) -> Now {
        Now {
            mono: self.clocks.mono(now),
            wall: self.clocks.wall(now),
        }
    }
}

/// The settings of the election of a run of a process.
pub fn lease_settings(process: usize, incarnation: u32) -> LeaseSettings {
    LeaseSettings {
        identity: format!("p{process}"),
        nonce: format!("{process}n{incarnation}"),
        lease_duration: Duration::from_secs(4),
        renew_deadline: Duration::from_secs(3),
        retry_period: Duration::from_secs(1),
    }
}

/// Returns whether a write may be sent now, by the rule of the real process. `None` means that it has to wait until the
/// Lease is written.
pub fn may_send(
    leadership: &Leadership,
    outgoing: &OutgoingRequest,
    mono: Duration,
) -> Option<bool> {
    match leadership {
        Leadership::Leading(term)
            if outgoing.term.as_ref() == Some(&term.id) && mono < term.valid_until =>
        {
            (term.named >= outgoing.number).then_some(true)
        }
        _ => Some(false),
    }
}

/// Prints no events, because the undelivered events depend on the API server, too: see [`AnyFeed::describe`].
impl std::fmt::Debug for Feeds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Feeds")
    }
}
