//! A stand-in for a kube-apiserver with far more Nodes and Pods than a real one can have on a test machine.
//!
//! Nodes and Pods are computed when they are requested, from one Node and one Pod that a real kube-apiserver has sent
//! ([`Recorded`]). Objects of all other kinds are kept in memory. The stand-in speaks HTTP without TLS, because TLS
//! would take processor time from the controller on the same machine.
//!
//! # What is left out
//! - Authentication, admission, defaults, validation, schemas, managed fields and etcd. A write costs nearly nothing.
//! - Each page of a list shows the present state, and names the version of the first page. A watch from this version
//!   repeats changes that a page has shown already.
//! - Watches of Pods, which never change, deliver only bookmarks.
//! - Of the writes of Nodes there is only the JSON Patch that assigns podCIDRs. The tests in a patch of a Node are not
//!   evaluated. Other patches change only the version, so no Node may be without a range.

mod http_api;
mod objects;
mod recorded;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::raw::Endpoint;
use objects::Objects;
pub use recorded::Recorded;

/// A running stand-in. It ends when it is dropped.
pub struct StandIn {
    address: SocketAddr,
    objects: Arc<Objects>,
    task: JoinHandle<()>,
}

/// How many objects a [`StandIn`] has when it starts.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Nodes, each with the podCIDR that [`pod_cidr`] returns
    pub nodes: u32,
    /// Running Pods on each of these Nodes, each with an address of the Node's podCIDR; at most 62
    pub pods_a_node: u32,
}

/// Returns the podCIDR of the `i`-th node: 10.0.0.0/26, 10.0.0.64/26 and so on.
pub fn pod_cidr(i: u32) -> String {
    format!("{}/26", Ipv4Addr::from(0x0A00_0000 + 64 * i))
}

/// Returns the name of the `i`-th node.
pub fn node_name(i: u32) -> String {
    format!("node-{i:06}")
}

impl StandIn {
    /// Starts a stand-in on a free port of 127.0.0.1.
    pub async fn start(recorded: Recorded, size: Size) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let objects = Arc::new(Objects::new(recorded, size));
        let served = http_api::serve(listener, Arc::clone(&objects));
        let task = tokio::spawn(async move {
            // The task ends when the stand-in is dropped.
            let _ = served.await;
        });
        Ok(StandIn {
            address,
            objects,
            task,
        })
    }

    /// Returns the endpoint for clients that do not use a kubeconfig.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::without_tls(self.address.port())
    }

    /// Writes a kubeconfig into `folder`, and returns its path.
    pub fn kubeconfig(&self, folder: &Path) -> Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "stand-in",
            "clusters": [{"name": "stand-in", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "stand-in", "user": {}}],
            "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": "stand-in"}}],
        });
        let path = folder.join("stand-in.kubeconfig");
        let text = serde_json::to_string(&config)?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Stores an object of another kind than Node and Pod. `collection` is the path of the kind's collection.
    pub fn put(&self, collection: &str, object: serde_json::Value) {
        self.objects.put(collection, object);
    }

    /// Adds Nodes without podCIDRs, all at once.
    pub fn join(&self, count: u32) {
        self.objects.join(count);
    }

    /// Returns how many Nodes have podCIDRs.
    pub fn assigned(&self) -> usize {
        self.objects.assigned()
    }

    /// Returns how many objects of another kind than Node and Pod there are.
    pub fn count(&self, collection: &str) -> usize {
        self.objects.count(collection)
    }

    /// Returns how many requests of each kind came since this was last called, as text.
    pub fn take_requests(&self) -> String {
        self.objects.take_requests()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.task.abort();
    }
}
