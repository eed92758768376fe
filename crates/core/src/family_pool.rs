//! One family of a pool: its CIDRs, its cursor, and the blocks that may be carved.
//!
//! An *opening* is a run of consecutive blocks of a CIDR that no blocked span closes. The search works on openings, so
//! its cost does not depend on how many blocks an opening contains.

use super::cidr::{Cidr, Family, ones};
use super::ip_range::IpRange;
use super::search::blocks;
use crate::mutation::Mutation;

/// Which blocks a blocked span closes, that is, excludes from carving.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReservedEffect {
    /// Every block that the span touches, because the holder of a block would use all of it.
    #[default]
    Touched,
    /// Only blocks that the span covers entirely. In other blocks the holder itself skips the blocked addresses.
    Covered,
}

/// The address ranges of one family of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FamilyRanges {
    /// The CIDRs that blocks are carved from. CIDRs inside another one, CIDRs of the other family and CIDRs smaller
    /// than a block are ignored.
    pub cidrs: Vec<Cidr>,
    /// Prefix length of the blocks to carve.
    pub block_len: u8,
}

/// One family of a pool, with the state of its search.
#[derive(Clone, Debug)]
pub(super) struct FamilyPool {
    /// Sorted and disjoint.
    cidrs: Vec<Cidr>,
    block_len: u8,
    /// A search starts with the highest block that ends at or below this address. The cursor lies in one of the
    /// CIDRs, unless there are none.
    cursor: u128,
    /// The openings: sorted and disjoint runs. Both ends are first addresses of blocks that may be carved.
    openings: Vec<Interval>,
}

/// An interval, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Interval {
    pub first: u128,
    pub last: u128,
}

impl FamilyPool {
    /// Makes a part without openings. `cursor` is kept if it lies in one of the CIDRs; otherwise the search starts
    /// at the highest address.
    pub(crate) fn new(family: Family, ranges: FamilyRanges, cursor: Option<u128>) -> Self {
        let FamilyRanges {
            mut cidrs,
            block_len,
        } = ranges;
        cidrs.retain(|cidr| cidr.family() == family);
        cidrs.sort_unstable();
        // A CIDR sorts directly before those inside it, so this removes them.
        cidrs.dedup_by(|next, kept| kept.contains(next));
        let mut part = Self {
            cidrs,
            block_len,
            cursor: 0,
            openings: Vec::new(),
        };
        let stays = |&at: &u128| part.below(at).is_some_and(|cidr| at <= cidr.last().value);
        part.cursor = cursor.filter(stays).unwrap_or_else(|| part.top());
        part
    }

    pub(crate) fn cidrs(&self) -> &[Cidr] {
        &self.cidrs
    }

    pub(crate) fn block_len(&self) -> u8 {
        self.block_len
    }

    pub(crate) fn cursor(&self) -> u128 {
        self.cursor
    }

    /// Changes the block length. The caller must call `open` afterwards, because openings depend on the length.
    pub(crate) fn refit(&mut self, block_len: u8) {
        self.block_len = block_len;
    }

    /// Returns how many blocks of `order` could be carved if nothing were held.
    pub(crate) fn capacity(&self, order: u8) -> u128 {
        let counts = self
            .openings
            .iter()
            .map(|run| blocks(order, run.first, run.last));
        counts.fold(0, u128::saturating_add)
    }

    /// The openings, each as the first address of its first block and the first address of its last block.
    pub(crate) fn openings(&self) -> impl Iterator<Item = (u128, u128)> {
        self.openings.iter().map(|run| (run.first, run.last))
    }

    /// The first address of the highest block of `order` that may be carved and begins at or below `address`.
    pub(crate) fn open_below(&self, order: u8, address: u128) -> Option<u128> {
        let after = self.openings.partition_point(|run| run.first <= address);
        let run = self.openings[..after].last()?;
        Some(run.last.min(address & !ones(order)))
    }

