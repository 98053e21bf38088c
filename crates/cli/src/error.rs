//! The one place where errors of the libraries become exit codes, messages and hints.

use std::error::Error as StdError;
use std::io;
use std::path::Path;

use device::DeviceError;
use engine::{Refusal, ReplyError, StartError};
use model::ModelError;
use model::qwen3_5::{ConfigError, OpenError};
use server::{PictureProblem, ServeError};
use text::{RequestError, TextError};

/// What the process ends with (`docs/api.md` section 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Something failed that no other code names.
    Failure = 1,
    /// The command line or a file it names asks for something impossible.
    Usage = 2,
    /// The model is missing or refused.
    Model = 3,
    /// It does not fit memory.
    Memory = 4,
    /// A device or its driver.
    Device = 5,
    /// A server or the way to it.
    Network = 6,
    /// Things that must be equal differ.
    Mismatch = 7,
    /// An evaluation came out below what was asked for.
    Gate = 8,
    /// Ctrl-C.
    Interrupted = 130,
}

impl Exit {
    /// How to go on where a failure does not know better.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Self::Failure => "remove the cause and try again; -v tells more",
            Self::Usage => "`clary help COMMAND` lists what a command takes",
            Self::Model => "`clary check MODEL` looks for all that is wrong with a model's files",
            Self::Memory => "--ctx, --kv and --memory-limit decide how much memory a run needs and may use",
            Self::Device => "--device cpu always works",
            Self::Network => "check the address, and that the server runs",
            Self::Mismatch => "this must not happen: keep the command and the model's name for a report",
            Self::Gate => "-v shows which replies were wrong",
            Self::Interrupted => "start it again",
        }
    }
}

/// Why a command ends without having done its work.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: Exit,
    /// What failed, where, expected and found.
    pub(crate) message: String,
    /// How to go on.
    pub(crate) hint: Option<String>,
    /// Nobody reads the output any more: end without a word.
    pub(crate) is_broken_pipe: bool,
}

/// Linux's number for too many levels of symbolic links.
const ELOOP: i32 = 40;

pub(crate) type Result<T = ()> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure with its own code.
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hint: None, is_broken_pipe: false }
    }

    /// The command line is wrong.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Stopped by Ctrl-C.
    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "interrupted")
    }

    /// The same with a hint in place of the usual one.
    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// How to go on; nothing after Ctrl-C.
    pub(crate) fn advice(&self) -> Option<&str> {
        match self.exit {
            Exit::Interrupted => None,
            exit => Some(self.hint.as_deref().unwrap_or(exit.advice())),
        }
    }

    /// The same with a hint where it has none.
    pub(crate) fn or_hint(mut self, hint: &str) -> Self {
        self.hint.get_or_insert_with(|| hint.to_owned());
        self
    }

    /// The same with words about what was being done put before the message.
    pub(crate) fn context(self, what: &str) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }

    /// A library's error with its chain of causes.
    fn of(exit: Exit, error: &dyn StdError) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            cause = error.source();
        }
        Self::new(exit, message)
    }

    /// A file that could not be read or written.
    pub(crate) fn file(path: &Path, error: &io::Error) -> Self {
        let exit = match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidFilename => Exit::Usage,
            // A circle of links, which the standard library does not name yet.
            _ if error.raw_os_error() == Some(ELOOP) => Exit::Usage,
            _ => Exit::Failure,
        };
        Self::new(exit, format!("{}: {error}", path.display())).hint("check the path and its permissions")
    }
}

/// Writing to stdout or stderr.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let is_broken_pipe = error.kind() == io::ErrorKind::BrokenPipe;
        Self { is_broken_pipe, ..Self::of(Exit::Failure, &error).context("output") }
    }
}

