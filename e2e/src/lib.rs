//! Runs a real Kubernetes control plane on this host, for the tests, the benches and the demo.
//!
//! etcd, kube-apiserver and, if a test needs it, kube-controller-manager run as plain processes on loopback. Most tests
//! need no containers, no nodes and no root. They only create Node objects through the API, because the controller
//! reads nothing else of a node. Tests of the agent with pods run real nodes ([`node`]).
//!
//! ```text
//! assets ──> ControlPlane ──> etcd, kube-apiserver, kube-controller-manager   (process, scratch)
//!                 │
//!                 ├─ client(), kubectl(), kubeconfig()  ──> tests, Daemon (the binary under test)
//!                 ├─ nodes, raw                         ──> many objects, fast
//!                 ├─ TestCluster, Fixtures              ──> a running controller, objects, waits
//!                 ├─ NodeAgent, Agents                  ──> `cadastre agent` as a process
//!                 ├─ Kubelets                           ──> many pods without containers
//!                 ├─ Prometheus, Browser                ──> what users look at
//!                 ├─ clients                            ──> programs in other languages
//!                 ├─ node::Site, node::Machine          ──> real kubelets, containerd, pods
//!                 └─ History                            ──> every revision of every node's podCIDRs
//!
//! ReplicatedControlPlane ──> etcd and kube-apiserver, three of each   (etcd, apiserver)
//!                 ├─ Balancer                           ──> loses, delays and breaks what clients send
//!                 └─ Revisions                          ──> every revision of everything, from etcd itself
//! ```
//!
//! Errors are `anyhow`, because callers only print them and stop. The text of an error says what was tried and what to
//! do.

pub mod admission;
pub mod apiserver;
pub mod assets;
pub mod audit;
pub mod balancer;
pub mod browser;
pub mod clients;
pub mod cluster;
pub mod cni_callers;
pub mod control_plane;
pub mod crds;
pub mod daemon;
mod download;
pub mod etcd;
pub mod fixtures;
pub mod helm;
pub mod history;
pub mod hollow_kubelet;
pub mod install;
pub mod kcm;
pub mod kubeconfig;
pub mod kubevirt;
pub mod lease;
pub mod linearizability;
pub mod metrics;
pub mod node;
pub mod node_agent;
pub mod nodes;
pub mod permissions;
pub mod pki;
pub mod ports;
pub mod process;
pub mod prometheus;
pub mod raw;
pub mod replicas;
pub mod revisions;
pub mod scheduler;
pub mod scratch;
pub mod small_disk;
pub mod stand_in;
pub mod wait;
pub mod wire;

pub use balancer::Balancer;
pub use browser::Browser;
pub use cluster::TestCluster;
pub use control_plane::{ControlPlane, Options};
pub use daemon::Daemon;
pub use fixtures::Fixtures;
pub use history::History;
pub use hollow_kubelet::Kubelets;
pub use kcm::KcmOptions;
pub use node_agent::{Agents, NodeAgent};
pub use process::Process;
pub use replicas::ReplicatedControlPlane;
pub use revisions::Revisions;
