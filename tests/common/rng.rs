//! Random numbers from a seed. A test has no other source of randomness, so the seed determines the whole run.

#![allow(dead_code, reason = "no test needs all of it")]

/// The generator `splitmix64`: small, fast, and good with any seed.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng(seed ^ 0x9e37_79b9_7f4a_7c15);
        rng.next();
        rng
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// A random index into a list of `len` entries.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap()
    }

    /// A number from `low` to `high`, inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with a probability of `in_ten_thousand` / 10,000.
    pub fn chance(&mut self, in_ten_thousand: u32) -> bool {
        self.below(10_000) < u64::from(in_ten_thousand)
    }

    /// True with a probability of `percent` %.
    pub fn percent(&mut self, percent: u32) -> bool {
        self.chance(percent * 100)
    }

    /// True with a probability of 1 / `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.index(of.len())]
    }

    /// A number from `low` to `high`, for example a duration. How many times `low` is doubled is drawn first, so short
    /// and long durations are about equally likely.
    pub fn stretch(&mut self, low: u64, high: u64) -> u64 {
        let doublings = u64::from((high / low.max(1)).max(1).ilog2()) + 1;
        let low = low << self.below(doublings);
        self.between(low, (low * 2).min(high).max(low))
    }
}

/// The seed of a test with a single long run: the environment variable `SEED`, or 1.
pub fn seed() -> u64 {
    match std::env::var("SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => 1,
    }
}
