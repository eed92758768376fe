//! A node's agent, played: what the contract of `NodeSubnet` asks of one, and nothing it does not.
//!
//! One per machine, not per Node: the machine may come back as another Node and brings its store
//! along. What an agent knows of the API it hears late; what it has given out it has on disk.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cadastre_api::{HeldBlock, NodeSubnetSpec, Recall};
use cadastre_controller::cluster::seen::{AgentReport, BlockWord, PodUid, Subnet, Text};
use cadastre_core::{Addr, Cidr, Family, Span};

use super::clock::{Clocks, Time};
use super::host::Host;

/// Names a block: its CIDR and the UID of its object.
pub type Key = (Cidr, Text);

/// A block in the agent's store.
#[derive(Clone, Debug)]
pub struct Held {
    pub pool: Text,
    /// The node UID that it was last listed for.
    pub node: Text,
    pub recall: Option<Recall>,
    reserved: Vec<Span>,
    /// Whether the list names it: what it does not name gives nothing new.
    pub listed: bool,
    /// Let go of, for good.
    pub released: bool,
    /// Of a released one: whether it has vanished from the list since.
    vanished: bool,
}

impl Held {
    /// As a shipped agent's ledger has it.
    pub fn of_ledger(pool: Text, node: Text, listed: bool, released: bool) -> Self {
        Held {
            pool,
            node,
            recall: None,
            reserved: Vec::new(),
            listed,
            released,
            vanished: false,
        }
    }
}

impl Given {
    /// As a shipped agent's ledger has it.
    pub fn of_ledger(block: Key, pod: Option<Text>) -> Self {
        Given {
            block,
            pod,
            cool_until: Duration::ZERO,
        }
    }
}

/// An address in the store.
#[derive(Clone, Debug)]
pub struct Given {
    pub block: Key,
    /// The pod that has it; nobody while it cools.
    pub pod: Option<Text>,
    /// By its own monotonic clock.
    cool_until: Duration,
}

/// What it does with its life. Chances are for a machine.
#[derive(Clone, Debug)]
pub struct Habits {
    pub cooldown: Time,
    /// Whether it forgets what it released once that has vanished, or says so until it is listed anew.
    pub forgets: bool,
}

/// One machine's agent.
pub struct Agent {
    pub name: Text,
    /// The UID of its Node as it has heard; none once that is gone.
    pub node: Option<Text>,
    pub habits: Habits,
    /// The machine is off, for now or for good.
    pub is_off: bool,
    /// For good: what it had is nobody's, though a Node may still stand for it.
    pub is_gone: bool,
    pub paused_until: Time,
    pub clocks: Clocks,
    /// What the watches have brought and it has not taken in yet.
    pub subnets: VecDeque<Option<Arc<Subnet>>>,
    pub nodes: VecDeque<Option<Text>>,
    pub hearing: bool,
    pub hearing_node: bool,
    pub held_until: Time,
    /// Its NodeSubnet as it has heard.
    pub seen: Option<Arc<Subnet>>,
    /// Until when it waits for the answer to what it published.
    pub publishing_until: Time,
    pub tick_at: Option<Time>,
    /// UIDs of its Nodes that the server has forgotten while it lived: what it has of them is in use.
    pub forgotten: BTreeSet<Text>,
    /// On disk.
    pub blocks: BTreeMap<Key, Held>,
    /// What it gave back.
    pub let_go: BTreeSet<Key>,
    pub given: BTreeMap<Addr, Given>,
    /// Pods that wait for addresses.
    pub pending: BTreeSet<Text>,
    /// Where the shipped agent runs. What is above is what its store says, then.
    pub host: Option<Box<Host>>,
    /// Addresses that cool, by block, where the shipped agent runs.
    pub cooling: BTreeMap<Key, u64>,
}

