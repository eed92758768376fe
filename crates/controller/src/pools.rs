//! What every pool may do right now.
//!
//! A survey reads all pools, service ranges and node addresses together, because a pool's standing
//! depends on the others: of two pools that overlap the newer one carves nothing until the older is
//! gone. Ages are compared by creation time, then by name, so every controller sees the same order.

mod index;
mod survey;

use std::collections::BTreeMap;
use std::fmt;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use self::index::Index;
use self::survey::{Older, survey_one};
use crate::cluster::seen::{Node, Pool, Text};
use crate::cluster::world::World;
use cadastre_api::choice::{Asker, Candidate, Selector, Standing, choose, lacking};
use cadastre_api::{Allocate, IPPoolSpec, MOST_POD_RANGES, NodePool};
use cadastre_core::mutation::Mutation;
use cadastre_core::{Cidr, Dual, Family, Ledger, Span};

/// Quarantine of ranges that lie outside every pool.
pub(crate) const DEFAULT_QUARANTINE: Duration = Duration::from_secs(60);

/// The ServiceCIDR of the API server's own flags.
const KUBERNETES: &str = "kubernetes";

/// One pool as the loops use it.
#[derive(Debug)]
pub struct PoolState {
    /// Its name
    pub name: Text,
    /// Its UID
    pub uid: Text,
    /// When it was made, in seconds since 1970
    pub created: i64,
    /// Whether it gives podCIDRs or blocks
    pub allocate: Allocate,
    /// What it may carve, with the next-fit cursors
    pub space: cadastre_core::Pool,
    /// How it gives blocks
    pub terms: BlockTerms,
    /// What its nodes are told of it
    pub told: NodePool,
    /// What is never given out of it
    pub reserved: Vec<Span>,
    /// What is given only to pods that ask for that address
    pub on_request: Vec<Span>,
    /// From how many percent of utilization on it is nearly exhausted
    pub nearly_exhausted: u32,
    /// Which nodes it serves
    pub selector: Selector,
    /// Higher first
    pub priority: i32,
    /// How long a dead node's range rests
    pub quarantine: Duration,
    /// Whether the finalizer is on it
    pub guarded: bool,
    /// Whether it serves, or why not
    pub verdict: Verdict,
    /// What it overlaps without losing by it: service ranges and node addresses, left out when carving
    pub left_out: Vec<String>,
    /// Until when it holds back because somebody else writes podCIDRs in its range (monotonic)
    pub hold_until: Option<Duration>,
}

/// How a pool gives blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockTerms {
    /// Whether a node gets its first block unasked: not where only those who ask by name, or only
    /// some pods, may use the pool
    pub first_on_sight: bool,
    /// The pods of which namespaces
    pub namespaces: Selector,
    /// Which pods
    pub pods: Selector,
    /// How many blocks of a family a node may have
    pub most: Option<usize>,
    /// How long a block that a node can do without stays empty
    pub idle: Duration,
}

/// Whether a pool serves.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "fields named for what they are")]
pub enum Verdict {
    /// It carves.
    Serving,
    /// The spec cannot be used; the text says why.
    Invalid(String),
    /// It is being deleted.
    Terminating,
    /// `spec.disabled`
    Disabled,
    /// The finalizer is not on it yet.
    Starting,
    /// An older pool has the same addresses.
    Overlaps {
        older: Text,
        range: Cidr,
        theirs: Cidr,
    },
    /// Somebody else writes podCIDRs in its range.
    SecondWriter,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Serving => write!(f, "serving"),
            Verdict::Invalid(why) => write!(f, "its spec cannot be used: {why}"),
            Verdict::Terminating => write!(f, "it is being deleted"),
            Verdict::Disabled => write!(f, "it is disabled: set spec.disabled to false"),
            Verdict::Starting => write!(f, "its finalizer is not set yet"),
            Verdict::Overlaps {
                older,
                range,
                theirs,
            } => write!(
                f,
                "{range} overlaps {theirs} of the older pool \"{older}\": take the range out of one of them, or delete the older pool"
            ),
            Verdict::SecondWriter => write!(
                f,
                "somebody else writes podCIDRs in its range: turn off the other allocator (kube-controller-manager: --allocate-node-cidrs=false)"
            ),
        }
    }
}

