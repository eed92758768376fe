//! Changes of pools and of service ranges by users.

use cadastre_api::{
    AddressTerms, AllocationMode, AssignmentMode, BlockSizing, Borrowing, ConflictProbe,
    ExhaustedNodeTaint, FirstBlock, IPPoolSpec, IPv4Ranges, IPv6Ranges, NodeAssignment, Warm,
    WarmMinimum,
};
use cadastre_controller::cluster::names::PoolName;
use cadastre_controller::cluster::objects::{Pool, ServiceRange};
use cadastre_core::Cidr;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::api::new_pool;
use super::ipam_claims::NETWORK;
use super::run::Sim;
use super::workload::{addr, cidr};

/// The number of slices from which the ranges of pools are drawn. Pools of podCIDRs use slices of 10.244.0.0/18.
const SLICES: u64 = 8;

impl Sim {
    pub fn create_pool(&mut self) {
        let name: PoolName = format!("p{}", self.rng.below(self.plan.pools)).into();
        if self.api.pools.get(&name).is_some() {
            return;
        }
        let spec = self.some_spec();
        self.log(Some(&name), || format!("pool is created {spec:?}"));
        let pool = new_pool(name, self.api.uid(), spec, self.now);
        self.api.put(pool);
    }

    fn some_spec(&mut self) -> IPPoolSpec {
        if self.rng.chance(self.plan.blocks) {
            self.some_block_spec()
        } else {
            self.some_podcidr_spec()
        }
    }

    /// Draws where the ranges of a pool are, whether it has IPv4 and IPv6 ranges, and which nodes it selects.
    fn some_scope(&mut self) -> (u64, (bool, bool), Option<LabelSelector>) {
        let slice = self.rng.below(SLICES);
        let families = self.rng.below(10);
        let class = *self.rng.pick(&["", "", "", "a", "b"]);
        let selector = LabelSelector {
            match_labels: Some([("class".to_owned(), class.to_owned())].into()),
            ..LabelSelector::default()
        };
        let selector = (!class.is_empty()).then_some(selector);
        (slice, (families < 9, families > 5), selector)
    }

