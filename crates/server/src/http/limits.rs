//! Limits of everything that comes from outside (`docs/api.md` 2.1), by name.

use std::time::Duration;

/// Deepest nesting of a body.
pub const JSON_DEPTH_MAX: usize = 64;
/// Most values in one body: each takes memory however short it is written.
pub const JSON_VALUES_MAX: usize = 4 << 20;
/// Longest `cache_salt` or `prompt_cache_key`, bytes.
pub const SALT_BYTES_MAX: usize = 256;
/// Longest request id taken over from a client, bytes.
pub const REQUEST_ID_MAX: usize = 64;
/// Most prompts of one completions request.
pub const PROMPTS_MAX: usize = 64;
/// Most token ids of `stop_token_ids`.
pub const STOP_IDS_MAX: usize = 1024;
/// Longest string value in `chat_template_kwargs`, bytes.
pub const KWARG_BYTES_MAX: usize = 256;
/// Longest model name, bytes.
pub const MODEL_NAME_MAX: usize = 1024;
/// Largest buffer of a connection's headers before the sizes below are looked at, bytes.
pub const HEADER_BUFFER: usize = 128 << 10;
/// Silence after which a stream gets a sign of life.
pub const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Limits that can be set.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// One header line, bytes.
    pub header_line: usize,
    /// All header lines, bytes.
    pub headers: usize,
    /// A request's body, bytes.
    pub body: usize,
    /// Time until the headers are whole.
    pub header_time: Duration,
    /// Longest pause while a body is read.
    pub body_idle: Duration,
    /// Bytes a client may leave unread in a stream.
    pub backlog: usize,
    /// Time a client may leave everything unread.
    pub write_time: Duration,
    /// Connections at a time.
    pub connections: usize,
    /// Requests that are parsed, rendered and tokenized at a time.
    pub preparing: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_line: 16 << 10,
            headers: 64 << 10,
            body: 64 << 20,
            header_time: Duration::from_secs(10),
            body_idle: Duration::from_secs(60),
            backlog: 1 << 20,
            write_time: Duration::from_secs(120),
            connections: 512,
            preparing: 4,
        }
    }
}

/// The longest beginning of a text that has at most so many bytes, of whole characters.
pub(crate) fn beginning(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}