impl PoolState {
    /// Whether it serves the node, were it to serve at all.
    pub fn selects(&self, node: &Node) -> bool {
        self.selector.matches(&node.labels)
    }

    /// Whether there are nodes, and the pool is for none of them.
    pub fn selects_none(&self, world: &World) -> bool {
        let mut nodes = world.nodes.iter();
        !world.nodes.is_empty() && !nodes.any(|node| self.selects(node))
    }

    /// Free addresses that a node keeps of it beside those that pods use and wait for.
    pub fn reserve(&self) -> u64 {
        self.told.terms.warm.low.into()
    }

    /// Whether it carves now.
    pub fn is_serving(&self) -> bool {
        self.verdict == Verdict::Serving
    }
}

/// All pools, with their standing.
#[derive(Debug, Default)]
pub struct Pools {
    states: BTreeMap<Text, PoolState>,
    /// Names by age, oldest first, and last those of podCIDRs that are being deleted.
    by_age: Vec<Text>,
    /// Where they lie, by their places among these.
    index: Index,
    /// Names of serving pools, best first (but for room, which only ties need).
    by_rank: Vec<Text>,
    /// The ranges of all, as nodes are told them
    pod_ranges: Vec<String>,
    /// The family of the first service range
    service_family: Option<Family>,
    /// How many pools were looked at for the ranges that were asked about
    #[cfg(test)]
    looks: AtomicUsize,
}

impl Pools {
    /// Reads all pools anew; cursors and holds stay.
    pub(crate) fn survey(&mut self, world: &World, flag_services: &[Cidr], now: Duration) {
        let mut previous = std::mem::take(&mut self.states);
        let mut seen: Vec<&Pool> = world.pools.iter().map(AsRef::as_ref).collect();
        // What nodes have of a pool outlives it, so one that is being deleted bars no other.
        let leaves = |it: &Pool| {
            let gives = |spec: &IPPoolSpec| spec.allocate == Allocate::NodeCIDR;
            it.deleting && it.spec.as_ref().is_ok_and(gives)
        };
        let age = |it: &Pool| (leaves(it), it.created, it.name.clone());
        seen.sort_by_cached_key(|it| age(it));
        let services: Vec<Cidr> = world
            .services
            .iter()
            .flat_map(|s| s.cidrs.iter())
            .chain(flag_services)
            .copied()
            .collect();
        let mut older = Older::default();
        for pool in &seen {
            let kept = previous
                .remove(&pool.name)
                .filter(|state| state.uid == pool.uid);
            let state = survey_one(pool, kept, &services, world, &mut older, now);
            self.states.insert(pool.name.clone(), state);
        }
        let kubernetes = world.services.get(KUBERNETES);
        let first = kubernetes.and_then(|it| it.cidrs.first());
        let first = first.or(flag_services.first()).or(services.first());
        self.service_family = first.map(Cidr::family);
        self.by_age = seen.iter().map(|pool| pool.name.clone()).collect();
        let places = self.by_age.iter().enumerate();
        self.index = Index::new(places.flat_map(|(place, name)| {
            let space = self.states.get(name).map(|state| &state.space);
            let ranges = space.into_iter().flat_map(|space| {
                let families = space.families();
                families.flat_map(|family| space.cidrs(family).iter().copied())
            });
            ranges.map(move |range| (place, range))
        }));
        let mut rank: Vec<&PoolState> = self
            .states
            .values()
            .filter(|state| state.is_serving())
            .collect();
        rank.sort_by(|a, b| b.rank().cmp(&a.rank()).then_with(|| a.name.cmp(&b.name)));
        self.by_rank = rank.into_iter().map(|state| state.name.clone()).collect();
        let told = self.states.values().map(|state| &state.told);
        let sides = told.flat_map(|told| told.ipv4.iter().chain(&told.ipv6));
        let ranges = sides.flat_map(|side| &side.cidrs);
        let ranges = Cidr::merged(ranges.filter_map(|text| Cidr::parse_strict(text).ok()));
        let texts = ranges.iter().map(ToString::to_string);
        self.pod_ranges = texts.take(MOST_POD_RANGES).collect();
    }

