//! Limits the connections to a port, and decides which connection is closed when a new one arrives. No client can lock
//! out others.
//!
//! # Guarantees
//! - A new connection is always accepted. If necessary, an older connection is closed for it.
//! - A peer never has more connections than its share. If the port exceeds its maximum number of connections, the peer
//!   with the most connections loses its oldest connection.
//! - Therefore a peer that opens many connections loses some of its own. A peer with few connections keeps its
//!   connections.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};

use tokio::task::AbortHandle;

/// The open connections of a port, the oldest first.
#[derive(Debug)]
pub(super) struct OpenConnections {
    limit: usize,
    share: usize,
    open: VecDeque<(IpAddr, AbortHandle)>,
}

impl OpenConnections {
    /// Returns an empty set that allows `limit` connections in all, and `share` connections of one peer.
    pub(super) fn new(limit: usize, share: usize) -> Self {
        Self {
            limit,
            share,
            open: VecDeque::new(),
        }
    }

    /// Adds the connection that `task` handles, and closes another connection if necessary.
    pub(super) fn admit(&mut self, from: IpAddr, task: AbortHandle) {
        self.open.retain(|(_, task)| !task.is_finished());
        let peer = peer_of(from);
        let evicted = self.eviction_index(peer);
        if let Some((_, task)) = evicted.and_then(|at| self.open.remove(at)) {
            task.abort();
        }
        self.open.push_back((peer, task));
    }

    /// Returns the position of the connection to close, if any. If `peer` already has its share, the oldest connection
    /// of `peer` is closed. Otherwise, if there are too many connections, the oldest connection of the peer with the
    /// most connections is closed.
    fn eviction_index(&self, peer: IpAddr) -> Option<usize> {
        let count = |peer| self.open.iter().filter(|it| it.0 == peer).count();
        let evicted = if count(peer) >= self.share {
            Some(peer)
        } else if self.open.len() >= self.limit {
            // If several elements are maximal, `max_by_key` returns the last one. In reverse order, that is the peer
            // with the oldest connection.
            let peers = self.open.iter().rev().map(|it| it.0);
            peers.max_by_key(|peer| count(*peer))
        } else {
            None
        };
        self.open.iter().position(|it| Some(it.0) == evicted)
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

    fn enter(connections: &mut OpenConnections, from: &str) -> JoinHandle<()> {
        let task = tokio::spawn(std::future::pending());
        connections.admit(from.parse().unwrap(), task.abort_handle());
        task
    }

    /// Gives the runtime time to end aborted tasks, then checks that this task has ended.
    async fn is_gone(task: &JoinHandle<()>) {
        tokio::task::yield_now().await;
        assert!(task.is_finished(), "it is still there");
    }

    #[tokio::test]
    async fn a_peer_with_its_share_loses_its_own_oldest_connection() {
        let mut connections = OpenConnections::new(100, 2);
        let other = enter(&mut connections, "192.0.2.2");
        let first = enter(&mut connections, "192.0.2.1");
        let second = enter(&mut connections, "::ffff:192.0.2.1");
        let third = enter(&mut connections, "192.0.2.1");
        is_gone(&first).await;
        assert!([other, second, third].iter().all(|it| !it.is_finished()));
        let first = enter(&mut connections, "2001:db8::1");
        let rest = ["2001:db8::2", "2001:db8::3", "2001:db8:0:1::3"];
        let rest = rest.map(|it| enter(&mut connections, it));
        is_gone(&first).await;
        assert!(rest.iter().all(|it| !it.is_finished()), "one /64 is a peer");
    }

    #[tokio::test]
    async fn at_the_limit_the_peer_with_most_connections_loses_one() {
        let mut connections = OpenConnections::new(4, 3);
        let few = enter(&mut connections, "192.0.2.1");
        let many = ["192.0.2.2"; 3].map(|it| enter(&mut connections, it));
        let newest = enter(&mut connections, "192.0.2.3");
        let [first, second, third] = many;
        is_gone(&first).await;
        let other = enter(&mut connections, "192.0.2.4");
        is_gone(&second).await;
        // Now every peer has one connection. So the oldest connection is closed.
        let last = enter(&mut connections, "192.0.2.5");
        is_gone(&few).await;
        let left = [third, newest, other, last];
        assert!(left.iter().all(|it| !it.is_finished()));
        assert_eq!(connections.open.len(), 4);
    }

    #[tokio::test]
    async fn closed_connections_do_not_count() {
        let mut connections = OpenConnections::new(2, 2);
        let stays = enter(&mut connections, "192.0.2.1");
        for _ in 0..3 {
            let leaves = enter(&mut connections, "192.0.2.2");
            leaves.abort();
            is_gone(&leaves).await;
        }
        let comes = enter(&mut connections, "192.0.2.3");
        assert!(!stays.is_finished() && !comes.is_finished());
    }
}
