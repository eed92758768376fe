//! `cadastre controller`: starts the election, the admin port and the controller, and stops them in order.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::daemon::{self, AdminPort, Guard};
use cadastre_api::{AllocationMode, FrrNeighbor, LEASE_NAME, frr};
use cadastre_controller::cluster::leader_metrics::LeaderMetrics;
use cadastre_controller::cluster::lease;
use cadastre_controller::cluster::lease::Leadership;
use cadastre_controller::cluster::lease_task::{Election, WriteGate};
use cadastre_controller::cluster::readiness::LeaderReadiness;
use cadastre_controller::cluster::writer::Writer;
use cadastre_controller::telemetry::ControllerMetrics;
use cadastre_controller::{ControllerSettings, FrrSettings, run};
use cadastre_core::Cidr;
use cadastre_daemon::client;
use cadastre_daemon::client::Options;
use cadastre_daemon::clock::Clock;
use cadastre_daemon::telemetry::logs;

/// Watch Nodes and IPPools, allocate podCIDRs and blocks to nodes, write NodeSubnets
///
/// The controller finds the cluster by --kubeconfig, KUBECONFIG, ~/.kube/config or the pod's service account, in this
/// order. Several replicas may run: one leads, the others stand by.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Kubeconfig file of the cluster
    #[arg(long, env = "CADASTRE_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig
    #[arg(long, env = "CADASTRE_CONTEXT")]
    context: Option<String>,

    /// Address of the admin port: /metrics, /healthz, /readyz, /loglevel
    #[arg(long, env = "CADASTRE_ADMIN_ADDRESS", default_value = "0.0.0.0:9817")]
    admin_address: SocketAddr,

    #[command(flatten)]
    guard: Guard,

    /// Service range of the cluster, from which nothing is allocated; repeat it for dual stack. Only needed where the
    /// API server has no ServiceCIDR objects (Kubernetes before 1.33)
    #[arg(long, env = "CADASTRE_SERVICE_CIDRS", value_delimiter = ',', value_parser = parse_cidr)]
    service_cidr: Vec<Cidr>,

    /// At most this many writes of podCIDRs in flight
    #[arg(long, env = "CADASTRE_WRITES_IN_FLIGHT", default_value_t = 48, value_parser = clap::value_parser!(u16).range(1..=1024))]
    writes_in_flight: u16,

    /// Seconds for which a pool is paused after another allocator wrote a podCIDR in the pool's range
    #[arg(long, env = "CADASTRE_FOREIGN_ALLOCATOR_PAUSE", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    foreign_allocator_pause: u32,

    /// Create a pool named "default" with this allocation mode if the cluster has no pool. The pool's ranges are those
    /// of --default-pool-cidr, else kubeadm's podSubnet, else a private range that is free
    #[arg(long, env = "CADASTRE_DEFAULT_POOL", value_enum)]
    default_pool: Option<DefaultPool>,

    /// Range of the default pool; repeat it for dual stack
    #[arg(long, env = "CADASTRE_DEFAULT_POOL_CIDRS", value_delimiter = ',', value_parser = parse_cidr, requires = "default_pool")]
    default_pool_cidr: Vec<Cidr>,

    /// Seconds that an address may be in use without a pod before its node is asked to release it
    #[arg(long, env = "CADASTRE_LEAK_GRACE", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    leak_grace: u32,

    /// Evict pods whose node has no address for them and cannot get one. Their controllers then create new pods, which
    /// the scheduler binds to other nodes. Only for nodes with the taint cadastre.dev/addresses-exhausted
    #[arg(long, env = "CADASTRE_EVICT_UNSERVED_PODS")]
    evict_unserved_pods: bool,

    /// At most this many writes of NodeSubnet.status per minute by all agents together, not counting urgent changes. If
    /// the cluster has too many nodes for this limit, each agent writes less often. 0 sets no limit
    #[arg(
        long,
        env = "CADASTRE_AGENT_WRITES_PER_MINUTE",
        default_value_t = 6_000
    )]
    agent_writes_per_minute: u32,

    /// Write a NodeRoutes for each node: its ranges and its addresses. Agents with --routes=direct and other routers
    /// install routes from it. Without this flag, existing NodeRoutes are deleted
    #[arg(long, env = "CADASTRE_PUBLISH_ROUTES")]
    publish_routes: bool,

    /// Write the ranges of each node to an FRRConfiguration of frr-k8s in this namespace, so that frr-k8s announces
    /// them by BGP. Each node needs an AS number: --frr-asn, or the annotation cadastre.dev/asn of the Node. If a node
    /// has no AS number, its FRRConfiguration is deleted
    #[arg(long, env = "CADASTRE_FRR_NAMESPACE", value_parser = parse_namespace)]
    frr_namespace: Option<String>,

    /// AS number of nodes without the annotation cadastre.dev/asn
    #[arg(long, env = "CADASTRE_FRR_ASN", value_parser = frr::parse_asn, requires = "frr_namespace")]
    frr_asn: Option<u32>,

    /// Neighbor to which nodes announce their ranges, as JSON like in an FRRConfiguration; may be repeated. The field
    /// `nodeLabels` limits the neighbor to nodes with these labels. Without `toAdvertise`, the neighbor gets all ranges
    #[arg(long, env = "CADASTRE_FRR_NEIGHBOR", requires = "frr_namespace")]
    frr_neighbor: Vec<FrrNeighbor>,

    /// At most this many objects in a page of a list; 0 lists everything in one request
    #[arg(long, env = "CADASTRE_LIST_PAGE", default_value_t = 1000)]
    list_page: u32,

    /// Namespace of the Lease by which the controllers elect their leader
    #[arg(long, env = "CADASTRE_LEASE_NAMESPACE", default_value = "kube-system")]
    lease_namespace: String,

    /// Name of this process in the Lease; by default the hostname
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,

    /// Seconds without a renewal of the Lease after which another replica takes over. While the API server answers
    /// slowly, this and the next two durations are up to four times as long, but this one at most 30 s
    #[arg(long, env = "CADASTRE_LEASE_DURATION", default_value_t = 4)]
    lease_duration: u32,

    /// The leader stops writing this many seconds after it last renewed the Lease
    #[arg(long, env = "CADASTRE_RENEW_DEADLINE", default_value_t = 3)]
    renew_deadline: u32,

    /// Seconds between renewals of the Lease
    #[arg(long, env = "CADASTRE_RETRY_PERIOD", default_value_t = 1)]
    retry_period: u32,

    /// Seconds that the process waits for writes in flight after SIGTERM
    #[arg(long, env = "CADASTRE_SHUTDOWN_GRACE", default_value_t = 10)]
    shutdown_grace: u32,

    /// Format of the log lines
    #[arg(long, env = "CADASTRE_LOG_FORMAT", value_enum, default_value_t = logs::Format::Text)]
    log_format: logs::Format,

    /// Log level, or module=level pairs; can be changed at run time (PUT /loglevel on the admin port)
    #[arg(long, env = "CADASTRE_LOG", default_value = "info")]
    log_level: String,
}

