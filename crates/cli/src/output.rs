//! Where words go: data to stdout, everything else to stderr.

use std::io::{self, IsTerminal, Write};

use serde_json::Value;

use crate::args::{Color, Global};
use crate::error::Failure;

/// How much to say and in which form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// JSON on stdout.
    pub(crate) json: bool,
    /// No progress, no statistics.
    pub(crate) quiet: bool,
    /// How often `-v` was given.
    pub(crate) verbose: u8,
    color_out: bool,
    color_err: bool,
}

impl Output {
    /// What the options and the two streams say.
    pub(crate) fn new(global: &Global) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let colors = |is_terminal: bool| match global.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => is_terminal && !no_color,
        };
        Self {
            json: global.json,
            quiet: global.quiet,
            verbose: global.verbose,
            color_out: colors(io::stdout().is_terminal()),
            color_err: colors(io::stderr().is_terminal()),
        }
    }

    /// Writes to stdout and flushes.
    pub(crate) fn out(&self, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }

    /// One JSON document on stdout.
    pub(crate) fn document(&self, value: &Value) -> io::Result<()> {
        self.out(&format!("{value:#}\n"))
    }

    /// Writes to stderr.
    pub(crate) fn err(&self, text: &str) -> io::Result<()> {
        io::stderr().lock().write_all(text.as_bytes())
    }

    /// A line on stderr unless quiet.
    pub(crate) fn note(&self, text: &str) -> io::Result<()> {
        if self.quiet { Ok(()) } else { self.err(&format!("{text}\n")) }
    }

    /// `error:` and `hint:` on stderr.
    pub(crate) fn failure(&self, failure: &Failure) -> io::Result<()> {
        let (error, label) = (self.paint("31", "error:"), self.paint("36", "hint:"));
        let mut text = format!("{error} {}\n", plain(&failure.message));
        if let Some(hint) = failure.advice() {
            text.push_str(&format!("{label} {}\n", plain(hint)));
        }
        self.err(&text)
    }

    /// Text for stderr, dimmed where colors are on.
    pub(crate) fn dim(&self, text: &str) -> String {
        self.paint("2", text)
    }

    /// A heading for stdout.
    pub(crate) fn bold(&self, text: &str) -> String {
        if self.color_out { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.color_err && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Most characters of a message. Longer ones quote a file at length.
const MESSAGE_MAX: usize = 4000;

/// A message that may quote files from outside: without characters that steer a terminal, and not endless.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    for letter in text.chars().take(MESSAGE_MAX) {
        match letter {
            '\n' => plain.push('\n'),
            letter if letter.is_control() => plain.extend(letter.escape_default()),
            letter => plain.push(letter),
        }
    }
    let left = text.chars().count().saturating_sub(MESSAGE_MAX);
    if left > 0 {
        plain.push_str(&format!("... ({left} more characters)"));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_steer_no_terminal_and_end() {
        assert_eq!(plain("a\x1b[31mé\n\r\u{9b}b"), "a\\u{1b}[31mé\n\\r\\u{9b}b");
        let long = plain(&"é".repeat(MESSAGE_MAX + 7));
        assert!(long.ends_with("é... (7 more characters)"), "{long}");
    }
}
