//! The agent of a node: it gives addresses from what the node holds, tells the API what is in use,
//! asks for more, lets go what is spare, and finds leaks.
//!
//! ```text
//!  CNI plugin ──cni.sock──►┐                     ┌──► keeper (node): the durable store
//!  others ────agent.sock──►┴─► service ──────────┤
//!                                ▲ choice, pods  └──► dry: a wish, and a bounded wait
//!                                │
//!  own NodeSubnet, Node, Pods ─► machine ─► demand, status, publish ──► NodeSubnet.status
//!                                     ├─► addresses ──► NodeAddresses
//!                                     ├─► leaks ◄── runtime's sandboxes, network namespaces
//!                                     └─► files: CNI conflist, subnet.env
//! ```
//!
//! | file | subject |
//! |---|---|
//! | [`snapshot`] | what is given and held, as read from the store at once |
//! | [`demand`] | how many addresses are wanted, which empty block can go |
//! | [`status`] | what is told of that in NodeSubnet.status |
//! | [`publish`], `jitter` | when it is told |
//! | [`addresses`] | what is told of the addresses in use in NodeAddresses, and when |
//! | [`pods`] | the pods of this node |
//! | [`namespaces`] | the namespaces of its pods |
//! | `notes` | what of that the store keeps |
//! | [`choice`] | which pools serve a pod |
//! | [`leaks`] | addresses whose attachments are gone, and how that is proven |
//! | [`wishes`] | ADDs that found nothing |
//! | [`rebuild`] | what is in use, as others remember it |
//! | [`machine`] | all of that as one state machine: events in, effects out |
//! | [`files`] | files that other programs read |
//! | [`served`] | whether another's network has the node's pods |
//! | [`metrics`] | figures for Prometheus |
//! | [`masquerade`] | whose address others see |
//!
//! These decide, and know neither a clock nor the API. The others carry it out:
//!
//! | file | subject |
//! |---|---|
//! | [`parts`] | what the loop is set to, and works with |
//! | [`run`] | the loop: watches in, effects out |
//! | `carry`, `outward` | what effects do: the store, the files and those who serve; the API |
//! | [`seen`] | what counts of the objects of this node |
//! | [`proof`] | asking the API, the runtime and the kernel about suspicious attachments |
//! | [`store`] | opening the store; a new one in place of one that was lost |
//! | [`ledger`] | the keeper of the store, for tasks |
//! | [`service`], [`known`] | operations of plugins and others; what the watches have shown them |
//! | [`plugin_socket`], [`grpc`] | the two sockets |
//! | [`unix`] | sockets that only few may use |
//! | [`cri`] | the container runtime's word |
//! | [`events`] | what people are told |
//!
//! # Guarantees
//! - No request of a pod waits for the API server, but an ADD on a node that has nothing left, which
//!   waits for a block for a bounded time.
//! - With the API server gone, addresses are given from what was held last, also after a restart.
//! - Ranges of an earlier Node object of this name give nothing new.
//! - An address is freed without a DEL only on two proofs: the pod is gone or has a newer sandbox, and the
//!   sandbox that had the address is gone.

pub mod addresses;
pub mod attached;
mod carry;
pub mod choice;
pub mod cri;
pub mod demand;
pub mod events;
pub mod files;
pub mod grpc;
mod jitter;
pub mod known;
pub mod leaks;
pub mod ledger;
pub mod machine;
pub mod masquerade;
pub mod metrics;
pub mod namespaces;
mod notes;
mod outward;
pub mod parts;
pub mod plugin_socket;
pub mod pods;
pub mod proof;
pub mod publish;
pub mod rebuild;
pub mod run;
pub mod seen;
pub mod served;
pub mod service;
pub mod snapshot;
pub mod status;
pub mod store;
pub mod superseded;
pub mod unix;
pub mod wishes;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;
