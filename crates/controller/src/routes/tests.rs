use super::*;
use crate::cluster::objects::{Routes, Subnet};
use crate::cluster::request::RequestOutcome;
use crate::fixtures::{LoopFixture, addr, cidr, list, listed_block, node, pool, subnet};
use cadastre_api::NodeRoutesSpec;

mod frr;

/// Returns the NodeRoutes of a node.
fn listed(name: &str, destinations: &[&str]) -> Routes {
    Routes {
        name: name.into(),
        uid: format!("routes-{name}").into(),
        version: 1,
        spec: NodeRoutesSpec {
            via: vec!["192.0.2.1".to_owned()],
            destinations: destinations.iter().map(|it| (*it).to_owned()).collect(),
        },
    }
}

/// Returns a cluster of node a, which has this NodeSubnet and these NodeRoutes.
fn fixture(publishes: bool, subnet: Subnet, routes: Vec<Routes>) -> LoopFixture<RouteLoop<Routes>> {
    let mut fixture = LoopFixture::<RouteLoop<Routes>>::new(vec![]);
    fixture.tested = RouteLoop::new(publishes);
    let node = Node {
        version: 2,
        addresses: ["192.0.2.1", "192.0.2.9", "2001:db8::1"].map(addr).into(),
        ..node("a")
    };
    list(&mut fixture.cache.nodes, vec![node]);
    list(&mut fixture.cache.subnets, vec![subnet]);
    list(&mut fixture.cache.routes, routes);
    fixture.tested.queue.add("a".into());
    fixture
}

#[test]
fn a_node_gets_the_routes_to_its_ranges() {
    let mut of_a = subnet("a", &["10.0.0.64/26", "10.0.0.0/26", "10.0.0.9/32"], 1);
    let spec = of_a.spec.as_mut().unwrap();
    spec.node_uid = Some("a".to_owned());
    spec.blocks[2].standby = true;
    spec.blocks.push(listed_block("fd00::40/122"));
    let mut fixture = fixture(true, of_a, vec![]);
    let Some(ApiRequest::Create(name, ObjectSpec::Routes(spec))) = fixture.request() else {
        panic!("nothing is created");
    };
    assert_eq!(&*name, "a");
    assert_eq!(spec.via, ["192.0.2.1", "2001:db8::1"]);
    let wanted = ["10.0.0.0/26", "10.0.0.64/26", "fd00::40/122"];
    assert_eq!(spec.destinations, wanted, "a standby is not routed");
    assert_eq!(fixture.request(), None, "one request at a time");
}

#[test]
fn an_address_in_a_pool_is_no_address_of_a_node() {
    let mut fixture = LoopFixture::<RouteLoop<Routes>>::new(vec![pool("p", "10.0.0.0/16")]);
    fixture.tested = RouteLoop::new(true);
    let node = Node {
        version: 2,
        addresses: ["10.0.3.7", "192.0.2.1"].map(addr).into(),
        ..node("a")
    };
    list(&mut fixture.cache.nodes, vec![node]);
    list(
        &mut fixture.cache.subnets,
        vec![subnet("a", &["10.0.0.0/26"], 1)],
    );
    list(&mut fixture.cache.routes, vec![]);
    fixture.tested.queue.add("a".into());
    let Some(ApiRequest::Create(_, ObjectSpec::Routes(spec))) = fixture.request() else {
        panic!("nothing is created");
    };
    assert_eq!(spec.via, ["192.0.2.1"]);
}

#[test]
fn the_routes_of_a_node_end_with_its_ranges_or_if_routes_are_not_published() {
    for (publishes, blocks, of_uid) in [
        (true, &[][..], "a"),
        (true, &["10.0.0.0/26"], "an earlier one"),
        (false, &["10.0.0.0/26"], "a"),
    ] {
        let mut of_a = subnet("a", blocks, 1);
        of_a.spec.as_mut().unwrap().node_uid = Some(of_uid.to_owned());
        let mut fixture = fixture(publishes, of_a, vec![listed("a", &["10.0.0.0/26"])]);
        let request = fixture.request();
        assert!(
            matches!(request, Some(ApiRequest::Delete(ObjectKind::Routes, _))),
            "{request:?}"
        );
    }
}