    /// Draws the spec of a pool of blocks. The pool is so small that it is sometimes exhausted.
    fn some_block_spec(&mut self) -> IPPoolSpec {
        let (slice, (has_v4, has_v6), node_selector) = self.some_scope();
        let reserved = match self.rng.below(6) {
            0 => vec![format!("10.245.{slice}.1")],
            1 => vec![
                format!("10.245.{slice}.9-10.245.{slice}.20"),
                format!("fd00:0:1:{}::5", slice + 1),
            ],
            _ => Vec::new(),
        };
        // A few pools of blocks lie in the range of the podCIDR pools, so they may overlap such pools.
        let third = if self.rng.chance(1_000) { 244 } else { 245 };
        let len = *self.rng.pick(&[25, 26, 26, 27]);
        let (len, v6_len) = if self.plan.tight {
            (27, 123)
        } else {
            (len, 122)
        };
        let low = u32::try_from(self.rng.between(1, 3)).unwrap();
        // The result follows from values that are drawn anyway, so that all other draws stay the same.
        let minimum = if low == 3 && slice.is_multiple_of(4) {
            WarmMinimum::MaxPods
        } else {
            WarmMinimum::None
        };
        let conflict_probe = match self.plan.probing {
            0 => ConflictProbe::Never,
            chance if self.rng.chance(chance) => ConflictProbe::BeforeUse,
            _ => ConflictProbe::Never,
        };
        let spec = IPPoolSpec {
            ipv4: has_v4.then(|| IPv4Ranges {
                cidrs: vec![format!("10.{third}.{slice}.0/{len}")],
                block_size: Some(*self.rng.pick(&[27, 28, 28, 29, 30]).max(&len)),
                block_sizing: BlockSizing::Fixed,
                gateway: None,
            }),
            ipv6: has_v6.then(|| IPv6Ranges {
                cidrs: vec![format!("fd00:0:1:{}::/{v6_len}", slice + 1)],
                block_size: Some(*self.rng.pick(&[124, 125, 126])),
                gateway: None,
            }),
            node_selector,
            networks: vec![NETWORK.to_owned()],
            assignment: *self.rng.pick(&[
                AssignmentMode::Automatic,
                AssignmentMode::Automatic,
                AssignmentMode::Manual,
            ]),
            first_block: *self.rng.pick(&[
                FirstBlock::Immediate,
                FirstBlock::Immediate,
                FirstBlock::OnDemand,
            ]),
            max_blocks_per_node: *self.rng.pick(&[None, None, Some(1), Some(3)]),
            exhausted_node_taint: *self
                .rng
                .pick(&[ExhaustedNodeTaint::None, ExhaustedNodeTaint::NoSchedule]),
            idle_seconds: *self.rng.pick(&[0, 2, 20]),
            priority: i32::try_from(self.rng.below(3)).unwrap(),
            reserved,
            reserved_on_request: slice.is_multiple_of(3),
            quarantine_seconds: *self.rng.pick(&[0, 5, 20, 60]),
            terms: AddressTerms {
                warm: Warm {
                    low,
                    high: 50,
                    minimum,
                },
                conflict_probe,
                ..AddressTerms::default()
            },
            ..IPPoolSpec::new(AllocationMode::Blocks, Vec::new(), Vec::new())
        };
        let spec = if self.plan.steady {
            IPPoolSpec {
                node_selector: None,
                assignment: AssignmentMode::Automatic,
                first_block: FirstBlock::Immediate,
                max_blocks_per_node: None,
                ..spec
            }
        } else {
            spec
        };
        if self.plan.borrowing > 0 && self.rng.chance(self.plan.borrowing) {
            return self.lending(spec);
        }
        spec
    }

    /// Turns the spec into that of a pool whose nodes borrow. The pool has four blocks, which are so large that their
    /// parts are worth lending.
    fn lending(&mut self, spec: IPPoolSpec) -> IPPoolSpec {
        let gateway = self.rng.chance(5_000).then(|| "None".to_owned());
        let sizes = (self.rng.between(27, 28), self.rng.between(124, 125));
        let sizes = (u32::try_from(sizes.0).ok(), u32::try_from(sizes.1).ok());
        IPPoolSpec {
            ipv4: spec.ipv4.map(|it| IPv4Ranges {
                cidrs: it.cidrs.iter().map(|it| four_blocks(it, sizes.0)).collect(),
                block_size: sizes.0,
                block_sizing: BlockSizing::Fixed,
                gateway: gateway.clone(),
            }),
            ipv6: spec.ipv6.map(|it| IPv6Ranges {
                block_size: sizes.1,
                gateway,
                ..it
            }),
            borrowing: Borrowing::WhenExhausted,
            node_selector: spec.node_selector.filter(|_| self.rng.chance(2_000)),
            assignment: AssignmentMode::Automatic,
            first_block: FirstBlock::Immediate,
            max_blocks_per_node: spec.max_blocks_per_node.filter(|_| self.rng.chance(2_000)),
            ..spec
        }
    }

