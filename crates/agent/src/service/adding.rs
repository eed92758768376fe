//! An ADD in progress, as a state machine without clock or IO. Each [`AddStep`] says what to ask the store or what to
//! wait for; [`super::Service`] then does so.
//!
//! ```text
//! wait for the pod ──► ask the store: best pool alone ──► all pools of the ADD ──► wait for a block, ask again ──► done
//! ```
//!
//! # Guarantees
//! - Every wait of an ADD ends when its caller's deadline comes near, or earlier: after the longest wait for a block.
//! - The store is asked once more at the end of the wait, because an address in cooldown may be free by then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::choice;
use crate::events;
use crate::pods::Pod;
use crate::shared::{ServiceState, WatchState};
use cadastre_core::mutation::Mutation;
use cadastre_node::{Add, OpError, OpErrorKind, OpOutcome, PoolOrder};

/// How long an ADD that does not depend on its pod waits for the watch to show the pod, because the runtime may be
/// slightly ahead of the watch.
const POD_WAIT: Duration = Duration::from_millis(300);
/// Waits end this long before the caller's deadline, so that time is left for the last attempt and the answer.
const MARGIN: Duration = Duration::from_millis(250);
/// The reason of the event about an annotation that cannot be parsed.
const INVALID_ANNOTATION: &str = "InvalidAnnotation";

/// What an ADD needs next.
#[derive(Debug)]
pub enum AddStep {
    /// Ask the store for addresses with this ADD
    Ask(Box<Add>, AskedAdd),
    /// Wait until the watches show a change
    ForPod(ForPod),
    /// Wait until the node has a new range, or the attachment is deleted
    ForBlock(ForBlock),
    /// Answer the caller
    Done(Result<OpOutcome, OpError>),
}

/// An ADD that waits for its pod to be seen.
#[derive(Debug)]
pub struct ForPod {
    adding: Box<Adding>,
    until: Duration,
}

/// An ADD that waits for the store's answer.
#[derive(Debug)]
pub struct AskedAdd {
    adding: Box<Adding>,
    what: For,
}

/// An ADD that waits for a block because no address was free.
#[derive(Debug)]
pub struct ForBlock {
    adding: Box<Adding>,
    wait: Wait,
}

#[derive(Debug)]
struct Adding {
    add: Add,
    /// The time since boot by which the caller must have its answer
    deadline: Duration,
    /// The longest wait for a block
    patience: Duration,
}

/// What the store was asked for.
#[derive(Debug)]
enum For {
    /// An address of the pools that the store's note of the pod names
    Note,
    /// An address of the best of several pools; the ADD may wait for this pool alone until the given time
    Best(PoolOrder, Duration),
    /// An address of any of these pools
    Any(PoolOrder),
    /// The same question again after a wait; `true` for the last attempt
    Again(Wait, bool),
}

#[derive(Debug)]
struct Wait {
    /// The pools from which blocks can be requested, best first
    wanted: Vec<String>,
    /// From how many of these pools blocks have been requested so far
    wished: usize,
    begun: Duration,
    until: Duration,
    /// All pools of the ADD, if it waits for the best pool alone
    best_of: Option<PoolOrder>,
}

impl Wait {
    /// Returns the time of the next step. Blocks of the best pool are requested first, and blocks of all other pools
    /// after half of the wait.
    fn next_at(&self) -> Duration {
        if self.wished < self.wanted.len() {
            self.begun + self.until.saturating_sub(self.begun) / 2
        } else {
            self.until
        }
    }
}

/// Starts an ADD that arrived at `now`. `patience`: its longest wait for a block.
pub fn begin(
    add: Add,
    deadline: Duration,
    patience: Duration,
    shown: &WatchState,
    desk: &mut ServiceState,
    now: Duration,
) -> AddStep {
    let for_pod = if shown.depends_on_pod(&add) {
        patience
    } else {
        POD_WAIT
    };
    let adding = Box::new(Adding {
        add,
        deadline,
        patience,
    });
    let until = adding.until(now + for_pod);
    ForPod { adding, until }.go(shown, desk, now)
}

impl ForPod {
    /// Returns the time at which the ADD continues without its pod.
    pub fn until(&self) -> Duration {
        self.until
    }

