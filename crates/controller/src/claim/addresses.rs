//! Chooses the addresses of a claim: free addresses of its pool, or those that the claim asks for.

use std::collections::BTreeSet;

use super::{ClaimLoop, ClaimProblem, EXHAUSTED, IN_USE, joined};
use crate::Context;
use crate::allocations::blocks::BlockEntry;
use crate::cluster::names::PoolName;
use crate::cluster::objects::{Claim, ClaimSpec};
use crate::pools::{PoolPhase, PoolState};
use crate::withdrawals::is_taken_out;
use cadastre_api::{AllocationMode, ExplicitAddresses, node_allocation};
use cadastre_core::{Addr, Cidr, Dual, HoldingId, HoldingState};

/// Addresses for a claim. The ledger has a holding for each of them.
pub(super) struct ChosenAddresses {
    pub pool: PoolName,
    pub addresses: Vec<(Cidr, HoldingId)>,
}

impl ClaimLoop {
    /// Chooses addresses for a claim, or returns why it gets none now.
    pub(super) fn choose(
        &mut self,
        claim: &Claim,
        cx: &mut Context,
    ) -> Result<ChosenAddresses, ClaimProblem> {
        let spec = match &claim.spec {
            Ok(spec) => spec,
            Err(why) => {
                let text = format!("{why}: delete the claim, and create another");
                return Err(ClaimProblem::new("Invalid", text));
            }
        };
        let is_anothers = |addr: Addr| {
            let of = cx.allocations.claims.of(&Cidr::host(addr));
            of.is_some_and(|name| *name != claim.name)
        };
        // A claim that no node has ever had got another claim's addresses by a late write of an earlier leader, or it
        // has them since a restore. Such a claim gets other addresses.
        if !claim.is_unused() && claim.addresses().any(is_anothers) {
            let text = format!(
                "the status has {}, which another claim has, too: delete one of the two claims",
                joined(claim.addresses())
            );
            return Err(ClaimProblem::new(IN_USE, text));
        }
        let pool = pool_of(spec, cx)?;
        let name = pool.name.clone();
        if let Some(full) = self.full.get(&name).filter(|_| spec.addresses.is_empty()) {
            return Err(full.clone());
        }
        let addresses = if spec.addresses.is_empty() {
            let any = any_of(&name, cx);
            any.inspect_err(|problem| _ = self.full.insert(name.clone(), problem.clone()))?
        } else {
            if pool.node_view.terms.explicit_addresses == ExplicitAddresses::Deny {
                return Err(denied(&name));
            }
            requested(&spec.addresses, &name, cx)?
        };
        Ok(ChosenAddresses {
            pool: name,
            addresses,
        })
    }
}

/// Returns the pool of a claim, or the reason why no pool can serve the claim.
fn pool_of<'a>(spec: &ClaimSpec, cx: &'a Context) -> Result<&'a PoolState, ClaimProblem> {
    let pools = &cx.allocations.pools;
    let names: BTreeSet<PoolName> = if let Some(name) = &spec.pool {
        [name.clone()].into()
    } else {
        let hosts = spec.addresses.iter().map(|addr| Cidr::host(*addr));
        let pools = hosts.filter_map(|host| pools.of(&host));
        pools.map(|pool| pool.name.clone()).collect()
    };
    let mut names = names.into_iter();
    let (Some(name), None) = (names.next(), names.next()) else {
        let text = "the addresses are not of one pool: kubectl get ippools.cadastre.dev lists the ranges of each";
        return Err(ClaimProblem::new("PoolNotFound", text.to_owned()));
    };
    let Some(pool) = pools.get(&name) else {
        let text = format!("there is no pool \"{name}\": create it, or create a claim of another");
        return Err(ClaimProblem::new("PoolNotFound", text));
    };
    if pool.allocation_mode != AllocationMode::Blocks {
        let text = format!(
            "pool \"{name}\" has allocationMode NodeCIDR, so its addresses stay with nodes: claim an address of a pool with allocationMode Blocks"
        );
        return Err(ClaimProblem::new("PoolNotSuitable", text));
    }
    if pool.terms.namespaces.specificity() > 0 {
        let text = format!(
            "pool \"{name}\" is only for some namespaces, by its namespaceSelector, and serves no claims: claim an address of another pool"
        );
        return Err(ClaimProblem::new("PoolNotSuitable", text));
    }
    if !pool.is_serving() {
        let text = match &pool.phase {
            PoolPhase::Terminating => format!("pool \"{name}\" is being deleted"),
            phase => format!("pool \"{name}\" allocates nothing now: {phase}"),
        };
        return Err(ClaimProblem::new("PoolNotReady", text));
    }
    Ok(pool)
}

