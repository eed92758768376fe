//! Decides when the file for the routing daemon is written, and which ranges the daemon may still announce.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use tracing::warn;

use super::publishing::Desired;
use super::{AgentEffect, AgentMachine, CountedEvent};
use crate::announce::{self, AnnounceError};
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::NodeAllocation;

/// The ranges that the routing daemon of the node announces.
#[derive(Debug)]
pub(super) struct Announcer {
    desired: Desired<Arc<NodeAllocation>, Result<(), AnnounceError>>,
    /// The ranges that the daemon may be announcing. `None` if these can be any ranges, because the daemon may still
    /// use the file of an earlier agent process
    announced: Option<BTreeSet<Cidr>>,
}

impl Announcer {
    pub(super) const NEW: Self = Self {
        desired: Desired::NEW,
        announced: None,
    };

    fn may_announce(&self, range: &Cidr) -> bool {
        self.announced.as_ref().is_none_or(|it| it.contains(range))
    }

    /// Returns whether to write the file with these ranges now. If so, the daemon may announce them from now on.
    fn begins(&mut self, wanted: &Arc<NodeAllocation>, now: Duration) -> bool {
        let begins = self.desired.begins(wanted, now);
        if begins && let Some(announced) = &mut self.announced {
            announced.extend(ranges(wanted));
        }
        begins
    }

    fn ends(&mut self, report: Result<(), AnnounceError>) {
        if let Err(error) = &report
            && self.desired.reported() != Some(&report)
        {
            warn!("{error}");
        }
        if report.is_ok() {
            self.announced = self.desired.written().map(|it| ranges(it).collect());
        }
        self.desired.ends(report);
    }

    pub(super) fn check_at(&self) -> Option<Duration> {
        self.desired.check_at()
    }
}

fn ranges(allocation: &NodeAllocation) -> impl Iterator<Item = Cidr> {
    allocation.blocks.iter().map(|it| it.cidr)
}

impl AgentMachine {
    /// Whether the routing daemon may still announce the range. While this is true, the block is not reported as
    /// released.
    pub(super) fn may_announce(&self, range: &Cidr) -> bool {
        let announcer = self.announcer.as_ref();
        announcer.is_some_and(|it| it.may_announce(range))
            && !Mutation::ReleasedWhileAnnounced.is_on()
    }

    /// Passes the node's ranges to the routing daemon. If another network serves the node's pods, passes no ranges.
    /// Does nothing until it is known which network serves the pods.
    pub(super) fn announce(&mut self, now: Duration, effects: &mut Vec<AgentEffect>) {
        let Some(is_left) = self.serves_pods().map(|it| !it) else {
            return;
        };
        let Some(announcer) = &mut self.announcer else {
            return;
        };
        let allocation = if is_left {
            Arc::default()
        } else {
            Arc::clone(&self.held)
        };
        if announcer.begins(&allocation, now) {
            effects.push(AgentEffect::Announce(allocation));
        }
    }

    pub(super) fn announced(&mut self, report: Result<(), AnnounceError>) {
        if let Some(announcer) = &mut self.announcer {
            announcer.ends(report);
        }
    }

    /// Returns the condition `RangesAnnounced`; `None` before the first write of the file has ended.
    pub(super) fn announce_condition(&self, effects: &mut Vec<AgentEffect>) -> Option<Condition> {
        let report = self.announcer.as_ref()?.desired.reported()?;
        effects.push(AgentEffect::Count(CountedEvent::Announced(report.is_ok())));
        Some(announce::condition(report))
    }
}
