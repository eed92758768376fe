//! Affinity blocks: which node has which, and how far each one is.
//!
//! A block begins as a claim, becomes an object, is seen back on the watch, is listed in its owner's
//! NodeSubnet, is asked back, is let go by the agent, is taken off the list, and ends with its object.
//!
//! # Guarantees
//! - A block is *provisional* until its object came back on the watch and nothing that overlaps it
//!   stood before it. Only then does it count as its owner's; a provisional block is never listed.
//! - Of two that overlap the one that a NodeSubnet lists stays, else the one that was created first;
//!   the other one's object is deleted.
//! - What a node has been listed stays claimed until its agent has said that it let go of it, and the
//!   list without it has been written; or until the node's UID is gone, the quarantine is over and no
//!   pod has an address in it. An object that somebody deletes or edits meanwhile is restored.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

use super::Now;
use super::holders::Use;
use super::pools::DEFAULT_QUARANTINE;
use super::registry::{Registry, left_of, machine, whole_seconds};
use crate::api::{HeldBlock, Recall, block_name};
use crate::cluster::seen::{AgentReport, Block, BlockSpec, BlockWord, Machine, Node, Owner, Text};
use crate::cluster::world::World;
use crate::ipam::{Cidr, ClaimId, State};

/// What has to be done about a block's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Settled,
    /// Wait until the watch shows it.
    Await,
    /// Create it.
    Create,
    /// Write it as it should be.
    Replace,
    /// Delete it.
    Delete,
}

/// One block.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The range
    pub cidr: Cidr,
    /// The pool that it was carved from
    pub pool: Text,
    /// Who has it
    pub owner: Owner,
    /// Since when
    pub since: Timestamp,
    /// When its quarantine is over at the earliest, for people and for the next leader
    pub until: Option<Timestamp>,
    /// The same, monotonic
    pub rests_until: Option<Duration>,
    /// Its claim in the ledger
    pub claim: ClaimId,
    /// UID of its object, the last that is known
    pub uid: Option<Text>,
    /// Whether it is its owner's for sure
    pub confirmed: bool,
    /// What has to be done
    pub step: Step,
    /// Whether a request about its object is on its way
    pub in_flight: bool,
    /// Whether its object has to be read first: what became of a write is not known
    pub to_read: bool,
    /// Until when the watch has time to show it, monotonic
    pub await_until: Duration,
    /// Whether it is asked back
    pub recall: Option<Recall>,
    /// Since when it is empty and could be done without, monotonic
    pub idle_since: Option<Duration>,
}

impl Entry {
    /// A block of that owner from now on: provisional, with its object still to be made.
    fn new(cidr: Cidr, pool: Text, owner: Owner, claim: ClaimId, now: Now) -> Self {
        Entry {
            cidr,
            pool,
            owner,
            since: whole_seconds(now.wall),
            until: None,
            rests_until: None,
            claim,
            uid: None,
            confirmed: false,
            step: Step::Create,
            in_flight: false,
            to_read: false,
            await_until: Duration::ZERO,
            recall: None,
            idle_since: None,
        }
    }

    /// How sure its claim is.
    fn state(&self) -> State {
        match (self.owner.resting, self.confirmed) {
            (true, _) => State::Resting,
            (false, true) => State::Held,
            (false, false) => State::InFlight,
        }
    }

    /// Whether it is a live node's for sure, and stays so for now.
    pub fn is_held(&self) -> bool {
        self.confirmed && !self.owner.resting && !self.is_leaving()
    }

    /// Whether the agent of its owner has let go of it.
    pub fn is_released(&self, report: Option<&AgentReport>) -> bool {
        self.word(report).is_some_and(|word| word.released)
    }

    /// The spec that its object should have.
    pub fn spec(&self) -> BlockSpec {
        BlockSpec {
            cidr: self.cidr,
            pool: self.pool.clone(),
            owner: self.owner.clone(),
            since: self.since,
            until: self.until,
        }
    }

