//! The main loop around the state machine: it passes events to the state machine and carries out the effects, and makes
//! no decisions itself.
//!
//! One task owns the [`AgentMachine`]. Slow work (the store, the runtime, the API server) runs in other tasks, whose
//! results come back as events.

use std::time::Duration;

use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::carry::Carrier;
use super::cri::Runtime;
use super::files::kept::KeptFiles;
use super::leak_verifier::LeakVerifier;
use super::machine::{self, AgentEvent, AgentMachine};
use super::parts::{AgentParts, AgentSettings};
use super::pods;
use super::seen;
use cadastre_api::{NodeAddressesLite, NodeLite, NodeSubnetLite, PodLite};
use cadastre_daemon::watch::{LastHeard, Pauses, SilenceTimeouts, WatchSource, follow};
use cadastre_node::clock;

/// At most this many watch events wait for the loop; then the watches pause.
const BACKLOG: usize = 256;
/// The first and the longest pause of a watch before it retries after an error, both without jitter.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(20));
/// At most this many objects are in a page of a list. Pages are small because a whole page is in memory at once.
const PAGE: u32 = 50;

/// Runs the loop until the stop token is cancelled, and then until the questions and writes under way are answered.
/// Returns only errors that an administrator must resolve.
pub async fn run(
    settings: AgentSettings,
    parts: AgentParts,
    files: KeptFiles,
) -> anyhow::Result<()> {
    let (out, events) = mpsc::channel(BACKLOG);
    let seed = seed(&settings.node);
    let _following = follow_all(&settings.node, &parts, seed, out);
    let decisions = machine::MachineSettings {
        node: settings.node.clone(),
        publish_interval: settings.publish_interval,
        addresses_interval: settings.addresses_interval,
        leak_grace: settings.leak_grace,
        masquerade: settings.masquerade,
        cni_conf: files.cni_conf().map(ToOwned::to_owned),
        network: files.network(),
    };
    let witnesses = LeakVerifier {
        client: parts.client.clone(),
        node: settings.node.clone(),
        runtime: settings.cri.as_deref().map(Runtime::new),
    };
    let shell = Shell {
        machine: AgentMachine::new(decisions, seed, &clock::now()),
        carrier: Carrier::new(settings, parts, witnesses, files),
    };
    shell.run(events).await
}

/// Starts the watches of the objects of this node.
fn follow_all(
    node: &str,
    parts: &AgentParts,
    seed: u64,
    out: mpsc::Sender<AgentEvent>,
) -> JoinSet<()> {
    let by_name = format!("metadata.name={node}");
    let of_node = format!("spec.nodeName={node}");
    let client = || parts.client.clone();
    let heard = || parts.readiness.last_heard();
    let mut following = JoinSet::new();
    following.spawn(follow(
        source::<NodeLite>("nodes", client(), &by_name, seed, heard()),
        out.clone(),
        seen::node,
        |step| Some(AgentEvent::Node(step)),
    ));
    following.spawn(follow(
        source::<NodeSubnetLite>(
            "nodesubnets",
            client(),
            &by_name,
            seed.rotate_left(16),
            heard(),
        ),
        out.clone(),
        seen::subnet,
        |step| Some(AgentEvent::Subnet(step)),
    ));
    following.spawn(follow(
        source::<NodeAddressesLite>(
            "nodeaddresses",
            client(),
            &by_name,
            seed.rotate_left(48),
            heard(),
        ),
        out.clone(),
        seen::addresses,
        |step| Some(AgentEvent::Addresses(step)),
    ));
    following.spawn(follow(
        source::<PodLite>("pods", client(), &of_node, seed.rotate_left(32), heard()),
        out,
        pods::read,
        |step| Some(AgentEvent::Pod(step)),
    ));
    following
}

/// Returns the source of a watch of the objects that the field selector `fields` selects. The API server has an index
/// for the fields that the agent selects by.
fn source<K>(
    kind: &'static str,
    client: Client,
    fields: &str,
    seed: u64,
    heard: LastHeard,
) -> WatchSource<K>
where
    K: kube::Resource<DynamicType = ()>,
{
    WatchSource {
        kind,
        api: Api::all(client),
        fields: Some(fields.to_owned()),
        page: Some(PAGE),
        pauses: Pauses::new(PAUSE.0, PAUSE.1, seed),
        doubtful: true,
        patience: SilenceTimeouts::default(),
        heard,
    }
}

/// Returns a hash of the node's name: the same at each start, and different between nodes.
fn seed(node: &str) -> u64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    node.bytes().fold(0xcbf2_9ce4_8422_2325, mix)
}

struct Shell {
    machine: AgentMachine,
    carrier: Carrier,
}

impl Shell {
    async fn run(mut self, mut events: mpsc::Receiver<AgentEvent>) -> anyhow::Result<()> {
        let service = self.carrier.service();
        let stop = self.carrier.stop();
        loop {
            let wake = self.turn()?;
            let pause = wake.saturating_sub(clock::since_boot());
            tokio::select! {
                Some(event) = events.recv() => {
                    self.on(event);
                    // Record all events that have arrived before the next turn, so that its decisions take account of
                    // them all.
                    while let Ok(event) = events.try_recv() {
                        self.on(event);
                    }
                }
                Some(answer) = self.carrier.answer() => self.on(answer?),
                () = service.changed.notified() => self.on(AgentEvent::Changed),
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => break,
            }
        }
        while self.machine.is_busy() {
            match self.carrier.answer().await {
                Some(answer) => self.on(answer?),
                None => break,
            }
        }
        Ok(())
    }

    fn on(&mut self, event: AgentEvent) {
        self.machine.on(event, &clock::now());
    }

    /// Runs turns of the machine until no effect has an immediate answer. Returns the time since boot of the next turn.
    fn turn(&mut self) -> anyhow::Result<Duration> {
        loop {
            let now = clock::now();
            let serving = self.carrier.serving(now.since_boot);
            let mut effects = Vec::new();
            let wake = self.machine.turn(serving, &now, &mut effects);
            let mut answers = Vec::new();
            for effect in effects {
                answers.extend(self.carrier.begin(effect)?);
            }
            if answers.is_empty() {
                return Ok(wake);
            }
            for answer in answers {
                self.on(answer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_differ_in_their_seed() {
        assert_ne!(seed("n1"), seed("n2"));
        assert_eq!(seed("n1"), seed("n1"));
    }
}
