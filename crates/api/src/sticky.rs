//! Sticky addresses: the annotations by which each pod of a StatefulSet has an IPClaim of its own.
//!
//! The names of a StatefulSet's pods are stable: `web-0`, `web-1` and so on. So a claim with the name of such a pod is
//! the claim of the ordinal: the next pod of this ordinal gets the same addresses.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::is_of_kind;

use super::names::{
    CLAIM_ANNOTATION as CLAIM, POOLS_ANNOTATION, STICKY_ANNOTATION as STICKY,
    STICKY_TTL_ANNOTATION as TTL,
};

/// The longest time that a claim can stay after its use, in seconds.
pub(crate) const LONGEST_TTL: u32 = i32::MAX.unsigned_abs();

/// The maximum number of characters of a wrong annotation that an error quotes.
const QUOTED: usize = 100;

/// Returns a message for each wrong annotation about sticky addresses of a pod. The message says what is wrong, and
/// what to do. Apart from these messages, wrong annotations are ignored.
pub fn sticky_errors(
    annotations: &BTreeMap<String, String>,
    is_of_stateful_set: bool,
) -> Vec<String> {
    let mut errors = Vec::new();
    let ignored = |name: &str, text: &str, what: &str| {
        let text: String = text.chars().take(QUOTED).collect();
        format!("annotation {name} (\"{text}\") is left out of account: {what}")
    };
    let asked = annotations.get(STICKY).map(|it| it.trim());
    match asked {
        None | Some("false") => {}
        Some("true") if annotations.contains_key(CLAIM) => {
            let what = format!("{CLAIM} decides. Remove one of them");
            errors.push(ignored(STICKY, "true", &what));
        }
        Some("true") if is_of_stateful_set => {}
        Some("true") => {
            let what = format!(
                "the pod belongs to no StatefulSet, so no later pod has its name. Create an IPClaim, and name it in the annotation {CLAIM}"
            );
            errors.push(ignored(STICKY, "true", &what));
        }
        Some(text) => errors.push(ignored(STICKY, text, "write \"true\" or \"false\"")),
    }
    let Some(text) = annotations.get(TTL) else {
        return errors;
    };
    if ttl(annotations).is_none() {
        let what = format!("write a number of seconds, at most {LONGEST_TTL}");
        errors.push(ignored(TTL, text, &what));
    } else if asked.is_none() {
        let what = format!("it belongs to {STICKY}: \"true\", which the pod does not have");
        errors.push(ignored(TTL, text, &what));
    }
    errors
}

/// Returns `spec.ttlSecondsAfterUse` of the claim that the controller creates for a pod. Returns `None` if the
/// annotation is absent or wrong.
pub fn ttl(annotations: &BTreeMap<String, String>) -> Option<u32> {
    let seconds = annotations.get(TTL)?.trim().parse().ok()?;
    (seconds <= LONGEST_TTL).then_some(seconds)
}

/// Returns the names of the pools from which the sticky claim of a pod may get its addresses, best first. The pod's
/// annotation `cadastre.dev/pools` lists them.
pub fn pools(annotations: &BTreeMap<String, String>) -> impl Iterator<Item = &str> {
    let lists = annotations.get(POOLS_ANNOTATION).into_iter();
    let names = lists.flat_map(|it| it.split(',')).map(str::trim);
    names.filter(|name| !name.is_empty())
}

/// Returns the StatefulSet that controls a pod, if any.
pub fn stateful_set(owners: &[OwnerReference]) -> Option<&OwnerReference> {
    let mut owners = owners.iter();
    owners.find(|it| it.controller == Some(true) && is_of_kind(it, "apps", "StatefulSet"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(all: &[(&str, &str)]) -> BTreeMap<String, String> {
        let all = all.iter();
        all.map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn a_sticky_pod_without_stateful_set_is_told_what_to_do() {
        let errors = sticky_errors(&annotations(&[(STICKY, "true")]), false);
        assert_eq!(errors.len(), 1);
        let part = "belongs to no StatefulSet";
        assert!(errors[0].contains(part), "{errors:?}");
    }

    #[test]
    fn wrong_annotations_are_reported_with_what_to_do() {
        let errors = |all: &[(&str, &str)]| sticky_errors(&annotations(all), true);
        let none: [String; 0] = [];
        assert_eq!(errors(&[(STICKY, "true"), (TTL, "0")]), none);
        assert_eq!(errors(&[(STICKY, "false"), (TTL, "60")]), none);
        let reported = |all: &[(&str, &str)], part: &str| {
            let errors = errors(all);
            assert!(errors.len() == 1 && errors[0].contains(part), "{errors:?}");
        };
        reported(
            &[(STICKY, "yes")],
            r#"("yes") is left out of account: write "true""#,
        );
        reported(
            &[(STICKY, "true"), (CLAIM, "db")],
            "cadastre.dev/claim decides",
        );
        reported(&[(TTL, "60")], r#"belongs to cadastre.dev/sticky: "true""#);
        for wrong in ["1h", "-1", "2147483648", ""] {
            let part = "write a number of seconds, at most 2147483647";
            reported(&[(STICKY, "true"), (TTL, wrong)], part);
            assert_eq!(ttl(&annotations(&[(TTL, wrong)])), None);
        }
        assert_eq!(ttl(&annotations(&[(TTL, " 3600 ")])), Some(3600));
    }

    #[test]
    fn only_the_controlling_stateful_set_counts() {
        let owner = |version: &str, kind: &str, controller: Option<bool>| OwnerReference {
            api_version: version.to_owned(),
            kind: kind.to_owned(),
            controller,
            ..OwnerReference::default()
        };
        let is_one = |it: OwnerReference| stateful_set(&[it]).is_some();
        assert!(is_one(owner("apps/v1", "StatefulSet", Some(true))));
        assert!(!is_one(owner("apps/v1", "StatefulSet", None)));
        assert!(!is_one(owner("apps/v1", "ReplicaSet", Some(true))));
        assert!(!is_one(owner(
            "apps.kruise.io/v1",
            "StatefulSet",
            Some(true)
        )));
        assert!(!is_one(owner("v1", "StatefulSet", Some(true))));
    }

    #[test]
    fn the_pools_of_the_claim_are_those_of_the_pod_s_annotation() {
        let named = annotations(&[(POOLS_ANNOTATION, " a ,, b")]);
        assert_eq!(pools(&named).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(pools(&annotations(&[])).next(), None);
    }
}
