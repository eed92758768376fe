use super::*;
use crate::Now;
use crate::cluster::objects::{MachineIdentity, Pool, ServiceRange};
use crate::fixtures::{
    NOW, at, cidr, cluster, in_step, ipv6_ranges, list, node, node_with, pod, pool_with, rebuilt,
    reported,
};
use crate::intents::IntentBook;
use cadastre_api::{IPPoolSpec, NodeAssignment};
use cadastre_daemon::watch::ObjectEvent;

/// Builds a cluster with these nodes and a pool in mode NodeCIDR, which allocates /28 ranges.
fn cache(range: &str, nodes: Vec<Node>) -> ClusterCache {
    let pool = pool_with("p", range, |spec| {
        spec.allocation_mode = AllocationMode::NodeCIDR;
    });
    cluster(vec![pool], nodes)
}

/// Returns the ranges that the node gets, or `None` if it gets none now.
fn allocated(name: &str, podcidrs: &mut PodCidrs, cx: &mut Context) -> Option<Vec<Cidr>> {
    podcidrs.queue.add(name.into());
    let (request, _) = podcidrs.next_urgent(cx, false)?;
    let ApiRequest::AssignPodCidrs(assignment) = request else {
        panic!("{request:?}");
    };
    assert_eq!(&*assignment.name, name);
    Some(assignment.cidrs)
}

/// Returns the ranges that node `a` gets from a new leader.
fn allocated_to_a(cache: &ClusterCache, allocations: &mut AllocationState) -> Option<Vec<Cidr>> {
    in_step(cache, allocations, NOW, |cx| {
        allocated("a", &mut PodCidrs::default(), cx)
    })
}

#[test]
fn a_range_is_not_free_after_an_indeterminate_write() {
    let cache = cache("10.0.0.0/28", vec![node("a"), node("b")]);
    let mut allocations = rebuilt(&cache);
    let mut podcidrs = PodCidrs::default();
    in_step(&cache, &mut allocations, NOW, |cx| {
        assert!(allocated("a", &mut podcidrs, cx).is_some());
        let (name, uid) = ("a".into(), "a".into());
        let purpose = Purpose::Assign { name, uid };
        let lost = RequestOutcome::Indeterminate("no answer".to_owned());
        podcidrs.answered(&RequestAnswer::to_write(&purpose, &lost), cx);
        let read = podcidrs.next_urgent(cx, false).map(|(request, _)| request);
        assert!(matches!(read, Some(ApiRequest::Read(ObjectKind::Node, name)) if &*name == "a"));
        assert_eq!(allocated("b", &mut podcidrs, cx), None);
    });
    assert_eq!(allocations.indeterminate(), 1);
}

#[test]
fn a_range_with_an_address_in_use_is_not_allocated() {
    let mut cache = cache("10.0.0.0/27", vec![node("a")]);
    let pod = pod(1, &["10.0.0.20"]);
    cache.pods.change(ObjectEvent::Applied(pod));
    let cidrs = allocated_to_a(&cache, &mut rebuilt(&cache));
    assert_eq!(cidrs, Some(vec![cidr("10.0.0.0/28")]));
}

/// Returns the Node `a` with this UID, which always runs on the same machine.
fn machine(uid: &str, ranges: &[&str]) -> Node {
    Node {
        uid: uid.into(),
        machine: MachineIdentity {
            provider_id: None,
            machine_id: Some("m".into()),
        },
        ..node_with("a", ranges)
    }
}

#[test]
fn a_machine_gets_its_ranges_back_unless_another_node_holds_some_of_them() {
    let had = "10.0.0.0/28";
    for (theirs, gets) in [("10.1.0.0/28", had), (had, "10.0.0.16/28")] {
        let nodes = vec![machine("new", &[]), node_with("x", &[theirs])];
        let cache = cache("10.0.0.0/27", nodes);
        let mut allocations = rebuilt(&cache);
        let old = machine("old", &[had]);
        allocations.sync(&old, None);
        allocations.quarantine(&old, NOW);
        let cidrs = allocated_to_a(&cache, &mut allocations);
        assert_eq!(cidrs, Some(vec![cidr(gets)]), "beside {theirs}");
    }
}

