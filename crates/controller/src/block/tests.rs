use super::*;
use crate::Now;
use crate::cluster::cache::ClusterCache;
use crate::cluster::objects::{BlockSpec, Owner};
use crate::fixtures::{NOW, at, block, cidr, in_step, node, pod, reported, with_chosen_block};
use cadastre_daemon::watch::ObjectEvent;

const BLOCK: &str = "10.0.0.0/26";
/// When the quarantine of [`Fixture::quarantined`] ends, in seconds
const OVER: u64 = 60;

/// Returns the object of [`BLOCK`], with this spec.
fn object(spec: Result<BlockSpec, String>) -> Block {
    Block {
        spec,
        ..block(BLOCK, Owner::node(&"n1".into(), &"n1".into()))
    }
}

/// A block of node `n1`. No request for its object has been sent yet.
struct Fixture {
    allocations: AllocationState,
    blocks: BlockLoop,
}

impl Fixture {
    fn new(now: Now) -> Self {
        Fixture {
            allocations: with_chosen_block(BLOCK, &node("n1"), now),
            blocks: BlockLoop::default(),
        }
    }

    fn entry(&mut self) -> &mut BlockEntry {
        self.allocations.blocks.get_mut(&cidr(BLOCK)).unwrap()
    }

    /// Returns the fixture after the deletion of node `n1`, which had the block. The block is queued.
    fn quarantined() -> Self {
        let mut fixture = Self::new(NOW);
        let entry = fixture.entry();
        (entry.confirmed, entry.step, entry.uid) = (true, Step::Settled, Some(BLOCK.into()));
        entry.owner.quarantined = true;
        entry.quarantined_until = Some(Duration::from_secs(OVER));
        fixture.blocks.queue.add(cidr(BLOCK));
        fixture
    }

    /// Passes to the loop the answer to the request of `step`. If `step` is `None`, passes to it the answer to a
    /// read.
    fn answer(&mut self, step: Option<Step>, object: Block, now: Now) {
        self.answer_with(step, &RequestOutcome::Block(object), now);
    }

    /// Like [`Self::answer`], with any outcome.
    fn answer_with(&mut self, step: Option<Step>, outcome: &RequestOutcome, now: Now) {
        let key = (&cidr(BLOCK), self.entry().holding);
        let answered = |cx: &mut Context| self.blocks.written_or_read(key, step, outcome, cx);
        in_step(
            &ClusterCache::default(),
            &mut self.allocations,
            now,
            answered,
        );
    }

    /// Passes to the loop a list of the pods of node `n1` that was requested just now. Returns the reasons of the events.
    fn list_pods(&mut self, outcome: &RequestOutcome, now: Now) -> Vec<&'static str> {
        self.list_pods_as_of(now.mono, outcome, now)
    }

    /// Like [`Self::list_pods`], with a list that contains the changes until `as_of`.
    fn list_pods_as_of(
        &mut self,
        as_of: Duration,
        outcome: &RequestOutcome,
        now: Now,
    ) -> Vec<&'static str> {
        let (name, uid) = ("n1".into(), "n1".into());
        let purpose = Purpose::BlockPods { name, uid, as_of };
        let answer = RequestAnswer::to_read(&purpose, outcome);
        let answered = |cx: &mut Context| self.blocks.answered(&answer, cx);
        reported(
            &ClusterCache::default(),
            &mut self.allocations,
            now,
            answered,
        )
        .1
    }

    /// Returns the loop's next request, and the reasons of the events.
    fn next(&mut self, cache: &ClusterCache, now: Now) -> (Option<ApiRequest>, Vec<&'static str>) {
        let next = |cx: &mut Context| Some(self.blocks.next(cx)?.0);
        reported(cache, &mut self.allocations, now, next)
    }
}

