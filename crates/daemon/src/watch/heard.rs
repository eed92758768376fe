//! Records when the API server last sent anything about each kind.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// For each watched kind, when a list, the start of a watch, a watch event or a bookmark last came. Metrics and
/// readiness use it to report watches that deliver nothing. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct LastHeard(Arc<Mutex<BTreeMap<&'static str, Instant>>>);

impl LastHeard {
    /// Records that the API server has sent something about this kind, or is asked for the first time.
    pub fn heard(&self, kind: &'static str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(kind, Instant::now());
    }

    #[cfg(test)]
    pub(crate) fn heard_before(&self, kind: &'static str, ago: Duration) {
        let at = Instant::now().checked_sub(ago).unwrap();
        self.0.lock().unwrap().insert(kind, at);
    }

    /// For each kind, how long nothing has come.
    pub fn silent(&self) -> Vec<(&'static str, Duration)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(kind, at)| (*kind, at.elapsed())).collect()
    }

    /// Names the kinds that have been silent for longer than `limit`, as in `nodes for 312 s, pods for 200 s`.
    pub fn too_long(&self, limit: Duration) -> Option<String> {
        let all = self.silent();
        let all = all.iter().filter(|(_, silent)| *silent > limit);
        let texts: Vec<String> = all
            .map(|(kind, silent)| format!("{kind} for {} s", silent.as_secs()))
            .collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }
}
