//! An ADD under way, as a value: it says what it asks the store and what it waits for, and [`super::Service`] does so.
//! It reads no clock.
//!
//! ```text
//! for its pod ──► of the best pool alone ──► of all its pools ──► for a block, and again ──► done
//! ```
//!
//! # Guarantees
//! - It ends: when its caller's deadline comes near, or when it has waited for a block for as long as it may.
//! - It is asked of the store for the last time at the end of its wait: what cooled may be free by then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::choice::{Asked, decide};
use crate::events;
use crate::known::{Desk, Shown};
use crate::pods::Pod;
use cadastre_core::mutation::Mutation;
use cadastre_node::{Add, Answer, Pools, Refusal, Why};

/// How long an ADD that does not depend on it waits for its pod to be seen, while the watch is at work: the
/// runtime may be a little ahead.
const POD_WAIT: Duration = Duration::from_millis(300);
/// What of a deadline is left for the last try and the answer.
const MARGIN: Duration = Duration::from_millis(250);
/// Reason of the event about an annotation that cannot be read.
const INVALID_ANNOTATION: &str = "InvalidAnnotation";

/// An ADD under way.
#[derive(Debug)]
pub struct Adding {
    add: Add,
    /// No later than that it is answered
    deadline: Duration,
    /// How long it waits for a block
    patience: Duration,
    state: State,
}

/// What is to be done for it.
#[derive(Debug)]
pub enum Step {
    /// Ask the store, and go on with [`Adding::answered`]
    Ask(Box<Add>),
    /// Go on when there is news of the pods, and then at the latest
    ForPod(Duration),
    /// Go on when the node holds something new or the attachment is deleted, and then at the latest
    ForBlock(Duration),
    /// Answer that
    Done(Result<Answer, Refusal>),
}

#[derive(Debug)]
enum State {
    ForPod(Duration),
    /// The store was asked, for that
    Asked(For),
    ForBlock(Wait),
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one of an ADD under way")]
enum For {
    /// What the store has noted of its pod decides
    Note,
    /// An address of the best of several pools, which is waited for until then
    Best(Pools, Duration),
    /// An address of any of these
    Any(Pools),
    /// The same again, after a wait
    Again(Wait),
}

/// A wait for a block.
#[derive(Debug)]
struct Wait {
    /// What the store is asked again
    add: Add,
    /// Of the pools that blocks can be asked of, best first; that many of them are asked
    wanted: Vec<String>,
    wished: usize,
    begun: Duration,
    until: Duration,
    /// The next try is the last one
    is_last: bool,
    /// All that may be tried after it
    rest: Option<Pools>,
}

impl Wait {
    /// Of several pools the best is asked first, and all others when half of the time has brought nothing.
    fn next_at(&self) -> Duration {
        if self.wished < self.wanted.len() {
            self.begun + self.until.saturating_sub(self.begun) / 2
        } else {
            self.until
        }
    }
}

impl Adding {
    /// One that came now; `patience`: how long it may wait for a block.
    pub fn new(
        add: Add,
        deadline: Duration,
        patience: Duration,
        shown: &Shown,
        now: Duration,
    ) -> Self {
        let for_pod = if shown.depends_on_pod(&add) {
            patience
        } else {
            POD_WAIT
        };
        let until = (now + for_pod).min(deadline.saturating_sub(MARGIN));
        Self {
            add,
            deadline,
            patience,
            state: State::ForPod(until),
        }
    }

    /// Goes on: with `is_news`, what it waits for may have come.
    pub fn go(&mut self, is_news: bool, shown: &Shown, desk: &mut Desk, now: Duration) -> Step {
        match std::mem::replace(&mut self.state, State::Asked(For::Note)) {
            State::ForPod(until) => self.look_for_pod(until, shown, desk, now),
            State::ForBlock(wait) => self.look_for_block(wait, is_news, desk, now),
            asked @ State::Asked(_) => {
                self.state = asked;
                Step::ForBlock(self.deadline)
            }
        }
    }

