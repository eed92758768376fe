//! Runs a real Prometheus server, and `promtool`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use serde_json::{Value, json};

use crate::assets::{self, Program};
use crate::daemon::request;
use crate::helm::chart;
use crate::node::Fabric;
use crate::ports;
use crate::process::{self, Process};
use crate::wait::until;

const START_LIMIT: Duration = Duration::from_secs(180);

/// Returns the path of the chart's alert rules.
pub fn rules() -> PathBuf {
    chart().join("files/rules.yaml")
}

/// Writes a copy of the chart's rules to `folder`, in which every alert has `for: 1s`. Returns the copy's path.
pub fn impatient(folder: &Path) -> Result<PathBuf> {
    let text = std::fs::read_to_string(rules())?;
    let lines = text.lines().map(|line| match line.split_once("for: ") {
        Some((before, _)) if before.trim().is_empty() => format!("{before}for: 1s"),
        _ => line.to_owned(),
    });
    let lines: Vec<String> = lines.collect();
    let path = folder.join("rules.yaml");
    std::fs::write(&path, lines.join("\n"))?;
    Ok(path)
}

/// A server that scrapes its targets and evaluates rules every half second. It is killed when dropped.
#[derive(Debug)]
pub struct Prometheus {
    process: Process,
    address: String,
    /// The path of the network namespace in which the server runs; `None` means this process's own namespace
    namespace: Option<String>,
}

/// One series of a query's result: the labels as an object, and the value.
pub type Series = (Value, f64);

impl Prometheus {
    /// Starts a server in `folder` that scrapes `targets` and evaluates `rules`, if any. A target is a job name, an
    /// address and additional labels. Returns when the server is ready.
    pub async fn start(
        folder: &Path,
        targets: &[(&str, &str, Value)],
        rules: Option<&Path>,
    ) -> Result<Self> {
        Self::start_in(None, folder, targets, rules).await
    }

    /// Starts a server in the network namespace of `fabric`, from which it can scrape the agents of the machines.
    pub async fn start_among(
        fabric: &Fabric,
        folder: &Path,
        targets: &[(&str, &str, Value)],
        rules: Option<&Path>,
    ) -> Result<Self> {
        Self::start_in(Some(fabric.namespace()), folder, targets, rules).await
    }

    async fn start_in(
        namespace: Option<String>,
        folder: &Path,
        targets: &[(&str, &str, Value)],
        rules: Option<&Path>,
    ) -> Result<Self> {
        let address = format!("127.0.0.1:{}", ports::free()?);
        let mut jobs: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
        for (job, target, labels) in targets {
            let target = json!({"targets": [target], "labels": labels});
            jobs.entry(job).or_default().push(target);
        }
        let scrapes = jobs.into_iter();
        let scrapes: Vec<Value> = scrapes
            .map(|(job, targets)| json!({"job_name": job, "static_configs": targets}))
            .collect();
        // The configuration is written as JSON. Prometheus reads YAML, and JSON is valid YAML.
        let config = json!({
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": rules.into_iter().collect::<Vec<_>>(),
            "scrape_configs": scrapes,
        });
        let file = folder.join("prometheus.yml");
        std::fs::write(&file, config.to_string())?;
        let program = assets::find(Program::Prometheus)?;
        let mut command = match &namespace {
            Some(namespace) => {
                let mut enter = process::command(Path::new("nsenter"));
                enter.arg(format!("--net={namespace}")).arg("--");
                enter.arg(program);
                enter
            }
            None => process::command(&program),
        };
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.join("tsdb").display()
            ))
            .arg(format!("--web.listen-address={address}"));
        let log = folder.join("prometheus.log");
        let process = Process::spawn("prometheus", command, &log)?;
        let mut server = Self {
            process,
            address,
            namespace,
        };
        until("prometheus is ready", START_LIMIT, async || {
            server.process.check_running()?;
            server.ask("/-/ready").await?;
            Ok(Some(()))
        })
        .await?;
        Ok(server)
    }

    /// Evaluates a PromQL expression now. A result that is not a vector is returned as one series without labels.
    pub async fn query(&self, expr: &str) -> Result<Vec<Series>> {
        let answer = self
            .get(&format!("/api/v1/query?query={}", encoded(expr)))
            .await;
        let data = answer.with_context(|| format!("query {expr}"))?;
        let result = match data["resultType"].as_str() {
            Some("vector") => data["result"].as_array().cloned().unwrap_or_default(),
            _ => vec![json!({"metric": {}, "value": data["result"]})],
        };
        result
            .into_iter()
            .map(|it| {
                let value = it["value"][1].as_str().context("no value")?.parse()?;
                Ok((it["metric"].clone(), value))
            })
            .collect()
    }

    /// Returns the alerts that are pending or firing.
    pub async fn alerts(&self) -> Result<Vec<Value>> {
        let data = self.get("/api/v1/alerts").await?;
        Ok(data["alerts"].as_array().cloned().unwrap_or_default())
    }

    /// Returns the labels of the alerts that are firing.
    pub async fn firing(&self) -> Result<Vec<Value>> {
        let alerts = self.alerts().await?.into_iter();
        let firing = alerts.filter(|it| it["state"] == "firing");
        Ok(firing.map(|mut it| it["labels"].take()).collect())
    }

    /// Returns the end of the server's log, for an error message.
    pub fn log_tail(&self) -> String {
        self.process.log_tail(30)
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let mut answer: Value = serde_json::from_str(&self.ask(path).await?)?;
        Ok(answer["data"].take())
    }

    async fn ask(&self, path: &str) -> Result<String> {
        let Some(namespace) = &self.namespace else {
            let (status, text) = request(&self.address, Method::GET, path, "").await?;
            ensure!(status.is_success(), "{status}: {text}");
            return Ok(text);
        };
        let output = tokio::process::Command::new("nsenter")
            .arg(format!("--net={namespace}"))
            .args(["--", "busybox", "wget", "-q", "-O", "-"])
            .arg(format!("http://{}{path}", self.address))
            .kill_on_drop(true)
            .output()
            .await?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{path}: {}", error.trim());
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// Percent-encodes a text for use in a URL's query string.
fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() {
            encoded.push(byte.into());
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// Runs `promtool ARGS` with `input` as standard input. If it fails, its output is the error.
pub fn promtool(args: &[&str], input: &str) -> Result<String> {
    let program: PathBuf = assets::find(Program::Promtool)?;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    // An error is ignored, because promtool may end before it has read all of its input. Its exit status is checked
    // anyway.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let done = child.wait_with_output()?;
    let text = String::from_utf8([done.stdout, done.stderr].concat())?;
    ensure!(
        done.status.success(),
        "promtool {} ({}): {text}",
        args.join(" "),
        done.status
    );
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::encoded;

    #[test]
    fn an_expression_is_encoded() {
        assert_eq!(encoded("a{b=\"c\"}+1"), "a%7Bb%3D%22c%22%7D%2B1");
    }
}
