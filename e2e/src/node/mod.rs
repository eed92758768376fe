//! Real nodes on this machine: each a kubelet and a containerd in namespaces of its own.
//!
//! ```text
//!  host        ControlPlane (loopback) <── relay ──┐          Site
//!  namespace   Fabric    br0 172.31.0.254 ─────────┤   its bridge, the router between nodes, the API
//!  namespaces  Machine   eth0 172.31.0.N           │   containerd, kubelet, runc, pods; NodeSide
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `available` | whether this machine can do it, and what it lacks |
//! | `site` | a control plane with controllers, and the fabric that machines stand on |
//! | `fabric` | the network between machines, and their way to the API server |
//! | `machine` | power, containerd, kubelet; one machine is one node |
//! | `side` | what serves a machine's pods with addresses |
//! | `holder`, `guest` | namespaces and processes in them |
//! | `shipped` | the image of this repository |
//! | `cgroups`, `image`, `config` | what a kubelet and a containerd want to find |
//!
//! # Guarantees
//! - Nothing listens on the host and no interface, route, mount or setting of the host changes.
//! - Everything ends with its value, and with this process however that ends: a machine is one process
//!   that holds its namespaces, and the kernel kills what is in them when it dies. No process is ever
//!   looked for by its name.
//! - Any number of sites may run beside each other: each network is private, names bear the process id.
//!
//! # Caveats
//! - All machines share one kernel, its clock and `/sys`.
//! - The API server cannot reach the kubelets: no `kubectl exec` or `logs`. Use [`Machine::run`] and
//!   [`Machine::run_in_pod`].

mod available;
mod cgroups;
mod config;
mod fabric;
mod guest;
mod holder;
mod image;
mod machine;
mod shipped;
mod side;
mod site;

pub use available::{available, macvlan};
pub use fabric::Fabric;
pub use guest::Guest;
pub use holder::Holder;
pub use image::IMAGE;
pub use machine::{Machine, MachineOptions};
pub use shipped::{SHIPPED, shipped};
pub use side::{Agent, NodeSide};
pub use site::{Site, SiteOptions};
