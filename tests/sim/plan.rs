//! What a seed draws before the first step: the size and the length of its run, and how frequent faults are.

use super::clock::{MS, SECOND, Time};
use super::persistent_fault::PersistentFault;
use super::process::Watched;
use super::proofs::Scenario;
use super::rng::Rng;

/// The conditions of one run. Chances are numbers out of ten thousand.
#[derive(Clone, Debug)]
pub struct Plan {
    pub processes: usize,
    /// The number of node names, and so the maximum number of Nodes.
    pub names: u64,
    /// The number of pool names, and so the maximum number of pools.
    pub pools: u64,
    /// The chance that a new pool allocates blocks rather than podCIDRs.
    pub blocks: u32,
    /// The prefix length of IPv4 pools' ranges. The longer the prefix, the more nodes wait for ranges.
    pub slice: u8,
    /// Whether there are many more nodes than blocks.
    pub crowded: bool,
    /// The maximum number of requests that one process has in flight.
    pub limit: usize,
    /// The time from the start of the run during which objects change and faults happen.
    pub faults_for: Time,
    /// How long the cluster may take to settle after `faults_for`, before the checks at the end.
    pub settle_for: Time,
    /// The maximum time between two changes of objects.
    pub work_every: Time,
    /// The maximum time between two faults.
    pub fault_every: Time,
    pub network: Network,
    /// The relative frequency of each kind of fault.
    pub faults: Faults,
    /// The largest deviation of monotonic clocks, in parts per million.
    pub skew: u64,
    /// Whether monotonic clocks stop while their process is paused.
    pub clocks_stop: bool,
    /// Whether a foreign allocator sometimes allocates podCIDRs.
    pub foreign_allocator: bool,
    /// Whether users edit NodeSubnets (`tampering`) or IPAMBlocks (`tampering_blocks`) by hand. No run has both,
    /// because then no record of a node's blocks would be left.
    pub tampering: bool,
    pub tampering_blocks: bool,
    /// The chance, per change of the workload, that a new pod has an address that Cadastre has not assigned.
    pub strangers: u32,
    /// The chance, per change of the workload, that a host loses its store. This is in addition to the usual faults.
    pub lost_stores: u32,
    /// The chance that a new pod names a claim. If 0, there are no claims.
    pub claims: u32,
    /// The chance that a new pod belongs to a virtual machine that may migrate.
    pub migrating: u32,
    /// The chance that a new pod is the next pod of an ordinal of a StatefulSet with sticky addresses. If 0, there is
    /// no StatefulSet, and claims have no `ttlSecondsAfterUse`.
    pub sticky: u32,
    /// The chance that nodes of a new pool of blocks borrow. If 0, no node borrows.
    pub borrowing: u32,
    /// How many of 10,000 pools of blocks require that addresses are probed before their use.
    pub probing: u32,
    /// Whether Nodes and pools rarely change, hosts rarely fail, and pools of blocks serve all nodes and pods at once.
    /// In such a run most pods get addresses, and nodes use addresses again.
    pub steady: bool,
    /// Whether pools of blocks have so few addresses that each address is soon used again.
    pub tight: bool,
    /// The chance that a new pod asks for an address.
    pub asking: u32,
    /// The chance, per change of the workload, that a user makes requests of a node, for example to withdraw ranges.
    /// The user often restores the earlier requests soon afterwards.
    pub withdrawing: u32,
    /// The chance that an agent is killed when it has just reported a range as withdrawn.
    pub fatal_reports: u32,
    /// The chance, per change of the workload, that a host loses its power for a short time. If it is not 0, hosts also
    /// often lose their power when their agent has just reported a block as released.
    pub reboots: u32,
    /// The chance, per change of the workload, that a Node is deleted and registers again, and that its host loses its
    /// store.
    pub reborn: u32,
    /// When the API server is backed up, and when it is restored; `None` if the run has no restore.
    pub restore: Option<(Time, Time)>,
    /// Whether nodes run an agent. Pools of podCIDRs need none.
    pub agents: bool,
    pub persistent_fault: Option<PersistentFault>,
}

impl Plan {
    /// Whether controllers publish routes. The result follows from a value that is drawn anyway, so that all draws are
    /// the same as in runs without routes.
    pub fn publishes_routes(&self) -> bool {
        self.slice.is_multiple_of(3)
    }

    /// Whether controllers write FRRConfigurations. The result follows from values that are drawn anyway.
    pub fn writes_frr_configurations(&self) -> bool {
        match self.names % 5 {
            4 => self.slice == 21,
            2 => self.slice != 21 && self.pools == 5,
            _ => false,
        }
    }

