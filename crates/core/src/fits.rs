//! The sizes of the largest free blocks in the four slots of a node of the trie (`space.rs`).
//!
//! The four sizes are packed into one integer, which stays in a register. With an array of four bytes, every level of
//! an update would write one byte and then read all four. The processor would wait for each such write, and the waiting
//! would take a third of the time of an allocation.

/// One number for each slot: 1 + the order of the largest free block in the slot, or 0 if nothing in the slot is free.
/// A block of order n has `2^n` addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FreeOrders(u32);

impl FreeOrders {
    /// The value for a node whose four slots are all free. `order` is the order of each slot.
    pub(crate) fn all_free(order: u8) -> Self {
        Self(u32::from_le_bytes([order + 1; 4]))
    }

    pub(crate) fn get(self, at: usize) -> u8 {
        self.0.to_le_bytes()[at]
    }

    pub(crate) fn with(self, at: usize, fits: u8) -> Self {
        let shift = 8 * at;
        Self(self.0 & !(0xff << shift) | u32::from(fits) << shift)
    }

    /// Returns the number that the parent records for this node: 1 + the order of the node's largest free block.
    /// `order` is the order of each slot. An aligned pair of free slots is a free block of the next order; if all four
    /// slots are free, the whole node is free.
    pub(crate) fn most(self, order: u8) -> u8 {
        let [a, b, c, d] = self.0.to_le_bytes();
        let (low, high) = (a.min(b), c.min(d));
        if low.max(high) <= order {
            return a.max(b).max(c).max(d);
        }
        if low == high { order + 3 } else { order + 2 }
    }

    /// Returns a bit mask of the slots in which a free block of `order` fits; `below` is the order of the slots. If
    /// `order` is higher than `below`, the block is an aligned pair of slots, and the mask contains the lower slot of
    /// the pair.
    pub(crate) fn fitting(self, below: u8, order: u8) -> u32 {
        let fitting = self
            .0
            .to_le_bytes()
            .map(|fits| u32::from(fits > order.min(below)));
        let [a, b, c, d] = fitting;
        if order > below {
            (a & b) | (c & d) << 2
        } else {
            a | b << 1 | c << 2 | d << 3
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(slots: [u8; 4]) -> FreeOrders {
        (0..4)
            .zip(slots)
            .fold(FreeOrders::all_free(8), |fits, (at, slot)| {
                fits.with(at, slot)
            })
    }

    #[test]
    fn each_slot_has_its_own_number() {
        let fits = fits([0, 9, 128, 7]);
        assert_eq!([0, 1, 2, 3].map(|at| fits.get(at)), [0, 9, 128, 7]);
    }

    #[test]
    fn pairs_of_free_slots_count_as_more() {
        assert_eq!(fits([9, 9, 9, 9]).most(8), 11);
        assert_eq!(fits([9, 9, 9, 0]).most(8), 10);
        assert_eq!(fits([5, 0, 9, 9]).most(8), 10);
        assert_eq!(fits([0, 9, 9, 0]).most(8), 9, "no pair that is aligned");
        assert_eq!(fits([0, 3, 7, 0]).most(8), 7);
        assert_eq!(fits([0; 4]).most(8), 0);
    }

    #[test]
    fn fitting_slots_are_a_bit_mask() {
        let fits = fits([9, 0, 9, 9]);
        assert_eq!([8, 9].map(|order| fits.fitting(8, order)), [0b1101, 0b0100]);
        assert_eq!(fits.with(1, 6).fitting(8, 5), 0b1111);
        assert_eq!(fits.with(1, 6).fitting(8, 6), 0b1101);
    }
}
