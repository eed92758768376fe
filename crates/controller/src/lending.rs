//! Decides which parts of blocks nodes lend when a pool is exhausted. The decision depends only on the arguments.
//!
//! The node that can spare the most addresses lends first. It lends the largest aligned part of its blocks in which no
//! address is known to be in use. A node never lends a complete block, because an empty block is recalled instead. A
//! node keeps the addresses that it uses, and the free addresses that it wants to have ready.

use std::collections::BinaryHeap;

use cadastre_core::usable::{above, union};
use cadastre_core::{Addr, Cidr, IpRange};

/// The prefix of a lent part is at most this many bits longer than the prefix of the block.
const SMALLER: u8 = 6;
/// The controller asks a node for at most this many parts at once.
const MOST_OF_NODE: usize = 4;

/// A node that can lend parts of its blocks. All these blocks have the same family.
#[derive(Clone, Debug)]
pub(crate) struct Lender<N> {
    pub node: N,
    /// How many addresses the node can spare
    pub spare: u64,
    /// Number of parts that the controller has asked the node to lend and still waits for
    pub asks: usize,
    pub blocks: Vec<LenderBlock>,
}

/// A block of which parts may be lent.
#[derive(Clone, Debug)]
pub(crate) struct LenderBlock {
    pub cidr: Cidr,
    /// Ranges of which no address may be lent, because somebody uses them or may use them
    pub taken: Vec<IpRange>,
    /// Ranges whose addresses are never assigned to pods, such as network and gateway addresses
    pub never: Vec<IpRange>,
}

/// A part of a block that the controller decides to request from the block's node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part<N> {
    pub node: N,
    pub parent: Cidr,
    pub cidr: Cidr,
    /// How many addresses of the part can be assigned
    pub addresses: u64,
}

/// Chooses parts until the parts together have `lacking` addresses, but at most `most` parts. If `is_refused` returns
/// true for a part, only smaller parts inside that part are considered. The chosen parts are removed from `lenders`, so
/// that the next call does not choose them again.
pub(crate) fn choose<N: Clone>(
    lenders: &mut [Lender<N>],
    lacking: u64,
    most: usize,
    is_refused: impl Fn(&Cidr) -> bool,
) -> Vec<Part<N>> {
    let mut chosen = Vec::new();
    let mut left = lacking;
    while left > 0 && chosen.len() < most {
        let able = lenders
            .iter_mut()
            .filter(|it| it.spare > 0 && it.asks < MOST_OF_NODE);
        // If several nodes can spare equally many addresses, the first of these nodes lends.
        let Some(richest) = able.rev().max_by_key(|it| it.spare) else {
            break;
        };
        let Some(part) = richest.largest_part(&is_refused) else {
            richest.spare = 0;
            continue;
        };
        left = left.saturating_sub(part.addresses);
        chosen.push(part);
    }
    chosen
}

impl<N: Clone> Lender<N> {
    /// Chooses and removes the largest part that the node can spare.
    fn largest_part(&mut self, is_refused: impl Fn(&Cidr) -> bool) -> Option<Part<N>> {
        let spare = self.spare;
        let parts = self.blocks.iter_mut().filter_map(|block| {
            let (cidr, addresses) = block.largest_part(spare, &is_refused)?;
            Some((block, cidr, addresses))
        });
        let (block, cidr, addresses) = parts.max_by_key(|(_, cidr, _)| rank(*cidr))?;
        block.taken.push(cidr.into());
        self.spare -= addresses;
        self.asks += 1;
        Some(Part {
            node: self.node.clone(),
            parent: block.cidr,
            cidr,
            addresses,
        })
    }
}

impl LenderBlock {
    /// Returns the largest aligned part in which no address is taken, and the number of its addresses. If several parts
    /// are equally large, returns the highest of them, because nodes assign the lowest addresses first.
    fn largest_part(&self, spare: u64, is_refused: impl Fn(&Cidr) -> bool) -> Option<(Cidr, u64)> {
        let free = gaps(self.cidr, &self.taken);
        let parts = free.iter().flat_map(IpRange::to_cidrs);
        let mut parts: BinaryHeap<_> = parts.map(|it| (rank(it), it)).collect();
        let longest = (self.cidr.len() + SMALLER).min(self.cidr.family().bits() - 1);
        while let Some((_, part)) = parts.pop() {
            if part.len() > longest {
                return None;
            }
            let addresses = self.addresses(&part);
            if part != self.cidr && (1..=spare).contains(&addresses) && !is_refused(&part) {
                return Some((part, addresses));
            }
            if addresses > 0 {
                parts.extend(halves(part).map(|it| (rank(it), it)));
            }
        }
        None
    }

    /// Returns how many addresses of a part can be assigned.
    fn addresses(&self, part: &Cidr) -> u64 {
        let never = union(*part, &self.never);
        let never: u128 = never.iter().map(IpRange::size).sum();
        u64::try_from(part.size().saturating_sub(never)).unwrap_or(u64::MAX)
    }
}

/// Returns a key by which parts are compared. A larger part is greater. Of two equally large parts, the part with the
/// higher addresses is greater.
fn rank(part: Cidr) -> (u8, Addr) {
    (u8::MAX - part.len(), part.first())
}

