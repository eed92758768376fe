use super::*;
use crate::cluster::objects::{Owner, Pod, Pool};
use crate::cluster::request::{Rejection, RequestOutcome};
use crate::fixtures::{
    LoopFixture, at, block, cidr, list, node, node_with, pod, pool_with, rebuilt,
};
use cadastre_api::{AllocationMode, ExhaustedNodeTaint, IPPoolSpec};
use cadastre_core::HoldingState;
use cadastre_daemon::watch::ObjectEvent;

/// The only block of the pool. A node can assign one of its addresses.
const BLOCK: &str = "10.0.0.0/30";

fn tainting(spec: &mut IPPoolSpec) {
    spec.exhausted_node_taint = ExhaustedNodeTaint::NoSchedule;
}

/// Returns a pool that allocates /30 blocks of this range.
fn pool_of(range: &str, change: impl FnOnce(&mut IPPoolSpec)) -> Pool {
    pool_with("p", range, |spec| {
        spec.ipv4.as_mut().unwrap().block_size = Some(30);
        change(spec);
    })
}

/// Returns a pod that is bound to node a.
fn bound(name: &str, addresses: &[&str]) -> Pod {
    Pod {
        uid: name.into(),
        name: format!("default/{name}").into(),
        node: Some("a".into()),
        ..pod(1, addresses)
    }
}

/// A cluster in which node a has the only block of its pool. The writes of the loop take effect at once.
struct Fixture {
    inner: LoopFixture<Exhaustion>,
    /// The pods that the loop has evicted, or tried to evict
    evicted: Vec<String>,
    /// The pod whose eviction is always refused
    refused: Option<&'static str>,
}

impl Fixture {
    fn new(pool: Pool, pods: Vec<Pod>) -> Self {
        let mut inner = LoopFixture::new(vec![pool]);
        let object = block(BLOCK, Owner::node(&"a".into(), &"a".into()));
        list(&mut inner.cache.blocks, vec![object]);
        inner.allocations = rebuilt(&inner.cache);
        inner.allocations.judge_blocks(&inner.cache);
        let asked = Duration::ZERO;
        inner.cache.pods.change(ObjectEvent::Restarted { asked });
        for pod in pods {
            inner.cache.pods.change(ObjectEvent::Applied(pod));
        }
        inner.cache.pods.change(ObjectEvent::Listed);
        Fixture {
            inner,
            evicted: Vec::new(),
            refused: None,
        }
    }

    fn node(&self) -> &Node {
        self.inner.cache.nodes.get("a").unwrap()
    }

    /// Lets the loop decide about node a, and returns the names of the writes.
    fn settle(&mut self) -> Vec<&'static str> {
        self.inner.tested.queue.add("a".into());
        let mut writes = Vec::new();
        while let Some((request, purpose)) = self.inner.step(Loop::next) {
            let mut node = Node::clone(self.node());
            node.version += 1;
            writes.push(match request {
                ApiRequest::SetTaints(change) => {
                    assert_eq!(change.before, node.taints);
                    node.taints = change.after;
                    "taints"
                }
                ApiRequest::SetExhausted(change) => {
                    node.exhausted = change.message;
                    "condition"
                }
                ApiRequest::Evict(pod) => {
                    let is_refused = self.refused == Some(&*pod.name);
                    let outcome = if is_refused {
                        RequestOutcome::Rejected(Rejection::Busy(None))
                    } else {
                        RequestOutcome::Gone
                    };
                    let call = ObjectCall::of(&purpose, true).unwrap();
                    let now = self.inner.now.mono;
                    let refusals = &mut self.inner.allocations.refusals;
                    refusals.note(&call, &outcome, true, now);
                    let answer = RequestAnswer::to_write(&purpose, &outcome);
                    self.inner
                        .step(|tested, cx| _ = tested.answered(&answer, cx));
                    self.evicted.push(pod.name.to_string());
                    continue;
                }
                other => panic!("{other:?}"),
            });
            self.put(node.clone());
            let outcome = RequestOutcome::Node(node);
            let answer = RequestAnswer::to_write(&purpose, &outcome);
            self.inner
                .step(|tested, cx| _ = tested.answered(&answer, cx));
        }
        writes
    }

    fn put(&mut self, node: Node) {
        self.inner.cache.nodes.change(ObjectEvent::Applied(node));
    }

    fn marks(&self) -> (bool, bool) {
        (self.node().exhausted.is_some(), has_taint(self.node()))
    }
}

