//! The messages of the state machine. The machine receives events and answers, and returns questions and effects.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::addresses::ListOutcome;
use crate::announce::AnnounceError;
use crate::cri::Sandbox;
use crate::demand::PendingAdds;
use crate::files::kept::FilesReported;
use crate::leaks::{LeakReason, LeakedAttachment, Reasons};
use crate::namespaces::Namespace;
use crate::pods::Pod;
use crate::publish::WriteOutcome;
use crate::routes::RoutesReport;
use crate::seen::{AddressesSeen, SubnetSeen};
use crate::shared::WatchState;
use cadastre_api::{AddressRequest, NodeAddressesSpec, NodeSubnetStatus};
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_core::{Addr, Cidr};
use cadastre_daemon::events::EventNote;
use cadastre_daemon::watch::WatchStep;
use cadastre_node::store_thread::StoreRequest;
use cadastre_node::{
    AddressLedger, Attachment, PodNote, PodRef, ProbeTargets, RememberedAttachment, Snapshot,
    StorageFault, StoreError,
};

/// An input of the machine: a step of a watch, or the outcome of an effect.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "short-lived, and few")]
pub enum AgentEvent {
    /// A step of the watch of the Node, which shows the Node's UID
    Node(WatchStep<String>),
    /// A step of the watch of the NodeSubnet
    Subnet(WatchStep<SubnetSeen>),
    /// A step of the watch of the NodeAddresses
    Addresses(WatchStep<AddressesSeen>),
    /// A step of the watch of this node's pods
    Pod(WatchStep<Pod>),
    /// A namespace as read from the API server; `None` if the request failed
    Namespace(String, Option<Namespace>),
    /// Something in the store may have changed, or an ADD has begun to wait
    Changed,
    /// The answer to the [`StoreQuestion`] in flight
    Answer(StoreAnswer),
    /// Those candidates of [`AgentEffect::Prove`] whose leaks are proven
    Proven(Vec<(Attachment, LeakReason)>),
    /// The outcome of [`AgentEffect::Probe`]; an error means that the addresses could not be probed
    Probed(Result<(), String>),
    /// The outcome of [`AgentEffect::WriteStatus`]
    Written(WriteOutcome),
    /// The outcome of [`AgentEffect::WriteList`]
    Listed(ListOutcome),
    /// The outcome of [`AgentEffect::WriteFiles`]
    Files(FilesReported),
    /// The outcome of [`AgentEffect::Announce`]
    Announced(Result<(), AnnounceError>),
    /// The outcome of [`AgentEffect::Masquerade`]: the error, or `None` if there was no error
    Masqueraded(Option<String>),
    /// The state of the routes to the pods of other nodes has changed
    Routes(RoutesReport),
}

/// What the servers on the node's sockets have recorded while they handled requests. The main loop reads this state
/// before each turn. So a decision that follows the answer to a question also uses requests that came after the
/// question.
#[derive(Clone, Debug, Default)]
pub struct ServiceView {
    /// For each pool, the number of ADDs that wait for an address of the pool, or that waited for one recently
    pub pending_adds: PendingAdds,
    /// The addresses that the CNI configuration or the runtime requests for waiting pods, and that no range of the node
    /// contains
    pub address_requests: Vec<AddressRequest>,
    /// The time since boot at which the first entry of `pending_adds` or `address_requests` expires; `None` if there is
    /// no entry
    pub wishes_end: Option<Duration>,
    /// The pod that was last refused because the agent did not know the pod yet, as `namespace/name`
    pub turned_away: Option<String>,
    /// The error that keeps addresses from being assigned and released
    pub trouble: Option<String>,
    /// The error that keeps changes of the node's ranges from being recorded on the disk
    pub unrecorded: Option<String>,
    /// Whether the file of the open store does not exist any more
    pub is_missing: bool,
}

