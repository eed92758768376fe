//! A model of the ledger: a second implementation of its rules. The model has no indexes: it uses lists and searches
//! through all addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cadastre_core::node_allocation::{Gateway, NodeAllocation, PoolTerms, Prefix};
use cadastre_core::{Addr, Cidr, Family, IpRange};
use cadastre_node::{
    Add, Attachment, BlockState, Check, Gc, Now, Op, OpError, OpErrorKind, OpOutcome, PodRef,
};

#[derive(Clone, Debug)]
pub struct Block {
    pub uid: String,
    pub pool: String,
    pub state: BlockState,
    pub reserved: Vec<IpRange>,
    pub on_request: Vec<IpRange>,
}

#[derive(Clone, Debug)]
pub struct Assignment {
    pub addresses: Vec<(Addr, Cidr)>,
    pub pod: Option<PodRef>,
    pub netns: String,
    pub boot: String,
}

#[derive(Clone, Debug)]
pub struct Release {
    pub addr: Addr,
    pub block: Cidr,
    pub boot: String,
    pub ms: u64,
    pub pod: Option<PodRef>,
}

#[derive(Clone, Debug, Default)]
pub struct Model {
    pub node: Option<String>,
    pub pools: Vec<PoolTerms>,
    pub blocks: BTreeMap<Cidr, Block>,
    pub attachments: BTreeMap<Attachment, Assignment>,
    /// Released addresses, in the order of their release
    pub releases: Vec<Release>,
    /// The boot and the time since boot at which the latest DEL of an attachment was requested
    pub deleted: BTreeMap<Attachment, (String, Duration)>,
    /// CIDR and UID of each released block
    pub released_blocks: BTreeSet<(Cidr, String)>,
}

fn ms(now: &Now) -> u64 {
    u64::try_from(now.since_boot.as_millis()).unwrap()
}

fn has(spans: &[IpRange], addr: Addr) -> bool {
    let mut spans = spans.iter();
    spans.any(|span| span.first() <= addr && addr <= span.last())
}

/// Returns all addresses of a block. Of a wide block, returns only the first 100,001 addresses, which is more than a
/// test can use.
pub fn each(cidr: Cidr) -> impl Iterator<Item = Addr> {
    let (first, last) = (cidr.first(), cidr.last());
    let end = last.value.min(first.value + 100_000);
    (first.value..=end).map(move |value| Addr { value, ..first })
}

impl Model {
    fn terms(&self, pool: &str) -> PoolTerms {
        let known = self.pools.iter().find(|it| it.name == pool);
        known.cloned().unwrap_or_else(|| PoolTerms::named(pool))
    }

    /// Returns the attachments in the order of the ledger's table.
    fn attachments(&self) -> Vec<Attachment> {
        let mut all: Vec<Attachment> = self.attachments.keys().cloned().collect();
        all.sort_by(|one, other| order(one).cmp(&order(other)));
        all
    }

    pub fn has(&self, attachment: &Attachment) -> Vec<Addr> {
        let assignment = self.attachments.get(attachment);
        assignment.map_or(Vec::new(), |it| {
            it.addresses.iter().map(|it| it.0).collect()
        })
    }

    pub fn blocks(&self) -> Vec<(Cidr, String)> {
        let blocks = self.blocks.iter();
        blocks.map(|(cidr, it)| (*cidr, it.uid.clone())).collect()
    }

    fn user(&self, addr: Addr) -> Option<&Attachment> {
        let has = |it: &Assignment| it.addresses.iter().any(|(has, _)| *has == addr);
        self.attachments
            .iter()
            .find(|(_, it)| has(it))
            .map(|it| it.0)
    }

    pub fn cools(&self, release: &Release, now: &Now) -> bool {
        let pool = self.blocks.get(&release.block).map_or("", |it| &it.pool);
        let cooldown = u64::from(self.terms(pool).cooldown_seconds) * 1000;
        let since = if release.boot == now.boot {
            release.ms
        } else {
            0
        };
        ms(now) < since + cooldown
    }