    /// Whether it is on its way out: lost against another, or let go.
    pub fn is_leaving(&self) -> bool {
        self.step == Step::Delete
    }

    /// What the agent of its owner says of it.
    pub fn word<'a>(&self, report: Option<&'a AgentReport>) -> Option<&'a BlockWord> {
        let report = report.filter(|report| report.node_uid == self.owner.uid)?;
        report.of_block(&self.cidr, self.uid.as_deref()?)
    }
}

/// All blocks of the leader.
#[derive(Debug, Default)]
pub struct Blocks {
    entries: BTreeMap<Cidr, Entry>,
    by_owner: BTreeMap<Text, BTreeSet<Cidr>>,
    /// Nodes by name and UID that have any
    owners: BTreeSet<(Text, Text)>,
    /// Provisional ones whose objects the watch has shown
    to_judge: BTreeSet<Cidr>,
}

impl Blocks {
    /// The block of exactly that range.
    pub fn get(&self, cidr: &Cidr) -> Option<&Entry> {
        self.entries.get(cidr)
    }

    /// The same, to change what is done about it. The owner is changed by [`Registry`] alone.
    pub fn get_mut(&mut self, cidr: &Cidr) -> Option<&mut Entry> {
        self.entries.get_mut(cidr)
    }

    /// All blocks by address.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// The blocks of a node's UID, by address.
    pub fn of<'a>(&'a self, uid: &str) -> impl Iterator<Item = &'a Entry> + use<'a> {
        let cidrs = self.by_owner.get(uid).into_iter().flatten();
        cidrs.filter_map(|cidr| self.entries.get(cidr))
    }

    /// Whether the UID has any.
    pub fn has(&self, uid: &str) -> bool {
        self.by_owner.contains_key(uid)
    }

    fn insert(&mut self, entry: Entry) {
        let (name, uid) = (entry.owner.name.clone(), entry.owner.uid.clone());
        self.owners.insert((name, uid.clone()));
        self.by_owner.entry(uid).or_default().insert(entry.cidr);
        self.entries.insert(entry.cidr, entry);
    }

    fn remove(&mut self, cidr: &Cidr) -> Option<Entry> {
        let entry = self.entries.remove(cidr)?;
        self.to_judge.remove(cidr);
        let owner = &entry.owner;
        if let Some(cidrs) = self.by_owner.get_mut(&owner.uid) {
            cidrs.remove(cidr);
            if cidrs.is_empty() {
                self.by_owner.remove(&owner.uid);
                self.owners.remove(&(owner.name.clone(), owner.uid.clone()));
            }
        }
        Some(entry)
    }

    /// The UIDs under a node's name that have any.
    fn uids<'a>(&'a self, name: &'a Text) -> impl Iterator<Item = &'a Text> {
        self.owners
            .range((name.clone(), "".into())..)
            .take_while(move |(n, _)| n == name)
            .map(|(_, uid)| uid)
    }
}

/// What a look at a block's object brought about.
#[derive(Debug, Default)]
pub struct Noted {
    /// Blocks whose object wants something done
    pub blocks: Vec<Cidr>,
    /// Names of nodes whose list of blocks may have changed, or that may lack one now
    pub nodes: Vec<Text>,
    /// Pools in which space may have come free
    pub freed: bool,
}

impl Registry {
    /// Takes note of a block that has just been carved for a node, under the claim of the ledger.
    pub fn begin_block(&mut self, claim: ClaimId, cidr: Cidr, pool: &Text, node: &Node, now: Now) {
        let owner = Owner::node(&node.name, &node.uid);
        let entry = Entry::new(cidr, pool.clone(), owner, claim, now);
        self.blocks.insert(entry);
    }