/// Builds a cluster like [`cache`], whose pool assigns ranges to nodes.
fn assigning(range: &str, assigned: &[(&str, &str)], nodes: Vec<Node>) -> ClusterCache {
    let entries = assigned.iter().map(|(node, cidr)| NodeAssignment {
        node: node.to_string(),
        cidrs: vec![cidr.to_string()],
    });
    let pool = pool_with("p", range, |spec| {
        spec.allocation_mode = AllocationMode::NodeCIDR;
        spec.assignments = entries.collect();
    });
    cluster(vec![pool], nodes)
}

#[test]
fn assigned_ranges_are_for_their_node_only() {
    let assigned = [("a", "10.0.0.16/28"), ("gone", "10.0.0.32/29")];
    let nodes = ["a", "b", "c", "d"].map(node);
    let cache = assigning("10.0.0.0/26", &assigned, nodes.into());
    let mut podcidrs = PodCidrs::default();
    let gets = in_step(&cache, &mut rebuilt(&cache), NOW, |cx| {
        ["b", "c", "d", "a"].map(|name| allocated(name, &mut podcidrs, cx))
    });
    let one = |text: &str| Some(vec![cidr(text)]);
    let expected = [
        one("10.0.0.48/28"),
        one("10.0.0.0/28"),
        None,
        one("10.0.0.16/28"),
    ];
    assert_eq!(gets, expected);
}

#[test]
fn a_node_waits_for_its_assigned_range_and_gets_no_other() {
    use AssignmentObstacle::{Held, InUse, Quarantined, Unusable};
    let of_pod = |address: &str| pod(1, &[address]);
    for (range, others, obstacle) in [
        (
            "10.0.0.16/28",
            vec![node_with("x", &["10.0.0.24/29"])],
            Some(Held),
        ),
        ("10.0.1.16/28", Vec::new(), Some(Unusable)),
        ("10.0.0.32/28", Vec::new(), Some(InUse)),
        ("10.0.0.0/29", vec![node_with("x", &["10.0.0.16/28"])], None),
        ("10.0.0.48/28", Vec::new(), Some(Quarantined)),
    ] {
        let nodes = others.into_iter().chain([node("a")]).collect();
        let mut cache = assigning("10.0.0.0/24", &[("a", range)], nodes);
        cache.pods.change(ObjectEvent::Applied(of_pod("10.0.0.40")));
        let mut allocations = rebuilt(&cache);
        let old = node_with("old", &["10.0.0.48/28"]);
        allocations.sync(&old, None);
        allocations.quarantine(&old, NOW);
        let mut podcidrs = PodCidrs::default();
        let (gets, events) = reported(&cache, &mut allocations, NOW, |cx| {
            let gets = allocated("a", &mut podcidrs, cx);
            let again = obstacle.and_then(|_| allocated("a", &mut podcidrs, cx));
            gets.or(again)
        });
        let waits = podcidrs.waiting().next().cloned();
        let expected = obstacle.map(|obstacle| WaitReason::Assigned {
            pools: vec!["p".into()],
            obstacle,
        });
        assert_eq!(waits, expected, "{range}");
        assert_eq!(gets.is_some(), obstacle.is_none(), "{range}");
        assert_eq!(
            events.len(),
            usize::from(obstacle.is_some()),
            "{range}: once"
        );
    }
}

#[test]
fn a_node_that_waits_for_its_assigned_range_gets_it_once_it_is_free() {
    let assigned = [("a", "10.0.0.0/28")];
    let nodes = vec![node("a"), node_with("x", &["10.0.0.0/24"])];
    let held = assigning("10.0.0.0/24", &assigned, nodes);
    let free = assigning("10.0.0.0/24", &assigned, vec![node("a")]);
    let mut podcidrs = PodCidrs::default();
    let gets = in_step(&held, &mut rebuilt(&held), NOW, |cx| {
        allocated("a", &mut podcidrs, cx)
    });
    assert_eq!(gets, None);
    podcidrs.requeue();
    let next = in_step(&free, &mut rebuilt(&free), NOW, |cx| {
        podcidrs.next_urgent(cx, false)
    });
    assert!(
        matches!(next, Some((ApiRequest::AssignPodCidrs(it), _)) if it.cidrs == [cidr("10.0.0.0/28")])
    );
}

