//! The covered and the free space of one family: a trie over address bits, two bits per level.
//!
//! The space is a trie for two reasons. Blocks of all sizes are mixed, and the search for the next free block of a size
//! must take equally long in an almost empty and in an almost full space. Each slot records the size of the largest
//! free block below it, so a search backtracks at most once. An index by block number would allow only one block size.
//! A list of free intervals would be slow to walk when the space is fragmented.
//!
//! Sizes are *orders*: a block of order `n` has `2^n` addresses and begins at a multiple of `2^n`. A node has
//! four slots of the same even order; a block of odd order fills two of them. The space only stores disjoint
//! blocks; the ledger stores the holdings that are nested in others.
//!
//! The root is the smallest slot that contains everything that holdings cover. For example, a pool in `fd00::/40` needs
//! no levels above /40 until a range outside of `fd00::/40` is recorded. Everything outside the root is free.

use super::cidr::ones;
use super::fits::FreeOrders;
use super::holdings::to_u32;

/// The value of a free slot. Any other slot contains either the index of a child node with the bit [`CHILD`] set, or
/// the number of a holding.
pub(super) const FREE: u32 = 0;
pub(super) const CHILD: u32 = 1 << 31;

/// The maximum number of levels below the root: the 128 bits of IPv6 at two bits per level.
const LEVELS: usize = 64;

#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) nodes: Vec<Node>,
    /// The slot value that refers to the first vacant node; `FREE` if no node is vacant. `slots[0]` of a vacant node
    /// refers to the next vacant one.
    vacant: u32,
    pub(super) root: Slot,
}

/// Four slots of the same order, for consecutive blocks.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) slots: [u32; 4],
    pub(super) fits: FreeOrders,
}

/// A slot with its position in the trie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub entry: u32,
    pub fits: u8,
    pub order: u8,
    pub base: u128,
}

impl Slot {
    pub(crate) fn last(&self) -> u128 {
        self.base | ones(self.order)
    }
}

impl Default for Space {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            vacant: FREE,
            root: Slot {
                entry: FREE,
                fits: 1,
                order: 0,
                base: 0,
            },
        }
    }
}

impl Space {
    /// Records that the holding with this number covers the block. The whole block must be free.
    pub(crate) fn cover(&mut self, first: u128, order: u8, holding: u32) {
        self.reach(first, order);
        self.set(first, order, holding);
    }

    /// Frees a block. One call of `cover` must have covered exactly this block.
    pub(crate) fn free(&mut self, first: u128, order: u8) {
        self.set(first, order, FREE);
        self.narrow();
    }

