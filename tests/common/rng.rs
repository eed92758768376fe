//! Random numbers from a seed. A test has no other source of randomness, so the seed determines the whole run.

#![allow(dead_code, reason = "no test needs all of it")]

/// The generator `splitmix64`: small, fast, and good with any seed. Or the outcomes are chosen instead of drawn.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
    chosen: Option<ChosenOutcomes>,
}

/// Outcomes of draws that a test chooses. A draw has few outcomes then. The first one is the ordinary outcome: nothing
/// fails, and everything is quick.
#[derive(Clone, Debug, Default)]
pub struct ChosenOutcomes {
    /// The draws with another outcome than the first one: the number of the draw, and the outcome. In ascending order
    pub deviations: Vec<(usize, u8)>,
    /// For each draw so far, how many outcomes it has
    pub counts: Vec<u8>,
    /// If set, further draws have their first outcome, and are not counted
    pub is_over: bool,
}

impl ChosenOutcomes {
    fn next(&mut self, count: u8) -> u8 {
        if self.is_over {
            return 0;
        }
        let nth = self.counts.len();
        self.counts.push(count);
        let found = self.deviations.binary_search_by_key(&nth, |it| it.0);
        found.map_or(0, |at| self.deviations[at].1)
    }
}

impl Rng {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng {
            state: seed ^ 0x9e37_79b9_7f4a_7c15,
            chosen: None,
        };
        rng.next();
        rng
    }

    /// Returns a generator whose draws have chosen outcomes.
    pub fn chosen(deviations: Vec<(usize, u8)>) -> Self {
        Rng {
            chosen: Some(ChosenOutcomes {
                deviations,
                ..ChosenOutcomes::default()
            }),
            ..Self::new(0)
        }
    }

    /// The outcomes that are chosen; `None` if they are random.
    pub fn outcomes(&mut self) -> Option<&mut ChosenOutcomes> {
        self.chosen.as_mut()
    }

    /// Returns the chosen outcome of a draw with `count` outcomes. Returns `None` if draws are random.
    fn choose(&mut self, count: usize) -> Option<usize> {
        let chosen = self.chosen.as_mut()?;
        let count = u8::try_from(count).unwrap_or(u8::MAX);
        Some(if count > 1 {
            chosen.next(count).into()
        } else {
            0
        })
    }

    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if `bound` is 0. Ordinarily the highest one, because low numbers often mean faults.
    pub fn below(&mut self, bound: u64) -> u64 {
        match self.choose(bound.min(3).try_into().unwrap()) {
            Some(0) => bound.saturating_sub(1),
            Some(other) => other as u64 - 1,
            None if bound == 0 => 0,
            None => self.next() % bound,
        }
    }

    /// A random index into a list of `len` entries.
    pub fn index(&mut self, len: usize) -> usize {
        match self.choose(len.min(7)) {
            Some(chosen) => chosen,
            None => usize::try_from(self.below(len as u64)).unwrap(),
        }
    }

    /// A number from `low` to `high`, inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        match self.choose(if low < high { 2 } else { 1 }) {
            Some(0) => low,
            Some(_) => high,
            None => low + self.below(high - low + 1),
        }
    }

    /// True with a probability of `in_ten_thousand` / 10,000.
    pub fn chance(&mut self, in_ten_thousand: u32) -> bool {
        let is_open = (1..10_000).contains(&in_ten_thousand);
        match self.choose(if is_open { 2 } else { 1 }) {
            Some(chosen) => chosen > 0 || in_ten_thousand >= 10_000,
            None => self.below(10_000) < u64::from(in_ten_thousand),
        }
    }

    /// Whether something happens, with a probability of `in_ten_thousand` / 10,000, and at which of `count` points. If
    /// outcomes are chosen, it happens at the first or the last point.
    pub fn chance_at(&mut self, in_ten_thousand: u32, count: u64) -> (bool, u64) {
        match self.choose(if in_ten_thousand > 0 { 3 } else { 1 }) {
            Some(1) => (true, 0),
            Some(chosen) => (chosen > 0, count - 1),
            None => {
                let happens = in_ten_thousand > 0 && self.chance(in_ten_thousand);
                (happens, self.below(count))
            }
        }
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
    /// and long durations are about equally likely. If outcomes are chosen, a wide range has a third one, as many times
    /// longer than the shortest as the longest is longer than this one.
    pub fn stretch(&mut self, low: u64, high: u64) -> u64 {
        if self.chosen.is_some() {
            let ratio = high / low.max(1);
            if ratio < 100 {
                return self.between(low, high);
            }
            return *self.pick(&[low, low.max(1) * ratio.isqrt(), high]);
        }
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
