//! The agent as a state machine, which receives events and returns effects. The machine reads no clock and does no IO;
//! [`super::run`] carries the effects out.
//!
//! The machine is level-triggered: each turn compares the actual state with the desired state. A turn goes through the
//! phases of a *cycle* in order. The cycle stops when it needs an answer from the store, or an answer from the runtime
//! that decides what is written to the store. When the answer comes, the cycle continues. Events that arrive before the
//! cycle ends are recorded, and another cycle handles them immediately after this one.
//!
//! A *question* is a request to the store or to the runtime. A *look* is a question that reads the whole store. The
//! *notes* are the store's records of which pools each pod may use.
//!
//! ```text
//!  store closed:  open ──► close a lost store ──► ask the runtime ──► create a new one
//!  store open:    release proven leaks ──► write ranges ──► look, release blocks ──► note pods ──► publish ──► idle
//! ```
//!
//! # Guarantees
//!
//! About the store:
//! 1. At most one question is in flight. While a question is in flight, the machine decides about no status, list, file
//!    or readiness. So each of them describes the store at one moment.
//! 2. After the store is opened, a look comes before the first write of ranges. The look shows for which Node the store
//!    was written, and which ranges are new to the store.
//! 3. When a podCIDR is new to the store, the machine asks the runtime which addresses of the podCIDR are in use. The
//!    machine asks only after it has observed the podCIDR, and only while it knows all pods. The addresses in use are
//!    adopted in the transaction that adds the podCIDR. Until the answer comes, no range that was observed together
//!    with the podCIDR is written.
//! 4. After the answer, the machine writes exactly the ranges that it had observed when it asked the runtime, even if
//!    newer ranges have come meanwhile. It writes the newer ranges immediately afterwards.
//! 5. After a write of ranges, a look comes before anything is published.
//! 6. A block is released only after a look, and only while the watch of the NodeSubnet is established. The decision
//!    uses the waiting ADDs as they are read after that look. After the release, another look comes before anything is
//!    published.
//! 7. A leaked attachment is released only after its leak is proven. At most one request for proofs is under way. A
//!    look follows the release.
//! 8. The store's notes on pods are read before they are compared with the pods. Pods that change while notes are
//!    written are compared again.
//! 9. A lost store is closed, and its content is forgotten, before another store is opened.
//! 10. A new store is created only after the API has shown the Node, the NodeSubnet, the NodeAddresses and all pods,
//!     and the runtime has listed its sandboxes afterwards. The content of the new store comes from these objects as
//!     they were when the runtime was asked.
//!
//! About what is published:
//!
//! 11. A status is written with the resourceVersion of the NodeSubnet whose ranges the store has, never with a later
//!     one.
//! 12. At most one write of the status and one write of the list of addresses are under way.
//! 13. The servers get what the watches have shown before any other effect of the same turn is carried out.
//! 14. The agent is reported ready only once its files are up to date. While files are being written, the last report
//!     of readiness stays.
//! 15. Nothing is masqueraded before the result of the file update shows which network the node's pods use.
//!
//! About probes:
//!
//! 16. Addresses are probed only after a look, and at most one round of probes is under way. Nothing waits for the
//!     result of a round. After a round that failed, there is a pause.

mod allocation;
mod announcing;
mod cycle;
mod intake;
mod messages;
mod opening;
mod publishing;
mod ready;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::addresses::{PartialList, Schedule};
use super::events;
use super::files::others::PodNetworkOwner;
use super::leaks::{LeakDetector, LeakReason, Reasons};
use super::notes::Notes;
use super::publish::Publisher;
use super::routes::RoutesReport;
use super::seen::{AddressesSeen, SubnetSeen};
use super::shared::WatchState;
use cadastre_core::Addr;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::{Attachment, Now, Snapshot};

use announcing::Announcer;
use cycle::InFlight;
use opening::Opening;
use publishing::{Files, Masquerade};

