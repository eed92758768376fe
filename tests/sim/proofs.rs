//! What finds each mutation: the simulation under certain conditions, or a unit test of a certain name.
//!
//! The match covers all mutations. `docs/mutations.md` has the same content. The tests of the simulation, of the pages
//! and of the crates include this file.

#![cfg_attr(not(debug_assertions), allow(dead_code))]
// The function `proof` is a table with one line for each mutation, by its bare name.
#![allow(clippy::enum_glob_use, clippy::match_same_arms)]

use super::Mutation::{self, *};

/// The conditions of the runs in which a mutation must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// The conditions that follow from the seed alone.
    AsDrawn,
    /// There is little space for many nodes, and leaders stop sending requests after an allocation.
    Crowded,
    /// Like [`Scenario::Crowded`], with blocks.
    CrowdedBlocks,
    /// There are only pools of blocks. A few nodes live long enough to have blocks, and the API server is restored to
    /// an older state.
    Restored,
    /// Leaders are asked to stop every few seconds, and watches lag.
    HandOvers,
    /// Watches are cut every few seconds, and leaders stop sending requests after an allocation.
    Behind,
    /// Allocations arrive late, while nodes wait for the ranges.
    Scarce,
    /// Pods have addresses that Cadastre has not assigned.
    Strangers,
    /// Like [`Scenario::Crowded`], and the Lease does not name the allocations that may be in flight (intents).
    NoIntents,
    /// Like [`Scenario::Crowded`], and clocks stop, jump and run at any rate.
    BadClocks,
    /// Like [`Scenario::Crowded`], and many requests arrive late, and many leaders crash.
    Unclear,
    /// There are only pools of blocks, a few nodes, and many pods. Stores are lost just after an address was assigned.
    Agents,
    /// There are only pools of blocks, a few nodes, and many claims. Some of the claims are for addresses in blocks of
    /// nodes.
    Claims,
    /// Like [`Scenario::Claims`], and many pods ask for addresses.
    AskingPods,
    /// Like [`Scenario::Agents`] without lost stores. All pools require probes, and have so few addresses that each is
    /// soon used again.
    Probing,
    /// Like [`Scenario::Claims`], and many pods belong to virtual machines that migrate.
    Migrations,
    /// There are only small pools of blocks whose nodes borrow, a few nodes, and many pods.
    Lending,
    /// Like [`Scenario::Claims`] with a restore. Users often request withdrawals of ranges and cancel the requests
    /// again, and agents are killed when they have just reported a range as withdrawn.
    Withdrawals,
    /// Like [`Scenario::Agents`]. In addition, Nodes are deleted and register again, and then their hosts lose their
    /// stores.
    Reborn,
    /// Like [`Scenario::Agents`] without lost stores. Hosts often lose their power for a short time, for example just
    /// after a report.
    Reboots,
}

