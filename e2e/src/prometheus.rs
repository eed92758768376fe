//! A real Prometheus, and `promtool`.

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
use crate::ports;
use crate::process::{self, Process};
use crate::wait::until;

const START_LIMIT: Duration = Duration::from_secs(60);

/// A server that scrapes a few addresses every half second; ended when dropped.
#[derive(Debug)]
pub struct Prometheus {
    process: Process,
    address: String,
}

/// One series of an answer: its labels and its value.
pub type Series = (Value, f64);

impl Prometheus {
    /// Starts one in `folder` that scrapes `targets`, each a job, an address and more labels, and
    /// evaluates the rules every half second, if there are any. Returns when it answers.
    pub async fn start(
        folder: &Path,
        targets: &[(&str, &str, Value)],
        rules: Option<&Path>,
    ) -> Result<Self> {
        let address = format!("127.0.0.1:{}", ports::free()?);
        let scrapes: Vec<Value> = targets
            .iter()
            .map(|(job, target, labels)| {
                json!({
                    "job_name": job,
                    "static_configs": [{"targets": [target], "labels": labels}],
                })
            })
            .collect();
        // JSON is YAML.
        let config = json!({
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": rules.into_iter().collect::<Vec<_>>(),
            "scrape_configs": scrapes,
        });
        let file = folder.join("prometheus.yml");
        std::fs::write(&file, config.to_string())?;
        let mut command = process::command(&assets::find(Program::Prometheus)?);
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.join("tsdb").display()
            ))
            .arg(format!("--web.listen-address={address}"));
        let log = folder.join("prometheus.log");
        let process = Process::spawn("prometheus", command, &log)?;
        let mut server = Self { process, address };
        until("prometheus is ready", START_LIMIT, async || {
            server.process.check_running()?;
            let (status, text) = request(&server.address, Method::GET, "/-/ready", "").await?;
            ensure!(status.is_success(), "{text}");
            Ok(Some(()))
        })
        .await?;
        Ok(server)
    }

    /// What an expression is now.
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

    /// The alerts that are pending or firing.
    pub async fn alerts(&self) -> Result<Vec<Value>> {
        let data = self.get("/api/v1/alerts").await?;
        Ok(data["alerts"].as_array().cloned().unwrap_or_default())
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        self.process.log_tail(30)
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let (status, text) = request(&self.address, Method::GET, path, "").await?;
        ensure!(status.is_success(), "{status}: {text}");
        let mut answer: Value = serde_json::from_str(&text)?;
        Ok(answer["data"].take())
    }
}

/// For a query string.
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

/// Runs `promtool ARGS` with that standard input. What it says is the error if it complains.
pub fn promtool(args: &[&str], input: &str) -> Result<String> {
    let program: PathBuf = assets::find(Program::Promtool)?;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    // Whoever does not read it has what it needs.
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
