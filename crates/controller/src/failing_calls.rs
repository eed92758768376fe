//! Calls that fail: when each call may be repeated, and which calls keep failing.
//!
//! A policy, a quota or a webhook may reject an object until an administrator acts, and some calls may never be
//! answered. So each call has a back-off of its own. Neither a watch event nor the success of another call shortens the
//! delay, even if the event or the other call is about the same object. A call that keeps failing is counted. If the
//! call is a write, an event reports that it keeps failing, at most once per [`REPORT_PAUSE`]. A call that is no longer
//! repeated is forgotten after a time.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Purpose;
use super::queue::{self, backoff};
use super::report::REPORT_PAUSE;
use crate::cluster::names::{ClaimName, NodeName, ObjectUid, PoolName};
use crate::cluster::request::{ObjectKind, Rejection, RequestOutcome};
use cadastre_core::Cidr;

/// Longest delay of a call that keeps failing. If many calls keep failing, their delays are longer, so that only one of
/// these calls is repeated per [`INTERVAL`]. So a policy that rejects thousands of objects costs the API server little.
const LONGEST: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(20);
/// Longest delay that a server can ask for (`Retry-After`).
const LONGEST_REQUESTED: Duration = Duration::from_secs(60);
/// After this many failures in a row, a call counts as one that keeps failing. The first number applies if the last
/// failure was a rejection or a missing answer. The second number applies if it was a conflict, a busy server, or a
/// write of which the server dropped a part.
const PERSISTENT: (u32, u32) = (3, 6);
/// What users can do about a write that keeps failing.
pub(crate) const WRITE_ADVICE: &str = "look for an admission policy, a webhook or a quota that forbids it, or for what keeps the API server from answering";
/// A call that was not repeated for this long after the end of its delay no longer counts as failing.
const GIVEN_UP: Duration = Duration::from_secs(60);

/// A kind of call about one object. If two kinds of call are about the same object, each has its own back-off.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectCall {
    /// Write of the podCIDRs of the node with this UID
    AssignPodCidrs(ObjectUid),
    /// Read of a node after a write with an unknown outcome or a conflict
    ReadNode(ObjectUid),
    /// List of the pods bound to the node of this name, whatever its UID
    ListPods(NodeName),
    /// Write of a NodeSubnet's spec
    WriteSubnet(NodeName),
    /// Read of a NodeSubnet after a write that conflicted or is indeterminate
    ReadSubnet(NodeName),
    /// Write of the controller's conditions in a NodeSubnet's status
    SetSubnetConditions(NodeName),
    /// Write of a node's taints
    SetTaints(NodeName),
    /// Write of a node's condition `AddressesExhausted`
    SetExhausted(NodeName),
    /// Eviction of the pod with this UID
    EvictPod(ObjectUid),
    /// Creation, change or deletion of an IPAMBlock
    WriteBlock(Cidr),
    /// Read of an IPAMBlock after a write that conflicted or is indeterminate, or because the watch is late
    ReadBlock(Cidr),
    /// Write of a pool's finalizers
    SetPoolFinalizers(PoolName),
    /// Write of a pool's status
    SetPoolStatus(PoolName),
    /// Creation, replacement or deletion of the object of this kind that lists the ranges of a node
    WriteRoutes(ObjectKind, NodeName),
    /// Read of the object of this kind that lists the ranges of a node
    ReadRoutes(ObjectKind, NodeName),
    /// Read of a pool after a write that conflicted or is indeterminate
    ReadPool(PoolName),
    /// Write of a claim's status or finalizers, or its deletion
    WriteClaim(ClaimName),
    /// Read of a claim after a write that conflicted or is indeterminate
    ReadClaim(ClaimName),
    /// Creation of the claim of a pod
    CreateClaim(ClaimName),
    /// Read of an IPAMClaim
    ReadIpamClaim(ClaimName),
    /// Write of the addresses to the status of an IPAMClaim
    FillIpamClaim(ClaimName),
}

