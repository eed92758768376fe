use super::*;
use crate::cluster::objects::{MachineIdentity, ServiceRange};
use crate::fixtures::{
    NOW, cidr, cluster, in_step, ipv6_ranges, list, node, node_with, pod, pool_with, rebuilt,
};
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

#[test]
fn a_machine_gets_its_ranges_back_unless_another_node_holds_some_of_them() {
    let machine = |uid: &str, ranges: &[&str]| Node {
        uid: uid.into(),
        machine: MachineIdentity {
            provider_id: None,
            machine_id: Some("m".into()),
        },
        ..node_with("a", ranges)
    };
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