#[test]
fn a_node_with_an_assignment_gets_nothing_from_another_pool() {
    for (disabled, deleting, gets) in [
        (false, false, Some("10.0.0.0/28")),
        (true, false, None),
        (false, true, Some("10.1.0.240/28")),
    ] {
        let other = pool_with("better", "10.1.0.0/24", |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
            spec.priority = 9;
        });
        let first = assigning("10.0.0.0/24", &[("a", "10.0.0.0/28")], Vec::new());
        let mut pool = Clone::clone(&**first.pools.get("p").unwrap());
        pool.spec.as_mut().unwrap().disabled = disabled;
        pool.deleting = deleting;
        let cache = cluster(vec![pool, other], vec![node("a")]);
        let cidrs = allocated_to_a(&cache, &mut rebuilt(&cache));
        assert_eq!(
            cidrs,
            gets.map(|it| vec![cidr(it)]),
            "{disabled} {deleting}"
        );
    }
}

#[test]
fn a_machine_gets_its_ranges_back_only_if_they_are_assigned_to_nobody_else() {
    let had = "10.0.0.0/28";
    for (assigned, gets) in [
        (("x", "10.0.0.0/29"), Some("10.0.0.240/28")),
        (("a", had), Some(had)),
        (("a", "10.0.0.0/27"), None),
        (("a", "10.0.0.32/28"), Some("10.0.0.32/28")),
    ] {
        let cache = assigning("10.0.0.0/24", &[assigned], vec![machine("new", &[])]);
        let mut allocations = rebuilt(&cache);
        let old = machine("old", &[had]);
        allocations.sync(&old, None);
        allocations.quarantine(&old, NOW);
        let cidrs = allocated_to_a(&cache, &mut allocations);
        assert_eq!(cidrs, gets.map(|it| vec![cidr(it)]), "{assigned:?}");
    }
}

#[test]
fn with_fit_max_pods_the_size_follows_from_the_node_which_waits_until_it_is_known() {
    let of_pods = |name: &str, max_pods: u16| Node {
        max_pods,
        ..node(name)
    };
    let pool = pool_with("p", "10.0.0.0/24", |spec| {
        spec.allocation_mode = AllocationMode::NodeCIDR;
        spec.ipv4.as_mut().unwrap().block_sizing = BlockSizing::FitMaxPods;
    });
    let nodes = vec![
        of_pods("new", 0),
        of_pods("small", 5),
        of_pods("large", 128),
        of_pods("medium", 60),
    ];
    let mut cache = cluster(vec![pool], nodes);
    let mut allocations = rebuilt(&cache);
    let mut podcidrs = PodCidrs::default();
    let names = ["new", "new", "small", "large", "medium"];
    let (gets, events) = reported(&cache, &mut allocations, NOW, |cx| {
        names.map(|name| allocated(name, &mut podcidrs, cx))
    });
    let one = |text: &str| Some(vec![cidr(text)]);
    let expected = [None, None, one("10.0.0.240/28"), None, one("10.0.0.0/25")];
    assert_eq!(
        gets, expected,
        "a full pool is full for ranges of one size only"
    );
    assert_eq!(events, [WAITING, WAITING], "once for each node");
    let mut labels: Vec<_> = podcidrs.waiting().map(WaitReason::label).collect();
    labels.sort_unstable();
    assert_eq!(labels, ["max_pods_unknown", "pool_full"]);
    let known = Node {
        version: 2,
        ..of_pods("new", 16)
    };
    cache.nodes.change(ObjectEvent::Applied(known));
    let gets = in_step(&cache, &mut allocations, NOW, |cx| {
        allocated("new", &mut podcidrs, cx)
    });
    assert_eq!(gets, one("10.0.0.192/27"));
}

