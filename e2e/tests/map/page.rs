//! The browser with the page open.

use std::path::PathBuf;

use cadastre_e2e::{Browser, Daemon};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) struct Page {
    pub browser: Browser,
    _folder: TempDir,
}

impl Page {
    /// Opens the page at that place (`#pool=...`, or nothing) and waits until it shows something.
    pub async fn open(daemon: &Daemon, place: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut browser = Browser::start(folder.path(), 1440, 1000).await.unwrap();
        let url = format!("http://{}/map{place}", daemon.admin_address());
        browser.open(&url).await.unwrap();
        let mut page = Self {
            browser,
            _folder: folder,
        };
        page.ready().await;
        page
    }

    pub async fn ready(&mut self) {
        let ready = "document.documentElement.dataset.state === 'ready'";
        self.browser.wait(ready).await.unwrap();
    }

    /// Waits until the text of an element has those words.
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

    /// A number that the page keeps for those who look after it: `rows`, `drawn`.
    pub async fn count(&mut self, name: &str) -> u64 {
        let count = format!("Number(document.documentElement.dataset.{name})");
        self.browser.eval(&count).await.unwrap().as_u64().unwrap()
    }

    /// Which part of the space is in view.
    pub async fn view(&mut self) -> String {
        let view = self.browser.eval("document.documentElement.dataset.view");
        view.await.unwrap().as_str().unwrap().to_owned()
    }

    /// How many colours the picture has, so that something is drawn at all.
    pub async fn colours(&mut self) -> u64 {
        let count = "(() => { const c = document.getElementById('map'); \
             const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; \
             const all = new Set(); \
             for (let i = 0; i < d.length; i += 4) all.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); \
             return all.size; })()";
        self.browser.eval(count).await.unwrap().as_u64().unwrap()
    }

    /// Clicks so often on the cell of an address.
    pub async fn click(&mut self, address: &str, times: u32) {
        let place = format!(
            "(() => {{ const g = now.grid, i = g.indexOf(parseAddress('{address}').value); \
             const box = document.getElementById('map').getBoundingClientRect(); \
             return [box.left + GUTTER + (i % g.columns + 0.5) * g.w, \
                     box.top + TOP + (Math.floor(i / g.columns) + 0.5) * g.h]; }})()"
        );
        let place: Value = self.browser.eval(&place).await.unwrap();
        let at = |i: usize| place[i].as_f64().unwrap();
        self.browser.click(at(0), at(1), times).await.unwrap();
    }

    /// Nothing was thrown, and nothing was loaded or done that the policy forbids.
    pub async fn assert_quiet(&mut self) {
        let complaints = self.browser.complaints().await.unwrap();
        assert!(complaints.is_empty(), "{complaints:?}");
    }

    /// Keeps a picture, if pictures are wanted.
    pub async fn keep(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("PICTURES") else {
            return;
        };
        let path = PathBuf::from(folder).join(name);
        let picture = self.browser.picture().await.unwrap();
        std::fs::write(&path, picture).unwrap();
    }
}
