//! The steps of a turn: what is held is taken over, what is spare is let go, what is leaked is freed.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tracing::{debug, info, warn};

use super::choice::serving;
use super::demand::to_let_go;
use super::holding;
use super::leaks::{Claims, Evidence, Reason, netns_of_others};
use super::proof::{gone, note_roots};
use super::run::{Agent, Event, LOOK_PAUSE, Told};
use super::seen::SubnetSeen;
use super::snapshot::as_holding;
use crate::api::{NodeSubnetSpec, Recall};
use crate::ipam::{Addr, Cidr};
use crate::node::keeper::Call;
use crate::node::{Attachment, Holding, Op, Snapshot, clock};

/// How long a DEL for a leak may take.
const FREE_LIMIT: Duration = Duration::from_secs(10);
/// Between two tries to make the store.
const STORE_PAUSE: Duration = Duration::from_secs(2);
/// While addresses cool, what is free changes by itself.
const COOLING_PAUSE: Duration = Duration::from_secs(15);

/// What is answered until the store can be used.
pub(super) const STARTING: &str =
    "this node's agent starts and has not opened its store yet: try again";

impl Agent {
    /// Makes what is otherwise than it should be so, and says when to do that again.
    pub(super) async fn turn(&mut self) -> anyhow::Result<Duration> {
        let now = clock::since_boot();
        if !self.parts.ledger.is_open() && self.store_at.is_none_or(|at| at <= now) {
            self.store_at = Some(now + STORE_PAUSE);
            self.open_store().await?;
        }
        if self.parts.ledger.is_open() {
            if self.to_hold {
                self.take_over().await;
            }
            if self.look_at <= clock::since_boot() {
                self.look().await;
            }
            self.publish();
            self.write_list();
            self.write_files();
        }
        let ask_at = self.ask_namespaces();
        self.tell_readiness();
        let mut wake = if self.parts.ledger.is_open() {
            self.look_at
        } else {
            now + STORE_PAUSE
        };
        for at in [self.publish_at, self.list_at, ask_at]
            .into_iter()
            .flatten()
        {
            wake = wake.min(at);
        }
        Ok(wake)
    }

    /// What the store should hold by the API's word; `None` if that says nothing of it.
    pub(super) fn wanted_holding(&mut self) -> Option<Holding> {
        let uid = match &self.node {
            Told::Unknown => return None,
            // Its ranges rest: nothing new may come from them.
            Told::Absent => return Some(Holding::default()),
            Told::There(node) => node.uid.clone(),
        };
        let read = match &self.subnet {
            Told::There(subnet) => match &subnet.spec {
                Ok(spec) if spec.node_uid.as_ref() == Some(&uid) => {
                    Some(Ok(holding::read(spec, &uid)))
                }
                Ok(_) => None,
                Err(why) => Some(Err(format!(
                    "the spec of NodeSubnet {} cannot be read, what was held before goes on: {why}",
                    self.settings.node
                ))),
            },
            _ => None,
        };
        match read {
            Some(Ok((holding, wrong))) => {
                self.complain(wrong);
                return Some(holding);
            }
            Some(Err(text)) => {
                self.complain(vec![text]);
                return None;
            }
            None => {}
        }
        // Nothing is held for this Node object yet. What is held for it in the store while the
        // NodeSubnet is missing stays: the controller restores it.
        let same = self.snapshot.as_ref().and_then(|it| it.node_uid.as_ref()) == Some(&uid);
        (!same).then(|| Holding {
            node_uid: uid,
            ..Holding::default()
        })
    }

    /// Tells the publisher what to write onto: the NodeSubnet of this Node object, also while its spec
    /// cannot be read. Where there is none, nothing is tried in vain.
    fn tell_publisher(&mut self) {
        match &self.subnet {
            Told::There(subnet) if self.is_ours(subnet) => {
                self.publisher.seen(&subnet.version, subnet.status.clone());
            }
            Told::Unknown => {}
            _ => self.publisher.lost(),
        }
    }

