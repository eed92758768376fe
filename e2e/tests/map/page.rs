//! The web page of the kubectl plugin, open in a browser.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::process::{self, Process};
use cadastre_e2e::{Browser, ControlPlane, daemon};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::eventually;

pub(crate) struct Page {
    pub browser: Browser,
    /// The process of `kubectl cadastre map --web`
    pub plugin: Process,
    _folder: TempDir,
}

impl Page {
    /// Starts the kubectl plugin, opens its page, and waits until the page is ready.
    pub async fn open(cluster: &ControlPlane) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = process::command(&daemon::kubectl_plugin().unwrap());
        command
            .args(["map", "--web"])
            .env("KUBECONFIG", cluster.kubeconfig(ADMIN).unwrap());
        let log = folder.path().join("plugin.log");
        let mut plugin = Process::spawn("kubectl-cadastre", command, &log).unwrap();
        let url = eventually("the page is served", async || {
            plugin.check_running()?;
            let said = std::fs::read_to_string(&log)?;
            let mut lines = said.split_inclusive('\n');
            let url = lines.find(|it| it.starts_with("http://127.0.0.1:") && it.ends_with('\n'));
            Ok(url.map(|it| it.trim().to_owned()))
        })
        .await;
        let mut browser = Browser::start(folder.path(), 1440, 1000).await.unwrap();
        browser.open(&url).await.unwrap();
        let mut page = Self {
            browser,
            plugin,
            _folder: folder,
        };
        page.ready().await;
        page
    }

    /// Ends the kubectl plugin by SIGINT, like Ctrl-C, and asserts that it succeeds.
    pub async fn interrupt(&mut self) {
        self.plugin.signal(Signal::INT).unwrap();
        let ended = self.plugin.wait(Duration::from_secs(10)).await.unwrap();
        assert!(ended.is_some_and(|it| it.success()), "{ended:?}");
    }

    pub async fn ready(&mut self) {
        let ready = "document.documentElement.dataset.state === 'ready'";
        self.browser.wait(ready).await.unwrap();
    }

    /// Waits until an element's text contains `words`.
    pub async fn says(&mut self, selector: &str, words: &str) {
        let words = serde_json::to_string(words).unwrap();
        let is = format!("document.querySelector('{selector}').innerText.includes({words})");
        let seen = self.browser.wait(&is).await;
        let text = self.text(selector).await;
        assert!(seen.is_ok(), "{selector} does not say {words}: {text}");
    }

    pub async fn text(&mut self, selector: &str) -> String {
        let text = format!("document.querySelector('{selector}').innerText");
        let text = self.browser.eval(&text).await.unwrap();
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Returns how many cells of the picture are not free.
    pub async fn cells(&mut self) -> u64 {
        let count = self.browser.eval("now.picture.cells.length");
        count.await.unwrap().as_u64().unwrap()
    }

    /// Returns the CIDR that the picture shows.
    pub async fn view(&mut self) -> String {
        let view = self.browser.eval("document.documentElement.dataset.view");
        view.await.unwrap().as_str().unwrap().to_owned()
    }

    /// Returns the number of colours in the picture. By this number, tests check that something is drawn.
    pub async fn colours(&mut self) -> u64 {
        let count = "(() => { const c = document.getElementById('map'); \
             const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; \
             const all = new Set(); \
             for (let i = 0; i < d.length; i += 4) all.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); \
             return all.size; })()";
        self.browser.eval(count).await.unwrap().as_u64().unwrap()
    }

    /// Clicks `times` times on the cell that contains an IPv4 address.
    pub async fn click(&mut self, address: &str, times: u32) {
        let view = self.view().await;
        let (first, len) = view.split_once('/').unwrap();
        let number = |text: &str| u32::from(text.parse::<Ipv4Addr>().unwrap());
        let offset = number(address) - number(first);
        let size = self.browser.eval("now.picture.cellSize").await.unwrap();
        let size = u32::try_from(size.as_u64().unwrap()).unwrap();
        assert!(size >= len.parse().unwrap());
        let cell = offset >> (32 - size);
        let place = format!(
            "(() => {{ const box = document.getElementById('map').getBoundingClientRect(); \
             const [[x, y, w, h]] = boxes({{ at: {cell}, count: 1 }}); \
             return [box.left + x + w / 2, box.top + y + h / 2]; }})()"
        );
        let place: Value = self.browser.eval(&place).await.unwrap();
        let at = |i: usize| place[i].as_f64().unwrap();
        self.browser.click(at(0), at(1), times).await.unwrap();
    }

    /// Asserts that the page threw no exception and did not violate its content security policy.
    pub async fn assert_quiet(&mut self) {
        let complaints = self.browser.complaints().await.unwrap();
        assert!(complaints.is_empty(), "{complaints:?}");
    }

    /// Writes a screenshot to the folder that `PICTURES` names, if it is set.
    pub async fn keep(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("PICTURES") else {
            return;
        };
        let path = PathBuf::from(folder).join(name);
        let picture = self.browser.picture().await.unwrap();
        std::fs::write(&path, picture).unwrap();
    }
}
