//! Decides what to write to the API server and to the files that other programs read.

use std::collections::BTreeSet;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tracing::{info, warn};

use super::{AgentEffect, AgentMachine, CountedEvent, FilesReported, Observed};
use crate::addresses::{self, ListOutcome, TO_BE_REPORTED};
use crate::conditions;
use crate::conflicts;
use crate::demand::wanted;
use crate::files::others::PodNetworkOwner;
use crate::publish::{PublishStep, WriteOutcome};
use crate::routes::RoutesReport;
use crate::served;
use crate::status::status;
use cadastre_api::{NodeAddressesSpec, RANGES_ANNOUNCED, ROUTES_READY};
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_core::{Addr, Cidr};
use cadastre_node::Now;

/// The advice for users when the API server has stored only a part of an object.
const OLDER_CRDS: &str = "the CRDs are older than the agent: apply those of its version (cadastre crd | kubectl apply --server-side -f -)";

/// The reason of the event which reports that another network gets the node's pods, because the agent has left them to
/// that network.
const LEFT_TO_OTHERS: &str = "LeftToOthers";
/// The reason of the event which reports that another network gets the node's pods, because its CNI configuration sorts
/// before the agent's.
const OTHERS_FIRST: &str = "OthersFirst";

/// The longest pause between writes of files and nftables tables, even if nothing changes. A write notices files that
/// other programs have added or changed, and repeats an earlier write that failed.
const CHECK_PAUSE: Duration = Duration::from_secs(5);

/// The addresses to be released if the node has no NodeSubnet. The set is empty, because the requests for releases are
/// in the NodeSubnet.
static NOTHING: BTreeSet<Addr> = BTreeSet::new();

/// Something outside of the agent, such as files, whose state the agent keeps equal to the desired state `T`. Each
/// write of the state ends with a report `R`.
#[derive(Debug)]
pub(super) struct Desired<T, R> {
    /// The state that was written last, and when the write began
    written: Option<(T, Duration)>,
    is_writing: bool,
    /// The report of the last write
    reported: Option<R>,
}

impl<T: PartialEq + Clone, R> Desired<T, R> {
    pub(super) const NEW: Self = Self {
        written: None,
        is_writing: false,
        reported: None,
    };

    /// Returns whether to write the state `wanted` now. If so, records that the write begins.
    pub(super) fn begins(&mut self, wanted: &T, now: Duration) -> bool {
        let is_recent = |(is, at): &(T, Duration)| is == wanted && now < *at + CHECK_PAUSE;
        if self.is_writing || self.written.as_ref().is_some_and(is_recent) {
            return false;
        }
        self.written = Some((wanted.clone(), now));
        self.is_writing = true;
        true
    }

    pub(super) fn ends(&mut self, report: R) {
        self.is_writing = false;
        self.reported = Some(report);
    }

    /// Returns the state that was written last, or whose write is under way.
    pub(super) fn written(&self) -> Option<&T> {
        self.written.as_ref().map(|(state, _)| state)
    }

    /// Returns the report of the last write that has ended.
    pub(super) fn reported(&self) -> Option<&R> {
        self.reported.as_ref()
    }

    pub(super) fn is_writing(&self) -> bool {
        self.is_writing
    }

    /// Returns the time of the next write if nothing changes; `None` before the first write and while a write is under
    /// way.
    pub(super) fn check_at(&self) -> Option<Duration> {
        let (_, at) = self.written.as_ref()?;
        (!self.is_writing).then(|| *at + CHECK_PAUSE)
    }

    /// Returns the report of the last write, even if a part of that write failed. Returns `None` before the first write
    /// and while a write is under way.
    pub(super) fn settled(&self) -> Option<&R> {
        self.reported.as_ref().filter(|_| !self.is_writing)
    }
}

/// The files that other programs read. Their content depends on the node's ranges, and on whether the node gets its
/// first range only when a pod needs it.
pub(super) type Files = Desired<(Arc<NodeAllocation>, bool), FilesReported>;

/// The nftables tables. Their content depends on the ranges of all pools (`None` if unknown) and on the node's ranges.
/// The report is the error message of the last write, or `None` if the write succeeded.
pub(super) type Masquerade = Desired<(Option<Vec<String>>, Arc<NodeAllocation>), Option<String>>;

impl AgentMachine {
    /// Returns which network new pods get; `None` if the agent writes no CNI configuration.
    fn network_owner(&self) -> Option<&PodNetworkOwner> {
        match &self.files.reported {
            Some(report) => report.network_owner.as_ref(),
            None => Some(&PodNetworkOwner::Open),
        }
    }

