//! Carries out the effects of the state machine on the store, the runtime, the node's files and the servers.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::files::kept::KeptFiles;
use super::leak_verifier::{LeakVerifier, gone, note_roots};
use super::leaks::netns_of_others;
use super::ledger::{LedgerClient, LedgerError};
use super::machine::{
    AgentEffect, AgentEvent, CountedEvent, FilesReported, LeakScan, ServiceView, StoreAnswer,
    StoreFound, StoreQuestion, StoreTrouble,
};
use super::masquerade::Masquerade;
use super::parts::{AgentParts, AgentSettings};
use super::publish::WriteOutcome;
use super::publish_io;
use super::service::Service;
use super::store;
use super::unix::{OnlyOne, SocketError};
use cadastre_node::store_thread::CallTimes;
use cadastre_node::{Op, Snapshot, clock};

/// The time limit of a DEL for a leaked address.
const FREE_LIMIT: Duration = Duration::from_secs(10);

/// Carries out effects: short ones at once, others in tasks.
pub(super) struct Carrier {
    settings: AgentSettings,
    parts: AgentParts,
    witnesses: LeakVerifier,
    /// Keeps other agent processes from using the store
    store_lock: Option<OnlyOne>,
    files: KeptFiles,
    masquerade: Masquerade,
    tasks: JoinSet<anyhow::Result<AgentEvent>>,
}

impl Carrier {
    pub(crate) fn new(
        settings: AgentSettings,
        parts: AgentParts,
        witnesses: LeakVerifier,
        files: KeptFiles,
    ) -> Self {
        Self {
            settings,
            parts,
            witnesses,
            store_lock: None,
            files,
            masquerade: Masquerade::default(),
            tasks: JoinSet::new(),
        }
    }

    pub(crate) fn service(&self) -> Arc<Service> {
        Arc::clone(&self.parts.service)
    }

    pub(crate) fn stop(&self) -> CancellationToken {
        self.parts.stop.clone()
    }

    /// Returns what the servers on the node's sockets have recorded: waiting ADDs, refused pods and problems with the
    /// store.
    pub(crate) fn serving(&self, now: Duration) -> ServiceView {
        let ledger = &self.parts.ledger;
        let (trouble, is_open) = (ledger.trouble(), ledger.is_open());
        let mut desk = self.parts.service.known.lock();
        let (wishes, wishes_end) = desk.pending_adds.count(now);
        ServiceView {
            pending_adds: wishes,
            wishes_end,
            turned_away: desk.turned_away.clone(),
            trouble: trouble.map(|refusal| refusal.text),
            is_missing: is_open && !self.settings.store.exists(),
        }
    }

    /// Waits for the next task to end and returns its event; `None` if no task is running. Returns only errors that an
    /// administrator must resolve.
    pub(crate) async fn answer(&mut self) -> Option<anyhow::Result<AgentEvent>> {
        let done = self.tasks.join_next().await?;
        Some(done.unwrap_or_else(|error| Err(error.into())))
    }

    /// Starts an effect. Returns its event if the effect is done at once; otherwise [`Self::answer`] returns the event
    /// later.
    pub(crate) fn begin(&mut self, effect: AgentEffect) -> anyhow::Result<Option<AgentEvent>> {
        let service = &self.parts.service;
        match effect {
            AgentEffect::Ask(question) => return self.ask(question),
            AgentEffect::Prove(candidates, boot) => {
                let witnesses = self.witnesses.clone();
                let roots = service.known.lock().netns_roots.clone();
                self.tasks.spawn(async move {
                    let proven = witnesses.prove(candidates, boot, roots).await;
                    Ok(AgentEvent::Proven(proven))
                });
            }
            AgentEffect::WriteStatus {
                version,
                status,
                urgent,
            } => {
                let (client, name) = (self.parts.client.clone(), self.settings.node.clone());
                let metrics = self.parts.metrics.clone();
                self.tasks.spawn(async move {
                    let written = publish_io::write_status(client, &name, &version, &status).await;
                    let result = match &written {
                        WriteOutcome::Done { .. } => "done",
                        WriteOutcome::Outdated => "outdated",
                        WriteOutcome::Failed => "failed",
                    };
                    metrics.wrote(urgent, result);
                    Ok(AgentEvent::Written(written))
                });
            }
            AgentEffect::WriteList {
                owner,
                is_new,
                list,
            } => {
                let (client, name) = (self.parts.client.clone(), self.settings.node.clone());
                self.tasks.spawn(async move {
                    let listed = publish_io::write_list(client, &name, &owner, is_new, *list).await;
                    Ok(AgentEvent::Listed(listed))
                });
            }
            AgentEffect::AskNamespace(name) => {
                let client = self.parts.client.clone();
                self.tasks.spawn(async move {
                    let answer = publish_io::namespace(client, &name).await;
                    Ok(AgentEvent::Namespace(name, answer))
                });
            }
            AgentEffect::WriteFiles {
                holding,
                waits_for_pods,
            } => {
                let files = &mut self.files;
                files.refresh(&holding, waits_for_pods, clock::since_boot());
                return Ok(Some(AgentEvent::Files(FilesReported {
                    standing: files.standing().cloned(),
                    unwritten: files.unwritten().map(ToOwned::to_owned),
                    is_configured: files.is_configured(),
                })));
            }
            AgentEffect::Masquerade { ranges, holding } => {
                let now = clock::since_boot();
                self.masquerade.refresh(ranges.as_deref(), &holding, now);
                let trouble = self.masquerade.trouble().map(ToOwned::to_owned);
                return Ok(Some(AgentEvent::Masqueraded(trouble)));
            }
            AgentEffect::Offer { shown, is_news } => {
                service.known.update_served_pools(shown, is_news);
            }
            AgentEffect::Held => service.held.send_modify(|count| *count += 1),
            AgentEffect::Holding(holding) => _ = self.parts.holding.send_replace(holding),
            AgentEffect::Suspicious(reasons) => {
                self.parts.metrics.set_leak_candidates(reasons.len());
                self.parts.leaks.send_replace(reasons);
            }
            AgentEffect::Tell(notice) => self.parts.events.emit(notice),
            AgentEffect::ToldTurnedAway => service.known.lock().turned_away = None,
            AgentEffect::Ready(is_ready, why) => {
                self.parts.readiness.set_without_api(is_ready, &why);
            }
            AgentEffect::Count(figure) => self.count(&figure),
        }
        Ok(None)
    }

