//! Benchmarks of the ledger: allocating and releasing blocks, lookups by address, and memory.
//!
//! Each case has a number of holdings at random places of a pool. The pool starts at 10.0.0.0 or fd00:: and is just
//! large enough for the wanted fill level. IPv6 blocks are /64. IPv4 blocks are /24 if 10.0.0.0/8 has enough of them
//! (65,536); otherwise the blocks are as much smaller as necessary. A full pool has 0.1 % of its blocks free. Of 100
//! blocks, 0.1 % would be less than one block, so no case is a full pool with 100 holdings.
//!
//! The fill level stays constant during a measurement. After each timed batch of allocations, as many random holdings
//! are released. After each timed batch of releases, as many blocks are allocated. Because the released holdings are
//! random, the free blocks stay at random places. `carve`, which allocates a block, should take less than 200 ns with
//! 1,000,000 holdings, and about as long with 100 holdings.

#![allow(missing_docs, reason = "the macros of criterion make public items")]

use std::hint::black_box;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use cadastre_core::{
    Addr, Cidr, Dual, Family, FamilyRanges, Holder, HoldingId, HoldingState, IpRange, Pool,
    RangeLedger,
};
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, measurement::WallTime};

/// The maximum number of operations between two readings of the clock.
const BATCH: usize = 64;

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .sample_size(20)
        .configure_from_args();
    for family in Family::ALL {
        let mut group = criterion.benchmark_group(family.to_string());
        for holdings in [100, 1_000, 10_000, 100_000, 1_000_000] {
            for (fill, per_mille) in [("empty", 62), ("half", 500), ("full", 999)] {
                if holdings > 100 || per_mille < 999 {
                    let make = || Case::new(family, holdings, per_mille);
                    measure(&mut group, &format!("{holdings}/{fill}"), &make);
                }
            }
        }
        group.finish();
    }
    criterion.final_summary();
    report_memory();
}

/// A ledger and a pool at a certain fill level.
struct Case {
    ledger: RangeLedger,
    pool: Pool,
    holdings: Vec<HoldingId>,
    blocks: u64,
    order: u32,
    random: Random,
}

impl Case {
    fn new(family: Family, holdings: u64, per_mille: u64) -> Self {
        let blocks = holdings * 1000 / per_mille;
        let mut case = Self::vacant(family, blocks);
        // Records each block with a probability that makes the total exactly `holdings`.
        for n in 0..blocks {
            let missing = holdings - case.holdings.len() as u64;
            if case.random.below(blocks - n) < missing {
                let cidr = case.block(family, n);
                case.holdings
                    .push(case.ledger.record(holder(n), cidr, HoldingState::Allocated));
            }
        }
        case
    }

    fn vacant(family: Family, blocks: u64) -> Self {
        let needed = blocks.next_power_of_two().trailing_zeros();
        let order = match family {
            Family::V4 => 24 - needed.max(16),
            Family::V6 => 64,
        };
        let first = base(family);
        let last = Addr {
            value: first.value + (u128::from(blocks) << order) - 1,
            ..first
        };
        let cidrs = IpRange::new(first, last)
            .unwrap_or_else(|| first.into())
            .to_cidrs();
        let ranges = FamilyRanges {
            cidrs,
            block_len: u8::try_from(u32::from(family.bits()) - order).unwrap_or_default(),
        };
        let mut of_family = Dual::default();
        *of_family.get_mut(family) = Some(ranges);
        Self {
            ledger: RangeLedger::default(),
            pool: Pool::new(of_family),
            holdings: Vec::new(),
            blocks,
            order,
            random: Random(7),
        }
    }

    fn block(&self, family: Family, n: u64) -> Cidr {
        let addr = Addr {
            value: base(family).value + (u128::from(n) << self.order),
            ..base(family)
        };
        Cidr::new(addr, self.pool.block_len(family).unwrap_or_default())
            .unwrap_or_else(|| Cidr::host(addr))
    }

    fn carve(&mut self) {
        let n = self.holdings.len() as u64;
        if let Ok(ids) = self.ledger.carve(&mut self.pool, holder(n), |_| None) {
            self.holdings.extend(ids.v4.or(ids.v6));
        }
    }

