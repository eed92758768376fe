//! How fast a pool fills up, and when nothing will be left.
//!
//! A [`Trend`] is small enough to live in the pool's status: whoever leads next goes on where the
//! last leader was. It holds the growth an hour as an exponentially weighted mean of what samples
//! show, with a time constant of [`MEMORY_HOURS`]: what happened a day ago counts for little.
//!
//! # Guarantees
//! - A trend that was written to a status and read back gives the same results as one that was not:
//!   rates are rounded to what their text says in every step.
//! - It changes at most once in [`SAMPLE_MINUTES`], and not at all once nothing has come or gone for
//!   long. What is told of the end is rounded, and stays while it is about right.
//! - Counts may be of any size; no input panics.
//! - A jump and a use that jitters around a level have no end that could be told.
//!
//! # Caveats
//! - Growth is believed as it lasts: it is told of after about an hour, then still far too low, and
//!   after 6 hours of steady growth two thirds of it are known, after a day all but a fiftieth.
//! - A use that goes up and down over days looks like growth each time it rises.
//! - Growth by less than a step an hour, such as a node now and then, is too coarse for so short a
//!   memory: it looks like jumps, and has no end.
//! - What changes during a gap of more than [`GAP_HOURS`] is not seen.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use cadastre_api::TrendStatus;

/// A sample is taken no more often.
pub(crate) const SAMPLE_MINUTES: i64 = 10;
/// After that time an observation counts for 1/e of what it did.
pub(crate) const MEMORY_HOURS: f64 = 6.0;
/// After a longer time without a sample a trend begins anew.
pub(crate) const GAP_HOURS: i64 = 48;
/// What lies further away is not told: one year.
pub(crate) const HORIZON_HOURS: f64 = 365.0 * 24.0;

/// Slower than an address a year is no growth.
const LEAST_RATE: f64 = 0.0001;
/// The square of the mean change must be this part of the mean of its square. Steady growth has 1
/// once the memory is full of it; n equal jumps among the 36 samples that it holds have n / 36; use
/// that jitters around a level has less than 1 / 100.
const SURE: f64 = 1.0 / 8.0;
/// What has been told is told until that part is less than this.
const STILL_SURE: f64 = 1.0 / 16.0;
/// What has been told is told while the time left differs by no more than this part.
const ABOUT: f64 = 0.1;

/// How the use of one family of a pool grows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// When use was last looked at; whole minutes
    at: Timestamp,
    /// Addresses in use then
    used: u128,
    /// Smoothed growth, addresses an hour
    per_hour: f64,
    /// Root of the smoothed square of that growth, addresses an hour
    swing: f64,
}

impl Trend {
    /// The first sample: nothing is known of growth yet.
    pub fn start(used: u128, now: Timestamp) -> Self {
        Trend {
            at: whole_minute(now),
            used,
            per_hour: 0.0,
            swing: 0.0,
        }
    }

    /// What the status says; `None` if it cannot be read, which is a reason to start anew.
    pub fn read(status: &TrendStatus) -> Option<Self> {
        let rate = |text: &str| text.parse().ok().filter(|rate: &f64| rate.is_finite());
        Some(Trend {
            at: whole_minute(status.at.0),
            used: status.used.parse().ok()?,
            per_hour: rounded(rate(&status.per_hour)?),
            swing: rounded(rate(&status.swing_per_hour)?),
        })
    }

    /// As the status says it.
    pub fn status(&self) -> TrendStatus {
        TrendStatus {
            at: Time(self.at),
            used: self.used.to_string(),
            per_hour: self.per_hour.to_string(),
            swing_per_hour: self.swing.to_string(),
        }
    }

    /// The trend after a look at the pool: itself, unless it is time for a sample.
    #[must_use]
    pub fn observe(&self, used: u128, now: Timestamp) -> Self {
        let at_rest = self.per_hour == 0.0 && self.swing == 0.0;
        let now = whole_minute(now);
        let mut elapsed = now.duration_since(self.at);
        let pause = SignedDuration::from_mins(SAMPLE_MINUTES);
        if elapsed.abs() < pause || (at_rest && used == self.used) {
            return *self;
        }
        if at_rest {
            // No samples were taken while nothing changed, so this is news, and no mean of that time.
            elapsed = pause;
        } else if elapsed.is_negative() {
            // The clock was set back: what was learnt holds, what changed since has no duration.
            return Trend {
                at: now,
                used,
                ..*self
            };
        } else if elapsed > SignedDuration::from_hours(GAP_HOURS) {
            return Trend::start(used, now);
        }
        let hours = elapsed.as_secs_f64() / 3600.0;
        let change = approximately(used.abs_diff(self.used)) / hours;
        let growth = if used < self.used { -change } else { change };
        let kept = (-hours / MEMORY_HOURS).exp();
        let smoothed = |known: f64, new: f64| known * kept + new * (1.0 - kept);
        Trend {
            at: now,
            used,
            per_hour: rounded(smoothed(self.per_hour, growth)),
            swing: rounded(smoothed(self.swing.powi(2), change.powi(2)).sqrt()),
        }
    }

    /// When nothing is left if use goes on growing like this; `free` is what is left now, and `told`
    /// what was told last.
    ///
    /// `None` where use does not grow, or so little beside its swing that it may be chance; where the
    /// end is further away than a year; and where nothing is left now, as that is no forecast. To the
    /// hour beyond a day, else to ten minutes.
    pub fn exhausts_at(
        &self,
        free: u128,
        now: Timestamp,
        told: Option<Timestamp>,
    ) -> Option<Timestamp> {
        let told = told.filter(|at| *at > now);
        let needed = if told.is_some() { STILL_SURE } else { SURE };
        if free == 0 || self.per_hour <= 0.0 || self.per_hour < self.swing * needed.sqrt() {
            return None;
        }
        let left = approximately(free) / self.per_hour;
        if let Some(told) = told {
            let said = told.duration_since(now).as_secs_f64() / 3600.0;
            if (said - left).abs() <= left * ABOUT {
                return Some(told);
            }
        }
        if left > HORIZON_HOURS {
            return None;
        }
        let step = if left > 24.0 { 3600 } else { 600 };
        let end = now
            .checked_add(SignedDuration::try_from_secs_f64(left * 3600.0).ok()?)
            .ok()?;
        // To the nearest step, but never to one that has passed.
        let nearest = (end.as_second() + step / 2).div_euclid(step);
        let next = now.as_second().div_euclid(step) + 1;
        Timestamp::from_second(nearest.max(next) * step).ok()
    }
}

/// What a status can say of a time without changing all the time.
fn whole_minute(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second().div_euclid(60) * 60).unwrap_or(at)
}

/// To six digits that count, which text can say exactly; what is next to nothing is nothing.
fn rounded(rate: f64) -> f64 {
    if rate.abs() < LEAST_RATE {
        return 0.0;
    }
    format!("{rate:.5e}").parse().unwrap_or(0.0)
}

#[expect(clippy::cast_precision_loss, reason = "a rate, not a count")]
fn approximately(count: u128) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