#[test]
fn nothing_is_written_while_routes_stay_or_the_list_is_not_known() {
    let of_a = || {
        let mut of_a = subnet("a", &["10.0.0.0/26"], 1);
        of_a.spec.as_mut().unwrap().node_uid = Some("a".to_owned());
        of_a
    };
    let mut routes = listed("a", &["10.0.0.0/26"]);
    routes.spec.via.push("2001:db8::1".to_owned());
    assert_eq!(fixture(true, of_a(), vec![routes]).request(), None);
    let mut unknown = fixture(true, of_a(), vec![]);
    unknown.cache.routes = ObjectCache::default();
    assert_eq!(unknown.request(), None);
}

#[test]
fn routes_whose_write_has_no_answer_are_read_before_the_next_write() {
    let mut of_a = subnet("a", &["10.0.0.0/26"], 1);
    of_a.spec.as_mut().unwrap().node_uid = Some("a".to_owned());
    let mut fixture = fixture(true, of_a, vec![]);
    let (_, purpose) = fixture.step(Loop::next).unwrap();
    let outcome = RequestOutcome::Indeterminate("no answer".to_owned());
    let answer = RequestAnswer::to_write(&purpose, &outcome);
    fixture.step(|tested, cx| _ = tested.answered(&answer, cx));
    let request = fixture.request();
    assert_eq!(
        request,
        Some(ApiRequest::Read(ObjectKind::Routes, "a".into()))
    );
}

#[test]
fn a_range_is_routed_while_the_node_lists_exactly_this_range() {
    let fixture = fixture(
        true,
        subnet("a", &[], 1),
        vec![listed("a", &["10.0.0.0/26"])],
    );
    for (range, is) in [
        ("10.0.0.0/26", true),
        ("10.0.0.0/27", false),
        ("10.0.0.64/26", false),
    ] {
        assert_eq!(is_routed_in(&fixture, "a", range), is);
    }
    assert!(!is_routed_in(&fixture, "b", "10.0.0.0/26"));
}

fn is_routed_in(fixture: &LoopFixture<RouteLoop<Routes>>, node: &str, range: &str) -> bool {
    let open = &fixture.allocations.open_routes;
    is_routed(&node.into(), &cidr(range), open, &fixture.cache)
}

#[test]
fn a_range_is_routed_while_a_write_that_lists_it_has_no_known_outcome() {
    let mut of_a = subnet("a", &["10.0.0.0/26"], 1);
    of_a.spec.as_mut().unwrap().node_uid = Some("a".to_owned());
    let mut fixture = fixture(true, of_a, vec![]);
    let is = |fixture: &LoopFixture<_>| is_routed_in(fixture, "a", "10.0.0.0/26");
    assert!(!is(&fixture));
    let purpose = Purpose::Routes {
        kind: ObjectKind::Routes,
        name: "a".into(),
    };
    let mut is_after = |wrote: bool, outcome| {
        let request = fixture.request().unwrap();
        assert_eq!(request.is_write(), wrote, "{request:?}");
        assert!(
            is(&fixture) || !wrote,
            "the answer to {request:?} is not known"
        );
        let answer = RequestAnswer {
            wrote,
            ..RequestAnswer::to_write(&purpose, &outcome)
        };
        fixture.step(|tested, cx| _ = tested.answered(&answer, cx));
        is(&fixture)
    };
    let rejected = RequestOutcome::Rejected;
    assert!(is_after(true, RequestOutcome::Indeterminate(String::new())));
    assert!(is_after(false, rejected(Rejection::Busy(None))));
    assert!(!is_after(false, rejected(Rejection::Missing)));
    assert!(!is_after(
        true,
        rejected(Rejection::Rejected(String::new()))
    ));
}
