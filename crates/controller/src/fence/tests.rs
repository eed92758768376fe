use super::*;
use crate::allocations::AllocationState;
use crate::cluster::objects::Owner;
use crate::fixtures::{NOW, at, block, cluster, in_step, list, node, node_with, subnet};
use cadastre_daemon::watch::ObjectEvent;

/// Returns a cluster with these nodes. The first lists of all kinds are complete, and were requested at second 0.
fn cache(nodes: Vec<Node>) -> ClusterCache {
    let mut cache = cluster(Vec::new(), nodes);
    list(&mut cache.subnets, Vec::new());
    list(&mut cache.blocks, Vec::new());
    list(&mut cache.claims, Vec::new());
    list(&mut cache.services, Vec::new());
    cache.pods.change(ObjectEvent::Listed);
    cache
}

/// Returns the fence of a term that began in this way at `second`. The Lease names no writes.
fn fence(takeover: Takeover, second: u64) -> Fence {
    Fence::new(&LeadershipTerm::of("2-b", takeover), at(second).mono)
}

/// Returns the requests that the fence wants to send now, but at most 9, because no test expects more.
fn requests(fence: &mut Fence, cache: &ClusterCache, now: Now) -> Vec<ApiRequest> {
    let next = || fence.next_urgent(cache, now).map(|(request, _)| request);
    std::iter::from_fn(next).take(9).collect()
}

/// Passes the answer to a list or a touch to the fence. `applied` says whether the cache has applied the list.
fn answer(fence: &mut Fence, purpose: &Purpose, outcome: &RequestOutcome, applied: bool, now: Now) {
    let answer = RequestAnswer {
        applied,
        ..RequestAnswer::to_write(purpose, outcome)
    };
    let cache = cache(Vec::new());
    in_step(&cache, &mut AllocationState::default(), now, |cx| {
        fence.answered(&answer, cx)
    });
}

const KINDS: [ObjectKind; 4] = [
    ObjectKind::Node,
    ObjectKind::Subnet,
    ObjectKind::Block,
    ObjectKind::Claim,
];

#[test]
fn only_a_first_start_without_nodesubnets_and_blocks_lists_nothing() {
    let all = KINDS.map(ApiRequest::List);
    for (takeover, subnets, blocks, lists) in [
        (Takeover::First, false, false, false),
        (Takeover::First, true, false, true),
        (Takeover::First, false, true, true),
        (Takeover::Clean, false, false, true),
        (Takeover::Unclean, false, false, true),
    ] {
        let mut cache = cache(Vec::new());
        if subnets {
            list(&mut cache.subnets, vec![subnet("n", &[], 0)]);
        }
        if blocks {
            let owner = Owner::node(&"n".into(), &"n".into());
            list(&mut cache.blocks, vec![block("10.0.0.0/28", owner)]);
        }
        let mut fence = fence(takeover, 1);
        let case = format!("{takeover:?}, NodeSubnets: {subnets}, blocks: {blocks}");
        let expected: &[ApiRequest] = if lists { &all } else { &[] };
        assert_eq!(requests(&mut fence, &cache, at(1)), expected, "{case}");
        assert_eq!(fence.is_listed(), !lists, "{case}");
        assert_eq!(fence.is_done(), !lists, "{case}");
    }
}

#[test]
fn a_list_that_the_cache_has_not_applied_is_requested_again_after_a_pause() {
    let mut fence = fence(Takeover::Clean, 1);
    let cache = cache(Vec::new());
    assert_eq!(requests(&mut fence, &cache, at(1)).len(), KINDS.len());
    let list_of_nodes = Purpose::Relist(ObjectKind::Node);
    let nodes = RequestOutcome::Nodes(Vec::new());
    for kind in KINDS {
        let applied = kind != ObjectKind::Node;
        answer(&mut fence, &Purpose::Relist(kind), &nodes, applied, at(1));
    }
    assert_eq!(requests(&mut fence, &cache, at(1)), []);
    let again = fence.load().next_at.unwrap();
    assert!(again > at(1).mono, "{again:?}");
    assert!(!fence.is_listed());
    let later = Now { mono: again, ..NOW };
    let lists = requests(&mut fence, &cache, later);
    assert_eq!(lists, [ApiRequest::List(ObjectKind::Node)]);
    answer(&mut fence, &list_of_nodes, &nodes, true, later);
    assert!(fence.is_listed() && fence.is_done());
}

