//! What the controller promises about podCIDRs, on a real API server.
//!
//! Most tests share one control plane and one controller: each works in a group of its own (a label
//! of its nodes, which its pools select) and with ranges of its own, so none sees another. The few
//! that restart or starve a controller have a stage to themselves, one at a time.
//!
//! | file | subject |
//! |---|---|
//! | `dealing` | who gets what from which pool |
//! | `changes` | pools that come, change and go while nodes wait |
//! | `left_out` | what is never carved: service ranges, reserved space, node addresses, older pools |
//! | `existing` | podCIDRs that were there before |
//! | `resting` | what becomes of a dead node's ranges |
//! | `telling` | events, conditions and figures |
//! | `mending` | edits by hand, and the limits of names |
//! | `crowd` | a thousand pools |

#![allow(clippy::expect_used, clippy::unwrap_used)] // helpers of tests are tests

mod changes;
mod crowd;
mod dealing;
mod existing;
mod left_out;
mod mending;
mod misfits;
mod resting;
mod telling;

use cadastre_e2e::{Hand, Options, Stage};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

/// The range of `--service-cidr` on the shared stage.
const FLAG_SERVICE_RANGE: &str = "10.199.0.0/25";

/// The stage that most tests share, and a hand for this one.
async fn shared() -> (&'static Stage, Hand) {
    static STAGE: OnceCell<Stage> = OnceCell::const_new();
    let start = || async {
        Stage::start(
            Options::default(),
            &["--service-cidr", FLAG_SERVICE_RANGE, "--log-level", "debug"],
        )
        .await
        .unwrap()
    };
    let stage = STAGE.get_or_init(start).await;
    (stage, stage.hand().await.unwrap())
}

/// A stage for one test.
async fn alone(flags: &[&str]) -> (Stage, Hand, SemaphorePermit<'static>) {
    let permit = one_at_a_time().await;
    let stage = Stage::start(Options::default(), flags).await.unwrap();
    let hand = stage.hand().await.unwrap();
    (stage, hand, permit)
}

/// Beside the shared control plane there is one other at most.
async fn one_at_a_time() -> SemaphorePermit<'static> {
    static ONE: Semaphore = Semaphore::const_new(1);
    ONE.acquire().await.unwrap()
}
