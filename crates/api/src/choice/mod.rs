//! Which pool serves a node or a pod, and why: used by the controller, the agent and the kubectl plugin.
//!
//! A pool serves those whom its selectors match. Of several pools the first one with room is used, in this
//! order: priority; number of requirements in all three selectors; families of the oldest; room; name. Room is
//! only compared among pools of the same families, because an IPv6 pool always has more. Among the pools that
//! are best by priority and requirements the oldest determines which families are assigned. A pool of the same
//! rank that lacks one of these families only serves those who ask for it by name, so that neither adding a
//! pool nor exhausting one changes anybody's families.
//!
//! Pools that are asked for by name are used in the order given, whatever their selectors say, including
//! `Manual` pools.
//!
//! # Guarantees
//! - The answer depends on the set of candidates, not on their order. Nearly sorted candidates are sorted in
//!   nearly linear time.
//! - Room is queried at most once per pool, and only to break a tie, because counting it is expensive.
//! - Every candidate is either chosen or passed over, with a reason. Nothing is formatted before a [`PoolChoice`]
//!   is displayed.
//!
//! # Caveats
//! - For a pool that cannot serve and does not select the asker either, the reason is the selector.

mod explain;
mod selector;

pub use selector::{Requirement, Selector};

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use cadastre_core::mutation::Mutation;
use cadastre_core::{Dual, Family};

/// Key and value of a label. Labels are passed as slices sorted by key.
pub type Label = (Arc<str>, Arc<str>);

/// A pool that may be chosen.
#[derive(Clone, Copy, Debug)]
pub struct PoolCandidate<'a> {
    /// Name of the pool; unique among the candidates
    pub name: &'a str,
    /// `nodeSelector` of the pool
    pub node: &'a Selector,
    /// `namespaceSelector` of the pool
    pub namespace: &'a Selector,
    /// `podSelector` of the pool
    pub pod: &'a Selector,
    /// Higher is better
    pub priority: i32,
    /// The families that the pool has ranges of
    pub families: Dual<bool>,
    /// Creation time, in seconds since 1970
    pub created: i64,
    /// Whether it serves only those who ask for it by name
    pub manual: bool,
    /// Whether it can serve at all
    pub standing: PoolStanding<'a>,
}

/// Whether a pool can currently serve anybody.
#[derive(Clone, Copy)]
pub enum PoolStanding<'a> {
    /// The pool can serve.
    Serving,
    /// The pool cannot serve for this reason, not even those who ask for it by name.
    Barred(&'a dyn fmt::Display),
}

impl fmt::Debug for PoolStanding<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolStanding::Serving => write!(f, "Serving"),
            PoolStanding::Barred(why) => write!(f, "Barred({why})"),
        }
    }
}

/// The node or pod that a pool is chosen for. Labels are sorted by key.
#[derive(Clone, Copy, Debug)]
pub struct Requester<'a> {
    /// The labels of the node
    pub node: &'a [Label],
    /// The pod; `None` chooses for the node as a whole
    pub pod: Option<PodLabels<'a>>,
    /// Names of the pools that were asked for, best first; if empty, selectors decide
    pub by_name: &'a [&'a str],
}

/// The labels of a pod and of its namespace, sorted by key.
#[derive(Clone, Copy, Debug)]
pub struct PodLabels<'a> {
    /// The labels of the pod's namespace
    pub namespace: &'a [Label],
    /// The labels of the pod itself
    pub pod: &'a [Label],
}

/// The result of [`choose`]. Displays as one line per pool, the best first.
#[derive(Clone, Debug, Default)]
pub struct PoolChoice<'a> {
    /// The pools to try, best first
    pub chosen: Vec<ChosenPool<'a>>,
    /// The other pools in the order of the candidates, then names that no candidate has
    pub passed_over: Vec<PassedOver<'a>>,
}

/// A pool to try, and what decided its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenPool<'a> {
    /// Index of the pool among the candidates
    pub at: usize,
    /// Name of the pool
    pub name: &'a str,
    /// The choice is for a node as a whole, and the pool serves only some of its pods. So the node should not
    /// get a block of it before such a pod asks.
    pub some_pods_only: bool,
    /// A family that the pool lacks and a pool of the same rank has. Therefore the pool only serves those who
    /// ask for it by name.
    pub lacks: Option<Family>,
    /// What determined its place in the order
    pub place: PoolRank,
}

