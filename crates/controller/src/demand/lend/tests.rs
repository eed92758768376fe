use super::*;
use crate::allocations::AllocationState;
use crate::cluster::cache::ClusterCache;
use crate::cluster::objects::{Owner, Subnet};
use crate::fixtures::{at, block, cidr, cluster_of, in_step, node, pool_with, rebuilt, subnet};
use crate::reconcile::Loop as _;
use crate::withdrawals::Withdrawals;
use cadastre_api::Borrowing;
use cadastre_daemon::watch::ObjectEvent;

/// Block of the node `rich`.
const BLOCK: &str = "10.0.0.0/28";
/// The largest part of [`BLOCK`] that `rich` can spare.
const PART: &str = "10.0.0.8/29";

/// A pool with one block. Node `rich` has the block and uses few of its addresses, while pods wait on node `dry`.
struct Fixture {
    cache: ClusterCache,
    allocations: AllocationState,
    demand: Demand,
}

impl Fixture {
    fn new(borrowing: Borrowing) -> Self {
        let mut rich = subnet("rich", &[BLOCK], 4);
        let block = &mut rich.report.as_mut().unwrap().blocks[0];
        (block.used, block.free) = (1, 12);
        let pool = pool_with("p", BLOCK, |spec| spec.borrowing = borrowing);
        let cache = cluster_of(vec![pool], vec![rich, subnet("dry", &[], 5)]);
        Fixture {
            allocations: rebuilt(&cache),
            cache,
            demand: Demand::default(),
        }
    }

    /// Handles all nodes. Returns the parts that the controller asks for.
    fn work(&mut self, second: u64) -> Vec<String> {
        for node in self.cache.nodes.iter() {
            self.demand.add(node, &self.allocations);
        }
        self.demand.subnet_changed();
        let demand = &mut self.demand;
        in_step(&self.cache, &mut self.allocations, at(second), |cx| {
            demand.work(cx);
        });
        let asks = self.allocations.lending.asks.keys();
        asks.map(ToString::to_string).collect()
    }

    fn change(&mut self, change: impl FnOnce(&mut Subnet)) {
        let mut is = Subnet::clone(self.cache.subnets.get("rich").unwrap());
        is.version += 1;
        change(&mut is);
        self.cache.subnets.change(ObjectEvent::Applied(is));
    }

    /// Writes the NodeSubnet of `rich`. Returns the parts that the NodeSubnet now lists in `withdraw`, `lent` and
    /// `returned`.
    fn write(&mut self) -> Withdrawals {
        let node = self.cache.nodes.get("rich").unwrap();
        let is = self.cache.subnets.get("rich").unwrap();
        let blocks = &is.spec.as_ref().unwrap().blocks;
        let wanted = Withdrawals::of(node, Some(is), blocks, &self.cache, &self.allocations);
        let spec = (
            wanted.withdraw.clone(),
            wanted.lent.clone(),
            wanted.returned.clone(),
        );
        self.change(|is| {
            let is = is.spec.as_mut().unwrap();
            (is.withdraw, is.lent, is.returned) = spec;
        });
        wanted
    }

    fn answer(&mut self, withdrawn: &[&str], withdrawing: &[&str]) {
        let ranges = |texts: &[&str]| texts.iter().map(|it| cidr(it)).collect();
        let (withdrawn, withdrawing) = (ranges(withdrawn), ranges(withdrawing));
        self.change(|is| {
            let report = is.report.as_mut().unwrap();
            (report.withdrawn, report.withdrawing) = (withdrawn, withdrawing);
        });
    }

    fn borrowed(&self) -> Option<&BlockEntry> {
        self.allocations.blocks.of(&"dry".into()).next()
    }

    /// Passes the object of the borrowed block to the ledger, as the watch does. The UID of the object is its CIDR.
    fn see_block(&mut self) {
        let owner = Owner::node(&"dry".into(), &"dry".into());
        let mut object = block(PART, owner);
        object.spec.as_mut().unwrap().parent = Some(parent());
        let event = ObjectEvent::Applied(object.clone());
        self.cache.blocks.change(event);
        self.allocations.block_seen(&object, at(1));
    }

    /// Returns whether the borrowed block is confirmed. Returns `None` if there is no such block, or if it is about to
    /// be deleted.
    fn is_confirmed(&mut self) -> Option<bool> {
        self.allocations.judge_blocks(&self.cache);
        let entry = self.borrowed().filter(|it| !it.is_leaving());
        entry.map(|it| it.confirmed)
    }

    /// Lets `dry` borrow [`PART`].
    fn lend(&mut self) {
        assert_eq!(self.work(0), [PART]);
        self.write();
        self.answer(&[PART], &[]);
        assert!(self.work(1).is_empty());
        self.see_block();
        self.write();
        assert_eq!(self.is_confirmed(), Some(true));
    }
}

fn parent() -> Parent {
    Parent {
        cidr: cidr(BLOCK),
        node: "rich".into(),
    }
}

