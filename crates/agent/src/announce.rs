//! The file from which a routing daemon on the node, such as BIRD, FRR or GoBGP, announces the node's ranges.
//!
//! The agent renders the file from a template ([`AnnounceTemplate`]), and makes the daemon read the file ([`reload`]).
//!
//! # Guarantees
//! - A node reports a block as released only after the daemon has been made to read a file without the block. So the
//!   daemon withdraws the route before the controller allocates the block to another node. If the reload fails, the
//!   block stays with the node.
//! - A node announces borrowed ranges, and the claimed addresses of its pods, as separate routes. Routers prefer these
//!   routes, because their prefixes are longer than the prefix of the block that contains them.
//! - While another network serves the pods of the node, nothing is announced.

mod bird;
pub mod reload;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use cadastre_api::RANGES_ANNOUNCED;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde::Serialize;
use tracing::info;

use crate::conditions;
use crate::files::put;
use crate::template::{self, TemplateError};
use cadastre_core::Family;
use cadastre_core::node_allocation::{NodeAllocation, claim_of_pool, is_claim};
use reload::Reload;

/// The template for BIRD 2 and 3: a static protocol for each family, which the configuration of BIRD exports by BGP or
/// OSPF. The routes have the type `unreachable`, so that packets for unused addresses do not loop between routers.
pub const BIRD: &str = "\
# Written by the agent of Cadastre on the node {{ node }}, and written again after each change.
{% for family in [4, 6] %}
protocol static cadastre{{ family }} {
  ipv{{ family }};
  {% for range in ranges if range.family == family %}
  route {{ range.cidr }} unreachable;
  {% endfor %}
}
{% endfor %}
";

/// The names that a template can use.
const NAMES: [&str; 2] = ["node", "ranges"];

/// A template of the file, which was checked by rendering it with sample ranges.
#[derive(Clone, Debug)]
pub struct AnnounceTemplate(String);

/// The values for the names in a template.
#[derive(Serialize)]
struct Values<'a> {
    node: &'a str,
    ranges: Vec<Range<'a>>,
}

/// A range that the node announces.
#[derive(Serialize)]
struct Range<'a> {
    cidr: String,
    /// 4 or 6
    family: u8,
    /// The name of the pool; empty for a podCIDR outside every pool and for a claim
    pool: &'a str,
    /// `NAMESPACE/NAME` of the IPClaim; empty if the range is not the address of a claim
    claim: &'a str,
    /// Whether the range is a part of another node's block
    borrowed: bool,
}

impl AnnounceTemplate {
    /// Checks the template `text`: it may use only the names `node` and `ranges`, and must render with sample ranges.
    pub fn new(text: &str) -> Result<Self, TemplateError> {
        template::check(text, &NAMES)?;
        let this = Self(text.to_owned());
        let sample = |(cidr, family): (&str, u8)| Range {
            cidr: cidr.to_owned(),
            family,
            pool: "pool",
            claim: "",
            borrowed: false,
        };
        let values = Values {
            node: "node",
            ranges: [("192.0.2.0/24", 4), ("2001:db8::/64", 6)]
                .map(sample)
                .into(),
        };
        template::render(&this.0, values)?;
        Ok(this)
    }

    fn render(&self, node: &str, allocation: &NodeAllocation) -> Result<String, TemplateError> {
        let mut blocks: Vec<_> = allocation.blocks.iter().collect();
        blocks.sort_by_key(|it| it.cidr);
        let ranges = blocks.into_iter().map(|it| {
            let is_claim = is_claim(&it.pool);
            Range {
                cidr: it.cidr.to_string(),
                family: number(it.cidr.family()),
                pool: if is_claim { "" } else { &it.pool },
                claim: if is_claim {
                    claim_of_pool(&it.pool)
                } else {
                    ""
                },
                borrowed: it.borrowed,
            }
        });
        let values = Values {
            node,
            ranges: ranges.collect(),
        };
        template::render(&self.0, values)
    }
}

fn number(family: Family) -> u8 {
    match family {
        Family::V4 => 4,
        Family::V6 => 6,
    }
}

/// Writes the file when the node's ranges change, and makes the routing daemon read the file.
#[derive(Debug)]
pub struct Announcement {
    node: String,
    path: PathBuf,
    template: AnnounceTemplate,
    reload: Reload,
    /// Whether a reload has succeeded since the last write of the file. False after a start of the agent, because an
    /// earlier agent process may have ended between the write and the reload
    is_loaded: AtomicBool,
}

impl Announcement {
    /// Returns the announcement of `node` in the file `path`. The first call of [`Self::refresh`] writes the file.
    pub fn new(node: String, path: PathBuf, template: AnnounceTemplate, reload: Reload) -> Self {
        Self {
            node,
            path,
            template,
            reload,
            is_loaded: AtomicBool::new(false),
        }
    }

    /// Writes the file if it is out of date, and then reloads the daemon if needed. Must not be called concurrently.
    pub(crate) async fn refresh(&self, allocation: &NodeAllocation) -> Result<(), AnnounceError> {
        let path = self.path.display();
        let text = self.template.render(&self.node, allocation);
        let text = text.map_err(|error| AnnounceError(format!("{path}: {error}")))?;
        let written = put(&self.path, text.as_bytes(), 0o644);
        // A failed write may already have replaced the file.
        if !matches!(written, Ok(false)) {
            self.is_loaded.store(false, Ordering::Relaxed);
        }
        written.map_err(|error| AnnounceError(error.to_string()))?;
        if !self.is_loaded.load(Ordering::Relaxed) {
            let loaded = self.reload.run().await;
            loaded.map_err(|error| {
                AnnounceError(format!(
                    "{path} is written, but the routing daemon has not read it: {error}"
                ))
            })?;
            self.is_loaded.store(true, Ordering::Relaxed);
            info!(ranges = allocation.blocks.len(), "wrote {path}");
        }
        Ok(())
    }
}

/// Why the ranges are not announced, as a text for users.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AnnounceError(String);

impl AnnounceError {
    /// Returns an error with `text`, which the message of the condition `RangesAnnounced` contains.
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// Returns the condition `RangesAnnounced`. If `announced` is an error, the condition is `False` and contains its text.
pub(crate) fn condition(announced: &Result<(), AnnounceError>) -> Condition {
    let (status, reason, message) = match announced {
        Ok(()) => (
            "True",
            "Announced",
            "the routing daemon of this node has been given all ranges of the node".to_owned(),
        ),
        Err(error) => (
            "False",
            "NotAnnounced",
            format!("{error}. Until then the node releases no block (docs/bgp.md)"),
        ),
    };
    conditions::condition(RANGES_ANNOUNCED, status, reason, message)
}

#[cfg(test)]
mod tests;
