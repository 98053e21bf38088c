//! What an Ollama reply says: one JSON object a line.

use serde_json::{Map, Value, json};
use text::Piece;

use super::super::chat::Head;
use super::super::error::{ApiError, Dialect};
use super::super::flow::{Whole, Writer};
use super::super::running::{Running, Update, finish_name};

/// Which of the two routes is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Generate,
}

/// Writes lines, and keeps what a whole reply consists of.
pub(crate) struct OllamaWriter {
    head: Head,
    route: Route,
    content: String,
    thinking: String,
    calls: Vec<Value>,
}

impl OllamaWriter {
    pub(crate) fn new(head: Head, route: Route) -> Self {
        Self { head, route, content: String::new(), thinking: String::new(), calls: Vec::new() }
    }

    fn line(&self, content: &str, thinking: Option<&str>, calls: Option<Value>) -> Map<String, Value> {
        let mut line = Map::new();
        line.insert("model".into(), self.head.model.as_str().into());
        line.insert("created_at".into(), rfc3339(self.head.created).into());
        let mut said = Map::new();
        match self.route {
            Route::Chat => {
                said.insert("role".into(), "assistant".into());
                said.insert("content".into(), content.into());
            }
            Route::Generate => drop(line.insert("response".into(), content.into())),
        }
        if let Some(thinking) = thinking {
            said.insert("thinking".into(), thinking.into());
        }
        if let Some(calls) = calls {
            said.insert("tool_calls".into(), calls);
        }
        match self.route {
            Route::Chat => drop(line.insert("message".into(), said.into())),
            Route::Generate => line.extend(said),
        }
        line.insert("done".into(), false.into());
        line
    }

    fn ended(&self, running: &Running, mut line: Map<String, Value>) -> Value {
        line.insert("done".into(), true.into());
        for ended in running.ended() {
            let (stats, usage) = (&ended.outcome.stats, &ended.outcome.usage);
            let reason = match finish_name(&ended.outcome.finish) {
                "length" => "length",
                _ => "stop",
            };
            line.insert("done_reason".into(), reason.into());
            let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            for (name, value) in [
                ("total_duration", nanoseconds(stats.queued + stats.prefill + stats.decode)),
                ("load_duration", 0),
                ("prompt_eval_count", usage.prompt_tokens as u64),
                ("prompt_eval_duration", nanoseconds(stats.prefill)),
                ("eval_count", usage.completion_tokens as u64),
                ("eval_duration", nanoseconds(stats.decode)),
            ] {
                line.insert(name.into(), value.into());
            }
        }
        if let Some(clary) = self.head.clary(running) {
            line.insert("clary".into(), json!(clary));
        }
        line.into()
    }

    /// Takes a piece; the line that tells it, if there is anything to tell.
    fn piece(&mut self, piece: Piece) -> Option<Value> {
        let line = match piece {
            Piece::Content(text) if text.is_empty() => return None,
            Piece::Content(text) => {
                self.content.push_str(&text);
                self.line(&text, None, None)
            }
            Piece::Reasoning(text) => {
                self.thinking.push_str(&text);
                self.line("", Some(&text), None)
            }
            Piece::ToolCall(call) => {
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
                let call =
                    json!({"function": {"index": call.index, "name": call.name, "arguments": arguments}});
                self.calls.push(call.clone());
                self.line("", None, Some(json!([call])))
            }
            // This dialect has whole calls only.
            Piece::CallBegin { .. } | Piece::CallArguments { .. } | Piece::CallDropped { .. } => return None,
            Piece::IncompleteCall(_) | Piece::Note(_) => return None,
        };
        Some(line.into())
    }
}

fn write(line: &Value, out: &mut Vec<u8>) {
    out.extend_from_slice(line.to_string().as_bytes());
    out.push(b'\n');
}

impl Writer for OllamaWriter {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn begin(&mut self, _: &Running, _: &mut Vec<u8>) {}

    fn update(&mut self, _: &Running, update: Update, out: &mut Vec<u8>) {
        if let Update::Piece(_, piece, _) = update
            && let Some(line) = self.piece(piece)
        {
            write(&line, out);
        }
    }

    fn end(&mut self, running: &Running, out: &mut Vec<u8>) {
        write(&self.ended(running, self.line("", None, None)), out);
    }

    fn failed(&mut self, _: &Running, error: &ApiError, out: &mut Vec<u8>) {
        write(&error.body(Dialect::Ollama, ""), out);
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        // Lines have no comments; an empty piece is the nearest thing.
        write(&self.line("", None, None).into(), out);
    }
}

impl Whole for OllamaWriter {
    type Reply = Value;

    fn whole(self, running: &Running) -> Self::Reply {
        let calls = (!self.calls.is_empty()).then(|| Value::Array(self.calls.clone()));
        let thinking = Some(self.thinking.as_str()).filter(|thinking| !thinking.is_empty());
        let line = self.line(&self.content, thinking, calls);
        self.ended(running, line)
    }
}

/// A time in RFC 3339, UTC, from seconds since 1970.
pub(crate) fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's days-to-civil: eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_735_689_599), "2024-12-31T23:59:59Z");
        assert_eq!(rfc3339(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
