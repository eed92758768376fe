//! Writes to the store the ranges that the node has according to the API.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, info};

use super::cycle::{InFlight, Next, Phase};
use super::{
    AgentEffect, AgentMachine, Observed, PendingOffer, STORE_PAUSE, StoreQuestion, Transaction,
};
use crate::addresses::LIST_INTERVAL;
use crate::choice::serving;
use crate::cri::Sandbox;
use crate::rebuild;
use crate::seen::SubnetSeen;
use cadastre_api::node_allocation;
use cadastre_api::{FirstBlock, NodePool};
use cadastre_core::Family;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{Block, NodeAllocation, is_claim};
use cadastre_node::{BlockCount, BlockState, RememberedAttachment};

/// The ranges that are being written to the store, with the API objects as they were when the write began.
#[derive(Debug)]
pub(super) struct PendingAllocation {
    wanted: NodeAllocation,
    /// The ranges in `wanted` that are new to the store and may contain addresses in use
    new: Vec<Block>,
    subnet: Option<Arc<SubnetSeen>>,
    /// The NodeSubnet to which statuses are written once these ranges are in the store
    pub target: StatusTarget,
}

/// The NodeSubnet to whose status the agent writes.
#[derive(Debug)]
pub(super) enum StatusTarget {
    /// The NodeSubnet to which the agent already writes, if there is one
    Same,
    /// The NodeSubnet in `subnet`. `relisted` is true if a new list has shown it
    This {
        subnet: Arc<SubnetSeen>,
        relisted: bool,
    },
    /// No NodeSubnet, because the Node object has none
    Absent,
}

impl AgentMachine {
    /// Starts to write the ranges that the API shows. Does nothing if they cannot have changed since the last write.
    pub(super) fn write_ranges(&mut self, now: Duration) -> Next {
        if !self.ranges_changed {
            return Next::Go(Phase::Look);
        }
        // After a restart, only the store shows which ranges were written to it, and for which Node. So the machine
        // looks at the store before it writes ranges.
        let Some(snapshot) = self.snapshot.clone() else {
            return self.look(Phase::WriteRanges, now);
        };
        self.ranges_changed = false;
        let Some(wanted) = self.wanted_holding() else {
            let target = self.status_target();
            self.set_target(target, now);
            return Next::Go(Phase::Look);
        };
        // If a podCIDR is new to the store, another program such as host-local may have assigned addresses of it. So
        // the runtime is asked which addresses are in use. Any other new range is treated in the same way if the store
        // was lost while pods used addresses outside of the node's ranges. The reason is that the node may get back a
        // block that it had before.
        let is_stored = |it: &Block| snapshot.blocks.iter().any(|block| block.cidr == it.cidr);
        let may_be_used = |it: &Block| it.uid == wanted.node_uid || snapshot.has_addresses_outside;
        let is_new = |it: &&Block| may_be_used(it) && !is_stored(it);
        let pending = Box::new(PendingAllocation {
            new: wanted.blocks.iter().filter(is_new).cloned().collect(),
            subnet: self.subnet().cloned(),
            target: self.status_target(),
            wanted,
        });
        // The write of the new ranges may wait: for the disk, the runtime, or the list of pods. Another node may have
        // the blocks that this node has lost. So these blocks stop assigning before anything is waited for.
        let is_lost = |it: &BlockCount| {
            let listed = pending
                .wanted
                .blocks
                .iter()
                .find(|block| block.cidr == it.cidr);
            it.state == BlockState::Active && listed.is_none_or(|block| block.draining)
        };
        if snapshot.blocks.iter().any(is_lost) && !Mutation::LostBlocksAssign.is_on() {
            let restrict = Transaction::Restrict(pending.wanted.clone());
            return Next::Ask(
                InFlight::Restrict(pending),
                StoreQuestion::Transact(restrict),
            );
        }
        self.ask_about_new_ranges(pending, now)
    }

    /// Continues the write once nothing is assigned from blocks that the node has lost. If new ranges may be in use,
    /// asks the runtime first.
    pub(super) fn ask_about_new_ranges(
        &mut self,
        pending: Box<PendingAllocation>,
        now: Duration,
    ) -> Next {
        if pending.new.is_empty() {
            return self.store_allocation(pending, Vec::new());
        }
        if !self.watched.pods.is_complete() {
            self.log_store_problem("no address of the node's new ranges is assigned yet: the API server has not reported this node's pods, which may have some of them".to_owned());
            return self.write_ranges_later(&pending.target, now);
        }
        Next::Ask(
            InFlight::SandboxesForRanges(pending),
            StoreQuestion::Sandboxes,
        )
    }

