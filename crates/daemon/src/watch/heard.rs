//! Records when the API server last sent anything about each kind.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The time at which the API server last sent something about each watched kind: an object of a list, the response to a
/// watch request, a watch event or a bookmark. Metrics and readiness use these times to report watches that deliver
/// nothing. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct LastHeard(Arc<Mutex<BTreeMap<&'static str, Instant>>>);

impl LastHeard {
    /// Records that the API server has sent something about this kind. A watch also calls this method once when it
    /// starts.
    pub fn heard(&self, kind: &'static str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(kind, Instant::now());
    }

    #[cfg(test)]
    pub(crate) fn heard_before(&self, kind: &'static str, ago: Duration) {
        let at = Instant::now().checked_sub(ago).unwrap();
        self.0.lock().unwrap().insert(kind, at);
    }

    /// Returns all kinds, each with the time since the API server last sent anything about it.
    pub fn silent(&self) -> Vec<(&'static str, Duration)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(kind, at)| (*kind, at.elapsed())).collect()
    }

    /// Returns the kinds about which the API server has sent nothing for longer than `limit`, for example as `nodes for
    /// 312 s, pods for 200 s`. Returns `None` if there are no such kinds.
    pub fn too_long(&self, limit: Duration) -> Option<String> {
        let all = self.silent();
        let all = all.iter().filter(|(_, silent)| *silent > limit);
        let texts: Vec<String> = all
            .map(|(kind, silent)| format!("{kind} for {} s", silent.as_secs()))
            .collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }
}
