//! The loop: what watches and plugins bring is taken in, and whatever should be otherwise is made so.
//!
//! Level-triggered: each turn compares what is held, given and told with what should be, whatever
//! brought it about. One task owns all state; only what takes long (the API server, the runtime) runs
//! beside it and comes back as a message.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::addresses::Schedule;
use super::cri::Runtime;
use super::events::{self, Events};
use super::files::kept::Kept;
use super::files::others::Standing;
use super::known::Inner;
use super::leaks::{Leaks, Reason};
use super::ledger::Ledger;
use super::masquerade::Masquerade;
use super::namespaces::Namespace;
use super::notes::Notes;
use super::outward::{Cut, Listed};
use super::pods::{self, Pod};
use super::proof::Witnesses;
use super::publish::{Publisher, Written};
use super::seen;
use super::seen::{AddressesSeen, NodeSeen, SubnetSeen};
use super::service::Service;
use super::unix::OnlyOne;
use crate::metrics::AgentMetrics;
use cadastre_api::{NodeAddressesLite, NodeLite, NodeSubnetLite, PodLite};
use cadastre_core::holding::Holding;
use cadastre_daemon::telemetry::Readiness;
use cadastre_daemon::watch::Change;
use cadastre_daemon::watch::{LastHeard, Patience, Pauses, Source, Step, follow};
use cadastre_node::{Attachment, Snapshot, clock};

/// Steps of watches that may wait for the loop.
const BACKLOG: usize = 256;
/// First and longest pause of a watch after an error, without jitter.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(20));
/// Objects a page of a list: a full page is in memory at once.
const PAGE: u32 = 50;
/// Looks at the store are so far apart at least, and at most: a plugin may have worked on it alone.
pub(super) const LOOK_PAUSE: (Duration, Duration) =
    (Duration::from_millis(200), Duration::from_secs(60));

/// Settings of the loop.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's name
    pub node: String,
    /// The store
    pub store: PathBuf,
    /// Whether this process has the lock of the store's folder
    pub is_store_locked: bool,
    /// What can wait is told once in that time
    pub publish_interval: Duration,
    /// The list of addresses is told once in that time
    pub addresses_interval: Duration,
    /// How long an attachment is suspicious before it may be freed
    pub leak_grace: Duration,
    /// The runtime's socket, if it may be asked
    pub cri: Option<PathBuf>,
    /// Whether to masquerade
    pub masquerade: bool,
}

/// What the loop works with.
pub struct Parts {
    /// The API server
    pub client: Client,
    /// The store
    pub ledger: Ledger,
    /// Operations of plugins
    pub service: Arc<Service>,
    /// What `/readyz` says
    pub readiness: Readiness,
    /// Where figures go
    pub metrics: AgentMetrics,
    /// What people are told
    pub events: Events,
    /// Which attachments may be leaked
    pub leaks: Arc<Mutex<Leaks>>,
    /// What the node holds, for those who want to know
    pub holding: watch::Sender<Arc<Holding>>,
    /// Ends the loop
    pub stop: CancellationToken,
}

/// Something that the loop takes in.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "short-lived, and few")]
pub(super) enum Event {
    Node(Step<NodeSeen>),
    Subnet(Step<SubnetSeen>),
    Addresses(Step<AddressesSeen>),
    Pod(Step<Pod>),
    Written(bool, Written),
    Listed(Listed),
    Proven(Vec<(Attachment, Reason)>),
    Namespace(String, Option<Namespace>),
}