#[test]
fn a_pod_counts_from_the_moment_when_it_is_bound() {
    for (pods, marks) in [
        (vec![], (false, false)),
        (vec![bound("x", &[])], (true, true)),
        (vec![bound("x", &["10.0.0.2"])], (true, true)),
    ] {
        let count = pods.len();
        let mut fixture = Fixture::new(pool_of(BLOCK, tainting), pods);
        let writes = fixture.settle();
        assert_eq!(fixture.marks(), marks, "{count} pods: {writes:?}");
        assert!(fixture.settle().is_empty(), "nothing is written again");
    }
}

#[test]
fn a_pod_that_names_a_pool_needs_no_address_of_the_others() {
    let named = Pod {
        needs_default: false,
        ..bound("x", &[])
    };
    let mut fixture = Fixture::new(pool_of(BLOCK, tainting), vec![named]);
    fixture.settle();
    assert_eq!(fixture.marks(), (false, false));
}

#[test]
fn a_node_is_not_exhausted_while_a_pool_can_give_it_a_range() {
    let wide = "10.0.0.0/24";
    let full = vec![bound("x", &["10.0.0.2"])];
    let mut fixture = Fixture::new(pool_of(wide, tainting), full.clone());
    fixture.settle();
    assert_eq!(fixture.marks(), (false, false));
    let limited = pool_of(wide, |spec| {
        spec.max_blocks_per_node = Some(1);
        tainting(spec);
    });
    let mut fixture = Fixture::new(limited, full);
    fixture.settle();
    assert_eq!(fixture.marks(), (true, true), "the node may have one block");
}

#[test]
fn the_pool_says_whether_the_node_gets_a_taint() {
    let full = vec![bound("x", &["10.0.0.2"])];
    let mut fixture = Fixture::new(pool_of(BLOCK, |_| {}), full);
    assert_eq!(fixture.settle(), ["condition"]);
    let text = fixture.node().exhausted.clone().unwrap();
    assert_eq!(
        &*text,
        r#"the node has no free address for another pod, and cannot get more addresses: kubectl get ippools.cadastre.dev (pools: "p"). Add ranges to a pool, or delete pods"#
    );
}

#[test]
fn the_taints_of_others_stay() {
    let full = vec![bound("x", &["10.0.0.2"])];
    let mut fixture = Fixture::new(pool_of(BLOCK, tainting), full);
    let other = NodeTaint {
        effect: "NoExecute".into(),
        ..NodeTaint::exhausted()
    };
    let tainted = Node {
        version: 2,
        taints: [other.clone()].into(),
        ..node("a")
    };
    fixture.put(tainted);
    assert_eq!(fixture.settle(), ["taints", "condition"]);
    assert_eq!(*fixture.node().taints, [other, NodeTaint::exhausted()]);
}

#[test]
fn the_marks_stay_for_a_while_after_an_address_has_become_free() {
    let user = bound("x", &["10.0.0.2"]);
    let mut fixture = Fixture::new(pool_of(BLOCK, tainting), vec![user.clone()]);
    fixture.settle();
    fixture.inner.cache.pods.change(ObjectEvent::Deleted(user));
    for second in [100, 109] {
        fixture.inner.now = at(second);
        assert!(fixture.settle().is_empty(), "{second}");
    }
    fixture.inner.now = at(110);
    assert_eq!(fixture.settle(), ["taints", "condition"]);
    assert_eq!(fixture.marks(), (false, false));
    assert_eq!(fixture.inner.tested.count(), 0);
}