    /// The cluster's primary family, as far as service ranges tell it.
    pub(crate) fn service_family(&self) -> Option<Family> {
        self.service_family
    }

    /// The ranges of all pools, merged: in these every address is a pod's.
    pub fn pod_ranges(&self) -> &[String] {
        &self.pod_ranges
    }

    /// The pool of that name.
    pub fn get(&self, name: &str) -> Option<&PoolState> {
        self.states.get(name)
    }

    /// The pool of that name, to carve from.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut PoolState> {
        self.states.get_mut(name)
    }

    /// All pools by name.
    pub fn iter(&self) -> impl Iterator<Item = &PoolState> {
        self.states.values()
    }

    /// The pool a range counts to: the oldest one that covers it.
    pub fn of(&self, range: &Cidr) -> Option<&PoolState> {
        self.oldest_over(range, |_| true)
    }

    /// The oldest pool with the finalizer that covers a range: it stays while the range is held.
    pub fn keeper(&self, range: &Cidr) -> Option<&PoolState> {
        self.oldest_over(range, |state| state.guarded)
    }

    fn oldest_over(&self, range: &Cidr, is: impl Fn(&PoolState) -> bool) -> Option<&PoolState> {
        let is = |place| self.at(place).is_some_and(&is);
        self.at(self.index.oldest_over(range, is)?)
    }

    /// The pool of that place by age.
    fn at(&self, place: usize) -> Option<&PoolState> {
        #[cfg(test)]
        self.looks.fetch_add(1, Ordering::Relaxed);
        self.states.get(self.by_age.get(place)?)
    }

    /// How many pools were looked at for the ranges that were asked about so far.
    #[cfg(test)]
    pub(super) fn looks(&self) -> usize {
        self.looks.load(Ordering::Relaxed)
    }

    /// The older pool because of which this one serves only by name, and the family that it lacks: see
    /// [`choose`]. Told where both are for the same nodes and pods.
    pub(crate) fn older_of_other_family(&self, state: &PoolState) -> Option<(&PoolState, Family)> {
        let is_alike = |older: &&PoolState| {
            older.is_serving()
                && (older.allocate, older.priority) == (state.allocate, state.priority)
                && older.selector == state.selector
                && older.terms.namespaces == state.terms.namespaces
                && older.terms.pods == state.terms.pods
        };
        let by_age = self.by_age.iter().filter_map(|name| self.states.get(name));
        let oldest = by_age.filter(|_| state.is_serving()).find(is_alike)?;
        let family = lacking(oldest.families(), state.families())?;
        Some((oldest, family))
    }

    /// The pools that share an address with the range, by name.
    pub fn touching(&self, range: &Cidr) -> impl Iterator<Item = &PoolState> + use<'_> {
        let states = self
            .index
            .touching(range)
            .filter_map(|place| self.at(place));
        let by_name: BTreeMap<&Text, &PoolState> = states.map(|it| (&it.name, it)).collect();
        by_name.into_values()
    }

    /// Whether any pool shares an address with the range.
    pub fn is_any_over(&self, range: &Cidr) -> bool {
        self.index.touching(range).next().is_some()
    }

    /// The serving pools that select the node, in the order in which they are tried: see [`choose`]; and whether
    /// each serves it only by name. Those in `full` have no room.
    pub fn choices<V>(
        &self,
        allocate: Allocate,
        node: &Node,
        ledger: &Ledger,
        full: &BTreeMap<Text, V>,
    ) -> Vec<(Text, bool)> {
        let room = |candidate: &Candidate| match self.states.get(candidate.name) {
            Some(state) if !full.contains_key(candidate.name) => state.room(ledger),
            _ => 0,
        };
        let ranked = self.ranked(allocate, node, room).into_iter();
        let named = ranked.map(|(state, by_name)| (state.name.clone(), by_name));
        named.collect()
    }

    /// Why which pools serve the node and the others do not, in words.
    pub fn explain(&self, allocate: Allocate, node: &Node, ledger: &Ledger) -> String {
        let states = self.states.values();
        let of_kind = states.filter(|state| state.allocate == allocate);
        let candidates: Vec<Candidate> = of_kind.map(PoolState::candidate).collect();
        let room = |candidate: &Candidate| {
            let state = self.states.get(candidate.name);
            state.map_or(0, |state| state.room(ledger))
        };
        let choice = choose(&candidates, &whole(node), room).to_string();
        choice.trim_end().replace('\n', "; ")
    }

    /// The pools that a node may ask for blocks, best first but for room, and whether each serves it only by name.
    pub(crate) fn block_pools<'a>(&'a self, node: &'a Node) -> Vec<(&'a PoolState, bool)> {
        self.ranked(Allocate::Blocks, node, |_| 0)
    }

    fn ranked<'a>(
        &'a self,
        allocate: Allocate,
        node: &'a Node,
        room: impl FnMut(&Candidate<'a>) -> u128,
    ) -> Vec<(&'a PoolState, bool)> {
        let states = self.by_rank.iter().filter_map(|name| self.states.get(name));
        let states: Vec<&PoolState> = states.filter(|it| it.allocate == allocate).collect();
        let candidates: Vec<Candidate> = states.iter().map(|state| state.candidate()).collect();
        let choice = choose(&candidates, &whole(node), room);
        let chosen = choice.chosen.iter();
        chosen
            .map(|it| (states[it.at], it.lacks.is_some()))
            .collect()
    }

    /// The pools that would be tried before the best of the choices but are not ready yet, which takes
    /// them a moment: what a node gets now it has for good.
    pub fn starting_before<'a>(
        &'a self,
        allocate: Allocate,
        node: &'a Node,
        best: Option<&'a Text>,
    ) -> impl Iterator<Item = &'a PoolState> {
        let best = best.and_then(|name| self.get(name)).map(PoolState::rank);
        self.states.values().filter(move |state| {
            state.verdict == Verdict::Starting
                && state.allocate == allocate
                && best.is_none_or(|best| state.rank() > best)
                && state.selects(node)
        })
    }

    /// The pools that select the node but do not serve now.
    pub fn barred<'a>(
        &'a self,
        allocate: Allocate,
        node: &'a Node,
    ) -> impl Iterator<Item = &'a PoolState> {
        self.states.values().filter(move |state| {
            !state.is_serving()
                && state.allocate == allocate
                && !matches!(state.verdict, Verdict::Invalid(_))
                && state.selector.matches(&node.labels)
        })
    }

    /// Makes every pool that shares an address with the range hold back until then (monotonic).
    pub fn hold(&mut self, range: &Cidr, until: Duration) {
        for state in self
            .states
            .values_mut()
            .filter(|state| state.space.touches(range) && !Mutation::SecondWriterIgnored.is_on())
        {
            state.hold_until = Some(until);
        }
    }

    /// When the first hold ends.
    pub fn next_at(&self) -> Option<Duration> {
        self.states
            .values()
            .filter_map(|state| state.hold_until)
            .min()
    }
}

