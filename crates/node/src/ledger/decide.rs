//! Decides what operations do. The functions here only read the tables; the module `apply` writes the decisions.

use std::collections::HashSet;

use super::super::ops::{
    Add, AddressAssignment, Attachment, Check, Gc, Now, OpError, OpErrorKind, PodRef,
};
use super::super::storage_fault::StorageFault;
use super::Stop;
use super::choose::{self, AddressChoice, Search, refuse};
use super::claims;
use super::kv::Kv;
use super::record::{ADOPTED, AttachmentRecord, BootTime};
use super::tables::Read;
use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{PoolTerms, Route, is_claim};
use cadastre_core::{Addr, Cidr, Family};

/// What an ADD returns, and what has to be written for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AddDecision {
    /// The record of the attachment, with the result of the ADD. The caller sets `order` before it writes the record
    pub record: AttachmentRecord,
    /// Whether anything has to be written. A repeated ADD usually writes nothing
    pub is_changed: bool,
    /// The new addresses; empty for a repeated ADD
    pub choices: Vec<AddressChoice>,
    /// Blocks without any unused address, each with the name of its pool
    pub spent: Vec<(String, Cidr)>,
}

pub(crate) fn add(kv: &dyn Kv, add: &Add, now: &Now, stamp: BootTime) -> Result<AddDecision, Stop> {
    if let Some(record) = kv.record(&add.attachment)? {
        return again(record, add, now);
    }
    let mut add = add.clone();
    let parent = add.parent.clone();
    let mut search = Search::new(&parent, stamp);
    let choices = choices(kv, &mut add, &mut search)?;
    let record = AttachmentRecord {
        given: assignment(kv, &choices)?,
        attachment: add.attachment,
        netns: add.netns,
        pod: add.pod,
        since_ms: now.wall_ms,
        boot: now.boot.clone(),
        order: ADOPTED,
    };
    Ok(AddDecision {
        record,
        is_changed: true,
        choices,
        spent: search.spent,
    })
}

/// Selects the addresses for an ADD whose attachment has no addresses yet. Updates `add` with the pools and addresses
/// that the pod may have.
pub(crate) fn choices(
    kv: &dyn Kv,
    add: &mut Add,
    search: &mut Search<'_>,
) -> Result<Vec<AddressChoice>, Stop> {
    if let Some(pool) = pool_of_network(kv, add)? {
        add.pools = vec![pool];
    }
    let is_known = resolve(kv, add)?;
    if let Some(claim) = claims::named(add) {
        add.addresses = claims::addresses(kv, claim, &add.addresses)?;
    }
    check_limits(add, add.addresses.iter().copied())?;
    if !add.addresses.is_empty() {
        return choose::requested(kv, add, is_known, search);
    }
    let choices = from_pools(kv, add, is_known, search)?;
    check_limits(add, choices.iter().map(|it| it.given.address))?;
    Ok(choices)
}

/// Returns the pool that serves a network with a range of its own. Returns `None` if the network has no such range, or
/// if the ADD names pools.
pub(crate) fn pool_of_network(kv: &dyn Kv, add: &Add) -> Result<Option<String>, Stop> {
    let limits = add.limits.as_ref().filter(|_| add.pools.is_empty());
    let Some(limits) = limits else {
        return Ok(None);
    };
    let pools = kv.pools()?;
    let pool = limits.pool(&add.attachment.network, &pools);
    let pool = pool.map_err(|text| refuse(OpErrorKind::UnknownPool, text))?;
    Ok(Some(pool.to_owned()))
}

/// Fails if the ADD's network does not allow one of the addresses.
fn check_limits(add: &Add, addresses: impl IntoIterator<Item = Addr>) -> Result<(), Stop> {
    let Some(limits) = &add.limits else {
        return Ok(());
    };
    let checked = limits.check_addresses(&add.attachment.network, addresses);
    checked.map_err(|text| refuse(OpErrorKind::NotUsable, text))
}

