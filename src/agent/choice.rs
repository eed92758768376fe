//! Which pools serve a pod on this node, and which addresses it asks for.
//!
//! | what | comes from |
//! |---|---|
//! | pools | the pod's annotation `cadastre.dev/pools`, else the CNI config, else the pools' selectors |
//! | addresses | the CNI config or the runtime, else the pod's annotation `cadastre.dev/addresses` |
//!
//! Annotations speak of the pod's own interface, `eth0`: other interfaces are other networks, and
//! their CNI configs know what they want. Addresses of a config or a runtime are meant for one
//! attachment, so they come first.
//!
//! # Guarantees
//! - An annotation that cannot be read is as if it were not there, and that is told: a wrong word in
//!   one keeps no pod from starting.
//! - A pool whose selectors ask for labels serves nobody whose labels are not known.

use std::fmt;

use super::pods::Pod;
use crate::api::{
    ADDRESSES_ANNOTATION as ADDRESSES, Assignment, NodePool, POOLS_ANNOTATION as POOLS,
};
use crate::choice::{Asker, Candidate, Label, PodLabels, Selector, Standing, choose};
use crate::ipam::Addr;

/// The interface that annotations speak of.
const OWN_INTERFACE: &str = "eth0";
/// More names are a mistake.
const MOST_POOLS: usize = 16;
/// So much of a wrong annotation is repeated.
const SHOWN: usize = 100;

/// A pool that may serve pods of this node.
#[derive(Clone, Debug, Default)]
pub struct ServingPool {
    /// Its name
    pub name: String,
    /// The pods of which namespaces it serves
    pub namespace: Selector,
    /// Which pods it serves
    pub pod: Selector,
    /// Whether it serves only who asks for it by name
    pub manual: bool,
}

/// What an ADD asks for, and for whom.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The interface in the container
    pub ifname: &'a str,
    /// Pools of the CNI config
    pub pools: &'a [String],
    /// Addresses of the CNI config or the runtime
    pub addresses: &'a [Addr],
    /// The pod, if it is known
    pub pod: Option<&'a Pod>,
    /// The labels of its namespace, if they are known
    pub namespace: Option<&'a [Label]>,
}

/// What is to be tried.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chosen {
    /// Pools, best first
    pub pools: Pools,
    /// These addresses and no others; empty: any
    pub addresses: Vec<Addr>,
    /// What is wrong with the pod's annotations
    pub complaints: Vec<String>,
}

/// Pools to try, best first.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Pools {
    /// All that serve any pod
    #[default]
    All,
    /// Those that were asked for
    Named(Vec<String>),
    /// Those that select the pod
    Selected(Vec<String>),
    /// None selects it, for these reasons
    None(String),
}

/// Labels that are not known: nothing may be concluded from their absence.
struct Unknown;

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it selects by labels that the agent does not know (is the API server reachable, and may the agent read pods and namespaces?)")
    }
}

/// The pools that may serve pods here, in their order, and what could not be read of them.
pub fn serving(pools: &[NodePool]) -> (Vec<ServingPool>, Vec<String>) {
    let mut wrong = Vec::new();
    let mut serving = Vec::with_capacity(pools.len());
    for pool in pools {
        let selectors = Selector::new(pool.namespace_selector.as_deref())
            .and_then(|namespace| Ok((namespace, Selector::new(pool.pod_selector.as_deref())?)));
        match selectors {
            Ok((namespace, pod)) => serving.push(ServingPool {
                name: pool.name.clone(),
                namespace,
                pod,
                manual: pool.assignment == Assignment::Manual,
            }),
            Err(why) => wrong.push(format!(
                "pools: {}: {why}: it serves only who asks for it by name",
                pool.name
            )),
        }
    }
    (serving, wrong)
}

/// What is to be tried for an ADD. `serving` is best first; `others` are pools of ranges here that
/// are not among them, such as that of a podCIDR: they serve any pod, last.
pub fn decide(asked: &Asked, serving: &[ServingPool], others: &[String]) -> Chosen {
    let mut chosen = Chosen::default();
    let annotated = |name| {
        let pod = asked.pod.filter(|_| asked.ifname == OWN_INTERFACE)?;
        pod.annotations.get(name)
    };
    let mut read = |name: &str, text: Option<&String>| -> Option<String> {
        let text = text?.trim();
        if text.is_empty() {
            chosen
                .complaints
                .push(format!("annotation {name} is empty: remove it, or fill it"));
            return None;
        }
        Some(text.to_owned())
    };
    let pools = read(POOLS, annotated(POOLS)).map(|it| (pool_names(&it), it));
    let addresses = read(ADDRESSES, annotated(ADDRESSES)).map(|it| (address_list(&it), it));
    let mut complain = |name, text: &str, why| {
        let text: String = text.chars().take(SHOWN).collect();
        chosen.complaints.push(format!(
            "annotation {name} (\"{text}\") is left out of account: {why}"
        ));
    };
    let mut named = asked.pools.to_vec();
    match pools {
        Some((Ok(names), _)) => named = names,
        Some((Err(why), text)) => complain(POOLS, &text, why),
        None => {}
    }
    let mut wanted = asked.addresses.to_vec();
    match addresses {
        Some((Ok(list), _)) if wanted.is_empty() => wanted = list,
        Some((Err(why), text)) => complain(ADDRESSES, &text, why),
        _ => {}
    }
    chosen.addresses = wanted;
    chosen.pools = if named.is_empty() {
        by_selectors(asked, serving, others)
    } else {
        Pools::Named(named)
    };
    chosen
}

