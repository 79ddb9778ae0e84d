// SPDX-License-Identifier: Apache-2.0
//! TLS: the certificate shown to clients, and the lenient client for HTTPS ports in sandboxes.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme,
};

static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(ring::default_provider()));

/// The certificate of the listener; can be read again while running.
pub struct Certificate {
    chain_path: PathBuf,
    key_path: PathBuf,
    config: RwLock<Arc<ServerConfig>>,
}

impl Certificate {
    /// Read certificate chain and key, both PEM.
    ///
    /// # Errors
    /// A sentence that names the file and the fault.
    pub fn load(chain_path: &Path, key_path: &Path) -> Result<Self, String> {
        let config = server_config(chain_path, key_path)?;
        Ok(Certificate {
            chain_path: chain_path.to_owned(),
            key_path: key_path.to_owned(),
            config: RwLock::new(config),
        })
    }

    /// Read the files again. On a fault the old certificate stays in use.
    ///
    /// # Errors
    /// As [`Certificate::load`].
    pub fn reload(&self) -> Result<(), String> {
        let config = server_config(&self.chain_path, &self.key_path)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// What new connections use.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn server_config(chain_path: &Path, key_path: &Path) -> Result<Arc<ServerConfig>, String> {
    let unreadable = |path: &Path, error: &dyn std::fmt::Display| {
        format!("TLS: {} cannot be used: {error}", path.display())
    };
    let chain = CertificateDer::pem_file_iter(chain_path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unreadable(chain_path, &error))?;
    if chain.is_empty() {
        return Err(unreadable(
            chain_path,
            &"it holds no certificate in PEM form",
        ));
    }
    let key =
        PrivateKeyDer::from_pem_file(key_path).map_err(|error| unreadable(key_path, &error))?;
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS: {error}"))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| format!("TLS: certificate and key do not fit: {error}"))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Configuration for HTTPS ports in sandboxes: any certificate is taken.
///
/// The connection runs through the agent's tunnel, which already fixes the sandbox at the other
/// end; programs there have self-signed certificates at best.
pub fn insecure_client_config() -> Arc<ClientConfig> {
    static CONFIG: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_safe_default_protocol_versions()
            .expect("ring's provider supports the default versions");
        let mut config = builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate))
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Arc::new(config)
    });
    Arc::clone(&CONFIG)
}

#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(
            message,
            cert,
            signed,
            &PROVIDER.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            cert,
            signed,
            &PROVIDER.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER
            .signature_verification_algorithms
            .supported_schemes()
    }
}
