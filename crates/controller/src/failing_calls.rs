//! Calls that fail: when each call may be repeated, and which calls the API server keeps rejecting.
//!
//! A policy, a quota or a webhook may reject an object until an administrator acts, and some calls may never be
//! answered. So each call backs off by its own outcomes. The success of another call, even for the same object, does
//! not shorten its pause, nor does a watch event. A call that keeps failing is counted, and reported once.
//!
//! A call that is not repeated is forgotten after a time.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Purpose;
use super::queue::{self, backoff};
use super::report::REPORT_PAUSE;
use crate::cluster::names::{NodeName, ObjectUid, PoolName};
use crate::cluster::request::{ObjectKind, Rejection, RequestOutcome};
use cadastre_core::Cidr;

/// Longest pause of a call that keeps failing. If many calls keep failing, their pauses are longer, so that all of them
/// together are repeated at most once in [`EACH`]. So a policy against thousands of objects costs the API server
/// little.
const LONGEST: Duration = Duration::from_secs(30);
const EACH: Duration = Duration::from_millis(20);
/// Longest pause that is granted if the server asks for one.
const MOST_ASKED: Duration = Duration::from_secs(60);
/// After this many failures in a row, a call counts as one that keeps failing. The first number is for rejections and
/// missing answers, the second for conflicts and a busy server.
const LASTING: (u32, u32) = (3, 6);
/// A call that was not repeated for this long after its pause is no longer counted as failing.
const GIVEN_UP: Duration = Duration::from_secs(60);
/// A kind of call about one object. Different calls for one object back off independently.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectCall {
    /// Write of a node's podCIDRs, by its UID
    AssignPodCidrs(ObjectUid),
    /// Read of a node after a write with an unknown outcome or a conflict
    ReadNode(ObjectUid),
    /// List of the pods bound to the node of a name, whatever its UID
    ListPods(NodeName),
    /// Write of a NodeSubnet's spec
    WriteSubnet(NodeName),
    /// Read of a NodeSubnet
    ReadSubnet(NodeName),
    /// Write of the controller's conditions in a NodeSubnet's status
    SetSubnetConditions(NodeName),
    /// Creation, change or deletion of an IPAMBlock
    WriteBlock(Cidr),
    /// Read of an IPAMBlock
    ReadBlock(Cidr),
    /// Write of a pool's finalizers
    SetPoolFinalizers(PoolName),
    /// Write of a pool's status
    SetPoolStatus(PoolName),
    /// Read of a pool
    ReadPool(PoolName),
}

impl ObjectCall {
    /// Returns the call that a request makes. `wrote` tells a write from the read after it. Returns `None` for requests
    /// that do not back off here.
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
            Purpose::Block { cidr, .. } if wrote => ObjectCall::WriteBlock(*cidr),
            Purpose::Block { cidr, .. } => ObjectCall::ReadBlock(*cidr),
            Purpose::PoolFinalizers { name } => ObjectCall::SetPoolFinalizers(name.clone()),
            Purpose::PoolStatus { name } if wrote => ObjectCall::SetPoolStatus(name.clone()),
            Purpose::PoolStatus { name } => ObjectCall::ReadPool(name.clone()),
            Purpose::Relist(_)
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
                | ObjectCall::ReadBlock(_)
                | ObjectCall::ReadPool(_)
        )
    }

    /// Returns the kind of the object.
    fn kind(&self) -> ObjectKind {
        match self {
            ObjectCall::AssignPodCidrs(_) | ObjectCall::ReadNode(_) | ObjectCall::ListPods(_) => {
                ObjectKind::Node
            }
            ObjectCall::WriteSubnet(_)
            | ObjectCall::ReadSubnet(_)
            | ObjectCall::SetSubnetConditions(_) => ObjectKind::Subnet,
            ObjectCall::WriteBlock(_) | ObjectCall::ReadBlock(_) => ObjectKind::Block,
            ObjectCall::SetPoolFinalizers(_)
            | ObjectCall::SetPoolStatus(_)
            | ObjectCall::ReadPool(_) => ObjectKind::Pool,
        }
    }
}

/// Failures of one call.
#[derive(Debug, Default)]
struct CallFailures {
    /// Number of failures since the last success
    failures: u32,
    /// Time of the first of these failures, by the monotonic clock
    since: Duration,
    /// When the call may be repeated, by the monotonic clock
    again_at: Duration,
    /// The server's last message, once the call counts as one that keeps failing
    lasting: Option<String>,
    told_at: Option<Duration>,
}

