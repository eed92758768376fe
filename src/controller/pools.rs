//! What every pool may do right now.
//!
//! A survey reads all pools, service ranges and node addresses together, because a pool's standing
//! depends on the others: of two pools that overlap the newer one carves nothing until the older is
//! gone. Ages are compared by creation time, then by name, so every controller sees the same order.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::api::{Allocate, Assignment, FINALIZER, FirstBlock, IPPoolSpec};
use crate::choice::{Asker, Candidate, Selector, Standing, choose};
use crate::cluster::seen::{Node, Pool, Text};
use crate::cluster::world::World;
use crate::ipam::{self, Cidr, Closing, Dual, Family, Ledger, Ranges, Span};

/// Quarantine of ranges that lie outside every pool.
pub const DEFAULT_QUARANTINE: Duration = Duration::from_secs(60);

/// One pool as the loops use it.
#[derive(Debug)]
pub struct PoolState {
    /// Its name
    pub name: Text,
    /// Its UID
    pub uid: Text,
    /// Whether it gives podCIDRs or blocks
    pub allocate: Allocate,
    /// What it may carve, with the next-fit cursors
    pub space: ipam::Pool,
    /// How it gives blocks
    pub terms: BlockTerms,
    /// What is never given out of it
    pub reserved: Vec<Span>,
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
    /// Only for those who ask by name
    pub manual: bool,
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

    /// Whether it carves now.
    pub fn is_serving(&self) -> bool {
        self.verdict == Verdict::Serving
    }
}

/// All pools, with their standing.
#[derive(Debug, Default)]
pub struct Pools {
    states: BTreeMap<Text, PoolState>,
    /// Names by age, oldest first.
    by_age: Vec<Text>,
    /// Names of serving pools, best first (but for room, which only ties need).
    by_rank: Vec<Text>,
}

impl Pools {
    /// Reads all pools anew; cursors and holds stay.
    pub fn survey(&mut self, world: &World, flag_services: &[Cidr], now: Duration) {
        let mut previous = std::mem::take(&mut self.states);
        let mut seen: Vec<&Pool> = world.pools.iter().map(AsRef::as_ref).collect();
        seen.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
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
        self.by_age = seen.iter().map(|pool| pool.name.clone()).collect();
        let mut rank: Vec<&PoolState> = self
            .states
            .values()
            .filter(|state| state.is_serving())
            .collect();
        rank.sort_by(|a, b| b.rank().cmp(&a.rank()).then_with(|| a.name.cmp(&b.name)));
        self.by_rank = rank.into_iter().map(|state| state.name.clone()).collect();
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
        self.by_age
            .iter()
            .filter_map(|name| self.states.get(name))
            .find(|state| state.space.covers(range))
    }

    /// The oldest pool with the finalizer that covers a range: it stays while the range is held.
    pub fn keeper(&self, range: &Cidr) -> Option<&PoolState> {
        self.by_age
            .iter()
            .filter_map(|name| self.states.get(name))
            .find(|state| state.guarded && state.space.covers(range))
    }

    /// The pools that share an address with the range.
    pub fn touching<'a>(&'a self, range: &'a Cidr) -> impl Iterator<Item = &'a PoolState> {
        self.states
            .values()
            .filter(move |state| state.space.touches(range))
    }

