//! A range cut into equal cells, and what each of them is: the one model of the picture, for the terminal and
//! for the page.
//!
//! # Guarantees
//! - A picture costs one pass over what lies in it, whatever lies outside.
//! - Cells are disjoint and sorted; what is simply free is left out.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::address::RangeFact;
use crate::inventory::{Cover, Inventory};
use crate::show::{BlockRow, BlockState};
use cadastre_controller::pools::PoolState;
use cadastre_core::{Addr, Cidr, Span};

/// What a cell is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// A block that its node gives addresses from
    Block,
    /// A block that its node's list does not have yet, or that is asked back or drains
    Changing,
    /// The podCIDR of a node
    PodCidr,
    /// A range of a node that is gone
    Quarantine,
    /// An address in use
    Address,
    /// Never given out
    Reserved,
}

/// A cell that is not simply free, or several in a row that one range covers.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cell {
    /// The range; where several share the cell, or a part of it is free, the cell
    pub cidr: Cidr,
    /// Its place among the cells
    pub at: u64,
    /// How many cells it covers
    pub count: u64,
    /// What it is
    pub kind: Kind,
    /// Thousandths of it that live nodes have
    pub held: u16,
    /// Thousandths that rest
    pub resting: u16,
    /// Thousandths that are never carved
    pub reserved: u16,
    /// Thousandths of what is held that are in use
    pub fill: u16,
    /// The nodes that have any of it; of many only the first few. Of an address the pod
    pub owners: Vec<String>,
    /// Whether several nodes have some of the same addresses
    pub overlaps: bool,
}

/// Owners of one cell that are named.
const OWNERS: usize = 4;

/// A range that a node has or had, and how full it is.
#[derive(Debug)]
pub(super) struct Range {
    pub fact: RangeFact,
    pub kind: Kind,
    /// How a block stands
    pub state: Option<BlockState>,
    /// Addresses in use
    pub used: u64,
    /// Addresses that pods may have
    pub capacity: u128,
    /// Whether another node has some of its addresses, too
    pub overlaps: bool,
}

/// The ranges that share an address with that one, sorted.
pub(super) fn ranges(within: &Cidr, inventory: &Inventory) -> Vec<Range> {
    let covers = inventory.covers_in(within);
    let mut ranges: Vec<Range> = covers.map(|it| Range::of(&it, inventory)).collect();
    // Sorted as they are, the one that reaches farthest tells of all before.
    let mut farthest: Option<usize> = None;
    for at in 0..ranges.len() {
        if ranges[at].kind == Kind::Quarantine {
            continue;
        }
        let before = farthest.filter(|it| ranges[*it].fact.cidr.contains(&ranges[at].fact.cidr));
        if let Some(before) = before {
            let overlaps = ranges[before].fact.node != ranges[at].fact.node;
            ranges[before].overlaps |= overlaps;
            ranges[at].overlaps |= overlaps;
        } else {
            farthest = Some(at);
        }
    }
    ranges
}

impl Range {
    fn of(cover: &Cover, inventory: &Inventory) -> Self {
        let fact = RangeFact::of(cover, inventory);
        let (state, used) = match cover {
            Cover::Block(entry) => (
                Some(BlockRow::of(entry, inventory).state),
                inventory.used_in(entry),
            ),
            _ => (None, inventory.in_use(&fact.cidr).len() as u64),
        };
        let kind = match state {
            _ if fact.resting => Kind::Quarantine,
            None => Kind::PodCidr,
            Some(BlockState::Active | BlockState::Unconfirmed) => Kind::Block,
            Some(_) => Kind::Changing,
        };
        let counts = [fact.used, fact.cooling, fact.free];
        let told: Option<i64> = counts.into_iter().sum();
        Range {
            kind,
            state,
            used,
            capacity: told.map_or(fact.cidr.size(), |it| it.unsigned_abs().into()),
            overlaps: false,
            fact,
        }
    }
}

/// The longest prefix with which all CIDRs together have no more than so many cells.
pub(super) fn cell_size(cidrs: &[Cidr], block_size: u8, cells: u64) -> u8 {
    let fits = |len: &u8| {
        let all = cidrs.iter().map(|cidr| cells_of(cidr, *len));
        all.fold(0u128, u128::saturating_add) <= u128::from(cells.max(cidrs.len() as u64))
    };
    (0..=block_size).rev().find(fits).unwrap_or(0)
}

/// A CIDR that is smaller than a cell is one cell.
pub(super) fn cells_of(cidr: &Cidr, len: u8) -> u128 {
    let bits = len.saturating_sub(cidr.len());
    1u128.checked_shl(bits.into()).unwrap_or(u128::MAX)
}

/// The cell of that number.
pub(super) fn nth(within: &Cidr, cell_size: u8, at: u64) -> Option<Cidr> {
    let order = within.family().bits().checked_sub(cell_size)?;
    let step = 1u128.checked_shl(order.into()).unwrap_or(0);
    let first = within.first();
    let value = first.value.checked_add(u128::from(at).checked_mul(step)?)?;
    Cidr::new(Addr { value, ..first }, cell_size).filter(|cell| within.contains(cell))
}

/// The first and the last cell that an interval touches.
fn ends(span: Span, within: &Cidr, cell_size: u8) -> Option<(u64, u64)> {
    let span = span.within(within)?;
    let order = within.family().bits().checked_sub(cell_size)?;
    let at = |addr: Addr| {
        let offset = addr.value - within.first().value;
        u64::try_from(offset.checked_shr(order.into()).unwrap_or(0)).ok()
    };
    Some((at(span.first())?, at(span.last())?))
}