/// Returns the two halves of a range. A single address has no halves.
fn halves(range: Cidr) -> impl Iterator<Item = Cidr> {
    let half = |addr| Cidr::new(addr, range.len() + 1);
    [half(range.first()), half(range.last())]
        .into_iter()
        .flatten()
}

/// Returns the parts of a block that lie in none of the `spans`.
fn gaps(block: Cidr, spans: &[IpRange]) -> Vec<IpRange> {
    let mut gaps = Vec::new();
    let mut from = Some(block.first());
    for span in union(block, spans) {
        let before = span.first().value.checked_sub(1);
        let before = before.map(|value| Addr {
            value,
            ..span.first()
        });
        gaps.extend(
            from.zip(before)
                .and_then(|(first, last)| IpRange::new(first, last)),
        );
        from = above(span.last(), block.last());
    }
    gaps.extend(from.and_then(|first| IpRange::new(first, block.last())));
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::cidr;

    fn spans(texts: &[&str]) -> Vec<IpRange> {
        texts.iter().map(|it| IpRange::parse(it).unwrap()).collect()
    }

    fn lender(node: &'static str, spare: u64, block: &str, taken: &[&str]) -> Lender<&'static str> {
        let cidr = cidr(block);
        let ends = [cidr.first(), cidr.last()].map(IpRange::from);
        Lender {
            node,
            spare,
            asks: 0,
            blocks: vec![LenderBlock {
                cidr,
                taken: spans(taken),
                never: ends.into(),
            }],
        }
    }

    fn chosen(lenders: &mut [Lender<&'static str>], lacking: u64, refused: &[&str]) -> Vec<String> {
        let refused: Vec<Cidr> = refused.iter().map(|it| cidr(it)).collect();
        let is_refused = |part: &Cidr| refused.iter().any(|it| part.contains(it));
        let parts = choose(lenders, lacking, 16, is_refused);
        let text = |it: &Part<&str>| format!("{} {} {}", it.node, it.cidr, it.addresses);
        parts.iter().map(text).collect()
    }

    #[test]
    fn the_richest_node_lends_first_and_the_largest_part_of_its_block() {
        let mut lenders = [
            lender("a", 20, "10.0.0.0/26", &["10.0.0.1-10.0.0.9"]),
            lender("b", 50, "10.0.0.64/26", &["10.0.0.65", "10.0.0.66"]),
        ];
        assert_eq!(chosen(&mut lenders, 1, &[]), ["b 10.0.0.96/27 31"]);
        // Now node `a` can spare more addresses than node `b`, but node `a` lends only half of its largest free part.
        let parts = ["a 10.0.0.48/28 15", "b 10.0.0.80/28 16"];
        assert_eq!(chosen(&mut lenders, 20, &[]), parts);
        // Node `b` could spare 50 addresses at first, and has lent parts of 31 and of 16 addresses.
        assert_eq!(lenders[1].spare, 3);
    }

    #[test]
    fn a_node_keeps_what_it_cannot_spare_and_never_lends_a_whole_block() {
        let part = |spare| chosen(&mut [lender("a", spare, "10.0.0.0/28", &[])], 1, &[]);
        assert_eq!(part(100), ["a 10.0.0.8/29 7"]);
        assert_eq!(part(6), ["a 10.0.0.12/30 3"]);
        assert_eq!(part(1), ["a 10.0.0.14/31 1"]);
        assert!(part(0).is_empty());
        let taken = [
            "10.0.0.1",
            "10.0.0.3",
            "10.0.0.5",
            "10.0.0.7",
            "10.0.0.9-10.0.0.15",
        ];
        let scattered = &mut [lender("a", 9, "10.0.0.0/28", &taken)];
        assert!(
            chosen(scattered, 1, &[]).is_empty(),
            "no aligned part is free"
        );
    }

    #[test]
    fn of_a_refused_part_only_smaller_parts_are_chosen() {
        let mut lenders = [lender("a", 100, "10.0.0.0/26", &["10.0.0.0/27"])];
        assert_eq!(
            chosen(&mut lenders, 1, &["10.0.0.32/27"]),
            ["a 10.0.0.48/28 15"]
        );
        let mut lenders = [lender("a", 100, "10.0.0.0/26", &["10.0.0.0/27"])];
        let refused = ["10.0.0.32/27", "10.0.0.48/28"];
        assert_eq!(chosen(&mut lenders, 1, &refused), ["a 10.0.0.32/28 16"]);
    }

    #[test]
    fn a_node_is_asked_for_a_few_parts_at_once() {
        let mut lenders = [lender("a", 1_000, "10.0.0.0/22", &[])];
        let parts = chosen(&mut lenders, 10_000, &[]);
        assert_eq!(parts.len(), MOST_OF_NODE);
        assert_eq!(parts[0], "a 10.0.2.0/23 511");
        assert!(chosen(&mut lenders, 10_000, &[]).is_empty());
    }

    #[test]
    fn wide_blocks_are_divided_too() {
        let mut lenders = [lender("a", u64::MAX, "fd00::/48", &["fd00::1"])];
        assert_eq!(
            chosen(&mut lenders, 1, &[])[0],
            format!("a fd00:0:0:8000::/49 {}", u64::MAX)
        );
    }
}