    /// The serving pools that select the node, in the order in which they are tried: priority, the
    /// most specific selector, the most room, name.
    /// Those in `full` have none.
    pub fn choices<V>(
        &self,
        allocate: Allocate,
        node: &Node,
        ledger: &Ledger,
        full: &BTreeMap<Text, V>,
    ) -> Vec<Text> {
        let states: Vec<&PoolState> = self
            .by_rank
            .iter()
            .filter_map(|name| self.states.get(name))
            .filter(|state| state.allocate == allocate)
            .collect();
        let candidates: Vec<Candidate> = states.iter().map(|state| state.candidate()).collect();
        let room = |candidate: &Candidate| match self.states.get(candidate.name) {
            Some(state) if !full.contains_key(candidate.name) => state.room(ledger),
            _ => 0,
        };
        let choice = choose(&candidates, &whole(node), room);
        let chosen = choice.chosen.iter();
        chosen.map(|it| states[it.at].name.clone()).collect()
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

    /// The pools that a node may ask for blocks, best first but for room.
    pub fn block_pools<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = String> {
        let states = self.by_rank.iter().filter_map(|name| self.states.get(name));
        states
            .filter(|state| state.allocate == Allocate::Blocks && state.selects(node))
            .map(|state| state.name.to_string())
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
            .filter(|state| state.space.touches(range))
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

    /// As the choice for a node as a whole sees it. Its agent may ask for a manual pool by name.
    fn candidate(&self) -> Candidate<'_> {
        Candidate {
            name: &self.name,
            node: &self.selector,
            namespace: &self.terms.namespaces,
            pod: &self.terms.pods,
            priority: self.priority,
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

/// Ranges of the pools surveyed so far, by start.
#[derive(Default)]
struct Older(BTreeMap<Cidr, Text>);

impl Older {
    fn overlap(&self, range: &Cidr) -> Option<(Cidr, Text)> {
        // Sorted by first address: what overlaps starts inside, or is a shorter prefix of the same.
        let inside = self
            .0
            .range(*range..)
            .next()
            .filter(|(theirs, _)| theirs.overlaps(range));
        let around = || {
            let mut wider = range.parent();
            while let Some(parent) = wider {
                if let Some(name) = self.0.get(&parent) {
                    return Some((parent, name.clone()));
                }
                wider = parent.parent();
            }
            None
        };
        inside
            .map(|(theirs, name)| (*theirs, name.clone()))
            .or_else(around)
    }
}

fn survey_one(
    pool: &Pool,
    kept: Option<PoolState>,
    services: &[Cidr],
    world: &World,
    older: &mut Older,
    now: Duration,
) -> PoolState {
    let parsed = pool
        .spec
        .as_ref()
        .map_err(Clone::clone)
        .and_then(Parsed::new);
    let (parsed, invalid) = match parsed {
        Ok(parsed) => (parsed, None),
        Err(why) => (Parsed::default(), Some(why)),
    };
    let ranges: Vec<Cidr> = parsed
        .ranges
        .iter()
        .flat_map(|(_, r)| r.iter().flat_map(|r| r.cidrs.clone()))
        .collect();
    let overlap = ranges.iter().find_map(|range| {
        older
            .overlap(range)
            .map(|(theirs, name)| (*range, theirs, name))
    });
    for range in &ranges {
        older.0.entry(*range).or_insert_with(|| pool.name.clone());
    }

    let mut blocked = parsed.reserved.clone();
    let mut left_out = Vec::new();
    for range in &ranges {
        for service in services.iter().filter(|service| service.overlaps(range)) {
            blocked.push(Span::from(*service));
            left_out.push(format!("service range {service}"));
        }
        for address in world.node_addresses.within(range) {
            blocked.push(Span::from(Cidr::host(address)));
            left_out.push(format!("node address {address}"));
        }
    }
    left_out.sort();
    left_out.dedup();

    let hold_until = kept
        .as_ref()
        .and_then(|state| state.hold_until)
        .filter(|until| *until > now);
    let mut space = match kept {
        Some(state) => state.space,
        None => ipam::Pool::new(Dual::default()),
    };
    space.set_closing(match parsed.allocate {
        Allocate::Blocks => Closing::Covered,
        Allocate::NodeCIDR => Closing::Touched,
    });
    space.set_ranges(parsed.ranges);
    space.set_blocked(blocked.clone());

    let verdict = if let Some(why) = invalid {
        Verdict::Invalid(why)
    } else if pool.deleting {
        Verdict::Terminating
    } else if let Some((range, theirs, name)) = overlap {
        Verdict::Overlaps {
            older: name,
            range,
            theirs,
        }
    } else if parsed.disabled {
        Verdict::Disabled
    } else if !pool.finalizers.iter().any(|f| f == FINALIZER) {
        Verdict::Starting
    } else if hold_until.is_some() {
        Verdict::SecondWriter
    } else {
        Verdict::Serving
    };
    PoolState {
        name: pool.name.clone(),
        uid: pool.uid.clone(),
        allocate: parsed.allocate,
        space,
        terms: parsed.terms,
        reserved: blocked,
        nearly_exhausted: parsed.nearly_exhausted,
        selector: parsed.selector,
        priority: parsed.priority,
        quarantine: parsed.quarantine,
        guarded: pool.finalizers.iter().any(|f| f == FINALIZER),
        verdict,
        left_out,
        hold_until,
    }
}

/// A spec whose texts have been read.
struct Parsed {
    allocate: Allocate,
    terms: BlockTerms,
    nearly_exhausted: u32,
    ranges: Dual<Option<Ranges>>,
    reserved: Vec<Span>,
    selector: Selector,
    priority: i32,
    disabled: bool,
    quarantine: Duration,
}

impl Default for Parsed {
    fn default() -> Self {
        Parsed {
            allocate: Allocate::default(),
            terms: BlockTerms {
                first_on_sight: false,
                manual: false,
                namespaces: Selector::default(),
                pods: Selector::default(),
                most: None,
                idle: Duration::ZERO,
            },
            nearly_exhausted: 100,
            ranges: Dual::default(),
            reserved: Vec::new(),
            selector: Selector::default(),
            priority: 0,
            disabled: true,
            quarantine: DEFAULT_QUARANTINE,
        }
    }
}

impl Parsed {
    /// The CRD's rules refuse most of what is refused here; a server without them, or an object
    /// older than a rule, must not do harm either.
    fn new(spec: &IPPoolSpec) -> Result<Self, String> {
        let v4 = spec
            .ipv4
            .as_ref()
            .zip(spec.ipv4_block_size())
            .map(|(r, size)| ranges(Family::V4, "ipv4", &r.cidrs, size))
            .transpose()?;
        let v6 = spec
            .ipv6
            .as_ref()
            .zip(spec.ipv6_block_size())
            .map(|(r, size)| ranges(Family::V6, "ipv6", &r.cidrs, size))
            .transpose()?;
        if v4.is_none() && v6.is_none() {
            return Err("neither ipv4 nor ipv6 is given: give at least one".into());
        }
        let reserved = spec
            .reserved
            .iter()
            .map(|text| Span::parse(text).map_err(|error| format!("reserved: {error}")))
            .collect::<Result<_, _>>()?;
        let namespaces = Selector::new(spec.namespace_selector.as_ref())
            .map_err(|error| format!("namespaceSelector: {error}"))?;
        let pods = Selector::new(spec.pod_selector.as_ref())
            .map_err(|error| format!("podSelector: {error}"))?;
        let manual = spec.assignment == Assignment::Manual;
        let for_all = namespaces.specificity() + pods.specificity() == 0;
        Ok(Parsed {
            allocate: spec.allocate,
            terms: BlockTerms {
                first_on_sight: spec.first_block == FirstBlock::OnSight && !manual && for_all,
                manual,
                namespaces,
                pods,
                most: spec
                    .max_blocks_per_node
                    .and_then(|most| most.try_into().ok()),
                idle: Duration::from_secs(spec.idle_seconds.into()),
            },
            nearly_exhausted: spec.nearly_exhausted_percent,
            ranges: Dual { v4, v6 },
            reserved,
            selector: Selector::new(spec.node_selector.as_ref())
                .map_err(|error| format!("nodeSelector: {error}"))?,
            priority: spec.priority,
            disabled: spec.disabled,
            quarantine: Duration::from_secs(spec.quarantine_seconds.into()),
        })
    }
}

fn ranges(
    family: Family,
    field: &str,
    texts: &[String],
    block_size: u32,
) -> Result<Ranges, String> {
    let mut cidrs: Vec<Cidr> = Vec::with_capacity(texts.len());
    for text in texts {
        let cidr = Cidr::parse_strict(text).map_err(|error| format!("{field}.cidrs: {error}"))?;
        if cidr.family() != family {
            return Err(format!("{field}.cidrs: {cidr} is not {family}"));
        }
        if let Some(other) = cidrs.iter().find(|other| other.overlaps(&cidr)) {
            return Err(format!(
                "{field}.cidrs: {cidr} overlaps {other}: leave one out"
            ));
        }
        cidrs.push(cidr);
    }
    let block_len = u8::try_from(block_size)
        .ok()
        .filter(|len| *len <= family.bits());
    let Some(block_len) = block_len else {
        return Err(format!(
            "{field}.blockSize: {block_size} is more than {}",
            family.bits()
        ));
    };
    if let Some(small) = cidrs.iter().find(|cidr| cidr.len() > block_len) {
        return Err(format!(
            "{field}.blockSize: a /{block_len} does not fit into {small}"
        ));
    }
    if cidrs.is_empty() {
        return Err(format!("{field}.cidrs is empty: give at least one CIDR"));
    }
    Ok(Ranges { cidrs, block_len })
}
