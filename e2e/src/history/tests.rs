use super::*;

fn revision(uid: &str, pod_cidrs: &[&str], deleted: bool) -> Revision {
    Revision {
        at: Instant::now(),
        uid: uid.to_owned(),
        name: format!("node-{uid}"),
        pod_cidrs: pod_cidrs.iter().map(ToString::to_string).collect(),
        term: None,
        deleted,
    }
}

fn holds(uid: &str, pod_cidrs: &[&str]) -> Revision {
    revision(uid, pod_cidrs, false)
}

fn pairs(revisions: &[Revision]) -> Vec<(String, String)> {
    duplicates(revisions)
        .unwrap()
        .into_iter()
        .map(|it| (it.first.1, it.second.1))
        .collect()
}

fn pair(first: &str, second: &str) -> (String, String) {
    (first.to_owned(), second.to_owned())
}

#[test]
fn equal_ranges_of_two_live_nodes_are_a_duplicate_however_they_are_spelt() {
    let history = [holds("a", &["fd00:0:0::/64"]), holds("b", &["FD00::1/64"])];
    assert_eq!(pairs(&history), [pair("a", "b")]);
}

#[test]
fn a_range_inside_or_around_another_is_a_duplicate() {
    let big = ["10.0.0.0/16"];
    let small = ["10.0.7.0/24"];
    assert_eq!(
        pairs(&[holds("a", &big), holds("b", &small)]),
        [pair("a", "b")]
    );
    assert_eq!(
        pairs(&[holds("a", &small), holds("b", &big)]),
        [pair("a", "b")]
    );
    let around_the_second = [
        holds("a", &["10.0.0.0/24"]),
        holds("b", &small),
        holds("c", &big),
    ];
    assert_eq!(pairs(&around_the_second), [pair("b", "c")]);
}

#[test]
fn neighbours_and_other_families_are_none() {
    let history = [
        holds("a", &["10.0.0.0/24", "::/64"]),
        holds("b", &["10.0.1.0/24", "0:0:0:1::/64"]),
        holds("c", &["10.0.2.0/23"]),
        holds("d", &["0.0.0.0/8"]),
    ];
    assert_eq!(pairs(&history), []);
}

#[test]
fn a_range_is_free_once_its_node_is_gone() {
    let cidr = ["10.0.0.0/24"];
    let history = [
        holds("a", &cidr),
        revision("a", &cidr, true),
        holds("b", &cidr),
    ];
    assert_eq!(pairs(&history), []);
}

#[test]
fn a_duplicate_that_has_since_gone_is_still_told_and_only_once() {
    let cidr = ["10.0.0.0/24"];
    let history = [
        holds("a", &cidr),
        holds("b", &cidr),
        holds("b", &cidr),
        revision("b", &cidr, true),
    ];
    assert_eq!(pairs(&history), [pair("a", "b")]);
}

#[test]
fn later_revisions_of_one_node_are_no_duplicate() {
    let cidr = ["10.0.0.0/24"];
    assert_eq!(
        pairs(&[holds("a", &[]), holds("a", &cidr), holds("a", &cidr)]),
        []
    );
}

#[test]
fn what_is_no_cidr_is_an_error() {
    for text in ["10.0.0.0", "10.0.0.0/33", "fd00::/129", "x/24"] {
        let error = duplicates(&[holds("a", &[text])]).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn the_whole_of_a_family_can_be_one_range() {
    assert_eq!(
        pairs(&[
            holds("a", &["0.0.0.0/0"]),
            holds("b", &["255.255.255.255/32"])
        ]),
        [pair("a", "b")]
    );
    assert_eq!(
        pairs(&[holds("a", &["::/0"]), holds("b", &["ffff::/16"])]),
        [pair("a", "b")]
    );
}

fn seen(uid: &str, pod_cidrs: &[&str]) -> Seen {
    Seen {
        metadata: ObjectMeta {
            uid: Some(uid.to_owned()),
            name: Some(uid.to_owned()),
            ..Default::default()
        },
        spec: SeenSpec {
            pod_cidrs: pod_cidrs.iter().map(ToString::to_string).collect(),
        },
    }
}

#[test]
fn a_list_after_an_outage_ends_what_it_no_longer_has_before_anything_new_begins() {
    let cidr = ["10.0.0.0/24"];
    let mut log = Log::default();
    for event in [
        Event::Init,
        Event::InitApply(seen("a", &cidr)),
        Event::InitDone,
    ] {
        log.take(event);
    }
    assert_eq!((log.progress.live, log.progress.assigned), (1, 1));
    for event in [
        Event::Init,
        Event::InitApply(seen("b", &cidr)),
        Event::InitDone,
    ] {
        log.take(event);
    }
    assert_eq!((log.progress.live, log.progress.assigned), (1, 1));
    assert_eq!(pairs(&log.revisions), []);
    assert!(log.revisions[1].deleted && log.revisions[1].uid == "a");
}