#[test]
fn a_podcidr_counts_whoever_has_allocated_it() {
    let mut fixture = Fixture::new(
        pool_with("p", "10.1.0.0/16", |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
        }),
        vec![bound("x", &[])],
    );
    for (range, is_exhausted) in [("172.20.0.0/29", false), ("172.20.0.0/30", true)] {
        let version = fixture.node().version + 1;
        fixture.put(Node {
            version,
            ..node_with("a", &[range])
        });
        fixture.settle();
        assert_eq!(fixture.marks().0, is_exhausted, "{range}");
        assert_eq!(cidr(range), fixture.node().pod_cidrs[0]);
    }
}

#[test]
fn a_node_that_is_about_to_get_the_last_range_is_not_exhausted() {
    let last = "10.1.0.0/24";
    for (of, is_exhausted) in [("a", false), ("b", true)] {
        let pool = pool_with("p", last, |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
        });
        let mut fixture = Fixture::new(pool, vec![bound("x", &[])]);
        let allocations = &mut fixture.inner.allocations;
        let holder = allocations.holder(&of.into(), &of.into());
        let state = HoldingState::InFlight;
        allocations.ledger.record(holder, cidr(last), state);
        fixture.settle();
        assert_eq!(fixture.marks().0, is_exhausted, "{of} gets {last}");
    }
}

#[test]
fn pods_for_which_the_node_has_no_address_are_evicted_the_newest_first() {
    let waiting = |name: &str, created: i64| Pod {
        replaceable: Some(created),
        ..bound(name, &[])
    };
    let start = at(0).wall.as_second();
    let pods = vec![
        waiting("old", start - 60),
        waiting("newer", start - 50),
        waiting("newest", start - 40),
        Pod {
            replaceable: None,
            ..waiting("of-no-controller", start - 30)
        },
        bound("served", &["10.0.0.2"]),
    ];
    let of = |pods: Vec<Pod>, evicts: bool| {
        let mut fixture = Fixture::new(pool_of(BLOCK, tainting), pods);
        fixture.inner.tested = Exhaustion::new(evicts);
        fixture.settle();
        fixture
    };
    assert!(
        of(pods.clone(), false).evicted.is_empty(),
        "nobody wants it"
    );
    let mut fixture = of(pods.clone(), true);
    assert_eq!(
        fixture.evicted,
        ["default/newest"],
        "the next one waits for the watch"
    );
    for pod in pods.into_iter().skip(1).take(2).rev() {
        fixture.inner.cache.pods.change(ObjectEvent::Deleted(pod));
        fixture.settle();
    }
    let all = ["default/newest", "default/newer", "default/old"];
    assert_eq!(fixture.evicted, all);
    // A pod whose eviction is refused for good, and a pod that is too new, do not delay the eviction of another one.
    let mut fixture = of(vec![bound("served", &["10.0.0.2"])], true);
    fixture.refused = Some("default/newer");
    let young = waiting("young", start - 1);
    for pod in [
        waiting("old", start - 60),
        waiting("newer", start - 50),
        young,
    ] {
        fixture.inner.cache.pods.change(ObjectEvent::Applied(pod));
    }
    fixture.settle();
    assert_eq!(fixture.evicted, ["default/newer", "default/old"]);
    // The node may get an address for a pod soon, so a new pod stays for a while.
    let fixture = of(
        vec![bound("served", &["10.0.0.2"]), waiting("new", start - 9)],
        true,
    );
    assert!(fixture.evicted.is_empty());
    // There is one address for one of the pods.
    let two = vec![waiting("first", start - 60), waiting("second", start - 50)];
    let mut fixture = of(two.clone(), true);
    fixture
        .inner
        .cache
        .pods
        .change(ObjectEvent::Deleted(two[1].clone()));
    fixture.settle();
    assert_eq!(fixture.evicted, ["default/second"]);
}
