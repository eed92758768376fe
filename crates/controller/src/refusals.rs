//! Calls that come to nothing: when each may be made again, and which ones the API server refuses for good.
//!
//! A policy, a quota or a webhook may refuse one object for as long as nobody acts; an answer may never
//! come. So each call backs off by its own outcome: a success of another call, of the same object too, does
//! not hurry it, and no news makes it come before its pause is over. What keeps failing is counted, and told
//! once.
//!
//! Nothing has to be forgotten by hand: a call that nobody makes any more leaves by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Purpose;
use super::queue::{self, backoff};
use crate::cluster::request::{Kind, Outcome, Refusal};
use crate::cluster::seen::Text;
use cadastre_core::Cidr;

/// Longest pause of what has failed for long. All of those together are tried again at most once in
/// [`EACH`], so that a policy against thousands of objects costs the API server little.
const LONGEST: Duration = Duration::from_secs(30);
const EACH: Duration = Duration::from_millis(20);
/// The server may ask for a pause, but not for any.
const MOST_ASKED: Duration = Duration::from_secs(60);
/// So many failures in a row are lasting where the server says no or nothing at all, and where it says that
/// something else came first or that it is busy.
const LASTING: (u32, u32) = (3, 6);
/// A call that was not made for so long after its pause is not wanted any more.
const GIVEN_UP: Duration = Duration::from_secs(60);
/// What was told is not told again for so long, even if it came through in between.
const TOLD_AGAIN: Duration = Duration::from_secs(600);

/// A call about one object. Those of one object back off apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// podCIDRs for a node, by UID
    AssignPodCidrs(Text),
    /// A read of a node, by UID
    ReadNode(Text),
    /// The pods bound to a node of that name, whichever of its UIDs they are looked at for
    ListPods(Text),
    /// The spec of a NodeSubnet
    WriteSubnet(Text),
    /// A read of it
    ReadSubnet(Text),
    /// What the controller says in its status
    SetSubnetConditions(Text),
    /// Creation, change or deletion of an IPAMBlock
    WriteBlock(Cidr),
    /// A read of it
    ReadBlock(Cidr),
    /// The finalizers of a pool
    SetPoolFinalizers(Text),
    /// The status of a pool
    SetPoolStatus(Text),
    /// A read of a pool
    ReadPool(Text),
}

impl Call {
    /// The write of that purpose, or the read, if it is made again until it comes through.
    pub fn of(purpose: &Purpose, wrote: bool) -> Option<Self> {
        Some(match purpose {
            Purpose::Assign { uid, .. } if wrote => Call::AssignPodCidrs(uid.clone()),
            Purpose::Assign { uid, .. } => Call::ReadNode(uid.clone()),
            Purpose::Quarantine { name, .. }
            | Purpose::BlockPods { name, .. }
            | Purpose::LeakPods { name, .. } => Call::ListPods(name.clone()),
            Purpose::Subnet { name, .. } if wrote => Call::WriteSubnet(name.clone()),
            Purpose::Subnet { name, .. } => Call::ReadSubnet(name.clone()),
            Purpose::Answer { name } => Call::SetSubnetConditions(name.clone()),
            Purpose::Block { cidr, .. } if wrote => Call::WriteBlock(*cidr),
            Purpose::Block { cidr, .. } => Call::ReadBlock(*cidr),
            Purpose::PoolFinalizers { name } => Call::SetPoolFinalizers(name.clone()),
            Purpose::PoolStatus { name } if wrote => Call::SetPoolStatus(name.clone()),
            Purpose::PoolStatus { name } => Call::ReadPool(name.clone()),
            Purpose::Relist(_)
            | Purpose::Listening
            | Purpose::Touch { .. }
            | Purpose::DefaultPool => return None,
        })
    }

    fn is_write(&self) -> bool {
        !matches!(
            self,
            Call::ReadNode(_)
                | Call::ListPods(_)
                | Call::ReadSubnet(_)
                | Call::ReadBlock(_)
                | Call::ReadPool(_)
        )
    }

