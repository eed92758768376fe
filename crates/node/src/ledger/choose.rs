//! Selects addresses for an ADD: the next free address of a pool, or the addresses that the ADD asks for.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::ops::{Add, AssignedAddress, OpError, OpErrorKind};
use super::super::storage_fault::StorageFault;
use super::Stop;
use super::claims;
use super::decide::{is_excluded, no_block, pool_text, unknown_pod};
use super::holdings::rest_left;
use super::kv::{Kv, KvTable};
use super::probes::{self, MOST_PROBES, ProbeState};
use super::record::{AddressRecord, BlockRecord, BlockState, BootTime, Cursor};
use super::tables::Read;
use super::withdrawals;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{PoolTerms, claim_of_pool, is_claim};
use cadastre_core::usable::{Usable, above, covering, union};
use cadastre_core::{Addr, Cidr, Family, IpRange};

/// An address that was selected but is not assigned yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressChoice {
    pub given: AssignedAddress,
    pub source: AddressSource,
}

/// Where a selected address was found, which determines what has to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressSource {
    /// The address has never been assigned. The next search in the block continues at this cursor
    New(Cursor),
    /// The address was in use earlier, and was released
    Freed { block: Cidr, sequence: u64 },
    /// The address has never been assigned, and the ADD asks for exactly this address
    Requested,
}

/// The state of a search for the addresses of an ADD.
pub(crate) struct Search<'a> {
    pub now: BootTime,
    /// The parent interface of the ADD's network ([`Add::parent`])
    pub parent: &'a str,
    /// How long a probe that nobody answered stays valid
    pub clean_for: Duration,
    /// Whether the search assigns nothing, and only collects addresses to probe
    pub is_probing_ahead: bool,
    /// Addresses that could be assigned if they were probed, in the order in which they are assigned
    pub to_probe: Vec<Addr>,
    /// Free addresses that the search has skipped because another host uses them
    pub in_conflict: BTreeSet<Addr>,
    /// Maximum number of addresses in `to_probe`
    pub most: usize,
    /// Blocks without an unused address, each with the name of its pool
    pub spent: Vec<(String, Cidr)>,
}

impl<'a> Search<'a> {
    pub(crate) fn new(parent: &'a str, now: BootTime) -> Self {
        Self {
            now,
            parent,
            clean_for: probes::CLEAN_FOR,
            is_probing_ahead: false,
            to_probe: Vec::new(),
            in_conflict: BTreeSet::new(),
            most: MOST_PROBES,
            spent: Vec::new(),
        }
    }

    /// Returns whether a free address may be assigned without a further probe. If a probe is missing, the address is
    /// added to `to_probe`.
    fn may_assign(
        &mut self,
        kv: &dyn Kv,
        pool: &PoolTerms,
        addr: Addr,
    ) -> Result<bool, StorageFault> {
        if !pool.probes_conflicts {
            return Ok(true);
        }
        let state = self.state(kv, addr)?;
        if state == ProbeState::Unprobed && !self.is_full() && !self.to_probe.contains(&addr) {
            self.to_probe.push(addr);
        }
        if matches!(state, ProbeState::Conflict(_)) {
            self.in_conflict.insert(addr);
        }
        Ok(state == ProbeState::Clean && !self.is_probing_ahead)
    }

    fn state(&self, kv: &dyn Kv, addr: Addr) -> Result<ProbeState, StorageFault> {
        probes::state(kv, addr, self.parent, self.now, self.clean_for)
    }

    /// Returns whether `to_probe` contains as many addresses as can be probed at once.
    fn is_full(&self) -> bool {
        self.to_probe.len() >= self.most
    }
}

pub(crate) fn cooldown_ms(pool: &PoolTerms) -> u64 {
    u64::from(pool.cooldown_seconds) * 1000
}

/// Returns the settings of a pool. If the store has none for this pool, returns the default settings.
pub(crate) fn terms(kv: &dyn Kv, pool: &str) -> Result<PoolTerms, StorageFault> {
    Ok(kv.pool(pool)?.unwrap_or_else(|| PoolTerms::named(pool)))
}

