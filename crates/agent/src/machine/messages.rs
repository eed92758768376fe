//! The events, questions, answers and effects of the machine.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::addresses::ListOutcome;
use crate::cri::Sandbox;
use crate::demand::PendingAdds;
use crate::files::others::PodNetworkOwner;
use crate::leaks::{LeakReason, LeakedAttachment, Reasons};
use crate::namespaces::Namespace;
use crate::pods::Pod;
use crate::publish::WriteOutcome;
use crate::seen::{AddressesSeen, NodeSeen, SubnetSeen};
use crate::shared::WatchState;
use cadastre_api::{NodeAddressesSpec, NodeSubnetStatus};
use cadastre_core::Cidr;
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_daemon::events::EventNote;
use cadastre_daemon::watch::WatchStep;
use cadastre_node::{
    AddressLedger, Attachment, PodNote, PodRef, RememberedAttachment, Snapshot, StorageFault,
};

/// An input of the machine.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "short-lived, and few")]
pub enum AgentEvent {
    /// A step of the watch of the Node
    Node(WatchStep<NodeSeen>),
    /// A step of the watch of the NodeSubnet
    Subnet(WatchStep<SubnetSeen>),
    /// A step of the watch of the NodeAddresses
    Addresses(WatchStep<AddressesSeen>),
    /// A step of the watch of the pods of this node
    Pod(WatchStep<Pod>),
    /// A namespace that was asked for; `None` if the request failed
    Namespace(String, Option<Namespace>),
    /// Something in the store may have changed, or an ADD began to wait
    Changed,
    /// The answer to the [`StoreQuestion`] in flight
    Answer(StoreAnswer),
    /// The candidates of [`AgentEffect::Prove`] that are proven to be leaked
    Proven(Vec<(Attachment, LeakReason)>),
    /// The outcome of [`AgentEffect::WriteStatus`]
    Written(WriteOutcome),
    /// The outcome of [`AgentEffect::WriteList`]
    Listed(ListOutcome),
    /// The outcome of [`AgentEffect::WriteFiles`]
    Files(FilesReported),
    /// The outcome of [`AgentEffect::Masquerade`]: an error, if any
    Masqueraded(Option<String>),
}

/// What the servers have met with. It is read again before each turn, so that decisions after an answer use what
/// came after the question.
#[derive(Clone, Debug, Default)]
pub struct ServiceView {
    /// Wishes for addresses, by pool
    pub pending_adds: PendingAdds,
    /// When the first of these ends, since boot
    pub wishes_end: Option<Duration>,
    /// A pod that was refused because nothing is known of it
    pub turned_away: Option<String>,
    /// Why addresses can be neither assigned nor released: the store cannot be read or written
    pub trouble: Option<String>,
    /// The file of the store does not exist
    pub is_missing: bool,
}

/// A question to the store, or to the runtime for the store's sake. One is in flight at a time.
#[derive(Clone, Debug, PartialEq)]
pub enum StoreQuestion {
    /// Open the file unless it is missing or damaged: [`StoreAnswer::Opened`]
    Open,
    /// Finish what was asked before, then refuse everything with this reason: [`StoreAnswer::Closed`]
    Close(&'static str),
    /// Create and open a new file with this content: [`StoreAnswer::Made`]
    Make {
        /// The node's ranges
        holding: NodeAllocation,
        /// The addresses in use
        known: Vec<RememberedAttachment>,
    },
    /// Read everything, and renew the answer to STATUS: [`StoreAnswer::Looked`]
    Look,
    /// Do this with the store, as a whole or not at all
    Transact(Transaction),
    /// Run a DEL: [`StoreAnswer::Freed`]
    Free(Attachment),
    /// List all sandboxes of this node with their addresses: [`StoreAnswer::Sandboxes`]
    Sandboxes,
}

/// A change of the store, or a read from it, in one transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Transaction {
    /// Set the node's ranges, and adopt addresses in use of them: [`StoreAnswer::Held`]
    Hold {
        /// The node's ranges
        holding: NodeAllocation,
        /// The addresses in use
        known: Vec<RememberedAttachment>,
    },
    /// Release the block with this range and UID if it is empty: [`StoreAnswer::Released`]
    Release(Cidr, String),
    /// Read the notes of pods: [`StoreAnswer::Notes`]
    ReadNotes,
    /// Write the former notes, and delete the notes of the latter pods: [`StoreAnswer::Noted`]
    Note(Vec<PodNote>, Vec<PodRef>),
}

impl Transaction {
    /// Runs the transaction; after a fault nothing has changed.
    pub fn run(self, ledger: &mut AddressLedger<'_>) -> Result<StoreAnswer, StorageFault> {
        Ok(match self {
            Self::Hold { holding, known } => {
                ledger.take_over(&holding, &known)?;
                StoreAnswer::Held(Ok(()))
            }
            Self::Release(cidr, uid) => StoreAnswer::Released(Ok(ledger.release(cidr, &uid)?)),
            Self::ReadNotes => StoreAnswer::Notes(Ok(ledger.pod_notes()?)),
            Self::Note(notes, gone) => {
                ledger.note_pods(&notes, &gone)?;
                StoreAnswer::Noted(Ok(()))
            }
        })
    }