    fn some_podcidr_spec(&mut self) -> IPPoolSpec {
        let (slice, (has_v4, has_v6), node_selector) = self.some_scope();
        let reserved = match self.rng.below(6) {
            0 => vec![format!("10.244.{}.5", slice * 8 + 1)],
            1 => vec![
                format!("10.244.{0}.9-10.244.{0}.77", slice * 8 + 3),
                "fd00::5".to_owned(),
            ],
            _ => Vec::new(),
        };
        let (v4_sizes, v6_sizes, quarantines): (&[u32], &[u32], &[u32]) = if self.plan.crowded {
            (&[24, 24, 25], &[64], &[0, 1, 5])
        } else {
            (&[24, 24, 25, 26], &[64, 64, 66], &[0, 5, 20, 60])
        };
        let first = addr(&format!("fd00:0:0:{:x}::", slice * 16));
        // The result follows from values that are drawn anyway, so that all other draws stay the same.
        let block_sizing = if self.plan.fits_max_pods() && slice.is_multiple_of(2) {
            BlockSizing::FitMaxPods
        } else {
            BlockSizing::Fixed
        };
        let ipv6 = Cidr::new(first, self.plan.slice + 40).unwrap();
        IPPoolSpec {
            ipv4: has_v4.then(|| IPv4Ranges {
                cidrs: vec![format!("10.244.{}.0/{}", slice * 8, self.plan.slice)],
                block_size: Some(*self.rng.pick(v4_sizes)),
                block_sizing,
                gateway: None,
            }),
            ipv6: has_v6.then(|| IPv6Ranges {
                cidrs: vec![ipv6.to_string()],
                block_size: Some(*self.rng.pick(v6_sizes)),
                gateway: None,
            }),
            node_selector,
            priority: i32::try_from(self.rng.below(3)).unwrap(),
            assignments: self.assignments(slice, has_v4, has_v6),
            reserved,
            quarantine_seconds: *self.rng.pick(quarantines),
            ..IPPoolSpec::new(AllocationMode::NodeCIDR, Vec::new(), Vec::new())
        }
    }

    /// The ranges that a new pool over this slice assigns to nodes. They follow from values that are drawn anyway, so
    /// that all other draws stay the same. Some contain reserved addresses.
    fn assignments(&self, slice: u64, has_v4: bool, has_v6: bool) -> Vec<NodeAssignment> {
        let number = match self.plan.slice {
            _ if !self.plan.assigns_ranges() => 0,
            23 => 1,
            _ => 3,
        };
        let of = |n: u64| {
            let v4 = format!("10.244.{}.0/{}", slice * 8 + n, 24 + (slice + n) % 3);
            let v6 = addr(&format!("fd00:0:0:{:x}::", slice * 16 + n));
            let v6 = Cidr::new(v6, 64 + u8::try_from(n).unwrap() * 4).unwrap();
            let cidrs = [has_v4.then_some(v4), has_v6.then(|| v6.to_string())];
            NodeAssignment {
                node: format!("n{}", (slice + n) % self.plan.names),
                cidrs: cidrs.into_iter().flatten().collect(),
            }
        };
        (0..number).map(of).collect()
    }

    /// Removes the assignments, or gives each range to the node of the next name.
    fn reassign(&self, spec: &mut IPPoolSpec, fresh: &IPPoolSpec) {
        if spec.assignments.is_empty() {
            spec.assignments.clone_from(&fresh.assignments);
        } else if !fresh.reserved.is_empty() {
            spec.assignments.clear();
        }
        for it in &mut spec.assignments {
            let number: u64 = it.node.trim_start_matches('n').parse().unwrap();
            it.node = format!("n{}", (number + 1) % self.plan.names);
        }
    }

