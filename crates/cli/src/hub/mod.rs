//! A model hub: what a model consists of there, and its files, fetched so that what has the file's name is
//! whole and right.
//!
//! [`Hub::listing`] asks for names, lengths and digests at one commit; [`needed`] says which of them a run
//! needs; [`fetch::Fetch`] brings one file, resuming what an earlier run left.

mod fetch;
mod listing;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ureq::http::header::{AUTHORIZATION, ETAG, IF_RANGE, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use crate::error::{Exit, Failure, Result};

pub(crate) use fetch::{Fetch, Folder};
pub(crate) use listing::{CONFIG, INDEX, Include, Listing, Remote, needed, plain};

/// Where models come from if nothing else was said.
pub(crate) const URL: &str = "https://huggingface.co";
/// Most redirects of one request.
const REDIRECTS_MAX: usize = 8;
/// Longest wait that a hub may ask for.
const WAIT_MAX: Duration = Duration::from_secs(300);
/// Longest time to reach a hub.
const CONNECT: Duration = Duration::from_secs(10);
/// How often a wait looks whether it is still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long to bear with a hub.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Tries without a byte between them before giving up.
    pub(crate) tries: u32,
    /// Pause before the second try; each further one is twice as long.
    pub(crate) pause: Duration,
    /// Silence after which a connection counts as broken.
    pub(crate) silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { tries: 6, pause: Duration::from_millis(500), silence: Duration::from_secs(60) }
    }
}

/// A hub.
#[derive(Clone, Debug)]
pub(crate) struct Hub {
    agent: Agent,
    /// `https://HOST`, without a slash at the end.
    base: String,
    origin: Origin,
    token: Option<String>,
    patience: Patience,
}

/// Scheme and authority: who gets the token.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin {
    scheme: String,
    authority: String,
}

impl Origin {
    fn of(uri: &Uri) -> Option<Self> {
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        Some(Self { scheme, authority: uri.authority()?.as_str().to_ascii_lowercase() })
    }
}

/// Whether nobody on the way can read along: TLS, or this machine.
fn is_private(uri: &Uri) -> bool {
    match uri.scheme_str() {
        Some("https") => true,
        Some("http") => uri.host().is_some_and(|host| ["127.0.0.1", "localhost", "[::1]"].contains(&host)),
        _ => false,
    }
}

/// Why a request did not give what was asked for.
#[derive(Debug)]
enum Trouble {
    /// Another try may help, not before this time has passed.
    Again { why: String, after: Option<Duration> },
    /// It would not.
    Fatal(Failure),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Fatal(failure)
    }
}

