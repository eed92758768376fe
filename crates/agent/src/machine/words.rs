//! What comes in, and what goes out.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::addresses::Listed;
use crate::cri::Sandbox;
use crate::demand::Wishes;
use crate::files::others::Standing;
use crate::known::Shown;
use crate::leaks::{Candidate, Reason, Reasons};
use crate::namespaces::Namespace;
use crate::pods::Pod;
use crate::publish::Written;
use crate::seen::{AddressesSeen, NodeSeen, SubnetSeen};
use cadastre_api::{NodeAddressesSpec, NodeSubnetStatus};
use cadastre_core::Cidr;
use cadastre_core::holding::Holding;
use cadastre_daemon::events::Notice;
use cadastre_daemon::watch::Step;
use cadastre_node::{Attachment, Fault, Known, Ledger, PodNote, PodRef, Snapshot};

/// What happened.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "short-lived, and few")]
pub enum Event {
    /// A step of the watch of the Node
    Node(Step<NodeSeen>),
    /// A step of the watch of the NodeSubnet
    Subnet(Step<SubnetSeen>),
    /// A step of the watch of the NodeAddresses
    Addresses(Step<AddressesSeen>),
    /// A step of the watch of the pods of this node
    Pod(Step<Pod>),
    /// What is known of a namespace that was asked for; `None`: that failed
    Namespace(String, Option<Namespace>),
    /// Something was given, freed or wished for
    Changed,
    /// The answer to the [`Question`]
    Answer(Answer),
    /// Those of the candidates of [`Effect::Prove`] that nobody has any more
    Proven(Vec<(Attachment, Reason)>),
    /// What came of [`Effect::WriteStatus`]
    Written(Written),
    /// What came of [`Effect::WriteList`]
    Listed(Listed),
    /// What came of [`Effect::WriteFiles`]
    Files(FilesTold),
    /// What came of [`Effect::Masquerade`]: why it is not as it should be
    Masqueraded(Option<String>),
}

/// What those who serve have met with, read before each turn: what is decided by an answer is decided
/// by what they say after it.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// ADDs that found nothing
    pub wishes: Wishes,
    /// When the first of these ends
    pub wishes_end: Option<Duration>,
    /// A pod that was refused, as nothing is known of it
    pub turned_away: Option<String>,
    /// Why nothing can be given or taken back: the store cannot be read or written
    pub trouble: Option<String>,
    /// The file of the store is not there
    pub is_missing: bool,
}

/// What is asked of the store, or for its sake of the runtime. One question is in flight at a time.
#[derive(Clone, Debug, PartialEq)]
pub enum Question {
    /// Look for the file and open it if it is whole: [`Answer::Opened`]
    Open,
    /// Refuse everything for that reason, once what was asked before is done: [`Answer::Closed`]
    Close(&'static str),
    /// Make a new file of these and open it: [`Answer::Made`]
    Make {
        /// What is held
        holding: Holding,
        /// What is in use
        known: Vec<Known>,
    },
    /// All there is, and STATUS from now on: [`Answer::Looked`]
    Look,
    /// Do that with the store, as a whole or not at all
    Transact(Transaction),
    /// DEL: [`Answer::Freed`]
    Free(Attachment),
    /// All sandboxes of this node with their addresses: [`Answer::Sandboxes`]
    Sandboxes,
}

/// What is done with the store.
#[derive(Clone, Debug, PartialEq)]
pub enum Transaction {
    /// Hold that, and in the same transaction take over what is in use of it: [`Answer::Held`]
    Hold {
        /// What is held
        holding: Holding,
        /// What is in use
        known: Vec<Known>,
    },
    /// Let go of a block if it is empty: [`Answer::Released`]
    Release(Cidr, String),
    /// What is noted of pods: [`Answer::Notes`]
    ReadNotes,
    /// Note these, and forget those: [`Answer::Noted`]
    Note(Vec<PodNote>, Vec<PodRef>),
}

impl Transaction {
    /// Does it; after a fault nothing has changed.
    pub fn run(self, ledger: &mut Ledger<'_>) -> Result<Answer, Fault> {
        Ok(match self {
            Self::Hold { holding, known } => {
                ledger.take_over(&holding, &known)?;
                Answer::Held(Ok(()))
            }
            Self::Release(cidr, uid) => Answer::Released(Ok(ledger.release(cidr, &uid)?)),
            Self::ReadNotes => Answer::Notes(Ok(ledger.pod_notes()?)),
            Self::Note(notes, gone) => {
                ledger.note_pods(&notes, &gone)?;
                Answer::Noted(Ok(()))
            }
        })
    }

