//! Checks that docs/security.md names only tests that exist.

use std::collections::BTreeSet;

use crate::repository::{files, has_extension};
use crate::{assert_none, text};

/// The names of the tests in a file.
pub fn tests_in(code: &str) -> Vec<String> {
    // Other attributes may come between `#[test]` and the function, so the next `fn` after `#[test]` counts.
    let parts = code.split("test]").skip(1);
    let functions = parts.filter_map(|it| it.split_once("fn "));
    let names = functions.filter_map(|it| it.1.split('(').next());
    names.map(str::to_owned).collect()
}

#[test]
fn every_row_of_who_can_do_what_names_tests_that_exist() {
    let mut tests = BTreeSet::new();
    let folders = ["src", "crates", "tests", "e2e/tests", "e2e/controller"];
    let files = folders.into_iter().flat_map(files);
    for file in files.filter(|it| has_extension(it, "rs")) {
        tests.extend(tests_in(&std::fs::read_to_string(file).unwrap()));
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
