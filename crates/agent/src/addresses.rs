//! The content of the node's NodeAddresses, and when it is written. The code here uses neither IO nor a clock.
//!
//! [`Schedule`] writes the list once per interval, with jitter. If nothing has changed, the list is not written. Urgent
//! changes are written after a shorter interval, which is called `soon`. A change is urgent in these cases:
//! - There is no NodeAddresses yet.
//! - An address was released, and the controller or a user waits for the release.
//! - An address of a superseded sandbox was released.
//! - An address was assigned on a second network or to a container without a pod, and no pod reports the address. If
//!   the store is lost, only this list can restore such an address.
//!
//! # Guarantees
//! - Equal states give equal lists, because the entries are sorted. The list always fits into one API object.
//! - Only one write is under way at a time, and writes are never closer together than `soon`.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use super::jitter::Jitter;
use super::pods::Pods;
use super::snapshot::{addresses, pod_uid};
use super::superseded::superseded;
use cadastre_api::addresses::{MOST_BYTES, MOST_ENTRIES};
use cadastre_api::{AddressEntry, NodeAddressesSpec};
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;
use cadastre_node::{Attachment, AttachmentRecord, OWN_INTERFACE, PodRef, Snapshot};

/// The time after an assignment within which the pod's status should show the address.
pub(crate) const TO_BE_REPORTED: Duration = Duration::from_secs(10);

/// When the controller asks for a longer interval between statuses, the interval between lists is at least this many
/// times as long, because a list is much larger than a status.
pub(crate) const LIST_INTERVAL: u32 = 10;

/// Builds the list of addresses in use. `boot` is the id of the current boot, which is needed to find superseded
/// sandboxes.
pub fn list(snapshot: &Snapshot, boot: &str) -> NodeAddressesSpec {
    let superseded = superseded(&snapshot.attachments, boot);
    let entry = |record: &AttachmentRecord| {
        let is_superseded = superseded.contains(&record.attachment);
        entry(record, is_superseded)
    };
    let mut entries: Vec<AddressEntry> = snapshot.attachments.iter().map(entry).collect();
    entries.retain(|it| !it.addresses.is_empty());
    entries.sort_by(|a, b| (&a.addresses, &a.handle).cmp(&(&b.addresses, &b.handle)));
    let texts = entries.iter().map(ToString::to_string).take(MOST_ENTRIES);
    let mut bytes = 0;
    let texts = texts.take_while(|text| {
        bytes += text.len() + 4;
        bytes <= MOST_BYTES
    });
    NodeAddressesSpec {
        node_uid: snapshot.node_uid.clone().unwrap_or_default(),
        boot_id: boot.chars().take(64).collect(),
        as_of: None,
        addresses: texts.collect(),
    }
}

fn entry(record: &AttachmentRecord, superseded: bool) -> AddressEntry {
    let pod = record.pod.as_ref();
    let mut all: Vec<Addr> = addresses(record).collect();
    all.sort_unstable();
    AddressEntry {
        addresses: all,
        handle: handle(&record.attachment),
        interface: record.attachment.ifname.clone(),
        pod_uid: pod.map_or_else(String::new, |it| it.uid.clone()),
        pod: pod.map_or_else(String::new, pod_name),
        since: Timestamp::from_second(record.since_ms.div_euclid(1000)).ok(),
        superseded,
    }
}

/// Returns the handle by which users release an address: `network/containerID`. A network's name has no slash, so the
/// first slash ends the name.
pub fn handle(attachment: &Attachment) -> String {
    format!("{}/{}", attachment.network, attachment.container_id)
}

fn pod_name(pod: &PodRef) -> String {
    match (pod.namespace.as_str(), pod.name.as_str()) {
        ("", "") => String::new(),
        (namespace, name) => format!("{namespace}/{name}"),
    }
}

