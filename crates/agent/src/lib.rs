//! The agent of a node: it assigns addresses from the node's ranges, publishes which are in use, requests and
//! releases blocks, and finds leaks.
//!
//! ```text
//!  CNI plugin ──cni.sock──►┐                     ┌──► store thread (node): the durable store
//!  others ────agent.sock──►┴─► service ──────────┤
//!                                ▲ choice, pods  └──► nothing free: a wish, and a bounded wait
//!                                │
//!  own NodeSubnet, Node, Pods ─► machine ─► demand, status, publish ──► NodeSubnet.status
//!                                     ├─► addresses ──► NodeAddresses
//!                                     ├─► leaks ◄── runtime's sandboxes, network namespaces
//!                                     └─► files: CNI conflist, subnet.env
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `snapshot` | the ranges of the node and the addresses in use, as read from the store at one moment |
//! | `demand` | how many addresses are wanted, and which empty blocks can be released |
//! | `status` | the content of NodeSubnet.status |
//! | [`publish`], `jitter` | when it is published |
//! | [`addresses`] | what is published in NodeAddresses, and when |
//! | [`pods`] | the pods of this node |
//! | [`namespaces`] | the namespaces of its pods |
//! | `notes` | what the store keeps about pods and namespaces |
//! | `choice` | which pools serve a pod |
//! | [`leaks`] | addresses whose attachments are gone, and how that is proven |
//! | `pending_adds` | ADDs that wait because no address was free |
//! | `rebuild` | the addresses in use, from other sources than the store |
//! | [`machine`] | all of the above as one state machine: events in, effects out |
//! | [`files`] | files that other programs read |
//! | `served` | whether the node's pods use another network |
//! | [`metrics`] | figures for Prometheus |
//! | `masquerade` | which packets of pods leave with the node's address |
//!
//! These make the decisions, and know neither a clock nor the API. The others carry them out:
//!
//! | file | subject |
//! |---|---|
//! | [`parts`] | the settings of the loop, and the parts it works with |
//! | [`run`] | the loop: watches in, effects out |
//! | `carry`, `publishing` | carrying out effects: on the store, the files and the servers; on the API |
//! | [`seen`] | what the agent reads of the objects of this node |
//! | `leak_verifier` | asking the API, the runtime and the kernel about leak candidates |
//! | `store` | opening the store, or creating a new one in place of one that was lost |
//! | [`ledger`] | access to the store thread for async tasks |
//! | [`service`], [`shared`] | operations of plugins and others; what the watches have shown them |
//! | [`plugin_socket`], [`grpc`] | the two sockets |
//! | [`unix`] | sockets with restricted access |
//! | [`cri`] | a client of the container runtime |
//! | [`events`] | reports to users |
//!
//! # Guarantees
//! - No request of a pod waits for the API server, except that an ADD on a node without a free address waits for a
//!   block, for a bounded time.
//! - While the API server is away, addresses are assigned from the ranges known last, also after a restart.
//! - Ranges of an earlier Node object of this name assign no new addresses.
//! - An address is released without a DEL only on two proofs: the pod is gone or has a newer sandbox, and the
//!   sandbox that had the address is gone.

#![warn(unreachable_pub)]

pub mod addresses;
mod attached;
mod carry;
mod choice;
pub mod cri;
mod demand;
pub mod events;
pub mod files;
pub mod grpc;
mod jitter;
mod leak_verifier;
pub mod leaks;
pub mod ledger;
pub mod machine;
mod masquerade;
pub mod metrics;
pub mod namespaces;
mod notes;
pub mod parts;
mod pending_adds;
pub mod plugin_socket;
pub mod pods;
pub mod publish;
mod publish_io;
mod rebuild;
pub mod run;
pub mod seen;
mod served;
pub mod service;
pub mod shared;
mod snapshot;
mod status;
mod store;
mod superseded;
pub mod unix;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;
