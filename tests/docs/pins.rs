//! Checks that everything that builds and releases use is pinned by digest, because a tag can be moved.

use std::fs;

use crate::{assert_none, path, text};

/// The rest of each line that begins with `start`.
fn after<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines()
        .filter_map(move |it| it.trim().trim_start_matches("- ").strip_prefix(start))
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.chars().all(|it| it.is_ascii_hexdigit())
}

#[test]
fn actions_are_named_by_their_commit_and_say_which_version_that_is() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in fs::read_dir(path(".github/workflows")).unwrap() {
        let file = entry.unwrap().path();
        for used in after(&fs::read_to_string(&file).unwrap(), "uses: ") {
            count += 1;
            let (name, version) = used.split_once(" # v").unwrap_or((used, ""));
            let commit = name.split_once('@').unwrap_or_default().1;
            if !is_hex(commit, 40) || version.is_empty() {
                wrong.push(format!("{}: {used}", file.display()));
            }
        }
    }
    assert_none(&wrong);
    assert!(count > 10, "only {count} were found");
}

#[test]
fn images_that_something_is_built_in_are_named_by_their_digest() {
    let (dockerfile, ci) = (text("Dockerfile"), text(".github/workflows/ci.yaml"));
    let images = after(&dockerfile, "ARG BUILDER=").chain(after(&ci, "container: "));
    let images: Vec<&str> = images.collect();
    assert_eq!(images.len(), 2);
    for image in images {
        let digest = image.split_once("@sha256:").unwrap_or_default().1;
        assert!(is_hex(digest, 64), "{image}");
    }
    // Each stage of the Dockerfile is based on nothing, on a pinned image, or on another stage. So no other image is
    // used.
    let mut stages = vec!["scratch", "${BUILDER}", "${BINARIES}"];
    for from in after(&dockerfile, "FROM ") {
        let (base, stage) = from.split_once(" AS ").unwrap_or((from, ""));
        assert!(stages.contains(&base), "{from}");
        stages.push(stage);
    }
}

#[test]
fn releases_say_what_they_were_built_of() {
    let release = text(".github/workflows/release.yaml");
    assert!(!release.contains("--provenance=false"));
    for what in [
        "--provenance=mode=max",
        "subject-digest: ${{ steps.image.outputs.digest }}",
        "subject-path: target/dist/*",
        "id-token: write",
        "attestations: write",
    ] {
        assert!(release.contains(what), "no {what}");
    }
}
