//! Seeds that no earlier run has tried.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::SystemTime;

/// The value of an environment variable; `None` if it is not set or empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Computes a seed from a text. The last nine digits of the seed are zeros, so that users recognise computed seeds.
fn seed_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish() % 1_000_000_000 * 1_000_000_000
}

/// Returns a seed that is computed from the commit, which the environment variable `COMMIT` names, or from the clock if
/// the commit is unknown. Also says which.
pub fn seed_of_commit() -> (u64, String) {
    match variable("COMMIT") {
        Some(commit) => (seed_of(&commit), format!("commit {commit}")),
        None => (seed_of_clock(), "the clock, as no COMMIT is given".into()),
    }
}

pub fn seed_of_clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    seed_of(&now.unwrap_or_default().as_nanos().to_string())
}