impl From<checkpoint::Error> for Failure {
    fn from(error: checkpoint::Error) -> Self {
        use checkpoint::Error;
        let (exit, hint) = match &error {
            Error::NotEmpty(_) => (Exit::Usage, "name a folder that is new or empty"),
            Error::NoConfig(_) | Error::NoWeights(_) => {
                (Exit::Model, "a MODEL is a folder with config.json and safetensors files")
            }
            Error::Io { .. } | Error::NotAFile(_) => (Exit::Model, "check the path and its permissions"),
            Error::MissingShard { .. } | Error::Header { .. } | Error::NotInFile { .. } => (
                Exit::Model,
                "compare sizes and digests with the place the files came from, or fetch them again",
            ),
            _ => {
                (Exit::Model, "`clary info MODEL` shows what the folder holds; docs/formats.md what is read")
            }
        };
        Self::of(exit, &error).hint(hint)
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::of(Exit::Model, &error).hint("docs/model.md section 1 lists what config.json must say")
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        match &error {
            DeviceError::OutOfMemory { .. } => {
                Self::of(Exit::Memory, &error).hint("--ctx and --kv decide how much memory a run needs")
            }
            DeviceError::Unavailable { .. } => {
                Self::of(Exit::Device, &error).hint("--device cpu always works")
            }
            DeviceError::Failed { .. } => Self::of(Exit::Device, &error),
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Device(error) => error.into(),
            error @ ModelError::Limit { .. } => Self::of(Exit::Usage, &error),
            error @ ModelError::Step(_) => Self::of(Exit::Failure, &error),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Config(error) => error.into(),
            OpenError::Checkpoint(error) => error.into(),
            OpenError::Device(error) => error.into(),
            OpenError::Settings(error) => error.into(),
        }
    }
}

impl From<contracts::Error> for Failure {
    fn from(error: contracts::Error) -> Self {
        use contracts::Error;
        match error {
            Error::Open { source, .. } => (*source).into(),
            Error::Engine(error) => error.into(),
            Error::Refused(error) => error.into(),
            Error::Model(error) => error.into(),
            error @ Error::TooSmall { .. } => Self::of(Exit::Failure, &error),
        }
    }
}

impl From<TextError> for Failure {
    fn from(error: TextError) -> Self {
        let (exit, hint) = match error {
            TextError::Request(error) => return error.into(),
            TextError::TemplateRaised { .. }
            | TextError::TemplateFailed { .. }
            | TextError::TemplateLimit { .. } => {
                (Exit::Failure, "the model's own chat template decides which chats it takes")
            }
            TextError::PromptTooLong { .. }
            | TextError::TemplateImages { .. }
            | TextError::NotContinuable { .. }
            | TextError::NoFreeMarks => (Exit::Failure, "change the chat and try again"),
            TextError::Encode { .. } => (Exit::Failure, "change the text and try again"),
            TextError::Read { .. }
            | TextError::FileTooLarge { .. }
            | TextError::Json { .. }
            | TextError::UnsupportedTokenizer { .. }
            | TextError::NoTemplate { .. }
            | TextError::TemplateSyntax { .. } => {
                (Exit::Model, "text needs tokenizer.json and a chat template in the model folder")
            }
        };
        Self::of(exit, &error).hint(hint)
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        Self::of(Exit::Usage, &error)
    }
}

impl From<Refusal> for Failure {
    fn from(error: Refusal) -> Self {
        match &error {
            Refusal::QueueFull { .. } | Refusal::Stopped { .. } => Self::of(Exit::Failure, &error),
            Refusal::DoesNotFit { .. } => {
                Self::of(Exit::Memory, &error).hint("lower --max-tokens, or raise --memory-limit")
            }
            Refusal::PromptTooLong { .. } => {
                Self::of(Exit::Usage, &error).hint("raise --ctx, up to the model's trained length")
            }
            Refusal::EmptyPrompt | Refusal::Token { .. } | Refusal::Value { .. } => {
                Self::of(Exit::Usage, &error)
            }
        }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        match &error {
            StartError::TooSmall { .. } => Self::of(Exit::Memory, &error),
            StartError::Disk { .. } => {
                Self::of(Exit::Failure, &error).hint("--cache-disk names a folder that can be written")
            }
            StartError::DiskTooSmall { .. } => Self::of(Exit::Usage, &error)
                .hint("raise --cache-disk-max to some states at least, or leave --cache-disk out"),
            StartError::Thread(_) => Self::of(Exit::Failure, &error),
        }
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Text(error) => error.into(),
            ServeError::Request(error) => error.into(),
            ServeError::Refused(error) => error.into(),
            ServeError::Picture(error) => {
                let hint = match error.problem {
                    PictureProblem::NoVision => {
                        "`clary info MODEL` says whether it sees; --vision on says why it cannot"
                    }
                    _ => "PNG, JPEG, WebP and GIF up to 20 MiB and 50 million pixels are taken",
                };
                Self::of(Exit::Usage, &error).hint(hint)
            }
        }
    }
}

impl From<ReplyError> for Failure {
    fn from(error: ReplyError) -> Self {
        match &error {
            ReplyError::DeviceFault { .. } => Self::of(Exit::Device, &error),
            ReplyError::NumericalFault { .. } => {
                Self::of(Exit::Failure, &error).hint("`clary check MODEL` looks for values that cause this")
            }
            _ => Self::of(Exit::Failure, &error),
        }
    }
}
