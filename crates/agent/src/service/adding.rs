//! An ADD in progress, as a state machine without clock or IO. Each [`AddStep`] is a request to the store, a probe, a
//! wait, or the answer; [`super::Service`] carries out the steps.
//!
//! ```text
//! wait for the pod ──► ask the store: best pool alone ──► all pools ──► wait for a block, ask again ──► done
//! ```
//!
//! If the store answers that addresses have to be probed first, the service probes them. Then the store gets the same
//! request again.
//!
//! # Guarantees
//! - A wait of an ADD ends when the caller's deadline is near, or earlier if the maximum wait for a block is over.
//! - At the end of the wait the store is asked once more, because an address may no longer be in cooldown.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::choice;
use crate::events;
use crate::pods::Pod;
use crate::shared::{ServiceState, WatchState};
use cadastre_api::AddressRequest;
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;
use cadastre_node::{Add, OpError, OpErrorKind, OpOutcome, PoolOrder};

/// How long an ADD that does not depend on its pod waits for the watch to show the pod. The runtime may know the pod
/// slightly earlier than the watch.
const POD_WAIT: Duration = Duration::from_millis(300);
/// A wait of an ADD ends this long before the caller's deadline, to leave time for the last attempt and the answer.
const MARGIN: Duration = Duration::from_millis(250);
/// The reason of the event about an annotation that cannot be parsed.
const INVALID_ANNOTATION: &str = "InvalidAnnotation";

/// The next step of an ADD.
#[derive(Debug)]
pub enum AddStep {
    /// Run this ADD on the store
    Ask(Box<Add>, AskedAdd),
    /// Probe the addresses that the store needs for this ADD, and record the answers
    Probe(Box<Add>, Probing),
    /// Wait until the watches show a change, but not beyond [`ForPod::until`]
    ForPod(ForPod),
    /// Wait until the node has a new range or the attachment is deleted, but not beyond [`ForBlock::until`]
    ForBlock(ForBlock),
    /// Answer the caller
    Done(Result<OpOutcome, OpError>),
}

/// An ADD that waits until the watch shows its pod.
#[derive(Debug)]
pub struct ForPod {
    adding: Box<Adding>,
    until: Duration,
}

/// An ADD that waits for the store's answer.
#[derive(Debug)]
pub struct AskedAdd {
    adding: Box<Adding>,
    attempt: Attempt,
}

/// An ADD whose addresses are being probed.
#[derive(Debug)]
pub struct Probing {
    asked: AskedAdd,
    refusal: OpError,
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
    /// The time since boot until which the caller waits for its answer
    deadline: Duration,
    /// The maximum wait for a block
    longest_wait: Duration,
    /// A request to create an IPClaim. The controller gets the request if the node does not have the addresses that the
    /// ADD asks for. `None` if the ADD asks for no addresses, if the controller reads the addresses from the pod's
    /// annotations, or if the controller creates no IPClaim for the pod
    request: Option<AddressRequest>,
}

/// One attempt of an ADD. The variant says for which addresses the ADD asks the store.
#[derive(Debug)]
enum Attempt {
    /// An address of the pools that the store's note lists for the pod (`notes.rs`)
    ByNote,
    /// An address of the best of several pools. If none is free, the ADD waits for a block of this pool until this time
    Best(PoolOrder, Duration),
    /// An address of any of these pools
    Any(PoolOrder),
    /// After a wait for a block: the addresses for which the ADD has waited. The flag is true for the last attempt
    Again(Wait, bool),
}

#[derive(Debug)]
struct Wait {
    /// The pools from which blocks can be requested, best first
    wanted: Vec<String>,
    /// The number of pools in `wanted` from which blocks were requested already
    requested: usize,
    begun: Duration,
    until: Duration,
    /// All pools of the ADD, while the ADD waits only for the best pool; otherwise `None`
    best_of: Option<PoolOrder>,
}

impl Wait {
    /// Returns the time of the next step. Blocks of the best pool are requested first. After half of the wait, blocks
    /// of all other pools are requested, too.
    fn next_at(&self) -> Duration {
        if self.requested < self.wanted.len() {
            self.begun + self.until.saturating_sub(self.begun) / 2
        } else {
            self.until
        }
    }
}