#[test]
fn the_first_podcidr_is_of_the_clusters_primary_family() {
    let (v4, v6) = ("10.9.0.0/28", "fd00:9::/124");
    let (services_v4, services_v6) = ("10.8.0.0/16", "fd00:1::/112");
    // The flag for the service range, the range of the ServiceCIDR, the podCIDRs of another node, and the expected
    // family.
    for (flag, service_range, before, first) in [
        (None, &[][..], &[][..], Family::V4),
        (Some(services_v6), &[], &[], Family::V6),
        (
            Some(services_v4),
            &[services_v6, services_v4],
            &[],
            Family::V6,
        ),
        (None, &[services_v4, services_v6], &[v6, v4], Family::V4),
        (None, &[], &[v6, v4], Family::V6),
        (None, &[], &[v6, "fd00:9::10/124"], Family::V4),
    ] {
        let pool = pool_with("p", "10.0.0.0/24", |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
            spec.ipv6 = Some(ipv6_ranges("fd00::/64", 124));
        });
        let mut nodes = vec![node("a")];
        nodes.extend((!before.is_empty()).then(|| node_with("z", before)));
        let mut cache = cluster(vec![pool], nodes);
        let services = (!service_range.is_empty()).then(|| ServiceRange {
            name: "kubernetes".into(),
            uid: "s".into(),
            version: 1,
            cidrs: service_range.iter().map(|text| cidr(text)).collect(),
        });
        list(&mut cache.services, services.into_iter().collect());
        let flags: Vec<Cidr> = flag.map(cidr).into_iter().collect();
        let (mut allocations, _) = AllocationState::rebuild(&cache, &flags, NOW);
        let cidrs = allocated_to_a(&cache, &mut allocations).unwrap();
        let families: Vec<Family> = cidrs.iter().map(Cidr::family).collect();
        let case = format!("{flag:?} {service_range:?} {before:?}");
        assert_eq!((families.len(), families[0]), (2, first), "{case}");
    }
}

/// Passes to the loop the answer to a write of the podCIDRs of node `a`, whose UID was `uid`.
fn answer(podcidrs: &mut PodCidrs, uid: &str, outcome: &RequestOutcome, cx: &mut Context) {
    let (name, uid) = ("a".into(), uid.into());
    let purpose = Purpose::Assign { name, uid };
    podcidrs.answered(&RequestAnswer::to_write(&purpose, outcome), cx);
}

#[test]
fn a_node_gets_podcidrs_only_if_it_has_none_stays_and_no_request_is_in_flight() {
    let deleting = Node {
        deleting: true,
        ..node("deleting")
    };
    let nodes = vec![deleting, node_with("has", &["10.1.0.0/28"]), node("a")];
    let cache = cache("10.0.0.0/24", nodes);
    let mut podcidrs = PodCidrs::default();
    in_step(&cache, &mut rebuilt(&cache), NOW, |cx| {
        let gets = ["deleting", "has", "a", "a"];
        let gets = gets.map(|name| allocated(name, &mut podcidrs, cx).is_some());
        assert_eq!(gets, [false, false, true, false]);
    });
}

#[test]
fn a_loop_that_stops_starts_no_allocation_and_still_reads_nodes_of_unknown_state() {
    let cache = cache("10.0.0.0/24", vec![node("a")]);
    let mut podcidrs = PodCidrs::default();
    in_step(&cache, &mut rebuilt(&cache), NOW, |cx| {
        podcidrs.queue.add("a".into());
        assert!(podcidrs.load().ready == 1 && podcidrs.next_urgent(cx, true).is_none());
        assert!(allocated("a", &mut podcidrs, cx).is_some());
        let conflict = RequestOutcome::Rejected(Rejection::Guard("term".to_owned()));
        answer(&mut podcidrs, "a", &conflict, cx);
        let read = podcidrs.next_urgent(cx, true).map(|(request, _)| request);
        assert!(
            matches!(read, Some(ApiRequest::Read(ObjectKind::Node, _))),
            "{read:?}"
        );
    });
}

