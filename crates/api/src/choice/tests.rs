use std::cmp::Ordering;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use proptest::prelude::*;

use super::*;

fn selector(pairs: &[(&str, &str)]) -> Selector {
    let labels = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    let selector = LabelSelector {
        match_labels: Some(labels.collect()),
        ..Default::default()
    };
    Selector::new(Some(&selector)).unwrap()
}

fn labels(pairs: &[(&str, &str)]) -> Vec<Label> {
    pairs
        .iter()
        .map(|(k, v)| ((*k).into(), (*v).into()))
        .collect()
}

/// Owns the data that a [`PoolCandidate`] borrows.
#[derive(Clone, Debug, Default)]
struct Pool {
    name: String,
    node: Selector,
    namespace: Selector,
    pod: Selector,
    priority: i32,
    families: Dual<bool>,
    created: i64,
    manual: bool,
    barred: Option<String>,
    room: u128,
}

fn pool(name: &str) -> Pool {
    Pool {
        name: name.into(),
        ..Pool::default()
    }
}

impl Pool {
    fn candidate(&self) -> PoolCandidate<'_> {
        PoolCandidate {
            name: &self.name,
            node: &self.node,
            namespace: &self.namespace,
            pod: &self.pod,
            priority: self.priority,
            families: self.families,
            created: self.created,
            manual: self.manual,
            standing: match &self.barred {
                Some(why) => PoolStanding::Barred(why),
                None => PoolStanding::Serving,
            },
        }
    }
}

fn ask<'a>(pools: &'a [Pool], requester: &Requester<'a>) -> PoolChoice<'a> {
    let candidates: Vec<PoolCandidate> = pools.iter().map(Pool::candidate).collect();
    choose(&candidates, requester, |asked| {
        pools.iter().find(|it| it.name == asked.name).unwrap().room
    })
}

fn names<'a>(choice: &PoolChoice<'a>) -> Vec<&'a str> {
    choice.chosen.iter().map(|chosen| chosen.name).collect()
}

fn of_node(node: &[Label]) -> Requester<'_> {
    Requester {
        node,
        pod: None,
        by_name: &[],
    }
}

#[test]
fn the_order_is_explained_step_by_step() {
    let class = [("class", "cpu")];
    let pools = [
        Pool {
            room: 3,
            ..pool("little")
        },
        Pool {
            room: 120,
            ..pool("much")
        },
        Pool {
            room: 3,
            ..pool("lower")
        },
        Pool {
            node: selector(&class),
            ..pool("specific")
        },
        Pool {
            priority: 10,
            ..pool("first")
        },
        Pool {
            priority: -1,
            pod: selector(&[("app", "db")]),
            ..pool("last")
        },
    ];
    let node = labels(&class);
    let choice = ask(&pools, &of_node(&node));
    assert_eq!(
        choice.to_string(),
        [
            r#"1st "first": priority 10, before "specific": higher priority (10 to 0)"#,
            r#"2nd "specific": priority 0, before "much": more specific (1 requirement to 0)"#,
            r#"3rd "much": priority 0, before "little": more room (120 to 3)"#,
            r#"4th "little": priority 0, before "lower": equal in all else, by name"#,
            r#"5th "lower": priority 0, before "last": higher priority (0 to -1)"#,
            r#"6th "last": priority -1; for some pods only, by namespaceSelector or podSelector"#,
        ]
        .join("\n")
    );
    assert_eq!(choice.chosen[0].at, 4);
}

#[test]
fn every_pool_that_is_passed_over_has_a_reason() {
    let pools = [
        Pool {
            node: selector(&[("class", "cpu")]),
            ..pool("cpu")
        },
        Pool {
            namespace: selector(&[("team", "a")]),
            ..pool("team-a")
        },
        Pool {
            pod: selector(&[("app", "db")]),
            ..pool("db")
        },
        Pool {
            manual: true,
            ..pool("spare")
        },
        Pool {
            barred: Some("it is disabled: set spec.disabled to false".into()),
            ..pool("off")
        },
    ];
    let node = labels(&[("class", "gpu")]);
    let namespace = labels(&[]);
    let pod = labels(&[("app", "web")]);
    let requester = Requester {
        node: &node,
        pod: Some(PodLabels {
            namespace: &namespace,
            pod: &pod,
        }),
        by_name: &[],
    };
    assert_eq!(
        ask(&pools, &requester).to_string(),
        [
            "no pool serves",
            r#"not "off": it is disabled: set spec.disabled to false"#,
            r#"not "spare": Manual: only when asked for by name"#,
            r#"not "cpu": node label class is "gpu", nodeSelector wants In (cpu)"#,
            r#"not "db": pod label app is "web", podSelector wants In (db)"#,
            r#"not "team-a": namespace has no label team, namespaceSelector wants In (a)"#,
        ]
        .join("\n")
    );
    assert_eq!(
        ask(&[], &requester).to_string(),
        "no pool serves: there is none: create an IPPool"
    );
}

