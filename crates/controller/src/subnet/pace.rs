//! How often agents write reports that nobody waits for, so that all agents together stay below a limit.
//!
//! In a large cluster, most of what Cadastre writes to etcd is statuses and NodeAddresses. Only the controller knows
//! how many nodes there are, so it writes the interval to each NodeSubnet. In small clusters it writes none, and agents
//! use the interval of their flags.

use std::time::Duration;

use super::Subnets;
use crate::cluster::cache::ClusterCache;

/// The agents' interval in small clusters, in seconds: the default of their `--publish-interval`.
const USUAL: u32 = 30;
/// The longest interval in seconds. The CRD allows no longer one.
const LONGEST: u32 = 86_400;
/// The present interval is kept while it is at most this many times as long as needed. So a changing number of nodes
/// does not cause a write of every NodeSubnet again and again.
const LARGEST_EXCESS: u32 = 3;
/// When the interval changes, NodeSubnets are written one by one, with this pause between them. No node waits for them.
const SPREAD: Duration = Duration::from_millis(20);

/// The limit of agents' status writes, and the interval that follows from it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AgentPace {
    /// The limit for all agents together. If it is 0, there is none
    writes_per_minute: u32,
    /// The interval in seconds that every NodeSubnet should have; 0 if agents need not be slowed down
    interval: u32,
}

impl AgentPace {
    pub(super) fn new(writes_per_minute: u32) -> Self {
        Self {
            writes_per_minute,
            interval: 0,
        }
    }

    /// Returns the interval in seconds that every NodeSubnet should have, or 0 if agents need not be slowed down.
    pub(super) fn interval(self) -> u32 {
        self.interval
    }

    /// Returns the interval for this many nodes. `is` is the present interval. It is kept if it is long enough and at
    /// most [`LARGEST_EXCESS`] times as long as needed.
    fn interval_for(self, nodes: usize, is: u32) -> u32 {
        let Some(needed) = self.needed(nodes) else {
            return 0;
        };
        if (needed..=needed.saturating_mul(LARGEST_EXCESS)).contains(&is) && is > USUAL {
            return is;
        }
        // 30, 45, 60, 90, 120, 180, ...
        let mut step = USUAL;
        while step < needed {
            let is_doubled = step.is_multiple_of(USUAL) && (step / USUAL).is_power_of_two();
            step = if is_doubled {
                step / 2 * 3
            } else {
                step / 3 * 4
            };
        }
        if step == USUAL { 0 } else { step.min(LONGEST) }
    }

    /// Returns the shortest interval in seconds that keeps the limit, or `None` if there is no limit.
    fn needed(self, nodes: usize) -> Option<u32> {
        let nodes = u64::try_from(nodes).unwrap_or(u64::MAX);
        let seconds = nodes.saturating_mul(60);
        let needed = seconds.checked_div(u64::from(self.writes_per_minute))?;
        Some(u32::try_from(needed).map_or(LONGEST, |it| it.min(LONGEST)))
    }
}

impl Subnets {
    /// Sets the interval at the beginning of a term. Keeps the interval of earlier leaders if possible. The leader then
    /// queues all NodeSubnets in any case.
    pub(crate) fn begin(&mut self, cache: &ClusterCache) {
        let specs = cache.subnets.iter().filter_map(|it| it.spec.as_ref().ok());
        let present = specs.map(|spec| spec.status_interval_seconds);
        let nodes = cache.nodes.len();
        let kept = present.map(|is| self.pace.interval_for(nodes, is)).max();
        self.pace.interval = kept.unwrap_or_else(|| self.pace.interval_for(nodes, 0));
    }

