//! Writes the requests of `release`, `drain` and `pop` to an annotation of a node's NodeSubnet.

use std::time::Duration;

use anyhow::{Context as _, bail};

use super::inventory::SubnetFact;
use super::reach::{ApiReach, WriteOutcome};
use cadastre_api::{DRAIN_ANNOTATION, Requests, WITHDRAW_ANNOTATION};

/// The maximum number of attempts at a write. A write fails if the NodeSubnet has changed since it was read.
const TRIES: usize = 8;
/// The time between two reads of the objects while a command waits for nodes.
pub(crate) const POLL: Duration = Duration::from_millis(500);

/// Sets the annotation to the requests that `change` returns for the node. If the NodeSubnet has changed since it was
/// read, tries again.
pub(crate) async fn update(
    node: &str,
    annotation: &str,
    reach: &ApiReach,
    change: impl Fn(&SubnetFact) -> Requests,
) -> anyhow::Result<()> {
    for _ in 0..TRIES {
        let subnet = reach.subnet(node).await?;
        let subnet =
            subnet.with_context(|| format!("NodeSubnet {node} is gone: its node was deleted"))?;
        let subnet = SubnetFact::read(&subnet, reach.addresses(node).await?.as_ref());
        let requests = change(&subnet);
        if requests == subnet.requests {
            return Ok(());
        }
        let text = match annotation {
            DRAIN_ANNOTATION => requests.drain_text(),
            WITHDRAW_ANNOTATION => requests.withdraw_text(),
            _ => requests.release_text(),
        };
        let written = reach.annotate(node, &subnet.version, annotation, text.as_deref());
        if written.await? == WriteOutcome::Done {
            return Ok(());
        }
    }
    bail!("NodeSubnet {node} changes too fast to be written to: try again")
}