/// What determined the place of a chosen pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolRank {
    /// The pool was asked for by name.
    Asked,
    /// The pool was compared with others.
    Ranked {
        /// Higher is better
        priority: i32,
        /// Number of requirements in all selectors; more is better
        requirements: usize,
        /// More is better; `None` if it was not needed to break a tie
        room: Option<u128>,
    },
}

/// A pool that must not be tried.
#[derive(Clone, Copy, Debug)]
pub struct PassedOver<'a> {
    /// Index of the pool among the candidates; `None` if no such pool exists
    pub at: Option<usize>,
    /// Name of the pool
    pub name: &'a str,
    /// Why the pool must not be tried
    pub why: PassOverReason<'a>,
}

/// Why a pool must not be tried.
#[derive(Clone, Copy)]
pub enum PassOverReason<'a> {
    /// The pool was asked for by name and does not exist.
    Unknown,
    /// The pool selects the asker or was asked for by name, but cannot serve.
    Barred(&'a dyn fmt::Display),
    /// The pool selects the asker, but only serves those who ask for it by name.
    Manual,
    /// A selector of the pool does not match the asker.
    Deselected {
        /// Which of the selectors
        subject: SelectorSubject,
        /// The requirement that is not met
        wants: &'a Requirement,
        /// The value of the label; `None` if there is no such label
        has: Option<&'a str>,
    },
    /// Other pools were asked for by name.
    NotAsked,
}

impl fmt::Debug for PassOverReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The selectors of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectorSubject {
    /// `nodeSelector`
    Node,
    /// `namespaceSelector`
    Namespace,
    /// `podSelector`
    Pod,
}

/// Returns the pools that may serve the asker, best first, and why the others may not.
///
/// `room` returns how much a pool can still allocate, in a unit that is the same for all candidates.
pub fn choose<'a>(
    candidates: &[PoolCandidate<'a>],
    asker: &Requester<'a>,
    room: impl FnMut(&PoolCandidate<'a>) -> u128,
) -> PoolChoice<'a> {
    if asker.by_name.is_empty() {
        by_selectors(candidates, asker, room)
    } else {
        by_name(candidates, asker.by_name)
    }
}

