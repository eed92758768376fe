//! Checks at the end of a run, when the faults are over, objects no longer change, and some minutes have passed.
//!
//! Every node has podCIDRs if a pool that selects it has free ones. Every NodeSubnet contains exactly the ranges of its
//! node, and no record of a deleted node. The numbers in every pool's status equal a brute-force count. Nothing is
//! written any more.

use std::collections::BTreeSet;

use cadastre_api::{AddressStatus, AllocationMode};
use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::names::{NodeName, PoolName};
use cadastre_controller::cluster::objects::{BlockSpec, Node, Pool, Text};
use cadastre_core::{Addr, Cidr, Family, IpRange};

use super::checks::{Verdict, wrong};
use super::clock::{SECOND, Time};
use super::describe::ranges;
use super::host::Host;
use super::migrations::key_of_owner;
use super::pool_model::{PoolModel, counted, is_counted};
use super::process::Run;
use super::record_checks::records;
use super::run::Sim;

/// Nothing may be written or requested in this time before the end of a run.
pub const QUIET: u64 = 60 * SECOND;

impl Sim {
    pub fn check_end(&mut self) -> Verdict {
        let runs = self.processes.iter().filter_map(|it| it.run.as_ref());
        let leads = |run: &&Run| matches!(run.elector.leadership(), Leadership::Leading(_));
        if runs.filter(leads).count() != 1 {
            return wrong("progress", "not one process leads".to_owned(), None::<&str>);
        }
        for id in 0..self.machines.hosts.len() {
            self.mirror(id)?;
        }
        self.check_subnets()?;
        self.check_status_intervals()?;
        self.check_pools()?;
        self.check_served()?;
        self.check_blocks()?;
        self.check_marks()?;
        self.check_routes_end()?;
        self.check_announced_end()?;
        self.check_claims_end()?;
        self.check_ipam_claims_end()?;
        for id in 0..self.machines.hosts.len() {
            self.check_host_end(id)?;
            self.check_withdrawals_settled(id)?;
        }
        // A conflict ends ten minutes after it began, so a conflict can end shortly before the end of the run and cause
        // writes.
        let conflicts = self.machines.conflicts_changed;
        if conflicts > 0 && conflicts + 2 * QUIET > self.now {
            return Ok(());
        }
        let (at, what) = &self.checks.last_write;
        if *at + QUIET > self.now {
            let text = format!(
                "{what} was written {} s before the end",
                (self.now - at) / SECOND
            );
            let name = what.rsplit(' ').next().map(Text::from);
            return wrong("quiet", text, name);
        }
        let at = *at;
        // In a large cluster agents are asked to write rarely, so the last reports may follow long after the last change.
        let subnets = self.api.subnets.live.values();
        let intervals =
            subnets.filter_map(|it| Some(it.spec.as_ref().ok()?.status_interval_seconds));
        let pause = Time::from(intervals.max().unwrap_or(0)) * SECOND;
        // A pod that waits for an address is tried again and again, and meanwhile its node's demand rises and falls.
        let pods_wait = self.machines.hosts.iter().any(Host::has_waiting_pods);
        let is_late = self.machines.last_write > at + 2 * pause && !pods_wait;
        let (asked_at, what) = &self.checks.last_request;
        let at_last = (self.machines.last_write + QUIET > self.now && is_late)
            .then_some("an agent's status")
            .or((*asked_at + QUIET > self.now).then_some(what));
        if let Some(what) = at_last {
            let text = format!("{what} still goes out shortly before the end");
            return wrong("quiet", text, None::<&str>);
        }
        Ok(())
    }

