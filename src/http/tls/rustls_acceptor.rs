//! TLS by rustls, with the names that Go and exporter-toolkit use.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::crypto::{
    CryptoProvider, SupportedKxGroup, ring, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, NamedGroup, RootCertStore,
    ServerConfig, SignatureScheme, SupportedCipherSuite, SupportedProtocolVersion, version,
};
use tokio_rustls::TlsAcceptor;

use super::{TlsError, TlsSettings};
use crate::http::stream::Stream;

/// Turns connections into TLS connections.
pub(in crate::http) struct Acceptor(TlsAcceptor);

impl Acceptor {
    /// Reads the certificates and checks every setting.
    pub(in crate::http) fn new(settings: &TlsSettings) -> Result<Acceptor, TlsError> {
        let certificate_file = settings.cert_file.as_deref().ok_or(TlsError::Missing("cert_file"))?;
        let key_file = settings.key_file.as_deref().ok_or(TlsError::Missing("key_file"))?;
        let chain = certificates("cert_file", certificate_file)?;
        let key = PrivateKeyDer::from_pem_slice(&pem("key_file", key_file)?)
            .map_err(|error| file("key_file", key_file, &error))?;

        // The provider is passed along: the process-wide default panics when two are compiled in.
        let provider = Arc::new(provider(settings)?);
        let versions = versions(settings)?;
        let verifier = verifier(settings, &provider)?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(|error| TlsError::Certificate(error.to_string()))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(|error| TlsError::Certificate(error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Acceptor(Arc::new(config).into()))
    }

    /// Shakes hands. The caller limits the time.
    pub(in crate::http) async fn accept(&self, stream: Stream) -> io::Result<Stream> {
        self.0.accept(Box::new(stream)).await.map(|stream| Stream::Tls(Box::new(stream)))
    }
}

fn file(setting: &'static str, path: &Path, problem: &impl ToString) -> TlsError {
    TlsError::File { setting, path: path.to_owned(), problem: problem.to_string() }
}

fn value(setting: &'static str, value: &str, problem: String) -> TlsError {
    TlsError::Value { setting, value: value.to_owned(), problem }
}

fn pem(setting: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    crate::file::read_pem(path).map_err(|error| file(setting, path, &error))
}

fn certificates(setting: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read: Vec<_> = CertificateDer::pem_slice_iter(&pem(setting, path)?)
        .collect::<Result<_, _>>()
        .map_err(|error| file(setting, path, &error))?;
    if read.is_empty() {
        return Err(file(setting, path, &"it holds no certificate in PEM form"));
    }
    Ok(read)
}

/// `min_version` and `max_version`.
fn versions(settings: &TlsSettings) -> Result<Vec<&'static SupportedProtocolVersion>, TlsError> {
    let number = |setting, name: &Option<String>, default| match name.as_deref() {
        None => Ok(default),
        Some("TLS12") => Ok(2),
        Some("TLS13") => Ok(3),
        Some(other) => Err(value(
            setting,
            other,
            "is not supported: it must be TLS12 or TLS13 (older ones are broken)".into(),
        )),
    };
    let lowest = number("min_version", &settings.min_version, 2)?;
    let highest = number("max_version", &settings.max_version, 3)?;
    if lowest > highest {
        return Err(TlsError::Contradiction("`min_version` is above `max_version`"));
    }
    let all = [(3, &version::TLS13), (2, &version::TLS12)];
    Ok(all
        .into_iter()
        .filter(|(it, _)| (lowest..=highest).contains(it))
        .map(|(_, version)| version)
        .collect())
}

/// `cipher_suites` and `curve_preferences`.
fn provider(settings: &TlsSettings) -> Result<CryptoProvider, TlsError> {
    let mut provider = ring::default_provider();
    if let Some(names) = settings.cipher_suites.as_ref().filter(|names| !names.is_empty()) {
        // As in Go, the list is about TLS 1.2; the suites of TLS 1.3 are all good and always on.
        let mut chosen: Vec<SupportedCipherSuite> =
            provider.cipher_suites.iter().filter(|suite| suite.tls13().is_some()).copied().collect();
        for name in names {
            let suite = provider
                .cipher_suites
                .iter()
                .find(|suite| suite_names(**suite).contains(name))
                .ok_or_else(|| {
                    let known: Vec<String> =
                        provider.cipher_suites.iter().map(|suite| suite_names(*suite)[0].clone()).collect();
                    value(
                        "cipher_suites",
                        name,
                        format!("is not supported; supported are {}", known.join(", ")),
                    )
                })?;
            if !chosen.contains(suite) {
                chosen.push(*suite);
            }
        }
        provider.cipher_suites = chosen;
    }
    if let Some(names) = settings.curve_preferences.as_ref().filter(|names| !names.is_empty()) {
        provider.kx_groups = names.iter().map(|name| curve(name, &provider)).collect::<Result<_, _>>()?;
    }
    Ok(provider)
}

