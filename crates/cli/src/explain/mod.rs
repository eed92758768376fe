//! `kubectl cadastre explain`: why a pod may use a pool, why a node waits or keeps a block, why a pool is exhausted.
//!
//! The reasons come from [`cadastre_api::choice`], the code by which controller and agents choose pools.

mod asked;
mod claim;
mod node;
mod pod;
mod pool;
mod sandbox;

pub(crate) use node::node;
pub(crate) use pod::pod;
pub(crate) use pool::pool;

use std::fmt::Write as _;

use clap::Subcommand;
use serde::Serialize;

use super::inventory::Inventory;
use super::lists::WantedKinds;
use super::reach::ApiReach;
use super::render::{self, Style, VerbReport};
use super::show::pod_name;
use super::{ExitVerdict, Flags};
use cadastre_api::choice::{PoolCandidate, PoolStanding, Requester, choose};
use cadastre_api::{AllocationMode, AssignmentMode};
use cadastre_controller::pools::{PoolPhase, PoolState};

/// Advice for a node that should have other podCIDRs: the podCIDRs of a Node object never change.
const ANEW: &str = "drain the node (kubectl drain), delete its Node object (kubectl delete node), and restart its kubelet, which registers the node anew";

/// Explain which pools serve a pod or a node, why a node waits or keeps a block, and what fills a pool
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kubectl cadastre explain pod shop/cart-7f9c
  kubectl cadastre explain node worker-1
  kubectl cadastre explain pool default")]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Explain which pools serve a pod, and why other pools do not
    Pod {
        /// Name of the pod, or NAMESPACE/NAME; a name alone is looked up in the namespace of --namespace
        name: String,
    },
    /// Explain which pools serve a node, why it waits, and why it keeps each block
    Node {
        /// Name of the node
        name: String,
    },
    /// Explain whether a pool allocates, and what fills it
    Pool {
        /// Name of the pool
        name: String,
    },
}

/// The result of `explain`: an explanation of an object's present state.
#[derive(Debug, Serialize)]
pub(crate) struct Explanation {
    /// The explained object: its kind and name
    pub subject: String,
    /// The answer in one sentence
    pub answer: String,
    /// The reasons, one section for each subject
    pub sections: Vec<Section>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Section {
    pub title: String,
    /// One fact per line
    pub lines: Vec<String>,
}

impl Explanation {
    fn about(subject: String) -> Self {
        Explanation {
            subject,
            answer: String::new(),
            sections: Vec::new(),
        }
    }

    fn add(&mut self, title: &str, lines: Vec<String>) {
        if !lines.is_empty() {
            self.sections.push(Section {
                title: title.to_owned(),
                lines,
            });
        }
    }
}

/// Returns two lists about the pools with this allocation mode. The first list has the names of the pools that the
/// requester may use, best first. The second list has one line of text for each pool, which says why the requester may
/// or may not use the pool.
fn choice(
    mode: AllocationMode,
    requester: &Requester,
    inventory: &Inventory,
) -> (Vec<String>, Vec<String>) {
    let ledger = &inventory.registry.ledger;
    let states = inventory.registry.pools.iter();
    let states = states.filter(|state| state.allocation_mode == mode);
    let candidates: Vec<PoolCandidate> = states.map(|state| candidate(state, requester)).collect();
    let room = |candidate: &PoolCandidate| {
        let state = inventory.registry.pools.get(candidate.name);
        let families = state.into_iter().flat_map(|state| {
            let families = state.space.families();
            families.map(|family| ledger.block_counts(&state.space, family).free)
        });
        families.min().unwrap_or(0)
    };
    let choice = choose(&candidates, requester, room);
    let chosen = choice.chosen.iter().map(|it| it.name.to_owned()).collect();
    let lines = choice.to_string().lines().map(str::to_owned).collect();
    (chosen, lines)
}

fn candidate<'a>(state: &'a PoolState, requester: &Requester) -> PoolCandidate<'a> {
    PoolCandidate {
        name: &state.name,
        node: &state.selector,
        namespace: &state.terms.namespaces,
        pod: &state.terms.pods,
        priority: state.priority,
        families: state.families(),
        created: state.created,
        // A requester without a pod is a node. For nodes, pools with `assignment: Manual` are treated like pools with
        // `assignment: Automatic`, because a pod of the node may ask for such a pool by name.
        manual: requester.pod.is_some() && state.node_view.assignment == AssignmentMode::Manual,
        standing: match state.phase {
            PoolPhase::Serving => PoolStanding::Serving,
            _ => PoolStanding::Barred(&state.phase),
        },
    }
}

impl VerbReport for Explanation {
    fn text(&self, _: &Style) -> String {
        let mut text = format!("{}: {}\n", self.subject, self.answer);
        for section in &self.sections {
            let _ = write!(text, "\n{}:\n", section.title);
            for line in &section.lines {
                let _ = writeln!(text, "  {line}");
            }
        }
        text
    }
}

pub(crate) async fn exec(
    args: &ExplainArgs,
    flags: &Flags,
    reach: &ApiReach,
) -> anyhow::Result<ExitVerdict> {
    let inventory = reach.inventory(WantedKinds::PodsAndNamespaces).await?;
    let explanation = match &args.what {
        What::Pod { name } => {
            let name = pod_name(name, &reach.namespace);
            let mut explanation = pod(&name, &inventory)?;
            if let Some(pod) = sandbox::waiting(&name, &inventory) {
                let events = reach.events_of(&name, &pod.uid, sandbox::REASON).await;
                sandbox::explain(pod, &events, inventory.now, &mut explanation);
            }
            explanation
        }
        What::Node { name } => node(name, &inventory)?,
        What::Pool { name } => pool(name, &inventory)?,
    };
    render::print(&explanation, flags.output, inventory.now)?;
    Ok(ExitVerdict::Clean)
}
