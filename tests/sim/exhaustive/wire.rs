//! The messages between processes and the API server.

use std::cell::RefCell;
use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use cadastre_api::NodeSubnetStatus;
use cadastre_controller::OutgoingRequest;
use cadastre_controller::cluster::lease::{LeaseAnswer, LeaseCall};
use cadastre_controller::cluster::names::NodeName;
use cadastre_controller::cluster::request::{RequestId, RequestOutcome};

use super::super::describe::{of_outcome, of_request};
use super::super::run::RunId;

/// A message that has not arrived. If it is given up, its sender no longer waits for it, but it may still arrive.
#[derive(Clone, Debug)]
pub struct InTransit {
    pub message: Arc<Message>,
    hash: u64,
    pub is_given_up: bool,
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub outcome: RequestOutcome,
    /// Whether the answered request only reads
    pub is_read: bool,
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "few are small")]
pub enum Message {
    Request(RunId, OutgoingRequest),
    Answer(RunId, RequestId, Answer),
    LeaseCall(RunId, LeaseCall),
    LeaseAnswer(RunId, LeaseAnswer),
    /// An agent's write of its status, with the version of the NodeSubnet on which the status is based.
    Status(NodeName, u64, NodeSubnetStatus),
}

impl InTransit {
    pub fn new(message: Message) -> Self {
        InTransit {
            hash: hash_of(|text| write!(text, "{message:?}")),
            message: Arc::new(message),
            is_given_up: false,
        }
    }

    /// Reads of one process arrive in the order in which they were sent, and so do the answers to reads. Returns the
    /// process and the direction of such a message. Returns `None` for other messages, which may overtake each other.
    pub fn line(&self) -> Option<(RunId, bool)> {
        match &*self.message {
            Message::Request(from, it) if !self.is_given_up && !it.request.is_write() => {
                Some((*from, true))
            }
            Message::Answer(to, _, outcome) if !self.is_given_up && outcome.is_read => {
                Some((*to, false))
            }
            _ => None,
        }
    }
}

impl Message {
    /// The process that gets the message; `None` for the API server.
    pub fn recipient(&self) -> Option<RunId> {
        match self {
            Message::Answer(to, ..) | Message::LeaseAnswer(to, _) => Some(*to),
            Message::Request(..) | Message::LeaseCall(..) | Message::Status(..) => None,
        }
    }

    pub fn text(&self) -> String {
        match self {
            Message::Request(from, it) => format!("{from}'s {}", of_request(&it.request)),
            Message::Answer(to, _, it) => {
                format!("the answer to {to}: {}", of_outcome(&it.outcome))
            }
            Message::LeaseCall(from, it) => format!("{from}'s call {it:?}"),
            Message::LeaseAnswer(to, it) => format!("the answer about the Lease to {to}: {it:?}"),
            Message::Status(node, version, it) => {
                format!(
                    "{node}'s status at v{version}: {:?} {:?}",
                    it.pools, it.blocks
                )
            }
        }
    }
}

/// Returns a hash of the messages on their way, which does not depend on their order.
pub fn hash_of_messages(wire: &[InTransit]) -> u64 {
    hash_of_all(wire.iter().map(|it| (it.hash, it.is_given_up)))
}

/// Returns a hash that does not depend on the order of the messages. Each message is given by its own hash and by
/// whether it is given up.
fn hash_of_all(messages: impl Iterator<Item = (u64, bool)>) -> u64 {
    let hashes = messages.map(|(hash, is_given_up)| hash.rotate_left(u32::from(is_given_up)));
    hashes.fold(0, u64::wrapping_add)
}

/// Returns a hash of a text.
pub fn hash_of(write: impl FnOnce(&mut String) -> fmt::Result) -> u64 {
    thread_local! {
        static TEXT: RefCell<String> = const { RefCell::new(String::new()) };
    }
    TEXT.with_borrow_mut(|text| {
        text.clear();
        write(text).unwrap();
        let mut hasher = DefaultHasher::new();
        hasher.write(text.as_bytes());
        hasher.finish()
    })
}

#[test]
fn it_matters_which_message_is_given_up() {
    let hash = |first, second| hash_of_all([(2, first), (4, second)].into_iter());
    assert_ne!(hash(true, false), hash(false, true));
    let orders = [[(2, true), (4, false)], [(4, false), (2, true)]];
    let [one, other] = orders.map(|it| hash_of_all(it.into_iter()));
    assert_eq!(one, other, "the order does not matter");
}
