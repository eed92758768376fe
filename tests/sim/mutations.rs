//! Tries deliberate bugs: checks that the simulation finds each bug that it has to find according to `proofs`.
//!
//! `make mutants` prints the table. Mutations that unit tests find are tried in `tests/common/mutated.rs`.

use super::proofs::Weather;

/// How to run seeds for a mutation. Optimised builds have no mutations.
#[derive(Clone, Copy)]
#[cfg_attr(not(debug_assertions), allow(dead_code))]
pub struct Trial {
    pub weather: Weather,
    /// The only rule whose violation ends a run; with `None` a violation of any rule does.
    pub rule: Option<&'static str>,
}

#[cfg(debug_assertions)]
mod tried {
    use std::sync::Mutex;

    use cadastre_core::mutation;
    use cadastre_core::mutation::Mutation;

    use super::super::proofs::{Proof, proof, row};
    use super::super::run::Sim;
    use super::Trial;

    /// Runs seeds until one fails because of the mutation. Returns a text with the number of steps and the violation. A
    /// seed that also fails without the mutation proves nothing, so it is skipped.
    fn found(mutation: Mutation, trial: Trial, within: u64) -> Result<String, String> {
        let mut steps = 0;
        for seed in 0.. {
            mutation::set(Some(mutation));
            let done = Sim::run(seed, Some(trial));
            mutation::set(None);
            match done {
                Ok(tally) => steps += tally.steps,
                Err(failure) => {
                    steps += failure.step;
                    if Sim::run(seed, Some(trial)).is_ok() {
                        let (rule, text) = (failure.violation.rule, failure.violation.text);
                        return Ok(format!("{steps} steps, seed {seed}, {rule:?}: {text}"));
                    }
                }
            }
            if steps > within {
                break;
            }
        }
        Err(format!("not found in {steps} steps"))
    }

    /// Tries each mutation on its own, two of them in parallel, and prints the results.
    fn try_all(
        mutations: impl Iterator<Item = Mutation>,
        attempt: impl Fn(Mutation) -> Result<String, String> + Sync,
    ) {
        let left = Mutex::new(mutations.collect::<Vec<_>>().into_iter());
        let failed = Mutex::new(Vec::new());
        let work = || {
            loop {
                let next = left.lock().unwrap().next();
                let Some(mutation) = next else { break };
                match attempt(mutation) {
                    Ok(how) => println!("{}\n  {how}", row(mutation)),
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
    }

    fn simulated(mutation: Mutation) -> Option<(Trial, u64)> {
        match proof(mutation) {
            Proof::Simulation(weather, thousands, rule) => {
                Some((Trial { weather, rule }, thousands))
            }
            Proof::Test(_) => None,
        }
    }

    fn attempt(mutation: Mutation) -> Result<String, String> {
        let (trial, thousands) = simulated(mutation).ok_or("nothing to try")?;
        found(mutation, trial, thousands * 1_000)
    }

    /// `MUTANT` names the mutation to try; without it all mutations that the simulation has to find are tried.
    #[test]
    fn what_is_said_of_the_simulation_is_so() {
        let named = std::env::var("MUTANT").ok().filter(|it| !it.is_empty());
        let is_named = |it: &Mutation| named.as_ref().is_none_or(|name| *name == format!("{it:?}"));
        let all = Mutation::ALL.iter().copied().filter(is_named);
        try_all(all.filter(|it| simulated(*it).is_some()), attempt);
    }
}
