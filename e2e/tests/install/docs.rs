//! Commands of the documentation, run as they are written there.
//!
//! Pages are paths in `docs`. What stands for something of the reader's own is replaced by what there is
//! here: the registry, the chart's folder, `POOL`.

use std::path::Path;

use cadastre_e2e::helm::chart;
use cadastre_e2e::node::SHIPPED;

/// The pool that is meant where a page says `POOL`.
pub const POOL: &str = "small";

/// The first command in the `sh` blocks of a page that begins so, in words, without what is said about it.
pub fn command(page: &str, start: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs")
        .join(page);
    let text = std::fs::read_to_string(path).unwrap().replace("\\\n", " ");
    let blocks = text.split("```sh\n").skip(1);
    let mut lines = blocks.flat_map(|it| it.split("```").next().unwrap_or_default().lines());
    // Those of a list are indented.
    let found = lines.find(|it| it.trim_start().starts_with(start));
    let line = found.unwrap_or_else(|| panic!("docs/{page} has no command {start:?}"));
    let line = line.split("  #").next().unwrap_or(line).trim();
    let own = |word: String| {
        if word == "POOL" {
            return POOL.to_owned();
        }
        word.replace("REGISTRY/cadastre", SHIPPED.0)
            .replace("charts/cadastre", &chart().display().to_string())
    };
    words(line).into_iter().map(own).collect()
}

/// Splits at spaces that are not between single quotes.
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
