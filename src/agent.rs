//! `cadastre agent`: opens the sockets, starts the agent, and stops everything in order.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::{Notify, broadcast, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::daemon::{self, AdminPort, Guard};
use cadastre_agent::announce::reload::Reload;
use cadastre_agent::announce::{AnnounceTemplate, Announcement, BIRD};
use cadastre_agent::events::Events;
use cadastre_agent::files::conflist::{BRIDGE, Facts, PTP, Template};
use cadastre_agent::files::kept::{KeptFiles, WantedFiles};
use cadastre_agent::files::subnet_env::Links;
use cadastre_agent::leaks::Reasons;
use cadastre_agent::ledger::LedgerClient;
use cadastre_agent::machine::{MachineSettings, STARTING};
use cadastre_agent::metrics::AgentMetrics;
use cadastre_agent::probe::Prober;
use cadastre_agent::run::AgentParts;
use cadastre_agent::service::Service;
use cadastre_agent::shared::SharedState;
use cadastre_agent::unix::{OnlyOne, Socket};
use cadastre_agent::{files, grpc, plugin_socket, run};
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_daemon::client;
use cadastre_daemon::client::Options;
use cadastre_daemon::telemetry::logs;
use cadastre_node::clock;

/// Assign addresses to the pods of this node, from the ranges in its NodeSubnet
///
/// One agent runs on each node, on the host's network, and answers the CNI plugin cadastre-ipam. The agent finds the
/// cluster by --kubeconfig, KUBECONFIG, ~/.kube/config or the pod's service account, in this order.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(super) struct Args {
    /// Name of this host's Node; by default the hostname
    #[arg(long, env = "NODE_NAME")]
    node_name: Option<String>,

    /// Kubeconfig file of the cluster
    #[arg(long, env = "CADASTRE_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,

    /// Context in the kubeconfig
    #[arg(long, env = "CADASTRE_CONTEXT")]
    context: Option<String>,

    /// Path of the Unix socket on which the agent listens for the CNI plugin
    #[arg(
        long,
        env = "CADASTRE_CNI_SOCKET",
        default_value = "/run/cadastre/cni.sock"
    )]
    cni_socket: PathBuf,

    /// Path of the Unix socket of the gRPC API, for other programs on this node
    #[arg(
        long,
        env = "CADASTRE_SOCKET",
        default_value = "/run/cadastre/agent.sock"
    )]
    socket: PathBuf,

    /// File that records which pod has which address. It need not survive reboots, which end all pods, so it should be
    /// in memory (tmpfs): then no ADD or DEL waits for a disk
    #[arg(
        long,
        env = "CADASTRE_STORE",
        default_value = "/run/cadastre/node.redb"
    )]
    store: PathBuf,

    /// File that records the ranges of the node and the settings of their pools; it must survive reboots
    #[arg(
        long,
        env = "CADASTRE_HOLDINGS",
        default_value = "/var/lib/cadastre/holdings.json"
    )]
    holdings: PathBuf,

    /// Socket of the container runtime (CRI). The runtime's list of sandboxes proves leaks, and shows which addresses
    /// are in use if the store was lost. Without this flag, the agent only looks at network namespaces
    #[arg(long, env = "CADASTRE_CRI_SOCKET")]
    cri_socket: Option<PathBuf>,

    /// Seconds that an ADD waits for a block if the node has no free address; no ADD waits beyond the CNI plugin's own
    /// deadline
    #[arg(long, env = "CADASTRE_ADD_WAIT", default_value = "5", value_parser = seconds)]
    add_wait: Duration,

    /// Seconds between writes of NodeSubnet.status. Urgent changes are written at once
    #[arg(long, env = "CADASTRE_PUBLISH_INTERVAL", default_value = "30", value_parser = seconds)]
    publish_interval: Duration,

    /// Seconds between writes of this node's NodeAddresses, the list of addresses in use. Two kinds of changes are
    /// written as often as NodeSubnet.status: those that a user or the controller waits for, and those that no other
    /// object would preserve if the store were lost
    #[arg(long, env = "CADASTRE_ADDRESSES_INTERVAL", default_value = "300", value_parser = seconds)]
    addresses_interval: Duration,

    /// Seconds for which a pod must be gone before its address can be released without a DEL
    #[arg(long, env = "CADASTRE_LEAK_GRACE", default_value = "60", value_parser = seconds)]
    leak_grace: Duration,

    /// Path of flannel's subnet.env (usually /run/flannel/subnet.env), which the agent writes. Without this flag, the
    /// agent does not write the file
    #[arg(long, env = "CADASTRE_SUBNET_ENV")]
    subnet_env: Option<PathBuf>,

    /// Path of the CNI configuration (usually /etc/cni/net.d/05-cadastre.conflist), which the agent writes as soon as
    /// the node has a range. Without this flag, the agent does not write the file
    #[arg(long, env = "CADASTRE_CNI_CONF")]
    cni_conf: Option<PathBuf>,

    /// Template of the CNI configuration: ptp, bridge (for nodes with one IPv4 range), or the path of a file
    #[arg(long, env = "CADASTRE_CNI_CONF_TEMPLATE", default_value = "ptp")]
    cni_conf_template: String,

    /// Write the CNI configuration even if the configuration of another network exists; new pods then use Cadastre's.
    /// Without this flag, new pods use the other network, and the condition ServedByOthers of the NodeSubnet reports it
    #[arg(long, env = "CADASTRE_CNI_CONF_OVER_OTHERS", requires = "cni_conf")]
    cni_conf_over_others: bool,

    /// Remove the CNI configuration on SIGTERM; the node then becomes NotReady
    #[arg(long, env = "CADASTRE_REMOVE_CNI_CONF", requires = "cni_conf")]
    remove_cni_conf: bool,

    /// MTU of pods' interfaces, for subnet.env and the CNI configuration
    #[arg(long, env = "CADASTRE_MTU", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=65_535))]
    mtu: u32,

    /// FLANNEL_IPMASQ in subnet.env: true if something else masquerades, so that the CNI plugin need not masquerade
    #[arg(
        long,
        env = "CADASTRE_IP_MASQ",
        default_value_t = true,
        action = clap::ArgAction::Set
    )]
    ip_masq: bool,

    /// Masquerade traffic from pods to addresses outside all pools, in the nftables tables `ip cadastre` and `ip6
    /// cadastre`; needs the capability NET_ADMIN
    #[arg(
        long,
        env = "CADASTRE_MASQUERADE",
        default_value_t = false,
        action = clap::ArgAction::Set
    )]
    masquerade: bool,

    /// Who installs the routes to the pods of other nodes
    #[arg(long, env = "CADASTRE_ROUTES", value_enum, default_value_t = Routes::None)]
    routes: Routes,

    /// Path of a file from which a routing daemon such as BIRD announces the node's ranges. The agent writes the file
    /// whenever the ranges change
    #[arg(long, env = "CADASTRE_ANNOUNCE_FILE")]
    announce_file: Option<PathBuf>,

    /// Template of the file of --announce-file: bird, or the path of a template
    #[arg(
        long,
        env = "CADASTRE_ANNOUNCE_TEMPLATE",
        default_value = "bird",
        requires = "announce_file"
    )]
    announce_template: String,

    /// How the agent makes the routing daemon reload its configuration: none, bird=/PATH/OF/bird.ctl (BIRD's control
    /// socket), process=NAME (SIGHUP to all processes of that name) or command=/PATH ARGUMENTS. Blocks are released
    /// only after a successful reload
    #[arg(
        long,
        env = "CADASTRE_ANNOUNCE_RELOAD",
        default_value = "none",
        requires = "announce_file"
    )]
    announce_reload: Reload,

    /// Address of the admin port: /metrics, /healthz, /readyz, /loglevel
    #[arg(long, env = "CADASTRE_ADMIN_ADDRESS", default_value = "0.0.0.0:9818")]
    admin_address: SocketAddr,

    #[command(flatten)]
    guard: Guard,

    /// Seconds after SIGTERM in which running calls and a write in flight can finish
    #[arg(long, env = "CADASTRE_SHUTDOWN_GRACE", default_value = "10", value_parser = seconds)]
    shutdown_grace: Duration,

    /// Format of the log lines
    #[arg(long, env = "CADASTRE_LOG_FORMAT", value_enum, default_value_t = logs::Format::Text)]
    log_format: logs::Format,

    /// Log level, or module=level pairs; can be changed at run time (PUT /loglevel on the admin port)
    #[arg(long, env = "CADASTRE_LOG", default_value = "info")]
    log_level: String,
}