#[test]
fn an_invalid_object_does_not_keep_other_blocks_from_its_name() {
    let step_after = |spec: Result<BlockSpec, String>, confirmed| {
        let mut fixture = Fixture::new(NOW);
        fixture.entry().confirmed = confirmed;
        fixture.answer(None, object(spec), NOW);
        let entry = fixture.entry();
        assert!(entry.step == Step::Await || entry.uid.as_deref() == Some(BLOCK));
        entry.step
    };
    let invalid = || Err("no spec".to_owned());
    // It is unknown which node had the provisional block. So its object stays invalid until the quarantine is over,
    // and is then deleted.
    assert_eq!(step_after(invalid(), false), Step::Settled);
    assert_eq!(step_after(invalid(), true), Step::Replace);
    // The object has another owner. A provisional block waits for the watch, but the object of a confirmed block is
    // written again.
    let of_another = || block(BLOCK, Owner::node(&"n2".into(), &"u2".into())).spec;
    assert_eq!(step_after(of_another(), false), Step::Await);
    assert_eq!(step_after(of_another(), true), Step::Replace);
}

#[test]
fn a_write_that_changed_nothing_is_done() {
    for owner in ["n1", "n2"] {
        let mut fixture = Fixture::new(NOW);
        let entry = fixture.entry();
        (entry.confirmed, entry.step) = (true, Step::Replace);
        let mut spec = entry.spec();
        spec.owner.name = owner.into();
        fixture.answer(Some(Step::Replace), object(Ok(spec)), NOW);
        let is_done = fixture.entry().step == Step::Settled;
        assert_eq!(is_done, owner == "n1");
    }
}

#[test]
fn a_block_is_not_read_again_at_once_while_the_watch_is_behind() {
    let mut now = at(60);
    let mut fixture = Fixture::new(now);
    let entry = fixture.entry();
    (entry.confirmed, entry.step, entry.uid) = (true, Step::Await, Some(BLOCK.into()));
    let specs = [Ok(entry.spec()), Err("no owner".to_owned())];
    fixture.blocks.queue.add(cidr(BLOCK));
    for spec in specs {
        let requests = |fixture: &mut Fixture| {
            let Fixture {
                allocations,
                blocks,
                ..
            } = fixture;
            in_step(&ClusterCache::default(), allocations, now, |cx| {
                let urgent = blocks.next_urgent(cx, false);
                urgent.or_else(|| blocks.next(cx))
            })
        };
        let request = requests(&mut fixture).map(|(request, _)| request);
        let is_read = matches!(request, Some(ApiRequest::Read(ObjectKind::Block, _)));
        assert!(is_read, "{request:?}");
        fixture.answer(None, object(spec), now);
        assert!(requests(&mut fixture).is_none(), "it has just been read");
        now.mono += AWAIT;
    }
}

#[test]
fn what_a_node_waits_for_is_urgent() {
    // The step, whether the object is to be read, and whether the node is deleted
    for (step, to_read, quarantined, is_urgent) in [
        (Step::Create, false, false, true),
        (Step::Create, true, false, true),
        (Step::Settled, true, false, true),
        (Step::Settled, false, false, false),
        (Step::Create, false, true, false),
        (Step::Settled, true, true, false),
    ] {
        let mut fixture = Fixture::new(NOW);
        let entry = fixture.entry();
        (entry.step, entry.to_read, entry.owner.quarantined) = (step, to_read, quarantined);
        let entry = entry.clone();
        fixture.blocks.add(&entry);
        let ready = (
            fixture.blocks.urgent.load().ready,
            fixture.blocks.queue.load().ready,
        );
        assert_eq!(ready, if is_urgent { (1, 0) } else { (0, 1) }, "{step:?}");
        assert_eq!(fixture.blocks.load().ready, 1);
    }
}