impl ObjectCall {
    /// Returns the call of the request with this purpose. If `wrote` is true, this is the write, otherwise the read
    /// that follows a write. Returns `None` for requests whose loop has a back-off of its own.
    pub fn of(purpose: &Purpose, wrote: bool) -> Option<Self> {
        Some(match purpose {
            Purpose::Assign { uid, .. } if wrote => ObjectCall::AssignPodCidrs(uid.clone()),
            Purpose::Assign { uid, .. } => ObjectCall::ReadNode(uid.clone()),
            Purpose::Quarantine { name, .. }
            | Purpose::BlockPods { name, .. }
            | Purpose::LeakPods { name, .. } => ObjectCall::ListPods(name.clone()),
            Purpose::Subnet { name, .. } if wrote => ObjectCall::WriteSubnet(name.clone()),
            Purpose::Subnet { name, .. } => ObjectCall::ReadSubnet(name.clone()),
            Purpose::Answer { name } => ObjectCall::SetSubnetConditions(name.clone()),
            Purpose::Taints { name } => ObjectCall::SetTaints(name.clone()),
            Purpose::Evict { pod_uid, .. } => ObjectCall::EvictPod(pod_uid.clone()),
            Purpose::Exhausted { name } => ObjectCall::SetExhausted(name.clone()),
            Purpose::Routes { kind, name } if wrote => ObjectCall::WriteRoutes(*kind, name.clone()),
            Purpose::Routes { kind, name } => ObjectCall::ReadRoutes(*kind, name.clone()),
            Purpose::Block { cidr, .. } if wrote => ObjectCall::WriteBlock(*cidr),
            Purpose::Block { cidr, .. } => ObjectCall::ReadBlock(*cidr),
            Purpose::PoolFinalizers { name } => ObjectCall::SetPoolFinalizers(name.clone()),
            Purpose::PoolStatus { name } if wrote => ObjectCall::SetPoolStatus(name.clone()),
            Purpose::PoolStatus { name } => ObjectCall::ReadPool(name.clone()),
            Purpose::Claim { name } if wrote => ObjectCall::WriteClaim(name.clone()),
            Purpose::PodClaim { name } if wrote => ObjectCall::CreateClaim(name.clone()),
            Purpose::Claim { name } | Purpose::PodClaim { name } => {
                ObjectCall::ReadClaim(name.clone())
            }
            Purpose::IpamClaim { name, step } => step.call(name),
            Purpose::Relist(_)
            | Purpose::ListRoutes(_)
            | Purpose::Listening
            | Purpose::Touch { .. }
            | Purpose::DefaultPool => return None,
        })
    }

    fn is_write(&self) -> bool {
        !matches!(
            self,
            ObjectCall::ReadNode(_)
                | ObjectCall::ListPods(_)
                | ObjectCall::ReadSubnet(_)
                | ObjectCall::ReadRoutes(..)
                | ObjectCall::ReadBlock(_)
                | ObjectCall::ReadPool(_)
                | ObjectCall::ReadClaim(_)
                | ObjectCall::ReadIpamClaim(_)
        )
    }

    fn kind(&self) -> ObjectKind {
        match self {
            ObjectCall::AssignPodCidrs(_)
            | ObjectCall::ReadNode(_)
            | ObjectCall::ListPods(_)
            | ObjectCall::SetTaints(_)
            | ObjectCall::SetExhausted(_)
            | ObjectCall::EvictPod(_) => ObjectKind::Node,
            ObjectCall::WriteSubnet(_)
            | ObjectCall::ReadSubnet(_)
            | ObjectCall::SetSubnetConditions(_) => ObjectKind::Subnet,
            ObjectCall::WriteRoutes(kind, _) | ObjectCall::ReadRoutes(kind, _) => *kind,
            ObjectCall::WriteBlock(_) | ObjectCall::ReadBlock(_) => ObjectKind::Block,
            ObjectCall::SetPoolFinalizers(_)
            | ObjectCall::SetPoolStatus(_)
            | ObjectCall::ReadPool(_) => ObjectKind::Pool,
            ObjectCall::WriteClaim(_)
            | ObjectCall::ReadClaim(_)
            | ObjectCall::CreateClaim(_)
            | ObjectCall::ReadIpamClaim(_)
            | ObjectCall::FillIpamClaim(_) => ObjectKind::Claim,
        }
    }
}

/// Returns what may be wrong if the API server accepts a write of this kind of object but does not keep it.
fn not_kept(kind: ObjectKind) -> String {
    let why = match kind {
        ObjectKind::Node => "does a mutating webhook undo it?".to_owned(),
        ObjectKind::FrrConfiguration => "does this version of frr-k8s know all fields of the neighbors in the controller's settings?".to_owned(),
        _ => format!(
            "are its CRDs older than this controller ({})? Apply those of this version (cadastre crd | kubectl apply --server-side --force-conflicts -f -)",
            cadastre_core::VERSION
        ),
    };
    format!("it does not keep what is written: {why}")
}

/// The failures of a call since the call last succeeded, and the call's back-off.
#[derive(Clone, Debug, Default)]
struct CallFailures {
    /// Number of failures since the last success
    failures: u32,
    /// Monotonic time of the first failure since the call last succeeded
    since: Duration,
    /// When the call may be repeated, by the monotonic clock
    again_at: Duration,
    /// The server's last message; `None` if the call does not count as one that keeps failing
    persistent: Option<String>,
    /// When an event last reported that the call keeps failing
    reported_at: Option<Duration>,
}

