//! Measures how many bytes of memory the ledger uses for each allocated range.

#![allow(clippy::unwrap_used, reason = "a test")]

use cadastre_core::{Cidr, Dual, FamilyRanges, Holder, Pool, RangeLedger};

const CARVED: u32 = 1_000_000;

/// Allocates one block for each of a million holders, and returns how many bytes the ledger uses per block.
fn bytes_each(cidr: &str, block_len: u8) -> usize {
    let cidr = Cidr::parse_strict(cidr).unwrap();
    let mut ranges = Dual::default();
    *ranges.get_mut(cidr.family()) = Some(FamilyRanges {
        cidrs: vec![cidr],
        block_len,
    });
    let mut pool = Pool::new(ranges);
    let mut ledger = RangeLedger::default();
    for holder in 0..CARVED {
        ledger.carve(&mut pool, Holder(holder), |_| None).unwrap();
    }
    assert_eq!(ledger.len(), CARVED as usize);
    ledger.heap_bytes() / ledger.len()
}

#[test]
fn a_carved_range_costs_at_most_64_bytes() {
    for (cidr, block_len) in [("10.0.0.0/8", 28), ("fd00::/40", 64), ("fd00::/96", 122)] {
        let bytes = bytes_each(cidr, block_len);
        assert!(
            (44..=64).contains(&bytes),
            "{cidr} in /{block_len}: {bytes} bytes each"
        );
    }
}