    /// Returns whether an address of a block is never assigned, according to the table in the docs of
    /// `cadastre_core::usable`.
    pub fn never(&self, cidr: Cidr, addr: Addr) -> bool {
        let terms = self.terms(&self.blocks[&cidr].pool);
        let family = terms.family(cidr.family());
        let around = family.and_then(|it| it.cidrs.iter().find(|range| range.contains(&cidr)));
        let range = match terms.prefix {
            Prefix::Pool => *around.unwrap_or(&cidr),
            _ => cidr,
        };
        let is_end = |range: Cidr| {
            let v4 = range.family() == Family::V4;
            range.size() > 2 && (addr == range.first() || v4 && addr == range.last())
        };
        let of_pool = terms.prefix == Prefix::Pool && is_end(range);
        of_pool
            || match family.map_or(Gateway::FirstOfBlock, |it| it.gateway) {
                Gateway::None => false,
                Gateway::Address(gateway) => {
                    addr == gateway || terms.prefix != Prefix::Host && is_end(range)
                }
                Gateway::FirstOfBlock => {
                    let second = addr.value == cidr.first().value + 1;
                    is_end(cidr)
                        || cidr.size() > 2 && second
                        || cidr.size() == 2 && addr == cidr.first()
                }
            }
    }

    fn reserved(&self, cidr: Cidr, addr: Addr) -> bool {
        has(&self.blocks[&cidr].reserved, addr)
    }

    /// Returns whether an address of a block can be assigned to an ADD that does not request this address.
    pub fn is_for_all(&self, cidr: Cidr, addr: Addr) -> bool {
        let asked = has(&self.blocks[&cidr].on_request, addr);
        !self.never(cidr, addr) && !self.reserved(cidr, addr) && !asked
    }

    fn next(&self, cidr: Cidr, now: &Now) -> Option<Addr> {
        let known: BTreeSet<Addr> = self.releases.iter().map(|it| it.addr).collect();
        let used: BTreeSet<Addr> = self
            .attachments
            .values()
            .flat_map(|it| it.addresses.iter().map(|it| it.0))
            .collect();
        let may = |addr: Addr| self.is_for_all(cidr, addr);
        let new =
            each(cidr).find(|addr| !known.contains(addr) && !used.contains(addr) && may(*addr));
        new.or_else(|| {
            let mut of_block = self.releases.iter().filter(|it| it.block == cidr);
            let first = of_block.find(|it| may(it.addr))?;
            (!self.cools(first, now)).then_some(first.addr)
        })
    }

    fn active_blocks(&self, pool: &str, family: Family) -> Vec<Cidr> {
        let gives = |cidr: &Cidr, it: &Block| {
            it.pool == pool && it.state == BlockState::Active && cidr.family() == family
        };
        let active_blocks = self.blocks.iter().filter(|(cidr, it)| gives(cidr, it));
        active_blocks.map(|(cidr, _)| *cidr).collect()
    }

    fn families(&self, pool: &str) -> Vec<Family> {
        let terms = self.terms(pool);
        let has_terms = |it: &Family| terms.family(*it).is_some();
        let families: Vec<Family> = Family::ALL.into_iter().filter(has_terms).collect();
        if !families.is_empty() {
            return families;
        }
        self.block_families(pool)
    }

    fn block_families(&self, pool: &str) -> Vec<Family> {
        let has_block = |it: &Family| !self.active_blocks(pool, *it).is_empty();
        Family::ALL.into_iter().filter(has_block).collect()
    }

    /// Returns the pools for an ADD that names no pool, in order of preference.
    fn automatic(&self) -> Vec<String> {
        let automatic = self.pools.iter().filter(|it| it.automatic);
        let mut names: Vec<String> = automatic.map(|it| it.name.clone()).collect();
        let has_terms = |name: &String| self.pools.iter().any(|it| it.name == *name);
        let active = self.blocks.values();
        let active = active.filter(|it| it.state == BlockState::Active);
        let mut others: Vec<String> = active.map(|it| it.pool.clone()).collect();
        others.retain(|name| !has_terms(name));
        others.sort_by_key(|it| (it.len(), it.clone()));
        others.dedup();
        names.extend(others);
        names
    }