    /// Reads all blocks: objects first, then what NodeSubnets list, then whose owner is gone.
    pub(super) fn rebuild_blocks(&mut self, world: &World, now: Now) {
        for block in world.blocks.iter() {
            self.block_seen(block, now);
        }
        // What lives is right whatever a list for the dead says, which may be very old.
        for alive in [true, false] {
            for subnet in world.subnets.iter() {
                let Ok(spec) = &subnet.spec else { continue };
                let Some(uid) = &spec.node_uid else { continue };
                let node = world.nodes.get(&subnet.name);
                if node.is_some_and(|node| *node.uid == **uid) != alive {
                    continue;
                }
                for held in &spec.blocks {
                    self.recall_listed(&subnet.name, &uid.as_str().into(), held, alive, now);
                }
            }
        }
        let owners: BTreeSet<(Text, Text)> = self
            .blocks
            .iter()
            .filter(|entry| !entry.owner.resting)
            .map(|entry| (entry.owner.name.clone(), entry.owner.uid.clone()))
            .collect();
        for (name, uid) in owners {
            let live = world.nodes.get(&name).is_some_and(|node| node.uid == uid);
            if !live {
                let machine = machine_in(world, &name, &uid);
                self.retire_blocks(&name, &uid, &machine, now);
            }
        }
    }

    /// A block that the NodeSubnet of a live node lists is that node's, whatever its object says by
    /// now. The list for a dead one tells only of what nobody else has a claim to.
    pub(super) fn recall_listed(
        &mut self,
        name: &Text,
        uid: &Text,
        held: &HeldBlock,
        alive: bool,
        now: Now,
    ) {
        let Ok(cidr) = Cidr::parse_strict(&held.cidr) else {
            return;
        };
        let known = self.blocks.get(&cidr).map(|entry| entry.owner.clone());
        let theirs = match &known {
            Some(known) => known.resting || known.uid != *uid,
            None => self.ledger.overlapping(&cidr).next().is_some(),
        };
        if !alive && theirs {
            return;
        }
        let owner = Owner::node(name, uid);
        let Some(known) = known else {
            let holder = self.holders.intern(Use::Blocks, name, uid);
            let claim = self.ledger.record(holder, cidr, State::Held);
            self.blocks.insert(Entry {
                uid: Some(held.uid.as_str().into()),
                confirmed: true,
                recall: held.recall,
                ..Entry::new(cidr, held.pool.as_str().into(), owner, claim, now)
            });
            return;
        };
        if known != owner {
            self.give_block(&cidr, owner);
        }
        self.confirm(&cidr);
        if let Some(entry) = self.blocks.get_mut(&cidr) {
            entry.recall = held.recall;
            if known != entry.owner {
                (entry.until, entry.rests_until) = (None, None);
                entry.step = Step::Replace;
            }
        }
    }

    /// A late write of an earlier leader may list a live node a block that is not in the books: from
    /// then on it is the node's, until its agent lets go of it.
    pub fn blocks_told(&mut self, name: &Text, world: &World, now: Now) -> Vec<Cidr> {
        let subnet = world.subnets.get(name);
        let Some(Ok(spec)) = subnet.map(|subnet| &subnet.spec) else {
            return Vec::new();
        };
        let report = subnet.and_then(|subnet| subnet.report.as_deref());
        let node = world.nodes.get(name);
        let Some(node) = node.filter(|it| spec.node_uid.as_deref() == Some(&*it.uid)) else {
            return Vec::new();
        };
        let mut told = Vec::new();
        for held in &spec.blocks {
            let Ok(cidr) = Cidr::parse_strict(&held.cidr) else {
                continue;
            };
            let report = report.filter(|report| report.node_uid == node.uid);
            let word = report.and_then(|report| report.of_block(&cidr, &held.uid));
            let let_go = word.is_some_and(|word| word.released);
            if !let_go && self.blocks.get(&cidr).is_none() {
                self.recall_listed(name, &node.uid, held, true, now);
                told.push(cidr);
            }
        }
        told
    }

