//! Describes a place on the map: a range and its node, an address, or a cell with several ranges.

use std::collections::BTreeSet;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::cells::{CellRange, nth, place, ranges};
use super::place::MapSection;
use crate::address::{AddressState, describe};
use crate::inventory::Inventory;
use crate::render::{FactLines, Style, count, some};
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
    /// The number, in the view, of the first cell of the place; `count` is the number of cells of the place
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
    /// Addresses in use, with their pods; `more` is the number of addresses in use that are left out
    pub addresses: Vec<(Addr, String)>,
    pub more: usize,
}

impl Spot {
    /// Describes the cell. Fails if the pool or the cell does not exist.
    pub(super) fn about(&self, inventory: &Inventory) -> anyhow::Result<PlaceInfo> {
        let section = MapSection {
            view: self.view,
            cell_size: self.cell_size,
            state: inventory.pool(&self.pool)?,
            inventory,
        };
        let cell = nth(&self.view, self.cell_size, self.cell);
        let about = cell.and_then(|it| PlaceInfo::of(&it, &section));
        about.with_context(|| format!("{} has no such cell", self.view))
    }
}

impl PlaceInfo {
    /// Describes the place at the first address of `at`. The place is:
    /// - all of `at`, if `at` contains the whole view
    /// - else one address, if each cell of the view is one address
    /// - else the range at this address, if exactly one range lies in the cell
    /// - else the cell
    ///
    /// Returns `None` if the place is not in the view.
    pub(super) fn of(at: &Cidr, section: &MapSection) -> Option<Self> {
        let at = if at.contains(&section.view) {
            *at
        } else {
            Cidr::new(at.first(), section.cell_size)?
        };
        let found = ranges(&at, section.inventory);
        let is_address = at.len() == at.family().bits();
        let (cidr, text) = match &*found {
            _ if is_address && found.iter().all(|it| it.fact.cidr != at) => {
                (at, address(&at, section))
            }
            [one] => (one.fact.cidr, range(one, section)),
            _ => (at, several(&at, &found, section)),
        };
        let (at, count) = place(&cidr, &section.view, section.cell_size)?;
        Some(Self {
            cidr,
            at,
            count,
            text,
        })
    }
}

fn style(section: &MapSection) -> Style {
    Style {
        wide: false,
        colour: false,
        width: 80,
        now: section.inventory.now,
    }
}

/// Lists the addresses of a range that are never assigned, or that are assigned only to pods that ask for them.
fn reserved(cidr: &Cidr, section: &MapSection) -> String {
    let spans = section
        .state
        .reserved
        .iter()
        .chain(&section.state.on_request);
    let spans: Vec<_> = spans.filter_map(|span| span.within(cidr)).collect();
    some(&spans, 8)
}

fn range(range: &CellRange, section: &MapSection) -> PlaceText {
    let CellRange {
        fact,
        used,
        capacity,
        ..
    } = range;
    let all = section.inventory.in_use(&fact.cidr);
    let addresses = all.iter().take(LISTED).map(|(addr, pod)| {
        let who = match describe(*addr, section.inventory).state {
            AddressState::InUse | AddressState::ReportedByPod => (*pod).to_owned(),
            state => format!("{pod} · {}", state.description()),
        };
        (*addr, who)
    });
    let mut facts = FactLines::default();
    facts.add("In use", format!("{used} of {capacity}"));
    if let Some(state) = range.state {
        facts.add("State", format!("{state:?}"));
    }
    if range.overlaps {
        facts.add("Overlaps", "shares addresses with another node's range");
    }
    facts.add("Reserved", reserved(&fact.cidr, section));
    let share =
        |part: u64| u16::try_from(u128::from(part) * 1000 / (*capacity).max(1)).unwrap_or(1000);
    let cooling = fact.cooling.map_or(0, i64::unsigned_abs);
    PlaceText {
        words: fact.describe(&style(section)),
        facts: facts.rows(),
        bar: Some((share(*used), share(cooling))),
        node: Some(fact.node.clone()),
        ranges: section.inventory.ranges_of(&fact.node),
        addresses: addresses.collect(),
        more: all.len().saturating_sub(LISTED),
    }
}

fn address(at: &Cidr, section: &MapSection) -> PlaceText {
    let report = describe(at.first(), section.inventory);
    let user = section.inventory.in_use(at).into_values().next();
    let words = user.into_iter().chain([report.state.description()]);
    let node = report.range.as_ref().map(|it| it.node.clone());
    let ranges = node.iter().flat_map(|it| section.inventory.ranges_of(it));
    PlaceText {
        words: words.collect::<Vec<_>>().join(" · "),
        facts: report.facts(&style(section)).rows(),
        ranges: ranges.collect(),
        node,
        ..PlaceText::default()
    }
}

fn several(at: &Cidr, found: &[CellRange], section: &MapSection) -> PlaceText {
    let nodes: BTreeSet<&str> = found.iter().map(|it| &*it.fact.node).collect();
    let mut roots = section.state.space.cidrs(at.family()).iter();
    let reserved = reserved(at, section);
    let words = if !found.is_empty() {
        let (ranges, nodes) = (count(found.len(), "range"), count(nodes.len(), "node"));
        format!("{ranges} of {nodes}")
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
