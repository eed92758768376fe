//! The loop of the default pool. The leader creates the pool if the cluster has no pool and the settings ask for a
//! default pool.
//!
//! [`super::bootstrap`] decides on the ranges of the pool. This loop decides when to create it, sends the requests and
//! handles the answers. Two controllers that start at the same time create only one pool, because the name is fixed and
//! the API server rejects the second creation.

use std::time::Duration;

use super::bootstrap::{BootstrapError, Cluster, decide};
use super::queue::{Load, Queue};
use super::reconcile::{Loop, RequestAnswer};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::cluster::request::{ApiRequest, ObjectSpec, Rejection, RequestOutcome};
use crate::settings::ControllerSettings;
use cadastre_core::Addr;

/// While no node has an address, the loop checks for one at this interval.
const IDLE_PAUSE: Duration = Duration::from_secs(5);

/// When the loop checks next, and the facts on which the decision about the default pool is based.
#[derive(Clone, Debug, Default)]
pub struct DefaultPool {
    /// Schedules the next check; the single key stands for the default pool
    pub queue: Queue<()>,
    in_flight: bool,
    /// kubeadm's configuration as last read; `None` if the cluster has no such configuration
    kubeadm: Option<String>,
    /// Whether kubeadm's configuration was read since the last error
    has_read: bool,
    /// Why there is no default pool, as reported to the log
    trouble: Option<String>,
}

impl Loop for DefaultPool {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        self.in_flight = false;
        match answer.outcome {
            RequestOutcome::Kubeadm(text) => {
                self.kubeadm.clone_from(text);
                self.has_read = true;
                self.queue.add(());
            }
            RequestOutcome::Rejected(Rejection::Missing) if !self.has_read => {
                self.kubeadm = None;
                self.has_read = true;
                self.queue.add(());
            }
            RequestOutcome::Rejected(Rejection::Rejected(why)) => {
                self.trouble = Some(format!("no default pool: the API server refuses: {why}"));
                self.queue.add_failed((), cx.now.mono);
            }
            // Another controller may have created the pool, or the outcome of the write is unknown. The next check
            // comes after a delay, in which the watch may deliver the pool.
            _ => {
                self.queue.add_failed((), cx.now.mono);
            }
        }
        AffectedLoops::default()
    }
}

impl DefaultPool {
    /// Returns why the default pool cannot be created. Returns `None` if no reason is known, or a pool exists.
    pub fn trouble(&self) -> Option<&String> {
        self.trouble.as_ref()
    }

    /// Returns the next request, if the settings ask for a default pool and the cluster has no pool.
    pub(crate) fn next_urgent(
        &mut self,
        settings: &ControllerSettings,
        cx: &Context,
    ) -> Option<(ApiRequest, Purpose)> {
        let allocate = settings.default_pool?;
        if self.in_flight || !cx.cache.pools.is_empty() {
            self.trouble = None;
            return None;
        }
        self.queue.pop(cx.now.mono)?;
        if settings.default_pool_cidrs.is_empty() && !self.has_read {
            self.in_flight = true;
            return Some((ApiRequest::ReadKubeadm, Purpose::DefaultPool));
        }
        let nodes = cx.cache.nodes.iter();
        let node_addresses: Vec<Addr> = nodes.flat_map(|node| node.addresses.to_vec()).collect();
        let services = cx.cache.services.iter().flat_map(|it| it.cidrs.clone());
        let services: Vec<_> = services.chain(settings.service_cidrs.clone()).collect();
        let cluster = Cluster {
            flags: &settings.default_pool_cidrs,
            kubeadm: self.kubeadm.as_deref(),
            node_addresses: &node_addresses,
            services: &services,
        };
        let error = match decide(&cluster, allocate) {
            Ok(pool) => {
                self.in_flight = true;
                let name = pool.metadata.name.unwrap_or_default().into();
                let spec = ObjectSpec::Pool(Box::new(pool.spec));
                return Some((ApiRequest::Create(name, spec), Purpose::DefaultPool));
            }
            Err(error) => error,
        };
        let mut pause = IDLE_PAUSE;
        if error != BootstrapError::NoNode {
            // An administrator has to act, perhaps by editing kubeadm's ConfigMap. So the loop reads the ConfigMap
            // again.
            self.has_read = false;
            pause = 6 * IDLE_PAUSE;
        }
        self.trouble = Some(error.to_string());
        self.queue.add_at((), cx.now.mono + pause);
        None
    }
}