/// Who installs the routes to the pods of other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Routes {
    /// Another program installs the routes; the agent removes routes that an earlier agent has added
    None,
    /// The agent adds a route for each range of another node, from the NodeRoutes that the controller publishes
    /// (--publish-routes). All nodes must be on one link. Needs the capability NET_ADMIN
    Direct,
}

/// Parses seconds, with or without a fraction, between 0 and one day.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("\"{text}\" is no number of seconds: write one such as 5 or 0.5"))?;
    if (0.0..=86_400.0).contains(&seconds) {
        return Ok(Duration::from_secs_f64(seconds));
    }
    Err(format!("{text} seconds: give between 0 and 86400"))
}

pub(super) fn exec(args: Args) -> anyhow::Result<()> {
    let level = daemon::start(args.log_format, &args.log_level)?;
    let template = template(&args)?;
    // An agent never has much work, so one thread suffices. Only the store has a thread of its own.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(serve(args, template, level))
}

fn template(args: &Args) -> anyhow::Result<Template> {
    let text = match args.cni_conf_template.as_str() {
        "ptp" => PTP.to_owned(),
        "bridge" => BRIDGE.to_owned(),
        path => std::fs::read_to_string(path)
            .with_context(|| format!("--cni-conf-template: cannot read {path}"))?,
    };
    Template::new(&text).with_context(|| format!("--cni-conf-template {}", args.cni_conf_template))
}

