//! Real nodes on this host: each is a kubelet and a containerd in namespaces of their own.
//!
//! ```text
//!  host        ControlPlane (loopback) <── relay ──┐          Site
//!  namespace   Fabric    br0 172.31.0.254 ─────────┤   its bridge, the router between nodes, the API
//!  namespaces  Machine   eth0 172.31.0.N           │   containerd, kubelet, runc, pods; NodeSide
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `available` | whether nodes can run on this host, and what is missing |
//! | `machines` | a control plane with controllers, and the fabric that connects machines |
//! | `fabric` | the network between machines, and their way to the API server |
//! | `machine` | power, containerd, kubelet, kube-proxy; one machine is one node |
//! | `node_software` | CNI plugins, their configuration, and the agent of a machine |
//! | `holder`, `guest` | namespaces and processes in them |
//! | `router` | routers on the fabric |
//! | `pods` | pods of a group |
//! | `shipped` | the image of this repository |
//! | `cgroups`, `image`, `config` | what a kubelet and a containerd need to run |
//!
//! - Nothing listens on the host, and no interface, route, mount or setting of the host changes.
//! - Everything ends when its value is dropped, and when this process ends in whatever way. One process holds a
//!   machine's namespaces. When that process dies, the kernel kills everything in them. No process is looked up by
//!   name.
//! - Any number of sites may run at the same time, because each has a private network, and names outside the namespaces
//!   contain the process id.
//!
//! # Caveats
//! - All machines share one kernel, its clock and `/sys`.
//! - The API server cannot reach the kubelets, so `kubectl exec` and `kubectl logs` do not work. Use [`Machine::run`]
//!   and [`Machine::run_in_pod`].

mod available;
mod cgroups;
mod config;
mod fabric;
mod guest;
mod holder;
mod image;
mod machine;
mod machines;
mod node_software;
pub mod pods;
mod router;
mod shipped;

pub use available::{available, ipvlan, kube_proxy, macvlan};
pub use config::DNS;
pub use fabric::{API, Fabric};
pub use guest::Guest;
pub use holder::Holder;
pub use image::IMAGE;
pub use machine::{Machine, MachineOptions};
pub use machines::{Site, SiteOptions};
pub use node_software::{Agent, NodeSide};
pub use router::{Router, routing_daemons};
pub use shipped::{SHIPPED, shipped};
