//! The ADDs that found no free address, and the pools from which they want a block.
//!
//! Each entry counts in the node's demand for blocks. The entry of an ADD outlives the ADD, so that the node has the
//! block when the runtime repeats the ADD.

use std::collections::BTreeMap;
use std::time::Duration;

use super::demand::PendingAdds;
use cadastre_node::Attachment;

/// How long an entry is kept after its ADD last recorded it.
const LIFE: Duration = Duration::from_secs(60);
/// The maximum number of entries. It exceeds the number of pods that a node starts at the same time.
const MOST: usize = 1024;

/// For each attachment: the pools of which it wants an address, and the time at which this entry expires.
#[derive(Debug, Default)]
pub struct PendingAddBook(BTreeMap<Attachment, (Vec<String>, Duration)>);

impl PendingAddBook {
    /// Records that an attachment wants an address of any of these pools. If the maximum number of entries is reached,
    /// no entry is added.
    pub fn add(&mut self, attachment: &Attachment, pools: &[String], now: Duration) {
        if self.0.len() >= MOST && !self.0.contains_key(attachment) {
            return;
        }
        let request = (pools.to_vec(), now + LIFE);
        self.0.insert(attachment.clone(), request);
    }

    /// Removes the entry of an attachment that now has an address, or no longer wants one. Returns whether there was an
    /// entry.
    pub fn remove(&mut self, attachment: &Attachment) -> bool {
        self.0.remove(attachment).is_some()
    }

    /// Returns the earliest of the times at which the ADDs that want this pool were last recorded, as a time since
    /// boot. Returns `None` if no ADD wants the pool.
    pub fn since(&self, pool: &str) -> Option<Duration> {
        let of = |(pools, until): &(Vec<String>, Duration)| {
            pools.iter().any(|it| it == pool).then_some(*until)
        };
        let until = self.0.values().filter_map(of).min()?;
        Some(until.saturating_sub(LIFE))
    }

    /// Removes expired entries. Then returns the number of ADDs that want each pool, and the time at which the next
    /// entry expires.
    pub fn count(&mut self, now: Duration) -> (PendingAdds, Option<Duration>) {
        self.0.retain(|_, (_, until)| *until > now);
        let mut counts = PendingAdds::new();
        for pool in self.0.values().flat_map(|(pools, _)| pools) {
            *counts.entry(pool.clone()).or_default() += 1;
        }
        (counts, self.0.values().map(|(_, until)| *until).min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::testing::attachment;

    #[test]
    fn an_add_counts_once_until_it_is_removed_or_expires() {
        let mut book = PendingAddBook::default();
        let pools =
            |names: &[&str]| -> Vec<String> { names.iter().map(|it| (*it).into()).collect() };
        book.add(&attachment("c1"), &pools(&["a"]), Duration::ZERO);
        book.add(
            &attachment("c1"),
            &pools(&["a", "b"]),
            Duration::from_secs(3),
        );
        book.add(&attachment("c2"), &pools(&["a"]), Duration::from_secs(5));
        let (counts, until) = book.count(Duration::from_secs(6));
        assert_eq!((counts["a"], counts["b"]), (2, 1));
        assert_eq!(until, Some(Duration::from_secs(63)));
        assert_eq!(book.since("a"), Some(Duration::from_secs(3)));
        assert_eq!(book.since("c"), None);
        assert!(book.remove(&attachment("c2")) && !book.remove(&attachment("c2")));
        assert_eq!(book.count(Duration::from_secs(62)).0["a"], 1);
        assert!(book.count(Duration::from_secs(63)).0.is_empty());
    }

    #[test]
    fn the_number_of_entries_is_bounded() {
        let mut book = PendingAddBook::default();
        for n in 0..5000 {
            book.add(
                &attachment(&n.to_string()),
                &["a".to_owned()],
                Duration::ZERO,
            );
        }
        assert_eq!(book.count(Duration::ZERO).0["a"], 1024);
    }
}
