//! Checks that links between the pages lead to files and headings that exist.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use crate::pages::{self, Page};
use crate::{assert_none, path};

/// Returns the file and the anchor that a link on a page leads to; `None` if the link leads out of the repository.
fn target(page: &str, link: &str) -> Option<(String, String)> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    if file.is_empty() {
        return Some((page.to_owned(), anchor.to_owned()));
    }
    let mut parts: Vec<&str> = Vec::new();
    let whole = Path::new(page).parent().unwrap().join(file);
    for part in whole.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::Normal(part) => parts.push(part.to_str().unwrap()),
            _ => {}
        }
    }
    Some((parts.join("/"), anchor.to_owned()))
}

#[test]
fn a_link_is_followed_from_where_it_stands() {
    let lead = |link| target("docs/runbooks/A.md", link).map(|(file, to)| format!("{file} {to}"));
    assert_eq!(lead("../pools.md#full").unwrap(), "docs/pools.md full");
    assert_eq!(lead("B.md").unwrap(), "docs/runbooks/B.md ");
    assert_eq!(lead("#do").unwrap(), "docs/runbooks/A.md do");
    assert_eq!(lead("https://example.com/x.md"), None);
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let pages = pages::all();
    let anchors: BTreeMap<&str, BTreeSet<String>> = pages
        .iter()
        .map(|it| (it.name.as_str(), it.anchors()))
        .collect();
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in &pages {
        for link in page.links() {
            let Some((file, anchor)) = target(&page.name, &link) else {
                continue;
            };
            count += 1;
            if !path(&file).exists() {
                wrong.push(format!("{}: {link}: there is no {file}", page.name));
            } else if !anchor.is_empty()
                && !anchors
                    .get(file.as_str())
                    .is_some_and(|it| it.contains(&anchor))
            {
                wrong.push(format!("{}: {link}: no such heading", page.name));
            }
        }
    }
    assert_none(&wrong);
    assert!(count > 80, "only {count} links were found");
}

/// README.md links to every page of docs/, and every other page can be reached from README.md.
#[test]
fn every_page_is_found_from_the_readme() {
    let pages = pages::all();
    let links = |page: &Page| -> BTreeSet<String> {
        let links = page.links().into_iter();
        links
            .filter_map(|it| target(&page.name, &it))
            .map(|it| it.0)
            .collect()
    };
    let by_name: BTreeMap<&str, &Page> = pages.iter().map(|it| (it.name.as_str(), it)).collect();
    let readme = links(by_name["README.md"]);
    let mut seen: BTreeSet<String> = BTreeSet::new();
    let mut next: BTreeSet<String> = ["README.md".to_owned()].into();
    while let Some(name) = next.pop_first() {
        if let Some(page) = by_name.get(name.as_str())
            && seen.insert(name)
        {
            next.extend(links(page));
        }
    }
    let mut wrong = Vec::new();
    for name in by_name.keys() {
        let of_docs = name
            .strip_prefix("docs/")
            .is_some_and(|it| !it.contains('/'));
        if of_docs && !readme.contains(*name) {
            wrong.push(format!("README.md does not name {name}"));
        } else if !seen.contains(*name) {
            wrong.push(format!("no page names {name}"));
        }
    }
    assert_none(&wrong);
}