    fn of_pool(&self, pool: &str, now: &Now) -> Result<Vec<(Addr, Cidr)>, OpErrorKind> {
        let mut chosen = Vec::new();
        for family in self.families(pool) {
            let blocks = self.active_blocks(pool, family);
            if blocks.is_empty() {
                return Err(OpErrorKind::NoBlock);
            }
            let mut found = blocks.iter().map(|cidr| (self.next(*cidr, now), *cidr));
            match found.find_map(|(addr, cidr)| Some((addr?, cidr))) {
                Some(one) => chosen.push(one),
                None => return Err(OpErrorKind::Exhausted),
            }
        }
        if chosen.is_empty() {
            return Err(OpErrorKind::NoBlock);
        }
        Ok(chosen)
    }

    fn choose(&self, add: &Add, now: &Now) -> Result<Vec<(Addr, Cidr)>, OpErrorKind> {
        if !add.addresses.is_empty() {
            return self.asked(add, now);
        }
        let names = if add.pools.is_empty() {
            self.automatic()
        } else {
            add.pools.clone()
        };
        let mut whys = Vec::new();
        for name in &names {
            let known = self.pools.iter().any(|it| it.name == *name);
            if !known && self.block_families(name).is_empty() {
                whys.push(OpErrorKind::UnknownPool);
                continue;
            }
            match self.of_pool(name, now) {
                Ok(chosen) => return Ok(chosen),
                Err(why) => whys.push(why),
            }
        }
        Err(if whys.contains(&OpErrorKind::Exhausted) {
            OpErrorKind::Exhausted
        } else if !whys.is_empty() && whys.iter().all(|why| *why == OpErrorKind::UnknownPool) {
            OpErrorKind::UnknownPool
        } else {
            OpErrorKind::NoBlock
        })
    }

    fn asked(&self, add: &Add, now: &Now) -> Result<Vec<(Addr, Cidr)>, OpErrorKind> {
        let addresses: BTreeSet<Addr> = add.addresses.iter().copied().collect();
        for family in Family::ALL {
            if addresses.iter().filter(|it| it.family == family).count() > 1 {
                return Err(OpErrorKind::NotUsable);
            }
        }
        let mut chosen = Vec::new();
        for addr in addresses {
            let mut blocks = self.blocks.iter();
            let Some((cidr, _)) = blocks
                .find(|(cidr, it)| it.state == BlockState::Active && cidr.contains_addr(addr))
            else {
                return Err(OpErrorKind::NotInBlocks);
            };
            if self.never(*cidr, addr) || self.reserved(*cidr, addr) {
                return Err(OpErrorKind::NotUsable);
            }
            if self.user(addr).is_some() {
                return Err(OpErrorKind::NotFree);
            }
            if let Some(release) = self.releases.iter().find(|it| it.addr == addr) {
                // The cooldown is that of the pool to which the address belongs now. The pool at the time of the
                // release does not matter.
                let cooldown = self.terms(&self.blocks[cidr].pool).cooldown_seconds;
                let since = if release.boot == now.boot {
                    release.ms
                } else {
                    0
                };
                let cools = ms(now) < since + u64::from(cooldown) * 1000;
                let own = |had: &PodRef, pod: &PodRef| {
                    had.uid == pod.uid || had.namespace == pod.namespace && had.name == pod.name
                };
                let pods = release.pod.as_ref().zip(add.pod.as_ref());
                if cools && !pods.is_some_and(|(had, pod)| own(had, pod)) {
                    return Err(OpErrorKind::NotFree);
                }
            }
            chosen.push((addr, *cidr));
        }
        Ok(chosen)
    }

