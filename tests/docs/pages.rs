//! Parses the pages: fenced blocks, headings, links, code in sentences.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::repository::{files, has_extension};
use crate::{path, text};

/// Pages outside docs/.
const AT_TOP: [&str; 5] = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "charts/cadastre/README.md",
];

pub struct Page {
    /// The path of the page in the repository, such as `docs/pools.md`
    pub name: String,
    pub blocks: Vec<Block>,
    /// The text of the page outside fenced blocks
    prose: String,
}

/// A fenced code block of a page.
pub struct Block {
    /// The language of the block, which may be empty
    pub language: String,
    /// The lines of the block, without the indentation of the fence
    pub text: String,
}

pub fn all() -> Vec<Page> {
    let root = path("");
    let pages = files("docs")
        .into_iter()
        .filter(|it| has_extension(it, "md"));
    let mut paths: BTreeSet<PathBuf> = pages.collect();
    paths.extend(AT_TOP.map(path));
    let page = |file: &PathBuf| {
        let name = file.strip_prefix(&root).unwrap().to_str().unwrap();
        Page::new(name, &text(name))
    };
    paths.iter().map(page).collect()
}

impl Page {
    pub fn new(name: &str, text: &str) -> Self {
        let mut page = Page {
            name: name.to_owned(),
            blocks: Vec::new(),
            prose: String::new(),
        };
        let mut inside: Option<(usize, Block)> = None;
        for line in text.lines() {
            let trimmed = line.trim_start();
            let indent = line.len() - trimmed.len();
            if let Some(language) = trimmed.strip_prefix("```") {
                if let Some((_, block)) = inside.take() {
                    page.blocks.push(block);
                } else {
                    let language = language.trim().to_owned();
                    let text = String::new();
                    inside = Some((indent, Block { language, text }));
                }
                continue;
            }
            let (indent, into) = match &mut inside {
                Some((indent, block)) => (*indent, &mut block.text),
                None => (0, &mut page.prose),
            };
            into.push_str(&line[indent.min(line.len() - trimmed.len())..]);
            into.push('\n');
        }
        assert!(inside.is_none(), "{name}: a block has no end");
        page
    }

    /// Returns the prose with each piece of code replaced by a backtick, and the pieces of code.
    fn parted(&self) -> (String, Vec<String>) {
        let (mut sentences, mut code) = (String::new(), Vec::new());
        // Code may continue on the next line, but not beyond a paragraph, a list item or a table row.
        for paragraph in self.prose.split("\n\n") {
            let mut joined = String::new();
            for line in paragraph.lines() {
                let line = line.trim();
                let new = ["- ", "* ", "|", "#"].iter().any(|it| line.starts_with(it));
                joined.push_str(if new { "\n" } else { " " });
                joined.push_str(line);
            }
            for line in joined.lines() {
                let line = line.replace("\\|", "\u{1}");
                for (n, part) in line.split('`').enumerate() {
                    let part = part.replace('\u{1}', "|");
                    if n % 2 == 1 {
                        code.push(part);
                    } else {
                        sentences.push_str(&part);
                        // A backtick stays in place of the code, so that a link around the code remains a link.
                        sentences.push('`');
                    }
                }
                sentences.push('\n');
            }
        }
        (sentences, code)
    }

    /// Returns the code between backticks in sentences.
    pub fn code(&self) -> Vec<String> {
        self.parted().1
    }

    /// The targets of links and pictures, as written.
    pub fn links(&self) -> Vec<String> {
        let sentences = self.parted().0;
        let ends = sentences.split("](").skip(1);
        ends.map(|it| it.split(')').next().unwrap().to_owned())
            .collect()
    }

    /// The anchors that links to this page can name after `#`. They are derived from the headings, as forges such as
    /// GitHub do it.
    pub fn anchors(&self) -> BTreeSet<String> {
        let headings = self.prose.lines().filter(|it| it.starts_with('#'));
        let mut anchors = BTreeSet::new();
        for heading in headings {
            let anchor = anchor(heading.trim_start_matches('#').trim());
            let next = (1..).map(|n| format!("{anchor}-{n}"));
            let mut names = std::iter::once(anchor.clone()).chain(next);
            anchors.insert(names.find(|it| !anchors.contains(it)).unwrap());
        }
        anchors
    }
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|c| match c {
        ' ' | '-' => Some('-'),
        '_' => Some('_'),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

#[test]
fn a_page_is_taken_apart() {
    let page = Page::new(
        "docs/x.md",
        "# One `two`, three\n\nSee [a\nb](c.md#d) and `--set\nx=1`, `a \\| b`.\n\n\
         - [`code`](e.md)\n\n  ```sh\n  ls # [no](link)\n    deep\n  ```\n\n## One two three\n",
    );
    assert_eq!(page.links(), ["c.md#d", "e.md"]);
    assert_eq!(page.code(), ["two", "--set x=1", "a | b", "code"]);
    let wanted = ["one-two-three", "one-two-three-1"].map(ToOwned::to_owned);
    assert_eq!(page.anchors(), wanted.into());
    let block = &page.blocks[0];
    assert_eq!(
        (block.language.as_str(), block.text.as_str()),
        ("sh", "ls # [no](link)\n  deep\n")
    );
}
