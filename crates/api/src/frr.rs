//! FRRConfigurations of frr-k8s (`frrk8s.metallb.io/v1beta1`), the BGP daemon of MetalLB and others.
//!
//! With `--frr-namespace`, the controller writes one FRRConfiguration for each node. The object lists the ranges of the
//! node as prefixes, and the neighbors to which the node announces these prefixes. frr-k8s merges all FRRConfigurations
//! of a node, but announces the prefixes of an FRRConfiguration only to neighbors in the same FRRConfiguration. So the
//! neighbors have to be listed, too.

use std::collections::BTreeMap;
use std::str::FromStr;

use kube::CustomResource;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// API group and version of the kind `FRRConfiguration`.
pub const FRR_API_VERSION: &str = "frrk8s.metallb.io/v1beta1";

/// The field `kind` of FRRConfigurations.
pub const FRR_KIND: &str = "FRRConfiguration";

/// The name of a node's FRRConfiguration begins with this text. The name of the node follows.
pub const FRR_PREFIX: &str = "cadastre-";

/// Key and value of a label that all FRRConfigurations of the controller have. The controller never writes to an
/// FRRConfiguration without this label.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "cadastre");

/// Key of the Node label by which the FRRConfiguration of a node selects this node alone.
pub const HOSTNAME_LABEL: &str = "kubernetes.io/hostname";

/// The maximum length of the value of a Kubernetes label, in bytes.
pub const LONGEST_LABEL: usize = 63;

/// Field of a neighbor in the flag `--frr-neighbor`: the labels of the nodes that have the neighbor. frr-k8s does not
/// know this field, so the controller leaves the field out of FRRConfigurations.
const NODE_LABELS: &str = "nodeLabels";

/// The fields of an FRRConfiguration that the controller writes.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "frrk8s.metallb.io",
    version = "v1beta1",
    kind = "FRRConfiguration",
    namespaced,
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct FRRConfigurationSpec {
    /// Selects the node whose ranges the FRRConfiguration lists
    #[serde(default)]
    pub node_selector: FrrNodeSelector,
    /// The BGP routers of the selected node
    #[serde(default)]
    pub bgp: FrrBgp,
}

/// Selects nodes by their labels.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FrrNodeSelector {
    /// The labels that a node must have
    #[serde(default)]
    pub match_labels: BTreeMap<String, String>,
}

/// The section `bgp` of an FRRConfiguration.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct FrrBgp {
    /// The routers, one per VRF; the controller writes only the router of the default VRF
    #[serde(default)]
    pub routers: Vec<FrrRouter>,
}

/// A BGP router on the node, with its neighbors and the prefixes that it announces.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct FrrRouter {
    /// The AS number of the node
    #[serde(default)]
    pub asn: u32,
    /// The neighbors to which the router announces the prefixes, as the CRD of frr-k8s defines them
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbors: Vec<Value>,
    /// The ranges that the router announces, as CIDRs
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefixes: Vec<String>,
}

impl FRRConfigurationSpec {
    /// Returns the spec for the node whose label [`HOSTNAME_LABEL`] has the value `host`.
    pub fn of_node(host: &str, router: FrrRouter) -> Self {
        let match_labels = BTreeMap::from([(HOSTNAME_LABEL.to_owned(), host.to_owned())]);
        FRRConfigurationSpec {
            node_selector: FrrNodeSelector { match_labels },
            bgp: FrrBgp {
                routers: vec![router],
            },
        }
    }

    /// Returns the spec as JSON, in the form in which the controller sends it to the API server.
    pub fn to_json(&self) -> Value {
        json!(self)
    }
}

/// A BGP neighbor to which nodes announce their ranges, from the flag `--frr-neighbor` of the controller.
#[derive(Clone, Debug, PartialEq)]
pub struct FrrNeighbor {
    /// The labels that a node must have to announce its ranges to this neighbor; if empty, all nodes do
    pub node_labels: BTreeMap<String, String>,
    /// The neighbor as the CRD of frr-k8s defines it
    pub neighbor: Value,
}

impl FromStr for FrrNeighbor {
    type Err = String;

    /// Parses a neighbor from JSON. Without the field `toAdvertise`, all prefixes are announced to the neighbor.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut neighbor: Map<String, Value> = serde_json::from_str(text)
            .map_err(|why| format!("a neighbor is a JSON object: {why}"))?;
        let is_text = |name| neighbor.get(name).is_some_and(Value::is_string);
        if is_text("address") == is_text("interface") {
            return Err("a neighbor has either an address or an interface".to_owned());
        }
        let node_labels = neighbor.remove(NODE_LABELS);
        let node_labels = node_labels.map(BTreeMap::<String, String>::deserialize);
        let node_labels = node_labels.transpose();
        let node_labels = node_labels.map_err(|why| format!("{NODE_LABELS}: {why}"))?;
        let all = json!({"allowed": {"mode": "all"}});
        neighbor.entry("toAdvertise").or_insert(all);
        Ok(FrrNeighbor {
            node_labels: node_labels.unwrap_or_default(),
            neighbor: neighbor.into(),
        })
    }
}

/// Returns the prefixes of all routers in the spec of an FRRConfiguration. Skips malformed values.
pub fn prefixes(spec: &Value) -> impl Iterator<Item = &str> {
    let routers = spec.pointer("/bgp/routers").and_then(Value::as_array);
    let prefixes = routers.into_iter().flatten();
    let prefixes = prefixes.filter_map(|it| it.get("prefixes")?.as_array());
    prefixes.flatten().filter_map(Value::as_str)
}