    /// The kind of object.
    fn kind(&self) -> Kind {
        match self {
            Call::AssignPodCidrs(_) | Call::ReadNode(_) | Call::ListPods(_) => Kind::Node,
            Call::WriteSubnet(_) | Call::ReadSubnet(_) | Call::SetSubnetConditions(_) => {
                Kind::Subnet
            }
            Call::WriteBlock(_) | Call::ReadBlock(_) => Kind::Block,
            Call::SetPoolFinalizers(_) | Call::SetPoolStatus(_) | Call::ReadPool(_) => Kind::Pool,
        }
    }
}

/// What a call has met with.
#[derive(Debug, Default)]
struct Failing {
    /// In a row
    failures: u32,
    /// Since when, monotonic
    since: Duration,
    /// When it may be made again
    again_at: Duration,
    /// What the server said, once it has failed for long
    lasting: Option<String>,
    told_at: Option<Duration>,
}

/// What is to be told of a call.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// It keeps failing: why.
    Refused(String),
    /// It came through after that was told.
    Accepted,
}

/// All calls that have failed lately.
#[derive(Debug, Default)]
pub struct Refusals {
    calls: BTreeMap<Call, Failing>,
    lasting: u32,
    swept_at: Duration,
}

impl Refusals {
    /// Until when the call has to wait, if it has to.
    pub fn paused(&self, call: &Call, now: Duration) -> Option<Duration> {
        let until = self.calls.get(call)?.again_at;
        (until > now).then_some(until)
    }

    /// Takes in what became of a call. `kept` is false where the server took a write and did not keep it.
    pub fn note(
        &mut self,
        call: &Call,
        outcome: &Outcome,
        kept: bool,
        now: Duration,
    ) -> Option<News> {
        let (says_no, why) = match outcome {
            Outcome::Refused(Refusal::Rejected(why)) | Outcome::Unclear(why) => (true, why.clone()),
            Outcome::Refused(Refusal::Guard(why)) => (false, why.clone()),
            Outcome::Refused(Refusal::Missing) if call.is_write() => {
                (false, "it is not there".to_owned())
            }
            Outcome::Refused(Refusal::Busy(_)) => (false, "the server is busy".to_owned()),
            Outcome::Refused(Refusal::NotSent) => (false, String::new()),
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
            Outcome::Refused(Refusal::Busy(Some(after))) => (*after).min(MOST_ASKED),
            _ => Duration::ZERO,
        };
        failing.again_at = now + backoff(failures, longest).max(asked);
        let lasting = failing.lasting.is_some() && call.is_write();
        if !lasting || failing.told_at.is_some_and(|at| at + TOLD_AGAIN > now) {
            return None;
        }
        failing.told_at = Some(now);
        Some(News::Refused(why))
    }

    fn succeeded(&mut self, call: &Call, now: Duration) -> Option<News> {
        let failing = self.calls.get_mut(call)?;
        let lasted = failing.lasting.take().is_some();
        self.lasting -= u32::from(lasted);
        (failing.failures, failing.again_at) = (0, now);
        let told = failing.told_at.is_some();
        if !told {
            self.calls.remove(call);
        }
        (told && lasted).then_some(News::Accepted)
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
        self.calls
            .retain(|_, it| it.failures > 0 || it.told_at.is_some_and(|at| at + TOLD_AGAIN > now));
    }

    /// Calls that keep failing, with what the server says of each and since when it fails (monotonic).
    pub fn lasting(&self) -> impl Iterator<Item = (&Call, &str, Duration)> {
        let failing = self.calls.iter();
        failing.filter_map(|(call, it)| Some((call, it.lasting.as_deref()?, it.since)))
    }

    /// Why the call keeps failing, if it does.
    pub fn why(&self, call: &Call) -> Option<&str> {
        self.calls.get(call)?.lasting.as_deref()
    }

    /// Whether it failed last, for long or not.
    pub(crate) fn is_failing(&self, call: &Call) -> bool {
        self.calls.get(call).is_some_and(|it| it.failures > 0)
    }