/// The cells that an interval touches, with how many of its addresses are in each.
fn touched(span: Span, within: Cidr, cell_size: u8) -> impl Iterator<Item = (u64, u128)> {
    let ends = ends(span, &within, cell_size).into_iter();
    let numbers = ends.flat_map(|(first, last)| first..=last);
    numbers.filter_map(move |at| {
        let part = span.within(&nth(&within, cell_size, at)?)?;
        let more = part.last().value - part.first().value;
        Some((at, more.saturating_add(1)))
    })
}

/// Where a range lies among the cells: the first one, and how many.
pub(super) fn place(range: &Cidr, within: &Cidr, cell_size: u8) -> Option<(u64, u64)> {
    let (first, last) = ends((*range).into(), within, cell_size)?;
    Some((first, (last - first).saturating_add(1)))
}

/// What lies in one cell.
#[derive(Default)]
struct Content {
    ranges: Vec<usize>,
    held: u128,
    resting: u128,
    reserved: u128,
}

/// Cuts a range of a pool into cells.
pub(super) fn cells(within: Cidr, cell_size: u8, ranges: &[Range], state: &PoolState) -> Vec<Cell> {
    let mut contents: BTreeMap<u64, Content> = BTreeMap::new();
    for (number, range) in ranges.iter().enumerate() {
        for (at, size) in touched(range.fact.cidr.into(), within, cell_size) {
            let content = contents.entry(at).or_default();
            content.ranges.push(number);
            let sum = match range.kind {
                Kind::Quarantine => &mut content.resting,
                _ => &mut content.held,
            };
            *sum = sum.saturating_add(size);
        }
    }
    for span in state.reserved.iter().chain(&state.on_request) {
        for (at, size) in touched(*span, within, cell_size) {
            let content = contents.entry(at).or_default();
            content.reserved = content.reserved.saturating_add(size);
        }
    }
    let mut cells: Vec<Cell> = Vec::new();
    let mut before: Option<(u64, Content)> = None;
    for (at, content) in contents {
        let Some(cidr) = nth(&within, cell_size, at) else {
            continue;
        };
        let goes_on = before
            .as_ref()
            .is_some_and(|(last, it)| *last + 1 == at && it.goes_on(&content, cidr.size()));
        match cells.last_mut().filter(|_| goes_on) {
            Some(cell) => cell.count += 1,
            None => cells.push(content.cell(cidr, at, ranges)),
        }
        before = Some((at, content));
    }
    cells
}

impl Content {
    /// Whether the next cell is of the same one range, or reserved as this one is.
    fn goes_on(&self, next: &Self, size: u128) -> bool {
        let is_full =
            self.held + self.resting >= size || (self.ranges.is_empty() && self.reserved >= size);
        let same = self.ranges == next.ranges && self.reserved == next.reserved;
        is_full && same && self.ranges.len() <= 1
    }

    fn cell(&self, cidr: Cidr, at: u64, ranges: &[Range]) -> Cell {
        let size = cidr.size();
        let all = || self.ranges.iter().filter_map(|at| ranges.get(*at));
        let live = || all().filter(|it| it.kind != Kind::Quarantine);
        let sum = |all: &mut dyn Iterator<Item = u128>| all.fold(0, u128::saturating_add);
        let used = sum(&mut live().map(|it| it.used.into()));
        let capacity = sum(&mut live().map(|it| it.capacity));
        let mut owners: Vec<String> = Vec::new();
        for range in live() {
            if owners.len() < OWNERS && !owners.contains(&range.fact.node) {
                owners.push(range.fact.node.clone());
            }
        }
        let whole = match (&*self.ranges, all().next()) {
            ([_], Some(one)) if one.fact.cidr.contains(&cidr) => Some(one.fact.cidr),
            _ => None,
        };
        Cell {
            cidr: whole.unwrap_or(cidr),
            at,
            count: 1,
            kind: live()
                .chain(all())
                .next()
                .map_or(Kind::Reserved, |it| it.kind),
            held: part_of(self.held, size),
            resting: part_of(self.resting, size),
            reserved: part_of(self.reserved, size),
            fill: part_of(used, capacity),
            overlaps: self.ranges.len() > 1 && all().any(|it| it.overlaps),
            owners,
        }
    }
}

/// The addresses in use of a range, a cell each.
pub(super) fn addresses(within: Cidr, inventory: &Inventory) -> Vec<Cell> {
    let first = within.first().value;
    let used = inventory.in_use(&within).into_iter();
    let cell = |(addr, pod): (Addr, &str)| Cell {
        cidr: Cidr::host(addr),
        at: u64::try_from(addr.value - first).unwrap_or(u64::MAX),
        count: 1,
        kind: Kind::Address,
        held: 1000,
        resting: 0,
        reserved: 0,
        fill: 1000,
        owners: vec![pod.to_owned()],
        overlaps: false,
    };
    used.map(cell).collect()
}

/// In thousandths; what there is a little of is never nothing.
fn part_of(some: u128, all: u128) -> u16 {
    if some == 0 || all == 0 {
        return 0;
    }
    let scaled = match some.checked_mul(1000) {
        Some(scaled) => scaled / all,
        None => some / (all / 1000).max(1),
    };
    u16::try_from(scaled.clamp(1, 1000)).unwrap_or(1000)
}
