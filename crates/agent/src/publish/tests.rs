use super::*;
use crate::demand::{PendingAdds, wanted};
use crate::snapshot::testing::{block, pool, record, snapshot};
use crate::status::status;

const INTERVAL: Duration = Duration::from_secs(30);

/// A node with its publisher, its store, its waiting ADDs, and the version of its NodeSubnet.
struct Node {
    publisher: Publisher,
    snapshot: Snapshot,
    wishes: PendingAdds,
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
            wishes: PendingAdds::new(),
            version: 1,
            writes: Vec::new(),
        }
    }

    fn next(&mut self, now: Duration) -> PublishStep {
        let wants = wanted(&self.snapshot, &self.wishes);
        let status = status(&self.snapshot, &wants, &[], "boot");
        self.publisher.next(&status, &wants, &self.snapshot, now)
    }

    /// Writes the status if a write is due; the write succeeds at once.
    fn step(&mut self, now: Duration) -> PublishStep {
        let next = self.next(now);
        if let PublishStep::Write { version, urgent } = &next {
            assert_eq!(*version, self.version.to_string());
            self.version += 1;
            let wants = wanted(&self.snapshot, &self.wishes);
            let written = WriteOutcome::Done {
                version: self.version.to_string(),
                status: Box::new(status(&self.snapshot, &wants, &[], "boot")),
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
fn what_an_older_crd_cuts_off_is_not_written_again_before_something_changes() {
    let mut node = Node::new(5);
    let wants = wanted(&node.snapshot, &node.wishes);
    let told = status(&node.snapshot, &wants, &[], "boot");
    let mut stored = told.clone();
    stored.agent = None;
    let version = |n: u32| n.to_string();
    assert!(matches!(node.next(secs(10)), PublishStep::Write { .. }));
    let written = WriteOutcome::Done {
        version: version(2),
        status: Box::new(stored.clone()),
        cut: Some(Box::new(told)),
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
    assert!(matches!(node.next(secs(1001)), PublishStep::Write { .. }));
    node.publisher.written(WriteOutcome::Failed, secs(1001));
    node.snapshot = later;
    assert_eq!(node.next(secs(2000)), PublishStep::Nothing);
    // Another client wrote, so the API server may now store the whole status.
    node.publisher.seen(&version(3), stored);
    assert!(matches!(node.next(secs(2001)), PublishStep::Write { .. }));
}

#[test]
fn a_subnet_that_comes_back_is_written_at_once_whatever_failed_before() {
    let mut node = Node::new(5);
    for n in 1..12 {
        assert!(matches!(
            node.next(secs(1000 * n)),
            PublishStep::Write { .. }
        ));
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
fn the_lag_lasts_from_a_change_until_it_is_told() {
    let mut node = Node::new(5);
    node.step(secs(10));
    assert_eq!(node.publisher.lag(secs(10)), Duration::ZERO);
    node.snapshot.blocks[0].counts.used = 6;
    node.next(secs(11));
    assert_eq!(node.publisher.lag(secs(15)), secs(4));
    let wrote = node.next(secs(60));
    assert!(matches!(wrote, PublishStep::Write { .. }));
    node.publisher.written(WriteOutcome::Failed, secs(61));
    node.next(secs(62));
    assert_eq!(
        node.publisher.lag(secs(62)),
        secs(51),
        "a failure tells nothing"
    );
    node.snapshot.blocks[0].counts.used = 5;
    node.next(secs(63));
    assert_eq!(
        node.publisher.lag(secs(63)),
        Duration::ZERO,
        "as told again"
    );
}

#[test]
fn what_can_wait_is_told_once_in_the_interval_however_often_it_changes() {
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
    let distinct: std::collections::BTreeSet<_> = pauses.iter().collect();
    assert!(distinct.len() > 10, "no jitter: {pauses:?}");
}

#[test]
fn an_api_that_was_put_back_is_told_at_once_what_is_in_use() {
    let mut node = Node::new(5);
    node.step(secs(10));
    node.publisher.written(WriteOutcome::Failed, secs(11));
    // A continued watch might show this event. It is older than the answer to the write, so it is ignored.
    node.publisher.seen("1", NodeSubnetStatus::default());
    assert_eq!(node.next(secs(12)), PublishStep::Nothing);
    node.publisher.relisted();
    node.publisher.seen("1", NodeSubnetStatus::default());
    assert!(matches!(node.next(secs(12)), PublishStep::At(at) if at >= secs(40)));
    node.snapshot.blocks[0].state = BlockState::Withdrawn;
    let wrote = node.next(secs(12));
    let version = "1".to_owned();
    let urgent = true;
    assert_eq!(wrote, PublishStep::Write { version, urgent });
}

#[test]
fn growth_that_is_covered_waits_and_the_need_of_a_block_does_not() {
    let mut node = Node::new(5);
    node.step(secs(10));
    node.snapshot.blocks[0].counts.used = 58;
    node.snapshot.blocks[0].counts.free = 3;
    assert!(matches!(node.step(secs(11)), PublishStep::At(at) if at >= secs(40)));
    node.snapshot.blocks[0].counts.used = 59;
    node.snapshot.blocks[0].counts.free = 2;
    assert!(matches!(
        node.step(secs(12)),
        PublishStep::Write { urgent: true, .. }
    ));
    // The block was requested and has not come yet, so nothing else is urgent.
    assert!(matches!(node.step(secs(13)), PublishStep::Nothing));
    // The block is there, but the controller counts more addresses in it than there are, so the node must report again.
    node.snapshot
        .blocks
        .push(block("10.0.0.64/30", "a", 0, 0, 1));
    node.wishes.insert("a".to_owned(), 4);
    assert!(matches!(
        node.step(secs(20)),
        PublishStep::Write { urgent: true, .. }
    ));
}

#[test]
fn ten_pods_a_second_cost_less_than_a_write_in_fifty() {
    let mut node = Node::new(0);
    let mut events = 0;
    // A new block of 61 addresses comes at once when it is requested.
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
fn a_need_that_grows_all_the_time_is_told_ever_less_often() {
    let mut node = Node::new(61);
    for tenth in 0..1200u64 {
        node.wishes.insert("a".to_owned(), tenth + 1);
        node.step(Duration::from_millis(tenth * 100));
    }
    assert_eq!(node.writes[0].0, Duration::ZERO);
    assert!(node.writes.len() < 25, "{}", node.writes.len());
}

/// Acts as the controller: allocates enough blocks of 13 addresses for each pool whose demand exceeds its capacity.
fn answer(node: &mut Node) {
    let wants = wanted(&node.snapshot, &node.wishes);
    for (pool, want) in wants.iter().filter(|(_, want)| want.is_lacking()) {
        for _ in 0..(want.demand - want.capacity).div_ceil(13) {
            let n = node.snapshot.blocks.len();
            let cidr = format!("10.{}.{}.0/28", n / 250 + 1, n % 250);
            node.snapshot.blocks.push(block(&cidr, pool, 0, 0, 13));
        }
    }
}

/// Assigns an address of the pool. Returns whether one was free.
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
fn pools_that_run_out_in_turn_are_each_asked_at_once() {
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
        node.wishes.insert(name.clone(), 1);
        let now = Duration::from_millis(300 * n);
        let next = node.step(now);
        assert!(
            matches!(next, PublishStep::Write { urgent: true, .. }),
            "{name}: {next:?}"
        );
        answer(&mut node);
        node.wishes.clear();
        assert!(give(&mut node, name));
    }
    assert_eq!(node.writes.len() - before, names.len());
}

#[test]
fn who_comes_while_answers_come_waits_for_one_answer_only() {
    let mut node = Node::new(61);
    node.step(Duration::ZERO);
    // A pod comes every 0.1 s for longer than the longest pause.
    let mut waiting: Vec<Duration> = Vec::new();
    let mut longest = Duration::ZERO;
    for tenth in 1..300 {
        let now = Duration::from_millis(tenth * 100);
        waiting.push(now);
        node.wishes.insert("a".to_owned(), waiting.len() as u64);
        let wrote = matches!(node.step(now), PublishStep::Write { urgent: true, .. });
        if wrote {
            answer(&mut node);
        }
        while !waiting.is_empty() && give(&mut node, "a") {
            longest = longest.max(now.saturating_sub(waiting.remove(0)));
        }
        node.wishes.insert("a".to_owned(), waiting.len() as u64);
    }
    assert!(longest <= Duration::from_millis(300), "{longest:?}");
    assert!(node.writes.len() < 40, "{} writes", node.writes.len());
}

#[test]
fn a_pool_that_does_not_answer_slows_down_no_other_one() {
    let mut node = Node::new(0);
    let pools = [
        pool("a", (0, 0), true, false),
        pool("full", (0, 0), true, false),
    ];
    node.snapshot.pools = snapshot(&pools, &[]).pools;
    let mut at = Vec::new();
    for tenth in 0..600u64 {
        node.wishes.insert("full".to_owned(), tenth + 1);
        let now = Duration::from_millis(tenth * 100);
        if let PublishStep::Write { urgent: true, .. } = node.step(now) {
            at.push(tenth);
        }
    }
    assert!(at.len() < 14, "{at:?}");
    node.wishes.insert("a".to_owned(), 62);
    let now = Duration::from_millis(100 * (at[at.len() - 1] + 1));
    let next = node.next(now);
    assert!(
        matches!(next, PublishStep::Write { urgent: true, .. }),
        "{next:?}"
    );
}

#[test]
fn what_is_let_go_is_told_at_once() {
    let mut node = Node::new(5);
    node.snapshot
        .blocks
        .push(block("10.0.0.64/26", "a", 0, 0, 61));
    node.step(secs(10));
    node.snapshot.blocks[1].state = BlockState::Released;
    assert!(matches!(
        node.step(secs(11)),
        PublishStep::Write { urgent: true, .. }
    ));
    assert_eq!(node.step(secs(12)), PublishStep::Nothing);
    // The request was stored and then lost, because a user restored an older status. So the request is made again.
    node.publisher.seen("9", NodeSubnetStatus::default());
    node.version = 9;
    assert!(matches!(
        node.step(secs(13)),
        PublishStep::Write { urgent: true, .. }
    ));
}

#[test]
fn a_status_of_another_node_of_the_name_says_nothing() {
    let mut node = Node::new(60);
    node.step(Duration::ZERO);
    node.snapshot.node_uid = Some("second".to_owned());
    node.snapshot
        .attachments
        .push(record("c", "u", &["10.0.0.1"]));
    assert!(matches!(
        node.step(secs(1)),
        PublishStep::Write { urgent: true, .. }
    ));
}

#[test]
fn one_write_at_a_time_onto_what_was_seen_last() {
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
    // The watch is behind the answer to the write, so the version that it shows is ignored.
    node.publisher.seen("1", NodeSubnetStatus::default());
    assert_eq!(node.next(secs(1)), PublishStep::Nothing);
    node.publisher.lost();
    node.publisher.written(WriteOutcome::Failed, secs(2));
    assert_eq!(
        node.next(secs(600)),
        PublishStep::Nothing,
        "nowhere to write to"
    );
}

#[test]
fn a_version_that_came_during_a_refused_write_is_written_to_at_once() {
    let mut node = Node::new(60);
    assert!(matches!(
        node.next(Duration::ZERO),
        PublishStep::Write { .. }
    ));
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
