//! A drop-in replacement for the CNI plugin host-local, with the same configuration, state directory, results and
//! error codes.
//!
//! A test compares this module with host-local 1.9.1. There are intended differences, which `docs/host-local.md` lists.
//! Each difference improves the behaviour, and does no harm if an administrator switches back to host-local.
//!
//! | file | subject |
//! |---|---|
//! | `config` | reads and checks the configuration |
//! | `ranges` | address ranges, and the order in which addresses are tried |
//! | `store` | the state directory |
//! | `index` | an index of the files' contents, so that a call need not read all files |
//! | `resolv` | DNS settings from the file that `resolvConf` names |

mod config;
mod index;
mod ranges;
mod resolv;
mod store;

use config::HostLocal;
use ranges::RangeSet;
use store::{Owner, Store};

use super::address::parse_ip;
use super::config::Config;
use super::error::{CniError, INTERNAL, NOT_AVAILABLE};
use super::netns;
use super::request::Env;
use super::result::{CniResult, Ip};
use cadastre_core::Addr;

/// Returns whether a config is meant for host-local. That is the case if the config has address ranges of its own or
/// names the type `host-local`.
pub(super) fn is_meant(config: &Config) -> bool {
    let named = config.get::<String>(&["ipam", "type"]);
    config.has(&["ipam", "ranges"])
        || config.has(&["ipam", "subnet"])
        || config.has(&["runtimeConfig", "ipRanges"])
        || named.is_ok_and(|name| name.as_deref() == Some("host-local"))
}

/// Returns an error with the code that host-local uses for nearly every error.
fn internal(text: impl Into<String>) -> CniError {
    CniError::new(INTERNAL, text)
}

/// Runs a CNI command, and returns the text for standard output.
pub(super) fn run(
    command: &str,
    env: &Env,
    config: &Config,
    version: &str,
) -> Result<String, CniError> {
    let load = |args| HostLocal::load(config, version, args);
    match command {
        "GC" => return gc(config).map(|()| String::new()),
        // STATUS succeeds without ranges, because each ADD can bring ranges as a capability. STATUS also succeeds if
        // all addresses are in use, because a failing STATUS would make the node unusable for its existing pods.
        "STATUS" => {
            let usable = load("").and_then(|_| store::usable(&dir(config)?));
            return usable
                .map(|()| String::new())
                .map_err(|text| CniError::new(NOT_AVAILABLE, text));
        }
        _ => {}
    }
    let ours = load(&env.args).map_err(internal)?;
    if ours.sets.is_empty() {
        return Err(internal(
            "the network config has no ranges: write ipam.ranges or ipam.subnet",
        ));
    }
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

/// Runs an ADD, which assigns an address of each range set.
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

/// Assigns an address of each set. If a set has no free address, releases the addresses that were just assigned from
/// the other sets.
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
    // Releases once for each assigned address, as host-local does. The first call removes all files of the owner. The
    // second call removes those files that name only the owner's container, without an interface.
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

/// Assigns the address `ip` of a range set, because the ADD requests this address. Fails if the address is in use or is
/// the gateway.
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

/// Assigns the next free address of a set.
fn next(store: &mut Store, owner: &Owner, i: usize, set: &RangeSet) -> Result<Ip, String> {
    let names = store.names(owner);
    let mut assigned = names.iter().filter_map(|name| parse_ip(name));
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

/// Runs a DEL, which releases the addresses of an attachment. The DEL also succeeds if the attachment has no address.
fn del(env: &Env, config: &Config, ours: &HostLocal) -> Result<(), CniError> {
    let mut store = open(config)?;
    let owner = Owner::new(&env.container_id, &env.ifname);
    for _ in &ours.sets {
        store.release(&owner);
    }
    store.save_index();
    netns::check(env)
}

/// Runs a CHECK. The attachment must have an address, and it must have every address of the previous result that lies
/// in the ranges of `ours`. host-local checks only that the attachment has an address.
fn check(env: &Env, config: &Config, ours: &HostLocal) -> Result<(), CniError> {
    let owner = Owner::new(&env.container_id, &env.ifname);
    let names = open(config)?.names(&owner);
    let id = &env.container_id;
    if names.is_empty() {
        return Err(internal(format!(
            "container {id} has no address: delete it and add it again"
        )));
    }
    let mut previous = config.previous().into_iter();
    let lost = previous.find(|&ip| {
        let ours = ours.sets.iter().any(|set| set.range_of(ip).is_some());
        ours && !names.contains(&ip.to_string())
    });
    match lost {
        None => Ok(()),
        Some(ip) => Err(internal(format!(
            "container {id} has no longer the address {ip} of its previous result: delete it and add it again"
        ))),
    }
}

/// Runs a GC, which releases the addresses of attachments that are not valid.
fn gc(config: &Config) -> Result<(), CniError> {
    let valid = config.valid()?;
    if dir(config).map_err(internal)?.is_dir() {
        let mut store = open(config)?;
        store.collect(&valid);
        store.save_index();
    }
    Ok(())
}
