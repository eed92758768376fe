//! Pools that violate a rule because they are older than the rule.

use std::time::Duration;

use cadastre_api::crd;
use cadastre_e2e::wait::until;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{Lab, causes, dry_run, pool};

/// Returns the CRDs without CEL rules and patterns. The types of fields stay.
pub fn without_rules() -> String {
    let mut crds = serde_json::to_value(crd::all()).unwrap();
    strip(&mut crds);
    let each = crds.as_array().unwrap().iter();
    let each = each.map(|it| serde_json::to_string(it).unwrap());
    each.collect::<Vec<String>>().join("\n---\n")
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for rule in ["x-kubernetes-validations", "pattern"] {
                fields.retain(|name, value| name != rule || value.is_object());
            }
            fields.values_mut().for_each(strip);
        }
        Value::Array(all) => all.iter_mut().for_each(strip),
        _ => {}
    }
}

/// Returns a spec that violates every rule.
fn wrong() -> Value {
    let labels = json!({"matchLabels": {"not a key": "not a value"}});
    json!({
        "allocationMode": "Blocks", "ipv4": {"cidrs": ["10.0.0.0/16"], "gateway": "10.9.9.9"},
        "reserved": ["10.9.0.1"], "nodeSelector": labels, "podSelector": labels,
        "dns": {"nameservers": ["x"], "domain": " ", "search": ["a b"], "options": ["a b"]},
    })
}

impl Lab {
    /// Creates a pool that violates the rules, then installs the rules. Changes of the pool must succeed, unless the
    /// change itself violates a rule.
    pub(crate) async fn what_older_rules_let_in_stays_usable(&self) {
        self.create(&pool("older", &wrong())).await;
        self.apply("crds.yaml", &crd::yaml().unwrap()).await;
        until("the rules hold", Duration::from_secs(30), async || {
            let refused = self.pools.create(&dry_run(), &pool("new", &wrong())).await;
            Ok(refused.err().map(|_| ()))
        })
        .await
        .unwrap();
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let patch = async |change: Value| {
            let patch = Patch::Merge(change);
            self.pools.patch("older", &params, &patch).await
        };
        for change in [
            json!({"metadata": {"labels": {"a": "b"}, "finalizers": ["cadastre.dev/ranges-allocated"]}}),
            json!({"spec": {"priority": 7, "disabled": true, "cooldownSeconds": 1}}),
            json!({"spec": {"ipv4": {"cidrs": ["10.0.0.0/16", "10.1.0.0/16"]}}}),
            json!({"spec": {"reserved": ["10.0.0.1"], "nodeSelector": null, "dns": null}}),
        ] {
            let answer = patch(change.clone()).await;
            assert!(answer.is_ok(), "{change}: {:?}", answer.err());
        }
        let status = Patch::Merge(json!({"status": {"nodes": 1}}));
        let told = self.pools.patch_status("older", &params, &status).await;
        assert!(told.is_ok(), "{:?}", told.err());
        for (change, field) in [
            (json!({"reserved": ["10.9.0.2"]}), "spec.reserved"),
            (
                json!({"ipv4": {"gateway": "10.9.9.8"}}),
                "spec.ipv4.gateway",
            ),
            (
                json!({"nodeSelector": {"matchLabels": {"no key": "a"}}}),
                "spec.nodeSelector.matchLabels",
            ),
            (json!({"dns": {"options": ["b a"]}}), "spec.dns.options[0]"),
        ] {
            let answer = patch(json!({"spec": change})).await;
            let complaints = causes(&answer.unwrap_err());
            assert!(
                complaints.iter().any(|(it, _)| it == field),
                "{change}: {complaints:?}"
            );
        }
    }
}
