//! Allocations of podCIDRs that a leader may have in flight. An annotation of the Lease names them.
//!
//! A leader sends an allocation only while the Lease names it. The Lease names the allocation until the leader knows
//! the outcome. Every write of the Lease is a compare-and-swap. So the next leader reads all allocations that an
//! earlier leader can still have in flight, however long the earlier leader was suspended, and whatever its clock says.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::names::{NodeName, ObjectUid};
use cadastre_core::Cidr;

/// An allocation of podCIDRs to a node. The write of this allocation may be in flight.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteIntent {
    /// Name of the node that is to get the podCIDRs
    pub name: NodeName,
    /// UID of the node that is to get the podCIDRs; the API server rejects the write if the Node has another UID by now
    pub uid: ObjectUid,
    /// The podCIDRs, at most one per family
    pub cidrs: Vec<Cidr>,
}

/// All allocations that may be in flight, and the object versions on which they were decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WriteIntents {
    /// Allocations of podCIDRs whose outcome the leader does not know yet
    pub assignments: BTreeSet<WriteIntent>,
    /// The object versions that the leader had seen when it wrote the Lease. A new leader needs no more lists if its
    /// cache has reached these versions
    pub known: Option<SeenVersions>,
}

/// The highest `resourceVersion` that was seen, per kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeenVersions {
    /// The highest version of any Node; Nodes record podCIDRs
    pub nodes: u64,
    /// The highest version of any NodeSubnet; NodeSubnets list blocks and quarantined ranges
    pub subnets: u64,
    /// The highest version of any IPAMBlock; an IPAMBlock records one block
    pub blocks: u64,
    /// The highest version of any IPClaim; the status of an IPClaim records its addresses
    pub claims: u64,
    /// The highest version of any NodeRoutes; `None` if the leader had not read them
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<u64>,
    /// The same for FRRConfigurations
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frr_configurations: Option<u64>,
}

/// JSON of the annotation. An annotation with unknown fields is ignored as a whole, because a later version of Cadastre
/// wrote it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IntentsJson {
    /// The value of `spec.leaseTransitions` when the annotation was written. A holder with an earlier version of
    /// Cadastre keeps the annotation without updating it. Then this number differs from the field of the Lease, and the
    /// annotation is ignored.
    transitions: i64,
    /// Name and UID of each node that has an allocation in flight, with the podCIDRs
    nodes: Vec<(String, String, Vec<String>)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    known: Option<SeenVersions>,
}

impl WriteIntents {
    /// Formats the annotation for a Lease that has `transitions` as its `spec.leaseTransitions`.
    pub fn write(&self, transitions: i64) -> String {
        let nodes = self.assignments.iter().map(|intent| {
            let cidrs = intent.cidrs.iter().map(ToString::to_string).collect();
            (intent.name.to_string(), intent.uid.to_string(), cidrs)
        });
        let json = IntentsJson {
            transitions,
            nodes: nodes.collect(),
            known: self.known,
        };
        serde_json::to_string(&json).unwrap_or_default()
    }

    /// Reads the annotation of a Lease that has `transitions` as its `spec.leaseTransitions`. Returns `None` if the
    /// annotation is not reliable, for example because a holder with an earlier version of Cadastre wrote the Lease.
    pub fn read(text: &str, transitions: i64) -> Option<Self> {
        let json: IntentsJson = serde_json::from_str(text).ok()?;
        if json.transitions != transitions {
            return None;
        }
        let mut assignments = BTreeSet::new();
        for (name, uid, cidrs) in json.nodes {
            let cidrs = cidrs.iter().map(|text| Cidr::parse_strict(text).ok());
            assignments.insert(WriteIntent {
                name: name.into(),
                uid: uid.into(),
                cidrs: cidrs.collect::<Option<_>>()?,
            });
        }
        Some(WriteIntents {
            assignments,
            known: json.known,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intents() -> WriteIntents {
        let cidrs = ["10.0.1.0/24", "fd00:1::/64"];
        let cidrs = cidrs.map(|text| Cidr::parse_strict(text).unwrap());
        let intent = WriteIntent {
            name: "n1".into(),
            uid: "u1".into(),
            cidrs: cidrs.to_vec(),
        };
        WriteIntents {
            assignments: [intent].into(),
            known: Some(SeenVersions {
                nodes: 7,
                subnets: 8,
                blocks: 9,
                claims: 10,
                routes: Some(11),
                frr_configurations: None,
            }),
        }
    }

    #[test]
    fn intents_are_read_only_under_the_same_transitions() {
        for intents in [intents(), WriteIntents::default()] {
            let text = intents.write(7);
            assert_eq!(WriteIntents::read(&text, 7), Some(intents));
            assert_eq!(
                WriteIntents::read(&text, 8),
                None,
                "an older version led since"
            );
        }
    }

    #[test]
    fn an_invalid_annotation_is_ignored() {
        for text in [
            "",
            "[]",
            r#"{"transitions":7}"#,
            r#"{"transitions":7,"nodes":[["n","u",["10.0.0.300/24"]]]}"#,
            r#"{"transitions":7,"nodes":[],"holdings":["c"]}"#,
        ] {
            assert_eq!(WriteIntents::read(text, 7), None, "{text}");
        }
    }

    #[test]
    fn a_full_list_stays_small() {
        let one = intents().assignments.pop_first().unwrap();
        let assignments = (0..512).map(|i| WriteIntent {
            name: format!("ip-10-0-{i}.eu-central-1.compute.internal").into(),
            uid: format!("8d1b0a3e-0000-4000-8000-{i:012}").into(),
            ..one.clone()
        });
        let all = WriteIntents {
            assignments: assignments.collect(),
            known: intents().known,
        };
        assert!(all.write(7).len() < 64 * 1024);
    }
}
