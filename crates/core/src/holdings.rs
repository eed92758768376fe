//! Storage of holdings in a slab, with a linked list for each holder.
//!
//! There is a holding for every range of every node, so the records take most of the ledger's memory. Therefore a
//! record takes only 40 bytes, and contains the links of the list that it is in.
//!
//! An id contains a generation, so the id of a released holding never becomes valid again, even if its record is
//! reused. So a late response to an old write cannot change the holding of another holder.

use super::cidr::{Cidr, Family};

/// The holder of a range: a number that the caller chooses for a node or a quarantine.
///
/// The numbers should be dense, because the ledger uses four bytes for every number up to the highest one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Holder(pub u32);

/// Identifies one holding, and is never reused for another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HoldingId {
    number: u32,
    generation: u32,
}

/// How certain it is that the holder has the range. A range with a holding in any of these states is not free.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HoldingState {
    /// A write that allocates the range was sent, and no response has arrived yet.
    InFlight,
    /// The outcome of the write is not known. The range counts as allocated until a read shows whether the holder has
    /// it.
    Indeterminate,
    /// A read or the response to the write has proven that the holder has the range.
    Allocated,
    /// The node of the range was deleted, and the range cannot be allocated until the quarantine ends.
    Quarantined,
}

/// A range that is not free, with its holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    /// The node or quarantine that has the range.
    pub holder: Holder,
    /// The range; other holdings may overlap it.
    pub cidr: Cidr,
    /// How certain it is that `holder` has the range.
    pub state: HoldingState,
}

/// The holdings, indexed by number. Numbers start at 1; the number 0 means "no holding".
#[derive(Clone, Debug, Default)]
pub(super) struct Holdings {
    records: Vec<Record>,
    /// The number of each holder's first holding, indexed by holder.
    heads: Vec<u32>,
    /// The number of the first vacant record. The `next` of a vacant record is the number of the next vacant one.
    vacant: u32,
    live: usize,
}

/// A holding in 40 bytes. The first address has two halves, because a `u128` would align the record to 48 bytes.
#[derive(Clone, Debug)]
struct Record {
    first: [u64; 2],
    /// The generation, which is odd while the record is in use.
    generation: u32,
    holder: Holder,
    prev: u32,
    next: u32,
    len: u8,
    family: Family,
    state: HoldingState,
}

const _: () = assert!(size_of::<Record>() == 40);

impl Record {
    fn new(holding: Holding, generation: u32) -> Self {
        let mut record = Self {
            first: [0; 2],
            generation,
            holder: holding.holder,
            prev: 0,
            next: 0,
            len: holding.cidr.len(),
            family: holding.cidr.family(),
            state: holding.state,
        };
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of it")]
        {
            let value = holding.cidr.first().value;
            record.first = [(value >> 64) as u64, value as u64];
        }
        record
    }

    fn holding(&self) -> Holding {
        let value = u128::from(self.first[0]) << 64 | u128::from(self.first[1]);
        let order = self.family.bits() - self.len;
        Holding {
            holder: self.holder,
            cidr: Cidr::of_order(self.family, value, order),
            state: self.state,
        }
    }

    fn is_live(&self) -> bool {
        self.generation % 2 == 1
    }
}

impl Holdings {
    pub(crate) fn insert(&mut self, holding: Holding) -> HoldingId {
        let number = if self.vacant == 0 {
            self.records.push(Record::new(holding, 1));
            to_u32(self.records.len())
        } else {
            let number = self.vacant;
            let record = self.record_mut(number);
            let next = record.next;
            *record = Record::new(holding, record.generation + 1);
            self.vacant = next;
            number
        };
        self.live += 1;
        self.link(number);
        self.numbered(number).0
    }

    pub(crate) fn remove(&mut self, id: HoldingId) -> Option<Holding> {
        let holding = self.get(id)?;
        self.unlink(id.number);
        self.live -= 1;
        let vacant = self.vacant;
        let record = self.record_mut(id.number);
        // If the generations of a record are used up (the counter is 0 again), the record is never reused. Otherwise an
        // old id could become valid again.
        record.generation = record.generation.wrapping_add(1);
        if record.generation != 0 {
            record.next = vacant;
            self.vacant = id.number;
        }
        Some(holding)
    }

    pub(crate) fn get(&self, id: HoldingId) -> Option<Holding> {
        let record = self.records.get(id.number as usize - 1)?;
        (record.generation == id.generation).then(|| record.holding())
    }

    pub(crate) fn set_state(&mut self, id: HoldingId, state: HoldingState) -> bool {
        let found = self.get(id).is_some();
        if found {
            self.record_mut(id.number).state = state;
        }
        found
    }

    pub(crate) fn set_holder(&mut self, id: HoldingId, holder: Holder) -> bool {
        let found = self.get(id).is_some();
        if found {
            self.unlink(id.number);
            self.record_mut(id.number).holder = holder;
            self.link(id.number);
        }
        found
    }