/// Returns the AS number of the first router in the spec of an FRRConfiguration.
pub fn asn(spec: &Value) -> Option<u32> {
    let asn = spec.pointer("/bgp/routers/0/asn")?.as_u64()?;
    u32::try_from(asn).ok()
}

/// Returns whether `spec`, from the API server, is equal to `written`, the spec that the controller wants. Additional
/// fields of neighbors are ignored: the API server adds defaults of the CRD, which differ between releases of frr-k8s.
pub fn is_as_written(spec: &Value, written: &Value) -> bool {
    is_as(spec, written, false)
}

/// Returns whether two values are equal. If `may_have_more` is true, objects in `value` may have additional fields.
fn is_as(value: &Value, written: &Value, may_have_more: bool) -> bool {
    match (value, written) {
        (Value::Object(value), Value::Object(written)) => {
            let is_field_as = |(name, written): (&String, &Value)| {
                let may_have_more = may_have_more || name == "neighbors";
                let value = value.get(name);
                value.is_some_and(|value| is_as(value, written, may_have_more))
            };
            (may_have_more || value.len() == written.len()) && written.iter().all(is_field_as)
        }
        (Value::Array(value), Value::Array(written)) => {
            let mut pairs = value.iter().zip(written);
            let is_pair_as = |(value, written)| is_as(value, written, may_have_more);
            value.len() == written.len() && pairs.all(is_pair_as)
        }
        _ => value == written,
    }
}

/// Parses an AS number of 32 bits. Rejects 0, which is reserved (RFC 7607) and which FRR does not accept.
pub fn parse_asn(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(asn) if asn > 0 => Ok(asn),
        _ => Err("an AS number is a whole number from 1 to 4294967295".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbor_gets_all_prefixes_unless_it_says_what() {
        let read = |text: &str| text.parse::<FrrNeighbor>();
        let found = read(r#"{"address": "192.0.2.1", "asn": 64512, "nodeLabels": {"rack": "a"}}"#);
        let found = found.unwrap();
        assert_eq!(found.node_labels["rack"], "a");
        let all = json!({"allowed": {"mode": "all"}});
        let wanted = json!({"address": "192.0.2.1", "asn": 64512, "toAdvertise": all});
        assert_eq!(found.neighbor, wanted);
        let own = json!({"interface": "eth0", "asn": 1, "toAdvertise": {"allowed": {"mode": "filtered"}}});
        let found = read(&own.to_string()).unwrap();
        assert_eq!((found.neighbor, found.node_labels.len()), (own, 0));
        for wrong in [
            "192.0.2.1",
            "[]",
            r#"{"asn": 64512}"#,
            r#"{"address": "192.0.2.1", "interface": "eth0"}"#,
            r#"{"address": "192.0.2.1", "nodeLabels": ["a"]}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn further_fields_of_neighbors_are_no_change_and_everything_else_is_one() {
        let neighbor =
            || json!({"address": "192.0.2.1", "toAdvertise": {"allowed": {"mode": "all"}}});
        let spec = |neighbor: Value| {
            let router = FrrRouter {
                asn: 64_512,
                neighbors: vec![neighbor],
                prefixes: vec!["10.0.0.0/26".to_owned()],
            };
            FRRConfigurationSpec::of_node("a", router).to_json()
        };
        let written = spec(neighbor());
        let with = |name: &str, value: Value| {
            let mut neighbor = neighbor();
            neighbor[name] = value;
            is_as_written(&spec(neighbor), &written)
        };
        assert!(is_as_written(&written, &written));
        assert!(with("disableMP", json!(false)));
        assert!(with("addressFamilies", json!(["unicast"])));
        let all = json!({"allowed": {"mode": "all", "prefixes": []}});
        assert!(with("toAdvertise", all));
        assert!(!with(
            "toAdvertise",
            json!({"allowed": {"mode": "filtered"}})
        ));
        assert!(!with("toAdvertise", json!({})));
        assert!(!with("address", json!("192.0.2.2")));
        let changed = |pointer: &str, value: Value| {
            let mut spec = written.clone();
            *spec.pointer_mut(pointer).unwrap() = value;
            is_as_written(&spec, &written)
        };
        assert!(!changed("/bgp/routers/0/prefixes", json!([])));
        assert!(!changed("/bgp/routers/0/neighbors", json!([])));
        assert!(!changed("/nodeSelector", json!({})));
        let mut raw = written.clone();
        raw["raw"] = json!({"rawConfig": "router bgp 1"});
        assert!(!is_as_written(&raw, &written));
    }

    #[test]
    fn prefixes_of_all_routers_count() {
        let spec = json!({"bgp": {"routers": [
            {"asn": 7, "prefixes": ["10.0.0.0/26"]}, {"vrf": "red", "prefixes": ["10.0.1.0/26", 8]}, "none",
        ]}});
        let found: Vec<&str> = prefixes(&spec).collect();
        assert_eq!(found, ["10.0.0.0/26", "10.0.1.0/26"]);
        assert_eq!((asn(&spec), asn(&json!({}))), (Some(7), None));
        assert_eq!(prefixes(&json!({"bgp": 7})).count(), 0);
    }

    #[test]
    fn an_as_number_has_32_bits_and_is_not_zero() {
        assert_eq!(parse_asn("4200000000"), Ok(4_200_000_000));
        for wrong in ["", "0", "4294967296", "-1", "1.10", "AS64512"] {
            assert!(parse_asn(wrong).is_err(), "{wrong}");
        }
    }
}
