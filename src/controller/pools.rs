//! What every pool may do right now.
//!
//! A survey reads all pools, service ranges and node addresses together, because a pool's standing
//! depends on the others: of two pools that overlap the newer one carves nothing until the older is
//! gone. Ages are compared by creation time, then by name, so every controller sees the same order.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::api::{FINALIZER, IPPoolSpec};
use crate::choice::Selector;
use crate::cluster::seen::{Node, Pool, Text};
use crate::cluster::world::World;
use crate::ipam::{self, Cidr, Dual, Family, Ledger, Ranges, Span};

/// Quarantine of ranges that lie outside every pool.
pub const DEFAULT_QUARANTINE: Duration = Duration::from_secs(60);

/// One pool as the loops use it.
#[derive(Debug)]
pub struct PoolState {
    /// Its name
    pub name: Text,
    /// Its UID
    pub uid: Text,
    /// What it may carve, with the next-fit cursors
    pub space: ipam::Pool,
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
    pub fn choices<V>(&self, node: &Node, ledger: &Ledger, full: &BTreeMap<Text, V>) -> Vec<Text> {
        let mut matching: Vec<&PoolState> = self
            .by_rank
            .iter()
            .filter_map(|name| self.states.get(name))
            .filter(|state| state.selector.matches(&node.labels))
            .collect();
        let tied = matching
            .windows(2)
            .any(|pair| pair[0].rank() == pair[1].rank() && !full.contains_key(&pair[0].name));
        if tied {
            matching.sort_by_cached_key(|state| {
                let is_full = full.contains_key(&state.name);
                let room = if is_full { 0 } else { state.room(ledger) };
                (
                    std::cmp::Reverse(state.rank()),
                    std::cmp::Reverse(room),
                    state.name.clone(),
                )
            });
        }
        matching
            .into_iter()
            .map(|state| state.name.clone())
            .collect()
    }

    /// The pools that select the node but do not serve now.
    pub fn barred<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a PoolState> {
        self.states.values().filter(|state| {
            !state.is_serving()
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
        (self.priority, self.selector.specificity())
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

    let mut blocked = parsed.reserved;
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
    space.set_ranges(parsed.ranges);
    space.set_blocked(blocked);

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
        space,
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
            .map(|r| ranges(Family::V4, "ipv4", &r.cidrs, r.block_size))
            .transpose()?;
        let v6 = spec
            .ipv6
            .as_ref()
            .map(|r| ranges(Family::V6, "ipv6", &r.cidrs, r.block_size))
            .transpose()?;
        if v4.is_none() && v6.is_none() {
            return Err("neither ipv4 nor ipv6 is given: give at least one".into());
        }
        let reserved = spec
            .reserved
            .iter()
            .map(|text| Span::parse(text).map_err(|error| format!("reserved: {error}")))
            .collect::<Result<_, _>>()?;
        Ok(Parsed {
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
