//! Divides a range into cells of equal size, from which the pictures in the terminal and on the web page are made.
//!
//! # Guarantees
//! - The cost is one pass over the ranges inside the picture. Ranges outside cost nothing.
//! - Cells are disjoint and sorted. Cells that are entirely free are left out.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::address::RangeFact;
use crate::inventory::{Cover, Inventory};
use crate::show::{BlockRow, BlockState};
use cadastre_controller::pools::PoolState;
use cadastre_core::{Addr, Cidr, IpRange};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum CellKind {
    /// A block from which its node assigns addresses
    Block,
    /// A block that the NodeSubnet of its node does not list yet, or that is recalled, drained or released
    Changing,
    /// The podCIDR of a node
    PodCidr,
    /// A range in quarantine, because its node was deleted
    Quarantine,
    /// An address in use
    Address,
    /// Addresses that are never assigned automatically
    Reserved,
}

/// A cell that is not entirely free, or several adjacent cells that one range covers or that are entirely reserved.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Cell {
    /// The range that covers the cell. If several ranges share the cell, or if a part of the cell is free, this is the
    /// cell itself
    pub cidr: Cidr,
    /// The number of the cell, or of the first of several adjacent cells. The cells of the view are numbered from 0
    pub at: u64,
    /// How many adjacent cells this entry stands for
    pub count: u64,
    pub kind: CellKind,
    /// How many thousandths of the cell are allocated to live nodes
    pub allocated: u16,
    /// How many thousandths of the cell are in quarantine
    pub quarantined: u16,
    /// How many thousandths of the cell are reserved
    pub reserved: u16,
    /// How many thousandths of the addresses are in use. All addresses of a live node's range are counted if the range
    /// touches the cell
    pub fill: u16,
    /// The first few nodes that have a part of the cell; if the cell is an address in use, the pod of the address
    pub owners: Vec<String>,
    /// Whether several nodes have the same addresses in the cell
    pub overlaps: bool,
}

/// At most this many owners of a cell are named.
const OWNERS: usize = 4;

/// A block or podCIDR that a node has, or had before the quarantine.
#[derive(Debug)]
pub(super) struct CellRange {
    pub fact: RangeFact,
    pub kind: CellKind,
    /// The state of a block; `None` for a podCIDR
    pub state: Option<BlockState>,
    pub used: u64,
    /// How many addresses of the range can be assigned to pods. If no agent reports counts, this is the size of the
    /// range
    pub capacity: u128,
    /// Whether another live node has some of the same addresses
    pub overlaps: bool,
}