    /// Returns the holding with this number, which must exist.
    pub(crate) fn numbered(&self, number: u32) -> (HoldingId, Holding) {
        let record = self.record(number);
        let generation = record.generation;
        (HoldingId { number, generation }, record.holding())
    }

    pub(crate) fn of(
        &self,
        holder: Holder,
    ) -> impl Iterator<Item = (HoldingId, Holding)> + use<'_> {
        let head = self.heads.get(holder.0 as usize).copied().unwrap_or(0);
        std::iter::successors((head != 0).then_some(head), |&number| {
            Some(self.record(number).next).filter(|&next| next != 0)
        })
        .map(|number| self.numbered(number))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (HoldingId, Holding)> + use<'_> {
        (1..)
            .zip(&self.records)
            .filter(|(_, record)| record.is_live())
            .map(|(number, _)| self.numbered(number))
    }

    pub(crate) fn len(&self) -> usize {
        self.live
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.records.capacity() * size_of::<Record>() + self.heads.capacity() * size_of::<u32>()
    }

    fn record(&self, number: u32) -> &Record {
        &self.records[number as usize - 1]
    }

    fn record_mut(&mut self, number: u32) -> &mut Record {
        &mut self.records[number as usize - 1]
    }

    fn link(&mut self, number: u32) {
        let holder = self.record(number).holder.0 as usize;
        if holder >= self.heads.len() {
            self.heads.resize(holder + 1, 0);
        }
        let next = std::mem::replace(&mut self.heads[holder], number);
        self.record_mut(number).next = next;
        self.record_mut(number).prev = 0;
        if next != 0 {
            self.record_mut(next).prev = number;
        }
    }

    fn unlink(&mut self, number: u32) {
        let &Record {
            prev, next, holder, ..
        } = self.record(number);
        if prev == 0 {
            self.heads[holder.0 as usize] = next;
        } else {
            self.record_mut(prev).next = next;
        }
        if next != 0 {
            self.record_mut(next).prev = prev;
        }
    }
}

impl HoldingId {
    /// The number by which the space (the trie of covered addresses) refers to the holding.
    pub(super) fn number(self) -> u32 {
        self.number
    }
}

/// Converts a count of records or nodes. The count always fits, because 2^31 records or nodes would take tens of
/// gigabytes.
#[expect(clippy::cast_possible_truncation, reason = "memory runs out first")]
pub(super) fn to_u32(count: usize) -> u32 {
    count as u32
}

#[cfg(test)]
mod tests {
    use super::super::testing::cidr;
    use super::*;

    fn holding(holder: u32, third_octet: u8) -> Holding {
        Holding {
            holder: Holder(holder),
            cidr: cidr(&format!("10.0.{third_octet}.0/24")),
            state: HoldingState::Allocated,
        }
    }

    #[test]
    fn an_id_of_a_released_holding_is_never_valid_again() {
        let mut holdings = Holdings::default();
        let old = holdings.insert(holding(0, 1));
        assert_eq!(holdings.remove(old), Some(holding(0, 1)));
        let new = holdings.insert(holding(0, 2));
        assert_eq!(new.number, old.number, "the place is used again");
        assert_eq!((holdings.get(old), holdings.remove(old)), (None, None));
        assert!(
            !holdings.set_state(old, HoldingState::Quarantined)
                && !holdings.set_holder(old, Holder(9))
        );
        assert_eq!(holdings.get(new), Some(holding(0, 2)));
    }

    #[test]
    fn a_record_whose_generations_are_used_up_is_not_used_again() {
        let mut holdings = Holdings::default();
        let first = holdings.insert(holding(0, 1));
        holdings.record_mut(first.number).generation = u32::MAX;
        let last = holdings.numbered(first.number).0;
        assert!(holdings.remove(last).is_some());
        assert_ne!(holdings.insert(holding(0, 2)).number, first.number);
        assert_eq!(holdings.len(), 1);
        assert_eq!(holdings.iter().count(), 1);
    }

    #[test]
    fn a_holding_is_only_in_the_list_of_its_holder() {
        let mut holdings = Holdings::default();
        let ids: Vec<_> = (0..4)
            .map(|n| holdings.insert(holding(u32::from(n % 2), n)))
            .collect();
        let of = |holdings: &Holdings, holder| {
            holdings
                .of(Holder(holder))
                .map(|(id, _)| id)
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&holdings, 0), [ids[2], ids[0]]);
        assert!(holdings.set_holder(ids[0], Holder(7)));
        assert!(holdings.remove(ids[3]).is_some());
        assert_eq!(
            (of(&holdings, 0), of(&holdings, 1)),
            (vec![ids[2]], vec![ids[1]])
        );
        assert_eq!(
            (of(&holdings, 7), of(&holdings, 100)),
            (vec![ids[0]], vec![])
        );
    }
}
