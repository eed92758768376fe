//! When the API server last said anything about each kind.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Kinds that are watched, and when a list, the start of a watch, a change or a bookmark last came of
/// each: what metrics and readiness say of a controller that sees nothing. Shared.
#[derive(Clone, Debug, Default)]
pub struct LastHeard(Arc<Mutex<BTreeMap<&'static str, Instant>>>);

impl LastHeard {
    /// The API server has said something of this kind, or it is asked for the first time.
    pub fn heard(&self, kind: &'static str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(kind, Instant::now());
    }

    #[cfg(test)]
    pub(crate) fn heard_before(&self, kind: &'static str, ago: Duration) {
        let at = Instant::now().checked_sub(ago).unwrap();
        self.0.lock().unwrap().insert(kind, at);
    }

    /// Every kind, and for how long nothing has been heard of it.
    pub fn silent(&self) -> Vec<(&'static str, Duration)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(kind, at)| (*kind, at.elapsed())).collect()
    }

    /// What has been silent for longer than that, for people: `nodes for 312 s, pods for 200 s`.
    pub fn too_long(&self, limit: Duration) -> Option<String> {
        let all = self.silent();
        let all = all.iter().filter(|(_, silent)| *silent > limit);
        let texts: Vec<String> = all
            .map(|(kind, silent)| format!("{kind} for {} s", silent.as_secs()))
            .collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }
}
