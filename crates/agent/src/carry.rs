//! Carries out the effects that the state machine returns. The effects concern the store, the runtime, the API server,
//! the node's files and the servers on the node's sockets.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::announce::Announcement;
use super::cri::Runtime;
use super::events::Events;
use super::files::kept::KeptFiles;
use super::leak_verifier::LeakVerifier;
use super::leaks::{Reasons, netns_of_others};
use super::ledger::{LedgerClient, LedgerError};
use super::machine::{
    AgentEffect, AgentEvent, CountedEvent, LeakScan, ServiceView, StoreAnswer, StoreFound,
    StoreQuestion, StoreTrouble,
};
use super::masquerade::Masquerade;
use super::netns;
use super::publish::WriteOutcome;
use super::publish_io;
use super::service::{SUBNETS, Service};
use super::store;
use super::unix::{OnlyOne, SocketError};
use crate::metrics::{AgentMetrics, figure};
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_daemon::telemetry::Readiness;
use cadastre_node::store_thread::CallTimes;
use cadastre_node::{HoldingsFile, Op, Snapshot, clock};

/// The time limit of a DEL for a leaked address.
const FREE_LIMIT: Duration = Duration::from_secs(10);

/// The parts of the agent that the main loop uses besides the state machine.
pub struct AgentParts {
    /// A client of the API server
    pub client: Client,
    /// The path of the store's file
    pub store: PathBuf,
    /// The path of the file with the node's ranges and the notes on pods, which survives a reboot
    pub holdings: PathBuf,
    /// The folders of the store and of the holdings that this process has not locked yet
    pub unlocked: BTreeSet<PathBuf>,
    /// Runs transactions on the store
    pub ledger: LedgerClient,
    /// The path of the container runtime's socket; `None` if the agent must not ask the runtime
    pub cri: Option<PathBuf>,
    /// Writes the files that other programs read
    pub files: KeptFiles,
    /// Writes the file for a routing daemon; `None` if there is none
    pub announcement: Option<Arc<Announcement>>,
    /// Whether the agent adds routes to the pods of other nodes. If false, the agent removes routes of an earlier run
    pub direct_routes: bool,
    /// Handles the requests of the CNI plugin and of gRPC clients
    pub service: Arc<Service>,
    /// The state of `/readyz`
    pub readiness: Readiness,
    /// Counts status writes and released leaks, and reports the numbers of addresses and blocks in the store
    pub metrics: AgentMetrics,
    /// Logs and emits events
    pub events: Events,
    /// Passes the leak candidates to the gRPC API
    pub leaks: watch::Sender<Arc<Reasons>>,
    /// Passes the node's ranges to the gRPC API
    pub holding: watch::Sender<Arc<NodeAllocation>>,
    /// The main loop ends when this token is cancelled
    pub stop: CancellationToken,
}

/// Carries out effects. Short effects are carried out at once, the others in tasks.
pub(super) struct Carrier {
    /// The name of the Node; its NodeSubnet and NodeAddresses have the same name
    node: String,
    pub parts: AgentParts,
    leak_verifier: LeakVerifier,
    /// The file at [`AgentParts::holdings`]
    holdings: HoldingsFile,
    /// Keep other agent processes from using the folders of the store and of the holdings
    locks: Vec<OnlyOne>,
    masquerade: Masquerade,
    tasks: JoinSet<anyhow::Result<AgentEvent>>,
}

impl Carrier {
    pub(super) fn new(node: String, parts: AgentParts) -> Self {
        let leak_verifier = LeakVerifier {
            client: parts.client.clone(),
            node: node.clone(),
            runtime: parts.cri.as_deref().map(Runtime::new),
        };
        let holdings = store::holdings_file(&parts.holdings, &node);
        Self {
            node,
            parts,
            holdings,
            leak_verifier,
            locks: Vec::new(),
            masquerade: Masquerade::default(),
            tasks: JoinSet::new(),
        }
    }

    /// Returns what the servers on the node's sockets have recorded: waiting ADDs, refused pods and problems with the
    /// store. Shows in a metric whether the holdings file can be written.
    pub(super) fn service_view(&self, now: Duration) -> ServiceView {
        let ledger = &self.parts.ledger;
        let (trouble, is_open) = (ledger.trouble(), ledger.is_open());
        let unrecorded = self.holdings.problem();
        let metrics = &self.parts.service.metrics;
        metrics.unrecorded.set(i64::from(unrecorded.is_some()));
        let mut state = self.parts.service.shared.lock();
        let (pending_adds, adds_end) = state.pending_adds.count(now);
        let (address_requests, requests_end) = state.address_requests.current(now);
        ServiceView {
            pending_adds,
            address_requests,
            wishes_end: adds_end.into_iter().chain(requests_end).min(),
            turned_away: state.turned_away.clone(),
            trouble: trouble.map(|refusal| refusal.text),
            unrecorded,
            is_missing: is_open && !self.parts.store.exists(),
        }
    }