    pub fn edit_pool(&mut self) {
        let Some(pool) = self.some::<Pool>() else {
            return;
        };
        let mut pool = Pool::clone(&pool);
        let spec = pool.spec.as_ref().ok();
        let spec = spec.or_else(|| self.world.specs.get(&pool.uid));
        let fresh = match spec.map(|spec| spec.allocation_mode) {
            Some(AllocationMode::Blocks) => self.some_block_spec(),
            _ => self.some_podcidr_spec(),
        };
        let more = self.rng.chance(4_000);
        let Ok(spec) = &mut pool.spec else {
            // Repairs an unreadable spec by restoring the last readable one.
            pool.spec = Ok(self.world.specs.remove(&pool.uid).unwrap_or(fresh));
            pool.generation += 1;
            self.api.put(pool);
            return;
        };
        match self.rng.below(12) {
            0..3 => spec.disabled = !spec.disabled,
            3..5 => spec.priority = fresh.priority,
            5..7 => {
                // The server accepts disjoint ranges only, so a range that overlaps another one is not added.
                let disjoint = |cidrs: &[String], more: &str| {
                    cidrs.iter().all(|it| !cidr(it).overlaps(&cidr(more)))
                };
                if let (Some(v4), Some(more)) = (&mut spec.ipv4, fresh.ipv4)
                    && disjoint(&v4.cidrs, &more.cidrs[0])
                {
                    v4.cidrs.extend(more.cidrs);
                }
            }
            7..9 => {
                if let (Some(v4), Some(more)) = (&mut spec.ipv4, fresh.ipv4) {
                    v4.block_size = more.block_size;
                }
                if let (Some(v6), Some(more), true) = (&mut spec.ipv6, fresh.ipv6, more) {
                    v6.block_size = more.block_size;
                }
            }
            9..11 if more && spec.allocation_mode == AllocationMode::Blocks => {
                // Removes the first range, or replaces it if there is no other range.
                if let Some(v4) = &mut spec.ipv4 {
                    v4.cidrs.remove(0);
                    if let Some(other) = fresh.ipv4.filter(|_| v4.cidrs.is_empty()) {
                        *v4 = other;
                    }
                    if v4.cidrs.is_empty() {
                        v4.cidrs.push("10.245.200.0/27".to_owned());
                    }
                }
            }
            9 if more && self.plan.borrowing > 0 => spec.borrowing = fresh.borrowing,
            9 => spec.node_selector = fresh.node_selector,
            10 => {
                self.reassign(spec, &fresh);
                spec.reserved = fresh.reserved;
            }
            _ => {
                self.world.specs.insert(pool.uid.clone(), spec.clone());
                pool.spec = Err("spec.ipv4: invalid type".to_owned());
            }
        }
        pool.generation += 1;
        self.log(Some(&pool.name), || {
            format!("pool is edited {:?}", pool.spec)
        });
        self.api.put(pool);
    }

    pub fn delete_pool(&mut self) {
        let name: PoolName = format!("p{}", self.rng.below(self.plan.pools)).into();
        self.log(Some(&name), || "pool is deleted".to_owned());
        self.api.delete::<Pool>(&name);
    }

    pub fn change_services(&mut self) {
        let third = self.rng.below(16) * 4;
        if self.api.services.get("more").is_some() {
            self.api.remove::<ServiceRange>(&"more".into());
        } else {
            let range = format!("10.244.{third}.0/22");
            self.api.put(service("more", &range));
        }
    }
}

/// Returns a range that begins where `range` begins, and has room for four blocks of this size.
fn four_blocks(range: &str, block_size: Option<u32>) -> String {
    let len = u8::try_from(block_size.unwrap_or(28) - 2).unwrap();
    Cidr::new(cidr(range).first(), len).unwrap().to_string()
}

/// Returns the spec of a pool of podCIDRs or blocks of this size, which are allocated on demand and whose quarantine is
/// short.
pub fn small_pool(mode: AllocationMode, cidr: &str, block_size: u32) -> IPPoolSpec {
    IPPoolSpec {
        ipv4: Some(IPv4Ranges {
            cidrs: vec![cidr.to_owned()],
            block_size: Some(block_size),
            block_sizing: BlockSizing::Fixed,
            gateway: None,
        }),
        first_block: FirstBlock::OnDemand,
        quarantine_seconds: 1,
        ..IPPoolSpec::new(mode, Vec::new(), Vec::new())
    }
}

pub fn service(name: &str, range: &str) -> ServiceRange {
    ServiceRange {
        name: name.into(),
        uid: format!("service-{name}").into(),
        version: 0,
        cidrs: vec![cidr(range)],
    }
}