/// Allocates a free address of each family of the pool.
fn any_of(name: &PoolName, cx: &mut Context) -> Result<Vec<(Cidr, HoldingId)>, ClaimProblem> {
    let holder = cx.allocations.holders.of_claims();
    let Some(pool) = cx.allocations.pools.get(name) else {
        return Ok(Vec::new());
    };
    let mut space = pool.space.refitted(Dual::from_fn(|family| {
        let len = pool.space.block_len(family);
        len.map(|_| family.bits())
    }));
    let unadopted = &cx.allocations.unadopted;
    let avoid = |range: &Cidr| {
        let addr = range.first();
        let is_excluded = why_not(addr, pool).is_some();
        let of_pod = || cx.cache.pods.any_in_free(range);
        is_excluded
            .then_some(addr)
            .or_else(of_pod)
            .or_else(|| unadopted.any_in(range))
    };
    let carved = cx.allocations.ledger.carve(&mut space, holder, avoid);
    // The text has no numbers. Numbers would change with every allocation, and each change would cause a write of every
    // waiting claim's status.
    let carved = carved.map_err(|full| {
        let text = format!(
            "pool \"{name}\" has no free {} address outside the blocks of nodes: add ranges to the pool",
            full.family
        );
        ClaimProblem::new(EXHAUSTED, text)
    })?;
    let ids = carved.iter().filter_map(|(_, id)| *id);
    let ids: Vec<HoldingId> = ids.collect();
    let held = ids.into_iter().filter_map(|id| {
        cx.allocations.ledger.set_state(id, HoldingState::Allocated);
        Some((cx.allocations.ledger.get(id)?.cidr, id))
    });
    Ok(held.collect())
}

fn denied(pool: &PoolName) -> ClaimProblem {
    let text = format!(
        "pool \"{pool}\" says explicitAddresses: Deny, so nobody can ask for certain addresses of it: name only the pool in a claim, or ask whoever may change the pool"
    );
    ClaimProblem::new("ExplicitAddressesDenied", text)
}

/// Allocates exactly these addresses of the pool.
fn requested(
    addresses: &[Addr],
    name: &PoolName,
    cx: &mut Context,
) -> Result<Vec<(Cidr, HoldingId)>, ClaimProblem> {
    for addr in addresses {
        let host = Cidr::host(*addr);
        let pool = cx.allocations.pools.get(name);
        let Some(pool) = pool.filter(|pool| pool.space.covers(&host)) else {
            let text = format!("{addr} is in no range of pool \"{name}\"");
            return Err(ClaimProblem::new("OutsidePool", text));
        };
        if let Some(why) = why_not(*addr, pool) {
            let text = format!("{addr} {why}, so nobody gets it: claim another address");
            return Err(ClaimProblem::new("AddressReserved", text));
        }
        if let Some(claim) = cx.allocations.claims.of(&host) {
            let text = format!("{addr} is the address of claim {claim}");
            return Err(ClaimProblem::new(IN_USE, text));
        }
        // If an address lies in a node's block and no pod uses the address, the controller asks the node to hand the
        // address over.
        let can_withdraw = |entry: &BlockEntry| entry.pool == *name;
        let around = cx
            .allocations
            .block_around(&host)
            .filter(|it| can_withdraw(it));
        if let Some(entry) = around.filter(|it| is_taken_out(&it.owner.name, &host, cx)) {
            let text = format!(
                "{addr} was taken out of node {} for something that is no pod: put it back (kubectl cadastre push), or claim another address",
                entry.owner.name
            );
            return Err(ClaimProblem::new("AddressReserved", text));
        }
        // If a node has this single address as a block, it can assign the address to other pods.
        let single = cx.allocations.blocks.get(&host).map(|it| it.cidr);
        let conflict = cx.allocations.conflict_with_claim(&host);
        if let Some(range) = single.or_else(|| conflict.filter(|_| around.is_none())) {
            let entry = cx.allocations.blocks.get(&range);
            let whose = entry.map_or(String::new(), |entry| {
                let quarantined = entry.owner.quarantined;
                let what = if quarantined { "deleted node" } else { "node" };
                format!(" of {what} {}", entry.owner.name)
            });
            let text = format!(
                "{addr} is in block {range}{whose}: the claim gets it when the block is free again"
            );
            return Err(ClaimProblem::new(IN_USE, text));
        }
        let of_pod = cx.cache.pods.any_in_free(&host);
        if of_pod.is_some() || cx.allocations.unadopted.any_in(&host).is_some() {
            let whose = around.map_or("although no node has it".to_owned(), |entry| {
                format!("in block {} of node {}", entry.cidr, entry.owner.name)
            });
            let text = format!("{addr} is in use, {whose}: kubectl cadastre show ip {addr}");
            return Err(ClaimProblem::new(IN_USE, text));
        }
    }
    let holder = cx.allocations.holders.of_claims();
    let mut hosts: Vec<Cidr> = addresses.iter().map(|addr| Cidr::host(*addr)).collect();
    hosts.sort_unstable();
    let held = hosts.into_iter().map(|host| {
        let ledger = &mut cx.allocations.ledger;
        (host, ledger.record(holder, host, HoldingState::Allocated))
    });
    Ok(held.collect())
}

/// Returns the reason why `addr` of `pool` must not be assigned, or `None` if it can be assigned.
fn why_not(addr: Addr, pool: &PoolState) -> Option<&'static str> {
    let is_in = |spans: &[cadastre_core::IpRange]| {
        spans
            .iter()
            .any(|span| span.within(&Cidr::host(addr)).is_some())
    };
    if is_in(&pool.reserved) {
        return Some("is reserved in the pool, an address of a node, or in a service range");
    }
    let is_excluded = !node_allocation::may_be_claimed(addr, &pool.node_view);
    is_excluded.then_some("is a gateway, network or broadcast address")
}