    /// Goes on with the store's answer.
    pub fn answered(
        &mut self,
        answer: Result<Answer, Refusal>,
        shown: &Shown,
        desk: &mut Desk,
        now: Duration,
    ) -> Step {
        let State::Asked(what) = std::mem::replace(&mut self.state, State::Asked(For::Note)) else {
            return Step::Done(answer);
        };
        match what {
            For::Note => {
                if matches!(&answer, Err(refusal) if refusal.why == Why::PodUnknown) {
                    let pod = self.add.pod.clone().unwrap_or_default();
                    desk.turned_away = Some(format!("{}/{}", pod.namespace, pod.name));
                    desk.is_changed = true;
                }
                Step::Done(answer)
            }
            For::Best(pools, until) => match answer {
                Err(refusal) if may_wait(&refusal, &self.add) => {
                    let add = self.of_best(&pools);
                    let wanted = add.pools.clone();
                    self.wait(add, wanted, until, Some(pools), desk, now)
                }
                Err(_) => self.ask_any(pools),
                answer => Step::Done(answer),
            },
            For::Any(pools) => match answer {
                Err(refusal) if may_wait(&refusal, &self.add) => {
                    let wanted = askable(&pools, shown);
                    if wanted.is_empty() && refusal.why == Why::Exhausted {
                        return Step::Done(Err(refusal));
                    }
                    let until = (now + self.patience).min(self.deadline.saturating_sub(MARGIN));
                    self.wait(self.add.clone(), wanted, until, None, desk, now)
                }
                answer => Step::Done(answer),
            },
            For::Again(wait) => self.answered_again(wait, answer, shown, desk, now),
        }
    }

    fn look_for_pod(
        &mut self,
        until: Duration,
        shown: &Shown,
        desk: &mut Desk,
        now: Duration,
    ) -> Step {
        let wanted = self.add.pod.as_ref();
        let pod = wanted.and_then(|it| shown.pods.find(it)).cloned();
        if wanted.is_some() && !shown.is_enough(pod.as_deref()) && now < until {
            self.state = State::ForPod(until);
            return Step::ForPod(until);
        }
        let pools = match choose(&mut self.add, pod.as_deref(), shown, desk) {
            Ok(pools) => pools,
            Err(refusal) => return Step::Done(Err(refusal)),
        };
        if !self.add.decided {
            return self.ask(self.add.clone(), For::Note);
        }
        match self.absent(&pools, shown, desk, now) {
            Some(until) => {
                let add = self.of_best(&pools);
                self.ask(add, For::Best(pools, until))
            }
            None => self.ask_any(pools),
        }
    }

    /// Until when the best of several pools is waited for, if no block of it is here yet and one can be asked for:
    /// others may have addresses, but that one comes first. It is half of the time that an ADD waits, from when the
    /// first one asked.
    fn absent(&self, pools: &Pools, shown: &Shown, desk: &Desk, now: Duration) -> Option<Duration> {
        let best = named(pools).first().filter(|_| named(pools).len() > 1)?;
        let is_there = shown.giving.contains(best) || !shown.askable.contains(best);
        if is_there || !shown.pods_followed || !self.add.addresses.is_empty() {
            return None;
        }
        let asked = desk.wishes.since(best).unwrap_or(now);
        let until = (asked + self.patience / 2).min(self.deadline.saturating_sub(MARGIN));
        (now < until).then_some(until)
    }

    fn of_best(&self, pools: &Pools) -> Add {
        Add {
            pools: named(pools).iter().take(1).cloned().collect(),
            ..self.add.clone()
        }
    }

    fn ask_any(&mut self, pools: Pools) -> Step {
        self.ask(self.add.clone(), For::Any(pools))
    }

    fn ask(&mut self, add: Add, what: For) -> Step {
        self.state = State::Asked(what);
        Step::Ask(Box::new(add))
    }

    fn wait(
        &mut self,
        add: Add,
        wanted: Vec<String>,
        until: Duration,
        rest: Option<Pools>,
        desk: &mut Desk,
        now: Duration,
    ) -> Step {
        let wished = wanted.len().min(1);
        let wait = Wait {
            add,
            wanted,
            wished,
            begun: now,
            until,
            is_last: false,
            rest,
        };
        self.wish(&wait, desk, now);
        self.wait_on(wait)
    }

    fn wait_on(&mut self, wait: Wait) -> Step {
        let next = wait.next_at();
        self.state = State::ForBlock(wait);
        Step::ForBlock(next)
    }

    fn wish(&self, wait: &Wait, desk: &mut Desk, now: Duration) {
        let pools = &wait.wanted[..wait.wished];
        if !pools.is_empty() && !Mutation::WishesNotTold.is_on() {
            desk.wishes.add(&self.add.attachment, pools, now);
            desk.is_changed = true;
        }
    }

    fn look_for_block(
        &mut self,
        mut wait: Wait,
        is_news: bool,
        desk: &mut Desk,
        now: Duration,
    ) -> Step {
        if !is_news && now < wait.next_at() {
            return self.wait_on(wait);
        }
        if !is_news && now < wait.until {
            wait.wished = wait.wanted.len();
            self.wish(&wait, desk, now);
            return self.wait_on(wait);
        }
        wait.is_last = !is_news || now >= wait.until;
        let add = wait.add.clone();
        self.ask(add, For::Again(wait))
    }