    /// An object is there, or has changed.
    pub fn block_seen(&mut self, block: &Block, now: Now) -> Noted {
        let mut noted = Noted::default();
        let Some(spec) = sound(block) else {
            self.block_spoiled(block, now, &mut noted);
            return noted;
        };
        let cidr = spec.cidr;
        let Some(entry) = self.blocks.get(&cidr) else {
            self.adopt(block, spec, now);
            noted.blocks.push(cidr);
            noted.nodes.push(spec.owner.name.clone());
            return noted;
        };
        let ours = entry.owner.uid == spec.owner.uid;
        let owner = entry.owner.name.clone();
        if !entry.confirmed && !ours {
            // Somebody else was first with that name: it is theirs, and our node needs another.
            if let Some(entry) = self.drop_block(&cidr) {
                noted.nodes.push(entry.owner.name);
            }
            self.adopt(block, spec, now);
            noted.nodes.push(spec.owner.name.clone());
            noted.blocks.push(cidr);
            return noted;
        }
        let wanted = entry.spec();
        let Some(entry) = self.blocks.get_mut(&cidr) else {
            return noted;
        };
        let is_provisional = !entry.confirmed;
        if entry.uid.as_ref() != Some(&block.uid) {
            entry.uid = Some(block.uid.clone());
            noted.nodes.push(owner);
        }
        if entry.step != Step::Delete {
            // Until it is judged nothing is written to it: an untouched object tells its age.
            let differs = entry.confirmed && *spec != wanted;
            entry.step = if differs {
                Step::Replace
            } else {
                Step::Settled
            };
        }
        if is_provisional {
            self.blocks.to_judge.insert(cidr);
        }
        noted.blocks.push(cidr);
        noted
    }

    /// An object that says nothing any more is written anew where its block is known. Where one was
    /// to be created under its name, it rests: nobody knows who had it, but no node is listed it.
    pub fn block_spoiled(&mut self, block: &Block, now: Now, noted: &mut Noted) {
        let known = self.blocks.entries.values();
        let known = known.filter(|entry| *block.name == *block_name(&entry.cidr));
        let known = known.map(|entry| (entry.cidr, entry.confirmed, entry.is_leaving()));
        let Some((cidr, confirmed, false)) = { known }.next() else {
            return;
        };
        if !confirmed && let Some(entry) = self.blocks.get(&cidr) {
            noted.nodes.push(entry.owner.name.clone());
            let nobody = Owner {
                resting: true,
                name: "".into(),
                uid: block.uid.clone(),
                machine: Machine::default(),
            };
            let rest = self.quarantine_of_block(&entry.pool);
            self.give_block(&cidr, nobody);
            self.confirm(&cidr);
            self.set_rest(&cidr, rest, now);
        }
        if let Some(entry) = self.blocks.get_mut(&cidr) {
            entry.uid = Some(block.uid.clone());
            // What says another CIDR cannot be mended, as that field is immutable: after its rest it goes.
            entry.step = if confirmed {
                Step::Replace
            } else {
                Step::Settled
            };
            noted.blocks.push(cidr);
        }
    }

    fn set_rest(&mut self, cidr: &Cidr, rest: Duration, now: Now) {
        if let Some(entry) = self.blocks.get_mut(cidr) {
            entry.since = whole_seconds(now.wall);
            entry.until = now.wall.saturating_add(rest).ok().map(whole_seconds);
            entry.rests_until = Some(now.mono + rest);
            entry.recall = None;
        }
    }

    /// An object is gone.
    pub fn block_gone(&mut self, block: &Block) -> Noted {
        let mut noted = Noted::default();
        let Some(spec) = sound(block) else {
            return noted;
        };
        let cidr = spec.cidr;
        let Some(entry) = self.blocks.get_mut(&cidr) else {
            return noted;
        };
        if entry.uid.as_ref().is_some_and(|uid| *uid != block.uid) {
            return noted;
        }
        noted.nodes.push(entry.owner.name.clone());
        if entry.is_leaving() {
            self.drop_block(&cidr);
            noted.freed = true;
        } else {
            entry.step = Step::Create;
            noted.blocks.push(cidr);
        }
        noted
    }

