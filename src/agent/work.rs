//! The steps of a turn: the store, what is held, what is given, what is told.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tracing::{debug, error, info, warn};

use super::choice::serving;
use super::demand::{Wishes, to_let_go, wanted};
use super::files::{put, subnet_env};
use super::leaks::{Evidence, Reason, netns_of_others};
use super::proof::gone;
use super::publish::{Next, Written};
use super::run::{Agent, Event, LOOK_PAUSE, Told};
use super::snapshot::gives;
use super::status::status;
use super::{holding, rebuild, seen, store};
use crate::api::{
    AGENT_MANAGER, Allocate, NodeSubnetLite, NodeSubnetSpec, NodeSubnetStatus, Recall, Suspect,
};
use crate::choice::Label;
use crate::ipam::Cidr;
use crate::node::{Attachment, Block, BlockState, Holding, Op, Snapshot, clock};

/// Longest wait for the API server.
const API_LIMIT: Duration = Duration::from_secs(10);
/// How long a DEL for a leak may take.
const FREE_LIMIT: Duration = Duration::from_secs(10);
/// Between two tries to make the store.
const STORE_PAUSE: Duration = Duration::from_secs(2);
/// While addresses cool, what is free changes by itself.
const COOLING_PAUSE: Duration = Duration::from_secs(15);

/// What is answered until the store can be used.
pub(super) const STARTING: &str =
    "this node's agent starts and has not opened its store yet: try again";