/// Starts an ADD that arrived at `now`. `longest_wait` is the maximum time that the ADD waits for a block.
pub fn begin(
    add: Add,
    deadline: Duration,
    longest_wait: Duration,
    watched: &WatchState,
    state: &mut ServiceState,
    now: Duration,
) -> AddStep {
    let for_pod = if watched.depends_on_pod(&add) {
        longest_wait
    } else {
        POD_WAIT
    };
    let adding = Box::new(Adding {
        add,
        deadline,
        longest_wait,
        request: None,
    });
    let until = adding.until(now + for_pod);
    ForPod { adding, until }.go(watched, state, now)
}

impl ForPod {
    /// Returns the time at which the ADD continues without its pod.
    pub fn until(&self) -> Duration {
        self.until
    }

    /// Continues the ADD if the pod is known or the wait is over.
    pub fn go(self, watched: &WatchState, state: &mut ServiceState, now: Duration) -> AddStep {
        let mut adding = self.adding;
        let wanted = adding.add.pod.as_ref();
        let pod = wanted.and_then(|it| watched.pods.find(it)).cloned();
        if wanted.is_some() && !watched.is_enough(pod.as_deref()) && now < self.until {
            return AddStep::ForPod(Self { adding, ..self });
        }
        let pools = match adding.choose(pod.as_deref(), watched, state) {
            Ok(pools) => pools,
            Err(refusal) => return AddStep::Done(Err(refusal)),
        };
        if !adding.add.decided {
            return adding.ask(Attempt::ByNote);
        }
        match adding.until_for_best(&pools, watched, state, now) {
            Some(until) => adding.ask(Attempt::Best(pools, until)),
            None => adding.ask(Attempt::Any(pools)),
        }
    }
}

impl AskedAdd {
    /// Continues the ADD with the store's answer.
    pub fn answered(
        self,
        answer: Result<OpOutcome, OpError>,
        watched: &WatchState,
        state: &mut ServiceState,
        now: Duration,
    ) -> AddStep {
        let answer = match answer {
            Err(refusal)
                if refusal.why == OpErrorKind::Unprobed
                    && now < self.adding.until(Duration::MAX) =>
            {
                let add = Box::new(self.adding.asked_for(&self.attempt));
                return AddStep::Probe(
                    add,
                    Probing {
                        asked: self,
                        refusal,
                    },
                );
            }
            answer => answer,
        };
        let Self { adding, attempt } = self;
        let may_wait = adding.may_wait(&answer);
        match (attempt, answer) {
            (Attempt::ByNote, Err(refusal)) if refusal.why == OpErrorKind::PodUnknown => {
                let pod = adding.add.pod.unwrap_or_default();
                state.turned_away = Some(format!("{}/{}", pod.namespace, pod.name));
                state.is_changed = true;
                AddStep::Done(Err(refusal))
            }
            (Attempt::Best(pools, until), Err(_)) if may_wait => {
                let wanted = named(&pools).iter().take(1).cloned().collect();
                adding.wait(wanted, until, Some(pools), state, now)
            }
            (Attempt::Best(pools, _), Err(_)) => adding.ask(Attempt::Any(pools)),
            (Attempt::Any(pools), Err(refusal)) if may_wait => {
                let wanted = if adding.add.addresses.is_empty() {
                    askable(&pools, watched)
                } else {
                    Vec::new()
                };
                if wanted.is_empty() && refusal.why == OpErrorKind::Exhausted {
                    return AddStep::Done(Err(refusal));
                }
                let until = adding.until(now + adding.longest_wait);
                adding.wait(wanted, until, None, state, now)
            }
            (Attempt::Again(wait, is_last), answer) => {
                adding.answered_again(wait, is_last, answer, watched, state, now)
            }
            (_, answer) => {
                if answer.is_ok() {
                    // An earlier ADD may have left requests, which are no longer needed.
                    adding.end_requests(state);
                }
                AddStep::Done(answer)
            }
        }
    }
}

