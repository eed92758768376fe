//! Reads the API server's audit log, to find out which requests users made.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

/// An audit log of the requests of some users. The API server writes the log if it is started with the flags of
/// [`Audit::args`].
#[derive(Debug)]
pub struct Audit {
    folder: TempDir,
}

/// API group, resource and verb of a request. If the request had a subresource, the resource is followed by
/// `/subresource`.
pub type Used = (String, String, String);

impl Audit {
    /// Prepares an audit log that records the requests of these users only.
    pub fn of(users: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let policy = json!({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata", "users": users}, {"level": "None"}],
        });
        std::fs::write(folder.path().join("policy.json"), policy.to_string())?;
        Ok(Self { folder })
    }

    /// Returns the flags that make the API server write the audit log.
    pub fn args(&self) -> Vec<String> {
        let policy = self.folder.path().join("policy.json");
        vec![
            format!("--audit-policy-file={}", policy.display()),
            format!("--audit-log-path={}", self.log().display()),
        ]
    }

    /// Returns what `user` requested, without requests that were rejected with 403 (forbidden).
    pub fn used(&self, user: &str) -> Result<BTreeSet<Used>> {
        let log = std::fs::read_to_string(self.log()).context("there is no audit log")?;
        let mut used = BTreeSet::new();
        for line in log.lines() {
            let event: Value = serde_json::from_str(line)?;
            let about = &event["objectRef"];
            let forbidden = event["responseStatus"]["code"] == 403;
            if event["user"]["username"] != user || forbidden || about.is_null() {
                continue;
            }
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let resource = match about["subresource"].as_str() {
                Some(sub) => format!("{}/{sub}", text(&about["resource"])),
                None => text(&about["resource"]),
            };
            used.insert((text(&about["apiGroup"]), resource, text(&event["verb"])));
        }
        Ok(used)
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("audit.log")
    }
}

/// Compares permissions with requests. Returns two lists: the requests that `allowed` does not cover, and the
/// permissions that no request needed.
pub fn compare(
    allowed: &[(&str, &str, &[&str])],
    used: &BTreeSet<Used>,
) -> (Vec<Used>, Vec<String>) {
    let each = |(group, resource, verbs): &(&str, &str, &[&str])| -> Vec<Used> {
        let of = |verb: &&str| {
            (
                (*group).to_owned(),
                (*resource).to_owned(),
                (*verb).to_owned(),
            )
        };
        verbs.iter().map(of).collect()
    };
    let allowed: BTreeSet<Used> = allowed.iter().flat_map(each).collect();
    let beyond = used.difference(&allowed).cloned().collect();
    let idle = allowed.difference(used);
    let idle = idle.map(|(_, resource, verb)| format!("{verb} {resource}"));
    (beyond, idle.collect())
}
