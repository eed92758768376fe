//! The agent of a node. The agent assigns addresses from the node's ranges, publishes which addresses are in use,
//! requests and releases blocks, and finds leaks.
//!
//! ```text
//!  CNI plugin ──cni.sock──►┐                     ┌──► store thread (node): the durable store
//!  gRPC ──────agent.sock──►┴─► service ──────────┤
//!                                ▲ choice, pods  └──► no free address: request a block, bounded wait
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
//! | [`publish`], `jitter` | when the status is published |
//! | [`addresses`] | what is published in NodeAddresses, and when |
//! | [`pods`] | the pods of this node |
//! | `namespaces` | the namespaces of these pods |
//! | `notes` | the store's notes on the pools that each pod may use |
//! | `choice` | which pools serve a pod |
//! | [`leaks`] | which addresses are leaked, and how a leak is proven |
//! | `pending_adds` | ADDs that wait because no address was free |
//! | `address_requests` | ADDs that wait for requested addresses which are outside the node's ranges |
//! | `conditions` | the conditions of the NodeSubnet that the agent writes |
//! | `conflicts` | which addresses are probed before a pod needs them, and the reports about addresses in conflict |
//! | `rebuild` | which addresses are in use, according to other sources than the store |
//! | [`machine`] | all of the above as one state machine: events in, effects out |
//! | [`files`] | files that other programs on the node read |
//! | [`template`] | templates of such files |
//! | `served` | whether another network serves the node's pods |
//! | [`metrics`] | figures for Prometheus |
//! | `masquerade` | which packets of pods leave with the node's address |
//!
//! The modules above make the decisions, and use neither a clock nor the API. The modules below carry out the
//! decisions:
//!
//! | file | subject |
//! |---|---|
//! | [`run`] | the main loop: feeds watch events to the state machine, and starts the effects |
//! | `carry`, `publish_io` | carry out effects: on the store, files and servers (`carry`); on the API (`publish_io`) |
//! | [`seen`] | the parts of this node's API objects that the agent reads |
//! | `leak_verifier` | asks the API, the runtime and the kernel about leak candidates |
//! | `netns` | which network namespaces exist |
//! | `netlink` | requests to the kernel about links, neighbours and routes |
//! | [`routes`] | routes to the pods of other nodes; a task that the main loop starts |
//! | [`announce`] | the file from which a routing daemon such as BIRD announces the node's ranges |
//! | [`probe`], `neighbours` | ask the link whether another host has an address |
//! | `store` | checks the store's file, and creates a new one in place of one that was lost |
//! | [`ledger`] | access to the store thread for async tasks |
//! | [`service`], [`shared`] | requests of the CNI plugin and of gRPC clients; state of the main loop and the servers |
//! | [`plugin_socket`], [`grpc`] | the sockets for the CNI plugin and for gRPC clients |
//! | [`unix`] | sockets with restricted access |
//! | [`cri`] | a client of the container runtime |
//! | [`events`] | Kubernetes events |
//!
//! # Guarantees
//! - An ADD waits for the API server only if the watches have not shown its pod yet, or if the node needs a new block
//!   for the ADD. Such a wait is bounded. Other requests never wait for the API server.
//! - While the API server cannot be reached, addresses are assigned from the last known ranges, even after a restart of
//!   the agent.
//! - No new address is assigned from the ranges of an earlier Node object with the name of this node.
//! - The agent releases an address of a pod without a DEL only on two proofs. The first proof is that the pod is gone
//!   or has a newer sandbox. The second proof is that the sandbox that had the address is gone.

#![warn(unreachable_pub)]

mod address_requests;
pub mod addresses;
pub mod announce;
mod attached;
mod carry;
mod choice;
mod conditions;
mod conflicts;
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
mod neighbours;
mod netlink;
mod netns;
mod notes;
mod pending_adds;
pub mod plugin_socket;
pub mod pods;
pub mod probe;
pub mod publish;
mod publish_io;
mod rebuild;
pub mod routes;
pub mod run;
pub mod seen;
mod served;
pub mod service;
pub mod shared;
mod snapshot;
mod status;
mod store;
mod superseded;
pub mod template;
pub mod unix;

#[cfg(test)]
#[path = "../../../tests/common/mutated.rs"]
mod mutated;