/// Selects the next address of a pool and family. On failure, the text of the error is a clause, which the caller puts
/// into a sentence. Blocks that have no unused address left are added to `search.spent`. These blocks are not searched
/// again before one of their addresses is released.
pub(crate) fn next(
    kv: &dyn Kv,
    pool: &PoolTerms,
    family: Family,
    search: &mut Search<'_>,
) -> Result<AddressChoice, Stop> {
    let mut soonest = rest_left(kv, search.now, cooldown_ms(pool))?;
    let rests = soonest.is_some() && !search.is_probing_ahead;
    let mut after = None;
    let probed_before = search.to_probe.len();
    search.most = probed_before + MOST_PROBES;
    let conflicts_before = search.in_conflict.len();
    while !rests && let Some(cidr) = kv.block_of(KvTable::Open, &pool.name, family, after)? {
        after = Some(cidr);
        let Some(block) = kv.block(cidr)? else {
            continue;
        };
        let usable = block.usable(cidr, Some(pool));
        let withheld = withdrawals::withheld(kv, cidr, &block.pool)?;
        let out = block.left_out(cidr, &[&usable.excluded[..], &withheld].concat());
        let (addr, source) = match unused(kv, cidr, &out, pool, search)? {
            Some((addr, cursor)) => (addr, AddressSource::New(cursor)),
            None => match cooled(kv, cidr, &out, pool, search)? {
                Cooled::Yes(addr, source) => (addr, source),
                Cooled::NotYet(left) => {
                    soonest = Some(soonest.map_or(left, |it| it.min(left)));
                    continue;
                }
                // The block may have unused addresses that wait for a probe or are in conflict. So the block must be
                // searched again.
                Cooled::NoneReleased if pool.probes_conflicts => continue,
                Cooled::NoneReleased => {
                    search.spent.push((pool.name.clone(), cidr));
                    continue;
                }
                Cooled::AllExcluded => continue,
            },
        };
        let given = describe(cidr, &pool.name, &usable, addr);
        return Ok(AddressChoice { given, source });
    }
    if search.to_probe.len() > probed_before {
        let pool = pool_text(&pool.name);
        return Err(probes::unprobed(&format!(
            "{pool} has free {family} addresses on this node, and they have to be probed before they are used"
        )));
    }
    if !kv.block_families(&pool.name)?.contains(&family) {
        return Err(no_block(Some(family), &pool.name).into());
    }
    let soon = soonest.map_or(String::new(), |ms| {
        format!(" (the next one has rested in {})", seconds(ms))
    });
    let conflicts = match search.in_conflict.len() - conflicts_before {
        0 => String::new(),
        count => format!(" ({count} in conflict: other hosts use them)"),
    };
    let pool = pool_text(&pool.name);
    Err(refuse(
        OpErrorKind::Exhausted,
        format!("{pool} has no free {family} address on this node{soon}{conflicts}"),
    ))
}

/// Searches a block, from its cursor on, for an address that was never assigned. Returns the address and the cursor for
/// the next search.
fn unused(
    kv: &dyn Kv,
    block: Cidr,
    out: &[IpRange],
    pool: &PoolTerms,
    search: &mut Search<'_>,
) -> Result<Option<(Addr, Cursor)>, StorageFault> {
    let mut cursor = kv.cursor(block)?;
    loop {
        let mut at = cursor.next;
        // The first address that is skipped because of its probe. The next search must find this address again.
        let mut passed = None;
        while let Some(addr) = at {
            if let Some(span) = covering(out, addr) {
                at = above(span.last(), block.last());
            } else if kv.address_from(addr)? == Some(addr) {
                at = above(addr, block.last());
            } else if search.may_assign(kv, pool, addr)? {
                cursor.next = passed.or_else(|| above(addr, block.last()));
                return Ok(Some((addr, cursor)));
            } else if search.is_full() {
                return Ok(None);
            } else {
                passed.get_or_insert(addr);
                at = above(addr, block.last());
            }
        }
        if !cursor.again {
            return Ok(None);
        }
        cursor = Cursor::first_of(block);
    }
}

/// Whether a block has a released address whose cooldown is over.
enum Cooled {
    Yes(Addr, AddressSource),
    /// The cooldown of the address that was released first ends in this many milliseconds
    NotYet(u64),
    /// Each released address of the block is now excluded from automatic assignment, or has to be probed before it can
    /// be assigned
    AllExcluded,
    NoneReleased,
}

