//! Simulates a crash at each change of the disk, one after the other. In a crash, the process is killed or the power
//! fails.
//!
//! After each crash, the test checks the following:
//!
//! - The store can be opened and works.
//! - The store contains every answered operation.
//! - The operation that was not answered took effect as a whole or not at all.
//! - No address belongs to two attachments.

use std::collections::BTreeMap;

use cadastre_core::Addr;
use cadastre_node::{Attachment, Now, Op, OpError, OpErrorKind, OpOutcome, Store};

use crate::disk::{Fate, MemoryDisk};
use crate::helpers::{assigned, attachments, run, seeded};
use crate::rng::Rng;
use crate::world::{add, allocation, at, attachment};

/// The number of operations that [`live`] performs if the disk does not fail.
const LIFE: u64 = 60;

/// The addresses that each attachment has, according to the answers that its callers got.
type Answered = BTreeMap<Attachment, Vec<Addr>>;

fn op(rng: &mut Rng) -> Op {
    let n = rng.below(24);
    if rng.one_in(2) {
        return Op::Del(attachment(n));
    }
    Op::Add(add(n))
}

fn record(answered: &mut Answered, op: &Op, answer: &Result<OpOutcome, OpError>) {
    match (op, answer) {
        (Op::Add(add), Ok(_)) => {
            _ = answered.insert(add.attachment.clone(), assigned(answer));
        }
        (Op::Del(attachment), Ok(_)) => _ = answered.remove(attachment),
        _ => {}
    }
}

/// Returns the assignments in the store, after a check that the store's counts of addresses in use are correct.
fn stored(store: &mut Store, now: &Now) -> Answered {
    let snapshot = store.snapshot(now).unwrap();
    let stored = attachments(&snapshot);
    let used: u64 = snapshot.blocks.iter().map(|it| it.counts.used).sum();
    let count: usize = stored.values().map(Vec::len).sum();
    assert_eq!(used, count as u64, "counts and attachments differ");
    stored
}

/// Opens the store. Checks that the store contains what the callers know, either with or without the effect of the
/// unanswered operation. Then repeats the unanswered operation. Returns the open store.
fn check(disk: &MemoryDisk, answered: &Answered, unanswered: Option<&Op>, what: &str) -> Store {
    let mut store = disk
        .open()
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    let now = at(0, 1_000_000_000);
    let mut seen = stored(&mut store, &now);
    if seen != *answered {
        match unanswered {
            Some(Op::Add(add)) if !answered.contains_key(&add.attachment) => {
                let given = seen.remove(&add.attachment);
                assert_eq!(given.map(|it| it.len()), Some(2), "{what}: half an ADD");
            }
            Some(Op::Del(attachment)) => {
                if let Some(had) = answered.get(attachment) {
                    seen.insert(attachment.clone(), had.clone());
                }
            }
            _ => {}
        }
        assert_eq!(seen, *answered, "{what}");
    }
    // The caller repeats the unanswered operation, and this attempt must succeed.
    if let Some(op) = unanswered {
        let answer = run(&mut store, op, &now);
        answer.unwrap_or_else(|error| panic!("{what}: {op:?}: {error}"));
    }
    store
}

/// Performs random operations until the disk fails. Returns the operation that was not answered, or `None` if the disk
/// did not fail.
fn live(store: &mut Store, answered: &mut Answered, rng: &mut Rng, ms: &mut u64) -> Option<Op> {
    for _ in 0..LIFE {
        *ms += 4_000;
        let op = op(rng);
        let answer = run(store, &op, &at(0, *ms));
        if answer
            .as_ref()
            .is_err_and(|it| it.why == OpErrorKind::Store)
        {
            return Some(op);
        }
        record(answered, &op, &answer);
    }
    None
}

/// Returns a synced disk with a store that has these blocks and no attachments.
fn new_disk(blocks: &[&str]) -> MemoryDisk {
    let disk = MemoryDisk::default();
    let mut store = disk.create().unwrap();
    store
        .set_allocation(&allocation(blocks), &at(0, 0))
        .unwrap();
    drop(store);
    MemoryDisk::of(disk.bytes())
}

fn small_disk() -> MemoryDisk {
    new_disk(&["10.0.0.0/28", "10.0.0.16/29", "fd00::/124", "fd00::10/126"])
}