    fn check_subnets(&self) -> Verdict {
        let nodes = self.api.nodes.live.values();
        for node in nodes.filter(|node| !node.pod_cidrs.is_empty()) {
            let subnet = self.api.subnets.get(&node.name);
            let spec = subnet.and_then(|subnet| subnet.spec.as_ref().ok());
            let own = spec.iter().flat_map(|spec| records(spec));
            let own = own.filter(|it| *it.uid == *node.uid && it.until.is_none());
            let listed: BTreeSet<Cidr> = own.map(|it| it.range).filter(is_counted).collect();
            if listed != counted(node).copied().collect() {
                let podcidrs = ranges(&node.pod_cidrs);
                let text = format!("{} has {podcidrs}, its NodeSubnet {spec:?}", node.name);
                return wrong("subnets", text, [node.name.clone()]);
            }
        }
        for subnet in self.api.subnets.live.values() {
            let lives = self.api.nodes.get(&subnet.name).is_some();
            let spec = subnet.spec.as_ref();
            if !lives || spec.is_ok_and(|spec| !spec.quarantined.is_empty()) {
                let text = format!(
                    "{} is never deleted or cleaned up: {:?}",
                    subnet.name, subnet.spec
                );
                return wrong("cleanup", text, [subnet.name.clone()]);
            }
        }
        Ok(())
    }

    /// Checks the agents' intervals: all agents together keep the limit, and no agent writes much less often than that.
    fn check_status_intervals(&self) -> Verdict {
        let most = u64::from(self.plan.agent_writes_per_minute());
        let nodes = self.api.nodes.live.len() as u64;
        for subnet in self.api.subnets.live.values() {
            let Ok(spec) = &subnet.spec else { continue };
            let seconds = u64::from(spec.status_interval_seconds);
            let is_slowed = seconds > 0;
            let is_slow_enough = (seconds.max(30) + 1) * most >= nodes * 60;
            let is_too_slow = is_slowed && seconds * most > 3 * nodes * 60;
            if !spec.pools.is_empty() && (!is_slow_enough || is_too_slow) {
                let text = format!(
                    "the agent of {} writes once in {seconds} s, with {nodes} nodes and {most} writes a minute",
                    subnet.name
                );
                return wrong("intervals", text, [subnet.name.clone()]);
            }
        }
        Ok(())
    }

    fn check_pools(&self) -> Verdict {
        for pool in self.api.pools.live.values() {
            let Some(model) = PoolModel::new(pool) else {
                continue;
            };
            // If an older pool with a finalizer contains a range, the older pool is kept because of the range. In that
            // case, this pool need not be kept.
            let ages = self.by_age();
            let kept_elsewhere = |range: &Cidr| {
                let keeper = ages.iter().find(|s| s.has_finalizer && s.contains(range));
                keeper.is_some_and(|keeper| keeper.name != model.name)
            };
            let held = self.held();
            let mut held = held.iter().filter(|range| model.overlaps(range));
            // The pool must stay while a block that was allocated from it exists, even if the pool's ranges no longer
            // contain the block.
            let blocks = self.api.blocks.live.values();
            let mut blocks = blocks.filter_map(|block| block.spec.as_ref().ok());
            let carved = blocks.clone().any(|spec| *spec.pool == *pool.name);
            if pool.deleting && !carved && held.all(kept_elsewhere) {
                let text = format!("pool {} never loses its finalizer", pool.name);
                return wrong("cleanup", text, [pool.name.clone()]);
            }
            let pure = !blocks.any(|spec| model.overlaps(&spec.cidr));
            if model.allocation_mode == AllocationMode::NodeCIDR && pure {
                self.check_status(pool, &model)?;
            } else {
                self.check_counts(pool, &model)?;
            }
        }
        Ok(())
    }