    /// Waits for the next task to end and returns its event; `None` if no task is running. Returns an error only if an
    /// administrator must resolve the problem.
    pub(super) async fn answer(&mut self) -> Option<anyhow::Result<AgentEvent>> {
        let done = self.tasks.join_next().await?;
        Some(done.unwrap_or_else(|error| Err(error.into())))
    }

    /// Starts an effect. Returns the effect's event if the effect is done at once and has an event. If the effect runs
    /// in a task, [`Self::answer`] returns its event later.
    pub(super) fn begin(&mut self, effect: AgentEffect) -> anyhow::Result<Option<AgentEvent>> {
        let service = &self.parts.service;
        let metrics = &self.parts.metrics;
        let (client, node) = (self.parts.client.clone(), self.node.clone());
        match effect {
            AgentEffect::Ask(question) => return self.ask(question),
            AgentEffect::Prove(candidates, boot) => {
                let verifier = self.leak_verifier.clone();
                let roots = service.shared.lock().netns_roots.clone();
                self.tasks.spawn(async move {
                    let proven = verifier.prove(candidates, boot, roots).await;
                    Ok(AgentEvent::Proven(proven))
                });
            }
            AgentEffect::Probe(targets) => {
                let service = Arc::clone(service);
                self.tasks.spawn(async move {
                    Ok(AgentEvent::Probed(service.probe_ahead(&targets).await))
                });
            }
            AgentEffect::WriteStatus {
                version,
                status,
                urgent,
            } => {
                let metrics = metrics.clone();
                let heard = service.heard.clone();
                self.tasks.spawn(async move {
                    let written = publish_io::write_status(client, &node, &version, &status).await;
                    let result = match &written {
                        WriteOutcome::Done { version, .. } => {
                            if let Ok(version) = version.parse() {
                                heard.expect(SUBNETS, version);
                            }
                            "done"
                        }
                        WriteOutcome::Outdated => {
                            heard.miss(SUBNETS);
                            "outdated"
                        }
                        WriteOutcome::Failed => "failed",
                    };
                    metrics.status_written(urgent, result);
                    Ok(AgentEvent::Written(written))
                });
            }
            AgentEffect::WriteList {
                owner,
                is_new,
                list,
            } => {
                self.tasks.spawn(async move {
                    let written =
                        publish_io::write_list(client, &node, &owner, is_new, *list).await;
                    Ok(AgentEvent::Listed(written))
                });
            }
            AgentEffect::AskNamespace(name) => {
                self.tasks.spawn(async move {
                    let answer = publish_io::namespace(client, &name).await;
                    Ok(AgentEvent::Namespace(name, answer))
                });
            }
            AgentEffect::WriteFiles {
                holding,
                waits_for_pods,
            } => {
                let report = self.parts.files.refresh(&holding, waits_for_pods);
                return Ok(Some(AgentEvent::Files(report)));
            }
            AgentEffect::Announce(allocation) => {
                if let Some(announcement) = self.parts.announcement.clone() {
                    self.tasks.spawn(async move {
                        let announced = announcement.refresh(&allocation).await;
                        Ok(AgentEvent::Announced(announced))
                    });
                }
            }
            AgentEffect::Masquerade { ranges, holding } => {
                let now = clock::since_boot();
                let trouble = self.masquerade.refresh(ranges.as_deref(), &holding, now);
                return Ok(Some(AgentEvent::Masqueraded(trouble)));
            }
            AgentEffect::Offer { watched, is_news } => {
                service.shared.set_watched(watched, is_news);
            }
            AgentEffect::Held => service.held.send_modify(|count| *count += 1),
            AgentEffect::Holding(holding) => _ = self.parts.holding.send_replace(holding),
            AgentEffect::LeakCandidates(reasons) => {
                metrics.leak_candidates.set(figure(reasons.len()));
                self.parts.leaks.send_replace(reasons);
            }
            AgentEffect::Emit(notice) => self.parts.events.emit(notice),
            AgentEffect::TurnedAwayReported => service.shared.lock().turned_away = None,
            AgentEffect::Ready(is_ready, why) => {
                self.parts.readiness.set_without_api(is_ready, &why);
            }
            AgentEffect::Count(CountedEvent::Snapshot(snapshot)) => metrics.set(&snapshot),
            AgentEffect::Count(CountedEvent::Freed(reason)) => metrics.leak_freed(reason),
            AgentEffect::Count(CountedEvent::PublishLag(lag)) => {
                metrics.publish_lag.set(lag.as_secs_f64());
            }
            AgentEffect::Count(CountedEvent::Damaged) => metrics.damaged.inc(),
            AgentEffect::Count(CountedEvent::Announced(is_done)) => {
                metrics.announce_errors.set(i64::from(!is_done));
            }
        }
        Ok(None)
    }

