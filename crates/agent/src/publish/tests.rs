use super::*;
use crate::demand::{PendingAdds, wanted};
use crate::snapshot::testing::{block, pool, record, snapshot};
use crate::status::status;
use cadastre_api::AddressRequest;
use cadastre_core::Cidr;

const INTERVAL: Duration = Duration::from_secs(30);

/// A node with its publisher, its store, its waiting ADDs, and the version of its NodeSubnet.
struct Node {
    publisher: Publisher,
    snapshot: Snapshot,
    pending_adds: PendingAdds,
    /// The pods for which the CNI configuration or the runtime requests addresses
    asking: Vec<String>,
    version: u32,
    writes: Vec<(Duration, bool)>,
}

impl Node {
    fn new(used: u64) -> Self {
        let snapshot = snapshot(
            &[pool("a", (3, 50), true, false)],
            &[block("10.0.0.0/26", "a", used, 0, 61 - used)],
        );
        let mut publisher = Publisher::new(INTERVAL, 7, Duration::ZERO);
        publisher.seen("1", NodeSubnetStatus::default());
        Self {
            publisher,
            snapshot,
            pending_adds: PendingAdds::new(),
            asking: Vec::new(),
            version: 1,
            writes: Vec::new(),
        }
    }

    fn status(&self) -> NodeSubnetStatus {
        let wants = wanted(&self.snapshot, &self.pending_adds);
        let requests = self.asking.iter().map(|pod| AddressRequest {
            pod_uid: pod.clone(),
            ..AddressRequest::default()
        });
        NodeSubnetStatus {
            requested_addresses: requests.collect(),
            ..status(&self.snapshot, &wants, &[], |_| false, "boot")
        }
    }

    fn next(&mut self, now: Duration) -> PublishStep {
        let wants = wanted(&self.snapshot, &self.pending_adds);
        let status = self.status();
        self.publisher.next(&status, &wants, &self.snapshot, now)
    }

    /// Writes the status if a write is due. The write succeeds immediately.
    fn step(&mut self, now: Duration) -> PublishStep {
        let next = self.next(now);
        if let PublishStep::Write { version, urgent } = &next {
            assert_eq!(*version, self.version.to_string());
            self.version += 1;
            let written = WriteOutcome::Done {
                version: self.version.to_string(),
                status: Box::new(self.status()),
                cut: None,
            };
            self.publisher.written(written, now);
            self.writes.push((now, *urgent));
        }
        next
    }

    fn run(&mut self, from: u64, to: u64, mut change: impl FnMut(&mut Snapshot, u64)) {
        for tenth in from * 10..to * 10 {
            change(&mut self.snapshot, tenth);
            self.step(Duration::from_millis(tenth * 100));
        }
    }
}

fn is_urgent(step: &PublishStep) -> bool {
    matches!(step, PublishStep::Write { urgent: true, .. })
}