    /// Performs an operation that was requested at `asked`. Returns the addresses of the answer, or the kind of error.
    pub fn run(&mut self, op: &Op, asked: Duration, now: &Now) -> Result<Vec<Addr>, OpErrorKind> {
        match op {
            Op::Add(add) => {
                let deleted = self.deleted.get(&add.attachment);
                let is_over = deleted.is_some_and(|(boot, at)| *boot == now.boot && *at > asked);
                let is_late = now.since_boot.saturating_sub(asked) >= Duration::from_secs(60);
                if is_over || is_late {
                    return Err(OpErrorKind::Busy);
                }
                self.add(add, now)
            }
            Op::Del(attachment) => {
                let new = (now.boot.clone(), asked);
                let old = self.deleted.get(attachment);
                if old.is_none_or(|old| old.0 != new.0 || old.1 < new.1) {
                    self.deleted.insert(attachment.clone(), new);
                }
                self.del(attachment, now);
                Ok(Vec::new())
            }
            Op::Check(check) => self.check(check),
            Op::Gc(Gc { network, valid }) => {
                for it in self.attachments() {
                    let is_valid = valid.contains(&(it.container_id.clone(), it.ifname.clone()));
                    if it.network == *network && !is_valid {
                        self.del(&it, now);
                    }
                }
                Ok(Vec::new())
            }
            Op::Status => {
                let serves = |pool: &String| {
                    let families = self.families(pool);
                    let all = families
                        .iter()
                        .all(|it| !self.active_blocks(pool, *it).is_empty());
                    !families.is_empty() && all
                };
                // STATUS also considers pools whose addresses are assigned only to pods that ask for them by name.
                let mut pools = self.automatic();
                pools.extend(self.pools.iter().map(|it| it.name.clone()));
                let serves = pools.iter().any(serves);
                serves.then_some(Vec::new()).ok_or(OpErrorKind::NoBlock)
            }
        }
    }

    fn add(&mut self, add: &Add, now: &Now) -> Result<Vec<Addr>, OpErrorKind> {
        let has = self.has(&add.attachment);
        if let Some(assignment) = self.attachments.get_mut(&add.attachment) {
            if add.addresses.iter().any(|it| !has.contains(it)) {
                return Err(OpErrorKind::Mismatch);
            }
            if assignment.boot != now.boot || assignment.netns != add.netns {
                assignment.boot.clone_from(&now.boot);
                assignment.netns.clone_from(&add.netns);
                assignment.pod = add.pod.clone().or(assignment.pod.take());
            }
            return Ok(has);
        }
        let addresses = self.choose(add, now)?;
        for (addr, _) in &addresses {
            assert!(self.user(*addr).is_none(), "the model gave {addr} twice");
            self.releases.retain(|it| it.addr != *addr);
        }
        let assignment = Assignment {
            addresses,
            pod: add.pod.clone(),
            netns: add.netns.clone(),
            boot: now.boot.clone(),
        };
        self.attachments.insert(add.attachment.clone(), assignment);
        Ok(self.has(&add.attachment))
    }

    fn del(&mut self, attachment: &Attachment, now: &Now) {
        let Some(assignment) = self.attachments.remove(attachment) else {
            return;
        };
        for (addr, block) in assignment.addresses {
            self.releases.push(Release {
                addr,
                block,
                boot: now.boot.clone(),
                ms: ms(now),
                pod: assignment.pod.clone(),
            });
        }
    }

    fn check(&self, check: &Check) -> Result<Vec<Addr>, OpErrorKind> {
        let has = self.has(&check.attachment);
        let ours = |it: &&Addr| self.blocks.keys().any(|cidr| cidr.contains_addr(**it));
        let remembered: BTreeSet<&Addr> = check.addresses.iter().filter(ours).collect();
        let all: BTreeSet<&Addr> = check.addresses.iter().collect();
        let fits =
            has.iter().all(|it| all.contains(it)) && remembered.iter().all(|it| has.contains(it));
        (!has.is_empty() && fits)
            .then_some(Vec::new())
            .ok_or(OpErrorKind::Mismatch)
    }

