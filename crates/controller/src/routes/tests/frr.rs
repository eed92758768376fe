use serde_json::{Value, json};

use super::super::*;
use crate::fixtures::{LoopFixture, cidr, list, node, subnet};
use crate::settings::FrrSettings;
use cadastre_api::FrrNeighbor;
use cadastre_api::frr::{HOSTNAME_LABEL, prefixes};

type Fixture = LoopFixture<RouteLoop<FrrConfiguration>>;

fn settings() -> FrrSettings {
    let neighbors = [
        r#"{"address": "192.0.2.1", "asn": 64512}"#,
        r#"{"address": "192.0.2.2", "asn": 64512, "nodeLabels": {"rack": "b"}}"#,
    ];
    FrrSettings {
        namespace: "frr-k8s-system".to_owned(),
        asn: Some(64_513),
        neighbors: neighbors
            .map(|it| it.parse::<FrrNeighbor>().unwrap())
            .into(),
    }
}

/// Returns node a with this AS number in its annotation, and these labels.
fn node_a(asn: Option<&str>, labels: &[(&str, &str)]) -> Node {
    let labels = labels.iter();
    Node {
        version: 2,
        asn: asn.map(Text::from),
        labels: labels
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect(),
        ..node("a")
    }
}

/// Returns a cluster of this node, whose NodeSubnet lists these blocks.
fn fixture(node: Node, blocks: &[&str], found: Vec<FrrConfiguration>) -> Fixture {
    let mut fixture = Fixture::new(vec![]);
    fixture.tested = RouteLoop::new(Some(settings()));
    let mut subnet = subnet(&node.name, blocks, 1);
    subnet.spec.as_mut().unwrap().node_uid = Some(node.uid.to_string());
    fixture.tested.queue.add(node.name.clone());
    list(&mut fixture.cache.nodes, vec![node]);
    list(&mut fixture.cache.subnets, vec![subnet]);
    list(&mut fixture.cache.frr_configurations, found);
    fixture
}

fn found(is_ours: bool, spec: Value) -> FrrConfiguration {
    FrrConfiguration {
        name: "a".into(),
        uid: "frr-a".into(),
        version: 1,
        is_ours,
        spec,
    }
}

fn spec(asn: u32, prefixes: &[&str]) -> Value {
    let all = json!({"allowed": {"mode": "all"}});
    json!({
        "nodeSelector": {"matchLabels": {HOSTNAME_LABEL: "a"}},
        "bgp": {"routers": [{
            "asn": asn, "prefixes": prefixes,
            "neighbors": [{"address": "192.0.2.1", "asn": 64512, "toAdvertise": all}],
        }]},
    })
}

fn created(fixture: &mut Fixture) -> Value {
    match fixture.request() {
        Some(ApiRequest::Create(_, ObjectSpec::FrrConfiguration(spec))) => spec,
        other => panic!("{other:?}"),
    }
}

/// Passes `outcome` to the loop as the answer to its next request, and returns this request.
fn answer(fixture: &mut Fixture, outcome: &RequestOutcome) -> ApiRequest {
    let (request, purpose) = fixture.step(Loop::next).unwrap();
    let answer = RequestAnswer {
        wrote: request.is_write(),
        ..RequestAnswer::to_write(&purpose, outcome)
    };
    fixture.step(|tested, cx| _ = tested.answered(&answer, cx));
    request
}

#[test]
fn a_node_gets_its_ranges_as_prefixes_and_the_neighbors_of_its_labels() {
    let blocks = &["10.0.0.64/26", "10.0.0.0/26"];
    let mut of_a = fixture(node_a(None, &[]), blocks, vec![]);
    let wanted = spec(64_513, &["10.0.0.0/26", "10.0.0.64/26"]);
    assert_eq!(created(&mut of_a), wanted);
    assert_eq!(of_a.request(), None, "one request at a time");
    let labels = [(HOSTNAME_LABEL, "host-a"), ("rack", "b")];
    let mut of_a = fixture(node_a(Some("7"), &labels), blocks, vec![]);
    let spec = created(&mut of_a);
    assert_eq!(spec["bgp"]["routers"][0]["asn"], 7);
    assert_eq!(
        spec["bgp"]["routers"][0]["neighbors"][1]["address"],
        "192.0.2.2"
    );
    assert_eq!(
        spec["nodeSelector"]["matchLabels"][HOSTNAME_LABEL],
        "host-a"
    );
}

#[test]
fn what_somebody_has_changed_is_put_right_and_defaults_are_left() {
    let blocks = &["10.0.0.0/26"];
    let of_a = || node_a(None, &[]);
    let mut stored = spec(64_513, blocks);
    stored["bgp"]["routers"][0]["neighbors"][0]["disableMP"] = false.into();
    let mut same = fixture(of_a(), blocks, vec![found(true, stored.clone())]);
    assert_eq!(same.request(), None);
    stored["bgp"]["routers"][0]["prefixes"] = json!(["10.0.0.0/26", "10.9.0.0/16"]);
    let mut changed = fixture(of_a(), blocks, vec![found(true, stored)]);
    let wanted = ObjectSpec::FrrConfiguration(spec(64_513, blocks));
    let replaced = changed.request();
    assert!(
        matches!(&replaced, Some(ApiRequest::Replace(_, spec)) if *spec == wanted),
        "{replaced:?}"
    );
}

