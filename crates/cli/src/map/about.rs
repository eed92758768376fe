//! Describes a place on the map: a range and its node, an address, or a cell with several ranges.

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::cells::{CellRange, nth, place, ranges};
use super::place::MapSection;
use crate::address::{AddressState, describe};
use crate::inventory::Inventory;
use crate::render::{Style, count, some};
use cadastre_core::{Addr, Cidr};

/// At most this many addresses of a range are listed.
const LISTED: usize = 200;

/// A cell of a view, by its number in the view.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Spot {
    pub pool: String,
    pub view: Cidr,
    pub cell_size: u8,
    pub cell: u64,
}

/// The description of a place on the map.
#[derive(Debug, Serialize)]
pub(super) struct PlaceInfo {
    pub cidr: Cidr,
    /// The number of the place's first cell in the view. The place covers `count` cells
    pub at: u64,
    pub count: u64,
    #[serde(flatten)]
    pub text: PlaceText,
}

/// The texts and lists that describe a place.
#[derive(Debug, Default, Serialize)]
pub(super) struct PlaceText {
    /// A summary in one line
    pub words: String,
    pub facts: Vec<(String, String)>,
    /// How many thousandths of the addresses are in use, and how many are in cooldown
    pub bar: Option<(u16, u16)>,
    /// The node that has the range or address; `ranges` has all ranges of this node
    pub node: Option<String>,
    pub ranges: Vec<Cidr>,
    /// Addresses in use, with their pods; `more` is the number of further ones
    pub addresses: Vec<(Addr, String)>,
    pub more: usize,
}

impl Spot {
    /// Describes the cell. Fails if the pool or the cell does not exist.
    pub(super) fn about(&self, inventory: &Inventory) -> anyhow::Result<PlaceInfo> {
        let Self {
            view, cell_size, ..
        } = *self;
        let state = inventory.pool(&self.pool)?;
        let seen = MapSection {
            view,
            cell_size,
            state,
            inventory,
        };
        let cell = nth(&view, cell_size, self.cell);
        let about = cell.and_then(|it| PlaceInfo::of(&it, &seen));
        about.with_context(|| format!("{view} has no such cell"))
    }
}

impl PlaceInfo {
    /// Describes what is at the first address of `at`: a single address, if cells are addresses; else the range there;
    /// else the cell, if it has several ranges or none. If `at` contains the whole view, all of `at` is described.
    /// `None` if the place is not in the view.
    pub(super) fn of(at: &Cidr, seen: &MapSection) -> Option<Self> {
        let at = if at.contains(&seen.view) {
            *at
        } else {
            Cidr::new(at.first(), seen.cell_size)?
        };
        let found = ranges(&at, seen.inventory);
        let is_address = at.len() == at.family().bits();
        let (cidr, told) = match &*found {
            _ if is_address && found.iter().all(|it| it.fact.cidr != at) => {
                (at, address(&at, seen))
            }
            [one] => (one.fact.cidr, range(one, seen)),
            _ => (at, several(&at, &found, seen)),
        };
        let (at, count) = place(&cidr, &seen.view, seen.cell_size)?;
        Some(Self {
            cidr,
            at,
            count,
            text: told,
        })
    }
}

fn style(seen: &MapSection) -> Style {
    Style {
        wide: false,
        colour: false,
        width: 80,
        now: seen.inventory.now,
    }
}

/// Lists the parts of a range that are never assigned, or only to pods that ask for them.
fn reserved(cidr: &Cidr, seen: &MapSection) -> String {
    let spans = seen.state.reserved.iter().chain(&seen.state.on_request);
    let spans: Vec<_> = spans.filter_map(|span| span.within(cidr)).collect();
    some(&spans, 8)
}

fn range(range: &CellRange, seen: &MapSection) -> PlaceText {
    let CellRange {
        fact,
        used,
        capacity,
        ..
    } = range;
    let all = seen.inventory.in_use(&fact.cidr);
    let addresses = all.iter().take(LISTED).map(|(addr, pod)| {
        let who = match describe(*addr, seen.inventory).state {
            AddressState::InUse | AddressState::ReportedByPod => (*pod).to_owned(),
            state => format!("{pod} · {}", state.description()),
        };
        (*addr, who)
    });
    let overlaps = "shares addresses with another node's range".to_owned();
    let facts = [
        ("In use", format!("{used} of {capacity}")),
        (
            "State",
            range.state.map_or(String::new(), |it| format!("{it:?}")),
        ),
        (
            "Overlaps",
            Some(overlaps)
                .filter(|_| range.overlaps)
                .unwrap_or_default(),
        ),
        ("Reserved", reserved(&fact.cidr, seen)),
    ];
    let facts = facts.into_iter().filter(|(_, value)| !value.is_empty());
    let share =
        |part: u64| u16::try_from(u128::from(part) * 1000 / (*capacity).max(1)).unwrap_or(1000);
    let cooling = fact.cooling.map_or(0, i64::unsigned_abs);
    PlaceText {
        words: fact.describe(&style(seen)),
        facts: facts
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
        bar: Some((share(*used), share(cooling))),
        node: Some(fact.node.clone()),
        ranges: seen.inventory.ranges_of(&fact.node),
        addresses: addresses.collect(),
        more: all.len().saturating_sub(LISTED),
    }
}

fn address(at: &Cidr, seen: &MapSection) -> PlaceText {
    let report = describe(at.first(), seen.inventory);
    let user = seen.inventory.in_use(at).into_values().next();
    let words = user.into_iter().chain([report.state.description()]);
    let node = report.range.as_ref().map(|it| it.node.clone());
    let ranges = node.iter().flat_map(|it| seen.inventory.ranges_of(it));
    PlaceText {
        words: words.collect::<Vec<_>>().join(" · "),
        facts: report.facts(&style(seen)).rows(),
        ranges: ranges.collect(),
        node,
        ..PlaceText::default()
    }
}

fn several(at: &Cidr, found: &[CellRange], seen: &MapSection) -> PlaceText {
    let mut nodes: Vec<&str> = found.iter().map(|it| &*it.fact.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let mut roots = seen.state.space.cidrs(at.family()).iter();
    let reserved = reserved(at, seen);
    let words = if !found.is_empty() {
        format!(
            "{} of {}",
            count(found.len(), "range"),
            count(nodes.len(), "node")
        )
    } else if !reserved.is_empty() {
        format!("reserved: {reserved}")
    } else if roots.any(|it| it.overlaps(at)) {
        "free".to_owned()
    } else {
        "not in the pool".to_owned()
    };
    PlaceText {
        words,
        ..PlaceText::default()
    }
}