#[test]
fn a_kill_at_any_change_loses_nothing() {
    let (seed, _) = seeded();
    let new = small_disk();
    let mut kills = 0;
    for fate in [Fate::Dies, Fate::Tears] {
        for n in 0.. {
            let mut rng = Rng::new(seed);
            let disk = new.after_kill();
            let mut store = disk.open().unwrap();
            disk.set_fate(fate(n));
            let (mut answered, mut ms) = (Answered::new(), 1_000_000);
            let Some(unanswered) = live(&mut store, &mut answered, &mut rng, &mut ms) else {
                break;
            };
            drop(store);
            let what = format!("SEED={seed} {:?}", fate(n));
            check(&disk.after_kill(), &answered, Some(&unanswered), &what);
            kills += 1;
            for n in 0..4 {
                let what = format!("{what}, power lost {n}");
                let disk = disk.after_power_loss(&mut rng);
                check(&disk, &answered, Some(&unanswered), &what);
                kills += 1;
            }
        }
    }
    println!("{kills} kills");
    assert!(kills >= 2_000, "only {kills} kills");
}

fn after_crash(disk: &MemoryDisk, rng: &mut Rng) -> MemoryDisk {
    if rng.one_in(2) {
        return disk.after_kill();
    }
    disk.after_power_loss(rng)
}

#[test]
fn kills_of_one_life_after_another_lose_nothing() {
    let (seed, mut rng) = seeded();
    for life in 0..40 {
        let mut disk = small_disk();
        let (mut answered, mut ms) = (Answered::new(), 1_000_000);
        let mut unanswered: Option<Op> = None;
        for death in 0..12 {
            let what = format!("SEED={seed} life {life} death {death}");
            // This process is killed while it opens the store.
            disk.set_fate(Fate::Dies(rng.below(3)));
            drop(disk.open());
            disk = after_crash(&disk, &mut rng);
            let mut store = check(&disk, &answered, unanswered.as_ref(), &what);
            if let Some(op) = unanswered.take() {
                let answer = run(&mut store, &op, &at(0, 1_000_000_000));
                record(&mut answered, &op, &answer);
            }
            let fate = *rng.pick(&[Fate::Dies, Fate::Tears]);
            disk.set_fate(fate(rng.below(120)));
            unanswered = live(&mut store, &mut answered, &mut rng, &mut ms);
            drop(store);
            disk = after_crash(&disk, &mut rng);
        }
    }
}

#[test]
fn a_group_that_makes_the_file_longer_is_there_as_a_whole_or_not_at_all() {
    let (seed, mut rng) = seeded();
    let now = at(0, 1_000_000);
    let new = new_disk(&["10.0.0.0/23", "fd00::/64"]);
    let long = |n| {
        let mut add = add(n);
        add.netns = "x".repeat(12_000);
        Op::Add(add)
    };
    let ops: Vec<Op> = (0..120).map(long).collect();
    let run = |store: &mut Store| store.run(&ops, &now).iter().all(Result::is_ok);
    let whole = new.after_kill();
    whole.set_fate(Fate::Lasts);
    assert!(run(&mut whole.open().unwrap()));
    assert!(whole.size() > new.size(), "the file did not grow");
    let end = whole.count();
    let some = (0..10).map(|_| rng.below(end));
    let mut wholes = 0;
    for n in some.chain(end - 6..end).collect::<Vec<_>>() {
        let disk = new.after_kill();
        let mut store = disk.open().unwrap();
        disk.set_fate(Fate::Dies(n));
        assert!(!run(&mut store) || n == end - 1);
        drop(store);
        let images = [
            disk.after_kill(),
            disk.after_power_loss(&mut rng),
            disk.after_power_loss(&mut rng),
            disk.without_growth(),
        ];
        for image in images {
            let what = format!("SEED={seed}, killed at {n} of {end}");
            let mut store = image
                .open()
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            let tenants = store.snapshot(&now).unwrap().attachments.len();
            assert!(tenants == 0 || tenants == ops.len(), "{what}: {tenants}");
            wholes += u32::from(tenants > 0);
        }
    }
    assert!(wholes > 0, "no kill came after the commit");
}