/// The values of `--default-pool`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum DefaultPool {
    /// As many blocks as each node needs, for clusters with node agents
    Blocks,
    /// One range per node and family, in node.spec.podCIDRs
    NodeCidr,
}

fn parse_cidr(text: &str) -> Result<Cidr, String> {
    Cidr::parse_strict(text).map_err(|error| error.to_string())
}

/// Checks that a text can be the name of a namespace, because the name becomes a part of URLs.
fn parse_namespace(text: &str) -> Result<String, String> {
    let is_of_name = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-';
    if text.is_empty() || text.len() > 63 || !text.bytes().all(is_of_name) {
        return Err("not the name of a namespace".to_owned());
    }
    Ok(text.to_owned())
}

pub(super) fn exec(args: Args) -> anyhow::Result<()> {
    let settings = lease_settings(&args)?;
    let level = daemon::start(args.log_format, &args.log_level)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(serve(args, settings, level))
}

fn lease_settings(args: &Args) -> anyhow::Result<lease::LeaseSettings> {
    let seconds = |n: u32| Duration::from_secs(n.into());
    let settings = lease::LeaseSettings {
        identity: args
            .identity
            .clone()
            .or_else(daemon::hostname)
            .unwrap_or_else(|| "cadastre".to_owned()),
        nonce: nonce()?,
        lease_duration: seconds(args.lease_duration),
        renew_deadline: seconds(args.renew_deadline),
        retry_period: seconds(args.retry_period),
    };
    settings
        .validate()
        .map_err(anyhow::Error::msg)
        .context("--lease-duration, --renew-deadline, --retry-period")?;
    Ok(settings)
}