#[test]
fn while_the_process_stops_no_block_is_created() {
    for (to_read, stopping, is_sent) in [
        (false, false, true),
        (false, true, false),
        (true, true, true),
    ] {
        let mut fixture = Fixture::new(NOW);
        fixture.entry().to_read = to_read;
        fixture.blocks.urgent.add(cidr(BLOCK));
        let next = |cx: &mut Context| fixture.blocks.next_urgent(cx, stopping).is_some();
        let cache = ClusterCache::default();
        let sends = in_step(&cache, &mut fixture.allocations, NOW, next);
        assert_eq!(sends, is_sent, "to read: {to_read}, stopping: {stopping}");
    }
}

#[test]
fn a_created_block_waits_for_the_watch() {
    for (owner, uid) in [("n1", Some(BLOCK)), ("n2", None)] {
        let mut fixture = Fixture::new(NOW);
        let mut spec = fixture.entry().spec();
        spec.owner.uid = owner.into();
        fixture.answer(Some(Step::Create), object(Ok(spec)), NOW);
        let entry = fixture.entry();
        assert_eq!((entry.step, entry.uid.as_deref()), (Step::Await, uid));
        assert_eq!(fixture.blocks.queue.load().ready, 1);
    }
}

#[test]
fn a_block_that_is_to_be_deleted_stays_so_if_a_read_finds_its_object() {
    let mut fixture = Fixture::new(NOW);
    let spec = fixture.entry().spec();
    fixture.entry().step = Step::Delete;
    fixture.answer(None, object(Ok(spec)), NOW);
    assert_eq!(fixture.entry().step, Step::Delete);
}

#[test]
fn a_deletion_that_is_answered_needs_no_read() {
    let mut fixture = Fixture::new(NOW);
    fixture.entry().step = Step::Delete;
    fixture.answer_with(Some(Step::Delete), &RequestOutcome::Gone, NOW);
    assert!(!fixture.entry().to_read);
    assert_eq!(fixture.blocks.queue.load().ready, 1);
}

#[test]
fn a_block_without_an_object_is_dropped_if_no_node_needs_it() {
    let rejected = || Rejection::Rejected("forbidden".to_owned());
    let guard = || Rejection::Guard("exists".to_owned());
    let missing = || Rejection::Missing;
    let create = Some(Step::Create);
    // The request and how it was rejected; whether the node is deleted, whether the block is confirmed, and its step
    for (request, rejection, quarantined, confirmed, step, is_dropped) in [
        (create, rejected(), true, false, Step::Create, true),
        (create, rejected(), false, false, Step::Create, false),
        (create, rejected(), true, true, Step::Create, false),
        (create, rejected(), true, false, Step::Delete, false),
        (create, guard(), true, false, Step::Create, false),
        (None, missing(), true, false, Step::Await, true),
        (None, missing(), true, true, Step::Await, false),
        (None, missing(), false, false, Step::Await, false),
        (None, missing(), false, true, Step::Delete, true),
    ] {
        let mut fixture = Fixture::new(NOW);
        let entry = fixture.entry();
        (entry.confirmed, entry.step) = (confirmed, step);
        entry.owner.quarantined = quarantined;
        let text = format!("{request:?} {rejection:?} {quarantined} {confirmed} {step:?}");
        fixture.answer_with(request, &RequestOutcome::Rejected(rejection), NOW);
        let entry = fixture.allocations.blocks.get(&cidr(BLOCK));
        assert_eq!(entry.is_none(), is_dropped, "{text}");
    }
}