#[test]
fn what_a_killed_process_wrote_lasts_once_it_is_answered() {
    let new = small_disk();
    let now = at(0, 1_000_000);
    let op = [Op::Add(add(1))];
    let mut answered = 0;
    for n in 0.. {
        let disk = new.after_kill();
        let mut store = disk.open().unwrap();
        disk.set_fate(Fate::Dies(n));
        if store.run(&op, &now)[0].is_ok() {
            break;
        }
        drop(store);
        let disk = disk.after_kill();
        let mut store = disk.open().unwrap();
        if !store.snapshot(&now).unwrap().attachments.is_empty() {
            answered += 1;
            let answer = store.run(&op, &now).remove(0);
            drop(store);
            let mut store = disk.lasting().open().unwrap();
            let tenants = store.snapshot(&now).unwrap().attachments;
            assert_eq!(tenants.len(), 1, "{answer:?} is lost, killed at {n}");
        }
    }
    assert!(answered > 0, "no kill left a commit that was not answered");
}

#[test]
fn a_full_disk_refuses_and_goes_on_when_there_is_space() {
    let (seed, _) = seeded();
    let new = small_disk();
    for n in 0.. {
        let mut rng = Rng::new(seed);
        let disk = new.after_kill();
        let mut store = disk.open().unwrap();
        disk.set_fate(Fate::Full(n));
        let (mut answered, mut ms) = (Answered::new(), 1_000_000);
        let Some(refused) = live(&mut store, &mut answered, &mut rng, &mut ms) else {
            assert!(n > 100, "the disk was written {n} times only");
            break;
        };
        // The disk is still full. So the operation is rejected again, and the error has advice. Operations that write
        // nothing succeed.
        let now = at(0, ms);
        let again = store.run(&[refused.clone(), Op::Status], &now);
        let text = &again[0].as_ref().unwrap_err().text;
        assert!(
            text.contains("No space left") && text.contains("Free space"),
            "{text}"
        );
        assert_eq!(store.run(&[Op::Status], &now), [Ok(OpOutcome::Done)]);
        assert_eq!(stored(&mut store, &now), answered, "Full({n})");
        disk.set_fate(Fate::Lasts);
        let answer = run(&mut store, &refused, &now);
        assert!(answer.is_ok(), "Full({n}): {answer:?}");
        record(&mut answered, &refused, &answer);
        assert_eq!(live(&mut store, &mut answered, &mut rng, &mut ms), None);
        drop(store);
        check(&disk, &answered, None, &format!("Full({n})"));
    }
}

#[test]
fn an_operation_waits_for_the_disk_once() {
    let disk = small_disk();
    let mut store = disk.open().unwrap();
    assert_eq!(disk.syncs(), 0, "opening what lasts");
    let now = at(0, 1_000_000);
    for n in 1..=5 {
        store.run(&[Op::Add(add(n)), Op::Add(add(n + 10))], &now);
        assert_eq!(disk.syncs(), n);
    }
    store.run(&[Op::Add(add(1)), Op::Status], &now);
    store.snapshot(&now).unwrap();
    assert_eq!(disk.syncs(), 5, "where nothing changed");
    // A DEL is recorded even if the attachment has no address, because the record stops an ADD that is still in
    // progress. So the DEL syncs the disk.
    store.run(&[Op::Del(attachment(99)), Op::Del(attachment(98))], &now);
    assert_eq!(disk.syncs(), 6, "DELs of what has nothing");
    store.run(&[Op::Del(attachment(99))], &now);
    assert_eq!(disk.syncs(), 6, "the same one at the same time");
    let before = disk.bytes();
    drop(store);
    drop(disk.open().unwrap());
    assert_eq!(disk.syncs(), 6, "closing, and opening");
    assert!(
        disk.bytes() == before,
        "opening or closing changed the file"
    );
}

#[test]
fn a_file_does_not_grow_with_what_comes_and_goes() {
    let disk = new_disk(&["10.0.0.0/23", "fd00::/64"]);
    let mut store = disk.open().unwrap();
    let mut ms = 1_000_000;
    let mut churn = |store: &mut Store, times: u64| {
        for n in 0..times {
            ms += 500;
            let ops = [Op::Add(add(n)), Op::Del(attachment(n.saturating_sub(100)))];
            let answers = store.run(&ops, &at(0, ms));
            assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        }
    };
    churn(&mut store, 1_000);
    let before = disk.bytes().len();
    churn(&mut store, 4_000);
    let after = disk.bytes().len();
    assert!(after <= before + before / 8, "{before} bytes, then {after}");
    assert!(before <= 4 << 20, "{before} bytes for 100 addresses");
}