    /// Continues the write after the runtime's answer, which shows which addresses of new ranges are in use.
    pub(super) fn sandboxes_listed(
        &mut self,
        pending: Box<PendingAllocation>,
        sandboxes: Result<Vec<Sandbox>, String>,
        now: Duration,
    ) -> Next {
        let sandboxes = match sandboxes {
            Ok(sandboxes) => sandboxes,
            Err(error) => {
                self.log_store_problem(format!(
                    "no address of the node's new ranges is assigned yet, as pods may have some of them: {error}"
                ));
                return self.write_ranges_later(&pending.target, now);
            }
        };
        self.log_store_problem(String::new());
        let new = NodeAllocation {
            blocks: pending.new.clone(),
            ..NodeAllocation::default()
        };
        let network = self.settings.network.as_deref().unwrap_or_default();
        let known = rebuild::known(&new, None, &sandboxes, &self.watched.pods, network);
        if !known.is_empty() {
            info!(
                attachments = known.len(),
                "adopted addresses of this node's new ranges that pods use already"
            );
        }
        self.store_allocation(pending, known)
    }

    fn store_allocation(
        &mut self,
        pending: Box<PendingAllocation>,
        known: Vec<RememberedAttachment>,
    ) -> Next {
        self.offer_pools(&pending);
        self.notes.changed();
        let holding = pending.wanted.clone();
        let hold = Transaction::Hold { holding, known };
        Next::Ask(InFlight::Hold(pending), StoreQuestion::Transact(hold))
    }

    pub(super) fn ranges_written(
        &mut self,
        pending: PendingAllocation,
        now: Duration,
        effects: &mut Vec<AgentEffect>,
    ) -> Next {
        let PendingAllocation { wanted, target, .. } = pending;
        // A status must describe the ranges that are in the store. The store has the ranges of this NodeSubnet only
        // from now on, so the agent writes statuses to this NodeSubnet only from now on.
        self.set_target(target, now);
        if wanted != self.holding {
            let blocks = wanted.blocks.len();
            info!(node.uid = %wanted.node_uid, blocks, pools = wanted.pools.len(), "holds");
            self.holding = wanted;
        }
        effects.push(AgentEffect::Held);
        self.look_at = now;
        Next::Go(Phase::Look)
    }

    fn write_ranges_later(&mut self, target: &StatusTarget, now: Duration) -> Next {
        self.write_ranges_again(target);
        self.look_at = now + STORE_PAUSE;
        Next::Go(Phase::Look)
    }

    pub(super) fn write_ranges_again(&mut self, target: &StatusTarget) {
        self.ranges_changed = true;
        self.relisted |= matches!(target, StatusTarget::This { relisted: true, .. });
    }

    /// Returns the ranges that the store should have. Returns `None` if the API does not show the ranges. In this case,
    /// the store stays as it is.
    pub(super) fn wanted_holding(&mut self) -> Option<NodeAllocation> {
        let uid = match &self.node {
            Observed::Unknown => return None,
            // The ranges of a deleted Node are quarantined, so none of their addresses may be assigned.
            Observed::Absent => return Some(NodeAllocation::default()),
            Observed::There(uid) => uid.clone(),
        };
        if let Some(subnet) = self.subnet().cloned() {
            if let Err(why) = &subnet.spec {
                self.log_parse_errors(vec![format!(
                    "the spec of NodeSubnet {} cannot be read, what was held before goes on: {why}",
                    self.settings.node
                )]);
                return None;
            }
            if let Some(spec) = subnet.spec_of(Some(&uid)) {
                let (holding, errors) = node_allocation::read(spec, &uid);
                self.log_parse_errors(errors);
                return Some(holding);
            }
        }
        // No range is allocated to this Node object yet. If the store has ranges for the same Node object and the
        // NodeSubnet is missing, these ranges stay, because the controller restores the NodeSubnet.
        let same = self.snapshot.as_ref().and_then(|it| it.node_uid.as_ref()) == Some(&uid);
        (!same).then(|| NodeAllocation {
            node_uid: uid,
            ..NodeAllocation::default()
        })
    }

