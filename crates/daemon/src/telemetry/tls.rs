//! TLS in front of the admin port: a certificate and its key in two files, which may be replaced.
//!
//! # Guarantees
//! - New files are in use for who connects a second after them or later; nothing is restarted.
//! - A pair that cannot be used is told, and the one that was in use before goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{info, warn};

/// The files are looked at so often at most, and only while somebody connects.
const LOOK: Duration = Duration::from_secs(1);

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is not there, or is not what it should be.
    #[error(
        "{path} has no {what} in PEM: {why}: give --admin-tls-cert and --admin-tls-key, as openssl and cert-manager write them"
    )]
    File {
        /// The file
        path: PathBuf,
        /// What it should have
        what: &'static str,
        /// What was found
        why: String,
    },
    /// The two do not go together.
    #[error(
        "{cert} and {key} are of no use for TLS: {why}: the key has to be that of the first certificate"
    )]
    Pair {
        /// The certificate's file
        cert: PathBuf,
        /// The key's file
        key: PathBuf,
        /// What rustls says
        why: rustls::Error,
    },
}

/// A certificate and its key, as they are in the files now.
#[derive(Debug)]
pub struct Tls {
    cert: PathBuf,
    key: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    looked: Instant,
    /// What the files looked like when they were read
    stamps: [Option<Stamp>; 2],
    config: Arc<ServerConfig>,
}

/// Differs when a file was written or replaced: seconds, nanoseconds, inode, length.
type Stamp = (SystemTime, u64);

impl Tls {
    /// Reads both files.
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

    /// For a connection that comes now.
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
            Tls::open(cert.clone(), key.clone())
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