/// Returns the ranges that overlap `within`, sorted. Marks ranges of different live nodes that overlap each other.
pub(super) fn ranges(within: &Cidr, inventory: &Inventory) -> Vec<CellRange> {
    let covers = inventory.covers_in(within);
    let mut ranges: Vec<CellRange> = covers.map(|it| CellRange::of(&it, inventory)).collect();
    // The ranges are sorted, and if two CIDRs overlap, one contains the other. So each range need only be compared with
    // the earlier range that reaches farthest.
    let mut farthest: Option<usize> = None;
    for at in 0..ranges.len() {
        if ranges[at].kind == CellKind::Quarantine {
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

impl CellRange {
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
            _ if fact.quarantined => CellKind::Quarantine,
            None => CellKind::PodCidr,
            Some(BlockState::Active | BlockState::Unconfirmed) => CellKind::Block,
            Some(_) => CellKind::Changing,
        };
        let counts = [fact.used, fact.cooling, fact.free];
        let sum: Option<i64> = counts.into_iter().sum();
        CellRange {
            kind,
            state,
            used,
            capacity: sum.map_or(fact.cidr.size(), |it| it.unsigned_abs().into()),
            overlaps: false,
            fact,
        }
    }
}

/// Returns the prefix length of a cell. The cells are as small as two limits allow: the CIDRs together have at most
/// `cells` cells, and no cell is smaller than a block.
pub(super) fn cell_size(cidrs: &[Cidr], block_size: u8, cells: u64) -> u8 {
    let fits = |len: &u8| {
        let all = cidrs.iter().map(|cidr| cells_of(cidr, *len));
        all.fold(0u128, u128::saturating_add) <= u128::from(cells.max(cidrs.len() as u64))
    };
    (0..=block_size).rev().find(fits).unwrap_or(0)
}

/// Returns the number of cells in a CIDR. A CIDR that is smaller than a cell counts as one cell.
pub(super) fn cells_of(cidr: &Cidr, len: u8) -> u128 {
    let bits = len.saturating_sub(cidr.len());
    1u128.checked_shl(bits.into()).unwrap_or(u128::MAX)
}

/// Returns the cell of `within` with this number, or `None` if there is no such cell.
pub(super) fn nth(within: &Cidr, cell_size: u8, at: u64) -> Option<Cidr> {
    let order = within.family().bits().checked_sub(cell_size)?;
    let step = 1u128.checked_shl(order.into()).unwrap_or(0);
    let first = within.first();
    let value = first.value.checked_add(u128::from(at).checked_mul(step)?)?;
    Cidr::new(Addr { value, ..first }, cell_size).filter(|cell| within.contains(cell))
}

/// Returns the numbers of the first and the last cell of `within` that a span of addresses touches.
fn ends(span: IpRange, within: &Cidr, cell_size: u8) -> Option<(u64, u64)> {
    let span = span.within(within)?;
    let order = within.family().bits().checked_sub(cell_size)?;
    let at = |addr: Addr| {
        let offset = addr.value - within.first().value;
        u64::try_from(offset.checked_shr(order.into()).unwrap_or(0)).ok()
    };
    Some((at(span.first())?, at(span.last())?))
}

/// Returns the cells that a span of addresses touches, each with the number of the span's addresses in the cell.
fn touched(span: IpRange, within: Cidr, cell_size: u8) -> impl Iterator<Item = (u64, u128)> {
    let ends = ends(span, &within, cell_size).into_iter();
    let numbers = ends.flat_map(|(first, last)| first..=last);
    numbers.filter_map(move |at| {
        let part = span.within(&nth(&within, cell_size, at)?)?;
        let more = part.last().value - part.first().value;
        Some((at, more.saturating_add(1)))
    })
}

/// Returns the index of the first cell of `within` that the range touches, and how many cells the range touches.
pub(super) fn place(range: &Cidr, within: &Cidr, cell_size: u8) -> Option<(u64, u64)> {
    let (first, last) = ends((*range).into(), within, cell_size)?;
    Some((first, (last - first).saturating_add(1)))
}

/// The content of one cell: the indices of its ranges, and the numbers of its addresses that are allocated, quarantined
/// and reserved.
#[derive(Default)]
struct Content {
    ranges: Vec<usize>,
    allocated: u128,
    quarantined: u128,
    reserved: u128,
}

/// Divides a range of a pool into cells. Cells that are entirely free are left out.
pub(super) fn cells(
    within: Cidr,
    cell_size: u8,
    ranges: &[CellRange],
    state: &PoolState,
) -> Vec<Cell> {
    let mut contents: BTreeMap<u64, Content> = BTreeMap::new();
    for (number, range) in ranges.iter().enumerate() {
        for (at, size) in touched(range.fact.cidr.into(), within, cell_size) {
            let content = contents.entry(at).or_default();
            content.ranges.push(number);
            let sum = match range.kind {
                CellKind::Quarantine => &mut content.quarantined,
                _ => &mut content.allocated,
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
    let mut previous: Option<(u64, Content)> = None;
    for (at, content) in contents {
        let Some(cidr) = nth(&within, cell_size, at) else {
            continue;
        };
        let is_next =
            |(number, it): &(u64, Content)| number + 1 == at && it.continues(&content, cidr.size());
        let continues = previous.as_ref().is_some_and(is_next);
        match cells.last_mut().filter(|_| continues) {
            Some(cell) => cell.count += 1,
            None => cells.push(content.cell(cidr, at, ranges)),
        }
        previous = Some((at, content));
    }
    cells
}

impl Content {
    /// Whether this cell and the next one can be joined: one range alone covers both cells, or both cells are entirely
    /// reserved.
    fn continues(&self, next: &Self, size: u128) -> bool {
        let is_full = self.allocated + self.quarantined >= size
            || (self.ranges.is_empty() && self.reserved >= size);
        let same = self.ranges == next.ranges && self.reserved == next.reserved;
        is_full && same && self.ranges.len() <= 1
    }

    fn cell(&self, cidr: Cidr, at: u64, ranges: &[CellRange]) -> Cell {
        let size = cidr.size();
        let all = || self.ranges.iter().filter_map(|at| ranges.get(*at));
        let live = || all().filter(|it| it.kind != CellKind::Quarantine);
        let sum = |all: &mut dyn Iterator<Item = u128>| all.fold(0, u128::saturating_add);
        let used = sum(&mut live().map(|it| it.used.into()));
        let capacity = sum(&mut live().map(|it| it.capacity));
        let mut owners: Vec<String> = Vec::new();
        for range in live() {
            if owners.len() < OWNERS && !owners.contains(&range.fact.node) {
                owners.push(range.fact.node.clone());
            }
        }
        let only = all().next().filter(|_| self.ranges.len() == 1);
        let only = only.map(|it| it.fact.cidr);
        let whole = only.filter(|it| it.contains(&cidr));
        let first = live().chain(all()).next();
        Cell {
            cidr: whole.unwrap_or(cidr),
            at,
            count: 1,
            kind: first.map_or(CellKind::Reserved, |it| it.kind),
            allocated: part_of(self.allocated, size),
            quarantined: part_of(self.quarantined, size),
            reserved: part_of(self.reserved, size),
            fill: part_of(used, capacity),
            overlaps: self.ranges.len() > 1 && all().any(|it| it.overlaps),
            owners,
        }
    }
}

/// Returns one cell for each address of the range that is in use.
pub(super) fn addresses(within: Cidr, inventory: &Inventory) -> Vec<Cell> {
    let first = within.first().value;
    let used = inventory.in_use(&within).into_iter();
    let cell = |(addr, pod): (Addr, &str)| Cell {
        cidr: Cidr::host(addr),
        at: u64::try_from(addr.value - first).unwrap_or(u64::MAX),
        count: 1,
        kind: CellKind::Address,
        allocated: 1000,
        quarantined: 0,
        reserved: 0,
        fill: 1000,
        owners: vec![pod.to_owned()],
        overlaps: false,
    };
    used.map(cell).collect()
}

/// Returns the ratio of `some` to `all` in thousandths. The result is 0 only if `some` or `all` is 0.
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