    /// Continues the ADD if the pod is known or the wait is over.
    pub fn go(self, shown: &WatchState, desk: &mut ServiceState, now: Duration) -> AddStep {
        let mut adding = self.adding;
        let wanted = adding.add.pod.as_ref();
        let pod = wanted.and_then(|it| shown.pods.find(it)).cloned();
        if wanted.is_some() && !shown.is_enough(pod.as_deref()) && now < self.until {
            return AddStep::ForPod(Self { adding, ..self });
        }
        let pools = match choose(&mut adding.add, pod.as_deref(), shown, desk) {
            Ok(pools) => pools,
            Err(refusal) => return AddStep::Done(Err(refusal)),
        };
        if !adding.add.decided {
            return adding.ask(For::Note);
        }
        match adding.absent(&pools, shown, desk, now) {
            Some(until) => adding.ask(For::Best(pools, until)),
            None => adding.ask(For::Any(pools)),
        }
    }
}

impl AskedAdd {
    /// Continues the ADD with the store's answer.
    pub fn answered(
        self,
        answer: Result<OpOutcome, OpError>,
        shown: &WatchState,
        desk: &mut ServiceState,
        now: Duration,
    ) -> AddStep {
        let Self { adding, what } = self;
        let may_wait = adding.may_wait(&answer);
        match (what, answer) {
            (For::Note, Err(refusal)) if refusal.why == OpErrorKind::PodUnknown => {
                let pod = adding.add.pod.unwrap_or_default();
                desk.turned_away = Some(format!("{}/{}", pod.namespace, pod.name));
                desk.is_changed = true;
                AddStep::Done(Err(refusal))
            }
            (For::Best(pools, until), Err(_)) if may_wait => {
                let wanted = named(&pools).iter().take(1).cloned().collect();
                adding.wait(wanted, until, Some(pools), desk, now)
            }
            (For::Best(pools, _), Err(_)) => adding.ask(For::Any(pools)),
            (For::Any(pools), Err(refusal)) if may_wait => {
                let wanted = askable(&pools, shown);
                if wanted.is_empty() && refusal.why == OpErrorKind::Exhausted {
                    return AddStep::Done(Err(refusal));
                }
                let until = adding.until(now + adding.patience);
                adding.wait(wanted, until, None, desk, now)
            }
            (For::Again(wait, is_last), answer) => {
                adding.answered_again(wait, is_last, answer, shown, desk, now)
            }
            (_, answer) => {
                if answer.is_ok() {
                    // An earlier ADD of the attachment may have waited in vain.
                    desk.pending_adds.remove(&adding.add.attachment);
                }
                AddStep::Done(answer)
            }
        }
    }
}

impl ForBlock {
    /// Returns the time at which the ADD continues even if nothing has changed.
    pub fn until(&self) -> Duration {
        self.wait.next_at()
    }

    /// Continues the ADD. With `is_news`, the store is asked again at once, because an address may be free.
    pub fn go(self, is_news: bool, desk: &mut ServiceState, now: Duration) -> AddStep {
        let Self { adding, mut wait } = self;
        if !is_news && now < wait.next_at() {
            return AddStep::ForBlock(Self { adding, wait });
        }
        if !is_news && now < wait.until {
            wait.wished = wait.wanted.len();
            return adding.wait_on(wait, desk, now);
        }
        let is_last = !is_news || now >= wait.until;
        adding.ask(For::Again(wait, is_last))
    }
}

impl Adding {
    /// Returns `time`, or the time when the caller's deadline comes near, if that is earlier.
    fn until(&self, time: Duration) -> Duration {
        time.min(self.deadline.saturating_sub(MARGIN))
    }

    /// Returns the time until which to wait for the best of several pools alone. `None`: do not wait, because the node
    /// has a block of the best pool, or cannot request one, or the wait is over. The wait makes sense although other
    /// pools may have free addresses, because the best pool takes precedence. It lasts half of the longest wait for a
    /// block, counted from the first waiting ADD that asked for the pool.
    fn absent(
        &self,
        pools: &PoolOrder,
        shown: &WatchState,
        desk: &ServiceState,
        now: Duration,
    ) -> Option<Duration> {
        let best = named(pools).first().filter(|_| named(pools).len() > 1)?;
        let is_there = shown.allocating_pools.contains(best) || !shown.askable.contains(best);
        if is_there || !shown.pods_followed || !self.add.addresses.is_empty() {
            return None;
        }
        let asked = desk.pending_adds.since(best).unwrap_or(now);
        let until = self.until(asked + self.patience / 2);
        (now < until).then_some(until)
    }

    fn ask(self: Box<Self>, what: For) -> AddStep {
        let mut add = self.add.clone();
        if let For::Best(pools, _)
        | For::Again(
            Wait {
                best_of: Some(pools),
                ..
            },
            _,
        ) = &what
        {
            add.pools = named(pools).iter().take(1).cloned().collect();
        }
        AddStep::Ask(Box::new(add), AskedAdd { adding: self, what })
    }