/// A report about a call, which becomes an event.
#[derive(Debug, PartialEq, Eq)]
pub enum CallReport {
    /// The call keeps failing. The text is the server's message.
    Refused(String),
    /// The call has succeeded after its failure was reported.
    Accepted,
}

/// Calls that have failed recently, each with its back-off.
#[derive(Clone, Debug, Default)]
pub struct FailingCalls {
    calls: BTreeMap<ObjectCall, CallFailures>,
    /// Number of calls that keep failing now
    persistent: u32,
    swept_at: Duration,
}

impl FailingCalls {
    /// Returns the time until which the call has to wait after a failure. Returns `None` if the call may be made now.
    pub fn paused(&self, call: &ObjectCall, now: Duration) -> Option<Duration> {
        let until = self.calls.get(call)?.again_at;
        (until > now).then_some(until)
    }

    /// Records the outcome of a call. Returns a report if one is due. `kept` is false if the server accepted a write
    /// but dropped part of the object.
    pub fn note(
        &mut self,
        call: &ObjectCall,
        outcome: &RequestOutcome,
        kept: bool,
        now: Duration,
    ) -> Option<CallReport> {
        let (is_rejected, why) = match outcome {
            RequestOutcome::Rejected(Rejection::Rejected(why))
            | RequestOutcome::Indeterminate(why) => (true, why.clone()),
            RequestOutcome::Rejected(Rejection::Guard(why)) => (false, why.clone()),
            RequestOutcome::Rejected(Rejection::Missing) if call.is_write() => {
                (false, "it is not there".to_owned())
            }
            RequestOutcome::Rejected(Rejection::Busy(_)) => {
                (false, "the server is busy".to_owned())
            }
            RequestOutcome::Rejected(Rejection::NotSent) => (false, String::new()),
            _ if !kept => (false, not_kept(call.kind())),
            _ => return self.succeeded(call, now),
        };
        self.sweep(now);
        let others = self.persistent;
        let failing = self.calls.entry(call.clone()).or_default();
        if failing.failures == 0 {
            failing.since = now;
        }
        let failures = failing.failures;
        failing.failures += 1;
        let enough = if is_rejected {
            PERSISTENT.0
        } else {
            PERSISTENT.1
        };
        if failing.failures >= enough && !why.is_empty() {
            self.persistent += u32::from(failing.persistent.is_none());
            failing.persistent = Some(why.clone());
        }
        let longest = match failing.persistent {
            None => queue::LONGEST,
            Some(_) => LONGEST.max(INTERVAL * others),
        };
        let requested = match outcome {
            RequestOutcome::Rejected(Rejection::Busy(Some(after))) => {
                (*after).min(LONGEST_REQUESTED)
            }
            _ => Duration::ZERO,
        };
        failing.again_at = now + backoff(failures, longest).max(requested);
        let is_reported = failing.persistent.is_some() && call.is_write();
        if !is_reported
            || failing
                .reported_at
                .is_some_and(|at| at + REPORT_PAUSE > now)
        {
            return None;
        }
        failing.reported_at = Some(now);
        Some(CallReport::Refused(why))
    }

    fn succeeded(&mut self, call: &ObjectCall, now: Duration) -> Option<CallReport> {
        let failing = self.calls.get_mut(call)?;
        let was_persistent = failing.persistent.take().is_some();
        self.persistent -= u32::from(was_persistent);
        (failing.failures, failing.again_at) = (0, now);
        let was_reported = failing.reported_at.is_some();
        if !was_reported {
            self.calls.remove(call);
        }
        (was_reported && was_persistent).then_some(CallReport::Accepted)
    }

    fn sweep(&mut self, now: Duration) {
        if now < self.swept_at + GIVEN_UP / 4 {
            return;
        }
        self.swept_at = now;
        for failing in self.calls.values_mut() {
            if failing.again_at + GIVEN_UP <= now {
                self.persistent -= u32::from(failing.persistent.take().is_some());
                failing.failures = 0;
            }
        }
        self.calls.retain(|_, it| {
            it.failures > 0 || it.reported_at.is_some_and(|at| at + REPORT_PAUSE > now)
        });
    }

    /// Returns the calls that keep failing, each with the server's message and the monotonic time of its first failure.
    pub fn persistent(&self) -> impl Iterator<Item = (&ObjectCall, &str, Duration)> {
        let failing = self.calls.iter();
        failing.filter_map(|(call, it)| Some((call, it.persistent.as_deref()?, it.since)))
    }

