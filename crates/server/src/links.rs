//! Pictures behind links, from hosts that the operator named and from nowhere else (`docs/api.md` 3.3).
//!
//! The server's machine can reach what its clients cannot. So a link must be `https://` to a named host on
//! its usual port, without a name or password in it; the host's addresses are looked at after they are
//! resolved, and they are the ones that are connected to: none may be private, of this machine or of the
//! link. No redirect is followed, no proxy asked, and bytes and time are bounded.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

/// Time for all links of a request together.
pub(crate) const FETCH_TIME: Duration = Duration::from_secs(10);
/// Links that are read at once: half of the requests that are prepared at once, so that slow hosts leave
/// room.
const AT_ONCE: usize = 2;

/// Why a link gave no picture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// No host was named.
    #[error("links to pictures are not fetched by this server; send the picture itself, in base64")]
    Off,
    /// Not a form that is fetched.
    #[error("a link to a picture must be {scheme}://HOST/... on the usual port, without a user name")]
    Form {
        /// The only scheme.
        scheme: &'static str,
    },
    /// The host is not among the named ones.
    #[error("this server fetches no pictures from {host:?}; send the picture itself, in base64")]
    Host {
        /// The host.
        host: String,
    },
    /// The host's name leads into a network that clients have no business in.
    #[error("{host:?} has an address that is not public; such links are not fetched")]
    Inside {
        /// The host.
        host: String,
    },
    /// Too many bytes.
    #[error("the picture behind the link has more than {max} bytes")]
    Bytes {
        /// Most bytes.
        max: usize,
    },
    /// The host did not answer with a picture in time.
    #[error("the link could not be read: {reason}")]
    Failed {
        /// What happened.
        reason: String,
    },
    /// Other links are being read.
    #[error("{AT_ONCE} links are being read already; try again later")]
    Busy,
}

/// Reads links.
#[derive(Debug)]
pub(crate) struct Links {
    agent: Agent,
    hosts: Vec<String>,
    scheme: &'static str,
    reading: AtomicUsize,
}

impl Links {
    /// Links to these hosts.
    pub(crate) fn new(hosts: &[String]) -> Self {
        Self::over("https", hosts, Public(DefaultResolver::default()))
    }

    fn over(scheme: &'static str, hosts: &[String], resolver: impl Resolver) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .https_only(scheme == "https")
            .max_redirects(0)
            .proxy(None)
            .user_agent(concat!("clary/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            // A connection is looked at once: none is kept for another request.
            .max_idle_connections(0)
            .build();
        Self {
            agent: Agent::with_parts(config, DefaultConnector::default(), resolver),
            hosts: hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
            scheme,
            reading: AtomicUsize::new(0),
        }
    }

    /// The bytes behind a link: at most `bytes_max`, and all of them before `end`.
    pub(crate) fn read(&self, url: &str, bytes_max: usize, end: Instant) -> Result<Vec<u8>, LinkError> {
        let host = self.checked(url)?;
        let _turn = Turn::take(&self.reading).ok_or(LinkError::Busy)?;
        let left = end.saturating_duration_since(Instant::now());
        let failed = |reason: String| LinkError::Failed { reason };
        if left.is_zero() {
            return Err(failed(format!("{} s are over", FETCH_TIME.as_secs())));
        }
        let told = |error: ureq::Error| match &error {
            ureq::Error::Other(cause) if cause.is::<NotPublic>() => LinkError::Inside { host: host.clone() },
            ureq::Error::BodyExceedsLimit(_) => LinkError::Bytes { max: bytes_max },
            _ => failed(error.to_string()),
        };
        let request = self.agent.get(url).config().timeout_global(Some(left)).build();
        let mut response = request.call().map_err(told)?;
        if response.status() != 200 {
            return Err(failed(format!("status {}, 200 is expected", response.status().as_u16())));
        }
        let body = response.body_mut();
        if body.content_length().is_some_and(|length| length > bytes_max as u64) {
            return Err(LinkError::Bytes { max: bytes_max });
        }
        body.with_config().limit(bytes_max as u64).read_to_vec().map_err(told)
    }

    /// The host of a link that may be read.
    fn checked(&self, url: &str) -> Result<String, LinkError> {
        let form = LinkError::Form { scheme: self.scheme };
        let Ok(uri) = url.parse::<Uri>() else { return Err(form) };
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(form) };
        if scheme != self.scheme || authority.as_str().contains('@') || authority.port().is_some() {
            return Err(form);
        }
        let host = authority.host().to_ascii_lowercase();
        match self.hosts.contains(&host) {
            true => Ok(host),
            false => Err(LinkError::Host { host: host.chars().take(100).collect() }),
        }
    }
}

/// One of the links that are read at once.
struct Turn<'a>(&'a AtomicUsize);

