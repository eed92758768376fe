//! Serves operations of plugins and others: chooses pools, asks the store, and lets an ADD that finds
//! nothing wait for a block.
//!
//! # Guarantees
//! - Nothing here asks the API server. What it has said is read from what the watches keep.
//! - Every wait ends: at the request's own deadline, at the setting's for a block, and with a DEL of what
//!   is waited for.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, broadcast, watch};
use tracing::debug;

use super::choice::{Asked, decide};
use super::events::{self, Events};
use super::known::Known;
use super::ledger::Ledger;
use super::pods::Pod;
use crate::metrics::AgentMetrics;
use cadastre_node::keeper::Call;
use cadastre_node::{Add, Answer, Attachment, Op, Pools, Refusal, Why, clock};

/// How long an ADD that does not depend on it waits for its pod to be seen, while the watch is at work: the
/// runtime may be a little ahead.
const POD_WAIT: Duration = Duration::from_millis(300);
/// What of a deadline is left for the last try and the answer.
const MARGIN: Duration = Duration::from_millis(250);
/// Reason of the event about an annotation that cannot be read.
const INVALID_ANNOTATION: &str = "InvalidAnnotation";

/// Serves operations.
pub struct Service {
    /// The store
    pub ledger: Ledger,
    /// What the watches have shown
    pub known: Known,
    /// How long an ADD waits for a block
    pub add_wait: Duration,
    /// Where figures go
    pub metrics: AgentMetrics,
    /// Where complaints go
    pub events: Events,
    /// Something was given, freed or wished for
    pub changed: Notify,
    /// Counts the takings-over of what the node holds
    pub held: watch::Sender<u64>,
    /// What was deleted, for which an ADD may wait
    pub deleted: broadcast::Sender<Attachment>,
}

impl Service {
    /// Does an operation while its caller waits for it.
    pub async fn serve(&self, op: Op, call: Call) -> Result<Answer, Refusal> {
        let begun = Instant::now();
        let (verb, changes) = match &op {
            Op::Add(_) => ("ADD", true),
            Op::Del(_) => ("DEL", true),
            Op::Gc(_) => ("GC", true),
            Op::Check(_) => ("CHECK", false),
            Op::Status => ("STATUS", false),
        };
        let result = match op {
            Op::Add(add) => self.add(add, &call).await,
            Op::Del(attachment) => {
                self.known.lock().wishes.remove(&attachment);
                let result = self.ledger.ask(Op::Del(attachment.clone()), call).await;
                // An error says that no ADD waits.
                let _ = self.deleted.send(attachment);
                result
            }
            Op::Status => self.status(call).await,
            other => self.ledger.ask(other, call).await,
        };
        let label = match &result {
            Ok(_) => "done",
            Err(refusal) => label(refusal.why),
        };
        if let Err(refusal) = &result {
            debug!(verb, why = label, "{}", refusal.text);
        }
        self.metrics.answered(verb, label, begun.elapsed());
        let is_store =
            matches!(&result, Err(refusal) if matches!(refusal.why, Why::Store | Why::Busy));
        if (changes && result.is_ok()) || is_store {
            self.changed.notify_one();
        }
        result
    }

    /// A node whose blocks are all lent to others can serve: it asks for one when a pod comes, which a
    /// node that is called not ready never gets.
    async fn status(&self, call: Call) -> Result<Answer, Refusal> {
        match self.ledger.ask(Op::Status, call).await {
            Err(refusal) if refusal.why == Why::NothingHeld && self.known.shown().may_ask() => {
                Ok(Answer::Done)
            }
            other => other,
        }
    }

