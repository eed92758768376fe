//! Which pool serves: one answer for the controller (a node), the agent (a pod) and people (why?).
//!
//! A pool serves who its selectors select. Of several the first one with room is used, in this
//! order: priority; the most requirements in its selectors, all three together; the most room; name.
//! Room is compared among pools of the same families only, as an IPv6 pool always has more: of pools that are
//! equal till then the oldest says which families are given. One that lacks any of these serves only who asks for it
//! by name, so that a pool which is added changes nobody's families, and a full one neither.
//!
//! Pools that are asked for by name come as they were asked for, whatever their selectors say, also
//! those that are `Manual`.
//!
//! # Guarantees
//! - The answer depends on the set of candidates, not on their order. Candidates that are nearly in
//!   order are put in order in nearly linear time.
//! - Room is asked for once a pool, and only where nothing before it decides: it is dear to count.
//! - Every candidate is either chosen or passed over, and for both there is a reason. Nothing is
//!   formatted until a [`Choice`] is displayed.
//!
//! # Caveats
//! - Of a pool that cannot serve and does not select the asker either, the selector is what is told.

mod explain;
mod selector;

pub use selector::{Requirement, Selector};

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use cadastre_core::mutation::Mutation;
use cadastre_core::{Dual, Family};

/// Key and value of a label.
pub type Label = (Arc<str>, Arc<str>);

/// A pool that might serve.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its name, unlike all others
    pub name: &'a str,
    /// Which nodes it serves
    pub node: &'a Selector,
    /// The pods of which namespaces
    pub namespace: &'a Selector,
    /// Which pods
    pub pod: &'a Selector,
    /// Higher first
    pub priority: i32,
    /// Which families it gives
    pub families: Dual<bool>,
    /// When it was made, in seconds since 1970
    pub created: i64,
    /// Whether it serves only those that ask for it by name
    pub manual: bool,
    /// Whether it can serve at all
    pub standing: Standing<'a>,
}

/// Whether a pool can serve anybody now.
#[derive(Clone, Copy)]
pub enum Standing<'a> {
    /// It can.
    Serving,
    /// It cannot, for that reason, however it is asked for.
    Barred(&'a dyn fmt::Display),
}

impl fmt::Debug for Standing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Standing::Serving => write!(f, "Serving"),
            Standing::Barred(why) => write!(f, "Barred({why})"),
        }
    }
}

/// Who asks. Labels are sorted by key.
#[derive(Clone, Copy, Debug)]
pub struct Asker<'a> {
    /// The labels of the node
    pub node: &'a [Label],
    /// The pod; `None` asks for the node as a whole
    pub pod: Option<PodLabels<'a>>,
    /// Pools asked for by name, best first; empty leaves it to the selectors
    pub by_name: &'a [&'a str],
}

/// The labels of a pod and of its namespace, sorted by key.
#[derive(Clone, Copy, Debug)]
pub struct PodLabels<'a> {
    /// Those of its namespace
    pub namespace: &'a [Label],
    /// Its own
    pub pod: &'a [Label],
}

/// What was chosen, and why. Displays as a few lines, the best pool first.
#[derive(Clone, Debug, Default)]
pub struct Choice<'a> {
    /// The pools to try, best first
    pub chosen: Vec<Chosen<'a>>,
    /// The others, in the order of the candidates; names that no candidate has come last
    pub passed_over: Vec<PassedOver<'a>>,
}

/// A pool to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen<'a> {
    /// Its index among the candidates
    pub at: usize,
    /// Its name
    pub name: &'a str,
    /// The node was asked for as a whole, and the pool serves some of its pods only: nothing should
    /// be given to the node before such a pod asks
    pub some_pods_only: bool,
    /// It lacks this family, which a pool of the same rank gives: it serves only who asks for it by name
    pub lacks: Option<Family>,
    /// What gave it its place
    pub place: Place,
}