#[test]
fn an_answer_about_an_earlier_node_of_the_name_changes_nothing() {
    let cache = cache("10.0.0.0/24", vec![node("a")]);
    let mut podcidrs = PodCidrs::default();
    in_step(&cache, &mut rebuilt(&cache), NOW, |cx| {
        let lost = RequestOutcome::Indeterminate("lost".to_owned());
        answer(&mut podcidrs, "earlier", &lost, cx);
        assert_eq!(podcidrs.load().ready, 0);
        assert!(
            allocated("a", &mut podcidrs, cx).is_some(),
            "it is not read first"
        );
    });
}

#[test]
fn the_lease_names_an_allocation_until_an_answer_proves_that_it_has_no_effect() {
    let rejected = |why: fn(String) -> Rejection| RequestOutcome::Rejected(why(String::new()));
    let lost = || RequestOutcome::Indeterminate(String::new());
    let another = Node {
        uid: "another".into(),
        ..node("a")
    };
    let allocated_now = node_with("a", &["10.0.0.240/28"]);
    // The answers to the same write, how many ranges are indeterminate afterwards, and whether the Lease names the
    // write.
    for (answers, indeterminate, is_named) in [
        (vec![RequestOutcome::Node(allocated_now)], 0, true),
        (vec![RequestOutcome::Node(another)], 1, true),
        (vec![rejected(Rejection::Guard)], 0, true),
        (vec![rejected(Rejection::Rejected)], 0, false),
        (vec![lost()], 1, true),
        (vec![lost(), rejected(Rejection::Rejected)], 1, true),
    ] {
        let cache = cache("10.0.0.0/24", vec![node("a")]);
        let mut allocations = rebuilt(&cache);
        allocations.intents = IntentBook::of_leader(true);
        let mut podcidrs = PodCidrs::default();
        let take = |allocations: &mut AllocationState| {
            allocations.intents.take(&"1-a".into(), cache.versions())
        };
        in_step(&cache, &mut allocations, NOW, |cx| {
            assert_eq!(allocated("a", &mut podcidrs, cx), None, "not named yet");
        });
        let named = take(&mut allocations).unwrap();
        allocations.intents.confirmed(named.number);
        in_step(&cache, &mut allocations, NOW, |cx| {
            assert!(allocated("a", &mut podcidrs, cx).is_some());
            for outcome in &answers {
                answer(&mut podcidrs, "a", outcome, cx);
            }
        });
        assert_eq!(allocations.indeterminate(), indeterminate, "{answers:?}");
        allocations.intents.want_write();
        let intents = take(&mut allocations).unwrap().intents.unwrap();
        assert_eq!(!intents.assignments.is_empty(), is_named, "{answers:?}");
    }
}

#[test]
fn a_wait_is_reported_once_and_its_end_only_if_its_begin_was() {
    let free = || cache("10.0.0.0/24", vec![node("a")]);
    let full = || {
        cache(
            "10.0.0.0/28",
            vec![node("a"), node_with("x", &["10.0.0.0/28"])],
        )
    };
    let with = |change: fn(&mut Pool)| {
        let mut pool = Pool::clone(free().pools.get("p").unwrap());
        change(&mut pool);
        cluster(vec![pool], vec![node("a")])
    };
    // A pool without the finalizer is about to allocate.
    let starting = || with(|pool| pool.finalizers.clear());
    let disabled = || with(|pool| pool.spec.as_mut().unwrap().disabled = true);
    let without_pool = || cluster(Vec::new(), vec![node("a")]);
    for (clusters, labels, events) in [
        (
            vec![full(), full()],
            ["pool_full"; 2],
            &[WAITING, POD_CIDR_ALLOCATED][..],
        ),
        (
            vec![full(), starting()],
            ["pool_full", "pool_not_ready"],
            &[WAITING, POD_CIDR_ALLOCATED],
        ),
        (
            vec![disabled(), disabled()],
            ["pool_not_ready"; 2],
            &[WAITING, POD_CIDR_ALLOCATED],
        ),
        (vec![starting(), starting()], ["pool_not_ready"; 2], &[]),
        (vec![without_pool(), without_pool()], ["no_pool"; 2], &[]),
    ] {
        let mut podcidrs = PodCidrs::default();
        let mut reasons = Vec::new();
        for (cache, label) in clusters.iter().zip(labels) {
            let before = podcidrs.waiting().next().cloned();
            podcidrs.requeue();
            let (gets, events) = reported(cache, &mut rebuilt(cache), NOW, |cx| {
                allocated("a", &mut podcidrs, cx)
            });
            assert_eq!(gets, None);
            reasons.extend(events);
            let now = podcidrs.waiting().next().cloned();
            let reason = now.clone().unwrap();
            assert_eq!(reason.label(), label);
            let pools: &[PoolName] = if label == "no_pool" {
                &[]
            } else {
                &["p".into()]
            };
            assert_eq!(reason.pools(), pools);
            assert_eq!(podcidrs.take_recount(), before != now, "{label}");
            assert!(!podcidrs.take_recount());
        }
        // The node gets podCIDRs. It is handled again before the watch delivers them.
        let cache = free();
        let mut more = Vec::new();
        podcidrs.requeue();
        in_step(&cache, &mut rebuilt(&cache), NOW, |cx| {
            assert!(allocated("a", &mut podcidrs, cx).is_some());
            assert!(allocated("a", &mut podcidrs, cx).is_none());
        });
        let has_some = node_with("a", &["10.0.0.0/28"]);
        podcidrs.served(&has_some, &mut more);
        podcidrs.served(&has_some, &mut more);
        reasons.extend(more.iter().map(|it| it.reason));
        assert_eq!(reasons, events, "{labels:?}");
        assert_eq!(podcidrs.waiting().count(), 0);
    }
}