fn by_selectors(asked: &Asked, serving: &[ServingPool], others: &[String]) -> Pools {
    let picks = |it: &ServingPool| it.namespace.specificity() + it.pod.specificity() > 0;
    if !serving.iter().any(picks) {
        return Pools::All;
    }
    let any_node = Selector::default();
    let unknown = Unknown;
    let candidate = |(rank, pool): (usize, &'_ ServingPool)| {
        let is_unknown = (pool.pod.specificity() > 0 && asked.pod.is_none())
            || (pool.namespace.specificity() > 0 && asked.namespace.is_none());
        (rank, is_unknown)
    };
    let judged: Vec<(usize, bool)> = serving.iter().enumerate().map(candidate).collect();
    let candidates: Vec<Candidate> = judged
        .iter()
        .map(|&(rank, is_unknown)| {
            let pool = &serving[rank];
            // Of labels that are not known no selector may say that it is not met.
            let known = |selector| if is_unknown { &any_node } else { selector };
            Candidate {
                name: &pool.name,
                node: &any_node,
                namespace: known(&pool.namespace),
                pod: known(&pool.pod),
                priority: -i32::try_from(rank).unwrap_or(i32::MAX),
                manual: pool.manual,
                standing: if is_unknown {
                    Standing::Barred(&unknown)
                } else {
                    Standing::Serving
                },
            }
        })
        .collect();
    let asker = Asker {
        node: &[],
        pod: Some(PodLabels {
            namespace: asked.namespace.unwrap_or_default(),
            pod: asked
                .pod
                .map(|pod| pod.labels.as_slice())
                .unwrap_or_default(),
        }),
        by_name: &[],
    };
    let choice = choose(&candidates, &asker, |_| 0);
    let mut names: Vec<String> = choice.chosen.iter().map(|it| it.name.to_owned()).collect();
    names.extend(others.iter().cloned());
    if names.is_empty() {
        return Pools::None(choice.to_string().trim().replace('\n', "; "));
    }
    Pools::Selected(names)
}

fn pool_names(text: &str) -> Result<Vec<String>, String> {
    let mut names: Vec<String> = Vec::new();
    for name in text.split(',').map(str::trim) {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        if name.is_empty() || name.len() > 253 || !name.chars().all(legal) {
            let name: String = name.chars().take(SHOWN).collect();
            return Err(format!(
                "\"{name}\" is no name of a pool: write names separated by commas"
            ));
        }
        if !names.iter().any(|it| it == name) {
            names.push(name.to_owned());
        }
    }
    if names.len() > MOST_POOLS {
        return Err(format!(
            "it names {} pools: name at most {MOST_POOLS}",
            names.len()
        ));
    }
    Ok(names)
}