    /// Whether the NodeSubnet is of this Node object, as far as it can be read.
    pub(super) fn is_ours(&self, subnet: &SubnetSeen) -> bool {
        let of_uid = |uid| subnet.spec.is_err() || is_of(&subnet.spec, uid);
        self.node_uid().is_some_and(of_uid)
    }

    fn complain(&mut self, wrong: Vec<String>) {
        if self.wrong != wrong {
            for text in &wrong {
                warn!("{text}");
            }
            self.wrong = wrong;
        }
    }

    async fn take_over(&mut self) {
        // What is held for which Node is in the store, also after a restart.
        if self.snapshot.is_none() {
            self.look().await;
            if self.snapshot.is_none() {
                return;
            }
        }
        self.to_hold = false;
        let Some(wanted) = self.wanted_holding() else {
            return self.tell_publisher();
        };
        let Some(known) = self.known_of_new(&wanted).await else {
            self.to_hold = true;
            self.look_at = clock::since_boot() + STORE_PAUSE;
            return;
        };
        self.offer(&wanted);
        let held = wanted.clone();
        let done = self.parts.ledger.with(move |it| {
            it.hold(&held)?;
            it.adopt(&known)
        });
        let done = done.await;
        if let Err(error) = done {
            self.to_hold = true;
            self.store_failed(&error).await;
            return;
        }
        // Not before: what is written next must be decided by what was taken over.
        self.tell_publisher();
        if wanted != self.holding {
            let blocks = wanted.blocks.len();
            info!(node.uid = %wanted.node_uid, blocks, pools = wanted.pools.len(), "holds");
            self.holding = wanted;
        }
        self.parts.service.held.send_modify(|count| *count += 1);
        self.look_at = clock::since_boot();
    }

    /// Tells the service which pools there are.
    fn offer(&self, holding: &Holding) {
        let mut known = self.parts.service.known.lock();
        known.automatic = holding
            .pools
            .iter()
            .filter(|it| it.automatic)
            .map(|it| it.name.clone())
            .collect();
        let giving = holding.blocks.iter().filter(|it| !it.draining);
        known.giving = giving.map(|it| it.pool.clone()).collect();
        let Told::There(subnet) = &self.subnet else {
            return;
        };
        let Ok(spec) = &subnet.spec else { return };
        let (pools, wrong) = serving(&spec.pools, &known.giving);
        for text in wrong {
            debug!("{text}");
        }
        let askable = spec.pools.iter().filter(|it| it.is_askable());
        known.askable = askable.map(|it| it.name.clone()).collect();
        let named: BTreeSet<&str> = spec.pools.iter().map(|it| it.name.as_str()).collect();
        let others: BTreeSet<&String> = holding.blocks.iter().map(|it| &it.pool).collect();
        known.others = others
            .into_iter()
            .filter(|it| !named.contains(it.as_str()))
            .cloned()
            .collect();
        known.serving = pools;
    }

    /// Looks at the store, lets go what can go, and looks for leaks.
    async fn look(&mut self) {
        let now = clock::since_boot();
        self.looked_at = now;
        self.look_at = now + LOOK_PAUSE.1;
        let mut snapshot = match self.parts.ledger.look().await {
            Ok(snapshot) => snapshot,
            Err(error) => return self.store_failed(&error).await,
        };
        let (wishes, wishes_end) = self.parts.service.known.lock().wishes.count(now);
        if self.followed {
            let mut any = false;
            for (cidr, uid) in to_let_go(&snapshot, &wishes, &self.recalled()) {
                let released = self.parts.ledger.with(move |it| it.release(cidr, &uid));
                match released.await {
                    Ok(true) => {
                        info!(block = %cidr, "let go of an empty block");
                        any = true;
                    }
                    Ok(false) => {}
                    Err(error) => return self.store_failed(&error).await,
                }
            }
            if any {
                self.has_let_go = true;
                match self.parts.ledger.look().await {
                    Ok(later) => snapshot = later,
                    Err(error) => return self.store_failed(&error).await,
                }
            }
        }
        self.look_for_leaks(&snapshot, now);
        self.parts.metrics.set(&snapshot);
        let holding = Arc::new(as_holding(&snapshot));
        self.parts.holding.send_if_modified(|is| {
            let differs = *is != holding;
            *is = holding;
            differs
        });
        if snapshot.blocks.iter().any(|it| it.counts.cooling > 0) {
            self.look_at = self.look_at.min(now + COOLING_PAUSE);
        }
        if let Some(at) = wishes_end {
            self.look_at = self.look_at.min(at);
        }
        self.snapshot = Some(snapshot);
    }