pub use crate::files::kept::FilesReported;
pub(crate) use messages::CountedEvent;
pub use messages::{
    AgentEffect, AgentEvent, LeakScan, ServiceView, StoreAnswer, StoreFound, StoreQuestion,
    StoreTrouble, Transaction,
};

/// The longest pause between checks that the store's file still exists.
const STORE_CHECK: Duration = Duration::from_secs(5);
/// The pause after a failed attempt to open, create or use the store.
const STORE_PAUSE: Duration = Duration::from_secs(2);

/// The text of the error that every request gets until the store can be used.
pub const STARTING: &str = "this node's agent starts and has not opened its store yet: try again";

/// The settings on which the agent's decisions depend.
#[derive(Clone, Debug)]
pub struct MachineSettings {
    /// The name of the Node; its NodeSubnet and NodeAddresses have the same name
    pub node: String,
    /// The minimum interval between two writes of the status if no change is urgent
    pub publish_interval: Duration,
    /// The minimum interval between two writes of the list of addresses if no change is urgent
    pub addresses_interval: Duration,
    /// How long an attachment must be a leak candidate before it may be released
    pub leak_grace: Duration,
    /// Whether the agent masquerades the pods' traffic
    pub masquerade: bool,
    /// Whether the agent writes a file from which a routing daemon announces the node's ranges
    pub announces: bool,
    /// The path of the CNI configuration file; `None` if the agent writes none
    pub cni_conf: Option<PathBuf>,
    /// The name of the network in the CNI configuration; `None` if the agent writes no CNI configuration
    pub network: Option<String>,
}

/// An object of this node, according to its watch.
#[derive(Clone, Debug, Default)]
enum Observed<T> {
    /// The object was not read yet
    #[default]
    Unknown,
    /// The object does not exist
    Absent,
    /// The object as the watch last showed it
    There(T),
}

impl<T> Observed<T> {
    fn there(&self) -> Option<&T> {
        match self {
            Observed::There(it) => Some(it),
            Observed::Unknown | Observed::Absent => None,
        }
    }

    fn map<U>(self, f: impl FnOnce(T) -> U) -> Observed<U> {
        match self {
            Observed::Unknown => Observed::Unknown,
            Observed::Absent => Observed::Absent,
            Observed::There(it) => Observed::There(f(it)),
        }
    }
}

/// The state machine of the agent. [`Self::on`] records events, and [`Self::turn`] decides what to do.
#[expect(clippy::struct_excessive_bools, reason = "they are independent")]
pub struct AgentMachine {
    settings: MachineSettings,

    /// The UID of the Node
    node: Observed<String>,
    subnet: Observed<Arc<SubnetSeen>>,
    addresses: Observed<AddressesSeen>,
    /// Whether the watch of the NodeSubnet is established
    subnet_followed: bool,
    /// For the Node, the NodeSubnet and the NodeAddresses: whether the list under way has shown the object
    listed: (bool, bool, bool),
    /// Whether a new list has shown the NodeSubnet. If so, the listed object replaces the known one even if its version
    /// is older
    relisted: bool,
    /// What the watches have shown, for the servers on the node's sockets
    watched: Arc<WatchState>,
    offer: PendingOffer,
    serving: ServiceView,
    /// Whether an event has come since the cycle began
    is_news: bool,

    is_open: bool,
    opening: Opening,
    /// The question that the store or the runtime has not answered yet
    in_flight: Option<InFlight>,
    /// The answer to `in_flight`, once it has arrived
    answer: Option<StoreAnswer>,
    /// The problem with the store that was logged last; empty if there is none
    store_problem: String,
    /// Whether the API may show other ranges than those in the store
    ranges_changed: bool,
    /// The ranges that were last written to the store
    holding: NodeAllocation,
    /// The errors about parts of the NodeSubnet that were logged last
    parse_errors: Vec<String>,
    snapshot: Option<Arc<Snapshot>>,
    /// The ranges in `snapshot`. The files and the gRPC API use them
    held: Arc<NodeAllocation>,
    /// When the next look at the store is due
    look_at: Duration,
    looked_at: Duration,
    /// Whether a block was released since the agent started
    has_released: bool,
    leaks: LeakDetector,
    reasons: Arc<Reasons>,
    is_proving: bool,
    proven: VecDeque<(Attachment, LeakReason)>,
    /// The conflicts at the last look, each with the time at which it began; `None` before the first look
    conflicts: Option<BTreeSet<(Addr, i64)>>,
    is_probing: bool,
    /// The earliest time of the next round of probes; later than now only after a round that failed
    probe_at: Duration,
    /// Why addresses could not be probed, as logged last; empty if the last round of probes succeeded
    probe_problem: String,
    /// Which pools each pod may use, as recorded in the store
    notes: Notes,