    fn is_empty(&self, cidr: Cidr, now: &Now) -> bool {
        let mut attachments = self.attachments.values();
        let used = attachments.any(|it| it.addresses.iter().any(|(_, block)| *block == cidr));
        let mut releases = self.releases.iter().filter(|it| it.block == cidr);
        !used && !releases.any(|it| self.cools(it, now))
    }

    /// Whether no address of a listed block, or of an unlisted block inside that block, is in use or cooling.
    fn is_free(&self, cidr: Cidr, now: &Now) -> bool {
        let inside = self.blocks.iter().filter(|(it, _)| cidr.contains(it));
        let mut unlisted = inside.filter(|(_, it)| it.state == BlockState::Unlisted);
        self.is_empty(cidr, now) && unlisted.all(|(it, _)| self.is_empty(*it, now))
    }

    pub fn set_allocation(&mut self, allocation: &NodeAllocation, now: &Now) {
        self.node = Some(allocation.node_uid.clone());
        self.pools.clone_from(&allocation.pools);
        let listed: BTreeSet<Cidr> = allocation.blocks.iter().map(|it| it.cidr).collect();
        for it in &allocation.blocks {
            let released_blocks = self.released_blocks.contains(&(it.cidr, it.uid.clone()));
            let is_same = |old: &Block| old.uid == it.uid && old.state == BlockState::Released;
            let stays = self.blocks.get(&it.cidr).is_some_and(is_same);
            let state = match (released_blocks, it.draining) {
                (true, _) if stays || self.is_free(it.cidr, now) => BlockState::Released,
                (true, _) | (_, true) => BlockState::Draining,
                _ => BlockState::Active,
            };
            if state == BlockState::Released {
                self.releases.retain(|release| release.block != it.cidr);
            }
            let block = Block {
                uid: it.uid.clone(),
                pool: it.pool.clone(),
                state,
                reserved: it.reserved.clone(),
                on_request: it.on_request.clone(),
            };
            self.blocks.insert(it.cidr, block);
        }
        let unlisted: Vec<Cidr> = self
            .blocks
            .keys()
            .filter(|it| !listed.contains(it))
            .copied()
            .collect();
        for cidr in unlisted {
            if self.blocks[&cidr].state == BlockState::Released || self.is_empty(cidr, now) {
                self.blocks.remove(&cidr);
                self.releases.retain(|it| it.block != cidr);
            } else {
                self.blocks.get_mut(&cidr).unwrap().state = BlockState::Unlisted;
            }
        }
    }

    pub fn release(&mut self, cidr: Cidr, uid: &str, now: &Now) -> bool {
        let empty = self.is_free(cidr, now);
        let Some(block) = self.blocks.get_mut(&cidr).filter(|it| it.uid == uid) else {
            return false;
        };
        if block.state == BlockState::Released {
            return true;
        }
        if empty {
            block.state = BlockState::Released;
            self.released_blocks.insert((cidr, uid.to_owned()));
            self.releases.retain(|it| it.block != cidr);
        }
        empty
    }
}

/// Returns the key by which the ledger's table is sorted: shorter texts come before longer ones.
pub fn order(it: &Attachment) -> (usize, &str, usize, &str, &str) {
    (
        it.network.len(),
        &it.network,
        it.container_id.len(),
        &it.container_id,
        &it.ifname,
    )
}

/// Converts an answer of the ledger to the form of the model's answers. Also checks that an error has a text.
pub fn outcome(answer: &Result<OpOutcome, OpError>) -> Result<Vec<Addr>, OpErrorKind> {
    match answer {
        Ok(OpOutcome::Assigned(given)) => Ok(given.addrs().collect()),
        Ok(OpOutcome::Done) => Ok(Vec::new()),
        Err(refusal) => {
            let text = &refusal.text;
            assert!(text.len() > 20 && text.ends_with('.'), "{text}");
            Err(refusal.why)
        }
    }
}
