//! Calls that concern addresses of the node's blocks and podCIDRs. The plugin sends the operation to the agent, or uses
//! the store if no agent answers.

mod config;
mod whereabouts;

use std::time::Duration;

use config::{Paths, RequestedAddresses, wrong};
use whereabouts::RangedNetwork;

use super::AddressService;
use super::config::Config;
use super::error::{CniError, NOT_AVAILABLE};
use super::netns;
use super::request::Env;
use super::result::{CniResult, Route};
use super::version;
use crate::{Add, Attachment, Check, Gc, Op, OpError, OpErrorKind, OpOutcome};

/// Maximum duration of an ADD. The limit is longer than the time that the agent waits for a block.
const ADD_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum duration of every command except ADD. The limit is short because container runtimes call STATUS every few
/// seconds.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The operation that a CNI call requests, and what is needed to perform it.
struct Task {
    paths: Paths,
    op: Op,
    timeout: Duration,
    /// Whether the config names pools, or has a range that selects a pool. Only STATUS uses this value
    names_pools: bool,
    /// The fields of whereabouts in the config, which determine the result of ADD; `None` in all other configs
    network: Option<RangedNetwork>,
    /// Routes of the config, which are added to the routes of the pool
    routes: Vec<Route>,
}

/// Returns the versions of the CNI protocol that a config may have.
pub(super) fn versions(config: &Config) -> &'static [&'static str] {
    if whereabouts::is_meant(config) {
        version::ALL
    } else {
        version::OWN
    }
}

/// Runs a CNI command, and returns the text for standard output.
pub(super) fn run(
    command: &str,
    env: &Env,
    config: &Config,
    version: &str,
    ask: AddressService<'_>,
) -> Result<String, CniError> {
    let status = command == "STATUS";
    let task = task(command, env, config).map_err(|error| {
        // With an invalid config no ADD can be served, so STATUS reports that the CNI plugin is not available.
        let code = if status { NOT_AVAILABLE } else { error.code };
        CniError { code, ..error }
    })?;
    let Paths { socket, store } = &task.paths;
    let answer = ask(socket, store, &task.op, task.timeout);
    // STATUS considers only blocks that the node has now. If the config names pools, the node can get a block of these
    // pools when a pod needs one. In this case, the absence of blocks is no error.
    let is_expected = |refusal: &OpError| refusal.why == OpErrorKind::NoBlock && task.names_pools;
    if status && answer.as_ref().is_err_and(is_expected) {
        return Ok(String::new());
    }
    match answer.map_err(|refusal| CniError::refused(refusal, status))? {
        OpOutcome::Assigned(assignment) => {
            let result = if let Some(network) = task.network {
                network.result(&assignment)?
            } else {
                let mut result = CniResult::from(assignment);
                result.add_routes(task.routes);
                result
            };
            Ok(result.render(version))
        }
        OpOutcome::Done => Ok(String::new()),
    }
}

fn task(command: &str, env: &Env, config: &Config) -> Result<Task, CniError> {
    let paths = Paths::read(config)?;
    let mut names_pools = false;
    let mut network = None;
    let mut routes = Vec::new();
    let attachment = || Attachment {
        network: config.name.clone(),
        container_id: env.container_id.clone(),
        ifname: env.ifname.clone(),
    };
    let op = match command {
        "ADD" => {
            network = RangedNetwork::read(config).map_err(wrong)?;
            routes = config.get_or_default(&["ipam", "routes"]).map_err(wrong)?;
            let requested = RequestedAddresses::read(config, &env.args)?;
            netns::check(env)?;
            Op::Add(Add {
                attachment: attachment(),
                netns: env.netns.clone(),
                pod: requested.pod,
                pools: requested.pools,
                addresses: requested.addresses,
                limits: network.as_ref().map(|it| Box::new(it.limits.clone())),
                parent: config.get_or_default(&["master"]).map_err(wrong)?,
                ..Add::default()
            })
        }
        "DEL" => Op::Del(attachment()),
        "CHECK" if !config.has(&["prevResult"]) => {
            return Err(wrong(
                "CHECK needs `prevResult` in the network config: the runtime has to pass the result of ADD",
            ));
        }
        "CHECK" => Op::Check(Check {
            attachment: attachment(),
            addresses: config.previous(),
        }),
        "GC" => {
            let valid = config.valid()?.into_iter();
            Op::Gc(Gc {
                network: config.name.clone(),
                valid: valid.map(|it| (it.container_id, it.ifname)).collect(),
            })
        }
        _ => {
            network = RangedNetwork::read(config).map_err(wrong)?;
            let names = !RequestedAddresses::read(config, "")?.pools.is_empty();
            names_pools = names || network.is_some();
            Op::Status
        }
    };
    let timeout = match op {
        Op::Add(_) => ADD_TIMEOUT,
        _ => TIMEOUT,
    };
    Ok(Task {
        paths,
        op,
        timeout,
        names_pools,
        network,
        routes,
    })
}

/// Fails if a config asks for addresses of the node's pools although it has ranges of its own.
pub(super) fn check_no_pools(config: &Config) -> Result<(), CniError> {
    let mut keys = ["pools", "addresses", "range", "ipRanges"].into_iter();
    match keys.find(|key| config.has(&["ipam", key])) {
        None => Ok(()),
        Some(key) => Err(wrong(format!(
            "ipam has ranges of its own (`subnet`, `ranges` or the capability `ipRanges`) and `{key}`: remove one of them, for addresses come either from the config's ranges or from the node's pools"
        ))),
    }
}
