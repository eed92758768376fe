//! Extracts the parts of this node's Node, NodeSubnet and NodeAddresses objects that the agent needs.

use std::collections::BTreeSet;

use cadastre_api::{
    NodeAddressesLite, NodeAddressesSpec, NodeLite, NodeSubnetLite, NodeSubnetSpec,
    NodeSubnetStatus, Requests,
};
use cadastre_core::Addr;

/// The parts of a NodeSubnet object that the agent needs.
#[derive(Clone, Debug, PartialEq)]
pub struct SubnetSeen {
    /// The UID; the NodeAddresses names the NodeSubnet with this UID as its owner
    pub uid: String,
    /// The resourceVersion; a write of the status succeeds only if the object still has this resourceVersion
    pub version: String,
    /// The spec, or why it cannot be parsed
    pub spec: Result<NodeSubnetSpec, String>,
    /// The status; empty if it cannot be parsed. The agent replaces such a status with its next write
    pub status: NodeSubnetStatus,
    /// Addresses that the controller or a user wants to be released
    pub named: BTreeSet<Addr>,
    /// Addresses, each with the handle of a container that a user has declared gone
    pub container_gone: BTreeSet<(Addr, String)>,
    /// Conflicts that a user has declared to be over: each address, with the time at which the conflict began (Unix
    /// milliseconds)
    pub conflict_over: BTreeSet<(Addr, i64)>,
}

impl SubnetSeen {
    /// Combines the parts of a NodeSubnet with the users' `requests`, which are read from the object's annotations.
    pub fn new(
        uid: String,
        version: String,
        spec: Result<NodeSubnetSpec, String>,
        status: NodeSubnetStatus,
        requests: Requests,
    ) -> Self {
        let suspects = spec.iter().flat_map(|spec| &spec.leak_candidates);
        let suspects = suspects.filter_map(|it| Addr::parse_lenient(&it.address));
        let by_people = requests.release.iter().chain(&requests.container_gone);
        Self {
            named: suspects.chain(by_people.map(|(addr, _)| *addr)).collect(),
            container_gone: requests.container_gone,
            conflict_over: requests.conflict_over,
            uid,
            version,
            spec,
            status,
        }
    }

    /// Returns the spec if it could be parsed and belongs to the Node object with this UID.
    pub fn spec_of(&self, node_uid: Option<&str>) -> Option<&NodeSubnetSpec> {
        let spec = self.spec.as_ref().ok()?;
        (spec.node_uid.as_deref() == node_uid).then_some(spec)
    }
}

/// Extracts the UID of a Node object. The UID distinguishes the Node from earlier Nodes of the same name.
pub fn node_uid(node: NodeLite) -> String {
    node.metadata.uid.unwrap_or_default()
}

/// Extracts the parts of a NodeSubnet object that the agent needs. If the spec or the status cannot be parsed, the
/// other parts are still extracted.
pub fn subnet(subnet: NodeSubnetLite) -> SubnetSeen {
    let annotations = subnet.metadata.annotations.unwrap_or_default();
    let requests = Requests::read(|name| annotations.get(name).map(String::as_str));
    let spec: Result<NodeSubnetSpec, _> = serde_json::from_value(subnet.spec);
    SubnetSeen::new(
        subnet.metadata.uid.unwrap_or_default(),
        subnet.metadata.resource_version.unwrap_or_default(),
        spec.map_err(|error| error.to_string()),
        serde_json::from_value(subnet.status).unwrap_or_default(),
        requests,
    )
}

/// The parts of a NodeAddresses object that the agent needs.
#[derive(Clone, Debug, PartialEq)]
pub struct AddressesSeen {
    /// The UID of the NodeSubnet that owns the NodeAddresses; empty if there is no owner
    pub owner: String,
    /// The list of addresses; empty if it cannot be parsed. The agent replaces such a list with its next write
    pub list: NodeAddressesSpec,
}

/// Extracts the parts of a NodeAddresses object that the agent needs. A spec that cannot be parsed counts as an empty
/// list.
pub fn addresses(object: NodeAddressesLite) -> AddressesSeen {
    let owners = object.metadata.owner_references.unwrap_or_default();
    AddressesSeen {
        owner: owners
            .into_iter()
            .next()
            .map_or_else(String::new, |it| it.uid),
        list: serde_json::from_value(object.spec).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_part_that_cannot_be_parsed_leaves_the_other_parts_readable() {
        let lite = |spec, status| -> NodeSubnetLite {
            serde_json::from_value(json!({
                "metadata": {"name": "n1", "resourceVersion": "7"}, "spec": spec, "status": status,
            }))
            .unwrap()
        };
        let good = subnet(lite(json!({"nodeUID": "u"}), json!({"nodeUID": 7})));
        assert_eq!(good.version, "7");
        assert_eq!(good.spec.unwrap().node_uid.as_deref(), Some("u"));
        assert_eq!(good.status, NodeSubnetStatus::default());
        let bad = subnet(lite(json!({"blocks": 7}), json!({"nodeUID": "u"})));
        assert!(bad.spec.is_err());
        assert_eq!(bad.status.node_uid.as_deref(), Some("u"));
    }
}
