//! Opens the store. If the store is lost, decides when to create a new one, and with which content.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tracing::{error, info, warn};

use super::cycle::{InFlight, Next, Phase};
use super::{
    AgentEffect, AgentMachine, CountedEvent, Observed, PendingOffer, STORE_PAUSE, StoreFound,
    StoreQuestion,
};
use crate::cri::Sandbox;
use crate::pods::Pod;
use crate::rebuild;
use crate::shared::WatchState;
use cadastre_api::{NodeAddressesSpec, UnknownPods};
use cadastre_core::inert::some;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_node::Now;

const REBUILDING: &str = "this node's store of addresses was lost, and the agent rebuilds it from what the API server and the runtime know: no address is assigned before that is done; see the agent's log if this lasts";

/// The maximum time that the setup of a sandbox can take. The kubelet and the runtimes give up earlier.
const SETUP_LIMIT: Duration = Duration::from_secs(300);

/// At most this many pods are named in a message.
const NAMED: usize = 4;

/// The state of the attempts to open the store.
#[derive(Debug, Default)]
pub(super) struct Opening {
    /// When to try next, as a time since boot
    pub try_at: Duration,
    /// Whether the file is lost, so that a new one must be created
    is_lost: bool,
    /// The text of the event about a damaged store. The text is kept until the event can be emitted
    damage: Option<String>,
    /// Set once only unknown addresses on second networks can delay the creation of a store; `None` before
    possible: Option<Possible>,
}

/// The moment from which on only unknown addresses on second networks can delay the creation of a store.
#[derive(Debug)]
struct Possible {
    /// The moment, as a time since boot
    since: Duration,
    /// The UIDs of the pods that had no known addresses on second networks at that moment
    unknown: BTreeSet<String>,
}

/// The next step after the store was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterClose {
    Open,
    Make,
}

/// The API objects from which a new store is created, as they were when the runtime was asked for its sandboxes.
#[derive(Debug)]
pub(super) struct StoreSources {
    holding: NodeAllocation,
    /// The published list of addresses
    list: Option<NodeAddressesSpec>,
    watched: Arc<WatchState>,
}

impl AgentMachine {
    /// Tries to open or create the store if the pause after the last attempt is over.
    pub(super) fn open(&mut self, now: &Now, effects: &mut Vec<AgentEffect>) -> Next {
        if self.opening.try_at > now.since_boot {
            return Next::Idle;
        }
        self.opening.try_at = now.since_boot + STORE_PAUSE;
        if self.opening.is_lost {
            return self.make(now, effects);
        }
        Next::Ask(InFlight::Open, StoreQuestion::Open)
    }

    pub(super) fn found(
        &mut self,
        found: StoreFound,
        now: Duration,
        effects: &mut Vec<AgentEffect>,
    ) -> Next {
        match found {
            StoreFound::Open => return self.opened(now),
            StoreFound::Nothing => {}
            StoreFound::Damaged { aside, what } => {
                effects.push(AgentEffect::Count(CountedEvent::Damaged));
                error!("{what}");
                let text = format!(
                    "the store of this node's addresses was damaged ({what}) and was moved to {}; it is rebuilt from what the API server and the runtime know. Check the disk",
                    aside.display()
                );
                // The event names the Node by its UID, so it is emitted only once the UID is known.
                self.opening.damage = Some(text);
            }
            StoreFound::Unclear(why) => {
                self.log_store_problem(why);
                return Next::Idle;
            }
        }
        self.opening.is_lost = true;
        Next::Ask(
            InFlight::Close(AfterClose::Make),
            StoreQuestion::Close(REBUILDING),
        )
    }

    pub(super) fn closed(
        &mut self,
        then: AfterClose,
        now: &Now,
        effects: &mut Vec<AgentEffect>,
    ) -> Next {
        match then {
            AfterClose::Open => {
                self.opening.try_at = now.since_boot;
                Next::Go(Phase::Open)
            }
            AfterClose::Make => self.make(now, effects),
        }
    }

    /// Creates a new store once the API has shown the Node, NodeSubnet, NodeAddresses and pods, and once the wait for
    /// addresses on second networks is over.
    fn make(&mut self, now: &Now, effects: &mut Vec<AgentEffect>) -> Next {
        let missing = match (&self.node, &self.subnet) {
            (Observed::Unknown, _) => "the API server has not told of this Node yet",
            (Observed::Absent, _) => "there is no Node object of this name: see --node-name",
            (_, Observed::Unknown) => "the API server has not told of this node's NodeSubnet yet",
            _ if matches!(self.addresses, Observed::Unknown) => {
                "the API server has not told of this node's NodeAddresses yet"
            }
            _ if !self.watched.pods.is_complete() => {
                "the API server has not told of this node's pods yet"
            }
            _ => "",
        };
        if !missing.is_empty() && !Mutation::NewStoreAtOnce.is_on() {
            self.log_store_problem(format!(
                "there is no store yet, and none can be made: {missing}"
            ));
            return Next::Idle;
        }
        let waits = self.waits_for_second_networks(now, effects);
        self.show_wait(waits);
        if waits {
            return Next::Idle;
        }
        if let Some(text) = self.opening.damage.take() {
            self.emit_node_event("StoreDamaged", text, effects);
        }
        let list = self.addresses.there().map(|it| it.list.clone());
        let sources = StoreSources {
            holding: self.wanted_holding().unwrap_or_default(),
            list,
            watched: Arc::clone(&self.watched),
        };
        Next::Ask(
            InFlight::SandboxesForStore(Box::new(sources)),
            StoreQuestion::Sandboxes,
        )
    }