    /// Returns whether new pods of the node use Cadastre's network; `None` before the first report about the files.
    pub(crate) fn serves_pods(&self) -> Option<bool> {
        Some(!self.files.reported.as_ref()?.is_left_to_others())
    }

    pub(super) fn publish_all(&mut self, now: &Now, effects: &mut Vec<AgentEffect>) {
        self.publish(now, effects);
        self.write_list(now, effects);
        self.write_files(now.since_boot, effects);
        self.announce(now.since_boot, effects);
    }

    fn publish(&mut self, now: &Now, effects: &mut Vec<AgentEffect>) {
        self.publish_at = None;
        let Some(snapshot) = &self.snapshot else {
            return;
        };
        let at = now.since_boot;
        let wants = wanted(snapshot, &self.serving.pending_adds);
        let named = self.subnet().map_or(&NOTHING, |it| &it.named);
        let orphans = self.leaks.orphans(snapshot, named, at);
        let is_announced = |range: &Cidr| self.may_announce(range);
        let mut wanted_status = status(snapshot, &wants, &orphans, is_announced, &now.boot);
        let own = self.settings.cni_conf.as_deref();
        let is = self.publisher.conditions();
        let condition = served::condition(self.network_owner(), own, is);
        wanted_status.conditions.extend(condition);
        let conflict = conflicts::condition(snapshot, is);
        wanted_status.conditions.extend(conflict);
        wanted_status.conditions.extend(self.routes.condition());
        let announced = self.announce_condition(effects);
        wanted_status.conditions.extend(announced);
        // An earlier agent process may have had other flags and have set these conditions.
        let routes = (self.routes == RoutesReport::Off).then_some(ROUTES_READY);
        let announces = self.announcer.is_none().then_some(RANGES_ANNOUNCED);
        let unwanted: Vec<&str> = routes.into_iter().chain(announces).collect();
        self.publisher.set_unwanted(unwanted.clone());
        let pods = &self.watched.pods;
        let waits = |uid: &str| pods.by_uid(uid).is_some_and(|pod| !pod.finished);
        let requests = self.serving.address_requests.iter();
        let requests = requests.filter(|it| waits(&it.pod_uid));
        wanted_status.requested_addresses = requests.cloned().collect();
        let next = self.publisher.next(&wanted_status, &wants, snapshot, at);
        let lag = self.publisher.lag(at).max(self.schedule.lag(at));
        effects.push(AgentEffect::Count(CountedEvent::PublishLag(lag)));
        match next {
            PublishStep::Nothing => {}
            PublishStep::At(at) => self.publish_at = Some(at),
            PublishStep::Write { version, urgent } => {
                let is = self.publisher.conditions();
                let mut all = conditions::merged(is, &wanted_status.conditions, wall(now));
                all.retain(|it| !unwanted.contains(&it.type_.as_str()));
                wanted_status.conditions = all;
                let status = Box::new(wanted_status);
                effects.push(AgentEffect::WriteStatus {
                    version,
                    status,
                    urgent,
                });
            }
        }
    }

    pub(super) fn status_written(&mut self, written: WriteOutcome, now: Duration) {
        if let WriteOutcome::Done { cut, .. } = &written {
            if cut.is_some() && !self.is_status_partial {
                warn!(
                    "NodeSubnet {} was stored without a part of what this agent tells: {OLDER_CRDS}",
                    self.settings.node
                );
            }
            self.is_status_partial = cut.is_some();
        }
        self.publisher.written(written, now);
    }

