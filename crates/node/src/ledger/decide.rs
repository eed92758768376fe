//! Decides what operations do. The functions here only read the tables; `apply` writes.

use std::borrow::Cow;
use std::collections::HashSet;

use super::super::ops::{Add, AddressAssignment, Attachment, Check, Gc, Now, OpErrorKind, PodRef};
use super::super::storage_fault::StorageFault;
use super::Stop;
use super::choose::{self, AddressChoice, FoundAddress, refuse, seconds};
use super::kv::KvTable;
use super::record::{ADOPTED, BootTime, StoredAttachment, pool_prefix};
use super::tables::Read;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{Dns, PoolTerms, Route};
use cadastre_core::{Addr, Cidr, Family};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AddDecision {
    /// The ADD is a repeated one. Contains the result of the first ADD, and the record if the record has to be
    /// renewed
    AlreadyAssigned(AddressAssignment, Option<StoredAttachment>),
    /// New addresses are to be assigned. `spent` lists blocks without any unused address, each with the name of its
    /// pool
    New {
        record: StoredAttachment,
        choices: Vec<AddressChoice>,
        spent: Vec<(String, Cidr)>,
    },
}

/// Decides an ADD. `apply` writes the result.
pub(crate) fn add<R: Read + ?Sized>(
    kv: &R,
    add: &Add,
    now: &Now,
    stamp: BootTime,
) -> Result<AddDecision, Stop> {
    if let Some(record) = kv.record(&add.attachment)? {
        return again(record, add, now);
    }
    let mut spent = Vec::new();
    let (add, is_known) = &known(kv, add)?;
    let choices = if add.addresses.is_empty() {
        from_pools(kv, add, *is_known, stamp, &mut spent)?
    } else {
        choose::asked(kv, add, *is_known, stamp)?
    };
    let record = StoredAttachment {
        given: given(kv, &choices)?,
        netns: add.netns.clone(),
        pod: add.pod.clone(),
        since_ms: now.wall_ms,
        boot: now.boot.clone(),
        // A placeholder: the caller replaces it before it writes the record.
        order: ADOPTED,
    };
    Ok(AddDecision::New {
        record,
        choices,
        spent,
    })
}

/// Returns the ADD with the pools and addresses that the pod may have, and whether these are known. They are known if
/// the caller has decided them or if the store has a note on the pod.
fn known<'a, R: Read + ?Sized>(kv: &R, add: &'a Add) -> Result<(Cow<'a, Add>, bool), Stop> {
    // An ADD that the agent has decided already does not depend on the pools' selectors, so the pools are not read.
    // This is the usual case.
    if add.decided || add.pod.is_none() {
        return Ok((Cow::Borrowed(add), true));
    }
    let (selects, binds) = selective(kv)?;
    if !add.depends_on_pod(selects, binds) {
        return Ok((Cow::Borrowed(add), true));
    }
    let note = add.pod.as_ref().map(|pod| kv.pod_note(pod)).transpose()?;
    let Some(note) = note.flatten() else {
        return Ok((Cow::Borrowed(add), false));
    };
    let mut decided = add.clone();
    let choice = note.choice(&add.attachment.ifname);
    let why = decided.decide(choice);
    why.map_err(|text| refuse(OpErrorKind::NothingHeld, text))?;
    Ok((Cow::Owned(decided), true))
}

/// Returns whether any pool is restricted to some pods, and whether any pool is restricted to some namespaces.
fn selective<R: Read + ?Sized>(kv: &R) -> Result<(bool, bool), StorageFault> {
    let (mut selects, mut binds) = (false, false);
    let mut rank = 0;
    while let Some(pool) = kv.pool_at(rank)? {
        selects |= !pool.automatic;
        binds |= pool.bound;
        rank += 1;
    }
    Ok((selects, binds))
}

/// Decides a repeated ADD, which gets the addresses of the first ADD. After a reboot a container may be started again
/// with the same ID; if so, its record is renewed with the new boot and network namespace.
fn again(mut record: StoredAttachment, add: &Add, now: &Now) -> Result<AddDecision, Stop> {
    let has: Vec<Addr> = record.given.addresses.iter().map(|it| it.address).collect();
    if let Some(other) = add.addresses.iter().find(|addr| !has.contains(addr)) {
        let Attachment {
            container_id,
            ifname,
            ..
        } = &add.attachment;
        return Err(refuse(
            OpErrorKind::Mismatch,
            format!(
                "{other} was asked for, and interface {ifname} of container {container_id} has {} already: delete that first.",
                list(&has)
            ),
        ));
    }
    let given = record.given.clone();
    let moved = record.boot != now.boot || record.netns != add.netns;
    if !moved {
        return Ok(AddDecision::AlreadyAssigned(given, None));
    }
    record.boot.clone_from(&now.boot);
    record.netns.clone_from(&add.netns);
    record.since_ms = now.wall_ms;
    if add.pod.is_some() {
        record.pod.clone_from(&add.pod);
    }
    Ok(AddDecision::AlreadyAssigned(given, Some(record)))
}

