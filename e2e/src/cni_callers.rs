//! Concurrent callers of a CNI IPAM plugin, which record every call.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use fastrand::Rng;
use serde_json::{Value, json};

use crate::linearizability::{Call, Outcome, Verb};

/// How long after the end a container must have been deleted, which is longer than the timeouts of all plugins.
const PATIENCE: Duration = Duration::from_secs(300);

/// A plugin and its configuration on one node.
#[derive(Clone, Debug)]
pub struct Network {
    /// The path of the plugin
    pub plugin: PathBuf,
    /// The section `ipam` of the network's configuration. If the plugin also reads keys outside of the section, this
    /// is the configuration with these keys and the section
    pub ipam: Value,
    /// A file that takes the place of the containers' network namespaces
    pub netns: PathBuf,
    /// Whether each container is the sandbox of a pod of the same name. Otherwise containers belong to no pod
    pub with_pods: bool,
    /// Whether the plugin implements CHECK
    pub with_checks: bool,
    /// Which plugins of [`Callers`] are killed at work
    pub kills: Kills,
}

impl Network {
    /// Calls the plugin once. Returns the outcome, and the address that an ADD has assigned. `address` is that of a
    /// CHECK.
    pub fn call(&self, verb: Verb, container: &str, address: &str) -> Result<(Outcome, String)> {
        let output = self.spawn(verb, container, address)?.wait_with_output()?;
        result_of(verb, address, &output)
    }

    /// Starts the plugin as a runtime's main plugin does.
    fn spawn(&self, verb: Verb, container: &str, address: &str) -> Result<Child> {
        let mut config = match self.ipam.get("ipam") {
            Some(_) => self.ipam.clone(),
            None => json!({"ipam": self.ipam}),
        };
        config["cniVersion"] = Value::from("1.0.0");
        config["name"] = Value::from("net");
        let command = match verb {
            Verb::Add => "ADD",
            Verb::Del => "DEL",
            Verb::Check => {
                let ips = json!([{"address": format!("{address}/32")}]);
                config["prevResult"] = json!({"cniVersion": "1.0.0", "ips": ips});
                "CHECK"
            }
        };
        let mut call = Command::new(&self.plugin);
        call.env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", &self.netns)
            .env("CNI_PATH", "/nonexistent")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        if self.with_pods {
            let pod = format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME={container}");
            call.env("CNI_ARGS", format!("IgnoreUnknown=1;{pod}"));
        }
        let what = || format!("cannot run {}", self.plugin.display());
        let mut child = call.spawn().with_context(what)?;
        let mut stdin = child.stdin.take().context("the input is a pipe")?;
        // The error is ignored, because a plugin that ends without reading its input closes the pipe.
        let _ = stdin.write_all(config.to_string().as_bytes());
        Ok(child)
    }
}

/// Returns the outcome of a call, and its address. The codes of errors after which nothing has changed are those of
/// `cadastre-ipam` (docs/node.md).
fn result_of(verb: Verb, address: &str, output: &Output) -> Result<(Outcome, String)> {
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    if output.status.success() {
        let assigned = said["ips"][0]["address"].as_str();
        let assigned = assigned.and_then(|it| Some(it.split_once('/')?.0));
        ensure!(
            assigned.is_some() == (verb == Verb::Add),
            "{verb:?}: {said}"
        );
        return Ok((Outcome::Ok, assigned.unwrap_or(address).to_owned()));
    }
    let outcome = match said["code"].as_u64() {
        Some(100..=106) => Outcome::Refused,
        _ => Outcome::Unknown,
    };
    Ok((outcome, address.to_owned()))
}

/// How often plugins are killed.
#[derive(Clone, Copy, Debug)]
pub struct Kills {
    /// One in so many plugins is killed
    pub one_in: u32,
    /// The maximum time from the start of a plugin until it is killed
    pub within: Duration,
}

impl Default for Kills {
    fn default() -> Self {
        Self {
            one_in: 8,
            within: Duration::from_millis(20),
        }
    }
}