    /// Moves `count` random holdings to the end of `self.holdings`, so that `release` can remove them from the end.
    fn draw(&mut self, count: usize) {
        let len = self.holdings.len();
        for n in 0..count {
            let drawn = self.random.index(len - n);
            self.holdings.swap(drawn, len - n - 1);
        }
    }

    fn release(&mut self) {
        if let Some(id) = self.holdings.pop() {
            black_box(self.ledger.release(id));
        }
    }

    fn batch(&self, left: u64) -> usize {
        let holes = usize::try_from(self.blocks).unwrap_or(BATCH) - self.holdings.len();
        usize::try_from(left).unwrap_or(BATCH).min(BATCH).min(holes)
    }
}

fn measure(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, make: &dyn Fn() -> Case) {
    // All three benchmarks use the same case. A filter on the command line can exclude any of the benchmarks, so the
    // first benchmark that runs creates the case.
    let mut made = None;
    group.bench_function(BenchmarkId::new("carve", name), |bench| {
        let case = made.get_or_insert_with(make);
        bench.iter_custom(|iterations| {
            in_batches(case, iterations, |case, batch| {
                let start = Instant::now();
                (0..batch).for_each(|_| case.carve());
                let elapsed = start.elapsed();
                case.draw(batch);
                (0..batch).for_each(|_| case.release());
                elapsed
            })
        });
    });
    group.bench_function(BenchmarkId::new("release", name), |bench| {
        let case = made.get_or_insert_with(make);
        bench.iter_custom(|iterations| {
            in_batches(case, iterations, |case, batch| {
                case.draw(batch);
                let start = Instant::now();
                (0..batch).for_each(|_| case.release());
                let elapsed = start.elapsed();
                (0..batch).for_each(|_| case.carve());
                elapsed
            })
        });
    });
    group.bench_function(BenchmarkId::new("at", name), |bench| {
        let case = made.get_or_insert_with(make);
        let family = case.pool.families().next().unwrap_or(Family::V4);
        bench.iter(|| {
            let n = case.random.below(case.blocks);
            let addr = case.block(family, n).last();
            case.ledger.at(addr).count()
        });
    });
}

fn in_batches(
    case: &mut Case,
    iterations: u64,
    mut timed: impl FnMut(&mut Case, usize) -> Duration,
) -> Duration {
    let mut elapsed = Duration::ZERO;
    let mut left = iterations;
    while left > 0 {
        let batch = case.batch(left);
        elapsed += timed(case, batch);
        left -= batch as u64;
    }
    elapsed
}

/// Prints how many bytes of memory a holding takes, and how long its allocation takes.
#[expect(clippy::print_stdout, reason = "the figure is the purpose")]
fn report_memory() {
    println!("1,000,000 ranges, each with a holder of its own:");
    for family in Family::ALL {
        let mut case = Case::vacant(family, 1 << 20);
        let start = Instant::now();
        (0..1_000_000).for_each(|_| case.carve());
        let each = start.elapsed() / 1_000_000;
        println!(
            "{family} carved one by one: {} bytes each, {each:?} each",
            bytes(&case.ledger)
        );
        for (fill, per_mille) in [
            ("all blocks", 999),
            ("half the blocks", 500),
            ("6 % of the blocks", 62),
        ] {
            let case = Case::new(family, 1_000_000, per_mille);
            println!(
                "{family} scattered over {fill}: {} bytes each",
                bytes(&case.ledger)
            );
        }
    }
}

fn bytes(ledger: &RangeLedger) -> usize {
    ledger.heap_bytes() / ledger.len()
}

fn base(family: Family) -> Addr {
    match family {
        Family::V4 => Addr::from(IpAddr::from([10, 0, 0, 0])),
        Family::V6 => Addr::from(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 0])),
    }
}

fn holder(n: u64) -> Holder {
    Holder(u32::try_from(n % 1_000_000).unwrap_or_default())
}

/// An xorshift generator with a fixed seed, so that every run uses the same random places.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap_or_default()
    }
}