impl Agent {
    pub fn new(name: Text, habits: Habits) -> Self {
        Agent {
            name,
            node: None,
            habits,
            is_off: false,
            is_gone: false,
            paused_until: 0,
            clocks: Clocks::new(1_000_000),
            subnets: VecDeque::new(),
            nodes: VecDeque::new(),
            hearing: false,
            hearing_node: false,
            held_until: 0,
            seen: None,
            publishing_until: 0,
            tick_at: None,
            let_go: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            blocks: BTreeMap::new(),
            given: BTreeMap::new(),
            pending: BTreeSet::new(),
            host: None,
            cooling: BTreeMap::new(),
        }
    }

    /// It starts anew: the store is what is left.
    pub fn restart(&mut self) {
        (self.is_off, self.is_gone) = (false, false);
        self.node = None;
        self.seen = None;
        self.subnets.clear();
        self.nodes.clear();
        self.publishing_until = 0;
    }

    /// The spec, where it is for this agent's Node.
    fn spec(&self) -> Option<&NodeSubnetSpec> {
        let spec = self.seen.as_ref()?.spec.as_ref().ok()?;
        let uid = self.node.as_ref()?;
        (spec.node_uid.as_deref() == Some(&**uid)).then_some(spec)
    }

    /// Brings the store in line with the list. Returns blocks that are used from now on.
    pub fn take_over(&mut self) -> Vec<Key> {
        let (Some(spec), Some(uid)) = (self.spec().cloned(), self.node.clone()) else {
            return Vec::new();
        };
        let mut new = Vec::new();
        let mut listed = BTreeSet::new();
        for told in &spec.blocks {
            let key = key(told);
            listed.insert(key.clone());
            let reserved = told.reserved.iter().chain(&told.on_request);
            let reserved = reserved.map(|r| Span::parse(r).unwrap());
            let reserved: Vec<Span> = reserved.collect();
            match self.blocks.get_mut(&key) {
                Some(held) if held.node == uid && held.released && !held.vanished => {}
                Some(held) => {
                    if held.node != uid || held.released {
                        new.push(key);
                    }
                    (held.node, held.reserved, held.recall) = (uid.clone(), reserved, told.recall);
                    held.pool = told.pool.as_str().into();
                    (held.released, held.vanished) = (false, false);
                    held.listed = true;
                }
                None => {
                    self.rename(&key);
                    if let Some(held) = self.blocks.get_mut(&key) {
                        (held.node, held.reserved, held.recall) =
                            (uid.clone(), reserved, told.recall);
                        held.pool = told.pool.as_str().into();
                        held.listed = true;
                        new.push(key);
                        continue;
                    }
                    let held = Held {
                        pool: told.pool.as_str().into(),
                        node: uid.clone(),
                        recall: told.recall,
                        reserved,
                        listed: true,
                        released: false,
                        vanished: false,
                    };
                    self.blocks.insert(key.clone(), held);
                    new.push(key);
                }
            }
        }
        let forgets = self.habits.forgets;
        for (key, held) in &mut self.blocks {
            if !listed.contains(key) {
                held.listed = false;
                held.vanished |= held.released;
                // What vanished without its word is still its own, as long as it is in use.
                held.recall = held.recall.filter(|_| held.released);
            }
        }
        let given = &self.given;
        self.blocks.retain(|key, held| {
            let in_use = given.values().any(|it| it.block == *key);
            let is_over = if held.released && held.node == uid {
                held.vanished && forgets
            } else {
                !held.listed && !in_use
            };
            !is_over
        });
        self.let_go_again(&mut new);
        new
    }

    /// What is listed though it was let go of may be another node's by now: the server was put back to
    /// an older state.
    fn let_go_again(&mut self, new: &mut Vec<Key>) {
        new.retain(|key| !self.let_go.contains(key));
        for (key, held) in &mut self.blocks {
            if held.listed && self.let_go.contains(key) {
                held.recall = Some(Recall::Drain);
                held.released |= !self.given.values().any(|it| it.block == *key);
            }
        }
    }

    /// A block that it never let go of is listed under another UID: its object was lost and made anew.
    fn rename(&mut self, key: &Key) {
        let same = |(k, held): &(&Key, &Held)| k.0 == key.0 && !held.released;
        let Some(old) = self.blocks.iter().find(same).map(|(k, _)| k.clone()) else {
            return;
        };
        if let Some(held) = self.blocks.remove(&old) {
            self.blocks.insert(key.clone(), held);
        }
        for it in self.given.values_mut().filter(|it| it.block == old) {
            it.block = key.clone();
        }
    }