/// What gives a chosen pool its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It was asked for by name.
    Asked,
    /// It came out of the comparison.
    Ranked {
        /// Higher first
        priority: i32,
        /// Requirements of all its selectors, more first
        requirements: usize,
        /// More first; `None` where it was not needed
        room: Option<u128>,
    },
}

/// A pool that is not to be tried.
#[derive(Clone, Copy, Debug)]
pub struct PassedOver<'a> {
    /// Its index among the candidates; `None` if there is no such pool
    pub at: Option<usize>,
    /// Its name
    pub name: &'a str,
    /// Why
    pub why: Reason<'a>,
}

/// Why a pool is not to be tried.
#[derive(Clone, Copy)]
pub enum Reason<'a> {
    /// It is asked for by name and does not exist.
    Unknown,
    /// It selects the asker, or was asked for by name, but cannot serve.
    Barred(&'a dyn fmt::Display),
    /// It selects the asker, but must be asked for by name.
    Manual,
    /// One of its selectors does not select the asker.
    Deselected {
        /// Which selector
        subject: Subject,
        /// The requirement that is not met
        wants: &'a Requirement,
        /// The value that its label has; `None` if there is no such label
        has: Option<&'a str>,
    },
    /// Others were asked for by name.
    NotAsked,
}

impl fmt::Debug for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a selector is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// `nodeSelector`
    Node,
    /// `namespaceSelector`
    Namespace,
    /// `podSelector`
    Pod,
}

/// The pools that may serve the asker, best first, and why the others may not.
///
/// `room` tells how much a pool can still give, in whatever unit is the same for all of them.
pub fn choose<'a>(
    candidates: &[Candidate<'a>],
    asker: &Asker<'a>,
    room: impl FnMut(&Candidate<'a>) -> u128,
) -> Choice<'a> {
    if asker.by_name.is_empty() {
        by_selectors(candidates, asker, room)
    } else {
        by_name(candidates, asker.by_name)
    }
}

