//! Forecast of when a pool will be exhausted, based on the growth of its use.
//!
//! A [`Trend`] is small enough for the pool's status, where the next leader finds it and continues it. A trend contains
//! the growth per hour, as an exponentially weighted mean of samples with a time constant of [`MEMORY_HOURS`]. So
//! changes of a day ago hardly count.
//!
//! # Guarantees
//! - A trend that is written to a status and read back gives the same results as before, because every step rounds
//!   rates to the precision of their text.
//! - A trend changes at most once in [`SAMPLE_MINUTES`], and not at all if the use has not changed for long. A forecast
//!   is rounded, and stays the same while it is about right.
//! - Counts may be of any size; no input causes a panic.
//! - Neither a single jump nor use that fluctuates around a level causes a forecast.
//!
//! # Caveats
//! - Growth is recognised only after some time. A forecast appears after about an hour. At that time, the computed rate
//!   is still far too low. After 6 hours of steady growth the rate is two thirds of the true one; after a day only 2 %
//!   are missing.
//! - Use that goes up and down over days looks like growth each time it rises.
//! - Growth by less than one block per hour, for example by an occasional new node, causes no forecast: within
//!   [`MEMORY_HOURS`], such growth looks like single jumps.
//! - Changes between two samples that are more than [`GAP_HOURS`] apart do not count.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use cadastre_api::TrendStatus;

/// Minimum time between two samples.
pub(crate) const SAMPLE_MINUTES: i64 = 10;
/// Time after which the weight of a sample has fallen to 1/e.
pub(crate) const MEMORY_HOURS: f64 = 6.0;
/// Longest time between two samples while the trend is not zero. After a longer time, a new trend starts.
pub(crate) const GAP_HOURS: i64 = 48;
/// The longest forecast: one year. If exhaustion is further ahead, there is no forecast.
pub(crate) const HORIZON_HOURS: f64 = 365.0 * 24.0;

/// A rate below this, about one block per year, counts as no growth.
const LEAST_RATE: f64 = 0.0001;
/// A new forecast needs at least this ratio. The ratio is the square of the mean growth, divided by the mean of the
/// squared growth. It is 1 after long steady growth. It is n/36 after n equal jumps among the 36 samples in memory. It
/// is less than 1/100 for use that fluctuates around a level.
const SURE: f64 = 1.0 / 8.0;
/// An existing forecast is withdrawn if the ratio that [`SURE`] describes falls below this value.
const STILL_SURE: f64 = 1.0 / 16.0;
/// A forecast stays the same while the time until exhaustion differs from a new estimate by at most this share.
const ABOUT: f64 = 0.1;

/// How the number of blocks that are not free grows, for one pool and family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// Time of the last sample, in whole minutes
    at: Timestamp,
    /// Number of blocks that were not free at the time of the last sample
    used: u128,
    /// Smoothed growth in blocks per hour; negative if use shrinks
    per_hour: f64,
    /// Root of the smoothed square of the growth, in blocks per hour
    swing: f64,
}

impl Trend {
    /// Starts a trend with a first sample. The growth is still unknown and counts as zero.
    pub fn start(used: u128, now: Timestamp) -> Self {
        Trend {
            at: whole_minute(now),
            used,
            per_hour: 0.0,
            swing: 0.0,
        }
    }

    /// Reads a trend from a status. Returns `None` if the text is invalid; the caller then starts a new trend.
    pub fn read(status: &TrendStatus) -> Option<Self> {
        let rate = |text: &str| text.parse().ok().filter(|rate: &f64| rate.is_finite());
        Some(Trend {
            at: whole_minute(status.at.0),
            used: status.used.parse().ok()?,
            per_hour: rounded(rate(&status.per_hour)?),
            swing: rounded(rate(&status.swing_per_hour)?),
        })
    }

    /// Converts the trend for the pool's status, without loss of precision.
    pub fn status(&self) -> TrendStatus {
        TrendStatus {
            at: Time(self.at),
            used: self.used.to_string(),
            per_hour: self.per_hour.to_string(),
            swing_per_hour: self.swing.to_string(),
        }
    }

    /// Returns the trend after `used` blocks were observed. If no sample is due yet, the trend is unchanged.
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
            // No samples were taken while nothing changed, so the change is recent. It must not be averaged over the
            // whole time since the last sample.
            elapsed = pause;
        } else if elapsed.is_negative() {
            // The clock was set back, so it is unknown how long the change took, and the growth stays as it was.
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
        let smoothed = |old: f64, new: f64| old * kept + new * (1.0 - kept);
        Trend {
            at: now,
            used,
            per_hour: rounded(smoothed(self.per_hour, growth)),
            swing: rounded(smoothed(self.swing.powi(2), change.powi(2)).sqrt()),
        }
    }

    /// Returns when the pool will be exhausted if its use continues to grow at the rate of the trend. `free` is the
    /// number of free blocks now. `last` is the last forecast, which is returned again while it is about right.
    ///
    /// Returns `None` in four cases: use does not grow, its growth may be chance, exhaustion is more than a year away,
    /// or nothing is free now. The returned time is rounded to the hour if it is more than a day away, else to ten
    /// minutes.
    pub fn exhausts_at(
        &self,
        free: u128,
        now: Timestamp,
        last: Option<Timestamp>,
    ) -> Option<Timestamp> {
        let last = last.filter(|at| *at > now);
        let needed = if last.is_some() { STILL_SURE } else { SURE };
        if free == 0 || self.per_hour <= 0.0 || self.per_hour < self.swing * needed.sqrt() {
            return None;
        }
        let left = approximately(free) / self.per_hour;
        if let Some(last) = last {
            let left_at_last = last.duration_since(now).as_secs_f64() / 3600.0;
            if (left_at_last - left).abs() <= left * ABOUT {
                return Some(last);
            }
        }
        if left > HORIZON_HOURS {
            return None;
        }
        let step = if left > 24.0 { 3600 } else { 600 };
        let end = now
            .checked_add(SignedDuration::try_from_secs_f64(left * 3600.0).ok()?)
            .ok()?;
        // The time is rounded to the nearest step, but never to a step in the past.
        let nearest = (end.as_second() + step / 2).div_euclid(step);
        let next = now.as_second().div_euclid(step) + 1;
        Timestamp::from_second(nearest.max(next) * step).ok()
    }
}

/// Rounds down to the minute, so that the status does not change with every observation.
fn whole_minute(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second().div_euclid(60) * 60).unwrap_or(at)
}

/// Rounds to six significant digits, which decimal text represents exactly. Tiny rates become zero.
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
