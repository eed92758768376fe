//! Headless Chromium, driven by its DevTools protocol over a pair of pipes.
//!
//! Debian's package `chromium` is enough, because neither a driver program nor a web socket is needed. Commands and
//! answers are JSON, each terminated by a zero byte, on file descriptors 3 and 4 of the browser. Like every
//! [`Process`], the browser is killed when this process ends. The browser's own child processes end together with the
//! browser.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};

use crate::process::{self, Process};
use crate::wait::until;

/// The answer to a command may take at most this long.
const LIMIT: Duration = Duration::from_secs(120);

/// Flags for unattended use: no display, no dialogs, no connections that the page did not request.
const FLAGS: [&str; 15] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--mute-audio",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
];

/// Returns the path of the browser's executable: the value of the environment variable `CHROMIUM` if set, else the path
/// of `chromium` in the PATH. Returns `None` if there is no browser.
pub fn find() -> Option<PathBuf> {
    if let Some(path) = env::var_os("CHROMIUM") {
        return Some(PathBuf::from(path));
    }
    let path = env::var_os("PATH")?;
    let mut all = env::split_paths(&path).map(|folder| folder.join("chromium"));
    all.find(|it| it.is_file())
}

/// A running browser with one page. The browser is killed when this value is dropped.
pub struct Browser {
    process: Process,
    commands: Sender,
    answers: Receiver,
    unread: Vec<u8>,
    session: String,
    next: u64,
    /// Exceptions in the page's scripts, and violations of the page's content security policy
    complaints: Vec<String>,
}