    async fn store_failed(&mut self, error: &super::ledger::LedgerError) {
        if error.is_lost() {
            self.store_is_lost(&error.to_string()).await;
        } else {
            warn!("{error}");
            self.look_at = clock::since_boot() + STORE_PAUSE;
        }
    }

    /// Blocks that are asked back if they are empty.
    fn recalled(&self) -> BTreeSet<Cidr> {
        let recalled = self.spec().into_iter().flat_map(|spec| &spec.blocks);
        recalled
            .filter(|it| it.recall == Some(Recall::IfEmpty))
            .filter_map(|it| Cidr::parse_strict(&it.cidr).ok())
            .collect()
    }

    /// What the controller and people say of attachments on this node.
    fn claims(&self) -> Claims<'_> {
        static NOTHING: BTreeSet<(Addr, String)> = BTreeSet::new();
        let container_gone = match &self.subnet {
            Told::There(subnet) => &subnet.container_gone,
            _ => &NOTHING,
        };
        let spec = self.spec();
        Claims {
            suspects: spec.map_or(&[], |spec| spec.suspects.as_slice()),
            container_gone,
        }
    }

    /// The spec, if it is of this Node object.
    fn spec(&self) -> Option<&NodeSubnetSpec> {
        let Told::There(subnet) = &self.subnet else {
            return None;
        };
        let spec = subnet.spec.as_ref().ok()?;
        (spec.node_uid.as_deref() == self.node_uid()).then_some(spec)
    }

    fn look_for_leaks(&mut self, snapshot: &Snapshot, now: Duration) {
        let mut known = self.parts.service.known.lock();
        let paths = snapshot.tenants.iter().map(|it| it.netns.as_str());
        note_roots(paths, &mut known.netns_roots);
        let boot = clock::now().boot;
        let evidence = Evidence {
            boot: boot.clone(),
            gone: gone(netns_of_others(snapshot), &known.netns_roots),
            ..Evidence::default()
        };
        let mut leaks = self
            .parts
            .leaks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let look = leaks.look(snapshot, &known.pods, self.claims(), &evidence, now);
        self.parts.metrics.suspicious(leaks.count());
        drop(leaks);
        let roots = known.netns_roots.clone();
        drop(known);
        if let Some(at) = look.next {
            self.look_at = self.look_at.min(at.max(now + LOOK_PAUSE.0));
        }
        if !look.due.is_empty() && !self.proving {
            self.proving = true;
            let witnesses = self.witnesses.clone();
            self.tasks
                .spawn(async move { Event::Proven(witnesses.prove(look.due, boot, roots).await) });
        }
    }

    pub(super) async fn free(&mut self, proven: Vec<(Attachment, Reason)>) {
        for (attachment, reason) in proven {
            let name = format!(
                "{}/{}/{}",
                attachment.network, attachment.container_id, attachment.ifname
            );
            let call = Call::until(clock::since_boot() + FREE_LIMIT);
            match self.parts.ledger.ask(Op::Del(attachment), call).await {
                Ok(_) => {
                    info!(
                        attachment = name,
                        reason = reason.as_str(),
                        "freed what was leaked"
                    );
                    self.parts.metrics.freed(reason);
                    self.look_at = clock::since_boot();
                }
                Err(refusal) => warn!(attachment = name, "a leak stays: {refusal}"),
            }
        }
    }
}

fn is_of(spec: &Result<NodeSubnetSpec, String>, uid: &str) -> bool {
    spec.as_ref()
        .is_ok_and(|spec| spec.node_uid.as_deref() == Some(uid))
}
