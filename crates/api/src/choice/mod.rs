//! Chooses the pools that serve a node or pod, and explains the choice. A pool serves a node if the node may get blocks
//! of the pool. A pool serves a pod if the pod may get addresses of the pool. The controller, the agent and the kubectl
//! plugin use this module.
//!
//! A requester (a node or pod) that names no pools is served by the pools whose selectors match the requester. The
//! first of these pools with room is used. Room is how much a pool can still allocate. The order of the pools is
//! decided by priority, then by the number of requirements in all three selectors, then by families, then by room, then
//! by name.
//!
//! Among the pools that are best by priority and requirements, the oldest pool determines which families are assigned.
//! A pool of the same priority and requirements that lacks one of these families serves only requesters that ask for it
//! by name. So neither adding a pool nor exhausting one changes the families that a node or pod gets. Room is compared
//! only among pools of the same families, because an IPv6 pool always has more room than an IPv4 pool.
//!
//! If a requester asks for pools by name, the pools are used in the requested order. Their selectors do not matter, and
//! `Manual` pools are used, too.
//!
//! # Guarantees
//! - The result depends on the set of candidates, not on their order. Nearly sorted candidates are sorted in nearly
//!   linear time.
//! - The room of a pool is computed at most once, and only to break a tie, because the computation is expensive.
//! - Every candidate is either chosen, or passed over with a reason. These reasons are formatted only when a
//!   [`PoolChoice`] is displayed.
//!
//! # Caveats
//! - If a pool cannot serve and its selectors do not match either, the reason names only the selector.

mod explain;
mod selector;

pub use selector::{Requirement, Selector};

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use cadastre_core::mutation::Mutation;
use cadastre_core::{Dual, Family};

/// Key and value of a label. Functions of this module expect labels to be sorted by key.
pub type Label = (Arc<str>, Arc<str>);

/// One of the pools from which [`choose`] chooses, with the fields on which the choice depends.
#[derive(Clone, Copy, Debug)]
pub struct PoolCandidate<'a> {
    /// Name of the pool; unique among the candidates
    pub name: &'a str,
    /// `nodeSelector` of the pool, which is compared with the node's labels
    pub node: &'a Selector,
    /// `namespaceSelector` of the pool, which is compared with the labels of the pod's namespace
    pub namespace: &'a Selector,
    /// `podSelector` of the pool, which is compared with the pod's labels
    pub pod: &'a Selector,
    /// `priority` of the pool; the pool with the highest value is tried first
    pub priority: i32,
    /// For each family, whether the pool has ranges of the family
    pub families: Dual<bool>,
    /// Creation time, in seconds since 1970; among the best pools, the oldest decides which families are assigned
    pub created: i64,
    /// Whether the pool serves only requesters that ask for it by name (`assignment: Manual`)
    pub manual: bool,
    /// Whether the pool can serve requesters at all, and if not, why
    pub standing: PoolStanding<'a>,
}

/// Whether a pool can currently serve requesters at all.
#[derive(Clone, Copy)]
pub enum PoolStanding<'a> {
    /// The pool can serve the requesters that its selectors match, and those that ask for it by name.
    Serving,
    /// The pool cannot serve for this reason, not even a requester that asks for it by name.
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

/// The node or pod for which pools are chosen. The labels are sorted by key.
#[derive(Clone, Copy, Debug)]
pub struct Requester<'a> {
    /// The labels of the node; for a pod, the labels of the pod's node
    pub node: &'a [Label],
    /// The labels of the pod; `None` to choose pools for the node as a whole
    pub pod: Option<PodLabels<'a>>,
    /// Names of the pools that the requester asks for, best first; if empty, the selectors of the pools decide
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

/// The result of [`choose`]. Its `Display` text has one line per pool, the best pool first.
#[derive(Clone, Debug, Default)]
pub struct PoolChoice<'a> {
    /// The chosen pools, best first. A pool with `lacks` serves only requesters that ask for the pool by name
    pub chosen: Vec<ChosenPool<'a>>,
    /// The candidates that were not chosen, in the order in which they were given. After them come the requested names
    /// that no candidate has
    pub passed_over: Vec<PassedOver<'a>>,
}

/// A chosen pool, with the reason for its place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenPool<'a> {
    /// Index of the pool among the candidates
    pub at: usize,
    /// Name of the pool
    pub name: &'a str,
    /// Whether the choice is for a node as a whole and the pool serves only some of the node's pods. If so, the node
    /// should get a block of the pool only when one of these pods asks for an address.
    pub some_pods_only: bool,
    /// A family that the pool lacks although a pool of the same priority and requirements has it. If this field is set,
    /// the pool serves only requesters that ask for it by name.
    pub lacks: Option<Family>,
    /// What determined the place of the pool in the order
    pub place: PoolRank,
}

/// What determined the place of a chosen pool in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolRank {
    /// The requester asked for the pool by name.
    Asked,
    /// The requester asked for no pool by name, so the pools were compared by the fields of this variant.
    Ranked {
        /// `priority` of the pool; the highest comes first
        priority: i32,
        /// Number of requirements in all selectors of the pool; more come first
        requirements: usize,
        /// How much the pool can still allocate; more comes first. `None` if the pool got its place without this
        /// comparison
        room: Option<u128>,
    },
}