/// Returns the released address with the oldest release, if its cooldown is over. Addresses that were released later
/// cool for longer, so they are not examined. An address that may not be assigned because of its probe is skipped.
fn cooled(
    kv: &dyn Kv,
    block: Cidr,
    out: &[IpRange],
    pool: &PoolTerms,
    search: &mut Search<'_>,
) -> Result<Cooled, StorageFault> {
    let mut after = None;
    while let Some((sequence, addr)) = kv.freed(block, after)? {
        after = Some(sequence);
        if covering(out, addr).is_some() {
            continue;
        }
        let freed = kv.release_of(addr)?;
        match freed.at.cooldown_left(search.now, cooldown_ms(pool)) {
            Some(left) if !Mutation::CooldownIgnored.is_on() => return Ok(Cooled::NotYet(left)),
            _ if search.may_assign(kv, pool, addr)? => {
                return Ok(Cooled::Yes(addr, AddressSource::Freed { block, sequence }));
            }
            _ if search.is_full() => break,
            _ => {}
        }
    }
    Ok(after.map_or(Cooled::NoneReleased, |_| Cooled::AllExcluded))
}

/// Selects the addresses that the ADD asks for. If they cannot be assigned, returns the reason.
pub(crate) fn requested(
    kv: &dyn Kv,
    add: &Add,
    is_known: bool,
    search: &mut Search<'_>,
) -> Result<Vec<AddressChoice>, Stop> {
    let mut addresses = add.addresses.clone();
    addresses.sort_unstable();
    addresses.dedup();
    for pair in addresses.windows(2) {
        if let [one, other] = pair
            && one.family == other.family
        {
            let family = one.family;
            return Err(refuse(
                OpErrorKind::NotUsable,
                format!(
                    "{one} and {other} were asked for: an interface gets at most one {family} address. Ask for one of them."
                ),
            ));
        }
    }
    let choose = |addr: &Addr| exactly(kv, *addr, add, is_known, search);
    all_or_unprobed(addresses.iter().map(choose).collect())
}

/// Returns all choices, or an error. If several choices failed, an error other than a missing probe takes precedence,
/// because a probe does not help if another choice fails anyway.
pub(crate) fn all_or_unprobed(
    mut choices: Vec<Result<AddressChoice, Stop>>,
) -> Result<Vec<AddressChoice>, Stop> {
    let is_final = |it: &Result<AddressChoice, Stop>| match it {
        Ok(_) => false,
        Err(Stop::Refused(refusal)) => refusal.why != OpErrorKind::Unprobed,
        Err(Stop::Fault(_)) => true,
    };
    if let Some(at) = choices.iter().position(is_final) {
        choices.swap(0, at);
    }
    choices.into_iter().collect()
}

