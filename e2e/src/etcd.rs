//! Members of etcd as processes, and a client for their JSON gateway.
//!
//! # Guarantees
//! A member keeps its ports and its data when it is killed and started again.
//!
//! # Caveats
//! Members do not fsync. A crash of the host loses data, but a crash of etcd alone does not.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use futures::AsyncBufRead;
use k8s_openapi::ByteString;
use kube::Client;
use serde_json::{Value, json};

use crate::assets::{self, Program};
use crate::metrics::{self, Sample};
use crate::ports;
use crate::process::{self, Process, Restartable};

/// A member of an etcd cluster. It is killed when this value is dropped.
#[derive(Debug)]
pub struct Member {
    folder: PathBuf,
    client_port: u16,
    peer_port: u16,
    /// The URL under which other members reach this one, which may be that of a proxy
    peer_url: String,
    /// `--initial-cluster`: all members, each as `NAME=URL`
    cluster: String,
    process: Restartable,
}

impl Member {
    /// Creates a member that is a cluster of its own, with data and a log in `folder`.
    pub(crate) fn alone(folder: &Path) -> Result<Self> {
        let mut this = Self::new(folder, "etcd")?;
        this.peer_url = format!("http://127.0.0.1:{}", this.peer_port);
        this.cluster = format!("{}={}", this.process.name(), this.peer_url);
        Ok(this)
    }

    /// Creates a member whose name is also that of its data folder. [`Self::join`] must follow.
    pub(crate) fn new(folder: &Path, name: &str) -> Result<Self> {
        Ok(Self {
            folder: folder.to_owned(),
            client_port: ports::free()?,
            peer_port: ports::free()?,
            peer_url: String::new(),
            cluster: String::new(),
            process: Restartable::new(name),
        })
    }

    /// Makes members one cluster. `peer_urls` are the URLs under which the others reach each member.
    pub(crate) fn join(members: &mut [Self], peer_urls: &[String]) {
        let names = members.iter().zip(peer_urls);
        let all: Vec<String> = names
            .map(|(it, url)| format!("{}={url}", it.process.name()))
            .collect();
        for (member, url) in members.iter_mut().zip(peer_urls) {
            member.peer_url.clone_from(url);
            member.cluster = all.join(",");
        }
    }

    /// The port on loopback on which this member listens for other members.
    pub(crate) fn peer_port(&self) -> u16 {
        self.peer_port
    }

    /// The folder with the member's data.
    pub(crate) fn data(&self) -> PathBuf {
        self.folder.join(self.process.name())
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.client_port)
    }

    /// Starts the member unless it runs. Does not wait until it is ready.
    pub fn start(&mut self) -> Result<()> {
        let mut command = process::command(&assets::find(Program::Etcd)?);
        let (url, peer) = (self.url(), format!("http://127.0.0.1:{}", self.peer_port));
        command
            .current_dir(&self.folder)
            .env("GOGC", gogc())
            .arg(format!("--name={}", self.process.name()))
            .arg(format!("--data-dir={}", self.data().display()))
            .args([
                format!("--listen-client-urls={url}"),
                format!("--advertise-client-urls={url}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={}", self.peer_url),
                format!("--initial-cluster={}", self.cluster),
            ])
            .args(["--unsafe-no-fsync", "--log-level=warn"])
            .arg("--watch-progress-notify-interval=2s")
            .arg(format!("--quota-backend-bytes={}", 8_u64 << 30));
        self.process.start(command, &self.folder)
    }

    /// Kills the member with SIGKILL, and waits until the process has ended.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// Returns the process, to send signals and to measure memory and processor time.
    pub fn process(&self) -> Result<&Process> {
        self.process.process()
    }

    /// Returns an error with the end of the log if the process has ended by itself.
    pub fn check_running(&mut self) -> Result<()> {
        self.process.check_running()
    }

    /// Returns a client for this member.
    pub fn gateway(&self) -> Result<Gateway> {
        Gateway::new(&self.url())
    }
}

/// The JSON gateway of a member's gRPC API.
#[derive(Clone)]
pub struct Gateway(Client);

/// The state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The id of this member.
    pub member: u64,
    /// The id of the leader that this member knows; 0 if it knows none.
    pub leader: u64,
    /// The last revision that this member has applied.
    pub revision: i64,
}

impl Gateway {
    /// Returns a client for the member with this URL.
    pub fn new(url: &str) -> Result<Self> {
        Ok(Self(Client::try_from(kube::Config::new(url.parse()?))?))
    }

    /// Returns the state of the member.
    pub async fn status(&self) -> Result<Status> {
        let answer = self.call("/v3/maintenance/status", &json!({})).await?;
        // The gateway encodes 64-bit numbers as strings, and leaves out zeros.
        let number = |pointer| {
            answer
                .pointer(pointer)
                .and_then(Value::as_str)
                .unwrap_or("0")
        };
        Ok(Status {
            member: number("/header/member_id").parse()?,
            leader: number("/leader").parse()?,
            revision: number("/header/revision").parse()?,
        })
    }

    /// Removes all revisions before `revision`, so that no watch can start there.
    pub async fn compact(&self, revision: i64) -> Result<()> {
        let body = json!({"revision": revision.to_string()});
        self.call("/v3/kv/compaction", &body).await?;
        Ok(())
    }

    /// Raises (`ACTIVATE`) or ends (`DEACTIVATE`) the alarm that a member has no space. While it is raised, etcd
    /// refuses all writes.
    pub async fn no_space(&self, action: &str, member: u64) -> Result<()> {
        let body = json!({"action": action, "alarm": "NOSPACE", "memberID": member.to_string()});
        self.call("/v3/maintenance/alarm", &body).await?;
        Ok(())
    }

    /// Watches all keys that begin with `prefix`, from a revision on. Each line of the stream is one JSON document.
    pub async fn watch(&self, prefix: &str, from: i64) -> Result<impl AsyncBufRead + use<>> {
        let mut end = prefix.as_bytes().to_vec();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let body = json!({"create_request": {
            "key": ByteString(prefix.into()), "range_end": ByteString(end),
            "start_revision": from.to_string(), "progress_notify": true,
        }});
        let request = http::Request::post("/v3/watch").body(serde_json::to_vec(&body)?)?;
        Ok(self.0.request_stream(request).await?)
    }

    /// Returns the member's own metrics, for example the size of its database.
    pub async fn metrics(&self) -> Result<Vec<Sample>> {
        let request = http::Request::get("/metrics").body(Vec::new())?;
        Ok(metrics::parse(&self.0.request_text(request).await?))
    }

    async fn call(&self, path: &str, body: &Value) -> Result<Value> {
        let request = http::Request::post(path).body(serde_json::to_vec(body)?)?;
        let answer = self.0.request(request).await;
        answer.with_context(|| format!("etcd refuses {path} {body}"))
    }
}

/// Returns the value of `GOGC` for etcd and kube-apiserver: by how many percent the heap may grow between two garbage
/// collections. If this process has `GOGC` in its environment, that value is used. The default of 400 makes collections
/// rare, which saves up to a fifth of kube-apiserver's processor time at start.
pub(crate) fn gogc() -> OsString {
    std::env::var_os("GOGC").unwrap_or_else(|| "400".into())
}
