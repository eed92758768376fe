use super::*;

fn minute(minutes: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + minutes * 60).unwrap()
}

fn hours(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64() / 3600.0
}

/// Returns a pseudo-random number in 0..n. The number depends only on `seed`, so it is the same in every run.
fn noise(seed: u64, n: u64) -> u64 {
    let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) % n
}

/// Returns the trend after `minutes` minutes with a sample every ten minutes. `used` returns the number of used blocks
/// at a minute.
fn follow(minutes: i64, used: impl Fn(i64) -> u128) -> Trend {
    let start = Trend::start(used(0), minute(0));
    let samples = (1..=minutes).filter(|m| m % 10 == 0);
    samples.fold(start, |trend, m| trend.observe(used(m), minute(m)))
}

#[test]
fn steady_growth_gives_the_true_end_within_five_percent() {
    const CAPACITY: u128 = 65_536;
    for (per_hour, day) in [(60_u128, 1), (360, 2), (600, 4)] {
        let used = |m: i64| u128::try_from(m).unwrap() * per_hour / 60;
        let today = day * 24 * 60;
        let trend = follow(today, used);
        let left = CAPACITY - used(today);
        let end = trend.exhausts_at(left, minute(today), None);
        let truth = approximately(left) / approximately(per_hour);
        let said = hours(minute(today), end.unwrap());
        assert!(
            (said - truth).abs() < truth * 0.05,
            "{per_hour} an hour: {said} for {truth}"
        );
    }
}

#[test]
fn an_end_more_than_a_year_away_is_not_forecast() {
    let trend = follow(2 * 24 * 60, |m| u128::try_from(m).unwrap() / 6);
    let now = minute(2 * 24 * 60);
    assert!(trend.exhausts_at(80_000, now, None).is_some(), "11 months");
    assert_eq!(trend.exhausts_at(95_000, now, None), None, "13 months");
}

#[test]
fn growth_gives_a_forecast_within_an_hour() {
    let at = |m: i64| {
        let used = |m| u128::try_from(m).unwrap();
        follow(m, used).exhausts_at(1000, minute(m), None)
    };
    assert_eq!(at(40), None);
    assert!(at(60).is_some());
}

#[test]
fn a_forecast_changes_seldom_and_stays_about_right() {
    const CAPACITY: u128 = 65_536;
    let used = |m: i64| {
        let m = u64::try_from(m).unwrap();
        let slower = m.saturating_sub(3000) * 2;
        u128::from(m * 6 - slower + noise(m, 60))
    };
    let begin = 24 * 60;
    let mut trend = follow(begin, used);
    let (mut last, mut changes) = (None, 0);
    for m in begin..13_000 {
        trend = trend.observe(used(m), minute(m));
        let left = CAPACITY - used(m);
        let now = trend.exhausts_at(left, minute(m), last);
        changes += u32::from(now != last);
        last = now;
        let truth = approximately(left) / if m < 3000 { 360.0 } else { 240.0 };
        let said = hours(minute(m), last.unwrap());
        let is_settled = !(3000..5000).contains(&m);
        assert!(
            !is_settled || (said - truth).abs() <= truth * 0.2 + 0.2,
            "at {m}: {said} for {truth}"
        );
    }
    assert!((1..=20).contains(&changes), "{changes}");
}

#[test]
fn use_that_fluctuates_gives_no_forecast() {
    let mut trend = Trend::start(50_000, minute(0));
    for look in 1..3000 {
        let used = 50_000 + u128::from(noise(look, 400));
        let m = i64::try_from(look).unwrap() * 10;
        trend = trend.observe(used, minute(m));
        assert_eq!(trend.exhausts_at(15_000, minute(m), None), None, "at {m}");
    }
    assert!(trend.swing > 100.0, "{trend:?}");
}

#[test]
fn growth_is_recognised_in_spite_of_fluctuation() {
    let used = |m: i64| {
        let m = u64::try_from(m).unwrap();
        u128::from(m * 2 + noise(m, 40))
    };
    let trend = follow(2 * 24 * 60, used);
    let now = minute(2 * 24 * 60);
    let said = hours(now, trend.exhausts_at(12_000, now, None).unwrap());
    assert!((said - 100.0).abs() < 10.0, "{said}");
}

#[test]
fn shrinking_and_constant_use_give_no_forecast() {
    let shrinks = follow(600, |m| 100_000 - u128::try_from(m).unwrap());
    assert!(shrinks.per_hour < -30.0, "{shrinks:?}");
    assert_eq!(shrinks.exhausts_at(10, minute(600), None), None);
    let stands = follow(600, |_| 100);
    assert_eq!(stands, Trend::start(100, minute(0)), "nothing to write");
    assert_eq!(stands.exhausts_at(10, minute(600), None), None);
    let full = follow(600, |m| u128::try_from(m).unwrap());
    assert_eq!(full.exhausts_at(0, minute(600), None), None);
}

