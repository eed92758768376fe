//! A drop-in for host-local: its configuration, its state directory, its results and error codes.
//!
//! A test runs host-local 1.9.1 beside it. Where the behaviour is better it is on purpose, and only in ways
//! that a switch back does not notice; `docs/host-local.md` lists them.
//!
//! | file | subject |
//! |---|---|
//! | `config` | the configuration, read and checked |
//! | `ranges` | ranges, sets of them, the walk through a set |
//! | `store` | the state directory |
//! | `index` | an index of what is in its files, which saves reading them |
//! | `resolv` | `resolvConf` |

mod config;
mod index;
mod ranges;
mod resolv;
mod store;

use config::HostLocal;
use ranges::RangeSet;
use store::{Owner, Store};

use super::config::Config;
use super::error::{CniError, INTERNAL, NOT_AVAILABLE};
use super::netns;
use super::request::Env;
use super::result::{CniResult, Ip};
use cadastre_core::Addr;

/// Whether a config is host-local's own, with ranges to assign addresses of.
pub(super) fn is_meant(config: &Config) -> bool {
    let named = config.get::<String>(&["ipam", "type"]);
    config.has(&["ipam", "ranges"])
        || config.has(&["ipam", "subnet"])
        || config.has(&["runtimeConfig", "ipRanges"])
        || named.is_ok_and(|name| name.as_deref() == Some("host-local"))
}

/// Makes an error with the code that almost every error of host-local has.
fn internal(text: impl Into<String>) -> CniError {
    CniError::new(INTERNAL, text)
}

/// Does a command, and returns what goes to standard output.
pub(super) fn run(
    command: &str,
    env: &Env,
    config: &Config,
    version: &str,
) -> Result<String, CniError> {
    let load = |args| HostLocal::load(config, version, args);
    match command {
        "GC" => return gc(config).map(|()| String::new()),
        // Ranges may come with each ADD, as a capability. That all addresses are in use is no failure: it
        // would make the node unfit for the pods that it has.
        "STATUS" => {
            let usable = load("").and_then(|_| store::usable(&dir(config)?));
            return usable
                .map(|()| String::new())
                .map_err(|text| CniError::new(NOT_AVAILABLE, text));
        }
        _ => {}
    }
    let ours = load(&env.args).and_then(HostLocal::with_ranges);
    let ours = ours.map_err(internal)?;
    match command {
        "ADD" => return Ok(add(env, config, ours)?.render(version)),
        "DEL" => del(env, config, &ours)?,
        _ => check(env, config, &ours)?,
    }
    Ok(String::new())
}

fn dir(config: &Config) -> Result<std::path::PathBuf, String> {
    let data_dir: String = config.get_or_default(&["ipam", "dataDir"])?;
    Ok(store::dir(&data_dir, &config.name))
}

fn open(config: &Config) -> Result<Store, CniError> {
    dir(config)
        .and_then(|dir| Store::open(&dir))
        .map_err(internal)
}

/// Assigns an address of each range set.
fn add(env: &Env, config: &Config, ours: HostLocal) -> Result<CniResult, CniError> {
    let mut result = CniResult {
        routes: ours.routes,
        ..CniResult::default()
    };
    if !ours.resolv_conf.is_empty() {
        result.dns = resolv::read(&ours.resolv_conf).map_err(internal)?;
    }
    netns::check(env)?;
    let mut store = open(config)?;
    let owner = Owner::new(&env.container_id, &env.ifname);
    let assigned = assign(&mut store, &owner, &ours.sets, ours.requested);
    store.save_index();
    result.ips = assigned.map_err(internal)?;
    Ok(result)
}

/// Assigns an address of all sets or of none.
fn assign(
    store: &mut Store,
    owner: &Owner,
    sets: &[RangeSet],
    mut requested: Vec<Addr>,
) -> Result<Vec<Ip>, String> {
    let mut assigned = Vec::new();
    let mut error = None;
    for (i, set) in sets.iter().enumerate() {
        let wanted = requested.iter().position(|&ip| set.range_of(ip).is_some());
        let one = match wanted.map(|at| requested.remove(at)) {
            Some(ip) => exactly(store, owner, i, set, ip),
            None => next(store, owner, i, set),
        };
        match one {
            Ok(ip) => assigned.push(ip),
            Err(text) => {
                error = Some(format!("range set {i}: {text}"));
                break;
            }
        }
    }
    let others: Vec<String> = requested.iter().map(ToString::to_string).collect();
    if error.is_none() && others.is_empty() {
        return Ok(assigned);
    }
    // As host-local does, once for each assigned address: the first time all files of the owner are removed,
    // the second time those of its container without interface.
    for _ in assigned {
        store.release(owner);
    }
    Err(error.unwrap_or_else(|| {
        let others = others.join(" ");
        format!(
            "the requested addresses {others} are in no range set, or in one with another of them"
        )
    }))
}

/// Assigns the address that was asked for.
fn exactly(
    store: &mut Store,
    owner: &Owner,
    i: usize,
    set: &RangeSet,
    ip: Addr,
) -> Result<Ip, String> {
    match set.range_of(ip) {
        Some(span) if ip == span.gateway => Err(format!(
            "the requested address {ip} is the gateway: request another"
        )),
        Some(span) if store.reserve(owner, ip, i)? => Ok(span.assign(ip)),
        _ => Err(format!(
            "the requested address {ip} is in use: request another"
        )),
    }
}

/// Assigns the next free address.
fn next(store: &mut Store, owner: &Owner, i: usize, set: &RangeSet) -> Result<Ip, String> {
    let mut assigned = store.addresses(owner).into_iter();
    if let Some(ip) = assigned.find(|&ip| set.range_of(ip).is_some()) {
        return Err(format!(
            "the attachment has the address {ip} already: delete it before it is added again"
        ));
    }
    for (ip, span) in set.from(store.cursor(i)) {
        if store.reserve(owner, ip, i)? {
            return Ok(span.assign(ip));
        }
    }
    Err(format!(
        "no address of {set} is free: enlarge the ranges, or delete pods"
    ))
}

/// Releases the addresses of an attachment; to have none is a success.
fn del(env: &Env, config: &Config, ours: &HostLocal) -> Result<(), CniError> {
    let mut store = open(config)?;
    let owner = Owner::new(&env.container_id, &env.ifname);
    for _ in &ours.sets {
        store.release(&owner);
    }
    store.save_index();
    netns::check(env)
}

/// Checks that an attachment has an address and, which host-local does not, those of the previous result
/// that are in these ranges.
fn check(env: &Env, config: &Config, ours: &HostLocal) -> Result<(), CniError> {
    let owner = Owner::new(&env.container_id, &env.ifname);
    let store = open(config)?;
    let id = &env.container_id;
    if !store.has_any(&owner) {
        return Err(internal(format!(
            "container {id} has no address: delete it and add it again"
        )));
    }
    let mut previous = config.previous().into_iter();
    let lost = previous.find(|&ip| {
        let ours = ours.sets.iter().any(|set| set.range_of(ip).is_some());
        ours && !store.has(&owner, ip)
    });
    match lost {
        None => Ok(()),
        Some(ip) => Err(internal(format!(
            "container {id} has no longer the address {ip} of its previous result: delete it and add it again"
        ))),
    }
}

/// Releases what belongs to no valid attachment.
fn gc(config: &Config) -> Result<(), CniError> {
    let valid = config.valid()?;
    if dir(config).map_err(internal)?.is_dir() {
        let mut store = open(config)?;
        store.collect(&valid);
        store.save_index();
    }
    Ok(())
}