/// Running callers. Each caller runs one container after the other, as a kubelet does: one or more ADDs, CHECKs, and
/// DELs until one succeeds. Some plugins are killed at work.
#[derive(Debug)]
pub struct Callers(Vec<JoinHandle<Result<Caller>>>);

/// What callers have recorded.
#[derive(Debug, Default)]
pub struct Record {
    /// All calls, in no order
    pub calls: Vec<Call>,
    /// The containers that still have an address at the end, with the addresses, sorted
    pub in_use: Vec<(String, String)>,
}

impl Callers {
    /// Starts callers that work for `duration`. The seed determines their random choices.
    pub fn start(network: &Network, count: usize, seed: u64, duration: Duration) -> Self {
        let network = Arc::new(network.clone());
        let start = Instant::now();
        let mut seeds = Rng::with_seed(seed);
        let threads = (0..count).map(|number| {
            let caller = Caller {
                number,
                random: seeds.fork(),
                network: Arc::clone(&network),
                start,
                end: start + duration,
                record: Record::default(),
            };
            thread::spawn(move || caller.work())
        });
        Self(threads.collect())
    }

    /// Waits until all callers have finished, and returns what they have recorded. Blocks the thread.
    pub fn join(self) -> Result<Record> {
        let mut all = Record::default();
        for thread in self.0 {
            let caller = thread.join().map_err(|_| anyhow!("a caller panicked"))??;
            all.calls.extend(caller.record.calls);
            all.in_use.extend(caller.record.in_use);
        }
        all.in_use.sort();
        Ok(all)
    }
}

#[derive(Debug)]
struct Caller {
    number: usize,
    random: Rng,
    network: Arc<Network>,
    start: Instant,
    end: Instant,
    record: Record,
}

impl Caller {
    fn work(mut self) -> Result<Self> {
        let mut count = 0;
        while Instant::now() < self.end {
            count += 1;
            self.run(&format!("{}-{count}", self.number))?;
        }
        Ok(self)
    }

    fn run(&mut self, container: &str) -> Result<()> {
        let mut address = None;
        for _ in 0..self.random.u32(1..=3) {
            address = self.call(Verb::Add, container, "")?.or(address);
        }
        if let Some(address) = &address {
            let checks = if self.network.with_checks { 3 } else { 1 };
            for _ in 0..self.random.u32(0..checks) {
                self.call(Verb::Check, container, address)?;
            }
            let last = self.record.calls.last();
            if Instant::now() >= self.end && last.is_some_and(|it| it.outcome == Outcome::Ok) {
                let kept = (container.to_owned(), address.clone());
                self.record.in_use.push(kept);
                return Ok(());
            }
        }
        while self.call(Verb::Del, container, "")?.is_none() {
            ensure!(
                Instant::now() < self.end + PATIENCE,
                "container {container} cannot be deleted"
            );
        }
        if let Some(address) = address
            && self.network.with_checks
            && self.random.u32(0..3) == 0
        {
            self.call(Verb::Check, container, &address)?;
            self.call(Verb::Del, container, "")?;
        }
        Ok(())
    }

    /// Calls the plugin once, and perhaps kills it. Returns the address if the call succeeded.
    fn call(&mut self, verb: Verb, container: &str, address: &str) -> Result<Option<String>> {
        let start = self.now()?;
        let mut child = self.network.spawn(verb, container, address)?;
        let Kills { one_in, within } = self.network.kills;
        if self.random.u32(0..one_in) == 0 {
            thread::sleep(within.mul_f64(self.random.f64()));
            child.kill()?;
        }
        let (outcome, address) = result_of(verb, address, &child.wait_with_output()?)?;
        self.record.calls.push(Call {
            verb,
            container: container.to_owned(),
            address: address.clone(),
            outcome,
            start,
            end: self.now()?,
            caller: self.number,
        });
        Ok((outcome == Outcome::Ok).then_some(address))
    }

    /// Nanoseconds since the start of all callers.
    fn now(&self) -> Result<u64> {
        Ok(u64::try_from(self.start.elapsed().as_nanos())?)
    }
}
