//! IPAMClaims of the Kubernetes network plumbing group (`k8s.cni.cncf.io/v1alpha1`), by which KubeVirt keeps the
//! addresses of a virtual machine's interfaces.
//!
//! For each interface of a virtual machine, a user or controller creates an IPAMClaim, which the machine's pods name in
//! the annotation `k8s.v1.cni.cncf.io/networks`: `[{"name": "vlan7", "ipam-claim-reference": "vm1.vlan7"}]`. For each
//! IPAMClaim, the controller creates an [`IPClaim`](super::IPClaim) with the same name, which the IPAMClaim owns. The
//! agent assigns the addresses of the IPClaim to the interface.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::{Deserialize, Serialize};

use super::is_of_kind;

/// API group of the kind `IPAMClaim`.
pub const IPAM_CLAIM_GROUP: &str = "k8s.cni.cncf.io";

/// API group and version of the kind `IPAMClaim`.
pub const IPAM_CLAIM_API_VERSION: &str = "k8s.cni.cncf.io/v1alpha1";

/// The field `kind` of IPAMClaims, also in owner references.
pub const IPAM_CLAIM_KIND: &str = "IPAMClaim";

/// Annotation of a pod in which users name the networks that the pod should be attached to. Multus reads it.
pub const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";

/// If the value of [`NETWORKS_ANNOTATION`] is longer than this many bytes, it is ignored.
const MOST_TEXT: usize = 64 << 10;
/// At most this many IPAMClaims of a pod are read.
const MOST_CLAIMS: usize = 16;
/// The maximum length of an interface's name in Linux.
const LONGEST_INTERFACE: usize = 15;

/// The fields of an IPAMClaim that Cadastre reads.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct IPAMClaimLite {
    /// The complete metadata of the IPAMClaim
    pub metadata: ObjectMeta,
    /// The spec, of which only the network is read
    #[serde(default)]
    pub spec: IPAMClaimLiteSpec,
    /// The status, of which only the addresses are read
    #[serde(default)]
    pub status: IPAMClaimIps,
}

/// The part of an IPAMClaim's spec that is read.
#[derive(Deserialize, Clone, Debug, Default)]
pub struct IPAMClaimLiteSpec {
    /// Name of the network, as in the network's CNI configuration
    #[serde(default)]
    pub network: String,
}

/// The part of an IPAMClaim's status that Cadastre reads and writes.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct IPAMClaimIps {
    /// The addresses of the interface, each with its prefix length: `10.0.0.7/24`
    #[serde(default)]
    pub ips: Vec<String>,
}

/// An IPAMClaim that a pod names for one of its interfaces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterfaceClaim {
    /// Name of the interface in the pod
    pub interface: String,
    /// Name of the IPAMClaim in the pod's namespace. The text is not checked, so it can be an invalid name
    pub claim: String,
}

/// An element of the JSON list in [`NETWORKS_ANNOTATION`].
#[derive(Deserialize)]
struct Element {
    #[serde(default)]
    interface: Option<String>,
    #[serde(default, rename = "ipam-claim-reference")]
    claim: Option<String>,
}

/// Returns the IPAMClaims that a pod names, each with its interface. If an element names no interface, its interface
/// has the name that Multus chooses: `net1` for the first element, and so on.
pub fn interface_claims(annotations: &BTreeMap<String, String>) -> Vec<InterfaceClaim> {
    let text = annotations.get(NETWORKS_ANNOTATION);
    // An annotation that is only a list of network names refers to no IPAMClaim.
    let text = text.filter(|it| it.len() <= MOST_TEXT && it.contains("ipam-claim-reference"));
    let elements = text.and_then(|it| serde_json::from_str::<Vec<Element>>(it).ok());
    let elements = elements.unwrap_or_default().into_iter().enumerate();
    let claims = elements.filter_map(|(place, element)| {
        let claim = element.claim.filter(|it| !it.is_empty())?;
        let interface = element.interface.filter(|it| !it.is_empty());
        let interface = interface.unwrap_or_else(|| format!("net{}", place + 1));
        (interface.len() <= LONGEST_INTERFACE).then_some(InterfaceClaim { interface, claim })
    });
    claims.take(MOST_CLAIMS).collect()
}

/// Returns the owner reference to an IPAMClaim, or `None` if no IPAMClaim owns the object.
pub fn ipam_claim_of(owners: &[OwnerReference]) -> Option<&OwnerReference> {
    let mut owners = owners.iter();
    owners.find(|it| is_of_kind(it, IPAM_CLAIM_GROUP, IPAM_CLAIM_KIND))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(String, String)> {
        let annotations = BTreeMap::from([(NETWORKS_ANNOTATION.to_owned(), text.to_owned())]);
        let all = interface_claims(&annotations).into_iter();
        all.map(|it| (it.interface, it.claim)).collect()
    }

    fn pair(interface: &str, claim: &str) -> (String, String) {
        (interface.to_owned(), claim.to_owned())
    }

    #[test]
    fn an_interface_without_a_name_has_the_one_that_multus_gives_it() {
        let text = r#"[
            {"name": "plain"},
            {"name": "vlan7", "namespace": "nets", "ipam-claim-reference": "vm.vlan7"},
            {"name": "vlan8", "interface": "pod4fe3", "ipam-claim-reference": "vm.vlan8", "mac": "02:00:00:00:00:01"}
        ]"#;
        let expected = [pair("net2", "vm.vlan7"), pair("pod4fe3", "vm.vlan8")];
        assert_eq!(read(text), expected);
    }

    #[test]
    fn annotations_that_name_no_ipam_claim_are_read_as_none() {
        let long = format!(
            r#"[{{"ipam-claim-reference": "{}"}}]"#,
            "a".repeat(MOST_TEXT)
        );
        for text in [
            "vlan7, vlan8",
            "",
            r#"[{"ipam-claim-reference": ""}]"#,
            r#"[{"ipam-claim-reference": 7}]"#,
            r#"{"ipam-claim-reference": "a"}"#,
            r#"[{"interface": "longer-than-15-bytes", "ipam-claim-reference": "a"}]"#,
            &long,
        ] {
            assert!(read(text).is_empty(), "{text:.80}");
        }
        let many: Vec<&str> = vec![r#"{"ipam-claim-reference": "a"}"#; 40];
        assert_eq!(read(&format!("[{}]", many.join(","))).len(), MOST_CLAIMS);
    }

    #[test]
    fn only_an_ipam_claim_of_the_network_plumbing_group_counts_as_owner() {
        let owner = |version: &str, kind: &str| OwnerReference {
            api_version: version.to_owned(),
            kind: kind.to_owned(),
            ..OwnerReference::default()
        };
        let is_one = |it: OwnerReference| ipam_claim_of(&[it]).is_some();
        assert!(is_one(owner(IPAM_CLAIM_API_VERSION, IPAM_CLAIM_KIND)));
        assert!(!is_one(owner("example.com/v1alpha1", IPAM_CLAIM_KIND)));
        assert!(!is_one(owner(IPAM_CLAIM_API_VERSION, "Network")));
    }
}