const REBUILDING: &str = "this node's store of addresses was lost, and the agent makes it anew from what the API server and the runtime know: nothing can be given before; see the agent's log if this lasts";

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
            self.write_files();
        }
        self.ask_namespaces();
        self.tell_readiness();
        let mut wake = if self.parts.ledger.is_open() {
            self.look_at
        } else {
            now + STORE_PAUSE
        };
        if let Some(at) = self.publish_at {
            wake = wake.min(at);
        }
        Ok(wake)
    }

    async fn open_store(&mut self) -> anyhow::Result<()> {
        let path = self.settings.store.clone();
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
        if let Some(text) = self.damage.take() {
            self.tell_node("StoreDamaged", text);
        }
        let sandboxes = match &self.witnesses.runtime {
            Some(runtime) => match runtime.addresses().await {
                Ok(sandboxes) => sandboxes,
                Err(error) => {
                    self.say_once(format!("the store cannot be made anew: {error}"));
                    return Ok(());
                }
            },
            None => Vec::new(),
        };
        let held = self.wanted_holding().unwrap_or_default();
        let told = match &self.subnet {
            Told::There(subnet) => Some(&subnet.status),
            _ => None,
        };
        let network = self.settings.cni_conf.as_ref();
        let network = network.and_then(|(_, template)| template.network());
        let known = rebuild::known(
            &held,
            told,
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

    fn use_store(&mut self, path: &Path) -> anyhow::Result<()> {
        self.parts.ledger.open(path)?;
        self.store_lost = false;
        self.say_once(String::new());
        self.to_hold = true;
        self.look_at = clock::since_boot();
        Ok(())
    }

    /// The store was damaged or removed under our feet.
    async fn store_is_lost(&mut self, why: &str) {
        warn!("{why}");
        self.parts.ledger.close(STARTING).await;
        self.store_at = None;
        self.snapshot = None;
    }

    /// What the store should hold by the API's word; `None` if that says nothing of it.
    fn wanted_holding(&mut self) -> Option<Holding> {
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
            return;
        };
        self.offer(&wanted);
        let held = wanted.clone();
        let done = self.parts.ledger.with(move |it| it.hold(&held)).await;
        if let Err(error) = done {
            self.to_hold = true;
            self.store_failed(&error).await;
            return;
        }
        match &self.subnet {
            Told::There(subnet) if is_of(&subnet.spec, &wanted.node_uid) => {
                self.publisher.seen(&subnet.version, subnet.status.clone());
            }
            _ => self.publisher.lost(),
        }
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
        let Told::There(subnet) = &self.subnet else {
            return;
        };
        let Ok(spec) = &subnet.spec else { return };
        let (pools, wrong) = serving(&spec.pools);
        for text in wrong {
            debug!("{text}");
        }
        let of_blocks = spec.pools.iter();
        known.askable = of_blocks
            .filter(|it| it.allocate == Allocate::Blocks)
            .map(|it| it.name.clone())
            .collect();
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
        let mut snapshot = match self.parts.ledger.with(|it| it.snapshot()).await {
            Ok(snapshot) => snapshot,
            Err(error) => return self.store_failed(&error).await,
        };
        let (wishes, wishes_end) = self.parts.service.known.lock().wishes.count(now);
        if self.followed {
            let mut any = false;
            for (cidr, uid) in to_let_go(&snapshot, &wishes, &self.recalled()) {
                let released = self.parts.ledger.with({
                    let uid = uid.clone();
                    move |it| it.release(cidr, &uid)
                });
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
                match self.parts.ledger.with(|it| it.snapshot()).await {
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

    fn suspects(&self) -> &[Suspect] {
        self.spec().map_or(&[], |spec| spec.suspects.as_slice())
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
        let known = self.parts.service.known.lock();
        let boot = clock::now().boot;
        let evidence = Evidence {
            boot: boot.clone(),
            sandboxes: None,
            gone: gone(netns_of_others(snapshot), &known.netns_roots),
        };
        let mut leaks = self
            .parts
            .leaks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let look = leaks.look(snapshot, &known.pods, self.suspects(), &evidence, now);
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
            let until = clock::since_boot() + FREE_LIMIT;
            match self.parts.ledger.ask(Op::Del(attachment), until).await {
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

    fn publish(&mut self) {
        self.publish_at = None;
        let Some(snapshot) = &self.snapshot else {
            return;
        };
        let now = clock::since_boot();
        let wishes: Wishes = self.parts.service.known.lock().wishes.count(now).0;
        let wants = wanted(snapshot, &wishes);
        let told = status(snapshot, &wants, &clock::now().boot);
        let next = self.publisher.next(&told, &wants, snapshot, now);
        self.parts.metrics.behind(self.publisher.lag(now));
        match next {
            Next::Nothing => {}
            Next::At(at) => self.publish_at = Some(at),
            Next::Write { version, urgent } => {
                let api: Api<NodeSubnetLite> = Api::all(self.parts.client.clone());
                let name = self.settings.node.clone();
                self.tasks.spawn(async move {
                    Event::Written(urgent, write(&api, &name, &version, &told).await)
                });
            }
        }
    }

    pub(super) fn written(&mut self, urgent: bool, written: Written) {
        let result = match &written {
            Written::Done { .. } => "done",
            Written::Outdated => "outdated",
            Written::Failed => "failed",
        };
        self.parts.metrics.wrote(urgent, result);
        self.publisher.written(written, clock::since_boot());
    }

    fn write_files(&mut self) {
        let now = clock::since_boot();
        let Some(snapshot) = &self.snapshot else {
            return;
        };
        let holding = as_holding(snapshot);
        let mut trouble = Vec::new();
        let overdue = now.saturating_sub(self.files.checked_at) > LOOK_PAUSE.1;
        if overdue {
            self.files.checked_at = now;
        }
        if let Some(path) = &self.settings.subnet_env {
            match subnet_env::render(&holding, self.settings.links) {
                Some(text) if overdue || self.files.subnet_env.as_ref() != Some(&text) => {
                    match put(path, text.as_bytes(), 0o644) {
                        Ok(new) => {
                            if new {
                                info!("wrote {}", path.display());
                            }
                            self.files.subnet_env = Some(text);
                        }
                        Err(error) => trouble.push(error.to_string()),
                    }
                }
                None if !holding.blocks.is_empty() => trouble.push(
                    "--subnet-env: the node has no podCIDR, which flannel's plugin needs: use a pool with allocate: NodeCIDR".to_owned(),
                ),
                _ => {}
            }
        }
        if let Some((path, template)) = &self.settings.cni_conf
            && let Some(text) = template.render(&holding, &self.settings.facts)
            && (overdue || self.files.conflist.as_ref() != Some(&text))
        {
            match put(path, text.as_bytes(), 0o644) {
                Ok(new) => {
                    if new {
                        info!("wrote {}", path.display());
                    }
                    self.files.conflist = Some(text);
                }
                Err(error) => trouble.push(error.to_string()),
            }
        }
        let trouble = trouble.join("; ");
        if self.files.trouble != trouble {
            if !trouble.is_empty() {
                warn!("{trouble}");
            }
            self.files.trouble = trouble;
        }
    }

    /// Asks for the labels of namespaces, where a pool goes by them.
    fn ask_namespaces(&mut self) {
        let known = self.parts.service.known.lock();
        if !known.needs_namespaces() {
            return;
        }
        let of_pods = known.pods.iter().map(|pod| pod.namespace.clone());
        let new: BTreeSet<String> = of_pods.filter(|it| !self.namespaces.contains(it)).collect();
        drop(known);
        for name in new {
            self.namespaces.insert(name.clone());
            let api: Api<PartialObjectMeta<Namespace>> = Api::all(self.parts.client.clone());
            self.tasks.spawn(async move {
                let answer = tokio::time::timeout(API_LIMIT, api.get_metadata(&name)).await;
                let labels = match answer {
                    Ok(Ok(found)) => Some(labels(found.labels())),
                    Ok(Err(error)) => {
                        warn!(namespace = name, "its labels are not known: {error}");
                        None
                    }
                    Err(_) => None,
                };
                Event::Namespace(name, labels)
            });
        }
    }

    fn tell_readiness(&self) {
        let readiness = &self.parts.readiness;
        if !self.parts.ledger.is_open() {
            let why = self.store_trouble.as_str();
            let why = if why.is_empty() { STARTING } else { why };
            return readiness.say(false, why);
        }
        let Some(snapshot) = &self.snapshot else {
            return readiness.say(false, "starting");
        };
        if !snapshot.blocks.iter().any(gives) {
            let why = match (&self.node, &self.subnet) {
                (Told::Absent, _) => "there is no Node object of this name: see --node-name",
                (_, Told::Absent) => {
                    "there is no NodeSubnet of this node: see that the controller runs and that a pool serves the node"
                }
                _ => "the node holds nothing to give addresses from yet",
            };
            return readiness.say(false, why);
        }
        readiness.say(
            true,
            if self.followed {
                "gives addresses"
            } else {
                "gives addresses from what was held last: the API server does not answer"
            },
        );
    }
}

fn is_of(spec: &Result<NodeSubnetSpec, String>, uid: &str) -> bool {
    spec.as_ref()
        .is_ok_and(|spec| spec.node_uid.as_deref() == Some(uid))
}

fn labels(labels: &std::collections::BTreeMap<String, String>) -> Vec<Label> {
    let labels = labels.iter();
    labels
        .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
        .collect()
}

/// What is held, as far as the store knows: enough for files and watchers, also without the API.
fn as_holding(snapshot: &Snapshot) -> Holding {
    let listed =
        |it: &&crate::node::BlockCount| matches!(it.state, BlockState::Held | BlockState::Draining);
    let block = |it: &crate::node::BlockCount| Block {
        cidr: it.cidr,
        uid: it.uid.clone(),
        pool: it.pool.clone(),
        draining: it.state == BlockState::Draining,
        reserved: Vec::new(),
    };
    Holding {
        node_uid: snapshot.node_uid.clone().unwrap_or_default(),
        blocks: snapshot.blocks.iter().filter(listed).map(block).collect(),
        pools: snapshot.pools.iter().map(|it| it.terms.clone()).collect(),
    }
}

/// Writes the status onto that version.
async fn write(
    api: &Api<NodeSubnetLite>,
    name: &str,
    version: &str,
    status: &NodeSubnetStatus,
) -> Written {
    let patch = Patch::Merge(json!({
        "metadata": {"resourceVersion": version},
        "status": {
            "nodeUID": status.node_uid, "pools": status.pools, "blocks": status.blocks,
            "agent": status.agent, "allocations": status.allocations,
        },
    }));
    let params = PatchParams {
        field_manager: Some(AGENT_MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let begun = Timestamp::now();
    let answer = tokio::time::timeout(API_LIMIT, api.patch_status(name, &params, &patch)).await;
    match answer {
        Ok(Ok(object)) => {
            let seen = seen::subnet(object);
            debug!(version = seen.version, "status written");
            Written::Done {
                version: seen.version,
                status: Box::new(seen.status),
            }
        }
        Ok(Err(kube::Error::Api(answer))) if answer.code == 409 => Written::Outdated,
        Ok(Err(kube::Error::Api(answer))) if answer.code == 404 => {
            debug!("there is no NodeSubnet to write to");
            Written::Failed
        }
        Ok(Err(kube::Error::Api(answer))) if matches!(answer.code, 403 | 413 | 422) => {
            warn!(
                "the status of NodeSubnet {name} is refused: {} ({}): check the agent's ClusterRole, and that CRDs and agent are of one version",
                answer.message, answer.code
            );
            Written::Failed
        }
        Ok(Err(error)) => {
            debug!(%begun, "status not written: {error}");
            Written::Failed
        }
        Err(_) => Written::Failed,
    }
}
