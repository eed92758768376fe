//! Mutations are deliberate bugs. The tests must find each mutation, which proves that the tests would also find the
//! same bug made by mistake.
//!
//! Each bug is a short expression `Mutation::X.is_on()` at one place of the code. In release builds the expression is
//! the constant `false`, so the compiler removes the bug. In builds with debug assertions, which tests use, a bug is
//! enabled for a thread (`set`) or for a whole process ([`VARIABLE`]). Mutations are not Cargo features, because with a
//! feature the crate would be built twice.
//!
//! `docs/mutations.md` lists which test finds which bug, and a test keeps the page up to date; `make mutants` tries all
//! mutations. A new rule needs a new mutation: a name in this file, the expression in the code of the rule, and a line
//! in `tests/sim/proofs.rs`.

/// The environment variable whose value is the name of a mutation. The mutation is enabled in all threads of the
/// process.
pub const VARIABLE: &str = "CADASTRE_MUTATION";

macro_rules! mutations {
    ($($(#[doc = $sentence:literal])+ $name:ident,)*) => {
        /// One deliberate bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Mutation {
            $($(#[doc = $sentence])+ $name,)*
        }

        impl Mutation {
            /// All bugs, in the order in which they are declared.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Describes the bug in one English sentence.
            pub fn sentence(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($sentence),+).trim_ascii(),)*
                }
            }
        }
    };
}

