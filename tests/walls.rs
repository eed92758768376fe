//! Checks that the modules of a crate do not depend on each other in cycles, and that CONTRIBUTING.md names the crates
//! that each crate uses.
//!
//! A *module* here is a top-level module of a crate, with everything in it. The test reads the paths that begin with
//! `crate` or `super`, as rustfmt writes them. If the root of a crate re-exports a name, a use of that name counts as a
//! use of the module that defines it.

#![allow(clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

#[path = "common/repository.rs"]
mod repository;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use repository::crates;

/// A source file of a crate, without its tests.
struct File {
    path: PathBuf,
    /// The path from the root of the crate to the module that the file contains
    module: Vec<String>,
    /// The lines of the file with their numbers, without comments and tests
    lines: Vec<(usize, String)>,
}

/// For each module, the other modules that it uses, each with the first line that uses it.
type Uses = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn the_modules_of_a_crate_form_no_cycle() {
    let mut wrong = Vec::new();
    for package in crates() {
        let source = package.join("src");
        let mut uses = uses(&files(&source));
        while let Some(leaf) = without(&uses) {
            uses.remove(&leaf);
            for others in uses.values_mut() {
                others.remove(&leaf);
            }
        }
        for (module, other, line) in cycle(&uses) {
            wrong.push(format!("{module} uses {other}: {line}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "modules that use each other in a cycle:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn the_page_says_which_crate_uses_which() {
    let page = repository::text("CONTRIBUTING.md");
    let (_, table) = page.split_once("| crate | uses |\n|---|---|\n").unwrap();
    let (table, _) = table.split_once("\n\n").unwrap();
    let names = |text: &str| -> Vec<String> {
        let quoted = text.split('`').skip(1).step_by(2);
        quoted.map(str::to_owned).collect()
    };
    let said: BTreeMap<String, Vec<String>> = table
        .lines()
        .map(names)
        .map(|row| (row[0].clone(), row[1..].to_vec()))
        .collect();
    let mut are = BTreeMap::new();
    for package in crates() {
        let manifest = fs::read_to_string(package.join("Cargo.toml")).unwrap();
        let (_, list) = manifest.split_once("\n[dependencies]\n").unwrap();
        let list = list.split("\n[").next().unwrap();
        let own = list.lines().filter_map(|it| it.strip_prefix("cadastre-"));
        let own = own.map(|it| it.split('.').next().unwrap().to_owned());
        let name = package.file_name().unwrap().to_str().unwrap().to_owned();
        are.insert(name, own.collect::<Vec<_>>());
    }
    assert_eq!(said, are);
}

/// Returns a module that uses none of the remaining modules. Returns `None` if each of the remaining modules uses
/// another remaining module.
fn without(uses: &Uses) -> Option<String> {
    let mut all = uses.iter();
    let leaf = all.find(|(_, others)| others.keys().all(|it| !uses.contains_key(it)));
    leaf.map(|(module, _)| module.clone())
}

/// Returns a cycle among the remaining modules: each module with the next one, and the line that uses the next one.
fn cycle(uses: &Uses) -> Vec<(&str, &str, &str)> {
    let Some(mut at) = uses.keys().next() else {
        return Vec::new();
    };
    let mut steps: Vec<(&str, &str, &str)> = Vec::new();
    loop {
        if let Some(begin) = steps.iter().position(|it| it.0 == at) {
            return steps.split_off(begin);
        }
        let mut others = uses[at].iter();
        let (next, line) = others.find(|it| uses.contains_key(it.0)).unwrap();
        steps.push((at, next, line));
        at = next;
    }
}

fn uses(files: &[File]) -> Uses {
    let modules: BTreeSet<&String> = files.iter().filter_map(|it| it.module.first()).collect();
    let root = files.iter().find(|it| it.module.is_empty()).unwrap();
    let mut named = BTreeMap::new();
    for (_, statement) in &root.lines {
        if let Some(list) = statement.strip_prefix("pub use ") {
            for path in leaves(list.trim_end_matches(';')) {
                named.insert(path.last().unwrap().clone(), path[0].clone());
            }
        }
    }
    let mut uses = Uses::new();
    for file in files {
        let Some(own) = file.module.first() else {
            continue;
        };
        let of_own = uses.entry(own.clone()).or_default();
        for (line, statement) in &file.lines {
            for path in paths(statement) {
                let Some(first) = absolute(&path, &file.module).into_iter().next() else {
                    continue;
                };
                let target = named.get(&first).unwrap_or(&first);
                if target != own && modules.contains(target) {
                    let where_to = format!("{}:{line}", file.path.display());
                    of_own.entry(target.clone()).or_insert(where_to);
                }
            }
        }
    }
    uses
}

/// Converts a path that begins with `crate` or `super` to a path from the root of the crate.
fn absolute(path: &[String], module: &[String]) -> Vec<String> {
    let up = path.iter().take_while(|it| *it == "super").count();
    if up == 0 {
        return path[1..].to_vec();
    }
    let base = &module[..module.len().saturating_sub(up)];
    [base, &path[up..]].concat()
}

/// Returns those paths in a statement that begin with `crate` or `super`.
fn paths(statement: &str) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in statement.match_indices(start) {
            let before = statement[..at].chars().next_back();
            if before.is_some_and(|c| c == ':' || c == '_' || c.is_alphanumeric()) {
                continue;
            }
            let is_list = statement[..at].trim_start_matches("pub ").trim() == "use";
            let rest = &statement[at..];
            let end = if is_list {
                rest.find(';')
            } else {
                rest.find(|c: char| c != ':' && c != '_' && !c.is_alphanumeric())
            };
            all.extend(leaves(&rest[..end.unwrap_or(rest.len())]));
        }
    }
    all
}

/// All paths of a `use` tree such as `a::{b, c::{d, e}}`.
fn leaves(tree: &str) -> Vec<Vec<String>> {
    let Some((head, list)) = tree.split_once('{') else {
        let name = tree.split(" as ").next().unwrap();
        let parts = name.split("::").filter(|it| !it.is_empty());
        return vec![parts.map(|it| it.trim().to_owned()).collect()];
    };
    let list = list.rsplit_once('}').unwrap().0;
    let (mut depth, mut begin, mut all) = (0, 0, Vec::new());
    let bytes = list.char_indices().chain([(list.len(), ',')]);
    for (at, c) in bytes {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let item = list[begin..at].trim();
                if !item.is_empty() {
                    all.extend(leaves(&format!("{}{item}", head.trim_start())));
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
    all
}

/// Reads the files of a crate without tests, with each `use` statement on one line.
fn files(source: &Path) -> Vec<File> {
    let all = repository::files(source.to_str().unwrap()).into_iter();
    let code = all.filter(|it| repository::has_extension(it, "rs"));
    let file = |path: PathBuf| {
        let relative = path.strip_prefix(source).unwrap().with_extension("");
        let parts = relative.iter().map(|it| it.to_str().unwrap().to_owned());
        let mut module: Vec<String> = parts.collect();
        module.retain(|it| !["mod", "lib", "main"].contains(&it.as_str()));
        let tests = ["tests", "testing", "scripts", "fake"];
        let is_test = module.iter().any(|it| tests.contains(&it.as_str()));
        let lines = lines(&fs::read_to_string(&path).unwrap());
        (!is_test).then_some(File {
            path,
            module,
            lines,
        })
    };
    code.filter_map(file).collect()
}

fn lines(text: &str) -> Vec<(usize, String)> {
    let mut all: Vec<(usize, String)> = Vec::new();
    let mut in_use = false;
    for (number, line) in text.lines().enumerate() {
        // Tests are left out. They are always at the end of a file.
        if line == "mod tests {" || line == "pub mod testing {" {
            break;
        }
        let line = line.split("//").next().unwrap_or_default();
        if in_use {
            all.last_mut().unwrap().1.push_str(line.trim());
        } else {
            all.push((number + 1, line.trim().to_owned()));
        }
        let begins = line.trim_start().starts_with("use ") || line.contains("pub use ");
        in_use = (in_use || begins) && !line.contains(';');
    }
    all
}
