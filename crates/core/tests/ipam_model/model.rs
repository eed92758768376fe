//! The model of the ledger. The model consists of lists that are searched from end to end.

use cadastre_core::{
    Addr, BlockCounts, Cidr, Dual, Family, FamilyRanges, Holding, HoldingId, HoldingState, IpRange,
};

/// The addresses of a case: four windows in each family, each of 32 units (see `unit`). The first and the last window
/// lie at the two ends of the family, and the second and third windows lie near each other in the middle.
#[derive(Clone, Copy, Debug)]
pub struct Universe {
    /// Prefix length of a unit, the usual size of a block.
    pub unit: Dual<u8>,
}

/// A block, given by its window, its first unit in the window and its size. Size 0 is half a unit, 1 a unit, and 6 the
/// whole window.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub family: Family,
    pub window: u8,
    pub unit: u8,
    pub size: u8,
}

impl Universe {
    pub const WINDOWS: u8 = 4;
    pub const UNITS: u8 = 32;

    fn unit_size(self, family: Family) -> u128 {
        1 << (family.bits() - self.unit.get(family))
    }

    pub fn addr(self, family: Family, window: u8, unit: u8) -> Addr {
        let size = self.unit_size(family);
        let middle = 0b1010 << (family.bits() - 8);
        let top = Cidr::new(Addr { family, value: 0 }, 0)
            .unwrap()
            .last()
            .value;
        let base = match window {
            0 => 0,
            1 => middle,
            2 => middle + 3 * 32 * size,
            _ => top - (32 * size - 1),
        };
        Addr {
            family,
            value: base + u128::from(unit) * size,
        }
    }

    pub fn cidr(self, place: Place) -> Cidr {
        let Place {
            family,
            window,
            unit,
            size,
        } = place;
        let len = (self.unit.get(family) + 1)
            .saturating_sub(size)
            .min(family.bits());
        Cidr::new(self.addr(family, window, unit), len).unwrap()
    }
}

/// Whether two blocks overlap. Compares only their first and last addresses, unlike the code under test.
fn meet(a: &Cidr, b: &Cidr) -> bool {
    a.family() == b.family()
        && a.first().value <= b.last().value
        && b.first().value <= a.last().value
}

/// All holdings, in the order in which they were recorded.
#[derive(Default)]
pub struct Holdings(pub Vec<(HoldingId, Holding)>);

impl Holdings {
    pub fn find(&mut self, id: HoldingId) -> Option<&mut Holding> {
        let found = self.0.iter_mut().find(|(own, _)| *own == id);
        found.map(|(_, holding)| holding)
    }

    pub fn remove(&mut self, id: HoldingId) -> Option<Holding> {
        let at = self.0.iter().position(|(own, _)| *own == id)?;
        Some(self.0.remove(at).1)
    }

    /// Returns the holdings that overlap `cidr`, sorted by CIDR and then by id.
    pub fn overlapping(&self, cidr: &Cidr) -> Vec<(Cidr, HoldingId)> {
        let mut found = Vec::new();
        for (id, holding) in &self.0 {
            if meet(&holding.cidr, cidr) {
                found.push((holding.cidr, *id));
            }
        }
        found.sort_unstable();
        found
    }

    fn is_free(&self, cidr: &Cidr) -> bool {
        !self.0.iter().any(|(_, holding)| meet(&holding.cidr, cidr))
    }
}

/// A pool as configured, with its cursors.
#[derive(Clone, Default)]
pub struct Pool {
    ranges: Dual<Option<FamilyRanges>>,
    pub blocked: Vec<IpRange>,
    cursors: Dual<u128>,
}

impl Pool {
    pub fn set_ranges(&mut self, ranges: Dual<Option<FamilyRanges>>) {
        for family in Family::ALL {
            let cidrs = cidrs_of(ranges.get(family).as_ref());
            let cursor = self.cursors.get_mut(family);
            let addr = Addr {
                family,
                value: *cursor,
            };
            let is_inside = cidrs.iter().any(|cidr| cidr.contains_addr(addr));
            if !is_inside || self.ranges.get(family).is_none() {
                *cursor = top(cidrs);
            }
        }
        self.ranges = ranges;
    }

    pub fn families(&self) -> Vec<Family> {
        Family::ALL
            .into_iter()
            .filter(|&family| self.ranges.get(family).is_some())
            .collect()
    }

    /// Every block that may be allocated, whether free or held, in descending order.
    fn blocks(&self, family: Family) -> Vec<Cidr> {
        let mut blocks = Vec::new();
        let Some(ranges) = self.ranges.get(family) else {
            return blocks;
        };
        let cidrs = ranges.cidrs.iter();
        for cidr in cidrs.filter(|cidr| cidr.len() <= ranges.block_len) {
            let size = 1 << (family.bits() - ranges.block_len);
            for n in 0..1 << (ranges.block_len - cidr.len()) {
                let addr = Addr {
                    family,
                    value: cidr.first().value + n * size,
                };
                let block = Cidr::new(addr, ranges.block_len).unwrap();
                if !self.blocked.iter().any(|span| span.overlaps(&block)) {
                    blocks.push(block);
                }
            }
        }
        blocks.sort_unstable();
        blocks.dedup();
        blocks.reverse();
        blocks
    }

    /// The free blocks, in the order in which the ledger must allocate them.
    pub fn free(&self, holdings: &Holdings, family: Family) -> Vec<Cidr> {
        let cursor = *self.cursors.get(family);
        let blocks = self.blocks(family);
        let (below, above): (Vec<_>, Vec<_>) = blocks
            .into_iter()
            .partition(|block| block.last().value <= cursor);
        below
            .into_iter()
            .chain(above)
            .filter(|block| holdings.is_free(block))
            .collect()
    }

    pub fn block_counts(&self, holdings: &Holdings, family: Family) -> BlockCounts {
        let capacity = self.blocks(family).len() as u128;
        let free = self.free(holdings, family).len() as u128;
        BlockCounts { capacity, free }
    }

    pub fn quarantined(&self, holdings: &Holdings, family: Family) -> usize {
        let in_pool =
            |holding: &Holding| holding.cidr.family() == family && self.touches(&holding.cidr);
        let quarantined = holdings
            .0
            .iter()
            .filter(|(_, holding)| holding.state == HoldingState::Quarantined && in_pool(holding));
        quarantined.count()
    }

    /// Moves the cursor to the highest address of the pool below the block.
    pub fn pass(&mut self, block: &Cidr) {
        let family = block.family();
        let cidrs = cidrs_of(self.ranges.get(family).as_ref());
        let below = cidrs.iter().filter(|cidr| cidr.first() < block.first());
        let below = below
            .map(|cidr| cidr.last().value.min(block.first().value - 1))
            .max();
        *self.cursors.get_mut(family) = below.unwrap_or_else(|| top(cidrs));
    }

    pub fn covers(&self, cidr: &Cidr) -> bool {
        cidrs_of(self.ranges.get(cidr.family()).as_ref())
            .iter()
            .any(|own| own.first() <= cidr.first() && cidr.last() <= own.last())
    }

    pub fn touches(&self, cidr: &Cidr) -> bool {
        let cidrs = cidrs_of(self.ranges.get(cidr.family()).as_ref());
        cidrs.iter().any(|own| meet(own, cidr))
    }
}

fn cidrs_of(ranges: Option<&FamilyRanges>) -> &[Cidr] {
    ranges.map_or(&[], |ranges| &ranges.cidrs)
}

fn top(cidrs: &[Cidr]) -> u128 {
    cidrs
        .iter()
        .map(|cidr| cidr.last().value)
        .max()
        .unwrap_or(0)
}
