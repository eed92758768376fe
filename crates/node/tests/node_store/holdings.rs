//! Tests of the holdings file: reboots, disks that fail, and notes on pods.

use std::sync::mpsc::channel;
use std::time::Duration;

use cadastre_core::Cidr;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::store_thread::{StoreRequest, StoreSettings, StoreThread, StoreWorker};
use cadastre_node::{
    AddressLedger, HoldingsDisk as _, Now, Op, OpErrorKind, OpOutcome, PodNote, PodRef, Store,
    StoreError, clock,
};

use crate::disk::{FileFate, MemoryDisk, MemoryFile};
use crate::helpers::{NodeDir, WAIT, assigned, call, run, send};
use crate::world::{add, allocation, at, attachment};

const BLOCK: &str = "10.0.0.0/29";
const OTHER: &str = "10.0.1.0/29";
/// The cooldown of the pool in [`ranges`], in milliseconds.
const COOLDOWN: u64 = 5_000;

fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

/// Returns the ranges of a node with these blocks of an IPv4 pool.
fn ranges(blocks: &[&str]) -> NodeAllocation {
    let mut allocation = allocation(blocks);
    for pool in &mut allocation.pools {
        (pool.ipv6, pool.cooldown_seconds) = (None, 5);
    }
    allocation
}

/// Returns a store that records changes of the node's ranges in `file`.
fn store(file: &MemoryFile) -> Store {
    let store = MemoryDisk::default().create().unwrap();
    store.recording(file.holdings())
}

/// Returns the store that an agent creates after a reboot from the content of `file`.
fn rebooted(file: &MemoryFile, now: &Now) -> Store {
    let before = file.holdings().before_reboot(now).unwrap();
    let before = before.expect("it was written before the reboot");
    let mut store = store(file);
    store
        .transact(now, |ledger| ledger.restore(&before))
        .unwrap();
    store
}

fn note(name: &str) -> PodNote {
    PodNote {
        pod: PodRef {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
        },
        ..PodNote::default()
    }
}

fn blocks(store: &mut Store, now: &Now) -> Vec<(String, bool)> {
    let snapshot = store.snapshot(now).unwrap();
    let blocks = snapshot.blocks.iter();
    let blocks = blocks.map(|it| (it.cidr.to_string(), it.state.is_listed()));
    blocks.collect()
}

#[test]
fn after_a_reboot_the_ranges_are_there_and_no_address_is_assigned_before_the_cooldown_since_the_boot()
 {
    let file = MemoryFile::default();
    let mut store = store(&file);
    let now = at(1, 50_000);
    store
        .set_allocation(&ranges(&[BLOCK, OTHER]), &now)
        .unwrap();
    let given = assigned(&run(&mut store, &Op::Add(add(1)), &now));
    assert!(
        store
            .release(cidr(OTHER), "uid-of-10.0.1.0/29", &now)
            .unwrap()
    );
    let before = blocks(&mut store, &now);
    assert_eq!(
        before,
        [(BLOCK.to_owned(), true), (OTHER.to_owned(), false)]
    );

    let boot = at(2, 1_000);
    let mut store = rebooted(&file, &boot);
    assert_eq!(blocks(&mut store, &boot), before);
    assert!(store.snapshot(&boot).unwrap().attachments.is_empty());
    let early = at(2, COOLDOWN - 1);
    let refusal = run(&mut store, &Op::Add(add(2)), &early).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::Exhausted);
    assert!(refusal.text.contains("rested in 1 s"), "{refusal}");
    let mut same = add(2);
    same.addresses.clone_from(&given);
    let refusal = run(&mut store, &Op::Add(same), &early).unwrap_err();
    assert_eq!(refusal.why, OpErrorKind::NotFree, "{refusal}");
    assert!(
        !store
            .release(cidr(BLOCK), "uid-of-10.0.0.0/29", &early)
            .unwrap()
    );
    // The block that was released before the reboot stays released, even if it is listed again.
    store
        .set_allocation(&ranges(&[BLOCK, OTHER]), &early)
        .unwrap();
    assert_eq!(blocks(&mut store, &early), before);
    let late = at(2, COOLDOWN);
    assert_eq!(assigned(&run(&mut store, &Op::Add(add(2)), &late)), given);
}

