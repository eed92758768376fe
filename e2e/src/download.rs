//! Downloads released programs of Kubernetes, so that they need not be built.
//!
//! # Guarantees
//! - A program is used only if its content has the SHA-256 that the server publishes beside it.
//! - A server that cannot be reached costs a few seconds, once. What cannot be downloaded is built.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Output;

use anyhow::{Context as _, Result, ensure};

use crate::process;

/// The environment variable that names another server, such as a mirror. If it is empty, nothing is downloaded.
const VARIABLE: &str = "CADASTRE_DOWNLOADS";
/// The default server: that of the Kubernetes project.
const SERVER: &str = "https://dl.k8s.io/release";
/// The maximum time to connect, in seconds.
const CONNECT: &str = "4";
/// The maximum time for one file, in seconds. The largest program has some 100 MB.
const WHOLE: &str = "300";

/// The server from which released programs are downloaded.
#[derive(Debug)]
pub(crate) struct ReleaseServer {
    /// The URL to which the release is appended; `None` if nothing is downloaded
    address: Option<String>,
}

impl ReleaseServer {
    /// Returns the server that the environment names.
    pub(crate) fn from_env() -> Self {
        let named = env::var(VARIABLE).unwrap_or_else(|_| SERVER.to_owned());
        Self::new(&named)
    }

    fn new(address: &str) -> Self {
        let address = address.trim_end_matches('/');
        Self {
            address: (!address.is_empty()).then(|| address.to_owned()),
        }
    }

    /// Downloads a program into `folder`. Returns `None` if downloads are off or do not exist for this architecture.
    /// The first error switches downloads off.
    pub(crate) fn fetch(&mut self, release: &str, name: &str, folder: &Path) -> Option<Result<()>> {
        let address = self.address.clone()?;
        let architecture = architecture()?;
        let url = format!("{address}/{release}/bin/linux/{architecture}/{name}");
        let fetched = fetch(&url, name, folder);
        if fetched.is_err() {
            self.address = None;
        }
        Some(fetched)
    }
}

/// Returns the name of this machine's architecture in the addresses of releases.
fn architecture() -> Option<&'static str> {
    match (env::consts::OS, env::consts::ARCH) {
        ("linux", "x86_64") => Some("amd64"),
        ("linux", "aarch64") => Some("arm64"),
        _ => None,
    }
}

fn fetch(url: &str, name: &str, folder: &Path) -> Result<()> {
    let published = curl(&[&format!("{url}.sha256")])?;
    let published = String::from_utf8_lossy(&published.stdout).trim().to_owned();
    let partial = folder.join(format!(".{name}.partial"));
    let file = partial.to_string_lossy();
    curl(&["--output", &*file, url])?;
    let is = sha256(&partial)?;
    if is != published {
        fs::remove_file(&partial)?;
        anyhow::bail!("{url} has the SHA-256 {is}, but {published} is published");
    }
    let mut permissions = fs::metadata(&partial)?.permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    fs::set_permissions(&partial, permissions)?;
    fs::rename(&partial, folder.join(name))?;
    Ok(())
}

fn curl(arguments: &[&str]) -> Result<Output> {
    run(
        "curl",
        &[
            &["--fail", "--silent", "--show-error", "--location"],
            &["--connect-timeout", CONNECT, "--max-time", WHOLE][..],
            arguments,
        ]
        .concat(),
    )
}

fn sha256(file: &Path) -> Result<String> {
    let output = run("sha256sum", &[&file.to_string_lossy()])?;
    let text = String::from_utf8(output.stdout)?;
    let sum = text.split_whitespace().next();
    Ok(sum.context("sha256sum prints a sum")?.to_owned())
}

fn run(program: &str, arguments: &[&str]) -> Result<Output> {
    let mut command = process::command(Path::new(program));
    let output = command.args(arguments).output();
    let output = output.with_context(|| format!("{program} cannot be run"))?;
    let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(output.status.success(), "{error}");
    Ok(output)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt as _;
    use std::thread;

    use super::*;

    const CONTENT: &str = "the program";

    /// Starts a server with one program, and returns its address. `sum` is the SHA-256 that the server publishes.
    fn server(sum: String) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/release", listener.local_addr().unwrap());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = [0; 4_096];
                let length = stream.read(&mut request).unwrap();
                let request = String::from_utf8_lossy(&request[..length]).into_owned();
                let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
                let body = match path.strip_prefix("/release/v1/bin/linux/") {
                    Some(it) if it.ends_with("/kubectl") => CONTENT,
                    Some(it) if it.ends_with("/kubectl.sha256") => &sum,
                    _ => {
                        let none = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
                        stream.write_all(none.as_bytes()).unwrap();
                        continue;
                    }
                };
                let length = body.len();
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        address
    }

    #[test]
    fn a_program_is_taken_only_with_the_published_sum() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sum");
        fs::write(&file, CONTENT).unwrap();
        let sum = sha256(&file).unwrap();
        let kubectl = folder.path().join("kubectl");

        let mut wrong = ReleaseServer::new(&server("0".repeat(64)));
        let error = wrong.fetch("v1", "kubectl", folder.path()).unwrap();
        let error = error.unwrap_err().to_string();
        assert!(error.contains("is published"), "{error}");
        assert!(!kubectl.exists());
        let again = wrong.fetch("v1", "kubectl", folder.path());
        assert!(again.is_none(), "nothing more comes from this server");

        let mut right = ReleaseServer::new(&server(sum));
        let fetched = right.fetch("v1", "kubectl", folder.path());
        fetched.unwrap().unwrap();
        assert_eq!(fs::read_to_string(&kubectl).unwrap(), CONTENT);
        let mode = fs::metadata(&kubectl).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        let other = right.fetch("v1", "kubelet", folder.path()).unwrap();
        assert!(other.unwrap_err().to_string().contains("404"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn without_a_server_nothing_is_downloaded() {
        let folder = tempfile::tempdir().unwrap();
        assert!(
            ReleaseServer::new("")
                .fetch("v1", "kubectl", folder.path())
                .is_none()
        );
    }
}