    /// Checks those numbers in the status that can be counted even if the pool's range contains blocks: ranges and
    /// addresses.
    fn check_counts(&self, pool: &Pool, model: &PoolModel) -> Verdict {
        // The addresses of claims do not count as blocks of nodes.
        let claimed = self.claimed();
        let blocks = self.api.blocks.live.values();
        let blocks = blocks.filter_map(|it| it.spec.as_ref().ok());
        let blocks = blocks.filter(|it| !claimed.contains(&it.cidr));
        let blocks: Vec<_> = blocks.filter(|it| self.parent_of(it).is_none()).collect();
        let nodes = self.api.nodes.live.values();
        let podcidrs: Vec<Cidr> = nodes.flat_map(|it| counted(it)).copied().collect();
        let status = pool.status.as_ref();
        for (family, cidrs, _) in &model.families {
            let reported = status.and_then(|status| match family {
                Family::V4 => status.ipv4.as_ref(),
                Family::V6 => status.ipv6.as_ref(),
            });
            let within = |range: &Cidr| cidrs.iter().filter(|cidr| cidr.overlaps(range)).count();
            let blocks_held = |quarantined: bool| -> usize {
                let blocks = blocks
                    .iter()
                    .filter(|it| it.owner.quarantined == quarantined);
                blocks.map(|it| within(&it.cidr)).sum()
            };
            let held: usize = podcidrs.iter().map(within).sum::<usize>() + blocks_held(false);
            let count = (held.to_string(), blocks_held(true).to_string());
            let is = reported.map(|it| (it.allocated.clone(), it.quarantined.clone()));
            if is.as_ref() != Some(&count) {
                let text = format!(
                    "pool {}: {family} held and quarantined are {count:?}, status {is:?}",
                    pool.name
                );
                return wrong("status", text, [pool.name.clone()]);
            }
            let addresses = (model.allocation_mode == AllocationMode::Blocks)
                .then(|| self.count_addresses(model, *family));
            let is = reported.and_then(|it| it.addresses.clone());
            if is != addresses {
                let text = format!(
                    "pool {}: {family} addresses are {addresses:?}, status {is:?}",
                    pool.name
                );
                return wrong("status", text, [pool.name.clone()]);
            }
        }
        Ok(())
    }

    fn check_status(&self, pool: &Pool, model: &PoolModel) -> Verdict {
        let fail = |text: String| wrong("status", text, [pool.name.clone()]);
        let Some(status) = &pool.status else {
            return fail(format!("pool {} has no status", pool.name));
        };
        let (held, claimed) = (self.held(), self.claimed());
        let of_nodes: Vec<Cidr> = held
            .iter()
            .filter(|it| !claimed.contains(it))
            .copied()
            .collect();
        let is_held = |range: &&Cidr| held.iter().any(|it| it.overlaps(range));
        for (family, cidrs, _) in &model.families {
            let reported = match family {
                Family::V4 => &status.ipv4,
                Family::V6 => &status.ipv6,
            };
            let mut open = model.blocks(*family);
            open.retain(|block| !self.is_blocked(model, block));
            let taken = open.iter().filter(is_held).count();
            // The addresses of claims do not count as allocated to nodes.
            let within = |cidr: &Cidr| of_nodes.iter().filter(|it| it.overlaps(cidr)).count();
            let allocated: usize = cidrs.iter().map(within).sum();
            let counts = [open.len(), allocated, 0, open.len() - taken];
            let counts = counts.map(|count| count.to_string());
            let is = reported.as_ref();
            let is = is.map(|it| [&it.capacity, &it.allocated, &it.quarantined, &it.free]);
            if is != Some(counts.each_ref()) {
                return fail(format!(
                    "pool {}: {family} capacity, held, quarantined, free are {counts:?}, status {reported:?}",
                    pool.name
                ));
            }
        }
        let nodes = i64::try_from(self.holders(model).len()).ok();
        let waiting = i64::try_from(self.waiting(model)).ok();
        if (status.nodes, status.waiting) != (nodes, waiting) {
            return fail(format!(
                "pool {}: {nodes:?} nodes, {waiting:?} waiting; status {:?}, {:?}",
                pool.name, status.nodes, status.waiting
            ));
        }
        if status.observed_generation != Some(pool.generation) {
            return fail(format!("pool {}: an old generation observed", pool.name));
        }
        Ok(())
    }

    fn check_served(&self) -> Verdict {
        let (serving, held) = (self.serving(), self.held());
        let nodes = self.api.nodes.live.values();
        for node in nodes.filter(|node| node.is_empty() && !node.deleting) {
            let has_free = |model: &PoolModel, family: Family| {
                let mut pieces = model.pieces(family, node).into_iter();
                pieces.any(|piece| self.is_free(model, &piece, &held))
            };
            let is_able = |model: &&PoolModel| {
                self.may_allocate(model, node, &serving)
                    && model.each_family().all(|family| has_free(model, family))
            };
            if let Some(model) = serving.iter().find(is_able) {
                let text = format!(
                    "{} ({}) waits, and pool {} could serve it",
                    node.name, node.uid, model.name
                );
                return wrong("served", text, [&*node.name, &*model.name]);
            }
        }
        Ok(())
    }