    /// Returns the server's message if the call keeps failing.
    pub fn why(&self, call: &ObjectCall) -> Option<&str> {
        self.calls.get(call)?.persistent.as_deref()
    }

    /// Returns whether the last attempt of the call failed.
    pub(crate) fn is_failing(&self, call: &ObjectCall) -> bool {
        self.calls.get(call).is_some_and(|it| it.failures > 0)
    }

    /// Returns, for each kind of object, how many calls keep failing.
    pub fn count(&mut self, now: Duration) -> BTreeMap<ObjectKind, usize> {
        self.sweep(now);
        let mut count: BTreeMap<ObjectKind, usize> = BTreeMap::new();
        for (call, _, _) in self.persistent() {
            *count.entry(call.kind()).or_default() += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Duration = Duration::ZERO;

    fn rejected() -> RequestOutcome {
        RequestOutcome::Rejected(Rejection::Rejected("a policy forbids it".to_owned()))
    }

    fn call() -> ObjectCall {
        ObjectCall::SetPoolFinalizers("p".into())
    }

    /// Repeats a failing call at the end of each delay, from the time `from` to the time `until`. Returns the number of
    /// calls and the number of reports.
    fn fail(
        calls: &mut FailingCalls,
        call: &ObjectCall,
        from: Duration,
        until: Duration,
    ) -> (u32, usize) {
        let (mut now, mut count, mut reports) = (from, 0, 0);
        while now < until {
            count += 1;
            reports += usize::from(calls.note(call, &rejected(), true, now).is_some());
            now = calls.paused(call, now).unwrap();
        }
        (count, reports)
    }

    #[test]
    fn a_call_that_keeps_failing_is_repeated_ever_less_and_reported_once() {
        let mut calls = FailingCalls::default();
        let (count, reports) = fail(&mut calls, &call(), NONE, Duration::from_secs(60));
        assert!(
            count <= 10 && reports == 1,
            "{count} tries, {reports} reports"
        );
        assert_eq!(calls.count(Duration::from_secs(60))[&ObjectKind::Pool], 1);
        let status = ObjectCall::SetPoolStatus("p".into());
        assert_eq!(
            calls.paused(&status, NONE),
            None,
            "another call is not delayed"
        );
    }

    #[test]
    fn a_success_in_between_ends_the_pause_but_causes_no_new_report() {
        let mut calls = FailingCalls::default();
        fail(&mut calls, &call(), NONE, Duration::from_secs(20));
        let now = Duration::from_secs(30);
        let report = calls.note(&call(), &RequestOutcome::Gone, true, now);
        assert_eq!(report, Some(CallReport::Accepted));
        assert_eq!(calls.paused(&call(), now), None);
        let (_, reports) = fail(&mut calls, &call(), now, Duration::from_secs(90));
        assert_eq!(reports, 0);
        assert_eq!(calls.count(Duration::from_secs(90))[&ObjectKind::Pool], 1);
    }

    #[test]
    fn the_pause_that_the_server_asks_for_is_bounded() {
        let mut calls = FailingCalls::default();
        let busy =
            |seconds| RequestOutcome::Rejected(Rejection::Busy(Some(Duration::from_secs(seconds))));
        calls.note(&call(), &busy(7), true, NONE);
        assert_eq!(calls.paused(&call(), NONE), Some(Duration::from_secs(7)));
        calls.note(&call(), &busy(1_000_000), true, NONE);
        assert_eq!(calls.paused(&call(), NONE), Some(LONGEST_REQUESTED));
    }

    #[test]
    fn thousands_of_failing_calls_share_a_rate_and_are_forgotten() {
        let mut calls = FailingCalls::default();
        let call = |n: usize| ObjectCall::AssignPodCidrs(format!("u{n}").into());
        for round in 0..20 {
            for n in 0..5_000 {
                calls.note(&call(n), &rejected(), true, Duration::from_secs(round));
            }
        }
        let pause = calls.paused(&call(7), NONE).unwrap();
        assert!(pause >= Duration::from_secs(100), "{pause:?}");
        assert_eq!(calls.count(pause)[&ObjectKind::Node], 5_000);
        let later = pause + REPORT_PAUSE + GIVEN_UP;
        assert!(calls.count(later).is_empty() && calls.calls.is_empty());
    }

    #[test]
    fn some_conflicts_are_no_persistent_failure() {
        let mut calls = FailingCalls::default();
        for _ in 0..5 {
            let conflict = RequestOutcome::Rejected(Rejection::Guard("modified".to_owned()));
            assert_eq!(calls.note(&call(), &conflict, true, NONE), None);
        }
        assert!(calls.count(NONE).is_empty());
    }
}