impl Browser {
    /// Starts a browser that keeps its files in `folder`, with a window of `width` by `height` pixels.
    pub async fn start(folder: &Path, width: u32, height: u32) -> Result<Self> {
        let chromium = find().context(
            "there is no chromium: install the Debian package chromium, or set CHROMIUM",
        )?;
        let (to, from) = (folder.join("to-browser"), folder.join("from-browser"));
        let made = std::process::Command::new("mkfifo")
            .args([&to, &from])
            .status()?;
        ensure!(made.success(), "mkfifo: {made}");
        let mut pipes = OpenOptions::new();
        // Each FIFO is opened for reading and writing, because opening only one end would block until the other end is
        // open.
        let answers = pipes.read_write(true).open_receiver(&from)?;
        let commands = pipes.read_write(true).open_sender(&to)?;
        let mut command = process::command(Path::new("sh"));
        command
            .args(["-c", r#"exec "$0" "$@" 3<"$TO_BROWSER" 4>"$FROM_BROWSER""#])
            .arg(chromium)
            .args(FLAGS)
            .arg(format!(
                "--user-data-dir={}",
                folder.join("profile").display()
            ))
            .arg(format!("--window-size={width},{height}"))
            .env("TO_BROWSER", &to)
            .env("FROM_BROWSER", &from)
            .env("HOME", folder);
        let process = Process::spawn("chromium", command, &folder.join("chromium.log"))?;
        let mut browser = Self {
            process,
            commands,
            answers,
            unread: Vec::new(),
            session: String::new(),
            next: 0,
            complaints: Vec::new(),
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let id = target.await?["targetId"].clone();
        let attach = json!({"targetId": id, "flatten": true});
        let session = browser.call("Target.attachToTarget", attach).await?;
        let session = session["sessionId"].as_str().context("no session")?;
        session.clone_into(&mut browser.session);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({})).await?;
        }
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
        });
        browser
            .call("Emulation.setDeviceMetricsOverride", size)
            .await?;
        Ok(browser)
    }

    /// Navigates to `url`. The page may still be loading when this returns.
    pub async fn open(&mut self, url: &str) -> Result<()> {
        let answer = self.call("Page.navigate", json!({"url": url})).await?;
        ensure!(
            answer["errorText"].is_null(),
            "{url}: {}",
            answer["errorText"]
        );
        Ok(())
    }

    /// Evaluates an expression in the page. If the result is a promise, awaits it.
    pub async fn eval(&mut self, expression: &str) -> Result<Value> {
        let call = json!({
            "expression": expression, "returnByValue": true, "awaitPromise": true,
        });
        let mut answer = self.call("Runtime.evaluate", call).await?;
        if !answer["exceptionDetails"].is_null() {
            bail!("{expression}: {}", answer["exceptionDetails"]);
        }
        Ok(answer["result"]["value"].take())
    }

    /// Waits until an expression is `true` in the page.
    pub async fn wait(&mut self, expression: &str) -> Result<()> {
        let what = format!("in the page: {expression}");
        until(&what, LIMIT, async || {
            let is = self.eval(expression).await?;
            Ok((is == true).then_some(()))
        })
        .await
        .with_context(|| format!("the page complains of {:?}", self.complaints))
    }

    /// Presses keys by their names, one after the other: `ArrowLeft`, `Enter`, `a`.
    pub async fn press(&mut self, keys: &[&str]) -> Result<()> {
        for key in keys {
            let code = match *key {
                "Enter" => 13,
                "Escape" => 27,
                _ => 0,
            };
            let mut down = json!({"type": "keyDown", "key": key, "windowsVirtualKeyCode": code});
            if key.chars().count() == 1 {
                down["text"] = json!(key);
            }
            if *key == "Enter" {
                down["text"] = json!("\r");
            }
            self.call("Input.dispatchKeyEvent", down).await?;
            let up = json!({"type": "keyUp", "key": key});
            self.call("Input.dispatchKeyEvent", up).await?;
        }
        Ok(())
    }

    /// Types text into the element that has the focus.
    pub async fn type_text(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({"text": text})).await?;
        Ok(())
    }

    /// Moves the mouse to a position in pixels of the page and clicks `times` times.
    pub async fn click(&mut self, x: f64, y: f64, times: u32) -> Result<()> {
        let event = |kind: &str, count: u32| json!({"type": kind, "x": x, "y": y, "button": "left", "clickCount": count});
        let moved = json!({"type": "mouseMoved", "x": x, "y": y});
        self.call("Input.dispatchMouseEvent", moved).await?;
        for count in 1..=times {
            for kind in ["mousePressed", "mouseReleased"] {
                self.call("Input.dispatchMouseEvent", event(kind, count))
                    .await?;
            }
        }
        Ok(())
    }

    /// Sets the colour scheme that the page sees as `prefers-color-scheme`: `light` or `dark`.
    pub async fn colours(&mut self, scheme: &str) -> Result<()> {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call(
            "Emulation.setEmulatedMedia",
            json!({ "features": features }),
        )
        .await?;
        Ok(())
    }

    /// Returns a screenshot of the page, as PNG.
    pub async fn picture(&mut self) -> Result<Vec<u8>> {
        let answer = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let answer = answer.await?;
        // Deserializing a `ByteString` decodes base64.
        let ByteString(picture) = serde_json::from_value(answer["data"].clone())?;
        Ok(picture)
    }

    /// Returns the exceptions and the violations of the content security policy that the page has reported so far.
    pub async fn complaints(&mut self) -> Result<Vec<String>> {
        // The browser sends messages in order. So once this command is answered, all messages that the browser sent
        // earlier have been read.
        self.eval("1").await?;
        Ok(self.complaints.clone())
    }

    async fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        let done = tokio::time::timeout(LIMIT, self.call_now(method, params)).await;
        let done = done.with_context(|| {
            let tail = self.process.log_tail(20);
            format!("chromium does not answer {method} within {LIMIT:?}; {tail}")
        })?;
        done.with_context(|| method.to_owned())
    }

    async fn call_now(&mut self, method: &str, params: Value) -> Result<Value> {
        self.next += 1;
        let mut command = json!({"id": self.next, "method": method, "params": params});
        if !self.session.is_empty() {
            command["sessionId"] = json!(self.session);
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        self.commands.write_all(&bytes).await?;
        loop {
            let mut message = self.message().await?;
            if message["id"] == self.next {
                ensure!(message["error"].is_null(), "{}", message["error"]);
                return Ok(message["result"].take());
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                self.complaints.push(params["exceptionDetails"].to_string());
            }
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                self.complaints.push(params["entry"]["text"].to_string());
            }
            _ => {}
        }
    }

    async fn message(&mut self) -> Result<Value> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == 0) {
                let message: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(serde_json::from_slice(&message[..end])?);
            }
            let mut more = vec![0; 65536];
            let count = self.answers.read(&mut more).await?;
            self.process.check_running()?;
            self.unread.extend(&more[..count]);
        }
    }
}
