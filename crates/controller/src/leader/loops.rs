//! The list of all loops. The leader treats all loops alike: it gets requests from each loop, passes answers to the
//! loop, calls the loop when work is due, and updates the metrics of the loop. Requests that nodes wait for come first,
//! in the order of [`Loops::next_awaited`].

use std::time::Duration;

use crate::agent_grace::AgentGrace;
use crate::block::BlockLoop;
use crate::claim::ClaimLoop;
use crate::cluster::cache::ClusterCache;
use crate::cluster::lease::LeadershipTerm;
use crate::cluster::names::NodeName;
use crate::cluster::objects::{FrrConfiguration, Routes};
use crate::cluster::request::ApiRequest;
use crate::default_pool::DefaultPool;
use crate::demand::Demand;
use crate::exhaustion::Exhaustion;
use crate::fence::Fence;
use crate::ipam_claims::IpamClaimLoop;
use crate::leaks::Leaks;
use crate::pod_claims::PodClaimLoop;
use crate::podcidr::PodCidrs;
use crate::pool::PoolLoop;
use crate::quarantine::Quarantine;
use crate::reconcile::Loop;
use crate::routes::{RouteKind, RouteLoop};
use crate::settings::ControllerSettings;
use crate::subnet::Subnets;
use crate::{Context, Purpose};

/// A kind of object that lists the ranges of a node, with the loop that writes the objects of this kind.
pub(crate) trait RouteLoopOf: RouteKind {
    fn route_loop(loops: &mut Loops) -> &mut RouteLoop<Self>;
}

impl RouteLoopOf for Routes {
    fn route_loop(loops: &mut Loops) -> &mut RouteLoop<Self> {
        &mut loops.routes
    }
}

impl RouteLoopOf for FrrConfiguration {
    fn route_loop(loops: &mut Loops) -> &mut RouteLoop<Self> {
        &mut loops.frr_configurations
    }
}

macro_rules! loops {
    (
        |$term:ident, $settings:ident, $won:ident|
        $($name:literal $field:ident: $kind:ty = $new:expr,)*
    ) => {
        /// All loops of a leader. They exist from the beginning of its term to the end.
        #[derive(Clone, Debug)]
        pub(crate) struct Loops {
            $(pub(crate) $field: $kind,)*
        }

        impl Loops {
            /// Creates the loops of a new leader.
            pub(super) fn new($term: &LeadershipTerm, $settings: &ControllerSettings, $won: Duration) -> Self {
                Loops {
                    $($field: $new,)*
                }
            }

            /// Returns each loop with its name. The order is the one in which the leader asks the loops for requests
            /// that no node waits for. Metrics have the name in a label, and [`Purpose::loop_name`] returns the same
            /// name.
            pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, &dyn Loop)> {
                [$(($name, &self.$field as &dyn Loop),)*].into_iter()
            }

            /// Returns all loops mutably, in the order of [`Loops::all`].
            pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut dyn Loop)> {
                [$(($name, &mut self.$field as &mut dyn Loop),)*].into_iter()
            }
        }
    };
}

impl Loops {
    /// Queues the node in the loops that write NodeRoutes and FRRConfigurations.
    pub(super) fn queue_routes(&mut self, name: &NodeName) {
        self.routes.queue.add(name.clone());
        self.frr_configurations.queue.add(name.clone());
    }

    /// Queues all nodes in the loops that write NodeRoutes and FRRConfigurations.
    pub(super) fn requeue_routes(&mut self, cache: &ClusterCache) {
        self.routes.requeue_all(cache);
        self.frr_configurations.requeue_all(cache);
    }

    /// Returns the next request that nodes wait for. Such requests come before all others, in this order:
    /// 1. the list of NodeSubnets that ends the agent grace
    /// 2. the write of a new pool's finalizer
    /// 3. requests about the default pool
    /// 4. writes of podCIDRs and, in turn with them, writes that record podCIDRs in NodeSubnets, if they are overdue;
    ///    until the fence is done, requests of the fence instead of podCIDRs
    /// 5. requests about blocks that nodes wait for
    /// 6. requests about NodeSubnets that nodes wait for
    ///
    /// While the process stops, only the loops of podCIDRs and blocks may send requests.
    pub(super) fn next_awaited(
        &mut self,
        settings: &ControllerSettings,
        stopping: bool,
        cx: &mut Context,
    ) -> Option<(ApiRequest, Purpose)> {
        let is_known = cx.allocations.intents.is_known();
        if stopping {
            let podcidrs = is_known.then(|| self.podcidrs.next_urgent(cx, true));
            return podcidrs
                .flatten()
                .or_else(|| self.blocks.next_urgent(cx, true));
        }
        self.listening
            .next_urgent(cx.now)
            .or_else(|| self.pools.next_finalizer(cx))
            .or_else(|| self.default_pool.next_urgent(settings, cx))
            .or_else(|| {
                let is_turn = !is_known || self.subnets.is_turn_of_records();
                is_turn.then(|| self.subnets.next_overdue(cx)).flatten()
            })
            .or_else(|| {
                if is_known {
                    let found = self.podcidrs.next_urgent(cx, false);
                    found.inspect(|_| self.subnets.podcidrs_sent())
                } else {
                    self.fence.next_urgent(cx.cache, cx.now)
                }
            })
            .or_else(|| self.subnets.next_overdue(cx))
            .or_else(|| self.blocks.next_urgent(cx, false))
            .or_else(|| self.subnets.next_urgent(cx))
    }
}

loops! {
    |term, settings, won|
    "fence" fence: Fence = Fence::new(term, won),
    "listening" listening: AgentGrace = AgentGrace::after(term),
    "default_pool" default_pool: DefaultPool = DefaultPool::default(),
    "podcidr" podcidrs: PodCidrs = PodCidrs::default(),
    "demand" demand: Demand = Demand::default(),
    "subnet" subnets: Subnets = Subnets::new(settings.agent_writes_per_minute),
    "block" blocks: BlockLoop = BlockLoop::default(),
    "quarantine" quarantine: Quarantine = Quarantine::default(),
    "leaks" leaks: Leaks = Leaks::after(settings.leak_grace),
    "claim" claims: ClaimLoop = ClaimLoop::default(),
    "pod_claim" pod_claims: PodClaimLoop = PodClaimLoop::default(),
    "exhaustion" exhaustion: Exhaustion = Exhaustion::new(settings.evicts_unserved),
    "ipam_claim" ipam_claims: IpamClaimLoop = IpamClaimLoop::default(),
    "routes" routes: RouteLoop<Routes> = RouteLoop::new(settings.publishes_routes),
    "frr_configuration" frr_configurations: RouteLoop<FrrConfiguration> = RouteLoop::new(settings.frr.clone()),
    "pool" pools: PoolLoop = PoolLoop::default(),
}