    publisher: Publisher,
    publish_at: Option<Duration>,
    /// Whether the API server stored only a part of the status that was written last
    is_status_partial: bool,
    /// Decides when the list of addresses is written
    schedule: Schedule,
    list_at: Option<Duration>,
    /// The list that was written last, if the API server stored only a part of it
    partial_list: Option<Box<PartialList>>,
    files: Files,
    /// Which network the node's pods use, as last reported
    served: Option<PodNetworkOwner>,
    /// The nftables tables; `None` if the agent does not masquerade
    masquerade: Option<Masquerade>,
    /// What the routing daemon announces; `None` if the agent writes no file for one
    announcer: Option<Announcer>,
    /// The state of the routes to the pods of other nodes
    routes: RoutesReport,
    /// When an event last reported pods that were refused because the agent did not know them yet
    turned_away_at: Option<Duration>,
    /// Whether the event about [`ServiceView::unrecorded`] was emitted
    is_unrecorded_reported: bool,
    /// Whether the agent was last reported as ready, and why; `None` before the first report
    ready: Option<(bool, String)>,
}

/// Whether the servers on the node's sockets must get the changed [`WatchState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PendingOffer {
    Nothing,
    /// The state has changed, but the change wakes no ADD
    Changed,
    /// The state has changed, and the change wakes the ADDs that wait for their pod
    News,
}

impl AgentMachine {
    /// Returns the machine of an agent that has just started. `seed` should differ between nodes, so that the jitter
    /// differs.
    pub fn new(settings: MachineSettings, seed: u64, now: &Now) -> Self {
        let at = now.since_boot;
        let (interval, addresses) = (settings.publish_interval, settings.addresses_interval);
        Self {
            node: Observed::Unknown,
            subnet: Observed::Unknown,
            addresses: Observed::Unknown,
            subnet_followed: false,
            listed: (false, false, false),
            relisted: false,
            watched: Arc::default(),
            offer: PendingOffer::Nothing,
            serving: ServiceView::default(),
            is_news: false,
            is_open: false,
            opening: Opening::default(),
            in_flight: None,
            answer: None,
            store_problem: String::new(),
            ranges_changed: false,
            holding: NodeAllocation::default(),
            parse_errors: Vec::new(),
            snapshot: None,
            held: Arc::default(),
            look_at: at,
            looked_at: Duration::ZERO,
            has_released: false,
            leaks: LeakDetector::new(settings.leak_grace),
            reasons: Arc::default(),
            is_proving: false,
            proven: VecDeque::new(),
            conflicts: None,
            is_probing: false,
            probe_at: Duration::ZERO,
            probe_problem: String::new(),
            notes: Notes::default(),
            publisher: Publisher::new(interval, seed, at),
            publish_at: None,
            is_status_partial: false,
            schedule: Schedule::new(addresses, interval, seed.rotate_left(8), at),
            list_at: None,
            partial_list: None,
            files: Files::NEW,
            served: None,
            masquerade: settings.masquerade.then_some(Masquerade::NEW),
            announcer: settings.announces.then_some(Announcer::NEW),
            routes: RoutesReport::Off,
            turned_away_at: None,
            is_unrecorded_reported: false,
            ready: None,
            settings,
        }
    }

