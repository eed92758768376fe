//! Opens files whose bytes have changed since they were closed. The store must either report damage or return its
//! complete content. The store must never return older content.

use std::sync::OnceLock;

use cadastre_node::{Op, Snapshot, StoreError};

use crate::disk::MemoryDisk;
use crate::helpers::seeded;
use crate::world::{add, allocation, at, attachment};

fn used_disk() -> MemoryDisk {
    let disk = MemoryDisk::default();
    let mut store = disk.create().unwrap();
    let now = at(0, 1_000_000);
    store
        .set_allocation(&allocation(&["10.0.0.0/24", "fd00::/112"]), &now)
        .unwrap();
    for n in 0..120 {
        store.run(&[Op::Add(add(n))], &now);
        if n % 3 == 0 {
            store.run(&[Op::Del(attachment(n))], &now);
        }
    }
    drop(store);
    disk
}

/// Opens a changed copy of the file. Returns whether the store reports damage. Panics if the store returns content that
/// differs from the original.
fn is_damaged(bytes: Vec<u8>, what: &str) -> bool {
    let now = at(0, 1_000_000);
    let store = MemoryDisk::of(bytes).open();
    match store.and_then(|mut store| store.snapshot(&now)) {
        Ok(snapshot) => {
            assert!(snapshot == *expected(), "{what}: other content");
            false
        }
        Err(StoreError::Damaged { .. }) => true,
        Err(error) => panic!("{what}: {error}"),
    }
}

fn expected() -> &'static Snapshot {
    static SNAPSHOT: OnceLock<Snapshot> = OnceLock::new();
    SNAPSHOT.get_or_init(|| {
        let mut store = used_disk().open().unwrap();
        store.snapshot(&at(0, 1_000_000)).unwrap()
    })
}

#[test]
fn a_flipped_bit_is_found_or_does_not_matter() {
    let (seed, mut rng) = seeded();
    let bytes = used_disk().bytes();
    // Flips every bit of the header, and random bits of the pages in use.
    let mut bits: Vec<usize> = (0..320 * 8).collect();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    bits.extend((0..1500).map(|_| rng.index(end * 8)));
    let mut damaged = 0;
    for bit in &bits {
        let mut copy = bytes.clone();
        copy[bit / 8] ^= 1 << (bit % 8);
        damaged += u32::from(is_damaged(copy, &format!("SEED={seed} bit {bit}")));
    }
    println!("{damaged} of {} flips are damage", bits.len());
    assert!(damaged > 1_000, "only {damaged}");
}

#[test]
fn a_lost_page_is_found_or_does_not_matter() {
    let (seed, mut rng) = seeded();
    let bytes = used_disk().bytes();
    let mut damaged = 0;
    for page in 0..bytes.len() / 4096 {
        let mut copy = bytes.clone();
        let page = page * 4096..(page + 1) * 4096;
        if copy[page.clone()].iter().any(|byte| *byte != 0) {
            copy[page.clone()].fill(0);
            damaged += u32::from(is_damaged(copy.clone(), &format!("zeros in {page:?}")));
            for _ in 0..5 {
                let from = rng.index(4096);
                copy[page.start + from..page.end].fill_with(|| rng.next().to_le_bytes()[0]);
                let what = format!("SEED={seed} noise from {from} in {page:?}");
                damaged += u32::from(is_damaged(copy.clone(), &what));
            }
        }
    }
    assert!(damaged > 60, "only {damaged}");
}

#[test]
fn what_is_cut_off_or_no_ledger_is_found() {
    let bytes = used_disk().bytes();
    for len in [0, 1, 9, 320, 4095, 4096, 5000, 8192, 20_000, 100_001] {
        assert!(is_damaged(bytes[..len].to_vec(), &format!("{len} bytes")));
    }
    assert!(is_damaged(vec![0; 1 << 20], "zeros"));
    assert!(is_damaged(vec![b'x'; 1 << 20], "text"));
    let mut longer = bytes;
    longer.extend([7; 5000]);
    assert!(!is_damaged(longer, "something behind the end"));
}
