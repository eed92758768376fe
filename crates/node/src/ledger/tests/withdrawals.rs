//! Tests of withdrawals: which addresses are not assigned, and when a withdrawal takes effect and ends.

use super::*;

/// A node with one block of 16 addresses. The first address is the gateway, and the pool has a cooldown of 30 s.
fn node() -> Node {
    Node::new(&[("10.0.0.0/28", "")])
}

impl Node {
    /// Sets the fields `withdraw` and `returned` of the NodeSubnet.
    fn request(&mut self, withdraw: &[&str], returned: &[&str]) {
        self.allocation.withdraw = withdraw.iter().map(|it| cidr(it)).collect();
        self.allocation.returned = returned.iter().map(|it| cidr(it)).collect();
        self.update();
    }

    fn withdraw(&mut self) -> bool {
        self.ledger().withdraw_empty().unwrap()
    }

    /// Returns the withdrawn ranges, then a `/`, then the ranges whose withdrawal is pending. A `!` marks a pending
    /// range that is empty.
    fn withdrawals(&mut self) -> String {
        let snapshot = self.ledger().snapshot().unwrap();
        let withdrawn = snapshot.withdrawn.iter().map(ToString::to_string);
        let pending = snapshot.pending_withdrawals.iter();
        let pending =
            pending.map(|it| format!("{}{}", it.range, if it.is_empty { "!" } else { "" }));
        let [withdrawn, pending] = [withdrawn.collect::<Vec<_>>(), pending.collect()];
        format!("{} / {}", withdrawn.join(" "), pending.join(" "))
    }

    fn free(&mut self) -> u64 {
        self.ledger().snapshot().unwrap().blocks[0].counts.free
    }
}

#[test]
fn a_range_to_be_withdrawn_is_not_assigned_from() {
    let mut node = node();
    node.request(&["10.0.0.0/29"], &[]);
    assert_eq!(node.free(), 7, "10.0.0.8 to 10.0.0.14");
    assert_eq!(node.add_one(1), "10.0.0.8");
    node.assert_refused(
        &ask_for(2, &["10.0.0.5"]),
        OpErrorKind::NotInBlocks,
        "10.0.0.0/29 was taken out of this node's addresses",
    );
    // If a request ends before the range is withdrawn, the request has no further effect.
    node.request(&[], &[]);
    assert_eq!(node.withdrawals(), " / ");
    assert_eq!(node.add_one(2), "10.0.0.2");
}

#[test]
fn requests_that_end_make_room_for_as_many_others() {
    let mut node = Node::new(&[("10.0.0.0/16", "")]);
    for third in [0..128, 128..256] {
        let ranges = third.flat_map(|third| (0..8).map(move |last| (third, 32 * last)));
        let ranges: Vec<String> = ranges
            .map(|(third, last)| format!("10.0.{third}.{last}/27"))
            .collect();
        let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
        assert_eq!(ranges.len(), 1024, "the most");
        node.request(&ranges, &[]);
        let pending = node.ledger().snapshot().unwrap().pending_withdrawals;
        assert_eq!(pending.len(), 1024);
        assert_eq!(pending[0].range, cidr(ranges[0]));
    }
}

#[test]
fn the_address_of_a_claim_is_not_withdrawn() {
    let mut node = node_with_claim();
    node.request(&["10.0.0.64/28"], &[]);
    let blocks = node.ledger().snapshot().unwrap().blocks;
    let of_claim = blocks.iter().find(|it| it.cidr == cidr("10.0.0.66/32"));
    assert_eq!(of_claim.unwrap().counts.free, 1);
    assert_eq!(node.add(&claiming(ask(1))), "10.0.0.66 fd00::66");
}

#[test]
fn a_range_in_use_or_cooling_is_not_withdrawn() {
    let mut node = node();
    node.add_one(1);
    node.request(&["10.0.0.2/32", "10.0.0.8/29"], &[]);
    assert_eq!(node.withdrawals(), " / 10.0.0.2/32 10.0.0.8/29!");
    assert!(node.withdraw());
    assert_eq!(node.withdrawals(), "10.0.0.8/29 / 10.0.0.2/32");
    node.del(1);
    assert!(!node.withdraw(), "the address cools");
    node.later(30);
    assert!(node.withdraw() && !node.withdraw());
    assert_eq!(node.withdrawals(), "10.0.0.2/32 10.0.0.8/29 / ");
    let counts = node.ledger().snapshot().unwrap().blocks[0].counts;
    assert_eq!(
        (counts.withdrawn, counts.free),
        (9, 5),
        "10.0.0.3 to 10.0.0.7"
    );
}