#[test]
fn a_store_that_was_lost_within_a_boot_is_not_made_from_the_file() {
    let file = MemoryFile::default();
    let now = at(1, 50_000);
    store(&file)
        .set_allocation(&ranges(&[BLOCK]), &now)
        .unwrap();
    assert!(file.holdings().before_reboot(&now).unwrap().is_none());
    // Once the store of the next boot exists, a missing store counts as lost again, and not as a reboot.
    let boot = at(2, 1_000);
    drop(rebooted(&file, &boot));
    assert!(file.holdings().before_reboot(&boot).unwrap().is_none());
    assert!(
        MemoryFile::default()
            .holdings()
            .before_reboot(&now)
            .unwrap()
            .is_none()
    );
}

#[test]
fn the_ranges_in_a_copy_of_another_node_s_file_are_not_used() {
    let file = MemoryFile::default();
    let ranges = ranges(&[BLOCK]);
    store(&file).set_allocation(&ranges, &at(1, 0)).unwrap();
    let boot = at(2, 0);
    assert!(file.holdings().before_reboot(&boot).unwrap().is_some());
    let copy = file.holdings_of("copy");
    let error = copy.before_reboot(&boot).unwrap_err();
    assert!(error.contains("node node wrote it"), "{error}");
    // Files of earlier releases do not contain the name.
    let content = String::from_utf8(file.read().unwrap().unwrap()).unwrap();
    file.put(content.replace("\"nodeName\": \"node\",", "").as_bytes());
    assert!(copy.before_reboot(&boot).unwrap().is_some());
}

#[test]
fn a_file_that_cannot_be_parsed_is_no_record_of_a_node() {
    for content in [
        "",
        "{}",
        "[",
        r#"{"format":2,"boot":"b","pools":[],"blocks":[],"released":[],"withdrawals":[]}"#,
    ] {
        let file = MemoryFile::default();
        file.put(content.as_bytes());
        let error = file.holdings().before_reboot(&at(1, 0)).unwrap_err();
        assert!(error.starts_with("in memory: "), "{error}");
    }
}

#[test]
fn a_change_of_ranges_that_cannot_be_written_has_no_effect_and_stops_no_operation() {
    let file = MemoryFile::default();
    let holdings = file.holdings();
    let mut store = MemoryDisk::default()
        .create()
        .unwrap()
        .recording(holdings.clone());
    let now = at(1, 50_000);
    store.set_allocation(&ranges(&[BLOCK]), &now).unwrap();
    assert_eq!(holdings.problem(), None);
    file.set_fate(FileFate::Fails);
    let error = store
        .set_allocation(&ranges(&[BLOCK, OTHER]), &now)
        .unwrap_err();
    assert!(matches!(error, StoreError::Unrecorded { .. }), "{error}");
    assert!(!error.is_lost());
    assert!(error.to_string().contains("Free space"), "{error}");
    assert!(holdings.problem().unwrap().contains("No space left"));
    assert_eq!(blocks(&mut store, &now).len(), 1);
    assert_eq!(assigned(&run(&mut store, &Op::Add(add(1)), &now)).len(), 1);
    run(&mut store, &Op::Del(attachment(1)), &now).unwrap();
    file.set_fate(FileFate::Lasts);
    store
        .set_allocation(&ranges(&[BLOCK, OTHER]), &now)
        .unwrap();
    assert_eq!(holdings.problem(), None);
    assert_eq!(blocks(&mut rebooted(&file, &at(2, 0)), &at(2, 0)).len(), 2);
}