/// Whether the list should be written before its interval is over. `named` are the addresses that the controller or a
/// user wants to be released; `wall_ms` is the time of day in Unix milliseconds.
pub(crate) fn is_urgent(
    published: &NodeAddressesSpec,
    named: &BTreeSet<Addr>,
    snapshot: &Snapshot,
    pods: &Pods,
    wall_ms: i64,
) -> bool {
    let in_use: BTreeSet<Addr> = snapshot.attachments.iter().flat_map(addresses).collect();
    let mut listed = BTreeSet::new();
    let mut is_awaited = false;
    for entry in published.entries() {
        for addr in entry.addresses {
            let awaited = entry.superseded || named.contains(&addr);
            is_awaited |= awaited && !in_use.contains(&addr);
            listed.insert(addr);
        }
    }
    let young = |it: &AttachmentRecord| {
        let age = wall_ms.saturating_sub(it.since_ms);
        u128::try_from(age).is_ok_and(|age| age < TO_BE_REPORTED.as_millis())
    };
    // If the store is lost, the runtime still knows the addresses of pods' own interfaces, so these addresses need not
    // be listed at once.
    let of_runtime =
        |it: &AttachmentRecord| it.attachment.ifname == OWN_INTERFACE && !pod_uid(it).is_empty();
    let others = snapshot.attachments.iter();
    let mut others = others.filter(|it| !of_runtime(it) && !young(it));
    let is_unlisted = |it: &AttachmentRecord| {
        addresses(it).any(|addr| !listed.contains(&addr) && !pods.report(addr))
    };
    let is_unknown = others.any(is_unlisted) && !Mutation::UnknownAddressesListedLate.is_on();
    is_awaited || is_unknown
}

/// Decides when to write the list. All times are those of one monotonic clock.
#[derive(Debug)]
pub(crate) struct Schedule {
    interval: Duration,
    soon: Duration,
    jitter: Jitter,
    is_writing: bool,
    next_at: Duration,
    soon_at: Duration,
    overdue_since: Option<Duration>,
}

/// What [`Schedule::next`] asks the caller to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListStep {
    /// Write the list, then call [`Schedule::written`]
    Write,
    /// Call [`Schedule::next`] again at this time
    At(Duration),
    /// Call [`Schedule::next`] again when the state has changed
    Nothing,
}

/// The outcome of writing the list.
#[derive(Debug)]
pub enum ListOutcome {
    /// The list was written. `Some` if the API server stored only a part of the list, because the installed CRD is
    /// older than the agent
    Done(Option<Box<PartialList>>),
    /// The write was rejected, or its outcome is indeterminate
    Failed,
}

/// A list of which the API server stored only a part.
#[derive(Clone, Debug)]
pub struct PartialList {
    /// The list that was sent
    pub written: NodeAddressesSpec,
    /// The list that the API server stored
    pub stored: NodeAddressesSpec,
}

impl Schedule {
    /// Returns a schedule that writes once per `interval`, or `soon` after the last write if the change is urgent.
    /// `random` seeds the jitter, which should differ between nodes.
    pub(crate) fn new(interval: Duration, soon: Duration, random: u64, now: Duration) -> Self {
        let mut jitter = Jitter::new(random);
        let soon = soon.min(interval);
        Self {
            interval,
            soon,
            is_writing: false,
            // The first writes are delayed by random times. Otherwise agents that start together would all write at
            // once.
            next_at: now + jitter.part(interval / 4),
            soon_at: now + jitter.part(soon / 4),
            overdue_since: None,
            jitter,
        }
    }

    /// Sets the intervals between writes. If an interval becomes shorter, the next write comes accordingly sooner.
    pub(crate) fn set_interval(&mut self, interval: Duration, soon: Duration, now: Duration) {
        let soon = soon.min(interval);
        if (interval, soon) != (self.interval, self.soon) {
            (self.interval, self.soon) = (interval, soon);
            self.next_at = self.next_at.min(now + self.jitter.pause(interval));
            self.soon_at = self.soon_at.min(now + self.jitter.pause(soon));
        }
    }

    /// Returns what to do now. `differs` says whether the addresses in use differ from the published list, and `urgent`
    /// whether the difference is written after the shorter interval.
    pub(crate) fn next(&mut self, differs: bool, urgent: bool, now: Duration) -> ListStep {
        if self.is_writing {
            return ListStep::Nothing;
        }
        if !differs {
            self.overdue_since = None;
            return ListStep::Nothing;
        }
        let at = if urgent {
            self.soon_at.min(self.next_at)
        } else {
            self.next_at
        };
        if at > now {
            return ListStep::At(at);
        }
        self.overdue_since.get_or_insert(now);
        self.is_writing = true;
        ListStep::Write
    }