fn announcement(args: &Args, node: &str) -> anyhow::Result<Option<Arc<Announcement>>> {
    let Some(path) = args.announce_file.clone() else {
        return Ok(None);
    };
    let text = match args.announce_template.as_str() {
        "bird" => BIRD.to_owned(),
        path => std::fs::read_to_string(path)
            .with_context(|| format!("--announce-template: cannot read {path}"))?,
    };
    let template = AnnounceTemplate::new(&text)
        .with_context(|| format!("--announce-template {}", args.announce_template))?;
    let reload = args.announce_reload.clone();
    let announcement = Announcement::new(node.to_owned(), path, template, reload);
    Ok(Some(Arc::new(announcement)))
}

fn node_name(args: &Args) -> anyhow::Result<String> {
    let name = args.node_name.clone().or_else(daemon::hostname);
    let name = name.unwrap_or_default();
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    anyhow::ensure!(
        !name.is_empty() && name.len() <= 253 && name.chars().all(legal),
        "\"{name}\" is no name of a Node: give --node-name, as kubectl get nodes shows it"
    );
    Ok(name)
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

async fn serve(args: Args, template: Template, level: logs::Level) -> anyhow::Result<()> {
    let node = node_name(&args)?;
    let announcement = announcement(&args, &node)?;
    let (version, commit) = (cadastre_core::VERSION, cadastre_core::COMMIT);
    info!(version, commit, node.name = %node, "cadastre agent starts");
    // The lock is taken before any port is opened. So if another agent runs on the node, the error names the lock and
    // not "address in use".
    let _only = OnlyOne::lock(folder(&args.cni_socket))?;
    let mut unlocked = BTreeSet::from([folder(&args.store), folder(&args.holdings)]);
    unlocked.remove(folder(&args.cni_socket));
    let unlocked = unlocked.into_iter().map(Path::to_owned).collect();
    let AdminPort {
        registry,
        readiness,
        http,
        review,
        task: mut admin,
    } = AdminPort::open(args.admin_address, &args.guard, level).await?;
    let metrics = AgentMetrics::register(&registry)?;
    let plugins = Socket::bind(
        &args.cni_socket,
        plugin_socket::CONNECTIONS,
        metrics.connections("cni"),
    )?;
    let others = Socket::bind(&args.socket, grpc::CONNECTIONS, metrics.connections("grpc"))?;

    let reach = Options {
        kubeconfig: args.kubeconfig.clone(),
        context: args.context.clone(),
    };
    let client = client::connect(&reach, http).await?;
    if let Some(review) = review {
        review.set_client(client.clone());
    }
    let events = Events::start(client.clone(), metrics.clone());
    let ledger = LedgerClient::closed(STARTING);
    let service = Arc::new(Service {
        ledger: ledger.clone(),
        shared: SharedState::default(),
        add_wait: args.add_wait,
        prober: Prober::default(),
        metrics: metrics.clone(),
        events: events.clone(),
        heard: readiness.last_heard(),
        changed: Notify::new(),
        held: watch::Sender::new(0),
        deleted: broadcast::Sender::new(64),
    });
    let leaks = watch::Sender::new(Arc::new(Reasons::new()));
    let holding = watch::Sender::new(Arc::new(NodeAllocation::default()));
    // On shutdown the servers stop first, then the agent's loop, then the store.
    let (stop_serving, stop) = (CancellationToken::new(), CancellationToken::new());
    let api = grpc::Api {
        service: Arc::clone(&service),
        node: node.clone(),
        holding: holding.subscribe(),
        leaks: leaks.subscribe(),
        stop: stop_serving.clone(),
    };
    let mut grpc = tokio::spawn(grpc::run(others, api));
    let mut plugins = tokio::spawn(plugin_socket::run(
        plugins,
        Arc::clone(&service),
        stop_serving.clone(),
    ));
    let links = Links {
        mtu: args.mtu,
        ip_masq: args.ip_masq,
    };
    let facts = Facts {
        node: node.clone(),
        mtu: args.mtu,
    };
    let settings = MachineSettings {
        node,
        publish_interval: args.publish_interval,
        addresses_interval: args.addresses_interval,
        leak_grace: args.leak_grace,
        masquerade: args.masquerade,
        announces: announcement.is_some(),
        cni_conf: args.cni_conf.clone(),
        network: args
            .cni_conf
            .is_some()
            .then(|| template.network().to_owned()),
    };
    let files = KeptFiles::new(WantedFiles {
        subnet_env: args.subnet_env.map(|path| (path, links)),
        cni_conf: args.cni_conf.clone().map(|path| (path, template, facts)),
        over_others: args.cni_conf_over_others,
    });
    let parts = AgentParts {
        client,
        store: args.store,
        holdings: args.holdings,
        unlocked,
        ledger: ledger.clone(),
        cri: args.cri_socket,
        files,
        announcement,
        direct_routes: args.routes == Routes::Direct,
        service,
        readiness,
        metrics,
        events,
        leaks,
        holding,
        stop: stop.clone(),
    };
    let mut agent = tokio::spawn(run::run(settings, parts));

    tokio::select! {
        signal = daemon::shutdown() => info!(signal = signal?, "shutting down"),
        ended = &mut agent => return ended.context("the agent failed")?.context("the agent ended"),
        ended = &mut grpc => anyhow::bail!("the gRPC socket ended by itself: {ended:?}"),
        ended = &mut plugins => anyhow::bail!("the plugins' socket ended by itself: {ended:?}"),
        ended = &mut admin => anyhow::bail!("the admin port ended by itself: {ended:?}"),
    }
    if let Some(path) = args.cni_conf.filter(|_| args.remove_cni_conf)
        && let Err(error) = files::remove(&path)
    {
        warn!("{error}");
    }
    let until = clock::since_boot() + args.shutdown_grace;
    let left = || until.saturating_sub(clock::since_boot());
    stop_serving.cancel();
    let served = tokio::time::timeout(left(), async { tokio::join!(plugins, grpc) }).await;
    stop.cancel();
    let ended = tokio::time::timeout(left(), agent).await;
    if served.is_err() || ended.is_err() {
        warn!("some calls were cut off after {:?}", args.shutdown_grace);
    }
    let closing = ledger.close("this node's agent stops: try again");
    let _ = tokio::time::timeout(left().max(Duration::from_secs(1)), closing).await;
    info!("stopped");
    Ok(())
}