    fn adopt(&mut self, block: &Block, spec: &BlockSpec, now: Now) {
        let owner = &spec.owner;
        let holder = self.holders.intern(Use::Blocks, &owner.name, &owner.uid);
        let claim = self.ledger.record(holder, spec.cidr, State::InFlight);
        let rest = self.quarantine_of_block(&spec.pool);
        let left = spec.until.map_or(rest, |until| left_of(until, rest, now));
        let entry = Entry {
            since: spec.since,
            until: spec.until,
            rests_until: owner.resting.then_some(now.mono + left),
            uid: Some(block.uid.clone()),
            // Only what has been its owner's comes to rest.
            confirmed: owner.resting,
            step: Step::Settled,
            ..Entry::new(spec.cidr, spec.pool.clone(), owner.clone(), claim, now)
        };
        self.ledger.set_state(claim, entry.state());
        self.blocks.insert(entry);
        if !owner.resting {
            self.blocks.to_judge.insert(spec.cidr);
        }
    }

    /// Judges the blocks whose objects the watch has shown, unless a list runs: then the objects are
    /// not in the order in which they were made.
    pub fn judge_blocks(&mut self, world: &World) -> Noted {
        let mut noted = Noted::default();
        if world.blocks.is_listing() {
            return noted;
        }
        for cidr in std::mem::take(&mut self.blocks.to_judge) {
            let Some(entry) = self.blocks.get(&cidr) else {
                continue;
            };
            if entry.is_leaving() || entry.confirmed {
                continue;
            }
            let name = entry.owner.name.clone();
            // What rests takes nothing from anybody; it might have been used.
            let rests = entry.owner.resting;
            if rests || self.is_first(&cidr, world) {
                self.confirm(&cidr);
                let there = world.blocks.get(&block_name(&cidr));
                let there = there.and_then(|block| block.spec.as_ref().ok());
                if let Some(entry) = self.blocks.get_mut(&cidr)
                    && there.is_some_and(|there| *there != entry.spec())
                {
                    entry.step = Step::Replace;
                }
            } else if let Some(entry) = self.blocks.get_mut(&cidr) {
                entry.step = Step::Delete;
            }
            noted.nodes.push(name);
            noted.blocks.push(cidr);
        }
        noted
    }

    /// Whether nothing that overlaps the block stood before it.
    fn is_first(&self, cidr: &Cidr, world: &World) -> bool {
        let Some(mine) = Self::age(cidr, world) else {
            return false;
        };
        let own = self.blocks.get(cidr).map(|entry| entry.claim);
        let mut others = self.ledger.overlapping(cidr);
        others.all(|(id, claim)| {
            if Some(id) == own {
                return true;
            }
            match self
                .blocks
                .get(&claim.cidr)
                .filter(|other| other.claim == id)
            {
                Some(other) if other.is_leaving() && !other.confirmed => true,
                Some(other) if other.confirmed => false,
                // One without an object yet will find this one before it.
                Some(other) => Self::age(&other.cidr, world).is_none_or(|theirs| mine < theirs),
                // A podCIDR, or what rests of one.
                None => false,
            }
        })
    }

    /// When an object was made, in comparison with others: what has been changed since was somebody's
    /// before.
    fn age(cidr: &Cidr, world: &World) -> Option<(bool, u64)> {
        let block = world.blocks.get(&block_name(cidr))?;
        Some((!block.touched, block.version))
    }

    fn confirm(&mut self, cidr: &Cidr) {
        self.blocks.to_judge.remove(cidr);
        if let Some(entry) = self.blocks.get_mut(cidr) {
            entry.confirmed = true;
            self.ledger.set_state(entry.claim, entry.state());
        }
    }