#[test]
fn a_wait_ends_with_the_node_that_waits() {
    let waits = || {
        let cache = cache(
            "10.0.0.0/28",
            vec![node("a"), node_with("x", &["10.0.0.0/28"])],
        );
        let mut podcidrs = PodCidrs::default();
        in_step(&cache, &mut rebuilt(&cache), NOW, |cx| {
            assert_eq!(allocated("a", &mut podcidrs, cx), None);
        });
        let waiting = podcidrs.waiting_nodes().map(|(name, _)| &**name);
        assert!(waiting.eq(["a"]));
        assert!(podcidrs.take_recount());
        podcidrs
    };
    let earlier = Node {
        uid: "earlier".into(),
        ..node("a")
    };
    let mut podcidrs = waits();
    podcidrs.gone(&earlier);
    assert_eq!(
        podcidrs.waiting().count(),
        1,
        "an earlier node of the name is gone"
    );
    podcidrs.gone(&node("a"));
    assert_eq!(podcidrs.waiting().count(), 0);
    let mut podcidrs = waits();
    let mut reports = Vec::new();
    podcidrs.served(&earlier, &mut reports);
    assert!(reports.is_empty(), "{reports:?}");
    let deleting = Node {
        deleting: true,
        ..node("a")
    };
    for nodes in [vec![deleting], Vec::new()] {
        let cache = cache("10.0.0.0/28", nodes);
        let mut podcidrs = waits();
        in_step(&cache, &mut rebuilt(&cache), NOW, |cx| {
            assert_eq!(allocated("a", &mut podcidrs, cx), None);
        });
        assert!(podcidrs.take_recount() && podcidrs.waiting().count() == 0);
    }
}

#[test]
fn the_time_in_which_no_pool_selects_a_node_is_no_part_of_its_wait() {
    let nodes = || vec![node("a"), node_with("x", &["10.0.0.0/28"])];
    let without_pool = cluster(Vec::new(), nodes());
    let full = cache("10.0.0.0/28", nodes());
    let mut podcidrs = PodCidrs::default();
    let since = [(1, &without_pool), (11, &full), (21, &full)].map(|(second, cache)| {
        in_step(cache, &mut rebuilt(cache), at(second), |cx| {
            assert_eq!(allocated("a", &mut podcidrs, cx), None);
        });
        podcidrs.waiting_since()
    });
    assert_eq!(since, [None, Some(at(11).mono), Some(at(11).mono)]);
}

