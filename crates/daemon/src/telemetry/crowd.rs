//! Decides which connection to a port is closed for a new one, so that no client can lock out others.
//!
//! # Guarantees
//! - A new connection is always accepted; if necessary an older one is closed for it.
//! - A peer never has more connections than its share. If the port has all its connections in use, the peer with the
//!   most connections loses its oldest one.
//! - Therefore a peer that opens many connections loses some of its own, and a peer with few connections keeps them.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};

use tokio::task::AbortHandle;

/// The open connections of a port, the oldest first.
#[derive(Debug)]
pub(super) struct Crowd {
    most: usize,
    share: usize,
    there: VecDeque<(IpAddr, AbortHandle)>,
}

impl Crowd {
    /// Returns an empty set that allows `most` connections, and `share` connections of one peer.
    pub(super) fn new(most: usize, share: usize) -> Self {
        Self {
            most,
            share,
            there: VecDeque::new(),
        }
    }

    /// Adds the connection that `task` handles, and closes another connection if necessary.
    pub(crate) fn admit(&mut self, from: IpAddr, task: AbortHandle) {
        self.there.retain(|(_, task)| !task.is_finished());
        let peer = peer_of(from);
        if let Some(oldest) = self
            .eviction_index(peer)
            .and_then(|at| self.there.remove(at))
        {
            oldest.1.abort();
        }
        self.there.push_back((peer, task));
    }

    /// Returns the position of the connection to close, if any. If this peer has its share already, it is the peer's
    /// oldest. Otherwise, if there are too many connections, it is the oldest of the peer with the most connections.
    fn eviction_index(&self, peer: IpAddr) -> Option<usize> {
        let count = |peer| self.there.iter().filter(|it| it.0 == peer).count();
        let crowder = if count(peer) >= self.share {
            Some(peer)
        } else if self.there.len() >= self.most {
            // `max_by_key` returns the last of several maxima. In reverse order, that is the peer with the oldest
            // connection.
            let peers = self.there.iter().rev().map(|it| it.0);
            peers.max_by_key(|peer| count(*peer))
        } else {
            None
        };
        self.there.iter().position(|it| Some(it.0) == crowder)
    }
}

/// Identifies a peer by its IPv4 address or its IPv6 /64, because one host can have all addresses of a /64.
fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;

    fn enter(crowd: &mut Crowd, from: &str) -> JoinHandle<()> {
        let task = tokio::spawn(std::future::pending());
        crowd.admit(from.parse().unwrap(), task.abort_handle());
        task
    }

    /// Lets the runtime end aborted tasks, then checks that this task has ended.
    async fn is_gone(task: &JoinHandle<()>) {
        tokio::task::yield_now().await;
        assert!(task.is_finished(), "it is still there");
    }

    #[tokio::test]
    async fn who_has_its_share_loses_its_own_oldest() {
        let mut crowd = Crowd::new(100, 2);
        let other = enter(&mut crowd, "192.0.2.2");
        let first = enter(&mut crowd, "192.0.2.1");
        let second = enter(&mut crowd, "::ffff:192.0.2.1");
        let third = enter(&mut crowd, "192.0.2.1");
        is_gone(&first).await;
        assert!([other, second, third].iter().all(|it| !it.is_finished()));
        let first = enter(&mut crowd, "2001:db8::1");
        let rest = ["2001:db8::2", "2001:db8::3", "2001:db8:0:1::3"];
        let rest = rest.map(|it| enter(&mut crowd, it));
        is_gone(&first).await;
        assert!(rest.iter().all(|it| !it.is_finished()), "one /64 is a peer");
    }

    #[tokio::test]
    async fn where_all_is_taken_whoever_has_most_makes_room() {
        let mut crowd = Crowd::new(4, 3);
        let few = enter(&mut crowd, "192.0.2.1");
        let many = ["192.0.2.2"; 3].map(|it| enter(&mut crowd, it));
        let newest = enter(&mut crowd, "192.0.2.3");
        let [first, second, third] = many;
        is_gone(&first).await;
        let other = enter(&mut crowd, "192.0.2.4");
        is_gone(&second).await;
        // Now every peer has one connection, so the oldest connection is closed.
        let last = enter(&mut crowd, "192.0.2.5");
        is_gone(&few).await;
        let left = [third, newest, other, last];
        assert!(left.iter().all(|it| !it.is_finished()));
        assert_eq!(crowd.there.len(), 4);
    }

    #[tokio::test]
    async fn whoever_has_left_takes_no_place() {
        let mut crowd = Crowd::new(2, 2);
        let stays = enter(&mut crowd, "192.0.2.1");
        for _ in 0..3 {
            let leaves = enter(&mut crowd, "192.0.2.2");
            leaves.abort();
            is_gone(&leaves).await;
        }
        let comes = enter(&mut crowd, "192.0.2.3");
        assert!(!stays.is_finished() && !comes.is_finished());
    }
}
