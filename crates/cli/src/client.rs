//! A client of a running server, for the commands that look at one.

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use serde_json::Value;
use ureq::http::{Response, Uri};
use ureq::typestate::WithBody;
use ureq::{Agent, Body, RequestBuilder};

use crate::error::{Exit, Failure, Result};

/// Where a server listens if nothing else was said.
pub(crate) const URL: &str = "http://127.0.0.1:8080";
/// Time to reach a server.
const CONNECT: Duration = Duration::from_secs(5);
/// Silence after which a server counts as gone. Streams have a sign of life every 15 s.
const SILENCE: Duration = Duration::from_secs(600);
/// Longest answer that is read whole, bytes.
const ANSWER_MAX: u64 = 64 << 20;

/// A way to a server.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    agent: Agent,
    /// `http://HOST:PORT`, without a slash at the end.
    pub(crate) base: String,
    key: Option<String>,
}

/// What became of a request that waited no longer than it wanted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// The client left before the answer began.
    Left,
    /// The answer began, with this status, and was left.
    Answered(u16),
}

/// A whole answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// The status.
    pub(crate) status: u16,
    /// The body.
    pub(crate) body: String,
}

impl Answer {
    /// The body as JSON; null where it is none.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_default()
    }

    /// The same if the status is 200, else the server's own words.
    pub(crate) fn ok(self, what: &str) -> Result<Self> {
        if self.status == 200 {
            return Ok(self);
        }
        let document = self.json();
        let error = &document["error"];
        let message = error["message"].as_str().or(error.as_str()).unwrap_or("no reason given");
        let failure = Failure::new(Exit::Failure, format!("{what}: {} {message}", self.status));
        Err(match self.status {
            401 => failure.hint("CLARY_API_KEY holds the server's key"),
            404 => failure.hint("is this a clary server, and is the route switched on?"),
            503 => failure.hint("the server is loading, ending or overloaded; try again"),
            _ => failure,
        })
    }
}

impl Client {
    /// A client of the server at `url`, with or without `/v1` at its end. The key is `CLARY_API_KEY`.
    pub(crate) fn new(url: &str) -> Result<Self> {
        let base = url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        // HOST:PORT is what the browser's line takes, too.
        let is_bare = !url.contains("://") && !base.contains('/');
        let base = if is_bare { format!("http://{base}") } else { base.to_owned() };
        let uri: Option<Uri> = base.parse().ok();
        let is_address = |uri: &Uri| {
            let is_web = matches!(uri.scheme_str(), Some("http" | "https"));
            is_web && uri.host().is_some_and(|host| !host.is_empty())
        };
        if !uri.as_ref().is_some_and(is_address) {
            let failure = Failure::usage(format!("--url {url}: expected http://HOST:PORT"));
            return Err(failure.hint(format!("--url {URL}")));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // The server is named; a proxy for other places has nothing to do with it.
            .proxy(None)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE));
        let key = std::env::var("CLARY_API_KEY").ok().filter(|key| !key.is_empty());
        Ok(Self { agent: config.build().into(), base, key })
    }

    /// Whether a key is sent along.
    pub(crate) fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// Asks for a page.
    pub(crate) fn get(&self, path: &str) -> Result<Answer> {
        self.whole(self.keyed(self.agent.get(format!("{}{path}", self.base))).call())
    }

    /// Sends a request and waits for the whole answer.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        let sent = self.send(path, body);
        self.whole(sent)
    }

    /// Sends a request; the lines of the answer are read as they come. Dropping them closes the connection.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Result<(u16, Lines)> {
        let response = self.send(path, body).map_err(|error| self.failed(error))?;
        let status = response.status().as_u16();
        let reader: Box<dyn Read + Send> = Box::new(response.into_body().into_reader());
        Ok((status, Lines(BufReader::new(reader))))
    }

    /// Sends a request and leaves: after this time without an answer, or when the answer begins.
    pub(crate) fn post_briefly(&self, path: &str, body: &Value, patience: Duration) -> Result<Left> {
        match self
            .prepared(path)
            .config()
            .timeout_recv_response(Some(patience))
            .build()
            .send(body.to_string())
        {
            Ok(response) => Ok(Left::Answered(response.status().as_u16())),
            Err(ureq::Error::Timeout(_)) => Ok(Left::Left),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn send(&self, path: &str, body: &Value) -> std::result::Result<Response<Body>, ureq::Error> {
        self.prepared(path).send(body.to_string())
    }

    fn prepared(&self, path: &str) -> RequestBuilder<WithBody> {
        self.keyed(self.agent.post(format!("{}{path}", self.base)).content_type("application/json"))
    }

    fn keyed<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    fn whole(&self, sent: std::result::Result<Response<Body>, ureq::Error>) -> Result<Answer> {
        let mut response = sent.map_err(|error| self.failed(error))?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(ANSWER_MAX).read_to_string();
        Ok(Answer { status, body: body.map_err(|error| self.failed(error))? })
    }

    fn failed(&self, error: ureq::Error) -> Failure {
        let failure = Failure::new(Exit::Network, format!("{}: {error}", self.base));
        match error {
            ureq::Error::BadUri(_) => Failure::usage(format!("--url {}: no such address", self.base)),
            ureq::Error::Timeout(_) => failure.hint("the server does not answer; its log may say why"),
            ureq::Error::TlsRequired => {
                failure.hint("name the server itself by http://; TLS is left to a proxy")
            }
            _ => failure.hint("is the server running? `clary serve MODEL` starts one; --url says where"),
        }
    }
}

/// Lines of an answer that is still coming.
pub(crate) struct Lines(BufReader<Box<dyn Read + Send>>);

impl Lines {
    /// The next line without its end; `None` after the last.
    pub(crate) fn next(&mut self) -> std::io::Result<Option<String>> {
        let mut line = String::new();
        let count = (&mut self.0).take(ANSWER_MAX).read_line(&mut line)?;
        Ok((count > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned()))
    }
}
