//! TLS towards a server.

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::config::ClientTls;
use crate::file;

/// Where distributions keep the certificates that the system trusts.
const SYSTEM_BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The files of a TLS configuration. They are read again when one of them changes.
#[derive(Debug)]
pub struct TlsFiles {
    files: ClientTls,
    host: String,
    loaded: Mutex<Option<Loaded>>,
}

#[derive(Debug)]
struct Loaded {
    stamps: Vec<Option<(SystemTime, u64)>>,
    config: Arc<ClientConfig>,
}

impl TlsFiles {
    /// TLS to `host` with these files; none is read yet.
    pub fn new(files: ClientTls, host: &str) -> TlsFiles {
        TlsFiles { files, host: host.to_owned(), loaded: Mutex::new(None) }
    }

    /// Secures a connection.
    pub async fn handshake(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = self.files.server_name.as_ref().unwrap_or(&self.host);
        let name = ServerName::try_from(name.clone()).map_err(invalid)?;
        TlsConnector::from(self.config()?).connect(name, stream).await
    }

    fn config(&self) -> io::Result<Arc<ClientConfig>> {
        let paths = [&self.files.ca_file, &self.files.cert_file, &self.files.key_file];
        let stamp = |path: &Option<PathBuf>| {
            let metadata = std::fs::metadata(path.as_ref()?).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        };
        let stamps: Vec<_> = paths.into_iter().map(stamp).collect();
        let mut loaded = self.loaded.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(loaded) = loaded.as_ref().filter(|loaded| loaded.stamps == stamps) {
            return Ok(loaded.config.clone());
        }
        let config = Arc::new(self.load()?);
        *loaded = Some(Loaded { stamps, config: config.clone() });
        Ok(config)
    }

    fn load(&self) -> io::Result<ClientConfig> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(invalid)?;
        let builder = if self.files.insecure_skip_verify {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(TrustAnything(provider)))
        } else {
            builder.with_root_certificates(self.roots()?)
        };
        let mut config = match (&self.files.cert_file, &self.files.key_file) {
            (Some(cert_file), Some(key_file)) => {
                let pem = file::read_pem(key_file).map_err(|error| about(key_file, error))?;
                let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| about(key_file, error))?;
                builder.with_client_auth_cert(certificates(cert_file)?, key).map_err(invalid)?
            }
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn roots(&self) -> io::Result<RootCertStore> {
        let system = || SYSTEM_BUNDLES.iter().map(PathBuf::from).find(|path| path.is_file());
        let file = self.files.ca_file.clone().or_else(system).ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, "the system has no certificate bundle: set tls.ca_file")
        })?;
        let mut roots = RootCertStore::empty();
        let (added, _ignored) = roots.add_parsable_certificates(certificates(&file)?);
        if added == 0 {
            return Err(about(&file, "there is no usable certificate in it"));
        }
        Ok(roots)
    }
}

/// What a server said in TLS's own words while an answer was awaited.
pub fn refusal(error: &hyper::Error) -> Option<io::Error> {
    let broken = error.source()?.downcast_ref::<io::Error>()?;
    let refusal = broken.get_ref()?.downcast_ref::<rustls::Error>()?;
    Some(invalid(refusal.clone()))
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let pem = file::read_pem(path).map_err(|error| about(path, error))?;
    CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>().map_err(|error| about(path, error))
}

fn about(path: &Path, error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// `insecure_skip_verify`.
#[derive(Debug)]
struct TrustAnything(Arc<CryptoProvider>);

impl ServerCertVerifier for TrustAnything {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
