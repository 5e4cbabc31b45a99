//! TLS for ordinary connections, with libpq's five words.
//!
//! tokio-postgres knows only whether TLS is used; what is verified is decided here by the verifier given to rustls.
//! The cryptography is `ring`, named explicitly: another provider is linked too, and the process default is
//! whichever came first.

use std::{path::Path, sync::Arc};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{DatabaseSettings, SslMode};
use crate::error::{Error, Kind, Result};

const OP: &str = "prepare TLS to the database";

/// The connector for `settings`; with `disable` it is never asked.
pub(super) fn connector(settings: &DatabaseSettings) -> Result<MakeRustlsConnect> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(Kind::Internal, OP).with_source(error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier(settings, provider)?);
    let config = match (&settings.cert_file, &settings.key_file) {
        (Some(cert), Some(key)) => builder
            .with_client_auth_cert(certificates(cert, "database.cert_file")?, private_key(key)?)
            .map_err(|error| Error::new(Kind::Config, OP).with_source(error))?,
        (None, None) => builder.with_no_client_auth(),
        _ => {
            return Err(invalid(
                "database.cert_file and database.key_file belong together: set both or none",
            ));
        }
    };
    Ok(MakeRustlsConnect::new(config))
}

fn verifier(
    settings: &DatabaseSettings,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>> {
    let verify_name = match (settings.sslmode, &settings.ca_file) {
        (SslMode::Disable | SslMode::Prefer, _) | (SslMode::Require, None) => {
            return Ok(Arc::new(Unverified(provider)));
        }
        (SslMode::Require, Some(_)) | (SslMode::VerifyCa, _) => false,
        (SslMode::VerifyFull, _) => true,
    };
    let roots = Arc::new(roots(settings)?);
    let full = WebPkiServerVerifier::builder_with_provider(roots, provider)
        .build()
        .map_err(|error| Error::new(Kind::Config, OP).with_source(error))?;
    Ok(if verify_name { full } else { Arc::new(AnyName(full)) })
}

/// `ca_file`, or Mozilla's authorities: the same choice the replication connection makes.
fn roots(settings: &DatabaseSettings) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match &settings.ca_file {
        Some(path) => {
            let (added, _) = roots.add_parsable_certificates(certificates(path, "database.ca_file")?);
            if added == 0 {
                return Err(invalid(format!(
                    "database.ca_file: no usable certificate in {}",
                    path.display()
                )));
            }
        }
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    Ok(roots)
}

fn certificates(path: &Path, key: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) => Err(invalid(format!("{key}: no certificate in {}", path.display()))),
        Err(error) => Err(invalid(format!("{key}: cannot read {}: {error}", path.display()))),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| invalid(format!("database.key_file: cannot read {}: {error}", path.display())))
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(Kind::Config, OP).with_source(text.into())
}

/// Encrypts without knowing the peer: `prefer`, and `require` without an authority.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
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

    // The handshake's signature is still checked: the peer holds the key of the certificate it shows.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies the chain and not the name: `verify-ca`.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp, now) {
            // rustls looks at the name last, so the chain has been found good here.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::settings, *};

    const URL: &str = "postgres://u@db/x";

    #[test]
    fn every_mode_makes_a_connector_without_files() {
        for mode in
            [SslMode::Disable, SslMode::Prefer, SslMode::Require, SslMode::VerifyCa, SslMode::VerifyFull]
        {
            assert!(connector(&settings(URL, mode)).is_ok(), "{mode:?}");
        }
    }

    #[test]
    fn a_missing_authority_file_is_named_with_its_key() {
        let mut missing = settings(URL, SslMode::VerifyFull);
        missing.ca_file = Some("/nowhere/ca.pem".into());
        let error = connector(&missing).err().expect("the file is missing");
        assert!(error.chain().contains("database.ca_file: cannot read /nowhere/ca.pem"), "{}", error.chain());
    }

    #[test]
    fn a_certificate_without_its_key_is_refused() {
        let mut half = settings(URL, SslMode::Prefer);
        half.cert_file = Some("client.pem".into());
        assert_eq!(connector(&half).err().map(|error| error.kind()), Some(Kind::Config));
    }
}
