//! The CNI configuration of the node, rendered from a template.
//!
//! A template is a conflist in JSON with these placeholders:
//!
//! | placeholder | becomes |
//! |---|---|
//! | `{{MTU}}` | the MTU, a number |
//! | `{{NODE}}` | the node's name, without quotes |
//! | `{{POD_CIDRS}}` | a list of the ranges allocated to the node |
//! | `{{POOL_CIDRS}}` | a list of the ranges of the node's pools |
//! | `{{POOLS}}` | a list of the names of the node's pools |
//! | `{{ROUTES}}` | a list of default routes, `{"dst": "0.0.0.0/0"}`, one for each family of the node or of its pools |
//!
//! A list is text in JSON. Lists are sorted, so that equal allocations give equal text.
//!
//! # Guarantees
//! - The file is rendered only once the node has a range from which addresses are assigned. There is one exception: if
//!   the node gets its first range only when a pod needs one, the file is rendered without a range. Only a valid
//!   conflist is rendered.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::snapshot::pool_cidrs;
use crate::template::{self, TemplateError};
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_core::{Cidr, Family};

/// The template for pools of which a node gets several blocks. Each pod has its own link to the host.
pub const PTP: &str = r#"{
  "cniVersion": "1.0.0",
  "cniVersions": ["1.0.0", "1.1.0"],
  "name": "cadastre",
  "plugins": [
    {
      "type": "ptp",
      "mtu": {{MTU}},
      "ipam": {"type": "cadastre-ipam", "routes": {{ROUTES}}}
    },
    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
  ]
}
"#;

/// The template for pools of which a node gets one IPv4 range. The CNI plugin `bridge` allows only one IPv4 address on
/// the bridge.
pub const BRIDGE: &str = r#"{
  "cniVersion": "1.0.0",
  "cniVersions": ["1.0.0", "1.1.0"],
  "name": "cadastre",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "cni0",
      "mtu": {{MTU}},
      "isDefaultGateway": true,
      "hairpinMode": true,
      "ipam": {"type": "cadastre-ipam"}
    },
    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
  ]
}
"#;

/// A template that renders to a valid conflist.
#[derive(Clone, Debug)]
pub struct Template {
    text: String,
    network: String,
}

/// Values for the placeholders that do not depend on the node's ranges.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The name of the Node, which replaces `{{NODE}}`
    pub node: String,
    /// The MTU of pods' interfaces, in bytes
    pub mtu: u32,
}

impl Template {
    /// Checks a template by rendering it with sample values.
    pub fn new(text: &str) -> Result<Self, TemplateError> {
        let facts = Facts {
            node: "node".to_owned(),
            mtu: 1500,
        };
        let values = template_values(&NodeAllocation::default(), &facts);
        template::check(text, &values.keys().copied().collect::<Vec<_>>())?;
        let sample = template::render(text, values)?;
        let conf: Value = serde_json::from_str(&sample).map_err(TemplateError::Json)?;
        let network = conf["name"].as_str().unwrap_or_default();
        let legal = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if !network.starts_with(|c: char| c.is_ascii_alphanumeric()) || !network.chars().all(legal)
        {
            return Err(TemplateError::NoConflist(
                "name has to be a word of letters, digits, '_', '.' and '-'",
            ));
        }
        let plugins = conf["plugins"].as_array();
        let typed = |plugin: &Value| plugin["type"].as_str().is_some_and(|it| !it.is_empty());
        if !plugins.is_some_and(|all| !all.is_empty() && all.iter().all(typed)) {
            return Err(TemplateError::NoConflist(
                "plugins has to be a list of objects, each with its type",
            ));
        }
        Ok(Self {
            text: text.to_owned(),
            network: network.to_owned(),
        })
    }

    /// Returns the name of the network as rendered with sample values. So if the name contains `{{NODE}}`, the result
    /// contains `node` instead.
    pub fn network(&self) -> &str {
        &self.network
    }

    /// Returns the text of the file, or `None` while no range of the node assigns addresses. If `waits_for_pods` is
    /// true, the node gets its first range only when a pod needs it, so the text is returned even without a range.
    pub(crate) fn render(
        &self,
        holding: &NodeAllocation,
        waits_for_pods: bool,
        facts: &Facts,
    ) -> Option<String> {
        if holding.blocks.iter().all(|it| it.draining) && !waits_for_pods {
            return None;
        }
        fill(&self.text, holding, facts).ok()
    }
}

fn fill(text: &str, holding: &NodeAllocation, facts: &Facts) -> Result<String, TemplateError> {
    template::render(text, template_values(holding, facts))
}