fn by_name<'a>(candidates: &[Candidate<'a>], names: &[&'a str]) -> Choice<'a> {
    let mut choice = Choice::default();
    let mut unknown = Vec::new();
    for (nth, name) in names.iter().enumerate() {
        if names[..nth].contains(name) {
            continue;
        }
        match candidates.iter().position(|it| it.name == *name) {
            Some(at) if matches!(candidates[at].standing, Standing::Serving) => {
                choice.chosen.push(Chosen {
                    at,
                    name: candidates[at].name,
                    some_pods_only: false,
                    lacks: None,
                    place: Place::Asked,
                });
            }
            Some(_) => {}
            None => unknown.push(PassedOver {
                at: None,
                name,
                why: Reason::Unknown,
            }),
        }
    }
    for (at, candidate) in candidates.iter().enumerate() {
        let why = match candidate.standing {
            _ if !names.contains(&candidate.name) => Reason::NotAsked,
            Standing::Barred(why) => Reason::Barred(why),
            Standing::Serving => continue,
        };
        choice.pass_over(at, candidate, why);
    }
    choice.passed_over.append(&mut unknown);
    choice
}

fn by_selectors<'a>(
    candidates: &[Candidate<'a>],
    asker: &Asker<'a>,
    mut room: impl FnMut(&Candidate<'a>) -> u128,
) -> Choice<'a> {
    let mut choice = Choice::default();
    for (at, candidate) in candidates.iter().enumerate() {
        let why = match (candidate.deselects(asker), candidate.standing) {
            (Some(why), _) => why,
            (None, _) if candidate.manual => Reason::Manual,
            (None, Standing::Barred(why)) => Reason::Barred(why),
            (None, Standing::Serving) => {
                choice.chosen.push(candidate.chosen(at, asker));
                continue;
            }
        };
        choice.pass_over(at, candidate, why);
    }
    let chosen = &mut choice.chosen;
    chosen.sort_by(|a, b| (a.rank(), a.name).cmp(&(b.rank(), b.name)));
    let families = |it: &Chosen| candidates[it.at].families;
    let given = given_families(chosen, candidates);
    for tied in chosen.chunk_by_mut(|a, b| a.rank() == b.rank()) {
        let lacking = |it: &Chosen| lacking(given, families(it));
        if tied.iter().any(|it| lacking(it).is_none()) {
            for it in tied {
                it.lacks = lacking(it);
            }
        }
    }
    let is_apart =
        |it: &Chosen| families(it) != given && !Mutation::RoomComparedAcrossFamilies.is_on();
    let class = |it: &Chosen| (it.rank(), it.lacks.is_some(), is_apart(it));
    chosen.sort_by(|a, b| (class(a), a.name).cmp(&(class(b), b.name)));
    for tied in chosen.chunk_by_mut(|a, b| class(a) == class(b)) {
        if tied.len() == 1 {
            continue;
        }
        for it in &mut *tied {
            if let Place::Ranked { room: known, .. } = &mut it.place {
                *known = Some(room(&candidates[it.at]));
            }
        }
        tied.sort_by(|a, b| (b.room(), a.name).cmp(&(a.room(), b.name)));
    }
    choice
}

/// The families that the oldest of the best pools gives.
fn given_families(chosen: &[Chosen], candidates: &[Candidate]) -> Dual<bool> {
    let best = chosen.first().map(Chosen::rank);
    let best = chosen.iter().filter(|it| Some(it.rank()) == best);
    let oldest = best.min_by_key(|it| (candidates[it.at].created, it.name));
    oldest.map_or(Dual::default(), |it| candidates[it.at].families)
}

/// The first family of those that a pool lacks.
pub fn lacking(given: Dual<bool>, has: Dual<bool>) -> Option<Family> {
    let mut given = given.iter().filter(|(_, is_given)| **is_given);
    let (family, _) = given.find(|(family, _)| !has.get(*family))?;
    Some(family)
}

impl<'a> Candidate<'a> {
    /// Why the selectors do not select the asker, if they do not.
    fn deselects(&self, asker: &Asker<'a>) -> Option<Reason<'a>> {
        let unmet = |subject, selector: &'a Selector, labels: &'a [Label]| {
            let (wants, has) = selector.unmet(labels)?;
            Some(Reason::Deselected {
                subject,
                wants,
                has,
            })
        };
        unmet(Subject::Node, self.node, asker.node).or_else(|| {
            let PodLabels { namespace, pod } = asker.pod?;
            unmet(Subject::Namespace, self.namespace, namespace)
                .or_else(|| unmet(Subject::Pod, self.pod, pod))
        })
    }

    fn chosen(&self, at: usize, asker: &Asker) -> Chosen<'a> {
        let of_pods = self.namespace.specificity() + self.pod.specificity();
        Chosen {
            at,
            name: self.name,
            some_pods_only: asker.pod.is_none() && of_pods > 0,
            lacks: None,
            place: Place::Ranked {
                priority: self.priority,
                requirements: self.node.specificity() + of_pods,
                room: None,
            },
        }
    }
}

impl Chosen<'_> {
    /// What is compared before room and name, best first.
    fn rank(&self) -> Option<(Reverse<i32>, Reverse<usize>)> {
        match self.place {
            Place::Asked => None,
            Place::Ranked {
                priority,
                requirements,
                ..
            } => Some((Reverse(priority), Reverse(requirements))),
        }
    }

    fn room(&self) -> Option<u128> {
        match self.place {
            Place::Asked => None,
            Place::Ranked { room, .. } => room,
        }
    }
}

impl<'a> Choice<'a> {
    fn pass_over(&mut self, at: usize, candidate: &Candidate<'a>, why: Reason<'a>) {
        self.passed_over.push(PassedOver {
            at: Some(at),
            name: candidate.name,
            why,
        });
    }
}

#[cfg(test)]
mod tests;
