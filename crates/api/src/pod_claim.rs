//! Which IPClaim a pod uses.
//!
//! The first of these rules that applies to the pod determines its claim:
//!
//! - The pod has the annotation `cadastre.dev/claim`. The pod uses the claim with that name, which a user creates.
//! - The pod has the annotation `cadastre.dev/sticky`, and a StatefulSet controls the pod. The pod uses the claim with
//!   the pod's name. The controller creates this claim, unless a user has created it.
//! - The pod has the annotation `cadastre.dev/addresses`. The pod uses a claim for this pod alone
//!   ([`claim_of_addresses`]). The controller creates this claim, unless a range of the pod's node has the addresses.
//!
//! The controller allocates the addresses of the claim to the pod's node, and the agent assigns them to the pod.
//! Controller and agent both call [`claim_of`], so they always use the same claim. The claim is in the pod's namespace.
//!
//! Two pods can have the address of a claim at the same time if KubeVirt migrates a virtual machine from one pod to the
//! other. In this case, the same VirtualMachineInstance controls both pods ([`vmi_of`]).

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::is_of_kind;

use super::names::{
    ADDRESSES_ANNOTATION as ADDRESSES, CLAIM_ANNOTATION as CLAIM, STICKY_ANNOTATION as STICKY,
};
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;

/// At most this many characters of a wrong annotation are quoted.
const QUOTED: usize = 100;

/// The maximum length of the name of an object in the API, in bytes.
const LONGEST_NAME: usize = 253;

/// The claim that a pod uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOfPod<'a> {
    /// The claim that the annotation `cadastre.dev/claim` names. The text is not checked, so it can be an invalid name
    Annotated(&'a str),
    /// The claim with the name of the pod, because the pod's StatefulSet has sticky addresses
    Sticky(&'a str),
    /// A claim for this pod alone, with the addresses that the pod requests. The pod does not need this claim if a
    /// range of the pod's node has the addresses
    Addresses {
        /// The name of the claim
        name: String,
        /// The addresses, sorted; at most one of each family
        addresses: Vec<Addr>,
    },
}

impl ClaimOfPod<'_> {
    /// Returns the name of the claim, without the namespace, which is the namespace of the pod.
    pub fn name(&self) -> &str {
        match self {
            ClaimOfPod::Annotated(name) | ClaimOfPod::Sticky(name) => name,
            ClaimOfPod::Addresses { name, .. } => name,
        }
    }
}

/// Returns the claim that a pod uses, if any. `pod` and `uid` are the name and the UID of the pod.
pub fn claim_of<'a>(
    pod: &'a str,
    uid: &str,
    annotations: &'a BTreeMap<String, String>,
    is_of_stateful_set: bool,
) -> Option<ClaimOfPod<'a>> {
    if let Some(name) = annotations.get(CLAIM) {
        return Some(ClaimOfPod::Annotated(name.trim()));
    }
    let asks = annotations
        .get(STICKY)
        .is_some_and(|it| it.trim() == "true");
    let is_entitled = is_of_stateful_set || Mutation::StickyClaimOfBarePod.is_on();
    if asks && is_entitled {
        return Some(ClaimOfPod::Sticky(pod));
    }
    let addresses = addresses(annotations)?.ok()?;
    let name = claim_of_addresses(pod, uid);
    Some(ClaimOfPod::Addresses { name, addresses })
}

/// Returns the name of the claim for the addresses that a pod requests. The name consists of the name of the pod and a
/// hash of its UID. Because of the hash, the name differs from names that users choose, and from the name for the next
/// pod of the same name.
pub fn claim_of_addresses(pod: &str, uid: &str) -> String {
    let hash = format!("{:016x}", fnv(uid));
    let most = LONGEST_NAME - 1 - hash.len();
    let pod: String = pod.chars().take(most).collect();
    // A part of a name between two dots must not end in a hyphen.
    let pod = pod.trim_end_matches(['.', '-']);
    format!("{pod}-{hash}")
}