#[test]
fn pools_asked_for_by_name_need_not_match_but_must_be_able_to_serve() {
    let pools = [
        Pool {
            node: selector(&[("class", "cpu")]),
            ..pool("cpu")
        },
        Pool {
            priority: 10,
            ..pool("best")
        },
        Pool {
            manual: true,
            namespace: selector(&[("team", "a")]),
            ..pool("spare")
        },
        Pool {
            barred: Some("no free IPv4 block".into()),
            ..pool("full")
        },
    ];
    let requester = Requester {
        by_name: &["spare", "full", "nosuch", "cpu", "spare"],
        ..of_node(&[])
    };
    let choice = ask(&pools, &requester);
    assert_eq!(
        choice.to_string(),
        [
            r#"1st "spare": asked for by name"#,
            r#"2nd "cpu": asked for by name"#,
            r#"not "nosuch": asked for by name, but there is no such pool: create it, or correct the name"#,
            r#"not "full": no free IPv4 block"#,
            r#"not "best": others were asked for by name"#,
        ]
        .join("\n")
    );
    assert!(choice.chosen.iter().all(|chosen| !chosen.some_pods_only));
}

#[test]
fn pools_for_some_pods_are_marked_in_the_choice_for_a_node() {
    let pools = [
        pool("all"),
        Pool {
            namespace: selector(&[("team", "a")]),
            ..pool("team")
        },
    ];
    let marks = |requester: &Requester| -> Vec<(String, bool)> {
        let choice = ask(&pools, requester);
        let marks = choice.chosen.iter();
        marks
            .map(|it| (it.name.to_owned(), it.some_pods_only))
            .collect()
    };
    assert_eq!(
        marks(&of_node(&[])),
        [("team".to_owned(), true), ("all".to_owned(), false)]
    );
    let team = labels(&[("team", "a")]);
    let requester = Requester {
        pod: Some(PodLabels {
            namespace: &team,
            pod: &[],
        }),
        ..of_node(&[])
    };
    assert_eq!(
        marks(&requester),
        [("team".to_owned(), false), ("all".to_owned(), false)]
    );
}

#[test]
fn eight_pools_are_named_and_the_rest_counted() {
    let many = |prefix: &str, n: usize, manual: bool| -> Vec<Pool> {
        (0..n)
            .map(|i| Pool {
                manual,
                ..pool(&format!("{prefix}{i:02}"))
            })
            .collect()
    };
    for (serve, not, end) in [
        (8, 0, "by name\n8th \"s07\": priority 0"),
        (11, 0, "\nand 3 more that serve"),
        (2, 9, "\nand 3 more that do not serve"),
        (11, 2, "\nand 5 more: 3 that serve, 2 that do not"),
    ] {
        let pools = [many("s", serve, false), many("n", not, true)].concat();
        let text = ask(&pools, &of_node(&[])).to_string();
        assert!(text.ends_with(end), "{text}");
        assert_eq!(
            text.matches("\": ").count() - text.matches("before").count(),
            8
        );
    }
}

/// Compares two pools by the documented order, in the simplest possible way. Both pools have the same families.
fn naive(a: &Pool, b: &Pool) -> Ordering {
    let requirements =
        |it: &Pool| it.node.specificity() + it.namespace.specificity() + it.pod.specificity();
    let steps = [
        b.priority.cmp(&a.priority),
        requirements(b).cmp(&requirements(a)),
        b.room.cmp(&a.room),
        a.name.cmp(&b.name),
    ];
    let decided = steps.into_iter().find(|step| step.is_ne());
    decided.unwrap_or(Ordering::Equal)
}

/// Generates up to three requirements. Every label of the requester has the value "0", so a requirement is met if its
/// value is "0".
fn requirements() -> impl Strategy<Value = Vec<(&'static str, &'static str)>> {
    let value = prop::option::weighted(0.3, prop::bool::weighted(0.8));
    prop::array::uniform3(value).prop_map(|values| {
        let pairs = ["a", "b", "c"].into_iter().zip(values);
        let value = |met: bool| if met { "0" } else { "1" };
        pairs
            .filter_map(|(key, met)| Some((key, value(met?))))
            .collect()
    })
}