/// Replaces the pools and addresses of an ADD by those that the pod may have, if the store has a note (`PodNote`) on
/// the pod. Returns false if a note is needed and the store has none.
fn resolve(kv: &dyn Kv, add: &mut Add) -> Result<bool, Stop> {
    let Some(pod) = add.pod.as_ref().filter(|_| !add.decided) else {
        return Ok(true);
    };
    // A note is applied even if the ADD does not need one, because a pod that names a claim must not get an address
    // outside of the claim.
    let Some(note) = kv.pod_note(pod)? else {
        let mut pools = kv.pools()?;
        // The pool of a claim serves only pods that name the claim. So the pool of a claim is no reason to require a
        // note on another pod.
        pools.retain(|pool| !is_claim(&pool.name));
        let binds = pools.iter().any(|pool| pool.bound);
        return Ok(!add.depends_on_pod(binds));
    };
    let choice = note.choice(&add.attachment.ifname);
    add.decide(choice)?;
    Ok(true)
}

/// Decides what a repeated ADD does. The repeated ADD returns the addresses of the first ADD. After a reboot a
/// container may be started again with the same ID. In this case, the record gets the new boot and network namespace.
fn again(mut record: AttachmentRecord, add: &Add, now: &Now) -> Result<AddDecision, Stop> {
    let has: Vec<Addr> = record.given.addrs().collect();
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
    let is_changed = record.boot != now.boot || record.netns != add.netns;
    if is_changed {
        record.boot.clone_from(&now.boot);
        record.netns.clone_from(&add.netns);
        record.since_ms = now.wall_ms;
        record.pod = add.pod.clone().or(record.pod);
    }
    Ok(AddDecision {
        record,
        is_changed,
        choices: Vec::new(),
        spent: Vec::new(),
    })
}

/// Selects one address of each family, all from the first pool that has free addresses of each of its families. If
/// `is_known` is false, the store has no note on the pod, and only pools that serve unknown pods (`serves_unknown`) are
/// considered.
fn from_pools(
    kv: &dyn Kv,
    add: &Add,
    is_known: bool,
    search: &mut Search<'_>,
) -> Result<Vec<AddressChoice>, Stop> {
    let is_any = add.pools.is_empty();
    let mut reasons = Vec::new();
    let mut pools = Vec::new();
    for name in &add.pools {
        match kv.pool(name)? {
            Some(pool) => pools.push(pool),
            None if !kv.block_families(name)?.is_empty() => pools.push(PoolTerms::named(name)),
            None => reasons.push(OpError {
                why: OpErrorKind::UnknownPool,
                text: format!("{} is not one of this node's", pool_text(name)),
            }),
        }
    }
    if is_any {
        pools = all_pools(kv)?;
    }
    let mut is_withheld = false;
    for pool in pools {
        if !is_known && !pool.serves_unknown && !Mutation::UnknownPodsServed.is_on() {
            is_withheld = true;
            continue;
        }
        if is_any && !pool.automatic {
            continue;
        }
        if is_excluded(&pool, add) {
            let pool = pool_text(&pool.name);
            reasons.push(OpError {
                why: OpErrorKind::UnknownPool,
                text: format!("{pool} is not for pods of this namespace, by its namespaceSelector"),
            });
            continue;
        }
        // If this pool does not fit the network's range, the ADD fails: the next pool would serve only some nodes.
        if let Some(limits) = &add.limits {
            let checked = limits.check_pool(&add.attachment.network, &pool);
            checked.map_err(|text| refuse(OpErrorKind::UnknownPool, text))?;
        }
        match from_pool(kv, &pool, search) {
            // After the error `Unprobed`, no further pool is tried: this pool has free addresses, and only their probes
            // are missing.
            Err(Stop::Refused(reason)) if reason.why != OpErrorKind::Unprobed => {
                reasons.push(reason);
            }
            result => return result,
        }
    }
    if is_withheld {
        return Err(unknown_pod(add.pod.as_ref()));
    }
    Err(refusal(reasons, !is_any))
}