    /// Returns the answer for a transaction that failed.
    pub fn failed(&self, trouble: StoreTrouble) -> StoreAnswer {
        match self {
            Self::Hold { .. } => StoreAnswer::Held(Err(trouble)),
            Self::Release(..) => StoreAnswer::Released(Err(trouble)),
            Self::ReadNotes => StoreAnswer::Notes(Err(trouble)),
            Self::Note(..) => StoreAnswer::Noted(Err(trouble)),
        }
    }
}

/// The answer to the [`StoreQuestion`] of the same name.
#[derive(Debug)]
#[expect(missing_docs, reason = "named as the questions")]
pub enum StoreAnswer {
    Opened(StoreFound),
    Closed,
    /// The number of attachments that lost an address because another one claims it, too
    Made(Result<usize, String>),
    Looked(Result<LeakScan, StoreTrouble>),
    Held(Result<(), StoreTrouble>),
    /// Whether the block was released
    Released(Result<bool, StoreTrouble>),
    Freed(Result<(), String>),
    Notes(Result<Vec<PodNote>, StoreTrouble>),
    Noted(Result<(), StoreTrouble>),
    Sandboxes(Result<Vec<Sandbox>, String>),
}

/// The state of the store's file.
#[derive(Debug)]
pub enum StoreFound {
    /// The store is open
    Open,
    /// There is no file
    Nothing,
    /// The file was damaged, and has been renamed
    Damaged {
        /// The new path of the damaged file
        aside: PathBuf,
        /// What is wrong with it, for people
        what: String,
    },
    /// The state could not be found out, for this reason
    Unclear(String),
}

/// The result of a look.
#[derive(Debug)]
pub struct LeakScan {
    /// The content of the store
    pub snapshot: Snapshot,
    /// Paths of network namespaces that are gone, of attachments without a pod
    pub gone: BTreeSet<String>,
}

/// An error of the store.
#[derive(Clone, Debug)]
pub struct StoreTrouble {
    /// The error message, for people
    pub text: String,
    /// Whether a new file must be created because this one is damaged or gone
    pub is_lost: bool,
}

/// The state of the files that other programs read.
#[derive(Clone, Debug, Default)]
pub struct FilesReported {
    /// How our CNI configuration relates to those of others; `None` if none of ours is wanted
    pub standing: Option<PodNetworkOwner>,
    /// Why a wanted file is missing or out of date
    pub unwritten: Option<String>,
    /// Whether our CNI configuration exists on the disk
    pub is_configured: bool,
}

/// An action for the shell to carry out. Effects of a turn are started in their order.
#[derive(Debug)]
pub enum AgentEffect {
    /// Ask this; answered by [`AgentEvent::Answer`]
    Ask(StoreQuestion),
    /// Prove these leaks in the boot with this id, by the API, the runtime and the kernel: [`AgentEvent::Proven`]
    Prove(Vec<LeakedAttachment>, String),
    /// Write NodeSubnet.status: [`AgentEvent::Written`]
    WriteStatus {
        /// The resourceVersion that the write requires
        version: String,
        /// The status to write
        status: Box<NodeSubnetStatus>,
        /// Whether the write is counted as urgent
        urgent: bool,
    },
    /// Write the NodeAddresses: [`AgentEvent::Listed`]
    WriteList {
        /// The UID of the NodeSubnet, which becomes its owner
        owner: String,
        /// Whether to create the NodeAddresses
        is_new: bool,
        /// The list to write
        list: Box<NodeAddressesSpec>,
    },
    /// Update the files of other programs: [`AgentEvent::Files`]
    WriteFiles {
        /// The node's ranges
        holding: Arc<NodeAllocation>,
        /// Whether the node gets its first range only when a pod needs it
        waits_for_pods: bool,
    },
    /// Update the nftables tables: [`AgentEvent::Masqueraded`]
    Masquerade {
        /// The ranges of all pools, if known
        ranges: Option<Vec<String>>,
        /// The node's ranges
        holding: Arc<NodeAllocation>,
    },
    /// Read this namespace: [`AgentEvent::Namespace`]
    AskNamespace(String),
    /// Show the servers what the watches have shown
    Offer {
        /// Replaces what was shown before
        shown: Arc<WatchState>,
        /// Whether ADDs that wait for their pod look again
        is_news: bool,
    },
    /// The node's ranges were written to the store: wake ADDs that wait for a block
    Held,
    /// Publish the node's ranges to other programs on the node
    Holding(Arc<NodeAllocation>),
    /// Publish which attachments are leak candidates
    Suspicious(Arc<Reasons>),
    /// Log and emit an event
    Tell(EventNote),
    /// Forget the refused pod, as it was reported
    ToldTurnedAway,
    /// Set what `/readyz` answers
    Ready(bool, String),
    /// Update metrics
    Count(CountedEvent),
}

/// An update of metrics.
#[derive(Clone, Debug, PartialEq)]
pub enum CountedEvent {
    /// The content of the store
    Snapshot(Arc<Snapshot>),
    /// A leak was released
    Freed(LeakReason),
    /// The stored status has differed, or the list has been overdue, for this time
    Behind(Duration),
    /// A damaged store was found
    Damaged,
}