/// A question to the store, or a question to the runtime whose answer decides what is written to the store. One
/// question is in flight at a time. The comment of each question names its answer.
#[derive(Clone, Debug, PartialEq)]
pub enum StoreQuestion {
    /// Open the file unless it is missing or damaged. The answer is [`StoreAnswer::Opened`]
    Open,
    /// Finish all earlier requests, and reject every later request with this reason. The answer is
    /// [`StoreAnswer::Closed`]
    Close(&'static str),
    /// Create and open a new file with this content. The answer is [`StoreAnswer::Made`]
    Make {
        /// The node's ranges
        holding: NodeAllocation,
        /// The attachments in use, with their addresses
        known: Vec<RememberedAttachment>,
        /// Whether pods use addresses outside of these ranges
        has_addresses_outside: bool,
    },
    /// Read the whole store, and update the answer to STATUS requests. The answer is [`StoreAnswer::Looked`]
    Look,
    /// Run this transaction, which takes effect completely or not at all. The answer depends on the transaction
    Transact(Transaction),
    /// Run a DEL for this attachment. The answer is [`StoreAnswer::Freed`]
    Free(Attachment),
    /// List all sandboxes of this node with their addresses. The answer is [`StoreAnswer::Sandboxes`]
    Sandboxes,
}

/// A change of the store, or a read from it, in one transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Transaction {
    /// Set the node's ranges, and adopt the addresses in use in these ranges. The answer is [`StoreAnswer::Held`]
    Hold {
        /// The node's ranges
        holding: NodeAllocation,
        /// The attachments in use, with their addresses
        known: Vec<RememberedAttachment>,
    },
    /// Stop assigning addresses from blocks that are not among these ranges, or are draining. This does not wait for
    /// the disk. The answer is [`StoreAnswer::Restricted`]
    Restrict(NodeAllocation),
    /// Release the block with this range and UID if it is empty. The answer is [`StoreAnswer::Released`]
    Release(Cidr, String),
    /// Withdraw those requested ranges that are empty. The answer is [`StoreAnswer::Withdrawn`]
    Withdraw,
    /// End these conflicts, each with the time at which it began. The answer is [`StoreAnswer::ConflictsEnded`]
    EndConflicts(Vec<(Addr, i64)>),
    /// Read the notes on pods. The answer is [`StoreAnswer::Notes`]
    ReadNotes,
    /// Write these notes, and delete the notes on these pods. The answer is [`StoreAnswer::Noted`]
    Note(Vec<PodNote>, Vec<PodRef>),
}

impl Transaction {
    /// Returns the request for the store thread. `reply` receives the answer and must not block.
    pub fn request(
        self,
        reply: impl FnOnce(Result<StoreAnswer, Arc<StoreError>>) + Send + 'static,
    ) -> StoreRequest {
        let is_restriction = matches!(self, Self::Restrict(_));
        let request = StoreRequest::work(None, move |ledger| self.run(ledger), reply);
        if is_restriction {
            request.without_disk()
        } else {
            request
        }
    }

    /// Runs the transaction. After an error the store is unchanged.
    fn run(self, ledger: &mut AddressLedger<'_>) -> Result<StoreAnswer, StorageFault> {
        Ok(match self {
            Self::Hold { holding, known } => {
                ledger.take_over(&holding, &known)?;
                StoreAnswer::Held
            }
            Self::Restrict(holding) => {
                ledger.restrict(&holding)?;
                StoreAnswer::Restricted
            }
            Self::Release(cidr, uid) => StoreAnswer::Released(ledger.release(cidr, &uid)?),
            Self::Withdraw => StoreAnswer::Withdrawn(ledger.withdraw_empty()?),
            Self::EndConflicts(ended) => StoreAnswer::ConflictsEnded(ledger.end_conflicts(&ended)?),
            Self::ReadNotes => StoreAnswer::Notes(ledger.pod_notes()?),
            Self::Note(notes, gone) => {
                ledger.note_pods(&notes, &gone)?;
                StoreAnswer::Noted
            }
        })
    }
}

/// An answer to a [`StoreQuestion`] or [`Transaction`]. Its name follows that of the question: `Opened` answers `Open`,
/// and so on.
#[derive(Debug)]
#[expect(missing_docs, reason = "named as the questions")]
pub enum StoreAnswer {
    Opened(StoreFound),
    Closed,
    /// The number of attachments that lost an address because another attachment has the same address
    Made(Result<usize, String>),
    Looked(Result<LeakScan, StoreTrouble>),
    Held,
    Restricted,
    /// Whether the block is released; false if the block is not empty, or if its UID is not the requested one
    Released(bool),
    /// Whether the transaction withdrew any range
    Withdrawn(bool),
    /// Whether the transaction ended any conflict
    ConflictsEnded(bool),
    Notes(Vec<PodNote>),
    Noted,
    /// A transaction failed and has changed nothing
    Failed(StoreTrouble),
    Freed(Result<(), String>),
    Sandboxes(Result<Vec<Sandbox>, String>),
}

