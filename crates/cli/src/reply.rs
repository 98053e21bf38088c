//! One reply on the terminal: content to stdout, the rest to stderr.

use std::time::Duration;

use serde_json::{Value, json};
use server::{Finish, Outcome, Stream, Update};
use text::Piece;

use crate::error::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::output::Output;

/// How often Ctrl-C is looked for while nothing comes.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What is being written, so that the two kinds do not run into each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Nothing,
    Reasoning,
    Content,
}

/// Shows a reply while it comes and returns it whole. The first Ctrl-C ends it ([`Finish::Cancelled`]).
pub(crate) fn show(mut stream: Stream, output: &Output, interrupt: &Interrupt) -> Result<Outcome> {
    let mut writer = Writer { output, side: Side::Nothing, line_is_open: false };
    interrupt.watch(true);
    let outcome = loop {
        if interrupt.take() {
            stream.cancel();
        }
        match stream.next(LOOK_EVERY) {
            Update::Piece(piece) => writer.piece(piece)?,
            Update::Admitted(_) | Update::Idle => {}
            Update::Finished(outcome) => break *outcome,
        }
    };
    interrupt.watch(false);
    writer.end_line()?;
    match outcome.finish {
        Finish::Failed(error) => Err(Failure::from(error)),
        _ => Ok(outcome),
    }
}

struct Writer<'a> {
    output: &'a Output,
    side: Side,
    line_is_open: bool,
}

impl Writer<'_> {
    fn piece(&mut self, piece: Piece) -> Result {
        match piece {
            Piece::Content(text) => self.write(Side::Content, &text),
            Piece::Reasoning(text) => self.write(Side::Reasoning, &text),
            Piece::ToolCall(call) => {
                self.end_line()?;
                self.write(Side::Content, &format!("{}\n", call_line(&call.name, &call.arguments)))
            }
            Piece::IncompleteCall(_) => {
                Ok(self.output.note("note: a tool call was cut by the length limit")?)
            }
            Piece::Note(note) if self.output.verbose > 0 => Ok(self.output.note(&format!("note: {note}"))?),
            // Calls are shown when they are whole.
            Piece::CallBegin { .. } | Piece::CallArguments { .. } | Piece::CallDropped { .. } => Ok(()),
            Piece::Note(_) => Ok(()),
        }
    }

    fn write(&mut self, side: Side, text: &str) -> Result {
        if self.output.json || side == Side::Reasoning && self.output.quiet {
            return Ok(());
        }
        if side != self.side {
            self.end_line()?;
            self.side = side;
        }
        match side {
            Side::Content => self.output.out(text)?,
            _ => self.output.err(&self.output.dim(text))?,
        }
        self.line_is_open = !text.ends_with('\n');
        Ok(())
    }

    fn end_line(&mut self) -> Result {
        if std::mem::take(&mut self.line_is_open) {
            match self.side {
                Side::Content => self.output.out("\n")?,
                _ => self.output.err("\n")?,
            }
        }
        Ok(())
    }
}

/// `name(key: value, …)`.
pub(crate) fn call_line(name: &str, arguments: &str) -> String {
    let arguments = match serde_json::from_str(arguments) {
        Ok(Value::Object(map)) => map.iter().map(|(key, value)| format!("{key}: {value}")).collect(),
        _ => vec![arguments.to_owned()],
    };
    format!("{name}({})", arguments.join(", "))
}

/// The line of numbers after a reply.
pub(crate) fn statistics(outcome: &Outcome) -> String {
    let (usage, stats) = (&outcome.usage, &outcome.stats);
    let computed = usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens);
    let mut line = format!("prompt {} tokens", usage.prompt_tokens);
    if usage.cached_tokens > 0 {
        line.push_str(&format!(", {} from the cache", usage.cached_tokens));
    }
    line.push_str(&format!(", {}", rate(computed, stats.prefill)));
    line.push_str(&format!(" | reply {} tokens", usage.completion_tokens));
    if usage.reasoning_tokens > 0 {
        line.push_str(&format!(", {} of them reasoning", usage.reasoning_tokens));
    }
    line.push_str(&format!(", {}", rate(usage.completion_tokens, stats.decode)));
    match outcome.finish {
        Finish::Length => line.push_str(" | cut by the length limit"),
        Finish::Cancelled => line.push_str(" | stopped"),
        _ => {}
    }
    line
}

fn rate(tokens: usize, time: Duration) -> String {
    match per_second(tokens, time) {
        Some(rate) => format!("{rate:.1} tok/s"),
        None => "0 s".to_owned(),
    }
}

fn per_second(tokens: usize, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// A reply as one JSON document.
pub(crate) fn document(outcome: &Outcome, seed: u64, load: Duration) -> Value {
    let (reply, usage, stats) = (&outcome.reply, &outcome.usage, &outcome.stats);
    let calls = reply.calls.iter().map(|call| json!({"name": call.name, "arguments": call.arguments}));
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    json!({
        "content": reply.content,
        "reasoning_content": reply.reasoning,
        "tool_calls": calls.collect::<Vec<_>>(),
        "finish_reason": outcome.finish.name(),
        "seed": seed,
        "token_ids": outcome.ids,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        },
        "timings": {
            "load_ms": ms(load),
            "prefill_ms": ms(stats.prefill),
            "prefill_tokens": usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
            "decode_ms": ms(stats.decode),
            "decode_tokens": usage.completion_tokens,
            "tokens_per_s": per_second(usage.completion_tokens, stats.decode),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_readable() {
        assert_eq!(call_line("f", r#"{"a":1,"b":"x y"}"#), r#"f(a: 1, b: "x y")"#);
        assert_eq!(call_line("f", "{}"), "f()");
    }
}