    /// The node's UID is gone: its blocks rest. Returns those.
    pub fn retire_blocks(
        &mut self,
        name: &Text,
        uid: &Text,
        machine: &Machine,
        now: Now,
    ) -> Vec<Cidr> {
        let cidrs: Vec<Cidr> = self.blocks.of(uid).map(|entry| entry.cidr).collect();
        for cidr in &cidrs {
            let Some(entry) = self.blocks.get(cidr) else {
                continue;
            };
            if entry.owner.resting || entry.is_leaving() {
                continue;
            }
            if !entry.confirmed && entry.step == Step::Create && !entry.in_flight {
                // Nobody has heard of it.
                self.drop_block(cidr);
                continue;
            }
            let rest = self.quarantine_of_block(&entry.pool);
            let owner = Owner {
                resting: true,
                name: name.clone(),
                uid: uid.clone(),
                machine: machine.clone(),
            };
            self.give_block(cidr, owner);
            self.set_rest(cidr, rest, now);
            let Some(entry) = self.blocks.get_mut(cidr) else {
                continue;
            };
            if entry.confirmed && entry.step == Step::Settled {
                entry.step = Step::Replace;
            }
        }
        cidrs
    }

    /// The machine is back as another Node: it gets the blocks back that rest from it, where their
    /// pool still serves it. Returns them.
    pub fn give_blocks_back(&mut self, node: &Node, now: Now) -> Vec<Cidr> {
        let resting = self.resting_blocks_of(node);
        for cidr in &resting {
            self.give_block(cidr, Owner::node(&node.name, &node.uid));
            if let Some(entry) = self.blocks.get_mut(cidr) {
                entry.since = whole_seconds(now.wall);
                entry.until = None;
                entry.rests_until = None;
                entry.step = Step::Replace;
            }
        }
        resting
    }

    fn resting_blocks_of(&self, node: &Node) -> Vec<Cidr> {
        let uids = self.blocks.uids(&node.name);
        let fits = |entry: &&Entry| {
            let pool = self.pools.get(&entry.pool);
            entry.confirmed
                && entry.owner.resting
                && entry.owner.machine.same(&node.machine)
                && !entry.is_leaving()
                && pool.is_some_and(|pool| {
                    pool.is_serving() && pool.selects(node) && pool.space.covers(&entry.cidr)
                })
        };
        let entries = uids.flat_map(|uid| self.blocks.of(uid)).filter(fits);
        entries.map(|entry| entry.cidr).collect()
    }

    /// Ends a block: its range is free, unless something else holds it too.
    pub fn drop_block(&mut self, cidr: &Cidr) -> Option<Entry> {
        let entry = self.blocks.remove(cidr)?;
        self.ledger.release(entry.claim);
        if !self.blocks.has(&entry.owner.uid) {
            self.holders.drop_uid(Use::Blocks, &entry.owner.uid);
        }
        Some(entry)
    }

    fn give_block(&mut self, cidr: &Cidr, owner: Owner) {
        let holder = self.holders.intern(Use::Blocks, &owner.name, &owner.uid);
        let to_judge = self.blocks.to_judge.contains(cidr);
        let Some(mut entry) = self.blocks.remove(cidr) else {
            return;
        };
        self.ledger.set_holder(entry.claim, holder);
        if entry.owner.uid != owner.uid && !self.blocks.has(&entry.owner.uid) {
            self.holders.drop_uid(Use::Blocks, &entry.owner.uid);
        }
        entry.owner = owner;
        self.ledger.set_state(entry.claim, entry.state());
        self.blocks.insert(entry);
        if to_judge {
            self.blocks.to_judge.insert(*cidr);
        }
    }

