//! A drop-in for host-local: its configuration, its state directory, its results and errors.
//!
//! Held to host-local 1.9.1 by a test that runs both side by side. Where this does better it is on
//! purpose, and only in ways that a switch back does not notice; `docs/host-local.md` lists them.
//!
//! | file | subject |
//! |---|---|
//! | `config` | the configuration, read and checked |
//! | `ranges` | ranges, sets of them, the walk through a set |
//! | `store` | the state directory |
//! | `index` | who has which file, without reading the files |
//! | `resolv` | `resolvConf` |

mod config;
mod index;
mod ranges;
mod resolv;
#[cfg(test)]
mod scratch;
mod store;

use config::HostLocal;
use ranges::RangeSet;
use store::{Owner, Store};

use super::attachments;
use super::error::{CniError, INTERNAL, INVALID_NETNS, NOT_AVAILABLE};
use super::json::Value;
use super::netns;
use super::request::{Config, Env};
use super::result::{CniResult, Ip};
use cadastre_core::Addr;

/// Whether a config is host-local's own: it says itself what to give addresses from.
pub(super) fn is_meant(root: &Value) -> bool {
    let ipam = root.get("ipam");
    let has = |key| ipam.is_some_and(|ipam| ipam.get(key).is_some());
    let named = ipam
        .and_then(|ipam| ipam.get("type"))
        .and_then(Value::as_str);
    let runtime = root.get("runtimeconfig");
    has("ranges")
        || has("subnet")
        || named == Some("host-local")
        || runtime.is_some_and(|it| it.get("ipranges").is_some())
}

/// Almost every error of host-local has the one code.
fn internal(text: impl Into<String>) -> CniError {
    CniError::new(INTERNAL, text)
}

/// Gives an address of each range set; the answer is the result.
pub(super) fn add(env: &Env, config: &Config<'_>, version: &str) -> Result<String, CniError> {
    let ours = HostLocal::load(config.root, &env.args).map_err(internal)?;
    let mut result = CniResult {
        routes: ours.routes,
        ..CniResult::default()
    };
    if !ours.resolv_conf.is_empty() {
        result.dns = resolv::read(&ours.resolv_conf).map_err(internal)?;
    }
    if !env.any_netns() && netns::is_own(&env.netns) {
        return Err(CniError::new(INVALID_NETNS, netns::OWN));
    }
    let dir = store::dir(&ours.data_dir, &config.name);
    let mut store = Store::open(&dir).map_err(internal)?;
    let owner = Owner::new(&env.container_id, &env.ifname);
    let given = give(&mut store, &owner, env, &ours.sets, ours.requested);
    store.note();
    result.ips = given.map_err(internal)?;
    Ok(result.render(version))
}

/// All sets or none.
fn give(
    store: &mut Store,
    owner: &Owner,
    env: &Env,
    sets: &[RangeSet],
    mut requested: Vec<Addr>,
) -> Result<Vec<Ip>, String> {
    let mut given = Vec::new();
    for (i, set) in sets.iter().enumerate() {
        let wanted = requested.iter().position(|&ip| set.range_of(ip).is_some());
        let wanted = wanted.map(|at| requested.remove(at));
        let one = match wanted {
            Some(ip) => exactly(store, owner, i, set, ip),
            None => next(store, owner, env, i, set),
        };
        match one {
            Ok(ip) => given.push(ip),
            Err(text) => {
                undo(store, owner, &given);
                return Err(format!("failed to allocate for range {i}: {text}"));
            }
        }
    }
    if requested.is_empty() {
        return Ok(given);
    }
    undo(store, owner, &given);
    let left: Vec<String> = requested.iter().map(ToString::to_string).collect();
    let left = left.join(" ");
    Err(format!("failed to allocate all requested IPs: {left}"))
}

/// Takes back as host-local does, once for each address given: all of an owner's files the first
/// time, those of its container without interface the second time.
fn undo(store: &mut Store, owner: &Owner, given: &[Ip]) {
    for _ in given {
        store.release(owner);
    }
}

