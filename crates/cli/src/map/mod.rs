//! `kubectl cadastre map`: the space of a pool as a picture.
//!
//! A cell is one block, or an aligned run of blocks where the pool has more than the picture has
//! cells. What it shows is counted from the ledger, so it is exact at every size.

mod picture;

use std::collections::BTreeMap;

use serde::Serialize;

use super::inventory::Inventory;
use super::lists::Wanted;
use super::reach::Reach;
use super::render::{self, Style};
use super::{Flags, Verdict};
use cadastre_controller::cluster::seen::Text;
use cadastre_controller::pools::PoolState;
use cadastre_core::{Addr, Cidr, State};

/// Draw the space of a pool: who has which block, how full, what rests
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre map default
  kubectl cadastre map default --by fill --rows 40
  NO_COLOR=1 kubectl cadastre map default")]
pub struct Args {
    /// The pool
    pool: String,

    /// What a taken cell shows
    #[arg(long, value_enum, default_value_t = By::Owner)]
    by: By,

    /// Lines of cells at most, of each family
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rows: u16,
}

/// What a taken cell shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// The node that has it, as a letter
    Owner,
    /// How many tenths of its addresses are in use
    Fill,
}

/// The picture of a pool, as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MapReport {
    /// The pool
    pub pool: String,
    /// A part a CIDR of the pool
    pub parts: Vec<Part>,
    /// Letters of nodes, those with most blocks first
    pub legend: Vec<(char, String)>,
    #[serde(skip)]
    by: Option<By>,
}

/// A CIDR of a pool.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Part {
    /// The CIDR
    pub cidr: Cidr,
    /// Prefix length of a block
    pub block_size: u8,
    /// Prefix length of a cell
    pub cell_size: u8,
    /// The cells that are not simply free, by address
    pub cells: Vec<Cell>,
    /// How many cells there are
    pub total: u64,
}

/// A block, or an aligned run of blocks.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cell {
    /// Which one
    pub cidr: Cidr,
    /// Its place among the cells
    pub at: u64,
    /// Thousandths of it that live nodes have
    pub held: u16,
    /// Thousandths that rest
    pub resting: u16,
    /// Thousandths that are never carved
    pub reserved: u16,
    /// Thousandths of what is held that are in use
    pub fill: u16,
    /// The nodes that have any of it; of many only the first few
    pub owners: Vec<String>,
}

/// Owners of one cell that are named.
const OWNERS: usize = 3;
/// Letters that tell nodes apart.
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Draws a pool in at most `cells` cells a family.
pub fn map(name: &str, cells: u64, by: By, inventory: &Inventory) -> anyhow::Result<MapReport> {
    let state = inventory.pool(name)?;
    let mut parts = Vec::new();
    for family in state.space.families() {
        let Some(block_size) = state.space.block_len(family) else {
            continue;
        };
        let cidrs = state.space.cidrs(family);
        let cell_size = cell_size(cidrs, block_size, cells);
        for cidr in cidrs {
            parts.push(part(*cidr, block_size, cell_size, state, inventory));
        }
    }
    Ok(MapReport {
        pool: name.to_owned(),
        legend: legend(state, inventory),
        parts,
        by: Some(by),
    })
}

/// The longest prefix with which all CIDRs together have no more than so many cells.
fn cell_size(cidrs: &[Cidr], block_size: u8, cells: u64) -> u8 {
    let fits = |len: &u8| {
        let all = cidrs.iter().map(|cidr| cells_of(cidr, *len));
        all.fold(0u128, u128::saturating_add) <= u128::from(cells.max(cidrs.len() as u64))
    };
    (0..=block_size).rev().find(fits).unwrap_or(0)
}

/// A CIDR that is smaller than a cell is one cell.
fn cells_of(cidr: &Cidr, len: u8) -> u128 {
    let bits = len.saturating_sub(cidr.len());
    1u128.checked_shl(bits.into()).unwrap_or(u128::MAX)
}

