//! Errors of this crate: what failed, where, what was expected, how to go on.

use std::fmt;
use std::path::PathBuf;

/// Failure to read tokenizer or template files, or to turn a chat into token ids.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file could not be read.
    #[error("{}: {source}; check that the model folder is whole", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is larger than this crate takes into memory.
    #[error("{}: {bytes} bytes, at most {limit} are read", path.display())]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file is not the JSON this crate expects.
    #[error("{file}: {detail}")]
    Json {
        /// The file's name.
        file: &'static str,
        /// Where and why.
        detail: String,
    },
    /// The tokenizer has a part that is not supported.
    #[error("tokenizer.json: {what} is {found}; supported: {supported}")]
    UnsupportedTokenizer {
        /// The part.
        what: String,
        /// What the file says.
        found: String,
        /// What would be accepted.
        supported: &'static str,
    },
    /// The tokenizer refused a text.
    #[error("the tokenizer could not encode a text of {bytes} bytes: {detail}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer said.
        detail: String,
    },
    /// The folder has no chat template.
    #[error(
        "{}: no chat_template.jinja and no chat_template in tokenizer_config.json; \
         add one, or use the completions route", dir.display()
    )]
    NoTemplate {
        /// The model folder.
        dir: PathBuf,
    },
    /// The chat template does not compile.
    #[error("chat template, line {line}: {detail}")]
    TemplateSyntax {
        /// Line in the template, from 1.
        line: usize,
        /// What is wrong there.
        detail: String,
    },
    /// The chat template called `raise_exception`.
    #[error("the chat template refuses this chat: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },
    /// The chat template failed while running.
    #[error("the chat template failed at line {line}: {detail}")]
    TemplateFailed {
        /// Line in the template, from 1 (0 if not known).
        line: usize,
        /// What went wrong.
        detail: String,
    },
    /// The chat template ran past a limit.
    #[error("the chat template went past its {what} limit of {limit}; shorten the chat")]
    TemplateLimit {
        /// `fuel`, `output` or `time`.
        what: &'static str,
        /// The limit, in fuel units, bytes or seconds.
        limit: u64,
    },
    /// The chat is far longer than [`crate::RenderOptions::prompt_max`] allows.
    #[error("the prompt has about {tokens} tokens, at most {most} are allowed; shorten the chat")]
    PromptTooLong {
        /// About how many tokens it has.
        tokens: usize,
        /// How many it may have.
        most: usize,
    },
    /// The template rendered another number of pictures than the chat has.
    #[error("the chat has {expected} pictures but the template rendered {found} picture places")]
    TemplateImages {
        /// Pictures in the messages.
        expected: usize,
        /// Picture tokens in the rendered prompt.
        found: usize,
    },
    /// The last message was to be continued but the template did not render its text (once).
    #[error(
        "messages[{index}]: the template renders the text of this message {found} times, so it cannot be \
         continued; end with a user message or set continue_final_message to false"
    )]
    NotContinuable {
        /// Index of the message.
        index: usize,
        /// How often its end was seen.
        found: usize,
    },
    /// The messages use every private-use character, so none is left to mark their text.
    #[error("messages use all private-use characters of Unicode; remove some")]
    NoFreeMarks,
    /// The request itself is wrong.
    #[error(transparent)]
    Request(#[from] RequestError),
}

/// What kind of mistake a [`RequestError`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A needed field is not there (`missing_field`).
    Missing,
    /// A field has a bad value (`invalid_value`).
    Invalid,
    /// A field asks for something this engine does not do (`unsupported_parameter`).
    Unsupported,
}

/// A mistake in a request, with the path of the field, such as `messages[2].content[1]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {detail}")]
pub struct RequestError {
    /// Path of the field in the request.
    pub path: String,
    /// Expected and found, and how to go on.
    pub detail: String,
    /// The kind of mistake.
    pub fault: Fault,
}

impl RequestError {
    pub(crate) fn invalid(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { path: path.into(), detail: detail.into(), fault: Fault::Invalid }
    }

    pub(crate) fn missing(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { path: path.into(), detail: detail.into(), fault: Fault::Missing }
    }

    pub(crate) fn unsupported(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { path: path.into(), detail: detail.into(), fault: Fault::Unsupported }
    }
}

/// A short code telling the client of something done on its behalf, with the path it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The code, such as `tool_call_unparsed`.
    pub code: &'static str,
    /// Path in the request or reply; empty if the note is about the whole.
    pub path: String,
}

impl Note {
    pub(crate) fn new(code: &'static str, path: impl Into<String>) -> Self {
        Self { code, path: path.into() }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { f.write_str(self.code) } else { write!(f, "{} {}", self.code, self.path) }
    }
}