/// Returns the purpose of a touch of the node with this name. Its UID equals its name.
fn touch(name: &str) -> Purpose {
    Purpose::Touch {
        name: name.into(),
        uid: name.into(),
    }
}

#[test]
fn a_touch_that_failed_three_times_in_a_row_counts_as_one_that_keeps_failing() {
    let nodes = ["a", "b"].map(node);
    let served = node_with("served", &["10.0.0.0/28"]);
    let cache = cache(nodes.into_iter().chain([served]).collect());
    // The lists of the watches were requested after the Lease was won, so nothing has to be listed.
    let mut fence = fence(Takeover::Unclean, 0);
    assert_eq!(requests(&mut fence, &cache, at(0)).len(), 2);
    assert_eq!(fence.left(), (2, 0));
    for (second, left) in [(0, (2, 0)), (10, (2, 0)), (20, (2, 1)), (30, (2, 1))] {
        let rejected = RequestOutcome::Rejected(Rejection::Rejected("policy".to_owned()));
        answer(&mut fence, &touch("a"), &rejected, false, at(second));
        assert_eq!(fence.left(), left, "{second}");
        let again = requests(&mut fence, &cache, at(second + 10));
        assert!(
            matches!(&again[..], [ApiRequest::TouchNode(it)] if &*it.name == "a"),
            "{again:?}"
        );
    }
    for (name, left) in [("b", (1, 1)), ("a", (0, 0))] {
        let touched = RequestOutcome::Node(Node {
            term: Some("2-b".into()),
            ..node(name)
        });
        answer(&mut fence, &touch(name), &touched, false, at(40));
        assert_eq!(fence.left(), left, "{name}");
    }
    assert!(fence.is_done());
}

#[test]
fn nodes_without_podcidrs_are_touched_even_if_they_are_being_deleted() {
    let deleting = Node {
        deleting: true,
        ..node("deleting")
    };
    let cache = cache(vec![deleting, node("a"), node_with("b", &["10.0.0.0/28"])]);
    let requests = requests(&mut fence(Takeover::Unclean, 0), &cache, at(0));
    let touched = requests.iter().map(|request| match request {
        ApiRequest::TouchNode(touch) => &*touch.name,
        _ => panic!("{request:?}"),
    });
    assert_eq!(touched.collect::<Vec<_>>(), ["a", "deleting"]);
}

/// A node is done once no write that an earlier leader decided can give it podCIDRs any more.
#[test]
fn a_node_is_touched_again_until_an_answer_shows_that_no_earlier_write_can_succeed() {
    #[derive(Debug, PartialEq)]
    enum Then {
        Done,
        Touch,
        Read,
    }
    let of_term = |term: &str| Node {
        term: Some(term.into()),
        ..node("a")
    };
    let another = Node {
        uid: "another".into(),
        ..node("a")
    };
    let rejected = RequestOutcome::Rejected;
    for (outcome, expected) in [
        (RequestOutcome::Node(of_term("2-b")), Then::Done),
        (RequestOutcome::Node(of_term("1-a")), Then::Touch),
        (
            RequestOutcome::Node(node_with("a", &["10.0.0.0/28"])),
            Then::Done,
        ),
        (RequestOutcome::Node(another), Then::Done),
        (rejected(Rejection::Missing), Then::Done),
        (rejected(Rejection::Busy(None)), Then::Touch),
        (
            rejected(Rejection::Rejected("policy".to_owned())),
            Then::Touch,
        ),
        (rejected(Rejection::Guard("term".to_owned())), Then::Read),
        (RequestOutcome::Indeterminate("lost".to_owned()), Then::Read),
    ] {
        let cache = cache(vec![node("a")]);
        let mut fence = fence(Takeover::Unclean, 0);
        assert_eq!(requests(&mut fence, &cache, at(0)).len(), 1);
        answer(&mut fence, &touch("a"), &outcome, false, at(0));
        let then = match requests(&mut fence, &cache, at(1)).as_slice() {
            [] => Then::Done,
            [ApiRequest::TouchNode(_)] => Then::Touch,
            [ApiRequest::Read(ObjectKind::Node, _)] => Then::Read,
            others => panic!("{others:?}"),
        };
        assert_eq!(fence.is_done(), then == Then::Done, "{outcome:?}");
        assert_eq!(then, expected, "{outcome:?}");
    }
}