/// What Go calls a suite: today's name, and an older one for `ChaCha20`.
fn suite_names(suite: SupportedCipherSuite) -> [String; 2] {
    let name = format!("{:?}", suite.suite()).replace("TLS13_", "TLS_");
    let older = name.strip_suffix("_POLY1305_SHA256").map(|stem| format!("{stem}_POLY1305"));
    [name.clone(), older.unwrap_or(name)]
}

fn curve(name: &str, provider: &CryptoProvider) -> Result<&'static dyn SupportedKxGroup, TlsError> {
    let group = match name {
        "X25519" => Some(NamedGroup::X25519),
        "CurveP256" => Some(NamedGroup::secp256r1),
        "CurveP384" => Some(NamedGroup::secp384r1),
        _ => None,
    };
    provider.kx_groups.iter().find(|known| Some(known.name()) == group).copied().ok_or_else(|| {
        value(
            "curve_preferences",
            name,
            "is not supported; supported are X25519, CurveP256, CurveP384".into(),
        )
    })
}

/// `client_auth_type`, `client_ca_file` and `client_allowed_sans`.
fn verifier(
    settings: &TlsSettings,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let kind = settings.client_auth_type.as_deref().unwrap_or_default();
    let authority = settings.client_ca_file.as_deref();
    let allowed = allowed_names(settings)?;
    let unproven = |is_mandatory| -> Arc<dyn ClientCertVerifier> {
        Arc::new(AnyCertificate { is_mandatory, provider: provider.clone() })
    };
    let by_authority = |is_optional| {
        let path = authority.ok_or(TlsError::Contradiction(
            "`client_auth_type` asks for verified client certificates, but `client_ca_file` is missing",
        ))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates("client_ca_file", path)? {
            roots.add(certificate).map_err(|error| file("client_ca_file", path, &error))?;
        }
        let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        if is_optional {
            builder = builder.allow_unauthenticated();
        }
        builder.build().map_err(|error| file("client_ca_file", path, &error))
    };
    let verifier: Arc<dyn ClientCertVerifier> = match kind {
        "" | "NoClientCert" => {
            if authority.is_some() {
                return Err(TlsError::Contradiction(
                    "`client_ca_file` has no effect without `client_auth_type: RequireAndVerifyClientCert`",
                ));
            }
            WebPkiClientVerifier::no_client_auth()
        }
        "RequestClientCert" => unproven(false),
        "RequireAnyClientCert" | "RequireClientCert" => unproven(true),
        "VerifyClientCertIfGiven" => by_authority(true)?,
        "RequireAndVerifyClientCert" => by_authority(false)?,
        other => {
            return Err(value(
                "client_auth_type",
                other,
                "is unknown; known are NoClientCert, RequestClientCert, RequireAnyClientCert, \
                 VerifyClientCertIfGiven, RequireAndVerifyClientCert"
                    .into(),
            ));
        }
    };
    if allowed.is_empty() {
        return Ok(verifier);
    }
    if kind != "RequireAndVerifyClientCert" {
        return Err(TlsError::Contradiction(
            "`client_allowed_sans` needs `client_auth_type: RequireAndVerifyClientCert`",
        ));
    }
    Ok(Arc::new(AllowedNames { inner: verifier, allowed }))
}

fn allowed_names(settings: &TlsSettings) -> Result<Vec<ServerName<'static>>, TlsError> {
    let names = settings.client_allowed_sans.iter().flatten();
    names
        .map(|name| {
            ServerName::try_from(name.clone()).map_err(|_| {
                value("client_allowed_sans", name, "is neither a DNS name nor an IP address".into())
            })
        })
        .collect()
}

/// Asks for a certificate and takes any, as Go's `RequestClientCert` and `RequireAnyClientCert` do. It proves nothing.
#[derive(Debug)]
struct AnyCertificate {
    is_mandatory: bool,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        self.is_mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Lets in verified certificates that are valid for one of the names.
#[derive(Debug)]
struct AllowedNames {
    inner: Arc<dyn ClientCertVerifier>,
    allowed: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for AllowedNames {
    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(certificate, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(certificate)?;
        if self.allowed.iter().any(|name| verify_server_name(&parsed, name).is_ok()) {
            Ok(verified)
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
