//! Decides which part of a pool is in view, and how many addresses a cell has.
//!
//! # Guarantees
//! - A view has at most 2^[`MOST_BITS`] cells.

use serde::Deserialize;

use super::cells::{CellRange, ranges};
use crate::inventory::Inventory;
use cadastre_controller::pools::PoolState;
use cadastre_core::{Cidr, Family};

/// A view has at most 2 to the power of this many cells, which is 256 times 128 cells.
const MOST_BITS: u8 = 15;
/// A range with at most this many host bits is shown address by address.
const ADDRESS_BITS: u8 = 12;
/// When the user zooms in, the view's prefix becomes longer by at most this many bits.
const STEP: u8 = 4;
/// To zoom out, at most this many views are offered between the view and the whole CIDR of the pool.
const STEPS: usize = 3;
/// If the view moves to a range, the view's prefix becomes this many bits shorter than the range's prefix.
const ROUND: u8 = 10;

/// The part of a pool that the page asks for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Place {
    /// The pool to show; `None` for the first pool
    pub pool: Option<String>,
    /// The range to show; `None` for the view that opens first
    pub view: Option<Cidr>,
    /// The chosen range or address. If this place is outside of `view`, a view around this place is shown instead
    pub at: Option<Cidr>,
    /// Whether to zoom in on the chosen range or address
    pub closer: bool,
    /// Whether to list the objects again before answering
    pub fresh: bool,
}

/// The part of a pool that is in view.
#[derive(Clone, Copy)]
pub(super) struct MapSection<'a> {
    pub view: Cidr,
    pub cell_size: u8,
    pub state: &'a PoolState,
    pub inventory: &'a Inventory,
}

impl<'a> MapSection<'a> {
    /// Returns the view for a place, and the ranges in this view. Returns `None` if the pool has no ranges.
    pub(super) fn from(
        place: &Place,
        state: &'a PoolState,
        inventory: &'a Inventory,
    ) -> Option<(Self, Vec<CellRange>)> {
        let families: Vec<Family> = state.space.families().collect();
        let is_in_pool = |cidr: &Cidr| families.contains(&cidr.family());
        let at = place.at.filter(is_in_pool);
        let view = place.view.filter(is_in_pool);
        let view = match (view.filter(|it| at.is_none_or(|at| it.overlaps(&at))), at) {
            (Some(view), _) => view,
            (None, Some(at)) => round(&at, state, inventory)?,
            (None, None) => home(state, *families.first()?, inventory)?,
        };
        let block_size = state.space.block_len(view.family())?;
        let at = at.filter(|it| view.contains(it));
        let view = if place.closer {
            closer(&view, at, block_size, inventory)?
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
        let section = Self {
            view,
            cell_size,
            state,
            inventory,
        };
        Some((section, ranges))
    }

    /// Whether each cell is an address of a range that contains the whole view.
    pub(super) fn is_by_address(&self, ranges: &[CellRange]) -> bool {
        let mut cidrs = ranges.iter().map(|it| it.fact.cidr);
        self.cell_size == self.view.family().bits()
            && cidrs.any(|it| it.contains(&self.view) && it.len() < self.cell_size)
    }

    /// Returns the views from the whole CIDR of the pool down to this view, so that the user can zoom out.
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

/// Returns the CIDR of the pool that contains the given range.
fn root<'a>(cidr: &Cidr, state: &'a PoolState) -> Option<&'a Cidr> {
    let mut roots = state.space.cidrs(cidr.family()).iter();
    roots.find(|root| root.contains(cidr))
}

/// Returns a view that shows a range together with its neighbours.
fn round(at: &Cidr, state: &PoolState, inventory: &Inventory) -> Option<Cidr> {
    let range = ranges(at, inventory).pop().map_or(*at, |it| it.fact.cidr);
    let widest = root(&range, state).map_or(0, Cidr::len);
    Cidr::new(range.first(), range.len().saturating_sub(ROUND).max(widest))
}

/// Returns the view after the user zooms in. The user zooms in on the chosen range or address (`at`), or on the first
/// addresses of the view if `at` is `None`. The new view is no smaller than the range that contains this target. If no
/// range contains the target, the new view is no smaller than a block.
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

/// Returns the view that opens first. This is a whole CIDR of the pool, preferably one with allocated ranges. If the
/// CIDR has too many blocks for one view, the view is the part of the CIDR that contains all its allocated ranges.
pub(super) fn home(state: &PoolState, family: Family, inventory: &Inventory) -> Option<Cidr> {
    let ledger = &inventory.registry.ledger;
    let allocated = |root: &Cidr| {
        let root = *root;
        let all = ledger.overlapping(&root).map(|(_, holding)| holding.cidr);
        all.filter(move |cidr| root.contains(cidr))
    };
    let roots = state.space.cidrs(family);
    let block_size = state.space.block_len(family)?;
    let full = roots.iter().find(|root| allocated(root).next().is_some());
    let full = full.or(roots.first())?;
    let last = allocated(full).map(|it| it.last()).max();
    let (Some(first), Some(last)) = (allocated(full).next(), last) else {
        return Some(*full);
    };
    if block_size.saturating_sub(full.len()) <= MOST_BITS {
        return Some(*full);
    }
    // The view is wide enough for 256 blocks or more.
    let len = first.len().min(block_size.saturating_sub(8));
    let mut view = Cidr::new(first.first(), len.max(full.len()))?;
    while !view.contains_addr(last) {
        view = view.parent()?;
    }
    Some(view)
}