/// The address that was asked for.
fn exactly(
    store: &mut Store,
    owner: &Owner,
    i: usize,
    set: &RangeSet,
    ip: Addr,
) -> Result<Ip, String> {
    let taken = || format!("requested IP address {ip} is not available in range set {set}");
    let span = set.range_of(ip).ok_or_else(taken)?;
    if ip == span.gateway {
        return Err(format!("requested ip {ip} is subnet's gateway"));
    }
    if store.reserve(owner, ip, i)? {
        return Ok(span.give(ip));
    }
    Err(taken())
}

/// The next free address.
fn next(
    store: &mut Store,
    owner: &Owner,
    env: &Env,
    i: usize,
    set: &RangeSet,
) -> Result<Ip, String> {
    let mut held = store.addresses(owner).into_iter();
    if let Some(ip) = held.find(|&ip| set.range_of(ip).is_some()) {
        let id = super::golang::text(&env.container_id);
        return Err(format!(
            "{ip} has been allocated to {id}, duplicate allocation is not allowed"
        ));
    }
    for (ip, span) in set.from(store.cursor(i)) {
        if store.reserve(owner, ip, i)? {
            return Ok(span.give(ip));
        }
    }
    Err(format!("no IP addresses available in range set: {set}"))
}

/// Takes back what an attachment has; nothing is a success.
pub(super) fn del(env: &Env, config: &Config<'_>) -> Result<(), CniError> {
    let ours = HostLocal::load(config.root, &env.args).map_err(internal)?;
    let dir = store::dir(&ours.data_dir, &config.name);
    let mut store = Store::open(&dir).map_err(internal)?;
    let owner = Owner::new(&env.container_id, &env.ifname);
    for _ in &ours.sets {
        store.release(&owner);
    }
    store.note();
    drop(store);
    if !env.any_netns() && netns::is_own(&env.netns) {
        return Err(CniError::new(INVALID_NETNS, netns::OWN));
    }
    Ok(())
}

/// Whether an attachment has an address and, better than host-local, those of the previous result
/// that are of its ranges.
pub(super) fn check(env: &Env, config: &Config<'_>) -> Result<(), CniError> {
    let ours = HostLocal::load(config.root, &env.args).map_err(internal)?;
    let dir = store::dir(&ours.data_dir, &config.name);
    let store = Store::open(&dir).map_err(internal)?;
    let owner = Owner::new(&env.container_id, &env.ifname);
    let id = super::golang::text(&env.container_id);
    if !store.has_any(&owner) {
        let text = format!("host-local: Failed to find address added by container {id}");
        return Err(internal(text));
    }
    let mut previous = attachments::previous(config.root).into_iter();
    let lost = previous.find(|&ip| {
        let ours = ours.sets.iter().any(|set| set.range_of(ip).is_some());
        ours && !store.has(&owner, ip)
    });
    match lost {
        None => Ok(()),
        Some(ip) => Err(internal(format!(
            "host-local: container {id} has not the address {ip} of its previous result any more: delete it and add it again"
        ))),
    }
}

/// Whether an ADD could be served. That all addresses are used is no fault: it would make the node
/// unfit for the pods that it has.
pub(super) fn status(config: &Config<'_>) -> Result<(), CniError> {
    let broken = |text: String| CniError::new(NOT_AVAILABLE, text);
    let ours = match HostLocal::load(config.root, b"") {
        // They may come with each ADD, as a capability.
        Err(text) if text == config::NO_RANGES => return Ok(()),
        loaded => loaded.map_err(broken)?,
    };
    store::usable(&store::dir(&ours.data_dir, &config.name)).map_err(broken)
}

/// Takes back what belongs to no valid attachment.
pub(super) fn gc(config: &Config<'_>) -> Result<(), CniError> {
    let valid = attachments::valid(config.root)?;
    let ipam = config.root.get("ipam");
    let data_dir = ipam
        .and_then(|ipam| ipam.get("datadir"))
        .and_then(Value::as_str);
    let dir = store::dir(data_dir.unwrap_or_default(), &config.name);
    if !dir.is_dir() {
        return Ok(());
    }
    let mut store = Store::open(&dir).map_err(internal)?;
    store.collect(&valid);
    store.note();
    Ok(())
}