    /// The maximum number of statuses that all agents together write in a minute. In some runs it is so low that the
    /// agents' interval changes as nodes come and go. The result follows from a value that is drawn anyway.
    pub fn agent_writes_per_minute(&self) -> u32 {
        if self.names % 6 == 1 { 6 } else { 6_000 }
    }

    /// How long the cluster may take to settle. If agents write rarely, each of several reports may be minutes late.
    pub fn settling(&self) -> Time {
        let writes_rarely = self.agent_writes_per_minute() < 100;
        self.settle_for + if writes_rarely { 300 * SECOND } else { 0 }
    }

    /// Whether agents write a file for a routing daemon. The result follows from `slice`.
    pub fn announces(&self) -> bool {
        self.slice == 22
    }

    /// Whether pools of podCIDRs assign ranges to certain nodes. The result follows from a value that is drawn anyway.
    pub fn assigns_ranges(&self) -> bool {
        self.names.is_multiple_of(3)
    }

    /// Whether nodes may run different numbers of pods, and some pools of podCIDRs have `FitMaxPods`. The result
    /// follows from values that are drawn anyway. In runs with blocks, all nodes may run equally many pods, because the
    /// pools are too small for blocks with an address for each of many pods.
    pub fn fits_max_pods(&self) -> bool {
        self.blocks == 0 && !self.names.is_multiple_of(2)
    }

    /// The kinds that controllers watch.
    pub fn watched(&self) -> Vec<Watched> {
        let routes = self.publishes_routes().then_some(Watched::Routes);
        let frr = self.writes_frr_configurations();
        let frr = frr.then_some(Watched::FrrConfigurations);
        Watched::ALL.into_iter().chain(routes).chain(frr).collect()
    }
}

/// The chance of each fault of a request or watch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Network {
    pub lost_before: u32,
    pub lost_after: u32,
    /// The chance that the answer is lost and the request takes effect much later.
    pub late: u32,
    pub slow: u32,
    /// The chance that an allocation arrives late, and that the process that sent it then sends nothing for a long
    /// time.
    pub last_words: u32,
    pub refused: u32,
    pub busy: u32,
    pub rejected: u32,
    /// The chance that a watch lags by seconds or minutes instead of milliseconds.
    pub lagging: u32,
    /// The chance that time passes between the decision to send a request and the check that the process still has the
    /// Lease.
    pub gap: u32,
    pub lease_lost: u32,
}

/// The relative frequency of each fault of a controller process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    pub pause: u32,
    pub crash: u32,
    pub stop: u32,
    pub relist: u32,
    pub stall: u32,
    /// How often a process is cut off from the API server. The process's writes arrive when the cut ends.
    pub cut: u32,
    pub wall: u32,
    /// How often a monotonic clock jumps ahead or changes its rate.
    pub clock: u32,
}

impl Plan {
    pub fn draw(rng: &mut Rng) -> Self {
        let intensity = *rng.pick(&[0_u32, 1, 1, 3, 3, 10]);
        let mut some =
            |most: u32| u32::try_from(rng.below(u64::from(most) + 1)).unwrap_or(0) * intensity;
        let network = Network {
            lost_before: some(60),
            lost_after: some(60),
            late: some(60),
            slow: some(100),
            last_words: some(100),
            refused: some(40),
            busy: some(60),
            rejected: some(20),
            lagging: some(30),
            gap: some(100),
            lease_lost: some(100),
        };
        let mut weight = |most: u64| u32::try_from(rng.below(most + 1)).unwrap_or(0);
        let faults = Faults {
            pause: weight(10),
            crash: weight(6),
            stop: weight(4),
            relist: weight(10),
            stall: weight(10),
            cut: weight(8),
            wall: if weight(3) == 0 { 5 } else { 0 },
            clock: 0,
        };
        let plan = Plan {
            processes: *rng.pick(&[1, 2, 2, 2, 3]),
            names: rng.between(3, 24),
            pools: rng.between(1, 5),
            blocks: *rng.pick(&[0, 5_000, 5_000, 10_000]),
            slice: *rng.pick(&[21, 21, 22, 23]),
            crowded: rng.chance(3_000),
            limit: *rng.pick(&[1, 4, 16, 64]),
            faults_for: rng.between(120, 420) * SECOND,
            settle_for: 450 * SECOND,
            work_every: rng.stretch(200 * MS, 4 * SECOND),
            fault_every: if intensity == 0 {
                600 * SECOND
            } else {
                rng.stretch(2 * SECOND, 60 * SECOND)
            },
            network,
            faults,
            skew: *rng.pick(&[0, 1_000, 30_000]),
            clocks_stop: false,
            foreign_allocator: rng.chance(1_500),
            tampering: rng.chance(2_000),
            tampering_blocks: rng.chance(1_500),
            strangers: 0,
            lost_stores: 0,
            claims: *rng.pick(&[0, 3_000, 7_000]),
            migrating: 0,
            sticky: 0,
            borrowing: 0,
            probing: 0,
            steady: false,
            tight: false,
            asking: 0,
            withdrawing: 0,
            fatal_reports: 0,
            reboots: 0,
            reborn: 0,
            restore: None,
            agents: true,
            persistent_fault: None,
        };
        let plan = Plan {
            tampering_blocks: plan.tampering_blocks && !plan.tampering,
            agents: plan.blocks > 0 || rng.chance(3_000),
            ..plan
        };
        match rng.below(8) {
            0 if plan.claims > 0 => plan.under(Scenario::Claims),
            _ if plan.crowded => plan.crowd(),
            _ => plan,
        }
    }