/// Returns whether a text can be the name of an IPClaim: a DNS subdomain (RFC 1123).
pub fn is_object_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_label = |label: &str| {
        !label.is_empty()
            && label.chars().all(inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= LONGEST_NAME && text.split('.').all(is_label)
}

/// Returns the UID of the VirtualMachineInstance that controls a pod, if any.
pub fn vmi_of(owners: &[OwnerReference]) -> Option<&str> {
    let is_vmi = |it: &&OwnerReference| is_of_kind(it, "kubevirt.io", "VirtualMachineInstance");
    let mut controlling = owners.iter().filter(|it| it.controller == Some(true));
    controlling.find(is_vmi).map(|it| it.uid.as_str())
}

/// Returns the addresses that a pod requests by `cadastre.dev/addresses`, sorted, or what is wrong with the annotation.
/// Returns `None` if the pod does not have the annotation.
pub fn addresses(annotations: &BTreeMap<String, String>) -> Option<Result<Vec<Addr>, String>> {
    let text = annotations.get(ADDRESSES)?;
    Some(read_annotation(text, address_list))
}

/// Parses the value of an annotation with `read`. An error text continues a sentence that begins with its name.
pub fn read_annotation<T>(text: &str, read: fn(&str) -> Result<T, String>) -> Result<T, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("is empty: remove it, or fill it".to_owned());
    }
    read(text).map_err(|why| {
        let text: String = text.chars().take(QUOTED).collect();
        format!("(\"{text}\") is left out of account: {why}")
    })
}

fn address_list(text: &str) -> Result<Vec<Addr>, String> {
    let mut list: Vec<Addr> = Vec::new();
    for word in text.split(',').map(str::trim) {
        let Some(addr) = Addr::parse_strict(word) else {
            let word: String = word.chars().take(QUOTED).collect();
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

/// Returns the 64-bit FNV-1a hash of a text. The names of claims contain such hashes, so this function must never
/// change.
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6a1f1c1e-6f0a-4c3e-9d9b-2f6f3c0f1b11";

    fn annotations(all: &[(&str, &str)]) -> BTreeMap<String, String> {
        let all = all.iter();
        all.map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn a_pod_of_a_stateful_set_uses_the_claim_of_its_own_name() {
        let sticky = annotations(&[(STICKY, " true "), (ADDRESSES, "10.0.0.7")]);
        let named = claim_of("web-0", UID, &sticky, true);
        assert_eq!(named, Some(ClaimOfPod::Sticky("web-0")));
        for other in ["false", "TRUE", "yes", "1", ""] {
            let other = annotations(&[(STICKY, other)]);
            assert_eq!(claim_of("web-0", UID, &other, true), None);
        }
        assert_eq!(claim_of("web-0", UID, &annotations(&[]), true), None);
    }

    #[test]
    fn the_annotation_with_a_claim_s_name_decides() {
        let all = annotations(&[(STICKY, "true"), (CLAIM, " db "), (ADDRESSES, "10.0.0.7")]);
        let expected = Some(ClaimOfPod::Annotated("db"));
        assert_eq!(claim_of("web-0", UID, &all, true), expected);
        assert_eq!(claim_of("web-0", UID, &all, false), expected);
    }

    #[test]
    fn a_pod_without_stateful_set_uses_no_claim_by_being_sticky() {
        let sticky = annotations(&[(STICKY, "true")]);
        assert_eq!(claim_of("web-5d8f-x7k2p", UID, &sticky, false), None);
    }

    #[test]
    fn a_pod_that_asks_for_addresses_uses_a_claim_of_its_own() {
        let asks = annotations(&[
            (ADDRESSES, " fd00::7, 10.0.0.7,10.0.0.7"),
            (STICKY, "false"),
        ]);
        let claim = claim_of("web", UID, &asks, true).unwrap();
        let ClaimOfPod::Addresses { name, addresses } = claim else {
            panic!("{claim:?}");
        };
        assert_eq!(name, "web-7e46b9e9c582e522", "the name must never change");
        let addresses: Vec<String> = addresses.iter().map(Addr::to_string).collect();
        assert_eq!(addresses, ["10.0.0.7", "fd00::7"]);
        for wrong in ["", "10.0.0.0/24", "10.0.0.7, 10.0.0.8", "some", "10.0.0.7,"] {
            let wrong = annotations(&[(ADDRESSES, wrong)]);
            assert_eq!(claim_of("web", UID, &wrong, false), None);
        }
    }

    #[test]
    fn the_claim_of_a_pod_has_a_valid_name_that_no_other_pod_s_claim_has() {
        let (long, other) = ("a".repeat(253), claim_of_addresses("web", "other"));
        let name = claim_of_addresses(&long, UID);
        assert_eq!(name.len(), 253);
        assert_ne!(name, claim_of_addresses(&long, "other"));
        assert_ne!(claim_of_addresses("web", UID), other);
        let dotted = format!("{}.bb", "a".repeat(235));
        let name = claim_of_addresses(&dotted, UID);
        assert!(
            name.starts_with(&"a".repeat(235)) && !name.contains(".-"),
            "{name}"
        );
    }
}