    /// Returns the NodeSubnet whose status the agent should write. If a NodeSubnet belongs to this Node object, the
    /// agent writes the NodeSubnet's status even if the spec of the NodeSubnet cannot be parsed.
    fn status_target(&mut self) -> StatusTarget {
        match &self.subnet {
            Observed::There(subnet) if self.is_ours(subnet) => StatusTarget::This {
                subnet: Arc::clone(subnet),
                relisted: std::mem::take(&mut self.relisted),
            },
            Observed::Unknown => StatusTarget::Same,
            _ => StatusTarget::Absent,
        }
    }

    fn set_target(&mut self, target: StatusTarget, now: Duration) {
        match target {
            StatusTarget::This { subnet, relisted } => {
                self.set_intervals(&subnet, now);
                if relisted {
                    self.publisher.relisted();
                }
                self.publisher.seen(&subnet.version, subnet.status.clone());
            }
            StatusTarget::Same => {}
            StatusTarget::Absent => self.publisher.lost(),
        }
    }

    /// Sets the intervals between writes to those of the flags. If there are many agents, the controller asks for a
    /// longer interval, which then applies.
    fn set_intervals(&mut self, subnet: &SubnetSeen, now: Duration) {
        let Ok(spec) = &subnet.spec else { return };
        let asked = Duration::from_secs(spec.status_interval_seconds.into());
        let publish = self.settings.publish_interval.max(asked);
        let list = self.settings.addresses_interval.max(LIST_INTERVAL * asked);
        self.publisher.set_interval(publish, now);
        self.schedule.set_interval(list, publish, now);
    }

    /// Whether the NodeSubnet belongs to this Node object. If the spec of the NodeSubnet cannot be parsed, returns
    /// true.
    pub(super) fn is_ours(&self, subnet: &SubnetSeen) -> bool {
        let of_uid = |uid| subnet.spec.is_err() || subnet.spec_of(Some(uid)).is_some();
        self.node_uid().is_some_and(of_uid)
    }

    /// Tells the servers which pools can serve pods, and from which pools blocks can be requested. A claim is not
    /// listed as a pool, because a claim serves only pods that name it.
    fn offer_pools(&mut self, pending: &PendingAllocation) {
        let holding = &pending.wanted;
        let watched = self.watched_mut(PendingOffer::News);
        watched.automatic = holding
            .pools
            .iter()
            .filter(|it| it.automatic)
            .map(|it| it.name.clone())
            .collect();
        let of_pools = || holding.blocks.iter().filter(|it| !is_claim(&it.pool));
        let assigning = of_pools().filter(|it| !it.draining);
        watched.allocating_pools = assigning.map(|it| it.pool.clone()).collect();
        let spec = pending.subnet.as_deref().map(|it| &it.spec);
        let Some(Ok(spec)) = spec else { return };
        let (pools, errors) = serving(&spec.pools, &watched.allocating_pools);
        for error in errors {
            debug!("{error}");
        }
        let askable = || spec.pools.iter().filter(|it| it.is_askable());
        watched.askable = askable().map(|it| it.name.clone()).collect();
        watched.gives_unasked = askable()
            .filter(|it| it.first_block == FirstBlock::Immediate)
            .any(|it| watched.automatic.contains(&it.name));
        watched.at_limit = at_limit(&spec.pools, &holding.blocks);
        let named: BTreeSet<&str> = spec.pools.iter().map(|it| it.name.as_str()).collect();
        let others: BTreeSet<&String> = of_pools().map(|it| &it.pool).collect();
        watched.others = others
            .into_iter()
            .filter(|it| !named.contains(it.as_str()))
            .cloned()
            .collect();
        watched.serving = pools;
        watched.pools_known = true;
    }
}

/// Returns the pools whose limit (`maxBlocksPerNode`) the node has reached in one of the families, each with the limit.
fn at_limit(pools: &[NodePool], blocks: &[Block]) -> BTreeMap<String, u32> {
    let count = |pool: &str, family| {
        let of_pool = blocks.iter().filter(|it| it.pool == pool);
        of_pool.filter(|it| it.cidr.family() == family).count()
    };
    let full = |pool: &&NodePool| {
        let most = pool.max_blocks_per_node.and_then(|it| it.try_into().ok());
        let is_full = |most| {
            Family::ALL
                .into_iter()
                .any(|it| count(&pool.name, it) >= most)
        };
        most.is_some_and(is_full)
    };
    let full = pools.iter().filter(full);
    full.map(|it| (it.name.clone(), it.max_blocks_per_node.unwrap_or_default()))
        .collect()
}
