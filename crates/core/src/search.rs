//! The search for free blocks in a [`Space`].
//!
//! A search looks for the highest free block at or below a start address, and walks down the path to this address. On
//! the way, it remembers the last slot that lies at lower addresses than the path and has a large enough free block. If
//! the walk ends without a free block, the search walks down from the remembered slot, and certainly finds a block. So
//! a search walks down the trie at most twice, however full the space is.

use super::cidr::ones;
use super::space::{CHILD, FREE, Slot, Space, slot_of};

impl Space {
    /// Returns the first address of the highest free block of `order` that begins at or below `ceiling`. `ceiling` must
    /// be the first address of a block of that order. `None` means that no block down to address 0 is free. The space
    /// outside the root is always free.
    pub(crate) fn last_free(&self, order: u8, ceiling: u128) -> Option<u128> {
        let root = &self.root;
        if root.entry == FREE || ceiling > root.last() || ceiling | ones(order) < root.base {
            return Some(ceiling);
        }
        if let Some(found) = (order < root.order)
            .then(|| self.last_free_in_root(order, ceiling))
            .flatten()
        {
            return Some(found);
        }
        let below = (root.base & !ones(order)).checked_sub(1)?;
        Some(below & !ones(order))
    }

    /// Counts the free blocks of `order` whose first addresses lie in `first..=last`. `first` and `last` must be first
    /// addresses of blocks of that order.
    pub(crate) fn count_free(&self, order: u8, first: u128, last: u128) -> u128 {
        let all = blocks(order, first, last);
        let low = first.max(self.root.base & !ones(order));
        let high = last.min(self.root.last() & !ones(order));
        if self.root.entry == FREE || low > high {
            return all;
        }
        let inside = if order < self.root.order {
            self.count_in(self.root, order, first, last)
        } else {
            0
        };
        all - blocks(order, low, high) + inside
    }

    fn last_free_in_root(&self, order: u8, ceiling: u128) -> Option<u128> {
        let (mut entry, mut below) = (self.root.entry, self.root.order);
        let mut lower = None;
        while entry & CHILD != 0 {
            below -= 2;
            let node = self.node(entry);
            let at = slot_of(ceiling, below);
            let fitting = node.fits.fitting(below, order);
            let under = fitting & ((1 << at) - 1);
            if under != 0 {
                lower = Some((entry, below, under));
            }
            if fitting >> at & 1 == 0 {
                break;
            }
            entry = node.slots[at];
            if entry == FREE {
                return Some(ceiling);
            }
        }
        let (mut entry, mut below, mut fitting) = lower?;
        let mut base = ceiling & !ones(below + 2);
        loop {
            let at = fitting.ilog2() as usize;
            base |= (at as u128) << below;
            entry = self.node(entry).slots[at];
            if entry == FREE {
                return Some((base | ones(below)) & !ones(order));
            }
            below -= 2;
            fitting = self.node(entry).fits.fitting(below, order);
        }
    }

    fn count_in(&self, slot: Slot, order: u8, first: u128, last: u128) -> u128 {
        let (first, last) = (first.max(slot.base), last.min(slot.last() & !ones(order)));
        if first > last {
            return 0;
        }
        if slot.entry == FREE {
            return blocks(order, first, last);
        }
        if slot.entry & CHILD == 0 {
            return 0;
        }
        let fits = self.node(slot.entry).fits;
        // For a pair of slots, the mask contains only the lower one, so each pair counts once.
        let fitting = fits.fitting(slot.order - 2, order);
        (0..4)
            .filter(|at| fitting >> at & 1 == 1)
            .map(|at| self.count_in(self.slot(slot, at), order, first, last))
            .sum()
    }

    /// Returns the slot with index `at` of the node that `parent` refers to.
    fn slot(&self, parent: Slot, at: usize) -> Slot {
        let node = self.node(parent.entry);
        let order = parent.order - 2;
        Slot {
            entry: node.slots[at],
            fits: node.fits.get(at),
            order,
            base: parent.base | (at as u128) << order,
        }
    }
}

/// Returns how many blocks of `order` begin at addresses in `first..=last`. Saturates at `u128::MAX`, which is one less
/// than 2^128.
pub(super) fn blocks(order: u8, first: u128, last: u128) -> u128 {
    (last - first)
        .checked_shr(u32::from(order))
        .unwrap_or(0)
        .saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_free_where_nothing_is_covered() {
        let space = Space::default();
        assert_eq!(space.last_free(8, 0xff00), Some(0xff00));
        assert_eq!(space.last_free(128, 0), Some(0));
        assert_eq!(space.count_free(8, 0, 0xff00), 256);
        assert_eq!(space.count_free(0, 0, u128::MAX), u128::MAX);
    }

    #[test]
    fn the_search_goes_down_past_covered_blocks() {
        let mut space = Space::default();
        for n in 0x10..0x20 {
            space.cover(n << 8, 8, 1);
        }
        space.free(0x1300, 8);
        assert_eq!(space.last_free(8, 0x2000), Some(0x2000), "above the root");
        assert_eq!(space.last_free(8, 0x1f00), Some(0x1300));
        assert_eq!(space.last_free(7, 0x1f80), Some(0x1380));
        assert_eq!(space.last_free(8, 0x1200), Some(0x0f00), "below the root");
        assert_eq!(
            space.last_free(9, 0x1e00),
            Some(0x0e00),
            "the hole is too small"
        );
        assert_eq!(space.last_free(13, 0), None, "larger than the root");
    }

    #[test]
    fn a_pair_of_slots_is_a_block_of_odd_order() {
        let mut space = Space::default();
        space.cover(0x000, 8, 1);
        space.cover(0xf00, 8, 1);
        assert_eq!(space.last_free(9, 0xe00), Some(0xc00));
        assert_eq!(space.last_free(9, 0x400), Some(0x400));
        assert_eq!(space.last_free(9, 0x200), Some(0x200));
        assert_eq!(space.last_free(9, 0x000), None);
        assert_eq!(space.count_free(9, 0, 0xe00), 6);
        assert_eq!(space.count_free(10, 0, 0xc00), 2);
        assert_eq!(space.count_free(8, 0x100, 0x300), 3);
    }

    #[test]
    fn blocks_outside_the_root_are_counted() {
        let mut space = Space::default();
        space.cover(0x1000, 8, 1);
        assert_eq!(space.count_free(8, 0, 0x1f00), 31);
        assert_eq!(space.count_free(10, 0, 0x1c00), 7);
        assert_eq!(space.count_free(4, 0x1000, 0x10f0), 0);
    }
}
