//! Applies random operations to the ledger and to the model, and compares them after each operation.

use std::time::Duration;

use cadastre_node::{AddressLedger, Now, Op, StorageFault};

use crate::disk::MemoryDisk;
use crate::model::{Model, outcome};
use crate::rng::{Rng, seed};
use crate::world::{any_allocation, any_op, at, first_allocation};

/// Number of cases. Each case starts with an empty store.
const CASES: u64 = 160;
/// Number of transactions of a case. Each transaction has at most eight operations.
const TRANSACTIONS: u64 = 320;
/// The minimum number of operations that all cases together must perform.
const OPERATIONS: u64 = 200_000;

#[test]
fn the_ledger_does_what_the_model_does() {
    let first = seed();
    let cases = std::env::var_os("SEED").map_or(CASES, |_| 1);
    let mut done = 0;
    for n in 0..cases {
        let seed = first.wrapping_add(n);
        let result = std::panic::catch_unwind(|| case(seed));
        match result {
            Ok(count) => done += count,
            Err(panic) => {
                println!("to see it again: SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{done} operations");
    assert!(cases == 1 || done >= OPERATIONS, "only {done} operations");
}

fn case(seed: u64) -> u64 {
    let mut rng = Rng::new(seed);
    let disk = MemoryDisk::default();
    let mut store = disk.create().unwrap();
    let mut model = Model::default();
    let (mut boot, mut ms) = (0, 1_000_000);
    let mut allocation = first_allocation(&mut rng);
    let mut done = 0;
    for _ in 0..TRANSACTIONS {
        match rng.below(40) {
            0 => {
                boot += 1;
                ms = rng.below(20_000);
            }
            1..20 => ms += rng.below(6_000),
            _ => {}
        }
        let now = at(boot, ms);
        if rng.one_in(25) {
            drop(store);
            store = disk.open().unwrap();
        }
        let count = 1 + rng.below(8);
        store
            .transact(&now, |ledger| {
                for _ in 0..count {
                    if rng.one_in(40) {
                        allocation = any_allocation(&mut rng, &allocation);
                        ledger.set_allocation(&allocation)?;
                        model.set_allocation(&allocation, &now);
                    } else if rng.one_in(30) {
                        release(&mut rng, ledger, &mut model)?;
                    } else {
                        let op = any_op(&mut rng, |it| model.has(it));
                        let asked = asked(&mut rng, &now);
                        step(ledger, &mut model, &op, asked)?;
                    }
                }
                Ok(())
            })
            .unwrap();
        done += count;
        if rng.one_in(8) {
            model.compare(&store.snapshot(&now).unwrap(), &now);
        }
    }
    done
}

/// Returns the time at which an operation was requested. This time is now, or earlier, as if an agent had stalled
/// during the operation.
fn asked(rng: &mut Rng, now: &Now) -> Duration {
    let before = match rng.below(8) {
        0 => rng.below(70_000),
        1 | 2 => rng.below(9_000),
        _ => 0,
    };
    now.since_boot.saturating_sub(Duration::from_millis(before))
}

fn step(
    ledger: &mut AddressLedger<'_>,
    model: &mut Model,
    op: &Op,
    asked: Duration,
) -> Result<(), StorageFault> {
    let now = ledger.now().clone();
    if let Op::Add(add) = op
        && let Some((boot, at)) = model.deleted.get(&add.attachment)
        && *boot == now.boot
        && asked < *at
    {
        let answer = ledger.run_asked(op, asked)?;
        assert!(answer.is_err(), "{op:?} after its DEL");
    }
    let expected = model.run(op, asked, &now);
    let answer = ledger.run_asked(op, asked)?;
    assert_eq!(outcome(&answer), expected, "{op:?}: {answer:?}");
    Ok(())
}

fn release(
    rng: &mut Rng,
    ledger: &mut AddressLedger<'_>,
    model: &mut Model,
) -> Result<(), StorageFault> {
    let now = ledger.now().clone();
    let blocks = model.blocks();
    if blocks.is_empty() {
        return Ok(());
    }
    let (cidr, mut uid) = rng.pick(&blocks).clone();
    if rng.one_in(5) {
        uid.push('x');
    }
    let released = ledger.release(cidr, &uid)?;
    assert_eq!(released, model.release(cidr, &uid, &now), "{cidr} {uid}");
    Ok(())
}
