//! What both daemons begin with, and what ends them.

use std::convert::Infallible;
use std::net::SocketAddr;

use anyhow::Context;
use prometheus::Registry;
use prometheus::process_collector::ProcessCollector;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::telemetry::admin::{self, Admin};
use crate::telemetry::map::Map;
use crate::telemetry::{HttpMetrics, Readiness, build_info, logs};

/// Logs, and what TLS is made with: once a process, before anything else.
pub(super) fn start(format: logs::Format, level: &str) -> anyhow::Result<logs::Level> {
    let level = logs::start(format, level).context("--log-level")?;
    let installed = rustls::crypto::ring::default_provider().install_default();
    installed.map_err(|_| anyhow::anyhow!("another TLS provider was installed first"))?;
    Ok(level)
}

/// The name of this machine, as its kernel has it.
pub(super) fn hostname() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned())
}

/// What the admin port tells, and the task that serves it for ever.
pub(super) struct AdminPort {
    pub registry: Registry,
    pub readiness: Readiness,
    pub http: HttpMetrics,
    pub task: JoinHandle<Infallible>,
}

impl AdminPort {
    /// Opens it, with the figures that every process has.
    pub(super) async fn open(
        address: SocketAddr,
        level: logs::Level,
        map: Option<Map>,
    ) -> anyhow::Result<Self> {
        let registry = Registry::new();
        build_info(&registry)?;
        registry.register(Box::new(ProcessCollector::for_self()))?;
        let http = HttpMetrics::register(&registry)?;
        let readiness = Readiness::default();
        readiness.register(&registry)?;
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}: choose another --admin-address")
        })?;
        let pages = Admin {
            registry: registry.clone(),
            readiness: readiness.clone(),
            level: Some(level),
            map,
        };
        Ok(Self {
            registry,
            readiness,
            http,
            task: tokio::spawn(admin::run(listener, pages)),
        })
    }
}

/// Waits for SIGTERM or SIGINT, and says which it was.
pub(super) async fn shutdown() -> std::io::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    Ok(tokio::select! {
        _ = term.recv() => "SIGTERM",
        _ = int.recv() => "SIGINT",
    })
}