impl Probing {
    /// Continues the ADD after its addresses were probed. If they could not be probed, the ADD ends with an error that
    /// contains the reason in `probed`.
    pub fn probed(self, probed: Result<(), String>) -> AddStep {
        match probed {
            Ok(()) => self.asked.adding.ask(self.asked.attempt),
            Err(why) => AddStep::Done(Err(OpError {
                text: format!("{} The last probe failed: {why}.", self.refusal.text),
                ..self.refusal
            })),
        }
    }
}

impl ForBlock {
    /// Returns the time at which the ADD continues even if nothing has changed.
    pub fn until(&self) -> Duration {
        self.wait.next_at()
    }

    /// Continues the ADD. If `is_news` is true, an address may be free, and the store is asked again at once.
    pub fn go(self, is_news: bool, state: &mut ServiceState, now: Duration) -> AddStep {
        let Self { adding, mut wait } = self;
        if !is_news && now < wait.next_at() {
            return AddStep::ForBlock(Self { adding, wait });
        }
        if !is_news && now < wait.until {
            wait.requested = wait.wanted.len();
            return adding.wait_on(wait, state, now);
        }
        let is_last = !is_news || now >= wait.until;
        adding.ask(Attempt::Again(wait, is_last))
    }
}

impl Adding {
    /// Returns `time`, but at the latest the time that is [`MARGIN`] before the caller's deadline.
    fn until(&self, time: Duration) -> Duration {
        time.min(self.deadline.saturating_sub(MARGIN))
    }

    /// Returns the time until which the ADD waits only for the best of several pools, even if other pools have free
    /// addresses. The wait lasts half of the maximum wait for a block, counted from the first waiting ADD that asked
    /// for the pool. Returns `None` if there is no wait, for example because the node has a block of the best pool or
    /// cannot request one.
    fn until_for_best(
        &self,
        pools: &PoolOrder,
        watched: &WatchState,
        state: &ServiceState,
        now: Duration,
    ) -> Option<Duration> {
        let best = named(pools).first().filter(|_| named(pools).len() > 1)?;
        let is_there = watched.allocating_pools.contains(best) || !watched.askable.contains(best);
        if is_there || !watched.pods_followed || !self.add.addresses.is_empty() {
            return None;
        }
        let asked = state.pending_adds.since(best).unwrap_or(now);
        let until = self.until(asked + self.longest_wait / 2);
        (now < until).then_some(until)
    }

    /// Records in the ADD which pools and addresses the pod may have, and returns the pools. If the choice depends on
    /// the pod and the pod is not known, the ADD stays undecided. Returns an error if no pool serves the pod.
    fn choose(
        &mut self,
        pod: Option<&Pod>,
        watched: &WatchState,
        state: &mut ServiceState,
    ) -> Result<PoolOrder, OpError> {
        let add = &mut self.add;
        let is_known = pod.is_some_and(|pod| watched.is_decidable(pod));
        if watched.depends_on_pod(add) && !is_known {
            return Ok(PoolOrder::default());
        }
        let namespace = add.pod.as_ref().map(|pod| pod.namespace.as_str());
        let request = choice::PodRequest {
            ifname: &add.attachment.ifname,
            pools: &add.pools,
            pod,
            namespace: namespace
                .and_then(|it| watched.namespaces.get(it))
                .map(Arc::as_ref),
        };
        let (choice, errors) = choice::decide(&request, &watched.serving, &watched.others);
        if let Some(pod) = pod {
            let new = state.report_errors(&pod.uid, errors).into_iter();
            let notices = new.map(|text| events::of_pod(pod, INVALID_ANNOTATION, text));
            state.notices.extend(notices);
        }
        add.decide(&choice)?;
        let is_by_cni = choice.addresses.is_empty() && add.claim_of_addresses().is_some();
        self.request = pod.filter(|_| is_by_cni).map(|pod| AddressRequest {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            addresses: add.addresses.iter().map(Addr::to_string).collect(),
        });
        Ok(choice.pools)
    }

    /// Removes the requests to the controller that this ADD, or an earlier ADD of the pod, has recorded.
    fn end_requests(&self, state: &mut ServiceState) {
        state.pending_adds.remove(&self.add.attachment);
        if let Some(request) = &self.request
            && state.address_requests.remove(&request.pod_uid)
        {
            state.is_changed = true;
        }
    }

