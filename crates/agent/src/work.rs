//! The steps of a turn: what is held is taken over, what is spare is let go, what is leaked is freed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tracing::{debug, info, warn};

use super::choice::serving;
use super::demand::to_let_go;
use super::leaks::{Claims, Evidence, Reason, netns_of_others};
use super::proof::{gone, note_roots};
use super::run::{Agent, Event, LOOK_PAUSE, Told};
use super::seen::SubnetSeen;
use super::snapshot::as_holding;
use cadastre_api::holding;
use cadastre_api::{FirstBlock, NodePool, NodeSubnetSpec, Recall};
use cadastre_core::holding::{Block, Holding};
use cadastre_core::{Addr, Cidr, Family};
use cadastre_node::keeper::Call;
use cadastre_node::{Attachment, Op, Snapshot, clock};

/// How long a DEL for a leak may take.
const FREE_LIMIT: Duration = Duration::from_secs(10);
/// Between two tries to make the store.
const STORE_PAUSE: Duration = Duration::from_secs(2);
/// So often it is seen to that the store is still there.
const STORE_CHECK: Duration = Duration::from_secs(5);
/// How often it is told that pods are refused as nothing is known of them.
const TURNED_AWAY_PAUSE: Duration = Duration::from_secs(60);
/// Reason of the event that says so.
const PODS_UNKNOWN: &str = "PodsUnknown";
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
            if self.look_at <= clock::since_boot() || !self.settings.store.exists() {
                self.look().await;
            }
            self.note_pods().await;
            self.publish();
            self.write_list();
            self.write_files();
        }
        let ask_at = self.ask_namespaces();
        self.tell_readiness();
        if self.parts.ledger.trouble().is_some() {
            self.look_at = self.look_at.min(now + STORE_PAUSE);
        }
        let mut wake = if self.parts.ledger.is_open() {
            self.look_at.min(now + STORE_CHECK)
        } else {
            now + STORE_PAUSE
        };
        self.tell_turned_away(now);
        let told_at = self.turned_away_at.filter(|_| self.has_turned_away());
        let told_at = told_at.map(|at| at + TURNED_AWAY_PAUSE);
        let note_at = self.notes.due_at().filter(|_| self.parts.ledger.is_open());
        for at in [self.publish_at, self.list_at, ask_at, note_at, told_at]
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
        self.parts.service.known.pods_changed();
        self.notes.changed();
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
        let askable = || spec.pools.iter().filter(|it| it.is_askable());
        known.askable = askable().map(|it| it.name.clone()).collect();
        known.gives_unasked = askable()
            .filter(|it| it.first_block == FirstBlock::OnSight)
            .any(|it| known.automatic.contains(&it.name));
        known.at_limit = at_limit(&spec.pools, &holding.blocks);
        let named: BTreeSet<&str> = spec.pools.iter().map(|it| it.name.as_str()).collect();
        let others: BTreeSet<&String> = holding.blocks.iter().map(|it| &it.pool).collect();
        known.others = others
            .into_iter()
            .filter(|it| !named.contains(it.as_str()))
            .cloned()
            .collect();
        known.serving = pools;
        known.pools_known = true;
    }

    /// Takes note in the store of what the pods here may have.
    async fn note_pods(&mut self) {
        let now = clock::since_boot();
        if self.notes.due_at().is_none_or(|at| at > now) {
            return;
        }
        if self.notes.is_unread() {
            match self.parts.ledger.with(|it| it.pod_notes()).await {
                Ok(notes) => self.notes.read(notes),
                Err(error) => {
                    self.notes.failed(now);
                    return self.store_failed(&error).await;
                }
            }
        }
        let news = self.notes.look(&self.parts.service.known.lock(), now);
        if news.is_empty() {
            return;
        }
        let (notes, gone) = (news.notes.clone(), news.gone.clone());
        let written = self
            .parts
            .ledger
            .with(move |it| it.note_pods(&notes, &gone));
        match written.await {
            Ok(()) => self.notes.written(news),
            Err(error) => {
                self.notes.failed(now);
                self.store_failed(&error).await;
            }
        }
    }

    fn has_turned_away(&self) -> bool {
        self.parts.service.known.lock().turned_away.is_some()
    }

    /// That pods are refused of which nothing is known is told, once in a while.
    fn tell_turned_away(&mut self, now: Duration) {
        if self
            .turned_away_at
            .is_some_and(|at| at + TURNED_AWAY_PAUSE > now)
        {
            return;
        }
        let pod = self.parts.service.known.lock().turned_away.take();
        let Some(pod) = pod else { return };
        self.turned_away_at = Some(now);
        self.tell_node(PODS_UNKNOWN, format!(
            "pods are refused an address, and tried again, as nothing is known of them, {pod} the last: an annotation or a label might give them another pool or address. See that the API server can be reached from this node, and that the agent may read pods and namespaces. Pools with unknownPods: Serve give to such pods at once"
        ));
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

/// The pools of which a node has as many blocks of a family as it may, and how many these are.
fn at_limit(pools: &[NodePool], blocks: &[Block]) -> BTreeMap<String, u32> {
    let count = |pool: &str, family| {
        let of_pool = blocks.iter().filter(|it| it.pool == pool);
        of_pool.filter(|it| it.cidr.family() == family).count()
    };
    let full = |pool: &&NodePool| {
        let most = pool.max_blocks_per_node.and_then(|it| it.try_into().ok());
        let is_full = |most| {
            Family::ALL
                .into_iter()
                .any(|it| count(&pool.name, it) >= most)
        };
        most.is_some_and(is_full)
    };
    let full = pools.iter().filter(full);
    full.map(|it| (it.name.clone(), it.max_blocks_per_node.unwrap_or_default()))
        .collect()
}

fn is_of(spec: &Result<NodeSubnetSpec, String>, uid: &str) -> bool {
    spec.as_ref()
        .is_ok_and(|spec| spec.node_uid.as_deref() == Some(uid))
}
