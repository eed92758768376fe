//! TLS for the admin port: a certificate and its key in two files, which can be replaced while the process runs.
//!
//! # Guarantees
//! - New files take effect without a restart, for connections that begin a second or more after the replacement.
//! - If the new files cannot be used, an error is logged, and the previous certificate and key stay in use.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{Error, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{info, warn};

/// The minimum interval between reads of the files. The files are read only when a client connects.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Why the certificate and the key cannot be used, as a text for users.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

/// The certificate and key of the admin port. If the files change, they are read again.
#[derive(Debug)]
pub struct TlsFiles {
    cert: PathBuf,
    key: PathBuf,
    read: Instant,
    /// The content of both files, or why they cannot be read
    content: [Content; 2],
    config: Arc<ServerConfig>,
}

type Content = Result<Vec<u8>, String>;

impl TlsFiles {
    /// Reads both files. Fails if they cannot be used.
    pub fn open(cert: PathBuf, key: PathBuf) -> Result<Self, TlsError> {
        let content = [read(&cert), read(&key)];
        Ok(Self {
            config: configure(&cert, &key, &content)?,
            cert,
            key,
            read: Instant::now(),
            content,
        })
    }

    /// Returns the configuration for a new connection. If the files were last read at least a second ago, reads them
    /// again.
    pub(super) fn config(&mut self) -> Arc<ServerConfig> {
        if self.read.elapsed() >= READ_INTERVAL {
            self.read = Instant::now();
            let content = [read(&self.cert), read(&self.key)];
            if content != self.content {
                match configure(&self.cert, &self.key, &content) {
                    Ok(config) => {
                        let path = self.cert.display();
                        info!("the admin port has the new certificate of {path}");
                        self.config = config;
                    }
                    Err(error) => warn!("the admin port keeps its certificate: {error}"),
                }
                self.content = content;
            }
        }
        Arc::clone(&self.config)
    }
}

fn read(path: &Path) -> Content {
    fs::read(path).map_err(|error| error.to_string())
}

fn configure(
    cert: &Path,
    key: &Path,
    [certificates, secret]: &[Content; 2],
) -> Result<Arc<ServerConfig>, TlsError> {
    let (cert, key) = (cert.display(), key.display());
    let missing = |path, what, why| {
        TlsError(format!(
            "{path} has no {what} in PEM: {why}: give --admin-tls-cert and --admin-tls-key, as openssl and cert-manager write them"
        ))
    };
    let text = |error: Error| error.to_string();
    let chain = certificates.clone().and_then(|pem| {
        let chain = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(text)?;
        if chain.is_empty() {
            return Err("there is none".to_owned());
        }
        Ok(chain)
    });
    let chain = chain.map_err(|why| missing(&cert, "certificate", why))?;
    let secret = secret.clone();
    let secret = secret.and_then(|pem| PrivateKeyDer::from_pem_slice(&pem).map_err(text));
    let secret = secret.map_err(|why| missing(&key, "key", why))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|it| it.with_no_client_auth().with_single_cert(chain, secret))
        .map_err(|why| {
            TlsError(format!(
                "{cert} and {key} are of no use for TLS: {why}: the key has to be that of the first certificate"
            ))
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_about_files_that_are_missing_or_no_pem_name_the_flag() {
        let folder = format!("cadastre-tls-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        let (cert, key) = (folder.join("tls.crt"), folder.join("tls.key"));
        let assert_error = |part: &str| {
            let error = TlsFiles::open(cert.clone(), key.clone()).unwrap_err();
            assert!(error.to_string().contains(part), "{part}: {error}");
        };
        assert_error("tls.crt has no certificate");
        fs::write(&cert, "no PEM").unwrap();
        assert_error("there is none");
        assert_error("--admin-tls-cert");
        fs::remove_dir_all(folder).unwrap();
    }
}
