//! The agent as a state machine: events in, effects out. It reads no clock, asks nobody and waits for
//! nothing; [`super::run`] carries it out.
//!
//! Level-triggered: each turn compares what is held, given and told with what should be, whatever brought
//! it about. A turn goes through the phases of a cycle, one after the other, and rests where the store, or for its
//! sake the runtime, is asked something; the answer takes it from there. Events that come meanwhile are taken in,
//! and the next cycle, right after that one, is about them.
//!
//! ```text
//!  not open:  open ──► close what is lost ──► ask the runtime ──► make anew
//!  open:      free what is proven ──► take over ──► look, release ──► note pods ──► tell ──► rest
//! ```
//!
//! # Guarantees
//!
//! Of the store:
//! 1. One question is in flight at a time, and no status, list, file or readiness is decided meanwhile: what others are
//!    told is of one moment.
//! 2. Nothing is held before the store was looked at since it was opened: it says for which Node it holds, and which
//!    ranges are new to it.
//! 3. What is in use of a podCIDR that is new to the store is asked of the runtime after that podCIDR was seen, and
//!    while all pods are known; it is taken over in the transaction that holds it. While nobody can tell, nothing
//!    of what was seen with it is held.
//! 4. What was asked about is held, whatever came meanwhile; that is taken over right after it.
//! 5. After that the store is looked at, before anything is told.
//! 6. A block is let go of only after a look, by the wishes of after that look, and while the watch of the NodeSubnet
//!    gets through. Then the store is looked at again, before anything is told.
//! 7. A leak is freed after its proof, and one proof is sought at a time. A look follows.
//! 8. Notes of pods are read before they are compared; what changes while they are written is compared again.
//! 9. A store that is lost is closed, and what it held forgotten, before another is looked for.
//! 10. A new one is made only once the API has told of the Node, the NodeSubnet, the NodeAddresses and all pods, and
//!     the runtime of its sandboxes after that; of what was known when the runtime was asked.
//!
//! Of what is told:
//! 11. A status is written onto the NodeSubnet that was taken over, never onto a later one.
//! 12. One status and one list are on their way at a time.
//! 13. Who serves is offered what has changed before anything else of the same turn is done.
//! 14. Nothing is called ready before the files were written as they are to be; while they are, the word before stays.
//! 15. Nothing is masqueraded before the files have told whose network has the node's pods.

mod cycle;
mod intake;
mod opening;
mod outward;
mod ready;
mod taking;
#[cfg(test)]
mod tests;
mod words;

use std::collections::VecDeque;
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::addresses::{Cut, Schedule};
use super::events;
use super::files::others::Standing;
use super::known::Shown;
use super::leaks::{Leaks, Reason, Reasons};
use super::notes::Notes;
use super::publish::Publisher;
use super::seen::{AddressesSeen, NodeSeen, SubnetSeen};
use cadastre_core::holding::Holding;
use cadastre_node::{Attachment, Now, Snapshot};

use cycle::Asked;
use opening::Opening;
use outward::{Files, Masquerade};

pub use words::{
    Answer, Effect, Event, Figure, FilesTold, Found, Looked, Question, Serving, StoreTrouble,
    Transaction,
};

/// So often it is seen to that the store is still there.
const STORE_CHECK: Duration = Duration::from_secs(5);
/// Between two tries to open or make the store, or to use it after an error.
const STORE_PAUSE: Duration = Duration::from_secs(2);

/// What is answered until the store can be used.
pub const STARTING: &str = "this node's agent starts and has not opened its store yet: try again";

/// Settings of the agent's decisions.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's name
    pub node: String,
    /// What can wait is told once in that time
    pub publish_interval: Duration,
    /// The list of addresses is told once in that time
    pub addresses_interval: Duration,
    /// How long an attachment is suspicious before it may be freed
    pub leak_grace: Duration,
    /// Whether to masquerade
    pub masquerade: bool,
    /// Where the CNI configuration goes, if one is wanted
    pub cni_conf: Option<PathBuf>,
    /// The name of the network in it
    pub network: Option<String>,
}

