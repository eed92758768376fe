//! The fixed ranges that a pool assigns to certain nodes (`spec.assignments`).
//!
//! A mistake in one assignment affects only the node of this assignment: the node waits, and the pool's condition
//! `AssignmentsUnusable` says why. The ranges that can be read are kept from all other nodes all the same, because the
//! user has named them for this node.

use std::collections::BTreeMap;

use crate::cluster::names::NodeName;
use crate::pools::is_wide;
use cadastre_api::NodeAssignment;
use cadastre_core::{Cidr, Dual, Family, FamilyRanges, IpRange};

/// The ranges that a pool assigns to one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The ranges that could be read, in the order of the spec
    pub cidrs: Vec<Cidr>,
    /// Why the node cannot get these ranges, and what to do; `None` if the assignment is usable
    pub problem: Option<String>,
}

/// All assignments of a pool, by the name of their node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignments(BTreeMap<NodeName, Assignment>);

impl Assignments {
    /// Reads and checks the assignments of a pool that has these ranges. `reserved` are the addresses that the pool
    /// never allocates.
    pub(super) fn new(
        assignments: &[NodeAssignment],
        ranges: &Dual<Option<FamilyRanges>>,
        reserved: &[IpRange],
    ) -> Self {
        let read = assignments.iter().map(|it| {
            let assignment = read(&it.cidrs, ranges, reserved);
            (NodeName::from(it.node.as_str()), assignment)
        });
        let mut all: BTreeMap<NodeName, Assignment> = read.collect();
        for (name, problem) in overlaps(&all) {
            if let Some(it) = all.get_mut(&name) {
                it.problem.get_or_insert(problem);
            }
        }
        Assignments(all)
    }

    /// Returns the assignment of the node with this name, or `None` if the spec has none for the node.
    pub fn of(&self, node: &NodeName) -> Option<&Assignment> {
        self.0.get(node)
    }

    /// Returns whether the pool assigns ranges to no node.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all assigned ranges, including those of unusable assignments.
    pub(super) fn ranges(&self) -> impl Iterator<Item = IpRange> {
        self.0
            .values()
            .flat_map(|it| &it.cidrs)
            .map(|it| (*it).into())
    }

    /// Returns the nodes whose assignments cannot be used, each with the reason.
    pub fn problems(&self) -> impl Iterator<Item = (&NodeName, &str)> {
        let all = self.0.iter();
        all.filter_map(|(name, it)| Some((name, it.problem.as_deref()?)))
    }
}

fn read(texts: &[String], ranges: &Dual<Option<FamilyRanges>>, reserved: &[IpRange]) -> Assignment {
    let (mut cidrs, mut problem) = (Vec::new(), None);
    for text in texts {
        match Cidr::parse_strict(text) {
            Ok(cidr) => cidrs.push(cidr),
            Err(error) => problem = Some(error.to_string()),
        }
    }
    let problem = problem
        .or_else(|| {
            Family::ALL
                .into_iter()
                .find_map(|it| wrong_number(it, &cidrs, ranges))
        })
        .or_else(|| cidrs.iter().find_map(|it| unsuitable(it, ranges, reserved)));
    Assignment { cidrs, problem }
}

/// Returns the problem if an assignment has not exactly one range of a family of the pool, or any of another family.
fn wrong_number(
    family: Family,
    cidrs: &[Cidr],
    ranges: &Dual<Option<FamilyRanges>>,
) -> Option<String> {
    let number = cidrs.iter().filter(|it| it.family() == family).count();
    let has_family = ranges.get(family).is_some();
    match (has_family, number) {
        (true, 1) | (false, 0) => None,
        (true, 0) => Some(format!(
            "it has no {family} range, and the pool gives each node one of each family: add an {family} CIDR to it"
        )),
        (true, _) => Some(format!("it has {number} {family} ranges: leave one")),
        (false, _) => Some(format!(
            "it has an {family} range, and the pool has no {family} cidrs: add them to the pool, or remove the range"
        )),
    }
}

/// Returns why the pool cannot allocate a range to any node, or `None` if it can.
fn unsuitable(
    cidr: &Cidr,
    ranges: &Dual<Option<FamilyRanges>>,
    reserved: &[IpRange],
) -> Option<String> {
    let own = ranges.get(cidr.family()).as_ref()?;
    let field = cidr.family().to_string().to_lowercase();
    if !own.cidrs.iter().any(|it| it.contains(cidr)) {
        return Some(format!(
            "{cidr} does not lie in one of the pool's cidrs: add its CIDR to spec.{field}.cidrs, or correct the assignment"
        ));
    }
    // A wide podCIDR does not count as allocated (`allocations/foreign.rs`), so other nodes could get its addresses.
    if is_wide(cidr) && cidr.len() < own.block_len {
        return Some(format!(
            "{cidr} is too wide for one node: assign a range that is at least as narrow as spec.{field}.blockSize, an IPv4 /20 or an IPv6 /64"
        ));
    }
    let span = reserved.iter().find(|it| it.overlaps(cidr))?;
    Some(format!(
        "{cidr} contains addresses that the pool never allocates ({}-{}: reserved, of a service range, or of a node): assign another range, or take these addresses out of spec.reserved",
        span.first(),
        span.last()
    ))
}