/// What was found when the store's file was opened.
#[derive(Debug)]
pub enum StoreFound {
    /// The store is open
    Open,
    /// The store's file does not exist
    Nothing,
    /// The file was damaged, and has been renamed
    Damaged {
        /// The new path of the damaged file
        aside: PathBuf,
        /// What is wrong with the file, as a text for users
        what: String,
    },
    /// It is unclear whether there is a usable file. The text is the reason
    Unclear(String),
}

/// The result of a look, which is a read of the whole store.
#[derive(Debug)]
pub struct LeakScan {
    /// The content of the store
    pub snapshot: Snapshot,
    /// For attachments without a pod, the paths of network namespaces that no longer exist
    pub gone: BTreeSet<String>,
}

/// Why the store could not be used.
#[derive(Clone, Debug)]
pub struct StoreTrouble {
    /// The error message, for users
    pub text: String,
    /// Whether the store's file is damaged or gone, so that a new one must be created
    pub is_lost: bool,
}

/// An action that the main loop carries out. The effects of a turn are started in order. If an event reports the
/// outcome of an effect, the effect's comment names the event.
#[derive(Debug)]
pub enum AgentEffect {
    /// Ask this question. The outcome is [`AgentEvent::Answer`]
    Ask(StoreQuestion),
    /// Ask the API, the runtime and the kernel for proofs of these leaks. The text is the id of the current boot. The
    /// outcome is [`AgentEvent::Proven`]
    Prove(Vec<LeakedAttachment>, String),
    /// Probe these addresses, and record the answers in the store. The outcome is [`AgentEvent::Probed`]
    Probe(ProbeTargets),
    /// Write NodeSubnet.status. The outcome is [`AgentEvent::Written`]
    WriteStatus {
        /// The resourceVersion that the write requires
        version: String,
        /// The whole new status, including the conditions that the controller has set
        status: Box<NodeSubnetStatus>,
        /// Whether metrics count the write as urgent
        urgent: bool,
    },
    /// Write the NodeAddresses. The outcome is [`AgentEvent::Listed`]
    WriteList {
        /// The UID of the NodeSubnet, which becomes the owner of the NodeAddresses
        owner: String,
        /// Whether the NodeAddresses does not exist yet and must be created. If false, the NodeAddresses is patched
        is_new: bool,
        /// The list to write
        list: Box<NodeAddressesSpec>,
    },
    /// Update the files that other programs read. The outcome is [`AgentEvent::Files`]
    WriteFiles {
        /// The node's ranges
        holding: Arc<NodeAllocation>,
        /// Whether the node gets its first range only when a pod needs it
        waits_for_pods: bool,
    },
    /// Write the file for the routing daemon with these ranges. The outcome is [`AgentEvent::Announced`]
    Announce(Arc<NodeAllocation>),
    /// Update the nftables tables. The outcome is [`AgentEvent::Masqueraded`]
    Masquerade {
        /// The ranges of all pools; `None` if they are unknown
        ranges: Option<Vec<String>>,
        /// The node's ranges
        holding: Arc<NodeAllocation>,
    },
    /// Read this namespace. The outcome is [`AgentEvent::Namespace`]
    AskNamespace(String),
    /// Pass the state that the watches have shown to the servers on the node's sockets
    Offer {
        /// The new state, which replaces the servers' state
        watched: Arc<WatchState>,
        /// Whether the change wakes the ADDs that wait for their pod
        is_news: bool,
    },
    /// Wake the ADDs that wait for a block, because the node's ranges were written to the store
    Held,
    /// Send the node's ranges to the clients of the gRPC API
    Holding(Arc<NodeAllocation>),
    /// Report which attachments are leak candidates, in the gRPC API and in the metrics
    LeakCandidates(Arc<Reasons>),
    /// Log and emit an event
    Emit(EventNote),
    /// Forget the refused pod, because an event has reported it
    TurnedAwayReported,
    /// Set whether `/readyz` reports the agent as ready, and why
    Ready(bool, String),
    /// Update metrics
    Count(CountedEvent),
}

/// An update of metrics.
#[derive(Clone, Debug, PartialEq)]
pub enum CountedEvent {
    /// Set the numbers of addresses and blocks to those of this snapshot of the store
    Snapshot(Arc<Snapshot>),
    /// A leak was released
    Freed(LeakReason),
    /// The longer of two times: how long the stored status has differed from the wanted one, and for how long the list
    /// of addresses has been overdue
    PublishLag(Duration),
    /// A damaged store was found
    Damaged,
    /// Whether the last attempt to pass the node's ranges to the routing daemon succeeded
    Announced(bool),
}