    /// Queues all NodeSubnets if the number of nodes requires another interval than before.
    pub(crate) fn nodes_counted(&mut self, cache: &ClusterCache, now: Duration) {
        let before = self.pace.interval;
        self.pace.interval = self.pace.interval_for(cache.nodes.len(), before);
        if self.pace.interval == before {
            return;
        }
        let mut at = now;
        for subnet in cache.subnets.iter() {
            at += SPREAD;
            self.queue.add_at(subnet.name.clone(), at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{cluster_of, subnet};
    use crate::queue::Queue;

    #[test]
    fn another_number_of_nodes_queues_all_node_subnets_if_it_needs_another_interval() {
        let seconds = Duration::from_secs;
        let of_nodes = |names: &[&str]| {
            let subnets = names.iter().map(|name| subnet(name, &[], 0));
            cluster_of(Vec::new(), subnets.collect())
        };
        let (two, three) = (of_nodes(&["a", "b"]), of_nodes(&["a", "b", "c"]));
        let mut subnets = Subnets::new(3);
        let mut queued = |cache, at| {
            subnets.nodes_counted(cache, at);
            let next = || subnets.queue.pop(at + seconds(1));
            std::iter::from_fn(next).count()
        };
        assert_eq!(queued(&two, seconds(1)), 2, "once in 45 s, not in 30 s");
        assert_eq!(queued(&two, seconds(2)), 0, "as before");
        assert_eq!(queued(&three, seconds(3)), 3, "once in 60 s");
    }

    #[test]
    fn an_interval_that_was_kept_ends_when_it_is_much_too_long() {
        let of_nodes = |names: &[&str]| {
            let mut subnets: Vec<_> = names.iter().map(|name| subnet(name, &[], 0)).collect();
            for subnet in &mut subnets {
                subnet.spec.as_mut().unwrap().status_interval_seconds = 45;
            }
            cluster_of(Vec::new(), subnets)
        };
        let [four, two, one] = [&["a", "b", "c", "d"][..], &["a", "b"], &["a"]].map(of_nodes);
        let mut subnets = Subnets::new(6);
        subnets.nodes_counted(&four, Duration::ZERO);
        // A new leader keeps what the last leader kept.
        let mut new_leader = Subnets::new(6);
        new_leader.begin(&two);
        subnets.nodes_counted(&two, Duration::ZERO);
        for mut subnets in [subnets, new_leader] {
            assert_eq!(subnets.pace.interval(), 45);
            subnets.queue = Queue::default();
            subnets.nodes_counted(&one, Duration::ZERO);
            assert_eq!(subnets.pace.interval(), 0);
            assert!(subnets.queue.next_at().is_some());
        }
    }

    #[test]
    fn agents_of_small_clusters_are_not_slowed_down() {
        let pace = AgentPace::new(6_000);
        assert_eq!(
            [0, 1, 3_000].map(|nodes| pace.interval_for(nodes, 0)),
            [0; 3]
        );
        assert_eq!(AgentPace::new(0).interval_for(1_000_000, 60), 0, "no limit");
    }

    #[test]
    fn all_agents_together_stay_below_the_limit() {
        let pace = AgentPace::new(6_000);
        let all = [3_100, 5_000, 9_000, 50_000, 500_000].map(|nodes| pace.interval_for(nodes, 0));
        assert_eq!(all, [45, 60, 90, 720, 5_760]);
        for nodes in (1..200_000).step_by(77) {
            let interval = pace.interval_for(nodes, 0).max(USUAL);
            let needed = nodes.div_ceil(100).max(30);
            assert!(interval as usize >= needed - 1, "{nodes}: {interval}");
            assert!(
                (interval as usize) * 2 < needed * 3 + 2,
                "{nodes}: {interval}"
            );
        }
        assert_eq!(pace.interval_for(usize::MAX, 0), LONGEST);
    }

    #[test]
    fn an_interval_stays_while_it_is_sufficient_and_not_much_too_long() {
        let pace = AgentPace::new(6_000);
        assert_eq!(pace.interval_for(5_900, 60), 60);
        assert_eq!(pace.interval_for(2_100, 60), 60);
        assert_eq!(pace.interval_for(1_900, 60), 0, "much too long");
        assert_eq!(pace.interval_for(6_100, 60), 90, "too short");
        assert_eq!(pace.interval_for(2_500, 7), 0, "nobody has set this");
    }
}