    /// Whether a new block could help.
    fn may_wait(&self, answer: &Result<OpOutcome, OpError>) -> bool {
        let lacks = |why: OpErrorKind| matches!(why, OpErrorKind::Exhausted | OpErrorKind::NoBlock);
        self.add.addresses.is_empty() && answer.as_ref().is_err_and(|it| lacks(it.why))
    }

    fn wait(
        self: Box<Self>,
        wanted: Vec<String>,
        until: Duration,
        best_of: Option<PoolOrder>,
        desk: &mut ServiceState,
        now: Duration,
    ) -> AddStep {
        let wait = Wait {
            wished: wanted.len().min(1),
            wanted,
            begun: now,
            until,
            best_of,
        };
        self.wait_on(wait, desk, now)
    }

    fn wait_on(self: Box<Self>, wait: Wait, desk: &mut ServiceState, now: Duration) -> AddStep {
        let pools = &wait.wanted[..wait.wished];
        if !pools.is_empty() && !Mutation::DemandNotReported.is_on() {
            desk.pending_adds.add(&self.add.attachment, pools, now);
            desk.is_changed = true;
        }
        AddStep::ForBlock(ForBlock { adding: self, wait })
    }

    fn answered_again(
        self: Box<Self>,
        mut wait: Wait,
        is_last: bool,
        answer: Result<OpOutcome, OpError>,
        shown: &WatchState,
        desk: &mut ServiceState,
        now: Duration,
    ) -> AddStep {
        let may_wait = self.may_wait(&answer);
        match answer {
            Err(_) if may_wait && !is_last => AddStep::ForBlock(ForBlock { adding: self, wait }),
            Ok(answer) => {
                desk.pending_adds.remove(&self.add.attachment);
                AddStep::Done(Ok(answer))
            }
            // The request for a block of the best pool stays although this wait was in vain, so that the next pods get
            // a block of it.
            Err(refusal) => match wait.best_of.take() {
                Some(pools) => self.ask(For::Any(pools)),
                None if may_wait => {
                    let waited = now.saturating_sub(wait.begun);
                    AddStep::Done(Err(exhausted(
                        refusal,
                        &wait.wanted,
                        waited,
                        &shown.at_limit,
                    )))
                }
                None => AddStep::Done(Err(refusal)),
            },
        }
    }
}

/// Writes to `add` which pools and addresses the pod may have, and returns the pools. If the choice depends on a pod
/// that is not known, `add` stays undecided. Returns an error if no pool serves the pod.
fn choose(
    add: &mut Add,
    pod: Option<&Pod>,
    shown: &WatchState,
    desk: &mut ServiceState,
) -> Result<PoolOrder, OpError> {
    let is_known = pod.is_some_and(|pod| shown.is_decidable(pod));
    if shown.depends_on_pod(add) && !is_known {
        return Ok(PoolOrder::default());
    }
    let namespace = add.pod.as_ref().map(|pod| pod.namespace.as_str());
    let asked = choice::PodRequest {
        ifname: &add.attachment.ifname,
        pools: &add.pools,
        addresses: &add.addresses,
        pod,
        namespace: namespace
            .and_then(|it| shown.namespaces.get(it))
            .map(Arc::as_ref),
    };
    let chosen = choice::decide(&asked, &shown.serving, &shown.others);
    if let Some(pod) = pod {
        let fresh = desk.report_errors(&pod.uid, &chosen.complaints).into_iter();
        let notices = fresh.map(|text| events::of_pod(pod, INVALID_ANNOTATION, text));
        desk.notices.extend(notices);
    }
    let choice = chosen.into_choice();
    add.decide(&choice).map_err(|text| OpError {
        why: OpErrorKind::NoBlock,
        text,
    })?;
    Ok(choice.pools)
}

fn named(pools: &PoolOrder) -> &[String] {
    match pools {
        PoolOrder::Named(names) | PoolOrder::Selected(names) => names,
        PoolOrder::All | PoolOrder::None(_) => &[],
    }
}

/// Returns those of `pools` from which blocks can be requested.
fn askable(pools: &PoolOrder, shown: &WatchState) -> Vec<String> {
    let is_askable = |name: &&String| shown.askable.contains(name);
    match pools {
        PoolOrder::All => {
            let automatic = |name: &&String| shown.automatic.contains(*name);
            shown.askable.iter().filter(automatic).cloned().collect()
        }
        pools => named(pools).iter().filter(is_askable).cloned().collect(),
    }
}