    /// What is answered where it could not be done.
    pub fn failed(&self, trouble: StoreTrouble) -> Answer {
        match self {
            Self::Hold { .. } => Answer::Held(Err(trouble)),
            Self::Release(..) => Answer::Released(Err(trouble)),
            Self::ReadNotes => Answer::Notes(Err(trouble)),
            Self::Note(..) => Answer::Noted(Err(trouble)),
        }
    }
}

/// What came of a [`Question`].
#[derive(Debug)]
#[expect(missing_docs, reason = "named as the questions")]
pub enum Answer {
    Opened(Found),
    Closed,
    /// How many attachments lost an address that another one claims, too
    Made(Result<usize, String>),
    Looked(Result<Looked, StoreTrouble>),
    Held(Result<(), StoreTrouble>),
    /// Whether it was let go of
    Released(Result<bool, StoreTrouble>),
    Freed(Result<(), String>),
    Notes(Result<Vec<PodNote>, StoreTrouble>),
    Noted(Result<(), StoreTrouble>),
    Sandboxes(Result<Vec<Sandbox>, String>),
}

/// What was found where the store should be.
#[derive(Debug)]
pub enum Found {
    /// It is open
    Open,
    /// There is none
    Nothing,
    /// It was damaged, and now lies there under another name
    Damaged {
        /// Where it is now
        aside: PathBuf,
        /// What is wrong with it
        what: String,
    },
    /// Nobody knows, for that reason
    Unclear(String),
}

/// What a look has shown.
#[derive(Debug)]
pub struct Looked {
    /// What is in the store
    pub snapshot: Snapshot,
    /// Paths of network namespaces, of attachments that are no pods', that are gone
    pub gone: BTreeSet<String>,
}

/// Why something was not done with the store.
#[derive(Clone, Debug)]
pub struct StoreTrouble {
    /// For people
    pub text: String,
    /// The file has to be made anew: it is damaged, or gone
    pub is_lost: bool,
}

/// How the files stand that other programs read.
#[derive(Clone, Debug, Default)]
pub struct FilesTold {
    /// How ours stands with the CNI configurations of others; `None` where none of ours is wanted
    pub standing: Option<Standing>,
    /// Why a file that is wanted is not there, or not as it should be
    pub unwritten: Option<String>,
    /// Whether the runtime has a CNI configuration of ours
    pub is_configured: bool,
}

/// What is to be done. Effects of a turn are begun in their order.
#[derive(Debug)]
pub enum Effect {
    /// Asks that, and comes back as [`Event::Answer`]
    Ask(Question),
    /// Asks the API, the runtime and the kernel about these, in the boot of that id: [`Event::Proven`]
    Prove(Vec<Candidate>, String),
    /// [`Event::Written`]
    WriteStatus {
        /// The NodeSubnet's resourceVersion to write onto
        version: String,
        /// What it should be
        status: Box<NodeSubnetStatus>,
        /// Whether it cannot wait
        urgent: bool,
    },
    /// [`Event::Listed`]
    WriteList {
        /// The UID of the NodeSubnet, which owns it
        owner: String,
        /// There is no NodeAddresses yet
        is_new: bool,
        /// What it should be
        list: Box<NodeAddressesSpec>,
    },
    /// [`Event::Files`]
    WriteFiles {
        /// What the node holds
        holding: Arc<Holding>,
        /// It holds nothing as long as no pod comes
        waits_for_pods: bool,
    },
    /// [`Event::Masqueraded`]
    Masquerade {
        /// The ranges of all pools, if they are known
        ranges: Option<Vec<String>>,
        /// What the node holds
        holding: Arc<Holding>,
    },
    /// [`Event::Namespace`]
    AskNamespace(String),
    /// What the watches have shown, for those who serve
    Offer {
        /// All of it
        shown: Arc<Shown>,
        /// Whether who waits for a pod should look again
        is_news: bool,
    },
    /// What the node may give from was taken over: who waits for a block should try again
    Held,
    /// What the node holds, for those who want to know
    Holding(Arc<Holding>),
    /// Which attachments may be leaked
    Suspicious(Arc<Reasons>),
    /// Tells people
    Tell(Notice),
    /// The pod that was turned away was told of
    ToldTurnedAway,
    /// What `/readyz` says
    Ready(bool, String),
    /// Counts
    Count(Figure),
}

/// What is counted.
#[derive(Clone, Debug, PartialEq)]
pub enum Figure {
    /// What is given and held
    Snapshot(Arc<Snapshot>),
    /// A leak was freed
    Freed(Reason),
    /// The API is behind by so much
    Behind(Duration),
    /// A damaged store was found
    Damaged,
}