/// Selects one address of each family, all from the first pool that has them. For a pod about which nothing is known,
/// only pools whose terms permit such pods are considered.
fn from_pools<R: Read + ?Sized>(
    kv: &R,
    add: &Add,
    is_known: bool,
    stamp: BootTime,
    spent: &mut Vec<(String, Cidr)>,
) -> Result<Vec<AddressChoice>, Stop> {
    let pools = &add.pools;
    let serves_all = Mutation::UnknownPodsServed.is_on();
    let may = |pool: &PoolTerms| is_known || pool.serves_unknown || serves_all;
    let mut is_withheld = false;
    let mut search = Search {
        kv,
        stamp,
        spent,
        lacks: Vec::new(),
    };
    for name in pools {
        let pool = match kv.pool(name)? {
            Some(pool) => pool,
            None if has_block(kv, name)? => PoolTerms::named(name),
            None => {
                search.lacks.push((name.clone(), PoolLack::Unknown));
                continue;
            }
        };
        is_withheld |= !may(&pool);
        if !may(&pool) {
            continue;
        }
        if is_excluded(&pool, add) {
            search.lacks.push((name.clone(), PoolLack::Barred));
        } else if let Some(choices) = search.attempt(&pool)? {
            return Ok(choices);
        }
    }
    if pools.is_empty() {
        let mut rank = 0;
        while let Some(pool) = kv.pool_at(rank)? {
            rank += 1;
            is_withheld |= !may(&pool);
            if pool.automatic
                && may(&pool)
                && let Some(choices) = search.attempt(&pool)?
            {
                return Ok(choices);
            }
        }
        for name in kv.pools_without_terms()? {
            let pool = PoolTerms::named(&name);
            is_withheld |= !may(&pool);
            if may(&pool)
                && let Some(choices) = search.attempt(&pool)?
            {
                return Ok(choices);
            }
        }
    }
    if is_withheld {
        return Err(unknown(add.pod.as_ref()));
    }
    Err(refusal(&search.lacks, !pools.is_empty()))
}

/// Returns whether the pool is restricted to namespaces that do not include the pod's.
pub(crate) fn is_excluded(pool: &PoolTerms, add: &Add) -> bool {
    pool.bound && !add.bound.contains(&pool.name)
}

/// Returns the rejection of an ADD for a pod about which nothing is known.
pub(crate) fn unknown(pod: Option<&PodRef>) -> Stop {
    let name = pod.map_or(String::new(), |pod| {
        format!(" {}/{}", pod.namespace, pod.name)
    });
    refuse(
        OpErrorKind::PodUnknown,
        format!(
            "nothing is known of pod{name} yet: an annotation or a label might give it another pool or address. It is tried again; see that this node's agent runs and reaches the API server. Pools with unknownPods: Serve give to such pods at once."
        ),
    )
}

/// Why a pool cannot serve an ADD.
enum PoolLack {
    Unknown,
    /// The pool is restricted to other namespaces
    Barred,
    /// The node has no block of this family of the pool. `None` if neither the pool's terms nor its blocks name a
    /// family
    NoBlock(Option<Family>),
    /// No address of the family is free. The number is the milliseconds until the next address has cooled; `None` if
    /// no address is cooling
    Nothing(Family, Option<u64>),
}

struct Search<'a, R: ?Sized> {
    kv: &'a R,
    stamp: BootTime,
    spent: &'a mut Vec<(String, Cidr)>,
    lacks: Vec<(String, PoolLack)>,
}