/// What the API server has said of an object of this node.
#[derive(Clone, Debug, Default)]
enum Told<T> {
    /// Nothing yet
    #[default]
    Unknown,
    /// There is none
    Absent,
    /// This
    There(T),
}

impl<T> Told<T> {
    /// The object, where there is one.
    fn there(&self) -> Option<&T> {
        match self {
            Told::There(it) => Some(it),
            Told::Unknown | Told::Absent => None,
        }
    }

    fn map<U>(self, f: impl FnOnce(T) -> U) -> Told<U> {
        match self {
            Told::Unknown => Told::Unknown,
            Told::Absent => Told::Absent,
            Told::There(it) => Told::There(f(it)),
        }
    }
}

/// The agent.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Machine {
    settings: Settings,

    node: Told<NodeSeen>,
    subnet: Told<Arc<SubnetSeen>>,
    addresses: Told<AddressesSeen>,
    /// Whether the watch of the NodeSubnet gets through
    followed: bool,
    /// Whether the running lists have shown the Node, the NodeSubnet and the NodeAddresses
    listed: (bool, bool, bool),
    /// The NodeSubnet is as a list shows it, which is right whatever was seen before
    relisted: bool,
    /// What the watches have shown those who serve, and whether that is offered already
    shown: Arc<Shown>,
    offer: Offer,
    serving: Serving,
    /// Whether something has come since the cycle began
    is_news: bool,

    /// Whether the store is open
    is_open: bool,
    opening: Opening,
    /// The question in flight
    asked: Option<Asked>,
    /// Its answer
    answer: Option<Answer>,
    /// What was said last of what keeps the store from being made or used
    store_trouble: String,
    /// What of the API's word is to be taken over into the store
    to_hold: bool,
    /// What was taken over last
    holding: Holding,
    /// What could not be read of that
    wrong: Vec<String>,
    snapshot: Option<Arc<Snapshot>>,
    /// The same, for those who want to know
    held: Arc<Holding>,
    /// When to look at the store again
    look_at: Duration,
    looked_at: Duration,
    /// Whether a block was let go of since the start
    has_let_go: bool,
    leaks: Leaks,
    reasons: Arc<Reasons>,
    is_proving: bool,
    proven: VecDeque<(Attachment, Reason)>,
    /// What the pods here may have
    notes: Notes,

    publisher: Publisher,
    publish_at: Option<Duration>,
    /// Whether the last status was stored only in part
    is_cut: bool,
    /// When the list of addresses is written
    schedule: Schedule,
    list_at: Option<Duration>,
    /// The last list, if it was stored only in part
    list_cut: Option<Box<Cut>>,
    files: Files,
    /// What was told last of whether another's network has the node's pods
    served: Option<Standing>,
    /// Not there where others masquerade
    masquerade: Option<Masquerade>,
    /// When it was last told that pods are refused as nothing is known of them
    turned_away_at: Option<Duration>,
    /// What was said last of whether it is ready
    ready: Option<(bool, String)>,
}

/// Whether something is to be offered to those who serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Offer {
    Nothing,
    /// It has changed
    Changed,
    /// And who waits for a pod should look again
    News,
}

impl Machine {
    /// One that knows nothing yet. `seed` sets it apart from other nodes'.
    pub fn new(settings: Settings, seed: u64, now: &Now) -> Self {
        let at = now.since_boot;
        let (interval, addresses) = (settings.publish_interval, settings.addresses_interval);
        Self {
            node: Told::Unknown,
            subnet: Told::Unknown,
            addresses: Told::Unknown,
            followed: false,
            listed: (false, false, false),
            relisted: false,
            shown: Arc::default(),
            offer: Offer::Nothing,
            serving: Serving::default(),
            is_news: false,
            is_open: false,
            opening: Opening::new(at),
            asked: None,
            answer: None,
            store_trouble: String::new(),
            to_hold: false,
            holding: Holding::default(),
            wrong: Vec::new(),
            snapshot: None,
            held: Arc::default(),
            look_at: at,
            looked_at: Duration::ZERO,
            has_let_go: false,
            leaks: Leaks::new(settings.leak_grace),
            reasons: Arc::default(),
            is_proving: false,
            proven: VecDeque::new(),
            notes: Notes::default(),
            publisher: Publisher::new(interval, seed, at),
            publish_at: None,
            is_cut: false,
            schedule: Schedule::new(addresses, interval, seed.rotate_left(8), at),
            list_at: None,
            list_cut: None,
            files: Files::new(settings.cni_conf.is_some()),
            served: None,
            masquerade: settings.masquerade.then(Masquerade::default),
            turned_away_at: None,
            ready: None,
            settings,
        }
    }