fn part(
    cidr: Cidr,
    block_size: u8,
    cell_size: u8,
    state: &PoolState,
    inventory: &Inventory,
) -> Part {
    let cell_size = cell_size.max(cidr.len());
    let total = u64::try_from(cells_of(&cidr, cell_size)).unwrap_or(u64::MAX);
    let order = cidr.family().bits() - cell_size;
    let nth = |at: u64| {
        let step = 1u128.checked_shl(order.into()).unwrap_or(0);
        let first = Addr {
            family: cidr.family(),
            value: cidr.first().value + u128::from(at) * step,
        };
        Cidr::new(first, cell_size)
    };
    let cells = (0..total).filter_map(|at| {
        let cell = cell(nth(at)?, at, state, inventory);
        let plain =
            cell.held == 0 && cell.resting == 0 && cell.reserved == 0 && cell.owners.is_empty();
        (!plain).then_some(cell)
    });
    Part {
        cidr,
        block_size,
        cell_size,
        cells: cells.collect(),
        total,
    }
}

fn cell(range: Cidr, at: u64, state: &PoolState, inventory: &Inventory) -> Cell {
    let registry = &inventory.registry;
    let (mut held, mut resting) = (0u128, 0u128);
    let (mut used, mut capacity) = (0u128, 0u128);
    let mut owners: Vec<Text> = Vec::new();
    for (id, claim) in registry.ledger.overlapping(&range) {
        let inside = if claim.cidr.contains(&range) {
            range
        } else {
            claim.cidr
        };
        if claim.state == State::Resting {
            resting = resting.saturating_add(inside.size());
            continue;
        }
        held = held.saturating_add(inside.size());
        let block = registry.blocks.get(&claim.cidr).filter(|it| it.claim == id);
        let in_use = match block {
            Some(entry) if inside == entry.cidr => u128::from(inventory.used_in(entry)),
            _ => inventory.pods_in(&inside).count() as u128,
        };
        used = used.saturating_add(in_use);
        capacity = capacity.saturating_add(inside.size());
        if let Some((name, _)) = registry.who(claim.holder)
            && !owners.contains(name)
        {
            owners.push(name.clone());
        }
    }
    let reserved = state
        .reserved
        .iter()
        .chain(&state.on_request)
        .filter_map(|span| span.within(&range));
    let sizes = reserved.map(|span| (span.last().value - span.first().value).saturating_add(1));
    let reserved = sizes.fold(0, u128::saturating_add);
    Cell {
        cidr: range,
        at,
        held: part_of(held, range.size()),
        resting: part_of(resting, range.size()),
        reserved: part_of(reserved, range.size()),
        fill: part_of(used, capacity),
        owners: owners
            .iter()
            .take(OWNERS + 1)
            .map(ToString::to_string)
            .collect(),
    }
}

/// In thousandths; what there is a little of is never nothing.
fn part_of(some: u128, all: u128) -> u16 {
    if some == 0 || all == 0 {
        return 0;
    }
    let scaled = match some.checked_mul(1000) {
        Some(scaled) => scaled / all,
        None => some / (all / 1000).max(1),
    };
    u16::try_from(scaled.clamp(1, 1000)).unwrap_or(1000)
}

fn legend(state: &PoolState, inventory: &Inventory) -> Vec<(char, String)> {
    let mut counts: BTreeMap<Text, usize> = BTreeMap::new();
    for family in state.space.families() {
        for cidr in state.space.cidrs(family) {
            for (_, claim) in inventory.registry.ledger.overlapping(cidr) {
                let who = inventory.registry.who(claim.holder);
                if let Some((name, _)) = who.filter(|_| claim.state != State::Resting) {
                    *counts.entry(name.clone()).or_default() += 1;
                }
            }
        }
    }
    let mut names: Vec<(usize, Text)> = counts.into_iter().map(|(name, n)| (n, name)).collect();
    names.sort_by(|a, b| (b.0, &a.1).cmp(&(a.0, &b.1)));
    let letters = LETTERS.chars().zip(names);
    letters
        .map(|(letter, (_, name))| (letter, name.to_string()))
        .collect()
}

/// Runs the verb.
pub async fn exec(args: &Args, flags: &Flags, reach: &Reach) -> anyhow::Result<Verdict> {
    let inventory = reach.inventory(Wanted::PODS).await?;
    let style = Style::of_stdout(flags.output, inventory.now);
    let cells = u64::from(args.rows) * style.width as u64 / 2;
    let report = map(&args.pool, cells, args.by, &inventory)?;
    render::print(&report, flags.output, inventory.now)?;
    Ok(Verdict::Clean)
}
