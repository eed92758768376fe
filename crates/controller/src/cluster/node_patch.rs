//! Builds the JSON Patches that write Nodes. Each patch tests the state on which the decision was based, so the patch
//! takes effect on exactly that state or never.

use serde_json::{Value, json};

use super::request::{NodeTouch, PodCidrAllocation};
use cadastre_api::TERM_ANNOTATION;
use cadastre_core::mutation::Mutation;

fn term_path() -> String {
    format!(
        "/metadata/annotations/{}",
        TERM_ANNOTATION.replace('/', "~1")
    )
}

/// Returns the operation that tests that the term is still the one that was read. If the Node that was read had no
/// annotations, the operation tests that it still has no annotations, because a JSON Patch cannot test a value below a
/// missing parent.
fn test_term(term: Option<&str>, annotated: bool) -> Value {
    if annotated {
        json!({"op": "test", "path": term_path(), "value": term})
    } else {
        json!({"op": "test", "path": "/metadata/annotations", "value": null})
    }
}

/// Returns the patch that sets the term of a Node. The patch fails if the Node's term differs from the term that was
/// read.
pub(super) fn touch_patch(touch: &NodeTouch) -> Value {
    let set = if touch.annotated {
        json!({"op": "add", "path": term_path(), "value": &*touch.term})
    } else {
        json!({"op": "add", "path": "/metadata/annotations", "value": {TERM_ANNOTATION: &*touch.term}})
    };
    json!([
        {"op": "test", "path": "/metadata/uid", "value": &*touch.uid},
        test_term(touch.from.as_deref(), touch.annotated),
        set,
    ])
}

/// Returns the patch that writes podCIDRs. The patch fails if the Node has podCIDRs, or if its term differs from the
/// term that was read. The patch writes `podCIDR` and `podCIDRs` together, because the API server silently drops the
/// second family if the two fields differ.
pub(super) fn assign_patch(assignment: &PodCidrAllocation) -> Value {
    let fence = test_term(assignment.term.as_deref(), assignment.annotated);
    let mut patch = vec![
        json!({"op": "test", "path": "/metadata/uid", "value": &*assignment.uid}),
        json!({"op": "test", "path": "/spec/podCIDRs", "value": null}),
        fence,
    ];
    if Mutation::UidNotTested.is_on() {
        patch.remove(0);
    } else if Mutation::TermNotTested.is_on() {
        patch.pop();
    }
    let cidrs: Vec<String> = assignment.cidrs.iter().map(ToString::to_string).collect();
    patch.push(json!({"op": "add", "path": "/spec/podCIDR", "value": cidrs.first()}));
    patch.push(json!({"op": "add", "path": "/spec/podCIDRs", "value": cidrs}));
    Value::Array(patch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cadastre_core::Cidr;

    fn assignment(annotated: bool, term: Option<&str>) -> PodCidrAllocation {
        PodCidrAllocation {
            name: "n1".into(),
            uid: "u1".into(),
            term: term.map(Into::into),
            annotated,
            cidrs: ["10.0.1.0/24", "fd00:1::/64"]
                .iter()
                .map(|text| Cidr::parse_strict(text).unwrap())
                .collect(),
        }
    }

    #[test]
    fn the_patch_tests_before_it_writes() {
        let patch = assign_patch(&assignment(true, Some("7-x")));
        assert_eq!(
            patch,
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u1"},
                {"op": "test", "path": "/spec/podCIDRs", "value": null},
                {"op": "test", "path": "/metadata/annotations/cadastre.dev~1term", "value": "7-x"},
                {"op": "add", "path": "/spec/podCIDR", "value": "10.0.1.0/24"},
                {"op": "add", "path": "/spec/podCIDRs", "value": ["10.0.1.0/24", "fd00:1::/64"]},
            ])
        );
        assert_eq!(
            assign_patch(&assignment(true, None))[2]["value"],
            Value::Null
        );
        assert_eq!(
            assign_patch(&assignment(false, None))[2]["path"],
            "/metadata/annotations"
        );
    }

    #[test]
    fn a_touch_tests_the_term_it_replaces() {
        let touch = |annotated, from: Option<&str>| NodeTouch {
            name: "n1".into(),
            uid: "u1".into(),
            from: from.map(Into::into),
            annotated,
            term: "8-y".into(),
        };
        assert_eq!(
            touch_patch(&touch(true, Some("7-x"))),
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u1"},
                {"op": "test", "path": "/metadata/annotations/cadastre.dev~1term", "value": "7-x"},
                {"op": "add", "path": "/metadata/annotations/cadastre.dev~1term", "value": "8-y"},
            ])
        );
        assert_eq!(
            touch_patch(&touch(false, None)),
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u1"},
                {"op": "test", "path": "/metadata/annotations", "value": null},
                {"op": "add", "path": "/metadata/annotations", "value": {"cadastre.dev/term": "8-y"}},
            ])
        );
    }
}