    /// Returns the ADD as the store gets it in this attempt, with the pools of the attempt.
    fn asked_for(&self, attempt: &Attempt) -> Add {
        let mut add = self.add.clone();
        if let Attempt::Best(pools, _)
        | Attempt::Again(
            Wait {
                best_of: Some(pools),
                ..
            },
            _,
        ) = attempt
        {
            add.pools = named(pools).iter().take(1).cloned().collect();
        }
        add
    }

    fn ask(self: Box<Self>, attempt: Attempt) -> AddStep {
        let add = self.asked_for(&attempt);
        AddStep::Ask(
            Box::new(add),
            AskedAdd {
                adding: self,
                attempt,
            },
        )
    }

    /// Whether the ADD can wait for a block after this answer. It can wait if a new block of its pools, or the block of
    /// the pod's claim, could help.
    fn may_wait(&self, answer: &Result<OpOutcome, OpError>) -> bool {
        let lacks = |why: OpErrorKind| match why {
            OpErrorKind::Exhausted | OpErrorKind::NoBlock => self.add.addresses.is_empty(),
            OpErrorKind::NotInBlocks => self.add.claim_of_addresses().is_some(),
            _ => false,
        };
        answer.as_ref().is_err_and(|it| lacks(it.why))
    }

    fn wait(
        self: Box<Self>,
        wanted: Vec<String>,
        until: Duration,
        best_of: Option<PoolOrder>,
        state: &mut ServiceState,
        now: Duration,
    ) -> AddStep {
        let wait = Wait {
            requested: wanted.len().min(1),
            wanted,
            begun: now,
            until,
            best_of,
        };
        self.wait_on(wait, state, now)
    }

    fn wait_on(self: Box<Self>, wait: Wait, state: &mut ServiceState, now: Duration) -> AddStep {
        let pools = &wait.wanted[..wait.requested];
        if !pools.is_empty() && !Mutation::DemandNotReported.is_on() {
            state.pending_adds.add(&self.add.attachment, pools, now);
            state.is_changed = true;
        }
        if let Some(request) = &self.request
            && !Mutation::RequestNotReported.is_on()
        {
            state.address_requests.add(request.clone(), now);
            state.is_changed = true;
        }
        AddStep::ForBlock(ForBlock { adding: self, wait })
    }

    fn answered_again(
        self: Box<Self>,
        mut wait: Wait,
        is_last: bool,
        answer: Result<OpOutcome, OpError>,
        watched: &WatchState,
        state: &mut ServiceState,
        now: Duration,
    ) -> AddStep {
        let may_wait = self.may_wait(&answer);
        match answer {
            Err(_) if may_wait && !is_last => AddStep::ForBlock(ForBlock { adding: self, wait }),
            Ok(answer) => {
                self.end_requests(state);
                AddStep::Done(Ok(answer))
            }
            // After a wait without success, the request for a block of the best pool is kept, so that the next pods get
            // a block of that pool.
            Err(refusal) => match wait.best_of.take() {
                Some(pools) => self.ask(Attempt::Any(pools)),
                None if may_wait => {
                    let waited = now.saturating_sub(wait.begun);
                    AddStep::Done(Err(exhausted(
                        refusal,
                        &wait.wanted,
                        waited,
                        &watched.at_limit,
                    )))
                }
                None => AddStep::Done(Err(refusal)),
            },
        }
    }
}

fn named(pools: &PoolOrder) -> &[String] {
    match pools {
        PoolOrder::Named(names) | PoolOrder::Selected(names) => names,
        PoolOrder::All | PoolOrder::None(_) => &[],
    }
}

/// Returns those of `pools` from which blocks can be requested.
fn askable(pools: &PoolOrder, watched: &WatchState) -> Vec<String> {
    let is_askable = |name: &&String| watched.askable.contains(name);
    match pools {
        PoolOrder::All => {
            let automatic = |name: &&String| watched.automatic.contains(*name);
            watched.askable.iter().filter(automatic).cloned().collect()
        }
        pools => named(pools).iter().filter(is_askable).cloned().collect(),
    }
}