    async fn add(&self, mut add: Add, call: &Call) -> Result<Answer, Refusal> {
        if !add.netns.is_empty() {
            self.note_netns(Path::new(&add.netns));
        }
        let deadline = call.deadline();
        let pod = self.pod_of(&add, deadline).await;
        let pools = self.choose(&mut add, pod.as_deref())?;
        if !add.decided {
            return self.by_note(add, call).await;
        }
        let mut news = News {
            held: self.held.subscribe(),
            deleted: self.deleted.subscribe(),
        };
        if let Some(answer) = self.by_best(&add, &pools, &mut news, call).await {
            return Ok(answer);
        }
        let first = self.ledger.ask(Op::Add(add.clone()), call.clone()).await;
        let refusal = match first {
            Err(refusal) if may_wait(&refusal, &add) => refusal,
            other => return other,
        };
        let until = (clock::since_boot() + self.add_wait).min(deadline.saturating_sub(MARGIN));
        let wanted = self.askable(&pools);
        if wanted.is_empty() && refusal.why == Why::Exhausted {
            return Err(refusal);
        }
        let waiting = self.metrics.waiting();
        waiting.inc();
        let result = self.wait(&add, &wanted, &mut news, until, call).await;
        waiting.dec();
        if result.is_ok() {
            self.known.lock().wishes.remove(&add.attachment);
        }
        result
    }

    /// What the store has noted of a pod decides, of which nothing has been seen.
    async fn by_note(&self, add: Add, call: &Call) -> Result<Answer, Refusal> {
        let pod = add.pod.clone().unwrap_or_default();
        let answer = self.ledger.ask(Op::Add(add), call.clone()).await;
        if matches!(&answer, Err(refusal) if refusal.why == Why::PodUnknown) {
            let name = format!("{}/{}", pod.namespace, pod.name);
            self.known.lock().turned_away = Some(name);
            self.changed.notify_one();
        }
        answer
    }

    /// Tries again at each taking-over, until there is an address, a DEL or the time is up. Of several pools
    /// the best is asked first, and all others when half of the time has brought nothing.
    async fn wait(
        &self,
        add: &Add,
        wanted: &[String],
        news: &mut News,
        until: Duration,
        call: &Call,
    ) -> Result<Answer, Refusal> {
        let begun = clock::since_boot();
        let half = begun + until.saturating_sub(begun) / 2;
        let mut asked = &wanted[..wanted.len().min(1)];
        self.wish(add, asked);
        loop {
            let now = clock::since_boot();
            let next = if asked.len() < wanted.len() {
                half
            } else {
                until
            };
            let news = news.wait(&add.attachment);
            let waited = tokio::time::timeout(next.saturating_sub(now), news).await;
            let now = clock::since_boot();
            if waited.is_err() && now < until && asked.len() < wanted.len() {
                asked = wanted;
                self.wish(add, asked);
                continue;
            }
            // A last try at the end, too: what cooled may have rested meanwhile.
            let again = self.ledger.ask(Op::Add(add.clone()), call.clone()).await;
            let refusal = match again {
                Err(refusal) if may_wait(&refusal, add) => refusal,
                other => return other,
            };
            if now >= until || waited.is_err() {
                let waited = now.saturating_sub(begun);
                return Err(dry(refusal, wanted, waited, &self.known.shown().at_limit));
            }
        }
    }

    /// Addresses of the pod's best pool where no block of that is here yet: others may have addresses,
    /// but that one comes first, and so it is asked and waited for. `None`: any of its pools will do.
    async fn by_best(
        &self,
        add: &Add,
        pools: &Pools,
        news: &mut News,
        call: &Call,
    ) -> Option<Answer> {
        let (best, until) = self.absent(add, pools, call.deadline())?;
        let only = Add {
            pools: vec![best],
            ..add.clone()
        };
        match self.ledger.ask(Op::Add(only.clone()), call.clone()).await {
            Ok(answer) => return Some(answer),
            Err(refusal) if may_wait(&refusal, &only) => {}
            Err(_) => return None,
        }
        let waiting = self.metrics.waiting();
        waiting.inc();
        let result = self.wait(&only, &only.pools, news, until, call).await;
        waiting.dec();
        // In vain it stays asked for, for the pods that come next.
        let answer = result.ok()?;
        self.known.lock().wishes.remove(&add.attachment);
        Some(answer)
    }