/// A pool, or a requested name, that was not chosen, and the reason.
#[derive(Clone, Copy, Debug)]
pub struct PassedOver<'a> {
    /// Index of the pool among the candidates; `None` if the requester named a pool that does not exist
    pub at: Option<usize>,
    /// Name of the pool, or the requested name that no pool has
    pub name: &'a str,
    /// Why the pool does not serve the requester, or that no pool has the name
    pub why: PassOverReason<'a>,
}

/// Why a pool does not serve a requester.
#[derive(Clone, Copy)]
pub enum PassOverReason<'a> {
    /// The requester asked for this name, but no such pool exists.
    Unknown,
    /// The pool cannot serve, although its selectors match the requester or the requester asked for the pool by name.
    Barred(&'a dyn fmt::Display),
    /// The pool's selectors match the requester, but the pool serves only requesters that ask for it by name.
    Manual,
    /// A selector of the pool does not match the requester.
    Deselected {
        /// The kind of selector that does not match the requester
        subject: SelectorSubject,
        /// The first requirement of the selector that the requester does not meet
        wants: &'a Requirement,
        /// The requester's value of the label; `None` if the requester does not have the label
        has: Option<&'a str>,
    },
    /// The requester asked for pools by name, but not for this pool.
    NotAsked,
}

impl fmt::Debug for PassOverReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The selector of a pool that does not match a requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectorSubject {
    /// `nodeSelector`, which selects by labels of the node
    Node,
    /// `namespaceSelector`, which selects by labels of the pod's namespace
    Namespace,
    /// `podSelector`, which selects by labels of the pod
    Pod,
}

/// Returns the pools that may serve `requester`, best first, and the reasons why the other pools may not serve the
/// requester.
///
/// `room` returns how much a pool can still allocate, in a unit that is the same for all candidates.
pub fn choose<'a>(
    candidates: &[PoolCandidate<'a>],
    requester: &Requester<'a>,
    room: impl FnMut(&PoolCandidate<'a>) -> u128,
) -> PoolChoice<'a> {
    if requester.by_name.is_empty() {
        by_selectors(candidates, requester, room)
    } else {
        by_name(candidates, requester.by_name)
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
    requester: &Requester<'a>,
    mut room: impl FnMut(&PoolCandidate<'a>) -> u128,
) -> PoolChoice<'a> {
    let mut choice = PoolChoice::default();
    for (at, candidate) in candidates.iter().enumerate() {
        let why = match (candidate.deselects(requester), candidate.standing) {
            (Some(why), _) => why,
            (None, _) if candidate.manual => PassOverReason::Manual,
            (None, PoolStanding::Barred(why)) => PassOverReason::Barred(why),
            (None, PoolStanding::Serving) => {
                choice.chosen.push(candidate.chosen(at, requester));
                continue;
            }
        };
        choice.pass_over(at, candidate, why);
    }
    let chosen = &mut choice.chosen;
    chosen.sort_by(|a, b| (a.rank(), a.name).cmp(&(b.rank(), b.name)));
    let families = |it: &ChosenPool| candidates[it.at].families;
    let assigned = assigned_families(chosen, candidates);
    for tied in chosen.chunk_by_mut(|a, b| a.rank() == b.rank()) {
        let lacking = |it: &ChosenPool| lacking(assigned, families(it));
        if tied.iter().any(|it| lacking(it).is_none()) {
            for it in tied {
                it.lacks = lacking(it);
            }
        }
    }
    let is_apart =
        |it: &ChosenPool| families(it) != assigned && !Mutation::RoomComparedAcrossFamilies.is_on();
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

/// Returns the families of the oldest pool among those that are best by priority and requirements.
fn assigned_families(chosen: &[ChosenPool], candidates: &[PoolCandidate]) -> Dual<bool> {
    let best = chosen.first().map(ChosenPool::rank);
    let best = chosen.iter().filter(|it| Some(it.rank()) == best);
    let oldest = best.min_by_key(|it| (candidates[it.at].created, it.name));
    oldest.map_or(Dual::default(), |it| candidates[it.at].families)
}

/// Returns the first family of `required` that is missing in `has`, or `None` if `has` has all of them.
pub fn lacking(required: Dual<bool>, has: Dual<bool>) -> Option<Family> {
    let mut required = required.iter().filter(|(_, is_required)| **is_required);
    let (family, _) = required.find(|(family, _)| !has.get(*family))?;
    Some(family)
}

impl<'a> PoolCandidate<'a> {
    /// Returns a reason that names the first selector which does not match the requester; `None` if all selectors
    /// match.
    fn deselects(&self, requester: &Requester<'a>) -> Option<PassOverReason<'a>> {
        let unmet = |subject, selector: &'a Selector, labels: &'a [Label]| {
            let (wants, has) = selector.unmet(labels)?;
            Some(PassOverReason::Deselected {
                subject,
                wants,
                has,
            })
        };
        unmet(SelectorSubject::Node, self.node, requester.node).or_else(|| {
            let PodLabels { namespace, pod } = requester.pod?;
            unmet(SelectorSubject::Namespace, self.namespace, namespace)
                .or_else(|| unmet(SelectorSubject::Pod, self.pod, pod))
        })
    }

    fn chosen(&self, at: usize, requester: &Requester) -> ChosenPool<'a> {
        let of_pods = self.namespace.specificity() + self.pod.specificity();
        ChosenPool {
            at,
            name: self.name,
            some_pods_only: requester.pod.is_none() && of_pods > 0,
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
    /// Returns the pool's priority and requirements, which are compared before families, room and name. Returns `None`
    /// if the requester asked for the pool by name.
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