    /// Creates the store from `sources` and from the list of sandboxes that the runtime has returned.
    pub(super) fn store_sources_known(
        &mut self,
        sources: StoreSources,
        sandboxes: Result<Vec<Sandbox>, String>,
    ) -> Next {
        let sandboxes = match sandboxes {
            Ok(sandboxes) => sandboxes,
            Err(error) => {
                self.log_store_problem(format!("the store cannot be rebuilt: {error}"));
                return Next::Idle;
            }
        };
        let StoreSources {
            holding,
            list,
            watched,
        } = sources;
        let network = self.settings.network.as_deref().unwrap_or_default();
        let known = rebuild::known(&holding, list.as_ref(), &sandboxes, &watched.pods, network);
        let has_addresses_outside =
            rebuild::has_addresses_outside(&holding, &sandboxes, &watched.pods);
        Next::Ask(
            InFlight::Make(known.len()),
            StoreQuestion::Make {
                holding,
                known,
                has_addresses_outside,
            },
        )
    }

    pub(super) fn made(
        &mut self,
        count: usize,
        made: Result<usize, String>,
        now: Duration,
    ) -> Next {
        match made {
            Ok(lost) => {
                info!(
                    attachments = count,
                    doubled = lost,
                    "a new store was made from the API server and the runtime"
                );
                self.opened(now)
            }
            Err(error) => {
                self.log_store_problem(error);
                Next::Idle
            }
        }
    }

    fn opened(&mut self, now: Duration) -> Next {
        self.is_open = true;
        self.opening.is_lost = false;
        self.opening.possible = None;
        self.show_wait(false);
        self.notes.forget();
        self.log_store_problem(String::new());
        self.ranges_changed = true;
        self.look_at = now;
        Next::Go(Phase::Free)
    }

    /// Tells the servers whether the creation of a store waits for addresses on second networks.
    fn show_wait(&mut self, waits: bool) {
        if self.watched.waits_for_second_networks != waits {
            let watched = self.watched_mut(PendingOffer::Changed);
            watched.waits_for_second_networks = waits;
        }
    }

    /// Returns whether the creation of a store must wait, because pods may have addresses on second networks that no
    /// source shows. The wait ends after [`SETUP_LIMIT`]. After this time, each sandbox that was being set up when the
    /// store was lost is ready or has failed. No new sandbox gets an address during the wait, because no ADD is
    /// handled. So the wait ignores pods that come later. With `unknownPods: Serve` it includes them, because a pod may
    /// get addresses before the agent sees the pod. If no agent has published a status in this boot, no store was lost,
    /// and there is no wait.
    fn waits_for_second_networks(&mut self, now: &Now, effects: &mut Vec<AgentEffect>) -> bool {
        let subnet = self.subnet();
        let published = subnet.and_then(|it| it.status.agent.as_ref());
        if published.is_none_or(|it| it.boot_id != now.boot) {
            return false;
        }
        let pools = subnet
            .and_then(|it| it.spec.as_ref().ok())
            .map(|it| &it.pools);
        let mut pools = pools.into_iter().flatten();
        let serves_unknown = pools.any(|it| it.terms.unknown_pods == UnknownPods::Serve);
        let mut unknown = rebuild::unknown(&self.watched.pods);
        let possible = self.opening.possible.get_or_insert_with(|| Possible {
            since: now.since_boot,
            unknown: unknown.iter().map(|it| it.uid.clone()).collect(),
        });
        unknown.retain(|it| serves_unknown || possible.unknown.contains(&it.uid));
        if unknown.is_empty() {
            return false;
        }
        let waits = now.since_boot < possible.since + SETUP_LIMIT;
        let name = |pod: &Arc<Pod>| format!("{}/{}", pod.namespace, pod.name);
        let names: Vec<String> = unknown.iter().map(name).collect();
        let pods = some(&names, NAMED);
        if waits {
            self.log_store_problem(format!(
                "there is no store yet, and none is made before it is known which addresses these pods have on second networks, or for {} s: {pods} (annotation k8s.v1.cni.cncf.io/network-status)",
                SETUP_LIMIT.as_secs()
            ));
        } else {
            let text = format!(
                "the store of this node's addresses is being rebuilt, and nothing says which addresses these pods have on second networks: {pods}. What was given to them in the last moments before may be given again: if in doubt, delete them"
            );
            warn!("{text}");
            self.emit_node_event("SecondNetworksUnknown", text, effects);
        }
        waits
    }
}
