//! Withdrawals: a node assigns no address that it has handed back, until the controller returns the address.
//!
//! A range is handed back once one version of the NodeSubnet lists it both in `withdraw` (the controller wants it back)
//! and in `withdrawn` (the agent has withdrawn it). From then on the controller may allocate the range elsewhere. The
//! node may use the range again once a NodeSubnet returns it. So the node assigns no address of a part that it has
//! lent.
//!
//! # Left out
//! - If a user deletes a NodeSubnet, the requests in its annotations are deleted, too.
//! - After a restore of the API server, a NodeSubnet has an old report until its agent has reported again. Nobody gets
//!   a block meanwhile (agent grace), so such a report does not count.
//! - After a restore of the API server, the NodeSubnet may lack a withdrawal that only the store records. So nothing is
//!   checked about a host that loses its store in this time.

use std::collections::{BTreeMap, BTreeSet};

use cadastre_controller::cluster::names::{NodeName, ObjectUid};
use cadastre_controller::cluster::objects::{AgentReport, BlockSpec, Subnet};
use cadastre_core::{Addr, Cidr};

use super::checks::{Verdict, wrong};
use super::run::Sim;

/// For each node name, the UID of the Node, and the ranges that this Node has handed back.
#[derive(Default)]
pub struct Withdrawn {
    of: BTreeMap<NodeName, (ObjectUid, BTreeSet<Cidr>)>,
}

impl Withdrawn {
    /// Forgets the ranges of a node. Nothing is checked about them once its NodeSubnet is deleted, or once its host has
    /// lost its store after a restore.
    pub fn forget(&mut self, name: &NodeName) {
        self.of.remove(name);
    }

    fn contains(&self, name: &NodeName, uid: &ObjectUid, addr: Addr) -> bool {
        let of_node = self.of.get(name).filter(|(of, _)| of == uid);
        of_node.is_some_and(|(_, ranges)| ranges.iter().any(|it| it.contains_addr(addr)))
    }
}

fn cidrs(texts: &[String]) -> BTreeSet<Cidr> {
    let texts = texts.iter();
    texts.map(|it| Cidr::parse_strict(it).unwrap()).collect()
}

/// Returns four parts of a NodeSubnet: the UID of the Node in the spec, the agent's report (if it is about that Node),
/// and the lists `withdraw` and `returned`.
fn lists(
    subnet: &Subnet,
) -> Option<(
    ObjectUid,
    Option<&AgentReport>,
    BTreeSet<Cidr>,
    BTreeSet<Cidr>,
)> {
    let spec = subnet.spec.as_ref().ok()?;
    let uid: ObjectUid = spec.node_uid.as_deref()?.into();
    let report = subnet.report.as_deref();
    let report = report.filter(|report| report.node_uid == uid);
    Some((uid, report, cidrs(&spec.withdraw), cidrs(&spec.returned)))
}

impl Sim {
    /// Handles a written NodeSubnet: records the withdrawals that it contains. Checks that no sandbox uses a range that
    /// the agent has handed back.
    pub fn check_withdrawn(&mut self, before: Option<&Subnet>, after: Option<&Subnet>) -> Verdict {
        let Some(after) = after else {
            if let Some(before) = before {
                self.withdrawn.forget(&before.name);
            }
            return Ok(());
        };
        let Some((uid, report, withdraw, returned)) = lists(after) else {
            return Ok(());
        };
        let of_node = self.withdrawn.of.entry(after.name.clone()).or_default();
        if of_node.0 != uid {
            *of_node = (uid.clone(), BTreeSet::new());
        }
        let back: Vec<Cidr> = of_node.1.intersection(&returned).copied().collect();
        of_node.1.retain(|range| !returned.contains(range));
        let is_old = self
            .machines
            .hosts
            .iter()
            .any(|it| it.name == after.name && it.has_old_report);
        let report = report.filter(|_| !is_old);
        let acked = report.map_or(&[][..], |report| &report.withdrawn);
        let mut new = Vec::new();
        for range in acked.iter().filter(|it| withdraw.contains(it)) {
            if of_node.1.insert(*range) {
                new.push(*range);
            }
        }
        self.checks.tally.withdrawn += new.len() as u64;
        let claimed = |subnet: &Subnet| subnet.spec.as_ref().map_or(0, |it| it.claimed.len());
        let more = claimed(after).saturating_sub(before.map_or(0, claimed));
        self.checks.tally.handed_over += more as u64;
        self.check_returned(after, before, &back)?;
        for (id, host) in self.machines.hosts.iter().enumerate() {
            let is_it = self.machines.live_node(id, &self.api).as_ref() == Some(&uid);
            // A node that registers again gets its blocks back at once. If its pod has the address of a claim, the pod
            // got the address from the one-address block of the claim, and not from the larger block around it.
            let is_of_claim = |range: &Cidr| {
                let block = host.given.get(&range.first()).map(|(block, _)| block);
                block == Some(range)
            };
            for range in new.iter().filter(|it| is_it && !is_of_claim(it)) {
                if let Some(container) = host.sandbox_in(range, &uid) {
                    let name = &host.name;
                    let text = format!("{range} is withdrawn on {name}, and {container} uses it");
                    return wrong("withdrawn", text, [name.clone()]);
                }
            }
        }
        Ok(())
    }

