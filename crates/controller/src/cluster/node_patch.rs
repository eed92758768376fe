//! Builds the JSON Patches that write Nodes. Each patch tests the state on which the decision was based, so the patch
//! takes effect on exactly that state or never.

use serde_json::{Value, json};

use super::objects::NodeTaint;
use super::request::{ExhaustedChange, NodeTouch, PodCidrAllocation, TaintsChange};
use cadastre_api::{EXHAUSTED_CONDITION, TERM_ANNOTATION};
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

/// Returns the patch that replaces the taints of a Node. The patch fails if the Node's taints differ from those that
/// were read.
pub(super) fn taints_patch(change: &TaintsChange) -> Value {
    let list = |taints: &[NodeTaint]| {
        (!taints.is_empty()).then(|| taints.iter().map(taint).collect::<Value>())
    };
    let before = list(&change.before);
    let set = match list(&change.after) {
        Some(after) => json!({"op": "add", "path": "/spec/taints", "value": after}),
        None => json!({"op": "remove", "path": "/spec/taints"}),
    };
    json!([
        {"op": "test", "path": "/metadata/uid", "value": &*change.uid},
        {"op": "test", "path": "/spec/taints", "value": before},
        set,
    ])
}

fn taint(taint: &NodeTaint) -> Value {
    let mut object = json!({"key": &*taint.key, "effect": &*taint.effect});
    let others = [("value", &taint.value), ("timeAdded", &taint.time_added)];
    for (field, value) in others {
        if let Some(value) = value {
            object[field] = (**value).into();
        }
    }
    object
}

/// Returns the strategic merge patch of a Node's status that sets or removes the condition `AddressesExhausted`. `now`
/// is the time of the change.
pub(super) fn exhausted_patch(change: &ExhaustedChange, now: &str) -> Value {
    let condition = match &change.message {
        None => json!({"type": EXHAUSTED_CONDITION, "$patch": "delete"}),
        Some(message) => {
            let mut condition = json!({
                "type": EXHAUSTED_CONDITION,
                "status": "True",
                "reason": "NoFreeAddress",
                "message": &**message,
                "lastHeartbeatTime": now,
            });
            if !change.was_true {
                condition["lastTransitionTime"] = now.into();
            }
            condition
        }
    };
    json!({"metadata": {"uid": &*change.uid}, "status": {"conditions": [condition]}})
}

#[cfg(test)]
mod tests {
    use std::slice;

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
    fn taints_are_replaced_only_if_they_are_those_that_were_read() {
        let other = NodeTaint {
            key: "node.kubernetes.io/not-ready".into(),
            value: Some("x".into()),
            effect: "NoExecute".into(),
            time_added: Some("2026-01-01T00:00:00Z".into()),
        };
        let patch = |before: &[NodeTaint], after: &[NodeTaint]| {
            let change = TaintsChange {
                name: "n1".into(),
                uid: "u1".into(),
                before: before.into(),
                after: after.into(),
            };
            taints_patch(&change)
        };
        let own = NodeTaint::exhausted();
        let own_object = json!({"key": "cadastre.dev/addresses-exhausted", "effect": "NoSchedule"});
        let other_object = json!({
            "key": "node.kubernetes.io/not-ready", "value": "x", "effect": "NoExecute",
            "timeAdded": "2026-01-01T00:00:00Z",
        });
        assert_eq!(
            patch(slice::from_ref(&other), &[other.clone(), own.clone()]),
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u1"},
                {"op": "test", "path": "/spec/taints", "value": [other_object]},
                {"op": "add", "path": "/spec/taints", "value": [other_object, own_object]},
            ])
        );
        let first = patch(&[], slice::from_ref(&own));
        assert_eq!(first[1]["value"], Value::Null);
        let last = patch(&[own], &[]);
        assert_eq!(last[2], json!({"op": "remove", "path": "/spec/taints"}));
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