#[test]
fn a_part_becomes_a_block_once_its_node_has_withdrawn_it() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    assert_eq!(fixture.work(0), [PART]);
    let is = fixture.write();
    assert_eq!((is.withdraw, is.lent.len()), (vec![PART.to_owned()], 0));
    assert_eq!(fixture.work(0), [PART]);
    assert!(fixture.borrowed().is_none(), "the agent has not answered");
    fixture.answer(&[PART], &[]);
    assert!(fixture.work(2).is_empty());
    let entry = fixture.borrowed().unwrap();
    assert_eq!(
        (entry.cidr, entry.parent.as_ref()),
        (cidr(PART), Some(&parent()))
    );
    // The part stays withdrawn while the borrowed block exists.
    let is = fixture.write();
    assert_eq!((is.withdraw, is.returned.len()), (vec![PART.to_owned()], 0));
    fixture.allocations.drop_block(&cidr(PART));
    let is = fixture.write();
    assert_eq!((is.lent.len(), is.returned), (0, vec![PART.to_owned()]));
    assert!(fixture.work(4).iter().all(|part| part != PART), "it rests");
}

#[test]
fn a_borrowed_block_is_confirmed_once_the_lender_s_node_subnet_names_it() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    fixture.work(0);
    fixture.write();
    fixture.answer(&[PART], &[]);
    fixture.work(1);
    assert_eq!(fixture.write().lent, [], "the block has no UID yet");
    fixture.see_block();
    assert_eq!(
        fixture.is_confirmed(),
        Some(false),
        "an earlier write may return the part"
    );
    let lent = &fixture.write().lent[0];
    assert_eq!(
        (&*lent.cidr, &*lent.node, &*lent.block_uid),
        (PART, "dry", PART)
    );
    assert_eq!(fixture.is_confirmed(), Some(true));
}

#[test]
fn a_late_block_of_a_part_that_was_returned_ends() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    // An earlier leader asked for the part, and its late write created a block of the part.
    fixture.change(|is| is.spec.as_mut().unwrap().withdraw = vec![PART.to_owned()]);
    fixture.answer(&[PART], &[]);
    assert_eq!(fixture.write().returned, [PART]);
    fixture.see_block();
    assert_eq!(fixture.is_confirmed(), None);
    assert_eq!(
        fixture.write().returned,
        [PART],
        "the agent may assign its addresses by now"
    );
}

#[test]
fn nobody_borrows_from_a_pool_that_does_not_say_so() {
    let mut fixture = Fixture::new(Borrowing::Never);
    assert!(fixture.work(0).is_empty());
    assert_eq!(fixture.demand.waiting().map(|it| it.1).sum::<usize>(), 1);
}

#[test]
fn of_a_part_that_is_refused_a_half_is_asked_for() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    fixture.work(0);
    fixture.write();
    fixture.answer(&[], &[PART]);
    let asks = fixture.work(1);
    assert!(
        !asks.is_empty() && !asks.iter().any(|it| it == PART),
        "{asks:?}"
    );
    assert_eq!(fixture.write().withdraw, asks);
}

#[test]
fn a_node_that_does_not_answer_is_not_asked_again_for_a_while() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    assert_eq!(fixture.work(0), [PART]);
    fixture.write();
    fixture.work(5);
    assert!(fixture.work(6).is_empty());
    assert!(fixture.write().withdraw.is_empty());
    assert!(!fixture.work(60).is_empty());
}

#[test]
fn what_nobody_waits_for_is_not_wanted_any_more() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    assert_eq!(fixture.work(0), [PART]);
    fixture.write();
    fixture.answer(&[PART], &[]);
    let mut dry = subnet("dry", &[], 0);
    dry.version = 2;
    fixture.cache.subnets.change(ObjectEvent::Applied(dry));
    assert!(fixture.work(1).is_empty());
    assert_eq!(fixture.write().returned, [PART]);
}

#[test]
fn a_borrowed_block_stays_when_its_parent_ends() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    fixture.lend();
    let rich = fixture.cache.nodes.get("rich").unwrap().clone();
    let quarantined =
        fixture
            .allocations
            .quarantine_blocks(&rich.name, &rich.uid, &rich.machine, at(3));
    assert_eq!(quarantined, [cidr(BLOCK)]);
    assert!(fixture.borrowed().is_some_and(BlockEntry::is_held));
    fixture.allocations.drop_block(&cidr(BLOCK));
    let entry = fixture.borrowed().unwrap();
    assert!(entry.is_held() && entry.parent.is_some());
    assert!(fixture.allocations.parent_of(entry).is_none());
    let held = fixture.allocations.ledger.overlapping(&cidr(BLOCK));
    assert_eq!(
        held.map(|(_, it)| it.cidr).collect::<Vec<_>>(),
        [cidr(PART)]
    );
}

#[test]
fn the_loop_runs_again_for_what_it_has_asked_although_nobody_waits_any_more() {
    let mut fixture = Fixture::new(Borrowing::WhenExhausted);
    assert!(!fixture.work(0).is_empty());
    fixture.demand.gone(&node("dry"));
    assert!(!fixture.demand.is_anyone_waiting());
    assert!(fixture.demand.load().next_at.is_some());
}
