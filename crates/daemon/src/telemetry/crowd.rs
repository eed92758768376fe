//! Who is connected to a port, so that nobody keeps the others out.
//!
//! # Guarantees
//! - A connection that comes always gets a place: one that has been there longer goes for it.
//! - A peer has no more places than its share; once all are taken, whoever has most gives one up.
//! - So a peer that keeps many connections open loses its own, and one that keeps few keeps them.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};

use tokio::task::AbortHandle;

/// The connections of a port, the oldest first.
#[derive(Debug)]
pub(super) struct Crowd {
    most: usize,
    share: usize,
    there: VecDeque<(IpAddr, AbortHandle)>,
}

impl Crowd {
    /// So many places, of which so many for one peer.
    pub(super) fn new(most: usize, share: usize) -> Self {
        Self {
            most,
            share,
            there: VecDeque::new(),
        }
    }

    /// Gives a place to the connection that this task serves.
    pub(crate) fn admit(&mut self, from: IpAddr, task: AbortHandle) {
        self.there.retain(|(_, task)| !task.is_finished());
        let peer = peer_of(from);
        if let Some(oldest) = self.who_goes(peer).and_then(|at| self.there.remove(at)) {
            oldest.1.abort();
        }
        self.there.push_back((peer, task));
    }

    /// The oldest of the peer if it has its share, else of whoever has most, if there is no room.
    fn who_goes(&self, peer: IpAddr) -> Option<usize> {
        let count = |peer| self.there.iter().filter(|it| it.0 == peer).count();
        let crowder = if count(peer) >= self.share {
            Some(peer)
        } else if self.there.len() >= self.most {
            // Of several the last one is taken, and that is to be the oldest.
            let peers = self.there.iter().rev().map(|it| it.0);
            peers.max_by_key(|peer| count(*peer))
        } else {
            None
        };
        self.there.iter().position(|it| Some(it.0) == crowder)
    }
}

/// One peer is an IPv4 address, or a /64 of IPv6, of which one machine has all.
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

    /// The runtime ends what was told to end in its next turn.
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
        // Now all have one: the oldest goes.
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
