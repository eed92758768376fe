//! The parsed form of IPClaims that all subcommands use.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde::Deserialize;

use super::lists::full_name;
use cadastre_api::{IPClaimLite, IPClaimSpec, IPClaimStatus};
use cadastre_core::Addr;

/// The parts of an IPClaim that the subcommands need.
#[derive(Clone, Debug)]
pub(crate) struct ClaimFact {
    /// `namespace/name`
    pub name: String,
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.creationTimestamp`
    pub created: Option<Timestamp>,
    /// `metadata.deletionTimestamp`; `None` if the claim is not being deleted
    pub deleted_at: Option<Timestamp>,
    /// `metadata.finalizers`
    pub finalizers: Vec<String>,
    /// `spec.addresses`: the addresses that the claim asks for; empty if it takes any address of the pool
    pub asked: Vec<Addr>,
    /// The pool that the status names; if the status names none, the pool that the spec names
    pub pool: Option<String>,
    /// `status.addresses`: the addresses that the claim has
    pub addresses: Vec<Addr>,
    /// The status; the default if it cannot be parsed
    pub status: IPClaimStatus,
}

impl ClaimFact {
    /// Parses an IPClaim. Parts that cannot be parsed are left out.
    pub(crate) fn read(claim: &IPClaimLite) -> Self {
        let meta = &claim.metadata;
        let spec = IPClaimSpec::deserialize(&claim.spec).unwrap_or_default();
        let status = IPClaimStatus::deserialize(&claim.status).unwrap_or_default();
        let read = |texts: &[String]| -> Vec<Addr> {
            let texts = texts.iter();
            texts.filter_map(|it| Addr::parse_strict(it)).collect()
        };
        ClaimFact {
            name: full_name(meta),
            uid: meta.uid.clone().unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|it| it.0),
            deleted_at: meta.deletion_timestamp.as_ref().map(|it| it.0),
            finalizers: meta.finalizers.clone().unwrap_or_default(),
            asked: read(&spec.addresses),
            pool: status.pool.clone().or(spec.pool),
            addresses: read(&status.addresses),
            status,
        }
    }

    /// The condition Ready, or `None` if no controller has looked at the claim yet.
    pub(crate) fn ready(&self) -> Option<&Condition> {
        let mut conditions = self.status.conditions.iter();
        conditions.find(|it| it.type_ == "Ready")
    }

    /// The reason of the condition Ready; empty if there is no condition.
    pub(crate) fn reason(&self) -> &str {
        self.ready().map_or("", |it| &it.reason)
    }

    /// The state of the claim as the controller describes it: the reason and the message of the condition Ready.
    pub(crate) fn words(&self) -> String {
        self.ready().map_or_else(
            || "no controller has looked at it yet".to_owned(),
            |it| format!("{}: {}", it.reason, it.message),
        )
    }

    /// Returns the namespace and the name; the namespace is empty if `name` has no slash.
    pub(crate) fn split(&self) -> (&str, &str) {
        self.name.split_once('/').unwrap_or(("", &self.name))
    }
}