/// Returns the nodes whose ranges overlap those of another node. Neither of the two nodes gets its ranges, because only
/// the user knows which assignment is right.
fn overlaps(all: &BTreeMap<NodeName, Assignment>) -> Vec<(NodeName, String)> {
    let ranges = all.iter();
    let ranges = ranges.flat_map(|(name, it)| it.cidrs.iter().map(move |cidr| (*cidr, name)));
    let mut sorted: Vec<(Cidr, &NodeName)> = ranges.collect();
    sorted.sort_unstable();
    let mut found = Vec::new();
    // A CIDR sorts directly before the CIDRs inside it, so the widest CIDR so far is the one that may overlap the next.
    let mut widest: Option<(Cidr, &NodeName)> = None;
    for (cidr, name) in sorted {
        match widest.filter(|(wide, _)| wide.overlaps(&cidr)) {
            Some((wide, other)) if other != name => {
                let text = |own: &Cidr, theirs: &Cidr, other: &NodeName| {
                    format!(
                        "{own} overlaps {theirs}, which is assigned to node \"{other}\": change one of the two"
                    )
                };
                found.push((name.clone(), text(&cidr, &wide, other)));
                found.push((other.clone(), text(&wide, &cidr, name)));
            }
            Some(_) => {}
            None => widest = Some((cidr, name)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::cidr;

    fn assignment(node: &str, cidrs: &[&str]) -> NodeAssignment {
        NodeAssignment {
            node: node.to_owned(),
            cidrs: cidrs.iter().map(ToString::to_string).collect(),
        }
    }

    /// Returns the assignments of a pool with `10.0.0.0/16` (blocks of /24) and, if `has_v6`, `fd00::/48`.
    fn of_pool(assignments: &[NodeAssignment], has_v6: bool) -> Assignments {
        let ranges = |text: &str, block_len| FamilyRanges {
            cidrs: vec![cidr(text)],
            block_len,
        };
        let ranges = Dual {
            v4: Some(ranges("10.0.0.0/16", 24)),
            v6: has_v6.then(|| ranges("fd00::/48", 64)),
        };
        let reserved = [IpRange::parse("10.0.9.0-10.0.9.7").unwrap()];
        Assignments::new(assignments, &ranges, &reserved)
    }

    #[test]
    fn each_mistake_is_explained_and_affects_only_its_own_node() {
        for (cidrs, has_v6, part) in [
            (&["10.0.1.0/24"][..], false, None),
            (&["10.0.1.0/20"], false, Some("10.0.1.0/20")),
            (&["10.0.16.0/20"], false, None),
            (&["10.0.0.0/28", "fd00::/80"], true, None),
            (&["10.1.0.0/24"], false, Some("does not lie in one of")),
            (&["10.0.0.0/19"], false, Some("too wide")),
            (&["10.0.9.4/32"], false, Some("10.0.9.0-10.0.9.7")),
            (&["10.0.1.0/24"], true, Some("it has no IPv6 range")),
            (&["10.0.1.0/24", "fd00::/64"], false, Some("no IPv6 cidrs")),
            (&["10.0.1.0/24", "10.0.2.0/24"], false, Some("leave one")),
        ] {
            let given = [assignment("a", cidrs), assignment("b", &["10.0.200.0/24"])];
            let read = of_pool(&given, has_v6);
            let problem = read.of(&"a".into()).unwrap().problem.clone();
            let text = problem.clone().unwrap_or_default();
            assert_eq!(problem.is_some(), part.is_some(), "{cidrs:?}: {text}");
            assert!(text.contains(part.unwrap_or_default()), "{text}");
            let of_b = read.of(&"b".into()).unwrap();
            assert_eq!(of_b.problem.is_some(), has_v6, "b lacks the same family");
        }
    }

    #[test]
    fn of_two_assignments_that_overlap_neither_is_usable() {
        let given = [
            assignment("a", &["10.0.1.0/24"]),
            assignment("b", &["10.0.0.0/22"]),
            assignment("c", &["10.0.3.0/24"]),
            assignment("d", &["10.0.4.0/24"]),
        ];
        let read = of_pool(&given, false);
        let names: Vec<&str> = read.problems().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["a", "b", "c"]);
        let (_, of_a) = read.problems().next().unwrap();
        assert!(
            of_a.starts_with("10.0.1.0/24 overlaps 10.0.0.0/22, which is assigned to node \"b\"")
        );
        assert_eq!(read.ranges().count(), 4, "all are kept");
    }
}