    /// Counts how many parts of blocks are lent. Checks that no part is returned to a node while the object of a block
    /// says that another node, live or deleted, has the part.
    fn check_returned(
        &mut self,
        after: &Subnet,
        before: Option<&Subnet>,
        returned: &[Cidr],
    ) -> Verdict {
        let lent = |subnet: &Subnet| -> BTreeSet<String> {
            let spec = subnet.spec.as_ref().into_iter();
            let lent = spec.flat_map(|spec| &spec.lent);
            lent.map(|it| it.cidr.clone()).collect()
        };
        let was = before.map(lent).unwrap_or_default();
        let is = lent(after);
        self.checks.tally.lent += is.difference(&was).count() as u64;
        for range in returned {
            self.checks.tally.given_back += u64::from(was.contains(&range.to_string()));
            let blocks = self.api.blocks.live.values();
            let mut blocks = blocks.filter_map(|it| Some((&it.uid, it.spec.as_ref().ok()?)));
            // A block does not count if a late write created it and no NodeSubnet ever listed it, because such a block
            // is deleted.
            let is_had = |uid: &ObjectUid, spec: &BlockSpec| {
                let key = super::migrations::key_of_owner(spec, uid);
                let was_listed = self.checks.blocks.was_listed(&key, &spec.owner.uid);
                self.is_listed_now(spec) || spec.owner.quarantined && was_listed
            };
            if let Some((_, spec)) = blocks.find(|(uid, it)| it.cidr == *range && is_had(uid, it)) {
                let name = after.name.clone();
                let text = format!(
                    "{range} is returned to {name}, and {} has it",
                    spec.owner.name
                );
                return wrong("lent", text, [name, spec.owner.name.clone()]);
            }
        }
        Ok(())
    }

    /// Whether the NodeSubnet of the block's owner lists the block.
    fn is_listed_now(&self, block: &BlockSpec) -> bool {
        let subnet = self.api.subnets.get(&block.owner.name);
        let spec = subnet.and_then(|it| it.spec.as_ref().ok());
        let spec = spec.filter(|it| it.node_uid.as_deref() == Some(&*block.owner.uid));
        let text = block.cidr.to_string();
        spec.is_some_and(|spec| spec.blocks.iter().any(|it| it.cidr == text))
    }

    /// Checks that the node had not handed back the address that it assigns from `block`. The address of a one-address
    /// block is allowed, because the node gets such a block for a claim.
    pub fn check_not_withdrawn(&self, id: usize, addr: Addr, block: Cidr) -> Verdict {
        let name = &self.machines.hosts[id].name;
        let uid = self.machines.live_node(id, &self.api);
        let uid = uid.filter(|_| block != Cidr::host(addr));
        if uid.is_some_and(|uid| self.withdrawn.contains(name, &uid, addr)) {
            let text = format!("{addr} is assigned on {name}, which has handed it back");
            return wrong("withdrawn", text, [name.clone()]);
        }
        Ok(())
    }

    /// Checks at the end that the node has withdrawn only ranges that the controller wants back, and all of these that
    /// are not in use.
    pub fn check_withdrawals_settled(&self, id: usize) -> Verdict {
        let name = &self.machines.hosts[id].name;
        let subnet = self.api.subnets.get(name);
        let Some((uid, Some(report), withdraw, _)) = subnet.and_then(|it| lists(it)) else {
            return Ok(());
        };
        // While a host is off, its agent does not learn which ranges are returned.
        if self.machines.hosts[id].is_off || self.machines.live_node(id, &self.api) != Some(uid) {
            return Ok(());
        }
        let withdrawn: BTreeSet<Cidr> = report.withdrawn.iter().copied().collect();
        let in_use = self.withdrawing(name);
        // If the node has lost the block around a range, the range is not returned while a node or a claim has a part
        // of it.
        let held = self.held();
        let is_held = |range: &Cidr| held.iter().any(|it| range.contains(it));
        // In a large cluster agents are asked to write rarely, so the report may be old. Then the agent's store counts.
        let spec = subnet.and_then(|it| it.spec.as_ref().ok());
        let is_slowed = spec.is_some_and(|it| it.status_interval_seconds > 0);
        let has = |range: &Cidr| !is_slowed || self.machines.hosts[id].has_withdrawn(range);
        let mut kept = withdrawn.difference(&withdraw);
        if let Some(range) = kept.find(|range| !is_held(range) && has(range)) {
            let text = format!("nobody wants {range} back, and {name} has withdrawn it");
            return wrong("withdrawals end", text, [name.clone()]);
        }
        let open = withdraw.difference(&withdrawn);
        let mut open = open.filter(|range| !in_use.contains(range));
        if let Some(range) = open.next() {
            let text = format!("{name} neither withdraws {range} nor says that it is in use");
            return wrong("withdrawals end", text, [name.clone()]);
        }
        Ok(())
    }

    /// Returns the ranges that the agent has yet to withdraw, because it reports addresses of them in use.
    fn withdrawing(&self, name: &NodeName) -> BTreeSet<Cidr> {
        let status = self.api.status_of(name);
        status.map_or_else(BTreeSet::new, |status| cidrs(&status.withdrawing))
    }
}
