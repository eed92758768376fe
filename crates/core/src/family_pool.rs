//! One family of a pool: its CIDRs, its cursor, and the blocks that may be allocated.
//!
//! A *blocked span* is a run of addresses that must not be allocated. A blocked span *closes* blocks, that is, excludes
//! them from allocation ([`ReservedEffect`]). An *opening* is a run of consecutive blocks of a CIDR that no blocked
//! span closes. The search works on openings, so its cost does not depend on how many blocks an opening contains. The
//! *order* of a block is the number of its host bits: a block of order `n` has `2^n` addresses.

use super::cidr::{Cidr, Family, ones};
use super::ip_range::IpRange;
use super::search::blocks;
use crate::mutation::Mutation;

/// Which blocks a blocked span *closes*, that is, excludes from allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReservedEffect {
    /// A span closes every block that it overlaps. This effect suits pools whose nodes assign every address of a block.
    #[default]
    Touched,
    /// A span closes only blocks that it covers entirely. This effect suits pools whose nodes do not assign the blocked
    /// addresses in their blocks.
    Covered,
}

/// The address ranges of one family of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FamilyRanges {
    /// The CIDRs from which blocks are allocated. CIDRs inside another CIDR, CIDRs of the other family and CIDRs
    /// smaller than a block are ignored.
    pub cidrs: Vec<Cidr>,
    /// Prefix length of the blocks to allocate.
    pub block_len: u8,
}

/// One family of a pool, with the state of its search.
#[derive(Clone, Debug)]
pub(super) struct FamilyPool {
    /// The CIDRs from which blocks are allocated, sorted and disjoint.
    pub cidrs: Vec<Cidr>,
    /// The prefix length of the blocks. Code that changes the length must call `open` afterwards, because the openings
    /// depend on the length.
    pub block_len: u8,
    /// A search starts with the highest block that ends at or below this address. If there are CIDRs, the cursor lies
    /// in one of them.
    pub cursor: u128,
    /// The openings, sorted and disjoint. Each opening is given by the first address of its first block and the first
    /// address of its last block.
    pub openings: Vec<(u128, u128)>,
}

impl FamilyPool {
    /// Makes a `FamilyPool` without openings. `cursor` is kept if it lies in one of the CIDRs; otherwise the search
    /// starts at the highest address.
    pub(crate) fn new(family: Family, ranges: FamilyRanges, cursor: Option<u128>) -> Self {
        let FamilyRanges {
            mut cidrs,
            block_len,
        } = ranges;
        cidrs.retain(|cidr| cidr.family() == family);
        cidrs.sort_unstable();
        // A CIDR sorts directly before the CIDRs inside it, so `dedup_by` removes the inner CIDRs.
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

    /// Returns how many blocks of `order` could be allocated if there were no holdings.
    pub(crate) fn capacity(&self, order: u8) -> u128 {
        let openings = self.openings.iter();
        let counts = openings.map(|&(first, last)| blocks(order, first, last));
        counts.fold(0, u128::saturating_add)
    }

    /// Finds the highest block of `order` that no blocked span closes and that begins at or below `address`. Returns
    /// the first address of this block.
    pub(crate) fn open_below(&self, order: u8, address: u128) -> Option<u128> {
        let after = self
            .openings
            .partition_point(|(first, _)| *first <= address);
        let (_, last) = *self.openings[..after].last()?;
        Some(last.min(address & !ones(order)))
    }

    /// Returns the address at which a search starts: the last address of the highest block of `order` that ends at or
    /// below the cursor. Returns `None` if the cursor is so near to address 0 that no block of `order` ends at or below
    /// the cursor.
    pub(crate) fn start(&self, order: u8) -> Option<u128> {
        if self.cursor & ones(order) == ones(order) {
            return Some(self.cursor);
        }
        (self.cursor & !ones(order)).checked_sub(1)
    }

    /// Moves the cursor to the highest address below `block`, which has been allocated.
    pub(crate) fn pass(&mut self, block: &Cidr) {
        let next = block.first().value.checked_sub(1);
        let cidr = next.and_then(|next| Some((next, self.below(next)?)));
        // If `block` was the lowest block of a CIDR, the cursor moves to the last address of the next lower CIDR. If
        // there is no lower CIDR, the cursor moves to the top of the pool.
        self.cursor = cidr.map_or_else(|| self.top(), |(next, cidr)| next.min(cidr.last().value));
    }

    fn top(&self) -> u128 {
        self.cidrs.last().map_or(0, |cidr| cidr.last().value)
    }

    /// Returns the highest CIDR that begins at or below the address.
    pub(crate) fn below(&self, address: u128) -> Option<&Cidr> {
        let after = self
            .cidrs
            .partition_point(|cidr| cidr.first().value <= address);
        self.cidrs[..after].last()
    }

    /// Recomputes the openings, which consist of the blocks of each CIDR except those that the spans in `blocked`
    /// close. `blocked` must be sorted and disjoint.
    pub(crate) fn open(&mut self, blocked: &[IpRange], closing: ReservedEffect) {
        self.openings.clear();
        for cidr in &self.cidrs {
            let order = cidr.family().bits().checked_sub(self.block_len);
            let Some(order) = order.filter(|_| cidr.len() <= self.block_len) else {
                continue;
            };
            let start_of = |address: u128| address & !ones(order);
            let (low, high) = (cidr.first().value, cidr.last().value);
            let below = Mutation::CarvesBelowCidr
                .is_on()
                .then(|| start_of(low.wrapping_sub(1)));
            let mut from = Some(below.unwrap_or(low));
            let begin = blocked.partition_point(|span| span.last() < cidr.first());
            let inside = blocked[begin..].iter().map_while(|span| span.within(cidr));
            for (first, last) in inside.filter_map(|span| closed_by(span, order, closing)) {
                if let Some(from) = from.filter(|from| *from < first) {
                    self.openings.push((from, start_of(first - 1)));
                }
                from = last.checked_add(1);
            }
            if let Some(from) = from.filter(|from| *from <= high) {
                self.openings.push((from, start_of(high)));
            }
        }
    }
}

/// Returns the first and the last address of the blocks that a blocked span closes; `None` if the span closes no block.
fn closed_by(span: IpRange, order: u8, closing: ReservedEffect) -> Option<(u128, u128)> {
    let start_of = |address: u128| address & !ones(order);
    let (first, last) = (span.first().value, span.last().value);
    match closing {
        ReservedEffect::Touched => Some((start_of(first), last | ones(order))),
        ReservedEffect::Covered => {
            let first = start_of(first.checked_add(ones(order))?);
            let last = match last.checked_add(1) {
                Some(next) => start_of(next).checked_sub(1)?,
                None => last,
            };
            (first <= last).then_some((first, last))
        }
    }
}