/// Returns eight random hexadecimal digits, which distinguish this process from an earlier one of the same identity.
fn nonce() -> anyhow::Result<String> {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
        .context("no source of random numbers")?;
    Ok(uuid
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(8)
        .collect())
}

async fn serve(
    args: Args,
    settings: lease::LeaseSettings,
    level: logs::Level,
) -> anyhow::Result<()> {
    let (version, commit) = (cadastre_core::VERSION, cadastre_core::COMMIT);
    let target = format_args!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    info!(version, commit, %target, identity = %settings.identity, "cadastre controller starts");
    let AdminPort {
        registry,
        readiness,
        http,
        review,
        task: mut admin,
    } = AdminPort::open(args.admin_address, &args.guard, level).await?;
    let readiness = LeaderReadiness::new(readiness);
    let reach = Options {
        kubeconfig: args.kubeconfig,
        context: args.context,
    };
    // The election has a client of its own, so renewals of the Lease never use the many connections of the other
    // requests. If connections fall silent, each of them fails one request.
    let of_election = client::connect(&reach, http.clone()).await?;
    let client = client::connect(&reach, http).await?;
    if let Some(review) = review {
        review.set_client(client.clone());
    }
    tokio::spawn({
        let client = client.clone();
        async move {
            let version = client.apiserver_version().await.ok();
            if let Some(text) = version.as_ref().and_then(client::too_old) {
                warn!("{text}");
            }
        }
    });
    let clock = Clock;
    let (publish, leadership) = watch::channel(Leadership::Standby { leader: None });
    let (release, released) = watch::channel(None);
    let metrics = LeaderMetrics::register(&registry, LEASE_NAME)?;
    let (want, wanted) = watch::channel(None);
    let election = Election {
        client: of_election,
        namespace: args.lease_namespace,
        name: LEASE_NAME.to_owned(),
        settings,
        publish,
        wanted,
        readiness: readiness.clone(),
        metrics,
    };
    let mut election = tokio::spawn(election.run(clock, released));

    let frr_namespace = args.frr_namespace.clone().unwrap_or_default();
    let frr = args.frr_namespace.map(|namespace| FrrSettings {
        namespace,
        asn: args.frr_asn,
        neighbors: args.frr_neighbor,
    });
    let parts = run::ControllerParts {
        client: client.clone(),
        writer: Writer::new(client, WriteGate::new(leadership.clone(), clock))
            .with_frr_namespace(frr_namespace),
        clock,
        leadership,
        want,
        metrics: ControllerMetrics::register(&registry)?,
        readiness,
        page: Some(args.list_page).filter(|page| *page > 0),
    };
    let settings = ControllerSettings {
        service_cidrs: args.service_cidr,
        critical_in_flight: args.writes_in_flight.into(),
        foreign_allocator_pause: Duration::from_secs(args.foreign_allocator_pause.into()),
        default_pool: args.default_pool.map(|kind| match kind {
            DefaultPool::Blocks => AllocationMode::Blocks,
            DefaultPool::NodeCidr => AllocationMode::NodeCIDR,
        }),
        default_pool_cidrs: args.default_pool_cidr,
        leak_grace: Duration::from_secs(args.leak_grace.into()),
        evicts_unserved: args.evict_unserved_pods,
        publishes_routes: args.publish_routes,
        frr,
        agent_writes_per_minute: args.agent_writes_per_minute,
        ..ControllerSettings::default()
    };
    let grace = Duration::from_secs(args.shutdown_grace.into());
    let (stop, stopping) = watch::channel(false);
    let mut controller = tokio::spawn(run::run(parts, settings, stopping, grace));

    tokio::select! {
        signal = daemon::shutdown() => info!(signal = signal?, "shutting down"),
        ended = &mut controller => anyhow::bail!("the controller ended by itself: {ended:?}"),
        ended = &mut election => match ended {
            Ok(Err(why)) => anyhow::bail!("{why}"),
            ended => anyhow::bail!("the election ended by itself: {ended:?}"),
        },
        ended = &mut admin => anyhow::bail!("the admin port ended by itself: {ended:?}"),
    }
    stop.send_replace(true);
    let settled = controller
        .await
        .context("the controller failed while stopping")?;
    if !settled {
        error!("some writes could not be settled: the next leader will fence them off");
    }
    release.send_replace(Some(settled));
    let _ = tokio::time::timeout(Duration::from_secs(5), election).await;
    info!(settled, "stopped");
    Ok(())
}