/// Selects an address of each family of a pool. The text of an error is a clause that [`refusal`] puts into a sentence.
fn from_pool(
    kv: &dyn Kv,
    pool: &PoolTerms,
    search: &mut Search<'_>,
) -> Result<Vec<AddressChoice>, Stop> {
    let families = families(kv, pool)?;
    if families.is_empty() {
        return Err(no_block(None, &pool.name).into());
    }
    let next = |family| choose::next(kv, pool, family, search);
    choose::all_or_unprobed(families.into_iter().map(next).collect())
}

/// Returns all pools. Pools whose settings are known come first, in order of preference. Pools of which only blocks are
/// known come last.
fn all_pools(kv: &dyn Kv) -> Result<Vec<PoolTerms>, StorageFault> {
    let mut pools = kv.pools()?;
    let others = kv.pools_without_terms()?;
    pools.extend(others.iter().map(|name| PoolTerms::named(name)));
    Ok(pools)
}

/// Returns whether the pool excludes the pod: the pool is restricted to namespaces, and the pod is in a different one.
pub(crate) fn is_excluded(pool: &PoolTerms, add: &Add) -> bool {
    pool.bound && !add.bound.contains(&pool.name)
}

/// Returns the rejection of an ADD for a pod on which the store has no note.
pub(crate) fn unknown_pod(pod: Option<&PodRef>) -> Stop {
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

/// Returns the families of a pool according to its settings. If the store has no settings of the pool, returns the
/// families of its blocks on this node.
pub(crate) fn families(kv: &dyn Kv, pool: &PoolTerms) -> Result<Vec<Family>, StorageFault> {
    let has_terms = |family: &Family| pool.family(*family).is_some();
    let families: Vec<Family> = Family::ALL.into_iter().filter(has_terms).collect();
    if families.is_empty() {
        return kv.block_families(&pool.name);
    }
    Ok(families)
}

/// Returns the rejection of an ADD or STATUS. Each text in `reasons` is a clause about one pool that was tried.
fn refusal(mut reasons: Vec<OpError>, by_name: bool) -> Stop {
    let is = |why| move |reason: &OpError| reason.why == why;
    let (why, advice) = if reasons.iter().any(is(OpErrorKind::Exhausted)) {
        reasons.retain(|reason| by_name || reason.why == OpErrorKind::Exhausted);
        reasons.sort_by_key(|reason| reason.why != OpErrorKind::Exhausted);
        (
            OpErrorKind::Exhausted,
            "More comes by itself where the pool has room: see kubectl get ippools.cadastre.dev; else add ranges to it, or delete pods.",
        )
    } else if !by_name {
        (
            OpErrorKind::NoBlock,
            "See that the controller and this node's agent run, and that a pool with room takes this node in (kubectl get nodesubnets.cadastre.dev,ippools.cadastre.dev).",
        )
    } else if reasons.iter().all(is(OpErrorKind::UnknownPool)) {
        (
            OpErrorKind::UnknownPool,
            "Name a pool that exists, and that takes in this node and the pod's namespace: see kubectl get ippools.cadastre.dev.",
        )
    } else {
        (
            OpErrorKind::NoBlock,
            "The node's agent asks for blocks: see that it runs, and that the pool has room (kubectl get ippools.cadastre.dev).",
        )
    };
    let mut clauses: Vec<String> = reasons.into_iter().map(|reason| reason.text).collect();
    if clauses.is_empty() {
        clauses.push("this node holds no block that addresses are given from".to_owned());
    }
    refuse(why, format!("{}. {advice}", clauses.join("; ")))
}

/// Returns the name of a pool for use in a sentence.
pub(crate) fn pool_text(pool: &str) -> String {
    if pool.is_empty() {
        return "the node's podCIDR, which is in no pool,".to_owned();
    }
    format!("pool `{pool}`")
}

pub(crate) fn no_block(family: Option<Family>, pool: &str) -> OpError {
    let family = family.map_or(String::new(), |it| format!("{it} "));
    OpError {
        why: OpErrorKind::NoBlock,
        text: format!("this node holds no {family}block of {}", pool_text(pool)),
    }
}

/// Builds the result of an ADD: the addresses, the routes of their families, and the DNS settings of the first pool
/// that has any.
fn assignment(kv: &dyn Kv, choices: &[AddressChoice]) -> Result<AddressAssignment, StorageFault> {
    let mut given = AddressAssignment::default();
    for choice in choices {
        let pool = choose::terms(kv, &choice.given.pool)?;
        let family = choice.given.address.family;
        let routes = pool.routes.into_iter();
        let fits = |route: &Route| route.dst.family() == family && !given.routes.contains(route);
        let routes: Vec<Route> = routes.filter(fits).collect();
        given.routes.extend(routes);
        if given.dns.is_empty() {
            given.dns = pool.dns;
        }
        given.addresses.push(choice.given.clone());
    }
    Ok(given)
}

/// Succeeds if some pool has a block of each of its families, which means that an ADD can be served. The pools of
/// claims do not count, because they serve single pods.
pub(crate) fn status(kv: &dyn Kv) -> Result<(), Stop> {
    let mut reasons = Vec::new();
    let mut pools = all_pools(kv)?;
    pools.retain(|pool| !is_claim(&pool.name));
    for pool in pools {
        let families = families(kv, &pool)?;
        let with_block = kv.block_families(&pool.name)?;
        match families.iter().find(|it| !with_block.contains(it)) {
            Some(family) => reasons.push(no_block(Some(*family), &pool.name)),
            None if families.is_empty() => {}
            None => return Ok(()),
        }
    }
    Err(refusal(reasons, false))
}

/// Fails unless the addresses that the container runtime remembers are exactly the addresses of the attachment.
/// Remembered addresses outside the node's blocks are ignored, because they belong to other CNI plugins.
pub(crate) fn check(kv: &dyn Kv, check: &Check) -> Result<(), Stop> {
    let Attachment {
        network,
        container_id,
        ifname,
    } = &check.attachment;
    let whose = format!("interface {ifname} of container {container_id} on network {network}");
    let mismatch = |has: String| {
        let text = format!("{whose} has {has}. Delete the pod, so that it is set up again.");
        Err(refuse(OpErrorKind::Mismatch, text))
    };
    let Some(record) = kv.record(&check.attachment)? else {
        return mismatch("no address here".to_owned());
    };
    let has: Vec<Addr> = record.given.addrs().collect();
    let mut is_same = has.iter().all(|addr| check.addresses.contains(addr));
    for addr in check.addresses.iter().filter(|addr| !has.contains(addr)) {
        is_same &= kv.block_around(*addr)?.is_none();
    }
    if is_same {
        return Ok(());
    }
    let remembered = list(&check.addresses);
    mismatch(format!(
        "{} here, and {remembered} by the previous result",
        list(&has)
    ))
}

/// Returns those attachments of the network that are not in the container runtime's list of valid attachments.
pub(crate) fn garbage(kv: &dyn Kv, gc: &Gc) -> Result<Vec<AttachmentRecord>, StorageFault> {
    let valid = gc.valid.iter();
    let valid: HashSet<(&str, &str)> = valid.map(|(id, ifname)| (&**id, &**ifname)).collect();
    let mut garbage = kv.attachments(Some(&gc.network))?;
    garbage.retain(|record| {
        let it = &record.attachment;
        !valid.contains(&(&it.container_id, &it.ifname))
    });
    Ok(garbage)
}

pub(crate) fn list(addresses: &[Addr]) -> String {
    if addresses.is_empty() {
        return "no address".to_owned();
    }
    let texts: Vec<String> = addresses.iter().map(Addr::to_string).collect();
    texts.join(", ")
}