    /// Decides what to do next, and appends it to `effects`. Returns the time since boot at which the next turn is due
    /// if no event arrives earlier.
    pub fn turn(
        &mut self,
        serving: ServiceView,
        now: &Now,
        effects: &mut Vec<AgentEffect>,
    ) -> Duration {
        let at = now.since_boot;
        self.serving = serving;
        if self.serving.is_missing {
            self.look_at = self.look_at.min(at);
        }
        self.go(now, effects);
        if self.serving.trouble.is_some() {
            self.look_at = self.look_at.min(at + STORE_PAUSE);
        }
        self.report_turned_away(at, effects);
        self.report_unrecorded(effects);
        let watched = &self.watched.namespaces;
        if watched.wake().is_some_and(|wake| wake <= at) {
            let due = self.watched_mut(PendingOffer::Changed).namespaces.due(at);
            effects.extend(due.into_iter().map(AgentEffect::AskNamespace));
        }
        self.offer_first(effects);
        self.next_wake(at)
    }

    /// Whether a question or a write is under way. Before the agent exits, it waits until none is under way.
    pub(crate) fn is_busy(&self) -> bool {
        let is_asked = self.in_flight.is_some() && self.answer.is_none();
        is_asked || self.publisher.is_writing() || self.schedule.is_writing()
    }

    /// Returns the time of the next turn, as a time since boot.
    fn next_wake(&self, now: Duration) -> Duration {
        let watched = &self.watched.namespaces;
        let mut all = vec![watched.wake(), self.report_turned_away_at()];
        if self.in_flight.is_some() {
            all.push(Some(now + STORE_CHECK));
        } else if self.is_open {
            all.extend([Some(self.look_at), Some(now + STORE_CHECK)]);
            all.extend([self.publish_at, self.list_at, self.notes.due_at()]);
            all.push(self.files.check_at().filter(|_| self.snapshot.is_some()));
            all.push(self.announcer.as_ref().and_then(Announcer::check_at));
        } else {
            all.push(Some(self.opening.try_at));
        }
        all.into_iter().flatten().min().unwrap_or(now + STORE_CHECK)
    }

    /// If the state for the servers has changed, inserts the effect that hands the state over, before all other
    /// effects.
    fn offer_first(&mut self, effects: &mut Vec<AgentEffect>) {
        let offer = mem::replace(&mut self.offer, PendingOffer::Nothing);
        if offer != PendingOffer::Nothing {
            let (watched, is_news) = (Arc::clone(&self.watched), offer == PendingOffer::News);
            effects.insert(0, AgentEffect::Offer { watched, is_news });
        }
    }

    /// Returns the state that the servers get, so that the caller can change it. Records that the servers must get the
    /// change.
    fn watched_mut(&mut self, offer: PendingOffer) -> &mut WatchState {
        self.offer = self.offer.max(offer);
        Arc::make_mut(&mut self.watched)
    }

    /// Makes the next look at the store due soon. Called when the store may have changed.
    fn look_soon(&mut self) {
        self.look_at = self.look_at.min(self.looked_at + cycle::LOOK_PAUSE.0);
    }

    fn node_uid(&self) -> Option<&str> {
        self.node.there().map(String::as_str)
    }

    fn subnet(&self) -> Option<&Arc<SubnetSeen>> {
        self.subnet.there()
    }

    fn emit_node_event(&self, reason: &'static str, text: String, effects: &mut Vec<AgentEffect>) {
        let uid = self.node_uid().unwrap_or_default();
        let notice = events::of_node(&self.settings.node, uid, reason, text);
        effects.push(AgentEffect::Emit(notice));
    }

    /// Logs a problem with the store, unless the same problem was logged last. An empty text means that the problem is
    /// over.
    fn log_store_problem(&mut self, text: String) {
        if self.store_problem != text {
            if !text.is_empty() {
                info!("{text}");
            }
            self.store_problem = text;
        }
    }

    /// Logs errors about parts of the NodeSubnet, unless the same errors were logged last.
    fn log_parse_errors(&mut self, errors: Vec<String>) {
        if self.parse_errors != errors {
            for error in &errors {
                warn!("{error}");
            }
            self.parse_errors = errors;
        }
    }
}