    /// How many calls keep failing, by the kind of object.
    pub fn count(&mut self, now: Duration) -> BTreeMap<Kind, usize> {
        self.sweep(now);
        let mut count: BTreeMap<Kind, usize> = BTreeMap::new();
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

    fn no() -> Outcome {
        Outcome::Refused(Refusal::Rejected("a policy forbids it".to_owned()))
    }

    fn call() -> Call {
        Call::SetPoolFinalizers("p".into())
    }

    /// Fails at each end of its pause; returns how often within the time, and what was told.
    fn fail(refusals: &mut Refusals, call: &Call, from: Duration, until: Duration) -> (u32, usize) {
        let (mut now, mut count, mut told) = (from, 0, 0);
        while now < until {
            count += 1;
            told += usize::from(refusals.note(call, &no(), true, now).is_some());
            now = refusals.paused(call, now).unwrap();
        }
        (count, told)
    }

    #[test]
    fn what_is_refused_for_good_is_tried_ever_less_and_told_once() {
        let mut refusals = Refusals::default();
        let (count, told) = fail(&mut refusals, &call(), NONE, Duration::from_secs(60));
        assert!(count <= 10 && told == 1, "{count} tries, told {told} times");
        assert_eq!(refusals.count(Duration::from_secs(60))[&Kind::Pool], 1);
        let status = Call::SetPoolStatus("p".into());
        assert_eq!(refusals.paused(&status, NONE), None, "only it is paused");
    }

    #[test]
    fn a_success_in_between_ends_the_pause_but_tells_nothing_anew() {
        let mut refusals = Refusals::default();
        fail(&mut refusals, &call(), NONE, Duration::from_secs(20));
        let now = Duration::from_secs(30);
        let news = refusals.note(&call(), &Outcome::Gone, true, now);
        assert_eq!(news, Some(News::Accepted));
        assert_eq!(refusals.paused(&call(), now), None);
        let (_, told) = fail(&mut refusals, &call(), now, Duration::from_secs(90));
        assert_eq!(told, 0);
        assert_eq!(refusals.count(Duration::from_secs(90))[&Kind::Pool], 1);
    }

    #[test]
    fn the_pause_that_the_server_asks_for_is_kept_within_bounds() {
        let mut refusals = Refusals::default();
        let busy = |seconds| Outcome::Refused(Refusal::Busy(Some(Duration::from_secs(seconds))));
        refusals.note(&call(), &busy(7), true, NONE);
        assert_eq!(refusals.paused(&call(), NONE), Some(Duration::from_secs(7)));
        refusals.note(&call(), &busy(1_000_000), true, NONE);
        assert_eq!(refusals.paused(&call(), NONE), Some(MOST_ASKED));
    }

    #[test]
    fn thousands_of_refused_objects_share_a_rate_and_leave_when_nobody_asks_for_them() {
        let mut refusals = Refusals::default();
        let call = |n: usize| Call::AssignPodCidrs(format!("u{n}").into());
        for round in 0..20 {
            for n in 0..5_000 {
                refusals.note(&call(n), &no(), true, Duration::from_secs(round));
            }
        }
        let pause = refusals.paused(&call(7), NONE).unwrap();
        assert!(pause >= Duration::from_secs(100), "{pause:?}");
        assert_eq!(refusals.count(pause)[&Kind::Node], 5_000);
        let later = pause + TOLD_AGAIN + GIVEN_UP;
        assert!(refusals.count(later).is_empty() && refusals.calls.is_empty());
    }

    #[test]
    fn a_conflict_or_two_is_nothing_lasting() {
        let mut refusals = Refusals::default();
        for _ in 0..5 {
            let conflict = Outcome::Refused(Refusal::Guard("modified".to_owned()));
            assert_eq!(refusals.note(&call(), &conflict, true, NONE), None);
        }
        assert!(refusals.count(NONE).is_empty());
    }
}
