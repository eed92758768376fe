//! Selects addresses for an ADD: the next free address of a pool, or the addresses that the ADD asks for.

use super::super::ops::{Add, AssignedAddress, OpError, OpErrorKind};
use super::super::storage_fault::StorageFault;
use super::Stop;
use super::claims;
use super::decide::{is_excluded, no_block, pool_text, unknown_pod};
use super::kv::{Kv, KvTable};
use super::record::{AddressRecord, BlockRecord, BlockState, BootTime, Cursor};
use super::tables::Read;
use super::withdrawals;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{PoolTerms, is_claim};
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
    /// The address was never assigned before. The next search in the block continues at this cursor
    New(Cursor),
    /// The address was released before
    Freed { block: Cidr, sequence: u64 },
    /// The address was never assigned before, and the ADD asks for exactly this address
    Requested,
}

pub(crate) fn cooldown_ms(pool: &PoolTerms) -> u64 {
    u64::from(pool.cooldown_seconds) * 1000
}

/// Returns the settings of a pool. If the store has none for this pool, returns the default settings.
pub(crate) fn terms(kv: &dyn Kv, pool: &str) -> Result<PoolTerms, StorageFault> {
    Ok(kv.pool(pool)?.unwrap_or_else(|| PoolTerms::named(pool)))
}

/// Selects the next address of a pool and family. If there is none, the error is a clause that completes the error
/// message. Blocks that have no unused address left are added to `spent`, each with the name of its pool. They are not
/// searched again before one of their addresses is released.
pub(crate) fn next(
    kv: &dyn Kv,
    pool: &PoolTerms,
    family: Family,
    now: BootTime,
    spent: &mut Vec<(String, Cidr)>,
) -> Result<AddressChoice, Stop> {
    let mut soonest: Option<u64> = None;
    let mut after = None;
    while let Some(cidr) = kv.block_of(KvTable::Open, &pool.name, family, after)? {
        after = Some(cidr);
        let Some(block) = kv.block(cidr)? else {
            continue;
        };
        let usable = block.usable(cidr, Some(pool));
        let withheld = withdrawals::withheld(kv, cidr, &block.pool)?;
        let out = block.left_out(cidr, &[&usable.excluded[..], &withheld].concat());
        let (addr, source) = match unused(kv, cidr, &out)? {
            Some((addr, cursor)) => (addr, AddressSource::New(cursor)),
            None => match cooled(kv, cidr, &out, now, cooldown_ms(pool))? {
                Cooled::Yes(addr, source) => (addr, source),
                Cooled::NotYet(left) => {
                    soonest = Some(soonest.map_or(left, |it| it.min(left)));
                    continue;
                }
                Cooled::NoneReleased => {
                    spent.push((pool.name.clone(), cidr));
                    continue;
                }
                Cooled::AllExcluded => continue,
            },
        };
        let given = describe(cidr, &pool.name, &usable, addr);
        return Ok(AddressChoice { given, source });
    }
    if !kv.block_families(&pool.name)?.contains(&family) {
        return Err(no_block(Some(family), &pool.name).into());
    }
    let soon = soonest.map_or(String::new(), |ms| {
        format!(" (the next one has rested in {})", seconds(ms))
    });
    let pool = pool_text(&pool.name);
    Err(refuse(
        OpErrorKind::Exhausted,
        format!("{pool} has no free {family} address on this node{soon}"),
    ))
}

/// Searches a block, from its cursor on, for an address that was never assigned. Returns the address and the cursor for
/// the next search.
fn unused(
    kv: &dyn Kv,
    block: Cidr,
    out: &[IpRange],
) -> Result<Option<(Addr, Cursor)>, StorageFault> {
    let mut cursor = kv.cursor(block)?;
    loop {
        let mut at = cursor.next;
        while let Some(addr) = at {
            if let Some(span) = covering(out, addr) {
                at = above(span.last(), block.last());
            } else if kv.address_from(addr)? == Some(addr) {
                at = above(addr, block.last());
            } else {
                cursor.next = above(addr, block.last());
                return Ok(Some((addr, cursor)));
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
    /// Each released address of the block is now excluded from automatic assignment
    AllExcluded,
    NoneReleased,
}

/// Returns the released address with the oldest release, if its cooldown is over. Addresses that were released later
/// cool for longer, so they are not examined.
fn cooled(
    kv: &dyn Kv,
    block: Cidr,
    out: &[IpRange],
    now: BootTime,
    cooldown_ms: u64,
) -> Result<Cooled, StorageFault> {
    let mut after = None;
    while let Some((sequence, addr)) = kv.freed(block, after)? {
        after = Some(sequence);
        if covering(out, addr).is_some() {
            continue;
        }
        let freed = kv.release_of(addr)?;
        return Ok(match freed.at.cooldown_left(now, cooldown_ms) {
            Some(left) if !Mutation::CooldownIgnored.is_on() => Cooled::NotYet(left),
            _ => Cooled::Yes(addr, AddressSource::Freed { block, sequence }),
        });
    }
    Ok(after.map_or(Cooled::NoneReleased, |_| Cooled::AllExcluded))
}

/// Selects the addresses that the ADD asks for. If they cannot be assigned, returns the reason.
pub(crate) fn requested(
    kv: &dyn Kv,
    add: &Add,
    is_known: bool,
    now: BootTime,
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
    let choose = |addr: &Addr| exactly(kv, *addr, add, is_known, now);
    addresses.iter().map(choose).collect()
}

fn exactly(
    kv: &dyn Kv,
    addr: Addr,
    add: &Add,
    is_known: bool,
    now: BootTime,
) -> Result<AddressChoice, Stop> {
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
                pool.name
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
        None => AddressSource::Requested,
        Some(AddressRecord::Used { by, .. }) => {
            let pod = kv.record(&by)?.and_then(|record| record.pod);
            let whose = pod.map_or(format!("container {}", by.container_id), |pod| {
                format!("pod {}/{}", pod.namespace, pod.name)
            });
            let advice = match claims::named(add) {
                Some(claim) => format!(
                    "it belongs to IPClaim `{claim}`, which one pod at a time can use. Delete that first."
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
            // The cooldown protects against other pods. A pod may have its own earlier address again at once, because
            // the release proves that its earlier sandbox is gone.
            let its_own = pod.is_some_and(|pod| freed.was_of(pod));
            let left = freed.at.cooldown_left(now, cooldown_ms(&pool));
            if let Some(left) = left.filter(|_| !its_own) {
                return Err(refuse(
                    OpErrorKind::NotFree,
                    format!(
                        "{addr} was released lately and cools for another {}: try again then, or ask for another address.",
                        seconds(left)
                    ),
                ));
            }
            let (block, sequence) = (freed.block, freed.sequence);
            AddressSource::Freed { block, sequence }
        }
    };
    let given = describe(cidr, &block.pool, &usable, addr);
    Ok(AddressChoice { given, source })
}

/// Returns the block that contains the address, if the node may assign from it.
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
