//! The data of the map's page for a place: a summary of the pool, and a part of the pool as a grid.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::about::PlaceInfo;
use super::cells::{Cell, CellKind, addresses, cells, nth};
use super::place::{MapSection, Place, home};
use crate::inventory::Inventory;
use crate::render::left;
use crate::show::{self, PoolRow};
use cadastre_controller::pools::{PoolPhase, PoolState};
use cadastre_core::Cidr;

/// A pool with at least this utilization in percent is shown as nearly exhausted.
const NEARLY_FULL: u8 = 90;

/// The data of the page: a summary of a pool, and a part of it as a grid.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MapView {
    pub pools: Vec<String>,
    pub pool: String,
    /// Each family of the pool, with the view of this family that opens first
    pub families: Vec<(String, Cidr)>,
    pub figures: Vec<Figure>,
    pub troubles: Vec<String>,
    pub as_of: Timestamp,
    /// `None` if the pool has no ranges that can be parsed
    pub picture: Option<Picture>,
}

/// A name, a value, and whether the page marks the value as bad.
type Figure = (&'static str, String, bool);

/// A range as a grid, in which addresses grow to the right and downwards.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Picture {
    pub family: String,
    pub view: Cidr,
    pub cell_size: u8,
    pub columns: u64,
    /// The first address of each line
    pub lines: Vec<String>,
    pub cells: Vec<Cell>,
    /// The kinds of ranges in view, each with the number of these ranges
    pub legend: Vec<(CellKind, String)>,
    /// All CIDRs of the pool in this family. `path` has the views through which the user can zoom out, from one of
    /// these CIDRs down to the present view
    pub roots: Vec<Cidr>,
    pub path: Vec<Cidr>,
    pub chosen: Option<PlaceInfo>,
}

/// Returns the data of the page for a place. Fails if there is no such pool.
pub(super) fn view(place: &Place, inventory: &Inventory) -> anyhow::Result<MapView> {
    let pools = &inventory.registry.pools;
    let first = pools.iter().next().map(|it| &*it.name);
    let name = place.pool.as_deref().or(first).unwrap_or_default();
    let state = inventory.pool(name)?;
    let picture = picture(place, state, inventory);
    let report = show::pool(name, inventory)?;
    let family = picture.as_ref().map(|it| it.family.as_str());
    let mut rows = report.families.iter();
    let row = rows.find(|row| Some(row.family.as_str()) == family);
    let mut troubles = report.conditions.clone();
    if state.phase != PoolPhase::Serving {
        troubles.insert(0, format!("Not serving: {}", state.phase));
    }
    let families = state.space.families();
    let families = families.filter_map(|it| Some((it.to_string(), home(state, it, inventory)?)));
    Ok(MapView {
        pools: pools.iter().map(|it| it.name.to_string()).collect(),
        pool: name.to_owned(),
        families: families.collect(),
        figures: row.map_or(Vec::new(), |row| figures(row, inventory)),
        troubles,
        as_of: inventory.now,
        picture,
    })
}

fn picture(place: &Place, state: &PoolState, inventory: &Inventory) -> Option<Picture> {
    let (section, ranges) = MapSection::from(place, state, inventory)?;
    let MapSection {
        view, cell_size, ..
    } = section;
    let is_by_address = section.is_by_address(&ranges);
    let bits = cell_size - view.len();
    let columns = 1 << bits.div_ceil(2);
    let lines = (0..1 << (bits / 2)).filter_map(|line: u64| nth(&view, cell_size, line * columns));
    let mut legend: BTreeMap<CellKind, usize> = BTreeMap::new();
    for range in &ranges {
        *legend.entry(range.kind).or_default() += 1;
    }
    let legend = legend
        .into_iter()
        .map(|(kind, number)| (kind, short(&number.to_string())));
    let at = place.at.filter(|it| it.overlaps(&view));
    let chosen = at.or(is_by_address.then_some(view));
    Some(Picture {
        family: view.family().to_string(),
        view,
        cell_size,
        columns,
        lines: lines.map(|it| it.first().to_string()).collect(),
        cells: if is_by_address {
            addresses(view, inventory)
        } else {
            cells(view, cell_size, &ranges, state)
        },
        legend: legend.collect(),
        roots: state.space.cidrs(view.family()).to_vec(),
        path: section.path(),
        chosen: chosen.and_then(|at| PlaceInfo::of(&at, &section)),
    })
}

fn figures(row: &PoolRow, inventory: &Inventory) -> Vec<Figure> {
    let counts = &row.counts;
    let percent = counts.utilization.trim_end_matches('%').parse();
    let is_full = percent.is_ok_and(|it: u8| it >= NEARLY_FULL);
    let mut all = vec![
        ("utilization", counts.utilization.clone(), is_full),
        ("blocks allocated", short(&counts.allocated), false),
        ("blocks free", short(&counts.free), false),
        ("in quarantine", short(&counts.quarantined), false),
    ];
    if let Some(addresses) = &counts.addresses {
        all.push(("addresses in use", short(&addresses.used), false));
        all.push(("cooling", short(&addresses.cooling), false));
    }
    if row.exhausts_at.is_some() {
        let left = left(row.exhausts_at, inventory.now);
        all.push(("exhausted, if growth continues", left, false));
    }
    all.push(("nodes", row.nodes.to_string(), false));
    let waiting = inventory.waiting(&row.pool);
    all.extend(waiting.map(|it| ("nodes wait", it.to_string(), true)));
    all
}

/// Formats a number with spaces between thousands. If the number is too long to read, formats it as an approximate
/// multiple of a power of ten.
fn short(number: &str) -> String {
    if number.len() > 9 {
        let (first, rest) = number.split_at(1);
        return format!("≈ {first}.{} · 10^{}", &rest[..1], rest.len());
    }
    let digits = number.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = digits.map(String::from_utf8_lossy).collect();
    groups.join(" ")
}
