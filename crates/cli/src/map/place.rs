//! Where one looks: which part of a pool is in view, and into how large cells it is cut.
//!
//! # Guarantees
//! - A view has at most 2^[`MOST_BITS`] cells.

use serde::Deserialize;

use super::cells::{Range, ranges};
use crate::inventory::Inventory;
use cadastre_controller::pools::PoolState;
use cadastre_core::{Cidr, Family};

/// Bits of the cells of a view at most: 256 times 128.
const MOST_BITS: u8 = 15;
/// A range of so many bits is shown address by address.
const ADDRESS_BITS: u8 = 12;
/// Bits that one step goes down or up.
const STEP: u8 = 4;
/// Steps up that are offered before the whole range.
const STEPS: usize = 3;
/// Bits of a range that is visited and of what is shown round it.
const ROUND: u8 = 10;

/// Where to look.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Place {
    /// The pool; absent: the first one
    pub pool: Option<String>,
    /// What is in view; absent: what one sees first
    pub view: Option<Cidr>,
    /// What is chosen; where it is not in view, the view goes there
    pub at: Option<Cidr>,
    /// Whether to look closer, at what is chosen
    pub closer: bool,
    /// Whether objects are to be listed anew
    pub fresh: bool,
}

/// A part of a pool, cut into cells.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub view: Cidr,
    pub cell_size: u8,
    pub state: &'a PoolState,
    pub inventory: &'a Inventory,
}

impl<'a> Seen<'a> {
    /// What is seen from a place of a pool that has ranges, and the ranges in view.
    pub(super) fn from(
        place: &Place,
        state: &'a PoolState,
        inventory: &'a Inventory,
    ) -> Option<(Self, Vec<Range>)> {
        let families: Vec<Family> = state.space.families().collect();
        let known = |cidr: &Cidr| families.contains(&cidr.family());
        let at = place.at.filter(known);
        let view = place.view.filter(known);
        let view = match (view.filter(|it| at.is_none_or(|at| it.overlaps(&at))), at) {
            (Some(view), _) => view,
            (None, Some(at)) => round(&at, state, inventory)?,
            (None, None) => home(state, *families.first()?, inventory)?,
        };
        let block_size = state.space.block_len(view.family())?;
        let view = if place.closer {
            closer(
                &view,
                at.filter(|it| view.contains(it)),
                block_size,
                inventory,
            )?
        } else {
            view
        };
        let ranges = ranges(&view, inventory);
        let bits = view.family().bits();
        let is_inside_one = ranges.iter().any(|it| it.fact.cidr.contains(&view));
        let longest = ranges.iter().map(|it| it.fact.cidr.len()).max();
        let cell_size = match longest.unwrap_or(0).max(block_size) {
            _ if is_inside_one && bits - view.len() <= ADDRESS_BITS => bits,
            size if size <= view.len() => bits.min(view.len() + STEP + 2),
            size => size.min(view.len() + MOST_BITS),
        };
        Some((
            Self {
                view,
                cell_size,
                state,
                inventory,
            },
            ranges,
        ))
    }

    /// Whether cells are the addresses of a range.
    pub(super) fn is_by_address(&self, ranges: &[Range]) -> bool {
        let wide =
            |it: &Range| it.fact.cidr.contains(&self.view) && it.fact.cidr.len() < self.cell_size;
        self.cell_size == self.view.family().bits() && ranges.iter().any(wide)
    }

    /// The steps from the whole range of the pool to what is in view.
    pub(super) fn path(&self) -> Vec<Cidr> {
        let root = root(&self.view, self.state).map_or(self.view.len(), Cidr::len);
        let lens = (root + 1..=self.view.len()).rev().step_by(STEP.into());
        let mut lens: Vec<u8> = lens.take(STEPS + 1).collect();
        lens.push(root);
        let path = lens.into_iter().rev();
        path.filter_map(|len| Cidr::new(self.view.first(), len))
            .collect()
    }
}

/// The range of the pool round that one.
fn root<'a>(cidr: &Cidr, state: &'a PoolState) -> Option<&'a Cidr> {
    let mut roots = state.space.cidrs(cidr.family()).iter();
    roots.find(|root| root.contains(cidr))
}

/// A place among its neighbours.
fn round(at: &Cidr, state: &PoolState, inventory: &Inventory) -> Option<Cidr> {
    let range = ranges(at, inventory).pop().map_or(*at, |it| it.fact.cidr);
    let widest = root(&range, state).map_or(0, Cidr::len);
    Cidr::new(range.first(), range.len().saturating_sub(ROUND).max(widest))
}

/// A step down to what is chosen, or to the first cell; not beyond a range or a free block.
fn closer(view: &Cidr, at: Option<Cidr>, block_size: u8, inventory: &Inventory) -> Option<Cidr> {
    let target = at.unwrap_or(*view);
    let range = ranges(&target, inventory).pop().map(|it| it.fact.cidr);
    let range = range.filter(|it| it.contains(&target));
    let deepest = range.map_or(block_size, |it| it.len());
    let len = (view.len() + STEP)
        .min(deepest)
        .min(view.family().bits() - 2);
    Cidr::new(target.first(), len.max(view.len()))
}

/// What one sees first: a whole range of the pool, or where it is far larger than what is held, the part with
/// all that is held.
pub(super) fn home(state: &PoolState, family: Family, inventory: &Inventory) -> Option<Cidr> {
    let ledger = &inventory.registry.ledger;
    let held = |root: &Cidr| {
        let root = *root;
        let all = ledger.overlapping(&root).map(|(_, claim)| claim.cidr);
        all.filter(move |cidr| root.contains(cidr))
    };
    let roots = state.space.cidrs(family);
    let block_size = state.space.block_len(family)?;
    let full = roots.iter().find(|root| held(root).next().is_some());
    let full = full.or(roots.first())?;
    let last = held(full).map(|it| it.last()).max();
    let (Some(first), Some(last)) = (held(full).next(), last) else {
        return Some(*full);
    };
    if block_size.saturating_sub(full.len()) <= MOST_BITS {
        return Some(*full);
    }
    // Not closer than 256 blocks.
    let len = first.len().min(block_size.saturating_sub(8));
    let mut view = Cidr::new(first.first(), len.max(full.len()))?;
    while !view.contains_addr(last) {
        view = view.parent()?;
    }
    Some(view)
}
