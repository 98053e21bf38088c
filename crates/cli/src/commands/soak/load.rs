//! Streams of requests on a server, and the comparison of known replies.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::ask::{Ask, Asks, Fate, KNOWN, pictures};
use super::tally::Tally;
use crate::client::{Client, Left};
use crate::error::{Exit, Failure, Result};

/// What one stream got.
enum Got {
    /// A whole reply: its text, usage, and the time to its first line where it was streamed.
    Reply(String, Value, Option<Duration>),
    /// The client left.
    Left,
    /// A refusal that had to be.
    Refused,
}

/// The load, shared by its streams.
pub(super) struct Load {
    client: Client,
    asks: Asks,
    seed: u64,
    /// Replies computed alone.
    known: Vec<String>,
    tally: Mutex<Tally>,
    over: AtomicBool,
}

impl Load {
    /// Computes the known replies, one after the other on an idle server.
    pub(super) fn prepare(client: Client, asks: Asks, seed: u64) -> Result<Self> {
        let mut known = Vec::new();
        for number in 0..KNOWN {
            let ask = asks.known(number, seed);
            match answer(&client, &ask) {
                Ok(Got::Reply(text, ..)) => known.push(text),
                Ok(_) => return Err(Failure::new(Exit::Failure, "a known request was not answered")),
                Err(problem) => return Err(Failure::new(Exit::Failure, problem)),
            }
        }
        Ok(Self { client, asks, seed, known, tally: Mutex::default(), over: AtomicBool::new(false) })
    }

    /// The counts so far.
    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the streams end after what they are doing.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// One stream: request after request until the end, at least one.
    pub(super) fn stream(&self, number: u64) {
        let mut asks = self.asks.reseeded(self.seed.wrapping_add((number + 1) << 40));
        for place in number.. {
            let ask = asks.opening(place).unwrap_or_else(|| asks.next(self.seed));
            let start = Instant::now();
            let got = answer(&self.client, &ask);
            self.count(&ask, got, start.elapsed());
            if self.over.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    fn count(&self, ask: &Ask, got: std::result::Result<Got, String>, time: Duration) {
        let mut tally = self.tally();
        tally.requests += 1;
        match got {
            Ok(Got::Reply(text, usage, first)) => {
                tally.finished += 1;
                tally.usage(&usage);
                let (shown, rows) = (pictures(&ask.body), image_tokens(&usage));
                tally.pictures += shown as u64;
                if (shown > 0) != (rows > 0) {
                    tally.fail(format!("{shown} pictures were counted as {rows} tokens"));
                }
                Tally::time(&mut tally.whole, time);
                if let Some(first) = first {
                    Tally::time(&mut tally.first, first);
                }
                if let Some(number) = ask.known {
                    tally.compared += 1;
                    tally.canaries += u64::from(number == 0);
                    if self.known[number] != text {
                        tally.fail(format!(
                            "known reply {number} came out as {text:?}, alone {:?}",
                            self.known[number]
                        ));
                    }
                }
            }
            Ok(Got::Left) => tally.left += 1,
            Ok(Got::Refused) => tally.refused += 1,
            Err(problem) => tally.fail(problem),
        }
    }
}

/// Sends a request and follows its fate.
fn answer(client: &Client, ask: &Ask) -> std::result::Result<Got, String> {
    let path = "/v1/chat/completions";
    let told = |failure: Failure| failure.message;
    match ask.fate {
        Fate::LeaveEarly(ms) => match client.post_briefly(path, &ask.body, Duration::from_millis(ms)) {
            Ok(Left::Left) => Ok(Got::Left),
            // It was faster than the client's patience.
            Ok(Left::Answered(200)) => Ok(Got::Left),
            Ok(Left::Answered(status)) => Err(format!("status {status}")),
            Err(failure) => Err(failure.message),
        },
        Fate::Wrong(code) => match client.post(path, &ask.body).map_err(told)? {
            answer if answer.status == 400 && answer.json()["error"]["code"] == code => Ok(Got::Refused),
            answer => Err(format!("a wrong request was answered with {}: {}", answer.status, answer.body)),
        },
        _ if ask.body["stream"] == true => follow(client, path, ask),
        _ => {
            let answer = client.post(path, &ask.body).map_err(told)?;
            if answer.status != 200 {
                return Err(format!("status {}: {}", answer.status, answer.body));
            }
            let reply = answer.json();
            let message = &reply["choices"][0]["message"];
            Ok(Got::Reply(text(message), reply["usage"].clone(), None))
        }
    }
}

/// Tokens of a prompt that stand for pictures.
pub(super) fn image_tokens(usage: &Value) -> u64 {
    usage["prompt_tokens_details"]["image_tokens"].as_u64().unwrap_or(0)
}

/// Reasoning and content, told apart.
fn text(message: &Value) -> String {
    let part = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    format!("{}\u{0}{}", part("reasoning_content"), part("content"))
}

/// Reads a stream to its end, or leaves it.
fn follow(client: &Client, path: &str, ask: &Ask) -> std::result::Result<Got, String> {
    let start = Instant::now();
    let (status, mut lines) = client.stream(path, &ask.body).map_err(|failure| failure.message)?;
    let broke = |error: std::io::Error| format!("a stream broke off: {error}");
    if status != 200 {
        let body = lines.next().map_err(broke)?.unwrap_or_default();
        return Err(format!("status {status}: {body}"));
    }
    let [mut reasoning, mut content] = [String::new(), String::new()];
    let (mut usage, mut first, mut count) = (Value::Null, None, 0);
    while let Some(line) = lines.next().map_err(broke)? {
        count += 1;
        if matches!(ask.fate, Fate::LeaveAfter(most) if count > most) {
            return Ok(Got::Left);
        }
        let Some(data) = line.strip_prefix("data: ") else { continue };
        first.get_or_insert_with(|| start.elapsed());
        if data == "[DONE]" {
            return Ok(Got::Reply(format!("{reasoning}\u{0}{content}"), usage, first));
        }
        let event: Value =
            serde_json::from_str(data).map_err(|error| format!("an event that is no JSON: {error}"))?;
        if event["error"].is_object() {
            return Err(format!("a stream ended with an error: {data}"));
        }
        let delta = &event["choices"][0]["delta"];
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        content.push_str(delta["content"].as_str().unwrap_or_default());
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
    Err("a stream ended without [DONE]".to_owned())
}
