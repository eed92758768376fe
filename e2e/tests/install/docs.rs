//! Runs commands of the documentation as they are written there.
//!
//! A page is given by its path in `docs`. Only placeholders for names that the reader chooses are replaced: the
//! registry, the chart's folder, and `POOL`.

use std::path::{Path, PathBuf};

use cadastre_e2e::helm::chart;
use cadastre_e2e::node::SHIPPED;

/// The name by which `POOL` is replaced.
pub const POOL: &str = "small";

/// Returns the words of the page's first command that begins with `start`, without a comment after the command. Only
/// `sh` code blocks are searched.
pub fn command(page: &str, start: &str) -> Vec<String> {
    commands(page, start).swap_remove(0)
}

/// Returns the page's first command that begins with `start`, and the commands after it in the same code block.
pub fn commands(page: &str, start: &str) -> Vec<Vec<String>> {
    let path = root().join("docs").join(page);
    let text = std::fs::read_to_string(path).unwrap().replace("\\\n", " ");
    let blocks = text.split("```sh\n").skip(1);
    let mut blocks = blocks.map(|it| it.split("```").next().unwrap_or_default().lines());
    // Within a list, a code block is indented, so leading spaces are ignored.
    let begins = |it: &&str| it.trim_start().starts_with(start);
    let found = blocks.find_map(|lines| {
        let lines: Vec<&str> = lines.skip_while(|it| !begins(it)).collect();
        Some(lines).filter(|it| !it.is_empty())
    });
    let lines = found.unwrap_or_else(|| panic!("docs/{page} has no command {start:?}"));
    let lines = lines.iter().filter(|it| !it.trim().is_empty());
    lines
        .map(|line| line.split("  #").next().unwrap_or(line).trim())
        .map(|line| words(line).into_iter().map(own).collect())
        .collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns a word of a command with the placeholders of the documentation replaced by the names of this test.
fn own(word: String) -> String {
    if word == "POOL" {
        return POOL.to_owned();
    }
    if word.starts_with("config/") {
        return root().join(word).display().to_string();
    }
    word.replace("REGISTRY/cadastre", SHIPPED.0)
        .replace("charts/cadastre", &chart().display().to_string())
}

/// Splits a line at spaces outside single quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for (n, part) in line.split('\'').enumerate() {
        if n % 2 == 1 {
            words.last_mut().unwrap().push_str(part);
            continue;
        }
        for c in part.chars() {
            match c {
                ' ' => words.push(String::new()),
                c => words.last_mut().unwrap().push(c),
            }
        }
    }
    words.retain(|it| !it.is_empty());
    words
}
