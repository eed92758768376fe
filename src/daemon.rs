//! Code that the controller and the agent share: start of logging and TLS, the admin port, and signals for shutdown.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use prometheus::Registry;
use prometheus::process_collector::ProcessCollector;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use cadastre_daemon::telemetry::admin;
use cadastre_daemon::telemetry::admin::AdminPages;
use cadastre_daemon::telemetry::review::AccessReview;
use cadastre_daemon::telemetry::tls::TlsFiles;
use cadastre_daemon::telemetry::{HttpMetrics, Readiness, build_info, logs};

/// Starts logging and installs the TLS provider. Must be called once per process, before anything else.
pub(super) fn start(format: logs::Format, level: &str) -> anyhow::Result<logs::Level> {
    let level = logs::start(format, level).context("--log-level")?;
    let installed = rustls::crypto::ring::default_provider().install_default();
    installed.map_err(|_| anyhow::anyhow!("another TLS provider was installed first"))?;
    Ok(level)
}

/// Returns the kernel's host name; `None` if it cannot be read.
pub(super) fn hostname() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned())
}

// Flags that protect the admin port. This is not a doc comment, because clap would show a doc comment as the
// description of the whole command.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Guard {
    /// File with the certificate of the admin port and its chain, in PEM; the port then speaks HTTPS. A replaced file
    /// is used without a restart
    #[arg(long, env = "CADASTRE_ADMIN_TLS_CERT", requires = "admin_tls_key")]
    admin_tls_cert: Option<PathBuf>,

    /// File with the private key of the certificate, in PEM
    #[arg(long, env = "CADASTRE_ADMIN_TLS_KEY", requires = "admin_tls_cert")]
    admin_tls_key: Option<PathBuf>,

    /// Serve /metrics only to clients with a bearer token; the API server decides whether the client is authorised
    /// (TokenReview, SubjectAccessReview). Probes need no token
    #[arg(long, env = "CADASTRE_METRICS_AUTH", requires = "admin_tls_cert")]
    metrics_auth: bool,

    /// Address of a second port for /healthz and /readyz alone, in plain HTTP, such as 127.0.0.1:9827. Probes are
    /// answered there even when the admin port is overloaded; the admin port serves them too
    #[arg(long, env = "CADASTRE_PROBE_ADDRESS")]
    probe_address: Option<SocketAddr>,
}

/// The open admin port: where the daemon registers its metrics and its readiness checks, and the task that serves the
/// port.
pub(super) struct AdminPort {
    pub registry: Registry,
    pub readiness: Readiness,
    pub http: HttpMetrics,
    /// Decides who may read /metrics; `None` without `--metrics-auth`. Before it can decide, it needs a client of the
    /// API server (`AccessReview::set_client`).
    pub review: Option<AccessReview>,
    pub task: JoinHandle<Infallible>,
}

impl AdminPort {
    /// Opens the port, registers the metrics that every process has, and starts to serve.
    pub(super) async fn open(
        address: SocketAddr,
        guard: &Guard,
        level: logs::Level,
    ) -> anyhow::Result<Self> {
        let registry = Registry::new();
        build_info(&registry)?;
        registry.register(Box::new(ProcessCollector::for_self()))?;
        let http = HttpMetrics::register(&registry)?;
        let readiness = Readiness::default();
        readiness.register(&registry)?;
        let files = guard
            .admin_tls_cert
            .clone()
            .zip(guard.admin_tls_key.clone());
        let tls = files
            .map(|(cert, key)| TlsFiles::open(cert, key))
            .transpose()?;
        let review = guard.metrics_auth.then(AccessReview::default);
        let listener = listen(address, "--admin-address").await?;
        let probes = match guard.probe_address {
            Some(address) => Some(listen(address, "--probe-address").await?),
            None => None,
        };
        let pages = AdminPages {
            registry: registry.clone(),
            readiness: readiness.clone(),
            level: Some(level),
            review: review.clone(),
        };
        let ready = readiness.clone();
        let task = tokio::spawn(async move {
            match probes {
                None => admin::run(listener, pages, tls).await,
                Some(probes) => tokio::select! {
                    never = admin::run(listener, pages, tls) => never,
                    never = admin::run_probes(probes, ready) => never,
                },
            }
        });
        Ok(Self {
            registry,
            readiness,
            http,
            review,
            task,
        })
    }
}

async fn listen(address: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    listener.with_context(|| format!("cannot listen on {address}: choose another {flag}"))
}

/// Waits for SIGTERM or SIGINT and returns the signal's name.
pub(super) async fn shutdown() -> std::io::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    Ok(tokio::select! {
        _ = term.recv() => "SIGTERM",
        _ = int.recv() => "SIGINT",
    })
}