    /// Whether it may give addresses from the block.
    fn gives_from(&self, held: &Held) -> bool {
        Some(&held.node) == self.node.as_ref()
            && self.spec().is_some()
            && held.listed
            && !held.released
            && held.recall != Some(Recall::Drain)
    }

    /// The blocks that it uses as that node, not let go of.
    pub fn uses<'a>(&'a self, uid: &'a Text) -> impl Iterator<Item = (&'a Key, &'a Held)> {
        let used = move |(_, held): &(&Key, &Held)| held.node == *uid && !held.released;
        self.blocks.iter().filter(used)
    }

    fn in_use(&self, block: &Key) -> impl Iterator<Item = (&Addr, &Given)> {
        self.given.iter().filter(move |(_, it)| it.block == *block)
    }

    fn is_empty(&self, block: &Key) -> bool {
        self.in_use(block).next().is_none()
    }

    fn free(&self, block: &Key, held: &Held) -> impl Iterator<Item = Addr> {
        let (first, last) = (block.0.first(), block.0.last());
        let all = (first.value..=last.value).map(move |value| Addr {
            family: first.family,
            value,
        });
        all.filter(|addr| {
            !self.given.contains_key(addr)
                && !held
                    .reserved
                    .iter()
                    .any(|span| span.overlaps(&Cidr::host(*addr)))
        })
    }

    /// Gives a pod an address of each family of one pool; `pick` chooses among the free ones.
    pub fn give(&mut self, pod: &Text, mut pick: impl FnMut(usize) -> usize) -> Vec<(Addr, Key)> {
        let Some(spec) = self.spec() else {
            return Vec::new();
        };
        let mut pools: Vec<Text> = asked_for(spec).collect();
        for held in self.blocks.values().filter(|held| self.gives_from(held)) {
            if !pools.contains(&held.pool) {
                pools.push(held.pool.clone());
            }
        }
        for pool in pools {
            let of_pool = |family: Family| {
                let mut all = Vec::new();
                for (key, held) in &self.blocks {
                    if held.pool == pool && key.0.family() == family && self.gives_from(held) {
                        all.extend(self.free(key, held).map(|addr| (addr, key.clone())));
                    }
                }
                all
            };
            let has = |family: Family| {
                let mut keys = self.blocks.iter();
                keys.any(|(key, held)| held.pool == pool && key.0.family() == family)
            };
            let families: Vec<Family> = Family::ALL.into_iter().filter(|f| has(*f)).collect();
            let choices: Vec<_> = families.into_iter().map(of_pool).collect();
            if choices.is_empty() || choices.iter().any(Vec::is_empty) {
                continue;
            }
            let mut given = Vec::new();
            for mut free in choices {
                given.push(free.swap_remove(pick(free.len())));
            }
            for (addr, block) in &given {
                let entry = Given {
                    block: block.clone(),
                    pod: Some(pod.clone()),
                    cool_until: Duration::ZERO,
                };
                self.given.insert(*addr, entry);
            }
            self.pending.remove(pod);
            return given;
        }
        Vec::new()
    }

    /// The pod is gone: its addresses cool.
    pub fn take_back(&mut self, pod: &Text, now: Time) {
        self.pending.remove(pod);
        let cool_until = self.clocks.mono(now) + Duration::from_micros(self.habits.cooldown);
        for it in self.given.values_mut() {
            if it.pod.as_ref() == Some(pod) {
                (it.pod, it.cool_until) = (None, cool_until);
            }
        }
    }

    /// What time brings about: addresses have cooled, empty blocks are let go. Returns these.
    pub fn let_go(&mut self, now: Time) -> Vec<Key> {
        let mono = self.clocks.mono(now);
        self.given
            .retain(|_, it| it.pod.is_some() || it.cool_until > mono);
        let Some(uid) = self.node.clone().filter(|_| self.spec().is_some()) else {
            return Vec::new();
        };
        let asked = |(_, held): &(&Key, &Held)| held.recall.is_some();
        let asked = self.uses(&uid).filter(asked).map(|(key, _)| key.clone());
        let empty: Vec<Key> = asked.filter(|key| self.is_empty(key)).collect();
        for key in &empty {
            if let Some(held) = self.blocks.get_mut(key) {
                held.released = true;
            }
            self.let_go.insert(key.clone());
        }
        empty
    }

    pub fn next_cooled(&self) -> Option<Time> {
        let cooling = self.given.values().filter(|it| it.pod.is_none());
        cooling.map(|it| self.clocks.when(it.cool_until)).min()
    }

    /// What it has to say, if it knows who it is.
    pub fn report(&self) -> Option<AgentReport> {
        let uid = self.node.clone()?;
        let spec = self.spec()?;
        let best = asked_for(spec).next();
        let mut demand: BTreeMap<Text, u64> = BTreeMap::new();
        let listed = self.uses(&uid).filter(|(_, held)| held.listed);
        for pool in listed.map(|(_, held)| &held.pool) {
            let of_pool = |family: Family| {
                let same = self.given.values().filter(|it| {
                    let held = self.blocks.get(&it.block);
                    it.block.0.family() == family
                        && held.is_some_and(|h| h.pool == *pool && h.node == uid)
                });
                same.count() as u64
            };
            let used = Family::ALL.into_iter().map(of_pool).max().unwrap_or(0);
            demand.insert(pool.clone(), used + reserve(spec, pool));
        }
        if let Some(best) = best.filter(|_| !self.pending.is_empty()) {
            let reserve = reserve(spec, &best);
            *demand.entry(best).or_insert(reserve) += self.pending.len() as u64;
        }
        let mut blocks = Vec::new();
        let told = |(_, held): &(&Key, &Held)| held.node == uid || !held.released;
        for (key, held) in self.blocks.iter().filter(told) {
            let used = self.in_use(key).filter(|(_, it)| it.pod.is_some()).count();
            let all = self.in_use(key).count();
            let free = if held.released || !held.listed {
                0
            } else {
                self.free(key, held).count()
            };
            blocks.push(BlockWord {
                cidr: key.0,
                uid: key.1.clone(),
                used: used as u64,
                cooling: (all - used) as u64,
                free: free as u64,
                released: held.released,
            });
        }
        let of_node = |(addr, it): (&Addr, &Given)| {
            let pod = it.pod.as_ref()?;
            Some((*addr, PodUid::read(pod)))
        };
        Some(AgentReport {
            node_uid: uid.clone(),
            demand: demand.into_iter().collect(),
            blocks: blocks.into(),
            // It says so of all of them: what the controller concludes must be right whatever an agent says.
            orphans: self.given.iter().filter_map(of_node).collect(),
            refused: Vec::new(),
            refusals: 0,
            conditions: Box::default(),
        })
    }

    /// What it has to publish: its word, where the object does not say it yet.
    pub fn unsaid(&self) -> Option<AgentReport> {
        let mut report = self.report()?;
        let said = self.seen.as_ref()?.report.as_deref();
        report.conditions = said.map(|said| said.conditions.clone()).unwrap_or_default();
        (said != Some(&report)).then_some(report)
    }
}

pub fn key(told: &HeldBlock) -> Key {
    (
        Cidr::parse_strict(&told.cidr).unwrap(),
        told.uid.as_str().into(),
    )
}

/// Addresses of a pool to keep free beside those in use and those that pods wait for.
fn reserve(spec: &NodeSubnetSpec, pool: &str) -> u64 {
    let mut pools = spec.pools.iter().filter(|it| it.name == pool);
    pools.next().map_or(0, |it| u64::from(it.terms.warm.low))
}

/// The pools that the node may ask for blocks, best first.
fn asked_for(spec: &NodeSubnetSpec) -> impl Iterator<Item = Text> {
    let pools = spec.pools.iter();
    let askable = pools.filter(|pool| pool.is_askable());
    askable.map(|pool| pool.name.as_str().into())
}