fn exactly(
    kv: &dyn Kv,
    addr: Addr,
    add: &Add,
    is_known: bool,
    search: &mut Search<'_>,
) -> Result<AddressChoice, Stop> {
    let now = search.now;
    let around = active_block(kv, addr);
    let (cidr, block) = around.map_err(|why| claims::not_in_blocks(add, addr, why))?;
    let pool = terms(kv, &block.pool)?;
    let pod = add.pod.as_ref();
    if pool.bound && !is_known {
        return Err(unknown_pod(pod));
    }
    if is_excluded(&pool, add) {
        let why = if is_claim(&pool.name) {
            format!(
                "it belongs to IPClaim `{}`, which this pod does not name (annotation cadastre.dev/claim): ask for another address, or for none.",
                claim_of_pool(&pool.name)
            )
        } else {
            format!(
                "its pool `{}` is not for pods of this namespace, by its namespaceSelector: ask for an address of another pool, or for none.",
                pool.name
            )
        };
        let text = format!("{addr} was asked for, and {why}");
        return Err(refuse(OpErrorKind::UnknownPool, text));
    }
    if pool.denies_explicit {
        return Err(refuse(
            OpErrorKind::NotUsable,
            format!(
                "{addr} was asked for, and pool `{}` says explicitAddresses: Deny: ask for no address, or ask whoever may change the pool.",
                pool.name
            ),
        ));
    }
    let usable = block.usable(cidr, Some(&pool));
    if covering(&usable.excluded, addr).is_some() {
        let what = if usable.gateway == Some(addr) {
            "the gateway"
        } else {
            "the network or broadcast address"
        };
        return Err(refuse(
            OpErrorKind::NotUsable,
            format!("{addr} is {what} of {cidr}, which nobody can have: ask for another address."),
        ));
    }
    if covering(&union(cidr, &block.reserved), addr).is_some() {
        return Err(refuse(
            OpErrorKind::NotUsable,
            format!(
                "{addr} is reserved in pool `{}`, or an address of a node, or lies in a service range: ask for another address. What a pool reserves is given to who asks where it says reservedOnRequest.",
                block.pool
            ),
        ));
    }
    if !is_claim(&block.pool)
        && let Some(range) = withdrawals::covering(kv, addr)?
        && !Mutation::WithdrawnAddressAssignedOnRequest.is_on()
    {
        let why = refuse(
            OpErrorKind::NotInBlocks,
            format!(
                "{addr} was asked for, and {range} was taken out of this node's addresses: ask for another address, or put it back (kubectl cadastre push)."
            ),
        );
        return Err(claims::not_in_blocks(add, addr, why));
    }
    let source = match kv.address(addr)? {
        None => match rest_left(kv, now, cooldown_ms(&pool))? {
            Some(left) => return Err(cools(addr, left)),
            None => AddressSource::Requested,
        },
        Some(AddressRecord::Used { by, .. }) => {
            let pod = kv.record(&by)?.and_then(|record| record.pod);
            let whose = pod.map_or(format!("container {}", by.container_id), |pod| {
                format!("pod {}/{}", pod.namespace, pod.name)
            });
            let advice = match claims::named(add) {
                Some(claim) => format!(
                    "it belongs to IPClaim `{}`, which one pod at a time can use. Delete that first.",
                    claim_of_pool(claim)
                ),
                None => "ask for another address, or delete that first.".to_owned(),
            };
            return Err(refuse(
                OpErrorKind::NotFree,
                format!(
                    "{addr} is in use by {whose}, interface {} on network {}: {advice}",
                    by.ifname, by.network
                ),
            ));
        }
        Some(AddressRecord::Freed(freed)) => {
            // The cooldown protects against other pods. A pod can get its own earlier address again without a cooldown,
            // because the release proves that its earlier sandbox is gone.
            let its_own = pod.is_some_and(|pod| freed.was_of(pod));
            let left = freed.at.cooldown_left(now, cooldown_ms(&pool));
            if let Some(left) = left.filter(|_| !its_own) {
                return Err(cools(addr, left));
            }
            let (block, sequence) = (freed.block, freed.sequence);
            AddressSource::Freed { block, sequence }
        }
    };
    if !search.may_assign(kv, &pool, addr)? {
        return Err(match search.state(kv, addr)? {
            ProbeState::Conflict(by) => refuse(
                OpErrorKind::NotFree,
                format!(
                    "{addr} was asked for, and the host {by} uses it: ask for another address, or remove the address from that host and end the conflict (kubectl cadastre release {addr})."
                ),
            ),
            ProbeState::Clean | ProbeState::Unprobed => probes::unprobed(&format!(
                "{addr} was asked for, and it has to be probed before it is used"
            )),
        });
    }
    let given = describe(cidr, &block.pool, &usable, addr);
    Ok(AddressChoice { given, source })
}

fn cools(addr: Addr, left: u64) -> Stop {
    refuse(
        OpErrorKind::NotFree,
        format!(
            "{addr} was released lately and cools for another {}: try again then, or ask for another address.",
            seconds(left)
        ),
    )
}

/// Returns the active block that contains the address. Fails if no block contains `addr`, or only an inactive one does.
fn active_block(kv: &dyn Kv, addr: Addr) -> Result<(Cidr, BlockRecord), Stop> {
    let text = match kv.block_around(addr)? {
        Some((cidr, block)) => {
            let why = match block.state {
                BlockState::Active => return Ok((cidr, block)),
                BlockState::Draining => "is being emptied",
                BlockState::Unlisted => "is not this node's any more",
                BlockState::Released => "was released",
            };
            format!(
                "{addr} was asked for, and its block {cidr} {why}: ask for an address of another block, or for none."
            )
        }
        None => format!(
            "{addr} was asked for, and no block of this node contains it: ask for an address of the node's blocks (kubectl get nodesubnets.cadastre.dev), or for none."
        ),
    };
    Err(refuse(OpErrorKind::NotInBlocks, text))
}

pub(crate) fn describe(block: Cidr, pool: &str, usable: &Usable, address: Addr) -> AssignedAddress {
    AssignedAddress {
        address,
        prefix: usable.prefix,
        gateway: usable.gateway,
        pool: pool.to_owned(),
        block,
    }
}

pub(crate) fn refuse(why: OpErrorKind, text: String) -> Stop {
    Stop::Refused(OpError { why, text })
}

/// Formats milliseconds as seconds, rounded up, for error messages.
fn seconds(ms: u64) -> String {
    format!("{} s", ms.div_ceil(1000))
}
