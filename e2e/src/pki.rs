//! Certificates and keys of one control plane, created at its start.

use std::path::{Path, PathBuf};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

use crate::kubeconfig::write_private;

/// Paths of the files that [`create`] wrote, all PEM, and the CA.
#[derive(Debug)]
pub struct Pki {
    issuer: Box<CertifiedIssuer<'static, KeyPair>>,
    /// The CA's certificate, by which clients verify the API server.
    pub ca: PathBuf,
    /// The API server's certificate for 127.0.0.1, localhost and the `kubernetes` Service.
    pub serving_cert: PathBuf,
    /// The private key of `serving_cert`, which the API server needs for TLS handshakes.
    pub serving_key: PathBuf,
    /// The key that signs ServiceAccount tokens (ECDSA P-256, so ES256).
    pub service_account_key: PathBuf,
    /// The public key that verifies ServiceAccount tokens.
    pub service_account_pub: PathBuf,
}

impl Pki {
    /// Replaces the serving certificate and its key by new ones. kube-apiserver notices the new files by itself.
    pub fn renew_serving(&self) -> Result<()> {
        let names = ["localhost", "127.0.0.1", "10.96.0.1"].map(str::to_owned);
        let mut params = CertificateParams::new(names)?;
        params
            .distinguished_name
            .push(DnType::CommonName, "kube-apiserver");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        write_private(&self.serving_cert, &certificate.pem())?;
        write_private(&self.serving_key, &key.serialize_pem())
    }
}

/// Writes a CA certificate, a serving certificate and a ServiceAccount key pair to `folder`. The CA's private key is
/// not written, because no other process signs with it.
pub fn create(folder: &Path) -> Result<Pki> {
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, "cadastre-e2e");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let service_account = KeyPair::generate()?;
    let pki = Pki {
        issuer: Box::new(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?),
        ca: folder.join("ca.crt"),
        serving_cert: folder.join("apiserver.crt"),
        serving_key: folder.join("apiserver.key"),
        service_account_key: folder.join("service-account.key"),
        service_account_pub: folder.join("service-account.pub"),
    };
    write_private(&pki.ca, &pki.issuer.pem())?;
    pki.renew_serving()?;
    write_private(&pki.service_account_key, &service_account.serialize_pem())?;
    write_private(&pki.service_account_pub, &service_account.public_key_pem())?;
    Ok(pki)
}