    fn ask(&mut self, question: StoreQuestion) -> anyhow::Result<Option<AgentEvent>> {
        if question == StoreQuestion::Open
            && let Some(unclear) = self.lock_store()?
        {
            return Ok(Some(AgentEvent::Answer(StoreAnswer::Opened(unclear))));
        }
        let ledger = self.parts.ledger.clone();
        let path = self.parts.store.clone();
        let holdings = self.holdings.clone();
        let service = Arc::clone(&self.parts.service);
        let verifier = self.leak_verifier.clone();
        self.tasks.spawn(async move {
            let answer = match question {
                StoreQuestion::Open => {
                    let found = store::find(&path, holdings.clone()).await?;
                    if matches!(found, StoreFound::Open) {
                        ledger.open(&path, holdings)?;
                    }
                    StoreAnswer::Opened(found)
                }
                StoreQuestion::Close(why) => {
                    ledger.close(why).await;
                    StoreAnswer::Closed
                }
                StoreQuestion::Make {
                    holding,
                    known,
                    has_addresses_outside,
                } => {
                    let file = holdings.clone();
                    let made =
                        store::make(&path, file, holding, known, has_addresses_outside).await;
                    if made.is_ok() {
                        ledger.open(&path, holdings)?;
                    }
                    StoreAnswer::Made(made.map_err(|error| error.to_string()))
                }
                StoreQuestion::Look => {
                    let looked = ledger.look().await.map_err(StoreTrouble::from);
                    StoreAnswer::Looked(looked.map(|snapshot| with_netns(snapshot, &service)))
                }
                StoreQuestion::Transact(transaction) => {
                    let done = ledger.transact(transaction).await;
                    done.unwrap_or_else(|error| StoreAnswer::Failed(error.into()))
                }
                StoreQuestion::Free(attachment) => {
                    let call = CallTimes::until(clock::since_boot() + FREE_LIMIT);
                    let freed = ledger.ask(Op::Del(attachment), call).await;
                    StoreAnswer::Freed(freed.map(drop).map_err(|refusal| refusal.to_string()))
                }
                StoreQuestion::Sandboxes => {
                    let sandboxes = verifier.sandboxes().await;
                    StoreAnswer::Sandboxes(sandboxes.map_err(|error| error.to_string()))
                }
            };
            Ok(AgentEvent::Answer(answer))
        });
        Ok(None)
    }

    /// Locks the store and the holdings against other agent processes. Returns `None` if this process now has the locks.
    /// Returns the reason if a lock cannot be used. Fails if another process has a lock.
    fn lock_store(&mut self) -> anyhow::Result<Option<StoreFound>> {
        while let Some(folder) = self.parts.unlocked.first() {
            match OnlyOne::lock(folder) {
                Ok(lock) => self.locks.push(lock),
                Err(error @ SocketError::Taken { .. }) => return Err(error.into()),
                Err(error) => return Ok(Some(StoreFound::Unclear(error.to_string()))),
            }
            self.parts.unlocked.pop_first();
        }
        Ok(None)
    }
}

/// Returns the snapshot together with the paths of network namespaces that are gone. Only the network namespaces of
/// attachments without a pod are checked. Called right after the snapshot was taken.
fn with_netns(snapshot: Snapshot, service: &Service) -> LeakScan {
    let mut state = service.shared.lock();
    let paths = snapshot.attachments.iter().map(|it| it.netns.as_str());
    netns::note_roots(paths, &mut state.netns_roots);
    let gone = netns::gone(netns_of_others(&snapshot), &state.netns_roots);
    LeakScan { snapshot, gone }
}

impl From<LedgerError> for StoreTrouble {
    fn from(error: LedgerError) -> Self {
        Self {
            is_lost: error.is_lost(),
            text: error.to_string(),
        }
    }
}