fn template_values(holding: &NodeAllocation, facts: &Facts) -> BTreeMap<&'static str, String> {
    let own: BTreeSet<Cidr> = holding.blocks.iter().map(|it| it.cidr).collect();
    let of_pools: BTreeSet<Cidr> = pool_cidrs(holding).collect();
    let pools: BTreeSet<&str> = holding.pools.iter().map(|it| it.name.as_str()).collect();
    let has = |family: &Family| {
        let mut pools = holding.pools.iter();
        pools.any(|it| it.family(*family).is_some()) || own.iter().any(|it| it.family() == *family)
    };
    let route = |family| match family {
        Family::V4 => json!({"dst": "0.0.0.0/0"}),
        Family::V6 => json!({"dst": "::/0"}),
    };
    let routes: Vec<Value> = Family::ALL.into_iter().filter(has).map(route).collect();
    BTreeMap::from([
        ("MTU", facts.mtu.to_string()),
        ("NODE", facts.node.clone()),
        ("POD_CIDRS", json!(own).to_string()),
        ("POOL_CIDRS", json!(of_pools).to_string()),
        ("POOLS", json!(pools).to_string()),
        ("ROUTES", json!(routes).to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::testing::allocation;

    fn facts() -> Facts {
        Facts {
            node: "n1".to_owned(),
            mtu: 1450,
        }
    }

    fn render(template: &str, allocation: &NodeAllocation) -> Value {
        let template = Template::new(template).unwrap();
        let text = template.render(allocation, false, &facts()).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn the_built_in_templates_are_conflists() {
        for text in [PTP, BRIDGE] {
            assert_eq!(Template::new(text).unwrap().network(), "cadastre");
            let conf = render(text, &allocation(&["10.0.0.0/26", "fd00::/122"]));
            assert_eq!(conf["plugins"][0]["mtu"], 1450);
            assert_eq!(conf["plugins"][0]["ipam"]["type"], "cadastre-ipam");
        }
        // The node has only an IPv6 block, but its pool has IPv4 ranges, too.
        let conf = render(PTP, &allocation(&["fd00::/122"]));
        let routes = &conf["plugins"][0]["ipam"]["routes"];
        assert_eq!(*routes, json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]));
    }

    #[test]
    fn every_placeholder_is_filled_in_and_equal_allocations_give_equal_text() {
        let text = r#"{"name": "{{NODE}}-net", "plugins": [{"type": "x", "a": {{ POD_CIDRS }},
            "b": {{POOL_CIDRS}}, "c": {{POOLS}}, "d": {{ROUTES}}, "e": {{MTU}}}]}"#;
        let mut it = allocation(&["10.0.0.64/26", "10.0.0.0/26"]);
        let conf = render(text, &it);
        assert_eq!(
            conf["plugins"][0],
            json!({
                "type": "x", "a": ["10.0.0.0/26", "10.0.0.64/26"], "b": ["10.0.0.0/16"],
                "c": ["p"], "d": [{"dst": "0.0.0.0/0"}], "e": 1450,
            })
        );
        assert_eq!(conf["name"], "n1-net");
        it.blocks.reverse();
        assert_eq!(render(text, &it), conf);
    }

    #[test]
    fn nothing_is_rendered_before_the_node_has_a_range_or_waits_for_pods() {
        let template = Template::new(PTP).unwrap();
        let render = |it: &NodeAllocation, waits| template.render(it, waits, &facts());
        assert!(render(&NodeAllocation::default(), false).is_none());
        let mut draining = allocation(&["10.0.0.0/26"]);
        draining.blocks[0].draining = true;
        assert!(render(&draining, false).is_none());
        let text = render(&allocation(&[]), true).unwrap();
        assert!(
            text.contains("0.0.0.0/0") && !text.contains("::/0"),
            "{text}"
        );
    }

    #[test]
    fn a_template_that_cannot_be_used_says_why() {
        for (text, says) in [
            ("{{MTU", "line 1"),
            (
                "{{mtu}}",
                "mtu means nothing: use MTU, NODE, POD_CIDRS, POOLS, POOL_CIDRS, ROUTES",
            ),
            ("{", "no JSON"),
            (r#"{"plugins": [{"type": "x"}]}"#, "name"),
            (r#"{"name": "../x", "plugins": [{"type": "x"}]}"#, "name"),
            (r#"{"name": "x", "plugins": []}"#, "plugins"),
            (r#"{"name": "x", "plugins": [{}]}"#, "plugins"),
            (r#"{"name": "x", "type": "bridge"}"#, "plugins"),
        ] {
            let error = Template::new(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