impl PoolState {
    fn rank(&self) -> (i32, usize) {
        let pods = self.terms.namespaces.specificity() + self.terms.pods.specificity();
        (self.priority, self.selector.specificity() + pods)
    }

    /// Which families it gives.
    pub fn families(&self) -> Dual<bool> {
        let mut families = Dual::default();
        for family in self.space.families() {
            *families.get_mut(family) = true;
        }
        families
    }

    /// As the choice for a node as a whole sees it. Its agent may ask for a manual pool by name.
    fn candidate(&self) -> Candidate<'_> {
        Candidate {
            name: &self.name,
            node: &self.selector,
            namespace: &self.terms.namespaces,
            pod: &self.terms.pods,
            priority: self.priority,
            families: self.families(),
            created: self.created,
            manual: false,
            standing: match self.verdict {
                Verdict::Serving => Standing::Serving,
                _ => Standing::Barred(&self.verdict),
            },
        }
    }

    /// Free blocks of the family that has fewer.
    fn room(&self, ledger: &Ledger) -> u128 {
        self.space
            .families()
            .map(|family| ledger.room(&self.space, family).free)
            .min()
            .unwrap_or(0)
    }
}

fn whole(node: &Node) -> Asker<'_> {
    Asker {
        node: &node.labels,
        pod: None,
        by_name: &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::tests::{list, pool};

    #[test]
    fn a_pool_holds_back_for_a_while_when_somebody_else_writes_in_its_range() {
        let mut world = World::default();
        list(&mut world.pools, vec![pool("p", "10.0.0.0/24")]);
        let mut pools = Pools::default();
        let foreign = Cidr::parse_strict("10.0.0.16/28").unwrap();
        let seconds = Duration::from_secs;
        pools.survey(&world, &[], seconds(0));
        pools.hold(&foreign, seconds(60));
        for (now, serves) in [(1, false), (61, true)] {
            pools.survey(&world, &[], seconds(now));
            assert_eq!(pools.get("p").unwrap().is_serving(), serves, "at {now} s");
        }
    }

    #[test]
    fn of_two_pools_with_common_addresses_the_older_one_serves() {
        for (older, newer) in [
            ("10.0.0.0/24", "10.0.0.64/26"),
            ("10.0.0.64/26", "10.0.0.0/24"),
            ("10.0.0.0/24", "10.0.0.0/24"),
        ] {
            let mut new = pool("a", newer);
            new.created = 1;
            let mut world = World::default();
            list(&mut world.pools, vec![new, pool("z", older)]);
            let mut pools = Pools::default();
            pools.survey(&world, &[], Duration::ZERO);
            let serves = |name| pools.get(name).unwrap().is_serving();
            assert!(serves("z") && !serves("a"), "{older} and {newer}");
        }
    }

    #[test]
    fn a_pool_of_podcidrs_that_goes_bars_no_other() {
        for (allocate, serves) in [(Allocate::NodeCIDR, true), (Allocate::Blocks, false)] {
            let mut old = pool("z", "10.0.0.0/24");
            old.deleting = true;
            old.spec.as_mut().unwrap().allocate = allocate;
            let mut new = pool("a", "10.0.0.0/24");
            new.created = 1;
            new.spec.as_mut().unwrap().allocate = allocate;
            let mut world = World::default();
            list(&mut world.pools, vec![new, old]);
            let mut pools = Pools::default();
            pools.survey(&world, &[], Duration::ZERO);
            assert_eq!(pools.get("a").unwrap().is_serving(), serves, "{allocate:?}");
            let keeper = pools.keeper(&Cidr::parse_strict("10.0.0.0/28").unwrap());
            assert_eq!(
                &*keeper.unwrap().name == "a",
                serves,
                "what is held is of the new one"
            );
        }
    }

    #[test]
    fn a_pool_beside_an_older_one_of_another_family_says_so() {
        let mut six = pool("six", "10.1.0.0/24");
        six.created = 1;
        let spec = six.spec.as_mut().unwrap();
        spec.ipv4 = None;
        spec.ipv6 = Some(cadastre_api::IPv6Ranges {
            cidrs: vec!["fd00::/64".to_owned()],
            block_size: None,
            gateway: None,
        });
        let mut world = World::default();
        let four = pool("four", "10.0.0.0/24");
        let told = |world: &World| {
            let mut pools = Pools::default();
            pools.survey(world, &[], Duration::ZERO);
            let node = crate::demand::tests::node("n");
            let by_name: Vec<bool> = pools.block_pools(&node).iter().map(|it| it.1).collect();
            let state = pools.get("six").unwrap();
            let older = pools.older_of_other_family(state);
            let older = older.map(|(older, family)| (older.name.to_string(), family));
            (older, by_name)
        };
        list(&mut world.pools, vec![six.clone(), four.clone()]);
        assert_eq!(
            told(&world),
            (Some(("four".to_owned(), Family::V4)), vec![false, true])
        );
        let mut first = six;
        first.version = 2;
        first.spec.as_mut().unwrap().priority = 1;
        list(&mut world.pools, vec![first, four]);
        assert_eq!(told(&world), (None, vec![false, false]));
    }
}