    /// The best of several pools, if no block of it is here and one can be asked for; and until when it
    /// is waited for: half of the time that an ADD waits, from when the first one asked.
    fn absent(&self, add: &Add, pools: &Pools, deadline: Duration) -> Option<(String, Duration)> {
        let (Pools::Named(names) | Pools::Selected(names)) = pools else {
            return None;
        };
        let best = names.first().filter(|_| names.len() > 1)?;
        let now = clock::since_boot();
        let known = self.known.shown();
        let is_there = known.giving.contains(best) || !known.askable.contains(best);
        if is_there || !known.pods_followed || !add.addresses.is_empty() {
            return None;
        }
        let asked = self.known.lock().wishes.since(best).unwrap_or(now);
        let until = (asked + self.add_wait / 2).min(deadline.saturating_sub(MARGIN));
        (now < until).then(|| (best.clone(), until))
    }

    fn wish(&self, add: &Add, pools: &[String]) {
        if !pools.is_empty() {
            let now = clock::since_boot();
            self.known.lock().wishes.add(&add.attachment, pools, now);
            self.changed.notify_one();
        }
    }

    /// The pools of these that blocks can be asked of.
    fn askable(&self, pools: &Pools) -> Vec<String> {
        let known = self.known.shown();
        match pools {
            Pools::Named(names) | Pools::Selected(names) => names
                .iter()
                .filter(|name| known.askable.contains(name))
                .cloned()
                .collect(),
            Pools::All => known
                .askable
                .iter()
                .filter(|name| known.automatic.contains(*name))
                .cloned()
                .collect(),
            Pools::None(_) => Vec::new(),
        }
    }

    /// Fills in what the pod wants, if that is known; refuses where no pool serves it.
    fn choose(&self, add: &mut Add, pod: Option<&Pod>) -> Result<Pools, Refusal> {
        let known = self.known.shown();
        let is_known = pod.is_some_and(|pod| known.is_decidable(pod));
        if known.depends_on_pod(add) && !is_known {
            return Ok(Pools::default());
        }
        let namespace = add.pod.as_ref().map(|pod| pod.namespace.as_str());
        let asked = Asked {
            ifname: &add.attachment.ifname,
            pools: &add.pools,
            addresses: &add.addresses,
            pod,
            namespace: namespace
                .and_then(|it| known.namespaces.get(it))
                .map(Arc::as_ref),
        };
        let chosen = decide(&asked, &known.serving, &known.others);
        if let Some(pod) = pod {
            let fresh = self.known.lock().complain(&pod.uid, &chosen.complaints);
            for text in fresh {
                self.events
                    .tell(events::of_pod(pod, INVALID_ANNOTATION, text));
            }
        }
        let choice = chosen.into_choice();
        add.decide(&choice).map_err(|text| Refusal {
            why: Why::NothingHeld,
            text,
        })?;
        Ok(choice.pools)
    }

    /// The pod that the request is for, if the API has shown it.
    async fn pod_of(&self, add: &Add, deadline: Duration) -> Option<Arc<Pod>> {
        let wanted = add.pod.as_ref()?;
        let mut seen = self.known.follow();
        let depends = seen.borrow().depends_on_pod(add);
        let patience = if depends { self.add_wait } else { POD_WAIT };
        let until = (clock::since_boot() + patience).min(deadline.saturating_sub(MARGIN));
        loop {
            let known = Arc::clone(&seen.borrow_and_update());
            let found = known.pods.find(wanted).cloned();
            if known.is_enough(found.as_deref()) || clock::since_boot() >= until {
                return found;
            }
            drop(known);
            let left = until.saturating_sub(clock::since_boot());
            let _ = tokio::time::timeout(left, seen.changed()).await;
        }
    }

