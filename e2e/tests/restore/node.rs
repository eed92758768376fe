//! A node with a real agent, and the addresses that are in use on it.

use std::collections::BTreeMap;

use cadastre_core::Addr;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::node_agent::{NodeAgent, add, attachment};
use cadastre_e2e::{ControlPlane, Fixtures};
use cadastre_node::{Op, OpError};

use crate::{GROUP, eventually};

/// A node, its agent, and the addresses that are in use there.
pub struct Node {
    pub name: String,
    /// A map from each container to its address
    pub held: BTreeMap<String, Addr>,
    agent: NodeAgent,
}

impl Node {
    /// Creates the Node and starts its agent. Does not wait until the agent is ready.
    pub async fn join(cluster: &ControlPlane, api: &Fixtures, name: &str) -> Self {
        register(api, name).await;
        let flags = ["--publish-interval", "1"];
        let mut agent = NodeAgent::new(cluster, ADMIN, name, &flags).unwrap();
        agent.start().unwrap();
        Self {
            name: name.to_owned(),
            held: BTreeMap::new(),
            agent,
        }
    }

    /// Assigns `count` more addresses. Waits until the node has them.
    pub async fn add_many(&mut self, count: usize) {
        for _ in 0..count {
            let what = format!("{} gives an address", self.name);
            let (container, addr) =
                eventually(&what, async || Ok(Some(self.try_add().await?))).await;
            self.held.insert(container, addr);
        }
    }

    /// Requests one address, and returns the container and the address. The caller records them in [`Self::held`].
    pub async fn try_add(&self) -> Result<(String, Addr), OpError> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let container = format!("c{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let addresses = self.agent.add(add(&container)).await?;
        Ok((container, addresses[0]))
    }

    pub async fn delete_all(&mut self) {
        for container in std::mem::take(&mut self.held).into_keys() {
            let del = Op::Del(attachment(&container));
            self.agent.ask(del).await.unwrap();
        }
    }
}

/// Creates the Node, as a kubelet does.
pub async fn register(api: &Fixtures, name: &str) {
    api.node(GROUP, name).await.unwrap();
}