    /// The blocks of a node that its agent has let go and its NodeSubnet lists no more: they may end.
    /// What is seen of the NodeSubnet is one version of it, so no older write can list them again.
    pub fn blocks_let_go(&mut self, name: &Text, world: &World) -> Vec<Cidr> {
        let Some(node) = world.nodes.get(name) else {
            return Vec::new();
        };
        let Some(subnet) = world.subnets.get(name) else {
            return Vec::new();
        };
        let Ok(spec) = &subnet.spec else {
            return Vec::new();
        };
        let report = subnet.report.as_deref();
        let listed: BTreeSet<&str> = spec.blocks.iter().map(|held| held.cidr.as_str()).collect();
        let ends = |entry: &&Entry| {
            entry.is_held()
                && entry.is_released(report)
                && !listed.contains(entry.cidr.to_string().as_str())
        };
        let cidrs: Vec<Cidr> = self
            .blocks
            .of(&node.uid)
            .filter(ends)
            .map(|e| e.cidr)
            .collect();
        for cidr in &cidrs {
            if let Some(entry) = self.blocks.get_mut(cidr) {
                entry.step = Step::Delete;
            }
        }
        cidrs
    }

    /// The blocks that a NodeSubnet should list for a node's UID: confirmed, and not let go by its
    /// agent.
    pub fn listed_blocks(&self, uid: &str, report: Option<&AgentReport>) -> Vec<HeldBlock> {
        let stays = |entry: &&Entry| entry.is_held() && !entry.is_released(report);
        self.blocks
            .of(uid)
            .filter(stays)
            .filter_map(|entry| {
                Some(HeldBlock {
                    cidr: entry.cidr.to_string(),
                    uid: entry.uid.as_ref()?.to_string(),
                    pool: entry.pool.to_string(),
                    recall: entry.recall,
                    reserved: self.reserved_in(&entry.cidr, &entry.pool),
                })
            })
            .collect()
    }

    /// What of a block is never given out, by its pool.
    fn reserved_in(&self, cidr: &Cidr, pool: &str) -> Vec<String> {
        let spans = self.pools.get(pool).into_iter().flat_map(|it| &it.reserved);
        let mut texts: Vec<String> = spans
            .filter_map(|span| span.within(cidr))
            .map(|span| span.to_string())
            .collect();
        texts.sort();
        texts.dedup();
        texts
    }

    /// How many addresses of a block of that pool can be given out at all.
    pub fn usable(&self, cidr: &Cidr, pool: &str) -> u64 {
        let pool = self.pools.get(pool);
        let mut reserved: Vec<(u128, u128)> = pool
            .into_iter()
            .flat_map(|pool| &pool.reserved)
            .filter_map(|span| span.within(cidr))
            .map(|span| (span.first().value, span.last().value))
            .collect();
        reserved.sort_unstable();
        let mut next = cidr.first().value;
        let mut taken = 0u128;
        for (first, last) in reserved {
            let first = first.max(next);
            if last >= first {
                taken = taken.saturating_add(last - first).saturating_add(1);
                next = last.saturating_add(1);
            }
        }
        u64::try_from(cidr.size().saturating_sub(taken)).unwrap_or(u64::MAX)
    }

    pub(super) fn quarantine_of_block(&self, pool: &str) -> Duration {
        self.pools
            .get(pool)
            .map_or(DEFAULT_QUARANTINE, |pool| pool.quarantine)
    }
}

/// The spec of an object that can be used: one whose name is not that of its CIDR locks nothing.
pub(super) fn sound(block: &Block) -> Option<&BlockSpec> {
    let spec = block.spec.as_ref().ok()?;
    (*block.name == *block_name(&spec.cidr)).then_some(spec)
}

/// The machine of a node that is gone, as its NodeSubnet remembers it.
fn machine_in(world: &World, name: &Text, uid: &Text) -> Machine {
    let spec = world.subnets.get(name).and_then(|it| it.spec.as_ref().ok());
    let spec = spec.filter(|spec| spec.node_uid.as_deref() == Some(&**uid));
    spec.map(|spec| machine(spec.provider_id.as_deref(), spec.machine_id.as_deref()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