impl<R: Read + ?Sized> Search<'_, R> {
    /// Selects an address of each family of the pool. Returns `None` and notes the reason if a family has no free
    /// address.
    fn attempt(&mut self, pool: &PoolTerms) -> Result<Option<Vec<AddressChoice>>, Stop> {
        let mut choices = Vec::new();
        for family in families(self.kv, pool)? {
            let mut spent = Vec::new();
            let found = choose::next(self.kv, pool, family, self.stamp, &mut spent)?;
            let spent = spent.into_iter().map(|block| (pool.name.clone(), block));
            self.spent.extend(spent);
            let lack = match found {
                FoundAddress::One(choice) => {
                    choices.push(choice);
                    continue;
                }
                FoundAddress::NoBlock => PoolLack::NoBlock(Some(family)),
                FoundAddress::Nothing(soonest) => PoolLack::Nothing(family, soonest),
            };
            self.lacks.push((pool.name.clone(), lack));
            return Ok(None);
        }
        if choices.is_empty() {
            self.lacks
                .push((pool.name.clone(), PoolLack::NoBlock(None)));
            return Ok(None);
        }
        Ok(Some(choices))
    }
}

/// Returns the families of a pool's terms. If its terms are unknown, returns the families of its blocks on this node.
fn families<R: Read + ?Sized>(kv: &R, pool: &PoolTerms) -> Result<Vec<Family>, StorageFault> {
    let told = |family: &Family| pool.family(*family).is_some();
    let told: Vec<Family> = Family::ALL.into_iter().filter(told).collect();
    if !told.is_empty() {
        return Ok(told);
    }
    let mut held = Vec::new();
    for family in Family::ALL {
        if kv
            .block_of(KvTable::Giving, &pool.name, family, None)?
            .is_some()
        {
            held.push(family);
        }
    }
    Ok(held)
}

fn has_block<R: Read + ?Sized>(kv: &R, pool: &str) -> Result<bool, StorageFault> {
    let block = kv.next(KvTable::Giving, &pool_prefix(pool, None), None)?;
    Ok(block.is_some())
}

fn refusal(lacks: &[(String, PoolLack)], by_name: bool) -> Stop {
    let exhausted = |(pool, lack): &(String, PoolLack)| match lack {
        PoolLack::Nothing(family, soonest) => {
            let pool = pool_text(pool);
            let soon = soonest.map_or(String::new(), |ms| {
                format!(" (the next one has rested in {})", seconds(ms))
            });
            Some(format!(
                "{pool} has no free {family} address on this node{soon}"
            ))
        }
        _ => None,
    };
    let other = |(pool, lack): &(String, PoolLack)| match lack {
        PoolLack::Unknown => Some(format!("{} is not one of this node's", pool_text(pool))),
        PoolLack::Barred => Some(format!(
            "{} is not for pods of this namespace, by its namespaceSelector",
            pool_text(pool)
        )),
        PoolLack::NoBlock(family) => Some(no_block(*family, pool)),
        PoolLack::Nothing(..) => None,
    };
    let full: Vec<String> = lacks.iter().filter_map(exhausted).collect();
    let absent: Vec<String> = lacks.iter().filter_map(other).collect();
    if !full.is_empty() {
        let all = if by_name {
            [full, absent].concat()
        } else {
            full
        };
        return refuse(
            OpErrorKind::Exhausted,
            format!(
                "{}. More comes by itself where the pool has room: see kubectl get ippools.cadastre.dev; else add ranges to it, or delete pods.",
                all.join("; ")
            ),
        );
    }
    if !by_name {
        return refuse(OpErrorKind::NothingHeld, nothing_allocated(&absent));
    }
    let is_none = |lack: &PoolLack| matches!(lack, PoolLack::Unknown | PoolLack::Barred);
    let unknown = lacks.iter().all(|(_, lack)| is_none(lack));
    let (why, advice) = if unknown {
        (
            OpErrorKind::UnknownPool,
            "Name a pool that exists, and that takes in this node and the pod's namespace: see kubectl get ippools.cadastre.dev.",
        )
    } else {
        (
            OpErrorKind::NothingHeld,
            "The node's agent asks for blocks: see that it runs, and that the pool has room (kubectl get ippools.cadastre.dev).",
        )
    };
    refuse(why, format!("{}. {advice}", absent.join("; ")))
}

/// Returns the name of a pool for use in a sentence.
fn pool_text(pool: &str) -> String {
    if pool.is_empty() {
        return "the node's podCIDR, which is in no pool,".to_owned();
    }
    format!("pool `{pool}`")
}

fn no_block(family: Option<Family>, pool: &str) -> String {
    let family = family.map_or(String::new(), |it| format!("{it} "));
    format!("this node holds no {family}block of {}", pool_text(pool))
}

