//! Chance out of a seed: the only source of it in a test, so that a seed is a whole run.

#![allow(dead_code, reason = "no test needs all of it")]

/// `splitmix64`: small, fast, and every seed is as good as any other.
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

    /// A number below `bound`; 0 where there is none.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// An index into something of that length.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap()
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True `in_ten_thousand` times out of ten thousand.
    pub fn chance(&mut self, in_ten_thousand: u32) -> bool {
        self.below(10_000) < u64::from(in_ten_thousand)
    }

    /// True `percent` times out of a hundred.
    pub fn percent(&mut self, percent: u32) -> bool {
        self.chance(percent * 100)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.index(of.len())]
    }

    /// A length, of time say, from `low` to `high`, every order of magnitude as likely as any other.
    pub fn stretch(&mut self, low: u64, high: u64) -> u64 {
        let doublings = u64::from((high / low.max(1)).max(1).ilog2()) + 1;
        let low = low << self.below(doublings);
        self.between(low, (low * 2).min(high).max(low))
    }
}

/// The seed of a test that makes one long run: `SEED`, or always the same one.
pub fn seed() -> u64 {
    match std::env::var("SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => 1,
    }
}
