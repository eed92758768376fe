//! Checks that the tests which the page on security names exist.

use std::collections::BTreeSet;
use std::path::Path;

use crate::{assert_none, path, text};

/// Collects the names of the tests in a folder's Rust files.
fn tests_in(folder: &Path, all: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            tests_in(&entry.path(), all);
        } else if entry.path().extension().is_some_and(|it| it == "rs") {
            let code = std::fs::read_to_string(entry.path()).unwrap();
            for part in code.split("test]").skip(1) {
                // Other attributes may come between `#[test]` and the function, so this looks for the next `fn`.
                let begins = part.split_once("fn ").map(|it| it.1).unwrap_or_default();
                all.extend(begins.split('(').next().map(str::to_owned));
            }
        }
    }
}

#[test]
fn every_row_of_who_can_do_what_names_tests_that_exist() {
    let mut tests = BTreeSet::new();
    for folder in ["src", "crates", "tests", "e2e/tests"] {
        tests_in(&path(folder), &mut tests);
    }
    assert!(tests.len() > 500, "only {} were found", tests.len());
    let page = text("docs/security.md");
    let (_, table) = page.split_once("\n## Who can do what at worst\n").unwrap();
    let (table, _) = table.split_once("\n## ").unwrap();
    let rows = table.lines().filter(|it| it.starts_with('|')).skip(2);
    let mut wrong = Vec::new();
    let mut count = 0;
    for row in rows {
        count += 1;
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let [who, _, _, tried] = cells.as_slice() else {
            wrong.push(format!("not four cells: {row}"));
            continue;
        };
        let named: Vec<&str> = tried.split('`').skip(1).step_by(2).collect();
        if named.is_empty() {
            wrong.push(format!("{who}: no test"));
        }
        let missing = named.iter().filter(|it| !tests.contains(**it));
        wrong.extend(missing.map(|it| format!("{who}: there is no test {it}")));
    }
    assert_none(&wrong);
    assert!(count > 8, "only {count} rows were found");
}
