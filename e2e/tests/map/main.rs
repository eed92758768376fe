//! `kubectl cadastre map --web` in a real browser: what the page shows, and how it reacts to keys and the mouse.
//!
//! The tests need Chromium (Debian package `chromium`). Without it, every test is ignored and the reason is printed. If
//! `PICTURES` names a folder, the README's pictures are written to that folder (`make pictures`).
//!
//! | file | subject |
//! |---|---|
//! | `small` | a running cluster: two pools, a few pods |
//! | `large` | 20,000 blocks, without a controller |
//! | `page` | the plugin, and the browser with its page open |

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)] // allowed in helpers as in tests

mod large;
mod page;
mod small;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use cadastre_e2e::browser;
use cadastre_e2e::wait::until;
use libtest_mimic::{Arguments, Trial};
use tokio::runtime::Runtime;

const LIMIT: Duration = Duration::from_secs(180);

/// Waits until `look` returns a value; panics after [`LIMIT`].
async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Result<Option<T>>) -> T {
    until(what, LIMIT, look).await.unwrap()
}

type Test = fn(&Runtime);

macro_rules! tests {
    ($($module:ident::$name:ident),+ $(,)?) => {
        [$((
            concat!(stringify!($module), "::", stringify!($name)),
            (|runtime| runtime.block_on($module::$name())) as Test,
        )),+]
    };
}

fn main() -> ExitCode {
    let tests = tests![
        small::a_small_cluster_is_shown_searched_and_walked_through,
        large::twenty_thousand_blocks_are_one_picture,
    ];
    let missing = browser::find().is_none();
    if missing {
        eprintln!(
            "there is no chromium here, so {} tests are skipped: install the Debian package chromium",
            tests.len()
        );
    }
    let runtime = Arc::new(Runtime::new().unwrap());
    let trials = tests.map(|(name, test)| {
        let runtime = Arc::clone(&runtime);
        let run = move || {
            test(&runtime);
            Ok(())
        };
        Trial::test(name, run).with_ignored_flag(missing)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}