/// What to report about a call.
#[derive(Debug, PartialEq, Eq)]
pub enum CallReport {
    /// The call keeps failing, for this reason.
    Refused(String),
    /// The call has succeeded after its failure was reported.
    Accepted,
}

/// All calls that have failed recently.
#[derive(Debug, Default)]
pub struct FailingCalls {
    calls: BTreeMap<ObjectCall, CallFailures>,
    lasting: u32,
    swept_at: Duration,
}

impl FailingCalls {
    /// Returns until when the call has to wait after a failure. Returns `None` if it may be made now.
    pub fn paused(&self, call: &ObjectCall, now: Duration) -> Option<Duration> {
        let until = self.calls.get(call)?.again_at;
        (until > now).then_some(until)
    }

    /// Records the outcome of a call, and returns what to report about the call. `kept` is false if the server accepted
    /// a write but dropped part of the object.
    pub fn note(
        &mut self,
        call: &ObjectCall,
        outcome: &RequestOutcome,
        kept: bool,
        now: Duration,
    ) -> Option<CallReport> {
        let (says_no, why) = match outcome {
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
            _ if !kept => (
                false,
                format!(
                    "it does not keep what is written: are its CRDs older than this controller ({})? Apply those of this version (cadastre crd | kubectl apply --server-side --force-conflicts -f -)",
                    cadastre_core::VERSION
                ),
            ),
            _ => return self.succeeded(call, now),
        };
        self.sweep(now);
        let refused = self.lasting;
        let failing = self.calls.entry(call.clone()).or_default();
        if failing.failures == 0 {
            failing.since = now;
        }
        let failures = failing.failures;
        failing.failures += 1;
        let enough = if says_no { LASTING.0 } else { LASTING.1 };
        if failing.failures >= enough && !why.is_empty() {
            self.lasting += u32::from(failing.lasting.is_none());
            failing.lasting = Some(why.clone());
        }
        let longest = match failing.lasting {
            None => queue::LONGEST,
            Some(_) => LONGEST.max(EACH * refused),
        };
        let asked = match outcome {
            RequestOutcome::Rejected(Rejection::Busy(Some(after))) => (*after).min(MOST_ASKED),
            _ => Duration::ZERO,
        };
        failing.again_at = now + backoff(failures, longest).max(asked);
        let lasting = failing.lasting.is_some() && call.is_write();
        if !lasting || failing.told_at.is_some_and(|at| at + REPORT_PAUSE > now) {
            return None;
        }
        failing.told_at = Some(now);
        Some(CallReport::Refused(why))
    }

    fn succeeded(&mut self, call: &ObjectCall, now: Duration) -> Option<CallReport> {
        let failing = self.calls.get_mut(call)?;
        let lasted = failing.lasting.take().is_some();
        self.lasting -= u32::from(lasted);
        (failing.failures, failing.again_at) = (0, now);
        let told = failing.told_at.is_some();
        if !told {
            self.calls.remove(call);
        }
        (told && lasted).then_some(CallReport::Accepted)
    }

    fn sweep(&mut self, now: Duration) {
        if now < self.swept_at + GIVEN_UP / 4 {
            return;
        }
        self.swept_at = now;
        for failing in self.calls.values_mut() {
            if failing.again_at + GIVEN_UP <= now {
                self.lasting -= u32::from(failing.lasting.take().is_some());
                failing.failures = 0;
            }
        }
        self.calls.retain(|_, it| {
            it.failures > 0 || it.told_at.is_some_and(|at| at + REPORT_PAUSE > now)
        });
    }

    /// Returns the calls that keep failing, each with the server's message and the monotonic time of its first failure.
    pub fn lasting(&self) -> impl Iterator<Item = (&ObjectCall, &str, Duration)> {
        let failing = self.calls.iter();
        failing.filter_map(|(call, it)| Some((call, it.lasting.as_deref()?, it.since)))
    }

    /// Returns the server's message if the call keeps failing.
    pub fn why(&self, call: &ObjectCall) -> Option<&str> {
        self.calls.get(call)?.lasting.as_deref()
    }