    /// Whether the node may get podCIDRs of this pool, which is one of those in `serving`.
    pub fn may_allocate(&self, model: &PoolModel, node: &Node, serving: &[PoolModel]) -> bool {
        let is_chosen = match self.assigning(node) {
            Some(pool) => pool == model.name,
            None => !model.is_passed_over(serving, &node.labels),
        };
        model.allocation_mode == AllocationMode::NodeCIDR
            && model.matches(&node.labels)
            && is_chosen
    }

    /// The pool that assigns ranges to the node. Then the node gets podCIDRs from this pool only. If several pools
    /// assign ranges to the node, this is the best of them, even if it does not allocate now.
    fn assigning(&self, node: &Node) -> Option<PoolName> {
        let models = self.models_now().into_iter();
        let models = models.filter(|it| {
            let is_able = it.allocation_mode == AllocationMode::NodeCIDR && !it.deleting;
            is_able && it.matches(&node.labels) && it.assigned(&node.name).is_some()
        });
        let key = |it: &PoolModel| {
            (
                -it.priority,
                usize::MAX - it.selector.len(),
                it.name.clone(),
            )
        };
        models.min_by_key(key).map(|it| it.name)
    }

    /// The pools that may allocate. Of two pools that overlap, only the older one may.
    pub fn serving(&self) -> Vec<PoolModel> {
        let models = self.by_age();
        let is_able = |(at, model): &(usize, &PoolModel)| {
            let mut older = models[..*at].iter().flat_map(PoolModel::cidrs);
            let is_serving = !model.disabled && !model.deleting && model.has_finalizer;
            is_serving && !older.any(|cidr| model.overlaps(cidr))
        };
        let able = models.iter().enumerate().filter(is_able);
        able.map(|(_, model)| model.clone()).collect()
    }

    fn by_age(&self) -> Vec<PoolModel> {
        let mut models = self.models_now();
        models.sort_by(|a, b| a.age().cmp(&b.age()));
        models
    }

    /// Returns all podCIDRs, all blocks, and the addresses of all claims.
    pub fn held(&self) -> Vec<Cidr> {
        let nodes = self.api.nodes.live.values();
        let podcidrs = nodes.flat_map(|node| counted(node)).copied();
        let all = podcidrs.chain(self.blocks_now());
        all.chain(self.claimed()).collect()
    }

    /// Returns the addresses of all claims, each as a range.
    fn claimed(&self) -> BTreeSet<Cidr> {
        let claims = self.api.claims.live.values();
        let addresses = claims.flat_map(|claim| claim.addresses());
        addresses.map(Cidr::host).collect()
    }

    /// The block of which a borrowed block is a part, if it still exists.
    pub fn parent_of(&self, spec: &BlockSpec) -> Option<&BlockSpec> {
        let parent = spec.parent.as_ref()?;
        let blocks = self.api.blocks.live.values();
        let mut blocks = blocks.filter_map(|it| it.spec.as_ref().ok());
        blocks.find(|it| it.cidr == parent.cidr && it.cidr != spec.cidr)
    }

    fn blocks_now(&self) -> impl Iterator<Item = Cidr> {
        let blocks = self.api.blocks.live.values();
        blocks.filter_map(|block| Some(block.spec.as_ref().ok()?.cidr))
    }

