//! Tries deliberate bugs: checks that the simulation finds each bug that it has to find according to `proofs`.
//!
//! A search from seed 0 can take minutes. So `make sim` first runs the seeds in `found.txt`, which found the mutations
//! in the last search. If a seed no longer finds its mutation, `make sim` searches from seed 0 on. `make mutants`
//! always searches, and with `UPDATE=1` it writes the file. Mutations that unit tests find are tried in
//! `tests/common/mutated.rs`.

use super::proofs::Scenario;

/// How to run seeds for a mutation. Optimised builds have no mutations.
#[derive(Clone, Copy)]
#[cfg_attr(not(debug_assertions), allow(dead_code))]
pub struct Trial {
    pub scenario: Scenario,
    /// If `Some`, only a violation of this rule ends a run. If `None`, a violation of any rule ends a run.
    pub rule: Option<&'static str>,
}

#[cfg(debug_assertions)]
mod tried {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;
    use std::sync::Mutex;

    use cadastre_core::mutation;
    use cadastre_core::mutation::Mutation;

    use super::super::proofs::{Proof, proof, row};
    use super::super::run::Sim;
    use super::super::search::variable;
    use super::super::trace::Trace;
    use super::Trial;

    /// One line for each mutation: its name, and the seed that finds it.
    const FOUND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sim/found.txt");

    /// Runs a seed with the mutation. Returns the violation that the seed found, or the number of steps that were run.
    /// The violation does not count if the seed fails within as many steps without the mutation, too.
    fn try_seed(seed: u64, mutation: Mutation, trial: Trial) -> Result<String, u64> {
        let start = || Sim::new(seed, Some(trial), Trace::default());
        mutation::set(Some(mutation));
        let mut mutated = start();
        let verdict = mutated.go(u64::MAX);
        mutation::set(None);
        let Err(violation) = verdict else {
            return Err(mutated.step);
        };
        if start().go(mutated.step).is_err() {
            return Err(mutated.step);
        }
        let (step, rule) = (mutated.step, violation.rule);
        Ok(format!(
            "seed {seed}, step {step}, {rule:?}: {}",
            violation.text
        ))
    }

    /// Runs seeds from 0 on, for about `within` steps, until one finds the mutation. Returns that seed and the
    /// violation.
    fn search(mutation: Mutation, trial: Trial, within: u64) -> Result<(u64, String), String> {
        let (mut seed, mut steps) = (0, 0);
        while steps <= within {
            match try_seed(seed, mutation, trial) {
                Ok(how) => return Ok((seed, format!("after {steps} steps: {how}"))),
                Err(more) => steps += more,
            }
            seed += 1;
        }
        Err(format!("not found in {steps} steps"))
    }

    /// Returns the seeds in `found.txt`, or none if this run must search.
    fn known_seeds() -> BTreeMap<String, u64> {
        if variable("SEARCH").is_some() {
            return BTreeMap::new();
        }
        let text = std::fs::read_to_string(FOUND).unwrap();
        let entry = |line: &str| {
            let (name, seed) = line.split_once(' ').unwrap();
            (name.to_owned(), seed.parse().unwrap())
        };
        text.lines().map(entry).collect()
    }

    /// Tries each mutation on its own, two mutations in parallel, and prints the results. Returns the seed that finds
    /// each mutation.
    fn try_all(
        mutations: impl Iterator<Item = Mutation>,
        attempt: impl Fn(Mutation) -> Result<(u64, String), String> + Sync,
    ) -> BTreeMap<Mutation, u64> {
        let left = Mutex::new(mutations.collect::<Vec<_>>().into_iter());
        let (seeds, failed) = (Mutex::default(), Mutex::new(Vec::new()));
        let work = || {
            loop {
                let next = left.lock().unwrap().next();
                let Some(mutation) = next else { break };
                match attempt(mutation) {
                    Ok((seed, how)) => {
                        println!("{}\n  {how}", row(mutation));
                        BTreeMap::insert(&mut seeds.lock().unwrap(), mutation, seed);
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
        let failed = failed.into_inner().unwrap();
        assert!(failed.is_empty(), "not found: {failed:?}");
        seeds.into_inner().unwrap()
    }

    fn simulated(mutation: Mutation) -> Option<(Trial, u64)> {
        match proof(mutation) {
            Proof::Simulation(scenario, thousands, rule) => {
                Some((Trial { scenario, rule }, thousands))
            }
            Proof::Test(_) => None,
        }
    }

    /// The environment variable `MUTANT` names the mutation to try. If it is not set, all mutations that the simulation
    /// has to find are tried.
    #[test]
    fn the_simulation_finds_its_mutations() {
        let named = variable("MUTANT");
        let is_named = |it: &Mutation| named.as_ref().is_none_or(|name| *name == format!("{it:?}"));
        let all = Mutation::ALL.iter().copied().filter(is_named);
        let known_seeds = known_seeds();
        let seeds = try_all(all.filter(|it| simulated(*it).is_some()), |mutation| {
            let (trial, thousands) = simulated(mutation).ok_or("nothing to try")?;
            let seed = known_seeds.get(&format!("{mutation:?}"));
            let found = seed.and_then(|seed| {
                let how = try_seed(*seed, mutation, trial).ok()?;
                Some((*seed, how))
            });
            found.map_or_else(|| search(mutation, trial, thousands * 1_000), Ok)
        });
        if named.is_none() && variable("UPDATE").is_some() {
            let mut text = String::new();
            for (mutation, seed) in seeds {
                writeln!(text, "{mutation:?} {seed}").unwrap();
            }
            std::fs::write(FOUND, text).unwrap();
        }
    }
}