prop_compose! {
    /// Generates a pool, and says whether its nodeSelector matches and whether its other two selectors match.
    fn any_pool()(
        node in requirements(),
        namespace in requirements(),
        pod in requirements(),
        priority in -1..=1,
        manual in prop::bool::weighted(0.1),
        barred in prop::bool::weighted(0.1),
        room in 0_u128..3,
    ) -> (Pool, bool, bool) {
        let met = |pairs: &[(&str, &str)]| pairs.iter().all(|(_, value)| *value == "0");
        let pool = Pool {
            name: String::new(),
            node: selector(&node),
            namespace: selector(&namespace),
            pod: selector(&pod),
            priority,
            families: Dual::default(),
            created: 0,
            manual,
            barred: barred.then(|| "full".to_owned()),
            room,
        };
        (pool, met(&node), met(&namespace) && met(&pod))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_choice_is_a_filter_and_a_sort(
        pools in prop::collection::vec(any_pool(), 0..12),
        for_pod: bool,
        turn in 0_usize..12,
    ) {
        let mut pools = pools;
        for (at, (pool, _, _)) in pools.iter_mut().enumerate() {
            pool.name = format!("p{}", (at * 7) % 12);
        }
        let mut expected: Vec<&Pool> = pools
            .iter()
            .filter(|(pool, node, pod)| {
                *node && (*pod || !for_pod) && !pool.manual && pool.barred.is_none()
            })
            .map(|(pool, _, _)| pool)
            .collect();
        expected.sort_by(|a, b| naive(a, b));

        let all = labels(&[("a", "0"), ("b", "0"), ("c", "0")]);
        let pod = for_pod.then_some(PodLabels { namespace: &all, pod: &all });
        let requester = Requester { pod, ..of_node(&all) };
        let mut given: Vec<Pool> = pools.iter().map(|(pool, _, _)| pool.clone()).collect();
        if !given.is_empty() {
            let turn = turn % given.len();
            given.rotate_left(turn);
        }
        let candidates: Vec<PoolCandidate> = given.iter().map(Pool::candidate).collect();
        let mut asked = Vec::new();
        let choice = choose(&candidates, &requester, |it| {
            asked.push(it.name);
            given.iter().find(|pool| pool.name == it.name).unwrap().room
        });
        let wanted: Vec<&str> = expected.iter().map(|pool| &*pool.name).collect();
        prop_assert_eq!(names(&choice), wanted);

        // `room` must be called once for each pool that has the same priority and requirements as another pool, and for
        // no other pool.
        let rank = |pool: &Pool| {
            let Pool { node, namespace, pod, .. } = pool;
            (pool.priority, node.specificity() + namespace.specificity() + pod.specificity())
        };
        let mut tied: Vec<&str> = expected
            .iter()
            .filter(|pool| expected.iter().filter(|it| rank(it) == rank(pool)).count() > 1)
            .map(|pool| &*pool.name)
            .collect();
        tied.sort_unstable();
        asked.sort_unstable();
        prop_assert_eq!(asked, tied);

        // Every pool is in the result exactly once, with its index among the candidates.
        let passed = choice.passed_over.iter().map(|it| (it.at.unwrap(), it.name));
        let mut all_pools: Vec<(usize, &str)> =
            choice.chosen.iter().map(|it| (it.at, it.name)).chain(passed).collect();
        all_pools.sort_unstable();
        let everyone: Vec<(usize, &str)> =
            given.iter().map(|pool| &*pool.name).enumerate().collect();
        prop_assert_eq!(all_pools, everyone);
    }
}

fn of_families(name: &str, families: [bool; 2], created: i64, room: u128) -> Pool {
    let [v4, v6] = families;
    Pool {
        families: Dual { v4, v6 },
        created,
        room,
        ..pool(name)
    }
}

#[test]
fn room_is_compared_within_a_family_and_the_oldest_pool_decides_the_families() {
    let four = of_families("four", [true, false], 1, 3);
    let six = of_families("six", [false, true], 2, u128::MAX);
    let more = of_families("more", [true, false], 3, 9);
    let both = of_families("both", [true, true], 4, 100);
    let pools = [six.clone(), both, four.clone(), more];
    let choice = ask(&pools, &of_node(&[]));
    assert_eq!(names(&choice), ["more", "four", "both", "six"]);
    let by_name: Vec<Option<Family>> = choice.chosen.iter().map(|it| it.lacks).collect();
    assert_eq!(by_name, [None, None, None, Some(Family::V4)]);
    let text = choice.to_string();
    assert!(
        text.contains("\"six\": priority 0; only when asked for by name: it gives no IPv4"),
        "{text}"
    );
    assert!(
        text.contains("\"both\": priority 0, before \"six\": the families of the oldest"),
        "{text}"
    );

    // If the IPv6 pool is older, a newer IPv4 pool does not change the families that are assigned.
    let older = Pool { created: 0, ..six };
    assert_eq!(
        names(&ask(&[older.clone(), four.clone()], &of_node(&[]))),
        ["six", "four"]
    );

    // A higher priority takes precedence over the age of pools. So no pool lacks a family here.
    let first = Pool {
        priority: 1,
        ..older
    };
    let pools = [four, first];
    let choice = ask(&pools, &of_node(&[]));
    assert_eq!(names(&choice), ["six", "four"]);
    assert!(choice.chosen.iter().all(|it| it.lacks.is_none()));
}
