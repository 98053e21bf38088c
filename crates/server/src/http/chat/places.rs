//! Where in a client's own request an error lies, for dialects that become chat requests.

use text::Note;

use super::super::error::ApiError;
use super::validate::Prepared;

/// Where the client has what became a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Path of it, such as `messages[2]` or `input[4]`.
    pub(crate) path: String,
    /// The client's name for its content.
    pub(crate) content: &'static str,
    /// Paths of its parts, where they are not those of the content in order.
    pub(crate) parts: Vec<String>,
}

impl Place {
    /// All of a message.
    pub(crate) fn whole(path: impl Into<String>) -> Self {
        Self { path: path.into(), content: "content", parts: Vec::new() }
    }
}

/// Places of all messages and tools.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    pub(crate) messages: Vec<Place>,
    /// Index of each function in the client's list.
    pub(crate) tools: Vec<usize>,
    /// The client's name for the id of a call, where its result stands.
    pub(crate) result_id: &'static str,
    /// The client's name for a function's schema.
    pub(crate) schema: &'static str,
    /// What the dialect changed, with the client's own paths.
    pub(crate) notes: Vec<Note>,
}

impl Places {
    /// The error with the client's own path, as a path or as a JSON pointer.
    pub(crate) fn located(&self, mut error: ApiError) -> ApiError {
        let Some(param) = &error.param else { return error };
        let moved = match param.starts_with("/tools/") {
            true => self.pointer(param),
            false => self.message(param).or_else(|| self.tool(param)),
        };
        if let Some(moved) = moved {
            error.message = error.message.replacen(param.as_str(), &moved, 1);
            error.param = Some(moved);
        }
        error
    }

    /// A prepared request or its error, with the client's own paths.
    pub(crate) fn prepared(&self, prepared: Result<Prepared, ApiError>) -> Result<Prepared, ApiError> {
        let mut prepared = prepared.map_err(|error| self.located(error))?;
        for note in &mut prepared.job.notes {
            if let Some(moved) = self.pointer(&note.path).or_else(|| self.message(&note.path)) {
                note.path = moved;
            }
        }
        prepared.job.notes.splice(0..0, self.notes.iter().cloned());
        Ok(prepared)
    }

    fn message(&self, param: &str) -> Option<String> {
        let (index, rest) = indexed(param, "messages[")?;
        let Place { path, content, parts } = self.messages.get(index)?;
        if rest == ".tool_call_id" {
            return Some(format!("{path}.{}", self.result_id));
        }
        Some(match indexed(rest, ".content[") {
            Some((part, rest)) => match parts.get(part) {
                Some(origin) => format!("{origin}{rest}"),
                None => format!("{path}.{content}[{part}]{rest}"),
            },
            None => format!("{path}{rest}"),
        })
    }

    fn tool(&self, param: &str) -> Option<String> {
        let (index, rest) = indexed(param, "tools[")?;
        let origin = self.tools.get(index)?;
        let rest = rest.strip_prefix(".function").unwrap_or(rest);
        let rest = match rest.strip_prefix(".parameters") {
            Some(rest) => format!(".{}{rest}", self.schema),
            None => rest.to_owned(),
        };
        Some(format!("tools[{origin}]{rest}"))
    }

    fn pointer(&self, param: &str) -> Option<String> {
        let (index, rest) = param.strip_prefix("/tools/")?.split_once('/')?;
        let origin = self.tools.get(index.parse::<usize>().ok()?)?;
        let rest = rest.strip_prefix("function/parameters")?;
        Some(format!("/tools/{origin}/{}{rest}", self.schema))
    }
}

/// What stands behind `name` and an index.
fn indexed<'a>(param: &'a str, name: &str) -> Option<(usize, &'a str)> {
    let (index, rest) = param.strip_prefix(name)?.split_once(']')?;
    Some((index.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_the_clients_own() {
        let place = |path: &str, parts: &[&str]| {
            let parts = parts.iter().map(|path| (*path).to_owned()).collect();
            Place { parts, ..Place::whole(path) }
        };
        let places = Places {
            messages: vec![
                place("system", &[]),
                place("messages[3].content[1]", &[]),
                place("messages[3]", &["messages[3].content[2].image", "messages[3].content[3]"]),
            ],
            tools: vec![4],
            result_id: "tool_use_id",
            schema: "input_schema",
            notes: Vec::new(),
        };
        for (param, wanted) in [
            ("messages[1].tool_call_id", "messages[3].content[1].tool_use_id"),
            ("messages[1].content[0]", "messages[3].content[1].content[0]"),
            ("messages[2].content[0]", "messages[3].content[2].image"),
            ("messages[2].content[1].text", "messages[3].content[3].text"),
            ("messages[9]", "messages[9]"),
            ("tools[0].function.name", "tools[4].name"),
            ("tools[0].function.parameters", "tools[4].input_schema"),
            ("/tools/0/function/parameters/properties/a", "/tools/4/input_schema/properties/a"),
            ("temperature", "temperature"),
        ] {
            let error = places.located(ApiError::invalid(param, "x"));
            assert_eq!(error.param.as_deref(), Some(wanted));
            assert!(error.message.starts_with(wanted), "{}", error.message);
        }
    }
}