#[test]
fn ranges_that_are_only_in_the_file_are_written_again_before_ranges_are_read() {
    let file = MemoryFile::default();
    let mut store = store(&file);
    let now = at(1, 50_000);
    store.set_allocation(&ranges(&[BLOCK]), &now).unwrap();
    // The file gets the new block, but the disk reports an error, so the store does not record the block.
    file.set_fate(FileFate::FailsUnsynced);
    store
        .set_allocation(&ranges(&[BLOCK, OTHER]), &now)
        .unwrap_err();
    let in_file =
        |file: &MemoryFile| blocks(&mut rebooted(&file.copy(), &at(2, 0)), &at(2, 0)).len();
    assert_eq!(in_file(&file), 2);
    assert!(
        store.snapshot(&now).is_err(),
        "a read of ranges has to wait"
    );
    let done = store
        .transact_ops(&now, |ledger| ledger.run(&Op::Add(add(1))))
        .unwrap();
    assert_eq!(assigned(&done).len(), 1);
    file.set_fate(FileFate::Lasts);
    assert_eq!(blocks(&mut store, &now).len(), 1);
    assert_eq!(in_file(&file), 1);
}

#[test]
fn blocks_stop_assigning_even_if_the_disk_cannot_record_it() {
    let file = MemoryFile::default();
    let mut store = store(&file);
    let now = at(1, 50_000);
    let adds = |store: &mut Store, number| {
        let add = Op::Add(add(number));
        let done = store.transact_ops(&now, |ledger| ledger.run(&add)).unwrap();
        done.is_ok()
    };
    store.set_allocation(&ranges(&[BLOCK]), &now).unwrap();
    assert!(adds(&mut store, 1));
    file.set_fate(FileFate::Fails);
    let lost = ranges(&[]);
    store.set_allocation(&lost, &now).unwrap_err();
    assert!(adds(&mut store, 2), "nothing has changed");
    store
        .transact_ops(&now, |ledger| ledger.restrict(&lost))
        .unwrap();
    assert!(!adds(&mut store, 3));
    // The block stays on record until the disk works, because its first two addresses are in use.
    file.set_fate(FileFate::Lasts);
    store.set_allocation(&ranges(&[OTHER]), &now).unwrap();
    assert!(adds(&mut store, 4));
    assert_eq!(blocks(&mut store, &now).len(), 2);
}

#[test]
fn an_agent_that_starts_writes_the_ranges_if_the_file_has_others() {
    let file = MemoryFile::default();
    let disk = MemoryDisk::default();
    let now = at(1, 50_000);
    let mut store = disk.create().unwrap().recording(file.holdings());
    store.set_allocation(&ranges(&[BLOCK]), &now).unwrap();
    file.set_fate(FileFate::FailsUnsynced);
    store
        .set_allocation(&ranges(&[BLOCK, OTHER]), &now)
        .unwrap_err();
    file.set_fate(FileFate::Fails);
    let mut store = disk.open().unwrap().recording(file.holdings());
    store.record_ranges(&now).unwrap_err();
    file.set_fate(FileFate::Lasts);
    store.record_ranges(&now).unwrap();
    assert_eq!(
        blocks(&mut rebooted(&file.copy(), &at(2, 0)), &at(2, 0)).len(),
        1
    );
    // A store on a disk survives a reboot, and records the new boot. Otherwise its loss would look like a reboot.
    let boot = at(2, 0);
    let is_earlier = |store: &mut Store| {
        store
            .transact_ops(&boot, |ledger| ledger.is_of_earlier_boot())
            .unwrap()
    };
    assert!(is_earlier(&mut store));
    store.record_ranges(&boot).unwrap();
    assert!(!is_earlier(&mut store));
    assert!(file.holdings().before_reboot(&boot).unwrap().is_none());
}

