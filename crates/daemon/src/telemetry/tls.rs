//! TLS for the admin port: a certificate and its key in two files, which may be replaced.
//!
//! # Guarantees
//! - New files apply to connections that begin a second or more after the replacement, without a restart.
//! - If the new files cannot be used, that is logged, and the previous certificate and key stay in use.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{info, warn};

/// The shortest interval between checks of the files. They are checked only when a client connects.
const LOOK: Duration = Duration::from_secs(1);

/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file does not exist or does not contain what it should.
    #[error(
        "{path} has no {what} in PEM: {why}: give --admin-tls-cert and --admin-tls-key, as openssl and cert-manager write them"
    )]
    File {
        /// Path of the file
        path: PathBuf,
        /// What the file should contain
        what: &'static str,
        /// What is wrong
        why: String,
    },
    /// The certificate and the key do not match.
    #[error(
        "{cert} and {key} are of no use for TLS: {why}: the key has to be that of the first certificate"
    )]
    Pair {
        /// Path of the certificate
        cert: PathBuf,
        /// Path of the key
        key: PathBuf,
        /// The error of rustls
        why: rustls::Error,
    },
}

/// The certificate and key that are in the files now.
#[derive(Debug)]
pub struct TlsFiles {
    cert: PathBuf,
    key: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    looked: Instant,
    /// The stamps of certificate and key when they were read
    stamps: [Option<Stamp>; 2],
    config: Arc<ServerConfig>,
}

/// Modification time and length of a file. They change when the file is written or replaced.
type Stamp = (SystemTime, u64);

impl TlsFiles {
    /// Reads both files; fails if they cannot be used.
    pub fn open(cert: PathBuf, key: PathBuf) -> Result<Self, TlsError> {
        let stamps = [stamp(&cert), stamp(&key)];
        let config = read(&cert, &key)?;
        let state = State {
            looked: Instant::now(),
            stamps,
            config,
        };
        Ok(Self {
            cert,
            key,
            state: Mutex::new(state),
        })
    }

    /// Returns the configuration for a new connection. Reads the files again if they have changed.
    pub(super) fn config(&self) -> Arc<ServerConfig> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.looked.elapsed() >= LOOK {
            state.looked = Instant::now();
            let stamps = [stamp(&self.cert), stamp(&self.key)];
            if stamps != state.stamps {
                state.stamps = stamps;
                match read(&self.cert, &self.key) {
                    Ok(config) => {
                        info!(
                            "the admin port has the new certificate of {}",
                            self.cert.display()
                        );
                        state.config = config;
                    }
                    Err(error) => warn!("the admin port keeps its certificate: {error}"),
                }
            }
        }
        Arc::clone(&state.config)
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let known = fs::metadata(path).ok()?;
    Some((known.modified().ok()?, known.len()))
}

fn read(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let no = |path: &Path, what, why: &dyn ToString| TlsError::File {
        path: path.to_owned(),
        what,
        why: why.to_string(),
    };
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| no(cert, "certificate", &error))?;
    if chain.is_empty() {
        return Err(no(cert, "certificate", &"there is none"));
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| no(key, "key", &error))?;
    let pair = |why| TlsError::Pair {
        cert: cert.to_owned(),
        key: key.to_owned(),
        why,
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|it| it.with_no_client_auth().with_single_cert(chain, secret))
        .map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_missing_or_no_pem_are_told_with_the_flag() {
        let folder = format!("cadastre-tls-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        let (cert, key) = (folder.join("tls.crt"), folder.join("tls.key"));
        let error = || {
            TlsFiles::open(cert.clone(), key.clone())
                .unwrap_err()
                .to_string()
        };
        assert!(
            error().contains("tls.crt has no certificate"),
            "{}",
            error()
        );
        fs::write(&cert, "no PEM").unwrap();
        assert!(error().contains("there is none"), "{}", error());
        assert!(error().contains("--admin-tls-cert"), "{}", error());
        fs::remove_dir_all(folder).unwrap();
    }
}