/// What the API server has said of an object of this node.
#[derive(Debug, Default)]
pub(super) enum Told<T> {
    /// Nothing yet
    #[default]
    Unknown,
    /// There is none
    Absent,
    /// This
    There(T),
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Agent {
    pub settings: Settings,
    pub parts: Parts,
    pub witnesses: Witnesses,
    pub node: Told<NodeSeen>,
    pub subnet: Told<SubnetSeen>,
    pub addresses: Told<AddressesSeen>,
    /// Whether the watch of the NodeSubnet gets through
    pub followed: bool,
    /// Whether the running lists have shown the Node, the NodeSubnet and the NodeAddresses
    listed: (bool, bool, bool),
    /// What of the API's word is to be taken over into the store
    pub to_hold: bool,
    /// Tries to open or make the store go on then
    pub store_at: Option<Duration>,
    pub store_lost: bool,
    /// No other agent uses the store
    pub store_lock: Option<OnlyOne>,
    /// Since when a new store waits for what pods have on second networks
    pub making_since: Option<Duration>,
    /// What is to be told of a store that was damaged
    pub damage: Option<String>,
    /// What was said last of what keeps the store from being made
    pub store_trouble: String,
    pub snapshot: Option<Snapshot>,
    pub holding: Holding,
    /// When to look at the store again
    pub look_at: Duration,
    pub looked_at: Duration,
    pub publisher: Publisher,
    pub publish_at: Option<Duration>,
    /// When the list of addresses is written
    pub schedule: Schedule,
    pub list_at: Option<Duration>,
    /// The last list, if it was stored only in part
    pub list_cut: Option<Box<Cut>>,
    /// Whether the last status was stored only in part
    pub is_cut: bool,
    pub proving: bool,
    pub wrong: Vec<String>,
    /// Whether a block was let go of since the start
    pub has_let_go: bool,
    pub files: Kept,
    /// What was told last of whether another's network has the node's pods
    pub served: Option<Standing>,
    /// What the pods here may have
    pub notes: Notes,
    /// When it was last told that pods are refused as nothing is known of them
    pub turned_away_at: Option<Duration>,
    /// Not there where others masquerade
    pub masquerade: Option<Masquerade>,
    pub tasks: JoinSet<Event>,
}

/// Runs until the stop token says so and a write that is on its way has come back. An error is one
/// that only people can mend.
pub async fn run(settings: Settings, parts: Parts, files: Kept) -> anyhow::Result<()> {
    let (out, events) = mpsc::channel(BACKLOG);
    let seed = seed(&settings.node);
    let node = &settings.node;
    let client = || parts.client.clone();
    let heard = || parts.readiness.last_heard();
    let by_name = format!("metadata.name={node}");
    let of_node = format!("spec.nodeName={node}");
    let mut following = JoinSet::new();
    following.spawn(follow(
        source::<NodeLite>("nodes", client(), &by_name, seed, heard()),
        out.clone(),
        seen::node,
        |step| Some(Event::Node(step)),
    ));
    following.spawn(follow(
        source::<NodeSubnetLite>(
            "nodesubnets",
            client(),
            &by_name,
            seed.rotate_left(16),
            heard(),
        ),
        out.clone(),
        seen::subnet,
        |step| Some(Event::Subnet(step)),
    ));
    following.spawn(follow(
        source::<NodeAddressesLite>(
            "nodeaddresses",
            client(),
            &by_name,
            seed.rotate_left(48),
            heard(),
        ),
        out.clone(),
        seen::addresses,
        |step| Some(Event::Addresses(step)),
    ));
    following.spawn(follow(
        source::<PodLite>("pods", client(), &of_node, seed.rotate_left(32), heard()),
        out,
        pods::read,
        |step| Some(Event::Pod(step)),
    ));
    let now = clock::since_boot();
    let witnesses = Witnesses {
        client: client(),
        node: settings.node.clone(),
        runtime: settings.cri.as_deref().map(Runtime::new),
    };
    let masquerade = settings.masquerade.then(Masquerade::default);
    let agent = Agent {
        publisher: Publisher::new(settings.publish_interval, seed, now),
        schedule: Schedule::new(
            settings.addresses_interval,
            settings.publish_interval,
            seed.rotate_left(8),
            now,
        ),
        settings,
        parts,
        witnesses,
        node: Told::Unknown,
        subnet: Told::Unknown,
        addresses: Told::Unknown,
        followed: false,
        listed: (false, false, false),
        to_hold: false,
        store_at: Some(now),
        store_lost: false,
        store_lock: None,
        making_since: None,
        damage: None,
        store_trouble: String::new(),
        snapshot: None,
        holding: Holding::default(),
        look_at: now,
        looked_at: Duration::ZERO,
        publish_at: None,
        list_at: None,
        list_cut: None,
        is_cut: false,
        proving: false,
        wrong: Vec::new(),
        has_let_go: false,
        files,
        served: None,
        notes: Notes::default(),
        turned_away_at: None,
        masquerade,
        tasks: JoinSet::new(),
    };
    agent.run(events).await
}

/// What of a kind `fields` selects, which the API server has an index for.
fn source<K>(
    kind: &'static str,
    client: Client,
    fields: &str,
    seed: u64,
    heard: LastHeard,
) -> Source<K>
where
    K: kube::Resource<DynamicType = ()>,
{
    Source {
        kind,
        api: Api::all(client),
        fields: Some(fields.to_owned()),
        page: Some(PAGE),
        pauses: Pauses::new(PAUSE.0, PAUSE.1, seed),
        doubtful: true,
        patience: Patience::default(),
        heard,
    }
}

/// The same for a node at each start, and another for each node.
fn seed(node: &str) -> u64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    node.bytes().fold(0xcbf2_9ce4_8422_2325, mix)
}