/// What finds a mutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// The simulation finds the mutation within this many thousand steps from seed 0 on. Only violations of the named
    /// rule count. If no rule is named, violations of any rule count.
    Simulation(Scenario, u64, Option<&'static str>),
    Test(&'static str),
}

/// The name of the most important rule: no range has two holders.
const ONE_HOLDER: Option<&str> = Some("one holder");

const fn sim(scenario: Scenario, thousands: u64) -> Proof {
    Proof::Simulation(scenario, thousands, None)
}

const fn duplicate(scenario: Scenario, thousands: u64) -> Proof {
    Proof::Simulation(scenario, thousands, ONE_HOLDER)
}

/// A proof by the check of waiting nodes, which runs throughout a run and not only at its end.
const fn liveness(scenario: Scenario, thousands: u64) -> Proof {
    Proof::Simulation(scenario, thousands, Some("served in time"))
}

/// A proof by the check of the marks of exhausted nodes.
const fn exhaustion(scenario: Scenario, thousands: u64) -> Proof {
    Proof::Simulation(scenario, thousands, Some("exhaustion"))
}

const fn unit(name: &'static str) -> Proof {
    Proof::Test(name)
}

pub fn proof(mutation: Mutation) -> Proof {
    use Scenario::{
        Agents, AsDrawn, AskingPods, BadClocks, Behind, Claims, Crowded, CrowdedBlocks, HandOvers,
        Lending, Migrations, NoIntents, Probing, Reboots, Reborn, Restored, Scarce, Strangers,
        Unclear, Withdrawals,
    };
    match mutation {
        // Mutations of the allocation of podCIDRs
        IndeterminateAllocationFreed => duplicate(Scarce, 1_000),
        UsedAddressesNotAvoided => sim(Strangers, 200),
        MirrorPodsBelieved => unit(
            "controller::cluster::pods::tests::mirror_pods_count_against_what_their_node_had_and_a_few_against_free_space",
        ),
        BetterPoolNotAwaited => sim(AsDrawn, 5_000),
        PodCidrWaitersNotWoken => liveness(AsDrawn, 5_000),
        AssignedRangesNotKept => sim(Crowded, 1_000),
        OtherRangesThanAssigned => sim(Crowded, 5_000),
        TakenAlthoughHeld => sim(AsDrawn, 5_000),
        AssignedRangesReturned => unit(
            "controller::podcidr::tests::a_machine_gets_its_ranges_back_only_if_they_are_assigned_to_nobody_else",
        ),
        AssignedNodeNotWoken => unit(
            "controller::podcidr::tests::a_node_that_waits_for_its_assigned_range_gets_it_once_it_is_free",
        ),
        MaxPodsIgnored => sim(Crowded, 200),
        MaxPodsNotAwaited => sim(Crowded, 1_000),
        ReturnedRangesShared => unit(
            "controller::podcidr::tests::a_machine_gets_its_ranges_back_unless_another_node_holds_some_of_them",
        ),
        ImpossibleHoldingKept => unit(
            "controller::allocations::tests::a_holding_is_released_if_the_node_has_another_range",
        ),
        RevivedNodeLosesHolding => unit(
            "controller::allocations::tests::a_node_that_was_mistaken_for_deleted_keeps_the_range_it_may_get",
        ),
        OverlapsNotReported => {
            unit("controller::allocations::tests::two_nodes_with_common_addresses_are_a_pair")
        }
        ForeignAllocatorIgnored => unit(
            "controller::pools::tests::a_pool_pauses_for_a_while_if_a_foreign_allocator_writes_in_its_range",
        ),
        PoolThatGoesKeepsRanges => unit(
            "controller::pool::tests::of_two_pools_over_a_range_in_use_only_one_loses_its_finalizer_at_a_time",
        ),
        WidePodCidrCounts => unit(
            "controller::allocations::foreign::tests::a_podcidr_that_no_node_could_have_got_takes_nothing_from_pools",
        ),
        ContestedPodCidrAllocated => unit(
            "controller::allocations::foreign::tests::a_podcidr_that_contains_another_nodes_block_is_withheld",
        ),

        // Mutations of elections, takeovers and hand-overs
        TakeOverCountsAsClean => sim(AsDrawn, 5_000),
        HandOverNotListed => duplicate(HandOvers, 5_000),
        CacheBehindTrusted => sim(Behind, 4_000),
        UnansweredTimeForgotten => unit(
            "controller::machine::tests::a_takeover_lists_only_kinds_whose_watch_may_be_behind",
        ),
        HandOverWhileIndeterminate => sim(HandOvers, 2_000),
        DeletingNodesNotTouched => sim(NoIntents, 1_000),
        RejectedTouchCounts => sim(NoIntents, 4_000),
        AllocatedBeforeNamed => duplicate(BadClocks, 10_000),
        NameRemovedWhileIndeterminate => sim(Unclear, 1_000),
        IndeterminateLeaseWriteCounts => sim(AsDrawn, 2_000),
        OneNamedNodeIgnored => duplicate(Crowded, 5_000),
        LeaseNotAwaited => sim(AsDrawn, 200),
        FailingNamesTakeRoom => unit(
            "controller::machine::tests::nodes_that_cannot_be_written_take_no_room_from_others",
        ),
        ExpiredLeaderDecides => unit(
            "controller::machine::tests::a_leader_whose_lease_has_expired_sends_nothing_until_a_renewal",
        ),
        RenewalConflictIgnored => sim(AsDrawn, 2_000),
        RenewalCountsFromAnswer => {
            unit("controller::cluster::lease::tests::a_renewal_counts_from_its_start")
        }
        TermCountsFromLastTry => unit(
            "controller::cluster::lease::tests::a_term_counts_from_the_first_try_to_acquire_the_lease",
        ),
        ClearedHolderCountsAsReleased => unit(
            "controller::cluster::lease::tests::a_holder_cleared_by_hand_has_not_released_the_lease",
        ),
        OldNewsCounts => {
            unit("controller::cluster::lease::tests::an_outdated_watch_event_changes_nothing")
        }
        SilentWatchTrusted => unit(
            "controller::cluster::lease::tests::a_candidate_with_a_silent_watch_reads_before_it_acquires",
        ),
        LongerLeaseCountsOn => unit(
            "controller::cluster::lease::pace::tests::a_shorter_lease_ends_sooner_before_its_write_is_answered",
        ),

        // Mutations of the quarantine of deleted nodes' ranges
        NoQuarantine => sim(AsDrawn, 500),
        DeletingNodeCountsAsGone => sim(AsDrawn, 1_000),
        UnseenDeletionNotQuarantined => sim(AsDrawn, 500),
        UnrecordedDeathForgotten => unit(
            "controller::allocations::quarantined::tests::a_range_that_a_standby_saw_go_is_quarantined_unless_another_node_has_all_of_it",
        ),
        RecordedQuarantineNotBounded => sim(AsDrawn, 40_000),
        ShortestQuarantineCounts => unit(
            "controller::allocations::quarantined::tests::the_longest_quarantine_of_the_pools_counts",
        ),
        PodsNotLookedAt => sim(AsDrawn, 2_000),
        PodIndexNotLookedAt => unit(
            "controller::quarantine::tests::a_range_stays_quarantined_while_any_pod_reports_an_address_of_it",
        ),
        BoundPodsNotLookedAt => unit(
            "controller::quarantine::tests::a_range_becomes_free_if_a_list_after_its_quarantine_shows_no_pod_with_an_address_of_it",
        ),
        EarlierPodListCounts => sim(AsDrawn, 2_000),
        FreedWhileNamed => unit(
            "controller::quarantine::tests::a_range_stays_quarantined_while_a_node_subnet_names_the_deleted_node",
        ),
        ReturnedRangeStillQuarantined => unit(
            "controller::allocations::quarantined::tests::a_quarantine_ends_if_a_live_node_of_the_name_has_all_the_ranges",
        ),

        // Mutations of blocks
        BlockConfirmedByAnswer => unit(
            "controller::machine::tests::a_block_is_listed_once_the_watch_has_shown_it_not_by_the_answer_to_its_creation",
        ),
        BlockDoesNotYieldToPodCidr => unit(
            "controller::allocations::blocks::tests::a_block_yields_to_a_podcidr_that_overlaps_it",
        ),
        AnswerToEarlierBlockCounts => unit(
            "controller::allocations::blocks::tests::an_answer_for_an_earlier_block_of_the_cidr_is_not_for_the_next_one",
        ),
        BlocksJudgedDuringList => {
            unit("controller::allocations::blocks::tests::nothing_is_judged_while_a_list_runs")
        }
        EditedBlockKeepsItsAge => unit(
            "controller::allocations::blocks::tests::of_two_blocks_the_older_object_stays_and_an_edited_one_counts_as_older",
        ),
        ListedBlocksNotRead => unit(
            "controller::allocations::blocks::tests::a_block_that_is_listed_for_a_live_node_is_its_own_whatever_the_object_says",
        ),
        LateListIgnored => unit(
            "controller::allocations::blocks::tests::a_block_that_a_late_write_lists_belongs_to_the_live_node",
        ),
        DroppedBlockKeepsItsHolding => unit(
            "controller::allocations::blocks::tests::a_block_that_was_not_requested_yet_is_free_when_its_node_is_deleted",
        ),
        BlockEndsWhileListed => sim(AsDrawn, 5_000),
        PodsOfBlockNotLookedAt => sim(AsDrawn, 1_000),
        RecordedBlockQuarantineIgnored => sim(AsDrawn, 5_000),
        ForgottenBlockNotAdopted => duplicate(Restored, 1_000),
        HeldBlockAdopted => unit(
            "controller::allocations::adopt::tests::a_block_that_another_node_holds_waits_until_that_ends",
        ),
        AgentGraceSkipped => duplicate(Restored, 1_000),
        ProvisionalBlocksNotCounted => {
            unit("controller::demand::tests::what_is_on_its_way_to_a_node_counts")
        }
        ReleasedBlocksCounted => {
            unit("controller::demand::tests::a_block_that_a_node_lets_go_of_is_none_that_it_has")
        }
        LastBlockRecalled => unit(
            "controller::demand::tests::for_a_node_without_any_block_one_gives_that_wants_more_than_it_uses",
        ),
        BlockWaitersNotWoken => liveness(CrowdedBlocks, 10_000),

        // Mutations of pools, addresses and NodeSubnets
        FinalizerRemovedDuringQuarantine => sim(AsDrawn, 1_000),
        ReservedNotLeftOut => sim(AsDrawn, 200),
        WiderOlderPoolIgnored => unit(
            "controller::pools::tests::of_two_pools_with_common_addresses_the_older_one_serves",
        ),
        RoomComparedAcrossFamilies => unit(
            "api::choice::tests::room_is_compared_within_a_family_and_the_oldest_pool_decides_the_families",
        ),
        UnknownPodsServed => {
            unit("node::ledger::tests::an_unknown_pod_waits_unless_its_pool_serves_unknown_pods")
        }
        ReportedAddressSuspected => {
            unit("controller::leaks::tests::an_address_that_any_pod_reports_is_no_orphan")
        }
        EmptySubnetDeleted => {
            unit("controller::subnet::tests::an_empty_node_subnet_of_a_live_node_stays")
        }
        OthersConditionsWiped => {
            unit("controller::subnet::tests::conditions_of_others_stay_as_they_are")
        }
        RejectionsOfPredecessorForgotten => unit(
            "controller::subnet::tests::rejections_that_an_earlier_leader_reported_stay_until_the_outcome_of_a_write_is_known",
        ),
        AddressListIgnored => {
            unit("agent::rebuild::tests::what_was_published_comes_back_as_it_was")
        }
        UnknownAddressesListedLate => {
            unit("agent::addresses::tests::what_nobody_else_would_know_of_is_told_soon")
        }
        CarvesBelowCidr => sim(AsDrawn, 200),
        FirstFamilyStaysHeld => sim(AsDrawn, 2_000),

        ExhaustionNotLifted => exhaustion(Lending, 1_000),
        RoutesNotWithdrawn | RoutedBlockFreed => sim(AsDrawn, 3_000),
        FrrNotWithdrawn | FrrBlockFreed => sim(AsDrawn, 5_000),
        MinimumCountsAsPods => unit(
            "controller::demand::tests::a_node_that_lacks_its_minimum_takes_no_block_of_others",
        ),
        OthersTaintsDropped => unit("controller::exhaustion::tests::the_taints_of_others_stay"),
        GrowthIgnored => unit(
            "controller::exhaustion::tests::a_node_is_not_exhausted_while_a_pool_can_give_it_a_range",
        ),
        BoundPodsNotCounted => {
            unit("controller::exhaustion::tests::a_pod_counts_from_the_moment_when_it_is_bound")
        }

        // Mutations of the cache of a controller process
        GoneByAnswerComesBack => unit(
            "controller::cluster::object_cache::tests::an_object_that_an_answer_showed_to_be_gone_stays_gone",
        ),
        GoneByListComesBack => unit(
            "controller::cluster::object_cache::tests::an_object_that_an_answer_showed_to_be_gone_stays_gone",
        ),
        AnswerBeforeRelistTaken => unit(
            "controller::cluster::object_cache::tests::an_answer_to_a_request_sent_during_a_list_is_ignored",
        ),
        GoneByWatchComesBack => unit(
            "controller::cluster::object_cache::tests::an_answer_never_restores_a_deleted_object",
        ),

        // Mutations of requests and of how their outcomes are read
        UidNotTested => duplicate(Crowded, 5_000),
        TermNotTested => duplicate(NoIntents, 5_000),
        ServerErrorCountsAsRejection => {
            unit("controller::cluster::writer::tests::only_a_clear_rejection_counts_as_no_effect")
        }
        TimeoutCountsAsRejection => duplicate(Crowded, 5_000),
        GateNotAsked => {
            unit("controller::cluster::writer::tests::nothing_is_written_without_the_lease")
        }

        // Mutations of agents, claims and withdrawals, and one of the simulated API server
        TouchWithoutEffect => duplicate(NoIntents, 5_000),
        BlocksReleasedInUse | CoolingBlocksReleased | ReleasedBlocksForgotten => {
            unit("node::ledger::tests::a_released_block_is_used_again_only_under_another_uid")
        }
        LostReleaseForgotten => {
            unit("node::ledger::tests::a_released_block_stays_released_if_the_store_is_lost")
        }
        DrainingBlocksAssign => sim(Agents, 5_000),
        DeleteFreesWholePod => sim(Agents, 10_000),
        OneProofIsEnough => sim(Agents, 10_000),
        UnlistedBlocksAssign => {
            unit("node::ledger::tests::addresses_of_unlisted_blocks_stay_assigned")
        }
        ReleaseReportedBeforeStored => sim(Agents, 1_000),
        EarlierRoutesNotListed => unit(
            "controller::machine::scripts::no_block_is_deleted_before_the_noderoutes_of_earlier_leaders_are_listed",
        ),
        ReleasedWhileAnnounced => sim(Agents, 5_000),
        AnsweredBeforeStored => sim(Agents, 3_000),
        FailedWriteIgnored => sim(Agents, 5_000),
        CooldownIgnored => sim(Agents, 3_000),
        RebootEndsCooldown => sim(Reboots, 5_000),
        RangesRecordedLate => duplicate(Reboots, 10_000),
        LostBlocksAssign => unit(
            "agent::machine::tests::nothing_is_assigned_from_lost_blocks_while_new_ranges_wait_for_the_runtime",
        ),
        LostStoreTakenForReboot => sim(Agents, 5_000),
        ProbeSkipped => sim(Probing, 1_000),
        ConflictAssigned => sim(Probing, 1_000),
        ProbeOutlivesUse => sim(Probing, 2_000),
        SandboxesIgnored => sim(Agents, 5_000),
        AddressesOutsideForgotten => sim(Reborn, 5_000),
        // A store that is created too early records that pods use addresses outside of its ranges. So the agent asks
        // the runtime about each range. The store lacks only addresses on second networks, which the simulation leaves
        // out.
        NewStoreAtOnce => {
            unit("agent::machine::tests::o10_a_new_store_is_created_once_all_objects_are_known")
        }
        LeaksNotFreed => sim(Agents, 3_000),
        WithdrawnAssigned => sim(Claims, 2_000),
        WithdrawnInUse => sim(Claims, 10_000),
        UnlistedWithdrawalEnds => sim(Withdrawals, 5_000),
        // No address is assigned from a range whose withdrawal is requested, whether the range is already withdrawn or
        // not. So this mutation does harm only if the API server is restored between the report and the record.
        WithdrawalReportedBeforeStored => {
            unit("agent::status::tests::a_range_is_reported_as_withdrawn_once_it_is_stored")
        }
        ClaimPlacedBeforeStored => unit(
            "controller::claim::tests::the_node_of_the_pod_gets_the_address_once_the_status_records_it",
        ),
        ClaimPlacedBeforeFinalizer => unit(
            "controller::claim::tests::a_claim_has_its_finalizer_before_a_node_has_its_address",
        ),
        ClaimMovedOnOneProof => sim(Claims, 2_000),
        ClaimsNotInLedger => sim(Claims, 2_000),
        ClaimDeletedInUse => sim(Claims, 2_000),
        ReplacedAddressesFreedEarly => unit(
            "controller::claim::tests::the_old_addresses_of_a_claim_are_not_free_before_its_status_has_the_new_ones",
        ),
        DeletedClaimPlaced => {
            unit("controller::claim::tests::a_deleted_claim_that_no_node_has_gets_no_node_any_more")
        }
        OpenRoutesIgnored => unit(
            "controller::routes::tests::a_range_is_routed_while_a_write_that_lists_it_has_no_known_outcome",
        ),
        ClaimServesEveryPod => sim(AskingPods, 2_000),
        ClaimServesEveryVmi => duplicate(Migrations, 2_000),
        StandbyForEveryVmi => unit(
            "controller::claim::tests::migration::a_pod_of_another_virtual_machine_makes_no_node_a_standby",
        ),
        StandbyListedBeforeStored => sim(Migrations, 2_000),
        StandbyForgotten => unit(
            "controller::claim::tests::migration::the_block_goes_on_with_the_standby_when_its_owner_has_released_it",
        ),
        StandbyDroppedUnreleased => sim(Migrations, 2_000),
        StandbyNumberReused => sim(Migrations, 2_000),
        IpamClaimFilledBeforeStored => sim(Migrations, 3_000),
        InterfaceClaimIgnored => sim(Migrations, 1_000),
        ClaimedBeforeWithdrawn => sim(Claims, 30_000),
        ClaimedBeforeRecorded => unit(
            "controller::withdrawals::tests::an_address_is_handed_over_to_a_claim_by_three_versions_of_the_node_subnet",
        ),
        WithdrawnAddressAssignedOnRequest => sim(AskingPods, 20_000),
        NetworkRangeIgnored => unit("node::limits::tests::only_allowed_addresses_pass"),
        MismatchedPoolServes => {
            unit("node::limits::tests::a_pool_has_to_reserve_what_the_network_does_not_allow")
        }
        ClaimOfGonePodKept => sim(AskingPods, 2_000),
        RequestOfAnyNodeBelieved => unit(
            "controller::cluster::address_requests::tests::a_node_can_request_addresses_for_its_own_pods_only",
        ),
        RequestForAnyNameBelieved => unit(
            "controller::cluster::address_requests::tests::a_request_counts_only_under_the_name_of_its_pod",
        ),
        RequestNotReported => unit(
            "agent::service::adding::tests::an_address_that_cni_requests_and_the_node_lacks_is_reported_while_the_add_waits",
        ),
        ReturnTakenBack => sim(Withdrawals, 10_000),
        // As long as a borrowed block or a block of a claim exists, the controller withdraws its range. So this
        // mutation does harm only after a restore that has lost the block.
        ReturnedInUse => unit(
            "controller::withdrawals::tests::a_withdrawn_range_is_not_returned_while_anybody_may_use_it",
        ),
        LentBeforeWithdrawn => sim(Lending, 2_000),
        LentBeforeRecorded => sim(Lending, 2_000),
        ReturnEndsEarly => unit(
            "controller::withdrawals::tests::what_is_returned_stays_returned_although_the_node_uses_it_by_now",
        ),
        LentReturnedInUse => sim(Lending, 2_000),
        LentForgottenWithParent => sim(Lending, 2_000),
        StickyClaimOfBarePod => {
            unit("api::pod_claim::tests::a_pod_without_stateful_set_uses_no_claim_by_being_sticky")
        }
        StickyClaimNotOwned => unit(
            "controller::pod_claims::tests::a_bound_pod_gets_a_claim_of_its_name_that_its_stateful_set_owns",
        ),
        ClaimExpiresInUse => unit(
            "controller::claim::retention::tests::a_claim_in_use_stays_however_old_its_last_release_is",
        ),
        DemandNotReported => unit(
            "agent::service::adding::tests::an_add_asks_for_a_block_of_its_best_pool_and_when_half_its_time_is_over_of_all",
        ),
    }
}

/// Reads `found_by_deviations.txt`. Each line has a mutation, the first word of the name of a script that finds it, and
/// the deviation of the run; nothing if the run has none.
pub fn entries(text: &str) -> impl Iterator<Item = [&str; 3]> {
    text.lines()
        .map(|line| line.split(' ').collect::<Vec<_>>().try_into().unwrap())
}

/// Returns the first word of the name of a script that finds the mutation without or with one deviation.
fn script(mutation: Mutation) -> Option<&'static str> {
    let name = format!("{mutation:?}");
    let mut found = entries(include_str!("found_by_deviations.txt"));
    Some(found.find(|it| it[0] == name)?[1])
}

/// The line about a mutation in docs/mutations.md and in the output of `make mutants`. The line says what the mutation
/// does, and which check or test finds it.
pub fn row(mutation: Mutation) -> String {
    let sentence = mutation.sentence();
    let found = match proof(mutation) {
        Proof::Simulation(scenario, thousands, rule) => {
            let rule = rule.map(|rule| format!(", by the rule of {rule}"));
            let rule = rule.unwrap_or_default();
            let script = script(mutation).map(|name| format!("; script *{name}*"));
            let script = script.unwrap_or_default();
            format!("simulation, {scenario:?}, within {thousands} thousand steps{rule}{script}")
        }
        Proof::Test(name) => format!("`{name}`"),
    };
    format!("| `{mutation:?}` | {sentence} | {found} |")
}
