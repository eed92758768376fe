//! Proof that the checks can fail: with one guard taken out, two nodes get one range, and it is seen.
//!
//! Each mutation is made in the API server or in the shell as played here; the product has no hook.

use super::api::Mutation;
use super::run::Sim;

/// Runs seeds under a mutation until a duplicate is found; says after how many steps.
fn found(mutation: Mutation, within: u64) {
    let mut steps = 0;
    for seed in 0.. {
        match Sim::run(seed, Some(mutation)) {
            Ok(tally) => steps += tally.steps,
            Err(failure) => {
                steps += failure.step;
                println!(
                    "{mutation:?}: found after {steps} steps, seed {seed}: {}",
                    failure.violation.text
                );
                return;
            }
        }
        assert!(
            steps < within,
            "{mutation:?}: no duplicate in {steps} steps"
        );
    }
}

#[test]
fn a_touch_without_effect_lets_two_nodes_have_one_range() {
    found(Mutation::TouchWithoutEffect, 5_000_000);
}

#[test]
fn an_assignment_that_does_not_test_the_term_lets_two_nodes_have_one_range() {
    found(Mutation::TermUntested, 5_000_000);
}

#[test]
fn an_assignment_that_does_not_test_the_uid_gives_a_stranger_somebody_elses_range() {
    found(Mutation::UidUntested, 5_000_000);
}

#[test]
fn an_unclear_write_taken_for_refused_lets_two_nodes_have_one_range() {
    found(Mutation::UnclearToldAsRefused, 5_000_000);
}

#[test]
fn an_address_goes_to_another_pod_where_pods_are_not_looked_at() {
    found(Mutation::PodsHidden, 5_000_000);
}

#[test]
fn a_block_let_go_of_while_in_use_is_used_twice() {
    found(Mutation::LetGoInUse, 10_000_000);
}

#[test]
fn what_the_server_has_forgotten_goes_to_others_where_agents_are_not_heard() {
    found(Mutation::UnlistedUnheard, 5_000_000);
}

#[test]
fn what_the_server_has_forgotten_goes_to_others_where_no_time_is_left_to_agents() {
    found(Mutation::ListeningLeftOut, 10_000_000);
}

#[test]
fn what_is_sent_before_the_lease_names_it_lets_two_nodes_have_one_range() {
    found(Mutation::SentUnnamed, 10_000_000);
}

#[test]
fn what_is_not_named_any_more_while_its_outcome_is_unclear_is_found() {
    found(Mutation::TakenOffUnclear, 10_000_000);
}

#[test]
fn an_unclear_write_of_the_lease_that_is_trusted_lets_two_nodes_have_one_range() {
    found(Mutation::UnclearLeaseTrusted, 10_000_000);
}

#[test]
fn a_take_over_that_ignores_one_named_node_lets_two_nodes_have_one_range() {
    found(Mutation::NamedIgnored, 10_000_000);
}
