//! What a leader may have in flight, as the Lease names it.
//!
//! A leader assigns podCIDRs only while the Lease names the assignment, and takes the name away only
//! once it knows what became of it. Every write of the Lease is a compare-and-swap, so whoever takes
//! over has in its hands all that an earlier leader can still have on its way, however long that one
//! has slept and whatever its clock says.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::seen::Text;
use cadastre_core::Cidr;

/// One assignment that may be in flight.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Intent {
    /// The node's name
    pub name: Text,
    /// Its UID
    pub uid: Text,
    /// What it is to get
    pub cidrs: Vec<Cidr>,
}

/// All that may be in flight, and what it rests on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Intents {
    /// podCIDRs
    pub assignments: BTreeSet<Intent>,
    /// What all that was sent rests on: whoever has seen that needs no list
    pub known: Option<Versions>,
}

/// What somebody has seen of each kind, as the highest `resourceVersion`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// Of Nodes
    pub nodes: u64,
    /// Of NodeSubnets
    pub subnets: u64,
    /// Of IPAMBlocks
    pub blocks: u64,
}

/// As it stands in the annotation. What a later version adds is not understood, and then nothing is.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    /// `spec.leaseTransitions` of the holder that wrote it: one that knows of no intents carries the
    /// annotation along, and then it says nothing.
    transitions: i64,
    /// Name, UID and podCIDRs of nodes
    nodes: Vec<(String, String, Vec<String>)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    known: Option<Versions>,
}

impl Intents {
    /// The text of the annotation.
    pub fn write(&self, transitions: i64) -> String {
        let nodes = self.assignments.iter().map(|intent| {
            let cidrs = intent.cidrs.iter().map(ToString::to_string).collect();
            (intent.name.to_string(), intent.uid.to_string(), cidrs)
        });
        let form = Form {
            transitions,
            nodes: nodes.collect(),
            known: self.known,
        };
        serde_json::to_string(&form).unwrap_or_default()
    }

    /// Reads the annotation of a Lease with that count of transitions; nothing if it cannot be relied
    /// on, as where a holder of an earlier version has written the Lease since.
    pub fn read(text: &str, transitions: i64) -> Option<Self> {
        let form: Form = serde_json::from_str(text).ok()?;
        if form.transitions != transitions {
            return None;
        }
        let mut assignments = BTreeSet::new();
        for (name, uid, cidrs) in form.nodes {
            let cidrs = cidrs.iter().map(|text| Cidr::parse_strict(text).ok());
            assignments.insert(Intent {
                name: name.into(),
                uid: uid.into(),
                cidrs: cidrs.collect::<Option<_>>()?,
            });
        }
        Some(Intents {
            assignments,
            known: form.known,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Intents {
        let cidrs = ["10.0.1.0/24", "fd00:1::/64"];
        let cidrs = cidrs.map(|text| Cidr::parse_strict(text).unwrap());
        let intent = Intent {
            name: "n1".into(),
            uid: "u1".into(),
            cidrs: cidrs.to_vec(),
        };
        Intents {
            assignments: [intent].into(),
            known: Some(Versions {
                nodes: 7,
                subnets: 8,
                blocks: 9,
            }),
        }
    }

    #[test]
    fn what_is_written_reads_the_same_under_the_same_holder_only() {
        for intents in [some(), Intents::default()] {
            let text = intents.write(7);
            assert_eq!(Intents::read(&text, 7), Some(intents));
            assert_eq!(Intents::read(&text, 8), None, "an older version led since");
        }
    }

    #[test]
    fn what_is_not_understood_says_nothing() {
        for text in [
            "",
            "[]",
            r#"{"transitions":7}"#,
            r#"{"transitions":7,"nodes":[["n","u",["10.0.0.300/24"]]]}"#,
            r#"{"transitions":7,"nodes":[],"claims":["c"]}"#,
        ] {
            assert_eq!(Intents::read(text, 7), None, "{text}");
        }
    }

    #[test]
    fn a_full_list_stays_small() {
        let one = some().assignments.pop_first().unwrap();
        let assignments = (0..512).map(|i| Intent {
            name: format!("ip-10-0-{i}.eu-central-1.compute.internal").into(),
            uid: format!("8d1b0a3e-0000-4000-8000-{i:012}").into(),
            ..one.clone()
        });
        let all = Intents {
            assignments: assignments.collect(),
            known: some().known,
        };
        assert!(all.write(7).len() < 64 * 1024);
    }
}