impl Hub {
    /// The hub at an address. The token, if there is one, goes to that address alone.
    pub(crate) fn new(url: &str, token: Option<String>, patience: Patience) -> Result<Self> {
        let base = url.trim_end_matches('/').to_owned();
        let wrong = |what: &str| Failure::usage(format!("--hub {url}: {what}")).hint(format!("--hub {URL}"));
        let uri: Uri = base.parse().map_err(|_| wrong("no address"))?;
        let origin = Origin::of(&uri).ok_or_else(|| wrong("https://HOST is expected"))?;
        if !is_private(&uri) {
            return Err(wrong("https:// is expected"));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Followed here: the token must not go along.
            .max_redirects(0)
            .user_agent(concat!("clary/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(patience.silence.min(CONNECT)))
            .timeout_recv_response(Some(patience.silence))
            .timeout_per_read(Some(patience.silence));
        // A proxy has nothing to do with this machine itself.
        let config = if origin.scheme == "http" { config.proxy(None) } else { config };
        Ok(Self { agent: config.build().into(), base, origin, token, patience })
    }

    /// Sends a request, follows redirects, and returns a response whose status is 200 or 206. `from` is where
    /// to begin, and the tag of the file that was begun.
    fn get(
        &self,
        url: &str,
        from: Option<(u64, Option<&str>)>,
    ) -> std::result::Result<Response<Body>, Trouble> {
        let mut uri: Uri = url.parse().map_err(|_| nonsense(format!("{url}: no address")))?;
        for _ in 0..=REDIRECTS_MAX {
            let origin = Origin::of(&uri).ok_or_else(|| nonsense(format!("{uri}: no address")))?;
            if !is_private(&uri) {
                return Err(nonsense(format!("the hub sends us to {uri}, which is not https")).into());
            }
            let mut request = self.agent.get(uri.clone());
            if let Some(token) = self.token.as_ref().filter(|_| origin == self.origin) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some((start, tag)) = from {
                request = request.header(RANGE, format!("bytes={start}-"));
                // Weak tags say nothing about bytes.
                if let Some(tag) = tag.filter(|tag| tag.starts_with('"')) {
                    request = request.header(IF_RANGE, tag);
                }
            }
            let response = request.call().map_err(|error| broken(&origin.authority, error))?;
            if !response.status().is_redirection() {
                return self.checked(response, url);
            }
            let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
            uri = location.and_then(|location| moved(&uri, location)).ok_or_else(|| {
                nonsense(format!("{url}: a redirect to {:?}", location.unwrap_or_default()))
            })?;
        }
        Err(nonsense(format!("{url}: more than {REDIRECTS_MAX} redirects")).into())
    }

    fn checked(&self, response: Response<Body>, url: &str) -> std::result::Result<Response<Body>, Trouble> {
        let status = response.status().as_u16();
        let header = response.headers().get(RETRY_AFTER).and_then(|after| after.to_str().ok());
        let after = header.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        match status {
            200 | 206 => Ok(response),
            408 | 429 | 500..=599 => Err(Trouble::Again { why: format!("{url}: status {status}"), after }),
            // The part that was kept is longer than the file is now.
            416 => Err(Trouble::Again { why: format!("{url}: status 416"), after: None }),
            401 | 403 => {
                let failure = Failure::new(Exit::Network, format!("{url}: status {status}, not allowed"));
                let hint = match self.token {
                    Some(_) => "the token does not open this model; accept its terms on the hub first",
                    None => "a model that is not open to all needs a token: CLARY_HUB_TOKEN, or HF_TOKEN",
                };
                Err(failure.hint(hint).into())
            }
            404 => {
                let failure = Failure::new(Exit::Network, format!("{url}: the hub has no such thing"));
                Err(failure.hint("check the name: owner/name, or owner/name@revision").into())
            }
            other => Err(Failure::new(Exit::Network, format!("{url}: status {other}")).into()),
        }
    }

    /// Host and port.
    pub(crate) fn host(&self) -> &str {
        &self.origin.authority
    }

    /// Runs `work` again and again while another try may help. `work` says whether it got further, and `told`
    /// hears why there is another try.
    fn persist<T>(
        &self,
        stop: &AtomicBool,
        told: &dyn Fn(&str),
        mut work: impl FnMut(&mut bool) -> std::result::Result<T, Trouble>,
    ) -> Result<T> {
        let mut tried = 0;
        loop {
            let mut is_further = false;
            let (why, after) = match work(&mut is_further) {
                Ok(done) => return Ok(done),
                Err(Trouble::Fatal(failure)) => return Err(failure),
                Err(Trouble::Again { why, after }) => (why, after),
            };
            tried = if is_further { 1 } else { tried + 1 };
            if tried >= self.patience.tries {
                let failure = Failure::new(Exit::Network, format!("{why} ({tried} times)"));
                return Err(failure.hint(format!(
                    "is there a way to {}? A proxy is taken from HTTPS_PROXY, another hub from --hub or \
                     CLARY_HUB. What was fetched is kept: the same command goes on from there; a folder with \
                     a model's files needs no pull",
                    self.host()
                )));
            }
            if let Some(after) = after.filter(|after| *after > WAIT_MAX) {
                let message = format!("{why}: the hub asks for {} s of patience", after.as_secs());
                return Err(Failure::new(Exit::Network, message).hint("try again then"));
            }
            let pause = self.patience.pause * 2u32.pow(tried - 1);
            let pause = after.unwrap_or(pause);
            told(&format!(
                "{why}; try {} of {} in {:.1} s",
                tried + 1,
                self.patience.tries,
                pause.as_secs_f64()
            ));
            wait(pause, stop)?;
        }
    }
}

/// Waits, unless that is no longer wanted.
fn wait(time: Duration, stop: &AtomicBool) -> Result {
    let end = Instant::now() + time;
    while Instant::now() < end {
        stopped(stop)?;
        std::thread::sleep(LOOK_EVERY.min(end.saturating_duration_since(Instant::now())));
    }
    stopped(stop)
}

/// An error if another file has failed: this one's is not shown.
fn stopped(stop: &AtomicBool) -> Result {
    match stop.load(Ordering::Relaxed) {
        true => Err(Failure::new(Exit::Network, "stopped")),
        false => Ok(()),
    }
}

/// Where a redirect leads.
fn moved(from: &Uri, location: &str) -> Option<Uri> {
    if location.starts_with('/') && !location.starts_with("//") {
        return format!("{}://{}{location}", from.scheme_str()?, from.authority()?).parse().ok();
    }
    location.parse::<Uri>().ok().filter(|uri| uri.scheme().is_some() && uri.authority().is_some())
}

/// How rustls says that it does not trust the other side; it comes as the reason of a failed write.
const UNTRUSTED: &str = "invalid peer certificate";

fn broken(host: &str, error: ureq::Error) -> Trouble {
    let is_untrusted = match &error {
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) => true,
        ureq::Error::Io(error) => error.to_string().starts_with(UNTRUSTED),
        _ => false,
    };
    match error {
        // Another try would end in the same way.
        error if is_untrusted => {
            let failure = Failure::new(Exit::Network, format!("{host}: {error}"));
            let hint = "the hub's certificate is not trusted: a proxy in between that shows its own cannot \
                be used; fetch the model's folder elsewhere, it needs no pull";
            failure.hint(hint).into()
        }
        error => Trouble::Again { why: format!("{host}: {error}"), after: None },
    }
}

/// The hub says something that no hub says.
fn nonsense(message: String) -> Failure {
    Failure::new(Exit::Network, message).hint("is --hub the address of a model hub?")
}

/// The strong or weak tag of a response.
fn tag(response: &Response<Body>) -> Option<String> {
    response.headers().get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned)
}