    /// Makes what is otherwise than it should be so, and says when to do that again if nothing happens before.
    pub fn turn(&mut self, serving: Serving, now: &Now, effects: &mut Vec<Effect>) -> Duration {
        let at = now.since_boot;
        self.serving = serving;
        if self.serving.is_missing {
            self.look_at = self.look_at.min(at);
        }
        self.go(now, effects);
        if self.serving.trouble.is_some() {
            self.look_at = self.look_at.min(at + STORE_PAUSE);
        }
        self.tell_turned_away(at, effects);
        let shown = &self.shown.namespaces;
        if shown.wake().is_some_and(|wake| wake <= at) {
            let due = self.show(Offer::Changed).namespaces.due(at);
            effects.extend(due.into_iter().map(Effect::AskNamespace));
        }
        self.offer_first(effects);
        self.wake(at)
    }

    /// Whether something is on its way that should come back before the agent ends.
    pub fn is_busy(&self) -> bool {
        let is_asked = self.asked.is_some() && self.answer.is_none();
        is_asked || self.publisher.is_writing() || self.schedule.is_writing()
    }

    /// When to turn again.
    fn wake(&self, now: Duration) -> Duration {
        let shown = &self.shown.namespaces;
        let mut all = vec![shown.wake(), self.tell_turned_away_at()];
        if self.asked.is_some() {
            all.push(Some(now + STORE_CHECK));
        } else if self.is_open {
            all.extend([Some(self.look_at), Some(now + STORE_CHECK)]);
            all.extend([self.publish_at, self.list_at, self.notes.due_at()]);
            all.push(self.files.check_at().filter(|_| self.snapshot.is_some()));
        } else {
            all.push(Some(self.opening.try_at));
        }
        all.into_iter().flatten().min().unwrap_or(now + STORE_CHECK)
    }

    /// Puts what has changed for those who serve before everything else.
    fn offer_first(&mut self, effects: &mut Vec<Effect>) {
        let offer = mem::replace(&mut self.offer, Offer::Nothing);
        if offer != Offer::Nothing {
            let (shown, is_news) = (Arc::clone(&self.shown), offer == Offer::News);
            effects.insert(0, Effect::Offer { shown, is_news });
        }
    }

    /// What is shown those who serve, to change it.
    fn show(&mut self, offer: Offer) -> &mut Shown {
        self.offer = self.offer.max(offer);
        Arc::make_mut(&mut self.shown)
    }

    /// Looks at the store soon: there may be something new.
    fn look_soon(&mut self) {
        self.look_at = self.look_at.min(self.looked_at + cycle::LOOK_PAUSE.0);
    }

    fn node_uid(&self) -> Option<&str> {
        self.node.there().map(|node| node.uid.as_str())
    }

    fn subnet(&self) -> Option<&Arc<SubnetSeen>> {
        self.subnet.there()
    }

    fn tell_node(&self, reason: &'static str, text: String, effects: &mut Vec<Effect>) {
        let uid = self.node_uid().unwrap_or_default();
        let notice = events::of_node(&self.settings.node, uid, reason, text);
        effects.push(Effect::Tell(notice));
    }

    /// Says what keeps the store from being made or used, once.
    fn say_once(&mut self, text: String) {
        if self.store_trouble != text {
            if !text.is_empty() {
                info!("{text}");
            }
            self.store_trouble = text;
        }
    }

    /// Says what could not be read of the NodeSubnet, once.
    fn complain(&mut self, wrong: Vec<String>) {
        if self.wrong != wrong {
            for text in &wrong {
                warn!("{text}");
            }
            self.wrong = wrong;
        }
    }
}