fn address_list(text: &str) -> Result<Vec<Addr>, String> {
    let mut list: Vec<Addr> = Vec::new();
    for word in text.split(',').map(str::trim) {
        let Some(addr) = Addr::parse_strict(word) else {
            let word: String = word.chars().take(SHOWN).collect();
            return Err(format!(
                "\"{word}\" is no address: write one of each family at most, separated by a comma, without a prefix length"
            ));
        };
        if list.contains(&addr) {
            continue;
        }
        if list.iter().any(|it| it.family == addr.family) {
            return Err(format!(
                "it names two {} addresses: an interface gets one of each family",
                addr.family
            ));
        }
        list.push(addr);
    }
    list.sort_unstable();
    Ok(list)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

    use super::*;
    use crate::agent::pods::testing::pod;

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

    fn of<'a>(pod: Option<&'a Pod>, pools: &'a [String]) -> Asked<'a> {
        Asked {
            ifname: "eth0",
            pools,
            addresses: &[],
            pod,
            namespace: None,
        }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_annotation_goes_before_the_config_and_that_before_selectors() {
        let pools = [serving("a", &[], &[]), serving("b", &[], &[("app", "db")])];
        let config = names(&["from-config"]);
        let annotated = pod("u", &[], &[(POOLS, " x, y ,x")]);
        let plain = pod("u", &[("app", "db")], &[]);
        let decide = |asked: &Asked| decide(asked, &pools, &[]).pools;
        assert_eq!(
            decide(&of(Some(&annotated), &config)),
            Pools::Named(names(&["x", "y"]))
        );
        assert_eq!(
            decide(&of(Some(&plain), &config)),
            Pools::Named(config.clone())
        );
        assert_eq!(
            decide(&of(Some(&plain), &[])),
            Pools::Selected(names(&["a", "b"]))
        );
        let second = Asked {
            ifname: "net1",
            ..of(Some(&annotated), &config)
        };
        assert_eq!(
            decide(&second),
            Pools::Named(config.clone()),
            "another network"
        );
    }

    #[test]
    fn where_no_pool_asks_for_labels_the_store_decides() {
        let pools = [serving("a", &[], &[]), serving("b", &[], &[])];
        let chosen = decide(&of(None, &[]), &pools, &names(&["c"]));
        assert_eq!(chosen.pools, Pools::All);
    }

    #[test]
    fn labels_decide_in_the_order_of_the_node_and_unknown_ones_select_nothing() {
        let pools = [
            serving("db", &[], &[("app", "db")]),
            serving("team", &[("team", "x")], &[]),
            serving("rest", &[], &[]),
        ];
        let db = pod("u", &[("app", "db")], &[]);
        let team: Vec<Label> = vec![("team".into(), "x".into())];
        let decide = |pod: Option<&Pod>, namespace: Option<&[Label]>| {
            let asked = Asked {
                namespace,
                ..of(pod, &[])
            };
            match decide(&asked, &pools, &names(&["cidr"])).pools {
                Pools::Selected(names) => names,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(
            decide(Some(&db), Some(&team)),
            ["db", "team", "rest", "cidr"]
        );
        assert_eq!(decide(Some(&db), Some(&[])), ["db", "rest", "cidr"]);
        assert_eq!(decide(Some(&db), None), ["db", "rest", "cidr"]);
        assert_eq!(decide(None, None), ["rest", "cidr"]);
        // Not even one that asks for the absence of a label.
        let absent =
            serde_json::json!({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]});
        let absent: LabelSelector = serde_json::from_value(absent).unwrap();
        let pools = [ServingPool {
            pod: Selector::new(Some(&absent)).unwrap(),
            ..serving("absent", &[], &[])
        }];
        let Pools::None(why) = super::decide(&of(None, &[]), &pools, &[]).pools else {
            panic!("selected by labels that are not known");
        };
        assert!(
            why.contains("absent") && why.contains("does not know"),
            "{why}"
        );
    }

    #[test]
    fn a_pool_that_is_to_be_named_serves_nobody_else() {
        let pools = [
            ServingPool {
                manual: true,
                ..serving("manual", &[], &[])
            },
            serving("db", &[], &[("app", "db")]),
        ];
        let other = pod("u", &[("app", "web")], &[]);
        let Pools::None(why) = decide(&of(Some(&other), &[]), &pools, &[]).pools else {
            panic!("selected");
        };
        assert!(why.contains("manual") && why.contains("app"), "{why}");
    }

    #[test]
    fn garbage_in_an_annotation_is_told_and_left_out() {
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
            let chosen = decide(&of(Some(&annotated), &config), &[], &[]);
            assert_eq!(chosen.complaints.len(), 1, "{text}");
            let complaint = &chosen.complaints[0];
            assert!(
                complaint.contains(says) && complaint.contains(name),
                "{complaint}"
            );
            assert_eq!(chosen.pools, Pools::Named(config.clone()));
            assert!(chosen.addresses.is_empty());
        }
        let many = vec!["a"; 5000].join("é,");
        let annotated = pod("u", &[], &[(POOLS, many.as_str())]);
        let chosen = decide(&of(Some(&annotated), &[]), &[], &[]);
        assert!(chosen.complaints[0].len() < 600);
        let many: Vec<String> = (0..17).map(|n| format!("p{n}")).collect();
        let annotated = pod("u", &[], &[(POOLS, many.join(",").as_str())]);
        let chosen = decide(&of(Some(&annotated), &[]), &[], &[]);
        assert!(chosen.complaints[0].contains("at most 16"));
    }

    #[test]
    fn addresses_of_the_attachment_go_before_those_of_the_pod() {
        let annotated = pod("u", &[], &[(ADDRESSES, "fd00::7, 10.0.0.7")]);
        let chosen = decide(&of(Some(&annotated), &[]), &[], &[]);
        assert_eq!(chosen.addresses, [addr("10.0.0.7"), addr("fd00::7")]);
        let own = [addr("10.0.0.9")];
        let asked = Asked {
            addresses: &own,
            ..of(Some(&annotated), &[])
        };
        assert_eq!(decide(&asked, &[], &[]).addresses, own);
        let second = Asked {
            ifname: "net1",
            ..of(Some(&annotated), &[])
        };
        assert!(decide(&second, &[], &[]).addresses.is_empty());
    }
}