    /// Counts the addresses of a pool's blocks one by one, without quarantined blocks. The counts are of addresses that
    /// can be assigned, addresses in use, and addresses in cooldown. They come from the agent's store. If there is no
    /// store, they come from the agent's last status. If there is no status either, they come from the pods.
    fn count_addresses(&self, model: &PoolModel, family: Family) -> AddressStatus {
        let services = self.services_now();
        let services = services.into_iter().filter(|it| model.overlaps(it));
        let reserved = model.reserved.iter().copied();
        let left_out: Vec<IpRange> = reserved.chain(services.map(IpRange::from)).collect();
        let is_left_out = |addr: Addr| {
            let host = Cidr::host(addr);
            let is_node = model.cidrs().any(|it| it.contains_addr(addr)) && self.node_in(&host);
            is_node || left_out.iter().any(|span| span.overlaps(&host))
        };
        let (mut held, mut used, mut cooling) = (0, 0, 0);
        for block in self.api.blocks.live.values() {
            let Ok(spec) = &block.spec else { continue };
            if spec.pool != model.name || spec.owner.quarantined || spec.cidr.family() != family {
                continue;
            }
            let all = addresses(&spec.cidr);
            // The addresses of a borrowed block are counted with the lender's block.
            if self.parent_of(spec).is_none_or(|it| it.owner.quarantined) {
                held += all.iter().filter(|addr| !is_left_out(**addr)).count() as u64;
            }
            let of_agent = self.store_of(&key_of_owner(spec, &block.uid), &spec.owner.uid);
            let (in_use, cools) = of_agent.unwrap_or_else(|| {
                let pods = self.api.pods.live.values();
                let reported: BTreeSet<Addr> = pods.flat_map(|it| it.addresses.to_vec()).collect();
                let in_use = all.iter().filter(|it| reported.contains(it));
                (in_use.count() as u64, 0)
            });
            used += in_use;
            cooling += cools;
        }
        AddressStatus {
            allocated: held.to_string(),
            used: used.to_string(),
            cooling: cooling.to_string(),
        }
    }

    fn services_now(&self) -> Vec<Cidr> {
        let services = self.api.services.live.values();
        services.flat_map(|s| s.cidrs.clone()).collect()
    }

    fn node_in(&self, block: &Cidr) -> bool {
        let nodes = &mut self.api.nodes.live.values();
        nodes.any(|node| node.addresses.iter().any(|addr| block.contains_addr(*addr)))
    }

    /// Nodes with a range that counts for this pool. If several pools contain a range, the range counts for the oldest
    /// of these pools.
    fn holders(&self, model: &PoolModel) -> BTreeSet<NodeName> {
        let ages = self.by_age();
        let counts = |range: &Cidr| {
            let oldest = ages.iter().find(|s| s.contains(range));
            model.overlaps(range) && oldest.is_none_or(|s| s.name == model.name)
        };
        let nodes = self.api.nodes.live.values();
        let holders = nodes.filter(|node| counted(node).any(counts));
        holders.map(|node| node.name.clone()).collect()
    }

    /// The number of nodes that wait for the pool. The pool selects them, and no other pool allocates to them instead.
    fn waiting(&self, model: &PoolModel) -> usize {
        let serving = self.serving();
        let serves = serving.iter().any(|s| s.name == model.name);
        let serves_instead = |s: &PoolModel, n: &Node| {
            s.allocation_mode == AllocationMode::NodeCIDR && s.matches(&n.labels)
        };
        let waits_for = |node: &Node| match self.assigning(node) {
            Some(pool) => pool == model.name,
            None => {
                !model.is_passed_over(&serving, &node.labels)
                    && (serves || !serving.iter().any(|s| serves_instead(s, node)))
            }
        };
        let waits = |node: &&std::sync::Arc<Node>| {
            let is_empty = node.is_empty() && !node.deleting;
            is_empty && model.matches(&node.labels) && waits_for(node)
        };
        self.api.nodes.live.values().filter(waits).count()
    }

    /// Whether the range overlaps a reserved range or a service range, or contains the own address of a node.
    fn is_blocked(&self, model: &PoolModel, range: &Cidr) -> bool {
        let mut services = self.api.services.live.values();
        model.reserved.iter().any(|span| span.overlaps(range))
            || services.any(|it| it.cidrs.iter().any(|cidr| cidr.overlaps(range)))
            || self.node_in(range)
    }

    /// Whether the pool could allocate the range if only the ranges in `held` were allocated.
    pub fn is_free(&self, model: &PoolModel, range: &Cidr, held: &[Cidr]) -> bool {
        !held.iter().any(|it| it.overlaps(range))
            && !self.is_blocked(model, range)
            && !self.pod_in(range)
    }

    pub fn pod_in(&self, range: &Cidr) -> bool {
        let mut addresses = self
            .api
            .pods
            .live
            .values()
            .flat_map(|it| it.addresses.iter());
        addresses.any(|addr| range.contains_addr(*addr))
    }
}

fn addresses(cidr: &Cidr) -> Vec<Addr> {
    let family = cidr.family();
    let all = cidr.first().value..=cidr.last().value;
    all.map(|value| Addr { family, value }).collect()
}