fn by_name<'a>(candidates: &[PoolCandidate<'a>], names: &[&'a str]) -> PoolChoice<'a> {
    let mut choice = PoolChoice::default();
    let mut unknown = Vec::new();
    for (nth, name) in names.iter().enumerate() {
        if names[..nth].contains(name) {
            continue;
        }
        match candidates.iter().position(|it| it.name == *name) {
            Some(at) if matches!(candidates[at].standing, PoolStanding::Serving) => {
                choice.chosen.push(ChosenPool {
                    at,
                    name: candidates[at].name,
                    some_pods_only: false,
                    lacks: None,
                    place: PoolRank::Asked,
                });
            }
            Some(_) => {}
            None => unknown.push(PassedOver {
                at: None,
                name,
                why: PassOverReason::Unknown,
            }),
        }
    }
    for (at, candidate) in candidates.iter().enumerate() {
        let why = match candidate.standing {
            _ if !names.contains(&candidate.name) => PassOverReason::NotAsked,
            PoolStanding::Barred(why) => PassOverReason::Barred(why),
            PoolStanding::Serving => continue,
        };
        choice.pass_over(at, candidate, why);
    }
    choice.passed_over.append(&mut unknown);
    choice
}

fn by_selectors<'a>(
    candidates: &[PoolCandidate<'a>],
    asker: &Requester<'a>,
    mut room: impl FnMut(&PoolCandidate<'a>) -> u128,
) -> PoolChoice<'a> {
    let mut choice = PoolChoice::default();
    for (at, candidate) in candidates.iter().enumerate() {
        let why = match (candidate.deselects(asker), candidate.standing) {
            (Some(why), _) => why,
            (None, _) if candidate.manual => PassOverReason::Manual,
            (None, PoolStanding::Barred(why)) => PassOverReason::Barred(why),
            (None, PoolStanding::Serving) => {
                choice.chosen.push(candidate.chosen(at, asker));
                continue;
            }
        };
        choice.pass_over(at, candidate, why);
    }
    let chosen = &mut choice.chosen;
    chosen.sort_by(|a, b| (a.rank(), a.name).cmp(&(b.rank(), b.name)));
    let families = |it: &ChosenPool| candidates[it.at].families;
    let given = assigned_families(chosen, candidates);
    for tied in chosen.chunk_by_mut(|a, b| a.rank() == b.rank()) {
        let lacking = |it: &ChosenPool| lacking(given, families(it));
        if tied.iter().any(|it| lacking(it).is_none()) {
            for it in tied {
                it.lacks = lacking(it);
            }
        }
    }
    let is_apart =
        |it: &ChosenPool| families(it) != given && !Mutation::RoomComparedAcrossFamilies.is_on();
    let class = |it: &ChosenPool| (it.rank(), it.lacks.is_some(), is_apart(it));
    chosen.sort_by(|a, b| (class(a), a.name).cmp(&(class(b), b.name)));
    for tied in chosen.chunk_by_mut(|a, b| class(a) == class(b)) {
        if tied.len() == 1 {
            continue;
        }
        for it in &mut *tied {
            if let PoolRank::Ranked { room: known, .. } = &mut it.place {
                *known = Some(room(&candidates[it.at]));
            }
        }
        tied.sort_by(|a, b| (b.room(), a.name).cmp(&(a.room(), b.name)));
    }
    choice
}

/// The families of the oldest pool among the best ones.
fn assigned_families(chosen: &[ChosenPool], candidates: &[PoolCandidate]) -> Dual<bool> {
    let best = chosen.first().map(ChosenPool::rank);
    let best = chosen.iter().filter(|it| Some(it.rank()) == best);
    let oldest = best.min_by_key(|it| (candidates[it.at].created, it.name));
    oldest.map_or(Dual::default(), |it| candidates[it.at].families)
}

/// The first family that is in `given`, but not in `has`.
pub fn lacking(given: Dual<bool>, has: Dual<bool>) -> Option<Family> {
    let mut given = given.iter().filter(|(_, is_given)| **is_given);
    let (family, _) = given.find(|(family, _)| !has.get(*family))?;
    Some(family)
}

impl<'a> PoolCandidate<'a> {
    /// The reason if a selector does not match the asker.
    fn deselects(&self, asker: &Requester<'a>) -> Option<PassOverReason<'a>> {
        let unmet = |subject, selector: &'a Selector, labels: &'a [Label]| {
            let (wants, has) = selector.unmet(labels)?;
            Some(PassOverReason::Deselected {
                subject,
                wants,
                has,
            })
        };
        unmet(SelectorSubject::Node, self.node, asker.node).or_else(|| {
            let PodLabels { namespace, pod } = asker.pod?;
            unmet(SelectorSubject::Namespace, self.namespace, namespace)
                .or_else(|| unmet(SelectorSubject::Pod, self.pod, pod))
        })
    }

    fn chosen(&self, at: usize, asker: &Requester) -> ChosenPool<'a> {
        let of_pods = self.namespace.specificity() + self.pod.specificity();
        ChosenPool {
            at,
            name: self.name,
            some_pods_only: asker.pod.is_none() && of_pods > 0,
            lacks: None,
            place: PoolRank::Ranked {
                priority: self.priority,
                requirements: self.node.specificity() + of_pods,
                room: None,
            },
        }
    }
}

impl ChosenPool<'_> {
    /// What is compared before families, room and name; `None` if the pool was asked for by name.
    fn rank(&self) -> Option<(Reverse<i32>, Reverse<usize>)> {
        match self.place {
            PoolRank::Asked => None,
            PoolRank::Ranked {
                priority,
                requirements,
                ..
            } => Some((Reverse(priority), Reverse(requirements))),
        }
    }

    fn room(&self) -> Option<u128> {
        match self.place {
            PoolRank::Asked => None,
            PoolRank::Ranked { room, .. } => room,
        }
    }
}

impl<'a> PoolChoice<'a> {
    fn pass_over(&mut self, at: usize, candidate: &PoolCandidate<'a>, why: PassOverReason<'a>) {
        self.passed_over.push(PassedOver {
            at: Some(at),
            name: candidate.name,
            why,
        });
    }
}

#[cfg(test)]
mod tests;