    fn answered_again(
        &mut self,
        mut wait: Wait,
        answer: Result<Answer, Refusal>,
        shown: &Shown,
        desk: &mut Desk,
        now: Duration,
    ) -> Step {
        match answer {
            Err(refusal) if may_wait(&refusal, &wait.add) && !wait.is_last => self.wait_on(wait),
            Ok(answer) => {
                desk.wishes.remove(&self.add.attachment);
                Step::Done(Ok(answer))
            }
            // In vain the best pool stays asked for, for the pods that come next.
            Err(refusal) => match wait.rest.take() {
                Some(pools) => self.ask_any(pools),
                None if may_wait(&refusal, &wait.add) => {
                    let waited = now.saturating_sub(wait.begun);
                    Step::Done(Err(dry(refusal, &wait.wanted, waited, &shown.at_limit)))
                }
                None => Step::Done(Err(refusal)),
            },
        }
    }
}

/// Fills in what the pod wants, if that is known; refuses where no pool serves it.
fn choose(
    add: &mut Add,
    pod: Option<&Pod>,
    shown: &Shown,
    desk: &mut Desk,
) -> Result<Pools, Refusal> {
    let is_known = pod.is_some_and(|pod| shown.is_decidable(pod));
    if shown.depends_on_pod(add) && !is_known {
        return Ok(Pools::default());
    }
    let namespace = add.pod.as_ref().map(|pod| pod.namespace.as_str());
    let asked = Asked {
        ifname: &add.attachment.ifname,
        pools: &add.pools,
        addresses: &add.addresses,
        pod,
        namespace: namespace
            .and_then(|it| shown.namespaces.get(it))
            .map(Arc::as_ref),
    };
    let chosen = decide(&asked, &shown.serving, &shown.others);
    if let Some(pod) = pod {
        let fresh = desk.complain(&pod.uid, &chosen.complaints).into_iter();
        let notices = fresh.map(|text| events::of_pod(pod, INVALID_ANNOTATION, text));
        desk.notices.extend(notices);
    }
    let choice = chosen.into_choice();
    add.decide(&choice).map_err(|text| Refusal {
        why: Why::NothingHeld,
        text,
    })?;
    Ok(choice.pools)
}

fn named(pools: &Pools) -> &[String] {
    match pools {
        Pools::Named(names) | Pools::Selected(names) => names,
        Pools::All | Pools::None(_) => &[],
    }
}

/// The pools of these that blocks can be asked of.
fn askable(pools: &Pools, shown: &Shown) -> Vec<String> {
    let is_askable = |name: &&String| shown.askable.contains(name);
    match pools {
        Pools::All => {
            let automatic = |name: &&String| shown.automatic.contains(*name);
            shown.askable.iter().filter(automatic).cloned().collect()
        }
        pools => named(pools).iter().filter(is_askable).cloned().collect(),
    }
}

/// Whether a block might help.
fn may_wait(refusal: &Refusal, add: &Add) -> bool {
    add.addresses.is_empty() && matches!(refusal.why, Why::Exhausted | Why::NothingHeld)
}

/// What is answered after a wait in vain. `at_limit`: the pools of which the node has as many blocks as it may.
fn dry(
    refusal: Refusal,
    wanted: &[String],
    waited: Duration,
    at_limit: &BTreeMap<String, u32>,
) -> Refusal {
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
    Refusal {
        why: Why::Exhausted,
        text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_add_in_vain_names_what_keeps_the_block_away_and_what_to_do() {
        let told = |wanted: &[&str], at_limit: &[(&str, u32)]| {
            let refusal = Refusal {
                why: Why::NothingHeld,
                text: "this node has no block.".to_owned(),
            };
            let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
            let at_limit = at_limit
                .iter()
                .map(|(pool, most)| ((*pool).to_owned(), *most));
            let waited = Duration::from_millis(2_500);
            dry(refusal, &wanted, waited, &at_limit.collect()).text
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

    /// A node that holds blocks of `giving`, and may ask for more of all.
    fn shown(giving: &[&str]) -> Shown {
        Shown {
            pods_followed: true,
            pools_known: true,
            askable: vec!["a".to_owned(), "b".to_owned()],
            others: vec!["a".to_owned(), "b".to_owned()],
            giving: giving.iter().map(ToString::to_string).collect(),
            ..Shown::default()
        }
    }

    fn nothing() -> Result<Answer, Refusal> {
        Err(Refusal {
            why: Why::NothingHeld,
            text: "nothing.".to_owned(),
        })
    }

    fn pools_of(step: &Step) -> &[String] {
        match step {
            Step::Ask(add) => &add.pools,
            other => panic!("{other:?}"),
        }
    }

    fn wishes(desk: &mut Desk, now: Duration) -> Vec<String> {
        desk.wishes.count(now).0.into_keys().collect()
    }

    #[test]
    fn an_add_asks_for_a_block_of_its_best_pool_and_when_half_its_time_is_over_of_all() {
        let (shown, mut desk) = (shown(&["a"]), Desk::default());
        let mut adding = Adding::new(
            any_of(&["a", "b"]),
            60 * SECOND,
            10 * SECOND,
            &shown,
            Duration::ZERO,
        );
        let step = adding.go(true, &shown, &mut desk, Duration::ZERO);
        assert_eq!(pools_of(&step), ["a", "b"]);
        let step = adding.answered(nothing(), &shown, &mut desk, Duration::ZERO);
        assert!(
            matches!(step, Step::ForBlock(until) if until == 5 * SECOND),
            "{step:?}"
        );
        assert_eq!(wishes(&mut desk, SECOND), ["a"]);
        let step = adding.go(false, &shown, &mut desk, 5 * SECOND);
        assert!(
            matches!(step, Step::ForBlock(until) if until == 10 * SECOND),
            "{step:?}"
        );
        assert_eq!(wishes(&mut desk, 5 * SECOND), ["a", "b"]);
        // A last try at the end: what cooled may be free by then.
        let step = adding.go(false, &shown, &mut desk, 10 * SECOND);
        assert_eq!(pools_of(&step), ["a", "b"]);
        let step = adding.answered(nothing(), &shown, &mut desk, 10 * SECOND);
        let Step::Done(Err(refusal)) = step else {
            panic!("{step:?}");
        };
        assert!(
            refusal.text.contains("asked for 10.0 s ago"),
            "{}",
            refusal.text
        );
    }

    #[test]
    fn the_best_pool_is_waited_for_alone_for_half_the_time_where_no_block_of_it_is_here() {
        let (shown, mut desk) = (shown(&["b"]), Desk::default());
        let mut adding = Adding::new(
            any_of(&["a", "b"]),
            60 * SECOND,
            10 * SECOND,
            &shown,
            Duration::ZERO,
        );
        let step = adding.go(true, &shown, &mut desk, Duration::ZERO);
        assert_eq!(pools_of(&step), ["a"]);
        let step = adding.answered(nothing(), &shown, &mut desk, Duration::ZERO);
        assert!(
            matches!(step, Step::ForBlock(until) if until == 5 * SECOND),
            "{step:?}"
        );
        let step = adding.go(true, &shown, &mut desk, SECOND);
        assert_eq!(pools_of(&step), ["a"], "something has come");
        let step = adding.answered(nothing(), &shown, &mut desk, SECOND);
        assert!(matches!(step, Step::ForBlock(_)), "{step:?}");
        let step = adding.go(false, &shown, &mut desk, 5 * SECOND);
        assert_eq!(pools_of(&step), ["a"]);
        let step = adding.answered(nothing(), &shown, &mut desk, 5 * SECOND);
        assert_eq!(pools_of(&step), ["a", "b"], "in vain: any will do");
        assert_eq!(wishes(&mut desk, 5 * SECOND), ["a"], "for the next ones");
        let step = adding.answered(Ok(Answer::Done), &shown, &mut desk, 5 * SECOND);
        assert!(matches!(step, Step::Done(Ok(_))), "{step:?}");
    }

    #[test]
    fn an_add_waits_for_its_pod_for_a_moment_and_then_the_store_decides_by_what_it_has_noted() {
        let (shown, mut desk) = (Shown::default(), Desk::default());
        let add = Add {
            pod: Some(cadastre_node::PodRef {
                namespace: "ns".to_owned(),
                name: "p".to_owned(),
                uid: "u".to_owned(),
            }),
            ..any_of(&[])
        };
        let mut adding = Adding::new(add, 4 * SECOND, 10 * SECOND, &shown, Duration::ZERO);
        let step = adding.go(true, &shown, &mut desk, Duration::ZERO);
        let until = Duration::from_millis(3_750);
        assert!(matches!(step, Step::ForPod(at) if at == until), "{step:?}");
        let step = adding.go(false, &shown, &mut desk, until);
        let Step::Ask(asked) = step else {
            panic!("{step:?}");
        };
        assert!(!asked.decided);
        let unknown = Err(Refusal {
            why: Why::PodUnknown,
            text: String::new(),
        });
        let step = adding.answered(unknown, &shown, &mut desk, until);
        assert!(matches!(step, Step::Done(Err(_))), "{step:?}");
        assert_eq!(desk.turned_away.as_deref(), Some("ns/p"));
        assert!(desk.is_changed, "the loop tells people");
    }
}