mutations! {
    // Mutations of the code for podCIDRs
    /// An allocation of podCIDRs with an indeterminate outcome counts as failed, so its ranges are free at once.
    IndeterminateAllocationFreed,
    /// Addresses of mirror pods are trusted like addresses of other pods.
    MirrorPodsBelieved,
    /// Ranges are allocated without a check for pod and node addresses in them.
    UsedAddressesNotAvoided,
    /// Nodes get podCIDRs from a pool although a better pool is about to serve them.
    BetterPoolNotAwaited,
    /// Nodes waiting for podCIDRs are not reconsidered when space becomes free.
    PodCidrWaitersNotWoken,
    /// Ranges that a pool assigns to certain nodes are allocated to any node.
    AssignedRangesNotKept,
    /// A node to which a pool assigns ranges gets other ranges while these are not free.
    OtherRangesThanAssigned,
    /// A node gets the ranges that are assigned to it although another node holds them.
    TakenAlthoughHeld,
    /// A machine gets its ranges back although they are assigned to another node.
    AssignedRangesReturned,
    /// A node that waits for its assigned ranges is not reconsidered when they become free.
    AssignedNodeNotWoken,
    /// With FitMaxPods, the range of a node has the pool's block size.
    MaxPodsIgnored,
    /// With FitMaxPods, a node gets a range before its number of pods is known.
    MaxPodsNotAwaited,
    /// A machine gets its ranges back although another node holds some of them.
    ReturnedRangesShared,
    /// A range stays held for a node although the node has other podCIDRs by now.
    ImpossibleHoldingKept,
    /// A node loses its holding if a lookup wrongly finds that the node was deleted.
    RevivedNodeLosesHolding,
    /// Pairs of nodes whose ranges overlap are not reported.
    OverlapsNotReported,
    /// A pool keeps allocating although a foreign allocator writes podCIDRs in its ranges.
    ForeignAllocatorIgnored,
    /// When a pool is deleted, its ranges count as covered by another pool, although that other pool's finalizer is
    /// being removed.
    PoolThatGoesKeepsRanges,
    /// A podCIDR takes space from pools even if it is wider than any range that could have been allocated to a node.
    WidePodCidrCounts,
    /// The agent may assign from a podCIDR although another node uses addresses in it.
    ContestedPodCidrAllocated,

    // Mutations of leader election
    /// Every takeover counts as a clean handover.
    TakeOverCountsAsClean,
    /// A new leader lists no objects after a clean handover.
    HandOverNotListed,
    /// A new leader skips the list although its watches have not reached the versions that the Lease records.
    CacheBehindTrusted,
    /// A new leader trusts watch events from before the API server became unreachable.
    UnansweredTimeForgotten,
    /// A leader hands over the Lease without the mark for unsettled writes, although the outcome of an allocation is
    /// indeterminate.
    HandOverWhileIndeterminate,
    /// A takeover does not touch nodes that are being deleted.
    DeletingNodesNotTouched,
    /// A rejected touch counts as successful.
    RejectedTouchCounts,
    /// An allocation is sent before the Lease names it.
    AllocatedBeforeNamed,
    /// The Lease stops naming an allocation although the outcome of the allocation is indeterminate.
    NameRemovedWhileIndeterminate,
    /// A Lease write with an indeterminate outcome counts as successful for the requests that wait for it.
    IndeterminateLeaseWriteCounts,
    /// A new leader ignores one of the allocations that the Lease names.
    OneNamedNodeIgnored,
    /// A leader sends a write without waiting for a Lease write that began after the leader decided on the write.
    LeaseNotAwaited,
    /// Allocations that keep failing take up the space of other allocations in the Lease.
    FailingNamesTakeRoom,
    /// A leader whose lease has expired still decides.
    ExpiredLeaderDecides,
    /// A renewal of the Lease that failed with a conflict counts as successful.
    RenewalConflictIgnored,
    /// A renewal of the Lease counts from the arrival of its response instead of from the start of its request.
    RenewalCountsFromAnswer,
    /// A term counts from the last attempt to acquire the Lease instead of from the first attempt.
    TermCountsFromLastTry,
    /// A Lease whose holder a user has cleared by hand counts as released by its holder.
    ClearedHolderCountsAsReleased,
    /// A candidate trusts a watch event although the candidate has seen a newer version of the Lease.
    OldNewsCounts,
    /// A Lease that is known only from a watch is acquired without a read once it seems to have expired.
    SilentWatchTrusted,
    /// A leader that writes a shorter lease duration still counts on the longer one.
    LongerLeaseCountsOn,

    // Mutations of the code for deleted nodes
    /// The ranges of a deleted node are free at once.
    NoQuarantine,
    /// A node that is being deleted counts as gone.
    DeletingNodeCountsAsGone,
    /// A new leader does not quarantine the ranges of nodes that were deleted while nobody led.
    UnseenDeletionNotQuarantined,
    /// A new leader forgets the deletion of a Node that it saw before it led, if no NodeSubnet records this deletion.
    UnrecordedDeathForgotten,
    /// The recorded end of a quarantine is used even if it is later than the pool's `quarantineSeconds` allow.
    RecordedQuarantineNotBounded,
    /// A deleted node's ranges are quarantined for the shortest of the quarantine times of their pools.
    ShortestQuarantineCounts,
    /// Ranges of deleted nodes are freed without a check for pods with addresses in the ranges.
    PodsNotLookedAt,
    /// Ranges of deleted nodes are freed without a check of the index of all pods.
    PodIndexNotLookedAt,
    /// Ranges of deleted nodes are freed even if the last list of the node's pods shows an address in them.
    BoundPodsNotLookedAt,
    /// The last list of a deleted node's pods may be older than the end of the quarantine.
    EarlierPodListCounts,
    /// Ranges of deleted nodes are freed while a NodeSubnet still names the deleted node.
    FreedWhileNamed,
    /// A range that a live node got back is still quarantined for an earlier node with the same name.
    ReturnedRangeStillQuarantined,

    // Mutations of the code for blocks
    /// A block counts as confirmed once the response to its creation arrives, even if the watch has not reported the
    /// block yet.
    BlockConfirmedByAnswer,
    /// A new block does not yield to a podCIDR that is older than the block.
    BlockDoesNotYieldToPodCidr,
    /// The response to a request for an earlier block counts for the next block of the same CIDR.
    AnswerToEarlierBlockCounts,
    /// The leader decides which of two overlapping blocks came first while a list is still running.
    BlocksJudgedDuringList,
    /// An IPAMBlock that was edited does not count as older than the IPAMBlocks that were never edited.
    EditedBlockKeepsItsAge,
    /// A new leader does not read which blocks are listed in NodeSubnets.
    ListedBlocksNotRead,
    /// A new leader ignores blocks that an earlier leader adds to a NodeSubnet in a late write.
    LateListIgnored,
    /// The holding of a block is kept although its node was deleted before the creation of the block was requested.
    DroppedBlockKeepsItsHolding,
    /// A block that its agent released is deleted while its NodeSubnet still lists it.
    BlockEndsWhileListed,
    /// Blocks of deleted nodes are freed without a check for pods with addresses in the blocks.
    PodsOfBlockNotLookedAt,
    /// A quarantined block's quarantine counts as over although its IPAMBlock records a later end.
    RecordedBlockQuarantineIgnored,
    /// A block that an agent uses, but that the API server has lost, is not adopted.
    ForgottenBlockNotAdopted,
    /// A block that an agent uses is adopted although another node holds it.
    HeldBlockAdopted,
    /// After a gap, the new leader allocates blocks before agents have reported.
    AgentGraceSkipped,
    /// Unconfirmed blocks do not count as blocks of their node.
    ProvisionalBlocksNotCounted,
    /// Blocks that a node has released still count as blocks of the node.
    ReleasedBlocksCounted,
    /// The last block that a node has of a pool is recalled like any other, even if it was in use a moment ago.
    LastBlockRecalled,
    /// Nodes waiting for blocks are not reconsidered when space becomes free.
    BlockWaitersNotWoken,

    // Mutations of the code for pools, addresses and NodeSubnets
    /// A pool's finalizer is removed while ranges of the pool are quarantined.
    FinalizerRemovedDuringQuarantine,
    /// Reserved addresses, service ranges and node addresses are not excluded from allocation.
    ReservedNotLeftOut,
    /// A range of a pool does not count as overlapping a wider range of an older pool.
    WiderOlderPoolIgnored,
    /// The free space of a pool of both families is compared with that of pools of one family.
    RoomComparedAcrossFamilies,
    /// An unknown pod gets an address from a pool that does not say unknownPods: Serve.
    UnknownPodsServed,
    /// An address that a pod reports becomes a leak candidate.
    ReportedAddressSuspected,
    /// An empty NodeSubnet of a live node is deleted.
    EmptySubnetDeleted,
    /// Conditions that other programs wrote to a NodeSubnet are overwritten.
    OthersConditionsWiped,
    /// A new leader reports that the API server accepts the writes for a node, although none of the new leader's writes
    /// for this node has been answered.
    RejectionsOfPredecessorForgotten,
    /// A lost store is rebuilt without the node's published list of addresses.
    AddressListIgnored,
    /// Addresses that only the agent has recorded are published only at the end of an interval, not at once.
    UnknownAddressesListedLate,
    /// The block directly below the lower end of a CIDR can be allocated.
    CarvesBelowCidr,
    /// The range of the first family stays allocated when the second family is exhausted.
    FirstFamilyStaysHeld,

    /// A node stays marked as exhausted for ever.
    ExhaustionNotLifted,
    /// The NodeRoutes of a node are never changed or deleted.
    RoutesNotWithdrawn,
    /// A block is deleted although the NodeRoutes of its node still lists it.
    RoutedBlockFreed,
    /// The FRRConfiguration of a node is never changed or deleted.
    FrrNotWithdrawn,
    /// A block is deleted although the FRRConfiguration of its node still lists it.
    FrrBlockFreed,
    /// A node that lacks only addresses for pods that it does not run yet counts as one whose pods wait.
    MinimumCountsAsPods,
    /// Other taints of a node are lost when the node is marked as exhausted.
    OthersTaintsDropped,
    /// A node counts as exhausted although a pool can allocate a further range to it.
    GrowthIgnored,
    /// Pods that are bound to a node and have no address yet do not count for the exhaustion of the node.
    BoundPodsNotCounted,

    // Mutations of the cache of objects
    /// An older watch event restores an object although a response has shown that the object is gone.
    GoneByAnswerComesBack,
    /// A watch event that is older than a list restores an object that was missing in the list.
    GoneByListComesBack,
    /// After a relist, the cache uses the response to a request that was sent before the relist.
    AnswerBeforeRelistTaken,
    /// A response restores an object whose deletion the watch has reported.
    GoneByWatchComesBack,

    // Mutations of requests
    /// An allocation is written without a test of the node's UID.
    UidNotTested,
    /// An allocation is written without a test of the leader's term.
    TermNotTested,
    /// A write that got a server error counts as rejected, although it may have taken effect.
    ServerErrorCountsAsRejection,
    /// A write that timed out counts as rejected, although it may have taken effect.
    TimeoutCountsAsRejection,
    /// A write is sent without a check that this process still leads.
    GateNotAsked,

    // Mutations of the agent, and of the API server of the simulation
    /// A touch is visible, but allocations that were decided before the touch still succeed.
    TouchWithoutEffect,
    /// An agent releases blocks that are in use.
    BlocksReleasedInUse,
    /// A DEL releases the addresses of other containers of the same pod.
    DeleteFreesWholePod,
    /// The addresses of a pod are released as soon as the API server does not have the pod any more.
    OneProofIsEnough,
    /// New addresses are assigned from a draining block.
    DrainingBlocksAssign,
    /// New addresses are assigned from a block that the NodeSubnet no longer lists.
    UnlistedBlocksAssign,
    /// A block is reported as released as soon as none of its addresses are in use, before the store has recorded the
    /// release.
    ReleaseReportedBeforeStored,
    /// A block is reported as released while the routing daemon of its node may still announce it.
    ReleasedWhileAnnounced,
    /// A new leader deletes blocks before it has listed the NodeRoutes of earlier leaders.
    EarlierRoutesNotListed,
    /// The plugin gets its response before the store has written the result.
    AnsweredBeforeStored,
    /// An operation is answered as done although the disk has rejected its writes.
    FailedWriteIgnored,
    /// A released address is assigned before its cooldown is over.
    CooldownIgnored,
    /// After a reboot, addresses that were in use until then are assigned at once.
    RebootEndsCooldown,
    /// A change of the node's ranges is reported before it is on the disk.
    RangesRecordedLate,
    /// While the node's new ranges cannot be recorded, blocks that the node has lost still assign addresses.
    LostBlocksAssign,
    /// A store that was lost while pods run is made anew as if the node had rebooted, which ends all pods.
    LostStoreTakenForReboot,
    /// An address is assigned without a probe, although its pool requires a probe.
    ProbeSkipped,
    /// An address that another host uses is assigned.
    ConflictAssigned,
    /// The probe of an address counts although the address has been used since the probe.
    ProbeOutlivesUse,
    /// A block is released while some of its addresses are cooling.
    CoolingBlocksReleased,
    /// After a restore of the API server to an older state, a NodeSubnet lists a released block again, and the agent
    /// uses the block.
    ReleasedBlocksForgotten,
    /// A new store that replaces a lost one does not know which blocks the node has released.
    LostReleaseForgotten,
    /// A lost store is rebuilt without the sandboxes that the runtime knows.
    SandboxesIgnored,
    /// A new store does not record that pods use addresses outside of the node's ranges.
    AddressesOutsideForgotten,
    /// A lost store is rebuilt before the API server has reported the node's objects.
    NewStoreAtOnce,
    /// Addresses that are proven to be leaked are not released.
    LeaksNotFreed,
    /// An ADD that finds no address waits, but the agent does not ask for a block.
    DemandNotReported,
    /// Addresses of a withdrawn range are assigned like any other addresses.
    WithdrawnAssigned,
    /// A range is withdrawn although addresses of it are in use.
    WithdrawnInUse,
    /// A range is reported as withdrawn before the store has recorded the withdrawal.
    WithdrawalReportedBeforeStored,
    /// A withdrawal ends as soon as the NodeSubnet no longer lists it.
    UnlistedWithdrawalEnds,
    /// The address of a claim becomes a block of a node before the claim's status records the address.
    ClaimPlacedBeforeStored,
    /// The address of a claim becomes a block of a node before the claim has its finalizer.
    ClaimPlacedBeforeFinalizer,
    /// The block of a claim is deleted as soon as the API shows no pod of the claim on the node, although the agent has
    /// not released the block.
    ClaimMovedOnOneProof,
    /// The addresses of claims count as free in the ledger.
    ClaimsNotInLedger,
    /// A deleted claim loses its finalizer while a node has its address.
    ClaimDeletedInUse,
    /// If a claim gets other addresses, the old ones are free before its status has the new ones.
    ReplacedAddressesFreedEarly,
    /// A deleted claim gets a node although a write that removes its finalizer may be under way.
    DeletedClaimPlaced,
    /// Blocks are deleted although a write of routes that may list them has no known outcome.
    OpenRoutesIgnored,
    /// The address of a claim is assigned to every pod that asks for it.
    ClaimServesEveryPod,
    /// The address of a claim that one virtual machine uses is assigned to the pods of every virtual machine.
    ClaimServesEveryVmi,
    /// Any pod of the claim on another node makes this node a standby, whichever virtual machine the pod belongs to.
    StandbyForEveryVmi,
    /// The NodeSubnet of a standby lists the block before the block's object names the standby.
    StandbyListedBeforeStored,
    /// The block of a claim ends when its owner releases it, although the block has standbys.
    StandbyForgotten,
    /// A standby is dropped although its agent has not released the block.
    StandbyDroppedUnreleased,
    /// A node that becomes a standby for the second time gets the number that it had the first time.
    StandbyNumberReused,
    /// An IPAMClaim gets addresses before the status of its IPClaim records them.
    IpamClaimFilledBeforeStored,
    /// An interface for which the pod names an IPAMClaim gets any address of the network's pool.
    InterfaceClaimIgnored,
    /// The address of a claim is taken from the block of a node before the agent of this node has withdrawn the
    /// address.
    ClaimedBeforeWithdrawn,
    /// The address of a claim is taken from the block of a node before the NodeSubnet records the claim.
    ClaimedBeforeRecorded,
    /// The controller withdraws a returned range again before the agent has seen the return.
    ReturnTakenBack,
    /// A withdrawn address of a block is assigned to a pod that asks for it.
    WithdrawnAddressAssignedOnRequest,
    /// A network with a range of its own gets an address that this range does not allow.
    NetworkRangeIgnored,
    /// A pool serves a network although it has addresses that the network's range does not allow.
    MismatchedPoolServes,
    /// A withdrawn range is returned to its node while another node uses it.
    ReturnedInUse,
    /// The return of a range ends before the agent has reported that it has seen the return, because an address of the
    /// range is in use.
    ReturnEndsEarly,
    /// A part of a block is lent to another node before the agent of the lender has withdrawn the part.
    LentBeforeWithdrawn,
    /// A borrowed block is confirmed before the NodeSubnet of the lender names the block as lent.
    LentBeforeRecorded,
    /// A lent part is returned to its node as soon as the borrower is asked to release the part.
    LentReturnedInUse,
    /// When a block ends, parts of it that other nodes have borrowed count as free.
    LentForgottenWithParent,
    /// A pod that belongs to no StatefulSet gets a claim of its own if it has the annotation for sticky addresses.
    StickyClaimOfBarePod,
    /// The claim of a StatefulSet's pod is created without its StatefulSet as owner.
    StickyClaimNotOwned,
    /// The claim of a pod that asks for addresses stays when the pod is gone.
    ClaimOfGonePodKept,
    /// An agent can request addresses for pods of other nodes.
    RequestOfAnyNodeBelieved,
    /// An agent can request addresses for a pod under any namespace and name.
    RequestForAnyNameBelieved,
    /// An address that CNI requests in an ADD, and that lies in no range of the node, is not reported to the
    /// controller.
    RequestNotReported,
    /// When the time after the use of a claim is over, the claim is deleted even if a pod names it or a node has its
    /// addresses.
    ClaimExpiresInUse,
}

