use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::*;
use crate::pods::testing::pod;
use cadastre_core::Addr;

fn selector(labels: &[(&str, &str)]) -> Selector {
    let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    Selector::new(Some(&LabelSelector {
        match_labels: Some(labels.collect()),
        ..LabelSelector::default()
    }))
    .unwrap()
}

fn serving(name: &str, namespace: &[(&str, &str)], pod: &[(&str, &str)]) -> ServingPool {
    ServingPool {
        name: name.to_owned(),
        namespace: selector(namespace),
        pod: selector(pod),
        manual: false,
    }
}

fn addr(text: &str) -> Addr {
    Addr::parse_strict(text).unwrap()
}

fn of<'a>(pod: Option<&'a Pod>, pools: &'a [String]) -> PodRequest<'a> {
    PodRequest {
        ifname: "eth0",
        pools,
        pod,
        namespace: None,
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

#[test]
fn the_annotation_precedes_the_config_and_the_config_precedes_selectors() {
    let pools = [serving("a", &[], &[]), serving("b", &[], &[("app", "db")])];
    let config = names(&["from-config"]);
    let annotated = pod("u", &[], &[(POOLS, " x, y ,x")]);
    let plain = pod("u", &[("app", "db")], &[]);
    let decide = |request: &PodRequest| decide(request, &pools, &[]).0.pools;
    assert_eq!(
        decide(&of(Some(&annotated), &config)),
        PoolOrder::Named(names(&["x", "y"]))
    );
    assert_eq!(
        decide(&of(Some(&plain), &config)),
        PoolOrder::Named(config.clone())
    );
    assert_eq!(
        decide(&of(Some(&plain), &[])),
        PoolOrder::Selected(names(&["a", "b"]))
    );
    let second = PodRequest {
        ifname: "net1",
        ..of(Some(&annotated), &config)
    };
    assert_eq!(
        decide(&second),
        PoolOrder::Named(config.clone()),
        "another network"
    );
}

#[test]
fn the_annotation_of_the_namespace_counts_for_pods_without_one() {
    let config = names(&["from-config"]);
    let naming = |text: &str| Namespace {
        pools: Some(text.to_owned()),
        ..Namespace::default()
    };
    let (good, bad) = (naming("team, spare"), naming("No Pool"));
    let (plain, own) = (pod("u", &[], &[]), pod("u", &[], &[(POOLS, "own")]));
    let wrong = pod("u", &[], &[(POOLS, "a,,b")]);
    let decide = |pod: Option<&Pod>, namespace, ifname| {
        let request = PodRequest {
            namespace: Some(namespace),
            ifname,
            ..of(pod, &config)
        };
        decide(&request, &[], &[])
    };
    let named = |pod, namespace, ifname| match decide(pod, namespace, ifname).0.pools {
        PoolOrder::Named(names) => names.join(" "),
        other => panic!("{other:?}"),
    };
    assert_eq!(named(Some(&plain), &good, "eth0"), "team spare");
    assert_eq!(named(Some(&own), &good, "eth0"), "own");
    assert_eq!(named(Some(&wrong), &good, "eth0"), "team spare");
    assert_eq!(named(Some(&plain), &good, "net1"), "from-config");
    assert_eq!(named(None, &good, "eth0"), "from-config");
    assert_eq!(named(Some(&plain), &bad, "eth0"), "from-config");
    let (_, errors) = decide(Some(&wrong), &bad, "eth0");
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[1].contains("the namespace's annotation cadastre.dev/pools (\"No Pool\")"));
}

#[test]
fn without_selectors_all_pools_serve_the_pod() {
    let pools = [serving("a", &[], &[]), serving("b", &[], &[])];
    let (choice, _) = decide(&of(None, &[]), &pools, &names(&["c"]));
    assert_eq!(choice.pools, PoolOrder::All);
}

#[test]
fn pools_are_selected_in_order_and_unknown_labels_select_nothing() {
    let pools = [
        serving("db", &[], &[("app", "db")]),
        serving("team", &[("team", "x")], &[]),
        serving("rest", &[], &[]),
    ];
    let db = pod("u", &[("app", "db")], &[]);
    let bare = Namespace::default();
    let team = Namespace {
        labels: vec![("team".into(), "x".into())],
        ..Namespace::default()
    };
    let decide = |pod: Option<&Pod>, namespace: Option<&Namespace>| {
        let request = PodRequest {
            namespace,
            ..of(pod, &[])
        };
        match decide(&request, &pools, &names(&["cidr"])).0.pools {
            PoolOrder::Selected(names) => names,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        decide(Some(&db), Some(&team)),
        ["db", "team", "rest", "cidr"]
    );
    assert_eq!(decide(Some(&db), Some(&bare)), ["db", "rest", "cidr"]);
    assert_eq!(decide(Some(&db), None), ["db", "rest", "cidr"]);
    assert_eq!(decide(None, None), ["rest", "cidr"]);
    // The pod's labels are unknown. So a pool does not serve the pod even if the pool's selector requires that a label
    // is absent.
    let absent =
        serde_json::json!({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]});
    let absent: LabelSelector = serde_json::from_value(absent).unwrap();
    let pools = [ServingPool {
        pod: Selector::new(Some(&absent)).unwrap(),
        ..serving("absent", &[], &[])
    }];
    let PoolOrder::None(why) = super::decide(&of(None, &[]), &pools, &[]).0.pools else {
        panic!("selected by unknown labels");
    };
    assert!(
        why.contains("absent") && why.contains("does not know"),
        "{why}"
    );
}

#[test]
fn a_manual_pool_serves_no_pod_that_does_not_name_it() {
    let pools = [
        ServingPool {
            manual: true,
            ..serving("manual", &[], &[])
        },
        serving("db", &[], &[("app", "db")]),
    ];
    let other = pod("u", &[("app", "web")], &[]);
    let PoolOrder::None(why) = decide(&of(Some(&other), &[]), &pools, &[]).0.pools else {
        panic!("selected");
    };
    assert!(why.contains("manual") && why.contains("app"), "{why}");
}

#[test]
fn an_annotation_that_cannot_be_parsed_is_reported_and_ignored() {
    let config = names(&["from-config"]);
    for (name, text, says) in [
        (POOLS, "a,,b", "no name of a pool"),
        (POOLS, "Ünsinn", "no name of a pool"),
        (POOLS, "  ", "is empty"),
        (POOLS, "[\"a\"]", "no name of a pool"),
        (ADDRESSES, "10.0.0.1,10.0.0.2", "two IPv4 addresses"),
        (ADDRESSES, "10.0.0.1/24", "no address"),
        (ADDRESSES, "010.0.0.1", "no address"),
        (ADDRESSES, "", "is empty"),
    ] {
        let annotated = pod("u", &[], &[(name, text)]);
        let (choice, errors) = decide(&of(Some(&annotated), &config), &[], &[]);
        assert_eq!(errors.len(), 1, "{text}");
        let error = &errors[0];
        assert!(error.contains(says) && error.contains(name), "{error}");
        assert_eq!(choice.pools, PoolOrder::Named(config.clone()));
        assert!(choice.addresses.is_empty());
    }
    let many = vec!["a"; 5000].join("é,");
    let annotated = pod("u", &[], &[(POOLS, many.as_str())]);
    let (_, errors) = decide(&of(Some(&annotated), &[]), &[], &[]);
    assert!(errors[0].len() < 600);
    let many: Vec<String> = (0..17).map(|n| format!("p{n}")).collect();
    let annotated = pod("u", &[], &[(POOLS, many.join(",").as_str())]);
    let (_, errors) = decide(&of(Some(&annotated), &[]), &[], &[]);
    assert!(errors[0].contains("at most 16"));
}

#[test]
fn a_claim_decides_alone_and_for_the_pod_s_own_interface() {
    let pools = [serving("team", &[("team", "a")], &[])];
    let namespace = Namespace {
        labels: vec![("team".into(), "a".into())],
        pools: Some("team".to_owned()),
    };
    let config = names(&["from-config"]);
    let longest = format!("{}.a-1", "a".repeat(249));
    for name in ["db", " db-0.x ", "0", longest.as_str()] {
        let annotated = pod(
            "u",
            &[],
            &[(CLAIM, name), (POOLS, "team"), (ADDRESSES, "?")],
        );
        let request = PodRequest {
            namespace: Some(&namespace),
            ..of(Some(&annotated), &config)
        };
        let (choice, errors) = decide(&request, &pools, &[]);
        let claim = format!("default/{}", name.trim());
        let expected = PodChoice {
            pools: PoolOrder::Named(vec![claim.clone()]),
            addresses: Vec::new(),
            bound: vec![claim],
            strict: true,
        };
        assert_eq!(choice, expected);
        let [first, second] = &errors[..] else {
            panic!("{errors:?}");
        };
        assert!(
            first.contains("cadastre.dev/pools is left out of account"),
            "{first}"
        );
        assert!(
            second.contains("cadastre.dev/addresses is left out"),
            "{second}"
        );
        let second = PodRequest {
            ifname: "net1",
            ..request
        };
        let (choice, errors) = decide(&second, &pools, &[]);
        assert_eq!(choice.pools, PoolOrder::Named(config.clone()));
        assert!(errors.is_empty() && choice.bound == ["team"] && !choice.strict);
    }
}

#[test]
fn a_pod_whose_annotation_names_no_claim_gets_no_address() {
    let long = "a".repeat(254);
    for name in [
        "", "A", "a/b", "-a", "a-", "a..b", ".a", "a b", "é", "a,b", &long,
    ] {
        let annotated = pod("u", &[], &[(CLAIM, name)]);
        let config = names(&["from-config"]);
        let request = of(Some(&annotated), &config);
        let (choice, errors) = decide(&request, &[serving("a", &[], &[])], &names(&["b"]));
        let [error] = &errors[..] else {
            panic!("{errors:?}");
        };
        assert!(
            error.contains("cadastre.dev/claim") && error.len() < 400,
            "{error}"
        );
        assert_eq!(choice.pools, PoolOrder::None(error.clone()), "{name}");
        assert!(choice.strict && choice.bound.is_empty());
    }
}

#[test]
fn a_sticky_pod_of_a_stateful_set_gets_the_claim_of_its_name_or_no_address() {
    let of_set = |annotations: &[(&str, &str)]| Pod {
        is_of_stateful_set: true,
        ..pod("0", &[], annotations)
    };
    let claims = |pod: &Pod, ifname| {
        let request = PodRequest {
            ifname,
            ..of(Some(pod), &[])
        };
        let (choice, errors) = decide(&request, &[serving("a", &[], &[])], &[]);
        (choice.pools, choice.strict, errors)
    };
    let sticky = of_set(&[(STICKY, "true"), (POOLS, "a"), (STICKY_TTL, "60")]);
    let claim = PoolOrder::Named(names(&["default/pod-0"]));
    assert_eq!(claims(&sticky, "eth0"), (claim.clone(), true, Vec::new()));
    assert_eq!(claims(&sticky, "net1").0, PoolOrder::All);
    let other = of_set(&[(STICKY, "true"), (CLAIM, "db")]);
    let (pools, _, errors) = claims(&other, "eth0");
    assert_eq!(pools, PoolOrder::Named(names(&["default/db"])));
    assert!(
        errors[0].contains("cadastre.dev/claim decides"),
        "{errors:?}"
    );
    let asks = of_set(&[(STICKY, "true"), (ADDRESSES, "10.0.0.7")]);
    let (pools, _, errors) = claims(&asks, "eth0");
    assert_eq!(pools, claim);
    assert!(
        errors[0].contains("cadastre.dev/sticky decides"),
        "{errors:?}"
    );
    // If the pod belongs to no StatefulSet, the annotation is ignored and reported.
    let bare = pod("0", &[], &[(STICKY, "true")]);
    let (pools, strict, errors) = claims(&bare, "eth0");
    assert_eq!((pools, strict), (PoolOrder::All, false));
    assert!(
        errors[0].contains("belongs to no StatefulSet"),
        "{errors:?}"
    );
}

#[test]
fn a_pod_asks_for_addresses_on_its_own_interface() {
    let annotated = pod("u", &[], &[(ADDRESSES, "fd00::7, 10.0.0.7")]);
    let addresses = |request: &PodRequest| decide(request, &[], &[]).0.addresses;
    let of_pod = addresses(&of(Some(&annotated), &[]));
    assert_eq!(of_pod, [addr("10.0.0.7"), addr("fd00::7")]);
    let second = PodRequest {
        ifname: "net1",
        ..of(Some(&annotated), &[])
    };
    assert!(addresses(&second).is_empty());
}

#[test]
fn a_retained_pool_serves_while_a_block_of_it_assigns_addresses() {
    let pool = |name: &str, retained| NodePool {
        name: name.to_owned(),
        retained,
        assignment: AssignmentMode::Manual,
        ..NodePool::default()
    };
    let pools = [pool("open", false), pool("retained", true)];
    assert!(pools[0].is_askable() && !pools[1].is_askable());
    let of = |allocating: &[&str]| -> Vec<(String, bool)> {
        let allocating = names(allocating).into_iter().collect();
        let (serving, wrong) = super::serving(&pools, &allocating);
        assert_eq!(wrong, Vec::<String>::new());
        serving.into_iter().map(|it| (it.name, it.manual)).collect()
    };
    assert_eq!(of(&[]), [("open".to_owned(), true)]);
    let both = [("open".to_owned(), true), ("retained".to_owned(), true)];
    assert_eq!(of(&["retained"]), both);
}

#[test]
fn unknown_annotations_are_reported() {
    let annotated = pod("u", &[], &[("cadastre.dev/pool", "x"), (POOLS, "y")]);
    let (choice, errors) = decide(&of(Some(&annotated), &[]), &[], &[]);
    assert_eq!(choice.pools, PoolOrder::Named(names(&["y"])));
    assert_eq!(errors.len(), 1);
    assert!(errors[0].starts_with("annotation cadastre.dev/pool means nothing"));
}

#[test]
fn a_pool_with_a_namespace_selector_is_open_only_to_matching_namespaces() {
    let pools = [
        serving("team", &[("team", "a")], &[]),
        serving("any", &[], &[]),
    ];
    let of_team = Namespace {
        labels: vec![("team".into(), "a".into())],
        ..Namespace::default()
    };
    let plain = pod("u", &[], &[(POOLS, "team")]);
    let is_bound = |namespace| {
        let request = PodRequest {
            namespace,
            ..of(Some(&plain), &[])
        };
        let bound = decide(&request, &pools, &[]).0.bound;
        bound.iter().any(|it| it == "team")
    };
    let other = Namespace::default();
    assert!(is_bound(Some(&of_team)) && !is_bound(Some(&other)) && !is_bound(None));
}

#[test]
fn a_pod_may_get_addresses_by_a_claim_of_its_own_on_its_own_interface() {
    let annotated = pod("u", &[], &[(ADDRESSES, "10.0.0.7"), (POOLS, "a")]);
    let bound = |request: &PodRequest| decide(request, &[], &[]).0.bound;
    let claim = format!("default/{}", pod_claim::claim_of_addresses("pod-u", "u"));
    let (choice, errors) = decide(&of(Some(&annotated), &[]), &[], &[]);
    let expected = PodChoice {
        pools: PoolOrder::Named(names(&["a"])),
        addresses: vec![addr("10.0.0.7")],
        bound: vec![claim.clone()],
        strict: false,
    };
    assert_eq!((choice, errors), (expected, Vec::new()));
    // The CNI request can ask for addresses even if no valid annotation asks for any.
    let wrong = pod("u", &[], &[(ADDRESSES, "10.0.0.7/24")]);
    for asks_by_cni in [wrong, pod("u", &[], &[])] {
        assert_eq!(bound(&of(Some(&asks_by_cni), &[])), [claim.as_str()]);
    }
    let second = PodRequest {
        ifname: "net1",
        ..of(Some(&annotated), &[])
    };
    let mirror = Pod {
        mirrors: Some("static".to_owned()),
        ..annotated.clone()
    };
    for request in [second, of(Some(&mirror), &[]), of(None, &[])] {
        assert!(bound(&request).is_empty(), "{request:?}");
    }
}