/// Returns the error of an ADD for which no block came in time. `at_limit` are the pools of which the node has the
/// maximum number of blocks, each with this maximum.
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
    use crate::snapshot::testing::attachment;

    const SECOND: Duration = Duration::from_secs(1);

    fn refused(why: OpErrorKind) -> OpError {
        let text = "this node has no block.".to_owned();
        OpError { why, text }
    }

    fn no_block() -> Result<OpOutcome, OpError> {
        Err(refused(OpErrorKind::NoBlock))
    }

    #[test]
    fn an_exhausted_add_says_why_no_block_came_and_what_to_do() {
        let text = |wanted: &[&str], at_limit: &[(&str, u32)]| {
            let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
            let at_limit = at_limit.iter();
            let at_limit = at_limit.map(|(pool, most)| ((*pool).to_owned(), *most));
            let waited = Duration::from_millis(2_500);
            let refusal = refused(OpErrorKind::NoBlock);
            exhausted(refusal, &wanted, waited, &at_limit.collect()).text
        };
        let full = text(&["web", "spare"], &[("spare", 3)]);
        for part in [
            "this node has no block. A block of `web`, `spare` was asked for 2.5 s ago",
            "as many blocks of `spare` as its maxBlocksPerNode allows (3): raise it",
        ] {
            assert!(full.contains(part), "{part}: {full}");
        }
        let other = text(&["web"], &[("spare", 3)]);
        let advice = "kubectl describe ippools.cadastre.dev web";
        assert!(other.contains(advice), "{other}");
        assert_eq!(text(&[], &[("spare", 3)]), "this node has no block.");
    }

    fn any_of(pools: &[&str]) -> Add {
        Add {
            attachment: attachment("c"),
            netns: String::new(),
            pod: None,
            pools: pools.iter().map(ToString::to_string).collect(),
            addresses: Vec::new(),
            decided: false,
            ..Add::default()
        }
    }

    /// A node with one ADD, which asks for the pools a and b and may wait for ten seconds.
    struct Bench {
        watched: WatchState,
        state: ServiceState,
        step: AddStep,
    }

    impl Bench {
        /// Starts the ADD on a node. The node has blocks of the pools in `allocating`, and may request more blocks of
        /// both pools.
        fn new(allocating: &[&str]) -> Self {
            let both = || vec!["a".to_owned(), "b".to_owned()];
            let watched = WatchState {
                pods_followed: true,
                pools_known: true,
                askable: both(),
                others: both(),
                allocating_pools: allocating.iter().map(ToString::to_string).collect(),
                ..WatchState::default()
            };
            Self::begin(any_of(&["a", "b"]), 60 * SECOND, watched)
        }

        fn begin(add: Add, deadline: Duration, watched: WatchState) -> Self {
            let (mut state, now) = (ServiceState::default(), Duration::ZERO);
            let step = begin(add, deadline, 10 * SECOND, &watched, &mut state, now);
            Self {
                watched,
                state,
                step,
            }
        }

        fn next(&mut self, step: impl FnOnce(AddStep, &WatchState, &mut ServiceState) -> AddStep) {
            let before = std::mem::replace(&mut self.step, AddStep::Done(no_block()));
            self.step = step(before, &self.watched, &mut self.state);
        }

        fn answer(&mut self, answer: Result<OpOutcome, OpError>, now: Duration) {
            self.next(|step, watched, state| match step {
                AddStep::Ask(_, asked) => asked.answered(answer, watched, state, now),
                other => panic!("{other:?}"),
            });
        }

        fn go(&mut self, is_news: bool, now: Duration) {
            self.next(|step, watched, state| match step {
                AddStep::ForPod(pod) => pod.go(watched, state, now),
                AddStep::ForBlock(block) => block.go(is_news, state, now),
                other => panic!("{other:?}"),
            });
        }

        /// Returns the pools from which the store is asked for an address.
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

        /// Starts another ADD.
        fn add(&mut self, add: Add, now: Duration) {
            let (watched, state) = (&self.watched, &mut self.state);
            self.step = begin(add, 60 * SECOND, 10 * SECOND, watched, state, now);
        }

        fn reported(&mut self, now: Duration) -> Vec<AddressRequest> {
            self.state.address_requests.current(now).0
        }

        fn requested(&mut self, now: Duration) -> Vec<String> {
            self.state.pending_adds.count(now).0.into_keys().collect()
        }
    }

    #[test]
    fn an_add_asks_for_a_block_of_its_best_pool_and_when_half_its_time_is_over_of_all() {
        let mut bench = Bench::new(&["a"]);
        assert_eq!(bench.asked(), ["a", "b"]);
        bench.answer(no_block(), Duration::ZERO);
        assert_eq!(bench.until(), 5 * SECOND);
        assert_eq!(bench.requested(SECOND), ["a"]);
        bench.go(false, 5 * SECOND);
        assert_eq!(bench.until(), 10 * SECOND);
        assert_eq!(bench.requested(5 * SECOND), ["a", "b"]);
        // At the end of the wait the store is asked once more, because an address may no longer be in cooldown.
        bench.go(false, 10 * SECOND);
        assert_eq!(bench.asked(), ["a", "b"]);
        bench.answer(no_block(), 10 * SECOND);
        let AddStep::Done(Err(refusal)) = bench.step else {
            panic!("{:?}", bench.step);
        };
        let text = &refusal.text;
        assert!(text.contains("asked for 10.0 s ago"), "{text}");
    }

    #[test]
    fn an_add_waits_for_half_its_time_for_the_best_pool_alone_if_the_node_has_no_block_of_it() {
        let mut bench = Bench::new(&["b"]);
        assert_eq!(bench.asked(), ["a"]);
        bench.answer(no_block(), Duration::ZERO);
        assert_eq!(bench.until(), 5 * SECOND);
        bench.go(true, SECOND);
        assert_eq!(bench.asked(), ["a"], "the node has a new block");
        bench.answer(no_block(), SECOND);
        assert_eq!(bench.until(), 5 * SECOND);
        bench.go(false, 5 * SECOND);
        assert_eq!(bench.asked(), ["a"]);
        bench.answer(no_block(), 5 * SECOND);
        assert_eq!(
            bench.asked(),
            ["a", "b"],
            "no block came, so any pool will do"
        );
        assert_eq!(bench.requested(5 * SECOND), ["a"], "for the next pods");
        bench.answer(Ok(OpOutcome::Done), 5 * SECOND);
        let is_done = matches!(bench.step, AddStep::Done(Ok(_)));
        assert!(is_done, "{:?}", bench.step);
    }

    #[test]
    fn a_repeated_add_that_succeeds_withdraws_its_request_for_a_block() {
        let mut bench = Bench::new(&["a"]);
        bench.answer(no_block(), Duration::ZERO);
        assert_eq!(bench.requested(SECOND), ["a"]);
        bench.step = begin(
            any_of(&["a", "b"]),
            60 * SECOND,
            10 * SECOND,
            &bench.watched,
            &mut bench.state,
            SECOND,
        );
        bench.answer(Ok(OpOutcome::Done), SECOND);
        assert_eq!(bench.requested(SECOND), Vec::<String>::new());
    }

    /// Returns a bench with the ADD of a pod in the namespace `default`. The pod's annotation `cadastre.dev/claim` has
    /// the value `claim`. No pool has a selector.
    fn annotated(claim: &str) -> Bench {
        bench_of("cadastre.dev/claim", claim)
    }

    fn bench_of(annotation: &str, value: &str) -> Bench {
        bench_with(&[(annotation, value)], of_pod(any_of(&["a"])))
    }

    /// Returns `add` with the pod `u`.
    fn of_pod(add: Add) -> Add {
        let pod = crate::pods::testing::pod("u", &[], &[]);
        Add {
            pod: Some(cadastre_node::PodRef {
                namespace: pod.namespace,
                name: pod.name,
                uid: pod.uid,
            }),
            ..add
        }
    }

    /// Returns an ADD of the pod `u`. The runtime asks for an address for this ADD.
    fn by_cni_add(ifname: &str) -> Add {
        let mut add = of_pod(any_of(&[]));
        ifname.clone_into(&mut add.attachment.ifname);
        add.addresses = vec![Addr::parse_strict("10.0.0.9").unwrap()];
        add
    }

    fn by_cni(annotations: &[(&str, &str)], ifname: &str) -> Bench {
        bench_with(annotations, by_cni_add(ifname))
    }

    fn bench_with(annotations: &[(&str, &str)], add: Add) -> Bench {
        let pod = crate::pods::testing::pod("u", &[], annotations);
        let mut watched = Bench::new(&["a"]).watched;
        watched.namespaces.pod_came("default");
        watched.namespaces.due(Duration::ZERO);
        let namespace = Some(crate::namespaces::Namespace::default());
        watched
            .namespaces
            .answered("default", namespace, Duration::ZERO);
        let seen = cadastre_daemon::watch::ObjectEvent::Applied(pod);
        watched.pods.change(seen);
        Bench::begin(add, 60 * SECOND, watched)
    }

    #[test]
    fn an_add_waits_for_its_claim_and_requests_no_block() {
        let mut bench = annotated("db");
        assert_eq!(bench.asked(), ["default/db"]);
        bench.answer(no_block(), Duration::ZERO);
        assert_eq!(bench.until(), 10 * SECOND);
        bench.go(true, SECOND);
        assert_eq!(bench.asked(), ["default/db"], "the node's ranges changed");
        bench.answer(no_block(), SECOND);
        assert_eq!(bench.requested(SECOND), Vec::<String>::new());
        bench.go(false, 10 * SECOND);
        bench.answer(no_block(), 10 * SECOND);
        let AddStep::Done(Err(refusal)) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert_eq!(*refusal, refused(OpErrorKind::NoBlock));
        // Another pod uses the claim, so no change of the ranges could help.
        let mut bench = annotated("db");
        bench.answer(Err(refused(OpErrorKind::NotFree)), Duration::ZERO);
        assert!(
            matches!(bench.step, AddStep::Done(Err(_))),
            "{:?}",
            bench.step
        );
    }

    #[test]
    fn an_add_waits_for_the_address_that_its_pod_asks_for_and_requests_no_block() {
        let not_here = || Err(refused(OpErrorKind::NotInBlocks));
        let mut bench = bench_of("cadastre.dev/addresses", "10.0.0.7");
        let AddStep::Ask(add, _) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert_eq!(add.addresses.len(), 1);
        bench.answer(not_here(), Duration::ZERO);
        assert_eq!(bench.until(), 10 * SECOND);
        bench.go(true, SECOND);
        bench.answer(not_here(), SECOND);
        assert_eq!(bench.requested(SECOND), Vec::<String>::new());
        bench.go(false, 10 * SECOND);
        bench.answer(not_here(), 10 * SECOND);
        let AddStep::Done(Err(refusal)) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert_eq!(*refusal, refused(OpErrorKind::NotInBlocks));
        // Another pod of the node has the address.
        let mut bench = bench_of("cadastre.dev/addresses", "10.0.0.7");
        bench.answer(Err(refused(OpErrorKind::NotFree)), Duration::ZERO);
        let is_done = matches!(bench.step, AddStep::Done(Err(_)));
        assert!(is_done, "{:?}", bench.step);
        // The controller reads the annotation itself, so the agent reports no request.
        assert!(bench.reported(Duration::ZERO).is_empty());
    }

    #[test]
    fn an_address_that_cni_requests_and_the_node_lacks_is_reported_while_the_add_waits() {
        let not_here = || Err(refused(OpErrorKind::NotInBlocks));
        let mut bench = by_cni(&[("cadastre.dev/pools", "a")], "eth0");
        assert!(bench.reported(Duration::ZERO).is_empty());
        bench.answer(not_here(), Duration::ZERO);
        let expected = AddressRequest {
            namespace: "default".to_owned(),
            pod: "pod-u".to_owned(),
            pod_uid: "u".to_owned(),
            addresses: vec!["10.0.0.9".to_owned()],
        };
        assert_eq!(
            bench.reported(Duration::ZERO),
            std::slice::from_ref(&expected)
        );
        assert!(bench.state.is_changed, "the loop publishes it");
        assert_eq!(bench.until(), 10 * SECOND);
        bench.go(false, 10 * SECOND);
        bench.answer(not_here(), 10 * SECOND);
        let is_refused = matches!(bench.step, AddStep::Done(Err(_)));
        assert!(is_refused, "{:?}", bench.step);
        // The request is kept after the ADD, so that the claim exists when the runtime tries again.
        assert_eq!(bench.reported(11 * SECOND), [expected]);
        bench.add(by_cni_add("eth0"), 11 * SECOND);
        bench.answer(Ok(OpOutcome::Done), 11 * SECOND);
        assert!(bench.reported(11 * SECOND).is_empty());

        // The controller creates a claim only for addresses of the interface `eth0`. Also, a pod that names a claim
        // uses no other claim. So no request is reported for either ADD.
        let claim: &[(&str, &str)] = &[("cadastre.dev/claim", "db")];
        for (annotations, ifname) in [(&[][..], "net1"), (claim, "eth0")] {
            let mut bench = by_cni(annotations, ifname);
            bench.answer(not_here(), Duration::ZERO);
            let is_done = matches!(bench.step, AddStep::Done(Err(_)));
            assert!(is_done && bench.reported(Duration::ZERO).is_empty());
        }
    }

    #[test]
    fn an_annotation_and_a_cni_request_must_not_ask_for_different_addresses() {
        let name = "cadastre.dev/addresses";
        let mut bench = by_cni(&[(name, "10.0.0.9,fd00::9")], "eth0");
        let AddStep::Ask(add, _) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert_eq!(add.addresses.len(), 1, "one of the pod's is enough");
        bench.answer(Err(refused(OpErrorKind::NotInBlocks)), Duration::ZERO);
        assert_eq!(bench.until(), 10 * SECOND);
        assert!(bench.reported(Duration::ZERO).is_empty());
        let bench = by_cni(&[(name, "10.0.0.7")], "eth0");
        let AddStep::Done(Err(refusal)) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        let says =
            "asks for 10.0.0.9, and the pod's annotation cadastre.dev/addresses for 10.0.0.7";
        assert!(refusal.text.contains(says), "{refusal}");
        let bench = by_cni(&[(name, "10.0.0.7")], "net1");
        let is_asked = matches!(bench.step, AddStep::Ask(..));
        assert!(is_asked, "the annotation is for eth0 only");
    }

    #[test]
    fn the_add_of_a_pod_whose_annotation_names_no_claim_is_refused_at_once() {
        let bench = annotated("No Name");
        let AddStep::Done(Err(refusal)) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert!(refusal.text.contains("\"No Name\""), "{refusal}");
        assert_eq!(bench.state.notices.len(), 1);
    }

    #[test]
    fn an_add_waits_for_its_pod_and_then_the_store_decides_by_its_note() {
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
        bench.answer(Err(refused(OpErrorKind::PodUnknown)), until);
        let is_refused = matches!(bench.step, AddStep::Done(Err(_)));
        assert!(is_refused, "{:?}", bench.step);
        assert_eq!(bench.state.turned_away.as_deref(), Some("ns/p"));
        assert!(bench.state.is_changed, "the loop emits an event");
    }

    #[test]
    fn an_add_is_probed_for_and_asks_the_same_again_until_its_time_is_over() {
        let unprobed = || Err(refused(OpErrorKind::Unprobed));
        let mut bench = Bench::new(&["b"]);
        assert_eq!(bench.asked(), ["a"]);
        bench.answer(unprobed(), Duration::ZERO);
        let AddStep::Probe(add, _) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert_eq!(add.pools, ["a"]);
        let probed = |bench: &mut Bench, outcome| {
            bench.next(|step, _, _| match step {
                AddStep::Probe(_, probing) => probing.probed(outcome),
                other => panic!("{other:?}"),
            });
        };
        probed(&mut bench, Ok(()));
        assert_eq!(bench.asked(), ["a"]);
        bench.answer(unprobed(), SECOND);
        probed(&mut bench, Err("no interface".to_owned()));
        let AddStep::Done(Err(refusal)) = &bench.step else {
            panic!("{:?}", bench.step);
        };
        assert_eq!(refusal.why, OpErrorKind::Unprobed);
        assert!(
            refusal
                .text
                .ends_with("The last probe failed: no interface."),
            "{refusal}"
        );
        // The caller's deadline is near, so nothing is probed any more.
        let mut bench = Bench::begin(any_of(&["a"]), SECOND, WatchState::default());
        bench.answer(unprobed(), SECOND);
        assert!(
            matches!(bench.step, AddStep::Done(Err(_))),
            "{:?}",
            bench.step
        );
    }
}