#[test]
fn a_node_waits_for_a_better_pool_that_is_about_to_allocate() {
    let better = |is_starting: bool| {
        let mut pool = pool_with("better", "10.1.0.0/24", |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
            spec.priority = 9;
        });
        if is_starting {
            pool.finalizers.clear();
        }
        pool
    };
    for (is_starting, gets) in [(true, None), (false, Some("10.1.0.240/28"))] {
        let other = cache("10.0.0.0/24", Vec::new());
        let other = Pool::clone(other.pools.get("p").unwrap());
        let cache = cluster(vec![other, better(is_starting)], vec![node("a")]);
        let cidrs = allocated_to_a(&cache, &mut rebuilt(&cache));
        assert_eq!(cidrs, gets.map(|it| vec![cidr(it)]));
    }
}

#[test]
fn a_node_is_handled_again_only_if_its_pool_has_ranges_that_are_in_use_but_free() {
    let pods = |cache: &mut ClusterCache, version: u64, addresses: &[&str]| {
        cache
            .pods
            .change(ObjectEvent::Applied(pod(version, addresses)));
    };
    let mut in_use = cache("10.0.0.0/28", vec![node("a")]);
    pods(&mut in_use, 1, &["10.0.0.7"]);
    let mut podcidrs = PodCidrs::default();
    let mut allocations = rebuilt(&in_use);
    in_step(&in_use, &mut allocations, NOW, |cx| {
        assert_eq!(allocated("a", &mut podcidrs, cx), None);
    });
    let again = podcidrs.load().next_at.unwrap();
    pods(&mut in_use, 2, &[]);
    let now = Now { mono: again, ..NOW };
    let next = |cx: &mut Context| podcidrs.next_urgent(cx, false).is_some();
    assert!(in_step(&in_use, &mut allocations, now, next));
    let full = cache(
        "10.0.0.0/28",
        vec![node("a"), node_with("x", &["10.0.0.0/28"])],
    );
    let mut podcidrs = PodCidrs::default();
    in_step(&full, &mut rebuilt(&full), NOW, |cx| {
        assert_eq!(allocated("a", &mut podcidrs, cx), None);
    });
    assert_eq!(podcidrs.load().next_at, None);
    assert_eq!(podcidrs.full.len(), 1, "it is not searched for each node");
}

#[test]
fn a_machine_gets_its_ranges_back_only_from_a_pool_that_may_allocate_them_to_it() {
    type Change = fn(&mut IPPoolSpec);
    let (v4, v6) = ("10.0.0.0/28", "fd00::/124");
    let dual = |spec: &mut IPPoolSpec| spec.ipv6 = Some(ipv6_ranges("fd00::/120", 124));
    let changes: [(&[&str], Change, bool); 7] = [
        (&[v4], |_| {}, true),
        (
            &[v4],
            |spec| spec.allocation_mode = AllocationMode::Blocks,
            false,
        ),
        (&[v4], |spec| spec.disabled = true, false),
        (
            &[v4],
            |spec| {
                let selector = r#"{"matchLabels":{"its":"no"}}"#;
                spec.node_selector = Some(serde_json::from_str(selector).unwrap());
            },
            false,
        ),
        (
            &[v4],
            |spec| spec.reserved = vec!["10.0.0.7".to_owned()],
            false,
        ),
        (&[v4], dual, false),
        (&[v4, v6], dual, true),
    ];
    for (at, (had, change, gets_back)) in changes.into_iter().enumerate() {
        let pool = pool_with("p", "10.0.0.0/24", |spec| {
            spec.allocation_mode = AllocationMode::NodeCIDR;
            change(spec);
        });
        let cache = cluster(vec![pool], vec![machine("new", &[])]);
        let mut allocations = rebuilt(&cache);
        let old = machine("old", had);
        allocations.sync(&old, None);
        allocations.quarantine(&old, NOW);
        let cidrs = allocated_to_a(&cache, &mut allocations).unwrap_or_default();
        let had: Vec<Cidr> = had.iter().map(|text| cidr(text)).collect();
        assert_eq!(cidrs == had, gets_back, "change {at}: {cidrs:?}");
        let mut shared = cidrs.iter().filter(|it| had.contains(it));
        assert!(
            gets_back || shared.next().is_none(),
            "change {at}: {cidrs:?}"
        );
    }
}
