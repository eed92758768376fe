//! Formats the picture of a pool as text.

use std::fmt::Write as _;

use super::cells::{Cell, CellKind, nth};
use super::{By, LETTERS, MapReport, PoolRange};
use crate::render::{Style, VerbReport, count};
use cadastre_core::Family;
use cadastre_core::inert;

impl MapReport {
    fn letter(&self, owner: &str) -> char {
        let entry = self.legend.iter().find(|(_, name)| name == owner);
        entry.map_or('*', |(letter, _)| *letter)
    }

    /// Returns the character that the picture shows for a cell.
    fn sign(&self, cell: &Cell) -> char {
        let tenth = |part: u16| char::from_digit(u32::from(part / 100).min(9), 10).unwrap_or('9');
        match (cell.kind, cell.owners.as_slice()) {
            (CellKind::Quarantine, _) => '~',
            (CellKind::Reserved, _) if cell.reserved < 1000 => '.',
            (CellKind::Reserved, _) => '#',
            _ if cell.overlaps => '!',
            _ if self.by == Some(By::Fill) => tenth(cell.fill),
            (_, [owner]) if cell.allocated >= 1000 => self.letter(owner),
            _ => tenth(cell.allocated),
        }
    }
}

impl VerbReport for MapReport {
    const COLOURED: bool = true;

    fn text(&self, style: &Style) -> String {
        let mut text = String::new();
        for part in &self.parts {
            picture(self, part, style, &mut text);
        }
        let mut signs = vec!["[.] free", "[~] in quarantine", "[#] never allocated"];
        let mut parts = self.parts.iter();
        let has_runs = parts.any(|part| part.cell_size < part.block_size);
        if self.by == Some(By::Fill) {
            signs.push("[0-9] tenths of its addresses in use");
        } else if has_runs {
            signs.push("[0-9] tenths of it allocated, to several nodes or in part");
        }
        let mut cells = self.parts.iter().flat_map(|part| &part.cells);
        if cells.any(|cell| cell.overlaps) {
            signs.push("[!] allocated to several nodes, an error");
        }
        let _ = writeln!(text, "{}", signs.join("   "));
        if self.by == Some(By::Owner) && !self.legend.is_empty() {
            let letters = self.legend.iter();
            let letters = letters.map(|(letter, name)| {
                let key = format!("[{letter}]");
                format!("{} {}", paint(&key, *letter, style), inert::line(name))
            });
            let _ = writeln!(text, "{}", wrapped(letters.collect(), style));
        }
        text
    }
}

fn picture(report: &MapReport, part: &PoolRange, style: &Style, text: &mut String) {
    let blocks = 1u128.checked_shl((part.block_size - part.cell_size).into());
    let each = match blocks {
        Some(1) => format!("a block of /{}", part.block_size),
        Some(blocks) => format!("{blocks} blocks of /{}", part.block_size),
        None => format!("a /{}", part.cell_size),
    };
    let cells = usize::try_from(part.total).unwrap_or(usize::MAX);
    let cells = count(cells, "cell");
    let _ = writeln!(text, "{}   {cells}, each {each}", part.cidr);
    let label = match part.cidr.family() {
        Family::V4 => "255.255.255.255".len(),
        Family::V6 => part.cidr.first().to_string().len().max(24),
    };
    let room = style.width.saturating_sub(label + 2).max(8);
    // The number of cells in a line is a power of two, so each line begins at an aligned address.
    let across = 1u64 << room.ilog2();
    let mut shown = part.cells.iter().peekable();
    let mut at = 0;
    while at < part.total {
        let first = nth(&part.cidr, part.cell_size, at);
        let first = first.map_or(String::new(), |it| it.first().to_string());
        // Adjacent rows without allocated cells are shown as one line, which says how many rows it stands for.
        let next = shown.peek();
        let next = next.map_or(part.total, |cell| cell.at.max(at) / across * across);
        let rows = next.saturating_sub(at).div_ceil(across);
        if rows > 1 {
            let rows = count(usize::try_from(rows).unwrap_or(usize::MAX), "row");
            let _ = writeln!(text, "{first:label$}  ({rows} of free space)");
            at = next;
            continue;
        }
        let mut line = String::new();
        for here in at..part.total.min(at + across) {
            let cell = shown.peek().filter(|cell| cell.at <= here);
            let sign = cell.map_or('.', |cell| report.sign(cell));
            line += &paint(&sign.to_string(), sign, style);
            shown.next_if(|cell| cell.at + cell.count <= here + 1);
        }
        at += across;
        let _ = writeln!(text, "{first:label$}  {line}");
    }
    text.push('\n');
}

/// Adds the colour of a cell's character, if the style allows colours.
fn paint(text: &str, sign: char, style: &Style) -> String {
    if !style.colour {
        return text.to_owned();
    }
    let code = match sign {
        '.' => return format!("\x1b[2m{text}\x1b[0m"),
        '~' => 33,
        '#' => 90,
        '!' => 91,
        '0'..='9' | '*' => 37,
        letter => {
            const COLOURS: [u8; 10] = [36, 32, 35, 34, 31, 96, 92, 95, 94, 91];
            let nth = LETTERS.find(letter).unwrap_or(0);
            COLOURS[nth % COLOURS.len()]
        }
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

fn wrapped(words: Vec<String>, style: &Style) -> String {
    let mut text = String::new();
    let mut width = 0;
    for word in words {
        // The 9 characters of escape sequences take no space on the screen, so they do not count.
        let long = word.len() - if style.colour { 9 } else { 0 };
        if width > 0 && width + 3 + long > style.width {
            text.push('\n');
            width = 0;
        } else if width > 0 {
            text += "   ";
            width += 3;
        }
        width += long;
        text += &word;
    }
    text
}