#[cfg(not(debug_assertions))]
impl Mutation {
    /// Whether this bug is enabled. Release builds contain no mutations, so the answer is always `false`.
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
        /// For each bug, whether its switch was read.
        static READ: [Cell<bool>; Mutation::ALL.len()] =
            const { [const { Cell::new(false) }; Mutation::ALL.len()] };
    }

    impl Mutation {
        /// Whether this bug is enabled in the current thread.
        pub fn is_on(self) -> bool {
            READ.with(|read| read[self as usize].set(true));
            ON.get() == Some(self)
        }
    }

    /// Enables one bug in the current thread; `None` disables all bugs.
    pub fn set(mutation: Option<Mutation>) {
        ON.set(mutation);
    }

    /// Returns the bugs whose switches were read in the current thread since the last call. No other bug could have
    /// changed anything.
    pub fn take_read() -> Vec<Mutation> {
        let all = Mutation::ALL.iter().copied();
        READ.with(|read| all.filter(|it| read[*it as usize].take()).collect())
    }

    fn by_variable() -> Option<Mutation> {
        let name = std::env::var(VARIABLE).ok()?;
        let mut all = Mutation::ALL.iter().copied();
        all.find(|it| format!("{it:?}") == name)
    }
}

#[cfg(debug_assertions)]
pub use switch::{set, take_read};