#[test]
fn a_node_without_ranges_or_without_a_number_gets_none() {
    for (settings, blocks) in [
        (settings(), &[][..]),
        (
            FrrSettings {
                asn: None,
                ..settings()
            },
            &["10.0.0.0/26"],
        ),
    ] {
        let stored = vec![found(true, spec(64_513, &["10.0.0.0/26"]))];
        let mut fixture = fixture(node_a(None, &[]), blocks, stored);
        fixture.tested.settings = Some(settings);
        let request = fixture.request();
        let is_deletion = matches!(
            request,
            Some(ApiRequest::Delete(ObjectKind::FrrConfiguration, _))
        );
        assert!(is_deletion, "{request:?}");
    }
}

#[test]
fn an_invalid_number_is_reported_once_and_the_ranges_are_still_announced_and_withdrawn() {
    let wrong = || node_a(Some("AS7"), &[]);
    let mut new = fixture(wrong(), &["10.0.0.0/26"], vec![]);
    assert_eq!(new.request(), None, "nothing is created");
    assert_eq!(new.reports.len(), 1);
    let stored = spec(7, &["10.0.0.0/26", "10.0.0.64/26"]);
    let mut old = fixture(wrong(), &["10.0.0.0/26"], vec![found(true, stored)]);
    let Some(ApiRequest::Replace(_, ObjectSpec::FrrConfiguration(written))) = old.request() else {
        panic!("the released range is not withdrawn");
    };
    assert_eq!(written, spec(7, &["10.0.0.0/26"]));
    assert_eq!(old.reports.len(), 1);
    assert!(old.reports[0].note.contains("AS7"), "{:?}", old.reports);
    new.tested.queue.add("a".into());
    assert_eq!((new.request(), new.reports.len()), (None, 1));
}

#[test]
fn no_object_selects_another_node_or_has_an_invalid_name_or_label() {
    let label_of_b = node_a(None, &[(HOSTNAME_LABEL, "b")]);
    let stored = vec![found(true, spec(64_513, &["10.0.0.0/26"]))];
    let mut fixture_a = fixture(label_of_b.clone(), &["10.0.0.0/26"], stored);
    list(&mut fixture_a.cache.nodes, vec![label_of_b, node("b")]);
    assert!(matches!(fixture_a.request(), Some(ApiRequest::Delete(..))));
    assert_eq!(fixture_a.reports.len(), 1);
    for (length, labels) in [(245, &[(HOSTNAME_LABEL, "a")][..]), (64, &[])] {
        let long = Node {
            name: "n".repeat(length).into(),
            ..node_a(None, labels)
        };
        let mut fixture = fixture(long, &["10.0.0.0/26"], vec![]);
        assert_eq!((fixture.request(), fixture.reports.len()), (None, 1));
    }
}

#[test]
fn an_object_of_somebody_else_is_left_alone_until_it_is_gone() {
    let mut fixture = fixture(node_a(None, &[]), &["10.0.0.0/26"], vec![]);
    let exists = RequestOutcome::Rejected(Rejection::Guard("already exists".to_owned()));
    let created = answer(&mut fixture, &exists);
    assert!(matches!(created, ApiRequest::Create(..)));
    let foreign = RequestOutcome::FrrConfiguration(found(false, json!({})));
    for _ in 0..2 {
        let read = answer(&mut fixture, &foreign);
        assert!(matches!(read, ApiRequest::Read(..)), "{read:?}");
        assert_eq!(fixture.request(), None, "it is left alone");
        fixture.now.mono += FOREIGN_PAUSE;
    }
    assert_eq!(fixture.reports.len(), 1, "{:?}", fixture.reports);
    let missing = RequestOutcome::Rejected(Rejection::Missing);
    assert!(matches!(
        answer(&mut fixture, &missing),
        ApiRequest::Read(..)
    ));
    assert!(matches!(fixture.request(), Some(ApiRequest::Create(..))));
}

#[test]
fn a_part_that_the_api_server_drops_is_noticed() {
    let mut fixture = fixture(node_a(None, &[]), &["10.0.0.0/26"], vec![]);
    let request = fixture.request().unwrap();
    let ApiRequest::Create(_, ObjectSpec::FrrConfiguration(spec)) = &request else {
        panic!("{request:?}");
    };
    let is_kept = |spec| {
        let answer = RequestOutcome::FrrConfiguration(found(true, spec));
        request.is_kept_in(&answer)
    };
    assert!(is_kept(spec.clone()));
    let mut dropped = spec.clone();
    dropped["bgp"]["routers"][0]["neighbors"] = json!([{"address": "192.0.2.1"}]);
    assert!(!is_kept(dropped));
}

#[test]
fn no_range_is_free_while_an_frr_configuration_lists_it_or_until_they_are_known() {
    let stored = spec(64_513, &["10.0.0.0/26"]);
    assert_eq!(prefixes(&stored).count(), 1);
    let mut fixture = fixture(node_a(None, &[]), &[], vec![found(true, stored)]);
    let is = |fixture: &Fixture, range| {
        let open = &fixture.allocations.open_routes;
        is_routed(&"a".into(), &cidr(range), open, &fixture.cache)
    };
    assert!(is(&fixture, "10.0.0.0/26") && !is(&fixture, "10.0.0.64/26"));
    fixture.cache.awaits_frr_configurations = true;
    assert!(is(&fixture, "10.0.0.64/26"));
}