    /// Returns whether the call failed when it was made last.
    pub(crate) fn is_failing(&self, call: &ObjectCall) -> bool {
        self.calls.get(call).is_some_and(|it| it.failures > 0)
    }

    /// Returns how many calls keep failing for each kind of object.
    pub fn count(&mut self, now: Duration) -> BTreeMap<ObjectKind, usize> {
        self.sweep(now);
        let mut count: BTreeMap<ObjectKind, usize> = BTreeMap::new();
        for (call, _, _) in self.lasting() {
            *count.entry(call.kind()).or_default() += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Duration = Duration::ZERO;

    fn no() -> RequestOutcome {
        RequestOutcome::Rejected(Rejection::Rejected("a policy forbids it".to_owned()))
    }

    fn call() -> ObjectCall {
        ObjectCall::SetPoolFinalizers("p".into())
    }

    /// Repeats a failing call at the end of each pause. Returns the number of tries and the number of reports.
    fn fail(
        refusals: &mut FailingCalls,
        call: &ObjectCall,
        from: Duration,
        until: Duration,
    ) -> (u32, usize) {
        let (mut now, mut count, mut told) = (from, 0, 0);
        while now < until {
            count += 1;
            told += usize::from(refusals.note(call, &no(), true, now).is_some());
            now = refusals.paused(call, now).unwrap();
        }
        (count, told)
    }

    #[test]
    fn a_call_that_keeps_failing_is_repeated_ever_less_and_reported_once() {
        let mut refusals = FailingCalls::default();
        let (count, told) = fail(&mut refusals, &call(), NONE, Duration::from_secs(60));
        assert!(count <= 10 && told == 1, "{count} tries, told {told} times");
        assert_eq!(
            refusals.count(Duration::from_secs(60))[&ObjectKind::Pool],
            1
        );
        let status = ObjectCall::SetPoolStatus("p".into());
        assert_eq!(refusals.paused(&status, NONE), None, "only it is paused");
    }

    #[test]
    fn a_success_in_between_ends_the_pause_but_causes_no_new_report() {
        let mut refusals = FailingCalls::default();
        fail(&mut refusals, &call(), NONE, Duration::from_secs(20));
        let now = Duration::from_secs(30);
        let news = refusals.note(&call(), &RequestOutcome::Gone, true, now);
        assert_eq!(news, Some(CallReport::Accepted));
        assert_eq!(refusals.paused(&call(), now), None);
        let (_, told) = fail(&mut refusals, &call(), now, Duration::from_secs(90));
        assert_eq!(told, 0);
        assert_eq!(
            refusals.count(Duration::from_secs(90))[&ObjectKind::Pool],
            1
        );
    }

    #[test]
    fn the_pause_that_the_server_asks_for_is_bounded() {
        let mut refusals = FailingCalls::default();
        let busy =
            |seconds| RequestOutcome::Rejected(Rejection::Busy(Some(Duration::from_secs(seconds))));
        refusals.note(&call(), &busy(7), true, NONE);
        assert_eq!(refusals.paused(&call(), NONE), Some(Duration::from_secs(7)));
        refusals.note(&call(), &busy(1_000_000), true, NONE);
        assert_eq!(refusals.paused(&call(), NONE), Some(MOST_ASKED));
    }

    #[test]
    fn thousands_of_failing_calls_share_a_rate_and_are_forgotten() {
        let mut refusals = FailingCalls::default();
        let call = |n: usize| ObjectCall::AssignPodCidrs(format!("u{n}").into());
        for round in 0..20 {
            for n in 0..5_000 {
                refusals.note(&call(n), &no(), true, Duration::from_secs(round));
            }
        }
        let pause = refusals.paused(&call(7), NONE).unwrap();
        assert!(pause >= Duration::from_secs(100), "{pause:?}");
        assert_eq!(refusals.count(pause)[&ObjectKind::Node], 5_000);
        let later = pause + REPORT_PAUSE + GIVEN_UP;
        assert!(refusals.count(later).is_empty() && refusals.calls.is_empty());
    }

    #[test]
    fn some_conflicts_are_no_persistent_failure() {
        let mut refusals = FailingCalls::default();
        for _ in 0..5 {
            let conflict = RequestOutcome::Rejected(Rejection::Guard("modified".to_owned()));
            assert_eq!(refusals.note(&call(), &conflict, true, NONE), None);
        }
        assert!(refusals.count(NONE).is_empty());
    }
}