    /// Remembers where network namespaces are: that one is not there any more proves something only
    /// in such a place.
    fn note_netns(&self, path: &Path) {
        if let Some(root) = netns_root(path) {
            let mut known = self.known.lock();
            if !known.netns_roots.contains(root) && path.exists() {
                known.netns_roots.insert(root.to_owned());
            }
        }
    }
}

/// What a waiting ADD listens to.
struct News {
    held: watch::Receiver<u64>,
    deleted: broadcast::Receiver<Attachment>,
}

impl News {
    /// Returns when an ADD of it should be tried again: there may be an address, or the store says that
    /// it was deleted.
    async fn wait(&mut self, attachment: &Attachment) {
        loop {
            tokio::select! {
                Ok(()) = self.held.changed() => return,
                deleted = self.deleted.recv() => match deleted {
                    Ok(other) if other != *attachment => {}
                    _ => return,
                },
            }
        }
    }
}

/// The directory in which a network namespace comes and goes.
pub fn netns_root(path: &Path) -> Option<&Path> {
    if !path.is_absolute() {
        return None;
    }
    if path.starts_with("/proc") {
        return Some(Path::new("/proc"));
    }
    path.parent()
}

/// Whether a block might help.
fn may_wait(refusal: &Refusal, add: &Add) -> bool {
    add.addresses.is_empty() && matches!(refusal.why, Why::Exhausted | Why::NothingHeld)
}

/// What is answered after a wait in vain. `at_limit`: the pools of which the node has as many blocks as it may.
fn dry(
    refusal: Refusal,
    wanted: &[String],
    waited: Duration,
    at_limit: &BTreeMap<String, u32>,
) -> Refusal {
    if wanted.is_empty() {
        return refusal;
    }
    let names: Vec<String> = wanted.iter().map(|name| format!("`{name}`")).collect();
    let (names, seconds) = (names.join(", "), waited.as_secs_f64());
    let full = wanted.iter().find_map(|pool| at_limit.get_key_value(pool));
    let why = match full {
        Some((pool, most)) => format!(
            "the node has as many blocks of `{pool}` as its maxBlocksPerNode allows ({most}): raise it, or move pods to other nodes"
        ),
        None => format!(
            "see the events of this node and of the pool (kubectl describe ippools.cadastre.dev {})",
            wanted.first().map_or("", String::as_str),
        ),
    };
    let text = format!(
        "{} A block of {names} was asked for {seconds:.1} s ago and has not come: {why}",
        refusal.text,
    );
    Refusal {
        why: Why::Exhausted,
        text,
    }
}

/// A kind of refusal as a label, and for other programs.
pub fn label(why: Why) -> &'static str {
    match why {
        Why::Exhausted => "exhausted",
        Why::NothingHeld => "nothingHeld",
        Why::UnknownPool => "unknownPool",
        Why::NotHeld => "notHeld",
        Why::Taken => "taken",
        Why::NotUsable => "notUsable",
        Why::PodUnknown => "podUnknown",
        Why::Mismatch => "mismatch",
        Why::Busy => "busy",
        Why::Store => "store",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_add_in_vain_names_what_keeps_the_block_away_and_what_to_do() {
        let told = |wanted: &[&str], at_limit: &[(&str, u32)]| {
            let refusal = Refusal {
                why: Why::NothingHeld,
                text: "this node has no block.".to_owned(),
            };
            let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
            let at_limit = at_limit
                .iter()
                .map(|(pool, most)| ((*pool).to_owned(), *most));
            let waited = Duration::from_millis(2_500);
            dry(refusal, &wanted, waited, &at_limit.collect()).text
        };
        let text = told(&["web", "spare"], &[("spare", 3)]);
        for part in [
            "this node has no block. A block of `web`, `spare` was asked for 2.5 s ago",
            "as many blocks of `spare` as its maxBlocksPerNode allows (3): raise it",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = told(&["web"], &[("spare", 3)]);
        assert!(
            text.contains("kubectl describe ippools.cadastre.dev web"),
            "{text}"
        );
        assert_eq!(told(&[], &[("spare", 3)]), "this node has no block.");
    }
}
