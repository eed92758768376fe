//! Random operations that are applied to the ledger and to the model.

use cadastre_core::{
    Addr, Cidr, Dual, Family, FamilyRanges, Holder, Holding, HoldingId, HoldingState, IpRange,
    Pool, PoolExhausted, RangeLedger,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::model::{self, Place, Universe};

const POOLS: usize = 2;
const HOLDERS: u32 = 6;

/// The CIDRs of a pool in one family, and the size of the pool's blocks. The size is the number of times that half a
/// unit is doubled.
type Ranges = (Vec<Place>, u8);

/// An operation. Each `usize` selects a pool, a holding or an id by its index.
#[derive(Clone, Debug)]
pub enum Op {
    Record(Place, Holder, HoldingState),
    /// Allocates a block from a pool. Skips every block that contains the first address of one of the places.
    Carve(usize, Holder, Vec<Place>),
    /// Releases the holding of a random id out of all ids that were ever returned. Most of these holdings no longer
    /// exist.
    Release(usize),
    ReleaseLive(usize),
    ReleaseAllOf(Holder),
    /// Sets the state of the holding of a random id out of all ids that were ever returned.
    SetState(usize, HoldingState),
    /// Moves a live holding to another holder.
    SetHolder(usize, Holder),
    SetBlocked(usize, Vec<(Place, Place)>),
    /// Sets the ranges of a pool. The first `Option` is for IPv4, the second for IPv6.
    SetRanges(usize, Option<Ranges>, Option<Ranges>),
    Query(Place),
}

pub fn op() -> impl Strategy<Value = Op> {
    let (pool, index) = (0..POOLS, any::<u16>().prop_map(usize::from));
    let holder = (0..HOLDERS).prop_map(Holder);
    // Most holdings are at most as large as a window; some are up to sixteen times as large, and a few are a whole
    // family.
    let recorded = prop_oneof![30 => 0..=6_u8, 1 => 7..=10_u8, 1 => Just(200)];
    let record = (place(recorded), holder.clone(), state());
    let carve = (
        pool.clone(),
        holder.clone(),
        prop_oneof![3 => Just(vec![]), 1 => vec(place(0..=1_u8), 0..20)],
    );
    let span = (place(0..=4_u8), place(0..=4_u8));
    prop_oneof![
        6 => record.prop_map(|(place, holder, state)| Op::Record(place, holder, state)),
        20 => carve.prop_map(|(pool, holder, avoid)| Op::Carve(pool, holder, avoid)),
        2 => index.clone().prop_map(Op::Release),
        18 => index.clone().prop_map(Op::ReleaseLive),
        1 => holder.clone().prop_map(Op::ReleaseAllOf),
        4 => (index.clone(), state()).prop_map(|(any, state)| Op::SetState(any, state)),
        4 => (index, holder).prop_map(|(live, holder)| Op::SetHolder(live, holder)),
        1 => (pool.clone(), vec(span, 0..5)).prop_map(|(pool, spans)| Op::SetBlocked(pool, spans)),
        1 => (pool, ranges(Family::V4), ranges(Family::V6)).prop_map(|(pool, v4, v6)| Op::SetRanges(pool, v4, v6)),
        8 => place(0..=7_u8).prop_map(Op::Query),
    ]
}

fn place(size: impl Strategy<Value = u8>) -> impl Strategy<Value = Place> {
    let family = prop_oneof![Just(Family::V4), Just(Family::V6)];
    (family, 0..Universe::WINDOWS, 0..Universe::UNITS, size).prop_map(
        |(family, window, unit, size)| Place {
            family,
            window,
            unit,
            size,
        },
    )
}

fn state() -> impl Strategy<Value = HoldingState> {
    prop_oneof![
        Just(HoldingState::InFlight),
        Just(HoldingState::Indeterminate),
        Just(HoldingState::Allocated),
        Just(HoldingState::Quarantined)
    ]
}

fn ranges(family: Family) -> impl Strategy<Value = Option<Ranges>> {
    let places = vec(place(1..=6_u8), 0..4).prop_map(move |mut places| {
        for place in &mut places {
            place.family = family;
        }
        places
    });
    proptest::option::weighted(0.8, (places, 0..=4_u8))
}

/// The ledger with its pools, and their model, to which the same operations are applied.
pub struct Pair {
    universe: Universe,
    ledger: RangeLedger,
    holdings: model::Holdings,
    pools: [(Pool, model::Pool); POOLS],
    /// Every id that was ever returned.
    ids: Vec<HoldingId>,
}

type Checked = Result<(), TestCaseError>;

impl Pair {
    pub fn new(universe: Universe) -> Self {
        let fresh = || (Pool::new(Dual::default()), model::Pool::default());
        let mut pair = Self {
            universe,
            ledger: RangeLedger::default(),
            holdings: model::Holdings::default(),
            pools: [fresh(), fresh()],
            ids: Vec::new(),
        };
        let window = |family, window| {
            vec![Place {
                family,
                window,
                unit: 0,
                size: 6,
            }]
        };
        let (v4, v6) = (window(Family::V4, 1), window(Family::V6, 3));
        pair.set_ranges(0, Some(&(v4.clone(), 0)), Some(&(v6, 0)));
        let v6 = window(Family::V6, 0);
        pair.set_ranges(1, Some(&(v4, 1)), Some(&(v6, 2)));
        pair
    }

    pub fn apply(&mut self, op: &Op) -> Checked {
        match op {
            Op::Record(place, holder, state) => {
                let holding = Holding {
                    holder: *holder,
                    cidr: self.universe.cidr(*place),
                    state: *state,
                };
                let id = self.ledger.record(*holder, holding.cidr, *state);
                self.add(id, holding)?;
            }
            Op::Carve(pool, holder, avoid) => self.carve(*pool, *holder, avoid)?,
            Op::Release(any) => self.release(self.any(*any))?,
            Op::ReleaseLive(live) => self.release(self.live(*live))?,
            Op::ReleaseAllOf(holder) => {
                let all: Vec<_> = self.ledger.of(*holder).map(|(id, _)| id).collect();
                all.into_iter().try_for_each(|id| self.release(Some(id)))?;
            }
            Op::SetState(any, state) => {
                let Some(id) = self.any(*any) else {
                    return Ok(());
                };
                let found = self.holdings.find(id);
                let found = found.map(|holding| holding.state = *state).is_some();
                prop_assert_eq!(self.ledger.set_state(id, *state), found);
            }
            Op::SetHolder(live, holder) => {
                let Some(id) = self.live(*live) else {
                    return Ok(());
                };
                let found = self.holdings.find(id);
                let found = found.map(|holding| holding.holder = *holder).is_some();
                prop_assert_eq!(self.ledger.set_holder(id, *holder), found);
            }
            Op::SetBlocked(pool, spans) => {
                let spans: Vec<_> = spans.iter().filter_map(|ends| self.span(*ends)).collect();
                let (pool, model) = &mut self.pools[*pool];
                model.blocked.clone_from(&spans);
                pool.set_blocked(spans);
            }
            Op::SetRanges(pool, v4, v6) => self.set_ranges(*pool, v4.as_ref(), v6.as_ref()),
            Op::Query(place) => self.query(&self.universe.cidr(*place))?,
        }
        prop_assert_eq!(self.ledger.len(), self.holdings.0.len());
        Ok(())
    }

    fn carve(&mut self, pool: usize, holder: Holder, avoid: &[Place]) -> Checked {
        let avoid: Vec<Addr> = avoid
            .iter()
            .map(|place| self.universe.cidr(*place).first())
            .collect();
        let avoid = |cidr: &Cidr| avoid.iter().copied().find(|addr| cidr.contains_addr(*addr));
        let (pool, model) = &mut self.pools[pool];
        let answer = self.ledger.carve(pool, holder, avoid);
        let mut expected = Vec::new();
        for family in model.families() {
            let free = model.free(&self.holdings, family);
            if let Some(block) = free.iter().find(|block| avoid(block).is_none()) {
                expected.push(*block);
                continue;
            }
            let capacity = model.block_counts(&self.holdings, family).capacity;
            let avoided = free.len() as u128;
            let full = PoolExhausted {
                family,
                block_len: pool.block_len(family).unwrap(),
                capacity,
                covered: capacity - avoided,
                avoided,
                quarantined: model.quarantined(&self.holdings, family),
            };
            prop_assert_eq!(answer, Err(full));
            return Ok(());
        }
        let ids = answer
            .map_err(|full| TestCaseError::fail(format!("{full}, but {expected:?} are free")))?;
        let ids: Vec<_> = [ids.v4, ids.v6].into_iter().flatten().collect();
        prop_assert_eq!(ids.len(), expected.len());
        for block in &expected {
            model.pass(block);
        }
        for (id, cidr) in ids.into_iter().zip(expected) {
            let holding = Holding {
                holder,
                cidr,
                state: HoldingState::InFlight,
            };
            self.add(id, holding)?;
        }
        Ok(())
    }

    fn add(&mut self, id: HoldingId, holding: Holding) -> Checked {
        prop_assert!(!self.ids.contains(&id), "{id:?} is given twice");
        prop_assert_eq!(self.ledger.get(id), Some(holding));
        self.ids.push(id);
        self.holdings.0.push((id, holding));
        Ok(())
    }

    fn release(&mut self, id: Option<HoldingId>) -> Checked {
        let Some(id) = id else { return Ok(()) };
        prop_assert_eq!(self.ledger.release(id), self.holdings.remove(id));
        prop_assert_eq!(self.ledger.get(id), None);
        Ok(())
    }

    fn any(&self, index: usize) -> Option<HoldingId> {
        self.ids.get(index % self.ids.len().max(1)).copied()
    }

    fn live(&self, index: usize) -> Option<HoldingId> {
        self.holdings
            .0
            .get(index % self.holdings.0.len().max(1))
            .map(|(id, _)| *id)
    }

    fn span(&self, (low, high): (Place, Place)) -> Option<IpRange> {
        let (low, high) = (self.universe.cidr(low), self.universe.cidr(high));
        IpRange::new(low.first(), high.last()).or_else(|| Some(low.into()))
    }

    fn set_ranges(&mut self, pool: usize, v4: Option<&Ranges>, v6: Option<&Ranges>) {
        let ranges = |family, part: Option<&Ranges>| {
            let (places, shorter) = part?;
            let cidrs = places.iter().map(|place| self.universe.cidr(*place));
            Some(FamilyRanges {
                cidrs: cidrs.collect(),
                block_len: (self.universe.unit.get(family) + 1 - shorter).min(family.bits()),
            })
        };
        let ranges = Dual {
            v4: ranges(Family::V4, v4),
            v6: ranges(Family::V6, v6),
        };
        let (pool, model) = &mut self.pools[pool];
        model.set_ranges(ranges.clone());
        pool.set_ranges(ranges);
    }

    fn query(&self, cidr: &Cidr) -> Checked {
        let answer = self.ledger.overlapping(cidr);
        let mut answer: Vec<_> = answer.map(|(id, holding)| (holding.cidr, id)).collect();
        prop_assert!(answer.is_sorted_by_key(|(cidr, _)| *cidr), "{answer:?}");
        answer.sort_unstable();
        prop_assert_eq!(answer, self.holdings.overlapping(cidr));
        for (pool, model) in &self.pools {
            prop_assert_eq!(pool.covers(cidr), model.covers(cidr));
            prop_assert_eq!(pool.touches(cidr), model.touches(cidr));
        }
        Ok(())
    }

    /// Compares the results of all queries of the ledger with those of the model.
    pub fn compare_all(&self) -> Checked {
        let all = &self.holdings.0;
        for id in &self.ids {
            let expected = all.iter().find(|(own, _)| own == id);
            prop_assert_eq!(self.ledger.get(*id), expected.map(|(_, holding)| *holding));
        }
        for holder in (0..HOLDERS).map(Holder) {
            let mut of_holder: Vec<_> = self.ledger.of(holder).map(|(id, _)| id).collect();
            of_holder.sort_unstable();
            let expected = all.iter().filter(|(_, holding)| holding.holder == holder);
            let mut expected: Vec<_> = expected.map(|(id, _)| *id).collect();
            expected.sort_unstable();
            prop_assert_eq!(of_holder, expected);
        }
        for family in Family::ALL {
            for (pool, model) in &self.pools {
                let counts = self.ledger.block_counts(pool, family);
                prop_assert_eq!(counts, model.block_counts(&self.holdings, family));
            }
            for window in 0..Universe::WINDOWS {
                for unit in 0..Universe::UNITS {
                    let addr = self.universe.addr(family, window, unit);
                    let at = self.ledger.at(addr);
                    let mut at: Vec<_> = at.map(|(id, holding)| (holding.cidr, id)).collect();
                    at.sort_unstable();
                    prop_assert_eq!(at, self.holdings.overlapping(&Cidr::host(addr)));
                }
            }
            self.query(&Cidr::new(Addr { family, value: 0 }, 0).unwrap())?;
        }
        Ok(())
    }
}
