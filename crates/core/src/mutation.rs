//! Plausible bugs, made on purpose, to prove that the tests find them.
//!
//! Each is a short expression at one place of the product: `Mutation::X.is_on()`. In a release build, which is
//! all that is shipped, that is the constant `false` and nothing of it is left. In a build with debug
//! assertions, which tests run, a test switches one on for its thread (`set`), or for a process ([`VARIABLE`]).
//! It is no feature of cargo because the crate would have to be built once more for it.
//!
//! Which test finds which one: `docs/mutations.md`, held to this by a test; `make mutants` tries them all. Who
//! adds a rule adds its mutation: a name here, the expression in its place, a line in `tests/sim/proofs.rs`.

/// The variable of the environment that names the mutation which all threads of a process begin with.
pub const VARIABLE: &str = "CADASTRE_MUTATION";

macro_rules! mutations {
    ($($(#[doc = $sentence:literal])+ $name:ident,)*) => {
        /// One bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Mutation {
            $($(#[doc = $sentence])+ $name,)*
        }

        impl Mutation {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// What goes wrong, for people.
            pub fn sentence(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($sentence),+).trim_ascii(),)*
                }
            }
        }
    };
}

mutations! {
    // podCIDRs
    /// An assignment of unclear outcome counts as failed: its ranges are free at once.
    UnclearAssignmentFreed,
    /// What a kubelet says of its mirror pods counts like what is said of other pods.
    MirrorPodsBelieved,
    /// Ranges are dealt without a look for addresses of pods and nodes in them.
    UsedAddressesNotAvoided,
    /// Nodes get podCIDRs of a pool although a better one is about to serve.
    BetterPoolNotAwaited,
    /// Nodes that wait for podCIDRs are not looked at again when space comes.
    PodCidrWaitersNotWoken,
    /// A machine gets its ranges back although somebody else holds some of them.
    ReturnedRangesShared,
    /// A claim of a node stays although its podCIDRs are others by now.
    ImpossibleClaimKept,
    /// A node that a look-up took for gone, and that lives, loses its claim.
    RevivedNodeLosesClaim,
    /// Pairs of nodes with common addresses are not reported.
    OverlapsNotReported,
    /// A pool goes on although somebody else writes podCIDRs in its range.
    SecondWriterIgnored,
    /// A pool whose finalizer is on its way off counts as keeping the ranges of another that goes.
    PoolThatGoesKeepsRanges,
    /// A podCIDR counts against pools however wide it is.
    WidePodCidrCounts,
    /// A podCIDR of which another node has addresses is given to the agent to give from.
    ContestedPodCidrGiven,

    // Who leads
    /// Every take-over counts as a clean hand-over.
    TakeOverCountsAsClean,
    /// After a clean hand-over nothing is listed.
    HandOverNotListed,
    /// A new leader needs no list, however far its watches are behind what the Lease says was seen.
    CacheBehindTrusted,
    /// A new leader trusts what its watches told before the API server could not be reached.
    UnansweredTimeForgotten,
    /// A Lease is handed over as settled while an assignment is of unclear outcome.
    HandOverWhileUnclear,
    /// A take-over does not touch nodes that are being deleted.
    DeletingNodesNotTouched,
    /// A touch that was refused counts as done.
    RefusedTouchCounts,
    /// An assignment is sent although the Lease does not name it yet.
    AssignedBeforeNamed,
    /// An assignment is named no longer although its outcome is unclear.
    NameTakenOffWhileUnclear,
    /// A write of the Lease of unclear outcome counts for those who wait for it.
    UnclearLeaseWriteCounts,
    /// A new leader ignores one of the assignments that the Lease names.
    OneNamedNodeIgnored,
    /// What a leader decides is sent without a write of the Lease in between.
    LeaseNotAwaited,
    /// Assignments that keep failing take the room of others in the Lease.
    FailingNamesTakeRoom,
    /// A leader whose lease has run out still decides.
    ExpiredLeaderDecides,
    /// A renewal that met a conflict counts as done.
    RenewalConflictIgnored,
    /// A renewal counts from its answer, not from its start.
    RenewalCountsFromAnswer,
    /// A tenure counts from the last try to acquire the Lease, not from the first.
    TenureCountsFromLastTry,
    /// A holder that was cleared by hand counts as one that released the Lease.
    ClearedHolderCountsAsReleased,
    /// A candidate goes by what a watch shows although it has seen newer.
    OldNewsCounts,
    /// A Lease that a watch has shown, and no more, is sought without a look when it seems to have run out.
    SilentWatchTrusted,

    // Dead nodes
    /// The ranges of a dead node are free at once.
    NoQuarantine,
    /// A node that is being deleted counts as gone.
    DeletingNodeCountsAsGone,
    /// A new leader does not see that a node died while nobody led.
    UnseenDeathLeavesNoRest,
    /// A new leader forgets what it saw go before it led, where no NodeSubnet tells of it.
    UnrecordedDeathForgotten,
    /// A recorded end of a quarantine counts however far away it is.
    RecordedRestNotBounded,
    /// A dead node's ranges rest for the shortest of their pools' quarantines.
    ShortestQuarantineCounts,
    /// Ranges of dead nodes are freed without a look at pods.
    PodsNotLookedAt,
    /// Ranges of dead nodes are freed without a look at the index of all pods.
    PodIndexNotLookedAt,
    /// Ranges of dead nodes are freed whatever a consistent look at the node's pods shows.
    BoundPodsNotLookedAt,
    /// Ranges of dead nodes are freed while a NodeSubnet still names the dead node.
    FreedWhileNamed,
    /// What a live node has again still rests from an earlier node of its name.
    ReturnedRangeStillRests,

    // Blocks
    /// A block counts as its node's by the answer to its creation, not by the watch.
    BlockConfirmedByAnswer,
    /// A new block does not yield to a podCIDR that was there before.
    BlockDoesNotYieldToPodCidr,
    /// The answer to what an earlier block of a CIDR asked for counts for the next one.
    AnswerToEarlierBlockCounts,
    /// Which of two blocks was first is judged while a list runs.
    BlocksJudgedDuringList,
    /// An object that was edited counts as old as when it was made.
    EditedBlockKeepsItsAge,
    /// A new leader does not read which blocks NodeSubnets list.
    ListedBlocksNotRead,
    /// What a late write of an earlier leader lists is not taken in.
    LateListIgnored,
    /// The claim of a block that was carved for a node that died since is kept.
    DroppedBlockKeepsItsClaim,
    /// A block that its agent has let go of ends while its NodeSubnet still lists it.
    BlockEndsWhileListed,
    /// Blocks of dead nodes are freed without a look at pods.
    PodsOfBlockNotLookedAt,
    /// The end of a block's quarantine that its object tells counts as reached.
    RecordedRestOfBlockIgnored,
    /// What an agent uses and the API has lost is not taken up.
    ForgottenBlockNotTakenUp,
    /// What an agent uses is taken up although somebody else has a claim to it.
    ClaimedBlockTakenUp,
    /// A leader that follows a gap does not wait for what agents say.
    AgentsNotListenedTo,
    /// Blocks that are not confirmed do not count as what a node has.
    ProvisionalBlocksNotCounted,
    /// Blocks that a node has let go of still count as what it has.
    ReleasedBlocksCounted,
    /// A node gives its last block of a pool away like any other, however briefly it has been unused.
    LastBlockAskedBack,
    /// Nodes that wait for blocks are not looked at again when space comes.
    BlockWaitersNotWoken,

    // Pools, addresses, NodeSubnets
    /// A pool's finalizer goes while ranges of it rest.
    FinalizerGoesWhileRangesRest,
    /// Reserved addresses, service ranges and node addresses are not left out.
    ReservedNotLeftOut,
    /// An older pool's wider range does not count as an overlap.
    WiderOlderPoolIgnored,
    /// The room of a pool of both families is compared with that of pools of one.
    RoomComparedAcrossFamilies,
    /// A pod of which nothing is known gets an address, also of a pool that does not say unknownPods: Serve.
    UnknownPodsServed,
    /// An address that a pod reports is suspected to be leaked.
    ReportedAddressSuspected,
    /// The NodeSubnet of a live node is deleted when it says nothing.
    EmptySubnetDeleted,
    /// What others say by conditions of a NodeSubnet is written over.
    OthersConditionsWiped,
    /// That the API server refuses what is written for a node is taken back by whoever leads next.
    RefusalsOfPredecessorForgotten,
    /// A store that was lost is made anew without the node's list of addresses.
    AddressListIgnored,
    /// Addresses that nobody but the agent knows of wait for the interval of the list.
    UnknownAddressesListedLate,
    /// The block below the lower end of a CIDR may be carved.
    CarvesBelowCidr,
    /// The first family stays claimed when the second one is full.
    FirstFamilyStaysClaimed,

    // What is known of objects
    /// Older news brings back what an answer has shown to be gone.
    GoneByAnswerComesBack,
    /// Older news brings back what a list of ours lacked.
    GoneByListComesBack,
    /// An answer to a request from before a relist is taken in.
    AnswerBeforeRelistTaken,
    /// An answer brings back what the watch has seen go.
    GoneByWatchComesBack,

    // Requests
    /// An assignment does not test the node's UID.
    UidNotTested,
    /// An assignment does not test the term.
    TermNotTested,
    /// An error of the API server counts as a refusal.
    ServerErrorCountsAsRefusal,
    /// A time-out of a request counts as a refusal.
    TimeoutCountsAsRefusal,
    /// A write is sent without a look at the lease.
    GateNotAsked,

    // What the simulation plays: the API server and agents
    /// A touch shows, but assignments that were decided before pass it.
    TouchWithoutEffect,
    /// An agent lets go of blocks that are in use.
    BlocksReleasedInUse,
    /// A DEL frees what other containers of the same pod have.
    DeleteFreesWholePod,
    /// That the API server has no pod is proof enough to free its addresses.
    OneProofIsEnough,
    /// A block that is to be emptied gives new addresses.
    DrainingBlocksGive,
    /// A block that is listed no more gives new addresses.
    WithdrawnBlocksGive,
    /// A block is told as released as soon as nothing of it is in use.
    ReleaseToldBeforeStored,
    /// A plugin is answered before the store has it.
    AnsweredBeforeStored,
    /// A released address is given before it has cooled.
    CooldownIgnored,
    /// A block is released while addresses of it cool.
    CoolingBlocksReleased,
    /// What was released and is listed again gives again, though the API server was put back.
    ReleasedBlocksForgotten,
    /// A store that was lost is made anew without what the runtime knows.
    SandboxesIgnored,
    /// A store that was lost is made anew before the API server has told of anything.
    NewStoreAtOnce,
    /// Leaked addresses that are proven to be nobody's are not freed.
    LeaksNotFreed,
    /// An ADD that finds nothing waits, and the agent asks for no block.
    WishesNotTold,
}

#[cfg(not(debug_assertions))]
impl Mutation {
    /// Never.
    pub const fn is_on(self) -> bool {
        false
    }
}

#[cfg(debug_assertions)]
mod switch {
    use std::cell::Cell;

    use super::{Mutation, VARIABLE};

    thread_local! {
        static ON: Cell<Option<Mutation>> = Cell::new(by_variable());
    }

    impl Mutation {
        /// Whether this thread runs with that bug.
        pub fn is_on(self) -> bool {
            ON.get() == Some(self)
        }
    }

    /// Switches a bug on for this thread, or none.
    pub fn set(mutation: Option<Mutation>) {
        ON.set(mutation);
    }

    fn by_variable() -> Option<Mutation> {
        let name = std::env::var(VARIABLE).ok()?;
        let mut all = Mutation::ALL.iter().copied();
        all.find(|it| format!("{it:?}") == name)
    }
}

#[cfg(debug_assertions)]
pub use switch::set;
