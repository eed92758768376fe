//! The plugin on addresses of the node: it asks the agent, or the agent's store where none answers.

mod config;

use std::time::Duration;

use config::{Places, Wishes};

use super::Ask;
use super::attachments;
use super::error::{CniError, INVALID_CONFIG, INVALID_ENVIRONMENT, INVALID_NETNS, NOT_AVAILABLE};
use super::golang;
use super::json::Value;
use super::netns;
use super::request::{Config, Env};
use super::result::{CniResult, Route};
use super::routes;
use crate::{Add, Answer, Attachment, Check, Gc, Op, Refusal, Why};

/// How long an ADD may take: longer than an agent waits for a block.
const ADD_TIMEOUT: Duration = Duration::from_secs(20);

/// How long anything else may take. Runtimes ask for the status every few seconds.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Something to do, from a request.
struct Task {
    places: Places,
    op: Op,
    timeout: Duration,
    /// Whether the config names pools
    by_name: bool,
    /// What the config adds to the pool's routes
    routes: Vec<Route>,
}

/// Does a command; the answer is what goes to standard output.
pub(super) fn run(
    command: &str,
    env: &Env,
    config: &Config<'_>,
    version: &str,
    ask: Ask<'_>,
) -> Result<String, CniError> {
    let status = command == "STATUS";
    let task = task(command, env, config).map_err(|error| {
        // A config that no ADD can be served with is a reason to say so.
        let code = if status { NOT_AVAILABLE } else { error.code };
        CniError { code, ..error }
    })?;
    let Places { socket, store } = &task.places;
    let answer = ask(socket, store, &task.op, task.timeout);
    // It is the pools for every pod that the node was asked about; those that the config names may be
    // held all the same.
    let others = |refusal: &Refusal| refusal.why == Why::NothingHeld && task.by_name;
    if status && answer.as_ref().is_err_and(others) {
        return Ok(String::new());
    }
    match answer.map_err(|refusal| CniError::refused(refusal, status))? {
        Answer::Given(given) => {
            let mut result = CniResult::from(given);
            result.add_routes(task.routes);
            Ok(result.render(version))
        }
        Answer::Done => Ok(String::new()),
    }
}

fn task(command: &str, env: &Env, config: &Config<'_>) -> Result<Task, CniError> {
    let root = config.root;
    let places = Places::read(root)?;
    let mut by_name = false;
    let mut routes = Vec::new();
    let op = match command {
        "ADD" => {
            routes = routes::routes(root).map_err(|text| CniError::new(INVALID_CONFIG, text))?;
            let wishes = Wishes::read(root, &env.args)?;
            if !env.any_netns() && netns::is_own(&env.netns) {
                let msg = format!("{}; nothing was given", netns::OWN);
                return Err(CniError::new(INVALID_NETNS, msg));
            }
            Op::Add(Add {
                attachment: attachment(env, config)?,
                netns: golang::text(&env.netns),
                pod: wishes.pod,
                pools: wishes.pools,
                addresses: wishes.addresses,
                decided: false,
                bound: Vec::new(),
            })
        }
        "DEL" => Op::Del(attachment(env, config)?),
        "CHECK" => {
            if root.get("prevresult").is_none() {
                let msg = "CHECK needs `prevResult` in the config: the runtime has to pass what ADD answered";
                return Err(CniError::new(INVALID_CONFIG, msg));
            }
            Op::Check(Check {
                attachment: attachment(env, config)?,
                addresses: attachments::previous(root),
            })
        }
        "GC" => {
            let valid = attachments::valid(root)?.into_iter();
            let text =
                |(id, ifname): (Vec<u8>, Vec<u8>)| (golang::text(&id), golang::text(&ifname));
            Op::Gc(Gc {
                network: config.name.clone(),
                valid: valid.map(text).collect(),
            })
        }
        _ => {
            by_name = !Wishes::read(root, b"")?.pools.is_empty();
            Op::Status
        }
    };
    let timeout = match op {
        Op::Add(_) => ADD_TIMEOUT,
        _ => TIMEOUT,
    };
    Ok(Task {
        places,
        op,
        timeout,
        by_name,
        routes,
    })
}

fn attachment(env: &Env, config: &Config<'_>) -> Result<Attachment, CniError> {
    let text = |bytes: &[u8], what: &str| {
        String::from_utf8(bytes.to_owned()).map_err(|_| {
            let msg = format!("{what} {} is no UTF-8", golang::quote(bytes));
            CniError::new(INVALID_ENVIRONMENT, msg)
        })
    };
    Ok(Attachment {
        network: config.name.clone(),
        container_id: text(&env.container_id, "CNI_CONTAINERID")?,
        ifname: text(&env.ifname, "CNI_IFNAME")?,
    })
}

/// Refuses a config that asks for both: addresses of its own ranges and of the node's pools.
pub(super) fn check_alone(root: &Value) -> Result<(), CniError> {
    let ipam = root.get("ipam");
    let mut keys = ["pools", "addresses"].into_iter();
    let both = keys.find(|key| ipam.is_some_and(|ipam| ipam.get(key).is_some()));
    let Some(key) = both else {
        return Ok(());
    };
    let msg = format!(
        "ipam has ranges of its own (`subnet`, `ranges` or the capability `ipRanges`) and `{key}`: take one of them out, for addresses come either from the config's ranges or from the node's pools"
    );
    Err(CniError::new(INVALID_CONFIG, msg))
}