#[test]
fn a_single_jump_gives_no_forecast_and_is_forgotten() {
    let used = |m: i64| if m < 600 { 100 } else { 5000 };
    let mut trend = Trend::start(100, minute(0));
    for m in 0..15 * 24 * 60 {
        trend = trend.observe(used(m), minute(m));
        assert_eq!(trend.exhausts_at(5000, minute(m), None), None, "at {m}");
    }
    assert_eq!((trend.per_hour, trend.swing), (0.0, 0.0));
    // The change follows a time without samples. The change is not averaged over that time.
    let again = trend.observe(9000, minute(16 * 24 * 60));
    assert!((again.per_hour - 4000.0 / 6.0).abs() < 12.0, "{again:?}");
    assert_eq!(again.exhausts_at(1000, minute(16 * 24 * 60), None), None);
}

#[test]
fn growth_by_steps_is_growth() {
    let trend = follow(48 * 60, |m| u128::try_from(m / 50).unwrap() * 256);
    let now = minute(48 * 60);
    let said = hours(now, trend.exhausts_at(51_200, now, None).unwrap());
    assert!((said - 51_200.0 / 307.2).abs() < 20.0, "{said}");
}

#[test]
fn a_restart_at_any_point_changes_nothing() {
    for shift in [0, 66] {
        let used = |look: u64| (u128::from(look * 8 + noise(look, 20)) << shift) / 7;
        let free = 10_000 << shift;
        let mut kept = Trend::start(used(0), minute(0));
        let mut read = kept;
        let (mut last, mut read_last, mut m) = (None, None, 0);
        for look in 1..500 {
            m += i64::try_from(1 + noise(look, 45)).unwrap();
            let json = serde_json::to_string(&read.status()).unwrap();
            read = Trend::read(&serde_json::from_str(&json).unwrap()).unwrap();
            kept = kept.observe(used(look), minute(m));
            read = read.observe(used(look), minute(m));
            assert_eq!(kept, read, "{json}");
            last = kept.exhausts_at(free, minute(m), last);
            read_last = read.exhausts_at(free, minute(m), read_last);
            assert_eq!(last, read_last);
        }
        assert!(last.is_some());
    }
}

#[test]
fn counts_beyond_64_bits_give_the_same_forecast() {
    let block = 1_u128 << 64;
    let start = u128::MAX - 10_000 * block;
    let trend = follow(2 * 24 * 60, |m| {
        start + u128::try_from(m).unwrap() * block / 10
    });
    let now = minute(2 * 24 * 60);
    let left = 10_000 * block - 288 * block;
    let said = hours(now, trend.exhausts_at(left, now, None).unwrap());
    assert!((said - 9712.0 / 6.0).abs() < 80.0, "{said}");
    let status = trend.status();
    assert_eq!(status.used, (start + 288 * block).to_string());
    assert!(!status.per_hour.contains('e'), "{status:?}");
    let all = Trend::start(0, minute(0)).observe(u128::MAX, minute(10));
    assert!(all.per_hour.is_finite() && all.swing.is_finite(), "{all:?}");
    assert_eq!(all.exhausts_at(1, minute(10), None), None, "a jump");
}

#[test]
fn samples_are_ten_minutes_apart() {
    let first = Trend::start(0, minute(0));
    for m in -9..10 {
        assert_eq!(first.observe(500, minute(m)), first, "at {m}");
    }
    let second = first.observe(500, minute(10));
    assert_eq!((second.used, second.at), (500, minute(10)));
    assert!((second.per_hour - 82.2).abs() < 0.1, "{second:?}");
}

#[test]
fn a_clock_set_back_keeps_the_growth_and_a_long_gap_does_not() {
    let trend = follow(24 * 60, |m| u128::try_from(m).unwrap());
    let back = trend.observe(9000, minute(60));
    assert_eq!((back.used, back.at), (9000, minute(60)));
    assert_eq!((back.per_hour, back.swing), (trend.per_hour, trend.swing));
    let gap = 24 * 60 + GAP_HOURS * 60;
    let near = trend.observe(1440, minute(gap));
    assert!(near.swing > 0.0, "{near:?}");
    let anew = trend.observe(9000, minute(gap + 1));
    assert_eq!(anew, Trend::start(9000, minute(gap + 1)));
}

#[test]
fn an_invalid_status_gives_no_trend() {
    let good = follow(600, |m| u128::try_from(m).unwrap()).status();
    assert!(Trend::read(&good).is_some());
    for (used, per_hour) in [
        ("x", "1"),
        ("-1", "1"),
        ("1", ""),
        ("1", "inf"),
        ("1", "NaN"),
    ] {
        let bad = TrendStatus {
            used: used.into(),
            per_hour: per_hour.into(),
            ..good.clone()
        };
        assert_eq!(Trend::read(&bad), None, "{bad:?}");
    }
}
