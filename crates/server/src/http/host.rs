//! Which hosts and origins a request may name: what stands between a web page and a local server.

use std::net::IpAddr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};

use super::error::{ApiError, Code, quoted};

/// Names of the local machine.
const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// The `Host` rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// Any host: the server is bound to the outside, or to a socket that no browser reaches.
    Any,
    /// The local machine's names and some more, without ports.
    Only(Vec<String>),
}

impl Hosts {
    /// The rule of a server bound to an address.
    pub fn bound_to(address: IpAddr, allowed: &[String]) -> Self {
        if !address.is_loopback() {
            return Self::Any;
        }
        let more = allowed.iter().map(|host| without_port(&host.to_ascii_lowercase()).to_owned());
        Self::Only(LOOPBACK.iter().map(|host| (*host).to_owned()).chain(more).collect())
    }

    /// Checks the `Host` header and, where the request line has one, its host.
    pub(crate) fn check(&self, request: &Parts) -> Result<(), ApiError> {
        let Self::Only(names) = self else { return Ok(()) };
        let header = request.headers.get(HOST).and_then(|host| host.to_str().ok());
        let line = request.uri.authority().map(|authority| authority.as_str());
        let known = |host: &str| {
            let host = without_port(host).to_ascii_lowercase();
            names.contains(&host)
        };
        let is_known = match (header, line) {
            (Some(host), None) => known(host),
            (Some(host), Some(line)) => known(host) && known(line),
            (None, _) => false,
        };
        if is_known {
            return Ok(());
        }
        let found = header.map_or_else(|| "none".to_owned(), quoted);
        let message = format!("Host must name this machine, not {found}; allow others with --allowed-host");
        Err(ApiError::new(Code::WrongHost, message))
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Origins whose pages may read replies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(pub(crate) Vec<String>);

impl Origins {
    /// The `Access-Control-Allow-Origin` that the request earns.
    pub(crate) fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        if self.0.iter().any(|allowed| allowed == "*") {
            return Some(HeaderValue::from_static("*"));
        }
        self.0.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    fn check(hosts: &Hosts, uri: &str, host: Option<&str>, wanted: bool) {
        let mut request = Request::builder().uri(uri);
        if let Some(host) = host {
            request = request.header(HOST, host);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        assert_eq!(hosts.check(&parts).is_ok(), wanted, "{uri} {host:?}");
    }

    #[test]
    fn loopback_takes_its_own_names() {
        let hosts = Hosts::bound_to("127.0.0.1".parse().unwrap(), &["Box.lan:80".into()]);
        for host in
            ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "[::1]", "LOCALHOST", "box.lan"]
        {
            check(&hosts, "/", Some(host), true);
        }
        for host in ["evil.example", "localhost.evil.example", "", "127.0.0.2", "localhost:x", "::1"] {
            check(&hosts, "/", Some(host), false);
        }
        check(&hosts, "/", None, false);
        check(&hosts, "http://evil.example/", Some("localhost"), false);
        check(&Hosts::bound_to("0.0.0.0".parse().unwrap(), &[]), "/", Some("evil.example"), true);
    }

    #[test]
    fn origins_match_exactly() {
        let allowed = |list: &[&str], origin: &str| {
            let origins = Origins(list.iter().map(|origin| (*origin).to_owned()).collect());
            origins.allowed(&HeaderMap::from_iter([(ORIGIN, HeaderValue::from_str(origin).unwrap())]))
        };
        assert_eq!(allowed(&["https://a"], "https://a").unwrap(), "https://a");
        assert_eq!(allowed(&["https://a"], "https://a.b"), None);
        assert_eq!(allowed(&["*"], "https://b").unwrap(), "*");
        assert_eq!(allowed(&[], "https://b"), None);
    }
}
