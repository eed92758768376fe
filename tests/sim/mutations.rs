//! Tries deliberate bugs: checks that the simulation finds each bug that it has to find according to `proofs`.
//!
//! A search from seed 0 can take minutes. So `make sim` first runs the seeds in `found.txt`, which found the mutations
//! in the last search. If a seed no longer finds its mutation, `make sim` searches from seed 0 on. `make mutants`
//! always searches. With `UPDATE=1` it also tries the following seeds, because some find the mutation in fewer steps,
//! and writes the file. Mutations that unit tests find are tried in `tests/common/mutated.rs`.

#[cfg(debug_assertions)]
use cadastre_core::mutation::Mutation;

use super::proofs::Scenario;
#[cfg(debug_assertions)]
use super::proofs::{Proof, proof};
#[cfg(debug_assertions)]
use super::seeds::variable;

/// How to run seeds for a mutation. Optimised builds have no mutations.
#[derive(Clone, Copy)]
#[cfg_attr(not(debug_assertions), allow(dead_code))]
pub struct Trial {
    pub scenario: Scenario,
    /// If `Some`, only a violation of this rule ends a run. If `None`, a violation of any rule ends a run.
    pub rule: Option<&'static str>,
}

/// Returns the mutations to try: the one that the environment variable `MUTANT` names, or all if it is not set.
#[cfg(debug_assertions)]
pub fn chosen() -> impl Iterator<Item = Mutation> {
    let named = variable("MUTANT");
    let is_chosen =
        move |it: &Mutation| named.as_ref().is_none_or(|name| *name == format!("{it:?}"));
    Mutation::ALL.iter().copied().filter(is_chosen)
}

/// How the simulation has to find the mutation, and within how many thousand steps. Returns `None` if a unit test finds
/// it.
#[cfg(debug_assertions)]
pub fn simulated(mutation: Mutation) -> Option<(Trial, u64)> {
    match proof(mutation) {
        Proof::Simulation(scenario, thousands, rule) => Some((Trial { scenario, rule }, thousands)),
        Proof::Test(_) => None,
    }
}

#[cfg(debug_assertions)]
mod tried {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;
    use std::sync::Mutex;

    use cadastre_core::mutation;
    use cadastre_core::mutation::Mutation;

    use super::super::checks::Violation;
    use super::super::proofs::row;
    use super::super::run::Sim;
    use super::super::seeds::variable;
    use super::super::trace::Trace;
    use super::{Trial, chosen, simulated};

    /// The path of a file that has one line for each mutation: the mutation's name, and the seed that finds it.
    const FOUND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sim/found.txt");

    /// How many further seeds are tried after the first that finds a mutation, if `found.txt` is written.
    const FURTHER: u64 = 60;

    /// A seed that finds a mutation.
    struct Find {
        seed: u64,
        steps: u64,
        violation: Violation,
    }

    impl Find {
        fn text(&self) -> String {
            let Violation { rule, text, .. } = &self.violation;
            format!("seed {}, step {}, {rule:?}: {text}", self.seed, self.steps)
        }
    }

    /// Runs at most `most` steps of a seed with the mutation. Returns what the seed found, or the number of steps that
    /// were run. A violation does not count if the seed also fails without the mutation within the same number of
    /// steps.
    fn try_seed(seed: u64, mutation: Mutation, trial: Trial, most: u64) -> Result<Find, u64> {
        let start = || Sim::new(seed, Some(trial), Trace::default());
        mutation::set(Some(mutation));
        let mut mutated = start();
        let verdict = mutated.go(most);
        mutation::set(None);
        let steps = mutated.step;
        match verdict {
            Err(violation) if start().go(steps).is_ok() => Ok(Find {
                seed,
                steps,
                violation,
            }),
            _ => Err(steps),
        }
    }

