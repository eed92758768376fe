//! Carries out the effects of the state machine on the store, the runtime, the node's files and the servers.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::files::kept::Kept;
use super::leaks::netns_of_others;
use super::ledger::{Ledger, LedgerError};
use super::machine::{
    Answer, Effect, Event, Figure, FilesTold, Found, Looked, Question, Serving, StoreTrouble,
};
use super::masquerade::Masquerade;
use super::outward;
use super::parts::{Parts, Settings};
use super::proof::{Witnesses, gone, note_roots};
use super::publish::Written;
use super::service::Service;
use super::store;
use super::unix::{OnlyOne, SocketError};
use cadastre_node::keeper::Call;
use cadastre_node::{Op, Snapshot, clock};

/// The time limit of a DEL for a leaked address.
const FREE_LIMIT: Duration = Duration::from_secs(10);

/// Carries out effects, some at once and some as tasks.
pub(super) struct Carrier {
    settings: Settings,
    parts: Parts,
    witnesses: Witnesses,
    /// Keeps other agents from using the store
    store_lock: Option<OnlyOne>,
    files: Kept,
    masquerade: Masquerade,
    tasks: JoinSet<anyhow::Result<Event>>,
}

impl Carrier {
    pub fn new(settings: Settings, parts: Parts, witnesses: Witnesses, files: Kept) -> Self {
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

    pub fn service(&self) -> Arc<Service> {
        Arc::clone(&self.parts.service)
    }

    pub fn stop(&self) -> CancellationToken {
        self.parts.stop.clone()
    }

    /// Returns what the servers on the node's sockets have met with: waiting ADDs and trouble with the store.
    pub fn serving(&self, now: Duration) -> Serving {
        let ledger = &self.parts.ledger;
        let (trouble, is_open) = (ledger.trouble(), ledger.is_open());
        let mut desk = self.parts.service.known.lock();
        let (wishes, wishes_end) = desk.wishes.count(now);
        Serving {
            wishes,
            wishes_end,
            turned_away: desk.turned_away.clone(),
            trouble: trouble.map(|refusal| refusal.text),
            is_missing: is_open && !self.settings.store.exists(),
        }
    }

    /// Waits for the next task to end and returns its event; `None` if no task is running. An error is one that
    /// needs an administrator.
    pub async fn answer(&mut self) -> Option<anyhow::Result<Event>> {
        let done = self.tasks.join_next().await?;
        Some(done.unwrap_or_else(|error| Err(error.into())))
    }

    /// Starts an effect. Returns the event at once if the effect takes no time; else [`Self::answer`] returns it.
    pub fn begin(&mut self, effect: Effect) -> anyhow::Result<Option<Event>> {
        let service = &self.parts.service;
        match effect {
            Effect::Ask(question) => return self.ask(question),
            Effect::Prove(candidates, boot) => {
                let witnesses = self.witnesses.clone();
                let roots = service.known.lock().netns_roots.clone();
                self.tasks.spawn(async move {
                    let proven = witnesses.prove(candidates, boot, roots).await;
                    Ok(Event::Proven(proven))
                });
            }
            Effect::WriteStatus {
                version,
                status,
                urgent,
            } => {
                let (client, name) = (self.parts.client.clone(), self.settings.node.clone());
                let metrics = self.parts.metrics.clone();
                self.tasks.spawn(async move {
                    let written = outward::write_status(client, &name, &version, &status).await;
                    let result = match &written {
                        Written::Done { .. } => "done",
                        Written::Outdated => "outdated",
                        Written::Failed => "failed",
                    };
                    metrics.wrote(urgent, result);
                    Ok(Event::Written(written))
                });
            }
            Effect::WriteList {
                owner,
                is_new,
                list,
            } => {
                let (client, name) = (self.parts.client.clone(), self.settings.node.clone());
                self.tasks.spawn(async move {
                    let listed = outward::write_list(client, &name, &owner, is_new, *list).await;
                    Ok(Event::Listed(listed))
                });
            }
            Effect::AskNamespace(name) => {
                let client = self.parts.client.clone();
                self.tasks.spawn(async move {
                    let answer = outward::namespace(client, &name).await;
                    Ok(Event::Namespace(name, answer))
                });
            }
            Effect::WriteFiles {
                holding,
                waits_for_pods,
            } => {
                let files = &mut self.files;
                files.refresh(&holding, waits_for_pods, clock::since_boot());
                return Ok(Some(Event::Files(FilesTold {
                    standing: files.standing().cloned(),
                    unwritten: files.unwritten().map(ToOwned::to_owned),
                    is_configured: files.is_configured(),
                })));
            }
            Effect::Masquerade { ranges, holding } => {
                let now = clock::since_boot();
                self.masquerade.refresh(ranges.as_deref(), &holding, now);
                let trouble = self.masquerade.trouble().map(ToOwned::to_owned);
                return Ok(Some(Event::Masqueraded(trouble)));
            }
            Effect::Offer { shown, is_news } => service.known.offer(shown, is_news),
            Effect::Held => service.held.send_modify(|count| *count += 1),
            Effect::Holding(holding) => _ = self.parts.holding.send_replace(holding),
            Effect::Suspicious(reasons) => {
                self.parts.metrics.suspicious(reasons.len());
                self.parts.leaks.send_replace(reasons);
            }
            Effect::Tell(notice) => self.parts.events.tell(notice),
            Effect::ToldTurnedAway => service.known.lock().turned_away = None,
            Effect::Ready(is_ready, why) => self.parts.readiness.say_without_api(is_ready, &why),
            Effect::Count(figure) => self.count(&figure),
        }
        Ok(None)
    }

    fn count(&self, figure: &Figure) {
        let metrics = &self.parts.metrics;
        match figure {
            Figure::Snapshot(snapshot) => metrics.set(snapshot),
            Figure::Freed(reason) => metrics.freed(*reason),
            Figure::Behind(lag) => metrics.behind(*lag),
            Figure::Damaged => metrics.damaged(),
        }
    }

    fn ask(&mut self, question: Question) -> anyhow::Result<Option<Event>> {
        if question == Question::Open
            && let Some(unclear) = self.lock_store()?
        {
            return Ok(Some(Event::Answer(Answer::Opened(unclear))));
        }
        let ledger = self.parts.ledger.clone();
        let path = self.settings.store.clone();
        let service = Arc::clone(&self.parts.service);
        let witnesses = self.witnesses.clone();
        self.tasks.spawn(async move {
            let answer = match question {
                Question::Open => Answer::Opened(open(&ledger, &path).await?),
                Question::Close(why) => {
                    ledger.close(why).await;
                    Answer::Closed
                }
                Question::Make { holding, known } => {
                    let made = store::make(&path, holding, known).await;
                    if made.is_ok() {
                        ledger.open(&path)?;
                    }
                    Answer::Made(made.map_err(|error| error.to_string()))
                }
                Question::Look => {
                    let looked = ledger.look().await.map_err(StoreTrouble::from);
                    Answer::Looked(looked.map(|snapshot| with_netns(snapshot, &service)))
                }
                Question::Transact(transaction) => {
                    let failed = transaction.clone();
                    let done = ledger.with(move |it| transaction.run(it)).await;
                    done.unwrap_or_else(|error| failed.failed(error.into()))
                }
                Question::Free(attachment) => {
                    let call = Call::until(clock::since_boot() + FREE_LIMIT);
                    let freed = ledger.ask(Op::Del(attachment), call).await;
                    Answer::Freed(freed.map(|_| ()).map_err(|refusal| refusal.to_string()))
                }
                Question::Sandboxes => {
                    let told = witnesses.sandboxes().await;
                    Answer::Sandboxes(told.map_err(|error| error.to_string()))
                }
            };
            Ok(Event::Answer(answer))
        });
        Ok(None)
    }

    /// Locks the store against other agents; fails if another agent has the lock.
    fn lock_store(&mut self) -> anyhow::Result<Option<Found>> {
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
            Err(error) => Ok(Some(Found::Unclear(error.to_string()))),
        }
    }
}

/// Opens the store unless it is missing or damaged.
async fn open(ledger: &Ledger, path: &Path) -> anyhow::Result<Found> {
    match store::find(path).await {
        Ok(store::Found::Whole) => {
            ledger.open(path)?;
            Ok(Found::Open)
        }
        Ok(store::Found::Nothing) => Ok(Found::Nothing),
        Ok(store::Found::Damaged { aside, what }) => Ok(Found::Damaged { aside, what }),
        Err(error) if store::is_final(&error) => Err(error.into()),
        Err(error) => Ok(Found::Unclear(error.to_string())),
    }
}

/// Adds to the snapshot which network namespaces are gone, as looked up right after it was taken.
fn with_netns(snapshot: Snapshot, service: &Service) -> Looked {
    let mut desk = service.known.lock();
    let paths = snapshot.tenants.iter().map(|it| it.netns.as_str());
    note_roots(paths, &mut desk.netns_roots);
    let gone = gone(netns_of_others(&snapshot), &desk.netns_roots);
    Looked { snapshot, gone }
}

impl From<LedgerError> for StoreTrouble {
    fn from(error: LedgerError) -> Self {
        Self {
            is_lost: error.is_lost(),
            text: error.to_string(),
        }
    }
}