impl Agent {
    async fn run(mut self, mut events: mpsc::Receiver<Event>) -> anyhow::Result<()> {
        let service = Arc::clone(&self.parts.service);
        let stop = self.parts.stop.clone();
        loop {
            let wake = self.turn().await?;
            let pause = wake.saturating_sub(clock::since_boot());
            tokio::select! {
                Some(event) = events.recv() => {
                    self.on(event).await;
                    // What is there already is taken in before anything is decided.
                    while let Ok(event) = events.try_recv() {
                        self.on(event).await;
                    }
                }
                Some(Ok(event)) = self.tasks.join_next() => self.on(event).await,
                () = service.changed.notified() => {
                    self.look_at = self.look_at.min(self.looked_at + LOOK_PAUSE.0);
                }
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => break,
            }
        }
        while self.publisher.is_writing() || self.schedule.is_writing() {
            match self.tasks.join_next().await {
                Some(Ok(event)) => self.on(event).await,
                _ => break,
            }
        }
        Ok(())
    }

    async fn on(&mut self, event: Event) {
        match event {
            Event::Node(step) => {
                if let Some(told) = take_in(step, &mut self.listed.0) {
                    self.node = told;
                    self.to_hold = true;
                }
            }
            Event::Subnet(step) => {
                self.followed = gets_through(&step, self.followed);
                let is_first = !self.listed.1;
                if is_first && matches!(step, Step::Change(Change::Applied(_))) {
                    self.publisher.relisted();
                }
                if let Some(told) = take_in(step, &mut self.listed.1) {
                    self.subnet = told;
                    self.to_hold = true;
                }
            }
            Event::Addresses(step) => {
                if let Some(told) = take_in(step, &mut self.listed.2) {
                    self.addresses = told;
                }
            }
            Event::Pod(step) => self.on_pod(step),
            Event::Written(urgent, written) => self.written(urgent, written),
            Event::Listed(listed) => self.list_written(listed),
            Event::Proven(proven) => {
                self.proving = false;
                self.free(proven).await;
            }
            Event::Namespace(name, answer) => {
                let now = clock::since_boot();
                let service = &self.parts.service;
                service.known.lock().namespaces.answered(&name, answer, now);
                service.known.pods_changed();
                self.notes.changed();
            }
        }
    }