    /// Returns the conditions in which late writes do the most harm: few ranges for many nodes, and leaders that stop
    /// sending just after an allocation.
    pub fn crowd(self) -> Self {
        let network = Network {
            late: 100,
            last_words: 2_000,
            ..self.network
        };
        Plan {
            processes: 3,
            names: self.names + 8,
            pools: self.pools.min(2),
            slice: 23,
            crowded: true,
            work_every: self.work_every.min(2 * SECOND),
            fault_every: self.fault_every.max(60 * SECOND),
            network,
            ..self
        }
    }

    /// Returns the conditions in which the simulation looks for a mutation.
    pub fn under(self, scenario: Scenario) -> Self {
        let plan = match scenario {
            Scenario::AsDrawn => return self,
            Scenario::Restored
            | Scenario::Agents
            | Scenario::Claims
            | Scenario::AskingPods
            | Scenario::Probing
            | Scenario::Migrations
            | Scenario::Lending
            | Scenario::Withdrawals
            | Scenario::Reboots
            | Scenario::Reborn => Plan {
                blocks: 10_000,
                agents: true,
                processes: self.processes.min(2),
                settle_for: 300 * SECOND,
                foreign_allocator: false,
                ..self
            },
            _ => {
                let has_blocks = scenario == Scenario::CrowdedBlocks;
                Plan {
                    blocks: if has_blocks { 10_000 } else { 0 },
                    claims: 0,
                    agents: has_blocks,
                    ..self.crowd()
                }
            }
        };
        let plan = Plan {
            tampering: false,
            tampering_blocks: false,
            ..plan
        };
        let (faults, network) = (plan.faults.clone(), plan.network.clone());
        match scenario {
            Scenario::AsDrawn
            | Scenario::Crowded
            | Scenario::CrowdedBlocks
            | Scenario::NoIntents
            | Scenario::BadClocks => plan,
            Scenario::Unclear => Plan {
                fault_every: 3 * SECOND,
                faults: Faults {
                    crash: 60,
                    ..faults
                },
                network: Network {
                    late: 3_000,
                    slow: 3_000,
                    ..network
                },
                ..plan
            },
            Scenario::Restored => Plan {
                names: 6 + plan.names % 6,
                pools: 5,
                work_every: 5 * SECOND,
                ..plan
            },
            Scenario::Agents => Plan {
                lost_stores: 200,
                ..plan.with_busy_nodes()
            },
            Scenario::Probing => Plan {
                probing: 10_000,
                steady: true,
                tight: true,
                settle_for: 450 * SECOND,
                ..plan.with_busy_nodes()
            },
            Scenario::Claims => plan.with_claims(),
            Scenario::Migrations => Plan {
                migrating: 6_000,
                claims: 1_000,
                steady: true,
                pools: 1,
                crowded: false,
                ..plan.with_claims()
            },
            Scenario::AskingPods => Plan {
                asking: 4_000,
                ..plan.with_claims()
            },
            // There are few pools, and they are soon exhausted, because nodes borrow only from an exhausted pool. The
            // run settles for long, because it takes long until many small blocks are empty and idle.
            Scenario::Lending => Plan {
                settle_for: 420 * SECOND,
                names: 4 + plan.names % 4,
                pools: 1 + plan.pools % 2,
                crowded: false,
                work_every: 2 * SECOND,
                faults_for: plan.faults_for + 300 * SECOND,
                claims: plan.claims.min(1_000),
                borrowing: 9_000,
                ..plan
            },
            // Reports are often lost, so the API server sometimes has outdated reports for several seconds.
            Scenario::Withdrawals => Plan {
                withdrawing: 2_000,
                fatal_reports: 3_000,
                network: Network {
                    lost_before: 1_000,
                    ..network
                },
                steady: true,
                claims: 3_000,
                ..plan.with_claims()
            },
            Scenario::Reboots => Plan {
                reboots: 300,
                steady: true,
                tight: true,
                settle_for: 450 * SECOND,
                ..plan.with_busy_nodes()
            },
            Scenario::Reborn => Plan {
                reborn: 300,
                steady: true,
                settle_for: 450 * SECOND,
                ..plan.with_busy_nodes()
            },
            Scenario::Behind => Plan {
                work_every: 500 * MS,
                fault_every: 2 * SECOND,
                faults: Faults {
                    stall: 40,
                    ..Faults::default()
                },
                ..plan
            },
            Scenario::HandOvers => Plan {
                work_every: 500 * MS,
                fault_every: 3 * SECOND,
                faults: Faults {
                    stop: 10,
                    stall: 10,
                    ..Faults::default()
                },
                network: Network {
                    late: 1_000,
                    lagging: 500,
                    last_words: 0,
                    ..network
                },
                ..plan
            },
            Scenario::Scarce => Plan {
                work_every: 500 * MS,
                network: Network {
                    late: 2_000,
                    last_words: 0,
                    ..network
                },
                ..plan
            },
            Scenario::Strangers => Plan {
                strangers: 3_000,
                ..plan
            },
        }
    }

