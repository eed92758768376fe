//! The steps of a turn that bring up the store: opening it, a new one in place of one that was lost, and what
//! is in use already of a podCIDR that comes to the node.

use std::path::Path;
use std::time::Duration;

use tracing::{error, info, warn};

use super::run::{Agent, Told};
use super::unix::{OnlyOne, SocketError};
use super::work::STARTING;
use super::{rebuild, store};
use cadastre_core::holding::{Block, Holding};
use cadastre_node::{Known, clock};

const REBUILDING: &str = "this node's store of addresses was lost, and the agent makes it anew from what the API server and the runtime know: nothing can be given before; see the agent's log if this lasts";

/// A sandbox is set up or has failed after that: the kubelet and the runtimes give up before.
const SETUP_LIMIT: Duration = Duration::from_secs(300);

/// The first of some names.
fn some(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

impl Agent {
    pub(super) async fn open_store(&mut self) -> anyhow::Result<()> {
        let path = self.settings.store.clone();
        if !self.settings.is_store_locked && self.store_lock.is_none() {
            let folder = path.parent().unwrap_or(Path::new("/"));
            match OnlyOne::lock(folder) {
                Ok(lock) => self.store_lock = Some(lock),
                Err(error @ SocketError::Taken { .. }) => return Err(error.into()),
                Err(error) => {
                    self.say_once(error.to_string());
                    return Ok(());
                }
            }
        }
        if !self.store_lost {
            match store::find(&path).await {
                Ok(store::Found::Whole) => return self.use_store(&path),
                Ok(store::Found::Nothing) => {}
                Ok(store::Found::Damaged { aside, what }) => {
                    self.parts.metrics.damaged();
                    error!("{what}");
                    let text = format!(
                        "the store of this node's addresses was damaged ({what}) and lies in {} now; it is made anew from what the API server and the runtime know. Check the disk",
                        aside.display()
                    );
                    // Told when it is known which Node object it is about.
                    self.damage = Some(text);
                }
                Err(error) if store::is_final(&error) => return Err(error.into()),
                Err(error) => {
                    self.say_once(error.to_string());
                    return Ok(());
                }
            }
            self.store_lost = true;
            self.parts.ledger.close(REBUILDING).await;
        }
        self.make_store(&path).await
    }

    /// Makes a new store once everybody has been heard who remembers something.
    async fn make_store(&mut self, path: &Path) -> anyhow::Result<()> {
        let missing = match (&self.node, &self.subnet) {
            (Told::Unknown, _) => "the API server has not told of this Node yet",
            (Told::Absent, _) => "there is no Node object of this name: see --node-name",
            (_, Told::Unknown) => "the API server has not told of this node's NodeSubnet yet",
            _ if matches!(self.addresses, Told::Unknown) => {
                "the API server has not told of this node's NodeAddresses yet"
            }
            _ if !self.parts.service.known.lock().pods.is_complete() => {
                "the API server has not told of this node's pods yet"
            }
            _ => "",
        };
        if !missing.is_empty() {
            self.say_once(format!(
                "there is no store yet, and none can be made: {missing}"
            ));
            return Ok(());
        }
        if self.waits_for_second_networks() {
            return Ok(());
        }
        if let Some(text) = self.damage.take() {
            self.tell_node("StoreDamaged", text);
        }
        let sandboxes = match self.witnesses.sandboxes().await {
            Ok(sandboxes) => sandboxes,
            Err(error) => {
                self.say_once(format!("the store cannot be made anew: {error}"));
                return Ok(());
            }
        };
        let held = self.wanted_holding().unwrap_or_default();
        let list = match &self.addresses {
            Told::There(addresses) => Some(&addresses.list),
            _ => None,
        };
        let network = self.files.network();
        let known = rebuild::known(
            &held,
            list,
            &sandboxes,
            &self.parts.service.known.lock().pods,
            network.as_deref().unwrap_or_default(),
        );
        let count = known.len();
        match store::make(path, held, known).await {
            Ok(lost) => {
                info!(
                    attachments = count,
                    doubled = lost,
                    "a new store was made of what others remember"
                );
                self.use_store(path)
            }
            Err(error) => {
                self.say_once(error.to_string());
                Ok(())
            }
        }
    }

    /// Whether pods may have addresses on second networks of which nothing is known yet. A sandbox that was
    /// being set up when the store was lost is up or has failed after a while: no ADD is served meanwhile.
    /// Where no agent has spoken in this boot, there was no store to lose.
    fn waits_for_second_networks(&mut self) -> bool {
        let boot = clock::now().boot;
        let spoke = match &self.subnet {
            Told::There(subnet) => subnet.status.agent.as_ref(),
            _ => None,
        };
        if spoke.is_none_or(|it| it.boot_id != boot) {
            return false;
        }
        let unknown = rebuild::unknown(&self.parts.service.known.lock().pods);
        if unknown.is_empty() {
            return false;
        }
        let now = clock::since_boot();
        let until = *self.making_since.get_or_insert(now) + SETUP_LIMIT;
        let waits = now < until;
        let who = some(&unknown);
        if waits {
            self.say_once(format!(
                "there is no store yet, and none is made before it is known which addresses these pods have on second networks, or for {} s: {who} (annotation k8s.v1.cni.cncf.io/network-status)",
                SETUP_LIMIT.as_secs()
            ));
        } else {
            let text = format!(
                "the store of this node's addresses is made anew, and nothing says which addresses these pods have on second networks: {who}. What was given to them in the last moments before may be given again: if in doubt, delete them"
            );
            warn!("{text}");
            self.tell_node("SecondNetworksUnknown", text);
        }
        waits
    }

    /// Who has addresses of podCIDRs that are new to this store: until now somebody else may have given
    /// them, host-local for one. `None` as long as that cannot be known.
    pub(super) async fn known_of_new(&mut self, wanted: &Holding) -> Option<Vec<Known>> {
        let held = self.snapshot.iter().flat_map(|it| &it.blocks);
        let held: Vec<_> = held.map(|it| it.cidr).collect();
        let is_new = |it: &&Block| it.uid == wanted.node_uid && !held.contains(&it.cidr);
        let new: Vec<Block> = wanted.blocks.iter().filter(is_new).cloned().collect();
        if new.is_empty() {
            return Some(Vec::new());
        }
        if !self.parts.service.known.lock().pods.is_complete() {
            self.say_once("nothing is given from the new podCIDR yet: the API server has not told of this node's pods, which may have addresses of it".to_owned());
            return None;
        }
        let sandboxes = match self.witnesses.sandboxes().await {
            Ok(sandboxes) => sandboxes,
            Err(error) => {
                self.say_once(format!(
                    "nothing is given from the new podCIDR yet, as pods may have addresses of it: {error}"
                ));
                return None;
            }
        };
        self.say_once(String::new());
        let new = Holding {
            blocks: new,
            ..Holding::default()
        };
        let network = self.files.network().unwrap_or_default();
        let pods = &self.parts.service.known.lock().pods;
        let known = rebuild::known(&new, None, &sandboxes, pods, &network);
        if !known.is_empty() {
            info!(
                attachments = known.len(),
                "took over what others gave from this node's podCIDR"
            );
        }
        Some(known)
    }

    fn use_store(&mut self, path: &Path) -> anyhow::Result<()> {
        self.parts.ledger.open(path)?;
        self.store_lost = false;
        self.making_since = None;
        self.notes.forget();
        self.say_once(String::new());
        self.to_hold = true;
        self.look_at = clock::since_boot();
        Ok(())
    }

    /// The store was damaged or removed under our feet.
    pub(super) async fn store_is_lost(&mut self, why: &str) {
        warn!("{why}");
        self.parts.ledger.close(STARTING).await;
        self.store_at = None;
        self.snapshot = None;
    }
}
