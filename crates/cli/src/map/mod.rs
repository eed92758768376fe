//! `kubectl cadastre map`: the space of a pool as a picture, in the terminal or in a browser.
//!
//! A cell is one block. If the pool has more blocks than the picture has cells, a cell is an aligned run of blocks. The
//! content of a cell is counted from the allocated ranges, so it is exact at every size.
//!
//! | file | subject |
//! |---|---|
//! | `cells` | the cells and their content: the common model of both pictures |
//! | `picture` | the picture as text |
//! | `web` | the server of the page, for this host only |
//! | `place`, `page`, `about` | which part of a pool is in view; the content of the page; the description of one cell |
//! | `find` | search by address or name |

mod about;
mod cells;
mod find;
mod page;
mod picture;
mod place;
#[cfg(test)]
mod tests;
mod web;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

use self::cells::{Cell, CellKind, cell_size, cells, cells_of, ranges};
use super::inventory::Inventory;
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::render::{self, Style};
use super::{ExitVerdict, Flags};
use cadastre_core::Cidr;

/// Draw the address space of a pool: which node has each block, how full it is, what is in quarantine
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre map default
  kubectl cadastre map default --by fill --rows 40
  NO_COLOR=1 kubectl cadastre map default
  kubectl cadastre map --web")]
pub(crate) struct MapArgs {
    /// Name of the pool; with --web, the pool to show first
    #[arg(required_unless_present = "web")]
    pool: Option<String>,

    /// Serve the map as a web page on 127.0.0.1 until Ctrl-C
    #[arg(long, conflicts_with_all = ["by", "rows"])]
    web: bool,

    /// Port of the page on 127.0.0.1; 0 picks a free one
    #[arg(long, requires = "web", default_value_t = 0)]
    port: u16,

    /// What an allocated cell shows
    #[arg(long, value_enum, default_value_t = By::Owner)]
    by: By,

    /// Maximum number of lines of cells for each family
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rows: u16,
}

/// What the character of an allocated cell stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum By {
    /// The node that has the cell, as a letter
    Owner,
    /// How many tenths of the cell's addresses are in use, as a digit
    Fill,
}

/// The picture of a pool, as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MapReport {
    pub pool: String,
    /// One part for each CIDR of the pool
    pub parts: Vec<PoolRange>,
    /// The letter of each node. The nodes with the most ranges come first. Nodes after the 52nd have no letter
    pub legend: Vec<(char, String)>,
    #[serde(skip)]
    by: Option<By>,
}

/// The picture of one CIDR of a pool.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolRange {
    pub cidr: Cidr,
    /// Prefix length of a block
    pub block_size: u8,
    pub cell_size: u8,
    /// The cells that are not entirely free, sorted by address
    pub cells: Vec<Cell>,
    /// The number of all cells, including cells that are entirely free
    pub total: u64,
}

/// The letters for nodes; further nodes are shown as `*`.
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Draws a pool in at most `most` cells per family, or in one cell per CIDR if the pool has more CIDRs than that. Fails
/// if there is no such pool.
pub(crate) fn map(
    name: &str,
    most: u64,
    by: By,
    inventory: &Inventory,
) -> anyhow::Result<MapReport> {
    let state = inventory.pool(name)?;
    let mut parts = Vec::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for family in state.space.families() {
        let Some(block_size) = state.space.block_len(family) else {
            continue;
        };
        let cidrs = state.space.cidrs(family);
        let common = cell_size(cidrs, block_size, most);
        for cidr in cidrs {
            let cell_size = common.max(cidr.len());
            let ranges = ranges(cidr, inventory);
            for range in ranges.iter().filter(|it| it.kind != CellKind::Quarantine) {
                *counts.entry(range.fact.node.clone()).or_default() += 1;
            }
            parts.push(PoolRange {
                cidr: *cidr,
                block_size,
                cell_size,
                cells: cells(*cidr, cell_size, &ranges, state),
                total: u64::try_from(cells_of(cidr, cell_size)).unwrap_or(u64::MAX),
            });
        }
    }
    let mut names: Vec<(String, usize)> = counts.into_iter().collect();
    names.sort_by_key(|(_, count)| Reverse(*count));
    let letters = LETTERS.chars().zip(names);
    Ok(MapReport {
        pool: name.to_owned(),
        legend: letters.map(|(letter, (name, _))| (letter, name)).collect(),
        parts,
        by: Some(by),
    })
}

/// Runs `map`: prints the picture, or serves the page until Ctrl-C.
pub(crate) async fn exec(
    args: &MapArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let pool = args.pool.as_deref();
    if args.web {
        return web::exec(pool, args.port, reach).await;
    }
    let inventory = reach.inventory(WantedKinds::Pods).await?;
    let style = Style::of_stdout(flags.output, inventory.now);
    let most = u64::from(args.rows) * style.width as u64 / 2;
    let report = map(pool.unwrap_or_default(), most, args.by, &inventory)?;
    render::print(&report, flags.output, inventory.now)?;
    Ok(ExitVerdict::Clean)
}