    /// Returns the conditions in which much happens on each node: few nodes, and pods that come and go all the time.
    fn with_busy_nodes(self) -> Self {
        Plan {
            names: 2 + self.names % 3,
            pools: self.pools.min(2),
            faults_for: self.faults_for.min(150 * SECOND),
            work_every: self.work_every.min(SECOND),
            ..self
        }
    }

    /// Returns the conditions in which claims do the most harm: few nodes, and many claims.
    fn with_claims(self) -> Self {
        Plan {
            names: 2 + self.names % 3,
            pools: self.pools.min(2),
            work_every: self.work_every.min(SECOND),
            settle_for: 450 * SECOND,
            claims: 7_000,
            ..self
        }
    }

    /// Adds a restore of the API server to a state more than a minute old. After the restore, a process whose clock is
    /// correct finds in the Lease that nobody has led for over a minute.
    pub fn with_restore(self, rng: &mut Rng) -> Self {
        let backup = rng.between(20, 150) * SECOND;
        let restore = backup + rng.between(65, 200) * SECOND;
        Plan {
            blocks: if self.blocks == 0 { 5_000 } else { self.blocks },
            agents: true,
            faults_for: restore + rng.between(150, 250) * SECOND,
            faults: Faults {
                wall: 0,
                ..self.faults
            },
            tampering: false,
            tampering_blocks: false,
            restore: Some((backup, restore)),
            ..self
        }
    }

    /// Whether requests and watches have no faults in this run. Processes then have hardly any faults.
    pub fn is_mild(&self) -> bool {
        self.network == Network::default()
    }

    /// Makes monotonic clocks unreliable. They stop while their host stands still, as in a virtual machine that is
    /// paused or moved. Unless `lose` is set, they also jump ahead and run at any rate.
    pub fn with_bad_clocks(self, lose: bool) -> Self {
        Plan {
            faults: Faults {
                pause: self.faults.pause.max(6),
                clock: if lose { 0 } else { 6 },
                ..self.faults
            },
            clocks_stop: true,
            fault_every: self.fault_every.min(20 * SECOND),
            // If a wait begins while the clock is slow, it takes longer than in other runs.
            settle_for: 2 * self.settle_for,
            ..self
        }
    }

    /// Whether clocks can show that more time has passed than in truth, so that waits end too early.
    pub fn clocks_lie(&self) -> bool {
        self.faults.wall > 0 || self.clocks_hurry()
    }

    /// Whether most nodes have few pods, so that they can lend addresses to others.
    pub fn is_uneven(&self) -> bool {
        self.borrowing > 5_000
    }

    /// Whether monotonic clocks can show that more time has passed than in truth.
    pub fn clocks_hurry(&self) -> bool {
        self.faults.clock > 0
    }
}