    /// Runs seeds from 0 on, for about `within` steps, until one finds the mutation.
    fn search(mutation: Mutation, trial: Trial, within: u64) -> Result<Find, String> {
        let (mut seed, mut steps) = (0, 0);
        while steps <= within {
            match try_seed(seed, mutation, trial, u64::MAX) {
                Ok(find) => return Ok(find),
                Err(more) => steps += more,
            }
            seed += 1;
        }
        Err(format!("not found in {steps} steps"))
    }

    /// Returns the find with the fewest steps among `first` and the seeds that follow it.
    fn shortest(first: Find, mutation: Mutation, trial: Trial) -> Find {
        let further = first.seed + 1..=first.seed + FURTHER;
        further.fold(first, |best, seed| {
            try_seed(seed, mutation, trial, best.steps).unwrap_or(best)
        })
    }

    /// Returns the seeds in `found.txt`, or none if this run must search.
    fn known_seeds() -> BTreeMap<String, u64> {
        match variable("SEARCH") {
            Some(_) => BTreeMap::new(),
            None => seeds_of_file(),
        }
    }

    fn seeds_of_file() -> BTreeMap<String, u64> {
        let text = std::fs::read_to_string(FOUND).unwrap();
        let entry = |line: &str| {
            let (name, seed) = line.split_once(' ').unwrap();
            (name.to_owned(), seed.parse().unwrap())
        };
        text.lines().map(entry).collect()
    }

    /// Tries each mutation on its own, two mutations in parallel, and prints the results. Returns the seed that finds
    /// each mutation, and the mutations that were not found.
    fn try_all(
        mutations: impl Iterator<Item = Mutation>,
        attempt: impl Fn(Mutation) -> Result<Find, String> + Sync,
    ) -> (BTreeMap<Mutation, u64>, Vec<Mutation>) {
        let left = Mutex::new(mutations.collect::<Vec<_>>().into_iter());
        let (seeds, failed) = (Mutex::default(), Mutex::new(Vec::new()));
        let work = || {
            loop {
                let next = left.lock().unwrap().next();
                let Some(mutation) = next else { break };
                match attempt(mutation) {
                    Ok(find) => {
                        println!("{}\n  {}", row(mutation), find.text());
                        BTreeMap::insert(&mut seeds.lock().unwrap(), mutation, find.seed);
                    }
                    Err(why) => {
                        println!("{}\n  {why}", row(mutation));
                        failed.lock().unwrap().push(mutation);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(work);
            work();
        });
        (seeds.into_inner().unwrap(), failed.into_inner().unwrap())
    }

    /// Of the [`chosen`] mutations, tries all that the simulation has to find.
    #[test]
    fn the_simulation_finds_its_mutations() {
        let (known_seeds, update) = (known_seeds(), variable("UPDATE").is_some());
        let (seeds, failed) = try_all(chosen().filter(|it| simulated(*it).is_some()), |mutation| {
            let (trial, thousands) = simulated(mutation).ok_or("nothing to try")?;
            let seed = known_seeds.get(&format!("{mutation:?}"));
            let known = seed.and_then(|seed| try_seed(*seed, mutation, trial, u64::MAX).ok());
            let first = known.map_or_else(|| search(mutation, trial, thousands * 1_000), Ok)?;
            Ok(if update {
                shortest(first, mutation, trial)
            } else {
                first
            })
        });
        if update {
            write_seeds(&seeds);
        }
        assert!(failed.is_empty(), "not found: {failed:?}");
    }

    /// Writes the seeds of the mutations that were tried. The other lines of the file stay.
    fn write_seeds(seeds: &BTreeMap<Mutation, u64>) {
        let before = seeds_of_file();
        let mut text = String::new();
        for mutation in Mutation::ALL.iter().filter(|it| simulated(**it).is_some()) {
            let name = format!("{mutation:?}");
            if let Some(seed) = seeds.get(mutation).or(before.get(&name)) {
                writeln!(text, "{name} {seed}").unwrap();
            }
        }
        std::fs::write(FOUND, text).unwrap();
    }
}
