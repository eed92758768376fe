//! FRRConfigurations: the ranges of a node as prefixes that frr-k8s announces by BGP, and the neighbors that get them.

use std::collections::BTreeSet;

use super::{RouteKind, Wanted, parsed};
use crate::Context;
use crate::cluster::cache::ClusterCache;
use crate::cluster::object_cache::ObjectCache;
use crate::cluster::objects::{FrrConfiguration, Node};
use crate::cluster::request::{ObjectKind, ObjectSpec, RequestOutcome};
use crate::settings::FrrSettings;
use cadastre_api::frr::{self, FRR_PREFIX, HOSTNAME_LABEL, LONGEST_LABEL, MANAGED_BY};
use cadastre_api::{ASN_ANNOTATION, FRRConfigurationSpec, FrrNeighbor, FrrRouter};
use cadastre_core::Cidr;
use cadastre_core::mutation::Mutation;

/// The maximum length of an object's name.
const LONGEST_NAME: usize = 253;

impl RouteKind for FrrConfiguration {
    type Settings = Option<FrrSettings>;
    const KIND: ObjectKind = ObjectKind::FrrConfiguration;
    const NOT_WITHDRAWN: Mutation = Mutation::FrrNotWithdrawn;
    const FREED: Mutation = Mutation::FrrBlockFreed;

    fn cached(cache: &ClusterCache) -> &ObjectCache<Self> {
        &cache.frr_configurations
    }

    fn is_awaited(cache: &ClusterCache) -> bool {
        cache.awaits_frr_configurations
    }

    fn ranges(&self) -> BTreeSet<Cidr> {
        parsed(frr::prefixes(&self.spec))
    }

    fn ranges_of(spec: &ObjectSpec) -> BTreeSet<Cidr> {
        match spec {
            ObjectSpec::FrrConfiguration(spec) => parsed(frr::prefixes(spec)),
            _ => BTreeSet::new(),
        }
    }

    fn wanted(
        node: &Node,
        ranges: &[Cidr],
        settings: &Option<FrrSettings>,
        cx: &Context,
    ) -> Wanted {
        let Some(settings) = settings else {
            return Wanted::default();
        };
        let host = match host_of(node, cx.cache) {
            Ok(host) => host,
            Err(why) => return Wanted::none(why),
        };
        let found = cx.cache.frr_configurations.get(&node.name);
        let (asn, problem) = match asn_of(node, settings) {
            Ok(asn) => (asn, None),
            // The node keeps its present AS number, so that changes of its ranges are still announced and withdrawn.
            Err(why) => (found.and_then(|it| frr::asn(&it.spec)), Some(why)),
        };
        let spec = asn.map(|asn| {
            let router = FrrRouter {
                asn,
                neighbors: neighbors(node, &settings.neighbors),
                prefixes: ranges.iter().map(ToString::to_string).collect(),
            };
            FRRConfigurationSpec::of_node(host, router).to_json()
        });
        Wanted {
            spec: spec.map(ObjectSpec::FrrConfiguration),
            problem,
        }
    }

    fn is_as(&self, spec: &ObjectSpec) -> bool {
        matches!(spec, ObjectSpec::FrrConfiguration(spec) if frr::is_as_written(&self.spec, spec))
    }

    fn foreign(outcome: &RequestOutcome) -> Option<String> {
        let RequestOutcome::FrrConfiguration(found) = outcome else {
            return None;
        };
        let (label, value) = MANAGED_BY;
        (!found.is_ours).then(|| {
            format!(
                "the node gets no FRRConfiguration, because \"{FRR_PREFIX}{}\" lacks the label {label}={value} and so is somebody else's: rename or delete it",
                found.name
            )
        })
    }
}

impl Wanted {
    fn none(problem: String) -> Self {
        Wanted {
            spec: None,
            problem: Some(problem),
        }
    }
}

fn label<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    let mut labels = node.labels.iter();
    labels.find(|it| &*it.0 == key).map(|it| &*it.1)
}

/// Returns the value of the label by which the FRRConfiguration selects the node. The error says why there can be no
/// FRRConfiguration.
fn host_of<'a>(node: &'a Node, cache: &ClusterCache) -> Result<&'a str, String> {
    let name = &*node.name;
    let host = label(node, HOSTNAME_LABEL).unwrap_or(name);
    if FRR_PREFIX.len() + name.len() > LONGEST_NAME {
        return Err(format!(
            "the node gets no FRRConfiguration, because its name is longer than {} characters",
            LONGEST_NAME - FRR_PREFIX.len()
        ));
    }
    // With one invalid selector, frr-k8s applies no FRRConfiguration on any node.
    if host.len() > LONGEST_LABEL {
        return Err(format!(
            "the node gets no FRRConfiguration, because it lacks the label {HOSTNAME_LABEL}, and its name is too long for a label"
        ));
    }
    // A kubelet may set this label of its own Node, so the label can name another node.
    if host != name && cache.nodes.get(host).is_some() {
        return Err(format!(
            "the node gets no FRRConfiguration, because its label {HOSTNAME_LABEL} is the name of another node, \"{host}\", which would announce its ranges"
        ));
    }
    Ok(host)
}

/// Returns the AS number in the node's annotation, or else in the settings. The error reports an invalid annotation.
fn asn_of(node: &Node, settings: &FrrSettings) -> Result<Option<u32>, String> {
    let Some(text) = &node.asn else {
        return Ok(settings.asn);
    };
    let asn = frr::parse_asn(text).map(Some);
    asn.map_err(|why| {
        format!(
            "the annotation {ASN_ANNOTATION} is \"{text}\": {why}. Until it is valid, the FRRConfiguration of the node keeps the number that it has, and is not created"
        )
    })
}

/// Returns the neighbors from the settings (`all`) whose node labels match those of the node.
fn neighbors(node: &Node, all: &[FrrNeighbor]) -> Vec<serde_json::Value> {
    let is_of_node = |it: &&FrrNeighbor| {
        let mut labels = it.node_labels.iter();
        labels.all(|(key, value)| label(node, key) == Some(value))
    };
    let own = all.iter().filter(is_of_node);
    own.map(|it| it.neighbor.clone()).collect()
}