fn nothing_allocated(absent: &[String]) -> String {
    let what = if absent.is_empty() {
        "this node holds no block that addresses are given from".to_owned()
    } else {
        absent.join("; ")
    };
    format!(
        "{what}. See that the controller and this node's agent run, and that a pool with room takes this node in (kubectl get nodesubnets.cadastre.dev,ippools.cadastre.dev)."
    )
}

/// Builds the result of an ADD: the addresses, the routes of their families, and the DNS settings of the first pool
/// that has any.
fn given<R: Read + ?Sized>(
    kv: &R,
    choices: &[AddressChoice],
) -> Result<AddressAssignment, StorageFault> {
    let mut given = AddressAssignment::default();
    for choice in choices {
        let pool = choose::terms(kv, &choice.given.pool)?;
        let family = choice.given.address.family;
        let routes = pool.routes.into_iter();
        let fits = |route: &Route| route.dst.family() == family && !given.routes.contains(route);
        let routes: Vec<Route> = routes.filter(fits).collect();
        given.routes.extend(routes);
        if given.dns == Dns::default() {
            given.dns = pool.dns;
        }
        given.addresses.push(choice.given.clone());
    }
    Ok(given)
}

/// Succeeds if some pool has a block of each of its families, which means that an ADD can be served.
pub(crate) fn status<R: Read + ?Sized>(kv: &R) -> Result<(), Stop> {
    let mut absent = Vec::new();
    let mut serves = |pool: &PoolTerms| -> Result<bool, StorageFault> {
        let families = families(kv, pool)?;
        for family in &families {
            if kv
                .block_of(KvTable::Giving, &pool.name, *family, None)?
                .is_none()
            {
                absent.push(no_block(Some(*family), &pool.name));
                return Ok(false);
            }
        }
        Ok(!families.is_empty())
    };
    let mut rank = 0;
    while let Some(pool) = kv.pool_at(rank)? {
        rank += 1;
        if serves(&pool)? {
            return Ok(());
        }
    }
    for name in kv.pools_without_terms()? {
        if serves(&PoolTerms::named(&name))? {
            return Ok(());
        }
    }
    Err(refuse(OpErrorKind::NothingHeld, nothing_allocated(&absent)))
}

/// Checks that the remembered addresses that lie in the node's blocks are exactly the assigned ones. Addresses
/// outside the node's blocks are ignored, because they belong to other CNI plugins.
pub(crate) fn check<R: Read + ?Sized>(kv: &R, check: &Check) -> Result<(), Stop> {
    let Attachment {
        network,
        container_id,
        ifname,
    } = &check.attachment;
    let whose = format!("interface {ifname} of container {container_id} on network {network}");
    let advice = "Delete the pod, so that it is set up anew.";
    let Some(record) = kv.record(&check.attachment)? else {
        return Err(refuse(
            OpErrorKind::Mismatch,
            format!("{whose} has no address here. {advice}"),
        ));
    };
    let has: Vec<Addr> = record.given.addresses.iter().map(|it| it.address).collect();
    let mut strange = Vec::new();
    for addr in check.addresses.iter().filter(|addr| !has.contains(addr)) {
        if kv.block_around(*addr)?.is_some() {
            strange.push(*addr);
        }
    }
    if strange.is_empty() && has.iter().all(|addr| check.addresses.contains(addr)) {
        return Ok(());
    }
    Err(refuse(
        OpErrorKind::Mismatch,
        format!(
            "{whose} has {} here, and {} by the previous result. {advice}",
            list(&has),
            list(&check.addresses)
        ),
    ))
}

/// Returns the attachments of the network that are not listed as valid.
pub(crate) fn garbage<R: Read + ?Sized>(
    kv: &R,
    gc: &Gc,
) -> Result<Vec<(Attachment, StoredAttachment)>, StorageFault> {
    let valid = gc.valid.iter();
    let valid: HashSet<(&str, &str)> = valid.map(|(id, ifname)| (&**id, &**ifname)).collect();
    let mut garbage = kv.attachments(Some(&gc.network))?;
    garbage.retain(|(it, _)| !valid.contains(&(&it.container_id, &it.ifname)));
    Ok(garbage)
}

fn list(addresses: &[Addr]) -> String {
    if addresses.is_empty() {
        return "no address".to_owned();
    }
    let texts: Vec<String> = addresses.iter().map(Addr::to_string).collect();
    texts.join(", ")
}
