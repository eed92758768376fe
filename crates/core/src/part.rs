//! A pool's part of one family: its CIDRs, its cursor, and what may be carved.
//!
//! *Openings* are the runs of blocks that lie in a CIDR and that nothing blocked closes: the search looks at
//! runs, however many blocks they have.

use super::cidr::{Cidr, Family, ones};
use super::search::blocks;
use super::span::Span;
use crate::mutation::Mutation;

/// Which blocks a blocked span closes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Closing {
    /// Those that it touches: a holder uses all of a block.
    #[default]
    Touched,
    /// Those that it covers whole: a holder leaves out the rest by itself.
    Covered,
}

/// What a pool may carve of one family.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ranges {
    /// Where blocks come from. Of two that overlap the wider counts; those of another family, or
    /// smaller than a block, hold nothing.
    pub cidrs: Vec<Cidr>,
    /// Prefix length of the blocks.
    pub block_len: u8,
}

/// The part of one family.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// Sorted and disjoint.
    cidrs: Vec<Cidr>,
    block_len: u8,
    /// What ends at or below this address is looked at first. Inside a CIDR unless there is none.
    cursor: u128,
    /// Beginnings of the blocks that may be carved: sorted, disjoint runs.
    openings: Vec<Run>,
}

/// An interval, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    pub first: u128,
    pub last: u128,
}

impl Part {
    /// A fresh one, with nothing open. The cursor is taken over if that is still inside, else it begins at
    /// the top.
    pub(crate) fn new(family: Family, ranges: Ranges, cursor: Option<u128>) -> Self {
        let Ranges {
            mut cidrs,
            block_len,
        } = ranges;
        cidrs.retain(|cidr| cidr.family() == family);
        cidrs.sort_unstable();
        // What lies inside another comes after it.
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

    /// Blocks of another length from now on; what is open has to be derived anew.
    pub(crate) fn refit(&mut self, block_len: u8) {
        self.block_len = block_len;
    }

    /// How many blocks it holds while nothing is claimed.
    pub(crate) fn capacity(&self, order: u8) -> u128 {
        let counts = self
            .openings
            .iter()
            .map(|run| blocks(order, run.first, run.last));
        counts.fold(0, u128::saturating_add)
    }

    /// The openings, as the beginnings of their first and last block.
    pub(crate) fn openings(&self) -> impl Iterator<Item = (u128, u128)> {
        self.openings.iter().map(|run| (run.first, run.last))
    }

    /// The beginning of the highest block of `order` that may be carved and begins at or below
    /// `address`.
    pub(crate) fn open_below(&self, order: u8, address: u128) -> Option<u128> {
        let after = self.openings.partition_point(|run| run.first <= address);
        let run = self.openings[..after].last()?;
        Some(run.last.min(address & !ones(order)))
    }

    /// Where a search begins: the end of the highest block of `order` that ends at or below the
    /// cursor, if there is one.
    pub(crate) fn start(&self, order: u8) -> Option<u128> {
        if self.cursor & ones(order) == ones(order) {
            return Some(self.cursor);
        }
        (self.cursor & !ones(order)).checked_sub(1)
    }

    /// Moves the cursor to just below a block that was carved.
    pub(crate) fn pass(&mut self, block: &Cidr) {
        let next = block.first().value.checked_sub(1);
        let cidr = next.and_then(|next| Some((next, self.below(next)?)));
        // In a gap the cursor goes on at the end of the CIDR below, at the bottom back to the top.
        self.cursor = cidr.map_or_else(|| self.top(), |(next, cidr)| next.min(cidr.last().value));
    }

    fn top(&self) -> u128 {
        self.cidrs.last().map_or(0, |cidr| cidr.last().value)
    }

    /// The last CIDR that begins at or below the address.
    pub(crate) fn below(&self, address: u128) -> Option<&Cidr> {
        let after = self
            .cidrs
            .partition_point(|cidr| cidr.first().value <= address);
        self.cidrs[..after].last()
    }

    /// Derives the openings: the blocks of each CIDR less those that blocked spans close.
    pub(crate) fn open(&mut self, blocked: &[Run], closing: Closing) {
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
                let run = Run {
                    first: run.first.max(low),
                    last: run.last.min(high),
                };
                let Some(closed) = closed_by(run, order, closing) else {
                    continue;
                };
                if let Some(first) = from.filter(|&first| first < closed.first) {
                    self.openings.push(Run {
                        first,
                        last: start_of(closed.first - 1),
                    });
                }
                from = closed.last.checked_add(1);
            }
            if let Some(first) = from.filter(|&first| first <= high) {
                self.openings.push(Run {
                    first,
                    last: start_of(high),
                });
            }
        }
    }
}

/// The whole blocks that a blocked run closes, if any.
fn closed_by(run: Run, order: u8, closing: Closing) -> Option<Run> {
    let start_of = |address: u128| address & !ones(order);
    match closing {
        Closing::Touched => Some(Run {
            first: start_of(run.first),
            last: run.last | ones(order),
        }),
        Closing::Covered => {
            let first = start_of(run.first.checked_add(ones(order))?);
            let last = match run.last.checked_add(1) {
                Some(next) => start_of(next).checked_sub(1)?,
                None => run.last,
            };
            (first <= last).then_some(Run { first, last })
        }
    }
}

impl From<Span> for Run {
    fn from(span: Span) -> Self {
        Self {
            first: span.first().value,
            last: span.last().value,
        }
    }
}

/// Sorts, and joins what overlaps or adjoins.
pub(super) fn merged(mut runs: Vec<Run>) -> Vec<Run> {
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
