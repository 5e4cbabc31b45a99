//! Who may do what: readers look, operators change. Tokens are compared in constant time.

use std::path::Path;

use actix_web::{
    Error,
    body::{BoxBody, MessageBody},
    dev::{ServiceRequest, ServiceResponse},
    http::header::{self, HeaderName, HeaderValue},
    middleware::Next,
    web::Data,
};
use subtle::ConstantTimeEq;

use super::{Admin, problem};

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing: probes carry no token.
    Anyone,
    /// A reader's or an operator's token, where any is configured.
    Reader,
    /// An operator's token, where any token is configured.
    Operator,
}

/// The configured tokens. None at all means that whoever reaches the (loopback) address may do everything.
#[derive(Default)]
pub struct Tokens {
    operators: Vec<String>,
    readers: Vec<String>,
}

impl Tokens {
    /// Reads the token files, one token a line; several make rotation possible.
    ///
    /// # Errors
    /// When a file cannot be read or holds no token.
    pub fn read(operators: Option<&Path>, readers: Option<&Path>) -> std::io::Result<Self> {
        let read = |path: Option<&Path>| -> std::io::Result<Vec<String>> {
            let Some(path) = path else { return Ok(Vec::new()) };
            let named = |error: std::io::Error| {
                std::io::Error::new(error.kind(), format!("token file {}: {error}", path.display()))
            };
            let text = std::fs::read_to_string(path).map_err(named)?;
            let tokens: Vec<String> =
                text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
            if tokens.is_empty() {
                return Err(named(std::io::Error::other("it holds no token (one a line)")));
            }
            Ok(tokens)
        };
        Ok(Self { operators: read(operators)?, readers: read(readers)? })
    }

    /// Whether `token` opens what needs `access`.
    pub fn allow(&self, token: Option<&str>, access: Access) -> bool {
        if access == Access::Anyone || (self.operators.is_empty() && self.readers.is_empty()) {
            return true;
        }
        let Some(token) = token else { return false };
        let among = |tokens: &[String]| {
            // Every token is compared, so that the time tells nothing about which one nearly matched.
            tokens.iter().fold(false, |found, known| found | bool::from(known.as_bytes().ct_eq(token.as_bytes())))
        };
        let (operator, reader) = (among(&self.operators), among(&self.readers));
        operator || (access == Access::Reader && reader)
    }
}

/// Whether a browser sends this on behalf of another site. Programs send neither header.
fn cross_site(request: &ServiceRequest) -> bool {
    let header = |name: HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
    if header(HeaderName::from_static("sec-fetch-site")).is_some_and(|site| site != "same-origin" && site != "none") {
        return true;
    }
    let Some(origin) = header(header::ORIGIN) else { return false };
    let host = header(header::HOST).unwrap_or_default();
    origin.split_once("://").is_none_or(|(_, authority)| authority != host)
}

/// Lets a request through or answers for the handler; adds the headers every answer carries.
pub(super) async fn guard(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let access = Admin::needs(request.method(), request.path());
    let token = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .map(str::to_owned);
    let admin = request.app_data::<Data<Admin>>().cloned();
    let allowed = admin.is_some_and(|admin| admin.tokens.allow(token.as_deref(), access));
    let refusal = if access == Access::Operator && cross_site(&request) {
        Some(problem(403, "cross-site request", "changes are not accepted from another site's page"))
    } else if !allowed {
        Some(problem(401, "token required", "send `Authorization: Bearer TOKEN` with a token of admin.token_file"))
    } else {
        None
    };
    let mut response = match refusal {
        Some(refusal) => request.into_response(refusal),
        None => next.call(request).await?.map_into_boxed_body(),
    };
    let headers = response.headers_mut();
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("cache-control", "no-store"),
        ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
        ("referrer-policy", "no-referrer"),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    if response.status() == actix_web::http::StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::TestRequest;

    fn tokens() -> Tokens {
        Tokens { operators: vec!["op-1".into(), "op-2".into()], readers: vec!["read".into()] }
    }

    #[test]
    fn a_reader_looks_and_an_operator_changes() {
        let tokens = tokens();
        assert!(tokens.allow(None, Access::Anyone));
        assert!(!tokens.allow(None, Access::Reader));
        assert!(tokens.allow(Some("read"), Access::Reader));
        assert!(!tokens.allow(Some("read"), Access::Operator));
        assert!(tokens.allow(Some("op-1"), Access::Operator) && tokens.allow(Some("op-2"), Access::Reader));
        assert!(!tokens.allow(Some("op-"), Access::Reader));
    }

    #[test]
    fn without_tokens_the_loopback_is_open() {
        assert!(Tokens::default().allow(None, Access::Operator));
    }

    #[test]
    fn another_sites_page_is_recognised() {
        let request = |headers: &[(&'static str, &'static str)]| {
            headers
                .iter()
                .fold(TestRequest::post(), |request, header| request.insert_header(*header))
                .to_srv_request()
        };
        assert!(!cross_site(&request(&[("host", "127.0.0.1:9464")])));
        assert!(!cross_site(&request(&[("host", "127.0.0.1:9464"), ("origin", "http://127.0.0.1:9464")])));
        assert!(cross_site(&request(&[("host", "127.0.0.1:9464"), ("origin", "https://evil.example")])));
        assert!(cross_site(&request(&[("host", "127.0.0.1:9464"), ("sec-fetch-site", "cross-site")])));
    }
}