    /// Returns where a search starts: the last address of the highest block of `order` that ends at or below the
    /// cursor.
    pub(crate) fn start(&self, order: u8) -> Option<u128> {
        if self.cursor & ones(order) == ones(order) {
            return Some(self.cursor);
        }
        (self.cursor & !ones(order)).checked_sub(1)
    }

    /// Moves the cursor to just below a carved block.
    pub(crate) fn pass(&mut self, block: &Cidr) {
        let next = block.first().value.checked_sub(1);
        let cidr = next.and_then(|next| Some((next, self.below(next)?)));
        // If the carved block was the lowest of a CIDR, the cursor moves to the end of the next lower CIDR, or from
        // the lowest CIDR to the top of the pool.
        self.cursor = cidr.map_or_else(|| self.top(), |(next, cidr)| next.min(cidr.last().value));
    }

    fn top(&self) -> u128 {
        self.cidrs.last().map_or(0, |cidr| cidr.last().value)
    }

    /// The highest CIDR that begins at or below the address.
    pub(crate) fn below(&self, address: u128) -> Option<&Cidr> {
        let after = self
            .cidrs
            .partition_point(|cidr| cidr.first().value <= address);
        self.cidrs[..after].last()
    }

    /// Recomputes the openings: the blocks of each CIDR except those that the blocked spans close.
    pub(crate) fn open(&mut self, blocked: &[Interval], closing: ReservedEffect) {
        self.openings.clear();
        for cidr in self
            .cidrs
            .iter()
            .filter(|cidr| cidr.len() <= self.block_len)
        {
            let Some(order) = cidr.family().bits().checked_sub(self.block_len) else {
                return;
            };
            let start_of = |address: u128| address & !ones(order);
            let (low, high) = (cidr.first().value, cidr.last().value);
            let below = Mutation::CarvesBelowCidr
                .is_on()
                .then(|| low.wrapping_sub(ones(order) + 1));
            let mut from = Some(below.unwrap_or(low));
            let begin = blocked.partition_point(|run| run.last < low);
            for run in blocked[begin..].iter().take_while(|run| run.first <= high) {
                let run = Interval {
                    first: run.first.max(low),
                    last: run.last.min(high),
                };
                let Some(closed) = closed_by(run, order, closing) else {
                    continue;
                };
                if let Some(first) = from.filter(|&first| first < closed.first) {
                    self.openings.push(Interval {
                        first,
                        last: start_of(closed.first - 1),
                    });
                }
                from = closed.last.checked_add(1);
            }
            if let Some(first) = from.filter(|&first| first <= high) {
                self.openings.push(Interval {
                    first,
                    last: start_of(high),
                });
            }
        }
    }
}

/// The run of whole blocks that a blocked run closes; `None` if it closes none.
fn closed_by(run: Interval, order: u8, closing: ReservedEffect) -> Option<Interval> {
    let start_of = |address: u128| address & !ones(order);
    match closing {
        ReservedEffect::Touched => Some(Interval {
            first: start_of(run.first),
            last: run.last | ones(order),
        }),
        ReservedEffect::Covered => {
            let first = start_of(run.first.checked_add(ones(order))?);
            let last = match run.last.checked_add(1) {
                Some(next) => start_of(next).checked_sub(1)?,
                None => run.last,
            };
            (first <= last).then_some(Interval { first, last })
        }
    }
}

impl From<IpRange> for Interval {
    fn from(span: IpRange) -> Self {
        Self {
            first: span.first().value,
            last: span.last().value,
        }
    }
}

/// Sorts intervals, and joins those that overlap or are adjacent.
pub(super) fn merged(mut runs: Vec<Interval>) -> Vec<Interval> {
    runs.sort_unstable_by_key(|run| run.first);
    runs.dedup_by(|next, kept| {
        let joins = next.first <= kept.last.saturating_add(1);
        if joins {
            kept.last = kept.last.max(next.last);
        }
        joins
    });
    runs
}