    /// Writes the list of addresses if a write is due.
    fn write_list(&mut self, now: &Now, effects: &mut Vec<AgentEffect>) {
        self.list_at = None;
        let (Some(snapshot), Some(subnet)) = (&self.snapshot, self.subnet()) else {
            return;
        };
        let published = match &self.addresses {
            Observed::Unknown => return,
            Observed::Absent => None,
            Observed::There(published) => Some(published),
        };
        if !self.is_ours(subnet) {
            return;
        }
        let nothing = NodeAddressesSpec::default();
        let before = published.map_or(&nothing, |it| &it.list);
        let mut list = addresses::list(snapshot, &now.boot);
        let differs = match published {
            None => !list.addresses.is_empty(),
            Some(published) => {
                // An older CRD makes the API server drop a part of the list. If neither the list nor its stored part
                // has changed since the last write, another write would change nothing.
                let is_stored = self.partial_list.as_deref().is_some_and(|cut| {
                    published.list.is_same(&cut.stored) && list.is_same(&cut.written)
                });
                (!before.is_same(&list) && !is_stored) || published.owner != subnet.uid
            }
        };
        let (named, pods) = (&subnet.named, &self.watched.pods);
        // The first list of a node is urgent, because it is what a user of a new cluster looks at.
        let is_new = published.is_none();
        let urgent = is_new || addresses::is_urgent(before, named, snapshot, pods, now.wall_ms);
        let urgent = differs && urgent;
        let (owner, at) = (subnet.uid.clone(), now.since_boot);
        match self.schedule.next(differs, urgent, at) {
            addresses::ListStep::Nothing => {}
            // A change can become urgent within `TO_BE_REPORTED`, so the next check follows after at most this time.
            addresses::ListStep::At(next) => self.list_at = Some(next.min(at + TO_BE_REPORTED)),
            addresses::ListStep::Write => {
                if is_new {
                    // Readers ignore addresses in blocks that are unused according to the status.
                    self.publisher.make_due(at);
                    self.publish_at = Some(at);
                }
                list.as_of = Timestamp::from_second(wall(now).as_second()).ok().map(Time);
                let list = Box::new(list);
                effects.push(AgentEffect::WriteList {
                    owner,
                    is_new,
                    list,
                });
            }
        }
    }

    pub(super) fn list_written(&mut self, listed: ListOutcome, now: Duration) {
        let ListOutcome::Done(cut) = listed else {
            return self.schedule.written(false, now);
        };
        if cut.is_some() && self.partial_list.is_none() {
            warn!(
                "NodeAddresses {} was stored without a part of what this agent tells: {OLDER_CRDS}",
                self.settings.node
            );
        }
        self.partial_list = cut;
        self.schedule.written(true, now);
    }

    /// Updates the files that other programs on the node read, and then the nftables tables.
    fn write_files(&mut self, now: Duration, effects: &mut Vec<AgentEffect>) {
        if self.snapshot.is_none() {
            return;
        }
        let (holding, waits_for_pods) = (Arc::clone(&self.held), self.watched.waits_for_pods());
        let wanted = (holding, waits_for_pods);
        if self.files.begins(&wanted, now) {
            let (holding, waits_for_pods) = wanted;
            effects.push(AgentEffect::WriteFiles {
                holding,
                waits_for_pods,
            });
        }
        self.emit_served_by_others(effects);
        // If another network serves the node's pods, that network is responsible for their traffic, so the agent does
        // not masquerade.
        if self
            .files
            .settled()
            .is_none_or(FilesReported::is_left_to_others)
        {
            return;
        }
        let spec = self.subnet().and_then(|it| it.spec.as_ref().ok());
        let ranges = spec.map(|it| it.pod_ranges.clone());
        let wanted = (ranges, Arc::clone(&self.held));
        let masquerade = self.masquerade.as_mut();
        if masquerade.is_some_and(|it| it.begins(&wanted, now)) {
            let (ranges, holding) = wanted;
            effects.push(AgentEffect::Masquerade { ranges, holding });
        }
    }

    /// Reports that the node's pods use another network. Reports each change only once, even if the agent restarts.
    fn emit_served_by_others(&mut self, effects: &mut Vec<AgentEffect>) {
        let owner = self.network_owner().cloned();
        if owner == self.served || owner == Some(PodNetworkOwner::Open) {
            return;
        }
        // The conditions of the NodeSubnet show what an earlier agent process has reported. So a restart does not
        // repeat the event.
        let is: &[Condition] = match &self.subnet {
            Observed::Unknown => return,
            Observed::Absent => &[],
            Observed::There(subnet) => subnet.status.conditions.as_slice(),
        };
        let own = self.settings.cni_conf.as_deref();
        let condition = served::condition(owner.as_ref(), own, is);
        let is_new = |it| !conditions::has_all(is, slice::from_ref(it));
        let is_new = self.served.is_some() || condition.as_ref().is_some_and(is_new);
        self.served = owner;
        let Some(condition) = condition else { return };
        let reason = match self.served {
            Some(PodNetworkOwner::Left(_)) if is_new => LEFT_TO_OTHERS,
            Some(PodNetworkOwner::Behind(_)) if is_new => OTHERS_FIRST,
            _ => {
                info!("{}", condition.message);
                return;
            }
        };
        self.emit_node_event(reason, condition.message, effects);
    }
}

/// Returns the time of day in `now`. A time that cannot be converted becomes the beginning of 1970.
fn wall(now: &Now) -> Timestamp {
    Timestamp::from_millisecond(now.wall_ms).unwrap_or_default()
}