#[test]
fn a_quarantined_block_is_deleted_once_its_time_is_over_and_no_pod_has_an_address_of_it() {
    let mut fixture = Fixture::quarantined();
    let cache = ClusterCache::default();
    assert!(fixture.next(&cache, at(OVER - 1)).0.is_none());
    let over = Duration::from_secs(OVER);
    assert_eq!(fixture.blocks.load().next_at, Some(over));
    let request = fixture.next(&cache, at(OVER)).0;
    assert!(
        matches!(&request, Some(ApiRequest::ListPodsOf { node, .. }) if **node == *"n1"),
        "{request:?}"
    );
    fixture.blocks.queue.add(cidr(BLOCK));
    let again = fixture.next(&cache, at(OVER)).0;
    assert!(again.is_none(), "the list is on its way: {again:?}");
    let busy = RequestOutcome::Rejected(Rejection::Busy(None));
    fixture.list_pods(&busy, at(OVER));
    assert_eq!(fixture.entry().step, Step::Settled);
    assert!(fixture.next(&cache, at(OVER)).0.is_some(), "listed again");
    fixture.list_pods(&RequestOutcome::Pods(Vec::new(), None), at(OVER));
    assert_eq!(fixture.entry().step, Step::Delete);
}

#[test]
fn a_list_that_is_older_than_the_end_of_the_quarantine_is_repeated() {
    let mut fixture = Fixture::quarantined();
    let cache = ClusterCache::default();
    let none = RequestOutcome::Pods(Vec::new(), None);
    fixture.next(&cache, at(OVER));
    fixture.list_pods_as_of(at(OVER - 1).mono, &none, at(OVER));
    assert_eq!(fixture.entry().step, Step::Settled);
    assert!(fixture.next(&cache, at(OVER)).0.is_some(), "listed again");
}

#[test]
fn the_blocks_of_many_nodes_need_one_consistent_list() {
    let mut fixture = Fixture::quarantined();
    let cache = ClusterCache::default();
    let asks = |request: Option<ApiRequest>| match request {
        Some(ApiRequest::ListPodsOf { not_older_than, .. }) => not_older_than,
        other => panic!("{other:?}"),
    };
    assert_eq!(asks(fixture.next(&cache, at(OVER)).0), None);
    let used = RequestOutcome::Pods(vec![pod(1, &["10.0.0.7"])], Some(7));
    fixture.list_pods(&used, at(OVER));
    fixture.blocks.queue.add(cidr(BLOCK));
    assert_eq!(asks(fixture.next(&cache, at(OVER)).0), Some(7));
}

#[test]
fn a_quarantined_block_stays_while_a_pod_has_an_address_of_it() {
    for (address, stays) in [("10.0.0.7", true), ("10.0.0.64", false)] {
        let kept = if stays { vec![KEPT] } else { Vec::new() };
        let mut cache = ClusterCache::default();
        cache.pods.change(ObjectEvent::Applied(pod(1, &[address])));
        let mut fixture = Fixture::quarantined();
        let (request, events) = fixture.next(&cache, at(OVER));
        assert_eq!((request.is_none(), &events), (stays, &kept));
        if stays {
            let check = at(OVER).next_check();
            assert_eq!(fixture.blocks.load().next_at, Some(check));
            fixture.blocks.queue.add(cidr(BLOCK));
            let (request, events) = fixture.next(&cache, at(OVER));
            assert!(request.is_none() && events.is_empty(), "reported once");
        }
        // The cache does not have the pod, but the consistent list has it.
        let mut fixture = Fixture::quarantined();
        let listed = RequestOutcome::Pods(vec![pod(1, &[address])], None);
        assert_eq!(fixture.list_pods(&listed, at(OVER)), kept);
        assert_eq!(fixture.entry().step == Step::Settled, stays);
    }
}

#[test]
fn a_list_of_pods_ends_only_quarantines_whose_time_is_over() {
    for (quarantined, step, until) in [
        (false, Step::Settled, OVER),
        (true, Step::Replace, OVER),
        (true, Step::Settled, OVER + 1),
    ] {
        let mut fixture = Fixture::quarantined();
        let entry = fixture.entry();
        (entry.owner.quarantined, entry.step) = (quarantined, step);
        entry.quarantined_until = Some(Duration::from_secs(until));
        fixture.list_pods(&RequestOutcome::Pods(Vec::new(), None), at(OVER));
        assert_eq!(fixture.entry().step, step);
    }
}