/// Returns the error of an ADD that waited for a block in vain. `at_limit`: the pools of which the node has its maximum
/// of blocks, with that maximum.
fn exhausted(
    refusal: OpError,
    wanted: &[String],
    waited: Duration,
    at_limit: &BTreeMap<String, u32>,
) -> OpError {
    if wanted.is_empty() {
        return refusal;
    }
    let names: Vec<String> = wanted.iter().map(|name| format!("`{name}`")).collect();
    let (names, seconds) = (names.join(", "), waited.as_secs_f64());
    let full = wanted.iter().find_map(|pool| at_limit.get_key_value(pool));
    let why = match full {
        Some((pool, most)) => format!(
            "the node has as many blocks of `{pool}` as its maxBlocksPerNode allows ({most}): raise it, or move pods to other nodes"
        ),
        None => format!(
            "see the events of this node and of the pool (kubectl describe ippools.cadastre.dev {})",
            wanted.first().map_or("", String::as_str),
        ),
    };
    let text = format!(
        "{} A block of {names} was asked for {seconds:.1} s ago and has not come: {why}",
        refusal.text,
    );
    OpError {
        why: OpErrorKind::Exhausted,
        text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_add_in_vain_names_what_keeps_the_block_away_and_what_to_do() {
        let told = |wanted: &[&str], at_limit: &[(&str, u32)]| {
            let refusal = OpError {
                why: OpErrorKind::NoBlock,
                text: "this node has no block.".to_owned(),
            };
            let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
            let at_limit = at_limit
                .iter()
                .map(|(pool, most)| ((*pool).to_owned(), *most));
            let waited = Duration::from_millis(2_500);
            exhausted(refusal, &wanted, waited, &at_limit.collect()).text
        };
        let text = told(&["web", "spare"], &[("spare", 3)]);
        for part in [
            "this node has no block. A block of `web`, `spare` was asked for 2.5 s ago",
            "as many blocks of `spare` as its maxBlocksPerNode allows (3): raise it",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = told(&["web"], &[("spare", 3)]);
        assert!(
            text.contains("kubectl describe ippools.cadastre.dev web"),
            "{text}"
        );
        assert_eq!(told(&[], &[("spare", 3)]), "this node has no block.");
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn any_of(pools: &[&str]) -> Add {
        Add {
            attachment: cadastre_node::Attachment {
                network: "net".to_owned(),
                container_id: "c".to_owned(),
                ifname: "eth0".to_owned(),
            },
            netns: String::new(),
            pod: None,
            pools: pools.iter().map(ToString::to_string).collect(),
            addresses: Vec::new(),
            decided: false,
            bound: Vec::new(),
        }
    }

    fn nothing() -> Result<OpOutcome, OpError> {
        Err(OpError {
            why: OpErrorKind::NoBlock,
            text: "nothing.".to_owned(),
        })
    }

    /// One node with one ADD of the pools a and b, which may wait for ten seconds.
    struct Bench {
        shown: WatchState,
        desk: ServiceState,
        step: AddStep,
    }

    impl Bench {
        /// Starts the ADD on a node that has blocks of the pools `giving`, and may request more blocks of both pools.
        fn new(giving: &[&str]) -> Self {
            let both = || vec!["a".to_owned(), "b".to_owned()];
            let shown = WatchState {
                pods_followed: true,
                pools_known: true,
                askable: both(),
                others: both(),
                allocating_pools: giving.iter().map(ToString::to_string).collect(),
                ..WatchState::default()
            };
            Self::begin(any_of(&["a", "b"]), 60 * SECOND, shown)
        }

        fn begin(add: Add, deadline: Duration, shown: WatchState) -> Self {
            let (mut desk, now) = (ServiceState::default(), Duration::ZERO);
            let step = begin(add, deadline, 10 * SECOND, &shown, &mut desk, now);
            Self { shown, desk, step }
        }

        fn next(&mut self, step: impl FnOnce(AddStep, &WatchState, &mut ServiceState) -> AddStep) {
            let before = std::mem::replace(&mut self.step, AddStep::Done(nothing()));
            self.step = step(before, &self.shown, &mut self.desk);
        }

        fn answer(&mut self, answer: Result<OpOutcome, OpError>, now: Duration) {
            self.next(|step, shown, desk| match step {
                AddStep::Ask(_, asked) => asked.answered(answer, shown, desk, now),
                other => panic!("{other:?}"),
            });
        }

        fn go(&mut self, is_news: bool, now: Duration) {
            self.next(|step, shown, desk| match step {
                AddStep::ForPod(pod) => pod.go(shown, desk, now),
                AddStep::ForBlock(block) => block.go(is_news, desk, now),
                other => panic!("{other:?}"),
            });
        }

        /// Returns the pools of which the store is asked for an address.
        fn asked(&self) -> &[String] {
            match &self.step {
                AddStep::Ask(add, _) => &add.pools,
                other => panic!("{other:?}"),
            }
        }

        /// Returns the time until which the ADD waits for a block.
        fn until(&self) -> Duration {
            match &self.step {
                AddStep::ForBlock(block) => block.until(),
                other => panic!("{other:?}"),
            }
        }

        fn wishes(&mut self, now: Duration) -> Vec<String> {
            self.desk.pending_adds.count(now).0.into_keys().collect()
        }
    }

    #[test]
    fn an_add_asks_for_a_block_of_its_best_pool_and_when_half_its_time_is_over_of_all() {
        let mut bench = Bench::new(&["a"]);
        assert_eq!(bench.asked(), ["a", "b"]);
        bench.answer(nothing(), Duration::ZERO);
        assert_eq!(bench.until(), 5 * SECOND);
        assert_eq!(bench.wishes(SECOND), ["a"]);
        bench.go(false, 5 * SECOND);
        assert_eq!(bench.until(), 10 * SECOND);
        assert_eq!(bench.wishes(5 * SECOND), ["a", "b"]);
        // The store is asked once more at the end of the wait, because an address in cooldown may be free by then.
        bench.go(false, 10 * SECOND);
        assert_eq!(bench.asked(), ["a", "b"]);
        bench.answer(nothing(), 10 * SECOND);
        let AddStep::Done(Err(refusal)) = bench.step else {
            panic!("{:?}", bench.step);
        };
        let text = &refusal.text;
        assert!(text.contains("asked for 10.0 s ago"), "{text}");
    }

    #[test]
    fn the_best_pool_is_waited_for_alone_for_half_the_time_where_no_block_of_it_is_here() {
        let mut bench = Bench::new(&["b"]);
        assert_eq!(bench.asked(), ["a"]);
        bench.answer(nothing(), Duration::ZERO);
        assert_eq!(bench.until(), 5 * SECOND);
        bench.go(true, SECOND);
        assert_eq!(bench.asked(), ["a"], "something has come");
        bench.answer(nothing(), SECOND);
        assert_eq!(bench.until(), 5 * SECOND);
        bench.go(false, 5 * SECOND);
        assert_eq!(bench.asked(), ["a"]);
        bench.answer(nothing(), 5 * SECOND);
        assert_eq!(bench.asked(), ["a", "b"], "in vain: any will do");
        assert_eq!(bench.wishes(5 * SECOND), ["a"], "for the next ones");
        bench.answer(Ok(OpOutcome::Done), 5 * SECOND);
        assert!(
            matches!(bench.step, AddStep::Done(Ok(_))),
            "{:?}",
            bench.step
        );
    }

    #[test]
    fn an_add_that_is_repeated_after_a_wait_in_vain_and_succeeds_at_once_demands_nothing_more() {
        let mut bench = Bench::new(&["a"]);
        bench.answer(nothing(), Duration::ZERO);
        assert_eq!(bench.wishes(SECOND), ["a"]);
        bench.step = begin(
            any_of(&["a", "b"]),
            60 * SECOND,
            10 * SECOND,
            &bench.shown,
            &mut bench.desk,
            SECOND,
        );
        bench.answer(Ok(OpOutcome::Done), SECOND);
        assert_eq!(bench.wishes(SECOND), Vec::<String>::new());
    }

    #[test]
    fn an_add_waits_for_its_pod_for_a_moment_and_then_the_store_decides_by_what_it_has_noted() {
        let add = Add {
            pod: Some(cadastre_node::PodRef {
                namespace: "ns".to_owned(),
                name: "p".to_owned(),
                uid: "u".to_owned(),
            }),
            ..any_of(&[])
        };
        let mut bench = Bench::begin(add, 4 * SECOND, WatchState::default());
        let AddStep::ForPod(pod) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        let until = Duration::from_millis(3_750);
        assert_eq!(pod.until(), until);
        bench.go(false, until);
        let AddStep::Ask(asked, _) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert!(!asked.decided);
        let unknown = Err(OpError {
            why: OpErrorKind::PodUnknown,
            text: String::new(),
        });
        bench.answer(unknown, until);
        assert!(
            matches!(bench.step, AddStep::Done(Err(_))),
            "{:?}",
            bench.step
        );
        assert_eq!(bench.desk.turned_away.as_deref(), Some("ns/p"));
        assert!(bench.desk.is_changed, "the loop tells people");
    }
}