    fn on_pod(&mut self, step: Step<Pod>) {
        let service = &self.parts.service;
        let mut known = service.known.lock();
        known.pods_followed = gets_through(&step, known.pods_followed);
        known.pods_troubled |= matches!(step, Step::Trouble);
        known.pods_troubled &= !known.pods_followed;
        let Step::Change(change) = step else {
            return;
        };
        let Inner {
            pods, namespaces, ..
        } = &mut *known;
        if let Change::Applied(pod) = &change
            && pods.by_uid(&pod.uid).is_none()
        {
            namespaces.pod_came(&pod.namespace);
        }
        let some_gone = matches!(change, Change::Listed | Change::Deleted(_));
        let is_news = !matches!(change, Change::Restarted { .. } | Change::Reached(_));
        pods.change(change);
        if some_gone {
            namespaces.keep_those_of(pods);
            known.forget_complaints();
        }
        drop(known);
        if is_news {
            self.notes.changed();
            service.known.pods_changed();
            // A pod that has gone may have left its addresses behind.
            self.look_at = self.look_at.min(self.looked_at + LOOK_PAUSE.0);
        }
    }

    pub(super) fn node_uid(&self) -> Option<&str> {
        match &self.node {
            Told::There(node) => Some(&node.uid),
            _ => None,
        }
    }

    pub(super) fn tell_node(&self, reason: &'static str, text: String) {
        let uid = self.node_uid().unwrap_or_default();
        let notice = events::of_node(&self.settings.node, uid, reason, text);
        self.parts.events.tell(notice);
    }

    pub(super) fn say_once(&mut self, text: String) {
        if self.store_trouble != text {
            if !text.is_empty() {
                info!("{text}");
            }
            self.store_trouble = text;
        }
    }
}

/// Whether a watch gets through after that step. A list that begins is not answered yet.
fn gets_through<T>(step: &Step<T>, before: bool) -> bool {
    match step {
        Step::Trouble => false,
        Step::Change(Change::Restarted { .. }) => before,
        Step::Change(_) | Step::Recovered => true,
    }
}

/// A step of the watch of one object. `listed`: whether the running list has shown it.
fn take_in<T>(step: Step<T>, listed: &mut bool) -> Option<Told<T>> {
    let Step::Change(change) = step else {
        return None;
    };
    match change {
        Change::Restarted { .. } => {
            *listed = false;
            None
        }
        Change::Applied(object) => {
            *listed = true;
            Some(Told::There(object))
        }
        Change::Listed => (!*listed).then_some(Told::Absent),
        Change::Deleted(_) => Some(Told::Absent),
        Change::Reached(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_absent_when_a_list_does_not_show_it() {
        let mut listed = false;
        let mut step = |change| take_in(Step::Change(change), &mut listed);
        let asked = Duration::ZERO;
        assert!(step(Change::Restarted { asked }).is_none());
        assert!(matches!(step(Change::Listed), Some(Told::Absent)));
        assert!(matches!(step(Change::Applied(1)), Some(Told::There(1))));
        assert!(matches!(step(Change::Deleted(1)), Some(Told::Absent)));
        assert!(step(Change::Restarted { asked }).is_none());
        assert!(matches!(step(Change::Applied(2)), Some(Told::There(2))));
        assert!(step(Change::Listed).is_none(), "it was shown");
        assert!(take_in(Step::<u8>::Trouble, &mut listed).is_none());
    }

    #[test]
    fn a_list_that_begins_is_no_sign_that_a_watch_gets_through() {
        let begins = Step::<u8>::Change(Change::Restarted {
            asked: Duration::ZERO,
        });
        assert!(!gets_through(&Step::<u8>::Trouble, true));
        assert!(!gets_through(&begins, false) && gets_through(&begins, true));
        assert!(gets_through(&Step::Change(Change::Applied(1)), false));
        assert!(gets_through(&Step::<u8>::Recovered, false));
    }

    #[test]
    fn nodes_differ_in_their_seed() {
        assert_ne!(seed("n1"), seed("n2"));
        assert_eq!(seed("n1"), seed("n1"));
    }
}