fn is_write(step: &PublishStep) -> bool {
    matches!(step, PublishStep::Write { .. })
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

#[test]
fn nothing_is_written_while_nothing_changes() {
    let mut node = Node::new(5);
    node.run(0, 600, |_, _| {});
    assert_eq!(node.writes.len(), 1, "{:?}", node.writes);
    assert!(node.writes[0].0 <= INTERVAL / 4 && !node.writes[0].1);
}

#[test]
fn a_partly_stored_status_is_not_written_again_before_a_change() {
    let mut node = Node::new(5);
    let wants = wanted(&node.snapshot, &node.pending_adds);
    let wanted_status = status(&node.snapshot, &wants, &[], |_| false, "boot");
    let mut stored = wanted_status.clone();
    stored.agent = None;
    let version = |n: u32| n.to_string();
    assert!(is_write(&node.next(secs(10))));
    let written = WriteOutcome::Done {
        version: version(2),
        status: Box::new(stored.clone()),
        cut: Some(Box::new(wanted_status)),
    };
    node.publisher.written(written, secs(10));
    node.publisher.seen(&version(2), stored.clone());
    assert_eq!(node.next(secs(1000)), PublishStep::Nothing);
    assert_eq!(node.publisher.lag(secs(1000)), Duration::ZERO);
    let mut later = snapshot(
        &[pool("a", (3, 50), true, false)],
        &[block("10.0.0.0/26", "a", 6, 0, 55)],
    );
    std::mem::swap(&mut node.snapshot, &mut later);
    assert!(is_write(&node.next(secs(1001))));
    node.publisher.written(WriteOutcome::Failed, secs(1001));
    node.snapshot = later;
    assert_eq!(node.next(secs(2000)), PublishStep::Nothing);
    // Another client has written the object, so the API server may now store the whole status.
    node.publisher.seen(&version(3), stored);
    assert!(is_write(&node.next(secs(2001))));
}

#[test]
fn earlier_failures_do_not_delay_a_write_to_a_recreated_subnet() {
    let mut node = Node::new(5);
    for n in 1..12 {
        assert!(is_write(&node.next(secs(1000 * n))));
        node.publisher
            .written(WriteOutcome::Failed, secs(1000 * n + 1));
    }
    node.publisher.lost();
    assert_eq!(node.next(secs(11_002)), PublishStep::Nothing);
    node.publisher.seen("7", NodeSubnetStatus::default());
    let version = "7".to_owned();
    let urgent = false;
    assert_eq!(
        node.next(secs(11_003)),
        PublishStep::Write { version, urgent }
    );
}

#[test]
fn the_lag_lasts_from_a_change_until_it_is_written() {
    let mut node = Node::new(5);
    node.step(secs(10));
    assert_eq!(node.publisher.lag(secs(10)), Duration::ZERO);
    node.snapshot.blocks[0].counts.used = 6;
    node.next(secs(11));
    assert_eq!(node.publisher.lag(secs(15)), secs(4));
    let wrote = node.next(secs(60));
    assert!(is_write(&wrote));
    node.publisher.written(WriteOutcome::Failed, secs(61));
    node.next(secs(62));
    assert_eq!(node.publisher.lag(secs(62)), secs(51), "the write failed");
    node.snapshot.blocks[0].counts.used = 5;
    node.next(secs(63));
    assert_eq!(
        node.publisher.lag(secs(63)),
        Duration::ZERO,
        "as stored again"
    );
}

#[test]
fn changes_that_are_not_urgent_are_written_once_per_interval() {
    let mut node = Node::new(0);
    node.run(0, 3600, |it, tenth| {
        it.blocks[0].counts.used = tenth % 50;
        it.blocks[0].counts.free = 61 - tenth % 50;
    });
    let pauses = node
        .writes
        .windows(2)
        .map(|pair| pair[1].0.saturating_sub(pair[0].0));
    let pauses: Vec<Duration> = pauses.collect();
    assert!(pauses.iter().all(|it| *it >= INTERVAL), "{pauses:?}");
    assert!(
        pauses.iter().all(|it| *it <= INTERVAL * 5 / 4),
        "{pauses:?}"
    );
    let distinct: BTreeSet<_> = pauses.iter().collect();
    assert!(distinct.len() > 10, "no jitter: {pauses:?}");
}

#[test]
fn a_restored_api_gets_blocks_in_use_at_once() {
    let mut node = Node::new(5);
    node.step(secs(10));
    node.publisher.written(WriteOutcome::Failed, secs(11));
    // This event is older than the answer to the write, so it is ignored. A watch that resumes after an interruption
    // might deliver such an event.
    node.publisher.seen("1", NodeSubnetStatus::default());
    assert_eq!(node.next(secs(12)), PublishStep::Nothing);
    node.publisher.relisted();
    node.publisher.seen("1", NodeSubnetStatus::default());
    assert!(matches!(node.next(secs(12)), PublishStep::At(at) if at >= secs(40)));
    node.snapshot.blocks[0].state = BlockState::Unlisted;
    let wrote = node.next(secs(12));
    let version = "1".to_owned();
    let urgent = true;
    assert_eq!(wrote, PublishStep::Write { version, urgent });
}

#[test]
fn growth_within_capacity_waits_and_a_request_for_a_block_does_not() {
    let mut node = Node::new(5);
    node.step(secs(10));
    node.snapshot.blocks[0].counts.used = 58;
    node.snapshot.blocks[0].counts.free = 3;
    assert!(matches!(node.step(secs(11)), PublishStep::At(at) if at >= secs(40)));
    node.snapshot.blocks[0].counts.used = 59;
    node.snapshot.blocks[0].counts.free = 2;
    assert!(is_urgent(&node.step(secs(12))));
    // The block was requested and is not allocated yet. There is no other reason for an urgent write.
    assert!(matches!(node.step(secs(13)), PublishStep::Nothing));
    // The block is allocated now. But the controller assumes that the block has more addresses than it really has, so
    // the node must report again.
    node.snapshot
        .blocks
        .push(block("10.0.0.64/30", "a", 0, 0, 1));
    node.pending_adds.insert("a".to_owned(), 4);
    assert!(is_urgent(&node.step(secs(20))));
}

#[test]
fn fifty_pods_cost_less_than_one_write() {
    let mut node = Node::new(0);
    let mut events = 0;
    // The controller allocates each requested block immediately. A block has 61 addresses.
    node.run(0, 60, |it, _| {
        events += 1;
        let last = it.blocks.len() - 1;
        it.blocks[last].counts.used += 1;
        it.blocks[last].counts.free -= 1;
        if it.blocks[last].counts.free == 2 {
            let n = it.blocks.len();
            let cidr = format!("10.0.{n}.0/26");
            it.blocks[last].counts.used += 2;
            it.blocks[last].counts.free = 0;
            it.blocks.push(block(&cidr, "a", 0, 0, 61));
        }
    });
    assert!(node.writes.len() * 50 <= events, "{:?}", node.writes);
}

#[test]
fn a_demand_that_grows_steadily_is_written_ever_less_often() {
    let mut node = Node::new(61);
    for tenth in 0..1200u64 {
        node.pending_adds.insert("a".to_owned(), tenth + 1);
        node.step(Duration::from_millis(tenth * 100));
    }
    assert_eq!(node.writes[0].0, Duration::ZERO);
    assert!(node.writes.len() < 25, "{}", node.writes.len());
}

/// Acts as the controller: allocates enough blocks of 13 addresses for each pool whose demand exceeds its capacity.
fn answer(node: &mut Node) {
    let wants = wanted(&node.snapshot, &node.pending_adds);
    for (pool, want) in wants.iter().filter(|(_, want)| want.is_lacking()) {
        for _ in 0..(want.demand - want.capacity).div_ceil(13) {
            let n = node.snapshot.blocks.len();
            let cidr = format!("10.{}.{}.0/28", n / 250 + 1, n % 250);
            node.snapshot.blocks.push(block(&cidr, pool, 0, 0, 13));
        }
    }
}

/// Assigns an address of the pool. Returns false if no address of the pool is free.
fn give(node: &mut Node, pool: &str) -> bool {
    let mut blocks = node.snapshot.blocks.iter_mut();
    let Some(block) = blocks.find(|it| it.pool == pool && it.counts.free > 0) else {
        return false;
    };
    block.counts.free -= 1;
    block.counts.used += 1;
    true
}

#[test]
fn each_pool_that_runs_out_is_requested_at_once() {
    let mut node = Node::new(0);
    let names: Vec<String> = (0..10).map(|n| format!("tenant-{n}")).collect();
    let pools: Vec<_> = names
        .iter()
        .map(|it| pool(it, (0, 0), true, false))
        .collect();
    node.snapshot.pools = snapshot(&pools, &[]).pools;
    node.snapshot.blocks.clear();
    node.step(Duration::ZERO);
    let before = node.writes.len();
    for (n, name) in (1..).zip(&names) {
        node.pending_adds.insert(name.clone(), 1);
        let now = Duration::from_millis(300 * n);
        let next = node.step(now);
        assert!(is_urgent(&next), "{name}: {next:?}");
        answer(&mut node);
        node.pending_adds.clear();
        assert!(give(&mut node, name));
    }
    assert_eq!(node.writes.len() - before, names.len());
}

#[test]
fn a_pod_waits_for_one_answer_only() {
    let mut node = Node::new(61);
    node.step(Duration::ZERO);
    // One pod comes every 0.1 s, over a time that exceeds the longest pause between urgent writes.
    let mut waiting: Vec<Duration> = Vec::new();
    let mut longest = Duration::ZERO;
    for tenth in 1..300 {
        let now = Duration::from_millis(tenth * 100);
        waiting.push(now);
        node.pending_adds
            .insert("a".to_owned(), waiting.len() as u64);
        let wrote = is_urgent(&node.step(now));
        if wrote {
            answer(&mut node);
        }
        while !waiting.is_empty() && give(&mut node, "a") {
            longest = longest.max(now.saturating_sub(waiting.remove(0)));
        }
        node.pending_adds
            .insert("a".to_owned(), waiting.len() as u64);
    }
    assert!(longest <= Duration::from_millis(300), "{longest:?}");
    assert!(node.writes.len() < 40, "{} writes", node.writes.len());
}

#[test]
fn a_pool_that_allocates_nothing_delays_no_other_pool() {
    let mut node = Node::new(0);
    let pools = [
        pool("a", (0, 0), true, false),
        pool("full", (0, 0), true, false),
    ];
    node.snapshot.pools = snapshot(&pools, &[]).pools;
    let mut at = Vec::new();
    for tenth in 0..600u64 {
        node.pending_adds.insert("full".to_owned(), tenth + 1);
        let now = Duration::from_millis(tenth * 100);
        if let PublishStep::Write { urgent: true, .. } = node.step(now) {
            at.push(tenth);
        }
    }
    assert!(at.len() < 14, "{at:?}");
    node.pending_adds.insert("a".to_owned(), 62);
    let now = Duration::from_millis(100 * (at[at.len() - 1] + 1));
    let next = node.next(now);
    assert!(is_urgent(&next), "{next:?}");
}

#[test]
fn a_release_is_written_at_once() {
    let mut node = Node::new(5);
    node.snapshot
        .blocks
        .push(block("10.0.0.64/26", "a", 0, 0, 61));
    node.step(secs(10));
    node.snapshot.blocks[1].state = BlockState::Released;
    assert!(is_urgent(&node.step(secs(11))));
    assert_eq!(node.step(secs(12)), PublishStep::Nothing);
    // The request was stored, but a user has restored an older status. So the request must be made again.
    node.publisher.seen("9", NodeSubnetStatus::default());
    node.version = 9;
    assert!(is_urgent(&node.step(secs(13))));
}

#[test]
fn withdrawals_that_follow_each_other_are_each_reported_at_once() {
    let mut node = Node::new(5);
    node.run(0, 40, |_, _| {});
    node.writes.clear();
    node.run(40, 60, |snapshot, tenth| {
        if tenth % 10 == 0 {
            let n = u8::try_from(tenth / 10).unwrap();
            let range = format!("10.0.0.{n}/32");
            snapshot.withdrawn.push(Cidr::parse_strict(&range).unwrap());
        }
    });
    let late = node
        .writes
        .iter()
        .filter(|(at, _)| at.subsec_millis() > 300);
    assert_eq!(
        (node.writes.len(), late.count()),
        (20, 0),
        "{:?}",
        node.writes
    );
    // Something takes the report out of the status again and again.
    node.writes.clear();
    for tenth in 600..1_200 {
        let now = Duration::from_millis(tenth * 100);
        if is_write(&node.step(now)) {
            node.version += 1;
            let stripped = NodeSubnetStatus {
                withdrawn: Vec::new(),
                ..node.status()
            };
            node.publisher.seen(&node.version.to_string(), stripped);
        } else if tenth == 600 {
            node.version += 1;
            node.publisher
                .seen(&node.version.to_string(), NodeSubnetStatus::default());
        }
    }
    assert!((6..20).contains(&node.writes.len()), "{:?}", node.writes);
}

#[test]
fn a_status_of_an_earlier_node_does_not_count() {
    let mut node = Node::new(60);
    node.step(Duration::ZERO);
    node.snapshot.node_uid = Some("second".to_owned());
    node.snapshot
        .attachments
        .push(record("c", "u", &["10.0.0.1"]));
    assert!(is_urgent(&node.step(secs(1))));
}

#[test]
fn one_write_at_a_time_to_the_version_seen_last() {
    let mut node = Node::new(60);
    let first = node.next(Duration::ZERO);
    assert!(matches!(&first, PublishStep::Write { version, .. } if version == "1"));
    assert_eq!(node.next(secs(1)), PublishStep::Nothing);
    node.publisher.written(WriteOutcome::Outdated, secs(1));
    assert!(
        matches!(node.next(secs(1)), PublishStep::At(_)),
        "the watch is behind"
    );
    node.publisher.seen("2", NodeSubnetStatus::default());
    let again = node.next(secs(1));
    assert!(matches!(&again, PublishStep::Write { version, .. } if version == "2"));
    // This watch event is older than the answer to the write, so the event is ignored.
    node.publisher.seen("1", NodeSubnetStatus::default());
    assert_eq!(node.next(secs(1)), PublishStep::Nothing);
    node.publisher.lost();
    node.publisher.written(WriteOutcome::Failed, secs(2));
    assert_eq!(
        node.next(secs(600)),
        PublishStep::Nothing,
        "there is no NodeSubnet"
    );
}

#[test]
fn a_version_that_came_during_a_rejected_write_is_used_at_once() {
    let mut node = Node::new(60);
    assert!(is_write(&node.next(Duration::ZERO)));
    node.publisher.seen("2", NodeSubnetStatus::default());
    node.publisher.written(WriteOutcome::Outdated, secs(1));
    let again = node.next(secs(1));
    assert!(
        matches!(&again, PublishStep::Write { version, .. } if version == "2"),
        "{again:?}"
    );
}

#[test]
fn errors_are_followed_by_growing_pauses() {
    let mut node = Node::new(60);
    let (mut now, mut pauses) = (Duration::ZERO, Vec::new());
    for _ in 0..12 {
        while let PublishStep::At(at) = node.next(now) {
            pauses.push(at.saturating_sub(now));
            now = at;
        }
        node.publisher.written(WriteOutcome::Failed, now);
    }
    assert!(pauses[0] < secs(2) && pauses[10] >= secs(60), "{pauses:?}");
    assert!(pauses.iter().all(|it| *it <= secs(180)), "{pauses:?}");
}

#[test]
fn a_request_of_addresses_is_written_at_once_unless_many_remain_unanswered() {
    let mut node = Node::new(5);
    node.run(0, 100, |_, _| {});
    let begun = node.writes.len();
    node.asking = vec!["a".to_owned()];
    assert!(is_urgent(&node.step(secs(100))));
    node.run(101, 110, |_, _| {});
    assert_eq!(node.writes.len(), begun + 1, "it stays the same");
    // The pod gets the address of its claim, and another pod comes. Nothing delays the request for the other pod.
    for (nth, pod) in ["b", "c", "d", "e"].into_iter().enumerate() {
        node.asking = vec![pod.to_owned()];
        let now = secs(120) + Duration::from_millis(100) * u32::try_from(nth).unwrap();
        assert!(is_urgent(&node.step(now)), "{pod}");
    }
    // Two pods come per second, and none gets its address.
    let before = node.writes.len();
    for tenth in 2_000..3_000 {
        if tenth % 5 == 0 {
            node.asking.push(format!("{tenth}"));
        }
        node.step(Duration::from_millis(tenth * 100));
    }
    let writes = node.writes.len() - before;
    assert!((10..=20).contains(&writes), "{writes}");
    // The end of a request causes no urgent write.
    node.asking.clear();
    assert!(!is_urgent(&node.step(secs(301))));
}