impl<'a> Turn<'a> {
    fn take(reading: &'a AtomicUsize) -> Option<Self> {
        let more = |count: usize| (count < AT_ONCE).then_some(count + 1);
        reading.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok().map(|_| Self(reading))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An address is not public.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the host has an address that is not public")]
struct NotPublic;

/// A resolver that refuses hosts with an address that is not public. What it gives is what is connected to: a
/// name that says something else a moment later changes nothing.
struct Public<R>(R);

impl<R> fmt::Debug for Public<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Public")
    }
}

impl<R: Resolver> Resolver for Public<R> {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.0.resolve(uri, config, timeout)?;
        match found.iter().all(|address| is_public(address.ip())) {
            true => Ok(found),
            false => Err(ureq::Error::Other(Box::new(NotPublic))),
        }
    }
}

/// Whether an address is one of the public internet.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let inside = match address.octets() {
        // This network, carriers' networks, protocol assignments, relays, measurements, and all from
        // multicast on.
        [0, ..] | [192, 0, 0, _] | [192, 88, 99, _] | [198, 18 | 19, ..] | [224..=255, ..] => true,
        [100, second, ..] => second & 0xc0 == 64,
        _ => false,
    };
    !(inside
        || address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation())
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let last = |[.., a, b]: [u16; 8]| Ipv4Addr::from(u32::from(a) << 16 | u32::from(b));
    match address.segments() {
        // Addresses that stand for one of version 4.
        segments @ [0, 0, 0, 0, 0, 0xffff, ..] | segments @ [0x64, 0xff9b, 0, 0, 0, 0, ..] => {
            is_public_v4(last(segments))
        }
        [0x2002, a, b, ..] => is_public_v4(last([0, 0, 0, 0, 0, 0, a, b])),
        // Protocol assignments, tunnels of which the end is not told, and documentation.
        [0x2001, 0..0x200, ..] | [0x2001, 0xdb8, ..] => false,
        // Global unicast is 2000::/3, of which 3fff::/20 is documentation.
        [0x3fff, 0..0x1000, ..] => false,
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};
    use std::thread::{self, JoinHandle};

    use super::*;

    /// Every name leads to one address.
    #[derive(Debug)]
    struct To(SocketAddr);

    impl Resolver for To {
        fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
            let mut found = self.empty();
            found.push(self.0);
            Ok(found)
        }
    }

    /// A server on this machine that answers one request with these bytes, and the links to it: its address
    /// is let through here, and only here.
    fn stub(answer: Vec<u8>) -> (Links, JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let links = Links::over("http", &["pictures.test".into()], To(listener.local_addr().expect("bound")));
        let serve = move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut seen = vec![0; 4096];
            let length = stream.read(&mut seen).expect("a request");
            seen.truncate(length);
            // The client may have gone after the head.
            let _ = stream.write_all(&answer);
            String::from_utf8(seen).expect("text")
        };
        (links, thread::spawn(serve))
    }

    fn answer(head: &str, body: &[u8]) -> Vec<u8> {
        [format!("HTTP/1.1 {head}\r\nconnection: close\r\n\r\n").as_bytes(), body].concat()
    }

    fn soon() -> Instant {
        Instant::now() + FETCH_TIME
    }

    const URL: &str = "http://Pictures.test/a.png?x=1";

    #[test]
    fn bytes_of_a_named_host_are_read() {
        let (links, stub) = stub(answer("200 OK\r\ncontent-type: text/html", b"abc"));
        assert_eq!(links.read(URL, 3, soon()), Ok(b"abc".to_vec()));
        let seen = stub.join().expect("served").to_ascii_lowercase();
        assert!(seen.starts_with("get /a.png?x=1 http/1.1\r\n"), "{seen}");
        assert!(seen.contains("host: pictures.test\r\n") && !seen.contains("cookie"), "{seen}");
        assert_eq!(links.reading.load(Ordering::Acquire), 0);
    }

    #[test]
    fn too_many_bytes_are_refused_by_their_number_and_as_they_come() {
        for head in ["200 OK\r\ncontent-length: 4", "200 OK"] {
            let (links, stub) = stub(answer(head, b"abcd"));
            assert_eq!(links.read(URL, 3, soon()), Err(LinkError::Bytes { max: 3 }), "{head}");
            stub.join().expect("served");
        }
    }

    #[test]
    fn redirects_and_failures_give_no_picture() {
        for (head, words) in [
            ("302 Found\r\nlocation: http://169.254.169.254/latest", "status 302"),
            ("301 Moved\r\nlocation: https://pictures.test/b.png", "status 301"),
            ("404 Not Found", "status 404"),
            ("206 Partial Content", "status 206"),
            ("nonsense", ""),
        ] {
            let (links, stub) = stub(answer(head, b""));
            let error = links.read(URL, 100, soon()).expect_err(head);
            assert!(matches!(&error, LinkError::Failed { reason } if reason.contains(words)), "{error}");
            stub.join().expect("served");
        }
    }

    #[test]
    fn a_silent_host_is_left() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let links = Links::over("http", &["pictures.test".into()], To(listener.local_addr().expect("bound")));
        let error = links.read(URL, 100, Instant::now() + Duration::from_millis(50)).expect_err("silence");
        assert!(error.to_string().contains("timeout"), "{error}");
        let error = links.read(URL, 100, Instant::now()).expect_err("no time");
        assert!(error.to_string().contains("10 s are over"), "{error}");
    }

    #[test]
    fn only_plain_links_to_named_hosts_are_read() {
        let links = Links::new(&["Pictures.test".into()]);
        let form = LinkError::Form { scheme: "https" };
        let host = |host: &str| LinkError::Host { host: host.into() };
        for (url, expected) in [
            ("http://pictures.test/a.png", form.clone()),
            ("https://pictures.test:8443/a.png", form.clone()),
            ("https://pictures.test@127.0.0.1/a.png", form.clone()),
            ("https://user:word@pictures.test/a.png", form.clone()),
            ("ftp://pictures.test/a.png", form.clone()),
            ("https:pictures.test/a.png", form.clone()),
            ("https://pictures.test/a b", form.clone()),
            ("https://sub.pictures.test/a.png", host("sub.pictures.test")),
            ("https://pictures.test.example/a.png", host("pictures.test.example")),
            ("https://127.0.0.1/a.png", host("127.0.0.1")),
            ("https://[::1]/a.png", host("[::1]")),
        ] {
            assert_eq!(links.checked(url), Err(expected), "{url}");
        }
        assert_eq!(links.checked("https://PICTURES.test/a.png"), Ok("pictures.test".into()));
        assert_eq!(links.checked("https://pictures.test"), Ok("pictures.test".into()));
    }

    #[test]
    fn a_named_host_with_an_inner_address_is_not_asked() {
        // Nobody listens: a connection would be refused with other words.
        for address in ["127.0.0.1:1", "10.0.0.7:1", "[fe80::1]:1", "[::ffff:192.168.0.1]:1"] {
            let to = Public(To(address.parse().expect("an address")));
            let links = Links::over("http", &["pictures.test".into()], to);
            let expected = LinkError::Inside { host: "pictures.test".into() };
            assert_eq!(links.read(URL, 100, soon()), Err(expected), "{address}");
        }
        let links = Links::new(&["localhost".into()]);
        let expected = LinkError::Inside { host: "localhost".into() };
        assert_eq!(links.read("https://localhost/a.png", 100, soon()), Err(expected));
    }

    #[test]
    fn addresses_are_judged() {
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.1.2.3",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.51.100.7",
            "203.0.113.9",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a00:1::",
            "3fff::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "100::1",
        ] {
            assert!(!is_public(address.parse().expect("an address")), "{address}");
        }
        for address in [
            "1.1.1.1",
            "100.63.0.1",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.1.0.1",
            "223.255.255.1",
            "2606:4700::1111",
            "2a00::1",
            "::ffff:1.1.1.1",
            "64:ff9b::1.1.1.1",
            "2002:101:101::",
            "2001:4860::1",
        ] {
            assert!(is_public(address.parse().expect("an address")), "{address}");
        }
    }
}