    fn count(&self, figure: &CountedEvent) {
        let metrics = &self.parts.metrics;
        match figure {
            CountedEvent::Snapshot(snapshot) => metrics.set(snapshot),
            CountedEvent::Freed(reason) => metrics.freed(*reason),
            CountedEvent::Behind(lag) => metrics.set_publish_lag(*lag),
            CountedEvent::Damaged => metrics.damaged(),
        }
    }

    fn ask(&mut self, question: StoreQuestion) -> anyhow::Result<Option<AgentEvent>> {
        if question == StoreQuestion::Open
            && let Some(unclear) = self.lock_store()?
        {
            return Ok(Some(AgentEvent::Answer(StoreAnswer::Opened(unclear))));
        }
        let ledger = self.parts.ledger.clone();
        let path = self.settings.store.clone();
        let service = Arc::clone(&self.parts.service);
        let witnesses = self.witnesses.clone();
        self.tasks.spawn(async move {
            let answer = match question {
                StoreQuestion::Open => StoreAnswer::Opened(open(&ledger, &path).await?),
                StoreQuestion::Close(why) => {
                    ledger.close(why).await;
                    StoreAnswer::Closed
                }
                StoreQuestion::Make { holding, known } => {
                    let made = store::make(&path, holding, known).await;
                    if made.is_ok() {
                        ledger.open(&path)?;
                    }
                    StoreAnswer::Made(made.map_err(|error| error.to_string()))
                }
                StoreQuestion::Look => {
                    let looked = ledger.look().await.map_err(StoreTrouble::from);
                    StoreAnswer::Looked(looked.map(|snapshot| with_netns(snapshot, &service)))
                }
                StoreQuestion::Transact(transaction) => {
                    let failed = transaction.clone();
                    let done = ledger.with(move |it| transaction.run(it)).await;
                    done.unwrap_or_else(|error| failed.failed(error.into()))
                }
                StoreQuestion::Free(attachment) => {
                    let call = CallTimes::until(clock::since_boot() + FREE_LIMIT);
                    let freed = ledger.ask(Op::Del(attachment), call).await;
                    StoreAnswer::Freed(freed.map(|_| ()).map_err(|refusal| refusal.to_string()))
                }
                StoreQuestion::Sandboxes => {
                    let told = witnesses.sandboxes().await;
                    StoreAnswer::Sandboxes(told.map_err(|error| error.to_string()))
                }
            };
            Ok(AgentEvent::Answer(answer))
        });
        Ok(None)
    }

    /// Locks the store against other agent processes. Returns `None` if this process has the lock, or why that is
    /// unclear. Fails if another process has the lock.
    fn lock_store(&mut self) -> anyhow::Result<Option<StoreFound>> {
        if self.settings.is_store_locked || self.store_lock.is_some() {
            return Ok(None);
        }
        let folder = self.settings.store.parent();
        match OnlyOne::lock(folder.unwrap_or(Path::new("/"))) {
            Ok(lock) => {
                self.store_lock = Some(lock);
                Ok(None)
            }
            Err(error @ SocketError::Taken { .. }) => Err(error.into()),
            Err(error) => Ok(Some(StoreFound::Unclear(error.to_string()))),
        }
    }
}

/// Opens the store unless it is missing or damaged.
async fn open(ledger: &LedgerClient, path: &Path) -> anyhow::Result<StoreFound> {
    match store::find(path).await {
        Ok(store::Found::Whole) => {
            ledger.open(path)?;
            Ok(StoreFound::Open)
        }
        Ok(store::Found::Nothing) => Ok(StoreFound::Nothing),
        Ok(store::Found::Damaged { aside, what }) => Ok(StoreFound::Damaged { aside, what }),
        Err(error) if store::is_final(&error) => Err(error.into()),
        Err(error) => Ok(StoreFound::Unclear(error.to_string())),
    }
}

/// Adds to a snapshot which network namespaces are gone. Their paths are looked up right after the snapshot was taken.
fn with_netns(snapshot: Snapshot, service: &Service) -> LeakScan {
    let mut desk = service.known.lock();
    let paths = snapshot.attachments.iter().map(|it| it.netns.as_str());
    note_roots(paths, &mut desk.netns_roots);
    let gone = gone(netns_of_others(&snapshot), &desk.netns_roots);
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
