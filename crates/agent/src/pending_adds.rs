//! Which pools should allocate blocks because an ADD found no free address. A *wish* is the record of one such ADD.
//!
//! A wish outlives its ADD for a while, so that the block is there when the runtime tries again.

use std::collections::BTreeMap;
use std::time::Duration;

use super::demand::PendingAdds;
use cadastre_node::Attachment;

/// How long a wish lasts after its ADD last recorded it.
const LIFE: Duration = Duration::from_secs(60);
/// At most this many wishes are kept, because no node starts more pods at once.
const MOST: usize = 1024;

/// The wishes by attachment, each with its pools and the time at which it expires.
#[derive(Debug, Default)]
pub struct PendingAddBook(BTreeMap<Attachment, (Vec<String>, Duration)>);

impl PendingAddBook {
    /// Records that an attachment wants an address of any of these pools. Ignored if there are too many wishes already.
    pub fn add(&mut self, attachment: &Attachment, pools: &[String], now: Duration) {
        if self.0.len() >= MOST && !self.0.contains_key(attachment) {
            return;
        }
        self.0
            .insert(attachment.clone(), (pools.to_vec(), now + LIFE));
    }

    /// Removes the wish of an attachment that has an address or wants none any more. Returns whether there was one.
    pub fn remove(&mut self, attachment: &Attachment) -> bool {
        self.0.remove(attachment).is_some()
    }

    /// Returns when the oldest wish for the pool was recorded last; `None` if there is none.
    pub fn since(&self, pool: &str) -> Option<Duration> {
        let of = |(pools, until): &(Vec<String>, Duration)| {
            pools.iter().any(|it| it == pool).then_some(*until)
        };
        let until = self.0.values().filter_map(of).min()?;
        Some(until.saturating_sub(LIFE))
    }

    /// Returns how many wishes there are for each pool, and when the first wish expires.
    pub fn count(&mut self, now: Duration) -> (PendingAdds, Option<Duration>) {
        self.0.retain(|_, (_, until)| *until > now);
        let mut wishes = PendingAdds::new();
        for pool in self.0.values().flat_map(|(pools, _)| pools) {
            *wishes.entry(pool.clone()).or_default() += 1;
        }
        (wishes, self.0.values().map(|(_, until)| *until).min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(n: usize) -> Attachment {
        Attachment {
            network: "net".to_owned(),
            container_id: format!("c{n}"),
            ifname: "eth0".to_owned(),
        }
    }

    #[test]
    fn a_wish_counts_once_until_it_is_granted_or_old() {
        let mut book = PendingAddBook::default();
        let pools =
            |names: &[&str]| -> Vec<String> { names.iter().map(|it| (*it).into()).collect() };
        book.add(&attachment(1), &pools(&["a"]), Duration::ZERO);
        book.add(&attachment(1), &pools(&["a", "b"]), Duration::from_secs(3));
        book.add(&attachment(2), &pools(&["a"]), Duration::from_secs(5));
        let (wishes, until) = book.count(Duration::from_secs(6));
        assert_eq!((wishes["a"], wishes["b"]), (2, 1));
        assert_eq!(until, Some(Duration::from_secs(63)));
        assert_eq!(book.since("a"), Some(Duration::from_secs(3)));
        assert_eq!(book.since("c"), None);
        assert!(book.remove(&attachment(2)) && !book.remove(&attachment(2)));
        assert_eq!(book.count(Duration::from_secs(62)).0["a"], 1);
        assert!(book.count(Duration::from_secs(63)).0.is_empty());
    }

    #[test]
    fn there_are_never_more_than_a_node_can_have() {
        let mut book = PendingAddBook::default();
        for n in 0..5000 {
            book.add(&attachment(n), &["a".to_owned()], Duration::ZERO);
        }
        assert_eq!(book.count(Duration::ZERO).0["a"], 1024);
    }
}
