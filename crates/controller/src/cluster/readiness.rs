//! Content of a controller's `/readyz`. A leader is ready once it allocates, and a standby is ready once its cache is
//! filled.

use std::sync::{Arc, Mutex, PoisonError};

use cadastre_daemon::telemetry::Readiness;
use cadastre_daemon::watch::LastHeard;

use super::lease::Leadership;

/// Computes `/readyz` from the election and the controller's progress. Clones share the same state.
#[derive(Clone, Debug, Default)]
pub struct LeaderReadiness {
    readiness: Readiness,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    leadership: Option<Leadership>,
    /// Whether the leader's lease has run out without a renewal
    lapsed: bool,
    /// The progress that the controller last reported; `None` before its first report
    progress: Option<ControllerProgress>,
}

/// How far the controller has come on the way to allocation.
#[derive(Clone, Debug, Default)]
pub struct ControllerProgress {
    /// Kinds of objects whose first list has not arrived yet
    pub missing: Vec<&'static str>,
    /// The steps that the fence still has to do; `None` if there are none. If `allocating` is also true, blocks are
    /// already allocated before the fence is done
    pub fencing: Option<String>,
    /// Whether this process leads and allocates ranges by now; a leader is not ready before that
    pub allocating: bool,
}

impl LeaderReadiness {
    /// Creates the state, whose content is published through `readiness`.
    pub fn new(readiness: Readiness) -> Self {
        Self {
            readiness,
            state: Arc::default(),
        }
    }

    /// Returns the object in which watches record when they last received something from the API server.
    pub fn last_heard(&self) -> LastHeard {
        self.readiness.last_heard()
    }

    /// Records whether this process leads, and updates `/readyz`.
    pub fn leadership(&self, leadership: Leadership) {
        self.change_state(|state| state.leadership = Some(leadership));
    }

    /// Sets whether the leader's lease has run out. If so, the leader writes nothing until it renews the lease.
    pub(crate) fn lapsed(&self, lapsed: bool) {
        self.change_state(|state| state.lapsed = lapsed);
    }

    /// Records how far this process has come on the way to allocation. `/readyz` shows this progress.
    pub fn update(&self, progress: ControllerProgress) {
        self.change_state(|state| state.progress = Some(progress));
    }

    fn change_state(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        let (ready, text) = page(&state);
        self.readiness.set(ready, &text);
    }
}

fn page(state: &State) -> (bool, String) {
    let Some(progress) = &state.progress else {
        return (false, "starting".to_owned());
    };
    match &state.leadership {
        Some(Leadership::Leading(_)) if state.lapsed => (
            false,
            "leader, but the lease could not be renewed in time: nothing is written until it is"
                .to_owned(),
        ),
        Some(Leadership::Leading(_)) if progress.allocating => {
            let but = progress
                .fencing
                .as_ref()
                .map(|what| format!(", but {what}"));
            (true, format!("leader{}", but.unwrap_or_default()))
        }
        Some(Leadership::Leading(_)) => {
            let what = progress.fencing.as_deref().unwrap_or("taking over");
            (false, format!("leader, not allocating yet: {what}"))
        }
        Some(Leadership::Released) => (false, "stopping".to_owned()),
        _ if !progress.missing.is_empty() => (
            false,
            format!(
                "waiting for the first lists of {}",
                progress.missing.join(", ")
            ),
        ),
        Some(Leadership::Standby {
            leader: Some(leader),
        }) => (true, format!("standby (leader: {leader})")),
        _ => (true, "standby (no leader seen yet)".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::lease::{LeadershipTerm, Takeover};

    #[test]
    fn readiness_describes_each_state() {
        let page = Readiness::default();
        let readiness = LeaderReadiness::new(page.clone());
        let said = |ready: bool, text: &str| assert_eq!(page.page(), (ready, format!("{text}\n")));
        said(false, "starting");
        readiness.leadership(Leadership::Standby { leader: None });
        said(false, "starting");
        readiness.update(ControllerProgress {
            missing: vec!["pods"],
            ..ControllerProgress::default()
        });
        said(false, "waiting for the first lists of pods");
        readiness.update(ControllerProgress::default());
        readiness.leadership(Leadership::Standby {
            leader: Some("a".into()),
        });
        said(true, "standby (leader: a)");
        let term = LeadershipTerm::of("1-a", Takeover::First);
        readiness.leadership(Leadership::Leading(term));
        readiness.update(ControllerProgress {
            fencing: Some("3 nodes to touch".into()),
            ..ControllerProgress::default()
        });
        said(false, "leader, not allocating yet: 3 nodes to touch");
        readiness.update(ControllerProgress {
            allocating: true,
            ..ControllerProgress::default()
        });
        said(true, "leader");
        readiness.lapsed(true);
        let (ready, text) = page.page();
        assert!(!ready && text.contains("could not be renewed"), "{text}");
        readiness.lapsed(false);
        assert!(page.page().0);
        readiness.leadership(Leadership::Released);
        assert!(!page.page().0);
    }
}