#[test]
fn only_a_returned_range_is_assigned_from_again() {
    let mut node = node();
    node.request(&["10.0.0.0/29"], &[]);
    node.withdraw();
    node.request(&[], &[]);
    assert_eq!(
        node.withdrawals(),
        "10.0.0.0/29 / ",
        "the API may have been restored"
    );
    // The range stays withdrawn while its block is not listed, and when the block is listed again.
    let blocks = std::mem::take(&mut node.allocation.blocks);
    node.update();
    node.allocation.blocks = blocks;
    node.update();
    assert_eq!(node.add_one(1), "10.0.0.8");
    node.request(&["10.0.0.0/29"], &["10.0.0.0/29"]);
    assert_eq!(node.withdrawals(), "10.0.0.0/29 / ", "it is wanted again");
    node.request(&[], &["10.0.0.0/29"]);
    assert_eq!(node.withdrawals(), " / ");
    assert_eq!(node.add_one(2), "10.0.0.2", "the search begins again");
}

#[test]
fn an_address_that_was_released_before_is_withheld_too() {
    let mut node = node();
    node.add_one(1);
    node.del(1);
    node.later(30);
    node.request(&["10.0.0.2/32"], &[]);
    for n in 3..=14 {
        assert_eq!(node.add_one(n), format!("10.0.0.{n}"));
    }
    node.assert_refused(&ask(99), OpErrorKind::Exhausted, "");
    node.request(&[], &[]);
    assert_eq!(node.add_one(99), "10.0.0.2");
}

#[test]
fn the_number_of_withdrawals_is_bounded() {
    let mut node = Node::new(&[("10.0.0.0/20", "")]);
    let all: Vec<String> = (0..2_000)
        .map(|n| format!("10.0.{}.{}/32", n / 256, n % 256))
        .collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    node.request(&all, &[]);
    node.withdraw();
    node.request(&all[1_000..], &[]);
    node.withdraw();
    let withdrawn = node.ledger().snapshot().unwrap().withdrawn;
    assert_eq!(withdrawn.len(), 1_024);
    assert_eq!(
        withdrawn[0],
        cidr(all[0]),
        "the first ones are not forgotten for others"
    );
}

#[test]
fn a_block_with_a_withdrawn_part_is_not_released() {
    let mut node = node();
    node.request(&["10.0.0.8/29"], &[]);
    node.withdraw();
    let block = cidr("10.0.0.0/28");
    assert!(!node.ledger().release(block, "u1").unwrap());
    node.request(&[], &["10.0.0.8/29"]);
    assert!(node.ledger().release(block, "u1").unwrap());
}

#[test]
fn a_withdrawn_address_can_be_the_block_of_a_claim_on_the_same_node() {
    let mut node = node();
    node.request(&["10.0.0.5/32"], &[]);
    assert!(node.withdraw());
    let free = node.free();
    node.allocation.blocks.push(Block {
        cidr: cidr("10.0.0.5/32"),
        uid: "claim".to_owned(),
        pool: "shop/db".to_owned(),
        draining: false,
        borrowed: false,
        reserved: Vec::new(),
        on_request: Vec::new(),
    });
    let claim = pool("shop/db", &["10.0.0.0/24"], &[]);
    node.allocation.pools.push(claim);
    node.update();
    assert_eq!(node.free(), free, "the wide block does not assign it");
    node.assert_refused(
        &ask_for(1, &["10.0.0.5"]),
        OpErrorKind::UnknownPool,
        "belongs to IPClaim `shop/db`",
    );
    assert_eq!(node.add(&claiming(ask(1))), "10.0.0.5");
    let counts = |node: &mut Node, at: usize| node.ledger().snapshot().unwrap().blocks[at].counts;
    let (wide, own) = (counts(&mut node, 0), counts(&mut node, 1));
    assert_eq!((wide.used, wide.withdrawn), (0, 1));
    assert_eq!((own.used, own.withdrawn), (1, 0));
    node.del(1);
    assert_eq!(
        node.add(&claiming(ask(2))),
        "10.0.0.5",
        "a claim has no cooldown"
    );
    node.del(2);
    // The block of the claim is released, but the block of 16 addresses is not. The claim's address stays withdrawn.
    let mut release = |text: &str, uid: &str| node.ledger().release(cidr(text), uid).unwrap();
    assert!(release("10.0.0.5/32", "claim") && !release("10.0.0.0/28", "u1"));
    assert_eq!(node.withdrawals(), "10.0.0.5/32 / ");
}