    /// Returns the lowest holding that covers `from` or begins above `from`. If the result is `None`, no such holding
    /// begins at or below `last`. The returned holding can begin above `last`, so the caller has to check that.
    pub(crate) fn next(&self, from: u128, last: u128) -> Option<u32> {
        if self.root.entry == FREE || from > self.root.last() || last < self.root.base {
            return None;
        }
        let from = from.max(self.root.base);
        let (mut entry, mut order, mut above) = (self.root.entry, self.root.order, None);
        while entry & CHILD != 0 {
            let slots = &self.node(entry).slots;
            let base = from & !ones(order);
            order -= 2;
            let begins_in_time = |&at: &usize| base | (at as u128) << order <= last;
            let at = slot_of(from, order);
            let mut higher = (at + 1..4).take_while(begins_in_time);
            above = higher
                .find(|&at| slots[at] != FREE)
                .map(|at| slots[at])
                .or(above);
            entry = slots[at];
        }
        match entry {
            FREE => above.map(|entry| self.lowest(entry)),
            holding => Some(holding),
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
    }

    pub(super) fn node(&self, entry: u32) -> &Node {
        &self.nodes[(entry & !CHILD) as usize]
    }

    fn lowest(&self, mut entry: u32) -> u32 {
        while entry & CHILD != 0 {
            let slots = &self.node(entry).slots;
            entry = slots
                .iter()
                .copied()
                .find(|&slot| slot != FREE)
                .unwrap_or(FREE);
        }
        entry
    }

    /// Enlarges the root until it contains the block.
    fn reach(&mut self, first: u128, order: u8) {
        let even = order + order % 2;
        if self.root.entry == FREE {
            self.root = Slot {
                entry: FREE,
                // `set`, which comes next, computes it.
                fits: 0,
                order: even,
                base: first & !ones(even),
            };
        }
        while self.root.order < even || first & !ones(self.root.order) != self.root.base {
            let Slot {
                entry,
                fits,
                order,
                base,
            } = self.root;
            let child = self.add_node(order);
            let node = self.node_mut(child);
            node.slots[slot_of(base, order)] = entry;
            node.fits = node.fits.with(slot_of(base, order), fits);
            let order = order + 2;
            self.root = Slot {
                entry: child,
                fits: node.fits.most(order - 2),
                order,
                base: base & !ones(order),
            };
        }
    }

    /// Replaces the root by its child as long as only one slot of the root is in use.
    fn narrow(&mut self) {
        while self.root.entry & CHILD != 0 {
            let node = self.node(self.root.entry);
            let mut used = (0..4).filter(|&at| node.slots[at] != FREE);
            let (Some(at), None) = (used.next(), used.next()) else {
                return;
            };
            let order = self.root.order - 2;
            let base = self.root.base | (at as u128) << order;
            let narrowed = Slot {
                entry: node.slots[at],
                fits: node.fits.get(at),
                order,
                base,
            };
            self.drop_node(self.root.entry);
            self.root = narrowed;
        }
    }

    /// Writes `holding` to the slot, or pair of slots, of the block. `holding` is `FREE` if the block is freed.
    fn set(&mut self, first: u128, order: u8, holding: u32) {
        if order == self.root.order {
            self.root.entry = holding;
            self.root.fits = if holding == FREE { order + 1 } else { 0 };
            return;
        }
        let mut path = [FREE; LEVELS];
        let mut depth = 0;
        let mut below = self.root.order - 2;
        if self.root.entry == FREE {
            self.root.entry = self.add_node(below);
        }
        let mut entry = self.root.entry;
        while order < below {
            path[depth] = entry;
            depth += 1;
            let at = slot_of(first, below);
            let mut next = self.node(entry).slots[at];
            if next == FREE {
                next = self.add_node(below - 2);
                self.node_mut(entry).slots[at] = next;
            }
            entry = next;
            below -= 2;
        }
        let at = slot_of(first, below);
        let node = self.node_mut(entry);
        for at in at..=at + usize::from(order > below) {
            node.slots[at] = holding;
            node.fits = node
                .fits
                .with(at, if holding == FREE { below + 1 } else { 0 });
        }
        let most = node.fits.most(below);
        self.pass_up(first, &path[..depth], below, entry, most);
    }

    /// Updates the parents of the node `entry` on the path up to the root, until a parent does not change. `most`
    /// describes the largest free block of `entry` (`FreeOrders::most`); its parent records this number. A node whose
    /// slots are all free is removed, and its slot in the parent becomes free.
    fn pass_up(&mut self, first: u128, path: &[u32], mut below: u8, mut entry: u32, mut most: u8) {
        let mut path = path.iter().rev();
        loop {
            let gone = most == below + 3;
            if gone {
                self.drop_node(entry);
            }
            let Some(&parent) = path.next() else {
                self.root.fits = most;
                if gone {
                    self.root.entry = FREE;
                }
                return;
            };
            below += 2;
            let at = slot_of(first, below);
            let node = self.node_mut(parent);
            if gone {
                node.slots[at] = FREE;
            } else if node.fits.get(at) == most {
                return;
            }
            node.fits = node.fits.with(at, most);
            most = node.fits.most(below);
            entry = parent;
        }
    }

    fn node_mut(&mut self, entry: u32) -> &mut Node {
        &mut self.nodes[(entry & !CHILD) as usize]
    }

    fn add_node(&mut self, order: u8) -> u32 {
        let node = Node {
            slots: [FREE; 4],
            fits: FreeOrders::all_free(order),
        };
        let entry = self.vacant;
        if entry == FREE {
            self.nodes.push(node);
            return CHILD | (to_u32(self.nodes.len()) - 1);
        }
        self.vacant = std::mem::replace(self.node_mut(entry), node).slots[0];
        entry
    }

    fn drop_node(&mut self, entry: u32) {
        self.node_mut(entry).slots[0] = self.vacant;
        self.vacant = entry;
    }
}

/// Returns the index, within its node, of the slot of `order` that contains the address.
pub(super) fn slot_of(address: u128, order: u8) -> usize {
    (address >> order) as usize & 3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that each slot's recorded free orders agree with the node below the slot; returns the number of nodes.
    fn check(space: &Space) -> usize {
        fn visit(space: &Space, entry: u32, order: u8) -> (u8, usize) {
            match entry {
                FREE => (order + 1, 0),
                entry if entry & CHILD == 0 => (0, 0),
                entry => {
                    let node = space.node(entry);
                    let mut nodes = 1;
                    for at in 0..4 {
                        let (fits, below) = visit(space, node.slots[at], order - 2);
                        assert_eq!(node.fits.get(at), fits, "slot {at} of order {}", order - 2);
                        nodes += below;
                    }
                    assert_ne!(node.slots, [FREE; 4], "an empty node stays");
                    (node.fits.most(order - 2), nodes)
                }
            }
        }
        let (fits, nodes) = visit(space, space.root.entry, space.root.order);
        assert_eq!(space.root.fits, fits);
        nodes
    }

    #[test]
    fn the_root_contains_just_the_covered_blocks() {
        let mut space = Space::default();
        space.cover(0x0a00_0100, 8, 1);
        assert_eq!((check(&space), space.root.order), (0, 8));
        space.cover(0x0a00_0200, 8, 2);
        assert_eq!((check(&space), space.root.order), (1, 10));
        space.cover(0xc000_0000, 7, 3);
        assert_eq!(space.root.order, 32);
        check(&space);
        space.free(0xc000_0000, 7);
        assert_eq!((check(&space), space.root.order), (1, 10));
        space.free(0x0a00_0200, 8);
        space.free(0x0a00_0100, 8);
        assert_eq!((check(&space), space.next(0, u128::MAX)), (0, None));
    }

    #[test]
    fn the_largest_and_the_smallest_block_can_be_covered() {
        let mut space = Space::default();
        for (first, order) in [
            (0, 128),
            (1 << 127, 127),
            (u128::MAX, 0),
            (u128::MAX - 1, 1),
            (0, 0),
        ] {
            space.cover(first, order, 7);
            check(&space);
            assert_eq!(space.next(first, first), Some(7));
            assert_eq!(space.next(first | ones(order), u128::MAX), Some(7));
            space.free(first, order);
            assert_eq!(space.root.entry, FREE);
        }
    }

    #[test]
    fn freed_nodes_are_used_again() {
        let mut space = Space::default();
        for round in 0..3 {
            for n in 0..64 {
                space.cover(n << 8, 8, 1);
            }
            // Covered slots are never merged, so that each block can be freed separately. So the tree keeps all of its
            // 1 + 4 + 16 nodes.
            assert_eq!(
                (check(&space), space.nodes.len()),
                (21, 21),
                "round {round}"
            );
            for n in 0..64 {
                space.free(n << 8, 8);
                check(&space);
            }
        }
    }

    #[test]
    fn next_covers_the_address_or_lies_above_it() {
        let mut space = Space::default();
        space.cover(0x100, 8, 1);
        space.cover(0x400, 9, 2);
        space.cover(0x1_0000, 4, 3);
        let next = |from| space.next(from, u128::MAX);
        assert_eq!(
            [next(0), next(0x1ff), next(0x200)],
            [Some(1), Some(1), Some(2)]
        );
        assert_eq!([next(0x5ff), next(0x600)], [Some(2), Some(3)]);
        assert_eq!(
            [space.next(0x600, 0x3fff), space.next(0, 0xff)],
            [None, None]
        );
        assert_eq!(
            [next(0x1_000f), next(0x1_0010), next(u128::MAX)],
            [Some(3), None, None]
        );
    }

    #[test]
    fn next_searches_no_slot_that_begins_too_late() {
        let mut space = Space::default();
        space.cover(0x1_8000, 8, 1);
        space.cover(0x1_c000, 8, 2);
        assert_eq!(space.next(0x1_8100, 0x1_bfff), None);
    }
}