#[test]
fn changed_notes_are_written_later_and_survive_a_reboot() {
    let file = MemoryFile::default();
    let disk = MemoryDisk::default();
    let now = at(1, 50_000);
    let holdings = file.holdings();
    let mut store = disk.create().unwrap().recording(holdings.clone());
    store.set_allocation(&ranges(&[BLOCK]), &now).unwrap();
    file.set_fate(FileFate::Fails);
    store
        .transact(&now, |ledger| ledger.note_pods(&[note("a")], &[]))
        .unwrap();
    let notes = || {
        let boot = at(2, 0);
        let mut store = rebooted(&file.copy(), &boot);
        store
            .transact_ops(&boot, |ledger| ledger.pod_notes())
            .unwrap()
            .len()
    };
    assert_eq!(notes(), 0);
    let draft = store
        .stale_holdings(&now)
        .unwrap()
        .expect("the note is new");
    holdings.write(&draft).unwrap_err();
    let draft = store
        .stale_holdings(&now)
        .unwrap()
        .expect("it was not written");
    assert!(store.stale_holdings(&now).unwrap().is_none());
    file.set_fate(FileFate::Lasts);
    holdings.write(&draft).unwrap();
    assert_eq!(notes(), 1);
    // A draft that is older than the content is not written.
    store
        .transact(&now, |ledger| ledger.note_pods(&[], &[note("a").pod]))
        .unwrap();
    let old = store.stale_holdings(&now).unwrap().unwrap();
    store
        .set_allocation(&ranges(&[BLOCK, OTHER]), &now)
        .unwrap();
    holdings.write(&old).unwrap();
    assert_eq!(
        blocks(&mut rebooted(&file.copy(), &at(2, 0)), &at(2, 0)).len(),
        2
    );
}

#[test]
fn a_full_disk_fails_no_operation_that_comes_with_a_change_of_ranges() {
    let file = MemoryFile::default();
    let (disk, holdings) = (MemoryDisk::default(), file.holdings());
    let now = at(1, 50_000);
    let mut store = disk.create().unwrap().recording(holdings.clone());
    store.set_allocation(&ranges(&[BLOCK]), &now).unwrap();
    drop(store);
    let mut worker = StoreWorker::new(move || Ok(disk.open()?.recording(holdings.clone())));
    file.set_fate(FileFate::Fails);
    let (answers, added) = channel();
    let (results, held) = channel();
    let change = |ledger: &mut AddressLedger<'_>| ledger.set_allocation(&ranges(&[BLOCK, OTHER]));
    let group = vec![
        StoreRequest::work(None, change, move |it| results.send(it).unwrap()),
        StoreRequest::op(
            Op::Add(add(1)),
            cadastre_node::store_thread::CallTimes::at(now.since_boot, now.since_boot + WAIT),
            Box::new(move |it| answers.send(it).unwrap()),
        ),
    ];
    worker.serve(group, || now.clone());
    assert_eq!(assigned(&added.recv().unwrap()).len(), 1);
    let error = held.recv().unwrap().unwrap_err();
    assert_eq!(error.refusal().why, OpErrorKind::Busy, "{error}");
}

#[test]
fn the_store_thread_writes_changed_notes_when_it_is_idle_and_when_it_ends() {
    let node = NodeDir::with_store();
    let file = MemoryFile::default();
    let settings = StoreSettings {
        idle: Duration::from_millis(1),
        ..StoreSettings::default()
    };
    let (thread, handle) = StoreThread::start(&node.store(), file.holdings(), settings).unwrap();
    let noted = |name: &str| {
        let (sender, done) = channel();
        let note = note(name);
        handle.send(StoreRequest::work(
            None,
            move |ledger| ledger.note_pods(&[note], &[]),
            move |it| sender.send(it).unwrap(),
        ));
        done.recv().unwrap().unwrap();
    };
    noted("a");
    let start = std::time::Instant::now();
    while !file.text().contains("uid-a") {
        assert!(start.elapsed() < WAIT, "{}", file.text());
        std::thread::yield_now();
    }
    noted("b");
    assert_eq!(
        send(&handle, Op::Del(attachment(1)), call()),
        Ok(OpOutcome::Done)
    );
    drop(handle);
    thread.join();
    assert!(file.text().contains("uid-b"), "{}", file.text());
    assert!(node.open().snapshot(&clock::now()).is_ok());
}