    /// Records that a write has ended. If `done` is false, the next write follows after the pause `soon`.
    pub(crate) fn written(&mut self, done: bool, now: Duration) {
        self.is_writing = false;
        self.soon_at = now + self.jitter.pause(self.soon);
        self.next_at = self.soon_at;
        if done {
            self.overdue_since = None;
            self.next_at = now + self.jitter.pause(self.interval);
        }
    }

    /// Returns for how long a write has been overdue; zero if none is overdue.
    pub(crate) fn lag(&self, now: Duration) -> Duration {
        let since = self.overdue_since;
        since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    pub(crate) fn is_writing(&self) -> bool {
        self.is_writing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attached::{Attached, SecondNetworks};
    use crate::pods::testing::pod;
    use crate::snapshot::testing::{record, snapshot};
    use cadastre_daemon::watch::ObjectEvent;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn the_list_does_not_depend_on_the_order_in_the_store() {
        let mut it = snapshot(&[], &[]);
        it.attachments = vec![
            record("c1", "u1", &["10.0.0.9", "fd00::9"]),
            record("c2", "", &["10.0.0.5", "fd00::5"]),
        ];
        let published = list(&it, "boot");
        it.attachments.reverse();
        assert_eq!(list(&it, "boot"), published);
        assert_eq!(
            published.addresses,
            [
                "10.0.0.5,fd00::5 net/c2 eth0 - - 2027-01-15T08:00:00Z",
                "10.0.0.9,fd00::9 net/c1 eth0 u1 default/pod-u1 2027-01-15T08:00:00Z",
            ]
        );
        assert_eq!(
            (published.node_uid.as_str(), published.boot_id.as_str()),
            ("node", "boot")
        );
    }

    #[test]
    fn superseded_attachments_are_marked() {
        let mut it = snapshot(&[], &[]);
        it.attachments = vec![
            record("c1", "u1", &["10.0.0.1", "fd00::1"]),
            record("c2", "u1", &["10.0.0.2", "fd00::2"]),
        ];
        it.attachments[1].order = 2;
        let marks: Vec<bool> = list(&it, "boot")
            .entries()
            .map(|it| it.superseded)
            .collect();
        assert_eq!(marks, [true, false]);
    }

    #[test]
    fn a_shorter_interval_counts_at_once_and_a_longer_one_after_the_next_write() {
        let write_at = |schedule: &mut Schedule, now| match schedule.next(true, false, now) {
            ListStep::At(at) => at,
            step => panic!("{step:?}"),
        };
        let mut schedule = Schedule::new(5 * MINUTE, MINUTE, 7, Duration::ZERO);
        schedule.written(true, MINUTE);
        let first = write_at(&mut schedule, MINUTE);
        schedule.set_interval(20 * MINUTE, 2 * MINUTE, 2 * MINUTE);
        assert_eq!(write_at(&mut schedule, 2 * MINUTE), first);
        schedule.written(true, first);
        assert!(write_at(&mut schedule, first) >= first + 20 * MINUTE);
        schedule.set_interval(5 * MINUTE, MINUTE, first + MINUTE);
        let sooner = write_at(&mut schedule, first + MINUTE);
        assert!(sooner <= first + 7 * MINUTE, "{sooner:?}");
        assert!(
            schedule.soon_at <= first + 2 * MINUTE + MINUTE / 5,
            "{schedule:?}"
        );
    }

    #[test]
    fn the_list_is_never_too_large() {
        let long = "x".repeat(10_000);
        let mut it = snapshot(&[], &[]);
        for n in 1..3_000u32 {
            let v4 = format!("10.1.{}.{}", n >> 8, n & 255);
            it.attachments.push(record(&long, &long, &[&v4]));
        }
        let published = list(&it, &long);
        let bytes = serde_json::to_vec(&published).unwrap().len();
        assert!(bytes < MOST_BYTES + 1_000, "{bytes}");
        assert_eq!(published.addresses.len(), published.entries().count());
        assert!(published.addresses.len() > 1_000);
    }

    #[test]
    fn the_release_of_a_named_or_superseded_address_is_urgent() {
        let mut it = snapshot(&[], &[]);
        it.attachments = vec![record("c1", "u1", &["10.0.0.1"])];
        let published = list(&it, "boot");
        let addr = Addr::parse_strict("10.0.0.1").unwrap();
        let urgent = |named: &[Addr], published: &NodeAddressesSpec, it: &Snapshot| {
            let named = named.iter().copied().collect();
            is_urgent(published, &named, it, &Pods::default(), i64::MAX)
        };
        assert!(!urgent(&[addr], &published, &it), "the address is in use");
        it.attachments.clear();
        assert!(!urgent(&[], &published, &it));
        assert!(urgent(&[addr], &published, &it));
        let mut old = published.clone();
        old.addresses[0] += " superseded";
        assert!(urgent(&[], &old, &it));
    }

    #[test]
    fn what_nobody_else_would_know_of_is_told_soon() {
        let mut it = snapshot(&[], &[]);
        it.attachments = vec![record("c1", "u1", &["10.0.0.1"])];
        let since = it.attachments[0].since_ms;
        let nothing = NodeAddressesSpec::default();
        let mut pods = Pods::default();
        let urgent = |it: &Snapshot, pods: &Pods, age| {
            is_urgent(&nothing, &BTreeSet::new(), it, pods, since + age)
        };
        assert!(
            !urgent(&it, &pods, 60_000),
            "the runtime reports the address"
        );
        let had = it.attachments[0].pod.take();
        assert!(urgent(&it, &pods, 60_000), "the attachment has no pod");
        it.attachments[0].pod = had;
        it.attachments[0].attachment.ifname = "net1".to_owned();
        assert!(urgent(&it, &pods, 60_000));
        assert!(
            !urgent(&it, &pods, 9_000),
            "the pod may still report the address"
        );
        let published = list(&it, "boot");
        let soon = is_urgent(&published, &BTreeSet::new(), &it, &pods, since + 60_000);
        assert!(!soon, "the list has the address");
        let attached = Attached {
            network: "net".to_owned(),
            interface: "net1".to_owned(),
            addresses: addresses(&it.attachments[0]).collect(),
        };
        pods.change(ObjectEvent::Applied(crate::pods::Pod {
            second_networks: SecondNetworks::Known(vec![attached]),
            ..pod("u1", &[], &[])
        }));
        assert!(
            !urgent(&it, &pods, 60_000),
            "Multus has reported the address"
        );
    }

    #[test]
    fn the_list_is_written_once_per_interval_and_sooner_if_urgent() {
        let mut it = Schedule::new(5 * MINUTE, MINUTE / 2, 7, Duration::ZERO);
        assert_eq!(it.next(false, false, 10 * MINUTE), ListStep::Nothing);
        let mut now = 10 * MINUTE;
        assert_eq!(it.next(true, false, now), ListStep::Write);
        assert_eq!(it.next(true, true, now), ListStep::Nothing, "one at a time");
        it.written(true, now);
        let ListStep::At(at) = it.next(true, false, now) else {
            panic!("at once")
        };
        assert!((now + 5 * MINUTE..=now + 6 * MINUTE).contains(&at));
        let ListStep::At(at) = it.next(true, true, now) else {
            panic!("at once")
        };
        assert!((now + MINUTE / 2..=now + MINUTE).contains(&at));
        now = at;
        assert_eq!(it.next(true, true, now), ListStep::Write);
        it.written(false, now);
        assert_eq!(it.lag(now + MINUTE), MINUTE);
        let ListStep::At(at) = it.next(true, false, now) else {
            panic!("at once")
        };
        assert!(at <= now + MINUTE, "a failed write is repeated soon");
        assert_eq!(it.next(true, false, at), ListStep::Write);
        it.written(true, at);
        assert_eq!(it.lag(at), Duration::ZERO);
    }
}
